/* From the micro-batches of a step to the step itself: see src/op/micro.c. Bytes: those of x, and
 * the result's twice. */
#include "kernel.cuh"

enum { MICRO_BLOCK = 256 };

/* y = (y + x) scale. */
template <class T>
static __global__ void __launch_bounds__(MICRO_BLOCK)
    micro_add(const __grid_constant__ Walk<2> w, T scale) {
  int64_t i = (int64_t)blockIdx.x * MICRO_BLOCK + threadIdx.x, at[2];
  if (i >= w.numel) return;
  walk_at(w, 2, i, at);
  T sum = load_as<T>(w.dtype[0], w.data[0], at[0]) + load_as<T>(w.dtype[1], w.data[1], at[1]);
  store_as<T>(w.dtype[0], w.data[0], at[0], sum * scale);
}

static int micro_mean_cuda(const OpCall *c) {
  const struct micro_mean_args *a = (const struct micro_mean_args *)c->args;
  const View *y = &c->out[0];
  if (a->at == 0) return copy_launch(c, &c->in[0], y);
  Walk<2> w;
  walk_init(&w, y, 1, &c->in[0]);
  if (!w.numel) return 0;
  unsigned grid = grid_for(w.numel, MICRO_BLOCK);
  double scale = a->at == a->n - 1 ? 1.0 / (double)a->n : 1;
  if (y->dtype == F32) return LAUNCH(c, micro_add<float>, grid, MICRO_BLOCK, 0, w, (float)scale);
  return LAUNCH(c, micro_add<double>, grid, MICRO_BLOCK, 0, w, scale);
}
KERNEL(micro_mean, micro_mean_cuda)

static int micro_pack_cuda(const OpCall *c) {
  const struct micro_pack_args *a = (const struct micro_pack_args *)c->args;
  const View *x = &c->in[0];
  View part = c->out[0];
  int64_t rows = x->ndim ? x->shape[0] : 1;
  part.data =
      (char *)part.data + a->at * rows * part.stride[0] * (int64_t)dtype_size((DType)x->dtype);
  part.shape = x->shape;
  part.ndim = x->ndim;
  return copy_launch(c, x, &part);
}
KERNEL(micro_pack, micro_pack_cuda)

static int micro_last_cuda(const OpCall *c) {
  return copy_launch(c, &c->in[0], &c->out[0]);
}
KERNEL(micro_last, micro_last_cuda)
