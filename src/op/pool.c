/* Pooling in two dims: maximum, mean over windows, mean over adaptive windows; with gradients.
 *
 * All of them are one Pool over three images: x chooses (only for maxima), v is what is summed or
 * picked in the input's geometry, y the pooled image. Forward, v gives y; back, y is dealt out to
 * v. A maximum pooled forward needs no v. The backward pass of a maximum looks for it again instead
 * of keeping indices: it costs one read of x and saves the memory. For its own gradient there is
 * max_pool2d_pick, which reads v where x has its maximum.
 *
 * float32 and double are pooled as they lie, other floats through float32 copies in scratch. */
#include <math.h>

#include "copy_views.h"
#include "image.h"
#include "op_args.h"

enum { GROUP = 16, LANES = 64, LIMIT = 1 << 20 };
#define WIDE(lanes) (((lanes) + GROUP - 1) & ~(int64_t)(GROUP - 1))

typedef enum PoolMode { POOL_MAX, POOL_MEAN } PoolMode;

/* One dim: output o covers the inputs from o * stride - padding, `kernel` of them, `dilation`
 * apart; or, adaptive, its share. */
typedef struct Axis {
  int64_t in, out, kernel, stride, padding, dilation;
  bool adaptive;
} Axis;

typedef struct Pool {
  PoolMode mode;
  bool back, include_pad;
  bool channels;            /* lie side by side in all images */
  int64_t divisor_override; /* 0: none */
  Axis h, w;
  int64_t n, c, xs[4], vs[4], ys[4];
  void *x, *v, *y;
} Pool;

/* One window, clipped to the image. */
typedef struct Span {
  int64_t h0, h1, w0, w1, rows, cols; /* rows, cols: as counted in the divisor */
  double divisor;
} Span;

/* How many, also in whole blocks, and the operands' steps from lane to lane. */
typedef struct Lanes {
  int64_t n, wide, x, v, y;
} Lanes;

static void axis_window(const Axis *a, int64_t o, bool include_pad, int64_t *from, int64_t *to,
                        int64_t *count) {
  if (a->adaptive) {
    *from = o * a->in / a->out;
    *to = ((o + 1) * a->in + a->out - 1) / a->out;
    *count = *to - *from;
    return;
  }
  *from = o * a->stride - a->padding;
  *to = *from + (a->kernel - 1) * a->dilation + 1;
  if (*to > a->in + a->padding) *to = a->in + a->padding;
  *count = *to - *from;
  if (*from < 0) *from += (-*from + a->dilation - 1) / a->dilation * a->dilation;
  if (*to > a->in) *to = a->in;
  if (!include_pad) *count = *to - *from;
}

/* The outputs [from, to) whose windows lie inside the image. */
static void axis_inside(const Axis *a, int64_t *from, int64_t *to) {
  int64_t last = a->in + a->padding - (a->kernel - 1) * a->dilation - 1;
  *from = a->adaptive ? 0 : (a->padding + a->stride - 1) / a->stride;
  *to = a->adaptive || last < 0 ? 0 : last / a->stride + 1;
  if (*to > a->out) *to = a->out;
}

static void span_rows(const Pool *p, int64_t oh, Span *s) {
  axis_window(&p->h, oh, p->include_pad, &s->h0, &s->h1, &s->rows);
}

static void span_cols(const Pool *p, int64_t ow, Span *s) {
  axis_window(&p->w, ow, p->include_pad, &s->w0, &s->w1, &s->cols);
  s->divisor = p->divisor_override ? (double)p->divisor_override : (double)(s->rows * s->cols);
}

#define T float
#define NAME(f) f##_f32
#include "pool_kernels.h"
#undef T
#undef NAME
#define T double
#define NAME(f) f##_f64
#include "pool_kernels.h"
#undef T
#undef NAME

/* -- Running ----------------------------------------------------------------------------------- */

/* An image as the kernels read it: itself, or its copy at `dense`: of small floats in float32, and
 * with channels innermost where the image that is pooled has them so. */
typedef struct Operand {
  Image image, dense;
  bool copied;
} Operand;

static bool is_last(const View *v) {
  Image m;
  image_set(&m, v);
  return image_strictly_last(m.shape, m.stride);
}

static bool is_small(const View *v) {
  return v->dtype == F16 || v->dtype == BF16;
}

static size_t copy_bytes(const View *v, bool last) {
  if (!is_small(v) && !(last && !is_last(v))) return 0;
  size_t size = v->dtype == F64 ? sizeof(double) : sizeof(float);
  return scratch_aligned((size_t)view_numel(v) * size);
}

/* The input whose format is that of all: the image before pooling, or the only one. */
static const View *pool_leader(const OpCall *c) {
  return &c->in[c->n_in - 1];
}

static size_t pool_scratch(const OpCall *c) {
  bool last = is_last(pool_leader(c));
  size_t bytes = copy_bytes(&c->out[0], last);
  for (int k = 0; k < c->n_in; k++) bytes += copy_bytes(&c->in[k], last);
  return bytes;
}

static void operand_set(Operand *o, const View *v, bool last, char **scratch) {
  image_set(&o->image, v);
  o->copied = copy_bytes(v, last) > 0;
  if (!o->copied) return;
  o->dense = o->image;
  o->dense.view.shape = o->dense.shape;
  o->dense.view.stride = o->dense.stride;
  if (last) shape_channels_last(o->image.shape, o->dense.stride);
  else shape_contiguous(4, o->image.shape, o->dense.stride);
  if (is_small(v)) o->dense.view.dtype = F32;
  o->dense.view.data = *scratch;
  *scratch += copy_bytes(v, last);
}

static const View *operand_view(const Operand *o) {
  return o->copied ? &o->dense.view : &o->image.view;
}

/* x, v: NULL where there is none; `v` is written when p->back, else y is. */
static int pool_run(const OpCall *c, Pool *p, const View *x, const View *v, const View *y) {
  Operand operands[3];
  const View *given[3] = {x, v, y};
  void **data[3] = {&p->x, &p->v, &p->y};
  int64_t *strides[3] = {p->xs, p->vs, p->ys};
  char *scratch = c->scratch;
  if (view_numel(&c->out[0]) == 0) return 0;
  bool last = is_last(pool_leader(c));
  p->channels = true;
  for (int k = 0; k < 3; k++) {
    if (!given[k]) continue;
    operand_set(&operands[k], given[k], last, &scratch);
    const View *use = operand_view(&operands[k]);
    bool written = k == (p->back ? 1 : 2);
    if (operands[k].copied && !written) copy_views(&operands[k].image.view, use);
    *data[k] = use->data;
    memcpy(strides[k], use->stride, sizeof p->xs);
    p->channels = p->channels && use->stride[1] == 1 && use->shape[1] > 1;
  }
  const View *pooled = operand_view(&operands[2]), *whole = operand_view(&operands[v ? 1 : 0]);
  p->n = pooled->shape[0], p->c = pooled->shape[1];
  p->h.in = whole->shape[2], p->w.in = whole->shape[3];
  p->h.out = pooled->shape[2], p->w.out = pooled->shape[3];
  int64_t width = p->channels ? LANES : 1;
  int64_t work = p->h.in * p->w.in * width, grain = work > 1 << 15 ? 1 : (1 << 15) / work;
  mf_parallel(p->n * ((p->c + width - 1) / width), grain,
              pooled->dtype == F64 ? pool_range_f64 : pool_range_f32, p);
  int result = p->back ? 1 : 2;
  if (operands[result].copied)
    copy_views(&operands[result].dense.view, &operands[result].image.view);
  return 0;
}

/* -- Windows given as arguments ---------------------------------------------------------------- */

typedef struct Window {
  const int64_t *kernel, *stride, *padding, *dilation;
} Window;

static const int64_t ones[2] = {1, 1};

#define MAX_WINDOW(a)                                                                         \
  ((Window){(a)->kernel_size, (a)->has_stride ? (a)->stride : (a)->kernel_size, (a)->padding, \
            (a)->dilation})
#define AVG_WINDOW(a) \
  ((Window){(a)->kernel_size, (a)->has_stride ? (a)->stride : (a)->kernel_size, (a)->padding, ones})

static Pool window_pool(PoolMode mode, const Window *w) {
  return (Pool){.mode = mode,
                .h = {.kernel = w->kernel[0],
                      .stride = w->stride[0],
                      .padding = w->padding[0],
                      .dilation = w->dilation[0]},
                .w = {.kernel = w->kernel[1],
                      .stride = w->stride[1],
                      .padding = w->padding[1],
                      .dilation = w->dilation[1]}};
}

static int check_window(Infer *I, const Window *w) {
  for (int k = 0; k < 2; k++) {
    if (w->kernel[k] < 1 || w->kernel[k] > LIMIT)
      return infer_error(I, "kernel_size must be from 1 to %d, is %lld", LIMIT,
                         (long long)w->kernel[k]);
    if (w->stride[k] < 1 || w->stride[k] > LIMIT)
      return infer_error(I, "stride must be from 1 to %d, is %lld", LIMIT, (long long)w->stride[k]);
    if (w->dilation[k] < 1 || w->dilation[k] > LIMIT)
      return infer_error(I, "dilation must be from 1 to %d, is %lld", LIMIT,
                         (long long)w->dilation[k]);
    int64_t reach = (w->kernel[k] - 1) * w->dilation[k] + 1;
    if (w->padding[k] < 0 || w->padding[k] > reach / 2)
      return infer_error(I, "padding must be from 0 to half of the kernel, %lld, is %lld",
                         (long long)reach / 2, (long long)w->padding[k]);
  }
  return 0;
}

/* With ceil_mode a last window may begin in the image or the padding before it and reach beyond,
 * but not begin behind. */
static int64_t out_size(int64_t in, const Window *w, int k, bool ceil_mode) {
  int64_t room = in + 2 * w->padding[k] - (w->kernel[k] - 1) * w->dilation[k] - 1,
          stride = w->stride[k];
  if (room < 0 && !(ceil_mode && room + stride - 1 >= 0)) return 0;
  int64_t out = (room + (ceil_mode ? stride - 1 : 0)) / stride + 1;
  return ceil_mode && (out - 1) * stride >= in + w->padding[k] ? out - 1 : out;
}

/* The pooled sizes of an image of height and width `size`. */
static int pooled_sizes(Infer *I, const Window *w, bool ceil_mode, const int64_t *size,
                        int64_t *out) {
  for (int k = 0; k < 2; k++) {
    if (size[k] < 1 || size[k] > SHAPE_MAX)
      return infer_error(I, "an image of size (%lld, %lld) cannot be pooled", (long long)size[0],
                         (long long)size[1]);
    out[k] = out_size(size[k], w, k, ceil_mode);
  }
  if (out[0] > 0 && out[1] > 0) return 0;
  return infer_error(I, "kernel_size (%lld, %lld) does not fit into an image of (%lld, %lld)",
                     (long long)w->kernel[0], (long long)w->kernel[1], (long long)size[0],
                     (long long)size[1]);
}

/* An output pooled from image k. */
static int infer_pooled(Infer *I, int k, const Window *w, bool ceil_mode) {
  const Meta *x = I->in[k];
  int64_t out[2];
  int rc = image_check(I, k);
  if (!rc) rc = check_window(I, w);
  if (!rc) rc = pooled_sizes(I, w, ceil_mode, x->shape + x->ndim - 2, out);
  return rc ? rc : image_add(I, x, x->shape[x->ndim - 3], out[0], out[1], image_meta_is_last(x));
}

static int check_pooled(Infer *I, const Meta *g, const Meta *like, const int64_t *out) {
  if (g->ndim == like->ndim &&
      !memcmp(g->shape, like->shape, sizeof(int64_t) * (size_t)(g->ndim - 2)) &&
      g->shape[g->ndim - 2] == out[0] && g->shape[g->ndim - 1] == out[1])
    return 0;
  return infer_error(I, "g has not the shape of the pooled image");
}

/* -- max_pool2d -------------------------------------------------------------------------------- */

static int max_pool2d_infer(Infer *I) {
  const struct max_pool2d_args *a = I->args;
  return infer_pooled(I, 0, &MAX_WINDOW(a), a->ceil_mode);
}

static int max_pool2d_cpu(const OpCall *c) {
  const struct max_pool2d_args *a = c->args;
  Pool p = window_pool(POOL_MAX, &MAX_WINDOW(a));
  return pool_run(c, &p, &c->in[0], NULL, &c->out[0]);
}

/* The maximum over windows of x (N, C, H, W) or (C, H, W); NaN where one is in the window. The
 * stride is the kernel's size when not given. Padding never wins. */
OP(max_pool2d,
   .signature =
       "max_pool2d(Tensor x, int[2] kernel_size, int[2]? stride=None, int[2] padding=0, "
       "int[2] dilation=1, "
       "bool ceil_mode=False) -> Tensor",
   .sbp = "n c H W", .infer = max_pool2d_infer, .cpu = max_pool2d_cpu, .scratch = pool_scratch)

static int max_pool2d_backward_infer(Infer *I) {
  const struct max_pool2d_backward_args *a = I->args;
  const Meta *g = I->in[0], *x = I->in[1];
  Window w = MAX_WINDOW(a);
  int64_t out[2];
  int rc = image_check(I, 1);
  if (!rc) rc = infer_want_same_dtype(I, 0, 1);
  if (!rc) rc = check_window(I, &w);
  if (!rc) rc = pooled_sizes(I, &w, a->ceil_mode, x->shape + x->ndim - 2, out);
  if (!rc) rc = check_pooled(I, g, x, out);
  return rc ? rc : infer_like(I, 1, (DType)x->dtype);
}

static int max_pool2d_backward_cpu(const OpCall *c) {
  const struct max_pool2d_backward_args *a = c->args;
  Pool p = window_pool(POOL_MAX, &MAX_WINDOW(a));
  p.back = true;
  return pool_run(c, &p, &c->in[1], &c->out[0], &c->in[0]);
}

/* The gradient of max_pool2d: g goes to the first maximum of each window of x. */
OP(max_pool2d_backward,
   .signature =
       "max_pool2d_backward(Tensor g, Tensor x, int[2] kernel_size, int[2]? stride=None, "
       "int[2] padding=0, "
       "int[2] dilation=1, bool ceil_mode=False) -> Tensor",
   .flags = OP_HIDDEN, .sbp = "n c H W, n c I J -> n c I J", .linear = "g",
   .infer = max_pool2d_backward_infer, .cpu = max_pool2d_backward_cpu, .scratch = pool_scratch)

static int max_pool2d_pick_infer(Infer *I) {
  const struct max_pool2d_pick_args *a = I->args;
  const Meta *v = I->in[0], *x = I->in[1];
  int rc = infer_want_same_dtype(I, 0, 1);
  if (!rc && (v->ndim != x->ndim || memcmp(v->shape, x->shape, sizeof(int64_t) * (size_t)v->ndim)))
    rc = infer_error(I, "v and x must have one shape");
  return rc ? rc : infer_pooled(I, 1, &MAX_WINDOW(a), a->ceil_mode);
}

static int max_pool2d_pick_cpu(const OpCall *c) {
  const struct max_pool2d_pick_args *a = c->args;
  Pool p = window_pool(POOL_MAX, &MAX_WINDOW(a));
  return pool_run(c, &p, &c->in[1], &c->in[0], &c->out[0]);
}

/* v at the places where max_pool2d takes x. */
OP(max_pool2d_pick,
   .signature =
       "max_pool2d_pick(Tensor v, Tensor x, int[2] kernel_size, int[2]? stride=None, "
       "int[2] padding=0, "
       "int[2] dilation=1, bool ceil_mode=False) -> Tensor",
   .flags = OP_HIDDEN, .sbp = "n c I J, n c I J -> n c H W", .linear = "v",
   .infer = max_pool2d_pick_infer, .cpu = max_pool2d_pick_cpu, .scratch = pool_scratch)

/* -- avg_pool2d -------------------------------------------------------------------------------- */

static int check_divisor(Infer *I, bool has, int64_t divisor) {
  if (has && divisor == 0) return infer_error(I, "divisor_override must not be 0");
  return 0;
}

static int avg_pool2d_infer(Infer *I) {
  const struct avg_pool2d_args *a = I->args;
  int rc = check_divisor(I, a->has_divisor_override, a->divisor_override);
  return rc ? rc : infer_pooled(I, 0, &AVG_WINDOW(a), a->ceil_mode);
}

static int avg_pool2d_cpu(const OpCall *c) {
  const struct avg_pool2d_args *a = c->args;
  Pool p = window_pool(POOL_MEAN, &AVG_WINDOW(a));
  p.include_pad = a->count_include_pad;
  p.divisor_override = a->has_divisor_override ? a->divisor_override : 0;
  return pool_run(c, &p, NULL, &c->in[0], &c->out[0]);
}

/* The mean over windows of x (N, C, H, W) or (C, H, W). Padding counts as zeros unless
 * count_include_pad is false; divisor_override divides by another number. */
OP(avg_pool2d,
   .signature =
       "avg_pool2d(Tensor x, int[2] kernel_size, int[2]? stride=None, int[2] padding=0, "
       "bool ceil_mode=False, "
       "bool count_include_pad=True, int? divisor_override=None) -> Tensor",
   .sbp = "n c H W", .linear = "x", .infer = avg_pool2d_infer, .cpu = avg_pool2d_cpu,
   .scratch = pool_scratch)

static int avg_pool2d_backward_infer(Infer *I) {
  const struct avg_pool2d_backward_args *a = I->args;
  const Meta *g = I->in[0];
  Window w = AVG_WINDOW(a);
  int64_t out[2];
  int rc = image_check(I, 0);
  if (!rc) rc = check_window(I, &w);
  if (!rc) rc = check_divisor(I, a->has_divisor_override, a->divisor_override);
  if (!rc) rc = pooled_sizes(I, &w, a->ceil_mode, a->size, out);
  if (!rc) rc = check_pooled(I, g, g, out);
  return rc ? rc
            : image_add(I, g, g->shape[g->ndim - 3], a->size[0], a->size[1], image_meta_is_last(g));
}

static int avg_pool2d_backward_cpu(const OpCall *c) {
  const struct avg_pool2d_backward_args *a = c->args;
  Pool p = window_pool(POOL_MEAN, &AVG_WINDOW(a));
  p.back = true;
  p.include_pad = a->count_include_pad;
  p.divisor_override = a->has_divisor_override ? a->divisor_override : 0;
  return pool_run(c, &p, NULL, &c->out[0], &c->in[0]);
}

/* The gradient of avg_pool2d of an image of height and width `size`. */
OP(avg_pool2d_backward,
   .signature =
       "avg_pool2d_backward(Tensor g, int[2] size, int[2] kernel_size, int[2]? stride=None, int[2] "
       "padding=0, "
       "bool ceil_mode=False, bool count_include_pad=True, int? divisor_override=None) -> Tensor",
   .flags = OP_HIDDEN, .sbp = "n c H W", .linear = "g", .infer = avg_pool2d_backward_infer,
   .cpu = avg_pool2d_backward_cpu, .scratch = pool_scratch)

/* -- adaptive_avg_pool2d ----------------------------------------------------------------------- */

static int check_size(Infer *I, const char *name, const int64_t *size) {
  for (int k = 0; k < 2; k++)
    if (size[k] < 0)
      return infer_error(I, "%s must not be negative, is %lld", name, (long long)size[k]);
  return 0;
}

static int adaptive_infer(Infer *I, const char *name, const int64_t *size) {
  const Meta *x = I->in[0];
  int rc = image_check(I, 0);
  if (!rc) rc = check_size(I, name, size);
  if (rc) return rc;
  if (x->shape[x->ndim - 1] == 0 || x->shape[x->ndim - 2] == 0)
    return infer_error(I, "the image has no pixels");
  return image_add(I, x, x->shape[x->ndim - 3], size[0], size[1], image_meta_is_last(x));
}

static int adaptive_avg_pool2d_infer(Infer *I) {
  const struct adaptive_avg_pool2d_args *a = I->args;
  return adaptive_infer(I, "output_size", a->output_size);
}

static Pool adaptive_pool(bool back) {
  Axis axis = {.adaptive = true, .dilation = 1};
  return (Pool){.mode = POOL_MEAN, .back = back, .h = axis, .w = axis};
}

static int adaptive_avg_pool2d_cpu(const OpCall *c) {
  Pool p = adaptive_pool(false);
  return pool_run(c, &p, NULL, &c->in[0], &c->out[0]);
}

/* The mean over windows that divide the image into output_size parts, as evenly as whole pixels
 * allow. */
OP(adaptive_avg_pool2d, .signature = "adaptive_avg_pool2d(Tensor x, int[2] output_size) -> Tensor",
   .sbp = "n c H W", .linear = "x", .infer = adaptive_avg_pool2d_infer,
   .cpu = adaptive_avg_pool2d_cpu, .scratch = pool_scratch)

static int adaptive_avg_pool2d_backward_infer(Infer *I) {
  const struct adaptive_avg_pool2d_backward_args *a = I->args;
  return adaptive_infer(I, "size", a->size);
}

static int adaptive_avg_pool2d_backward_cpu(const OpCall *c) {
  Pool p = adaptive_pool(true);
  return pool_run(c, &p, NULL, &c->out[0], &c->in[0]);
}

/* The gradient of adaptive_avg_pool2d of an image of height and width `size`. */
OP(adaptive_avg_pool2d_backward,
   .signature = "adaptive_avg_pool2d_backward(Tensor g, int[2] size) -> Tensor", .flags = OP_HIDDEN,
   .sbp = "n c H W", .linear = "g", .infer = adaptive_avg_pool2d_backward_infer,
   .cpu = adaptive_avg_pool2d_backward_cpu, .scratch = pool_scratch)
