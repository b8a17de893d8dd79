/* Blocks: how kernels read and write operands of any dtype and stride.
 *
 * A kernel computes on contiguous blocks of one of three compute types (float for float16, bfloat16
 * and float32; double; int64 for whole numbers and bool). `block_load` gives a block of an operand
 * as compute type: a pointer into the tensor itself where dtype and strides allow, else a converted
 * copy in a buffer that stays in L1. `block_store` is the way back. The functions are static: each
 * file that includes this is compiled per instruction set. */
#ifndef MF_BLOCK_H
#define MF_BLOCK_H
#include <string.h>

#include "pointwise_class.h"

enum { BLOCK = 512 };

typedef union BlockBuffer {
  float f32[BLOCK];
  double f64[BLOCK];
  int64_t i64[BLOCK];
  uint8_t u8[BLOCK];
} __attribute__((aligned(64))) BlockBuffer;

static inline float block_half(uint16_t h) {
  return dtype_f16_to_f32(h);
}
static inline float block_bfloat(uint16_t h) {
  union {
    uint32_t u;
    float f;
  } v = {.u = (uint32_t)h << 16};
  return v.f;
}
static inline uint16_t block_to_bfloat(float f) {
  union {
    float f;
    uint32_t u;
  } v = {.f = f};
  uint32_t rounded = (v.u + 0x7fff + (v.u >> 16 & 1)) >> 16;
  return (uint16_t)(f != f ? v.u >> 16 | 0x40 : rounded);
}
static inline uint16_t block_to_half(float f) {
  return dtype_f32_to_f16(f);
}

/* Conversions of one element, by source and target. A float becomes an integer by truncation. */
#define BLOCK_ID(v) (v)
#define BLOCK_TRUE(v) ((v) != 0)
#define BLOCK_TRUNC(v) dtype_f64_to_i64((double)(v))

/* dst[i] = src[i * step], i < n; loops of their own for steps 1 and 0, which vectorise. */
#define BLOCK_CONVERT(name, S, D, f)                                      \
  static void name(int64_t n, const void *from, int64_t step, void *to) { \
    const S *src = from;                                                  \
    D *dst = to;                                                          \
    if (step == 1) {                                                      \
      for (int64_t i = 0; i < n; i++) dst[i] = (D)f(src[i]);              \
    } else if (step == 0 && n > 0) {                                      \
      D all = (D)f(*src);                                                 \
      for (int64_t i = 0; i < n; i++) dst[i] = all;                       \
    } else                                                                \
      for (int64_t i = 0; i < n; i++) dst[i] = (D)f(src[i * step]);       \
  }
#define BLOCK_LOADS(C, T, from_float)                           \
  BLOCK_CONVERT(block_load_bool_##C, uint8_t, T, BLOCK_ID)      \
  BLOCK_CONVERT(block_load_u8_##C, uint8_t, T, BLOCK_ID)        \
  BLOCK_CONVERT(block_load_i8_##C, int8_t, T, BLOCK_ID)         \
  BLOCK_CONVERT(block_load_i16_##C, int16_t, T, BLOCK_ID)       \
  BLOCK_CONVERT(block_load_i32_##C, int32_t, T, BLOCK_ID)       \
  BLOCK_CONVERT(block_load_i64_##C, int64_t, T, BLOCK_ID)       \
  BLOCK_CONVERT(block_load_f16_##C, uint16_t, T, block_half)    \
  BLOCK_CONVERT(block_load_bf16_##C, uint16_t, T, block_bfloat) \
  BLOCK_CONVERT(block_load_f32_##C, float, T, from_float)       \
  BLOCK_CONVERT(block_load_f64_##C, double, T, from_float)
BLOCK_LOADS(f32, float, BLOCK_ID)
BLOCK_LOADS(f64, double, BLOCK_ID)
BLOCK_LOADS(i64, int64_t, BLOCK_TRUNC)

typedef void BlockConvert(int64_t n, const void *from, int64_t step, void *to);

#define BLOCK_LOAD_ROW(C)                                                                \
  {                                                                                      \
    block_load_bool_##C, block_load_u8_##C, block_load_i8_##C, block_load_i16_##C,       \
        block_load_i32_##C, block_load_i64_##C, block_load_f16_##C, block_load_bf16_##C, \
        block_load_f32_##C, block_load_f64_##C                                           \
  }
static BlockConvert *const block_loads[PW_CLASSES][DTYPE_COUNT]
    __attribute__((unused)) = {BLOCK_LOAD_ROW(f32), BLOCK_LOAD_ROW(f64), BLOCK_LOAD_ROW(i64)};
_Static_assert(BOOL == 0 && U8 == 1 && I8 == 2 && I16 == 3 && I32 == 4 && I64 == 5 && F16 == 6 &&
                   BF16 == 7 && F32 == 8 && F64 == 9,
               "the rows above are in the order of DTYPES");

/* dst[i * step] = src[i] */
#define BLOCK_SCATTER(name, S, D, f)                                      \
  static void name(int64_t n, const void *from, int64_t step, void *to) { \
    const S *src = from;                                                  \
    D *dst = to;                                                          \
    if (step == 1)                                                        \
      for (int64_t i = 0; i < n; i++) dst[i] = (D)f(src[i]);              \
    else                                                                  \
      for (int64_t i = 0; i < n; i++) dst[i * step] = (D)f(src[i]);       \
  }
#define BLOCK_STORES(C, T, to_int)                                  \
  BLOCK_SCATTER(block_store_bool_##C, T, uint8_t, BLOCK_TRUE)       \
  BLOCK_SCATTER(block_store_u8_##C, T, uint8_t, to_int)             \
  BLOCK_SCATTER(block_store_i8_##C, T, int8_t, to_int)              \
  BLOCK_SCATTER(block_store_i16_##C, T, int16_t, to_int)            \
  BLOCK_SCATTER(block_store_i32_##C, T, int32_t, to_int)            \
  BLOCK_SCATTER(block_store_i64_##C, T, int64_t, to_int)            \
  BLOCK_SCATTER(block_store_f16_##C, T, uint16_t, block_to_half)    \
  BLOCK_SCATTER(block_store_bf16_##C, T, uint16_t, block_to_bfloat) \
  BLOCK_SCATTER(block_store_f32_##C, T, float, BLOCK_ID)            \
  BLOCK_SCATTER(block_store_f64_##C, T, double, BLOCK_ID)
BLOCK_STORES(f32, float, BLOCK_TRUNC)
BLOCK_STORES(f64, double, BLOCK_TRUNC)
BLOCK_STORES(i64, int64_t, BLOCK_ID)

#define BLOCK_STORE_ROW(C)                                                                   \
  {                                                                                          \
    block_store_bool_##C, block_store_u8_##C, block_store_i8_##C, block_store_i16_##C,       \
        block_store_i32_##C, block_store_i64_##C, block_store_f16_##C, block_store_bf16_##C, \
        block_store_f32_##C, block_store_f64_##C                                             \
  }
static BlockConvert *const block_stores[PW_CLASSES][DTYPE_COUNT]
    __attribute__((unused)) = {BLOCK_STORE_ROW(f32), BLOCK_STORE_ROW(f64), BLOCK_STORE_ROW(i64)};

/* -- Walking a common shape -------------------------------------------------------------------- */

#ifndef WALK_OPERANDS /* a file that wants more says so first */
#define WALK_OPERANDS 8
#endif

/* The shape over which several operands are walked in the order of the first operand's memory,
 * adjacent dims merged where all operands allow it. Operand 0 is the output. Steps count elements.
 */
typedef struct Walk {
  int ndim, n;
  int64_t numel, shape[MF_MAX_DIMS];
  int64_t step[WALK_OPERANDS][MF_MAX_DIMS];
  char *data[WALK_OPERANDS];
  size_t size[WALK_OPERANDS]; /* bytes an element */
} Walk;

static inline void walk_operand(Walk *w, int k, const View *v, const View *like) {
  w->data[k] = v->data;
  w->size[k] = dtype_size((DType)v->dtype);
  shape_broadcast_strides(like->ndim, like->shape, v->ndim, v->shape, v->stride, w->step[k]);
}

static inline void walk_swap(Walk *w, int a, int b) {
  int64_t t = w->shape[a];
  w->shape[a] = w->shape[b], w->shape[b] = t;
  for (int k = 0; k < w->n; k++)
    t = w->step[k][a], w->step[k][a] = w->step[k][b], w->step[k][b] = t;
}

static void walk_init(Walk *w, const View *out, int n_in, const View *in) __attribute__((unused));
static void walk_init(Walk *w, const View *out, int n_in, const View *in) {
  w->ndim = out->ndim;
  w->n = n_in + 1;
  w->numel = view_numel(out);
  memcpy(w->shape, out->shape, sizeof(int64_t) * (size_t)out->ndim);
  walk_operand(w, 0, out, out);
  for (int k = 0; k < n_in; k++) walk_operand(w, k + 1, &in[k], out);
  for (int i = 1; i < w->ndim; i++) /* outer dims first: by the output's steps, stable */
    for (int j = i; j > 0 && w->step[0][j - 1] < w->step[0][j]; j--) walk_swap(w, j - 1, j);
  int last = 0;
  for (int d = 0; d < w->ndim; d++) {
    if (w->shape[d] == 1) continue;
    bool merge = last > 0;
    for (int k = 0; k < w->n && merge; k++)
      merge = w->step[k][last - 1] == w->step[k][d] * w->shape[d];
    int at = merge ? last - 1 : last++;
    w->shape[at] = merge ? w->shape[at] * w->shape[d] : w->shape[d];
    for (int k = 0; k < w->n; k++) w->step[k][at] = w->step[k][d];
  }
  w->ndim = last;
}

/* The operand's elements [first, first + n) in walking order, gathered through `convert` into `to`,
 * or scattered from `to`. */
static void walk_rows(const Walk *w, int k, int64_t first, int64_t n, BlockConvert *convert,
                      void *buffer, size_t buffer_size, bool store) __attribute__((unused));
static void walk_rows(const Walk *w, int k, int64_t first, int64_t n, BlockConvert *convert,
                      void *buffer, size_t buffer_size, bool store) {
  int64_t index[MF_MAX_DIMS], rest = first, offset = 0;
  int inner = w->ndim - 1;
  if (inner < 0) {
    if (store) convert(1, buffer, 1, w->data[k]);
    else convert(1, w->data[k], 1, buffer);
    return;
  }
  for (int d = inner; d >= 0; d--) {
    index[d] = rest % w->shape[d];
    rest /= w->shape[d];
    offset += index[d] * w->step[k][d];
  }
  char *at = buffer;
  while (n > 0) {
    int64_t run = w->shape[inner] - index[inner];
    if (run > n) run = n;
    char *p = w->data[k] + offset * (int64_t)w->size[k];
    if (store) convert(run, at, w->step[k][inner], p);
    else convert(run, p, w->step[k][inner], at);
    at += run * (int64_t)buffer_size;
    n -= run;
    index[inner] += run;
    offset += run * w->step[k][inner];
    for (int d = inner; d > 0 && index[d] == w->shape[d]; d--) {
      offset += w->step[k][d - 1] - w->shape[d] * w->step[k][d];
      index[d] = 0;
      index[d - 1]++;
    }
  }
}

/* True when the operand lies in walking order without gaps, false for others; true for every
 * operand of one element. */
static inline bool walk_is_flat(const Walk *w, int k) {
  int64_t step = 1;
  for (int d = w->ndim - 1; d >= 0; d--) {
    if (w->step[k][d] != step) return false;
    step *= w->shape[d];
  }
  return true;
}
static inline bool walk_is_constant(const Walk *w, int k) {
  for (int d = 0; d < w->ndim; d++)
    if (w->step[k][d]) return false;
  return true;
}

#endif
