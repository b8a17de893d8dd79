/* Helpers of inference: outputs, dims, checks with one form of error text; and look-ups in the op
 * table. */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "op.h"

/* -- The table --------------------------------------------------------------------------------- */

const Op *op_find(const char *name) {
  int low = 0, high = op_count - 1; /* the build sorts by name */
  while (low <= high) {
    int mid = (low + high) / 2, order = strcmp(name, op_table[mid].name);
    if (order == 0) return &op_table[mid];
    if (order < 0) high = mid - 1;
    else low = mid + 1;
  }
  return NULL;
}

static int64_t list_length(const Param *p, const void *args) {
  return p->list ? *(const int64_t *)((const char *)args + p->offset) : 1;
}

int op_param_of_input(const Op *op, const void *args, int k) {
  int position = 0;
  for (int i = 0; i < op->n_params; i++) {
    if (op->params[i].kind != PARAM_TENSOR) continue;
    int64_t n = list_length(&op->params[i], args);
    if (k < n) return position;
    k -= (int)n;
    position++;
  }
  return -1;
}

void op_inputs_of_param(const Op *op, const void *args, int p, int *first, int *n) {
  *first = 0;
  for (int i = 0; i < op->n_params; i++) {
    if (op->params[i].kind != PARAM_TENSOR) continue;
    *n = (int)list_length(&op->params[i], args);
    if (p-- == 0) return;
    *first += *n;
  }
}

/* -- Outputs ----------------------------------------------------------------------------------- */

Meta *infer_add(Infer *I) {
  Meta *out = I->add(I);
  if (!out) {
    err_set(MF_ENOMEM, "%s: out of memory", I->op->name);
    return NULL;
  }
  I->last = out;
  out->ndim = 0;
  out->dtype = F32;
  out->number = false;
  out->offset = 0;
  out->device = (uint8_t)I->device;
  for (int k = 0; k < I->n_in; k++) {
    if (!I->in[k]) continue;
    out->device = I->in[k]->device;
    if (!I->in[k]->number) break;
  }
  return out;
}

int infer_shape(Infer *I, DType dtype, int ndim, const int64_t *shape) {
  int rc = shape_check(I->op->name, ndim, shape, dtype);
  if (rc) return rc;
  Meta *out = infer_add(I);
  if (!out) return MF_ENOMEM;
  out->dtype = (uint8_t)dtype;
  out->ndim = (int8_t)ndim;
  for (int d = 0; d < ndim; d++) out->shape[d] = shape[d];
  shape_contiguous(ndim, shape, out->stride);
  return 0;
}

int infer_like(Infer *I, int k, DType dtype) {
  const Meta *x = I->in[k];
  Meta *out = infer_add(I);
  if (!out) return MF_ENOMEM;
  out->dtype = (uint8_t)dtype;
  out->ndim = x->ndim;
  bool keep = shape_is_dense(x->ndim, x->shape, x->stride);
  for (int d = 0; d < x->ndim; d++) out->shape[d] = x->shape[d], out->stride[d] = x->stride[d];
  if (!keep) shape_contiguous(out->ndim, out->shape, out->stride);
  return 0;
}

int infer_keep_strides(Infer *I) {
  Meta *out = I->last;
  for (int k = 0; k < I->n_in; k++) {
    const Meta *x = I->in[k];
    if (!x || x->ndim != out->ndim ||
        memcmp(x->shape, out->shape, sizeof(int64_t) * (size_t)out->ndim))
      continue;
    if (shape_is_dense(x->ndim, x->shape, x->stride))
      memcpy(out->stride, x->stride, sizeof(int64_t) * (size_t)out->ndim);
    break;
  }
  return 0;
}

int infer_same(Infer *I) {
  return infer_like(I, 0, I->in[0]->dtype);
}

int infer_same_float(Infer *I) {
  return infer_like(I, 0, dtype_is_float(I->in[0]->dtype) ? I->in[0]->dtype : F32);
}

int infer_none(Infer *I) {
  (void)I;
  return 0;
}

/* -- Dims -------------------------------------------------------------------------------------- */

int infer_dim(Infer *I, const char *name, int64_t *dim, int ndim) {
  int64_t n = ndim ? ndim : 1;
  if (*dim < -n || *dim >= n)
    return infer_error(I, "%s %lld is out of range for %d dims; legal are %lld to %lld", name,
                       (long long)*dim, ndim, (long long)-n, (long long)(n - 1));
  if (*dim < 0) *dim += n;
  return 0;
}

int infer_dims(Infer *I, const char *name, IntList *dims, int ndim, bool all_if_empty) {
  if (dims->n == 0 && all_if_empty) {
    dims->n = ndim;
    for (int d = 0; d < ndim; d++) dims->v[d] = d;
    return 0;
  }
  uint32_t seen = 0;
  for (int i = 0; i < dims->n; i++) {
    int rc = infer_dim(I, name, &dims->v[i], ndim);
    if (rc) return rc;
    if (seen >> dims->v[i] & 1)
      return infer_error(I, "dim %lld appears twice in %s", (long long)dims->v[i], name);
    seen |= 1u << dims->v[i];
  }
  return 0;
}

/* -- Checks ------------------------------------------------------------------------------------ */

int infer_error(Infer *I, const char *format, ...) {
  char text[1024];
  va_list args;
  va_start(args, format);
  vsnprintf(text, sizeof text, format, args);
  va_end(args);
  return err_set(MF_EINVAL, "%s: %s", I->op->name, text);
}

const char *infer_name(Infer *I, int k, char *buf, size_t n) {
  int p = op_param_of_input(I->op, I->args, k), first = 0, count = 1, position = 0;
  op_inputs_of_param(I->op, I->args, p, &first, &count);
  for (int i = 0; i < I->op->n_params; i++) {
    const Param *param = &I->op->params[i];
    if (param->kind != PARAM_TENSOR || position++ != p) continue;
    if (param->list) snprintf(buf, n, "%s[%d]", param->name, k - first + 1);
    else snprintf(buf, n, "%s", param->name);
  }
  return buf;
}

int infer_want_float(Infer *I, int k) {
  char name[64];
  if (dtype_is_float(I->in[k]->dtype)) return 0;
  return infer_error(I, "%s must be a float tensor, is %s; convert it with :float()",
                     infer_name(I, k, name, sizeof name), dtype_name(I->in[k]->dtype));
}

int infer_want_ndim(Infer *I, int k, int ndim) {
  char name[64], shape[SHAPE_TEXT_MAX];
  const Meta *x = I->in[k];
  if (x->ndim == ndim) return 0;
  return infer_error(I, "%s must have %d dims, has %d: %s", infer_name(I, k, name, sizeof name),
                     ndim, x->ndim, shape_text(x->ndim, x->shape, shape));
}

int infer_want_dtype(Infer *I, int k, DType dtype) {
  char name[64];
  if (I->in[k]->dtype == dtype) return 0;
  return infer_error(I, "%s must be %s, is %s", infer_name(I, k, name, sizeof name),
                     dtype_name(dtype), dtype_name(I->in[k]->dtype));
}

int infer_want_same_dtype(Infer *I, int a, int b) {
  char first[64], second[64];
  if (I->in[a]->dtype == I->in[b]->dtype) return 0;
  return infer_error(I, "%s and %s must have one dtype, are %s and %s",
                     infer_name(I, a, first, sizeof first), infer_name(I, b, second, sizeof second),
                     dtype_name(I->in[a]->dtype), dtype_name(I->in[b]->dtype));
}

int infer_want_shape(Infer *I, int k, int ndim, const int64_t *shape) {
  char name[64], have[SHAPE_TEXT_MAX], want[SHAPE_TEXT_MAX];
  const Meta *x = I->in[k];
  if (shape_equal(x->ndim, x->shape, ndim, shape)) return 0;
  return infer_error(I, "%s must have shape %s, has %s", infer_name(I, k, name, sizeof name),
                     shape_text(ndim, shape, want), shape_text(x->ndim, x->shape, have));
}

int infer_want_same_shape(Infer *I, int a, int b) {
  return infer_want_shape(I, a, I->in[b]->ndim, I->in[b]->shape);
}

int infer_want_held(Infer *I, const char *name, double v, DType t) {
  if (dtype_holds(t, v)) return 0;
  return infer_error(I, "%s is %.17g, which %s cannot hold", name, v, dtype_name(t));
}

int infer_want_sizes(Infer *I, const char *name, const IntList *size, int ndim, DType dtype) {
  for (int d = 0; d < size->n; d++)
    if (size->v[d] < 0)
      return infer_error(I, "%s[%d] is %lld, which is negative", name, d + 1,
                         (long long)size->v[d]);
  if (size->n == ndim) return shape_check(I->op->name, ndim, size->v, dtype);
  return infer_error(I, "%s must have %d entries, has %d", name, ndim, (int)size->n);
}

int infer_want_inside(Infer *I, const char *what, int ndim, const int64_t *size,
                      const int64_t *stride, int64_t offset, int64_t n) {
  int64_t low = offset, high = offset, reach;
  if (shape_numel(ndim, size) == 0) return 0;
  bool fits = true;
  for (int d = 0; d < ndim && fits; d++) {
    int64_t *end = stride[d] < 0 ? &low : &high;
    fits = !__builtin_mul_overflow(size[d] - 1, stride[d], &reach) &&
           !__builtin_add_overflow(*end, reach, end);
  }
  if (fits && low >= 0 && high < n) return 0;
  return infer_error(I, "%s with offset %lld leads out of the %lld elements of memory", what,
                     (long long)offset, (long long)n);
}

/* PyTorch's rule by ranks: 0 dimensioned tensors, 1 0-d ones, 2 numbers; a later rank counts only
 * when its kind is higher, and a fractional number then means float32. */
static DType promote(const int best[3]) {
  int result = best[0];
  for (int rank = 1; rank < 3; rank++) {
    if (best[rank] == DTYPE_NONE) continue;
    if (result == DTYPE_NONE || dtype_kind((DType)best[rank]) > dtype_kind((DType)result))
      result = rank == 2 && dtype_is_float((DType)best[rank]) ? F32 : best[rank];
  }
  return (DType)result;
}

static void promote_add(int best[3], int ndim, bool number, DType t) {
  int *at = &best[number ? 2 : ndim == 0];
  *at = *at == DTYPE_NONE ? (int)t : (int)dtype_promote((DType)*at, t);
}

DType infer_promote(Infer *I) {
  int best[3] = {DTYPE_NONE, DTYPE_NONE, DTYPE_NONE};
  for (int k = 0; k < I->n_in; k++)
    if (I->in[k]) promote_add(best, I->in[k]->ndim, I->in[k]->number, (DType)I->in[k]->dtype);
  return promote(best);
}

DType op_promote_views(int n, const View *v) {
  int best[3] = {DTYPE_NONE, DTYPE_NONE, DTYPE_NONE};
  for (int k = 0; k < n; k++)
    if (!view_absent(&v[k])) promote_add(best, v[k].ndim, v[k].number, (DType)v[k].dtype);
  return promote(best);
}

/* -- Pointwise --------------------------------------------------------------------------------- */

/* Whether all inputs are alike: one float dtype and shape, dense, no numbers. Most calls are. */
static bool are_alike(Infer *I) {
  const Meta *x = I->in[0];
  if (x->number || !dtype_is_float(x->dtype) || !meta_is_contiguous(x)) return false;
  for (int k = 1; k < I->n_in; k++) {
    const Meta *y = I->in[k];
    if (y->dtype != x->dtype || y->number || !shape_equal(y->ndim, y->shape, x->ndim, x->shape))
      return false;
  }
  return true;
}

int pointwise_infer(Infer *I) {
  int flags = I->op->spec[0]->flags, ndim = 0;
  if (are_alike(I) && !(flags & (OP_INT_ONLY | OP_BOOL_OUT)))
    return infer_shape(I, I->in[0]->dtype, I->in[0]->ndim, I->in[0]->shape);
  int64_t shape[MF_MAX_DIMS];
  for (int k = 0; k < I->n_in; k++) {
    char have[SHAPE_TEXT_MAX], got[SHAPE_TEXT_MAX], name[64];
    const Meta *x = I->in[k];
    int64_t before[MF_MAX_DIMS];
    int before_ndim = ndim;
    memcpy(before, shape, sizeof(int64_t) * (size_t)ndim);
    if (!shape_broadcast(&ndim, shape, x->ndim, x->shape))
      return infer_error(
          I,
          "shapes do not broadcast: %s is %s, the other is %s; sizes of a dim must be equal or 1",
          infer_name(I, k, name, sizeof name), shape_text(x->ndim, x->shape, got),
          shape_text(before_ndim, before, have));
  }
  DType t = infer_promote(I);
  if (!dtype_is_float(t)) {
    if (flags & OP_FLOAT_OUT) t = F32;
    else if (!I->op->spec[0]->pointwise[PW_I64]) return infer_want_float(I, 0);
  } else if (flags & OP_INT_ONLY) {
    return infer_error(I, "works on whole numbers and bool, not on %s", dtype_name(t));
  }
  int rc = infer_shape(I, flags & OP_BOOL_OUT ? BOOL : t, ndim, shape);
  return rc ? rc : infer_keep_strides(I);
}
