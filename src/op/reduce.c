/* Reductions over dims. */
#include "block.h"
#include "op_args.h"
#include "thread.h"

/* -- sum_to: the gradient of broadcasting ------------------------------------------------------------------------------------- */

static int sum_to_infer(Infer *I) {
  const struct sum_to_args *a = I->args;
  return infer_shape(I, (DType)I->in[0]->dtype, (int)a->size.n, a->size.v);
}

/* Adds x into y, which is broadcast over it; accumulates in double or int64. One output element at a time: rows of what is summed. */
static int sum_to_cpu(const OpCall *c) {
  const View *x = &c->in[0], *y = &c->out[0];
  PointwiseClass cls = dtype_is_float((DType)y->dtype) ? PW_F64 : PW_I64;
  int64_t shape[MF_MAX_DIMS], kept[MF_MAX_DIMS], step[MF_MAX_DIMS];
  int shift = x->ndim - y->ndim;
  Walk inner = {.ndim = 0, .n = 1, .numel = 1};
  inner.size[0] = dtype_size((DType)x->dtype);
  int outer = 0;
  for (int d = 0; d < x->ndim; d++) {
    bool summed = d < shift || y->shape[d - shift] != x->shape[d];
    if (summed) {
      inner.shape[inner.ndim] = x->shape[d];
      inner.step[0][inner.ndim++] = x->stride[d];
      inner.numel *= x->shape[d];
    } else {
      shape[outer] = x->shape[d];
      kept[outer] = x->stride[d];
      step[outer++] = y->stride[d - shift];
    }
  }
  int64_t n = shape_numel(outer, shape);
  for (int64_t i = 0; i < n; i++) {
    int64_t rest = i, from = 0, to = 0;
    for (int d = outer - 1; d >= 0; d--) {
      from += rest % shape[d] * kept[d];
      to += rest % shape[d] * step[d];
      rest /= shape[d];
    }
    BlockBuffer b;
    double f = 0;
    uint64_t u = 0;
    inner.data[0] = (char *)x->data + from * (int64_t)inner.size[0];
    for (int64_t at = 0; at < inner.numel; at += BLOCK) {
      int64_t m = inner.numel - at < BLOCK ? inner.numel - at : BLOCK;
      walk_rows(&inner, 0, at, m, block_loads[cls][x->dtype], &b, 8, false);
      for (int64_t k = 0; k < m; k++) cls == PW_F64 ? (f += b.f64[k]) : (double)(u += (uint64_t)b.i64[k]);
    }
    char *out = (char *)y->data + to * (int64_t)dtype_size((DType)y->dtype);
    if (cls == PW_F64) dtype_set_f64((DType)y->dtype, out, f);
    else dtype_set_i64((DType)y->dtype, out, (int64_t)u);
  }
  return 0;
}

/* x summed over the dims in which `size` is broadcast to x's shape. */
OP(sum_to, .signature = "sum_to(Tensor x, int[] size) -> Tensor", .flags = OP_HIDDEN, .infer = sum_to_infer, .cpu = sum_to_cpu)
