/* Shapes and strides as values. */
#include <assert.h>
#include <stdio.h>

#include "err.h"
#include "meta.h"
#include "slots.h"

const char *const device_slot_names[DEVICE_SLOTS] = {
    "cpu",   "meta",  "cuda",  "cuda1", "cuda2",  "cuda3",  "cuda4",  "cuda5",
    "cuda6", "cuda7", "cuda8", "cuda9", "cuda10", "cuda11", "cuda12", "cuda13"};

int shape_check(const char *op, int ndim, const int64_t *shape, DType dtype) {
  if (ndim > MF_MAX_DIMS)
    return err_set(MF_EINVAL, "%s: %d dims, at most %d are possible", op, ndim, MF_MAX_DIMS);
  int64_t n = 1;
  for (int d = 0; d < ndim; d++) {
    if (shape[d] < 0)
      return err_set(MF_EINVAL, "%s: size %lld in dim %d is negative", op, (long long)shape[d], d);
    if (shape[d] > 1 && n > SHAPE_MAX / shape[d]) {
      char text[SHAPE_TEXT_MAX];
      return err_set(MF_EINVAL, "%s: shape %s of %s is too large", op,
                     shape_text(ndim, shape, text), dtype_name(dtype));
    }
    n *= shape[d] ? shape[d] : 1;
  }
  return 0;
}

void shape_contiguous(int ndim, const int64_t *shape, int64_t *stride) {
  int64_t step = 1;
  for (int d = ndim - 1; d >= 0; d--) {
    stride[d] = step;
    step *= shape[d] > 1 ? shape[d] : 1;
  }
}

bool shape_is_contiguous(int ndim, const int64_t *shape, const int64_t *stride) {
  int64_t step = 1;
  for (int d = ndim - 1; d >= 0; d--) {
    if (shape[d] == 0) return true;
    if (shape[d] == 1) continue;
    if (stride[d] != step) return false;
    step *= shape[d];
  }
  return true;
}

void shape_channels_last(const int64_t *shape, int64_t *stride) {
  static const int order[] = {1, 3, 2, 0};
  int64_t step = 1;
  for (int i = 0; i < 4; i++) {
    stride[order[i]] = step;
    step *= shape[order[i]] > 1 ? shape[order[i]] : 1;
  }
}

bool shape_is_channels_last(int ndim, const int64_t *shape, const int64_t *stride) {
  static const int order[] = {1, 3, 2, 0};
  if (ndim != 4) return false;
  int64_t step = 1;
  for (int i = 0; i < 4; i++) {
    int d = order[i];
    if (shape[d] == 0) return true;
    if (shape[d] == 1) continue;
    if (stride[d] != step) return false;
    step *= shape[d];
  }
  return true;
}

bool shape_is_dense(int ndim, const int64_t *shape, const int64_t *stride) {
  bool used[MF_MAX_DIMS] = {false};
  int64_t step = 1;
  for (int d = 0; d < ndim; d++) {
    if (shape[d] == 0) return true;
    used[d] = shape[d] == 1;
  }
  for (int round = 0; round < ndim; round++) {
    int next = -1;
    for (int d = 0; d < ndim; d++)
      if (!used[d] && stride[d] == step) next = d;
    if (next < 0) break;
    used[next] = true;
    step *= shape[next];
  }
  for (int d = 0; d < ndim; d++)
    if (!used[d]) return false;
  return true;
}

bool shape_broadcast(int *out_ndim, int64_t *out, int ndim, const int64_t *shape) {
  int n = *out_ndim;
  if (ndim > n) {
    int shift = ndim - n;
    for (int d = n - 1; d >= 0; d--) out[d + shift] = out[d];
    for (int d = 0; d < shift; d++) out[d] = 1;
    n = *out_ndim = ndim;
  }
  for (int d = 0; d < ndim; d++) {
    int64_t *size = &out[n - ndim + d];
    if (*size == 1) *size = shape[d];
    else if (shape[d] != 1 && shape[d] != *size) return false;
  }
  return true;
}

void shape_broadcast_strides(int out_ndim, const int64_t *out, int ndim, const int64_t *shape,
                             const int64_t *stride, int64_t *out_stride) {
  int shift = out_ndim - ndim;
  assert(shift >= 0);
  for (int d = 0; d < shift; d++) out_stride[d] = 0;
  for (int d = 0; d < ndim; d++)
    out_stride[shift + d] = shape[d] == 1 && out[shift + d] != 1 ? 0 : stride[d];
}

bool shape_view_strides(int ndim, const int64_t *shape, const int64_t *stride, int out_ndim,
                        const int64_t *out, int64_t *out_stride) {
  if (shape_numel(ndim, shape) == 0) {
    shape_contiguous(out_ndim, out, out_stride);
    return true;
  }
  int o = out_ndim - 1;
  for (int d = ndim - 1; d >= 0;) { /* chunks of dims that lie in memory as one */
    while (d >= 0 && shape[d] == 1) d--;
    if (d < 0) break;
    int64_t step = stride[d], numel = shape[d];
    int first = d - 1;
    while (first >= 0 && (shape[first] == 1 || stride[first] == numel * step))
      numel *= shape[first--];
    while (numel > 1) {
      if (o < 0) return false;
      out_stride[o] = step;
      if (numel % out[o]) return false;
      numel /= out[o];
      step *= out[o--];
    }
    d = first;
  }
  for (; o >= 0; o--) out_stride[o] = o + 1 < out_ndim ? out_stride[o + 1] * out[o + 1] : 1;
  return true;
}

void shape_extent(int ndim, const int64_t *shape, const int64_t *stride, int64_t *low,
                  int64_t *high) {
  *low = *high = 0;
  if (shape_numel(ndim, shape) == 0) return;
  for (int d = 0; d < ndim; d++) *(stride[d] < 0 ? low : high) += (shape[d] - 1) * stride[d];
}

char *shape_text(int ndim, const int64_t *shape, char *buf) {
  int n = snprintf(buf, SHAPE_TEXT_MAX, "(");
  for (int d = 0; d < ndim && n < SHAPE_TEXT_MAX; d++)
    n +=
        snprintf(buf + n, (size_t)(SHAPE_TEXT_MAX - n), d ? ", %lld" : "%lld", (long long)shape[d]);
  if (n < SHAPE_TEXT_MAX) snprintf(buf + n, (size_t)(SHAPE_TEXT_MAX - n), ndim == 1 ? ",)" : ")");
  return buf;
}
