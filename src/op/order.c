/* Order along a dim: the largest and smallest with their places, sort, topk; and running sums and
 * products.
 *
 * NaN counts as larger than every number, so that it comes last in ascending order and is what max
 * finds. Equal values keep their order: a pair (value, index) is compared as a whole, which makes
 * every sort stable. */
#include "lanes.h"
#include "lines.h"
#include "op_args.h"
#include "sbp_rule.h"
#include "sort.h"

/* Views of an output with the reduced dim put back as size 1. */
typedef struct Kept {
  View view;
  int64_t shape[MF_MAX_DIMS], stride[MF_MAX_DIMS];
} Kept;

static void keep_dim(Kept *k, const View *y, int ndim, int dim) {
  k->view = *y;
  if (y->ndim == ndim) return;
  for (int d = 0, at = 0; d < ndim; d++) {
    k->shape[d] = d == dim ? 1 : y->shape[at];
    k->stride[d] = d == dim ? 1 : y->stride[at];
    at += d != dim;
  }
  k->view.shape = k->shape;
  k->view.stride = k->stride;
  k->view.ndim = (int8_t)ndim;
}

/* The next output: x without `dim`, or with size 1 there. */
static int infer_reduced(Infer *I, DType dtype, int64_t dim, bool keepdim) {
  const Meta *x = I->in[0];
  int64_t shape[MF_MAX_DIMS];
  int n = 0;
  for (int d = 0; d < x->ndim; d++) {
    if (d != dim) shape[n++] = x->shape[d];
    else if (keepdim) shape[n++] = 1;
  }
  return infer_shape(I, dtype, n, shape);
}

static int check_not_empty(Infer *I, int64_t dim) {
  const Meta *x = I->in[0];
  char shape[SHAPE_TEXT_MAX];
  if (x->ndim == 0 || x->shape[dim] > 0) return 0;
  return infer_error(I, "dim %lld of shape %s has no element to choose", (long long)dim,
                     shape_text(x->ndim, x->shape, shape));
}

enum { RUN = 16 /* elements looked at together */ };

/* -- Lines ------------------------------------------------------------------------------------- */

#define ABOVE_f(a, b) ((a) > (b) || ((a) != (a) && (b) == (b)))
#define ABOVE_i(a, b) ((a) > (b))

/* Whether pair (a, i) stands behind (b, j), in ascending or descending order. */
#define BEHIND(ABOVE, down, a, i, b, j) \
  (down ? ABOVE(b, a) || (!ABOVE(a, b) && (i) > (j)) : ABOVE(a, b) || (!ABOVE(b, a) && (i) > (j)))

/* value[i] and at[i] of each column; the first of equals, a NaN before everything. */
#define PANEL_CHOOSE(value, at, better)                           \
  const __typeof__(value[0]) *x = p[2];                           \
  for (int64_t i = 0; i < width; i++) value[i] = x[i], at[i] = 0; \
  for (int64_t r = 1; r < n; r++)                                 \
    for (int64_t i = 0; i < width; i++) {                         \
      __typeof__(value[0]) v = x[r * step[2] + i];                \
      bool take = (better) | ((v != v) & (value[i] == value[i])); \
      value[i] = take ? v : value[i];                             \
      at[i] = take ? (__typeof__(at[0]))r : at[i];                \
    }                                                             \
  for (int64_t i = 0; i < width; i++) {                           \
    ((__typeof__(value[0]) *)p[0])[i] = value[i];                 \
    ((int64_t *)p[1])[i] = at[i];                                 \
  }

#define ORDER_X(V, i) LANES_AT(V, x, i)
#define ORDER_LINES(C, T, INDEX, ABOVE)                                                      \
  /* The first place of v in x, or of a NaN where v is one. */                               \
  static int64_t first_##C(int64_t n, const T *x, T v) {                                     \
    int64_t at = 0;                                                                          \
    for (int found = 0; at + RUN <= n; at += RUN) {                                          \
      for (int l = 0; l < RUN; l++)                                                          \
        found |= (x[at + l] == v) | ((v != v) & (x[at + l] != x[at + l]));                   \
      if (found) break;                                                                      \
    }                                                                                        \
    while (x[at] != v && (v == v || x[at] == x[at])) at++;                                   \
    return at;                                                                               \
  }                                                                                          \
  /* p: value, index, x */                                                                   \
  static void largest_##C(int64_t n, const void *args, void *const *p) {                     \
    const T *x = p[2];                                                                       \
    T most;                                                                                  \
    (void)args;                                                                              \
    LANES_FOLD(C, T, n, x[0], ORDER_X, LANES_MAX, most);                                     \
    *(int64_t *)p[1] = first_##C(n, x, most);                                                \
    *(T *)p[0] = x[*(int64_t *)p[1]];                                                        \
  }                                                                                          \
  static void smallest_##C(int64_t n, const void *args, void *const *p) {                    \
    const T *x = p[2];                                                                       \
    T least;                                                                                 \
    (void)args;                                                                              \
    LANES_FOLD(C, T, n, x[0], ORDER_X, LANES_MIN, least);                                    \
    *(int64_t *)p[1] = first_##C(n, x, least);                                               \
    *(T *)p[0] = x[*(int64_t *)p[1]];                                                        \
  }                                                                                          \
  /* The same of lines side by side; places are counted in INDEX, of T's size. */            \
  static void largest_panel_##C(int64_t n, int64_t width, const void *args, void *const *p,  \
                                const int64_t *step) {                                       \
    T most[LINES_PANEL];                                                                     \
    INDEX at[LINES_PANEL];                                                                   \
    (void)args;                                                                              \
    PANEL_CHOOSE(most, at, v > most[i])                                                      \
  }                                                                                          \
  static void smallest_panel_##C(int64_t n, int64_t width, const void *args, void *const *p, \
                                 const int64_t *step) {                                      \
    T least[LINES_PANEL];                                                                    \
    INDEX at[LINES_PANEL];                                                                   \
    (void)args;                                                                              \
    PANEL_CHOOSE(least, at, v < least[i])                                                    \
  }                                                                                          \
  /* A heap whose root stands last in the wanted order. */                                   \
  static void sink_##C(T *v, int64_t *id, int64_t i, int64_t n, bool down) {                 \
    T value = v[i];                                                                          \
    int64_t index = id[i];                                                                   \
    for (int64_t c; (c = 2 * i + 1) < n; i = c) {                                            \
      if (c + 1 < n && BEHIND(ABOVE, down, v[c + 1], id[c + 1], v[c], id[c])) c++;           \
      if (!BEHIND(ABOVE, down, v[c], id[c], value, index)) break;                            \
      v[i] = v[c], id[i] = id[c];                                                            \
    }                                                                                        \
    v[i] = value, id[i] = index;                                                             \
  }                                                                                          \
  static void heap_sort_##C(T *v, int64_t *id, int64_t n, bool down) {                       \
    for (int64_t last = n - 1; last > 0; last--) {                                           \
      T value = v[0];                                                                        \
      int64_t index = id[0];                                                                 \
      v[0] = v[last], id[0] = id[last];                                                      \
      v[last] = value, id[last] = index;                                                     \
      sink_##C(v, id, 0, last, down);                                                        \
    }                                                                                        \
  }                                                                                          \
  /* Whether one of RUN elements stands before v. */                                         \
  static inline int better_##C(const T *x, T v, bool down) {                                 \
    int found = 0;                                                                           \
    if (down)                                                                                \
      for (int l = 0; l < RUN; l++) found |= ABOVE(x[l], v);                                 \
    else                                                                                     \
      for (int l = 0; l < RUN; l++) found |= ABOVE(v, x[l]);                                 \
    return found;                                                                            \
  }                                                                                          \
  /* The first k in order: a heap of the best k so far, whose root is the worst of them. */  \
  static void best_##C(int64_t n, const struct topk_args *a, void *const *p) {               \
    const T *x = p[2];                                                                       \
    T *v = p[0];                                                                             \
    int64_t *id = p[1], k = a->k;                                                            \
    bool down = a->largest;                                                                  \
    if (k == 0) return;                                                                      \
    for (int64_t i = 0; i < k; i++) v[i] = x[i], id[i] = i;                                  \
    for (int64_t i = k / 2 - 1; i >= 0; i--) sink_##C(v, id, i, k, down);                    \
    for (int64_t at = k; at < n; at += RUN) {                                                \
      int64_t end = at + RUN < n ? at + RUN : n;                                             \
      if (end == at + RUN && !better_##C(x + at, v[0], down)) continue;                      \
      for (int64_t i = at; i < end; i++) {                                                   \
        if (!BEHIND(ABOVE, down, v[0], id[0], x[i], i)) continue;                            \
        v[0] = x[i], id[0] = i;                                                              \
        sink_##C(v, id, 0, k, down);                                                         \
      }                                                                                      \
    }                                                                                        \
    heap_sort_##C(v, id, k, down);                                                           \
  }
ORDER_LINES(f32, float, int32_t, ABOVE_f)
ORDER_LINES(f64, double, int64_t, ABOVE_f)
ORDER_LINES(i64, int64_t, int64_t, ABOVE_i)

/* Whether so many of n are found sooner by sorting all. */
static bool topk_sorts(int64_t n, int64_t k) {
  return k > 64 && k > n / 64;
}

/* Unsigned keys in the order of the values: NaN last, -0 as 0. */
static inline uint64_t sort_key_f32(float v) {
  union {
    float f;
    uint32_t u;
  } b = {.f = v + 0.0f};
  return v != v ? UINT32_MAX : b.u ^ (b.u >> 31 ? UINT32_MAX : UINT32_C(1) << 31);
}
static inline uint64_t sort_key_f64(double v) {
  union {
    double f;
    uint64_t u;
  } b = {.f = v + 0.0};
  return v != v ? UINT64_MAX : b.u ^ (b.u >> 63 ? UINT64_MAX : UINT64_C(1) << 63);
}
static inline uint64_t sort_key_i64(int64_t v) {
  return (uint64_t)v ^ UINT64_C(1) << 63;
}

/* The first `count` of x in order: p[0] values, p[1] places; p[2] x; p[3] room for 2 n pairs. */
#define SORT_LINES(C, T, BITS)                                                       \
  static void sort_all_##C(int64_t n, int64_t count, bool down, void *const *p) {    \
    T *v = p[0];                                                                     \
    int64_t *id = p[1];                                                              \
    const T *x = p[2];                                                               \
    SortPair *a = p[3];                                                              \
    uint64_t flip = down ? UINT64_MAX >> (64 - BITS) : 0;                            \
    for (int64_t i = 0; i < n; i++) a[i] = (SortPair){sort_key_##C(x[i]) ^ flip, i}; \
    a = sort_pairs(n, BITS, a, a + n);                                               \
    for (int64_t i = 0; i < count; i++) v[i] = x[id[i] = a[i].place];                \
  }                                                                                  \
  static void sort_##C(int64_t n, const void *args, void *const *p) {                \
    sort_all_##C(n, n, ((const struct sort_args *)args)->descending, p);             \
  }                                                                                  \
  static void topk_##C(int64_t n, const void *args, void *const *p) {                \
    const struct topk_args *a = args;                                                \
    if (topk_sorts(n, a->k)) sort_all_##C(n, a->k, a->largest, p);                   \
    else best_##C(n, a, p);                                                          \
  }
SORT_LINES(f32, float, 32)
SORT_LINES(f64, double, 64)
SORT_LINES(i64, int64_t, 64)

/* Running sums and products; float32 in double, as PyTorch accumulates. */
#define SCAN_PANEL(name, C, T, A, start, JOIN)                                             \
  static void name##_panel_##C(int64_t n, int64_t width, const void *args, void *const *p, \
                               const int64_t *step) {                                      \
    A so_far[LINES_PANEL];                                                                 \
    (void)args;                                                                            \
    for (int64_t i = 0; i < width; i++) so_far[i] = start;                                 \
    for (int64_t r = 0; r < n; r++) {                                                      \
      T *y = (T *)p[0] + r * step[0];                                                      \
      const T *x = (const T *)p[1] + r * step[1];                                          \
      for (int64_t i = 0; i < width; i++) y[i] = (T)(so_far[i] = so_far[i] JOIN(A) x[i]);  \
    }                                                                                      \
  }
#define SCAN_LINES(C, T, A)                                              \
  static void cumsum_##C(int64_t n, const void *args, void *const *p) {  \
    T *y = p[0];                                                         \
    const T *x = p[1];                                                   \
    A sum = 0;                                                           \
    (void)args;                                                          \
    for (int64_t i = 0; i < n; i++) y[i] = (T)(sum += (A)x[i]);          \
  }                                                                      \
  static void cumprod_##C(int64_t n, const void *args, void *const *p) { \
    T *y = p[0];                                                         \
    const T *x = p[1];                                                   \
    A product = 1;                                                       \
    (void)args;                                                          \
    for (int64_t i = 0; i < n; i++) y[i] = (T)(product *= (A)x[i]);      \
  }                                                                      \
  SCAN_PANEL(cumsum, C, T, A, 0, +)                                      \
  SCAN_PANEL(cumprod, C, T, A, 1, *)
SCAN_LINES(f32, float, double)
SCAN_LINES(f64, double, double)
SCAN_LINES(i64, int64_t, uint64_t)

/* dx[k] = product(x[0..k-1]) S[k] with S[k] = g[k] + x[k+1] S[k+1]: no division, so zeros do no
 * harm. p: dx, g, x. */
#define CUMPROD_BACKWARD(C, T)                                                    \
  static void cumprod_backward_##C(int64_t n, const void *args, void *const *p) { \
    T *dx = p[0];                                                                 \
    const T *g = p[1], *x = p[2];                                                 \
    double s = 0, before = 1;                                                     \
    (void)args;                                                                   \
    for (int64_t k = n - 1; k >= 0; k--) {                                        \
      s = (double)g[k] + (k + 1 < n ? (double)x[k + 1] * s : 0);                  \
      dx[k] = (T)s;                                                               \
    }                                                                             \
    for (int64_t k = 0; k < n; k++) {                                             \
      dx[k] = (T)((double)dx[k] * before);                                        \
      before *= (double)x[k];                                                     \
    }                                                                             \
  }
CUMPROD_BACKWARD(f32, float)
CUMPROD_BACKWARD(f64, double)

/* -- Launch ------------------------------------------------------------------------------------ */

#define BY_CLASS(cls, name) \
  ((cls) == PW_F32 ? name##_f32 : (cls) == PW_F64 ? name##_f64 : name##_i64)

/* Lines along `dim` of two outputs (values, int64 indices) and x; the outputs may lack the dim.
 * `sorts`: with room for sorting. */
static void pair_init(Lines *l, const OpCall *c, int dim, bool sorts, Kept kept[2], View out[2]) {
  const View *x = &c->in[0];
  for (int k = 0; k < 2; k++) {
    keep_dim(&kept[k], &c->out[k], x->ndim, dim);
    out[k] = kept[k].view;
  }
  lines_init(l, block_class((DType)x->dtype), 2, dim, x->ndim ? dim + 1 : dim, 2, out, 1, c->in);
  if (sorts) lines_want(l, sizeof(SortPair) * 2 * (size_t)l->length[2]);
}

static size_t pair_scratch(const OpCall *c, int64_t dim, bool sorts) {
  Lines l;
  Kept kept[2];
  View out[2];
  pair_init(&l, c, (int)dim, sorts, kept, out);
  return lines_scratch(&l);
}

static int pair_run(const OpCall *c, int64_t dim, bool sorts, LineFn *f32, LineFn *f64,
                    LineFn *i64) {
  Lines l;
  Kept kept[2];
  View out[2];
  pair_init(&l, c, (int)dim, sorts, kept, out);
  lines_run(&l, l.cls[0] == PW_F32 ? f32 : l.cls[0] == PW_F64 ? f64 : i64, c->args, c->scratch);
  return 0;
}

#define CHOOSE_OP(name, rule)                                                              \
  static int name##_infer(Infer *I) {                                                      \
    struct name##_args *a = I->args;                                                       \
    int rc = infer_dim(I, "dim", &a->dim, I->in[0]->ndim);                                 \
    if (!rc) rc = check_not_empty(I, a->dim);                                              \
    if (!rc) rc = infer_reduced(I, (DType)I->in[0]->dtype, a->dim, a->keepdim);            \
    return rc ? rc : infer_reduced(I, I64, a->dim, a->keepdim);                            \
  }                                                                                        \
  static void name##_init(Lines *l, const OpCall *c, Kept kept[2], View out[2]) {          \
    pair_init(l, c, (int)((const struct name##_args *)c->args)->dim, false, kept, out);    \
    if (l->length[2] <= INT32_MAX) lines_use_panels(l, BY_CLASS(l->cls[0], rule##_panel)); \
  }                                                                                        \
  static size_t name##_scratch(const OpCall *c) {                                          \
    Lines l;                                                                               \
    Kept kept[2];                                                                          \
    View out[2];                                                                           \
    name##_init(&l, c, kept, out);                                                         \
    return lines_scratch(&l);                                                              \
  }                                                                                        \
  static int name##_cpu(const OpCall *c) {                                                 \
    Lines l;                                                                               \
    Kept kept[2];                                                                          \
    View out[2];                                                                           \
    name##_init(&l, c, kept, out);                                                         \
    lines_run(&l, BY_CLASS(l.cls[0], rule), c->args, c->scratch);                          \
    return 0;                                                                              \
  }
CHOOSE_OP(max_dim, largest)
CHOOSE_OP(min_dim, smallest)

/* The largest element along dim and where it stands (the first of equals). */
OP(max_dim,
   .signature = "max_dim(Tensor x, dim dim, bool keepdim=False) -> (Tensor values, Tensor indices)",
   .flags = OP_HIDDEN, .sbp_rule = sbp_reduce, .infer = max_dim_infer, .cpu = max_dim_cpu,
   .scratch = max_dim_scratch)
/* The smallest element along dim and where it stands (the first of equals). */
OP(min_dim,
   .signature = "min_dim(Tensor x, dim dim, bool keepdim=False) -> (Tensor values, Tensor indices)",
   .flags = OP_HIDDEN, .sbp_rule = sbp_reduce, .infer = min_dim_infer, .cpu = min_dim_cpu,
   .scratch = min_dim_scratch)

static int sort_infer(Infer *I) {
  struct sort_args *a = I->args;
  int rc = infer_dim(I, "dim", &a->dim, I->in[0]->ndim);
  if (!rc) rc = infer_shape(I, (DType)I->in[0]->dtype, I->in[0]->ndim, I->in[0]->shape);
  return rc ? rc : infer_shape(I, I64, I->in[0]->ndim, I->in[0]->shape);
}
static size_t sort_scratch(const OpCall *c) {
  return pair_scratch(c, ((const struct sort_args *)c->args)->dim, true);
}
static int sort_cpu(const OpCall *c) {
  return pair_run(c, ((const struct sort_args *)c->args)->dim, true, sort_f32, sort_f64, sort_i64);
}
/* The elements along dim in order, and where each stood; equal ones keep their order. */
OP(sort,
   .signature =
       "sort(Tensor x, dim dim=-1, bool descending=False, *, bool stable=True) -> (Tensor values, "
       "Tensor indices)",
   .sbp_rule = sbp_all_but_dim, .infer = sort_infer, .cpu = sort_cpu, .scratch = sort_scratch)

static int topk_infer(Infer *I) {
  struct topk_args *a = I->args;
  const Meta *x = I->in[0];
  int64_t shape[MF_MAX_DIMS];
  int rc = infer_dim(I, "dim", &a->dim, x->ndim);
  if (rc) return rc;
  memcpy(shape, x->shape, sizeof(int64_t) * (size_t)x->ndim);
  int64_t n = x->ndim ? shape[a->dim] : 1;
  if (a->k < 0 || a->k > n)
    return infer_error(I, "k is %lld, dim %lld has %lld elements", (long long)a->k,
                       (long long)a->dim, (long long)n);
  if (x->ndim == 0 && a->k == 0) return infer_error(I, "k must be 1 for a 0-d tensor");
  if (x->ndim) shape[a->dim] = a->k;
  if ((rc = infer_shape(I, (DType)x->dtype, x->ndim, shape))) return rc;
  return infer_shape(I, I64, x->ndim, shape);
}
static int64_t line_length(const OpCall *c, int64_t dim) {
  return c->in[0].ndim ? c->in[0].shape[dim] : 1;
}
static size_t topk_scratch(const OpCall *c) {
  const struct topk_args *a = c->args;
  return pair_scratch(c, a->dim, topk_sorts(line_length(c, a->dim), a->k));
}
static int topk_cpu(const OpCall *c) {
  const struct topk_args *a = c->args;
  return pair_run(c, a->dim, topk_sorts(line_length(c, a->dim), a->k), topk_f32, topk_f64,
                  topk_i64);
}
/* The k largest (or smallest) along dim in order, and where they stand. */
OP(topk,
   .signature =
       "topk(Tensor x, int k, dim dim=-1, bool largest=True, bool sorted=True) -> (Tensor values, "
       "Tensor indices)",
   .sbp_rule = sbp_all_but_dim, .infer = topk_infer, .cpu = topk_cpu, .scratch = topk_scratch)

/* Whole numbers add up in int64. */
#define SCAN_OP(name)                                                                             \
  static int name##_infer(Infer *I) {                                                             \
    struct name##_args *a = I->args;                                                              \
    const Meta *x = I->in[0];                                                                     \
    int rc = infer_dim(I, "dim", &a->dim, x->ndim);                                               \
    DType t = a->dtype != DTYPE_NONE            ? (DType)a->dtype                                 \
              : dtype_is_float((DType)x->dtype) ? (DType)x->dtype                                 \
                                                : I64;                                            \
    return rc ? rc : infer_like(I, 0, t);                                                         \
  }                                                                                               \
  static void name##_init(Lines *l, const OpCall *c) {                                            \
    int dim = (int)((const struct name##_args *)c->args)->dim;                                    \
    lines_init(l, block_class((DType)c->out[0].dtype), 0, dim, c->out[0].ndim ? dim + 1 : dim, 1, \
               c->out, 1, c->in);                                                                 \
    lines_use_panels(l, BY_CLASS(l->cls[0], name##_panel));                                       \
  }                                                                                               \
  static size_t name##_scratch(const OpCall *c) {                                                 \
    Lines l;                                                                                      \
    name##_init(&l, c);                                                                           \
    return lines_scratch(&l);                                                                     \
  }                                                                                               \
  static int name##_cpu(const OpCall *c) {                                                        \
    Lines l;                                                                                      \
    name##_init(&l, c);                                                                           \
    lines_run(&l, BY_CLASS(l.cls[0], name), c->args, c->scratch);                                 \
    return 0;                                                                                     \
  }
SCAN_OP(cumsum)
SCAN_OP(cumprod)

/* Running sums along dim. */
OP(cumsum, .signature = "cumsum(Tensor x, dim dim, *, dtype? dtype=None) -> Tensor",
   .sbp_rule = sbp_all_but_dim, .linear = "x", .infer = cumsum_infer, .cpu = cumsum_cpu,
   .scratch = cumsum_scratch)
/* Running products along dim. */
OP(cumprod, .signature = "cumprod(Tensor x, dim dim, *, dtype? dtype=None) -> Tensor",
   .sbp_rule = sbp_all_but_dim, .infer = cumprod_infer, .cpu = cumprod_cpu,
   .scratch = cumprod_scratch)

static int cumprod_backward_infer(Infer *I) {
  struct cumprod_backward_args *a = I->args;
  int rc = infer_want_float(I, 1);
  if (!rc) rc = infer_want_float(I, 0);
  if (!rc) rc = infer_want_same_shape(I, 0, 1);
  if (!rc) rc = infer_dim(I, "dim", &a->dim, I->in[1]->ndim);
  return rc ? rc : infer_like(I, 1, (DType)I->in[1]->dtype);
}
static void cumprod_backward_init(Lines *l, const OpCall *c) {
  int dim = (int)((const struct cumprod_backward_args *)c->args)->dim;
  lines_init(l, block_class((DType)c->out[0].dtype), 0, dim, c->out[0].ndim ? dim + 1 : dim, 1,
             c->out, 2, c->in);
}
static size_t cumprod_backward_scratch(const OpCall *c) {
  Lines l;
  cumprod_backward_init(&l, c);
  return lines_scratch(&l);
}
static int cumprod_backward_cpu(const OpCall *c) {
  Lines l;
  cumprod_backward_init(&l, c);
  lines_run(&l, l.cls[0] == PW_F32 ? cumprod_backward_f32 : cumprod_backward_f64, c->args,
            c->scratch);
  return 0;
}
/* The gradient of cumprod, right where x has zeros. */
OP(cumprod_backward, .signature = "cumprod_backward(Tensor g, Tensor x, dim dim) -> Tensor",
   .flags = OP_HIDDEN, .sbp_rule = sbp_all_but_dim, .linear = "g", .infer = cumprod_backward_infer,
   .cpu = cumprod_backward_cpu, .scratch = cumprod_backward_scratch)
