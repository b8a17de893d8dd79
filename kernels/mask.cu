/* masked_select, masked_scatter, nonzero. Where an element goes is the running sum of the mask; so
 * results are in the order of elements. Bytes: the mask, 8 bytes an element of running sums three
 * times, and the elements. */
#include "kernel.cuh"
#include "vendor.h"

enum { MASK_BLOCK = 256 };

struct MaskParams {
  Walk<3> walk; /* over all elements in order: the whole (result or x), the mask, x */
  Walk<1> packed;
  int64_t *sum;
  int ndim, size, op;
  int64_t shape[MF_MAX_DIMS];
  bool no_x; /* zeros */
  DeviceError *error;
};

static __device__ __forceinline__ bool mask_at(const MaskParams &p, int64_t at) {
  switch (p.walk.dtype[1]) {
    case F32: return load_as<float>(F32, p.walk.data[1], at) != 0;
    case F64: return load_as<double>(F64, p.walk.data[1], at) != 0;
    case F16:
    case BF16: return (((const uint16_t *)p.walk.data[1])[at] & 0x7fff) != 0;
    default: return load_as<int64_t>(p.walk.dtype[1], p.walk.data[1], at) != 0;
  }
}

static __global__ void __launch_bounds__(MASK_BLOCK)
    mask_count(const __grid_constant__ MaskParams p) {
  int64_t i = (int64_t)blockIdx.x * MASK_BLOCK + threadIdx.x, at[3];
  if (i >= p.walk.numel) return;
  walk_at(p.walk, 3, i, at);
  p.sum[i] = mask_at(p, at[1]);
}

/* packed = x where mask. */
static __global__ void __launch_bounds__(MASK_BLOCK)
    mask_pack(const __grid_constant__ MaskParams p) {
  int64_t i = (int64_t)blockIdx.x * MASK_BLOCK + threadIdx.x, at[3], to[1];
  if (i >= p.walk.numel) return;
  int64_t k = p.sum[i];
  if (k == (i ? p.sum[i - 1] : 0)) return;
  walk_at(p.walk, 3, i, at);
  walk_at(p.packed, 1, k - 1, to);
  move_element(p.size, p.packed.data[0], to[0], p.walk.data[2], at[2]);
}

/* The whole = mask ? packed : x. */
static __global__ void __launch_bounds__(MASK_BLOCK)
    mask_unpack(const __grid_constant__ MaskParams p) {
  int64_t i = (int64_t)blockIdx.x * MASK_BLOCK + threadIdx.x, at[3], from[1];
  const uint64_t zero = 0;
  if (i >= p.walk.numel) return;
  int64_t k = p.sum[i];
  walk_at(p.walk, 3, i, at);
  if (i == p.walk.numel - 1 && k > p.packed.numel)
    report(p.error, ERROR_FEW, p.op, 1, k, i, 0, p.packed.numel);
  if (k == (i ? p.sum[i - 1] : 0)) {
    move_element(p.size, p.walk.data[0], at[0], p.no_x ? &zero : p.walk.data[2],
                 p.no_x ? 0 : at[2]);
  } else if (k <= p.packed.numel) {
    walk_at(p.packed, 1, k - 1, from);
    move_element(p.size, p.walk.data[0], at[0], p.packed.data[0], from[0]);
  }
}

static __global__ void __launch_bounds__(MASK_BLOCK)
    mask_places(const __grid_constant__ MaskParams p) {
  int64_t i = (int64_t)blockIdx.x * MASK_BLOCK + threadIdx.x;
  if (i >= p.walk.numel) return;
  int64_t k = p.sum[i], rest = i;
  if (k == (i ? p.sum[i - 1] : 0)) return;
  int64_t *to = (int64_t *)p.packed.data[0] + (k - 1) * p.ndim;
  for (int d = p.ndim - 1; d >= 0; d--) {
    to[d] = rest % p.shape[d];
    rest /= p.shape[d];
  }
}

/* The running sums of `mask` over the shape of `whole`. */
static int mask_init(const OpCall *c, MaskParams *p, const View *whole, const View *mask,
                     const View *x, const View *packed) {
  View in[2] = {*mask, x ? *x : *mask};
  walk_plain(&p->walk, whole, 2, in);
  if (packed) walk_plain(&p->packed, packed, 0, (const View *)NULL);
  p->no_x = !x;
  p->op = c->op->id;
  p->size = packed ? (int)dtype_size((DType)packed->dtype) : 0;
  p->error = stream_error(c->stream);
  if (!p->walk.numel) return 0;
  p->sum = (int64_t *)kernel_scratch(c, (size_t)p->walk.numel * sizeof *p->sum);
  if (!p->sum) return MF_ENOMEM;
  int rc = LAUNCH(c, mask_count, grid_for(p->walk.numel, MASK_BLOCK), MASK_BLOCK, 0, *p);
  return rc ? rc : vendor_running_sum(c, p->walk.numel, p->sum);
}

static int masked_select_cuda(const OpCall *c) {
  MaskParams p = {};
  int64_t shape[MF_MAX_DIMS], none[MF_MAX_DIMS] = {0};
  View whole = c->in[0];
  whole.ndim = c->in[0].ndim > c->in[1].ndim ? c->in[0].ndim : c->in[1].ndim;
  for (int d = 0; d < whole.ndim; d++) {
    shape[d] = 1;
    for (int k = 0; k < 2; k++) {
      int at = d - (whole.ndim - c->in[k].ndim);
      if (at >= 0 && c->in[k].shape[at] != 1) shape[d] = c->in[k].shape[at];
    }
  }
  whole.shape = shape, whole.stride = none;
  int rc = mask_init(c, &p, &whole, &c->in[1], &c->in[0], &c->out[0]);
  if (rc || !p.walk.numel) return rc;
  return LAUNCH(c, mask_pack, grid_for(p.walk.numel, MASK_BLOCK), MASK_BLOCK, 0, p);
}
KERNEL(masked_select, masked_select_cuda)

static int mask_fill_in(const OpCall *c, const View *x, const View *packed) {
  MaskParams p = {};
  int rc = mask_init(c, &p, &c->out[0], &c->in[1], x, packed);
  if (rc || !p.walk.numel) return rc;
  return LAUNCH(c, mask_unpack, grid_for(p.walk.numel, MASK_BLOCK), MASK_BLOCK, 0, p);
}

static int masked_select_backward_cuda(const OpCall *c) {
  return mask_fill_in(c, NULL, &c->in[0]);
}
KERNEL(masked_select_backward, masked_select_backward_cuda)

static int masked_scatter_cuda(const OpCall *c) {
  return mask_fill_in(c, &c->in[0], &c->in[2]);
}
KERNEL(masked_scatter, masked_scatter_cuda)

static int nonzero_cuda(const OpCall *c) {
  const View *x = &c->in[0];
  MaskParams p = {};
  int rc = mask_init(c, &p, x, x, x, NULL);
  p.ndim = x->ndim;
  p.packed.data[0] = c->out[0].data;
  for (int d = 0; d < x->ndim; d++) p.shape[d] = x->shape[d];
  if (rc || !p.walk.numel || !x->ndim) return rc;
  return LAUNCH(c, mask_places, grid_for(p.walk.numel, MASK_BLOCK), MASK_BLOCK, 0, p);
}
KERNEL(nonzero, nonzero_cuda)
