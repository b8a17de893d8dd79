/* Views: other shapes and strides over the memory of the input. No kernels but those of the
 * gradients; what an op here does is its inference.
 *
 * Inference normalises its arguments in place (dims made non-negative, ranges clipped), so that the
 * gradient lines read settled numbers. The gradient of a view is again a view where each element is
 * seen once (permute, reshape, expand), and one pass over memory where the view leaves elements out
 * (slice_backward and its like). Functions that give several views (split, chunk, unbind) have one
 * joined gradient. */
#include <string.h>

#include "copy_views.h"
#include "op_args.h"
#include "sbp_rule.h"

/* The next output, a view of input 0: its dtype and first element, no dims yet. */
static Meta *view_add(Infer *I) {
  const Meta *x = I->in[0];
  Meta *y = infer_add(I);
  if (!y) return NULL;
  y->dtype = x->dtype;
  y->offset = x->offset;
  return y;
}

/* The next output with the dims of input 0. */
static Meta *view_same(Infer *I) {
  const Meta *x = I->in[0];
  Meta *y = view_add(I);
  if (!y) return NULL;
  y->ndim = x->ndim;
  memcpy(y->shape, x->shape, sizeof(int64_t) * (size_t)x->ndim);
  memcpy(y->stride, x->stride, sizeof(int64_t) * (size_t)x->ndim);
  return y;
}

static void view_put_dim(Meta *y, int d, int64_t size, int64_t stride) {
  y->shape[d] = size;
  y->stride[d] = stride;
}

static int64_t wrap(int64_t i, int64_t n) {
  return i < 0 ? i + n : i;
}

/* -- Reshaping --------------------------------------------------------------------------------- */

/* Replaces the one -1 in `size` by what is left of n elements. */
static int settle_size(Infer *I, IntList *size, int64_t n) {
  char have[SHAPE_TEXT_MAX], want[SHAPE_TEXT_MAX];
  const Meta *x = I->in[0];
  int open = -1;
  int64_t known = 1;
  if (size->n > MF_MAX_DIMS)
    return infer_error(I, "%d dims, at most %d are possible", (int)size->n, MF_MAX_DIMS);
  for (int d = 0; d < size->n; d++) {
    if (size->v[d] == -1 && open >= 0)
      return infer_error(I, "only one size can be -1, %s has several",
                         shape_text((int)size->n, size->v, want));
    if (size->v[d] == -1) open = d;
    else if (size->v[d] < 0)
      return infer_error(I, "size %lld in dim %d is negative", (long long)size->v[d], d);
    else if (__builtin_mul_overflow(known, size->v[d], &known)) known = INT64_MAX, d = (int)size->n;
  }
  if (open >= 0 && known > 0 && n % known == 0) {
    size->v[open] = n / known;
    return 0;
  }
  if (open >= 0 && known == 0 && n == 0)
    return infer_error(I, "-1 in %s could be any size, since there are no elements; write the size",
                       shape_text((int)size->n, size->v, want));
  if (open < 0 && known == n) return 0;
  return infer_error(I, "%lld elements of shape %s do not fit shape %s", (long long)n,
                     shape_text(x->ndim, x->shape, have), shape_text((int)size->n, size->v, want));
}

/* The output with this shape of as many elements; `copy` is the answer when the strides do not
 * allow it. */
static int view_shape(Infer *I, int ndim, const int64_t *shape, int copy) {
  const Meta *x = I->in[0];
  int64_t stride[MF_MAX_DIMS];
  char have[SHAPE_TEXT_MAX], want[SHAPE_TEXT_MAX];
  int rc = shape_check(I->op->name, ndim, shape, (DType)x->dtype);
  if (rc) return rc;
  if (!shape_view_strides(x->ndim, x->shape, x->stride, ndim, shape, stride)) {
    if (copy) return copy;
    return infer_error(I,
                       "shape %s with its strides cannot be seen as %s without a copy; use "
                       ":reshape or :contiguous() first",
                       shape_text(x->ndim, x->shape, have), shape_text(ndim, shape, want));
  }
  Meta *y = view_add(I);
  if (!y) return MF_ENOMEM;
  y->ndim = (int8_t)ndim;
  for (int d = 0; d < ndim; d++) view_put_dim(y, d, shape[d], stride[d]);
  return 0;
}

static int view_infer(Infer *I) {
  struct view_args *a = I->args;
  int rc = settle_size(I, &a->size, meta_numel(I->in[0]));
  return rc ? rc : view_shape(I, (int)a->size.n, a->size.v, 0);
}

/* The same memory with another shape; one size may be -1. An error where the strides need a copy.
 */
OP(view, .signature = "view(Tensor x, int[] size) -> Tensor", .flags = OP_VIEW, .infer = view_infer)

static int reshape_infer(Infer *I) {
  struct reshape_args *a = I->args;
  int rc = settle_size(I, &a->size, meta_numel(I->in[0]));
  return rc ? rc : view_shape(I, (int)a->size.n, a->size.v, INFER_COPY);
}

/* Another shape of as many elements; one size may be -1. A view where the strides allow it, else a
 * copy. */
OP(reshape, .signature = "reshape(Tensor x, int[] size) -> Tensor", .flags = OP_VIEW,
   .infer = reshape_infer)

static int flatten_infer(Infer *I) {
  struct flatten_args *a = I->args;
  const Meta *x = I->in[0];
  int64_t shape[MF_MAX_DIMS + 1];
  int n = 0, rc = infer_dim(I, "start_dim", &a->start_dim, x->ndim);
  if (!rc) rc = infer_dim(I, "end_dim", &a->end_dim, x->ndim);
  if (rc) return rc;
  if (a->start_dim > a->end_dim)
    return infer_error(I, "start_dim %lld comes after end_dim %lld", (long long)a->start_dim,
                       (long long)a->end_dim);
  if (x->ndim == 0) shape[n++] = 1;
  for (int d = 0; d < x->ndim; d++) {
    if (d > a->start_dim && d <= a->end_dim) shape[n - 1] *= x->shape[d];
    else shape[n++] = x->shape[d];
  }
  return view_shape(I, n, shape, INFER_COPY);
}

/* The dims start_dim to end_dim as one. */
OP(flatten, .signature = "flatten(Tensor x, dim start_dim=0, dim end_dim=-1) -> Tensor",
   .flags = OP_VIEW, .infer = flatten_infer)

static int unflatten_infer(Infer *I) {
  struct unflatten_args *a = I->args;
  const Meta *x = I->in[0];
  int rc = infer_dim(I, "dim", &a->dim, x->ndim);
  if (rc) return rc;
  if (x->ndim == 0 || a->sizes.n == 0)
    return infer_error(I, x->ndim ? "sizes is empty" : "a 0-d tensor has no dim to unflatten");
  rc = settle_size(I, &a->sizes, x->shape[a->dim]);
  if (rc) return rc;
  int n = 0;
  int64_t shape[MF_MAX_DIMS * 3];
  for (int d = 0; d < x->ndim; d++) {
    if (d != a->dim) shape[n++] = x->shape[d];
    else
      for (int k = 0; k < a->sizes.n; k++) shape[n++] = a->sizes.v[k];
  }
  return view_shape(I, n, shape, 0);
}

/* Dim `dim` as several dims of these sizes, one of which may be -1. */
OP(unflatten, .signature = "unflatten(Tensor x, dim dim, int[] sizes) -> Tensor", .flags = OP_VIEW,
   .infer = unflatten_infer)

static int squeeze_infer(Infer *I) {
  struct squeeze_args *a = I->args;
  const Meta *x = I->in[0];
  uint32_t among = 0;
  int rc = infer_dims(I, "dim", &a->dim, x->ndim, true);
  if (rc) return rc;
  for (int k = 0; k < a->dim.n; k++) among |= 1u << a->dim.v[k];
  Meta *y = view_add(I);
  if (!y) return MF_ENOMEM;
  for (int d = 0; d < x->ndim; d++)
    if (x->shape[d] != 1 || !(among >> d & 1))
      view_put_dim(y, y->ndim++, x->shape[d], x->stride[d]);
  return 0;
}

/* Without the dims of size 1, all or those given. */
OP(squeeze, .signature = "squeeze(Tensor x, int[] dim=[]) -> Tensor", .flags = OP_VIEW,
   .infer = squeeze_infer)

static int unsqueeze_infer(Infer *I) {
  struct unsqueeze_args *a = I->args;
  const Meta *x = I->in[0];
  int rc = infer_dim(I, "dim", &a->dim, x->ndim + 1);
  if (rc) return rc;
  if (x->ndim == MF_MAX_DIMS)
    return infer_error(I, "a tensor can have at most %d dims", MF_MAX_DIMS);
  Meta *y = view_add(I);
  if (!y) return MF_ENOMEM;
  for (int d = 0; d <= x->ndim; d++) {
    int from = d - (d > a->dim);
    if (d == a->dim) view_put_dim(y, d, 1, d < x->ndim ? x->shape[d] * x->stride[d] : 1);
    else view_put_dim(y, d, x->shape[from], x->stride[from]);
  }
  y->ndim = (int8_t)(x->ndim + 1);
  return 0;
}

/* With a new dim of size 1 at `dim`; -1 is behind the last. */
OP(unsqueeze, .signature = "unsqueeze(Tensor x, int dim) -> Tensor", .flags = OP_VIEW,
   .infer = unsqueeze_infer)

/* -- Order of dims ----------------------------------------------------------------------------- */

static int view_permuted(Infer *I, const int64_t *dims) {
  const Meta *x = I->in[0];
  Meta *y = view_same(I);
  if (!y) return MF_ENOMEM;
  for (int d = 0; d < x->ndim; d++) view_put_dim(y, d, x->shape[dims[d]], x->stride[dims[d]]);
  return 0;
}

static int permute_infer(Infer *I) {
  struct permute_args *a = I->args;
  const Meta *x = I->in[0];
  int rc = infer_dims(I, "dims", &a->dims, x->ndim, false);
  if (rc) return rc;
  if (a->dims.n != x->ndim)
    return infer_error(I, "dims has %d entries, x has %d dims; each dim is named once",
                       (int)a->dims.n, x->ndim);
  return view_permuted(I, a->dims.v);
}

/* The dims in another order: dim d of the result is dim dims[d] of x. */
OP(permute, .signature = "permute(Tensor x, int[] dims) -> Tensor", .flags = OP_VIEW,
   .infer = permute_infer)

static int view_swapped(Infer *I, int64_t a, int64_t b) {
  const Meta *x = I->in[0];
  Meta *y = view_same(I);
  if (!y) return MF_ENOMEM;
  if (x->ndim == 0) return 0;
  view_put_dim(y, (int)a, x->shape[b], x->stride[b]);
  view_put_dim(y, (int)b, x->shape[a], x->stride[a]);
  return 0;
}

static int transpose_infer(Infer *I) {
  struct transpose_args *a = I->args;
  int rc = infer_dim(I, "dim0", &a->dim0, I->in[0]->ndim);
  if (!rc) rc = infer_dim(I, "dim1", &a->dim1, I->in[0]->ndim);
  return rc ? rc : view_swapped(I, a->dim0, a->dim1);
}

/* Two dims exchanged. */
OP(transpose, .signature = "transpose(Tensor x, dim dim0, dim dim1) -> Tensor", .flags = OP_VIEW,
   .infer = transpose_infer)

static int t_infer(Infer *I) {
  const Meta *x = I->in[0];
  if (x->ndim > 2)
    return infer_error(I, "x has %d dims, at most 2 are possible; use :transpose(dim0, dim1)",
                       x->ndim);
  return x->ndim == 2 ? view_swapped(I, 0, 1) : view_same(I) ? 0 : MF_ENOMEM;
}

/* The transpose of a matrix; vectors and 0-d tensors as they are. */
OP(t, .signature = "t(Tensor x) -> Tensor", .flags = OP_VIEW, .infer = t_infer)

static int movedim_infer(Infer *I) {
  struct movedim_args *a = I->args;
  const Meta *x = I->in[0];
  int64_t dims[MF_MAX_DIMS];
  uint32_t moved = 0, taken = 0;
  int rc = infer_dims(I, "source", &a->source, x->ndim, false);
  if (!rc) rc = infer_dims(I, "destination", &a->destination, x->ndim, false);
  if (rc) return rc;
  if (a->source.n != a->destination.n)
    return infer_error(I, "source has %d entries, destination %d", (int)a->source.n,
                       (int)a->destination.n);
  if (x->ndim == 0) return view_same(I) ? 0 : MF_ENOMEM;
  for (int k = 0; k < a->source.n; k++) {
    dims[a->destination.v[k]] = a->source.v[k];
    moved |= 1u << a->source.v[k];
    taken |= 1u << a->destination.v[k];
  }
  for (int d = 0, from = 0; d < x->ndim; d++) {
    if (taken >> d & 1) continue;
    while (moved >> from & 1) from++;
    dims[d] = from++;
  }
  return view_permuted(I, dims);
}

/* Dims moved from the places in source to those in destination; the others keep their order. */
OP(movedim, .signature = "movedim(Tensor x, int[] source, int[] destination) -> Tensor",
   .flags = OP_VIEW, .infer = movedim_infer)

/* -- Broadcasting ------------------------------------------------------------------------------ */

static int view_expanded(Infer *I, IntList *size) {
  const Meta *x = I->in[0];
  char have[SHAPE_TEXT_MAX], want[SHAPE_TEXT_MAX];
  int shift = (int)size->n - x->ndim;
  if (size->n > MF_MAX_DIMS)
    return infer_error(I, "%d dims, at most %d are possible", (int)size->n, MF_MAX_DIMS);
  if (shift < 0)
    return infer_error(I, "shape %s has fewer dims than x, which is %s",
                       shape_text((int)size->n, size->v, want),
                       shape_text(x->ndim, x->shape, have));
  for (int d = 0; d < size->n; d++) {
    int64_t was = d < shift ? 1 : x->shape[d - shift];
    if (size->v[d] == -1 && d >= shift) size->v[d] = was;
    if (size->v[d] < 0)
      return infer_error(I, "size %lld in dim %d is negative", (long long)size->v[d], d);
    if (was != 1 && was != size->v[d])
      return infer_error(
          I, "shape %s does not broadcast to %s; in dim %d size %lld is neither 1 nor %lld",
          shape_text(x->ndim, x->shape, have), shape_text((int)size->n, size->v, want), d,
          (long long)was, (long long)size->v[d]);
  }
  int rc = shape_check(I->op->name, (int)size->n, size->v, (DType)x->dtype);
  Meta *y = rc ? NULL : view_add(I);
  if (!y) return rc ? rc : MF_ENOMEM;
  y->ndim = (int8_t)size->n;
  memcpy(y->shape, size->v, sizeof(int64_t) * (size_t)size->n);
  shape_broadcast_strides((int)size->n, size->v, x->ndim, x->shape, x->stride, y->stride);
  return 0;
}

static int expand_infer(Infer *I) {
  return view_expanded(I, &((struct expand_args *)I->args)->size);
}

/* Dims of size 1 seen as larger ones, and new leading dims; -1 keeps a size. All places of an
 * expanded dim are the same memory. */
OP(expand, .signature = "expand(Tensor x, int[] size) -> Tensor", .flags = OP_VIEW,
   .infer = expand_infer)

static int broadcast_to_infer(Infer *I) {
  return view_expanded(I, &((struct broadcast_to_args *)I->args)->size);
}

/* x broadcast to a shape. */
OP(broadcast_to, .signature = "broadcast_to(Tensor x, int[] size) -> Tensor", .flags = OP_VIEW,
   .infer = broadcast_to_infer)

/* -- Parts ------------------------------------------------------------------------------------- */

static int view_part(Infer *I, int64_t dim, int64_t start, int64_t size, int64_t step) {
  Meta *y = view_same(I);
  if (!y) return MF_ENOMEM;
  if (size > 0) y->offset += start * y->stride[dim];
  view_put_dim(y, (int)dim, size, y->stride[dim] * step);
  return 0;
}

static int want_dims(Infer *I) {
  return I->in[0]->ndim ? 0 : infer_error(I, "a 0-d tensor has no dim to take a part of");
}

static int narrow_infer(Infer *I) {
  struct narrow_args *a = I->args;
  const Meta *x = I->in[0];
  int rc = want_dims(I);
  if (!rc) rc = infer_dim(I, "dim", &a->dim, x->ndim);
  if (rc) return rc;
  int64_t n = x->shape[a->dim];
  if (a->start < -n || a->start > n)
    return infer_error(I, "start %lld is out of range for size %lld; legal are %lld to %lld",
                       (long long)a->start, (long long)n, (long long)-n, (long long)n);
  a->start = wrap(a->start, n);
  if (a->length < 0 || a->length > n - a->start)
    return infer_error(
        I, "length %lld from start %lld is out of range for size %lld; legal are 0 to %lld",
        (long long)a->length, (long long)a->start, (long long)n, (long long)(n - a->start));
  return view_part(I, a->dim, a->start, a->length, 1);
}

/* `length` entries of dim `dim` from `start` on. */
OP(narrow, .signature = "narrow(Tensor x, dim dim, int start, int length) -> Tensor",
   .flags = OP_VIEW, .infer = narrow_infer)

static int slice_infer(Infer *I) {
  struct slice_args *a = I->args;
  const Meta *x = I->in[0];
  int rc = want_dims(I);
  if (!rc) rc = infer_dim(I, "dim", &a->dim, x->ndim);
  if (rc) return rc;
  if (a->step < 1)
    return infer_error(I, "step must be at least 1, is %lld; :flip() reverses", (long long)a->step);
  int64_t n = x->shape[a->dim];
  if (a->step > n) a->step = n ? n : 1; /* one entry at most; strides stay small */
  if (!a->has_stop) a->stop = n;
  int64_t *ends[] = {&a->start, &a->stop};
  for (int k = 0; k < 2; k++) {
    int64_t v = *ends[k] < -n ? 0 : wrap(*ends[k], n);
    *ends[k] = v > n ? n : v;
  }
  if (a->stop < a->start) a->stop = a->start;
  a->has_stop = true;
  int64_t length = a->stop - a->start; /* size = ceil(length / step) */
  return view_part(I, a->dim, a->start, length / a->step + (length % a->step != 0), a->step);
}

/* The entries start, start + step, ... before stop of dim `dim`; negative ends count from the end,
 * and ends beyond it are clipped. */
OP(slice,
   .signature = "slice(Tensor x, dim dim=0, int start=0, int? stop=None, int step=1) -> Tensor",
   .flags = OP_VIEW, .infer = slice_infer)

static int select_infer(Infer *I) {
  struct select_args *a = I->args;
  const Meta *x = I->in[0];
  int rc = want_dims(I);
  if (!rc) rc = infer_dim(I, "dim", &a->dim, x->ndim);
  if (rc) return rc;
  int64_t n = x->shape[a->dim];
  if (n == 0)
    return infer_error(I, "dim %lld has size 0, there is nothing to select", (long long)a->dim);
  if (a->index < -n || a->index >= n)
    return infer_error(
        I, "index %lld is out of range for dim %lld of size %lld; legal are %lld to %lld",
        (long long)a->index, (long long)a->dim, (long long)n, (long long)-n, (long long)(n - 1));
  a->index = wrap(a->index, n);
  Meta *y = view_add(I);
  if (!y) return MF_ENOMEM;
  y->offset += a->index * x->stride[a->dim];
  for (int d = 0; d < x->ndim; d++)
    if (d != a->dim) view_put_dim(y, y->ndim++, x->shape[d], x->stride[d]);
  return 0;
}

/* One entry of dim `dim`, which the result has no longer. */
OP(select, .signature = "select(Tensor x, dim dim, int index) -> Tensor", .flags = OP_VIEW,
   .infer = select_infer)

/* Where the diagonal of dims d1, d2 begins and how long it is. */
static void diagonal_range(int64_t rows, int64_t columns, int64_t offset, int64_t *row,
                           int64_t *column, int64_t *n) {
  *row = offset < 0 ? -offset : 0;
  *column = offset > 0 ? offset : 0;
  rows -= *row;
  columns -= *column;
  *n = rows < columns ? rows : columns;
  if (*n <= 0) *n = *row = *column = 0;
}

static int settle_diagonal(Infer *I, int ndim, int64_t *dim1, int64_t *dim2, int64_t offset) {
  if (ndim < 2) return infer_error(I, "at least 2 dims are needed, there are %d", ndim);
  int rc = infer_dim(I, "dim1", dim1, ndim);
  if (!rc) rc = infer_dim(I, "dim2", dim2, ndim);
  if (rc) return rc;
  if (*dim1 == *dim2) return infer_error(I, "dim1 and dim2 are both %lld", (long long)*dim1);
  if (offset > INT64_MAX / 4 || offset < -INT64_MAX / 4)
    return infer_error(I, "offset %lld is too large", (long long)offset);
  return 0;
}

static int diagonal_infer(Infer *I) {
  struct diagonal_args *a = I->args;
  const Meta *x = I->in[0];
  int rc = settle_diagonal(I, x->ndim, &a->dim1, &a->dim2, a->offset);
  Meta *y = rc ? NULL : view_add(I);
  if (!y) return rc ? rc : MF_ENOMEM;
  int64_t row, column, n;
  diagonal_range(x->shape[a->dim1], x->shape[a->dim2], a->offset, &row, &column, &n);
  for (int d = 0; d < x->ndim; d++)
    if (d != a->dim1 && d != a->dim2) view_put_dim(y, y->ndim++, x->shape[d], x->stride[d]);
  y->offset += row * x->stride[a->dim1] + column * x->stride[a->dim2];
  view_put_dim(y, y->ndim++, n, x->stride[a->dim1] + x->stride[a->dim2]);
  return 0;
}

/* The diagonal of dims dim1 and dim2 as the last dim; offset > 0 is above the main one. */
OP(diagonal, .signature = "diagonal(Tensor x, int offset=0, dim dim1=0, dim dim2=1) -> Tensor",
   .flags = OP_VIEW, .infer = diagonal_infer)

/* -- Several parts ----------------------------------------------------------------------------- */

/* More views than this at once are a mistake. */
enum { PARTS_MAX = 1 << 20 };

static int want_parts(Infer *I, int64_t n) {
  if (n <= PARTS_MAX) return 0;
  return infer_error(I, "%lld tensors are too many, at most %d are made at once", (long long)n,
                     PARTS_MAX);
}

/* Views of `sizes` one behind the other along dim. */
static int view_parts(Infer *I, int64_t dim, const IntList *sizes) {
  int64_t at = 0;
  for (int k = 0; k < sizes->n; k++) {
    int rc = view_part(I, dim, at, sizes->v[k], 1);
    if (rc) return rc;
    at += sizes->v[k];
  }
  return 0;
}

/* Parts of `size` each, the last one smaller. */
static int view_equal_parts(Infer *I, int64_t dim, int64_t size) {
  int64_t n = I->in[0]->shape[dim];
  int too_many = want_parts(I, size ? n / size : 0);
  if (too_many) return too_many;
  for (int64_t at = 0; at < n || at == 0; at += size) {
    int rc = view_part(I, dim, at, n - at < size ? n - at : size, 1);
    if (rc) return rc;
    if (size == 0) break;
  }
  return 0;
}

static int split_infer(Infer *I) {
  struct split_args *a = I->args;
  const Meta *x = I->in[0];
  int rc = want_dims(I);
  if (!rc) rc = infer_dim(I, "dim", &a->dim, x->ndim);
  if (rc) return rc;
  int64_t n = x->shape[a->dim], sum = 0;
  for (int k = 0; k < a->split_size.n; k++) {
    if (a->split_size.v[k] < 0 || a->split_size.v[k] > INT64_MAX / 64)
      return infer_error(I, "split_size[%d] is %lld, not a size", k + 1,
                         (long long)a->split_size.v[k]);
    sum += a->split_size.v[k];
  }
  if (a->split_size.n == 1) {
    if (sum == 0 && n > 0)
      return infer_error(I, "parts of size 0 never cover dim %lld of size %lld", (long long)a->dim,
                         (long long)n);
    return view_equal_parts(I, a->dim, sum);
  }
  if (sum != n)
    return infer_error(I, "the sizes sum to %lld, dim %lld has %lld; they must be equal",
                       (long long)sum, (long long)a->dim, (long long)n);
  return view_parts(I, a->dim, &a->split_size);
}

/* A table of views along dim: parts of one size (the last may be smaller), or of each size in a
 * table. */
OP(split, .signature = "split(Tensor x, int[] split_size, dim dim=0) -> Tensor[]", .flags = OP_VIEW,
   .infer = split_infer)

static int chunk_infer(Infer *I) {
  struct chunk_args *a = I->args;
  const Meta *x = I->in[0];
  int rc = want_dims(I);
  if (!rc) rc = infer_dim(I, "dim", &a->dim, x->ndim);
  if (rc) return rc;
  if (a->chunks < 1)
    return infer_error(I, "chunks must be at least 1, is %lld", (long long)a->chunks);
  int64_t n = x->shape[a->dim];
  if (n == 0) {
    rc = want_parts(I, a->chunks);
    for (int64_t k = 0; k < a->chunks && !rc; k++) rc = view_part(I, a->dim, 0, 0, 1);
    return rc;
  }
  return view_equal_parts(I, a->dim, n / a->chunks + (n % a->chunks != 0));
}

/* A table of at most `chunks` views along dim, all of one size but for the last. */
OP(chunk, .signature = "chunk(Tensor x, int chunks, dim dim=0) -> Tensor[]", .flags = OP_VIEW,
   .infer = chunk_infer)

static int unbind_infer(Infer *I) {
  struct unbind_args *a = I->args;
  const Meta *x = I->in[0];
  int rc = want_dims(I);
  if (!rc) rc = infer_dim(I, "dim", &a->dim, x->ndim);
  if (!rc) rc = want_parts(I, x->shape[a->dim]);
  for (int64_t i = 0; !rc && i < x->shape[a->dim]; i++) {
    Meta *y = view_add(I);
    if (!y) return MF_ENOMEM;
    y->offset += i * x->stride[a->dim];
    for (int d = 0; d < x->ndim; d++)
      if (d != a->dim) view_put_dim(y, y->ndim++, x->shape[d], x->stride[d]);
  }
  return rc;
}

/* A table of the entries of dim `dim`, as select gives them: the way to iterate over a tensor. */
OP(unbind, .signature = "unbind(Tensor x, dim dim=0) -> Tensor[]", .flags = OP_VIEW,
   .infer = unbind_infer)

/* -- Any strides ------------------------------------------------------------------------------- */

static int as_strided_infer(Infer *I) {
  struct as_strided_args *a = I->args;
  const Meta *x = I->in[0];
  if (a->size.n != a->stride.n)
    return infer_error(I, "size has %d entries, stride %d", (int)a->size.n, (int)a->stride.n);
  int rc = shape_check(I->op->name, (int)a->size.n, a->size.v, (DType)x->dtype);
  if (rc) return rc;
  if (!a->has_storage_offset) a->storage_offset = x->offset;
  a->has_storage_offset = true;
  int64_t first, last, low = a->storage_offset, high = a->storage_offset;
  shape_extent(x->ndim, x->shape, x->stride, &first, &last);
  bool fits = true, empty = shape_numel((int)a->size.n, a->size.v) == 0;
  for (int d = 0; d < a->size.n; d++) {
    int64_t reach;
    if (a->stride.v[d] < 0 || a->stride.v[d] > SHAPE_MAX)
      return infer_error(I, "stride %lld is %s", (long long)a->stride.v[d],
                         a->stride.v[d] < 0 ? "negative" : "too large");
    if (empty) continue;
    fits &= !__builtin_mul_overflow(a->size.v[d] - 1, a->stride.v[d], &reach) &&
            !__builtin_add_overflow(high, reach, &high);
  }
  if (!empty && (!fits || meta_numel(x) == 0 || low < x->offset + first || high > x->offset + last))
    return infer_error(
        I, "places %lld to %lld are asked for, x reaches from %lld to %lld in its memory",
        (long long)low, fits ? (long long)high : -1LL, (long long)(x->offset + first),
        (long long)(x->offset + last));
  a->x_stride.n = x->ndim;
  memcpy(a->x_stride.v, x->stride, sizeof(int64_t) * (size_t)x->ndim);
  a->x_offset = x->offset;
  Meta *y = view_add(I);
  if (!y) return MF_ENOMEM;
  y->ndim = (int8_t)a->size.n;
  y->offset = empty ? x->offset : a->storage_offset;
  for (int d = 0; d < y->ndim; d++) view_put_dim(y, d, a->size.v[d], a->stride.v[d]);
  return 0;
}

/* Any sizes and strides over the memory that x covers; strides and offset count elements. x_stride
 * and x_offset are the op's own, for its gradient. */
OP(as_strided,
   .signature =
       "as_strided(Tensor x, int[] size, int[] stride, int? storage_offset=None, *, int[] "
       "x_stride=[], int x_offset=0) -> Tensor",
   .flags = OP_VIEW | OP_STRIDED, .sbp = "B", .linear = "x", .infer = as_strided_infer)

/* -- Gradients --------------------------------------------------------------------------------- */

static int slice_backward_infer(Infer *I) {
  struct slice_backward_args *a = I->args;
  const Meta *g = I->in[0];
  int64_t shape[MF_MAX_DIMS], n, last;
  int rc = want_dims(I);
  if (!rc) rc = infer_want_sizes(I, "size", &a->size, g->ndim, (DType)g->dtype);
  if (!rc) rc = infer_dim(I, "dim", &a->dim, g->ndim);
  if (rc) return rc;
  memcpy(shape, a->size.v, sizeof(int64_t) * (size_t)g->ndim);
  n = shape[a->dim] = g->shape[a->dim];
  if (a->start < 0 || a->start > a->size.v[a->dim] || a->step < 1)
    return infer_error(I, "start %lld and step %lld are none of a slice of size %lld",
                       (long long)a->start, (long long)a->step, (long long)a->size.v[a->dim]);
  if (n && (__builtin_mul_overflow(n - 1, a->step, &last) || last >= a->size.v[a->dim] - a->start))
    return infer_error(I, "g has %lld entries in dim %lld; a slice of size %lld has fewer",
                       (long long)n, (long long)a->dim, (long long)a->size.v[a->dim]);
  rc = infer_want_shape(I, 0, g->ndim, shape);
  return rc ? rc : infer_shape(I, (DType)g->dtype, g->ndim, a->size.v);
}

/* y is zero but at start, start + step, ... of dim, where it is g: the places between are set once.
 */
static int slice_backward_cpu(const OpCall *c) {
  const struct slice_backward_args *a = c->args;
  const View *g = &c->in[0], *y = &c->out[0];
  int64_t n = g->shape[a->dim], used = n ? (n - 1) * a->step + 1 : 0;
  View part = *y;
  int64_t shape[MF_MAX_DIMS], stride[MF_MAX_DIMS];
  memcpy(shape, y->shape, sizeof(int64_t) * (size_t)y->ndim);
  memcpy(stride, y->stride, sizeof(int64_t) * (size_t)y->ndim);
  part.shape = shape;
  part.stride = stride;
  size_t size = dtype_size((DType)y->dtype);
  char *base = y->data;
  int64_t step = y->stride[a->dim] * (int64_t)size;
  shape[a->dim] = a->start;
  copy_zero(&part);
  part.data = base + (a->start + used) * step;
  shape[a->dim] = y->shape[a->dim] - a->start - used;
  copy_zero(&part);
  part.data = base + a->start * step;
  stride[a->dim] *= a->step;
  shape[a->dim] = n;
  copy_views(g, &part);
  for (int64_t k = 1; k < a->step && n > 1; k++) {
    part.data = base + (a->start + k) * step;
    shape[a->dim] = n - 1;
    copy_zero(&part);
  }
  return 0;
}

/* The gradient of slice and narrow: zeros of shape `size` with g in its place. */
OP(slice_backward,
   .signature = "slice_backward(Tensor g, int[] size, int dim, int start, int step) -> Tensor",
   .flags = OP_HIDDEN, .sbp_rule = sbp_all_but_dim, .linear = "g", .infer = slice_backward_infer,
   .cpu = slice_backward_cpu)

static int diagonal_backward_infer(Infer *I) {
  struct diagonal_backward_args *a = I->args;
  const Meta *g = I->in[0];
  int64_t shape[MF_MAX_DIMS], row, column;
  int n = 0, ndim = (int)a->size.n, rc = settle_diagonal(I, ndim, &a->dim1, &a->dim2, a->offset);
  if (!rc) rc = shape_check(I->op->name, ndim, a->size.v, (DType)g->dtype);
  if (rc) return rc;
  for (int d = 0; d < ndim; d++)
    if (d != a->dim1 && d != a->dim2) shape[n++] = a->size.v[d];
  diagonal_range(a->size.v[a->dim1], a->size.v[a->dim2], a->offset, &row, &column, &shape[n]);
  rc = infer_want_shape(I, 0, n + 1, shape);
  return rc ? rc : infer_shape(I, (DType)g->dtype, ndim, a->size.v);
}

static int diagonal_backward_cpu(const OpCall *c) {
  const struct diagonal_backward_args *a = c->args;
  View y = c->out[0], part = y;
  int64_t shape[MF_MAX_DIMS], stride[MF_MAX_DIMS], row, column, n;
  diagonal_range(y.shape[a->dim1], y.shape[a->dim2], a->offset, &row, &column, &n);
  int k = 0;
  for (int d = 0; d < y.ndim; d++) {
    if (d == a->dim1 || d == a->dim2) continue;
    shape[k] = y.shape[d];
    stride[k++] = y.stride[d];
  }
  shape[k] = n;
  stride[k++] = y.stride[a->dim1] + y.stride[a->dim2];
  part.ndim = (int8_t)k;
  part.shape = shape;
  part.stride = stride;
  part.data = (char *)y.data + (row * y.stride[a->dim1] + column * y.stride[a->dim2]) *
                                   (int64_t)dtype_size((DType)y.dtype);
  copy_zero(&y);
  return copy_views(&c->in[0], &part);
}

/* The dims besides the diagonal. */
static int diagonal_backward_sbp(SbpAsk *q) {
  uint32_t named = sbp_named_dims(q, q->out[0]->ndim);
  int rc = 0;
  for (int d = 0, k = 0; d < q->out[0]->ndim && !rc; d++)
    if (!(named >> d & 1)) rc = sbp_add_split(q, 0, k++, 0, d);
  return rc;
}

/* The gradient of diagonal: zeros of shape `size` with g on the diagonal. */
OP(diagonal_backward,
   .signature = "diagonal_backward(Tensor g, int[] size, int offset, int dim1, int dim2) -> Tensor",
   .flags = OP_HIDDEN, .sbp_rule = diagonal_backward_sbp, .linear = "g",
   .infer = diagonal_backward_infer, .cpu = diagonal_backward_cpu)

static int strided_add_infer(Infer *I) {
  const struct strided_add_args *a = I->args;
  const Meta *g = I->in[0];
  int rc = infer_want_float(I, 0);
  if (!rc) rc = infer_want_sizes(I, "size", &a->size, (int)a->stride.n, (DType)g->dtype);
  if (!rc && a->g_stride.n != g->ndim)
    rc = infer_error(I, "g_stride has %d entries, g has %d dims", (int)a->g_stride.n, g->ndim);
  if (!rc && a->copies < 1)
    rc = infer_error(I, "copies must be at least 1, is %lld", (long long)a->copies);
  if (!rc)
    rc = infer_want_inside(I, "stride", (int)a->size.n, a->size.v, a->stride.v, a->offset,
                           SHAPE_MAX);
  if (!rc)
    rc = infer_want_inside(I, "g_stride", g->ndim, g->shape, a->g_stride.v, a->g_offset, SHAPE_MAX);
  return rc ? rc : infer_shape(I, (DType)g->dtype, (int)a->size.n, a->size.v);
}

/* How many elements of memory both sides reach; a side without elements reaches none. */
static int64_t strided_add_reach(const OpCall *c) {
  const struct strided_add_args *a = c->args;
  int64_t low, high, reach = 0, g_reach = 0;
  shape_extent((int)a->size.n, a->size.v, a->stride.v, &low, &high);
  if (shape_numel((int)a->size.n, a->size.v)) reach = a->offset + high + 1;
  shape_extent(c->in[0].ndim, c->in[0].shape, a->g_stride.v, &low, &high);
  if (view_numel(&c->in[0])) g_reach = a->g_offset + high + 1;
  return g_reach > reach ? g_reach : reach;
}

static size_t strided_add_scratch(const OpCall *c) {
  return (size_t)strided_add_reach(c) * sizeof(double);
}

static int strided_add_cpu(const OpCall *c) {
  const struct strided_add_args *a = c->args;
  const View *g = &c->in[0];
  double *memory = c->scratch;
  if (view_numel(&c->out[0]) == 0) return 0;
  int64_t reach = strided_add_reach(c), size = (int64_t)dtype_size((DType)g->dtype);
  memset(memory, 0, sizeof *memory * (size_t)reach);
  for (int64_t i = 0, n = view_numel(g); i < n; i++) {
    int64_t rest = i, from = 0, to = a->g_offset;
    for (int d = g->ndim - 1; d >= 0; d--) {
      from += rest % g->shape[d] * g->stride[d];
      to += rest % g->shape[d] * a->g_stride.v[d];
      rest /= g->shape[d];
    }
    memory[to] += dtype_get_f64((DType)g->dtype, (char *)g->data + from * size);
  }
  for (int64_t i = 0; i < reach && a->copies > 1; i++) memory[i] /= (double)a->copies;
  View read = {.data = memory + a->offset,
               .shape = a->size.v,
               .stride = a->stride.v,
               .ndim = (int8_t)a->size.n,
               .dtype = F64};
  return copy_views(&read, &c->out[0]);
}

/* The gradient of as_strided, and of itself: zeroed memory to which the elements of g are added
 * where (g_stride, g_offset) put them, then read as (size, stride, offset). Places that x showed
 * several times (it was expanded) share their gradient: `copies` of them. */
OP(strided_add,
   .signature =
       "strided_add(Tensor g, int[] size, int[] stride, int offset, int[] g_stride, int g_offset, "
       "int copies) -> Tensor",
   .flags = OP_HIDDEN, .sbp = "B", .linear = "g", .infer = strided_add_infer,
   .cpu = strided_add_cpu, .scratch = strided_add_scratch)

/* -- From a step to its micro-batches ---------------------------------------------------------- */

static int micro_unpack_infer(Infer *I) {
  const struct micro_unpack_args *a = I->args;
  const Meta *x = I->in[0];
  if (a->n < 1 || a->at < 0 || a->at >= a->n)
    return infer_error(I, "at %lld is none of %lld micro-batches", (long long)a->at,
                       (long long)a->n);
  if (!x->ndim) return want_dims(I);
  if (x->shape[0] % a->n)
    return infer_error(I, "x has %lld rows, which %lld micro-batches cannot share",
                       (long long)x->shape[0], (long long)a->n);
  int64_t rows = x->shape[0] / a->n;
  return view_part(I, 0, a->at * rows, rows, 1);
}

/* A rank that has some rows has not those of its part of each micro-batch. */
static int micro_unpack_sbp(SbpAsk *q) {
  int rc = 0;
  for (int d = 1; d < q->in[0]->ndim && !rc; d++) rc = sbp_add_split(q, 0, d, 0, d);
  return rc;
}

/* Part `at` of n equal ones along dim 0; see pass/time.c. */
OP(micro_unpack, .signature = "micro_unpack(Tensor x, int n, int at=0) -> Tensor",
   .flags = OP_VIEW | OP_HIDDEN | OP_SPREADS, .sbp_rule = micro_unpack_sbp,
   .infer = micro_unpack_infer)

static int micro_repeat_infer(Infer *I) {
  return view_same(I) ? 0 : MF_ENOMEM;
}

/* x, for each micro-batch. */
OP(micro_repeat, .signature = "micro_repeat(Tensor x) -> Tensor",
   .flags = OP_VIEW | OP_HIDDEN | OP_SPREADS, .infer = micro_repeat_infer)
