/* Operands of any strides, walked together. */
#ifndef MF_WALK_CUH
#define MF_WALK_CUH
#include "launch.cuh"

/* The operands of a launch over one shape, dims in the order of operand 0's memory and merged where
 * all allow it. Operand 0 is the output. */
template <int N>
struct Walk {
  int ndim;
  int64_t numel;
  int64_t shape[MF_MAX_DIMS];
  double inverse[MF_MAX_DIMS]; /* of shape */
  int64_t step[N][MF_MAX_DIMS];
  void *data[N];
  uint8_t dtype[N];
};

template <int N>
static void walk_swap(Walk<N> *w, int n, int a, int b) {
  int64_t t = w->shape[a];
  w->shape[a] = w->shape[b], w->shape[b] = t;
  for (int k = 0; k < n; k++) t = w->step[k][a], w->step[k][a] = w->step[k][b], w->step[k][b] = t;
}

template <int N>
static void walk_invert(Walk<N> *w) {
  for (int d = 0; d < w->ndim; d++) w->inverse[d] = w->shape[d] ? 1.0 / (double)w->shape[d] : 0;
}

/* Operands 1 .. n - 1 are in[0 .. n - 2], broadcast to `out`. */
template <int N>
static void walk_init(Walk<N> *w, const View *out, int n_in, const View *in) {
  int n = n_in + 1, last = 0;
  w->ndim = out->ndim;
  w->numel = view_numel(out);
  for (int d = 0; d < out->ndim; d++) w->shape[d] = out->shape[d];
  for (int k = 0; k < n; k++) {
    const View *v = k ? &in[k - 1] : out;
    w->data[k] = v->data;
    w->dtype[k] = v->dtype;
    shape_broadcast_strides(out->ndim, out->shape, v->ndim, v->shape, v->stride, w->step[k]);
  }
  for (int i = 1; i < w->ndim; i++)
    for (int j = i; j > 0 && w->step[0][j - 1] < w->step[0][j]; j--) walk_swap(w, n, j - 1, j);
  for (int d = 0; d < w->ndim; d++) {
    if (w->shape[d] == 1) continue;
    bool merge = last > 0;
    for (int k = 0; k < n && merge; k++)
      merge = w->step[k][last - 1] == w->step[k][d] * w->shape[d];
    int at = merge ? last - 1 : last++;
    w->shape[at] = merge ? w->shape[at] * w->shape[d] : w->shape[d];
    for (int k = 0; k < n; k++) w->step[k][at] = w->step[k][d];
  }
  w->ndim = last;
  walk_invert(w);
}

template <int N>
static bool walk_is_flat(const Walk<N> *w, int k) {
  int64_t step = 1;
  for (int d = w->ndim - 1; d >= 0; d--) {
    if (w->step[k][d] != step) return false;
    step *= w->shape[d];
  }
  return true;
}
template <int N>
static bool walk_is_constant(const Walk<N> *w, int k) {
  for (int d = 0; d < w->ndim; d++)
    if (w->step[k][d]) return false;
  return true;
}

/* i / size and the rest, for i below 2^53: a division of 64-bit numbers would be a call. */
static __device__ __forceinline__ int64_t walk_divide(int64_t i, int64_t size, double inverse,
                                                      int64_t *rest) {
  int64_t q = (int64_t)((double)i * inverse), r = i - q * size;
  if (r < 0) q--, r += size;
  if (r >= size) q++, r -= size;
  *rest = r;
  return q;
}

/* Where element i of the walk lies in each of n operands: at has as many. */
template <int N>
static __device__ __forceinline__ void walk_at(const Walk<N> &w, int n, int64_t i, int64_t *at) {
#pragma unroll
  for (int k = 0; k < N; k++)
    if (k < n) at[k] = 0;
  if (w.numel <= 0x7fffffff) {
    unsigned rest = (unsigned)i;
    for (int d = w.ndim - 1; d >= 0; d--) {
      unsigned size = (unsigned)w.shape[d], index = d ? rest % size : rest;
      rest = d ? rest / size : 0;
#pragma unroll
      for (int k = 0; k < N; k++)
        if (k < n) at[k] += (int64_t)index * w.step[k][d];
    }
    return;
  }
  for (int d = w.ndim - 1; d >= 0; d--) {
    int64_t index = i;
    if (d) i = walk_divide(i, w.shape[d], w.inverse[d], &index);
#pragma unroll
    for (int k = 0; k < N; k++)
      if (k < n) at[k] += index * w.step[k][d];
  }
}

/* The same operands with the dims as they are, in the order of `out`. */
template <int N>
static void walk_plain(Walk<N> *w, const View *out, int n_in, const View *in) {
  w->ndim = out->ndim;
  w->numel = view_numel(out);
  for (int d = 0; d < out->ndim; d++) w->shape[d] = out->shape[d];
  for (int k = 0; k <= n_in; k++) {
    const View *v = k ? &in[k - 1] : out;
    w->data[k] = v->data;
    w->dtype[k] = v->dtype;
    shape_broadcast_strides(out->ndim, out->shape, v->ndim, v->shape, v->stride, w->step[k]);
  }
  walk_invert(w);
}

#endif
