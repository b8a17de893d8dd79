/* gather, scatter, scatter_add: single elements by an index along one dim. Bytes: index, and the
 * two sides where it names them.
 *
 * gather has a thread an element. What writes has a thread a line along dim, which goes through its
 * indices in order: repeated ones meet in one thread, sums are the same in every run, and the last
 * of several written to one place stays. */
#include "kernel.cuh"

enum { SCATTER_BLOCK = 256, SCATTER_TAKE = 0, SCATTER_SET, SCATTER_ADD };

struct ScatterParams {
  Walk<3> walk; /* over the index's elements, or lines: index, x, the dense side */
  int64_t n, along[3], limit;
  int mode, size, op;
  bool number;
  uint64_t bits;
  DeviceError *error;
};

/* Element k of a line whose operands are at at[]. */
static __device__ __forceinline__ void scatter_element(const ScatterParams &p, const int64_t *at,
                                                       int64_t k) {
  int64_t place = at[0] + k * p.along[0], dense = p.number ? 0 : at[2] + k * p.along[2];
  int64_t v = load_as<int64_t>(p.walk.dtype[0], p.walk.data[0], place);
  if (v < 0 || v >= p.limit) return report_range(p.error, p.op, 1, v, place, 0, p.limit - 1);
  void *from = p.number ? (void *)&p.bits : p.walk.data[2];
  int64_t x = at[1] + v * p.along[1];
  if (p.mode == SCATTER_TAKE) move_element(p.size, p.walk.data[2], dense, p.walk.data[1], x);
  else if (p.mode == SCATTER_SET) move_element(p.size, p.walk.data[1], x, from, dense);
  else add_element(p.walk.dtype[1], p.walk.data[1], x, from, dense);
}

static __global__ void __launch_bounds__(SCATTER_BLOCK)
    scatter_lines(const __grid_constant__ ScatterParams p) {
  int64_t at[3], i = (int64_t)blockIdx.x * SCATTER_BLOCK + threadIdx.x;
  if (i >= p.walk.numel) return;
  walk_at(p.walk, 3, i, at);
  for (int64_t k = 0; k < p.n; k++) scatter_element(p, at, k);
}

/* The dims of v but for dim, seen with the index's sizes. */
static View without(const View *v, const View *index, int64_t dim, int64_t *shape,
                    int64_t *stride) {
  View rest = *v;
  int n = 0;
  for (int d = 0; d < index->ndim; d++) {
    if (d == dim) continue;
    shape[n] = index->shape[d];
    stride[n++] = v->ndim ? v->stride[d] : 0;
  }
  rest.ndim = (int8_t)n, rest.shape = shape, rest.stride = stride;
  return rest;
}

static int64_t along_of(const View *v, int64_t dim) {
  return v->ndim ? v->stride[dim] : 0;
}

static int scatter_launch(const OpCall *c, const View *index, const View *x, const View *dense,
                          int64_t dim, int mode) {
  ScatterParams p = {};
  int64_t shape[3][MF_MAX_DIMS], stride[3][MF_MAX_DIMS];
  const View *views[3] = {index, x, dense};
  View seen[3];
  p.n = index->ndim ? index->shape[dim] : 1;
  p.limit = x->ndim ? x->shape[dim] : 1;
  for (int k = 0; k < 3; k++) {
    seen[k] = without(views[k], index, dim, shape[k], stride[k]);
    p.along[k] = along_of(views[k], dim);
  }
  p.number = dense->device == DEVICE_CPU;
  if (p.number) {
    DType to = (DType)x->dtype, from = (DType)dense->dtype;
    if (dtype_is_float(to) || dtype_is_float(from))
      dtype_set_f64(to, &p.bits, dtype_get_f64(from, dense->data));
    else if (to == BOOL) p.bits = dtype_get_i64(from, dense->data) != 0;
    else p.bits = (uint64_t)dtype_get_i64(from, dense->data);
    seen[2] = seen[0];
  }
  if (mode == SCATTER_TAKE && index->ndim) { /* elements are independent: a line of one each */
    View all[3] = {*index, *x, *dense};
    int64_t steps[MF_MAX_DIMS];
    for (int d = 0; d < index->ndim; d++) steps[d] = d == dim ? 0 : x->stride[d];
    all[1].ndim = index->ndim, all[1].shape = index->shape, all[1].stride = steps;
    walk_plain(&p.walk, &all[0], 2, &all[1]);
    p.n = 1;
  } else {
    walk_plain(&p.walk, &seen[0], 2, &seen[1]);
  }
  if (!p.walk.numel || !p.n) return 0;
  p.mode = mode;
  p.size = (int)dtype_size((DType)x->dtype);
  p.op = c->op->id;
  p.error = stream_error(c->stream);
  return LAUNCH(c, scatter_lines, grid_for(p.walk.numel, SCATTER_BLOCK), SCATTER_BLOCK, 0, p);
}

static int gather_cuda(const OpCall *c) {
  int64_t dim = ((const struct gather_args *)c->args)->dim;
  return scatter_launch(c, &c->in[1], &c->in[0], &c->out[0], dim, SCATTER_TAKE);
}
KERNEL(gather, gather_cuda)

static int gather_backward_cuda(const OpCall *c) {
  int64_t dim = ((const struct gather_backward_args *)c->args)->dim;
  int rc = copy_fill(c, &c->out[0], 0);
  return rc ? rc : scatter_launch(c, &c->in[1], &c->out[0], &c->in[0], dim, SCATTER_ADD);
}
KERNEL(gather_backward, gather_backward_cuda)

static int write_along(const OpCall *c, int64_t dim, int mode) {
  const View *x = &c->in[0], *y = &c->out[0];
  int rc = x->data != y->data ? copy_launch(c, x, y) : 0;
  return rc ? rc : scatter_launch(c, &c->in[1], y, &c->in[2], dim, mode);
}
static int scatter_cuda(const OpCall *c) {
  return write_along(c, ((const struct scatter_args *)c->args)->dim, SCATTER_SET);
}
KERNEL(scatter, scatter_cuda)
static int scatter_add_cuda(const OpCall *c) {
  return write_along(c, ((const struct scatter_add_args *)c->args)->dim, SCATTER_ADD);
}
KERNEL(scatter_add, scatter_add_cuda)
