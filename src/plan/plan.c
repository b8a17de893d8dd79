/* From a graph to a plan, in one walk: where each value lies, and the kernels' launches.
 *
 * Values become tensors: a view shares the register of what it is a view of. What an op writes, and
 * the output of an op that allows it, takes the register of the input that it replaces, when
 * nothing reads that afterwards; a captured tensor's memory is taken so when the step writes it. So
 * a parameter is updated where it lies. At the end, writes whose value is elsewhere are copies.
 *
 * With micro-batches nodes are put in order first: what they need of the step, what is of each of
 * them, the rest. What is made once a step is not overwritten by what is of a micro-batch, since
 * the next one reads it too; a part of an argument is a tensor that moves. */
#include <limits.h>
#include <string.h>

#include "err.h"
#include "graph.h"
#include "op_args.h"
#include "op_comm.h"
#include "op_ids.h"
#include "op_program.h"
#include "plan_int.h"

/* What the walk knows of a value. `root`: the value whose memory it may share; `last` of a root:
 * the last node that reads the memory, AT_END for results and writes. */
typedef struct Place {
  struct Place *root;
  int64_t last;
  int times;      /* of its node */
  int tensor;     /* -1: not yet made */
  int copy;       /* which writes and results take instead; -1: none */
  bool written;   /* a capture's, or in its memory, and the step writes the capture */
  int64_t seen;   /* of the node that sees it as an input: its number + 1, and how many of its */
  int n_as, n_in; /* inputs are this value; lie in its memory, if it is a root */
} Place;

enum { AT_END = INT32_MAX, LINES = 256 };

/* Of the node that is lowered, as long as the most of any node needs. */
typedef struct Operands {
  int *in, *out; /* tensors */
  const Meta **asks;
  Meta *metas; /* of outputs */
  int n_in, n_out;
} Operands;

typedef struct Lowering {
  Graph *g;
  Plan *p;
  const PlanOptions *options;
  int64_t at; /* the node's number */
  Place *places;
  Operands operands;
  struct {
    const char *from, *copy;
  } lines[LINES]; /* the graph's texts of lines that are copied, by address */
} Lowering;

static Place *place_of(const GraphValue *v) {
  return v->mark;
}

static Place *root_of(const GraphValue *v) {
  return v ? place_of(v)->root : NULL;
}

/* -- Who reads what, and for how long ---------------------------------------------------------- */

static bool is_view(const GraphNode *n) {
  return n->kind == GRAPH_OP && n->op->spec[0]->flags & OP_VIEW;
}

static void make_places(Lowering *w) {
  Plan *p = w->p;
  graph_renumber(w->g);
  size_t n_values = (size_t)graph_values(w->g), n_nodes = w->g->last ? w->g->last->id + 1 : 0;
  w->places = arena_array(&p->arena, Place, n_values + 1);
  list_reserve(&p->arena, &p->tensors, n_values);
  list_reserve(&p->arena, &p->registers, n_values);
  list_reserve(&p->arena, &p->steps, n_nodes);
  for (GraphNode *n = w->g->first; n; n = n->next) {
    for (int k = 0; k < n->n_out; k++) {
      Place *place = &w->places[n->out[k].id];
      n->out[k].mark = place;
      place->root = is_view(n) ? root_of(n->in[0]) : place;
      place->times = n->times;
      place->tensor = place->copy = -1;
    }
    for (int k = 0; k < n->n_in; k++)
      if (n->in[k]) root_of(n->in[k])->last = n->kind == GRAPH_WRITE ? AT_END : n->id;
    if (n->kind == GRAPH_WRITE) place_of(&n->target->out[0])->written = true;
  }
  for (size_t i = 0; i < w->g->results.n; i++) root_of(w->g->results.at[i])->last = AT_END;
}

/* -- Records ----------------------------------------------------------------------------------- */

static int64_t bytes_of(const Meta *m) {
  return meta_numel(m) * (int64_t)dtype_size((DType)m->dtype);
}

/* What a port's memory has at least. */
static int64_t reach_of(const Meta *m) {
  int64_t low, high;
  if (!meta_numel(m)) return 0;
  shape_extent(m->ndim, m->shape, m->stride, &low, &high);
  return (m->offset + high + 1) * (int64_t)dtype_size((DType)m->dtype);
}

/* One text for all steps of a line, mostly. */
static const char *copy_line(Lowering *w, const char *where) {
  size_t at = ((uintptr_t)where >> 4) % LINES;
  if (w->lines[at].from != where) {
    w->lines[at].copy = arena_text(&w->p->arena, where);
    w->lines[at].from = where;
  }
  return w->lines[at].copy;
}

static PlanStep *add_step(Lowering *w, const Op *op, const void *args, int n_in, const int *in,
                          int n_out, const int *out, const char *where) {
  PlanStep *s = plan_add_step(w->p, op, args, n_in, in, n_out, out);
  s->where = where ? copy_line(w, where) : NULL;
  return s;
}

/* -- Physical inference ------------------------------------------------------------------------ */

typedef struct Asking {
  Infer infer;
  Meta *metas;
  int cap;
} Asking;

static Meta *add_meta(Infer *I) {
  Asking *a = (Asking *)I;
  MF_ASSERT(I->n_out < a->cap, "%s: more outputs than when it was traced", I->op->name);
  return &a->metas[I->n_out++];
}

/* Where the inputs of n are, and room for its outputs. */
static Operands *operands_of(Lowering *w, const GraphNode *n) {
  Operands *o = &w->operands;
  Arena *arena = &w->p->arena;
  if (n->n_in > o->n_in) {
    o->n_in = 2 * n->n_in;
    o->in = arena_array(arena, int, o->n_in);
    o->asks = arena_array(arena, const Meta *, o->n_in);
  }
  if (n->n_out > o->n_out) {
    o->n_out = 2 * n->n_out;
    o->out = arena_array(arena, int, o->n_out);
    o->metas = arena_array(arena, Meta, o->n_out);
  }
  for (int k = 0; k < n->n_in; k++) o->in[k] = n->in[k] ? place_of(n->in[k])->tensor : -1;
  return o;
}

/* The metas of n's outputs on what its inputs are in memory: 0, INFER_COPY, or an error. */
static int infer(Lowering *w, GraphNode *n, Operands *o, int n_out) {
  Plan *p = w->p;
  union {
    char bytes[OP_MAX_ARGS];
    double align;
  } args;
  memcpy(args.bytes, n->args, n->op->args_size);
  for (int k = 0; k < n->n_in; k++)
    o->asks[k] = o->in[k] < 0 ? NULL : &p->tensors.at[o->in[k]].meta;
  Asking a = {.infer = {.op = n->op,
                        .args = args.bytes,
                        .in = o->asks,
                        .n_in = n->n_in,
                        .device = w->options->device,
                        .add = add_meta},
              .metas = o->metas,
              .cap = n_out};
  int rc = n->op->spec[0]->infer(&a.infer);
  if (rc && rc != INFER_COPY) arena_throw(&p->arena, rc);
  return rc;
}

/* -- Steps ------------------------------------------------------------------------------------- */

/* A copy of a tensor in a register of its own; `format` as clone's memory_format. */
static int clone(Lowering *w, int tensor, int format, const char *where) {
  struct clone_args args = {.memory_format = format};
  Meta m = w->p->tensors.at[tensor].meta;
  m.offset = 0;
  if (format || !shape_is_dense(m.ndim, m.shape, m.stride))
    shape_contiguous(m.ndim, m.shape, m.stride);
  m.number = false;
  int reg = plan_add_register(w->p, PLAN_BLOCK, -1, bytes_of(&m)),
      out = plan_add_tensor(w->p, reg, &m);
  add_step(w, &op_table[OP_clone], &args, 1, &tensor, 1, &out, where);
  return out;
}

/* Where the value is a part of a whole. */
static void set_cut(Lowering *w, const GraphValue *v) {
  if (!v->cut) return;
  w->p->tensors.at[place_of(v)->tensor].cut =
      arena_copy(&w->p->arena, v->cut, sizeof *v->cut * (size_t)(2 * v->ndim + 1));
}

static void lower_view(Lowering *w, GraphNode *n) {
  Plan *p = w->p;
  Operands *o = operands_of(w, n);
  int *in = o->in;
  const Meta *metas = o->metas;
  if (infer(w, n, o, n->n_out) == INFER_COPY) {
    in[0] = clone(w, in[0], 1, n->where);
    infer(w, n, o, n->n_out);
  }
  int reg = p->tensors.at[in[0]].reg;
  int64_t stride = p->tensors.at[in[0]].stride;
  if (n->times > 1 && n->op->spec[0]->flags & OP_SPREADS && n->out[0].ndim &&
      n->out[0].shape[0] != n->in[0]->shape[0])
    stride = metas[0].shape[0] * metas[0].stride[0]; /* it is a part */
  for (int k = 0; k < n->n_out; k++) {
    int t = plan_add_tensor(p, reg, &metas[k]);
    p->tensors.at[t].stride = stride;
    place_of(&n->out[k])->tensor = t;
    set_cut(w, &n->out[k]);
  }
}

/* Whether no two elements are at one place, as they are in what was expanded. */
static bool places_differ(const Meta *m) {
  int64_t reach = 0; /* of the dims that were walked, those of smaller strides */
  bool walked[MF_MAX_DIMS] = {false};
  for (int i = 0; i < m->ndim; i++) {
    int least = 0;
    while (walked[least]) least++;
    for (int d = least + 1; d < m->ndim; d++)
      if (!walked[d] && m->stride[d] < m->stride[least]) least = d;
    walked[least] = true;
    if (m->shape[least] <= 1) continue;
    if (m->stride[least] <= reach) return false;
    reach += (m->shape[least] - 1) * m->stride[least];
  }
  return true;
}

static Place *see(Lowering *w, Place *p) {
  if (p->seen != w->at + 1) p->n_as = p->n_in = 0;
  p->seen = w->at + 1;
  return p;
}

/* How often each value and each memory is among the inputs. */
static void count_inputs(Lowering *w, const GraphNode *n) {
  for (int k = 0; k < n->n_in; k++) {
    if (!n->in[k]) continue;
    see(w, place_of(n->in[k]))->n_as++;
    see(w, root_of(n->in[k]))->n_in++;
  }
}

/* Whether the memory of input k may be overwritten by node n: nothing reads it afterwards, it is
 * the step's own or a capture's that is written anyway, and no other input looks at it; `same`: or
 * looks at it in the same way. */
static bool may_take(Lowering *w, const GraphNode *n, int k, bool same) {
  const GraphValue *v = n->in[k];
  Place *root = root_of(v);
  const PlanTensor *t = &w->p->tensors.at[place_of(v)->tensor];
  const PlanRegister *r = &w->p->registers.at[t->reg];
  if (root->last > w->at || v->number || !places_differ(&t->meta)) return false;
  if (n->times > root->times) return false;
  if (r->home != PLAN_BLOCK && !(r->home == PLAN_CAPTURE && root->written)) return false;
  return root->n_in == (same ? place_of(v)->n_as : 1);
}

static bool same_places(const Meta *a, const Meta *b) {
  return a->dtype == b->dtype && shape_equal(a->ndim, a->shape, b->ndim, b->shape) &&
         shape_equal(a->ndim, a->stride, b->ndim, b->stride);
}

/* The input whose memory output k, of meta m, may have: the first, or with OP_BLOCKWISE any that no
 * output before has; -1: none. */
static int replaced_input(Lowering *w, const GraphNode *n, int k, const Meta *m) {
  const Plan *p = w->p;
  int flags = n->op->spec[0]->flags, n_out = n->n_out - n->n_written;
  bool first = flags & OP_INPLACE && n_out == 1 && !n->n_written;
  int last = flags & OP_BLOCKWISE && !op_program_reduces(n->op, n->args, k) ? n->n_in : first;
  for (int i = 0; i < last && i < n->n_in; i++) {
    if (!n->in[i] || !may_take(w, n, i, true)) continue;
    const PlanTensor *t = &p->tensors.at[place_of(n->in[i])->tensor];
    bool given = !same_places(m, &t->meta);
    for (int o = 0; o < k && !given; o++)
      given = p->tensors.at[place_of(&n->out[o])->tensor].reg == t->reg;
    if (!given) return i;
  }
  return -1;
}

/* The output whose meta is m lies in the register of tensor `from` now. */
static void take(Lowering *w, const GraphNode *n, int k, GraphValue *out, const Meta *m) {
  Plan *p = w->p;
  Place *root = root_of(n->in[k]), *mine = place_of(out);
  int from = place_of(n->in[k])->tensor;
  Meta meta = *m;
  meta.offset = p->tensors.at[from].meta.offset;
  mine->tensor = plan_add_tensor(p, p->tensors.at[from].reg, &meta);
  mine->written = root->written; /* the memory is a capture's, as it was */
}

static void new_output(Lowering *w, GraphValue *v, Meta *m) {
  m->dtype = v->dtype;
  m->number = false;
  m->offset = 0;
  place_of(v)->tensor =
      plan_add_tensor(w->p, plan_add_register(w->p, PLAN_BLOCK, -1, bytes_of(m)), m);
}

/* Inputs that the op writes are its own: taken over, or copied. */
static void lower_written(Lowering *w, GraphNode *n, int *in) {
  int first = n->n_out - n->n_written;
  for (int i = 0; i < n->n_written; i++) {
    int k = n->written[i];
    GraphValue *out = &n->out[first + i];
    if (may_take(w, n, k, false)) {
      take(w, n, k, out, &w->p->tensors.at[in[k]].meta);
    } else {
      place_of(out)->tensor = clone(w, in[k], 0, n->where);
    }
    in[k] = place_of(out)->tensor;
  }
}

/* The argument `at`, where there is one, is the number of the micro-batch. */
static void patch_number(Lowering *w, PlanStep *s) {
  for (int i = 0; i < s->op->n_params; i++) {
    if (strcmp(s->op->params[i].name, "at")) continue;
    PlanPatch *patch = arena_new(&w->p->arena, PlanPatch);
    *patch = (PlanPatch){i, PLAN_MICRO};
    s->patches = patch;
    s->n_patches = 1;
  }
}

/* A tensor of which nobody says that it is a part, for an op that looks at where it begins. */
static int as_part(Lowering *w, int tensor, const int64_t *cut) {
  Plan *p = w->p;
  int t = plan_add_tensor(p, p->tensors.at[tensor].reg, &p->tensors.at[tensor].meta);
  p->tensors.at[t].stride = p->tensors.at[tensor].stride;
  p->tensors.at[t].cut =
      arena_copy(&p->arena, cut, sizeof *cut * (size_t)(2 * p->tensors.at[t].meta.ndim + 1));
  return t;
}

/* What is communicated is copied where it does not; `after` is not looked at. */
static void lie_in_one_piece(Lowering *w, const GraphNode *n, int *in) {
  for (int k = 0; k < n->n_in; k++) {
    const Meta *m = in[k] < 0 ? NULL : &w->p->tensors.at[in[k]].meta;
    if (m && !meta_is_contiguous(m)) in[k] = clone(w, in[k], 1, n->where);
  }
}

static void lower_op(Lowering *w, GraphNode *n) {
  Plan *p = w->p;
  int n_out = n->n_out - n->n_written;
  Operands *o = operands_of(w, n);
  int *in = o->in, *out = o->out;
  Meta *metas = o->metas;
  if (op_is_comm(n->op)) lie_in_one_piece(w, n, in);
  infer(w, n, o, n_out);
  count_inputs(w, n);
  lower_written(w, n, in);
  for (int k = 0; k < n_out; k++) {
    metas[k].dtype = n->out[k].dtype;
    int from = replaced_input(w, n, k, &metas[k]);
    if (from >= 0) take(w, n, from, &n->out[k], &metas[k]);
    else new_output(w, &n->out[k], &metas[k]);
    out[k] = place_of(&n->out[k])->tensor;
  }
  for (int k = 0; k < n->n_out; k++) set_cut(w, &n->out[k]);
  for (int k = 0; k < n->n_in && n->cuts; k++)
    if (in[k] >= 0 && n->cuts[k] && !p->tensors.at[in[k]].cut)
      in[k] = as_part(w, in[k], n->cuts[k]);
  PlanStep *s = add_step(w, n->op, n->args, n->n_in, in, n_out, out, n->where);
  PlanPatch *patches = arena_array(&p->arena, PlanPatch, n->n_patches);
  for (int k = 0; k < n->n_patches; k++)
    patches[k] = (PlanPatch){n->patches[k].param, n->patches[k].cell};
  s->n_patches = n->n_patches;
  s->patches = patches;
  s->along = n->along;
  if (w->g->times > 1 && n->op->spec[0]->flags & OP_GATHERS) patch_number(w, s);
}

static void lower_port(Lowering *w, GraphNode *n) {
  Plan *p = w->p;
  bool input = n->kind == GRAPH_INPUT;
  int port = (int)(input ? p->inputs.n : p->captures.n);
  int reg = plan_add_register(p, input ? PLAN_INPUT : PLAN_CAPTURE, port, reach_of(n->meta));
  int t = plan_add_tensor(p, reg, n->meta);
  PlanPort named = {t, arena_text(&p->arena, n->name ? n->name : ""),
                    place_of(&n->out[0])->written};
  if (input) *list_add(&p->arena, &p->inputs) = named;
  else *list_add(&p->arena, &p->captures) = named;
  place_of(&n->out[0])->tensor = t;
  set_cut(w, &n->out[0]);
}

static void lower_number(Lowering *w, GraphNode *n) {
  Plan *p = w->p;
  Meta m = {.number = true, .dtype = n->out[0].dtype};
  int reg = plan_add_register(p, PLAN_NUMBER, (int)p->numbers.n, bytes_of(&m));
  place_of(&n->out[0])->tensor = plan_add_tensor(p, reg, &m);
  *list_add(&p->arena, &p->numbers) = (PlanNumber){n->value, n->cell, n->out[0].dtype};
}

/* -- The end ----------------------------------------------------------------------------------- */

static bool is_home(const Plan *p, int tensor, PlanHome home) {
  return p->registers.at[p->tensors.at[tensor].reg].home == home;
}

/* The tensor of a captured value stays where it is: the capture's writes go there. */
static int copy_place(Lowering *w, Place *v) {
  if (v->copy < 0) v->copy = clone(w, v->tensor, 0, NULL);
  return v->copy;
}

/* Whether what write node n leaves in a capture is there already. */
static bool lies_there(const Plan *p, const GraphNode *n) {
  const PlanTensor *from = &p->tensors.at[place_of(n->in[0])->tensor];
  const PlanTensor *to = &p->tensors.at[place_of(&n->target->out[0])->tensor];
  return from->reg == to->reg && from->meta.offset == to->meta.offset &&
         same_places(&from->meta, &to->meta);
}

/* What is written and lies in another capture's memory is saved before that is overwritten. */
static void save_sources(Lowering *w, int times) {
  Plan *p = w->p;
  for (GraphNode *n = w->g->first; n; n = n->next) {
    if (n->kind != GRAPH_WRITE || n->times != times) continue;
    if (!lies_there(p, n) && is_home(p, place_of(n->in[0])->tensor, PLAN_CAPTURE))
      copy_place(w, place_of(n->in[0]));
  }
}

/* Results do not lie in memory of others. */
static void save_results(Lowering *w) {
  Plan *p = w->p;
  for (size_t i = 0; i < w->g->results.n; i++) {
    Place *v = place_of(w->g->results.at[i]);
    int from = v->copy < 0 ? v->tensor : v->copy;
    bool own = is_home(p, from, PLAN_BLOCK) || is_home(p, from, PLAN_RESULT);
    if (!own) from = copy_place(w, v);
    PlanRegister *r = &p->registers.at[p->tensors.at[from].reg];
    if (r->home == PLAN_BLOCK) {
      r->home = PLAN_RESULT;
      r->port = p->n_result_registers++;
    }
    *list_add(&p->arena, &p->results) = from;
  }
}

/* The writes that are done so many times. */
static void lower_writes(Lowering *w, int times) {
  Plan *p = w->p;
  for (GraphNode *n = w->g->first; n; n = n->next) {
    if (n->kind != GRAPH_WRITE || n->times != times || lies_there(p, n)) continue;
    Place *from = place_of(n->in[0]);
    int to = place_of(&n->target->out[0])->tensor;
    int in[2] = {to, from->copy < 0 ? from->tensor : from->copy};
    add_step(w, &op_table[OP_copy_], op_table[OP_copy_].defaults, 2, in, 0, NULL, n->where);
  }
}

static void lower_node(Lowering *w, GraphNode *n) {
  w->at = n->id;
  switch ((GraphKind)n->kind) {
    case GRAPH_INPUT:
    case GRAPH_CAPTURE: lower_port(w, n); break;
    case GRAPH_NUMBER: lower_number(w, n); break;
    case GRAPH_OP:
      if (is_view(n)) lower_view(w, n);
      else lower_op(w, n);
      break;
    case GRAPH_WRITE: break;
  }
}

static bool is_port(const GraphNode *n) {
  return n->kind == GRAPH_INPUT || n->kind == GRAPH_CAPTURE;
}

/* Whether the graph is not yet that of one rank. */
static bool has_layouts(const Graph *g) {
  for (const GraphNode *n = g->first; n && g->placements.n; n = n->next)
    for (int k = 0; k < n->n_out; k++)
      if (n->out[k].layout) return true;
  return false;
}

static void lower(void *ud) {
  Lowering *w = ud;
  Graph *g = w->g;
  w->p->name = arena_text(&w->p->arena, g->name);
  w->p->n_cells = g->n_cells;
  w->p->times = g->times;
  if (has_layouts(g))
    arena_throw(&w->p->arena,
                err_set(MF_EINVAL,
                        "compile: the passes sbp, boxing and part cannot be left out of a "
                        "step on global tensors"));
  plan_take_ranks(w->p, g);
  graph_order(g);
  make_places(w);
  int first, end = 0;
  GraphNode *n = g->first;
  for (; n && !(graph_is_micro(n) && !is_port(n)) && n->kind != GRAPH_WRITE; n = n->next)
    lower_node(w, n);
  first = (int)w->p->steps.n;
  for (; n && graph_is_micro(n) && n->kind != GRAPH_WRITE; n = n->next) lower_node(w, n);
  if (g->times > 1) {
    save_sources(w, g->times);
    lower_writes(w, g->times);
    end = (int)w->p->steps.n;
  }
  for (; n; n = n->next) lower_node(w, n);
  save_sources(w, 1);
  save_results(w);
  lower_writes(w, 1);
  plan_make_tasks(w->p, w->options, first, end);
  plan_memory(w->p);
  int rc = plan_verify(w->p);
  if (rc) arena_throw(&w->p->arena, rc);
}

Plan *plan_create(Graph *g, const PlanOptions *o) {
  Plan *p = plan_empty();
  if (!p) return NULL;
  Lowering w = {.g = g, .p = p, .options = o};
  if (!arena_protect(&p->arena, lower, &w)) return p;
  plan_destroy(p);
  return NULL;
}
