/* See map.h. */
#include "hard.h"
#include "map.h"
#include "mem.h"

static size_t place(const Map *m, const void *key) {
  uint64_t h = (uint64_t)(uintptr_t)key * UINT64_C(0x9e3779b97f4a7c15);
  size_t i = (size_t)(h >> 32) & (m->cap - 1);
  while (m->keys[i] && m->keys[i] != key) i = (i + 1) & (m->cap - 1);
  return i;
}

int64_t map_get(const Map *m, const void *key) {
  if (!m->cap) return -1;
  size_t i = place(m, key);
  return m->keys[i] ? m->values[i] : -1;
}

static bool grow(Map *m) {
  Map next = {.cap = m->cap ? m->cap * 2 : HARD ? 2 : 32};
  next.keys = mem_zalloc(next.cap * sizeof *next.keys);
  next.values = mem_alloc(next.cap * sizeof *next.values);
  if (!next.keys || !next.values) {
    map_free(&next);
    return false;
  }
  for (size_t i = 0; i < m->cap; i++) {
    if (!m->keys[i]) continue;
    size_t at = place(&next, m->keys[i]);
    next.keys[at] = m->keys[i];
    next.values[at] = m->values[i];
  }
  next.n = m->n;
  map_free(m);
  *m = next;
  return true;
}

bool map_put(Map *m, const void *key, int64_t value) {
  if (m->n * 2 >= m->cap && !grow(m)) return false;
  size_t i = place(m, key);
  if (!m->keys[i]) m->n++;
  m->keys[i] = key;
  m->values[i] = value;
  return true;
}

void map_free(Map *m) {
  mem_free(m->keys);
  mem_free(m->values);
  *m = (Map){0};
}
