/* A sum and the normalisation behind it become one op; and in the backward the gradient of the
 * normalisation and the sum behind it.
 *
 * Why: a transformer adds what a layer gives to what goes past it, and normalises the sum, which
 * goes past the next layer itself. Each of the two writes what the other reads. In the backward,
 * where layers are normalised before, the gradient of what goes past is added to that of the
 * normalisation; where they are normalised behind, the sum of both is what the gradient of the
 * normalisation reads. Together a line is added and normalised while it lies in the cache.
 *
 * It gets any graph. A sum is of two tensors of one form in float32 or float64, which its
 * normalisation, layer_norm or rms_norm, reads within REACH nodes, so that what it gives does not
 * lie long before it is used; others may read the sum too. In the backward nothing else reads the
 * values between. A line is added and rounded as by itself, so all values stay equal bit for bit.
 * Each node is looked at once, and each pair becomes one node: it ends. */
#include "op_args.h"
#include "op_ids.h"
#include "pass.h"
#include "readers.h"

enum { REACH = 16 };

static bool same_form(const GraphValue *a, const GraphValue *b) {
  return a->dtype == b->dtype && a->device == b->device && !b->number &&
         shape_equal(a->ndim, a->shape, b->ndim, b->shape);
}

/* Whether n is the sum of two tensors of its form. */
static bool is_sum(const GraphNode *n) {
  const GraphValue *y = &n->out[0];
  return graph_is_op(n, OP_add) && !n->n_patches && !n->n_written && !n->mark &&
         ((const struct add_args *)n->args)->alpha == 1 && (y->dtype == F32 || y->dtype == F64) &&
         same_form(y, n->in[0]) && same_form(y, n->in[1]) && y->device == DEVICE_CPU;
}

/* A normalisation's arguments, or those of its gradient. */
typedef struct Norm {
  const IntList *shape;
  GraphValue *weight, *bias;
  bool centre, params;
  double eps;
} Norm;

/* Without eps that of the dtype, as rms_norm has it. */
static double rms_eps(bool given, double eps, DType t) {
  return given ? eps : t == F64 ? 0x1p-52 : 0x1p-23;
}

static bool is_norm(const GraphNode *n, Norm *o) {
  if (graph_is_op(n, OP_layer_norm)) {
    const struct layer_norm_args *a = n->args;
    *o = (Norm){&a->normalized_shape, n->in[1], n->in[2], true, true, a->eps};
  } else if (graph_is_op(n, OP_rms_norm)) {
    const struct rms_norm_args *a = n->args;
    double eps = rms_eps(a->has_eps, a->eps, (DType)n->in[0]->dtype);
    *o = (Norm){&a->normalized_shape, n->in[1], NULL, false, true, eps};
  } else {
    return false;
  }
  return !n->n_patches && !n->mark;
}

static bool is_norm_backward(const GraphNode *n, Norm *o) {
  if (graph_is_op(n, OP_layer_norm_backward)) {
    const struct layer_norm_backward_args *a = n->args;
    *o = (Norm){&a->normalized_shape, n->in[2], NULL, true, a->params, a->eps};
  } else if (graph_is_op(n, OP_rms_norm_backward)) {
    const struct rms_norm_backward_args *a = n->args;
    double eps = rms_eps(a->has_eps, a->eps, (DType)n->in[1]->dtype);
    *o = (Norm){&a->normalized_shape, n->in[2], NULL, false, a->params, eps};
  } else {
    return false;
  }
  return !n->n_patches && !n->mark && n->in[0]->dtype == n->in[1]->dtype;
}

static bool before(const GraphValue *v, const GraphNode *n) {
  return !v || v->node->id < n->id;
}

/* -- Forward ----------------------------------------------------------------------------------- */

/* The node stands where the sum did, with what it normalised. */
static void fuse_forward(Graph *g, GraphNode *sum, GraphNode *norm, const Norm *o) {
  struct add_norm_args a = {.normalized_shape = *o->shape, .centre = o->centre, .eps = o->eps};
  GraphValue *in[4] = {sum->in[0], sum->in[1], o->weight, o->bias};
  GraphNode *n = graph_add_op(g, sum, &op_table[OP_add_norm], &a, 4, in, 2);
  const GraphValue *s = &sum->out[0];
  n->where = norm->where;
  for (int k = 0; k < 2; k++)
    graph_describe(g, &n->out[k], (DType)s->dtype, s->device, s->ndim, s->shape);
  norm->out[0].mark = &n->out[0];
  sum->out[0].mark = &n->out[1];
  graph_remove(g, norm);
  graph_remove(g, sum);
}

/* -- Backward ---------------------------------------------------------------------------------- */

/* A gradient of a normalisation, the sum that takes what it gives, and the one that it reads; of
 * the sums one may be NULL. */
typedef struct Back {
  GraphNode *norm, *to, *from;
  Norm how;
} Back;

/* Whether nothing reads the gradients of the weights before node `to`. */
static bool may_wait(const GraphNode *norm, const GraphNode *to) {
  for (int k = 1; k < norm->n_out; k++) {
    const Readers *r = readers_of(&norm->out[k]);
    if (r->n && r->at[0] && r->at[0]->id < to->id) return false;
  }
  return true;
}

static GraphNode *only_reader(const GraphValue *v) {
  return readers_of(v)->n == 1 ? readers_of(v)->at[0] : NULL;
}

/* The sum of what n gives and another value, which is there, or soon. */
static GraphNode *sum_behind(const GraphNode *n) {
  GraphNode *to = only_reader(&n->out[0]);
  if (!to || !is_sum(to) || to->in[0] == to->in[1] || to->times != n->times) return NULL;
  const GraphValue *h = to->in[to->in[0] == &n->out[0]];
  return before(h, n) || (may_wait(n, to) && to->id - n->id <= REACH) ? to : NULL;
}

/* The sum that only n reads, shortly before. */
static GraphNode *sum_before(const GraphNode *n) {
  GraphNode *from = n->in[0]->node;
  bool ours = is_sum(from) && only_reader(n->in[0]) == n && from->times == n->times;
  return ours && n->id - from->id <= REACH ? from : NULL;
}

static bool find_back(Back *b, GraphNode *n) {
  *b = (Back){.norm = n};
  if (!is_norm_backward(n, &b->how)) return false;
  b->to = sum_behind(n);
  if (b->to) b->to->mark = n;
  b->from = sum_before(n);
  if (b->from) b->from->mark = n;
  return b->to || b->from;
}

static void fuse_backward(Graph *g, const Back *b) {
  GraphNode *norm = b->norm;
  GraphValue *h = b->to ? b->to->in[b->to->in[0] == &norm->out[0]] : NULL;
  GraphValue *more = b->from ? b->from->in[1] : NULL;
  struct norm_add_backward_args a = {.normalized_shape = *b->how.shape,
                                     .centre = b->how.centre,
                                     .params = b->how.params,
                                     .eps = b->how.eps};
  GraphValue *in[5] = {b->from ? b->from->in[0] : norm->in[0], norm->in[1], h, more, b->how.weight};
  GraphNode *n = graph_add_op(g, before(h, norm) ? norm : b->to, &op_table[OP_norm_add_backward],
                              &a, 5, in, 3);
  n->where = norm->where;
  for (int k = 0; k < 3; k++) {
    GraphValue *v = &norm->out[k < norm->n_out ? k : 1]; /* rms_norm has no bias */
    graph_describe(g, &n->out[k], (DType)v->dtype, v->device, v->ndim, v->shape);
    if (k < norm->n_out) v->mark = &n->out[k];
  }
  if (b->to) b->to->out[0].mark = &n->out[0];
  graph_remove(g, norm);
  if (b->to) graph_remove(g, b->to);
  if (b->from) graph_remove(g, b->from);
}

void pass_fuse_sum_norm(Graph *g, const PassSettings *settings) {
  LIST(GraphNode *) pairs = {0};
  LIST(Back) backs = {0};
  Norm o;
  Back b;
  (void)settings;
  if (!g->has[OP_layer_norm] && !g->has[OP_rms_norm] && !g->has[OP_layer_norm_backward] &&
      !g->has[OP_rms_norm_backward])
    return;
  readers_find(g);
  for (GraphNode *n = g->first; n; n = n->next)
    if (find_back(&b, n)) *list_add(&g->arena, &backs) = b;
  for (GraphNode *n = g->first; n; n = n->next) {
    if (!is_norm(n, &o)) continue;
    GraphNode *sum = n->in[0]->node;
    if (!is_sum(sum) || n->id - sum->id > REACH || sum->times != n->times) continue;
    if (!before(o.weight, sum) || !before(o.bias, sum)) continue;
    sum->mark = n;
    *list_add(&g->arena, &pairs) = n;
  }
  graph_clear_marks(g);
  for (size_t i = 0; i < pairs.n; i++) {
    is_norm(pairs.at[i], &o);
    fuse_forward(g, pairs.at[i]->in[0]->node, pairs.at[i], &o);
  }
  for (size_t i = 0; i < backs.n; i++) fuse_backward(g, &backs.at[i]);
  graph_replace_marked(g);
}
