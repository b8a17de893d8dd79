/* The emulator's part of vendor.h: loops of the host, in the stream's turn. */
#include "vendor.h"

#include <algorithm>
#include <utility>
#include <vector>

template <class T>
static T act_of(VendorAct act, T v) {
  switch (act) {
    case VENDOR_ACT_RELU: return v < 0 ? T(0) : v;
    case VENDOR_ACT_GELU_TANH:
      return T(0.5) * v * (1 + tanh(T(0.7978845608028654) * (v + T(0.044715) * v * v * v)));
    default: return v;
  }
}

template <class S, class T>
static void gemm(const Gemm &g) {
  for (int64_t z = 0; z < g.batch; z++) {
    const S *a = (const S *)g.a + z * g.a_batch, *b = (const S *)g.b + z * g.b_batch;
    for (int64_t i = 0; i < g.m; i++)
      for (int64_t j = 0; j < g.n; j++) {
        T sum = T(0);
        int64_t at = z * g.c_batch + i * g.ldc + j;
        for (int64_t l = 0; l < g.k; l++)
          sum += element<T>(a[g.a_turned ? l * g.lda + i : i * g.lda + l]) *
                 element<T>(b[g.b_turned ? j * g.ldb + l : l * g.ldb + j]);
        sum *= (T)g.alpha;
        if (g.beta != 0) sum += (T)g.beta * load_as<T>(g.c_dtype, g.c, at);
        if (g.bias) sum += element<T>(((const S *)g.bias)[j]);
        store_as<T>(g.c_dtype, g.c, at, act_of(g.act, sum));
      }
  }
}

bool vendor_gemm_acts(int dtype, VendorAct act) {
  return dtype != F64 && (act == VENDOR_ACT_RELU || act == VENDOR_ACT_GELU_TANH);
}

int vendor_gemm(const OpCall *c, const Gemm *g) {
  Gemm copy = *g;
  cudaError_t e = emulate_enqueue(stream_handle(c->stream), [copy] {
    switch (copy.dtype) {
      case F16: gemm<Half, float>(copy); break;
      case BF16: gemm<Bfloat, float>(copy); break;
      case F64: gemm<double, double>(copy); break;
      default: gemm<float, float>(copy); break;
    }
  });
  return launch_result(c, e);
}

/* -- Convolution ------------------------------------------------------------------------------- */

/* Where (a, b, c, d) of an image of that shape lies. */
static int64_t place(const int64_t *shape, bool last, int64_t a, int64_t b, int64_t c, int64_t d) {
  if (last) return ((a * shape[2] + c) * shape[3] + d) * shape[1] + b;
  return ((a * shape[1] + b) * shape[2] + c) * shape[3] + d;
}

/* f(x, w, y) for all places that meet, o and i being the channels of y and of w. */
template <class F>
static void conv_places(const Conv &v, F f) {
  const int64_t *x = v.x_shape, *w = v.w_shape, *y = v.y_shape;
  int64_t each = y[1] / v.groups;
  for (int64_t n = 0; n < y[0]; n++)
    for (int64_t o = 0; o < y[1]; o++)
      for (int64_t i = 0; i < y[2]; i++)
        for (int64_t j = 0; j < y[3]; j++)
          for (int64_t a = 0; a < w[2]; a++)
            for (int64_t b = 0; b < w[3]; b++) {
              int64_t h = i * v.stride[0] - v.padding[0] + a * v.dilation[0],
                      k = j * v.stride[1] - v.padding[1] + b * v.dilation[1];
              if (h < 0 || h >= x[2] || k < 0 || k >= x[3]) continue;
              for (int64_t e = 0; e < w[1]; e++)
                f(place(x, v.last, n, o / each * w[1] + e, h, k), place(w, v.last, o, e, a, b),
                  place(y, v.last, n, o, i, j));
            }
}

static int64_t numel(const int64_t *shape) {
  return shape[0] * shape[1] * shape[2] * shape[3];
}

template <class S, class T>
static void conv(const Conv &v) {
  const S *x = (const S *)v.x, *w = (const S *)v.w, *y = (const S *)v.y;
  const int64_t *shapes[] = {v.x_shape, v.w_shape, v.y_shape}, *shape = shapes[v.kind];
  void *to[] = {v.x, v.w, v.y};
  std::vector<T> sum((size_t)numel(shape));
  conv_places(v, [&](int64_t xi, int64_t wi, int64_t yi) {
    if (v.kind == CONV_FORWARD) sum[(size_t)yi] += element<T>(x[xi]) * element<T>(w[wi]);
    else if (v.kind == CONV_INPUT) sum[(size_t)xi] += element<T>(y[yi]) * element<T>(w[wi]);
    else sum[(size_t)wi] += element<T>(y[yi]) * element<T>(x[xi]);
  });
  for (int64_t n = 0; n < shape[0]; n++)
    for (int64_t o = 0; o < shape[1]; o++)
      for (int64_t i = 0; i < shape[2] * shape[3]; i++) {
        int64_t at = place(shape, v.last, n, o, i / shape[3], i % shape[3]);
        T s = sum[(size_t)at];
        if (v.bias) s += element<T>(((const S *)v.bias)[o]);
        ((S *)to[v.kind])[at] = Stored<S>::of(act_of(v.act, s));
      }
}

int vendor_conv(const OpCall *c, const Conv *v) {
  Conv copy = *v;
  cudaError_t e = emulate_enqueue(stream_handle(c->stream), [copy] {
    switch (copy.dtype) {
      case F16: conv<Half, float>(copy); break;
      case BF16: conv<Bfloat, float>(copy); break;
      case F64: conv<double, double>(copy); break;
      default: conv<float, float>(copy); break;
    }
  });
  return launch_result(c, e);
}

/* -- Sorting and running sums ------------------------------------------------------------------ */

int vendor_sort(const OpCall *c, int64_t lines, int64_t n, uint64_t *keys, int64_t *places) {
  cudaError_t e = emulate_enqueue(stream_handle(c->stream), [=] {
    std::vector<std::pair<uint64_t, int64_t>> line((size_t)n);
    for (int64_t l = 0; l < lines; l++) {
      for (int64_t i = 0; i < n; i++) line[(size_t)i] = {keys[l * n + i], places[l * n + i]};
      std::stable_sort(line.begin(), line.end(),
                       [](const auto &a, const auto &b) { return a.first < b.first; });
      for (int64_t i = 0; i < n; i++)
        keys[l * n + i] = line[(size_t)i].first, places[l * n + i] = line[(size_t)i].second;
    }
  });
  return launch_result(c, e);
}

int vendor_running_sum(const OpCall *c, int64_t n, int64_t *v) {
  cudaError_t e = emulate_enqueue(stream_handle(c->stream), [=] {
    for (int64_t i = 1; i < n; i++) v[i] += v[i - 1];
  });
  return launch_result(c, e);
}
