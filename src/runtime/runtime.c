/* A plan's memory, its ports and the launches of its steps; who acts when is actor.c's and
 * worker.c's matter. What changes from run to run is found once: lists say where it goes. */
#include "runtime.h"

#include <stdio.h>
#include <string.h>

#include "actor.h"
#include "context.h"
#include "err.h"
#include "fault.h"
#include "hard.h"
#include "mem.h"
#include "op_comm.h"
#include "talk.h"
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

/* A cell's value goes to `to`, as a param of this kind, or as a number of this dtype. */
typedef struct Patch {
  void *to;
  int cell;
  int8_t kind; /* ParamKind; -1: a number */
  uint8_t dtype;
} Patch;

/* A random op's key: the run's seed, and its first stream number + from. */
typedef struct Draw {
  RngKey *to;
  uint64_t from;
} Draw;

/* -- Making ------------------------------------------------------------------------------------ */

/* `indexed`: for an op that looks at where parts begin. */
static void view_of(Runtime *r, int tensor, bool indexed, View *v) {
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
              .number = t->meta.number,
              .device = reg->home == PLAN_NUMBER ? DEVICE_CPU : t->meta.device};
  if (t->cut && indexed) v->whole = t->cut, v->start = t->cut + t->meta.ndim;
  if (reg->home == PLAN_BLOCK) v->data = r->block + reg->offset + offset;
  else *list_add(&r->arena, &r->ports[reg->home][reg->port].fixups) = (Fixup){v, offset};
}

static void *make_talk(Runtime *r, int step) {
  if (!r->talk) r->talk = arena_array(&r->arena, void *, r->plan->steps.n);
  return r->talk[step] = talk_create(&r->arena, r->options.comm, r->plan, step, r->talk);
}

static void make_call(Runtime *r, size_t i) {
  const PlanStep *s = &r->plan->steps.at[i];
  View *views = arena_array(&r->arena, View, s->n_in + s->n_out);
  bool indexed = s->op->spec[0]->flags & OP_INDEXED;
  for (int k = 0; k < s->n_in; k++) view_of(r, s->in[k], indexed, &views[k]);
  for (int k = 0; k < s->n_out; k++) view_of(r, s->out[k], indexed, &views[s->n_in + k]);
  DeviceKernel *const *own = r->device->kernels;
  bool talks = op_is_comm(s->op);
  r->talks |= talks;
  if (talks) r->kernels[i] = own ? NULL : talk_run;
  else r->kernels[i] = own ? own[s->op->id] : s->op->spec[r->options.isa]->cpu;
  if (!r->kernels[i])
    arena_throw(&r->arena,
                err_set(MF_EUNSUPPORTED, "%s: has no kernel on %s", s->op->name, r->device->name));
  r->calls[i] = (OpCall){
      .op = s->op,
      .args = talks ? make_talk(r, (int)i) : arena_copy(&r->arena, s->args, s->op->args_size),
      .in = views,
      .out = views + s->n_in,
      .n_in = s->n_in,
      .n_out = s->n_out};
}

static void *arg_of(Runtime *r, size_t step, int param) {
  char *args = (char *)(uintptr_t)r->calls[step].args;
  return args + r->plan->steps.at[step].op->params[param].offset;
}

static bool is_draw(const Op *op, int param) {
  return op->params[param].kind == PARAM_GENERATOR;
}

/* Scalar arguments and numbers that are cells, and the keys of random ops. */
static void list_patches(Runtime *r) {
  const Plan *p = r->plan;
  size_t n_patches = p->numbers.n, n_draws = 0;
  for (size_t i = 0; i < p->steps.n; i++) {
    n_patches += (size_t)p->steps.at[i].n_patches;
    for (int k = 0; k < p->steps.at[i].op->n_params; k++) n_draws += is_draw(p->steps.at[i].op, k);
  }
  r->patches = arena_array(&r->arena, Patch, n_patches + 1);
  r->draws = arena_array(&r->arena, Draw, n_draws + 1);
  for (size_t i = 0; i < p->numbers.n; i++)
    if (p->numbers.at[i].cell != PLAN_NO_CELL)
      r->patches[r->n_patches++] =
          (Patch){r->numbers + 8 * i, p->numbers.at[i].cell, -1, p->numbers.at[i].dtype};
  for (size_t i = 0; i < p->steps.n; i++) {
    const PlanStep *s = &p->steps.at[i];
    for (int k = 0; k < s->n_patches; k++)
      if (s->patches[k].cell != PLAN_MICRO)
        r->patches[r->n_patches++] = (Patch){arg_of(r, i, s->patches[k].param), s->patches[k].cell,
                                             (int8_t)s->op->params[s->patches[k].param].kind, 0};
    for (int k = 0; k < s->op->n_params; k++) {
      if (!is_draw(s->op, k)) continue;
      RngKey *key = arg_of(r, i, k);
      r->draws[r->n_draws++] = (Draw){key, key->stream};
    }
  }
}

/* What a part of the whole batch along dim `along` is drawn as. */
static void add_shift(Runtime *r, Actor *a, View *v, int along) {
  if (v->ndim <= along) return;
  int64_t *whole = arena_array(&r->arena, int64_t, v->ndim),
          *start = arena_array(&r->arena, int64_t, v->ndim);
  memcpy(whole, v->whole ? v->whole : v->shape, sizeof *whole * (size_t)v->ndim);
  if (v->start) memcpy(start, v->start, sizeof *start * (size_t)v->ndim);
  *list_add(&r->arena, &a->shifts) = (Shift){&start[along], whole[along], start[along]};
  whole[along] *= a->times;
  v->whole = whole;
  v->start = start;
}

static void add_move(Runtime *r, Actor *a, View *v, int tensor) {
  if (tensor < 0 || !r->plan->tensors.at[tensor].stride) return;
  const PlanTensor *t = &r->plan->tensors.at[tensor];
  const PlanRegister *reg = &r->plan->registers.at[t->reg];
  bool block = reg->home == PLAN_BLOCK;
  int64_t size = (int64_t)dtype_size((DType)t->meta.dtype);
  char **base = block ? &r->block : (char **)&r->ports[reg->home][reg->port].data;
  if (reg->n_buffers > 1) base = NULL;
  *list_add(&r->arena, &a->moves) =
      (Move){v, base, t->meta.offset * size + (block ? reg->offset : 0), t->stride * size};
}

void runtime_list_moves(Runtime *r, Actor *a) {
  for (int i = a->task->first, end = i + a->task->n; i < end; i++) {
    const PlanStep *s = &r->plan->steps.at[i];
    View *views = (View *)(uintptr_t)r->calls[i].in; /* outputs lie behind inputs */
    for (int k = 0; k < s->n_in + s->n_out; k++)
      add_move(r, a, &views[k], k < s->n_in ? s->in[k] : s->out[k - s->n_in]);
    if (s->along >= 0 && s->n_in + s->n_out)
      add_shift(r, a, &views[s->n_out ? s->n_in : 0], s->along);
    for (int k = 0; k < s->n_patches; k++)
      if (s->patches[k].cell == PLAN_MICRO)
        *list_add(&r->arena, &a->numbers) = arg_of(r, (size_t)i, s->patches[k].param);
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

static char *new_room(Runtime *r, size_t bytes) {
  char *room = arena_alloc(&r->arena, bytes + PLAN_ALIGN);
  return room + ((PLAN_ALIGN - 1) & -(uintptr_t)room);
}

/* Where steps pack what they communicate; of those in groups one runs at a time. */
static void make_room(Runtime *r) {
  size_t most = 0, n = r->talk ? r->plan->steps.n : 0;
  for (size_t i = 0; i < n; i++)
    if (r->talk[i] && !talk_is_apart(r->talk[i]) && talk_room(r->talk[i]) > most)
      most = talk_room(r->talk[i]);
  char *room = new_room(r, most);
  for (size_t i = 0; i < n; i++) {
    if (!r->talk[i]) continue;
    bool apart = talk_is_apart(r->talk[i]);
    talk_set_room(r->talk[i], apart ? new_room(r, talk_room(r->talk[i])) : room);
  }
}

static void give_streams(Runtime *r, Stream *stream) {
  for (int k = 0; k < r->n_workers; k++) {
    Worker *w = &r->workers[k];
    w->device_stream = r->threads ? r->device->api->stream_create(r->device) : stream;
    if (r->threads && !w->device_stream)
      arena_throw(&r->arena, err_set(MF_ENOMEM, "out of memory"));
    for (int i = 0; i < w->n_actors; i++)
      for (int j = w->actors[i]->task->first, n = j + w->actors[i]->task->n; j < n; j++)
        r->calls[j].stream = w->device_stream;
  }
}

static bool changes_capture(const Plan *p, const PlanStep *s) {
  for (int k = 0; k < s->n_in + s->n_out; k++) {
    int t = k < s->n_in ? s->in[k] : s->out[k - s->n_in], param;
    if (t < 0 || p->registers.at[p->tensors.at[t].reg].home != PLAN_CAPTURE) continue;
    if (k >= s->n_in) return true;
    param = op_param_of_input(s->op, s->args, k);
    for (int i = 0; i < s->op->n_params; i++)
      if (s->op->params[i].kind == PARAM_TENSOR && param-- == 0 && s->op->params[i].mutated)
        return true;
  }
  return false;
}

static int first_write(const Plan *p) {
  int i = 0;
  while (i < (int)p->steps.n && !changes_capture(p, &p->steps.at[i])) i++;
  return i;
}

/* Actors by worker, one for each stream that has any. */
static void make_workers(Runtime *r) {
  const Plan *p = r->plan;
  int *worker_of = arena_array(&r->arena, int, p->streams.n + 1),
      *count = arena_array(&r->arena, int, p->streams.n + 1);
  r->workers = arena_array(&r->arena, Worker, p->streams.n + 1);
  r->actors = arena_array(&r->arena, Actor, p->tasks.n + 1);
  for (size_t i = 0; i < p->tasks.n; i++) {
    count[p->tasks.at[i].stream]++;
    r->threads |= p->tasks.at[i].call != PLAN_NO_CALL && !p->tasks.at[i].n_in;
  }
  for (size_t s = 0; s < p->streams.n; s++) {
    if (!count[s]) continue;
    worker_of[s] = r->n_workers;
    Worker *w = &r->workers[r->n_workers++];
    *w = (Worker){
        .runtime = r, .stream = (int)s, .ring = 1, .most = 1, .luck = hard_seed((uint32_t)s)};
    while (w->ring < (unsigned)count[s] + 1) w->ring *= 2;
    w->ready = arena_alloc(&r->arena, sizeof *w->ready * w->ring);
    w->actors = arena_alloc(&r->arena, sizeof *w->actors * (size_t)count[s]);
    pthread_mutex_init(&w->lock, NULL);
    pthread_cond_init(&w->wake, NULL);
    atomic_init(&w->busy, -1);
  }
  r->threads |= r->n_workers > 1;
  if (r->threads && !r->device->api->on_host)
    arena_throw(&r->arena, err_set(MF_EUNSUPPORTED,
                                   "a step with calls of the host runs on the cpu alone, not on %s",
                                   r->device->name));
  for (size_t i = 0; i < p->tasks.n; i++) {
    Worker *w = &r->workers[worker_of[p->tasks.at[i].stream]];
    r->actors[i].task = &p->tasks.at[i];
    if (!r->opener && p->tasks.at[i].call == PLAN_NO_CALL) r->opener = &p->tasks.at[i];
    r->actors[i].worker = w;
    w->actors[w->n_actors++] = &r->actors[i];
  }
}

/* Of each edge between workers there are at most as many letters under way as buffers, and the
 * last, in each direction. */
static void make_inboxes(Runtime *r) {
  for (size_t i = 0; i < r->plan->tasks.n; i++) {
    Actor *a = &r->actors[i];
    for (int k = 0; k < a->n_in; k++) {
      if (a->in[k].from->worker == a->worker) continue;
      int n = r->plan->registers.at[a->in[k].reg].n_buffers + 1;
      a->worker->most += n;
      a->in[k].from->worker->most += n;
    }
  }
  for (int k = 0; k < r->n_workers; k++) {
    Worker *w = &r->workers[k];
    w->inbox = arena_array(&r->arena, Message, w->most);
    w->reading = arena_array(&r->arena, Message, w->most);
  }
}

/* Whether step i is of each micro-batch. */
static bool is_repeated(const Plan *p, int i) {
  for (size_t k = 0; k < p->tasks.n; k++) {
    const PlanTask *t = &p->tasks.at[k];
    if (i >= t->first && i < t->first + t->n) return t->times > 1;
  }
  return false;
}

/* Of a hard build: which registers of the block are used for the last time in each step. Those that
 * streams share are their producers' matter, see actor.c; what was made before the micro-batches
 * and ends with them is used by the next. */
static void find_dead(Runtime *r) {
  const Plan *p = r->plan;
  int n = 0;
  r->dead = arena_array(&r->arena, int, p->registers.n);
  r->dead_at = arena_array(&r->arena, int, p->steps.n + 1);
  for (int i = 0; i < (int)p->steps.n; i++) {
    bool repeated = is_repeated(p, i);
    for (int k = 0; k < (int)p->registers.n; k++) {
      const PlanRegister *reg = &p->registers.at[k];
      if (reg->home != PLAN_BLOCK || reg->stream == PLAN_SHARED || reg->last != i) continue;
      if (!repeated || is_repeated(p, reg->first)) r->dead[n++] = k;
    }
    r->dead_at[i + 1] = n;
  }
}

typedef struct Making {
  Runtime *r;
  Stream *stream;
} Making;

static void make(void *ud) {
  Making *m = ud;
  Runtime *r = m->r;
  const Plan *p = r->plan;
  size_t n[] = {0, p->inputs.n, p->captures.n, (size_t)p->n_result_registers, p->numbers.n};
  for (int home = PLAN_INPUT; home <= PLAN_NUMBER; home++)
    r->ports[home] = arena_array(&r->arena, Port, n[home] + 1);
  r->cells = arena_array(&r->arena, double, p->n_cells + 1);
  r->host = arena_array(&r->arena, Call, p->calls.n + 1);
  make_workers(r);
  r->block = r->device->api->alloc(r->device, (size_t)p->block_bytes, NULL);
  if (!r->block)
    arena_throw(&r->arena, err_set(MF_ENOMEM, "out of memory: the plan's block has %lld bytes",
                                   (long long)p->block_bytes));
  r->calls = arena_array(&r->arena, OpCall, p->steps.n);
  r->kernels = arena_alloc(&r->arena, sizeof *r->kernels * p->steps.n);
  r->scratch_at = arena_array(&r->arena, int64_t, p->steps.n + 1);
  for (size_t i = 0; i < p->steps.n; i++) make_call(r, i);
  r->first_write = first_write(p);
  make_numbers(r);
  make_room(r);
  list_patches(r);
  if (HARD) find_dead(r);
  give_streams(r, m->stream);
  actor_create_all(r);
  make_inboxes(r);
  actor_reset_all(r);
}

Runtime *runtime_create(const Plan *p, Device *device, Stream *stream, const RuntimeOptions *o) {
  Runtime *r = mem_zalloc(sizeof *r);
  if (!r) {
    err_set(MF_ENOMEM, "out of memory");
    return NULL;
  }
  r->plan = p;
  r->device = device;
  r->options = *o;
  pthread_mutex_init(&r->lock, NULL);
  pthread_cond_init(&r->changed, NULL);
  Making m = {r, stream};
  if (!arena_protect(&r->arena, make, &m)) return r;
  runtime_destroy(r);
  return NULL;
}

void runtime_destroy(Runtime *r) {
  if (!r) return;
  worker_stop_all(r);
  for (int k = 0; k < r->n_workers; k++) {
    Worker *w = &r->workers[k];
    if (r->threads && w->device_stream) r->device->api->stream_destroy(w->device_stream);
    pthread_mutex_destroy(&w->lock);
    pthread_cond_destroy(&w->wake);
  }
  if (r->block) r->device->api->release(r->device, r->block, (size_t)r->plan->block_bytes, NULL);
  pthread_mutex_destroy(&r->lock);
  pthread_cond_destroy(&r->changed);
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

void runtime_bind_call(Runtime *r, int call, RuntimeCall *fn, void *ud) {
  r->host[call] = (Call){fn, ud};
}

void runtime_set_cell(Runtime *r, int cell, double value) {
  r->cells[cell] = value;
}

static void set_patch(const Patch *p, double value) {
  switch (p->kind) {
    case -1: dtype_set_f64((DType)p->dtype, p->to, value); break;
    case PARAM_FLOAT: *(double *)p->to = value; break;
    case PARAM_BOOL: *(bool *)p->to = value != 0; break;
    default: *(int64_t *)p->to = dtype_f64_to_i64(value);
  }
}

/* In a hard build nobody finds in its scratch what was there before, nor in a register what it had
 * when its lifetime was over. */
static void fill_scratch(const Runtime *r, int step) {
  const OpCall *c = &r->calls[step];
  const OpSpec *spec = c->op->spec[r->options.isa];
  if (c->scratch && spec->scratch) hard_fill(c->scratch, spec->scratch(c), HARD_DATA);
}

static void fill_dead(const Runtime *r, int step) {
  if (!r->device->api->on_host) return;
  for (int k = r->dead_at[step]; k < r->dead_at[step + 1]; k++) {
    const PlanRegister *reg = &r->plan->registers.at[r->dead[k]];
    hard_fill(r->block + reg->offset, (size_t)reg->bytes, HARD_DATA);
  }
}

/* Whether somebody wants it to stop: who waits for it, or after a failure all others. A step that
 * has begun to change what outlives it goes on to its end, so that an interrupt does not leave one
 * part of the parameters updated and another not. */
static int check_stop(Runtime *r) {
  atomic_bool *interrupted = &r->device->context->interrupted;
  if (r->rounds)
    return atomic_load_explicit(&r->failed, memory_order_relaxed) == FAILED_NOW
               ? err_set(MF_EINTR, "interrupted")
               : 0;
  if (atomic_load_explicit(interrupted, memory_order_relaxed) &&
      atomic_exchange(interrupted, false))
    return err_set(MF_EINTR, "interrupted");
  return 0;
}

/* A step that failed here leaves the others waiting for what it would have sent, this rank's own
 * thread that communicates among them. */
static void tell_all(const Runtime *r, int rc) {
  Comm *comm = r->options.comm;
  char text[512];
  if (rc == MF_ECOMM) return;
  snprintf(text, sizeof text, "rank %d on %s failed in the compiled step %s: %s", comm_rank(comm),
           comm_host(comm, comm_rank(comm)), r->plan->name, err_text());
  comm_fail(comm, text);
}

int runtime_launch(Runtime *r, int first, int n) {
  for (int i = first; i < first + n; i++) {
    Watch *watch = watch_of(r->device->context);
    const PlanStep *s = &r->plan->steps.at[i];
    const OpCall *c = &r->calls[i];
    if (HARD) fill_scratch(r, i);
    int rc = fault_launch(s->op->name);
    if (!rc)
      rc = watch ? watch_launch(watch, r->kernels[i], s->op->spec[r->options.isa], c, s->where)
                 : r->kernels[i](c);
    if (!rc && r->device->waits) rc = r->device->api->stream_synchronize(c->stream);
    if (HARD) fill_dead(r, i);
    if (!rc && i < r->first_write) rc = check_stop(r);
    if (!rc) continue;
    if (s->where) err_prefix(rc, s->where);
    if (r->talks) tell_all(r, rc);
    return rc;
  }
  return 0;
}

static int check_calls(const Runtime *r) {
  for (size_t k = 0; k < r->plan->calls.n; k++)
    if (!r->host[k].fn)
      return err_set(MF_EINVAL, "plan %s: nothing was bound to the call %s", r->plan->name,
                     r->plan->calls.at[k]);
  return 0;
}

/* A round begins with these. */
static void set_changing(Runtime *r, const double *cells, uint64_t seed, uint64_t stream) {
  for (size_t i = 0; i < r->n_patches; i++) set_patch(&r->patches[i], cells[r->patches[i].cell]);
  for (size_t i = 0; i < r->n_draws; i++)
    *r->draws[i].to = (RngKey){seed, stream + r->draws[i].from};
}

int runtime_run(Runtime *r, uint64_t seed, uint64_t stream) {
  int rc = check_calls(r);
  if (!rc) rc = scratch_set(r);
  if (rc) return rc;
  set_changing(r, r->cells, seed, stream);
  if (r->threads) {
    if (!r->started) rc = worker_start_all(r);
    if (rc) return rc;
    worker_post(r);
    return worker_wait(r, NULL, NULL);
  }
  rc = worker_run_here(&r->workers[0]);
  if (rc > 0) actor_reset_all(r);
  return rc;
}

/* Where the cells of round `count` are. */
static double *cells_of(Runtime *r, uint64_t count) {
  return r->cells + (1 + count % RUNTIME_AHEAD) * (uint64_t)(r->plan->n_cells + 1);
}

void runtime_open(Runtime *r, uint64_t count) {
  const Round *round = &r->rounds[count % RUNTIME_AHEAD];
  set_changing(r, cells_of(r, count), round->seed, round->stream);
}

/* Room for rounds that are queued, as soon as one is. */
static void make_rounds(void *ud) {
  Runtime *r = ud;
  size_t n = (size_t)r->plan->n_cells + 1;
  double *cells = arena_array(&r->arena, double, n *(1 + RUNTIME_AHEAD));
  memcpy(cells, r->cells, sizeof *cells * n);
  r->rounds = arena_array(&r->arena, Round, RUNTIME_AHEAD);
  r->cells = cells;
}

int runtime_start(Runtime *r) {
  int rc = check_calls(r);
  if (!rc && !r->rounds) rc = arena_protect(&r->arena, make_rounds, r);
  if (!rc) rc = scratch_set(r);
  r->n_queued = 0;
  return rc ? rc : worker_start_all(r);
}

int runtime_queue(Runtime *r, uint64_t seed, uint64_t stream) {
  MF_ASSERT(r->rounds && r->started, "plan %s: is not started", r->plan->name);
  if (r->thread_count != thread_count()) { /* kernels may look at their scratch */
    int rc = worker_wait(r, NULL, NULL);
    if (!rc) rc = scratch_set(r);
    if (rc) return rc;
  }
  memcpy(cells_of(r, r->n_queued), r->cells, sizeof *r->cells * (size_t)r->plan->n_cells);
  r->rounds[r->n_queued++ % RUNTIME_AHEAD] = (Round){seed, stream};
  worker_post(r);
  return 0;
}

int runtime_wait(Runtime *r, bool (*until)(void *ud), void *ud) {
  return worker_wait(r, until, ud);
}

void runtime_stop(Runtime *r) {
  if (r->threads) worker_stop_all(r);
  else actor_reset_all(r);
}
