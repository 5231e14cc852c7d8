/* time_calls.h: times the calls of a tree from C, for `apex bench index`. */
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
 * `seed` is the state of the stream of draws, and the number of earlier calls with inserts.
 * Before each call, untimed, it copies `cold_bytes` bytes, as a replay rank copies frames between calls.
 * Returns 0; or -1 without any call if `op` is unknown, an array is too short, the tree is too small for
 * the inserts, or memory runs out. The calls change the tree; it must accept all slots and masses. */
int time_calls(segment_tree *tree, const char *op, int64_t k, int64_t cold_bytes, uint64_t seed,
               const int64_t *slots, const double *mass, int64_t rows, double *us, int64_t calls);

#endif
