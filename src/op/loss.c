/* Cross entropy over class indices, without a copy of the logits: the forward pass keeps one log-sum-exp a row, the backward pass writes the
 * gradient once. lua/ops_loss.lua builds mf.cross_entropy on it. */
#include <float.h>

#include "op_args.h"
#include "pointwise.h"

enum { ROW_WORK = 1 << 13 };

/* -- Rows: (n, c) contiguous logits ------------------------------------------------------------------------------------------- */

typedef struct LossJob {
  const void *x, *weight, *g, *lse; /* of one dtype */
  const int64_t *target;
  void *loss, *lse_out, *row_weight, *dx;
  int64_t c, ignore_index;
  double smoothing, weight_sum;      /* of all classes; c without weights */
} LossJob;

/* Lanes keep the loops free of a chain of dependent additions. */
#define LOSS_ROWS(name, T, exp_, log_, lowest)                                                                                    \
  static T name##_lse(const T *x, int64_t c) {                                                                                    \
    enum { LANES = 64 / sizeof(T) };                                                                                              \
    T top[LANES], sum[LANES], most = lowest, total = 0;                                                                           \
    int64_t whole = c - c % LANES;                                                                                                \
    for (int k = 0; k < LANES; k++) top[k] = lowest, sum[k] = 0;                                                                  \
    for (int64_t j = 0; j < whole; j += LANES)                                                                                    \
      for (int k = 0; k < LANES; k++) top[k] = x[j + k] > top[k] ? x[j + k] : top[k];                                             \
    for (int64_t j = whole; j < c; j++) most = x[j] > most ? x[j] : most;                                                         \
    for (int k = 0; k < LANES; k++) most = top[k] > most ? top[k] : most;                                                         \
    for (int64_t j = 0; j < whole; j += LANES)                                                                                    \
      for (int k = 0; k < LANES; k++) sum[k] += exp_(x[j + k] - most);                                                            \
    for (int64_t j = whole; j < c; j++) total += exp_(x[j] - most);                                                               \
    for (int k = 0; k < LANES; k++) total += sum[k];                                                                              \
    return most + log_(total);                                                                                                    \
  }                                                                                                                               \
  static void name##_forward(int64_t begin, int64_t end, void *arg) {                                                             \
    const LossJob *j = arg;                                                                                                       \
    const T *weight = j->weight;                                                                                                  \
    for (int64_t i = begin; i < end; i++) {                                                                                       \
      const T *x = (const T *)j->x + i * j->c;                                                                                    \
      int64_t t = j->target[i];                                                                                                   \
      T lse = name##_lse(x, j->c), w = 0, loss = 0;                                                                               \
      if (t != j->ignore_index) {                                                                                                 \
        w = weight ? weight[t] : 1;                                                                                               \
        loss = (T)(1 - j->smoothing) * w * (lse - x[t]);                                                                          \
        if (j->smoothing > 0) {                                                                                                   \
          T all = 0;                                                                                                              \
          for (int64_t k = 0; k < j->c; k++) all += (weight ? weight[k] : 1) * (lse - x[k]);                                      \
          loss += (T)(j->smoothing / (double)j->c) * all;                                                                         \
        }                                                                                                                         \
      }                                                                                                                           \
      ((T *)j->loss)[i] = loss;                                                                                                   \
      ((T *)j->lse_out)[i] = lse;                                                                                                 \
      ((T *)j->row_weight)[i] = w;                                                                                                \
    }                                                                                                                             \
  }                                                                                                                               \
  static void name##_backward(int64_t begin, int64_t end, void *arg) {                                                            \
    const LossJob *j = arg;                                                                                                       \
    const T *weight = j->weight;                                                                                                  \
    for (int64_t i = begin; i < end; i++) {                                                                                       \
      const T *x = (const T *)j->x + i * j->c;                                                                                    \
      T *dx = (T *)j->dx + i * j->c, g = ((const T *)j->g)[i], lse = ((const T *)j->lse)[i];                                      \
      int64_t t = j->target[i];                                                                                                   \
      if (t == j->ignore_index) {                                                                                                 \
        memset(dx, 0, (size_t)j->c * sizeof(T));                                                                                  \
        continue;                                                                                                                 \
      }                                                                                                                           \
      T w = (weight ? weight[t] : 1) * (T)(1 - j->smoothing), s = (T)(j->smoothing / (double)j->c);                               \
      T scale = g * (w + s * (T)j->weight_sum);                                                                                   \
      for (int64_t k = 0; k < j->c; k++) dx[k] = scale * exp_(x[k] - lse);                                                        \
      if (s > 0)                                                                                                                  \
        for (int64_t k = 0; k < j->c; k++) dx[k] -= g * s * (weight ? weight[k] : 1);                                             \
      dx[t] -= g * w;                                                                                                             \
    }                                                                                                                             \
  }
LOSS_ROWS(rows_f32, float, expf, logf, -FLT_MAX)
LOSS_ROWS(rows_f64, double, (exp), (log), -DBL_MAX)

static double class_weights(const View *weight, int64_t c) {
  if (view_absent(weight)) return (double)c;
  double sum = 0;
  for (int64_t k = 0; k < c; k++) sum += weight->dtype == F32 ? (double)((const float *)weight->data)[k] : ((const double *)weight->data)[k];
  return sum;
}

/* Labels are checked before anything is computed. */
static int check_labels(const View *target, int64_t c, int64_t ignore_index) {
  const int64_t *t = target->data;
  for (int64_t i = 0; i < target->shape[0]; i++)
    if (t[i] != ignore_index && (t[i] < 0 || t[i] >= c))
      return err_set(MF_EINVAL, "cross_entropy: target %lld at position %lld is out of range; legal are 0 to %lld%s", (long long)t[i],
                     (long long)i, (long long)c - 1, ignore_index < 0 || ignore_index >= c ? ", or ignore_index" : "");
  return 0;
}

/* x (n, c), target int64 (n), weight (c) of x's dtype; all contiguous. */
static int check_rows(Infer *I, int x, int target, int weight) {
  const Meta *a = I->in[x], *t = I->in[target], *w = I->in[weight];
  char have[SHAPE_TEXT_MAX], want[SHAPE_TEXT_MAX];
  if (a->dtype != F32 && a->dtype != F64) return infer_error(I, "x must be float32 or float64, is %s", dtype_name((DType)a->dtype));
  int rc = infer_want_ndim(I, x, 2);
  if (!rc) rc = infer_want_dtype(I, target, I64);
  if (rc) return rc;
  if (t->ndim != 1 || t->shape[0] != a->shape[0])
    return infer_error(I, "target has shape %s, for x of shape %s it must have one label a row", shape_text(t->ndim, t->shape, have),
                       shape_text(a->ndim, a->shape, want));
  if (w && (w->ndim != 1 || w->shape[0] != a->shape[1] || w->dtype != a->dtype))
    return infer_error(I, "weight must have one %s a class (%lld), has shape %s of %s", dtype_name((DType)a->dtype), (long long)a->shape[1],
                       shape_text(w->ndim, w->shape, have), dtype_name((DType)w->dtype));
  if (!meta_is_contiguous(a) || !meta_is_contiguous(t) || (w && !meta_is_contiguous(w))) return infer_error(I, "inputs must be contiguous");
  return 0;
}

static int cross_entropy_rows_infer(Infer *I) {
  const struct cross_entropy_rows_args *a = I->args;
  int rc = check_rows(I, 0, 1, 2);
  if (rc) return rc;
  if (!(a->label_smoothing >= 0 && a->label_smoothing <= 1)) return infer_error(I, "label_smoothing must be in [0, 1], is %g", a->label_smoothing);
  for (int k = 0; k < 3 && !rc; k++) rc = infer_shape(I, (DType)I->in[0]->dtype, 1, I->in[0]->shape);
  return rc;
}

static int cross_entropy_rows_cpu(const OpCall *c) {
  const struct cross_entropy_rows_args *a = c->args;
  int rc = check_labels(&c->in[1], c->in[0].shape[1], a->ignore_index);
  if (rc) return rc;
  LossJob j = {.x = c->in[0].data, .target = c->in[1].data, .weight = view_absent(&c->in[2]) ? NULL : c->in[2].data, .loss = c->out[0].data,
               .lse_out = c->out[1].data, .row_weight = c->out[2].data, .c = c->in[0].shape[1], .ignore_index = a->ignore_index,
               .smoothing = a->label_smoothing};
  mf_parallel(c->in[0].shape[0], 1 + ROW_WORK / (j.c + 1), c->in[0].dtype == F32 ? rows_f32_forward : rows_f64_forward, &j);
  return 0;
}

/* For each row: its weighted loss (0 where the label is ignore_index), log(sum(exp(x))), and the weight of its label. */
OP(cross_entropy_rows, .signature = "cross_entropy_rows(Tensor x, Tensor target, Tensor? weight=None, *, int ignore_index=-100, "
                                    "float label_smoothing=0) -> (Tensor loss, Tensor lse, Tensor row_weight)",
   .flags = OP_HIDDEN,
   .sbp = "n C, n, C -> n, n, n",
   .infer = cross_entropy_rows_infer, .cpu = cross_entropy_rows_cpu)

static int cross_entropy_backward_infer(Infer *I) {
  int rc = check_rows(I, 1, 2, 4);
  if (rc) return rc;
  if (!meta_is_contiguous(I->in[0]) || !meta_is_contiguous(I->in[3])) return infer_error(I, "inputs must be contiguous");
  return infer_shape(I, (DType)I->in[1]->dtype, 2, I->in[1]->shape);
}

static int cross_entropy_backward_cpu(const OpCall *c) {
  const struct cross_entropy_backward_args *a = c->args;
  const View *x = &c->in[1], *weight = &c->in[4];
  LossJob j = {.g = c->in[0].data, .x = x->data, .target = c->in[2].data, .lse = c->in[3].data, .dx = c->out[0].data,
               .weight = view_absent(weight) ? NULL : weight->data, .c = x->shape[1], .ignore_index = a->ignore_index,
               .smoothing = a->label_smoothing, .weight_sum = class_weights(weight, x->shape[1])};
  mf_parallel(x->shape[0], 1 + ROW_WORK / (j.c + 1), x->dtype == F32 ? rows_f32_backward : rows_f64_backward, &j);
  return 0;
}

/* The gradient of cross_entropy_rows for x, given that of its losses. */
OP(cross_entropy_backward, .signature = "cross_entropy_backward(Tensor g, Tensor x, Tensor target, Tensor lse, Tensor? weight=None, *, "
                                        "int ignore_index=-100, float label_smoothing=0) -> Tensor",
   .flags = OP_HIDDEN,
   .sbp = "n, n C, n, n, C -> n C", .linear = "g",
   .infer = cross_entropy_backward_infer, .cpu = cross_entropy_backward_cpu)
