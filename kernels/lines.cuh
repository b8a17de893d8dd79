/* Ops along some dims: every line of the operands along them goes through one body. An operand may
 * have any strides, and may be broadcast along the line or across lines, as weights are.
 *
 * A line is a warp's, or a block's when it is long, whose threads take neighbouring elements; where
 * lines lie side by side in memory instead (softmax over channels), each thread has one, and
 * threads of a warp take neighbouring lines. A body reads its line more than once: the second time
 * it comes from a cache unless the line is very long. */
#ifndef MF_LINES_CUH
#define MF_LINES_CUH
#include "kernel.cuh"

enum { LINE_OPERANDS = 6, LINE_BLOCK = 256, LINE_SHORT = 1024 };

struct LineParams {
  Walk<LINE_OPERANDS> outer, inner; /* over lines, and from there along one */
  int n;                            /* operands */
  bool absent[LINE_OPERANDS];
};

/* Operand 0 has all dims, those of `mask` along the line; others are broadcast to it. An absent one
 * must not be read. */
static void lines_init(LineParams *p, uint32_t mask, int n, const View *const *views) {
  static const int64_t zeros[MF_MAX_DIMS] = {0};
  const View *like = views[0];
  View outer[LINE_OPERANDS], inner[LINE_OPERANDS];
  int64_t shape[2][MF_MAX_DIMS], stride[LINE_OPERANDS][2][MF_MAX_DIMS], step[MF_MAX_DIMS];
  int ndim[2] = {0, 0};
  for (int k = 0; k < n; k++) {
    const View *v = views[k];
    p->absent[k] = view_absent(v);
    if (p->absent[k]) memcpy(step, zeros, sizeof step);
    else shape_broadcast_strides(like->ndim, like->shape, v->ndim, v->shape, v->stride, step);
    ndim[0] = ndim[1] = 0;
    for (int d = 0; d < like->ndim; d++) {
      int side = mask >> d & 1;
      shape[side][ndim[side]] = like->shape[d];
      stride[k][side][ndim[side]++] = step[d];
    }
    outer[k] = inner[k] = *v;
    outer[k].shape = shape[0], outer[k].stride = stride[k][0];
    inner[k].shape = shape[1], inner[k].stride = stride[k][1];
  }
  for (int k = 0; k < n; k++) outer[k].ndim = (int8_t)ndim[0], inner[k].ndim = (int8_t)ndim[1];
  p->n = n;
  walk_init(&p->outer, &outer[0], n - 1, &outer[1]);
  walk_init(&p->inner, &inner[0], n - 1, &inner[1]);
}

/* A thread's view of its line, in compute type T: it is thread t of W. */
template <class T, int W>
struct Line {
  const LineParams &p;
  enum { width = W };
  int64_t at[LINE_OPERANDS], index, n;
  int t;
  T *room; /* of a block */

  __device__ int64_t place(int k, int64_t i) const {
    if (p.inner.ndim == 1) return at[k] + i * p.inner.step[k][0];
    int64_t inside = 0;
    for (int d = p.inner.ndim - 1; d >= 0; d--) {
      int64_t index;
      i = walk_divide(i, p.inner.shape[d], p.inner.inverse[d], &index);
      inside += index * p.inner.step[k][d];
    }
    return at[k] + inside;
  }
  /* Of a float operand where T is float; get_any: of any. */
  __device__ T get(int k, int64_t i) const {
    return load_in<T>(p.outer.dtype[k], p.outer.data[k], place(k, i));
  }
  __device__ T get_any(int k, int64_t i) const {
    return load_as<T>(p.outer.dtype[k], p.outer.data[k], place(k, i));
  }
  __device__ void put(int k, int64_t i, T v) const {
    store_in<T>(p.outer.dtype[k], p.outer.data[k], place(k, i), v);
  }
  template <class F>
  __device__ T all(T v) const {
    if (W == 1) return v;
    return W == WARP ? warp_reduce<F>(v) : block_reduce<F>(v, room);
  }
  template <class F, class V>
  __device__ V all_of(V v) const {
    if (W == 1) return v;
    return W == WARP ? warp_reduce<F>(v) : block_reduce<F>(v, (V *)(void *)room);
  }
  __device__ T sum(T v) const {
    return all<OpAdd>(v);
  }
};

template <class B, int W>
static __global__ void __launch_bounds__(LINE_BLOCK)
    lines_kernel(const __grid_constant__ LineParams p, typename B::Args a) {
  typedef typename B::T T;
  __shared__ __align__(16) T room[WARP];
  int64_t index = (int64_t)blockIdx.x * (LINE_BLOCK / W) + threadIdx.x / W;
  if (index >= p.outer.numel) return; /* all of a warp, or of a block, unless each is alone */
  Line<T, W> line = {p, {}, index, p.inner.numel, (int)threadIdx.x % W, room};
  walk_at(p.outer, p.n, index, line.at);
  B::run(line, a);
}

template <class B>
static int lines_launch(const OpCall *c, const LineParams *p, const typename B::Args &a) {
  int64_t lines = p->outer.numel, n = p->inner.numel;
  int inner = p->outer.ndim - 1;
  if (!lines || !n) return 0;
  bool aside = inner >= 0 && lines >= LINE_SHORT && p->inner.ndim && p->outer.step[0][inner] == 1 &&
               p->inner.step[0][p->inner.ndim - 1] != 1;
  if (aside)
    return LAUNCH(c, (lines_kernel<B, 1>), grid_for(lines, LINE_BLOCK), LINE_BLOCK, 0, *p, a);
  if (n <= LINE_SHORT)
    return LAUNCH(c, (lines_kernel<B, WARP>), grid_for(lines, LINE_BLOCK / WARP), LINE_BLOCK, 0, *p,
                  a);
  return LAUNCH(c, (lines_kernel<B, LINE_BLOCK>), grid_for(lines, 1), LINE_BLOCK, 0, *p, a);
}

#endif
