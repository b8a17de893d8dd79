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

enum { NORM_LANES = 32 };

#define NORM_ROWS(C, T)                                                                            \
  /* The mean of squares, summed as moments are. */                                                \
  static inline double norm_square_##C(int64_t n, const T *x) {                                    \
    double sum = 0;                                                                                \
    for (int64_t at = 0; at < n; at += MOMENTS_ROW) {                                              \
      int64_t m = n - at < MOMENTS_ROW ? n - at : MOMENTS_ROW, i = 0;                              \
      T lane[NORM_LANES] = {0};                                                                    \
      const T *v = x + at;                                                                         \
      for (; i + NORM_LANES <= m; i += NORM_LANES)                                                 \
        for (int l = 0; l < NORM_LANES; l++) lane[l] += v[i + l] * v[i + l];                       \
      for (int l = 0; l < NORM_LANES; l++) sum += (double)lane[l];                                 \
      for (; i < m; i++) sum += (double)v[i] * (double)v[i];                                       \
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
      int64_t m = n - at < MOMENTS_ROW ? n : at + MOMENTS_ROW, i = at;                             \
      T a[NORM_LANES] = {0}, b[NORM_LANES] = {0};                                                  \
      for (; i + NORM_LANES <= m; i += NORM_LANES)                                                 \
        for (int l = 0; l < NORM_LANES; l++) {                                                     \
          T xh = (x[i + l] - mean) * rstd, h = g[i + l] * w[i + l];                                \
          a[l] += h, b[l] += h * xh;                                                               \
          gw[i + l] += g[i + l] * xh, gb[i + l] += g[i + l];                                       \
        }                                                                                          \
      for (int l = 0; l < NORM_LANES; l++) *s1 += (double)a[l], *s2 += (double)b[l];               \
      for (; i < m; i++) {                                                                         \
        T xh = (x[i] - mean) * rstd, h = g[i] * w[i];                                              \
        *s1 += (double)h, *s2 += (double)(h * xh);                                                 \
        gw[i] += g[i] * xh, gb[i] += g[i];                                                         \
      }                                                                                            \
    }                                                                                              \
  }                                                                                                \
  /* *s1 += sum(g), *s2 += sum(g (x - mean)). */                                                   \
  static inline void norm_sums_one_##C(int64_t n, const T *restrict g, const T *restrict x,        \
                                       T mean, double *s1, double *s2) {                           \
    for (int64_t at = 0; at < n; at += MOMENTS_ROW) {                                              \
      int64_t m = n - at < MOMENTS_ROW ? n : at + MOMENTS_ROW, i = at;                             \
      T a[NORM_LANES] = {0}, b[NORM_LANES] = {0};                                                  \
      for (; i + NORM_LANES <= m; i += NORM_LANES)                                                 \
        for (int l = 0; l < NORM_LANES; l++)                                                       \
          a[l] += g[i + l], b[l] += g[i + l] * (x[i + l] - mean);                                  \
      for (int l = 0; l < NORM_LANES; l++) *s1 += (double)a[l], *s2 += (double)b[l];               \
      for (; i < m; i++) *s1 += (double)g[i], *s2 += (double)(g[i] * (x[i] - mean));               \
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
