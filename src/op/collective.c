/* What moves between ranks, as records: shapes and dtypes are inferred, and there is no kernel. See
 * op_comm.h. Inputs and outputs of those that communicate lie in one piece. `after` is what the
 * rank communicates before, so that all ranks do so in one order. */
#include "op_args.h"
#include "op_comm.h"
#include "op_ids.h"
#include "sbp_rule.h"

static int sized(Infer *I, const IntList *size, DType dtype) {
  int rc = infer_want_sizes(I, "size", size, (int)size->n, dtype);
  return rc ? rc : infer_shape(I, dtype, (int)size->n, size->v);
}

static int like_input(Infer *I) {
  return infer_shape(I, (DType)I->in[0]->dtype, I->in[0]->ndim, I->in[0]->shape);
}

/* -- Of graphs of whole tensors ---------------------------------------------------------------- */

/* x, lying as the output does; a local x is whole, and equal on all ranks. */
OP(box, .signature = "box(Tensor x) -> Tensor", .flags = OP_HIDDEN | OP_NO_GRAD | OP_BOX,
   .sbp = "B", .infer = like_input)

static int box_parts_infer(Infer *I) {
  const struct box_parts_args *a = I->args;
  return sized(I, &a->size, (DType)I->in[0]->dtype);
}

/* The tensor of which the local x is this rank's part. */
OP(box_parts, .signature = "box_parts(Tensor x, int[] size) -> Tensor",
   .flags = OP_HIDDEN | OP_NO_GRAD | OP_BOX, .sbp = "B", .infer = box_parts_infer)

static int box_part_infer(Infer *I) {
  const struct box_part_args *a = I->args;
  return sized(I, &a->size, (DType)I->in[0]->dtype);
}

/* This rank's part of x, of this size. */
OP(box_part, .signature = "box_part(Tensor x, int[] size) -> Tensor",
   .flags = OP_HIDDEN | OP_NO_GRAD | OP_BOX, .sbp = "B", .infer = box_part_infer)

/* -- Of one rank ------------------------------------------------------------------------------- */

static int want_dim(Infer *I, const char *name, int64_t dim, int ndim) {
  if (dim >= 0 && dim < ndim) return 0;
  return infer_error(I, "%s is %lld, x has %d dims", name, (long long)dim, ndim);
}

/* All sizes are those of x but along these dims. */
static int resized(Infer *I, const IntList *size, int64_t d, int64_t e) {
  const Meta *x = I->in[0];
  int rc = size->n == x->ndim
               ? 0
               : infer_error(I, "size has %d entries, x has %d dims", (int)size->n, x->ndim);
  if (!rc) rc = want_dim(I, "dim", d, x->ndim);
  if (!rc) rc = want_dim(I, "to", e, x->ndim);
  for (int k = 0; k < x->ndim && !rc; k++)
    if (k != d && k != e && size->v[k] != x->shape[k])
      rc = infer_error(I, "size is another than x's along dim %d", k);
  return rc ? rc : sized(I, size, (DType)x->dtype);
}

/* The sum, maximum or minimum of the x of all ranks of the group. */
OP(all_reduce,
   .signature =
       "all_reduce(Tensor x, Tensor? after=None, *, int group, str(sum|max|min) "
       "reduce=sum) -> Tensor",
   .flags = OP_HIDDEN | OP_NO_GRAD | OP_COMM | OP_BLOCKWISE, .sbp = "B", .infer = like_input)

static int reduce_bucket_infer(Infer *I) {
  int rc = 0;
  for (int k = 1; k < I->n_in && !rc; k++)
    rc = I->in[k]->dtype == I->in[1]->dtype
             ? infer_shape(I, (DType)I->in[k]->dtype, I->in[k]->ndim, I->in[k]->shape)
             : infer_error(I, "tensors are of different dtypes");
  return rc;
}

/* The same of each x, at once. */
OP(reduce_bucket,
   .signature =
       "reduce_bucket(Tensor? after, Tensor[] xs, *, int group, str(sum|max|min) "
       "reduce=sum) -> Tensor[]",
   .flags = OP_HIDDEN | OP_NO_GRAD | OP_COMM | OP_BLOCKWISE, .sbp = "B",
   .infer = reduce_bucket_infer)

static int reduce_scatter_infer(Infer *I) {
  const struct reduce_scatter_args *a = I->args;
  return resized(I, &a->size, a->dim, a->dim);
}

/* This rank's part along dim of the same. */
OP(reduce_scatter,
   .signature =
       "reduce_scatter(Tensor x, Tensor? after=None, *, int group, int dim, int[] size, "
       "str(sum|max|min) reduce=sum) -> Tensor",
   .flags = OP_HIDDEN | OP_NO_GRAD | OP_COMM, .sbp = "B", .infer = reduce_scatter_infer)

static int all_gather_infer(Infer *I) {
  const struct all_gather_args *a = I->args;
  return resized(I, &a->size, a->dim, a->dim);
}

/* The x of all ranks of the group, one behind the other along dim. */
OP(all_gather,
   .signature =
       "all_gather(Tensor x, Tensor? after=None, *, int group, int dim, int[] size) -> "
       "Tensor",
   .flags = OP_HIDDEN | OP_NO_GRAD | OP_COMM, .sbp = "B", .infer = all_gather_infer)

static int all_to_all_infer(Infer *I) {
  const struct all_to_all_args *a = I->args;
  return resized(I, &a->size, a->dim, a->to);
}

/* From parts along dim to parts along dim `to`. */
OP(all_to_all,
   .signature =
       "all_to_all(Tensor x, Tensor? after=None, *, int group, int dim, int to, int[] "
       "size) -> Tensor",
   .flags = OP_HIDDEN | OP_NO_GRAD | OP_COMM, .sbp = "B", .infer = all_to_all_infer)

static int exchange_infer(Infer *I) {
  const struct exchange_args *a = I->args;
  if (I->in[0] && I->in[0]->dtype != a->dtype)
    return infer_error(I, "x is not of the dtype that it says");
  return sized(I, &a->size, (DType)a->dtype);
}

/* From layout `from`, of which x is this rank's part (absent: it has none), to this rank's part
 * under layout `to` of a tensor of sizes `whole`; one of size [0] where it has none. */
OP(exchange,
   .signature =
       "exchange(Tensor? x, Tensor? after=None, *, int from, int to, int[] whole, int[] "
       "size, dtype dtype) -> Tensor",
   .flags = OP_HIDDEN | OP_NO_GRAD | OP_COMM, .sbp = "B", .infer = exchange_infer)
