/* segment_tree.c: what all kinds of tree share: checking arguments, choosing the kernels, drawing. */
#define _GNU_SOURCE /* MAP_ANONYMOUS, madvise */
#include "segment_tree.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "tree_kind.h"

#define HUGE_PAGE ((size_t)2 << 20)
#define SAVED_AT_ONCE 1024

/* Input: bytes. Result: the next multiple of a huge page. */
static size_t in_huge_pages(size_t bytes)
{
    return (bytes + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
}

/* Input: bytes > 0. Result: see tree_kind.h. What is mapped in front of the aligned block and behind it
 * is unmapped. */
void *tree_memory(size_t bytes)
{
    if (bytes < HUGE_PAGE)
        return aligned_alloc(LINE, (bytes + LINE - 1) / LINE * LINE);
    size_t wanted = in_huge_pages(bytes), front;
    char *mapped = mmap(NULL, wanted + HUGE_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED)
        return NULL;
    front = in_huge_pages((uintptr_t)mapped) - (uintptr_t)mapped;
    if (front > 0)
        munmap(mapped, front);
    munmap(mapped + front + wanted, HUGE_PAGE - front);
#ifdef MADV_HUGEPAGE
    madvise(mapped + front, wanted, MADV_HUGEPAGE);
#endif
    return mapped + front;
}

/* Input: what tree_memory gave for `bytes`, or NULL. Result: it is given back. */
void tree_release(void *memory, size_t bytes)
{
    if (memory != NULL && bytes >= HUGE_PAGE)
        munmap(memory, in_huge_pages(bytes));
    else
        free(memory);
}

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

int64_t segment_tree_check(const segment_tree *tree)
{
    return tree->kind->check(tree);
}
