/* pad and its gradient. Constant padding copies x into the output and fills the slabs around it;
 * the other modes read each output element from a place of x that a table per dim names, and their
 * gradient adds along the same tables. */
#include "copy_views.h"
#include "op_args.h"
#include "rows_add.h"
#include "sbp_rule.h"

enum { PAD_CONSTANT, PAD_REFLECT, PAD_REPLICATE, PAD_CIRCULAR };

/* Amounts before and after dim d of ndim; `pad` lists pairs from the last dim on. */
static void pad_of(const IntList *pad, int ndim, int d, int64_t *before, int64_t *after) {
  int k = 2 * (ndim - 1 - d);
  *before = k + 1 < pad->n ? pad->v[k] : 0;
  *after = k + 1 < pad->n ? pad->v[k + 1] : 0;
}

static int64_t crop_of(int64_t pad) {
  return pad < 0 ? -pad : 0;
}

static const char *pad_limit(int64_t mode, int64_t n, int64_t before, int64_t after) {
  int64_t kept = n - crop_of(before) - crop_of(after);
  if (mode == PAD_REFLECT && (before >= n || after >= n)) return "reflect needs less than the size";
  if (mode == PAD_CIRCULAR && kept >= 0 && (before > kept || after > kept))
    return "circular needs at most the size that is left";
  if (mode == PAD_REPLICATE && n == 0) return "replicate needs an element";
  return NULL;
}

static int pad_shape(Infer *I, const IntList *pad, int64_t mode, int ndim, const int64_t *x,
                     int64_t *shape) {
  if (pad->n % 2)
    return infer_error(I, "pad has %d entries; it lists pairs (before, after) from the last dim on",
                       (int)pad->n);
  if (pad->n > 2 * ndim)
    return infer_error(I, "pad names %d dims, x has %d", (int)pad->n / 2, ndim);
  for (int d = 0; d < ndim; d++) {
    int64_t before, after;
    pad_of(pad, ndim, d, &before, &after);
    if (before > INT64_MAX / 8 || after > INT64_MAX / 8 || before < -INT64_MAX / 8 ||
        after < -INT64_MAX / 8)
      return infer_error(I, "pad %lld is too large", (long long)(before > after ? before : after));
    shape[d] = x[d] + before + after;
    const char *limit = before || after ? pad_limit(mode, x[d], before, after) : NULL;
    if (limit)
      return infer_error(I, "pad (%lld, %lld) is too much for dim %d of size %lld; %s",
                         (long long)before, (long long)after, d, (long long)x[d], limit);
    bool whole = mode == PAD_REFLECT || mode == PAD_REPLICATE; /* read x beyond what is cropped */
    if (shape[d] < 0 || (!whole && crop_of(before) + crop_of(after) > x[d]))
      return infer_error(I, "pad (%lld, %lld) leaves less than nothing of dim %d of size %lld",
                         (long long)before, (long long)after, d, (long long)x[d]);
  }
  return 0;
}

static int pad_infer(Infer *I) {
  const struct pad_args *a = I->args;
  const Meta *x = I->in[0];
  int64_t shape[MF_MAX_DIMS];
  int rc = pad_shape(I, &a->pad, a->mode, x->ndim, x->shape, shape);
  if (!rc) rc = infer_want_held(I, "value", a->value, (DType)x->dtype);
  if (!rc) rc = infer_shape(I, (DType)x->dtype, x->ndim, shape);
  if (!rc && x->ndim == 4 && shape_is_channels_last(4, x->shape, x->stride) &&
      !meta_is_contiguous(x))
    shape_channels_last(shape, I->last->stride);
  return rc;
}

/* -- Constant ---------------------------------------------------------------------------------- */

typedef struct Slab {
  View v;
  int64_t shape[MF_MAX_DIMS];
} Slab;

static void slab_narrow(Slab *s, int d, int64_t start, int64_t length) {
  s->v.data = (char *)s->v.data + start * s->v.stride[d] * (int64_t)dtype_size((DType)s->v.dtype);
  s->shape[d] = length;
}

static void slab_copy(Slab *to, const Slab *from) {
  *to = *from;
  to->v.shape = to->shape;
}

static void slab_init(Slab *s, const View *v) {
  s->v = *v;
  memcpy(s->shape, v->shape, sizeof(int64_t) * (size_t)v->ndim);
  s->v.shape = s->shape;
}

static void pad_constant(const struct pad_args *a, const View *x, const View *y) {
  Slab inside, source, border;
  slab_init(&inside, y);
  slab_init(&source, x);
  for (int d = 0; d < y->ndim;
       d++) { /* what is outside in dim d, of what is inside in the dims before */
    int64_t before, after, n = y->shape[d];
    pad_of(&a->pad, y->ndim, d, &before, &after);
    int64_t crop_before = crop_of(before), crop_after = crop_of(after);
    if (before < 0) before = 0;
    if (after < 0) after = 0;
    for (int side = 0; side < 2; side++) {
      slab_copy(&border, &inside);
      slab_narrow(&border, d, side ? n - after : 0, side ? after : before);
      copy_fill(&border.v, a->value);
    }
    slab_narrow(&inside, d, before, n - before - after);
    slab_narrow(&source, d, crop_before, x->shape[d] - crop_before - crop_after);
  }
  copy_views(&source.v, &inside.v);
}

/* -- Other modes ------------------------------------------------------------------------------- */

/* Which of n entries stands at place i of the padded side. Circular padding goes round what is left
 * after cropping; the other modes look at x as it is. */
static int64_t pad_source(int64_t mode, int64_t i, int64_t n, int64_t before, int64_t after) {
  i -= before;
  if (mode == PAD_CIRCULAR) {
    int64_t first = crop_of(before), end = n - crop_of(after);
    return i < first ? i + end - first : i >= end ? i - end + first : i;
  }
  if (i >= 0 && i < n) return i;
  if (mode == PAD_REPLICATE) return i < 0 ? 0 : n - 1;
  return i < 0 ? -i : 2 * (n - 1) - i;
}

typedef struct PadJob {
  const View *wide, *narrow;   /* the padded side and the other */
  int64_t *table[MF_MAX_DIMS]; /* offsets in elements on the narrow side, by place on the padded
                                  side; NULL where a dim is not padded */
  int outer;                   /* leading dims that are not padded: independent parts */
  int64_t parts;
  bool back;
} PadJob;

static size_t pad_tables(const View *wide) {
  size_t n = 0;
  for (int d = 0; d < wide->ndim; d++) n += (size_t)wide->shape[d];
  return n * sizeof(int64_t);
}

static void pad_row(const PadJob *j, char *wide, char *narrow, int d) {
  const View *w = j->wide;
  int64_t size = (int64_t)dtype_size((DType)w->dtype);
  static CopyMove *const moves[] = {copy_move1, copy_move2, copy_move4, copy_move8};
  CopyMove *move = moves[__builtin_ctz((unsigned)size)];
  int64_t n = w->shape[d], step = w->stride[d] * size;
  for (int64_t i = 0; i < n;) {
    int64_t at = j->table[d][i], run = 1, next = j->narrow->stride[d];
    while (i + run < n && j->table[d][i + run] == at + run * next) run++;
    if (!j->back) move(run, narrow + at * size, next, wide + i * step, w->stride[d]);
    else if (next == 1 && w->stride[d] == 1)
      rows_add[w->dtype](1, &at, run, narrow, wide + i * step, 0);
    else
      for (int64_t k = 0; k < run; k++)
        rows_add[w->dtype](1, (int64_t[]){at + k * next}, 1, narrow, wide + (i + k) * step, 0);
    i += run;
  }
}

static void pad_dims(const PadJob *j, char *wide, char *narrow, int d) {
  int64_t size = (int64_t)dtype_size((DType)j->wide->dtype);
  if (d == j->wide->ndim - 1) {
    pad_row(j, wide, narrow, d);
    return;
  }
  for (int64_t i = 0; i < j->wide->shape[d]; i++)
    pad_dims(j, wide + i * j->wide->stride[d] * size, narrow + j->table[d][i] * size, d + 1);
}

static void pad_range(int64_t begin, int64_t end, void *arg) {
  const PadJob *j = arg;
  int64_t size = (int64_t)dtype_size((DType)j->wide->dtype);
  for (int64_t p = begin; p < end; p++) {
    int64_t rest = p, wide = 0, narrow = 0;
    for (int d = j->outer - 1; d >= 0; d--) {
      int64_t i = rest % j->wide->shape[d];
      rest /= j->wide->shape[d];
      wide += i * j->wide->stride[d];
      narrow += i * j->narrow->stride[d];
    }
    pad_dims(j, (char *)j->wide->data + wide * size, (char *)j->narrow->data + narrow * size,
             j->outer);
  }
}

static void pad_by_tables(const IntList *pad, int64_t mode, const View *wide, const View *narrow,
                          int64_t *table, bool back) {
  PadJob j = {.wide = wide, .narrow = narrow, .parts = 1, .back = back};
  int ndim = wide->ndim, first = ndim - (int)pad->n / 2;
  for (int d = 0; d < ndim; d++) {
    int64_t before, after;
    pad_of(pad, ndim, d, &before, &after);
    j.table[d] = table;
    for (int64_t i = 0; i < wide->shape[d]; i++)
      *table++ = pad_source(mode, i, narrow->shape[d], before, after) * narrow->stride[d];
  }
  j.outer = first < ndim ? first : ndim - 1;
  int64_t numel = view_numel(wide);
  for (int d = 0; d < j.outer; d++) j.parts *= wide->shape[d];
  if (numel) mf_parallel(j.parts, 1 + COPY_GRAIN / (numel / j.parts), pad_range, &j);
}

static size_t pad_scratch(const OpCall *c) {
  return ((const struct pad_args *)c->args)->mode == PAD_CONSTANT ? 0 : pad_tables(&c->out[0]);
}

static int pad_cpu(const OpCall *c) {
  const struct pad_args *a = c->args;
  if (a->mode == PAD_CONSTANT || c->out[0].ndim == 0) pad_constant(a, &c->in[0], &c->out[0]);
  else pad_by_tables(&a->pad, a->mode, &c->out[0], &c->in[0], c->scratch, false);
  return 0;
}

/* Dims that no pad touches. */
static int untouched_sbp(SbpAsk *q, const IntList *pad) {
  int rc = 0;
  for (int d = 0; d < q->in[0]->ndim - (int)pad->n / 2 && !rc; d++)
    rc = sbp_add_split(q, 0, d, 0, d);
  return rc;
}

static int pad_sbp(SbpAsk *q) {
  const struct pad_args *a = q->args;
  int rc = untouched_sbp(q, &a->pad);
  return rc || (a->mode == 0 && a->value != 0) ? rc : sbp_linear(q, "x");
}

/* x with entries added at the ends of its last dims: pad lists (before, after) from the last dim
 * on. They hold value, or x reflected at the edge, or the edge repeated, or x from the other end. A
 * negative pad crops: before circular padding, and what the others give after it. */
OP(pad,
   .signature =
       "pad(Tensor x, int[] pad, *, str(constant|reflect|replicate|circular) mode=constant, float "
       "value=0) -> Tensor",
   .sbp_rule = pad_sbp, .infer = pad_infer, .cpu = pad_cpu, .scratch = pad_scratch)

static int pad_backward_infer(Infer *I) {
  const struct pad_backward_args *a = I->args;
  const Meta *g = I->in[0];
  int64_t shape[MF_MAX_DIMS];
  if (a->mode == PAD_CONSTANT)
    return infer_error(I, "mode 'constant' has another gradient: a negative pad");
  int rc = infer_want_sizes(I, "size", &a->size, g->ndim, (DType)g->dtype);
  if (!rc) rc = pad_shape(I, &a->pad, a->mode, g->ndim, a->size.v, shape);
  if (!rc) rc = infer_want_shape(I, 0, g->ndim, shape);
  return rc ? rc : infer_shape(I, (DType)g->dtype, g->ndim, a->size.v);
}

static size_t pad_backward_scratch(const OpCall *c) {
  return pad_tables(&c->in[0]);
}

static int pad_backward_cpu(const OpCall *c) {
  const struct pad_backward_args *a = c->args;
  copy_zero(&c->out[0]);
  if (c->out[0].ndim == 0) return copy_views(&c->in[0], &c->out[0]);
  pad_by_tables(&a->pad, a->mode, &c->in[0], &c->out[0], c->scratch, true);
  return 0;
}

static int pad_backward_sbp(SbpAsk *q) {
  const struct pad_backward_args *a = q->args;
  return untouched_sbp(q, &a->pad);
}

/* The gradient of pad for modes other than constant: what the elements of g sum to at their places
 * in x, of shape `size`. */
OP(pad_backward,
   .signature =
       "pad_backward(Tensor g, int[] size, int[] pad, str(constant|reflect|replicate|circular) "
       "mode) -> Tensor",
   .flags = OP_HIDDEN, .sbp_rule = pad_backward_sbp, .linear = "g", .infer = pad_backward_infer,
   .cpu = pad_backward_cpu, .scratch = pad_backward_scratch)
