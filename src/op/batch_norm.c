/* batch_norm in training and evaluation, and its gradient.
 *
 * A tensor (N, C, ...) lies in one of two ways: planes, where each channel of each sample is one
 * run of L elements, or rows, where the C channels of each place lie side by side (channels_last,
 * and L = 1). Both have loops of their own, so that memory is read in order; other layouts and
 * dtypes go through a copy. Statistics are those of moments.h. Planes are shared out by channels,
 * so that each channel's sums are made by one thread; rows by parts, as many as the sizes say,
 * whose sums are joined in order.
 *
 * Where a relu followed, its gradient is taken on the way: a gate says which elements of g count,
 * by y, or, where nothing was added before the relu, by the normalisation computed again, which is
 * less to read than y and gives the same bits. */
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

/* Which elements of g count: all, or those where the value before the relu was positive, computed
 * from x, or read from y; KEEP: what is left of g is written where g was; SUM: h is added before.
 */
typedef enum Gate { GATE_NONE, GATE_X, GATE_Y, GATE_KEEP, GATE_SUM } Gate;

typedef struct BatchJob {
  int64_t n, channels, inner; /* N, C, L */
  bool rows;
  PointwiseClass cls;
  char *x, *g, *y;       /* of the compute type, in the layout; y is gx in the backward pass */
  char *residual;        /* is added to y, in the layout; NULL: nothing */
  bool relu;             /* y is cut at 0 then */
  Gate gate;             /* of g */
  char *act, *h;         /* y of the forward pass and h, in the layout, where the gate reads them */
  double *mean, *second; /* C each: M2, or the sum of g (x - mean); parts of them one behind the
                            other for rows */
  double *sum;           /* C each: the sum of g */
  int64_t parts;
  /* C each, of the compute type: y = (x - shift) a + b; gx = a g + b (x - shift) + c, and GATE_X is
   * by (x - shift) scale + bias */
  char *shift, *a, *b, *c, *scale, *bias;
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

/* What was made at `from` goes to y, if it is not there. */
static void bring_home(const BatchJob *j, char *from, const View *y) {
  int64_t stride[MF_MAX_DIMS];
  if (from == y->data) return;
  layout_strides(y, j->rows, stride);
  View dense = *y;
  dense.data = from;
  dense.stride = stride;
  dense.dtype = j->cls == PW_F64 ? F64 : F32;
  copy_views(&dense, y);
}

/* Lays out scratch from `base` (NULL: only counts). */
static size_t prepare(BatchJob *j, const View *x, const View *g, const View *y, char *base) {
  size_t used = 0;
  j->residual = NULL;
  j->relu = false;
  j->gate = GATE_NONE;
  j->act = j->h = NULL;
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
  char **each[] = {&j->shift, &j->a, &j->b, &j->c, &j->scale, &j->bias};
  for (int k = 0; k < 6; k++) *each[k] = scratch_take(base, &used, channels * 8);
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

/* The same for the backward pass. Gates are constants where these are inlined. */
#define INLINE static inline __attribute__((always_inline))
#define NOINLINE __attribute__((noinline))
#define BATCH_NORM_GATES(C, T)                                                                     \
  INLINE lanes_##C gated_lanes_##C(Gate gate, const BatchJob *j, int64_t at, int64_t c) {          \
    lanes_##C g = LANES_AT(lanes_##C, (const T *)j->g, at), z;                                     \
    if (gate == GATE_NONE) return g;                                                               \
    if (gate == GATE_X)                                                                            \
      z = (LANES_AT(lanes_##C, (const T *)j->x, at) -                                              \
           LANES_AT(lanes_##C, (const T *)j->shift, c)) *                                          \
              LANES_AT(lanes_##C, (const T *)j->scale, c) +                                        \
          LANES_AT(lanes_##C, (const T *)j->bias, c);                                              \
    else z = LANES_AT(lanes_##C, (const T *)j->act, at);                                           \
    if (gate == GATE_SUM) g += LANES_AT(lanes_##C, (const T *)j->h, at);                           \
    g = (lanes_##C)((z > 0) & (__typeof__(z > 0))g);                                               \
    if (gate >= GATE_KEEP) LANES_PUT(lanes_##C, (T *)j->g, at, g);                                 \
    return g;                                                                                      \
  }                                                                                                \
  INLINE T gated_##C(Gate gate, T g, T y, T x, T shift, T scale, T bias) {                         \
    if (gate == GATE_NONE) return g;                                                               \
    return (gate == GATE_X ? (x - shift) * scale + bias : y) > 0 ? g : 0;                          \
  }                                                                                                \
  /* n elements of g of channel c from `at` on, gated, in room for CHUNK of them unless all count. \
   */                                                                                              \
  static const T *plane_gated_##C(const BatchJob *j, int64_t at, int64_t n, int64_t c,             \
                                  T *restrict room) {                                              \
    T *g = (T *)j->g + at;                                                                         \
    const T *x = (const T *)j->x + at, *y = j->act ? (const T *)j->act + at : NULL,                \
            *h = j->h ? (const T *)j->h + at : NULL;                                               \
    T shift = ((const T *)j->shift)[c], scale = ((const T *)j->scale)[c],                          \
      bias = ((const T *)j->bias)[c];                                                              \
    if (j->gate == GATE_NONE) return g;                                                            \
    if (j->gate == GATE_X)                                                                         \
      for (int64_t i = 0; i < n; i++)                                                              \
        room[i] = gated_##C(GATE_X, g[i], 0, x[i], shift, scale, bias);                            \
    else if (j->gate == GATE_SUM)                                                                  \
      for (int64_t i = 0; i < n; i++) room[i] = gated_##C(GATE_Y, g[i] + h[i], y[i], 0, 0, 0, 0);  \
    else                                                                                           \
      for (int64_t i = 0; i < n; i++) room[i] = gated_##C(GATE_Y, g[i], y[i], 0, 0, 0, 0);         \
    if (j->gate >= GATE_KEEP) memcpy(g, room, sizeof(T) * (size_t)n);                              \
    return room;                                                                                   \
  }

/* The sums over gated elements, one pass over g and x. */
#define BATCH_NORM_SUMS(C, T)                                                                      \
  static void plane_sums_##C(int64_t begin, int64_t end, void *arg) {                              \
    const BatchJob *j = arg;                                                                       \
    const T *shift = (const T *)j->shift;                                                          \
    T room[CHUNK];                                                                                 \
    for (int64_t c = begin; c < end; c++) j->sum[c] = j->second[c] = 0;                            \
    for (int64_t n = 0; n < j->n; n++)                                                             \
      for (int64_t c = begin; c < end; c++)                                                        \
        for (int64_t i = 0; i < j->inner; i += CHUNK) {                                            \
          int64_t at = (n * j->channels + c) * j->inner + i,                                       \
                  m = j->inner - i < CHUNK ? j->inner - i : CHUNK;                                 \
          norm_sums_one_##C(m, plane_gated_##C(j, at, m, c, room), (const T *)j->x + at, shift[c], \
                            &j->sum[c], &j->second[c]);                                            \
        }                                                                                          \
  }                                                                                                \
  /* The sums of `wide` vectors' columns, the first c, over some rows, the first of which is at    \
   * `at`, added to what there is. */                                                              \
  INLINE void tile_sums_##C(Gate gate, int wide, int64_t rows, const BatchJob *j, int64_t at,      \
                            int64_t c, double *sum, double *second) {                              \
    enum { V = sizeof(lanes_##C) / sizeof(T) };                                                    \
    lanes_##C s[WIDE] = {{0}}, d[WIDE] = {{0}};                                                    \
    for (int64_t r = 0; r < rows; r++, at += j->channels)                                          \
      for (int k = 0; k < wide; k++) {                                                             \
        lanes_##C v = gated_lanes_##C(gate, j, at + c + k * V, c + k * V);                         \
        s[k] += v;                                                                                 \
        d[k] += v * (LANES_AT(lanes_##C, (const T *)j->x, at + c + k * V) -                        \
                     LANES_AT(lanes_##C, (const T *)j->shift, c + k * V));                         \
      }                                                                                            \
    for (int k = 0; k < wide; k++)                                                                 \
      for (int l = 0; l < V; l++)                                                                  \
        sum[c + k * V + l] += (double)s[k][l], second[c + k * V + l] += (double)d[k][l];           \
  }                                                                                                \
  /* The sums of one column, of gated elements g and of x, `step` apart. Not inlined, so that      \
   * gates make no difference to how the compiler does arithmetic. */                              \
  static NOINLINE void column_add_##C(int64_t rows, int64_t step, const T *restrict g,             \
                                      const T *restrict x, T shift, double *sum, double *second) { \
    T s = 0, d = 0;                                                                                \
    for (int64_t r = 0; r < rows; r++) s += g[r], d += g[r] * (x[r * step] - shift);               \
    *sum += (double)s, *second += (double)d;                                                       \
  }                                                                                                \
  INLINE void column_sums_##C(Gate gate, int64_t rows, const BatchJob *j, int64_t at, int64_t c,   \
                              double *sum, double *second) {                                       \
    T room[ROWS], shift = ((const T *)j->shift)[c], scale = ((const T *)j->scale)[c],              \
                  bias = ((const T *)j->bias)[c];                                                  \
    int64_t step = j->channels;                                                                    \
    T *g = (T *)j->g + at + c;                                                                     \
    const T *x = (const T *)j->x + at + c;                                                         \
    for (int64_t r = 0; r < rows; r++) {                                                           \
      T y = gate < GATE_Y ? 0 : ((const T *)j->act)[at + c + r * step];                            \
      T v = g[r * step] + (gate == GATE_SUM ? ((const T *)j->h)[at + c + r * step] : 0);           \
      room[r] = gated_##C(gate, v, y, x[r * step], shift, scale, bias);                            \
      if (gate >= GATE_KEEP) g[r * step] = room[r];                                                \
    }                                                                                              \
    column_add_##C(rows, step, room, x, shift, &sum[c], &second[c]);                               \
  }                                                                                                \
  INLINE void part_sums_##C(Gate gate, const BatchJob *j, int64_t p, double *sum,                  \
                            double *second) {                                                      \
    enum { V = sizeof(lanes_##C) / sizeof(T) };                                                    \
    int64_t step = j->channels;                                                                    \
    for (int64_t r = part_row(j, p), last = part_row(j, p + 1); r < last; r += ROWS) {             \
      int64_t rows = last - r < ROWS ? last - r : ROWS, c = 0, at = r * step;                      \
      for (; c + WIDE * V <= step; c += WIDE * V)                                                  \
        tile_sums_##C(gate, WIDE, rows, j, at, c, sum, second);                                    \
      for (; c + V <= step; c += V) tile_sums_##C(gate, 1, rows, j, at, c, sum, second);           \
      for (; c < step; c++) column_sums_##C(gate, rows, j, at, c, sum, second);                    \
    }                                                                                              \
  }                                                                                                \
  static void row_sums_##C(int64_t begin, int64_t end, void *arg) {                                \
    const BatchJob *j = arg;                                                                       \
    for (int64_t p = begin; p < end; p++) {                                                        \
      double *sum = j->sum + p * j->channels, *second = j->second + p * j->channels;               \
      memset(sum, 0, sizeof(double) * (size_t)j->channels);                                        \
      memset(second, 0, sizeof(double) * (size_t)j->channels);                                     \
      switch (j->gate) {                                                                           \
        case GATE_NONE: part_sums_##C(GATE_NONE, j, p, sum, second); break;                        \
        case GATE_X: part_sums_##C(GATE_X, j, p, sum, second); break;                              \
        case GATE_Y: part_sums_##C(GATE_Y, j, p, sum, second); break;                              \
        case GATE_KEEP: part_sums_##C(GATE_KEEP, j, p, sum, second); break;                        \
        case GATE_SUM: part_sums_##C(GATE_SUM, j, p, sum, second); break;                          \
      }                                                                                            \
    }                                                                                              \
  }

/* The input's gradient, a second pass. */
#define BATCH_NORM_INPUT(C, T)                                                                     \
  static void plane_input_##C(int64_t begin, int64_t end, void *arg) {                             \
    const BatchJob *j = arg;                                                                       \
    const T *shift = (const T *)j->shift, *a = (const T *)j->a, *b = (const T *)j->b,              \
            *d = (const T *)j->c;                                                                  \
    T room[CHUNK];                                                                                 \
    for (int64_t k = begin; k < end; k++) {                                                        \
      int64_t c = k % j->channels;                                                                 \
      for (int64_t i = 0; i < j->inner; i += CHUNK) {                                              \
        int64_t at = k * j->inner + i, n = j->inner - i < CHUNK ? j->inner - i : CHUNK;            \
        norm_input_one_##C(n, plane_gated_##C(j, at, n, c, room), (const T *)j->x + at, shift[c],  \
                           a[c], b[c], d[c], (T *)j->y + at);                                      \
      }                                                                                            \
    }                                                                                              \
  }                                                                                                \
  /* n elements of a row from `at` on, the first of channel c, gated, into room. */                \
  INLINE void row_gated_##C(Gate gate, const BatchJob *j, int64_t at, int64_t c, int64_t n,        \
                            T *restrict room) {                                                    \
    const T *restrict shift = (const T *)j->shift + c, *restrict scale = (const T *)j->scale + c,  \
                      *restrict bias = (const T *)j->bias + c, *restrict g = (const T *)j->g + at, \
                      *restrict x = (const T *)j->x + at,                                          \
                      *restrict y = (const T *)(gate == GATE_Y ? j->act : j->x) + at;              \
    for (int64_t i = 0; i < n; i++)                                                                \
      room[i] = gated_##C(gate, g[i], y[i], x[i], shift[i], scale[i], bias[i]);                    \
  }                                                                                                \
  static NOINLINE void row_linear_##C(int64_t n, const T *restrict g, const T *restrict x,         \
                                      const T *restrict shift, const T *restrict a,                \
                                      const T *restrict b, const T *restrict d, T *restrict gx) {  \
    for (int64_t i = 0; i < n; i++) gx[i] = a[i] * g[i] + (b[i] * (x[i] - shift[i]) + d[i]);       \
  }                                                                                                \
  static void row_input_##C(int64_t begin, int64_t end, void *arg) {                               \
    const BatchJob *j = arg;                                                                       \
    T room[CHUNK];                                                                                 \
    for (int64_t r = begin; r < end; r++)                                                          \
      for (int64_t c = 0; c < j->channels; c += CHUNK) {                                           \
        int64_t at = r * j->channels + c, n = j->channels - c < CHUNK ? j->channels - c : CHUNK;   \
        const T *g = j->gate == GATE_NONE ? (const T *)j->g + at : room;                           \
        if (j->gate == GATE_X) row_gated_##C(GATE_X, j, at, c, n, room);                           \
        else if (j->gate == GATE_Y) row_gated_##C(GATE_Y, j, at, c, n, room);                      \
        row_linear_##C(n, g, (const T *)j->x + at, (const T *)j->shift + c, (const T *)j->a + c,   \
                       (const T *)j->b + c, (const T *)j->c + c, (T *)j->y + at);                  \
      }                                                                                            \
  }                                                                                                \
  static void set_channel_##C(const BatchJob *j, int64_t i, double shift, double a, double b,      \
                              double c) {                                                          \
    ((T *)j->shift)[i] = (T)shift, ((T *)j->a)[i] = (T)a, ((T *)j->b)[i] = (T)b,                   \
        ((T *)j->c)[i] = (T)c;                                                                     \
  }                                                                                                \
  static void set_gate_##C(const BatchJob *j, int64_t i, double scale, double bias) {              \
    ((T *)j->scale)[i] = (T)scale, ((T *)j->bias)[i] = (T)bias;                                    \
  }
BATCH_NORM(f32, float)
BATCH_NORM(f64, double)
BATCH_NORM_GATES(f32, float)
BATCH_NORM_GATES(f64, double)
BATCH_NORM_SUMS(f32, float)
BATCH_NORM_SUMS(f64, double)
BATCH_NORM_INPUT(f32, float)
BATCH_NORM_INPUT(f64, double)

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

/* y of x, when the channels' numbers are there. */
static void apply(BatchJob *j, const View *y) {
  if (!j->n || !j->inner || !j->channels) return;
  run_each(j, plane_apply_f32, plane_apply_f64, row_apply_f32, row_apply_f64);
  bring_home(j, j->y, y);
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
    set_item(&c->out[2], i, rstd); /* as rounded: the gradient computes y from it again */
    set_channel(j, i, mean, item(&c->out[2], i) * (view_absent(w) ? 1 : item(w, i)),
                view_absent(b) ? 0 : item(b, i), 0);
  }
  apply(j, &c->out[0]);
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

/* -- Once more --------------------------------------------------------------------------------- */

static int batch_norm_again_infer(Infer *I) {
  int rc = check_operands(I, 0, 1);
  return rc ? rc : infer_same(I);
}

static size_t batch_norm_again_scratch(const OpCall *c) {
  BatchJob j;
  return prepare(&j, &c->in[0], NULL, &c->out[0], NULL);
}

static int batch_norm_again_cpu(const OpCall *c) {
  const struct batch_norm_again_args *a = c->args;
  const View *mean = &c->in[1], *rstd = &c->in[2], *w = &c->in[3], *b = &c->in[4];
  BatchJob j;
  prepare(&j, &c->in[0], NULL, &c->out[0], c->scratch);
  j.relu = a->relu;
  for (int64_t i = 0; i < j.channels; i++)
    set_channel(&j, i, item(mean, i), item(rstd, i) * (view_absent(w) ? 1 : item(w, i)),
                view_absent(b) ? 0 : item(b, i), 0);
  apply(&j, &c->out[0]);
  return 0;
}

static int batch_norm_again_sbp(SbpAsk *q) {
  for (int d = 0; d < q->in[0]->ndim; d++) {
    int rc = d == 1 ? 0 : sbp_add_split(q, 0, d, 0, d);
    if (rc) return rc;
  }
  return sbp_notation(q, "N c ...!, c, c, c, c -> N c ...!");
}

/* What batch_norm gave, from the mean and rstd that it used, cut at 0 where `relu`: the same bits.
 * Made by the compiler where it costs less than to keep that. */
OP(batch_norm_again,
   .signature =
       "batch_norm_again(Tensor x, Tensor mean, Tensor rstd, Tensor? weight=None, Tensor? "
       "bias=None, bool relu=False) -> Tensor",
   .flags = OP_HIDDEN | OP_NO_GRAD, .sbp_rule = batch_norm_again_sbp,
   .infer = batch_norm_again_infer, .cpu = batch_norm_again_cpu,
   .scratch = batch_norm_again_scratch)

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

/* The backward pass of a job whose gate is set. */
static int back(BatchJob *j, const OpCall *c, const View *mean, const View *rstd, const View *w,
                bool training, bool params) {
  double count = (double)(j->n * j->inner);
  bool sums = training || params || j->gate >= GATE_KEEP;
  for (int64_t i = 0; i < j->channels; i++) set_channel(j, i, item(mean, i), 0, 0, 0);
  memset(j->sum, 0, sizeof(double) * (size_t)(j->channels * j->parts));
  memset(j->second, 0, sizeof(double) * (size_t)(j->channels * j->parts));
  if (sums && count) run_parts(j, plane_sums_f32, plane_sums_f64, row_sums_f32, row_sums_f64);
  if (j->gate >= GATE_KEEP) j->gate = GATE_NONE;
  for (int64_t i = 0; i < j->channels; i++) {
    double sum = 0, second = 0, r = item(rstd, i), scale = r * (view_absent(w) ? 1 : item(w, i));
    for (int64_t p = 0; p < j->parts; p++)
      sum += j->sum[p * j->channels + i], second += j->second[p * j->channels + i];
    if (params) set_item(&c->out[1], i, second * r), set_item(&c->out[2], i, sum);
    if (!training) sum = second = 0;
    set_channel(j, i, item(mean, i), scale, -scale * r * r * second / count, -scale * sum / count);
  }
  if (count == 0 || j->channels == 0) return 0;
  run_each(j, plane_input_f32, plane_input_f64, row_input_f32, row_input_f64);
  bring_home(j, j->y, &c->out[0]);
  return 0;
}

static int batch_norm_backward_cpu(const OpCall *c) {
  const struct batch_norm_backward_args *a = c->args;
  BatchJob j;
  prepare(&j, &c->in[1], &c->in[0], &c->out[0], c->scratch);
  return back(&j, c, &c->in[2], &c->in[3], &c->in[4], a->training, a->params);
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

/* -- Backward, of what a relu followed --------------------------------------------------------- */

static size_t gate_prepare(BatchJob *j, const OpCall *c) {
  const struct batch_norm_act_backward_args *a = c->args;
  const View *y = &c->in[1], *h = &c->in[7];
  size_t used = scratch_aligned(prepare(j, &c->in[2], &c->in[0], &c->out[0], c->scratch));
  j->act = view_absent(y) ? NULL : laid(j, y, c->scratch, &used, true);
  j->h = view_absent(h) ? NULL : laid(j, h, c->scratch, &used, true);
  j->gate = view_absent(y) ? GATE_X : !a->residual ? GATE_Y : view_absent(h) ? GATE_KEEP : GATE_SUM;
  return used;
}

static size_t batch_norm_act_backward_scratch(const OpCall *c) {
  BatchJob j;
  OpCall asking = *c;
  asking.scratch = NULL;
  return gate_prepare(&j, &asking);
}

static int batch_norm_act_backward_cpu(const OpCall *c) {
  const struct batch_norm_act_backward_args *a = c->args;
  const View *mean = &c->in[3], *rstd = &c->in[4], *w = &c->in[5], *b = &c->in[6];
  BatchJob j;
  gate_prepare(&j, c);
  for (int64_t i = 0; i < j.channels && j.gate == GATE_X; i++) {
    double scale = item(rstd, i) * (view_absent(w) ? 1 : item(w, i));
    double bias = view_absent(b) ? 0 : item(b, i);
    if (j.cls == PW_F32) set_gate_f32(&j, i, scale, bias);
    else set_gate_f64(&j, i, scale, bias);
  }
  int rc = back(&j, c, mean, rstd, w, a->training, a->params);
  if (!rc && a->residual) bring_home(&j, j.g, &c->in[0]);
  return rc;
}

static int batch_norm_act_backward_infer(Infer *I) {
  const struct batch_norm_act_backward_args *a = I->args;
  const Meta *x = I->in[2];
  int64_t none[1] = {0};
  I->n_in = 7;
  int rc = check_operands(I, 2, 3);
  I->n_in = 8;
  if (!rc) rc = infer_want_same_shape(I, 0, 2);
  if (!rc) rc = infer_want_same_dtype(I, 0, 2);
  if (!rc && I->in[1]) rc = infer_want_same_shape(I, 1, 2);
  if (!rc && I->in[1]) rc = infer_want_same_dtype(I, 1, 2);
  if (!rc && a->residual && !I->in[1])
    rc = infer_error(I, "y is missing, which is needed for the residual's gradient");
  if (!rc && I->in[7]) rc = infer_want_same_shape(I, 7, 2);
  if (!rc && I->in[7]) rc = infer_want_same_dtype(I, 7, 2);
  if (!rc && I->in[7] && !a->residual)
    rc = infer_error(I, "h is given, which only residual adds to g");
  if (!rc) rc = infer_like(I, 2, (DType)x->dtype);
  DType t = (DType)(I->in[5] ? I->in[5] : x)->dtype;
  for (int k = 0; k < 2 && !rc; k++) rc = infer_shape(I, t, 1, a->params ? &x->shape[1] : none);
  return rc;
}

static int batch_norm_act_backward_sbp(SbpAsk *q) {
  const struct batch_norm_act_backward_args *a = q->args;
  return sbp_notation(
      q, a->params ? "N c ...!, N c ...!, N c ...!, c, c, c, c, N c ...! -> N c ...!, c, c"
                   : "N c ...!, N c ...!, N c ...!, c, c, c, c, N c ...! -> N c ...!, E, E");
}

/* batch_norm_backward behind a relu: of g only the elements count for which y, or without y what
 * batch_norm gave, is positive. With `residual` h is added to g
 * before, and what counts is left in g: the gradient of what was added before the relu. Made by the
 * compiler for graphs whose gradients are there already. */
OP(batch_norm_act_backward,
   .signature =
       "batch_norm_act_backward(Tensor! g, Tensor? y, Tensor x, Tensor mean, Tensor rstd, Tensor? "
       "weight, Tensor? bias, Tensor? h, bool training, bool params, bool residual) -> (Tensor x, "
       "Tensor weight, Tensor bias)",
   .flags = OP_HIDDEN | OP_NO_GRAD, .sbp_rule = batch_norm_act_backward_sbp,
   .infer = batch_norm_act_backward_infer, .cpu = batch_norm_act_backward_cpu,
   .scratch = batch_norm_act_backward_scratch)
