/* Workers: the queue of actors that can act, and where there are several streams or sources a
 * thread for each, with its letter box and the handshakes.
 *
 * A worker acts as long as an actor of its own is ready, looking into its letter box when `mail`
 * says so; then it says whether its rounds are done and sleeps. Handshakes are under the runtime's
 * lock: a round is posted to all, each says once that it is done (`running`); after a failure each
 * completes the rounds before the one that failed, if some may be under way, so that their results
 * are not lost, and parks, the waiting thread puts all actors back to the start and lets them go
 * (`resets`); a stop ends the sources, the rest follows by END, and a thread ends with the last of
 * its actors. */
#include <errno.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "actor.h"
#include "context.h"
#include "err.h"
#include "hard.h"
#include "str.h"
#include "thread.h"
#include "thread_start.h"

/* -- The letter box ---------------------------------------------------------------------------- */

/* Under w->lock. */
static void call_awake(Worker *w) {
  atomic_store_explicit(&w->mail, true, memory_order_release);
  if (w->asleep) pthread_cond_signal(&w->wake);
}

void worker_send(Worker *w, const Message *m) {
  pthread_mutex_lock(&w->lock);
  MF_ASSERT(w->n_inbox < w->most, "more than %d messages for stream %d", w->most, w->stream);
  w->inbox[w->n_inbox++] = *m;
  call_awake(w);
  pthread_mutex_unlock(&w->lock);
}

/* Ticks for all, and what is to be done until the round is. */
static void begin_rounds(Worker *w, uint64_t n) {
  w->rounds += n;
  w->left += (int64_t)n * w->n_paced;
  for (int i = 0; i < w->n_actors; i++)
    if (w->actors[i]->ticked) actor_tick(w->actors[i], n);
}

/* What no other actor paces acts no more; END tells the rest. */
static void begin_end(Worker *w) {
  w->stopping = true;
  for (int i = 0; i < w->n_actors; i++) {
    Actor *a = w->actors[i];
    if (a->ticked) actor_limit(a, a->ticks);
    else if (!a->n_in) actor_limit(a, a->acts);
  }
}

static Failed failed(const Runtime *r) {
  return (Failed)atomic_load_explicit(&r->failed, memory_order_acquire);
}

/* After a failure: nobody acts more than it takes to complete the rounds before. All of these can
 * be completed, since no act waits for one of a later round. */
static void begin_completion(Worker *w) {
  w->completing = true;
  for (int i = 0; i < w->n_actors; i++) {
    Actor *a = w->actors[i];
    uint64_t acts = w->runtime->complete * (uint64_t)a->times;
    actor_limit(a, a->acts > acts ? a->acts : acts);
  }
}

/* What came since. */
static void read_mail(Worker *w) {
  pthread_mutex_lock(&w->lock);
  atomic_store_explicit(&w->mail, false, memory_order_relaxed);
  int n = w->n_inbox;
  Message *letters = w->inbox;
  w->inbox = w->reading;
  w->reading = letters;
  w->n_inbox = 0;
  uint64_t rounds = w->rounds_wanted - w->rounds;
  bool stop = w->stop;
  pthread_mutex_unlock(&w->lock);
  if (rounds) {
    thread_set_count(w->runtime->thread_count); /* the caller may have changed its own */
    begin_rounds(w, rounds);
  }
  for (int k = 0; k < n; k++) actor_receive(&letters[k]);
  if (stop && !w->stopping) begin_end(w);
  if (!w->completing && failed(w->runtime) == FAILED_AFTER) begin_completion(w);
  actor_end_all(w);
}

/* -- Acting ------------------------------------------------------------------------------------ */

/* Rounds before number `complete` are to be completed, if nothing else fails. */
static void fail(Runtime *r, int code, uint64_t complete) {
  Failed how = FAILED_NOW;
  pthread_mutex_lock(&r->lock);
  if (!r->code) {
    r->code = code;
    strncpy(r->text, err_text(), sizeof r->text - 1);
    r->complete = complete;
    if (complete) how = FAILED_AFTER;
  }
  atomic_store_explicit(&r->failed, (int)how, memory_order_release);
  pthread_cond_broadcast(&r->changed);
  pthread_mutex_unlock(&r->lock);
  for (int k = 0; k < r->n_workers; k++) {
    Worker *w = &r->workers[k];
    pthread_mutex_lock(&w->lock);
    call_awake(w);
    pthread_mutex_unlock(&w->lock);
  }
}

/* In a hard build, any of those that are ready. */
static Actor *take_ready(Worker *w) {
  unsigned at = w->head++ & (w->ring - 1);
  if (HARD) {
    unsigned other =
        (w->head - 1 + hard_random(&w->luck) % (w->tail - w->head + 1)) & (w->ring - 1);
    Actor *a = w->ready[other];
    w->ready[other] = w->ready[at];
    return a;
  }
  return w->ready[at];
}

/* In a hard build a thread may be late anywhere. */
static void dawdle(Worker *w) {
  uint32_t luck = HARD ? hard_random(&w->luck) : 1;
  if (luck % 4 == 0) sched_yield();
  if (luck % 64 == 2) nanosleep(&(struct timespec){0, luck % 200 * 1000L}, NULL);
}

static void act(Worker *w) {
  const PlanTask *tasks = w->runtime->plan->tasks.at;
  while (w->head != w->tail) {
    if (atomic_load_explicit(&w->mail, memory_order_acquire)) {
      if (failed(w->runtime) == FAILED_NOW) return;
      read_mail(w);
    }
    Actor *a = take_ready(w);
    if (a->ended) continue;
    atomic_store_explicit(&w->busy, (int)(a->task - tasks), memory_order_relaxed);
    if (HARD) dawdle(w);
    int rc = actor_act(a);
    if (HARD) dawdle(w);
    atomic_store_explicit(&w->busy, -1, memory_order_relaxed);
    atomic_store_explicit(&w->beats, atomic_load_explicit(&w->beats, memory_order_relaxed) + 1,
                          memory_order_relaxed);
    if (w->ending) actor_end_all(w);
    if (rc) fail(w->runtime, rc, w->runtime->rounds ? a->acts / (uint64_t)a->times : 0);
  }
}

/* What all wait for, when nothing moves any more. */
static int say_stuck(Runtime *r) {
  Str s = {0};
  for (size_t i = 0; i < r->plan->tasks.n; i++) actor_print_waits(&r->actors[i], &s);
  int rc = err_set(MF_EINVAL, "plan %s: nothing can move\n%s", r->plan->name, s.text ? s.text : "");
  str_free(&s);
  return rc;
}

int worker_run_here(Worker *w) {
  begin_rounds(w, 1);
  while (w->head != w->tail) {
    Actor *a = take_ready(w);
    int rc = a->ended ? 0 : actor_act(a);
    if (w->ending) actor_end_all(w);
    if (rc) return rc;
  }
  if (w->left) return say_stuck(w->runtime);
  return w->least < w->rounds ? RUNTIME_END : 0;
}

/* -- Threads ----------------------------------------------------------------------------------- */

/* Waits for the start, or after a failure for the reset. False: the thread is to end, as all others
 * that park are. After a reset it goes on even when a stop has come meanwhile: others that woke
 * sooner wait for what its actors send at their ends. */
static bool park(Worker *w) {
  Runtime *r = w->runtime;
  pthread_mutex_lock(&r->lock);
  uint64_t before = r->resets;
  r->n_parked++;
  pthread_cond_broadcast(&r->changed);
  while (r->resets == before && !r->stopping) pthread_cond_wait(&r->changed, &r->lock);
  bool on = r->resets != before;
  pthread_mutex_unlock(&r->lock);
  return on;
}

/* Says once that all rounds that it knows of are done. */
static void report(Worker *w) {
  if (w->said == w->rounds || w->left) return;
  Runtime *r = w->runtime;
  pthread_mutex_lock(&r->lock);
  r->ended |= w->least < w->rounds;
  r->running -= (int64_t)(w->rounds - w->said);
  if (r->running == 0) pthread_cond_broadcast(&r->changed);
  pthread_mutex_unlock(&r->lock);
  w->said = w->rounds;
}

static void sleep_until_mail(Worker *w) {
  pthread_mutex_lock(&w->lock);
  w->asleep = true;
  while (!atomic_load_explicit(&w->mail, memory_order_relaxed))
    pthread_cond_wait(&w->wake, &w->lock);
  w->asleep = false;
  pthread_mutex_unlock(&w->lock);
}

static void *run(void *arg) {
  Worker *w = arg;
  bool on = park(w);
  while (on) {
    act(w);
    Failed how = failed(w->runtime);
    if (how == FAILED_NOW || (how && w->completing && w->n_alive == 0)) {
      on = park(w);
      continue;
    }
    report(w);
    if (w->stopping && w->n_alive == 0) return NULL;
    sleep_until_mail(w);
    if (failed(w->runtime) != FAILED_NOW) read_mail(w);
  }
  return NULL;
}

static void join(Runtime *r) {
  for (int k = 0; k < r->n_workers; k++) {
    Worker *w = &r->workers[k];
    if (w->has_thread) pthread_join(w->thread, NULL);
    w->has_thread = w->stop = w->stopping = false;
  }
  r->started = r->stopping = false;
}

/* Under r->lock. */
static void wait_parked(Runtime *r, int n) {
  while (r->n_parked < n) pthread_cond_wait(&r->changed, &r->lock);
}

/* Under r->lock, when all are parked. */
static void let_go(Runtime *r) {
  actor_reset_all(r);
  r->n_parked = r->running = r->code = 0;
  r->ended = false;
  r->resets++;
  atomic_store_explicit(&r->failed, FAILED_NOT, memory_order_release);
  pthread_cond_broadcast(&r->changed);
}

int worker_start_all(Runtime *r) {
  int n = 0;
  r->n_parked = 0;
  while (n < r->n_workers && !thread_start(&r->workers[n].thread, run, &r->workers[n]))
    r->workers[n++].has_thread = true;
  pthread_mutex_lock(&r->lock);
  wait_parked(r, n);
  if (n == r->n_workers) {
    let_go(r);
    r->started = true;
  } else {
    r->stopping = true;
    pthread_cond_broadcast(&r->changed);
  }
  pthread_mutex_unlock(&r->lock);
  if (r->started) return 0;
  join(r);
  return err_set(MF_ENOMEM, "no thread for stream %s",
                 r->plan->streams.at[r->workers[n].stream].name);
}

void worker_stop_all(Runtime *r) {
  if (!r->started) return;
  for (int k = 0; k < r->n_workers; k++) {
    Worker *w = &r->workers[k];
    pthread_mutex_lock(&w->lock);
    w->stop = true;
    call_awake(w);
    pthread_mutex_unlock(&w->lock);
  }
  pthread_mutex_lock(&r->lock);
  r->stopping = true; /* whoever waits for a reset, since a source failed, waits no longer */
  pthread_cond_broadcast(&r->changed);
  pthread_mutex_unlock(&r->lock);
  join(r);
  r->code = 0;
  atomic_store(&r->failed, FAILED_NOT);
}

/* -- The waiting thread ------------------------------------------------------------------------ */

typedef struct Waiting {
  unsigned long long beats;
  bool told;
} Waiting;

static unsigned long long all_beats(const Runtime *r) {
  unsigned long long sum = 0;
  for (int k = 0; k < r->n_workers; k++)
    sum += atomic_load_explicit(&r->workers[k].beats, memory_order_relaxed);
  return sum;
}

static bool sleeps(Worker *w) {
  pthread_mutex_lock(&w->lock);
  bool yes = w->asleep && !atomic_load_explicit(&w->mail, memory_order_relaxed);
  pthread_mutex_unlock(&w->lock);
  return yes;
}

/* Which call of the host is at work; NULL: none. */
static const char *call_at_work(const Runtime *r) {
  for (int k = 0; k < r->n_workers; k++) {
    int task = atomic_load_explicit(&r->workers[k].busy, memory_order_relaxed);
    int call = task < 0 ? PLAN_NO_CALL : r->plan->tasks.at[task].call;
    if (call != PLAN_NO_CALL) return r->plan->calls.at[call];
  }
  return NULL;
}

/* Nothing was heard for a while. Kernels may take their time, calls too unless somebody wants to be
 * told; but when all sleep and a round is not done, it never will be. */
static void look(Runtime *r, Waiting *watch) {
  unsigned long long beats = all_beats(r);
  bool moved = beats != watch->beats, still = true;
  watch->beats = beats;
  watch->told &= !moved;
  for (int k = 0; k < r->n_workers && still; k++) still = sleeps(&r->workers[k]);
  if (moved || all_beats(r) != beats || failed(r)) return;
  const char *call = call_at_work(r);
  if (still) {
    fail(r, say_stuck(r), 0);
  } else if (call && r->options.slow && !watch->told) {
    char text[256];
    snprintf(text, sizeof text, "plan %s: everything waits for %s", r->plan->name, call);
    r->options.slow(r->options.ud, text);
    watch->told = true;
  }
}

/* Under r->lock: waits for a change, at most `ms`; whether there was one. */
static bool wait_changed(Runtime *r, int64_t ms) {
  if (ms < 0) return !pthread_cond_wait(&r->changed, &r->lock);
  struct timespec until;
  clock_gettime(CLOCK_REALTIME, &until);
  until.tv_sec += ms / 1000;
  until.tv_nsec += ms % 1000 * 1000000L;
  if (until.tv_nsec >= 1000000000L) until.tv_sec++, until.tv_nsec -= 1000000000L;
  return pthread_cond_timedwait(&r->changed, &r->lock, &until) != ETIMEDOUT;
}

void worker_post(Runtime *r) {
  pthread_mutex_lock(&r->lock);
  r->running += r->n_workers;
  pthread_mutex_unlock(&r->lock);
  for (int k = 0; k < r->n_workers; k++) {
    Worker *w = &r->workers[k];
    pthread_mutex_lock(&w->lock);
    w->rounds_wanted++;
    call_awake(w);
    pthread_mutex_unlock(&w->lock);
  }
}

/* Waits a while, then looks. Where rounds are queued the launches leave interrupts to this thread,
 * which looks more often. */
static void wait_and_look(Runtime *r, Waiting *watch, int64_t *still) {
  enum { OFTEN_MS = 50 };
  atomic_bool *interrupted = &r->device->context->interrupted;
  int64_t most = r->options.watch_ms ? r->options.watch_ms : 10000;
  int64_t ms = r->rounds && (most < 0 || most > OFTEN_MS) ? OFTEN_MS : most;
  bool changed = wait_changed(r, ms);
  *still = changed ? 0 : *still + ms;
  pthread_mutex_unlock(&r->lock);
  if (r->rounds && atomic_load(interrupted) && atomic_exchange(interrupted, false))
    fail(r, err_set(MF_EINTR, "interrupted"), 0);
  if (!changed && most > 0 && *still >= most) {
    *still = 0;
    look(r, watch);
  }
  pthread_mutex_lock(&r->lock);
}

int worker_wait(Runtime *r, bool (*until)(void *ud), void *ud) {
  Waiting watch = {.beats = all_beats(r)};
  int64_t still = 0;
  pthread_mutex_lock(&r->lock);
  while (!r->code && (until ? !until(ud) : r->running > 0)) wait_and_look(r, &watch, &still);
  int rc = r->ended ? RUNTIME_END : 0;
  if (r->code) {
    wait_parked(r, r->n_workers);
    rc = err_set(r->code, "%s", r->text);
    if (!r->rounds) let_go(r);
  }
  pthread_mutex_unlock(&r->lock);
  return rc;
}

void runtime_signal(Runtime *r) {
  pthread_mutex_lock(&r->lock);
  pthread_cond_broadcast(&r->changed);
  pthread_mutex_unlock(&r->lock);
}

bool runtime_has_failed(Runtime *r) {
  return failed(r) != FAILED_NOT;
}
