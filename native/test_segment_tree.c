/* test_segment_tree.c: segment_tree.c against a naive oracle: an array of masses and recursion.
 *
 * The source is included, not linked, so that the tests can also damage a node and see
 * segment_tree_check find it. Run under the address and undefined behaviour sanitizers.
 */
#include "segment_tree.c"

#include <stdio.h>
#include <string.h>

#define CHECK(condition)                                                                  \
    do {                                                                                  \
        if (!(condition)) {                                                               \
            fprintf(stderr, "%s:%d: %s is false\n", __FILE__, __LINE__, #condition);      \
            exit(1);                                                                      \
        }                                                                                 \
    } while (0)

#define MAX_WIDTH 4096
#define MAX_BATCH 512

static const int64_t capacities[] = {1, 2, 3, 4, 5, 7, 8, 100, 1000, 4096};
static const double specials[] = {0.0, -0.0, 5e-324, 1e-310, 2.2250738585072014e-308, 1.0};
static const double refused[] = {NAN, INFINITY, -INFINITY, -1.0, -5e-324};

#define COUNT(array) ((int)(sizeof(array) / sizeof((array)[0])))

/* The oracle: one mass for each leaf, zero from capacity on, and nothing else. */
static double oracle[MAX_WIDTH];

static uint64_t random_state = 88172645463325252u;

/* Result: the next of a fixed row of random 64-bit numbers (xorshift). */
static uint64_t random_bits(void)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state;
}

/* Result: a double in [0, 1). */
static double uniform(void)
{
    return (double)(random_bits() >> 11) * 0x1p-53;
}

/* Result: an allowed mass: often zero or a corner, else anywhere over twelve orders. */
static double random_mass(void)
{
    switch (random_bits() % 4) {
    case 0:
        return 0.0;
    case 1:
        return specials[random_bits() % COUNT(specials)];
    default:
        return pow(10.0, 12.0 * uniform() - 6.0);
    }
}

/* Input: two doubles. Result: whether they are equal to the last bit, the sign of zero included. */
static int same_bits(double a, double b)
{
    return memcmp(&a, &b, sizeof a) == 0;
}

/* Input: a range of leaves whose length is a power of two. Result: its sum, halves added last. */
static double oracle_sum(const double *mass, int64_t length)
{
    if (length == 1)
        return mass[0];
    int64_t half = length / 2;
    return oracle_sum(mass, half) + oracle_sum(mass + half, half);
}

/* Input: as above. Result: the smallest mass above zero, or infinity. */
static double oracle_minimum(const double *mass, int64_t length)
{
    double least = INFINITY;
    for (int64_t slot = 0; slot < length; slot++)
        if (mass[slot] > 0.0 && mass[slot] < least)
            least = mass[slot];
    return least;
}

/* Input: as above, and a target below the sum. Result: the leaf that holds it, from 0. */
static int64_t oracle_find(const double *mass, int64_t length, double target)
{
    if (length == 1)
        return 0;
    int64_t half = length / 2;
    double left = oracle_sum(mass, half);
    if (target >= left && oracle_sum(mass + half, half) > 0.0)
        return half + oracle_find(mass + half, half, target - left);
    return oracle_find(mass, half, target);
}

/* Input: a tree and a target. Result: none; the leaf found is valid, above zero, carries its own
 * mass, and is the oracle's. */
static void check_find(const segment_tree *tree, double target)
{
    double total = segment_tree_total(tree), mass = -1.0;
    int64_t slot = -1;
    CHECK(segment_tree_find_prefix(tree, &target, &slot, &mass, 1) == -1);
    CHECK(slot >= 0 && slot < tree->capacity);
    CHECK(mass > 0.0 && same_bits(mass, oracle[slot]));
    double lowered = target < total ? target : nextafter(total, 0.0);
    CHECK(slot == oracle_find(oracle, tree->width, lowered));
}

/* Input: a tree. Result: none; targets around each of some prefix sums, the end included, and some
 * plain ones are found right. */
static void check_finds(const segment_tree *tree)
{
    double total = segment_tree_total(tree), prefix = 0.0;
    int64_t stride = 1 + tree->width / 8;
    for (int64_t slot = 0; slot < tree->width; slot++) {
        prefix += oracle[slot];
        if (slot % stride != 0 && slot != tree->width - 1)
            continue;
        check_find(tree, prefix);
        check_find(tree, nextafter(prefix, 0.0));
        check_find(tree, nextafter(prefix, INFINITY));
        check_find(tree, uniform() * total);
    }
    const double ends[] = {0.0, total, nextafter(total, 0.0), nextafter(total, INFINITY), INFINITY};
    for (int i = 0; i < COUNT(ends); i++)
        check_find(tree, ends[i]);
}

/* Input: a tree. Result: none; every leaf, the total and the minimum equal the oracle's. */
static void check_equals_oracle(const segment_tree *tree)
{
    CHECK(segment_tree_check(tree) == -1);
    CHECK(same_bits(segment_tree_total(tree), oracle_sum(oracle, tree->width)));
    CHECK(same_bits(segment_tree_minimum(tree), oracle_minimum(oracle, tree->width)));
    for (int64_t slot = 0; slot < tree->capacity; slot++) {
        double mass = -1.0;
        CHECK(segment_tree_get(tree, &slot, &mass, 1) == -1);
        CHECK(same_bits(mass, oracle[slot]));
    }
}

/* Input: a tree. Result: none; a random batch is in the tree and in the oracle. */
static void set_random_batch(segment_tree *tree)
{
    int64_t slots[MAX_BATCH], k = (int64_t)(random_bits() % (MAX_BATCH + 1));
    double mass[MAX_BATCH];
    int64_t start = (int64_t)(random_bits() % (uint64_t)tree->capacity);
    int contiguous = random_bits() % 2 == 0;
    for (int64_t row = 0; row < k; row++) {
        int64_t step = contiguous ? row : (int64_t)(random_bits() % MAX_WIDTH);
        slots[row] = (start + step) % tree->capacity;
        mass[row] = random_mass();
        oracle[slots[row]] = mass[row] > 0.0 ? mass[row] : 0.0;
    }
    CHECK(segment_tree_set(tree, slots, mass, k) == -1);
}

static void test_random_operations_agree_with_the_oracle(void)
{
    for (int i = 0; i < COUNT(capacities); i++) {
        memset(oracle, 0, sizeof oracle);
        segment_tree *tree = segment_tree_create(capacities[i]);
        CHECK(tree != NULL && segment_tree_capacity(tree) == capacities[i]);
        for (int round = 0; round < 40; round++) {
            set_random_batch(tree);
            check_equals_oracle(tree);
            if (segment_tree_total(tree) > 0.0)
                check_finds(tree);
        }
        segment_tree_destroy(tree);
    }
}

/* The total is rounded up to 1 + 4 eps. Less the first mass, the target just below it is rounded up
 * as well, to the whole of leaf 2; the leaf after that is empty. */
static void test_a_target_rounded_beyond_its_leaf_does_not_fall_on_an_empty_one(void)
{
    double mass[] = {1.5 * DBL_EPSILON, 1.0 + 2 * DBL_EPSILON};
    segment_tree *tree = segment_tree_create(3);
    memset(oracle, 0, sizeof oracle);
    oracle[0] = mass[0];
    oracle[2] = mass[1];
    CHECK(segment_tree_set(tree, (int64_t[]){0, 2}, mass, 2) == -1);
    CHECK(segment_tree_total(tree) == 1.0 + 4 * DBL_EPSILON);
    check_find(tree, 1.0 + 3 * DBL_EPSILON);
    segment_tree_destroy(tree);
}

static void test_an_empty_tree_has_no_leaf_to_find(void)
{
    segment_tree *tree = segment_tree_create(3);
    double target = 0.0, mass = 7.0;
    int64_t slot = 7;
    CHECK(same_bits(segment_tree_total(tree), 0.0));
    CHECK(same_bits(segment_tree_minimum(tree), INFINITY));
    CHECK(segment_tree_find_prefix(tree, &target, &slot, &mass, 1) == 0);
    CHECK(slot == 7 && mass == 7.0);
    CHECK(segment_tree_find_prefix(tree, NULL, NULL, NULL, 0) == -1);
    CHECK(segment_tree_set(tree, NULL, NULL, 0) == -1);
    CHECK(segment_tree_get(tree, NULL, NULL, 0) == -1);
    segment_tree_destroy(tree);
}

static void test_a_refused_batch_changes_nothing(void)
{
    int64_t slots[] = {0, 1, 2, 1}, outside[] = {0, 1, -1, 3};
    double mass[] = {1.0, 2.0, 3.0, 4.0}, out[] = {7.0, 7.0, 7.0, 7.0};
    segment_tree *tree = segment_tree_create(3);
    memset(oracle, 0, sizeof oracle);
    memcpy(oracle, (double[]){1.0, 4.0, 3.0}, 3 * sizeof(double));
    CHECK(segment_tree_set(tree, slots, mass, 4) == -1);
    for (int i = 0; i < COUNT(refused); i++) {
        double bad[] = {9.0, 9.0, 9.0, refused[i]};
        CHECK(segment_tree_set(tree, slots, bad, 4) == 3);
        check_equals_oracle(tree);
    }
    CHECK(segment_tree_set(tree, outside, mass, 4) == 2);
    CHECK(segment_tree_set(tree, &outside[3], mass, 1) == 0);
    CHECK(segment_tree_get(tree, outside, out, 4) == 2 && out[0] == 7.0);
    CHECK(segment_tree_find_prefix(tree, (double[]){0.0, NAN}, slots, out, 2) == 1);
    CHECK(segment_tree_find_prefix(tree, (double[]){-5e-324, 0.0}, slots, out, 2) == 0);
    CHECK(slots[1] == 1 && out[0] == 7.0);
    check_equals_oracle(tree);
    segment_tree_destroy(tree);
}

static void test_of_duplicate_slots_the_last_wins(void)
{
    segment_tree *tree = segment_tree_create(8);
    CHECK(segment_tree_set(tree, (int64_t[]){5, 5}, (double[]){1.0, 9.0}, 2) == -1);
    CHECK(segment_tree_total(tree) == 9.0 && segment_tree_minimum(tree) == 9.0);
    segment_tree_destroy(tree);
}

static void test_check_names_a_damaged_node(void)
{
    segment_tree *tree = segment_tree_create(6);
    CHECK(segment_tree_set(tree, (int64_t[]){0, 5}, (double[]){1.0, 2.0}, 2) == -1);
    for (int64_t n = 1; n < 2 * tree->width; n++) {
        node good = tree->nodes[n];
        const node damaged[] = {{good.sum + 1.0, good.min}, {good.sum, 0.5}, {NAN, good.min}};
        for (int i = 0; i < COUNT(damaged); i++) {
            tree->nodes[n] = damaged[i];
            /* A parent is checked before its child, so a bad child is seen at the parent. */
            CHECK(segment_tree_check(tree) == (n > 1 ? n / 2 : 1));
        }
        tree->nodes[n] = good;
    }
    CHECK(segment_tree_check(tree) == -1);
    segment_tree_destroy(tree);
}

static void test_a_damaged_leaf_with_right_parents_is_named(void)
{
    const node damaged[] = {{1.0, 1.0}, {0.0, 1.0}, {-1.0, INFINITY}};
    segment_tree *tree = segment_tree_create(6);
    for (int i = 0; i < COUNT(damaged); i++) {
        tree->nodes[8 + 6] = damaged[i];
        for (int64_t n = 7; n >= 1; n--)
            recompute(tree->nodes, n);
        CHECK(segment_tree_check(tree) == 8 + 6);
    }
    segment_tree_destroy(tree);
}

static void test_impossible_sizes_give_no_tree(void)
{
    const int64_t impossible[] = {0, -1, INT64_MIN, INT64_MAX, (int64_t)1 << 58, (int64_t)1 << 57};
    for (int i = 0; i < COUNT(impossible); i++)
        CHECK(segment_tree_create(impossible[i]) == NULL);
    segment_tree_destroy(NULL);
}

int main(void)
{
    test_random_operations_agree_with_the_oracle();
    test_a_target_rounded_beyond_its_leaf_does_not_fall_on_an_empty_one();
    test_an_empty_tree_has_no_leaf_to_find();
    test_a_refused_batch_changes_nothing();
    test_of_duplicate_slots_the_last_wins();
    test_check_names_a_damaged_node();
    test_a_damaged_leaf_with_right_parents_is_named();
    test_impossible_sizes_give_no_tree();
    puts("test_segment_tree: all passed");
    return 0;
}
