/* Losses, element by element, then reduced: made of the same lines as the cpu's (src/op/loss.c).
 * Bytes: x and target, and the elements' losses twice; backward x, target and the result. */
#include "line.cuh"

/* g / n, in float64 where the result is, else in float32. */
static __global__ void loss_share(const void *g, int dtype, double n, void *to, int to_dtype) {
  store_as<double>(to_dtype, to, 0, load_as<double>(dtype, g, 0) / n);
}

static int loss_forward(const OpCall *c, int64_t reduction, PointwiseFn *const *fns) {
  OpCall call = *c;
  View each = c->out[0];
  int64_t shape[MF_MAX_DIMS], stride[MF_MAX_DIMS], step = 1;
  if (reduction == REDUCE_NONE) return pw_call(c, fns, NULL);
  each.ndim = c->in[0].ndim > c->in[1].ndim ? c->in[0].ndim : c->in[1].ndim;
  for (int d = each.ndim - 1; d >= 0; d--) {
    shape[d] = 1;
    for (int k = 0; k < 2; k++) {
      int at = d - (each.ndim - c->in[k].ndim);
      if (at >= 0 && c->in[k].shape[at] != 1) shape[d] = c->in[k].shape[at];
    }
    stride[d] = step;
    step *= shape[d];
  }
  each.shape = shape, each.stride = stride;
  each.dtype = each.dtype == F64 ? F64 : F32; /* not rounded in between */
  if (!(each.data = kernel_scratch(c, (size_t)step * dtype_size((DType)each.dtype))))
    return MF_ENOMEM;
  call.out = &each;
  int rc = pw_call(&call, fns, NULL);
  return rc ? rc : reduce_all(c, &each, &c->out[0], reduction == REDUCE_MEAN);
}

static int loss_backward(const OpCall *c, int64_t reduction, PointwiseFn *const *fns) {
  OpCall call = *c;
  View in[3] = {c->in[0], c->in[1], c->in[2]};
  int64_t n = view_numel(&c->out[0]);
  if (reduction != REDUCE_MEAN || !n) return pw_call(c, fns, NULL);
  in[0].dtype = c->out[0].dtype == F64 ? F64 : F32;
  if (!(in[0].data = kernel_scratch(c, 8))) return MF_ENOMEM;
  int rc = LAUNCH(c, loss_share, 1, 1, 0, c->in[0].data, (int)c->in[0].dtype, (double)n, in[0].data,
                  (int)in[0].dtype);
  call.in = in;
  return rc ? rc : pw_call(&call, fns, NULL);
}

#define LOSS(name, expr, derivative)                                                              \
  PW_FLOATS(2, name, T, expr)                                                                     \
  PW_FLOATS(3, name##_backward, T, (derivative)*x)                                                \
  static int name##_cuda(const OpCall *c) {                                                       \
    static PointwiseFn *const fns[PW_CLASSES] = {name##_f32, name##_f64, NULL};                   \
    return loss_forward(c, ((const struct name##_args *)c->args)->reduction, fns);                \
  }                                                                                               \
  KERNEL(name, name##_cuda)                                                                       \
  static int name##_backward_cuda(const OpCall *c) {                                              \
    static PointwiseFn *const fns[PW_CLASSES] = {name##_backward_f32, name##_backward_f64, NULL}; \
    return loss_backward(c, ((const struct name##_backward_args *)c->args)->reduction, fns);      \
  }                                                                                               \
  KERNEL(name##_backward, name##_backward_cuda)

#define PW_WANTED(line) 1
#include "loss_lines.h"
