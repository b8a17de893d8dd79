/* CUDA's runtime and language as the emulator has them: what kernels/ uses of them, under the same
 * names, for a host compiler. Device memory is host memory behind a guard page, a stream is a
 * thread that works off a queue, a block's threads are fibers. See emulate.cc. */
#ifndef MF_EMULATE_RUNTIME_H
#define MF_EMULATE_RUNTIME_H
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <functional>

#define MF_EMULATE 1
#define __global__
#define __device__
#define __grid_constant__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __shared__ static thread_local

/* -- Launches ---------------------------------------------------------------------------------- */

struct uint3 {
  unsigned x, y, z;
};
struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned a = 1, unsigned b = 1, unsigned c = 1) : x(a), y(b), z(c) {
  }
};
struct __align__(16) uint4 {
  unsigned x, y, z, w;
};
struct __align__(8) uint2 {
  unsigned x, y;
};

/* One thread of the block that runs. */
struct EmulateThread {
  uint3 index;
  unsigned lane, warp;
  int state;
  void *sp;      /* of its fiber, where it waits */
  int fiber;     /* -1: none yet */
  int waits_for; /* generation of its warp */
};
struct EmulateBlock {
  uint3 index;
  dim3 size, grid;
};
extern thread_local EmulateThread *emulate_thread;
extern thread_local EmulateBlock emulate_block;
#define threadIdx (emulate_thread->index)
#define blockIdx (emulate_block.index)
#define blockDim (emulate_block.size)
#define gridDim (emulate_block.grid)
#define warpSize 32

void *emulate_shared();                                      /* dynamic shared memory */
void emulate_barrier();                                      /* __syncthreads */
const uint64_t *emulate_warp(unsigned mask, uint64_t value); /* what each lane gave */
void emulate_check(bool holds, const char *text);            /* a kernel's error: it ends */

typedef struct EmulateStream *cudaStream_t;
typedef struct EmulateEvent *cudaEvent_t;
typedef enum cudaError {
  cudaSuccess,
  cudaErrorInvalidValue = 1,
  cudaErrorMemoryAllocation = 2,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorNoDevice = 100,
  cudaErrorInvalidDevice = 101,
  cudaErrorNotReady = 600,
  cudaErrorLaunchFailure = 719
} cudaError_t;

cudaError_t emulate_launch(const char *name, dim3 grid, dim3 block, size_t shared,
                           cudaStream_t stream, std::function<void()> body);

/* -- What threads say to each other ------------------------------------------------------------ */

static inline void __syncthreads() {
  emulate_barrier();
}
static inline void __syncwarp(unsigned mask = 0xffffffffu) {
  emulate_warp(mask, 0);
}
template <class T>
static inline T emulate_exchange(unsigned mask, T v, unsigned from) {
  static_assert(sizeof(T) <= 8, "a shuffle moves 8 bytes at most");
  uint64_t bits = 0;
  memcpy(&bits, &v, sizeof v);
  const uint64_t *all = emulate_warp(mask, bits);
  memcpy(&v, &all[from & 31], sizeof v);
  return v;
}
template <class T>
static inline T __shfl_sync(unsigned mask, T v, int from, int width = 32) {
  unsigned lane = emulate_thread->lane, base = lane & ~(unsigned)(width - 1);
  return emulate_exchange(mask, v, base + ((unsigned)from & (unsigned)(width - 1)));
}
template <class T>
static inline T __shfl_xor_sync(unsigned mask, T v, int by, int width = 32) {
  unsigned lane = emulate_thread->lane, from = lane ^ (unsigned)by;
  bool inside = (from & ~(unsigned)(width - 1)) == (lane & ~(unsigned)(width - 1));
  return emulate_exchange(mask, v, inside ? from : lane);
}
template <class T>
static inline T __shfl_down_sync(unsigned mask, T v, unsigned by, int width = 32) {
  unsigned lane = emulate_thread->lane, at = lane & (unsigned)(width - 1);
  return emulate_exchange(mask, v, at + by < (unsigned)width ? lane + by : lane);
}
template <class T>
static inline T __shfl_up_sync(unsigned mask, T v, unsigned by, int width = 32) {
  unsigned lane = emulate_thread->lane, at = lane & (unsigned)(width - 1);
  return emulate_exchange(mask, v, at >= by ? lane - by : lane);
}
static inline unsigned __ballot_sync(unsigned mask, int predicate) {
  const uint64_t *all = emulate_warp(mask, predicate != 0);
  unsigned votes = 0;
  for (unsigned k = 0; k < 32; k++)
    if (mask >> k & 1 && all[k]) votes |= 1u << k;
  return votes;
}
static inline int __any_sync(unsigned mask, int predicate) {
  return __ballot_sync(mask, predicate) != 0;
}
static inline int __all_sync(unsigned mask, int predicate) {
  return __ballot_sync(mask, !predicate) == 0;
}
static inline void __threadfence() {
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
}

/* -- Atomics ----------------------------------------------------------------------------------- */

template <class T, class F>
static inline T emulate_update(T *p, F f) {
  T old, made;
  __atomic_load(p, &old, __ATOMIC_SEQ_CST);
  do made = f(old);
  while (!__atomic_compare_exchange(p, &old, &made, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST));
  return old;
}
template <class T>
static inline T atomicAdd(T *p, T v) {
  return emulate_update(p, [v](T old) { return (T)(old + v); });
}
template <class T>
static inline T atomicMax(T *p, T v) {
  return emulate_update(p, [v](T old) { return old > v ? old : v; });
}
template <class T>
static inline T atomicMin(T *p, T v) {
  return emulate_update(p, [v](T old) { return old < v ? old : v; });
}
template <class T>
static inline T atomicOr(T *p, T v) {
  return emulate_update(p, [v](T old) { return (T)(old | v); });
}
template <class T>
static inline T atomicExch(T *p, T v) {
  return emulate_update(p, [v](T) { return v; });
}
template <class T>
static inline T atomicCAS(T *p, T expected, T v) {
  return emulate_update(p, [=](T old) { return old == expected ? v : old; });
}

/* -- Arithmetic -------------------------------------------------------------------------------- */

static inline unsigned __umulhi(unsigned a, unsigned b) {
  return (unsigned)((uint64_t)a * b >> 32);
}
static inline uint64_t __umul64hi(uint64_t a, uint64_t b) {
  return (uint64_t)((unsigned __int128)a * b >> 64);
}
static inline float normcdf(float x) {
  return 0.5f * erfcf(x * -0.70710678f);
}
static inline double normcdf(double x) {
  return 0.5 * erfc(x * -0.70710678118654752440);
}
static inline float rsqrtf(float x) {
  return 1 / sqrtf(x);
}
static inline double rsqrt(double x) {
  return 1 / sqrt(x);
}
static inline float __fmaf_rn(float a, float b, float c) {
  return fmaf(a, b, c);
}
static inline double __fma_rn(double a, double b, double c) {
  return fma(a, b, c);
}
static inline float __uint_as_float(unsigned u) {
  float f;
  memcpy(&f, &u, 4);
  return f;
}
static inline unsigned __float_as_uint(float f) {
  unsigned u;
  memcpy(&u, &f, 4);
  return u;
}

/* -- The runtime ------------------------------------------------------------------------------- */

typedef enum cudaMemcpyKind { cudaMemcpyDefault = 4 } cudaMemcpyKind;
enum { cudaStreamNonBlocking = 1, cudaEventDisableTiming = 2, cudaHostAllocMapped = 2 };

const char *cudaGetErrorString(cudaError_t e);
const char *emulate_error_text(); /* what failed in the stream that was synchronised last */
enum cudaMemoryType { cudaMemoryTypeUnregistered, cudaMemoryTypeHost, cudaMemoryTypeDevice };
struct cudaPointerAttributes {
  cudaMemoryType type;
};
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *a, const void *p);
enum cudaDeviceAttr { cudaDevAttrComputeCapabilityMajor, cudaDevAttrComputeCapabilityMinor };
#define __CUDA_ARCH_LIST__ 900
cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr what, int device);
cudaError_t cudaGetLastError();
cudaError_t cudaGetDeviceCount(int *n);
cudaError_t cudaSetDevice(int i);
cudaError_t cudaMalloc(void **p, size_t bytes);
cudaError_t cudaFree(void *p);
cudaError_t cudaHostAlloc(void **p, size_t bytes, unsigned flags);
cudaError_t cudaFreeHost(void *p);
cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total);
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned flags);
cudaError_t cudaStreamDestroy(cudaStream_t s);
cudaError_t cudaStreamSynchronize(cudaStream_t s);
cudaError_t cudaDeviceSynchronize();
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned flags);
cudaError_t cudaEventDestroy(cudaEvent_t e);
cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s);
cudaError_t cudaEventQuery(cudaEvent_t e);
cudaError_t cudaEventSynchronize(cudaEvent_t e);
cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned flags = 0);
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t s);
cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t s);
/* Runs it on the stream's thread in its turn. */
cudaError_t emulate_enqueue(cudaStream_t s, std::function<void()> work);

#endif
