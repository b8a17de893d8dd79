/* Adding rows of any dtype at offsets: the one place that knows how two elements are added. Static,
 * one instruction set each. */
#ifndef MF_ROWS_ADD_H
#define MF_ROWS_ADD_H
#include "block.h"

enum { ROWS_AHEAD = 8 };

/* n rows' runs of `run` elements; x and dense point at the run's place in row 0. */
typedef void RowsMove(int64_t n, const int64_t *offset, int64_t run, void *x, void *dense,
                      int64_t dense_n);

#define ROWS_ADD(name, T, sum)                                                         \
  static void rows_add_##name(int64_t n, const int64_t *offset, int64_t run, void *x_, \
                              void *dense_, int64_t dense_n) {                         \
    for (int64_t b = 0; b < n; b++) {                                                  \
      T *restrict x = (T *)x_ + offset[b];                                             \
      const T *restrict dense = (const T *)dense_ + b * dense_n;                       \
      if (b + ROWS_AHEAD < n) __builtin_prefetch((T *)x_ + offset[b + ROWS_AHEAD], 1); \
      for (int64_t i = 0; i < run; i++) {                                              \
        T a = x[i], v = dense[i];                                                      \
        x[i] = (T)(sum);                                                               \
      }                                                                                \
    }                                                                                  \
  }
ROWS_ADD(BOOL, uint8_t, a | v)
ROWS_ADD(U8, uint8_t, a + v)
ROWS_ADD(I8, int8_t, (uint8_t)a + (uint8_t)v)
ROWS_ADD(I16, int16_t, (uint16_t)a + (uint16_t)v)
ROWS_ADD(I32, int32_t, (uint32_t)a + (uint32_t)v)
ROWS_ADD(I64, int64_t, (uint64_t)a + (uint64_t)v)
ROWS_ADD(F16, uint16_t, block_to_half(block_half(a) + block_half(v)))
ROWS_ADD(BF16, uint16_t, block_to_bfloat(block_bfloat(a) + block_bfloat(v)))
ROWS_ADD(F32, float, a + v)
ROWS_ADD(F64, double, a + v)

#define X(id, ctype, text, kind) rows_add_##id,
static RowsMove *const rows_add[] __attribute__((unused)) = {DTYPES(X)};
#undef X

#endif
