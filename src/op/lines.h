/* Ops along a dim: every line of the operands along it goes through one kernel.
 *
 * Operands are the outputs, then the inputs; all have the same shape but for their length along the
 * line, which may span several adjacent dims. A kernel sees lines as contiguous arrays of a compute
 * type: pointers into the tensors where those lie so, else buffers in scratch, one set a thread.
 * Where lines lie side by side instead (softmax over channels), a panel kernel, if there is one,
 * takes many at a time.
 *
 * Static, since it belongs to one instruction set. */
#ifndef MF_LINES_H
#define MF_LINES_H
#include "block.h"
#include "thread.h"

enum { LINES_OPERANDS = 6, LINES_PANEL = 64, LINES_GRAIN = 1 << 14 };

/* One line of operand k at p[k]; n elements in the first input. Behind the operands stands the room
 * of lines_want, if any. */
typedef void LineFn(int64_t n, const void *args, void *const *p);
/* `width` lines side by side: element r of line i of operand k at p[k][r * step[k] + i]; width <=
 * LINES_PANEL. */
typedef void PanelFn(int64_t n, int64_t width, const void *args, void *const *p,
                     const int64_t *step);

typedef struct Lines {
  Walk walk; /* over the other dims; its operands are ours */
  int n_out, n;
  int64_t length[LINES_OPERANDS], along[LINES_OPERANDS];
  PointwiseClass cls[LINES_OPERANDS];
  bool direct[LINES_OPERANDS];
  DType dtype[LINES_OPERANDS];
  int64_t hop[LINES_OPERANDS]; /* bytes from a line to the next along the innermost other dim */
  int64_t lines, parts;
  LineFn *fn;
  PanelFn *panel;
  const void *args;
  char *scratch;
  size_t offset[LINES_OPERANDS], part_bytes;
} Lines;

/* The step of the dims [first, last) seen as one of *n elements; false where they are not one. */
static bool lines_merge(const View *v, int first, int last, int64_t *n, int64_t *step) {
  *n = 1;
  *step = 1;
  for (int d = last - 1; d >= first; d--) {
    if (v->shape[d] == 1) continue;
    if (*n > 1 && v->stride[d] != *n * *step) return false;
    if (*n == 1) *step = v->stride[d];
    *n *= v->shape[d];
  }
  return true;
}

/* Sets l up for the lines along dims [first, last) of n_out outputs and n_in inputs; the kernels
 * compute in `cls`, but for operands whose bit is set in `ints`, which are int64. False where
 * several dims do not lie as one; the caller then copies. */
static bool lines_init(Lines *l, PointwiseClass cls, uint32_t ints, int first, int last, int n_out,
                       const View *out, int n_in, const View *in) {
  int64_t shape[MF_MAX_DIMS], stride[LINES_OPERANDS][MF_MAX_DIMS];
  View rest[LINES_OPERANDS];
  int ndim = out[0].ndim - (last - first);
  l->n_out = n_out;
  l->n = n_out + n_in;
  l->part_bytes = 0;
  l->panel = NULL;
  for (int k = 0; k < l->n; k++) {
    const View *v = k < n_out ? &out[k] : &in[k - n_out];
    if (!lines_merge(v, first, last, &l->length[k], &l->along[k])) return false;
    rest[k] = *v;
    rest[k].ndim = (int8_t)ndim;
    rest[k].shape = shape;
    rest[k].stride = stride[k];
    for (int d = 0, at = 0; d < v->ndim; d++) {
      if (d >= first && d < last) continue;
      shape[at] = v->shape[d];
      stride[k][at++] = v->stride[d];
    }
    l->dtype[k] = (DType)v->dtype;
    l->cls[k] = ints >> k & 1 ? PW_I64 : cls;
    l->direct[k] =
        block_is_native((DType)v->dtype, l->cls[k]) && (l->along[k] == 1 || l->length[k] <= 1);
    l->offset[k] = l->part_bytes;
    if (!l->direct[k]) l->part_bytes += scratch_aligned((size_t)l->length[k] * 8);
  }
  walk_init(&l->walk, &rest[0], l->n - 1, &rest[1]);
  for (int k = 0; k < l->n && l->walk.ndim; k++)
    l->hop[k] = l->walk.step[k][l->walk.ndim - 1] * (int64_t)l->walk.size[k];
  l->lines = l->walk.numel;
  int64_t threads = thread_count();
  l->parts = l->lines < threads ? l->lines : threads;
  return true;
}

/* Whether panels are possible: lines side by side in all operands. */
static inline bool lines_side_by_side(const Lines *l) {
  int inner = l->walk.ndim - 1;
  if (inner < 0 || l->length[l->n_out] < 2 || l->along[l->n_out] == 1) return false;
  for (int k = 0; k < l->n; k++)
    if (l->walk.step[k][inner] != 1 || !block_is_native(l->dtype[k], l->cls[k])) return false;
  return true;
}

/* Takes `panel` where it fits; call before lines_scratch. */
static inline void lines_use_panels(Lines *l, PanelFn *panel) {
  if (!lines_side_by_side(l)) return;
  l->panel = panel;
  l->part_bytes = 0;
}

/* Room of so many bytes for the kernel, aligned to 64; call before lines_scratch. */
static inline void lines_want(Lines *l, size_t bytes) {
  for (int o = 0; o < l->n; o++) l->offset[o] += scratch_aligned(bytes);
  l->part_bytes += scratch_aligned(bytes);
}

static inline size_t lines_scratch(const Lines *l) {
  return (size_t)l->parts * l->part_bytes;
}

/* A position among the lines: where each operand has its line. */
typedef struct LineAt {
  int64_t index[MF_MAX_DIMS];
  char *at[LINES_OPERANDS];
} LineAt;

/* To line k, counted over the outermost ndim dims. */
static void lines_seek(const Lines *l, int ndim, int64_t k, LineAt *c) {
  for (int o = 0; o < l->n; o++) c->at[o] = l->walk.data[o];
  for (int d = ndim - 1; d >= 0; d--) {
    c->index[d] = k % l->walk.shape[d];
    k /= l->walk.shape[d];
    for (int o = 0; o < l->n; o++)
      c->at[o] += c->index[d] * l->walk.step[o][d] * (int64_t)l->walk.size[o];
  }
}

/* To the next line. */
static inline void lines_next(const Lines *l, LineAt *c) {
  int d = l->walk.ndim - 1;
  if (d < 0) return;
  for (int o = 0; o < l->n; o++) c->at[o] += l->hop[o];
  if (++c->index[d] < l->walk.shape[d]) return;
  int64_t k = 0; /* a carry */
  for (int e = 0; e <= d; e++) k = k * l->walk.shape[e] + c->index[e];
  lines_seek(l, l->walk.ndim, k, c);
}

/* p[o] is where the kernel finds operand o of the line, inputs loaded. */
static inline void lines_open(const Lines *l, const LineAt *c, char *buffers, void **p) {
  for (int o = 0; o < l->n; o++) {
    p[o] = c->at[o];
    if (l->direct[o]) continue;
    p[o] = buffers + l->offset[o];
    if (o >= l->n_out)
      block_loads[l->cls[o]][l->dtype[o]](l->length[o], c->at[o], l->along[o], p[o]);
  }
  p[l->n] = buffers;
}

/* Brings the outputs of the line home. */
static inline void lines_close(const Lines *l, void *const *p, const LineAt *c) {
  for (int o = 0; o < l->n_out; o++)
    if (!l->direct[o])
      block_stores[l->cls[o]][l->dtype[o]](l->length[o], p[o], l->along[o], c->at[o]);
}

static void lines_part(int64_t begin, int64_t end, void *arg) {
  const Lines *l = arg;
  void *p[LINES_OPERANDS + 1];
  LineAt c;
  for (int64_t part = begin; part < end; part++) {
    int64_t k = part * l->lines / l->parts, last = (part + 1) * l->lines / l->parts;
    lines_seek(l, l->walk.ndim, k, &c);
    for (; k < last; k++, lines_next(l, &c)) {
      lines_open(l, &c, l->scratch + (size_t)part * l->part_bytes, p);
      l->fn(l->length[l->n_out], l->args, p);
      lines_close(l, p, &c);
    }
  }
}

static void lines_panels(int64_t begin, int64_t end, void *arg) {
  const Lines *l = arg;
  int inner = l->walk.ndim - 1;
  int64_t width = l->walk.shape[inner], tiles = (width + LINES_PANEL - 1) / LINES_PANEL;
  for (int64_t k = begin; k < end; k++) {
    int64_t c = k % tiles * LINES_PANEL;
    void *p[LINES_OPERANDS];
    LineAt at;
    lines_seek(l, inner, k / tiles, &at);
    for (int o = 0; o < l->n; o++) p[o] = at.at[o] + c * (int64_t)l->walk.size[o];
    l->panel(l->length[l->n_out], width - c < LINES_PANEL ? width - c : LINES_PANEL, l->args, p,
             l->along);
  }
}

static void lines_run(Lines *l, LineFn *fn, const void *args, void *scratch)
    __attribute__((unused));
static void lines_run(Lines *l, LineFn *fn, const void *args, void *scratch) {
  if (l->lines == 0) return;
  l->fn = fn;
  l->args = args;
  l->scratch = scratch;
  int64_t n = l->length[l->n_out] + 1;
  if (l->panel) {
    int64_t width = l->walk.shape[l->walk.ndim - 1],
            tiles = (width + LINES_PANEL - 1) / LINES_PANEL;
    mf_parallel(l->lines / width * tiles, 1 + LINES_GRAIN / (n * LINES_PANEL), lines_panels, l);
    return;
  }
  int64_t grain = 1 + LINES_GRAIN / n,
          parts = (l->lines + grain - 1) / grain; /* too little work for all threads */
  if (parts < l->parts) l->parts = parts;
  mf_parallel(l->parts, 1, lines_part, l);
}

#endif
