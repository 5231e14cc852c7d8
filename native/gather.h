/* gather.h - copy scattered rows of one length into one contiguous array.
 *
 * The sample path of a replay rank: a batch of 512 transitions needs 4096 frames of 7,056 bytes from
 * anywhere in a ring of many gigabytes. */

#ifndef APEX_GATHER_H
#define APEX_GATHER_H

#include <stdint.h>

/* Copy k rows of row_bytes bytes: row i comes from base + offset[i], or is all zero where offset[i] is
 * negative, and goes to out + i * row_bytes.
 *
 * The caller owns all arrays and guarantees that every offset[i] + row_bytes lies inside base and that
 * out does not overlap base. O(k * row_bytes); allocates nothing. */
void gather_rows(const uint8_t *base, const int64_t *offset, int64_t k, int64_t row_bytes, uint8_t *out);

#endif
