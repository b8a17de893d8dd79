/* Pooling in two dims and its gradients: what is computed is said in src/op/pool.c. A thread an
 * element of the result. The gradients gather: an element of the image looks through the windows
 * that it is in, in order, so that no two threads write one place and sums have one order; of a
 * maximum each such window is searched again. Bytes: both images, where caches hold the windows. */
#include "kernel.cuh"

enum { POOL_BLOCK = 256 };
enum PoolMode { POOL_MAX, POOL_MEAN, POOL_MAX_BACK, POOL_MEAN_BACK, POOL_PICK };

/* One dim: output o covers the inputs from o * stride - padding, `kernel` of them, `dilation`
 * apart; or, adaptive, its share. */
struct PoolAxis {
  int64_t in, out, kernel, stride, padding, dilation;
  bool adaptive;
};

/* Images as (N, C, H, W). */
struct PoolImage {
  void *data;
  int64_t shape[4], stride[4];
};

struct PoolParams {
  PoolMode mode;
  bool include_pad, last; /* last: neighbouring threads have neighbouring channels */
  int64_t divisor, n;     /* 0: none; elements of the result */
  PoolAxis h, w;
  PoolImage x, v, y; /* x chooses, v is summed or picked, y is pooled */
  int dtype;
};

struct PoolSpan {
  int64_t from, to, count; /* count: as in the divisor */
};

static __device__ __forceinline__ PoolSpan pool_span(const PoolAxis &a, int64_t o,
                                                     bool include_pad) {
  PoolSpan s;
  if (a.adaptive) {
    s.from = o * a.in / a.out;
    s.to = ((o + 1) * a.in + a.out - 1) / a.out;
    s.count = s.to - s.from;
    return s;
  }
  s.from = o * a.stride - a.padding;
  s.to = s.from + (a.kernel - 1) * a.dilation + 1;
  if (s.to > a.in + a.padding) s.to = a.in + a.padding;
  s.count = s.to - s.from;
  if (s.from < 0) s.from += (-s.from + a.dilation - 1) / a.dilation * a.dilation;
  if (s.to > a.in) s.to = a.in;
  if (!include_pad) s.count = s.to - s.from;
  return s;
}

/* The outputs [first, last] among which are all whose windows hold input i. */
static __device__ __forceinline__ void pool_holders(const PoolAxis &a, int64_t i, int64_t *first,
                                                    int64_t *last) {
  if (a.adaptive) {
    *first = i * a.out / a.in - 1;
    *last = ((i + 1) * a.out + a.in - 1) / a.in;
  } else {
    int64_t back = i + a.padding - (a.kernel - 1) * a.dilation;
    *first = back <= 0 ? 0 : (back + a.stride - 1) / a.stride;
    *last = (i + a.padding) / a.stride;
  }
  if (*first < 0) *first = 0;
  if (*last > a.out - 1) *last = a.out - 1;
}
static __device__ __forceinline__ bool pool_holds(const PoolSpan &s, const PoolAxis &a, int64_t i) {
  return i >= s.from && i < s.to && (a.dilation == 1 || (i - s.from) % a.dilation == 0);
}

/* Where in the plane of x at `base` the window has its maximum: the first of equals, or the last
 * NaN; and the maximum. */
template <class T>
static __device__ int64_t pool_best(const PoolParams &p, int64_t base, const PoolSpan &h,
                                    const PoolSpan &w, T *best) {
  int64_t at = -1;
  for (int64_t i = h.from; i < h.to; i += p.h.dilation)
    for (int64_t j = w.from; j < w.to; j += p.w.dilation) {
      T v = load_as<T>(p.dtype, p.x.data, base + i * p.x.stride[2] + j * p.x.stride[3]);
      if (at >= 0 && !(v > *best) && v == v) continue;
      *best = v;
      at = i * p.w.in + j;
    }
  return at;
}

template <class T>
static __device__ T pool_scale(const PoolParams &p, const PoolSpan &h, const PoolSpan &w) {
  return (T)(1 / (p.divisor ? (double)p.divisor : (double)(h.count * w.count)));
}

/* The pooled element (i, j) of the planes at bx, bv. */
template <class T>
static __device__ T pool_forward(const PoolParams &p, int64_t bx, int64_t bv, int64_t i,
                                 int64_t j) {
  PoolSpan h = pool_span(p.h, i, p.include_pad), w = pool_span(p.w, j, p.include_pad);
  T best = T(0), sum = T(0);
  if (p.mode != POOL_MEAN) {
    int64_t at = pool_best(p, bx, h, w, &best);
    if (p.mode == POOL_MAX) return best;
    return load_as<T>(p.dtype, p.v.data,
                      bv + at / p.w.in * p.v.stride[2] + at % p.w.in * p.v.stride[3]);
  }
  for (int64_t a = h.from; a < h.to; a++)
    for (int64_t b = w.from; b < w.to; b++)
      sum += load_as<T>(p.dtype, p.v.data, bv + a * p.v.stride[2] + b * p.v.stride[3]);
  return sum * pool_scale<T>(p, h, w);
}

/* What the windows that hold (i, j) give it of the plane of y at `by`. */
template <class T>
static __device__ T pool_back(const PoolParams &p, int64_t bx, int64_t by, int64_t i, int64_t j) {
  int64_t h0, h1, w0, w1;
  T sum = T(0), best = T(0);
  pool_holders(p.h, i, &h0, &h1);
  pool_holders(p.w, j, &w0, &w1);
  for (int64_t a = h0; a <= h1; a++) {
    PoolSpan h = pool_span(p.h, a, p.include_pad);
    if (!pool_holds(h, p.h, i)) continue;
    for (int64_t b = w0; b <= w1; b++) {
      PoolSpan w = pool_span(p.w, b, p.include_pad);
      if (!pool_holds(w, p.w, j)) continue;
      T y = load_as<T>(p.dtype, p.y.data, by + a * p.y.stride[2] + b * p.y.stride[3]);
      if (p.mode == POOL_MEAN_BACK) sum += y * pool_scale<T>(p, h, w);
      else if (pool_best(p, bx, h, w, &best) == i * p.w.in + j) sum += y;
    }
  }
  return sum;
}

template <class T>
static __global__ void __launch_bounds__(POOL_BLOCK)
    pool_kernel(const __grid_constant__ PoolParams p) {
  int64_t i = (int64_t)blockIdx.x * POOL_BLOCK + threadIdx.x, at[4];
  bool back = p.mode == POOL_MAX_BACK || p.mode == POOL_MEAN_BACK;
  const PoolImage &to = back ? p.v : p.y;
  if (i >= p.n) return;
  int64_t channels = to.shape[1];
  if (p.last) at[1] = i % channels, i /= channels;
  at[3] = i % to.shape[3], i /= to.shape[3];
  at[2] = i % to.shape[2], i /= to.shape[2];
  if (!p.last) at[1] = i % channels, i /= channels;
  at[0] = i;
  int64_t bx = at[0] * p.x.stride[0] + at[1] * p.x.stride[1],
          bv = at[0] * p.v.stride[0] + at[1] * p.v.stride[1],
          by = at[0] * p.y.stride[0] + at[1] * p.y.stride[1];
  T v = back ? pool_back<T>(p, bx, by, at[2], at[3]) : pool_forward<T>(p, bx, bv, at[2], at[3]);
  store_as<T>(p.dtype, to.data, (back ? bv : by) + at[2] * to.stride[2] + at[3] * to.stride[3], v);
}

/* -- Launch ------------------------------------------------------------------------------------ */

static void pool_image(PoolImage *m, const View *v) {
  int add = v->ndim == 3;
  m->data = v->data;
  m->shape[0] = 1, m->stride[0] = 0;
  for (int d = 0; d < v->ndim; d++)
    m->shape[d + add] = v->shape[d], m->stride[d + add] = v->stride[d];
}

static PoolAxis pool_axis(const int64_t *kernel, const int64_t *stride, const int64_t *padding,
                          const int64_t *dilation, int k) {
  PoolAxis a = {0, 0, kernel[k], stride[k], padding[k], dilation[k], false};
  return a;
}

/* x may be NULL; y is the pooled image. */
static int pool_run(const OpCall *c, PoolParams *p, const View *x, const View *v, const View *y) {
  bool back = p->mode == POOL_MAX_BACK || p->mode == POOL_MEAN_BACK;
  if (x) pool_image(&p->x, x);
  if (v) pool_image(&p->v, v);
  pool_image(&p->y, y);
  const PoolImage *whole = v ? &p->v : &p->x, *to = back ? &p->v : &p->y;
  p->h.in = whole->shape[2], p->w.in = whole->shape[3];
  p->h.out = p->y.shape[2], p->w.out = p->y.shape[3];
  p->n = view_numel(back ? v : y);
  p->last = to->stride[1] < to->stride[3];
  p->dtype = y->dtype;
  if (!p->n) return 0;
  unsigned grid = grid_for(p->n, POOL_BLOCK);
  if (p->dtype == F64) return LAUNCH(c, pool_kernel<double>, grid, POOL_BLOCK, 0, *p);
  return LAUNCH(c, pool_kernel<float>, grid, POOL_BLOCK, 0, *p);
}

/* -- The ops ----------------------------------------------------------------------------------- */

static const int64_t pool_ones[2] = {1, 1};

template <class A>
static PoolParams max_params(const A *a, PoolMode mode) {
  PoolParams p = {};
  const int64_t *stride = a->has_stride ? a->stride : a->kernel_size;
  p.mode = mode;
  p.h = pool_axis(a->kernel_size, stride, a->padding, a->dilation, 0);
  p.w = pool_axis(a->kernel_size, stride, a->padding, a->dilation, 1);
  return p;
}
template <class A>
static PoolParams mean_params(const A *a, PoolMode mode) {
  PoolParams p = {};
  const int64_t *stride = a->has_stride ? a->stride : a->kernel_size;
  p.mode = mode;
  p.h = pool_axis(a->kernel_size, stride, a->padding, pool_ones, 0);
  p.w = pool_axis(a->kernel_size, stride, a->padding, pool_ones, 1);
  p.include_pad = a->count_include_pad;
  p.divisor = a->has_divisor_override ? a->divisor_override : 0;
  return p;
}
static PoolParams adaptive_params(PoolMode mode) {
  PoolParams p = {};
  p.mode = mode;
  p.h.adaptive = p.w.adaptive = true;
  p.h.dilation = p.w.dilation = 1;
  return p;
}

static int max_pool2d_cuda(const OpCall *c) {
  PoolParams p = max_params((const struct max_pool2d_args *)c->args, POOL_MAX);
  return pool_run(c, &p, &c->in[0], NULL, &c->out[0]);
}
KERNEL(max_pool2d, max_pool2d_cuda)

static int max_pool2d_backward_cuda(const OpCall *c) {
  PoolParams p = max_params((const struct max_pool2d_backward_args *)c->args, POOL_MAX_BACK);
  return pool_run(c, &p, &c->in[1], &c->out[0], &c->in[0]);
}
KERNEL(max_pool2d_backward, max_pool2d_backward_cuda)

static int max_pool2d_pick_cuda(const OpCall *c) {
  PoolParams p = max_params((const struct max_pool2d_pick_args *)c->args, POOL_PICK);
  return pool_run(c, &p, &c->in[1], &c->in[0], &c->out[0]);
}
KERNEL(max_pool2d_pick, max_pool2d_pick_cuda)

static int avg_pool2d_cuda(const OpCall *c) {
  PoolParams p = mean_params((const struct avg_pool2d_args *)c->args, POOL_MEAN);
  return pool_run(c, &p, NULL, &c->in[0], &c->out[0]);
}
KERNEL(avg_pool2d, avg_pool2d_cuda)

static int avg_pool2d_backward_cuda(const OpCall *c) {
  PoolParams p = mean_params((const struct avg_pool2d_backward_args *)c->args, POOL_MEAN_BACK);
  return pool_run(c, &p, NULL, &c->out[0], &c->in[0]);
}
KERNEL(avg_pool2d_backward, avg_pool2d_backward_cuda)

static int adaptive_avg_pool2d_cuda(const OpCall *c) {
  PoolParams p = adaptive_params(POOL_MEAN);
  return pool_run(c, &p, NULL, &c->in[0], &c->out[0]);
}
KERNEL(adaptive_avg_pool2d, adaptive_avg_pool2d_cuda)

static int adaptive_avg_pool2d_backward_cuda(const OpCall *c) {
  PoolParams p = adaptive_params(POOL_MEAN_BACK);
  return pool_run(c, &p, NULL, &c->out[0], &c->in[0]);
}
KERNEL(adaptive_avg_pool2d_backward, adaptive_avg_pool2d_backward_cuda)
