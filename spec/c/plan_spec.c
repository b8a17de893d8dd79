/* Plans by hand: offsets in the block, the verifier, text, and lowering of graphs that tracing does
 * not make but passes may. */
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "check.h"
#include "err.h"
#include "graph.h"
#include "op_args.h"
#include "op_ids.h"
#include "plan.h"
#include "str.h"

static uint64_t state = 1;

static int draw(int n) {
  state = state * 6364136223846793005u + 1442695040888963407u;
  return (int)((state >> 33) % (uint64_t)n);
}

/* -- Memory ------------------------------------------------------------------------------------ */

typedef struct Making {
  Plan *p;
  int n, kind;
} Making;

/* n registers on n steps that do nothing. Kinds: 0 anything, 1 a network's forward and backward, 2
 * short ones of few sizes. */
static void make_registers(void *ud) {
  Making *m = ud;
  Plan *p = m->p;
  int n = m->n;
  p->name = "spec";
  for (int i = 0; i < n; i++) {
    PlanStep *s = plan_add_step(p, &op_table[OP_neg], op_table[OP_neg].defaults, 0, NULL, 0, NULL);
    s->where = NULL;
  }
  for (int i = 0; i < n; i++) {
    int reg = plan_add_register(p, PLAN_BLOCK, -1, 0);
    PlanRegister *r = &p->registers.at[reg];
    int last = i + 1 + draw(4);
    if (m->kind == 0) r->bytes = 1 + draw(100000), last = i + draw(n);
    else if (m->kind == 1) r->bytes = 64 * (1 << draw(8)), last = i < n / 3 ? n - i : last;
    else r->bytes = 4096 * (1 + draw(6));
    r->first = i;
    r->last = last < n ? last : n - 1;
    r->stream = 0;
  }
  plan_add_stream(p, DEVICE_CPU, "compute");
  plan_add_task(p, 0, n);
}

static void place(void *ud) {
  plan_memory(((Making *)ud)->p);
}

static Plan *placed(int n, int kind, double *seconds) {
  Plan *p = plan_empty();
  Making m = {p, n, kind};
  CHECK(!arena_protect(&p->arena, make_registers, &m), "%s", err_text());
  clock_t start = clock();
  CHECK(!arena_protect(&p->arena, place, &m), "%s", err_text());
  if (seconds) *seconds = (double)(clock() - start) / CLOCKS_PER_SEC;
  return p;
}

static int64_t size_of(const PlanRegister *r) {
  return (r->bytes + PLAN_ALIGN - 1) / PLAN_ALIGN * PLAN_ALIGN;
}

static bool meet(const PlanRegister *a, const PlanRegister *b) {
  return a->first <= b->last && b->first <= a->last;
}

/* The lowest place where r meets none of those larger than it, tried one after the other. */
static int64_t first_fit(const Plan *p, size_t k) {
  const PlanRegister *r = &p->registers.at[k];
  int64_t best = INT64_MAX;
  for (size_t c = 0; c <= p->registers.n; c++) { /* behind nothing, or behind register c - 1 */
    const PlanRegister *below = c ? &p->registers.at[c - 1] : NULL;
    int64_t at = below ? below->offset + size_of(below) : 0;
    bool fits = at < best;
    for (size_t i = 0; i < p->registers.n && fits; i++) {
      const PlanRegister *o = &p->registers.at[i];
      bool before = size_of(o) > size_of(r) || (size_of(o) == size_of(r) && i < k);
      if (before && meet(o, r) && o->offset < at + size_of(r) && at < o->offset + size_of(o))
        fits = false;
    }
    if (fits) best = at;
  }
  return best;
}

static void offsets_are_first_fit_by_size(void) {
  for (int kind = 0; kind < 3; kind++) {
    for (int round = 0; round < 20; round++) {
      Plan *p = placed(1 + draw(60), kind, NULL);
      for (size_t i = 0; i < p->registers.n; i++) {
        const PlanRegister *r = &p->registers.at[i];
        CHECK(r->offset == first_fit(p, i), "register %zu at %lld, first fit %lld", i,
              (long long)r->offset, (long long)first_fit(p, i));
        for (size_t k = 0; k < i; k++) {
          const PlanRegister *o = &p->registers.at[k];
          CHECK(!meet(r, o) || r->offset >= o->offset + size_of(o) ||
                    o->offset >= r->offset + size_of(r),
                "registers %zu and %zu overlap", i, k);
        }
      }
      plan_destroy(p);
    }
  }
}

static void placing_takes_linear_time(void) {
  static const char *const kinds[] = {"anything", "network", "short"};
  for (int kind = 0; kind < 3; kind++) {
    double small = 0, large, seconds;
    for (int k = 0; k < 50; k++) {
      plan_destroy(placed(1000, kind, &seconds));
      small += seconds;
    }
    Plan *p = placed(50000, kind, &large);
    printf("%s: %.2f us a register of 1k, %.2f of 50k, ratio %.2f\n", kinds[kind], small * 20,
           large * 20, large / small);
    if (kind) CHECK(large < 4 * small, "%s: %g times as long", kinds[kind], large / small);
    plan_destroy(p);
  }
}

/* -- The verifier ------------------------------------------------------------------------------ */

static const char good[] =
    "plan \"spec\", block 192, results 1, cells 1, draws 0\n"
    "r0 input 0, 24 bytes\n"
    "r1 block, 24 bytes +0\n"
    "r2 block, 24 bytes +64\n"
    "r3 block, 24 bytes +0\n"
    "r4 result 0, 24 bytes\n"
    "r5 capture 0, 24 bytes\n"
    "r6 number 0, 8 bytes\n"
    "t0 r0 float32(2, 3)\n"
    "t1 r1 float32(2, 3)\n"
    "t2 r2 float32(2, 3)\n"
    "t3 r3 float32(2, 3)\n"
    "t4 r4 float32(2, 3)\n"
    "t5 r5 float32(2, 3)\n"
    "t6 r6 float64()!\n"
    "n0 float64 cell 0 0.5\n"
    "input \"x0\" t0\n"
    "capture \"w\" t5 written\n"
    "result t4\n"
    "stream cpu \"compute\"\n"
    "task stream 0, steps 5\n"
    "step t1 = exp(t0)\n"
    "step t2 = add(t1, t6; alpha=2) \"a.lua:1\"\n"
    "step t3 = mul(t2, t0)\n"
    "step t4 = add(t3, t5; ; alpha=cell 0)\n"
    "step t5 = exp(t4)\n";

static char *replaced(const char *from, const char *to) {
  const char *at = strstr(good, from);
  char *text = malloc(sizeof good + strlen(to));
  if (!at) abort();
  memcpy(text, good, (size_t)(at - good));
  strcpy(text + (at - good), to);
  strcat(text, at + strlen(from));
  return text;
}

static void text_reads_back(void) {
  Str a = {0}, b = {0};
  Plan *p = plan_parse(good);
  CHECK(p, "%s", err_text());
  if (!p) return;
  plan_print(p, &a);
  Plan *q = plan_parse(a.text);
  CHECK(q, "%s\n%s", err_text(), a.text);
  if (q) plan_print(q, &b);
  CHECK(q && !strcmp(a.text, b.text), "%s, then %s", a.text, b.text);
  CHECK(strstr(a.text, "r1 block, 24 bytes +0, steps 0..1\n"), "%s", a.text);
  plan_destroy(p);
  plan_destroy(q);
  str_free(&a);
  str_free(&b);
}

static void what_does_not_hold_is_refused(void) {
  static const struct {
    const char *from, *to, *want;
  } cases[] = {
      {"r2 block, 24 bytes +64", "r2 block, 24 bytes +0", "lives at the same time"},
      {"r3 block, 24 bytes +0", "r3 block, 24 bytes +64", "lives at the same time"},
      {"r3 block, 24 bytes +0", "r3 block, 24 bytes +128", NULL},
      {"r3 block, 24 bytes +0", "r3 block, 24 bytes +192", "does not lie in the block"},
      {"r3 block, 24 bytes +0", "r3 block, 24 bytes +32", "does not lie in the block"},
      {"t1 r1 float32(2, 3)", "t1 r1 float32(2, 3)/(3, 2)", "reaches"},
      {"t1 r1 float32(2, 3)", "t1 r1 float32(2, 3)+1", "reaches"},
      {"t1 r1 float32(2, 3)", "t1 r1 float32(3, 2)", "output 0 is not what"},
      {"t1 r1 float32(2, 3)", "t1 r1 int32(2, 3)", "output 0 is not what"},
      {"step t1 = exp(t0)\n", "step t1 = exp(t3)\n", "which nothing has written"},
      {"step t1 = exp(t0)\n", "step t0 = exp(t0)\n", "not to be written"},
      {"step t1 = exp(t0)\n", "step t1 = exp(t0, t0)\n", "2 inputs"},
      {"step t1 = exp(t0)\n", "step t1 = exp(-)\n", "t-1 is not there"},
      {"step t1 = exp(t0)\n", "step exp(t0)\n", "it has more"},
      {"step t1 = exp(t0)\n", "step t1, t2 = exp(t0)\n", "2 outputs, it has 1"},
      {"step t1 = exp(t0)\n", "step t1 = t(t0)\n", "no kernel"},
      {" written", "", "not to be written"},
      {"result t4", "result t5", "lies elsewhere"},
      {"input 0, 24", "input 1, 24", "of which there is none"},
      {"results 1", "results 0", "of which there is none"},
      {"alpha=cell 0", "alpha=cell 1", "cell 1 cannot be"},
      {"alpha=cell 0", "a=cell 0", "cannot be an argument"},
      {"alpha=cell 0", "beta=cell 0", "no argument 'beta'"},
      {"float64 cell 0", "float64 cell 1", "is of cell 1"},
      {"steps 5", "steps 4", "do not have 5 steps"},
      {"steps 5", "steps 3\ntask stream 0, steps 2", "which nobody hands over"},
      {"r2 block, 24 bytes +64", "r2 block, 24 bytes +64, task 0 to 1", "not there"},
      {"r2 block, 24 bytes +64", "r2 block, 24 bytes +64, buffers 3", "does not lie"},
      {"r1 block", "r2 block", "'r2' is not"},
      {"t1 r1", "t1 r7", "is not r0 to r6"},
  };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    char *text = replaced(cases[i].from, cases[i].to);
    Plan *p = plan_parse(text);
    if (!cases[i].want) CHECK(p, "%s", err_text());
    else CHECK(!p && strstr(err_text(), cases[i].want), "%s: %s", cases[i].to, err_text());
    plan_destroy(p);
    free(text);
  }
}

static void every_cut_of_a_text_is_refused(void) {
  for (size_t n = 0; n < sizeof good - 2; n++) {
    char *text = strdup(good);
    text[n] = 0;
    Plan *p = plan_parse(text);
    CHECK(!p, "cut at %zu: %s", n, text);
    plan_destroy(p);
    text = strcpy(text, good);
    text[n] = '#';
    p = plan_parse(text);
    bool quoted = p && (strstr(text, "\"") != NULL); /* names may be anything */
    CHECK(!p || quoted, "# at %zu", n);
    plan_destroy(p);
    free(text);
  }
}

/* -- Lowering ---------------------------------------------------------------------------------- */

typedef struct Lowered {
  Graph *g;
  const Op *op;
  bool number;
} Lowered;

static GraphNode *port(Graph *g, GraphKind kind, const char *name, int n, const int64_t *shape) {
  GraphNode *node = graph_add(g, kind, 0, 1);
  Meta *m = arena_new(&g->arena, Meta);
  m->dtype = F32;
  m->ndim = (int8_t)n;
  memcpy(m->shape, shape, sizeof *shape * (size_t)n);
  shape_contiguous(n, shape, m->stride);
  node->meta = m;
  node->name = name;
  graph_describe(g, &node->out[0], F32, DEVICE_CPU, n, shape);
  return node;
}

static GraphNode *apply(Graph *g, int id, const void *args, int n_in, GraphValue *const *in,
                        const int64_t *shape, int n_written) {
  const Op *op = &op_table[id];
  GraphNode *n = graph_add_op(g, NULL, op, args ? args : op->defaults, n_in, in, 1);
  graph_describe(g, &n->out[0], F32, DEVICE_CPU, 2, shape);
  n->n_written = n_written;
  n->written = arena_array(&g->arena, int, 1);
  return n;
}

/* In-place ops on a value that is an expanded row: a clone that a pass took away. */
static void build_expanded(void *ud) {
  Graph *g = ((Lowered *)ud)->g;
  static const int64_t row[] = {3}, all[] = {4, 3};
  GraphNode *x = port(g, GRAPH_INPUT, "x0", 1, row), *y = port(g, GRAPH_INPUT, "x1", 2, all);
  GraphValue *in[2] = {&x->out[0], &y->out[0]};
  GraphNode *own = graph_add_op(g, NULL, &op_table[OP_exp], op_table[OP_exp].defaults, 1, in, 1);
  graph_describe(g, &own->out[0], F32, DEVICE_CPU, 1, row);
  struct expand_args wide = {.size = {2, {4, 3}}};
  in[0] = &own->out[0];
  in[0] = &apply(g, OP_expand, &wide, 1, in, all, 0)->out[0];
  GraphNode *n = apply(g, OP_copy_, NULL, 2, in, all, 1);
  *list_add(&g->arena, &g->results) = &n->out[0];
}

static void nothing_expanded_is_written(void) {
  Graph *g = graph_create("spec");
  Lowered l = {.g = g};
  CHECK(!arena_protect(&g->arena, build_expanded, &l), "%s", err_text());
  Plan *p = plan_create(g, &(PlanOptions){0});
  CHECK(p, "%s", err_text());
  for (size_t i = 0; p && i < p->steps.n; i++) {
    const PlanStep *s = &p->steps.at[i];
    if (s->op->id != OP_copy_) continue;
    const Meta *m = &p->tensors.at[s->in[0]].meta;
    CHECK(m->stride[0] == 3, "it writes with stride %lld", (long long)m->stride[0]);
  }
  plan_destroy(p);
  graph_destroy(g);
}

/* One capture's end is what another holds at the start, and the other is written too. */
static void build_ring(void *ud) {
  Graph *g = ((Lowered *)ud)->g;
  static const int64_t all[] = {2, 3};
  GraphNode *c[3], *w;
  for (int k = 0; k < 3; k++) c[k] = port(g, GRAPH_CAPTURE, "c", 2, all);
  GraphValue *in[2] = {&c[0]->out[0], NULL};
  GraphNode *n = apply(g, OP_exp, NULL, 1, in, all, 0); /* may not take c0, which c1 becomes */
  *list_add(&g->arena, &g->results) = &n->out[0];
  for (int k = 0; k < 3; k++) {
    w = graph_add(g, GRAPH_WRITE, 1, 0);
    w->in[0] = &c[(k + 2) % 3]->out[0];
    w->target = c[k];
  }
}

static void rings_of_captures_are_saved_first(void) {
  Graph *g = graph_create("spec");
  Lowered l = {.g = g};
  CHECK(!arena_protect(&g->arena, build_ring, &l), "%s", err_text());
  Plan *p = plan_create(g, &(PlanOptions){0});
  CHECK(p, "%s", err_text());
  bool overwritten[3] = {false};
  for (size_t i = 0; p && i < p->steps.n; i++) {
    const PlanStep *s = &p->steps.at[i];
    for (int k = s->op->id == OP_copy_; k < s->n_in; k++) {
      const PlanRegister *r = &p->registers.at[p->tensors.at[s->in[k]].reg];
      CHECK(r->home != PLAN_CAPTURE || !overwritten[r->port], "step %zu reads c%d too late", i,
            r->port);
    }
    if (s->op->id == OP_copy_)
      overwritten[p->registers.at[p->tensors.at[s->in[0]].reg].port] = true;
  }
  CHECK(overwritten[0] && overwritten[1] && overwritten[2], "not all are written");
  plan_destroy(p);
  graph_destroy(g);
}

int main(void) {
  RUN(offsets_are_first_fit_by_size);
  RUN(placing_takes_linear_time);
  RUN(text_reads_back);
  RUN(what_does_not_hold_is_refused);
  RUN(every_cut_of_a_text_is_refused);
  RUN(nothing_expanded_is_written);
  RUN(rings_of_captures_are_saved_first);
  return check_end();
}
