/* The element types. One list: enum, names, sizes and kinds come from it. */
#ifndef MF_DTYPE_H
#define MF_DTYPE_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* X(enum, C type, name, kind): kind orders promotion: bool < integer < float. Within a kind, rows
 * are ordered by rank. */
#define DTYPES(X)                           \
  X(BOOL, uint8_t, "bool", KIND_BOOL)       \
  X(U8, uint8_t, "uint8", KIND_INT)         \
  X(I8, int8_t, "int8", KIND_INT)           \
  X(I16, int16_t, "int16", KIND_INT)        \
  X(I32, int32_t, "int32", KIND_INT)        \
  X(I64, int64_t, "int64", KIND_INT)        \
  X(F16, uint16_t, "float16", KIND_FLOAT)   \
  X(BF16, uint16_t, "bfloat16", KIND_FLOAT) \
  X(F32, float, "float32", KIND_FLOAT)      \
  X(F64, double, "float64", KIND_FLOAT)

#define X(id, ctype, name, kind) id,
typedef enum DType { DTYPES(X) DTYPE_COUNT } DType;
#undef X

typedef enum DTypeKind { KIND_BOOL, KIND_INT, KIND_FLOAT } DTypeKind;

/* "no dtype given" where a dtype is optional. */
enum { DTYPE_NONE = -1 };

const char *dtype_name(DType t);
static inline size_t dtype_size(DType t) {
#define X(id, ctype, name, kind) sizeof(ctype),
  static const uint8_t sizes[] = {DTYPES(X)};
#undef X
  return sizes[t];
}
DTypeKind dtype_kind(DType t);

static inline bool dtype_is_float(DType t) {
  return t >= F16;
}

/* The dtype of that name ("float" and the like are not names here), or DTYPE_NONE. */
int dtype_parse(const char *name);

/* PyTorch's promotion of two tensors of at least one dimension each. */
DType dtype_promote(DType a, DType b);
/* Whether v, its fraction cut off, is within the range of t: floats and bool hold any number, and
 * unsigned ones those below zero too, from -max on, which wrap as in C. */
bool dtype_holds(DType t, double v);

/* Scalar conversions of the two half types; rounding to nearest even, NaN stays NaN. */
float dtype_bf16_to_f32(uint16_t h);
uint16_t dtype_f32_to_bf16(float f);

typedef union DTypeBits {
  uint32_t u;
  float f;
} DTypeBits;

/* Without branches, so that loops of them are vectorised. A product takes the exponent's bias away
 * and makes subnormals right. */
static inline float dtype_f16_to_f32(uint16_t h) {
  uint32_t bits = (uint32_t)(h & 0x7fff) << 13;
  DTypeBits v = {.u = bits}, r;
  v.f *= 0x1p112f;
  r.u = (bits >= 0x0f800000 ? bits | 0x7f800000 : v.u) | (uint32_t)(h & 0x8000) << 16;
  return r.f;
}

/* Rounds to the nearest, ties to even. */
static inline uint16_t dtype_f32_to_f16(float f) {
  DTypeBits v = {.f = f}, small;
  uint32_t sign = v.u >> 16 & 0x8000, bits = v.u & 0x7fffffff;
  v.u = bits;
  small.f = v.f + 0.5f; /* a multiple of 2^-24, as subnormals are */
  uint32_t usual = (bits + 0xfff + (bits >> 13 & 1) - 0x38000000) >> 13;
  uint32_t h = bits < 0x38800000 ? small.u - 0x3f000000 : usual;
  h = bits >= 0x477ff000 ? 0x7c00 : h; /* 65520 and above round to infinity */
  h = bits > 0x7f800000 ? 0x7e00 | (bits >> 13 & 1023) : h;
  return (uint16_t)(sign | h);
}

/* Reads or writes one element as double or int64; floats to integers truncate toward zero, and
 * values that do not fit wrap modulo 2^64 where C leaves it undefined. */
double dtype_get_f64(DType t, const void *p);
int64_t dtype_get_i64(DType t, const void *p);
void dtype_set_f64(DType t, void *p, double v);
void dtype_set_i64(DType t, void *p, int64_t v);

/* The int64 of a double without undefined behaviour: NaN gives INT64_MIN, as x86's instruction
 * does; others truncate and saturate to INT64_MIN. */
static inline int64_t dtype_f64_to_i64(double v) {
  return v >= -9223372036854775808.0 && v < 9223372036854775808.0 ? (int64_t)v : INT64_MIN;
}

#endif
