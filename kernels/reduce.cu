/* Reductions over dims to one value. A functor says what elements become and how two parts join;
 * three ways of dividing the work serve all of them. Bytes: those of x.
 *
 * Where x lies contiguously along the reduced dims, an output is a warp's, or a block's when it is
 * long, and its threads read 16 bytes at a time. Elsewhere a block takes 32 neighbouring outputs
 * and its 8 warps share the rows, so that reads of neighbours are one. When there are few outputs,
 * parts of each are folded by blocks of their own into scratch, and joined by a second kernel: in a
 * fixed order, so that results do not differ from run to run. */
#include "reduce.cuh"

/* x reduced over the dims of `mask` to y, whose step for each dim of x is step[d]. */
static void fold_init(FoldParams *p, const View *x, const View *y, uint32_t mask,
                      const int64_t *step) {
  int64_t kept[MF_MAX_DIMS], gone[MF_MAX_DIMS], sy[MF_MAX_DIMS], sx[MF_MAX_DIMS], si[MF_MAX_DIMS];
  int n = 0, m = 0;
  for (int d = 0; d < x->ndim; d++) {
    if (mask >> d & 1) gone[m] = x->shape[d], si[m++] = x->stride[d];
    else kept[n] = x->shape[d], sy[n] = step[d], sx[n++] = x->stride[d];
  }
  View out = *y, from = *x, inner = *x;
  out.ndim = from.ndim = (int8_t)n, out.shape = from.shape = kept;
  out.stride = sy, from.stride = sx;
  inner.ndim = (int8_t)m, inner.shape = gone, inner.stride = si;
  walk_init(&p->outer, &out, 1, &from);
  walk_init(&p->inner, &inner, 0, (const View *)NULL);
  p->count = p->inner.numel;
  p->flat = walk_is_flat(&p->inner, 0);
  size_t size = dtype_size((DType)x->dtype);
  p->aligned = p->flat && (uintptr_t)x->data % 16 == 0;
  for (int d = 0; d < p->outer.ndim; d++)
    p->aligned &= p->outer.step[1][d] * (int64_t)size % 16 == 0;
}

/* Each is compiled in one of the parts. */
#define FOLD_OF(F, T) extern template int fold_launch<F<T>>(const OpCall *, FoldParams *);
#include "reduce_list.h"
#undef FOLD_OF

static PointwiseClass reduced_class(DType x, DType y) {
  if (x == F64 || y == F64) return dtype_is_float(x) || dtype_is_float(y) ? PW_F64 : PW_I64;
  if (dtype_is_float(x)) return PW_F32;
  return dtype_is_float(y) ? PW_F64 : PW_I64;
}

static void reduce_init(FoldParams *p, const OpCall *c, const IntList *dims, bool keepdim) {
  const View *x = &c->in[0], *y = &c->out[0];
  int64_t step[MF_MAX_DIMS];
  uint32_t mask = 0;
  for (int i = 0; i < dims->n; i++) mask |= 1u << dims->v[i];
  for (int d = 0, k = 0; d < x->ndim; d++) {
    bool reduced = mask >> d & 1;
    step[d] = reduced ? 0 : y->stride[k];
    k += !reduced || keepdim;
  }
  *p = FoldParams{};
  fold_init(p, x, y, mask, step);
}

#define FOLD_FLOATS(F, cls) \
  (cls) == PW_F64 ? fold_launch<F<double>>(c, &p) : fold_launch<F<float>>(c, &p)
#define FOLD_ALL(F, cls) (cls) == PW_I64 ? fold_launch<F<int64_t>>(c, &p) : FOLD_FLOATS(F, cls)

/* -- The ops ----------------------------------------------------------------------------------- */

#define REDUCTION(name, F, FOLDS, class_of)                            \
  static int name##_cuda(const OpCall *c) {                            \
    const struct name##_args *a = (const struct name##_args *)c->args; \
    DType x = (DType)c->in[0].dtype, y = (DType)c->out[0].dtype;       \
    FoldParams p;                                                      \
    (void)x, (void)y;                                                  \
    reduce_init(&p, c, &a->dim, a->keepdim);                           \
    return FOLDS(F, class_of);                                         \
  }                                                                    \
  KERNEL(name, name##_cuda)
REDUCTION(sum, FoldSum, FOLD_ALL, reduced_class(x, y))
REDUCTION(mean, FoldMean, FOLD_FLOATS, reduced_class(x, y))
REDUCTION(prod, FoldProd, FOLD_ALL, reduced_class(x, y))
REDUCTION(amax, FoldMax, FOLD_ALL, reduced_class(x, y))
REDUCTION(amin, FoldMin, FOLD_ALL, reduced_class(x, y))
REDUCTION(any, FoldAny, FOLD_ALL, block_class(x))
REDUCTION(all, FoldAll, FOLD_ALL, block_class(x))
REDUCTION(count_nonzero, FoldCount, FOLD_ALL, block_class(x))
REDUCTION(logsumexp, FoldLogsumexp, FOLD_FLOATS, reduced_class(x, y))

static int norm_cuda(const OpCall *c) {
  const struct norm_args *a = (const struct norm_args *)c->args;
  PointwiseClass cls = reduced_class((DType)c->in[0].dtype, (DType)c->out[0].dtype);
  FoldParams p;
  reduce_init(&p, c, &a->dim, a->keepdim);
  p.p = a->p;
  if (a->p == 1) return FOLD_FLOATS(FoldAbs, cls);
  if (a->p == 2) return FOLD_FLOATS(FoldSquare, cls);
  if (a->p == 0) return FOLD_FLOATS(FoldTrue, cls);
  if (a->p == (double)INFINITY) return FOLD_FLOATS(FoldMaxAbs, cls);
  if (a->p == -(double)INFINITY) return FOLD_FLOATS(FoldMinAbs, cls);
  return FOLD_FLOATS(FoldPower, cls);
}
KERNEL(norm, norm_cuda)

template <class A>
static void var_init(FoldParams *p, const OpCall *c, const A *a) {
  reduce_init(p, c, &a->dim, a->keepdim);
  double d = (double)p->count - (a->has_correction ? a->correction : a->unbiased ? 1 : 0);
  p->divisor = d > 0 ? d : 0;
}

static int var_cuda(const OpCall *c) {
  FoldParams p;
  var_init(&p, c, (const struct var_args *)c->args);
  return FOLD_FLOATS(FoldVar, block_class((DType)c->in[0].dtype));
}
KERNEL(var, var_cuda)

static int std_cuda(const OpCall *c) {
  FoldParams p;
  var_init(&p, c, (const struct std_args *)c->args);
  return FOLD_FLOATS(FoldStd, block_class((DType)c->in[0].dtype));
}
KERNEL(std, std_cuda)

int reduce_all(const OpCall *c, const View *x, const View *y, bool mean) {
  static const int64_t none[MF_MAX_DIMS] = {0};
  PointwiseClass cls = reduced_class((DType)x->dtype, (DType)y->dtype);
  FoldParams p = {};
  fold_init(&p, x, y, (1u << x->ndim) - 1, none);
  if (mean) return FOLD_FLOATS(FoldMean, cls);
  return FOLD_ALL(FoldSum, cls);
}

/* y has fewer dims, or 1 where x is broadcast. */
static int sum_to_cuda(const OpCall *c) {
  const View *x = &c->in[0], *y = &c->out[0];
  int64_t step[MF_MAX_DIMS];
  uint32_t mask = 0;
  int shift = x->ndim - y->ndim;
  for (int d = 0; d < x->ndim; d++) {
    bool reduced = d < shift || (y->shape[d - shift] == 1 && x->shape[d] != 1);
    mask |= (uint32_t)reduced << d;
    step[d] = reduced ? 0 : y->stride[d - shift];
  }
  FoldParams p = {};
  fold_init(&p, x, y, mask, step);
  return FOLD_ALL(FoldSum, reduced_class((DType)x->dtype, (DType)y->dtype));
}
KERNEL(sum_to, sum_to_cuda)
