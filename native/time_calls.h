/* time_calls.h: how long calls of a tree take when C makes them, for `apex bench index`. */
#ifndef TIME_CALLS_H
#define TIME_CALLS_H

#include "segment_tree.h"

/* Times `calls` calls one by one into us[], in microseconds. `op` is
 *   "sample"  k draws;
 *   "update"  k of the `rows` rows of slots and mass, the next ones with each call, from the start again
 *             at the end;
 *   "insert"  k neighbouring slots, the next ones with each insert, none of which wraps around; their
 *             masses are the next ones of `mass`, and `slots` are not read;
 *   "step"    k draws, k updates, and ten inserts of 50.
 * `seed` is where the stream of draws begins, and how many such calls with inserts there were before.
 * Before each call, untimed, `cold_bytes` bytes are copied from one place to another, as a replay rank
 * copies frames between two calls.
 * Returns 0; -1, and nothing was called, when `op` is unknown, an array is too short, the tree too small
 * for its inserts, or memory runs out. The tree is changed; slots and masses must be ones it accepts. */
int time_calls(segment_tree *tree, const char *op, int64_t k, int64_t cold_bytes, uint64_t seed,
               const int64_t *slots, const double *mass, int64_t rows, double *us, int64_t calls);

#endif
