/* Images of whole regions of convolutions lie with channels innermost (channels_last).
 *
 * Why: the fast kernels for convolutions want channels innermost or in blocks, so each one on plain
 * (N, C, H, W) images reorders what it reads and writes; and pooling and normalisation are fast
 * where a vector holds channels. Once images are channels_last, what is made of them is too, as
 * each op's inference says, and nothing is reordered any more. Blocked layouts are no faster by
 * more than some 5 % on AVX-512, which is less than what the other ops would lose.
 *
 * The graph has no strides: they follow from ports by inference. So what the pass adds is a `clone`
 * with memory_format channels_last in front of a convolution whose image would be plain, and, where
 * a region's image is a result, one that gives it the format that eager gives it.
 *
 * By cost: one walk infers how each value lies, as things are and with all convolutions' images
 * channels_last. Values that differ in the two, and the nodes that have them, are regions: what is
 * connected through them. Bytes that are moved only for their order are added up for each region in
 * both ways: images that a convolution reorders, copies of inputs in other ops (their scratch),
 * views that cannot be seen without a copy, the clones that would be added. A region changes where
 * it moves less then. Values of float64, for which convolution has plain loops alone, are left as
 * they are, as is a graph with as_strided, which is about memory itself, and a region of which
 * results share memory. It ends: two walks in order, with nearly constant work for each node.
 *
 * What it may change: sums, and statistics of normalisations, take elements in another order, and
 * convolution has other kernels, so results differ in their last bits. */
#include <string.h>

#include "device.h"
#include "image.h"
#include "op_args.h"
#include "op_ids.h"
#include "pass.h"

enum { FEW = 4 /* channels of an image that convolution reads as it is */ };

/* What is connected; the one at the end of `joined` counts. */
typedef struct Region {
  struct Region *joined;
  int64_t plain, last; /* bytes moved as things are, and with images channels_last */
  bool refused;
} Region;

/* How a value lies. */
typedef struct Lie {
  Meta plain, last; /* as things are, and with images channels_last */
  Region *region;   /* where these differ, or `wanted`; else NULL */
  bool wanted;      /* a convolution asks for it in channels_last, and there it is plain too */
  GraphValue *copy; /* that it gets */
} Lie;

/* Input k of node n is to be the copy of its value. */
typedef struct Wish {
  GraphNode *n;
  int k;
} Wish;

typedef struct Layout {
  Graph *g;
  const PassSettings *settings;
  LIST(Wish) wishes;
} Layout;

static Lie *lie_of(const GraphValue *v) {
  return v->mark;
}

static int64_t bytes_of(const GraphValue *v) {
  return graph_numel(v) * (int64_t)dtype_size((DType)v->dtype);
}

/* -- Regions ----------------------------------------------------------------------------------- */

static Region *region_end(Region *r) {
  while (r->joined) {
    if (r->joined->joined) r->joined = r->joined->joined;
    r = r->joined;
  }
  return r;
}

/* Both as one; either may be NULL. */
static Region *join(Region *a, Region *b) {
  if (!a || !b) return a ? a : b;
  a = region_end(a);
  b = region_end(b);
  if (a == b) return a;
  b->joined = a;
  a->plain += b->plain;
  a->last += b->last;
  a->refused |= b->refused;
  return a;
}

static bool keeps(Region *r) {
  r = region_end(r);
  return !r->refused && r->last < r->plain;
}

/* -- Inference of strides ---------------------------------------------------------------------- */

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

/* The outputs of n on such inputs, contiguous where a view needs a copy; whether it does. */
static bool infer(Layout *w, const GraphNode *n, const Meta **in, Meta *out) {
  Arena *arena = &w->g->arena;
  Asking a = {.metas = out, .cap = n->n_out - n->n_written};
  for (int copied = 0; copied < 2; copied++) {
    a.infer = (Infer){.op = n->op,
                      .args = arena_copy(arena, n->args, n->op->args_size),
                      .in = in,
                      .n_in = n->n_in,
                      .device = DEVICE_CPU,
                      .add = add_meta};
    int rc = n->op->spec[0]->infer(&a.infer);
    if (rc != INFER_COPY) {
      if (rc) arena_throw(arena, rc);
      for (int k = 0; k < a.cap; k++) out[k].dtype = n->out[k].dtype;
      return copied;
    }
    Meta *dense = arena_copy(arena, in[0], sizeof *dense);
    shape_contiguous(dense->ndim, dense->shape, dense->stride);
    in[0] = dense;
  }
  return true;
}

static View view_of(const Meta *m) {
  if (!m) return (View){.ndim = -1};
  return (View){.shape = m->shape,
                .stride = m->stride,
                .ndim = m->ndim,
                .dtype = m->dtype,
                .number = m->number};
}

/* Bytes of scratch that n asks for. */
static int64_t scratch_of(Layout *w, const GraphNode *n, const Meta *const *in, const Meta *out) {
  const OpSpec *spec = n->op->spec[w->settings->isa];
  int n_out = n->n_out - n->n_written;
  if (!spec->scratch || !w->settings->stream) return 0;
  View *views = arena_array(&w->g->arena, View, n->n_in + n_out);
  for (int k = 0; k < n->n_in; k++) views[k] = view_of(in[k]);
  for (int k = 0; k < n_out; k++) views[n->n_in + k] = view_of(&out[k]);
  OpCall call = {.op = n->op,
                 .args = n->args,
                 .in = views,
                 .out = views + n->n_in,
                 .n_in = n->n_in,
                 .n_out = n_out,
                 .stream = w->settings->stream};
  return (int64_t)spec->scratch(&call);
}

/* -- Convolutions ------------------------------------------------------------------------------ */

/* The images among a convolution's inputs, as bits; the images among all its values with output 0
 * as bit 8. */
typedef struct Images {
  int op;
  unsigned in, all;
} Images;

static const Images convolutions[] = {
    {OP_conv2d, 1, 1 | 1 << 8},
    {OP_conv2d_input, 1, 1 | 1 << 8},
    {OP_conv2d_weight, 3, 3},
    {OP_conv2d_weight_bias, 3, 3},
};

static const Images *images_of(const GraphNode *n) {
  for (size_t i = 0; i < sizeof convolutions / sizeof convolutions[0]; i++)
    if (n->op->id == convolutions[i].op && n->out[0].dtype != F64) return &convolutions[i];
  return NULL;
}

/* Bytes of image v that a convolution reorders when it lies so. */
static int64_t reorders(const GraphValue *v, const Meta *m) {
  if (m->ndim != 4 || image_meta_is_last(m) || m->shape[1] < FEW) return 0;
  return bytes_of(v);
}

static int64_t reorders_all(const GraphNode *n, const Images *images, const Meta *const *in,
                            const Meta *out) {
  int64_t bytes = 0;
  for (int k = 0; k < 2; k++)
    if (images->all >> k & 1) bytes += reorders(n->in[k], in[k]);
  return images->all >> 8 & 1 ? bytes + reorders(&n->out[0], out) : bytes;
}

/* Image k of convolution n is to be channels_last. */
static Region *wish(Layout *w, GraphNode *n, int k, Meta *meta) {
  Lie *lie = lie_of(n->in[k]);
  if (lie->last.ndim != 4 || image_meta_is_last(&lie->last) || !meta_numel(&lie->last)) return NULL;
  *meta = lie->last;
  shape_channels_last(meta->shape, meta->stride);
  *list_add(&w->g->arena, &w->wishes) = (Wish){n, k};
  if (!lie->wanted) {
    Region *own = arena_new(&w->g->arena, Region);
    own->last = 2 * bytes_of(n->in[k]);
    lie->region = join(lie->region, own);
    lie->wanted = true;
  }
  return lie->region;
}

/* -- The walk ---------------------------------------------------------------------------------- */

static bool lie_equal(const Meta *a, const Meta *b) {
  return shape_equal(a->ndim, a->stride, b->ndim, b->stride);
}

static void look_at_port(const GraphNode *n) {
  for (int k = 0; k < n->n_out; k++) {
    Lie *lie = lie_of(&n->out[k]);
    const GraphValue *v = &n->out[k];
    if (n->meta) lie->plain = *n->meta;
    else lie->plain = (Meta){.dtype = v->dtype, .number = v->number};
    lie->last = lie->plain;
  }
}

/* Both ways that the inputs of n lie; the region that they are of. */
static Region *look_at_inputs(Layout *w, GraphNode *n, const Images *images, const Meta **plain,
                              const Meta **last) {
  Region *r = NULL;
  Meta *metas = arena_array(&w->g->arena, Meta, images ? n->n_in : 0);
  for (int k = 0; k < n->n_in; k++) {
    plain[k] = last[k] = NULL;
    if (!n->in[k]) continue;
    Lie *lie = lie_of(n->in[k]);
    plain[k] = &lie->plain;
    last[k] = &lie->last;
    if (!lie_equal(plain[k], last[k])) r = join(r, lie->region);
    Region *asked = images && images->in >> k & 1 ? wish(w, n, k, &metas[k]) : NULL;
    if (asked) last[k] = &metas[k];
    r = join(r, asked);
  }
  return r;
}

static void look_at_outputs(GraphNode *n, Region *r, const Meta *plain, const Meta *last) {
  int n_out = n->n_out - n->n_written;
  for (int k = 0; k < n->n_out; k++) {
    Lie *lie = lie_of(&n->out[k]);
    const Lie *written = k < n_out ? NULL : lie_of(n->in[n->written[k - n_out]]);
    lie->plain = written ? written->plain : plain[k];
    lie->last = written ? written->last : last[k];
    if (!lie_equal(&lie->plain, &lie->last)) lie->region = r;
  }
}

static void look_at_op(Layout *w, GraphNode *n) {
  Arena *arena = &w->g->arena;
  const Images *images = images_of(n);
  int n_out = n->n_out - n->n_written;
  const Meta **plain = arena_array(arena, const Meta *, n->n_in);
  const Meta **last = arena_array(arena, const Meta *, n->n_in);
  Meta *metas = arena_array(arena, Meta, 2 * n_out);
  Region *r = look_at_inputs(w, n, images, plain, last);
  int64_t first = n->n_in && n->in[0] ? 2 * bytes_of(n->in[0]) : 0;
  int64_t copies[2] = {infer(w, n, plain, metas) ? first : 0, 0};
  if (r) {
    copies[1] = infer(w, n, last, metas + n_out) ? first : 0;
    if (images) {
      copies[0] = 2 * reorders_all(n, images, plain, metas);
      copies[1] = 2 * reorders_all(n, images, last, metas + n_out);
    } else if (!(n->op->spec[0]->flags & OP_VIEW)) {
      copies[0] = 2 * scratch_of(w, n, plain, metas);
      copies[1] = 2 * scratch_of(w, n, last, metas + n_out);
    }
    r = region_end(r);
    r->plain += copies[0];
    r->last += copies[1];
  } else {
    memcpy(metas + n_out, metas, sizeof *metas * (size_t)n_out);
  }
  look_at_outputs(n, r, metas, metas + n_out);
}

/* -- Results ----------------------------------------------------------------------------------- */

static GraphValue *root_of(GraphValue *v) {
  while (v->node->kind == GRAPH_OP && v->node->op->spec[0]->flags & OP_VIEW) v = v->node->in[0];
  return v;
}

/* A result that would lie in another way is copied; where that would part it from another result,
 * or into a way that clone does not know, its region stays. */
static void look_at_results(Layout *w) {
  for (size_t i = 0; i < w->g->results.n; i++) {
    GraphValue *v = w->g->results.at[i], *root = root_of(v);
    Lie *lie = lie_of(v);
    if (lie_equal(&lie->plain, &lie->last)) continue;
    Region *r = region_end(lie->region);
    r->last += 2 * bytes_of(v);
    if (!meta_is_contiguous(&lie->plain) && !image_meta_is_last(&lie->plain)) r->refused = true;
    for (size_t j = 0; j < w->g->results.n; j++)
      if (w->g->results.at[j] != v && root_of(w->g->results.at[j]) == root) r->refused = true;
  }
}

/* -- Copies ------------------------------------------------------------------------------------ */

/* A copy of v in front of `at`, or at the end of what is no write. */
static GraphValue *add_copy(Graph *g, GraphValue *v, GraphNode *at, bool last, const char *where) {
  const Op *op = &op_table[OP_clone];
  struct clone_args args = {.memory_format = last ? 2 : 1};
  if (!at) {
    GraphNode *end = g->last;
    while (end && end->kind == GRAPH_WRITE) end = end->prev;
    at = end ? end->next : g->first;
  }
  GraphNode *n = graph_add_op(g, at, op, &args, 1, &v, 1);
  n->where = where;
  graph_describe(g, &n->out[0], (DType)v->dtype, v->device, v->ndim, v->shape);
  return &n->out[0];
}

static void grant(Layout *w, const Wish *wish) {
  GraphValue *v = wish->n->in[wish->k];
  Lie *lie = lie_of(v);
  if (!keeps(lie->region)) return;
  if (!lie->copy) lie->copy = add_copy(w->g, v, wish->n, true, wish->n->where);
  wish->n->in[wish->k] = lie->copy;
}

static void restore_results(Layout *w) {
  Graph *g = w->g;
  GraphValue **now = arena_array(&g->arena, GraphValue *, g->results.n);
  for (size_t i = 0; i < g->results.n; i++) {
    GraphValue *v = now[i] = g->results.at[i];
    const Lie *lie = lie_of(v);
    if (lie_equal(&lie->plain, &lie->last) || !keeps(lie->region)) continue;
    for (size_t j = 0; j < i && now[i] == v; j++)
      if (g->results.at[j] == v) now[i] = now[j];
    if (now[i] == v) now[i] = add_copy(g, v, NULL, image_meta_is_last(&lie->plain), v->node->where);
  }
  memcpy(g->results.at, now, sizeof *now * g->results.n);
}

static bool suits(const Graph *g) {
  bool any = false;
  for (size_t i = 0; i < sizeof convolutions / sizeof convolutions[0]; i++)
    any |= g->has[convolutions[i].op];
  if (!any) return false;
  any = false;
  for (const GraphNode *n = g->first; n; n = n->next) {
    if (n->kind != GRAPH_OP) continue;
    if (n->op->spec[0]->flags & OP_STRIDED) return false;
    any |= images_of(n) != NULL;
  }
  return any;
}

void pass_layout(Graph *g, const PassSettings *settings) {
  Layout w = {.g = g, .settings = settings};
  if (!suits(g)) return;
  for (GraphNode *n = g->first; n; n = n->next)
    for (int k = 0; k < n->n_out; k++) n->out[k].mark = arena_new(&g->arena, Lie);
  for (GraphNode *n = g->first; n; n = n->next) {
    if (n->kind == GRAPH_OP) look_at_op(&w, n);
    else look_at_port(n);
  }
  look_at_results(&w);
  for (size_t i = 0; i < w.wishes.n; i++) grant(&w, &w.wishes.at[i]);
  restore_results(&w);
  graph_clear_marks(g);
}
