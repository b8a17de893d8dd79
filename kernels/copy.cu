/* Copies: clone, cast, copy_, fill_, factories of one number, and the two halves of an in-place
 * write through a view. Bytes: those of x and y.
 *
 * Elements are moved in the order of y's memory: 16 bytes a thread where x lies in the same order,
 * element by element where it is strided or converted. */
#include "kernel.cuh"

enum { COPY_BLOCK = 256, COPY_EACH = 4 };

struct CopyParams {
  Walk<2> walk;
  uint64_t bits; /* of a value of the host, in y's dtype */
  bool number;
};

/* y's elements of `size` bytes; the conversion is over where both dtypes are one. */
template <class S>
static __device__ __forceinline__ void copy_element(const CopyParams &p, const int64_t *at) {
  S *y = (S *)p.walk.data[0] + at[0];
  *y = p.number ? (S)p.bits : ((const S *)p.walk.data[1])[at[1]];
}

template <class S>
static __global__ void __launch_bounds__(COPY_BLOCK)
    copy_same(const __grid_constant__ CopyParams p) {
  int64_t at[2], i = (int64_t)blockIdx.x * (COPY_BLOCK * COPY_EACH) + threadIdx.x;
  for (int step = 0; step < COPY_EACH && i < p.walk.numel; step++, i += COPY_BLOCK) {
    walk_at(p.walk, 2, i, at);
    copy_element<S>(p, at);
  }
}

/* Through the compute type T. */
template <class T>
static __global__ void __launch_bounds__(COPY_BLOCK)
    copy_converted(const __grid_constant__ CopyParams p) {
  int64_t at[2], i = (int64_t)blockIdx.x * (COPY_BLOCK * COPY_EACH) + threadIdx.x;
  for (int step = 0; step < COPY_EACH && i < p.walk.numel; step++, i += COPY_BLOCK) {
    walk_at(p.walk, 2, i, at);
    store_as<T>(p.walk.dtype[0], p.walk.data[0], at[0],
                load_as<T>(p.walk.dtype[1], p.walk.data[1], at[1]));
  }
}

static __global__ void __launch_bounds__(COPY_BLOCK)
    copy_vectors(const char *x, char *y, int64_t n) {
  int64_t i = (int64_t)blockIdx.x * COPY_BLOCK + threadIdx.x;
  if (i < n) pack_store((uint4 *)y + i, pack_load<uint4>((const uint4 *)x + i));
}

static int copy_bytes(const OpCall *c, const CopyParams *p, size_t size) {
  unsigned grid = grid_for(p->walk.numel, COPY_BLOCK * COPY_EACH);
  switch (size) {
    case 1: return LAUNCH(c, copy_same<uint8_t>, grid, COPY_BLOCK, 0, *p);
    case 2: return LAUNCH(c, copy_same<uint16_t>, grid, COPY_BLOCK, 0, *p);
    case 4: return LAUNCH(c, copy_same<uint32_t>, grid, COPY_BLOCK, 0, *p);
    default: return LAUNCH(c, copy_same<uint64_t>, grid, COPY_BLOCK, 0, *p);
  }
}

/* Whole vectors of two flat operands at once; the number of elements that are left. */
static int copy_flat(const OpCall *c, CopyParams *p, size_t size) {
  char *y = (char *)p->walk.data[0], *x = (char *)p->walk.data[1];
  bool flat = !p->number && walk_is_flat(&p->walk, 0) && walk_is_flat(&p->walk, 1) &&
              ((uintptr_t)x | (uintptr_t)y) % 16 == 0;
  int64_t vectors = flat ? p->walk.numel * (int64_t)size / 16 : 0;
  if (!vectors) return copy_bytes(c, p, size);
  int rc = LAUNCH(c, copy_vectors, grid_for(vectors, COPY_BLOCK), COPY_BLOCK, 0, x, y, vectors);
  int64_t done = vectors * 16 / (int64_t)size;
  if (rc || done == p->walk.numel) return rc;
  p->walk.numel -= done;
  p->walk.ndim = 1;
  p->walk.shape[0] = p->walk.numel;
  p->walk.step[0][0] = p->walk.step[1][0] = 1;
  p->walk.data[0] = y + done * (int64_t)size;
  p->walk.data[1] = x + done * (int64_t)size;
  return copy_bytes(c, p, size);
}

int copy_launch(const OpCall *c, const View *x, const View *y) {
  CopyParams p = {};
  walk_init(&p.walk, y, 1, x);
  if (!p.walk.numel) return 0;
  size_t size = dtype_size((DType)y->dtype);
  if (x->device == DEVICE_CPU) { /* one element of the host */
    DType to = (DType)y->dtype, from = (DType)x->dtype;
    p.number = true;
    if (from == to) memcpy(&p.bits, x->data, size);
    else if (!dtype_is_float(to) && !dtype_is_float(from) && to != BOOL)
      p.bits = (uint64_t)dtype_get_i64(from, x->data);
    else dtype_set_f64(to, &p.bits, dtype_get_f64(from, x->data));
    return copy_bytes(c, &p, size);
  }
  if (x->dtype == y->dtype) return copy_flat(c, &p, size);
  DType through = dtype_is_float((DType)x->dtype) && !dtype_is_float((DType)y->dtype)
                      ? (DType)x->dtype
                      : (DType)y->dtype;
  unsigned grid = grid_for(p.walk.numel, COPY_BLOCK * COPY_EACH);
  switch (block_class(through)) {
    case PW_F32: return LAUNCH(c, copy_converted<float>, grid, COPY_BLOCK, 0, p);
    case PW_F64: return LAUNCH(c, copy_converted<double>, grid, COPY_BLOCK, 0, p);
    default: return LAUNCH(c, copy_converted<int64_t>, grid, COPY_BLOCK, 0, p);
  }
}

int copy_fill(const OpCall *c, const View *y, double value) {
  static const int64_t none[1] = {0};
  uint64_t bits = 0;
  dtype_set_f64((DType)y->dtype, &bits, value);
  View x = {};
  x.data = &bits;
  x.shape = x.stride = none;
  x.dtype = y->dtype;
  return copy_launch(c, &x, y);
}

/* -- The ops ----------------------------------------------------------------------------------- */

static int clone_cuda(const OpCall *c) {
  return copy_launch(c, &c->in[0], &c->out[0]);
}
KERNEL(clone, clone_cuda)
KERNEL(cast, clone_cuda)
KERNEL(transfer, clone_cuda)

static int copy__cuda(const OpCall *c) {
  return copy_launch(c, &c->in[1], &c->in[0]);
}
KERNEL(copy_, copy__cuda)

static int fill__cuda(const OpCall *c) {
  return copy_fill(c, &c->in[0], ((const struct fill__args *)c->args)->value);
}
KERNEL(fill_, fill__cuda)

static int empty_cuda(const OpCall *) {
  return 0;
}
KERNEL(empty, empty_cuda)
KERNEL(empty_like, empty_cuda)

static int zeros_cuda(const OpCall *c) {
  return copy_fill(c, &c->out[0], 0);
}
KERNEL(zeros, zeros_cuda)
KERNEL(zeros_like, zeros_cuda)

static int ones_cuda(const OpCall *c) {
  return copy_fill(c, &c->out[0], 1);
}
KERNEL(ones, ones_cuda)
KERNEL(ones_like, ones_cuda)

static int full_cuda(const OpCall *c) {
  return copy_fill(c, &c->out[0], ((const struct full_args *)c->args)->fill_value);
}
KERNEL(full, full_cuda)

static int full_like_cuda(const OpCall *c) {
  return copy_fill(c, &c->out[0], ((const struct full_like_args *)c->args)->fill_value);
}
KERNEL(full_like, full_like_cuda)

/* -- Writing through a view -------------------------------------------------------------------- */

static View at_geometry(const View *base, const IntList *size, const IntList *stride,
                        int64_t offset) {
  View v = *base;
  v.data = (char *)base->data + offset * (int64_t)dtype_size((DType)base->dtype);
  v.shape = size->v;
  v.stride = stride->v;
  v.ndim = (int8_t)size->n;
  return v;
}

static int slice_base_cuda(const OpCall *c) {
  const struct slice_base_args *a = (const struct slice_base_args *)c->args;
  View laid = c->in[0];
  if (view_numel(&c->out[0]) == 0) return 0;
  if (memcmp(laid.stride, a->base_stride.v, sizeof(int64_t) * (size_t)laid.ndim)) {
    size_t bytes = (size_t)view_numel(&laid) * dtype_size((DType)laid.dtype);
    laid.stride = a->base_stride.v;
    if (!(laid.data = kernel_scratch(c, bytes))) return MF_ENOMEM;
    int rc = copy_launch(c, &c->in[0], &laid);
    if (rc) return rc;
  }
  View part = at_geometry(&laid, &a->size, &a->stride, a->offset);
  return copy_launch(c, &part, &c->out[0]);
}
KERNEL(slice_base, slice_base_cuda)

static int scatter_base_cuda(const OpCall *c) {
  const struct scatter_base_args *a = (const struct scatter_base_args *)c->args;
  int rc = copy_launch(c, &c->in[0], &c->out[0]);
  if (rc || view_numel(&c->in[1]) == 0) return rc;
  View part = at_geometry(&c->out[0], &a->src_size, &a->stride, a->offset);
  return copy_launch(c, &c->in[1], &part);
}
KERNEL(scatter_base, scatter_base_cuda)
