/* From the graph of all ranks to that of one: shapes become those of this rank's parts, boxes what
 * this rank does for them, and what it has no part in goes.
 *
 * Gets a graph whose values lie as their ops want, as the pass boxing leaves it. Leaves one of
 * plain local tensors, without layouts, in which ops communicate over groups of ranks. Parts that
 * are not the whole say where they begin, for ops that look at it: so dropout draws what it would
 * draw on one rank, and a mean is that of the whole. A result of which this rank has nothing is
 * empty.
 *
 * A box goes by the steps that boxing_plan gives, as eager conversion does. Ranks meet in what
 * communicates, so all must come to it in one order, however later passes move ops and whatever a
 * rank has of the rest: each such op has the one before as an input, and the first graph, which is
 * the same on all ranks, gives the order. One walk. */
#include <string.h>

#include "boxing.h"
#include "err.h"
#include "op_args.h"
#include "op_comm.h"
#include "pass.h"
#include "sbp_rule.h"

typedef struct Parting {
  Graph *g;
  int rank;
  GraphValue *last[2]; /* what was communicated last, once a step and in each micro-batch */
  GraphValue *nothing; /* an empty result */
} Parting;

/* -- Shapes ------------------------------------------------------------------------------------ */

static int index_in(const Parting *p, const GraphLayout *l) {
  return placement_index(l->placement, p->rank);
}

static bool is_absent(const Parting *p, const GraphValue *v) {
  return v->layout && index_in(p, v->layout) < 0;
}

/* v, which has the shape of the whole, gets that of this rank's part. */
static void take_part(Parting *p, GraphValue *v) {
  int64_t whole[MF_MAX_DIMS], start[MF_MAX_DIMS], length[MF_MAX_DIMS];
  int index = index_in(p, v->layout), ndim = v->ndim;
  memcpy(whole, v->shape, sizeof *whole * (size_t)ndim);
  placement_part(v->layout->placement, &v->layout->sbp, index, ndim, whole, start, length);
  if (shape_equal(ndim, whole, ndim, length)) return;
  graph_describe(p->g, v, (DType)v->dtype, v->device, ndim, length);
  graph_cut(p->g, v, whole, start);
}

static void part_port(Parting *p, GraphNode *n) {
  GraphValue *v = &n->out[0];
  if (!v->layout) return;
  if (is_absent(p, v)) graph_describe(p->g, v, (DType)v->dtype, v->device, 1, (int64_t[]){0});
  else take_part(p, v);
  if (shape_equal(v->ndim, v->shape, n->meta->ndim, n->meta->shape)) return;
  Meta *m = arena_copy(&p->g->arena, n->meta, sizeof *m); /* of a graph from text */
  m->ndim = v->ndim;
  memcpy(m->shape, v->shape, sizeof *m->shape * (size_t)v->ndim);
  shape_contiguous(m->ndim, m->shape, m->stride);
  n->meta = m;
}

static void part_op(Parting *p, GraphNode *n) {
  int n_out = n->n_out - n->n_written;
  bool any = false;
  for (int k = 0; k < n->n_out; k++) any |= n->out[k].layout != NULL;
  if (!any) return;
  if (is_absent(p, &n->out[0])) {
    graph_remove(p->g, n);
    return;
  }
  for (int k = 0; k < n->n_out; k++) take_part(p, &n->out[k]);
  if (!n_out) return;
  Meta m = {.ndim = n->out[0].ndim};
  memcpy(m.shape, n->out[0].shape, sizeof *m.shape * (size_t)m.ndim);
  sbp_localize(n->op, n->args, &m);
}

/* -- Boxes ------------------------------------------------------------------------------------- */

/* One box, on this rank. */
typedef struct Box {
  Parting *p;
  GraphNode *at; /* the box */
  const Placement *placement;
  SbpList now;
  const int64_t *whole;
  int ndim, index;
  DType dtype;
  GraphValue *x; /* what this rank has; NULL: nothing */
} Box;

static GraphValue *emit(Box *b, int op, const void *args, int n_in, GraphValue *const *in, int ndim,
                        const int64_t *shape) {
  GraphNode *n = graph_add_op(b->p->g, b->at, &op_table[op], args, n_in, in, 1);
  n->where = b->at->where;
  n->times = b->at->times;
  n->segment = 0;
  graph_describe(b->p->g, &n->out[0], b->dtype, DEVICE_CPU, ndim, shape);
  return &n->out[0];
}

/* An op that communicates, with what it takes of x; behind the one before. */
static GraphValue *communicate(Box *b, int op, const void *args, GraphValue *x, int ndim,
                               const int64_t *shape) {
  GraphValue **last = &b->p->last[b->at->times > 1];
  return *last = emit(b, op, args, 2, (GraphValue *[]){x, *last}, ndim, shape);
}

static GraphValue *zeros(Box *b, int ndim, const int64_t *shape) {
  struct zeros_args a = *(const struct zeros_args *)op_table[OP_zeros].defaults;
  a.dtype = b->dtype;
  a.size.n = ndim;
  memcpy(a.size.v, shape, sizeof *shape * (size_t)ndim);
  return emit(b, OP_zeros, &a, 0, NULL, ndim, shape);
}

/* The ranks along an axis through this one, as a group of the graph. */
static int group_along(const Box *b, int axis) {
  const Placement *p = b->placement;
  int at[MF_MAX_AXES], step = 1, n = p->size[axis];
  int *ranks = arena_array(&b->p->g->arena, int, n);
  placement_coordinates(p, b->index, at);
  for (int a = axis + 1; a < p->n_axes; a++) step *= p->size[a];
  for (int i = 0; i < n; i++) ranks[i] = p->rank[b->index + (i - at[axis]) * step];
  return graph_group(b->p->g, n, ranks);
}

static void set_size(IntList *size, int ndim, const int64_t *shape) {
  size->n = ndim;
  memcpy(size->v, shape, sizeof *shape * (size_t)ndim);
}

static GraphValue *pad(Box *b, int dim, int64_t before, int64_t after, const int64_t *shape) {
  struct pad_args a = *(const struct pad_args *)op_table[OP_pad].defaults;
  a.pad.n = 2 * (b->ndim - dim);
  memset(a.pad.v, 0, sizeof *a.pad.v * (size_t)a.pad.n);
  a.pad.v[a.pad.n - 2] = before;
  a.pad.v[a.pad.n - 1] = after;
  return emit(b, OP_pad, &a, 1, &b->x, b->ndim, shape);
}

/* A step along one axis, for the tensor `around` that its ranks make up; `shape`: of this rank's
 * part of it afterwards. */
static GraphValue *walk(Box *b, const BoxStep *step, const int64_t *around, const int64_t *shape) {
  int axis = step->axis, at[MF_MAX_AXES], n = b->placement->size[axis];
  Sbp from = b->now.axis[axis], to = step->to.axis[axis];
  int64_t start, length;
  placement_coordinates(b->placement, b->index, at);
  if (n == 1) return b->x;
  int group = group_along(b, axis), reduce = from.kind - SBP_P;
  switch (step->kind) {
    case BOX_SLICE: {
      sbp_part(around[to.dim], n, at[axis], &start, &length);
      struct narrow_args a = {.dim = to.dim, .start = start, .length = length};
      return emit(b, OP_narrow, &a, 1, &b->x, b->ndim, shape);
    }
    case BOX_GATHER: {
      struct all_gather_args a = {.group = group, .dim = from.dim};
      set_size(&a.size, b->ndim, shape);
      return communicate(b, OP_all_gather, &a, b->x, b->ndim, shape);
    }
    case BOX_ALL_TO_ALL: {
      struct all_to_all_args a = {.group = group, .dim = from.dim, .to = to.dim};
      set_size(&a.size, b->ndim, shape);
      return communicate(b, OP_all_to_all, &a, b->x, b->ndim, shape);
    }
    case BOX_REDUCE: {
      struct all_reduce_args a = {.group = group, .reduce = reduce};
      return communicate(b, OP_all_reduce, &a, b->x, b->ndim, shape);
    }
    case BOX_REDUCE_SCATTER: {
      struct reduce_scatter_args a = {.group = group, .dim = to.dim, .reduce = reduce};
      set_size(&a.size, b->ndim, shape);
      return communicate(b, OP_reduce_scatter, &a, b->x, b->ndim, shape);
    }
    case BOX_FIRST: return at[axis] ? zeros(b, b->ndim, shape) : b->x;
    case BOX_PAD:
      sbp_part(around[from.dim], n, at[axis], &start, &length);
      return pad(b, from.dim, start, around[from.dim] - start - length, shape);
    default: return b->x;
  }
}

static void step_along(Box *b, const BoxStep *step) {
  int64_t around[MF_MAX_DIMS], shape[MF_MAX_DIMS], start[MF_MAX_DIMS];
  SbpList whole = b->now;
  whole.axis[step->axis] = (Sbp){SBP_B, 0};
  placement_part(b->placement, &whole, b->index, b->ndim, b->whole, start, around);
  placement_part(b->placement, &step->to, b->index, b->ndim, b->whole, start, shape);
  GraphValue *y = walk(b, step, around, shape);
  if (y != b->x && !shape_equal(b->ndim, b->whole, b->ndim, shape))
    graph_cut(b->p->g, y, b->whole, start);
  b->x = y;
}

/* To another placement: this rank gives what it has, and gets its part, if it has any there. */
static void exchange(Box *b, const GraphLayout *to) {
  int64_t shape[MF_MAX_DIMS] = {0}, start[MF_MAX_DIMS];
  int index = index_in(b->p, to), ndim = index < 0 ? 1 : b->ndim;
  struct exchange_args a = {
      .from = graph_layout_id(b->p->g, graph_layout(b->p->g, b->placement, &b->now)),
      .to = graph_layout_id(b->p->g, to),
      .dtype = b->dtype};
  if (index >= 0) placement_part(to->placement, &to->sbp, index, ndim, b->whole, start, shape);
  set_size(&a.whole, b->ndim, b->whole);
  set_size(&a.size, ndim, shape);
  GraphValue *y = communicate(b, OP_exchange, &a, b->x, ndim, shape);
  if (index >= 0 && !shape_equal(ndim, b->whole, ndim, shape))
    graph_cut(b->p->g, y, b->whole, start);
  b->x = index < 0 ? NULL : y;
}

/* What this rank has of the box's output; NULL: nothing. l: how its input lies. */
static GraphValue *part_box(Parting *p, GraphNode *n, const GraphLayout *l) {
  GraphValue *x = n->in[0], *y = &n->out[0];
  const SbpList whole = {0};
  const GraphLayout *from = l ? l : graph_layout(p->g, y->layout->placement, &whole);
  BoxPlan plan;
  Box b = {.p = p,
           .at = n,
           .placement = from->placement,
           .now = from->sbp,
           .whole = y->shape,
           .ndim = y->ndim,
           .index = index_in(p, from),
           .dtype = (DType)y->dtype};
  if (b.index >= 0) b.x = x;
  if (b.index < 0 && index_in(p, y->layout) < 0) return NULL;
  int rc = boxing_plan(from->placement, &from->sbp, y->layout->placement, &y->layout->sbp, b.ndim,
                       b.whole, dtype_size(b.dtype), &plan);
  if (rc) arena_throw(&p->g->arena, rc);
  for (int i = 0; i < plan.n; i++) {
    if (plan.step[i].kind == BOX_EXCHANGE) exchange(&b, y->layout);
    else if (b.index >= 0) step_along(&b, &plan.step[i]);
    b.now = plan.step[i].to;
  }
  return b.x;
}

static GraphValue *nothing(Parting *p, GraphNode *at, DType dtype) {
  Box b = {.p = p, .at = at, .dtype = dtype};
  return zeros(&b, 1, (int64_t[]){0});
}

/* Of all three kinds; the output's uses become those of what this rank has. */
static void part_any_box(Parting *p, GraphNode *n, const GraphLayout *l) {
  GraphValue *y = &n->out[0], *x = n->in[0];
  if (n->op->id == OP_box) y->mark = part_box(p, n, l);
  else if (n->op->id == OP_box_parts) y->mark = is_absent(p, y) ? NULL : x;
  else y->mark = l && index_in(p, l) < 0 ? nothing(p, n, (DType)y->dtype) : x;
  graph_remove(p->g, n);
}

/* -- The whole --------------------------------------------------------------------------------- */

static void note_results(Graph *g) {
  for (size_t i = 0; i < g->results.n; i++) {
    const GraphValue *v = g->results.at[i];
    Meta *m = list_add(&g->arena, &g->wholes);
    *m = (Meta){.ndim = v->ndim, .dtype = v->dtype, .device = v->device};
    memcpy(m->shape, v->shape, sizeof *m->shape * (size_t)v->ndim);
    shape_contiguous(m->ndim, m->shape, m->stride);
  }
}

static GraphNode *first_write(const Graph *g) {
  GraphNode *n = g->last;
  while (n && n->kind == GRAPH_WRITE) n = n->prev;
  return n ? n->next : g->first;
}

static void part_results(Parting *p) {
  Graph *g = p->g;
  for (size_t i = 0; i < g->results.n; i++) {
    GraphValue *v = g->results.at[i];
    if (v->mark) g->results.at[i] = v->mark;
    else if (is_absent(p, v)) {
      GraphNode *end = graph_insert(g, first_write(g), GRAPH_OP, 0, 0);
      end->times = 1;
      g->results.at[i] = nothing(p, end, (DType)v->dtype);
      graph_remove(g, end);
    }
  }
}

static void part_node(Parting *p, GraphNode *n) {
  const GraphLayout *l = n->n_in && n->in[0] ? n->in[0]->layout : NULL;
  for (int k = 0; k < n->n_in; k++)
    if (n->in[k] && n->in[k]->mark) n->in[k] = n->in[k]->mark;
  switch ((GraphKind)n->kind) {
    case GRAPH_INPUT:
    case GRAPH_CAPTURE: part_port(p, n); break;
    case GRAPH_OP:
      if (op_is_box(n->op)) part_any_box(p, n, l);
      else part_op(p, n);
      break;
    case GRAPH_WRITE:
      if (is_absent(p, &n->target->out[0])) graph_remove(p->g, n);
      break;
    case GRAPH_NUMBER: break;
  }
}

void pass_part(Graph *g, const PassSettings *s) {
  Parting p = {.g = g, .rank = s->rank};
  if (!g->placements.n) return;
  note_results(g);
  for (GraphNode *n = g->first, *next; n; n = next) {
    next = n->next;
    part_node(&p, n);
  }
  part_results(&p);
  for (GraphNode *n = g->first; n; n = n->next) {
    n->want = NULL;
    graph_keep_cuts(g, n);
    for (int k = 0; k < n->n_out; k++) n->out[k].layout = NULL;
  }
}
