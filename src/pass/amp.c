/* Mixed precision: products in half the bits, everything else as it was.
 *
 * Gets a graph in float32, its backward and its updates included. The ops of the list below, where
 * nearly all of the arithmetic is and which sum in float32 whatever they multiply, then get their
 * float32 inputs in the smaller dtype and give their results in it. All others (normalisation,
 * softmax, losses, sums, optimisers) go on in float32, and so do captures: parameters stay float32,
 * are cast where they are multiplied, and are updated by gradients that were cast back.
 *
 * For each value there is at most one cast to the smaller dtype, however many ops want it, and none
 * where it comes from such an op anyway: the consumers of the op's result get it cast back, but
 * another op of the list gets it as it is, also through views. What nobody needs in the end is
 * dce's. One walk; a value gets at most one companion of the other dtype.
 *
 * This changes results, so nothing happens unless the settings ask for it. float16 has few
 * exponents: scaling the loss is the user's. */
#include "op_args.h"
#include "op_ids.h"
#include "pass.h"

/* The mark of a value. */
typedef struct Companion {
  GraphValue *half; /* the same in the smaller dtype */
  GraphValue *full; /* which took the value's place, as it is of the smaller dtype itself */
} Companion;

typedef struct Amp {
  Graph *g;
  DType half;
} Amp;

static bool is_listed(const GraphNode *n) {
  static const int ops[] = {OP_linear,       OP_linear_weight, OP_matmul,
                            OP_bmm,          OP_addmm,         OP_conv2d,
                            OP_conv2d_input, OP_conv2d_weight, OP_conv2d_weight_bias};
  for (size_t i = 0; i < sizeof ops / sizeof ops[0]; i++)
    if (graph_is_op(n, ops[i])) return true;
  return false;
}

/* Whether all is float32 that is a float, and nothing is written. */
static bool may_change(const GraphNode *n) {
  for (int k = 0; k < n->n_in; k++)
    if (n->in[k] && (n->in[k]->dtype != F32 || n->in[k]->number)) return false;
  for (int k = 0; k < n->n_out; k++)
    if (n->out[k].dtype != F32) return false;
  return !n->n_written;
}

static Companion *companion(Amp *a, GraphValue *v) {
  if (!v->mark) v->mark = arena_new(&a->g->arena, Companion);
  return v->mark;
}

static GraphValue *cast(Amp *a, GraphNode *at, const GraphNode *by, GraphValue *v, DType to) {
  GraphNode *n =
      graph_add_op(a->g, at, &op_table[OP_cast], &(struct cast_args){.dtype = to}, 1, &v, 1);
  n->where = by->where;
  graph_describe(a->g, &n->out[0], to, v->device, v->ndim, v->shape);
  return &n->out[0];
}

enum { VIEWS = 8 };

/* The view v of a value that has a companion, as a view of that; or NULL. Before `at`. */
static GraphValue *half_view(Amp *a, GraphNode *at, GraphValue *v, int depth) {
  const GraphNode *n = v->node;
  if (v->mark && ((Companion *)v->mark)->half) return ((Companion *)v->mark)->half;
  bool view = n->kind == GRAPH_OP && n->op->spec[0]->flags & OP_VIEW && n->n_out == 1 &&
              n->n_in == 1 && n->op->id != OP_as_strided && !n->n_patches;
  GraphValue *x = view && depth < VIEWS ? half_view(a, at, n->in[0], depth + 1) : NULL;
  if (!x) return NULL;
  GraphNode *made = graph_add_op(a->g, at, n->op, n->args, 1, &x, 1);
  made->where = n->where;
  graph_describe(a->g, &made->out[0], a->half, v->device, v->ndim, v->shape);
  return companion(a, v)->half = &made->out[0];
}

static GraphValue *half_of(Amp *a, GraphNode *at, GraphValue *v) {
  GraphValue *half = half_view(a, at, v, 0);
  return half ? half : (companion(a, v)->half = cast(a, at, at, v, a->half));
}

static void change(Amp *a, GraphNode *n) {
  for (int k = 0; k < n->n_in; k++)
    if (n->in[k]) n->in[k] = half_of(a, n, n->in[k]);
  for (int k = 0; k < n->n_out; k++) {
    GraphValue *y = &n->out[k];
    y->dtype = (uint8_t)a->half;
    GraphValue *full = cast(a, n->next, n, y, F32);
    companion(a, y)->full = full;
    companion(a, full)->half = y;
  }
}

static GraphValue *current(GraphValue *v) {
  const Companion *c = v ? v->mark : NULL;
  return c && c->full ? c->full : v;
}

void pass_amp(Graph *g, const PassSettings *s) {
  Amp a = {g, (DType)s->amp};
  if (!s->amp) return;
  for (GraphNode *n = g->first, *next; n; n = next) {
    next = n->next; /* casts that are put behind n are not looked at */
    for (int k = 0; k < n->n_in; k++) n->in[k] = current(n->in[k]);
    if (is_listed(n) && may_change(n)) change(&a, n);
  }
  for (size_t i = 0; i < g->results.n; i++) g->results.at[i] = current(g->results.at[i]);
}
