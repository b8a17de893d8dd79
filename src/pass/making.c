#include "making.h"

#include "op_args.h"
#include "op_ids.h"

/* What a BatchNorm gave that nothing is added to, with or without relu: by the statistics that it
 * used. */
static void by_statistics(Graph *g, const GraphNode *n, Making *m) {
  enum { IN = 5 };
  struct batch_norm_again_args *args = arena_new(&g->arena, struct batch_norm_again_args);
  GraphValue **in = arena_array(&g->arena, GraphValue *, IN);
  if (graph_is_op(n, OP_batch_norm_act))
    args->relu = ((const struct batch_norm_act_args *)n->args)->relu;
  in[0] = n->in[0];
  in[1] = &n->out[1];
  in[2] = &n->out[2];
  in[3] = n->in[3];
  in[4] = n->in[4];
  *m = (Making){&op_table[OP_batch_norm_again], args, in, IN};
}

/* The normalisation of a sum, from the sum. */
static void by_sum(Graph *g, const GraphNode *n, Making *m) {
  enum { IN = 3 };
  const struct add_norm_args *a = n->args;
  GraphValue **in = arena_array(&g->arena, GraphValue *, IN);
  in[0] = &n->out[1];
  in[1] = n->in[2];
  in[2] = n->in[3];
  if (a->centre) {
    struct layer_norm_args args = {.normalized_shape = a->normalized_shape, .eps = a->eps};
    *m = (Making){&op_table[OP_layer_norm], arena_copy(&g->arena, &args, sizeof args), in, IN};
  } else {
    struct rms_norm_args args = {
        .normalized_shape = a->normalized_shape, .has_eps = true, .eps = a->eps};
    *m = (Making){&op_table[OP_rms_norm], arena_copy(&g->arena, &args, sizeof args), in, IN - 1};
  }
}

bool making_find(Graph *g, const GraphValue *v, Making *m) {
  const GraphNode *n = v->node;
  if (n->converts) return false;
  bool norm = graph_is_op(n, OP_batch_norm) || (graph_is_op(n, OP_batch_norm_act) && !n->in[5]);
  if (norm && v->output == 0) {
    by_statistics(g, n, m);
    return true;
  }
  if (!graph_is_op(n, OP_add_norm)) return false;
  if (v->output == 0) {
    by_sum(g, n, m);
    return true;
  }
  *m = (Making){&op_table[OP_add], op_table[OP_add].defaults, n->in, 2};
  return true;
}

GraphNode *making_add(Graph *g, GraphNode *at, const GraphValue *v, const Making *m) {
  GraphNode *n = graph_add_op(g, at, m->op, m->args, m->n_in, m->in, 1);
  graph_describe(g, &n->out[0], (DType)v->dtype, v->device, v->ndim, v->shape);
  n->where = v->node->where;
  n->times = v->node->times;
  n->segment = 0;
  return n;
}
