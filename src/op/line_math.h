/* Maximum, sum and dot product of a line, vectorised. Static, since it belongs to one instruction
 * set. */
#ifndef MF_LINE_MATH_H
#define MF_LINE_MATH_H
#include <math.h>
#include <stdint.h>

enum { LINE_LANES = 32 };

/* Helpers over n elements of a line, in lanes so that they vectorise; sums of floats are joined in
 * double every BLOCK elements. */
#define LINE_HELPERS(C, T)                                                                \
  static inline T line_max_##C(int64_t n, const T *x) {                                   \
    T lane[LINE_LANES], most = -INFINITY;                                                 \
    int64_t i = 0;                                                                        \
    for (int l = 0; l < LINE_LANES; l++) lane[l] = -INFINITY;                             \
    for (; i + LINE_LANES <= n; i += LINE_LANES)                                          \
      for (int l = 0; l < LINE_LANES; l++)                                                \
        lane[l] = x[i + l] > lane[l] || x[i + l] != x[i + l] ? x[i + l] : lane[l];        \
    for (int l = 0; l < LINE_LANES; l++)                                                  \
      most = lane[l] > most || lane[l] != lane[l] ? lane[l] : most;                       \
    for (; i < n; i++) most = x[i] > most || x[i] != x[i] ? x[i] : most;                  \
    return most;                                                                          \
  }                                                                                       \
  static inline double line_sum_##C(int64_t n, const T *x) { /* n <= BLOCK */             \
    T lane[LINE_LANES] = {0};                                                             \
    double sum = 0;                                                                       \
    int64_t i = 0;                                                                        \
    for (; i + LINE_LANES <= n; i += LINE_LANES)                                          \
      for (int l = 0; l < LINE_LANES; l++) lane[l] += x[i + l];                           \
    for (int l = 0; l < LINE_LANES; l++) sum += (double)lane[l];                          \
    for (; i < n; i++) sum += (double)x[i];                                               \
    return sum;                                                                           \
  }                                                                                       \
  static inline double line_dot_##C(int64_t n, const T *x, const T *y) { /* n <= BLOCK */ \
    T lane[LINE_LANES] = {0};                                                             \
    double sum = 0;                                                                       \
    int64_t i = 0;                                                                        \
    for (; i + LINE_LANES <= n; i += LINE_LANES)                                          \
      for (int l = 0; l < LINE_LANES; l++) lane[l] += x[i + l] * y[i + l];                \
    for (int l = 0; l < LINE_LANES; l++) sum += (double)lane[l];                          \
    for (; i < n; i++) sum += (double)x[i] * (double)y[i];                                \
    return sum;                                                                           \
  }
LINE_HELPERS(f32, float)
LINE_HELPERS(f64, double)

#endif
