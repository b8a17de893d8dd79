/* A tree over the steps. A node stands for a range of them and has two sets of offsets, each a
 * sorted list of intervals that do not touch: `whole`, taken during all of its steps, and `any`,
 * taken during at least one. What is taken from first to last is in `whole` of the few nodes that
 * make up that range, and in `any` of these and of those above. So what is taken somewhere in a
 * range is `any` of its nodes and `whole` of those above: some twenty lists, each short, since in a
 * well filled block neighbours merge. */
#include "space.h"

#include <stdbool.h>
#include <string.h>

/* In units. */
typedef struct Span {
  uint32_t low, high;
} Span;

/* Most have one interval and no array. */
typedef struct Spans {
  uint32_t n, cap;
  union {
    Span one; /* while cap is 0 */
    Span *at;
  };
} Spans;

enum { LISTS = 160 }; /* more than a range can ask for: 3 for each bit of a step */

struct Space {
  Arena *arena;
  int unit;   /* bytes are counted in 2^unit */
  int leaves; /* a power of two; node k has the children 2k and 2k + 1, leaves are the last */
  Spans *whole, *any; /* by node */
  uint32_t levels;    /* bit k: some `whole` k levels above the leaves is not empty */
};

Space *space_create(Arena *a, int n_steps, int64_t most, int64_t align) {
  Space *s = arena_new(a, Space);
  s->arena = a;
  while (INT64_C(1) << s->unit < align || most >> s->unit >= UINT32_MAX / 2) s->unit++;
  s->leaves = 1;
  while (s->leaves < n_steps) s->leaves *= 2;
  s->whole = arena_array(a, Spans, 2 * s->leaves);
  s->any = arena_array(a, Spans, 2 * s->leaves);
  return s;
}

/* -- Sets of offsets --------------------------------------------------------------------------- */

static inline const Span *spans_at(const Spans *s) {
  return s->cap ? s->at : &s->one;
}

/* The first interval that ends at or behind `offset`. */
static inline uint32_t find(const Spans *s, uint32_t offset) {
  const Span *at = spans_at(s);
  uint32_t low = 0, high = s->n;
  while (low < high) {
    uint32_t mid = (low + high) / 2;
    if (at[mid].high < offset) low = mid + 1;
    else high = mid;
  }
  return low;
}

/* Room for one more; where they are now. */
static Span *make_room(Space *space, Spans *s) {
  uint32_t cap = s->cap ? s->cap : 1;
  if (!s->n && !s->cap) return &s->one;
  if (s->n == cap) {
    Span *more = arena_alloc(space->arena, sizeof *more * cap * 4);
    memcpy(more, spans_at(s), sizeof *more * s->n);
    s->at = more;
    s->cap = cap * 4;
  }
  return s->cap ? s->at : &s->one;
}

static inline bool has_all(const Spans *s, Span span) {
  return !s->cap && s->n && s->one.low <= span.low && s->one.high >= span.high;
}

/* False when all of it was there. */
static bool insert(Space *space, Spans *s, Span span) {
  Span *at = s->cap ? s->at : &s->one;
  uint32_t first = find(s, span.low), behind = first;
  if (first < s->n && at[first].low <= span.low && at[first].high >= span.high) return false;
  for (; behind < s->n && at[behind].low <= span.high; behind++) {
    if (at[behind].low < span.low) span.low = at[behind].low;
    if (at[behind].high > span.high) span.high = at[behind].high;
  }
  if (behind == first) {
    at = make_room(space, s);
    memmove(at + first + 1, at + first, sizeof *at * (s->n++ - first));
  } else if (behind > first + 1) {
    memmove(at + first + 1, at + behind, sizeof *at * (s->n - behind));
    s->n -= behind - first - 1;
  }
  at[first] = span;
  return true;
}

/* -- Ranges of steps --------------------------------------------------------------------------- */

static uint32_t units(const Space *s, int64_t bytes) {
  return (uint32_t)((bytes + (INT64_C(1) << s->unit) - 1) >> s->unit);
}

void space_add(Space *s, int first, int last, int64_t offset, int64_t bytes) {
  uint32_t at = units(s, offset), level = 0;
  Span span = {at, at + units(s, bytes)};
  int low = first + s->leaves, high = last + s->leaves;
  for (; low <= high; low /= 2, high /= 2, level++) {
    int ends[2] = {low & 1 ? low++ : 0, !(high & 1) ? high-- : 0};
    for (int k = 0; k < 2; k++) {
      if (!ends[k]) continue;
      s->levels |= UINT32_C(1) << level;
      insert(s, &s->whole[ends[k]], span);
      /* where it was, it was above too */
      for (int n = ends[k]; n && !has_all(&s->any[n], span) && insert(s, &s->any[n], span); n /= 2)
        continue;
    }
  }
}

static int collect(const Space *s, int first, int last, const Spans **lists) {
  int n = 0, low = first + s->leaves, high = last + s->leaves;
  for (uint32_t level = 1; s->levels >> level; level++) {
    int a = low >> level, b = high >> level;
    if (!(s->levels >> level & 1) || !a) continue;
    if (s->whole[a].n) lists[n++] = &s->whole[a];
    if (b != a && s->whole[b].n) lists[n++] = &s->whole[b];
  }
  for (; low <= high; low /= 2, high /= 2) {
    if (low & 1 && s->any[low].n) lists[n++] = &s->any[low];
    if (!(high & 1) && s->any[high].n) lists[n++] = &s->any[high];
    low += low & 1;
    high -= !(high & 1);
  }
  return n;
}

int64_t space_lowest(Space *s, int first, int last, int64_t bytes) {
  const Spans *lists[LISTS];
  int n = collect(s, first, last, lists), still = 0;
  uint32_t offset = 0, size = units(s, bytes);
  /* until all lists in turn have nothing against it */
  for (int k = 0; still < n; k = k + 1 < n ? k + 1 : 0) {
    const Spans *l = lists[k];
    if (!l->cap) { /* one interval */
      bool meets = l->one.high > offset && l->one.low < offset + size;
      still = meets ? 1 : still + 1;
      offset = meets ? l->one.high : offset;
      continue;
    }
    const Span *at = l->at;
    uint32_t i = find(l, offset + 1);
    still++;
    while (i < l->n && at[i].low < offset + size) {
      offset = at[i++].high;
      still = 1;
    }
  }
  return (int64_t)offset << s->unit;
}
