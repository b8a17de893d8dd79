/* Maximum, sum and dot product of a line, vectorised; NaN is the largest. Sums are of short runs,
 * BLOCK elements at most: callers add runs up in double. Static, since it belongs to one
 * instruction set. */
#ifndef MF_LINE_MATH_H
#define MF_LINE_MATH_H
#include <math.h>

#include "lanes.h"

#define LINE_X(V, i) LANES_AT(V, x, i)
#define LINE_XY(V, i) (LANES_AT(V, x, i) * LANES_AT(V, y, i))
#define LINE_HELPERS(C, T)                                                                  \
  static inline T line_max_##C(int64_t n, const T *x) {                                     \
    T most;                                                                                 \
    LANES_FOLD(C, T, n, -INFINITY, LINE_X, LANES_MAX, most);                                \
    return most;                                                                            \
  }                                                                                         \
  static inline T line_top_##C(int64_t n, const T *x) { /* NaN or not where there is one */ \
    T most;                                                                                 \
    LANES_FOLD(C, T, n, -INFINITY, LINE_X, LANES_TOP, most);                                \
    return most;                                                                            \
  }                                                                                         \
  static inline double line_sum_##C(int64_t n, const T *x) {                                \
    T sum;                                                                                  \
    LANES_FOLD(C, T, n, 0, LINE_X, LANES_ADD, sum);                                         \
    return (double)sum;                                                                     \
  }                                                                                         \
  static inline double line_dot_##C(int64_t n, const T *x, const T *y) {                    \
    T sum;                                                                                  \
    LANES_FOLD(C, T, n, 0, LINE_XY, LANES_ADD, sum);                                        \
    return (double)sum;                                                                     \
  }
LINE_HELPERS(f32, float)
LINE_HELPERS(f64, double)

#endif
