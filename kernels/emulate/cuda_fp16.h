/* The conversions of half and bfloat16 that kernels/ uses. */
#ifndef MF_EMULATE_HALF_H
#define MF_EMULATE_HALF_H
#include "cuda_runtime.h"
extern "C" {
#include "dtype.h"
}

struct __half {
  uint16_t bits;
};
struct __nv_bfloat16 {
  uint16_t bits;
};
static inline __half __ushort_as_half(uint16_t bits) {
  return __half{bits};
}
static inline uint16_t __half_as_ushort(__half h) {
  return h.bits;
}
static inline float __half2float(__half h) {
  return dtype_f16_to_f32(h.bits);
}
static inline __half __float2half_rn(float f) {
  return __half{dtype_f32_to_f16(f)};
}
static inline __nv_bfloat16 __ushort_as_bfloat16(uint16_t bits) {
  return __nv_bfloat16{bits};
}
static inline uint16_t __bfloat16_as_ushort(__nv_bfloat16 h) {
  return h.bits;
}
static inline float __bfloat162float(__nv_bfloat16 h) {
  return __uint_as_float((unsigned)h.bits << 16);
}
static inline __nv_bfloat16 __float2bfloat16_rn(float f) {
  unsigned u = __float_as_uint(f);
  if (f != f) return __nv_bfloat16{(uint16_t)(u >> 16 | 0x40)};
  return __nv_bfloat16{(uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16)};
}

#endif
