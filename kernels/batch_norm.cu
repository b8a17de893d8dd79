/* batch_norm and its gradients: see src/op/batch_norm.c for what is computed.
 *
 * Three kernels a direction. Sums over a channel: where channels are neighbours in memory a block
 * takes 32 of them and its warps share the places; else a block has one channel. Places are cut
 * into parts, as many as the sizes say, so that sums have one order. A second kernel joins the
 * parts of each channel and makes its coefficients; a third goes over all elements once more.
 * Bytes: x twice and y; backward g and x twice (y too where it is the gate) and gx. */
#include "kernel.cuh"

enum { BN_BLOCK = 256, BN_WARPS = BN_BLOCK / WARP, BN_PARTS = 64, BN_ROWS = 512, BN_EACH = 4 };

/* Which elements of g count: all, or those where the value before the relu was positive, computed
 * from x, or read from y; KEEP: what is left is written where g was; SUM: h is added before. */
enum BnGate { BN_GATE_NONE, BN_GATE_X, BN_GATE_Y, BN_GATE_KEEP, BN_GATE_SUM };
enum { BN_X, BN_G, BN_ACT, BN_H, BN_OPERANDS };

/* One channel: y = (x - shift) a + b; gx = a g + b (x - shift) + c, and GATE_X is by (x - shift)
 * scale + bias. */
template <class T>
struct BnChannel {
  T shift, a, b, c, scale, bias;
};

/* Mean and sum of squared deviations of n elements; or the sums of g and g (x - mean). */
template <class T>
struct BnSums {
  T n, mean, second;
};

struct BnParams {
  Walk<BN_OPERANDS> places; /* all dims but that of channels */
  int64_t channels, step[BN_OPERANDS];
  bool aside; /* channels are neighbours */
  int parts, gate;
  void *partial, *coefs; /* BnSums (parts, channels), BnChannel (channels) */
};

/* -- Sums -------------------------------------------------------------------------------------- */

template <class T>
static __device__ __forceinline__ T bn_normal(T x, const BnChannel<T> &k) {
  return (x - k.shift) * k.a + k.b;
}

/* Moments of x. */
template <class U>
struct BnMoments {
  typedef U T;
  static __device__ void add(BnSums<T> &s, const BnParams &p, const int64_t *at, int64_t) {
    T x = load_as<T>(p.places.dtype[BN_X], p.places.data[BN_X], at[BN_X]), d = x - s.mean;
    s.n += 1;
    s.mean += d / s.n;
    s.second += d * (x - s.mean);
  }
  template <class A>
  static __device__ void join(A &a, const A &b) {
    auto n = a.n + b.n, d = b.mean - a.mean;
    if (b.n == 0) return;
    a.mean += d * (b.n / n);
    a.second += b.second + d * d * (a.n * (b.n / n));
    a.n = n;
  }
};

/* The sum of x in `mean`. */
template <class U>
struct BnTotal {
  typedef U T;
  static __device__ void add(BnSums<T> &s, const BnParams &p, const int64_t *at, int64_t) {
    s.mean += load_as<T>(p.places.dtype[BN_X], p.places.data[BN_X], at[BN_X]);
  }
  template <class A>
  static __device__ void join(A &a, const A &b) {
    a.mean += b.mean;
    a.second += b.second;
  }
};

/* g as it counts. */
template <class T>
static __device__ __forceinline__ T bn_gated(const BnParams &p, const int64_t *at,
                                             const BnChannel<T> &k, T x) {
  T g = load_as<T>(p.places.dtype[BN_G], p.places.data[BN_G], at[BN_G]), z;
  if (p.gate == BN_GATE_NONE) return g;
  if (p.gate == BN_GATE_X) z = (x - k.shift) * k.scale + k.bias;
  else z = load_as<T>(p.places.dtype[BN_ACT], p.places.data[BN_ACT], at[BN_ACT]);
  if (p.gate == BN_GATE_SUM) g += load_as<T>(p.places.dtype[BN_H], p.places.data[BN_H], at[BN_H]);
  g = z > 0 ? g : T(0);
  if (p.gate >= BN_GATE_KEEP) store_as<T>(p.places.dtype[BN_G], p.places.data[BN_G], at[BN_G], g);
  return g;
}

/* The sums of g and of g (x - mean). */
template <class U>
struct BnBack {
  typedef U T;
  static __device__ void add(BnSums<T> &s, const BnParams &p, const int64_t *at, int64_t channel) {
    const BnChannel<T> &k = ((const BnChannel<T> *)p.coefs)[channel];
    T x = load_as<T>(p.places.dtype[BN_X], p.places.data[BN_X], at[BN_X]);
    T g = bn_gated(p, at, k, x);
    s.mean += g;
    s.second += g * (x - k.shift);
  }
  template <class A>
  static __device__ void join(A &a, const A &b) {
    BnTotal<T>::join(a, b);
  }
};

template <class B>
static __global__ void __launch_bounds__(BN_BLOCK) bn_sums(const __grid_constant__ BnParams p) {
  typedef typename B::T T;
  __shared__ BnSums<T> room[BN_BLOCK];
  int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, t = (int)threadIdx.x;
  int64_t channel = p.aside ? (int64_t)blockIdx.x * WARP + lane : blockIdx.x;
  int64_t each = (p.places.numel + p.parts - 1) / p.parts, from = blockIdx.y * each;
  int64_t end = from + each < p.places.numel ? from + each : p.places.numel, at[BN_OPERANDS];
  BnSums<T> s = {T(0), T(0), T(0)};
  if (channel < p.channels)
    for (int64_t r = from + (p.aside ? warp : t); r < end; r += p.aside ? BN_WARPS : BN_BLOCK) {
      walk_at(p.places, BN_OPERANDS, r, at);
      for (int k = 0; k < BN_OPERANDS; k++) at[k] += channel * p.step[k];
      B::add(s, p, at, channel);
    }
  room[t] = s;
  for (int by = BN_BLOCK / 2; by >= (p.aside ? WARP : 1); by /= 2) {
    __syncthreads();
    if (t < by) B::join(room[t], room[t + by]);
  }
  if (t < (p.aside ? WARP : 1) && channel < p.channels)
    ((BnSums<T> *)p.partial)[blockIdx.y * p.channels + channel] = room[t];
}

/* All parts of a channel. */
template <class B>
static __device__ __forceinline__ BnSums<double> bn_join(const BnParams &p, int64_t channel) {
  BnSums<double> all = {0, 0, 0};
  for (int k = 0; k < p.parts; k++) {
    const BnSums<typename B::T> &s =
        ((const BnSums<typename B::T> *)p.partial)[k * p.channels + channel];
    BnSums<double> one = {(double)s.n, (double)s.mean, (double)s.second};
    B::join(all, one);
  }
  return all;
}

/* -- Coefficients ------------------------------------------------------------------------------ */

/* One number a channel; absent: `none`. */
struct BnVector {
  void *data;
  int64_t step;
  int dtype;
};
static BnVector bn_vector(const View *v) {
  BnVector r = {NULL, 0, v->dtype};
  if (!view_absent(v)) r.data = v->data, r.step = v->stride[0];
  return r;
}
static __device__ __forceinline__ double bn_item(const BnVector &v, int64_t i, double none) {
  return v.data ? load_as<double>(v.dtype, v.data, i * v.step) : none;
}
static __device__ __forceinline__ void bn_set(const BnVector &v, int64_t i, double value) {
  store_as<double>(v.dtype, v.data, i * v.step, value);
}

struct BnFinish {
  BnVector mean, rstd, weight, bias, running_mean, running_var, gw, gb;
  double count, momentum, eps;
  bool training, again, params;
};

template <class T>
static __global__ void __launch_bounds__(BN_BLOCK)
    bn_finish(const __grid_constant__ BnParams p, const __grid_constant__ BnFinish f) {
  int64_t i = (int64_t)blockIdx.x * BN_BLOCK + threadIdx.x;
  if (i >= p.channels) return;
  BnChannel<T> *k = (BnChannel<T> *)p.coefs + i;
  double mean, var = 0;
  if (f.again) {
    mean = bn_item(f.mean, i, 0);
  } else if (f.training) {
    BnSums<double> s = bn_join<BnMoments<T>>(p, i);
    mean = f.count > 0 ? s.mean : 0;
    var = f.count > 0 ? s.second / f.count : 0;
    if (f.running_mean.data && f.count > 0) {
      bn_set(f.running_mean, i,
             (1 - f.momentum) * bn_item(f.running_mean, i, 0) + f.momentum * mean);
      bn_set(f.running_var, i,
             (1 - f.momentum) * bn_item(f.running_var, i, 0) +
                 f.momentum * (s.second / (f.count - 1)));
    }
  } else {
    mean = bn_item(f.running_mean, i, 0);
    var = bn_item(f.running_var, i, 0);
  }
  if (!f.again) bn_set(f.mean, i, mean), bn_set(f.rstd, i, 1 / sqrt(var + f.eps));
  k->shift = (T)bn_item(f.mean, i, 0); /* as rounded: the gradient computes y from them again */
  k->a = (T)(bn_item(f.rstd, i, 0) * bn_item(f.weight, i, 1));
  k->b = (T)bn_item(f.bias, i, 0);
}

/* What the sums of g need. */
template <class T>
static __global__ void __launch_bounds__(BN_BLOCK)
    bn_back_start(const __grid_constant__ BnParams p, const __grid_constant__ BnFinish f) {
  int64_t i = (int64_t)blockIdx.x * BN_BLOCK + threadIdx.x;
  if (i >= p.channels) return;
  BnChannel<T> *k = (BnChannel<T> *)p.coefs + i;
  k->shift = (T)bn_item(f.mean, i, 0);
  k->scale = (T)(bn_item(f.rstd, i, 0) * bn_item(f.weight, i, 1));
  k->bias = (T)bn_item(f.bias, i, 0);
}

template <class T>
static __global__ void __launch_bounds__(BN_BLOCK)
    bn_back_finish(const __grid_constant__ BnParams p, const __grid_constant__ BnFinish f) {
  int64_t i = (int64_t)blockIdx.x * BN_BLOCK + threadIdx.x;
  if (i >= p.channels) return;
  BnChannel<T> *k = (BnChannel<T> *)p.coefs + i;
  BnSums<double> s = {0, 0, 0};
  if (p.parts) s = bn_join<BnBack<T>>(p, i);
  double r = bn_item(f.rstd, i, 0), scale = r * bn_item(f.weight, i, 1);
  if (f.params) bn_set(f.gw, i, s.second * r), bn_set(f.gb, i, s.mean);
  if (!f.training) s.mean = s.second = 0;
  k->a = (T)scale;
  k->b = f.count > 0 ? (T)(-scale * r * r * s.second / f.count) : T(0);
  k->c = f.count > 0 ? (T)(-scale * s.mean / f.count) : T(0);
}

/* -- Elements ---------------------------------------------------------------------------------- */

/* Operands: result, x, channel (its number, as a stride), residual or g, y of a gate. */
enum { BN_EACH_OPERANDS = 5 };
struct BnEach {
  Walk<BN_EACH_OPERANDS> walk;
  bool back, residual, relu;
  int gate;
  const void *coefs;
};

template <class T>
static __device__ __forceinline__ void bn_element(const BnEach &p, const int64_t *at) {
  const Walk<BN_EACH_OPERANDS> &w = p.walk;
  const BnChannel<T> &k = ((const BnChannel<T> *)p.coefs)[at[2]];
  T x = load_as<T>(w.dtype[1], w.data[1], at[1]), y;
  if (!p.back) {
    y = bn_normal(x, k);
    if (p.residual) y += load_as<T>(w.dtype[3], w.data[3], at[3]);
    if (p.relu) y = y < 0 ? T(0) : y;
  } else {
    T g = load_as<T>(w.dtype[3], w.data[3], at[3]);
    if (p.gate == BN_GATE_X && !((x - k.shift) * k.scale + k.bias > 0)) g = T(0);
    if (p.gate == BN_GATE_Y && !(load_as<T>(w.dtype[4], w.data[4], at[4]) > 0)) g = T(0);
    y = k.a * g + k.b * (x - k.shift) + k.c;
  }
  store_as<T>(w.dtype[0], w.data[0], at[0], y);
}

template <class T>
static __global__ void __launch_bounds__(BN_BLOCK) bn_each(const __grid_constant__ BnEach p) {
  int64_t i = (int64_t)blockIdx.x * (BN_BLOCK * BN_EACH) + threadIdx.x, at[BN_EACH_OPERANDS];
  for (int k = 0; k < BN_EACH && i < p.walk.numel; k++, i += BN_BLOCK) {
    walk_at(p.walk, BN_EACH_OPERANDS, i, at);
    bn_element<T>(p, at);
  }
}

/* -- Launch ------------------------------------------------------------------------------------ */

/* Views of x's shape, without the dim of channels. */
static void bn_places(BnParams *p, const View *const *views) {
  const View *x = views[BN_X];
  View v[BN_OPERANDS];
  int64_t shape[MF_MAX_DIMS], stride[BN_OPERANDS][MF_MAX_DIMS];
  p->channels = x->shape[1];
  for (int k = 0; k < BN_OPERANDS; k++) {
    v[k] = views[k] ? *views[k] : *x;
    p->step[k] = v[k].stride[1];
    for (int d = 0, to = 0; d < x->ndim; d++)
      if (d != 1) shape[to] = x->shape[d], stride[k][to++] = v[k].stride[d];
    v[k].shape = shape, v[k].stride = stride[k], v[k].ndim = (int8_t)(x->ndim - 1);
  }
  walk_init(&p->places, &v[0], BN_OPERANDS - 1, &v[1]);
  int64_t inner = p->places.ndim ? p->places.step[0][p->places.ndim - 1] : 1;
  p->aside = p->channels > 1 && (p->step[BN_X] < inner || !p->places.ndim);
  int64_t rows = p->places.numel / ((int64_t)BN_ROWS * (p->aside ? 1 : 8));
  if (rows > BN_PARTS) rows = BN_PARTS;
  p->parts = rows > 1 ? (int)rows : 1;
}

/* Scratch for partial sums and coefficients. */
static int bn_room(const OpCall *c, BnParams *p, bool is_double) {
  size_t size = is_double ? 8 : 4;
  size_t sums = scratch_aligned((size_t)(p->parts * p->channels) * 3 * size);
  char *at = (char *)kernel_scratch(c, sums + (size_t)p->channels * 6 * size);
  p->partial = at;
  p->coefs = at ? at + sums : NULL;
  return at ? 0 : MF_ENOMEM;
}

template <class B>
static int bn_sums_launch(const OpCall *c, const BnParams *p) {
  if (!p->places.numel || !p->channels) return 0;
  dim3 grid(grid_for(p->channels, p->aside ? WARP : 1), (unsigned)p->parts);
  return LAUNCH(c, bn_sums<B>, grid, BN_BLOCK, 0, *p);
}

/* result, x, residual or g, y of the gate; the last two may be NULL. */
template <class T>
static int bn_each_launch(const OpCall *c, BnEach *e, const View *y, const View *x, const View *r,
                          const View *act) {
  int64_t stride[MF_MAX_DIMS] = {0};
  View in[4] = {*x, *x, r ? *r : *x, act ? *act : *x};
  stride[1] = 1;
  in[1].stride = stride;
  walk_init(&e->walk, y, 4, in);
  if (!e->walk.numel) return 0;
  return LAUNCH(c, bn_each<T>, grid_for(e->walk.numel, BN_BLOCK * BN_EACH), BN_BLOCK, 0, *e);
}

/* -- Forward ----------------------------------------------------------------------------------- */

template <class T>
static int bn_forward(const OpCall *c, BnFinish *f, const View *residual, bool relu) {
  const View *x = &c->in[0], *views[BN_OPERANDS] = {x};
  BnParams p = {};
  bn_places(&p, views);
  int rc = bn_room(c, &p, sizeof(T) == 8);
  f->count = (double)p.places.numel;
  if (!rc && f->training) rc = bn_sums_launch<BnMoments<T>>(c, &p);
  if (!rc && !p.places.numel) p.parts = 0;
  if (!rc && p.channels)
    rc = LAUNCH(c, bn_finish<T>, grid_for(p.channels, BN_BLOCK), BN_BLOCK, 0, p, *f);
  BnEach e = {};
  e.residual = residual, e.relu = relu, e.coefs = p.coefs;
  return rc ? rc : bn_each_launch<T>(c, &e, &c->out[0], x, residual, NULL);
}

/* With running statistics, weight and bias as inputs 1 to 4. */
static int bn_train(const OpCall *c, bool training, double momentum, double eps,
                    const View *residual, bool relu) {
  BnFinish f = {};
  f.running_mean = bn_vector(&c->in[1]), f.running_var = bn_vector(&c->in[2]);
  f.weight = bn_vector(&c->in[3]), f.bias = bn_vector(&c->in[4]);
  f.mean = bn_vector(&c->out[1]), f.rstd = bn_vector(&c->out[2]);
  f.training = training, f.momentum = momentum, f.eps = eps;
  return c->out[0].dtype == F64 ? bn_forward<double>(c, &f, residual, relu)
                                : bn_forward<float>(c, &f, residual, relu);
}

static int batch_norm_cuda(const OpCall *c) {
  const struct batch_norm_args *a = (const struct batch_norm_args *)c->args;
  return bn_train(c, a->training, a->momentum, a->eps, NULL, false);
}
KERNEL(batch_norm, batch_norm_cuda)

static int batch_norm_act_cuda(const OpCall *c) {
  const struct batch_norm_act_args *a = (const struct batch_norm_act_args *)c->args;
  return bn_train(c, a->training, a->momentum, a->eps, view_absent(&c->in[5]) ? NULL : &c->in[5],
                  a->relu);
}
KERNEL(batch_norm_act, batch_norm_act_cuda)

static int batch_norm_again_cuda(const OpCall *c) {
  BnFinish f = {};
  f.mean = bn_vector(&c->in[1]), f.rstd = bn_vector(&c->in[2]);
  f.weight = bn_vector(&c->in[3]), f.bias = bn_vector(&c->in[4]);
  f.again = true;
  bool relu = ((const struct batch_norm_again_args *)c->args)->relu;
  return c->out[0].dtype == F64 ? bn_forward<double>(c, &f, NULL, relu)
                                : bn_forward<float>(c, &f, NULL, relu);
}
KERNEL(batch_norm_again, batch_norm_again_cuda)

/* -- Backward ---------------------------------------------------------------------------------- */

struct BnBackward {
  const View *g, *x, *act, *h;
  bool training, params;
  BnGate gate;
};

template <class T>
static int bn_backward(const OpCall *c, const BnBackward *b, BnFinish *f) {
  const View *views[BN_OPERANDS] = {b->x, b->g, b->act, b->h};
  BnParams p = {};
  bn_places(&p, views);
  p.gate = b->gate;
  bool sums = b->training || b->params || b->gate >= BN_GATE_KEEP;
  int rc = bn_room(c, &p, sizeof(T) == 8);
  f->count = (double)p.places.numel;
  f->training = b->training, f->params = b->params;
  if (rc || !p.channels) return rc;
  unsigned grid = grid_for(p.channels, BN_BLOCK);
  rc = LAUNCH(c, bn_back_start<T>, grid, BN_BLOCK, 0, p, *f);
  if (!rc && sums) rc = bn_sums_launch<BnBack<T>>(c, &p);
  if (!sums || !p.places.numel) p.parts = 0;
  if (!rc) rc = LAUNCH(c, bn_back_finish<T>, grid, BN_BLOCK, 0, p, *f);
  BnEach e = {};
  e.back = true, e.coefs = p.coefs;
  e.gate = b->gate >= BN_GATE_KEEP ? BN_GATE_NONE : b->gate;
  return rc ? rc : bn_each_launch<T>(c, &e, &c->out[0], b->x, b->g, b->act);
}

static int bn_backward_run(const OpCall *c, const BnBackward *b, BnFinish *f) {
  f->gw = bn_vector(&c->out[1]), f->gb = bn_vector(&c->out[2]);
  return c->out[0].dtype == F64 ? bn_backward<double>(c, b, f) : bn_backward<float>(c, b, f);
}

static int batch_norm_backward_cuda(const OpCall *c) {
  const struct batch_norm_backward_args *a = (const struct batch_norm_backward_args *)c->args;
  BnBackward b = {&c->in[0], &c->in[1], NULL, NULL, a->training, a->params, BN_GATE_NONE};
  BnFinish f = {};
  f.mean = bn_vector(&c->in[2]), f.rstd = bn_vector(&c->in[3]), f.weight = bn_vector(&c->in[4]);
  return bn_backward_run(c, &b, &f);
}
KERNEL(batch_norm_backward, batch_norm_backward_cuda)

static int batch_norm_act_backward_cuda(const OpCall *c) {
  const struct batch_norm_act_backward_args *a =
      (const struct batch_norm_act_backward_args *)c->args;
  const View *y = view_absent(&c->in[1]) ? NULL : &c->in[1];
  const View *h = view_absent(&c->in[7]) ? NULL : &c->in[7];
  BnGate gate = !y ? BN_GATE_X : !a->residual ? BN_GATE_Y : !h ? BN_GATE_KEEP : BN_GATE_SUM;
  BnBackward b = {&c->in[0], &c->in[2], y, h, a->training, a->params, gate};
  BnFinish f = {};
  f.mean = bn_vector(&c->in[3]), f.rstd = bn_vector(&c->in[4]);
  f.weight = bn_vector(&c->in[5]), f.bias = bn_vector(&c->in[6]);
  return bn_backward_run(c, &b, &f);
}
KERNEL(batch_norm_act_backward, batch_norm_act_backward_cuda)

/* -- The gradient of a bias -------------------------------------------------------------------- */

template <class T>
static __global__ void __launch_bounds__(BN_BLOCK)
    bn_total(const __grid_constant__ BnParams p, const __grid_constant__ BnVector to) {
  int64_t i = (int64_t)blockIdx.x * BN_BLOCK + threadIdx.x;
  if (i < p.channels) bn_set(to, i, bn_join<BnTotal<T>>(p, i).mean);
}

template <class T>
static int channel_sums_of(const OpCall *c, const View *x, const View *y) {
  const View *views[BN_OPERANDS] = {x};
  BnParams p = {};
  bn_places(&p, views);
  int rc = bn_room(c, &p, sizeof(T) == 8);
  if (rc || !p.channels) return rc;
  if (!p.places.numel) return copy_fill(c, y, 0);
  rc = bn_sums_launch<BnTotal<T>>(c, &p);
  if (rc) return rc;
  return LAUNCH(c, bn_total<T>, grid_for(p.channels, BN_BLOCK), BN_BLOCK, 0, p, bn_vector(y));
}

int channel_sums(const OpCall *c, const View *x, const View *y) {
  return y->dtype == F64 ? channel_sums_of<double>(c, x, y) : channel_sums_of<float>(c, x, y);
}
