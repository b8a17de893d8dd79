/* pad: a thread an element of the result, which it reads from where the mode says, or which is the
 * value. Bytes: x and the result. */
#include "kernel.cuh"

enum { PAD_BLOCK = 256, PAD_CONSTANT = 0, PAD_REFLECT, PAD_REPLICATE, PAD_CIRCULAR };

struct PadParams {
  int ndim, mode, size;
  int64_t numel, shape[MF_MAX_DIMS], y_step[MF_MAX_DIMS];
  int64_t x_step[MF_MAX_DIMS], x_size[MF_MAX_DIMS], before[MF_MAX_DIMS], after[MF_MAX_DIMS];
  const void *x;
  void *y;
  uint64_t bits; /* of the value */
};

/* Which of n entries stands at place i of the padded side; -1: the value. */
static __device__ __forceinline__ int64_t pad_source(int mode, int64_t i, int64_t n, int64_t before,
                                                     int64_t after) {
  i -= before;
  if (mode == PAD_CIRCULAR) {
    int64_t first = before < 0 ? -before : 0, end = n - (after < 0 ? -after : 0);
    return i < first ? i + end - first : i >= end ? i - end + first : i;
  }
  if (i >= 0 && i < n) return i;
  if (mode == PAD_CONSTANT) return -1;
  if (mode == PAD_REPLICATE) return i < 0 ? 0 : n - 1;
  return i < 0 ? -i : 2 * (n - 1) - i;
}

static __global__ void __launch_bounds__(PAD_BLOCK)
    pad_kernel(const __grid_constant__ PadParams p) {
  int64_t i = (int64_t)blockIdx.x * PAD_BLOCK + threadIdx.x, to = 0, from = 0;
  bool inside = true;
  if (i >= p.numel) return;
  for (int d = p.ndim - 1; d >= 0; d--) {
    int64_t at = i % p.shape[d];
    int64_t source = pad_source(p.mode, at, p.x_size[d], p.before[d], p.after[d]);
    i /= p.shape[d];
    to += at * p.y_step[d];
    from += source * p.x_step[d];
    inside &= source >= 0;
  }
  const uint64_t value = p.bits;
  move_element(p.size, p.y, to, inside ? p.x : &value, inside ? from : 0);
}

static int pad_cuda(const OpCall *c) {
  const struct pad_args *a = (const struct pad_args *)c->args;
  const View *x = &c->in[0], *y = &c->out[0];
  PadParams p = {};
  p.ndim = y->ndim, p.mode = (int)a->mode, p.size = (int)dtype_size((DType)y->dtype);
  p.numel = view_numel(y), p.x = x->data, p.y = y->data;
  for (int d = 0; d < y->ndim; d++) {
    int k = 2 * (y->ndim - 1 - d);
    p.shape[d] = y->shape[d], p.y_step[d] = y->stride[d];
    p.x_size[d] = x->shape[d], p.x_step[d] = x->stride[d];
    p.before[d] = k + 1 < a->pad.n ? a->pad.v[k] : 0;
    p.after[d] = k + 1 < a->pad.n ? a->pad.v[k + 1] : 0;
  }
  dtype_set_f64((DType)y->dtype, &p.bits, a->value);
  if (!p.numel) return 0;
  return LAUNCH(c, pad_kernel, grid_for(p.numel, PAD_BLOCK), PAD_BLOCK, 0, p);
}
KERNEL(pad, pad_cuda)
