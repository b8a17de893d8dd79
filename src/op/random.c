/* Random ops. What is drawn depends on the key (seed, stream) and the element's index in the whole
 * tensor alone; see base/rng.h.
 *
 * A Draw fills blocks of elements in the order of the tensor's indices; `fill` gives the 64 (or 32)
 * elements of one group. Ops that read a tensor as well (bernoulli, dropout) combine the words of a
 * block with the block of the tensor. */
#include <math.h>
#include <stdio.h>

#include "copy_views.h"
#include "op_args.h"
#include "rng.h"
#include "sbp_rule.h"
#include "sort.h"

enum { DRAW_GRAIN = 1 << 13 };
_Static_assert(BLOCK % RNG_GROUP32 == 0 && BLOCK % RNG_GROUP64 == 0, "blocks hold whole groups");

/* -- Drawing into a tensor --------------------------------------------------------------------- */

typedef struct Draw Draw;

/* Writes group `group` (RNG_GROUP32 elements of 4 bytes, RNG_GROUP64 of 8) to `to`. */
typedef void DrawGroup(const Draw *d, uint64_t group, void *to);

struct Draw {
  RngKey key;
  DrawGroup *fill;
  double a, b; /* parameters of the distribution */
  uint64_t range;
  int64_t low;
  uint32_t digits; /* the bits of a word that the dtype can tell apart: so that 1 is never reached
                      by rounding */
  size_t width;    /* bytes an element of what fill writes */
  Walk walk;       /* operand 1: the output, in the order of its elements */
  const View *out;
  BlockConvert *store;
  bool direct; /* fill may write into the output itself */
};

static int draw_group_size(const Draw *d) {
  return d->width == 4 ? RNG_GROUP32 : RNG_GROUP64;
}

/* Elements [first, first + n), n <= BLOCK, into buffer. */
static void draw_block(const Draw *d, int64_t first, int64_t n, void *buffer) {
  int size = draw_group_size(d);
  uint64_t group = (uint64_t)first / (uint64_t)size;
  int64_t skip = first % size, at = 0;
  while (at < n) {
    uint64_t whole[RNG_GROUP32];
    int64_t take = size - skip < n - at ? size - skip : n - at;
    if (take == size) {
      d->fill(d, group++, (char *)buffer + at * (int64_t)d->width);
    } else {
      d->fill(d, group++, whole);
      memcpy((char *)buffer + at * (int64_t)d->width, (char *)whole + skip * (int64_t)d->width,
             (size_t)take * d->width);
    }
    skip = 0;
    at += take;
  }
}

/* The index in the whole tensor of element `place` of this part, and in *run how many follow it
 * side by side in both: within the dims, from the last on, that the part has whole, and the next.
 */
static int64_t global_index(const View *v, int64_t place, int64_t *run) {
  *run = INT64_MAX;
  if (!v->whole || v->ndim == 0) return place;
  int64_t index = 0, step = 1, inner = 0, size = 1;
  bool joined = true;
  for (int d = v->ndim - 1; d >= 0; d--) {
    int64_t i = place % v->shape[d];
    if (joined) *run = (v->shape[d] - i) * size - inner;
    joined &= v->shape[d] == v->whole[d];
    inner += i * size;
    size *= v->shape[d];
    place /= v->shape[d];
    index += (v->start[d] + i) * step;
    step *= v->whole[d];
  }
  return index;
}

static void draw_range(int64_t begin, int64_t end, void *arg) {
  const Draw *d = arg;
  uint64_t buffer[BLOCK];
  while (begin < end) {
    int64_t run, index = global_index(d->out, begin, &run),
                 n = end - begin < run ? end - begin : run;
    if (n > BLOCK) n = BLOCK;
    if (d->direct) {
      draw_block(d, index, n, (char *)d->out->data + begin * (int64_t)d->width);
    } else {
      draw_block(d, index, n, buffer);
      walk_rows(&d->walk, 1, begin, n, d->store, buffer, d->width, true);
    }
    begin += n;
  }
}

static void draw_like(Walk *w, const View *v) {
  int64_t stride[MF_MAX_DIMS];
  View like = {.shape = v->shape, .stride = stride, .ndim = v->ndim, .dtype = v->dtype};
  shape_contiguous(v->ndim, v->shape, stride);
  walk_init(w, &like, 1, v);
}

/* Draws y; fill writes elements of class cls. */
static int draw(Draw *d, const View *y, PointwiseClass cls) {
  d->out = y;
  d->width = cls == PW_F32 ? 4 : 8;
  d->store = block_stores[cls][y->dtype];
  draw_like(&d->walk, y);
  d->direct = block_is_native((DType)y->dtype, cls) && view_is_contiguous(y);
  mf_parallel(d->walk.numel, DRAW_GRAIN, draw_range, d);
  return 0;
}

static uint64_t pair(uint32_t low, uint32_t high) {
  return (uint64_t)high << 32 | low;
}

/* -- Distributions ----------------------------------------------------------------------------- */

static void fill_uniform32(const Draw *d, uint64_t group, void *to) {
  uint32_t w[4][RNG_LANES];
  float *y = to, low = (float)d->a, range = (float)d->b;
  uint32_t digits = d->digits;
  rng_group(d->key.seed, d->key.stream, group, w);
  for (int i = 0; i < 4; i++)
    for (int l = 0; l < RNG_LANES; l++)
      y[i * RNG_LANES + l] = rng_fmaf(rng_uniform32(w[i][l] & digits), range, low);
}

static void fill_uniform64(const Draw *d, uint64_t group, void *to) {
  uint32_t w[4][RNG_LANES];
  double *y = to;
  rng_group(d->key.seed, d->key.stream, group, w);
  for (int i = 0; i < 2; i++)
    for (int l = 0; l < RNG_LANES; l++)
      y[i * RNG_LANES + l] = rng_fma(rng_uniform64(pair(w[2 * i][l], w[2 * i + 1][l])), d->b, d->a);
}

static void fill_normal32(const Draw *d, uint64_t group, void *to) {
  uint32_t w[4][RNG_LANES];
  float *y = to, mean = (float)d->a, std = (float)d->b;
  rng_group(d->key.seed, d->key.stream, group, w);
  for (int i = 0; i < 4; i += 2)
    for (int l = 0; l < RNG_LANES; l++) {
      float a, b;
      rng_normal32(w[i][l], w[i + 1][l], &a, &b);
      y[i * RNG_LANES + l] = rng_fmaf(a, std, mean);
      y[(i + 1) * RNG_LANES + l] = rng_fmaf(b, std, mean);
    }
}

static void fill_normal64(const Draw *d, uint64_t group, void *to) {
  uint32_t w[4][RNG_LANES];
  double *y = to;
  rng_group(d->key.seed, d->key.stream, group, w);
  for (int l = 0; l < RNG_LANES; l++) {
    double a, b;
    rng_normal64(pair(w[0][l], w[1][l]), pair(w[2][l], w[3][l]), &a, &b);
    y[l] = rng_fma(a, d->b, d->a);
    y[RNG_LANES + l] = rng_fma(b, d->b, d->a);
  }
}

static void fill_below(const Draw *d, uint64_t group, void *to) {
  uint32_t w[4][RNG_LANES];
  int64_t *y = to;
  rng_group(d->key.seed, d->key.stream, group, w);
  for (int i = 0; i < 2; i++)
    for (int l = 0; l < RNG_LANES; l++) {
      uint64_t v = rng_below(pair(w[2 * i][l], w[2 * i + 1][l]), d->range);
      y[i * RNG_LANES + l] = (int64_t)((uint64_t)d->low + v);
    }
}

static void fill_words(const Draw *d, uint64_t group, void *to) {
  rng_group(d->key.seed, d->key.stream, group, to);
}

/* 1 with probability a, else 0: a word below a 2^32. */
static void fill_bernoulli(const Draw *d, uint64_t group, void *to) {
  uint32_t w[4][RNG_LANES];
  float *y = to;
  rng_group(d->key.seed, d->key.stream, group, w);
  for (int i = 0; i < 4; i++)
    for (int l = 0; l < RNG_LANES; l++) y[i * RNG_LANES + l] = w[i][l] < d->range ? 1.0f : 0.0f;
}

static int draw_uniform(RngKey key, double low, double high, const View *y) {
  bool wide = y->dtype == F64;
  Draw d = {.key = key, .fill = wide ? fill_uniform64 : fill_uniform32, .a = low, .b = high - low};
  d.digits = y->dtype == F16 ? UINT32_MAX << 21 : y->dtype == BF16 ? UINT32_MAX << 24 : UINT32_MAX;
  return draw(&d, y, wide ? PW_F64 : PW_F32);
}

static int draw_normal(RngKey key, double mean, double std, const View *y) {
  bool wide = y->dtype == F64;
  Draw d = {.key = key, .fill = wide ? fill_normal64 : fill_normal32, .a = mean, .b = std};
  return draw(&d, y, wide ? PW_F64 : PW_F32);
}

static int draw_below(RngKey key, int64_t low, int64_t high, const View *y) {
  Draw d = {.key = key, .fill = fill_below, .low = low, .range = (uint64_t)high - (uint64_t)low};
  return draw(&d, y, PW_I64);
}

/* -- Factories --------------------------------------------------------------------------------- */

static int created(Infer *I, int64_t dtype, const IntList *size, int64_t device) {
  if (size->n > MF_MAX_DIMS)
    return infer_error(I, "%d dims, at most %d are possible", (int)size->n, MF_MAX_DIMS);
  int rc = infer_shape(I, (DType)dtype, (int)size->n, size->v);
  if (!rc && device >= 0) I->last->device = (uint8_t)device;
  return rc;
}

static int want_float_dtype(Infer *I, int64_t dtype) {
  return dtype_is_float((DType)dtype)
             ? 0
             : infer_error(I, "dtype must be a float, is %s", dtype_name((DType)dtype));
}

static int want_grad_of_float(Infer *I, int64_t dtype, bool requires_grad) {
  if (!requires_grad || dtype_is_float((DType)dtype)) return 0;
  return infer_error(I, "only float tensors have gradients, this is %s", dtype_name((DType)dtype));
}

static int rand_infer(Infer *I) {
  const struct rand_args *a = I->args;
  int rc = want_float_dtype(I, a->dtype);
  return rc ? rc : created(I, a->dtype, &a->size, a->device);
}
static int rand_cpu(const OpCall *c) {
  return draw_uniform(((const struct rand_args *)c->args)->generator, 0, 1, &c->out[0]);
}

/* Uniform numbers in [0, 1). */
OP(rand,
   .signature =
       "rand(int[] size, *, Generator? generator=None, dtype dtype=float32, device? device=None, "
       "bool requires_grad=False) -> Tensor",
   .flags = OP_RANDOM | OP_INDEXED, .sbp_rule = sbp_fresh, .infer = rand_infer, .cpu = rand_cpu)

static int randn_infer(Infer *I) {
  const struct randn_args *a = I->args;
  int rc = want_float_dtype(I, a->dtype);
  return rc ? rc : created(I, a->dtype, &a->size, a->device);
}
static int randn_cpu(const OpCall *c) {
  return draw_normal(((const struct randn_args *)c->args)->generator, 0, 1, &c->out[0]);
}

/* Normal numbers of mean 0 and variance 1. */
OP(randn,
   .signature =
       "randn(int[] size, *, Generator? generator=None, dtype dtype=float32, device? device=None, "
       "bool requires_grad=False) -> Tensor",
   .flags = OP_RANDOM | OP_INDEXED, .sbp_rule = sbp_fresh, .infer = randn_infer, .cpu = randn_cpu)

/* Below which every whole number is one of the dtype. */
static int64_t whole_limit(DType t) {
  switch (t) {
    case BOOL: return 2;
    case U8: return 256;
    case I8: return 128;
    case I16: return 1 << 15;
    case I32: return INT64_C(1) << 31;
    case F16: return 2049;
    case BF16: return 257;
    case F32: return (1 << 24) + 1;
    case F64: return (INT64_C(1) << 53) + 1;
    default: return INT64_MAX;
  }
}

static int want_range(Infer *I, int64_t low, int64_t high, DType t) {
  if (low >= high)
    return infer_error(I, "low %lld must be below high %lld", (long long)low, (long long)high);
  int64_t limit = whole_limit(t), least = t == BOOL || t == U8 ? 0 : -limit;
  if (dtype_is_float(t) || t == I64 || (low >= least && high <= limit)) return 0;
  return infer_error(I, "%s does not hold all whole numbers from low %lld to high - 1, %lld",
                     dtype_name(t), (long long)low, (long long)high - 1);
}

static int randint_infer(Infer *I) {
  const struct randint_args *a = I->args;
  int rc = want_range(I, a->low, a->high, (DType)a->dtype);
  if (!rc) rc = want_grad_of_float(I, a->dtype, a->requires_grad);
  return rc ? rc : created(I, a->dtype, &a->size, a->device);
}
static int randint_cpu(const OpCall *c) {
  const struct randint_args *a = c->args;
  return draw_below(a->generator, a->low, a->high, &c->out[0]);
}

/* Whole numbers from low to high - 1, all equally likely. */
OP(randint,
   .signature =
       "randint(int low, int high, int[] size, *, Generator? generator=None, dtype dtype=int64, "
       "device? device=None, bool requires_grad=False)"
       " -> Tensor",
   .flags = OP_RANDOM | OP_HIDDEN | OP_INDEXED, .sbp_rule = sbp_fresh, .infer = randint_infer,
   .cpu = randint_cpu)

static int randperm_infer(Infer *I) {
  const struct randperm_args *a = I->args;
  if (a->n < 0) return infer_error(I, "n %lld is negative", (long long)a->n);
  int rc = infer_shape(I, (DType)a->dtype, 1, &a->n);
  if (!rc && a->device >= 0) I->last->device = (uint8_t)a->device;
  return rc;
}

static size_t randperm_scratch(const OpCall *c) {
  return (size_t)((const struct randperm_args *)c->args)->n * 2 * sizeof(SortPair);
}

static int randperm_cpu(const OpCall *c) {
  const struct randperm_args *a = c->args;
  SortPair *pairs = c->scratch;
  if (a->n == 0) return 0;
  Draw d = {.key = a->generator, .fill = fill_below, .width = 8};
  for (int64_t i = 0; i < a->n; i += BLOCK) {
    uint64_t block[BLOCK];
    int64_t n = a->n - i < BLOCK ? a->n - i : BLOCK;
    draw_block(&d, i, n, block);
    for (int64_t k = 0; k < n; k++) pairs[i + k] = (SortPair){block[k], i + k};
  }
  SortPair *sorted = sort_pairs(a->n, 64, pairs, pairs + a->n);
  View order = {
      .data = &sorted->place, .shape = &a->n, .stride = &(int64_t){2}, .ndim = 1, .dtype = I64};
  return copy_views(&order, &c->out[0]);
}

/* The numbers 0 to n - 1 in random order: the order of n random keys. */
OP(randperm,
   .signature =
       "randperm(int n, *, Generator? generator=None, dtype dtype=int64, device? device=None) -> "
       "Tensor",
   .flags = OP_RANDOM, .infer = randperm_infer, .cpu = randperm_cpu, .scratch = randperm_scratch)

/* -- In place ---------------------------------------------------------------------------------- */

static int uniform__infer(Infer *I) {
  const struct uniform__args *a = I->args;
  if (!(a->low <= a->high))
    return infer_error(I, "low %g must not be above high %g", a->low, a->high);
  return infer_want_float(I, 0);
}
static int uniform__cpu(const OpCall *c) {
  const struct uniform__args *a = c->args;
  return draw_uniform(a->generator, a->low, a->high, &c->in[0]);
}

/* Writes uniform numbers in [low, high) into x. */
OP(uniform_,
   .signature =
       "uniform_(Tensor! x, float low=0, float high=1, *, Generator? generator=None) -> ()",
   .flags = OP_RANDOM | OP_INDEXED, .sbp = "...", .infer = uniform__infer, .cpu = uniform__cpu)

static int normal__infer(Infer *I) {
  const struct normal__args *a = I->args;
  if (!(a->std >= 0)) return infer_error(I, "std must not be negative, is %g", a->std);
  return infer_want_float(I, 0);
}
static int normal__cpu(const OpCall *c) {
  const struct normal__args *a = c->args;
  return draw_normal(a->generator, a->mean, a->std, &c->in[0]);
}

/* Writes normal numbers of this mean and standard deviation into x. */
OP(normal_,
   .signature = "normal_(Tensor! x, float mean=0, float std=1, *, Generator? generator=None) -> ()",
   .flags = OP_RANDOM | OP_INDEXED, .sbp = "...", .infer = normal__infer, .cpu = normal__cpu)

static int want_probability(Infer *I, double p) {
  return p >= 0 && p <= 1 ? 0 : infer_error(I, "p must be from 0 to 1, is %g", p);
}

static int bernoulli__infer(Infer *I) {
  return want_probability(I, ((const struct bernoulli__args *)I->args)->p);
}
static int bernoulli__cpu(const OpCall *c) {
  const struct bernoulli__args *a = c->args;
  Draw d = {.key = a->generator, .fill = fill_bernoulli, .range = (uint64_t)(a->p * 0x1p32)};
  return draw(&d, &c->in[0], PW_F32);
}

/* Writes 1 with probability p, else 0, into x. */
OP(bernoulli_,
   .signature = "bernoulli_(Tensor! x, float p=0.5, *, Generator? generator=None) -> ()",
   .flags = OP_RANDOM | OP_INDEXED, .sbp = "...", .infer = bernoulli__infer, .cpu = bernoulli__cpu)

static int random__infer(Infer *I) {
  struct random__args *a = I->args;
  if (!a->has_high) {
    a->high = whole_limit((DType)I->in[0]->dtype);
    a->has_high = true;
  }
  return want_range(I, a->low, a->high, (DType)I->in[0]->dtype);
}
static int random__cpu(const OpCall *c) {
  const struct random__args *a = c->args;
  return draw_below(a->generator, a->low, a->high, &c->in[0]);
}

/* Writes whole numbers from low to high - 1 into x; without high, up to the largest that its dtype
 * holds exactly. */
OP(random_,
   .signature = "random_(Tensor! x, int low=0, int? high=None, *, Generator? generator=None) -> ()",
   .flags = OP_RANDOM | OP_INDEXED, .sbp = "...", .infer = random__infer, .cpu = random__cpu)

/* -- normal, bernoulli over tensors ------------------------------------------------------------ */

static int normal_infer(Infer *I) {
  const struct normal_args *a = I->args;
  int ndim = 0;
  int64_t shape[MF_MAX_DIMS];
  DType t = F32;
  bool numbers = I->in[0]->number && I->in[1]->number;
  for (int k = 0; k < 2; k++) {
    if (I->in[k]->number) continue;
    int rc = infer_want_float(I, k);
    if (rc) return rc;
    if (!shape_broadcast(&ndim, shape, I->in[k]->ndim, I->in[k]->shape))
      return infer_error(I, "the shapes of mean and std do not broadcast");
    t = I->in[k]->dtype;
  }
  if (!numbers && a->size.n)
    return infer_error(I, "size is only for numbers; tensors bring their own");
  if (a->dtype != DTYPE_NONE) t = (DType)a->dtype;
  int rc = want_float_dtype(I, t);
  if (rc) return rc;
  return numbers ? created(I, t, &a->size, a->device) : infer_shape(I, t, ndim, shape);
}

typedef struct ScaleJob {
  Walk walk; /* y, mean, std */
  PointwiseClass cls;
  BlockConvert *load[2], *loady, *store;
} ScaleJob;

/* y = y std + mean, in the compute type, with one fma. */
static void scale_range(int64_t begin, int64_t end, void *arg) {
  const ScaleJob *j = arg;
  size_t size = j->cls == PW_F32 ? 4 : 8;
  BlockBuffer y, mean, std;
  for (int64_t i = begin; i < end; i += BLOCK) {
    int64_t n = end - i < BLOCK ? end - i : BLOCK;
    walk_rows(&j->walk, 0, i, n, j->loady, &y, size, false);
    walk_rows(&j->walk, 1, i, n, j->load[0], &mean, size, false);
    walk_rows(&j->walk, 2, i, n, j->load[1], &std, size, false);
    if (j->cls == PW_F32)
      for (int64_t k = 0; k < n; k++) y.f32[k] = rng_fmaf(y.f32[k], std.f32[k], mean.f32[k]);
    else
      for (int64_t k = 0; k < n; k++) y.f64[k] = rng_fma(y.f64[k], std.f64[k], mean.f64[k]);
    walk_rows(&j->walk, 0, i, n, j->store, &y, size, true);
  }
}

/* Refuses elements of input k outside of [0, high]. */
static int check_elements(const OpCall *c, int k, double high, const char *text) {
  const View *x = &c->in[k];
  Walk w;
  double p[BLOCK];
  draw_like(&w, x);
  for (int64_t i = 0; i < w.numel; i += BLOCK) {
    int64_t n = w.numel - i < BLOCK ? w.numel - i : BLOCK;
    walk_rows(&w, 1, i, n, block_loads[PW_F64][x->dtype], p, 8, false);
    for (int64_t e = 0; e < n; e++)
      if (!(p[e] >= 0 && p[e] <= high)) return err_set(MF_EINVAL, text, c->op->name, p[e]);
  }
  return 0;
}

static int normal_cpu(const OpCall *c) {
  const struct normal_args *a = c->args;
  const View *y = &c->out[0];
  int rc = check_elements(c, 1, INFINITY, "%s: std must not be negative, holds %g");
  if (rc) return rc;
  draw_normal(a->generator, 0, 1, y);
  ScaleJob j = {.cls = block_class((DType)y->dtype)};
  walk_init(&j.walk, y, 2, c->in);
  j.loady = block_loads[j.cls][y->dtype];
  j.store = block_stores[j.cls][y->dtype];
  for (int k = 0; k < 2; k++) j.load[k] = block_loads[j.cls][c->in[k].dtype];
  mf_parallel(j.walk.numel, DRAW_GRAIN, scale_range, &j);
  return 0;
}

/* Normal numbers of these means and standard deviations: tensors, or numbers and a size. */
OP(normal,
   .signature =
       "normal(Tensor|number mean, Tensor|number std, int[] size=[], *, Generator? generator=None, "
       "dtype? dtype=None, device? device=None,"
       " bool requires_grad=False) -> Tensor",
   .flags = OP_RANDOM | OP_NO_GRAD | OP_FUNCTION_ONLY | OP_INDEXED, .sbp = "..., ...",
   .infer = normal_infer, .cpu = normal_cpu)

typedef struct MaskJob {
  Draw draw;
  Walk walk; /* y (contiguous order), x, and what y is */
  PointwiseClass cls;
  BlockConvert *load, *store;
  double scale;
  uint64_t threshold; /* dropout: kept where the word is at least this */
  const View *out;
  bool flat; /* float32, side by side */
} MaskJob;

static void mask_walk(MaskJob *j, const View *x, const View *y) {
  int64_t stride[MF_MAX_DIMS];
  View like = {.shape = y->shape, .stride = stride, .ndim = y->ndim, .dtype = y->dtype};
  shape_contiguous(y->ndim, y->shape, stride);
  walk_init(&j->walk, &like, 2, (View[]){*x, *y});
  j->cls = block_class((DType)y->dtype);
  j->load = block_loads[j->cls][x->dtype];
  j->store = block_stores[j->cls][y->dtype];
  j->out = y;
  j->flat = x->dtype == F32 && y->dtype == F32 && view_is_contiguous(x) && view_is_contiguous(y);
  j->draw.fill = fill_words;
  j->draw.width = 4;
}

static void bernoulli_range(int64_t begin, int64_t end, void *arg) {
  const MaskJob *j = arg;
  uint32_t words[BLOCK];
  double p[BLOCK];
  while (begin < end) {
    int64_t run, index = global_index(j->out, begin, &run),
                 n = end - begin < run ? end - begin : run;
    if (n > BLOCK) n = BLOCK;
    walk_rows(&j->walk, 1, begin, n, j->load, p, 8, false);
    draw_block(&j->draw, index, n, words);
    for (int64_t k = 0; k < n; k++) p[k] = (double)words[k] * 0x1p-32 < p[k];
    walk_rows(&j->walk, 2, begin, n, j->store, p, 8, true);
    begin += n;
  }
}

static int bernoulli_infer(Infer *I) {
  int rc = infer_want_float(I, 0);
  return rc ? rc : infer_same(I);
}

static int bernoulli_cpu(const OpCall *c) {
  MaskJob j = {.draw.key = ((const struct bernoulli_args *)c->args)->generator};
  int rc = check_elements(c, 0, 1, "%s: x holds %g; probabilities are from 0 to 1");
  if (rc) return rc;
  mask_walk(&j, &c->in[0], &c->out[0]);
  j.load = block_loads[PW_F64][c->in[0].dtype];
  j.store = block_stores[PW_F64][c->out[0].dtype];
  mf_parallel(j.walk.numel, DRAW_GRAIN, bernoulli_range, &j);
  return 0;
}

/* 1 with the probability that stands in x, else 0. */
OP(bernoulli, .signature = "bernoulli(Tensor x, *, Generator? generator=None) -> Tensor",
   .flags = OP_RANDOM | OP_NO_GRAD | OP_INDEXED, .sbp = "...", .infer = bernoulli_infer,
   .cpu = bernoulli_cpu)

/* -- dropout ----------------------------------------------------------------------------------- */

static void dropout_range(int64_t begin, int64_t end, void *arg) {
  const MaskJob *j = arg;
  uint32_t words[BLOCK];
  BlockBuffer buffer;
  size_t width = j->cls == PW_F32 ? 4 : 8;
  while (begin < end) {
    int64_t run, index = global_index(j->out, begin, &run),
                 n = end - begin < run ? end - begin : run;
    int64_t whole =
        RNG_GROUP32 - index % RNG_GROUP32; /* blocks begin with a group, where that is possible */
    if (n > BLOCK) n = whole == RNG_GROUP32 ? BLOCK : whole;
    draw_block(&j->draw, index, n, words);
    if (j->flat) {
      const float *x = (const float *)(void *)j->walk.data[1] + begin;
      float *y = (float *)(void *)j->walk.data[2] + begin, scale = (float)j->scale;
      for (int64_t k = 0; k < n; k++) y[k] = words[k] >= j->threshold ? x[k] * scale : 0.0f;
    } else {
      walk_rows(&j->walk, 1, begin, n, j->load, &buffer, width, false);
      if (j->cls == PW_F32)
        for (int64_t k = 0; k < n; k++)
          buffer.f32[k] = words[k] >= j->threshold ? buffer.f32[k] * (float)j->scale : 0.0f;
      else
        for (int64_t k = 0; k < n; k++)
          buffer.f64[k] = words[k] >= j->threshold ? buffer.f64[k] * j->scale : 0.0;
      walk_rows(&j->walk, 2, begin, n, j->store, &buffer, width, true);
    }
    begin += n;
  }
}

static int drop(const OpCall *c, double p, RngKey key) {
  MaskJob j = {
      .draw.key = key, .scale = p < 1 ? 1 / (1 - p) : 0, .threshold = (uint64_t)(p * 0x1p32)};
  mask_walk(&j, &c->in[0], &c->out[0]);
  mf_parallel(j.walk.numel, DRAW_GRAIN, dropout_range, &j);
  return 0;
}

static int dropout_infer(Infer *I) {
  int rc = want_probability(I, ((const struct dropout_args *)I->args)->p);
  if (!rc) rc = infer_want_float(I, 0);
  return rc ? rc : infer_same(I);
}
static int dropout_cpu(const OpCall *c) {
  const struct dropout_args *a = c->args;
  return drop(c, a->p, a->generator);
}

/* Zeros with probability p; what stays is scaled by 1 / (1 - p). Keeps no mask: the gradient draws
 * it again. */
OP(dropout, .signature = "dropout(Tensor x, float p=0.5, *, Generator? generator=None) -> Tensor",
   .flags = OP_RANDOM | OP_HIDDEN | OP_INPLACE | OP_INDEXED, .sbp = "...", .linear = "x",
   .infer = dropout_infer, .cpu = dropout_cpu)

static int dropout_backward_infer(Infer *I) {
  int rc = want_probability(I, ((const struct dropout_backward_args *)I->args)->p);
  if (!rc) rc = infer_want_float(I, 0);
  return rc ? rc : infer_shape(I, (DType)I->in[0]->dtype, I->in[0]->ndim, I->in[0]->shape);
}
static int dropout_backward_cpu(const OpCall *c) {
  const struct dropout_backward_args *a = c->args;
  return drop(c, a->p, a->generator);
}

/* The gradient of dropout: g through the mask of that key. */
OP(dropout_backward,
   .signature = "dropout_backward(Tensor g, float p, *, Generator? generator=None) -> Tensor",
   .flags = OP_HIDDEN | OP_INDEXED, .sbp = "...", .linear = "g", .infer = dropout_backward_infer,
   .cpu = dropout_backward_cpu)
