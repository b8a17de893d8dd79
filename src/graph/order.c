/* The order of a step with micro-batches: what they need of the step, what is of each of them, the
 * rest. Within these three, nodes are in the order that they had, so that a graph in order stays as
 * it is, also when each of the three has got more nodes. */
#include "graph.h"

static bool is_port(const GraphNode *n) {
  return n->kind == GRAPH_INPUT || n->kind == GRAPH_CAPTURE;
}

/* Of the nodes that are computed once, those that micro-batches need. */
static void mark_needed(Graph *g) {
  for (GraphNode *n = g->last; n; n = n->prev) {
    if (n->kind == GRAPH_WRITE) continue;
    for (int k = 0; k < n->n_out && !graph_is_micro(n); k++)
      if (n->out[k].mark) n->mark = n;
    for (int k = 0; k < n->n_in && (n->mark || n->times > 1); k++)
      if (n->in[k]) n->in[k]->mark = n;
  }
}

void graph_order(Graph *g) {
  if (g->times < 2) return;
  GraphNode *end = g->last, *next;
  while (end && end->kind == GRAPH_WRITE) end = end->prev;
  end = end ? end->next : g->first; /* the first write */
  graph_clear_marks(g);
  mark_needed(g);
  for (int part = 0; part < 3; part++) {
    GraphNode *first = NULL; /* of those that are put behind */
    for (GraphNode *n = g->first; n && n != end && n != first; n = next) {
      next = n->next;
      int belongs = is_port(n) || n->mark ? 0 : graph_is_micro(n) ? 1 : 2;
      if (is_port(n) || belongs != part) continue;
      graph_move(g, n, end);
      if (!first) first = n;
    }
  }
  graph_clear_marks(g);
}
