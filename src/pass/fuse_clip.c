/* Gradients that are scaled before an optimiser's update are scaled by it.
 *
 * Why: clipping by the common norm multiplies all gradients by one number, and costs a read and a
 * write of them all; the update reads them anyway.
 *
 * It gets any graph. A scale_all_ goes where each of its results is read once, as a gradient of an
 * update of which all gradients come from it; where a gradient outlives the step, it is left. What
 * the update computes with is rounded as it would be in memory, so values stay equal bit for bit.
 * One walk, in which nodes only go: it ends. */
#include "op_ids.h"
#include "pass.h"
#include "readers.h"
#include "updates.h"

typedef LIST(GraphNode *) NodeList;

/* The node that scales all gradients of n, when it is an update that may take the factor. */
static GraphNode *scale_of(const GraphNode *n) {
  int places = updates_places(n);
  GraphNode *scale = places ? n->in[UPDATES_GRADS * places]->node : NULL;
  if (!scale || n->in[n->n_in - UPDATES_BEHIND] || !graph_is_op(scale, OP_scale_all_)) return NULL;
  for (int i = 0; i < places; i++) {
    const GraphValue *grad = n->in[UPDATES_GRADS * places + i];
    if (grad->node != scale || grad->dtype != n->in[i]->dtype) return NULL;
  }
  return scale;
}

/* How many of the gradients that a node gives are for such updates: its mark. */
static int64_t taken(const GraphNode *scale) {
  return (int64_t)(intptr_t)scale->mark;
}

/* Whether they are all, and nothing else reads one. */
static bool may_go(const GraphNode *scale) {
  for (int k = 0; k < scale->n_out; k++)
    if (readers_of(&scale->out[k])->n != 1) return false;
  return !scale->n_patches && taken(scale) == scale->n_out;
}

static void take_factor(GraphNode *n, const GraphNode *scale) {
  int places = updates_places(n);
  for (int i = 0; i < places; i++) {
    GraphValue **grad = &n->in[UPDATES_GRADS * places + i];
    *grad = scale->in[scale->written[(*grad)->output]];
  }
  n->in[n->n_in - UPDATES_BEHIND] = scale->in[0];
}

void pass_fuse_clip(Graph *g, const PassSettings *settings) {
  NodeList updates = {0}, scales = {0};
  (void)settings;
  if (!g->has[OP_scale_all_]) return;
  readers_find(g);
  for (GraphNode *n = g->first; n; n = n->next) {
    GraphNode *scale = scale_of(n);
    if (!scale) continue;
    if (!scale->mark) *list_add(&g->arena, &scales) = scale;
    scale->mark = (void *)(intptr_t)(taken(scale) + updates_places(n));
    *list_add(&g->arena, &updates) = n;
  }
  for (size_t i = 0; i < scales.n; i++)
    if (!may_go(scales.at[i])) scales.at[i]->mark = NULL;
  for (size_t i = 0; i < updates.n; i++) {
    GraphNode *n = updates.at[i], *scale = scale_of(n);
    if (scale && scale->mark) take_factor(n, scale);
  }
  for (size_t i = 0; i < scales.n; i++)
    if (scales.at[i]->mark) graph_remove(g, scales.at[i]);
  graph_clear_marks(g);
}
