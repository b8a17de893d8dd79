/* Ops without kernels, by which graphs and plans say what moves between ranks: collective.c.
 *
 * Those of OP_BOX stand in graphs of whole tensors, whose values say how they lie on the ranks; the
 * others in graphs and plans of one rank, where `group` and `to` are numbers of records of the
 * graph or plan. The runtime does what they say. */
#ifndef MF_OP_COMM_H
#define MF_OP_COMM_H
#include "op.h"

enum {
  OP_BOX = 1 << 20, /* between layouts, or between a local tensor and a global one */
  OP_COMM = 1 << 21 /* communicates; each has the one before as input `after`: see pass/part.c */
};

static inline bool op_is_box(const Op *op) {
  return op->spec[0]->flags & OP_BOX;
}
static inline bool op_is_comm(const Op *op) {
  return op->spec[0]->flags & OP_COMM;
}

#endif
