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
