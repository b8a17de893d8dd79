/* Whether a plan holds together. What may be wrong is said of the first record where it is, the
 * checks of records alone coming before those of several together. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "plan_int.h"
#include "slots.h"

typedef struct Verifying {
  const Plan *plan;
  Arena arena; /* for the while */
} Verifying;

static void wrong(Verifying *w, const char *format, ...) __attribute__((noreturn));
static void wrong(Verifying *w, const char *format, ...) {
  char text[1024];
  va_list args;
  va_start(args, format);
  vsnprintf(text, sizeof text, format, args);
  va_end(args);
  arena_throw(&w->arena, err_set(MF_EINVAL, "plan %s: %s", w->plan->name, text));
}

/* -- Records alone ----------------------------------------------------------------------------- */

static size_t count_ports(const Plan *p, int home) {
  switch ((PlanHome)home) {
    case PLAN_INPUT: return p->inputs.n;
    case PLAN_CAPTURE: return p->captures.n;
    case PLAN_RESULT: return (size_t)p->n_result_registers;
    case PLAN_NUMBER: return p->numbers.n;
    default: return 0;
  }
}

/* Each port has one register; of inputs check_ports sees whether they have any. */
static void count_registers(Verifying *w) {
  const Plan *p = w->plan;
  for (int home = PLAN_INPUT; home <= PLAN_NUMBER; home++) {
    size_t n = 0, ports = count_ports(p, home);
    bool *seen = arena_array(&w->arena, bool, ports + 1);
    for (size_t i = 0; i < p->registers.n; i++) {
      if (p->registers.at[i].home != home) continue;
      if (seen[p->registers.at[i].port]) wrong(w, "r%zu is the second of a port", i);
      seen[p->registers.at[i].port] = true;
      n++;
    }
    if (n != ports && home != PLAN_INPUT)
      wrong(w, "of %zu ports only %zu have registers", ports, n);
  }
}

static void check_registers(Verifying *w) {
  const Plan *p = w->plan;
  for (size_t i = 0; i < p->registers.n; i++) {
    const PlanRegister *r = &p->registers.at[i];
    bool port = r->home != PLAN_BLOCK && r->home != PLAN_ORDER;
    if (port != (r->port >= 0) || (port && (size_t)r->port >= count_ports(p, r->home)))
      wrong(w, "r%zu is of port %d, of which there is none", i, r->port);
    if (r->bytes < 0 || r->n_buffers < 1 || (r->home == PLAN_ORDER && r->bytes))
      wrong(w, "r%zu has %lld bytes in %d buffers", i, (long long)r->bytes, r->n_buffers);
    if (r->home == PLAN_BLOCK &&
        (r->offset < 0 || r->offset % PLAN_ALIGN || r->bytes > p->block_bytes / r->n_buffers ||
         r->offset > p->block_bytes - plan_size(r)))
      wrong(w, "r%zu, %lld bytes at +%lld, does not lie in the block of %lld", i,
            (long long)r->bytes, (long long)r->offset, (long long)p->block_bytes);
    if (r->n_buffers > 1 && (r->home != PLAN_BLOCK && r->home != PLAN_ORDER))
      wrong(w, "r%zu is a port and has %d buffers", i, r->n_buffers);
  }
}

static void check_tensors(Verifying *w) {
  const Plan *p = w->plan;
  for (size_t i = 0; i < p->tensors.n; i++) {
    const PlanTensor *t = &p->tensors.at[i];
    const Meta *m = &t->meta;
    if (t->reg < 0 || (size_t)t->reg >= p->registers.n || m->dtype >= DTYPE_COUNT ||
        m->device >= DEVICE_SLOTS || m->ndim < 0 || m->ndim > MF_MAX_DIMS ||
        shape_check("plan", m->ndim, m->shape, (DType)m->dtype))
      wrong(w, "t%zu has a register, shape or dtype that cannot be", i);
    if (p->registers.at[t->reg].home == PLAN_ORDER)
      wrong(w, "t%zu lies in r%d, which has no memory", i, t->reg);
    if (!meta_numel(m)) continue;
    double low = (double)m->offset, high = (double)m->offset; /* do not wrap */
    for (int d = 0; d < m->ndim; d++) {
      double reach = (double)(m->shape[d] - 1) * (double)m->stride[d];
      *(reach < 0 ? &low : &high) += reach;
    }
    high += (double)t->stride * (double)(p->times - 1);
    double bytes = (high + 1) * (double)dtype_size((DType)m->dtype);
    if (low < 0 || bytes > (double)p->registers.at[t->reg].bytes)
      wrong(w, "t%zu reaches from element %.0f to %.0f of r%d, which has %lld bytes", i, low, high,
            t->reg, (long long)p->registers.at[t->reg].bytes);
  }
}

static void check_hand_over(Verifying *w, size_t i) {
  const Plan *p = w->plan;
  const PlanRegister *r = &p->registers.at[i];
  if (r->producer < -1 || r->producer >= (int)p->tasks.n || (r->producer < 0 && r->n_consumers))
    wrong(w, "r%zu is of task %d, which is not there", i, r->producer);
  for (int k = 0; k < r->n_consumers; k++) {
    int before = k ? r->consumers[k - 1] : r->producer;
    if (r->consumers[k] <= before || r->consumers[k] >= (int)p->tasks.n)
      wrong(w, "r%zu is handed to tasks that are not there or not in order", i);
  }
}

/* Whether a call gives (`in`) or takes what lies in the block there. */
static bool is_of_call(const Plan *p, const PlanRegister *r, bool in) {
  bool is = in && r->producer >= 0 && p->tasks.at[r->producer].call != PLAN_NO_CALL;
  for (int k = 0; k < r->n_consumers && !in; k++)
    is |= p->tasks.at[r->consumers[k]].call != PLAN_NO_CALL;
  return is && r->home == PLAN_BLOCK;
}

static void check_port(Verifying *w, const char *kind, int home, size_t port, int tensor) {
  const Plan *p = w->plan;
  if (tensor < 0 || (size_t)tensor >= p->tensors.n)
    wrong(w, "%s %zu is t%d, which there is not", kind, port, tensor);
  const PlanRegister *r = &p->registers.at[p->tensors.at[tensor].reg];
  if (home != PLAN_CAPTURE && is_of_call(p, r, home == PLAN_INPUT)) return;
  if (r->home != home || (home != PLAN_RESULT && (size_t)r->port != port))
    wrong(w, "%s %zu is t%d, which lies elsewhere", kind, port, tensor);
}

static void check_ports(Verifying *w) {
  const Plan *p = w->plan;
  for (size_t i = 0; i < p->inputs.n; i++)
    check_port(w, "input", PLAN_INPUT, i, p->inputs.at[i].tensor);
  for (size_t i = 0; i < p->captures.n; i++)
    check_port(w, "capture", PLAN_CAPTURE, i, p->captures.at[i].tensor);
  for (size_t i = 0; i < p->results.n; i++)
    check_port(w, "result", PLAN_RESULT, i, p->results.at[i]);
  for (size_t i = 0; i < p->numbers.n; i++) {
    const PlanNumber *n = &p->numbers.at[i];
    if (n->dtype >= DTYPE_COUNT || n->cell < PLAN_NO_CELL || n->cell >= p->n_cells)
      wrong(w, "n%zu is of cell %d; there are %d", i, n->cell, p->n_cells);
  }
}

/* -- Steps ------------------------------------------------------------------------------------- */

static const PlanTensor *tensor_of(Verifying *w, size_t step, int id, bool optional) {
  if (id == -1 && optional) return NULL;
  if (id < 0 || (size_t)id >= w->plan->tensors.n)
    wrong(w, "step %zu, %s: t%d is not there", step, w->plan->steps.at[step].op->name, id);
  return &w->plan->tensors.at[id];
}

/* Whether there are as many inputs as the op's params and the lengths of its lists say, and those
 * that are absent may be. */
static void check_inputs(Verifying *w, size_t step) {
  const PlanStep *s = &w->plan->steps.at[step];
  int64_t at = 0;
  for (int i = 0; i < s->op->n_params; i++) {
    const Param *param = &s->op->params[i];
    if (param->kind != PARAM_TENSOR) continue;
    int64_t n = 1;
    if (param->list) n = *(const int64_t *)(const void *)((const char *)s->args + param->offset);
    for (int64_t k = at; k < at + n && k < s->n_in; k++)
      tensor_of(w, step, s->in[k], param->optional);
    at += n;
  }
  if (at != s->n_in)
    wrong(w, "step %zu, %s: %d inputs, its arguments say %lld", step, s->op->name, s->n_in,
          (long long)at);
}

typedef struct Asking {
  Infer infer;
  Meta metas[MF_MAX_DIMS];
  Meta *more;
  Verifying *w;
  size_t step;
} Asking;

static Meta *add_meta(Infer *I) {
  Asking *a = (Asking *)I;
  const PlanStep *s = &a->w->plan->steps.at[a->step];
  if (I->n_out >= s->n_out)
    wrong(a->w, "step %zu, %s: %d outputs, it has more", a->step, s->op->name, s->n_out);
  return &a->more[I->n_out++];
}

/* The outputs must be what inference says. */
static void check_outputs(Verifying *w, size_t step) {
  const PlanStep *s = &w->plan->steps.at[step];
  _Alignas(16) char args[OP_MAX_ARGS];
  memcpy(args, s->args, s->op->args_size);
  for (int k = 0; k < s->n_patches; k++) /* the last is the one that may be too many */
    if (s->patches[k].cell == PLAN_MICRO)
      *(int64_t *)(void *)(args + s->op->params[s->patches[k].param].offset) = w->plan->times - 1;
  const Meta **in = arena_array(&w->arena, const Meta *, s->n_in);
  for (int k = 0; k < s->n_in; k++)
    in[k] = s->in[k] < 0 ? NULL : &w->plan->tensors.at[s->in[k]].meta;
  Asking a = {.infer = {.op = s->op, .args = args, .in = in, .n_in = s->n_in, .add = add_meta},
              .w = w,
              .step = step};
  a.more = s->n_out <= MF_MAX_DIMS ? a.metas : arena_array(&w->arena, Meta, s->n_out);
  if (s->op->spec[0]->flags & (OP_VIEW | OP_DATA))
    wrong(w, "step %zu, %s: has no kernel for plans", step, s->op->name);
  if (!plan_ranks_fit(w->plan, s))
    wrong(w, "step %zu, %s: is between ranks that there are not", step, s->op->name);
  int rc = s->op->spec[0]->infer(&a.infer);
  if (rc) wrong(w, "step %zu: %s", step, err_text());
  if (a.infer.n_out != s->n_out)
    wrong(w, "step %zu, %s: %d outputs, it has %d", step, s->op->name, s->n_out, a.infer.n_out);
  for (int k = 0; k < s->n_out; k++) {
    const Meta *is = &tensor_of(w, step, s->out[k], false)->meta, *want = &a.more[k];
    bool dtype = is->dtype == want->dtype || /* as eager does when it works in place */
                 (s->op->spec[0]->flags & OP_INPLACE && in[0] && is->dtype == in[0]->dtype);
    if (!dtype || !shape_equal(is->ndim, is->shape, want->ndim, want->shape))
      wrong(w, "step %zu, %s: output %d is not what the inputs make it", step, s->op->name, k);
  }
}

static void check_patches(Verifying *w, size_t step) {
  const PlanStep *s = &w->plan->steps.at[step];
  for (int k = 0; k < s->n_patches; k++) {
    int kind = s->patches[k].param < s->op->n_params && s->patches[k].param >= 0
                   ? s->op->params[s->patches[k].param].kind
                   : PARAM_TENSOR;
    int cell = s->patches[k].cell;
    bool known = cell == PLAN_MICRO ? kind == PARAM_INT : cell >= 0 && cell < w->plan->n_cells;
    if (!known ||
        (kind != PARAM_FLOAT && kind != PARAM_INT && kind != PARAM_BOOL && kind != PARAM_DIM))
      wrong(w, "step %zu, %s: cell %d cannot be an argument", step, s->op->name, cell);
  }
  const PlanTensor *drawn = s->along < 0 ? NULL
                            : s->n_out   ? tensor_of(w, step, s->out[0], false)
                            : s->n_in    ? tensor_of(w, step, s->in[0], true)
                                         : NULL;
  if (s->along >= 0 && (!drawn || s->along >= drawn->meta.ndim))
    wrong(w, "step %zu, %s: draws along dim %d, which there is not", step, s->op->name, s->along);
}

/* What is read was written by a step before, or is a port's; results are written. Steps that are
 * on several streams are in order by what their tasks hand over, which is checked there. */
static void check_order(Verifying *w) {
  const Plan *p = w->plan;
  bool *written = arena_array(&w->arena, bool, p->registers.n + 1);
  for (size_t i = 0; i < p->registers.n; i++) {
    int home = p->registers.at[i].home, maker = p->registers.at[i].producer;
    written[i] = home == PLAN_INPUT || home == PLAN_CAPTURE || home == PLAN_NUMBER ||
                 (maker >= 0 && p->tasks.at[maker].call != PLAN_NO_CALL);
  }
  for (size_t i = 0; i < p->steps.n; i++) {
    const PlanStep *s = &p->steps.at[i];
    for (int k = 0; k < s->n_in; k++) {
      int reg = s->in[k] < 0 ? -1 : p->tensors.at[s->in[k]].reg;
      if (reg >= 0 && !written[reg] && meta_numel(&p->tensors.at[s->in[k]].meta))
        wrong(w, "step %zu, %s: reads t%d in r%d, which nothing has written", i, s->op->name,
              s->in[k], reg);
    }
    for (int k = 0; k < s->n_out; k++) {
      const PlanRegister *r = &p->registers.at[p->tensors.at[s->out[k]].reg];
      if (r->home == PLAN_INPUT || r->home == PLAN_NUMBER ||
          (r->home == PLAN_CAPTURE && !p->captures.at[r->port].written))
        wrong(w, "step %zu, %s: writes t%d, which is not to be written", i, s->op->name, s->out[k]);
      written[p->tensors.at[s->out[k]].reg] = true;
    }
  }
  for (size_t i = 0; i < p->results.n; i++)
    if (!written[p->tensors.at[p->results.at[i]].reg] &&
        meta_numel(&p->tensors.at[p->results.at[i]].meta))
      wrong(w, "result %zu is never written", i);
}

/* -- Memory ------------------------------------------------------------------------------------ */

/* How many registers live at each step, as a tree of sums: `add` holds for all of a node's steps,
 * `most` is the most of any of them, without what holds above. */
typedef struct Tree {
  int leaves, *add, *most;
} Tree;

static void tree_add(Tree *t, int node, int low, int high, int first, int last, int value) {
  if (first > high || last < low) return;
  if (first <= low && high <= last) {
    t->add[node] += value;
    t->most[node] += value;
    return;
  }
  int mid = (low + high) / 2;
  tree_add(t, 2 * node, low, mid, first, last, value);
  tree_add(t, 2 * node + 1, mid + 1, high, first, last, value);
  int a = t->most[2 * node], b = t->most[2 * node + 1];
  t->most[node] = (a > b ? a : b) + t->add[node];
}

static int tree_most(const Tree *t, int node, int low, int high, int first, int last) {
  if (first > high || last < low) return 0;
  if (first <= low && high <= last) return t->most[node];
  int mid = (low + high) / 2, a = tree_most(t, 2 * node, low, mid, first, last),
      b = tree_most(t, 2 * node + 1, mid + 1, high, first, last);
  return (a > b ? a : b) + t->add[node];
}

typedef struct Edge {
  int64_t at;
  int reg;
  bool begin;
} Edge;

/* By offset; where one ends another may begin. */
static int by_offset(const void *a, const void *b) {
  const Edge *x = a, *y = b;
  if (x->at != y->at) return x->at < y->at ? -1 : 1;
  return x->begin - y->begin;
}

/* Going up through the block, no register may begin while another is there that lives at the same
 * time. Of streams, each is in the others' way all the time. */
static void check_stream(Verifying *w, int stream, const Edge *edges, size_t n) {
  const Plan *p = w->plan;
  Tree t = {.leaves = 1};
  while (t.leaves < (int)p->steps.n + 1) t.leaves *= 2;
  t.add = arena_array(&w->arena, int, 2 * t.leaves);
  t.most = arena_array(&w->arena, int, 2 * t.leaves);
  for (size_t i = 0; i < n; i++) {
    const PlanRegister *r = &p->registers.at[edges[i].reg];
    int first = 0, last = t.leaves - 1;
    if (r->stream == stream) plan_lifetime(p, r, &first, &last);
    if (edges[i].begin && r->stream == stream && tree_most(&t, 1, 0, t.leaves - 1, first, last) > 0)
      wrong(w, "r%d at +%lld lies in another register that lives at the same time", edges[i].reg,
            (long long)r->offset);
    tree_add(&t, 1, 0, t.leaves - 1, first, last, edges[i].begin ? 1 : -1);
  }
}

static void check_memory(Verifying *w) {
  const Plan *p = w->plan;
  size_t n = 0;
  Edge *edges = arena_array(&w->arena, Edge, 2 * p->registers.n);
  for (size_t i = 0; i < p->registers.n; i++) {
    const PlanRegister *r = &p->registers.at[i];
    if (r->home != PLAN_BLOCK || !r->bytes) continue;
    edges[n++] = (Edge){r->offset, (int)i, true};
    edges[n++] = (Edge){r->offset + plan_size(r), (int)i, false};
  }
  qsort(edges, n, sizeof *edges, by_offset);
  for (int stream = PLAN_SHARED; stream < (int)p->streams.n; stream++)
    check_stream(w, stream, edges, n);
}

/* -- Tasks ------------------------------------------------------------------------------------- */

static bool in_list(int n, const int *list, int value) {
  int low = 0, high = n;
  while (low < high) {
    int mid = (low + high) / 2;
    if (list[mid] < value) low = mid + 1;
    else high = mid;
  }
  return low < n && list[low] == value;
}

/* What steps of another task touch is handed over by its first one, ports apart. */
static void check_task(Verifying *w, size_t i) {
  const Plan *p = w->plan;
  const PlanTask *t = &p->tasks.at[i];
  for (int j = t->first; j < t->first + t->n; j++) {
    const PlanStep *s = &p->steps.at[j];
    for (int k = 0; k < s->n_in + s->n_out; k++) {
      int id = k < s->n_in ? s->in[k] : s->out[k - s->n_in];
      int reg = id < 0 ? -1 : p->tensors.at[id].reg;
      const PlanRegister *r = reg < 0 ? NULL : &p->registers.at[reg];
      if (!r || (r->home != PLAN_BLOCK && r->home != PLAN_RESULT)) continue;
      bool local = r->first >= t->first && r->last < t->first + t->n && r->producer < 0;
      if (!local && !in_list(t->n_in, t->in, reg) && !in_list(t->n_out, t->out, reg))
        wrong(w, "task %zu touches r%d, which nobody hands over", i, reg);
    }
  }
}

/* Tasks act once a round or for each micro-batch, and steps of the latter are side by side. What
 * they fill once a round does not go to others like them. */
static void check_times(Verifying *w) {
  const Plan *p = w->plan;
  int last = -1;
  for (size_t i = 0; i < p->tasks.n; i++) {
    const PlanTask *t = &p->tasks.at[i];
    if (t->times != 1 && (t->times != p->times || t->call != PLAN_NO_CALL))
      wrong(w, "task %zu acts %d times a round, there are %d micro-batches", i, t->times, p->times);
    if (t->times == 1) continue;
    if (last >= 0 && last + 1 != (int)i)
      wrong(w, "tasks %d and %zu are of micro-batches, and others between them", last, i);
    last = (int)i;
  }
  for (size_t i = 0; i < p->registers.n; i++) {
    const PlanRegister *r = &p->registers.at[i];
    bool makes = r->producer >= 0 && p->tasks.at[r->producer].times > 1 && plan_is_slow(p, r);
    for (int k = 0; k < r->n_consumers && makes; k++)
      if (p->tasks.at[r->consumers[k]].times > 1)
        wrong(w, "r%zu is filled by all micro-batches, and task %d reads it in each", i,
              r->consumers[k]);
  }
}

/* Calls get memory of the block, in buffers that take turns. */
static void check_call(Verifying *w, size_t i) {
  const PlanTask *t = &w->plan->tasks.at[i];
  for (int k = 0; k < t->n_in + t->n_out; k++) {
    int reg = k < t->n_in ? t->in[k] : t->out[k - t->n_in], home = w->plan->registers.at[reg].home;
    if (t->call != PLAN_NO_CALL && home != PLAN_BLOCK && home != PLAN_ORDER)
      wrong(w, "task %zu is a call and is handed r%d, which is a port", i, reg);
  }
}

static void check_tasks(Verifying *w) {
  const Plan *p = w->plan;
  int next = 0;
  for (size_t i = 0; i < p->tasks.n; i++) {
    const PlanTask *t = &p->tasks.at[i];
    if (t->stream < 0 || t->stream >= (int)p->streams.n || t->first != next || t->n < 0 ||
        t->n > (int)p->steps.n - next || t->call >= (int)p->calls.n ||
        (t->n && t->call != PLAN_NO_CALL))
      wrong(w, "task %zu has a stream or steps that are not there", i);
    next += t->n;
    check_task(w, i);
    check_call(w, i);
  }
  if (next != (int)p->steps.n) wrong(w, "step %d is in no task", next);
  check_times(w);
}

static void verify(void *ud) {
  Verifying *w = ud;
  check_registers(w);
  count_registers(w);
  check_tensors(w);
  for (size_t i = 0; i < w->plan->registers.n; i++) check_hand_over(w, i);
  check_ports(w);
  for (size_t i = 0; i < w->plan->steps.n; i++) {
    check_inputs(w, i);
    check_patches(w, i);
    check_outputs(w, i);
  }
  check_tasks(w);
  check_order(w);
  check_memory(w);
}

int plan_verify(const Plan *p) {
  Verifying w = {.plan = p};
  int rc = arena_protect(&w.arena, verify, &w);
  arena_free(&w.arena);
  return rc;
}
