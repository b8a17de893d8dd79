/* Constant folding: what does not depend on inputs, captures or cells is computed now.
 *
 * The graph has no tensors of constants; its constants are values all of whose elements are one
 * number: plain numbers, zeros, ones, full and their kin, and views of these. A pointwise op on
 * such values gives such a value, which its kernel computes here, on one element; any other op
 * without side effects is run as it is where it is small, and counts if all that comes out is one
 * number. The op then becomes a `full` of that number, so that what only led to it is dead.
 *
 * It guarantees the bits: the kernel is the one that the step would run, on operands of as many
 * dims, and an element does not depend on where it stands (pointwise.h); a number that a double
 * does not hold is not folded. Captures are never constants: new contents are seen by each call.
 * Views stay views, as they cost no memory, and in-place writes stay writes. A graph with
 * as_strided is left alone, since there the order in memory has a meaning. One walk, and one run of
 * a kernel on at most SMALL elements a node. */
#include <string.h>

#include "op_args.h"
#include "op_ids.h"
#include "pass.h"

enum { SMALL = 1024 };

/* What all elements of a value are; the mark of the value. */
typedef struct Constant {
  char bits[8];
  GraphValue *now; /* which has taken the value's place, or NULL */
} Constant;

typedef struct Folding {
  Graph *g;
  const PassSettings *s;
  char *space; /* SMALL elements */
  size_t used;
  int strided; /* whether the order in memory has a meaning somewhere; -1: not yet looked at */
} Folding;

static const Constant *constant_of(const GraphValue *v) {
  return v->mark;
}

static void know(Folding *f, GraphValue *v, const void *bits) {
  Constant *c = arena_new(&f->g->arena, Constant);
  memcpy(c->bits, bits, dtype_size((DType)v->dtype));
  v->mark = c;
}

static void know_number(Folding *f, GraphValue *v, double value) {
  char bits[8] = {0};
  dtype_set_f64((DType)v->dtype, bits, value);
  know(f, v, bits);
}

static double number_of(const GraphValue *v) {
  return dtype_get_f64((DType)v->dtype, constant_of(v)->bits);
}

/* -- Ops that are constants by themselves ------------------------------------------------------ */

/* Whether n fills its output with one number. */
static bool is_filling(const GraphNode *n, double *value) {
  switch (n->op->id) {
    case OP_zeros:
    case OP_zeros_like: *value = 0; return true;
    case OP_ones:
    case OP_ones_like: *value = 1; return true;
    case OP_full: *value = ((const struct full_args *)n->args)->fill_value; return true;
    case OP_full_like: *value = ((const struct full_like_args *)n->args)->fill_value; return true;
    case OP_fill_: *value = ((const struct fill__args *)n->args)->value; return true;
  }
  return false;
}

/* -- Running a kernel -------------------------------------------------------------------------- */

static const int64_t one_each[MF_MAX_DIMS] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};

/* Space for n elements of v seen as a view; false: there is no more. */
static bool make_view(Folding *f, const GraphValue *v, bool single, int64_t *stride, View *view) {
  int64_t n = single ? 1 : graph_numel(v);
  size_t bytes = ((size_t)n * dtype_size((DType)v->dtype) + 63) & ~(size_t)63;
  if (n > SMALL || f->used + bytes > SMALL * 8) return false;
  const int64_t *shape = single ? one_each : v->shape;
  shape_contiguous(v->ndim, shape, stride);
  *view = (View){.data = f->space + f->used,
                 .shape = shape,
                 .stride = stride,
                 .ndim = v->ndim,
                 .dtype = v->dtype,
                 .number = v->number};
  f->used += bytes;
  return true;
}

static void fill(const View *view, const char *bits) {
  size_t size = dtype_size((DType)view->dtype);
  int64_t n = view_numel(view);
  for (int64_t i = 0; i < n; i++) memcpy((char *)view->data + (size_t)i * size, bits, size);
}

static bool is_uniform(const View *view) {
  size_t size = dtype_size((DType)view->dtype);
  int64_t n = view_numel(view);
  for (int64_t i = 1; i < n; i++)
    if (memcmp(view->data, (char *)view->data + (size_t)i * size, size)) return false;
  return n > 0;
}

enum { OPERANDS = 8 };

/* Runs n's kernel on constants; whether its outputs are constants, which are then known. */
static bool compute(Folding *f, GraphNode *n) {
  const OpSpec *spec = n->op->spec[f->s->isa];
  bool single = spec->expression != NULL; /* pointwise */
  View views[OPERANDS];
  int64_t strides[OPERANDS][MF_MAX_DIMS];
  if (!spec->cpu || n->n_in + n->n_out > OPERANDS) return false;
  f->used = 0;
  for (int k = 0; k < n->n_in + n->n_out; k++) {
    const GraphValue *v = k < n->n_in ? n->in[k] : &n->out[k - n->n_in];
    if (!v) views[k] = (View){.ndim = -1};
    else if (!make_view(f, v, single, strides[k], &views[k])) return false;
    if (v && k < n->n_in) fill(&views[k], constant_of(v)->bits);
  }
  OpCall call = {.op = n->op,
                 .args = n->args,
                 .in = views,
                 .out = views + n->n_in,
                 .n_in = n->n_in,
                 .n_out = n->n_out,
                 .stream = f->s->stream};
  size_t scratch = spec->scratch ? spec->scratch(&call) : 0;
  if (scratch && !(call.scratch = stream_scratch(call.stream, scratch))) return false;
  if (spec->cpu(&call)) return false; /* the error is the step's to raise, when it runs */
  for (int k = 0; k < n->n_out; k++)
    if (!is_uniform(&views[n->n_in + k])) return false;
  for (int k = 0; k < n->n_out; k++) know(f, &n->out[k], views[n->n_in + k].data);
  return true;
}

/* -- The pass ---------------------------------------------------------------------------------- */

static bool has_generator(const Op *op) {
  for (int i = 0; i < op->n_params; i++)
    if (op->params[i].kind == PARAM_GENERATOR) return true;
  return false;
}

static bool may_compute(const GraphNode *n) {
  if (n->n_written || !n->n_in || n->n_out != 1) return false;
  for (int k = 0; k < n->n_in; k++)
    if (n->in[k] && (!constant_of(n->in[k]) || n->in[k]->device != DEVICE_CPU)) return false;
  if (n->op->spec[0]->flags & (OP_RANDOM | OP_DATA | OP_GATHERS) || has_generator(n->op))
    return false;
  return n->out[0].device == DEVICE_CPU && graph_numel(&n->out[0]) > 0;
}

/* Whether a double, which is what `full` takes, holds the constant. */
static bool fits_double(const GraphValue *v) {
  char bits[8] = {0};
  dtype_set_f64((DType)v->dtype, bits, number_of(v));
  return !memcmp(bits, constant_of(v)->bits, dtype_size((DType)v->dtype));
}

/* Before n, and like its output v. */
static GraphValue *make_full(Folding *f, GraphNode *n, const GraphValue *v) {
  struct full_args a = *(const struct full_args *)op_table[OP_full].defaults;
  a.size.n = v->ndim;
  memcpy(a.size.v, v->shape, sizeof *v->shape * (size_t)v->ndim);
  a.fill_value = number_of(v);
  a.dtype = v->dtype;
  GraphNode *full = graph_add_op(f->g, n, &op_table[OP_full], &a, 0, NULL, 1);
  full->where = n->where;
  full->times = n->times;
  graph_describe(f->g, &full->out[0], (DType)v->dtype, v->device, v->ndim, v->shape);
  return &full->out[0];
}

/* Fills are constants as they stand; a fill that reads a tensor for its shape alone need not. Where
 * it may take over an order of dims in memory it is none. */
static bool fold_filling(Folding *f, GraphNode *n) {
  double value;
  if (!is_filling(n, &value) || (n->n_in && n->out[0].ndim > 1)) return false;
  know_number(f, &n->out[0], value);
  return true;
}

static bool is_strided(Folding *f) {
  if (f->strided >= 0) return f->strided;
  f->strided = 0;
  for (const GraphNode *n = f->g->first; n; n = n->next)
    f->strided |= graph_is_op(n, OP_as_strided);
  return f->strided;
}

/* A `full` would not lie in memory as what is computed from such a view does. */
static bool is_reordering(const GraphNode *n) {
  static const int ops[] = {OP_t, OP_transpose, OP_permute, OP_movedim};
  for (size_t i = 0; i < sizeof ops / sizeof ops[0]; i++)
    if (graph_is_op(n, ops[i])) return true;
  return false;
}

static void fold_node(Folding *f, GraphNode *n) {
  if (n->kind == GRAPH_NUMBER && n->cell == NO_CELL) know_number(f, &n->out[0], n->value);
  if (n->kind != GRAPH_OP || n->n_patches) return;
  if (n->op->spec[0]->flags & OP_VIEW) {
    const Constant *c = is_reordering(n) ? NULL : constant_of(n->in[0]);
    for (int k = 0; k < n->n_out && c; k++) know(f, &n->out[k], c->bits);
    return;
  }
  bool filling = fold_filling(f, n);
  if (!filling && (!may_compute(n) || !compute(f, n))) return;
  GraphValue *v = &n->out[0];
  if (filling && (!n->n_in || n->n_written || v->device != DEVICE_CPU)) return;
  if (!fits_double(v) || is_strided(f)) return;
  ((Constant *)v->mark)->now = make_full(f, n, v);
  ((Constant *)v->mark)->now->mark = v->mark;
  graph_remove(f->g, n);
}

static GraphValue *forward(GraphValue *v) {
  const Constant *c = v ? constant_of(v) : NULL;
  return c && c->now ? c->now : v;
}

void pass_fold(Graph *g, const PassSettings *s) {
  Folding f = {.g = g, .s = s, .strided = -1};
  f.space = arena_alloc(&g->arena, SMALL * 8 + 64);
  f.space += 63 & -(uintptr_t)f.space;
  for (GraphNode *n = g->first; n; n = n->next) {
    for (int k = 0; k < n->n_in; k++) n->in[k] = forward(n->in[k]);
    fold_node(&f, n);
  }
  for (size_t i = 0; i < g->results.n; i++) g->results.at[i] = forward(g->results.at[i]);
}
