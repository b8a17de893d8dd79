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

/* -- The gradient ------------------------------------------------------------------------------ */

/* The places of the padded side that read entry j of n: at most three, or a run of them. */
struct PadReaders {
  int64_t n, at[3];
  bool run;
};

static __device__ void pad_readers(const PadParams &p, int d, int64_t j, PadReaders *r) {
  int64_t n = p.x_size[d], before = p.before[d], after = p.after[d], size = p.shape[d];
  r->run = p.mode == PAD_REPLICATE;
  if (r->run) {
    int64_t from = j ? j + before : 0, to = j == n - 1 ? size : j + before + 1;
    from = from < 0 ? 0 : from, to = to > size ? size : to;
    r->at[0] = from;
    r->n = to > from ? to - from : 0;
    return;
  }
  int64_t kept = n + (before < 0 ? before : 0) + (after < 0 ? after : 0);
  int64_t low = p.mode == PAD_REFLECT ? before - j : j + before - kept;
  int64_t high = p.mode == PAD_REFLECT ? before + 2 * (n - 1) - j : j + before + kept;
  const int64_t tries[3] = {low, j + before, high};
  r->n = 0;
  for (int k = 0; k < 3; k++) {
    bool inside = tries[k] >= 0 && tries[k] < size && (!k || tries[k] != tries[k - 1]);
    if (inside && pad_source(p.mode, tries[k], n, before, after) == j) r->at[r->n++] = tries[k];
  }
}

/* y, here of x's shape: a thread an element, which adds up those of g that read it. */
template <class T>
static __global__ void __launch_bounds__(PAD_BLOCK)
    pad_back(const __grid_constant__ PadParams p, int dtype, int64_t numel) {
  int64_t i = (int64_t)blockIdx.x * PAD_BLOCK + threadIdx.x, to = 0, readers = 1;
  PadReaders r[MF_MAX_DIMS];
  if (i >= numel) return;
  for (int d = p.ndim - 1; d >= 0; d--) {
    int64_t at = i % p.x_size[d];
    i /= p.x_size[d];
    to += at * p.x_step[d];
    pad_readers(p, d, at, &r[d]);
    readers *= r[d].n;
  }
  T sum = T(0);
  for (int64_t k = 0; k < readers; k++) {
    int64_t rest = k, from = 0;
    for (int d = p.ndim - 1; d >= 0; d--) {
      int64_t q = rest % r[d].n;
      rest /= r[d].n;
      from += (r[d].run ? r[d].at[0] + q : r[d].at[q]) * p.y_step[d];
    }
    sum += load_as<T>(dtype, p.x, from);
  }
  store_as<T>(dtype, p.y, to, sum);
}

static int pad_backward_cuda(const OpCall *c) {
  const struct pad_backward_args *a = (const struct pad_backward_args *)c->args;
  const View *g = &c->in[0], *y = &c->out[0];
  PadParams p = {};
  p.ndim = y->ndim, p.mode = (int)a->mode;
  p.x = g->data, p.y = y->data;
  for (int d = 0; d < y->ndim; d++) {
    int k = 2 * (y->ndim - 1 - d);
    p.shape[d] = g->shape[d], p.y_step[d] = g->stride[d];
    p.x_size[d] = y->shape[d], p.x_step[d] = y->stride[d];
    p.before[d] = k + 1 < a->pad.n ? a->pad.v[k] : 0;
    p.after[d] = k + 1 < a->pad.n ? a->pad.v[k + 1] : 0;
  }
  int64_t n = view_numel(y);
  if (!n) return 0;
  unsigned grid = grid_for(n, PAD_BLOCK);
  switch (block_class((DType)y->dtype)) {
    case PW_F32: return LAUNCH(c, pad_back<float>, grid, PAD_BLOCK, 0, p, (int)y->dtype, n);
    case PW_F64: return LAUNCH(c, pad_back<double>, grid, PAD_BLOCK, 0, p, (int)y->dtype, n);
    default: return LAUNCH(c, pad_back<int64_t>, grid, PAD_BLOCK, 0, p, (int)y->dtype, n);
  }
}
KERNEL(pad_backward, pad_backward_cuda)
