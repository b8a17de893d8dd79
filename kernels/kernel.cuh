/* What every file of kernels/ includes: the language, launches, element types, and how operands of
 * any strides are walked. The same text is compiled by nvcc and, with the headers in emulate/, by a
 * host compiler. */
#ifndef MF_KERNEL_CUH
#define MF_KERNEL_CUH
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <math.h>
#include <stdint.h>

extern "C" {
#include "op_args.h"
#include "op_ids.h"
#include "plugin.h"
#include "pointwise_class.h"
}

/* -- Kernels of ops ---------------------------------------------------------------------------- */

/* KERNEL(add, add_cuda): the launch of op add. The records lie one behind the other in a section of
 * the library, so that there is no list of them. */
#define KERNEL(name, function)                                                             \
  static int launch_##name(const OpCall *c) {                                              \
    int rc = function(c);                                                                  \
    kernel_scratch_end(c);                                                                 \
    return rc;                                                                             \
  }                                                                                        \
  static __attribute__((used, section("mf_kernels"))) const PluginKernel kernel_##name = { \
      #name, launch_##name};

/* The first error that a kernel has found in its data since the stream was waited for; in memory
 * that the host reads too. */
struct DeviceError {
  int set, op, input;
  int64_t value, position, low, high;
};

/* Of a stream: where work is launched, with its device made current. */
cudaStream_t stream_handle(Stream *s);
/* 0, or the code of what the last launch says. */
int launch_result(const OpCall *c, cudaError_t e);
/* Where the kernels of this launch put errors. */
DeviceError *stream_error(Stream *s);
/* Memory until the kernels of this call have run. NULL with the error set. */
void *kernel_scratch(const OpCall *c, size_t bytes);
void kernel_scratch_end(const OpCall *c); /* the call has launched all */

/* What a vendor's library keeps for a device: made on first use, ended with the device. */
enum DeviceKeeps { DEVICE_KEEPS_GEMM, DEVICE_KEEPS };
void *device_keep(Stream *s, DeviceKeeps what, void *(*make)(void), void (*end)(void *));

/* y = x, broadcast and converted; x may be one element of the host. Of copy.cu. */
int copy_launch(const OpCall *c, const View *x, const View *y);
/* The sum or mean of all of x, to the 0-d y. Of reduce.cu. */
int reduce_all(const OpCall *c, const View *x, const View *y, bool mean);
/* y = value everywhere. */
int copy_fill(const OpCall *c, const View *y, double value);

#ifdef MF_EMULATE
template <class... P, class... A>
static cudaError_t emulate_start(const char *name, dim3 grid, dim3 block, size_t shared,
                                 cudaStream_t s, void (*kernel)(P...), A... a) {
  return emulate_launch(name, grid, block, shared, s, [=] { kernel(a...); });
}
#define LAUNCH(call, kernel, grid, block, shared, ...)                                             \
  launch_result(call, emulate_start((call)->op->name, grid, block, shared,                         \
                                    stream_handle((call)->stream), kernel, __VA_ARGS__))
#define SHARED_DYNAMIC(T, name) T *name = (T *)emulate_shared()
#define DEVICE_CHECK(holds, text) emulate_check(holds, text)
#else
#define LAUNCH(call, kernel, grid, block, shared, ...)                                       \
  ((kernel)<<<(grid), (block), (shared), stream_handle((call)->stream)>>>(__VA_ARGS__),      \
   launch_result(call, cudaGetLastError()))
#define SHARED_DYNAMIC(T, name)                            \
  extern __shared__ __align__(16) unsigned char mf_shared[]; \
  T *name = (T *)mf_shared
#define DEVICE_CHECK(holds, text) ((void)0)
#endif

static constexpr int WARP = 32;
static const unsigned ALL_LANES = 0xffffffffu;

/* How many blocks of `each` elements; 0 elements have none, for which nothing is launched. */
static inline unsigned grid_for(int64_t n, int64_t each) {
  int64_t blocks = (n + each - 1) / each;
  return (unsigned)(blocks < 0x7fffffff ? blocks : 0x7fffffff);
}

/* -- Elements ---------------------------------------------------------------------------------- */

struct Half {
  uint16_t bits;
};
struct Bfloat {
  uint16_t bits;
};
struct Bool {
  uint8_t value;
};

static __device__ __forceinline__ int64_t whole_of(double v) {
  return v >= -9223372036854775808.0 && v < 9223372036854775808.0 ? (int64_t)v : INT64_MIN;
}

/* element<T>(v): v of a storage type as compute type T: float, double or int64_t. */
template <class T, class S>
static __device__ __forceinline__ T element(S v) {
  return (T)v;
}
template <>
__device__ __forceinline__ int64_t element<int64_t, float>(float v) {
  return whole_of((double)v);
}
template <>
__device__ __forceinline__ int64_t element<int64_t, double>(double v) {
  return whole_of(v);
}
template <class T>
static __device__ __forceinline__ T element(Half v) {
  return element<T, float>(__half2float(__ushort_as_half(v.bits)));
}
template <class T>
static __device__ __forceinline__ T element(Bfloat v) {
  return element<T, float>(__bfloat162float(__ushort_as_bfloat16(v.bits)));
}
template <class T>
static __device__ __forceinline__ T element(Bool v) {
  return (T)v.value;
}

/* stored<S>(v): the way back; whole numbers wrap, floats are cut off first. */
template <class S>
struct Stored {
  template <class T>
  static __device__ __forceinline__ S of(T v) {
    return (S)element<int64_t, T>(v);
  }
};
template <>
struct Stored<float> {
  template <class T>
  static __device__ __forceinline__ float of(T v) {
    return (float)v;
  }
};
template <>
struct Stored<double> {
  template <class T>
  static __device__ __forceinline__ double of(T v) {
    return (double)v;
  }
};
template <>
struct Stored<Half> {
  template <class T>
  static __device__ __forceinline__ Half of(T v) {
    return Half{__half_as_ushort(__float2half_rn((float)v))};
  }
};
template <>
struct Stored<Bfloat> {
  template <class T>
  static __device__ __forceinline__ Bfloat of(T v) {
    return Bfloat{__bfloat16_as_ushort(__float2bfloat16_rn((float)v))};
  }
};
template <>
struct Stored<Bool> {
  template <class T>
  static __device__ __forceinline__ Bool of(T v) {
    return Bool{(uint8_t)(v != 0)};
  }
};

/* DTYPE_CASES(t, X): X(S), S the storage type of dtype t. */
#define DTYPE_CASES(t, X)                            \
  switch (t) {                                       \
    case BOOL: X(Bool) break;                        \
    case U8: X(uint8_t) break;                       \
    case I8: X(int8_t) break;                        \
    case I16: X(int16_t) break;                      \
    case I32: X(int32_t) break;                      \
    case I64: X(int64_t) break;                      \
    case F16: X(Half) break;                         \
    case BF16: X(Bfloat) break;                      \
    case F32: X(float) break;                        \
    default: X(double) break;                        \
  }
/* The same where t is one of the float types. */
#define FLOAT_CASES(t, X)       \
  switch (t) {                  \
    case F16: X(Half) break;    \
    case BF16: X(Bfloat) break; \
    case F64: X(double) break;  \
    default: X(float) break;    \
  }

template <class T>
static __device__ __forceinline__ T load_as(int dtype, const void *p, int64_t i) {
#define LOAD(S) return element<T>(((const S *)p)[i]);
  DTYPE_CASES(dtype, LOAD)
#undef LOAD
}
template <class T>
static __device__ __forceinline__ void store_as(int dtype, void *p, int64_t i, T v) {
#define STORE(S) ((S *)p)[i] = Stored<S>::of(v);
  DTYPE_CASES(dtype, STORE)
#undef STORE
}

/* What float types are computed in. */
template <class S>
struct Compute {
  typedef float type;
};
template <>
struct Compute<double> {
  typedef double type;
};

/* -- Vectors ----------------------------------------------------------------------------------- */

/* N elements that lie one behind the other, read or written at once: 16 bytes where they are as
 * many. */
template <class S, int N>
struct __align__(sizeof(S) * N < 16 ? sizeof(S) * N : 16) Pack {
  S at[N];
};
template <class P>
static __device__ __forceinline__ P pack_load(const void *p) {
  DEVICE_CHECK((uintptr_t)p % __alignof__(P) == 0, "a vector is read that is not aligned");
  return *(const P *)p;
}
template <class P>
static __device__ __forceinline__ void pack_store(void *p, P v) {
  DEVICE_CHECK((uintptr_t)p % __alignof__(P) == 0, "a vector is written that is not aligned");
  *(P *)p = v;
}

/* -- Walking ----------------------------------------------------------------------------------- */

/* The operands of a launch over one shape, dims in the order of operand 0's memory and merged where
 * all allow it. Operand 0 is the output. */
template <int N>
struct Walk {
  int ndim;
  int64_t numel;
  int64_t shape[MF_MAX_DIMS];
  int64_t step[N][MF_MAX_DIMS];
  void *data[N];
  uint8_t dtype[N];
};

template <int N>
static void walk_swap(Walk<N> *w, int n, int a, int b) {
  int64_t t = w->shape[a];
  w->shape[a] = w->shape[b], w->shape[b] = t;
  for (int k = 0; k < n; k++)
    t = w->step[k][a], w->step[k][a] = w->step[k][b], w->step[k][b] = t;
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

/* Where element i of the walk lies in each of n operands. */
template <int N>
static __device__ __forceinline__ void walk_at(const Walk<N> &w, int n, int64_t i, int64_t *at) {
  for (int k = 0; k < n; k++) at[k] = 0;
  if (w.numel <= 0x7fffffff) {
    unsigned rest = (unsigned)i;
    for (int d = w.ndim - 1; d >= 0; d--) {
      unsigned size = (unsigned)w.shape[d], index = d ? rest % size : rest;
      rest = d ? rest / size : 0;
      for (int k = 0; k < n; k++) at[k] += (int64_t)index * w.step[k][d];
    }
    return;
  }
  for (int d = w.ndim - 1; d >= 0; d--) {
    int64_t index = d ? i % w.shape[d] : i;
    i = d ? i / w.shape[d] : 0;
    for (int k = 0; k < n; k++) at[k] += index * w.step[k][d];
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
}

/* -- Adding by many threads -------------------------------------------------------------------- */

static __device__ __forceinline__ void add_bits(float *p, float v) {
  atomicAdd(p, v);
}
static __device__ __forceinline__ void add_bits(double *p, double v) {
  atomicAdd(p, v);
}
static __device__ __forceinline__ void add_bits(int64_t *p, int64_t v) {
  atomicAdd((unsigned long long *)p, (unsigned long long)v);
}
static __device__ __forceinline__ void add_bits(int32_t *p, int64_t v) {
  atomicAdd(p, (int32_t)v);
}
/* Others by the word that they lie in. */
template <class S, class T>
static __device__ __forceinline__ void add_bits(S *p, T v) {
  unsigned *word = (unsigned *)((uintptr_t)p & ~(uintptr_t)3), shift = ((uintptr_t)p & 3) * 8;
  unsigned mask = (sizeof(S) == 1 ? 0xffu : 0xffffu) << shift, old = *word, seen;
  do {
    S s;
    seen = old;
    unsigned bits = (old & mask) >> shift, made = 0;
    memcpy(&s, &bits, sizeof s);
    s = Stored<S>::of((T)(element<T>(s) + v));
    memcpy(&made, &s, sizeof s);
    old = atomicCAS(word, seen, (seen & ~mask) | made << shift);
  } while (old != seen);
}

/* *(p + i) += element j of `from`, both of this dtype; in no order. */
static __device__ __forceinline__ void add_element(int dtype, void *p, int64_t i, const void *from,
                                                   int64_t j) {
  switch (dtype) {
    case F32: add_bits((float *)p + i, ((const float *)from)[j]); break;
    case F64: add_bits((double *)p + i, ((const double *)from)[j]); break;
    case F16: add_bits((Half *)p + i, load_as<float>(F16, from, j)); break;
    case BF16: add_bits((Bfloat *)p + i, load_as<float>(BF16, from, j)); break;
    case I64: add_bits((int64_t *)p + i, ((const int64_t *)from)[j]); break;
    case I32: add_bits((int32_t *)p + i, (int64_t)((const int32_t *)from)[j]); break;
    case I16: add_bits((int16_t *)p + i, load_as<int64_t>(I16, from, j)); break;
    case I8: add_bits((int8_t *)p + i, load_as<int64_t>(I8, from, j)); break;
    case U8: add_bits((uint8_t *)p + i, load_as<int64_t>(U8, from, j)); break;
    default: add_bits((Bool *)p + i, load_as<int64_t>(BOOL, from, j)); break;
  }
}

/* *(p + i) = element j of `from`, of elements of so many bytes. */
static __device__ __forceinline__ void move_element(int size, void *p, int64_t i, const void *from,
                                                    int64_t j) {
  switch (size) {
    case 1: ((uint8_t *)p)[i] = ((const uint8_t *)from)[j]; break;
    case 2: ((uint16_t *)p)[i] = ((const uint16_t *)from)[j]; break;
    case 4: ((uint32_t *)p)[i] = ((const uint32_t *)from)[j]; break;
    default: ((uint64_t *)p)[i] = ((const uint64_t *)from)[j]; break;
  }
}

/* -- Errors in data ---------------------------------------------------------------------------- */

/* "OP: INPUT[position] is value; legal are low to high" at the next wait for the stream. */
static __device__ __forceinline__ void report_range(DeviceError *e, int op, int input, int64_t value,
                                                    int64_t position, int64_t low, int64_t high) {
  if (atomicCAS(&e->set, 0, 1)) return;
  e->op = op, e->input = input;
  e->value = value, e->position = position, e->low = low, e->high = high;
  __threadfence();
}

/* -- Sums and maxima of a block ---------------------------------------------------------------- */

struct OpAdd {
  template <class T>
  static __device__ __forceinline__ T of(T a, T b) {
    return a + b;
  }
};
/* The larger; NaN where either is. */
struct OpMax {
  template <class T>
  static __device__ __forceinline__ T of(T a, T b) {
    return a > b || a != a ? a : b;
  }
};

template <class F, class T>
static __device__ __forceinline__ T warp_reduce(T v) {
  for (int by = 16; by; by >>= 1) v = F::of(v, __shfl_xor_sync(ALL_LANES, v, by));
  return v;
}

/* Over all threads of a block of whole warps; `room` is of WARP elements in shared memory. All get
 * the result. */
template <class F, class T>
static __device__ __forceinline__ T block_reduce(T v, T *room) {
  unsigned warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, warps = blockDim.x / WARP;
  v = warp_reduce<F>(v);
  __syncthreads(); /* the last use of room is over */
  if (!lane) room[warp] = v;
  __syncthreads();
  v = room[0];
  for (unsigned w = 1; w < warps; w++) v = F::of(v, room[w]);
  return v;
}

#endif
