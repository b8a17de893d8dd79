/* Names, sizes, promotion and single elements of the dtypes. */
#include <math.h>
#include <string.h>

#include "dtype.h"

typedef struct DTypeInfo {
  const char *name;
  uint8_t size, kind;
} DTypeInfo;

#define X(id, ctype, name, kind) {name, sizeof(ctype), kind},
static const DTypeInfo infos[] = {DTYPES(X)};
#undef X

_Static_assert(BOOL < U8 && I64 < F16 && F32 < F64,
               "dtype_is_float and promotion compare dtypes by order");

const char *dtype_name(DType t) {
  return infos[t].name;
}

DTypeKind dtype_kind(DType t) {
  return infos[t].kind;
}

int dtype_parse(const char *name) {
  for (int t = 0; t < DTYPE_COUNT; t++)
    if (strcmp(infos[t].name, name) == 0) return t;
  return DTYPE_NONE;
}

DType dtype_promote(DType a, DType b) {
  if (a == b) return a;
  DType low = a < b ? a : b, high = a < b ? b : a;
  if (low == U8 && infos[high].kind == KIND_INT) return high == I8 ? I16 : high;
  if (low == F16 && high == BF16) return F32;
  return high;
}

bool dtype_holds(DType t, double v) {
  if (infos[t].kind != KIND_INT) return true;
  double end = ldexp(1, 8 * infos[t].size - (t != U8)), low = t == U8 ? -end : -end - 1;
  return v > low && v < end;
}

float dtype_bf16_to_f32(uint16_t h) {
  uint32_t bits = (uint32_t)h << 16;
  float f;
  memcpy(&f, &bits, sizeof f);
  return f;
}

uint16_t dtype_f32_to_bf16(float f) {
  uint32_t bits;
  memcpy(&bits, &f, sizeof bits);
  if (f != f) return (uint16_t)(bits >> 16 | 0x40);
  return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

double dtype_get_f64(DType t, const void *p) {
  switch (t) {
    case F16: return (double)dtype_f16_to_f32(*(const uint16_t *)p);
    case BF16: return (double)dtype_bf16_to_f32(*(const uint16_t *)p);
    case F32: return (double)*(const float *)p;
    case F64: return *(const double *)p;
    default: return (double)dtype_get_i64(t, p);
  }
}

int64_t dtype_get_i64(DType t, const void *p) {
  switch (t) {
    case BOOL:
    case U8: return *(const uint8_t *)p;
    case I8: return *(const int8_t *)p;
    case I16: return *(const int16_t *)p;
    case I32: return *(const int32_t *)p;
    case I64: return *(const int64_t *)p;
    default: return dtype_f64_to_i64(dtype_get_f64(t, p));
  }
}

void dtype_set_f64(DType t, void *p, double v) {
  switch (t) {
    case BOOL: *(uint8_t *)p = v != 0; break;
    case F16: *(uint16_t *)p = dtype_f32_to_f16((float)v); break;
    case BF16: *(uint16_t *)p = dtype_f32_to_bf16((float)v); break;
    case F32: *(float *)p = (float)v; break;
    case F64: *(double *)p = v; break;
    default: dtype_set_i64(t, p, dtype_f64_to_i64(v));
  }
}

void dtype_set_i64(DType t, void *p, int64_t v) {
  switch (t) {
    case BOOL: *(uint8_t *)p = v != 0; break;
    case U8: *(uint8_t *)p = (uint8_t)v; break;
    case I8: *(int8_t *)p = (int8_t)v; break;
    case I16: *(int16_t *)p = (int16_t)v; break;
    case I32: *(int32_t *)p = (int32_t)v; break;
    case I64: *(int64_t *)p = v; break;
    default: dtype_set_f64(t, p, (double)v);
  }
}
