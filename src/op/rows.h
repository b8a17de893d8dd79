/* Rows by index: the common part of index, index_put_, index_select, index_add, embedding and their
 * gradients.
 *
 * Some dims of a tensor are indexed by whole numbers, given as one or several index tensors that
 * broadcast to n places; the other dims make up a row. A Rows holds the offset of each of the n
 * rows in the indexed tensor, and how a row lies there and on the dense side, where rows stand side
 * by side. Offsets are computed and checked before anything is written (rows_index.h).
 *
 * Writing is deterministic for any number of threads, also where indices repeat: a place of the
 * indexed tensor is written by one thread, in the order of the indices. Long rows are cut across,
 * each thread taking its columns of every row; short ones are dealt out by their offset. */
#ifndef MF_ROWS_H
#define MF_ROWS_H
#include "copy_views.h"
#include "rows_add.h"
#include "rows_index.h"

enum { ROWS_WIDE = 1024 };

typedef struct Rows {
  int64_t n, *offset;
  int ndim; /* dims of a row but for its innermost run */
  int64_t shape[MF_MAX_DIMS], step[MF_MAX_DIMS], dense_step[MF_MAX_DIMS];
  int64_t outer;   /* product of shape */
  int64_t run;     /* elements that lie side by side on both sides */
  int64_t dense_n; /* from a row to the next on the dense side */
  char *data, *dense;
  size_t size;
  DType dtype;
} Rows;

/* -- Layout ------------------------------------------------------------------------------------ */

/* The dims of x that are not in `indexed` (bits), and those of the dense side but for [at, at +
 * places), in the same order; runs merged. */
static void rows_layout(Rows *r, const View *x, uint32_t indexed, const View *dense, int at,
                        int places) {
  r->data = x->data;
  r->dense = dense->data;
  r->dtype = (DType)x->dtype;
  r->size = dtype_size(r->dtype);
  r->ndim = 0;
  r->outer = r->run = 1;
  r->dense_n = places ? dense->stride[at + places - 1] : 0;
  int n = 0;
  for (int d = 0, e = 0; d < x->ndim; d++) {
    if (indexed >> d & 1) continue;
    if (e == at) e += places;
    int64_t size = x->shape[d], step = x->stride[d], dense_step = dense->stride[e++];
    if (size == 1) continue;
    bool merge = n && r->step[n - 1] == step * size && r->dense_step[n - 1] == dense_step * size;
    if (merge) size *= r->shape[--n];
    r->shape[n] = size;
    r->step[n] = step;
    r->dense_step[n++] = dense_step;
  }
  if (n && r->step[n - 1] == 1 && r->dense_step[n - 1] == 1) r->run = r->shape[--n];
  r->ndim = n;
  for (int d = 0; d < n; d++) r->outer *= r->shape[d];
}

/* Offsets of outer place `place` of a row on both sides. */
static void rows_seek(const Rows *r, int64_t place, int64_t *offset, int64_t *dense) {
  *offset = *dense = 0;
  for (int d = r->ndim - 1; d >= 0; d--) {
    int64_t i = place % r->shape[d];
    place /= r->shape[d];
    *offset += i * r->step[d];
    *dense += i * r->dense_step[d];
  }
}

/* -- Moving ------------------------------------------------------------------------------------ */

#define ROWS_BYTES(T)                                                                              \
  static void rows_take_##T(int64_t n, const int64_t *offset, int64_t run, void *x_, void *dense_, \
                            int64_t dense_n) {                                                     \
    const T *x = x_;                                                                               \
    T *dense = dense_;                                                                             \
    if (run == 1) {                                                                                \
      for (int64_t b = 0; b < n; b++) dense[b * dense_n] = x[offset[b]];                           \
      return;                                                                                      \
    }                                                                                              \
    for (int64_t b = 0; b < n; b++) {                                                              \
      if (b + ROWS_AHEAD < n) __builtin_prefetch(x + offset[b + ROWS_AHEAD]);                      \
      memcpy(dense + b * dense_n, x + offset[b], (size_t)run * sizeof(T));                         \
    }                                                                                              \
  }                                                                                                \
  static void rows_set_##T(int64_t n, const int64_t *offset, int64_t run, void *x_, void *dense_,  \
                           int64_t dense_n) {                                                      \
    T *x = x_;                                                                                     \
    const T *dense = dense_;                                                                       \
    for (int64_t b = 0; b < n; b++) {                                                              \
      if (run == 1) x[offset[b]] = dense[b * dense_n];                                             \
      else memcpy(x + offset[b], dense + b * dense_n, (size_t)run * sizeof(T));                    \
    }                                                                                              \
  }
ROWS_BYTES(uint8_t)
ROWS_BYTES(uint16_t)
ROWS_BYTES(uint32_t)
ROWS_BYTES(uint64_t)

static RowsMove *const rows_take[] = {rows_take_uint8_t, rows_take_uint16_t, rows_take_uint32_t,
                                      rows_take_uint64_t};
static RowsMove *const rows_set[] __attribute__((unused)) = {rows_set_uint8_t, rows_set_uint16_t,
                                                             rows_set_uint32_t, rows_set_uint64_t};
static int rows_log_size(const Rows *r) {
  return __builtin_ctz((unsigned)r->size);
}

/* -- dense = x at the offsets ------------------------------------------------------------------ */

static void rows_gather_range(int64_t begin, int64_t end, void *arg) {
  const Rows *r = arg;
  RowsMove *take = rows_take[rows_log_size(r)];
  while (begin < end) { /* units: outer place, then row */
    int64_t place = begin / r->n, b = begin % r->n, n = r->n - b, offset, dense;
    if (n > end - begin) n = end - begin;
    rows_seek(r, place, &offset, &dense);
    take(n, r->offset + b, r->run, r->data + offset * (int64_t)r->size,
         r->dense + (dense + b * r->dense_n) * (int64_t)r->size, r->dense_n);
    begin += n;
  }
}

static void rows_gather(const Rows *r) {
  if (r->n * r->outer * r->run == 0) return;
  int64_t grain = ROWS_GRAIN / r->run;
  mf_parallel(r->n * r->outer, grain ? grain : 1, rows_gather_range, (void *)(uintptr_t)r);
}

/* -- x at the offsets (+)= dense --------------------------------------------------------------- */

typedef struct RowsWrite {
  const Rows *r;
  RowsMove *move;
  int64_t parts;
} RowsWrite;

/* Columns [begin, end) of every row, counted over outer places and runs. */
static void rows_write_columns(int64_t begin, int64_t end, void *arg) {
  const RowsWrite *w = arg;
  const Rows *r = w->r;
  while (begin < end) {
    int64_t place = begin / r->run, from = begin % r->run, run = r->run - from, offset, dense;
    if (run > end - begin) run = end - begin;
    rows_seek(r, place, &offset, &dense);
    w->move(r->n, r->offset, run, r->data + (offset + from) * (int64_t)r->size,
            r->dense + (dense + from) * (int64_t)r->size, r->dense_n);
    begin += run;
  }
}

/* Whose part the row at this offset is: neighbours of one cache line have one owner. */
static int64_t rows_owner(int64_t offset, int64_t parts) {
  uint64_t hash = (uint64_t)(offset >> 5) * UINT64_C(0x9e3779b97f4a7c15) >> 32;
  return (int64_t)(hash * (uint64_t)parts >> 32);
}

static void rows_write_owned(int64_t begin, int64_t end, void *arg) {
  const RowsWrite *w = arg;
  const Rows *r = w->r;
  for (int64_t b = 0; b < r->n; b++) {
    int64_t owner = rows_owner(r->offset[b], w->parts);
    if (owner < begin || owner >= end) continue;
    for (int64_t place = 0; place < r->outer; place++) {
      int64_t offset, dense;
      rows_seek(r, place, &offset, &dense);
      w->move(1, r->offset + b, r->run, r->data + offset * (int64_t)r->size,
              r->dense + (dense + b * r->dense_n) * (int64_t)r->size, 0);
    }
  }
}

static void rows_write(const Rows *r, bool add) {
  RowsWrite w = {.r = r, .move = add ? rows_add[r->dtype] : rows_set[rows_log_size(r)]};
  int64_t columns = r->outer * r->run, all = columns * r->n, threads = thread_count();
  if (all == 0) return;
  if (all < 2 * ROWS_GRAIN || threads == 1) rows_write_columns(0, columns, &w);
  else if (columns * (int64_t)r->size >= ROWS_WIDE * threads)
    mf_parallel(columns, columns / threads, rows_write_columns, &w);
  else {
    w.parts = threads;
    mf_parallel(threads, 1, rows_write_owned, &w);
  }
}

#endif
