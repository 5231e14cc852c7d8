/* wide_kernels.c: the hot calls of the wide tree.
 *
 * Compiled twice: as KERNELS=portable_kernels and, on x86-64, as KERNELS=avx2_kernels with AVX2 allowed.
 * Vectors are GCC's, so that one source fits any machine. Every element is added in the order that
 * wide_tree.h gives, whatever the width of the machine's vectors: results have equal bits.
 *
 * `narrow` is a constant wherever it is passed, so each function is compiled for both leaf types.
 */
#include "wide_tree.h"

#include <float.h>
#include <math.h>
#include <string.h>
#ifdef __AVX2__
#include <immintrin.h>
#endif

_Static_assert(FLT_EVAL_METHOD == 0, "doubles must be evaluated as doubles");

typedef double v4 __attribute__((vector_size(32)));
typedef int64_t m4 __attribute__((vector_size(32)));
typedef double u4 __attribute__((vector_size(32), aligned(8))); /* at any double's address */
typedef int64_t um4 __attribute__((vector_size(32), aligned(8)));
typedef uint64_t w4 __attribute__((vector_size(32)));
typedef float f4 __attribute__((vector_size(16)));
typedef int32_t n4 __attribute__((vector_size(16)));

#define INLINE static inline __attribute__((always_inline))
#define GROUP 64 /* rows that go through a level together, so that their cache misses overlap */
#define AHEAD 16 /* rows before its use, a line is asked for again: a processor may drop a prefetch */

#ifdef __clang__
#define SHUFFLE(a, b, i, j, k, l) __builtin_shufflevector(a, b, i, j, k, l)
#else
#define SHUFFLE(a, b, i, j, k, l) __builtin_shuffle(a, b, (m4){i, j, k, l})
#endif

/* A block or node of R elements a run: the runs' sums, what comes before each run, and the inclusive
 * prefix sum of element j of every run. */
typedef struct {
    v4 sum, start, upto[4];
} runs;

/* Input: a leaf type. Result: the elements a run, and the leaves a block and their logarithm: numbers
 * are not negative, and a shift is cheaper than a signed division. */
INLINE int run_length(int narrow)
{
    return narrow ? 4 : 2;
}

INLINE int block_shift(int narrow)
{
    return narrow ? 4 : 3;
}

/* Input: an element's number in its block or node. Result: where it lies. */
INLINE int64_t place_of(int64_t element, int narrow)
{
    return (element & (run_length(narrow) - 1)) * 4 + (element >> (block_shift(narrow) - 2));
}

/* Input: a block's address. Result: element j of every run, in float64. */
INLINE v4 elements(const void *block, int j, int narrow)
{
    if (narrow)
        return __builtin_convertvector(*((const f4 *)block + j), v4);
    return *((const v4 *)block + j);
}

/* Input: a block's address. Result: the sum of each run. */
INLINE v4 run_sums(const void *block, int narrow)
{
    v4 sum = elements(block, 0, narrow);
    for (int j = 1; j < run_length(narrow); j++)
        sum += elements(block, j, narrow);
    return sum;
}

/* Input: the sums of the runs. Result: what comes before each: 0, r_0, r_0 + r_1, (r_0 + r_1) + r_2. */
INLINE v4 run_starts(v4 sum)
{
    v4 zero = {0.0, 0.0, 0.0, 0.0};
    v4 pairs = sum + SHUFFLE(sum, sum, 1, 0, 3, 2);
    return SHUFFLE(sum, zero, 4, 0, 4, 2) + SHUFFLE(pairs, zero, 4, 4, 0, 0);
}

/* Input: the sums of the runs. Result: the total of the block or node. */
INLINE double total_of(v4 sum)
{
    return (run_starts(sum) + sum)[3];
}

/* Input: a block's address. Result: its prefix sums. */
INLINE runs prefix_sums(const void *block, int narrow)
{
    runs node;
    v4 within = elements(block, 0, narrow);
    node.sum = run_sums(block, narrow);
    node.start = run_starts(node.sum);
    for (int j = 0; j < run_length(narrow); j++) {
        node.upto[j] = node.start + within;
        if (j + 1 < run_length(narrow))
            within += elements(block, j + 1, narrow);
    }
    return node;
}

/* Input: 2 or 4 vectors of prefix sums and a target. Result: how many of them are not above it. Packing
 * the comparisons into bytes takes fewer instructions than a bit mask of each. */
INLINE int count_up_to(const v4 *upto, int length, double target)
{
    v4 t = {target, target, target, target};
#ifdef __AVX2__
    __m256i low = _mm256_packs_epi32((__m256i)(upto[0] <= t), (__m256i)(upto[1] <= t));
    if (length == 2)
        return __builtin_popcount((unsigned)_mm256_movemask_epi8(low)) / 4;
    __m256i high = _mm256_packs_epi32((__m256i)(upto[2] <= t), (__m256i)(upto[3] <= t));
    return __builtin_popcount((unsigned)_mm256_movemask_epi8(_mm256_packs_epi16(low, high))) / 2;
#else
    m4 count = {0, 0, 0, 0};
    for (int j = 0; j < length; j++)
        count -= upto[j] <= t;
    return (int)(count[0] + count[1] + count[2] + count[3]);
#endif
}

/* Input: a sum above zero. Result: the largest double below it. */
INLINE double below(double sum)
{
    int64_t bits;
    memcpy(&bits, &sum, sizeof bits);
    bits -= 1;
    memcpy(&sum, &bits, sizeof bits);
    return sum;
}

/* Input: the prefix sums of a block or node that is not empty, and a target. Result: the element that
 * holds it. A target that rounding has left beyond the block is first lowered below its total. */
INLINE int64_t element_of(const runs *node, double *target, int narrow)
{
    const int length = run_length(narrow);
    int64_t child = count_up_to(node->upto, length, *target);
    if (__builtin_expect(child == 4 * length, 0)) {
        *target = below(node->upto[length - 1][3]);
        child = count_up_to(node->upto, length, *target);
    }
    return child;
}

/* Input: a node without kept prefix sums, not empty, and a target. Result: the child that holds the
 * target, which becomes what is left over in it. */
INLINE int64_t descend_summed(const double *sum, double *target)
{
    runs node = prefix_sums(sum, 0);
    int64_t child = element_of(&node, target, 0);
    double before[8];
    memcpy(before, &node.start, sizeof node.start);
    memcpy(before + 4, node.upto, sizeof node.start);
    *target -= before[place_of(child, 0)];
    return child;
}

/* Input: the eight inclusive prefix sums of a node that is not empty, and a target. Result: as above. */
INLINE int64_t descend_node(const double *inclusive, double *target)
{
    const v4 *upto = (const v4 *)inclusive;
    int64_t child = count_up_to(upto, 2, *target);
    if (__builtin_expect(child == WIDE_FAN, 0)) {
        *target = below(inclusive[WIDE_FAN - 1]);
        child = count_up_to(upto, 2, *target);
    }
    /* Without a branch, which would be mispredicted for every eighth child. */
    int64_t bits, not_first = child != 0;
    memcpy(&bits, &inclusive[child - not_first], sizeof bits);
    bits &= -not_first;
    double before;
    memcpy(&before, &bits, sizeof before);
    *target -= before;
    return child;
}

/* Input: two vectors. Result: the smaller of each lane. */
INLINE v4 smaller(v4 a, v4 b)
{
#ifdef __AVX2__
    return (v4)_mm256_min_pd((__m256d)a, (__m256d)b);
#else
    m4 less = a < b;
    return (v4)((less & (m4)a) | (~less & (m4)b));
#endif
}

/* Input: a vector. Result: its smallest lane. */
INLINE double smallest_lane(v4 least)
{
    least = smaller(least, SHUFFLE(least, least, 2, 3, 0, 1));
    return smaller(least, SHUFFLE(least, least, 1, 0, 3, 2))[0];
}

/* Input: a block's address. Result: its smallest leaf above zero, or infinity. */
INLINE double block_minimum(const void *block, int narrow)
{
    const m4 infinity = (m4)(v4){INFINITY, INFINITY, INFINITY, INFINITY};
    v4 least = (v4)infinity;
    for (int j = 0; j < run_length(narrow); j++) {
        v4 mass = elements(block, j, narrow);
        least = smaller((v4)((m4)mass | (infinity & (mass == (v4){0}))), least);
    }
    return smallest_lane(least);
}

/* Input: the eight minima of a node. Result: the smallest. */
INLINE double node_minimum(const double *min)
{
    return smallest_lane(smaller(*(const v4 *)min, *((const v4 *)min + 1)));
}

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

/* Input: a bitmap and a node. Result: the node's bit is set. */
INLINE void mark(uint64_t *dirty, int64_t node)
{
    dirty[node >> 6] |= (uint64_t)1 << (node & 63);
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
    mark(tree->dirty_sum[level + 1], node / WIDE_FAN);
}

/* Input: as above, for the minima. A minimum that stays goes no further up. */
INLINE void redo_min(wide_tree *tree, int level, int64_t node)
{
    double least = node_minimum(tree->min[level] + node * WIDE_FAN);
    if (tree->min[level + 1][node] != least) {
        tree->min[level + 1][node] = least;
        mark(tree->dirty_min[level + 1], node / WIDE_FAN);
    }
}

/* Input: a level, a bitmap of its nodes and what to do. Result: it is done for every
 * marked node, in order, and no node is marked. */
INLINE void redo_marked(wide_tree *tree, int level, uint64_t *dirty, void (*redo)(wide_tree *, int, int64_t))
{
    int64_t words = (tree->entries[level] / WIDE_FAN + 63) / 64;
    for (int64_t word = 0; word < words; word++) {
        for (uint64_t bits = dirty[word]; bits != 0; bits &= bits - 1)
            redo(tree, level, word * 64 + __builtin_ctzll(bits));
        dirty[word] = 0;
    }
}

/* Input: a tree whose levels 0 and 1, and 2 where marked, are right. Result: the whole tree is, but for
 * the flat prefix sums of the top, which the next search makes. */
INLINE void settle(wide_tree *tree)
{
    for (int level = 2; level <= tree->top; level++) {
        redo_marked(tree, level, tree->dirty_sum[level], redo_sum);
        redo_marked(tree, level, tree->dirty_min[level], redo_min);
    }
    *tree->dirty_sum[tree->top + 1] = *tree->dirty_min[tree->top + 1] = 0; /* there is no level above */
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

/* Input: a tree, not empty. Result: what turns a target into a slice; 0, which puts all into slice 0,
 * where the total is infinite or too small to divide by. */
INLINE double slices_per_mass(const wide_tree *tree)
{
    double slices = WIDE_TOP / tree->head.total;
    return slices <= DBL_MAX ? slices : 0.0;
}

/* Input: a target or prefix sum. Result: its slice. Never falls as the target grows: rounding is
 * monotone. */
INLINE int slice_of(double target, double per_mass)
{
    double slice = target * per_mass;
    return slice < WIDE_TOP ? (int)slice : WIDE_TOP;
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
 * all of slice s. */
INLINE void make_guide(wide_tree *tree)
{
    double per_mass = slices_per_mass(tree);
    for (int slice = 0; slice <= WIDE_TOP; slice++)
        tree->guide[slice] = 0;
    for (int entry = 0; entry < (int)tree->entries[tree->top]; entry++)
        tree->guide[slice_of(tree->prefix[entry], per_mass) + 1] = entry;
    for (int slice = 1; slice <= WIDE_TOP; slice++)
        if (tree->guide[slice] < tree->guide[slice - 1])
            tree->guide[slice] = tree->guide[slice - 1];
}

/* Input: a guided tree and a target below the total. Result: the entry of the top that holds it; the
 * target becomes what is left over in it. */
INLINE int64_t descend_top(const wide_tree *tree, double per_mass, double *target)
{
    int64_t entry = tree->guide[slice_of(*target, per_mass)];
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

/* Input: up to GROUP targets. Result: the slots that hold them. Each level is finished for all rows
 * before the next begins, and each row asks for its next line as soon as that is known. */
INLINE void descend_group(const wide_tree *tree, const double *targets, int64_t *at, double *mass, int64_t k, int narrow)
{
    double left[GROUP], per_mass = slices_per_mass(tree);
    for (int64_t row = 0; row < k; row++) {
        left[row] = targets[row];
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

INLINE void find_rows(const wide_tree *tree, const double *targets, int64_t *slots, double *mass, int64_t k, int narrow)
{
    for (int64_t first = 0; first < k; first += GROUP) {
        int64_t rows = k - first < GROUP ? k - first : GROUP;
        descend_group(tree, targets + first, slots + first, mass + first, rows, narrow);
    }
}

static void set(segment_tree *head, const int64_t *slots, const double *mass, int64_t k)
{
    wide_tree *tree = (wide_tree *)head;
    if (tree->narrow)
        set_rows(tree, slots, mass, k, 1);
    else
        set_rows(tree, slots, mass, k, 0);
}

static void set_range(segment_tree *head, int64_t first, const double *mass, int64_t k)
{
    wide_tree *tree = (wide_tree *)head;
    if (tree->narrow)
        set_neighbours(tree, first, mass, k, 1);
    else
        set_neighbours(tree, first, mass, k, 0);
}

static void get(const segment_tree *head, const int64_t *slots, double *mass, int64_t k)
{
    const wide_tree *tree = (const wide_tree *)head;
    for (int64_t row = 0; row < k; row++)
        mass[row] = tree->narrow ? read_leaf(tree, slots[row], 1) : read_leaf(tree, slots[row], 0);
}

/* The prefix sums and the guide are a cache: a search may make them. */
static void find(const segment_tree *head, const double *targets, int64_t *slots, double *mass, int64_t k)
{
    wide_tree *tree = (wide_tree *)head;
    if (!tree->searchable) {
        make_prefix(tree);
        make_guide(tree);
        tree->searchable = 1;
    }
    if (tree->narrow)
        find_rows(tree, targets, slots, mass, k, 1);
    else
        find_rows(tree, targets, slots, mass, k, 0);
}

/* Input: rows of an update. Result: whether one of them must be refused; without branches. A NaN
 * compares false. */
static int any_refused(int64_t capacity, double largest, const int64_t *slots, const double *mass, int64_t k)
{
    m4 bad = {0, 0, 0, 0};
    int64_t row = 0;
    for (; row + 4 <= k; row += 4) {
        m4 slot = *(const um4 *)(slots + row);
        v4 value = *(const u4 *)(mass + row);
        bad |= (slot < 0) | (slot >= capacity) | ~((value >= 0.0) & (value <= largest));
    }
    int refused = (bad[0] | bad[1] | bad[2] | bad[3]) != 0;
    for (; row < k; row++)
        refused |= slots[row] < 0 || slots[row] >= capacity || !(mass[row] >= 0.0 && mass[row] <= largest);
    return refused;
}

/* Input: four numbers of a SplitMix64 stream before they are mixed. Result: uniforms in [0, 1): the
 * upper 52 bits are the fraction of a number in [1, 2). */
INLINE v4 uniforms(w4 bits)
{
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9u;
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EBu;
    bits ^= bits >> 31;
    return (v4)(bits >> 12 | 0x3FF0000000000000u) - 1.0;
}

/* Input: the state of a SplitMix64 stream and the width of a stratum. Result: a target in each. */
static void targets(uint64_t state, double width, double *target, int64_t k)
{
    const uint64_t gamma = 0x9E3779B97F4A7C15u;
    w4 bits = state + (w4){gamma, 2 * gamma, 3 * gamma, 4 * gamma};
    v4 rows = {0.0, 1.0, 2.0, 3.0};
    for (int64_t row = 0; row < k; row += 4) {
        v4 four = (rows + uniforms(bits)) * width;
        memcpy(target + row, &four, (size_t)(k - row < 4 ? k - row : 4) * sizeof(double));
        bits += 4 * gamma;
        rows += 4.0;
    }
}

static void divide(const double *mass, double total, double *probability, int64_t k)
{
    for (int64_t row = 0; row < k; row++)
        probability[row] = mass[row] / total;
}

const tree_kernels KERNELS = {
    KERNELS_NAME, any_refused, targets, divide,
    {wide_tree_destroy, set, set_range, get, find, wide_tree_check},
};
