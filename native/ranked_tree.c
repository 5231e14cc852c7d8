/* ranked_tree.c: draws by rank (Schaul et al. 2016, section 3.3): P(i) ~ rank(i)^-alpha.
 *
 * Rank 1 is the largest priority; of equal priorities the lower slot comes first. A slot of priority
 * zero is empty and has no rank. The mass of rank r is r^-alpha, and the total of n filled slots is
 * cumulative[n], summed from rank 1 on; a target falls on rank r when cumulative[r - 1] <= target <
 * cumulative[r]. So find_prefix gives a slot and its mass r^-alpha, and get what was set.
 *
 * The ranks are exact at all times. Filled slots are kept in order in blocks of up to BLOCK, and the
 * blocks in a directory, so that an update moves one block's part and, when a block splits or two
 * merge, the directory's. Two neighbours hold more than half a block together, which bounds both. A load of
 * all slots sorts once and leaves blocks half full.
 */
#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tree_kind.h"

#define BLOCK 256

typedef struct {
    double priority;
    int64_t slot;
} entry;

typedef struct {
    entry entries[BLOCK];
    int64_t count;
} block;

typedef struct {
    segment_tree head;
    double alpha;
    double *priority;   /* of each slot; 0 when it is empty */
    double *cumulative; /* [capacity + 1] */
    int64_t size;       /* filled slots */
    block *pool;        /* max_blocks of them; memory is taken when one is first used */
    int64_t max_blocks;
    block **order;      /* the blocks in use, in order of rank, then the unused ones */
    int64_t blocks;     /* in use, at least 1 */
    int64_t most_blocks; /* ever in use; the memory of these was taken */
    int64_t *before;    /* filled slots in the blocks before each */
    int counted;        /* before is up to date */
} ranked_tree;

static ranked_tree *ranked(const segment_tree *tree)
{
    return (ranked_tree *)tree;
}

/* Input: two entries. Result: whether the first has the smaller rank. */
static int comes_before(entry a, entry b)
{
    return a.priority != b.priority ? a.priority > b.priority : a.slot < b.slot;
}

/* Input: an entry. Result: the block in use where it is or belongs: the last one whose first entry does
 * not come after it. */
static int64_t block_for(const ranked_tree *tree, entry wanted)
{
    int64_t low = 0, high = tree->blocks;
    while (high - low > 1) {
        int64_t middle = low + (high - low) / 2;
        if (comes_before(wanted, tree->order[middle]->entries[0]))
            high = middle;
        else
            low = middle;
    }
    return low;
}

/* Input: a block and an entry. Result: how many entries of the block come before it. */
static int64_t place_in(const block *in, entry wanted)
{
    int64_t low = 0, high = in->count;
    while (low < high) {
        int64_t middle = low + (high - low) / 2;
        if (comes_before(in->entries[middle], wanted))
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* Input: a number of blocks. Result: so many are in use. */
static void use_blocks(ranked_tree *tree, int64_t blocks)
{
    tree->blocks = blocks;
    tree->most_blocks = blocks > tree->most_blocks ? blocks : tree->most_blocks;
}

/* Input: a full block's number. Result: its second half is a block of its own, right after it. */
static void split(ranked_tree *tree, int64_t number)
{
    block *full = tree->order[number], *half = tree->order[tree->blocks];
    memmove(&tree->order[number + 2], &tree->order[number + 1], (size_t)(tree->blocks - number - 1) * sizeof *tree->order);
    tree->order[number + 1] = half;
    use_blocks(tree, tree->blocks + 1);
    half->count = BLOCK / 2;
    full->count = BLOCK / 2;
    memcpy(half->entries, full->entries + BLOCK / 2, sizeof full->entries / 2);
}

/* Input: a block's number. Result: where it and the next one fill at most half a block together, or one
 * of them is empty, the next one's entries are in it and the next one is not in use. */
static void merge(ranked_tree *tree, int64_t number)
{
    if (number < 0 || number + 1 >= tree->blocks)
        return;
    block *left = tree->order[number], *right = tree->order[number + 1];
    if (left->count + right->count > BLOCK / 2 && left->count > 0 && right->count > 0)
        return;
    memcpy(left->entries + left->count, right->entries, (size_t)right->count * sizeof *right->entries);
    left->count += right->count;
    memmove(&tree->order[number + 1], &tree->order[number + 2], (size_t)(tree->blocks - number - 2) * sizeof *tree->order);
    tree->order[--tree->blocks] = right;
}

static void ranked_insert(ranked_tree *tree, entry added)
{
    int64_t number = block_for(tree, added);
    if (tree->order[number]->count == BLOCK) {
        split(tree, number);
        number = block_for(tree, added);
    }
    block *in = tree->order[number];
    int64_t place = place_in(in, added);
    memmove(&in->entries[place + 1], &in->entries[place], (size_t)(in->count - place) * sizeof added);
    in->entries[place] = added;
    in->count++;
    tree->size++;
}

static void erase(ranked_tree *tree, entry removed)
{
    int64_t number = block_for(tree, removed);
    block *in = tree->order[number];
    int64_t place = place_in(in, removed);
    in->count--;
    memmove(&in->entries[place], &in->entries[place + 1], (size_t)(in->count - place) * sizeof removed);
    tree->size--;
    merge(tree, number);
    merge(tree, number - 1);
}

/* Input: a slot and an allowed priority. Result: the slot has it. */
static void set_slot(ranked_tree *tree, int64_t slot, double priority)
{
    double old = tree->priority[slot];
    if (old == priority)
        return;
    if (old > 0.0)
        erase(tree, (entry){old, slot});
    if (priority > 0.0)
        ranked_insert(tree, (entry){priority, slot});
    tree->priority[slot] = priority + 0.0;
}

/* Input: a tree and a rank >= 1. Result: its mass. */
static double mass_of(const ranked_tree *tree, int64_t rank)
{
    return pow((double)rank, -tree->alpha);
}

/* Input: a tree that was changed. Result: total, minimum and bytes are right. */
static void settle(ranked_tree *tree)
{
    int64_t slots = tree->head.capacity;
    tree->head.total = tree->cumulative[tree->size];
    tree->head.minimum = tree->size > 0 ? mass_of(tree, tree->size) : INFINITY;
    int64_t fixed = (int64_t)sizeof *tree + (2 * slots + 1) * 8 + tree->max_blocks * 16;
    tree->head.bytes = fixed + tree->most_blocks * (int64_t)sizeof(block);
    tree->counted = 0;
}

static void ranked_set(segment_tree *head, const int64_t *slots, const double *mass, int64_t k)
{
    for (int64_t row = 0; row < k; row++)
        set_slot(ranked(head), slots[row], mass[row]);
    settle(ranked(head));
}

/* For qsort: as comes_before, of entries none of which is there twice. */
static int order_of(const void *a, const void *b)
{
    return comes_before(*(const entry *)a, *(const entry *)b) ? -1 : 1;
}

/* Input: entries in order of rank. Result: they are all that the tree holds, in blocks half full. */
static void fill_blocks(ranked_tree *tree, const entry *sorted, int64_t size)
{
    const int64_t half = BLOCK / 2, blocks = (size + half - 1) / half;
    use_blocks(tree, blocks > 0 ? blocks : 1);
    tree->order[0]->count = 0;
    for (int64_t number = 0; number < blocks; number++) {
        int64_t rest = size - number * half, count = rest < half ? rest : half;
        memcpy(tree->order[number]->entries, sorted + number * half, (size_t)count * sizeof *sorted);
        tree->order[number]->count = count;
    }
    tree->size = size;
}

/* Input: neighbouring slots, and no other one is filled. Result: 1 and they hold the masses, sorted once;
 * 0 and nothing has changed where there is no memory to sort in. */
static int set_all(ranked_tree *tree, int64_t first, const double *mass, int64_t k)
{
    entry *sorted = malloc((size_t)k * sizeof *sorted);
    int64_t size = 0;
    if (sorted == NULL)
        return 0;
    for (int64_t row = 0; row < k; row++) {
        tree->priority[first + row] = mass[row] + 0.0;
        if (mass[row] > 0.0)
            sorted[size++] = (entry){mass[row], first + row};
    }
    qsort(sorted, (size_t)size, sizeof *sorted, order_of);
    fill_blocks(tree, sorted, size);
    free(sorted);
    return 1;
}

static void ranked_set_range(segment_tree *head, int64_t first, const double *mass, int64_t k)
{
    ranked_tree *tree = ranked(head);
    int alone = k == head->capacity || (tree->size == 0 && k > BLOCK);
    if (!alone || !set_all(tree, first, mass, k))
        for (int64_t row = 0; row < k; row++)
            set_slot(tree, first + row, mass[row]);
    settle(tree);
}

static void ranked_get(const segment_tree *head, const int64_t *slots, double *mass, int64_t k)
{
    for (int64_t row = 0; row < k; row++)
        mass[row] = ranked(head)->priority[slots[row]];
}

/* Input: `count` numbers that do not fall, and a value. Result: how many of them are <= value. */
static int64_t count_up_to(const double *numbers, int64_t count, double value)
{
    int64_t low = 0;
    while (count > 0) {
        int64_t half = count / 2;
        if (numbers[low + half] <= value) {
            low += half + 1;
            count -= half + 1;
        } else {
            count = half;
        }
    }
    return low;
}

/* Input: a tree, not empty, with counts, and a rank - 1. Result: the slot of that rank. */
static int64_t slot_at(const ranked_tree *tree, int64_t at)
{
    int64_t low = 0, high = tree->blocks;
    while (high - low > 1) {
        int64_t middle = low + (high - low) / 2;
        if (tree->before[middle] <= at)
            low = middle;
        else
            high = middle;
    }
    return tree->order[low]->entries[at - tree->before[low]].slot;
}

static void count_blocks(ranked_tree *tree)
{
    int64_t before = 0;
    for (int64_t number = 0; number < tree->blocks; number++) {
        tree->before[number] = before;
        before += tree->order[number]->count;
    }
    tree->counted = 1;
}

/* The counts are a cache: a search may make them. */
static void ranked_find(const segment_tree *head, int64_t *slots, double *mass, int64_t k)
{
    ranked_tree *tree = ranked(head);
    if (!tree->counted)
        count_blocks(tree);
    for (int64_t row = 0; row < k; row++) {
        int64_t at = count_up_to(tree->cumulative + 1, tree->size - 1, mass[row]);
        slots[row] = slot_at(tree, at);
        mass[row] = mass_of(tree, at + 1);
    }
}

/* Input: a tree with `filled` filled slots. Result: whether total, minimum and the cumulative masses are
 * what a fresh tree would have. */
static int sums_are_right(const ranked_tree *tree, int64_t filled)
{
    int right = tree->cumulative[0] == 0.0;
    for (int64_t rank = 1; rank <= tree->head.capacity; rank++)
        right &= tree->cumulative[rank] == tree->cumulative[rank - 1] + pow((double)rank, -tree->alpha);
    double minimum = filled > 0 ? mass_of(tree, filled) : INFINITY;
    return right && tree->head.total == tree->cumulative[filled] && tree->head.minimum == minimum;
}

/* Input: a tree. Result: -1, or the number of the first block that holds an entry out of order or not
 * as its slot says; the number of blocks in use when a filled slot is in none of them or a sum is wrong. */
static int64_t ranked_check(const segment_tree *head)
{
    const ranked_tree *tree = ranked(head);
    int64_t entries = 0, filled = 0;
    entry last = {INFINITY, -1};
    for (int64_t number = 0; number < tree->blocks; number++) {
        const block *in = tree->order[number];
        if (in->count < 0 || in->count > BLOCK || (in->count == 0 && tree->blocks > 1))
            return number;
        for (int64_t i = 0; i < in->count; i++) {
            entry here = in->entries[i];
            if (!comes_before(last, here) || here.slot < 0 || here.slot >= head->capacity ||
                !(here.priority > 0.0) || tree->priority[here.slot] != here.priority)
                return number;
            last = here;
        }
        entries += in->count;
    }
    for (int64_t slot = 0; slot < head->capacity; slot++)
        filled += tree->priority[slot] != 0.0;
    return entries == filled && filled == tree->size && sums_are_right(tree, filled) ? -1 : tree->blocks;
}

static void ranked_destroy(segment_tree *head)
{
    ranked_tree *tree = ranked(head);
    free(tree->priority);
    free(tree->cumulative);
    free(tree->pool);
    free(tree->order);
    free(tree->before);
    free(tree);
}

static const tree_kind ranked_kind = {ranked_destroy, ranked_set, ranked_set_range, ranked_get, ranked_find, ranked_check, NULL};

/* Input: capacity >= 1 and an exponent. Result: an empty tree, owned by the caller; NULL when it is too
 * large to address or without memory. */
segment_tree *ranked_tree_create(int64_t capacity, double alpha)
{
    if (capacity > PTRDIFF_MAX / 128 || !(alpha >= 0.0 && alpha <= SEGMENT_TREE_LARGEST_ALPHA))
        return NULL;
    ranked_tree *tree = calloc(1, sizeof *tree);
    if (tree == NULL)
        return NULL;
    tree->alpha = alpha;
    tree->max_blocks = 4 * (capacity / BLOCK) + 4;
    tree->priority = calloc((size_t)capacity, sizeof *tree->priority);
    tree->cumulative = malloc(((size_t)capacity + 1) * sizeof *tree->cumulative);
    tree->pool = calloc((size_t)tree->max_blocks, sizeof *tree->pool);
    tree->order = malloc((size_t)tree->max_blocks * sizeof *tree->order);
    tree->before = malloc((size_t)tree->max_blocks * sizeof *tree->before);
    if (!tree->priority || !tree->cumulative || !tree->pool || !tree->order || !tree->before) {
        ranked_destroy(&tree->head);
        return NULL;
    }
    for (int64_t number = 0; number < tree->max_blocks; number++)
        tree->order[number] = &tree->pool[number];
    use_blocks(tree, 1);
    tree->cumulative[0] = 0.0;
    for (int64_t rank = 1; rank <= capacity; rank++)
        tree->cumulative[rank] = tree->cumulative[rank - 1] + pow((double)rank, -alpha);
    tree->head.kind = &ranked_kind;
    tree->head.backend = "cpu";
    tree->head.capacity = capacity;
    tree->head.largest = DBL_MAX;
    settle(tree);
    return &tree->head;
}
