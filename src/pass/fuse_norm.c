/* batch_norm, a sum with a tensor of its shape, and relu become one batch_norm_act; relu_backward
 * and batch_norm_backward one batch_norm_act_backward.
 *
 * Why: the normalisation writes y, the sum reads it with the residual and writes it, relu reads and
 * writes it again; each costs the memory's time, and the network has one such chain for each
 * convolution. Together y is written once. Backward passes read only x, the statistics and what the
 * last of the chain gave, so that nothing else needs the values in between. Of the gradient:
 * without a residual the kernel computes again which elements the relu let through, so that neither
 * y is read nor the gate's result written; with one, the gate's result is the residual's gradient
 * too, and the sum that gives the gradient, that of what comes through the block and what goes past
 * it, is taken on the way.
 *
 * It gets any graph. A chain is taken where each value in it has one reader, which is the next of
 * the chain, and dtypes are those that the kernel computes in, so that no rounding is left out and
 * all values stay equal bit for bit; and where nothing between the batch_norm and the chain's end
 * reads the statistics, since the new node stands at the end, where the residual is known. The
 * backward of a chain is taken where its relu_backward reads what the chain gave, and nothing else
 * reads the gradient that comes in. Two walks in order, which only take nodes away: it ends, in
 * linear time but for the way along each chain. */
#include <string.h>

#include "op_args.h"
#include "op_ids.h"
#include "pass.h"
#include "readers.h"

enum { REACH = 256 /* nodes between the first and the last of a chain */ };

static GraphNode *only_reader(const GraphValue *v) {
  return readers_of(v)->n == 1 ? readers_of(v)->at[0] : NULL;
}

static bool same_form(const GraphValue *a, const GraphValue *b) {
  return a->dtype == b->dtype && a->device == b->device && !b->number &&
         shape_equal(a->ndim, a->shape, b->ndim, b->shape);
}

/* The residual when n is v plus another tensor of its form; else NULL. */
static GraphValue *residual_of(const GraphNode *n, const GraphValue *v) {
  if (!n || !graph_is_op(n, OP_add) || n->n_patches || n->in[0] == n->in[1]) return NULL;
  if (((const struct add_args *)n->args)->alpha != 1) return NULL;
  GraphValue *other = n->in[n->in[0] == v];
  return same_form(v, other) && same_form(v, &n->out[0]) ? other : NULL;
}

static bool reads_from(const GraphNode *n, const GraphNode *from) {
  for (int k = 0; k < n->n_in; k++)
    if (n->in[k] && n->in[k]->node == from) return true;
  return false;
}

/* Whether `from` may be computed as late as `to`: nothing before reads from it, and what it reads
 * is there. */
static bool may_move(const GraphNode *from, const GraphNode *to, const GraphNode *through) {
  int left = REACH;
  for (const GraphNode *n = from->next; n != to; n = n->next)
    if (!left-- || (n != through && reads_from(n, from))) return false;
  return true;
}

static void replace(Graph *g, GraphNode *norm, GraphNode *sum, GraphValue *residual,
                    GraphNode *relu) {
  const struct batch_norm_args *a = norm->args;
  struct batch_norm_act_args args = {
      .training = a->training, .momentum = a->momentum, .eps = a->eps, .relu = relu != NULL};
  GraphNode *last = relu ? relu : sum;
  GraphValue *in[6] = {norm->in[0], norm->in[1], norm->in[2], norm->in[3], norm->in[4], residual};
  GraphNode *n = graph_add_op(g, last, &op_table[OP_batch_norm_act], &args, 6, in, norm->n_out);
  n->n_written = norm->n_written;
  n->written = norm->written;
  n->where = norm->where;
  for (int k = 0; k < norm->n_out; k++) {
    const GraphValue *v = k ? &norm->out[k] : &last->out[0];
    graph_describe(g, &n->out[k], (DType)v->dtype, v->device, v->ndim, v->shape);
    norm->out[k].mark = &n->out[k];
  }
  last->out[0].mark = &n->out[0];
  graph_remove(g, norm);
  if (sum) graph_remove(g, sum);
  if (relu) graph_remove(g, relu);
}

/* -- Backward ---------------------------------------------------------------------------------- */

/* What becomes one node, and the node that gave y. */
typedef struct Back {
  GraphNode *norm, *relu, *sum; /* batch_norm_backward, relu_backward, and the add before or NULL */
  const GraphNode *act;
  bool residual; /* others read relu_backward's result */
} Back;

/* Whether norm is the backward of act, of which relu_backward has y. */
static bool is_back_of(const GraphNode *norm, const GraphNode *act) {
  const struct batch_norm_backward_args *b = norm->args;
  const struct batch_norm_act_args *a = act->args;
  return a->relu && a->training == b->training && act->in[0] == norm->in[1] &&
         norm->in[2] == &act->out[1] && norm->in[3] == &act->out[2] && act->in[3] == norm->in[4];
}

/* Whether one node alone reads v, so that it may write there. */
static bool is_own(const GraphValue *v) {
  return v->node->kind == GRAPH_OP && !(v->node->op->spec[0]->flags & OP_VIEW) && only_reader(v);
}

/* The sum that gives v, of two tensors like it, one of which, the first then, only it reads. */
static GraphNode *sum_before(const GraphValue *v) {
  GraphNode *n = v->node;
  if (!graph_is_op(n, OP_add) || n->n_patches || n->n_written || n->in[0] == n->in[1]) return NULL;
  if (((const struct add_args *)n->args)->alpha != 1) return NULL;
  if (!same_form(v, n->in[0]) || !same_form(v, n->in[1])) return NULL;
  int own = is_own(n->in[0]) ? 0 : 1;
  if (!is_own(n->in[own])) return NULL;
  GraphValue *first = n->in[own];
  n->in[1] = n->in[!own];
  n->in[0] = first;
  return n;
}

static bool match_back(GraphNode *norm, Back *b) {
  if (!graph_is_op(norm, OP_batch_norm_backward) || norm->n_patches) return false;
  const GraphValue *gated = norm->in[0];
  GraphNode *relu = gated->node;
  if (!graph_is_op(relu, OP_relu_backward) || relu->n_patches || relu->mark) return false;
  const GraphValue *g = relu->in[0], *y = relu->in[1];
  const GraphNode *act = y->node;
  if (!graph_is_op(act, OP_batch_norm_act) || y != &act->out[0] || !is_back_of(norm, act))
    return false;
  if ((y->dtype != F32 && y->dtype != F64) || !same_form(y, g) || !same_form(y, gated))
    return false;
  bool residual = !only_reader(gated);
  if (!only_reader(g) || (residual && !act->in[5])) return false;
  *b = (Back){.norm = norm, .relu = relu, .act = act, .residual = residual};
  if (residual) b->sum = sum_before(g);
  return true;
}

/* The node stands where relu_backward does if others read its result, else where the norm does. */
static void replace_back(Graph *g, const Back *b) {
  static const int written[] = {0};
  const struct batch_norm_backward_args *a = b->norm->args;
  const GraphNode *act = b->act, *norm = b->norm;
  struct batch_norm_act_backward_args args = {
      .training = a->training, .params = a->params, .residual = b->residual};
  GraphValue *y = act->in[5] ? b->relu->in[1] : NULL;
  GraphValue *in[8] = {b->sum ? b->sum->in[0] : b->relu->in[0],
                       y,
                       norm->in[1],
                       norm->in[2],
                       norm->in[3],
                       norm->in[4],
                       act->in[4],
                       b->sum ? b->sum->in[1] : NULL};
  GraphNode *n = graph_add_op(g, b->residual ? b->relu : b->norm,
                              &op_table[OP_batch_norm_act_backward], &args, 8, in, 4);
  n->n_written = 1;
  n->written = written;
  n->where = norm->where;
  for (int k = 0; k < 4; k++) {
    GraphValue *v = k < 3 ? &b->norm->out[k] : &b->relu->out[0];
    graph_describe(g, &n->out[k], (DType)v->dtype, v->device, v->ndim, v->shape);
    v->mark = &n->out[k];
  }
  graph_remove(g, b->norm);
  graph_remove(g, b->relu);
  if (b->sum) graph_remove(g, b->sum);
}

static void fuse_backward(Graph *g) {
  LIST(Back) found = {0};
  readers_find(g);
  for (GraphNode *n = g->first; n; n = n->next) {
    Back b;
    if (!match_back(n, &b)) continue;
    b.relu->mark = n;
    *list_add(&g->arena, &found) = b;
  }
  graph_clear_marks(g);
  for (size_t i = 0; i < found.n; i++) replace_back(g, &found.at[i]);
  if (found.n) graph_replace_marked(g);
}

/* -- Forward ----------------------------------------------------------------------------------- */

static void fuse_forward(Graph *g) {
  LIST(GraphNode *) chains = {0}; /* norm, sum, relu of each, one behind the other */
  readers_find(g);
  for (GraphNode *n = g->first; n; n = n->next) {
    bool native = graph_is_op(n, OP_batch_norm) && !n->n_patches &&
                  (n->out[0].dtype == F32 || n->out[0].dtype == F64);
    GraphNode *reader = native ? only_reader(&n->out[0]) : NULL;
    if (reader && reader->mark) continue; /* the sum of two, of which the first has it */
    GraphNode *sum = residual_of(reader, &n->out[0]) ? reader : NULL;
    GraphNode *next = sum ? only_reader(&sum->out[0]) : reader;
    GraphNode *relu = next && graph_is_op(next, OP_relu) ? next : NULL;
    if (relu && (relu->out[0].dtype != n->out[0].dtype || !may_move(n, relu, sum))) relu = NULL;
    if (!relu && (!sum || !may_move(n, sum, NULL))) continue;
    (sum ? sum : relu)->mark = n;
    *list_add(&g->arena, &chains) = n;
    *list_add(&g->arena, &chains) = sum;
    *list_add(&g->arena, &chains) = relu;
  }
  graph_clear_marks(g);
  for (size_t i = 0; i < chains.n; i += 3) {
    GraphNode *norm = chains.at[i], *sum = chains.at[i + 1];
    GraphValue *residual = sum ? sum->in[sum->in[0] == &norm->out[0]] : NULL;
    replace(g, norm, sum, residual, chains.at[i + 2]);
  }
  if (!chains.n) return;
  graph_replace_marked(g);
  graph_renumber(g);
}

void pass_fuse_norm(Graph *g, const PassSettings *settings) {
  (void)settings;
  if (g->has[OP_batch_norm]) fuse_forward(g);
  if (g->has[OP_batch_norm_act] && g->has[OP_batch_norm_backward]) fuse_backward(g);
}
