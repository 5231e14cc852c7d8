/* wide_kernels.c: updating and searching the wide tree; compiled once for each instruction set.
 *
 * `narrow` is a constant wherever it is passed, so each function is compiled for both leaf types.
 */
#include "wide_node.h"

#define GROUP 64 /* rows that go through a level together, so that their cache misses overlap */
#define AHEAD 16 /* rows before its use, a line is asked for again: a processor may drop a prefetch */

/* Input: a slot. Result: where its leaf lies. */
INLINE int64_t leaf_place(int64_t slot, int narrow)
{
    int64_t within = ((int64_t)1 << block_shift(narrow)) - 1;
    return (slot & ~within) + place_of(slot & within, narrow);
}

/* Input: a tree, a slot and an allowed mass. Result: the leaf is written; nothing above it is. */
INLINE void write_leaf(wide_tree *tree, int64_t slot, double mass, int narrow)
{
    int64_t at = leaf_place(slot, narrow);
    if (narrow) {
        float rounded = (float)mass;
        ((float *)tree->leaves)[at] = rounded == 0.0f && mass > 0.0 ? FLT_TRUE_MIN : rounded + 0.0f;
    } else {
        ((double *)tree->leaves)[at] = mass + 0.0;
    }
}

/* Input: a tree and one of its slots. Result: its mass. */
INLINE double read_leaf(const wide_tree *tree, int64_t slot, int narrow)
{
    int64_t at = leaf_place(slot, narrow);
    return narrow ? ((const float *)tree->leaves)[at] : ((const double *)tree->leaves)[at];
}

INLINE const void *block_of(const wide_tree *tree, int64_t block)
{
    return (const char *)tree->leaves + block * 64;
}

/* Input: an entry of a level. Result: where it lies in that level. */
INLINE int64_t entry_place(int64_t entry)
{
    return (entry & ~(int64_t)7) + place_of(entry & 7, 0);
}

/* Input: a map and a node. Result: the node is marked, and so is its line. */
INLINE void mark(const dirty_map *dirty, int64_t node)
{
    dirty->nodes[node >> 6] |= (uint64_t)1 << (node & 63);
    dirty->lines[node / LINE_NODES] = 1; /* a store that waits for none before it, as an |= would */
}

/* Input: a block whose leaves changed. Result: its entry is right; whether its minimum changed. */
INLINE int redo_block(wide_tree *tree, int64_t block, int narrow)
{
    const void *leaves = block_of(tree, block);
    double least = block_minimum(leaves, narrow);
    int changed = tree->min[1][block] != least;
    tree->sum[1][entry_place(block)] = total_of(run_sums(leaves, narrow));
    tree->min[1][block] = least;
    return changed;
}

/* Input: a level and one of its nodes, whose entries' sums are right. Result: so are its entry one level
 * up and, except on level 1 below the top, its kept prefix sums. */
INLINE void redo_sum(wide_tree *tree, int level, int64_t node)
{
    const double *sum = tree->sum[level] + node * WIDE_FAN;
    double total;
    if (level == 1 && level < tree->top) {
        total = total_of(run_sums(sum, 0));
    } else {
        runs prefix = prefix_sums(sum, 0);
        v4 *kept = (v4 *)(tree->inclusive[level] + node * WIDE_FAN);
        kept[0] = SHUFFLE(prefix.upto[0], prefix.upto[1], 0, 4, 1, 5);
        kept[1] = SHUFFLE(prefix.upto[0], prefix.upto[1], 2, 6, 3, 7);
        total = prefix.upto[1][3];
    }
    tree->sum[level + 1][level < tree->top ? entry_place(node) : node] = total;
    mark(&tree->dirty_sum[level + 1], node / WIDE_FAN);
}

/* Input: as above, for the minima. A minimum that stays goes no further up. */
INLINE void redo_min(wide_tree *tree, int level, int64_t node)
{
    double least = node_minimum(tree->min[level] + node * WIDE_FAN);
    if (tree->min[level + 1][node] != least) {
        tree->min[level + 1][node] = least;
        mark(&tree->dirty_min[level + 1], node / WIDE_FAN);
    }
}

/* Input: a level, a map of its nodes and what to do. Result: it is done for every marked node, in order,
 * and no node is marked. */
INLINE void redo_marked(wide_tree *tree, int level, const dirty_map *dirty, void (*redo)(wide_tree *, int, int64_t))
{
    int64_t lines = dirty_lines(tree->entries[level] / WIDE_FAN);
    for (int64_t line = 0; line < lines; line++) {
        if (!dirty->lines[line])
            continue;
        for (int64_t word = line * LINE_WORDS; word < (line + 1) * LINE_WORDS; word++) {
            for (uint64_t bits = dirty->nodes[word]; bits != 0; bits &= bits - 1)
                redo(tree, level, word * 64 + __builtin_ctzll(bits));
            dirty->nodes[word] = 0;
        }
        dirty->lines[line] = 0;
    }
}

/* Input: a tree whose levels 0 and 1, and 2 where marked, are right. Result: the whole tree is, but for
 * the flat prefix sums of the top, which the next search makes. */
INLINE void settle(wide_tree *tree)
{
    for (int level = 2; level <= tree->top; level++) {
        redo_marked(tree, level, &tree->dirty_sum[level], redo_sum);
        redo_marked(tree, level, &tree->dirty_min[level], redo_min);
    }
    /* There is no level above the top. */
    *tree->dirty_sum[tree->top + 1].nodes = *tree->dirty_sum[tree->top + 1].lines = 0;
    *tree->dirty_min[tree->top + 1].nodes = *tree->dirty_min[tree->top + 1].lines = 0;
    double total = 0.0, minimum = INFINITY;
    for (int64_t node = 0; node < tree->entries[tree->top] / WIDE_FAN; node++) {
        double least = tree->min[tree->top + 1][node];
        total += tree->sum[tree->top + 1][node];
        minimum = least < minimum ? least : minimum;
    }
    tree->head.total = total;
    tree->head.minimum = minimum;
    tree->searchable = 0;
}

/* Input: a row's slot. Result: its block is on its way. */
INLINE void prefetch_leaf(const wide_tree *tree, int64_t slot, int narrow)
{
    __builtin_prefetch(block_of(tree, slot >> block_shift(narrow)), 1);
}

/* Input: a row's slot. Result: the lines of its block's entry are on their way. */
INLINE void prefetch_entry(const wide_tree *tree, int64_t slot, int narrow)
{
    __builtin_prefetch(tree->sum[1] + (slot >> block_shift(narrow)), 1);
    __builtin_prefetch(tree->min[1] + (slot >> block_shift(narrow)), 1);
}

/* Input: up to GROUP rows. Result: their leaves, and the levels 1 and 2, are right. All leaves first:
 * that makes the last duplicate win, and lets a store end before its line is read as a vector. */
INLINE void set_group(wide_tree *tree, const int64_t *slots, const double *mass, int64_t k, int narrow)
{
    int64_t moved[GROUP];
    int64_t num_moved = 0;
    for (int64_t row = 0; row < k; row++) {
        if (row + AHEAD < k)
            prefetch_leaf(tree, slots[row + AHEAD], narrow);
        write_leaf(tree, slots[row], mass[row], narrow);
    }
    for (int64_t row = 0; row < k; row++) {
        int64_t block = slots[row] >> block_shift(narrow);
        if (row + AHEAD < k)
            prefetch_entry(tree, slots[row + AHEAD], narrow);
        moved[num_moved] = block / WIDE_FAN;
        num_moved += redo_block(tree, block, narrow);
    }
    for (int64_t row = 0; row < k; row++)
        redo_sum(tree, 1, slots[row] >> block_shift(narrow) >> 3);
    for (int64_t i = 0; i < num_moved; i++)
        redo_min(tree, 1, moved[i]);
}

/* Input: a row's slot. Result: all lines that its update needs first are on their way. */
INLINE void prefetch_row(const wide_tree *tree, int64_t slot, int narrow)
{
    prefetch_leaf(tree, slot, narrow);
    prefetch_entry(tree, slot, narrow);
}

INLINE void set_rows(wide_tree *tree, const int64_t *slots, const double *mass, int64_t k, int narrow)
{
    for (int64_t row = 0; row < k && row < GROUP; row++)
        prefetch_row(tree, slots[row], narrow);
    for (int64_t first = 0; first < k; first += GROUP) {
        int64_t rest = k - first;
        for (int64_t row = GROUP; row < rest && row < 2 * GROUP; row++)
            prefetch_row(tree, slots[first + row], narrow);
        set_group(tree, slots + first, mass + first, rest < GROUP ? rest : GROUP, narrow);
    }
    settle(tree);
}

/* Input: neighbouring slots that do not wrap around. Result: as for set_rows, each block and node is
 * redone once. */
INLINE void set_neighbours(wide_tree *tree, int64_t first, const double *mass, int64_t k, int narrow)
{
    int64_t block = first >> block_shift(narrow), last = (first + k - 1) >> block_shift(narrow);
    for (int64_t row = 0; row < k; row++)
        write_leaf(tree, first + row, mass[row], narrow);
    for (int64_t i = block; i <= last; i++)
        redo_block(tree, i, narrow);
    for (int64_t node = block / WIDE_FAN; node <= last / WIDE_FAN; node++) {
        redo_sum(tree, 1, node);
        redo_min(tree, 1, node);
    }
    settle(tree);
}

/* Input: a tree, not empty. Result: what turns a target into a bucket; 0, which puts all into bucket 0,
 * where the total is infinite or too small to divide by. */
INLINE double buckets_per_mass(const wide_tree *tree)
{
    double buckets = WIDE_TOP / tree->head.total;
    return buckets <= DBL_MAX ? buckets : 0.0;
}

/* Input: a target or prefix sum. Result: its bucket. Never falls as the target grows: rounding is
 * monotone. */
INLINE int bucket_of(double target, double per_mass)
{
    double bucket = target * per_mass;
    return bucket < WIDE_TOP ? (int)bucket : WIDE_TOP;
}

/* Input: a tree. Result: the flat prefix sums of its top: those of each node, after all nodes before. */
INLINE void make_prefix(wide_tree *tree)
{
    double base = 0.0;
    for (int64_t first = 0; first < tree->entries[tree->top]; first += WIDE_FAN) {
        const v4 *kept = (const v4 *)(tree->inclusive[tree->top] + first);
        u4 *after = (u4 *)(tree->prefix + first + 1);
        after[0] = base + kept[0];
        after[1] = base + kept[1];
        base += tree->sum[tree->top + 1][first / WIDE_FAN];
    }
}

/* Input: a tree, not empty, with prefix sums. Result: guide[s] is an entry of the top that starts before
 * all of bucket s. */
INLINE void make_guide(wide_tree *tree)
{
    double per_mass = buckets_per_mass(tree);
    for (int bucket = 0; bucket <= WIDE_TOP; bucket++)
        tree->guide[bucket] = 0;
    for (int entry = 0; entry < (int)tree->entries[tree->top]; entry++)
        tree->guide[bucket_of(tree->prefix[entry], per_mass) + 1] = entry;
    for (int bucket = 1; bucket <= WIDE_TOP; bucket++)
        if (tree->guide[bucket] < tree->guide[bucket - 1])
            tree->guide[bucket] = tree->guide[bucket - 1];
}

/* Input: a guided tree and a target below the total. Result: the entry of the top that holds it; the
 * target becomes what is left over in it. */
INLINE int64_t descend_top(const wide_tree *tree, double per_mass, double *target)
{
    int64_t entry = tree->guide[bucket_of(*target, per_mass)];
    for (;;) {
        const u4 *after = (const u4 *)(tree->prefix + entry + 1);
        int below_target = count_up_to((v4[]){after[0], after[1]}, 2, *target);
        entry += below_target;
        if (__builtin_expect(below_target < WIDE_FAN, 1))
            break;
    }
    *target -= tree->prefix[entry];
    return entry;
}

/* Input: a level below the top and one of its nodes or blocks. Result: the line to search there. */
INLINE const void *line_of(const wide_tree *tree, int level, int64_t node)
{
    if (level == 0)
        return block_of(tree, node);
    return (level == 1 ? tree->sum[1] : tree->inclusive[level]) + node * WIDE_FAN;
}

/* Input: a level and one of its nodes, and a target. Result: the number of the child that holds it, in
 * its level; the target becomes what is left over in it. */
INLINE int64_t descend(const wide_tree *tree, int level, int64_t node, double *target)
{
    const double *line = line_of(tree, level, node);
    return node * WIDE_FAN + (level == 1 ? descend_summed(line, target) : descend_node(line, target));
}

/* Input: a block and a target. Result: the slot that holds it. */
INLINE int64_t slot_in(const wide_tree *tree, int64_t block, double target, int narrow)
{
    runs leaves = prefix_sums(block_of(tree, block), narrow);
    return (block << block_shift(narrow)) + element_of(&leaves, &target, narrow);
}

/* Input: up to GROUP targets, in `mass`. Result: the slots that hold them, and their masses. Each level is finished for all rows
 * before the next begins, and each row asks for its next line as soon as that is known. */
INLINE void descend_group(const wide_tree *tree, int64_t *at, double *mass, int64_t k, int narrow)
{
    double left[GROUP], per_mass = buckets_per_mass(tree);
    for (int64_t row = 0; row < k; row++) {
        left[row] = mass[row];
        at[row] = descend_top(tree, per_mass, &left[row]);
        __builtin_prefetch(line_of(tree, tree->top - 1, at[row]));
    }
    for (int level = tree->top - 1; level > 1; level--)
        for (int64_t row = 0; row < k; row++) {
            at[row] = descend(tree, level, at[row], &left[row]);
            __builtin_prefetch(line_of(tree, level - 1, at[row]));
        }
    for (int64_t row = 0; tree->top > 1 && row < k; row++) {
        at[row] = descend(tree, 1, at[row], &left[row]);
        __builtin_prefetch(line_of(tree, 0, at[row]));
    }
    for (int64_t row = 0; row < k; row++) {
        if (row + AHEAD < k)
            __builtin_prefetch(line_of(tree, 0, at[row + AHEAD]));
        at[row] = slot_in(tree, at[row], left[row], narrow);
        mass[row] = read_leaf(tree, at[row], narrow);
    }
}

INLINE void find_rows(const wide_tree *tree, int64_t *slots, double *mass, int64_t k, int narrow)
{
    for (int64_t first = 0; first < k; first += GROUP) {
        int64_t rows = k - first < GROUP ? k - first : GROUP;
        descend_group(tree, slots + first, mass + first, rows, narrow);
    }
}

static void wide_set(segment_tree *head, const int64_t *slots, const double *mass, int64_t k)
{
    wide_tree *tree = (wide_tree *)head;
    if (tree->narrow)
        set_rows(tree, slots, mass, k, 1);
    else
        set_rows(tree, slots, mass, k, 0);
}

static void wide_set_range(segment_tree *head, int64_t first, const double *mass, int64_t k)
{
    wide_tree *tree = (wide_tree *)head;
    if (tree->narrow)
        set_neighbours(tree, first, mass, k, 1);
    else
        set_neighbours(tree, first, mass, k, 0);
}

static void wide_get(const segment_tree *head, const int64_t *slots, double *mass, int64_t k)
{
    const wide_tree *tree = (const wide_tree *)head;
    for (int64_t row = 0; row < k; row++)
        mass[row] = tree->narrow ? read_leaf(tree, slots[row], 1) : read_leaf(tree, slots[row], 0);
}

/* The prefix sums and the guide are a cache: a search may make them. */
static void wide_find(const segment_tree *head, int64_t *slots, double *mass, int64_t k)
{
    wide_tree *tree = (wide_tree *)head;
    if (!tree->searchable) {
        make_prefix(tree);
        make_guide(tree);
        tree->searchable = 1;
    }
    if (tree->narrow)
        find_rows(tree, slots, mass, k, 1);
    else
        find_rows(tree, slots, mass, k, 0);
}

const tree_kernels OF_ISA(kernels) = {
    ISA_NAME, &OF_ISA(rows), {wide_tree_destroy, wide_set, wide_set_range, wide_get, wide_find, NULL, wide_tree_compare},
};
