/* Common subexpressions: of equal nodes the first computes for all.
 *
 * Two nodes are equal when they are the same op with the same inputs, arguments and cells, or the
 * same number; by then their inputs are already those of the first of each kind, since the walk
 * goes in order and looks at each node once. A hash table of the nodes that stay, twice as large as
 * they are many, finds the equal one, so a node costs what its inputs and arguments cost.
 *
 * Random ops are never merged, not even with equal stream numbers. What redoes a draw
 * (dropout_backward) is merged when it redoes the same one. Ports are never merged: two arguments
 * may be one tensor in this call and not in the next. A value that is merged lives longer; that
 * this does not cost more memory than it saves time is not looked at here. */
#include <string.h>

#include "pass.h"

/* -- Equality ---------------------------------------------------------------------------------- */

static bool has(const Param *p, const void *args) {
  return !p->has_offset || *(const bool *)((const char *)args + p->has_offset);
}

/* The bytes that count of an argument, 0: none. requires_grad does not change a value. */
static size_t bytes_of(const Op *op, const Param *p, const void *args) {
  if (p->kind == PARAM_TENSOR) return p->list ? sizeof(int64_t) : 0;
  if (!has(p, args) || p->offset == op->requires_grad) return 0;
  switch ((ParamKind)p->kind) {
    case PARAM_BOOL: return sizeof(bool);
    case PARAM_GENERATOR: return sizeof(RngKey);
    case PARAM_INTS:
      if (p->fixed) return sizeof(int64_t) * p->fixed;
      return sizeof(int64_t) * (size_t)(1 + *(const int64_t *)((const char *)args + p->offset));
    default: return sizeof(int64_t);
  }
}

static bool same_arguments(const GraphNode *a, const GraphNode *b) {
  for (int i = 0; i < a->op->n_params; i++) {
    const Param *p = &a->op->params[i];
    size_t n = bytes_of(a->op, p, a->args);
    if (has(p, a->args) != has(p, b->args) || n != bytes_of(a->op, p, b->args)) return false;
    if (memcmp((char *)a->args + p->offset, (char *)b->args + p->offset, n)) return false;
  }
  if (a->n_patches != b->n_patches || a->generator != b->generator) return false;
  return !a->n_patches ||
         !memcmp(a->patches, b->patches, sizeof *a->patches * (size_t)a->n_patches);
}

static bool same_outputs(const GraphNode *a, const GraphNode *b) {
  for (int k = 0; k < a->n_out; k++) {
    const GraphValue *v = &a->out[k], *w = &b->out[k];
    if (v->dtype != w->dtype || v->device != w->device || v->layout != w->layout ||
        !shape_equal(v->ndim, v->shape, w->ndim, w->shape))
      return false;
  }
  return true;
}

static bool same(const GraphNode *a, const GraphNode *b) {
  if (a->kind != b->kind || a->op != b->op || a->n_in != b->n_in || a->n_out != b->n_out ||
      a->times != b->times)
    return false;
  if (a->kind == GRAPH_NUMBER)
    return !memcmp(&a->value, &b->value, sizeof a->value) && a->cell == b->cell &&
           same_outputs(a, b);
  for (int k = 0; k < a->n_in; k++)
    if (a->in[k] != b->in[k]) return false;
  return same_arguments(a, b) && same_outputs(a, b);
}

/* -- The table --------------------------------------------------------------------------------- */

typedef struct Entry {
  uint64_t hash;
  GraphNode *node;
} Entry;

static uint64_t mix(uint64_t h, const void *data, size_t n) {
  const unsigned char *p = data;
  for (; n >= 8; n -= 8, p += 8) {
    uint64_t word;
    memcpy(&word, p, 8);
    h = (h ^ word) * UINT64_C(0x9e3779b97f4a7c15);
    h ^= h >> 29;
  }
  for (; n; n--) h = (h ^ *p++) * UINT64_C(0x9e3779b97f4a7c15);
  return h;
}

static uint64_t hash(const GraphNode *n) {
  if (n->kind == GRAPH_NUMBER) return mix(mix(1, &n->value, sizeof n->value), &n->cell, 4);
  uint64_t h = mix(2, &n->op->id, sizeof n->op->id);
  for (int k = 0; k < n->n_in; k++) {
    int64_t id = n->in[k] ? n->in[k]->id : -1;
    h = mix(h, &id, sizeof id);
  }
  for (int i = 0; i < n->op->n_params; i++) {
    const Param *p = &n->op->params[i];
    h = mix(h, (char *)n->args + p->offset, bytes_of(n->op, p, n->args));
  }
  return h;
}

static bool may_merge(const GraphNode *n) {
  if (n->kind == GRAPH_NUMBER) return true;
  return n->kind == GRAPH_OP && n->n_out && !(n->op->spec[0]->flags & OP_RANDOM);
}

static void forward(GraphNode *n) {
  for (int k = 0; k < n->n_in; k++)
    if (n->in[k] && n->in[k]->mark) n->in[k] = n->in[k]->mark;
}

void pass_cse(Graph *g, const PassSettings *s) {
  (void)s;
  size_t count = g->last ? (size_t)g->last->id + 1 : 0, cap = 16;
  while (cap < 2 * count) cap *= 2;
  Entry *table = arena_array(&g->arena, Entry, cap);
  for (GraphNode *n = g->first; n; n = n->next) {
    forward(n);
    if (!may_merge(n)) continue;
    uint64_t h = hash(n);
    size_t i = (size_t)(h ^ h >> 32) & (cap - 1);
    while (table[i].node && !(table[i].hash == h && same(table[i].node, n)))
      i = (i + 1) & (cap - 1);
    GraphNode *first = table[i].node;
    if (!first) {
      table[i] = (Entry){h, n};
      continue;
    }
    for (int k = 0; k < n->n_out; k++) n->out[k].mark = &first->out[k];
    graph_keep(n, first);
    graph_remove(g, n);
  }
  graph_replace_results(g);
}
