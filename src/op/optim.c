/* Optimisers as multi-tensor ops: one op updates all tensors of a group in one pass over memory,
 * cut into equal parts over the threads without regard to where a tensor begins. Formulas are
 * PyTorch's. Parameters, gradients and states of one index have one shape; a gradient that is not
 * of its parameter's dtype or order in memory is copied into scratch first. float16 and bfloat16
 * are computed in float32. `factor`, where given, is multiplied to the gradients on the way, as
 * clipping by their common norm would have done before. `skip`, where given, holds two float64:
 * when the first is not 0 the step leaves all as it is, and the second says how many steps did so
 * before, which do not count. So a scaler of losses decides without anybody having to look. The
 * *_rows_ forms update only the rows named by ids, state included, once each with the sum of their
 * gradients: rows that were not looked up are left alone. */
#include <math.h>

#include "copy_views.h"
#include "op_args.h"
#include "sbp_rule.h"
#include "thread.h"

enum { STATES = 3, GRAIN = 1 << 14 };

/* One run of elements; s[k] is NULL where the optimiser has no such state. */
typedef void Update(int64_t n, void *p, const void *g, void *const *s, const void *coefficients);

typedef struct Rule {
  Update *f32, *f64;
  const void *coefficients;
} Rule;

typedef struct Fleet {
  Rule rule;
  int n, n_states;
  double factor; /* of the gradients */
  const View *param, *grad, *state[STATES];
  const void **grad_data; /* the gradient's elements in the parameter's layout */
  int64_t *start;         /* n + 1: where each tensor begins in the run of all elements */
} Fleet;

/* -- Steps that are left out ------------------------------------------------------------------- */

static const View *skip_of(const OpCall *c) {
  const View *skip = &c->in[c->n_in - 1]; /* behind all others */
  return view_absent(skip) ? NULL : skip;
}

static double skip_item(const View *skip, int64_t i) {
  const char *at = (const char *)skip->data + i * skip->stride[0] * (int64_t)sizeof(double);
  return dtype_get_f64(F64, at);
}

static bool is_left_out(const OpCall *c) {
  const View *skip = skip_of(c);
  return skip && skip_item(skip, 0) != 0;
}

/* The steps that count, of `step`. */
static int64_t counted(const OpCall *c, int64_t step) {
  const View *skip = skip_of(c);
  return skip ? step - (int64_t)skip_item(skip, 1) : step;
}

/* -- Driver ------------------------------------------------------------------------------------ */

static size_t grad_copy_bytes(const View *p, const View *g) {
  bool same =
      g->dtype == p->dtype && !memcmp(g->stride, p->stride, sizeof(int64_t) * (size_t)p->ndim);
  return same ? 0 : scratch_aligned((size_t)view_numel(p) * dtype_size((DType)p->dtype));
}

/* Scratch for n pairs of parameters (from in[0]) and gradients (behind them): starts, pointers,
 * copies. */
static size_t fleet_scratch(const OpCall *c, int64_t n) {
  size_t bytes = scratch_aligned((size_t)(n + 1) * (sizeof(int64_t) + sizeof(void *)));
  for (int64_t i = 0; i < n; i++) bytes += grad_copy_bytes(&c->in[i], &c->in[n + i]);
  return bytes;
}

/* float16 and bfloat16: through blocks of float. */
static void update_converted(const Fleet *f, int i, int64_t from, int64_t n, const uint16_t *grad) {
  BlockBuffer p, g, s[STATES];
  void *states[STATES] = {NULL};
  DType t = (DType)f->param[i].dtype;
  for (int64_t at = 0; at < n; at += BLOCK) {
    int64_t m = n - at < BLOCK ? n - at : BLOCK;
    uint16_t *data = (uint16_t *)f->param[i].data + from + at;
    block_loads[PW_F32][t](m, data, 1, &p);
    block_loads[PW_F32][t](m, grad + at, 1, &g);
    if (f->factor != 1) { /* rounded as it would be in memory */
      uint16_t rounded[BLOCK];
      for (int64_t k = 0; k < m; k++) g.f32[k] *= (float)f->factor;
      block_stores[PW_F32][t](m, &g, 1, rounded);
      block_loads[PW_F32][t](m, rounded, 1, &g);
    }
    for (int k = 0; k < f->n_states; k++) {
      states[k] = &s[k];
      block_loads[PW_F32][t](m, (uint16_t *)f->state[k][i].data + from + at, 1, &s[k]);
    }
    f->rule.f32(m, &p, &g, states, f->rule.coefficients);
    block_stores[PW_F32][t](m, &p, 1, data);
    for (int k = 0; k < f->n_states; k++)
      block_stores[PW_F32][t](m, &s[k], 1, (uint16_t *)f->state[k][i].data + from + at);
  }
}

/* The rule with a gradient that is multiplied first, rounded as it would be in memory. */
#define UPDATE_SCALED(name, T, rule_field)                                             \
  static void name(const Fleet *f, int64_t n, T *p, const T *g, void *const *states) { \
    T scaled[BLOCK], by = (T)f->factor;                                                \
    for (int64_t at = 0; at < n; at += BLOCK) {                                        \
      int64_t m = n - at < BLOCK ? n - at : BLOCK;                                     \
      void *s[STATES] = {NULL};                                                        \
      for (int k = 0; k < f->n_states; k++) s[k] = (T *)states[k] + at;                \
      for (int64_t i = 0; i < m; i++) scaled[i] = g[at + i] * by;                      \
      f->rule.rule_field(m, p + at, scaled, s, f->rule.coefficients);                  \
    }                                                                                  \
  }
UPDATE_SCALED(update_scaled_f32, float, f32)
UPDATE_SCALED(update_scaled_f64, double, f64)

/* Elements [from, from + n) of tensor i; grad points at the first one's gradient. */
static void update_run(const Fleet *f, int i, int64_t from, int64_t n, const void *grad) {
  DType t = (DType)f->param[i].dtype;
  if (t != F32 && t != F64) {
    update_converted(f, i, from, n, grad);
    return;
  }
  int64_t offset = from * (int64_t)dtype_size(t);
  void *states[STATES] = {NULL};
  for (int k = 0; k < f->n_states; k++) states[k] = (char *)f->state[k][i].data + offset;
  char *p = (char *)f->param[i].data + offset;
  if (f->factor != 1) {
    if (t == F32) update_scaled_f32(f, n, (float *)(void *)p, grad, states);
    else update_scaled_f64(f, n, (double *)(void *)p, grad, states);
    return;
  }
  (t == F32 ? f->rule.f32 : f->rule.f64)(n, p, grad, states, f->rule.coefficients);
}

static void fleet_range(int64_t begin, int64_t end, void *arg) {
  const Fleet *f = arg;
  int low = 0, high = f->n;
  while (high - low > 1) { /* the tensor that holds `begin` */
    int mid = (low + high) / 2;
    if (f->start[mid] <= begin) low = mid;
    else high = mid;
  }
  for (int i = low; begin < end; i++) {
    int64_t stop = f->start[i + 1] < end ? f->start[i + 1] : end;
    if (stop <= begin) continue;
    int64_t from = begin - f->start[i], size = (int64_t)dtype_size((DType)f->param[i].dtype);
    update_run(f, i, from, stop - begin, (const char *)f->grad_data[i] + from * size);
    begin = stop;
  }
}

/* Inputs: n parameters, n gradients, then n of each state; the factor of the gradients, and skip.
 */
static int fleet_run(const OpCall *c, int64_t n, int n_states, Rule rule) {
  const View *factor = &c->in[c->n_in - 2];
  Fleet f = {.rule = rule, .n = (int)n, .n_states = n_states, .param = c->in, .grad = c->in + n};
  if (is_left_out(c)) return 0;
  f.factor = view_absent(factor) ? 1 : dtype_get_f64((DType)factor->dtype, factor->data);
  for (int k = 0; k < n_states; k++) f.state[k] = c->in + n * (2 + k);
  char *at = c->scratch;
  f.start = (int64_t *)(void *)at;
  f.grad_data = (const void **)(void *)(f.start + n + 1);
  at += scratch_aligned((size_t)(n + 1) * (sizeof(int64_t) + sizeof(void *)));
  f.start[0] = 0;
  for (int64_t i = 0; i < n; i++) {
    size_t bytes = grad_copy_bytes(&f.param[i], &f.grad[i]);
    f.grad_data[i] = f.grad[i].data;
    if (bytes) {
      View copy = f.param[i];
      copy.data = at;
      copy_views(&f.grad[i], &copy);
      f.grad_data[i] = at;
      at += bytes;
    }
    f.start[i + 1] = f.start[i] + view_numel(&f.param[i]);
  }
  if (n) mf_parallel(f.start[n], GRAIN, fleet_range, &f);
  return 0;
}

/* The rule over n tensors alone, from in[first]. */
static size_t list_scratch(int64_t n) {
  return (size_t)(n + 1) * (sizeof(int64_t) + sizeof(void *));
}

static int list_run(const OpCall *c, int first, int64_t n, Rule rule) {
  Fleet f = {.rule = rule, .n = (int)n, .factor = 1, .param = c->in + first};
  f.start = c->scratch;
  f.grad_data = (const void **)(void *)(f.start + n + 1);
  f.start[0] = 0;
  for (int64_t i = 0; i < n; i++) {
    f.grad_data[i] = f.param[i].data; /* not read */
    f.start[i + 1] = f.start[i] + view_numel(&f.param[i]);
  }
  if (n) mf_parallel(f.start[n], GRAIN, fleet_range, &f);
  return 0;
}

/* -- Rows -------------------------------------------------------------------------------------- */

/* One looked-up row: which, and its place among the gradient's rows. */
typedef struct Lookup {
  int64_t id, place;
} Lookup;

typedef struct RowsJob {
  Fleet fleet;          /* of the one parameter */
  const Lookup *sorted; /* by id; equal ids by place, so that sums have one order */
  int64_t n, width;     /* lookups; elements of a row */
  const char *values;   /* (n, width) */
} RowsJob;

enum { DIGIT = 11 };

/* Sorts by id, which is below `rows`: a stable radix sort that moves between a and b; the result's
 * place. */
static Lookup *lookups_sort(int64_t n, int64_t rows, Lookup *a, Lookup *b) {
  for (int shift = 0; rows >> shift; shift += DIGIT) {
    int64_t start[(1 << DIGIT) + 1] = {0}, mask = (1 << DIGIT) - 1;
    for (int64_t i = 0; i < n; i++) start[(a[i].id >> shift & mask) + 1]++;
    for (int64_t d = 0; d < mask; d++) start[d + 1] += start[d];
    for (int64_t i = 0; i < n; i++) b[start[a[i].id >> shift & mask]++] = a[i];
    Lookup *other = a;
    a = b;
    b = other;
  }
  return a;
}

/* Columns [from, from + n) of one row: the gradients of lookups [first, last) summed, n <= BLOCK.
 * The sum is in `sum`; the result points at it, or into the values where there is nothing to sum.
 */
static const void *row_gradient(const RowsJob *j, int64_t first, int64_t last, int64_t from,
                                int64_t n, BlockBuffer *sum) {
  DType t = (DType)j->fleet.param[0].dtype;
  int64_t size = (int64_t)dtype_size(t);
  const char *row = j->values + (j->sorted[first].place * j->width + from) * size;
  if (last - first == 1) return row;
  PointwiseClass cls = block_class(t);
  BlockBuffer one;
  block_loads[cls][t](n, row, 1, sum);
  for (int64_t k = first + 1; k < last; k++) {
    block_loads[cls][t](n, j->values + (j->sorted[k].place * j->width + from) * size, 1, &one);
    if (cls == PW_F32)
      for (int64_t i = 0; i < n; i++) sum->f32[i] += one.f32[i];
    else
      for (int64_t i = 0; i < n; i++) sum->f64[i] += one.f64[i];
  }
  if (!block_is_native(t, cls)) {
    one = *sum;
    block_stores[cls][t](n, &one, 1, sum);
  }
  return sum;
}

/* The rows whose first lookup is in [begin, end). */
static void rows_range(int64_t begin, int64_t end, void *arg) {
  const RowsJob *j = arg;
  while (begin > 0 && begin < end && j->sorted[begin].id == j->sorted[begin - 1].id) begin++;
  while (begin < end) {
    int64_t id = j->sorted[begin].id, last = begin + 1;
    while (last < j->n && j->sorted[last].id == id) last++;
    for (int64_t from = 0; from < j->width; from += BLOCK) {
      int64_t n = j->width - from < BLOCK ? j->width - from : BLOCK;
      BlockBuffer sum;
      const void *grad = row_gradient(j, begin, last, from, n, &sum);
      update_run(&j->fleet, 0, id * j->width + from, n, grad);
    }
    begin = last;
  }
}

static size_t rows_scratch(const OpCall *c) {
  return (size_t)c->in[1].shape[0] * 2 * sizeof(Lookup);
}

/* Inputs: parameter, ids [n] int64, values [n, ...], then the states, and skip. Rows named several
 * times are updated once, with the sum. */
static int rows_run(const OpCall *c, int n_states, Rule rule) {
  const View *p = &c->in[0];
  const int64_t *ids = c->in[1].data;
  RowsJob j = {.fleet = {.rule = rule, .n = 1, .n_states = n_states, .factor = 1, .param = p},
               .n = c->in[1].shape[0],
               .values = c->in[2].data};
  int64_t rows = p->shape[0];
  Lookup *lookups = c->scratch;
  for (int64_t i = 0; i < j.n; i++) {
    if (ids[i] < 0 || ids[i] >= rows)
      return err_set(MF_EINVAL, "%s: ids[%lld] is %lld; the parameter has %lld rows", c->op->name,
                     (long long)i, (long long)ids[i], (long long)rows);
    lookups[i] = (Lookup){ids[i], i};
  }
  if (j.n == 0 || is_left_out(c)) return 0;
  j.width = view_numel(p) / rows;
  j.sorted = lookups_sort(j.n, rows, lookups, lookups + j.n);
  for (int k = 0; k < n_states; k++) j.fleet.state[k] = &c->in[3 + k];
  mf_parallel(j.n, 1 + GRAIN / (j.width + 1), rows_range, &j);
  return 0;
}

/* -- Checks ------------------------------------------------------------------------------------ */

static bool same_layout(const Meta *a, const Meta *b) {
  size_t n = sizeof(int64_t) * (size_t)a->ndim;
  return a->ndim == b->ndim && a->dtype == b->dtype && !memcmp(a->shape, b->shape, n) &&
         !memcmp(a->stride, b->stride, n);
}

/* Of the last input. */
static int skip_check(Infer *I) {
  const Meta *skip = I->in[I->n_in - 1];
  if (skip && (skip->dtype != F64 || skip->ndim != 1 || skip->shape[0] != 2))
    return infer_error(I, "skip must be 2 numbers of float64");
  return 0;
}

/* Lists of one length; parameter i, its gradient and its states have one shape. Behind the lists
 * stand a number, the factor of the gradients, and skip. */
static int fleet_infer(Infer *I) {
  int n = 0, first, factor = I->n_in - 2, rc = skip_check(I);
  char name[64], want[SHAPE_TEXT_MAX], have[SHAPE_TEXT_MAX];
  op_inputs_of_param(I->op, I->args, 0, &first, &n);
  if (I->in[factor] && !rc) rc = infer_want_float(I, factor);
  if (I->in[factor] && !rc) rc = infer_want_ndim(I, factor, 0);
  if (rc) return rc;
  for (int p = 1; p < I->op->n_tensors - 2; p++) {
    int count;
    op_inputs_of_param(I->op, I->args, p, &first, &count);
    const Param *list = &I->op->params[p]; /* lists come first */
    if (count != n && !(count == 0 && list->optional))
      return infer_error(I, "%d params, but %s has %d entries", n, list->name, count);
    for (int i = 0; i < count; i++) {
      const Meta *a = I->in[i], *b = I->in[first + i];
      if (a->ndim != b->ndim || memcmp(a->shape, b->shape, sizeof(int64_t) * (size_t)a->ndim))
        return infer_error(
            I, "%s has shape %s, its parameter %s", infer_name(I, first + i, name, sizeof name),
            shape_text(b->ndim, b->shape, have), shape_text(a->ndim, a->shape, want));
      if (p > 1 && !same_layout(a, b))
        return infer_error(I, "%s must lie in memory as its parameter does",
                           infer_name(I, first + i, name, sizeof name));
    }
  }
  for (int i = 0; i < n; i++) {
    if ((rc = infer_want_float(I, i))) return rc;
    if (!shape_is_dense(I->in[i]->ndim, I->in[i]->shape, I->in[i]->stride))
      return infer_error(I, "%s must be dense in memory", infer_name(I, i, name, sizeof name));
  }
  return 0;
}

static int rows_infer(Infer *I) {
  const Meta *p = I->in[0], *ids = I->in[1], *values = I->in[2];
  int rc = infer_want_float(I, 0);
  if (!rc) rc = infer_want_dtype(I, 1, I64);
  if (!rc) rc = infer_want_ndim(I, 1, 1);
  if (!rc) rc = infer_want_same_dtype(I, 0, 2);
  if (!rc) rc = skip_check(I);
  if (rc) return rc;
  bool fit = values->ndim == p->ndim && p->ndim > 0 && values->shape[0] == ids->shape[0] &&
             !memcmp(values->shape + 1, p->shape + 1, sizeof(int64_t) * (size_t)(p->ndim - 1));
  if (!fit) return infer_error(I, "values must have one row of the parameter for each id");
  if (!meta_is_contiguous(p) || !meta_is_contiguous(ids) || !meta_is_contiguous(values))
    return infer_error(I, "all tensors must be contiguous");
  for (int k = 3; k < I->n_in - 1; k++) {
    char name[64];
    if (I->in[k] && !same_layout(p, I->in[k]))
      return infer_error(I,
                         "%s must have the dtype and shape of param, and lie in memory as it does",
                         infer_name(I, k, name, sizeof name));
  }
  return 0;
}

/* -- SGD --------------------------------------------------------------------------------------- */

typedef struct SgdRule {
  double lr, momentum, dampening, weight_decay, sign;
  bool nesterov, first;
} SgdRule;

#define SGD(name, T)                                                                               \
  static void name(int64_t n, void *p_, const void *g_, void *const *s, const void *c) {           \
    const SgdRule *o = c;                                                                          \
    const T lr = (T)o->lr, m = (T)o->momentum, d = (T)(1 - o->dampening), wd = (T)o->weight_decay, \
            sign = (T)o->sign;                                                                     \
    T *restrict p = p_, *restrict buf = s[0];                                                      \
    const T *restrict g = g_;                                                                      \
    if (!buf)                                                                                      \
      for (int64_t i = 0; i < n; i++) p[i] -= lr * (sign * g[i] + wd * p[i]);                      \
    else if (o->first)                                                                             \
      for (int64_t i = 0; i < n; i++) {                                                            \
        T x = sign * g[i] + wd * p[i];                                                             \
        buf[i] = x;                                                                                \
        p[i] -= lr * (o->nesterov ? x + m * x : x);                                                \
      }                                                                                            \
    else                                                                                           \
      for (int64_t i = 0; i < n; i++) {                                                            \
        T x = sign * g[i] + wd * p[i], b = m * buf[i] + d * x;                                     \
        buf[i] = b;                                                                                \
        p[i] -= lr * (o->nesterov ? x + m * b : b);                                                \
      }                                                                                            \
  }
SGD(sgd_f32, float)
SGD(sgd_f64, double)

static size_t sgd_scratch(const OpCall *c) {
  return fleet_scratch(c, ((const struct sgd__args *)c->args)->n_params);
}

static int sgd_cpu(const OpCall *c) {
  const struct sgd__args *a = c->args;
  bool first = counted(c, a->since) <= 0;
  double sign = a->maximize ? -1 : 1;
  SgdRule o = {a->lr, a->momentum, a->dampening, a->weight_decay, sign, a->nesterov, first};
  return fleet_run(c, a->n_params, a->n_bufs ? 1 : 0, (Rule){sgd_f32, sgd_f64, &o});
}

/* The first n tensors of a call are split along the same dim. */
static int split_together(SbpAsk *q, int n) {
  for (int d = 0; d < MF_MAX_DIMS; d++) {
    Sbp *row = sbp_add(q);
    if (!row) return MF_ENOMEM;
    for (int k = 0; k < n; k++) row[k] = sbp_split(d);
  }
  return 0;
}

static int together_sbp(SbpAsk *q) {
  return split_together(q, q->n_in);
}

/* All but factor and skip. */
static int fleet_sbp(SbpAsk *q) {
  return split_together(q, q->n_in - 2);
}

/* Stochastic gradient descent, with momentum where bufs are given; `since`: how many steps there
 * were since they were made, of which the first, 0, sets them. */
OP(sgd_,
   .signature =
       "sgd_(Tensor[]! params, Tensor[] grads, Tensor[]!? bufs, Tensor? factor=None, Tensor? "
       "skip=None, *, float lr, float momentum=0, float dampening=0, float weight_decay=0, bool "
       "nesterov=False, bool maximize=False, int since=1) -> ()",
   .flags = OP_HIDDEN, .sbp_rule = fleet_sbp, .infer = fleet_infer, .cpu = sgd_cpu,
   .scratch = sgd_scratch)

static int sgd_rows_cpu(const OpCall *c) {
  const struct sgd_rows__args *a = c->args;
  bool first = counted(c, a->since) <= 0;
  double sign = a->maximize ? -1 : 1;
  SgdRule o = {a->lr, a->momentum, a->dampening, a->weight_decay, sign, a->nesterov, first};
  return rows_run(c, view_absent(&c->in[3]) ? 0 : 1, (Rule){sgd_f32, sgd_f64, &o});
}

/* The same for the rows `ids` of one parameter. */
OP(sgd_rows_,
   .signature =
       "sgd_rows_(Tensor! param, Tensor ids, Tensor values, Tensor!? buf, Tensor? skip=None, *, "
       "float lr, float momentum=0, float dampening=0, float weight_decay=0, bool "
       "nesterov=False, bool maximize=False, int since=1) -> ()",
   .flags = OP_HIDDEN, .sbp = "V e, N, N e, V e, K", .infer = rows_infer, .cpu = sgd_rows_cpu,
   .scratch = rows_scratch)

/* -- Adam -------------------------------------------------------------------------------------- */

typedef struct AdamRule {
  double step_size, beta1, beta2, root2, eps, decay, weight_decay,
      sign; /* root2: sqrt of the second bias correction; decay: 1 - lr * wd */
} AdamRule;

#define ADAM(name, T, root)                                                                    \
  static void name(int64_t n, void *p_, const void *g_, void *const *s, const void *c) {       \
    const AdamRule *o = c;                                                                     \
    const T step = (T)o->step_size, b1 = (T)(1 - o->beta1), b2 = (T)o->beta2,                  \
            c2 = (T)(1 - o->beta2), r = (T)(1 / o->root2);                                     \
    const T eps = (T)o->eps, decay = (T)o->decay, wd = (T)o->weight_decay, sign = (T)o->sign;  \
    T *restrict p = p_, *restrict m = s[0], *restrict v = s[1], *restrict top = s[2];          \
    const T *restrict g = g_;                                                                  \
    if (!top)                                                                                  \
      for (int64_t i = 0; i < n; i++) {                                                        \
        T w = p[i] * decay, x = sign * g[i] + wd * w;                                          \
        T a = m[i] + b1 * (x - m[i]), b = b2 * v[i] + c2 * x * x;                              \
        m[i] = a, v[i] = b;                                                                    \
        p[i] = w - step * a / (root(b) * r + eps);                                             \
      }                                                                                        \
    else                                                                                       \
      for (int64_t i = 0; i < n; i++) {                                                        \
        T w = p[i] * decay, x = sign * g[i] + wd * w;                                          \
        T a = m[i] + b1 * (x - m[i]), b = b2 * v[i] + c2 * x * x, t = top[i] > b ? top[i] : b; \
        m[i] = a, v[i] = b, top[i] = t;                                                        \
        p[i] = w - step * a / (root(t) * r + eps);                                             \
      }                                                                                        \
  }
ADAM(adam_f32, float, sqrtf)
ADAM(adam_f64, double, sqrt)

static AdamRule adam_rule(double lr, double beta1, double beta2, double eps, double weight_decay,
                          int64_t step, bool decoupled, bool maximize) {
  return (AdamRule){.step_size = lr / (1 - pow(beta1, (double)step)),
                    .beta1 = beta1,
                    .beta2 = beta2,
                    .root2 = sqrt(1 - pow(beta2, (double)step)),
                    .eps = eps,
                    .decay = decoupled ? 1 - lr * weight_decay : 1,
                    .weight_decay = decoupled ? 0 : weight_decay,
                    .sign = maximize ? -1 : 1};
}

static size_t adam_scratch(const OpCall *c) {
  return fleet_scratch(c, ((const struct adam__args *)c->args)->n_params);
}

static int adam_cpu(const OpCall *c) {
  const struct adam__args *a = c->args;
  AdamRule o = adam_rule(a->lr, a->beta1, a->beta2, a->eps, a->weight_decay, counted(c, a->step),
                         a->decoupled, a->maximize);
  return fleet_run(c, a->n_params, a->n_max_exp_avg_sqs ? 3 : 2, (Rule){adam_f32, adam_f64, &o});
}

/* Adam (Kingma and Ba, 2014); decoupled: AdamW (Loshchilov and Hutter, 2017); the last list for
 * amsgrad. `step` counts from 1. */
OP(adam_,
   .signature =
       "adam_(Tensor[]! params, Tensor[] grads, Tensor[]! exp_avgs, Tensor[]! exp_avg_sqs, "
       "Tensor[]!? max_exp_avg_sqs, Tensor? factor=None, Tensor? skip=None, *, float lr, float "
       "beta1, float beta2, float eps, float weight_decay, int step, bool decoupled=False, bool "
       "maximize=False) -> ()",
   .flags = OP_HIDDEN, .sbp_rule = fleet_sbp, .infer = fleet_infer, .cpu = adam_cpu,
   .scratch = adam_scratch)

static int adam_rows_cpu(const OpCall *c) {
  const struct adam_rows__args *a = c->args;
  AdamRule o = adam_rule(a->lr, a->beta1, a->beta2, a->eps, a->weight_decay, counted(c, a->step),
                         a->decoupled, a->maximize);
  return rows_run(c, 2, (Rule){adam_f32, adam_f64, &o});
}

/* Adam for the rows `ids` of one parameter, as torch.optim.SparseAdam. */
OP(adam_rows_,
   .signature =
       "adam_rows_(Tensor! param, Tensor ids, Tensor values, Tensor! exp_avg, Tensor! "
       "exp_avg_sq, Tensor? skip=None, *, float lr, float beta1, float beta2, float eps, float "
       "weight_decay, int step, bool decoupled=False, bool maximize=False) -> ()",
   .flags = OP_HIDDEN, .sbp = "V e, N, N e, V e, V e, K", .infer = rows_infer, .cpu = adam_rows_cpu,
   .scratch = rows_scratch)

/* -- Adagrad ----------------------------------------------------------------------------------- */

typedef struct AdagradRule {
  double lr, weight_decay, eps, sign;
} AdagradRule;

#define ADAGRAD(name, T, root)                                                           \
  static void name(int64_t n, void *p_, const void *g_, void *const *s, const void *c) { \
    const AdagradRule *o = c;                                                            \
    const T lr = (T)o->lr, wd = (T)o->weight_decay, eps = (T)o->eps, sign = (T)o->sign;  \
    T *restrict p = p_, *restrict sum = s[0];                                            \
    const T *restrict g = g_;                                                            \
    for (int64_t i = 0; i < n; i++) {                                                    \
      T x = sign * g[i] + wd * p[i];                                                     \
      sum[i] += x * x;                                                                   \
      p[i] -= lr * x / (root(sum[i]) + eps);                                             \
    }                                                                                    \
  }
ADAGRAD(adagrad_f32, float, sqrtf)
ADAGRAD(adagrad_f64, double, sqrt)

static size_t adagrad_scratch(const OpCall *c) {
  return fleet_scratch(c, ((const struct adagrad__args *)c->args)->n_params);
}

static int adagrad_cpu(const OpCall *c) {
  const struct adagrad__args *a = c->args;
  AdagradRule o = {a->lr / (1 + ((double)counted(c, a->step) - 1) * a->lr_decay), a->weight_decay,
                   a->eps, a->maximize ? -1 : 1};
  return fleet_run(c, a->n_params, 1, (Rule){adagrad_f32, adagrad_f64, &o});
}

/* Adagrad (Duchi and others, 2011). */
OP(adagrad_,
   .signature =
       "adagrad_(Tensor[]! params, Tensor[] grads, Tensor[]! sums, Tensor? factor=None, Tensor? "
       "skip=None, *, float lr, float lr_decay=0, float weight_decay=0, float eps=1e-10, int "
       "step, bool maximize=False) -> ()",
   .flags = OP_HIDDEN, .sbp_rule = fleet_sbp, .infer = fleet_infer, .cpu = adagrad_cpu,
   .scratch = adagrad_scratch)

static int adagrad_rows_cpu(const OpCall *c) {
  const struct adagrad_rows__args *a = c->args;
  AdagradRule o = {a->lr / (1 + ((double)counted(c, a->step) - 1) * a->lr_decay), 0, a->eps,
                   a->maximize ? -1 : 1};
  return rows_run(c, 1, (Rule){adagrad_f32, adagrad_f64, &o});
}

/* Adagrad for the rows `ids` of one parameter. */
OP(adagrad_rows_,
   .signature =
       "adagrad_rows_(Tensor! param, Tensor ids, Tensor values, Tensor! sum, Tensor? skip=None, "
       "*, float lr, float lr_decay=0, float eps=1e-10, int step, bool maximize=False) -> ()",
   .flags = OP_HIDDEN, .sbp = "V e, N, N e, V e, K", .infer = rows_infer, .cpu = adagrad_rows_cpu,
   .scratch = rows_scratch)

/* -- RMSprop ----------------------------------------------------------------------------------- */

typedef struct RmspropRule {
  double lr, alpha, eps, weight_decay, momentum, sign;
  bool centered;
} RmspropRule;

/* States: square average; then, where used, gradient average and momentum buffer, whose places
 * follow. */
#define RMSPROP(name, T, root)                                                           \
  static void name(int64_t n, void *p_, const void *g_, void *const *s, const void *c) { \
    const RmspropRule *o = c;                                                            \
    const T lr = (T)o->lr, al = (T)o->alpha, be = (T)(1 - o->alpha), eps = (T)o->eps,    \
            wd = (T)o->weight_decay;                                                     \
    const T mom = (T)o->momentum, sign = (T)o->sign;                                     \
    T *restrict p = p_, *restrict sq = s[0], *restrict avg = o->centered ? s[1] : NULL;  \
    T *restrict buf = o->momentum > 0 ? s[o->centered ? 2 : 1] : NULL;                   \
    const T *restrict g = g_;                                                            \
    for (int64_t i = 0; i < n; i++) {                                                    \
      T x = sign * g[i] + wd * p[i], v = sq[i] = al * sq[i] + be * x * x;                \
      if (avg) {                                                                         \
        avg[i] += be * (x - avg[i]);                                                     \
        v -= avg[i] * avg[i];                                                            \
      }                                                                                  \
      x /= root(v) + eps;                                                                \
      if (buf) x = buf[i] = mom * buf[i] + x;                                            \
      p[i] -= lr * x;                                                                    \
    }                                                                                    \
  }
RMSPROP(rmsprop_f32, float, sqrtf)
RMSPROP(rmsprop_f64, double, sqrt)

static size_t rmsprop_scratch(const OpCall *c) {
  return fleet_scratch(c, ((const struct rmsprop__args *)c->args)->n_params);
}

static int rmsprop_cpu(const OpCall *c) {
  const struct rmsprop__args *a = c->args;
  RmspropRule o = {a->lr,
                   a->alpha,
                   a->eps,
                   a->weight_decay,
                   a->n_bufs ? a->momentum : 0,
                   a->maximize ? -1 : 1,
                   a->n_grad_avgs > 0};
  return fleet_run(c, a->n_params, 1 + (a->n_grad_avgs > 0) + (a->n_bufs > 0),
                   (Rule){rmsprop_f32, rmsprop_f64, &o});
}

/* RMSprop (Hinton, 2012); centered where grad_avgs, with momentum where bufs are given. */
OP(rmsprop_,
   .signature =
       "rmsprop_(Tensor[]! params, Tensor[] grads, Tensor[]! square_avgs, Tensor[]!? grad_avgs, "
       "Tensor[]!? bufs, Tensor? factor=None, Tensor? skip=None, *, float lr, float alpha=0.99, "
       "float eps=1e-8, float weight_decay=0, float momentum=0, bool maximize=False) -> ()",
   .flags = OP_HIDDEN, .sbp_rule = fleet_sbp, .infer = fleet_infer, .cpu = rmsprop_cpu,
   .scratch = rmsprop_scratch)

/* -- Adadelta, Adamax -------------------------------------------------------------------------- */

typedef struct AdadeltaRule {
  double lr, rho, eps, weight_decay, sign;
} AdadeltaRule;

#define ADADELTA(name, T, root)                                                          \
  static void name(int64_t n, void *p_, const void *g_, void *const *s, const void *c) { \
    const AdadeltaRule *o = c;                                                           \
    const T lr = (T)o->lr, rho = (T)o->rho, co = (T)(1 - o->rho), eps = (T)o->eps,       \
            wd = (T)o->weight_decay, sign = (T)o->sign;                                  \
    T *restrict p = p_, *restrict sq = s[0], *restrict acc = s[1];                       \
    const T *restrict g = g_;                                                            \
    for (int64_t i = 0; i < n; i++) {                                                    \
      T x = sign * g[i] + wd * p[i], v = sq[i] = rho * sq[i] + co * x * x;               \
      T delta = root(acc[i] + eps) / root(v + eps) * x;                                  \
      acc[i] = rho * acc[i] + co * delta * delta;                                        \
      p[i] -= lr * delta;                                                                \
    }                                                                                    \
  }
ADADELTA(adadelta_f32, float, sqrtf)
ADADELTA(adadelta_f64, double, sqrt)

static size_t adadelta_scratch(const OpCall *c) {
  return fleet_scratch(c, ((const struct adadelta__args *)c->args)->n_params);
}

static int adadelta_cpu(const OpCall *c) {
  const struct adadelta__args *a = c->args;
  AdadeltaRule o = {a->lr, a->rho, a->eps, a->weight_decay, a->maximize ? -1 : 1};
  return fleet_run(c, a->n_params, 2, (Rule){adadelta_f32, adadelta_f64, &o});
}

/* Adadelta (Zeiler, 2012). */
OP(adadelta_,
   .signature =
       "adadelta_(Tensor[]! params, Tensor[] grads, Tensor[]! square_avgs, Tensor[]! acc_deltas, "
       "Tensor? factor=None, Tensor? skip=None, *, float lr=1, float rho=0.9, float eps=1e-6, "
       "float weight_decay=0, bool maximize=False) -> ()",
   .flags = OP_HIDDEN, .sbp_rule = fleet_sbp, .infer = fleet_infer, .cpu = adadelta_cpu,
   .scratch = adadelta_scratch)

typedef struct AdamaxRule {
  double step_size, beta1, beta2, eps, weight_decay, sign;
} AdamaxRule;

#define ADAMAX(name, T, absolute)                                                              \
  static void name(int64_t n, void *p_, const void *g_, void *const *s, const void *c) {       \
    const AdamaxRule *o = c;                                                                   \
    const T step = (T)o->step_size, b1 = (T)(1 - o->beta1), b2 = (T)o->beta2, eps = (T)o->eps, \
            wd = (T)o->weight_decay;                                                           \
    const T sign = (T)o->sign;                                                                 \
    T *restrict p = p_, *restrict m = s[0], *restrict u = s[1];                                \
    const T *restrict g = g_;                                                                  \
    for (int64_t i = 0; i < n; i++) {                                                          \
      T x = sign * g[i] + wd * p[i], old = b2 * u[i], size = absolute(x) + eps;                \
      m[i] += b1 * (x - m[i]);                                                                 \
      u[i] = old > size ? old : size;                                                          \
      p[i] -= step * m[i] / u[i];                                                              \
    }                                                                                          \
  }
ADAMAX(adamax_f32, float, fabsf)
ADAMAX(adamax_f64, double, fabs)

static size_t adamax_scratch(const OpCall *c) {
  return fleet_scratch(c, ((const struct adamax__args *)c->args)->n_params);
}

static int adamax_cpu(const OpCall *c) {
  const struct adamax__args *a = c->args;
  AdamaxRule o = {a->lr / (1 - pow(a->beta1, (double)counted(c, a->step))),
                  a->beta1,
                  a->beta2,
                  a->eps,
                  a->weight_decay,
                  a->maximize ? -1 : 1};
  return fleet_run(c, a->n_params, 2, (Rule){adamax_f32, adamax_f64, &o});
}

/* Adamax (Kingma and Ba, 2014). `step` counts from 1. */
OP(adamax_,
   .signature =
       "adamax_(Tensor[]! params, Tensor[] grads, Tensor[]! exp_avgs, Tensor[]! exp_infs, "
       "Tensor? factor=None, Tensor? skip=None, *, float lr, float beta1, float beta2, float "
       "eps, float weight_decay=0, int step, bool maximize=False) -> ()",
   .flags = OP_HIDDEN, .sbp_rule = fleet_sbp, .infer = fleet_infer, .cpu = adamax_cpu,
   .scratch = adamax_scratch)

/* -- The norm of many tensors ------------------------------------------------------------------ */

static int total_norm_infer(Infer *I) {
  for (int k = 0; k < I->n_in; k++) {
    int rc = infer_want_float(I, k);
    if (rc) return rc;
  }
  if (I->n_in == 0) return infer_error(I, "xs is empty");
  return infer_shape(I, (DType)I->in[0]->dtype, 0, NULL);
}

enum { NORM_PARTS = 64 };

typedef struct NormJob {
  Walk walk;
  DType dtype;
  double parts[NORM_PARTS];
} NormJob;

static double squares_f32(int64_t n, const float *x) {
  float lane[16] = {0};
  double sum = 0;
  int64_t i = 0;
  for (; i + 16 <= n; i += 16)
    for (int k = 0; k < 16; k++) lane[k] += x[i + k] * x[i + k];
  for (; i < n; i++) sum += (double)x[i] * (double)x[i];
  for (int k = 0; k < 16; k++) sum += (double)lane[k];
  return sum;
}

/* Parts have fixed borders, so that the sum does not depend on the number of threads; blocks are
 * short enough for float lanes. */
static void norm_range(int64_t begin, int64_t end, void *arg) {
  NormJob *j = arg;
  for (int64_t part = begin; part < end; part++) {
    int64_t from = j->walk.numel * part / NORM_PARTS, to = j->walk.numel * (part + 1) / NORM_PARTS;
    BlockBuffer b;
    double sum = 0;
    bool direct = j->dtype == F32 && walk_is_flat(&j->walk, 0);
    PointwiseClass cls = j->dtype == F64 ? PW_F64 : PW_F32;
    for (int64_t i = from; i < to; i += BLOCK) {
      int64_t n = to - i < BLOCK ? to - i : BLOCK;
      const float *x = direct ? (const float *)(void *)j->walk.data[0] + i : b.f32;
      if (!direct)
        walk_rows(&j->walk, 0, i, n, block_loads[cls][j->dtype], &b, cls == PW_F64 ? 8 : 4, false);
      if (cls == PW_F32) sum += squares_f32(n, x);
      else
        for (int64_t k = 0; k < n; k++) sum += b.f64[k] * b.f64[k];
    }
    j->parts[part] = sum;
  }
}

static int total_norm_cpu(const OpCall *c) {
  double sum = 0;
  for (int k = 0; k < c->n_in; k++) {
    NormJob j = {.dtype = (DType)c->in[k].dtype};
    walk_init(&j.walk, &c->in[k], 0, NULL);
    mf_parallel(NORM_PARTS, j.walk.numel > 1 << 16 ? 1 : NORM_PARTS, norm_range, &j);
    for (int p = 0; p < NORM_PARTS; p++) sum += j.parts[p];
  }
  dtype_set_f64((DType)c->out[0].dtype, c->out[0].data, sqrt(sum));
  return 0;
}

/* The 2-norm of all elements of all xs together, 0-d, in the dtype of the first. */
OP(total_norm, .signature = "total_norm(Tensor[] xs) -> Tensor", .flags = OP_NO_GRAD,
   .infer = total_norm_infer, .cpu = total_norm_cpu)

/* -- Scaling and clearing many tensors --------------------------------------------------------- */

/* All inputs from the first of list parameter `p` on are dense float tensors. */
static int list_infer(Infer *I, int p) {
  int first, n;
  char name[64];
  op_inputs_of_param(I->op, I->args, p, &first, &n);
  for (int k = first; k < first + n; k++) {
    int rc = infer_want_float(I, k);
    if (rc) return rc;
    if (!shape_is_dense(I->in[k]->ndim, I->in[k]->shape, I->in[k]->stride))
      return infer_error(I, "%s must be dense in memory", infer_name(I, k, name, sizeof name));
  }
  return 0;
}

static int scale_all_infer(Infer *I) {
  int rc = infer_want_float(I, 0);
  if (!rc) rc = infer_want_ndim(I, 0, 0);
  return rc ? rc : list_infer(I, 1);
}

#define SCALE(name, T)                                                                  \
  static void name(int64_t n, void *p_, const void *g, void *const *s, const void *c) { \
    (void)g, (void)s;                                                                   \
    T *p = p_, by = (T) * (const double *)c;                                            \
    for (int64_t i = 0; i < n; i++) p[i] *= by;                                         \
  }
SCALE(scale_f32, float)
SCALE(scale_f64, double)

static size_t scale_all_scratch(const OpCall *c) {
  return list_scratch(((const struct scale_all__args *)c->args)->n_xs);
}

static int scale_all_cpu(const OpCall *c) {
  const struct scale_all__args *a = c->args;
  double by = dtype_get_f64((DType)c->in[0].dtype, c->in[0].data);
  return by == 1 ? 0 : list_run(c, 1, a->n_xs, (Rule){scale_f32, scale_f64, &by});
}

static int scale_all_sbp(SbpAsk *q) {
  int rc = together_sbp(q), row = q->n_in + q->n_out;
  for (int i = 0; !rc && i < sbp_count(q); i++) q->found.at[i * row] = (Sbp){.kind = SBP_B};
  return rc;
}

/* All elements of all xs times a 0-d tensor. */
OP(scale_all_, .signature = "scale_all_(Tensor scale, Tensor[]! xs) -> ()", .flags = OP_HIDDEN,
   .sbp_rule = scale_all_sbp, .infer = scale_all_infer, .cpu = scale_all_cpu,
   .scratch = scale_all_scratch)

static int zero_all_infer(Infer *I) {
  return list_infer(I, 0);
}

#define ZERO(name, T)                                                                  \
  static void name(int64_t n, void *p, const void *g, void *const *s, const void *c) { \
    (void)g, (void)s, (void)c;                                                         \
    memset(p, 0, (size_t)n * sizeof(T));                                               \
  }
ZERO(zero_f32, float)
ZERO(zero_f64, double)

static size_t zero_all_scratch(const OpCall *c) {
  return list_scratch(((const struct zero_all__args *)c->args)->n_xs);
}

static int zero_all_cpu(const OpCall *c) {
  const struct zero_all__args *a = c->args;
  return list_run(c, 0, a->n_xs, (Rule){zero_f32, zero_f64, NULL});
}

/* All elements of all xs become 0. */
OP(zero_all_, .signature = "zero_all_(Tensor[]! xs) -> ()", .flags = OP_HIDDEN,
   .sbp_rule = together_sbp, .infer = zero_all_infer, .cpu = zero_all_cpu,
   .scratch = zero_all_scratch)
