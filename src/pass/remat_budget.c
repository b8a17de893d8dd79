/* Recomputation to a memory budget, which the user gave.
 *
 * What lies in memory at the peak of a step is mostly what the forward leaves for the backward. A
 * value with a long stretch between two uses may be dropped there and computed anew for the later
 * ones. This pass decides for which: it tries sets of values, from the cheapest on, asks the
 * planner what the block would take (settings.measure, a dry run), and keeps the first set with
 * which it is within the budget.
 *
 *  1. Cheap values, whose op has no FLOPs to speak of (pointwise, norms, softmax, dropout), nor
 * have those that must be computed before it, back to values that are still there. Of these a
 *     prefix, by time per byte (those that lie at the peak first), found by bisection.
 *  2. If all of them do not suffice, the forward is cut into segments where the fewest bytes cross,
 *     and only what crosses is left there, as with checkpoints by hand; 2 segments, 3, and so on.
 *     Of products and convolutions, those that take the most time for their bytes are then left
 *     too, as many as can be.
 *
 * No set is within a budget that is too small: then that is an error, with the least that was
 * found.
 *
 * A value in the set is taken from a copy of its op, or of less (making.h), by those uses that
 * stand behind the longest stretch (again.c). Copies compute the same bits. What such a copy needs
 * and is dead by then is computed anew as well if it is cheap (in 2: if it is not left), else it
 * lives longer. With micro-batches nodes are first put in the planner's order, and what is of each
 * of them is computed anew for each, not what was made once for all. It runs when fusion is done,
 * since a value within a fused op takes no memory; a dce behind it removes what had late uses
 * alone. It ends after as many trials as there are bisections and numbers of segments: about 30. */
#include <stdlib.h>
#include <string.h>

#include "again.h"
#include "err.h"
#include "pass.h"

/* What the pass knows of a value that has memory of its own. */
typedef struct Item {
  GraphNode *node;
  const Making *how;         /* it may be made without the rest of its node's; or NULL */
  int64_t bytes, made, last; /* nodes: which makes it, and reads it last */
  int64_t early, late;       /* the readers before and behind the longest stretch */
  int64_t front;             /* the last reader of the forward */
  double ratio;              /* ns to compute it and what it needs that is dead, per byte */
  bool at_end, heavy, fit;   /* written or returned; has FLOPs; may be dropped */
  bool anew, left;           /* in the set that is tried; in step 2 it is left */
} Item;

typedef LIST(Item *) ItemList;
typedef LIST(GraphNode *) NodeList;

/* The inputs of a node before a trial. */
typedef struct Saved {
  GraphNode *node;
  GraphValue **in;
} Saved;

typedef struct Budget {
  Graph *g;
  const PassSettings *settings;
  Item *items;   /* by id of values; node NULL: no memory of its own, or not of an op */
  int64_t *root; /* by id of values: whose memory it lies in */
  int64_t n_values, peak;
  int64_t first, end;      /* nodes of micro-batches; end 0: there are none */
  LIST(GraphNode *) order; /* of nodes, which a trial may change */
  bool deep;               /* step 2 */
  int64_t *weight;         /* by node of the forward: bytes made until then; that cross behind it */
  int64_t *crossing;
  ItemList cheap, heavy;
  LIST(Saved) saved;
  int64_t least;
} Budget;

static Item *item_of(const Budget *b, const GraphValue *v) {
  Item *i = &b->items[b->root[v->id]];
  return i->node ? i : NULL;
}

static bool is_view(const GraphNode *n) {
  return n->kind == GRAPH_OP && n->op->spec[0]->flags & OP_VIEW;
}

/* -- What there is ----------------------------------------------------------------------------- */

static View view_of(Graph *g, const GraphValue *v) {
  if (!v) return (View){.ndim = -1};
  int64_t *stride = arena_array(&g->arena, int64_t, v->ndim);
  shape_contiguous(v->ndim, v->shape, stride);
  return (View){.ndim = v->ndim, .dtype = v->dtype, .shape = v->shape, .stride = stride};
}

static double flops_of(Graph *g, const GraphNode *n) {
  View *views = arena_array(&g->arena, View, n->n_in + n->n_out);
  for (int k = 0; k < n->n_in; k++) views[k] = view_of(g, n->in[k]);
  for (int k = 0; k < n->n_out; k++) views[n->n_in + k] = view_of(g, &n->out[k]);
  OpCall call = {.op = n->op,
                 .args = n->args,
                 .in = views,
                 .out = views + n->n_in,
                 .n_in = n->n_in,
                 .n_out = n->n_out - n->n_written};
  return n->op->spec[0]->flops(&call);
}

static int64_t bytes_of(const GraphValue *v) {
  return graph_numel(v) * (int64_t)dtype_size((DType)v->dtype);
}

/* Products, convolutions, attention. A fused op, which counts its steps, is none. */
static bool is_heavy(const Op *op) {
  for (int k = 0; k < op->n_params; k++)
    if (op->params[k].kind == PARAM_PROGRAM) return false;
  return op->spec[0]->flops != NULL;
}

/* What an item is computed anew from. */
static int inputs_of(const Item *i, GraphValue *const **in) {
  *in = i->how ? i->how->in : i->node->in;
  return i->how ? i->how->n_in : i->node->n_in;
}

/* Nanoseconds, of an ordinary CPU: only the order matters. */
static double time_of(Graph *g, const Item *i) {
  enum { FLOPS_IN_NS = 50, BYTES_IN_NS = 5 };
  const GraphNode *n = i->node;
  GraphValue *const *in;
  int n_in = inputs_of(i, &in);
  if (i->heavy) return flops_of(g, n) / FLOPS_IN_NS * n->times;
  int64_t bytes = i->how ? i->bytes : 0;
  for (int k = 0; k < n_in; k++) bytes += in[k] ? bytes_of(in[k]) : 0;
  for (int k = 0; k < n->n_out && !i->how; k++) bytes += bytes_of(&n->out[k]);
  return (double)bytes / BYTES_IN_NS * n->times;
}

static void find_order(Budget *b) {
  graph_order(b->g);
  graph_renumber(b->g);
  for (GraphNode *n = b->g->first; n; n = n->next) {
    *list_add(&b->g->arena, &b->order) = n;
    if (n->kind != GRAPH_OP || !graph_is_micro(n)) continue;
    if (!b->end) b->first = n->id;
    b->end = n->id + 1;
  }
}

static void find_roots(Budget *b) {
  b->n_values = graph_values(b->g);
  b->items = arena_array(&b->g->arena, Item, b->n_values + 1);
  b->root = arena_array(&b->g->arena, int64_t, b->n_values + 1);
  for (GraphNode *n = b->g->first; n; n = n->next)
    for (int k = 0; k < n->n_out; k++) {
      int64_t id = n->out[k].id;
      b->root[id] = is_view(n) ? b->root[n->in[0]->id] : id;
      if (n->kind != GRAPH_OP || is_view(n)) continue;
      b->items[id] = (Item){.node = n,
                            .bytes = bytes_of(&n->out[k]),
                            .made = n->id,
                            .last = n->id,
                            .late = n->id,
                            .heavy = is_heavy(n->op)};
      Making m;
      if (making_find(b->g, &n->out[k], &m))
        b->items[id].how = arena_copy(&b->g->arena, &m, sizeof m);
    }
}

/* Readers come in order, so that `last` is where the stretch before the next one began. */
static void find_uses(Budget *b) {
  int64_t *longest = arena_array(&b->g->arena, int64_t, b->n_values + 1);
  for (GraphNode *n = b->g->first; n; n = n->next) {
    for (int k = 0; k < n->n_in && !is_view(n); k++) {
      Item *i = n->in[k] ? item_of(b, n->in[k]) : NULL;
      if (!i) continue;
      i->at_end |= n->kind == GRAPH_WRITE;
      if (n->id - i->last > longest[i - b->items]) {
        longest[i - b->items] = n->id - i->last;
        i->early = i->last;
        i->late = n->id;
      }
      i->last = n->id;
    }
  }
  for (size_t k = 0; k < b->g->results.n; k++) {
    Item *i = item_of(b, b->g->results.at[k]);
    if (i) i->at_end = true;
  }
}

/* From which node on an item takes memory, and behind which it does not: what is made before the
 * micro-batches lasts through all of them, as does what they leave. */
static void find_life(const Budget *b, const Item *i, int64_t *made, int64_t *last) {
  *made = i->made, *last = i->last;
  if (!b->end) return;
  if (*made < b->first && *last >= b->first && *last < b->end) *last = b->end - 1;
  if (*made >= b->first && *made < b->end && (*last >= b->end || i->at_end)) *made = b->first;
}

static void find_peak(Budget *b) {
  int64_t n = b->g->last->id + 1, most = 0;
  int64_t *change = arena_array(&b->g->arena, int64_t, n + 1);
  for (int64_t k = 0; k < b->n_values; k++) {
    const Item *i = &b->items[k];
    if (!i->node) continue;
    int64_t made, last;
    find_life(b, i, &made, &last);
    change[made] += i->bytes;
    if (!i->at_end) change[last + 1] -= i->bytes;
  }
  for (int64_t k = 0, now = 0; k < n; k++) {
    now += change[k];
    if (now > most) most = now, b->peak = k;
  }
}

/* The forward is what comes before the peak. */
static void find_crossing(Budget *b) {
  b->weight = arena_array(&b->g->arena, int64_t, b->peak + 2);
  b->crossing = arena_array(&b->g->arena, int64_t, b->peak + 2);
  for (GraphNode *n = b->g->first; n && n->id <= b->peak; n = n->next)
    for (int k = 0; k < n->n_in && !is_view(n); k++) {
      Item *i = n->in[k] ? item_of(b, n->in[k]) : NULL;
      if (i) i->front = n->id;
    }
  for (int64_t k = 0; k < b->n_values; k++) {
    const Item *i = &b->items[k];
    if (!i->node || i->made > b->peak) continue;
    b->weight[i->made] += i->bytes;
    if (i->front <= i->made) continue;
    b->crossing[i->made] += i->bytes;
    b->crossing[i->front] -= i->bytes;
  }
  for (int64_t n = 1; n <= b->peak; n++) {
    b->weight[n] += b->weight[n - 1];
    b->crossing[n] += b->crossing[n - 1];
  }
}

/* The time to compute i late: with all that it needs and is dead then; < 0: that is heavy, or much.
 */
static double cost_of(Budget *b, const Item *i, int64_t *seen, int64_t mark) {
  enum { MOST = 64 };
  const Item *work[MOST];
  int n = 0;
  double cost = 0;
  work[n++] = i;
  for (int w = 0; w < n; w++) {
    GraphValue *const *in;
    int n_in = inputs_of(work[w], &in);
    cost += time_of(b->g, work[w]);
    for (int k = 0; k < n_in; k++) {
      const Item *from = in[k] ? item_of(b, in[k]) : NULL;
      if (!from || from->at_end || from->last >= i->late) continue;
      int64_t *mine = &seen[from->how ? from - b->items : b->n_values + from->node->id];
      if (*mine == mark || !again_is_beside(from->node, i->node)) continue;
      if (from->heavy || n == MOST) return -1;
      *mine = mark;
      work[n++] = from;
    }
  }
  return cost;
}

static int by_ratio(const void *a, const void *b) {
  const Item *x = *(Item *const *)a, *y = *(Item *const *)b;
  if (x->ratio != y->ratio) return x->ratio < y->ratio ? -1 : 1;
  return x->made < y->made ? -1 : x->made > y->made;
}

static void find_candidates(Budget *b) {
  enum { LEAST_BYTES = 1024, LEAST_STRETCH = 4, ELSEWHERE = 1000 };
  Arena *a = &b->g->arena;
  int64_t *seen = arena_array(a, int64_t, b->n_values + b->g->last->id + 1);
  for (int64_t k = 0; k < b->n_values; k++) {
    Item *i = &b->items[k];
    if (!i->node || i->at_end || i->bytes < LEAST_BYTES) continue;
    i->fit = i->late - i->made >= LEAST_STRETCH;
    if (i->heavy && i->made < b->peak) {
      i->ratio = time_of(b->g, i) / (double)i->bytes;
      *list_add(a, &b->heavy) = i;
    }
    double cost = i->fit && !i->heavy ? cost_of(b, i, seen, k + 1) : -1;
    if (cost < 0) continue;
    i->ratio = cost / (double)i->bytes;
    if (i->made > b->peak || i->late <= b->peak) i->ratio *= ELSEWHERE;
    *list_add(a, &b->cheap) = i;
  }
  if (b->cheap.n) qsort(b->cheap.at, b->cheap.n, sizeof *b->cheap.at, by_ratio);
  if (b->heavy.n) qsort(b->heavy.at, b->heavy.n, sizeof *b->heavy.at, by_ratio);
}

/* -- Trials ------------------------------------------------------------------------------------ */

static bool is_anew(void *ud, const GraphValue *v, const GraphNode *user) {
  const Budget *b = ud;
  const Item *i = item_of(b, v);
  if (!i || i->at_end || user->kind != GRAPH_OP || !again_is_beside(i->node, user)) return false;
  if (i->anew) return user->id > i->early;
  return i->last < user->id && !i->left && (b->deep || !i->heavy);
}

static const Making *how_to_make(void *ud, const GraphValue *v) {
  const Budget *b = ud;
  return b->items[v->id].how;
}

/* Computes the set anew; `copies` lists what is new in the graph. */
static void apply(Budget *b, NodeList *copies) {
  Arena *a = &b->g->arena;
  Again r = again_begin(b->g, is_anew, b);
  r.how = how_to_make;
  b->saved.n = 0;
  for (GraphNode *n = b->g->first; n; n = n->next) {
    bool any = false;
    if (is_view(n)) continue; /* views are made again for who reads them */
    for (int k = 0; k < n->n_in; k++) any |= n->in[k] && is_anew(b, n->in[k], n);
    if (!any) continue;
    GraphNode *before = n->prev;
    *list_add(a, &b->saved) = (Saved){n, arena_copy(a, n->in, sizeof *n->in * (size_t)n->n_in)};
    again_inputs(&r, n);
    for (GraphNode *c = before ? before->next : b->g->first; c != n; c = c->next)
      *list_add(a, copies) = c;
  }
}

static void undo(Budget *b, const NodeList *copies) {
  for (size_t k = 0; k < b->saved.n; k++) {
    const Saved *s = &b->saved.at[k];
    memcpy(s->node->in, s->in, sizeof *s->in * (size_t)s->node->n_in);
  }
  for (size_t k = 0; k < copies->n; k++) graph_remove(b->g, copies->at[k]);
  for (size_t k = 0; k < b->order.n; k++) graph_move(b->g, b->order.at[k], NULL);
  graph_renumber(b->g);
}

/* What the block would take with the set. */
static int64_t try(Budget *b) {
  NodeList copies = {0};
  int64_t bytes;
  apply(b, &copies);
  int rc = b->settings->measure(b->settings->measure_ud, b->g, &bytes);
  if (rc) arena_throw(&b->g->arena, rc);
  graph_clear_marks(b->g);
  undo(b, &copies);
  if (bytes < b->least) b->least = bytes;
  return bytes;
}

static bool fits(Budget *b) {
  return try(b) <= b->settings->budget;
}

/* The first n of the cheap values. */
static void set_cheap(Budget *b, size_t n) {
  for (size_t k = 0; k < b->cheap.n; k++) b->cheap.at[k]->anew = k < n;
}

/* The shortest prefix found that is within the budget. */
static bool choose_cheap(Budget *b) {
  size_t low = 0, high = b->cheap.n; /* low does not fit */
  set_cheap(b, high);
  if (!high || !fits(b)) return false;
  while (high - low > 1) {
    size_t mid = (low + high) / 2;
    set_cheap(b, mid);
    if (fits(b)) high = mid;
    else low = mid;
  }
  set_cheap(b, high);
  return true;
}

/* Where the fewest bytes cross, around the place where the k-th of n parts of the weight ends. */
static int64_t find_cut(const Budget *b, int64_t k, int64_t n) {
  double all = (double)b->weight[b->peak];
  int64_t best = -1;
  for (int64_t at = 0; at < b->peak; at++) {
    double place = (double)b->weight[at] / all * (double)n - (double)k;
    if (place < -0.5 || place > 0.5) continue;
    if (best < 0 || b->crossing[at] < b->crossing[best]) best = at;
  }
  return best;
}

/* All is dropped but what crosses the cuts into n segments, and of heavy ones but the first
 * n_heavy. */
static void set_segments(Budget *b, int64_t n, size_t n_heavy) {
  for (int64_t k = 0; k < b->n_values; k++) b->items[k].left = false;
  for (int64_t cut = 1; cut < n; cut++) {
    int64_t at = find_cut(b, cut, n);
    for (int64_t k = 0; k < b->n_values; k++) {
      Item *i = &b->items[k];
      i->left |= i->node && i->made <= at && i->front > at;
    }
  }
  for (size_t k = n_heavy; k < b->heavy.n; k++) b->heavy.at[k]->left = true;
  for (int64_t k = 0; k < b->n_values; k++) {
    Item *i = &b->items[k];
    i->anew = i->node && i->fit && !i->left && i->made < b->peak;
  }
}

static bool choose_segments(Budget *b) {
  enum { MOST = 64 };
  int64_t n = 2;
  b->deep = true;
  for (;; n += n / 2) {
    set_segments(b, n, b->heavy.n);
    if (fits(b)) break;
    if (n > MOST || n > b->peak) return false;
  }
  size_t low = 0, high = b->heavy.n; /* low does not fit, or all would have in step 1 */
  while (high - low > 1) {
    size_t mid = (low + high) / 2;
    set_segments(b, n, mid);
    if (fits(b)) high = mid;
    else low = mid;
  }
  set_segments(b, n, high);
  return true;
}

void pass_remat_budget(Graph *g, const PassSettings *s) {
  Budget b = {.g = g, .settings = s, .least = INT64_MAX};
  NodeList copies = {0};
  if (!s->budget || !g->last) return;
  find_order(&b);
  find_roots(&b);
  find_uses(&b);
  find_peak(&b);
  find_crossing(&b);
  find_candidates(&b);
  if (fits(&b)) return;
  if (!choose_cheap(&b) && !choose_segments(&b))
    arena_throw(
        &g->arena,
        err_set(MF_EINVAL,
                "compile: memory_budget is %lld bytes; with all recomputation the step needs "
                "at least %lld beside its arguments and what it captures",
                (long long)s->budget, (long long)b.least));
  apply(&b, &copies);
}
