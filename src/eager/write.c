/* Calls that write into their inputs: what must hold before, and what is counted after. */
#include <string.h>

#include "call_int.h"
#include "op_ids.h"
#include "tape.h"

/* Whether two elements of t may be the same memory (an expanded tensor). */
static bool self_overlaps(const Tensor *t) {
  bool same = false, empty = false;
  for (int d = 0; d < t->m.ndim; d++) {
    same |= t->m.shape[d] > 1 && t->m.stride[d] == 0;
    empty |= t->m.shape[d] == 0;
  }
  return same && !empty;
}

static bool same_place(const Tensor *a, const Tensor *b) {
  if (a->storage != b->storage || a->m.offset != b->m.offset || a->m.dtype != b->m.dtype)
    return false;
  return tensor_same_shape(a, b) && shape_equal(a->m.ndim, a->m.stride, b->m.ndim, b->m.stride);
}

const char *call_input_name(const EagerCall *c, int k, char *buf, size_t n) {
  Infer I = {.op = c->op, .args = c->args};
  return infer_name(&I, k, buf, n);
}

const char *call_name_of(const EagerCall *c, const Tensor *t, char *buf, size_t n) {
  int k = 0;
  while (k < c->n_in - 1 && c->in[k] != t) k++;
  return call_input_name(c, k, buf, n);
}

static int refuse_overlap(const EagerCall *c, const Tensor *t) {
  char name[64];
  return err_set(MF_EINVAL,
                 "%s%s: several elements of %s share one place in memory (it was expanded); clone "
                 "it first",
                 c->op->name, c->into ? "_" : "", call_name_of(c, t, name, sizeof name));
}

int call_check_into(EagerCall *c, const Meta *result) {
  const Tensor *t = c->into;
  char want[SHAPE_TEXT_MAX], have[SHAPE_TEXT_MAX];
  if (!shape_equal(result->ndim, result->shape, t->m.ndim, t->m.shape))
    return err_set(MF_EINVAL, "%s_: the result has shape %s and does not fit into %s of shape %s",
                   c->op->name, shape_text(result->ndim, result->shape, want),
                   c->op->params[0].name, shape_text(t->m.ndim, t->m.shape, have));
  DType from = (DType)result->dtype, to = (DType)t->m.dtype;
  if (dtype_kind(from) > dtype_kind(to) || (from == BOOL && to != BOOL))
    return err_set(MF_EINVAL, "%s_: %s is %s, into which a result of %s cannot be written",
                   c->op->name, c->op->params[0].name, dtype_name(to), dtype_name(from));
  return 0;
}

/* Calls `each` on the tensors that the call writes into besides new outputs. */
static int each_written(EagerCall *c, int (*each)(EagerCall *, Tensor *)) {
  int rc = 0;
  if (c->into) rc = each(c, c->into);
  if (!c->op->n_mutated) return rc;
  for (int i = 0, position = 0; i < c->op->n_params && !rc; i++) {
    const Param *p = &c->op->params[i];
    if (p->kind != PARAM_TENSOR) continue;
    int first, n;
    op_inputs_of_param(c->op, c->args, position++, &first, &n);
    for (int k = first; k < first + n && p->mutated && !rc; k++)
      if (c->in[k]) rc = each(c, c->in[k]);
  }
  return rc;
}

static int refuse_severed(const EagerCall *c, const Tensor *t) {
  char name[64];
  return err_set(MF_EINVAL,
                 "%s%s: %s is a view of a global tensor for which the tensor had to be converted: "
                 "it has memory of its own and may not be written; clone it first, or assign to a "
                 "subscript",
                 c->op->name, c->into ? "_" : "", call_name_of(c, t, name, sizeof name));
}

static int check_written(EagerCall *c, Tensor *t) {
  if (t->severed) return refuse_severed(c, t);
  return self_overlaps(t) ? refuse_overlap(c, t) : 0;
}

static int check_tracked(EagerCall *c, Tensor *t) {
  return tape_check_inplace(c, t, true);
}

static int check_untracked(EagerCall *c, Tensor *t) {
  return tape_check_inplace(c, t, false);
}

static int count(EagerCall *c, Tensor *t) {
  if (!t->uncounted) storage_written(t->storage, (unsigned)c->op->id + 1);
  return 0;
}

int call_before_write(Eager *E, EagerCall *c, bool tracked) {
  int rc = each_written(c, check_written);
  if (!rc && E->grad_enabled) rc = each_written(c, tracked ? check_tracked : check_untracked);
  if (!rc && tracked) rc = tape_keep_original(E, c);
  return rc;
}

int call_after_write(Eager *E, EagerCall *c) {
  (void)E;
  return each_written(c, count);
}

/* -- Operands in the same memory --------------------------------------------------------------- */

static const Tensor *first_written(const EagerCall *c) {
  if (c->into) return c->into;
  return c->op->params[0].mutated && !c->op->params[0].list ? c->in[0] : NULL;
}

/* Element by element a kernel has read a place before it writes there; others read anywhere. */
static bool is_elementwise(const Op *op) {
  const char *sbp = op->spec[0]->sbp;
  return sbp && !strncmp(sbp, "...", 3);
}

static bool in_the_way(const EagerCall *c, const Tensor *t, const Tensor *written) {
  if (!t || t->storage != written->storage) return false;
  return !(same_place(t, written) && is_elementwise(c->op));
}

int call_separate(Eager *E, EagerCall *c, Tensor **copies) {
  const Tensor *written = first_written(c);
  if (!written || c->n_in > CALL_SMALL) return 0;
  bool any = false;
  for (int k = 1; k < c->n_in; k++) any |= in_the_way(c, c->in[k], written);
  if (!any) return 0;
  for (int k = 0; k < c->n_in; k++) {
    bool copy = k && in_the_way(c, c->in[k], written);
    copies[k] = copy ? eager_op(E, OP_clone, 1, &c->in[k], NULL) : tensor_retain(c->in[k]);
    if (copy && !copies[k]) {
      while (k-- > 0) tensor_release(copies[k]);
      return MF_ENOMEM;
    }
  }
  c->in = copies;
  return 0;
}
