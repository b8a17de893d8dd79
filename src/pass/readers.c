#include "readers.h"

static void add(const GraphValue *v, GraphNode *n) {
  Readers *r = v->mark;
  if (r->n < READERS) r->at[r->n] = n;
  r->n++;
}

void readers_find(Graph *g) {
  for (GraphNode *n = g->first; n; n = n->next)
    for (int k = 0; k < n->n_out; k++) n->out[k].mark = arena_new(&g->arena, Readers);
  for (GraphNode *n = g->first; n; n = n->next)
    for (int k = 0; k < n->n_in; k++)
      if (n->in[k]) add(n->in[k], n);
  for (size_t i = 0; i < g->results.n; i++) add(g->results.at[i], NULL);
}
