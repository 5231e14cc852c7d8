/* segment_tree.c: the plain binary tree behind segment_tree.h.
 *
 * Nodes lie in one array, numbered as in a heap: the root is 1, the children of n are 2n and
 * 2n + 1, leaf i is width + i. Sum and minimum of a node lie side by side, so that an update reads
 * two siblings from one cache line.
 */
#include "segment_tree.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>

/* Wider intermediate results would make sums differ between machines. */
_Static_assert(FLT_EVAL_METHOD == 0, "doubles must be evaluated as doubles");

#define CACHE_LINE 64

typedef struct {
    double sum;
    double min;
} node;

struct segment_tree {
    int64_t capacity;
    int64_t width;
    node *nodes;
};

/* Input: a mass. Result: whether a leaf may hold it. False for NaN, as every comparison is. */
static int is_mass(double mass)
{
    return mass >= 0.0 && mass <= DBL_MAX;
}

/* Input: a slot. Result: whether the tree has it. */
static int is_slot(const segment_tree *tree, int64_t slot)
{
    return slot >= 0 && slot < tree->capacity;
}

/* Input: an allowed mass. Result: its leaf. An empty leaf is no candidate for the minimum, hence
 * infinity there. Adding +0.0 turns -0.0 into +0.0 and leaves all else as it is. */
static node leaf_of(double mass)
{
    node leaf = {mass + 0.0, mass > 0.0 ? mass : INFINITY};
    return leaf;
}

/* Input: the two children. Result: what their parent must be. The only place that adds. */
static node parent_of(node left, node right)
{
    node parent = {left.sum + right.sum, left.min < right.min ? left.min : right.min};
    return parent;
}

/* Input: the node array and the number of an inner node. Result: that node, made from its
 * children. */
static void recompute(node *nodes, int64_t n)
{
    nodes[n] = parent_of(nodes[2 * n], nodes[2 * n + 1]);
}

/* Input: capacity >= 1. Result: the smallest power of two >= capacity, or 0 when a node array of
 * twice that many nodes could not be addressed. */
static int64_t padded_width(int64_t capacity)
{
    const int64_t limit = (int64_t)(PTRDIFF_MAX / (2 * sizeof(node) * 2));
    int64_t width = 1;
    while (width < capacity) {
        if (width > limit)
            return 0;
        width *= 2;
    }
    return width;
}

/* Input: a width. Result: 2 * width empty nodes, owned by the caller, or NULL without memory.
 * Aligned, so that no pair of siblings crosses a cache line. */
static node *empty_nodes(int64_t width)
{
    size_t bytes = 2 * (size_t)width * sizeof(node);
    if (bytes < CACHE_LINE)
        bytes = CACHE_LINE;
    node *nodes = aligned_alloc(CACHE_LINE, bytes);
    if (nodes == NULL)
        return NULL;
    for (int64_t n = 0; n < 2 * width; n++)
        nodes[n] = leaf_of(0.0);
    return nodes;
}

/* Input: a number of slots. Result: an empty tree, owned by the caller; NULL when capacity < 1,
 * too large to address, or without memory. */
segment_tree *segment_tree_create(int64_t capacity)
{
    if (capacity < 1)
        return NULL;
    int64_t width = padded_width(capacity);
    if (width == 0)
        return NULL;
    segment_tree *tree = malloc(sizeof *tree);
    if (tree == NULL)
        return NULL;
    tree->capacity = capacity;
    tree->width = width;
    tree->nodes = empty_nodes(width);
    if (tree->nodes == NULL) {
        free(tree);
        return NULL;
    }
    return tree;
}

/* Input: a tree or NULL. Result: its memory is given back; the pointer is dead. */
void segment_tree_destroy(segment_tree *tree)
{
    if (tree == NULL)
        return;
    free(tree->nodes);
    free(tree);
}

/* Input: a tree. Result: its number of slots. */
int64_t segment_tree_capacity(const segment_tree *tree)
{
    return tree->capacity;
}

/* Input: a tree whose leaves below slots[0..k) were just written and whose levels below `level`
 * are right. Result: this level is right too. Rows that share a parent with the row before them,
 * as neighbouring slots do, cost nothing; a level with no more nodes than rows is redone whole,
 * in order, which is less work and reads memory forwards. */
static void recompute_level(segment_tree *tree, const int64_t *slots, int64_t k, int level)
{
    int64_t first = tree->width >> level;
    if (first <= k) {
        for (int64_t n = first; n < 2 * first; n++)
            recompute(tree->nodes, n);
        return;
    }
    int64_t previous = 0;
    for (int64_t row = 0; row < k; row++) {
        int64_t n = first + (slots[row] >> level);
        if (n != previous)
            recompute(tree->nodes, n);
        previous = n;
    }
}

/* Input: k slots and masses, owned by the caller. Result: -1 and the leaves and all nodes above
 * them are up to date, or the first bad row and an unchanged tree. Every leaf is written before
 * any parent is made: that makes the last duplicate win in the sum and the minimum alike. */
int64_t segment_tree_set(segment_tree *tree, const int64_t *slots, const double *mass, int64_t k)
{
    for (int64_t row = 0; row < k; row++)
        if (!is_slot(tree, slots[row]) || !is_mass(mass[row]))
            return row;
    if (k <= 0)
        return -1;
    for (int64_t row = 0; row < k; row++)
        tree->nodes[tree->width + slots[row]] = leaf_of(mass[row]);
    for (int level = 1; tree->width >> level > 0; level++)
        recompute_level(tree, slots, k, level);
    return -1;
}

/* Input: k slots and room for k masses, both owned by the caller. Result: -1 and the masses are
 * filled in, or the first bad row and nothing is written. */
int64_t segment_tree_get(const segment_tree *tree, const int64_t *slots, double *mass, int64_t k)
{
    for (int64_t row = 0; row < k; row++)
        if (!is_slot(tree, slots[row]))
            return row;
    for (int64_t row = 0; row < k; row++)
        mass[row] = tree->nodes[tree->width + slots[row]].sum;
    return -1;
}

/* Input: k nodes of one level, each with a sum above zero, and the target left over in each.
 * Result: both are moved to the child that holds the target. When rounding has left a target
 * beyond the whole node, an empty right child is still never entered; an empty left one is not
 * either, because every target is >= 0. All rows take one step before any takes the next, so that
 * their cache misses overlap. */
static void descend_level(const node *nodes, int64_t *at, double *left_over, int64_t k)
{
    for (int64_t row = 0; row < k; row++) {
        const node *children = &nodes[2 * at[row]];
        double left = children[0].sum;
        int right = (left_over[row] >= left) & (children[1].sum > 0.0);
        left_over[row] -= right ? left : 0.0;
        at[row] = 2 * at[row] + right;
    }
}

/* Input: k targets and room for k slots and masses, all owned by the caller. Result: -1 and the
 * leaf that holds each target with its mass, or the first bad row and nothing is written. On the
 * way down `slots` holds the node reached and `mass` the target left over, which saves scratch
 * memory. */
int64_t segment_tree_find_prefix(const segment_tree *tree, const double *targets, int64_t *slots,
                                 double *mass, int64_t k)
{
    double total = segment_tree_total(tree);
    double last = nextafter(total, 0.0);
    if (k > 0 && total == 0.0)
        return 0;
    for (int64_t row = 0; row < k; row++)
        if (!(targets[row] >= 0.0))
            return row;
    for (int64_t row = 0; row < k; row++) {
        slots[row] = 1;
        mass[row] = targets[row] < total ? targets[row] : last;
    }
    for (int64_t depth = tree->width; depth > 1; depth /= 2)
        descend_level(tree->nodes, slots, mass, k);
    for (int64_t row = 0; row < k; row++) {
        mass[row] = tree->nodes[slots[row]].sum;
        slots[row] -= tree->width;
    }
    return -1;
}

/* Input: a tree. Result: the sum of its leaves. */
double segment_tree_total(const segment_tree *tree)
{
    return tree->nodes[1].sum;
}

/* Input: a tree. Result: the smallest leaf above zero, or infinity. */
double segment_tree_minimum(const segment_tree *tree)
{
    return tree->nodes[1].min;
}

/* Input: two nodes. Result: whether they are equal; never with a NaN. */
static int same(node a, node b)
{
    return a.sum == b.sum && a.min == b.min;
}

/* Input: a tree. Result: -1, or the lowest node that is not what its children, or for a leaf its
 * own mass, say it must be. */
int64_t segment_tree_check(const segment_tree *tree)
{
    const node *nodes = tree->nodes;
    for (int64_t n = 1; n < tree->width; n++)
        if (!same(nodes[n], parent_of(nodes[2 * n], nodes[2 * n + 1])))
            return n;
    for (int64_t slot = 0; slot < tree->width; slot++) {
        node leaf = nodes[tree->width + slot];
        int allowed = is_mass(leaf.sum) && (slot < tree->capacity || leaf.sum == 0.0);
        if (!allowed || !same(leaf, leaf_of(leaf.sum)))
            return tree->width + slot;
    }
    return -1;
}
