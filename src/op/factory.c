/* Factories without randomness: tensors from sizes and numbers. `dtype` is float32 unless given,
 * int64 for arange of whole numbers. */
#include <math.h>

#include "block.h"
#include "op_args.h"
#include "sbp_rule.h"
#include "thread.h"

enum { GRAIN = 1 << 15 };

/* An output of this shape; device -1 is that of `like`, or the cpu. */
static int make(Infer *I, int64_t dtype, int64_t device, int64_t n, const int64_t *size) {
  if (n > MF_MAX_DIMS)
    return infer_error(I, "size has %lld dims, at most %d are possible", (long long)n, MF_MAX_DIMS);
  int rc = infer_shape(I, dtype == DTYPE_NONE ? F32 : (DType)dtype, (int)n, size);
  if (!rc && device >= 0) I->last->device = (uint8_t)device;
  return rc;
}

/* As input 0, with its order in memory; dtype and device as given or its own. */
static int make_like(Infer *I, int64_t dtype, int64_t device) {
  int rc = infer_like(I, 0, dtype == DTYPE_NONE ? (DType)I->in[0]->dtype : (DType)dtype);
  if (!rc && device >= 0) I->last->device = (uint8_t)device;
  return rc;
}

/* -- Filling ----------------------------------------------------------------------------------- */

typedef struct FillJob {
  char *data;
  size_t size;
  char value[8];
} FillJob;

static void fill_range(int64_t begin, int64_t end, void *arg) {
  const FillJob *j = arg;
  char *p = j->data + begin * (int64_t)j->size;
  int64_t n = end - begin;
  if (j->size == 1) memset(p, j->value[0], (size_t)n);
#define FILL(T)                                              \
  else if (j->size == sizeof(T)) {                           \
    T v;                                                     \
    memcpy(&v, j->value, sizeof v);                          \
    for (int64_t i = 0; i < n; i++) ((T *)(void *)p)[i] = v; \
  }
  FILL(uint16_t)
  FILL(uint32_t)
  FILL(uint64_t)
#undef FILL
}

/* Outputs of factories are dense, so that the order of elements does not matter. */
static int fill(const View *y, double value) {
  FillJob j = {.data = y->data, .size = dtype_size((DType)y->dtype)};
  dtype_set_f64((DType)y->dtype, j.value, value);
  mf_parallel(view_numel(y), GRAIN, fill_range, &j);
  return 0;
}

static int empty_cpu(const OpCall *c) {
  (void)c;
  return 0;
}
static int zeros_cpu(const OpCall *c) {
  return fill(&c->out[0], 0);
}
static int ones_cpu(const OpCall *c) {
  return fill(&c->out[0], 1);
}

static int empty_infer(Infer *I) {
  const struct empty_args *a = I->args;
  return make(I, a->dtype, a->device, a->size.n, a->size.v);
}
/* A tensor whose elements are not set. */
OP(empty,
   .signature =
       "empty(int[] size, *, dtype? dtype=None, device? device=None, bool requires_grad=False) -> "
       "Tensor",
   .flags = OP_INDEXED, .sbp_rule = sbp_fresh, .infer = empty_infer, .cpu = empty_cpu)

static int zeros_infer(Infer *I) {
  const struct zeros_args *a = I->args;
  return make(I, a->dtype, a->device, a->size.n, a->size.v);
}
/* Zeros. */
OP(zeros,
   .signature =
       "zeros(int[] size, *, dtype? dtype=None, device? device=None, bool requires_grad=False) -> "
       "Tensor",
   .flags = OP_INDEXED, .sbp_rule = sbp_fresh, .infer = zeros_infer, .cpu = zeros_cpu)

static int ones_infer(Infer *I) {
  const struct ones_args *a = I->args;
  return make(I, a->dtype, a->device, a->size.n, a->size.v);
}
/* Ones. */
OP(ones,
   .signature =
       "ones(int[] size, *, dtype? dtype=None, device? device=None, bool requires_grad=False) -> "
       "Tensor",
   .flags = OP_INDEXED, .sbp_rule = sbp_fresh, .infer = ones_infer, .cpu = ones_cpu)

static int full_infer(Infer *I) {
  const struct full_args *a = I->args;
  int rc = make(I, a->dtype, a->device, a->size.n, a->size.v);
  return rc ? rc : infer_want_held(I, "fill_value", a->fill_value, (DType)I->last->dtype);
}
static int full_cpu(const OpCall *c) {
  return fill(&c->out[0], ((const struct full_args *)c->args)->fill_value);
}
/* One number everywhere. */
OP(full,
   .signature =
       "full(int[] size, float fill_value, *, dtype? dtype=None, device? device=None, bool "
       "requires_grad=False) -> Tensor",
   .flags = OP_INDEXED, .sbp_rule = sbp_fresh, .infer = full_infer, .cpu = full_cpu)

static int empty_like_infer(Infer *I) {
  const struct empty_like_args *a = I->args;
  return make_like(I, a->dtype, a->device);
}
/* As empty, with the shape, dtype and device of x. */
OP(empty_like,
   .signature =
       "empty_like(Tensor x, *, dtype? dtype=None, device? device=None, bool requires_grad=False) "
       "-> Tensor",
   .flags = OP_NO_GRAD | OP_FORM, .sbp = "...", .infer = empty_like_infer, .cpu = empty_cpu)

static int zeros_like_infer(Infer *I) {
  const struct zeros_like_args *a = I->args;
  return make_like(I, a->dtype, a->device);
}
/* As zeros, with the shape, dtype and device of x. */
OP(zeros_like,
   .signature =
       "zeros_like(Tensor x, *, dtype? dtype=None, device? device=None, bool requires_grad=False) "
       "-> Tensor",
   .flags = OP_NO_GRAD | OP_FORM, .sbp = "...", .infer = zeros_like_infer, .cpu = zeros_cpu)

static int ones_like_infer(Infer *I) {
  const struct ones_like_args *a = I->args;
  return make_like(I, a->dtype, a->device);
}
/* As ones, with the shape, dtype and device of x. */
OP(ones_like,
   .signature =
       "ones_like(Tensor x, *, dtype? dtype=None, device? device=None, bool requires_grad=False) "
       "-> Tensor",
   .flags = OP_NO_GRAD | OP_FORM, .sbp = "...", .infer = ones_like_infer, .cpu = ones_cpu)

static int full_like_infer(Infer *I) {
  const struct full_like_args *a = I->args;
  int rc = make_like(I, a->dtype, a->device);
  return rc ? rc : infer_want_held(I, "fill_value", a->fill_value, (DType)I->last->dtype);
}
static int full_like_cpu(const OpCall *c) {
  return fill(&c->out[0], ((const struct full_like_args *)c->args)->fill_value);
}
/* As full, with the shape, dtype and device of x. */
OP(full_like,
   .signature =
       "full_like(Tensor x, float fill_value, *, dtype? dtype=None, device? device=None, bool "
       "requires_grad=False) "
       "-> Tensor",
   .flags = OP_NO_GRAD | OP_FORM, .sbp = "...", .infer = full_like_infer, .cpu = full_like_cpu)

/* -- Sequences --------------------------------------------------------------------------------- */

/* Element i is start + i * step; from the middle on it is counted back from the end, as PyTorch's
 * linspace does. */
typedef struct SequenceJob {
  const View *y;
  double start, step, end, base; /* base: 0, or that of logspace */
  int64_t n, first;              /* of the whole; where this part begins */
  bool both_ends;
} SequenceJob;

static void sequence_range(int64_t begin, int64_t end, void *arg) {
  const SequenceJob *j = arg;
  DType t = (DType)j->y->dtype;
  for (int64_t at = begin; at < end; at++) {
    int64_t i = j->first + at;
    double v = j->both_ends && i >= j->n / 2 ? j->end - j->step * (double)(j->n - 1 - i)
                                             : j->start + j->step * (double)i;
    dtype_set_f64(t, (char *)j->y->data + at * (int64_t)dtype_size(t),
                  j->base > 0 ? pow(j->base, v) : v);
  }
}

static void sequence(SequenceJob *j) {
  if (j->y->start) j->first = j->y->start[0];
  mf_parallel(j->y->shape[0], GRAIN, sequence_range, j);
}

static int arange_infer(Infer *I) {
  struct arange_args *a = I->args;
  if (!a->has_end) { /* arange(end) */
    a->end = a->start;
    a->start = 0;
    a->has_end = true;
  }
  if (a->step == 0 || a->step != a->step) return infer_error(I, "step must not be %g", a->step);
  double count = ceil((a->end - a->start) / a->step);
  if (!(count >= 0))
    return infer_error(I, "from start %g one does not come to end %g by steps of %g", a->start,
                       a->end, a->step);
  if (count > 1e15)
    return infer_error(I, "from start %g to end %g there are %g elements, which are too many",
                       a->start, a->end, count);
  bool whole = a->start == floor(a->start) && a->end == floor(a->end) && a->step == floor(a->step);
  int64_t n = (int64_t)count;
  return make(I, a->dtype == DTYPE_NONE && whole ? I64 : a->dtype, a->device, 1, &n);
}

static int arange_cpu(const OpCall *c) {
  const struct arange_args *a = c->args;
  SequenceJob j = {.y = &c->out[0], .start = a->start, .step = a->step};
  sequence(&j);
  return 0;
}

/* start, start + step, ... below end; arange(end) starts at 0. Whole numbers give int64. */
OP(arange,
   .signature =
       "arange(float start, float? end=None, float step=1, *, dtype? dtype=None, device? "
       "device=None, "
       "bool requires_grad=False) -> Tensor",
   .flags = OP_INDEXED, .sbp_rule = sbp_fresh, .infer = arange_infer, .cpu = arange_cpu)

static int linspace_infer(Infer *I) {
  const struct linspace_args *a = I->args;
  if (a->steps < 0)
    return infer_error(I, "steps must not be negative, is %lld", (long long)a->steps);
  return make(I, a->dtype, a->device, 1, &a->steps);
}

static int linspace_cpu(const OpCall *c) {
  const struct linspace_args *a = c->args;
  SequenceJob j = {.y = &c->out[0],
                   .start = a->start,
                   .end = a->end,
                   .n = a->steps,
                   .both_ends = a->steps > 1,
                   .step = a->steps > 1 ? (a->end - a->start) / (double)(a->steps - 1) : 0};
  sequence(&j);
  return 0;
}

/* `steps` numbers at equal distances, both ends included. */
OP(linspace,
   .signature =
       "linspace(float start, float end, int steps, *, dtype? dtype=None, device? device=None, "
       "bool requires_grad=False) -> Tensor",
   .flags = OP_INDEXED, .sbp_rule = sbp_fresh, .infer = linspace_infer, .cpu = linspace_cpu)

static int logspace_infer(Infer *I) {
  const struct logspace_args *a = I->args;
  if (a->steps < 0)
    return infer_error(I, "steps must not be negative, is %lld", (long long)a->steps);
  if (!(a->base > 0)) return infer_error(I, "base must be above 0, is %g", a->base);
  return make(I, a->dtype, a->device, 1, &a->steps);
}

static int logspace_cpu(const OpCall *c) {
  const struct logspace_args *a = c->args;
  SequenceJob j = {.y = &c->out[0],
                   .start = a->start,
                   .end = a->end,
                   .n = a->steps,
                   .both_ends = a->steps > 1,
                   .base = a->base,
                   .step = a->steps > 1 ? (a->end - a->start) / (double)(a->steps - 1) : 0};
  sequence(&j);
  return 0;
}

/* base to the powers of linspace. */
OP(logspace,
   .signature =
       "logspace(float start, float end, int steps, float base=10, *, dtype? dtype=None, device? "
       "device=None, "
       "bool requires_grad=False) -> Tensor",
   .flags = OP_INDEXED, .sbp_rule = sbp_fresh, .infer = logspace_infer, .cpu = logspace_cpu)

static int eye_infer(Infer *I) {
  const struct eye_args *a = I->args;
  int64_t size[] = {a->n, a->has_m ? a->m : a->n};
  if (a->n < 0 || size[1] < 0)
    return infer_error(I, "n %lld and m %lld must not be negative", (long long)a->n,
                       (long long)size[1]);
  return make(I, a->dtype, a->device, 2, size);
}

static int eye_cpu(const OpCall *c) {
  const View *y = &c->out[0];
  int64_t row = y->start ? y->start[0] : 0, column = y->start ? y->start[1] : 0,
          size = (int64_t)dtype_size((DType)y->dtype);
  fill(y, 0);
  for (int64_t i = 0; i < y->shape[0]; i++) {
    int64_t k = row + i - column;
    if (k >= 0 && k < y->shape[1])
      dtype_set_f64((DType)y->dtype, (char *)y->data + (i * y->stride[0] + k * y->stride[1]) * size,
                    1);
  }
  return 0;
}

/* Ones on the diagonal of an (n, m) matrix of zeros; m is n unless given. */
OP(eye,
   .signature =
       "eye(int n, int? m=None, *, dtype? dtype=None, device? device=None, bool "
       "requires_grad=False) -> Tensor",
   .flags = OP_INDEXED, .sbp_rule = sbp_fresh, .infer = eye_infer, .cpu = eye_cpu)
