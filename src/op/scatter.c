/* gather, scatter, scatter_add: single elements by an index along one dim.
 *
 * The index has as many dims as x. Its element at (i, j, k) names the place along `dim`; the other
 * coordinates are its own. A line is what lies along `dim` at one place of the other dims. Writing
 * is split by lines, so that repeated indices meet in one thread and in order. */
#include <stdatomic.h>

#include "copy_views.h"
#include "op_args.h"
#include "rows_add.h"
#include "sbp_rule.h"

enum { LINES_GRAIN = 1 << 14 };

/* -- Inference --------------------------------------------------------------------------------- */

/* index (input k) must have x's number of dims, and sizes not above those of x but along dim. */
static int want_along(Infer *I, const Meta *x, int k, int64_t *dim) {
  const Meta *i = I->in[k];
  char have[SHAPE_TEXT_MAX], want[SHAPE_TEXT_MAX], name[64];
  int rc = infer_dim(I, "dim", dim, x->ndim);
  if (rc) return rc;
  infer_name(I, k, name, sizeof name);
  if (dtype_is_float((DType)i->dtype) || i->dtype == BOOL)
    return infer_error(I, "%s must hold whole numbers, is %s", name, dtype_name((DType)i->dtype));
  bool fits = i->ndim == x->ndim || (i->ndim <= 1 && x->ndim <= 1);
  for (int d = 0; fits && d < i->ndim && d < x->ndim; d++)
    fits = d == *dim || i->shape[d] <= x->shape[d] || meta_numel(i) == 0;
  if (fits) return 0;
  return infer_error(
      I, "%s is %s, x is %s; it must have as many dims, and no size above x's but in dim %lld",
      name, shape_text(i->ndim, i->shape, have), shape_text(x->ndim, x->shape, want),
      (long long)*dim);
}

static int gather_infer(Infer *I) {
  struct gather_args *a = I->args;
  const Meta *index = I->in[1];
  int rc = want_along(I, I->in[0], 1, &a->dim);
  return rc ? rc : infer_shape(I, (DType)I->in[0]->dtype, index->ndim, index->shape);
}

static int gather_backward_infer(Infer *I) {
  struct gather_backward_args *a = I->args;
  Meta x = *I->in[0];
  int rc = shape_check(I->op->name, (int)a->size.n, a->size.v, (DType)x.dtype);
  if (rc) return rc;
  x.ndim = (int8_t)a->size.n;
  memcpy(x.shape, a->size.v, sizeof(int64_t) * (size_t)a->size.n);
  rc = want_along(I, &x, 1, &a->dim);
  if (!rc) rc = infer_want_same_shape(I, 0, 1);
  return rc ? rc : infer_shape(I, (DType)x.dtype, x.ndim, x.shape);
}

/* x, index, src: src is a number, or at least as large as index. */
static int write_along_infer(Infer *I, int64_t *dim) {
  const Meta *x = I->in[0], *index = I->in[1], *src = I->in[2];
  char have[SHAPE_TEXT_MAX], want[SHAPE_TEXT_MAX], name[64];
  int rc = want_along(I, x, 1, dim);
  if (rc) return rc;
  infer_name(I, 2, name, sizeof name);
  if (!src->number) {
    bool fits = src->ndim == index->ndim;
    for (int d = 0; fits && d < src->ndim; d++) fits = src->shape[d] >= index->shape[d];
    if (!fits)
      return infer_error(I, "%s is %s, index is %s; it must be at least as large in every dim",
                         name, shape_text(src->ndim, src->shape, have),
                         shape_text(index->ndim, index->shape, want));
    if (src->dtype != x->dtype)
      return infer_error(I, "%s is %s, x is %s; convert it first", name,
                         dtype_name((DType)src->dtype), dtype_name((DType)x->dtype));
  }
  return infer_same(I);
}

/* -- Lines ------------------------------------------------------------------------------------- */

typedef struct Lines {
  int ndim; /* dims of the index but for `dim` */
  int64_t shape[MF_MAX_DIMS], index_step[MF_MAX_DIMS], x_step[MF_MAX_DIMS], dense_step[MF_MAX_DIMS];
  int64_t length, index_along, x_along, dense_along;
  int64_t count; /* product of shape */
  int64_t limit;
  BlockConvert *load;
  const char *index;
  char *x, *dense;
  size_t index_size, size;
  int mode; /* LINES_* */
  DType dtype;
  atomic_llong bad; /* the first line with an index out of range, or count */
} Lines;

enum { LINES_CHECK, LINES_TAKE, LINES_SET, LINES_ADD };

static void lines_init(Lines *l, const View *index, const View *x, const View *dense, int64_t dim,
                       int mode) {
  memset(l, 0, sizeof *l);
  l->count = 1;
  l->mode = mode;
  l->dtype = (DType)x->dtype;
  l->size = dtype_size(l->dtype);
  l->index_size = dtype_size((DType)index->dtype);
  l->load = block_loads[PW_I64][index->dtype];
  l->index = index->data;
  l->x = x->data;
  l->dense = dense->data;
  l->length = index->ndim ? index->shape[dim] : 1;
  l->limit = x->ndim ? x->shape[dim] : 1;
  l->index_along = index->ndim ? index->stride[dim] : 1;
  l->x_along = x->ndim ? x->stride[dim] : 1;
  l->dense_along = dense->ndim ? dense->stride[dim] : 0;
  for (int d = 0; d < index->ndim; d++) {
    if (d == dim) continue;
    l->shape[l->ndim] = index->shape[d];
    l->index_step[l->ndim] = index->stride[d];
    l->x_step[l->ndim] = x->stride[d];
    l->dense_step[l->ndim++] = dense->ndim ? dense->stride[d] : 0;
    l->count *= index->shape[d];
  }
}

#define LINES_MOVE(T)                                                                            \
  static void lines_move_##T(int mode, int64_t n, const int64_t *ids, int64_t x_along, void *x_, \
                             void *dense_, int64_t along) {                                      \
    T *x = x_, *dense = dense_;                                                                  \
    if (mode == LINES_TAKE)                                                                      \
      for (int64_t i = 0; i < n; i++) dense[i * along] = x[ids[i] * x_along];                    \
    else                                                                                         \
      for (int64_t i = 0; i < n; i++) x[ids[i] * x_along] = dense[i * along];                    \
  }
LINES_MOVE(uint8_t)
LINES_MOVE(uint16_t)
LINES_MOVE(uint32_t)
LINES_MOVE(uint64_t)

static void lines_add(const Lines *l, int64_t n, const int64_t *ids, char *x, char *dense) {
  if (l->dtype == F32) {
    for (int64_t i = 0; i < n; i++)
      ((float *)(void *)x)[ids[i] * l->x_along] +=
          ((const float *)(void *)dense)[i * l->dense_along];
  } else {
    for (int64_t i = 0; i < n; i++) {
      int64_t offset = ids[i] * l->x_along;
      rows_add[l->dtype](1, &offset, 1, x, dense + i * l->dense_along * (int64_t)l->size, 0);
    }
  }
}

static void lines_part(Lines *l, int64_t n, const int64_t *ids, char *x, char *dense) {
  switch (l->size) {
    case 1: lines_move_uint8_t(l->mode, n, ids, l->x_along, x, dense, l->dense_along); break;
    case 2: lines_move_uint16_t(l->mode, n, ids, l->x_along, x, dense, l->dense_along); break;
    case 4: lines_move_uint32_t(l->mode, n, ids, l->x_along, x, dense, l->dense_along); break;
    default: lines_move_uint64_t(l->mode, n, ids, l->x_along, x, dense, l->dense_along); break;
  }
}

static bool ids_wrong(const Lines *l, int64_t n, const int64_t *ids) {
  int64_t wrong = 0;
  for (int64_t k = 0; k < n; k++) wrong |= (ids[k] < 0) | (ids[k] >= l->limit);
  return wrong;
}

static void lines_range(int64_t begin, int64_t end, void *arg) {
  Lines *l = arg;
  int64_t ids[BLOCK];
  for (int64_t line = begin; line < end; line++) {
    int64_t rest = line, at = 0, x = 0, dense = 0;
    for (int d = l->ndim - 1; d >= 0; d--) {
      int64_t i = rest % l->shape[d];
      rest /= l->shape[d];
      at += i * l->index_step[d];
      x += i * l->x_step[d];
      dense += i * l->dense_step[d];
    }
    for (int64_t k = 0; k < l->length; k += BLOCK) {
      int64_t n = l->length - k < BLOCK ? l->length - k : BLOCK;
      l->load(n, l->index + (at + k * l->index_along) * (int64_t)l->index_size, l->index_along,
              ids);
      char *px = l->x + x * (int64_t)l->size,
           *pd = l->dense + (dense + k * l->dense_along) * (int64_t)l->size;
      if (l->mode == LINES_ADD) {
        lines_add(l, n, ids, px, pd);
      } else if (l->mode != LINES_CHECK) {
        lines_part(l, n, ids, px, pd);
      } else if (ids_wrong(l, n, ids)) {
        long long was = atomic_load(&l->bad);
        while (line < was && !atomic_compare_exchange_weak(&l->bad, &was, line)) {
        }
        return;
      }
    }
  }
}

static void lines_run(Lines *l) {
  int64_t grain = l->length ? LINES_GRAIN / l->length : LINES_GRAIN;
  if (l->length) mf_parallel(l->count, grain ? grain : 1, lines_range, l);
}

/* The error for the first wrong index of line `bad`. */
static int lines_error(const OpCall *c, const View *index, int64_t dim, const Lines *l,
                       int64_t bad) {
  int64_t at[MF_MAX_DIMS] = {0}, offset = 0, value = 0;
  char text[SHAPE_TEXT_MAX];
  for (int d = index->ndim - 1; d >= 0; d--) {
    if (d == dim) continue;
    at[d] = bad % index->shape[d];
    bad /= index->shape[d];
    offset += at[d] * index->stride[d];
  }
  int64_t k = 0;
  for (; k < l->length; k++) {
    value = dtype_get_i64((DType)index->dtype,
                          l->index + (offset + k * l->index_along) * (int64_t)l->index_size);
    if (value < 0 || value >= l->limit) break;
  }
  if (index->ndim) at[dim] = k;
  if (l->limit == 0)
    return err_set(MF_EINVAL, "%s: index holds %lld, but dim %lld has size 0", c->op->name,
                   (long long)value, (long long)dim);
  return err_set(MF_EINVAL, "%s: index holds %lld at position %s; legal are 0 to %lld", c->op->name,
                 (long long)value, shape_text(index->ndim, at, text), (long long)(l->limit - 1));
}

static int lines_check(const OpCall *c, const View *index, const View *x, int64_t dim) {
  Lines l;
  lines_init(&l, index, x, index, dim, LINES_CHECK);
  l.size = 0;
  atomic_init(&l.bad, l.count);
  lines_run(&l);
  int64_t bad = atomic_load(&l.bad);
  return bad == l.count ? 0 : lines_error(c, index, dim, &l, bad);
}

/* -- gather ------------------------------------------------------------------------------------ */

static int gather_cpu(const OpCall *c) {
  const struct gather_args *a = c->args;
  int rc = lines_check(c, &c->in[1], &c->in[0], a->dim);
  if (rc) return rc;
  Lines l;
  lines_init(&l, &c->in[1], &c->in[0], &c->out[0], a->dim, LINES_TAKE);
  lines_run(&l);
  return 0;
}

/* y[i, j, k] = x[i, index[i, j, k], k] for dim 1, and so on for others. */
OP(gather, .signature = "gather(Tensor x, dim dim, Tensor index) -> Tensor",
   .sbp_rule = sbp_all_but_dim, .linear = "x", .infer = gather_infer, .cpu = gather_cpu)

static int gather_backward_cpu(const OpCall *c) {
  const struct gather_backward_args *a = c->args;
  int rc = lines_check(c, &c->in[1], &c->out[0], a->dim);
  if (rc) return rc;
  Lines l;
  copy_zero(&c->out[0]);
  lines_init(&l, &c->in[1], &c->out[0], &c->in[0], a->dim, LINES_ADD);
  lines_run(&l);
  return 0;
}

/* The gradient of gather: zeros of shape `size` with the elements of g added where they came from.
 */
OP(gather_backward,
   .signature = "gather_backward(Tensor g, Tensor index, int[] size, int dim) -> Tensor",
   .flags = OP_HIDDEN, .sbp_rule = sbp_all_but_dim, .linear = "g", .infer = gather_backward_infer,
   .cpu = gather_backward_cpu)

/* -- scatter ----------------------------------------------------------------------------------- */

static int write_along(const OpCall *c, int64_t dim, int mode) {
  int rc = lines_check(c, &c->in[1], &c->out[0], dim);
  if (rc) return rc;
  Lines l;
  View src = c->in[2];
  uint64_t number;
  if (c->in[0].data != c->out[0].data) copy_views(&c->in[0], &c->out[0]);
  if (src.number) {
    int64_t one = 1;
    copy_views(
        &src,
        &(View){
            .data = &number, .shape = &one, .stride = &one, .ndim = 1, .dtype = c->out[0].dtype});
    src.data = &number;
  }
  lines_init(&l, &c->in[1], &c->out[0], &src, dim, mode);
  lines_run(&l);
  return 0;
}

static int scatter_infer(Infer *I) {
  return write_along_infer(I, &((struct scatter_args *)I->args)->dim);
}
static int scatter_cpu(const OpCall *c) {
  return write_along(c, ((const struct scatter_args *)c->args)->dim, LINES_SET);
}

/* x with y[i, index[i, j, k], k] = src[i, j, k] for dim 1, and so on. The last of repeated places
 * wins. */
OP(scatter, .signature = "scatter(Tensor x, dim dim, Tensor index, Tensor|number src) -> Tensor",
   .flags = OP_INPLACE | OP_PLACES, .sbp_rule = sbp_all_but_dim, .linear = "x+src",
   .infer = scatter_infer, .cpu = scatter_cpu)

static int scatter_add_infer(Infer *I) {
  return write_along_infer(I, &((struct scatter_add_args *)I->args)->dim);
}
static int scatter_add_cpu(const OpCall *c) {
  return write_along(c, ((const struct scatter_add_args *)c->args)->dim, LINES_ADD);
}

/* x with src[i, j, k] added at [i, index[i, j, k], k] for dim 1, and so on. */
OP(scatter_add,
   .signature = "scatter_add(Tensor x, dim dim, Tensor index, Tensor|number src) -> Tensor",
   .flags = OP_INPLACE, .sbp_rule = sbp_all_but_dim, .linear = "x+src", .infer = scatter_add_infer,
   .cpu = scatter_add_cpu)
