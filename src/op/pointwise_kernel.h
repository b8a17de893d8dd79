/* Which kernel of a pointwise op a call takes. Static, since it
 * belongs to one instruction set. */
#ifndef MF_POINTWISE_KERNEL_H
#define MF_POINTWISE_KERNEL_H
#include "block.h"
#include "op_ids.h"

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
