/* Row-sparse tensors: see sparse.h. Everything is made of ops on ids and values, so that gradients
 * pass through the values. */
#include <stdio.h>
#include <string.h>

#include "op_args.h"
#include "op_ids.h"
#include "sparse.h"

/* -- Making ------------------------------------------------------------------------------------ */

static int check_ids(Tensor *tensor, int64_t n) {
  int rc = tensor_settle(tensor);
  if (rc || !tensor_has_data(tensor)) return rc;
  Tensor *ids = tensor_to_host(tensor);
  if (!ids) return MF_EUNSUPPORTED;
  for (int64_t i = 0; i < ids->m.shape[0]; i++) {
    int64_t id = ((const int64_t *)(const void *)tensor_data(ids))[i * ids->m.stride[0]];
    if (rc || (id >= 0 && id < n)) continue;
    rc = err_set(MF_EINVAL, "rows: ids[%lld] is %lld; legal are 0 to %lld", (long long)i,
                 (long long)id, (long long)n - 1);
  }
  tensor_release(ids);
  return rc;
}

static int check(const Tensor *ids, const Tensor *values, int64_t n) {
  char shape[SHAPE_TEXT_MAX];
  if (!ids->storage || !values->storage)
    return err_set(MF_EINVAL, "rows: ids and values must be dense tensors");
  if (ids->layout || values->layout)
    return err_set(MF_EINVAL, "rows: ids and values must be local, one is global");
  if (storage_is_freed(ids->storage) || storage_is_freed(values->storage))
    return err_set(MF_EFREED, "rows: ids or values were freed");
  if (ids->m.dtype != I64 || ids->m.ndim != 1)
    return err_set(MF_EINVAL, "rows: ids must be int64 with 1 dim, is %s with shape %s",
                   dtype_name((DType)ids->m.dtype), shape_text(ids->m.ndim, ids->m.shape, shape));
  if (values->m.ndim < 1 || values->m.shape[0] != ids->m.shape[0])
    return err_set(MF_EINVAL, "rows: there are %lld ids, but values have shape %s",
                   (long long)ids->m.shape[0], shape_text(values->m.ndim, values->m.shape, shape));
  if (values->m.device != ids->m.device)
    return err_set(MF_EINVAL, "rows: ids and values are on two devices");
  if (n < 0) return err_set(MF_EINVAL, "rows: n must not be negative");
  return 0;
}

/* Of ids and values that fit. */
static Tensor *make(Tensor *ids, Tensor *values, int64_t n) {
  Tensor *t = tensor_new(values->E);
  if (!t) return NULL;
  t->m = values->m;
  t->m.offset = 0;
  t->m.number = false;
  t->m.shape[0] = n;
  shape_contiguous(t->m.ndim, t->m.shape, t->m.stride);
  t->row_ids = tensor_retain(ids);
  t->row_values = tensor_retain(values);
  return t;
}

Tensor *sparse_new(Tensor *ids, Tensor *values, int64_t n) {
  if (check(ids, values, n) || check_ids(ids, n)) return NULL;
  int64_t shape[MF_MAX_DIMS];
  memcpy(shape, values->m.shape, sizeof(int64_t) * (size_t)values->m.ndim);
  shape[0] = n;
  return shape_check("rows", values->m.ndim, shape, (DType)values->m.dtype) ? NULL
                                                                            : make(ids, values, n);
}

Tensor *sparse_alias(const Tensor *t) {
  return make(t->row_ids, t->row_values, t->m.shape[0]);
}

/* The same rows with other values; takes a count of `values`, which may be NULL. */
static Tensor *with_values(const Tensor *t, Tensor *values) {
  Tensor *r = values ? make(t->row_ids, values, t->m.shape[0]) : NULL;
  tensor_release(values);
  return r;
}

/* -- Sums and forms ---------------------------------------------------------------------------- */

static Tensor *cat(Eager *E, Tensor *a, Tensor *b) {
  return eager_op(E, OP_cat, 2, (Tensor *[]){a, b}, &(struct cat_args){.n_xs = 2});
}

/* dense + rows, in new memory. */
static Tensor *add_to_dense(Eager *E, Tensor *dense, const Tensor *rows) {
  return eager_op(E, OP_index_add, 3, (Tensor *[]){dense, rows->row_ids, rows->row_values}, NULL);
}

int sparse_add_into(Eager *E, Tensor *dense, const Tensor *rows) {
  return eager_op_into(E, OP_index_add, 3, (Tensor *[]){dense, rows->row_ids, rows->row_values},
                       NULL);
}

static Tensor *add_rows(Eager *E, const Tensor *a, const Tensor *b) {
  Tensor *ids = cat(E, a->row_ids, b->row_ids),
         *values = ids ? cat(E, a->row_values, b->row_values) : NULL;
  Tensor *sum = values ? make(ids, values, a->m.shape[0]) : NULL;
  tensor_release(ids);
  tensor_release(values);
  return sum;
}

Tensor *sparse_add(Eager *E, Tensor *a, Tensor *b) {
  if (!tensor_is_rows(a) && !tensor_is_rows(b))
    return eager_op(E, OP_add, 2, (Tensor *[]){a, b}, NULL);
  if (!tensor_same_shape(a, b)) {
    char one[SHAPE_TEXT_MAX], other[SHAPE_TEXT_MAX];
    err_set(MF_EINVAL, "add: a row-sparse tensor of shape %s does not broadcast to %s",
            shape_text(a->m.ndim, a->m.shape, one), shape_text(b->m.ndim, b->m.shape, other));
    return NULL;
  }
  if (!tensor_is_rows(a)) return add_to_dense(E, a, b);
  return tensor_is_rows(b) ? add_rows(E, a, b) : add_to_dense(E, b, a);
}

/* Zeros like t's values, but n of them. */
static Tensor *zero_rows(Eager *E, const Tensor *t, int64_t n) {
  const Meta *m = &t->row_values->m;
  int64_t shape[MF_MAX_DIMS];
  memcpy(shape, m->shape, sizeof(int64_t) * (size_t)m->ndim);
  shape[0] = n;
  Tensor *z = tensor_create(E, (DType)m->dtype, m->ndim, shape, m->device);
  if (!z || !tensor_clear(z)) return z;
  tensor_release(z);
  return NULL;
}

Tensor *sparse_to_dense(Eager *E, Tensor *t) {
  if (!tensor_is_rows(t)) return tensor_retain(t);
  Tensor *zero = zero_rows(E, t, t->m.shape[0]);
  Tensor *dense = zero ? add_to_dense(E, zero, t) : NULL;
  tensor_release(zero);
  return dense;
}

static bool is_coalesced(const Tensor *t) {
  Tensor *host = tensor_to_host(t->row_ids);
  if (!host) return false;
  const int64_t *ids = (const void *)tensor_data(host);
  int64_t n = host->m.shape[0], step = host->m.stride[0];
  bool ascending = true;
  for (int64_t i = 1; i < n && ascending; i++) ascending = ids[i * step] > ids[(i - 1) * step];
  tensor_release(host);
  return ascending;
}

bool sparse_is_freed(const Tensor *t) {
  return storage_is_freed(t->row_ids->storage) || storage_is_freed(t->row_values->storage);
}

Tensor *sparse_coalesce(Eager *E, Tensor *t) {
  if (sparse_is_freed(t)) {
    err_set(MF_EFREED, "coalesce: the tensor's ids or values were freed");
    return NULL;
  }
  if (!E->tracer && (!tensor_has_data(t->row_ids) || is_coalesced(t))) return tensor_retain(t);
  EagerCall c = {.op = &op_table[E->tracer ? OP_merge_ids_padded : OP_merge_ids],
                 .in = &t->row_ids,
                 .n_in = 1,
                 .args = (char[1]){0}}; /* neither has arguments */
  if (eager_call(E, &c)) return NULL;
  Tensor *zero = zero_rows(E, t, c.out[0]->m.shape[0]);
  Tensor *values =
      zero ? eager_op(E, OP_index_add, 3, (Tensor *[]){zero, c.out[1], t->row_values}, NULL) : NULL;
  Tensor *merged = values ? make(c.out[0], values, t->m.shape[0]) : NULL;
  tensor_release(zero);
  tensor_release(values);
  eager_call_clear(&c);
  return merged;
}

/* The rows of all, each weighing less. */
Tensor *sparse_mean(Eager *E, Tensor *t, int n) {
  struct micro_pack_args args = {.n = n};
  Tensor *scale = tensor_number(E, 1.0 / n, true), *mean = NULL;
  Tensor *ids = eager_op(E, OP_micro_pack, 1, &t->row_ids, &args);
  Tensor *less =
      scale && ids ? eager_op(E, OP_mul, 2, (Tensor *[]){t->row_values, scale}, NULL) : NULL;
  Tensor *values = less ? eager_op(E, OP_micro_pack, 1, &less, &args) : NULL;
  if (values) mean = make(ids, values, t->m.shape[0]);
  tensor_release(scale);
  tensor_release(ids);
  tensor_release(less);
  tensor_release(values);
  return mean;
}

static bool is_own(const Tensor *t) {
  return t->refs == 1 && meta_is_contiguous(&t->m) &&
         atomic_load_explicit(&t->storage->refs, memory_order_acquire) == 1;
}

static Tensor *own_copy(Eager *E, Tensor *t) {
  return is_own(t) ? tensor_retain(t) : eager_op(E, OP_clone, 1, &t, NULL);
}

Tensor *sparse_own(Eager *E, Tensor *t) {
  bool own = t->refs == 1 && is_own(t->row_ids) && is_own(t->row_values);
  if (own) return tensor_retain(t);
  Tensor *ids = own_copy(E, t->row_ids), *values = ids ? own_copy(E, t->row_values) : NULL;
  Tensor *copy = values ? make(ids, values, t->m.shape[0]) : NULL;
  tensor_release(ids);
  tensor_release(values);
  return copy;
}

int sparse_zero(Eager *E, Tensor *t) {
  static const int64_t none[1] = {0};
  Tensor *ids = tensor_create(E, I64, 1, none, t->m.device),
         *values = ids ? zero_rows(E, t, 0) : NULL;
  if (!values) {
    tensor_release(ids);
    return MF_ENOMEM;
  }
  tensor_release(t->row_ids);
  tensor_release(t->row_values);
  t->row_ids = ids;
  t->row_values = values;
  return 0;
}

/* -- Calls ------------------------------------------------------------------------------------- */

static int refuse(const EagerCall *c) {
  return err_set(MF_EINVAL, "%s: takes no row-sparse tensor; :to_dense() makes it dense",
                 c->op->name);
}

/* Whether `linear` lists this alternative: "a" of "a|b". */
static bool lists(const char *linear, const char *name) {
  size_t n = strlen(name);
  while (strcspn(linear, "|") != n || memcmp(linear, name, n)) {
    linear += strcspn(linear, "|");
    if (!*linear++) return false;
  }
  return true;
}

/* Whether the op works element by element and is linear in input k alone (with_other: in both
 * inputs at once, as sums are). */
static bool is_linear_in(const EagerCall *c, int k, bool with_other) {
  char one[40], other[40], names[90];
  const OpSpec *spec = c->op->spec[0];
  if (!spec->linear || !spec->sbp || strncmp(spec->sbp, "...", 3)) return false;
  Infer I = {.op = c->op, .args = c->args};
  infer_name(&I, k, one, sizeof one);
  if (!with_other) return lists(spec->linear, one);
  snprintf(names, sizeof names, "%s+%s", one, infer_name(&I, 1, other, sizeof other));
  return lists(spec->linear, names);
}

static int give(EagerCall *c, Tensor *t) {
  if (!t) return MF_EINVAL;
  c->out[0] = t;
  c->n_out = 1;
  return 0;
}

/* The op of these inputs; NULL with the error set. */
static Tensor *call_with(Eager *E, const EagerCall *c, Tensor *a, Tensor *b, Tensor *into) {
  Tensor *in[2] = {a, b};
  EagerCall inner = {.op = c->op, .in = in, .n_in = c->n_in, .args = c->args, .into = into};
  if (eager_call(E, &inner)) return NULL;
  Tensor *t = tensor_retain(inner.out[0]);
  eager_call_clear(&inner);
  return t;
}

/* Input k is rows, the other, if any, a single element: works on the values. */
static int call_on_values(Eager *E, EagerCall *c, int k) {
  Tensor *in[2] = {c->in[0], c->n_in > 1 ? c->in[1] : NULL}, *rows = c->in[k];
  in[k] = rows->row_values;
  Tensor *values = call_with(E, c, in[0], in[1], c->into ? in[0] : NULL);
  if (!values || !c->into) return give(c, with_values(rows, values));
  tensor_release(values);
  return give(c, tensor_retain(rows));
}

/* What input k alone makes of a sum. */
static Tensor *part(Eager *E, const EagerCall *c, int k) {
  Tensor *t = c->in[k], *x = tensor_is_rows(t) ? t->row_values : t,
         *zero = tensor_number(E, 0, false);
  Tensor *y = zero ? call_with(E, c, k ? zero : x, k ? x : zero, NULL) : NULL;
  tensor_release(zero);
  return y && tensor_is_rows(t) ? with_values(t, y) : y;
}

/* a becomes the rows of `sum`. */
static void take_rows(Tensor *a, const Tensor *sum) {
  Tensor *ids = a->row_ids, *values = a->row_values;
  a->row_ids = tensor_retain(sum->row_ids);
  a->row_values = tensor_retain(sum->row_values);
  tensor_release(ids);
  tensor_release(values);
}

/* A sum or difference: of what either input makes of it. */
static int call_sum(Eager *E, EagerCall *c) {
  Tensor *a = part(E, c, 0), *b = a ? part(E, c, 1) : NULL, *into = c->into;
  Tensor *sum = b && (!into || tensor_is_rows(into)) ? sparse_add(E, a, b) : NULL;
  int rc = b ? 0 : MF_EINVAL;
  if (!rc && !into) {
    rc = give(c, sum);
  } else if (!rc && !tensor_is_rows(into)) {
    rc = tensor_same_shape(into, b) ? sparse_add_into(E, into, b) : refuse(c);
  } else if (!rc) {
    if (sum && tensor_is_rows(sum)) take_rows(into, sum);
    else rc = sum ? refuse(c) : MF_EINVAL;
    tensor_release(sum);
  }
  if (!rc && into) rc = give(c, tensor_retain(into));
  tensor_release(a);
  tensor_release(b);
  return rc;
}

int sparse_call(Eager *E, EagerCall *c) {
  int n_rows = 0, at = 0;
  bool single = true;
  for (int k = 0; k < c->n_in; k++) {
    if (c->n_in > 2 || !c->in[k]) return refuse(c);
    if (tensor_is_rows(c->in[k])) n_rows++, at = k;
    else single &= meta_numel(&c->in[k]->m) == 1 && c->in[k]->m.ndim == 0;
  }
  if (c->n_in == 2 && (n_rows == 2 || !single) && is_linear_in(c, 0, true)) return call_sum(E, c);
  bool alone = n_rows == 1 && single && is_linear_in(c, at, false);
  return alone && !(c->into && at) ? call_on_values(E, c, at) : refuse(c);
}
