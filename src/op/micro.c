/* From the micro-batches of a step to the step itself: see pass/time.c; the ways there,
 * micro_unpack and micro_repeat, are views.
 *
 * These ops are called for each micro-batch in turn, `at` being its number. Their output lasts from
 * call to call and is whole after the last, at = n - 1. */
#include "copy_views.h"
#include "op_args.h"
#include "sbp_rule.h"
#include "thread.h"

static int want_count(Infer *I, int64_t n, int64_t at) {
  if (n < 1) return infer_error(I, "n must be at least 1, is %lld", (long long)n);
  if (at >= 0 && at < n) return 0;
  return infer_error(I, "at %lld is none of %lld micro-batches", (long long)at, (long long)n);
}

/* -- The mean ---------------------------------------------------------------------------------- */

typedef struct Adding {
  const View *x, *y;
  bool first, last; /* what x is of several */
  double scale;     /* of the sum, after the last */
} Adding;

#define ADD_RANGE(T)                                                      \
  static void add_range_##T(int64_t begin, int64_t end, void *arg) {      \
    const Adding *a = arg;                                                \
    const T *x = a->x->data;                                              \
    T *y = a->y->data, scale = (T)a->scale;                               \
    if (a->last)                                                          \
      for (int64_t i = begin; i < end; i++) y[i] = (y[i] + x[i]) * scale; \
    else                                                                  \
      for (int64_t i = begin; i < end; i++) y[i] += x[i];                 \
  }
ADD_RANGE(float)
ADD_RANGE(double)

/* The same in any dtype and order in memory. */
static void add_each(const Adding *a) {
  const View *x = a->x, *y = a->y;
  DType t = (DType)y->dtype;
  int64_t size = (int64_t)dtype_size(t), index[MF_MAX_DIMS] = {0};
  for (int64_t i = view_numel(y); i > 0; i--) {
    int64_t from = 0, to = 0;
    for (int d = 0; d < y->ndim; d++) {
      from += index[d] * x->stride[d];
      to += index[d] * y->stride[d];
    }
    char *at = (char *)y->data + to * size;
    double sum = dtype_get_f64(t, at) + dtype_get_f64(t, (const char *)x->data + from * size);
    dtype_set_f64(t, at, a->last ? sum * a->scale : sum);
    for (int d = y->ndim - 1; d >= 0 && ++index[d] == y->shape[d]; d--) index[d] = 0;
  }
}

static int micro_mean_infer(Infer *I) {
  const struct micro_mean_args *a = I->args;
  int rc = infer_want_float(I, 0);
  if (!rc) rc = want_count(I, a->n, a->at);
  return rc ? rc : infer_same(I);
}

static int micro_mean_cpu(const OpCall *c) {
  enum { GRAIN = 1 << 14 };
  const struct micro_mean_args *args = c->args;
  const View *x = &c->in[0], *y = &c->out[0];
  Adding a = {x, y, args->at == 0, args->at == args->n - 1, 1.0 / (double)args->n};
  if (a.first) return copy_views(x, y);
  bool flat = shape_equal(x->ndim, x->stride, y->ndim, y->stride) &&
              shape_is_dense(y->ndim, y->shape, y->stride);
  if (flat && y->dtype == F32) mf_parallel(view_numel(y), GRAIN, add_range_float, &a);
  else if (flat && y->dtype == F64) mf_parallel(view_numel(y), GRAIN, add_range_double, &a);
  else add_each(&a);
  return 0;
}

/* The mean of the x of all micro-batches. */
OP(micro_mean, .signature = "micro_mean(Tensor x, int n, int at=0) -> Tensor",
   .flags = OP_HIDDEN | OP_GATHERS, .sbp = "...", .linear = "x", .infer = micro_mean_infer,
   .cpu = micro_mean_cpu)

/* -- All of them, the last --------------------------------------------------------------------- */

/* As x lies in memory where dim 0 is the outermost, so that parts lie behind one another. */
static int micro_pack_infer(Infer *I) {
  const struct micro_pack_args *a = I->args;
  const Meta *x = I->in[0];
  int64_t shape[MF_MAX_DIMS];
  int rc = want_count(I, a->n, a->at);
  if (rc) return rc;
  memcpy(shape, x->shape, sizeof *shape * (size_t)x->ndim);
  if (!x->ndim) shape[0] = 1;
  if (__builtin_mul_overflow(shape[0], a->n, &shape[0]))
    return infer_error(I, "n is %lld, and so many micro-batches are too large", (long long)a->n);
  rc = infer_shape(I, (DType)x->dtype, x->ndim ? x->ndim : 1, shape);
  if (!rc && x->ndim && shape_is_dense(x->ndim, x->shape, x->stride) && x->shape[0] &&
      x->stride[0] * x->shape[0] == meta_numel(x))
    memcpy(I->last->stride, x->stride, sizeof *x->stride * (size_t)x->ndim);
  return rc;
}

static int micro_pack_cpu(const OpCall *c) {
  const struct micro_pack_args *a = c->args;
  const View *x = &c->in[0];
  View part = c->out[0];
  int64_t rows = x->ndim ? x->shape[0] : 1;
  part.data =
      (char *)part.data + a->at * rows * part.stride[0] * (int64_t)dtype_size((DType)x->dtype);
  part.shape = x->shape;
  part.ndim = x->ndim;
  return copy_views(x, &part);
}

/* Parts of the micro-batches are no part of the whole, but along the other dims. */
static int micro_pack_sbp(SbpAsk *q) {
  int rc = 0;
  for (int d = 1; d < q->in[0]->ndim && !rc; d++) rc = sbp_add_split(q, 0, d, 0, d);
  return rc;
}

/* The x of all micro-batches, one behind the other along dim 0; of single numbers, a list. */
OP(micro_pack, .signature = "micro_pack(Tensor x, int n, int at=0) -> Tensor",
   .flags = OP_HIDDEN | OP_GATHERS, .sbp_rule = micro_pack_sbp, .infer = micro_pack_infer,
   .cpu = micro_pack_cpu)

static int micro_last_cpu(const OpCall *c) {
  return copy_views(&c->in[0], &c->out[0]);
}

/* The x of the last micro-batch. */
OP(micro_last, .signature = "micro_last(Tensor x) -> Tensor", .flags = OP_HIDDEN | OP_GATHERS,
   .sbp = "...", .linear = "x", .infer = infer_same, .cpu = micro_last_cpu)
