/* wide_node.h: arithmetic within one block or node of the wide tree, in the order that wide_tree.h gives.
 *
 * `narrow`, whether leaves are float32, is a constant wherever it is passed, so each function is compiled
 * for both leaf types.
 */
#ifndef WIDE_NODE_H
#define WIDE_NODE_H

#include <math.h>
#include <string.h>

#include "kernels.h"
#include "wide_tree.h"

/* A block or node of R elements a run: the runs' sums, what comes before each run, and the inclusive
 * prefix sum of element j of every run. */
typedef struct {
    v4 sum, start, upto[4];
} runs;

/* Input: a leaf type. Result: the elements a run, and the leaves a block and their logarithm: numbers
 * are not negative, and a shift is cheaper than a signed division. */
INLINE int run_length(int narrow)
{
    return narrow ? 4 : 2;
}

INLINE int block_shift(int narrow)
{
    return narrow ? 4 : 3;
}

/* Input: an element's number in its block or node. Result: where it lies. */
INLINE int64_t place_of(int64_t element, int narrow)
{
    return (element & (run_length(narrow) - 1)) * 4 + (element >> (block_shift(narrow) - 2));
}

/* Input: a block's address. Result: element j of every run, in float64. */
INLINE v4 elements(const void *block, int j, int narrow)
{
    if (narrow)
        return __builtin_convertvector(*((const f4 *)block + j), v4);
    return *((const v4 *)block + j);
}

/* Input: a block's address. Result: the sum of each run. */
INLINE v4 run_sums(const void *block, int narrow)
{
    v4 sum = elements(block, 0, narrow);
    for (int j = 1; j < run_length(narrow); j++)
        sum += elements(block, j, narrow);
    return sum;
}

/* Input: the sums of the runs. Result: what comes before each: 0, r_0, r_0 + r_1, (r_0 + r_1) + r_2. */
INLINE v4 run_starts(v4 sum)
{
    v4 zero = {0.0, 0.0, 0.0, 0.0};
    v4 pairs = sum + SHUFFLE(sum, sum, 1, 0, 3, 2);
    return SHUFFLE(sum, zero, 4, 0, 4, 2) + SHUFFLE(pairs, zero, 4, 4, 0, 0);
}

/* Input: the sums of the runs. Result: the total of the block or node. */
INLINE double total_of(v4 sum)
{
    return (run_starts(sum) + sum)[3];
}

/* Input: a block's address. Result: its prefix sums. */
INLINE runs prefix_sums(const void *block, int narrow)
{
    runs node;
    v4 within = elements(block, 0, narrow);
    node.sum = run_sums(block, narrow);
    node.start = run_starts(node.sum);
    for (int j = 0; j < run_length(narrow); j++) {
        node.upto[j] = node.start + within;
        if (j + 1 < run_length(narrow))
            within += elements(block, j + 1, narrow);
    }
    return node;
}

/* Input: 2 or 4 vectors of prefix sums and a target. Result: how many of them are not above it. Packing
 * the comparisons into bytes takes fewer instructions than a bit mask of each. */
INLINE int count_up_to(const v4 *upto, int length, double target)
{
    v4 t = {target, target, target, target};
#ifdef __AVX2__
    __m256i low = _mm256_packs_epi32((__m256i)(upto[0] <= t), (__m256i)(upto[1] <= t));
    if (length == 2)
        return __builtin_popcount((unsigned)_mm256_movemask_epi8(low)) / 4;
    __m256i high = _mm256_packs_epi32((__m256i)(upto[2] <= t), (__m256i)(upto[3] <= t));
    return __builtin_popcount((unsigned)_mm256_movemask_epi8(_mm256_packs_epi16(low, high))) / 2;
#else
    m4 count = {0, 0, 0, 0};
    for (int j = 0; j < length; j++)
        count -= upto[j] <= t;
    return (int)(count[0] + count[1] + count[2] + count[3]);
#endif
}

/* Input: a sum above zero. Result: the largest double below it. */
INLINE double below(double sum)
{
    int64_t bits;
    memcpy(&bits, &sum, sizeof bits);
    bits -= 1;
    memcpy(&sum, &bits, sizeof bits);
    return sum;
}

/* Input: the prefix sums of a block or node that is not empty, and a target. Result: the element that
 * holds it. A target that rounding has left beyond the block is first lowered below its total. */
INLINE int64_t element_of(const runs *node, double *target, int narrow)
{
    const int length = run_length(narrow);
    int64_t child = count_up_to(node->upto, length, *target);
    if (__builtin_expect(child == 4 * length, 0)) {
        *target = below(node->upto[length - 1][3]);
        child = count_up_to(node->upto, length, *target);
    }
    return child;
}

/* Input: a node without kept prefix sums, not empty, and a target. Result: the child that holds the
 * target, which becomes what is left over in it. */
INLINE int64_t descend_summed(const double *sum, double *target)
{
    runs node = prefix_sums(sum, 0);
    int64_t child = element_of(&node, target, 0);
    double before[8];
    memcpy(before, &node.start, sizeof node.start);
    memcpy(before + 4, node.upto, sizeof node.start);
    *target -= before[place_of(child, 0)];
    return child;
}

/* Input: the eight inclusive prefix sums of a node that is not empty, and a target. Result: as above. */
INLINE int64_t descend_node(const double *inclusive, double *target)
{
    const v4 *upto = (const v4 *)inclusive;
    int64_t child = count_up_to(upto, 2, *target);
    if (__builtin_expect(child == WIDE_FAN, 0)) {
        *target = below(inclusive[WIDE_FAN - 1]);
        child = count_up_to(upto, 2, *target);
    }
    /* Without a branch, which would be mispredicted for every eighth child. */
    int64_t bits, not_first = child != 0;
    memcpy(&bits, &inclusive[child - not_first], sizeof bits);
    bits &= -not_first;
    double before;
    memcpy(&before, &bits, sizeof before);
    *target -= before;
    return child;
}

/* Input: two vectors. Result: the smaller of each lane. */
INLINE v4 smaller(v4 a, v4 b)
{
#ifdef __AVX2__
    return (v4)_mm256_min_pd((__m256d)a, (__m256d)b);
#else
    m4 less = a < b;
    return (v4)((less & (m4)a) | (~less & (m4)b));
#endif
}

/* Input: a vector. Result: its smallest lane. */
INLINE double smallest_lane(v4 least)
{
    least = smaller(least, SHUFFLE(least, least, 2, 3, 0, 1));
    return smaller(least, SHUFFLE(least, least, 1, 0, 3, 2))[0];
}

/* Input: a block's address. Result: its smallest leaf above zero, or infinity. */
INLINE double block_minimum(const void *block, int narrow)
{
    const m4 infinity = (m4)(v4){INFINITY, INFINITY, INFINITY, INFINITY};
    v4 least = (v4)infinity;
    for (int j = 0; j < run_length(narrow); j++) {
        v4 mass = elements(block, j, narrow);
        least = smaller((v4)((m4)mass | (infinity & (mass == (v4){0}))), least);
    }
    return smallest_lane(least);
}

/* Input: the eight minima of a node. Result: the smallest. */
INLINE double node_minimum(const double *min)
{
    return smallest_lane(smaller(*(const v4 *)min, *((const v4 *)min + 1)));
}

#endif
