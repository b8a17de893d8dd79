/* Sorted ids without repeats, for row-sparse gradients (eager/sparse.c). */
#include <stdlib.h>

#include "mem.h"
#include "op.h"
#include "op_args.h"
#include "sort.h"

/* The ids of x sorted; *block is to be freed. NULL with the error set. */
static const SortPair *sorted_ids(const Op *op, const View *x, SortPair **block) {
  const int64_t *ids = x->data;
  int64_t n = x->shape[0], most = 0;
  *block = mem_alloc(sizeof **block * (size_t)(2 * n));
  if (!*block) {
    err_set(MF_ENOMEM, "%s: out of memory", op->name);
    return NULL;
  }
  for (int64_t i = 0; i < n; i++) {
    int64_t id = ids[i * x->stride[0]];
    (*block)[i] = (SortPair){(uint64_t)id, i};
    if (id > most) most = id;
    if (id >= 0) continue;
    err_set(MF_EINVAL, "%s: x[%lld] is %lld; ids count from 0", op->name, (long long)i,
            (long long)id);
    return NULL;
  }
  return sort_pairs(n, 64 - __builtin_clzll((uint64_t)most | 1), *block, *block + n);
}

static int merge_ids_infer(Infer *I) {
  int rc = infer_want_dtype(I, 0, I64);
  if (!rc) rc = infer_want_ndim(I, 0, 1);
  if (rc) return rc;
  SortPair *block;
  const SortPair *s = sorted_ids(I->op, &I->views[0], &block);
  int64_t n = I->in[0]->shape[0], distinct = n > 0;
  for (int64_t i = 1; s && i < n; i++) distinct += s[i].key != s[i - 1].key;
  mem_free(block);
  if (!s) return MF_EINVAL;
  rc = infer_shape(I, I64, 1, &distinct);
  return rc ? rc : infer_shape(I, I64, 1, &n);
}

static int merge_ids_cpu(const OpCall *c) {
  int64_t *ids = c->out[0].data, *place = c->out[1].data, n = c->in[0].shape[0];
  SortPair *block;
  const SortPair *s = sorted_ids(c->op, &c->in[0], &block);
  int64_t at = -1;
  for (int64_t i = 0; s && i < n; i++) {
    if (!i || s[i].key != s[i - 1].key) ids[++at] = (int64_t)s[i].key;
    place[s[i].place] = at;
  }
  for (int64_t i = at + 1; s && i < c->out[0].shape[0]; i++) ids[i] = ids[at];
  mem_free(block);
  return s ? 0 : MF_EINVAL;
}

/* The distinct ids, sorted, and for each one given its place among them. */
OP(merge_ids, .signature = "merge_ids(Tensor x) -> (Tensor ids, Tensor place)",
   .flags = OP_HIDDEN | OP_DATA | OP_NO_GRAD, .sbp = "B", .infer = merge_ids_infer,
   .cpu = merge_ids_cpu)

static int merge_ids_padded_infer(Infer *I) {
  int rc = infer_want_dtype(I, 0, I64);
  if (!rc) rc = infer_want_ndim(I, 0, 1);
  if (!rc) rc = infer_shape(I, I64, 1, I->in[0]->shape);
  return rc ? rc : infer_shape(I, I64, 1, I->in[0]->shape);
}

/* The same, as many ids as x has: the last of the distinct ones is repeated. Its shapes do not
 * depend on data. */
OP(merge_ids_padded, .signature = "merge_ids_padded(Tensor x) -> (Tensor ids, Tensor place)",
   .flags = OP_HIDDEN | OP_NO_GRAD, .sbp = "B", .infer = merge_ids_padded_infer,
   .cpu = merge_ids_cpu)
