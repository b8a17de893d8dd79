/* Which signature a call on global tensors runs under: for each axis of the placement one of those
 * that the op's rule gives, so that bringing the inputs there costs least. Pure: the same for eager
 * calls and for graphs. */
#ifndef MF_SBP_CHOICE_H
#define MF_SBP_CHOICE_H
#include "op.h"
#include "placement.h"

typedef struct SbpChoice {
  const Op *op;
  const void *args;                   /* as inference left them */
  const Meta *const *in, *const *out; /* logical; NULL: absent */
  int n_in, n_out;
  bool into; /* output 0 is written where input 0 lies */
  const Placement *placement;
  const SbpList *have; /* of the inputs; of numbers and absent ones all B */
  SbpList *want;       /* the answer: inputs, then outputs */
  double price;        /* of it, in bytes */
} SbpChoice;

/* Takes the signature with the lowest sum, over the inputs, of what conversion costs, or -10 where
 * none is needed; of equal ones the first, all B being the very first. What is mutated is converted
 * back as well. A later axis is asked about the smallest of the parts that the earlier ones make:
 * what is legal for it is legal for all. */
int sbp_choose(SbpChoice *c);

#endif
