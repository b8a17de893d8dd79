/* y = x, converted and broadcast: what every copy is made of. Static, since it belongs to one instruction set. */
#ifndef MF_COPY_VIEWS_H
#define MF_COPY_VIEWS_H
#include "block.h"
#include "thread.h"

enum { COPY_GRAIN = 1 << 16 };

typedef struct CopyJob {
  Walk walk;
  BlockConvert *load, *store;
  PointwiseClass cls;
  bool plain; /* same dtype, both flat */
} CopyJob;

static void copy_range(int64_t begin, int64_t end, void *arg) {
  const CopyJob *j = arg;
  size_t size = j->walk.size[0];
  if (j->plain) {
    memcpy(j->walk.data[0] + begin * (int64_t)size, j->walk.data[1] + begin * (int64_t)size, (size_t)(end - begin) * size);
    return;
  }
  BlockBuffer buffer;
  size_t width = j->cls == PW_F32 ? 4 : 8;
  for (int64_t i = begin; i < end; i += BLOCK) {
    int64_t n = end - i < BLOCK ? end - i : BLOCK;
    walk_rows(&j->walk, 1, i, n, j->load, &buffer, width, false);
    walk_rows(&j->walk, 0, i, n, j->store, &buffer, width, true);
  }
}

/* Moves the elements of one size from rows to rows without a detour through a buffer. */
#define MOVE(name, T)                                                         \
  static void name(int64_t n, const void *from, int64_t step, void *to) {     \
    const T *src = from;                                                      \
    T *dst = to;                                                              \
    for (int64_t i = 0; i < n; i++) dst[i] = src[i * step];                   \
  }
MOVE(move1, uint8_t)
MOVE(move2, uint16_t)
MOVE(move4, uint32_t)
MOVE(move8, uint64_t)

static void move_range(int64_t begin, int64_t end, void *arg) { /* output flat, same dtype: gathers straight into it */
  const CopyJob *j = arg;
  size_t size = j->walk.size[0];
  walk_rows(&j->walk, 1, begin, end - begin, j->load, j->walk.data[0] + begin * (int64_t)size, size, false);
}

/* y = x, converted, broadcast. */
static int copy_views(const View *x, const View *y) __attribute__((unused));
static int copy_views(const View *x, const View *y) {
  CopyJob j;
  walk_init(&j.walk, y, 1, x);
  if (j.walk.numel == 0) return 0;
  bool same = x->dtype == y->dtype, flat = walk_is_flat(&j.walk, 0);
  j.cls = same || !dtype_is_float((DType)x->dtype) ? block_class((DType)y->dtype) : block_class((DType)x->dtype);
  if (!same && dtype_is_float((DType)y->dtype) && !dtype_is_float((DType)x->dtype)) j.cls = block_class((DType)y->dtype);
  j.load = block_loads[j.cls][x->dtype];
  j.store = block_stores[j.cls][y->dtype];
  j.plain = same && flat && walk_is_flat(&j.walk, 1);
  if (same && flat && !j.plain) {
    size_t size = dtype_size((DType)y->dtype);
    j.load = size == 1 ? move1 : size == 2 ? move2 : size == 4 ? move4 : move8;
    mf_parallel(j.walk.numel, COPY_GRAIN, move_range, &j);
    return 0;
  }
  mf_parallel(j.walk.numel, COPY_GRAIN, copy_range, &j);
  return 0;
}

#endif
