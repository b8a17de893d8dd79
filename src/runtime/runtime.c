#include "runtime.h"

#include <string.h>

#include "context.h"
#include "err.h"
#include "mem.h"
#include "thread.h"
#include "watch.h"

/* A view whose memory is a port's: data = the port's + offset. */
typedef struct Fixup {
  View *view;
  int64_t offset;
} Fixup;

typedef struct Port {
  void *data;
  LIST(Fixup) fixups;
} Port;

struct Runtime {
  Arena arena;
  const Plan *plan;
  Device *device;
  Stream *stream;
  int isa;
  char *block;
  size_t scratch_bytes; /* the most that a step needs, */
  int threads;          /* with so many threads */
  OpCall *calls;        /* one per step */
  int (**kernels)(const OpCall *);
  Port *ports[PLAN_NUMBER + 1];
  double *cells;
  char *numbers; /* 8 bytes each */
};

/* -- Making ------------------------------------------------------------------------------------ */

static void view_of(Runtime *r, int tensor, View *v) {
  if (tensor < 0) {
    *v = (View){.ndim = -1};
    return;
  }
  const PlanTensor *t = &r->plan->tensors.at[tensor];
  const PlanRegister *reg = &r->plan->registers.at[t->reg];
  int64_t offset = t->meta.offset * (int64_t)dtype_size((DType)t->meta.dtype);
  *v = (View){.shape = t->meta.shape,
              .stride = t->meta.stride,
              .ndim = t->meta.ndim,
              .dtype = t->meta.dtype,
              .number = t->meta.number};
  if (reg->home == PLAN_BLOCK) v->data = r->block + reg->offset + offset;
  else *list_add(&r->arena, &r->ports[reg->home][reg->port].fixups) = (Fixup){v, offset};
}

static void make_calls(Runtime *r, int isa) {
  const Plan *p = r->plan;
  r->calls = arena_array(&r->arena, OpCall, p->steps.n);
  r->kernels = arena_alloc(&r->arena, sizeof *r->kernels * p->steps.n);
  for (size_t i = 0; i < p->steps.n; i++) {
    const PlanStep *s = &p->steps.at[i];
    View *views = arena_array(&r->arena, View, s->n_in + s->n_out);
    for (int k = 0; k < s->n_in; k++) view_of(r, s->in[k], &views[k]);
    for (int k = 0; k < s->n_out; k++) view_of(r, s->out[k], &views[s->n_in + k]);
    r->kernels[i] = s->op->spec[isa]->cpu;
    if (!r->kernels[i])
      arena_throw(&r->arena, err_set(MF_EUNSUPPORTED, "%s: has no kernel on %s", s->op->name,
                                     r->device->api->name));
    r->calls[i] = (OpCall){.op = s->op,
                           .args = arena_copy(&r->arena, s->args, s->op->args_size),
                           .in = views,
                           .out = views + s->n_in,
                           .n_in = s->n_in,
                           .n_out = s->n_out,
                           .stream = r->stream};
  }
}

/* Kernels may want scratch for each thread. */
static void measure_scratch(Runtime *r) {
  r->threads = thread_count();
  r->scratch_bytes = 0;
  for (size_t i = 0; i < r->plan->steps.n; i++) {
    const OpSpec *spec = r->calls[i].op->spec[r->isa];
    size_t scratch = spec->scratch ? spec->scratch(&r->calls[i]) : 0;
    if (scratch > r->scratch_bytes) r->scratch_bytes = scratch;
  }
}

static void make_numbers(Runtime *r) {
  const Plan *p = r->plan;
  r->numbers = arena_alloc(&r->arena, 8 * (p->numbers.n + 1));
  for (size_t i = 0; i < p->numbers.n; i++) {
    dtype_set_f64((DType)p->numbers.at[i].dtype, r->numbers + 8 * i, p->numbers.at[i].value);
    runtime_bind(r, PLAN_NUMBER, (int)i, r->numbers + 8 * i);
  }
}

typedef struct Making {
  Runtime *r;
  int isa;
} Making;

static void make(void *ud) {
  Making *m = ud;
  Runtime *r = m->r;
  const Plan *p = r->plan;
  size_t n[] = {0, p->inputs.n, p->captures.n, (size_t)p->n_result_registers, p->numbers.n};
  for (int home = PLAN_INPUT; home <= PLAN_NUMBER; home++)
    r->ports[home] = arena_array(&r->arena, Port, n[home] + 1);
  r->cells = arena_array(&r->arena, double, p->n_cells + 1);
  r->block = r->device->api->alloc(r->device, (size_t)p->block_bytes, r->stream);
  if (!r->block)
    arena_throw(&r->arena, err_set(MF_ENOMEM, "out of memory: the plan's block has %lld bytes",
                                   (long long)p->block_bytes));
  make_calls(r, m->isa);
  make_numbers(r);
}

Runtime *runtime_create(const Plan *p, Device *device, Stream *stream, int isa) {
  Runtime *r = mem_zalloc(sizeof *r);
  if (!r) {
    err_set(MF_ENOMEM, "out of memory");
    return NULL;
  }
  r->plan = p;
  r->device = device;
  r->stream = stream;
  r->isa = isa;
  Making m = {r, isa};
  if (!arena_protect(&r->arena, make, &m)) return r;
  runtime_destroy(r);
  return NULL;
}

void runtime_destroy(Runtime *r) {
  if (!r) return;
  if (r->block)
    r->device->api->release(r->device, r->block, (size_t)r->plan->block_bytes, r->stream);
  arena_free(&r->arena);
  mem_free(r);
}

/* -- Running ----------------------------------------------------------------------------------- */

void runtime_bind(Runtime *r, PlanHome home, int port, void *data) {
  Port *p = &r->ports[home][port];
  if (p->data == data) return;
  p->data = data;
  for (size_t i = 0; i < p->fixups.n; i++)
    p->fixups.at[i].view->data = (char *)data + p->fixups.at[i].offset;
}

void runtime_set_cell(Runtime *r, int cell, double value) {
  r->cells[cell] = value;
}

/* Scalar arguments and numbers that are cells, and the keys of random ops. */
static int set_scalars(Runtime *r, uint64_t seed, uint64_t stream) {
  const Plan *p = r->plan;
  for (size_t i = 0; i < p->numbers.n; i++)
    if (p->numbers.at[i].cell != PLAN_NO_CELL)
      dtype_set_f64((DType)p->numbers.at[i].dtype, r->numbers + 8 * i,
                    r->cells[p->numbers.at[i].cell]);
  for (size_t i = 0; i < p->steps.n; i++) {
    const PlanStep *s = &p->steps.at[i];
    char *args = (char *)(uintptr_t)r->calls[i].args;
    for (int k = 0; k < s->n_patches; k++) {
      const Param *param = &s->op->params[s->patches[k].param];
      double value = r->cells[s->patches[k].cell];
      if (param->kind == PARAM_FLOAT) *(double *)(void *)(args + param->offset) = value;
      else if (param->kind == PARAM_BOOL) *(bool *)(args + param->offset) = value != 0;
      else *(int64_t *)(void *)(args + param->offset) = (int64_t)value;
    }
    for (int k = 0; k < s->op->n_params; k++) {
      if (s->op->params[k].kind != PARAM_GENERATOR) continue;
      size_t at = s->op->params[k].offset;
      const RngKey *from = (const RngKey *)(const void *)((const char *)s->args + at);
      *(RngKey *)(void *)(args + at) = (RngKey){seed, stream + from->stream};
    }
  }
  return 0;
}

int runtime_run(Runtime *r, uint64_t seed, uint64_t stream) {
  const Plan *p = r->plan;
  void *scratch = NULL;
  if (r->threads != thread_count()) measure_scratch(r);
  if (r->scratch_bytes && !(scratch = stream_scratch(r->stream, r->scratch_bytes)))
    return err_set(MF_ENOMEM, "out of memory for %zu bytes of scratch", r->scratch_bytes);
  int rc = set_scalars(r, seed, stream);
  atomic_bool *interrupted = &r->device->context->interrupted;
  for (size_t i = 0; i < p->steps.n && !rc; i++) {
    r->calls[i].scratch = scratch;
    const Watch *watch = watch_of(r->device->context);
    rc = watch ? watch_launch(watch, p->steps.at[i].op->spec[r->isa], &r->calls[i],
                              p->steps.at[i].where)
               : r->kernels[i](&r->calls[i]);
    if (!rc && atomic_load_explicit(interrupted, memory_order_relaxed) &&
        atomic_exchange(interrupted, false))
      rc = err_set(MF_EINTR, "interrupted");
    if (rc && p->steps.at[i].where) rc = err_prefix(rc, p->steps.at[i].where);
  }
  return rc;
}
