/* Conversions: where an input lies otherwise than its op wants, a `box` stands between them.
 *
 * Gets a graph in which every value on ranks has a layout and every op says how its inputs are to
 * lie, as the pass sbp leaves it. Guarantees that inputs lie so, but for those of ops that read
 * only the form, which take sums for whole values, and values of each rank's own that are to be
 * whole.
 *
 * A box from a layout to the same is none and goes; one of a box that nobody else reads starts from
 * where that one did; one of a sum stands right behind the summands, so that gradients are under
 * way while others are made. What is converted for one op serves later ones that want the same,
 * with what the user converted among them. One walk; each input is looked at once. */
#include "op_args.h"
#include "op_comm.h"
#include "pass.h"

/* A value in other layouts, as a list; the mark of the value. */
typedef struct Boxed {
  struct Boxed *next;
  GraphValue *value;
} Boxed;

static bool is_box(const GraphNode *n) {
  return graph_is_op(n, OP_box);
}

/* -- What the user asked for ------------------------------------------------------------------- */

static int *count_readers(Graph *g) {
  graph_renumber(g);
  int *count = arena_array(&g->arena, int, graph_values(g) + 1);
  for (GraphNode *n = g->first; n; n = n->next)
    for (int k = 0; k < n->n_in; k++)
      if (n->in[k]) count[n->in[k]->id]++;
  for (size_t i = 0; i < g->results.n; i++) count[g->results.at[i]->id]++;
  return count;
}

static void simplify(Graph *g) {
  const int *readers = count_readers(g);
  for (GraphNode *n = g->first; n; n = n->next) {
    for (int k = 0; k < n->n_in; k++)
      if (n->in[k] && n->in[k]->mark) n->in[k] = n->in[k]->mark;
    if (!is_box(n)) continue;
    GraphNode *before = n->in[0]->node;
    if (is_box(before) && readers[n->in[0]->id] == 1 && before->times == n->times)
      n->in[0] = before->in[0];
    if (n->in[0]->layout == n->out[0].layout) n->out[0].mark = n->in[0];
  }
  graph_replace_results(g);
  for (GraphNode *n = g->first, *next; n; n = next) {
    next = n->next;
    if (is_box(n) && n->out[0].mark) graph_remove(g, n);
  }
  graph_clear_marks(g);
  for (GraphNode *n = g->first, *next; n; n = next) {
    next = n->next;
    const GraphLayout *l = is_box(n) ? n->in[0]->layout : NULL;
    bool sum = l && sbp_list_is_partial(&l->sbp, MF_MAX_AXES);
    if (sum && n->in[0]->node->kind == GRAPH_OP && n->prev != n->in[0]->node)
      graph_move(g, n, n->in[0]->node->next);
  }
}

/* -- What ops want ----------------------------------------------------------------------------- */

static void know(Graph *g, GraphValue *of, GraphValue *value) {
  Boxed *b = arena_new(&g->arena, Boxed);
  *b = (Boxed){of->mark, value};
  of->mark = b;
}

/* Where to start from for the one reader of v: where a box that gives v to nobody else did, which
 * goes. */
static GraphValue *source_of(Graph *g, const int *readers, GraphValue *v) {
  GraphNode *n = v->node;
  if (!is_box(n) || v->id < 0 || readers[v->id] != 1 || !n->in[0]->layout) return v;
  if (n->in[0]->layout->placement != v->layout->placement) return v;
  graph_remove(g, n);
  v->layout = NULL; /* nobody finds it */
  return n->in[0];
}

static GraphValue *boxed(Graph *g, GraphNode *at, GraphValue *v, const GraphLayout *l) {
  if (v->layout == l) return v;
  for (Boxed *b = v->mark; b; b = b->next)
    if (b->value->layout == l) return b->value;
  const Op *op = &op_table[OP_box];
  GraphNode *n = graph_add_op(g, at, op, op->defaults, 1, &v, 1);
  n->where = at->where;
  n->segment = 0;
  graph_describe(g, &n->out[0], (DType)v->dtype, v->device, v->ndim, v->shape);
  n->out[0].layout = l;
  n->out[0].id = -1; /* it is new */
  know(g, v, &n->out[0]);
  return &n->out[0];
}

static bool takes_sums(const GraphNode *n, const GraphValue *v) {
  return n->op->spec[0]->flags & OP_FORM && v->layout &&
         sbp_list_is_partial(&v->layout->sbp, MF_MAX_AXES);
}

static void convert(Graph *g, const int *readers, GraphNode *n) {
  const Placement *p = graph_placement(n);
  for (int k = 0; n->want && k < n->n_in; k++) {
    GraphValue *v = n->in[k];
    if (!v || v->number || takes_sums(n, v)) continue;
    const SbpList own = {0}, *have = v->layout ? &v->layout->sbp : &own;
    if (!sbp_list_equal(have, &n->want[k]))
      n->in[k] = boxed(g, n, source_of(g, readers, v), graph_layout(g, p, &n->want[k]));
  }
  if (is_box(n) && n->in[0]->layout) know(g, n->in[0], &n->out[0]);
}

/* Captures keep their layouts. */
static void convert_write(Graph *g, GraphNode *n) {
  const GraphLayout *l = n->target->out[0].layout;
  GraphNode *at = n;
  while (at->prev && at->prev->kind == GRAPH_WRITE) at = at->prev;
  if (l && n->in[0]->layout != l) n->in[0] = boxed(g, at, n->in[0], l);
}

void pass_boxing(Graph *g, const PassSettings *s) {
  (void)s;
  if (!g->placements.n) return;
  simplify(g);
  const int *readers = count_readers(g);
  for (GraphNode *n = g->first; n; n = n->next) {
    if (n->kind == GRAPH_OP) convert(g, readers, n);
    if (n->kind == GRAPH_WRITE) convert_write(g, n);
  }
}
