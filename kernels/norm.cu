/* layer_norm, rms_norm and group_norm with their gradients. A group is a line over dims made by
 * splitting that of the channels, so that all three are one kernel. Bytes: x and y; backward: g, x
 * and gx, and g and x again for the gradients of weights.
 *
 * Those are summed by a second kernel: a block takes 32 neighbouring weights, its warps share the
 * rows; a number of parts that depends on the sizes alone goes to scratch and is joined in order.
 */
#include "lines.cuh"

enum { NORM_WARPS = 8, NORM_ROWS = 256, NORM_PARTS = 64 };

struct NormArgs {
  double eps;
  bool centre;
  void *stats; /* mean and 1 / deviation of each line, of the compute type; NULL: not wanted */
};

template <class L, class T>
static __device__ __forceinline__ void norm_stats(const L &l, int x, const NormArgs &a, T *mean,
                                                  T *scale) {
  T m = T(0), v = T(0);
  if (a.centre) {
    for (int64_t i = l.t; i < l.n; i += l.width) m += l.get(x, i);
    m = l.sum(m) / (T)l.n;
  }
  for (int64_t i = l.t; i < l.n; i += l.width) {
    T d = l.get(x, i) - m;
    v += d * d;
  }
  *mean = m;
  *scale = T(1) / sqrt(l.sum(v) / (T)l.n + (T)a.eps);
}

/* Operands y, x, weight, bias. */
template <class U>
struct NormForward {
  typedef U T;
  typedef NormArgs Args;
  template <class L>
  static __device__ void run(const L &l, const Args &a) {
    T mean, scale;
    norm_stats(l, 1, a, &mean, &scale);
    for (int64_t i = l.t; i < l.n; i += l.width) {
      T v = (l.get(1, i) - mean) * scale;
      if (!l.p.absent[2]) v *= l.get(2, i);
      if (!l.p.absent[3]) v += l.get(3, i);
      l.put(0, i, v);
    }
  }
};

/* Operands gx, g, x, weight; the stats of lines. */
template <class U>
struct NormBackward {
  typedef U T;
  typedef NormArgs Args;
  template <class L>
  static __device__ void run(const L &l, const Args &a) {
    T mean, scale, sum = T(0), dot = T(0);
    norm_stats(l, 2, a, &mean, &scale);
    for (int64_t i = l.t; i < l.n; i += l.width) {
      T g = l.get(1, i) * (l.p.absent[3] ? T(1) : l.get(3, i));
      sum += g;
      dot += g * ((l.get(2, i) - mean) * scale);
    }
    sum = a.centre ? l.sum(sum) / (T)l.n : T(0);
    dot = l.sum(dot) / (T)l.n;
    for (int64_t i = l.t; i < l.n; i += l.width) {
      T g = l.get(1, i) * (l.p.absent[3] ? T(1) : l.get(3, i));
      l.put(0, i, scale * (g - sum - (l.get(2, i) - mean) * scale * dot));
    }
    if (!a.stats || l.t) return;
    T *stats = (T *)a.stats + l.at[4];
    stats[0] = mean, stats[1] = scale;
  }
};

/* -- The gradients of weights ------------------------------------------------------------------ */

enum { SUM_GW, SUM_GB, SUM_G, SUM_X, SUM_STATS, SUM_OPERANDS };

struct NormSums {
  Walk<SUM_OPERANDS> kept, gone; /* the dims of weights, and those summed over */
  bool bias;
  int parts;
  void *partial; /* (parts, 2, weights) of the compute type */
};

template <class T>
static __global__ void __launch_bounds__(LINE_BLOCK) norm_sums(const __grid_constant__ NormSums p) {
  __shared__ T room[2][LINE_BLOCK];
  int lane = threadIdx.x % WARP, row = threadIdx.x / WARP;
  int64_t weight = (int64_t)blockIdx.x * WARP + lane, at[SUM_OPERANDS] = {}, in[SUM_OPERANDS];
  int64_t each = (p.gone.numel + p.parts - 1) / p.parts, begin = blockIdx.y * each;
  int64_t end = begin + each < p.gone.numel ? begin + each : p.gone.numel;
  T w = T(0), b = T(0);
  if (weight < p.kept.numel) {
    walk_at(p.kept, SUM_OPERANDS, weight, at);
    for (int64_t r = begin + row; r < end; r += NORM_WARPS) {
      walk_at(p.gone, SUM_OPERANDS, r, in);
      T g = load_as<T>(p.kept.dtype[SUM_G], p.kept.data[SUM_G], at[SUM_G] + in[SUM_G]);
      T x = load_as<T>(p.kept.dtype[SUM_X], p.kept.data[SUM_X], at[SUM_X] + in[SUM_X]);
      const T *stats = (const T *)p.kept.data[SUM_STATS] + at[SUM_STATS] + in[SUM_STATS];
      w += g * ((x - stats[0]) * stats[1]);
      b += g;
    }
  }
  room[0][threadIdx.x] = w, room[1][threadIdx.x] = b;
  __syncthreads();
  if (row || weight >= p.kept.numel) return;
  for (int k = 1; k < NORM_WARPS; k++) w += room[0][k * WARP + lane], b += room[1][k * WARP + lane];
  T *to = (T *)p.partial + 2 * (int64_t)blockIdx.y * p.kept.numel + weight;
  to[0] = w;
  to[p.kept.numel] = b;
}

template <class T>
static __global__ void __launch_bounds__(LINE_BLOCK) norm_join(const __grid_constant__ NormSums p) {
  int64_t weight = (int64_t)blockIdx.x * LINE_BLOCK + threadIdx.x, at[SUM_OPERANDS];
  if (weight >= p.kept.numel) return;
  T w = T(0), b = T(0);
  for (int k = 0; k < p.parts; k++) {
    const T *from = (const T *)p.partial + 2 * (int64_t)k * p.kept.numel + weight;
    w += from[0], b += from[p.kept.numel];
  }
  walk_at(p.kept, SUM_OPERANDS, weight, at);
  store_as<T>(p.kept.dtype[SUM_GW], p.kept.data[SUM_GW], at[SUM_GW], w);
  if (p.bias) store_as<T>(p.kept.dtype[SUM_GB], p.kept.data[SUM_GB], at[SUM_GB], b);
}

/* x's dims as a norm sees them: `lines` before the line, or (N, groups, channels, ...). */
struct NormShape {
  int ndim;
  uint32_t line, weights; /* masks of dims: of a line; of the weights */
  int64_t shape[MF_MAX_DIMS], stride[8][MF_MAX_DIMS];
};

/* v, of x's shape, in the dims of s. */
static View norm_seen(NormShape *s, int k, const View *v, int groups) {
  View seen = *v;
  if (view_absent(v)) return seen;
  for (int d = 0, to = 0; d < v->ndim; d++) {
    s->stride[k][to++] = groups && d == 1 ? v->stride[d] * (v->shape[d] / groups) : v->stride[d];
    if (groups && d == 1) s->stride[k][to++] = v->stride[d];
  }
  seen.ndim = (int8_t)s->ndim;
  seen.shape = s->shape;
  seen.stride = s->stride[k];
  return seen;
}

/* A weight, 1-d for groups, with step 0 along all other dims. */
static View norm_weight(NormShape *s, int k, const View *v, int groups) {
  View seen = *v;
  if (view_absent(v)) return seen;
  int64_t *to = s->stride[k];
  int first = s->ndim - v->ndim;
  for (int d = 0; d < s->ndim; d++) to[d] = groups || d < first ? 0 : v->stride[d - first];
  if (groups) to[1] = v->stride[0] * (v->shape[0] / groups), to[2] = v->stride[0];
  seen.ndim = (int8_t)s->ndim;
  seen.shape = s->shape;
  seen.stride = to;
  return seen;
}

/* first: where lines begin; groups: 0 where the line is the last dims. */
static void norm_shape(NormShape *s, const View *x, int first, int groups) {
  s->ndim = 0;
  s->line = s->weights = 0;
  for (int d = 0; d < x->ndim; d++) {
    bool split = groups && d == 1;
    if (groups ? d >= 2 : d >= first) s->line |= 1u << s->ndim;
    if (!groups && d >= first) s->weights |= 1u << s->ndim;
    s->shape[s->ndim++] = split ? groups : x->shape[d];
    if (!split) continue;
    s->line |= 1u << s->ndim;
    s->shape[s->ndim++] = x->shape[d] / groups;
    s->weights = 2 | 4;
  }
}

template <class T>
static int norm_sums_launch(const OpCall *c, NormSums *p) {
  dim3 grid(grid_for(p->kept.numel, WARP), (unsigned)p->parts);
  int rc = LAUNCH(c, norm_sums<T>, grid, LINE_BLOCK, 0, *p);
  return rc ? rc : LAUNCH(c, norm_join<T>, grid_for(p->kept.numel, LINE_BLOCK), LINE_BLOCK, 0, *p);
}

static int norm_parts(int64_t rows) {
  int64_t parts = rows / NORM_ROWS;
  return parts > NORM_PARTS ? NORM_PARTS : parts > 1 ? (int)parts : 1;
}

/* out[1], and out[2] where there is one, from the stats of lines. */
static int norm_weights(const OpCall *c, NormShape *s, int groups, const View *g, const View *x,
                        const View *stats, void *partial, int parts) {
  View views[SUM_OPERANDS], kept[SUM_OPERANDS], gone[SUM_OPERANDS];
  int64_t shape[2][MF_MAX_DIMS], strides[SUM_OPERANDS][2][MF_MAX_DIMS];
  NormSums p = {};
  bool is_double = c->out[0].dtype == F64;
  p.bias = c->n_out > 2;
  views[SUM_GW] = norm_weight(s, 4, &c->out[1], groups);
  views[SUM_GB] = norm_weight(s, 5, &c->out[p.bias ? 2 : 1], groups);
  views[SUM_G] = *g, views[SUM_X] = *x, views[SUM_STATS] = *stats;
  for (int k = 0; k < SUM_OPERANDS; k++) {
    int n[2] = {0, 0};
    for (int d = 0; d < s->ndim; d++) {
      int side = s->weights >> d & 1;
      shape[side][n[side]] = s->shape[d];
      strides[k][side][n[side]++] = views[k].stride[d];
    }
    kept[k] = gone[k] = views[k];
    kept[k].ndim = (int8_t)n[1], kept[k].shape = shape[1], kept[k].stride = strides[k][1];
    gone[k].ndim = (int8_t)n[0], gone[k].shape = shape[0], gone[k].stride = strides[k][0];
  }
  walk_init(&p.kept, &kept[0], SUM_OPERANDS - 1, &kept[1]);
  walk_init(&p.gone, &gone[0], SUM_OPERANDS - 1, &gone[1]);
  p.parts = parts;
  p.partial = partial;
  return is_double ? norm_sums_launch<double>(c, &p) : norm_sums_launch<float>(c, &p);
}

/* Of two elements a line, in the order of dims. */
static View norm_stats_view(NormShape *s, int k, const View *like) {
  View stats = *like;
  int64_t step = 2;
  for (int d = s->ndim - 1; d >= 0; d--) {
    s->stride[k][d] = s->line >> d & 1 ? 0 : step;
    if (!(s->line >> d & 1)) step *= s->shape[d];
  }
  stats.stride = s->stride[k];
  return stats;
}

static int norm_forward(const OpCall *c, int first, int groups, bool centre, double eps,
                        const View *bias) {
  NormShape s;
  LineParams p;
  norm_shape(&s, &c->out[0], first, groups);
  View y = norm_seen(&s, 0, &c->out[0], groups), x = norm_seen(&s, 1, &c->in[0], groups);
  View w = norm_weight(&s, 2, &c->in[1], groups), b = norm_weight(&s, 3, bias, groups);
  const View *views[] = {&y, &x, &w, &b};
  lines_init(&p, s.line, 4, views);
  NormArgs a = {eps, centre, NULL};
  return y.dtype == F64 ? lines_launch<NormForward<double>>(c, &p, a)
                        : lines_launch<NormForward<float>>(c, &p, a);
}

static int norm_backward(const OpCall *c, int first, int groups, bool centre, double eps,
                         bool params) {
  NormShape s;
  LineParams p;
  norm_shape(&s, &c->out[0], first, groups);
  View gx = norm_seen(&s, 0, &c->out[0], groups), g = norm_seen(&s, 1, &c->in[0], groups);
  View x = norm_seen(&s, 2, &c->in[1], groups), w = norm_weight(&s, 3, &c->in[2], groups);
  View lines = norm_stats_view(&s, 6, &x);
  const View *views[] = {&gx, &g, &x, &w, &lines};
  lines_init(&p, s.line, 5, views);
  size_t size = gx.dtype == F64 ? 8 : 4, stats = 0;
  NormArgs a = {eps, centre, NULL};
  int parts = 1;
  if (params) {
    int64_t weights = view_numel(&c->out[1]), all = view_numel(&c->out[0]);
    parts = norm_parts(weights ? all / weights : 0);
    stats = scratch_aligned((size_t)p.outer.numel * 2 * size);
    a.stats = kernel_scratch(c, stats + (size_t)(weights * 2 * parts) * size);
    if (!a.stats) return MF_ENOMEM;
  }
  int rc = gx.dtype == F64 ? lines_launch<NormBackward<double>>(c, &p, a)
                           : lines_launch<NormBackward<float>>(c, &p, a);
  if (rc || !params || !view_numel(&c->out[1])) return rc;
  lines.data = a.stats;
  return norm_weights(c, &s, groups, &g, &x, &lines, (char *)a.stats + stats, parts);
}

/* -- The ops ----------------------------------------------------------------------------------- */

static double rms_eps(bool given, double eps, int t) {
  return given ? eps : t == F64 ? 0x1p-52 : 0x1p-23;
}

static int layer_norm_cuda(const OpCall *c) {
  const struct layer_norm_args *a = (const struct layer_norm_args *)c->args;
  return norm_forward(c, c->out[0].ndim - (int)a->normalized_shape.n, 0, true, a->eps, &c->in[2]);
}
KERNEL(layer_norm, layer_norm_cuda)

static int layer_norm_backward_cuda(const OpCall *c) {
  const struct layer_norm_backward_args *a = (const struct layer_norm_backward_args *)c->args;
  int first = c->out[0].ndim - (int)a->normalized_shape.n;
  return norm_backward(c, first, 0, true, a->eps, a->params);
}
KERNEL(layer_norm_backward, layer_norm_backward_cuda)

static int rms_norm_cuda(const OpCall *c) {
  const struct rms_norm_args *a = (const struct rms_norm_args *)c->args;
  View none = c->in[0];
  none.ndim = -1;
  return norm_forward(c, c->out[0].ndim - (int)a->normalized_shape.n, 0, false,
                      rms_eps(a->has_eps, a->eps, c->in[0].dtype), &none);
}
KERNEL(rms_norm, rms_norm_cuda)

static int rms_norm_backward_cuda(const OpCall *c) {
  const struct rms_norm_backward_args *a = (const struct rms_norm_backward_args *)c->args;
  return norm_backward(c, c->out[0].ndim - (int)a->normalized_shape.n, 0, false,
                       rms_eps(a->has_eps, a->eps, c->in[1].dtype), a->params);
}
KERNEL(rms_norm_backward, rms_norm_backward_cuda)

/* -- With sums before and behind --------------------------------------------------------------- */

/* y = a + b, y may be one of them. */
static int add_launch(const OpCall *c, const View *a, const View *b, const View *y) {
  struct add_args args = {};
  args.alpha = 1;
  View in[2] = {*a, *b}, out = *y;
  OpCall call = *c;
  call.op = op_of(OP_add), call.args = &args;
  call.in = in, call.n_in = 2;
  call.out = &out, call.n_out = 1;
  return c->stream->device->kernels[OP_add](&call);
}

static int add_norm_cuda(const OpCall *c) {
  const struct add_norm_args *a = (const struct add_norm_args *)c->args;
  int first = c->out[0].ndim - (int)a->normalized_shape.n;
  View in[3] = {c->out[1], c->in[2], c->in[3]};
  OpCall norm = *c;
  norm.in = in, norm.n_in = 3, norm.n_out = 1;
  int rc = add_launch(c, &c->in[0], &c->in[1], &c->out[1]);
  return rc ? rc : norm_forward(&norm, first, 0, a->centre, a->eps, &norm.in[2]);
}
KERNEL(add_norm, add_norm_cuda)

static int norm_add_backward_cuda(const OpCall *c) {
  const struct norm_add_backward_args *a = (const struct norm_add_backward_args *)c->args;
  int first = c->out[0].ndim - (int)a->normalized_shape.n;
  const View *h = &c->in[2], *more = &c->in[3];
  View in[3] = {c->in[0], c->in[1], c->in[4]}, sum = c->out[0];
  OpCall norm = *c;
  int rc = 0;
  if (!view_absent(more)) {
    sum.data = kernel_scratch(c, (size_t)view_numel(&sum) * dtype_size((DType)sum.dtype));
    rc = sum.data || !view_numel(&sum) ? add_launch(c, &c->in[0], more, &sum) : MF_ENOMEM;
    in[0] = sum;
  }
  norm.in = in, norm.n_in = 3;
  if (!rc) rc = norm_backward(&norm, first, 0, a->centre, a->eps, a->params);
  return rc || view_absent(h) ? rc : add_launch(c, &c->out[0], h, &c->out[0]);
}
KERNEL(norm_add_backward, norm_add_backward_cuda)

static int group_norm_cuda(const OpCall *c) {
  const struct group_norm_args *a = (const struct group_norm_args *)c->args;
  return norm_forward(c, 0, (int)a->num_groups, true, a->eps, &c->in[2]);
}
KERNEL(group_norm, group_norm_cuda)

static int group_norm_backward_cuda(const OpCall *c) {
  const struct group_norm_backward_args *a = (const struct group_norm_backward_args *)c->args;
  return norm_backward(c, 0, (int)a->num_groups, true, a->eps, a->params);
}
KERNEL(group_norm_backward, group_norm_backward_cuda)
