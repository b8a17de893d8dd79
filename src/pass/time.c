/* Micro-batches: most of the step is computed several times, for a part of the arguments each, and
 * the rest once, on what all of them have left.
 *
 * Gets the graph of a step on one micro-batch, with a micro_mean where the gradient of a captured
 * tensor ends, and makes its arguments those of the whole step. Each node then is
 *
 *   of a micro-batch   it follows from an argument that is shared out, from a draw for each sample,
 *                      or from a capture that is carried (below);
 *   late               it follows from a micro_mean of such a value: clipping, optimisers;
 *   of the step        it follows from none of these: casts of parameters, learning rates.
 *
 * Between the first and the others stand ops: micro_unpack from an argument; micro_repeat from what
 * is of the step; micro_mean, micro_pack and micro_last to what is late. Gradients are averaged, as
 * are 0-d floats that are returned or that something late reads; other results are packed along
 * dim 0. Other values of a micro-batch cannot be read late, which is an error with the user's line.
 *
 * A capture is carried when what is written to it is of a micro-batch, or is of the step and stands
 * before the last gradient, which is to say that the forward part counts something. Each
 * micro-batch reads what the one before wrote, as steps without an optimiser one after the other
 * would; so BatchNorm's statistics see each micro-batch in turn. The last value is a result.
 *
 * Random ops of a micro-batch number their elements as in the whole batch: `along` is the dim in
 * which samples lie, which follows from the ops' SBP rules as if the arguments were split on dim 0.
 * Where they do not say, it is 0, and a draw that is done again is along what it was the first
 * time. A draw without inputs is for each sample if its dim 0 is as long as that of an argument.
 *
 * A mean is put right behind what it is of: so a gradient lives but shortly, and what lasts through
 * the micro-batches is one sum for each parameter.
 *
 * Values are as in a step without micro-batches but for the order of sums over the batch. One walk
 * classifies, and again while it finds captures that are carried; another puts the ops in. */
#include <string.h>

#include "err.h"
#include "op_args.h"
#include "op_ids.h"
#include "pass.h"
#include "sbp_rule.h"

typedef enum Age { OF_STEP, OF_MICRO, LATE } Age;

/* What there is of a value beyond its own time; the mark of the value. */
typedef struct Beyond {
  GraphValue *micro; /* for each micro-batch */
  GraphValue *late;  /* left by all of them */
  GraphValue *now;   /* which has taken the value's place */
  bool carried;      /* it is what a carried capture is left with */
  bool shared_out;   /* it is an argument of which each micro-batch has a part */
} Beyond;

typedef struct Timing {
  Graph *g;
  const PassSettings *s;
  uint8_t *age;      /* by node */
  int8_t *dim;       /* by value: in which samples lie; -1: none, or not known */
  GraphNode *body;   /* the first node that is no port */
  int64_t last_mean; /* number of the last gradient that is averaged; INT64_MAX: there is none */
  bool draws;        /* some node draws */
  LIST(GraphNode *) drawing;
  LIST(GraphNode *) idle; /* means of what is of the step */
} Timing;

static Beyond *beyond(Timing *t, GraphValue *v) {
  if (!v->mark) v->mark = arena_new(&t->g->arena, Beyond);
  return v->mark;
}

static bool is_shared_out(const Timing *t, const GraphNode *n, int k) {
  return n->kind == GRAPH_INPUT && n->out[0].ndim > 0 && !(k < 64 && t->s->repeated >> k & 1);
}

static bool gathers(const GraphNode *n) {
  return n->kind == GRAPH_OP && n->op->spec[0]->flags & OP_GATHERS;
}

static RngKey *key_of(const GraphNode *n) {
  for (int i = 0; n->kind == GRAPH_OP && i < n->op->n_params; i++)
    if (n->op->params[i].kind == PARAM_GENERATOR)
      return (RngKey *)(void *)((char *)n->args + n->op->params[i].offset);
  return NULL;
}

/* -- Of what time each node is ----------------------------------------------------------------- */

/* Whether n, which draws without reading anything, draws for each sample. */
static bool is_per_sample(const Timing *t, const GraphNode *n) {
  if (!n->n_out || !n->out[0].ndim) return false;
  int k = 0;
  for (const GraphNode *p = t->g->first; p && p != t->body; p = p->next) {
    if (p->kind != GRAPH_INPUT) continue;
    if (is_shared_out(t, p, k++) && p->out[0].shape[0] == n->out[0].shape[0]) return true;
  }
  return false;
}

static Age age_of_op(const Timing *t, const GraphNode *n) {
  Age age = OF_STEP;
  bool reads = false; /* more than what was made of nothing */
  for (int k = 0; k < n->n_in; k++) {
    if (!n->in[k] || n->in[k]->number) continue;
    const GraphNode *from = n->in[k]->node;
    reads |= from->kind != GRAPH_OP || from->n_in;
    if (t->age[from->id] > age) age = (Age)t->age[from->id];
  }
  if (gathers(n) && age == OF_MICRO) return LATE;
  if (age == OF_STEP && !reads && key_of(n) && is_per_sample(t, n)) return OF_MICRO;
  return age;
}

/* The captures that are carried because of what is known now; whether one is new. */
static bool find_carried(Timing *t) {
  bool found = false;
  for (GraphNode *n = t->g->last; n && n->kind == GRAPH_WRITE; n = n->prev) {
    const GraphValue *v = n->in[0];
    Age age = (Age)t->age[v->node->id];
    bool counts = age == OF_STEP && v->node->id < t->last_mean && v != &n->target->out[0];
    if ((age != OF_MICRO && !counts) || t->age[n->target->id] == OF_MICRO) continue;
    t->age[n->target->id] = OF_MICRO;
    found = true;
  }
  return found;
}

static void find_ages(Timing *t) {
  do {
    t->last_mean = INT64_MAX;
    int input = 0;
    for (GraphNode *n = t->g->first; n; n = n->next) {
      if (n->kind == GRAPH_INPUT && is_shared_out(t, n, input++)) t->age[n->id] = OF_MICRO;
      if (n->kind != GRAPH_OP) continue;
      t->age[n->id] = (uint8_t)age_of_op(t, n);
      t->draws |= key_of(n) != NULL;
      if (gathers(n)) t->last_mean = n->id;
    }
  } while (find_carried(t));
}

/* -- In which dim samples lie ------------------------------------------------------------------ */

static void meta_of(const GraphValue *v, Meta *m) {
  *m = (Meta){.ndim = v->ndim, .dtype = v->dtype, .device = v->device, .number = v->number};
  memcpy(m->shape, v->shape, sizeof *m->shape * (size_t)v->ndim);
  shape_contiguous(v->ndim, m->shape, m->stride);
}

/* Whether inputs that have samples lie as `row` says, and (`alone`) no other is split. */
static bool suits(const Timing *t, const GraphNode *n, const Sbp *row, bool alone) {
  bool any = false;
  for (int k = 0; k < n->n_in; k++) {
    int dim = n->in[k] ? t->dim[n->in[k]->id] : -1;
    if (dim >= 0 && !(row[k].kind == SBP_S && row[k].dim == dim)) return false;
    if (dim < 0 && alone && row[k].kind != SBP_B) return false;
    any |= dim >= 0;
  }
  return any;
}

static void follow(Timing *t, const GraphNode *n) {
  int total = n->n_in + n->n_out;
  bool any = false;
  for (int k = 0; k < n->n_in; k++) any |= n->in[k] && t->dim[n->in[k]->id] >= 0;
  if (!any) return;
  Meta *metas = arena_array(&t->g->arena, Meta, total);
  const Meta **at = arena_array(&t->g->arena, const Meta *, total);
  for (int k = 0; k < total; k++) {
    const GraphValue *v = k < n->n_in ? n->in[k] : &n->out[k - n->n_in];
    if (v) meta_of(v, &metas[k]);
    at[k] = v ? &metas[k] : NULL;
  }
  int n_out = n->n_out - n->n_written;
  SbpAsk q = {.op = n->op,
              .args = n->args,
              .in = at,
              .out = at + n->n_in,
              .n_in = n->n_in,
              .n_out = n_out,
              .parts = 1};
  int rc = sbp_signatures(&q);
  for (int alone = 1, found = 0; alone >= 0 && !found && !rc; alone--)
    for (int i = 0; i < sbp_count(&q) && !found; i++) {
      const Sbp *row = sbp_row(&q, i);
      if (!suits(t, n, row, alone)) continue;
      found = 1;
      for (int k = 0; k < n_out; k++)
        if (row[n->n_in + k].kind == SBP_S) t->dim[n->out[k].id] = row[n->n_in + k].dim;
    }
  sbp_free(&q);
  for (int k = 0; k < n->n_written;
       k++) { /* new values lie like the old, or like what is written */
    int8_t dim = t->dim[n->in[n->written[k]]->id];
    t->dim[n->out[n_out + k].id] = dim;
  }
}

/* Along what n draws; the first time this stream was drawn it says so too. */
static void set_along(Timing *t, GraphNode *n) {
  const RngKey *key = key_of(n);
  int8_t dim = n->n_out ? t->dim[n->out[0].id] : -1;
  for (size_t i = 0; i < t->drawing.n; i++) {
    const GraphNode *before = t->drawing.at[i];
    if (before->generator == n->generator && key_of(before)->stream == key->stream)
      dim = before->along;
  }
  for (int k = 0; k < n->n_in && dim < 0 && n->n_out; k++) {
    const GraphValue *v = n->in[k], *y = &n->out[0];
    if (v && shape_equal(v->ndim, v->shape, y->ndim, y->shape)) dim = t->dim[v->id];
  }
  if (dim < 0) dim = 0;
  n->along = n->n_out && dim < n->out[0].ndim ? dim : -1;
  for (int k = 0; k < n->n_out; k++)
    if (n->along >= 0) t->dim[n->out[k].id] = n->along;
  *list_add(&t->g->arena, &t->drawing) = n;
}

static void find_dims(Timing *t) {
  int input = 0;
  for (GraphNode *n = t->g->first; n; n = n->next) {
    if (n->kind == GRAPH_INPUT && is_shared_out(t, n, input++)) t->dim[n->out[0].id] = 0;
    if (n->kind != GRAPH_OP || t->age[n->id] != OF_MICRO) continue;
    follow(t, n);
    if (key_of(n)) set_along(t, n);
  }
}

/* -- The ops between --------------------------------------------------------------------------- */

static GraphValue *put(Timing *t, GraphNode *at, int op, const void *args, GraphValue *v,
                       const char *where) {
  GraphNode *n = graph_add_op(t->g, at, &op_table[op], args, 1, &v, 1);
  n->where = where;
  n->segment = v->node->segment;
  graph_describe(t->g, &n->out[0], (DType)v->dtype, v->device, v->ndim, v->shape);
  return &n->out[0];
}

/* v for each micro-batch: what is of the step is repeated, before all of them. */
static GraphValue *for_micro(Timing *t, GraphValue *v) {
  Beyond *b = beyond(t, v);
  if (b->micro || v->number || t->age[v->node->id] == OF_MICRO) return b->micro ? b->micro : v;
  GraphNode *at = v->node->kind == GRAPH_OP ? v->node->next : t->body;
  return b->micro =
             put(t, at, OP_micro_repeat, op_table[OP_micro_repeat].defaults, v, v->node->where);
}

static GraphValue *mean_of(Timing *t, GraphValue *v) {
  struct micro_mean_args args = {.n = t->s->times};
  return put(t, v->node->next, OP_micro_mean, &args, v, v->node->where);
}

/* What all micro-batches leave of v, which is of each of them; NULL: it cannot be said. */
static GraphValue *left_of(Timing *t, GraphValue *v, bool pack) {
  Beyond *b = beyond(t, v);
  if (b->late) return b->late;
  GraphValue *x = for_micro(t, v);
  if (b->carried || (v->node->kind == GRAPH_CAPTURE)) {
    GraphNode *at = v->node->kind == GRAPH_OP ? v->node->next : t->body;
    return b->late = put(t, at, OP_micro_last, op_table[OP_micro_last].defaults, x, v->node->where);
  }
  if (!v->ndim && dtype_is_float((DType)v->dtype)) return b->late = mean_of(t, x);
  if (!pack) return NULL;
  struct micro_pack_args args = {.n = t->s->times};
  int64_t shape[MF_MAX_DIMS];
  memcpy(shape, v->shape, sizeof *shape * (size_t)v->ndim);
  shape[0] = (v->ndim ? v->shape[0] : 1) * args.n;
  GraphValue *y = put(t, x->node->next, OP_micro_pack, &args, x, v->node->where);
  graph_describe(t->g, y, (DType)v->dtype, v->device, v->ndim ? v->ndim : 1, shape);
  return b->late = y;
}

/* An argument becomes that of the whole step. */
static void unpack_input(Timing *t, GraphNode *n) {
  GraphValue *v = &n->out[0];
  struct micro_unpack_args args = {.n = t->s->times};
  Meta *m = arena_copy(&t->g->arena, n->meta, sizeof *m);
  int64_t part[MF_MAX_DIMS];
  int64_t whole[MF_MAX_DIMS];
  memcpy(part, v->shape, sizeof *part * (size_t)v->ndim);
  memcpy(whole, v->shape, sizeof *whole * (size_t)v->ndim);
  whole[0] *= args.n;
  if (!v->layout)
    m->shape[0] *= args.n; /* else it is the memory of this rank's part of the whole */
  n->meta = m;
  t->age[n->id] = OF_STEP;
  graph_describe(t->g, v, (DType)v->dtype, v->device, v->ndim, whole);
  GraphValue *y = put(t, t->body, OP_micro_unpack, &args, v, NULL);
  graph_describe(t->g, y, (DType)v->dtype, v->device, v->ndim, part);
  *beyond(t, v) = (Beyond){.micro = y, .shared_out = true};
}

static _Noreturn void refuse(Timing *t, const GraphNode *n, const GraphValue *v) {
  int rc = err_set(MF_EUNSUPPORTED,
                   "%s%s%s: reads what one micro-batch has (of %s) together with what all of them "
                   "left, such as gradients; only numbers, as means, can be read so",
                   n->where ? n->where : "", n->where ? ": " : "", n->op->name,
                   v->node->kind == GRAPH_OP ? v->node->op->name : "an argument");
  arena_throw(&t->g->arena, rc);
}

static GraphValue *current(GraphValue *v) {
  const Beyond *b = v ? v->mark : NULL;
  return b && b->now ? b->now : v;
}

static bool is_of_micro(const Timing *t, const GraphValue *v) {
  return t->age[v->node->id] == OF_MICRO || (v->mark && ((const Beyond *)v->mark)->shared_out);
}

static void connect(Timing *t, GraphNode *n) {
  Age age = (Age)t->age[n->id];
  for (int k = 0; k < n->n_in; k++) {
    GraphValue *v = n->in[k] = current(n->in[k]);
    if (!v || v->number) continue;
    if (age == OF_MICRO || (gathers(n) && age == LATE)) n->in[k] = for_micro(t, v);
    else if (is_of_micro(t, v) && !(n->in[k] = left_of(t, v, false))) refuse(t, n, v);
  }
  if (age == OF_MICRO) n->times = t->s->times;
  if (gathers(n) && age == LATE && n->in[0]->node->next != n)
    graph_move(t->g, n, n->in[0]->node->next);
  if (gathers(n) && age == OF_STEP) {
    beyond(t, &n->out[0])->now = n->in[0];
    *list_add(&t->g->arena, &t->idle) = n;
  }
}

/* A result that was to lie so on the ranks. */
static GraphValue *lying_as(Timing *t, GraphValue *v, const GraphLayout *l) {
  if (!l) return v;
  GraphValue *y = put(t, v->node->next, OP_box, op_table[OP_box].defaults, v, v->node->where);
  y->layout = l;
  return y;
}

/* -- The pass ---------------------------------------------------------------------------------- */

static void begin(Timing *t) {
  Graph *g = t->g;
  int input = 0;
  t->body = g->first;
  while (t->body && (t->body->kind == GRAPH_INPUT || t->body->kind == GRAPH_CAPTURE))
    t->body = t->body->next;
  t->age = arena_array(&g->arena, uint8_t, g->last->id + 1);
  t->dim = arena_array(&g->arena, int8_t, graph_values(g) + 1);
  memset(t->dim, -1, (size_t)graph_values(g) + 1);
  find_ages(t);
  if (t->draws) find_dims(t);
  g->times = t->s->times;
  for (GraphNode *n = g->first; n != t->body; n = n->next) {
    if (n->kind == GRAPH_CAPTURE && t->age[n->id] == OF_MICRO) n->times = g->times;
    if (n->kind == GRAPH_INPUT && is_shared_out(t, n, input++)) unpack_input(t, n);
  }
  for (GraphNode *n = g->last; n && n->kind == GRAPH_WRITE; n = n->prev)
    if (n->target->times > 1) beyond(t, n->in[0])->carried = true;
}

void pass_time(Graph *g, const PassSettings *s) {
  Timing t = {.g = g, .s = s};
  if (s->times < 2 || !g->first) return;
  begin(&t);
  int64_t count = g->last->id + 1;
  GraphNode **nodes = arena_array(&g->arena, GraphNode *, count);
  for (GraphNode *n = t.body; n; n = n->next) nodes[n->id] = n;
  for (int64_t i = 0; i < count; i++)
    if (nodes[i] && nodes[i]->kind == GRAPH_OP) connect(&t, nodes[i]);
  for (GraphNode *n = g->last; n && n->kind == GRAPH_WRITE; n = n->prev) {
    GraphValue *v = current(n->in[0]);
    n->times = n->target->times;
    n->in[0] = n->times > 1 ? for_micro(&t, v) : is_of_micro(&t, v) ? left_of(&t, v, true) : v;
  }
  for (size_t i = 0; i < g->results.n; i++) {
    GraphValue *v = current(g->results.at[i]);
    bool whole = v->node->kind == GRAPH_INPUT || !is_of_micro(&t, v);
    g->results.at[i] = whole ? v : lying_as(&t, left_of(&t, v, true), v->layout);
  }
  for (size_t i = 0; i < t.idle.n; i++) graph_remove(g, t.idle.at[i]);
}
