/* Which kernel of a pointwise op a call takes, and in which dtype it computes. Static, since it
 * belongs to one instruction set. */
#ifndef MF_POINTWISE_KERNEL_H
#define MF_POINTWISE_KERNEL_H
#include "block.h"
#include "op_ids.h"

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

/* The kernel of one call; fn is NULL where there is none. */
__attribute__((unused)) static void pointwise_kernel(const OpCall *c, PointwiseKernel *k) {
  const OpSpec *spec = c->op->spec[OP_ISA];
  k->bool_out = spec->flags & OP_BOOL_OUT;
  k->n_in = c->n_in;
  k->single = NULL;
  k->cls = block_class(k->bool_out ? op_promote_views(c->n_in, c->in) : pw_dtype(c));
  if (k->cls == PW_I64) k->whole = op_promote_views(c->n_in, c->in);
  k->fn = spec->pointwise[k->cls];
  if (spec->choose) spec->choose(c, k);
}

#endif
