#include "trace.h"

#include <stdio.h>
#include <string.h>

#include "global.h"
#include "mem.h"
#include "op_args.h"
#include "op_comm.h"
#include "op_ids.h"
#include "tape.h"

/* -- Storages and their values ----------------------------------------------------------------- */

static bool same_meta(const Meta *a, const Meta *b) {
  return a->offset == b->offset && a->dtype == b->dtype &&
         shape_equal(a->ndim, a->shape, b->ndim, b->shape) &&
         shape_equal(a->ndim, a->stride, b->ndim, b->stride);
}

static TraceStorage *find(Trace *t, const Storage *s) {
  int64_t k = map_get(&t->place, s);
  return k < 0 ? NULL : t->storages.at[k];
}

static TraceStorage *add_storage(Trace *t, Storage *s, const Meta *root, GraphValue *current) {
  TraceStorage *ts = arena_new(&t->graph->arena, TraceStorage);
  if (!map_put(&t->place, s, (int64_t)t->storages.n))
    arena_throw(&t->graph->arena, err_set(MF_ENOMEM, "out of memory"));
  *list_add(&t->graph->arena, &t->storages) = ts;
  ts->storage = s;
  storage_retain(s);
  ts->root = *root;
  ts->current = current;
  return ts;
}

/* The user's line, one text for all calls on it as long as its place is not taken by another. */
static const char *here(Trace *t) {
  const char *text = eager_where(t->E);
  unsigned h = 0;
  if (!text || !*text) return NULL;
  for (const char *c = text; *c; c++) h = h * 31 + (unsigned char)*c;
  const char **known = &t->lines[h % TRACE_LINES];
  if (!*known || strcmp(*known, text)) *known = arena_text(&t->graph->arena, text);
  return *known;
}

static void describe(Trace *t, GraphValue *v, const Meta *m) {
  graph_describe(t->graph, v, (DType)m->dtype, m->device, m->ndim, m->shape);
  v->number = m->number;
}

static const GraphLayout *layout_of(Trace *t, const Layout *l) {
  return l ? graph_layout(t->graph, layout_placement(l), &l->sbp) : NULL;
}

/* Of a global tensor the whole; its part must be all of the storage. */
static Meta root_of_global(Trace *t, const Tensor *like) {
  const Meta *m = &like->m, *part = &like->part->m;
  size_t bytes = (size_t)meta_numel(part) * dtype_size((DType)part->dtype);
  bool all = m->offset == 0 && part->offset == 0 && bytes == like->storage->bytes &&
             shape_is_dense(m->ndim, m->shape, m->stride) &&
             shape_is_dense(part->ndim, part->shape, part->stride);
  if (!all)
    arena_throw(&t->graph->arena,
                err_set(MF_EUNSUPPORTED,
                        "%s: a compiled step cannot use a part of a global tensor's memory that "
                        "was made outside of it; make it there, or clone it",
                        t->call ? t->call->op->name : "return"));
  return *m;
}

/* What the port of `like` looks like: itself if it is all of its storage, else the storage as a
 * list of elements. */
static Meta root_of(Trace *t, const Tensor *like) {
  if (like->layout) return root_of_global(t, like);
  Meta m = like->m;
  size_t size = dtype_size((DType)m.dtype), bytes = like->storage->bytes;
  bool whole = m.offset == 0 && (size_t)meta_numel(&m) * size == bytes &&
               shape_is_dense(m.ndim, m.shape, m.stride);
  if (whole) return m;
  m.ndim = 1;
  m.offset = 0;
  m.shape[0] = (int64_t)(bytes / size);
  m.stride[0] = 1;
  return m;
}

/* `whole`: of its value; `m`: of its memory. */
static TraceStorage *add_port(Trace *t, GraphKind kind, const Tensor *x, const Meta *whole,
                              const Meta *m) {
  Graph *g = t->graph;
  GraphNode *at = t->last_port ? t->last_port->next : g->first; /* in order of appearance */
  GraphNode *n = t->last_port = graph_insert(g, at, kind, 0, 1);
  Meta *copy = arena_new(&g->arena, Meta);
  *copy = *m;
  n->meta = copy;
  describe(t, &n->out[0], whole);
  n->out[0].layout = layout_of(t, x->layout);
  TraceStorage *ts = add_storage(t, x->storage, whole, &n->out[0]);
  ts->layout = x->layout;
  return ts;
}

static TraceLeaf *leaf_of(Trace *t, Tensor *x) {
  int64_t k = map_get(&t->leaf_place, x);
  if (k >= 0) return &t->leaves.at[k];
  if (!map_put(&t->leaf_place, x, (int64_t)t->leaves.n))
    arena_throw(&t->graph->arena, err_set(MF_ENOMEM, "out of memory"));
  TraceLeaf *leaf = list_add(&t->graph->arena, &t->leaves);
  *leaf = (TraceLeaf){.tensor = tensor_retain(x)};
  return leaf;
}

static void keep_leaf(Trace *t, Tensor *x) {
  x = tensor_base(x);
  if (!dtype_is_float((DType)x->m.dtype)) return;
  TraceLeaf *leaf = leaf_of(t, x);
  if (leaf->used) return;
  leaf->used = true;
  leaf->requires_grad = tensor_requires_grad(x);
  if (!x->ag) return;
  leaf->node = x->ag->node;
  leaf->output = x->ag->output;
  leaf->history = x->ag->history;
  if (leaf->node) leaf->node->refs++;
}

static TraceStorage *capture(Trace *t, Tensor *x) {
  Tensor *base = tensor_base(x);
  if (x->layout && base->part && base->storage == x->storage) x = base;
  Meta root = root_of(t, x);
  char name[32];
  TraceStorage *ts = add_port(t, GRAPH_CAPTURE, x, &root, x->part ? &x->part->m : &root);
  snprintf(name, sizeof name, "c%d", t->n_captures++);
  ts->capture = ts->current->node;
  ts->capture->name = arena_text(&t->graph->arena, name);
  ts->first = tensor_retain(x);
  return ts;
}

static int cell_number(Trace *t, const double *cell) {
  size_t k = 0;
  while (k < t->cells.n && t->cells.at[k] != cell) k++;
  if (k == t->cells.n) *list_add(&t->graph->arena, &t->cells) = cell;
  return (int)k;
}

/* The number that x is; a cell's when the call says so. */
static GraphValue *number(Trace *t, const Tensor *x, const double *cell) {
  GraphNode *n = graph_add(t->graph, GRAPH_NUMBER, 0, 1);
  describe(t, &n->out[0], &x->m);
  n->value = dtype_get_f64((DType)x->m.dtype, tensor_data(x));
  if (cell) n->cell = cell_number(t, cell);
  add_storage(t, x->storage, &x->m, &n->out[0]);
  return &n->out[0];
}

static TraceView *find_view(TraceStorage *ts, const Meta *m) {
  for (size_t i = 0; i < ts->views.n; i++)
    if (same_meta(&ts->views.at[i].meta, m)) return &ts->views.at[i];
  return NULL;
}

/* What lies at m in the storage is `value` now. */
static TraceView *set_view(Trace *t, TraceStorage *ts, const Meta *m, GraphValue *value) {
  TraceView *v = find_view(ts, m);
  if (!v) *(v = list_add(&t->graph->arena, &ts->views)) = (TraceView){.meta = *m};
  v->writes = ts->writes;
  v->value = value;
  return v;
}

static void set_list(IntList *list, int n, const int64_t *v) {
  list->n = n;
  if (n) memcpy(list->v, v, sizeof *v * (size_t)n);
}

static GraphNode *add_view_op(Trace *t, int op, const void *args, GraphValue *x, const Meta *m) {
  GraphNode *n = graph_add_op(t->graph, NULL, &op_table[op], args, 1, &x, 1);
  n->where = here(t);
  describe(t, &n->out[0], m);
  n->out[0].number = false;
  return n;
}

/* What lies at m, read from the whole: the widest stride first, which is the order it keeps in
 * memory, as a view would. */
static GraphValue *read_out(Trace *t, TraceStorage *ts, const Meta *m) {
  struct slice_base_args a = {.offset = m->offset};
  struct permute_args back = {.dims.n = m->ndim};
  Meta sorted = *m;
  int order[MF_MAX_DIMS];
  for (int d = 0; d < m->ndim; d++) {
    int at = d;
    for (; at > 0 && m->stride[order[at - 1]] < m->stride[d]; at--) order[at] = order[at - 1];
    order[at] = d;
  }
  for (int d = 0; d < m->ndim; d++) {
    sorted.shape[d] = m->shape[order[d]];
    sorted.stride[d] = m->stride[order[d]];
    back.dims.v[order[d]] = d;
  }
  set_list(&a.base_stride, ts->root.ndim, ts->root.stride);
  set_list(&a.size, m->ndim, sorted.shape);
  set_list(&a.stride, m->ndim, sorted.stride);
  GraphValue *y = &add_view_op(t, OP_slice_base, &a, ts->current, &sorted)->out[0];
  bool moved = false;
  for (int d = 0; d < m->ndim; d++) moved |= order[d] != d;
  return moved ? &add_view_op(t, OP_permute, &back, y, m)->out[0] : y;
}

static GraphValue *derive(Trace *t, TraceStorage *ts, const Meta *m);

/* The value at m in the storage. */
static GraphValue *value_at(Trace *t, TraceStorage *ts, const Meta *m) {
  if (same_meta(&ts->root, m)) return ts->current;
  TraceView *v = find_view(ts, m);
  return v && v->writes == ts->writes ? v->value : derive(t, ts, m);
}

/* Makes all views that `made` gave again, but those that were written since. */
static void make_again(Trace *t, TraceStorage *ts, const GraphNode *made, const Meta *from) {
  GraphValue *x = value_at(t, ts, from);
  GraphNode *n = graph_add_op(t->graph, NULL, made->op, made->args, 1, &x, made->n_out);
  n->where = here(t);
  for (int k = 0; k < n->n_out; k++) {
    const GraphValue *like = &made->out[k];
    graph_describe(t->graph, &n->out[k], (DType)like->dtype, like->device, like->ndim, like->shape);
  }
  for (size_t i = 0; i < ts->views.n; i++) {
    TraceView *v = &ts->views.at[i];
    if (v->made != made || v->writes == ts->writes) continue;
    v->value = &n->out[v->output];
    v->writes = ts->writes;
  }
}

/* The same, when it is not known: written since, or a view from before the step. */
static GraphValue *derive(Trace *t, TraceStorage *ts, const Meta *m) {
  if (m->dtype != ts->root.dtype)
    arena_throw(&t->graph->arena,
                err_set(MF_EUNSUPPORTED, "%s: a compiled step cannot see one memory as %s and %s",
                        t->call ? t->call->op->name : "return", dtype_name((DType)ts->root.dtype),
                        dtype_name((DType)m->dtype)));
  TraceView *v = find_view(ts, m);
  if (v && v->made) {
    Meta from = v->from;
    make_again(t, ts, v->made, &from);
    return find_view(ts, m)->value;
  }
  return set_view(t, ts, m, read_out(t, ts, m))->value;
}

/* The value that x holds now. */
static GraphValue *value_of(Trace *t, Tensor *x, const double *cell) {
  if (!x) return NULL;
  TraceStorage *ts = find(t, x->storage);
  if (!ts) {
    if (storage_is_traced(x->storage))
      arena_throw(&t->graph->arena,
                  err_set(MF_EINVAL, "%s: a tensor of another compiled step has no value here",
                          t->call ? t->call->op->name : "return"));
    if (x->m.number) return number(t, x, cell);
    ts = capture(t, x);
  }
  if (ts->capture && !ts->layout != !x->layout)
    arena_throw(
        &t->graph->arena,
        err_set(MF_EUNSUPPORTED, "%s: a compiled step cannot see one memory as global and as local",
                t->call ? t->call->op->name : "return"));
  if (ts->capture) keep_leaf(t, x);
  return value_at(t, ts, &x->m);
}

/* x holds `value` from now on. */
static void write_to(Trace *t, Tensor *x, GraphValue *value) {
  TraceStorage *ts = find(t, x->storage);
  if (ts->capture)
    storage_set_absent(ts->storage, STORAGE_TRACED, true); /* what it holds is of no use now */
  if (same_meta(&ts->root, &x->m)) {
    ts->current = value;
    ts->writes++;
    return;
  }
  struct scatter_base_args a = {.offset = x->m.offset};
  set_list(&a.base_stride, ts->root.ndim, ts->root.stride);
  set_list(&a.src_size, x->m.ndim, x->m.shape);
  set_list(&a.stride, x->m.ndim, x->m.stride);
  GraphValue *in[2] = {ts->current, value};
  GraphNode *n = graph_add_op(t->graph, NULL, &op_table[OP_scatter_base], &a, 2, in, 1);
  n->where = here(t);
  describe(t, &n->out[0], &ts->root);
  ts->current = &n->out[0];
  ts->writes++;
  /* A result lies densely in memory, and what is made of it keeps its order: where x does not, it
   * is read from the whole, or sums over what is made of it would go in another order than eager's.
   */
  if (shape_is_dense(x->m.ndim, x->m.shape, x->m.stride)) set_view(t, ts, &x->m, value);
}

/* -- Calls ------------------------------------------------------------------------------------- */

static const double *cell_of(const EagerCall *c, int k) {
  for (int i = 0; i < c->n_patches; i++) {
    int position = 0;
    for (int p = 0; p < c->patches[i].param; p++) position += c->op->params[p].kind == PARAM_TENSOR;
    bool tensor = c->op->params[c->patches[i].param].kind == PARAM_TENSOR;
    if (tensor && op_param_of_input(c->op, c->args, k) == position) return c->patches[i].cell;
  }
  return NULL;
}

/* The scalar arguments that are cells. */
static void record_patches(Trace *t, const EagerCall *c, GraphNode *n) {
  if (!c->n_patches) return;
  GraphPatch *patches = arena_array(&t->graph->arena, GraphPatch, c->n_patches);
  n->patches = patches;
  for (int i = 0; i < c->n_patches; i++) {
    if (c->op->params[c->patches[i].param].kind == PARAM_TENSOR) continue;
    patches[n->n_patches++] = (GraphPatch){c->patches[i].param, cell_number(t, c->patches[i].cell)};
  }
}

/* The stream of a random op, or of one that redoes a draw, counts from the default generator's at
 * the start. */
static void record_generator(Trace *t, GraphNode *n) {
  for (int i = 0; i < n->op->n_params; i++) {
    if (n->op->params[i].kind != PARAM_GENERATOR) continue;
    RngKey *key = (RngKey *)(void *)((char *)n->args + n->op->params[i].offset);
    const Generator *g = &t->E->generator;
    if (key->seed != g->seed || key->stream < t->stream || key->stream >= g->next)
      arena_throw(&t->graph->arena,
                  err_set(MF_EUNSUPPORTED,
                          "%s: a compiled step draws from the default generator alone; leave "
                          "`generator` away",
                          n->op->name));
    *key = (RngKey){0, key->stream - t->stream};
  }
}

/* The inputs that the op writes, apart from `into`; their number. */
static int written_inputs(const EagerCall *c, int *written) {
  int count = 0;
  for (int i = 0, position = 0; i < c->op->n_params; i++) {
    const Param *p = &c->op->params[i];
    if (p->kind != PARAM_TENSOR) continue;
    int first, n;
    op_inputs_of_param(c->op, c->args, position++, &first, &n);
    for (int k = first; p->mutated && k < first + n; k++)
      if (c->in[k]) written[count++] = k;
  }
  return count;
}

typedef struct Natural {
  Infer infer;
  Meta meta;
} Natural;

static Meta *natural_output(Infer *I) {
  Natural *n = (Natural *)I;
  I->n_out++;
  return &n->meta;
}

/* The dtype that a call's first output would have if it were not written into a tensor. */
static DType natural_dtype(Trace *t, EagerCall *c) {
  bool mixed = false;
  const Meta **metas = arena_array(&t->graph->arena, const Meta *, c->n_in);
  for (int k = 0; k < c->n_in; k++) {
    metas[k] = c->in[k] ? &c->in[k]->m : NULL;
    mixed |= metas[k] && !metas[k]->number && metas[k]->dtype != c->into->m.dtype;
  }
  if (!mixed) return (DType)c->into->m.dtype;
  Natural n = {.infer = {.op = c->op,
                         .args = c->args,
                         .in = metas,
                         .n_in = c->n_in,
                         .device = t->E->device,
                         .add = natural_output}};
  int rc = c->op->spec[0]->infer(&n.infer);
  if (rc) arena_throw(&t->graph->arena, rc);
  return (DType)n.meta.dtype;
}

/* The call's result goes into a tensor: what the op makes is cast where the dtype is another. */
static void record_into(Trace *t, EagerCall *c, GraphValue *v) {
  struct cast_args args = {.dtype = c->into->m.dtype};
  v->dtype = (uint8_t)natural_dtype(t, c);
  if (v->dtype != c->into->m.dtype) {
    GraphNode *n = graph_add_op(t->graph, NULL, &op_table[OP_cast], &args, 1, &v, 1);
    n->where = v->node->where;
    v = &n->out[0];
    describe(t, v, &c->into->m);
  }
  write_to(t, c->into, v);
}

static void record_op(Trace *t, EagerCall *c, GraphValue *const *in) {
  Graph *g = t->graph;
  int *written = arena_array(&g->arena, int, c->n_in);
  int n_written = c->op->n_mutated ? written_inputs(c, written) : 0;
  GraphNode *n = graph_add_op(g, NULL, c->op, c->args, c->n_in, in, c->n_out + n_written);
  n->written = written;
  n->n_written = n_written;
  n->where = here(t);
  record_patches(t, c, n);
  record_generator(t, n);
  for (int k = 0; k < c->n_out; k++) {
    describe(t, &n->out[k], &c->out[k]->m);
    n->out[k].layout = layout_of(t, c->target);
    if (c->out[k] == c->into) record_into(t, c, &n->out[k]);
    else add_storage(t, c->out[k]->storage, &c->out[k]->m, &n->out[k]);
  }
  for (int k = 0; k < n_written; k++) {
    Tensor *x = c->in[written[k]];
    describe(t, &n->out[c->n_out + k], &x->m);
    write_to(t, x, &n->out[c->n_out + k]);
  }
}

/* A view is a value of its own only where it differs from the whole. One that goes by the strides
 * of memory, which values do not have, is read from the whole. */
static void record_view(Trace *t, EagerCall *c, GraphValue *const *in) {
  TraceStorage *ts = find(t, c->in[0]->storage);
  if (c->op->spec[0]->flags & OP_STRIDED) return;
  GraphNode *n = graph_add_op(t->graph, NULL, c->op, c->args, c->n_in, in, c->n_out);
  n->where = here(t);
  for (int k = 0; k < c->n_out; k++) {
    const Meta *m = &c->out[k]->m;
    describe(t, &n->out[k], m);
    n->out[k].number = false;
    TraceView *v = find_view(ts, m);
    if (same_meta(&ts->root, m) || (v && (v->made || v->writes == ts->writes))) continue;
    v = set_view(t, ts, m, &n->out[k]);
    v->made = n;
    v->output = k;
    v->from = c->in[0]->m;
  }
}

static void record_call(void *ud) {
  Trace *t = ud;
  EagerCall *c = t->call;
  GraphValue **in = arena_array(&t->graph->arena, GraphValue *, c->n_in);
  for (int k = 0; k < c->n_in; k++) in[k] = value_of(t, c->in[k], cell_of(c, k));
  if (c->op->spec[0]->flags & OP_VIEW) record_view(t, c, in);
  else record_op(t, c, in);
}

static int record(EagerTracer *tracer, EagerCall *c) {
  Trace *t = (Trace *)tracer;
  GraphNode *last = t->graph->last;
  t->call = c;
  int rc = arena_protect(&t->graph->arena, record_call, t);
  t->call = NULL;
  for (GraphNode *n = last ? last->next : t->graph->first; n && t->segment; n = n->next)
    if (n->kind == GRAPH_OP) n->segment = t->segment;
  return rc;
}

int trace_segment(Trace *t, int segment) {
  int before = t->segment;
  t->segment = segment < 0 ? ++t->n_segments : segment;
  t->graph->segments |= t->segment != 0;
  return before;
}

typedef struct Keeping {
  Trace *t;
  Tensor *x;
} Keeping;

static void keep(void *ud) {
  Keeping *k = ud;
  GraphNode *n = value_of(k->t, k->x, NULL)->node;
  n->kept = n->segment != 0;
}

int trace_keep(Trace *t, Tensor *x) {
  Keeping k = {t, x};
  return arena_protect(&t->graph->arena, keep, &k);
}

/* -- Gradients --------------------------------------------------------------------------------- */

/* Without a value until the step runs. */
static bool is_open(const Tensor *x) {
  Storage *s = x->storage ? x->storage : x->row_ids->storage;
  return storage_is_traced(s) && !s->data;
}

typedef struct GradientUse {
  Trace *t;
  Tensor *x;
  bool written;
} GradientUse;

static void use_gradient(void *ud) {
  GradientUse *u = ud;
  TraceLeaf *leaf = leaf_of(u->t, u->x);
  if (leaf->uses_grad) return;
  leaf->uses_grad = true;
  leaf->reads_grad = !u->written;
  leaf->grad = tensor_retain(u->x->ag ? u->x->ag->grad : NULL);
}

static int gradient(EagerTracer *tracer, Tensor *x, bool written) {
  Trace *t = (Trace *)tracer;
  GradientUse use = {t, x, written};
  return is_open(x) ? 0 : arena_protect(&t->graph->arena, use_gradient, &use);
}

/* A gradient that was there and to which the step added, by making another one: what that is goes
 * where the first was. */
static void write_gradients(Trace *t) {
  for (size_t i = 0; i < t->leaves.n; i++) {
    TraceLeaf *leaf = &t->leaves.at[i];
    Tensor *g = leaf->tensor->ag ? leaf->tensor->ag->grad : NULL;
    if (!leaf->reads_grad || !leaf->grad || !g || g == leaf->grad || !is_open(g)) continue;
    if (!leaf->grad->storage || !g->storage)
      arena_throw(&t->graph->arena,
                  err_set(MF_EUNSUPPORTED,
                          "compile: the step adds to a row-sparse gradient that there is, which "
                          "would grow in each call; drop it first, by zero_grad()"));
    GraphValue *value = value_of(t, g, NULL);
    value_of(t, leaf->grad, NULL);
    write_to(t, leaf->grad, value);
  }
}

/* The tape that the step made ends with it. False when a captured tensor would be on it, with the
 * error set if `report`. */
static bool restore_tape(Trace *t, bool report) {
  bool kept = true;
  for (size_t i = 0; i < t->leaves.n; i++) {
    TraceLeaf *leaf = &t->leaves.at[i];
    const Autograd *ag = leaf->tensor->ag;
    if (!leaf->used || !ag || ag->node == leaf->node) continue;
    const char *where = find(t, leaf->tensor->storage)->current->node->where;
    tape_restore(leaf->tensor, leaf->node, leaf->output, leaf->history);
    if (kept && report)
      err_set(MF_EUNSUPPORTED,
              "%s%scompile: a captured tensor is written with what requires a gradient, and no "
              "gradient leaves a step; write it inside of mf.no_grad, or what is detached",
              where ? where : "", where ? ": " : "");
    kept = false;
  }
  return kept;
}

/* Gradients that the step made are its own: what there was comes back (`all`: in any case), unless
 * the step dropped that before. */
static void restore_gradients(Trace *t, bool all) {
  for (size_t i = 0; i < t->leaves.n; i++) {
    TraceLeaf *leaf = &t->leaves.at[i];
    Autograd *ag = leaf->tensor->ag;
    if (!leaf->uses_grad || !ag || !(all || (ag->grad && is_open(ag->grad)))) continue;
    tensor_release(ag->grad);
    ag->grad = all || leaf->reads_grad ? tensor_retain(leaf->grad) : NULL;
  }
}

/* -- Beginning and end ------------------------------------------------------------------------- */

Trace *trace_begin(Eager *E, const char *name, int times) {
  if (E->tracer) {
    err_set(MF_EINVAL,
            "compile: a step is being compiled already; call the inner function plainly");
    return NULL;
  }
  if (eager_settle(E, NULL)) return NULL;
  Trace *t = mem_zalloc(sizeof *t);
  if (t) t->graph = graph_create(name);
  if (!t || !t->graph) {
    mem_free(t);
    err_set(MF_ENOMEM, "out of memory");
    return NULL;
  }
  t->tracer = (EagerTracer){record, gradient, times};
  t->E = E;
  t->stream = E->generator.next;
  E->tracer = &t->tracer;
  return t;
}

typedef struct NewInput {
  Trace *t;
  Tensor *x;
  Meta whole, memory;
} NewInput;

static void add_input(void *ud) {
  NewInput *a = ud;
  char name[32];
  int k = 0;
  for (GraphNode *n = a->t->graph->first; n; n = n->next) k += n->kind == GRAPH_INPUT;
  TraceStorage *ts = add_port(a->t, GRAPH_INPUT, a->x, &a->whole, &a->memory);
  ts->root = a->x->m;
  snprintf(name, sizeof name, "x%d", k);
  ts->current->node->name = arena_text(&a->t->graph->arena, name);
  ts->input = k + 1;
}

/* Within the step nothing lies between its elements. */
Tensor *trace_input(Trace *t, const Tensor *like, bool part) {
  Tensor *x = tensor_new(t->E);
  if (!x) return NULL;
  x->m = like->m;
  x->m.offset = 0;
  x->layout = like->layout;
  if (part) x->m.shape[0] /= t->tracer.times;
  NewInput a = {t, x, x->m, like->part ? like->part->m : x->m};
  a.memory.offset = 0;
  if (!shape_is_dense(x->m.ndim, x->m.shape, x->m.stride))
    shape_contiguous(x->m.ndim, x->m.shape, x->m.stride);
  tensor_open_traced(x);
  if (!arena_protect(&t->graph->arena, add_input, &a)) return x;
  tensor_release(x);
  return NULL;
}

typedef struct Ending {
  Trace *t;
  int n;
  Tensor *const *results;
} Ending;

/* v as what outlives the step is to lie. Before the writes, which come last. */
static GraphValue *lying(Trace *t, GraphValue *v, const Layout *l) {
  if (!l) return v;
  GraphNode *at = t->graph->last;
  while (at && at->kind == GRAPH_WRITE) at = at->prev;
  const Op *op = &op_table[OP_box];
  GraphNode *n =
      graph_add_op(t->graph, at ? at->next : t->graph->first, op, op->defaults, 1, &v, 1);
  n->segment = 0;
  graph_describe(t->graph, &n->out[0], (DType)v->dtype, v->device, v->ndim, v->shape);
  n->out[0].layout = layout_of(t, l);
  return &n->out[0];
}

static void finish(void *ud) {
  Ending *e = ud;
  Trace *t = e->t;
  Graph *g = t->graph;
  write_gradients(t);
  for (int k = 0; k < e->n; k++) {
    const Layout *l = e->results[k]->layout;
    *list_add(&g->arena, &t->result_layouts) = l;
    *list_add(&g->arena, &g->results) = lying(t, value_of(t, e->results[k], NULL), l);
  }
  for (size_t i = 0; i < t->storages.n; i++) {
    TraceStorage *ts = t->storages.at[i];
    if (ts->input && ts->writes) {
      *list_add(&g->arena, &t->written) = ts->input - 1;
      *list_add(&g->arena, &t->result_layouts) = ts->layout;
      *list_add(&g->arena, &g->results) = lying(t, ts->current, ts->layout);
    }
    if (!ts->capture || !ts->writes) continue;
    GraphValue *left = lying(t, ts->current, ts->layout);
    GraphNode *n = graph_add(g, GRAPH_WRITE, 1, 0);
    n->in[0] = left;
    n->target = ts->capture;
  }
  g->n_cells = (int)t->cells.n;
}

int trace_end(Trace *t, int n, Tensor *const *results) {
  Ending e = {t, n, results};
  int rc = n < 0 ? 0 : arena_protect(&t->graph->arena, finish, &e);
  t->E->tracer = NULL;
  for (size_t i = 0; i < t->storages.n; i++)
    if (t->storages.at[i]->capture)
      storage_set_absent(t->storages.at[i]->storage, STORAGE_TRACED, false);
  bool ended = n >= 0 && !rc;
  if (!restore_tape(t, ended) && ended) rc = MF_EUNSUPPORTED;
  restore_gradients(t, n < 0 || rc);
  return rc;
}

void trace_destroy(Trace *t) {
  if (!t) return;
  for (size_t i = 0; i < t->storages.n; i++) {
    tensor_release(t->storages.at[i]->first);
    storage_release(t->storages.at[i]->storage);
  }
  for (size_t i = 0; i < t->leaves.n; i++) {
    tensor_release(t->leaves.at[i].tensor);
    tensor_release(t->leaves.at[i].grad);
    if (t->leaves.at[i].node) tape_node_release(t->leaves.at[i].node);
  }
  map_free(&t->place);
  map_free(&t->leaf_place);
  mem_free(t);
}
