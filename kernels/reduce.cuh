/* How reductions are divided among threads: kernels, and their launch. See reduce.cu. */
#ifndef MF_REDUCE_CUH
#define MF_REDUCE_CUH
#include "fold.cuh"

enum { FOLD_BLOCK = 256, FOLD_WARPS = FOLD_BLOCK / WARP, FOLD_PARTS = 1024, FOLD_LEAST = 4096 };

/* An accumulator of another thread of the warp, word by word. */
template <class A>
static __device__ __forceinline__ A fold_shuffle(A a, int by) {
  static_assert(sizeof(A) % 4 == 0, "an accumulator is whole words");
  uint32_t word[sizeof(A) / 4];
  memcpy(word, &a, sizeof a);
#pragma unroll
  for (int k = 0; k < (int)(sizeof(A) / 4); k++)
    word[k] = (uint32_t)__shfl_xor_sync(ALL_LANES, (int)word[k], by);
  memcpy(&a, word, sizeof a);
  return a;
}
template <class F>
static __device__ __forceinline__ typename F::Acc fold_warp(typename F::Acc a) {
  for (int by = WARP / 2; by; by >>= 1) F::join(a, fold_shuffle(a, by));
  return a;
}

/* -- Kernels ----------------------------------------------------------------------------------- */

template <class F>
static __device__ void fold_put(const FoldParams &p, int64_t output, int part, bool is_part,
                                typename F::Acc total) {
  int64_t at[2];
  if (is_part) {
    ((typename F::Acc *)p.partial)[output * p.parts + part] = total;
    return;
  }
  walk_at(p.outer, 2, output, at);
  store_as(p.outer.dtype[0], p.outer.data[0], at[0], F::finish(total, p));
}

/* Elements begin .. end - 1 of a contiguous row at x, thread t of n. */
template <class F, class S>
static __device__ __forceinline__ void fold_row(typename F::Acc &a, const S *x, int64_t begin,
                                                int64_t end, int t, int n, const FoldParams &p) {
  typedef typename F::Value T;
  const int V = sizeof(S) < 16 ? 16 / sizeof(S) : 1;
  int64_t from = begin;
  if (p.aligned) {
    int64_t whole = begin + (end - begin) / V * V;
    for (int64_t i = begin + (int64_t)t * V; i < whole; i += (int64_t)n * V) {
      Pack<S, V> pack = pack_load<Pack<S, V>>(x + i);
#pragma unroll
      for (int j = 0; j < V; j++) F::add(a, element<T>(pack.at[j]), p);
    }
    from = whole;
  }
  for (int64_t i = from + t; i < end; i += n) F::add(a, element<T>(x[i]), p);
}

/* The dtypes that are computed in T, read in vectors; double is what other numbers are added up in
 * too, one by one. */
template <class T>
struct Flat {};
template <class F, int WIDTH, class S>
static __device__ __forceinline__ void fold_flat_of(typename F::Acc &a, const FoldParams &p,
                                                    int64_t at, int64_t begin, int64_t end, int t) {
  fold_row<F>(a, (const S *)p.inner.data[0] + at, begin, end, t, WIDTH, p);
}
template <class F, int WIDTH>
static __device__ __forceinline__ void fold_flat(Flat<float>, typename F::Acc &a,
                                                 const FoldParams &p, int64_t at, int64_t begin,
                                                 int64_t end, int t) {
  switch (p.inner.dtype[0]) {
    case F16: fold_flat_of<F, WIDTH, Half>(a, p, at, begin, end, t); break;
    case BF16: fold_flat_of<F, WIDTH, Bfloat>(a, p, at, begin, end, t); break;
    default: fold_flat_of<F, WIDTH, float>(a, p, at, begin, end, t); break;
  }
}
template <class F, int WIDTH>
static __device__ __forceinline__ void fold_flat(Flat<double>, typename F::Acc &a,
                                                 const FoldParams &p, int64_t at, int64_t begin,
                                                 int64_t end, int t) {
  if (p.inner.dtype[0] == F64) {
    fold_flat_of<F, WIDTH, double>(a, p, at, begin, end, t);
    return;
  }
  for (int64_t r = begin + t; r < end; r += WIDTH)
    F::add(a, load_as<double>(p.inner.dtype[0], p.inner.data[0], at + r), p);
}
template <class F, int WIDTH>
static __device__ __forceinline__ void fold_flat(Flat<int64_t>, typename F::Acc &a,
                                                 const FoldParams &p, int64_t at, int64_t begin,
                                                 int64_t end, int t) {
  switch (p.inner.dtype[0]) {
    case I64: fold_flat_of<F, WIDTH, int64_t>(a, p, at, begin, end, t); break;
    case I32: fold_flat_of<F, WIDTH, int32_t>(a, p, at, begin, end, t); break;
    case U8: fold_flat_of<F, WIDTH, uint8_t>(a, p, at, begin, end, t); break;
    case BOOL: fold_flat_of<F, WIDTH, Bool>(a, p, at, begin, end, t); break;
    default:
      for (int64_t r = begin + t; r < end; r += WIDTH)
        F::add(a, load_as<int64_t>(p.inner.dtype[0], p.inner.data[0], at + r), p);
  }
}

/* One element of x, of any dtype that is added up in T. */
template <class T>
static __device__ __forceinline__ T fold_load(const FoldParams &p, int64_t at) {
  return load_as<T>(p.inner.dtype[0], p.inner.data[0], at);
}
template <>
__device__ __forceinline__ float fold_load<float>(const FoldParams &p, int64_t at) {
  return load_in<float>(p.inner.dtype[0], p.inner.data[0], at);
}

static __device__ __forceinline__ void fold_part(const FoldParams &p, int part, int64_t *begin,
                                                 int64_t *end) {
  *begin = part * p.each;
  *end = *begin + p.each < p.count ? *begin + p.each : p.count;
}

/* Outputs along x of the grid, parts along y; WIDTH threads an output. */
template <class F, int WIDTH>
static __global__ void __launch_bounds__(FOLD_BLOCK)
    fold_rows(const __grid_constant__ FoldParams p) {
  typedef typename F::Value T;
  typedef typename F::Acc Acc;
  __shared__ __align__(16) unsigned char room[FOLD_WARPS * sizeof(Acc)];
  int t = threadIdx.x % WIDTH;
  int64_t output = (int64_t)blockIdx.x * (FOLD_BLOCK / WIDTH) + threadIdx.x / WIDTH;
  int64_t at[2] = {0, 0}, i[1], begin = 0, end = 0;
  Acc a = F::start();
  if (output < p.outer.numel) {
    walk_at(p.outer, 2, output, at);
    fold_part(p, (int)blockIdx.y, &begin, &end);
  }
  if (p.flat) {
    fold_flat<F, WIDTH>(Flat<T>(), a, p, at[1], begin, end, t);
  } else {
    for (int64_t r = begin + t; r < end; r += WIDTH) {
      walk_at(p.inner, 1, r, i);
      F::add(a, fold_load<T>(p, at[1] + i[0]), p);
    }
  }
  a = fold_warp<F>(a);
  if (WIDTH > WARP) {
    Acc *all = (Acc *)room;
    if (threadIdx.x % WARP == 0) all[threadIdx.x / WARP] = a;
    __syncthreads();
    for (int w = 1; w < FOLD_WARPS && !threadIdx.x; w++) F::join(a, all[w]);
  }
  if (!t && output < p.outer.numel) fold_put<F>(p, output, (int)blockIdx.y, p.parts > 1, a);
}

template <class F>
static __global__ void __launch_bounds__(FOLD_BLOCK)
    fold_columns(const __grid_constant__ FoldParams p) {
  typedef typename F::Value T;
  typedef typename F::Acc Acc;
  __shared__ __align__(16) unsigned char room[FOLD_BLOCK * sizeof(Acc)];
  Acc *all = (Acc *)room, a = F::start();
  int lane = threadIdx.x % WARP, row = threadIdx.x / WARP;
  int64_t output = (int64_t)blockIdx.x * WARP + lane, at[2] = {0, 0}, i[1], begin = 0, end = 0;
  if (output < p.outer.numel) {
    walk_at(p.outer, 2, output, at);
    fold_part(p, (int)blockIdx.y, &begin, &end);
  }
  for (int64_t r = begin + row; r < end; r += FOLD_WARPS) {
    walk_at(p.inner, 1, r, i);
    F::add(a, fold_load<T>(p, at[1] + i[0]), p);
  }
  all[threadIdx.x] = a;
  __syncthreads();
  if (row || output >= p.outer.numel) return;
  for (int w = 1; w < FOLD_WARPS; w++) F::join(a, all[w * WARP + lane]);
  fold_put<F>(p, output, (int)blockIdx.y, p.parts > 1, a);
}

/* The parts of an output, a warp each. */
template <class F>
static __global__ void __launch_bounds__(FOLD_BLOCK)
    fold_parts(const __grid_constant__ FoldParams p) {
  typedef typename F::Acc Acc;
  int64_t output = (int64_t)blockIdx.x * FOLD_WARPS + threadIdx.x / WARP;
  int lane = threadIdx.x % WARP, parts = p.parts;
  Acc a = F::start();
  if (output < p.outer.numel)
    for (int k = lane; k < parts; k += WARP)
      F::join(a, ((const Acc *)p.partial)[output * parts + k]);
  a = fold_warp<F>(a);
  if (!lane && output < p.outer.numel) fold_put<F>(p, output, 0, false, a);
}

/* -- Launch ------------------------------------------------------------------------------------ */

/* Each is compiled once, in parts/reduce.cu. */
template <class F>
int fold_launch(const OpCall *c, FoldParams *p) {
  int64_t outputs = p->outer.numel;
  int inner = p->outer.ndim - 1;
  if (!outputs) return 0;
  bool columns = !p->flat && outputs >= WARP && inner >= 0 && p->outer.step[1][inner] == 1;
  bool shorts = !columns && p->count <= 1024;
  int64_t each = columns ? WARP : shorts ? FOLD_WARPS : 1, blocks = (outputs + each - 1) / each;
  int64_t parts = p->count / FOLD_LEAST;
  if (parts > FOLD_PARTS / blocks) parts = FOLD_PARTS / blocks;
  p->parts = parts > 1 ? (int)parts : 1;
  p->each = ((p->count + p->parts - 1) / p->parts + 15) & ~(int64_t)15;
  if (p->parts > 1) {
    size_t bytes = (size_t)outputs * (size_t)p->parts * sizeof(typename F::Acc);
    if (!(p->partial = kernel_scratch(c, bytes))) return MF_ENOMEM;
  }
  dim3 grid(grid_for(outputs, each), (unsigned)p->parts);
  int rc = columns  ? LAUNCH(c, fold_columns<F>, grid, FOLD_BLOCK, 0, *p)
           : shorts ? LAUNCH(c, (fold_rows<F, WARP>), grid, FOLD_BLOCK, 0, *p)
                    : LAUNCH(c, (fold_rows<F, FOLD_BLOCK>), grid, FOLD_BLOCK, 0, *p);
  if (rc || p->parts == 1) return rc;
  return LAUNCH(c, fold_parts<F>, grid_for(outputs, FOLD_WARPS), FOLD_BLOCK, 0, *p);
}

#endif
