/* The dispatcher: one checked call at a time. eager_call infers the outputs, makes them, launches
 * the kernel and has the tape record the call. A call writes in three ways: into new outputs; into
 * its first input (`into`, the NAME_ forms); into mutated inputs (Tensor! in the signature). The
 * last two are prepared by write.c and count a version of the storage. */
#include <string.h>

#include "call_int.h"
#include "fault.h"
#include "global.h"
#include "mem.h"
#include "op_args.h"
#include "op_ids.h"
#include "sparse.h"
#include "tape.h"
#include "watch.h"

/* -- Checks ------------------------------------------------------------------------------------ */

static const char *device_name(Eager *E, int type) {
  return E->context->devices[type]->name;
}

static int dead_input(EagerCall *c, int k) {
  char name[64];
  if (!storage_is_freed(c->in[k]->storage))
    return err_set(MF_EINVAL,
                   c->in[k]->storage->data
                       ? "%s: %s is a result of a step that failed, and has no value"
                       : "%s: %s belongs to a step that was compiled; outside of it there is no "
                         "value",
                   c->op->name, call_input_name(c, k, name, sizeof name));
  return err_set(MF_EFREED, "%s: %s was freed", c->op->name,
                 call_input_name(c, k, name, sizeof name));
}

/* Inputs must be alive and on one device, but for 0-d ones on the cpu. *tracked: one requires a
 * gradient; *rows: one is row-sparse. */
static int check_inputs(Eager *E, EagerCall *c, bool *tracked, bool *rows) {
  int device = -1;
  for (int k = 0; k < c->n_in; k++) {
    Tensor *t = c->in[k];
    if (!t) continue;
    if (t->ag) *tracked |= tensor_requires_grad(t);
    c->global |= t->layout != NULL;
    if (!t->storage) {
      *rows = true;
      continue;
    }
    if (storage_is_freed(t->storage)) return dead_input(c, k);
    if (storage_absence(t->storage) && !E->tracer) {
      int rc = tensor_settle(t);
      if (rc) return rc;
      if (storage_is_traced(t->storage)) return dead_input(c, k);
    }
    if (t->m.device == device || t->m.number) continue;
    if (t->m.ndim == 0 && t->m.device == DEVICE_CPU && device != -1 && device != DEVICE_META)
      continue;
    if (device != -1)
      return err_set(MF_EINVAL, "%s: tensors are on %s and %s; move one with :to()", c->op->name,
                     device_name(E, device), device_name(E, t->m.device));
    device = t->m.device;
  }
  return 0;
}

/* -- Outputs ----------------------------------------------------------------------------------- */

typedef struct Asking {
  Infer infer;
  Eager *E;
  EagerCall *call;
} Asking;

static bool grow_outputs(EagerCall *c) {
  int cap = c->cap_out * 2;
  Tensor **grown = mem_alloc(sizeof *grown * (size_t)cap);
  if (!grown) return false;
  memcpy(grown, c->out, sizeof *grown * (size_t)c->n_out);
  if (c->out != c->small) mem_free(c->out);
  c->out = grown;
  c->cap_out = cap;
  return true;
}

static Meta *add_output(Infer *I) {
  Asking *asking = (Asking *)I;
  EagerCall *c = asking->call;
  if (c->n_out == c->cap_out && !grow_outputs(c)) return NULL;
  Tensor *t = tensor_new(asking->E);
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

static int no_data(Eager *E, EagerCall *c) {
  if (E->tracer)
    return err_set(MF_EINVAL,
                   "%s: the result's shape depends on data, which is known only when a compiled "
                   "step runs; masked_fill, where or topk keep shapes",
                   c->op->name);
  return err_set(MF_EINVAL,
                 "%s: the result's shape depends on data, and a meta tensor has none; "
                 "masked_fill, where or topk keep shapes",
                 c->op->name);
}

/* Views of the inputs for an op whose output's shape depends on data: of copies, which are counted,
 * where the host cannot read them. */
static int data_views(Eager *E, EagerCall *c, View *views, Tensor **copies) {
  if (c->n_in > CALL_SMALL) return err_set(MF_EINVAL, "%s: too many inputs", c->op->name);
  for (int k = 0; k < c->n_in; k++) {
    if (c->in[k] && (E->tracer || !tensor_has_data(c->in[k]))) return no_data(E, c);
    if (c->in[k] && !(copies[k] = tensor_to_host(c->in[k]))) return MF_EUNSUPPORTED;
    views[k] = tensor_view(copies[k]);
  }
  return 0;
}

static int ask(Eager *E, EagerCall *c, const View *views) {
  const Meta *small[CALL_SMALL], **metas = small;
  if (c->n_in > CALL_SMALL && !(metas = mem_alloc(sizeof *metas * (size_t)c->n_in)))
    return err_set(MF_ENOMEM, "%s: out of memory", c->op->name);
  for (int k = 0; k < c->n_in; k++) metas[k] = c->in[k] ? &c->in[k]->m : NULL;
  Asking asking;
  asking.infer = (Infer){.op = c->op,
                         .args = c->args,
                         .in = metas,
                         .n_in = c->n_in,
                         .device = E->device,
                         .views = views,
                         .add = add_output};
  asking.E = E;
  asking.call = c;
  int rc = c->op->spec[0]->infer(&asking.infer);
  if (metas != small) mem_free(metas);
  return rc;
}

static int ask_with_data(Eager *E, EagerCall *c) {
  View views[CALL_SMALL];
  Tensor *copies[CALL_SMALL] = {NULL};
  int rc = data_views(E, c, views, copies);
  if (!rc) rc = ask(E, c, views);
  for (int k = 0; k < CALL_SMALL; k++) tensor_release(copies[k]);
  return rc;
}

static int infer_outputs(Eager *E, EagerCall *c) {
  int flags = c->op->spec[0]->flags, rc = flags & OP_DATA ? ask_with_data(E, c) : ask(E, c, NULL);
  if (rc) return rc;
  if (c->into) {
    rc = call_check_into(c, &c->out[0]->m);
    if (rc) return rc;
    tensor_release(c->out[0]);
    c->out[0] = tensor_retain(c->into);
  }
  for (int k = 0; k < c->n_out && !rc && !c->global; k++) {
    if (c->out[k] == c->into) continue;
    if (flags & OP_VIEW) tape_view_of(E, c->out[k], c->in[0]);
    else if (E->tracer) tensor_open_traced(c->out[k]);
    else if ((rc = tensor_allocate(c->out[k]))) err_prefix(rc, c->op->name);
  }
  return rc;
}

/* -- Launch ------------------------------------------------------------------------------------ */

static void fill_view(View *v, const Tensor *t) {
  if (!t) {
    *v = (View){.ndim = -1};
    return;
  }
  v->data = t->storage->data ? tensor_data(t) : NULL;
  v->shape = t->m.shape;
  v->stride = t->m.stride;
  v->whole = v->start = NULL;
  v->ndim = t->m.ndim;
  v->dtype = t->m.dtype;
  v->number = t->m.number;
  v->device = t->m.device;
}

static int out_of_scratch(EagerCall *c, size_t bytes) {
  return err_set(MF_ENOMEM, "%s: out of memory for %zu bytes of scratch", c->op->name, bytes);
}

const char *eager_where(Eager *E) {
  uint64_t where = E->where ? E->where : E->owner.where ? E->owner.where(E->owner.ud) : 0;
  return where ? E->owner.where_text(E->owner.ud, where) : NULL;
}

/* The kernel of an op on a device; NULL: there is none. */
static DeviceKernel *kernel_on(const Device *d, const Op *op, const OpSpec *spec) {
  return d->kernels ? d->kernels[op->id] : spec->cpu;
}

/* Runs the kernel, then waits for it where the user wants errors at the line that makes them. */
static int launch_on(Eager *E, Device *d, DeviceKernel *kernel, const OpSpec *spec,
                     const OpCall *call) {
  Watch *watch = watch_of(E->context);
  int rc = fault_launch(call->op->name);
  if (!rc) rc = watch ? watch_launch(watch, kernel, spec, call, eager_where(E)) : kernel(call);
  if (!rc && d->waits && (rc = d->api->stream_synchronize(call->stream)))
    err_prefix(rc, call->op->name);
  return rc;
}

static int launch(Eager *E, EagerCall *c) {
  const OpSpec *spec = c->op->spec[E->isa];
  View small[CALL_SMALL + 4], *views = small;
  int n = c->n_in + c->n_out;
  const Tensor *first = c->n_out ? c->out[0] : c->n_in ? c->in[0] : NULL;
  int device = first ? first->m.device : DEVICE_CPU;
  if (device == DEVICE_META) return 0;
  if (spec->flags & OP_TRANSFER && c->in[0]->m.device != device)
    return tensor_transfer(c->out[0], c->in[0]);
  Device *d = E->context->devices[device];
  DeviceKernel *kernel = kernel_on(d, c->op, spec);
  if (!kernel)
    return err_set(MF_EUNSUPPORTED, "%s: has no kernel on %s", c->op->name, device_name(E, device));
  if (n > CALL_SMALL + 4 && !(views = mem_alloc(sizeof *views * (size_t)n)))
    return err_set(MF_ENOMEM, "%s: out of memory", c->op->name);
  for (int k = 0; k < c->n_in; k++) fill_view(&views[k], c->in[k]);
  for (int k = 0; k < c->n_out; k++) fill_view(&views[c->n_in + k], c->out[k]);
  for (int k = 0; k < n && c->places; k++)
    if (views[k].ndim >= 0 && !views[k].number)
      views[k].whole = c->places[k].whole, views[k].start = c->places[k].start;
  OpCall call = {.op = c->op,
                 .args = c->args,
                 .in = views,
                 .out = views + c->n_in,
                 .n_in = c->n_in,
                 .n_out = c->n_out,
                 .stream = eager_stream(E, device)};
  size_t scratch = spec->scratch && !d->kernels ? spec->scratch(&call) : 0;
  int rc = call.stream ? 0 : MF_EUNSUPPORTED;
  if (scratch && !(call.scratch = stream_scratch(call.stream, scratch)))
    rc = out_of_scratch(c, scratch);
  if (!rc) rc = launch_on(E, d, kernel, spec, &call);
  if (views != small) mem_free(views);
  return rc;
}

/* -- The call ---------------------------------------------------------------------------------- */

static int run(Eager *E, EagerCall *c, bool tracked);

/* A view that needs contiguous memory: of a copy. */
static int run_on_copy(Eager *E, EagerCall *c, bool tracked) {
  eager_call_clear(c);
  Tensor *x = eager_op(E, OP_clone, 1, c->in, &(struct clone_args){.memory_format = 1});
  if (!x) return MF_ENOMEM;
  Tensor *const *in = c->in;
  c->in = &x;
  int rc = run(E, c, tracked);
  c->in = in;
  tensor_release(x);
  return rc;
}

/* A gradient line reads the argument as it is now. */
static int check_patches(EagerCall *c) {
  for (int i = 0; i < c->n_patches; i++) {
    const Param *p = &c->op->params[c->patches[i].param];
    if (p->kind != PARAM_TENSOR)
      return err_set(MF_EUNSUPPORTED,
                     "%s: %s is an mf.scalar, through which a gradient would be wrong in later "
                     "calls; multiply by it instead, or compute this inside mf.no_grad",
                     c->op->name, p->name);
  }
  return 0;
}

static int run(Eager *E, EagerCall *c, bool tracked) {
  bool data = c->global && c->op->spec[0]->flags & OP_DATA;
  int rc = data ? 0 : infer_outputs(E, c);
  if (rc == INFER_COPY) return run_on_copy(E, c, tracked);
  bool writes = c->into || c->op->n_mutated;
  if (!rc && writes) rc = call_before_write(E, c, tracked);
  if (!rc && c->global) rc = data ? global_run_data(E, c) : global_run(E, c);
  else if (!rc && E->tracer) rc = E->tracer->record(E->tracer, c);
  else if (!rc && !(c->op->spec[0]->flags & OP_VIEW)) rc = launch(E, c);
  if (!rc && writes) rc = call_after_write(E, c);
  if (!rc && tracked) rc = E->tracer && c->n_patches ? check_patches(c) : 0;
  if (!rc && tracked) rc = tape_record(E, c);
  return rc;
}

static int run_writing(Eager *E, EagerCall *c, bool tracked) {
  Tensor *copies[CALL_SMALL], *const *in = c->in;
  int rc = call_separate(E, c, copies);
  if (!rc) rc = run(E, c, tracked);
  if (c->in != in) {
    for (int k = 0; k < c->n_in; k++) tensor_release(copies[k]);
    c->in = in;
  }
  tensor_release(c->original);
  c->original = NULL;
  return rc;
}

int eager_interrupted(Eager *E) {
  if (E->background || !atomic_exchange(&E->context->interrupted, false)) return 0;
  return err_set(MF_EINTR, "interrupted");
}

int eager_call_as(Eager *E, EagerCall *c, const Layout *target, const CallPlace *places) {
  c->target = target;
  c->places = places;
  c->global = target != NULL;
  c->out = c->small;
  c->n_out = 0;
  c->cap_out = 4;
  c->original = NULL;
  c->recorded = false;
  bool tracked = false, rows = false, stop = eager_has_interrupt(E);
  int rc = stop ? eager_interrupted(E) : 0;
  if (!rc) rc = check_inputs(E, c, &tracked, &rows);
  tracked &= E->grad_enabled && !(c->op->spec[0]->flags & OP_NO_GRAD);
  if (!rc && rows) rc = sparse_call(E, c);
  else if (!rc) rc = c->into || c->op->n_mutated ? run_writing(E, c, tracked) : run(E, c, tracked);
  if (rc) eager_call_clear(c);
  return rc;
}

int eager_call(Eager *E, EagerCall *c) {
  return eager_call_as(E, c, NULL, NULL);
}

/* -- Calls from C ------------------------------------------------------------------------------ */

static int call_simple(Eager *E, EagerCall *c, int op, int n_in, Tensor *const *in,
                       const void *args) {
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
  EagerCall c;
  c.into = NULL;
  c.n_patches = 0;
  if (call_simple(E, &c, op, n_in, in, args)) return NULL;
  Tensor *y = c.out[0];
  c.out[0] = NULL;
  eager_call_clear(&c);
  return y;
}

int eager_op_into(Eager *E, int op, int n_in, Tensor *const *in, const void *args) {
  EagerCall c;
  c.n_patches = 0;
  c.into = op_table[op].n_mutated ? NULL : in[0];
  int rc = call_simple(E, &c, op, n_in, in, args);
  if (!rc) eager_call_clear(&c);
  return rc;
}
