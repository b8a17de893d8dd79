/* Masks: masked_select, masked_scatter, nonzero.
 *
 * masked_select and nonzero find how large their result is while inferring it, from the data
 * (OP_DATA), in chunks whose counts the kernel computes again: chunks have fixed sizes, so that the
 * order of the result never depends on the number of threads. */
#include <stdio.h>

#include "copy_views.h"
#include "op_args.h"

enum { CHUNK = 1 << 14, CHUNKS_MAX = 1 << 12 };

static int want_mask(Infer *I, int k) {
  char name[64];
  if (I->in[k]->dtype == BOOL) return 0;
  return infer_error(I, "%s must be bool, is %s; compare or convert it with :bool()",
                     infer_name(I, k, name, sizeof name), dtype_name((DType)I->in[k]->dtype));
}

static int common(Infer *I, int n, int *ndim, int64_t *shape) {
  char have[SHAPE_TEXT_MAX], want[SHAPE_TEXT_MAX];
  *ndim = 0;
  for (int k = 0; k < n; k++)
    if (!shape_broadcast(ndim, shape, I->in[k]->ndim, I->in[k]->shape))
      return infer_error(
          I, "shapes do not broadcast: x is %s, mask is %s; sizes of a dim must be equal or 1",
          shape_text(I->in[0]->ndim, I->in[0]->shape, have),
          shape_text(I->in[1]->ndim, I->in[1]->shape, want));
  return 0;
}

/* -- Counting ---------------------------------------------------------------------------------- */

typedef struct CountJob {
  Walk walk;          /* operand 0: the shape walked, contiguous; 1: what is tested */
  int64_t chunk;      /* elements */
  int64_t *count;     /* per chunk */
  BlockConvert *test; /* to bytes 0 and 1 */
} CountJob;

/* The elements of one chunk that are not zero, as bytes. */
#define TEST(name, T, expr)                                                      \
  static void test_##name(int64_t n, const void *from, int64_t step, void *to) { \
    const T *src = from;                                                         \
    uint8_t *dst = to;                                                           \
    for (int64_t i = 0; i < n; i++) {                                            \
      T v = src[i * step];                                                       \
      dst[i] = (expr) != 0;                                                      \
    }                                                                            \
  }
TEST(BOOL, uint8_t, v)
TEST(U8, uint8_t, v)
TEST(I8, int8_t, v)
TEST(I16, int16_t, v)
TEST(I32, int32_t, v)
TEST(I64, int64_t, v)
TEST(F16, uint16_t, v & 0x7fff)
TEST(BF16, uint16_t, v & 0x7fff)
TEST(F32, float, v)
TEST(F64, double, v)
#define X(id, ctype, text, kind) test_##id,
static BlockConvert *const tests[] = {DTYPES(X)};
#undef X

/* Walks x broadcast to (ndim, shape) in the order of its elements. */
static void count_init(CountJob *j, const View *x, int ndim, const int64_t *shape, int64_t *stride,
                       int64_t *count) {
  View like = {.shape = shape, .stride = stride, .ndim = (int8_t)ndim, .dtype = BOOL};
  shape_contiguous(ndim, shape, stride);
  walk_init(&j->walk, &like, 1, x);
  j->test = tests[x->dtype];
  j->count = count;
  j->chunk = CHUNK;
  while ((j->walk.numel + j->chunk - 1) / j->chunk > CHUNKS_MAX) j->chunk *= 2;
}

static int64_t count_chunks(const CountJob *j) {
  return (j->walk.numel + j->chunk - 1) / j->chunk;
}

static void count_range(int64_t begin, int64_t end, void *arg) {
  const CountJob *j = arg;
  uint8_t block[BLOCK];
  for (int64_t c = begin; c < end; c++) {
    int64_t stop = (c + 1) * j->chunk < j->walk.numel ? (c + 1) * j->chunk : j->walk.numel,
            total = 0;
    for (int64_t i = c * j->chunk; i < stop; i += BLOCK) {
      int64_t n = stop - i < BLOCK ? stop - i : BLOCK;
      walk_rows(&j->walk, 1, i, n, j->test, block, 1, false);
      int part = 0;
      for (int64_t k = 0; k < n; k++) part += block[k];
      total += part;
    }
    j->count[c] = total;
  }
}

/* Counts, and makes of counts the place where each chunk's results begin. Returns the sum. */
static int64_t count_run(CountJob *j) {
  int64_t total = 0, chunks = count_chunks(j);
  mf_parallel(chunks, 4, count_range, j);
  for (int64_t c = 0; c < chunks; c++) {
    int64_t n = j->count[c];
    j->count[c] = total;
    total += n;
  }
  return total;
}

static int64_t count_nonzero(const View *x, int ndim, const int64_t *shape) {
  CountJob j;
  int64_t stride[MF_MAX_DIMS], count[CHUNKS_MAX];
  count_init(&j, x, ndim, shape, stride, count);
  return count_run(&j);
}

/* -- masked_select, masked_scatter ------------------------------------------------------------- */

static int masked_select_infer(Infer *I) {
  int ndim;
  int64_t shape[MF_MAX_DIMS];
  int rc = want_mask(I, 1);
  if (!rc) rc = common(I, 2, &ndim, shape);
  return rc ? rc
            : infer_shape(I, (DType)I->in[0]->dtype, 1,
                          (const int64_t[]){count_nonzero(&I->views[1], ndim, shape)});
}

/* Elements where a mask is true, side by side in `packed`, and the whole, in the order of the
 * whole's elements. */
typedef struct PackJob {
  CountJob mask;
  Walk x; /* operand 1: the whole that is read; numel 0: zeros */
  char *packed, *y;
  size_t size;
  bool unpack; /* y = mask ? packed : x; else packed = x where mask */
} PackJob;

typedef int64_t PackFn(int64_t n, const uint8_t *mask, const void *from, void *to);

#define PACK(T)                                                                            \
  static void raw_##T(int64_t n, const void *from, int64_t step, void *to) {               \
    const T *src = from;                                                                   \
    T *dst = to;                                                                           \
    for (int64_t i = 0; i < n; i++) dst[i] = src[i * step];                                \
  }                                                                                        \
  static int64_t pack_##T(int64_t n, const uint8_t *mask, const void *block_, void *to_) { \
    const T *block = block_;                                                               \
    T *to = to_;                                                                           \
    int64_t at = 0;                                                                        \
    for (int64_t k = 0; k < n; k++) to[at] = block[k], at += mask[k];                      \
    return at;                                                                             \
  }                                                                                        \
  static int64_t unpack_##T(int64_t n, const uint8_t *mask, const void *from_, void *y_) { \
    const T *from = from_;                                                                 \
    T *y = y_;                                                                             \
    int64_t at = 0;                                                                        \
    for (int64_t k = 0; k < n; k++)                                                        \
      if (mask[k]) y[k] = from[at++];                                                      \
    return at;                                                                             \
  }
PACK(uint8_t)
PACK(uint16_t)
PACK(uint32_t)
PACK(uint64_t)
static BlockConvert *const raws[] = {raw_uint8_t, raw_uint16_t, raw_uint32_t, raw_uint64_t};
static PackFn *const packs[] = {pack_uint8_t, pack_uint16_t, pack_uint32_t, pack_uint64_t};
static PackFn *const unpacks[] = {unpack_uint8_t, unpack_uint16_t, unpack_uint32_t,
                                  unpack_uint64_t};

static void pack_range(int64_t begin, int64_t end, void *arg) {
  const PackJob *j = arg;
  int log = __builtin_ctz((unsigned)j->size);
  int64_t size = (int64_t)j->size;
  uint8_t mask[BLOCK];
  uint64_t block[BLOCK], packed[BLOCK + 1];
  for (int64_t c = begin; c < end; c++) {
    int64_t stop =
        (c + 1) * j->mask.chunk < j->mask.walk.numel ? (c + 1) * j->mask.chunk : j->mask.walk.numel;
    char *at = j->packed + j->mask.count[c] * size;
    for (int64_t i = c * j->mask.chunk; i < stop; i += BLOCK) {
      int64_t n = stop - i < BLOCK ? stop - i : BLOCK;
      void *whole = j->unpack ? (void *)(j->y + i * size) : block;
      walk_rows(&j->mask.walk, 1, i, n, j->mask.test, mask, 1, false);
      if (j->x.numel) walk_rows(&j->x, 1, i, n, raws[log], whole, j->size, false);
      else memset(whole, 0, (size_t)(n * size));
      int64_t found =
          j->unpack ? unpacks[log](n, mask, at, whole) : packs[log](n, mask, block, packed);
      if (!j->unpack) memcpy(at, packed, (size_t)(found * size));
      at += found * size;
    }
  }
}

/* Over (ndim, shape); x may be NULL for zeros. The packed side must hold at least as many elements
 * as the mask selects. */
static int pack_run(const OpCall *c, const View *x, const View *mask, const View *packed,
                    const View *y, int ndim, const int64_t *shape) {
  PackJob j = {.packed = packed->data,
               .size = dtype_size((DType)packed->dtype),
               .unpack = y != NULL,
               .y = y ? y->data : NULL};
  int64_t stride[MF_MAX_DIMS], count[CHUNKS_MAX];
  View like = {.shape = shape, .stride = stride, .ndim = (int8_t)ndim, .dtype = packed->dtype};
  count_init(&j.mask, mask, ndim, shape, stride, count);
  if (x) walk_init(&j.x, &like, 1, x);
  int64_t n_packed = view_numel(packed);
  if (y && !view_is_contiguous(packed)) { /* elements in order, into the scratch */
    int64_t packed_stride[MF_MAX_DIMS];
    shape_contiguous(packed->ndim, packed->shape, packed_stride);
    copy_views(packed, &(View){.data = c->scratch,
                               .shape = packed->shape,
                               .stride = packed_stride,
                               .ndim = packed->ndim,
                               .dtype = packed->dtype});
    j.packed = c->scratch;
  }
  int64_t n = count_run(&j.mask);
  if (n > n_packed)
    return err_set(MF_EINVAL, "%s: the mask selects %lld elements, source has %lld", c->op->name,
                   (long long)n, (long long)n_packed);
  mf_parallel(count_chunks(&j.mask), 2, pack_range, &j);
  return 0;
}

static int masked_select_cpu(const OpCall *c) {
  int ndim = 0;
  int64_t shape[MF_MAX_DIMS];
  for (int k = 0; k < 2; k++) shape_broadcast(&ndim, shape, c->in[k].ndim, c->in[k].shape);
  return pack_run(c, &c->in[0], &c->in[1], &c->out[0], NULL, ndim, shape);
}

/* The elements of x where mask is true, as a 1-d tensor. */
OP(masked_select, .signature = "masked_select(Tensor x, Tensor mask) -> Tensor", .flags = OP_DATA,
   .infer = masked_select_infer, .cpu = masked_select_cpu)

static int masked_select_backward_infer(Infer *I) {
  const struct masked_select_backward_args *a = I->args;
  const Meta *g = I->in[0], *mask = I->in[1];
  char have[SHAPE_TEXT_MAX], want[SHAPE_TEXT_MAX];
  int rc = want_mask(I, 1), ndim = (int)a->size.n;
  if (!rc) rc = infer_want_ndim(I, 0, 1);
  if (!rc) rc = infer_shape(I, (DType)g->dtype, ndim, a->size.v);
  if (rc) return rc;
  int64_t shape[MF_MAX_DIMS];
  memcpy(shape, a->size.v, sizeof(int64_t) * (size_t)ndim);
  if (mask->ndim <= ndim && shape_broadcast(&ndim, shape, mask->ndim, mask->shape) &&
      shape_equal(ndim, shape, ndim, a->size.v))
    return 0;
  return infer_error(I, "mask of shape %s does not broadcast to size %s",
                     shape_text(mask->ndim, mask->shape, have), shape_text(ndim, a->size.v, want));
}

static size_t dense_scratch(const View *packed) {
  return view_is_contiguous(packed) ? 0
                                    : (size_t)view_numel(packed) * dtype_size((DType)packed->dtype);
}

static size_t masked_select_backward_scratch(const OpCall *c) {
  return dense_scratch(&c->in[0]);
}

static int masked_select_backward_cpu(const OpCall *c) {
  const View *y = &c->out[0];
  return pack_run(c, NULL, &c->in[1], &c->in[0], y, y->ndim, y->shape);
}

/* The gradient of masked_select: g's elements one by one where mask is true, zeros elsewhere, of
 * shape `size`. */
OP(masked_select_backward,
   .signature = "masked_select_backward(Tensor g, Tensor mask, int[] size) -> Tensor",
   .flags = OP_HIDDEN, .infer = masked_select_backward_infer, .cpu = masked_select_backward_cpu,
   .scratch = masked_select_backward_scratch)

static int masked_scatter_infer(Infer *I) {
  int ndim;
  int64_t shape[MF_MAX_DIMS];
  int rc = want_mask(I, 1);
  if (!rc) rc = common(I, 2, &ndim, shape);
  if (!rc) rc = infer_want_same_dtype(I, 0, 2);
  return rc ? rc : infer_shape(I, (DType)I->in[0]->dtype, ndim, shape);
}

static size_t masked_scatter_scratch(const OpCall *c) {
  return dense_scratch(&c->in[2]);
}

static int masked_scatter_cpu(const OpCall *c) {
  const View *y = &c->out[0];
  return pack_run(c, &c->in[0], &c->in[1], &c->in[2], y, y->ndim, y->shape);
}

/* x with the elements of source, one by one, where mask is true. */
OP(masked_scatter, .signature = "masked_scatter(Tensor x, Tensor mask, Tensor source) -> Tensor",
   .flags = OP_HIDDEN, .infer = masked_scatter_infer, .cpu = masked_scatter_cpu,
   .scratch = masked_scatter_scratch)

/* -- nonzero ----------------------------------------------------------------------------------- */

static int nonzero_infer(Infer *I) {
  const Meta *x = I->in[0];
  return infer_shape(I, I64, 2,
                     (const int64_t[]){count_nonzero(&I->views[0], x->ndim, x->shape), x->ndim});
}

typedef struct NonzeroJob {
  CountJob count;
  int ndim;
  const int64_t *shape;
  int64_t *y;
} NonzeroJob;

static void nonzero_range(int64_t begin, int64_t end, void *arg) {
  const NonzeroJob *j = arg;
  uint8_t mask[BLOCK];
  for (int64_t c = begin; c < end; c++) {
    int64_t stop = (c + 1) * j->count.chunk < j->count.walk.numel ? (c + 1) * j->count.chunk
                                                                  : j->count.walk.numel;
    int64_t *y = j->y + j->count.count[c] * j->ndim;
    for (int64_t i = c * j->count.chunk; i < stop; i += BLOCK) {
      int64_t n = stop - i < BLOCK ? stop - i : BLOCK;
      walk_rows(&j->count.walk, 1, i, n, j->count.test, mask, 1, false);
      for (int64_t k = 0; k < n; k++) {
        if (!mask[k]) continue;
        int64_t rest = i + k;
        for (int d = j->ndim - 1; d >= 0; d--) {
          y[d] = rest % j->shape[d];
          rest /= j->shape[d];
        }
        y += j->ndim;
      }
    }
  }
}

static int nonzero_cpu(const OpCall *c) {
  const View *x = &c->in[0];
  NonzeroJob j = {.ndim = x->ndim, .shape = x->shape, .y = c->out[0].data};
  int64_t stride[MF_MAX_DIMS], count[CHUNKS_MAX];
  count_init(&j.count, x, x->ndim, x->shape, stride, count);
  count_run(&j.count);
  mf_parallel(count_chunks(&j.count), 2, nonzero_range, &j);
  return 0;
}

/* The places of the elements that are not zero: int64 (n, dims), in order. */
OP(nonzero, .signature = "nonzero(Tensor x) -> Tensor", .flags = OP_DATA | OP_NO_GRAD,
   .infer = nonzero_infer, .cpu = nonzero_cpu)
