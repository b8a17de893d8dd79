/* Host memory for the library's own structures. Every request is sized and may fail: NULL, with no
 * error text set. A wrapper of its own, so that tests can make the n-th request fail. Tensor data
 * comes from device/, not from here. */
#ifndef MF_MEM_H
#define MF_MEM_H
#include <stddef.h>

void *mem_alloc(size_t bytes);  /* uninitialised */
void *mem_zalloc(size_t bytes); /* zeroed */
/* Uninitialised; align is a power of two, bytes a multiple of it. */
void *mem_aligned(size_t align, size_t bytes);
void *mem_resize(void *p, size_t bytes); /* as realloc */
void mem_free(void *p);
char *mem_strdup(const char *s);

#endif
