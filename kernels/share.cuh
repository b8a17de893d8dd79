/* What threads do together: adding to one place, errors that they find, sums of a block. */
#ifndef MF_SHARE_CUH
#define MF_SHARE_CUH
#include "element.cuh"

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

/* Raised at the next wait for the stream. */
static __device__ __forceinline__ void report(DeviceError *e, DeviceErrorKind kind, int op,
                                              int input, int64_t value, int64_t position,
                                              int64_t low, int64_t high) {
  if (atomicCAS(&e->set, 0, 1)) return;
  e->kind = kind, e->op = op, e->input = input;
  e->value = value, e->position = position, e->low = low, e->high = high;
  __threadfence();
}

/* "OP: INPUT at position P is V; legal are LOW to HIGH". */
static __device__ __forceinline__ void report_range(DeviceError *e, int op, int input,
                                                    int64_t value, int64_t position, int64_t low,
                                                    int64_t high) {
  report(e, ERROR_RANGE, op, input, value, position, low, high);
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

struct OpMin {
  template <class T>
  static __device__ __forceinline__ T of(T a, T b) {
    return a < b || a != a ? a : b;
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
