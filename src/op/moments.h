/* Mean and sum of squared deviations (M2) of rows and columns, in one pass over memory: each group
 * is summed first, then its deviations from its own mean, while it lies in the cache; groups are
 * joined by Chan's formula in double. So a large mean costs no digits.
 *
 * Static, since it belongs to one instruction set. */
#ifndef MF_MOMENTS_H
#define MF_MOMENTS_H
#include "lanes.h"

enum { MOMENTS_GROUP = 32, MOMENTS_ROW = 2048 };

/* (mean, m2) of `done` elements and those of n others become one. */
static inline void moments_join(double *mean, double *m2, double done, double other_mean,
                                double other_m2, double n) {
  double delta = other_mean - *mean, share = n / (done + n);
  *mean += delta * share;
  *m2 += other_m2 + delta * delta * done * share;
}

#define MOMENTS_X(V, i) LANES_AT(V, x, i)
#define MOMENTS_DEVIATION(V, i, u, v) \
  do {                                \
    V d_ = LANES_AT(V, x, i) - near;  \
    u += d_, v += d_ * d_;            \
  } while (0)
/* The moments of n <= MOMENTS_ROW elements in a row. */
#define MOMENTS_ROW_OF(C, T)                                                                       \
  static inline void moments_group_##C(int64_t n, const T *x, double *mean, double *m2) {          \
    T sum, rest, squares;                                                                          \
    LANES_FOLD(C, T, n, 0, MOMENTS_X, LANES_ADD, sum);                                             \
    double scale = 1 / (double)n;                                                                  \
    T near = (T)((double)sum * scale);                                                             \
    LANES_SUM2(C, T, n, MOMENTS_DEVIATION, rest, squares);                                         \
    *mean = (double)near + (double)rest * scale;                                                   \
    *m2 = (double)squares - (double)rest * (double)rest * scale;                                   \
  }                                                                                                \
  /* Takes n elements into the moments of `done` others. */                                        \
  static inline void moments_row_##C(int64_t n, const T *x, int64_t done, double *mean,            \
                                     double *m2) {                                                 \
    for (int64_t at = 0; at < n; at += MOMENTS_ROW) {                                              \
      int64_t m = n - at < MOMENTS_ROW ? n - at : MOMENTS_ROW;                                     \
      double group_mean, group_m2;                                                                 \
      moments_group_##C(m, x + at, &group_mean, &group_m2);                                        \
      if (done + at) moments_join(mean, m2, (double)(done + at), group_mean, group_m2, (double)m); \
      else *mean = group_mean, *m2 = group_m2;                                                     \
    }                                                                                              \
  }                                                                                                \
  /* Takes x[r * step + i], r < rows, into mean[i] and m2[i], i < n, which have taken `done` rows. \
   */                                                                                              \
  static inline void moments_columns_##C(int64_t rows, int64_t n, const T *restrict x,             \
                                         int64_t step, int64_t done, double *restrict mean,        \
                                         double *restrict m2) {                                    \
    enum { WIDTH = 64 };                                                                           \
    for (int64_t first = 0; first < rows; first += MOMENTS_GROUP) {                                \
      int64_t m = rows - first < MOMENTS_GROUP ? rows - first : MOMENTS_GROUP;                     \
      double before = (double)(done + first), share = (double)m / (before + (double)m),            \
             scale = 1 / (double)m;                                                                \
      for (int64_t c = 0; c < n; c += WIDTH) {                                                     \
        int64_t width = n - c < WIDTH ? n - c : WIDTH;                                             \
        const T *tile = x + first * step + c;                                                      \
        T near[WIDTH] = {0}, rest[WIDTH] = {0}, square[WIDTH] = {0};                               \
        for (int64_t r = 0; r < m; r++)                                                            \
          for (int64_t i = 0; i < width; i++) near[i] += tile[r * step + i];                       \
        for (int64_t i = 0; i < width; i++) near[i] *= (T)scale;                                   \
        for (int64_t r = 0; r < m; r++)                                                            \
          for (int64_t i = 0; i < width; i++) {                                                    \
            T d = tile[r * step + i] - near[i];                                                    \
            rest[i] += d, square[i] += d * d;                                                      \
          }                                                                                        \
        for (int64_t i = 0; i < width; i++) {                                                      \
          double r = (double)rest[i] * scale, group = (double)near[i] + r;                         \
          double delta = group - mean[c + i];                                                      \
          m2[c + i] += (double)square[i] - r * (double)rest[i] + delta * delta * before * share;   \
          mean[c + i] += delta * share;                                                            \
        }                                                                                          \
      }                                                                                            \
    }                                                                                              \
  }
MOMENTS_ROW_OF(f32, float)
MOMENTS_ROW_OF(f64, double)

#endif
