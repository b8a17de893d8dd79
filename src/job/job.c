#include "job.h"

#include <string.h>

#include "mem.h"
#include "op_ids.h"
#include "pass.h"
#include "runtime.h"
#include "tape.h"
#include "trace.h"

typedef struct Capture {
  Tensor *tensor; /* that led to it; counted */
  Storage *storage;
  bool written;
} Capture;

/* A leaf as it must be. */
typedef struct Leaf {
  Tensor *tensor, *grad; /* counted */
  bool used, requires_grad, reads_grad;
} Leaf;

struct Job {
  Eager *E;
  Trace *trace; /* until it is compiled */
  Graph *graph;
  Plan *plan;
  Runtime *runtime;
  Capture *captures;
  Leaf *leaves;
  size_t n_leaves;
  const double **cells;
  int *written; /* arguments that it writes; their contents are the last results */
  int n_written;
  uint64_t streams; /* how many stream numbers one run takes */
};

Job *job_begin(Eager *E, const char *name) {
  Job *j = mem_zalloc(sizeof *j);
  if (j) j->trace = trace_begin(E, name);
  if (!j || !j->trace) {
    if (!j) err_set(MF_ENOMEM, "out of memory");
    mem_free(j);
    return NULL;
  }
  j->E = E;
  j->graph = j->trace->graph;
  return j;
}

Tensor *job_input(Job *j, const Tensor *like) {
  return trace_input(j->trace, like);
}

void job_abandon(Job *j) {
  trace_end(j->trace, -1, NULL);
}

static int take_captures(Job *j) {
  Trace *t = j->trace;
  size_t n = j->plan->captures.n, k = 0;
  j->captures = mem_zalloc(sizeof *j->captures * (n + 1));
  j->cells = mem_zalloc(sizeof *j->cells * (t->cells.n + 1));
  if (!j->captures || !j->cells) return err_set(MF_ENOMEM, "out of memory");
  for (size_t i = 0; i < t->cells.n; i++) j->cells[i] = t->cells.at[i];
  j->leaves = mem_zalloc(sizeof *j->leaves * (t->leaves.n + 1));
  j->written = mem_alloc(sizeof *j->written * (t->written.n + 1));
  for (size_t i = 0; j->written && i < t->written.n; i++)
    j->written[j->n_written++] = t->written.at[i];
  if (!j->leaves || !j->written) return err_set(MF_ENOMEM, "out of memory");
  for (size_t i = 0; i < t->leaves.n; i++) {
    const TraceLeaf *l = &t->leaves.at[i];
    Tensor *grad = l->reads_grad ? tensor_retain(l->grad) : NULL;
    j->leaves[j->n_leaves++] =
        (Leaf){tensor_retain(l->tensor), grad, l->used, l->requires_grad, l->reads_grad};
  }
  for (size_t i = 0; i < t->storages.n; i++) { /* in the order of their nodes */
    const TraceStorage *s = t->storages.at[i];
    if (!s->capture) continue;
    storage_retain(s->storage);
    j->captures[k++] = (Capture){tensor_retain(s->first), s->storage, s->writes > 0};
  }
  MF_ASSERT(k == n, "%zu captures, the plan has %zu", k, n);
  return 0;
}

int job_finish(Job *j, int n, Tensor *const *results, PassSettings *s) {
  Eager *E = j->E;
  int rc = trace_end(j->trace, n, results);
  if (rc) return rc;
  j->streams = E->generator.next - j->trace->stream;
  E->generator.next = j->trace->stream; /* the first run draws what the trace would have drawn */
  s->stream = E->streams[DEVICE_CPU];
  s->isa = E->isa;
  rc = pass_run_all(j->graph, s);
  if (rc) return rc;
  j->plan = plan_create(j->graph, &(PlanOptions){0});
  if (!j->plan) return MF_EINVAL;
  j->runtime =
      runtime_create(j->plan, E->context->devices[DEVICE_CPU], E->streams[DEVICE_CPU], E->isa);
  rc = j->runtime ? take_captures(j) : MF_ENOMEM;
  trace_destroy(j->trace);
  j->trace = NULL;
  return rc;
}

int job_n_results(const Job *j) {
  return (int)j->plan->results.n - j->n_written;
}

bool job_fits(const Job *j) {
  for (size_t i = 0; i < j->n_leaves; i++) {
    const Leaf *l = &j->leaves[i];
    const Autograd *ag = l->tensor->ag;
    if (l->used && tensor_requires_grad(l->tensor) != l->requires_grad) return false;
    if (l->reads_grad && (ag ? ag->grad : NULL) != l->grad) return false;
  }
  return true;
}

static int bind_captures(Job *j) {
  for (size_t k = 0; k < j->plan->captures.n; k++) {
    Capture *c = &j->captures[k];
    if (storage_is_freed(c->storage))
      return err_set(MF_EFREED, "a tensor that the compiled step uses was freed");
    if (c->tensor->storage != c->storage)
      return err_set(MF_EINVAL,
                     "a tensor that the compiled step uses got other memory by .data since it was "
                     "compiled; copy into it, or compile anew");
    runtime_bind(j->runtime, PLAN_CAPTURE, (int)k, c->storage->data);
  }
  return 0;
}

static bool is_written_input(const Job *j, int k) {
  for (int i = 0; i < j->n_written; i++)
    if (j->written[i] == k) return true;
  return false;
}

/* The step knows nothing of one memory under two names: harmless as long as none is written. */
static int check_shared(const Job *j, int n_in, Tensor *const *in, int k) {
  bool written = is_written_input(j, k), shared = false;
  const Storage *s = in[k]->storage;
  for (size_t i = 0; i < j->plan->captures.n; i++)
    shared |= s == j->captures[i].storage && (written || j->captures[i].written);
  for (int i = 0; i < n_in && written; i++) shared |= i != k && s == in[i]->storage;
  if (!shared) return 0;
  return err_set(MF_EINVAL,
                 "argument %d shares memory with another tensor that the compiled step uses, and "
                 "the step writes it; pass a clone",
                 k + 1);
}

static int bind_inputs(Job *j, int n_in, Tensor *const *in) {
  if ((size_t)n_in != j->plan->inputs.n)
    return err_set(MF_EINVAL, "the compiled step takes %d tensors, got %d", (int)j->plan->inputs.n,
                   n_in);
  for (int k = 0; k < n_in; k++) {
    int rc = tensor_check_data(in[k], "argument");
    if (!rc) rc = check_shared(j, n_in, in, k);
    if (rc) return rc;
    runtime_bind(j->runtime, PLAN_INPUT, k, tensor_data(in[k]));
  }
  return 0;
}

/* Tensors for the results; those in one register share a storage. */
static int make_results(Job *j, Tensor **out) {
  const Plan *p = j->plan;
  Tensor **owner = mem_zalloc(sizeof *owner * (size_t)(p->n_result_registers + 1));
  if (!owner) return err_set(MF_ENOMEM, "out of memory");
  int rc = 0;
  for (size_t k = 0; k < p->results.n && !rc; k++) {
    const PlanTensor *t = &p->tensors.at[p->results.at[k]];
    const PlanRegister *r = &p->registers.at[t->reg];
    if (owner[r->port]) {
      out[k] = tensor_adopt(j->E, owner[r->port]->storage, &t->meta);
    } else {
      int64_t size = (int64_t)dtype_size((DType)t->meta.dtype), n = r->bytes / size;
      out[k] = tensor_create(j->E, (DType)t->meta.dtype, 1, &n, DEVICE_CPU);
      owner[r->port] = out[k];
      if (out[k]) {
        out[k]->m = t->meta;
        runtime_bind(j->runtime, PLAN_RESULT, r->port, out[k]->storage->data);
      }
    }
    if (!out[k]) rc = MF_ENOMEM;
  }
  mem_free(owner);
  return rc;
}

static void release_all(size_t n, Tensor **out) {
  for (size_t k = 0; k < n; k++) {
    tensor_release(out[k]);
    out[k] = NULL;
  }
}

/* What the step left in arguments goes there; takes the counts of `out`. */
static int write_inputs(Job *j, Tensor *const *in, Tensor **out, int rc) {
  bool enabled = j->E->grad_enabled;
  j->E->grad_enabled = false;
  for (int i = 0; i < j->n_written; i++) {
    Tensor *pair[2] = {in[j->written[i]], out[i]};
    if (!rc) rc = eager_op_into(j->E, OP_copy_, 2, pair, NULL);
    tensor_release(out[i]);
  }
  j->E->grad_enabled = enabled;
  return rc;
}

static int run(Job *j, int n_in, Tensor *const *in, Tensor **out) {
  int rc = bind_captures(j);
  if (!rc) rc = bind_inputs(j, n_in, in);
  if (!rc) rc = make_results(j, out);
  for (int k = 0; k < j->plan->n_cells; k++) runtime_set_cell(j->runtime, k, *j->cells[k]);
  Generator *g = &j->E->generator;
  if (!rc) rc = runtime_run(j->runtime, g->seed, g->next);
  g->next += j->streams;
  for (size_t k = 0; k < j->plan->captures.n; k++)
    if (j->captures[k].written) storage_touch(j->captures[k].storage);
  return rc;
}

int job_run(Job *j, int n_in, Tensor *const *in, Tensor **out) {
  size_t n = j->plan->results.n, own = n - (size_t)j->n_written;
  Tensor **all = mem_zalloc(sizeof *all * (n + 1));
  if (!all) return err_set(MF_ENOMEM, "out of memory");
  int rc = write_inputs(j, in, all + own, run(j, n_in, in, all));
  if (rc) release_all(own, all);
  memcpy(out, all, sizeof *all * own);
  mem_free(all);
  return rc;
}

void job_print(Job *j, Str *out) {
  graph_print(j->graph, out);
}

void job_dot(Job *j, Str *out) {
  graph_dot(j->graph, out);
}

void job_print_plan(Job *j, Str *out) {
  plan_print(j->plan, out);
}

void job_destroy(Job *j) {
  if (!j) return;
  size_t n = j->captures ? j->plan->captures.n : 0;
  for (size_t k = 0; k < n; k++) {
    tensor_release(j->captures[k].tensor);
    if (j->captures[k].storage) storage_release(j->captures[k].storage);
  }
  for (size_t i = 0; i < j->n_leaves; i++) {
    tensor_release(j->leaves[i].tensor);
    tensor_release(j->leaves[i].grad);
  }
  mem_free(j->leaves);
  mem_free(j->captures);
  mem_free(j->written);
  mem_free(j->cells);
  runtime_destroy(j->runtime);
  plan_destroy(j->plan);
  trace_destroy(j->trace);
  graph_destroy(j->graph);
  mem_free(j);
}
