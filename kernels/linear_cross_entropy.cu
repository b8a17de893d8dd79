/* cross_entropy of a linear layer, with its gradients: see src/op/cross_entropy.c. As many
 * positions at a time as HEAD_CHUNK bytes of logits hold; a chunk's logits become their gradient
 * where they lie. Bytes: the logits six times. */
#include "kernel.cuh"
#include "vendor.h"

enum { HEAD_BLOCK = 256, HEAD_LEAST = 128 };
static constexpr int64_t HEAD_CHUNK = (int64_t)256 << 20;

struct HeadParams {
  void *logits, *loss; /* (rows, classes), (positions) of the compute type */
  const int64_t *label;
  int64_t *counted; /* how many labels count */
  const void *g;
  int g_dtype, op;
  bool mean;
  int64_t first, rows, classes, positions, ignore_index;
  double smoothing;
  DeviceError *error;
};

static __global__ void __launch_bounds__(HEAD_BLOCK)
    head_count(const __grid_constant__ HeadParams p) {
  __shared__ int64_t room[WARP];
  int64_t n = 0;
  for (int64_t i = threadIdx.x; i < p.positions; i += HEAD_BLOCK) n += p.label[i] != p.ignore_index;
  n = block_reduce<OpAdd>(n, room);
  if (!threadIdx.x) *p.counted = n;
}

/* A block a position: its loss, and the gradient in the place of its logits. */
template <class T>
static __global__ void __launch_bounds__(HEAD_BLOCK)
    head_rows(const __grid_constant__ HeadParams p) {
  __shared__ T room[WARP];
  int64_t at = p.first + blockIdx.x, label = p.label[at], n = p.classes;
  T *x = (T *)p.logits + blockIdx.x * n, most = (T)-INFINITY, sum = T(0), smooth = T(0);
  bool counts = label != p.ignore_index, legal = label >= 0 && label < n;
  if (counts && !legal && !threadIdx.x) report_range(p.error, p.op, 4, label, at, 0, n - 1);
  for (int64_t i = threadIdx.x; i < n; i += HEAD_BLOCK) most = OpMax::of(x[i], most);
  most = block_reduce<OpMax>(most, room);
  if (isinf(most)) most = T(0);
  for (int64_t i = threadIdx.x; i < n; i += HEAD_BLOCK) sum += exp(x[i] - most);
  T lse = most + log(block_reduce<OpAdd>(sum, room));
  for (int64_t i = threadIdx.x; i < n && p.smoothing > 0; i += HEAD_BLOCK) smooth += lse - x[i];
  smooth = block_reduce<OpAdd>(smooth, room);
  T share = (T)(p.smoothing / (double)n), w = (T)(1 - p.smoothing);
  if (!threadIdx.x)
    ((T *)p.loss)[at] = counts && legal ? w * (lse - x[label]) + share * smooth : T(0);
  __syncthreads();
  double g = load_as<double>(p.g_dtype, p.g, 0);
  T scale = (T)(p.mean ? g / (double)*p.counted : g);
  for (int64_t i = threadIdx.x; i < n; i += HEAD_BLOCK) {
    T v = (w + share * (T)n) * exp(x[i] - lse) - share - (i == label ? w : T(0));
    x[i] = counts && legal ? scale * v : T(0);
  }
}

/* gb += the sums of columns. */
template <class T>
static __global__ void __launch_bounds__(HEAD_BLOCK)
    head_bias(const __grid_constant__ HeadParams p, T *gb) {
  int64_t c = (int64_t)blockIdx.x * HEAD_BLOCK + threadIdx.x;
  if (c >= p.classes) return;
  T sum = p.first ? gb[c] : T(0);
  for (int64_t i = 0; i < p.rows; i++) sum += ((const T *)p.logits)[i * p.classes + c];
  gb[c] = sum;
}

template <class T>
static __global__ void __launch_bounds__(HEAD_BLOCK)
    head_loss(const __grid_constant__ HeadParams p, T *out) {
  __shared__ double room[WARP];
  double sum = 0;
  for (int64_t i = threadIdx.x; i < p.positions; i += HEAD_BLOCK) sum += ((const T *)p.loss)[i];
  sum = block_reduce<OpAdd>(sum, room);
  if (!threadIdx.x) *out = (T)(p.mean ? sum / (double)*p.counted : sum);
}

/* -- Launch ------------------------------------------------------------------------------------ */

/* v's elements in order, of type t: where they lie, or copied. */
static void *head_operand(const OpCall *c, const View *v, DType t, int *rc) {
  int64_t stride[MF_MAX_DIMS], step = 1;
  if (*rc || view_absent(v)) return NULL;
  if (v->dtype == t && shape_is_contiguous(v->ndim, v->shape, v->stride)) return v->data;
  View to = *v;
  for (int d = v->ndim - 1; d >= 0; d--) stride[d] = step, step *= v->shape[d];
  to.stride = stride, to.dtype = t;
  to.data = kernel_scratch(c, (size_t)step * dtype_size(t) + 1);
  *rc = to.data ? copy_launch(c, v, &to) : MF_ENOMEM;
  return to.data;
}

/* y (m, n) = a b + bias, all without gaps, turned as said; or more of it. */
static int head_product(const OpCall *c, int dtype, bool ta, bool tb, int64_t m, int64_t n,
                        int64_t k, const void *a, const void *b, const void *bias, bool add,
                        void *y) {
  Gemm g = {};
  g.m = m, g.n = n, g.k = k, g.batch = 1;
  g.a = a, g.lda = ta ? m : k, g.a_turned = ta;
  g.b = b, g.ldb = tb ? k : n, g.b_turned = tb;
  g.c = y, g.ldc = n, g.bias = bias;
  g.dtype = g.c_dtype = dtype;
  g.alpha = 1, g.beta = add;
  return vendor_gemm(c, &g);
}

template <class T>
static int head_run(const OpCall *c, HeadParams *p, const void *x, const void *w, const void *b,
                    int64_t width, int64_t chunk) {
  char *gx = (char *)c->out[1].data, *gw = (char *)c->out[2].data;
  int dtype = c->in[1].dtype, rc = 0;
  int64_t n = p->classes, size = (int64_t)sizeof(T);
  rc = LAUNCH(c, head_count, 1, HEAD_BLOCK, 0, *p);
  if (!rc && !p->positions) rc = copy_fill(c, &c->out[2], 0);
  if (!rc && !p->positions && b) rc = copy_fill(c, &c->out[3], 0);
  for (p->first = 0; p->first < p->positions && !rc; p->first += chunk) {
    const char *here = (const char *)x + p->first * width * size;
    p->rows = p->positions - p->first < chunk ? p->positions - p->first : chunk;
    rc = head_product(c, dtype, false, true, p->rows, n, width, here, w, b, false, p->logits);
    if (!rc) rc = LAUNCH(c, head_rows<T>, grid_for(p->rows, 1), HEAD_BLOCK, 0, *p);
    if (!rc)
      rc = head_product(c, dtype, false, false, p->rows, width, n, p->logits, w, NULL, false,
                        gx + p->first * width * size);
    if (!rc)
      rc = head_product(c, dtype, true, false, n, width, p->rows, p->logits, here, NULL,
                        p->first > 0, gw);
    if (!rc && b)
      rc = LAUNCH(c, head_bias<T>, grid_for(n, HEAD_BLOCK), HEAD_BLOCK, 0, *p, (T *)c->out[3].data);
  }
  return rc ? rc : LAUNCH(c, head_loss<T>, 1, HEAD_BLOCK, 0, *p, (T *)c->out[0].data);
}

static int linear_cross_entropy_cuda(const OpCall *c) {
  const struct linear_cross_entropy_args *a = (const struct linear_cross_entropy_args *)c->args;
  const View *g = &c->in[0], *x = &c->in[1], *w = &c->in[2], *target = &c->in[4];
  DType t = (DType)x->dtype;
  HeadParams p = {};
  int rc = 0;
  View number = *g;
  int64_t size = (int64_t)dtype_size(t), classes = w->shape[0];
  p.classes = classes, p.positions = view_numel(target), p.ignore_index = a->ignore_index;
  p.smoothing = a->label_smoothing, p.mean = a->reduction == REDUCE_MEAN;
  p.op = c->op->id, p.error = stream_error(c->stream);
  int64_t chunk = HEAD_CHUNK / (classes * size);
  if (chunk < HEAD_LEAST) chunk = HEAD_LEAST;
  if (chunk > p.positions) chunk = p.positions;
  size_t losses = scratch_aligned((size_t)(p.positions * size) + 1);
  char *room = (char *)kernel_scratch(c, 128 + losses + (size_t)(chunk * classes * size));
  if (!room) return MF_ENOMEM;
  p.counted = (int64_t *)room, p.loss = room + 128, p.logits = room + 128 + losses;
  if (number.device == DEVICE_CPU) {
    number.data = room + 64, number.device = x->device, number.dtype = F64;
    if ((rc = copy_launch(c, g, &number))) return rc;
  }
  p.g = number.data, p.g_dtype = number.dtype;
  void *px = head_operand(c, x, t, &rc), *pw = head_operand(c, w, t, &rc);
  void *pb = head_operand(c, &c->in[3], t, &rc);
  p.label = (const int64_t *)head_operand(c, target, I64, &rc);
  if (rc) return rc;
  return t == F64 ? head_run<double>(c, &p, px, pw, pb, w->shape[1], chunk)
                  : head_run<float>(c, &p, px, pw, pb, w->shape[1], chunk);
}
KERNEL(linear_cross_entropy, linear_cross_entropy_cuda)
