/* The offsets of rows by index (rows.h): index tensors are read, checked and multiplied out.
 *
 * Static, since it belongs to one instruction set. */
#ifndef MF_ROWS_INDEX_H
#define MF_ROWS_INDEX_H
#include <stdatomic.h>

#include "block.h"
#include "thread.h"

enum { ROWS_GRAIN = 1 << 14 };

typedef struct RowsIndex {
  Walk walk;
  BlockConvert *load;
  int64_t limit, stride, *offset;
  bool negative, first;
  atomic_llong bad; /* the first place out of range, or n */
} RowsIndex;

static void rows_offsets(int64_t begin, int64_t end, void *arg) {
  RowsIndex *x = arg;
  int64_t ids[BLOCK], low = x->negative ? -x->limit : 0;
  for (int64_t i = begin; i < end; i += BLOCK) {
    int64_t n = end - i < BLOCK ? end - i : BLOCK;
    walk_rows(&x->walk, 1, i, n, x->load, ids, 8, false);
    int64_t wrong = 0;
    for (int64_t k = 0; k < n; k++) wrong |= (ids[k] < low) | (ids[k] >= x->limit);
    if (wrong) {
      int64_t k = 0;
      while (ids[k] >= low && ids[k] < x->limit) k++;
      long long was = atomic_load(&x->bad);
      while (i + k < was && !atomic_compare_exchange_weak(&x->bad, &was, i + k)) {
      }
      return;
    }
    int64_t *offset = x->offset + i;
    if (x->first)
      for (int64_t k = 0; k < n; k++)
        offset[k] = (ids[k] + (ids[k] < 0 ? x->limit : 0)) * x->stride;
    else
      for (int64_t k = 0; k < n; k++)
        offset[k] += (ids[k] + (ids[k] < 0 ? x->limit : 0)) * x->stride;
  }
}

/* "embedding: ids holds 7 at (1, 2); legal are 0 to 4" */
static int rows_out_of_range(const char *op, const char *name, const View *shape, const Walk *w,
                             BlockConvert *load, int64_t place, int64_t limit, bool negative) {
  int64_t value, at[MF_MAX_DIMS], rest = place;
  char text[SHAPE_TEXT_MAX];
  walk_rows(w, 1, place, 1, load, &value, 8, false);
  for (int d = shape->ndim - 1; d >= 0; d--) {
    at[d] = rest % shape->shape[d];
    rest /= shape->shape[d];
  }
  if (limit == 0)
    return err_set(MF_EINVAL, "%s: %s holds %lld, but the dim has size 0", op, name,
                   (long long)value);
  return err_set(MF_EINVAL, "%s: %s holds %lld at position %s; legal are %lld to %lld", op, name,
                 (long long)value, shape_text(shape->ndim, at, text),
                 (long long)(negative ? -limit : 0), (long long)(limit - 1));
}

/* offset[i] (+)= index[i] * stride over the places of `shape` (a view of that shape; its data is
 * not read). */
static int rows_add_index(const char *op, const char *name, const View *shape, const View *index,
                          int64_t limit, int64_t stride, bool negative, bool first,
                          int64_t *offset) {
  int64_t stride_of[MF_MAX_DIMS], n = view_numel(shape);
  View places = *shape;
  shape_contiguous(shape->ndim, shape->shape, stride_of);
  places.stride = stride_of;
  places.dtype = I64;
  RowsIndex x = {.load = block_loads[PW_I64][index->dtype],
                 .limit = limit,
                 .stride = stride,
                 .offset = offset,
                 .negative = negative,
                 .first = first};
  atomic_init(&x.bad, n);
  walk_init(&x.walk, &places, 1, index);
  mf_parallel(n, ROWS_GRAIN, rows_offsets, &x);
  int64_t bad = atomic_load(&x.bad);
  return bad == n ? 0 : rows_out_of_range(op, name, &places, &x.walk, x.load, bad, limit, negative);
}

#endif
