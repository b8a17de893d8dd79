/* Row-sparse tensors: the gradient of a table of which a batch looked at a few rows.
 *
 * Of the first dim, n long, only some rows are kept: ids (int64 [k]) say which, values ([k, ...])
 * hold them; all others are zero. Ids may repeat, and such rows add up; `sparse_coalesce` merges them.
 * It is a Tensor without storage, whose meta has the whole shape. */
#ifndef MF_SPARSE_H
#define MF_SPARSE_H
#include "eager.h"

/* Takes counts of its own on both. NULL with the error set when they do not fit. */
Tensor *sparse_new(Tensor *ids, Tensor *values, int64_t n);
/* Sorted ids without repeats. */
Tensor *sparse_coalesce(Eager *E, Tensor *t);
Tensor *sparse_to_dense(Eager *E, Tensor *t);

/* A call in which a row-sparse tensor takes part: ops that are linear in it work on its values. */
int sparse_call(Eager *E, EagerCall *c);

/* a + b, where either may be row-sparse: rows and rows are put one behind the other, rows and dense
 * give dense. */
Tensor *sparse_add(Eager *E, Tensor *a, Tensor *b);

#endif
