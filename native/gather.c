#include "gather.h"

#include <string.h>

/* How many rows ahead the first lines of a source row are prefetched: far enough to hide one miss
 * behind the copy of the rows between. */
#define AHEAD 2

void gather_rows(const uint8_t *base, const int64_t *offset, int64_t k, int64_t row_bytes, uint8_t *out)
{
    for (int64_t i = 0; i < k; i++, out += row_bytes) {
        if (i + AHEAD < k && offset[i + AHEAD] >= 0)
            __builtin_prefetch(base + offset[i + AHEAD]);
        if (offset[i] < 0)
            memset(out, 0, (size_t)row_bytes);
        else
            memcpy(out, base + offset[i], (size_t)row_bytes);
    }
}
