/* Activations of what a product has made, where the vendor's function does not know them. */
#include "kernel.cuh"
#include "vendor.h"

#include <stdlib.h>

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

/* -- Behind a convolution ---------------------------------------------------------------------- */

struct BiasParams {
  Walk<2> walk; /* y, bias */
  bool biased, relu;
};

template <class T>
static __global__ void __launch_bounds__(ACT_BLOCK)
    bias_kernel(const __grid_constant__ BiasParams p) {
  int64_t i = (int64_t)blockIdx.x * ACT_BLOCK + threadIdx.x, at[2];
  if (i >= p.walk.numel) return;
  walk_at(p.walk, 2, i, at);
  T v = load_in<T>(p.walk.dtype[0], p.walk.data[0], at[0]);
  if (p.biased) v += load_in<T>(p.walk.dtype[1], p.walk.data[1], at[1]);
  if (p.relu) v = v < 0 ? T(0) : v;
  store_in<T>(p.walk.dtype[0], p.walk.data[0], at[0], v);
}

int bias_launch(const OpCall *c, const Conv *v) {
  static const int plain[] = {3, 2, 1, 0}, channels_last[] = {1, 3, 2, 0};
  int64_t stride[4], one[4] = {0, 1, 0, 0}, step = 1;
  BiasParams p = {};
  for (int k = 0; k < 4; k++) {
    int d = v->last ? channels_last[k] : plain[k];
    stride[d] = step;
    step *= v->y_shape[d];
  }
  View y = {}, bias;
  y.data = v->y, y.shape = v->y_shape, y.stride = stride, y.ndim = 4, y.dtype = (uint8_t)v->dtype;
  bias = y;
  bias.stride = one;
  if (v->bias) bias.data = (void *)v->bias;
  walk_init(&p.walk, &y, 1, &bias);
  p.biased = v->bias, p.relu = v->act == VENDOR_ACT_RELU;
  if (!p.walk.numel) return 0;
  unsigned grid = grid_for(p.walk.numel, ACT_BLOCK);
  if (y.dtype == F64) return LAUNCH(c, bias_kernel<double>, grid, ACT_BLOCK, 0, p);
  return LAUNCH(c, bias_kernel<float>, grid, ACT_BLOCK, 0, p);
}

bool vendor_tf32(void) {
  const char *text = getenv("MF_TF32");
  return text && text[0] == '1';
}
