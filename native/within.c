#include "within.h"

int within_int16(const int16_t *number, int64_t k, int64_t low, int64_t high)
{
    int outside = 0;
    for (int64_t i = 0; i < k; i++)
        outside |= (number[i] < low) | (number[i] > high);
    return !outside;
}

int within_int32(const int32_t *number, int64_t k, int64_t low, int64_t high)
{
    int outside = 0;
    for (int64_t i = 0; i < k; i++)
        outside |= (number[i] < low) | (number[i] > high);
    return !outside;
}

int within_float32(const float *number, int64_t k, double low, double high)
{
    int within = 1;
    for (int64_t i = 0; i < k; i++)
        within &= (number[i] >= low) & (number[i] <= high); /* both are false for a NaN */
    return within;
}
