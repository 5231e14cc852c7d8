/* tree_oracle.h: what a tree is tested against: an array of masses, sorted and summed anew at each look.
 *
 * Sums are long doubles, added from the first slot (or rank) on, so they are far closer to the truth than
 * what they are compared with.
 */
#ifndef TREE_ORACLE_H
#define TREE_ORACLE_H

#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "segment_tree.h"

#define CHECK(condition)                                                                  \
    do {                                                                                  \
        if (!(condition)) {                                                               \
            fprintf(stderr, "%s:%d: %s is false\n", __FILE__, __LINE__, #condition);      \
            abort();                                                                      \
        }                                                                                 \
    } while (0)

#define COUNT(array) ((int)(sizeof(array) / sizeof((array)[0])))
#define CLOSE 1e-12L /* how far a sum may be from the truth, as a part of the total */

typedef struct {
    double mass;
    int64_t slot;
} filled_slot;

typedef struct {
    int kind;
    int64_t capacity;
    double alpha;
    double *mass;        /* of each slot, as it is stored */
    int64_t *position;   /* of each slot, in the order of the prefix sums; -1 where a rank is missing */
    long double *prefix; /* [capacity + 1], by position */
    filled_slot *order;  /* [capacity], scratch */
    double minimum;
} oracle;

/* The rows of one call; the arrays are exactly k long, so that a sanitizer sees any access beyond. */
typedef struct {
    int64_t k;
    int64_t *slots;
    double *mass;
} rows;

/* Input: bytes > 0. Result: memory, owned by the caller; the test ends without. */
void *have(size_t bytes);

/* Input: k >= 0. Result: memory for k rows, to be released with drop_rows. */
rows make_rows(int64_t k);

void drop_rows(rows *batch);

/* Input: as for segment_tree_create. Result: an empty oracle, to be ended with oracle_destroy. */
oracle oracle_create(int kind, int64_t capacity, double alpha);

void oracle_destroy(oracle *it);

/* Input: two doubles. Result: whether they are equal to the last bit, the sign of zero included. */
int same_bits(double a, double b);

/* Input: any slot and mass. Result: whether the contract lets a row of an update hold them. */
int oracle_allows(const oracle *it, int64_t slot, double mass);

/* Input: an allowed row. Result: the slot holds the mass as its leaf would. */
void oracle_set(oracle *it, int64_t slot, double mass);

/* Result: positions, prefix sums and minimum are those of the masses. */
void oracle_look(oracle *it);

/* Input: an oracle that has just looked and a tree. Result: none; the tree holds what the oracle does. */
void oracle_check(const oracle *it, const segment_tree *tree);

/* Input: an oracle that has just looked, a tree's total, a target and what was found for it, and how far
 * it may be off, as a part of the total. Result: none; it may be drawn, and the target falls on it. */
void oracle_check_found(const oracle *it, double total, double target, int64_t slot, double mass, long double off);

/* Input: an oracle that has just looked, a tree that is not empty and a position. Result: the smallest target
 * for which the tree finds that position or a later one, as its own sums round; its total if there is none. */
double oracle_edge(const oracle *it, const segment_tree *tree, int64_t position);

/* Input: an oracle that has just looked, a tree that is not empty, a stream and k. Result: none; k draws
 * are, to the last bit, the search of the documented targets, and the stream moves by k. */
void oracle_check_draw(const oracle *it, const segment_tree *tree, uint64_t *state, int64_t k);

#endif
