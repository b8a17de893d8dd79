/* Dead code: nodes whose values nobody needs.
 *
 * Gets any graph. What is needed begins with results and writes; a node is needed when one of its
 * values is. As nodes stand in an order that makes before it uses, one walk from the last node to
 * the first has seen all uses of a node when it comes to it, so it ends after one step a node. A
 * write that leaves in a capture what is there at the start is no need of anything, and goes too.
 *
 * Inputs and captures stay, used or not: the job binds them by their place. So does what one rank
 * communicates, since others may count on it. Random ops go as any
 * other: each has its stream number, so that the others draw what they drew. The errors that a
 * kernel would have raised about its data (an index out of range) go with it. */
#include "op_comm.h"
#include "pass.h"

#define NEEDED ((void *)g)

static bool is_root(const GraphNode *n) {
  if (n->kind == GRAPH_OP) return op_is_comm(n->op);
  return n->kind == GRAPH_WRITE || n->kind == GRAPH_INPUT || n->kind == GRAPH_CAPTURE;
}

void pass_dce(Graph *g, const PassSettings *s) {
  (void)s;
  for (size_t i = 0; i < g->results.n; i++) g->results.at[i]->node->mark = NEEDED;
  for (GraphNode *n = g->last, *prev; n; n = prev) {
    prev = n->prev;
    bool vain = n->kind == GRAPH_WRITE && n->in[0] == &n->target->out[0];
    if (vain || (!is_root(n) && !n->mark)) {
      graph_remove(g, n);
      continue;
    }
    for (int k = 0; k < n->n_in; k++)
      if (n->in[k]) n->in[k]->node->mark = NEEDED;
  }
}
