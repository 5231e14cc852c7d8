/* test_gather.c: gather.c and within.c against the obvious loops, and time_calls.c, under the sanitizers. */
#include "gather.h"

#include <math.h>

#include "time_calls.h"
#include "tree_oracle.h"
#include "within.h"

/* Arrays are exactly as long as the call needs, so that an access beyond is seen. */
static void test_rows_are_copied_in_order_and_negative_offsets_give_zeros(void)
{
    for (int64_t k = 0; k < 9; k++)
        for (int64_t row_bytes = 0; row_bytes < 40; row_bytes++) {
            uint8_t *base = have(100), *out = have((size_t)(k * row_bytes) + 1);
            int64_t *offset = have((size_t)k * 8 + 1);
            for (int i = 0; i < 100; i++)
                base[i] = (uint8_t)(i + 1);
            for (int64_t row = 0; row < k; row++)
                offset[row] = row % 3 == 2 ? -row : (row * 37 + 100) % (101 - row_bytes);
            out[k * row_bytes] = 0xEE;
            gather_rows(base, offset, k, row_bytes, out);
            for (int64_t i = 0; i < k * row_bytes; i++) {
                int64_t from = offset[i / row_bytes];
                CHECK(out[i] == (from < 0 ? 0 : base[from + i % row_bytes]));
            }
            CHECK(out[k * row_bytes] == 0xEE);
            free(base), free(out), free(offset);
        }
}

static void test_calls_are_timed_and_leave_the_tree_right(void)
{
    static const char *const ops[] = {"insert", "update", "sample", "step"};
    int64_t slots[60];
    double mass[60];
    for (int64_t row = 0; row < 60; row++)
        slots[row] = row * 3, mass[row] = 1.0 + (double)row;
    segment_tree *tree = segment_tree_create(SEGMENT_TREE_WIDE64, 200, 0.0, 0);
    for (int i = 0; i < COUNT(ops); i++) {
        double us[7] = {-1.0, -1.0, -1.0, -1.0, -1.0, -1.0, -1.0};
        CHECK(time_calls(tree, ops[i], 20, i * 1000, 3, slots, mass, 60, us, 7) == 0);
        for (int call = 0; call < 7; call++)
            CHECK(us[call] >= 0.0);
        CHECK(segment_tree_check(tree) == -1 && segment_tree_total(tree) > 0.0);
    }
    segment_tree_destroy(tree);
}

/* The first insert is at the seed's piece of the ring; each goes on where the last ended, in slots and masses. */
static void test_inserts_have_other_slots_and_other_masses_each(void)
{
    double mass[60], us[4], held[65];
    int64_t slots[60] = {0};
    for (int row = 0; row < 60; row++)
        mass[row] = 1.0 + row;
    segment_tree *tree = segment_tree_create(SEGMENT_TREE_WIDE64, 65, 0.0, 0);
    CHECK(time_calls(tree, "insert", 20, 0, 5, slots, mass, 60, us, 2) == 0); /* 65 slots are 3 pieces of 20 */
    segment_tree_save(tree, held);
    for (int slot = 0; slot < 65; slot++)
        CHECK(held[slot] == (slot < 20 ? 21.0 + slot : slot >= 40 && slot < 60 ? 1.0 + slot - 40 : 0.0));
    CHECK(time_calls(tree, "insert", 20, 0, 0, slots, mass, 60, us, 4) == 0);
    segment_tree_save(tree, held);
    for (int slot = 0; slot < 60; slot++)
        CHECK(held[slot] == 1.0 + slot);
    segment_tree_destroy(tree);
}

static void test_calls_that_cannot_be_made_are_not_timed(void)
{
    int64_t slots[60] = {0};
    double mass[60] = {1.0}, us[1] = {-1.0};
    segment_tree *tree = segment_tree_create(SEGMENT_TREE_WIDE64, 30, 0.0, 0);
    CHECK(time_calls(tree, "nothing", 1, 0, 3, slots, mass, 60, us, 1) == -1);
    CHECK(time_calls(tree, "update", 0, 0, 3, slots, mass, 60, us, 1) == -1);
    CHECK(time_calls(tree, "update", 61, 0, 3, slots, mass, 60, us, 1) == -1);
    CHECK(time_calls(tree, "update", 1, -1, 3, slots, mass, 60, us, 1) == -1);
    CHECK(time_calls(tree, "update", 1, INT64_MAX / 2, 3, slots, mass, 60, us, 1) == -1);
    CHECK(time_calls(tree, "insert", 31, 0, 3, slots, mass, 60, us, 1) == -1);
    CHECK(time_calls(tree, "step", 1, 0, 3, slots, mass, 60, us, 1) == -1);
    CHECK(us[0] == -1.0 && segment_tree_total(tree) == 0.0);
    segment_tree_destroy(tree);
}

/* One number after the other is moved to and beyond each bound. */
static void test_every_number_outside_of_the_bounds_is_seen(void)
{
    for (int64_t k = 0; k < 40; k++)
        for (int64_t at = 0; at <= k; at++) {
            int16_t *whole = have((size_t)k * 2 + 1);
            float *number = have((size_t)k * 4 + 1);
            for (int64_t i = 0; i < k; i++)
                whole[i] = (int16_t)(i % 5 - 1), number[i] = (float)i;
            CHECK(within_int16(whole, k, -1, 3) && within_float32(number, k, 0.0, 39.0));
            static const int16_t outside[] = {-2, 4, INT16_MIN, INT16_MAX};
            const float beyond[] = {-1e-30f, 40.0f, -INFINITY, NAN};
            for (int i = 0; i < 4 && at < k; i++) {
                whole[at] = outside[i], number[at] = beyond[i];
                CHECK(!within_int16(whole, k, -1, 3) && !within_float32(number, k, 0.0, 39.0));
            }
            free(whole), free(number);
        }
}

int main(void)
{
    test_every_number_outside_of_the_bounds_is_seen();
    test_rows_are_copied_in_order_and_negative_offsets_give_zeros();
    test_calls_are_timed_and_leave_the_tree_right();
    test_inserts_have_other_slots_and_other_masses_each();
    test_calls_that_cannot_be_made_are_not_timed();
    puts("test_gather: all passed");
    return 0;
}
