/* segment_tree.c: what all kinds of tree share: checking arguments, choosing the kernels, drawing. */
#include "segment_tree.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>

#include "tree_kind.h"

#define SAVED_AT_ONCE 1024

/* Input: whether the portable ones are asked for. Result: the fastest kernels of this machine. */
static const tree_kernels *kernels_here(int portable)
{
#ifdef HAVE_AVX2
    __builtin_cpu_init();
    if (!portable && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("popcnt") && __builtin_cpu_supports("bmi"))
        return &avx2_kernels;
#else
    (void)portable;
#endif
    return &portable_kernels;
}

/* Input: see segment_tree.h. Result: an empty tree of the kind, owned by the caller, or NULL. */
segment_tree *segment_tree_create(int kind, int64_t capacity, double alpha, int portable)
{
    const tree_kernels *kernels = kernels_here(portable);
    segment_tree *tree = NULL;
    if (capacity < 1)
        return NULL;
    if (kind == SEGMENT_TREE_WIDE64 || kind == SEGMENT_TREE_WIDE32)
        tree = wide_tree_create(capacity, kind == SEGMENT_TREE_WIDE32, kernels);
    else if (kind == SEGMENT_TREE_BINARY)
        tree = binary_tree_create(capacity);
    else if (kind == SEGMENT_TREE_RANKED)
        tree = ranked_tree_create(capacity, alpha);
    if (tree != NULL) {
        tree->number = kind;
        tree->capacity = capacity;
        tree->kernels = kernels;
    }
    return tree;
}

void segment_tree_destroy(segment_tree *tree)
{
    if (tree != NULL)
        tree->kind->destroy(tree);
}

int64_t segment_tree_capacity(const segment_tree *tree)
{
    return tree->capacity;
}

int64_t segment_tree_bytes(const segment_tree *tree)
{
    return tree->bytes;
}

const char *segment_tree_backend(const segment_tree *tree)
{
    return tree->backend;
}

/* Input: a mass. Result: whether a leaf may hold it. False for NaN, as every comparison is. */
static int is_mass(const segment_tree *tree, double mass)
{
    return mass >= 0.0 && mass <= tree->largest;
}

/* Input: a slot. Result: whether the tree has it. */
static int is_slot(const segment_tree *tree, int64_t slot)
{
    return slot >= 0 && slot < tree->capacity;
}

int64_t segment_tree_set(segment_tree *tree, const int64_t *slots, const double *mass, int64_t k)
{
    if (k <= 0)
        return -1;
    if (tree->kernels->rows->any_refused(tree->capacity, tree->largest, slots, mass, k))
        for (int64_t row = 0; row < k; row++)
            if (!is_slot(tree, slots[row]) || !is_mass(tree, mass[row]))
                return row;
    tree->kind->set(tree, slots, mass, k);
    return -1;
}

int64_t segment_tree_set_range(segment_tree *tree, int64_t first, const double *mass, int64_t k)
{
    if (k <= 0)
        return -1;
    if (!is_slot(tree, first))
        return 0;
    if (k > tree->capacity)
        return tree->capacity;
    for (int64_t row = 0; row < k; row++)
        if (!is_mass(tree, mass[row]))
            return row;
    int64_t room = tree->capacity - first;
    tree->kind->set_range(tree, first, mass, k < room ? k : room);
    if (k > room)
        tree->kind->set_range(tree, 0, mass + room, k - room);
    return -1;
}

int64_t segment_tree_get(const segment_tree *tree, const int64_t *slots, double *mass, int64_t k)
{
    for (int64_t row = 0; row < k; row++)
        if (!is_slot(tree, slots[row]))
            return row;
    if (k > 0)
        tree->kind->get(tree, slots, mass, k);
    return -1;
}

void segment_tree_save(const segment_tree *tree, double *mass)
{
    int64_t slots[SAVED_AT_ONCE];
    for (int64_t first = 0; first < tree->capacity; first += SAVED_AT_ONCE) {
        int64_t rest = tree->capacity - first, rows = rest < SAVED_AT_ONCE ? rest : SAVED_AT_ONCE;
        for (int64_t row = 0; row < rows; row++)
            slots[row] = first + row;
        tree->kind->get(tree, slots, mass + first, rows);
    }
}

int64_t segment_tree_load(segment_tree *tree, const double *mass)
{
    return segment_tree_set_range(tree, 0, mass, tree->capacity);
}

int64_t segment_tree_find_prefix(const segment_tree *tree, const double *targets, int64_t *slots,
                                 double *mass, int64_t k)
{
    if (k <= 0)
        return -1;
    if (tree->total == 0.0)
        return 0;
    for (int64_t row = 0; row < k; row++)
        if (!(targets[row] >= 0.0))
            return row;
    double last = nextafter(tree->total, 0.0);
    for (int64_t row = 0; row < k; row++)
        mass[row] = targets[row] < tree->total ? targets[row] : last;
    tree->kind->find(tree, slots, mass, k);
    return -1;
}

int64_t segment_tree_draw(const segment_tree *tree, uint64_t *state, int64_t *slots, double *mass,
                          double *probability, int64_t k)
{
    if (k <= 0)
        return -1;
    if (tree->total == 0.0)
        return 0;
    const row_kernels *kernels = tree->kernels->rows;
    double last = nextafter(tree->total, 0.0);
    kernels->targets(*state, tree->total / (double)k, mass, k);
    *state += SPLITMIX_GAMMA * (uint64_t)k;
    /* Targets ascend, so rounding can carry only the last ones up to the total; below an infinite total
     * there is none, and the first may be 0 * infinity, a NaN. */
    for (int64_t row = k - 1; row >= 0 && !(mass[row] <= last); row--)
        mass[row] = last;
    tree->kind->find(tree, slots, mass, k);
    kernels->divide(mass, tree->total, probability, k);
    return -1;
}

double segment_tree_total(const segment_tree *tree)
{
    return tree->total;
}

double segment_tree_minimum(const segment_tree *tree)
{
    return tree->minimum;
}

/* Input: a tree. Result: a new one with the same leaves, made by the portable kernels and owned by the
 * caller; NULL without memory, or where a leaf holds what it may not. */
static segment_tree *remade(const segment_tree *tree)
{
    segment_tree *fresh = segment_tree_create(tree->number, tree->capacity, 0.0, 1);
    double *mass = malloc((size_t)tree->capacity * sizeof *mass);
    int refused = fresh == NULL || mass == NULL;
    if (!refused) {
        segment_tree_save(tree, mass);
        refused = segment_tree_load(fresh, mass) != -1;
    }
    free(mass);
    if (refused) {
        segment_tree_destroy(fresh);
        return NULL;
    }
    return fresh;
}

/* Input: a tree. Result: whether every slot holds a mass that it may. */
static int leaves_are_right(const segment_tree *tree)
{
    for (int64_t slot = 0; slot < tree->capacity; slot++) {
        double mass;
        tree->kind->get(tree, &slot, &mass, 1);
        if (!is_mass(tree, mass))
            return 0;
    }
    return 1;
}

int64_t segment_tree_check(const segment_tree *tree)
{
    if (tree->kind->check != NULL)
        return tree->kind->check(tree);
    segment_tree *fresh = remade(tree);
    if (fresh == NULL)
        return leaves_are_right(tree) ? SEGMENT_TREE_NOT_CHECKED : 0;
    int64_t found = tree->kind->compare(tree, fresh);
    segment_tree_destroy(fresh);
    return found;
}
