/* Reductions: the loops. Where the reduced dims lie innermost, an output's elements are taken as
 * rows; else rows of many outputs are taken together as columns. See fold_plan.h.
 *
 * Static, since it belongs to one instruction set. */
#ifndef MF_FOLD_H
#define MF_FOLD_H
#include "fold_plan.h"
#include "thread.h"

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
  if (j->fold->finish) j->fold->finish(n, acc, plane, j->whole, j->args);
  j->store(n, acc, step, y);
}

/* The elements of one output where they lie as one run. */
static inline bool fold_is_run(const FoldJob *j) {
  return j->native && j->count <= FOLD_ROW && j->n_reduced <= 1 &&
         (j->n_reduced == 0 || j->reduced_x[0] == 1);
}

/* Outputs [begin, end), some along the innermost kept dim at a time. */
static void fold_rows(int64_t begin, int64_t end, void *arg) {
  const FoldJob *j = arg;
  int inner = j->n_kept - 1;
  int64_t size = inner < 0 ? 1 : j->kept[inner], step_x = inner < 0 ? 0 : j->kept_x[inner],
          step_y = inner < 0 ? 0 : j->kept_y[inner];
  bool run = fold_is_run(j);
  while (begin < end) {
    Word acc[2 * FOLD_BATCH];
    int64_t x, y, n = size - begin % size;
    if (n > end - begin) n = end - begin;
    if (n > FOLD_BATCH) n = FOLD_BATCH;
    fold_place(j, j->n_kept, begin, &x, &y);
    fold_start(j, n, acc, FOLD_BATCH);
    for (int64_t i = 0; i < n; i++) {
      Word one[2] = {acc[i], acc[FOLD_BATCH + i]};
      const char *from = j->x + (x + i * step_x) * (int64_t)j->x_size;
      if (run) j->fold->row[j->cls](j->count, from, j->args, 0, one);
      else fold_elements(j, from, 0, j->count, one);
      acc[i] = one[0], acc[FOLD_BATCH + i] = one[1];
    }
    fold_finish(j, n, acc, FOLD_BATCH, j->y + y * (int64_t)j->y_size, step_y);
    begin += n;
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
  int64_t most = j->fold->group ? FOLD_GROUP : n > FOLD_WIDTH ? FOLD_TALL / 2 : last - first;
  for (int64_t at = first; at < last;) {
    int64_t from = at % run, rows = run - from < last - at ? run - from : last - at;
    if (rows > most) rows = most;
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

/* What is read and written, behind fold_init. */
static void fold_bind(FoldJob *j, const void *args, const View *x, const View *y) {
  j->args = args;
  j->x = x->data;
  j->y = y->data;
  j->load = block_loads[j->cls][x->dtype];
  j->store = block_stores[j->cls == PW_I64 ? PW_I64 : PW_F64][y->dtype];
  j->x_size = dtype_size((DType)x->dtype);
  j->y_size = dtype_size((DType)y->dtype);
  j->size = j->cls == PW_F32 ? 4 : 8;
  j->native = block_is_native((DType)x->dtype, j->cls);
}

static void fold_execute(FoldJob *j, const void *args, const View *x, const View *y, void *scratch)
    __attribute__((unused));
static void fold_execute(FoldJob *j, const void *args, const View *x, const View *y,
                         void *scratch) {
  if (j->outputs == 0) return;
  fold_bind(j, args, x, y);
  j->partial = scratch;
  if (j->by_rows && j->chunks > 1) fold_shared_rows(j);
  else if (j->by_rows) mf_parallel(j->outputs, 1 + FOLD_GRAIN / (j->count + 16), fold_rows, j);
  else if (j->parts) fold_shared_columns(j);
  else
    mf_parallel(j->outputs / j->width * j->tiles, 1 + FOLD_GRAIN / (FOLD_WIDTH * (j->count + 1)),
                fold_tiles, j);
}

#endif
