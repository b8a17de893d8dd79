/* Attention and its gradients: see src/op/attention.c for what is computed.
 *
 * The products are the vendor's, with the scores in float32 (float64 of float64), and between them
 * a kernel makes of each row of scores its weights, and of each row of their gradients those of the
 * scores. As many heads are done at a time as ATTENTION_CHUNK bytes of scores hold, or rows where
 * one head has more; so the whole matrix of scores is never there. Operands whose batch dims do not
 * lie as one are copied. Bytes: the scores four times, and of halves the weights twice. */
#include "kernel.cuh"
#include "vendor.h"

#define RNG_INLINE static __host__ __device__ __forceinline__
#include "rng_value.h"

enum { ROW_BLOCK = 256, ROW_SHORT = 512 };
static constexpr int64_t ATTENTION_CHUNK = (int64_t)256 << 20;

/* What the ops differ in; see src/op/attention.c. */
struct Manner {
  double scale, fill, keep;
  bool causal, plain, drops;
  uint64_t threshold;
  RngKey key;
};

/* A tensor (heads, rows, columns). */
struct Heads {
  View view;
  void *data;
  int64_t head, row; /* steps */
  bool copied;       /* a result goes home from here */
};

/* Some rows of some heads, and what is made of their scores. */
struct RowParams {
  int64_t first_head, first_row, heads, rows, n, m; /* n: rows of a head */
  Manner how;
  void *scores, *weights, *d; /* (heads, rows, m): compute type; in dtype: weights, and d */
  const void *d_scores;       /* gradients of the weights, of the compute type; NULL: forward */
  void *lse;                  /* (heads, n, plain ? 2 : 1) of the compute type */
  Heads g, y;
  int64_t dv;
  int dtype;
  int nb;
  int64_t batch[MF_MAX_DIMS], mask_batch[MF_MAX_DIMS], draw_batch[MF_MAX_DIMS];
  int64_t draw_first, mask_row, mask_key;
  const void *mask;
  int mask_dtype;
};

/* One row, as its threads see it. */
struct Row {
  int64_t head, i, mask, draw;
};

static __device__ __forceinline__ Row row_at(const RowParams &p, int64_t index) {
  Row r = {p.first_head + index / p.rows, p.first_row + index % p.rows, 0, p.draw_first};
  int64_t rest = r.head;
  for (int d = p.nb - 1; d >= 0; d--) {
    int64_t x = rest % p.batch[d];
    rest /= p.batch[d];
    r.mask += x * p.mask_batch[d];
    r.draw += x * p.draw_batch[d];
  }
  r.mask += r.i * p.mask_row;
  r.draw += r.i * p.m;
  return r;
}

/* Whether the bool mask hides key j. */
static __device__ __forceinline__ bool row_hides(const RowParams &p, const Row &r, int64_t j) {
  return p.mask && p.mask_dtype == BOOL && !((const uint8_t *)p.mask)[r.mask + j * p.mask_key];
}

template <class T>
static __device__ __forceinline__ T row_score(const RowParams &p, const Row &r, int64_t j, T s) {
  if (p.how.causal && j > r.i) return (T)-INFINITY;
  if (row_hides(p, r, j)) return p.how.plain ? (T)p.how.fill : (T)-INFINITY;
  if (p.mask && p.mask_dtype != BOOL)
    s += load_as<T>(p.mask_dtype, p.mask, r.mask + j * p.mask_key);
  return s;
}

/* Whether dropout leaves the weight of key j. */
static __device__ __forceinline__ bool row_keeps(const RowParams &p, const Row &r, int64_t j) {
  uint64_t e = (uint64_t)(r.draw + j), block = e / RNG_GROUP32 * RNG_LANES + e % RNG_LANES;
  uint32_t counter[4] = {(uint32_t)block, (uint32_t)(block >> 32), (uint32_t)p.how.key.stream,
                         (uint32_t)(p.how.key.stream >> 32)};
  uint32_t key[2] = {(uint32_t)p.how.key.seed, (uint32_t)(p.how.key.seed >> 32)}, w[4];
  rng_philox(counter, key, w);
  int k = (int)(e % RNG_GROUP32 / RNG_LANES);
  uint32_t word = k == 0 ? w[0] : k == 1 ? w[1] : k == 2 ? w[2] : w[3];
  return word >= p.how.threshold;
}

template <class F, class T, int W>
static __device__ __forceinline__ T row_all(T v, T *room) {
  return W == WARP ? warp_reduce<F>(v) : block_reduce<F>(v, room);
}

/* Scores become weights; the row's logarithm of the sum is kept. */
template <class T, int W>
static __device__ void row_forward(const RowParams &p, const Row &r, int64_t base, int t, T *room) {
  T *s = (T *)p.scores + base, most = (T)-INFINITY, sum = T(0);
  for (int64_t j = t; j < p.m; j += W) most = OpMax::of(s[j] = row_score(p, r, j, s[j]), most);
  most = row_all<OpMax, T, W>(most, room);
  T from = most == (T)-INFINITY ? T(0) : most;
  for (int64_t j = t; j < p.m; j += W) sum += s[j] = exp(s[j] - from);
  sum = row_all<OpAdd, T, W>(sum, room);
  bool none = !p.m || (most == (T)-INFINITY && !p.how.plain);
  T scale = none ? T(0) : T(1) / sum;
  for (int64_t j = t; j < p.m; j += W) {
    T w = none ? T(0) : s[j] * scale;
    if (p.how.drops) w = row_keeps(p, r, j) ? w * (T)p.how.keep : T(0);
    store_as<T>(p.dtype, p.weights, base + j, w);
  }
  if (t) return;
  int64_t at = r.head * p.n + r.i;
  T *lse = (T *)p.lse;
  if (p.how.plain) lse[2 * at] = most, lse[2 * at + 1] = log(sum);
  else lse[at] = none ? (T)INFINITY : most + log(sum);
}

/* Scores become weights again, and the gradients of weights those of scores. */
template <class T, int W>
static __device__ void row_backward(const RowParams &p, const Row &r, int64_t base, int t,
                                    T *room) {
  const T *s = (const T *)p.scores + base, *ds = (const T *)p.d_scores + base;
  int64_t at = r.head * p.n + r.i, g = r.head * p.g.head + r.i * p.g.row,
          y = r.head * p.y.head + r.i * p.y.row;
  const T *lse = (const T *)p.lse;
  T most = p.how.plain ? lse[2 * at] : lse[at], sum = p.how.plain ? lse[2 * at + 1] : T(0);
  T dot = T(0), scale = (T)p.how.scale, keep = (T)p.how.keep;
  for (int64_t c = t; c < p.dv; c += W)
    dot += load_as<T>(p.dtype, p.g.data, g + c) * load_as<T>(p.dtype, p.y.data, y + c);
  dot = row_all<OpAdd, T, W>(dot, room);
  for (int64_t j = t; j < p.m; j += W) {
    T w = exp(row_score(p, r, j, s[j]) - most - sum), d = ds[j];
    if (p.how.drops) {
      bool kept = row_keeps(p, r, j);
      d = w * ((kept ? d * keep : T(0)) - dot) * scale;
      w = kept ? w * keep : T(0);
    } else {
      d = w * (d - dot) * scale;
    }
    if (p.how.plain && row_hides(p, r, j)) d = T(0);
    store_as<T>(p.dtype, p.weights, base + j, w);
    store_as<T>(p.dtype, p.d, base + j, d);
  }
}

template <class T, int W>
static __global__ void __launch_bounds__(ROW_BLOCK)
    row_kernel(const __grid_constant__ RowParams p) {
  __shared__ __align__(16) T room[WARP];
  int64_t index = (int64_t)blockIdx.x * (ROW_BLOCK / W) + threadIdx.x / W;
  if (index >= p.heads * p.rows) return; /* all of a warp, or of a block */
  Row r = row_at(p, index);
  if (p.d_scores) row_backward<T, W>(p, r, index * p.m, threadIdx.x % W, room);
  else row_forward<T, W>(p, r, index * p.m, threadIdx.x % W, room);
}

template <class T>
static int row_launch(const OpCall *c, const RowParams &p) {
  int64_t n = p.heads * p.rows;
  if (p.m <= ROW_SHORT)
    return LAUNCH(c, (row_kernel<T, WARP>), grid_for(n, ROW_BLOCK / WARP), ROW_BLOCK, 0, p);
  return LAUNCH(c, (row_kernel<T, ROW_BLOCK>), grid_for(n, 1), ROW_BLOCK, 0, p);
}

/* -- Operands ---------------------------------------------------------------------------------- */

struct Dense {
  int64_t stride[MF_MAX_DIMS];
};

/* All batch dims as one; false where they, or the rows, do not lie so. */
static bool heads_lie(const View *v, Heads *h) {
  int nb = v->ndim - 2;
  int64_t columns = v->shape[nb + 1], n = 1, step = 0;
  if (columns > 1 && v->stride[nb + 1] != 1) return false;
  if (v->shape[nb] > 1 && v->stride[nb] < columns) return false;
  for (int d = nb - 1; d >= 0; d--) {
    if (v->shape[d] == 1) continue;
    if (n > 1 && v->stride[d] != n * step) return false;
    if (n == 1) step = v->stride[d];
    n *= v->shape[d];
  }
  h->data = v->data, h->view = *v;
  h->head = step;
  h->row = v->shape[nb] > 1 ? v->stride[nb] : columns;
  h->copied = false;
  return true;
}

/* v, or a dense form of it in `dtype` in scratch, filled unless it is a result. */
static int heads_of(const OpCall *c, const View *v, bool result, Heads *h, Dense *dense) {
  if (heads_lie(v, h) && h->row) return 0;
  View copy = *v;
  int64_t step = 1;
  for (int d = v->ndim - 1; d >= 0; d--) dense->stride[d] = step, step *= v->shape[d];
  copy.stride = dense->stride;
  copy.data = kernel_scratch(c, (size_t)(step > 0 ? step : 1) * dtype_size((DType)v->dtype));
  if (!copy.data) return MF_ENOMEM;
  heads_lie(&copy, h);
  h->copied = true;
  return result ? 0 : copy_launch(c, v, &copy);
}

static int heads_home(const OpCall *c, const Heads *h, const View *v) {
  return h->copied ? copy_launch(c, &h->view, v) : 0;
}

/* Numbers of rows in the compute type, contiguous. */
static int lse_of(const OpCall *c, const View *v, DType t, void **data, Dense *dense) {
  View copy = *v;
  int64_t step = 1;
  for (int d = v->ndim - 1; d >= 0; d--) dense->stride[d] = step, step *= v->shape[d];
  *data = v->data;
  if (v->dtype == t && shape_is_contiguous(v->ndim, v->shape, v->stride)) return 0;
  copy.stride = dense->stride, copy.dtype = t;
  if (!(*data = copy.data = kernel_scratch(c, (size_t)step * dtype_size(t)))) return MF_ENOMEM;
  return copy_launch(c, v, &copy);
}

struct Attention {
  RowParams rows;
  Heads q, k, v;
  int64_t d, heads, chunk_heads, chunk_rows;
  bool is_double;
  void *d_scores;
};

static void attention_mask(RowParams *p, const View *mask) {
  int64_t shape[MF_MAX_DIMS], steps[MF_MAX_DIMS];
  if (view_absent(mask)) return;
  for (int d = 0; d < p->nb; d++) shape[d] = p->batch[d];
  shape[p->nb] = p->n, shape[p->nb + 1] = p->m;
  shape_broadcast_strides(p->nb + 2, shape, mask->ndim, mask->shape, mask->stride, steps);
  for (int d = 0; d < p->nb; d++) p->mask_batch[d] = steps[d];
  p->mask_row = steps[p->nb], p->mask_key = steps[p->nb + 1];
  p->mask = mask->data, p->mask_dtype = mask->dtype;
}

/* Where the weights are in the whole, of which y is a part of some batch indices. */
static void attention_draws(RowParams *p, const View *y) {
  int64_t step = p->n * p->m;
  for (int d = p->nb - 1; d >= 0; d--) {
    p->draw_batch[d] = step;
    if (y->whole) p->draw_first += y->start[d] * step;
    step *= y->whole ? y->whole[d] : y->shape[d];
  }
}

/* Sizes, mask and room for the scores of a chunk. */
static int attention_init(const OpCall *c, Attention *t, const View *mask, const Manner &how,
                          bool backward) {
  const View *q = &c->in[0], *k = &c->in[1], *v = &c->in[2];
  RowParams *p = &t->rows;
  int nd = q->ndim;
  p->nb = nd - 2, p->n = q->shape[nd - 2], p->m = k->shape[nd - 2];
  p->how = how, p->dtype = q->dtype, p->dv = v->shape[nd - 1];
  t->d = q->shape[nd - 1], t->is_double = q->dtype == F64;
  t->heads = 1;
  for (int d = 0; d < p->nb; d++) p->batch[d] = q->shape[d], t->heads *= q->shape[d];
  attention_mask(p, mask);
  if (how.drops) attention_draws(p, &c->out[0]);
  int64_t size = t->is_double ? 8 : 4, row = p->m * size, head = p->n * row;
  t->chunk_heads = head ? ATTENTION_CHUNK / head : t->heads;
  if (t->chunk_heads < 1) t->chunk_heads = 1;
  if (t->chunk_heads > t->heads) t->chunk_heads = t->heads;
  t->chunk_rows = head > ATTENTION_CHUNK && row ? ATTENTION_CHUNK / row : p->n;
  if (t->chunk_rows < 1) t->chunk_rows = 1;
  size_t bytes = scratch_aligned((size_t)(t->chunk_heads * t->chunk_rows * row) + 1);
  bool small = dtype_size((DType)p->dtype) < 4;
  char *at =
      (char *)kernel_scratch(c, bytes * (size_t)(1 + backward + small + (backward && small)));
  if (!at) return MF_ENOMEM;
  p->scores = at;
  t->d_scores = backward ? at + bytes : NULL;
  at += bytes * (size_t)(1 + backward);
  p->weights = small ? at : (char *)p->scores;
  p->d = small ? at + bytes : (char *)t->d_scores;
  return 0;
}

/* -- Products ---------------------------------------------------------------------------------- */

/* One side of a product: a matrix a head. */
struct Side {
  const void *data;
  int64_t row, head;
  bool turned;
};

static Side side(const Attention &t, const Heads &h, int64_t row, bool turned) {
  int64_t at = t.rows.first_head * h.head + row * h.row;
  return Side{(char *)h.data + at * (int64_t)dtype_size((DType)t.rows.dtype), h.row, h.head,
              turned};
}
static Side side_of_rows(const Attention &t, const void *data, bool turned) {
  return Side{data, t.rows.m, t.rows.rows * t.rows.m, turned};
}

/* to (m, n) = alpha a b, added to what is there where `add`; nothing where it is empty. */
static int multiply(const OpCall *c, const Attention &t, int64_t m, int64_t n, int64_t k,
                    const Side &a, const Side &b, const Side &to, int to_dtype, double alpha,
                    bool add) {
  Gemm g = {};
  g.m = m, g.n = n, g.k = k, g.batch = t.rows.heads;
  g.a = a.data, g.lda = a.row, g.a_batch = a.head, g.a_turned = a.turned;
  g.b = b.data, g.ldb = b.row, g.b_batch = b.head, g.b_turned = b.turned;
  g.c = (void *)to.data, g.ldc = to.row, g.c_batch = to.head;
  g.dtype = t.rows.dtype, g.c_dtype = to_dtype;
  g.alpha = alpha, g.beta = add;
  if (!m || !n || !g.batch) return 0;
  if (k) return vendor_gemm(c, &g);
  int64_t shape[3] = {g.batch, m, n}, stride[3] = {g.c_batch, g.ldc, 1};
  View zero = {};
  zero.data = g.c, zero.shape = shape, zero.stride = stride, zero.ndim = 3;
  zero.dtype = (uint8_t)to_dtype;
  return add ? 0 : copy_fill(c, &zero, 0);
}

/* The next chunk of rows; false at the end. */
static bool next_chunk(Attention *t) {
  RowParams *p = &t->rows;
  if (!p->heads) p->first_row = 0;
  else if (p->first_row + p->rows < p->n) p->first_row += p->rows;
  else p->first_head += p->heads, p->first_row = 0;
  if (p->first_head >= t->heads || !p->n) return false;
  p->heads = t->heads - p->first_head, p->rows = p->n - p->first_row;
  if (p->heads > t->chunk_heads) p->heads = t->chunk_heads;
  if (p->rows > t->chunk_rows) p->rows = t->chunk_rows;
  return true;
}

static int scores(const OpCall *c, const Attention &t) {
  const RowParams &p = t.rows;
  return multiply(c, t, p.rows, p.m, t.d, side(t, t.q, p.first_row, false), side(t, t.k, 0, true),
                  side_of_rows(t, p.scores, false), t.is_double ? F64 : F32, p.how.scale, false);
}

static int forward(const OpCall *c, const Manner &how) {
  Attention t = {};
  Dense dense[5];
  Heads y;
  RowParams *p = &t.rows;
  int rc = heads_of(c, &c->in[0], false, &t.q, &dense[0]);
  if (!rc) rc = heads_of(c, &c->in[1], false, &t.k, &dense[1]);
  if (!rc) rc = heads_of(c, &c->in[2], false, &t.v, &dense[2]);
  if (!rc) rc = heads_of(c, &c->out[0], true, &y, &dense[3]);
  if (!rc) rc = attention_init(c, &t, &c->in[3], how, false);
  p->lse = c->out[1].data;
  while (!rc && next_chunk(&t)) {
    rc = scores(c, t);
    if (!rc) rc = t.is_double ? row_launch<double>(c, *p) : row_launch<float>(c, *p);
    if (!rc)
      rc = multiply(c, t, p->rows, p->dv, p->m, side_of_rows(t, p->weights, false),
                    side(t, t.v, 0, false), side(t, y, p->first_row, false), p->dtype, 1, false);
  }
  return rc ? rc : heads_home(c, &y, &c->out[0]);
}

static int backward_chunk(const OpCall *c, Attention *t, const Heads &g, const Heads *out) {
  RowParams *p = &t->rows;
  bool add = p->first_row > 0;
  int t_dtype = t->is_double ? F64 : F32;
  int rc = scores(c, *t);
  if (!rc)
    rc = multiply(c, *t, p->rows, p->m, p->dv, side(*t, g, p->first_row, false),
                  side(*t, t->v, 0, true), side_of_rows(*t, t->d_scores, false), t_dtype, 1, false);
  p->d_scores = t->d_scores;
  if (!rc) rc = t->is_double ? row_launch<double>(c, *p) : row_launch<float>(c, *p);
  Side w = side_of_rows(*t, p->weights, true), d = side_of_rows(*t, p->d, true);
  if (!rc)
    rc = multiply(c, *t, p->m, p->dv, p->rows, w, side(*t, g, p->first_row, false),
                  side(*t, out[2], 0, false), p->dtype, 1, add);
  if (!rc)
    rc = multiply(c, *t, p->m, t->d, p->rows, d, side(*t, t->q, p->first_row, false),
                  side(*t, out[1], 0, false), p->dtype, 1, add);
  d.turned = false;
  if (!rc)
    rc = multiply(c, *t, p->rows, t->d, p->m, d, side(*t, t->k, 0, false),
                  side(*t, out[0], p->first_row, false), p->dtype, 1, false);
  return rc;
}

static int backward(const OpCall *c, const Manner &how) {
  Attention t = {};
  Dense dense[9];
  Heads out[3];
  RowParams *p = &t.rows;
  int rc = heads_of(c, &c->in[0], false, &t.q, &dense[0]);
  if (!rc) rc = heads_of(c, &c->in[1], false, &t.k, &dense[1]);
  if (!rc) rc = heads_of(c, &c->in[2], false, &t.v, &dense[2]);
  if (!rc) rc = heads_of(c, &c->in[3], false, &p->g, &dense[3]);
  if (!rc) rc = heads_of(c, &c->in[4], false, &p->y, &dense[4]);
  for (int k = 0; k < 3 && !rc; k++) rc = heads_of(c, &c->out[k], true, &out[k], &dense[5 + k]);
  if (!rc) rc = attention_init(c, &t, &c->in[6], how, true);
  if (!rc) rc = lse_of(c, &c->in[5], t.is_double ? F64 : F32, &p->lse, &dense[8]);
  for (int k = 1; k < 3 && !rc && !p->n; k++) rc = copy_fill(c, &c->out[k], 0);
  while (!rc && next_chunk(&t)) rc = backward_chunk(c, &t, p->g, out);
  for (int k = 0; k < 3 && !rc && p->n; k++) rc = heads_home(c, &out[k], &c->out[k]);
  return rc;
}

/* -- The ops ----------------------------------------------------------------------------------- */

static Manner manner(bool causal, double scale) {
  Manner m = {};
  m.scale = scale, m.causal = causal;
  return m;
}
static Manner plain_manner(bool causal, double scale, double fill) {
  Manner m = manner(causal, scale);
  m.plain = true, m.fill = fill;
  return m;
}
template <class A>
static Manner drop_manner(const A *a) {
  Manner m =
      a->has_fill ? plain_manner(a->is_causal, a->scale, a->fill) : manner(a->is_causal, a->scale);
  m.drops = true;
  m.keep = a->p < 1 ? 1 / (1 - a->p) : 0;
  m.threshold = (uint64_t)(a->p * 0x1p32);
  m.key = a->generator;
  return m;
}

static int attention_cuda(const OpCall *c) {
  const struct attention_args *a = (const struct attention_args *)c->args;
  return forward(c, manner(a->is_causal, a->scale));
}
KERNEL(attention, attention_cuda)

static int attention_backward_cuda(const OpCall *c) {
  const struct attention_backward_args *a = (const struct attention_backward_args *)c->args;
  return backward(c, manner(a->is_causal, a->scale));
}
KERNEL(attention_backward, attention_backward_cuda)

static int plain_attention_cuda(const OpCall *c) {
  const struct plain_attention_args *a = (const struct plain_attention_args *)c->args;
  return forward(c, plain_manner(a->is_causal, a->scale, a->fill));
}
KERNEL(plain_attention, plain_attention_cuda)

static int plain_attention_backward_cuda(const OpCall *c) {
  const struct plain_attention_backward_args *a =
      (const struct plain_attention_backward_args *)c->args;
  return backward(c, plain_manner(a->is_causal, a->scale, a->fill));
}
KERNEL(plain_attention_backward, plain_attention_backward_cuda)

static int drop_attention_cuda(const OpCall *c) {
  return forward(c, drop_manner((const struct drop_attention_args *)c->args));
}
KERNEL(drop_attention, drop_attention_cuda)

static int drop_attention_backward_cuda(const OpCall *c) {
  return backward(c, drop_manner((const struct drop_attention_backward_args *)c->args));
}
KERNEL(drop_attention_backward, drop_attention_backward_cuda)
