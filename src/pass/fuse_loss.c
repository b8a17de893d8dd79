/* A linear layer, cross_entropy of its results, and the gradients of both become one
 * linear_cross_entropy.
 *
 * Why: a language model's last layer gives a number for each word at each position, many times as
 * much as all else that is alive; the loss reads it, its gradient is as large, and two products
 * read that. The op goes over the positions in chunks, and of each makes the logits, the loss,
 * their gradient in place, and what that adds to the gradients of the layer, which it needs not
 * know the loss for. So no logits are ever there but a chunk's.
 *
 * It gets any graph. A loss is taken where nothing but the four (with a bias five) ops of the
 * pattern reads the logits, their gradient and what the loss keeps for it, where nothing reads the
 * loss before its gradient stands, and where it pays: when the logits are larger than a chunk, and
 * than the gradient of the weights, which is made earlier than it would be. Products are done chunk
 * by chunk, with sums over positions added up, so all results may differ in their last bits. One
 * walk; each loss that is taken leaves the graph: it ends. */
#include "op_args.h"
#include "op_ids.h"
#include "pass.h"
#include "readers.h"

enum { WORTH = 1 << 24 /* bytes of logits */, SHAPES = 4 /* reshapes in a row */ };

/* The ops of one loss. */
typedef struct Loss {
  GraphNode *linear, *loss, *back, *input, *weight, *bias;
} Loss;

static bool only_read_by(const GraphValue *v, const GraphNode *n) {
  return readers_of(v)->n == 1 && readers_of(v)->at[0] == n;
}

static bool is_reshape(const GraphNode *n) {
  return graph_is_op(n, OP_reshape) && !n->n_patches;
}

/* The linear layer whose results, as lines of classes, are the logits v of loss and back. */
static GraphNode *layer_of(const GraphValue *v, const GraphNode *loss, const GraphNode *back) {
  const Readers *r = readers_of(v);
  bool ours =
      r->n == 2 && (r->at[0] == loss || r->at[1] == loss) && (r->at[0] == back || r->at[1] == back);
  if (!ours || v->ndim != 2) return NULL;
  for (int i = 0; i < SHAPES && is_reshape(v->node); i++) {
    if (!only_read_by(v->node->in[0], v->node)) return NULL;
    v = v->node->in[0];
  }
  GraphNode *n = v->node;
  return graph_is_op(n, OP_linear) && v->shape[v->ndim - 1] == n->in[1]->shape[0] ? n : NULL;
}

static bool is_sum_of_lines(const GraphNode *n) {
  return graph_is_op(n, OP_sum_to) && n->out[0].ndim == 1;
}

/* Finds the products that read the gradient of the logits; false when they are not those of the
 * layer. */
static bool find_products(Loss *l) {
  const GraphValue *v = &l->back->out[0], *w = l->linear->in[1], *x = l->linear->in[0];
  for (int i = 0; i < SHAPES && readers_of(v)->n == 1 && readers_of(v)->at[0]; i++) {
    if (!is_reshape(readers_of(v)->at[0])) break;
    v = &readers_of(v)->at[0]->out[0];
  }
  int n = readers_of(v)->n;
  if (n > READERS) return false;
  for (int i = 0; i < n; i++) {
    GraphNode *r = readers_of(v)->at[i];
    if (!r) return false;
    if (graph_is_op(r, OP_matmul) && r->in[0] == v && r->in[1] == w) l->input = r;
    else if (graph_is_op(r, OP_linear_weight) && r->in[0] == v && r->in[1] == x) l->weight = r;
    else if (is_sum_of_lines(r) && r->out[0].shape[0] == w->shape[0]) l->bias = r;
    else return false;
  }
  bool bias = l->linear->in[2] != NULL;
  return l->input && l->weight && n == 2 + bias && bias == (l->bias != NULL);
}

static bool same_options(const GraphNode *loss, const GraphNode *back) {
  const struct cross_entropy_args *a = loss->args;
  const struct cross_entropy_backward_args *b = back->args;
  return a->ignore_index == b->ignore_index && a->reduction == b->reduction &&
         a->label_smoothing == b->label_smoothing && a->reduction != REDUCE_NONE;
}

static bool pays(const GraphNode *linear) {
  const GraphValue *y = &linear->out[0], *w = linear->in[1];
  int64_t size = (int64_t)dtype_size((DType)y->dtype);
  return graph_numel(y) > graph_numel(w) && graph_numel(y) * size > WORTH;
}

/* Whether nothing reads the loss before its gradient is made. */
static bool is_read_late(const GraphNode *loss, const GraphNode *back) {
  const Readers *r = readers_of(&loss->out[0]);
  for (int i = 0; i < r->n && i < READERS; i++)
    if (r->at[i] && r->at[i]->id < back->id) return false;
  return r->n <= READERS;
}

static bool find_loss(Loss *l, GraphNode *n) {
  *l = (Loss){.loss = n};
  if (!graph_is_op(n, OP_cross_entropy) || n->n_patches || n->in[2]) return false;
  const Readers *lse = readers_of(&n->out[1]);
  l->back = lse->n == 1 ? lse->at[0] : NULL;
  if (!l->back || !graph_is_op(l->back, OP_cross_entropy_backward)) return false;
  if (graph_is_cut(n) || graph_is_cut(l->back)) return false;
  GraphValue *const *in = l->back->in;
  bool ours = in[1] == n->in[0] && in[2] == n->in[1] && in[3] == &n->out[1] &&
              in[4] == &n->out[2] && !in[5] && only_read_by(&n->out[2], l->back);
  if (!ours || !same_options(n, l->back) || !is_read_late(n, l->back)) return false;
  l->linear = layer_of(n->in[0], n, l->back);
  if (!l->linear || (l->linear->out[0].dtype != F32 && l->linear->out[0].dtype != F64))
    return false;
  return pays(l->linear) && find_products(l);
}

/* The op before the gradient of the loss; dce takes what it replaces. */
static void fuse(Graph *g, const Loss *l) {
  const struct cross_entropy_args *a = l->loss->args;
  struct linear_cross_entropy_args args = {.ignore_index = a->ignore_index,
                                           .reduction = a->reduction,
                                           .label_smoothing = a->label_smoothing};
  GraphNode *lin = l->linear;
  GraphValue *in[5] = {l->back->in[0], lin->in[0], lin->in[1], lin->in[2], l->loss->in[1]};
  GraphValue *old[4] = {&l->loss->out[0], &l->input->out[0], &l->weight->out[0],
                        l->bias ? &l->bias->out[0] : NULL};
  GraphNode *n = graph_add_op(g, l->back, &op_table[OP_linear_cross_entropy], &args, 5, in, 4);
  n->where = lin->where;
  for (int k = 0; k < 4; k++) {
    const GraphValue *v = old[k];
    if (!v) {
      graph_describe(g, &n->out[k], (DType)lin->out[0].dtype, lin->out[0].device, 1,
                     (int64_t[]){0});
      continue;
    }
    graph_describe(g, &n->out[k], (DType)v->dtype, v->device, v->ndim, v->shape);
    old[k]->mark = &n->out[k];
  }
}

void pass_fuse_loss(Graph *g, const PassSettings *settings) {
  LIST(Loss) losses = {0};
  Loss l;
  (void)settings;
  if (!g->has[OP_cross_entropy]) return;
  readers_find(g);
  for (GraphNode *n = g->first; n; n = n->next)
    if (find_loss(&l, n)) *list_add(&g->arena, &losses) = l;
  graph_clear_marks(g);
  for (size_t i = 0; i < losses.n; i++) fuse(g, &losses.at[i]);
  graph_replace_marked(g);
}
