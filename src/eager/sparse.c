#include "op_ids.h"
#include "sparse.h"

Tensor *sparse_new(Tensor *ids, Tensor *values, int64_t n) {
  (void)ids, (void)values, (void)n;
  err_set(MF_EUNSUPPORTED, "rows");
  return NULL;
}
int sparse_call(Eager *E, EagerCall *c) {
  (void)E;
  return err_set(MF_EINVAL, "%s: takes no row-sparse tensor; :to_dense() makes it dense", c->op->name);
}
Tensor *sparse_add(Eager *E, Tensor *a, Tensor *b) {
  return eager_op(E, OP_add, 2, (Tensor *[]){a, b}, NULL);
}
