/* layer_norm, rms_norm and group_norm with their gradients.
 *
 * A line (the dims that are normalised together) is read from memory once: its moments, its sums
 * and its result are computed while it lies in the cache. The gradient computes the moments again,
 * so that nothing but the input is kept between the passes. Gradients of weights are summed over
 * lines in short float groups that are added up in double, for each of a number of parts that
 * depends on the sizes alone; these are joined in order. */
#include "copy_views.h"
#include "lines.h"
#include "norm_rows.h"
#include "op_args.h"
#include "pointwise.h"
#include "sbp_rule.h"

enum {
  FLUSH = 32 /* lines summed in the elements' own type */,
  NORM_PART = 1 << 17,
  NORM_PARTS = 64,
  NORM_H = 2,     /* of the backward's inputs: what is added to gx, */
  NORM_MORE = 3,  /* and what is added to g */
  NORM_INPUTS = 4 /* that are lines, at most */
};

/* -- Layer and RMS norm ------------------------------------------------------------------------ */

typedef struct NormJob {
  Lines lines;
  bool centre;
  bool adds;   /* forward: the two inputs, to the second output */
  int h, more; /* backward: the operands that are added to gx and to g; 0: none */
  double eps;
  int64_t n;
  char *w, *b; /* n each, of the compute type */
  char *sums;  /* backward, a part: gw, gb in double, then both in the compute type */
  size_t sums_bytes;
} NormJob;

/* Into how many parts, `most` at most, lines of n elements are cut to sum the gradients of weights;
 * by the sizes alone, so that the sums do not depend on the number of threads. */
static int64_t norm_parts(int64_t lines, int64_t n, int64_t most) {
  int64_t parts = lines * n / NORM_PART;
  if (most > NORM_PARTS) most = NORM_PARTS;
  return parts > 1 && most > 1 ? parts < most ? parts : most : lines > 0;
}

/* A view of the same elements without gaps, at `to`. */
static View contiguous_at(const View *v, char *to, int64_t *stride) {
  View c = *v;
  shape_contiguous(v->ndim, v->shape, stride);
  c.data = to;
  c.stride = stride;
  return c;
}

/* The weights as n elements of the compute type, or the same number everywhere. */
static void norm_weight(const View *v, PointwiseClass cls, int64_t n, double otherwise, char *to) {
  static const int64_t none[1];
  View all = {.data = to,
              .shape = &n,
              .stride = (int64_t[]){1},
              .ndim = 1,
              .dtype = (uint8_t)(cls == PW_F64 ? F64 : F32)};
  View number = {.data = &otherwise, .shape = none, .stride = none, .dtype = F64};
  if (view_absent(v)) {
    copy_views(&number, &all);
    return;
  }
  int64_t stride[MF_MAX_DIMS];
  View shaped = contiguous_at(v, to, stride);
  shaped.dtype = all.dtype;
  copy_views(v, &shaped);
}

/* Lays out scratch from `base` (NULL: only counts) and sets the job up; inputs whose line is not
 * one run of memory are copied. The bytes needed. */
static size_t norm_prepare(NormJob *j, const OpCall *c, int first, int n_in, const View *w,
                           const View *b, bool backward, char *base) {
  View in[NORM_INPUTS];
  int64_t stride[NORM_INPUTS][MF_MAX_DIMS];
  size_t used = 0;
  PointwiseClass cls = block_class((DType)c->out[0].dtype);
  size_t size = cls == PW_F64 ? 8 : 4;
  int given = n_in;
  n_in = j->h = j->more = 0;
  for (int i = 0; i < given; i++) {
    int64_t n, step;
    int k = n_in;
    if (view_absent(&c->in[i])) continue;
    in[k] = c->in[i];
    n_in++;
    if (i == NORM_H) j->h = n_in;
    if (i == NORM_MORE) j->more = n_in;
    if (lines_merge(&in[k], first, in[k].ndim, &n, &step)) continue;
    char *at =
        scratch_take(base, &used, (size_t)view_numel(&in[k]) * dtype_size((DType)in[k].dtype));
    in[k] = contiguous_at(&c->in[i], at, stride[k]);
    if (base) copy_views(&c->in[i], &in[k]);
  }
  int n_out = j->adds && !backward ? 2 : 1;
  lines_init(&j->lines, cls, 0, first, c->out[0].ndim, n_out, c->out, n_in, in);
  j->n = j->lines.length[0];
  if (backward) j->lines.parts = norm_parts(j->lines.lines, j->n, j->lines.lines / FLUSH);
  if (j->more) lines_want(&j->lines, (size_t)j->n * size);
  j->lines.scratch = scratch_take(base, &used, lines_scratch(&j->lines));
  j->w = scratch_take(base, &used, (size_t)j->n * size);
  j->b = scratch_take(base, &used, (size_t)j->n * size);
  j->sums_bytes = backward ? scratch_aligned((size_t)j->n * (2 * sizeof(double) + 2 * size)) : 0;
  j->sums = scratch_take(base, &used, (size_t)j->lines.parts * j->sums_bytes);
  if (base) {
    norm_weight(w, cls, j->n, 1, j->w);
    if (b) norm_weight(b, cls, j->n, 0, j->b);
  }
  return used;
}

#define LAYER_NORM(C, T)                                                                           \
  static void norm_add_##C(int64_t n, const T *a, const T *b, T *y) {                              \
    PW_IVDEP for (int64_t i = 0; i < n; i++) y[i] = a[i] + b[i];                                   \
  }                                                                                                \
  static void line_moments_##C(const NormJob *j, const T *x, double *mean, double *rstd) {         \
    double m2 = 0;                                                                                 \
    *mean = 0;                                                                                     \
    if (j->centre) moments_row_##C(j->n, x, 0, mean, &m2), m2 /= (double)j->n;                     \
    else m2 = norm_square_##C(j->n, x);                                                            \
    *rstd = 1 / sqrt(m2 + j->eps);                                                                 \
  }                                                                                                \
  static void norm_forward_##C(int64_t begin, int64_t end, void *arg) {                            \
    const NormJob *j = arg;                                                                        \
    const Lines *l = &j->lines;                                                                    \
    void *p[LINES_OPERANDS + 1];                                                                   \
    LineAt at;                                                                                     \
    for (int64_t part = begin; part < end; part++) {                                               \
      int64_t k = part * l->lines / l->parts, last = (part + 1) * l->lines / l->parts;             \
      for (lines_seek(l, l->walk.ndim, k, &at); k < last; k++, lines_next(l, &at)) {               \
        double mean, rstd;                                                                         \
        lines_open(l, &at, l->scratch + (size_t)part * l->part_bytes, p);                          \
        if (j->adds) norm_add_##C(j->n, p[2], p[3], p[1]);                                         \
        line_moments_##C(j, p[1], &mean, &rstd);                                                   \
        norm_apply_##C(j->n, p[1], (T)mean, (T)rstd, (const T *)j->w, (const T *)j->b, p[0]);      \
        lines_close(l, p, &at);                                                                    \
      }                                                                                            \
    }                                                                                              \
  }                                                                                                \
  static void norm_flush_##C(int64_t n, double *total, T *part) {                                  \
    for (int64_t i = 0; i < n; i++) total[i] += (double)part[i], part[i] = 0;                      \
  }                                                                                                \
  static void norm_backward_##C(int64_t begin, int64_t end, void *arg) {                           \
    const NormJob *j = arg;                                                                        \
    const Lines *l = &j->lines;                                                                    \
    void *p[LINES_OPERANDS + 1];                                                                   \
    LineAt at;                                                                                     \
    for (int64_t part = begin; part < end; part++) {                                               \
      double *sums = (double *)(void *)(j->sums + (size_t)part * j->sums_bytes),                   \
             scale = 1 / (double)j->n;                                                             \
      T *gw = (T *)(sums + 2 * j->n), *gb = gw + j->n;                                             \
      memset(sums, 0, j->sums_bytes);                                                              \
      int64_t first = part * l->lines / l->parts, last = (part + 1) * l->lines / l->parts;         \
      lines_seek(l, l->walk.ndim, first, &at);                                                     \
      for (int64_t k = first; k < last; k++, lines_next(l, &at)) {                                 \
        double mean, rstd, s1 = 0, s2 = 0;                                                         \
        lines_open(l, &at, l->scratch + (size_t)part * l->part_bytes, p);                          \
        const T *g = p[1], *x = p[2], *w = (const T *)j->w;                                        \
        if (j->more) norm_add_##C(j->n, g, p[j->more], p[l->n]), g = p[l->n];                      \
        line_moments_##C(j, x, &mean, &rstd);                                                      \
        norm_sums_##C(j->n, g, x, (T)mean, (T)rstd, w, gw, gb, &s1, &s2);                          \
        norm_input_##C(j->n, g, x, (T)mean, (T)rstd, w, (T)(j->centre ? s1 * scale : 0),           \
                       (T)(s2 * scale), p[0]);                                                     \
        if (j->h) norm_add_##C(j->n, p[0], p[j->h], p[0]);                                         \
        lines_close(l, p, &at);                                                                    \
        if ((k - first) % FLUSH == FLUSH - 1 || k + 1 == last) norm_flush_##C(2 * j->n, sums, gw); \
      }                                                                                            \
    }                                                                                              \
  }
LAYER_NORM(f32, float)
LAYER_NORM(f64, double)

/* Joins the parts' sums of n and stores them as the gradient of a weight, if that is wanted;
 * `from`: where in a part they begin. */
static void norm_store_sums(const char *sums, size_t sums_bytes, int64_t parts, int64_t n,
                            int64_t from, const View *to) {
  BlockBuffer total;
  if (view_numel(to) == 0) return;
  for (int64_t at = 0; at < n; at += BLOCK) {
    int64_t m = n - at < BLOCK ? n - at : BLOCK;
    memset(&total, 0, sizeof total);
    for (int64_t p = 0; p < parts; p++) {
      const double *part =
          (const double *)(const void *)(sums + (size_t)p * sums_bytes) + from + at;
      for (int64_t i = 0; i < m; i++) total.f64[i] += part[i];
    }
    block_stores[PW_F64][to->dtype](m, &total, 1,
                                    (char *)to->data + at * (int64_t)dtype_size((DType)to->dtype));
  }
}

static void norm_run(NormJob *j, ThreadBody *f32, ThreadBody *f64) {
  if (j->lines.lines == 0 || j->n == 0) j->lines.parts = 0;
  int64_t grain = 1 + LINES_GRAIN / (j->n + 1), parts = (j->lines.lines + grain - 1) / grain;
  if (parts < j->lines.parts) j->lines.parts = parts;
  mf_parallel(j->lines.parts, 1, j->lines.cls[0] == PW_F32 ? f32 : f64, j);
}

/* Checks that the last dims of input 0 are `shape` and that the weights have it. */
static int norm_check(Infer *I, int x, const IntList *shape, int first_weight) {
  char have[SHAPE_TEXT_MAX], want[SHAPE_TEXT_MAX], name[64];
  const Meta *m = I->in[x];
  int rc = infer_want_float(I, x), n = (int)shape->n;
  if (rc) return rc;
  if (n == 0)
    return infer_error(I, "normalized_shape is empty; it must be the last sizes of x, here %s",
                       shape_text(m->ndim, m->shape, have));
  if (n > m->ndim || memcmp(m->shape + m->ndim - n, shape->v, sizeof(int64_t) * (size_t)n))
    return infer_error(I, "normalized_shape %s must be the last sizes of x, whose shape is %s",
                       shape_text(n, shape->v, want), shape_text(m->ndim, m->shape, have));
  for (int k = first_weight; k < I->n_in; k++) {
    if (!I->in[k]) continue;
    if ((rc = infer_want_float(I, k))) return rc;
    if (I->in[k]->ndim != n || memcmp(I->in[k]->shape, shape->v, sizeof(int64_t) * (size_t)n))
      return infer_error(I, "%s has shape %s; it must be normalized_shape, %s",
                         infer_name(I, k, name, sizeof name),
                         shape_text(I->in[k]->ndim, I->in[k]->shape, have),
                         shape_text(n, shape->v, want));
  }
  return 0;
}

/* Input 0 is a gradient of the result, which is like input 1. */
static int gradient_check(Infer *I) {
  int rc = infer_want_float(I, 0);
  return rc ? rc : infer_want_same_shape(I, 0, 1);
}

/* The outputs (gx, gw, gb) of a gradient, of which the last n_params are empty when not wanted. */
static int norm_backward_outputs(Infer *I, int x, int w, const IntList *shape, int n_params,
                                 bool wanted) {
  int64_t empty[1] = {0};
  int rc = infer_shape(I, (DType)I->in[x]->dtype, I->in[x]->ndim, I->in[x]->shape);
  DType t = (DType)(I->in[w] ? I->in[w] : I->in[x])->dtype;
  for (int k = 0; k < n_params && !rc; k++)
    rc = wanted ? infer_shape(I, t, (int)shape->n, shape->v) : infer_shape(I, t, 1, empty);
  return rc;
}

static int layer_norm_infer(Infer *I) {
  const struct layer_norm_args *a = I->args;
  int rc = norm_check(I, 0, &a->normalized_shape, 1);
  return rc ? rc : infer_shape(I, (DType)I->in[0]->dtype, I->in[0]->ndim, I->in[0]->shape);
}

static size_t layer_norm_prepare(NormJob *j, const OpCall *c, char *base) {
  const struct layer_norm_args *a = c->args;
  j->centre = true;
  j->adds = false;
  j->eps = a->eps;
  return norm_prepare(j, c, c->out[0].ndim - (int)a->normalized_shape.n, 1, &c->in[1], &c->in[2],
                      false, base);
}

static size_t layer_norm_scratch(const OpCall *c) {
  NormJob j;
  return layer_norm_prepare(&j, c, NULL);
}

static int layer_norm_cpu(const OpCall *c) {
  NormJob j;
  layer_norm_prepare(&j, c, c->scratch);
  norm_run(&j, norm_forward_f32, norm_forward_f64);
  return 0;
}

/* Rows are independent: the first `dims` dims of the first `inputs` inputs may be split; the
 * gradients of weight and bias are then partial. */
static int rows_sbp(SbpAsk *q, int dims, int inputs) {
  for (int d = 0; d < dims; d++) {
    Sbp *row = sbp_add(q);
    if (!row) return MF_ENOMEM;
    for (int k = 0; k < inputs; k++) row[k] = sbp_split(d);
    row[q->n_in] = sbp_split(d);
    for (int k = 1; k < q->n_out; k++) row[q->n_in + k].kind = SBP_P;
  }
  return 0;
}

static int layer_norm_sbp(SbpAsk *q) {
  const struct layer_norm_args *a = q->args;
  return rows_sbp(q, q->in[0]->ndim - (int)a->normalized_shape.n, 1);
}

/* (x - mean) / sqrt(var + eps) * weight + bias, mean and variance taken over the last dims (Ba and
 * others, 2016). */
OP(layer_norm,
   .signature =
       "layer_norm(Tensor x, int[] normalized_shape, Tensor? weight=None, Tensor? bias=None, float "
       "eps=1e-05) -> Tensor",
   .sbp_rule = layer_norm_sbp, .infer = layer_norm_infer, .cpu = layer_norm_cpu,
   .scratch = layer_norm_scratch)

static int layer_norm_backward_infer(Infer *I) {
  const struct layer_norm_backward_args *a = I->args;
  int rc = norm_check(I, 1, &a->normalized_shape, 2);
  if (!rc) rc = gradient_check(I);
  return rc ? rc : norm_backward_outputs(I, 1, 2, &a->normalized_shape, 2, a->params);
}

static size_t layer_norm_backward_prepare(NormJob *j, const OpCall *c, char *base) {
  const struct layer_norm_backward_args *a = c->args;
  j->centre = true;
  j->adds = false;
  j->eps = a->eps;
  return norm_prepare(j, c, c->out[0].ndim - (int)a->normalized_shape.n, 2, &c->in[2], NULL, true,
                      base);
}

static size_t layer_norm_backward_scratch(const OpCall *c) {
  NormJob j;
  return layer_norm_backward_prepare(&j, c, NULL);
}

static int layer_norm_backward_cpu(const OpCall *c) {
  NormJob j;
  layer_norm_backward_prepare(&j, c, c->scratch);
  norm_run(&j, norm_backward_f32, norm_backward_f64);
  norm_store_sums(j.sums, j.sums_bytes, j.lines.parts, j.n, 0, &c->out[1]);
  norm_store_sums(j.sums, j.sums_bytes, j.lines.parts, j.n, j.n, &c->out[2]);
  return 0;
}

static int layer_norm_backward_sbp(SbpAsk *q) {
  const struct layer_norm_backward_args *a = q->args;
  return rows_sbp(q, q->in[0]->ndim - (int)a->normalized_shape.n, 2);
}

/* The gradients of layer_norm; those of weight and bias are empty unless `params`. */
OP(layer_norm_backward,
   .signature =
       "layer_norm_backward(Tensor g, Tensor x, int[] normalized_shape, Tensor? weight, bool "
       "params, float eps)"
       " -> (Tensor x, Tensor weight, Tensor bias)",
   .flags = OP_HIDDEN, .sbp_rule = layer_norm_backward_sbp, .infer = layer_norm_backward_infer,
   .cpu = layer_norm_backward_cpu, .scratch = layer_norm_backward_scratch)

/* Without eps that of the dtype that is computed in counts, as PyTorch has it. */
static double rms_eps(bool given, double eps, DType t) {
  return given ? eps : t == F64 ? 0x1p-52 : 0x1p-23;
}

static int rms_norm_infer(Infer *I) {
  const struct rms_norm_args *a = I->args;
  int rc = norm_check(I, 0, &a->normalized_shape, 1);
  return rc ? rc : infer_shape(I, (DType)I->in[0]->dtype, I->in[0]->ndim, I->in[0]->shape);
}

static size_t rms_norm_prepare(NormJob *j, const OpCall *c, char *base) {
  static const View absent = {.ndim = -1};
  const struct rms_norm_args *a = c->args;
  j->centre = false;
  j->adds = false;
  j->eps = rms_eps(a->has_eps, a->eps, (DType)c->in[0].dtype);
  return norm_prepare(j, c, c->out[0].ndim - (int)a->normalized_shape.n, 1, &c->in[1], &absent,
                      false, base);
}

static size_t rms_norm_scratch(const OpCall *c) {
  NormJob j;
  return rms_norm_prepare(&j, c, NULL);
}

static int rms_norm_cpu(const OpCall *c) {
  NormJob j;
  rms_norm_prepare(&j, c, c->scratch);
  norm_run(&j, norm_forward_f32, norm_forward_f64);
  return 0;
}

static int rms_norm_sbp(SbpAsk *q) {
  const struct rms_norm_args *a = q->args;
  return rows_sbp(q, q->in[0]->ndim - (int)a->normalized_shape.n, 1);
}

/* x / sqrt(mean(x^2) + eps) * weight over the last dims (Zhang and Sennrich, 2019); without eps
 * it is that of float64, or float32 for all others. */
OP(rms_norm,
   .signature =
       "rms_norm(Tensor x, int[] normalized_shape, Tensor? weight=None, float? eps=None) -> Tensor",
   .sbp_rule = rms_norm_sbp, .infer = rms_norm_infer, .cpu = rms_norm_cpu,
   .scratch = rms_norm_scratch)

static int rms_norm_backward_infer(Infer *I) {
  const struct rms_norm_backward_args *a = I->args;
  int rc = norm_check(I, 1, &a->normalized_shape, 2);
  if (!rc) rc = gradient_check(I);
  return rc ? rc : norm_backward_outputs(I, 1, 2, &a->normalized_shape, 1, a->params);
}

static size_t rms_norm_backward_prepare(NormJob *j, const OpCall *c, char *base) {
  const struct rms_norm_backward_args *a = c->args;
  j->centre = false;
  j->adds = false;
  j->eps = rms_eps(a->has_eps, a->eps, (DType)c->in[1].dtype);
  return norm_prepare(j, c, c->out[0].ndim - (int)a->normalized_shape.n, 2, &c->in[2], NULL, true,
                      base);
}

static size_t rms_norm_backward_scratch(const OpCall *c) {
  NormJob j;
  return rms_norm_backward_prepare(&j, c, NULL);
}

static int rms_norm_backward_cpu(const OpCall *c) {
  NormJob j;
  rms_norm_backward_prepare(&j, c, c->scratch);
  norm_run(&j, norm_backward_f32, norm_backward_f64);
  norm_store_sums(j.sums, j.sums_bytes, j.lines.parts, j.n, 0, &c->out[1]);
  return 0;
}

static int rms_norm_backward_sbp(SbpAsk *q) {
  const struct rms_norm_backward_args *a = q->args;
  return rows_sbp(q, q->in[0]->ndim - (int)a->normalized_shape.n, 2);
}

/* The gradients of rms_norm; that of the weight is empty unless `params`. */
OP(rms_norm_backward,
   .signature =
       "rms_norm_backward(Tensor g, Tensor x, int[] normalized_shape, Tensor? weight, bool params, "
       "float? eps=None)"
       " -> (Tensor x, Tensor weight)",
   .flags = OP_HIDDEN, .sbp_rule = rms_norm_backward_sbp, .infer = rms_norm_backward_infer,
   .cpu = rms_norm_backward_cpu, .scratch = rms_norm_backward_scratch)

/* -- With a sum before, and its gradient ------------------------------------------------------- */

static int add_norm_infer(Infer *I) {
  const struct add_norm_args *a = I->args;
  const Meta *x = I->in[0];
  int rc = infer_want_same_dtype(I, 0, 1);
  if (!rc) rc = infer_want_same_shape(I, 1, 0);
  if (!rc) rc = norm_check(I, 0, &a->normalized_shape, 2);
  for (int k = 0; k < 2 && !rc; k++) rc = infer_shape(I, (DType)x->dtype, x->ndim, x->shape);
  return rc;
}

static size_t add_norm_prepare(NormJob *j, const OpCall *c, char *base) {
  const struct add_norm_args *a = c->args;
  j->centre = a->centre;
  j->adds = true;
  j->eps = a->eps;
  return norm_prepare(j, c, c->out[0].ndim - (int)a->normalized_shape.n, 2, &c->in[2], &c->in[3],
                      false, base);
}

static size_t add_norm_scratch(const OpCall *c) {
  NormJob j;
  return add_norm_prepare(&j, c, NULL);
}

static int add_norm_cpu(const OpCall *c) {
  NormJob j;
  add_norm_prepare(&j, c, c->scratch);
  norm_run(&j, norm_forward_f32, norm_forward_f64);
  return 0;
}

static int add_norm_sbp(SbpAsk *q) {
  const struct add_norm_args *a = q->args;
  for (int d = 0; d < q->in[0]->ndim - (int)a->normalized_shape.n; d++) {
    Sbp *row = sbp_add(q);
    if (!row) return MF_ENOMEM;
    row[0] = row[1] = row[q->n_in] = row[q->n_in + 1] = sbp_split(d);
  }
  return 0;
}

/* layer_norm of x + r, without `centre` rms_norm, and x + r itself. Made by compiled steps of the
 * two ops, so that it has no gradient itself. A line is read before one of the outputs is written.
 */
OP(add_norm,
   .signature =
       "add_norm(Tensor x, Tensor r, Tensor? weight, Tensor? bias, int[] "
       "normalized_shape, bool centre, float eps) -> (Tensor y, Tensor sum)",
   .flags = OP_HIDDEN | OP_NO_GRAD | OP_BLOCKWISE, .sbp_rule = add_norm_sbp,
   .infer = add_norm_infer, .cpu = add_norm_cpu, .scratch = add_norm_scratch)

static int norm_add_backward_infer(Infer *I) {
  const struct norm_add_backward_args *a = I->args;
  int rc = norm_check(I, 1, &a->normalized_shape, 4);
  if (!rc) rc = gradient_check(I);
  for (int k = NORM_H; k <= NORM_MORE && !rc; k++) {
    if (!I->in[k]) continue;
    rc = infer_want_same_dtype(I, 1, k);
    if (!rc) rc = infer_want_same_shape(I, k, 1);
  }
  return rc ? rc : norm_backward_outputs(I, 1, 4, &a->normalized_shape, 2, a->params);
}

static size_t norm_add_backward_prepare(NormJob *j, const OpCall *c, char *base) {
  const struct norm_add_backward_args *a = c->args;
  j->centre = a->centre;
  j->adds = false;
  j->eps = a->eps;
  return norm_prepare(j, c, c->out[0].ndim - (int)a->normalized_shape.n, 4, &c->in[4], NULL, true,
                      base);
}

static size_t norm_add_backward_scratch(const OpCall *c) {
  NormJob j;
  return norm_add_backward_prepare(&j, c, NULL);
}

static int norm_add_backward_cpu(const OpCall *c) {
  NormJob j;
  norm_add_backward_prepare(&j, c, c->scratch);
  norm_run(&j, norm_backward_f32, norm_backward_f64);
  norm_store_sums(j.sums, j.sums_bytes, j.lines.parts, j.n, 0, &c->out[1]);
  norm_store_sums(j.sums, j.sums_bytes, j.lines.parts, j.n, j.n, &c->out[2]);
  return 0;
}

static int norm_add_backward_sbp(SbpAsk *q) {
  const struct norm_add_backward_args *a = q->args;
  return rows_sbp(q, q->in[1]->ndim - (int)a->normalized_shape.n, 4);
}

/* The gradients of layer_norm, without `centre` those of rms_norm, for g + more; that of x plus h,
 * what else comes to x; those of weight and bias are empty unless `params`. */
OP(norm_add_backward,
   .signature =
       "norm_add_backward(Tensor g, Tensor x, Tensor? h, Tensor? more, Tensor? weight, int[] "
       "normalized_shape, bool centre, bool params, float eps) -> (Tensor x, Tensor "
       "weight, Tensor bias)",
   .flags = OP_HIDDEN | OP_NO_GRAD, .sbp_rule = norm_add_backward_sbp,
   .infer = norm_add_backward_infer, .cpu = norm_add_backward_cpu,
   .scratch = norm_add_backward_scratch)

/* -- Group norm -------------------------------------------------------------------------------- */

typedef struct GroupJob {
  int64_t lines, groups, channels,
      inner; /* lines = N groups, each of `channels` channels of `inner` elements */
  double eps;
  int64_t parts;
  char *x, *g, *y, *w, *b, *sums;
  size_t sums_bytes;
} GroupJob;

#define GROUP_NORM(C, T)                                                                           \
  static void group_forward_##C(int64_t begin, int64_t end, void *arg) {                           \
    const GroupJob *j = arg;                                                                       \
    int64_t n = j->channels * j->inner;                                                            \
    for (int64_t k = begin; k < end; k++) {                                                        \
      const T *x = (const T *)j->x + k * n;                                                        \
      T *y = (T *)j->y + k * n;                                                                    \
      double mean = 0, m2 = 0;                                                                     \
      moments_row_##C(n, x, 0, &mean, &m2);                                                        \
      double rstd = 1 / sqrt(m2 / (double)n + j->eps);                                             \
      for (int64_t c = 0; c < j->channels; c++) {                                                  \
        int64_t channel = k % j->groups * j->channels + c;                                         \
        T scale = (T)(rstd * (double)((const T *)j->w)[channel]);                                  \
        norm_apply_one_##C(j->inner, x + c * j->inner, (T)mean, scale, ((const T *)j->b)[channel], \
                           y + c * j->inner);                                                      \
      }                                                                                            \
    }                                                                                              \
  }                                                                                                \
  static void group_line_backward_##C(const GroupJob *j, int64_t k, double *gw, double *gb) {      \
    int64_t n = j->channels * j->inner;                                                            \
    const T *x = (const T *)j->x + k * n, *g = (const T *)j->g + k * n,                            \
            *w = (const T *)j->w + k % j->groups * j->channels;                                    \
    T *gx = (T *)j->y + k * n;                                                                     \
    double mean = 0, m2 = 0, all1 = 0, all2 = 0;                                                   \
    moments_row_##C(n, x, 0, &mean, &m2);                                                          \
    double rstd = 1 / sqrt(m2 / (double)n + j->eps);                                               \
    for (int64_t c = 0; c < j->channels; c++) {                                                    \
      double s1 = 0, s2 = 0;                                                                       \
      norm_sums_one_##C(j->inner, g + c * j->inner, x + c * j->inner, (T)mean, &s1, &s2);          \
      s2 *= rstd;                                                                                  \
      gw[k % j->groups * j->channels + c] += s2, gb[k % j->groups * j->channels + c] += s1;        \
      all1 += s1 * (double)w[c], all2 += s2 * (double)w[c];                                        \
    }                                                                                              \
    T b = (T)(-rstd * rstd * all2 / (double)n), shift = (T)(-rstd * all1 / (double)n);             \
    for (int64_t c = 0; c < j->channels; c++)                                                      \
      norm_input_one_##C(j->inner, g + c * j->inner, x + c * j->inner, (T)mean,                    \
                         (T)(rstd * (double)w[c]), b, shift, gx + c * j->inner);                   \
  }                                                                                                \
  static void group_backward_##C(int64_t begin, int64_t end, void *arg) {                          \
    const GroupJob *j = arg;                                                                       \
    for (int64_t part = begin; part < end; part++) {                                               \
      double *sums = (double *)(void *)(j->sums + (size_t)part * j->sums_bytes);                   \
      memset(sums, 0, j->sums_bytes);                                                              \
      for (int64_t k = part * j->lines / j->parts; k < (part + 1) * j->lines / j->parts; k++)      \
        group_line_backward_##C(j, k, sums, sums + j->groups * j->channels);                       \
    }                                                                                              \
  }
GROUP_NORM(f32, float)
GROUP_NORM(f64, double)

/* The tensor itself where it is contiguous and of the compute type, else room for such a copy
 * (filled when `copy`). */
static char *group_dense(const View *v, PointwiseClass cls, char *base, size_t *used, bool copy) {
  int64_t stride[MF_MAX_DIMS];
  if (view_is_contiguous(v) && block_is_native((DType)v->dtype, cls)) return v->data;
  char *at = scratch_take(base, used, (size_t)view_numel(v) * (cls == PW_F64 ? 8 : 4));
  View dense = contiguous_at(v, at, stride);
  dense.dtype = cls == PW_F64 ? F64 : F32;
  if (base && copy) copy_views(v, &dense);
  return at;
}

static size_t group_prepare(GroupJob *j, const OpCall *c, int64_t groups, double eps, const View *g,
                            const View *x, const View *w, const View *b, char *base) {
  size_t used = 0;
  PointwiseClass cls = block_class((DType)c->out[0].dtype);
  int64_t n = x->shape[1];
  j->groups = groups;
  j->channels = n / groups;
  j->lines = n ? x->shape[0] * groups : 0;
  j->inner = shape_numel(x->ndim - 2, x->shape + 2);
  j->eps = eps;
  j->x = group_dense(x, cls, base, &used, true);
  j->g = g ? group_dense(g, cls, base, &used, true) : NULL;
  j->y = group_dense(&c->out[0], cls, base, &used, false);
  j->w = scratch_take(base, &used, (size_t)n * 8);
  j->b = scratch_take(base, &used, (size_t)n * 8);
  j->parts = norm_parts(j->lines, j->channels * j->inner, j->lines);
  j->sums_bytes = g ? (size_t)n * 2 * sizeof(double) : 0;
  j->sums = scratch_take(base, &used, (size_t)j->parts * j->sums_bytes);
  if (base) {
    norm_weight(w, cls, n, 1, j->w);
    if (b) norm_weight(b, cls, n, 0, j->b);
  }
  return used;
}

/* Brings a result home that was computed in scratch. */
static void group_finish(const GroupJob *j, const View *y, PointwiseClass cls) {
  int64_t stride[MF_MAX_DIMS];
  if (j->y == y->data) return;
  View dense = contiguous_at(y, j->y, stride);
  dense.dtype = cls == PW_F64 ? F64 : F32;
  copy_views(&dense, y);
}

static int group_check(Infer *I, int x, int64_t groups, int first_weight) {
  char have[SHAPE_TEXT_MAX], name[64];
  const Meta *m = I->in[x];
  int rc = infer_want_float(I, x);
  if (rc) return rc;
  if (m->ndim < 2)
    return infer_error(I, "x must have at least 2 dims, (N, C, ...), has shape %s",
                       shape_text(m->ndim, m->shape, have));
  if (groups < 1 || m->shape[1] % groups)
    return infer_error(I, "num_groups %lld must divide the %lld channels of x of shape %s",
                       (long long)groups, (long long)m->shape[1],
                       shape_text(m->ndim, m->shape, have));
  for (int k = first_weight; k < I->n_in; k++) {
    if (!I->in[k]) continue;
    if ((rc = infer_want_float(I, k))) return rc;
    if (I->in[k]->ndim != 1 || I->in[k]->shape[0] != m->shape[1])
      return infer_error(
          I, "%s has shape %s; it must have one element for each of the %lld channels of x",
          infer_name(I, k, name, sizeof name), shape_text(I->in[k]->ndim, I->in[k]->shape, have),
          (long long)m->shape[1]);
  }
  return 0;
}

static int group_norm_infer(Infer *I) {
  const struct group_norm_args *a = I->args;
  int rc = group_check(I, 0, a->num_groups, 1);
  return rc ? rc : infer_same(I);
}

static size_t group_norm_scratch(const OpCall *c) {
  GroupJob j;
  const struct group_norm_args *a = c->args;
  return group_prepare(&j, c, a->num_groups, a->eps, NULL, &c->in[0], &c->in[1], &c->in[2], NULL);
}

static int group_norm_cpu(const OpCall *c) {
  GroupJob j;
  const struct group_norm_args *a = c->args;
  PointwiseClass cls = block_class((DType)c->out[0].dtype);
  if (view_numel(&c->out[0]) == 0) return 0;
  group_prepare(&j, c, a->num_groups, a->eps, NULL, &c->in[0], &c->in[1], &c->in[2], c->scratch);
  mf_parallel(j.lines, 1 + LINES_GRAIN / (j.channels * j.inner),
              cls == PW_F32 ? group_forward_f32 : group_forward_f64, &j);
  group_finish(&j, &c->out[0], cls);
  return 0;
}

static int group_norm_sbp(SbpAsk *q) {
  return rows_sbp(q, 1, 1);
}

/* Normalises groups of channels of x (N, C, ...) with the mean and variance of each group (Wu and
 * He, 2018). */
OP(group_norm,
   .signature =
       "group_norm(Tensor x, int num_groups, Tensor? weight=None, Tensor? bias=None, float "
       "eps=1e-05) -> Tensor",
   .sbp_rule = group_norm_sbp, .infer = group_norm_infer, .cpu = group_norm_cpu,
   .scratch = group_norm_scratch)

static int group_norm_backward_infer(Infer *I) {
  const struct group_norm_backward_args *a = I->args;
  IntList channels = {.n = 1};
  int rc = group_check(I, 1, a->num_groups, 2);
  if (!rc) rc = gradient_check(I);
  channels.v[0] = rc ? 0 : I->in[1]->shape[1];
  return rc ? rc : norm_backward_outputs(I, 1, 2, &channels, 2, a->params);
}

static size_t group_norm_backward_scratch(const OpCall *c) {
  GroupJob j;
  const struct group_norm_backward_args *a = c->args;
  return group_prepare(&j, c, a->num_groups, a->eps, &c->in[0], &c->in[1], &c->in[2], NULL, NULL);
}

static int group_norm_backward_cpu(const OpCall *c) {
  GroupJob j;
  const struct group_norm_backward_args *a = c->args;
  PointwiseClass cls = block_class((DType)c->out[0].dtype);
  group_prepare(&j, c, a->num_groups, a->eps, &c->in[0], &c->in[1], &c->in[2], NULL, c->scratch);
  if (view_numel(&c->out[0]) == 0) j.parts = 0;
  mf_parallel(j.parts, 1, cls == PW_F32 ? group_backward_f32 : group_backward_f64, &j);
  norm_store_sums(j.sums, j.sums_bytes, j.parts, j.groups * j.channels, 0, &c->out[1]);
  norm_store_sums(j.sums, j.sums_bytes, j.parts, j.groups * j.channels, j.groups * j.channels,
                  &c->out[2]);
  if (j.parts) group_finish(&j, &c->out[0], cls);
  return 0;
}

static int group_norm_backward_sbp(SbpAsk *q) {
  return rows_sbp(q, 1, 2);
}

/* The gradients of group_norm; those of weight and bias are empty unless `params`. */
OP(group_norm_backward,
   .signature =
       "group_norm_backward(Tensor g, Tensor x, int num_groups, Tensor? weight, bool params, float "
       "eps)"
       " -> (Tensor x, Tensor weight, Tensor bias)",
   .flags = OP_HIDDEN, .sbp_rule = group_norm_backward_sbp, .infer = group_norm_backward_infer,
   .cpu = group_norm_backward_cpu, .scratch = group_norm_backward_scratch)
