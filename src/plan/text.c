/* A plan as text, a record a line, in the order of ids:
 *
 *   plan "step", block 4096, results 1, cells 1, draws 0
 *   r0 input 0, 24 bytes, steps 0..3           home, port, bytes, the steps that touch it
 *   r1 block 24 bytes +64, steps 1..2          its offset in the block
 *   r2 order, buffers 2, task 0 to 1 3         what task 0 hands to tasks 1 and 3
 *   t0 = r0 float32(2, 3)
 *   t1 = r0 float32(2, 3) and every 6          it moves on by so much with each micro-batch; of
 * other ranks, see ranks.c n0 = r3 float32 0.5                        a number; "cell 0": that
 * cell's input "x0" t0 capture "c0" t1 written result t5 stream cpu "compute" task stream 0, steps
 * 2                     the next two steps task stream 0, steps 2, times 4            those of each
 * of four micro-batches task stream 0, call "load" step t3, t4 = max(t0; dim=1) "a.lua:3" arguments
 * where they differ from the defaults step t2 = mul(t3, -; alpha=1; alpha=cell 0) step t4 =
 * micro_mean(t3; n=4; at=micro)    an argument that is the number of the micro-batch step t4 =
 * dropout(t1; generator=0) along 0 a part of the whole batch along that dim
 *
 * Ops go by name and all else by place, so it reads back in any build that has the ops. */
#include <stdlib.h>
#include <string.h>

#include "err.h"
#include "plan_int.h"
#include "slots.h"
#include "str.h"

static const char *const homes[PLAN_HOMES] = {"block",  "input",  "capture",
                                              "result", "number", "order"};

/* -- Printing ---------------------------------------------------------------------------------- */

static void print_register(const Plan *p, int i, Str *out) {
  const PlanRegister *r = &p->registers.at[i];
  str_printf(out, "r%d %s", i, homes[r->home]);
  if (r->port >= 0) str_printf(out, " %d", r->port);
  if (r->home != PLAN_ORDER) str_printf(out, ", %lld bytes", (long long)r->bytes);
  if (r->home == PLAN_BLOCK) str_printf(out, " +%lld", (long long)r->offset);
  if (r->first >= 0) str_printf(out, ", steps %d..%d", r->first, r->last);
  if (r->n_buffers != 1) str_printf(out, ", buffers %d", r->n_buffers);
  if (r->producer >= 0) str_printf(out, ", task %d to", r->producer);
  for (int k = 0; k < r->n_consumers; k++) str_printf(out, " %d", r->consumers[k]);
  str_puts(out, "\n");
}

static void print_tensors(int n, const int *tensors, Str *out) {
  for (int k = 0; k < n; k++) {
    str_puts(out, k ? ", " : "");
    if (tensors[k] < 0) str_puts(out, "-");
    else str_printf(out, "t%d", tensors[k]);
  }
}

static void print_step(const PlanStep *s, Str *out) {
  str_puts(out, "step ");
  print_tensors(s->n_out, s->out, out);
  str_printf(out, "%s%s(", s->n_out ? " = " : "", s->op->name);
  print_tensors(s->n_in, s->in, out);
  size_t before = out->n;
  str_puts(out, "; ");
  op_print_args(s->op, s->args, out);
  if (out->n == before + 2 && !s->n_patches && !out->failed) out->text[out->n = before] = 0;
  for (int k = 0; k < s->n_patches; k++) {
    str_printf(out, "%s%s=", k ? ", " : "; ", s->op->params[s->patches[k].param].name);
    if (s->patches[k].cell == PLAN_MICRO) str_puts(out, "micro");
    else str_printf(out, "cell %d", s->patches[k].cell);
  }
  str_puts(out, ")");
  if (s->along >= 0) str_printf(out, " along %d", s->along);
  if (s->where) {
    str_puts(out, " ");
    str_quote(out, s->where);
  }
  str_puts(out, "\n");
}

static void print_number(const Plan *p, int i, Str *out) {
  const PlanNumber *n = &p->numbers.at[i];
  str_printf(out, "n%d %s ", i, dtype_name((DType)n->dtype));
  if (n->cell != PLAN_NO_CELL) str_printf(out, "cell %d ", n->cell);
  str_double(out, n->value);
  str_puts(out, "\n");
}

static void print_port(const char *kind, const PlanPort *port, Str *out) {
  str_printf(out, "%s ", kind);
  str_quote(out, port->name);
  str_printf(out, " t%d%s\n", port->tensor, port->written ? " written" : "");
}

static void print_task(const Plan *p, const PlanTask *t, Str *out) {
  str_printf(out, "task stream %d, ", t->stream);
  if (t->call == PLAN_NO_CALL) {
    str_printf(out, "steps %d", t->n);
  } else {
    str_puts(out, "call ");
    str_quote(out, p->calls.at[t->call]);
  }
  if (t->times != 1) str_printf(out, ", times %d", t->times);
  str_puts(out, "\n");
}

void plan_print(const Plan *p, Str *out) {
  str_puts(out, "plan ");
  str_quote(out, p->name);
  str_printf(out, ", block %lld, results %d, cells %d, draws %lld\n", (long long)p->block_bytes,
             p->n_result_registers, p->n_cells, (long long)p->n_draws);
  plan_print_ranks(p, out);
  for (size_t i = 0; i < p->registers.n; i++) print_register(p, (int)i, out);
  for (size_t i = 0; i < p->tensors.n; i++) {
    str_printf(out, "t%zu r%d ", i, p->tensors.at[i].reg);
    op_print_meta(&p->tensors.at[i].meta, out);
    plan_print_cut(&p->tensors.at[i], out);
    if (p->tensors.at[i].stride)
      str_printf(out, " and every %lld", (long long)p->tensors.at[i].stride);
    str_puts(out, "\n");
  }
  for (size_t i = 0; i < p->numbers.n; i++) print_number(p, (int)i, out);
  for (size_t i = 0; i < p->inputs.n; i++) print_port("input", &p->inputs.at[i], out);
  for (size_t i = 0; i < p->captures.n; i++) print_port("capture", &p->captures.at[i], out);
  for (size_t i = 0; i < p->results.n; i++) str_printf(out, "result t%d\n", p->results.at[i]);
  for (size_t i = 0; i < p->streams.n; i++) {
    str_printf(out, "stream %s ", device_slot_names[p->streams.at[i].device]);
    str_quote(out, p->streams.at[i].name);
    str_puts(out, "\n");
  }
  for (size_t i = 0; i < p->tasks.n; i++) print_task(p, &p->tasks.at[i], out);
  for (size_t i = 0; i < p->steps.n; i++) print_step(&p->steps.at[i], out);
}

/* -- Reading ----------------------------------------------------------------------------------- */

typedef struct Reading {
  Plan *plan;
  Scan scan;
  LIST(int) ids; /* of the list that is being read */
} Reading;

/* A name such as t12 for one of `n` records. */
static int scan_id(Scan *s, const char *letter, size_t n) {
  const char *word = scan_word(s);
  char *end = NULL;
  long id =
      word[0] == letter[0] && word[1] >= '0' && word[1] <= '9' ? strtol(word + 1, &end, 10) : -1;
  if (!end || *end || id < 0 || (size_t)id >= n)
    scan_fail(s, "'%s' is not %s0 to %s%d", word, letter, letter, (int)n - 1);
  return (int)id;
}

static void scan_own_id(Scan *s, const char *letter, size_t n) {
  if (scan_id(s, letter, n + 1) != (int)n) scan_fail(s, "%s%zu should come next", letter, n);
}

static void read_register(Reading *w) {
  Plan *p = w->plan;
  Scan *s = &w->scan;
  scan_own_id(s, "r", p->registers.n);
  int home = 0;
  while (home < PLAN_HOMES && !scan_is(s, homes[home])) home++;
  if (home == PLAN_HOMES) scan_fail(s, "expected a home");
  bool port = home != PLAN_BLOCK && home != PLAN_ORDER;
  int reg = plan_add_register(p, (PlanHome)home, -1, 0);
  PlanRegister *r = &p->registers.at[reg];
  if (port) r->port = (int)scan_range(s, "the port", 0, INT32_MAX);
  if (home != PLAN_ORDER) {
    scan_want(s, ",");
    r->bytes = scan_range(s, "the size", 0, SHAPE_MAX);
    scan_want(s, "bytes");
  }
  if (home == PLAN_BLOCK) {
    scan_want(s, "+");
    r->offset = scan_range(s, "the offset", 0, SHAPE_MAX);
  }
  while (scan_is(s, ",")) {
    if (scan_is(s, "steps")) {
      scan_int(s); /* the steps themselves say it */
      scan_want(s, "..");
      scan_int(s);
    } else if (scan_is(s, "buffers")) {
      r->n_buffers = (int)scan_range(s, "buffers", 1, INT16_MAX);
    } else {
      scan_want(s, "task");
      r->producer = (int)scan_range(s, "the task", 0, INT32_MAX);
      scan_want(s, "to");
      for (w->ids.n = 0; *s->at == ' ';)
        *list_add(&p->arena, &w->ids) = (int)scan_range(s, "the task", 0, INT32_MAX);
      r->n_consumers = (int)w->ids.n;
      r->consumers = arena_copy(&p->arena, w->ids.at, sizeof *w->ids.at * w->ids.n);
    }
  }
}

static void read_tensor(Reading *w) {
  Plan *p = w->plan;
  scan_own_id(&w->scan, "t", p->tensors.n);
  int reg = scan_id(&w->scan, "r", p->registers.n);
  Meta m;
  op_scan_meta(&w->scan, &m);
  int t = plan_add_tensor(p, reg, &m);
  plan_scan_cut(p, &w->scan, &p->tensors.at[t]);
  if (scan_is(&w->scan, "and")) {
    scan_want(&w->scan, "every");
    p->tensors.at[t].stride = scan_range(&w->scan, "the stride", 0, SHAPE_MAX);
  }
}

static void read_number(Reading *w) {
  Plan *p = w->plan;
  Scan *s = &w->scan;
  scan_own_id(s, "n", p->numbers.n);
  int dtype = dtype_parse(scan_word(s));
  if (dtype < 0) scan_fail(s, "expected a dtype");
  int cell = scan_is(s, "cell") ? (int)scan_range(s, "the cell", 0, INT32_MAX) : PLAN_NO_CELL;
  *list_add(&p->arena, &p->numbers) = (PlanNumber){scan_double(s), cell, (uint8_t)dtype};
}

static PlanPort scan_port(Reading *w) {
  PlanPort port = {.name = scan_quoted(&w->scan)};
  port.tensor = scan_id(&w->scan, "t", w->plan->tensors.n);
  port.written = scan_is(&w->scan, "written");
  return port;
}

static void read_stream(Reading *w) {
  Scan *s = &w->scan;
  int device = 0;
  while (device < DEVICE_SLOTS && !scan_is(s, device_slot_names[device])) device++;
  if (device == DEVICE_SLOTS) scan_fail(s, "expected a device");
  plan_add_stream(w->plan, device, scan_quoted(s));
}

static void read_task(Reading *w) {
  Scan *s = &w->scan;
  scan_want(s, "stream");
  int stream = (int)scan_range(s, "the stream", 0, (int64_t)w->plan->streams.n - 1);
  scan_want(s, ",");
  const PlanTask *last = w->plan->tasks.n ? &w->plan->tasks.at[w->plan->tasks.n - 1] : NULL;
  int most = INT32_MAX - (last ? last->first + last->n : 0);
  if (scan_is(s, "steps")) plan_add_task(w->plan, stream, (int)scan_range(s, "steps", 0, most));
  else if (scan_is(s, "call")) plan_add_call(w->plan, stream, scan_quoted(s));
  else scan_fail(s, "expected steps or a call");
  if (!scan_is(s, ",")) return;
  scan_want(s, "times");
  int times = (int)scan_range(s, "times", 2, INT16_MAX);
  w->plan->tasks.at[w->plan->tasks.n - 1].times = w->plan->times = times;
}

/* Tensors by commas, '-' for absent ones, into w->ids; none are possible. */
static void read_list(Reading *w) {
  Scan *s = &w->scan;
  while (*s->at == ' ') s->at++;
  if (*s->at != 't' && *s->at != '-') return;
  do
    *list_add(&w->plan->arena, &w->ids) =
        scan_is(s, "-") ? -1 : scan_id(s, "t", w->plan->tensors.n);
  while (scan_is(s, ","));
}

static int find_param(Scan *s, const Op *op, const char *name) {
  for (int i = 0; i < op->n_params; i++)
    if (strcmp(op->params[i].name, name) == 0) return i;
  scan_fail(s, "%s has no argument '%s'", op->name, name);
}

static void read_patches(Reading *w, PlanStep *step) {
  Scan *s = &w->scan;
  LIST(PlanPatch) patches = {0};
  do {
    int param = find_param(s, step->op, scan_word(s));
    scan_want(s, "=");
    int cell = PLAN_MICRO;
    if (!scan_is(s, "micro")) {
      scan_want(s, "cell");
      cell = (int)scan_range(s, "the cell", 0, INT32_MAX);
    }
    *list_add(&w->plan->arena, &patches) = (PlanPatch){param, cell};
  } while (scan_is(s, ","));
  step->patches = patches.at;
  step->n_patches = (int)patches.n;
}

/* Whether a list of results is next, and not the op's name: its line has " = " before the '('. */
static bool has_results(const Scan *s) {
  return s->at[strcspn(s->at, "=(\n")] == '=';
}

static void read_step(Reading *w) {
  Plan *p = w->plan;
  Scan *s = &w->scan;
  w->ids.n = 0;
  if (has_results(s)) {
    read_list(w);
    scan_want(s, "=");
  }
  int n_out = (int)w->ids.n;
  const Op *op = op_scan_name(s);
  _Alignas(16) char args[OP_MAX_ARGS];
  scan_want(s, "(");
  read_list(w);
  memcpy(args, op->defaults, op->args_size);
  bool more = scan_is(s, ";");
  if (more) op_scan_args(s, op, args);
  PlanStep *step =
      plan_add_step(p, op, args, (int)w->ids.n - n_out, w->ids.at + n_out, n_out, w->ids.at);
  if (more && scan_is(s, ";")) read_patches(w, step);
  scan_want(s, ")");
  if (scan_is(s, "along")) step->along = (int)scan_range(s, "the dim", 0, MF_MAX_DIMS - 1);
  if (*s->at == ' ' || *s->at == '"') step->where = scan_quoted(s);
}

static void read_record(Reading *w) {
  Plan *p = w->plan;
  Scan *s = &w->scan;
  if (scan_is(s, "step")) read_step(w);
  else if (scan_is(s, "input")) *list_add(&p->arena, &p->inputs) = scan_port(w);
  else if (scan_is(s, "capture")) *list_add(&p->arena, &p->captures) = scan_port(w);
  else if (scan_is(s, "result")) *list_add(&p->arena, &p->results) = scan_id(s, "t", p->tensors.n);
  else if (scan_is(s, "stream")) read_stream(w);
  else if (scan_is(s, "task")) read_task(w);
  else if (plan_scan_group(p, s) || plan_scan_layout(p, s)) return;
  else if (*s->at == 'r') read_register(w);
  else if (*s->at == 't') read_tensor(w);
  else if (*s->at == 'n') read_number(w);
  else scan_fail(s, "expected a record");
}

/* Ids of tasks, which come behind the registers that have them. */
static void check_tasks(Reading *w) {
  Plan *p = w->plan;
  for (size_t i = 0; i < p->registers.n; i++) {
    const PlanRegister *r = &p->registers.at[i];
    bool right = r->producer < (int)p->tasks.n;
    for (int k = 0; k < r->n_consumers; k++) right &= r->consumers[k] < (int)p->tasks.n;
    if (!right) scan_fail(&w->scan, "r%zu names a task that is not there", i);
  }
  const PlanTask *last = p->tasks.n ? &p->tasks.at[p->tasks.n - 1] : NULL;
  if ((last ? (size_t)last->first + (size_t)last->n : 0) != p->steps.n)
    scan_fail(&w->scan, "the tasks do not have %zu steps", p->steps.n);
}

static void read_plan(void *ud) {
  Reading *w = ud;
  Scan *s = &w->scan;
  scan_want(s, "plan");
  w->plan->name = scan_quoted(s);
  scan_want(s, ", block");
  w->plan->block_bytes = scan_range(s, "the block", 0, SHAPE_MAX);
  scan_want(s, ", results");
  w->plan->n_result_registers = (int)scan_range(s, "results", 0, INT32_MAX);
  scan_want(s, ", cells");
  w->plan->n_cells = (int)scan_range(s, "cells", 0, INT32_MAX);
  scan_want(s, ", draws");
  w->plan->n_draws = scan_range(s, "draws", 0, INT64_MAX);
  for (scan_end_line(s); !scan_at_end(s); scan_end_line(s)) read_record(w);
  check_tasks(w);
  plan_link(w->plan);
}

Plan *plan_parse(const char *text) {
  Plan *p = plan_empty();
  if (!p) return NULL;
  Reading w = {.plan = p, .scan = scan_begin(&p->arena, "plan", text)};
  if (!arena_protect(&p->arena, read_plan, &w) && !plan_verify(p)) return p;
  plan_destroy(p);
  return NULL;
}
