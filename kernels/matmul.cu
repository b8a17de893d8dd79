/* Products of matrices: operands are described to the vendor's function as they lie in memory, and
 * copied only where neither their rows nor their columns are contiguous. Batches that lie at equal
 * distances are one call. */
#include "vendor.h"

/* A matrix of rows and columns at the end of a view, and the batch dims before. */
struct Matrix {
  View v;
  int64_t shape[MF_MAX_DIMS + 2], stride[MF_MAX_DIMS + 2];
};

static void matrix_bind(Matrix *m, const View *v, int ndim) {
  m->v = *v;
  m->v.ndim = (int8_t)ndim;
  m->v.shape = m->shape;
  m->v.stride = m->stride;
}

/* v with a dim of size 1 where it is a row (side 0) or a column (side 1) alone. */
static void matrix_of(Matrix *m, const View *v, bool alone, int side) {
  int ndim = v->ndim + alone, one = alone ? ndim - 2 + side : -1;
  for (int d = 0, from = 0; d < ndim; d++) {
    m->shape[d] = d == one ? 1 : v->shape[from];
    m->stride[d] = d == one ? 0 : v->stride[from];
    from += d != one;
  }
  matrix_bind(m, v, ndim);
}

/* All leading dims as rows: false where they do not lie as one. */
static bool matrix_flat(Matrix *m, const View *v) {
  int last = v->ndim - 1;
  int64_t rows = 1, step = 0;
  for (int d = last - 1; d >= 0; d--) {
    if (v->shape[d] == 1) continue;
    if (rows > 1 && v->stride[d] != rows * step) return false;
    if (rows == 1) step = v->stride[d];
    rows *= v->shape[d];
  }
  m->shape[0] = rows, m->shape[1] = v->shape[last];
  m->stride[0] = step, m->stride[1] = v->stride[last];
  matrix_bind(m, v, 2);
  return true;
}

/* How its rows lie: *turned where columns are contiguous; false where neither are. */
static bool lies(const Matrix *m, bool *turned, int64_t *ld) {
  int d = m->v.ndim - 2;
  int64_t rows = m->shape[d], columns = m->shape[d + 1], down = m->stride[d],
          along = m->stride[d + 1];
  *turned = false;
  *ld = columns > 1 ? columns : 1;
  if ((along == 1 || columns <= 1) && (rows <= 1 || down >= *ld)) {
    if (rows > 1) *ld = down;
    return true;
  }
  *turned = true;
  *ld = rows > 1 ? rows : 1;
  if ((down == 1 || rows <= 1) && (columns <= 1 || along >= *ld)) {
    if (columns > 1) *ld = along;
    return true;
  }
  return false;
}

/* Bytes of a copy without gaps. */
static size_t copy_bytes(const View *v) {
  return scratch_aligned((size_t)view_numel(v) * dtype_size((DType)v->dtype));
}
static int copy_to(const OpCall *c, Matrix *m, const View *from, char *at) {
  int64_t step = 1;
  m->v = *from;
  for (int d = from->ndim - 1; d >= 0; d--) {
    m->shape[d] = from->shape[d];
    m->stride[d] = step;
    step *= from->shape[d];
  }
  matrix_bind(m, from, from->ndim);
  m->v.data = at;
  return copy_launch(c, from, &m->v);
}

/* One call for each place of the outer batch dims. */
static int product_batches(const OpCall *c, Gemm *g, const Matrix *a, const Matrix *b,
                           const Matrix *y) {
  Walk<3> w;
  View out = y->v, in[2] = {a->v, b->v};
  out.ndim -= 2, in[0].ndim -= 2, in[1].ndim -= 2;
  walk_init(&w, &out, 2, in);
  int64_t size = (int64_t)dtype_size((DType)y->v.dtype), outer = w.numel;
  int inner = w.ndim - 1;
  if (!w.numel) return 0;
  g->batch = inner >= 0 ? w.shape[inner] : 1;
  g->c_batch = inner >= 0 ? w.step[0][inner] : 0;
  g->a_batch = inner >= 0 ? w.step[1][inner] : 0;
  g->b_batch = inner >= 0 ? w.step[2][inner] : 0;
  outer /= g->batch;
  for (int64_t i = 0; i < outer; i++) {
    int64_t rest = i, at[3] = {0, 0, 0};
    for (int d = inner - 1; d >= 0; d--) {
      for (int k = 0; k < 3; k++) at[k] += rest % w.shape[d] * w.step[k][d];
      rest /= w.shape[d];
    }
    g->c = (char *)y->v.data + at[0] * size;
    g->a = (const char *)a->v.data + at[1] * size;
    g->b = (const char *)b->v.data + at[2] * size;
    int rc = vendor_gemm(c, g);
    if (rc) return rc;
  }
  return 0;
}

/* y = alpha a b + beta y + bias; y's rows or columns are contiguous. */
static int product(const OpCall *c, Matrix *a, Matrix *b, Matrix *y, const View *bias, double alpha,
                   double beta, VendorAct act = VENDOR_ACT_NONE) {
  Gemm g = {};
  bool turned;
  int last = y->v.ndim - 1;
  if (!dtype_is_float((DType)y->v.dtype))
    return err_set(MF_EUNSUPPORTED, "%s: has no kernel for %s on %s", c->op->name,
                   dtype_name((DType)y->v.dtype), c->stream->device->name);
  g.m = y->shape[last - 1], g.n = y->shape[last];
  g.k = a->shape[a->v.ndim - 1];
  if (!view_numel(&y->v)) return 0;
  if (!g.k && beta == 0) {
    int rc = copy_fill(c, &y->v, 0);
    if (!rc && bias) rc = copy_launch(c, bias, &y->v);
    return rc || act == VENDOR_ACT_NONE ? rc : act_launch(c, &y->v, act);
  }
  if (!g.k) return 0;
  size_t room_a = lies(a, &g.a_turned, &g.lda) ? 0 : copy_bytes(&a->v);
  size_t room_b = lies(b, &g.b_turned, &g.ldb) ? 0 : copy_bytes(&b->v);
  bool plain_bias = !bias || bias->shape[0] == 1 || bias->stride[0] == 1;
  size_t room_bias = plain_bias ? 0 : copy_bytes(bias);
  char *room = NULL;
  if (room_a + room_b + room_bias &&
      !(room = (char *)kernel_scratch(c, room_a + room_b + room_bias)))
    return MF_ENOMEM;
  Matrix copied[3];
  int rc = room_a ? copy_to(c, &copied[0], &a->v, room) : 0;
  if (!rc && room_b) rc = copy_to(c, &copied[1], &b->v, room + room_a);
  if (!rc && room_bias) rc = copy_to(c, &copied[2], bias, room + room_a + room_b);
  if (rc) return rc;
  if (room_a) a = &copied[0], lies(a, &g.a_turned, &g.lda);
  if (room_b) b = &copied[1], lies(b, &g.b_turned, &g.ldb);
  lies(y, &turned, &g.ldc);
  g.bias = bias ? room_bias ? copied[2].v.data : bias->data : NULL;
  g.dtype = g.c_dtype = y->v.dtype;
  g.act = vendor_gemm_acts(g.dtype, act) ? act : VENDOR_ACT_NONE;
  g.alpha = alpha, g.beta = beta;
  rc = product_batches(c, &g, a, b, y);
  return rc || g.act == act ? rc : act_launch(c, &y->v, act);
}

/* -- The ops ----------------------------------------------------------------------------------- */

static int matmul_cuda(const OpCall *c) {
  const View *x = &c->in[0], *w = &c->in[1], *out = &c->out[0];
  bool row = x->ndim == 1, column = w->ndim == 1;
  Matrix a, b, y, middle;
  matrix_of(&a, x, row, 0);
  matrix_of(&b, w, column, 1);
  matrix_of(&middle, out, row, row && column ? 1 : 0);
  if (row && column) { /* (k) (k) give 0-d */
    y.shape[0] = y.shape[1] = 1, y.stride[0] = y.stride[1] = 1;
    matrix_bind(&y, out, 2);
  } else if (column) {
    matrix_of(&y, out, true, 1);
  } else {
    y = middle;
    matrix_bind(&y, out, middle.v.ndim);
  }
  int batch = y.v.ndim - 2;
  for (int k = 0; k < 2; k++) { /* batch dims broadcast to the result's */
    Matrix *m = k ? &b : &a, wide = *m;
    int shift = batch - (m->v.ndim - 2);
    for (int d = batch + 1; d >= 0; d--) {
      bool has = d >= shift, grows = has && d < batch && m->shape[d - shift] == 1;
      wide.shape[d] = d < batch ? y.shape[d] : m->shape[d - shift];
      wide.stride[d] = has && !grows ? m->stride[d - shift] : 0;
    }
    View v = m->v;
    *m = wide;
    matrix_bind(m, &v, batch + 2);
  }
  return product(c, &a, &b, &y, NULL, 1, 0);
}
KERNEL(matmul, matmul_cuda)
KERNEL(bmm, matmul_cuda)

static int addmm_cuda(const OpCall *c) {
  const struct addmm_args *args = (const struct addmm_args *)c->args;
  Matrix a, b, y;
  matrix_of(&a, &c->in[1], false, 0);
  matrix_of(&b, &c->in[2], false, 0);
  matrix_of(&y, &c->out[0], false, 0);
  int rc = args->beta != 0 ? copy_launch(c, &c->in[0], &c->out[0]) : 0;
  return rc ? rc : product(c, &a, &b, &y, NULL, args->alpha, args->beta);
}
KERNEL(addmm, addmm_cuda)

/* The flattened form of v, by a copy in scratch where it has none. */
static int flattened(const OpCall *c, Matrix *m, const View *v) {
  if (matrix_flat(m, v)) return 0;
  Matrix copy;
  char *at = (char *)kernel_scratch(c, copy_bytes(v));
  int rc = at ? copy_to(c, &copy, v, at) : MF_ENOMEM;
  if (!rc) matrix_flat(m, &copy.v);
  return rc;
}

/* m with rows and columns exchanged. */
static void matrix_turn(Matrix *m) {
  int64_t t = m->shape[0];
  m->shape[0] = m->shape[1], m->shape[1] = t;
  t = m->stride[0], m->stride[0] = m->stride[1], m->stride[1] = t;
}

static int linear(const OpCall *c, VendorAct act) {
  Matrix a, b, y;
  int rc = flattened(c, &a, &c->in[0]);
  matrix_of(&b, &c->in[1], false, 0);
  matrix_turn(&b);
  b.v.shape = b.shape, b.v.stride = b.stride;
  if (rc || !matrix_flat(&y, &c->out[0])) return rc ? rc : MF_EINVAL;
  a.v.shape = a.shape, a.v.stride = a.stride;
  return product(c, &a, &b, &y, view_absent(&c->in[2]) ? NULL : &c->in[2], 1, 0, act);
}

static int linear_cuda(const OpCall *c) {
  return linear(c, VENDOR_ACT_NONE);
}
KERNEL(linear, linear_cuda)

static int linear_act_cuda(const OpCall *c) {
  static const VendorAct acts[] = {VENDOR_ACT_RELU, VENDOR_ACT_GELU, VENDOR_ACT_GELU_TANH};
  return linear(c, acts[((const struct linear_act_args *)c->args)->act]);
}
KERNEL(linear_act, linear_act_cuda)

static int linear_weight_cuda(const OpCall *c) {
  Matrix g, x, y;
  int rc = flattened(c, &g, &c->in[0]);
  if (!rc) rc = flattened(c, &x, &c->in[1]);
  if (rc) return rc;
  g.v.shape = g.shape, g.v.stride = g.stride;
  x.v.shape = x.shape, x.v.stride = x.stride;
  matrix_turn(&g);
  matrix_of(&y, &c->out[0], false, 0);
  return product(c, &g, &x, &y, NULL, 1, 0);
}
KERNEL(linear_weight, linear_weight_cuda)
