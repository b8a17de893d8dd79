/* Tensor handles: making, counting, reading one element. */
#include <string.h>

#include "eager.h"
#include "mem.h"

Tensor *tensor_new(void) {
  Tensor *t = mem_alloc(sizeof *t);
  if (!t) return NULL;
  t->refs = 1;
  t->anchored = t->registered = false;
  t->storage = NULL;
  t->ag = NULL;
  t->row_ids = t->row_values = NULL;
  return t;
}

Tensor *tensor_retain(Tensor *t) {
  if (t) t->refs++;
  return t;
}

static void autograd_free(Autograd *ag) {
  if (ag->accumulate) ag->accumulate->leaf = NULL;
  tensor_release(ag->grad);
  tensor_release(ag->base);
  tape_node_release(ag->node);
  mem_free(ag);
}

void tensor_release(Tensor *t) {
  if (!t || --t->refs > 0) return;
  if (t->ag) autograd_free(t->ag);
  if (t->storage) storage_release(t->storage);
  tensor_release(t->row_ids);
  tensor_release(t->row_values);
  mem_free(t);
}

Autograd *tensor_autograd(Tensor *t) {
  if (!t->ag && !(t->ag = mem_zalloc(sizeof *t->ag))) err_set(MF_ENOMEM, "out of memory");
  return t->ag;
}

bool tensor_requires_grad(const Tensor *t) {
  const Autograd *ag = t->ag;
  if (!ag) return false;
  return ag->requires_grad || ag->node || (ag->base && ag->base->ag && ag->base->ag->history != ag->history);
}

bool tensor_is_leaf(const Tensor *t) {
  return !t->ag || !(t->ag->node || (t->ag->base && t->ag->base->ag && t->ag->base->ag->history != t->ag->history));
}

Tensor *tensor_create(Eager *E, DType dtype, int ndim, const int64_t *shape, int device) {
  Tensor *t = tensor_new();
  if (!t) {
    err_set(MF_ENOMEM, "out of memory");
    return NULL;
  }
  memset(&t->m, 0, offsetof(Meta, shape));
  t->m.ndim = (int8_t)ndim;
  t->m.dtype = (uint8_t)dtype;
  t->m.device = (uint8_t)device;
  if (ndim) memcpy(t->m.shape, shape, sizeof(int64_t) * (size_t)ndim);
  shape_contiguous(ndim, shape, t->m.stride);
  Device *d = E->context->devices[device];
  size_t bytes = (size_t)meta_numel(&t->m) * dtype_size(dtype);
  t->storage = storage_create(d, bytes, E->streams[device]);
  if (t->storage) return t;
  tensor_release(t);
  storage_explain(d, bytes);
  return NULL;
}

Tensor *tensor_alias(const Tensor *t) {
  Tensor *a = tensor_new();
  if (!a) {
    err_set(MF_ENOMEM, "out of memory");
    return NULL;
  }
  a->m = t->m;
  a->storage = t->storage;
  if (a->storage) storage_retain(a->storage);
  a->row_ids = tensor_retain(t->row_ids);
  a->row_values = tensor_retain(t->row_values);
  return a;
}

Tensor *tensor_number(Eager *E, double value) {
  bool whole = value >= -9007199254740992.0 && value <= 9007199254740992.0 && value == (double)(int64_t)value;
  Tensor *t = tensor_create(E, whole ? I64 : F64, 0, NULL, DEVICE_CPU);
  if (!t) return NULL;
  t->m.number = true;
  if (whole) *(int64_t *)t->storage->data = (int64_t)value;
  else *(double *)t->storage->data = value;
  return t;
}

View tensor_view(const Tensor *t) {
  if (!t) return (View){.ndim = -1};
  View v = {.shape = t->m.shape, .stride = t->m.stride, .ndim = t->m.ndim, .dtype = t->m.dtype, .number = t->m.number};
  if (t->storage && t->storage->data) v.data = tensor_data(t);
  return v;
}

int tensor_item(const Tensor *t, double *f, int64_t *i) {
  char shape[SHAPE_TEXT_MAX];
  if (meta_numel(&t->m) != 1)
    return err_set(MF_EINVAL, "item: a tensor of one element is needed, this has shape %s", shape_text(t->m.ndim, t->m.shape, shape));
  if (!t->storage) return err_set(MF_EINVAL, "item: a row-sparse tensor has no single element");
  if (!tensor_has_data(t)) return err_set(MF_EINVAL, "item: a tensor on the meta device has no data");
  if (atomic_load_explicit(&t->storage->freed, memory_order_relaxed)) return err_set(MF_EFREED, "item: the tensor was freed");
  if (f) *f = dtype_get_f64((DType)t->m.dtype, tensor_data(t));
  if (i) *i = dtype_get_i64((DType)t->m.dtype, tensor_data(t));
  return 0;
}
