/* fuzz_segment_tree.c: any bytes are a tree and a history of calls, good and bad, checked by the oracle.
 *
 * With libFuzzer (`make fuzz CC=clang`) the bytes are its own; with -DREPLAY they are the files named on
 * the command line, so that every compiler's sanitizers see what was once found (`make test`).
 */
#include "tree_oracle.h"

#define MAX_LOOKS 12 /* looks at every slot: they take most of the time */

/* What is left of the bytes. Behind their end all are zero. */
typedef struct {
    const uint8_t *next;
    size_t left;
} bytes;

typedef struct {
    bytes in;
    segment_tree *tree;
    oracle truth;
    int fresh; /* the oracle has looked since the last change */
    int looks;
} history;

static const double corners[] = {0.0, -0.0, 5e-324, 1e-310, DBL_MIN, 0x1p-149, 0x1p-150, 1e-40, FLT_MAX, 0.1,
                                 DBL_MAX, 1e308, 3.5e38, 1e16, NAN, INFINITY, -INFINITY, -1.0, -5e-324};

static unsigned byte(bytes *in)
{
    if (in->left == 0)
        return 0;
    in->left--;
    return *in->next++;
}

/* Input: a limit >= 1. Result: a whole number in [0, limit). */
static int64_t below_limit(bytes *in, int64_t limit)
{
    int64_t number = byte(in) * 256;
    return (number + byte(in)) % limit;
}

/* Result: a slot, seldom one just outside the tree or far away. */
static int64_t a_slot(history *h)
{
    int64_t capacity = h->truth.capacity, number = below_limit(&h->in, 65536);
    if (number >= 65530)
        return (int64_t[]){-1, capacity, INT64_MIN, INT64_MAX, capacity + 7, -capacity}[number - 65530];
    return number % capacity;
}

/* Result: any double at all, a corner, or a plain mass. */
static double a_number(bytes *in)
{
    unsigned choice = byte(in);
    uint64_t bits = 0;
    double number;
    if (choice == 255)
        return corners[byte(in) % COUNT(corners)];
    if (choice > 250) {
        for (int i = 0; i < 8; i++)
            bits = bits << 8 | byte(in);
        memcpy(&number, &bits, sizeof number);
        return number;
    }
    return choice < 32 ? 0.0 : ldexp(8 + choice % 8, (int)(choice / 8) - 16);
}

/* Result: the oracle's prefix sums are those of its masses. */
static void look(history *h)
{
    if (!h->fresh)
        oracle_look(&h->truth);
    h->fresh = 1;
}

/* Result: none; the whole tree is as the oracle's, unless it was looked at too often. */
static void check_all(history *h)
{
    if (h->looks++ >= MAX_LOOKS)
        return;
    look(h);
    oracle_check(&h->truth, h->tree);
}

/* Input: rows of an update and what the call returned. Result: none; that was right, and the oracle has
 * the rows too. A refusal is looked at, since it must have changed nothing. */
static void check_update(history *h, const rows *batch, int64_t returned)
{
    for (int64_t row = 0; row < batch->k; row++)
        if (!oracle_allows(&h->truth, batch->slots[row], batch->mass[row])) {
            CHECK(returned == row);
            check_all(h);
            return;
        }
    CHECK(returned == -1);
    for (int64_t row = 0; row < batch->k; row++)
        oracle_set(&h->truth, batch->slots[row], batch->mass[row]);
    h->fresh = 0;
}

static void do_set(history *h)
{
    rows batch = make_rows(byte(&h->in));
    int neighbours = byte(&h->in) % 2;
    for (int64_t row = 0; row < batch.k; row++) {
        int near = neighbours && row > 0;
        batch.slots[row] = near ? (batch.slots[0] & INT32_MAX) % h->truth.capacity + row : a_slot(h);
        if (near)
            batch.slots[row] %= h->truth.capacity;
        batch.mass[row] = a_number(&h->in);
    }
    check_update(h, &batch, segment_tree_set(h->tree, batch.slots, batch.mass, batch.k));
    drop_rows(&batch);
}

/* The masses given repeat, so that a few bytes can fill a large tree. */
static void do_set_range(history *h)
{
    int64_t capacity = h->truth.capacity, first = a_slot(h), period = 1 + byte(&h->in) % 16;
    rows batch = make_rows(below_limit(&h->in, capacity + 2));
    for (int64_t row = 0; row < batch.k; row++) {
        batch.slots[row] = first < 0 || first >= capacity ? -1 : (first + row) % capacity;
        batch.mass[row] = row < period ? a_number(&h->in) : batch.mass[row - period];
    }
    int64_t returned = segment_tree_set_range(h->tree, first, batch.mass, batch.k);
    if (batch.k > capacity && batch.slots[0] >= 0)
        CHECK(returned == capacity);
    else
        check_update(h, &batch, returned);
    drop_rows(&batch);
}

static void do_get(history *h)
{
    rows batch = make_rows(byte(&h->in));
    int64_t refused = -1;
    for (int64_t row = 0; row < batch.k; row++) {
        batch.slots[row] = a_slot(h);
        batch.mass[row] = -7.0;
        if (refused < 0 && !oracle_allows(&h->truth, batch.slots[row], 0.0))
            refused = row;
    }
    CHECK(segment_tree_get(h->tree, batch.slots, batch.mass, batch.k) == refused);
    for (int64_t row = 0; row < batch.k; row++)
        CHECK(same_bits(batch.mass[row], refused < 0 ? h->truth.mass[batch.slots[row]] : -7.0));
    drop_rows(&batch);
}

/* Result: a target: any number, or one at or right beside the end of a slot. */
static double a_target(history *h)
{
    unsigned choice = byte(&h->in) % 4;
    if (choice == 0)
        return a_number(&h->in);
    double end = (double)h->truth.prefix[below_limit(&h->in, h->truth.capacity + 1)];
    return choice == 1 ? end : nextafter(end, choice == 2 ? 0.0 : INFINITY);
}

static void do_find(history *h)
{
    rows batch = make_rows(byte(&h->in));
    double *target = have((size_t)batch.k * 8 + 1), total = segment_tree_total(h->tree);
    int64_t refused = batch.k > 0 && total == 0.0 ? 0 : -1;
    look(h);
    for (int64_t row = 0; row < batch.k; row++) {
        target[row] = a_target(h);
        batch.slots[row] = -7;
        if (refused < 0 && !(target[row] >= 0.0))
            refused = row;
    }
    CHECK(segment_tree_find_prefix(h->tree, target, batch.slots, batch.mass, batch.k) == refused);
    for (int64_t row = 0; row < batch.k; row++)
        if (refused < 0)
            oracle_check_found(&h->truth, total, target[row], batch.slots[row], batch.mass[row], CLOSE);
        else
            CHECK(batch.slots[row] == -7);
    free(target);
    drop_rows(&batch);
}

static void do_draw(history *h)
{
    int64_t k = 1 + byte(&h->in);
    uint64_t state = (uint64_t)below_limit(&h->in, 65536) * 0x9E3779B97F4A7C15u, before = state;
    look(h);
    if (segment_tree_total(h->tree) > 0.0) {
        oracle_check_draw(&h->truth, h->tree, &state, k);
        return;
    }
    CHECK(segment_tree_draw(h->tree, &state, NULL, NULL, NULL, k) == 0);
    CHECK(state == before);
}

static void set_form(history *h)
{
    int form = (int)(byte(&h->in) % 6) - 1;
    int fits = h->truth.kind == SEGMENT_TREE_BINARY && form >= BINARY_AUTO && form <= BINARY_LEVELS;
    CHECK(segment_tree_binary_form(h->tree, form, byte(&h->in)) == (fits ? 0 : -1));
}

/* Result: the history goes on with a new tree that has loaded what the old one saved. */
static void do_reload(history *h)
{
    double *mass = have((size_t)h->truth.capacity * sizeof *mass);
    segment_tree *fresh = segment_tree_create(h->truth.kind, h->truth.capacity, h->truth.alpha, byte(&h->in) % 2);
    CHECK(fresh != NULL);
    segment_tree_save(h->tree, mass);
    CHECK(segment_tree_load(fresh, mass) == -1);
    CHECK(same_bits(segment_tree_total(fresh), segment_tree_total(h->tree)));
    CHECK(same_bits(segment_tree_minimum(fresh), segment_tree_minimum(h->tree)));
    segment_tree_destroy(h->tree);
    h->tree = fresh;
    free(mass);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static void (*const calls[])(history *) = {do_set, do_set_range, do_get, do_find, do_draw, set_form, do_reload, check_all};
    static const double alphas[] = {0.0, 0.6, 1.0, SEGMENT_TREE_LARGEST_ALPHA};
    history h = {.in = {data, size}};
    unsigned choice = byte(&h.in);
    int kind = choice % 4;
    double alpha = alphas[choice / 4 % 4];
    int64_t capacity = 1 + below_limit(&h.in, choice & 64 ? 40 : 3000);
    h.tree = segment_tree_create(kind, capacity, alpha, choice & 128 ? 1 : 0);
    CHECK(h.tree != NULL);
    h.truth = oracle_create(kind, capacity, alpha);
    while (h.in.left > 0)
        calls[byte(&h.in) % COUNT(calls)](&h);
    h.looks = 0;
    check_all(&h);
    segment_tree_destroy(h.tree);
    oracle_destroy(&h.truth);
    return 0;
}

#ifdef REPLAY
/* Input: names of files. Result: none; the bytes of each are tried. */
int main(int count, char **names)
{
    for (int i = 1; i < count; i++) {
        FILE *file = fopen(names[i], "rb");
        CHECK(file != NULL);
        uint8_t *data = have(1 << 16);
        size_t size = fread(data, 1, 1 << 16, file);
        fclose(file);
        data = realloc(data, size + !size); /* so that reading beyond is seen */
        CHECK(data != NULL);
        LLVMFuzzerTestOneInput(data, size);
        free(data);
    }
    printf("fuzz_segment_tree: all passed (%d inputs)\n", count - 1);
    return 0;
}
#endif
