/* A step that runs over a source of batches, on threads of its own.
 *
 *   thread    data            copy              compute       results
 *             peek, take  ->  into the inputs -> the steps -> out of the results
 *
 * The plan says who waits for whom (plan/tasks.c); here are the calls of its tasks, and the calling
 * thread's side. That asks for one step after the other and does not wait for them, but everything
 * that a step may still touch is marked STORAGE_PENDING: whoever wants it settles first. So the
 * program sees what it would see if each step ran when it was asked for.
 *
 * Batches are counted in the order in which they were taken, steps in that in which they were asked
 * for: step k gets batch k.
 *  F1  posted <= taken <= copied + buffers, copied <= posted + buffers.
 *  F2  A batch is kept until it was copied and its step asked for; the others go back at the end.
 *  F3  Results of step k are PENDING until fetched > k was seen; captures until fetched == posted.
 * A source that fails ends the flow behind the steps that have their batch: its text waits in
 * `late`. A step that fails ends it at once; what it would have made is marked STORAGE_TRACED, so
 * that it cannot be read. */
#include <string.h>

#include "err.h"
#include "job_int.h"
#include "mem.h"

struct Flow {
  EagerPending pending; /* first: it is in the state's list */
  Job *job;
  Plan *plan;
  Runtime *runtime;
  JobSource source;
  int n_slots, n_in, n_fetched, n_results;
  void **batches;            /* n_slots places that take turns */
  const JobTensor **tensors; /* of these */
  int *input_of;             /* what the copy's output i is: an input, -1 */
  int *result_of;            /* what the input i of `results` is: its register's place in a round */
  int *register_of;          /* by result: the place of its register */
  Storage **results;         /* n_results for each of RUNTIME_AHEAD rounds; counted */
  uint64_t posted, kept,
      opened;  /* the calling thread's: F1; batches, results from here on are held */
  bool marked; /* captures are PENDING */
  int code;    /* of a step or the source, and its text, once that was seen */
  char *text;
  atomic_ullong taken, copied, fetched;
  atomic_bool ended, cancelled;
  int late; /* of the source; before `ended` */
  char *late_text;
};

/* -- The threads' side ------------------------------------------------------------------------- */

static bool is_stopped(void *ud) {
  Flow *f = ud;
  return atomic_load(&f->cancelled) || runtime_has_failed(f->runtime);
}

static bool same_form(const Meta *a, const Meta *b) {
  bool strides = shape_equal(a->ndim, a->stride, b->ndim, b->stride) ||
                 (meta_is_contiguous(a) && meta_is_contiguous(b));
  return a->dtype == b->dtype && a->device == b->device &&
         shape_equal(a->ndim, a->shape, b->ndim, b->shape) && strides;
}

static bool fits(const Flow *f, int n, const JobTensor *t) {
  bool fit = n == f->n_in;
  for (int k = 0; k < n && fit; k++)
    fit = same_form(&t[k].m, &f->plan->tensors.at[f->plan->inputs.at[k].tensor].meta);
  return fit;
}

static int data(void *ud, void *const *in, void *const *out) {
  (void)in, (void)out;
  Flow *f = ud;
  int n;
  const JobTensor *t;
  int rc = is_stopped(f) ? JOB_END : f->source.peek(f->source.ud, is_stopped, f, &n, &t);
  if (!rc && !fits(f, n, t)) rc = JOB_END;
  uint64_t count = atomic_load(&f->taken);
  if (!rc) {
    f->tensors[count % (uint64_t)f->n_slots] = t;
    f->batches[count % (uint64_t)f->n_slots] = f->source.take(f->source.ud);
    atomic_store(&f->taken, count + 1);
  } else {
    if (rc != JOB_END) f->late = rc, f->late_text = mem_strdup(err_text());
    atomic_store(&f->ended, true);
  }
  runtime_signal(f->runtime);
  return rc ? RUNTIME_END : 0;
}

static int copy(void *ud, void *const *in, void *const *out) {
  (void)in;
  Flow *f = ud;
  uint64_t count = atomic_load(&f->copied);
  const JobTensor *t = f->tensors[count % (uint64_t)f->n_slots];
  const Plan *p = f->plan;
  for (int i = 0; i < f->n_in; i++) {
    int k = f->input_of[i];
    const PlanRegister *r = &p->registers.at[p->tensors.at[p->inputs.at[k].tensor].reg];
    size_t size = dtype_size((DType)t[k].m.dtype);
    const char *from = (const char *)t[k].storage->data + (size_t)t[k].m.offset * size;
    if (r->bytes) memcpy(out[i], from, (size_t)r->bytes);
  }
  atomic_store(&f->copied, count + 1);
  return 0;
}

static Storage **results_of(const Flow *f, uint64_t round) {
  return f->results + round % RUNTIME_AHEAD * (uint64_t)f->n_results;
}

static int fetch(void *ud, void *const *in, void *const *out) {
  (void)out;
  Flow *f = ud;
  uint64_t round = atomic_load(&f->fetched);
  for (int i = 0; i < f->n_fetched; i++) {
    Storage *to = results_of(f, round)[f->result_of[i]];
    if (to && to->bytes) memcpy(to->data, in[i], to->bytes);
  }
  atomic_store(&f->fetched, round + 1);
  runtime_signal(f->runtime);
  return 0;
}

/* -- The calling thread's side ----------------------------------------------------------------- */

/* Drops the batches that are needed no more. */
static void drop_batches(Flow *f) {
  uint64_t until = atomic_load(&f->copied);
  if (until > f->posted) until = f->posted;
  for (; f->kept < until; f->kept++)
    f->source.drop(f->source.ud, f->batches[f->kept % (uint64_t)f->n_slots]);
}

static void open_results(Flow *f, uint64_t until, bool failed) {
  for (; f->opened < until; f->opened++)
    for (int k = 0; k < f->n_results; k++) {
      Storage **s = &results_of(f, f->opened)[k];
      if (!*s) continue;
      if (failed) storage_set_absent(*s, STORAGE_TRACED, true);
      storage_set_absent(*s, STORAGE_PENDING, false);
      storage_release(*s);
      *s = NULL;
    }
}

static void mark_captures(Flow *f, bool on) {
  Job *j = f->job;
  if (f->marked == on) return;
  f->marked = on;
  for (size_t k = 0; k < f->plan->captures.n; k++)
    storage_set_absent(j->captures[k].storage, STORAGE_PENDING, on);
}

/* What is there may be read; where all is, the captures too. */
static void open_all(Flow *f) {
  uint64_t fetched = atomic_load(&f->fetched);
  open_results(f, fetched, false);
  if (fetched == f->posted) mark_captures(f, false);
}

/* The flow has ended with the current error. */
static int fail(Flow *f, int code) {
  f->code = code;
  f->text = mem_strdup(err_text());
  open_all(f);
  open_results(f, f->posted, true);
  mark_captures(f, false);
  return code;
}

static int say_again(const Flow *f) {
  return err_set(f->code, "%s", f->text ? f->text : "out of memory");
}

typedef struct Until {
  Flow *f;
  uint64_t count;
} Until;

static bool is_fetched(void *ud) {
  const Until *u = ud;
  return atomic_load(&u->f->fetched) >= u->count;
}

static bool is_taken(void *ud) {
  const Until *u = ud;
  return atomic_load(&u->f->taken) >= u->count || atomic_load(&u->f->ended);
}

static int wait_for(Flow *f, bool (*until)(void *), uint64_t count) {
  Until u = {f, count};
  int rc = runtime_wait(f->runtime, until, &u);
  return rc > 0 ? fail(f, rc) : 0;
}

/* How many steps must be done before s may be touched. */
static uint64_t steps_before(const Flow *f, const Storage *s) {
  for (uint64_t round = f->opened; s && round < f->posted; round++)
    for (int k = 0; k < f->n_results; k++)
      if (results_of(f, round)[k] == s) return round + 1;
  return f->posted;
}

static int settle(EagerPending *p, Storage *s) {
  Flow *f = (Flow *)p;
  if (f->code) return 0;
  int rc = wait_for(f, is_fetched, steps_before(f, s));
  if (!rc) open_all(f);
  return rc;
}

/* Tensors for the results, which the step fills later; those in one register share a storage. */
static int make_results(Flow *f, Tensor **out) {
  Job *j = f->job;
  Storage **s = results_of(f, f->posted);
  int rc = 0, n = job_n_results(j);
  for (int k = 0; k < n && !rc; k++) {
    const PlanTensor *t = &f->plan->tensors.at[f->plan->results.at[k]];
    Storage **mine = &s[f->register_of[k]];
    if (*mine) {
      out[k] = tensor_adopt(j->E, *mine, &t->meta);
    } else {
      int64_t size =
          f->plan->registers.at[t->reg].bytes / (int64_t)dtype_size((DType)t->meta.dtype);
      out[k] = tensor_create(j->E, (DType)t->meta.dtype, 1, &size, DEVICE_CPU);
      if (out[k]) {
        out[k]->m = t->meta;
        storage_retain(*mine = out[k]->storage);
        storage_set_absent(*mine, STORAGE_PENDING, true);
      }
    }
    if (!out[k]) rc = MF_ENOMEM;
  }
  for (int k = 0; k < n && rc; k++) tensor_release(out[k]);
  for (int k = 0; k < f->n_results && rc; k++) {
    if (s[k]) storage_release(s[k]);
    s[k] = NULL;
  }
  return rc;
}

static int post(Flow *f, Tensor **out) {
  Job *j = f->job;
  Generator *g = &j->E->generator;
  memset(out, 0, sizeof(Tensor *) * (size_t)job_n_results(j));
  int rc = job_bind_captures(j, f->runtime);
  if (!rc) rc = make_results(f, out);
  if (rc) return rc;
  for (int k = 0; k < f->plan->n_cells; k++) runtime_set_cell(f->runtime, k, *j->cells[k]);
  mark_captures(f, true);
  for (size_t k = 0; k < f->plan->captures.n; k++)
    if (j->captures[k].written) storage_touch(j->captures[k].storage);
  f->posted++;
  rc = runtime_queue(f->runtime, g->seed, g->next);
  g->next += (uint64_t)j->plan->n_draws;
  return rc ? fail(f, rc) : 0;
}

int job_flow_next(Job *j, Tensor **out) {
  Flow *f = j->flow;
  if (!f) return err_set(MF_EINVAL, "the step runs over no loader");
  if (f->code) return say_again(f);
  drop_batches(f);
  open_results(f, atomic_load(&f->fetched), false);
  int rc = wait_for(f, is_taken, f->posted + 1);
  if (rc) return rc;
  uint64_t taken = atomic_load(&f->taken);
  MF_ASSERT(taken - f->kept <= (uint64_t)f->n_slots, "F1: %llu batches",
            (unsigned long long)(taken - f->kept));
  if (taken > f->posted) return post(f, out);
  rc = wait_for(f, is_fetched, f->posted); /* the last steps may fail too */
  if (rc) return rc;
  if (!f->late) return JOB_END;
  return fail(f, err_set(f->late, "%s", f->late_text ? f->late_text : "out of memory"));
}

void job_flow_counts(const Job *j, uint64_t counts[3]) {
  Flow *f = j->flow;
  counts[0] = counts[1] = counts[2] = 0;
  if (!f) return;
  counts[0] = atomic_load(&f->taken);
  counts[1] = atomic_load(&f->copied);
  counts[2] = atomic_load(&f->fetched);
}

/* -- Beginning and end ------------------------------------------------------------------------- */

/* Which inputs the copy fills, which results are fetched, in the order of their registers. */
static void list_ports(Flow *f) {
  const Plan *p = f->plan;
  for (size_t i = 0; i < p->tasks.n; i++) {
    const PlanTask *t = &p->tasks.at[i];
    for (int o = 0; o < t->n_out && t->call == PLAN_CALL_COPY; o++)
      for (size_t k = 0; k < p->inputs.n; k++)
        if (p->tensors.at[p->inputs.at[k].tensor].reg == t->out[o]) f->input_of[o] = (int)k;
    for (int o = 0; o < t->n_in && t->call == PLAN_CALL_RESULTS; o++) {
      bool known = false;
      for (size_t k = 0; k < p->results.n; k++) {
        if (p->tensors.at[p->results.at[k]].reg != t->in[o]) continue;
        f->register_of[k] = f->n_results;
        known = true;
      }
      if (known) f->result_of[f->n_fetched++] = f->n_results++;
    }
  }
}

static int make_lists(Flow *f, int buffers) {
  const Plan *p = f->plan;
  size_t n_in = p->inputs.n + 1, n_out = p->results.n + 1;
  f->n_in = (int)p->inputs.n;
  f->n_slots = 3 * buffers + 2; /* F1, F2 */
  f->batches = mem_zalloc(sizeof *f->batches * (size_t)f->n_slots);
  f->tensors = mem_zalloc(sizeof *f->tensors * (size_t)f->n_slots);
  f->input_of = mem_zalloc(sizeof *f->input_of * n_in);
  f->result_of = mem_zalloc(sizeof *f->result_of * n_out);
  f->register_of = mem_zalloc(sizeof *f->register_of * n_out);
  f->results = mem_zalloc(sizeof(Storage *) * n_out * RUNTIME_AHEAD);
  bool all =
      f->batches && f->tensors && f->input_of && f->result_of && f->register_of && f->results;
  if (!all) return err_set(MF_ENOMEM, "out of memory");
  list_ports(f);
  return 0;
}

static int make(Flow *f, int buffers) {
  Job *j = f->job;
  PlanOptions o = j->options;
  if (!j->graph) return err_set(MF_EUNSUPPORTED, "a step from a plan's text runs over no loader");
  o.buffers = buffers;
  f->plan = plan_create(j->graph, &o);
  if (!f->plan) return MF_EINVAL;
  int rc = make_lists(f, buffers);
  if (rc) return rc;
  runtime_destroy(j->runtime); /* its block is as large again */
  j->runtime = NULL;
  f->runtime = job_make_runtime(j, f->plan);
  if (!f->runtime) return MF_ENOMEM;
  runtime_bind_call(f->runtime, PLAN_CALL_DATA, data, f);
  runtime_bind_call(f->runtime, PLAN_CALL_COPY, copy, f);
  runtime_bind_call(f->runtime, PLAN_CALL_RESULTS, fetch, f);
  rc = job_bind_captures(j, f->runtime);
  return rc ? rc : runtime_start(f->runtime);
}

static void destroy(Flow *f) {
  f->source.release(f->source.ud);
  runtime_destroy(f->runtime);
  plan_destroy(f->plan);
  mem_free(f->batches);
  mem_free(f->tensors);
  mem_free(f->input_of);
  mem_free(f->result_of);
  mem_free(f->register_of);
  mem_free(f->results);
  mem_free(f->text);
  mem_free(f->late_text);
  mem_free(f);
}

int job_open_flow(Job *j, const JobSource *s, int buffers) {
  MF_ASSERT(buffers > 0 && buffers <= RUNTIME_MAX_BUFFERS, "a flow of %d buffers", buffers);
  int rc = j->flow      ? err_set(MF_EINVAL, "the step runs over a loader already")
           : j->layouts ? err_set(MF_EUNSUPPORTED,
                                  "over: a step on global tensors runs over no loader; "
                                  "call it for each batch")
                        : eager_settle(j->E, NULL);
  Flow *f = rc ? NULL : mem_zalloc(sizeof *f);
  if (!f) {
    s->release(s->ud);
    return rc ? rc : err_set(MF_ENOMEM, "out of memory");
  }
  f->job = j;
  f->source = *s;
  f->pending = (EagerPending){j->E->pending, settle};
  rc = make(f, buffers);
  if (rc) {
    destroy(f);
    return rc;
  }
  j->flow = f;
  j->E->pending = &f->pending;
  return 0;
}

static void forget(Eager *E, const EagerPending *p) {
  EagerPending **at = &E->pending;
  while (*at != p) at = &(*at)->next;
  *at = p->next;
}

int job_close_flow(Job *j) {
  Flow *f = j->flow;
  if (!f) return 0;
  bool told = f->code != 0;
  int rc = settle(&f->pending, NULL);
  atomic_store(&f->cancelled, true);
  f->source.wake(f->source.ud);
  runtime_stop(f->runtime);
  drop_batches(f);
  uint64_t taken = atomic_load(&f->taken), back = f->posted > f->kept ? f->posted : f->kept;
  for (; f->kept < back; f->kept++) /* a step failed before they were copied */
    f->source.drop(f->source.ud, f->batches[f->kept % (uint64_t)f->n_slots]);
  while (taken > back) f->source.put_back(f->source.ud, f->batches[--taken % (uint64_t)f->n_slots]);
  forget(j->E, &f->pending);
  j->flow = NULL;
  char *text = rc && !told ? mem_strdup(err_text()) : NULL;
  destroy(f);
  if (rc && !told) err_set(rc, "%s", text ? text : "out of memory");
  mem_free(text);
  return told ? 0 : rc;
}
