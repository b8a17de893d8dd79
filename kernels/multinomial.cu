/* multinomial: see src/op/multinomial.c. A block a row. The running sums of weights are added up by
 * one thread, in order and in double, so that every index is the cpu's. Bytes: the weights twice,
 * and 8 bytes of running sum; without replacement 16 a weight more. */
#include "kernel.cuh"
#include "vendor.h"

#define RNG_INLINE static __host__ __device__ __forceinline__
#include "rng_value.h"

enum { DRAW_BLOCK = 256 };

struct MultinomialParams {
  const void *x;
  int64_t rows, n, samples, step[2], first; /* first: of the rows, in the whole */
  int64_t *y, y_step[2];
  double *sums;
  uint64_t *keys;
  int64_t *places;
  int dtype, op;
  bool replacement;
  RngKey key;
  DeviceError *error;
};

static __device__ double uniform_at(const RngKey &key, uint64_t i) {
  uint64_t block = i / RNG_GROUP64 * RNG_LANES + i % RNG_LANES;
  uint32_t counter[4] = {(uint32_t)block, (uint32_t)(block >> 32), (uint32_t)key.stream,
                         (uint32_t)(key.stream >> 32)};
  uint32_t seed[2] = {(uint32_t)key.seed, (uint32_t)(key.seed >> 32)}, w[4];
  rng_philox(counter, seed, w);
  int half = i % RNG_GROUP64 >= RNG_LANES ? 2 : 0;
  return rng_uniform64((uint64_t)w[half + 1] << 32 | w[half]);
}

/* The running sums of a row, and what is wrong with its weights. */
static __global__ void __launch_bounds__(DRAW_BLOCK)
    multinomial_sums(const __grid_constant__ MultinomialParams p) {
  __shared__ double w[DRAW_BLOCK];
  int64_t row = blockIdx.x, positive = 0;
  double sum = 0, *sums = p.sums + row * p.n;
  for (int64_t base = 0; base < p.n; base += DRAW_BLOCK) {
    int64_t i = base + threadIdx.x, at = row * p.step[0] + i * p.step[1];
    w[threadIdx.x] = i < p.n ? load_as<double>(p.dtype, p.x, at) : 0;
    double v = w[threadIdx.x];
    if (!(v >= 0) || isinf(v)) {
      int64_t bits;
      memcpy(&bits, &v, sizeof v);
      report(p.error, ERROR_WEIGHT, p.op, 0, bits, at, 0, 0);
    }
    __syncthreads();
    if (!threadIdx.x)
      for (int k = 0; k < DRAW_BLOCK; k++) {
        positive += w[k] > 0;
        w[k] = sum += w[k];
      }
    __syncthreads();
    if (i < p.n) sums[i] = w[threadIdx.x];
    __syncthreads();
  }
  if (threadIdx.x) return;
  if (!positive) report(p.error, ERROR_NO_WEIGHT, p.op, 0, 0, row, 0, 0);
  else if (!p.replacement && positive < p.samples)
    report(p.error, ERROR_FEW_WEIGHTS, p.op, 0, p.samples, row, 0, positive);
}

/* The place of a uniform number among the running sums. */
static __global__ void __launch_bounds__(DRAW_BLOCK)
    multinomial_draw(const __grid_constant__ MultinomialParams p) {
  int64_t i = (int64_t)blockIdx.x * DRAW_BLOCK + threadIdx.x;
  if (i >= p.rows * p.samples) return;
  int64_t row = i / p.samples, k = i % p.samples, low = 0, high = p.n - 1;
  const double *sums = p.sums + row * p.n;
  double u = uniform_at(p.key, (uint64_t)((p.first + row) * p.samples + k)) * sums[p.n - 1];
  while (low < high) { /* the first sum above u */
    int64_t mid = (low + high) / 2;
    if (sums[mid] > u) high = mid;
    else low = mid + 1;
  }
  while (low > 0 && sums[low] == sums[low - 1]) low--;
  p.y[row * p.y_step[0] + k * p.y_step[1]] = low;
}

/* Exponentially distributed times, as keys in their order. */
static __global__ void __launch_bounds__(DRAW_BLOCK)
    multinomial_times(const __grid_constant__ MultinomialParams p) {
  int64_t i = (int64_t)blockIdx.x * DRAW_BLOCK + threadIdx.x;
  if (i >= p.rows * p.n) return;
  int64_t row = i / p.n, k = i % p.n;
  double w = k ? p.sums[i] - p.sums[i - 1] : p.sums[i];
  double u = uniform_at(p.key, (uint64_t)((p.first + row) * p.n + k));
  double time = w > 0 ? -rng_log(u + 0x1p-54) / w : (double)INFINITY;
  uint64_t bits;
  memcpy(&bits, &time, sizeof time);
  p.keys[i] = bits >> 63 ? ~bits : bits | (uint64_t)1 << 63;
  p.places[i] = k;
}

static __global__ void __launch_bounds__(DRAW_BLOCK)
    multinomial_first(const __grid_constant__ MultinomialParams p) {
  int64_t i = (int64_t)blockIdx.x * DRAW_BLOCK + threadIdx.x;
  if (i >= p.rows * p.samples) return;
  int64_t row = i / p.samples, k = i % p.samples;
  p.y[row * p.y_step[0] + k * p.y_step[1]] = p.places[row * p.n + k];
}

static int multinomial_cuda(const OpCall *c) {
  const struct multinomial_args *a = (const struct multinomial_args *)c->args;
  const View *x = &c->in[0], *y = &c->out[0];
  int last = x->ndim - 1;
  MultinomialParams p = {};
  p.x = x->data, p.dtype = x->dtype;
  p.rows = last ? x->shape[0] : 1, p.n = x->shape[last], p.samples = a->num_samples;
  p.step[0] = last ? x->stride[0] : 0, p.step[1] = x->stride[last];
  p.y = (int64_t *)y->data;
  p.y_step[0] = last ? y->stride[0] : 0, p.y_step[1] = y->stride[last];
  p.first = last && y->whole ? y->start[0] : 0;
  p.replacement = a->replacement, p.key = a->generator;
  p.op = c->op->id, p.error = stream_error(c->stream);
  if (!p.rows) return 0;
  size_t bytes = scratch_aligned((size_t)(p.rows * p.n) * 8);
  char *room = (char *)kernel_scratch(c, a->replacement ? bytes : 3 * bytes);
  if (!room) return MF_ENOMEM;
  p.sums = (double *)room;
  unsigned draws = grid_for(p.rows * p.samples, DRAW_BLOCK);
  int rc = LAUNCH(c, multinomial_sums, grid_for(p.rows, 1), DRAW_BLOCK, 0, p);
  if (rc || p.replacement) return rc ? rc : LAUNCH(c, multinomial_draw, draws, DRAW_BLOCK, 0, p);
  p.keys = (uint64_t *)(room + bytes), p.places = (int64_t *)(room + 2 * bytes);
  rc = LAUNCH(c, multinomial_times, grid_for(p.rows * p.n, DRAW_BLOCK), DRAW_BLOCK, 0, p);
  if (!rc) rc = vendor_sort(c, p.rows, p.n, p.keys, p.places);
  return rc ? rc : LAUNCH(c, multinomial_first, draws, DRAW_BLOCK, 0, p);
}
KERNEL(multinomial, multinomial_cuda)
