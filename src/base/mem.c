/* See mem.h. In a hard build memory is filled before use and after it, and always moves. */
#include <malloc.h>
#include <stdlib.h>
#include <string.h>

#include "fault.h"
#include "hard.h"
#include "mem.h"

void *mem_alloc(size_t bytes) {
  if (fault_here(FAULT_MEMORY)) return NULL;
  void *p = malloc(bytes ? bytes : 1);
  hard_fill(p, bytes, HARD_STRUCTURE);
  return fault_took(p);
}

void *mem_zalloc(size_t bytes) {
  if (fault_here(FAULT_MEMORY)) return NULL;
  return fault_took(calloc(1, bytes ? bytes : 1));
}

void *mem_aligned(size_t align, size_t bytes) {
  if (fault_here(FAULT_MEMORY)) return NULL;
  void *p = aligned_alloc(align, bytes ? bytes : align);
  hard_fill(p, bytes, HARD_STRUCTURE);
  return fault_took(p);
}

static void *move(void *p, size_t bytes) {
  size_t held = p ? malloc_usable_size(p) : 0;
  void *to = mem_alloc(bytes);
  if (!to || !p) return to;
  memcpy(to, p, bytes < held ? bytes : held);
  mem_free(p);
  return to;
}

void *mem_resize(void *p, size_t bytes) {
  if (HARD) return move(p, bytes);
  if (fault_here(FAULT_MEMORY)) return NULL;
  void *to = realloc(p, bytes ? bytes : 1);
  return p ? to : fault_took(to);
}

void mem_free(void *p) {
  if (HARD && p) memset(p, HARD_STRUCTURE, malloc_usable_size(p));
  if (FAULT && p) fault_add_blocks(-1);
  free(p);
}

char *mem_strdup(const char *s) {
  size_t n = strlen(s) + 1;
  char *copy = mem_alloc(n);
  if (copy) memcpy(copy, s, n);
  return copy;
}
