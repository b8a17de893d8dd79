/* Sums over ranks that come one after the other go round together.
 *
 * Why: each costs a meeting of the ranks, which for a small gradient takes longer than its bytes.
 *
 * Gets the graph of one rank. All-reduces over one group, of one kind and dtype, that nothing else
 * is communicated between, become one op where the last of them stands, up to SIZE bytes, if nobody
 * reads the first ones before. Ranks of a group have the same of these in the same order, of the
 * same sizes, so all make the same buckets. Each element is summed as before: values stay equal bit
 * for bit. One walk. */
#include "op_args.h"
#include "op_comm.h"
#include "op_ids.h"
#include "pass.h"

enum { SIZE = 1 << 22 };

typedef struct Bucket {
  LIST(GraphNode *) nodes;
  int64_t bytes;
} Bucket;

static int64_t bytes_of(const GraphValue *v) {
  return graph_numel(v) * (int64_t)dtype_size((DType)v->dtype);
}

static bool fits(const Bucket *b, const GraphNode *n) {
  const GraphNode *first = b->nodes.at[0];
  const struct all_reduce_args *x = first->args, *y = n->args;
  return x->group == y->group && x->reduce == y->reduce && first->times == n->times &&
         first->out[0].dtype == n->out[0].dtype && b->bytes + bytes_of(&n->out[0]) <= SIZE;
}

/* An output of the open bucket's nodes is its own mark, of those that are closed what replaces it.
 */
static bool is_open(const GraphValue *v) {
  return v && v->mark == v;
}

/* Whether n reads what the bucket's nodes give; that it comes behind them is no reading. */
static bool reads(const GraphNode *n) {
  for (int k = 0; k < n->n_in; k++)
    if (is_open(n->in[k]) && !(graph_is_op(n, OP_all_reduce) && k == 1)) return true;
  return false;
}

static void close(Graph *g, Bucket *b) {
  int n = (int)b->nodes.n;
  if (n == 1) b->nodes.at[0]->out[0].mark = NULL;
  if (n > 1) {
    GraphNode *first = b->nodes.at[0], *last = b->nodes.at[n - 1];
    const struct all_reduce_args *one = first->args;
    struct reduce_bucket_args args = {.n_xs = n, .group = one->group, .reduce = one->reduce};
    GraphValue **in = arena_array(&g->arena, GraphValue *, n + 1);
    in[0] = first->in[1];
    for (int k = 0; k < n; k++) in[k + 1] = b->nodes.at[k]->in[0];
    GraphNode *all = graph_add_op(g, last->next, &op_table[OP_reduce_bucket], &args, n + 1, in, n);
    all->where = last->where;
    all->times = last->times;
    for (int k = 0; k < n; k++) {
      GraphValue *old = &b->nodes.at[k]->out[0];
      graph_describe(g, &all->out[k], (DType)old->dtype, old->device, old->ndim, old->shape);
      all->out[k].cut = old->cut;
      old->mark = &all->out[k];
      graph_remove(g, b->nodes.at[k]);
    }
  }
  b->nodes.n = 0;
  b->bytes = 0;
}

static void forward(GraphNode *n) {
  for (int k = 0; k < n->n_in; k++)
    if (n->in[k] && n->in[k]->mark && !is_open(n->in[k])) n->in[k] = n->in[k]->mark;
}

void pass_buckets(Graph *g, const PassSettings *s) {
  Bucket b = {0};
  (void)s;
  if (!g->has[OP_all_reduce]) return;
  for (GraphNode *n = g->first, *next; n; n = next) {
    next = n->next;
    bool sum = graph_is_op(n, OP_all_reduce), other = n->kind == GRAPH_OP && op_is_comm(n->op);
    if (b.nodes.n && (reads(n) || (sum ? !fits(&b, n) : other))) close(g, &b);
    forward(n);
    if (!sum) continue;
    *list_add(&g->arena, &b.nodes) = n;
    b.bytes += bytes_of(&n->out[0]);
    n->out[0].mark = &n->out[0];
  }
  close(g, &b);
  graph_replace_results(g);
}
