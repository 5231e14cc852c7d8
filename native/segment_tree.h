/* segment_tree.h: a mass for each of `capacity` slots, and draws in proportion to it.
 *
 * The priority index of one replay rank. A slot of mass zero is empty: it is never drawn, and it is
 * no candidate for the minimum. There are four kinds behind one contract:
 *
 *   SEGMENT_TREE_WIDE64  fan-out 8, one cache line a node, leaves float64 (wide_tree.c): the default
 *   SEGMENT_TREE_WIDE32  the same with leaves float32: half the memory, the sums are still float64
 *   SEGMENT_TREE_BINARY  two children a node; on an accelerator where built for one (binary_tree.c)
 *   SEGMENT_TREE_RANKED  draws by rank: the r-th largest counts as r^-alpha (ranked_tree.c)
 *
 * A parent is always recomputed from its children and never changed by a delta, so the total after
 * any history equals, to the last bit, the total of a fresh tree filled with the same masses.
 *
 * Calls take batches: k rows in, k rows out.
 *
 * Errors: a call that returns a row checks every row before it changes the tree or writes an output. If
 * it returns a row, nothing has changed. -1 is success.
 *
 * Ownership: the caller owns every array; none is kept after the call. A call's arrays must not
 * overlap. k <= 0 is a call that does nothing and succeeds; the arrays are then not read.
 *
 * Limits:
 *  - The sum of all masses must stay <= DBL_MAX. Above it the total is infinite: leaves returned
 *    are still valid and above zero, but no longer drawn in proportion.
 *  - The calling thread is in the default floating point mode: round to nearest, denormals kept.
 *  - Only one thread at a time may use a tree; different trees are independent.
 */
#ifndef SEGMENT_TREE_H
#define SEGMENT_TREE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct segment_tree segment_tree;

enum { SEGMENT_TREE_WIDE64, SEGMENT_TREE_WIDE32, SEGMENT_TREE_BINARY, SEGMENT_TREE_RANKED };

#define SEGMENT_TREE_NOT_CHECKED (-2)

/* r^-alpha stays above zero for any rank r that fits into memory. */
#define SEGMENT_TREE_LARGEST_ALPHA 10.0

/* How a binary tree brings its sums up to date: leaf to root for each row, O(k log capacity); all leaves
 * and then every node, O(k + capacity); or all leaves and then the nodes above them, one level after the
 * other, O(k log capacity). AUTO is one of the last two; segment_tree_binary_form says which. All give the
 * same bits. */
enum { BINARY_AUTO, BINARY_ELEMENT, BINARY_REBUILD, BINARY_LEVELS };

/* A new tree with every slot empty. NULL when the kind is unknown, when capacity < 1, when the size
 * overflows, or when memory runs out. `alpha` is the exponent of a ranked tree, from 0 to
 * SEGMENT_TREE_LARGEST_ALPHA (or the result is NULL), and not read for the others. `portable` keeps a
 * tree from using AVX2 where the machine has it; the results are the same. The caller owns the tree and
 * frees it with segment_tree_destroy. O(capacity). */
segment_tree *segment_tree_create(int kind, int64_t capacity, double alpha, int portable);

/* Frees the tree. NULL is fine. O(1). */
void segment_tree_destroy(segment_tree *tree);

/* The number of slots, as given to segment_tree_create. O(1). */
int64_t segment_tree_capacity(const segment_tree *tree);

/* The memory the tree holds, in bytes: that of the most blocks it ever used, for a ranked tree. O(1). */
int64_t segment_tree_bytes(const segment_tree *tree);

/* The name of what runs the calls: "avx2", "portable", "cpu", "openacc host" or "openacc device". A constant. */
const char *segment_tree_backend(const segment_tree *tree);

/* mass of slots[row] = mass[row] for each of the k rows; of duplicate slots the last row wins, in the
 * sum and in the minimum alike. Zero empties a slot, -0.0 is stored as +0.0, denormals are kept.
 * Float32 leaves hold the nearest float32, and the smallest one above zero where that would be zero.
 * A ranked tree takes priorities instead of masses.
 * Returns -1, or the first row whose slot is outside [0, capacity) or whose mass is NaN, infinite,
 * negative or above the largest finite leaf. Wide: O(k log capacity), and a look at two flags for every
 * 2^18 slots (2^19 with float32 leaves). Binary: see the forms. Ranked: a row moves at most one block of
 * 256 entries, and the list of blocks where one splits or two merge, O(k (256 + capacity / 256)). */
int64_t segment_tree_set(segment_tree *tree, const int64_t *slots, const double *mass, int64_t k);

/* segment_tree_set of the slots first, first + 1, ..., first + k - 1, each modulo the capacity.
 * Returns -1, or the first row that does not fit: 0 when `first` is outside [0, capacity), capacity
 * when k > capacity, else the first row whose mass is refused. O(k + log capacity), wide with the flags of
 * segment_tree_set. Binary: BINARY_ELEMENT takes O(k log capacity) and BINARY_REBUILD O(capacity);
 * BINARY_AUTO never rebuilds here. Ranked: as segment_tree_set, but sorted once, O(k log k),
 * for all slots, and for more than 256 of an empty tree. */
int64_t segment_tree_set_range(segment_tree *tree, int64_t first, const double *mass, int64_t k);

/* mass[row] = what slots[row] was set to (rounded to its leaf), for each of the k rows.
 * Returns -1, or the first row whose slot is outside [0, capacity). O(k). */
int64_t segment_tree_get(const segment_tree *tree, const int64_t *slots, double *mass, int64_t k);

/* mass[slot] = what the slot was set to, for all `capacity` slots. O(capacity). */
void segment_tree_save(const segment_tree *tree, double *mass);

/* The inverse of segment_tree_save, into any kind of tree of that capacity.
 * Returns -1, or the first slot whose mass is refused. O(capacity), ranked O(capacity log capacity). */
int64_t segment_tree_load(segment_tree *tree, const double *mass);

/* For each of the k targets, the slot i with prefix_sum(i) <= target < prefix_sum(i + 1), and that
 * slot's mass. The prefix sums are those of the descent: each kind's source says in which order it
 * adds.
 *
 * A target >= total, +infinity included, is first lowered to the largest double below the total.
 * Whatever the rounding, the slot returned is inside [0, capacity) and its mass is above zero.
 *
 * Returns -1, or the first row whose target is NaN or negative. An empty tree (total == 0) has no
 * slot to return: row 0 is refused when k > 0. O(k log capacity), and the first search after an update
 * O(capacity / 128) more for a ranked tree, which counts its blocks. */
int64_t segment_tree_find_prefix(const segment_tree *tree, const double *targets, int64_t *slots,
                                 double *mass, int64_t k);

/* segment_tree_find_prefix of the k targets (i + u_i) * (total / k), i from 0 to k - 1: one uniform
 * draw from each of k equal strata of the total. u_i is (x_i >> 12) * 2^-52, where x_i are the next k
 * outputs of SplitMix64 from *state, which moves on by k. probability[row] = mass[row] / total.
 * Returns -1, or 0 when the tree is empty and k > 0; then *state has not moved. O() as for a search. */
int64_t segment_tree_draw(const segment_tree *tree, uint64_t *state, int64_t *slots, double *mass,
                          double *probability, int64_t k);

/* The sum of all masses; 0 when the tree is empty. O(1). */
double segment_tree_total(const segment_tree *tree);

/* The smallest mass above zero; +infinity when the tree is empty. O(1). */
double segment_tree_minimum(const segment_tree *tree);

/* Verifies the whole structure to the last bit: slots hold what they may, and everything above them is
 * what a fresh tree would have. Returns -1, or the number of a bad node; each kind's source says how
 * it counts them. Returns SEGMENT_TREE_NOT_CHECKED if a wide tree, which is compared with a new one, gets
 * no memory for that. O(capacity). */
int64_t segment_tree_check(const segment_tree *tree);

/* How a binary tree updates from now on: one form always, or BINARY_AUTO, as it starts: BINARY_LEVELS
 * below k = crossover and, in segment_tree_set, BINARY_REBUILD from there on. Where rebuilding begins to
 * win depends on the machine; the default is never. BINARY_ELEMENT also searches one row after the other,
 * and is done as BINARY_LEVELS on a device. Returns 0, or -1 when the tree is of another kind or the form is unknown. */
int segment_tree_binary_form(segment_tree *tree, int form, int64_t crossover);

/* Whether binary trees were compiled for an accelerator: 1, or 0. O(1). */
int segment_tree_for_device(void);

/* From now on new binary trees live on the host even where there is an accelerator. Trees made before
 * must not be used any more. O(1). */
void segment_tree_use_host(void);

#ifdef __cplusplus
}
#endif

#endif
