/* The gradients of one node: checks of what was kept, the gradient lines, and what they return
 * brought to the form of the inputs. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "global.h"
#include "mem.h"
#include "op_args.h"
#include "op_ids.h"
#include "sparse.h"
#include "tape_int.h"

/* -- What was kept ----------------------------------------------------------------------------- */

/* The name of the op that wrote into s last, as the user calls it. */
static const char *writer_name(Storage *s, char *buf, size_t n) {
  unsigned writer = atomic_load_explicit(&s->writer, memory_order_relaxed);
  if (!writer) return "a write";
  const Op *op = &op_table[writer - 1];
  snprintf(buf, n, "%s%s", op->name, op->n_mutated ? "" : "_");
  return buf;
}

/* " (forward at script.lua:12)", or nothing. */
static const char *where_text(Eager *E, uint64_t where, char *buf, size_t size) {
  const EagerOwner *o = &E->owner;
  const char *text = where && o->where_text ? o->where_text(o->ud, where) : NULL;
  if (text) snprintf(buf, size, " (forward at %s)", text);
  return text ? buf : "";
}

int tape_check_saved(Eager *E, const char *name, uint64_t where, Storage *s, uint32_t version) {
  char place[200], writer[80];
  if (storage_is_freed(s))
    return err_set(MF_EFREED, "backward: a tensor that %s%s needs for its gradient was freed", name,
                   where_text(E, where, place, sizeof place));
  if (storage_version(s) == version) return 0;
  return err_set(
      MF_EVERSION,
      "backward: a tensor that %s%s needs for its gradient was changed in place since by %s "
      "(version %u, was %u); clone it before the change",
      name, where_text(E, where, place, sizeof place), writer_name(s, writer, sizeof writer),
      storage_version(s), version);
}

static int check_saved(const Node *n) {
  int rc = 0;
  for (int k = 0; n->saved && k < n->n_in + n->n_out && !rc; k++) {
    const Saved *s = &n->saved[k];
    if (s->t && s->t->storage)
      rc = tape_check_saved(n->E, tape_node_name(n), n->where, s->t->storage, s->version);
  }
  return rc;
}

/* -- Gradient lines ---------------------------------------------------------------------------- */

static const char *tensor_param(const Op *op, int position) {
  for (int i = 0; i < op->n_params; i++)
    if (op->params[i].kind == PARAM_TENSOR && position-- == 0) return op->params[i].name;
  return "?";
}

int tape_run_op(Eager *E, Node *n, Tensor *const *gout, const bool *need, Tensor **gin) {
  const Op *op = n->op;
  uint32_t wanted = 0, served = 0;
  int rc = check_saved(n);
  for (int k = 0; k < n->n_in; k++)
    if (need[k]) wanted |= 1u << (op->n_lists ? op_param_of_input(op, n->args, k) : k);
  if (!rc && !E->owner.gradient)
    rc = err_set(MF_EUNSUPPORTED, "backward: gradients need a Lua state");
  for (int i = 0; i < op->n_grads && !rc; i++) {
    if (!(op->grads[i].serves & wanted)) continue;
    served |= op->grads[i].serves;
    rc = E->owner.gradient(E->owner.ud, n, i, gout, need, gin);
  }
  if (rc || !(wanted & ~served)) return rc;
  return err_set(MF_EUNSUPPORTED, "backward: %s has no gradient for %s", op->name,
                 tensor_param(op, __builtin_ctz(wanted & ~served)));
}

static int run_function(Eager *E, Node *n, Tensor *const *gout, const bool *need, Tensor **gin) {
  if (!E->owner.function)
    return err_set(MF_EUNSUPPORTED, "backward: a function's gradient needs a Lua state");
  return E->owner.function(E->owner.ud, n, gout, need, gin);
}

/* -- The form of a gradient -------------------------------------------------------------------- */

static Tensor *global_zeros_like(Eager *E, const GradMeta *m) {
  Meta whole = {.ndim = m->ndim, .dtype = m->dtype, .device = m->device};
  memcpy(whole.shape, m->shape, sizeof(int64_t) * (size_t)m->ndim);
  shape_contiguous(whole.ndim, whole.shape, whole.stride);
  return global_zeros(E, &whole, m->layout);
}

Tensor *tape_zeros(Eager *E, const GradMeta *m) {
  if (E->tracer) {
    struct zeros_args args = {.size = {.n = m->ndim}, .dtype = m->dtype, .device = m->device};
    memcpy(args.size.v, m->shape, sizeof(int64_t) * (size_t)m->ndim);
    return eager_op(E, OP_zeros, 0, NULL, &args);
  }
  if (m->layout) return global_zeros_like(E, m);
  Tensor *z = tensor_create(E, (DType)m->dtype, m->ndim, m->shape, m->device);
  if (!z || !tensor_clear(z)) return z;
  tensor_release(z);
  return NULL;
}

static int wrong_shape(const Node *n, int k, const Tensor *g) {
  char have[SHAPE_TEXT_MAX], want[SHAPE_TEXT_MAX];
  const GradMeta *m = &n->in_meta[k];
  return err_set(MF_EINVAL,
                 "backward: the gradient of input %d of %s has shape %s, the input has %s", k + 1,
                 tape_node_name(n), shape_text(g->m.ndim, g->m.shape, have),
                 shape_text(m->ndim, m->shape, want));
}

/* Whether a tensor of shape m broadcasts to g's. */
static bool broadcasts_to(const GradMeta *m, const Tensor *g) {
  int ndim = g->m.ndim;
  int64_t shape[MF_MAX_DIMS];
  memcpy(shape, g->m.shape, sizeof(int64_t) * (size_t)ndim);
  return shape_broadcast(&ndim, shape, m->ndim, m->shape) &&
         shape_equal(ndim, shape, g->m.ndim, g->m.shape);
}

static int replace(Tensor **g, Tensor *by) {
  tensor_release(*g);
  *g = by;
  return by ? 0 : MF_ENOMEM;
}

int tape_fit(Eager *E, const Node *n, int k, Tensor **g) {
  const GradMeta *m = &n->in_meta[k];
  if (!shape_equal((*g)->m.ndim, (*g)->m.shape, m->ndim, m->shape)) {
    if (tensor_is_rows(*g) || !broadcasts_to(m, *g)) return wrong_shape(n, k, *g);
    struct sum_to_args args = {.size = {.n = m->ndim}};
    memcpy(args.size.v, m->shape, sizeof(int64_t) * (size_t)m->ndim);
    int rc = replace(g, eager_op(E, OP_sum_to, 1, g, &args));
    if (rc) return rc;
  }
  if ((*g)->m.device != m->device && m->device != DEVICE_META && tensor_has_data(*g) &&
      !tensor_is_rows(*g)) {
    int rc = replace(g, eager_op(E, OP_transfer, 1, g, &(struct transfer_args){m->device}));
    if (rc) return rc;
  }
  if ((*g)->m.dtype == m->dtype) return 0;
  return replace(g, eager_op(E, OP_cast, 1, g, &(struct cast_args){.dtype = m->dtype}));
}

/* -- Anomaly mode ------------------------------------------------------------------------------ */

static bool has_nan(Eager *E, Tensor *g) {
  if (tensor_is_rows(g)) g = g->row_values;
  if (g->part) g = g->part;
  if (!tensor_has_data(g) || !dtype_is_float((DType)g->m.dtype)) return false;
  Tensor *flat = eager_op(E, OP_clone, 1, &g, &(struct clone_args){.memory_format = 1});
  bool nan = false;
  size_t size = dtype_size((DType)g->m.dtype);
  int64_t n = meta_numel(&g->m);
  for (int64_t i = 0; flat && i < n && !nan; i++)
    nan = isnan(dtype_get_f64((DType)g->m.dtype, tensor_data(flat) + (size_t)i * size));
  tensor_release(flat);
  return nan;
}

static int check_nan(Eager *E, const Node *n, Tensor **gin) {
  char where[200];
  for (int k = 0; k < n->n_in; k++) {
    if (!gin[k] || !has_nan(E, gin[k])) continue;
    const Node *of = n->inner ? n->inner : n;
    const char *input = of->op && !of->op->n_lists ? tensor_param(of->op, k) : "an input";
    return err_set(MF_EINVAL, "backward: the gradient of %s of %s%s has a NaN", input,
                   tape_node_name(n), where_text(E, n->where, where, sizeof where));
  }
  return 0;
}

int tape_run_node(Eager *E, Node *n, Tensor *const *gout, const bool *need, Tensor **gin) {
  uint64_t outer = E->where;
  E->where = n->inner ? n->inner->where : n->where;
  int rc = n->kind == NODE_OP         ? tape_run_op(E, n, gout, need, gin)
           : n->kind == NODE_FUNCTION ? run_function(E, n, gout, need, gin)
           : n->kind == NODE_VIEW     ? tape_run_view(E, n, gout, gin)
           : n->kind == NODE_BOX      ? tape_run_box(E, n, gout, gin)
                                      : tape_run_copy_slices(E, n, gout, need, gin);
  for (int k = 0; k < n->n_in && !rc; k++)
    if (gin[k] && need[k]) rc = tape_fit(E, n, k, &gin[k]);
  E->where = outer;
  return rc || !E->anomaly ? rc : check_nan(E, n, gin);
}
