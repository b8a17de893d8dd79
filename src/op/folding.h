/* How a reduction over dims is said to those who do it as a part of something else, and to those
 * who decide about that: the answer of `folding` in its record. */
#ifndef MF_FOLDING_H
#define MF_FOLDING_H
#include "op.h"

struct Folding {
  const struct Fold *fold; /* of fold_plan.h, for the instruction set of the record */
  const IntList *dims;     /* of its arguments; as inference left them */
  bool keepdim;
  bool of_input; /* computed as the input's dtype says, whatever the result's is */
};

#endif
