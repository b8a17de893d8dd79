/* Copies: clone, conversion of dtype, copy_, fill_, and the two halves of an in-place write through
 * a view as the tape sees it. */
#include <stdlib.h>

#include "copy_views.h"
#include "op_args.h"
#include "pointwise.h"
#include "sbp_rule.h"

/* -- clone, cast ------------------------------------------------------------------------------- */

static int clone_infer(Infer *I) {
  const struct clone_args *a = I->args;
  const Meta *x = I->in[0];
  int rc = infer_like(I, 0, (DType)x->dtype);
  if (rc) return rc;
  if (a->memory_format == 1) shape_contiguous(x->ndim, x->shape, I->last->stride);
  if (a->memory_format == 2) {
    rc = infer_want_ndim(I, 0, 4);
    if (rc) return rc;
    shape_channels_last(x->shape, I->last->stride);
  }
  return 0;
}

static int clone_cpu(const OpCall *c) {
  return copy_views(&c->in[0], &c->out[0]);
}

/* A copy in memory of its own; 'preserve' keeps the order of dims in memory where the tensor is
 * dense. */
OP(clone,
   .signature =
       "clone(Tensor x, *, str(preserve|contiguous|channels_last) memory_format=preserve) -> "
       "Tensor",
   .sbp = "...", .linear = "x", .infer = clone_infer, .cpu = clone_cpu)

static int cast_infer(Infer *I) {
  const struct cast_args *a = I->args;
  return infer_like(I, 0, (DType)a->dtype);
}

static int cast_cpu(const OpCall *c) {
  return copy_views(&c->in[0], &c->out[0]);
}

PW_FLOATS(1, cast, T, x)
PW_INTS(1, cast, T, x)

/* In a fused program: through the class that copy_views goes through. */
static void cast_choose(const OpCall *c, PointwiseKernel *k) {
  static PointwiseFn *const as_is[PW_CLASSES] = {cast_f32, cast_f64, cast_i64};
  k->cls = copy_class((DType)c->in[0].dtype, (DType)c->out[0].dtype);
  k->fn = as_is[k->cls];
}

/* Sums may be converted part by part where nothing is cut off. */
static int cast_sbp(SbpAsk *q) {
  DType from = (DType)q->in[0]->dtype, to = (DType)q->out[0]->dtype;
  int rc = sbp_notation(q, "...");
  bool exact = dtype_is_float(to) || (to != BOOL && !dtype_is_float(from));
  return rc || !exact ? rc : sbp_linear(q, "x");
}

/* x as another dtype: floats to whole numbers truncate, anything but zero is true. */
OP(cast, .signature = "cast(Tensor x, dtype dtype) -> Tensor", .sbp_rule = cast_sbp,
   .flags = OP_HIDDEN, .infer = cast_infer, .cpu = cast_cpu,
   .pointwise = {cast_f32, cast_f64, cast_i64}, .choose = cast_choose)

/* -- transfer ---------------------------------------------------------------------------------- */

static int transfer_infer(Infer *I) {
  const struct transfer_args *a = I->args;
  int from = I->in[0]->device, rc = infer_like(I, 0, (DType)I->in[0]->dtype);
  if (rc || a->device < 0 || a->device == from) return rc;
  if (from == DEVICE_META)
    return infer_error(I, "x is on the meta device and has no data to bring elsewhere");
  I->last->device = (uint8_t)a->device;
  return 0;
}

/* x on another device; without one, or on its own, a copy. */
OP(transfer, .signature = "transfer(Tensor x, device? device=None) -> Tensor", .sbp = "...",
   .linear = "x", .flags = OP_HIDDEN | OP_TRANSFER, .infer = transfer_infer, .cpu = clone_cpu)

/* -- copy_, fill_ ------------------------------------------------------------------------------ */

static int copy__infer(Infer *I) {
  const Meta *x = I->in[0], *src = I->in[1];
  int ndim = x->ndim;
  int64_t shape[MF_MAX_DIMS];
  char have[SHAPE_TEXT_MAX], want[SHAPE_TEXT_MAX];
  memcpy(shape, x->shape, sizeof shape);
  if (!shape_broadcast(&ndim, shape, src->ndim, src->shape) || ndim != x->ndim ||
      memcmp(shape, x->shape, sizeof(int64_t) * (size_t)ndim))
    return infer_error(I, "src of shape %s does not broadcast to %s",
                       shape_text(src->ndim, src->shape, have),
                       shape_text(x->ndim, x->shape, want));
  return 0;
}

static int copy__cpu(const OpCall *c) {
  return copy_views(&c->in[1], &c->in[0]);
}

/* Writes src, broadcast and converted, into x; returns x. */
OP(copy_, .signature = "copy_(Tensor! x, Tensor|number src) -> ()", .flags = OP_PLACES,
   .sbp = "..., ...", .linear = "x+src", .infer = copy__infer, .cpu = copy__cpu)

static int fill__infer(Infer *I) {
  const struct fill__args *a = I->args;
  return infer_want_held(I, "value", a->value, (DType)I->in[0]->dtype);
}

static int fill__cpu(const OpCall *c) {
  const struct fill__args *a = c->args;
  double value = a->value;
  static const int64_t one_stride[1];
  View number = {
      .data = &value, .shape = one_stride, .stride = one_stride, .ndim = 0, .dtype = F64};
  return copy_views(&number, &c->in[0]);
}

/* Writes one number into every element of x; returns x. */
OP(fill_, .signature = "fill_(Tensor! x, float value) -> ()", .sbp = "...", .infer = fill__infer,
   .cpu = fill__cpu)

/* -- Writing through a view -------------------------------------------------------------------- */

/* Input 0, laid out by base_stride, has all places that the view reaches. */
static int check_geometry(Infer *I, const IntList *base_stride, const char *name,
                          const IntList *size, const IntList *stride, int64_t offset) {
  const Meta *x = I->in[0];
  int64_t n = meta_numel(x);
  if (base_stride->n != x->ndim)
    return infer_error(I, "base_stride has %d entries, x has %d dims", (int)base_stride->n,
                       x->ndim);
  int rc = infer_want_sizes(I, name, size, (int)stride->n, (DType)x->dtype);
  if (!rc) rc = infer_want_inside(I, "base_stride", x->ndim, x->shape, base_stride->v, 0, n);
  if (rc || !infer_want_inside(I, "stride", (int)size->n, size->v, stride->v, offset, n)) return rc;
  return infer_error(
      I, "the view of this %s, stride and offset does not lie in what is now its base", name);
}

/* y = x with the strides base_stride, so that (size, stride, offset) addresses in it what it
 * addresses in the base. */
static int slice_base_infer(Infer *I) {
  const struct slice_base_args *a = I->args;
  int rc = check_geometry(I, &a->base_stride, "size", &a->size, &a->stride, a->offset);
  return rc ? rc : infer_shape(I, (DType)I->in[0]->dtype, (int)a->size.n, a->size.v);
}

static View at_geometry(const View *base, const int64_t *size, const int64_t *stride, int64_t n,
                        int64_t offset) {
  View v = *base;
  v.data = (char *)base->data + offset * (int64_t)dtype_size((DType)base->dtype);
  v.shape = size;
  v.stride = stride;
  v.ndim = (int8_t)n;
  return v;
}

static size_t slice_base_scratch(const OpCall *c) {
  return (size_t)view_numel(&c->in[0]) * dtype_size((DType)c->in[0].dtype);
}

static int slice_base_cpu(const OpCall *c) {
  const struct slice_base_args *a = c->args;
  View laid = c->in[0];
  if (view_numel(&c->out[0]) == 0) return 0;
  if (memcmp(laid.stride, a->base_stride.v, sizeof(int64_t) * (size_t)laid.ndim)) {
    laid.data = c->scratch;
    laid.stride = a->base_stride.v;
    copy_views(&c->in[0], &laid);
  }
  View part = at_geometry(&laid, a->size.v, a->stride.v, a->size.n, a->offset);
  return copy_views(&part, &c->out[0]);
}

/* What a view of (size, stride, offset) shows of x, where x is laid out by base_stride. For the
 * tape. */
OP(slice_base,
   .signature =
       "slice_base(Tensor x, int[] base_stride, int[] size, int[] stride, int offset) -> Tensor",
   .flags = OP_HIDDEN, .sbp = "B", .linear = "x", .infer = slice_base_infer, .cpu = slice_base_cpu,
   .scratch = slice_base_scratch)

static int scatter_base_infer(Infer *I) {
  const struct scatter_base_args *a = I->args;
  int rc = check_geometry(I, &a->base_stride, "src_size", &a->src_size, &a->stride, a->offset);
  if (!rc) rc = infer_want_shape(I, 1, (int)a->src_size.n, a->src_size.v);
  if (!rc) rc = infer_same(I);
  if (!rc) memcpy(I->last->stride, a->base_stride.v, sizeof(int64_t) * (size_t)I->last->ndim);
  return rc;
}

static int scatter_base_cpu(const OpCall *c) {
  const struct scatter_base_args *a = c->args;
  copy_views(&c->in[0], &c->out[0]);
  if (view_numel(&c->in[1]) == 0) return 0;
  View part = at_geometry(&c->out[0], a->src_size.v, a->stride.v, a->src_size.n, a->offset);
  return copy_views(&c->in[1], &part);
}

/* x laid out by base_stride, with src in the place of the view (src_size, stride, offset). For the
 * tape. */
OP(scatter_base,
   .signature =
       "scatter_base(Tensor x, Tensor src, int[] base_stride, int[] src_size, int[] stride, int "
       "offset) -> Tensor",
   .flags = OP_HIDDEN, .sbp = "B", .linear = "x+src", .infer = scatter_base_infer,
   .cpu = scatter_base_cpu)
