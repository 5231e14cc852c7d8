/* test_segment_tree.c: every kind of tree against the oracle of tree_oracle.h, by segment_tree.h alone.
 *
 * Trees that must agree to the last bit (portable and AVX2; the forms of a binary tree) are twins: they
 * get the same calls, and whatever one answers all must. Run under the address and undefined behaviour
 * sanitizers.
 */
#include "tree_oracle.h"

#define MAX_TWINS 5
#define MAX_BATCH 700

static const int64_t capacities[] = {1, 2, 3, 7, 8, 9, 15, 16, 17, 63, 64, 65, 100, 511, 512, 513, 1000, 4096, 4097, 40000};
static const double specials[] = {0.0, -0.0, 5e-324, 1e-310, DBL_MIN, 1e-46, 0x1p-149, 0x1p-150, 1e-40, FLT_MIN, 1.0, 0.1};

static const struct {
    int kind;
    double alpha;
} kinds[] = {
    {SEGMENT_TREE_WIDE64, 0.0}, {SEGMENT_TREE_WIDE32, 0.0}, {SEGMENT_TREE_BINARY, 0.0}, {SEGMENT_TREE_RANKED, 0.0},
    {SEGMENT_TREE_RANKED, 0.6}, {SEGMENT_TREE_RANKED, 1.0}, {SEGMENT_TREE_RANKED, SEGMENT_TREE_LARGEST_ALPHA},
};

typedef struct {
    oracle truth;
    int count;
    segment_tree *tree[MAX_TWINS];
} twins;

static uint64_t random_state = 88172645463325252u;

/* Result: the next of a fixed row of random 64-bit numbers (xorshift). */
static uint64_t random_bits(void)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state;
}

/* Input: a limit >= 1. Result: a whole number in [0, limit). */
static int64_t random_below(int64_t limit)
{
    return (int64_t)(random_bits() % (uint64_t)limit);
}

/* Result: a double in [0, 1). */
static double uniform(void)
{
    return (double)(random_bits() >> 11) * 0x1p-53;
}

/* Input: whether sums are to be exact. Result: an allowed mass: often zero or, unless exact, a corner;
 * else a small whole number, or anywhere over twelve orders. */
static double random_mass(int exact)
{
    int64_t choice = random_below(4);
    if (choice == 0)
        return 0.0;
    if (exact)
        return (double)random_below(1000);
    return choice == 1 ? specials[random_below(COUNT(specials))] : pow(10.0, 12.0 * uniform() - 6.0);
}

/* Result: the kernels that a wide tree must have here, if it may. */
static const char *fastest(void)
{
#ifdef HAVE_AVX2
    int has_all = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("popcnt") && __builtin_cpu_supports("bmi");
    return has_all ? "avx2" : "portable";
#else
    return "portable";
#endif
}

/* Input: an entry of kinds and a capacity. Result: empty twins, to be ended with drop_twins. */
static twins make_twins(int which, int64_t capacity)
{
    int kind = kinds[which].kind;
    twins made = {.truth = oracle_create(kind, capacity, kinds[which].alpha)};
    made.count = kind == SEGMENT_TREE_BINARY ? MAX_TWINS : kind == SEGMENT_TREE_RANKED ? 1 : 2;
    for (int i = 0; i < made.count; i++) {
        made.tree[i] = segment_tree_create(kind, capacity, kinds[which].alpha, i == 0);
        CHECK(made.tree[i] != NULL && segment_tree_capacity(made.tree[i]) == capacity);
        CHECK(kind > SEGMENT_TREE_WIDE32 || strcmp(segment_tree_backend(made.tree[i]), i == 0 ? "portable" : fastest()) == 0);
        CHECK(segment_tree_bytes(made.tree[i]) >= capacity * (kind == SEGMENT_TREE_WIDE32 ? 4 : 8));
        int form = i < 4 ? BINARY_AUTO + i : BINARY_AUTO;
        CHECK(segment_tree_binary_form(made.tree[i], form, i < 4 ? INT64_MAX : 50) == (kind == SEGMENT_TREE_BINARY ? 0 : -1));
    }
    return made;
}

static void drop_twins(twins *all)
{
    for (int i = 0; i < all->count; i++)
        segment_tree_destroy(all->tree[i]);
    oracle_destroy(&all->truth);
}

/* Input: twins. Result: none; each holds what the oracle does, and so all the same. */
static void check_state(twins *all)
{
    oracle_look(&all->truth);
    for (int i = 0; i < all->count; i++)
        oracle_check(&all->truth, all->tree[i]);
}

/* Input: twins and whether sums are to be exact. Result: a random batch is set in all, by slots that are
 * anywhere, few, or neighbours, or by set_range, which wraps around; or all are loaded. */
static void set_random_batch(twins *all, int exact)
{
    int64_t capacity = all->truth.capacity, way = random_below(6);
    int64_t first = random_below(capacity), k = random_below(MAX_BATCH + 1);
    k = way >= 4 && k > capacity ? capacity : k;
    if (way == 5 && random_below(4) == 0)
        first = 0, k = capacity;
    rows batch = make_rows(k);
    for (int64_t row = 0; row < k; row++) {
        int64_t step = way < 2 ? random_below(capacity) : way == 2 ? random_below(5) : row;
        batch.slots[row] = (first + step) % capacity;
        batch.mass[row] = random_mass(exact);
        oracle_set(&all->truth, batch.slots[row], batch.mass[row]);
    }
    for (int i = 0; i < all->count; i++) {
        if (way < 4)
            CHECK(segment_tree_set(all->tree[i], batch.slots, batch.mass, k) == -1);
        else if (k == capacity && first == 0)
            CHECK(segment_tree_load(all->tree[i], batch.mass) == -1);
        else
            CHECK(segment_tree_set_range(all->tree[i], first, batch.mass, k) == -1);
    }
    drop_rows(&batch);
}

/* Input: twins whose oracle has looked, not empty, and memory for 4 n + 7 rows. Result: none; the targets are
 * at and around the ends of n positions (of some, where the tree has them, and many of those at the ends of
 * nodes), anywhere, and at and beyond the total. */
static void choose_targets(const twins *all, double *target, int64_t n)
{
    double total = segment_tree_total(all->tree[0]), last = nextafter(total, 0.0);
    for (int64_t i = 0; i < n; i++, target += 4) {
        int64_t end = random_below(all->truth.capacity + 1), node = (int64_t)1 << 3 * random_below(5);
        target[0] = i < 5 ? oracle_edge(&all->truth, all->tree[0], end / node * node) : (double)all->truth.prefix[end];
        target[1] = nextafter(target[0], 0.0);
        target[2] = nextafter(target[0], INFINITY);
        target[3] = uniform() * last;
    }
    memcpy(target, (double[]){0.0, -0.0, last, total, nextafter(total, INFINITY), DBL_MAX, INFINITY}, 7 * sizeof *target);
}

/* Input: twins whose oracle has looked, not empty, and whether sums are exact. Result: none; all twins
 * find the same slots with the same masses, and those are right. */
static void check_finds(const twins *all, int exact)
{
    int64_t n = random_below(80), k = 4 * n + 7;
    double *target = have((size_t)k * 8), total = segment_tree_total(all->tree[0]);
    long double off = exact && (all->truth.kind != SEGMENT_TREE_RANKED || all->truth.alpha == 0.0) ? 0.0L : CLOSE;
    rows first = make_rows(k), found = make_rows(k);
    choose_targets(all, target, n);
    CHECK(segment_tree_find_prefix(all->tree[0], target, first.slots, first.mass, k) == -1);
    for (int64_t row = 0; row < k; row++)
        oracle_check_found(&all->truth, total, target[row], first.slots[row], first.mass[row], off);
    for (int i = 1; i < all->count; i++) {
        CHECK(segment_tree_find_prefix(all->tree[i], target, found.slots, found.mass, k) == -1);
        CHECK(memcmp(found.slots, first.slots, (size_t)k * 8) == 0 && memcmp(found.mass, first.mass, (size_t)k * 8) == 0);
    }
    drop_rows(&first), drop_rows(&found), free(target);
}

/* Input: twins whose oracle has looked, not empty. Result: none; the draws of all are as documented. */
static void check_draws(const twins *all)
{
    uint64_t seed = random_bits();
    int64_t k = 1 + random_below(MAX_BATCH);
    for (int i = 0; i < all->count; i++) {
        uint64_t state = seed;
        oracle_check_draw(&all->truth, all->tree[i], &state, k);
    }
}

/* Input: twins whose oracle has looked. Result: none; get answers for slots in any order. */
static void check_gets(const twins *all)
{
    rows batch = make_rows(random_below(MAX_BATCH + 1));
    for (int64_t row = 0; row < batch.k; row++)
        batch.slots[row] = random_below(all->truth.capacity);
    for (int i = 0; i < all->count; i++) {
        CHECK(segment_tree_get(all->tree[i], batch.slots, batch.mass, batch.k) == -1);
        for (int64_t row = 0; row < batch.k; row++)
            CHECK(same_bits(batch.mass[row], all->truth.mass[batch.slots[row]]));
    }
    drop_rows(&batch);
}

static void test_random_operations_agree_with_the_oracle(void)
{
    for (int i = 0; i < COUNT(kinds) * COUNT(capacities); i++) {
        int64_t capacity = capacities[i / COUNT(kinds)];
        twins all = make_twins(i % COUNT(kinds), capacity);
        for (int round = 0; round < (capacity > 5000 ? 10 : 60); round++) {
            int exact = round < 4;
            set_random_batch(&all, exact);
            check_state(&all);
            check_gets(&all);
            if (segment_tree_total(all.tree[0]) > 0.0) {
                check_finds(&all, exact);
                check_draws(&all);
            }
        }
        drop_twins(&all);
    }
}

/* Input: twins with some masses, and a row of an update that must be refused. Result: none; the row is
 * named by set, set_range and load wherever it stands, and check_state sees no change. */
static void check_refused_update(twins *all, int64_t slot, double mass)
{
    int64_t capacity = all->truth.capacity, k = 1 + random_below(130), bad = random_below(k);
    rows batch = make_rows(k), full = make_rows(capacity);
    for (int64_t row = 0; row < k; row++)
        batch.slots[row] = row > bad ? slot : random_below(capacity), batch.mass[row] = row > bad ? mass : 9.0;
    batch.slots[bad] = slot, batch.mass[bad] = mass;
    for (int64_t row = 0; row < capacity; row++)
        full.mass[row] = 9.0;
    full.mass[capacity - 1] = mass;
    int bad_mass = !oracle_allows(&all->truth, 0, mass);
    for (int i = 0; i < all->count; i++) {
        CHECK(segment_tree_set(all->tree[i], batch.slots, batch.mass, k) == bad);
        CHECK(!bad_mass || segment_tree_load(all->tree[i], full.mass) == capacity - 1);
        CHECK(!bad_mass || k > capacity || segment_tree_set_range(all->tree[i], capacity - 1, batch.mass, k) == bad);
        CHECK(bad_mass || segment_tree_set_range(all->tree[i], slot, batch.mass, k) == 0);
    }
    check_state(all);
    drop_rows(&batch), drop_rows(&full);
}

static void test_a_refused_update_names_its_row_and_changes_nothing(void)
{
    const double masses[] = {NAN, -NAN, INFINITY, -INFINITY, -1.0, -5e-324, -DBL_MAX};
    for (int i = 0; i < COUNT(kinds) * 4; i++) {
        twins all = make_twins(i % COUNT(kinds), ((int64_t[]){1, 8, 100, 600})[i / COUNT(kinds)]);
        int64_t capacity = all.truth.capacity;
        const int64_t slots[] = {-1, capacity, INT64_MIN, INT64_MAX, capacity + 64, (int64_t)1 << 32};
        set_random_batch(&all, 0);
        for (int bad = 0; bad < COUNT(masses); bad++)
            check_refused_update(&all, random_below(capacity), masses[bad]);
        for (int bad = 0; bad < COUNT(slots); bad++)
            check_refused_update(&all, slots[bad], 1.0);
        if (all.truth.kind == SEGMENT_TREE_WIDE32) {
            check_refused_update(&all, 0, nextafter(FLT_MAX, INFINITY));
            check_refused_update(&all, 0, DBL_MAX);
        }
        drop_twins(&all);
    }
}

static void test_a_range_longer_than_the_tree_is_refused_whatever_it_holds(void)
{
    for (int which = 0; which < COUNT(kinds); which++) {
        twins all = make_twins(which, 9);
        double mass[10] = {NAN, 1.0};
        for (int i = 0; i < all.count; i++) {
            CHECK(segment_tree_set_range(all.tree[i], 3, mass, 10) == 9);
            CHECK(segment_tree_set_range(all.tree[i], 9, mass, 10) == 0);
        }
        check_state(&all);
        drop_twins(&all);
    }
}

static void test_a_refused_question_writes_nothing(void)
{
    const double targets[] = {NAN, -1.0, -5e-324, -INFINITY};
    const int64_t slots[] = {-1, 70, INT64_MAX, INT64_MIN};
    for (int i = 0; i < COUNT(kinds) * COUNT(targets); i++) {
        twins all = make_twins(i % COUNT(kinds), 70);
        double bad = targets[i / COUNT(kinds)];
        for (int twin = 0; twin < all.count; twin++) {
            segment_tree *tree = all.tree[twin];
            int64_t asked[3] = {1, 2, slots[i / COUNT(kinds)]}, found[3] = {7, 7, 7};
            double target[3] = {0.0, bad, bad}, mass[3] = {7.0, 7.0, 7.0};
            CHECK(segment_tree_set(tree, (int64_t[]){3}, (double[]){2.0}, 1) == -1);
            CHECK(segment_tree_find_prefix(tree, target, found, mass, 3) == 1);
            CHECK(segment_tree_get(tree, asked, mass, 3) == 2);
            for (int row = 0; row < 3; row++)
                CHECK(found[row] == 7 && mass[row] == 7.0);
        }
        drop_twins(&all);
    }
}

static void test_an_empty_tree_has_nothing_to_draw(void)
{
    for (int which = 0; which < COUNT(kinds); which++) {
        twins all = make_twins(which, 20);
        for (int i = 0; i < 2 * all.count; i++) {
            segment_tree *tree = all.tree[i / 2];
            uint64_t state = 5;
            int64_t slot[1] = {7};
            double target[1] = {0.0}, mass[1] = {7.0}, probability[1] = {7.0};
            CHECK(segment_tree_total(tree) == 0.0 && segment_tree_minimum(tree) == INFINITY);
            CHECK(segment_tree_find_prefix(tree, target, slot, mass, 1) == 0);
            CHECK(segment_tree_draw(tree, &state, slot, mass, probability, 1) == 0);
            CHECK(state == 5 && slot[0] == 7 && mass[0] == 7.0 && probability[0] == 7.0);
            /* Filled and emptied again, it is as empty as before. */
            CHECK(segment_tree_set(tree, (int64_t[]){19}, (double[]){3.0}, 1) == -1 && segment_tree_total(tree) > 0.0);
            CHECK(segment_tree_set(tree, (int64_t[]){19}, (double[]){-0.0}, 1) == -1);
        }
        check_state(&all);
        drop_twins(&all);
    }
}

static void test_no_rows_is_a_call_that_does_nothing_and_reads_nothing(void)
{
    for (int i = 0; i < COUNT(kinds) * 2; i++) {
        twins all = make_twins(i / 2, 20);
        int64_t k = i % 2 ? 0 : -3;
        for (int twin = 0; twin < all.count; twin++) {
            segment_tree *tree = all.tree[twin];
            CHECK(segment_tree_set(tree, NULL, NULL, k) == -1 && segment_tree_set_range(tree, -1, NULL, k) == -1);
            CHECK(segment_tree_get(tree, NULL, NULL, k) == -1 && segment_tree_find_prefix(tree, NULL, NULL, NULL, k) == -1);
            CHECK(segment_tree_draw(tree, NULL, NULL, NULL, NULL, k) == -1);
        }
        check_state(&all);
        drop_twins(&all);
    }
}

/* A search of an infinite total is out of proportion, but what it finds can be drawn. The last stream's
 * first number is 0, and its first target 0 * infinity. */
static void test_an_infinite_total_still_gives_slots_above_zero(void)
{
    for (int i = 0; i < COUNT(capacities) * 2; i++) {
        twins all = make_twins(i % 2 ? 0 : 2, capacities[i / 2]);
        int64_t capacity = all.truth.capacity;
        rows batch = make_rows(capacity);
        for (int64_t slot = 0; slot < capacity; slot++) {
            batch.mass[slot] = slot < capacity / 3 ? 0.0 : random_below(3) ? DBL_MAX : random_mass(0);
            oracle_set(&all.truth, slot, batch.mass[slot]);
        }
        for (int twin = 0; twin < all.count; twin++)
            CHECK(segment_tree_load(all.tree[twin], batch.mass) == -1);
        check_state(&all);
        if (segment_tree_total(all.tree[0]) > 0.0) {
            check_finds(&all, 0);
            check_draws(&all);
            for (int twin = 0; twin < all.count; twin++)
                oracle_check_draw(&all.truth, all.tree[twin], &(uint64_t){0 - 0x9E3779B97F4A7C15u}, 1 + random_below(5));
        }
        drop_rows(&batch);
        drop_twins(&all);
    }
}

static void test_impossible_trees_are_none_and_impossible_forms_are_refused(void)
{
    const int64_t bit = 1, sizes[] = {0, -1, INT64_MIN, INT64_MAX, INT64_MAX / 8, bit << 58, (bit << 58) - 1, bit << 57, bit << 46};
    const double alphas[] = {NAN, INFINITY, -1.0, -5e-324, nextafter(SEGMENT_TREE_LARGEST_ALPHA, INFINITY)};
    for (int kind = SEGMENT_TREE_WIDE64; kind <= SEGMENT_TREE_RANKED; kind++)
        for (int i = 0; i < COUNT(sizes); i++)
            CHECK(segment_tree_create(kind, sizes[i], 0.5, 0) == NULL);
    for (int i = 0; i < COUNT(alphas); i++) {
        CHECK(segment_tree_create(SEGMENT_TREE_RANKED, 8, alphas[i], 0) == NULL);
        segment_tree *tree = segment_tree_create(SEGMENT_TREE_WIDE64, 8, alphas[i], 0);
        CHECK(tree != NULL); /* which has no use for alpha */
        segment_tree_destroy(tree);
    }
    segment_tree *binary = segment_tree_create(SEGMENT_TREE_BINARY, 8, 0.5, 0);
    CHECK(segment_tree_binary_form(binary, -1, 1) == -1 && segment_tree_binary_form(binary, BINARY_LEVELS + 1, 1) == -1);
    segment_tree_destroy(binary);
    CHECK(segment_tree_create(-1, 8, 0.5, 0) == NULL && segment_tree_create(4, 8, 0.5, 0) == NULL);
    segment_tree_destroy(NULL);
}

int main(void)
{
    test_random_operations_agree_with_the_oracle();
    test_a_refused_update_names_its_row_and_changes_nothing();
    test_a_range_longer_than_the_tree_is_refused_whatever_it_holds();
    test_a_refused_question_writes_nothing();
    test_an_empty_tree_has_nothing_to_draw();
    test_no_rows_is_a_call_that_does_nothing_and_reads_nothing();
    test_an_infinite_total_still_gives_slots_above_zero();
    test_impossible_trees_are_none_and_impossible_forms_are_refused();
    puts("test_segment_tree: all passed");
    return 0;
}
