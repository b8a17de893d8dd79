/* Kernels of pointwise ops: over n elements (a multiple of 16), all operands contiguous and of one
 * compute type; bool results are bytes. Output and inputs may be the same block. */
#ifndef MF_POINTWISE_FN_H
#define MF_POINTWISE_FN_H
#include <stdbool.h>
#include <stdint.h>

typedef struct OpCall OpCall;

typedef void PointwiseFn(int64_t n, const void *args, const void *const *in, void *out);

typedef enum PointwiseClass { PW_F32, PW_F64, PW_I64, PW_CLASSES } PointwiseClass;

/* What computes one call. */
typedef struct PointwiseKernel {
  PointwiseFn *fn;
  PointwiseClass cls;
  bool bool_out;
  int whole;           /* of PW_I64: the dtype of the op, in which 0-d inputs take part */
  int n_in;            /* inputs that it reads, the first ones */
  PointwiseFn *single; /* the same where the last input is one element; NULL: there is none */
} PointwiseKernel;

/* Puts another kernel in the place of the usual one where the arguments, or the value of a 0-d
 * input, make it the better. */
typedef void PointwiseChoose(const OpCall *c, PointwiseKernel *k);

#endif
