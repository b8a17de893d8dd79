/* What a reduction is, folding the elements of some dims into one value for each place of the
 * others, and how its work is cut; fold.h does it.
 *
 * A Fold says how elements are taken into accumulators (one or two words of 8 bytes each an output:
 * double for floats, int64 for whole numbers). Where the reduced dims lie innermost in memory, an
 * output's elements are taken as rows; where kept dims do, rows of many outputs are taken together
 * as columns. Float elements are joined in their own type only within short groups, then in double,
 * so that a sum of millions is exact to the last bits. How the work is cut depends on the sizes
 * alone, so results do not depend on the number of threads.
 *
 * Static, since it belongs to one instruction set. */
#ifndef MF_FOLD_PLAN_H
#define MF_FOLD_PLAN_H
#include "block.h"
#include "folding.h"
#include "lanes.h"

typedef union Word {
  double f;
  int64_t i;
} Word;

/* Takes n elements in a row into acc[0] (and acc[1]); `done` elements were taken before. */
typedef void FoldRow(int64_t n, const void *x, const void *args, int64_t done, Word *acc);
/* Takes x[r * step + i] into acc[i] (and acc[plane + i]) for r < rows, i < n. */
typedef void FoldColumns(int64_t rows, int64_t n, const void *x, int64_t step, const void *args,
                         int64_t done, Word *acc, int64_t plane);
/* to += from, for n accumulators that have taken to_count and from_count elements. */
typedef void FoldJoin(int64_t n, Word *to, int64_t to_count, const Word *from, int64_t from_count,
                      int64_t plane);
/* The result of `count` elements (all there are, also of a part), from acc[i] (and acc[plane + i])
 * into acc[i]. */
typedef void FoldFinish(int64_t n, Word *acc, int64_t plane, int64_t count, const void *args);

typedef struct Fold {
  int words;
  double start[2];   /* of floats */
  int64_t start_int; /* of whole numbers */
  bool group;        /* wants rows in groups of FOLD_GROUP, since it looks at each group twice */
  FoldRow *row[PW_CLASSES];
  FoldColumns *columns[PW_CLASSES];
  FoldJoin *join[PW_CLASSES];
  FoldFinish *finish; /* NULL: the accumulator is the result */
} Fold;

enum {
  FOLD_WIDTH = 512,
  FOLD_GROUP = 16,
  FOLD_GRAIN = 1 << 15,
  FOLD_CHUNKS = 64,
  FOLD_FEW = 16,
  FOLD_ROW = 2048,
  FOLD_BATCH = 64, /* outputs that are finished together */
  FOLD_LANE_BYTES = 256,
  FOLD_TALL = 128,    /* rows joined in the elements' own type at most */
  FOLD_PART = 1 << 18 /* the least elements of a part of the rows */
};

typedef struct FoldJob {
  const Fold *fold;
  const void *args;
  PointwiseClass cls;
  const char *x;
  char *y;
  BlockConvert *load, *store;
  size_t x_size, y_size, size; /* bytes an element: of x, of y, of the compute type */
  bool native;
  int n_kept, n_reduced; /* without dims of size 1, outermost in x first, merged where possible */
  int64_t kept[MF_MAX_DIMS], kept_x[MF_MAX_DIMS], kept_y[MF_MAX_DIMS];
  int64_t reduced[MF_MAX_DIMS], reduced_x[MF_MAX_DIMS];
  int64_t outputs, count; /* elements of y; elements of x to each */
  int64_t whole;          /* as count, of the tensor of which x is a part */
  bool by_rows;
  int64_t chunks, chunk; /* rows: parts of one output's elements */
  int64_t width, tiles;  /* columns: the innermost kept dim and its parts */
  int64_t parts;         /* columns: parts of the reduced rows, accumulated apart */
  Word *partial;
} FoldJob;

/* -- Geometry ---------------------------------------------------------------------------------- */

static inline int64_t fold_abs(int64_t v) {
  return v < 0 ? -v : v;
}

/* Puts a dim among n others, outermost first, and returns n + 1. `b` may be NULL. */
static int fold_insert(int n, int64_t *shape, int64_t *a, int64_t *b, int64_t size, int64_t step_a,
                       int64_t step_b) {
  int at = n;
  for (; at > 0 && fold_abs(a[at - 1]) < fold_abs(step_a); at--) {
    shape[at] = shape[at - 1], a[at] = a[at - 1];
    if (b) b[at] = b[at - 1];
  }
  shape[at] = size, a[at] = step_a;
  if (b) b[at] = step_b;
  return n + 1;
}

static int fold_merge(int n, int64_t *shape, int64_t *a, int64_t *b) {
  int last = 0;
  for (int d = 1; d < n; d++) {
    if (a[last] == a[d] * shape[d] && (!b || b[last] == b[d] * shape[d])) shape[last] *= shape[d];
    else shape[++last] = shape[d];
    a[last] = a[d];
    if (b) b[last] = b[d];
  }
  return n ? last + 1 : 0;
}

/* The offset in x (and in y) of kept place k, over the outermost n dims. */
static void fold_place(const FoldJob *j, int n, int64_t k, int64_t *x, int64_t *y) {
  *x = *y = 0;
  for (int d = n - 1; d >= 0; d--) {
    int64_t i = k % j->kept[d];
    k /= j->kept[d];
    *x += i * j->kept_x[d], *y += i * j->kept_y[d];
  }
}

/* The offset in x of reduced place k, over the outermost n dims. */
static int64_t fold_reduced_place(const FoldJob *j, int n, int64_t k) {
  int64_t x = 0;
  for (int d = n - 1; d >= 0; d--) {
    x += k % j->reduced[d] * j->reduced_x[d];
    k /= j->reduced[d];
  }
  return x;
}

/* -- Setting up -------------------------------------------------------------------------------- */

/* Sets j up for folding x over the dims whose bits are set in `reduced`; y_step has y's step for
 * each dim of x that is kept. */
static void fold_init(FoldJob *j, const Fold *fold, PointwiseClass cls, const View *x,
                      uint32_t reduced, const int64_t *y_step) {
  j->fold = fold;
  j->cls = cls;
  j->n_kept = j->n_reduced = 0;
  j->outputs = j->count = j->whole = 1;
  for (int d = 0; d < x->ndim; d++) {
    bool fold_it = reduced >> d & 1;
    *(fold_it ? &j->count : &j->outputs) *= x->shape[d];
    if (fold_it) j->whole *= x->whole ? x->whole[d] : x->shape[d];
    if (x->shape[d] == 1) continue;
    if (fold_it)
      j->n_reduced =
          fold_insert(j->n_reduced, j->reduced, j->reduced_x, NULL, x->shape[d], x->stride[d], 0);
    else
      j->n_kept = fold_insert(j->n_kept, j->kept, j->kept_x, j->kept_y, x->shape[d], x->stride[d],
                              y_step[d]);
  }
  j->n_kept = fold_merge(j->n_kept, j->kept, j->kept_x, j->kept_y);
  j->n_reduced = fold_merge(j->n_reduced, j->reduced, j->reduced_x, NULL);
  int64_t across = j->n_kept ? fold_abs(j->kept_x[j->n_kept - 1]) : 0,
          along = j->n_reduced ? fold_abs(j->reduced_x[j->n_reduced - 1]) : 0;
  j->by_rows = j->n_kept == 0 || across == 0 || (along && along < across);
  bool short_rows = j->count < FOLD_GROUP && j->n_kept && j->kept[j->n_kept - 1] >= FOLD_BATCH / 2;
  if (short_rows) j->by_rows = false; /* one row at a time would cost more than reading across */
  j->chunks = 1;
  j->parts = 0;
  if (j->by_rows) {
    j->chunk = (j->count + FOLD_CHUNKS - 1) / FOLD_CHUNKS;
    if (j->chunk < FOLD_GRAIN) j->chunk = FOLD_GRAIN;
    if (j->outputs <= FOLD_FEW && j->count > FOLD_GRAIN)
      j->chunks = (j->count + j->chunk - 1) / j->chunk;
    return;
  }
  j->width = j->kept[j->n_kept - 1];
  j->tiles = (j->width + FOLD_WIDTH - 1) / FOLD_WIDTH;
  if (j->n_kept == 1 && j->width <= 1 << 16) {
    int64_t parts = j->outputs * j->count / FOLD_PART, most = j->count / FOLD_TALL;
    if (most > FOLD_CHUNKS) most = FOLD_CHUNKS;
    parts = parts < most ? parts : most;
    j->parts = parts > 1 ? parts : 0;
  }
}

/* The class that a reduction of x to y is computed in. */
static inline PointwiseClass fold_class(const Folding *f, DType x, DType y) {
  if (f->of_input) return block_class(x);
  if (x == F64 || y == F64) return dtype_is_float(x) || dtype_is_float(y) ? PW_F64 : PW_I64;
  if (dtype_is_float(x)) return PW_F32;
  return dtype_is_float(y) ? PW_F64 : PW_I64;
}

/* Sets j up for the reduction f of x to y. */
static void fold_init_views(FoldJob *j, const Folding *f, const View *x, const View *y) {
  int64_t step[MF_MAX_DIMS]; /* of y, for each dim of x */
  uint32_t mask = 0;
  for (int i = 0; i < f->dims->n; i++) mask |= 1u << f->dims->v[i];
  for (int d = 0, k = 0; d < x->ndim; d++) {
    bool reduced = mask >> d & 1;
    step[d] = reduced ? 0 : y->stride[k];
    k += !reduced || f->keepdim;
  }
  fold_init(j, f->fold, fold_class(f, (DType)x->dtype, (DType)y->dtype), x, mask, step);
}

/* Bytes of scratch that fold_execute needs. */
static size_t fold_scratch(const FoldJob *j) {
  return j->by_rows ? 0 : sizeof(Word) * (size_t)(j->parts * j->fold->words * j->width);
}

#endif
