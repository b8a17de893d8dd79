#include <string.h>

#include "comm.h"
#include "global.h"
#include "job_int.h"
#include "mem.h"
#include "op_ids.h"
#include "pass.h"
#include "tape.h"
#include "trace.h"

Job *job_begin(Eager *E, const char *name, int times) {
  Job *j = mem_zalloc(sizeof *j);
  if (j) j->trace = trace_begin(E, name, times);
  if (!j || !j->trace) {
    if (!j) err_set(MF_ENOMEM, "out of memory");
    mem_free(j);
    return NULL;
  }
  j->E = E;
  j->graph = j->trace->graph;
  return j;
}

Tensor *job_input(Job *j, const Tensor *like, bool repeated) {
  int k = j->n_inputs++, times = j->trace->tracer.times;
  if (k >= 64) {
    err_set(MF_EUNSUPPORTED, "compile: more than 64 tensors as arguments");
    return NULL;
  }
  if (times == 1 || repeated || !like->m.ndim) {
    j->repeated |= UINT64_C(1) << k;
    return trace_input(j->trace, like, false);
  }
  if (like->m.shape[0] % times == 0) return trace_input(j->trace, like, true);
  err_set(MF_EINVAL, "compile: tensor %d cannot be shared out to %d micro-batches", k + 1, times);
  return NULL;
}

int job_segment(Job *j, int segment) {
  return trace_segment(j->trace, segment);
}

int job_keep(Job *j, Tensor *x) {
  return trace_keep(j->trace, x);
}

void job_abandon(Job *j) {
  trace_end(j->trace, -1, NULL);
}

static int make_lists(Job *j) {
  const Plan *p = j->plan;
  j->captures = mem_zalloc(sizeof *j->captures * (p->captures.n + 1));
  j->cells = mem_zalloc(sizeof *j->cells * (size_t)(p->n_cells + 1));
  j->owners = mem_zalloc(sizeof *j->owners * (size_t)(p->n_result_registers + 1));
  j->results = mem_zalloc(sizeof *j->results * (p->results.n + 1));
  bool all = j->captures && j->cells && j->owners && j->results;
  return all ? 0 : err_set(MF_ENOMEM, "out of memory");
}

static int add_capture(Job *j, int k, Tensor *first, Storage *storage) {
  storage_retain(storage);
  j->captures[k] = (Capture){tensor_retain(first), storage, j->plan->captures.at[k].written};
  return map_put(&j->captured, storage, k) ? 0 : err_set(MF_ENOMEM, "out of memory");
}

static int take_leaves(Job *j) {
  Trace *t = j->trace;
  j->leaves = mem_zalloc(sizeof *j->leaves * (t->leaves.n + 1));
  j->written = mem_alloc(sizeof *j->written * (t->written.n + 1));
  if (!j->leaves || !j->written) return err_set(MF_ENOMEM, "out of memory");
  for (size_t i = 0; i < t->written.n; i++) j->written[j->n_written++] = t->written.at[i];
  for (size_t i = 0; i < t->leaves.n; i++) {
    const TraceLeaf *l = &t->leaves.at[i];
    Tensor *grad = l->reads_grad ? tensor_retain(l->grad) : NULL;
    j->leaves[j->n_leaves++] =
        (Leaf){tensor_retain(l->tensor), grad, l->used, l->requires_grad, l->reads_grad};
  }
  return 0;
}

/* The tensor of capture node n gets memory that lies as the passes want it. */
static int lay_anew(Job *j, TraceStorage *s, const GraphLayout *to) {
  Eager *E = j->E;
  Tensor *t = s->first;
  const Layout *l = global_layout(E, t->layout->place, &to->sbp);
  bool enabled = E->grad_enabled;
  E->grad_enabled = false;
  Tensor *x = l ? global_convert(E, t, l, NULL) : NULL;
  E->grad_enabled = enabled;
  if (!x) return MF_EINVAL;
  tensor_take(t, x);
  storage_retain(t->storage);
  storage_release(s->storage);
  s->storage = t->storage;
  tensor_release(x);
  return 0;
}

static int lay_all_anew(Job *j) {
  Trace *t = j->trace;
  int rc = 0;
  for (size_t i = 0; i < t->storages.n && !rc; i++) {
    TraceStorage *s = t->storages.at[i];
    if (s->capture && s->capture->anew) rc = lay_anew(j, s, s->capture->anew);
  }
  return rc;
}

static int take_captures(Job *j) {
  Trace *t = j->trace;
  int n = (int)j->plan->captures.n, k = 0, rc = make_lists(j);
  if (!rc) rc = lay_all_anew(j);
  for (size_t i = 0; i < t->cells.n && !rc; i++) j->cells[i] = t->cells.at[i];
  for (size_t i = 0; i < t->storages.n && !rc; i++) { /* in the order of their nodes */
    const TraceStorage *s = t->storages.at[i];
    if (s->capture) rc = add_capture(j, k++, s->first, s->storage);
  }
  MF_ASSERT(rc || k == n, "%d captures, the plan has %d", k, n);
  return rc;
}

/* How results lie on the ranks, and what they are parts of. */
static int take_results(Job *j) {
  const Trace *t = j->trace;
  size_t n = j->graph->results.n;
  if (!j->graph->wholes.n) return 0;
  j->layouts = mem_zalloc(sizeof *j->layouts * (n + 1));
  if (!j->layouts) return err_set(MF_ENOMEM, "out of memory");
  for (size_t i = 0; i < n && i < t->result_layouts.n; i++) j->layouts[i] = t->result_layouts.at[i];
  return 0;
}

Runtime *job_make_runtime(Job *j, const Plan *p) {
  Eager *E = j->E;
  RuntimeOptions o = {.isa = E->isa, .comm = E->context->comm};
  int device = p->streams.at[0].device;
  Stream *stream = eager_stream(E, device);
  return stream ? runtime_create(p, E->context->devices[device], stream, &o) : NULL;
}

/* The slot of the device that all ops work on; those that have no tensors may be anywhere. */
static int find_device(const Eager *E, const Graph *g, int *device) {
  *device = -1;
  for (const GraphNode *n = g->first; n; n = n->next) {
    if (n->kind == GRAPH_NUMBER) continue;
    for (int k = 0; k < n->n_out; k++) {
      int d = n->out[k].device;
      if (n->out[k].number || d == DEVICE_META) continue;
      if (n->kind != GRAPH_OP && d == DEVICE_CPU && !n->out[k].ndim) continue;
      if (*device < 0) *device = d;
      if (*device == d) continue;
      return err_set(MF_EUNSUPPORTED,
                     "compile: %s%sis on %s, what came before on %s; a compiled step works on one "
                     "device, and gets what it needs there as arguments",
                     n->kind == GRAPH_OP ? n->op->name : "a tensor that it uses",
                     n->kind == GRAPH_OP ? "'s result " : " ", E->context->devices[d]->name,
                     E->context->devices[*device]->name);
    }
  }
  if (*device < 0) *device = DEVICE_CPU;
  return 0;
}

int job_finish(Job *j, int n, Tensor *const *results, PassSettings *s, const PlanOptions *o) {
  Eager *E = j->E;
  PlanOptions options = *o;
  int rc = trace_end(j->trace, n, results);
  if (!rc) rc = find_device(E, j->graph, &options.device);
  if (rc) return rc;
  uint64_t draws = E->generator.next - j->trace->stream;
  E->generator.next = j->trace->stream; /* the first run draws what the trace would have drawn */
  s->stream = E->streams[DEVICE_CPU];
  s->isa = E->isa;
  s->measure = plan_measure;
  s->measure_ud = &options;
  s->times = j->trace->tracer.times;
  s->repeated = j->repeated;
  s->rank = E->context->comm ? comm_rank(E->context->comm) : 0;
  s->agree = job_agree, s->agree_ud = E->context->comm;
  rc = pass_run_all(j->graph, s);
  if (rc) return rc;
  s->measure_ud = (void *)(uintptr_t)o;
  j->plan = plan_create(j->graph, &options);
  if (!j->plan) return MF_EINVAL;
  j->plan->n_draws = (int64_t)draws;
  j->options = options;
  rc = take_captures(j);
  if (!rc) rc = take_leaves(j);
  if (!rc) rc = take_results(j);
  trace_destroy(j->trace);
  j->trace = NULL;
  return rc;
}

/* -- From text --------------------------------------------------------------------------------- */

static int fit_capture(Job *j, int k, Tensor *t) {
  const PlanPort *port = &j->plan->captures.at[k];
  const PlanTensor *want = &j->plan->tensors.at[port->tensor];
  int rc = tensor_check_data(t, port->name);
  if (rc) return rc;
  if (t->m.dtype != want->meta.dtype || t->m.device != want->meta.device || t->m.offset ||
      t->storage->bytes < (size_t)j->plan->registers.at[want->reg].bytes)
    return err_set(MF_EINVAL, "plan: captured tensor %s is not like the one that was compiled",
                   port->name);
  return add_capture(j, k, t, t->storage);
}

static int fill_from_text(Job *j, int n_captures, Tensor *const *captures, int n_cells,
                          const double *cells) {
  int rc = make_lists(j);
  if (!rc && ((size_t)n_captures != j->plan->captures.n || n_cells != j->plan->n_cells))
    rc = err_set(MF_EINVAL, "plan: has %d captured tensors and %d cells, got %d and %d",
                 (int)j->plan->captures.n, j->plan->n_cells, n_captures, n_cells);
  for (int k = 0; k < n_captures && !rc; k++) rc = fit_capture(j, k, captures[k]);
  if (!rc && !(j->own_cells = mem_zalloc(sizeof *cells * (size_t)(n_cells + 1))))
    rc = err_set(MF_ENOMEM, "out of memory");
  for (int k = 0; k < n_cells && !rc; k++) {
    j->own_cells[k] = cells[k];
    j->cells[k] = &j->own_cells[k];
  }
  return rc;
}

Job *job_from_plan(Eager *E, const char *text, int n_captures, Tensor *const *captures, int n_cells,
                   const double *cells) {
  Job *j = mem_zalloc(sizeof *j);
  if (!j) {
    err_set(MF_ENOMEM, "out of memory");
    return NULL;
  }
  j->E = E;
  j->plan = plan_parse(text);
  if (j->plan && !fill_from_text(j, n_captures, captures, n_cells, cells)) return j;
  job_destroy(j);
  return NULL;
}

/* -- Runs -------------------------------------------------------------------------------------- */

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

int job_bind_captures(Job *j, Runtime *r) {
  for (size_t k = 0; k < j->plan->captures.n; k++) {
    Capture *c = &j->captures[k];
    if (storage_is_freed(c->storage))
      return err_set(MF_EFREED, "a tensor that the compiled step uses was freed");
    if (c->tensor->storage != c->storage)
      return err_set(MF_EINVAL,
                     "a tensor that the compiled step uses got other memory by .data since it was "
                     "compiled; copy into it, or compile anew");
    runtime_bind(r, PLAN_CAPTURE, (int)k, c->storage->data);
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
  const Storage *s = in[k]->storage;
  int64_t capture = map_get(&j->captured, s);
  bool written = is_written_input(j, k);
  bool shared = capture >= 0 && (written || j->captures[capture].written);
  for (int i = 0; i < n_in && written; i++) shared |= i != k && s == in[i]->storage;
  if (!shared) return 0;
  return err_set(MF_EINVAL,
                 "argument %d shares memory with another tensor that the compiled step uses, and "
                 "the step writes it; pass a clone",
                 k + 1);
}

/* Of a step that was traced, the caller has compared the arguments' forms. */
static int fit_input(const Job *j, int k, const Tensor *t) {
  const Meta *want = &j->plan->tensors.at[j->plan->inputs.at[k].tensor].meta, *is = &t->m;
  if (j->graph || (is->dtype == want->dtype && is->device == want->device &&
                   shape_equal(is->ndim, is->shape, want->ndim, want->shape) &&
                   shape_equal(is->ndim, is->stride, want->ndim, want->stride)))
    return 0;
  return err_set(MF_EINVAL, "plan: argument %s is not like the one that was compiled",
                 j->plan->inputs.at[k].name);
}

static int bind_inputs(Job *j, int n_in, Tensor *const *in) {
  if ((size_t)n_in != j->plan->inputs.n)
    return err_set(MF_EINVAL, "the compiled step takes %d tensors, got %d", (int)j->plan->inputs.n,
                   n_in);
  for (int k = 0; k < n_in; k++) {
    int rc = tensor_check_data(in[k]->part ? in[k]->part : in[k], "argument");
    if (!rc) rc = check_shared(j, n_in, in, k);
    if (!rc) rc = fit_input(j, k, in[k]);
    if (rc) return rc;
    runtime_bind(j->runtime, PLAN_INPUT, k, tensor_data(in[k]->part ? in[k]->part : in[k]));
  }
  return 0;
}

/* Tensors for the results; those in one register share a storage. */
static int make_results(Job *j, Tensor **out) {
  const Plan *p = j->plan;
  memset(j->owners, 0, sizeof *j->owners * (size_t)p->n_result_registers);
  for (size_t k = 0; k < p->results.n; k++) {
    const PlanTensor *t = &p->tensors.at[p->results.at[k]];
    const PlanRegister *r = &p->registers.at[t->reg];
    Tensor **owner = &j->owners[r->port];
    if (*owner) {
      out[k] = tensor_adopt(j->E, (*owner)->storage, &t->meta);
    } else {
      int64_t n = r->bytes / (int64_t)dtype_size((DType)t->meta.dtype);
      out[k] = *owner = tensor_create(j->E, (DType)t->meta.dtype, 1, &n, t->meta.device);
      if (!*owner) return MF_ENOMEM;
      out[k]->m = t->meta;
      runtime_bind(j->runtime, PLAN_RESULT, r->port, out[k]->storage->data);
    }
    if (!out[k]) return MF_ENOMEM;
  }
  return 0;
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
  int rc = eager_settle(j->E, NULL);
  if (!rc && !j->runtime && !(j->runtime = job_make_runtime(j, j->plan))) rc = MF_ENOMEM;
  if (rc) return rc;
  rc = job_bind_captures(j, j->runtime);
  if (!rc) rc = bind_inputs(j, n_in, in);
  if (!rc) rc = make_results(j, out);
  for (int k = 0; k < j->plan->n_cells; k++) runtime_set_cell(j->runtime, k, *j->cells[k]);
  Generator *g = &j->E->generator;
  if (!rc) rc = runtime_run(j->runtime, g->seed, g->next);
  g->next += (uint64_t)j->plan->n_draws;
  for (size_t k = 0; k < j->plan->captures.n; k++)
    if (j->captures[k].written) storage_touch(j->captures[k].storage);
  return rc;
}

/* Of what lies on several ranks, this one's part becomes the whole's. */
static int wrap_results(Job *j, Tensor **out) {
  for (size_t k = 0; k < j->plan->results.n; k++) {
    if (!j->layouts || !j->layouts[k] || !out[k]) continue;
    out[k] = global_wrap(j->E, &j->graph->wholes.at[k], out[k], j->layouts[k]);
    if (!out[k]) return MF_ENOMEM;
  }
  return 0;
}

int job_run(Job *j, int n_in, Tensor *const *in, Tensor **out) {
  size_t n = j->plan->results.n, own = n - (size_t)j->n_written;
  Tensor **all = j->results;
  memset(all, 0, sizeof *all * n);
  int rc = run(j, n_in, in, all);
  if (!rc) rc = wrap_results(j, all);
  rc = write_inputs(j, in, all + own, rc);
  if (rc) release_all(own, all);
  memcpy(out, all, sizeof *all * own);
  return rc;
}

void job_print(Job *j, Str *out) {
  if (j->graph) graph_print(j->graph, out);
}

void job_dot(Job *j, Str *out) {
  if (j->graph) graph_dot(j->graph, out);
}

void job_print_plan(Job *j, Str *out) {
  plan_print(j->plan, out);
}

void job_print_memory(Job *j, Str *out) {
  plan_report(j->plan, out);
}

Tensor *job_capture(const Job *j, int k, const char **name, bool *written) {
  if ((size_t)k >= j->plan->captures.n) return NULL;
  *name = j->plan->captures.at[k].name;
  *written = j->captures[k].written;
  return j->captures[k].tensor;
}

bool job_cell(const Job *j, int k, double *value) {
  if (k >= j->plan->n_cells) return false;
  *value = *j->cells[k];
  return true;
}

void job_destroy(Job *j) {
  if (!j) return;
  job_close_flow(j);
  if (j->trace && j->E->tracer == &j->trace->tracer) job_abandon(j);
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
  mem_free(j->own_cells);
  mem_free(j->owners);
  mem_free(j->results);
  mem_free(j->layouts);
  map_free(&j->captured);
  runtime_destroy(j->runtime);
  plan_destroy(j->plan);
  trace_destroy(j->trace);
  graph_destroy(j->graph);
  mem_free(j);
}
