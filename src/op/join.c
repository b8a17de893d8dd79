/* Joining tensors (cat, stack) and rearranging one (flip, roll, pad, tril, triu, one_hot). Each
 * copies every element once, as parts of the output that views describe; see copy_views.h. */
#include "copy_views.h"
#include "op_args.h"
#include "sbp_rule.h"

/* A view with shape and strides of its own, to be narrowed. */
typedef struct Part {
  View v;
  int64_t shape[MF_MAX_DIMS], stride[MF_MAX_DIMS];
} Part;

static void part_init(Part *p, const View *v) {
  p->v = *v;
  memcpy(p->shape, v->shape, sizeof(int64_t) * (size_t)v->ndim);
  memcpy(p->stride, v->stride, sizeof(int64_t) * (size_t)v->ndim);
  p->v.shape = p->shape;
  p->v.stride = p->stride;
}

static void part_narrow(Part *p, int64_t dim, int64_t start, int64_t length) {
  p->v.data = (char *)p->v.data + start * p->stride[dim] * (int64_t)dtype_size((DType)p->v.dtype);
  p->shape[dim] = length;
}

/* -- cat, stack -------------------------------------------------------------------------------- */

/* A tensor of shape (0) is left out, whatever the others are. */
static bool left_out(int ndim, const int64_t *shape) {
  return ndim == 1 && shape[0] == 0;
}

static int want_some(Infer *I) {
  return I->n_in ? 0 : infer_error(I, "xs is empty; at least one tensor is needed");
}

static void keep_channels_last(Infer *I) {
  Meta *y = I->last;
  for (int k = 0; k < I->n_in; k++) {
    const Meta *x = I->in[k];
    if (x->ndim != 4 || !shape_is_channels_last(4, x->shape, x->stride) ||
        shape_is_contiguous(4, x->shape, x->stride))
      return;
  }
  shape_channels_last(y->shape, y->stride);
}

static int cat_infer(Infer *I) {
  struct cat_args *a = I->args;
  const Meta *like = NULL;
  int64_t shape[MF_MAX_DIMS];
  char name[64], have[SHAPE_TEXT_MAX], want[SHAPE_TEXT_MAX];
  int rc = want_some(I), first = 0;
  if (rc) return rc;
  for (int k = 0; k < I->n_in && !like; k++)
    if (!left_out(I->in[k]->ndim, I->in[k]->shape)) like = I->in[first = k];
  if (!like) like = I->in[0];
  if (like->ndim == 0)
    return infer_error(I, "%s is 0-d and has no dim to join; use stack",
                       infer_name(I, first, name, sizeof name));
  rc = infer_dim(I, "dim", &a->dim, like->ndim);
  if (rc) return rc;
  memcpy(shape, like->shape, sizeof shape);
  shape[a->dim] = 0;
  for (int k = 0; k < I->n_in; k++) {
    const Meta *x = I->in[k];
    if (left_out(x->ndim, x->shape) && like->ndim != 1) continue;
    bool fits = x->ndim == like->ndim;
    for (int d = 0; fits && d < x->ndim; d++) fits = d == a->dim || x->shape[d] == like->shape[d];
    if (!fits)
      return infer_error(I, "%s is %s, the first is %s; only sizes in dim %lld may differ",
                         infer_name(I, k, name, sizeof name), shape_text(x->ndim, x->shape, have),
                         shape_text(like->ndim, like->shape, want), (long long)a->dim);
    if (__builtin_add_overflow(shape[a->dim], x->shape[a->dim], &shape[a->dim]))
      return infer_error(I, "the sizes in dim %lld sum to too much", (long long)a->dim);
  }
  rc = infer_shape(I, infer_promote(I), like->ndim, shape);
  if (!rc && like->ndim == 4) keep_channels_last(I);
  return rc;
}

static int cat_cpu(const OpCall *c) {
  const struct cat_args *a = c->args;
  const View *y = &c->out[0];
  int64_t at = 0;
  for (int k = 0; k < c->n_in; k++) {
    const View *x = &c->in[k];
    if (left_out(x->ndim, x->shape)) continue;
    Part p;
    part_init(&p, y);
    part_narrow(&p, a->dim, at, x->shape[a->dim]);
    copy_views(x, &p.v);
    at += x->shape[a->dim];
  }
  return 0;
}

/* The tensors one behind the other along dim; the other sizes are equal. */
OP(cat, .signature = "cat(Tensor[] xs, dim dim=0) -> Tensor", .sbp_rule = sbp_all_but_dim,
   .linear = "xs", .infer = cat_infer, .cpu = cat_cpu)

static int stack_infer(Infer *I) {
  struct stack_args *a = I->args;
  int64_t shape[MF_MAX_DIMS + 1];
  char name[64], have[SHAPE_TEXT_MAX], want[SHAPE_TEXT_MAX];
  int rc = want_some(I);
  if (rc) return rc;
  const Meta *like = I->in[0];
  rc = infer_dim(I, "dim", &a->dim, like->ndim + 1);
  if (rc) return rc;
  if (like->ndim == MF_MAX_DIMS)
    return infer_error(I, "a tensor can have at most %d dims", MF_MAX_DIMS);
  for (int k = 1; k < I->n_in; k++) {
    const Meta *x = I->in[k];
    if (x->ndim == like->ndim && !memcmp(x->shape, like->shape, sizeof(int64_t) * (size_t)x->ndim))
      continue;
    return infer_error(I, "%s is %s, the first is %s; all must have one shape",
                       infer_name(I, k, name, sizeof name), shape_text(x->ndim, x->shape, have),
                       shape_text(like->ndim, like->shape, want));
  }
  for (int d = 0; d <= like->ndim; d++)
    shape[d] = d == a->dim ? I->n_in : like->shape[d - (d > a->dim)];
  return infer_shape(I, infer_promote(I), like->ndim + 1, shape);
}

static int stack_cpu(const OpCall *c) {
  const struct stack_args *a = c->args;
  const View *y = &c->out[0];
  for (int k = 0; k < c->n_in; k++) {
    Part p;
    part_init(&p, y);
    part_narrow(&p, a->dim, k, 1);
    for (int d = (int)a->dim; d + 1 < y->ndim; d++)
      p.shape[d] = p.shape[d + 1], p.stride[d] = p.stride[d + 1];
    p.v.ndim--;
    copy_views(&c->in[k], &p.v);
  }
  return 0;
}

static int stack_sbp(SbpAsk *q) {
  const struct stack_args *a = q->args;
  for (int d = 0; d < q->in[0]->ndim; d++) {
    Sbp *row = sbp_add(q);
    if (!row) return MF_ENOMEM;
    for (int k = 0; k < q->n_in; k++) row[k] = sbp_split(d);
    row[q->n_in] = sbp_split(d + (d >= a->dim));
  }
  return 0;
}

/* The tensors side by side along a new dim; all have one shape. */
OP(stack, .signature = "stack(Tensor[] xs, dim dim=0) -> Tensor", .sbp_rule = stack_sbp,
   .linear = "xs", .infer = stack_infer, .cpu = stack_cpu)

/* -- flip, roll -------------------------------------------------------------------------------- */

static int flip_infer(Infer *I) {
  struct flip_args *a = I->args;
  int rc = infer_dims(I, "dims", &a->dims, I->in[0]->ndim, false);
  return rc ? rc : infer_same(I);
}

static int flip_cpu(const OpCall *c) {
  const struct flip_args *a = c->args;
  Part x;
  part_init(&x, &c->in[0]);
  if (view_numel(&c->out[0]) == 0) return 0;
  for (int k = 0; k < a->dims.n && x.v.ndim; k++) { /* walked from the other end */
    int64_t d = a->dims.v[k], n = x.shape[d];
    part_narrow(&x, d, n - 1, n);
    x.stride[d] = -x.stride[d];
  }
  return copy_views(&x.v, &c->out[0]);
}

/* The order of entries reversed in these dims. A copy. */
OP(flip, .signature = "flip(Tensor x, int[] dims) -> Tensor", .sbp_rule = sbp_all_but_dim,
   .linear = "x", .infer = flip_infer, .cpu = flip_cpu)

static int roll_infer(Infer *I) {
  struct roll_args *a = I->args;
  const Meta *x = I->in[0];
  int rc = 0;
  for (int k = 0; k < a->dims.n && !rc; k++) rc = infer_dim(I, "dims", &a->dims.v[k], x->ndim);
  if (rc) return rc;
  if (a->dims.n == 0 && a->shifts.n != 1)
    return infer_error(
        I, "shifts has %d entries; without dims, which rolls all elements as one row, there is one",
        (int)a->shifts.n);
  if (a->dims.n && a->dims.n != a->shifts.n)
    return infer_error(I, "shifts has %d entries, dims has %d", (int)a->shifts.n, (int)a->dims.n);
  int n = 0; /* one shift a dim */
  for (int k = 0; k < a->dims.n; k++) {
    int64_t size = x->ndim ? x->shape[a->dims.v[k]] : 1, shift = size ? a->shifts.v[k] % size : 0;
    int at = 0;
    while (at < n && a->dims.v[at] != a->dims.v[k]) at++;
    a->shifts.v[at] = at < n ? a->shifts.v[at] + shift : shift;
    a->dims.v[at] = a->dims.v[k];
    if (at == n) n++;
  }
  if (n) a->dims.n = a->shifts.n = n;
  if (a->dims.n == 0 && x->ndim != 1 && !meta_is_contiguous(x))
    return infer_shape(I, (DType)x->dtype, x->ndim, x->shape);
  return infer_same(I);
}

/* y = x with both parts of dim exchanged, and so on for the dims from k on. */
static void roll_from(const struct roll_args *a, int k, const Part *x, const Part *y) {
  if (k == a->dims.n) {
    copy_views(&x->v, &y->v);
    return;
  }
  int64_t d = a->dims.v[k], n = x->shape[d], shift = n ? a->shifts.v[k] % n : 0;
  if (shift < 0) shift += n;
  Part from = *x, to = *y;
  for (int half = 0; half < 2; half++) {
    part_init(&from, &x->v);
    part_init(&to, &y->v);
    part_narrow(&from, d, half ? n - shift : 0, half ? shift : n - shift);
    part_narrow(&to, d, half ? 0 : shift, half ? shift : n - shift);
    if (from.shape[d]) roll_from(a, k + 1, &from, &to);
  }
}

static size_t roll_scratch(const OpCall *c) {
  const struct roll_args *a = c->args;
  const View *x = &c->in[0];
  return a->dims.n || view_is_contiguous(x) ? 0
                                            : (size_t)view_numel(x) * dtype_size((DType)x->dtype);
}

static int roll_cpu(const OpCall *c) {
  struct roll_args a = *(const struct roll_args *)c->args;
  Part x, y;
  part_init(&x, &c->in[0]);
  part_init(&y, &c->out[0]);
  if (view_numel(&x.v) == 0) return 0;
  if (a.dims.n == 0) { /* as one row */
    if (!view_is_contiguous(&x.v)) {
      shape_contiguous(x.v.ndim, x.shape, x.stride);
      x.v.data = c->scratch;
      copy_views(&c->in[0], &x.v);
    }
    x.shape[0] = y.shape[0] = view_numel(&c->out[0]);
    x.stride[0] = y.stride[0] = 1;
    x.v.ndim = y.v.ndim = 1;
    a.dims = (IntList){1, {0}};
  } else if (x.v.ndim == 0) {
    return copy_views(&x.v, &y.v);
  }
  roll_from(&a, 0, &x, &y);
  return 0;
}

/* Entries moved by `shifts` in these dims, those that leave at the end coming in at the front.
 * Without dims, x is one row of all elements. */
OP(roll, .signature = "roll(Tensor x, int[] shifts, int[] dims=[]) -> Tensor",
   .sbp_rule = sbp_all_but_dim, .linear = "x", .infer = roll_infer, .cpu = roll_cpu,
   .scratch = roll_scratch)

/* -- tril, triu -------------------------------------------------------------------------------- */

static int tri_infer(Infer *I) {
  const Meta *x = I->in[0];
  char have[SHAPE_TEXT_MAX];
  if (x->ndim < 2)
    return infer_error(I, "x must have at least 2 dims, has shape %s",
                       shape_text(x->ndim, x->shape, have));
  return infer_same(I);
}

typedef struct TriJob {
  const View *x, *y;
  int64_t diagonal, row, column; /* first row and column of this part in the whole */
  bool lower;
} TriJob;

static int64_t clip(int64_t v, int64_t low, int64_t high) {
  return v < low ? low : v > high ? high : v;
}

/* Rows [begin, end) of all matrices: a kept and a zeroed piece each. */
static void tri_range(int64_t begin, int64_t end, void *arg) {
  const TriJob *j = arg;
  const View *x = j->x, *y = j->y;
  int last = y->ndim - 1;
  int64_t columns = y->shape[last], size = (int64_t)dtype_size((DType)y->dtype);
  static CopyMove *const moves[] = {copy_move1, copy_move2, copy_move4, copy_move8};
  CopyMove *move = moves[__builtin_ctz((unsigned)size)];
  static const uint64_t zero;
  for (int64_t r = begin; r < end; r++) {
    int64_t rest = r, from = 0, to = 0, row = 0;
    for (int d = last - 1; d >= 0; d--) {
      int64_t i = rest % y->shape[d];
      rest /= y->shape[d];
      from += i * x->stride[d];
      to += i * y->stride[d];
      if (d == last - 1) row = i;
    }
    int64_t edge = clip(row + j->row + j->diagonal - j->column + j->lower, 0, columns);
    int64_t keep = j->lower ? 0 : edge, kept = j->lower ? edge : columns - edge,
            drop = j->lower ? edge : 0;
    char *in = (char *)x->data + from * size, *out = (char *)y->data + to * size;
    if (in != out)
      move(kept, in + keep * x->stride[last] * size, x->stride[last],
           out + keep * y->stride[last] * size, y->stride[last]);
    move(columns - kept, &zero, 0, out + drop * y->stride[last] * size, y->stride[last]);
  }
}

static int tri_run(const OpCall *c, int64_t diagonal, bool lower) {
  const View *y = &c->out[0];
  int last = y->ndim - 1;
  int64_t n = view_numel(y);
  TriJob j = {.x = &c->in[0],
              .y = y,
              .lower = lower,
              .diagonal = clip(diagonal, -(INT64_C(1) << 60), INT64_C(1) << 60)};
  if (y->start) j.row = y->start[last - 1], j.column = y->start[last];
  if (n) mf_parallel(n / y->shape[last], 1 + COPY_GRAIN / y->shape[last], tri_range, &j);
  return 0;
}

static int tril_cpu(const OpCall *c) {
  return tri_run(c, ((const struct tril_args *)c->args)->diagonal, true);
}

/* The lower triangle of each matrix, zero above the diagonal; diagonal > 0 is above the main one.
 */
OP(tril, .signature = "tril(Tensor x, int diagonal=0) -> Tensor", .flags = OP_INPLACE | OP_INDEXED,
   .sbp = "... r c", .linear = "x", .infer = tri_infer, .cpu = tril_cpu)

static int triu_cpu(const OpCall *c) {
  return tri_run(c, ((const struct triu_args *)c->args)->diagonal, false);
}

/* The upper triangle of each matrix, zero below the diagonal; diagonal > 0 is above the main one.
 */
OP(triu, .signature = "triu(Tensor x, int diagonal=0) -> Tensor", .flags = OP_INPLACE | OP_INDEXED,
   .sbp = "... r c", .linear = "x", .infer = tri_infer, .cpu = triu_cpu)

/* -- one_hot ----------------------------------------------------------------------------------- */

static int one_hot_infer(Infer *I) {
  const struct one_hot_args *a = I->args;
  const Meta *x = I->in[0];
  int64_t shape[MF_MAX_DIMS + 1];
  if (dtype_is_float((DType)x->dtype) || x->dtype == BOOL)
    return infer_error(I, "x must hold whole numbers, is %s", dtype_name((DType)x->dtype));
  if (a->num_classes < 1)
    return infer_error(I, "num_classes must be at least 1, is %lld", (long long)a->num_classes);
  if (x->ndim == MF_MAX_DIMS)
    return infer_error(I, "a tensor can have at most %d dims", MF_MAX_DIMS);
  memcpy(shape, x->shape, sizeof x->shape);
  shape[x->ndim] = a->num_classes;
  return infer_shape(I, I64, x->ndim + 1, shape);
}

static int one_hot_cpu(const OpCall *c) {
  const struct one_hot_args *a = c->args;
  const View *x = &c->in[0];
  int64_t classes = a->num_classes, *y = c->out[0].data, at[MF_MAX_DIMS];
  char text[SHAPE_TEXT_MAX];
  for (int pass = 0; pass < 2; pass++) { /* first check, then write */
    if (pass) copy_zero(&c->out[0]);
    for (int64_t i = 0, n = view_numel(x); i < n; i++) {
      int64_t rest = i, offset = 0;
      for (int d = x->ndim - 1; d >= 0; d--) {
        at[d] = rest % x->shape[d];
        rest /= x->shape[d];
        offset += at[d] * x->stride[d];
      }
      int64_t v = dtype_get_i64((DType)x->dtype,
                                (char *)x->data + offset * (int64_t)dtype_size((DType)x->dtype));
      if (pass) y[i * classes + v] = 1;
      else if (v < 0 || v >= classes)
        return err_set(MF_EINVAL, "one_hot: x holds %lld at position %s; legal are 0 to %lld",
                       (long long)v, shape_text(x->ndim, at, text), (long long)(classes - 1));
    }
  }
  return 0;
}

/* A new last dim of size num_classes: 1 at the place that x names, else 0. */
OP(one_hot, .signature = "one_hot(Tensor x, int num_classes) -> Tensor",
   .flags = OP_NO_GRAD | OP_HIDDEN, .sbp = "... -> ... N", .infer = one_hot_infer,
   .cpu = one_hot_cpu)
