/* tree_kind.h: what a kind of tree implements. segment_tree.c checks all arguments before it calls.
 *
 * In every call 0 < k, slots are inside [0, capacity), masses are allowed, and targets are inside
 * [0, total). A mass may be -0.0, which each kind stores as +0.0. */
#ifndef TREE_KIND_H
#define TREE_KIND_H

#include "segment_tree.h"

#define LINE 64                            /* bytes of a cache line */
#define SPLITMIX_GAMMA 0x9E3779B97F4A7C15u /* the step of the stream of draws */

typedef struct {
    void (*destroy)(segment_tree *tree);
    void (*set)(segment_tree *tree, const int64_t *slots, const double *mass, int64_t k);
    void (*set_range)(segment_tree *tree, int64_t first, const double *mass, int64_t k);
    void (*get)(const segment_tree *tree, const int64_t *slots, double *mass, int64_t k);
    /* `mass` holds the targets before and what was found after. */
    void (*find)(const segment_tree *tree, int64_t *slots, double *mass, int64_t k);
    /* As segment_tree_check, or NULL for a kind that has `compare`. */
    int64_t (*check)(const segment_tree *tree);
    /* Input: a tree, and a new one with the same leaves, made by the portable kernels. Result: -1, or the
     * number of the first thing that is not the same. */
    int64_t (*compare)(const segment_tree *tree, const segment_tree *fresh);
} tree_kind;

/* What depends on the instruction set: the work on rows that all kinds share, and the wide tree. */
typedef struct {
    /* Whether a row of an update must be refused. */
    int (*any_refused)(int64_t capacity, double largest, const int64_t *slots, const double *mass, int64_t k);
    /* (row + u_row) * width for each row; u as in segment_tree_draw. */
    void (*targets)(uint64_t state, double width, double *target, int64_t k);
    void (*divide)(const double *mass, double total, double *probability, int64_t k);
} row_kernels;

typedef struct {
    const char *name;
    const row_kernels *rows;
    tree_kind wide;
} tree_kernels;

extern const row_kernels portable_rows, avx2_rows;
extern const tree_kernels portable_kernels, avx2_kernels;

/* The head of every kind's own struct. The kind keeps total, minimum and bytes right. */
struct segment_tree {
    const tree_kind *kind;
    const tree_kernels *kernels;
    const char *backend;
    int number; /* of the kind, as in segment_tree_create */
    int64_t capacity;
    int64_t bytes;
    double total;
    double minimum;
    double largest; /* the largest mass that a leaf can hold */
};

/* Allocates `bytes` > 0 bytes, aligned to a cache line; NULL without memory. The caller releases them with
 * tree_release and the same number. Large blocks are aligned to 2 MiB, and the kernel is advised to back
 * them with huge pages: one TLB entry then covers 2 MiB of a tree that is read at random. They are mapped,
 * since the heap would fragment. */
void *tree_memory(size_t bytes);
void tree_release(void *memory, size_t bytes);

/* The calls of a wide tree that do not depend on the instruction set. */
void wide_tree_destroy(segment_tree *tree);
int64_t wide_tree_compare(const segment_tree *tree, const segment_tree *fresh);

/* Create a tree of each kind; arguments and result as in segment_tree_create. */
segment_tree *wide_tree_create(int64_t capacity, int narrow, const tree_kernels *kernels);
segment_tree *binary_tree_create(int64_t capacity);
segment_tree *ranked_tree_create(int64_t capacity, double alpha);

#endif
