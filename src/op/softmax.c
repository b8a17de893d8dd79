/* softmax and log_softmax along a dim, and their gradients. A line that fits into the cache is read
 * from memory once. A NaN makes all of its line NaN by the sum, whatever the maximum was. */
#include "line_math.h"
#include "lines.h"
#include "pointwise.h"
#include "sbp_rule.h"

#define IN_BLOCKS(n, at, m) \
  for (int64_t at = 0, m; m = n - at < BLOCK ? n - at : BLOCK, at < n; at += BLOCK)

/* -- Along contiguous lines: operands y, x; or gx, g, y ---------------------------------------- */

#define SOFTMAX_LINES(C, T)                                                                \
  static void softmax_line_##C(int64_t n, const void *args, void *const *p) {              \
    T *y = p[0];                                                                           \
    const T *x = p[1], most = line_top_##C(n, x);                                          \
    double sum = 0;                                                                        \
    (void)args;                                                                            \
    IN_BLOCKS(n, at, m) {                                                                  \
      PW_IVDEP for (int64_t i = at; i < at + m; i++) y[i] = exp(x[i] - most);              \
      sum += line_sum_##C(m, y + at);                                                      \
    }                                                                                      \
    T scale = (T)(1 / sum);                                                                \
    for (int64_t i = 0; i < n; i++) y[i] *= scale;                                         \
  }                                                                                        \
  static void log_softmax_line_##C(int64_t n, const void *args, void *const *p) {          \
    T *y = p[0], e[BLOCK];                                                                 \
    const T *x = p[1], most = line_top_##C(n, x);                                          \
    double sum = 0;                                                                        \
    (void)args;                                                                            \
    IN_BLOCKS(n, at, m) {                                                                  \
      for (int64_t i = 0; i < m; i++) e[i] = exp(x[at + i] - most);                        \
      sum += line_sum_##C(m, e);                                                           \
    }                                                                                      \
    T shift = (T)log(sum);                                                                 \
    PW_IVDEP for (int64_t i = 0; i < n; i++) y[i] = x[i] - most - shift;                   \
  }                                                                                        \
  static void softmax_backward_line_##C(int64_t n, const void *args, void *const *p) {     \
    T *gx = p[0];                                                                          \
    const T *g = p[1], *y = p[2];                                                          \
    double sum = 0;                                                                        \
    (void)args;                                                                            \
    IN_BLOCKS(n, at, m) sum += line_dot_##C(m, g + at, y + at);                            \
    T s = (T)sum;                                                                          \
    PW_IVDEP for (int64_t i = 0; i < n; i++) gx[i] = (g[i] - s) * y[i];                    \
  }                                                                                        \
  static void log_softmax_backward_line_##C(int64_t n, const void *args, void *const *p) { \
    T *gx = p[0];                                                                          \
    const T *g = p[1], *y = p[2];                                                          \
    double sum = 0;                                                                        \
    (void)args;                                                                            \
    IN_BLOCKS(n, at, m) sum += line_sum_##C(m, g + at);                                    \
    T s = (T)sum;                                                                          \
    PW_IVDEP for (int64_t i = 0; i < n; i++) gx[i] = g[i] - exp(y[i]) * s;                 \
  }
SOFTMAX_LINES(f32, float)
SOFTMAX_LINES(f64, double)

/* -- Lines side by side ------------------------------------------------------------------------ */

#define PANEL_EACH(r, i) \
  for (int64_t r = 0; r < n; r++) PW_IVDEP for (int64_t i = 0; i < width; i++)

#define SOFTMAX_PANELS(C, T)                                                                    \
  static void softmax_panel_##C(int64_t n, int64_t width, const void *args, void *const *p,     \
                                const int64_t *step) {                                          \
    T *y = p[0], most[LINES_PANEL], sum[LINES_PANEL];                                           \
    const T *x = p[1];                                                                          \
    int64_t sy = step[0], sx = step[1];                                                         \
    (void)args;                                                                                 \
    for (int64_t i = 0; i < width; i++) most[i] = -INFINITY, sum[i] = 0;                        \
    PANEL_EACH(r, i) {                                                                          \
      T v = x[r * sx + i];                                                                      \
      most[i] = v > most[i] || v != v ? v : most[i];                                            \
    }                                                                                           \
    PANEL_EACH(r, i) {                                                                          \
      T e = exp(x[r * sx + i] - most[i]);                                                       \
      y[r * sy + i] = e, sum[i] += e;                                                           \
    }                                                                                           \
    for (int64_t i = 0; i < width; i++) sum[i] = 1 / sum[i];                                    \
    PANEL_EACH(r, i) y[r * sy + i] *= sum[i];                                                   \
  }                                                                                             \
  static void log_softmax_panel_##C(int64_t n, int64_t width, const void *args, void *const *p, \
                                    const int64_t *step) {                                      \
    T *y = p[0], most[LINES_PANEL], sum[LINES_PANEL];                                           \
    const T *x = p[1];                                                                          \
    int64_t sy = step[0], sx = step[1];                                                         \
    (void)args;                                                                                 \
    for (int64_t i = 0; i < width; i++) most[i] = -INFINITY, sum[i] = 0;                        \
    PANEL_EACH(r, i) {                                                                          \
      T v = x[r * sx + i];                                                                      \
      most[i] = v > most[i] || v != v ? v : most[i];                                            \
    }                                                                                           \
    PANEL_EACH(r, i) sum[i] += exp(x[r * sx + i] - most[i]);                                    \
    for (int64_t i = 0; i < width; i++) sum[i] = log(sum[i]);                                   \
    PANEL_EACH(r, i) y[r * sy + i] = x[r * sx + i] - most[i] - sum[i];                          \
  }                                                                                             \
  static void softmax_backward_panel_##C(int64_t n, int64_t width, const void *args,            \
                                         void *const *p, const int64_t *step) {                 \
    T *gx = p[0], sum[LINES_PANEL];                                                             \
    const T *g = p[1], *y = p[2];                                                               \
    int64_t s0 = step[0], s1 = step[1], s2 = step[2];                                           \
    (void)args;                                                                                 \
    for (int64_t i = 0; i < width; i++) sum[i] = 0;                                             \
    PANEL_EACH(r, i) sum[i] += g[r * s1 + i] * y[r * s2 + i];                                   \
    PANEL_EACH(r, i) gx[r * s0 + i] = (g[r * s1 + i] - sum[i]) * y[r * s2 + i];                 \
  }                                                                                             \
  static void log_softmax_backward_panel_##C(int64_t n, int64_t width, const void *args,        \
                                             void *const *p, const int64_t *step) {             \
    T *gx = p[0], sum[LINES_PANEL];                                                             \
    const T *g = p[1], *y = p[2];                                                               \
    int64_t s0 = step[0], s1 = step[1], s2 = step[2];                                           \
    (void)args;                                                                                 \
    for (int64_t i = 0; i < width; i++) sum[i] = 0;                                             \
    PANEL_EACH(r, i) sum[i] += g[r * s1 + i];                                                   \
    PANEL_EACH(r, i) gx[r * s0 + i] = g[r * s1 + i] - exp(y[r * s2 + i]) * sum[i];              \
  }
SOFTMAX_PANELS(f32, float)
SOFTMAX_PANELS(f64, double)

/* -- Records ----------------------------------------------------------------------------------- */

/* The launch of one of the four; `dim` is that of its arguments. */
#define SOFTMAX_OP(name)                                                                        \
  static void name##_init(Lines *l, const OpCall *c) {                                          \
    int dim = (int)((const struct name##_args *)c->args)->dim, is_0d = c->out[0].ndim == 0;     \
    PointwiseClass cls = block_class((DType)c->out[0].dtype);                                   \
    lines_init(l, cls, 0, dim, is_0d ? dim : dim + 1, 1, c->out, c->n_in, c->in);               \
    lines_use_panels(l, cls == PW_F32 ? name##_panel_f32 : name##_panel_f64);                   \
  }                                                                                             \
  static size_t name##_scratch(const OpCall *c) {                                               \
    Lines l;                                                                                    \
    name##_init(&l, c);                                                                         \
    return lines_scratch(&l);                                                                   \
  }                                                                                             \
  static int name##_cpu(const OpCall *c) {                                                      \
    Lines l;                                                                                    \
    name##_init(&l, c);                                                                         \
    lines_run(&l, l.cls[0] == PW_F32 ? name##_line_f32 : name##_line_f64, c->args, c->scratch); \
    return 0;                                                                                   \
  }                                                                                             \
  static int name##_infer(Infer *I) {                                                           \
    struct name##_args *a = I->args;                                                            \
    int rc = infer_want_float(I, 0);                                                            \
    if (!rc && I->n_in > 1) rc = infer_want_float(I, 1);                                        \
    if (!rc && I->n_in > 1) rc = infer_want_same_shape(I, 1, 0);                                \
    if (!rc) rc = infer_dim(I, "dim", &a->dim, I->in[0]->ndim);                                 \
    return rc ? rc : infer_same(I);                                                             \
  }
SOFTMAX_OP(softmax)
SOFTMAX_OP(log_softmax)
SOFTMAX_OP(softmax_backward)
SOFTMAX_OP(log_softmax_backward)

/* exp(x - max) / sum of the same along dim. */
OP(softmax, .signature = "softmax(Tensor x, dim dim=-1) -> Tensor", .sbp_rule = sbp_all_but_dim,
   .infer = softmax_infer, .cpu = softmax_cpu, .scratch = softmax_scratch)
/* The logarithm of softmax, without its rounding. */
OP(log_softmax, .signature = "log_softmax(Tensor x, dim dim=-1) -> Tensor",
   .sbp_rule = sbp_all_but_dim, .infer = log_softmax_infer, .cpu = log_softmax_cpu,
   .scratch = log_softmax_scratch)
/* The gradient of softmax from its output y: (g - sum(g y)) y. */
OP(softmax_backward, .signature = "softmax_backward(Tensor g, Tensor y, dim dim) -> Tensor",
   .flags = OP_HIDDEN, .sbp_rule = sbp_all_but_dim, .linear = "g", .infer = softmax_backward_infer,
   .cpu = softmax_backward_cpu, .scratch = softmax_backward_scratch)
/* The gradient of log_softmax from its output y: g - exp(y) sum(g). */
OP(log_softmax_backward, .signature = "log_softmax_backward(Tensor g, Tensor y, dim dim) -> Tensor",
   .flags = OP_HIDDEN, .sbp_rule = sbp_all_but_dim, .linear = "g",
   .infer = log_softmax_backward_infer, .cpu = log_softmax_backward_cpu,
   .scratch = log_softmax_backward_scratch)
