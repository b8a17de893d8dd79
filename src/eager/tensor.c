/* Tensor handles: making, counting, reading one element.
 *
 * A tensor, its record of the tape and the storage made for it lie in one block, with room for
 * small data, so that a scalar or a bias costs one block from the pool and no call to an allocator.
 * What is read and written most lies in neighbouring cache lines. The storage may outlive its
 * tensor (a view is left) or die before it (`t.data = other`); the block goes back when both are
 * gone: to the pool by the tensor, or to the C library by the storage's last user. */
#include <string.h>

#include "global.h"
#include "sparse.h"
#include "tape.h"

enum { ROOM = 64 };

typedef struct Block {
  Storage storage;
  Autograd autograd;
  Tensor tensor;
  char room[ROOM] __attribute__((aligned(STORAGE_ALIGN)));
} Block;

static Block *block_of(const Tensor *t) {
  return (Block *)((char *)(uintptr_t)t - offsetof(Block, tensor));
}

Tensor *tensor_new(Eager *E) {
  Block *b = pool_take(&E->pool, sizeof *b);
  if (!b) {
    err_set(MF_ENOMEM, "out of memory");
    return NULL;
  }
  atomic_store_explicit(&b->storage.living, STORAGE_NEIGHBOUR, memory_order_relaxed);
  Tensor *t = &b->tensor;
  t->refs = 1;
  t->anchored = t->pinned = t->registered = t->uncounted = t->blind = t->severed = false;
  t->E = E;
  t->storage = NULL;
  t->ag = NULL;
  t->row_ids = t->row_values = t->part = NULL;
  t->layout = NULL;
  E->tensors++;
  return t;
}

Autograd *tensor_autograd(Tensor *t) {
  if (t->ag) return t->ag;
  t->ag = &block_of(t)->autograd;
  *t->ag = (Autograd){0};
  return t->ag;
}

/* Releases t's storage; whether t's block is free then. */
static bool storage_gone(Block *b, Storage *s) {
  atomic_uchar *living = &b->storage.living;
  if (s == &b->storage && atomic_load_explicit(&s->refs, memory_order_acquire) == 1) {
    storage_close(s);
    return true;
  }
  if (s) storage_release(s);
  if (atomic_load_explicit(living, memory_order_acquire) == STORAGE_NEIGHBOUR) return true;
  unsigned char rest = (unsigned char)~STORAGE_NEIGHBOUR;
  return atomic_fetch_and_explicit(living, rest, memory_order_acq_rel) == STORAGE_NEIGHBOUR;
}

void tensor_release(Tensor *t) {
  if (!t || --t->refs > 0) return;
  Eager *E = t->E;
  Block *b = block_of(t);
  if (t->pinned && E->owner.unpin) E->owner.unpin(E->owner.ud, t);
  if (t->ag) tape_forget(t);
  if (!t->storage) {
    tensor_release(t->row_ids);
    tensor_release(t->row_values);
  }
  if (t->part) tensor_release(t->part);
  if (storage_gone(b, t->storage)) pool_give(&E->pool, b, sizeof *b);
  if (--E->tensors == 0 && E->closed) eager_free(E);
}

int tensor_allocate(Tensor *t) {
  Eager *E = t->E;
  Device *d = E->context->devices[t->m.device];
  if (!d) return err_set(MF_EINVAL, "there is no such device");
  size_t bytes = (size_t)meta_numel(&t->m) * dtype_size((DType)t->m.dtype);
  Block *b = block_of(t);
  Storage *s = &b->storage;
  E->charged += (int64_t)(bytes + sizeof(Block));
  Stream *stream = eager_stream(E, t->m.device);
  if (!stream) return MF_EUNSUPPORTED;
  if (!storage_open(s, d, bytes, b->room, ROOM, stream)) {
    if (!E->owner.reclaim) return storage_explain(d, bytes);
    E->owner.reclaim(E->owner.ud);
    d->api->empty_cache(d);
    if (!storage_open(s, d, bytes, b->room, ROOM, stream)) return storage_explain(d, bytes);
  }
  t->storage = s;
  return 0;
}

void tensor_open_traced(Tensor *t) {
  t->storage = &block_of(t)->storage;
  storage_open_traced(t->storage, t->E->context->devices[t->m.device]);
}

static void set_contiguous(Tensor *t, DType dtype, int ndim, const int64_t *shape, int device) {
  t->m.ndim = (int8_t)ndim;
  t->m.dtype = (uint8_t)dtype;
  t->m.device = (uint8_t)device;
  t->m.number = false;
  t->m.offset = 0;
  if (ndim) memcpy(t->m.shape, shape, sizeof(int64_t) * (size_t)ndim);
  shape_contiguous(ndim, shape, t->m.stride);
}

Tensor *tensor_create(Eager *E, DType dtype, int ndim, const int64_t *shape, int device) {
  Tensor *t = tensor_new(E);
  if (!t) return NULL;
  set_contiguous(t, dtype, ndim, shape, device);
  if (!tensor_allocate(t)) return t;
  tensor_release(t);
  return NULL;
}

Tensor *tensor_wrap(Eager *E, DType dtype, int ndim, const int64_t *shape, void *data,
                    void (*release)(void *), void *owner) {
  Tensor *t = tensor_new(E);
  if (!t) return NULL;
  set_contiguous(t, dtype, ndim, shape, DEVICE_CPU);
  size_t bytes = (size_t)meta_numel(&t->m) * dtype_size(dtype);
  t->storage = &block_of(t)->storage;
  storage_open_foreign(t->storage, E->context->devices[DEVICE_CPU], data, bytes, release, owner);
  return t;
}

static void copy_meta(Meta *to, const Meta *from) {
  memcpy(to, from, offsetof(Meta, shape));
  for (int d = 0; d < from->ndim; d++)
    to->shape[d] = from->shape[d], to->stride[d] = from->stride[d];
}

void tensor_take(Tensor *t, const Tensor *x) {
  storage_retain(x->storage);
  storage_release(t->storage);
  tensor_retain(x->part);
  tensor_release(t->part);
  t->storage = x->storage;
  t->part = x->part;
  t->layout = x->layout;
  t->m = x->m;
  t->m.number = false;
}

Tensor *tensor_adopt(Eager *E, Storage *storage, const Meta *m) {
  Tensor *t = tensor_new(E);
  if (!t) return NULL;
  copy_meta(&t->m, m);
  t->storage = storage;
  storage_retain(storage);
  return t;
}

Tensor *tensor_alias(const Tensor *t) {
  if (tensor_is_rows(t)) return sparse_alias(t);
  Tensor *a = tensor_adopt(t->E, t->storage, &t->m);
  if (!a) return NULL;
  a->uncounted = t->uncounted;
  a->severed = t->severed;
  a->layout = t->layout;
  a->part = tensor_retain(t->part);
  return a;
}

Tensor *tensor_number(Eager *E, double value, bool fraction) {
  bool whole = !fraction && value >= -9007199254740992.0 && value <= 9007199254740992.0 &&
               value == (double)(int64_t)value;
  static const int64_t none[1];
  Tensor *t = tensor_create(E, whole ? I64 : F64, 0, none, DEVICE_CPU);
  if (!t) return NULL;
  t->m.number = true;
  if (whole) *(int64_t *)t->storage->data = (int64_t)value;
  else *(double *)t->storage->data = value;
  return t;
}

View tensor_view(const Tensor *t) {
  if (!t) return (View){.ndim = -1};
  View v = {.shape = t->m.shape,
            .stride = t->m.stride,
            .ndim = t->m.ndim,
            .dtype = t->m.dtype,
            .number = t->m.number,
            .device = t->m.device};
  if (t->storage && t->storage->data) v.data = tensor_data(t);
  return v;
}

int tensor_check_data(const Tensor *t, const char *what) {
  if (!t->storage) return err_set(MF_EINVAL, "%s: the tensor is row-sparse", what);
  if (t->layout)
    return err_set(MF_EINVAL, "%s: the tensor is global; :to_local() gives this rank's part of it",
                   what);
  int rc = tensor_settle(t);
  if (rc) return rc;
  if (storage_is_freed(t->storage)) return err_set(MF_EFREED, "%s: the tensor was freed", what);
  if (storage_is_traced(t->storage))
    return err_set(MF_EINVAL,
                   t->storage->data && !t->E->tracer
                       ? "%s: the tensor is a result of a step that failed, and has no value"
                       : "%s: the tensor belongs to a step that is being compiled: its value is "
                         "known only when the compiled step runs; return it, and read the result",
                   what);
  if (tensor_has_data(t)) return 0;
  return err_set(MF_EINVAL, "%s: a tensor on the meta device has no data", what);
}

int tensor_item(Tensor *t, double *f, int64_t *i) {
  char shape[SHAPE_TEXT_MAX];
  if (meta_numel(&t->m) != 1)
    return err_set(MF_EINVAL, "item: a tensor of one element is needed, this has shape %s",
                   shape_text(t->m.ndim, t->m.shape, shape));
  if (t->layout) {
    Tensor *whole = global_gather(t->E, (Tensor *)(uintptr_t)t);
    int rc = whole ? tensor_item(whole, f, i) : MF_EINVAL;
    tensor_release(whole);
    return rc;
  }
  if (tensor_check_data(t, "item")) return MF_EINVAL;
  Tensor *host = tensor_to_host(t);
  if (!host) return MF_EINVAL;
  if (f) *f = dtype_get_f64((DType)t->m.dtype, tensor_data(host));
  if (i) *i = dtype_get_i64((DType)t->m.dtype, tensor_data(host));
  tensor_release(host);
  return 0;
}
