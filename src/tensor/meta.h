/* What a tensor is without its data: shape, strides, dtype, device. Values only, no pointers. */
#ifndef MF_META_H
#define MF_META_H
#include "dtype.h"

enum { MF_MAX_DIMS = 12 };

typedef enum DeviceType { DEVICE_CPU, DEVICE_META, DEVICE_CUDA, DEVICE_TYPES } DeviceType;

/* A list of whole numbers as an op's argument (sizes, dims, ...). */
typedef struct IntList {
  int64_t n, v[MF_MAX_DIMS * 2];
} IntList;

/* Strides and offset count elements. A 0-d tensor has ndim 0 and one element. `number`: a 0-d
 * tensor made from a plain Lua number, which takes part in promotion only by its kind. */
typedef struct Meta {
  int8_t ndim;
  uint8_t dtype;  /* DType */
  uint8_t device; /* its slot in the context: DEVICE_CUDA + n is cuda:n */
  bool number;
  int64_t offset;
  int64_t shape[MF_MAX_DIMS], stride[MF_MAX_DIMS];
} Meta;

/* What a kernel sees of a tensor. `whole` and `start` are the sizes of the logical (global) tensor
 * and where this part begins in each dim; both NULL when the part is the whole. An absent optional
 * tensor has ndim -1. */
typedef struct View {
  void *data; /* the element at index 0 of every dim */
  const int64_t *shape, *stride, *whole, *start;
  int8_t ndim;
  uint8_t dtype;
  bool number;    /* as in Meta */
  uint8_t device; /* as in Meta: a 0-d tensor of the cpu may be among those of another device */
} View;

static inline bool view_absent(const View *v) {
  return v->ndim < 0;
}

/* The number of elements; 1 for 0-d. Sizes are valid, so the product fits int64. */
static inline int64_t shape_numel(int ndim, const int64_t *shape) {
  int64_t n = 1;
  for (int d = 0; d < ndim; d++) n *= shape[d];
  return n;
}
static inline int64_t meta_numel(const Meta *m) {
  return shape_numel(m->ndim, m->shape);
}
static inline int64_t view_numel(const View *v) {
  return shape_numel(v->ndim, v->shape);
}

static inline bool shape_equal(int a_ndim, const int64_t *a, int b_ndim, const int64_t *b) {
  if (a_ndim != b_ndim) return false;
  for (int d = 0; d < a_ndim; d++)
    if (a[d] != b[d]) return false;
  return true;
}

/* Checks sizes >= 0, ndim and that there are at most SHAPE_MAX elements, sizes of 0 counting as 1;
 * sets the error text beginning with `op`. So counts are exact as Lua numbers, and bytes of a few
 * such tensors together cannot overflow. */
#define SHAPE_MAX (INT64_C(1) << 53)
int shape_check(const char *op, int ndim, const int64_t *shape, DType dtype);

/* Row-major strides (dims of size 0 count as 1). */
void shape_contiguous(int ndim, const int64_t *shape, int64_t *stride);
bool shape_is_contiguous(int ndim, const int64_t *shape, const int64_t *stride);
/* NHWC order of a 4-d tensor (N, C, H, W). A tensor may be both contiguous and channels_last (C = 1
 * or H = W = 1). */
void shape_channels_last(const int64_t *shape, int64_t *stride);
bool shape_is_channels_last(int ndim, const int64_t *shape, const int64_t *stride);
/* True when elements occupy each place of one block exactly once, in any order of dims. */
bool shape_is_dense(int ndim, const int64_t *shape, const int64_t *stride);

static inline bool meta_is_contiguous(const Meta *m) {
  return shape_is_contiguous(m->ndim, m->shape, m->stride);
}
static inline bool view_is_contiguous(const View *v) {
  return shape_is_contiguous(v->ndim, v->shape, v->stride);
}

/* Broadcasts `shape` (ndim dims) into out (of *out_ndim dims, grown when needed): PyTorch's rule,
 * aligned at the last dim. False when sizes differ. */
bool shape_broadcast(int *out_ndim, int64_t *out, int ndim, const int64_t *shape);

/* The strides with which a tensor of (ndim, shape, stride) is read as the broadcast shape
 * (out_ndim, out): 0 in broadcast dims. */
void shape_broadcast_strides(int out_ndim, const int64_t *out, int ndim, const int64_t *shape,
                             const int64_t *stride, int64_t *out_stride);

/* The strides of the same memory seen with another shape of the same number of elements; false when
 * it needs a copy. */
bool shape_view_strides(int ndim, const int64_t *shape, const int64_t *stride, int out_ndim,
                        const int64_t *out, int64_t *out_stride);

/* The lowest and highest element offsets touched, relative to the first element; both 0 when empty.
 */
void shape_extent(int ndim, const int64_t *shape, const int64_t *stride, int64_t *low,
                  int64_t *high);

/* "(2, 3)" into buf, which is returned; "()" for 0-d. */
enum { SHAPE_TEXT_MAX = 256 };
char *shape_text(int ndim, const int64_t *shape, char *buf);

#endif
