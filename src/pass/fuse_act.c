/* conv2d and relu become one conv2d_act; linear and relu or gelu one linear_act.
 *
 * Why: oneDNN applies an activation to what it has just computed while that is in registers; by
 * itself it costs a read and a write of the whole result, and a task of the threads.
 *
 * It gets any graph. A pair is taken where nothing else reads what the product gives: so in
 * training only where the gradient needs no more than the activation's result, as relu's does,
 * while gelu's needs its input; in evaluation always. float64, which has no such kernels, is left
 * alone. One walk in order, which only takes nodes away: it ends, in linear time.
 *
 * What it may change: gelu is computed by oneDNN's polynomials, 16-bit floats are not rounded
 * between the product and the activation, and oneDNN may have another kernel for the pair. */
#include "op_args.h"
#include "op_ids.h"
#include "pass.h"

/* How many read each value is its mark; results count twice. */
static void count_readers(Graph *g) {
  int64_t n_values = graph_values(g), at = 0;
  int *counts = arena_array(&g->arena, int, n_values + 1);
  for (GraphNode *n = g->first; n; n = n->next)
    for (int k = 0; k < n->n_out; k++) n->out[k].mark = &counts[at++];
  for (GraphNode *n = g->first; n; n = n->next)
    for (int k = 0; k < n->n_in; k++)
      if (n->in[k]) ++*(int *)n->in[k]->mark;
  for (size_t i = 0; i < g->results.n; i++) *(int *)g->results.at[i]->mark += 2;
}

static GraphNode *conv(Graph *g, GraphNode *n, const GraphNode *act) {
  const struct conv2d_args *a = n->args;
  if (!graph_is_op(act, OP_relu)) return NULL;
  struct conv2d_act_args args = {.stride = {a->stride[0], a->stride[1]},
                                 .padding = {a->padding[0], a->padding[1]},
                                 .dilation = {a->dilation[0], a->dilation[1]},
                                 .groups = a->groups};
  return graph_add_op(g, n, &op_table[OP_conv2d_act], &args, n->n_in, n->in, 1);
}

static GraphNode *linear(Graph *g, GraphNode *n, const GraphNode *act) {
  enum { RELU, GELU, GELU_TANH };
  struct linear_act_args args = {.act = RELU};
  if (graph_is_op(act, OP_gelu))
    args.act = ((const struct gelu_args *)act->args)->approximate ? GELU_TANH : GELU;
  else if (!graph_is_op(act, OP_relu)) return NULL;
  return graph_add_op(g, n, &op_table[OP_linear_act], &args, n->n_in, n->in, 1);
}

/* act is what reads v, alone. */
static void fuse(Graph *g, GraphNode *act) {
  GraphValue *v = act->in[0], *y = &act->out[0];
  GraphNode *n = v->node, *both = NULL;
  if (*(int *)v->mark != 1 || v->dtype != y->dtype) return;
  if (v->dtype != F32 && v->dtype != BF16) return;
  if (graph_is_op(n, OP_conv2d)) both = conv(g, n, act);
  else if (graph_is_op(n, OP_linear)) both = linear(g, n, act);
  if (!both) return;
  both->where = n->where;
  graph_describe(g, &both->out[0], (DType)y->dtype, y->device, y->ndim, y->shape);
  both->out[0].mark = y->mark;
  act->mark = both;
  graph_remove(g, n);
}

void pass_fuse_act(Graph *g, const PassSettings *settings) {
  LIST(GraphNode *) taken = {0};
  (void)settings;
  count_readers(g);
  for (GraphNode *n = g->first; n; n = n->next) {
    if (!(graph_is_op(n, OP_relu) || graph_is_op(n, OP_gelu)) || n->n_patches || n->n_out != 1)
      continue;
    fuse(g, n);
    if (n->mark) *list_add(&g->arena, &taken) = n;
  }
  for (size_t i = 0; i < taken.n; i++) {
    GraphNode *n = taken.at[i], *both = n->mark;
    graph_remove(g, n);
    taken.at[i]->mark = both;
  }
  for (GraphNode *n = g->first; n; n = n->next)
    for (int k = 0; k < n->n_out; k++) n->out[k].mark = NULL;
  for (size_t i = 0; i < taken.n; i++)
    taken.at[i]->out[0].mark = &((GraphNode *)taken.at[i]->mark)->out[0];
  graph_replace_marked(g);
  graph_clear_marks(g);
}
