/* Cross entropy over class indices, without a copy of the logits: see src/op/cross_entropy.c for
 * what is computed. A line is the logits of one position. Bytes: forward x, twice where a line does
 * not stay in a cache; backward x and gx. */
#include "lines.cuh"

struct EntropyArgs {
  int64_t ignore_index;
  double smoothing;
  int op;
  const void *g,
      *total; /* backward: one number for all, unless `each`; divided by total, or NULL */
  int g_dtype, total_dtype;
  bool each;
  DeviceError *error;
};

/* The label of a line, checked: -1 where it is to be left out. */
template <class L>
static __device__ __forceinline__ int64_t entropy_label(const L &l, int k, const EntropyArgs &a) {
  int64_t label = load_as<int64_t>(l.p.outer.dtype[k], l.p.outer.data[k], l.at[k]);
  if (label == a.ignore_index) return -1;
  if (label >= 0 && label < l.n) return label;
  report_range(a.error, a.op, k, label, l.at[k], 0, l.n - 1);
  return -1;
}

/* Operands x, target, lse, loss of the line, its weight, weights of classes. */
template <class U>
struct EntropyForward {
  typedef U T;
  typedef EntropyArgs Args;
  template <class L>
  static __device__ void run(const L &l, const Args &a) {
    T most = (T)-INFINITY, sum = T(0), smooth = T(0), loss = T(0), w = T(0);
    int64_t label = entropy_label(l, 1, a);
    for (int64_t i = l.t; i < l.n; i += l.width) most = OpMax::of(l.get(0, i), most);
    most = l.template all<OpMax>(most);
    if (isinf(most)) most = T(0);
    for (int64_t i = l.t; i < l.n; i += l.width) sum += exp(l.get(0, i) - most);
    T lse = most + log(l.sum(sum));
    bool weighted = !l.p.absent[5];
    if (a.smoothing > 0)
      for (int64_t i = l.t; i < l.n; i += l.width)
        smooth += (weighted ? l.get(5, i) : T(1)) * (lse - l.get(0, i));
    if (a.smoothing > 0) smooth = l.sum(smooth);
    if (l.t) return;
    if (label >= 0) {
      w = weighted ? l.get(5, label) : T(1);
      loss = (T)(1 - a.smoothing) * w * (lse - l.get(0, label)) +
             (T)(a.smoothing / (double)l.n) * smooth;
    }
    l.put(2, 0, lse);
    l.put(3, 0, loss);
    l.put(4, 0, w);
  }
};

/* Operands gx, x, target, lse, g, weights of classes. */
template <class U>
struct EntropyBackward {
  typedef U T;
  typedef EntropyArgs Args;
  template <class L>
  static __device__ void run(const L &l, const Args &a) {
    int64_t label = entropy_label(l, 2, a);
    bool weighted = !l.p.absent[5];
    T weights = T(0), g = a.each ? l.get(4, 0) : load_as<T>(a.g_dtype, a.g, 0);
    if (!a.each && a.total) g /= load_as<T>(a.total_dtype, a.total, 0);
    if (weighted && a.smoothing > 0)
      for (int64_t i = l.t; i < l.n; i += l.width) weights += l.get(5, i);
    weights = weighted && a.smoothing > 0 ? l.sum(weights) : (T)l.n;
    T share = (T)(a.smoothing / (double)l.n), lse = l.get(3, 0);
    T w = label < 0 ? T(0) : (T)(1 - a.smoothing) * (weighted ? l.get(5, label) : T(1));
    T all = g * (w + share * weights), smooth = g * share;
    for (int64_t i = l.t; i < l.n; i += l.width) {
      T v = all * exp(l.get(1, i) - lse) - smooth * (weighted ? l.get(5, i) : T(1));
      if (i == label) v -= g * w;
      l.put(0, i, label < 0 ? T(0) : v);
    }
  }
};

/* The sums of losses and weights of n lines, by one block, in the same order each time. */
struct EntropySums {
  const void *loss, *weight;
  void *out, *total;
  int dtype, total_dtype;
  int64_t n;
  bool mean, wants;
};

template <class T>
static __global__ void __launch_bounds__(LINE_BLOCK)
    entropy_sums(const __grid_constant__ EntropySums p) {
  __shared__ T room[WARP];
  T loss = T(0), weight = T(0);
  for (int64_t i = threadIdx.x; i < p.n; i += LINE_BLOCK)
    loss += ((const T *)p.loss)[i], weight += ((const T *)p.weight)[i];
  loss = block_reduce<OpAdd>(loss, room);
  weight = block_reduce<OpAdd>(weight, room);
  if (threadIdx.x) return;
  store_as<T>(p.total_dtype, p.total, 0, weight);
  if (p.wants) store_as<T>(p.dtype, p.out, 0, p.mean ? loss / weight : loss);
}

/* -- The ops ----------------------------------------------------------------------------------- */

/* A view of positions in the dims of x: the dim of classes has step 0. */
struct Positions {
  int64_t shape[MF_MAX_DIMS], stride[MF_MAX_DIMS];
};
static int class_dim(int ndim) {
  return ndim > 1 ? 1 : 0;
}
static View positions(const View *v, const View *x, Positions *p) {
  View r = *v;
  if (view_absent(v)) return r;
  for (int d = 0, at = 0; d < x->ndim; d++) {
    bool is_class = d == class_dim(x->ndim);
    p->shape[d] = x->shape[d];
    p->stride[d] = is_class ? 0 : v->stride[at];
    at += !is_class;
  }
  r.ndim = x->ndim, r.shape = p->shape, r.stride = p->stride;
  return r;
}

/* The weights of classes, along their dim. */
static View class_weights(const View *w, const View *x, Positions *p) {
  View r = *w;
  if (view_absent(w)) return r;
  for (int d = 0; d < x->ndim; d++) {
    p->shape[d] = x->shape[d];
    p->stride[d] = d == class_dim(x->ndim) ? w->stride[0] : 0;
  }
  r.ndim = x->ndim, r.shape = p->shape, r.stride = p->stride;
  return r;
}

static int cross_entropy_cuda(const OpCall *c) {
  const struct cross_entropy_args *a = (const struct cross_entropy_args *)c->args;
  const View *x = &c->in[0], *target = &c->in[1], *lse = &c->out[1];
  Positions at[5];
  LineParams p;
  bool is_double = x->dtype == F64;
  int64_t n = view_numel(target), stride[MF_MAX_DIMS], step = 1;
  size_t bytes = scratch_aligned((size_t)n * 8);
  char *room = (char *)kernel_scratch(c, 2 * bytes);
  if (!room) return MF_ENOMEM;
  View row = *lse;
  for (int d = lse->ndim - 1; d >= 0; d--) stride[d] = step, step *= lse->shape[d];
  row.stride = stride, row.data = room;
  View v[6] = {*x,
               positions(target, x, &at[0]),
               positions(lse, x, &at[1]),
               positions(&row, x, &at[2]),
               positions(&row, x, &at[3]),
               class_weights(&c->in[2], x, &at[4])};
  v[4].data = room + bytes;
  const View *views[] = {&v[0], &v[1], &v[2], &v[3], &v[4], &v[5]};
  lines_init(&p, 1u << class_dim(x->ndim), 6, views);
  EntropyArgs args = {};
  args.ignore_index = a->ignore_index, args.smoothing = a->label_smoothing;
  args.op = c->op->id, args.error = stream_error(c->stream);
  int rc = is_double ? lines_launch<EntropyForward<double>>(c, &p, args)
                     : lines_launch<EntropyForward<float>>(c, &p, args);
  EntropySums s = {room,
                   room + bytes,
                   c->out[0].data,
                   c->out[2].data,
                   c->out[0].dtype,
                   c->out[2].dtype,
                   n,
                   a->reduction == REDUCE_MEAN,
                   a->reduction != REDUCE_NONE};
  if (!rc)
    rc = is_double ? LAUNCH(c, entropy_sums<double>, 1, LINE_BLOCK, 0, s)
                   : LAUNCH(c, entropy_sums<float>, 1, LINE_BLOCK, 0, s);
  if (rc || a->reduction != REDUCE_NONE) return rc;
  return copy_launch(c, &row, &c->out[0]);
}
KERNEL(cross_entropy, cross_entropy_cuda)

static int cross_entropy_backward_cuda(const OpCall *c) {
  const struct cross_entropy_backward_args *a = (const struct cross_entropy_backward_args *)c->args;
  const View *g = &c->in[0], *x = &c->in[1], *total = &c->in[4];
  Positions at[4];
  LineParams p;
  EntropyArgs args = {};
  args.each = a->reduction == REDUCE_NONE;
  View absent = *g;
  absent.ndim = -1;
  View v[6] = {c->out[0],
               *x,
               positions(&c->in[2], x, &at[0]),
               positions(&c->in[3], x, &at[1]),
               args.each ? positions(g, x, &at[2]) : absent,
               class_weights(&c->in[5], x, &at[3])};
  const View *views[] = {&v[0], &v[1], &v[2], &v[3], &v[4], &v[5]};
  lines_init(&p, 1u << class_dim(x->ndim), 6, views);
  args.ignore_index = a->ignore_index, args.smoothing = a->label_smoothing;
  args.op = c->op->id, args.error = stream_error(c->stream);
  args.g = g->data, args.g_dtype = g->dtype;
  args.total = a->reduction == REDUCE_MEAN ? total->data : NULL, args.total_dtype = total->dtype;
  return x->dtype == F64 ? lines_launch<EntropyBackward<double>>(c, &p, args)
                         : lines_launch<EntropyBackward<float>>(c, &p, args);
}
KERNEL(cross_entropy_backward, cross_entropy_backward_cuda)
