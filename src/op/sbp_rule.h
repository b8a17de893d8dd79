/* SBP signatures: for one call, how its inputs may lie on the ranks of one axis so that each rank
 * computes its part alone, and how the outputs then lie. Everything broadcast is always legal and
 * comes first. An op says more in one of three ways:
 *
 * Index notation in `sbp`: one list of letters for each tensor param, a comma between two, outputs
 * behind the arrow.
 *
 *   "... m k, ... k n -> ... m n"     matmul
 *   "... k, n k, + n -> ... n"        linear: the bias is added
 *   "n C h w"                         each output has the letters of the first input
 *
 * A letter names a dim; the same letter is the same size. Each small letter gives the signature
 * "split there": S for the tensors that have it, B for the others; an output without it becomes a
 * partial sum P, and so must be then what is added (+). A capital is a dim that cannot be split.
 * "..." stands for any number of dims, which match from the right; "...!" for dims that cannot be
 * split. A tensor with fewer dims than letters lacks the first ones. Where an input has size 1 and
 * another more, the first is B. A Tensor[] has one list for all. "B": nothing can be split, on
 * purpose.
 *
 * `linear`: which inputs may be partial sums, by name: "a+b" both at once, "a|b" one at a time with
 * the rest B.
 *
 * A function `sbp_rule` where letters cannot say it, for instance because the dim is an argument;
 * below are those that several ops share. View ops have sbp_view and "x" unless they say otherwise.
 *
 * An op whose signature has a list `int[] size` takes the shape of its first output there, one with
 * `int num` its first size; sbp_localize puts the part's in its place. */
#ifndef MF_SBP_RULE_H
#define MF_SBP_RULE_H
#include "op.h"
#include "sbp.h"
#include "vec.h"

/* One question and its answer. `found` holds signatures one behind the other, each of n_in + n_out
 * values: inputs as flattened (absent ones B), then outputs. */
struct SbpAsk {
  const Op *op;
  const void *args; /* as inference left them */
  const Meta *const *in, *const *out;
  int n_in, n_out;
  uint32_t added; /* tensor params that notation marked + */
  int parts;      /* how many ranks there are along the axis: sizes below it are not split */
  VEC(Sbp) found;
};

/* Finds all signatures. */
int sbp_signatures(SbpAsk *q);
void sbp_free(SbpAsk *q);
static inline int sbp_count(const SbpAsk *q) {
  return q->n_in + q->n_out ? (int)q->found.n / (q->n_in + q->n_out) : 0;
}
static inline const Sbp *sbp_row(const SbpAsk *q, int i) {
  return q->found.at + (size_t)i * (size_t)(q->n_in + q->n_out);
}

/* Changes args to what a part must be called with: `size`, where there is one, becomes the shape of
 * its first output. */
void sbp_localize(const Op *op, void *args, const Meta *out);

/* -- For rules --------------------------------------------------------------------------------- */

/* One more signature, all B, to be filled in; NULL with the text set when out of memory. What is
 * not legal for the sizes (a split below `parts`) is dropped afterwards, and so are repeats. */
Sbp *sbp_add(SbpAsk *q);
int sbp_notation(SbpAsk *q, const char *text);
int sbp_linear(SbpAsk *q, const char *names);
/* Input `in` and output `out` split at these dims, the rest B. */
int sbp_add_split(SbpAsk *q, int in, int in_dim, int out, int out_dim);
/* The dims that the arguments dim, dims, dim0, dim1 and dim2 name, as bits, for a tensor of ndim
 * dims; an empty list names all. */
uint32_t sbp_named_dims(const SbpAsk *q, int ndim);

/* Everything that has input 0's number of dims is split along each dim but the named ones; numbers
 * are B. */
int sbp_all_but_dim(SbpAsk *q);
/* Of what makes a tensor: any dim, where an element depends at most on its place. */
int sbp_fresh(SbpAsk *q);
/* Reductions of input 0 over the named dims, kept with size 1 where keepdim is true. Split along a
 * dim that stays; along a reduced one the outputs are partial, or it cannot be split (sbp_reduce).
 */
int sbp_reduce(SbpAsk *q);
int sbp_reduce_sum(SbpAsk *q);
int sbp_reduce_max(SbpAsk *q);
int sbp_reduce_min(SbpAsk *q);
/* Of any view of input 0: where a dim of an output walks memory as a dim of the input does. The dim
 * that an argument `dim` cuts stays whole. */
int sbp_view(SbpAsk *q);

#endif
