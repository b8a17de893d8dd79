/* Activations of what a product has made, where the vendor's function does not know them. */
#include "kernel.cuh"
#include "vendor.h"

enum { ACT_BLOCK = 256 };

template <class T>
static __global__ void __launch_bounds__(ACT_BLOCK)
    act_kernel(const __grid_constant__ Walk<1> w, int act) {
  int64_t i = (int64_t)blockIdx.x * ACT_BLOCK + threadIdx.x, at[1];
  if (i >= w.numel) return;
  walk_at(w, 1, i, at);
  T v = load_as<T>(w.dtype[0], w.data[0], at[0]);
  if (act == VENDOR_ACT_RELU) v = v < 0 ? T(0) : v;
  else if (act == VENDOR_ACT_GELU) v = v * normcdf(v);
  else v = T(0.5) * v * (1 + tanh(T(0.7978845608028654) * (v + T(0.044715) * v * v * v)));
  store_as<T>(w.dtype[0], w.data[0], at[0], v);
}

int act_launch(const OpCall *c, const View *y, VendorAct act) {
  Walk<1> w;
  walk_init(&w, y, 0, (const View *)NULL);
  if (!w.numel) return 0;
  unsigned grid = grid_for(w.numel, ACT_BLOCK);
  if (y->dtype == F64) return LAUNCH(c, act_kernel<double>, grid, ACT_BLOCK, 0, w, (int)act);
  return LAUNCH(c, act_kernel<float>, grid, ACT_BLOCK, 0, w, (int)act);
}
