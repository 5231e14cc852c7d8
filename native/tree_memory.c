/* tree_memory.c: memory for large trees, on huge pages where the system has them. */
#define _GNU_SOURCE /* MAP_ANONYMOUS, madvise */
#include <stdlib.h>
#include <sys/mman.h>

#include "tree_kind.h"

#define HUGE_PAGE ((size_t)2 << 20)

/* Input: bytes. Result: the next multiple of a huge page. */
static size_t in_huge_pages(size_t bytes)
{
    return (bytes + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
}

/* Input: bytes > 0. Result: see tree_kind.h. What is mapped in front of the aligned block and behind it
 * is unmapped. */
void *tree_memory(size_t bytes)
{
    if (bytes < HUGE_PAGE)
        return aligned_alloc(LINE, (bytes + LINE - 1) / LINE * LINE);
    size_t wanted = in_huge_pages(bytes), front;
    char *mapped = mmap(NULL, wanted + HUGE_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED)
        return NULL;
    front = in_huge_pages((uintptr_t)mapped) - (uintptr_t)mapped;
    if (front > 0)
        munmap(mapped, front);
    munmap(mapped + front + wanted, HUGE_PAGE - front);
#ifdef MADV_HUGEPAGE
    madvise(mapped + front, wanted, MADV_HUGEPAGE);
#endif
    return mapped + front;
}

/* Input: what tree_memory gave for `bytes`, or NULL. Result: it is given back. */
void tree_release(void *memory, size_t bytes)
{
    if (memory != NULL && bytes >= HUGE_PAGE)
        munmap(memory, in_huge_pages(bytes));
    else
        free(memory);
}
