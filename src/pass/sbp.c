/* How every value lies on the ranks: one signature for each op.
 *
 * Gets a graph of whole tensors in which ports say how they lie, and so do the outputs of `box`,
 * which is the user's to_global, and of factories. Leaves every value that is on ranks with a
 * layout, and each op with how its inputs are to lie (`want`); inputs that lie otherwise are the
 * matter of the pass boxing. A value without a layout is each rank's own; among the inputs of an op
 * on ranks it is taken to be whole, and equal on all of them, as constants are that other passes
 * made.
 *
 * One walk in the order of the nodes: when an op comes, its inputs have layouts, and the signature
 * is the one to which it costs least to bring them (op/sbp_choice.h), that of an eager call. Graphs
 * without layouts are left as they are.
 *
 * What becomes whole in each micro-batch, only to be averaged over them, is averaged in parts and
 * becomes whole once: gradients go round once a step. Values change by the order of sums alone. */
#include <string.h>

#include "err.h"
#include "op_comm.h"
#include "pass.h"
#include "sbp_choice.h"

typedef struct Choosing {
  Graph *g;
  int cap;
  Meta *metas;
  const Meta **asks;
  SbpList *have, *want;
} Choosing;

static void make_room(Choosing *c, int n) {
  if (n <= c->cap) return;
  c->cap = 2 * n + 16;
  c->metas = arena_array(&c->g->arena, Meta, c->cap);
  c->asks = arena_array(&c->g->arena, const Meta *, c->cap);
  c->have = arena_array(&c->g->arena, SbpList, c->cap);
  c->want = arena_array(&c->g->arena, SbpList, c->cap);
}

static const Meta *meta_of(const GraphValue *v, Meta *m) {
  if (!v) return NULL;
  *m = (Meta){.ndim = v->ndim, .dtype = v->dtype, .device = v->device, .number = v->number};
  memcpy(m->shape, v->shape, sizeof *m->shape * (size_t)v->ndim);
  shape_contiguous(m->ndim, m->shape, m->stride);
  return m;
}

/* Where the op works: where its inputs are. */
static const Placement *find_placement(const Choosing *c, const GraphNode *n) {
  const Placement *p = NULL;
  for (int k = 0; k < n->n_in; k++) {
    const GraphLayout *l = n->in[k] ? n->in[k]->layout : NULL;
    if (l && p && l->placement != p)
      arena_throw(&c->g->arena,
                  err_set(MF_EINVAL,
                          "%s%s%s: inputs are on different placements; convert one by "
                          ":to_global(placement, sbp)",
                          n->where ? n->where : "", n->where ? ": " : "", n->op->name));
    if (l) p = l->placement;
  }
  return p;
}

/* Ops that read only the form of their inputs take partial values for whole ones. */
static SbpList have_of(const GraphNode *n, int k) {
  SbpList list = {0};
  const GraphValue *v = n->in[k];
  if (!v || !v->layout) return list;
  list = v->layout->sbp;
  for (int a = 0; a < MF_MAX_AXES && n->op->spec[0]->flags & OP_FORM; a++)
    if (sbp_is_partial(list.axis[a])) list.axis[a] = (Sbp){SBP_B, 0};
  return list;
}

static void choose(Choosing *c, GraphNode *n, const Placement *p) {
  int n_out = n->n_out - n->n_written, all = n->n_in + n_out;
  make_room(c, all);
  for (int k = 0; k < all; k++) {
    const GraphValue *v = k < n->n_in ? n->in[k] : &n->out[k - n->n_in];
    c->asks[k] = meta_of(v, &c->metas[k]);
    if (k < n->n_in) c->have[k] = have_of(n, k);
  }
  SbpChoice choice = {.op = n->op,
                      .args = n->args,
                      .in = c->asks,
                      .out = c->asks + n->n_in,
                      .n_in = n->n_in,
                      .n_out = n_out,
                      .placement = p,
                      .have = c->have,
                      .want = c->want};
  int rc = sbp_choose(&choice);
  if (rc) arena_throw(&c->g->arena, rc);
  n->want = arena_copy(&c->g->arena, c->want, sizeof *c->want * (size_t)n->n_in);
  for (int k = 0; k < n->n_out; k++) {
    int from = k < n_out ? n->n_in + k : n->written[k - n_out];
    n->out[k].layout = graph_layout(c->g, p, &c->want[from]);
  }
}

/* -- Gradients of micro-batches ---------------------------------------------------------------- */

static bool is_sum(const GraphLayout *l) {
  bool sum = false;
  for (int a = 0; l && a < l->placement->n_axes; a++) sum |= l->sbp.axis[a].kind == SBP_P;
  return sum;
}

/* n averages what a box made of a sum over ranks: it averages the summands, and another box makes
 * the same of that. */
static void average_first(Choosing *c, GraphNode *n) {
  const GraphNode *b = n->in[0] ? n->in[0]->node : NULL;
  bool linear = n->op->spec[0]->flags & OP_GATHERS && n->op->spec[0]->linear;
  if (!linear || !b || b->kind != GRAPH_OP || !op_is_box(b->op) || !b->out[0].layout) return;
  if (!is_sum(b->in[0]->layout) || b->in[0]->layout->placement != b->out[0].layout->placement)
    return;
  n->in[0] = b->in[0];
  GraphValue *v = &n->out[0];
  GraphNode *box = graph_add_op(c->g, n->next, b->op, b->args, 1, &v, 1);
  box->times = n->times;
  box->where = b->where;
  box->segment = 0;
  graph_describe(c->g, &box->out[0], (DType)v->dtype, v->device, v->ndim, v->shape);
  box->out[0].layout = b->out[0].layout;
  v->mark = &box->out[0];
  box->mark = box; /* it is to read v */
}

static void forward(GraphNode *n) {
  for (int k = 0; k < n->n_in && !n->mark; k++)
    if (n->in[k] && n->in[k]->mark) n->in[k] = n->in[k]->mark;
}

void pass_sbp(Graph *g, const PassSettings *s) {
  (void)s;
  Choosing c = {.g = g};
  if (!g->placements.n) return;
  for (GraphNode *n = g->first; n; n = n->next) {
    forward(n);
    if (n->kind != GRAPH_OP || op_is_box(n->op)) continue;
    average_first(&c, n);
    const Placement *p = find_placement(&c, n);
    if (p) choose(&c, n, p);
  }
  graph_replace_results(g);
}
