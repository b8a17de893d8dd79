/* See mem.h. */
#include <stdlib.h>
#include <string.h>

#include "mem.h"

void *mem_alloc(size_t bytes) {
  return malloc(bytes ? bytes : 1);
}

void *mem_zalloc(size_t bytes) {
  return calloc(1, bytes ? bytes : 1);
}

void *mem_aligned(size_t align, size_t bytes) {
  return aligned_alloc(align, bytes ? bytes : align);
}

void *mem_resize(void *p, size_t bytes) {
  return realloc(p, bytes ? bytes : 1);
}

void mem_free(void *p) {
  free(p);
}

char *mem_strdup(const char *s) {
  size_t n = strlen(s) + 1;
  char *copy = mem_alloc(n);
  if (copy) memcpy(copy, s, n);
  return copy;
}
