/* Algebra: simpler ways to say the same.
 *
 * The rules are one table, below: the op that a rule is for, the function that tries it, and why
 * the result is the same bit for bit, for every value of every dtype that the function lets
 * through: NaN, infinities, -0, subnormals. (A signalling NaN, which no arithmetic makes, may stay
 * signalling where an op would have made it quiet.) x + 0 is no rule for floats, as -0 + 0 is 0;
 * a sum over one element is none either, as it begins with 0.
 *
 * A function gets a node and answers with a value that takes the place of the node's output, or
 * says that it made the node itself simpler, or that it does not apply. The driver refuses a value
 * whose shape, dtype or device is another, so that functions need not look for broadcasting or
 * promotion; nor may a plain number take a tensor's place. Nodes with cells among their arguments,
 * or with several outputs, are left as they are.
 *
 * It ends: the walk is in order, looks at inputs that are final already, and each rule makes the
 * node's output come from further up, or its op one that no rule makes into another. A view of a
 * view that others use too is left alone where both might need copies.
 *
 * Nor does a rule change the order in memory that a plan would give, since sums take elements in
 * that order, and their last bit depends on it: what takes an output's place is dense and lies as
 * the output would, or has one dim at most, or the output is only written to a capture. A graph
 * with as_strided, which is about memory itself, is left alone. */
#include <math.h>
#include <string.h>

#include "op_args.h"
#include "op_ids.h"
#include "pass.h"

typedef struct Algebra {
  Graph *g;
  int *uses;  /* of a value, by id, when the pass began */
  int *reads; /* those that are no writes to captures */
} Algebra;

/* Answers of rules that are no value. */
static const GraphValue changed_mark;
#define CHANGED ((GraphValue *)(uintptr_t)&changed_mark)

typedef GraphValue *RuleFn(Algebra *a, GraphNode *n);

/* -- What rules ask ---------------------------------------------------------------------------- */

/* The node that makes v, if it is this op and has one output. */
static GraphNode *made_by(const GraphValue *v, int op) {
  return graph_is_op(v->node, op) && v->node->n_out == 1 && !v->node->n_patches ? v->node : NULL;
}

static bool is_view(const GraphNode *n) {
  return n->kind == GRAPH_OP && n->op->spec[0]->flags & OP_VIEW;
}

/* Whether all elements of v are one number, which does not change from call to call. */
static bool is_constant(const GraphValue *v, double *value) {
  for (int hops = 0; hops < 8 && is_view(v->node); hops++) v = v->node->in[0];
  const GraphNode *n = v->node;
  if (n->kind == GRAPH_NUMBER && n->cell == NO_CELL) *value = n->value;
  else if (graph_is_op(n, OP_zeros)) *value = 0;
  else if (graph_is_op(n, OP_ones)) *value = 1;
  else if (graph_is_op(n, OP_full) && !n->n_patches)
    *value = ((const struct full_args *)n->args)->fill_value;
  else return false;
  return true;
}

static bool is_one(const GraphValue *v) {
  double value;
  return is_constant(v, &value) && value == 1;
}

/* A zero which, added to or taken from anything of dtype t, leaves it: floats need a sign. */
static bool is_zero(const GraphValue *v, DType t, bool negative) {
  double value;
  if (!is_constant(v, &value) || value != 0) return false;
  return !dtype_is_float(t) || (dtype_is_float((DType)v->dtype) && signbit(value)) == negative;
}

static bool same_shape(const GraphValue *a, const GraphValue *b) {
  return shape_equal(a->ndim, a->shape, b->ndim, b->shape);
}

static bool is_whole(const GraphValue *v) {
  return dtype_kind((DType)v->dtype) == KIND_INT;
}

/* A new node before n, with an output like n's but for the dtype. */
static GraphNode *make(Algebra *a, GraphNode *n, int op, const void *args, GraphValue *x, DType t) {
  const GraphValue *like = &n->out[0];
  GraphNode *made = graph_add_op(a->g, n, &op_table[op], args, 1, &x, 1);
  made->where = n->where;
  graph_describe(a->g, &made->out[0], t, like->device, like->ndim, like->shape);
  made->out[0].id = like->id; /* it has n's uses */
  return made;
}

/* -- Arithmetic -------------------------------------------------------------------------------- */

static GraphValue *mul_one(Algebra *a, GraphNode *n) {
  (void)a;
  return is_one(n->in[1]) ? n->in[0] : is_one(n->in[0]) ? n->in[1] : NULL;
}

static GraphValue *div_one(Algebra *a, GraphNode *n) {
  (void)a;
  return is_one(n->in[1]) ? n->in[0] : NULL;
}

static GraphValue *add_zero(Algebra *a, GraphNode *n) {
  (void)a;
  DType t = (DType)n->out[0].dtype;
  if (((const struct add_args *)n->args)->alpha != 1) return NULL;
  if (is_zero(n->in[1], t, true)) return n->in[0];
  return is_zero(n->in[0], t, true) ? n->in[1] : NULL;
}

static GraphValue *sub_zero(Algebra *a, GraphNode *n) {
  (void)a;
  if (((const struct sub_args *)n->args)->alpha != 1) return NULL;
  return is_zero(n->in[1], (DType)n->out[0].dtype, false) ? n->in[0] : NULL;
}

/* f(f(x)) = x. */
static GraphValue *twice_is_none(Algebra *a, GraphNode *n) {
  (void)a;
  const GraphNode *inner = made_by(n->in[0], n->op->id);
  return inner && n->out[0].dtype != BOOL ? inner->in[0] : NULL;
}

static GraphValue *not_not(Algebra *a, GraphNode *n) {
  (void)a;
  const GraphNode *inner = made_by(n->in[0], n->op->id);
  return inner ? inner->in[0] : NULL;
}

/* f(f(x)) = f(x). */
static GraphValue *twice_is_once(Algebra *a, GraphNode *n) {
  (void)a;
  return made_by(n->in[0], n->op->id) ? n->in[0] : NULL;
}

static GraphValue *abs_neg(Algebra *a, GraphNode *n) {
  (void)a;
  const GraphNode *inner = made_by(n->in[0], OP_neg);
  if (!inner || !dtype_is_float((DType)n->out[0].dtype)) return NULL;
  n->in[0] = inner->in[0];
  return CHANGED;
}

/* f(x, x) = x. */
static GraphValue *of_same(Algebra *a, GraphNode *n) {
  (void)a;
  return n->in[0] == n->in[1] ? n->in[0] : NULL;
}

static GraphValue *where_same(Algebra *a, GraphNode *n) {
  (void)a;
  return n->in[1] == n->in[2] ? n->in[1] : NULL;
}

/* -- Copies ------------------------------------------------------------------------------------ */

/* Whether t holds every value of `from`. */
static bool holds_all(DType from, DType t) {
  static const int digits[] = {[BOOL] = 1, [U8] = 8,   [I8] = 7,   [I16] = 15, [I32] = 31,
                               [I64] = 63, [F16] = 11, [BF16] = 8, [F32] = 24, [F64] = 53};
  if (from == t || from == BOOL) return true;
  if (t == BOOL || digits[from] > digits[t]) return false;
  if (dtype_is_float(from)) return t == F32 || t == F64;
  return dtype_is_float(t) || from == U8 || t != U8;
}

static GraphValue *cast_same(Algebra *a, GraphNode *n) {
  (void)a;
  return n->in[0]->dtype == n->out[0].dtype ? n->in[0] : NULL;
}

/* Through a dtype that loses nothing. To whole numbers from floats it stays: what does not fit
 * may be cut off in another way. */
static GraphValue *cast_cast(Algebra *a, GraphNode *n) {
  (void)a;
  const GraphNode *inner = made_by(n->in[0], OP_cast);
  if (!inner) return NULL;
  DType from = (DType)inner->in[0]->dtype, over = (DType)n->in[0]->dtype,
        to = (DType)n->out[0].dtype;
  if (!holds_all(from, over) || inner->in[0]->number) return NULL;
  bool whole = !dtype_is_float(from) && !dtype_is_float(over) && !dtype_is_float(to);
  if (from != to && to != BOOL && !dtype_is_float(to) && !whole) return NULL;
  n->in[0] = inner->in[0];
  return CHANGED;
}

static GraphValue *clone_plain(Algebra *a, GraphNode *n) {
  (void)a;
  return ((const struct clone_args *)n->args)->memory_format ? NULL : n->in[0];
}

/* What is written over does not matter. */
static GraphValue *copy_over(Algebra *a, GraphNode *n) {
  GraphValue *src = n->in[1], *y = &n->out[0];
  if (src->number || src->device != y->device) return NULL;
  if (!same_shape(src, y)) {
    struct expand_args e = {.size.n = y->ndim};
    memcpy(e.size.v, y->shape, sizeof *y->shape * (size_t)y->ndim);
    src = &make(a, n, OP_expand, &e, src, (DType)src->dtype)->out[0];
  }
  if (src->dtype == y->dtype) return src;
  struct cast_args c = {.dtype = y->dtype};
  return &make(a, n, OP_cast, &c, src, (DType)y->dtype)->out[0];
}

static GraphValue *join_one(Algebra *a, GraphNode *n) {
  (void)a;
  return n->n_in == 1 ? n->in[0] : NULL;
}

/* -- Views ------------------------------------------------------------------------------------- */

static GraphValue *view_nothing(Algebra *a, GraphNode *n) {
  (void)a;
  return same_shape(n->in[0], &n->out[0]) ? n->in[0] : NULL;
}

/* The node that makes v, if it changes the shape alone and never copies. */
static const GraphNode *reshaping(const GraphValue *v) {
  static const int ops[] = {OP_view, OP_unflatten, OP_squeeze, OP_unsqueeze};
  for (size_t i = 0; i < sizeof ops / sizeof ops[0]; i++)
    if (graph_is_op(v->node, ops[i])) return v->node;
  return NULL;
}

/* x in the shape of n's output: from where it got its shape, when nobody else needs that one. */
static GraphValue *to_reshape(Algebra *a, GraphNode *n, GraphValue *x) {
  const GraphValue *y = &n->out[0];
  const GraphNode *inner = reshaping(x);
  if (inner && same_shape(inner->in[0], y)) return inner->in[0];
  if (inner && a->uses[x->id] == 1) x = inner->in[0];
  struct reshape_args r = {.size.n = y->ndim};
  memcpy(r.size.v, y->shape, sizeof *y->shape * (size_t)y->ndim);
  return &make(a, n, OP_reshape, &r, x, (DType)y->dtype)->out[0];
}

static GraphValue *reshape_reshape(Algebra *a, GraphNode *n) {
  const GraphNode *inner = reshaping(n->in[0]);
  if (!inner) return NULL;
  bool free = same_shape(inner->in[0], &n->out[0]) || a->uses[n->in[0]->id] == 1;
  return free ? to_reshape(a, n, n->in[0]) : NULL;
}

static GraphValue *expand_expand(Algebra *a, GraphNode *n) {
  (void)a;
  const GraphNode *inner = made_by(n->in[0], OP_expand);
  if (!inner) inner = made_by(n->in[0], OP_broadcast_to);
  if (!inner) return NULL;
  n->in[0] = inner->in[0];
  return CHANGED;
}

static Meta *only_meta(Infer *I) {
  I->n_out++;
  return I->last;
}

/* Which dim of its input each dim of n's output is, if n puts dims in another order: seen from the
 * strides that it gives to a tensor of 2 x 2 x ... elements. */
static bool is_permutation(const GraphNode *n, int64_t *dims) {
  static const int ops[] = {OP_t, OP_transpose, OP_permute, OP_movedim};
  bool is = false;
  for (size_t i = 0; i < sizeof ops / sizeof ops[0]; i++) is |= graph_is_op(n, ops[i]);
  if (!is) return false;
  union {
    char bytes[OP_MAX_ARGS];
    double align;
  } args;
  Meta x = {.ndim = n->in[0]->ndim}, y;
  const Meta *in = &x;
  for (int d = 0; d < x.ndim; d++) x.shape[d] = 2;
  shape_contiguous(x.ndim, x.shape, x.stride);
  memcpy(args.bytes, n->args, n->op->args_size);
  Infer I = {.op = n->op, .args = args.bytes, .in = &in, .n_in = 1, .add = only_meta, .last = &y};
  if (n->op->spec[0]->infer(&I)) return false;
  for (int d = 0; d < y.ndim; d++) dims[d] = x.ndim - 1 - __builtin_ctzll((uint64_t)y.stride[d]);
  return true;
}

static GraphValue *permute_permute(Algebra *a, GraphNode *n) {
  int64_t outer[MF_MAX_DIMS], inner[MF_MAX_DIMS];
  const GraphNode *m = n->in[0]->node;
  if (!is_permutation(n, outer)) return NULL;
  bool plain = true;
  for (int d = 0; d < n->out[0].ndim; d++) plain &= outer[d] == d;
  if (plain) return n->in[0];
  if (!is_permutation(m, inner)) return NULL;
  struct permute_args p = {.dims.n = n->out[0].ndim};
  plain = true;
  for (int d = 0; d < n->out[0].ndim; d++) {
    p.dims.v[d] = inner[outer[d]];
    plain &= p.dims.v[d] == d;
  }
  if (plain) return m->in[0];
  return &make(a, n, OP_permute, &p, m->in[0], (DType)n->out[0].dtype)->out[0];
}

/* Whether (size, stride) from the start reach all of x as base_stride lays it out, in order. */
static bool is_whole_base(const GraphValue *x, const IntList *base, const IntList *size,
                          const IntList *stride, int64_t offset) {
  if (offset || !shape_equal(x->ndim, x->shape, (int)size->n, size->v)) return false;
  for (int d = 0; d < x->ndim; d++)
    if (x->shape[d] != 1 && base->v[d] != stride->v[d]) return false;
  return true;
}

static GraphValue *slice_all(Algebra *a, GraphNode *n) {
  (void)a;
  const struct slice_base_args *s = n->args;
  bool all = is_whole_base(n->in[0], &s->base_stride, &s->size, &s->stride, s->offset);
  return all ? n->in[0] : NULL;
}

static GraphValue *scatter_all(Algebra *a, GraphNode *n) {
  (void)a;
  const struct scatter_base_args *s = n->args;
  bool all = is_whole_base(n->in[0], &s->base_stride, &s->src_size, &s->stride, s->offset);
  return all ? n->in[1] : NULL;
}

/* -- Reductions -------------------------------------------------------------------------------- */

/* Over dims of one element each. */
static GraphValue *reduce_one(Algebra *a, GraphNode *n) {
  const GraphValue *x = n->in[0], *y = &n->out[0];
  if (x->dtype != y->dtype || graph_numel(x) != graph_numel(y) || graph_numel(x) == 0) return NULL;
  return same_shape(x, y) ? n->in[0] : to_reshape(a, n, n->in[0]);
}

static GraphValue *reduce_one_whole(Algebra *a, GraphNode *n) {
  return is_whole(n->in[0]) ? reduce_one(a, n) : NULL;
}

/* -- The rules --------------------------------------------------------------------------------- */

/* What is known of the order in memory of what a rule answers with. */
typedef enum Order {
  SAME,  /* a view of the same places */
  FIRST, /* as the op's first input of its output's shape, where that is dense */
  ANY
} Order;

typedef struct Rule {
  int op;
  Order order;
  RuleFn *fn;
  const char *why;
} Rule;

static const Rule rules[] = {
    {OP_mul, FIRST, mul_one, "x * 1 = x, NaN included"},
    {OP_div, FIRST, div_one, "x / 1 = x; whole numbers become floats, which the dtype shows"},
    {OP_add, FIRST, add_zero, "x + 0 = x for whole numbers, x + -0 = x for floats"},
    {OP_sub, FIRST, sub_zero, "x - 0 = x, also where x is -0; x - -0 would not be"},
    {OP_neg, FIRST, twice_is_none,
     "changes the sign bit twice; whole numbers wrap to where they were"},
    {OP_bitwise_not, FIRST, not_not, "changes every bit twice"},
    {OP_logical_not, FIRST, not_not, "of bool, which alone has the dtype of the result"},
    {OP_abs, FIRST, twice_is_once, "an absolute value is its own"},
    {OP_abs, FIRST, abs_neg, "the sign bit is dropped; floats only, as -128 wraps"},
    {OP_relu, FIRST, twice_is_once, "what is not below 0 stays, NaN too"},
    {OP_relu6, FIRST, twice_is_once, "what lies within stays"},
    {OP_sign, FIRST, twice_is_once, "-1, 0 and 1 are their own signs"},
    {OP_floor, FIRST, twice_is_once, "whole already"},
    {OP_ceil, FIRST, twice_is_once, "whole already"},
    {OP_trunc, FIRST, twice_is_once, "whole already"},
    {OP_round, FIRST, twice_is_once, "whole already"},
    {OP_maximum, FIRST, of_same, "one of two equals, or the NaN"},
    {OP_minimum, FIRST, of_same, "one of two equals, or the NaN"},
    {OP_bitwise_and, FIRST, of_same, "x & x = x"},
    {OP_bitwise_or, FIRST, of_same, "x | x = x"},
    {OP_where, FIRST, where_same, "either way the same"},
    {OP_cast, FIRST, cast_same, "no conversion"},
    {OP_cast, FIRST, cast_cast, "what the dtype between holds exactly, it passes on"},
    {OP_clone, FIRST, clone_plain,
     "values are never written, so copies are as good as what they copy"},
    {OP_copy_, ANY, copy_over,
     "converts as cast and broadcasts as expand, whatever it writes over"},
    {OP_cat, ANY, join_one, "of one tensor"},
    {OP_view, SAME, view_nothing, "to the shape that it has"},
    {OP_reshape, SAME, view_nothing, "to the shape that it has"},
    {OP_flatten, SAME, view_nothing, "of one dim"},
    {OP_unflatten, SAME, view_nothing, "into one dim"},
    {OP_squeeze, SAME, view_nothing, "without dims of size 1"},
    {OP_expand, SAME, view_nothing, "to the shape that it has"},
    {OP_broadcast_to, SAME, view_nothing, "to the shape that it has"},
    {OP_narrow, SAME, view_nothing, "of all entries"},
    {OP_slice, SAME, view_nothing, "of all entries: another step would leave some out"},
    {OP_reshape, SAME, reshape_reshape, "the order of elements is the same all along"},
    {OP_flatten, SAME, reshape_reshape, "the order of elements is the same all along"},
    {OP_unflatten, SAME, reshape_reshape, "the order of elements is the same all along"},
    {OP_squeeze, SAME, reshape_reshape, "the order of elements is the same all along"},
    {OP_unsqueeze, SAME, reshape_reshape, "the order of elements is the same all along"},
    {OP_expand, SAME, expand_expand, "to the larger shape at once"},
    {OP_broadcast_to, SAME, expand_expand, "to the larger shape at once"},
    {OP_t, SAME, permute_permute, "two orders of dims are one, or none"},
    {OP_transpose, SAME, permute_permute, "two orders of dims are one, or none"},
    {OP_permute, SAME, permute_permute, "two orders of dims are one, or none"},
    {OP_movedim, SAME, permute_permute, "two orders of dims are one, or none"},
    {OP_slice_base, ANY, slice_all, "the view is the base"},
    {OP_scatter_base, ANY, scatter_all, "the view is the base, all of which is written"},
    {OP_amax, ANY, reduce_one, "the largest of one"},
    {OP_amin, ANY, reduce_one, "the smallest of one"},
    {OP_prod, ANY, reduce_one, "1 * x = x"},
    {OP_sum, ANY, reduce_one_whole, "0 + x = x, for whole numbers"},
};

/* -- The pass ---------------------------------------------------------------------------------- */

static bool fits(const GraphValue *v, const GraphValue *by) {
  return v->dtype == by->dtype && v->device == by->device && !by->number && same_shape(v, by);
}

enum { HOPS = 16 };

/* Whether each place of v's memory is one element, as far as that is easily seen. */
static bool is_dense(const GraphValue *v) {
  int64_t dims[MF_MAX_DIMS];
  for (int hops = 0; hops < HOPS; hops++) {
    const GraphNode *n = v->node;
    if (n->kind != GRAPH_OP)
      return !n->meta || shape_is_dense(v->ndim, n->meta->shape, n->meta->stride);
    int written = v->output - (n->n_out - n->n_written);
    bool reshaped = reshaping(v) || graph_is_op(n, OP_reshape) || graph_is_op(n, OP_flatten);
    if (written >= 0) v = n->in[n->written[written]];
    else if (!is_view(n)) return true;
    else if (reshaped || is_permutation(n, dims)) v = n->in[0];
    else return false;
  }
  return false;
}

static bool is_line(const GraphValue *v) {
  int dims = 0;
  for (int d = 0; d < v->ndim; d++) dims += v->shape[d] > 1;
  return dims <= 1;
}

/* Whether n's output lies as `by` does if that is dense: they begin with the same input. */
static bool begins_with(const GraphNode *n, const GraphValue *by) {
  for (int k = 0; k < n->n_in; k++) {
    if (!n->in[k] || !same_shape(n->in[k], &n->out[0])) continue;
    const GraphNode *m = n->in[k]->node;
    return n->in[k] == by || (m->kind == GRAPH_OP && m->n_in == 1 && m->in[0] == by);
  }
  return false;
}

static bool keeps_order(const Algebra *a, const GraphNode *n, Order order, const GraphValue *by) {
  if (order == SAME || !a->reads[n->out[0].id]) return true;
  return is_dense(by) && (is_line(by) || (order == FIRST && begins_with(n, by)));
}

/* What the rules make of n's output, or NULL. */
static GraphValue *simplify(Algebra *a, GraphNode *n) {
  for (size_t i = 0; i < sizeof rules / sizeof rules[0]; i++) {
    if (!graph_is_op(n, rules[i].op)) continue;
    GraphValue *by = rules[i].fn(a, n);
    if (by == CHANGED) i = (size_t)-1; /* from the first rule on */
    else if (by && fits(&n->out[0], by) && keeps_order(a, n, rules[i].order, by)) return by;
  }
  return NULL;
}

static void forward(GraphNode *n) {
  for (int k = 0; k < n->n_in; k++)
    if (n->in[k] && n->in[k]->mark) n->in[k] = n->in[k]->mark;
}

/* How often each value is used; false where the order in memory has a meaning. */
static bool count_uses(Algebra *a) {
  const Graph *g = a->g;
  a->uses = arena_array(&a->g->arena, int, graph_values(g) + 1);
  a->reads = arena_array(&a->g->arena, int, graph_values(g) + 1);
  for (const GraphNode *n = g->first; n; n = n->next) {
    if (graph_is_op(n, OP_as_strided)) return false;
    for (int k = 0; k < n->n_in; k++) {
      if (!n->in[k]) continue;
      a->uses[n->in[k]->id]++;
      a->reads[n->in[k]->id] += n->kind != GRAPH_WRITE;
    }
  }
  for (size_t i = 0; i < g->results.n; i++) {
    a->uses[g->results.at[i]->id]++;
    a->reads[g->results.at[i]->id]++;
  }
  return true;
}

void pass_algebra(Graph *g, const PassSettings *s) {
  (void)s;
  Algebra a = {.g = g};
  for (GraphNode *n = count_uses(&a) ? g->first : NULL; n; n = n->next) {
    forward(n);
    if (n->kind != GRAPH_OP || n->n_out != 1 || n->n_patches) continue;
    GraphValue *by = simplify(&a, n);
    if (!by) continue;
    n->out[0].mark = by;
    graph_remove(g, n);
  }
  graph_replace_results(g);
}
