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

/* How many read each value; results count twice. */
static int *count_readers(Graph *g) {
  int *counts = arena_array(&g->arena, int, graph_values(g) + 1);
  for (GraphNode *n = g->first; n; n = n->next)
    for (int k = 0; k < n->n_in; k++)
      if (n->in[k]) counts[n->in[k]->id]++;
  for (size_t i = 0; i < g->results.n; i++) counts[g->results.at[i]->id] += 2;
  return counts;
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
static bool fuse(Graph *g, const int *readers, GraphNode *act) {
  GraphValue *v = act->in[0], *y = &act->out[0];
  GraphNode *n = v->node, *both = NULL;
  if (readers[v->id] != 1 || v->dtype != y->dtype) return false;
  if (v->dtype != F32 && v->dtype != BF16) return false;
  if (graph_is_op(n, OP_conv2d)) both = conv(g, n, act);
  else if (graph_is_op(n, OP_linear)) both = linear(g, n, act);
  if (!both) return false;
  both->where = n->where;
  graph_describe(g, &both->out[0], (DType)y->dtype, y->device, y->ndim, y->shape);
  both->out[0].id = y->id;
  y->mark = &both->out[0];
  graph_remove(g, n);
  graph_remove(g, act);
  return true;
}

void pass_fuse_act(Graph *g, const PassSettings *settings) {
  bool acts = g->has[OP_relu] || g->has[OP_gelu], any = false;
  (void)settings;
  if (!acts || !(g->has[OP_conv2d] || g->has[OP_linear])) return;
  const int *readers = count_readers(g);
  for (GraphNode *n = g->first; n; n = n->next) {
    if (!(graph_is_op(n, OP_relu) || graph_is_op(n, OP_gelu)) || n->n_patches || n->n_out != 1)
      continue;
    any |= fuse(g, readers, n);
  }
  if (any) graph_replace_marked(g);
}
