/* The passes in their order. A name may stand in several lines; its switch is for all of them.
 *
 * Results that share memory do so because one is a view of the other: the caller, who may write
 * into one of them, can tell. A pass that makes two results one value must not make them one
 * memory, so after each pass those that came together get a copy. */
#include <stdio.h>
#include <string.h>

#include "err.h"
#include "op_ids.h"
#include "pass.h"

const Pass pass_table[] = {
    {"dce", pass_dce, "traces are long, and much of the backward of a frozen layer is of no use"},
    {"fuse_attention", pass_fuse_attention,
     "before amp and algebra, which change what is between its products"},
    {"dce", pass_dce, "what that has left"},
    {"amp", pass_amp, "before the others, which clean up behind it"},
    {"time", pass_time, "behind amp, so that parameters are cast once a step"},
    {"fold", pass_fold, "before algebra, whose rules look for constants"},
    {"algebra", pass_algebra, "before cse: different ways to say one thing become one"},
    {"cse", pass_cse, "what is equal is computed once"},
    {"remat", pass_remat, "behind cse, which would make one of what is computed twice"},
    {"zero", pass_zero, "before sbp, which goes by how captures lie"},
    {"sbp", pass_sbp, "when all ops are there that the user's tensors go through"},
    {"boxing", pass_boxing, "puts in what sbp has found to be missing"},
    {"part", pass_part, "what follows looks at one rank's shapes"},
    {"buckets", pass_buckets, "before updates, which begin when their gradients are there"},
    {"fuse_loss", pass_fuse_loss,
     "behind cse, for logits that are one value; dce cleans up behind it"},
    {"dce", pass_dce, "what the others left without use"},
    {"layout", pass_layout, "when all convolutions are there, and before ops that hide others"},
    {"fuse_norm", pass_fuse_norm, "before fuse_pointwise, which would take its sums and relus"},
    {"fuse_act", pass_fuse_act, "behind fuse_norm, which wants relus too"},
    {"recompute", pass_recompute, "behind cse, which would undo it; fuse_pointwise takes it in"},
    {"fuse_sum_norm", pass_fuse_sum_norm,
     "behind recompute, which wants normalisations alone, and before fuse_pointwise"},
    {"fuse_pointwise", pass_fuse_pointwise, "behind all that look for ops, which it hides"},
    {"fuse_clip", pass_fuse_clip, "before updates, whose parts are scaled each by itself"},
    {"updates", pass_updates, "goes by the order, which fuse_pointwise changes"},
    {"remat_budget", pass_remat_budget,
     "all others save memory without more work, or make the order"},
    {"dce", pass_dce, "what is only computed anew need not be computed before"},
};
const int pass_count = (int)(sizeof pass_table / sizeof pass_table[0]);

uint64_t pass_bits(const char *name) {
  uint64_t bits = 0;
  for (int k = 0; k < pass_count; k++)
    if (!strcmp(pass_table[k].name, name)) bits |= UINT64_C(1) << k;
  return bits;
}

/* -- Results ----------------------------------------------------------------------------------- */

/* Whose memory v lies in. */
static GraphValue *root_of(GraphValue *v) {
  while (v->node->kind == GRAPH_OP && v->node->op->spec[0]->flags & OP_VIEW) v = v->node->in[0];
  return v;
}

/* For each result the place, from 1, of the first that shares its memory. */
static size_t *sharing(Graph *g) {
  size_t *first = arena_array(&g->arena, size_t, g->results.n);
  for (size_t i = 0; i < g->results.n; i++) root_of(g->results.at[i])->mark = NULL;
  for (size_t i = 0; i < g->results.n; i++) {
    GraphValue *root = root_of(g->results.at[i]);
    if (!root->mark) root->mark = (void *)(uintptr_t)(i + 1);
    first[i] = (size_t)(uintptr_t)root->mark;
  }
  for (size_t i = 0; i < g->results.n; i++) root_of(g->results.at[i])->mark = NULL;
  return first;
}

static GraphValue *copy_of(Graph *g, GraphValue *v) {
  GraphNode *at = g->last; /* the first write */
  while (at && at->kind == GRAPH_WRITE) at = at->prev;
  at = at ? at->next : g->first;
  const Op *op = &op_table[OP_clone];
  GraphNode *n = graph_add_op(g, at, op, op->defaults, 1, &v, 1);
  n->where = v->node->where;
  graph_describe(g, &n->out[0], (DType)v->dtype, v->device, v->ndim, v->shape);
  return &n->out[0];
}

static void separate(Graph *g, const size_t *before) {
  const size_t *now = sharing(g);
  for (size_t i = 0; i < g->results.n; i++)
    if (now[i] != i + 1 && before[i] != before[now[i] - 1])
      g->results.at[i] = copy_of(g, g->results.at[i]);
}

/* -- Running ----------------------------------------------------------------------------------- */

typedef struct Running {
  Graph *g;
  const Pass *pass;
  const PassSettings *settings;
} Running;

static void run(void *ud) {
  Running *r = ud;
  const size_t *before = sharing(r->g);
  r->pass->run(r->g, r->settings);
  separate(r->g, before);
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
    if (pass_table[k].run == pass_part && s->agree && g->placements.n)
      rc = s->agree(s->agree_ud, g);
    if (!rc) rc = pass_run(g, k, s);
    if (!rc) show(s, "pass ", pass_table[k].name, g);
  }
  return rc;
}
