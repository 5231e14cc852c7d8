/* test_tree_damage.c: what lies behind segment_tree.h: segment_tree_check must find any damage, and the
 * blocks of a ranked tree must stay right whatever the order in which they fill and empty.
 *
 * The binary and the ranked tree are included, not linked, so that their nodes are in reach.
 */
#include "tree_oracle.h"
#include "wide_tree.h"

#define set binary_set
#define set_range binary_set_range
#define get binary_get
#define find binary_find
#define check binary_check
#define destroy binary_destroy
#include "binary_tree.c"
#undef set
#undef set_range
#undef get
#undef find
#undef check
#undef destroy
#include "ranked_tree.c"

/* A mass of 1.5 or of zero becomes something else, and every sum and minimum does, by this bit. */
#define FLIPPED ((uint64_t)1 << 62)

/* Input: a kind and a capacity. Result: a tree in which two of three slots hold something. */
static segment_tree *filled_tree(int kind, int64_t capacity)
{
    segment_tree *tree = segment_tree_create(kind, capacity, 0.5, 0);
    CHECK(tree != NULL);
    for (int64_t slot = 0; slot < capacity; slot++) {
        double mass = 1.5 * (double)(slot % 3);
        CHECK(segment_tree_set(tree, &slot, &mass, 1) == -1);
    }
    CHECK(segment_tree_check(tree) == -1);
    return tree;
}

/* Input: a tree and one of its numbers. Result: none; check misses it when it is another one. */
static void check_sees_change(segment_tree *tree, double *number)
{
    const double good = *number, damaged[] = {good + 1.0, -good - 1.0, NAN, nextafter(good, 0.0), 0.25};
    for (int i = 0; i < COUNT(damaged); i++) {
        *number = damaged[i];
        CHECK(damaged[i] == good || segment_tree_check(tree) != -1);
    }
    *number = good;
    CHECK(segment_tree_check(tree) == -1);
}

static void test_check_finds_any_damaged_word_of_a_wide_tree(void)
{
    const int64_t capacities[] = {1, 20, 513, 4097, 9000};
    for (int i = 0; i < 2 * COUNT(capacities); i++) {
        wide_tree *tree = (wide_tree *)filled_tree(i % 2 ? SEGMENT_TREE_WIDE32 : SEGMENT_TREE_WIDE64, capacities[i / 2]);
        uint64_t *words = tree->arena;
        int64_t of_leaves = tree->entries[0] * (tree->narrow ? 4 : 8) / 8, count = (int64_t)tree->arena_bytes / 8;
        for (int64_t word = 0; word < count; word += 1 + count / 1500) {
            words[word] ^= FLIPPED;
            int64_t named = segment_tree_check(&tree->head);
            CHECK(word < of_leaves ? named != -1 : named == word);
            words[word] ^= FLIPPED;
        }
        check_sees_change(&tree->head, &tree->head.total);
        check_sees_change(&tree->head, &tree->head.minimum);
        segment_tree_destroy(&tree->head);
    }
}

static void test_check_finds_a_wide_leaf_that_may_not_be(void)
{
    const double masses[] = {NAN, INFINITY, -1.0};
    segment_tree *tree = filled_tree(SEGMENT_TREE_WIDE64, 20);
    for (int i = 0; i < COUNT(masses); i++) {
        ((double *)((wide_tree *)tree)->leaves)[0] = masses[i];
        CHECK(segment_tree_check(tree) == 0);
    }
    segment_tree_destroy(tree);
}

static void test_check_names_a_damaged_node_of_a_binary_tree(void)
{
    binary_tree *tree = binary(filled_tree(SEGMENT_TREE_BINARY, 6));
    for (int64_t n = 1; n < 2 * tree->width; n++) {
        node good = tree->nodes[n];
        const node damaged[] = {{good.sum + 1.0, good.min}, {good.sum, 0.5}, {NAN, good.min}};
        for (int i = 0; i < COUNT(damaged); i++) {
            tree->nodes[n] = damaged[i];
            /* A parent is checked before its child, so a bad child is seen at the parent. */
            CHECK(segment_tree_check(&tree->head) == (n > 1 ? n / 2 : 1));
        }
        tree->nodes[n] = good;
    }
    check_sees_change(&tree->head, &tree->head.total);
    check_sees_change(&tree->head, &tree->head.minimum);
    segment_tree_destroy(&tree->head);
}

static void test_a_damaged_binary_leaf_with_right_parents_is_named(void)
{
    const node damaged[] = {{1.0, 1.0}, {0.0, 1.0}, {-1.0, INFINITY}, {INFINITY, INFINITY}};
    binary_tree *tree = binary(filled_tree(SEGMENT_TREE_BINARY, 6));
    for (int i = 0; i < COUNT(damaged); i++) {
        tree->nodes[8 + 6] = damaged[i];
        for (int64_t n = 7; n >= 1; n--)
            tree->nodes[n] = parent_of(tree->nodes[2 * n], tree->nodes[2 * n + 1]);
        CHECK(segment_tree_check(&tree->head) == 8 + 6);
    }
    segment_tree_destroy(&tree->head);
}

/* Input: a ranked tree and one of its whole numbers. Result: none; check misses it when it is another. */
static void check_sees_count(ranked_tree *tree, int64_t *number)
{
    const int64_t good = *number, damaged[] = {good - 1, good + 1, -1, tree->head.capacity};
    for (int i = 0; i < COUNT(damaged); i++) {
        *number = damaged[i];
        CHECK(segment_tree_check(&tree->head) != -1);
    }
    *number = good;
    CHECK(segment_tree_check(&tree->head) == -1);
}

static void test_check_finds_damage_in_a_ranked_tree(void)
{
    ranked_tree *tree = ranked(filled_tree(SEGMENT_TREE_RANKED, 2000));
    CHECK(tree->blocks > 3);
    for (int64_t number = 0; number < tree->blocks; number++) {
        block *in = tree->order[number];
        check_sees_count(tree, &in->count);
        for (int64_t i = 0; i < in->count; i += 30) {
            check_sees_change(&tree->head, &in->entries[i].priority);
            check_sees_count(tree, &in->entries[i].slot);
            in->entries[i].priority = NAN;
            CHECK(segment_tree_check(&tree->head) == number);
            in->entries[i].priority = tree->priority[in->entries[i].slot];
        }
    }
    for (int64_t slot = 0; slot < 2000; slot += 100)
        check_sees_change(&tree->head, &tree->priority[slot]);
    for (int64_t rank = 0; rank <= 2000; rank += 100)
        check_sees_change(&tree->head, &tree->cumulative[rank]);
    check_sees_change(&tree->head, &tree->head.total);
    check_sees_change(&tree->head, &tree->head.minimum);
    check_sees_count(tree, &tree->size);
    segment_tree_destroy(&tree->head);
}

/* Input: a ranked tree. Result: none; neighbouring blocks hold more than half a block together. */
static void check_blocks_are_filled(const ranked_tree *tree)
{
    CHECK(tree->blocks >= 1 && tree->blocks <= tree->max_blocks);
    for (int64_t number = 0; number + 1 < tree->blocks; number++)
        CHECK(tree->order[number]->count + tree->order[number + 1]->count > BLOCK / 2);
}

/* Slots filled and emptied upwards, downwards, from the middle out and all over, one in each call; the
 * stride is prime to the number of slots. A block between two full ones must go when it is empty. */
static void test_a_ranked_tree_stays_right_in_any_order_of_filling_and_emptying(void)
{
    const int64_t capacity = 2048, strides[] = {1, -1, 1023, 77};
    for (int i = 0; i < 16; i++) {
        segment_tree *tree = segment_tree_create(SEGMENT_TREE_RANKED, capacity, 0.6, 0);
        for (int64_t call = 0; call < 2 * capacity; call++) {
            int64_t step = call * (call < capacity ? strides[i / 4] : strides[i % 4]);
            int64_t slot = (capacity / 2 + step % capacity + capacity) % capacity;
            double mass = call < capacity ? (double)(slot + 1) : 0.0;
            CHECK(segment_tree_set(tree, &slot, &mass, 1) == -1);
            check_blocks_are_filled(ranked(tree));
            CHECK(call % 16 != 0 || segment_tree_check(tree) == -1);
        }
        CHECK(segment_tree_total(tree) == 0.0 && segment_tree_check(tree) == -1);
        segment_tree_destroy(tree);
    }
}

/* With one block the halves of a split must go to the right places even where a batch brings all. */
static void test_a_ranked_tree_never_needs_more_blocks_than_it_has(void)
{
    const int64_t capacities[] = {1, 255, 256, 257, 511, 512, 513, 3000};
    for (int i = 0; i < COUNT(capacities); i++) {
        segment_tree *tree = segment_tree_create(SEGMENT_TREE_RANKED, capacities[i], 0.6, 0);
        for (int64_t call = 0; call < 8 * capacities[i]; call++) {
            int64_t slot = call * 7919 % capacities[i];
            double mass = (double)(call * 104729 % 1000);
            CHECK(segment_tree_set(tree, &slot, &mass, 1) == -1);
            check_blocks_are_filled(ranked(tree));
        }
        CHECK(segment_tree_check(tree) == -1);
        segment_tree_destroy(tree);
    }
}

/* Loads onto an empty tree, a filled one and one that holds part of it, each sorted at once or not. */
static void test_a_loaded_ranked_tree_equals_one_that_was_set_row_by_row(void)
{
    const int64_t capacities[] = {1, 127, 128, 129, 256, 300, 3000};
    for (int i = 0; i < 3 * COUNT(capacities); i++) {
        int64_t capacity = capacities[i / 3], filled = i % 3 == 0 ? 0 : i % 3 == 1 ? capacity : capacity / 2;
        segment_tree *one = segment_tree_create(SEGMENT_TREE_RANKED, capacity, 0.6, 0);
        segment_tree *other = segment_tree_create(SEGMENT_TREE_RANKED, capacity, 0.6, 0);
        double *mass = have((size_t)capacity * sizeof *mass), *saved = have((size_t)capacity * sizeof *mass);
        for (int64_t slot = 0; slot < filled; slot++)
            CHECK(segment_tree_set(one, &slot, &(double){1.0 + (double)slot}, 1) == -1);
        int64_t bytes = segment_tree_bytes(one);
        for (int64_t slot = 0; slot < capacity; slot++) {
            mass[slot] = slot % 7 == 0 ? -0.0 : (double)(slot * 7919 % 500);
            CHECK(segment_tree_set(other, &slot, &mass[slot], 1) == -1);
        }
        CHECK(segment_tree_load(one, mass) == -1 && segment_tree_check(one) == -1);
        check_blocks_are_filled(ranked(one));
        CHECK(segment_tree_total(one) == segment_tree_total(other) && segment_tree_minimum(one) == segment_tree_minimum(other));
        CHECK(segment_tree_bytes(one) >= bytes);
        segment_tree_save(one, saved);
        for (int64_t slot = 0; slot < capacity; slot++)
            CHECK(same_bits(saved[slot], mass[slot] + 0.0));
        int64_t slots[2];
        double targets[2] = {0.0, segment_tree_total(one) / 3}, found[2];
        if (segment_tree_total(one) > 0.0) {
            CHECK(segment_tree_find_prefix(one, targets, slots, found, 2) == -1);
            int64_t first = slots[0], third = slots[1];
            CHECK(segment_tree_find_prefix(other, targets, slots, found, 2) == -1 && slots[0] == first && slots[1] == third);
        }
        memset(mass, 0, (size_t)capacity * sizeof *mass);
        bytes = segment_tree_bytes(one);
        CHECK(segment_tree_load(one, mass) == -1 && segment_tree_check(one) == -1 && segment_tree_total(one) == 0.0);
        CHECK(segment_tree_bytes(one) == bytes);
        free(mass), free(saved);
        segment_tree_destroy(one);
        segment_tree_destroy(other);
    }
}

int main(void)
{
    test_a_loaded_ranked_tree_equals_one_that_was_set_row_by_row();
    test_check_finds_any_damaged_word_of_a_wide_tree();
    test_check_finds_a_wide_leaf_that_may_not_be();
    test_check_names_a_damaged_node_of_a_binary_tree();
    test_a_damaged_binary_leaf_with_right_parents_is_named();
    test_check_finds_damage_in_a_ranked_tree();
    test_a_ranked_tree_stays_right_in_any_order_of_filling_and_emptying();
    test_a_ranked_tree_never_needs_more_blocks_than_it_has();
    puts("test_tree_damage: all passed");
    return 0;
}
