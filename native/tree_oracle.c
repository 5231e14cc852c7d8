/* tree_oracle.c: see tree_oracle.h. */
#include "tree_oracle.h"

/* Memory that the sanitizer cannot give is to be NULL, as it is without it. */
const char *__asan_default_options(void);
const char *__asan_default_options(void)
{
    return "allocator_may_return_null=1";
}

void *have(size_t bytes)
{
    void *memory = malloc(bytes);
    CHECK(memory != NULL);
    return memory;
}

rows make_rows(int64_t k)
{
    return (rows){k, have((size_t)k * 8 + !k), have((size_t)k * 8 + !k)};
}

void drop_rows(rows *batch)
{
    free(batch->slots);
    free(batch->mass);
}

oracle oracle_create(int kind, int64_t capacity, double alpha)
{
    oracle made = {kind, capacity, alpha, NULL, NULL, NULL, NULL, INFINITY};
    size_t slots = (size_t)capacity;
    made.mass = have(slots * sizeof *made.mass);
    made.position = have(slots * sizeof *made.position);
    made.prefix = have((slots + 1) * sizeof *made.prefix);
    made.order = have(slots * sizeof *made.order);
    for (int64_t slot = 0; slot < capacity; slot++)
        made.mass[slot] = 0.0;
    return made;
}

void oracle_destroy(oracle *it)
{
    free(it->mass);
    free(it->position);
    free(it->prefix);
    free(it->order);
}

int same_bits(double a, double b)
{
    return memcmp(&a, &b, sizeof a) == 0;
}

int oracle_allows(const oracle *it, int64_t slot, double mass)
{
    double largest = it->kind == SEGMENT_TREE_WIDE32 ? FLT_MAX : DBL_MAX;
    return slot >= 0 && slot < it->capacity && mass >= 0.0 && mass <= largest;
}

void oracle_set(oracle *it, int64_t slot, double mass)
{
    double stored = mass > 0.0 ? mass : 0.0;
    if (it->kind == SEGMENT_TREE_WIDE32 && mass > 0.0) {
        stored = (float)mass;
        stored = stored > 0.0 ? stored : 0x1p-149;
    }
    it->mass[slot] = stored;
}

static int by_rank(const void *first, const void *second)
{
    const filled_slot *a = first, *b = second;
    if (a->mass != b->mass)
        return a->mass > b->mass ? -1 : 1;
    return a->slot < b->slot ? -1 : 1;
}

/* Input: a filled slot of an oracle whose positions are right. Result: what it weighs in a draw. */
static double oracle_weight(const oracle *it, int64_t slot)
{
    if (it->kind != SEGMENT_TREE_RANKED)
        return it->mass[slot];
    return pow((double)(it->position[slot] + 1), -it->alpha);
}

void oracle_look(oracle *it)
{
    int64_t size = 0;
    for (int64_t slot = 0; slot < it->capacity; slot++) {
        it->position[slot] = -1;
        if (it->kind != SEGMENT_TREE_RANKED || it->mass[slot] > 0.0)
            it->order[size++] = (filled_slot){it->mass[slot], slot};
    }
    if (it->kind == SEGMENT_TREE_RANKED)
        qsort(it->order, (size_t)size, sizeof *it->order, by_rank);
    it->prefix[0] = 0.0L;
    it->minimum = INFINITY;
    for (int64_t at = 0; at < size; at++) {
        int64_t slot = it->order[at].slot;
        it->position[slot] = at;
        double weight = oracle_weight(it, slot);
        it->prefix[at + 1] = it->prefix[at] + weight;
        it->minimum = weight > 0.0 && weight < it->minimum ? weight : it->minimum;
    }
    for (int64_t at = size; at < it->capacity; at++)
        it->prefix[at + 1] = it->prefix[at];
}

/* Input: a tree. Result: none; its total is the sum of the masses, and that of a new tree with them. */
static void oracle_check_total(const oracle *it, const segment_tree *tree)
{
    double total = segment_tree_total(tree);
    long double sum = it->prefix[it->capacity], error = total - sum;
    if (sum == 0.0L)
        CHECK(same_bits(total, 0.0));
    else if (sum > (long double)DBL_MAX * (1.0L - CLOSE))
        CHECK(total > 0.0);
    else
        CHECK(error <= CLOSE * sum && -error <= CLOSE * sum);
    segment_tree *fresh = segment_tree_create(it->kind, it->capacity, it->alpha, 1);
    CHECK(fresh != NULL && segment_tree_load(fresh, it->mass) == -1);
    CHECK(same_bits(total, segment_tree_total(fresh)));
    segment_tree_destroy(fresh);
}

void oracle_check(const oracle *it, const segment_tree *tree)
{
    double *mass = have((size_t)it->capacity * sizeof *mass);
    CHECK(segment_tree_check(tree) == -1);
    segment_tree_save(tree, mass);
    CHECK(memcmp(mass, it->mass, (size_t)it->capacity * sizeof *mass) == 0);
    free(mass);
    CHECK(same_bits(segment_tree_minimum(tree), it->minimum));
    oracle_check_total(it, tree);
}

void oracle_check_found(const oracle *it, double total, double target, int64_t slot, double mass, long double off)
{
    CHECK(slot >= 0 && slot < it->capacity && it->mass[slot] > 0.0);
    CHECK(same_bits(mass, oracle_weight(it, slot)));
    if (total > DBL_MAX)
        return;
    double lowered = target < total ? target : nextafter(total, 0.0);
    int64_t at = it->position[slot];
    CHECK(lowered >= it->prefix[at] - off * total);
    /* With no leeway the sums are exact, and a target is never at the end of its slot. */
    CHECK(off > 0.0L ? lowered <= it->prefix[at + 1] + off * total : lowered < it->prefix[at + 1]);
}

/* By bisection of the numbers from 0 to the total, which are in the order of their bits. */
double oracle_edge(const oracle *it, const segment_tree *tree, int64_t position)
{
    double target = segment_tree_total(tree), mass;
    int64_t low = -1, high, slot;
    memcpy(&high, &target, sizeof high);
    while (high - low > 1) {
        int64_t middle = low + (high - low) / 2;
        memcpy(&target, &middle, sizeof target);
        CHECK(segment_tree_find_prefix(tree, &target, &slot, &mass, 1) == -1);
        CHECK(slot >= 0 && slot < it->capacity);
        if (it->position[slot] >= position)
            high = middle;
        else
            low = middle;
    }
    memcpy(&target, &high, sizeof target);
    return target;
}

/* Input: the state of a stream. Result: its next number as segment_tree_draw documents it, in [0, 1). */
static double splitmix_uniform(uint64_t *state)
{
    uint64_t bits = *state += 0x9E3779B97F4A7C15u;
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9u;
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EBu;
    return (double)((bits ^ (bits >> 31)) >> 12) * 0x1p-52;
}

void oracle_check_draw(const oracle *it, const segment_tree *tree, uint64_t *state, int64_t k)
{
    double total = segment_tree_total(tree);
    double *target = have((size_t)k * 8), *mass = have((size_t)k * 8);
    double *found = have((size_t)k * 8), *probability = have((size_t)k * 8);
    int64_t *slots = have((size_t)k * 8), *drawn = have((size_t)k * 8);
    uint64_t expected = *state;
    for (int64_t row = 0; row < k; row++) {
        target[row] = ((double)row + splitmix_uniform(&expected)) * (total / (double)k);
        if (target[row] != target[row]) /* 0 * infinity */
            target[row] = total;
    }
    CHECK(segment_tree_find_prefix(tree, target, slots, found, k) == -1);
    CHECK(segment_tree_draw(tree, state, drawn, mass, probability, k) == -1);
    CHECK(*state == expected);
    CHECK(memcmp(slots, drawn, (size_t)k * 8) == 0 && memcmp(mass, found, (size_t)k * 8) == 0);
    for (int64_t row = 0; row < k; row++) {
        oracle_check_found(it, total, target[row], drawn[row], mass[row], CLOSE);
        CHECK(same_bits(probability[row], mass[row] / total));
    }
    free(target), free(mass), free(found), free(probability), free(slots), free(drawn);
}
