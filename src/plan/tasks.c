/* Tasks of a plan whose steps are there, and what follows from the registers that they hand over.
 */
#include <string.h>

#include "hard.h"
#include "op_comm.h"
#include "op_ids.h"
#include "plan_int.h"

/* -- What follows ------------------------------------------------------------------------------ */

static void add_to(int *list, int *n, int value) {
  if (list) list[*n] = value;
  (*n)++;
}

/* Counts what each task consumes and produces, then, when the lists are there, fills them. */
static void count(Plan *p, int **in, int **out) {
  for (size_t i = 0; i < p->tasks.n; i++) p->tasks.at[i].n_in = p->tasks.at[i].n_out = 0;
  for (size_t i = 0; i < p->registers.n; i++) {
    const PlanRegister *r = &p->registers.at[i];
    if (r->producer < 0) continue;
    PlanTask *t = &p->tasks.at[r->producer];
    add_to(out ? out[r->producer] : NULL, &t->n_out, (int)i);
    for (int k = 0; k < r->n_consumers; k++) {
      t = &p->tasks.at[r->consumers[k]];
      add_to(in ? in[r->consumers[k]] : NULL, &t->n_in, (int)i);
    }
  }
}

/* Ticks pace the tasks that no other paces; calls without registers to consume go by themselves. */
static void set_ticks(Plan *p) {
  bool *paced = arena_array(&p->arena, bool, p->tasks.n + 1);
  for (size_t i = 0; i < p->tasks.n; i++) { /* a producer comes before its consumers */
    PlanTask *t = &p->tasks.at[i];
    for (int k = 0; k < t->n_in; k++) paced[i] |= paced[p->registers.at[t->in[k]].producer];
    t->ticked = !paced[i] && t->call == PLAN_NO_CALL;
    paced[i] |= t->ticked;
  }
}

static void set_stream(PlanRegister *r, bool *known, int stream) {
  if (!*known) r->stream = stream;
  else if (r->stream != stream) r->stream = PLAN_SHARED;
  *known = true;
}

static void set_streams(Plan *p) {
  bool *known = arena_array(&p->arena, bool, p->registers.n + 1);
  for (size_t i = 0; i < p->tasks.n; i++) {
    const PlanTask *t = &p->tasks.at[i];
    int stream = t->call == PLAN_NO_CALL ? t->stream : PLAN_SHARED;
    for (int j = t->first; j < t->first + t->n; j++) {
      const PlanStep *s = &p->steps.at[j];
      for (int k = 0; k < s->n_in + s->n_out; k++) {
        int tensor = k < s->n_in ? s->in[k] : s->out[k - s->n_in];
        int reg = tensor < 0 ? -1 : p->tensors.at[tensor].reg;
        if (reg >= 0) set_stream(&p->registers.at[reg], &known[reg], stream);
      }
    }
    for (int k = 0; k < t->n_in; k++)
      set_stream(&p->registers.at[t->in[k]], &known[t->in[k]], stream);
    for (int k = 0; k < t->n_out; k++)
      set_stream(&p->registers.at[t->out[k]], &known[t->out[k]], stream);
  }
  for (size_t i = 0; i < p->registers.n; i++)
    if (!known[i] || p->registers.at[i].n_buffers > 1) p->registers.at[i].stream = PLAN_SHARED;
}

bool plan_is_slow(const Plan *p, const PlanRegister *r) {
  if (p->tasks.at[r->producer].times == 1) return true;
  for (int k = 0; k < r->n_consumers; k++)
    if (p->tasks.at[r->consumers[k]].times == 1) return true;
  return false;
}

/* What steps of micro-batches and others touch lasts through all of them: what was made before is
 * read again, what is left must not be lost. */
static void set_lifetimes(Plan *p) {
  int first = (int)p->steps.n, last = -1;
  for (size_t i = 0; i < p->tasks.n; i++) {
    const PlanTask *t = &p->tasks.at[i];
    if (t->times == 1 || !t->n) continue;
    if (t->first < first) first = t->first;
    if (t->first + t->n - 1 > last) last = t->first + t->n - 1;
  }
  for (size_t i = 0; i < p->registers.n && last >= 0; i++) {
    PlanRegister *r = &p->registers.at[i];
    if (r->first < 0) continue;
    if (r->first < first && r->last >= first && r->last < last) r->last = last;
    if (r->last > last && r->first > first && r->first <= last) r->first = first;
  }
}

void plan_link(Plan *p) {
  int **in = arena_array(&p->arena, int *, p->tasks.n + 1);
  int **out = arena_array(&p->arena, int *, p->tasks.n + 1);
  count(p, NULL, NULL);
  for (size_t i = 0; i < p->tasks.n; i++) {
    PlanTask *t = &p->tasks.at[i];
    t->in = in[i] = arena_array(&p->arena, int, t->n_in);
    t->out = out[i] = arena_array(&p->arena, int, t->n_out);
  }
  count(p, in, out);
  set_ticks(p);
  set_streams(p);
  set_lifetimes(p);
}

/* -- One stream -------------------------------------------------------------------------------- */

/* The tasks that touch each register, as lists behind one another. */
typedef struct Touches {
  int *start, *tasks; /* those of register r: tasks[start[r] .. start[r + 1]) */
  size_t n;           /* registers */
} Touches;

/* Calls f for each register that a task's steps touch, once. `seen`: by register, the last such
 * task + 1. */
static void each_touch(Plan *p, int *seen, void (*f)(Touches *t, int reg, int task), Touches *t) {
  memset(seen, 0, sizeof *seen * p->registers.n);
  for (int i = 0; i < (int)p->tasks.n; i++)
    for (int j = p->tasks.at[i].first, end = j + p->tasks.at[i].n; j < end; j++) {
      const PlanStep *s = &p->steps.at[j];
      for (int k = 0; k < s->n_in + s->n_out; k++) {
        int tensor = k < s->n_in ? s->in[k] : s->out[k - s->n_in];
        int reg = tensor < 0 ? -1 : p->tensors.at[tensor].reg;
        if (reg < 0 || seen[reg] == i + 1) continue;
        seen[reg] = i + 1;
        f(t, reg, i);
      }
    }
}

static void count_touch(Touches *t, int reg, int task) {
  (void)task;
  t->start[reg + 2]++;
}

static void note_touch(Touches *t, int reg, int task) {
  t->tasks[t->start[reg + 1]++] = task;
}

static Touches find_touches(Plan *p) {
  size_t n_regs = p->registers.n;
  int *seen = arena_array(&p->arena, int, n_regs + 1);
  Touches t = {.start = arena_array(&p->arena, int, n_regs + 2), .n = n_regs};
  each_touch(p, seen, count_touch, &t);
  for (size_t r = 2; r < n_regs + 2; r++) t.start[r] += t.start[r - 1];
  t.tasks = arena_array(&p->arena, int, t.start[n_regs + 1] + 1);
  each_touch(p, seen, note_touch, &t);
  return t;
}

/* The tasks of the steps, [base, base + n), on one stream or two. */
typedef struct Split {
  Plan *plan;
  Touches touches;
  int base, n;
  int talks;   /* the stream of what is communicated; -1: that of the other steps */
  bool stages; /* micro-batches go from stage to stage: see add_stages */
  int buffers; /* then: how many may be under way */
} Split;

/* Steps [from, to), in one task or one each. */
static void add_tasks(Plan *p, const PlanOptions *o, int stream, int from, int to, int times) {
  int of = HARD || o->one_op_tasks ? 1 : to - from;
  for (int i = from; i < to; i += of) {
    int task = plan_add_task(p, stream, of);
    p->tasks.at[task].times = times;
  }
}

/* The same where what is communicated is a task by itself on a stream of its own. */
static void add_both(Plan *p, const PlanOptions *o, int stream, int talks, int from, int to) {
  for (int i = from, next; i < to; i = next) {
    bool talk = op_is_comm(p->steps.at[i].op);
    for (next = i + 1; next < to && !talk && !op_is_comm(p->steps.at[next].op);) next++;
    add_tasks(p, o, talk ? talks : stream, i, next, 1);
  }
}

/* Whether micro-batches go between placements, and meet other ranks in nothing else: those would
 * have to come to it in one order, and here each goes on with what is there. */
static bool has_stages(const Plan *p, const PlanOptions *o, int first, int end) {
  bool any = false;
  for (int i = first; i < end; i++) {
    if (!op_is_comm(p->steps.at[i].op)) continue;
    if (p->steps.at[i].op->id != OP_exchange) return false;
    any = true;
  }
  return any && !o->buffers && o->overlap >= 0;
}

/* Twice as many as there are stages, so that the first has enough under way until the first comes
 * back, and no more than there are. */
static int count_buffers(const Plan *p) {
  int stages = 0, most;
  for (size_t i = 0; i < p->layouts.n; i++) {
    bool known = false;
    for (size_t k = 0; k < i; k++)
      known |= placement_equal(p->layouts.at[k].placement, p->layouts.at[i].placement);
    stages += !known;
  }
  most = 2 * stages < p->times ? 2 * stages : p->times;
  return most < 16 ? most : 16;
}

/* Steps [from, to) of a micro-batch, cut where something comes from another stage or goes there,
 * each of which is a task on a stream of its own. So the part before a sending goes on with the
 * next micro-batch, until it has as many ahead of the part that waits for what comes back as there
 * are buffers: the order of one forward, one backward follows. */
static void add_stages(Plan *p, const PlanOptions *o, int stream, int from, int to) {
  for (int i = from, next; i < to; i = next) {
    bool talk = op_is_comm(p->steps.at[i].op);
    for (next = i + 1; next < to && !talk && !op_is_comm(p->steps.at[next].op);) next++;
    int on = talk ? plan_add_stream(p, DEVICE_CPU, "stage") : stream;
    add_tasks(p, o, on, i, next, p->times);
  }
}

/* Whether so much is communicated that it is worth a thread, and nothing in a micro-batch is. */
static bool is_worth(const Plan *p, const PlanOptions *o, int first, int end) {
  enum { WORTH = 1 << 18 };
  int64_t bytes = 0;
  bool any = false;
  for (int i = 0; i < (int)p->steps.n; i++) {
    const PlanStep *s = &p->steps.at[i];
    if (!op_is_comm(s->op)) continue;
    if (i >= first && i < end) return false;
    any = true;
    for (int k = 0; k < s->n_out; k++) bytes += p->registers.at[p->tensors.at[s->out[k]].reg].bytes;
  }
  return any && !o->buffers && (o->overlap ? o->overlap > 0 : bytes >= WORTH);
}

/* Steps [first, end) are those of a micro-batch, if there are several. */
static Split make_steps(Plan *p, const PlanOptions *o, int stream, int first, int end) {
  Split s = {.plan = p, .base = (int)p->tasks.n, .talks = -1};
  int n = (int)p->steps.n;
  if (p->times == 1) first = end = n;
  if (is_worth(p, o, first, end)) s.talks = plan_add_stream(p, DEVICE_CPU, "comm");
  if (s.talks < 0) add_tasks(p, o, stream, 0, first, 1);
  else add_both(p, o, stream, s.talks, 0, first);
  s.stages = end > first && p->times > 1 && has_stages(p, o, first, end);
  s.buffers = s.stages ? count_buffers(p) : 1;
  if (s.stages) add_stages(p, o, stream, first, end);
  else add_tasks(p, o, stream, first, end, p->times);
  if (s.talks < 0) add_tasks(p, o, stream, end, n, 1);
  else add_both(p, o, stream, s.talks, end, n);
  if (!n) plan_add_task(p, stream, 0);
  s.n = (int)p->tasks.n - s.base;
  s.touches = find_touches(p);
  return s;
}

/* The tasks that touch a register, into list; their number. */
static int touching(const Split *s, size_t reg, int *list) {
  int n = s->touches.start[reg + 1] - s->touches.start[reg];
  memcpy(list, s->touches.tasks + s->touches.start[reg], sizeof *list * (size_t)n);
  return n;
}

/* How many buffers tasks [0, n) of a list have between them. */
static int buffers_of(const Split *s, int n, const int *list) {
  for (int k = 0; k < n; k++)
    if (s->plan->tasks.at[list[k]].times == 1) return 1;
  return s->buffers;
}

/* `to` comes behind `from`. */
static void hand_on(const Split *s, int from, int to) {
  plan_hand_over(s->plan, -1, buffers_of(s, 2, (int[]){from, to}), from, 1, (int[]){to});
}

/* What one stream's tasks touch after the other's, they do in the order of steps: `first` hands the
 * register over itself. */
static void order_touches(const Split *s, size_t reg, int n, const int *list) {
  Plan *p = s->plan;
  int home = p->registers.at[reg].home;
  bool handed = home == PLAN_BLOCK || home == PLAN_RESULT;
  for (int k = 1; k < n; k++) {
    bool other = p->tasks.at[list[k - 1]].stream != p->tasks.at[list[k]].stream;
    if (other && (k > 1 || !handed)) hand_on(s, list[k - 1], list[k]);
  }
}

/* Each task waits for the one before it on its stream; the first of all is before the first of each
 * stream, and waits for the last of each of the round before. */
static void order_stream(const Split *s, int stream) {
  Plan *p = s->plan;
  int first = -1, last = -1, n = 0;
  for (int i = s->base; i < s->base + s->n; i++) {
    if (p->tasks.at[i].stream != stream) continue;
    if (last >= 0) hand_on(s, last, i);
    if (first < 0) first = i;
    last = i;
    n++;
  }
  if (first > s->base) hand_on(s, s->base, first);
  if (last > s->base && (n > 2 || first > s->base)) hand_on(s, s->base, last);
}

/* Memory is shared by the order of steps, so each task waits for the one before, and the first for
 * the last of the round before, as the first of a micro-batch does for the last; what a step makes
 * is handed over as well, but for results where others do that. */
static void hand_over_steps(const Split *s, bool results) {
  Plan *p = s->plan;
  int *list = arena_array(&p->arena, int, s->n + 1), first = s->base, last = first + s->n - 1;
  size_t n_regs = p->registers.n;
  for (size_t r = 0; r < n_regs; r++) {
    int home = p->registers.at[r].home, count = touching(s, r, list);
    if (s->talks >= 0 || s->stages) order_touches(s, r, count, list);
    if (home != PLAN_BLOCK && !(home == PLAN_RESULT && results)) continue;
    if (count > 1)
      plan_hand_over(p, (int)r, home == PLAN_BLOCK ? buffers_of(s, count, list) : 1, list[0],
                     count - 1, list + 1);
  }
  for (int k = 0; k < (int)p->streams.n; k++) order_stream(s, k);
  while (first < last && p->tasks.at[first].times == 1) first++;
  while (last > first && p->tasks.at[last].times == 1) last--;
  if (last - first > 1 && last - first < s->n - 1) hand_on(s, first, last);
}

/* -- A flow ------------------------------------------------------------------------------------ */

/* Inputs and results lie in the block, and what a call gives or takes is handed over. */
static void hand_over_ports(const Split *s, int buffers, int from, int to) {
  Plan *p = s->plan;
  int *list = arena_array(&p->arena, int, (int)p->tasks.n + 1);
  for (size_t r = 0; r < s->touches.n; r++) {
    PlanRegister *reg = &p->registers.at[r];
    int home = reg->home, n = touching(s, r, list);
    if (home != PLAN_INPUT && home != PLAN_RESULT) continue;
    reg->home = PLAN_BLOCK;
    reg->port = -1;
    if (home == PLAN_INPUT) {
      plan_hand_over(p, (int)r, buffers, from, n, list);
      continue;
    }
    if (!n) list[n++] = s->base;
    list[n++] = to;
    plan_hand_over(p, (int)r, buffers, list[0], n - 1, list + 1);
  }
}

/* Batches come by the calls `data` and `copy`, results go by the call `results`, each on a stream
 * of its own, so that all of them and the steps are at work at the same time, as far apart as there
 * are buffers. The order edges pace what has no tensor to hand over. */
static void make_flow(Plan *p, const PlanOptions *o, int compute, int first, int end) {
  int n = o->buffers, streams[3];
  for (int k = 0; k < 3; k++) streams[k] = plan_add_stream(p, DEVICE_CPU, plan_flow_calls[k]);
  int data = plan_add_call(p, streams[PLAN_CALL_DATA], plan_flow_calls[PLAN_CALL_DATA]);
  int copy = plan_add_call(p, streams[PLAN_CALL_COPY], plan_flow_calls[PLAN_CALL_COPY]);
  Split s = make_steps(p, o, compute, first, end);
  int last = (int)p->tasks.n - 1;
  int results = plan_add_call(p, streams[PLAN_CALL_RESULTS], plan_flow_calls[PLAN_CALL_RESULTS]);
  hand_over_steps(&s, false);
  hand_over_ports(&s, n, copy, results);
  p->n_result_registers = 0;
  plan_hand_over(p, -1, n, data, 1, &copy);
  plan_hand_over(p, -1, n, copy, 1, &s.base);
  plan_hand_over(p, -1, n, last, 1, &results);
}

const char *const plan_flow_calls[] = {"data", "copy", "results"};

void plan_make_tasks(Plan *p, const PlanOptions *o, int first, int end) {
  int stream = plan_add_stream(p, o->device, "compute");
  if (o->buffers) {
    make_flow(p, o, stream, first, end);
  } else {
    Split s = make_steps(p, o, stream, first, end);
    hand_over_steps(&s, true);
  }
  plan_link(p);
}
