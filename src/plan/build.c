/* Records of a plan, one by one. */
#include <string.h>

#include "err.h"
#include "mem.h"
#include "op_program.h"
#include "plan_int.h"

Plan *plan_empty(void) {
  Plan *p = mem_zalloc(sizeof *p);
  if (!p) err_set(MF_ENOMEM, "out of memory");
  else p->times = 1;
  return p;
}

void plan_destroy(Plan *p) {
  if (!p) return;
  arena_free(&p->arena);
  mem_free(p);
}

int plan_add_register(Plan *p, PlanHome home, int port, int64_t bytes) {
  *list_add(&p->arena, &p->registers) = (PlanRegister){.home = (uint8_t)home,
                                                       .port = port,
                                                       .bytes = bytes,
                                                       .first = -1,
                                                       .last = -1,
                                                       .stream = PLAN_SHARED,
                                                       .n_buffers = 1,
                                                       .producer = -1};
  return (int)p->registers.n - 1;
}

int plan_add_tensor(Plan *p, int reg, const Meta *m) {
  *list_add(&p->arena, &p->tensors) = (PlanTensor){.reg = reg, .meta = *m};
  return (int)p->tensors.n - 1;
}

static void touch(Plan *p, int n, const int *tensors) {
  int step = (int)p->steps.n;
  for (int k = 0; k < n; k++) {
    if (tensors[k] < 0) continue;
    PlanRegister *r = &p->registers.at[p->tensors.at[tensors[k]].reg];
    if (r->first < 0) r->first = step;
    r->last = step;
  }
}

PlanStep *plan_add_step(Plan *p, const Op *op, const void *args, int n_in, const int *in, int n_out,
                        const int *out) {
  touch(p, n_in, in);
  touch(p, n_out, out);
  PlanStep *s = list_add(&p->arena, &p->steps);
  *s = (PlanStep){.op = op, .n_in = n_in, .n_out = n_out, .along = -1};
  s->args = op_copy_args(&p->arena, op, args);
  s->in = arena_copy(&p->arena, in, sizeof *in * (size_t)n_in);
  s->out = arena_copy(&p->arena, out, sizeof *out * (size_t)n_out);
  return s;
}

int plan_add_stream(Plan *p, int device, const char *name) {
  *list_add(&p->arena, &p->streams) = (PlanStream){(uint8_t)device, arena_text(&p->arena, name)};
  return (int)p->streams.n - 1;
}

int plan_add_task(Plan *p, int stream, int n) {
  int first = 0;
  if (p->tasks.n) first = p->tasks.at[p->tasks.n - 1].first + p->tasks.at[p->tasks.n - 1].n;
  *list_add(&p->arena, &p->tasks) =
      (PlanTask){.stream = stream, .first = first, .n = n, .call = PLAN_NO_CALL, .times = 1};
  return (int)p->tasks.n - 1;
}

int plan_add_call(Plan *p, int stream, const char *name) {
  int task = plan_add_task(p, stream, 0);
  p->tasks.at[task].call = (int)p->calls.n;
  *list_add(&p->arena, &p->calls) = arena_text(&p->arena, name);
  return task;
}

int plan_hand_over(Plan *p, int reg, int n_buffers, int from, int n_to, const int *to) {
  if (reg < 0) reg = plan_add_register(p, PLAN_ORDER, -1, 0);
  PlanRegister *r = &p->registers.at[reg];
  r->n_buffers = n_buffers;
  r->producer = from;
  r->n_consumers = n_to;
  r->consumers = arena_copy(&p->arena, to, sizeof *to * (size_t)n_to);
  return reg;
}
