#include "again.h"

#include "op_comm.h"

#include <stdlib.h>

Again again_begin(Graph *g, bool (*is_anew)(void *, const GraphValue *, const GraphNode *),
                  void *ud) {
  Again r = {.g = g, .is_anew = is_anew, .ud = ud};
  r.copies = arena_array(&g->arena, GraphNode *, g->last ? g->last->id + 1 : 0);
  r.made = arena_array(&g->arena, GraphNode *, graph_values(g) + 1);
  return r;
}

bool again_is_beside(const GraphNode *n, const GraphNode *user) {
  if (n->kind != GRAPH_OP || n->op->spec[0]->flags & (OP_GATHERS | OP_SPREADS)) return false;
  if (op_is_comm(n->op)) return false; /* others do not expect it */
  return (n->times > 1) == graph_is_micro(user);
}

/* In an order in which what is needed comes first: of one node, its copy, and then the last output,
 * since a value that is made from another of its node is made from one behind. */
static int by_need(const void *a, const void *b) {
  const AgainPart *x = a, *y = b;
  if (x->node != y->node) return x->node->id < y->node->id ? -1 : 1;
  if (!x->value || !y->value) return (x->value != NULL) - (y->value != NULL);
  return y->value->output - x->value->output;
}

static const Making *how_to_make(const Again *r, const GraphValue *v) {
  return r->how ? r->how(r->ud, v) : NULL;
}

/* Where what makes v anew is kept. */
static GraphNode **place_of(const Again *r, const GraphValue *v) {
  return how_to_make(r, v) ? &r->made[v->id] : &r->copies[v->node->id];
}

/* Puts into the list what of these inputs `user` gets anew and has no copy, once. */
static void add_needed(Again *r, int n_in, GraphValue *const *in, GraphNode *user) {
  for (int k = 0; k < n_in; k++) {
    if (!in[k] || !r->is_anew(r->ud, in[k], user)) continue;
    GraphNode **place = place_of(r, in[k]);
    if (*place) continue;
    *place = in[k]->node; /* soon */
    *list_add(&r->g->arena, &r->work) =
        (AgainPart){in[k]->node, how_to_make(r, in[k]) ? in[k] : NULL};
  }
}

/* The inputs of n, which are `like`. */
static void replace_inputs(Again *r, GraphValue *const *like, GraphNode *n, GraphNode *user) {
  for (int k = 0; k < n->n_in; k++) {
    GraphValue *v = like[k];
    if (!v || !r->is_anew(r->ud, v, user)) continue;
    n->in[k] = &(*place_of(r, v))->out[how_to_make(r, v) ? 0 : v->output];
  }
}

void again_inputs(Again *r, GraphNode *user) {
  r->work.n = 0;
  add_needed(r, user->n_in, user->in, user);
  for (size_t i = 0; i < r->work.n; i++) {
    AgainPart part = r->work.at[i];
    const Making *m = part.value ? how_to_make(r, part.value) : NULL;
    add_needed(r, m ? m->n_in : part.node->n_in, m ? m->in : part.node->in, user);
  }
  if (r->work.n > 1) qsort(r->work.at, r->work.n, sizeof *r->work.at, by_need);
  for (size_t i = 0; i < r->work.n; i++) {
    AgainPart part = r->work.at[i];
    const Making *m = part.value ? how_to_make(r, part.value) : NULL;
    GraphNode *copy =
        m ? making_add(r->g, user, part.value, m) : graph_copy_op(r->g, user, part.node);
    copy->id = -1;
    *(m ? &r->made[part.value->id] : &r->copies[part.node->id]) = copy;
    replace_inputs(r, m ? m->in : part.node->in, copy, user);
  }
  replace_inputs(r, user->in, user, user);
}
