/* Random ops: the cpu's numbers, bit for bit, since they are made by the same text (rng_value.h)
 * from the same words. Bytes: those that are written, and of inputs.
 *
 * A thread makes the four words of one block. Of 32-bit draws, block 16 g + l gives elements 64 g +
 * 16 w + l, w = 0 to 3; of 64-bit ones, 32 g + 16 h + l, h = 0 and 1: so 16 threads write 16
 * neighbours at a time. */
#include "kernel.cuh"
#include "vendor.h"

#define RNG_INLINE static __host__ __device__ __forceinline__
#include "rng_value.h"

enum { DRAW_BLOCK = 256 };
enum DrawKind {
  DRAW_UNIFORM,
  DRAW_NORMAL,
  DRAW_BELOW,
  DRAW_BERNOULLI, /* 1 where the word is below `range` */
  DRAW_CHANCE,    /* 1 with the probability in the input */
  DRAW_DROP,      /* the input, scaled, where the word is at least `range` */
  DRAW_SCALED     /* normal, times input 1, plus input 0 */
};

struct DrawParams {
  Walk<3> walk; /* y in the order of its elements, and inputs */
  RngKey key;
  int kind;
  bool wide;   /* elements of 8 bytes: float64, whole numbers */
  double a, b; /* the smallest and the range; mean and deviation; b: the scale of what stays */
  int64_t low;
  uint64_t range;
  uint32_t digits; /* the bits of a word that the dtype can tell apart */
  DeviceError *error;
};

static __device__ void draw_words(const DrawParams &p, uint64_t block, uint32_t *w) {
  uint32_t counter[4] = {(uint32_t)block, (uint32_t)(block >> 32), (uint32_t)p.key.stream,
                         (uint32_t)(p.key.stream >> 32)};
  uint32_t key[2] = {(uint32_t)p.key.seed, (uint32_t)(p.key.seed >> 32)};
  rng_philox(counter, key, w);
}

/* Element i of y from v, and from the inputs there. */
template <class T>
static __device__ __forceinline__ void draw_put(const DrawParams &p, int64_t i, T v) {
  int64_t at[3];
  if (i >= p.walk.numel) return;
  walk_at(p.walk, 3, i, at);
  store_as<T>(p.walk.dtype[0], p.walk.data[0], at[0], v);
}

/* -- 4 bytes an element ------------------------------------------------------------------------ */

static __device__ float draw_masked(const DrawParams &p, int64_t i, uint32_t word) {
  int64_t at[3];
  walk_at(p.walk, 3, i, at);
  if (p.kind == DRAW_DROP) {
    float x = load_as<float>(p.walk.dtype[1], p.walk.data[1], at[1]);
    return word >= p.range ? x * (float)p.b : 0.0f;
  }
  double chance = load_as<double>(p.walk.dtype[1], p.walk.data[1], at[1]);
  return (double)word * 0x1p-32 < chance ? 1.0f : 0.0f;
}

static __global__ void __launch_bounds__(DRAW_BLOCK)
    draw_narrow(const __grid_constant__ DrawParams p) {
  int64_t block = (int64_t)blockIdx.x * DRAW_BLOCK + threadIdx.x;
  int64_t first = block / 16 * RNG_GROUP32 + block % 16;
  uint32_t w[4];
  float v[4];
  if (first >= p.walk.numel) return;
  draw_words(p, (uint64_t)block, w);
  if (p.kind == DRAW_NORMAL) {
    rng_normal32(w[0], w[1], &v[0], &v[1]);
    rng_normal32(w[2], w[3], &v[2], &v[3]);
  }
  for (int k = 0; k < 4; k++) {
    int64_t i = first + 16 * k;
    if (i >= p.walk.numel) return;
    if (p.kind == DRAW_UNIFORM)
      v[k] = rng_fmaf(rng_uniform32(w[k] & p.digits), (float)p.b, (float)p.a);
    else if (p.kind == DRAW_NORMAL) v[k] = rng_fmaf(v[k], (float)p.b, (float)p.a);
    else if (p.kind == DRAW_BERNOULLI) v[k] = w[k] < p.range ? 1.0f : 0.0f;
    else v[k] = draw_masked(p, i, w[k]);
    draw_put(p, i, v[k]);
  }
}

/* Dropout of float64: words are of 4 bytes, elements of 8. */
static __global__ void __launch_bounds__(DRAW_BLOCK)
    draw_drop_wide(const __grid_constant__ DrawParams p) {
  int64_t block = (int64_t)blockIdx.x * DRAW_BLOCK + threadIdx.x, at[3];
  int64_t first = block / 16 * RNG_GROUP32 + block % 16;
  uint32_t w[4];
  if (first >= p.walk.numel) return;
  draw_words(p, (uint64_t)block, w);
  for (int k = 0; k < 4 && first + 16 * k < p.walk.numel; k++) {
    walk_at(p.walk, 3, first + 16 * k, at);
    double x = load_as<double>(p.walk.dtype[1], p.walk.data[1], at[1]);
    store_as<double>(p.walk.dtype[0], p.walk.data[0], at[0], w[k] >= p.range ? x * p.b : 0.0);
  }
}

/* -- 8 bytes an element ------------------------------------------------------------------------ */

static __global__ void __launch_bounds__(DRAW_BLOCK)
    draw_wide(const __grid_constant__ DrawParams p) {
  int64_t block = (int64_t)blockIdx.x * DRAW_BLOCK + threadIdx.x;
  int64_t first = block / 16 * RNG_GROUP64 + block % 16;
  uint32_t w[4];
  double v[2];
  if (first >= p.walk.numel) return;
  draw_words(p, (uint64_t)block, w);
  uint64_t pair[2] = {(uint64_t)w[1] << 32 | w[0], (uint64_t)w[3] << 32 | w[2]};
  if (p.kind == DRAW_NORMAL) rng_normal64(pair[0], pair[1], &v[0], &v[1]);
  for (int k = 0; k < 2; k++) {
    int64_t i = first + 16 * k;
    if (p.kind == DRAW_BELOW) {
      draw_put(p, i, (int64_t)((uint64_t)p.low + rng_below(pair[k], p.range)));
    } else {
      double x = p.kind == DRAW_NORMAL ? v[k] : rng_uniform64(pair[k]);
      draw_put(p, i, rng_fma(x, p.b, p.a));
    }
  }
}

/* y = y std + mean. */
static __global__ void __launch_bounds__(DRAW_BLOCK)
    draw_scale(const __grid_constant__ DrawParams p) {
  int64_t i = (int64_t)blockIdx.x * DRAW_BLOCK + threadIdx.x, at[3];
  if (i >= p.walk.numel) return;
  walk_at(p.walk, 3, i, at);
  if (p.wide) {
    double y = load_as<double>(p.walk.dtype[0], p.walk.data[0], at[0]);
    y = rng_fma(y, load_as<double>(p.walk.dtype[2], p.walk.data[2], at[2]),
                load_as<double>(p.walk.dtype[1], p.walk.data[1], at[1]));
    store_as<double>(p.walk.dtype[0], p.walk.data[0], at[0], y);
  } else {
    float y = load_as<float>(p.walk.dtype[0], p.walk.data[0], at[0]);
    y = rng_fmaf(y, load_as<float>(p.walk.dtype[2], p.walk.data[2], at[2]),
                 load_as<float>(p.walk.dtype[1], p.walk.data[1], at[1]));
    store_as<float>(p.walk.dtype[0], p.walk.data[0], at[0], y);
  }
}

/* -- Launch ------------------------------------------------------------------------------------ */

static int draw_launch(const OpCall *c, DrawParams *p, const View *y, const View *x) {
  View in[2] = {x ? *x : *y, *y};
  if (y->whole)
    return err_set(MF_EUNSUPPORTED, "%s: draws of a part of a tensor are not there on %s yet",
                   c->op->name, c->stream->device->name);
  walk_plain(&p->walk, y, 2, in);
  if (!p->walk.numel) return 0;
  int64_t n = p->walk.numel;
  int group = p->wide && p->kind != DRAW_DROP ? RNG_GROUP64 : RNG_GROUP32;
  unsigned grid = grid_for((n + group - 1) / group * 16, DRAW_BLOCK);
  if (p->wide && p->kind == DRAW_DROP) return LAUNCH(c, draw_drop_wide, grid, DRAW_BLOCK, 0, *p);
  if (p->wide) return LAUNCH(c, draw_wide, grid, DRAW_BLOCK, 0, *p);
  return LAUNCH(c, draw_narrow, grid, DRAW_BLOCK, 0, *p);
}

static DrawParams draw_params(DrawKind kind, RngKey key, const View *y) {
  DrawParams p = {};
  p.kind = kind;
  p.key = key;
  p.wide = y->dtype == F64;
  p.digits = UINT32_MAX;
  return p;
}

static int draw_uniform(const OpCall *c, RngKey key, double low, double high, const View *y) {
  DrawParams p = draw_params(DRAW_UNIFORM, key, y);
  p.a = low, p.b = high - low;
  p.digits = y->dtype == F16 ? UINT32_MAX << 21 : y->dtype == BF16 ? UINT32_MAX << 24 : UINT32_MAX;
  return draw_launch(c, &p, y, NULL);
}

static int draw_normal(const OpCall *c, RngKey key, double mean, double std, const View *y) {
  DrawParams p = draw_params(DRAW_NORMAL, key, y);
  p.a = mean, p.b = std;
  return draw_launch(c, &p, y, NULL);
}

static int draw_below(const OpCall *c, RngKey key, int64_t low, int64_t high, const View *y) {
  DrawParams p = draw_params(DRAW_BELOW, key, y);
  p.wide = true;
  p.low = low, p.range = (uint64_t)high - (uint64_t)low;
  return draw_launch(c, &p, y, NULL);
}

int draw_whole(const OpCall *c, RngKey key, int64_t n, int64_t *to) {
  const int64_t one = 1;
  View y = {};
  y.data = to, y.shape = &n, y.stride = &one, y.ndim = 1, y.dtype = I64;
  return draw_below(c, key, 0, 0, &y);
}

static int drop(const OpCall *c, double chance, RngKey key) {
  DrawParams p = draw_params(DRAW_DROP, key, &c->out[0]);
  p.b = chance < 1 ? 1 / (1 - chance) : 0;
  p.range = (uint64_t)(chance * 0x1p32);
  return draw_launch(c, &p, &c->out[0], &c->in[0]);
}

/* -- The ops ----------------------------------------------------------------------------------- */

static int rand_cuda(const OpCall *c) {
  return draw_uniform(c, ((const struct rand_args *)c->args)->generator, 0, 1, &c->out[0]);
}
KERNEL(rand, rand_cuda)
static int randn_cuda(const OpCall *c) {
  return draw_normal(c, ((const struct randn_args *)c->args)->generator, 0, 1, &c->out[0]);
}
KERNEL(randn, randn_cuda)
static int randint_cuda(const OpCall *c) {
  const struct randint_args *a = (const struct randint_args *)c->args;
  return draw_below(c, a->generator, a->low, a->high, &c->out[0]);
}
KERNEL(randint, randint_cuda)
static int uniform__cuda(const OpCall *c) {
  const struct uniform__args *a = (const struct uniform__args *)c->args;
  return draw_uniform(c, a->generator, a->low, a->high, &c->in[0]);
}
KERNEL(uniform_, uniform__cuda)
static int normal__cuda(const OpCall *c) {
  const struct normal__args *a = (const struct normal__args *)c->args;
  return draw_normal(c, a->generator, a->mean, a->std, &c->in[0]);
}
KERNEL(normal_, normal__cuda)
static int random__cuda(const OpCall *c) {
  const struct random__args *a = (const struct random__args *)c->args;
  return draw_below(c, a->generator, a->low, a->high, &c->in[0]);
}
KERNEL(random_, random__cuda)
static int bernoulli__cuda(const OpCall *c) {
  const struct bernoulli__args *a = (const struct bernoulli__args *)c->args;
  DrawParams p = draw_params(DRAW_BERNOULLI, a->generator, &c->in[0]);
  p.wide = false;
  p.range = (uint64_t)(a->p * 0x1p32);
  return draw_launch(c, &p, &c->in[0], NULL);
}
KERNEL(bernoulli_, bernoulli__cuda)
static int bernoulli_cuda(const OpCall *c) {
  RngKey key = ((const struct bernoulli_args *)c->args)->generator;
  DrawParams p = draw_params(DRAW_CHANCE, key, &c->out[0]);
  p.wide = false;
  return draw_launch(c, &p, &c->out[0], &c->in[0]);
}
KERNEL(bernoulli, bernoulli_cuda)
static int dropout_cuda(const OpCall *c) {
  const struct dropout_args *a = (const struct dropout_args *)c->args;
  return drop(c, a->p, a->generator);
}
KERNEL(dropout, dropout_cuda)
static int dropout_backward_cuda(const OpCall *c) {
  const struct dropout_backward_args *a = (const struct dropout_backward_args *)c->args;
  return drop(c, a->p, a->generator);
}
KERNEL(dropout_backward, dropout_backward_cuda)

static __global__ void __launch_bounds__(DRAW_BLOCK) count_up(int64_t n, int64_t *y) {
  int64_t i = (int64_t)blockIdx.x * DRAW_BLOCK + threadIdx.x;
  if (i < n) y[i] = i;
}

static int randperm_cuda(const OpCall *c) {
  const struct randperm_args *a = (const struct randperm_args *)c->args;
  const int64_t one = 1;
  if (!a->n) return 0;
  int64_t *room = (int64_t *)kernel_scratch(c, (size_t)a->n * 16);
  if (!room) return MF_ENOMEM;
  int rc = draw_whole(c, a->generator, a->n, room);
  if (!rc) rc = LAUNCH(c, count_up, grid_for(a->n, DRAW_BLOCK), DRAW_BLOCK, 0, a->n, room + a->n);
  if (!rc) rc = vendor_sort(c, 1, a->n, (uint64_t *)room, room + a->n);
  View order = c->out[0];
  order.data = room + a->n, order.stride = &one, order.dtype = I64;
  return rc ? rc : copy_launch(c, &order, &c->out[0]);
}
KERNEL(randperm, randperm_cuda)

/* mean and std: tensors of the device, or numbers. */
static int normal_cuda(const OpCall *c) {
  const View *y = &c->out[0];
  RngKey key = ((const struct normal_args *)c->args)->generator;
  bool numbers = c->in[0].device == DEVICE_CPU && c->in[1].device == DEVICE_CPU;
  double v[2] = {0, 1};
  for (int k = 0; k < 2; k++)
    if (numbers) v[k] = dtype_get_f64((DType)c->in[k].dtype, c->in[k].data);
  if (v[1] < 0) return err_set(MF_EINVAL, "normal: std must not be negative, holds %g", v[1]);
  int rc = draw_normal(c, key, v[0], v[1], y);
  if (rc || numbers) return rc;
  DrawParams p = draw_params(DRAW_SCALED, key, y);
  View in[2] = {c->in[0], c->in[1]};
  for (int k = 0; k < 2; k++) { /* a number beside a tensor goes to the device */
    if (in[k].device != DEVICE_CPU) continue;
    View one = in[k];
    one.dtype = p.wide ? F64 : F32;
    one.device = y->device;
    if (!(one.data = kernel_scratch(c, 8))) return MF_ENOMEM;
    if ((rc = copy_launch(c, &in[k], &one))) return rc;
    in[k] = one;
  }
  walk_init(&p.walk, y, 2, in);
  if (!p.walk.numel) return 0;
  return LAUNCH(c, draw_scale, grid_for(p.walk.numel, DRAW_BLOCK), DRAW_BLOCK, 0, p);
}
KERNEL(normal, normal_cuda)
