/* Copying between views of any strides and dtypes: y = x, converted and broadcast. Static, since it
 * belongs to one instruction set.
 *
 * Elements are walked in the order of y's memory. Of one dtype, rows go straight from x to y; where
 * x lies the other way round (a transposition), in tiles that stay in L1. Other dtypes go through a
 * buffer of the compute type. */
#ifndef MF_COPY_VIEWS_H
#define MF_COPY_VIEWS_H
#include "block.h"
#include "thread.h"

enum { COPY_GRAIN = 1 << 15, COPY_TILE = 16, COPY_SHORT = 256 };

/* dst[i * to] = src[i * from] for elements of one size. */
typedef void CopyMove(int64_t n, const void *from, int64_t from_step, void *to, int64_t to_step);

#define COPY_MOVE(name, T)                                                                        \
  static void name(int64_t n, const void *from, int64_t from_step, void *to, int64_t to_step) {   \
    const T *src = from;                                                                          \
    T *dst = to;                                                                                  \
    if (to_step != 1)                                                                             \
      for (int64_t i = 0; i < n; i++) dst[i * to_step] = src[i * from_step];                      \
    else if (from_step == 1) memcpy(dst, src, (size_t)n * sizeof(T));                             \
    else if (from_step == 0)                                                                      \
      for (int64_t i = 0; i < n; i++) dst[i] = *src;                                              \
    else                                                                                          \
      for (int64_t i = 0; i < n; i++) dst[i] = src[i * from_step];                                \
  }                                                                                               \
  static void name##_tile(int64_t rows, int64_t n, const void *from, int64_t from_step, void *to, \
                          int64_t to_step) {                                                      \
    const T *src = from; /* dst[i * to_step + j] = src[i + j * from_step] */                      \
    T *dst = to;                                                                                  \
    if (rows == COPY_TILE && n == COPY_TILE)                                                      \
      for (int i = 0; i < COPY_TILE; i++)                                                         \
        for (int j = 0; j < COPY_TILE; j++) dst[i * to_step + j] = src[i + j * from_step];        \
    else                                                                                          \
      for (int64_t i = 0; i < rows; i++)                                                          \
        for (int64_t j = 0; j < n; j++) dst[i * to_step + j] = src[i + j * from_step];            \
  }
COPY_MOVE(copy_move1, uint8_t)
COPY_MOVE(copy_move2, uint16_t)
COPY_MOVE(copy_move4, uint32_t)
COPY_MOVE(copy_move8, uint64_t)

typedef void CopyTile(int64_t rows, int64_t n, const void *from, int64_t from_step, void *to,
                      int64_t to_step);

typedef struct CopyJob {
  Walk walk;
  CopyMove *move;
  CopyTile *tile;
  BlockConvert *load, *store;
  PointwiseClass cls;
  bool in_place[2]; /* conversions: y, x are of the compute type and without gaps */
  int across;       /* in tiles: the dim along which x is contiguous */
  int64_t strips;
} CopyJob;

/* A position in a walk of two operands: offsets in elements. */
typedef struct CopyAt {
  int64_t index[MF_MAX_DIMS], to, from;
} CopyAt;

static void copy_seek(const Walk *w, int ndim, int64_t place, CopyAt *at) {
  at->to = at->from = 0;
  for (int d = ndim - 1; d >= 0; d--) {
    at->index[d] = place % w->shape[d];
    place /= w->shape[d];
    at->to += at->index[d] * w->step[0][d];
    at->from += at->index[d] * w->step[1][d];
  }
}

/* Forward by n along the last of ndim dims, not beyond its end. */
static void copy_forward(const Walk *w, int ndim, int64_t n, CopyAt *at) {
  int d = ndim - 1;
  if (d < 0) return;
  at->index[d] += n;
  at->to += n * w->step[0][d];
  at->from += n * w->step[1][d];
  for (; d > 0 && at->index[d] == w->shape[d]; d--) {
    at->to += w->step[0][d - 1] - w->shape[d] * w->step[0][d];
    at->from += w->step[1][d - 1] - w->shape[d] * w->step[1][d];
    at->index[d] = 0;
    at->index[d - 1]++;
  }
}

/* `rows` short rows of so many bytes, a multiple of 16. */
static void copy_strips(int64_t rows, int64_t bytes, const char *from, int64_t from_step, char *to,
                        int64_t to_step) {
  for (; rows > 0; rows--, from += from_step, to += to_step)
    for (int64_t b = 0; b < bytes; b += 16) memcpy(to + b, from + b, 16);
}

/* Whole short rows from the start of one, along the dim outside of the innermost; how many. */
static int64_t copy_whole_rows(const Walk *w, int64_t elements, CopyAt *at) {
  int inner = w->ndim - 1;
  int64_t size = (int64_t)w->size[0], bytes = w->shape[inner] * size;
  if (inner < 1 || at->index[inner] || bytes > COPY_SHORT || bytes % 16 || w->step[0][inner] != 1 ||
      w->step[1][inner] != 1)
    return 0;
  int64_t rows = w->shape[inner - 1] - at->index[inner - 1];
  if (rows > elements / w->shape[inner]) rows = elements / w->shape[inner];
  copy_strips(rows, bytes, w->data[1] + at->from * size, w->step[1][inner - 1] * size,
              w->data[0] + at->to * size, w->step[0][inner - 1] * size);
  if (rows) copy_forward(w, inner, rows, at);
  return rows;
}

static void copy_rows(int64_t begin, int64_t end, void *arg) {
  const CopyJob *j = arg;
  const Walk *w = &j->walk;
  int inner = w->ndim - 1;
  CopyAt at;
  copy_seek(w, w->ndim, begin, &at);
  while (begin < end) {
    int64_t rows = copy_whole_rows(w, end - begin, &at);
    begin += rows * w->shape[inner];
    if (rows) continue;
    int64_t run = w->shape[inner] - at.index[inner];
    if (run > end - begin) run = end - begin;
    j->move(run, w->data[1] + at.from * (int64_t)w->size[0], w->step[1][inner],
            w->data[0] + at.to * (int64_t)w->size[0], w->step[0][inner]);
    copy_forward(w, w->ndim, run, &at);
    begin += run;
  }
}

static void copy_tiles(int64_t begin, int64_t end, void *arg) {
  const CopyJob *j = arg;
  const Walk *w = &j->walk;
  int inner = w->ndim - 1, d = j->across; /* moved to inner - 1 */
  int64_t size = (int64_t)w->size[0];
  for (int64_t s = begin; s < end; s++) {
    CopyAt at;
    copy_seek(w, d, s / j->strips, &at);
    int64_t row = s % j->strips * COPY_TILE,
            rows = w->shape[d] - row < COPY_TILE ? w->shape[d] - row : COPY_TILE;
    char *to = w->data[0] + (at.to + row * w->step[0][d]) * size,
         *from = w->data[1] + (at.from + row) * size;
    for (int64_t k = 0; k < w->shape[inner]; k += COPY_TILE) {
      int64_t n = w->shape[inner] - k < COPY_TILE ? w->shape[inner] - k : COPY_TILE;
      j->tile(rows, n, from + k * w->step[1][inner] * size, w->step[1][inner], to + k * size,
              w->step[0][d]);
    }
  }
}

static void copy_converted(int64_t begin, int64_t end, void *arg) {
  const CopyJob *j = arg;
  BlockBuffer buffer;
  size_t width = j->cls == PW_F32 ? 4 : 8;
  for (int64_t i = begin; i < end; i += BLOCK) {
    int64_t n = end - i < BLOCK ? end - i : BLOCK;
    char *x = j->walk.data[1] + i * (int64_t)width, *y = j->walk.data[0] + i * (int64_t)width;
    if (j->in_place[0]) {
      walk_rows(&j->walk, 1, i, n, j->load, y, width, false);
    } else {
      if (!j->in_place[1]) walk_rows(&j->walk, 1, i, n, j->load, x = (char *)&buffer, width, false);
      walk_rows(&j->walk, 0, i, n, j->store, x, width, true);
    }
  }
}

/* Puts the dim along which x is contiguous next to the innermost, where y is; false when there is
 * none worth it. */
static bool copy_wants_tiles(CopyJob *j) {
  Walk *w = &j->walk;
  int inner = w->ndim - 1;
  if (inner < 1 || w->step[0][inner] != 1 || w->step[1][inner] == 0 || w->step[1][inner] == 1 ||
      w->shape[inner] < 4)
    return false;
  for (int d = 0; d < inner; d++) {
    if (w->step[1][d] != 1 || w->shape[d] < 4) continue;
    for (; d < inner - 1; d++) walk_swap(w, d, d + 1);
    j->across = inner - 1;
    j->strips = (w->shape[inner - 1] + COPY_TILE - 1) / COPY_TILE;
    return true;
  }
  return false;
}

static int copy_same(CopyJob *j) {
  static CopyMove *const moves[] = {copy_move1, copy_move2, copy_move4, copy_move8};
  static CopyTile *const tiles[] = {copy_move1_tile, copy_move2_tile, copy_move4_tile,
                                    copy_move8_tile};
  Walk *w = &j->walk;
  int log = __builtin_ctz((unsigned)w->size[0]);
  j->move = moves[log];
  j->tile = tiles[log];
  if (w->ndim == 0) {
    memcpy(w->data[0], w->data[1], w->size[0]);
    return 0;
  }
  if (copy_wants_tiles(j)) {
    int64_t strips = w->numel / (w->shape[w->ndim - 1] * w->shape[j->across]) * j->strips;
    mf_parallel(strips, 1 + COPY_GRAIN / (w->shape[w->ndim - 1] * COPY_TILE), copy_tiles, j);
  } else {
    mf_parallel(w->numel, COPY_GRAIN, copy_rows, j);
  }
  return 0;
}

/* The compute type through which elements are converted. */
static inline PointwiseClass copy_class(DType from, DType to) {
  return block_class(dtype_is_float(from) && !dtype_is_float(to) ? from : to);
}

/* y = x, converted, broadcast. */
static int copy_views(const View *x, const View *y) __attribute__((unused));
static int copy_views(const View *x, const View *y) {
  CopyJob j;
  walk_init(&j.walk, y, 1, x);
  if (j.walk.numel == 0) return 0;
  if (x->dtype == y->dtype) return copy_same(&j);
  j.cls = copy_class((DType)x->dtype, (DType)y->dtype);
  j.load = block_loads[j.cls][x->dtype];
  j.store = block_stores[j.cls][y->dtype];
  j.in_place[0] = block_is_native((DType)y->dtype, j.cls) && walk_is_flat(&j.walk, 0);
  j.in_place[1] = block_is_native((DType)x->dtype, j.cls) && walk_is_flat(&j.walk, 1);
  mf_parallel(j.walk.numel, COPY_GRAIN, copy_converted, &j);
  return 0;
}

/* y = value, in y's dtype. */
static void copy_fill(const View *y, double value) __attribute__((unused));
static void copy_fill(const View *y, double value) {
  static const int64_t none[1];
  uint64_t element;
  dtype_set_f64((DType)y->dtype, &element, value);
  copy_views(&(View){.data = &element, .shape = none, .stride = none, .dtype = y->dtype}, y);
}

static void copy_zero(const View *y) __attribute__((unused));
static void copy_zero(const View *y) {
  static const int64_t none[1];
  uint64_t element = 0;
  copy_views(&(View){.data = &element, .shape = none, .stride = none, .dtype = y->dtype}, y);
}

#endif
