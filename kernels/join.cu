/* cat, stack, flip, roll, constant pad, eye and sequences: copies between parts of tensors, and
 * kernels that go by an element's place. Bytes: those of the operands. */
#include "kernel.cuh"

enum { PLACE_BLOCK = 256 };

/* A part of a tensor: sizes and strides of its own. */
struct Part {
  View v;
  int64_t shape[MF_MAX_DIMS], stride[MF_MAX_DIMS];
};
static void part_bind(Part *p) {
  p->v.shape = p->shape;
  p->v.stride = p->stride;
}
static void part_init(Part *p, const View *v) {
  p->v = *v;
  for (int d = 0; d < v->ndim; d++) p->shape[d] = v->shape[d], p->stride[d] = v->stride[d];
  part_bind(p);
}
static void part_narrow(Part *p, int64_t d, int64_t start, int64_t length) {
  int64_t size = (int64_t)dtype_size((DType)p->v.dtype);
  p->v.data = (char *)p->v.data + start * p->stride[d] * size;
  p->shape[d] = length;
}

/* -- cat, stack -------------------------------------------------------------------------------- */

static int cat_cuda(const OpCall *c) {
  int64_t dim = ((const struct cat_args *)c->args)->dim, at = 0;
  int rc = 0;
  for (int k = 0; k < c->n_in && !rc; k++) {
    const View *x = &c->in[k];
    if (x->ndim == 1 && x->shape[0] == 0) continue;
    Part p;
    part_init(&p, &c->out[0]);
    part_narrow(&p, dim, at, x->shape[dim]);
    rc = copy_launch(c, x, &p.v);
    at += x->shape[dim];
  }
  return rc;
}
KERNEL(cat, cat_cuda)

static int stack_cuda(const OpCall *c) {
  int64_t dim = ((const struct stack_args *)c->args)->dim;
  int rc = 0;
  for (int k = 0; k < c->n_in && !rc; k++) {
    Part p;
    part_init(&p, &c->out[0]);
    part_narrow(&p, dim, k, 1);
    for (int d = (int)dim; d + 1 < c->out[0].ndim; d++)
      p.shape[d] = p.shape[d + 1], p.stride[d] = p.stride[d + 1];
    p.v.ndim--;
    rc = copy_launch(c, &c->in[k], &p.v);
  }
  return rc;
}
KERNEL(stack, stack_cuda)

/* -- flip, roll -------------------------------------------------------------------------------- */

static int flip_cuda(const OpCall *c) {
  const struct flip_args *a = (const struct flip_args *)c->args;
  Part x;
  part_init(&x, &c->in[0]);
  if (view_numel(&c->out[0]) == 0) return 0;
  for (int k = 0; k < a->dims.n && x.v.ndim; k++) { /* walked from the other end */
    int64_t d = a->dims.v[k], n = x.shape[d];
    part_narrow(&x, d, n - 1, n);
    x.stride[d] = -x.stride[d];
  }
  return copy_launch(c, &x.v, &c->out[0]);
}
KERNEL(flip, flip_cuda)

/* y = x with both parts of dim exchanged, and so on for the dims from k on. */
static int roll_from(const OpCall *c, const struct roll_args *a, int k, const Part *x,
                     const Part *y) {
  if (k == a->dims.n) return copy_launch(c, &x->v, &y->v);
  int64_t d = a->dims.v[k], n = x->shape[d], shift = n ? a->shifts.v[k] % n : 0;
  int rc = 0;
  if (shift < 0) shift += n;
  for (int half = 0; half < 2 && !rc; half++) {
    Part from, to;
    part_init(&from, &x->v);
    part_init(&to, &y->v);
    part_narrow(&from, d, half ? n - shift : 0, half ? shift : n - shift);
    part_narrow(&to, d, half ? 0 : shift, half ? shift : n - shift);
    if (from.shape[d]) rc = roll_from(c, a, k + 1, &from, &to);
  }
  return rc;
}

static int roll_cuda(const OpCall *c) {
  struct roll_args a = *(const struct roll_args *)c->args;
  Part x, y;
  part_init(&x, &c->in[0]);
  part_init(&y, &c->out[0]);
  if (view_numel(&x.v) == 0) return 0;
  if (a.dims.n == 0) { /* as one row */
    int64_t n = view_numel(&x.v);
    if (!view_is_contiguous(&x.v)) {
      for (int64_t d = x.v.ndim - 1, step = 1; d >= 0; d--) x.stride[d] = step, step *= x.shape[d];
      if (!(x.v.data = kernel_scratch(c, (size_t)n * dtype_size((DType)x.v.dtype))))
        return MF_ENOMEM;
      int rc = copy_launch(c, &c->in[0], &x.v);
      if (rc) return rc;
    }
    x.shape[0] = y.shape[0] = n;
    x.stride[0] = y.stride[0] = 1;
    x.v.ndim = y.v.ndim = 1;
    a.dims.n = 1;
    a.dims.v[0] = 0;
  } else if (x.v.ndim == 0) {
    return copy_launch(c, &x.v, &y.v);
  }
  return roll_from(c, &a, 0, &x, &y);
}
KERNEL(roll, roll_cuda)

/* -- Triangles --------------------------------------------------------------------------------- */

struct TriParams {
  Walk<2> walk;
  int64_t diagonal;
  bool lower;
  int size;
};

static __global__ void __launch_bounds__(PLACE_BLOCK)
    tri_kernel(const __grid_constant__ TriParams p) {
  const uint64_t zero = 0;
  int64_t at[2], i = (int64_t)blockIdx.x * PLACE_BLOCK + threadIdx.x;
  if (i >= p.walk.numel) return;
  int64_t columns = p.walk.shape[p.walk.ndim - 1], rows = p.walk.shape[p.walk.ndim - 2];
  int64_t column = i % columns, row = i / columns % rows;
  bool keep = p.lower ? column <= row + p.diagonal : column >= row + p.diagonal;
  walk_at(p.walk, 2, i, at);
  move_element(p.size, p.walk.data[0], at[0], keep ? p.walk.data[1] : &zero, keep ? at[1] : 0);
}

static int tri_launch(const OpCall *c, int64_t diagonal, bool lower) {
  TriParams p = {};
  const int64_t far = (int64_t)1 << 60;
  const View *y = &c->out[0];
  walk_plain(&p.walk, y, 1, &c->in[0]);
  p.diagonal = diagonal < -far ? -far : diagonal > far ? far : diagonal;
  if (y->start) p.diagonal += y->start[y->ndim - 2] - y->start[y->ndim - 1];
  p.lower = lower;
  p.size = (int)dtype_size((DType)y->dtype);
  if (!p.walk.numel) return 0;
  return LAUNCH(c, tri_kernel, grid_for(p.walk.numel, PLACE_BLOCK), PLACE_BLOCK, 0, p);
}
static int tril_cuda(const OpCall *c) {
  return tri_launch(c, ((const struct tril_args *)c->args)->diagonal, true);
}
KERNEL(tril, tril_cuda)
static int triu_cuda(const OpCall *c) {
  return tri_launch(c, ((const struct triu_args *)c->args)->diagonal, false);
}
KERNEL(triu, triu_cuda)

/* -- one_hot ----------------------------------------------------------------------------------- */

struct HotParams {
  Walk<1> x;
  int64_t *y, classes;
  int op;
  DeviceError *error;
};

static __global__ void __launch_bounds__(PLACE_BLOCK)
    hot_kernel(const __grid_constant__ HotParams p) {
  int64_t at[1], i = (int64_t)blockIdx.x * PLACE_BLOCK + threadIdx.x;
  if (i >= p.x.numel) return;
  walk_at(p.x, 1, i, at);
  int64_t v = load_as<int64_t>(p.x.dtype[0], p.x.data[0], at[0]);
  if (v < 0 || v >= p.classes) return report_range(p.error, p.op, 0, v, i, 0, p.classes - 1);
  p.y[i * p.classes + v] = 1;
}

static int one_hot_cuda(const OpCall *c) {
  HotParams p = {};
  int rc = copy_fill(c, &c->out[0], 0);
  walk_plain(&p.x, &c->in[0], 0, (const View *)NULL);
  if (rc || !p.x.numel) return rc;
  p.y = (int64_t *)c->out[0].data;
  p.classes = ((const struct one_hot_args *)c->args)->num_classes;
  p.op = c->op->id;
  p.error = stream_error(c->stream);
  return LAUNCH(c, hot_kernel, grid_for(p.x.numel, PLACE_BLOCK), PLACE_BLOCK, 0, p);
}
KERNEL(one_hot, one_hot_cuda)

/* -- Sequences --------------------------------------------------------------------------------- */

/* Element i is start + i step; with both ends, counted back from the end from the middle on. */
struct SequenceParams {
  void *y;
  int dtype;
  bool both_ends;
  int64_t n;
  double start, step, end, base;
};

static __global__ void __launch_bounds__(PLACE_BLOCK)
    sequence_kernel(const __grid_constant__ SequenceParams p) {
  int64_t i = (int64_t)blockIdx.x * PLACE_BLOCK + threadIdx.x;
  if (i >= p.n) return;
  double v = p.both_ends && i >= p.n / 2 ? p.end - p.step * (double)(p.n - 1 - i)
                                         : p.start + p.step * (double)i;
  store_as<double>(p.dtype, p.y, i, p.base > 0 ? pow(p.base, v) : v);
}

static int sequence_launch(const OpCall *c, SequenceParams p) {
  p.y = c->out[0].data;
  p.dtype = c->out[0].dtype;
  p.n = c->out[0].shape[0];
  if (!p.n) return 0;
  return LAUNCH(c, sequence_kernel, grid_for(p.n, PLACE_BLOCK), PLACE_BLOCK, 0, p);
}

static int arange_cuda(const OpCall *c) {
  const struct arange_args *a = (const struct arange_args *)c->args;
  SequenceParams p = {};
  p.start = a->start, p.step = a->step;
  return sequence_launch(c, p);
}
KERNEL(arange, arange_cuda)

static SequenceParams between(double start, double end, int64_t steps, double base) {
  SequenceParams p = {};
  p.start = start, p.end = end, p.base = base;
  p.both_ends = steps > 1;
  p.step = steps > 1 ? (end - start) / (double)(steps - 1) : 0;
  return p;
}
static int linspace_cuda(const OpCall *c) {
  const struct linspace_args *a = (const struct linspace_args *)c->args;
  return sequence_launch(c, between(a->start, a->end, a->steps, 0));
}
KERNEL(linspace, linspace_cuda)
static int logspace_cuda(const OpCall *c) {
  const struct logspace_args *a = (const struct logspace_args *)c->args;
  return sequence_launch(c, between(a->start, a->end, a->steps, a->base));
}
KERNEL(logspace, logspace_cuda)

static int eye_cuda(const OpCall *c) {
  const View *y = &c->out[0];
  int64_t n = y->shape[0] < y->shape[1] ? y->shape[0] : y->shape[1];
  int64_t step = y->stride[0] + y->stride[1];
  View diagonal = *y;
  diagonal.ndim = 1, diagonal.shape = &n, diagonal.stride = &step;
  int rc = copy_fill(c, y, 0);
  return rc ? rc : copy_fill(c, &diagonal, 1);
}
KERNEL(eye, eye_cuda)
