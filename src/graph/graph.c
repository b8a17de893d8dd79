#include "graph.h"

#include <string.h>

#include "err.h"
#include "hard.h"
#include "mem.h"
#include "op_program.h"

static void name_graph(void *ud) {
  Graph *g = ud;
  g->name = arena_text(&g->arena, g->name);
}

Graph *graph_create(const char *name) {
  Graph *g = mem_zalloc(sizeof *g);
  if (!g) {
    err_set(MF_ENOMEM, "out of memory");
    return NULL;
  }
  g->name = name;
  g->n_generators = g->times = 1;
  if (!arena_protect(&g->arena, name_graph, g)) return g;
  graph_destroy(g);
  return NULL;
}

void graph_destroy(Graph *g) {
  if (!g) return;
  arena_free(&g->arena);
  mem_free(g);
}

/* Memory of nodes: apart from all else that is in the arena, so that a walk finds them close
 * together. */
static void *node_alloc(Graph *g, size_t bytes) {
  enum { ROOM = HARD ? 0 : 1 << 16 };
  size_t need = bytes ? (bytes + 15) & ~(size_t)15 : 16;
  if (need > g->left) {
    if (need > ROOM / 4) return arena_alloc(&g->arena, need);
    g->room = arena_alloc(&g->arena, ROOM);
    g->left = ROOM;
  }
  void *p = g->room;
  g->room += need;
  g->left -= need;
  return p;
}

static void link_before(Graph *g, GraphNode *n, GraphNode *at) {
  n->next = at;
  n->prev = at ? at->prev : g->last;
  *(n->prev ? &n->prev->next : &g->first) = n;
  *(at ? &at->prev : &g->last) = n;
}

GraphNode *graph_insert(Graph *g, GraphNode *at, GraphKind kind, int n_in, int n_out) {
  size_t out_bytes = sizeof(GraphValue) * (size_t)n_out;
  size_t in_bytes = sizeof(GraphValue *) * (size_t)n_in;
  GraphNode *n = node_alloc(g, sizeof *n + out_bytes + in_bytes);
  n->kind = (uint8_t)kind;
  n->n_in = n_in;
  n->n_out = n_out;
  if (kind == GRAPH_NUMBER) n->cell = NO_CELL;
  n->times = 1;
  n->along = -1;
  n->out = (GraphValue *)(void *)(n + 1);
  n->in = (GraphValue **)(void *)(n->out + n_out);
  for (int k = 0; k < n_out; k++) {
    n->out[k].node = n;
    n->out[k].output = k;
  }
  link_before(g, n, at);
  return n;
}

GraphNode *graph_add(Graph *g, GraphKind kind, int n_in, int n_out) {
  return graph_insert(g, NULL, kind, n_in, n_out);
}

static int times_of(const Graph *g, const GraphNode *n) {
  int flags = n->op->spec[0]->flags, times = 1;
  if (flags & (OP_SPREADS | OP_GATHERS)) return flags & OP_SPREADS ? g->times : 1;
  for (int k = 0; k < n->n_in; k++)
    if (n->in[k] && n->in[k]->node->times > times) times = n->in[k]->node->times;
  return times;
}

GraphNode *graph_add_op(Graph *g, GraphNode *at, const Op *op, const void *args, int n_in,
                        GraphValue *const *in, int n_out) {
  GraphNode *n = graph_insert(g, at, GRAPH_OP, n_in, n_out);
  n->op = op;
  n->args = node_alloc(g, op->args_size);
  op_set_args(&g->arena, op, args, n->args);
  g->has[op->id] = true;
  if (n_in) memcpy(n->in, in, sizeof *in * (size_t)n_in);
  n->segment = at ? at->segment : 0;
  n->times = times_of(g, n);
  return n;
}

GraphNode *graph_copy_op(Graph *g, GraphNode *at, const GraphNode *n) {
  GraphNode *copy = graph_add_op(g, at, n->op, n->args, n->n_in, n->in, n->n_out);
  copy->n_written = n->n_written;
  copy->written = n->written;
  copy->n_patches = n->n_patches;
  copy->patches = n->patches;
  copy->generator = n->generator;
  copy->times = n->times;
  copy->along = n->along;
  copy->where = n->where;
  copy->segment = 0;
  copy->want = n->want;
  copy->cuts = n->cuts;
  for (int k = 0; k < n->n_out; k++) {
    const GraphValue *v = &n->out[k];
    graph_describe(g, &copy->out[k], (DType)v->dtype, v->device, v->ndim, v->shape);
    copy->out[k].number = v->number;
    copy->out[k].layout = v->layout;
    copy->out[k].cut = v->cut;
  }
  return copy;
}

void graph_keep(const GraphNode *from, GraphNode *to) {
  if (to->segment && (from->kept || from->segment != to->segment)) to->kept = true;
}

void graph_describe(Graph *g, GraphValue *v, DType dtype, int device, int ndim,
                    const int64_t *shape) {
  v->dtype = (uint8_t)dtype;
  v->device = (uint8_t)device;
  v->ndim = (int8_t)ndim;
  const GraphNode *n = v->node;
  for (int k = 0; k < n->n_in && k < 2; k++) /* most are as one of the inputs */
    if (n->in[k] && shape_equal(n->in[k]->ndim, n->in[k]->shape, ndim, shape)) {
      v->shape = n->in[k]->shape;
      return;
    }
  size_t bytes = sizeof *shape * (size_t)ndim;
  v->shape = node_alloc(g, bytes);
  if (ndim) memcpy((void *)(uintptr_t)v->shape, shape, bytes);
}

void graph_remove(Graph *g, GraphNode *n) {
  *(n->prev ? &n->prev->next : &g->first) = n->next;
  *(n->next ? &n->next->prev : &g->last) = n->prev;
}

void graph_move(Graph *g, GraphNode *n, GraphNode *at) {
  graph_remove(g, n);
  link_before(g, n, at);
}

void graph_clear_marks(Graph *g) {
  for (GraphNode *n = g->first; n; n = n->next) {
    n->mark = NULL;
    for (int k = 0; k < n->n_out; k++) n->out[k].mark = NULL;
  }
}

static void forward(GraphValue **v) {
  while (*v && (*v)->mark) {
    GraphValue *to = (*v)->mark;
    graph_keep((*v)->node, to->node);
    *v = to;
  }
}

void graph_replace_results(Graph *g) {
  for (size_t i = 0; i < g->results.n; i++) forward(&g->results.at[i]);
}

void graph_replace_marked(Graph *g) {
  for (GraphNode *n = g->first; n; n = n->next)
    for (int k = 0; k < n->n_in; k++) forward(&n->in[k]);
  graph_replace_results(g);
}

void graph_replace(Graph *g, GraphValue *from, GraphValue *to) {
  graph_keep(from->node, to->node);
  for (GraphNode *n = g->first; n; n = n->next)
    for (int k = 0; k < n->n_in; k++)
      if (n->in[k] == from) n->in[k] = to;
  for (size_t i = 0; i < g->results.n; i++)
    if (g->results.at[i] == from) g->results.at[i] = to;
}

void graph_renumber(Graph *g) {
  int64_t nodes = 0, values = 0;
  for (GraphNode *n = g->first; n; n = n->next) {
    n->id = nodes++;
    for (int k = 0; k < n->n_out; k++) n->out[k].id = values++;
  }
}
