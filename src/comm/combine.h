/* Sums, maxima and minima of contributions; see combine.c. */
#ifndef MF_COMBINE_H
#define MF_COMBINE_H
#include "comm.h"
#include "dtype.h"

/* Are this dtype's sums gathered in float32? */
static inline bool combine_is_wide(DType t) {
  return t == F16 || t == BF16;
}
/* out[i] = a[i] (r) b[i]; out may be a or b. Not for wide dtypes. */
void combine_pair(CommReduce r, DType t, void *out, const void *a, const void *b, size_t n);
/* acc[i] = x[i], or acc[i] (r) x[i], in float32; for wide dtypes. */
void combine_widen(DType t, float *acc, const void *x, size_t n);
void combine_wide(CommReduce r, DType t, float *acc, const void *x, size_t n);
/* x[i] /= by, of F64 or else float32. */
void combine_divide(DType t, void *x, int by, size_t n);
void combine_narrow(DType t, void *out, const float *acc, size_t n);

#endif
