#include "again.h"

#include <stdlib.h>

Again again_begin(Graph *g, bool (*is_anew)(void *, const GraphValue *, const GraphNode *),
                  void *ud) {
  Again r = {.g = g, .is_anew = is_anew, .ud = ud};
  r.copies = arena_array(&g->arena, GraphNode *, g->last ? g->last->id + 1 : 0);
  return r;
}

bool again_is_beside(const GraphNode *n, const GraphNode *user) {
  if (n->kind != GRAPH_OP || n->op->spec[0]->flags & (OP_GATHERS | OP_SPREADS)) return false;
  return (n->times > 1) == graph_is_micro(user);
}

static int by_id(const void *a, const void *b) {
  const GraphNode *x = *(GraphNode *const *)a, *y = *(GraphNode *const *)b;
  return x->id < y->id ? -1 : x->id > y->id;
}

/* Puts into the list the nodes of inputs of n that `user` gets anew and that have no copy, once. */
static void add_needed(Again *r, const GraphNode *n, GraphNode *user) {
  for (int k = 0; k < n->n_in; k++) {
    const GraphValue *v = n->in[k];
    if (!v || r->copies[v->node->id] || !r->is_anew(r->ud, v, user)) continue;
    r->copies[v->node->id] = v->node; /* soon */
    *list_add(&r->g->arena, &r->work) = v->node;
  }
}

static void replace_inputs(Again *r, const GraphNode *like, GraphNode *n, GraphNode *user) {
  for (int k = 0; k < n->n_in; k++) {
    GraphValue *v = like->in[k];
    if (v && r->is_anew(r->ud, v, user)) n->in[k] = &r->copies[v->node->id]->out[v->output];
  }
}

void again_inputs(Again *r, GraphNode *user) {
  r->work.n = 0;
  add_needed(r, user, user);
  for (size_t i = 0; i < r->work.n; i++) add_needed(r, r->work.at[i], user);
  if (r->work.n > 1) qsort(r->work.at, r->work.n, sizeof *r->work.at, by_id);
  for (size_t i = 0; i < r->work.n; i++) {
    const GraphNode *n = r->work.at[i];
    GraphNode *copy = graph_copy_op(r->g, user, n);
    copy->id = -1;
    r->copies[n->id] = copy;
    replace_inputs(r, n, copy, user);
  }
  replace_inputs(r, user, user, user);
}
