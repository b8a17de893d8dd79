/* Convolution in two dims: forward, the gradient of its input, the gradients of its weights and
 * bias.
 *
 * Every kernel is one Scheme: x (n, ic, ih, iw), w (oc, ic / groups, kh, kw), y (n, oc, oh, ow) and
 * perhaps a bias, of which one or two are written. float32 goes to oneDNN, and bfloat16 where the
 * CPU multiplies it; other small floats are computed as float32; double by the loops here, which
 * are the reference as well.
 *
 * Memory formats: the result has channels innermost (channels_last) when an image or the weights
 * have, as in PyTorch. Operands are taken as they lie in either format; anything else, and what
 * must be converted, goes through a dense copy in scratch. A tensor that is dense in both formats
 * (one channel, or one pixel) counts as channels_last only when its strides say so. */
#include "copy_views.h"
#include "cpuid.h"
#include "dnn.h"
#include "image.h"
#include "op_args.h"
#include "sbp_rule.h"

enum { LIMIT = 1 << 20, X = 0, W, Y, BIAS, PARTS };

/* The arguments that all kernels share. */
typedef struct Window {
  const int64_t *stride, *padding, *dilation;
  int64_t groups;
  bool relu; /* of the result */
} Window;

typedef struct Part {
  Image image; /* the weights are one as well, the bias a view of one dim */
  bool used, written, copy, last;
  size_t at;
} Part;

typedef struct Scheme {
  Part part[PARTS];
  DType compute;
  size_t at_dnn, total;
  DnnConv conv;
} Scheme;

/* -- Schemes ----------------------------------------------------------------------------------- */

static size_t room(Scheme *s, int64_t elements, DType t) {
  return scratch_offset(&s->total, (size_t)elements * dtype_size(t));
}

static void part_set(Scheme *s, int k, const View *v, bool written) {
  Part *p = &s->part[k];
  p->used = v && !view_absent(v);
  if (!p->used) return;
  p->written = written;
  if (k == BIAS) p->image.view = *v;
  else image_set(&p->image, v);
}

/* Chooses the format in which an operand is used, and whether that takes a copy. */
static void part_place(Scheme *s, int k, bool prefer_last) {
  Part *p = &s->part[k];
  if (!p->used) return;
  DType want = k == BIAS && s->compute == BF16 ? F32 : s->compute;
  bool plain = view_is_contiguous(&p->image.view);
  bool last = k != BIAS && shape_is_channels_last(4, p->image.shape, p->image.stride);
  if (s->compute == F64) last = prefer_last = false;
  p->copy = p->image.view.dtype != want || !(plain || last);
  p->last = p->copy || (plain && last) ? prefer_last && k != BIAS : last;
  if (p->copy) p->at = room(s, view_numel(&p->image.view), want);
}

static void scheme_dnn(Scheme *s, const OpCall *c, DnnConvKind kind, const Window *w) {
  const int64_t *x = s->part[X].image.shape, *k = s->part[W].image.shape,
                *y = s->part[Y].image.shape;
  s->conv = (DnnConv){.kind = kind,
                      .type = s->compute == BF16 ? DNN_BF16 : DNN_F32,
                      .bias = s->part[BIAS].used,
                      .relu = w->relu,
                      .x_last = s->part[X].last,
                      .w_last = s->part[W].last,
                      .y_last = s->part[Y].last,
                      .n = x[0],
                      .ic = x[1],
                      .ih = x[2],
                      .iw = x[3],
                      .oc = y[1],
                      .oh = y[2],
                      .ow = y[3],
                      .kh = k[2],
                      .kw = k[3],
                      .groups = w->groups,
                      .stride = {w->stride[0], w->stride[1]},
                      .padding = {w->padding[0], w->padding[1]},
                      .dilation = {w->dilation[0], w->dilation[1]}};
  if (s->compute == F64) return;
  DnnCache *cache = dnn_cache(c->stream->device);
  s->at_dnn = s->total;
  if (cache) s->total += dnn_conv_scratch(cache, &s->conv);
}

static bool scheme_is_empty(const Scheme *s) {
  return !view_numel(&s->part[X].image.view) || !view_numel(&s->part[W].image.view) ||
         !view_numel(&s->part[Y].image.view);
}

/* Depends on shapes and strides alone. An empty scheme needs nothing. */
static void scheme_set(Scheme *s, const OpCall *c, DnnConvKind kind, const Window *window,
                       const View *x, const View *w, const View *bias, const View *y) {
  *s = (Scheme){.compute = F32};
  part_set(s, X, x, kind == DNN_CONV_INPUT);
  part_set(s, W, w, kind == DNN_CONV_WEIGHT);
  part_set(s, BIAS, bias, kind == DNN_CONV_WEIGHT);
  part_set(s, Y, y, kind == DNN_CONV);
  if (scheme_is_empty(s)) return;
  if (x->dtype == F64) s->compute = F64;
  if (x->dtype == BF16 && cpuid_has_bf16()) s->compute = BF16;
  bool last = image_strictly_last(s->part[X].image.shape, s->part[X].image.stride) ||
              image_strictly_last(s->part[Y].image.shape, s->part[Y].image.stride);
  part_place(s, X, last);
  part_place(s, Y, last);
  part_place(s, W, image_strictly_last(s->part[W].image.shape, s->part[W].image.stride));
  part_place(s, BIAS, false);
  scheme_dnn(s, c, kind, window);
}

/* -- Double: loops over dense NCHW operands ---------------------------------------------------- */

typedef struct Plain {
  const DnnConv *d;
  double *x, *w, *bias, *y;
} Plain;

/* The part of output row `oh` that a kernel element touches: ow in [*from, *to), input row *ih and
 * first column *iw (which may lie outside when *from > 0). False when none. */
static bool plain_row(const DnnConv *d, int64_t oh, int64_t kh, int64_t kw, int64_t *ih,
                      int64_t *iw, int64_t *from, int64_t *to) {
  int64_t step = d->stride[1];
  *ih = oh * d->stride[0] - d->padding[0] + kh * d->dilation[0];
  *iw = kw * d->dilation[1] - d->padding[1];
  if (*ih < 0 || *ih >= d->ih || *iw >= d->iw) return false;
  *from = *iw < 0 ? (step - 1 - *iw) / step : 0;
  *to = (d->iw - *iw + step - 1) / step;
  if (*to > d->ow) *to = d->ow;
  return *from < *to;
}

/* What image n, output channel o and input channel i (within the group) have to do with each other.
 */
static void plain_pair(const Plain *p, int64_t n, int64_t o, int64_t i) {
  const DnnConv *d = p->d;
  int64_t icg = d->ic / d->groups, channel = o / (d->oc / d->groups) * icg + i, step = d->stride[1];
  double *image = p->x + (n * d->ic + channel) * d->ih * d->iw,
         *kernel = p->w + (o * icg + i) * d->kh * d->kw;
  for (int64_t k = 0; k < d->kh * d->kw; k++) {
    double w = kernel[k], sum = 0;
    for (int64_t oh = 0; oh < d->oh; oh++) {
      int64_t ih, iw, from, to;
      if (!plain_row(d, oh, k / d->kw, k % d->kw, &ih, &iw, &from, &to)) continue;
      double *x = image + ih * d->iw + iw, *y = p->y + ((n * d->oc + o) * d->oh + oh) * d->ow;
      if (d->kind == DNN_CONV)
        for (int64_t ow = from; ow < to; ow++) y[ow] += w * x[ow * step];
      else if (d->kind == DNN_CONV_INPUT)
        for (int64_t ow = from; ow < to; ow++) x[ow * step] += w * y[ow];
      else
        for (int64_t ow = from; ow < to; ow++) sum += y[ow] * x[ow * step];
    }
    if (d->kind == DNN_CONV_WEIGHT) kernel[k] += sum;
  }
}

static void plain_forward(int64_t begin, int64_t end, void *arg) { /* over (n, oc) */
  const Plain *p = arg;
  const DnnConv *d = p->d;
  for (int64_t k = begin; k < end; k++) {
    double *y = p->y + k * d->oh * d->ow;
    for (int64_t i = 0; i < d->oh * d->ow; i++) y[i] = p->bias ? p->bias[k % d->oc] : 0;
    for (int64_t i = 0; i < d->ic / d->groups; i++) plain_pair(p, k / d->oc, k % d->oc, i);
  }
}

static void plain_input(int64_t begin, int64_t end, void *arg) { /* over (n, ic) */
  const Plain *p = arg;
  const DnnConv *d = p->d;
  int64_t icg = d->ic / d->groups, ocg = d->oc / d->groups;
  for (int64_t k = begin; k < end; k++) {
    int64_t channel = k % d->ic, first = channel / icg * ocg;
    memset(p->x + k * d->ih * d->iw, 0, sizeof(double) * (size_t)(d->ih * d->iw));
    for (int64_t o = first; o < first + ocg; o++) plain_pair(p, k / d->ic, o, channel % icg);
  }
}

static void plain_weight(int64_t begin, int64_t end, void *arg) { /* over oc */
  const Plain *p = arg;
  const DnnConv *d = p->d;
  int64_t icg = d->ic / d->groups, pixels = d->oh * d->ow;
  for (int64_t o = begin; o < end; o++) {
    memset(p->w + o * icg * d->kh * d->kw, 0, sizeof(double) * (size_t)(icg * d->kh * d->kw));
    if (p->bias) p->bias[o] = 0;
    for (int64_t n = 0; n < d->n; n++) {
      for (int64_t i = 0; i < icg; i++) plain_pair(p, n, o, i);
      const double *y = p->y + (n * d->oc + o) * pixels;
      for (int64_t i = 0; i < pixels && p->bias; i++) p->bias[o] += y[i];
    }
  }
}

static void plain_relu(int64_t begin, int64_t end, void *arg) {
  const Plain *p = arg;
  for (int64_t i = begin; i < end; i++) p->y[i] = p->y[i] < 0 ? 0 : p->y[i];
}

static void plain_run(const DnnConv *d, void *const *data) {
  Plain p = {.d = d, .x = data[X], .w = data[W], .bias = data[BIAS], .y = data[Y]};
  if (d->kind == DNN_CONV) mf_parallel(d->n * d->oc, 1, plain_forward, &p);
  else if (d->kind == DNN_CONV_INPUT) mf_parallel(d->n * d->ic, 1, plain_input, &p);
  else mf_parallel(d->oc, 1, plain_weight, &p);
  if (d->relu) mf_parallel(d->n * d->oc * d->oh * d->ow, 1 << 14, plain_relu, &p);
}

/* -- Running ----------------------------------------------------------------------------------- */

/* The dense copy of a part in scratch. */
static View part_copy(const Scheme *s, int k, char *scratch, int64_t *strides) {
  const Part *p = &s->part[k];
  View v = p->image.view;
  if (p->last) shape_channels_last(p->image.shape, strides);
  else shape_contiguous(v.ndim, p->image.shape, strides);
  v.dtype = (uint8_t)(k == BIAS && s->compute == BF16 ? F32 : s->compute);
  v.stride = strides;
  v.data = scratch + p->at;
  return v;
}

/* Without input, weights or output: zero, or the bias, cut at zero where `relu`. */
static void run_empty(const Scheme *s, bool relu) {
  int64_t none[4] = {0};
  for (int k = 0; k < PARTS; k++) {
    const Part *p = &s->part[k];
    if (!p->used || !p->written) continue;
    View zero = {.data = (double[]){0}, .dtype = F64, .ndim = 0};
    copy_views(&zero, &p->image.view);
    if (k != Y || !s->part[BIAS].used) continue;
    View bias = s->part[BIAS].image.view; /* (oc) seen as (n, oc, oh, ow) */
    none[1] = bias.stride[0];
    bias.ndim = 4, bias.shape = p->image.shape, bias.stride = none;
    if (!relu) copy_views(&bias, &p->image.view);
    for (int64_t o = 0; relu && o < p->image.shape[1]; o++) {
      View one = bias, y = p->image.view;
      int64_t shape[4] = {y.shape[0], 1, y.shape[2], y.shape[3]};
      size_t size = dtype_size((DType)y.dtype);
      one.data = (char *)bias.data + o * none[1] * (int64_t)size;
      y.data = (char *)y.data + o * y.stride[1] * (int64_t)size;
      one.shape = y.shape = shape;
      if (dtype_get_f64((DType)one.dtype, one.data) > 0) copy_views(&one, &y);
    }
  }
}

static int conv_run(const OpCall *c, DnnConvKind kind, const Window *window, const View *x,
                    const View *w, const View *bias, const View *y) {
  Scheme s;
  scheme_set(&s, c, kind, window, x, w, bias, y);
  if (scheme_is_empty(&s)) {
    run_empty(&s, window->relu);
    return 0;
  }
  void *data[PARTS] = {NULL};
  int64_t strides[PARTS][4];
  View copies[PARTS];
  for (int k = 0; k < PARTS; k++) {
    Part *p = &s.part[k];
    if (!p->used) continue;
    data[k] = p->image.view.data;
    if (!p->copy) continue;
    copies[k] = part_copy(&s, k, c->scratch, strides[k]);
    data[k] = copies[k].data;
    if (!p->written) copy_views(&p->image.view, &copies[k]);
  }
  if (s.compute == F64) {
    plain_run(&s.conv, data);
  } else {
    DnnCache *cache = dnn_cache(c->stream->device);
    if (!cache) return MF_ENOMEM;
    int rc = dnn_conv(cache, &s.conv, data[X], data[W], data[BIAS], data[Y],
                      (char *)c->scratch + s.at_dnn);
    if (rc) return rc;
  }
  for (int k = 0; k < PARTS; k++)
    if (s.part[k].used && s.part[k].copy && s.part[k].written)
      copy_views(&copies[k], &s.part[k].image.view);
  return 0;
}

static size_t conv_scratch(const OpCall *c, DnnConvKind kind, const Window *window, const View *x,
                           const View *w, const View *bias, const View *y) {
  Scheme s;
  scheme_set(&s, c, kind, window, x, w, bias, y);
  return s.total;
}

/* -- Inference --------------------------------------------------------------------------------- */

static int check_window(Infer *I, const Window *w) {
  for (int k = 0; k < 2; k++) {
    if (w->stride[k] < 1 || w->stride[k] > LIMIT)
      return infer_error(I, "stride must be from 1 to %d, is %lld", LIMIT, (long long)w->stride[k]);
    if (w->padding[k] < 0 || w->padding[k] > LIMIT)
      return infer_error(I, "padding must be from 0 to %d, is %lld", LIMIT,
                         (long long)w->padding[k]);
    if (w->dilation[k] < 1 || w->dilation[k] > LIMIT)
      return infer_error(I, "dilation must be from 1 to %d, is %lld", LIMIT,
                         (long long)w->dilation[k]);
  }
  return 0;
}

/* Weights against groups and channels; `out`: the image has the output's channels. */
static int check_weights(Infer *I, const Meta *image, const Meta *w, int64_t groups, bool out) {
  char tx[SHAPE_TEXT_MAX], tw[SHAPE_TEXT_MAX];
  int64_t channels = image->shape[image->ndim - 3];
  if (groups < 1 || w->shape[0] % groups || w->shape[1] > SHAPE_MAX / groups)
    return infer_error(I, "groups is %lld; it must divide the %lld output channels of w",
                       (long long)groups, (long long)w->shape[0]);
  if (out ? channels == w->shape[0] : channels == w->shape[1] * groups) return 0;
  if (out)
    return infer_error(I, "g is %s, w is %s; g's channels must equal w's first size",
                       shape_text(image->ndim, image->shape, tx), shape_text(4, w->shape, tw));
  return infer_error(
      I, "x is %s, w is %s, groups is %lld; x's channels must equal w's second size times groups",
      shape_text(image->ndim, image->shape, tx), shape_text(4, w->shape, tw), (long long)groups);
}

/* The output's sizes; 0 where the kernel does not fit. */
static int64_t out_size(int64_t in, int64_t kernel, const Window *w, int k) {
  int64_t reach;
  if (kernel < 1 || __builtin_mul_overflow(kernel - 1, w->dilation[k], &reach)) return 0;
  int64_t span = in + 2 * w->padding[k] - reach - 1;
  return span < 0 ? 0 : span / w->stride[k] + 1;
}

static Window conv2d_window(const struct conv2d_args *a) {
  return (Window){a->stride, a->padding, a->dilation, a->groups, false};
}

static int conv2d_infer(Infer *I) {
  const Meta *x = I->in[0], *w = I->in[1], *b = I->in[2];
  Window window = conv2d_window(I->args);
  int rc = image_check(I, 0);
  if (!rc) rc = infer_want_ndim(I, 1, 4);
  if (!rc) rc = infer_want_same_dtype(I, 0, 1);
  if (!rc && b) rc = infer_want_same_dtype(I, 0, 2);
  if (!rc) rc = check_window(I, &window);
  if (!rc) rc = check_weights(I, x, w, window.groups, false);
  if (rc) return rc;
  char tx[SHAPE_TEXT_MAX], tw[SHAPE_TEXT_MAX];
  if (b && (b->ndim != 1 || b->shape[0] != w->shape[0]))
    return infer_error(I, "b is %s; expected (%lld), as w is %s", shape_text(b->ndim, b->shape, tx),
                       (long long)w->shape[0], shape_text(4, w->shape, tw));
  int64_t oh = out_size(x->shape[x->ndim - 2], w->shape[2], &window, 0),
          ow = out_size(x->shape[x->ndim - 1], w->shape[3], &window, 1);
  if (!oh || !ow)
    return infer_error(I,
                       "the kernel of w %s does not fit into x %s with padding (%lld, %lld) and "
                       "dilation (%lld, %lld)",
                       shape_text(4, w->shape, tw), shape_text(x->ndim, x->shape, tx),
                       (long long)window.padding[0], (long long)window.padding[1],
                       (long long)window.dilation[0], (long long)window.dilation[1]);
  return image_add(I, x, w->shape[0], oh, ow, image_meta_is_last(x) || image_meta_is_last(w));
}

static size_t conv2d_scratch(const OpCall *c) {
  Window w = conv2d_window(c->args);
  return conv_scratch(c, DNN_CONV, &w, &c->in[0], &c->in[1], &c->in[2], &c->out[0]);
}

static int conv2d_cpu(const OpCall *c) {
  Window w = conv2d_window(c->args);
  return conv_run(c, DNN_CONV, &w, &c->in[0], &c->in[1], &c->in[2], &c->out[0]);
}

/* Two per element of y, the convolution's result, and element of one of its weights w (kernels of
 * all input channels of a group). */
static double window_flops(const View *y, const View *w) {
  return 2.0 * (double)view_numel(y) * (double)w->shape[1] * (double)(w->shape[2] * w->shape[3]);
}

static double conv2d_flops(const OpCall *c) {
  return window_flops(&c->out[0], &c->in[1]);
}

static double conv2d_input_flops(const OpCall *c) {
  return window_flops(&c->in[0], &c->in[1]);
}

static double conv2d_weight_flops(const OpCall *c) {
  return window_flops(&c->in[0], &c->in[2]);
}

static int conv2d_sbp(SbpAsk *q) {
  const struct conv2d_args *a = q->args;
  return sbp_notation(
      q, a->groups == 1 ? "n c H W, o c K L, + o -> n o H W" : "n C H W, O G K L, + O -> n O H W");
}

/* Cross-correlation of x (N, C, H, W) with w (O, C / groups, kh, kw), plus b (O). The result keeps
 * channels_last memory. */
OP(conv2d,
   .signature =
       "conv2d(Tensor x, Tensor w, Tensor? b=None, *, int[2] stride=1, int[2] padding=0, "
       "int[2] dilation=1, "
       "int groups=1) -> Tensor",
   .sbp_rule = conv2d_sbp, .linear = "x|w", .infer = conv2d_infer, .cpu = conv2d_cpu,
   .scratch = conv2d_scratch, .flops = conv2d_flops)

/* -- Followed by a relu ------------------------------------------------------------------------ */

static struct conv2d_args act_args(const struct conv2d_act_args *a) {
  return (struct conv2d_args){.stride = {a->stride[0], a->stride[1]},
                              .padding = {a->padding[0], a->padding[1]},
                              .dilation = {a->dilation[0], a->dilation[1]},
                              .groups = a->groups};
}

static Window conv2d_act_window(const struct conv2d_act_args *a) {
  return (Window){a->stride, a->padding, a->dilation, a->groups, true};
}

static int conv2d_act_infer(Infer *I) {
  struct conv2d_args plain = act_args(I->args);
  void *args = I->args;
  I->args = &plain;
  int rc = conv2d_infer(I);
  I->args = args;
  return rc;
}

static size_t conv2d_act_scratch(const OpCall *c) {
  Window w = conv2d_act_window(c->args);
  return conv_scratch(c, DNN_CONV, &w, &c->in[0], &c->in[1], &c->in[2], &c->out[0]);
}

static int conv2d_act_cpu(const OpCall *c) {
  Window w = conv2d_act_window(c->args);
  return conv_run(c, DNN_CONV, &w, &c->in[0], &c->in[1], &c->in[2], &c->out[0]);
}

static int conv2d_act_sbp(SbpAsk *q) {
  const struct conv2d_act_args *a = q->args;
  return sbp_notation(
      q, a->groups == 1 ? "n C H W, o C K L, o -> n o H W" : "n C H W, O G K L, O -> n O H W");
}

/* conv2d, of which max(y, 0) is kept. Made by the compiler for graphs whose gradients are there
 * already. */
OP(conv2d_act,
   .signature =
       "conv2d_act(Tensor x, Tensor w, Tensor? b=None, *, int[2] stride=1, int[2] padding=0, "
       "int[2] dilation=1, "
       "int groups=1) -> Tensor",
   .flags = OP_HIDDEN | OP_NO_GRAD, .sbp_rule = conv2d_act_sbp, .infer = conv2d_act_infer,
   .cpu = conv2d_act_cpu, .scratch = conv2d_act_scratch, .flops = conv2d_flops)

/* -- The input's gradient ---------------------------------------------------------------------- */

static Window conv2d_input_window(const struct conv2d_input_args *a) {
  return (Window){a->stride, a->padding, a->dilation, a->groups, false};
}

static int conv2d_input_infer(Infer *I) {
  const struct conv2d_input_args *a = I->args;
  const Meta *g = I->in[0], *w = I->in[1];
  Window window = conv2d_input_window(a);
  int rc = image_check(I, 0);
  if (!rc) rc = infer_want_ndim(I, 1, 4);
  if (!rc) rc = infer_want_same_dtype(I, 0, 1);
  if (!rc) rc = check_window(I, &window);
  if (!rc) rc = check_weights(I, g, w, window.groups, true);
  if (rc) return rc;
  if (a->size[0] < 0 || a->size[1] < 0 || a->size[0] > SHAPE_MAX || a->size[1] > SHAPE_MAX ||
      out_size(a->size[0], w->shape[2], &window, 0) != g->shape[g->ndim - 2] ||
      out_size(a->size[1], w->shape[3], &window, 1) != g->shape[g->ndim - 1])
    return infer_error(I, "no convolution of an image of size (%lld, %lld) gives g",
                       (long long)a->size[0], (long long)a->size[1]);
  return image_add(I, g, w->shape[1] * window.groups, a->size[0], a->size[1],
                   image_meta_is_last(g) || image_meta_is_last(w));
}

static size_t conv2d_input_scratch(const OpCall *c) {
  Window w = conv2d_input_window(c->args);
  return conv_scratch(c, DNN_CONV_INPUT, &w, &c->out[0], &c->in[1], NULL, &c->in[0]);
}

static int conv2d_input_cpu(const OpCall *c) {
  Window w = conv2d_input_window(c->args);
  return conv_run(c, DNN_CONV_INPUT, &w, &c->out[0], &c->in[1], NULL, &c->in[0]);
}

static int conv2d_input_sbp(SbpAsk *q) {
  const struct conv2d_input_args *a = q->args;
  return sbp_notation(
      q, a->groups == 1 ? "n o H W, o c K L -> n c I J" : "n O H W, O G K L -> n C I J");
}

/* The gradient of conv2d's x, which had height and width `size`, from that of its result. */
OP(conv2d_input,
   .signature =
       "conv2d_input(Tensor g, Tensor w, *, int[2] size, int[2] stride=1, int[2] "
       "padding=0, int[2] dilation=1, "
       "int groups=1) -> Tensor",
   .flags = OP_HIDDEN, .sbp_rule = conv2d_input_sbp, .linear = "g|w", .infer = conv2d_input_infer,
   .cpu = conv2d_input_cpu, .scratch = conv2d_input_scratch, .flops = conv2d_input_flops)

/* -- The weights' and the bias's gradients ----------------------------------------------------- */

static Window conv2d_weight_window(const struct conv2d_weight_args *a) {
  return (Window){a->stride, a->padding, a->dilation, a->groups, false};
}

/* The next output: like w, in w's memory format. */
static int check_weight(Infer *I, const Window *window) {
  const Meta *g = I->in[0], *x = I->in[1], *w = I->in[2];
  int rc = image_check(I, 0);
  if (!rc) rc = image_check(I, 1);
  if (!rc) rc = infer_want_ndim(I, 2, 4);
  if (!rc) rc = infer_want_same_dtype(I, 0, 1);
  if (!rc) rc = check_window(I, window);
  if (!rc) rc = check_weights(I, g, w, window->groups, true);
  if (!rc) rc = check_weights(I, x, w, window->groups, false);
  if (rc) return rc;
  if (g->ndim != x->ndim || (g->ndim == 4 && g->shape[0] != x->shape[0]) ||
      out_size(x->shape[x->ndim - 2], w->shape[2], window, 0) != g->shape[g->ndim - 2] ||
      out_size(x->shape[x->ndim - 1], w->shape[3], window, 1) != g->shape[g->ndim - 1])
    return infer_error(I, "no convolution of x with w gives g");
  return infer_like(I, 2, (DType)g->dtype);
}

static int conv2d_weight_infer(Infer *I) {
  Window window = conv2d_weight_window(I->args);
  return check_weight(I, &window);
}

static size_t conv2d_weight_scratch(const OpCall *c) {
  Window w = conv2d_weight_window(c->args);
  return conv_scratch(c, DNN_CONV_WEIGHT, &w, &c->in[1], &c->out[0], NULL, &c->in[0]);
}

static int conv2d_weight_cpu(const OpCall *c) {
  Window w = conv2d_weight_window(c->args);
  return conv_run(c, DNN_CONV_WEIGHT, &w, &c->in[1], &c->out[0], NULL, &c->in[0]);
}

static int conv2d_weight_sbp(SbpAsk *q) {
  const struct conv2d_weight_args *a = q->args;
  return sbp_notation(q, a->groups == 1 ? "n o H W, n c I J, o c K L -> o c K L"
                                        : "n O H W, n C I J, O G K L -> O G K L");
}

/* The gradient of conv2d's w from x and that of the result, g. Of w only shape and memory format
 * count. */
OP(conv2d_weight,
   .signature =
       "conv2d_weight(Tensor g, Tensor x, Tensor w, *, int[2] stride=1, int[2] padding=0, "
       "int[2] dilation=1, "
       "int groups=1) -> Tensor",
   .flags = OP_HIDDEN, .sbp_rule = conv2d_weight_sbp, .linear = "g|x", .infer = conv2d_weight_infer,
   .cpu = conv2d_weight_cpu, .scratch = conv2d_weight_scratch, .flops = conv2d_weight_flops)

static Window conv2d_weight_bias_window(const struct conv2d_weight_bias_args *a) {
  return (Window){a->stride, a->padding, a->dilation, a->groups, false};
}

static int conv2d_weight_bias_infer(Infer *I) {
  Window window = conv2d_weight_bias_window(I->args);
  int rc = check_weight(I, &window);
  return rc ? rc : infer_shape(I, (DType)I->in[0]->dtype, 1, I->in[2]->shape);
}

static size_t conv2d_weight_bias_scratch(const OpCall *c) {
  Window w = conv2d_weight_bias_window(c->args);
  return conv_scratch(c, DNN_CONV_WEIGHT, &w, &c->in[1], &c->out[0], &c->out[1], &c->in[0]);
}

static int conv2d_weight_bias_cpu(const OpCall *c) {
  Window w = conv2d_weight_bias_window(c->args);
  return conv_run(c, DNN_CONV_WEIGHT, &w, &c->in[1], &c->out[0], &c->out[1], &c->in[0]);
}

/* The bias's gradient is whole where only x's channels are split, which notation cannot say. */
static int conv2d_weight_bias_sbp(SbpAsk *q) {
  const struct conv2d_weight_bias_args *a = q->args;
  return sbp_notation(q, a->groups == 1 ? "n o H W, n C I J, o G K L -> o G K L, o"
                                        : "n O H W, n C I J, O G K L -> O G K L, O");
}

/* conv2d_weight and the gradient of the bias in one pass. */
OP(conv2d_weight_bias,
   .signature =
       "conv2d_weight_bias(Tensor g, Tensor x, Tensor w, *, int[2] stride=1, int[2] "
       "padding=0, int[2] dilation=1, "
       "int groups=1) -> (Tensor w, Tensor b)",
   .flags = OP_HIDDEN, .sbp_rule = conv2d_weight_bias_sbp, .linear = "g",
   .infer = conv2d_weight_bias_infer, .cpu = conv2d_weight_bias_cpu,
   .scratch = conv2d_weight_bias_scratch, .flops = conv2d_weight_flops)
