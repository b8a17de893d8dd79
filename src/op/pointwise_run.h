/* The driver of pointwise kernels: walks all operands together in blocks, converting what is not of
 * the compute type or not contiguous.
 *
 * Static, since it belongs to one instruction set. Operands are one of three kinds: flat ones are
 * used in place, constant ones (numbers, 0-d, broadcast to all) are filled into a block once a
 * thread, others are gathered block by block. Where all are flat or constant along long innermost
 * rows (a bias, a channel's scale, a slice), each row is computed in place. */
#ifndef MF_POINTWISE_RUN_H
#define MF_POINTWISE_RUN_H
#include "block.h"
#include "op_ids.h"
#include "thread.h"

enum { PW_GRAIN = 1 << 15, PW_PAD = 16, PW_SMALL = 128, PW_ROW = 64 /* the shortest row */ };

typedef enum PwKind { PW_FLAT, PW_CONSTANT, PW_GATHER } PwKind;

typedef struct PwJob {
  Walk walk;
  PointwiseFn *fn;
  const void *args;
  PointwiseClass cls;
  PwKind kind[WALK_OPERANDS];
  BlockConvert *convert[WALK_OPERANDS]; /* [0] stores */
  size_t out_size;                      /* bytes an element that the kernel writes */
  bool all_flat, rows;
} PwJob;

static inline size_t pw_class_size(PointwiseClass c) {
  return c == PW_F32 ? 4 : 8;
}

/* Fills n elements of a block with the one at `from`. */
static inline void pw_fill(BlockConvert *convert, PointwiseClass cls, const void *from, int64_t n,
                           BlockBuffer *buffer) {
  convert(1, from, 1, buffer);
  float f = buffer->f32[0];
  int64_t v = buffer->i64[0];
  if (cls == PW_F32)
    for (int64_t i = 1; i < n; i++) buffer->f32[i] = f;
  else
    for (int64_t i = 1; i < n; i++) buffer->i64[i] = v;
}

/* The inputs of n <= BLOCK elements from `first`, filled up to a multiple of PW_PAD, which is
 * returned. */
static int64_t pw_inputs(const PwJob *j, int64_t first, int64_t n, BlockBuffer *buffers,
                         const void **in) {
  size_t size = pw_class_size(j->cls);
  int64_t padded = (n + PW_PAD - 1) & ~(int64_t)(PW_PAD - 1);
  for (int k = 1; k < j->walk.n; k++) {
    char *flat = j->walk.data[k] + first * (int64_t)size;
    in[k - 1] = &buffers[k];
    if (j->kind[k] == PW_GATHER)
      walk_rows(&j->walk, k, first, n, j->convert[k], &buffers[k], size, false);
    else if (j->kind[k] == PW_FLAT && padded == n) in[k - 1] = flat;
    else if (j->kind[k] == PW_FLAT) memcpy(&buffers[k], flat, (size_t)n * size);
    if (padded != n && j->kind[k] != PW_CONSTANT)
      memset((char *)&buffers[k] + (size_t)n * size, 0, (size_t)(padded - n) * size);
  }
  return padded;
}

/* One block of n <= BLOCK elements from `first`. */
static void pw_block(const PwJob *j, int64_t first, int64_t n, BlockBuffer *buffers) {
  const void *in[WALK_OPERANDS];
  int64_t padded = pw_inputs(j, first, n, buffers, in);
  if (j->kind[0] == PW_FLAT && padded == n) {
    j->fn(n, j->args, in, j->walk.data[0] + first * (int64_t)j->out_size);
    return;
  }
  j->fn(padded, j->args, in, &buffers[0]);
  if (j->kind[0] == PW_FLAT)
    memcpy(j->walk.data[0] + first * (int64_t)j->out_size, &buffers[0], (size_t)n * j->out_size);
  else walk_rows(&j->walk, 0, first, n, j->convert[0], &buffers[0], j->out_size, true);
}

static void pw_range(int64_t begin, int64_t end, void *arg) {
  const PwJob *j = arg;
  BlockBuffer buffers[WALK_OPERANDS];
  if (j->all_flat) {
    const void *in[WALK_OPERANDS];
    size_t size = pw_class_size(j->cls);
    int64_t whole = (end - begin) & ~(int64_t)(PW_PAD - 1);
    for (int k = 1; k < j->walk.n; k++) in[k - 1] = j->walk.data[k] + begin * (int64_t)size;
    if (whole) j->fn(whole, j->args, in, j->walk.data[0] + begin * (int64_t)j->out_size);
    if (begin + whole < end) pw_block(j, begin + whole, end - begin - whole, buffers);
    return;
  }
  for (int k = 1; k < j->walk.n; k++)
    if (j->kind[k] == PW_CONSTANT)
      pw_fill(j->convert[k], j->cls, j->walk.data[k], BLOCK, &buffers[k]);
  for (int64_t i = begin; i < end; i += BLOCK)
    pw_block(j, i, end - i < BLOCK ? end - i : BLOCK, buffers);
}

/* n < BLOCK elements of a row, operand k at p[k]; constant ones are filled already. */
static void pw_row_rest(const PwJob *j, int64_t n, char *const *p, BlockBuffer *buffers) {
  const void *in[WALK_OPERANDS];
  size_t size = pw_class_size(j->cls);
  for (int k = 1; k < j->walk.n; k++) {
    in[k - 1] = &buffers[k];
    if (!j->walk.step[k][j->walk.ndim - 1]) continue;
    memset(&buffers[k], 0, PW_PAD * size);
    memcpy(&buffers[k], p[k], (size_t)n * size);
  }
  j->fn(PW_PAD, j->args, in, &buffers[0]);
  memcpy(p[0], &buffers[0], (size_t)n * j->out_size);
}

/* n elements of a row, operand k at p[k]. */
static void pw_row(const PwJob *j, int64_t n, char **p, BlockBuffer *buffers) {
  const void *in[WALK_OPERANDS];
  int64_t size = (int64_t)pw_class_size(j->cls), run = n & ~(int64_t)(PW_PAD - 1);
  for (int k = 1; k < j->walk.n; k++) {
    in[k - 1] = p[k];
    if (j->walk.step[k][j->walk.ndim - 1]) continue;
    pw_fill(j->convert[k], j->cls, p[k],
            n < BLOCK ? (n + PW_PAD - 1) & ~(int64_t)(PW_PAD - 1) : BLOCK, &buffers[k]);
    in[k - 1] = &buffers[k];
    if (run > BLOCK) run = BLOCK;
  }
  while (n >= PW_PAD) {
    int64_t m = n < run ? n & ~(int64_t)(PW_PAD - 1) : run;
    j->fn(m, j->args, in, p[0]);
    p[0] += m * (int64_t)j->out_size;
    for (int k = 1; k < j->walk.n; k++)
      if (j->walk.step[k][j->walk.ndim - 1]) in[k - 1] = p[k] += m * size;
    n -= m;
  }
  if (n) pw_row_rest(j, n, p, buffers);
}

static void pw_rows(int64_t begin, int64_t end, void *arg) {
  const PwJob *j = arg;
  const Walk *w = &j->walk;
  BlockBuffer buffers[WALK_OPERANDS];
  int inner = w->ndim - 1;
  while (begin < end) {
    char *p[WALK_OPERANDS];
    int64_t from = begin % w->shape[inner], row = begin / w->shape[inner];
    int64_t n = w->shape[inner] - from < end - begin ? w->shape[inner] - from : end - begin;
    for (int k = 0; k < w->n; k++)
      p[k] = w->data[k] + from * w->step[k][inner] * (int64_t)w->size[k];
    for (int d = inner - 1; d >= 0; d--) {
      int64_t i = d ? row % w->shape[d] : row;
      row = d ? row / w->shape[d] : 0;
      for (int k = 0; k < w->n; k++) p[k] += i * w->step[k][d] * (int64_t)w->size[k];
    }
    pw_row(j, n, p, buffers);
    begin += n;
  }
}

/* Kernels with bool results write bytes; a result with gaps is scattered byte by byte. */
static void block_copy_u8(int64_t n, const void *from, int64_t step, void *to) {
  const uint8_t *src = from;
  uint8_t *dst = to;
  for (int64_t i = 0; i < n; i++) dst[i * step] = src[i];
}

/* Whether the operand is n elements one behind the other, in the order of every other such operand:
 * it broadcasts to n elements, so only dims of size 1 may differ. */
static inline bool pw_is_plain(const View *v, int64_t n) {
  return view_numel(v) == n && view_is_contiguous(v);
}

/* One block at most, plain operands and single elements: without the general walk, which costs more
 * than the arithmetic. False when the operands are not so. */
static bool pw_small(PointwiseFn *fn, PointwiseClass cls, bool bool_out, const void *args, int n_in,
                     const View *in, const View *out) {
  int64_t n = view_numel(out), padded = (n + PW_PAD - 1) & ~(int64_t)(PW_PAD - 1);
  size_t size = pw_class_size(cls), out_size = bool_out ? 1 : size;
  const void *data[WALK_OPERANDS];
  BlockBuffer buffers[WALK_OPERANDS];
  bool native = bool_out ? out->dtype == BOOL : block_is_native((DType)out->dtype, cls);
  if (n > PW_SMALL || !native || !view_is_contiguous(out)) return false;
  for (int k = 0; k < n_in; k++) {
    bool single = view_numel(&in[k]) == 1;
    data[k] = &buffers[k + 1];
    if (!single && (!block_is_native((DType)in[k].dtype, cls) || !pw_is_plain(&in[k], n)))
      return false;
    if (single) {
      pw_fill(block_loads[cls][in[k].dtype], cls, in[k].data, padded, &buffers[k + 1]);
    } else if (padded == n) {
      data[k] = in[k].data;
    } else {
      char *to = (char *)&buffers[k + 1];
      memset(to + (size_t)(padded - PW_PAD) * size, 0, PW_PAD * size);
      memcpy(to, in[k].data, (size_t)n * size);
    }
  }
  void *to = padded == n ? out->data : &buffers[0];
  fn(padded, args, data, to);
  if (padded != n) memcpy(out->data, to, (size_t)n * out_size);
  return true;
}

/* Sets a job up for running `fn` of class `cls`, which writes bool when `bool_out`, over the
 * operands. */
static void pw_init(PwJob *j, PointwiseFn *fn, PointwiseClass cls, bool bool_out, const void *args,
                    int n_in, const View *in, const View *out) {
  j->fn = fn;
  j->args = args;
  j->cls = cls;
  j->out_size = bool_out ? 1 : pw_class_size(cls);
  walk_init(&j->walk, out, n_in, in);
  bool native = bool_out ? out->dtype == BOOL : block_is_native((DType)out->dtype, cls);
  j->kind[0] = native && walk_is_flat(&j->walk, 0) ? PW_FLAT : PW_GATHER;
  j->convert[0] = bool_out ? block_copy_u8 : block_stores[cls][out->dtype];
  j->all_flat = j->kind[0] == PW_FLAT;
  for (int k = 1; k <= n_in; k++) {
    j->convert[k] = block_loads[cls][in[k - 1].dtype];
    bool flat = block_is_native((DType)in[k - 1].dtype, cls) && walk_is_flat(&j->walk, k);
    j->kind[k] = flat ? PW_FLAT : walk_is_constant(&j->walk, k) ? PW_CONSTANT : PW_GATHER;
    j->all_flat &= flat;
  }
  int inner = j->walk.ndim - 1;
  j->rows = !j->all_flat && inner >= 0 && j->walk.shape[inner] >= PW_ROW && native &&
            j->walk.step[0][inner] == 1;
  for (int k = 1; k <= n_in && j->rows; k++) {
    int64_t step = j->walk.step[k][inner];
    j->rows = step == 0 || (step == 1 && block_is_native((DType)in[k - 1].dtype, cls));
  }
}

/* Runs it. */
__attribute__((unused)) static int pw_run(PointwiseFn *fn, PointwiseClass cls, bool bool_out,
                                          const void *args, int n_in, const View *in,
                                          const View *out) {
  PwJob j;
  if (pw_small(fn, cls, bool_out, args, n_in, in, out)) return 0;
  pw_init(&j, fn, cls, bool_out, args, n_in, in, out);
  mf_parallel(j.walk.numel, PW_GRAIN, j.rows ? pw_rows : pw_range, &j);
  return 0;
}

#endif
