/* wide_tree.h: the wide tree's layout, shared by wide_tree.c and the kernels it is compiled with.
 *
 * Leaves lie in blocks of one cache line: 8 float64 or 16 float32. sum[1] and min[1] have an entry
 * for each block; eight entries are a node, and a node is an entry one level up, until a level, the
 * top, has at most WIDE_TOP entries. Missing entries are zero (sum) and infinity (min).
 *
 * Order of addition. A block or node is four runs of consecutive elements, in memory one vector lane
 * each: element e lies at (e % R) * 4 + e / R, where R is 2, or 4 in a float32 block. r_i is the sum of
 * run i from the left, P_0 = 0, P_{i+1} = P_i + r_i, and P_4 is the total. The inclusive prefix sum of
 * an element is P_i + (the run's sum up to it). Rounding is monotone, so prefix sums never fall, and an
 * element of zero has the prefix sum of the one before it: no target can fall on it. inclusive[l] keeps
 * these sums in element order; levels 0 and 1 (but not the top) make them when they are read.
 *
 * The top: prefix[8n + j] = base_n + (inclusive prefix sum of element j - 1 of node n), where base_0 = 0
 * and base_{n+1} = base_n + total of node n. The last base is the total.
 */
#ifndef WIDE_TREE_H
#define WIDE_TREE_H

#include "tree_kind.h"

#define WIDE_FAN 8
#ifndef WIDE_TOP
#define WIDE_TOP 512
#endif
#define WIDE_LEVELS 22 /* of the largest capacity, 2^58, with a top of 8 */

#define LINE_WORDS 8
#define LINE_NODES (LINE_WORDS * 64)

/* The nodes of a level that are to be redone: a bit for each, and whether a line of bits has any. */
typedef struct {
    uint64_t *nodes;
    uint16_t *lines;
} dirty_map;

typedef struct {
    segment_tree head;
    int narrow; /* leaves are float32 */
    int top;    /* the top level */
    void *leaves;
    int64_t entries[WIDE_LEVELS]; /* of each level, a multiple of 8; [0] counts leaves */
    double *sum[WIDE_LEVELS], *min[WIDE_LEVELS], *inclusive[WIDE_LEVELS];
    dirty_map dirty_sum[WIDE_LEVELS], dirty_min[WIDE_LEVELS];
    int searchable; /* prefix and guide belong to the sums */
    double prefix[WIDE_TOP + 1 + WIDE_FAN];
    int32_t guide[WIDE_TOP + 2];
    void *arena; /* one block of memory for the leaves and for all arrays of the levels */
    size_t arena_bytes;
} wide_tree;

/* Input: a number of nodes. Result: the lines of bits they take; one at least. */
static inline int64_t dirty_lines(int64_t nodes)
{
    return nodes / LINE_NODES + 1;
}

#endif
