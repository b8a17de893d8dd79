/* The arithmetic of random numbers, one at a time: for every machine and for CUDA alike, which
 * defines RNG_INLINE before. See rng.h. */
#ifndef MF_RNG_VALUE_H
#define MF_RNG_VALUE_H
#include <math.h>
#include <stdint.h>
#include <string.h>

enum { RNG_LANES = 16, RNG_GROUP32 = 64, RNG_GROUP64 = 32 };

#ifndef RNG_INLINE
#define RNG_INLINE static inline __attribute__((always_inline, unused))
#endif

/* -- Philox ------------------------------------------------------------------------------------ */

/* One round on both halves; see Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011.
 */
#define RNG_ROUND(c0, c1, c2, c3, k0, k1)                                                      \
  do {                                                                                         \
    uint64_t p0 = (uint64_t)UINT32_C(0xD2511F53) * (c0);                                       \
    uint64_t p1 = (uint64_t)UINT32_C(0xCD9E8D57) * (c2);                                       \
    uint32_t n0 = (uint32_t)(p1 >> 32) ^ (c1) ^ (k0), n2 = (uint32_t)(p0 >> 32) ^ (c3) ^ (k1); \
    (c1) = (uint32_t)p1, (c3) = (uint32_t)p0, (c0) = n0, (c2) = n2;                            \
  } while (0)

/* The four words of one counter. */
RNG_INLINE void rng_philox(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4]) {
  uint32_t c0 = counter[0], c1 = counter[1], c2 = counter[2], c3 = counter[3], k0 = key[0],
           k1 = key[1];
  for (int round = 0; round < 10; round++) {
    RNG_ROUND(c0, c1, c2, c3, k0, k1);
    k0 += UINT32_C(0x9E3779B9), k1 += UINT32_C(0xBB67AE85);
  }
  out[0] = c0, out[1] = c1, out[2] = c2, out[3] = c3;
}

/* -- fma --------------------------------------------------------------------------------------- */

/* a b + c rounded once. Without the instruction: the product is exact in double, the sum is rounded
 * to odd, so that the second rounding is right. */
RNG_INLINE float rng_fmaf(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
  return __fmaf_rn(a, b, c);
#elif defined(__FMA__) || defined(__aarch64__)
  return __builtin_fmaf(a, b, c);
#else
  double p = (double)a * (double)b, s = p + (double)c, part = s - p;
  double error = (p - (s - part)) + ((double)c - part);
  int64_t bits;
  memcpy(&bits, &s, 8);
  int64_t step = error == 0 || (bits & 1) ? 0 : (error > 0) == (s > 0) ? 1 : -1;
  bits += step;
  memcpy(&s, &bits, 8);
  return (float)s;
#endif
}

RNG_INLINE double rng_fma(double a, double b, double c) {
#if defined(__CUDA_ARCH__)
  return __fma_rn(a, b, c);
#else
  return __builtin_fma(a, b, c);
#endif
}

/* -- Uniform numbers in [0, 1) ----------------------------------------------------------------- */

RNG_INLINE float rng_uniform32(uint32_t w) {
  return (float)(int32_t)(w >> 8) * 0x1p-24f;
}

RNG_INLINE double rng_uniform64(uint64_t w) {
  return (double)(int64_t)(w >> 11) * 0x1p-53;
}

/* -- Normal numbers ---------------------------------------------------------------------------- */

/* The natural logarithm of a positive normal number, as fdlibm computes it. */
RNG_INLINE float rng_logf(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  bits += UINT32_C(0x3f800000) - UINT32_C(0x3f3504f3);
  float k = (float)((int32_t)(bits >> 23) - 127), m;
  bits = (bits & 0x7fffff) + UINT32_C(0x3f3504f3);
  memcpy(&m, &bits, 4);
  float f = m - 1.0f, s = f / (2.0f + f), z = s * s, w = z * z, h = 0.5f * f;
  float t1 = rng_fmaf(w, 0xf89e26p-26f, 0xccce13p-25f),
        t2 = rng_fmaf(w, 0x91e9eep-25f, 0xaaaaaap-24f);
  float rest = rng_fmaf(w, t1, z * t2), sum = rng_fmaf(s, h * f, s * rest);
  float low = rng_fmaf(k, 9.0580006145e-06f, sum);
  return rng_fmaf(k, 6.9313812256e-01f, f - rng_fmaf(h, f, -low));
}

/* cos and sin of 2 pi w / 2^32. */
RNG_INLINE void rng_circlef(uint32_t w, float *cosine, float *sine) {
  uint32_t k = (w + UINT32_C(0x20000000)) >> 30;
  float x = (float)(int32_t)(w - (k << 30)) * 1.46291807926715968105133780430979e-09f, z = x * x;
  float s = rng_fmaf(z, -1.9515295891e-4f, 8.3321608736e-3f),
        c = rng_fmaf(z, 2.443315711809948e-5f, -1.388731625493765e-3f);
  s = rng_fmaf(x * z, rng_fmaf(s, z, -1.6666654611e-1f), x);
  c = rng_fmaf(z * z, rng_fmaf(c, z, 4.166664568298827e-2f), rng_fmaf(z, -0.5f, 1.0f));
  float even = k & 1 ? s : c, odd = k & 1 ? c : s;
  *cosine = k == 1 || k == 2 ? -even : even;
  *sine = k >= 2 ? -odd : odd;
}

RNG_INLINE void rng_normal32(uint32_t w0, uint32_t w1, float *a, float *b) {
  float u = (float)(w0 | 1) * 0x1p-32f, c, s, r = sqrtf(-2.0f * rng_logf(u));
  rng_circlef(w1, &c, &s);
  *a = r * c;
  *b = r * s;
}

RNG_INLINE double rng_log(double x) {
  uint64_t bits;
  memcpy(&bits, &x, 8);
  bits += (uint64_t)(UINT32_C(0x3ff00000) - UINT32_C(0x3fe6a09e)) << 32;
  double k = (double)((int32_t)(bits >> 52) - 1023), m;
  bits = (bits & UINT64_C(0xfffffffffffff)) + ((uint64_t)UINT32_C(0x3fe6a09e) << 32);
  memcpy(&m, &bits, 8);
  double f = m - 1.0, s = f / (2.0 + f), z = s * s, w = z * z, h = 0.5 * f;
  double t1 = rng_fma(w, rng_fma(w, 1.531383769920937332e-01, 2.222219843214978396e-01),
                      3.999999999940941908e-01);
  double t2 = rng_fma(w,
                      rng_fma(w, rng_fma(w, 1.479819860511658591e-01, 1.818357216161805012e-01),
                              2.857142874366239149e-01),
                      6.666666666666735130e-01);
  double rest = rng_fma(w, t1, z * t2), sum = rng_fma(s, h * f, s * rest);
  double low = rng_fma(k, 1.90821492927058770002e-10, sum);
  return rng_fma(k, 6.93147180369123816490e-01, f - rng_fma(h, f, -low));
}

/* cos and sin of 2 pi w / 2^64. */
RNG_INLINE void rng_circle(uint64_t w, double *cosine, double *sine) {
  uint64_t k = (w + (UINT64_C(1) << 61)) >> 62;
  double x = (double)(int64_t)(w - (k << 62)) * 3.40612158008655459e-19, z = x * x;
  double s = rng_fma(z, 1.58969099521155010221e-10, -2.50507602534068634195e-08);
  s = rng_fma(z, rng_fma(z, rng_fma(z, s, 2.75573137070700676789e-06), -1.98412698298579493134e-04),
              8.33333333332248946124e-03);
  s = rng_fma(x * z, rng_fma(z, s, -1.66666666666666324348e-01), x);
  double c = rng_fma(z, -1.13596475577881948265e-11, 2.08757232129817482790e-09);
  c = rng_fma(z, rng_fma(z, rng_fma(z, c, -2.75573143513906633035e-07), 2.48015872894767294178e-05),
              -1.38888888888741095749e-03);
  c = rng_fma(z * z, rng_fma(z, c, 4.16666666666666019037e-02), rng_fma(z, -0.5, 1.0));
  double even = k & 1 ? s : c, odd = k & 1 ? c : s;
  *cosine = k == 1 || k == 2 ? -even : even;
  *sine = k >= 2 ? -odd : odd;
}

RNG_INLINE void rng_normal64(uint64_t w0, uint64_t w1, double *a, double *b) {
  double u = ((double)(int64_t)(w0 >> 11) + 0.5) * 0x1p-53, c, s, r = sqrt(-2.0 * rng_log(u));
  rng_circle(w1, &c, &s);
  *a = r * c;
  *b = r * s;
}

/* -- Whole numbers ----------------------------------------------------------------------------- */

/* 0 ... range - 1 (range 0: all of 2^64), from a 64-bit word. */
RNG_INLINE uint64_t rng_below(uint64_t w, uint64_t range) {
  return range ? (uint64_t)((unsigned __int128)w * range >> 64) : w;
}

#endif
