/* multinomial: drawing indices by weights. With replacement by the place of a uniform number among
 * the running sums; without by the smallest of exponentially distributed times, one an index, which
 * is the same as drawing one by one (Efraimidis and Spirakis). Sums run in double, in order. */
#include <math.h>
#include <stdlib.h>

#include "block.h"
#include "op_args.h"
#include "rng.h"

static int multinomial_infer(Infer *I) {
  const struct multinomial_args *a = I->args;
  const Meta *x = I->in[0];
  char have[SHAPE_TEXT_MAX];
  int rc = infer_want_float(I, 0);
  if (rc) return rc;
  if (x->ndim < 1 || x->ndim > 2)
    return infer_error(I, "x must have 1 or 2 dims, has shape %s",
                       shape_text(x->ndim, x->shape, have));
  int64_t n = x->shape[x->ndim - 1];
  if (a->num_samples < 1)
    return infer_error(I, "num_samples must be at least 1, is %lld", (long long)a->num_samples);
  if (n == 0) return infer_error(I, "x has no weights");
  if (!a->replacement && a->num_samples > n)
    return infer_error(
        I, "%lld samples without replacement from %lld weights; pass {replacement = true}",
        (long long)a->num_samples, (long long)n);
  return infer_shape(I, I64, x->ndim,
                     x->ndim == 1 ? (const int64_t[]){a->num_samples}
                                  : (const int64_t[]){x->shape[0], a->num_samples});
}

typedef struct Candidate {
  double time;
  int64_t index;
} Candidate;

static size_t multinomial_scratch(const OpCall *c) {
  return (size_t)c->in[0].shape[c->in[0].ndim - 1] * sizeof(Candidate);
}

static int earlier(const void *a, const void *b) {
  const Candidate *x = a, *y = b;
  if (x->time != y->time) return x->time < y->time ? -1 : 1;
  return x->index < y->index ? -1 : x->index > y->index;
}

static double uniform_at(RngKey key, uint64_t i) {
  uint64_t block = i / RNG_GROUP64 * RNG_LANES + i % RNG_LANES;
  uint32_t counter[4] = {(uint32_t)block, (uint32_t)(block >> 32), (uint32_t)key.stream,
                         (uint32_t)(key.stream >> 32)},
           w[4];
  rng_philox(counter, (const uint32_t[]){(uint32_t)key.seed, (uint32_t)(key.seed >> 32)}, w);
  int half = i % RNG_GROUP64 >= RNG_LANES ? 2 : 0;
  return rng_uniform64((uint64_t)w[half + 1] << 32 | w[half]);
}

/* The weights of one row as running sums. */
static int running_sums(const OpCall *c, int64_t row, Candidate *r, int64_t *positive) {
  const View *x = &c->in[0];
  int last = x->ndim - 1;
  double sum = 0;
  *positive = 0;
  for (int64_t i = 0; i < x->shape[last]; i++) {
    int64_t at = i * x->stride[last] + (last ? row * x->stride[0] : 0);
    double w =
        dtype_get_f64((DType)x->dtype, (char *)x->data + at * (int64_t)dtype_size((DType)x->dtype));
    if (!(w >= 0) || isinf(w))
      return err_set(MF_EINVAL, "multinomial: x holds %g; weights are finite and not negative", w);
    *positive += w > 0;
    r[i] = (Candidate){sum += w, i};
  }
  return *positive ? 0
                   : err_set(MF_EINVAL, "multinomial: all weights in row %lld of x are 0",
                             (long long)row);
}

static void with_replacement(const struct multinomial_args *a, int64_t row, int64_t n,
                             const Candidate *sums, int64_t *y) {
  for (int64_t k = 0; k < a->num_samples; k++) {
    double u = uniform_at(a->generator, (uint64_t)(row * a->num_samples + k)) * sums[n - 1].time;
    int64_t low = 0, high = n - 1; /* the first sum above u */
    while (low < high) {
      int64_t mid = (low + high) / 2;
      if (sums[mid].time > u) high = mid;
      else low = mid + 1;
    }
    while (low > 0 && sums[low].time == sums[low - 1].time)
      low--; /* u rounded up to the whole sum: no index of weight 0 */
    y[k] = low;
  }
}

static void without_replacement(const struct multinomial_args *a, int64_t row, int64_t n,
                                Candidate *r, int64_t *y) {
  for (int64_t i = n - 1; i >= 0; i--) {
    double w = i ? r[i].time - r[i - 1].time : r[0].time;
    double u = uniform_at(a->generator, (uint64_t)(row * n + i));
    r[i].time = w > 0 ? -rng_log(u + 0x1p-54) / w : INFINITY;
  }
  qsort(r, (size_t)n, sizeof *r, earlier);
  for (int64_t k = 0; k < a->num_samples; k++) y[k] = r[k].index;
}

static int multinomial_cpu(const OpCall *c) {
  const struct multinomial_args *a = c->args;
  const View *x = &c->in[0];
  int64_t rows = x->ndim == 2 ? x->shape[0] : 1, n = x->shape[x->ndim - 1], positive,
          *y = c->out[0].data;
  int64_t first = x->ndim == 2 && c->out[0].whole ? c->out[0].start[0] : 0; /* in the whole */
  for (int64_t row = 0; row < rows; row++) {
    int rc = running_sums(c, row, c->scratch, &positive);
    if (rc) return rc;
    if (!a->replacement && positive < a->num_samples)
      return err_set(MF_EINVAL,
                     "multinomial: %lld samples without replacement, but only %lld weights of row "
                     "%lld are above 0",
                     (long long)a->num_samples, (long long)positive, (long long)row);
    int64_t *to = y + row * a->num_samples;
    if (a->replacement) with_replacement(a, first + row, n, c->scratch, to);
    else without_replacement(a, first + row, n, c->scratch, to);
  }
  return 0;
}

/* num_samples indices drawn by the weights in x (or in each row of x), which need not sum to 1. */
OP(multinomial,
   .signature =
       "multinomial(Tensor x, int num_samples, bool replacement=False, *, Generator? "
       "generator=None) -> Tensor",
   .flags = OP_RANDOM | OP_NO_GRAD, .infer = multinomial_infer, .cpu = multinomial_cpu,
   .scratch = multinomial_scratch)
