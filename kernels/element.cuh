/* Elements of every dtype in kernels: reading them as a compute type and back, one by one and in
 * vectors of 16 bytes. */
#ifndef MF_ELEMENT_CUH
#define MF_ELEMENT_CUH
#include "launch.cuh"

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
#define DTYPE_CASES(t, X)       \
  switch (t) {                  \
    case BOOL: X(Bool) break;   \
    case U8: X(uint8_t) break;  \
    case I8: X(int8_t) break;   \
    case I16: X(int16_t) break; \
    case I32: X(int32_t) break; \
    case I64: X(int64_t) break; \
    case F16: X(Half) break;    \
    case BF16: X(Bfloat) break; \
    case F32: X(float) break;   \
    default: X(double) break;   \
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

/* The same of a dtype that is computed in T: no switch over those that cannot be. */
template <class T>
struct In {
  static __device__ __forceinline__ T load(int dtype, const void *p, int64_t i) {
#define LOAD(S) return element<T>(((const S *)p)[i]);
    FLOAT_CASES(dtype, LOAD)
#undef LOAD
  }
  static __device__ __forceinline__ void store(int dtype, void *p, int64_t i, T v) {
#define STORE(S) ((S *)p)[i] = Stored<S>::of(v);
    FLOAT_CASES(dtype, STORE)
#undef STORE
  }
};
template <>
struct In<int64_t> {
  static __device__ __forceinline__ int64_t load(int dtype, const void *p, int64_t i) {
    return load_as<int64_t>(dtype, p, i);
  }
  static __device__ __forceinline__ void store(int dtype, void *p, int64_t i, int64_t v) {
    store_as<int64_t>(dtype, p, i, v);
  }
};
template <class T>
static __device__ __forceinline__ T load_in(int dtype, const void *p, int64_t i) {
  return In<T>::load(dtype, p, i);
}
template <class T>
static __device__ __forceinline__ void store_in(int dtype, void *p, int64_t i, T v) {
  In<T>::store(dtype, p, i, v);
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

#endif
