/* What is cheap to compute again is not kept from the forward to the backward pass.
 *
 * Why: an activation function keeps its input for its own gradient, and its result for that of the
 * product behind it: twice the memory, where the one gives the other in a pass over memory. The
 * same with a normalisation: of a BatchNorm the convolution's output is kept for its own gradient,
 * and what it gave only for the next convolution's. What is computed again stands near the gradient
 * that reads the same input, so that fuse_pointwise often makes it a part of that, and it costs
 * nothing.
 *
 * It gets any graph. A value is cut in two where its uses are farthest apart, if that is GAP nodes
 * at least: those behind read a second value, which the same op makes before the first of them. It
 * is done for pointwise ops and normalisations with results of MIN bytes and more, and only where
 * the inputs are alive at that place anyway, so that nothing is kept for it. The op and its inputs
 * are the same, so all values stay equal bit for bit. One walk, in which each value is cut once at
 * most, and what was inserted is not looked at: it ends. */
#include "making.h"
#include "op_ids.h"
#include "pass.h"

enum { MIN = 1 << 20, GAP = 32 };

/* Of a value: its readers in order; of a root, up to where its memory is read. */
typedef struct Life {
  struct Life *root;
  LIST(GraphNode *) readers;
  int64_t last, last_view; /* the number of the last reader; of the last one through a view */
} Life;

static Life *life_of(const GraphValue *v) {
  return v->mark;
}

static void note_use(Graph *g, const GraphValue *v, GraphNode *n, int64_t at) {
  Life *life = life_of(v), *root = life->root;
  if (n && (!life->readers.n || life->readers.at[life->readers.n - 1] != n))
    *list_add(&g->arena, &life->readers) = n;
  if (at > root->last) root->last = at;
  if (life != root && at > root->last_view) root->last_view = at;
}

static void find_lives(Graph *g) {
  for (GraphNode *n = g->first; n; n = n->next) {
    bool view = n->kind == GRAPH_OP && n->op->spec[0]->flags & OP_VIEW;
    for (int k = 0; k < n->n_out; k++) {
      Life *life = arena_new(&g->arena, Life);
      n->out[k].mark = life;
      life->root = view ? life_of(n->in[0])->root : life;
      life->last = life->last_view = n->id;
    }
    for (int k = 0; k < n->n_in; k++)
      if (n->in[k]) note_use(g, n->in[k], n, n->id);
  }
  for (size_t i = 0; i < g->results.n; i++) note_use(g, g->results.at[i], NULL, g->last->id + 1);
}

static int64_t bytes_of(const GraphValue *v) {
  return graph_numel(v) * (int64_t)dtype_size((DType)v->dtype);
}

/* Of a BatchNorm that nothing is added to, with or without relu: by the statistics that it used. */
static bool is_norm(const GraphNode *n) {
  if (n->converts) return false;
  return graph_is_op(n, OP_batch_norm) || (graph_is_op(n, OP_batch_norm_act) && !n->in[5]);
}

static bool is_cheap(const GraphNode *n) {
  if (is_norm(n)) return bytes_of(&n->out[0]) >= MIN;
  if (n->kind != GRAPH_OP || n->n_out != 1 || n->n_patches || n->converts) return false;
  const OpSpec *spec = n->op->spec[0];
  if (spec->flags & OP_RANDOM || bytes_of(&n->out[0]) < MIN) return false;
  return spec->pointwise[PW_F32] || spec->pointwise[PW_F64] || spec->pointwise[PW_I64] ||
         graph_is_op(n, OP_layer_norm) || graph_is_op(n, OP_rms_norm);
}

/* Which of n's readers is the first behind the widest gap in its use; 0: there is none that is wide
 * enough. */
static size_t first_behind_gap(const GraphNode *n) {
  const Life *life = life_of(&n->out[0]);
  int64_t widest = GAP - 1;
  size_t first = 0;
  for (size_t i = 1; i < life->readers.n; i++) {
    int64_t from = life->readers.at[i - 1]->id, gap = life->readers.at[i]->id - from;
    if (gap <= widest || life->last_view > from) continue;
    widest = gap;
    first = i;
  }
  return first;
}

/* How the first output of n is made again. */
static Making making_of(Graph *g, const GraphNode *n) {
  Making m;
  return making_find(g, &n->out[0], &m) ? m : (Making){n->op, n->args, n->in, n->n_in};
}

/* Whether all that is read for it is there at `at`, for others. */
static bool is_there(const Making *m, const GraphNode *at) {
  for (int k = 0; k < m->n_in; k++)
    if (m->in[k] && m->in[k]->node->kind != GRAPH_CAPTURE &&
        (!life_of(m->in[k]) || life_of(m->in[k])->root->last < at->id))
      return false;
  return true;
}

/* Readers of n's first output from number `first` on read a value that is made before them. */
static void cut(Graph *g, GraphNode *n, const Making *m, size_t first) {
  GraphValue *v = &n->out[0];
  Life *life = life_of(v);
  GraphNode *again = making_add(g, life->readers.at[first], v, m);
  for (size_t i = first; i < life->readers.n; i++) {
    GraphNode *reader = life->readers.at[i];
    for (int k = 0; k < reader->n_in; k++)
      if (reader->in[k] == v) reader->in[k] = &again->out[0];
  }
  life->last = life->readers.at[first - 1]->id;
}

void pass_recompute(Graph *g, const PassSettings *settings) {
  bool any = false;
  (void)settings;
  for (const GraphNode *n = g->first; n && !any; n = n->next) any = is_cheap(n);
  if (!any) return;
  find_lives(g);
  for (GraphNode *n = g->first; n; n = n->next) {
    if (n->n_out == 0 || !n->out[0].mark || !is_cheap(n)) continue;
    size_t first = first_behind_gap(n);
    const Life *life = life_of(&n->out[0]);
    if (!first || life->last > g->last->id || life->readers.at[first]->kind != GRAPH_OP) continue;
    Making making = making_of(g, n);
    if (is_there(&making, life->readers.at[first])) cut(g, n, &making, first);
  }
}
