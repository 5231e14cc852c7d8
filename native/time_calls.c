/* time_calls.c: see time_calls.h. */
#define _POSIX_C_SOURCE 199309L /* clock_gettime */
#include "time_calls.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

#define INSERT 50
#define INSERTS 10

typedef struct {
    segment_tree *tree;
    const int64_t *slots;
    const double *mass;
    int64_t rows, k;
    int64_t at;     /* the next row to update with */
    int64_t first;  /* the next slot to insert at */
    int64_t insert; /* the next mass to insert */
    uint64_t state;
    int64_t *found;
    double *found_mass, *probability;
} work;

static void sample(work *w)
{
    segment_tree_draw(w->tree, &w->state, w->found, w->found_mass, w->probability, w->k);
}

static void update(work *w)
{
    segment_tree_set(w->tree, w->slots + w->at, w->mass + w->at, w->k);
    w->at = w->at + 2 * w->k <= w->rows ? w->at + w->k : 0;
}

static void insert_rows(work *w, int64_t k)
{
    segment_tree_set_range(w->tree, w->first, w->mass + w->insert, k);
    w->first = w->first + 2 * k <= segment_tree_capacity(w->tree) ? w->first + k : 0;
    w->insert = w->insert + 2 * k <= w->rows ? w->insert + k : 0;
}

static void insert(work *w)
{
    insert_rows(w, w->k);
}

static void step(work *w)
{
    sample(w);
    update(w);
    for (int i = 0; i < INSERTS; i++)
        insert_rows(w, INSERT);
}

/* Input: an operation's name. Result: what does it once, or NULL. */
static void (*operation(const char *op))(work *)
{
    static const char *const names[] = {"sample", "update", "insert", "step"};
    static void (*const operations[])(work *) = {sample, update, insert, step};
    for (int i = 0; i < 4; i++)
        if (strcmp(op, names[i]) == 0)
            return operations[i];
    return NULL;
}

static double now_us(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return 1e6 * (double)now.tv_sec + 1e-3 * (double)now.tv_nsec;
}

int time_calls(segment_tree *tree, const char *op, int64_t k, int64_t cold_bytes, uint64_t seed,
               const int64_t *slots, const double *mass, int64_t rows, double *us, int64_t calls)
{
    work w = {.tree = tree, .slots = slots, .mass = mass, .rows = rows, .k = k, .state = seed};
    void (*once)(work *) = operation(op);
    int64_t inserted = once == step ? INSERT : once == insert ? k : 0;
    if (once == NULL || k < 1 || cold_bytes < 0 || k > rows || inserted > rows || inserted > segment_tree_capacity(tree))
        return -1;
    w.found = malloc((size_t)k * sizeof *w.found);
    w.found_mass = malloc((size_t)k * sizeof *w.found_mass);
    w.probability = malloc((size_t)k * sizeof *w.probability);
    if (inserted > 0) {
        uint64_t pieces = (uint64_t)(segment_tree_capacity(tree) / inserted), piece = once == step ? seed * INSERTS : seed;
        w.first = (int64_t)(piece % pieces) * inserted;
    }
    char *frames = malloc(2 * (size_t)cold_bytes + 1);
    int ready = w.found != NULL && w.found_mass != NULL && w.probability != NULL && frames != NULL;
    if (ready)
        memset(frames, 1, 2 * (size_t)cold_bytes + 1);
    for (int64_t call = 0; ready && call < calls; call++) {
        memcpy(frames, frames + cold_bytes, (size_t)cold_bytes);
        double begin = now_us();
        once(&w);
        us[call] = now_us() - begin;
    }
    free(w.found);
    free(w.found_mass);
    free(w.probability);
    free(frames);
    return ready ? 0 : -1;
}
