/* The dispatcher: one checked call at a time. eager_run infers the outputs, makes them, launches the kernel and has the tape record the
 * call. A call writes in three ways: into new outputs; into its first input (`into`, the NAME_ forms); into mutated inputs
 * (Tensor! in the signature). The last two count a version of the storage. */
#include <stdio.h>
#include <string.h>

#include "eager.h"
#include "mem.h"
#include "op_args.h"
#include "op_ids.h"

enum { SMALL_INPUTS = 16 };

/* -- The state -------------------------------------------------------------------------------------------------------------- */

Eager *eager_create(Context *context) {
  Eager *E = mem_zalloc(sizeof *E);
  if (!E) return NULL;
  context_retain(context);
  E->context = context;
  E->interpreter = eager_run;
  E->grad_enabled = true;
  E->isa = op_isa_index(context->isa);
  E->next_seq = 1;
  for (int t = 0; t < CONTEXT_DEVICE_TYPES; t++) {
    Device *d = context->devices[t];
    if (d && !(E->streams[t] = d->api->stream_create(d))) {
      eager_destroy(E);
      return NULL;
    }
  }
  return E;
}

void eager_destroy(Eager *E) {
  if (!E) return;
  for (int t = 0; t < CONTEXT_DEVICE_TYPES; t++)
    if (E->streams[t]) E->streams[t]->device->api->stream_destroy(E->streams[t]);
  context_release(E->context);
  mem_free(E);
}

/* -- Checks ------------------------------------------------------------------------------------------------------------------- */

static const char *device_name(Eager *E, int type) {
  return E->context->devices[type] ? E->context->devices[type]->api->name : "?";
}

static int check_inputs(Eager *E, EagerCall *c) {
  int device = -1;
  for (int k = 0; k < c->n_in; k++) {
    Tensor *t = c->in[k];
    if (!t) continue;
    if (!t->storage) return err_set(MF_EINVAL, "%s: takes no row-sparse tensor; :to_dense() makes it dense", c->op->name);
    if (atomic_load_explicit(&t->storage->freed, memory_order_relaxed))
      return err_set(MF_EFREED, "%s: input %d was freed", c->op->name, k + 1);
    if (t->m.number || (t->m.ndim == 0 && t->m.device == DEVICE_CPU && device != -1 && device != DEVICE_META)) continue;
    if (device == -1) device = t->m.device;
    else if (device != t->m.device)
      return err_set(MF_EINVAL, "%s: tensors are on %s and %s; move one with :to()", c->op->name, device_name(E, device),
                     device_name(E, t->m.device));
  }
  return 0;
}

/* Whether two elements of t may be the same memory (an expanded tensor). */
static bool self_overlaps(const Tensor *t) {
  for (int d = 0; d < t->m.ndim; d++)
    if (t->m.shape[d] > 1 && t->m.stride[d] == 0) return true;
  return false;
}

static bool same_place(const Tensor *a, const Tensor *b) {
  size_t n = sizeof(int64_t) * (size_t)a->m.ndim;
  return a->storage == b->storage && a->m.offset == b->m.offset && a->m.ndim == b->m.ndim && a->m.dtype == b->m.dtype &&
         !memcmp(a->m.shape, b->m.shape, n) && !memcmp(a->m.stride, b->m.stride, n);
}

static int check_into(EagerCall *c, const Meta *result) {
  const Tensor *t = c->into;
  char want[SHAPE_TEXT_MAX], have[SHAPE_TEXT_MAX];
  if (result->ndim != t->m.ndim || memcmp(result->shape, t->m.shape, sizeof(int64_t) * (size_t)result->ndim))
    return err_set(MF_EINVAL, "%s_: the result has shape %s and does not fit into a tensor of shape %s", c->op->name,
                   shape_text(result->ndim, result->shape, want), shape_text(t->m.ndim, t->m.shape, have));
  if (dtype_kind((DType)result->dtype) > dtype_kind((DType)t->m.dtype) || (result->dtype == BOOL && t->m.dtype != BOOL))
    return err_set(MF_EINVAL, "%s_: a result of %s cannot be written into %s", c->op->name, dtype_name((DType)result->dtype),
                   dtype_name((DType)t->m.dtype));
  if (self_overlaps(t))
    return err_set(MF_EINVAL, "%s_: several elements of the tensor share one place in memory (it was expanded); clone it first", c->op->name);
  return 0;
}

/* -- Outputs ------------------------------------------------------------------------------------------------------------------- */

typedef struct Asking {
  Infer infer;
  EagerCall *call;
} Asking;

static Meta *add_output(Infer *I) {
  EagerCall *c = ((Asking *)I)->call;
  if (c->n_out == c->cap_out) {
    int cap = c->cap_out * 2;
    Tensor **grown = mem_alloc(sizeof *grown * (size_t)cap);
    if (!grown) return NULL;
    memcpy(grown, c->out, sizeof *grown * (size_t)c->n_out);
    if (c->out != c->small) mem_free(c->out);
    c->out = grown;
    c->cap_out = cap;
  }
  Tensor *t = tensor_new();
  if (!t) return NULL;
  c->out[c->n_out++] = t;
  I->n_out = c->n_out;
  return &t->m;
}

void eager_call_clear(EagerCall *c) {
  for (int k = 0; k < c->n_out; k++) tensor_release(c->out[k]);
  if (c->out != c->small) mem_free(c->out);
  c->out = c->small;
  c->n_out = 0;
  c->cap_out = 4;
}

/* A view of input 0: shares its storage, and remembers whose memory it is. */
static int make_view(EagerCall *c, Tensor *y) {
  Tensor *x = c->in[0];
  y->storage = x->storage;
  storage_retain(y->storage);
  Autograd *ag = tensor_autograd(y);
  if (!ag) return MF_ENOMEM;
  Tensor *base = x->ag && x->ag->base ? x->ag->base : x;
  ag->base = tensor_retain(base);
  ag->history = base->ag ? base->ag->history : 0; /* the tape reaches y through x as it is now */
  return 0;
}

static int allocate(Eager *E, Tensor *y) {
  Device *d = E->context->devices[y->m.device];
  if (!d) return err_set(MF_EINVAL, "there is no such device");
  size_t bytes = (size_t)meta_numel(&y->m) * dtype_size((DType)y->m.dtype);
  y->storage = storage_create(d, bytes, E->streams[y->m.device]);
  return y->storage ? 0 : storage_explain(d, bytes);
}

static int infer_outputs(Eager *E, EagerCall *c) {
  const Meta *small[SMALL_INPUTS], **metas = small;
  View small_views[SMALL_INPUTS], *views = NULL;
  const OpSpec *spec = c->op->spec[0];
  int rc = 0;
  if (c->n_in > SMALL_INPUTS && !(metas = mem_alloc(sizeof *metas * (size_t)c->n_in))) return err_set(MF_ENOMEM, "out of memory");
  for (int k = 0; k < c->n_in; k++) metas[k] = c->in[k] ? &c->in[k]->m : NULL;
  if (spec->flags & OP_DATA) {
    if (c->n_in > SMALL_INPUTS) rc = err_set(MF_EINVAL, "%s: too many inputs", c->op->name);
    views = small_views;
    for (int k = 0; k < c->n_in && !rc; k++) {
      views[k] = tensor_view(c->in[k]);
      if (c->in[k] && !tensor_has_data(c->in[k]))
        rc = err_set(MF_EINVAL, "%s: the result's shape depends on data, and a meta tensor has none; masked_fill, where or topk keep shapes",
                     c->op->name);
    }
  }
  Asking asking = {.infer = {.op = c->op, .args = c->args, .in = metas, .n_in = c->n_in, .views = views, .add = add_output}, .call = c};
  if (!rc) rc = spec->infer(&asking.infer);
  if (metas != small) mem_free(metas);
  if (rc) return rc;
  if (c->into) {
    rc = check_into(c, &c->out[0]->m);
    if (rc) return rc;
    tensor_release(c->out[0]);
    c->out[0] = tensor_retain(c->into);
  }
  for (int k = 0; k < c->n_out && !rc; k++) {
    if (c->out[k] == c->into) continue;
    rc = spec->flags & OP_VIEW ? make_view(c, c->out[k]) : allocate(E, c->out[k]);
  }
  return rc;
}

/* -- Launch ---------------------------------------------------------------------------------------------------------------------- */

static int launch(Eager *E, EagerCall *c) {
  const OpSpec *spec = c->op->spec[E->isa];
  View small[SMALL_INPUTS + 4], *views = small;
  int n = c->n_in + c->n_out;
  int device = c->n_out ? c->out[0]->m.device : c->in[0] ? c->in[0]->m.device : DEVICE_CPU;
  if (device == DEVICE_META) return 0;
  if (!spec->cpu) return err_set(MF_EUNSUPPORTED, "%s: has no kernel on %s", c->op->name, device_name(E, device));
  if (n > SMALL_INPUTS + 4 && !(views = mem_alloc(sizeof *views * (size_t)n))) return err_set(MF_ENOMEM, "out of memory");
  for (int k = 0; k < c->n_in; k++) views[k] = tensor_view(c->in[k]);
  for (int k = 0; k < c->n_out; k++) views[c->n_in + k] = tensor_view(c->out[k]);
  OpCall call = {.op = c->op, .args = c->args, .in = views, .out = views + c->n_in, .n_in = c->n_in, .n_out = c->n_out,
                 .stream = E->streams[device]};
  int rc = 0;
  size_t scratch = spec->scratch ? spec->scratch(&call) : 0;
  if (scratch && !(call.scratch = stream_scratch(call.stream, scratch)))
    rc = err_set(MF_ENOMEM, "%s: out of memory for %zu bytes of scratch", c->op->name, scratch);
  if (!rc) rc = spec->cpu(&call);
  if (views != small) mem_free(views);
  return rc;
}

/* Calls `each` on the tensors that the call writes into besides new outputs. */
static int each_written(Eager *E, EagerCall *c, int (*each)(Eager *, EagerCall *, Tensor *)) {
  int rc = 0;
  if (c->into) rc = each(E, c, c->into);
  if (!c->op->n_mutated) return rc;
  for (int k = 0, position = 0, i = 0; i < c->op->n_params && !rc; i++) {
    const Param *p = &c->op->params[i];
    if (p->kind != PARAM_TENSOR) continue;
    int first, n;
    op_inputs_of_param(c->op, c->args, position++, &first, &n);
    for (k = first; k < first + n && !rc; k++)
      if (p->mutated && c->in[k]) rc = each(E, c, c->in[k]);
  }
  return rc;
}

static int check_written(Eager *E, EagerCall *c, Tensor *t) {
  if (self_overlaps(t))
    return err_set(MF_EINVAL, "%s: several elements of the tensor share one place in memory (it was expanded); clone it first", c->op->name);
  return E->grad_enabled ? tape_check_inplace(E, t, c->op->name) : 0;
}

static int touch(Eager *E, EagerCall *c, Tensor *t) {
  (void)E, (void)c;
  storage_touch(t->storage);
  return 0;
}

/* An in-place call whose other operands lie in the same memory at another place reads copies of them. */
static int separate(Eager *E, EagerCall *c, Tensor **copies, Tensor *const **in) {
  const Tensor *written = c->into ? c->into : c->op->n_mutated && c->op->params[0].mutated && !c->op->params[0].list ? c->in[0] : NULL;
  if (!written || c->n_in > SMALL_INPUTS) return 0;
  bool any = false;
  for (int k = 1; k < c->n_in; k++) any |= c->in[k] && c->in[k]->storage == written->storage && !same_place(c->in[k], written);
  if (!any) return 0;
  for (int k = 0; k < c->n_in; k++) {
    bool copy = k && c->in[k] && c->in[k]->storage == written->storage && !same_place(c->in[k], written);
    copies[k] = copy ? eager_op(E, OP_clone, 1, &c->in[k], NULL) : tensor_retain(c->in[k]);
    if (copy && !copies[k]) {
      while (k-- > 0) tensor_release(copies[k]);
      return MF_ENOMEM;
    }
  }
  *in = copies;
  return 0;
}

static int run(Eager *E, EagerCall *c) {
  int rc = infer_outputs(E, c);
  if (rc == INFER_COPY) { /* a view that needs contiguous memory */
    eager_call_clear(c);
    Tensor *x = eager_op(E, OP_clone, 1, c->in, &(struct clone_args){.memory_format = 1});
    if (!x) return MF_ENOMEM;
    Tensor *const *in = c->in;
    c->in = &x;
    rc = run(E, c);
    c->in = in;
    tensor_release(x);
    return rc;
  }
  bool writes = c->into || c->op->n_mutated;
  if (!rc && writes) rc = each_written(E, c, check_written);
  if (!rc && writes && E->grad_enabled) rc = tape_keep_original(E, c);
  if (!rc && !(c->op->spec[0]->flags & OP_VIEW)) rc = launch(E, c);
  if (!rc && writes) rc = each_written(E, c, touch);
  if (!rc && E->grad_enabled) rc = tape_record(E, c);
  return rc;
}

int eager_run(Eager *E, EagerCall *c) {
  c->out = c->small;
  c->n_out = 0;
  c->cap_out = 4;
  c->original = NULL;
  if (atomic_load_explicit(&E->context->interrupted, memory_order_relaxed)) {
    atomic_store(&E->context->interrupted, false);
    return err_set(MF_EINTR, "interrupted");
  }
  Tensor *copies[SMALL_INPUTS], *const *in = c->in;
  int rc = check_inputs(E, c);
  if (!rc) rc = separate(E, c, copies, &c->in);
  if (!rc) rc = run(E, c);
  if (c->in != in) {
    for (int k = 0; k < c->n_in; k++) tensor_release(copies[k]);
    c->in = in;
  }
  tensor_release(c->original);
  if (rc) eager_call_clear(c);
  return rc;
}

int eager_call(Eager *E, EagerCall *c) {
  return E->interpreter(E, c);
}

static int call_simple(Eager *E, EagerCall *c, int op, int n_in, Tensor *const *in, const void *args) {
  union {
    char bytes[OP_MAX_ARGS];
    double align;
  } copy;
  c->op = &op_table[op];
  memcpy(copy.bytes, args ? args : c->op->defaults, c->op->args_size);
  c->in = in;
  c->n_in = n_in;
  c->args = copy.bytes;
  return eager_call(E, c);
}

Tensor *eager_op(Eager *E, int op, int n_in, Tensor *const *in, const void *args) {
  EagerCall c = {0};
  if (call_simple(E, &c, op, n_in, in, args)) return NULL;
  Tensor *y = tensor_retain(c.out[0]);
  eager_call_clear(&c);
  return y;
}

int eager_op_into(Eager *E, int op, int n_in, Tensor *const *in, const void *args) {
  EagerCall c = {.into = op_table[op].n_mutated ? NULL : in[0]};
  int rc = call_simple(E, &c, op, n_in, in, args);
  if (!rc) eager_call_clear(&c);
  return rc;
}

Tensor *eager_add(Eager *E, Tensor *a, Tensor *b) {
  return eager_op(E, OP_add, 2, (Tensor *[]){a, b}, NULL);
}
