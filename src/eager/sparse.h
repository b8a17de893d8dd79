/* Row-sparse tensors: the gradient of a table of which a batch looked at a few rows.
 *
 * Of the first dim, n long, only some rows are kept: ids (int64 [k]) say which, values ([k, ...])
 * hold them; all others are zero. Ids may repeat, and such rows add up; `sparse_coalesce` merges
 * them. It is a Tensor without storage, whose meta has the whole shape. */
#ifndef MF_SPARSE_H
#define MF_SPARSE_H
#include "eager.h"

/* Takes counts of its own on both. NULL with the error set when they do not fit. */
Tensor *sparse_new(Tensor *ids, Tensor *values, int64_t n);
/* Another handle on the same ids and values. */
Tensor *sparse_alias(const Tensor *t);
/* Whether its ids or values were. */
bool sparse_is_freed(const Tensor *t);
/* Sorted ids without repeats; t itself, with one more count, when it is so. While a step is
 * compiled: as many ids as t has, of which the last is repeated, with rows of zeros. */
Tensor *sparse_coalesce(Eager *E, Tensor *t);
/* While one of n micro-batches is traced, the mean of what each of them has. */
Tensor *sparse_mean(Eager *E, Tensor *t, int n);
Tensor *sparse_to_dense(Eager *E, Tensor *t);
/* As t, but that nobody else sees or can write its ids and values: t itself, with one more count,
 * when it is so and the caller's count is the only one. */
Tensor *sparse_own(Eager *E, Tensor *t);
/* No row is left. */
int sparse_zero(Eager *E, Tensor *t);

/* a + b, where either may be row-sparse: rows and rows are put one behind the other, rows and dense
 * give dense. */
Tensor *sparse_add(Eager *E, Tensor *a, Tensor *b);
/* dense += rows */
int sparse_add_into(Eager *E, Tensor *dense, const Tensor *rows);

/* A call in which a row-sparse tensor takes part: sums, and ops that are linear in it. */
int sparse_call(Eager *E, EagerCall *c);

#endif
