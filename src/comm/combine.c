/* Sums, maxima and minima of contributions to a collective.
 *
 * Integers wrap; the sum of bools is "or". A maximum or minimum with NaN is NaN, as in PyTorch.
 * Halves go through float32: a block is widened once, gathers all contributions, and is rounded
 * once. Blocks fit in the second-level cache, so that simple loops suffice, which the
 * compiler makes vectors of. */
#include "combine.h"

#include "err.h"

static inline float bf16_wide(uint16_t h) {
  DTypeBits v = {.u = (uint32_t)h << 16};
  return v.f;
}
/* As dtype_f32_to_bf16, without branches. */
static inline uint16_t bf16_narrow(float f) {
  DTypeBits v = {.f = f};
  uint32_t r = (v.u + 0x7fff + (v.u >> 16 & 1)) >> 16;
  return (uint16_t)(f != f ? (v.u >> 16 | 0x40) : r);
}

#define PAIR(id, ctype, kind)                                                          \
  static void sum_##id(ctype *out, const ctype *a, const ctype *b, size_t n) {         \
    for (size_t i = 0; i < n; i++) out[i] = SUM_##kind(ctype, a[i], b[i]);             \
  }                                                                                    \
  static void max_##id(ctype *out, const ctype *a, const ctype *b, size_t n) {         \
    for (size_t i = 0; i < n; i++) out[i] = a[i] > b[i] || a[i] != a[i] ? a[i] : b[i]; \
  }                                                                                    \
  static void min_##id(ctype *out, const ctype *a, const ctype *b, size_t n) {         \
    for (size_t i = 0; i < n; i++) out[i] = a[i] < b[i] || a[i] != a[i] ? a[i] : b[i]; \
  }
#define SUM_BOOL(ctype, a, b) ((ctype)((a) | (b)))
#define SUM_INT(ctype, a, b) ((ctype)((uint64_t)(a) + (uint64_t)(b)))
#define SUM_FLOAT(ctype, a, b) ((ctype)((a) + (b)))
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wtautological-compare"
PAIR(BOOL, uint8_t, BOOL)
PAIR(U8, uint8_t, INT)
PAIR(I8, int8_t, INT)
PAIR(I16, int16_t, INT)
PAIR(I32, int32_t, INT)
PAIR(I64, int64_t, INT)
PAIR(F32, float, FLOAT)
PAIR(F64, double, FLOAT)
#pragma GCC diagnostic pop

static bool is_sum(CommReduce r) {
  return r == COMM_SUM || r == COMM_AVG;
}

void combine_pair(CommReduce r, DType t, void *out, const void *a, const void *b, size_t n) {
  switch (t) {
#define CASE(id)                                    \
  case id:                                          \
    if (is_sum(r)) sum_##id(out, a, b, n);          \
    else if (r == COMM_MAX) max_##id(out, a, b, n); \
    else min_##id(out, a, b, n);                    \
    break;
    CASE(BOOL)
    CASE(U8)
    CASE(I8)
    CASE(I16)
    CASE(I32)
    CASE(I64)
    CASE(F32)
    CASE(F64)
#undef CASE
    default: MF_ASSERT(false, "combine_pair: dtype %d", (int)t);
  }
}

void combine_widen(DType t, float *acc, const void *x, size_t n) {
  const uint16_t *h = x;
  if (t == F16)
    for (size_t i = 0; i < n; i++) acc[i] = dtype_f16_to_f32(h[i]);
  else
    for (size_t i = 0; i < n; i++) acc[i] = bf16_wide(h[i]);
}

#define WIDE(op, value)                                                     \
  static void wide_##op(DType t, float *acc, const uint16_t *h, size_t n) { \
    if (t == F16)                                                           \
      for (size_t i = 0; i < n; i++) {                                      \
        float a = acc[i], x = dtype_f16_to_f32(h[i]);                       \
        acc[i] = value;                                                     \
      }                                                                     \
    else                                                                    \
      for (size_t i = 0; i < n; i++) {                                      \
        float a = acc[i], x = bf16_wide(h[i]);                              \
        acc[i] = value;                                                     \
      }                                                                     \
  }
WIDE(sum, a + x)
WIDE(max, a > x || a != a ? a : x)
WIDE(min, a < x || a != a ? a : x)

void combine_wide(CommReduce r, DType t, float *acc, const void *x, size_t n) {
  if (is_sum(r)) wide_sum(t, acc, x, n);
  else if (r == COMM_MAX) wide_max(t, acc, x, n);
  else wide_min(t, acc, x, n);
}

void combine_divide(DType t, void *x, int by, size_t n) {
  if (t == F64)
    for (size_t i = 0; i < n; i++) ((double *)x)[i] /= by;
  else
    for (size_t i = 0; i < n; i++) ((float *)x)[i] /= (float)by;
}

void combine_narrow(DType t, void *out, const float *acc, size_t n) {
  uint16_t *h = out;
  if (t == F16)
    for (size_t i = 0; i < n; i++) h[i] = dtype_f32_to_f16(acc[i]);
  else
    for (size_t i = 0; i < n; i++) h[i] = bf16_narrow(acc[i]);
}
