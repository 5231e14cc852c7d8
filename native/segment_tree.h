/* segment_tree.h: a sum and minimum tree over `capacity` leaves, in float64.
 *
 * The priority index of one replay rank. Leaf i holds the mass of slot i; a mass of zero means
 * "never drawn". Each inner node holds the sum of its two children and the minimum over the leaves
 * below it whose mass is above zero. A parent is always recomputed from its children and never
 * changed by a delta, so the total after any history equals, to the last bit, the total of a fresh
 * tree filled with the same leaves.
 *
 * Calls take batches: k rows in, k rows out. W below is the smallest power of two >= capacity.
 *
 * Refusals: a call that returns a row checks every row before it changes the tree or writes an
 * output. On a refusal nothing at all was changed or written. -1 is success.
 *
 * Ownership: the caller owns every array; none is kept after the call. A call's arrays must not
 * overlap. k <= 0 is a call that does nothing and succeeds; the arrays are then not read.
 *
 * Limits:
 *  - capacity from 1 to what the memory holds; 32 * W bytes are used.
 *  - The sum of all masses must stay <= DBL_MAX. Above it the total is infinite: leaves returned
 *    are still valid and above zero, but no longer drawn in proportion.
 *  - The calling thread is in the default floating point mode: round to nearest, denormals kept.
 *  - One tree is for one thread at a time; different trees are independent.
 */
#ifndef SEGMENT_TREE_H
#define SEGMENT_TREE_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct segment_tree segment_tree;

/* A new tree with every leaf zero. NULL when capacity < 1, when the size overflows, or when memory
 * runs out. The caller owns the result and ends it with segment_tree_destroy. O(W). */
segment_tree *segment_tree_create(int64_t capacity);

/* Frees the tree. NULL is fine. O(1). */
void segment_tree_destroy(segment_tree *tree);

/* The number of slots, as given to segment_tree_create. O(1). */
int64_t segment_tree_capacity(const segment_tree *tree);

/* Leaf slots[row] = mass[row] for each of the k rows; of duplicate slots the last row wins, in the
 * sum and in the minimum alike. Zero empties a slot, -0.0 is stored as +0.0, denormals are kept.
 * Returns -1, or the first row whose slot is outside [0, capacity) or whose mass is NaN, infinite
 * or negative. O(k log W), and never more than O(k + W). */
int64_t segment_tree_set(segment_tree *tree, const int64_t *slots, const double *mass, int64_t k);

/* mass[row] = leaf slots[row] for each of the k rows.
 * Returns -1, or the first row whose slot is outside [0, capacity). O(k). */
int64_t segment_tree_get(const segment_tree *tree, const int64_t *slots, double *mass, int64_t k);

/* For each of the k targets, the leaf i with prefix_sum(i) <= target < prefix_sum(i + 1), and that
 * leaf's mass. The prefix sums are those of the descent: at each node a target below the left
 * child's sum goes left; any other goes right and is reduced by that sum.
 *
 * A target >= total, +infinity included, is first lowered to the largest double below the total.
 * Whatever the rounding, the leaf returned is inside [0, capacity) and its mass is above zero.
 *
 * Returns -1, or the first row whose target is NaN or negative. An empty tree (total == 0) has no
 * leaf to return: row 0 is refused when k > 0. O(k log W). */
int64_t segment_tree_find_prefix(const segment_tree *tree, const double *targets, int64_t *slots,
                                 double *mass, int64_t k);

/* The sum of all masses; 0 when the tree is empty. O(1). */
double segment_tree_total(const segment_tree *tree);

/* The smallest mass above zero; +infinity when the tree is empty. O(1). */
double segment_tree_minimum(const segment_tree *tree);

/* Verifies the whole tree to the last bit: leaves are finite, not negative and zero from capacity
 * on, and each inner node is the sum and the minimum of its children. Returns -1, or the number of
 * the lowest bad node, where the root is 1, the children of n are 2n and 2n + 1, and leaf i is
 * W + i. O(W). */
int64_t segment_tree_check(const segment_tree *tree);

#ifdef __cplusplus
}
#endif

#endif
