/* Reductions over dims to one value. A functor says what elements become and how two parts join;
 * three ways of dividing the work serve all of them. Bytes: those of x.
 *
 * Where x lies contiguously along the reduced dims, an output is a warp's, or a block's when it is
 * long, and its threads read 16 bytes at a time. Elsewhere a block takes 32 neighbouring outputs
 * and its 8 warps share the rows, so that reads of neighbours are one. When there are few outputs,
 * parts of each are folded by blocks of their own into scratch, and joined by a second kernel: in a
 * fixed order, so that results do not differ from run to run. */
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

/* Parts begin at multiples of 16 elements, so that rows that are aligned stay so. */
static __device__ __forceinline__ void fold_part(const FoldParams &p, int part, int64_t *begin,
                                                 int64_t *end) {
  int64_t each = ((p.count + p.parts - 1) / p.parts + 15) & ~(int64_t)15;
  *begin = part * each;
  *end = *begin + each < p.count ? *begin + each : p.count;
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
#define ROW(S) fold_row<F>(a, (const S *)p.inner.data[0] + at[1], begin, end, t, WIDTH, p);
    DTYPE_CASES(p.inner.dtype[0], ROW)
#undef ROW
  } else {
    for (int64_t r = begin + t; r < end; r += WIDTH) {
      walk_at(p.inner, 1, r, i);
      F::add(a, load_as<T>(p.inner.dtype[0], p.inner.data[0], at[1] + i[0]), p);
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
    F::add(a, load_as<T>(p.inner.dtype[0], p.inner.data[0], at[1] + i[0]), p);
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

/* x reduced over the dims of `mask` to y, whose step for each dim of x is step[d]. */
static void fold_init(FoldParams *p, const View *x, const View *y, uint32_t mask,
                      const int64_t *step) {
  int64_t kept[MF_MAX_DIMS], gone[MF_MAX_DIMS], sy[MF_MAX_DIMS], sx[MF_MAX_DIMS], si[MF_MAX_DIMS];
  int n = 0, m = 0;
  for (int d = 0; d < x->ndim; d++) {
    if (mask >> d & 1) gone[m] = x->shape[d], si[m++] = x->stride[d];
    else kept[n] = x->shape[d], sy[n] = step[d], sx[n++] = x->stride[d];
  }
  View out = *y, from = *x, inner = *x;
  out.ndim = from.ndim = (int8_t)n, out.shape = from.shape = kept;
  out.stride = sy, from.stride = sx;
  inner.ndim = (int8_t)m, inner.shape = gone, inner.stride = si;
  walk_init(&p->outer, &out, 1, &from);
  walk_init(&p->inner, &inner, 0, (const View *)NULL);
  p->count = p->inner.numel;
  p->flat = walk_is_flat(&p->inner, 0);
  size_t size = dtype_size((DType)x->dtype);
  p->aligned = p->flat && (uintptr_t)x->data % 16 == 0;
  for (int d = 0; d < p->outer.ndim; d++)
    p->aligned &= p->outer.step[1][d] * (int64_t)size % 16 == 0;
}

template <class F>
static int fold_launch(const OpCall *c, FoldParams *p) {
  int64_t outputs = p->outer.numel;
  int inner = p->outer.ndim - 1;
  if (!outputs) return 0;
  bool columns = !p->flat && outputs >= WARP && inner >= 0 && p->outer.step[1][inner] == 1;
  bool shorts = !columns && p->count <= 1024;
  int64_t each = columns ? WARP : shorts ? FOLD_WARPS : 1, blocks = (outputs + each - 1) / each;
  int64_t parts = p->count / FOLD_LEAST;
  if (parts > FOLD_PARTS / blocks) parts = FOLD_PARTS / blocks;
  p->parts = parts > 1 ? (int)parts : 1;
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

static PointwiseClass reduced_class(DType x, DType y) {
  if (x == F64 || y == F64) return dtype_is_float(x) || dtype_is_float(y) ? PW_F64 : PW_I64;
  if (dtype_is_float(x)) return PW_F32;
  return dtype_is_float(y) ? PW_F64 : PW_I64;
}

static void reduce_init(FoldParams *p, const OpCall *c, const IntList *dims, bool keepdim) {
  const View *x = &c->in[0], *y = &c->out[0];
  int64_t step[MF_MAX_DIMS];
  uint32_t mask = 0;
  for (int i = 0; i < dims->n; i++) mask |= 1u << dims->v[i];
  for (int d = 0, k = 0; d < x->ndim; d++) {
    bool reduced = mask >> d & 1;
    step[d] = reduced ? 0 : y->stride[k];
    k += !reduced || keepdim;
  }
  *p = FoldParams{};
  fold_init(p, x, y, mask, step);
}

#define FOLD_FLOATS(F, cls) \
  (cls) == PW_F64 ? fold_launch<F<double>>(c, &p) : fold_launch<F<float>>(c, &p)
#define FOLD_ALL(F, cls) (cls) == PW_I64 ? fold_launch<F<int64_t>>(c, &p) : FOLD_FLOATS(F, cls)

/* -- The ops ----------------------------------------------------------------------------------- */

#define REDUCTION(name, F, FOLDS, class_of)                            \
  static int name##_cuda(const OpCall *c) {                            \
    const struct name##_args *a = (const struct name##_args *)c->args; \
    DType x = (DType)c->in[0].dtype, y = (DType)c->out[0].dtype;       \
    FoldParams p;                                                      \
    (void)x, (void)y;                                                  \
    reduce_init(&p, c, &a->dim, a->keepdim);                           \
    return FOLDS(F, class_of);                                         \
  }                                                                    \
  KERNEL(name, name##_cuda)
REDUCTION(sum, FoldSum, FOLD_ALL, reduced_class(x, y))
REDUCTION(mean, FoldMean, FOLD_FLOATS, reduced_class(x, y))
REDUCTION(prod, FoldProd, FOLD_ALL, reduced_class(x, y))
REDUCTION(amax, FoldMax, FOLD_ALL, reduced_class(x, y))
REDUCTION(amin, FoldMin, FOLD_ALL, reduced_class(x, y))
REDUCTION(any, FoldAny, FOLD_ALL, block_class(x))
REDUCTION(all, FoldAll, FOLD_ALL, block_class(x))
REDUCTION(count_nonzero, FoldCount, FOLD_ALL, block_class(x))
REDUCTION(logsumexp, FoldLogsumexp, FOLD_FLOATS, reduced_class(x, y))

static int norm_cuda(const OpCall *c) {
  const struct norm_args *a = (const struct norm_args *)c->args;
  PointwiseClass cls = reduced_class((DType)c->in[0].dtype, (DType)c->out[0].dtype);
  FoldParams p;
  reduce_init(&p, c, &a->dim, a->keepdim);
  p.p = a->p;
  if (a->p == 1) return FOLD_FLOATS(FoldAbs, cls);
  if (a->p == 2) return FOLD_FLOATS(FoldSquare, cls);
  if (a->p == 0) return FOLD_FLOATS(FoldTrue, cls);
  if (a->p == (double)INFINITY) return FOLD_FLOATS(FoldMaxAbs, cls);
  if (a->p == -(double)INFINITY) return FOLD_FLOATS(FoldMinAbs, cls);
  return FOLD_FLOATS(FoldPower, cls);
}
KERNEL(norm, norm_cuda)

template <class A>
static void var_init(FoldParams *p, const OpCall *c, const A *a) {
  reduce_init(p, c, &a->dim, a->keepdim);
  double d = (double)p->count - (a->has_correction ? a->correction : a->unbiased ? 1 : 0);
  p->divisor = d > 0 ? d : 0;
}

static int var_cuda(const OpCall *c) {
  FoldParams p;
  var_init(&p, c, (const struct var_args *)c->args);
  return FOLD_FLOATS(FoldVar, block_class((DType)c->in[0].dtype));
}
KERNEL(var, var_cuda)

static int std_cuda(const OpCall *c) {
  FoldParams p;
  var_init(&p, c, (const struct std_args *)c->args);
  return FOLD_FLOATS(FoldStd, block_class((DType)c->in[0].dtype));
}
KERNEL(std, std_cuda)

int reduce_all(const OpCall *c, const View *x, const View *y, bool mean) {
  static const int64_t none[MF_MAX_DIMS] = {0};
  PointwiseClass cls = reduced_class((DType)x->dtype, (DType)y->dtype);
  FoldParams p = {};
  fold_init(&p, x, y, (1u << x->ndim) - 1, none);
  if (mean) return FOLD_FLOATS(FoldMean, cls);
  return FOLD_ALL(FoldSum, cls);
}

/* y has fewer dims, or 1 where x is broadcast. */
static int sum_to_cuda(const OpCall *c) {
  const View *x = &c->in[0], *y = &c->out[0];
  int64_t step[MF_MAX_DIMS];
  uint32_t mask = 0;
  int shift = x->ndim - y->ndim;
  for (int d = 0; d < x->ndim; d++) {
    bool reduced = d < shift || (y->shape[d - shift] == 1 && x->shape[d] != 1);
    mask |= (uint32_t)reduced << d;
    step[d] = reduced ? 0 : y->stride[d - shift];
  }
  FoldParams p = {};
  fold_init(&p, x, y, mask, step);
  return FOLD_ALL(FoldSum, reduced_class((DType)x->dtype, (DType)y->dtype));
}
KERNEL(sum_to, sum_to_cuda)
