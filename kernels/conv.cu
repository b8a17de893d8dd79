/* Convolution in two dims and its gradients: the vendor's, on images as they lie in either memory
 * format; others are copied first. The gradient of a bias is a sum over channels of its own. */
#include "kernel.cuh"
#include "vendor.h"

/* Of four dims, where it is. */
struct ConvImage {
  View view;
  int64_t shape[4], stride[4];
  bool copied;
};

static void image_set(ConvImage *m, const View *v) {
  int add = v->ndim == 3;
  m->shape[0] = 1;
  m->stride[0] = add ? v->shape[0] * v->shape[1] * v->shape[2] : 0;
  for (int d = 0; d < v->ndim; d++)
    m->shape[d + add] = v->shape[d], m->stride[d + add] = v->stride[d];
  m->view = *v;
  m->view.ndim = 4, m->view.shape = m->shape, m->view.stride = m->stride;
  m->copied = false;
}

/* The strides of the shape with channels innermost, or not. */
static void image_order(const int64_t *shape, bool last, int64_t *stride) {
  static const int plain[] = {3, 2, 1, 0}, channels_last[] = {1, 3, 2, 0};
  int64_t step = 1;
  for (int k = 0; k < 4; k++) {
    int d = last ? channels_last[k] : plain[k];
    stride[d] = step;
    step *= shape[d];
  }
}

static bool image_is(const ConvImage *m, bool last) {
  int64_t stride[4];
  image_order(m->shape, last, stride);
  for (int d = 0; d < 4; d++)
    if (m->shape[d] > 1 && m->stride[d] != stride[d]) return false;
  return true;
}

/* Into that order, by a copy where it is not; `result`: filled later. */
static int image_place(const OpCall *c, ConvImage *m, bool last, bool result) {
  int64_t stride[4];
  image_order(m->shape, last, stride);
  m->copied = !image_is(m, last);
  View from = m->view;
  int64_t lay[4];
  memcpy(lay, m->stride, sizeof lay);
  from.stride = lay;
  memcpy(m->stride, stride, sizeof stride);
  if (!m->copied) return 0;
  m->view.data = kernel_scratch(c, (size_t)view_numel(&from) * dtype_size((DType)m->view.dtype));
  if (!m->view.data) return MF_ENOMEM;
  return result ? 0 : copy_launch(c, &from, &m->view);
}

/* Without input or weights: zeros, or the bias. */
static int conv_empty(const OpCall *c, const Conv *v, const View *bias, const View *to) {
  int64_t stride[4] = {0, bias ? bias->stride[0] : 0, 0, 0};
  ConvImage m;
  int rc = copy_fill(c, to, 0);
  if (rc || !bias || !view_numel(to)) return rc;
  image_set(&m, to);
  View wide = *bias;
  wide.ndim = 4, wide.shape = m.shape, wide.stride = stride;
  rc = copy_launch(c, &wide, &m.view);
  return rc || v->act == VENDOR_ACT_NONE ? rc : act_launch(c, &m.view, v->act);
}

/* x, w, y as for the forward pass; bias NULL where there is none. */
static int conv_run(const OpCall *c, Conv *v, const View *x, const View *w, const View *bias,
                    const View *y) {
  ConvImage m[3];
  const View *given[3] = {x, w, y}, *to = given[v->kind];
  for (int k = 0; k < 3; k++) image_set(&m[k], given[k]);
  if (!view_numel(to)) return 0;
  if (!view_numel(x) || !view_numel(w) || !view_numel(y)) return conv_empty(c, v, bias, to);
  bool plain = image_is(&m[0], false) && image_is(&m[2], false);
  v->last = !plain && (image_is(&m[0], true) || image_is(&m[2], true));
  int rc = 0;
  for (int k = 0; k < 3 && !rc; k++) rc = image_place(c, &m[k], v->last, k == v->kind);
  View dense_bias;
  const int64_t one = 1;
  if (!rc && bias && bias->shape[0] > 1 && bias->stride[0] != 1) {
    dense_bias = *bias;
    dense_bias.stride = &one;
    dense_bias.data = kernel_scratch(c, (size_t)view_numel(bias) * dtype_size((DType)bias->dtype));
    rc = dense_bias.data ? copy_launch(c, bias, &dense_bias) : MF_ENOMEM;
    bias = &dense_bias;
  }
  if (rc) return rc;
  v->x = m[0].view.data, v->w = m[1].view.data, v->y = m[2].view.data;
  v->bias = bias ? bias->data : NULL;
  memcpy(v->x_shape, m[0].shape, sizeof v->x_shape);
  memcpy(v->w_shape, m[1].shape, sizeof v->w_shape);
  memcpy(v->y_shape, m[2].shape, sizeof v->y_shape);
  v->dtype = x->dtype;
  rc = vendor_conv(c, v);
  const ConvImage &made = m[v->kind];
  if (rc || !made.copied) return rc;
  ConvImage home;
  image_set(&home, to);
  return copy_launch(c, &made.view, &home.view);
}

template <class A>
static Conv conv_of(const A *a, ConvKind kind) {
  Conv v = {};
  v.kind = kind, v.groups = a->groups;
  for (int k = 0; k < 2; k++)
    v.stride[k] = a->stride[k], v.padding[k] = a->padding[k], v.dilation[k] = a->dilation[k];
  return v;
}

static const View *present(const View *v) {
  return view_absent(v) ? NULL : v;
}

static int conv2d_cuda(const OpCall *c) {
  Conv v = conv_of((const struct conv2d_args *)c->args, CONV_FORWARD);
  return conv_run(c, &v, &c->in[0], &c->in[1], present(&c->in[2]), &c->out[0]);
}
KERNEL(conv2d, conv2d_cuda)

static int conv2d_act_cuda(const OpCall *c) {
  Conv v = conv_of((const struct conv2d_act_args *)c->args, CONV_FORWARD);
  v.act = VENDOR_ACT_RELU;
  return conv_run(c, &v, &c->in[0], &c->in[1], present(&c->in[2]), &c->out[0]);
}
KERNEL(conv2d_act, conv2d_act_cuda)

static int conv2d_input_cuda(const OpCall *c) {
  Conv v = conv_of((const struct conv2d_input_args *)c->args, CONV_INPUT);
  return conv_run(c, &v, &c->out[0], &c->in[1], NULL, &c->in[0]);
}
KERNEL(conv2d_input, conv2d_input_cuda)

static int conv2d_weight_cuda(const OpCall *c) {
  Conv v = conv_of((const struct conv2d_weight_args *)c->args, CONV_WEIGHT);
  return conv_run(c, &v, &c->in[1], &c->out[0], NULL, &c->in[0]);
}
KERNEL(conv2d_weight, conv2d_weight_cuda)

static int conv2d_weight_bias_cuda(const OpCall *c) {
  Conv v = conv_of((const struct conv2d_weight_bias_args *)c->args, CONV_WEIGHT);
  int rc = conv_run(c, &v, &c->in[1], &c->out[0], NULL, &c->in[0]);
  ConvImage g;
  image_set(&g, &c->in[0]);
  return rc ? rc : channel_sums(c, &g.view, &c->out[1]);
}
KERNEL(conv2d_weight_bias, conv2d_weight_bias_cuda)
