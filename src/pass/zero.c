/* What each rank of the data axis would keep a copy of, it keeps a part of: the states of
 * optimisers (stage 1), gradients (2), parameters (3). The data axis is the first one of a
 * placement.
 *
 * Gets a graph of whole tensors before signatures are chosen. A place of an optimiser's update
 * whose states are captures that nothing else reads, and lie on all ranks of the axis, is sharded:
 * these captures are to lie split along dim 0 from now on, and with stage 3 so is the parameter.
 * The job lays them anew. An update of which only some places are sharded becomes two.
 *
 * The rest follows from costs: where states are split, the update is cheapest when all that it
 * reads is, so sums of gradients are formed in parts (a box of a box that nobody else reads is one,
 * so that the whole gradient is never there; with stages 1 and 2 alike, if nothing else reads it),
 * and parameters that are not sharded become whole again behind it. Values change by the order of
 * sums alone. One walk over the graph and one over each update's inputs. */
#include <string.h>

#include "op_ids.h"
#include "pass.h"
#include "updates.h"

typedef struct Zero {
  Graph *g;
  const PassSettings *s;
  int *readers; /* by value */
} Zero;

static void count_readers(Zero *z) {
  Graph *g = z->g;
  graph_renumber(g);
  z->readers = arena_array(&g->arena, int, graph_values(g) + 1);
  for (GraphNode *n = g->first; n; n = n->next)
    for (int k = 0; k < n->n_in; k++)
      if (n->in[k]) z->readers[n->in[k]->id]++;
  for (size_t i = 0; i < g->results.n; i++) z->readers[g->results.at[i]->id]++;
}

/* The layout of a captured v with the first axis splitting dim 0 too; NULL: it cannot. */
static const GraphLayout *sharded(const Zero *z, const GraphValue *v) {
  const GraphLayout *l = v->layout;
  if (v->node->kind != GRAPH_CAPTURE || !l || !v->ndim || !dtype_is_float((DType)v->dtype))
    return NULL;
  if (l->sbp.axis[0].kind != SBP_B || l->placement->size[0] < 2) return NULL;
  int64_t parts = l->placement->size[0];
  for (int a = 1; a < l->placement->n_axes; a++)
    if (l->sbp.axis[a].kind == SBP_S && l->sbp.axis[a].dim == 0) parts *= l->placement->size[a];
  if (v->shape[0] < parts || graph_numel(v) < z->s->zero_min) return NULL;
  SbpList sbp = l->sbp;
  sbp.axis[0] = sbp_split(0);
  return graph_layout(z->g, l->placement, &sbp);
}

/* Whether place i of an update can be: its states, and its parameter. */
static bool may_shard(const Zero *z, const GraphNode *n, int places, int i) {
  int lists = (n->n_in - UPDATES_BEHIND) / places;
  const GraphLayout *l = sharded(z, n->in[i]);
  if (!l || lists < 2 + (z->s->zero < 3)) return false;
  for (int k = 2; k < lists; k++) {
    const GraphValue *state = n->in[k * places + i];
    if (sharded(z, state) != l || z->readers[state->id] != 1) return false;
  }
  return true;
}

static void lay_anew(const Zero *z, GraphValue *v) {
  v->layout = v->node->anew = sharded(z, v);
}

static void shard(const Zero *z, GraphNode *n, int places, int i) {
  for (int k = 2; k < (n->n_in - UPDATES_BEHIND) / places; k++) lay_anew(z, n->in[k * places + i]);
  if (z->s->zero == 3) lay_anew(z, n->in[i]);
}

/* An update of places of which some are sharded and others are not becomes two. */
static void shard_update(Zero *z, GraphNode *n, int places) {
  int *yes = arena_array(&z->g->arena, int, places), *no = arena_array(&z->g->arena, int, places);
  int n_yes = 0, n_no = 0;
  for (int i = 0; i < places; i++) {
    if (may_shard(z, n, places, i)) yes[n_yes++] = i;
    else no[n_no++] = i;
  }
  for (int i = 0; i < n_yes; i++) shard(z, n, places, yes[i]);
  if (!n_yes || !n_no) return;
  updates_add_part(z->g, n, places, n_yes, yes, n->next);
  updates_add_part(z->g, n, places, n_no, no, n->next);
  graph_remove(z->g, n);
}

/* What is written at the end lies as its capture does. */
static void lie_anew(GraphNode *write) {
  GraphNode *box = write->in[0]->node;
  if (write->target->anew && graph_is_op(box, OP_box)) box->out[0].layout = write->target->anew;
}

void pass_zero(Graph *g, const PassSettings *s) {
  Zero z = {.g = g, .s = s};
  if (!s->zero || !g->placements.n) return;
  count_readers(&z);
  for (GraphNode *n = g->first, *next; n; n = next) {
    next = n->next;
    int places = n->kind == GRAPH_OP ? updates_places(n) : 0;
    if (places) shard_update(&z, n, places);
  }
  graph_replace_marked(g);
  for (GraphNode *n = g->last; n && n->kind == GRAPH_WRITE; n = n->prev) lie_anew(n);
}
