/* The passes in their order. A name may stand in several lines; its switch is for all of them. */
#include "pass.h"

#include <stdio.h>
#include <string.h>

#include "err.h"

const Pass pass_table[] = {
    {"dce", pass_dce, "traces are long, and much of the backward of a frozen layer is of no use"},
    {"fold", pass_fold, "before algebra, whose rules look for constants"},
    {"algebra", pass_algebra, "before cse: different ways to say one thing become one"},
    {"cse", pass_cse, "what is equal is computed once"},
    {"dce", pass_dce, "what the others left without use"},
    {"fuse_pointwise", pass_fuse_pointwise, "last: the others look for ops, which it hides"},
};
const int pass_count = (int)(sizeof pass_table / sizeof pass_table[0]);

uint64_t pass_bits(const char *name) {
  uint64_t bits = 0;
  for (int k = 0; k < pass_count; k++)
    if (!strcmp(pass_table[k].name, name)) bits |= UINT64_C(1) << k;
  return bits;
}

typedef struct Running {
  Graph *g;
  const Pass *pass;
  const PassSettings *settings;
} Running;

static void run(void *ud) {
  Running *r = ud;
  graph_renumber(r->g);
  graph_clear_marks(r->g);
  r->pass->run(r->g, r->settings);
}

static void show(const PassSettings *s, const char *stage, const char *name, Graph *g) {
  char text[64];
  if (!s->dump) return;
  snprintf(text, sizeof text, "%s%s", stage, name);
  s->dump(s->ud, text, g);
}

int pass_run(Graph *g, int k, const PassSettings *s) {
  Running r = {g, &pass_table[k], s};
  int rc = arena_protect(&g->arena, run, &r);
  return rc ? rc : graph_verify(g, pass_table[k].name);
}

int pass_run_all(Graph *g, const PassSettings *s) {
  int rc = graph_verify(g, "tracing");
  if (!rc) show(s, "graph", "", g);
  for (int k = 0; k < pass_count && !rc; k++) {
    if (s->off >> k & 1) continue;
    rc = pass_run(g, k, s);
    if (!rc) show(s, "pass ", pass_table[k].name, g);
  }
  return rc;
}
