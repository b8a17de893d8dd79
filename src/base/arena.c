#include "arena.h"

#include <setjmp.h>
#include <stdalign.h>
#include <stdint.h>
#include <string.h>

#include "err.h"
#include "hard.h"
#include "mem.h"

enum { BLOCK_BYTES = HARD ? 64 : 1 << 14 };

struct ArenaBlock {
  ArenaBlock *next;
  size_t used, size;
  alignas(max_align_t) char bytes[];
};

struct ArenaEntry {
  jmp_buf at;
  ArenaEntry *outer;
  int code;
};

int arena_protect(Arena *a, void (*fn)(void *ud), void *ud) {
  ArenaEntry entry = {.outer = a->entry};
  a->entry = &entry;
  if (!setjmp(entry.at)) fn(ud);
  a->entry = entry.outer;
  return entry.code;
}

void arena_throw(Arena *a, int code) {
  MF_ASSERT(a->entry, "arena_throw outside of arena_protect");
  a->entry->code = code;
  longjmp(a->entry->at, 1);
}

void *arena_alloc(Arena *a, size_t bytes) {
  size_t need = (bytes + alignof(max_align_t) - 1) & ~(alignof(max_align_t) - 1);
  ArenaBlock *b = a->blocks;
  if (!b || b->size - b->used < need) {
    size_t size = need > BLOCK_BYTES / 4 ? need : BLOCK_BYTES;
    b = mem_zalloc(sizeof *b + size);
    if (!b) arena_throw(a, err_set(MF_ENOMEM, "out of memory"));
    b->size = size;
    b->next = a->blocks;
    a->blocks = b;
    if (size == need && b->next && b->next->size - b->next->used > 0) { /* keep filling the other */
      a->blocks = b->next;
      b->next = a->blocks->next;
      a->blocks->next = b;
    }
  }
  void *p = b->bytes + b->used;
  b->used += need;
  return p;
}

void *arena_copy(Arena *a, const void *from, size_t bytes) {
  void *p = arena_alloc(a, bytes);
  if (bytes) memcpy(p, from, bytes);
  return p;
}

char *arena_text(Arena *a, const char *text) {
  return arena_copy(a, text, strlen(text) + 1);
}

void *arena_reserve(Arena *a, const void *from, size_t *cap, size_t count, size_t item) {
  if (HARD) return (void *)(uintptr_t)from; /* where each growth moves */
  void *p = arena_alloc(a, count * item);
  if (*cap) memcpy(p, from, *cap * item);
  *cap = count;
  return p;
}

void *arena_grow(Arena *a, const void *from, size_t *cap, size_t item) {
  size_t n = hard_room(*cap, 8);
  void *p = arena_alloc(a, n * item);
  if (*cap) memcpy(p, from, *cap * item);
  hard_fill((void *)(uintptr_t)from, *cap * item, HARD_STRUCTURE);
  *cap = n;
  return p;
}

void arena_free(Arena *a) {
  for (ArenaBlock *b = a->blocks, *next; b; b = next) {
    next = b->next;
    mem_free(b);
  }
  a->blocks = NULL;
}
