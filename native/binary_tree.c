/* binary_tree.c: two children a node, in the form that an accelerator wants, and plainly.
 *
 * Nodes lie in one array, numbered as in a heap: the root is 1, the children of n are 2n and 2n + 1,
 * slot i is leaf width + i, where width is the smallest power of two >= capacity. Sum and minimum of a
 * node lie side by side, so that an update reads two siblings from one cache line. A descent goes right
 * when the target is not below the left child's sum, which it then loses.
 *
 * Compiled with -fopenacc or -acc the array lives on the device from creation on; a call moves its own
 * k rows, and the root comes back. Levels follow one another; the nodes of a level are independent. A
 * parallel loop over the levels instead would be wrong in the last digits only, and not every time.
 * Without OpenACC the pragmas mean nothing.
 */
#include <float.h>
#include <math.h>
#include <stdlib.h>
#ifdef _OPENACC
#include <openacc.h>
#endif

#include "tree_kind.h"

#define LIVE_ROWS 65536
#ifdef _OPENACC
#define WITHOUT_DEVICE "openacc host"
#else
#define WITHOUT_DEVICE "cpu"
#endif

typedef struct {
    double sum;
    double min;
} node;

typedef struct {
    segment_tree head;
    int64_t width;
    int form;
    int64_t crossover; /* BINARY_AUTO rebuilds from this k on */
    node *nodes;
    uint64_t *seen; /* a bit for each slot, zero between calls; only with a device */
    int64_t *live;  /* LIVE_ROWS slots of scratch; only with a device */
} binary_tree;

static binary_tree *binary(const segment_tree *tree)
{
    return (binary_tree *)tree;
}

/* Input: an allowed mass. Result: its leaf. An empty leaf is no candidate for the minimum, hence
 * infinity there. Adding +0.0 turns -0.0 into +0.0 and leaves all else as it is. */
#pragma acc routine seq
static node leaf_of(double mass)
{
    node leaf = {mass + 0.0, mass > 0.0 ? mass : INFINITY};
    return leaf;
}

/* Input: the two children. Result: what their parent must be. The only place that adds. */
#pragma acc routine seq
static node parent_of(node left, node right)
{
    node parent = {left.sum + right.sum, left.min < right.min ? left.min : right.min};
    return parent;
}

/* Input: a node whose two children are right, and a target. Result: the child that holds the target,
 * which becomes what is left over in it. An empty right child is never entered, even when rounding has
 * left a target beyond the whole node; an empty left one is not either, as every target is >= 0. */
#pragma acc routine seq
static int64_t child_of(const node *nodes, int64_t n, double *target)
{
    double left = nodes[2 * n].sum;
    int right = (*target >= left) & (nodes[2 * n + 1].sum > 0.0);
    *target -= right ? left : 0.0;
    return 2 * n + right;
}

/* Input: nodes of one level, from `first` to `last`. Result: each is made from its children. */
static void redo_nodes(node *nodes, int64_t width, int64_t first, int64_t last)
{
    (void)width;
#pragma acc parallel loop present(nodes[0 : 2 * width])
    for (int64_t n = first; n <= last; n++)
        nodes[n] = parent_of(nodes[2 * n], nodes[2 * n + 1]);
}

/* Input: k slots whose leaves changed, and a level that is right below. Result: so are the nodes
 * above them in this level. Rows that share one with the row before, as neighbouring slots do, cost nothing; others
 * that share one write the same bits. */
static void redo_above(node *nodes, int64_t width, const int64_t *slots, int64_t k, int level)
{
    int64_t first = width >> level;
#pragma acc parallel loop present(nodes[0 : 2 * width], slots[0 : k])
    for (int64_t row = 0; row < k; row++)
        if (row == 0 || slots[row] >> level != slots[row - 1] >> level) {
            int64_t n = first + (slots[row] >> level);
            nodes[n] = parent_of(nodes[2 * n], nodes[2 * n + 1]);
        }
}

/* Input: rows of an update; with a device no slot twice, but -1 for a row that counts for nothing.
 * Result: the leaves hold them, and nothing above the leaves is changed. */
static void write_leaves(node *nodes, int64_t width, const int64_t *slots, const double *mass, int64_t k)
{
#pragma acc parallel loop present(nodes[0 : 2 * width], slots[0 : k], mass[0 : k])
    for (int64_t row = 0; row < k; row++)
        if (slots[row] >= 0)
            nodes[width + slots[row]] = leaf_of(mass[row]);
}

/* Input: a slot and its mass. Result: textbook form: the leaf, and every node from there to the root. */
static void set_one(binary_tree *tree, int64_t slot, double mass)
{
    node *nodes = tree->nodes;
    int64_t n = tree->width + slot;
    nodes[n] = leaf_of(mass);
    while (n /= 2)
        nodes[n] = parent_of(nodes[2 * n], nodes[2 * n + 1]);
}

/* Input: a tree whose leaves were written at k slots, and whether only the nodes above those are to be
 * redone. Result: the tree is right. A level with no more nodes than rows is redone whole, in order. */
static void redo_levels(binary_tree *tree, const int64_t *slots, int64_t k, int only_above)
{
    for (int level = 1; tree->width >> level > 0; level++) {
        int64_t first = tree->width >> level;
        if (only_above && first > k)
            redo_above(tree->nodes, tree->width, slots, k, level);
        else
            redo_nodes(tree->nodes, tree->width, first, 2 * first - 1);
    }
}

/* Input: a tree that was changed. Result: its root is here. */
static void fetch_root(binary_tree *tree)
{
    node *nodes = tree->nodes;
#pragma acc update host(nodes[1:1])
    tree->head.total = nodes[1].sum;
    tree->head.minimum = nodes[1].min;
}

/* Input: up to LIVE_ROWS rows of an update. Result: their slots, but -1 where a later row has the same:
 * a device writes all rows at once, so only one may write. Without a device, the slots as they are. */
static const int64_t *live_slots(binary_tree *tree, const int64_t *slots, int64_t k)
{
    if (tree->live == NULL)
        return slots;
    for (int64_t row = k - 1; row >= 0; row--) {
        uint64_t *word = &tree->seen[slots[row] / 64], bit = (uint64_t)1 << slots[row] % 64;
        tree->live[row] = *word & bit ? -1 : slots[row];
        *word |= bit;
    }
    for (int64_t row = 0; row < k; row++)
        tree->seen[slots[row] / 64] = 0;
    return tree->live;
}

/* Input: rows of an update and whether only the nodes above them are to be redone. Result: the tree is
 * right but for what the host knows of its root. */
static void set_by_levels(binary_tree *tree, const int64_t *slots, const double *mass, int64_t k, int only_above)
{
    const int64_t *live = live_slots(tree, slots, k);
    node *nodes = tree->nodes;
    int64_t nodes_held = 2 * tree->width;
    (void)nodes, (void)nodes_held;
#pragma acc data present(nodes[0 : nodes_held]) copyin(slots[0 : k], mass[0 : k], live[0 : k])
    {
        write_leaves(tree->nodes, tree->width, live, mass, k);
        redo_levels(tree, slots, k, only_above);
    }
}

/* Input: a tree. Result: whether it updates row by row: the host's form, as each reads the last. */
static int by_element(const binary_tree *tree)
{
    return tree->form == BINARY_ELEMENT && tree->live == NULL;
}

static void binary_set(segment_tree *head, const int64_t *slots, const double *mass, int64_t k)
{
    binary_tree *tree = binary(head);
    int64_t step = tree->live != NULL ? LIVE_ROWS : k;
    int rebuild = tree->form == BINARY_REBUILD || (tree->form == BINARY_AUTO && k >= tree->crossover);
    for (int64_t row = 0; by_element(tree) && row < k; row++)
        set_one(tree, slots[row], mass[row]);
    for (int64_t first = 0; !by_element(tree) && first < k; first += step)
        set_by_levels(tree, slots + first, mass + first, k - first < step ? k - first : step, !rebuild);
    fetch_root(tree);
}

/* Input: neighbouring slots that do not wrap around. Result: as for set; above them lie neighbours. */
static void binary_set_range(segment_tree *head, int64_t first, const double *mass, int64_t k)
{
    binary_tree *tree = binary(head);
    node *nodes = tree->nodes;
    int64_t width = tree->width, leaf = width + first;
    for (int64_t row = 0; by_element(tree) && row < k; row++)
        set_one(tree, first + row, mass[row]);
    if (!by_element(tree)) {
#pragma acc parallel loop present(nodes[0 : 2 * width]) copyin(mass[0 : k])
        for (int64_t row = 0; row < k; row++)
            nodes[leaf + row] = leaf_of(mass[row]);
        for (int level = 1; width >> level > 0; level++)
            redo_nodes(nodes, width, (tree->form == BINARY_REBUILD ? width : leaf) >> level,
                       (tree->form == BINARY_REBUILD ? 2 * width - 1 : leaf + k - 1) >> level);
    }
    fetch_root(tree);
}

static void binary_get(const segment_tree *head, const int64_t *slots, double *mass, int64_t k)
{
    const node *nodes = binary(head)->nodes;
    int64_t width = binary(head)->width;
#pragma acc parallel loop present(nodes[0 : 2 * width]) copyin(slots[0 : k]) copyout(mass[0 : k])
    for (int64_t row = 0; row < k; row++)
        mass[row] = nodes[width + slots[row]].sum;
}

/* Input: a tree, and targets in `mass`. Result: textbook form, root to leaf for each row. */
static void find_by_element(const binary_tree *tree, int64_t *slots, double *mass, int64_t k)
{
    const node *nodes = tree->nodes;
    int64_t width = tree->width;
#pragma acc parallel loop present(nodes[0 : 2 * width]) copyout(slots[0 : k]) copy(mass[0 : k])
    for (int64_t row = 0; row < k; row++) {
        double target = mass[row];
        int64_t n = 1;
        while (n < width) {
            n *= 2;
            /* A branch, which the processor guesses and reads ahead behind; without one it waits. */
            if (target >= nodes[n].sum && nodes[n + 1].sum > 0.0)
                target -= nodes[n++].sum;
        }
        slots[row] = n - width;
        mass[row] = nodes[n].sum;
    }
}

/* Input: as above. Result: the same; all rows take one step before any takes the next, so that their
 * cache misses overlap. On the way down `slots` holds the node reached and `mass` what is left over. */
static void find_by_levels(const binary_tree *tree, int64_t *slots, double *mass, int64_t k)
{
    const node *nodes = tree->nodes;
    for (int64_t row = 0; row < k; row++)
        slots[row] = 1;
    for (int64_t depth = tree->width; depth > 1; depth /= 2)
        for (int64_t row = 0; row < k; row++)
            slots[row] = child_of(nodes, slots[row], &mass[row]);
    for (int64_t row = 0; row < k; row++) {
        mass[row] = nodes[slots[row]].sum;
        slots[row] -= tree->width;
    }
}

static void binary_find(const segment_tree *head, int64_t *slots, double *mass, int64_t k)
{
    const binary_tree *tree = binary(head);
    if (tree->form == BINARY_ELEMENT || tree->live != NULL)
        find_by_element(tree, slots, mass, k);
    else
        find_by_levels(tree, slots, mass, k);
}

/* Input: two nodes. Result: whether they are equal; never with a NaN. */
static int same(node a, node b)
{
    return a.sum == b.sum && a.min == b.min;
}

/* Input: a tree. Result: -1, or the lowest node that is not what its children, or for a leaf its own
 * mass, say it must be. */
static int64_t binary_check(const segment_tree *head)
{
    const binary_tree *tree = binary(head);
    node *nodes = tree->nodes;
    int64_t width = tree->width;
#pragma acc update host(nodes[0 : 2 * width])
    for (int64_t n = 1; n < width; n++)
        if (!same(nodes[n], parent_of(nodes[2 * n], nodes[2 * n + 1])))
            return n;
    for (int64_t slot = 0; slot < width; slot++) {
        node leaf = nodes[width + slot];
        int allowed = leaf.sum >= 0.0 && leaf.sum <= DBL_MAX && (slot < head->capacity || leaf.sum == 0.0);
        if (!allowed || !same(leaf, leaf_of(leaf.sum)))
            return width + slot;
    }
    return same(nodes[1], (node){head->total, head->minimum}) ? -1 : 1;
}

static void binary_destroy(segment_tree *head)
{
    binary_tree *tree = binary(head);
    node *nodes = tree->nodes;
    int64_t nodes_held = 2 * tree->width;
    if (nodes != NULL) {
#pragma acc exit data delete (nodes[0 : nodes_held])
    }
    tree_release(nodes, (size_t)nodes_held * sizeof *nodes);
    free(tree->seen);
    free(tree->live);
    free(tree);
}

static const tree_kind binary_kind = {binary_destroy, binary_set, binary_set_range, binary_get, binary_find, binary_check, NULL};

/* Result: whether there is a device for the tree to live on. Without one OpenACC runs on the host. */
static int has_device(void)
{
#ifdef _OPENACC
    return acc_get_device_type() != acc_device_host && acc_get_num_devices(acc_device_not_host) > 0;
#else
    return 0;
#endif
}

/* Input: a tree with nodes. Result: they are empty, here and on the device, where there is one. */
static void binary_make_empty(binary_tree *tree)
{
    node *nodes = tree->nodes;
    int64_t nodes_held = 2 * tree->width;
    for (int64_t n = 0; n < nodes_held; n++)
        nodes[n] = leaf_of(0.0);
#pragma acc enter data copyin(nodes[0 : nodes_held])
    tree->head.total = 0.0;
    tree->head.minimum = INFINITY;
}

/* Input: capacity >= 1. Result: an empty tree, owned by the caller; NULL when it is too large to address
 * or without memory. */
segment_tree *binary_tree_create(int64_t capacity)
{
    if (capacity > PTRDIFF_MAX / (int64_t)(8 * sizeof(node)))
        return NULL;
    binary_tree *tree = calloc(1, sizeof *tree);
    if (tree == NULL)
        return NULL;
    for (tree->width = 1; tree->width < capacity; tree->width *= 2)
        ;
    size_t bytes = 2 * (size_t)tree->width * sizeof(node);
    int device = has_device();
    tree->nodes = tree_memory(bytes);
    tree->seen = device ? calloc((size_t)tree->width / 64 + 1, sizeof *tree->seen) : NULL;
    tree->live = device ? malloc(LIVE_ROWS * sizeof *tree->live) : NULL;
    if (tree->nodes == NULL || (device && (tree->seen == NULL || tree->live == NULL))) {
        tree_release(tree->nodes, bytes);
        free(tree->seen);
        free(tree->live);
        free(tree);
        return NULL;
    }
    binary_make_empty(tree);
    tree->crossover = INT64_MAX;
    tree->head.kind = &binary_kind;
    tree->head.backend = device ? "openacc device" : WITHOUT_DEVICE;
    tree->head.bytes = (int64_t)(bytes + sizeof *tree);
    tree->head.largest = DBL_MAX;
    return &tree->head;
}

int segment_tree_binary_form(segment_tree *tree, int form, int64_t crossover)
{
    if (tree->kind != &binary_kind || form < BINARY_AUTO || form > BINARY_LEVELS)
        return -1;
    binary(tree)->form = form;
    binary(tree)->crossover = crossover;
    return 0;
}

int segment_tree_for_device(void)
{
#ifdef ACC_DEVICE
    return 1;
#else
    return 0;
#endif
}

void segment_tree_use_host(void)
{
#ifdef _OPENACC
    acc_set_device_type(acc_device_host);
#endif
}
