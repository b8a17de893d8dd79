/* Groups of pointwise ops over one shape, and reductions of what they make, become one `fused` op,
 * which goes over memory once.
 *
 * Why: a pointwise op costs what it reads and writes; its arithmetic is nearly free. In a group the
 * values that only members read are never written, and a tensor that several members read is read
 * once. What is paid: results of a group are alive from its place on, so members that lie far apart
 * are left alone (REACH; nearer still where they only read the same), and so is what the kernel
 * cannot hold (MEMBERS, TENSORS).
 *
 * A reduction joins the group that makes its input, when it is over all dims or the last ones, and
 * as the others of that group: what it reads is then not written either, if nothing else wants it.
 * Nothing in a group may read what it makes, so that it fixes the level of the group, and its
 * readers are above.
 *
 * It gets any graph and leaves one whose values are the same bit for bit: `fused` runs the members'
 * own kernels on blocks; but reductions of what does not lie row by row (channels_last), which may
 * add up in another order. It is one walk in order, so it ends, and takes time in proportion to
 * the graph.
 *
 * No cycles: every node has a level, and what a node reads from other groups has a lower one. A
 * node joins groups that it reads from, and those that read the same tensors as it, when their
 * level is high enough for the rest that it reads; a group that no other has read from yet is
 * raised to the level that is needed. At the end nodes are put in an order for the groups: as they
 * were, each group where its last member was, or before the first node that reads from it. */
#include <string.h>

#include "folding.h"
#include "op_args.h"
#include "op_ids.h"
#include "op_program.h"
#include "pass.h"

enum {
  REACH = 64,
  REACH_SIBLING = 16,
  MEMBERS = PROGRAM_STEPS,
  TENSORS = 24, /* more than one element each */
  FOLDS = 4,    /* reductions of a group, */
  FOLDED = 16   /* and how many elements they are of at least */
};

/* What grows while nodes are placed. */
typedef struct Group {
  struct Group *joined; /* the group of which it is a part now; NULL: itself */
  int64_t level, last;  /* last: the number of its last member */
  GraphNode **members;
  int n, n_folds;
  uint32_t folded; /* the dims that its reductions are over */
  bool open;       /* of pointwise ops */
  bool fixed;      /* others read from it, so its level stays */
} Group;

/* What becomes one node: a group, or a part of one that is too wide. */
typedef struct Unit {
  GraphNode **members, *folds[FOLDS];
  int n, n_folds, spare; /* spare: how many TENSORS more there may be */
  int member, input;     /* what was looked at while it is put in order */
  bool placed;
} Unit;

/* What is known of a value. */
typedef struct Use {
  int readers, seen; /* all of them; those in the unit that is looked at */
  int16_t number;    /* in that unit's program: of an input, or ~ the step that makes it */
  const void *at;    /* for which unit that is */
  GraphValue *now;   /* the output of a program that has taken its place */
} Use;

typedef struct Fusing {
  Graph *g;
  GraphNode **nodes; /* as they were */
  int64_t n_nodes;
} Fusing;

static Group *group_of(const GraphNode *n) {
  Group *g = n->mark;
  while (g->joined) {
    if (g->joined->joined) g->joined = g->joined->joined;
    g = g->joined;
  }
  return g;
}

static Use *use_of(const GraphValue *v) {
  return v->mark;
}

/* -- Which ops, in which group ----------------------------------------------------------------- */

static bool is_pointwise(const GraphNode *n) {
  if (n->kind != GRAPH_OP || n->n_out != 1 || n->n_patches || n->n_in > PROGRAM_INPUTS ||
      graph_is_cut(n))
    return false;
  const OpSpec *spec = n->op->spec[0];
  if (n->out[0].number || n->out[0].device != DEVICE_CPU || n->converts) return false;
  for (int k = 0; k < n->n_in; k++)
    if (!n->in[k]) return false;
  if (spec->flags & OP_BY_VALUE && n->out[0].ndim == 0)
    return false; /* it may be made in the group */
  return spec->pointwise[PW_F32] || spec->pointwise[PW_F64] || spec->pointwise[PW_I64];
}

static bool same_shape(const GraphValue *a, const GraphValue *b) {
  return shape_equal(a->ndim, a->shape, b->ndim, b->shape);
}

/* Whether it is a reduction of one tensor over all dims or the last ones, and which. */
static bool is_fold(const GraphNode *n, uint32_t *dims) {
  const GraphValue *x = n->n_in == 1 ? n->in[0] : NULL;
  if (n->kind != GRAPH_OP || !x || n->n_out != 1 || n->n_patches || n->converts) return false;
  if (graph_is_cut(n)) return false; /* the mean of the whole */
  if (!n->op->spec[0]->folding || x->device != DEVICE_CPU) return false;
  Folding f;
  n->op->spec[0]->folding(n->args, &f);
  int64_t count = 1;
  *dims = 0;
  for (int i = 0; i < f.dims->n; i++) *dims |= 1u << f.dims->v[i];
  for (int d = x->ndim - 1; d >= 0 && *dims >> d & 1; d--) count *= x->shape[d];
  uint32_t all = (1u << x->ndim) - 1;
  return count >= FOLDED && (*dims | (*dims - 1)) == all;
}

/* Whether n may be in the group of `other`, but for levels. */
static bool may_join(const GraphNode *n, const GraphNode *other) {
  const Group *g = group_of(other);
  return g->open && is_pointwise(other) && same_shape(&n->out[0], &other->out[0]) &&
         n->id - g->last <= REACH && n->times == other->times;
}

static void join(Group *to, Group *g) {
  g->joined = to;
  to->n += g->n;
  to->n_folds += g->n_folds;
  to->folded |= g->folded;
  if (g->last > to->last) to->last = g->last;
  to->fixed |= g->fixed;
}

/* The groups that a node joins. */
typedef struct Joining {
  Group *groups[2 * PROGRAM_INPUTS];
  int n, members, folds;
  uint32_t folded;
} Joining;

/* Adds g to them, unless it is there; false when the group of all would be too large. */
static bool add_group(Joining *j, Group *g) {
  for (int i = 0; i < j->n; i++)
    if (j->groups[i] == g) return true;
  if (j->folded && g->folded && j->folded != g->folded) return false;
  j->groups[j->n++] = g;
  j->members += g->n;
  j->folds += g->n_folds;
  j->folded |= g->folded;
  return j->members < MEMBERS && j->folds <= FOLDS;
}

/* Those that it reads from and that can stand at level `at`. */
static void add_sources(Joining *j, const GraphNode *n, int64_t at) {
  for (int k = 0; k < n->n_in; k++) {
    Group *g = group_of(n->in[k]->node);
    if (!may_join(n, n->in[k]->node) || (g->fixed && g->level != at)) continue;
    if (add_group(j, g)) continue;
    *j = (Joining){0};
    return;
  }
}

/* Those that read what it reads, at the level of the others; where there are none, at one that is
 * at least `level`, which it then is. */
static void add_siblings(Joining *j, const GraphNode *n, int64_t *level) {
  for (int k = 0; k < n->n_in; k++) {
    const GraphValue *v = n->in[k];
    const GraphNode *reader = v->mark;
    if (!reader || n->id - reader->id > REACH_SIBLING || !same_shape(v, &n->out[0])) continue;
    Group *g = group_of(reader);
    if (!may_join(n, reader) || j->members + g->n >= MEMBERS) continue;
    if (j->folds + g->n_folds > FOLDS || (j->folded && g->folded && j->folded != g->folded))
      continue;
    if (!j->n && g->level > *level) *level = g->level;
    if (g->fixed ? g->level == *level : g->level <= *level) add_group(j, g);
  }
}

/* Puts a reduction into the group of what it reads; false when that cannot be. */
static bool place_fold(GraphNode *n, uint32_t dims) {
  const GraphNode *from = n->in[0]->node;
  Group *g = group_of(from), *own = n->mark;
  if (!g->open || !is_pointwise(from) || n->id - g->last > REACH || n->times != from->times)
    return false;
  if (g->n + 1 >= MEMBERS || g->n_folds == FOLDS || (g->folded && g->folded != dims)) return false;
  *own = (Group){.joined = g};
  g->n++;
  g->n_folds++;
  g->folded = dims;
  g->fixed = true;
  return true;
}

/* Puts n into the groups that can stand at the level that it takes, or leaves it in one of its own.
 */
static void place(GraphNode *n) {
  Group *own = n->mark;
  Joining j = {0};
  int64_t at = 0, above = 0;
  uint32_t dims;
  if (is_fold(n, &dims) && place_fold(n, dims)) return;
  own->open = is_pointwise(n);
  for (int k = 0; k < n->n_in; k++) {
    if (!n->in[k]) continue;
    const Group *g = group_of(n->in[k]->node);
    int64_t least = g->level + !(own->open && may_join(n, n->in[k]->node));
    if (least > at) at = least;
    if (g->level >= above) above = g->level + 1;
  }
  if (own->open) add_sources(&j, n, at);
  own->level = j.n ? at : above;
  if (own->open) add_siblings(&j, n, &own->level);
  own->n = 1;
  own->last = n->id;
  for (int i = 0; i < j.n; i++) join(own, j.groups[i]);
  for (int k = 0; k < n->n_in; k++) {
    if (!n->in[k]) continue;
    if (group_of(n->in[k]->node) != own) group_of(n->in[k]->node)->fixed = true;
    if (own->open) n->in[k]->mark = n;
  }
}

/* -- Units ------------------------------------------------------------------------------------- */

/* The use of v, counted anew for another `at`. */
static Use *use_in(const void *at, const GraphValue *v) {
  Use *use = use_of(v);
  if (use->at != at) *use = (Use){.readers = use->readers, .at = at, .now = use->now};
  return use;
}

static bool is_array(const GraphValue *v) {
  return graph_numel(v) != 1;
}

/* How many members from the first on make a program that the kernel can hold: it has TENSORS
 * operands, those that are read by others among them. */
static int fitting(Unit *u) {
  int fits = 1, in = 0, singles = 0, out = 0;
  for (int i = 0; i < u->n; i++) {
    GraphNode *n = u->members[i];
    for (int k = 0; k < n->n_in; k++) {
      Use *use = use_in(u, n->in[k]);
      bool made = use->number < 0;
      if (use->seen++ == 0 && !made) ++*(is_array(n->in[k]) ? &in : &singles);
      if (made && use->seen == use->readers) out--;
    }
    Use *mine = use_in(u, &n->out[0]);
    mine->number = (int16_t)~i;
    out += mine->readers > 0;
    if (in > TENSORS || in + singles > PROGRAM_TENSORS / 2) break;
    if (in + out > TENSORS) continue;
    fits = i + 1;
    u->spare = TENSORS - in - out;
  }
  return fits;
}

static void add_unit(Fusing *f, GraphNode **members, int n) {
  while (n > 0) {
    Unit *u = arena_new(&f->g->arena, Unit);
    *u = (Unit){.members = members, .n = n, .spare = TENSORS - PROGRAM_INPUTS - 1};
    if (n > 1) u->n = fitting(u);
    for (int i = 0; i < u->n; i++) members[i]->mark = u;
    members += u->n;
    n -= u->n;
  }
}

/* Puts a reduction into the unit that makes what it reads, or in one of its own. */
static void add_fold(Fusing *f, GraphNode **n) {
  Unit *u = (*n)->in[0]->node->mark;
  if (u->n_folds == FOLDS || u->spare == 0 || !use_of(&(*n)->out[0])->readers) {
    add_unit(f, n, 1);
    return;
  }
  u->folds[u->n_folds++] = *n;
  u->spare--;
  (*n)->mark = u;
}

/* The units of a group: members that are pointwise, then the others, each in their order. */
static void add_units(Fusing *f, GraphNode **members, int n) {
  GraphNode **folds = arena_array(&f->g->arena, GraphNode *, n);
  int n_folds = 0, at = 0;
  for (int i = 0; i < n; i++) {
    if (n > 1 && !is_pointwise(members[i])) folds[n_folds++] = members[i];
    else members[at++] = members[i];
  }
  add_unit(f, members, at);
  for (int i = 0; i < n_folds; i++) add_fold(f, &folds[i]);
}

/* Units from groups; marks of nodes are units afterwards. */
static void make_units(Fusing *f) {
  GraphNode **members = arena_array(&f->g->arena, GraphNode *, f->n_nodes);
  int64_t at = 0;
  for (int64_t i = 0; i < f->n_nodes; i++) {
    Group *g = group_of(f->nodes[i]);
    if (!g->members) {
      g->members = members + at;
      at += g->n;
      g->n = 0;
    }
    g->members[g->n++] = f->nodes[i];
  }
  Group **groups = arena_array(&f->g->arena, Group *, f->n_nodes);
  bool *first = arena_array(&f->g->arena, bool, f->n_nodes);
  for (int64_t i = 0; i < f->n_nodes; i++) {
    groups[i] = group_of(f->nodes[i]);
    first[i] = groups[i]->members[0] == f->nodes[i];
  }
  for (int64_t i = 0; i < f->n_nodes; i++)
    if (first[i]) add_units(f, groups[i]->members, groups[i]->n);
}

/* -- Their programs ---------------------------------------------------------------------------- */

static GraphNode *step_of(const Unit *u, int s) {
  return s < u->n ? u->members[s] : u->folds[s - u->n];
}

/* The node that does what the members of u do, at the end of the graph. */
static void fuse(Fusing *f, Unit *u) {
  Graph *g = f->g;
  int n_steps = u->n + u->n_folds;
  ProgramStep *steps = arena_array(&g->arena, ProgramStep, n_steps);
  const void **args = arena_array(&g->arena, const void *, n_steps);
  GraphValue *in[PROGRAM_TENSORS], *results[PROGRAM_TENSORS];
  int16_t out[PROGRAM_TENSORS];
  int n_in = 0, n_out = 0;
  for (int s = 0; s < n_steps; s++) {
    GraphNode *n = step_of(u, s);
    steps[s] = (ProgramStep){
        .op = (int16_t)n->op->id, .n_in = (uint8_t)n->n_in, .dtype = (int8_t)n->out[0].dtype};
    args[s] = n->args;
    for (int k = 0; k < n->n_in; k++) {
      Use *use = use_in(u->members, n->in[k]);
      if (use->seen++ == 0 && use->number >= 0) {
        use->number = (int16_t)n_in;
        in[n_in++] = n->in[k];
      }
      steps[s].in[k] = use->number;
    }
    use_in(u->members, &n->out[0])->number = (int16_t)~s;
  }
  for (int s = 0; s < n_steps; s++) {
    GraphValue *v = &step_of(u, s)->out[0];
    if (use_of(v)->seen == use_of(v)->readers) continue;
    out[n_out] = (int16_t)s;
    results[n_out++] = v;
  }
  struct fused_args a = {
      .n_xs = n_in, .body = op_program_make(&g->arena, n_in, n_steps, steps, args, n_out, out)};
  GraphNode *node = graph_add_op(g, NULL, &op_table[OP_fused], &a, n_in, in, n_out);
  node->where = u->members[0]->where;
  node->times = u->members[0]->times;
  for (int k = 0; k < n_out; k++) {
    const GraphValue *v = results[k];
    graph_describe(g, &node->out[k], (DType)v->dtype, v->device, v->ndim, v->shape);
    use_of(v)->now = &node->out[k];
  }
}

/* Whether something reads what the members make. */
static bool is_read(const Unit *u) {
  for (int s = 0; s < u->n + u->n_folds; s++) {
    const Use *use = use_of(&step_of(u, s)->out[0]);
    if (use->readers > (use->at == u ? use->seen : 0)) return true;
  }
  return false;
}

/* Puts u at the end of the graph. */
static void append(Fusing *f, Unit *u) {
  int n = u->n + u->n_folds;
  bool whole = n == 1 || !is_read(u);
  for (int i = 0; i < n; i++) {
    if (whole) graph_move(f->g, step_of(u, i), NULL);
    else graph_remove(f->g, step_of(u, i));
  }
  if (whole) return;
  fuse(f, u);
}

/* -- The order --------------------------------------------------------------------------------- */

/* A unit that u reads from and that stands nowhere yet; NULL: none. */
static Unit *missing(Unit *u) {
  for (; u->member < u->n; u->member++, u->input = 0) {
    const GraphNode *n = u->members[u->member];
    while (u->input < n->n_in) {
      const GraphValue *v = n->in[u->input++];
      Unit *from = v ? v->node->mark : NULL;
      if (from && from != u && !from->placed) return from;
    }
  }
  return NULL;
}

/* Appends u behind all that it reads from. */
static void append_with_sources(Fusing *f, Unit *u, Unit **stack) {
  int64_t n = 0;
  if (!u->placed) stack[n++] = u;
  while (n > 0) {
    Unit *top = stack[n - 1], *from = missing(top);
    if (from) {
      stack[n++] = from;
      continue;
    }
    top->placed = true;
    append(f, top);
    n--;
  }
}

static void forward(GraphValue **v) {
  Use *use = *v ? (*v)->mark : NULL;
  if (use && use->now) *v = use->now;
}

static void count_readers(Fusing *f, int64_t n_values) {
  Use *uses = arena_array(&f->g->arena, Use, n_values);
  for (int64_t i = 0; i < f->n_nodes; i++)
    for (int k = 0; k < f->nodes[i]->n_out; k++) f->nodes[i]->out[k].mark = uses++;
  for (int64_t i = 0; i < f->n_nodes; i++)
    for (int k = 0; k < f->nodes[i]->n_in; k++)
      if (f->nodes[i]->in[k]) use_of(f->nodes[i]->in[k])->readers++;
  for (size_t i = 0; i < f->g->results.n; i++) use_of(f->g->results.at[i])->readers++;
}

void pass_fuse_pointwise(Graph *g, const PassSettings *settings) {
  Fusing f = {.g = g};
  int64_t n_values = 0;
  (void)settings;
  for (GraphNode *n = g->first; n; n = n->next) f.n_nodes++, n_values += n->n_out;
  f.nodes = arena_array(&g->arena, GraphNode *, f.n_nodes);
  Group *groups = arena_array(&g->arena, Group, f.n_nodes);
  for (GraphNode *n = g->first; n; n = n->next) {
    f.nodes[n->id] = n;
    n->mark = &groups[n->id];
    place(n);
  }
  count_readers(&f, n_values);
  make_units(&f);
  Unit **stack = arena_array(&g->arena, Unit *, f.n_nodes);
  for (int64_t i = 0; i < f.n_nodes; i++) {
    Unit *u = f.nodes[i]->mark;
    if (u->members[u->n - 1] == f.nodes[i]) append_with_sources(&f, u, stack);
  }
  for (GraphNode *n = g->first; n; n = n->next)
    for (int k = 0; k < n->n_in; k++) forward(&n->in[k]);
  for (size_t i = 0; i < g->results.n; i++) forward(&g->results.at[i]);
}
