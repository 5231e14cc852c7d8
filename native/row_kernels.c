/* row_kernels.c: the work on rows that all kinds of tree share; compiled once for each instruction set. */
#include <string.h>

#include "kernels.h"
#include "tree_kind.h"

/* Input: rows of an update. Result: whether one of them must be refused; without branches. A NaN
 * compares false. */
static int any_refused(int64_t capacity, double largest, const int64_t *slots, const double *mass, int64_t k)
{
    m4 bad = {0, 0, 0, 0};
    int64_t row = 0;
    for (; row + 4 <= k; row += 4) {
        m4 slot = *(const um4 *)(slots + row);
        v4 value = *(const u4 *)(mass + row);
        bad |= (slot < 0) | (slot >= capacity) | ~((value >= 0.0) & (value <= largest));
    }
    int refused = (bad[0] | bad[1] | bad[2] | bad[3]) != 0;
    for (; row < k; row++)
        refused |= slots[row] < 0 || slots[row] >= capacity || !(mass[row] >= 0.0 && mass[row] <= largest);
    return refused;
}

/* Input: four numbers of a SplitMix64 stream before they are mixed. Result: uniforms in [0, 1): the
 * upper 52 bits are the fraction of a number in [1, 2). */
INLINE v4 uniforms(w4 bits)
{
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9u;
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EBu;
    bits ^= bits >> 31;
    return (v4)(bits >> 12 | 0x3FF0000000000000u) - 1.0;
}

/* Input: the state of a SplitMix64 stream and the width of a stratum. Result: a target in each. */
static void targets(uint64_t state, double width, double *target, int64_t k)
{
    const uint64_t gamma = SPLITMIX_GAMMA;
    w4 bits = state + (w4){gamma, 2 * gamma, 3 * gamma, 4 * gamma};
    v4 rows = {0.0, 1.0, 2.0, 3.0};
    for (int64_t row = 0; row < k; row += 4) {
        v4 four = (rows + uniforms(bits)) * width;
        memcpy(target + row, &four, (size_t)(k - row < 4 ? k - row : 4) * sizeof(double));
        bits += 4 * gamma;
        rows += 4.0;
    }
}

static void divide(const double *mass, double total, double *probability, int64_t k)
{
    for (int64_t row = 0; row < k; row++)
        probability[row] = mass[row] / total;
}

const row_kernels OF_ISA(rows) = {any_refused, targets, divide};
