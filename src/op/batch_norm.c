/* batch_norm in training and evaluation, and its gradient.
 *
 * A tensor (N, C, ...) lies in one of two ways: planes, where each channel of each sample is one
 * run of L elements, or rows, where the C channels of each place lie side by side (channels_last,
 * and L = 1). Both have loops of their own, so that memory is read in order; other layouts and
 * dtypes go through a copy. Statistics are those of moments.h. Planes are shared out by channels,
 * so that each channel's sums are made by one thread; rows by parts, as many as the sizes say,
 * whose sums are joined in order. */
#include "copy_views.h"
#include "norm_rows.h"
#include "op_args.h"
#include "pointwise.h"
#include "sbp_rule.h"

enum {
  GRAIN = 1 << 14,
  ROWS = 64, /* joined in the elements' own type */
  WIDE = 4,
  CHUNK = 2048, /* of a plane: lies in the cache from one loop to the next */
  PART = 1 << 17,
  PARTS = 64 /* of rows; as many as the sizes say, whatever the threads */
};

typedef struct BatchJob {
  int64_t n, channels, inner; /* N, C, L */
  bool rows;
  PointwiseClass cls;
  char *x, *g, *y;       /* of the compute type, in the layout; y is gx in the backward pass */
  char *residual;        /* is added to y, in the layout; NULL: nothing */
  bool relu;             /* y is cut at 0 then */
  double *mean, *second; /* C each: M2, or the sum of g (x - mean); parts of them one behind the
                            other for rows */
  double *sum;           /* C each: the sum of g */
  int64_t parts;
  char *shift, *a, *b,
      *c; /* C each, of the compute type: y = (x - shift) a + b; gx = a g + b (x - shift) + c */
} BatchJob;

/* -- Layouts ----------------------------------------------------------------------------------- */

/* The strides of x's shape in one of the two layouts. */
static void layout_strides(const View *x, bool rows, int64_t *stride) {
  if (!rows) {
    shape_contiguous(x->ndim, x->shape, stride);
    return;
  }
  int64_t step = x->shape[1];
  stride[1] = 1;
  for (int d = x->ndim - 1; d >= 0; d--) {
    if (d == 1) continue;
    stride[d] = step;
    step *= x->shape[d];
  }
}

static bool has_layout(const View *x, bool rows) {
  int64_t stride[MF_MAX_DIMS];
  layout_strides(x, rows, stride);
  for (int d = 0; d < x->ndim; d++)
    if (x->shape[d] > 1 && x->stride[d] != stride[d]) return false;
  return true;
}

/* The tensor itself where it lies right and is of the compute type, else room for such a copy,
 * filled when `copy`. */
static char *laid(const BatchJob *j, const View *v, char *base, size_t *used, bool copy) {
  int64_t stride[MF_MAX_DIMS];
  if (block_is_native((DType)v->dtype, j->cls) && has_layout(v, j->rows)) return v->data;
  char *at = scratch_take(base, used, (size_t)view_numel(v) * (j->cls == PW_F64 ? 8 : 4));
  if (!base || !copy) return at;
  layout_strides(v, j->rows, stride);
  View dense = *v;
  dense.data = at;
  dense.stride = stride;
  dense.dtype = j->cls == PW_F64 ? F64 : F32;
  copy_views(v, &dense);
  return at;
}

static void bring_home(const BatchJob *j, const View *y) {
  int64_t stride[MF_MAX_DIMS];
  if (j->y == y->data) return;
  layout_strides(y, j->rows, stride);
  View dense = *y;
  dense.data = j->y;
  dense.stride = stride;
  dense.dtype = j->cls == PW_F64 ? F64 : F32;
  copy_views(&dense, y);
}

/* Lays out scratch from `base` (NULL: only counts). */
static size_t prepare(BatchJob *j, const View *x, const View *g, const View *y, char *base) {
  size_t used = 0;
  j->residual = NULL;
  j->relu = false;
  j->n = x->shape[0];
  j->channels = x->shape[1];
  j->inner = shape_numel(x->ndim - 2, x->shape + 2);
  bool planes = has_layout(x, false);
  j->rows = (has_layout(x, true) && (j->inner == 1 || !planes)) || !planes;
  j->cls = block_class((DType)y->dtype);
  j->parts = 1;
  int64_t parts = j->n * j->inner * j->channels / PART, most = j->n * j->inner / ROWS;
  if (most > PARTS) most = PARTS;
  if (j->rows && parts > 1 && most > 1) j->parts = parts < most ? parts : most;
  j->x = laid(j, x, base, &used, true);
  j->g = g ? laid(j, g, base, &used, true) : NULL;
  j->y = laid(j, y, base, &used, false);
  size_t channels = (size_t)j->channels;
  j->mean = (double *)(void *)scratch_take(base, &used, channels * 8 * (size_t)j->parts);
  j->second = (double *)(void *)scratch_take(base, &used, channels * 8 * (size_t)j->parts);
  j->sum = (double *)(void *)scratch_take(base, &used, channels * 8 * (size_t)j->parts);
  char **each[] = {&j->shift, &j->a, &j->b, &j->c};
  for (int k = 0; k < 4; k++) *each[k] = scratch_take(base, &used, channels * 8);
  return used;
}

static double item(const View *v, int64_t i) {
  return dtype_get_f64((DType)v->dtype,
                       (char *)v->data + i * v->stride[0] * (int64_t)dtype_size((DType)v->dtype));
}

static void set_item(const View *v, int64_t i, double value) {
  dtype_set_f64((DType)v->dtype,
                (char *)v->data + i * v->stride[0] * (int64_t)dtype_size((DType)v->dtype), value);
}

static int64_t part_row(const BatchJob *j, int64_t p) {
  return p * j->n * j->inner / j->parts;
}

/* -- Loops over planes and rows ---------------------------------------------------------------- */

#define BATCH_NORM(C, T)                                                                         \
  /* Moments of channels [begin, end). */                                                        \
  static void plane_moments_##C(int64_t begin, int64_t end, void *arg) {                         \
    const BatchJob *j = arg;                                                                     \
    for (int64_t n = 0; n < j->n; n++)                                                           \
      for (int64_t c = begin; c < end; c++)                                                      \
        moments_row_##C(j->inner, (const T *)j->x + (n * j->channels + c) * j->inner,            \
                        n * j->inner, &j->mean[c], &j->second[c]);                               \
  }                                                                                              \
  static void row_moments_##C(int64_t begin, int64_t end, void *arg) {                           \
    const BatchJob *j = arg;                                                                     \
    for (int64_t p = begin; p < end; p++) {                                                      \
      double *mean = j->mean + p * j->channels, *m2 = j->second + p * j->channels;               \
      int64_t first = part_row(j, p), rows = part_row(j, p + 1) - first;                         \
      memset(mean, 0, sizeof(double) * (size_t)j->channels);                                     \
      memset(m2, 0, sizeof(double) * (size_t)j->channels);                                       \
      moments_columns_##C(rows, j->channels, (const T *)j->x + first * j->channels, j->channels, \
                          0, mean, m2);                                                          \
    }                                                                                            \
  }                                                                                              \
  /* What follows the normalisation, on n elements of y, the first at `at`. */                   \
  static inline void finish_##C(const BatchJob *j, int64_t at, int64_t n) {                      \
    T *restrict y = (T *)j->y + at;                                                              \
    const T *restrict r = (const T *)j->residual + at;                                           \
    if (j->residual)                                                                             \
      for (int64_t i = 0; i < n; i++) y[i] += r[i];                                              \
    if (j->relu)                                                                                 \
      for (int64_t i = 0; i < n; i++) y[i] = y[i] < 0 ? 0 : y[i];                                \
  }                                                                                              \
  static void plane_apply_##C(int64_t begin, int64_t end, void *arg) { /* planes (n, c) */       \
    const BatchJob *j = arg;                                                                     \
    const T *shift = (const T *)j->shift, *a = (const T *)j->a, *b = (const T *)j->b;            \
    for (int64_t k = begin; k < end; k++) {                                                      \
      int64_t c = k % j->channels;                                                               \
      for (int64_t i = 0; i < j->inner; i += CHUNK) {                                            \
        int64_t at = k * j->inner + i, n = j->inner - i < CHUNK ? j->inner - i : CHUNK;          \
        norm_apply_one_##C(n, (const T *)j->x + at, shift[c], a[c], b[c], (T *)j->y + at);       \
        finish_##C(j, at, n);                                                                    \
      }                                                                                          \
    }                                                                                            \
  }                                                                                              \
  static void row_apply_##C(int64_t begin, int64_t end, void *arg) {                             \
    const BatchJob *j = arg;                                                                     \
    const T *restrict shift = (const T *)j->shift, *restrict a = (const T *)j->a,                \
                      *restrict b = (const T *)j->b;                                             \
    for (int64_t r = begin; r < end; r++) {                                                      \
      const T *restrict x = (const T *)j->x + r * j->channels;                                   \
      T *restrict y = (T *)j->y + r * j->channels;                                               \
      for (int64_t c = 0; c < j->channels; c++) y[c] = (x[c] - shift[c]) * a[c] + b[c];          \
      finish_##C(j, r * j->channels, j->channels);                                               \
    }                                                                                            \
  }

/* The same for the backward pass. */
#define BATCH_NORM_BACKWARD(C, T)                                                                  \
  static void plane_sums_##C(int64_t begin, int64_t end, void *arg) {                              \
    const BatchJob *j = arg;                                                                       \
    const T *shift = (const T *)j->shift;                                                          \
    for (int64_t c = begin; c < end; c++) j->sum[c] = j->second[c] = 0;                            \
    for (int64_t n = 0; n < j->n; n++)                                                             \
      for (int64_t c = begin; c < end; c++) {                                                      \
        int64_t at = (n * j->channels + c) * j->inner;                                             \
        norm_sums_one_##C(j->inner, (const T *)j->g + at, (const T *)j->x + at, shift[c],          \
                          &j->sum[c], &j->second[c]);                                              \
      }                                                                                            \
  }                                                                                                \
  /* The sums of `wide` vectors' columns over some rows, added to what there is. */                \
  static inline void tile_sums_##C(int wide, int64_t rows, int64_t step, const T *g, const T *x,   \
                                   const T *shift, double *sum, double *second) {                  \
    enum { V = sizeof(lanes_##C) / sizeof(T) };                                                    \
    lanes_##C s[WIDE] = {{0}}, d[WIDE] = {{0}};                                                    \
    for (int64_t r = 0; r < rows; r++, g += step, x += step)                                       \
      for (int k = 0; k < wide; k++) {                                                             \
        lanes_##C v = LANES_AT(lanes_##C, g, k * V);                                               \
        s[k] += v;                                                                                 \
        d[k] += v * (LANES_AT(lanes_##C, x, k * V) - LANES_AT(lanes_##C, shift, k * V));           \
      }                                                                                            \
    for (int k = 0; k < wide; k++)                                                                 \
      for (int l = 0; l < V; l++)                                                                  \
        sum[k * V + l] += (double)s[k][l], second[k * V + l] += (double)d[k][l];                   \
  }                                                                                                \
  static inline void column_sums_##C(int64_t rows, int64_t step, const T *g, const T *x, T shift,  \
                                     double *sum, double *second) {                                \
    T s = 0, d = 0;                                                                                \
    for (int64_t r = 0; r < rows; r++) s += g[r * step], d += g[r * step] * (x[r * step] - shift); \
    *sum += (double)s, *second += (double)d;                                                       \
  }                                                                                                \
  static void row_sums_##C(int64_t begin, int64_t end, void *arg) {                                \
    const BatchJob *j = arg;                                                                       \
    enum { V = sizeof(lanes_##C) / sizeof(T) };                                                    \
    int64_t step = j->channels;                                                                    \
    for (int64_t p = begin; p < end; p++) {                                                        \
      double *sum = j->sum + p * step, *second = j->second + p * step;                             \
      memset(sum, 0, sizeof(double) * (size_t)step);                                               \
      memset(second, 0, sizeof(double) * (size_t)step);                                            \
      for (int64_t r = part_row(j, p), last = part_row(j, p + 1); r < last; r += ROWS) {           \
        int64_t rows = last - r < ROWS ? last - r : ROWS, c = 0;                                   \
        const T *g = (const T *)j->g + r * step, *x = (const T *)j->x + r * step,                  \
                *shift = (const T *)j->shift;                                                      \
        for (; c + WIDE * V <= step; c += WIDE * V)                                                \
          tile_sums_##C(WIDE, rows, step, g + c, x + c, shift + c, sum + c, second + c);           \
        for (; c + V <= step; c += V)                                                              \
          tile_sums_##C(1, rows, step, g + c, x + c, shift + c, sum + c, second + c);              \
        for (; c < step; c++)                                                                      \
          column_sums_##C(rows, step, g + c, x + c, shift[c], sum + c, second + c);                \
      }                                                                                            \
    }                                                                                              \
  }                                                                                                \
  static void plane_input_##C(int64_t begin, int64_t end, void *arg) {                             \
    const BatchJob *j = arg;                                                                       \
    const T *shift = (const T *)j->shift, *a = (const T *)j->a, *b = (const T *)j->b,              \
            *d = (const T *)j->c;                                                                  \
    for (int64_t k = begin; k < end; k++) {                                                        \
      int64_t c = k % j->channels, at = k * j->inner;                                              \
      norm_input_one_##C(j->inner, (const T *)j->g + at, (const T *)j->x + at, shift[c], a[c],     \
                         b[c], d[c], (T *)j->y + at);                                              \
    }                                                                                              \
  }                                                                                                \
  static void row_input_##C(int64_t begin, int64_t end, void *arg) {                               \
    const BatchJob *j = arg;                                                                       \
    const T *restrict shift = (const T *)j->shift, *restrict a = (const T *)j->a,                  \
                      *restrict b = (const T *)j->b, *restrict d = (const T *)j->c;                \
    for (int64_t r = begin; r < end; r++) {                                                        \
      const T *restrict g = (const T *)j->g + r * j->channels, *restrict x = (const T *)j->x +     \
                                                                             r * j->channels;      \
      T *restrict gx = (T *)j->y + r * j->channels;                                                \
      for (int64_t c = 0; c < j->channels; c++)                                                    \
        gx[c] = a[c] * g[c] + (b[c] * (x[c] - shift[c]) + d[c]);                                   \
    }                                                                                              \
  }                                                                                                \
  static void set_channel_##C(const BatchJob *j, int64_t i, double shift, double a, double b,      \
                              double c) {                                                          \
    ((T *)j->shift)[i] = (T)shift, ((T *)j->a)[i] = (T)a, ((T *)j->b)[i] = (T)b,                   \
        ((T *)j->c)[i] = (T)c;                                                                     \
  }
BATCH_NORM(f32, float)
BATCH_NORM(f64, double)
BATCH_NORM_BACKWARD(f32, float)
BATCH_NORM_BACKWARD(f64, double)

/* Runs a pair of loops: over planes or rows, of float or double. */
static void run(BatchJob *j, int64_t n, int64_t grain, ThreadBody *f32, ThreadBody *f64) {
  mf_parallel(n, grain, j->cls == PW_F32 ? f32 : f64, j);
}

static void run_parts(BatchJob *j, ThreadBody *plane32, ThreadBody *plane64, ThreadBody *row32,
                      ThreadBody *row64) {
  if (j->rows) run(j, j->parts, 1, row32, row64);
  else run(j, j->channels, 1 + GRAIN / (j->n * j->inner + 1), plane32, plane64);
}

static void run_each(BatchJob *j, ThreadBody *plane32, ThreadBody *plane64, ThreadBody *row32,
                     ThreadBody *row64) {
  if (j->rows) run(j, j->n * j->inner, 1 + GRAIN / (j->channels + 1), row32, row64);
  else run(j, j->n * j->channels, 1 + GRAIN / (j->inner + 1), plane32, plane64);
}

static void set_channel(const BatchJob *j, int64_t i, double shift, double a, double b, double c) {
  if (j->cls == PW_F32) set_channel_f32(j, i, shift, a, b, c);
  else set_channel_f64(j, i, shift, a, b, c);
}

/* -- Forward ----------------------------------------------------------------------------------- */

static int want_channels(Infer *I, int k, int64_t channels) {
  char have[SHAPE_TEXT_MAX], name[64];
  if (!I->in[k]) return 0;
  int rc = infer_want_float(I, k);
  if (rc || (I->in[k]->ndim == 1 && I->in[k]->shape[0] == channels)) return rc;
  return infer_error(I,
                     "%s has shape %s; it must have one element for each of the %lld channels of x",
                     infer_name(I, k, name, sizeof name),
                     shape_text(I->in[k]->ndim, I->in[k]->shape, have), (long long)channels);
}

/* Input k is x, and those from `first` on are values of its channels. */
static int check_operands(Infer *I, int k, int first) {
  const Meta *x = I->in[k];
  char shape[SHAPE_TEXT_MAX];
  int rc = infer_want_float(I, k);
  if (!rc && x->ndim < 2)
    rc = infer_error(I, "x must have at least 2 dims, (N, C, ...), has shape %s",
                     shape_text(x->ndim, x->shape, shape));
  for (int i = first; i < I->n_in && !rc; i++) rc = want_channels(I, i, x->shape[1]);
  return rc;
}

static int batch_norm_infer(Infer *I) {
  const struct batch_norm_args *a = I->args;
  const Meta *x = I->in[0];
  char shape[SHAPE_TEXT_MAX];
  int rc = check_operands(I, 0, 1);
  if (!rc && (!I->in[1] != !I->in[2]))
    rc = infer_error(I, "running_mean and running_var are given together or not at all");
  if (!rc && !a->training && !I->in[1])
    rc = infer_error(
        I, "running_mean and running_var are missing, which are needed outside of training");
  if (!rc && a->training && shape_numel(x->ndim, x->shape) == x->shape[1])
    rc = infer_error(
        I, "x of shape %s has one value a channel, which has no variance; training needs more",
        shape_text(x->ndim, x->shape, shape));
  if (!rc) rc = infer_same(I);
  DType t = x->dtype == F64 ? F64 : F32;
  if (!rc) rc = infer_shape(I, t, 1, &x->shape[1]);
  return rc ? rc : infer_shape(I, t, 1, &x->shape[1]);
}

/* mean and M2 of the batch, into the first part. */
static void batch_moments(BatchJob *j) {
  run_parts(j, plane_moments_f32, plane_moments_f64, row_moments_f32, row_moments_f64);
  for (int64_t p = 1; p < j->parts; p++) {
    double done = (double)part_row(j, p), n = (double)part_row(j, p + 1) - done;
    for (int64_t c = 0; c < j->channels; c++)
      moments_join(&j->mean[c], &j->second[c], done, j->mean[p * j->channels + c],
                   j->second[p * j->channels + c], n);
  }
}

static size_t batch_norm_scratch(const OpCall *c) {
  BatchJob j;
  return prepare(&j, &c->in[0], NULL, &c->out[0], NULL);
}

/* The forward pass, what follows the normalisation included. */
static int normalise(BatchJob *j, const OpCall *c, bool training, double momentum, double eps) {
  const View *running_mean = &c->in[1], *running_var = &c->in[2], *w = &c->in[3], *b = &c->in[4];
  double count = (double)(j->n * j->inner);
  if (training && count) batch_moments(j);
  for (int64_t i = 0; i < j->channels; i++) {
    double mean = training ? (count ? j->mean[i] : 0) : item(running_mean, i),
           var = training ? (count ? j->second[i] / count : 0) : item(running_var, i);
    double rstd = 1 / sqrt(var + eps);
    if (training && !view_absent(running_mean) && count) {
      set_item(running_mean, i, (1 - momentum) * item(running_mean, i) + momentum * mean);
      set_item(running_var, i,
               (1 - momentum) * item(running_var, i) + momentum * (j->second[i] / (count - 1)));
    }
    set_item(&c->out[1], i, mean);
    set_item(&c->out[2], i, rstd);
    set_channel(j, i, mean, rstd * (view_absent(w) ? 1 : item(w, i)),
                view_absent(b) ? 0 : item(b, i), 0);
  }
  if (count == 0 || j->channels == 0) return 0;
  run_each(j, plane_apply_f32, plane_apply_f64, row_apply_f32, row_apply_f64);
  bring_home(j, &c->out[0]);
  return 0;
}

static int batch_norm_cpu(const OpCall *c) {
  const struct batch_norm_args *a = c->args;
  BatchJob j;
  prepare(&j, &c->in[0], NULL, &c->out[0], c->scratch);
  return normalise(&j, c, a->training, a->momentum, a->eps);
}

/* Channels are independent; with given statistics, so is everything else. */
static int batch_norm_sbp(SbpAsk *q) {
  const struct batch_norm_args *a = q->args;
  for (int d = 0; d < q->in[0]->ndim && !a->training; d++) {
    int rc = d == 1 ? 0 : sbp_add_split(q, 0, d, 0, d);
    if (rc) return rc;
  }
  return sbp_notation(q, "N c ...!, c, c, c, c -> N c ...!, c, c");
}

/* Normalises each channel of x (N, C, ...): in training with the mean and variance of the batch,
 * which also move the running ones; else with the running ones (Ioffe and Szegedy, 2015). Besides
 * y: the mean and 1 / sqrt(var + eps) that were used. */
OP(batch_norm,
   .signature =
       "batch_norm(Tensor x, Tensor!? running_mean=None, Tensor!? running_var=None, Tensor? "
       "weight=None, "
       "Tensor? bias=None, bool training=False, float momentum=0.1, float eps=1e-05) -> (Tensor y, "
       "Tensor mean, Tensor rstd)",
   .flags = OP_HIDDEN, .sbp_rule = batch_norm_sbp, .infer = batch_norm_infer, .cpu = batch_norm_cpu,
   .scratch = batch_norm_scratch)

/* -- Followed by a sum and a relu -------------------------------------------------------------- */

static size_t act_prepare(BatchJob *j, const OpCall *c) {
  const struct batch_norm_act_args *a = c->args;
  size_t used = scratch_aligned(prepare(j, &c->in[0], NULL, &c->out[0], c->scratch));
  j->residual = view_absent(&c->in[5]) ? NULL : laid(j, &c->in[5], c->scratch, &used, true);
  j->relu = a->relu;
  return used;
}

static size_t batch_norm_act_scratch(const OpCall *c) {
  BatchJob j;
  OpCall asking = *c;
  asking.scratch = NULL;
  return act_prepare(&j, &asking);
}

static int batch_norm_act_cpu(const OpCall *c) {
  const struct batch_norm_act_args *a = c->args;
  BatchJob j;
  act_prepare(&j, c);
  return normalise(&j, c, a->training, a->momentum, a->eps);
}

static int batch_norm_act_infer(Infer *I) {
  const struct batch_norm_act_args *a = I->args;
  struct batch_norm_args plain = {.training = a->training, .momentum = a->momentum, .eps = a->eps};
  const void *args = I->args;
  int rc = 0;
  if (I->in[5]) rc = infer_want_same_shape(I, 5, 0);
  if (!rc && I->in[5]) rc = infer_want_same_dtype(I, 5, 0);
  I->args = &plain;
  I->n_in = 5;
  if (!rc) rc = batch_norm_infer(I);
  I->n_in = 6;
  I->args = (void *)(uintptr_t)args;
  return rc;
}

static int batch_norm_act_sbp(SbpAsk *q) {
  return sbp_notation(q, "N c ...!, c, c, c, c, N c ...! -> N c ...!, c, c");
}

/* batch_norm, whose y is then added to `residual` and cut at 0 where `relu`. Made by the compiler
 * for graphs whose gradients are there already. */
OP(batch_norm_act,
   .signature =
       "batch_norm_act(Tensor x, Tensor!? running_mean=None, Tensor!? running_var=None, Tensor? "
       "weight=None, "
       "Tensor? bias=None, Tensor? residual=None, bool training=False, float momentum=0.1, float "
       "eps=1e-05, bool relu=False) -> (Tensor y, Tensor mean, Tensor rstd)",
   .flags = OP_HIDDEN | OP_NO_GRAD, .sbp_rule = batch_norm_act_sbp, .infer = batch_norm_act_infer,
   .cpu = batch_norm_act_cpu, .scratch = batch_norm_act_scratch)

/* -- Backward ---------------------------------------------------------------------------------- */

static int batch_norm_backward_infer(Infer *I) {
  const struct batch_norm_backward_args *a = I->args;
  const Meta *x = I->in[1];
  int64_t none[1] = {0};
  int rc = check_operands(I, 1, 2);
  if (!rc) rc = infer_want_float(I, 0);
  if (!rc) rc = infer_want_same_shape(I, 0, 1);
  if (!rc) rc = infer_like(I, 1, (DType)x->dtype);
  DType t = (DType)(I->in[4] ? I->in[4] : x)->dtype;
  for (int k = 0; k < 2 && !rc; k++) rc = infer_shape(I, t, 1, a->params ? &x->shape[1] : none);
  return rc;
}

static size_t batch_norm_backward_scratch(const OpCall *c) {
  BatchJob j;
  return prepare(&j, &c->in[1], &c->in[0], &c->out[0], NULL);
}

static int batch_norm_backward_cpu(const OpCall *c) {
  const struct batch_norm_backward_args *a = c->args;
  const View *mean = &c->in[2], *rstd = &c->in[3], *w = &c->in[4];
  BatchJob j;
  prepare(&j, &c->in[1], &c->in[0], &c->out[0], c->scratch);
  double count = (double)(j.n * j.inner);
  bool sums = a->training || a->params;
  for (int64_t i = 0; i < j.channels; i++) set_channel(&j, i, item(mean, i), 0, 0, 0);
  memset(j.sum, 0, sizeof(double) * (size_t)(j.channels * j.parts));
  memset(j.second, 0, sizeof(double) * (size_t)(j.channels * j.parts));
  if (sums && count) run_parts(&j, plane_sums_f32, plane_sums_f64, row_sums_f32, row_sums_f64);
  for (int64_t i = 0; i < j.channels; i++) {
    double sum = 0, second = 0, r = item(rstd, i), scale = r * (view_absent(w) ? 1 : item(w, i));
    for (int64_t p = 0; p < j.parts; p++)
      sum += j.sum[p * j.channels + i], second += j.second[p * j.channels + i];
    if (a->params) set_item(&c->out[1], i, second * r), set_item(&c->out[2], i, sum);
    if (!a->training) sum = second = 0;
    set_channel(&j, i, item(mean, i), scale, -scale * r * r * second / count, -scale * sum / count);
  }
  if (count == 0 || j.channels == 0) return 0;
  run_each(&j, plane_input_f32, plane_input_f64, row_input_f32, row_input_f64);
  bring_home(&j, &c->out[0]);
  return 0;
}

static int batch_norm_backward_sbp(SbpAsk *q) {
  const struct batch_norm_backward_args *a = q->args;
  for (int d = 0; d < q->in[0]->ndim && !a->training; d++) {
    if (d == 1) continue;
    Sbp *row = sbp_add(q);
    if (!row) return MF_ENOMEM;
    row[0] = row[1] = row[q->n_in] = sbp_split(d);
    row[q->n_in + 1].kind = row[q->n_in + 2].kind = SBP_P;
  }
  return sbp_notation(q, a->params ? "N c ...!, N c ...!, c, c, c -> N c ...!, c, c"
                                   : "N c ...!, N c ...!, c, c, c -> N c ...!, E, E");
}

/* The gradients of batch_norm from the mean and rstd it used; those of weight and bias are empty
 * unless `params`. */
OP(batch_norm_backward,
   .signature =
       "batch_norm_backward(Tensor g, Tensor x, Tensor mean, Tensor rstd, Tensor? weight, bool "
       "training, "
       "bool params) -> (Tensor x, Tensor weight, Tensor bias)",
   .flags = OP_HIDDEN, .sbp_rule = batch_norm_backward_sbp, .infer = batch_norm_backward_infer,
   .cpu = batch_norm_backward_cpu, .scratch = batch_norm_backward_scratch)
