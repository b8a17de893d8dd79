/* Matrix products: matmul, bmm, addmm, linear and its weight gradient.
 *
 * All of them are one Product: c (..., m, n) = a (..., m, k) b (..., k, n) with explicit strides.
 * It is simplified first: batch dims over which b repeats join the rows, batch dims that lie in
 * order in all operands merge. Batches beyond two dims are looped over. float32 goes to oneDNN, and
 * bfloat16 where the CPU multiplies it; the other small floats are computed as float32, whole
 * numbers as int64, double by a blocked kernel here.
 *
 * An operand is copied into scratch, dense and converted, only where its dtype asks for it or
 * neither of its last two strides is 1. Scratch holds a's copy, b's copy, the bias, the result
 * when it is converted, then oneDNN's own. */
#include <math.h>

#include "copy_views.h"
#include "cpuid.h"
#include "dnn.h"
#include "gemm.h"
#include "op_args.h"
#include "sbp_rule.h"

enum { DNN_BATCH = 2, SMALL_WORK = 2048 };

typedef enum Kind { PLAIN, TRANSPOSED, WEIGHT } Kind; /* a b, a b', a' b over all rows */

typedef struct Product {
  int nb;
  int64_t batch[MF_MAX_DIMS], sa[MF_MAX_DIMS], sb[MF_MAX_DIMS], sc[MF_MAX_DIMS];
  int64_t m, k, n, am, ak, bk, bn, cm;
} Product;

/* An operand: read in place, or copied. */
typedef struct Side {
  View view; /* what is copied */
  int64_t dims[MF_MAX_DIMS + 2], strides[MF_MAX_DIMS + 2];
  bool copy;
  size_t at;
} Side;

typedef struct Scheme {
  Product p;
  DType compute; /* F32, BF16, F64 or I64 */
  Side a, b;
  const View *bias;
  bool copy_c, copy_bias;
  size_t at_bias, at_c, at_dnn, total;
  DnnMatmul dnn;
} Scheme;

/* -- Products ---------------------------------------------------------------------------------- */

/* The product of two operands as matmul sees them: 1-d ones are a row and a column. */
static void product_set(Product *p, const View *a, const View *b, const View *c, bool transposed) {
  bool rows = a->ndim > 1, cols = b->ndim > 1;
  int al = a->ndim - 1, bl = b->ndim - 1;
  p->nb = c->ndim - rows - cols;
  memcpy(p->batch, c->shape, sizeof(int64_t) * (size_t)p->nb);
  memcpy(p->sc, c->stride, sizeof(int64_t) * (size_t)p->nb);
  shape_broadcast_strides(p->nb, c->shape, rows ? al - 1 : 0, a->shape, a->stride, p->sa);
  shape_broadcast_strides(p->nb, c->shape, cols ? bl - 1 : 0, b->shape, b->stride, p->sb);
  p->m = rows ? a->shape[al - 1] : 1;
  p->am = rows ? a->stride[al - 1] : 0;
  p->k = a->shape[al];
  p->ak = a->stride[al];
  p->n = cols ? b->shape[transposed ? bl - 1 : bl] : 1;
  p->bn = cols ? b->stride[transposed ? bl - 1 : bl] : 0;
  p->bk = b->stride[cols && !transposed ? bl - 1 : bl];
  p->cm = p->n;
}

static void product_drop(Product *p, int d) {
  for (p->nb--; d < p->nb; d++) {
    p->batch[d] = p->batch[d + 1];
    p->sa[d] = p->sa[d + 1], p->sb[d] = p->sb[d + 1], p->sc[d] = p->sc[d + 1];
  }
}

static void product_simplify(Product *p) {
  for (int d = p->nb - 1; d >= 0; d--)
    if (p->batch[d] == 1) product_drop(p, d);
  for (int d = p->nb - 1; d > 0; d--) {
    int64_t n = p->batch[d];
    if (p->sa[d - 1] != p->sa[d] * n || p->sb[d - 1] != p->sb[d] * n ||
        p->sc[d - 1] != p->sc[d] * n)
      continue;
    p->batch[d] *= p->batch[d - 1];
    product_drop(p, d - 1);
  }
  for (; p->nb && p->sb[p->nb - 1] == 0; p->nb--) {
    int last = p->nb - 1;
    if (p->m == 1) p->am = p->sa[last], p->cm = p->sc[last];
    else if (p->sa[last] != p->am * p->m || p->sc[last] != p->cm * p->m) break;
    p->m *= p->batch[last];
  }
}

/* Whether a matrix can be read in place: one stride is 1 and the other no shorter than the lines.
 * The free stride of a single row or column is made so. */
static bool readable(int64_t rows, int64_t cols, int64_t *row, int64_t *col) {
  if (cols == 1) *col = 1;
  if (rows == 1) *row = *col == 1 ? cols : 1;
  return (*col == 1 && *row >= cols) || (*row == 1 && *col >= rows);
}

/* -- Schemes ----------------------------------------------------------------------------------- */

static size_t room(Scheme *s, int64_t elements, DType t) {
  return scratch_offset(&s->total, (size_t)elements * dtype_size(t));
}

/* One operand of a batched product; when it is copied, its strides become those of the copy. */
static void side_set(Scheme *s, Side *side, const View *v, bool convert, int64_t *batch,
                     int64_t rows, int64_t cols, int64_t *row, int64_t *col) {
  int n = s->p.nb;
  side->copy = !readable(rows, cols, row, col) || convert;
  if (!side->copy) return;
  for (int d = 0; d < n; d++) {
    side->dims[d] = batch[d] ? s->p.batch[d] : 1;
    side->strides[d] = batch[d];
  }
  side->dims[n] = rows, side->dims[n + 1] = cols;
  side->strides[n] = *row, side->strides[n + 1] = *col;
  side->view = *v;
  side->view.ndim = (int8_t)(n + 2);
  side->view.shape = side->dims, side->view.stride = side->strides;
  side->at = room(s, view_numel(&side->view), s->compute);
  int64_t dense[MF_MAX_DIMS + 2];
  shape_contiguous(n + 2, side->dims, dense);
  for (int d = 0; d < n; d++) batch[d] = side->dims[d] > 1 ? dense[d] : 0;
  *row = dense[n], *col = dense[n + 1];
}

/* An operand (..., cols) read as (rows, cols). */
static void side_set_rows(Scheme *s, Side *side, const View *v, bool convert, int64_t rows,
                          int64_t cols, int64_t *row, int64_t *col) {
  int64_t shape[2] = {rows, cols}, strides[2];
  side->copy = !shape_view_strides(v->ndim, v->shape, v->stride, 2, shape, strides) ||
               !readable(rows, cols, &strides[0], &strides[1]) || convert;
  *row = side->copy ? cols : strides[0];
  *col = side->copy ? 1 : strides[1];
  if (!side->copy) return;
  side->view = *v;
  side->at = room(s, rows * cols, s->compute);
}

static DType compute_type(DType t) {
  if (t == BF16 && cpuid_has_bf16()) return BF16;
  return t == F64 ? F64 : dtype_is_float(t) ? F32 : I64;
}

static bool is_dnn(const Scheme *s) {
  return s->compute == F32 || s->compute == BF16;
}

static bool is_small(const Product *p) {
  double work = (double)p->m * (double)p->n * (double)p->k; /* whole numbers could overflow */
  for (int d = 0; d < p->nb && work <= SMALL_WORK; d++) work *= (double)p->batch[d];
  return work <= SMALL_WORK;
}

static void scheme_dnn(Scheme *s, DnnAct act) {
  Product *p = &s->p;
  DnnMatmul *d = &s->dnn;
  *d = (DnnMatmul){.type = s->compute == BF16 ? DNN_BF16 : DNN_F32,
                   .act = act,
                   .bias = s->bias != NULL,
                   .batch_ndim = p->nb < DNN_BATCH ? p->nb : DNN_BATCH,
                   .m = p->m,
                   .k = p->k,
                   .n = p->n,
                   .a_m = p->am,
                   .a_k = p->ak,
                   .b_k = p->bk,
                   .b_n = p->bn,
                   .c_m = p->cm};
  for (int i = 0, from = p->nb - d->batch_ndim; i < d->batch_ndim; i++) {
    d->batch[i] = p->batch[from + i];
    d->a_batch[i] = p->sa[from + i];
    d->b_batch[i] = p->sb[from + i];
    d->c_batch[i] = p->sc[from + i];
  }
}

/* Depends on shapes and strides alone. With k = 0, or no output elements, there is no product and
 * nothing is needed. */
static void scheme_set(Scheme *s, const OpCall *c, Kind kind, const View *a, const View *b,
                       const View *bias, DnnAct act) {
  const View *out = &c->out[0];
  Product *p = &s->p;
  s->total = 0;
  s->compute = compute_type((DType)out->dtype);
  s->bias = bias && !view_absent(bias) ? bias : NULL;
  bool convert = s->compute != (DType)out->dtype;
  if (kind == WEIGHT) {
    *p = (Product){.m = out->shape[0], .n = out->shape[1], .cm = out->shape[1]};
    p->k = p->m ? view_numel(a) / p->m : 0;
    if (view_numel(out) == 0 || p->k == 0) return;
    side_set_rows(s, &s->a, a, convert, p->k, p->m, &p->ak, &p->am);
    side_set_rows(s, &s->b, b, convert, p->k, p->n, &p->bk, &p->bn);
  } else {
    product_set(p, a, b, out, kind == TRANSPOSED);
    if (view_numel(out) == 0 || p->k == 0) return;
    product_simplify(p);
    side_set(s, &s->a, a, convert, p->sa, p->m, p->k, &p->am, &p->ak);
    side_set(s, &s->b, b, convert, p->sb, p->k, p->n, &p->bk, &p->bn);
  }
  if (p->m == 1) p->cm = p->n;
  DType bias_type = is_dnn(s) ? F32 : s->compute;
  s->copy_c = convert;
  s->copy_bias = s->bias && (s->bias->dtype != bias_type || s->bias->stride[0] != 1);
  if (s->copy_bias) s->at_bias = room(s, p->n, bias_type);
  if (s->copy_c) s->at_c = room(s, view_numel(out), s->compute);
  if (!is_dnn(s) || (s->compute == F32 && is_small(p))) return;
  scheme_dnn(s, act);
  DnnCache *cache = dnn_cache(c->stream->device);
  s->at_dnn = s->total;
  if (cache) s->total += dnn_matmul_scratch(cache, &s->dnn);
}

/* -- Running ----------------------------------------------------------------------------------- */

/* One matrix of floats too small to be worth a primitive. */
static void small_f32(const Product *p, const float *a, const float *b, const float *bias,
                      float *c) {
  for (int64_t i = 0; i < p->m; i++) {
    for (int64_t j = 0; j < p->n; j++) {
      float sum = bias ? bias[j] : 0;
      for (int64_t q = 0; q < p->k; q++) sum += a[i * p->am + q * p->ak] * b[q * p->bk + j * p->bn];
      c[i * p->cm + j] = sum;
    }
  }
}

#define ADD_BIAS(name, T)                                             \
  static void name(const Product *p, const T *bias, T *c) {           \
    for (int64_t i = 0; bias && i < p->m; i++)                        \
      for (int64_t j = 0; j < p->n; j++) c[i * p->cm + j] += bias[j]; \
  }
ADD_BIAS(add_bias_f64, double)
ADD_BIAS(add_bias_i64, uint64_t)

static double act_of(double x, DnnAct act) {
  const double root = 0.70710678118654752440, scale = 0.79788456080286535588;
  if (act == DNN_RELU) return x < 0 ? 0 : x;
  if (act == DNN_GELU) return 0.5 * x * (1 + erf(x * root));
  if (act == DNN_GELU_TANH) return 0.5 * x * (1 + tanh(scale * (x + 0.044715 * x * x * x)));
  return x;
}

/* The activation of what oneDNN did not make: rows of cm elements, n of which count. */
static void act_rows(const Product *p, DnnAct act, DType t, char *c) {
  size_t size = dtype_size(t);
  for (int64_t i = 0; act != DNN_NONE && i < p->m; i++)
    for (int64_t j = 0; j < p->n; j++) {
      char *at = c + (size_t)(i * p->cm + j) * size;
      dtype_set_f64(t, at, act_of(dtype_get_f64(t, at), act));
    }
}

/* The innermost part: `inner` batch dims with their matrices, from these addresses. */
static int run_part(const Scheme *s, DnnCache *cache, const char *a, const char *b,
                    const void *bias, char *c, char *scratch, DnnAct act) {
  const Product *p = &s->p;
  if (s->compute == F64) {
    gemm_f64(p->m, p->k, p->n, a, p->am, p->ak, b, p->bk, p->bn, c, p->cm, 1);
    add_bias_f64(p, bias, (double *)c);
  } else if (s->compute == I64) {
    gemm_i64(p->m, p->k, p->n, a, p->am, p->ak, b, p->bk, p->bn, c, p->cm, 1);
    add_bias_i64(p, bias, (uint64_t *)c);
  } else if (cache) {
    return dnn_matmul(cache, &s->dnn, a, b, bias, c, scratch + s->at_dnn);
  } else {
    small_f32(p, (const float *)a, (const float *)b, bias, (float *)c);
  }
  act_rows(p, act, s->compute, c);
  return 0;
}

static int run_batches(const Scheme *s, DnnCache *cache, const char *a, const char *b,
                       const void *bias, char *c, char *scratch, DnnAct act) {
  const Product *p = &s->p;
  int outer = p->nb - (cache ? s->dnn.batch_ndim : 0);
  int64_t size = (int64_t)dtype_size(s->compute), n = shape_numel(outer, p->batch);
  for (int64_t i = 0; i < n; i++) {
    int64_t rest = i, at_a = 0, at_b = 0, at_c = 0;
    for (int d = outer - 1; d >= 0; d--) {
      int64_t x = rest % p->batch[d];
      rest /= p->batch[d];
      at_a += x * p->sa[d], at_b += x * p->sb[d], at_c += x * p->sc[d];
    }
    int rc =
        run_part(s, cache, a + at_a * size, b + at_b * size, bias, c + at_c * size, scratch, act);
    if (rc) return rc;
  }
  return 0;
}

static View dense_view(void *data, const View *like, DType t, int64_t *strides) {
  View v = *like;
  shape_contiguous(like->ndim, like->shape, strides);
  v.data = data;
  v.stride = strides;
  v.dtype = (uint8_t)t;
  return v;
}

/* Where an operand is read: in place or, copied, in scratch. */
static const char *operand(const Scheme *s, const Side *side, const View *v, char *scratch) {
  if (!side->copy) return v->data;
  int64_t strides[MF_MAX_DIMS + 2];
  View from = side->view, to;
  from.data = v->data;
  to = dense_view(scratch + side->at, &from, s->compute, strides);
  copy_views(&from, &to);
  return to.data;
}

static int product_act(const OpCall *c, Kind kind, const View *a, const View *b, const View *bias,
                       DnnAct act) {
  Scheme s;
  scheme_set(&s, c, kind, a, b, bias, act);
  const View *out = &c->out[0];
  int64_t strides[MF_MAX_DIMS];
  if (view_numel(out) == 0) return 0;
  if (s.p.k == 0) {
    memset(out->data, 0, (size_t)view_numel(out) * dtype_size((DType)out->dtype));
    int rc = s.bias ? copy_views(s.bias, out) : 0;
    Product all = {.m = 1, .n = view_numel(out)};
    if (!rc) act_rows(&all, act, (DType)out->dtype, out->data);
    return rc;
  }
  bool dnn = is_dnn(&s) && !(s.compute == F32 && is_small(&s.p));
  DnnCache *cache = dnn ? dnn_cache(c->stream->device) : NULL;
  if (dnn && !cache) return MF_ENOMEM;
  const char *pa = operand(&s, &s.a, a, c->scratch), *pb = operand(&s, &s.b, b, c->scratch);
  const void *pbias = s.bias ? s.bias->data : NULL;
  if (s.copy_bias) {
    View to =
        dense_view((char *)c->scratch + s.at_bias, s.bias, is_dnn(&s) ? F32 : s.compute, strides);
    copy_views(s.bias, &to);
    pbias = to.data;
  }
  char *pc = s.copy_c ? (char *)c->scratch + s.at_c : out->data;
  int rc = run_batches(&s, cache, pa, pb, pbias, pc, c->scratch, act);
  if (rc || !s.copy_c) return rc;
  View from = dense_view(pc, out, s.compute, strides);
  return copy_views(&from, out);
}

static int product_run(const OpCall *c, Kind kind, const View *a, const View *b, const View *bias) {
  return product_act(c, kind, a, b, bias, DNN_NONE);
}

static size_t product_scratch(const OpCall *c, Kind kind, const View *a, const View *b,
                              const View *bias) {
  Scheme s;
  scheme_set(&s, c, kind, a, b, bias, DNN_NONE);
  return s.total;
}

/* -- matmul, bmm ------------------------------------------------------------------------------- */

static int check_types(Infer *I, int a, int b) {
  int rc = infer_want_same_dtype(I, a, b);
  if (rc) return rc;
  if (I->in[a]->dtype == BOOL)
    return infer_error(I, "bool tensors have no product; use :long() or :float()");
  return 0;
}

static int inner_error(Infer *I, const Meta *a, const Meta *b) {
  char ta[SHAPE_TEXT_MAX], tb[SHAPE_TEXT_MAX];
  return infer_error(I, "inner sizes differ: a is %s, b is %s; a's last size must equal b's %s",
                     shape_text(a->ndim, a->shape, ta), shape_text(b->ndim, b->shape, tb),
                     b->ndim == 1   ? "size"
                     : b->ndim == 2 ? "first"
                                    : "last but one");
}

static int matmul_infer(Infer *I) {
  const Meta *a = I->in[0], *b = I->in[1];
  int rc = check_types(I, 0, 1);
  if (rc) return rc;
  if (a->ndim == 0 || b->ndim == 0)
    return infer_error(I, "%s is 0-d; a product with a number is written with *",
                       a->ndim ? "b" : "a");
  if (a->shape[a->ndim - 1] != b->shape[b->ndim > 1 ? b->ndim - 2 : 0]) return inner_error(I, a, b);
  int nd = 0, an = a->ndim > 1 ? a->ndim - 2 : 0, bn = b->ndim > 1 ? b->ndim - 2 : 0;
  int64_t shape[MF_MAX_DIMS];
  char ta[SHAPE_TEXT_MAX], tb[SHAPE_TEXT_MAX];
  if (!shape_broadcast(&nd, shape, an, a->shape) || !shape_broadcast(&nd, shape, bn, b->shape))
    return infer_error(
        I, "batch sizes do not broadcast: a is %s, b is %s; leading sizes must be equal or 1",
        shape_text(a->ndim, a->shape, ta), shape_text(b->ndim, b->shape, tb));
  if (a->ndim > 1) shape[nd++] = a->shape[a->ndim - 2];
  if (b->ndim > 1) shape[nd++] = b->shape[b->ndim - 1];
  return infer_shape(I, (DType)a->dtype, nd, shape);
}

static size_t matmul_scratch(const OpCall *c) {
  return product_scratch(c, PLAIN, &c->in[0], &c->in[1], NULL);
}

static int matmul_cpu(const OpCall *c) {
  return product_run(c, PLAIN, &c->in[0], &c->in[1], NULL);
}

/* Two per element of the result and of the inner dim, which is the last of `a`. */
static double inner_flops(const OpCall *c, const View *a) {
  return 2.0 * (double)view_numel(&c->out[0]) * (a->ndim ? (double)a->shape[a->ndim - 1] : 1);
}

static double matmul_flops(const OpCall *c) {
  return inner_flops(c, &c->in[0]);
}

static int matmul_sbp(SbpAsk *q) {
  bool row = q->in[0]->ndim == 1, column = q->in[1]->ndim == 1;
  if (row && column) return sbp_notation(q, "k, k ->");
  if (row) return sbp_notation(q, "k, ... k n -> ... n");
  return sbp_notation(q, column ? "... m k, k -> ... m" : "... m k, ... k n -> ... m n");
}

/* The matrix product (..., m, k) by (..., k, n); leading dims broadcast. A 1-d a is a row, a 1-d b
 * a column, and that dim is not in the result. */
OP(matmul, .signature = "matmul(Tensor a, Tensor b) -> Tensor", .sbp_rule = matmul_sbp,
   .linear = "a|b", .infer = matmul_infer, .cpu = matmul_cpu, .scratch = matmul_scratch,
   .flops = matmul_flops)

static int bmm_infer(Infer *I) {
  const Meta *a = I->in[0], *b = I->in[1];
  int rc = infer_want_ndim(I, 0, 3);
  if (!rc) rc = infer_want_ndim(I, 1, 3);
  if (rc) return rc;
  if (a->shape[0] != b->shape[0])
    return infer_error(I, "batch sizes differ: a has %lld, b has %lld; matmul would broadcast them",
                       (long long)a->shape[0], (long long)b->shape[0]);
  return matmul_infer(I);
}

/* The matrix products of two equally long batches: (b, m, k) by (b, k, n). */
OP(bmm, .signature = "bmm(Tensor a, Tensor b) -> Tensor", .sbp = "b m k, b k n -> b m n",
   .linear = "a|b", .infer = bmm_infer, .cpu = matmul_cpu, .scratch = matmul_scratch,
   .flops = matmul_flops)

/* -- addmm ------------------------------------------------------------------------------------- */

static int addmm_infer(Infer *I) {
  const Meta *c = I->in[0], *a = I->in[1], *b = I->in[2];
  int rc = infer_want_ndim(I, 1, 2);
  if (!rc) rc = infer_want_ndim(I, 2, 2);
  if (!rc) rc = check_types(I, 1, 2);
  if (!rc) rc = infer_want_same_dtype(I, 0, 1);
  if (rc) return rc;
  if (a->shape[1] != b->shape[0]) return inner_error(I, a, b);
  int nd = 2;
  int64_t shape[2] = {a->shape[0], b->shape[1]}, want[MF_MAX_DIMS] = {shape[0], shape[1]};
  char tc[SHAPE_TEXT_MAX], tw[SHAPE_TEXT_MAX];
  if (c->ndim > 2 || !shape_broadcast(&nd, want, c->ndim, c->shape) || want[0] != shape[0] ||
      want[1] != shape[1])
    return infer_error(I, "c of shape %s does not broadcast to the product's %s",
                       shape_text(c->ndim, c->shape, tc), shape_text(2, shape, tw));
  return infer_shape(I, (DType)a->dtype, 2, shape);
}

static size_t addmm_scratch(const OpCall *c) {
  return product_scratch(c, PLAIN, &c->in[1], &c->in[2], NULL);
}

static double addmm_flops(const OpCall *c) {
  return inner_flops(c, &c->in[1]);
}

typedef struct Blend {
  Walk walk;
  PointwiseClass cls;
  int dtype;
  double alpha, beta;
} Blend;

/* y = alpha * y + beta * c; with beta 0, c is not read, so that its NaN do not count. */
static void blend_range(int64_t begin, int64_t end, void *arg) {
  const Blend *j = arg;
  size_t width = j->cls == PW_F32 ? 4 : 8;
  BlockBuffer y, c;
  memset(&c, 0, sizeof c);
  for (int64_t i = begin; i < end; i += BLOCK) {
    int64_t n = end - i < BLOCK ? end - i : BLOCK;
    walk_rows(&j->walk, 0, i, n, block_loads[j->cls][j->dtype], &y, width, false);
    if (j->beta != 0) walk_rows(&j->walk, 1, i, n, block_loads[j->cls][j->dtype], &c, width, false);
    if (j->cls == PW_F32)
      for (int64_t k = 0; k < n; k++)
        y.f32[k] = (float)j->alpha * y.f32[k] + (float)j->beta * c.f32[k];
    else if (j->cls == PW_F64)
      for (int64_t k = 0; k < n; k++) y.f64[k] = j->alpha * y.f64[k] + j->beta * c.f64[k];
    else
      for (int64_t k = 0; k < n; k++)
        y.i64[k] = (int64_t)((uint64_t)dtype_f64_to_i64(j->alpha) * (uint64_t)y.i64[k] +
                             (uint64_t)dtype_f64_to_i64(j->beta) * (uint64_t)c.i64[k]);
    walk_rows(&j->walk, 0, i, n, block_stores[j->cls][j->dtype], &y, width, true);
  }
}

static int addmm_cpu(const OpCall *c) {
  const struct addmm_args *a = c->args;
  int rc = product_run(c, PLAIN, &c->in[1], &c->in[2], NULL);
  if (rc) return rc;
  Blend j = {.cls = block_class((DType)c->out[0].dtype),
             .dtype = c->out[0].dtype,
             .alpha = a->alpha,
             .beta = a->beta};
  walk_init(&j.walk, &c->out[0], 1, &c->in[0]);
  if (j.walk.numel) mf_parallel(j.walk.numel, COPY_GRAIN, blend_range, &j);
  return 0;
}

/* beta * c + alpha * (a b) for matrices a and b; c broadcasts to the product's shape. */
OP(addmm,
   .signature = "addmm(Tensor c, Tensor a, Tensor b, *, float beta=1, float alpha=1) -> Tensor",
   .sbp = "+ m n, m k, k n -> m n", .linear = "a|b", .infer = addmm_infer, .cpu = addmm_cpu,
   .scratch = addmm_scratch, .flops = addmm_flops)

/* -- linear ------------------------------------------------------------------------------------ */

static int linear_infer(Infer *I) {
  const Meta *x = I->in[0], *w = I->in[1], *b = I->in[2];
  int rc = infer_want_ndim(I, 1, 2);
  if (!rc) rc = check_types(I, 0, 1);
  if (!rc && b) rc = infer_want_same_dtype(I, 0, 2);
  if (rc) return rc;
  char tx[SHAPE_TEXT_MAX], tw[SHAPE_TEXT_MAX];
  if (x->ndim == 0 || x->shape[x->ndim - 1] != w->shape[1])
    return infer_error(I, "x is %s, w is %s; x's last size must equal w's last",
                       shape_text(x->ndim, x->shape, tx), shape_text(2, w->shape, tw));
  if (b && (b->ndim != 1 || b->shape[0] != w->shape[0]))
    return infer_error(I, "b is %s; expected (%lld), as w is %s", shape_text(b->ndim, b->shape, tx),
                       (long long)w->shape[0], shape_text(2, w->shape, tw));
  int64_t shape[MF_MAX_DIMS];
  memcpy(shape, x->shape, sizeof shape);
  shape[x->ndim - 1] = w->shape[0];
  return infer_shape(I, (DType)x->dtype, x->ndim, shape);
}

static size_t linear_scratch(const OpCall *c) {
  return product_scratch(c, TRANSPOSED, &c->in[0], &c->in[1], &c->in[2]);
}

static int linear_cpu(const OpCall *c) {
  return product_run(c, TRANSPOSED, &c->in[0], &c->in[1], &c->in[2]);
}

/* x w' + b: x (..., k), w (n, k), b (n) give (..., n). */
OP(linear, .signature = "linear(Tensor x, Tensor w, Tensor? b=None) -> Tensor",
   .sbp = "... k, n k, + n -> ... n", .linear = "x|w", .infer = linear_infer, .cpu = linear_cpu,
   .scratch = linear_scratch, .flops = matmul_flops)

/* -- Followed by an activation ----------------------------------------------------------------- */

static const DnnAct linear_acts[] = {DNN_RELU, DNN_GELU, DNN_GELU_TANH};

static int linear_act_infer(Infer *I) {
  int rc = infer_want_float(I, 0);
  return rc ? rc : linear_infer(I);
}

static size_t linear_act_scratch(const OpCall *c) {
  const struct linear_act_args *a = c->args;
  Scheme s;
  scheme_set(&s, c, TRANSPOSED, &c->in[0], &c->in[1], &c->in[2], linear_acts[a->act]);
  return s.total;
}

static int linear_act_cpu(const OpCall *c) {
  const struct linear_act_args *a = c->args;
  return product_act(c, TRANSPOSED, &c->in[0], &c->in[1], &c->in[2], linear_acts[a->act]);
}

/* linear, then an activation: gelu by the error function, or gelu_tanh by its usual approximation.
 * Made by the compiler for graphs whose gradients are there already. */
OP(linear_act,
   .signature =
       "linear_act(Tensor x, Tensor w, Tensor? b=None, *, str(relu|gelu|gelu_tanh) act=relu) -> "
       "Tensor",
   .flags = OP_HIDDEN | OP_NO_GRAD, .sbp = "... K, n K, n -> ... n", .infer = linear_act_infer,
   .cpu = linear_act_cpu, .scratch = linear_act_scratch, .flops = matmul_flops)

static int linear_weight_infer(Infer *I) {
  const Meta *g = I->in[0], *x = I->in[1];
  int rc = check_types(I, 0, 1);
  if (rc) return rc;
  int last = g->ndim - 1;
  if (g->ndim != x->ndim || g->ndim == 0 ||
      memcmp(g->shape, x->shape, sizeof(int64_t) * (size_t)last))
    return infer_error(I, "g and x must have equal leading sizes");
  return infer_shape(I, (DType)g->dtype, 2, (int64_t[]){g->shape[last], x->shape[last]});
}

static size_t linear_weight_scratch(const OpCall *c) {
  return product_scratch(c, WEIGHT, &c->in[0], &c->in[1], NULL);
}

static double linear_weight_flops(const OpCall *c) {
  return 2.0 * (double)view_numel(&c->in[0]) * (double)c->out[0].shape[1];
}

static int linear_weight_cpu(const OpCall *c) {
  return product_run(c, WEIGHT, &c->in[0], &c->in[1], NULL);
}

/* The gradient of linear's w: g (..., n) and x (..., k) give (n, k), summed over all rows. */
OP(linear_weight, .signature = "linear_weight(Tensor g, Tensor x) -> Tensor", .flags = OP_HIDDEN,
   .sbp = "... n, ... k -> n k", .linear = "g|x", .infer = linear_weight_infer,
   .cpu = linear_weight_cpu, .scratch = linear_weight_scratch, .flops = linear_weight_flops)
