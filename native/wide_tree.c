/* wide_tree.c: creates and checks the wide tree of wide_tree.h. */
#include "wide_tree.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Input: the end of a memory layout, and a number of bytes. Result: the offset of these bytes; the end
 * moves to the next cache line behind them. */
static size_t carve(size_t *end, size_t bytes)
{
    size_t begin = *end;
    *end = (begin + bytes + LINE - 1) / LINE * LINE;
    return begin;
}

/* Input: as for carve, the start of the memory, and a number of nodes. Result: the map of these nodes. */
static dirty_map place_map(size_t *end, uintptr_t memory, int64_t nodes)
{
    size_t lines = (size_t)dirty_lines(nodes);
    dirty_map map;
    map.nodes = (uint64_t *)(memory + carve(end, lines * LINE_WORDS * sizeof *map.nodes));
    map.lines = (uint16_t *)(memory + carve(end, lines * sizeof *map.lines));
    return map;
}

/* Input: a capacity and a leaf type. Result: the number of levels, and the entries of each. */
static void measure(wide_tree *tree, int64_t capacity)
{
    int64_t block = tree->narrow ? 16 : 8;
    int64_t entries = (capacity + block - 1) / block;
    tree->entries[0] = entries * block;
    for (tree->top = 1;; tree->top++) {
        tree->entries[tree->top] = (entries + WIDE_FAN - 1) / WIDE_FAN * WIDE_FAN;
        if (entries <= WIDE_TOP)
            break;
        entries = tree->entries[tree->top] / WIDE_FAN;
    }
    tree->entries[tree->top + 1] = tree->entries[tree->top] / WIDE_FAN;
}

/* Input: a measured tree and the start of its memory, or 0. Result: its arrays point into that memory.
 * Returns the bytes that they take. */
static size_t lay_out(wide_tree *tree, uintptr_t memory)
{
    size_t end = 0;
    tree->leaves = (void *)(memory + carve(&end, (size_t)tree->entries[0] * (tree->narrow ? sizeof(float) : sizeof(double))));
    for (int level = 1; level <= tree->top + 1; level++) {
        size_t bytes = (size_t)tree->entries[level] * sizeof(double);
        tree->sum[level] = (double *)(memory + carve(&end, bytes));
        tree->min[level] = (double *)(memory + carve(&end, bytes));
        tree->inclusive[level] = (double *)(memory + carve(&end, level > 1 || level == tree->top ? bytes : 0));
        tree->dirty_sum[level] = place_map(&end, memory, tree->entries[level] / WIDE_FAN);
        tree->dirty_min[level] = place_map(&end, memory, tree->entries[level] / WIDE_FAN);
    }
    return end;
}

/* Input: a tree with memory. Result: all its leaves are zero, and all sums and minima follow from them. */
static void wide_make_empty(wide_tree *tree)
{
    memset(tree->arena, 0, tree->arena_bytes);
    for (int level = 1; level <= tree->top + 1; level++)
        for (int64_t entry = 0; entry < tree->entries[level]; entry++)
            tree->min[level][entry] = INFINITY;
    for (int entry = 0; entry < WIDE_TOP + 1 + WIDE_FAN; entry++)
        tree->prefix[entry] = entry <= tree->entries[tree->top] ? 0.0 : INFINITY;
    tree->head.total = 0.0;
    tree->head.minimum = INFINITY;
}

/* Input: a capacity >= 1, a leaf type and an instruction set. Result: an empty tree, owned by the
 * caller; NULL when it is too large to address or without memory. */
segment_tree *wide_tree_create(int64_t capacity, int narrow, const tree_kernels *kernels)
{
    if (capacity > PTRDIFF_MAX / 32)
        return NULL;
    wide_tree *tree = calloc(1, sizeof *tree);
    if (tree == NULL)
        return NULL;
    tree->narrow = narrow;
    measure(tree, capacity);
    tree->arena_bytes = lay_out(tree, 0);
    tree->arena = tree_memory(tree->arena_bytes);
    if (tree->arena == NULL) {
        free(tree);
        return NULL;
    }
    lay_out(tree, (uintptr_t)tree->arena);
    wide_make_empty(tree);
    tree->head.kind = &kernels->wide;
    tree->head.backend = kernels->name;
    tree->head.bytes = (int64_t)(tree->arena_bytes + sizeof *tree);
    tree->head.largest = narrow ? FLT_MAX : DBL_MAX;
    return &tree->head;
}

void wide_tree_destroy(segment_tree *tree)
{
    tree_release(((wide_tree *)tree)->arena, ((wide_tree *)tree)->arena_bytes);
    free(tree);
}

/* Input: see tree_kind.h. Result: -1, or where the memory of the trees first differs, in eight-byte words
 * (leaves first, then level by level). */
int64_t wide_tree_compare(const segment_tree *head, const segment_tree *other)
{
    const wide_tree *tree = (const wide_tree *)head, *fresh = (const wide_tree *)other;
    const char *arena = tree->arena, *right = fresh->arena;
    int64_t words = (int64_t)(tree->arena_bytes / sizeof(uint64_t)), word = 0;
    while (word < words && memcmp(arena + 8 * word, right + 8 * word, sizeof(uint64_t)) == 0)
        word++;
    int same_root = head->total == other->total && head->minimum == other->minimum;
    return word == words && same_root ? -1 : word;
}
