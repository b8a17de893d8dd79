/* Offsets in the block: registers by size, the largest first, each at the lowest place that no
 * register holds whose lifetime meets its own. Streams run at their own pace, so each has a part of
 * the block, and what several touch has one where nothing is shared. */
#include <stdlib.h>

#include "plan_int.h"
#include "space.h"
#include "str.h"

int64_t plan_size(const PlanRegister *r) {
  return ((r->bytes + PLAN_ALIGN - 1) & ~(int64_t)(PLAN_ALIGN - 1)) * r->n_buffers;
}

typedef struct Sized {
  int64_t size;
  int first, last, stream, reg;
} Sized;

static int by_size(const void *a, const void *b) {
  const Sized *x = a, *y = b;
  if (x->size != y->size) return x->size > y->size ? -1 : 1;
  return x->reg - y->reg;
}

void plan_lifetime(const Plan *p, const PlanRegister *r, int *first, int *last) {
  bool lasting = r->stream == PLAN_SHARED || r->first < 0;
  *first = lasting ? 0 : r->first;
  *last = lasting ? (int)p->steps.n : r->last;
}

typedef struct Placing {
  Plan *plan;
  Arena arena; /* for the while */
} Placing;

/* Places the registers of one stream behind what is placed already. */
static void place_stream(Placing *w, int stream, const Sized *order, size_t n) {
  Plan *p = w->plan;
  Space *s = NULL;
  int64_t base = p->block_bytes, most = 0;
  for (size_t i = 0; i < n; i++) most += order[i].size;
  for (size_t i = 0; i < n; i++) {
    const Sized *r = &order[i];
    if (r->stream != stream) continue;
    if (!s) s = space_create(&w->arena, (int)p->steps.n + 1, most, PLAN_ALIGN);
    int64_t offset = space_lowest(s, r->first, r->last, r->size);
    space_add(s, r->first, r->last, offset, r->size);
    offset += base;
    p->registers.at[r->reg].offset = offset;
    if (offset + r->size > p->block_bytes) p->block_bytes = offset + r->size;
  }
}

static void place(void *ud) {
  Placing *w = ud;
  Plan *p = w->plan;
  size_t n = 0;
  Sized *order = arena_array(&w->arena, Sized, p->registers.n);
  for (size_t i = 0; i < p->registers.n; i++) {
    PlanRegister *r = &p->registers.at[i];
    r->offset = 0;
    if (r->home != PLAN_BLOCK || !r->bytes) continue;
    Sized *o = &order[n++];
    *o = (Sized){.size = plan_size(r), .stream = r->stream, .reg = (int)i};
    plan_lifetime(p, r, &o->first, &o->last);
  }
  qsort(order, n, sizeof *order, by_size);
  p->block_bytes = 0;
  for (int stream = PLAN_SHARED; stream < (int)p->streams.n; stream++)
    place_stream(w, stream, order, n);
}

void plan_memory(Plan *p) {
  Placing w = {.plan = p};
  int rc = arena_protect(&w.arena, place, &w);
  arena_free(&w.arena);
  if (rc) arena_throw(&p->arena, rc);
}

/* -- Report ------------------------------------------------------------------------------------ */

/* Bytes that live at each step, into live[0 .. steps]; the step with the most. */
static size_t count_live(const Plan *p, int64_t *live) {
  size_t peak = 0;
  for (size_t i = 0; i < p->registers.n; i++) {
    const PlanRegister *r = &p->registers.at[i];
    int first, last;
    if (r->home != PLAN_BLOCK || !r->bytes) continue;
    plan_lifetime(p, r, &first, &last);
    live[first] += plan_size(r);
    live[last + 1] -= plan_size(r);
  }
  for (size_t i = 1; i <= p->steps.n; i++) {
    live[i] += live[i - 1];
    if (live[i] > live[peak]) peak = i;
  }
  return peak;
}

static int64_t port_bytes(const Plan *p, PlanHome home) {
  int64_t bytes = 0;
  for (size_t i = 0; i < p->registers.n; i++)
    if (p->registers.at[i].home == home) bytes += p->registers.at[i].bytes;
  return bytes;
}

int plan_measure(void *options, Graph *g, int64_t *bytes) {
  Plan *p = plan_create(g, options);
  if (!p) return MF_EINVAL;
  *bytes = p->block_bytes + port_bytes(p, PLAN_RESULT);
  plan_destroy(p);
  return 0;
}

typedef struct Living {
  int64_t bytes;
  int reg, tensor, step; /* the first tensor on it and the step that makes that */
} Living;

static int by_bytes(const void *a, const void *b) {
  const Living *x = a, *y = b;
  if (x->bytes != y->bytes) return x->bytes > y->bytes ? -1 : 1;
  return x->reg - y->reg;
}

/* What lives at step `at`: their number. */
static size_t list_living(const Plan *p, int at, Living *of, Living *list) {
  size_t n = 0;
  for (size_t i = 0; i < p->registers.n; i++)
    of[i] = (Living){p->registers.at[i].bytes, (int)i, -1, -1};
  for (size_t i = 0; i < p->steps.n; i++) {
    const PlanStep *s = &p->steps.at[i];
    for (int k = 0; k < s->n_out + s->n_in; k++) {
      int t = k < s->n_out ? s->out[k] : s->in[k - s->n_out];
      Living *l = t < 0 ? NULL : &of[p->tensors.at[t].reg];
      if (l && l->step < 0) l->tensor = t, l->step = (int)i;
    }
  }
  for (size_t i = 0; i < p->registers.n; i++) {
    int first, last;
    if (p->registers.at[i].home != PLAN_BLOCK || !p->registers.at[i].bytes) continue;
    plan_lifetime(p, &p->registers.at[i], &first, &last);
    if (first <= at && last >= at) list[n++] = of[i];
  }
  qsort(list, n, sizeof *list, by_bytes);
  return n;
}

static void report_living(const Plan *p, const Living *l, Str *out) {
  const PlanStep *s = l->step < 0 ? NULL : &p->steps.at[l->step];
  str_printf(out, "%14lld  %-24s r%d", (long long)l->bytes, s ? s->op->name : "", l->reg);
  if (l->tensor >= 0) {
    str_puts(out, " ");
    op_print_meta(&p->tensors.at[l->tensor].meta, out);
  }
  if (s && s->where) str_printf(out, "  %s", s->where);
  str_puts(out, "\n");
}

typedef struct Reporting {
  const Plan *plan;
  Str *out;
  Arena arena;
} Reporting;

static void report(void *ud) {
  enum { SHOWN = 20 };
  Reporting *w = ud;
  const Plan *p = w->plan;
  int64_t *live = arena_array(&w->arena, int64_t, p->steps.n + 2);
  Living *of = arena_array(&w->arena, Living, p->registers.n + 1);
  Living *list = arena_array(&w->arena, Living, p->registers.n + 1);
  size_t peak = count_live(p, live), n = list_living(p, (int)peak, of, list);
  int64_t waste = p->block_bytes - live[peak];
  str_printf(w->out, "memory of %s: block %lld bytes, lower bound %lld, waste %.2f %%\n", p->name,
             (long long)p->block_bytes, (long long)live[peak],
             live[peak] ? 100.0 * (double)waste / (double)live[peak] : 0.0);
  str_printf(w->out, "inputs %lld bytes, captured %lld, results %lld\n",
             (long long)port_bytes(p, PLAN_INPUT), (long long)port_bytes(p, PLAN_CAPTURE),
             (long long)port_bytes(p, PLAN_RESULT));
  if (!n) return;
  str_printf(w->out, "peak at step %zu of %zu, %s: %zu registers\n", peak, p->steps.n,
             peak < p->steps.n ? p->steps.at[peak].op->name : "the end", n);
  for (size_t i = 0; i < n && i < SHOWN; i++) report_living(p, &list[i], w->out);
  if (n > SHOWN) str_printf(w->out, "%14s  and %zu smaller ones\n", "", n - SHOWN);
}

void plan_report(const Plan *p, Str *out) {
  Reporting w = {p, out, {0}};
  if (arena_protect(&w.arena, report, &w)) out->failed = true;
  arena_free(&w.arena);
}
