/* In which type a pointwise op computes, and as what it reads its inputs. */
#ifndef MF_POINTWISE_CLASS_H
#define MF_POINTWISE_CLASS_H
#include "op.h"

static inline PointwiseClass block_class(DType t) {
  return t == F64 ? PW_F64 : dtype_is_float(t) ? PW_F32 : PW_I64;
}

static inline bool block_is_native(DType t, PointwiseClass c) {
  return (t == F32 && c == PW_F32) || (t == F64 && c == PW_F64) || (t == I64 && c == PW_I64);
}

/* The input as a kernel reads it: 0-d whole numbers are numbers of the op's dtype, which is what
 * their low bytes say: among uint8, -3 is 253. */
static inline View block_input(const PointwiseKernel *k, const View *v) {
  View input = *v;
  if (k->cls == PW_I64 && v->ndim == 0 &&
      dtype_size((DType)k->whole) <= dtype_size((DType)v->dtype))
    input.dtype = (uint8_t)k->whole;
  return input;
}

/* The dtype in which a call computes: the output's, but where it is written into a float narrower
 * than what the inputs make together, theirs. */
__attribute__((unused)) static DType pw_dtype(const OpCall *c) {
  DType out = (DType)c->out[0].dtype;
  bool wider = false;
  for (int k = 0; k < c->n_in; k++) wider |= c->in[k].dtype == F64 && !c->in[k].number;
  if (out == F64 || !wider || !dtype_is_float(out)) return out;
  DType in = op_promote_views(c->n_in, c->in);
  return in == F64 ? in : out;
}

#endif
