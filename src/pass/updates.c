/* An optimiser's update is done in parts, each as soon as its gradients are there.
 *
 * Why: the program updates all its parameters at the end, so all gradients are alive there
 * together, which is as much memory as the parameters have. A parameter whose gradient is there and
 * which nothing reads any more can be updated at once, and the gradient's memory is free for the
 * next; besides, small gradients are then still in the cache. Where the gradients are clipped by
 * their common norm they come all at once, and the update stays whole.
 *
 * A gradient that is a large share of all, and larger than what it is made of, is made last: early
 * in the backward pass, where the last layer's is made, all activations are alive as well.
 *
 * It gets any graph. An update is an op of the table below, whose inputs are lists of one length:
 * what it does to the items of one place, no other place has to do with; behind them stand two
 * tensors that may be there (updates.h). The places are put in the order in which they can be
 * updated, and joined to parts of at least PART bytes of gradients and one in PARTS of all, so that
 * small ones do not cost a launch each, and that what the products around work with is not driven
 * out of the cache too often. Results are equal bit for bit. There is one walk over the graph and
 * one over each update's inputs, sorted once: it ends. */
#include <stdlib.h>
#include <string.h>

#include "op_args.h"
#include "op_ids.h"
#include "op_program.h"
#include "pass.h"
#include "updates.h"

enum {
  PART = 1 << 22,
  PARTS = 16,
  LARGE = 8, /* a large share: one in so many */
  GRADS = UPDATES_GRADS
};

/* One place of the lists; `after`: the last node that has to come before. */
typedef struct Item {
  GraphNode *after;
  int place;
} Item;

typedef struct Update {
  GraphNode *node;
  int places;
  int64_t part; /* the least bytes of gradients of a part */
  Item *items;  /* sorted */
} Update;

/* Of a value: the one in whose memory it lies, and the last two nodes that read that. */
typedef struct Root {
  struct Root *of;
  GraphNode *last, *before;
  int readers; /* of the value itself */
} Root;

static const int update_ops[] = {OP_sgd_,     OP_adam_,     OP_adagrad_,
                                 OP_rmsprop_, OP_adadelta_, OP_adamax_};
enum { UPDATE_OPS = sizeof update_ops / sizeof update_ops[0] };

static bool is_update(const GraphNode *n) {
  for (int i = 0; i < UPDATE_OPS; i++)
    if (graph_is_op(n, update_ops[i])) return true;
  return false;
}

static void note_reader(const GraphValue *v, GraphNode *n) {
  if (!v) return;
  Root *own = v->mark, *root = own->of;
  own->readers++;
  if (root->last == n) return;
  root->before = root->last;
  root->last = n;
}

/* The marks of values become Roots; those that the end needs are read by the last node. */
static void find_readers(Graph *g) {
  for (GraphNode *n = g->first; n; n = n->next) {
    bool view = n->kind == GRAPH_OP && n->op->spec[0]->flags & OP_VIEW;
    for (int k = 0; k < n->n_out; k++) {
      Root *root = arena_new(&g->arena, Root);
      n->out[k].mark = root;
      root->of = view ? ((Root *)n->in[0]->mark)->of : root;
      root->last = root->before = n;
    }
    for (int k = 0; k < n->n_in; k++) note_reader(n->in[k], n);
  }
  for (size_t i = 0; i < g->results.n; i++) note_reader(g->results.at[i], g->last);
}

static GraphNode *later(GraphNode *a, GraphNode *b) {
  return b->id > a->id ? b : a;
}

/* After which node the items at `place` can be updated by n. */
static GraphNode *ready(const GraphNode *n, int places, int place) {
  GraphNode *after = n->in[place]->node;
  const GraphValue *factor = n->in[n->n_in - UPDATES_BEHIND];
  if (factor) after = later(after, factor->node);
  for (int k = place; k < n->n_in - UPDATES_BEHIND; k += places) {
    const Root *root = ((Root *)n->in[k]->mark)->of;
    after = later(after, n->in[k]->node);
    if (k / places != GRADS) after = later(after, root->last == n ? root->before : root->last);
  }
  return after->id < n->id ? after : n->prev;
}

int updates_places(const GraphNode *n) {
  int first, places = 0;
  if (!is_update(n) || n->n_out != n->n_written) return 0;
  op_inputs_of_param(n->op, n->args, 0, &first, &places);
  for (int p = 1; p < n->op->n_tensors - UPDATES_BEHIND; p++) {
    int length;
    op_inputs_of_param(n->op, n->args, p, &first, &length);
    if (length && length != places) return 0;
  }
  return places;
}

/* The same, but 0 where a tensor says whether the update is done at all, which depends on all
 * gradients. */
static int places_of(const GraphNode *n) {
  return is_update(n) && !n->in[n->n_in - 1] ? updates_places(n) : 0;
}

/* -- Large gradients --------------------------------------------------------------------------- */

static int64_t bytes_of(const GraphValue *v) {
  return graph_numel(v) * (int64_t)dtype_size((DType)v->dtype);
}

/* Whether the node that makes gradient v may do so at the end, and then needs less than half of its
 * memory until then. */
static bool may_wait(const GraphValue *v) {
  const GraphNode *n = v->node;
  int64_t kept = 0;
  if (n->kind != GRAPH_OP || n->n_out != 1 || n->n_patches || ((Root *)v->mark)->readers != 1)
    return false;
  for (int k = 0; k < n->n_in; k++) {
    if (!n->in[k]) continue;
    const GraphNode *from = n->in[k]->node;
    while (from->kind == GRAPH_OP && from->op->spec[0]->flags & OP_VIEW) from = from->in[0]->node;
    if (from->kind == GRAPH_CAPTURE) return false; /* which may be written before */
    kept += bytes_of(n->in[k]);
  }
  return kept < bytes_of(v) / 2;
}

static bool delay_large(Graph *g, GraphNode *n, int places) {
  int64_t all = 0;
  bool any = false;
  for (int i = 0; i < places; i++) all += bytes_of(n->in[GRADS * places + i]);
  for (int i = 0; i < places; i++) {
    const GraphValue *grad = n->in[GRADS * places + i];
    if (bytes_of(grad) < PART || bytes_of(grad) < all / LARGE || !may_wait(grad)) continue;
    graph_move(g, grad->node, n);
    any = true;
  }
  return any;
}

/* -- Parts ------------------------------------------------------------------------------------- */

static int by_time(const void *a, const void *b) {
  const Item *x = a, *y = b;
  if (x->after != y->after) return x->after->id < y->after->id ? -1 : 1;
  return x->place - y->place;
}

static Update *plan_update(Graph *g, GraphNode *n, int places) {
  Update *u = arena_new(&g->arena, Update);
  *u = (Update){.node = n, .places = places, .items = arena_array(&g->arena, Item, places)};
  for (int i = 0; i < places; i++) {
    u->items[i] = (Item){ready(n, places, i), i};
    u->part += bytes_of(n->in[GRADS * places + i]);
  }
  u->part = u->part / PARTS < PART ? PART : u->part / PARTS;
  qsort(u->items, (size_t)places, sizeof *u->items, by_time);
  return u;
}

/* How many items from the first on are a part. */
static int part_size(const Update *u, int first) {
  int64_t bytes = 0;
  for (int i = first; i < u->places; i++) {
    bool more = i > first && u->items[i].after != u->items[i - 1].after;
    if (more && bytes >= u->part) return i - first;
    bytes += bytes_of(u->node->in[GRADS * u->places + u->items[i].place]);
  }
  return u->places - first;
}

GraphNode *updates_add_part(Graph *g, const GraphNode *n, int places, int count, const int *which,
                            GraphNode *at) {
  int lists = (n->n_in - UPDATES_BEHIND) / places, n_in = 0;
  GraphValue **in = arena_array(&g->arena, GraphValue *, lists * count + UPDATES_BEHIND);
  void *args = op_copy_args(&g->arena, n->op, n->args);
  for (int i = 0; i < n->op->n_params; i++) {
    const Param *p = &n->op->params[i];
    int64_t *length = (int64_t *)(void *)((char *)args + p->offset); /* of a list */
    if (p->kind == PARAM_TENSOR && p->list && *length) *length = count;
  }
  for (int l = 0; l < lists; l++)
    for (int i = 0; i < count; i++) in[n_in++] = n->in[l * places + which[i]];
  for (int i = UPDATES_BEHIND; i > 0; i--) in[n_in++] = n->in[n->n_in - i];
  GraphNode *part = graph_add_op(g, at, n->op, args, n_in, in, n->n_written / places * count);
  int *written = arena_array(&g->arena, int, part->n_out);
  for (int k = 0; k < part->n_out; k++) {
    int first = k / count * places; /* of the list */
    GraphValue *old = &n->out[first + which[k % count]];
    written[k] = n->written[first] / places * count + k % count;
    graph_describe(g, &part->out[k], (DType)old->dtype, old->device, old->ndim, old->shape);
    old->mark = &part->out[k];
  }
  part->written = written;
  part->n_written = part->n_out;
  part->patches = n->patches;
  part->n_patches = n->n_patches;
  part->where = n->where;
  part->times = n->times;
  return part;
}

/* The update of `count` items, behind the last that they wait for. */
static void add_part(Graph *g, const Update *u, const Item *items, int count) {
  int *which = arena_array(&g->arena, int, count);
  for (int i = 0; i < count; i++) which[i] = items[i].place;
  updates_add_part(g, u->node, u->places, count, which, items[count - 1].after->next);
}

/* The nodes that others wait for stay until all parts are placed. */
void pass_updates(Graph *g, const PassSettings *settings) {
  LIST(Update *) updates = {0};
  bool any = false, moved = false;
  (void)settings;
  for (int i = 0; i < UPDATE_OPS; i++) any |= g->has[update_ops[i]];
  if (!any) return;
  find_readers(g);
  for (GraphNode *n = g->first; n; n = n->next)
    if (places_of(n)) moved |= delay_large(g, n, places_of(n));
  if (moved) {
    graph_renumber(g);
    find_readers(g);
  }
  for (GraphNode *n = g->first; n; n = n->next) {
    int places = places_of(n);
    if (!places) continue;
    Update *u = plan_update(g, n, places);
    if (part_size(u, 0) < places) *list_add(&g->arena, &updates) = u;
  }
  if (!updates.n) return;
  graph_clear_marks(g);
  for (size_t i = 0; i < updates.n; i++) {
    const Update *u = updates.at[i];
    for (int at = 0, count; at < u->places; at += count) {
      count = part_size(u, at);
      add_part(g, u, u->items + at, count);
    }
  }
  graph_replace_marked(g);
  for (size_t i = 0; i < updates.n; i++) graph_remove(g, updates.at[i]->node);
}
