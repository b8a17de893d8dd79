/* Activation checkpointing where the user asked for it.
 *
 * A node with a segment was traced inside of mf.utils.checkpoint. What such nodes make is not to
 * lie in memory until the backward: only what the checkpointed function returned is `kept`. So
 * whoever stands outside of the segment and uses a value of it that is not kept, which is its
 * backward, gets it from a copy of its node. Copies stand right before the first who needs them,
 * and are made once for all later ones; a copy takes its inputs the same way, back to what is kept,
 * to captures and to arguments.
 *
 * A copy computes the same bits: it is the same op on the same values, also a random one, whose
 * stream number is an argument. An op that writes into captures (BatchNorm its statistics) writes
 * only once: in a functional graph the copy's writes are values that nobody uses, and the write
 * nodes stay with the first. So results do not change.
 *
 * With micro-batches a copy is of each of them, as what it copies. Where one reads what was made
 * once a step it takes that itself: it lasts until the last of them anyway.
 *
 * It stands behind cse, which would merge a copy with what it copies, and before dce, since what
 * only the backward used is left in the forward without use. Passes before it keep the marks: what
 * replaces a node of a segment belongs to it, and what comes to be used from outside is kept
 * (graph_keep). It ends after one step a node and one a copy; of each node there is one at most. */
#include "again.h"
#include "pass.h"

static bool is_anew(void *ud, const GraphValue *v, const GraphNode *user) {
  (void)ud;
  const GraphNode *n = v->node;
  return n->segment && !n->kept && user->kind == GRAPH_OP && user->segment != n->segment &&
         again_is_beside(n, user);
}

void pass_remat(Graph *g, const PassSettings *s) {
  (void)s;
  if (!g->segments) return;
  Again r = again_begin(g, is_anew, NULL);
  for (GraphNode *n = g->first; n; n = n->next)
    if (n->id >= 0) again_inputs(&r, n);
  for (GraphNode *n = g->first; n; n = n->next) n->segment = n->kept = 0;
}
