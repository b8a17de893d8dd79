/* Reductions: folding the elements of some dims into one value for each place of the others.
 *
 * A Fold says how elements are taken into accumulators (one or two words of 8 bytes each an output:
 * double for floats, int64 for whole numbers). Where the reduced dims lie innermost in memory, an
 * output's elements are taken as rows; where kept dims do, rows of many outputs are taken together
 * as columns. Float elements are joined in their own type only within short groups, then in double,
 * so that a sum of millions is exact to the last bits. How the work is cut depends on the sizes and
 * the number of threads alone, so results repeat.
 *
 * Static, since it belongs to one instruction set. */
#ifndef MF_FOLD_H
#define MF_FOLD_H
#include <stdlib.h>

#include "block.h"
#include "thread.h"

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
/* The result of `count` elements, from acc[i] (and acc[plane + i]) into acc[i]. */
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
  FOLD_ROW = 2048
};
enum {
  FOLD_LANES = 32,
  FOLD_LANE_BYTES = 256,
  FOLD_TALL = 128
}; /* rows joined in the elements' own type at most */

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

/* -- Rows -------------------------------------------------------------------------------------- */

static inline void fold_start(const FoldJob *j, int64_t n, Word *acc, int64_t plane) {
  for (int w = 0; w < j->fold->words; w++)
    for (int64_t i = 0; i < n; i++) {
      if (j->cls == PW_I64) acc[w * plane + i].i = j->fold->start_int;
      else acc[w * plane + i].f = j->fold->start[w];
    }
}

/* n elements with this step. */
static void fold_run(const FoldJob *j, const char *x, int64_t n, int64_t step, int64_t done,
                     Word *acc) {
  FoldRow *row = j->fold->row[j->cls];
  BlockBuffer b;
  if (j->native && step == 1) {
    for (int64_t at = 0; at < n; at += FOLD_ROW)
      row(n - at < FOLD_ROW ? n - at : FOLD_ROW, x + at * (int64_t)j->size, j->args, done + at,
          acc);
    return;
  }
  for (int64_t at = 0; at < n; at += BLOCK) {
    int64_t m = n - at < BLOCK ? n - at : BLOCK;
    j->load(m, x + at * step * (int64_t)j->x_size, step, &b);
    row(m, &b, j->args, done + at, acc);
  }
}

/* Elements [first, last) of one output, whose first lies at x. */
static void fold_elements(const FoldJob *j, const char *x, int64_t first, int64_t last, Word *acc) {
  int inner = j->n_reduced - 1;
  int64_t run = inner < 0 ? 1 : j->reduced[inner], step = inner < 0 ? 1 : j->reduced_x[inner];
  for (int64_t at = first; at < last;) {
    int64_t from = at % run, n = run - from < last - at ? run - from : last - at;
    int64_t offset = fold_reduced_place(j, inner, at / run) + from * step;
    fold_run(j, x + offset * (int64_t)j->x_size, n, step, at - first, acc);
    at += n;
  }
}

static void fold_finish(const FoldJob *j, int64_t n, Word *acc, int64_t plane, char *y,
                        int64_t step) {
  if (j->fold->finish) j->fold->finish(n, acc, plane, j->count, j->args);
  j->store(n, acc, step, y);
}

/* Outputs [begin, end). */
static void fold_rows(int64_t begin, int64_t end, void *arg) {
  const FoldJob *j = arg;
  Word acc[2];
  for (int64_t k = begin; k < end; k++) {
    int64_t x, y;
    fold_place(j, j->n_kept, k, &x, &y);
    fold_start(j, 1, acc, 1);
    fold_elements(j, j->x + x * (int64_t)j->x_size, 0, j->count, acc);
    fold_finish(j, 1, acc, 1, j->y + y * (int64_t)j->y_size, 1);
  }
}

static int64_t fold_chunk_end(const FoldJob *j, int64_t c) {
  return (c + 1) * j->chunk < j->count ? (c + 1) * j->chunk : j->count;
}

/* Chunks [begin, end) of all outputs into partial[chunk][2]. */
static void fold_chunks(int64_t begin, int64_t end, void *arg) {
  const FoldJob *j = arg;
  for (int64_t k = begin; k < end; k++) {
    int64_t x, y, c = k % j->chunks;
    fold_place(j, j->n_kept, k / j->chunks, &x, &y);
    fold_start(j, 1, j->partial + k * 2, 1);
    fold_elements(j, j->x + x * (int64_t)j->x_size, c * j->chunk, fold_chunk_end(j, c),
                  j->partial + k * 2);
  }
}

/* Few outputs of many elements each: threads share one output. */
static void fold_shared_rows(FoldJob *j) {
  Word partial[FOLD_FEW * FOLD_CHUNKS * 2];
  j->partial = partial;
  mf_parallel(j->outputs * j->chunks, 1, fold_chunks, j);
  for (int64_t k = 0; k < j->outputs; k++) {
    int64_t x, y;
    Word *acc = partial + k * j->chunks * 2;
    for (int64_t c = 1; c < j->chunks; c++)
      j->fold->join[j->cls](1, acc, c * j->chunk, acc + c * 2, fold_chunk_end(j, c) - c * j->chunk,
                            1);
    fold_place(j, j->n_kept, k, &x, &y);
    fold_finish(j, 1, acc, 1, j->y + y * (int64_t)j->y_size, 1);
  }
}

/* -- Columns ----------------------------------------------------------------------------------- */

/* `rows` rows of n columns, n <= FOLD_WIDTH, with these steps in x. */
static void fold_block(const FoldJob *j, const char *x, int64_t rows, int64_t row_step, int64_t n,
                       int64_t done, Word *acc, int64_t plane) {
  FoldColumns *columns = j->fold->columns[j->cls];
  int64_t step = j->n_kept ? j->kept_x[j->n_kept - 1] : 1;
  if (j->native && step == 1) {
    columns(rows, n, x, row_step, j->args, done, acc, plane);
    return;
  }
  union {
    float f32[FOLD_GROUP / 2][FOLD_WIDTH];
    double f64[FOLD_GROUP / 2][FOLD_WIDTH];
  } __attribute__((aligned(64))) b;
  for (int64_t r = 0; r < rows; r += FOLD_GROUP / 2) {
    int64_t m = rows - r < FOLD_GROUP / 2 ? rows - r : FOLD_GROUP / 2;
    for (int64_t k = 0; k < m; k++)
      j->load(n, x + (r + k) * row_step * (int64_t)j->x_size, step,
              (char *)&b + (size_t)(k * FOLD_WIDTH) * j->size);
    columns(m, n, &b, FOLD_WIDTH, j->args, done + r, acc, plane);
  }
}

/* Rows [first, last) of the n columns that begin at x. `wide` columns are taken in tiles, some rows
 * of each at a time, so that memory is read in order. */
static void fold_tall(const FoldJob *j, const char *x, int64_t first, int64_t last, int64_t n,
                      Word *acc, int64_t plane) {
  int inner = j->n_reduced - 1;
  int64_t run = inner < 0 ? 1 : j->reduced[inner], row_step = inner < 0 ? 1 : j->reduced_x[inner];
  int64_t step = j->n_kept ? j->kept_x[j->n_kept - 1] : 1;
  bool group = j->fold->group || n > FOLD_WIDTH;
  for (int64_t at = first; at < last;) {
    int64_t from = at % run, rows = run - from < last - at ? run - from : last - at;
    if (group && rows > FOLD_GROUP) rows = FOLD_GROUP;
    int64_t offset = fold_reduced_place(j, inner, at / run) + from * row_step;
    for (int64_t c = 0; c < n; c += FOLD_WIDTH)
      fold_block(j, x + (offset + c * step) * (int64_t)j->x_size, rows, row_step,
                 n - c < FOLD_WIDTH ? n - c : FOLD_WIDTH, at - first, acc + c, plane);
    at += rows;
  }
}

/* Tiles of FOLD_WIDTH outputs [begin, end). */
static void fold_tiles(int64_t begin, int64_t end, void *arg) {
  const FoldJob *j = arg;
  Word acc[2 * FOLD_WIDTH];
  int outer = j->n_kept ? j->n_kept - 1 : 0;
  for (int64_t k = begin; k < end; k++) {
    int64_t x, y, c = k % j->tiles * FOLD_WIDTH,
                  n = j->width - c < FOLD_WIDTH ? j->width - c : FOLD_WIDTH;
    fold_place(j, outer, k / j->tiles, &x, &y);
    int64_t step_x = j->n_kept ? j->kept_x[outer] : 1, step_y = j->n_kept ? j->kept_y[outer] : 1;
    fold_start(j, n, acc, FOLD_WIDTH);
    fold_tall(j, j->x + (x + c * step_x) * (int64_t)j->x_size, 0, j->count, n, acc, FOLD_WIDTH);
    fold_finish(j, n, acc, FOLD_WIDTH, j->y + (y + c * step_y) * (int64_t)j->y_size, step_y);
  }
}

/* Parts [begin, end) of the rows, each into accumulators of its own. */
static void fold_parts(int64_t begin, int64_t end, void *arg) {
  const FoldJob *j = arg;
  for (int64_t p = begin; p < end; p++) {
    Word *acc = j->partial + p * j->fold->words * j->width;
    fold_start(j, j->width, acc, j->width);
    fold_tall(j, j->x, p * j->count / j->parts, (p + 1) * j->count / j->parts, j->width, acc,
              j->width);
  }
}

static void fold_shared_columns(FoldJob *j) {
  mf_parallel(j->parts, 1, fold_parts, j);
  for (int64_t p = 1; p < j->parts; p++) {
    int64_t done = p * j->count / j->parts, next = (p + 1) * j->count / j->parts;
    j->fold->join[j->cls](j->width, j->partial, done, j->partial + p * j->fold->words * j->width,
                          next - done, j->width);
  }
  fold_finish(j, j->width, j->partial, j->width, j->y, j->n_kept ? j->kept_y[0] : 1);
}

/* -- The whole --------------------------------------------------------------------------------- */

/* Sets j up for folding x over the dims whose bits are set in `reduced`; y_step has y's step for
 * each dim of x that is kept. */
static void fold_init(FoldJob *j, const Fold *fold, PointwiseClass cls, const View *x,
                      uint32_t reduced, const int64_t *y_step) {
  j->fold = fold;
  j->cls = cls;
  j->n_kept = j->n_reduced = 0;
  j->outputs = j->count = 1;
  for (int d = 0; d < x->ndim; d++) {
    bool fold_it = reduced >> d & 1;
    *(fold_it ? &j->count : &j->outputs) *= x->shape[d];
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
  bool short_rows = j->count < FOLD_GROUP && j->n_kept && j->kept[j->n_kept - 1] >= FOLD_LANES;
  if (short_rows) j->by_rows = false; /* one row at a time would cost more than reading across */
  j->chunks = 1;
  j->parts = 0;
  int64_t work = j->outputs * j->count;
  if (j->by_rows) {
    j->chunk = (j->count + FOLD_CHUNKS - 1) / FOLD_CHUNKS;
    if (j->chunk < FOLD_GRAIN) j->chunk = FOLD_GRAIN;
    if (j->outputs <= FOLD_FEW && j->count > FOLD_GRAIN)
      j->chunks = (j->count + j->chunk - 1) / j->chunk;
    return;
  }
  j->width = j->kept[j->n_kept - 1];
  j->tiles = (j->width + FOLD_WIDTH - 1) / FOLD_WIDTH;
  if (j->n_kept == 1 && work >= 2 * FOLD_GRAIN && j->count >= 4 * FOLD_GROUP &&
      j->width <= 1 << 16) {
    int64_t parts = work / FOLD_GRAIN, threads = thread_count();
    j->parts = parts < threads ? parts : threads;
  }
}

/* Bytes of scratch that fold_execute needs. */
static size_t fold_scratch(const FoldJob *j) {
  return j->by_rows ? 0 : sizeof(Word) * (size_t)(j->parts * j->fold->words * j->width);
}

static void fold_execute(FoldJob *j, const void *args, const View *x, const View *y,
                         void *scratch) {
  if (j->outputs == 0) return;
  j->args = args;
  j->x = x->data;
  j->y = y->data;
  j->load = block_loads[j->cls][x->dtype];
  j->store = block_stores[j->cls == PW_I64 ? PW_I64 : PW_F64][y->dtype];
  j->x_size = dtype_size((DType)x->dtype);
  j->y_size = dtype_size((DType)y->dtype);
  j->size = j->cls == PW_F32 ? 4 : 8;
  j->native = block_is_native((DType)x->dtype, j->cls);
  j->partial = scratch;
  if (j->by_rows && j->chunks > 1) fold_shared_rows(j);
  else if (j->by_rows) mf_parallel(j->outputs, 1 + FOLD_GRAIN / (j->count + 16), fold_rows, j);
  else if (j->parts) fold_shared_columns(j);
  else
    mf_parallel(j->outputs / j->width * j->tiles, 1 + FOLD_GRAIN / (FOLD_WIDTH * (j->count + 1)),
                fold_tiles, j);
}

#endif
