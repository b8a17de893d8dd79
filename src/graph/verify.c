/* Whether a graph is one. What passes may rely on, and must leave as it was:
 *
 *   1. Inputs and captures come first, writes last.
 *   2. A value is made before it is used, by a node of this graph.
 *   3. An op's inputs are as many as its arguments say, and required ones are there.
 *   4. Its outputs are what inference says for contiguous inputs of these shapes and dtypes; then
 *      the new values of the inputs that its signature marks as written, like those. An op that may
 *      work in place may keep the dtype of its first input.
 *   5. Only arguments that are single numbers are cells, each once, and the cells exist.
 *   6. What a write leaves in a capture has the capture's shape and dtype; one write a capture.
 *   7. Time: a node is computed once a step or once a micro-batch, and so is what it reads, plain
 *      numbers apart. Ops that spread lead from the first to the second, ops that gather back, and
 *      nothing leads from what was gathered to a micro-batch. A capture may be one of each
 *      micro-batch, which reads what the one before wrote; then its write is too. Results are of
 *      the step.
 *   8. Ranks: a layout splits dims that there are; the memory of a port whose value has one is a
 *      part's. A part lies inside of its whole. */
#include <stdio.h>
#include <string.h>

#include "graph_int.h"
#include "mem.h"
#include "op_args.h"
#include "slots.h"

static char *type_text(DType dtype, int ndim, const int64_t *shape, char *buf) {
  char sizes[SHAPE_TEXT_MAX];
  snprintf(buf, SHAPE_TEXT_MAX + 32, "%s %s", dtype_name(dtype), shape_text(ndim, shape, sizes));
  return buf;
}

static bool like_value(const GraphValue *a, const GraphValue *b) {
  return a->dtype == b->dtype && a->device == b->device &&
         shape_equal(a->ndim, a->shape, b->ndim, b->shape);
}

/* -- Inference --------------------------------------------------------------------------------- */

typedef struct Asking {
  Infer infer;
  Meta *metas, spare;
  int cap;
} Asking;

static Meta *add_meta(Infer *I) {
  Asking *a = (Asking *)I;
  int k = I->n_out++;
  return k < a->cap ? &a->metas[k] : &a->spare;
}

static bool make_room(Checker *c, int n) {
  if (n <= c->cap) return true;
  int cap = n * 2;
  Meta *metas = mem_resize(c->metas, sizeof *metas * (size_t)cap);
  if (metas) c->metas = metas;
  const Meta **in = mem_resize(c->in, sizeof *in * (size_t)cap);
  if (in) c->in = in;
  if (!metas || !in) return false;
  c->cap = cap;
  return true;
}

static void meta_of(const GraphValue *v, Meta *m) {
  *m = (Meta){.ndim = v->ndim, .dtype = v->dtype, .device = v->device, .number = v->number};
  memcpy(m->shape, v->shape, sizeof *m->shape * (size_t)v->ndim);
  shape_contiguous(v->ndim, m->shape, m->stride);
}

/* as_strided is about memory: its arguments say how its input lies there. */
static void lay_out(const GraphNode *n, Meta *m) {
  const struct as_strided_args *a = n->args;
  if (a->x_stride.n != m->ndim) return;
  memcpy(m->stride, a->x_stride.v, sizeof *m->stride * (size_t)m->ndim);
  m->offset = a->x_offset;
}

static int check_output(const GraphNode *n, int k, const Meta *m) {
  char want[SHAPE_TEXT_MAX + 32], have[SHAPE_TEXT_MAX + 32];
  const GraphValue *v = &n->out[k];
  bool dtype = v->dtype == m->dtype || (n->op->spec[0]->flags & OP_INPLACE && n->n_in && n->in[0] &&
                                        v->dtype == n->in[0]->dtype);
  if (dtype && v->device == m->device && shape_equal(v->ndim, v->shape, m->ndim, m->shape))
    return 0;
  return err_set(MF_EINVAL, "output %d is %s%s, inference says %s", k,
                 type_text((DType)v->dtype, v->ndim, v->shape, have),
                 v->device == m->device ? "" : " on another device",
                 type_text((DType)m->dtype, m->ndim, m->shape, want));
}

static int check_inference(Checker *c, GraphNode *n) {
  union {
    char bytes[OP_MAX_ARGS];
    double align;
  } args;
  int n_out = n->n_out - n->n_written;
  if (!make_room(c, n->n_in + n_out)) return err_set(MF_ENOMEM, "out of memory");
  memcpy(args.bytes, n->args, n->op->args_size);
  for (int k = 0; k < n->n_in; k++) {
    c->in[k] = n->in[k] ? &c->metas[k] : NULL;
    if (n->in[k]) meta_of(n->in[k], &c->metas[k]);
  }
  if (n->op->spec[0]->flags & OP_STRIDED) lay_out(n, &c->metas[0]);
  Asking a = {.infer = {.op = n->op,
                        .args = args.bytes,
                        .in = c->in,
                        .n_in = n->n_in,
                        .device = n_out ? n->out[0].device : DEVICE_CPU,
                        .add = add_meta},
              .metas = c->metas + n->n_in,
              .cap = n_out};
  int rc = n->op->spec[0]->infer(&a.infer);
  if (rc == INFER_COPY) return err_set(MF_EINVAL, "asks for a copy of a contiguous input");
  if (rc) return rc;
  if (a.infer.n_out != n_out)
    return err_set(MF_EINVAL, "has %d outputs, inference says %d", n_out, a.infer.n_out);
  for (int k = 0; k < n_out && !rc; k++) rc = check_output(n, k, &a.metas[k]);
  n->converts = n_out > 0 && n->out[0].dtype != a.metas[0].dtype;
  if (!rc && c->settle) memcpy(n->args, args.bytes, n->op->args_size);
  return rc;
}

/* -- Nodes ------------------------------------------------------------------------------------- */

/* Also that what the op writes is as its signature says, each with a new value like the old. */
static int check_inputs(const GraphNode *n) {
  const Op *op = n->op;
  int position = 0, n_in = 0, written = 0;
  for (int i = 0; i < op->n_params; i++) {
    const Param *p = &op->params[i];
    if (p->kind != PARAM_TENSOR) continue;
    if (p->list && *(const int64_t *)((const char *)n->args + p->offset) > n->n_in)
      return err_set(MF_EINVAL, "%s has more entries than there are inputs", p->name);
    int first, count;
    op_inputs_of_param(op, n->args, position++, &first, &count);
    if (count < 0 || first + count > n->n_in)
      return err_set(MF_EINVAL, "%s lies behind the inputs", p->name);
    n_in = first + count;
    for (int k = first; k < n_in; k++) {
      if (!n->in[k] && (p->list || !p->optional))
        return err_set(MF_EINVAL, "%s is missing", p->name);
      if (!p->mutated || !n->in[k]) continue;
      if (written >= n->n_written || n->written[written] != k)
        return err_set(MF_EINVAL, "%s is written, and has no new value", p->name);
      if (!like_value(n->in[k], &n->out[n->n_out - n->n_written + written++]))
        return err_set(MF_EINVAL, "the new value of %s has another shape or dtype", p->name);
    }
  }
  if (n_in != n->n_in) return err_set(MF_EINVAL, "has %d inputs, takes %d", n->n_in, n_in);
  if (written != n->n_written) return err_set(MF_EINVAL, "writes what it cannot write");
  return 0;
}

static int check_patches(const Graph *g, const GraphNode *n) {
  for (int k = 0; k < n->n_patches; k++) {
    const GraphPatch *p = &n->patches[k];
    if (p->param < 0 || p->param >= n->op->n_params)
      return err_set(MF_EINVAL, "a cell is for argument %d, which it has not", p->param);
    const Param *param = &n->op->params[p->param];
    bool single = param->kind == PARAM_FLOAT || param->kind == PARAM_BOOL ||
                  param->kind == PARAM_INT || param->kind == PARAM_DIM;
    if (!single) return err_set(MF_EINVAL, "%s cannot be a cell", param->name);
    if (graph_patch_of(n, p->param) != p) return err_set(MF_EINVAL, "%s is two cells", param->name);
    if (p->cell < 0 || p->cell >= g->n_cells)
      return err_set(MF_EINVAL, "%s is cell %d, there are %d", param->name, p->cell, g->n_cells);
  }
  return 0;
}

/* How often n has what it reads, and what it makes. */
static int check_times(const Graph *g, const GraphNode *n) {
  int flags = n->kind == GRAPH_OP ? n->op->spec[0]->flags : 0, reads = n->times;
  if (g->times < 1) return err_set(MF_EINVAL, "there are %d micro-batches", g->times);
  if (n->times != 1 && n->times != g->times)
    return err_set(MF_EINVAL, "is computed %d times, a step has %d micro-batches", n->times,
                   g->times);
  if (flags & OP_SPREADS) reads = 1;
  if (flags & OP_GATHERS) reads = g->times;
  if ((flags & OP_SPREADS && n->times != g->times) || (flags & OP_GATHERS && n->times != 1))
    return err_set(MF_EINVAL, "makes something %d times", n->times);
  for (int k = 0; k < n->n_in; k++)
    if (n->in[k] && !n->in[k]->number && n->in[k]->node->times != reads)
      return err_set(MF_EINVAL, "input %d is made %d times, it is read %d times", k,
                     n->in[k]->node->times, reads);
  if ((n->kind == GRAPH_INPUT || n->kind == GRAPH_NUMBER) && n->times != 1)
    return err_set(MF_EINVAL, "is there %d times", n->times);
  if (n->kind == GRAPH_WRITE && n->target && n->target->times != n->times)
    return err_set(MF_EINVAL, "a capture of %d times is written %d times", n->target->times,
                   n->times);
  for (int i = 0; flags & (OP_SPREADS | OP_GATHERS) && i < n->op->n_params; i++)
    if (g->times > 1 && !strcmp(n->op->params[i].name, "n") &&
        *(const int64_t *)(const void *)((const char *)n->args + n->op->params[i].offset) !=
            g->times)
      return err_set(MF_EINVAL, "n is not the number of micro-batches, %d", g->times);
  int ndim = n->n_out ? n->out[0].ndim : 0;
  if (n->along >= ndim && n->along >= 0)
    return err_set(MF_EINVAL, "draws along dim %d of %d", n->along, ndim);
  return 0;
}

static int check_op(Checker *c, const Graph *g, GraphNode *n) {
  if (n->op->spec[0]->flags & OP_DATA)
    return err_set(MF_EINVAL, "its outputs' shape depends on data");
  if (n->n_written < 0 || n->n_written > n->n_out) return err_set(MF_EINVAL, "writes too much");
  if (n->generator < 0 || n->generator >= g->n_generators)
    return err_set(MF_EINVAL, "draws from generator %d, there are %d", n->generator,
                   g->n_generators);
  int rc = check_inputs(n);
  if (!rc) rc = check_patches(g, n);
  return rc ? rc : check_inference(c, n);
}

/* Its memory: sizes and strides without overflow. */
static int check_port(const GraphNode *n) {
  const Meta *m = n->meta;
  if (n->n_in || n->n_out != 1 || !m || !n->name) return err_set(MF_EINVAL, "is no port");
  const GraphValue *v = &n->out[0];
  if (v->dtype != m->dtype || v->device != m->device || v->number ||
      !(v->layout || shape_equal(v->ndim, v->shape, m->ndim, m->shape)))
    return err_set(MF_EINVAL, "its value is not like its memory");
  int64_t last = 0, reach;
  bool fits = true;
  for (int d = 0; d < m->ndim && fits; d++)
    fits = m->stride[d] >= 0 &&
           !__builtin_mul_overflow(m->shape[d] ? m->shape[d] - 1 : 0, m->stride[d], &reach) &&
           !__builtin_add_overflow(last, reach, &last) && last < SHAPE_MAX;
  if (fits) return 0;
  return err_set(MF_EINVAL, "its strides lead too far");
}

static int check_number(const Graph *g, const GraphNode *n) {
  if (n->n_in || n->n_out != 1 || !n->out[0].number || n->out[0].ndim)
    return err_set(MF_EINVAL, "is no number");
  if (n->cell != NO_CELL && (n->cell < 0 || n->cell >= g->n_cells))
    return err_set(MF_EINVAL, "is cell %d, there are %d", n->cell, g->n_cells);
  return 0;
}

static int check_write(const GraphNode *n) {
  if (n->n_in != 1 || n->n_out || !n->in[0]) return err_set(MF_EINVAL, "is no write");
  if (!n->target || n->target->kind != GRAPH_CAPTURE)
    return err_set(MF_EINVAL, "only captures can be written");
  if (!like_value(n->in[0], &n->target->out[0]))
    return err_set(MF_EINVAL,
                   "what is written has another shape, dtype or device than the capture");
  return 0;
}

static bool is_inside(const GraphValue *v) {
  for (int d = 0; v->cut && d < v->ndim; d++) {
    int64_t start = v->cut[v->ndim + d];
    if (start < 0 || start > v->cut[d] || v->cut[d] - start < v->shape[d]) return false;
  }
  return true;
}

int graph_check_node(Checker *c, const Graph *g, GraphNode *n) {
  for (int k = 0; k < n->n_out; k++) {
    const GraphValue *v = &n->out[k];
    if (v->node != n || v->output != k || v->dtype >= DTYPE_COUNT || v->device >= DEVICE_SLOTS)
      return err_set(MF_EINVAL, "output %d is not described", k);
    if (v->number && n->kind != GRAPH_NUMBER)
      return err_set(MF_EINVAL, "output %d cannot be a plain number", k);
    int rc = shape_check("output", v->ndim, v->shape, (DType)v->dtype);
    if (!rc && v->layout) rc = sbp_list_check("layout", &v->layout->sbp, MF_MAX_AXES, v->ndim);
    if (rc) return rc;
    if (!is_inside(v)) return err_set(MF_EINVAL, "output %d is no part of its whole", k);
  }
  int timed = n->kind == GRAPH_OP && !n->op ? 0 : check_times(g, n);
  if (timed) return timed;
  switch ((GraphKind)n->kind) {
    case GRAPH_OP: return check_op(c, g, n);
    case GRAPH_INPUT:
    case GRAPH_CAPTURE: return check_port(n);
    case GRAPH_NUMBER: return check_number(g, n);
    case GRAPH_WRITE: return check_write(n);
  }
  return err_set(MF_EINVAL, "is of no kind");
}

void graph_check_free(Checker *c) {
  mem_free(c->metas);
  mem_free(c->in);
  mem_free(c->made);
  mem_free(c->late);
}

/* -- The whole --------------------------------------------------------------------------------- */

static int rank_of(const GraphNode *n) {
  if (n->kind == GRAPH_INPUT || n->kind == GRAPH_CAPTURE) return 0;
  return n->kind == GRAPH_WRITE ? 2 : 1;
}

/* Not by its id alone: nodes that were removed have one too. */
static bool is_made(const Checker *c, const GraphValue *v) {
  return v->id >= 0 && v->id < c->n_made && c->made[v->id] == v;
}

static int check_place(Checker *c, const GraphNode *n) {
  if (n->prev && rank_of(n->prev) > rank_of(n))
    return err_set(MF_EINVAL, "inputs and captures come first, writes last");
  for (int k = 0; k < n->n_in; k++)
    if (n->in[k] && !is_made(c, n->in[k]))
      return err_set(MF_EINVAL, "input %d is not made before it is used", k);
  if (n->kind != GRAPH_WRITE || !n->target || n->target->kind != GRAPH_CAPTURE) return 0;
  if (!is_made(c, &n->target->out[0]))
    return err_set(MF_EINVAL, "the capture is none of the graph");
  if (n->target->mark) return err_set(MF_EINVAL, "the capture is written twice");
  n->target->mark = n->target;
  return 0;
}

/* Whether n follows from what micro-batches left. */
static bool is_late(const Checker *c, const GraphNode *n) {
  bool late = n->kind == GRAPH_OP && n->op->spec[0]->flags & OP_GATHERS;
  for (int k = 0; k < n->n_in && !late; k++) late = n->in[k] && c->late[n->in[k]->id];
  return late;
}

/* Numbers what n makes. */
static int note_made(Checker *c, GraphNode *n) {
  if (c->n_made + n->n_out > c->cap_made) {
    int64_t cap = 2 * (c->n_made + n->n_out) + 64;
    const GraphValue **made = mem_resize(c->made, sizeof *made * (size_t)cap);
    if (!made) return err_set(MF_ENOMEM, "out of memory");
    c->made = made;
    bool *late = mem_resize(c->late, sizeof *late * (size_t)cap);
    if (!late) return err_set(MF_ENOMEM, "out of memory");
    c->late = late;
    c->cap_made = cap;
  }
  bool late = is_late(c, n);
  if (late && n->kind == GRAPH_OP && n->op->spec[0]->flags & OP_SPREADS)
    return err_set(MF_EINVAL, "leads from what the micro-batches left back to them");
  for (int k = 0; k < n->n_out; k++) {
    n->out[k].id = c->n_made;
    n->out[k].mark = NULL;
    c->late[c->n_made] = late;
    c->made[c->n_made++] = &n->out[k];
  }
  return 0;
}

static const char *name_of(const GraphNode *n) {
  static const char *const kinds[] = {"op", "input", "capture", "number", "write"};
  return n->kind == GRAPH_OP && n->op ? n->op->name : n->kind <= GRAPH_WRITE ? kinds[n->kind] : "?";
}

static int explain(int rc, const char *after, const GraphNode *n) {
  char what[256];
  snprintf(what, sizeof what, "graph after %s: %s (node %lld%s%s)", after,
           n ? name_of(n) : "return", n ? (long long)n->id : -1LL, n && n->where ? ", " : "",
           n && n->where ? n->where : "");
  return err_prefix(rc, what);
}

static int check_all(Graph *g, const char *after, Checker *c) {
  int64_t nodes = 0;
  for (GraphNode *n = g->first; n; n = n->next) {
    n->id = nodes++;
    n->mark = NULL;
    int rc = check_place(c, n);
    if (!rc) rc = graph_check_node(c, g, n);
    if (!rc) rc = note_made(c, n);
    if (rc) return explain(rc, after, n);
  }
  for (size_t i = 0; i < g->results.n; i++)
    if (!g->results.at[i] || !is_made(c, g->results.at[i]))
      return explain(err_set(MF_EINVAL, "result %d is not made", (int)i + 1), after, NULL);
    else if (g->results.at[i]->node->times != 1)
      return explain(err_set(MF_EINVAL, "result %d is of each micro-batch", (int)i + 1), after,
                     NULL);
  return 0;
}

int graph_verify(Graph *g, const char *after) {
  Checker c = {0};
  int rc = check_all(g, after, &c);
  for (GraphNode *n = g->last; n && n->kind == GRAPH_WRITE; n = n->prev)
    if (n->target) n->target->mark = NULL;
  graph_check_free(&c);
  return rc;
}
