/* The gradients of slice and diagonal: zeros, with g where it came from. Bytes: g and the result.
 */
#include "kernel.cuh"

static int slice_backward_cuda(const OpCall *c) {
  const struct slice_backward_args *a = (const struct slice_backward_args *)c->args;
  const View *g = &c->in[0], *y = &c->out[0];
  View part = *g;
  int64_t stride[MF_MAX_DIMS];
  int rc = copy_fill(c, y, 0);
  if (rc || !view_numel(g)) return rc;
  for (int d = 0; d < y->ndim; d++) stride[d] = y->stride[d];
  stride[a->dim] *= a->step;
  part.stride = stride;
  part.dtype = y->dtype;
  part.data = (char *)y->data + a->start * y->stride[a->dim] * (int64_t)dtype_size((DType)y->dtype);
  return copy_launch(c, g, &part);
}
KERNEL(slice_backward, slice_backward_cuda)

static int diagonal_backward_cuda(const OpCall *c) {
  const struct diagonal_backward_args *a = (const struct diagonal_backward_args *)c->args;
  const View *g = &c->in[0], *y = &c->out[0];
  View part = *g;
  int64_t stride[MF_MAX_DIMS], row = a->offset < 0 ? -a->offset : 0,
                               column = a->offset > 0 ? a->offset : 0;
  int k = 0, rc = copy_fill(c, y, 0);
  if (rc || !view_numel(g)) return rc;
  for (int d = 0; d < y->ndim; d++)
    if (d != a->dim1 && d != a->dim2) stride[k++] = y->stride[d];
  stride[k] = y->stride[a->dim1] + y->stride[a->dim2];
  part.stride = stride;
  part.dtype = y->dtype;
  part.data = (char *)y->data + (row * y->stride[a->dim1] + column * y->stride[a->dim2]) *
                                    (int64_t)dtype_size((DType)y->dtype);
  return copy_launch(c, g, &part);
}
KERNEL(diagonal_backward, diagonal_backward_cuda)

/* -- The gradient of as_strided ---------------------------------------------------------------- */

enum { STRIDED_BLOCK = 256 };

/* memory[place] += g scale; operand 1 of the walk has the strides of places. */
static __global__ void __launch_bounds__(STRIDED_BLOCK)
    strided_add(const __grid_constant__ Walk<2> w, double *memory, double scale) {
  int64_t i = (int64_t)blockIdx.x * STRIDED_BLOCK + threadIdx.x, at[2];
  if (i >= w.numel) return;
  walk_at(w, 2, i, at);
  atomicAdd(memory + at[1], load_as<double>(w.dtype[0], w.data[0], at[0]) * scale);
}

/* How many elements of memory they reach; none where there are none. */
static int64_t reach(int ndim, const int64_t *shape, const int64_t *stride, int64_t offset) {
  int64_t last = offset;
  for (int d = 0; d < ndim; d++) {
    if (!shape[d]) return 0;
    last += (shape[d] - 1) * (stride[d] > 0 ? stride[d] : 0);
  }
  return last + 1;
}

static int strided_add_cuda(const OpCall *c) {
  const struct strided_add_args *a = (const struct strided_add_args *)c->args;
  const View *g = &c->in[0], *y = &c->out[0];
  int64_t n = reach((int)a->size.n, a->size.v, a->stride.v, a->offset),
          n_g = reach(g->ndim, g->shape, a->g_stride.v, a->g_offset);
  const int64_t one = 1;
  if (n_g > n) n = n_g;
  if (!view_numel(y)) return 0;
  View memory = *y, read = *y, places = *g;
  memory.dtype = read.dtype = F64;
  memory.ndim = 1, memory.shape = &n, memory.stride = &one;
  memory.data = kernel_scratch(c, (size_t)n * sizeof(double));
  int rc = memory.data ? copy_fill(c, &memory, 0) : MF_ENOMEM;
  Walk<2> w;
  places.stride = a->g_stride.v;
  walk_init(&w, g, 1, &places);
  if (!rc && w.numel)
    rc = LAUNCH(c, strided_add, grid_for(w.numel, STRIDED_BLOCK), STRIDED_BLOCK, 0, w,
                (double *)memory.data + a->g_offset, a->copies > 1 ? 1.0 / (double)a->copies : 1.0);
  read.data = (double *)memory.data + a->offset;
  read.shape = a->size.v, read.stride = a->stride.v, read.ndim = (int8_t)a->size.n;
  return rc ? rc : copy_launch(c, &read, y);
}
KERNEL(strided_add, strided_add_cuda)
