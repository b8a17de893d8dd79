/* Optimisers as multi-tensor ops: one launch updates up to FLEET tensors in one pass over memory, a
 * block a chunk of one of them. Formulas are the cpu's (src/op/optim.c); halves are computed in
 * float32. A gradient of another dtype or order in memory is copied into scratch first. Bytes:
 * parameters and states twice, gradients once. */
#include <stdlib.h>

#include "kernel.cuh"
#include "vendor.h"

enum { FLEET = 48, FLEET_STATES = 3, FLEET_BLOCK = 256, FLEET_EACH = 8 };
static constexpr int64_t FLEET_CHUNK = FLEET_BLOCK * FLEET_EACH;

struct Fleet {
  int n, n_states;
  void *param[FLEET], *state[FLEET_STATES][FLEET];
  const void *grad[FLEET];
  int64_t numel[FLEET];
  unsigned first[FLEET]; /* block */
  uint8_t dtype[FLEET];
  const double
      *skip; /* two numbers: whether the step is left out, and how many were before; or NULL */
  int64_t skip_step;
  const void *factor; /* of the gradients, or NULL: `scale` */
  int factor_dtype;
  double scale;
};

/* g times the factor, rounded to the dtype as it would be in memory. */
template <class T>
static __device__ T scaled(const Fleet &f, int dtype, T g) {
  T by = f.factor ? load_as<T>(f.factor_dtype, f.factor, 0) : (T)f.scale, kept = g * by;
  if (by == (T)1) return g;
  if (dtype == F16 || dtype == BF16) {
    uint64_t half; /* room for any */
    store_as<T>(dtype, &half, 0, kept);
    kept = load_as<T>(dtype, &half, 0);
  }
  return kept;
}

template <class R, class T>
static __global__ void __launch_bounds__(FLEET_BLOCK)
    fleet_kernel(const __grid_constant__ Fleet f, R rule) {
  int t = 0;
  if (f.skip && f.skip[0] != 0) return;
  if (f.skip) rule.settle(f.skip[f.skip_step]);
  while (t + 1 < f.n && f.first[t + 1] <= blockIdx.x) t++;
  int64_t i = (int64_t)(blockIdx.x - f.first[t]) * FLEET_CHUNK + threadIdx.x;
  int dtype = f.dtype[t];
  for (int k = 0; k < FLEET_EACH && i < f.numel[t]; k++, i += FLEET_BLOCK) {
    T p = load_as<T>(dtype, f.param[t], i), g = load_as<T>(dtype, f.grad[t], i), s[FLEET_STATES];
    if (f.factor || f.scale != 1) g = scaled<T>(f, dtype, g);
    for (int j = 0; j < f.n_states; j++) s[j] = load_as<T>(dtype, f.state[j][t], i);
    rule.update(p, g, s, f.n_states);
    store_as<T>(dtype, f.param[t], i, p);
    for (int j = 0; j < f.n_states; j++) store_as<T>(dtype, f.state[j][t], i, s[j]);
  }
}

/* -- Rules ------------------------------------------------------------------------------------- */

struct SgdRule {
  double lr, momentum, dampening, weight_decay, sign, since;
  bool nesterov, first;
  __host__ __device__ void settle(double left_out) {
    first = since - left_out <= 0;
  }
  template <class T>
  __device__ void update(T &p, T g, T *s, int states) const {
    T x = (T)sign * g + (T)weight_decay * p, m = (T)momentum;
    if (states) {
      s[0] = first ? x : m * s[0] + (T)(1 - dampening) * x;
      x = nesterov ? x + m * s[0] : s[0];
    }
    p -= (T)lr * x;
  }
};

struct AdamRule {
  double lr, step, beta1, beta2, eps, decay, weight_decay, sign, step_size, root2;
  __host__ __device__ void settle(double left_out) {
    step_size = lr / (1 - pow(beta1, step - left_out));
    root2 = sqrt(1 - pow(beta2, step - left_out));
  }
  template <class T>
  __device__ void update(T &p, T g, T *s, int states) const {
    T w = p * (T)decay, x = (T)sign * g + (T)weight_decay * w;
    T a = s[0] + (T)(1 - beta1) * (x - s[0]), b = (T)beta2 * s[1] + (T)(1 - beta2) * x * x, top = b;
    if (states > 2) s[2] = top = s[2] > b ? s[2] : b;
    s[0] = a, s[1] = b;
    p = w - (T)step_size * a / (sqrt(top) * (T)(1 / root2) + (T)eps);
  }
};

struct AdagradRule {
  double base, step, lr_decay, weight_decay, eps, sign, lr;
  __host__ __device__ void settle(double left_out) {
    lr = base / (1 + (step - left_out - 1) * lr_decay);
  }
  template <class T>
  __device__ void update(T &p, T g, T *s, int) const {
    T x = (T)sign * g + (T)weight_decay * p;
    s[0] += x * x;
    p -= (T)lr * x / (sqrt(s[0]) + (T)eps);
  }
};

struct RmspropRule {
  double lr, alpha, eps, weight_decay, momentum, sign;
  bool centered;
  __host__ __device__ void settle(double) {
  }
  template <class T>
  __device__ void update(T &p, T g, T *s, int) const {
    T x = (T)sign * g + (T)weight_decay * p, be = (T)(1 - alpha);
    T v = s[0] = (T)alpha * s[0] + be * x * x;
    if (centered) {
      s[1] += be * (x - s[1]);
      v -= s[1] * s[1];
    }
    x /= sqrt(v) + (T)eps;
    if (momentum > 0) {
      T &buf = centered ? s[2] : s[1];
      x = buf = (T)momentum * buf + x;
    }
    p -= (T)lr * x;
  }
};

struct AdadeltaRule {
  double lr, rho, eps, weight_decay, sign;
  __host__ __device__ void settle(double) {
  }
  template <class T>
  __device__ void update(T &p, T g, T *s, int) const {
    T x = (T)sign * g + (T)weight_decay * p, co = (T)(1 - rho);
    s[0] = (T)rho * s[0] + co * x * x;
    T delta = sqrt(s[1] + (T)eps) / sqrt(s[0] + (T)eps) * x;
    s[1] = (T)rho * s[1] + co * delta * delta;
    p -= (T)lr * delta;
  }
};

struct AdamaxRule {
  double lr, step, beta1, beta2, eps, weight_decay, sign, step_size;
  __host__ __device__ void settle(double left_out) {
    step_size = lr / (1 - pow(beta1, step - left_out));
  }
  template <class T>
  __device__ void update(T &p, T g, T *s, int) const {
    T x = (T)sign * g + (T)weight_decay * p, old = (T)beta2 * s[1], size = fabs(x) + (T)eps;
    s[0] += (T)(1 - beta1) * (x - s[0]);
    s[1] = old > size ? old : size;
    p -= (T)step_size * s[0] / s[1];
  }
};

/* Times a number: of the host, or where it lies. */
struct ScaleRule {
  double value;
  const void *at;
  int dtype;
  __host__ __device__ void settle(double) {
  }
  template <class T>
  __device__ void update(T &p, T, T *, int) const {
    p *= at ? load_as<T>(dtype, at, 0) : (T)value;
  }
};

/* -- Launch ------------------------------------------------------------------------------------ */

static bool same_layout(const View *a, const View *b) {
  return a->dtype == b->dtype && !memcmp(a->stride, b->stride, sizeof(int64_t) * (size_t)a->ndim);
}

template <class R>
static int fleet_flush(const OpCall *c, Fleet *f, unsigned blocks, bool is_double, const R &rule) {
  int rc = 0;
  if (blocks && is_double)
    rc = LAUNCH(c, (fleet_kernel<R, double>), blocks, FLEET_BLOCK, 0, *f, rule);
  else if (blocks) rc = LAUNCH(c, (fleet_kernel<R, float>), blocks, FLEET_BLOCK, 0, *f, rule);
  f->n = 0;
  return rc;
}

/* Gradients in the layout of their parameters, for those that are not: in scratch. */
static int fleet_copy_grads(const OpCall *c, int64_t n, const View *param, const View *grad,
                            const void **data) {
  size_t bytes = 0;
  for (int64_t i = 0; i < n; i++)
    if (!same_layout(&param[i], &grad[i]))
      bytes += scratch_aligned((size_t)view_numel(&param[i]) * dtype_size((DType)param[i].dtype));
  char *at = bytes ? (char *)kernel_scratch(c, bytes) : NULL;
  if (bytes && !at) return MF_ENOMEM;
  for (int64_t i = 0; i < n; i++) {
    data[i] = grad[i].data;
    if (same_layout(&param[i], &grad[i])) continue;
    View copy = param[i];
    copy.data = at;
    data[i] = at;
    at += scratch_aligned((size_t)view_numel(&param[i]) * dtype_size((DType)param[i].dtype));
    int rc = copy_launch(c, &grad[i], &copy);
    if (rc) return rc;
  }
  return 0;
}

/* n tensors, their gradients (NULL: none are read), and of each state as many; skip and factor may
 * be NULL, or absent. */
template <class R>
static int fleet_run(const OpCall *c, int64_t n, const View *param, const View *grad,
                     const View *states, int n_states, const View *skip, const View *factor,
                     const R &rule) {
  const void **data = NULL;
  Fleet f = {};
  f.scale = 1;
  if (factor && !view_absent(factor)) {
    bool near = factor->device != DEVICE_CPU;
    f.factor = near ? factor->data : NULL;
    f.factor_dtype = factor->dtype;
    if (!near) f.scale = dtype_get_f64((DType)factor->dtype, factor->data);
  }
  f.n_states = n_states;
  if (skip && !view_absent(skip))
    f.skip = (const double *)skip->data, f.skip_step = skip->stride[0];
  int rc = 0;
  if (grad) {
    data = (const void **)calloc((size_t)n + 1, sizeof *data);
    rc = data ? fleet_copy_grads(c, n, param, grad, data) : MF_ENOMEM;
  }
  for (int wide = 0; wide < 2; wide++) {
    unsigned blocks = 0;
    for (int64_t i = 0; i < n && !rc; i++) {
      int64_t numel = view_numel(&param[i]);
      if (!numel || (param[i].dtype == F64) != wide) continue;
      f.param[f.n] = param[i].data;
      f.grad[f.n] = grad ? data[i] : param[i].data;
      for (int k = 0; k < n_states; k++) f.state[k][f.n] = states[k * n + i].data;
      f.numel[f.n] = numel;
      f.dtype[f.n] = param[i].dtype;
      f.first[f.n++] = blocks;
      blocks += (unsigned)((numel + FLEET_CHUNK - 1) / FLEET_CHUNK);
      if (f.n < FLEET) continue;
      rc = fleet_flush(c, &f, blocks, wide, rule);
      blocks = 0;
    }
    if (!rc) rc = fleet_flush(c, &f, blocks, wide, rule);
  }
  free(data);
  return rc;
}

template <class R>
static int optimise(const OpCall *c, int64_t n, int n_states, R rule) {
  const View *behind = &c->in[c->n_in - 2]; /* the lists: factor, skip */
  rule.settle(0);
  return fleet_run(c, n, c->in, c->in + n, c->in + 2 * n, n_states, behind + 1, behind, rule);
}

/* -- The ops ----------------------------------------------------------------------------------- */

static int sgd_cuda(const OpCall *c) {
  const struct sgd__args *a = (const struct sgd__args *)c->args;
  SgdRule rule = {a->lr,
                  a->momentum,
                  a->dampening,
                  a->weight_decay,
                  a->maximize ? -1.0 : 1.0,
                  (double)a->since,
                  a->nesterov,
                  false};
  return optimise(c, a->n_params, a->n_bufs ? 1 : 0, rule);
}
KERNEL(sgd_, sgd_cuda)

template <class A>
static AdamRule adam_rule(const A *a) {
  AdamRule rule = {a->lr,
                   (double)a->step,
                   a->beta1,
                   a->beta2,
                   a->eps,
                   a->decoupled ? 1 - a->lr * a->weight_decay : 1,
                   a->decoupled ? 0 : a->weight_decay,
                   a->maximize ? -1.0 : 1.0,
                   0,
                   0};
  return rule;
}

static int adam_cuda(const OpCall *c) {
  const struct adam__args *a = (const struct adam__args *)c->args;
  return optimise(c, a->n_params, a->n_max_exp_avg_sqs ? 3 : 2, adam_rule(a));
}
KERNEL(adam_, adam_cuda)

static int adagrad_cuda(const OpCall *c) {
  const struct adagrad__args *a = (const struct adagrad__args *)c->args;
  AdagradRule rule = {
      a->lr, (double)a->step, a->lr_decay, a->weight_decay, a->eps, a->maximize ? -1.0 : 1.0, 0};
  return optimise(c, a->n_params, 1, rule);
}
KERNEL(adagrad_, adagrad_cuda)

static int rmsprop_cuda(const OpCall *c) {
  const struct rmsprop__args *a = (const struct rmsprop__args *)c->args;
  RmspropRule rule = {a->lr,
                      a->alpha,
                      a->eps,
                      a->weight_decay,
                      a->n_bufs ? a->momentum : 0,
                      a->maximize ? -1.0 : 1.0,
                      a->n_grad_avgs > 0};
  return optimise(c, a->n_params, 1 + (a->n_grad_avgs > 0) + (a->n_bufs > 0), rule);
}
KERNEL(rmsprop_, rmsprop_cuda)

static int adadelta_cuda(const OpCall *c) {
  const struct adadelta__args *a = (const struct adadelta__args *)c->args;
  AdadeltaRule rule = {a->lr, a->rho, a->eps, a->weight_decay, a->maximize ? -1.0 : 1.0};
  return optimise(c, a->n_params, 2, rule);
}
KERNEL(adadelta_, adadelta_cuda)

static int adamax_cuda(const OpCall *c) {
  const struct adamax__args *a = (const struct adamax__args *)c->args;
  AdamaxRule rule = {a->lr,           (double)a->step,          a->beta1, a->beta2, a->eps,
                     a->weight_decay, a->maximize ? -1.0 : 1.0, 0};
  return optimise(c, a->n_params, 2, rule);
}
KERNEL(adamax_, adamax_cuda)

static int zero_all_cuda(const OpCall *c) {
  int rc = 0;
  for (int k = 0; k < c->n_in && !rc; k++) rc = copy_fill(c, &c->in[k], 0);
  return rc;
}
KERNEL(zero_all_, zero_all_cuda)

static int scale_all_cuda(const OpCall *c) {
  const View *scale = &c->in[0];
  ScaleRule rule = {0, scale->data, scale->dtype};
  if (scale->device == DEVICE_CPU) {
    rule.value = dtype_get_f64((DType)scale->dtype, scale->data);
    rule.at = NULL;
  }
  return fleet_run(c, c->n_in - 1, c->in + 1, NULL, NULL, 0, NULL, NULL, rule);
}
KERNEL(scale_all_, scale_all_cuda)

/* -- Rows -------------------------------------------------------------------------------------- */

/* The rows `ids` of one parameter, each once with the sum of its gradients. */
struct Rows {
  void *param, *state[FLEET_STATES];
  const void *values;
  const int64_t *ids;
  uint64_t *keys;
  int64_t *places, n, width, rows;
  int n_states, dtype, op;
  const double *skip; /* as a Fleet's */
  int64_t skip_step;
  DeviceError *error;
};

/* An id out of range is reported, and sorted behind all. */
static __global__ void __launch_bounds__(FLEET_BLOCK) rows_keys(const __grid_constant__ Rows r) {
  int64_t i = (int64_t)blockIdx.x * FLEET_BLOCK + threadIdx.x;
  if (i >= r.n) return;
  bool legal = r.ids[i] >= 0 && r.ids[i] < r.rows;
  if (!legal) report_range(r.error, r.op, 1, r.ids[i], i, 0, r.rows - 1);
  r.keys[i] = legal ? (uint64_t)r.ids[i] : UINT64_MAX;
  r.places[i] = i;
}

/* A block a lookup; the first of an id does the work of all. */
template <class R, class T>
static __global__ void __launch_bounds__(FLEET_BLOCK)
    rows_kernel(const __grid_constant__ Rows r, R rule) {
  int64_t first = blockIdx.x, last = first + 1;
  if (r.skip && r.skip[0] != 0) return;
  if (r.skip) rule.settle(r.skip[r.skip_step]);
  uint64_t id = r.keys[first];
  if (id == UINT64_MAX || (first && r.keys[first - 1] == id)) return;
  while (last < r.n && r.keys[last] == id) last++;
  for (int64_t j = threadIdx.x; j < r.width; j += FLEET_BLOCK) {
    int64_t at = (int64_t)id * r.width + j;
    T p = load_as<T>(r.dtype, r.param, at), g = T(0), s[FLEET_STATES];
    for (int64_t k = first; k < last; k++)
      g += load_as<T>(r.dtype, r.values, r.places[k] * r.width + j);
    if (r.dtype == F16) g = element<T>(Stored<Half>::of(g)); /* as a gradient of that dtype is */
    if (r.dtype == BF16) g = element<T>(Stored<Bfloat>::of(g));
    for (int k = 0; k < r.n_states; k++) s[k] = load_as<T>(r.dtype, r.state[k], at);
    rule.update(p, g, s, r.n_states);
    store_as<T>(r.dtype, r.param, at, p);
    for (int k = 0; k < r.n_states; k++) store_as<T>(r.dtype, r.state[k], at, s[k]);
  }
}

template <class R>
static int rows_run(const OpCall *c, int n_states, R rule) {
  const View *p = &c->in[0];
  Rows r = {};
  r.param = p->data, r.dtype = p->dtype, r.rows = p->shape[0];
  r.ids = (const int64_t *)c->in[1].data, r.n = c->in[1].shape[0], r.values = c->in[2].data;
  r.n_states = n_states;
  for (int k = 0; k < n_states; k++) r.state[k] = c->in[3 + k].data;
  const View *skip = &c->in[c->n_in - 1];
  if (!view_absent(skip)) r.skip = (const double *)skip->data, r.skip_step = skip->stride[0];
  r.op = c->op->id, r.error = stream_error(c->stream);
  if (!r.n) return 0;
  r.width = r.rows ? view_numel(p) / r.rows : 0;
  if (!(r.keys = (uint64_t *)kernel_scratch(c, (size_t)r.n * 16))) return MF_ENOMEM;
  r.places = (int64_t *)r.keys + r.n;
  int rc = LAUNCH(c, rows_keys, grid_for(r.n, FLEET_BLOCK), FLEET_BLOCK, 0, r);
  if (!rc) rc = vendor_sort(c, 1, r.n, r.keys, r.places);
  rule.settle(0);
  if (rc) return rc;
  if (p->dtype == F64)
    return LAUNCH(c, (rows_kernel<R, double>), grid_for(r.n, 1), FLEET_BLOCK, 0, r, rule);
  return LAUNCH(c, (rows_kernel<R, float>), grid_for(r.n, 1), FLEET_BLOCK, 0, r, rule);
}

static int sgd_rows_cuda(const OpCall *c) {
  const struct sgd_rows__args *a = (const struct sgd_rows__args *)c->args;
  SgdRule rule = {a->lr,
                  a->momentum,
                  a->dampening,
                  a->weight_decay,
                  a->maximize ? -1.0 : 1.0,
                  (double)a->since,
                  a->nesterov,
                  false};
  return rows_run(c, view_absent(&c->in[3]) ? 0 : 1, rule);
}
KERNEL(sgd_rows_, sgd_rows_cuda)

static int adam_rows_cuda(const OpCall *c) {
  return rows_run(c, 2, adam_rule((const struct adam_rows__args *)c->args));
}
KERNEL(adam_rows_, adam_rows_cuda)

static int adagrad_rows_cuda(const OpCall *c) {
  const struct adagrad_rows__args *a = (const struct adagrad_rows__args *)c->args;
  AdagradRule rule = {a->lr, (double)a->step, a->lr_decay, 0, a->eps, a->maximize ? -1.0 : 1.0, 0};
  return rows_run(c, 1, rule);
}
KERNEL(adagrad_rows_, adagrad_rows_cuda)

/* -- The norm of many tensors ------------------------------------------------------------------ */

/* The sum of squares of one tensor in parts of a fixed size, so that it is the same in every run.
 */
static __global__ void __launch_bounds__(FLEET_BLOCK)
    squares_kernel(const __grid_constant__ Walk<1> w, int64_t each, double *parts) {
  __shared__ double room[WARP];
  int64_t begin = blockIdx.x * each, end = begin + each < w.numel ? begin + each : w.numel, at[1];
  double sum = 0;
  for (int64_t i = begin + threadIdx.x; i < end; i += FLEET_BLOCK) {
    walk_at(w, 1, i, at);
    double x = load_as<double>(w.dtype[0], w.data[0], at[0]);
    sum += x * x;
  }
  sum = block_reduce<OpAdd>(sum, room);
  if (!threadIdx.x) parts[blockIdx.x] = sum;
}

static __global__ void __launch_bounds__(FLEET_BLOCK)
    norm_of_parts(const double *parts, int64_t n, void *y, int dtype) {
  __shared__ double room[WARP];
  double sum = 0;
  for (int64_t i = threadIdx.x; i < n; i += FLEET_BLOCK) sum += parts[i];
  sum = block_reduce<OpAdd>(sum, room);
  if (!threadIdx.x) store_as<double>(dtype, y, 0, sqrt(sum));
}

static int total_norm_cuda(const OpCall *c) {
  const int64_t each = FLEET_BLOCK * 64;
  int64_t parts = 0, at = 0;
  for (int k = 0; k < c->n_in; k++) parts += (view_numel(&c->in[k]) + each - 1) / each;
  double *room = (double *)kernel_scratch(c, (size_t)(parts + 1) * sizeof *room);
  int rc = room ? 0 : MF_ENOMEM;
  for (int k = 0; k < c->n_in && !rc; k++) {
    Walk<1> w;
    walk_init(&w, &c->in[k], 0, (const View *)NULL);
    if (!w.numel) continue;
    unsigned blocks = grid_for(w.numel, each);
    rc = LAUNCH(c, squares_kernel, blocks, FLEET_BLOCK, 0, w, each, room + at);
    at += blocks;
  }
  if (rc) return rc;
  return LAUNCH(c, norm_of_parts, 1, FLEET_BLOCK, 0, room, parts, c->out[0].data,
                (int)c->out[0].dtype);
}
KERNEL(total_norm, total_norm_cuda)
