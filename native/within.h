/* within.h - whether all numbers of an array lie between two bounds.
 *
 * A replay rank checks the pointers and columns of every intake batch before it changes anything. For a batch
 * of 50 the calls into NumPy would take longer than the insert. */

#ifndef APEX_WITHIN_H
#define APEX_WITHIN_H

#include <stdint.h>

/* Result: 1 if low <= number[i] <= high for all k numbers, else 0; 1 for none. A NaN is never within.
 * The caller owns the array. O(k), without branches; allocates nothing. */
int within_int16(const int16_t *number, int64_t k, int64_t low, int64_t high);
int within_int32(const int32_t *number, int64_t k, int64_t low, int64_t high);
int within_float32(const float *number, int64_t k, double low, double high);

#endif
