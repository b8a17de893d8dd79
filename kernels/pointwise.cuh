/* How a pointwise line becomes CUDA kernels: for pointwise.cu, which says more, and for losses. */
#ifndef MF_POINTWISE_CUH
#define MF_POINTWISE_CUH
#include "kernel.cuh"

enum { PW_OPERANDS = 6, PW_BLOCK = 256, PW_EACH = 8, PW_LOOSE = 4 };

enum PwKind { PW_FLAT, PW_CONSTANT, PW_HOST };

struct PwParams {
  Walk<PW_OPERANDS> walk;
  int n_in;
  bool wide;                   /* all flat operands are 16-bit */
  uint8_t kind[PW_OPERANDS];   /* of the first kernel */
  uint8_t number[PW_OPERANDS]; /* the operand is a value of the host */
  double f[PW_OPERANDS];       /* which is this */
  int64_t i[PW_OPERANDS];
};

/* What a line becomes: how to launch it. */
struct PwCall {
  const OpCall *call;
  PwParams params;
  bool vectors;
  int rc;
};

template <class T>
static __device__ __forceinline__ T pw_number(const PwParams &p, int k) {
  return (T)p.f[k];
}
template <>
__device__ __forceinline__ int64_t pw_number<int64_t>(const PwParams &p, int k) {
  return p.i[k];
}

/* Elements first .. first + N - 1 and behind + first ... of one operand, as vectors. */
template <class S, int N, class T>
static __device__ __forceinline__ void pw_take(const void *data, int64_t first, int64_t behind,
                                               T *v) {
  typedef Pack<S, N> P;
#pragma unroll
  for (int part = 0; part < PW_EACH / N; part++) {
    P pack = pack_load<P>((const S *)data + first + part * behind);
#pragma unroll
    for (int j = 0; j < N; j++) v[part * N + j] = element<T>(pack.at[j]);
  }
}
template <class S, int N, class T>
static __device__ __forceinline__ void pw_put(void *data, int64_t first, int64_t behind,
                                              const T *v) {
  typedef Pack<S, N> P;
#pragma unroll
  for (int part = 0; part < PW_EACH / N; part++) {
    P pack;
#pragma unroll
    for (int j = 0; j < N; j++) pack.at[j] = Stored<S>::of(v[part * N + j]);
    pack_store<P>((S *)data + first + part * behind, pack);
  }
}

/* The dtypes that the first kernel takes: one word of the compute type, halves, bytes. */
template <class T>
static __device__ __forceinline__ void pw_load(const PwParams &p, int k, int64_t first,
                                               int64_t behind, T *v) {
  const void *data = p.walk.data[k];
  switch (p.walk.dtype[k]) {
    case F16:
      if (p.wide) pw_take<Half, 8>(data, first, behind, v);
      else pw_take<Half, 4>(data, first, behind, v);
      break;
    case BF16:
      if (p.wide) pw_take<Bfloat, 8>(data, first, behind, v);
      else pw_take<Bfloat, 4>(data, first, behind, v);
      break;
    case BOOL: pw_take<Bool, 4>(data, first, behind, v); break;
    default: pw_take<T, 4>(data, first, behind, v); break;
  }
}
template <class T>
static __device__ __forceinline__ void pw_store(const PwParams &p, int64_t first, int64_t behind,
                                                const T *v) {
  void *data = p.walk.data[0];
  switch (p.walk.dtype[0]) {
    case F16:
      if (p.wide) pw_put<Half, 8>(data, first, behind, v);
      else pw_put<Half, 4>(data, first, behind, v);
      break;
    case BF16:
      if (p.wide) pw_put<Bfloat, 8>(data, first, behind, v);
      else pw_put<Bfloat, 4>(data, first, behind, v);
      break;
    case BOOL: pw_put<Bool, 4>(data, first, behind, v); break;
    default: pw_put<T, 4>(data, first, behind, v); break;
  }
}

template <class T>
static __device__ __forceinline__ T pw_single(const PwParams &p, int k) {
  return p.number[k] ? pw_number<T>(p, k) : load_as<T>(p.walk.dtype[k], p.walk.data[k], 0);
}

/* Whole vectors alone: the last PW_EACH * PW_BLOCK elements or fewer are the other kernel's. */
template <class F>
static __global__ void __launch_bounds__(PW_BLOCK)
    pw_vectors(const __grid_constant__ PwParams p, typename F::Args args) {
  typedef typename F::T T;
  T v[4][PW_EACH], y[PW_EACH];
  int64_t base = (int64_t)blockIdx.x * (PW_BLOCK * PW_EACH);
  int64_t first = base + threadIdx.x * (p.wide ? 8 : 4), behind = PW_BLOCK * 4;
#pragma unroll
  for (int k = 0; k < F::N; k++) {
    if (p.kind[k + 1] == PW_FLAT) {
      pw_load(p, k + 1, first, behind, v[k]);
    } else {
      T one = pw_single<T>(p, k + 1);
#pragma unroll
      for (int j = 0; j < PW_EACH; j++) v[k][j] = one;
    }
  }
#pragma unroll
  for (int j = 0; j < PW_EACH; j++) y[j] = (T)F::at(&args, &v[0][j], &v[1][j], &v[2][j], &v[3][j]);
  pw_store(p, first, behind, y);
}

template <class F>
static __global__ void __launch_bounds__(PW_BLOCK)
    pw_elements(const __grid_constant__ PwParams p, typename F::Args args, int64_t begin) {
  typedef typename F::T T;
  int64_t at[F::N + 1], i = begin + (int64_t)blockIdx.x * (PW_BLOCK * PW_LOOSE) + threadIdx.x;
  for (int step = 0; step < PW_LOOSE; step++, i += PW_BLOCK) {
    if (i >= p.walk.numel) return;
    T v[4];
    walk_at(p.walk, F::N + 1, i, at);
#pragma unroll
    for (int k = 0; k < F::N; k++)
      v[k] = p.number[k + 1] ? pw_number<T>(p, k + 1)
                             : load_as<T>(p.walk.dtype[k + 1], p.walk.data[k + 1], at[k + 1]);
    store_as<T>(p.walk.dtype[0], p.walk.data[0], at[0],
                (T)F::at(&args, &v[0], &v[1], &v[2], &v[3]));
  }
}

template <class F>
static void pw_launch(PwCall *c) {
  const OpCall *call = c->call;
  const typename F::Args *args = (const typename F::Args *)call->args;
  const PwParams &p = c->params;
  int64_t each = PW_BLOCK * PW_EACH, blocks = c->vectors ? p.walk.numel / each : 0;
  if (blocks > 0x7fffffff) blocks = 0;
  int64_t rest = p.walk.numel - blocks * each;
  c->rc = blocks ? LAUNCH(call, (pw_vectors<F>), (unsigned)blocks, PW_BLOCK, 0, p, *args) : 0;
  if (rest && !c->rc)
    c->rc = LAUNCH(call, (pw_elements<F>), grid_for(rest, PW_BLOCK * PW_LOOSE), PW_BLOCK, 0, p,
                   *args, blocks * each);
}

/* -- The call ---------------------------------------------------------------------------------- */

static bool pw_takes(const PwParams *p, int k, PointwiseClass cls) {
  DType t = (DType)p->walk.dtype[k];
  bool known = block_is_native(t, cls) || t == BOOL || (cls == PW_F32 && (t == F16 || t == BF16));
  return known && walk_is_flat(&p->walk, k) && (uintptr_t)p->walk.data[k] % 16 == 0;
}

static void pw_operands(PwCall *c, const PointwiseKernel *kernel) {
  const OpCall *call = c->call;
  PwParams *p = &c->params;
  View in[PW_OPERANDS];
  p->n_in = kernel->n_in;
  for (int k = 0; k < p->n_in; k++) in[k] = block_input(kernel, &call->in[k]);
  walk_init(&p->walk, &call->out[0], p->n_in, in);
  c->vectors = pw_takes(p, 0, kernel->cls);
  p->wide = dtype_size((DType)p->walk.dtype[0]) == 2;
  for (int k = 1; k <= p->n_in; k++) {
    const View *v = &in[k - 1];
    bool flat = pw_takes(p, k, kernel->cls);
    p->number[k] = v->device == DEVICE_CPU;
    if (p->number[k]) {
      p->f[k] = dtype_get_f64((DType)v->dtype, v->data);
      p->i[k] = dtype_get_i64((DType)v->dtype, v->data);
    }
    p->kind[k] = flat && !p->number[k] ? PW_FLAT : PW_CONSTANT;
    c->vectors &= p->kind[k] == PW_FLAT || walk_is_constant(&p->walk, k);
    if (p->kind[k] == PW_FLAT) p->wide &= dtype_size((DType)p->walk.dtype[k]) == 2;
  }
}

/* `choose` looks at the values of 0-d inputs, those of the host alone. */
static void pw_choose(const OpCall *call, PointwiseChoose *choose, PointwiseKernel *kernel) {
  OpCall seen = *call;
  View in[PW_OPERANDS];
  for (int k = 0; k < call->n_in; k++) {
    in[k] = call->in[k];
    if (in[k].device != DEVICE_CPU && in[k].ndim == 0) in[k].ndim = 1;
  }
  seen.in = in;
  choose(&seen, kernel);
}

__attribute__((unused)) static int pw_call(const OpCall *call, PointwiseFn *const *fns,
                                           PointwiseChoose *choose) {
  PointwiseKernel kernel = {};
  PwCall c;
  kernel.bool_out = call->op->spec[0]->flags & OP_BOOL_OUT;
  kernel.n_in = call->n_in;
  kernel.cls =
      block_class(kernel.bool_out ? op_promote_views(call->n_in, call->in) : pw_dtype(call));
  if (kernel.cls == PW_I64) kernel.whole = op_promote_views(call->n_in, call->in);
  kernel.fn = fns[kernel.cls];
  if (choose) pw_choose(call, choose, &kernel);
  if (!kernel.fn)
    return err_set(MF_EINVAL, "%s: no kernel for %s", call->op->name,
                   dtype_name((DType)call->out[0].dtype));
  c.call = call;
  pw_operands(&c, &kernel);
  c.rc = 0;
  kernel.fn(0, NULL, (const void *const *)&c, NULL);
  return c.rc;
}

#endif
