/* A tree over the steps. A node stands for a range of them and has two sets of offsets, each a
 * sorted list of intervals that do not touch: `whole`, taken during all of its steps, and `any`,
 * taken during at least one. What is taken from first to last is in `whole` of the few nodes that
 * make up that range, and in `any` of these and of those above. So what is taken somewhere in a
 * range is `any` of its nodes and `whole` of those above: some twenty lists, each short, since in a
 * well filled block neighbours merge. A node has FAN children, so that there are few levels: most
 * ranges are short, and ask all levels above them. */
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

enum {
  BITS = 2,
  FAN = 1 << BITS,
  LEVELS = 32 / BITS + 1,  /* more than there can be */
  LISTS = 2 * FAN * LEVELS /* and than a range can ask for */
};

/* Of one node. */
typedef struct Taken {
  Spans whole, any;
} Taken;

struct Space {
  Arena *arena;
  int unit;              /* bytes are counted in 2^unit */
  int n_levels;          /* level 0 are the steps; the last is one node */
  Taken *levels[LEVELS]; /* node i of a level has the children FAN * i and so on of the one below */
  bool used[LEVELS];     /* some `whole` is not empty */
};

Space *space_create(Arena *a, int n_steps, int64_t most, int64_t align) {
  Space *s = arena_new(a, Space);
  s->arena = a;
  while (INT64_C(1) << s->unit < align || most >> s->unit >= UINT32_MAX / 2) s->unit++;
  for (int n = n_steps;; n = (n + FAN - 1) / FAN) {
    s->levels[s->n_levels++] = arena_array(a, Taken, n);
    if (n <= 1) return s;
  }
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

/* The nodes of a level that belong to a range, whose others are left to the level above: [low,
 * *first) and (*last, high]. */
static void cut_ends(int low, int high, int *first, int *last) {
  *first = (low + FAN - 1) / FAN * FAN;
  *last = (high + 1) / FAN * FAN - 1;
  if (*first > *last) *first = high + 1, *last = high;
}

static void add_node(Space *s, int level, int node, Span span) {
  s->used[level] = true;
  insert(s, &s->levels[level][node].whole, span);
  for (; level < s->n_levels; level++, node /= FAN) {
    Spans *any = &s->levels[level][node].any; /* where it was, it was above too */
    if (has_all(any, span) || !insert(s, any, span)) return;
  }
}

void space_add(Space *s, int first, int last, int64_t offset, int64_t bytes) {
  uint32_t at = units(s, offset);
  Span span = {at, at + units(s, bytes)};
  for (int level = 0, low, high; first <= last; first = low / FAN, last = high / FAN, level++) {
    cut_ends(first, last, &low, &high);
    for (int i = first; i < low; i++) add_node(s, level, i, span);
    for (int i = high + 1; i <= last; i++) add_node(s, level, i, span);
    if (low > high) return;
  }
}

static int collect(const Space *s, int first, int last, const Spans **lists) {
  int n = 0, a = first / FAN, b = last / FAN;
  for (int level = 1; level < s->n_levels; level++, a /= FAN, b /= FAN) {
    if (!s->used[level]) continue;
    if (s->levels[level][a].whole.n) lists[n++] = &s->levels[level][a].whole;
    if (b != a && s->levels[level][b].whole.n) lists[n++] = &s->levels[level][b].whole;
  }
  for (int level = 0, low, high; first <= last; first = low / FAN, last = high / FAN, level++) {
    const Taken *nodes = s->levels[level];
    cut_ends(first, last, &low, &high);
    for (int i = first; i < low; i++)
      if (nodes[i].any.n) lists[n++] = &nodes[i].any;
    for (int i = high + 1; i <= last; i++)
      if (nodes[i].any.n) lists[n++] = &nodes[i].any;
    if (low > high) break;
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
