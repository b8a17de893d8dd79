/* An actor runs one task, again and again, as its registers allow.
 *
 *            actor_create_all
 *                 v                    actor_act
 *            +---------+  pending 0  +---------+
 *        +-->| waiting |------------>| queued  |---+
 *        |   +---------+ worker_push +---------+   | the work, then its messages
 * actor_ |    |   |  ^_____________________________|
 * receive|____|   | actor_limit: acts == limit
 * _tick           v
 *            +---------+
 *            |  ended  |  actor_end_all: END to its consumers, GONE to its producers
 *            +---------+
 *
 * A register is produced with n buffers, used in turn. Filling one tells each consumer (FULL), who
 * returns it when it has acted (FREE); returned by all it may be filled again. That is the only
 * flow control; order edges are registers without memory. An actor acts when each input has a full
 * buffer, each output a free one and, if it is ticked, a round is wanted.
 *
 * An actor of micro-batches acts `times` times in a round. What it shares with one that acts once
 * it holds through them: it returns such an input after the last of them, and has filled such an
 * output then. A tick is for all of them.
 *
 * Where all its registers have one buffer, an actor is `fast`: `pending` counts all that has to
 * come before it acts: its inputs, the returns of what its last act made, the tick. Nothing else is
 * kept, and its messages are the links, made once. Of others, `pending` counts inputs without a
 * full buffer, outputs without a free one, and the tick.
 *
 * Invariants:
 *  A1  pending >= 0; it is 0 exactly while the actor is queued or acts.
 *  A2  An actor takes one buffer of each input and fills one of each output in `hold` acts, which
 *      are one or a round's; so act k reads and writes buffer (k / hold) mod n, and messages count
 *      acts / hold.
 *  A3  acts <= limit, and acts <= ticks if ticked; ticks are whole rounds, as are limits but in a
 *      round that failed.
 *  A4  full <= n_buffers and free <= n_buffers.
 *  A5  An ended actor sends nothing more; what comes for it is of no consequence, since its
 *      producers learn by GONE that they need not wait for it.
 *
 * Stop is a cascade: actors without producers get a limit, END tells it to their consumers, who end
 * after as many acts. All of this happens on the thread of the actor's worker. */
#include "actor.h"

#include <stdio.h>
#include <string.h>

#include "err.h"
#include "hard.h"
#include "str.h"
#include "watch.h"

/* -- Sending ----------------------------------------------------------------------------------- */

static void send(Actor *from, const Link *to, MessageKind kind, uint64_t count) {
  Message m = {to->to, from, count, to->slot, (uint8_t)kind};
  if (to->to->worker == from->worker) actor_receive(&m);
  else worker_send(to->to->worker, &m);
}

/* How many buffers it is done with, of a register that it holds for so many acts. */
static uint64_t buffers(const Actor *a, int hold) {
  return a->acts / (uint64_t)hold;
}

/* One thing less that it waits for. */
static inline void less_pending(Actor *a) {
  if (--a->pending == 0 && !a->ended) worker_push(a->worker, a);
}

/* -- The end ----------------------------------------------------------------------------------- */

void actor_limit(Actor *a, uint64_t limit) {
  Worker *w = a->worker;
  if (a->ended) return;
  if (limit < a->limit) a->limit = limit;
  MF_ASSERT(a->acts <= a->limit, "A3: task %d acted %llu times of %llu",
            (int)(a->task - w->runtime->plan->tasks.at), (unsigned long long)a->acts,
            (unsigned long long)a->limit);
  if (a->acts < a->limit) return;
  a->ended = true;
  a->next_ending = w->ending;
  w->ending = a;
}

static void end(Actor *a) {
  Worker *w = a->worker;
  w->n_alive--;
  if (a->paced) {
    uint64_t times = (uint64_t)a->times;
    w->n_paced -= a->times;
    if (a->acts / times < w->least) w->least = a->acts / times;
    w->left -= (int64_t)(w->rounds * times - a->acts);
  }
  for (int i = 0; i < a->n_out; i++)
    for (int k = 0; k < a->out[i].n_readers; k++)
      send(a, &a->out[i].readers[k], MESSAGE_END, buffers(a, a->out[i].hold));
  for (int i = 0; i < a->n_in; i++)
    send(a, &(Link){a->in[i].from, a->in[i].slot, true}, MESSAGE_GONE, buffers(a, a->in[i].hold));
}

void actor_end_all(Worker *w) {
  for (Actor *a; (a = w->ending);) { /* a list, since the cascade may be as long as the plan */
    w->ending = a->next_ending;
    end(a);
  }
}

void actor_tick(Actor *a, uint64_t n) {
  if (a->ended) return;
  bool waited = a->acts == a->ticks;
  a->ticks += n * (uint64_t)a->times;
  if (waited && n) less_pending(a);
}

/* -- Receiving --------------------------------------------------------------------------------- */

static void drop_link(Actor *a, const Actor *to, int out) {
  Output *o = &a->out[out];
  for (int k = 0; k < o->n_readers; k++)
    if (o->readers[k].to == to) {
      memmove(o->readers + k, o->readers + k + 1,
              sizeof *o->readers * (size_t)(o->n_readers - 1 - k));
      o->n_readers--;
      a->n_readers--;
      break;
    }
}

/* Whether a link is the one to `to` for its input from output `out` of a. */
static bool is_link(const Actor *a, const Link *l, const Actor *to, int out) {
  return l->to == to && !l->back && to->in[l->slot].from == a && to->in[l->slot].slot == out;
}

static void drop_fast_link(Actor *a, const Actor *to, int out) {
  Links *l = &a->links[a->out[out].hold > 1];
  for (int k = 0; k < l->n; k++)
    if (is_link(a, &l->at[k], to, out)) {
      memmove(l->at + k, l->at + k + 1, sizeof *l->at * (size_t)(l->n - 1 - k));
      l->n_near -= k < l->n_near;
      l->n--;
      break;
    }
}

/* A buffer of output o came back from one reader. */
static void give_back(Actor *a, Output *o, uint64_t count) {
  if (--o->reading[count % (uint64_t)o->n_buffers]) return;
  MF_ASSERT(o->free < o->n_buffers, "A4: r%d has %d free buffers", o->reg, o->free + 1);
  if (o->free++ == 0) less_pending(a);
}

/* A consumer that ended returns what it was sent, and reads no more. */
static void lose_reader(Actor *a, const Message *m) {
  Output *o = &a->out[m->slot];
  drop_link(a, m->from, m->slot);
  if (a->fast) {
    drop_fast_link(a, m->from, m->slot);
    if (m->count < buffers(a, o->hold)) less_pending(a);
  } else {
    for (uint64_t k = m->count; k < buffers(a, o->hold); k++) give_back(a, o, k);
  }
  if (!a->n_readers && !a->n_in && !a->ticked) actor_limit(a, a->acts); /* a source for nobody */
}

void actor_receive(const Message *m) {
  Actor *a = m->to;
  if (a->ended) return;
  switch ((MessageKind)m->kind) {
    case MESSAGE_FULL:
      if (a->fast || a->in[m->slot].full++ == 0) less_pending(a);
      break;
    case MESSAGE_FREE:
      if (a->fast) less_pending(a);
      else give_back(a, &a->out[m->slot], m->count);
      break;
    case MESSAGE_END: actor_limit(a, m->count * (uint64_t)a->in[m->slot].hold); break;
    case MESSAGE_GONE: lose_reader(a, m); break;
  }
  MF_ASSERT(a->pending >= 0, "A1: task %d", (int)(a->task - a->worker->runtime->plan->tasks.at));
}

/* -- Acting ------------------------------------------------------------------------------------ */

static void turn(Actor *a) {
  for (int k = 0; k < a->n_turns; k++) {
    Turn *t = &a->turns[k];
    uint64_t buffer = buffers(a, t->hold) % (uint64_t)t->n_buffers;
    char *data = t->base ? t->base + (int64_t)buffer * t->size : NULL;
    if (t->view) t->view->data = data;
    else a->data[k] = data;
  }
}

/* In a hard build: what others have read is no more when it is made anew. */
static void fill_outputs(const Actor *a) {
  const Runtime *r = a->worker->runtime;
  for (int i = 0; i < a->n_out; i++) {
    const PlanRegister *reg = &r->plan->registers.at[a->out[i].reg];
    int64_t size = (reg->bytes + PLAN_ALIGN - 1) & ~(int64_t)(PLAN_ALIGN - 1);
    uint64_t buffer = buffers(a, a->out[i].hold) % (uint64_t)reg->n_buffers;
    int64_t at = reg->offset + (int64_t)buffer * size;
    if (a->out[i].hold > 1 && a->micro) continue; /* it is filled by several acts */
    if (reg->home == PLAN_BLOCK && reg->stream == PLAN_SHARED)
      hard_fill(r->block + at, (size_t)reg->bytes, HARD_DATA);
  }
}

/* On to micro-batch a->micro. */
static void move(Actor *a) {
  for (size_t k = 0; k < a->moves.n; k++) {
    const Move *m = &a->moves.at[k];
    char *first = m->base ? *m->base + m->offset : m->view->data; /* in this turn */
    m->view->data = first + a->micro * m->stride;
  }
  for (size_t k = 0; k < a->shifts.n; k++) {
    const Shift *s = &a->shifts.at[k];
    *s->start = s->first + a->micro * s->size;
  }
  for (size_t k = 0; k < a->numbers.n; k++) *a->numbers.at[k] = a->micro;
}

static int work(Actor *a) {
  Runtime *r = a->worker->runtime;
  if (HARD) fill_outputs(a);
  if (a->n_turns) turn(a);
  if (r->rounds && a->task == r->opener && !a->micro) runtime_open(r, buffers(a, a->times));
  if (a->times > 1) move(a);
  if (a->task->call == PLAN_NO_CALL) return runtime_launch(r, a->task->first, a->task->n);
  const Call *c = &r->host[a->task->call];
  return c->fn(c->ud, a->data, a->data + a->n_in);
}

/* -- Seen by a profile ------------------------------------------------------------------------- */

static const char *name_of(const Actor *a) {
  const Plan *p = a->worker->runtime->plan;
  return a->task->call == PLAN_NO_CALL ? p->name : p->calls.at[a->task->call];
}

static ProfileEvent event_of(const Actor *a, ProfileKind kind, int64_t begin, int reg, int hold) {
  ProfileEvent e = {.kind = (uint8_t)kind,
                    .begin = begin,
                    .end = begin,
                    .track = a->worker->device_stream,
                    .owner = a->worker->runtime,
                    .reg = reg,
                    .act = buffers(a, hold)};
  return e;
}

/* The act, and arrows from what came before it to what follows. */
static int profiled_work(Actor *a, Watch *w) {
  const Runtime *r = a->worker->runtime;
  int64_t begin = profile_now();
  int rc = work(a);
  if (rc) return rc;
  ProfileEvent act = event_of(a, PROFILE_ACT, begin, -1, 1);
  act.end = profile_now();
  snprintf(act.name, sizeof act.name, "%s", name_of(a));
  snprintf(act.where, sizeof act.where, "%s",
           r->threads ? r->plan->streams.at[a->worker->stream].name : "");
  watch_add(w, &act);
  for (int i = 0; i < a->n_in; i++) {
    if (a->in[i].hold > 1 && a->micro) continue; /* it came for the first of the round */
    ProfileEvent e = event_of(a, PROFILE_RECEIVE, begin, a->in[i].reg, a->in[i].hold);
    watch_add(w, &e);
  }
  for (int i = 0; i < a->n_out; i++) {
    if (a->out[i].hold > 1 && a->micro < a->times - 1) continue; /* full with the last */
    ProfileEvent e = event_of(a, PROFILE_SEND, act.end, a->out[i].reg, a->out[i].hold);
    watch_add(w, &e);
  }
  return 0;
}

static void told_fast(Actor *a, const Links *links) {
  const Link *l = links->at;
  for (int k = 0; k < links->n_near; k++)
    if (--l[k].to->pending == 0 && !l[k].to->ended) worker_push(l[k].to->worker, l[k].to);
  for (int k = links->n_near; k < links->n; k++)
    send(a, &l[k], l[k].back ? MESSAGE_FREE : MESSAGE_FULL, a->acts - 1);
}

/* `last`: of a round. */
static void told(Actor *a, bool last) {
  for (int i = 0; i < a->n_out; i++) {
    Output *o = &a->out[i];
    if (o->hold > 1 && !last) continue;
    o->reading[(buffers(a, o->hold) - 1) % (uint64_t)o->n_buffers] = o->n_readers;
    if (o->n_readers && --o->free == 0) a->pending++;
  }
  for (int i = 0; i < a->n_in; i++)
    if ((a->in[i].hold == 1 || last) && --a->in[i].full == 0) a->pending++;
  for (int i = 0; i < a->n_out; i++) {
    const Output *o = &a->out[i];
    for (int k = 0; k < o->n_readers && (o->hold == 1 || last); k++)
      send(a, &o->readers[k], MESSAGE_FULL, buffers(a, o->hold) - 1);
  }
  for (int i = 0; i < a->n_in; i++)
    if (a->in[i].hold == 1 || last)
      send(a, &(Link){a->in[i].from, a->in[i].slot, true}, MESSAGE_FREE,
           buffers(a, a->in[i].hold) - 1);
}

int actor_act(Actor *a) {
  Watch *watch = watch_of(a->worker->runtime->device->context);
  int rc = watch_profiles(watch) ? profiled_work(a, watch) : work(a);
  if (rc == RUNTIME_END) {
    actor_limit(a, a->acts);
    return 0;
  }
  if (rc) return rc;
  a->acts++;
  bool last = ++a->micro == a->times;
  if (last) a->micro = 0;
  a->worker->left -= a->paced;
  a->pending = 1; /* until its messages are out, so that it is not queued by an answer */
  if (a->ticked && a->acts == a->ticks) a->pending++;
  if (a->fast) {
    a->pending += a->links[0].n + (last ? a->links[1].n : 0);
    told_fast(a, &a->links[0]);
    if (last) told_fast(a, &a->links[1]);
  } else {
    told(a, last);
  }
  less_pending(a);
  if (a->acts == a->limit) actor_limit(a, a->acts);
  return 0;
}

/* -- Making ------------------------------------------------------------------------------------ */

static int place_in(const int *list, int value) {
  int k = 0;
  while (list[k] != value) k++;
  return k;
}

static void make_registers(Runtime *r, Actor *a) {
  const Plan *p = r->plan;
  const PlanTask *t = a->task;
  a->n_in = t->n_in;
  a->n_out = t->n_out;
  a->in = arena_array(&r->arena, Input, t->n_in);
  a->out = arena_array(&r->arena, Output, t->n_out);
  a->fast = true;
  for (int i = 0; i < t->n_in; i++) {
    const PlanRegister *reg = &p->registers.at[t->in[i]];
    const PlanTask *maker = &p->tasks.at[reg->producer];
    a->in[i] = (Input){.from = &r->actors[reg->producer],
                       .slot = place_in(maker->out, t->in[i]),
                       .hold = plan_is_slow(p, reg) ? t->times : 1,
                       .reg = t->in[i]};
    a->fast &= reg->n_buffers == 1;
  }
  for (int i = 0; i < t->n_out; i++) {
    const PlanRegister *reg = &p->registers.at[t->out[i]];
    a->out[i] = (Output){
        .reg = t->out[i], .hold = plan_is_slow(p, reg) ? t->times : 1, .n_buffers = reg->n_buffers};
    a->out[i].reading = arena_array(&r->arena, int, reg->n_buffers);
    a->out[i].readers = arena_array(&r->arena, Link, reg->n_consumers);
    a->fast &= reg->n_buffers == 1;
  }
}

static void add_turn(Runtime *r, Actor *a, int *n, View *view, int reg, int64_t offset) {
  const PlanRegister *of = &r->plan->registers.at[reg];
  int hold = of->producer >= 0 && plan_is_slow(r->plan, of) ? a->task->times : 1;
  int64_t size = (of->bytes + PLAN_ALIGN - 1) & ~(int64_t)(PLAN_ALIGN - 1);
  char *base = of->home == PLAN_ORDER ? NULL : r->block + of->offset + offset;
  if (a->turns) a->turns[*n] = (Turn){view, base, base ? size : 0, of->n_buffers, hold};
  (*n)++;
}

/* Views on registers of several buffers, and the memory that a call gets: counted, then made. */
static void find_turns(Runtime *r, Actor *a) {
  const PlanTask *t = a->task;
  int n = 0;
  for (int i = 0; t->call != PLAN_NO_CALL && i < t->n_in + t->n_out; i++)
    add_turn(r, a, &n, NULL, i < t->n_in ? t->in[i] : t->out[i - t->n_in], 0);
  for (int j = t->first; j < t->first + t->n; j++) {
    const PlanStep *s = &r->plan->steps.at[j];
    for (int k = 0; k < s->n_in + s->n_out; k++) {
      int id = k < s->n_in ? s->in[k] : s->out[k - s->n_in];
      if (id < 0) continue;
      const PlanTensor *tensor = &r->plan->tensors.at[id];
      if (r->plan->registers.at[tensor->reg].n_buffers < 2) continue;
      View *view = (View *)(uintptr_t)(r->calls[j].in + k); /* outputs lie behind inputs */
      add_turn(r, a, &n, view, tensor->reg,
               tensor->meta.offset * (int64_t)dtype_size((DType)tensor->meta.dtype));
    }
  }
  a->n_turns = n;
}

static void make_turns(Runtime *r, Actor *a) {
  find_turns(r, a);
  if (!a->n_turns) return;
  a->turns = arena_array(&r->arena, Turn, a->n_turns);
  find_turns(r, a);
  a->data = arena_alloc(&r->arena, sizeof *a->data * (size_t)(a->n_in + a->n_out));
}

static void add_link(Actor *a, Actor *to, int slot, bool back, int hold) {
  Link l = {to, slot, back};
  Links *links = &a->links[hold > 1];
  bool near = to->fast && to->worker == a->worker;
  if (near) {
    links->at[links->n++] = links->at[links->n_near];
    links->at[links->n_near++] = l;
  } else {
    links->at[links->n++] = l;
  }
}

/* Readers and links as at the start. */
static void link(Runtime *r, Actor *a) {
  const Plan *p = r->plan;
  a->n_readers = 0;
  for (int k = 0; k < 2; k++) a->links[k].n = a->links[k].n_near = 0;
  for (int i = 0; i < a->n_out; i++) {
    const PlanRegister *reg = &p->registers.at[a->out[i].reg];
    a->out[i].n_readers = reg->n_consumers;
    a->n_readers += reg->n_consumers;
    for (int k = 0; k < reg->n_consumers; k++) {
      const PlanTask *t = &p->tasks.at[reg->consumers[k]];
      Actor *to = &r->actors[reg->consumers[k]];
      a->out[i].readers[k] = (Link){to, place_in(t->in, a->out[i].reg), false};
      add_link(a, to, a->out[i].readers[k].slot, false, a->out[i].hold);
    }
  }
  for (int i = 0; i < a->n_in; i++) add_link(a, a->in[i].from, a->in[i].slot, true, a->in[i].hold);
}

static void reset(Runtime *r, Actor *a) {
  a->ended = false;
  a->acts = a->ticks = 0;
  a->micro = 0;
  a->limit = UINT64_MAX;
  link(r, a);
  a->pending = a->n_in + a->ticked;
  for (int i = 0; i < a->n_in; i++) a->in[i].full = 0;
  for (int i = 0; i < a->n_out; i++) {
    a->out[i].free = a->out[i].n_buffers;
    memset(a->out[i].reading, 0, sizeof *a->out[i].reading * (size_t)a->out[i].n_buffers);
  }
  Worker *w = a->worker;
  w->n_alive++;
  w->n_paced += a->paced ? a->times : 0;
  if (!a->pending) worker_push(w, a);
}

void actor_reset_all(Runtime *r) {
  for (int k = 0; k < r->n_workers; k++) {
    Worker *w = &r->workers[k];
    w->head = w->tail = 0;
    w->n_alive = w->n_paced = w->n_inbox = 0;
    w->left = 0;
    w->rounds = w->rounds_wanted = w->said = 0;
    w->ending = NULL;
    w->completing = false;
    w->least = UINT64_MAX;
  }
  for (size_t i = 0; i < r->plan->tasks.n; i++) reset(r, &r->actors[i]);
}

void actor_create_all(Runtime *r) {
  size_t n = r->plan->tasks.n;
  for (size_t i = 0; i < n; i++) {
    Actor *a = &r->actors[i];
    make_registers(r, a);
    make_turns(r, a);
    a->times = a->task->times;
    if (a->times > 1) runtime_list_moves(r, a);
    int n_links = a->n_in;
    for (int k = 0; k < a->n_out; k++) n_links += r->plan->registers.at[a->out[k].reg].n_consumers;
    for (int k = 0; k < (a->times > 1 ? 2 : 1); k++)
      a->links[k].at = arena_array(&r->arena, Link, n_links + 1);
    a->ticked = a->paced = a->task->ticked;
    /* a producer comes before its consumers */
    for (int k = 0; k < a->n_in; k++) a->paced |= a->in[k].from->paced;
  }
}

/* -- What it waits for ------------------------------------------------------------------------- */

void actor_print_waits(const Actor *a, Str *out) {
  const Runtime *r = a->worker->runtime;
  const Plan *p = r->plan;
  if (a->ended) return;
  int task = (int)(a->task - p->tasks.at);
  str_printf(out, "task %d", task);
  if (a->task->call != PLAN_NO_CALL) str_printf(out, " (%s)", p->calls.at[a->task->call]);
  else if (a->task->n) str_printf(out, " (%s)", p->steps.at[a->task->first].op->name);
  str_printf(out, " acted %llu times", (unsigned long long)a->acts);
  if (!a->pending) str_puts(out, ", can act");
  if (a->ticked && a->acts == a->ticks) str_puts(out, ", waits for the next round");
  for (int i = 0; i < a->n_in; i++) {
    const Actor *from = a->in[i].from;
    if (a->fast ? buffers(from, from->out[a->in[i].slot].hold) > buffers(a, a->in[i].hold)
                : a->in[i].full > 0)
      continue;
    str_printf(out, ", waits for r%d of task %d", a->in[i].reg, (int)(from->task - p->tasks.at));
  }
  for (int i = 0; i < a->n_out; i++) {
    const Output *o = &a->out[i];
    if (!a->fast && o->free) continue;
    for (int k = 0; k < o->n_readers; k++) {
      const Actor *to = o->readers[k].to;
      if (buffers(to, to->in[o->readers[k].slot].hold) + (uint64_t)o->n_buffers <=
          buffers(a, o->hold))
        str_printf(out, ", waits until task %d has read r%d", (int)(to->task - p->tasks.at),
                   o->reg);
    }
  }
  str_puts(out, "\n");
}
