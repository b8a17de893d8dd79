/* A tree over the steps. A node stands for a range of them and has two sets of offsets, each a
 * sorted list of intervals that do not touch: `whole`, taken during all of its steps, and `any`,
 * taken during at least one. What is taken from first to last is in `whole` of the few nodes that
 * make up that range, and in `any` of these and of those above. So what is taken somewhere in a
 * range is `any` of its nodes and `whole` of those above: some twenty lists, each short, since in a
 * well filled block neighbours merge. */
#include "space.h"

#include <stdbool.h>
#include <string.h>

typedef struct Span {
  int64_t low, high;
} Span;

typedef struct Spans {
  Span *at;
  size_t n, cap;
} Spans;

typedef struct SpaceNode {
  Spans whole, any;
} SpaceNode;

enum { LISTS = 160 }; /* more than a range can ask for: 3 for each bit of a step */

struct Space {
  Arena *arena;
  int leaves; /* a power of two; node k has the children 2k and 2k + 1, leaves are the last */
  SpaceNode *nodes;
};

Space *space_create(Arena *a, int n_steps) {
  Space *s = arena_new(a, Space);
  s->arena = a;
  s->leaves = 1;
  while (s->leaves < n_steps) s->leaves *= 2;
  s->nodes = arena_array(a, SpaceNode, 2 * s->leaves);
  return s;
}

/* -- Sets of offsets --------------------------------------------------------------------------- */

/* The first interval that ends at or behind `offset`. */
static size_t find(const Spans *s, int64_t offset) {
  size_t low = 0, high = s->n;
  while (low < high) {
    size_t mid = (low + high) / 2;
    if (s->at[mid].high < offset) low = mid + 1;
    else high = mid;
  }
  return low;
}

/* False when all of it was there. */
static bool insert(Space *space, Spans *s, Span span) {
  size_t first = find(s, span.low), behind = first;
  if (first < s->n && s->at[first].low <= span.low && s->at[first].high >= span.high) return false;
  for (; behind < s->n && s->at[behind].low <= span.high; behind++) {
    if (s->at[behind].low < span.low) span.low = s->at[behind].low;
    if (s->at[behind].high > span.high) span.high = s->at[behind].high;
  }
  if (behind == first) {
    (void)list_add(space->arena, s);
    memmove(s->at + first + 1, s->at + first, sizeof *s->at * (s->n - 1 - first));
  } else {
    memmove(s->at + first + 1, s->at + behind, sizeof *s->at * (s->n - behind));
    s->n -= behind - first - 1;
  }
  s->at[first] = span;
  return true;
}

/* -- Ranges of steps --------------------------------------------------------------------------- */

void space_add(Space *s, int first, int last, int64_t offset, int64_t bytes) {
  Span span = {offset, offset + bytes};
  int low = first + s->leaves, high = last + s->leaves;
  for (; low <= high; low /= 2, high /= 2) {
    int ends[2] = {low & 1 ? low++ : 0, !(high & 1) ? high-- : 0};
    for (int k = 0; k < 2; k++) {
      if (!ends[k]) continue;
      insert(s, &s->nodes[ends[k]].whole, span);
      /* where it was, it was above too */
      for (int n = ends[k]; n && insert(s, &s->nodes[n].any, span); n /= 2) continue;
    }
  }
}

static int collect(const Space *s, int first, int last, const Spans **lists) {
  int n = 0, low = first + s->leaves, high = last + s->leaves;
  for (int a = low / 2, b = high / 2; a; a /= 2, b /= 2) {
    if (s->nodes[a].whole.n) lists[n++] = &s->nodes[a].whole;
    if (b != a && s->nodes[b].whole.n) lists[n++] = &s->nodes[b].whole;
  }
  for (; low <= high; low /= 2, high /= 2) {
    if (low & 1 && s->nodes[low].any.n) lists[n++] = &s->nodes[low].any;
    if (!(high & 1) && s->nodes[high].any.n) lists[n++] = &s->nodes[high].any;
    low += low & 1;
    high -= !(high & 1);
  }
  return n;
}

int64_t space_lowest(Space *s, int first, int last, int64_t bytes) {
  const Spans *lists[LISTS];
  int n = collect(s, first, last, lists), still = 0;
  int64_t offset = 0;
  /* until all lists in turn have nothing against it */
  for (int k = 0; still < n; k = k + 1 < n ? k + 1 : 0) {
    const Spans *l = lists[k];
    size_t i = find(l, offset + 1);
    still++;
    while (i < l->n && l->at[i].low < offset + bytes) {
      offset = l->at[i++].high;
      still = 1;
    }
  }
  return offset;
}
