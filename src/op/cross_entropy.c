/* Cross entropy over class indices, without a copy of the logits: the forward pass keeps one
 * log-sum-exp a position, the backward pass writes the gradient once. Logits are (N, C, d1, ...) in
 * any layout and float dtype; a line is the C logits of one position (lines.h).
 *
 * With label l, weights w and smoothing s the loss of a position is (1 - s) w[l] (lse - x[l]) + s /
 * C sum_c w[c] (lse - x[c]), 0 where the label is ignored; the mean divides the sum by the sum of
 * w[l]. Labels are checked before anything is computed. */
#include <stdio.h>

#include "copy_views.h"
#include "dnn.h"
#include "gemm.h"
#include "line_math.h"
#include "lines.h"
#include "op_args.h"
#include "pointwise.h"
#include "sbp_rule.h"

typedef struct EntropyJob {
  Lines lines;
  int64_t classes, ignore_index;
  double smoothing, weight_sum; /* of all classes */
  double scale; /* backward: of the gradient, where it is one number; `each`: one a position is an
                   operand */
  bool each;
  char *weight;            /* a class, of the compute type; NULL: 1 */
  char *loss, *row_weight; /* forward: a position, of the compute type */
} EntropyJob;

/* -- Lines: loss, weight, lse, x, label; or gx, x, label, lse, g ------------------------------- */

#define ENTROPY_LINES(C, T)                                                                        \
  static double log_sum_exp_##C(int64_t n, const T *x) {                                           \
    T most = line_max_##C(n, x), e[BLOCK];                                                         \
    double sum = 0;                                                                                \
    if (most == -INFINITY || most == INFINITY) return (double)most;                                \
    for (int64_t at = 0; at < n; at += BLOCK) {                                                    \
      int64_t m = n - at < BLOCK ? n - at : BLOCK;                                                 \
      for (int64_t i = 0; i < m; i++) e[i] = exp(x[at + i] - most);                                \
      sum += line_sum_##C(m, e);                                                                   \
    }                                                                                              \
    return (double)most + log(sum);                                                                \
  }                                                                                                \
  /* sum_c w[c] (lse - x[c]). */                                                                   \
  static double smooth_loss_##C(const EntropyJob *j, const T *x, double lse) {                     \
    const T *w = (const T *)j->weight;                                                             \
    double sum = 0;                                                                                \
    for (int64_t at = 0; at < j->classes; at += BLOCK) {                                           \
      int64_t m = j->classes - at < BLOCK ? j->classes - at : BLOCK;                               \
      sum += w ? line_dot_##C(m, w + at, x + at) : line_sum_##C(m, x + at);                        \
    }                                                                                              \
    return j->weight_sum * lse - sum;                                                              \
  }                                                                                                \
  static void entropy_line_##C(int64_t n, const void *args, void *const *p) {                      \
    const EntropyJob *j = args;                                                                    \
    const T *x = p[3];                                                                             \
    int64_t label = *(const int64_t *)p[4];                                                        \
    double lse = log_sum_exp_##C(n, x), loss = 0, w = 0;                                           \
    if (label != j->ignore_index) {                                                                \
      w = j->weight ? (double)((const T *)j->weight)[label] : 1;                                   \
      loss = (1 - j->smoothing) * w * (lse - (double)x[label]);                                    \
      if (j->smoothing > 0) loss += j->smoothing / (double)n * smooth_loss_##C(j, x, lse);         \
    }                                                                                              \
    *(T *)p[0] = (T)loss, *(T *)p[1] = (T)w, *(T *)p[2] = (T)lse;                                  \
  }                                                                                                \
  static void gradient_line_##C(int64_t n, const void *args, void *const *p) {                     \
    const EntropyJob *j = args;                                                                    \
    const T *x = p[1], *weight = (const T *)j->weight, lse = *(const T *)p[3];                     \
    T *gx = p[0];                                                                                  \
    int64_t label = *(const int64_t *)p[2];                                                        \
    if (label == j->ignore_index) {                                                                \
      memset(gx, 0, sizeof(T) * (size_t)n);                                                        \
      return;                                                                                      \
    }                                                                                              \
    double g = j->each ? (double)*(const T *)p[4] : j->scale, share = j->smoothing / (double)n;    \
    double w = (1 - j->smoothing) * (weight ? (double)weight[label] : 1);                          \
    T all = (T)(g * (w + share * j->weight_sum)), smooth = (T)(g * share);                         \
    if (smooth == 0) PW_IVDEP for (int64_t i = 0; i < n; i++) gx[i] = all * exp(x[i] - lse);       \
    else if (!weight)                                                                              \
      PW_IVDEP for (int64_t i = 0; i < n; i++) gx[i] = all * exp(x[i] - lse) - smooth;             \
    else                                                                                           \
      PW_IVDEP for (int64_t i = 0; i < n; i++) gx[i] = all * exp(x[i] - lse) - smooth * weight[i]; \
    gx[label] -= (T)(g * w);                                                                       \
  }                                                                                                \
  static void entropy_panel_##C(int64_t n, int64_t width, const void *args, void *const *p,        \
                                const int64_t *step) {                                             \
    const EntropyJob *j = args;                                                                    \
    const T *x = p[3], *weight = (const T *)j->weight;                                             \
    T *loss = p[0], *w = p[1], *lse = p[2], most[LINES_PANEL], sum[LINES_PANEL],                   \
      smooth[LINES_PANEL];                                                                         \
    const int64_t *label = p[4];                                                                   \
    int64_t s = step[3];                                                                           \
    for (int64_t i = 0; i < width; i++) most[i] = -INFINITY, sum[i] = smooth[i] = 0;               \
    for (int64_t r = 0; r < n; r++)                                                                \
      for (int64_t i = 0; i < width; i++) {                                                        \
        T v = x[r * s + i];                                                                        \
        most[i] = v > most[i] || v != v ? v : most[i];                                             \
      }                                                                                            \
    for (int64_t i = 0; i < width; i++)                                                            \
      lse[i] = most[i] == INFINITY || most[i] == -INFINITY ? 0 : most[i];                          \
    for (int64_t r = 0; r < n; r++)                                                                \
      PW_IVDEP for (int64_t i = 0; i < width; i++) sum[i] += exp(x[r * s + i] - lse[i]);           \
    for (int64_t i = 0; i < width; i++) lse[i] += log(sum[i]);                                     \
    if (j->smoothing > 0)                                                                          \
      for (int64_t r = 0; r < n; r++)                                                              \
        for (int64_t i = 0; i < width; i++)                                                        \
          smooth[i] += (weight ? weight[r] : 1) * (lse[i] - x[r * s + i]);                         \
    for (int64_t i = 0; i < width; i++) {                                                          \
      w[i] = loss[i] = 0;                                                                          \
      if (label[i] == j->ignore_index) continue;                                                   \
      w[i] = weight ? weight[label[i]] : 1;                                                        \
      loss[i] = (T)(1 - j->smoothing) * w[i] * (lse[i] - x[label[i] * s + i]);                     \
      if (j->smoothing > 0) loss[i] += (T)(j->smoothing / (double)n) * smooth[i];                  \
    }                                                                                              \
  }                                                                                                \
  static void gradient_panel_##C(int64_t n, int64_t width, const void *args, void *const *p,       \
                                 const int64_t *step) {                                            \
    const EntropyJob *j = args;                                                                    \
    const T *x = p[1], *lse = p[3], *weight = (const T *)j->weight;                                \
    T *gx = p[0], all[LINES_PANEL], smooth[LINES_PANEL], at[LINES_PANEL];                          \
    const int64_t *label = p[2];                                                                   \
    int64_t s0 = step[0], s = step[1];                                                             \
    for (int64_t i = 0; i < width; i++) {                                                          \
      bool ignored = label[i] == j->ignore_index;                                                  \
      double g = ignored   ? 0                                                                     \
                 : j->each ? (double)((const T *)p[4])[i]                                          \
                           : j->scale,                                                             \
             share = j->smoothing / (double)n;                                                     \
      double w = ignored ? 0 : (1 - j->smoothing) * (weight ? (double)weight[label[i]] : 1);       \
      all[i] = (T)(g * (w + share * j->weight_sum)), smooth[i] = (T)(g * share),                   \
      at[i] = (T)(g * w);                                                                          \
    }                                                                                              \
    for (int64_t r = 0; r < n; r++) {                                                              \
      T wr = weight ? weight[r] : 1;                                                               \
      PW_IVDEP for (int64_t i = 0; i < width; i++) gx[r * s0 + i] =                                \
          all[i] * exp(x[r * s + i] - lse[i]) - smooth[i] * wr;                                    \
    }                                                                                              \
    for (int64_t i = 0; i < width; i++) {                                                          \
      if (label[i] != j->ignore_index) gx[label[i] * s0 + i] -= at[i];                             \
      else                                                                                         \
        for (int64_t r = 0; r < n; r++) gx[r * s0 + i] = 0;                                        \
    }                                                                                              \
  }
ENTROPY_LINES(f32, float)
ENTROPY_LINES(f64, double)

/* -- Shapes and checks ------------------------------------------------------------------------- */

static int class_dim(int ndim) {
  return ndim > 1 ? 1 : 0;
}

static int entropy_check(Infer *I, int x, int target, int weight, double smoothing) {
  const Meta *m = I->in[x], *t = I->in[target], *w = I->in[weight];
  char have[SHAPE_TEXT_MAX], want[SHAPE_TEXT_MAX], of[SHAPE_TEXT_MAX];
  int rc = infer_want_float(I, x), ndim = 0;
  if (rc) return rc;
  if (m->ndim == 0) return infer_error(I, "x must have a dim of classes, is a 0-d tensor");
  if (dtype_kind((DType)t->dtype) != KIND_INT)
    return infer_error(I, "target must hold whole numbers, is %s", dtype_name((DType)t->dtype));
  int64_t shape[MF_MAX_DIMS], classes = m->shape[class_dim(m->ndim)];
  for (int d = 0; d < m->ndim; d++)
    if (d != class_dim(m->ndim)) shape[ndim++] = m->shape[d];
  if (t->ndim != ndim || memcmp(t->shape, shape, sizeof(int64_t) * (size_t)ndim))
    return infer_error(I, "x has shape %s, so target must have shape %s, has %s",
                       shape_text(m->ndim, m->shape, of), shape_text(ndim, shape, want),
                       shape_text(t->ndim, t->shape, have));
  if (w && (rc = infer_want_float(I, weight))) return rc;
  if (w && (w->ndim != 1 || w->shape[0] != classes))
    return infer_error(I,
                       "weight has shape %s; it must have one element for each of the %lld classes",
                       shape_text(w->ndim, w->shape, have), (long long)classes);
  if (!(smoothing >= 0 && smoothing <= 1))
    return infer_error(I, "label_smoothing must lie between 0 and 1, is %g", smoothing);
  return 0;
}

static int bad_label(const char *op, const View *t, int64_t at, int64_t label, int64_t classes,
                     int64_t ignore_index) {
  int64_t place[MF_MAX_DIMS];
  char text[SHAPE_TEXT_MAX], also[64] = "";
  for (int d = t->ndim - 1; d >= 0; d--) {
    place[d] = at % t->shape[d];
    at /= t->shape[d];
  }
  if (ignore_index < 0 || ignore_index >= classes)
    snprintf(also, sizeof also, ", or ignore_index %lld", (long long)ignore_index);
  return err_set(MF_EINVAL, "%s: target %lld at %s is out of range; legal are 0 to %lld%s", op,
                 (long long)label, shape_text(t->ndim, place, text), (long long)classes - 1, also);
}

static int check_labels(const char *op, const View *t, int64_t classes, int64_t ignore_index) {
  int64_t n = view_numel(t);
  size_t size = dtype_size((DType)t->dtype);
  if (t->dtype == I64 && view_is_contiguous(t)) {
    const int64_t *label = t->data;
    int64_t bad = 0;
    for (int64_t i = 0; i < n; i++)
      bad |= (label[i] != ignore_index) & ((uint64_t)label[i] >= (uint64_t)classes);
    if (!bad) return 0;
  }
  for (int64_t i = 0; i < n; i++) {
    int64_t rest = i, offset = 0;
    for (int d = t->ndim - 1; d >= 0; d--) {
      offset += rest % t->shape[d] * t->stride[d];
      rest /= t->shape[d];
    }
    int64_t label = dtype_get_i64((DType)t->dtype, (const char *)t->data + offset * (int64_t)size);
    if (label != ignore_index && (label < 0 || label >= classes))
      return bad_label(op, t, i, label, classes, ignore_index);
  }
  return 0;
}

/* -- Setting up -------------------------------------------------------------------------------- */

/* A view over positions with the dim of classes put back, of size 1. */
typedef struct Positions {
  int64_t shape[MF_MAX_DIMS], stride[MF_MAX_DIMS];
} Positions;

static View positions(const View *v, int ndim, Positions *p) {
  View r = *v;
  int dim = class_dim(ndim);
  for (int d = 0, at = 0; d < ndim; d++) {
    p->shape[d] = d == dim ? 1 : v->shape[at];
    p->stride[d] = d == dim ? 1 : v->stride[at];
    at += d != dim;
  }
  r.shape = p->shape;
  r.stride = p->stride;
  r.ndim = (int8_t)ndim;
  return r;
}

static void load_weight(EntropyJob *j, const View *w, PointwiseClass cls, char *base,
                        size_t *used) {
  j->weight = NULL;
  j->weight_sum = (double)j->classes;
  if (view_absent(w)) return;
  j->weight = scratch_take(base, used, (size_t)j->classes * 8);
  if (!base) return;
  View to = {.data = j->weight,
             .shape = w->shape,
             .stride = (int64_t[]){1},
             .ndim = 1,
             .dtype = (uint8_t)(cls == PW_F64 ? F64 : F32)};
  copy_views(w, &to);
  j->weight_sum = 0;
  for (int64_t i = 0; i < j->classes; i++)
    j->weight_sum +=
        cls == PW_F64 ? ((double *)(void *)j->weight)[i] : (double)((float *)(void *)j->weight)[i];
}

static size_t forward_prepare(EntropyJob *j, const OpCall *c, char *base) {
  const struct cross_entropy_args *a = c->args;
  const View *x = &c->in[0], *target = &c->in[1], *lse = &c->out[1];
  Positions p[4];
  size_t used = 64, bytes = (size_t)view_numel(target) * 8; /* never nothing: NULL means to count */
  PointwiseClass cls = block_class((DType)x->dtype);
  int dim = class_dim(x->ndim);
  j->classes = x->shape[dim];
  j->ignore_index = a->ignore_index;
  j->smoothing = a->label_smoothing;
  load_weight(j, &c->in[2], cls, base, &used);
  j->loss = scratch_take(base, &used, bytes);
  j->row_weight = scratch_take(base, &used, bytes);
  View row = *lse, out[3];
  row.data = j->loss;
  out[0] = positions(&row, x->ndim, &p[0]);
  row.data = j->row_weight;
  out[1] = positions(&row, x->ndim, &p[1]);
  out[2] = positions(lse, x->ndim, &p[2]);
  lines_init(&j->lines, cls, 1 << 4, dim, dim + 1, 3, out, 2,
             (View[]){*x, positions(target, x->ndim, &p[3])});
  lines_use_panels(&j->lines, cls == PW_F32 ? entropy_panel_f32 : entropy_panel_f64);
  j->lines.scratch = scratch_take(base, &used, lines_scratch(&j->lines));
  return used;
}

static size_t backward_prepare(EntropyJob *j, const OpCall *c, char *base) {
  const struct cross_entropy_backward_args *a = c->args;
  const View *g = &c->in[0], *x = &c->in[1], *target = &c->in[2], *lse = &c->in[3],
             *total = &c->in[4];
  Positions p[3];
  size_t used = 64; /* never nothing: NULL means to count */
  PointwiseClass cls = block_class((DType)x->dtype);
  int dim = class_dim(x->ndim);
  j->classes = x->shape[dim];
  j->ignore_index = a->ignore_index;
  j->smoothing = a->label_smoothing;
  j->each = a->reduction == REDUCE_NONE;
  load_weight(j, &c->in[5], cls, base, &used);
  View in[4] = {*x, positions(target, x->ndim, &p[0]), positions(lse, x->ndim, &p[1])};
  if (j->each) in[3] = positions(g, x->ndim, &p[2]);
  else if (base) j->scale = dtype_get_f64((DType)g->dtype, g->data);
  if (base && a->reduction == REDUCE_MEAN)
    j->scale /= dtype_get_f64((DType)total->dtype, total->data);
  lines_init(&j->lines, cls, 1 << 2, dim, dim + 1, 1, c->out, j->each ? 4 : 3, in);
  lines_use_panels(&j->lines, cls == PW_F32 ? gradient_panel_f32 : gradient_panel_f64);
  j->lines.scratch = scratch_take(base, &used, lines_scratch(&j->lines));
  return used;
}

static double sum_of(const char *v, PointwiseClass cls, int64_t n) {
  double sum = 0;
  for (int64_t at = 0; at < n; at += BLOCK) {
    int64_t m = n - at < BLOCK ? n - at : BLOCK;
    sum += cls == PW_F32 ? line_sum_f32(m, (const float *)(const void *)v + at)
                         : line_sum_f64(m, (const double *)(const void *)v + at);
  }
  return sum;
}

/* -- Records ----------------------------------------------------------------------------------- */

static int cross_entropy_infer(Infer *I) {
  const struct cross_entropy_args *a = I->args;
  const Meta *t = I->in[1];
  int rc = entropy_check(I, 0, 1, 2, a->label_smoothing);
  if (rc) return rc;
  DType x = (DType)I->in[0]->dtype, wide = x == F64 ? F64 : F32;
  rc = infer_shape(I, x, a->reduction == REDUCE_NONE ? t->ndim : 0, t->shape);
  if (!rc) rc = infer_shape(I, wide, t->ndim, t->shape);
  return rc ? rc : infer_shape(I, wide, 0, t->shape);
}

static size_t cross_entropy_scratch(const OpCall *c) {
  EntropyJob j;
  return forward_prepare(&j, c, NULL);
}

static int cross_entropy_cpu(const OpCall *c) {
  const struct cross_entropy_args *a = c->args;
  const View *loss = &c->out[0], *total = &c->out[2];
  EntropyJob j;
  int rc = check_labels(c->op->name, &c->in[1], c->in[0].shape[class_dim(c->in[0].ndim)],
                        a->ignore_index);
  if (rc) return rc;
  forward_prepare(&j, c, c->scratch);
  PointwiseClass cls = block_class((DType)c->in[0].dtype);
  lines_run(&j.lines, cls == PW_F32 ? entropy_line_f32 : entropy_line_f64, &j, j.lines.scratch);
  int64_t n = view_numel(&c->in[1]);
  double weights = sum_of(j.row_weight, cls, n);
  dtype_set_f64((DType)total->dtype, total->data, weights);
  if (a->reduction == REDUCE_NONE) {
    View rows = c->out[1];
    rows.data = j.loss;
    return copy_views(&rows, loss);
  }
  dtype_set_f64((DType)loss->dtype, loss->data,
                sum_of(j.loss, cls, n) / (a->reduction == REDUCE_MEAN ? weights : 1));
  return 0;
}

/* Split by positions; the mean of parts is not a part of the mean. */
static int cross_entropy_sbp(SbpAsk *q) {
  const struct cross_entropy_args *a = q->args;
  int ndim = q->in[0]->ndim, dim = class_dim(ndim);
  for (int d = 0; d < ndim && a->reduction != REDUCE_MEAN; d++) {
    if (d == dim) continue;
    Sbp *row = sbp_add(q);
    if (!row) return MF_ENOMEM;
    row[0] = sbp_split(d);
    row[1] = row[q->n_in + 1] = sbp_split(d > dim ? d - 1 : d);
    row[q->n_in] = a->reduction == REDUCE_NONE ? row[1] : (Sbp){SBP_P, 0};
    row[q->n_in + 2] = (Sbp){SBP_P, 0};
  }
  return 0;
}

/* The loss of logits x (N, C, d1, ...) under labels (N, d1, ...), the log-sum-exp of each position,
 * and the sum of the labels' weights. */
OP(cross_entropy,
   .signature =
       "cross_entropy(Tensor x, Tensor target, Tensor? weight=None, *, int ignore_index=-100, "
       "str(mean|sum|none) reduction=mean, float label_smoothing=0) -> (Tensor loss, Tensor lse, "
       "Tensor total)",
   .flags = OP_HIDDEN, .sbp_rule = cross_entropy_sbp, .infer = cross_entropy_infer,
   .cpu = cross_entropy_cpu, .scratch = cross_entropy_scratch)

static int cross_entropy_backward_infer(Infer *I) {
  const struct cross_entropy_backward_args *a = I->args;
  const Meta *g = I->in[0], *t = I->in[2], *lse = I->in[3];
  int rc = entropy_check(I, 1, 2, 5, a->label_smoothing),
      ndim = a->reduction == REDUCE_NONE ? t->ndim : 0;
  if (!rc) rc = infer_want_ndim(I, 0, ndim);
  if (!rc) rc = infer_want_ndim(I, 3, t->ndim);
  if (!rc) rc = infer_want_ndim(I, 4, 0);
  if (rc) return rc;
  if (memcmp(g->shape, t->shape, sizeof(int64_t) * (size_t)ndim) ||
      memcmp(lse->shape, t->shape, sizeof(int64_t) * (size_t)t->ndim))
    return infer_error(I, "g and lse must have the shape of target");
  return infer_like(I, 1, (DType)I->in[1]->dtype);
}

static size_t cross_entropy_backward_scratch(const OpCall *c) {
  EntropyJob j;
  return backward_prepare(&j, c, NULL);
}

static int cross_entropy_backward_cpu(const OpCall *c) {
  const struct cross_entropy_backward_args *a = c->args;
  EntropyJob j;
  PointwiseClass cls = block_class((DType)c->in[1].dtype);
  int rc = check_labels(c->op->name, &c->in[2], c->in[1].shape[class_dim(c->in[1].ndim)],
                        a->ignore_index);
  if (rc || view_numel(&c->out[0]) == 0) return rc;
  backward_prepare(&j, c, c->scratch);
  lines_run(&j.lines, cls == PW_F32 ? gradient_line_f32 : gradient_line_f64, &j, j.lines.scratch);
  return 0;
}

static int cross_entropy_backward_sbp(SbpAsk *q) {
  const struct cross_entropy_backward_args *a = q->args;
  int ndim = q->in[1]->ndim, dim = class_dim(ndim);
  for (int d = 0; d < ndim; d++) {
    if (d == dim) continue;
    Sbp *row = sbp_add(q);
    if (!row) return MF_ENOMEM;
    row[1] = row[q->n_in] = sbp_split(d);
    row[2] = row[3] = sbp_split(d > dim ? d - 1 : d);
    if (a->reduction == REDUCE_NONE) row[0] = row[2];
  }
  return 0;
}

/* The gradient of cross_entropy for x from the log-sum-exp and the sum of weights that it gave. */
OP(cross_entropy_backward,
   .signature =
       "cross_entropy_backward(Tensor g, Tensor x, Tensor target, Tensor lse, Tensor total, "
       "Tensor? weight=None, *, int ignore_index=-100, str(mean|sum|none) reduction=mean, float "
       "label_smoothing=0) -> Tensor",
   .flags = OP_HIDDEN | OP_BLOCKWISE, .sbp_rule = cross_entropy_backward_sbp, .linear = "g",
   .infer = cross_entropy_backward_infer, .cpu = cross_entropy_backward_cpu,
   .scratch = cross_entropy_backward_scratch)

/* -- Behind a linear layer --------------------------------------------------------------------- */

/* The loss of logits x w' + b and its gradients, a chunk of positions after the other: the logits
 * of all of them, which may be many times larger than everything else, are never there together,
 * and a chunk's become its gradient where they lie. */
enum { HEAD_CHUNK = 1 << 24, HEAD_ROWS = 128 /* at least, or products would be slow */ };

typedef struct HeadJob {
  EntropyJob entropy;
  PointwiseClass cls;
  int64_t positions, width, chunk; /* a chunk of so many positions */
  const char *x, *w, *b;           /* (positions, width), (classes, width), (classes) or NULL */
  int64_t *label;
  char *lse, *logits; /* (chunk, classes) */
  int64_t first;      /* of the chunk that is worked on */
  char *gb;
} HeadJob;

/* c = op(a) op(b), or more of it, for row-major matrices. */
static void head_product(PointwiseClass cls, bool ta, bool tb, int64_t m, int64_t n, int64_t k,
                         const void *a, int64_t lda, const void *b, int64_t ldb, bool add,
                         void *c) {
  if (cls == PW_F32) {
    dnn_sgemm(ta, tb, m, n, k, 1, a, lda, b, ldb, add, c, n);
    return;
  }
  gemm_f64_job j = {a, b, c,  k, n, ta ? 1 : lda, ta ? lda : 1, tb ? 1 : ldb, tb ? ldb : 1,
                    n, 1, add};
  mf_parallel(m, (1 << 18) / (k * n) + 1, gemm_f64_rows, &j);
}

#define HEAD_ROWS_BODY(C, T)                                                                \
  static void head_rows_##C(int64_t begin, int64_t end, void *arg) {                        \
    const HeadJob *j = arg;                                                                 \
    int64_t classes = j->entropy.classes;                                                   \
    const T *b = (const T *)(const void *)j->b;                                             \
    for (int64_t i = begin; i < end; i++) {                                                 \
      T *x = (T *)(void *)j->logits + i * classes;                                          \
      int64_t at = j->first + i, label = j->label[at];                                      \
      T *loss = (T *)(void *)j->entropy.loss + at,                                          \
        *weight = (T *)(void *)j->entropy.row_weight + at, *lse = (T *)(void *)j->lse + at; \
      if (b) PW_IVDEP for (int64_t c = 0; c < classes; c++) x[c] += b[c];                   \
      entropy_line_##C(classes, &j->entropy, (void *[]){loss, weight, lse, x, &label});     \
      gradient_line_##C(classes, &j->entropy, (void *[]){x, x, &label, lse});               \
    }                                                                                       \
  }                                                                                         \
  static void head_bias_##C(int64_t begin, int64_t end, void *arg) {                        \
    const HeadJob *j = arg;                                                                 \
    int64_t classes = j->entropy.classes, left = j->positions - j->first;                   \
    const T *x = (const T *)(const void *)j->logits;                                        \
    T *gb = (T *)(void *)j->gb;                                                             \
    for (int64_t i = 0; i < (left < j->chunk ? left : j->chunk); i++)                       \
      PW_IVDEP for (int64_t c = begin; c < end; c++) gb[c] += x[i * classes + c];           \
  }
HEAD_ROWS_BODY(f32, float)
HEAD_ROWS_BODY(f64, double)

/* v's elements in order, of type t: where they lie, or copied. */
static char *head_operand(const View *v, DType t, bool copy, char *base, size_t *used) {
  if (view_absent(v) || (!copy && view_is_contiguous(v))) return v->data;
  char *place = scratch_take(base, used, (size_t)view_numel(v) * dtype_size(t));
  int64_t stride[MF_MAX_DIMS];
  shape_contiguous(v->ndim, v->shape, stride);
  View to = {.data = place, .shape = v->shape, .stride = stride, .ndim = v->ndim, .dtype = t};
  if (base) copy_views(v, &to);
  return place;
}

static size_t head_prepare(HeadJob *j, const OpCall *c, char *base) {
  const struct linear_cross_entropy_args *a = c->args;
  const View *x = &c->in[1], *w = &c->in[2], *target = &c->in[4];
  DType t = (DType)x->dtype;
  size_t used = 64, size = dtype_size(t), rows = (size_t)view_numel(target) * size;
  *j = (HeadJob){.cls = block_class(t), .positions = view_numel(target), .width = w->shape[1]};
  j->entropy = (EntropyJob){.classes = w->shape[0],
                            .ignore_index = a->ignore_index,
                            .smoothing = a->label_smoothing,
                            .weight_sum = (double)w->shape[0]};
  j->chunk = HEAD_CHUNK / (j->entropy.classes * (int64_t)size);
  if (j->chunk < HEAD_ROWS) j->chunk = HEAD_ROWS;
  if (j->chunk > j->positions) j->chunk = j->positions;
  j->x = head_operand(x, t, false, base, &used);
  j->w = head_operand(w, t, false, base, &used);
  j->b = head_operand(&c->in[3], t, false, base, &used);
  j->label = (int64_t *)(void *)head_operand(target, I64, true, base, &used);
  j->entropy.loss = scratch_take(base, &used, rows);
  j->entropy.row_weight = scratch_take(base, &used, rows);
  j->lse = scratch_take(base, &used, rows);
  j->logits = scratch_take(base, &used, (size_t)(j->chunk * j->entropy.classes) * size);
  j->gb = c->out[3].data;
  return used;
}

static int linear_cross_entropy_infer(Infer *I) {
  const struct linear_cross_entropy_args *a = I->args;
  const Meta *x = I->in[1], *w = I->in[2], *b = I->in[3], *t = I->in[4];
  DType type = (DType)x->dtype;
  int rc = infer_want_ndim(I, 0, 0);
  if (!rc) rc = infer_want_ndim(I, 2, 2);
  if (!rc) rc = infer_want_same_dtype(I, 2, 1);
  if (!rc && b) rc = infer_want_same_dtype(I, 3, 1);
  if (rc) return rc;
  if (type != F32 && type != F64)
    return infer_error(I, "x must be float32 or float64, is %s", dtype_name(type));
  if (dtype_kind((DType)t->dtype) != KIND_INT)
    return infer_error(I, "target must hold whole numbers, is %s", dtype_name((DType)t->dtype));
  if (x->ndim == 0 || w->shape[0] == 0 || w->shape[1] == 0 ||
      x->shape[x->ndim - 1] != w->shape[1] || meta_numel(x) != meta_numel(t) * w->shape[1] ||
      (b && (b->ndim != 1 || b->shape[0] != w->shape[0])))
    return infer_error(I,
                       "x must be (..., k), w (classes, k), b (classes) and target have an "
                       "element for each of x's lines");
  if (!(a->label_smoothing >= 0 && a->label_smoothing <= 1))
    return infer_error(I, "label_smoothing must lie between 0 and 1, is %g", a->label_smoothing);
  rc = infer_shape(I, type, 0, NULL);
  if (!rc) rc = infer_shape(I, type, x->ndim, x->shape);
  if (!rc) rc = infer_shape(I, type, 2, w->shape);
  return rc ? rc : infer_shape(I, type, 1, b ? b->shape : (int64_t[]){0});
}

static size_t linear_cross_entropy_scratch(const OpCall *c) {
  HeadJob j;
  return head_prepare(&j, c, NULL);
}

static double linear_cross_entropy_flops(const OpCall *c) {
  return 6.0 * (double)view_numel(&c->in[1]) * (double)c->in[2].shape[0];
}

static int linear_cross_entropy_cpu(const OpCall *c) {
  const struct linear_cross_entropy_args *a = c->args;
  const View *w = &c->in[2];
  HeadJob j;
  int rc = check_labels(c->op->name, &c->in[4], w->shape[0], a->ignore_index);
  if (rc) return rc;
  head_prepare(&j, c, c->scratch);
  int64_t classes = j.entropy.classes, k = j.width, counted = 0;
  size_t size = dtype_size((DType)w->dtype);
  char *gx = c->out[1].data, *gw = c->out[2].data;
  for (int64_t i = 0; i < j.positions; i++) counted += j.label[i] != a->ignore_index;
  double by = a->reduction == REDUCE_MEAN ? (double)counted : 1;
  j.entropy.scale = dtype_get_f64((DType)c->in[0].dtype, c->in[0].data) / by;
  if (j.b) memset(j.gb, 0, (size_t)classes * size);
  if (!j.positions) memset(gw, 0, (size_t)(classes * k) * size);
  for (j.first = 0; j.first < j.positions; j.first += j.chunk) {
    int64_t n = j.positions - j.first < j.chunk ? j.positions - j.first : j.chunk;
    const char *x = j.x + (size_t)(j.first * k) * size;
    head_product(j.cls, false, true, n, classes, k, x, k, j.w, k, false, j.logits);
    mf_parallel(n, LINES_GRAIN / classes + 1, j.cls == PW_F32 ? head_rows_f32 : head_rows_f64, &j);
    head_product(j.cls, false, false, n, k, classes, j.logits, classes, j.w, k, false,
                 gx + (size_t)(j.first * k) * size);
    head_product(j.cls, true, false, classes, k, n, j.logits, classes, x, k, j.first > 0, gw);
    if (j.b)
      mf_parallel(classes, LINES_GRAIN / n + 1, j.cls == PW_F32 ? head_bias_f32 : head_bias_f64,
                  &j);
  }
  dtype_set_f64((DType)c->out[0].dtype, c->out[0].data,
                sum_of(j.entropy.loss, j.cls, j.positions) / by);
  return 0;
}

/* Split by positions, where the loss is a sum. */
static int linear_cross_entropy_sbp(SbpAsk *q) {
  const struct linear_cross_entropy_args *a = q->args;
  for (int d = 0; d < q->in[4]->ndim && a->reduction == REDUCE_SUM; d++) {
    if (q->in[1]->ndim != q->in[4]->ndim + 1) return 0;
    Sbp *row = sbp_add(q);
    if (!row) return MF_ENOMEM;
    row[1] = row[4] = row[q->n_in + 1] = sbp_split(d);
    row[q->n_in] = row[q->n_in + 2] = row[q->n_in + 3] = (Sbp){SBP_P, 0};
  }
  return 0;
}

/* cross_entropy of linear(x, w, b), and its gradients for x, w and b, times g. Made by compiled
 * steps of the forward and the backward ops, so that it has no gradient itself; without b its
 * gradient is empty. */
OP(linear_cross_entropy,
   .signature =
       "linear_cross_entropy(Tensor g, Tensor x, Tensor w, Tensor? b, Tensor target, *, int "
       "ignore_index=-100, str(mean|sum) reduction=mean, float label_smoothing=0) -> (Tensor loss, "
       "Tensor gx, Tensor gw, Tensor gb)",
   .flags = OP_HIDDEN | OP_NO_GRAD, .sbp_rule = linear_cross_entropy_sbp,
   .infer = linear_cross_entropy_infer, .cpu = linear_cross_entropy_cpu,
   .scratch = linear_cross_entropy_scratch, .flops = linear_cross_entropy_flops)
