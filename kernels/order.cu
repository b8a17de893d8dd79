/* Order along a dim: the largest and smallest with their places, sort, topk; running sums and
 * products. NaN counts as larger than every number, and equal values keep their order: see
 * src/op/order.c. Sorting is by unsigned keys in the order of the values, which a vendor's function
 * sorts together with the places. Bytes: largest and smallest x; running sums x and y; sorting the
 * keys and places, 16 bytes an element, once a digit. */
#include "lines.cuh"
#include "vendor.h"

/* Views of an output with the reduced dim put back as size 1. */
struct Kept {
  View view;
  int64_t shape[MF_MAX_DIMS], stride[MF_MAX_DIMS];
};

static void keep_dim(Kept *k, const View *y, int ndim, int dim) {
  k->view = *y;
  if (y->ndim == ndim) return;
  for (int d = 0, at = 0; d < ndim; d++) {
    k->shape[d] = d == dim ? 1 : y->shape[at];
    k->stride[d] = d == dim ? 0 : y->stride[at];
    at += d != dim;
  }
  k->view.shape = k->shape;
  k->view.stride = k->stride;
  k->view.ndim = (int8_t)ndim;
}

static uint32_t line_mask(const View *x, int64_t dim) {
  return x->ndim ? 1u << dim : 0;
}

/* -- The largest and the smallest -------------------------------------------------------------- */

struct OrderArgs {
  bool smallest;
};

/* Operands x, value, index. */
template <class U>
struct Choose {
  typedef U T;
  typedef OrderArgs Args;
  template <class L>
  static __device__ void run(const L &l, const Args &a) {
    T best = l.get(0, l.t < l.n ? l.t : 0);
    for (int64_t i = l.t; i < l.n; i += l.width) {
      T v = l.get(0, i);
      best = a.smallest ? OpMin::of(best, v) : OpMax::of(best, v);
      if (v != v) best = v;
    }
    best = a.smallest ? l.template all<OpMin>(best) : l.template all<OpMax>(best);
    bool nan = best != best;
    int64_t at = INT64_MAX;
    for (int64_t i = l.t; i < l.n && at == INT64_MAX; i += l.width) {
      T v = l.get(0, i);
      if (nan ? v != v : v == best) at = i;
    }
    at = l.template all_of<OpMin>(at);
    if (l.t) return;
    l.put(1, 0, l.get(0, at));
    ((int64_t *)l.p.outer.data[2])[l.at[2]] = at;
  }
};

static int choose(const OpCall *c, int64_t dim, bool smallest) {
  const View *x = &c->in[0];
  Kept kept[2];
  LineParams p;
  for (int k = 0; k < 2; k++) keep_dim(&kept[k], &c->out[k], x->ndim, (int)dim);
  const View *views[] = {x, &kept[0].view, &kept[1].view};
  lines_init(&p, line_mask(x, dim), 3, views);
  OrderArgs a = {smallest};
  switch (block_class((DType)x->dtype)) {
    case PW_F32: return lines_launch<Choose<float>>(c, &p, a);
    case PW_F64: return lines_launch<Choose<double>>(c, &p, a);
    default: return lines_launch<Choose<int64_t>>(c, &p, a);
  }
}

static int max_dim_cuda(const OpCall *c) {
  return choose(c, ((const struct max_dim_args *)c->args)->dim, false);
}
KERNEL(max_dim, max_dim_cuda)
static int min_dim_cuda(const OpCall *c) {
  return choose(c, ((const struct min_dim_args *)c->args)->dim, true);
}
KERNEL(min_dim, min_dim_cuda)

/* -- Running sums and products ----------------------------------------------------------------- */

/* What is carried along a line: a number, joined by + or *, or a step s -> a + b s. */
template <class T>
struct ScanSum {
  T v;
  static __device__ ScanSum none() {
    return ScanSum{T(0)};
  }
  __device__ ScanSum behind(ScanSum before) const {
    return ScanSum{(T)(before.v + v)};
  }
};
template <class T>
struct ScanProduct {
  T v;
  static __device__ ScanProduct none() {
    return ScanProduct{T(1)};
  }
  __device__ ScanProduct behind(ScanProduct before) const {
    return ScanProduct{(T)(before.v * v)};
  }
};
struct ScanStep {
  double a, b;
  static __device__ ScanStep none() {
    return ScanStep{0, 1};
  }
  __device__ ScanStep behind(ScanStep before) const {
    return ScanStep{a + b * before.a, b * before.b};
  }
};

template <class S>
static __device__ __forceinline__ S scan_shift(S s, unsigned by) {
  static_assert(sizeof(S) % 4 == 0, "it is whole words");
  uint32_t word[sizeof(S) / 4];
  memcpy(word, &s, sizeof s);
#pragma unroll
  for (int k = 0; k < (int)(sizeof(S) / 4); k++) word[k] = __shfl_up_sync(ALL_LANES, word[k], by);
  memcpy(&s, word, sizeof s);
  return s;
}

/* s joined with those of all threads before and with `carry`, which then is for the next threads.
 */
template <class L, class S>
static __device__ __forceinline__ S scan_line(const L &l, S s, S *carry) {
  if (L::width == 1) return *carry = s.behind(*carry);
  unsigned lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  for (unsigned by = 1; by < WARP; by *= 2) {
    S before = scan_shift(s, by);
    if (lane >= by) s = s.behind(before);
  }
  S *room = (S *)l.room;
  static_assert(sizeof(S) * (LINE_BLOCK / WARP) <= WARP * sizeof(float), "the room is too small");
  if ((int)L::width == WARP) {
    s = s.behind(*carry);
    S last = s;
    uint32_t word[sizeof(S) / 4];
    memcpy(word, &last, sizeof last);
    for (int k = 0; k < (int)(sizeof(S) / 4); k++)
      word[k] = __shfl_sync(ALL_LANES, word[k], WARP - 1);
    memcpy(carry, word, sizeof last);
    return s;
  }
  __syncthreads();
  if (lane == WARP - 1) room[warp] = s;
  __syncthreads();
  S before = *carry, all = *carry;
  for (unsigned w = 0; w < LINE_BLOCK / WARP; w++) {
    if (w == warp) before = all;
    all = room[w].behind(all);
  }
  *carry = all;
  return s.behind(before);
}

/* Operands y, x. */
template <class U, class S, class A>
struct Running {
  typedef U T;
  typedef OrderArgs Args;
  template <class L>
  static __device__ void run(const L &l, const Args &) {
    S carry = S::none();
    for (int64_t base = 0; base < l.n; base += l.width) {
      int64_t i = base + l.t;
      S s = i < l.n ? S{(A)l.get_any(1, i)} : S::none();
      s = scan_line(l, s, &carry);
      if (i < l.n) l.put(0, i, (T)s.v);
    }
  }
};

template <template <class> class S>
static int running(const OpCall *c, int64_t dim) {
  const View *y = &c->out[0], *views[] = {y, &c->in[0]};
  LineParams p;
  lines_init(&p, line_mask(y, dim), 2, views);
  OrderArgs a = {false};
  switch (block_class((DType)y->dtype)) {
    case PW_F32: return lines_launch<Running<float, S<double>, double>>(c, &p, a);
    case PW_F64: return lines_launch<Running<double, S<double>, double>>(c, &p, a);
    default: return lines_launch<Running<int64_t, S<int64_t>, int64_t>>(c, &p, a);
  }
}

static int cumsum_cuda(const OpCall *c) {
  return running<ScanSum>(c, ((const struct cumsum_args *)c->args)->dim);
}
KERNEL(cumsum, cumsum_cuda)
static int cumprod_cuda(const OpCall *c) {
  return running<ScanProduct>(c, ((const struct cumprod_args *)c->args)->dim);
}
KERNEL(cumprod, cumprod_cuda)

/* Operands dx, g, x: dx[k] = product(x[0 .. k - 1]) s[k] with s[k] = g[k] + x[k + 1] s[k + 1]. s is
 * kept in dx between the two passes. */
template <class U>
struct CumprodBackward {
  typedef U T;
  typedef OrderArgs Args;
  template <class L>
  static __device__ void run(const L &l, const Args &) {
    ScanStep carry = ScanStep::none();
    for (int64_t base = 0; base < l.n; base += l.width) {
      int64_t i = l.n - 1 - base - l.t;
      ScanStep s = ScanStep::none();
      if (i >= 0) s = ScanStep{(double)l.get(1, i), i + 1 < l.n ? (double)l.get(2, i + 1) : 0};
      s = scan_line(l, s, &carry);
      if (i >= 0) l.put(0, i, (T)s.a);
    }
    if ((int)L::width == (int)LINE_BLOCK) __syncthreads();
    else if ((int)L::width == WARP) __syncwarp();
    ScanProduct<double> before = ScanProduct<double>::none();
    for (int64_t base = 0; base < l.n; base += l.width) {
      int64_t i = base + l.t;
      ScanProduct<double> f = ScanProduct<double>::none();
      if (i && i < l.n) f.v = (double)l.get(2, i - 1);
      f = scan_line(l, f, &before);
      if (i < l.n) l.put(0, i, (T)((double)l.get(0, i) * f.v));
    }
  }
};

static int cumprod_backward_cuda(const OpCall *c) {
  const View *dx = &c->out[0], *views[] = {dx, &c->in[0], &c->in[1]};
  LineParams p;
  OrderArgs a = {false};
  lines_init(&p, line_mask(dx, ((const struct cumprod_backward_args *)c->args)->dim), 3, views);
  return dx->dtype == F64 ? lines_launch<CumprodBackward<double>>(c, &p, a)
                          : lines_launch<CumprodBackward<float>>(c, &p, a);
}
KERNEL(cumprod_backward, cumprod_backward_cuda)

/* -- Sorting ----------------------------------------------------------------------------------- */

struct SortParams {
  Walk<1> x;        /* lines one behind the other, each along its dim */
  Walk<2> out;      /* values and places likewise */
  int64_t n, count; /* elements of a line, and how many of them are wanted */
  int size;         /* bytes of one */
  uint64_t *keys;
  int64_t *places;
  bool down;
};

/* In the order of the values: NaN last, -0 as 0. */
static __device__ __forceinline__ uint64_t sort_key(const SortParams &p, int64_t at) {
  int t = p.x.dtype[0];
  uint64_t bits;
  if (t != F16 && t != BF16 && t != F32 && t != F64)
    return (uint64_t)load_as<int64_t>(t, p.x.data[0], at) ^ (uint64_t)1 << 63;
  double v = load_as<double>(t, p.x.data[0], at) + 0.0;
  if (v != v) return UINT64_MAX;
  memcpy(&bits, &v, sizeof v);
  return bits >> 63 ? ~bits : bits | (uint64_t)1 << 63;
}

static __global__ void __launch_bounds__(LINE_BLOCK)
    sort_keys(const __grid_constant__ SortParams p) {
  int64_t i = (int64_t)blockIdx.x * LINE_BLOCK + threadIdx.x, at[1];
  if (i >= p.x.numel) return;
  walk_at(p.x, 1, i, at);
  uint64_t key = sort_key(p, at[0]);
  p.keys[i] = p.down ? ~key : key;
  p.places[i] = i % p.n;
}

static __global__ void __launch_bounds__(LINE_BLOCK)
    sort_put(const __grid_constant__ SortParams p) {
  int64_t i = (int64_t)blockIdx.x * LINE_BLOCK + threadIdx.x, from[1], at[2];
  if (i >= p.out.numel) return;
  int64_t line = i / p.count, place = p.places[line * p.n + i % p.count];
  walk_at(p.x, 1, line * p.n + place, from);
  walk_at(p.out, 2, i, at);
  move_element(p.size, p.out.data[0], at[0], p.x.data[0], from[0]);
  ((int64_t *)p.out.data[1])[at[1]] = place;
}

/* v with `dim` last. */
struct DimLast {
  View view;
  int64_t shape[MF_MAX_DIMS], stride[MF_MAX_DIMS];
};
static void dim_last(DimLast *r, const View *v, int64_t dim) {
  int to = 0;
  for (int d = 0; d < v->ndim; d++)
    if (d != dim) r->shape[to] = v->shape[d], r->stride[to++] = v->stride[d];
  if (v->ndim) r->shape[to] = v->shape[dim], r->stride[to] = v->stride[dim];
  r->view = *v;
  r->view.shape = r->shape, r->view.stride = r->stride;
}

static int sort_run(const OpCall *c, int64_t dim, int64_t count, bool down) {
  DimLast x, v, id;
  SortParams p = {};
  dim_last(&x, &c->in[0], dim);
  dim_last(&v, &c->out[0], dim);
  dim_last(&id, &c->out[1], dim);
  walk_plain(&p.x, &x.view, 0, (const View *)NULL);
  walk_plain(&p.out, &v.view, 1, &id.view);
  p.n = c->in[0].ndim ? c->in[0].shape[dim] : 1;
  p.count = count;
  p.size = (int)dtype_size((DType)c->in[0].dtype);
  p.down = down;
  if (!p.x.numel || !p.out.numel) return 0;
  size_t bytes = scratch_aligned((size_t)p.x.numel * 8);
  char *room = (char *)kernel_scratch(c, 2 * bytes);
  if (!room) return MF_ENOMEM;
  p.keys = (uint64_t *)room;
  p.places = (int64_t *)(room + bytes);
  int rc = LAUNCH(c, sort_keys, grid_for(p.x.numel, LINE_BLOCK), LINE_BLOCK, 0, p);
  if (!rc) rc = vendor_sort(c, p.x.numel / p.n, p.n, p.keys, p.places);
  return rc ? rc : LAUNCH(c, sort_put, grid_for(p.out.numel, LINE_BLOCK), LINE_BLOCK, 0, p);
}

static int sort_cuda(const OpCall *c) {
  const struct sort_args *a = (const struct sort_args *)c->args;
  int64_t n = c->in[0].ndim ? c->in[0].shape[a->dim] : 1;
  return sort_run(c, a->dim, n, a->descending);
}
KERNEL(sort, sort_cuda)

static int topk_cuda(const OpCall *c) {
  const struct topk_args *a = (const struct topk_args *)c->args;
  return sort_run(c, a->dim, a->k, a->largest);
}
KERNEL(topk, topk_cuda)
