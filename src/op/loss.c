/* Losses element by element, summed or averaged in the same pass over memory. A line gives the loss
 * of x and target t and its derivative for x; the gradient of target, and second gradients, are
 * made of other ops in lua/grad_loss.lua.
 *
 * Sums are taken over chunks of fixed size and these in order, so that they do not depend on the
 * number of threads. */
#include "line_math.h"
#include "pointwise.h"
#include "sbp_rule.h"

enum { CHUNK = 1 << 14 };

typedef struct LossJob {
  PwJob pw;
  double *partial; /* a chunk */
} LossJob;

static void loss_chunks(int64_t begin, int64_t end, void *arg) {
  const LossJob *j = arg;
  BlockBuffer buffers[3];
  for (int k = 1; k < j->pw.walk.n; k++)
    if (j->pw.kind[k] == PW_CONSTANT)
      pw_fill(j->pw.convert[k], j->pw.cls, j->pw.walk.data[k], BLOCK, &buffers[k]);
  for (int64_t c = begin; c < end; c++) {
    int64_t last = (c + 1) * CHUNK < j->pw.walk.numel ? (c + 1) * CHUNK : j->pw.walk.numel;
    double sum = 0;
    for (int64_t at = c * CHUNK; at < last; at += BLOCK) {
      const void *in[2];
      int64_t n = last - at < BLOCK ? last - at : BLOCK,
              padded = pw_inputs(&j->pw, at, n, buffers, in);
      j->pw.fn(padded, j->pw.args, in, &buffers[0]);
      sum +=
          j->pw.cls == PW_F32 ? line_sum_f32(n, buffers[0].f32) : line_sum_f64(n, buffers[0].f64);
    }
    j->partial[c] = sum;
  }
}

/* Inputs 0 and 1 (x, target) broadcast: their shape. */
static int loss_shape(const View *in, int64_t *shape) {
  int ndim = 0;
  for (int k = 0; k < 2; k++) shape_broadcast(&ndim, shape, in[k].ndim, in[k].shape);
  return ndim;
}

/* How many elements the whole has, of which this may be a part: what a mean divides by. */
static double loss_count(const View *in) {
  int64_t shape[MF_MAX_DIMS];
  int ndim = 0;
  for (int k = 0; k < 2; k++)
    shape_broadcast(&ndim, shape, in[k].ndim, in[k].whole ? in[k].whole : in[k].shape);
  return (double)shape_numel(ndim, shape);
}

static size_t loss_scratch(const OpCall *c, int64_t reduction) {
  int64_t shape[MF_MAX_DIMS];
  int ndim = loss_shape(c->in, shape);
  return reduction == REDUCE_NONE ? 0
                                  : sizeof(double) * (size_t)(shape_numel(ndim, shape) / CHUNK + 1);
}

static int loss_cpu(const OpCall *c, int64_t reduction, PointwiseFn *const *fn) {
  PointwiseClass cls = block_class((DType)c->out[0].dtype);
  if (reduction == REDUCE_NONE) return pw_run(fn[cls], cls, false, c->args, 2, c->in, c->out);
  int64_t shape[MF_MAX_DIMS], stride[MF_MAX_DIMS];
  const View *out = &c->out[0];
  View like = {.data = out->data,
               .shape = shape,
               .stride = stride,
               .ndim = (int8_t)loss_shape(c->in, shape),
               .dtype = out->dtype};
  shape_contiguous(like.ndim, shape, stride);
  LossJob j = {.partial = c->scratch};
  pw_init(&j.pw, fn[cls], cls, false, c->args, c->n_in, c->in, &like);
  int64_t n = j.pw.walk.numel, chunks = (n + CHUNK - 1) / CHUNK;
  double sum = 0;
  mf_parallel(chunks, 1 + PW_GRAIN / CHUNK, loss_chunks, &j);
  for (int64_t k = 0; k < chunks; k++) sum += j.partial[k];
  dtype_set_f64((DType)out->dtype, out->data,
                reduction == REDUCE_MEAN ? sum / loss_count(c->in) : sum);
  return 0;
}

/* The gradient for x: the incoming one is a number unless nothing was reduced. */
static int loss_backward_cpu(const OpCall *c, int64_t reduction, PointwiseFn *const *fn) {
  PointwiseClass cls = block_class((DType)c->out[0].dtype);
  if (reduction != REDUCE_MEAN) return pw_run(fn[cls], cls, false, c->args, 3, c->in, c->out);
  double g = dtype_get_f64((DType)c->in[0].dtype, c->in[0].data) / loss_count(c->in + 1);
  View in[3] = {{.data = &g, .shape = c->in[0].shape, .stride = c->in[0].stride, .dtype = F64},
                c->in[1],
                c->in[2]};
  return pw_run(fn[cls], cls, false, c->args, 3, in, c->out);
}

static int loss_infer(Infer *I, int64_t reduction) {
  for (int k = 0; k < 2; k++) {
    int rc = infer_want_float(I, k);
    if (rc) return rc;
  }
  int rc = pointwise_infer(I);
  if (!rc && reduction != REDUCE_NONE) I->last->ndim = 0;
  return rc;
}

static int loss_backward_infer(Infer *I, int64_t reduction) {
  const Meta *g = I->in[0];
  char have[SHAPE_TEXT_MAX];
  int rc = pointwise_infer(I);
  if (rc || reduction == REDUCE_NONE || g->ndim == 0) return rc;
  return infer_error(I, "g must be a 0-d tensor where the loss was reduced, has shape %s",
                     shape_text(g->ndim, g->shape, have));
}

/* Split along any dim; a sum becomes partial, and so does a mean, which divides by the whole's
 * number. */
static int loss_split(SbpAsk *q, int64_t reduction, int n_tensors, int first, bool forward) {
  int64_t shape[MF_MAX_DIMS];
  int ndim = 0;
  for (int k = first; k < n_tensors; k++)
    shape_broadcast(&ndim, shape, q->in[k]->ndim, q->in[k]->shape);
  for (int d = 0; d < ndim; d++) {
    Sbp *row = sbp_add(q);
    if (!row) return MF_ENOMEM;
    for (int k = 0; k < n_tensors; k++) {
      int at = d - (ndim - q->in[k]->ndim);
      if (at >= 0 && q->in[k]->shape[at] == shape[d]) row[k] = sbp_split(at);
    }
    row[q->n_in] = forward && reduction != REDUCE_NONE ? (Sbp){SBP_P, 0} : sbp_split(d);
  }
  return 0;
}

#define LOSS(name, expr, derivative)                                                              \
  PW_FLOATS(2, name, T, expr)                                                                     \
  PW_FLOATS(3, name##_backward, T, (derivative)*x)                                                \
  static PointwiseFn *const name##_fn[] = {name##_f32, name##_f64};                               \
  static PointwiseFn *const name##_backward_fn[] = {name##_backward_f32, name##_backward_f64};    \
  static int name##_infer(Infer *I) {                                                             \
    return loss_infer(I, ((struct name##_args *)I->args)->reduction);                             \
  }                                                                                               \
  static int name##_cpu(const OpCall *c) {                                                        \
    return loss_cpu(c, ((const struct name##_args *)c->args)->reduction, name##_fn);              \
  }                                                                                               \
  static size_t name##_scratch(const OpCall *c) {                                                 \
    return loss_scratch(c, ((const struct name##_args *)c->args)->reduction);                     \
  }                                                                                               \
  static int name##_sbp(SbpAsk *q) {                                                              \
    return loss_split(q, ((const struct name##_args *)q->args)->reduction, 2, 0, true);           \
  }                                                                                               \
  static int name##_backward_infer(Infer *I) {                                                    \
    return loss_backward_infer(I, ((struct name##_backward_args *)I->args)->reduction);           \
  }                                                                                               \
  static int name##_backward_cpu(const OpCall *c) {                                               \
    return loss_backward_cpu(c, ((const struct name##_backward_args *)c->args)->reduction,        \
                             name##_backward_fn);                                                 \
  }                                                                                               \
  static int name##_backward_sbp(SbpAsk *q) {                                                     \
    return loss_split(q, ((const struct name##_backward_args *)q->args)->reduction, 3, 1, false); \
  }

#define LOSS_FORWARD(name, signature_)                                                       \
  .signature = signature_, .infer = name##_infer, .sbp_rule = name##_sbp, .cpu = name##_cpu, \
  .scratch = name##_scratch
#define LOSS_BACKWARD(name, signature_)                                            \
  .signature = signature_, .flags = OP_HIDDEN | OP_INDEXED, .infer = name##_infer, \
  .sbp_rule = name##_sbp, .linear = "g", .cpu = name##_cpu

LOSS(mse_loss, (a - b) * (a - b), K(2) * (a - b))
/* (x - target)^2. */
OP(mse_loss,
   LOSS_FORWARD(
       mse_loss,
       "mse_loss(Tensor x, Tensor target, *, str(mean|sum|none) reduction=mean) -> Tensor"),
   .flags = OP_INDEXED)
/* The gradient of mse_loss for x. */
OP(mse_loss_backward, LOSS_BACKWARD(mse_loss_backward,
                                    "mse_loss_backward(Tensor g, Tensor x, Tensor target, *, "
                                    "str(mean|sum|none) reduction=mean) -> Tensor"))

LOSS(l1_loss, fabs(a - b), (a > b) - (a < b))
/* |x - target|. */
OP(l1_loss,
   LOSS_FORWARD(l1_loss,
                "l1_loss(Tensor x, Tensor target, *, str(mean|sum|none) reduction=mean) -> Tensor"),
   .flags = OP_INDEXED)
/* The gradient of l1_loss for x. */
OP(l1_loss_backward, LOSS_BACKWARD(l1_loss_backward,
                                   "l1_loss_backward(Tensor g, Tensor x, Tensor target, *, "
                                   "str(mean|sum|none) reduction=mean) -> Tensor"))

LOSS(smooth_l1_loss,
     fabs(a - b) < K(o->beta) ? (a - b) * (a - b) * K(0.5 / o->beta)
                              : fabs(a - b) - K(0.5 * o->beta),
     fabs(a - b) < K(o->beta) ? (a - b) / K(o->beta) : (T)((a > b) - (a < b)))
/* 0.5 d^2 / beta where d = |x - target| is below beta, else d - 0.5 beta. */
OP(smooth_l1_loss,
   LOSS_FORWARD(smooth_l1_loss,
                "smooth_l1_loss(Tensor x, Tensor target, *, str(mean|sum|none) "
                "reduction=mean, float beta=1) -> Tensor"),
   .flags = OP_INDEXED)
/* The gradient of smooth_l1_loss for x. */
OP(smooth_l1_loss_backward,
   LOSS_BACKWARD(smooth_l1_loss_backward,
                 "smooth_l1_loss_backward(Tensor g, Tensor x, Tensor target, *, str(mean|sum|none) "
                 "reduction=mean, float beta=1) -> Tensor"))

LOSS(huber_loss,
     fabs(a - b) <= K(o->delta) ? K(0.5) * (a - b) * (a - b)
                                : K(o->delta) * (fabs(a - b) - K(0.5 * o->delta)),
     fabs(a - b) <= K(o->delta) ? a - b : K(o->delta) * (T)((a > b) - (a < b)))
/* 0.5 d^2 where d = |x - target| is at most delta, else delta (d - 0.5 delta). */
OP(huber_loss,
   LOSS_FORWARD(huber_loss,
                "huber_loss(Tensor x, Tensor target, *, str(mean|sum|none) "
                "reduction=mean, float delta=1) -> Tensor"),
   .flags = OP_INDEXED)
/* The gradient of huber_loss for x. */
OP(huber_loss_backward,
   LOSS_BACKWARD(huber_loss_backward,
                 "huber_loss_backward(Tensor g, Tensor x, Tensor target, *, str(mean|sum|none) "
                 "reduction=mean, float delta=1) -> Tensor"))

/* Logarithms are cut at -100, as PyTorch's are; the derivative's divisor likewise at 1e-12. */
LOSS(bce_loss,
     -(b *(log(a) < K(-100) ? K(-100) : log(a)) +
       (K(1) - b) * (log1p(-a) < K(-100) ? K(-100) : log1p(-a))),
     (a - b) / ((K(1) - a) * a > K(1e-12) ? (K(1) - a) * a : K(1e-12)))
/* -(t log x + (1 - t) log(1 - x)) for probabilities x; see binary_cross_entropy. */
OP(bce_loss,
   LOSS_FORWARD(
       bce_loss,
       "bce_loss(Tensor x, Tensor target, *, str(mean|sum|none) reduction=mean) -> Tensor"),
   .flags = OP_HIDDEN | OP_INDEXED)
/* The gradient of bce_loss for x. */
OP(bce_loss_backward, LOSS_BACKWARD(bce_loss_backward,
                                    "bce_loss_backward(Tensor g, Tensor x, Tensor target, *, "
                                    "str(mean|sum|none) reduction=mean) -> Tensor"))

LOSS(bce_logits_loss, (K(1) - b) * a + log1p(exp(-fabs(a))) + (a < K(0) ? -a : K(0)),
     (a < K(0) ? exp(a) / (K(1) + exp(a)) : K(1) / (K(1) + exp(-a))) - b)
/* The same for logits x, without overflow; see binary_cross_entropy_with_logits. */
OP(bce_logits_loss,
   LOSS_FORWARD(
       bce_logits_loss,
       "bce_logits_loss(Tensor x, Tensor target, *, str(mean|sum|none) reduction=mean) -> Tensor"),
   .flags = OP_HIDDEN | OP_INDEXED)
/* The gradient of bce_logits_loss for x. */
OP(bce_logits_loss_backward,
   LOSS_BACKWARD(bce_logits_loss_backward,
                 "bce_logits_loss_backward(Tensor g, Tensor x, Tensor target, *, "
                 "str(mean|sum|none) reduction=mean) -> Tensor"))

LOSS(kl_loss, b > K(0) ? b * (log(b) - a) : b == b ? K(0) : b, -b)
/* t (log t - x) for log-probabilities x; see kl_div. */
OP(kl_loss,
   LOSS_FORWARD(kl_loss,
                "kl_loss(Tensor x, Tensor target, *, str(mean|sum|none) reduction=mean) -> Tensor"),
   .flags = OP_HIDDEN | OP_INDEXED)
/* The gradient of kl_loss for x. */
OP(kl_loss_backward, LOSS_BACKWARD(kl_loss_backward,
                                   "kl_loss_backward(Tensor g, Tensor x, Tensor target, *, "
                                   "str(mean|sum|none) reduction=mean) -> Tensor"))
