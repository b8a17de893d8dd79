/* The inner loops of normalisations, over contiguous elements that lie in the cache; T is float or
 * double.
 *
 * y = (x - mean) rstd w + b, and with xh = (x - mean) rstd and h = g w its gradient for x is rstd
 * (h - mean(h) - xh mean(h xh)). Without centring (rms_norm) mean and mean(h) are 0. Sums go
 * through lanes; the caller adds up in double.
 *
 * Static, since it belongs to one instruction set. */
#ifndef MF_NORM_ROWS_H
#define MF_NORM_ROWS_H
#include "moments.h"

#define NORM_SQUARE(V, i) (LANES_AT(V, v, i) * LANES_AT(V, v, i))
#define NORM_SUMS(V, i, u, v)                                            \
  do {                                                                   \
    int64_t k_ = at + (i);                                               \
    V g_ = LANES_AT(V, g, k_), xh_ = (LANES_AT(V, x, k_) - mean) * rstd; \
    V h_ = g_ * LANES_AT(V, w, k_);                                      \
    u += h_, v += h_ * xh_;                                              \
    LANES_PUT(V, gw, k_, LANES_AT(V, gw, k_) + g_ * xh_);                \
    LANES_PUT(V, gb, k_, LANES_AT(V, gb, k_) + g_);                      \
  } while (0)
#define NORM_SUMS_ONE(V, i, u, v)                         \
  do {                                                    \
    V g_ = LANES_AT(V, g, at + (i));                      \
    u += g_, v += g_ * (LANES_AT(V, x, at + (i)) - mean); \
  } while (0)

#define NORM_ROWS(C, T)                                                                            \
  /* The mean of squares, summed as moments are. */                                                \
  static inline double norm_square_##C(int64_t n, const T *x) {                                    \
    double sum = 0;                                                                                \
    for (int64_t at = 0; at < n; at += MOMENTS_ROW) {                                              \
      int64_t m = n - at < MOMENTS_ROW ? n - at : MOMENTS_ROW;                                     \
      const T *v = x + at;                                                                         \
      T part;                                                                                      \
      LANES_FOLD(C, T, m, 0, NORM_SQUARE, LANES_ADD, part);                                        \
      sum += (double)part;                                                                         \
    }                                                                                              \
    return sum / (double)n;                                                                        \
  }                                                                                                \
  /* y = (x - mean) scale[i] + b[i] where scale is rstd w. */                                      \
  static inline void norm_apply_##C(int64_t n, const T *restrict x, T mean, T rstd,                \
                                    const T *restrict w, const T *restrict b, T *restrict y) {     \
    for (int64_t i = 0; i < n; i++) y[i] = (x[i] - mean) * rstd * w[i] + b[i];                     \
  }                                                                                                \
  /* The same with one w and b. */                                                                 \
  static inline void norm_apply_one_##C(int64_t n, const T *restrict x, T mean, T scale, T b,      \
                                        T *restrict y) {                                           \
    for (int64_t i = 0; i < n; i++) y[i] = (x[i] - mean) * scale + b;                              \
  }                                                                                                \
  /* Adds g xh to gw and g to gb; *s1 += sum(h), *s2 += sum(h xh). */                              \
  static inline void norm_sums_##C(int64_t n, const T *restrict g, const T *restrict x, T mean,    \
                                   T rstd, const T *restrict w, T *restrict gw, T *restrict gb,    \
                                   double *s1, double *s2) {                                       \
    for (int64_t at = 0; at < n; at += MOMENTS_ROW) {                                              \
      int64_t m = n - at < MOMENTS_ROW ? n - at : MOMENTS_ROW;                                     \
      T a, b;                                                                                      \
      LANES_SUM2(C, T, m, NORM_SUMS, a, b);                                                        \
      *s1 += (double)a, *s2 += (double)b;                                                          \
    }                                                                                              \
  }                                                                                                \
  /* *s1 += sum(g), *s2 += sum(g (x - mean)). */                                                   \
  static inline void norm_sums_one_##C(int64_t n, const T *restrict g, const T *restrict x,        \
                                       T mean, double *s1, double *s2) {                           \
    for (int64_t at = 0; at < n; at += MOMENTS_ROW) {                                              \
      int64_t m = n - at < MOMENTS_ROW ? n - at : MOMENTS_ROW;                                     \
      T a, b;                                                                                      \
      LANES_SUM2(C, T, m, NORM_SUMS_ONE, a, b);                                                    \
      *s1 += (double)a, *s2 += (double)b;                                                          \
    }                                                                                              \
  }                                                                                                \
  /* gx = rstd (g w - m1 - xh m2). */                                                              \
  static inline void norm_input_##C(int64_t n, const T *restrict g, const T *restrict x, T mean,   \
                                    T rstd, const T *restrict w, T m1, T m2, T *restrict gx) {     \
    for (int64_t i = 0; i < n; i++) gx[i] = (g[i] * w[i] - m1 - (x[i] - mean) * rstd * m2) * rstd; \
  }                                                                                                \
  /* gx = a g + b (x - mean) + c. */                                                               \
  static inline void norm_input_one_##C(int64_t n, const T *restrict g, const T *restrict x,       \
                                        T mean, T a, T b, T c, T *restrict gx) {                   \
    for (int64_t i = 0; i < n; i++) gx[i] = a * g[i] + (b * (x[i] - mean) + c);                    \
  }
NORM_ROWS(f32, float)
NORM_ROWS(f64, double)

#endif
