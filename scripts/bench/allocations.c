/* Counts the allocations of a Python process: blocks of memory that are new or change their size. Built by build.py,
 * loaded by counted_server.py. The declarations are those of CPython's documented PyMem_SetAllocator, which has no
 * header on machines without python3-dev. */
#include <stddef.h>

typedef struct {
    void *ctx;
    void *(*malloc)(void *, size_t);
    void *(*calloc)(void *, size_t, size_t);
    void *(*realloc)(void *, void *, size_t);
    void (*free)(void *, void *);
} Allocator;
enum { RAW, MEM, OBJ, DOMAINS };
extern void PyMem_GetAllocator(int, Allocator *);
extern void PyMem_SetAllocator(int, Allocator *);

static Allocator before[DOMAINS];
static long counted;

static void *counting_malloc(void *domain, size_t size) {
    Allocator *one = domain;
    counted++;
    return one->malloc(one->ctx, size);
}
static void *counting_calloc(void *domain, size_t count, size_t size) {
    Allocator *one = domain;
    counted++;
    return one->calloc(one->ctx, count, size);
}
static void *counting_realloc(void *domain, void *block, size_t size) {
    Allocator *one = domain;
    counted++;
    return one->realloc(one->ctx, block, size);
}
static void plain_free(void *domain, void *block) {
    Allocator *one = domain;
    one->free(one->ctx, block);
}

void start(void) {
    counted = 0;
    for (int domain = MEM; domain < DOMAINS; domain++) { /* RAW may be used without the GIL, by other threads */
        PyMem_GetAllocator(domain, &before[domain]);
        Allocator counting = {&before[domain], counting_malloc, counting_calloc, counting_realloc, plain_free};
        PyMem_SetAllocator(domain, &counting);
    }
}

long stop(void) {
    for (int domain = MEM; domain < DOMAINS; domain++)
        PyMem_SetAllocator(domain, &before[domain]);
    return counted;
}
