/* Images as ops see them: (N, C, H, W), or (C, H, W) for one, in either memory format.
 *
 * A tensor that is dense in both formats (one channel, or one pixel) counts as channels_last only
 * when its strides are exactly that format's. */
#ifndef MF_IMAGE_H
#define MF_IMAGE_H
#include <string.h>

#include "op.h"

/* A view of four dims; keeps its sizes here, so it must not be copied. */
typedef struct Image {
  View view;
  int64_t shape[4], stride[4];
} Image;

static inline void image_set(Image *m, const View *v) {
  int add = v->ndim == 3;
  m->shape[0] = 1;
  m->stride[0] = 0;
  for (int d = 0; d < v->ndim; d++) {
    m->shape[d + add] = v->shape[d];
    m->stride[d + add] = v->stride[d];
  }
  if (add) m->stride[0] = v->shape[0] * v->shape[1] * v->shape[2];
  m->view = *v;
  m->view.ndim = 4;
  m->view.shape = m->shape;
  m->view.stride = m->stride;
}

static inline bool image_strictly_last(const int64_t *shape, const int64_t *stride) {
  int64_t last[4], plain[4];
  shape_channels_last(shape, last);
  shape_contiguous(4, shape, plain);
  return !memcmp(stride, last, sizeof last) && memcmp(stride, plain, sizeof plain);
}

static inline bool image_meta_is_last(const Meta *m) {
  return m->ndim == 4 && image_strictly_last(m->shape, m->stride);
}

/* Input k is an image of floats. */
static inline int image_check(Infer *I, int k) {
  char name[64], shape[SHAPE_TEXT_MAX];
  const Meta *x = I->in[k];
  int rc = infer_want_float(I, k);
  if (rc || x->ndim == 4 || x->ndim == 3) return rc;
  return infer_error(I, "%s must be (N, C, H, W) or (C, H, W), is %s",
                     infer_name(I, k, name, sizeof name), shape_text(x->ndim, x->shape, shape));
}

/* The next output: an image of these sizes, batched as `like` is, channels_last when asked. */
static inline int image_add(Infer *I, const Meta *like, int64_t c, int64_t h, int64_t w,
                            bool last) {
  int64_t shape[4] = {like->shape[0], c, h, w};
  int skip = like->ndim == 3;
  int rc = infer_shape(I, (DType)like->dtype, like->ndim, shape + skip);
  if (!rc && last && !skip) shape_channels_last(shape, I->last->stride);
  return rc;
}

#endif
