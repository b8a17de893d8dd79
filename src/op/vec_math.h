/* Elementary functions of float as plain arithmetic, which the compiler vectorises: no calls, no
 * branches, so an element's value depends on nothing but itself. Errors are below 2 units in the
 * last place unless said otherwise; NaN and infinities come out as libm's.
 *
 * Static, since it belongs to one instruction set. */
#ifndef MF_VEC_MATH_H
#define MF_VEC_MATH_H
#include <math.h>
#include <stdint.h>

typedef union VecBits {
  float f;
  uint32_t u;
} VecBits;

/* e^x as 2^n e^r with |r| <= log(2) / 2. A sum with 1.5 * 2^23 rounds to whole numbers and has n in
 * its low bits; 2^n is made of two factors, so that subnormal results come out right. */
static inline float vec_exp(float x) {
  x = x > 89.0f ? 89.0f : x;
  x = x < -104.0f ? -104.0f : x;
  VecBits shifted = {.f = x * 1.44269504f + 0x1.8p23f};
  float n = shifted.f - 0x1.8p23f, r = x - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  int32_t i = (int32_t)(shifted.u - 0x4b400000u), half = i >> 1;
  VecBits a = {.u = (uint32_t)(half + 127) << 23}, b = {.u = (uint32_t)(i - half + 127) << 23};
  return p * a.f * b.f;
}

/* log(1 + x) as e log(2) + log(1 + f), |f| <= 1/3: f is what is left of 1 + x when 2^e is taken
 * out, with the rounding of the sum put right. */
static inline float vec_log1p(float x) {
  VecBits u = {.f = 1.0f + x}, m, scale;
  uint32_t e = (u.u - 0x3f2aaaabu) & ~0x7fffffu;
  m.u = u.u - e;
  scale.u = 0x3f800000u - e;
  float f = (m.f - 1.0f) + (x - (u.f - 1.0f)) * scale.f, s = f * f;
  float r = -0.130187988f * f + 0.140889585f, t = -0.121489584f * f + 0.139809534f;
  r = r * s + t;
  r = r * f - 0.166845024f;
  r = r * f + 0.200121149f;
  r = r * f - 0.249996364f;
  r = r * f + 0.333331943f;
  r = r * f - 0.5f;
  r = r * s + f;
  r = (float)((int32_t)e >> 23) * 0.693147182f + r;
  r = x == INFINITY ? x : r;
  return x > -1.0f ? r : x == -1.0f ? -INFINITY : NAN;
}

/* The normal distribution function, (1 + erf(x / sqrt(2))) / 2, erf as a rational function of
 * degree 9 over 12; 0 and 1 beyond +-5.42. The error is below 2.5e-7. */
static inline float vec_normcdf(float x) {
  float t = x * 0.70710678f, s = t * t, p = 2.2905065861350646e-4f, q = -1.1791602954361697e-7f;
  p = p * s + 3.4082910107109506e-3f;
  p = p * s + 5.0955695062380861e-2f;
  p = p * s + 0.18520832239976145f;
  p = p * s + 1.128379143519084f;
  q = q * s + 2.3547966471313185e-5f;
  q = q * s + 1.0179625278914885e-3f;
  q = q * s + 1.4070470171167667e-2f;
  q = q * s + 0.11098505178285362f;
  q = q * s + 0.49746925110067538f;
  q = q * s + 1.0f;
  float y = 0.5f + 0.5f * (t * p / q);
  y = x < -5.42f || y < 0.0f ? 0.0f : y;
  return x > 5.42f ? 1.0f : y;
}

#endif
