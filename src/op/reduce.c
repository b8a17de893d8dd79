/* Reductions over dims to one value: sums, products, extremes, norms, moments, log of sums of
 * exponentials; see fold.h for how elements are walked. Results are PyTorch's: whole numbers are
 * summed as int64, NaN is larger and smaller than everything, an empty list of dims means all. */
#include "fold.h"
#include "moments.h"
#include "pointwise.h"
#include "sbp_rule.h"

/* -- Shapes ------------------------------------------------------------------------------------ */

static uint32_t dims_mask(const IntList *dims) {
  uint32_t mask = 0;
  for (int i = 0; i < dims->n; i++) mask |= 1u << dims->v[i];
  return mask;
}

/* The output of reducing input 0: of `dtype`, without the dims or with size 1 there. */
static int reduced_infer(Infer *I, IntList *dims, bool keepdim, DType dtype) {
  const Meta *x = I->in[0];
  int rc = infer_dims(I, "dim", dims, x->ndim, true), ndim = 0;
  if (rc) return rc;
  uint32_t mask = dims_mask(dims);
  int64_t shape[MF_MAX_DIMS];
  for (int d = 0; d < x->ndim; d++) {
    if (!(mask >> d & 1)) shape[ndim++] = x->shape[d];
    else if (keepdim) shape[ndim++] = 1;
  }
  return infer_shape(I, dtype, ndim, shape);
}

/* Refuses to reduce nothing where there is no neutral element. */
static int want_elements(Infer *I, const IntList *dims) {
  char shape[SHAPE_TEXT_MAX];
  const Meta *x = I->in[0];
  for (int i = 0; i < dims->n; i++)
    if (x->shape[dims->v[i]] == 0)
      return infer_error(I,
                         "x of shape %s has no elements along dim %lld; there must be at least one",
                         shape_text(x->ndim, x->shape, shape), (long long)dims->v[i]);
  return 0;
}

static size_t reduce_scratch(const OpCall *c) {
  FoldJob j;
  Folding f;
  c->op->spec[OP_ISA]->folding(c->args, &f);
  fold_init_views(&j, &f, &c->in[0], &c->out[0]);
  return fold_scratch(&j);
}

static int reduce_cpu(const OpCall *c) {
  FoldJob j;
  Folding f;
  c->op->spec[OP_ISA]->folding(c->args, &f);
  fold_init_views(&j, &f, &c->in[0], &c->out[0]);
  fold_execute(&j, c->args, &c->in[0], &c->out[0], c->scratch);
  return 0;
}

/* -- Folds by one expression ------------------------------------------------------------------- */

/* Joins: a is what there is, b the next. */
#define JOIN_SUM(a, b) LANES_ADD(a, b)
#define JOIN_SUM_INT(a, b) ((int64_t)((uint64_t)(a) + (uint64_t)(b)))
#define JOIN_PROD(a, b) ((a) * (b))
#define JOIN_PROD_INT(a, b) ((int64_t)((uint64_t)(a) * (uint64_t)(b)))
#define JOIN_MAX(a, b) LANES_MAX(a, b)
#define JOIN_MIN(a, b) LANES_MIN(a, b)

/* How a row is folded: elements e of type T become MAP(e) and are joined in type G, groups of them
 * in A; with the vectors of lanes.h, or by loops over arrays of lanes where MAP is more than
 * arithmetic, or G is not T. */
#define FOLD_ROW_LANES(name, C, T, A, field, zero, ELEMENT, JOIN)                       \
  static void name##_row_##C(int64_t n, const void *x_, const void *args, int64_t done, \
                             Word *acc) {                                               \
    const T *x = x_;                                                                    \
    T total;                                                                            \
    (void)done, (void)args;                                                             \
    LANES_FOLD(C, T, n, zero, ELEMENT, JOIN, total);                                    \
    acc->field = JOIN(acc->field, (A)total);                                            \
  }
#define FOLD_ROW_ARRAY(name, C, T, G, A, field, zero, MAP, JOIN)                        \
  static void name##_row_##C(int64_t n, const void *x_, const void *args, int64_t done, \
                             Word *acc) {                                               \
    enum { WIDE = FOLD_LANE_BYTES / sizeof(G) };                                        \
    const T *x = x_;                                                                    \
    A total = acc->field;                                                               \
    int64_t i = 0;                                                                      \
    (void)done, (void)args;                                                             \
    if (n >= WIDE) {                                                                    \
      G lane[WIDE];                                                                     \
      for (int l = 0; l < WIDE; l++) lane[l] = (G)(zero);                               \
      for (; i + WIDE <= n; i += WIDE)                                                  \
        for (int l = 0; l < WIDE; l++) {                                                \
          G e = (G)MAP(x[i + l]);                                                       \
          lane[l] = JOIN(lane[l], e);                                                   \
        }                                                                               \
      for (int half = WIDE / 2; half >= 8; half /= 2)                                   \
        for (int l = 0; l < half; l++) lane[l] = JOIN(lane[l], lane[l + half]);         \
      for (int l = 0; l < 8; l++) total = JOIN(total, (A)lane[l]);                      \
    }                                                                                   \
    for (; i < n; i++) {                                                                \
      A e = (A)MAP(x[i]);                                                               \
      total = JOIN(total, e);                                                           \
    }                                                                                   \
    acc->field = total;                                                                 \
  }
/* The same by columns. */
#define FOLD_ONE(name, C, T, G, A, field, zero, MAP, JOIN)                                       \
  static inline void name##_tile_##C(int64_t rows, int64_t n, const T *restrict x, int64_t step, \
                                     const void *args, Word *acc) {                              \
    G lane[FOLD_LANE_BYTES / sizeof(G)];                                                         \
    (void)args;                                                                                  \
    for (int64_t l = 0; l < n; l++) lane[l] = (G)(zero);                                         \
    for (int64_t r = 0; r < rows; r++)                                                           \
      for (int64_t l = 0; l < n; l++) {                                                          \
        G e = (G)MAP(x[r * step + l]);                                                           \
        lane[l] = JOIN(lane[l], e);                                                              \
      }                                                                                          \
    for (int64_t l = 0; l < n; l++) acc[l].field = JOIN(acc[l].field, (A)lane[l]);               \
  }                                                                                              \
  static void name##_columns_##C(int64_t rows, int64_t n, const void *x_, int64_t step,          \
                                 const void *args, int64_t done, Word *acc, int64_t plane) {     \
    enum { WIDE = FOLD_LANE_BYTES / sizeof(G) };                                                 \
    (void)done, (void)plane;                                                                     \
    for (int64_t r = 0; r < rows; r += FOLD_TALL) {                                              \
      const T *x = (const T *)x_ + r * step;                                                     \
      int64_t m = rows - r < FOLD_TALL ? rows - r : FOLD_TALL, i = 0;                            \
      for (; i + WIDE <= n; i += WIDE) name##_tile_##C(m, WIDE, x + i, step, args, acc + i);     \
      if (i < n) name##_tile_##C(m, n - i, x + i, step, args, acc + i);                          \
    }                                                                                            \
  }                                                                                              \
  static void name##_join_##C(int64_t n, Word *to, int64_t to_count, const Word *from,           \
                              int64_t from_count, int64_t plane) {                               \
    (void)to_count, (void)from_count, (void)plane;                                               \
    for (int64_t i = 0; i < n; i++) to[i].field = JOIN(to[i].field, from[i].field);              \
  }
/* Of floats: rows by arrays or by vectors; and of whole numbers. */
#define FOLD_FLOATS(name, G, zero, MAP, JOIN)                           \
  FOLD_ROW_ARRAY(name, f32, float, G, double, f, zero, MAP, JOIN)       \
  FOLD_ROW_ARRAY(name, f64, double, double, double, f, zero, MAP, JOIN) \
  FOLD_ONE(name, f32, float, G, double, f, zero, MAP, JOIN)             \
  FOLD_ONE(name, f64, double, double, double, f, zero, MAP, JOIN)
#define FOLD_FLOATS_LANES(name, zero, MAP, JOIN)                        \
  FOLD_ROW_LANES(name, f32, float, double, f, zero, MAP##_LANES, JOIN)  \
  FOLD_ROW_LANES(name, f64, double, double, f, zero, MAP##_LANES, JOIN) \
  FOLD_ONE(name, f32, float, float, double, f, zero, MAP, JOIN)         \
  FOLD_ONE(name, f64, double, double, double, f, zero, MAP, JOIN)
#define FOLD_INTS(name, zero, MAP, JOIN)                                   \
  FOLD_ROW_ARRAY(name, i64, int64_t, int64_t, int64_t, i, zero, MAP, JOIN) \
  FOLD_ONE(name, i64, int64_t, int64_t, int64_t, i, zero, MAP, JOIN)
#define FOLD_TABLES(name)                                                  \
  .row = {name##_row_f32, name##_row_f64, name##_row_i64},                 \
  .columns = {name##_columns_f32, name##_columns_f64, name##_columns_i64}, \
  .join = {name##_join_f32, name##_join_f64, name##_join_i64}
#define FOLD_TABLES_FLOAT(name)                                                                 \
  .row = {name##_row_f32, name##_row_f64}, .columns = {name##_columns_f32, name##_columns_f64}, \
  .join = {name##_join_f32, name##_join_f64}

#define MAP_SELF(e) (e)
#define MAP_SELF_LANES(V, i) LANES_AT(V, x, i)
#define MAP_TRUE(e) ((e) != 0)

/* A reduction with the arguments dim and keepdim, in folds of `fold`. */
#define REDUCTION(name, how, input)                                                         \
  static void name##_folding(const void *args, Folding *f) {                                \
    const struct name##_args *a = args;                                                     \
    *f = (Folding){.fold = how, .dims = &a->dim, .keepdim = a->keepdim, .of_input = input}; \
  }
#define FOLDED(name) .cpu = reduce_cpu, .scratch = reduce_scratch, .folding = name##_folding

/* -- sum, mean, prod --------------------------------------------------------------------------- */

FOLD_FLOATS_LANES(sum, 0, MAP_SELF, LANES_ADD)
FOLD_INTS(sum, 0, MAP_SELF, JOIN_SUM_INT)
static const Fold sum_fold = {.words = 1, FOLD_TABLES(sum)};
REDUCTION(sum, &sum_fold, false)

static DType sum_dtype(Infer *I, int64_t given) {
  DType x = (DType)I->in[0]->dtype;
  return given != DTYPE_NONE ? (DType)given : dtype_is_float(x) ? x : I64;
}

static int sum_infer(Infer *I) {
  struct sum_args *a = I->args;
  return reduced_infer(I, &a->dim, a->keepdim, sum_dtype(I, a->dtype));
}

/* The sum over dims, all when none is given; whole numbers and bool are summed as int64. */
OP(sum,
   .signature = "sum(Tensor x, int[] dim=[], bool keepdim=False, *, dtype? dtype=None) -> Tensor",
   .sbp_rule = sbp_reduce_sum, .linear = "x", .infer = sum_infer, FOLDED(sum))

static void mean_finish(int64_t n, Word *acc, int64_t plane, int64_t count, const void *args) {
  (void)plane, (void)args;
  for (int64_t i = 0; i < n; i++) acc[i].f /= (double)count;
}
static const Fold mean_fold = {.words = 1, FOLD_TABLES(sum), .finish = mean_finish};
REDUCTION(mean, &mean_fold, false)

static int mean_infer(Infer *I) {
  struct mean_args *a = I->args;
  DType t = a->dtype != DTYPE_NONE ? (DType)a->dtype : (DType)I->in[0]->dtype;
  if (!dtype_is_float(t))
    return infer_error(I, "x is %s, whose mean is no whole number; give {dtype = mf.float32}",
                       dtype_name(t));
  return reduced_infer(I, &a->dim, a->keepdim, t);
}

/* The mean over dims, all when none is given. */
OP(mean,
   .signature = "mean(Tensor x, int[] dim=[], bool keepdim=False, *, dtype? dtype=None) -> Tensor",
   .flags = OP_INDEXED, .sbp_rule = sbp_reduce_sum, .linear = "x", .infer = mean_infer,
   FOLDED(mean))

FOLD_FLOATS(prod, double, 1, MAP_SELF, JOIN_PROD)
FOLD_INTS(prod, 1, MAP_SELF, JOIN_PROD_INT)
static const Fold prod_fold = {.words = 1, .start = {1}, .start_int = 1, FOLD_TABLES(prod)};
REDUCTION(prod, &prod_fold, false)

static int prod_infer(Infer *I) {
  struct prod_args *a = I->args;
  return reduced_infer(I, &a->dim, a->keepdim, sum_dtype(I, a->dtype));
}

/* The product over dims, all when none is given; that of whole numbers and bool is int64. */
OP(prod,
   .signature = "prod(Tensor x, int[] dim=[], bool keepdim=False, *, dtype? dtype=None) -> Tensor",
   .sbp_rule = sbp_reduce, .infer = prod_infer, FOLDED(prod))

/* -- Extremes and tests ------------------------------------------------------------------------ */

FOLD_FLOATS_LANES(amax, -INFINITY, MAP_SELF, LANES_MAX)
FOLD_INTS(amax, INT64_MIN, MAP_SELF, LANES_MAX)
FOLD_FLOATS_LANES(amin, INFINITY, MAP_SELF, LANES_MIN)
FOLD_INTS(amin, INT64_MAX, MAP_SELF, LANES_MIN)
static const Fold amax_fold = {
    .words = 1, .start = {-INFINITY}, .start_int = INT64_MIN, FOLD_TABLES(amax)};
static const Fold amin_fold = {
    .words = 1, .start = {INFINITY}, .start_int = INT64_MAX, FOLD_TABLES(amin)};
REDUCTION(amax, &amax_fold, false)
REDUCTION(amin, &amin_fold, false)

static int amax_infer(Infer *I) {
  struct amax_args *a = I->args;
  int rc = reduced_infer(I, &a->dim, a->keepdim, (DType)I->in[0]->dtype);
  return rc ? rc : want_elements(I, &a->dim);
}

static int amin_infer(Infer *I) {
  struct amin_args *a = I->args;
  int rc = reduced_infer(I, &a->dim, a->keepdim, (DType)I->in[0]->dtype);
  return rc ? rc : want_elements(I, &a->dim);
}

/* The largest element over dims, all when none is given; NaN where there is one. The gradient is
 * shared by equal ones. */
OP(amax, .signature = "amax(Tensor x, int[] dim=[], bool keepdim=False) -> Tensor",
   .sbp_rule = sbp_reduce_max, .infer = amax_infer, FOLDED(amax))
/* The smallest element over dims, all when none is given; NaN where there is one. The gradient is
 * shared by equal ones. */
OP(amin, .signature = "amin(Tensor x, int[] dim=[], bool keepdim=False) -> Tensor",
   .sbp_rule = sbp_reduce_min, .infer = amin_infer, FOLDED(amin))

FOLD_FLOATS(any, float, 0, MAP_TRUE, JOIN_MAX)
FOLD_INTS(any, 0, MAP_TRUE, JOIN_MAX)
FOLD_FLOATS(all, float, 1, MAP_TRUE, JOIN_MIN)
FOLD_INTS(all, 1, MAP_TRUE, JOIN_MIN)
FOLD_FLOATS(count_nonzero, float, 0, MAP_TRUE, JOIN_SUM)
FOLD_INTS(count_nonzero, 0, MAP_TRUE, JOIN_SUM_INT)
static const Fold any_fold = {.words = 1, FOLD_TABLES(any)};
static const Fold all_fold = {.words = 1, .start = {1}, .start_int = 1, FOLD_TABLES(all)};
static const Fold count_nonzero_fold = {.words = 1, FOLD_TABLES(count_nonzero)};

/* These read the class of x, whatever the result is. */
#define TEST(name, result)                                \
  REDUCTION(name, &name##_fold, true)                     \
  static int name##_infer(Infer *I) {                     \
    struct name##_args *a = I->args;                      \
    return reduced_infer(I, &a->dim, a->keepdim, result); \
  }
TEST(any, BOOL)
TEST(all, BOOL)
TEST(count_nonzero, I64)

/* Whether any element over dims is not zero. */
OP(any, .signature = "any(Tensor x, int[] dim=[], bool keepdim=False) -> Tensor",
   .flags = OP_NO_GRAD, .sbp_rule = sbp_reduce_max, .infer = any_infer, FOLDED(any))
/* Whether all elements over dims are not zero. */
OP(all, .signature = "all(Tensor x, int[] dim=[], bool keepdim=False) -> Tensor",
   .flags = OP_NO_GRAD, .sbp_rule = sbp_reduce_min, .infer = all_infer, FOLDED(all))
/* How many elements over dims are not zero. */
OP(count_nonzero,
   .signature = "count_nonzero(Tensor x, int[] dim=[], *, bool keepdim=False) -> Tensor",
   .flags = OP_NO_GRAD, .sbp_rule = sbp_reduce_sum, .infer = count_nonzero_infer,
   FOLDED(count_nonzero))

/* -- norm -------------------------------------------------------------------------------------- */

#define MAP_ABS(e) fabs(e)
#define MAP_SQUARE(e) ((e) * (e))
#define MAP_POWER(e) pow(fabs(e), (__typeof__((e) + 0))((const struct norm_args *)args)->p)
#define MAP_SQUARE_LANES(V, i) (LANES_AT(V, x, i) * LANES_AT(V, x, i))
FOLD_FLOATS(norm_sum, float, 0, MAP_ABS, JOIN_SUM)
FOLD_FLOATS_LANES(norm_square, 0, MAP_SQUARE, LANES_ADD)
FOLD_FLOATS(norm_power, float, 0, MAP_POWER, JOIN_SUM)
FOLD_FLOATS(norm_max, float, 0, MAP_ABS, JOIN_MAX)
FOLD_FLOATS(norm_min, float, INFINITY, MAP_ABS, JOIN_MIN)
FOLD_FLOATS(norm_count, float, 0, MAP_TRUE, JOIN_SUM)

static void norm_finish(int64_t n, Word *acc, int64_t plane, int64_t count, const void *args) {
  double p = ((const struct norm_args *)args)->p;
  (void)plane, (void)count;
  for (int64_t i = 0; i < n; i++) acc[i].f = p == 2 ? sqrt(acc[i].f) : pow(acc[i].f, 1 / p);
}
static const Fold norm_folds[] = {
    {.words = 1, FOLD_TABLES_FLOAT(norm_sum)},
    {.words = 1, FOLD_TABLES_FLOAT(norm_square), .finish = norm_finish},
    {.words = 1, FOLD_TABLES_FLOAT(norm_power), .finish = norm_finish},
    {.words = 1, FOLD_TABLES_FLOAT(norm_max)},
    {.words = 1, .start = {INFINITY}, FOLD_TABLES_FLOAT(norm_min)},
    {.words = 1, FOLD_TABLES_FLOAT(norm_count)},
};

static const Fold *norm_fold(double p) {
  return &norm_folds[p == 1           ? 0
                     : p == 2         ? 1
                     : p == INFINITY  ? 3
                     : p == -INFINITY ? 4
                     : p == 0         ? 5
                                      : 2];
}
REDUCTION(norm, norm_fold(a->p), false)

static int norm_infer(Infer *I) {
  struct norm_args *a = I->args;
  int rc = infer_want_float(I, 0);
  if (!rc && a->p != a->p) rc = infer_error(I, "p must be a number, is nan");
  if (!rc) rc = reduced_infer(I, &a->dim, a->keepdim, (DType)I->in[0]->dtype);
  return rc || a->p != -INFINITY ? rc : want_elements(I, &a->dim);
}

/* (sum |x|^p)^(1/p) over dims, all when none is given; p = inf is the largest |x|, 0 counts what is
 * not zero. */
OP(norm, .signature = "norm(Tensor x, float p=2, int[] dim=[], bool keepdim=False) -> Tensor",
   .sbp_rule = sbp_reduce, .infer = norm_infer, FOLDED(norm))

/* -- var, std ---------------------------------------------------------------------------------- */

/* Words: mean, M2. */
#define FOLD_MOMENTS(C, T)                                                                       \
  static void var_row_##C(int64_t n, const void *x, const void *args, int64_t done, Word *acc) { \
    (void)args;                                                                                  \
    moments_row_##C(n, x, done, &acc[0].f, &acc[1].f);                                           \
  }                                                                                              \
  static void var_columns_##C(int64_t rows, int64_t n, const void *x, int64_t step,              \
                              const void *args, int64_t done, Word *acc, int64_t plane) {        \
    (void)args;                                                                                  \
    moments_columns_##C(rows, n, x, step, done, &acc->f, &acc[plane].f);                         \
  }
FOLD_MOMENTS(f32, float)
FOLD_MOMENTS(f64, double)

static void var_join(int64_t n, Word *to, int64_t to_count, const Word *from, int64_t from_count,
                     int64_t plane) {
  for (int64_t i = 0; i < n; i++)
    moments_join(&to[i].f, &to[plane + i].f, (double)to_count, from[i].f, from[plane + i].f,
                 (double)from_count);
}

static double var_divisor(int64_t count, bool unbiased, bool has_correction, double correction) {
  double d = (double)count - (has_correction ? correction : unbiased ? 1 : 0);
  return d > 0 ? d : 0;
}

static void var_finish(int64_t n, Word *acc, int64_t plane, int64_t count, const void *args) {
  const struct var_args *a = args;
  double divisor = var_divisor(count, a->unbiased, a->has_correction, a->correction);
  for (int64_t i = 0; i < n; i++) acc[i].f = acc[plane + i].f / divisor;
}

static void std_finish(int64_t n, Word *acc, int64_t plane, int64_t count, const void *args) {
  const struct std_args *a = args;
  double divisor = var_divisor(count, a->unbiased, a->has_correction, a->correction);
  for (int64_t i = 0; i < n; i++) acc[i].f = sqrt(acc[plane + i].f / divisor);
}

#define FOLD_TABLES_MOMENTS                                     \
  .words = 2, .group = true, .row = {var_row_f32, var_row_f64}, \
  .columns = {var_columns_f32, var_columns_f64}, .join = {var_join, var_join}
static const Fold var_fold = {FOLD_TABLES_MOMENTS, .finish = var_finish};
static const Fold std_fold = {FOLD_TABLES_MOMENTS, .finish = std_finish};
REDUCTION(var, &var_fold, false)
REDUCTION(std, &std_fold, false)

static int var_infer(Infer *I) {
  struct var_args *a = I->args;
  int rc = infer_want_float(I, 0);
  return rc ? rc : reduced_infer(I, &a->dim, a->keepdim, (DType)I->in[0]->dtype);
}

static int std_infer(Infer *I) {
  struct std_args *a = I->args;
  int rc = infer_want_float(I, 0);
  return rc ? rc : reduced_infer(I, &a->dim, a->keepdim, (DType)I->in[0]->dtype);
}

/* The variance over dims, all when none is given, divided by n - 1, or by n where not unbiased, or
 * by n - correction. */
OP(var,
   .signature =
       "var(Tensor x, int[] dim=[], bool unbiased=True, bool keepdim=False, *, float? "
       "correction=None) -> Tensor",
   .sbp_rule = sbp_reduce, .infer = var_infer, FOLDED(var))
/* The standard deviation: the root of var. */
OP(std,
   .signature =
       "std(Tensor x, int[] dim=[], bool unbiased=True, bool keepdim=False, *, float? "
       "correction=None) -> Tensor",
   .sbp_rule = sbp_reduce, .infer = std_infer, FOLDED(std))

/* -- logsumexp --------------------------------------------------------------------------------- */

/* Words: the largest element m (0 where that is infinite), the sum of exp(x - m). */
static void logsumexp_join_one(double *m, double *s, double other_m, double other_s) {
  double most = JOIN_MAX(*m, other_m);
  if (most == -INFINITY) return;
  *s = *s * exp(*m - most) + other_s * exp(other_m - most);
  *m = most;
}

#define LOGSUMEXP_LANES(V, i) LANES_AT(V, e, i)
#define FOLD_LOGSUMEXP(C, T)                                                               \
  static void logsumexp_row_##C(int64_t n, const void *x_, const void *args, int64_t done, \
                                Word *acc) {                                               \
    const T *x = x_;                                                                       \
    T most, sum, e[BLOCK];                                                                 \
    (void)args, (void)done;                                                                \
    for (int64_t at = 0; at < n; at += BLOCK, x += BLOCK) {                                \
      int64_t m = n - at < BLOCK ? n - at : BLOCK;                                         \
      LANES_FOLD(C, T, m, -INFINITY, MAP_SELF_LANES, LANES_MAX, most);                     \
      if (most == -INFINITY) continue;                                                     \
      if (most == INFINITY) most = 0;                                                      \
      for (int64_t i = 0; i < m; i++) e[i] = exp(x[i] - most);                             \
      LANES_FOLD(C, T, m, 0, LOGSUMEXP_LANES, LANES_ADD, sum);                             \
      logsumexp_join_one(&acc[0].f, &acc[1].f, (double)most, (double)sum);                 \
    }                                                                                      \
  }                                                                                        \
  static void logsumexp_columns_##C(int64_t rows, int64_t n, const void *x_, int64_t step, \
                                    const void *args, int64_t done, Word *restrict acc,    \
                                    int64_t plane) {                                       \
    T most[FOLD_WIDTH], sum[FOLD_WIDTH];                                                   \
    (void)args, (void)done;                                                                \
    for (int64_t i = 0; i < n; i++) most[i] = -INFINITY, sum[i] = 0;                       \
    for (int64_t r = 0; r < rows; r++) {                                                   \
      const T *x = (const T *)x_ + r * step;                                               \
      for (int64_t i = 0; i < n; i++) most[i] = JOIN_MAX(most[i], x[i]);                   \
    }                                                                                      \
    for (int64_t i = 0; i < n; i++)                                                        \
      most[i] = most[i] == INFINITY || most[i] == -INFINITY ? 0 : most[i];                 \
    for (int64_t r = 0; r < rows; r++) {                                                   \
      const T *x = (const T *)x_ + r * step;                                               \
      for (int64_t i = 0; i < n; i++) sum[i] += exp(x[i] - most[i]);                       \
    }                                                                                      \
    for (int64_t i = 0; i < n; i++)                                                        \
      if (sum[i] != 0)                                                                     \
        logsumexp_join_one(&acc[i].f, &acc[plane + i].f, (double)most[i], (double)sum[i]); \
  }
FOLD_LOGSUMEXP(f32, float)
FOLD_LOGSUMEXP(f64, double)

static void logsumexp_join(int64_t n, Word *to, int64_t to_count, const Word *from,
                           int64_t from_count, int64_t plane) {
  (void)to_count, (void)from_count;
  for (int64_t i = 0; i < n; i++)
    logsumexp_join_one(&to[i].f, &to[plane + i].f, from[i].f, from[plane + i].f);
}

static void logsumexp_finish(int64_t n, Word *acc, int64_t plane, int64_t count, const void *args) {
  (void)count, (void)args;
  for (int64_t i = 0; i < n; i++)
    acc[i].f = acc[i].f == -INFINITY ? -INFINITY : acc[i].f + log(acc[plane + i].f);
}

static const Fold logsumexp_fold = {.words = 2,
                                    .start = {-INFINITY, 0},
                                    .group = true,
                                    .row = {logsumexp_row_f32, logsumexp_row_f64},
                                    .columns = {logsumexp_columns_f32, logsumexp_columns_f64},
                                    .join = {logsumexp_join, logsumexp_join},
                                    .finish = logsumexp_finish};
REDUCTION(logsumexp, &logsumexp_fold, false)

static int logsumexp_infer(Infer *I) {
  struct logsumexp_args *a = I->args;
  int rc = infer_want_float(I, 0);
  return rc ? rc : reduced_infer(I, &a->dim, a->keepdim, (DType)I->in[0]->dtype);
}

/* log(sum exp(x)) over dims, without overflow. */
OP(logsumexp, .signature = "logsumexp(Tensor x, int[] dim, bool keepdim=False) -> Tensor",
   .sbp_rule = sbp_reduce, .infer = logsumexp_infer, FOLDED(logsumexp))

/* -- sum_to, spread: the gradient of broadcasting, and of reducing ----------------------------- */

/* Dims that stay are split, sums over split dims are partial. */
static int sum_to_sbp(SbpAsk *q) {
  const Meta *x = q->in[0], *y = q->out[0];
  int first = x->ndim - y->ndim;
  for (int d = 0; d < x->ndim; d++) {
    Sbp *row = sbp_add(q);
    if (!row) return MF_ENOMEM;
    row[0] = sbp_split(d);
    bool stays = d >= first && y->shape[d - first] == x->shape[d];
    row[1] = stays ? sbp_split(d - first) : (Sbp){SBP_P, 0};
  }
  return 0;
}

static int sum_to_infer(Infer *I) {
  const struct sum_to_args *a = I->args;
  const Meta *x = I->in[0];
  char have[SHAPE_TEXT_MAX], want[SHAPE_TEXT_MAX];
  int shift = x->ndim - (int)a->size.n, rc;
  bool fits = shift >= 0;
  for (int d = 0; fits && d < a->size.n; d++)
    fits = a->size.v[d] == 1 || a->size.v[d] == x->shape[d + shift];
  rc = fits ? infer_shape(I, (DType)x->dtype, (int)a->size.n, a->size.v) : 0;
  return fits ? rc
              : infer_error(I, "size %s does not broadcast to x of shape %s",
                            shape_text((int)a->size.n, a->size.v, want),
                            shape_text(x->ndim, x->shape, have));
}

static void sum_to_init(FoldJob *j, const OpCall *c) {
  const View *x = &c->in[0], *y = &c->out[0];
  int shift = x->ndim - y->ndim;
  uint32_t mask = 0;
  int64_t step[MF_MAX_DIMS];
  for (int d = 0; d < x->ndim; d++) {
    if (d < shift || y->shape[d - shift] != x->shape[d]) mask |= 1u << d;
    step[d] = d < shift ? 0 : y->stride[d - shift];
  }
  fold_init(j, &sum_fold, fold_class(&(Folding){0}, (DType)x->dtype, (DType)y->dtype), x, mask,
            step);
}

static size_t sum_to_scratch(const OpCall *c) {
  FoldJob j;
  sum_to_init(&j, c);
  return fold_scratch(&j);
}

static int sum_to_cpu(const OpCall *c) {
  FoldJob j;
  sum_to_init(&j, c);
  fold_execute(&j, c->args, &c->in[0], &c->out[0], c->scratch);
  return 0;
}

/* x summed over the dims in which `size` is broadcast to x's shape. */
OP(sum_to, .signature = "sum_to(Tensor x, int[] size) -> Tensor", .flags = OP_HIDDEN,
   .sbp_rule = sum_to_sbp, .linear = "x", .infer = sum_to_infer, .cpu = sum_to_cpu,
   .scratch = sum_to_scratch)

static int spread_infer(Infer *I) {
  struct spread_args *a = I->args;
  const Meta *x = I->in[0];
  int ndim = (int)a->size.n, rc = shape_check(I->op->name, ndim, a->size.v, (DType)x->dtype);
  if (!rc) rc = infer_dims(I, "dim", &a->dim, ndim, false);
  if (rc) return rc;
  uint32_t mask = dims_mask(&a->dim);
  int64_t shape[MF_MAX_DIMS];
  int n = 0;
  for (int d = 0; d < ndim; d++) {
    if (!(mask >> d & 1)) shape[n++] = a->size.v[d];
    else if (a->keepdim) shape[n++] = 1;
  }
  rc = infer_want_shape(I, 0, n, shape);
  if (!rc) rc = infer_shape(I, (DType)x->dtype, ndim, a->size.v);
  if (rc) return rc;
  I->last->offset = x->offset;
  for (int d = 0, k = 0; d < ndim; d++) {
    bool reduced = mask >> d & 1;
    I->last->stride[d] = reduced ? 0 : x->stride[k];
    k += !reduced || a->keepdim;
  }
  return 0;
}

/* x, the result of a reduction over dims, seen with the shape `size` of what was reduced. A view.
 */
OP(spread, .signature = "spread(Tensor x, int[] size, int[] dim, bool keepdim) -> Tensor",
   .flags = OP_HIDDEN | OP_VIEW, .infer = spread_infer)
