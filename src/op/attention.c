/* Attention without the whole matrix of scores: y = softmax(scale q k' + mask) v, and its
 * gradients.
 *
 * A head is a pair (batch index) of q (n, d), k (m, d), v (m, dv). ROWS rows of q meet KEYS keys at
 * a time, so that the scores stay in the cache; forward keeps per row the logarithm of its sum of
 * exponentials (lse), from which backward makes the weights again. Forward jobs are blocks of rows,
 * backward jobs whole heads, since rows share the gradients of k and v; so the order of every sum
 * is fixed.
 *
 * Operands are read where they lie as long as their last dim is dense and their rows do not
 * overlap; others, and small floats, through dense float32 copies in scratch. The result has the
 * order of dims in memory that q has: heads cut out of one projection give a result that joins
 * without a copy. A row that may see no key gives zeros.
 *
 * Attention that a program wrote out, as products and a softmax, has its own two ops: a score that
 * is not seen is the number that the program filled in, rows of which nothing is seen are what
 * softmax makes of them, and the weights may go through dropout, whose words are drawn anew for the
 * places that are worked on. Of a row they keep the largest score and the logarithm of the sum
 * apart: next to a number like -1e9 nothing would be left of that. */
#include "copy_views.h"
#include "dnn.h"
#include "gemm.h"
#include "line_math.h"
#include "op_args.h"
#include "pointwise.h"
#include "rng.h"

enum { ROWS = 64, KEYS = 512, OPERANDS = 9 };

/* In the order of the operands: inputs, then the gradients. */
enum { Q, K, V, Y, G, LSE, GQ, GK, GV };

/* What the ops differ in. `plain`: as a program wrote it out; then `fill` is the score of what the
 * mask hides. `drops`: words below `threshold` make weights 0, others are multiplied by `keep`. */
typedef struct Manner {
  double scale, fill, keep;
  bool causal, plain, drops;
  uint64_t threshold;
  RngKey key;
} Manner;

typedef struct Attention {
  int64_t n, m, d, dv; /* rows, keys, and their lengths */
  Manner how;
  bool mask_bool;
  int nb;
  int64_t batch[MF_MAX_DIMS];
  void *data[OPERANDS];
  size_t size;                                                               /* bytes an element */
  int64_t step[OPERANDS][MF_MAX_DIMS];                                       /* of the batch dims */
  int64_t q_step, k_step, v_step, y_step, g_step, gq_step, gk_step, gv_step; /* from row to row */
  const char *mask;
  size_t mask_size;
  int64_t mask_batch[MF_MAX_DIMS], mask_step[2];
  int64_t lse_step;
  int64_t draw_first, draw_batch[MF_MAX_DIMS]; /* numbers of weights among those of the whole */
} Attention;

typedef struct Head {
  void *q, *k, *v, *y, *g, *lse, *gq, *gk, *gv;
  const char *mask;
  int64_t draw; /* the number of its first weight */
} Head;

static void head_set(const Attention *t, int64_t index, Head *h) {
  int64_t at[OPERANDS] = {0}, mask = 0;
  h->draw = t->draw_first;
  for (int d = t->nb - 1; d >= 0; d--) {
    int64_t x = index % t->batch[d];
    index /= t->batch[d];
    for (int k = 0; k < OPERANDS; k++) at[k] += x * t->step[k][d];
    mask += x * t->mask_batch[d];
    h->draw += x * t->draw_batch[d];
  }
  void **to[OPERANDS] = {&h->q, &h->k, &h->v, &h->y, &h->g, &h->lse, &h->gq, &h->gk, &h->gv};
  for (int k = 0; k < OPERANDS; k++)
    *to[k] = t->data[k] ? (char *)t->data[k] + at[k] * (int64_t)t->size : NULL;
  h->mask = t->mask ? t->mask + mask * (int64_t)t->mask_size : NULL;
}

/* The words of weights [first, first + n) of the whole, n <= KEYS. */
static void draw_words(const Attention *t, int64_t first, int64_t n, uint32_t *words) {
  uint32_t group[4][RNG_LANES];
  for (int64_t at = 0; at < n;) {
    int64_t skip = (first + at) % RNG_GROUP32, m = RNG_GROUP32 - skip;
    if (m > n - at) m = n - at;
    rng_group(t->how.key.seed, t->how.key.stream, (uint64_t)(first + at) / RNG_GROUP32, group);
    memcpy(words + at, &group[0][0] + skip, sizeof *words * (size_t)m);
    at += m;
  }
}

static void gemm_part_f32(bool ta, bool tb, int64_t m, int64_t n, int64_t k, const float *a,
                          int64_t lda, const float *b, int64_t ldb, bool add, float *c,
                          int64_t ldc) {
  dnn_sgemm(ta, tb, m, n, k, 1, a, lda, b, ldb, add, c, ldc);
}

static void gemm_part_f64(bool ta, bool tb, int64_t m, int64_t n, int64_t k, const double *a,
                          int64_t lda, const double *b, int64_t ldb, bool add, double *c,
                          int64_t ldc) {
  gemm_f64_serial(m, k, n, a, ta ? 1 : lda, ta ? lda : 1, b, tb ? 1 : ldb, tb ? ldb : 1, add, c,
                  ldc, 1);
}

#define T float
#define NAME(f) f##_f32
#define LINE(f) f##_f32
#define PRODUCT gemm_part_f32
#include "attention_kernels.h"
#undef T
#undef NAME
#undef LINE
#undef PRODUCT
#define T double
#define NAME(f) f##_f64
#define LINE(f) f##_f64
#define PRODUCT gemm_part_f64
#include "attention_kernels.h"
#include "sbp_rule.h"

/* -- Setting up -------------------------------------------------------------------------------- */

typedef struct Scheme {
  DType compute;
  const View *given[OPERANDS]; /* NULL: none */
  bool copy[OPERANDS], copy_mask;
  size_t at[OPERANDS], at_mask, total;
} Scheme;

static bool rows_readable(const View *v, DType want) {
  int64_t cols = v->shape[v->ndim - 1], rows = v->shape[v->ndim - 2];
  return v->dtype == want && (cols == 1 || v->stride[v->ndim - 1] == 1) &&
         (rows == 1 || v->stride[v->ndim - 2] >= cols);
}

static size_t room(Scheme *s, const View *v, DType t) {
  return scratch_offset(&s->total, (size_t)view_numel(v) * dtype_size(t));
}

/* Depends on shapes and strides alone. lse is used as the op makes it: contiguous and of the
 * compute type. */
static void scheme_set(Scheme *s, const View *const *given, const View *mask) {
  *s = (Scheme){.compute = given[Q]->dtype == F64 ? F64 : F32};
  for (int k = 0; k < OPERANDS; k++) {
    s->given[k] = given[k];
    if (!given[k]) continue;
    s->copy[k] = k == LSE ? given[k]->dtype != s->compute || !view_is_contiguous(given[k])
                          : !rows_readable(given[k], s->compute);
    if (s->copy[k]) s->at[k] = room(s, given[k], s->compute);
  }
  s->copy_mask = !view_absent(mask) && mask->dtype != BOOL && mask->dtype != s->compute;
  if (s->copy_mask) s->at_mask = room(s, mask, s->compute);
}

static View dense_view(const View *like, DType t, void *data, int64_t *strides) {
  View v = *like;
  shape_contiguous(like->ndim, like->shape, strides);
  v.stride = strides;
  v.dtype = (uint8_t)t;
  v.data = data;
  return v;
}

static void attention_operand(Attention *t, const Scheme *s, int k, char *scratch) {
  int64_t dense[MF_MAX_DIMS];
  if (!s->given[k]) return;
  View v = *s->given[k];
  if (s->copy[k]) {
    v = dense_view(s->given[k], s->compute, scratch + s->at[k], dense);
    if (k < GQ && !(k == Y && !s->given[G])) copy_views(s->given[k], &v);
  }
  int64_t *steps[OPERANDS] = {&t->q_step, &t->k_step,  &t->v_step,  &t->y_step, &t->g_step,
                              NULL,       &t->gq_step, &t->gk_step, &t->gv_step};
  t->data[k] = v.data;
  for (int d = 0; d < t->nb; d++) t->step[k][d] = v.stride[d];
  if (!steps[k]) return;
  int64_t cols = v.shape[v.ndim - 1];
  *steps[k] = v.shape[v.ndim - 2] == 1 ? cols : v.stride[v.ndim - 2];
}

static void attention_mask(Attention *t, const Scheme *s, const View *mask, char *scratch) {
  int64_t dense[MF_MAX_DIMS], steps[MF_MAX_DIMS], shape[MF_MAX_DIMS];
  if (view_absent(mask)) return;
  View m = *mask;
  if (s->copy_mask) {
    m = dense_view(mask, s->compute, scratch + s->at_mask, dense);
    copy_views(mask, &m);
  }
  memcpy(shape, t->batch, sizeof(int64_t) * (size_t)t->nb);
  shape[t->nb] = t->n, shape[t->nb + 1] = t->m;
  shape_broadcast_strides(t->nb + 2, shape, m.ndim, m.shape, m.stride, steps);
  memcpy(t->mask_batch, steps, sizeof(int64_t) * (size_t)t->nb);
  t->mask_step[0] = steps[t->nb], t->mask_step[1] = steps[t->nb + 1];
  t->mask = m.data;
  t->mask_bool = m.dtype == BOOL;
  t->mask_size = dtype_size((DType)m.dtype);
}

/* Where the weights are in the whole, of which y is a part of some batch indices. */
static void attention_draws(Attention *t, const View *y) {
  int64_t step = t->n * t->m;
  for (int d = t->nb - 1; d >= 0; d--) {
    t->draw_batch[d] = step;
    if (y->whole) t->draw_first += y->start[d] * step;
    step *= y->whole ? y->whole[d] : y->shape[d];
  }
}

static void attention_set(Attention *t, const Scheme *s, const View *mask, Manner how,
                          char *scratch) {
  const View *q = s->given[Q], *k = s->given[K], *v = s->given[V];
  int nd = q->ndim;
  *t = (Attention){.n = q->shape[nd - 2],
                   .m = k->shape[nd - 2],
                   .d = q->shape[nd - 1],
                   .dv = v->shape[nd - 1],
                   .how = how,
                   .lse_step = how.plain ? 2 : 1,
                   .nb = nd - 2,
                   .size = dtype_size(s->compute)};
  memcpy(t->batch, q->shape, sizeof(int64_t) * (size_t)t->nb);
  for (int i = 0; i < OPERANDS; i++) attention_operand(t, s, i, scratch);
  attention_mask(t, s, mask, scratch);
}

/* Copied results go to where they belong. */
static void attention_store(const Attention *t, const Scheme *s) {
  for (int k = 0; k < OPERANDS; k++) {
    bool result = s->given[G] ? k >= GQ : k == Y;
    int64_t dense[MF_MAX_DIMS];
    if (!result || !s->given[k] || !s->copy[k]) continue;
    View from = dense_view(s->given[k], s->compute, t->data[k], dense);
    copy_views(&from, s->given[k]);
  }
}

/* -- Forward ----------------------------------------------------------------------------------- */

static int check_operands(Infer *I, int q, int k, int v) {
  const Meta *a = I->in[q], *b = I->in[k], *c = I->in[v];
  char ta[SHAPE_TEXT_MAX], tb[SHAPE_TEXT_MAX], tc[SHAPE_TEXT_MAX];
  int rc = infer_want_float(I, q);
  if (!rc) rc = infer_want_same_dtype(I, q, k);
  if (!rc) rc = infer_want_same_dtype(I, q, v);
  if (rc) return rc;
  int nd = a->ndim;
  if (nd < 2 || b->ndim != nd || c->ndim != nd ||
      memcmp(a->shape, b->shape, sizeof(int64_t) * (size_t)(nd - 2)) ||
      memcmp(a->shape, c->shape, sizeof(int64_t) * (size_t)(nd - 2)) ||
      a->shape[nd - 1] != b->shape[nd - 1] || b->shape[nd - 2] != c->shape[nd - 2])
    return infer_error(I,
                       "q is %s, k is %s, v is %s; expected (..., n, d), (..., m, d), (..., m, e) "
                       "with equal leading sizes",
                       shape_text(nd, a->shape, ta), shape_text(b->ndim, b->shape, tb),
                       shape_text(c->ndim, c->shape, tc));
  return 0;
}

static int check_mask(Infer *I, int k) {
  const Meta *mask = I->in[k], *q = I->in[0], *keys = I->in[1];
  if (!mask) return 0;
  int64_t shape[MF_MAX_DIMS], want[MF_MAX_DIMS];
  int nd = q->ndim, n = nd;
  char tm[SHAPE_TEXT_MAX], tw[SHAPE_TEXT_MAX];
  memcpy(shape, q->shape, sizeof(int64_t) * (size_t)nd);
  shape[nd - 1] = keys->shape[nd - 2];
  memcpy(want, shape, sizeof want);
  if (mask->dtype != BOOL && !dtype_is_float(mask->dtype))
    return infer_error(I, "the mask must be bool (true: seen) or float (added), is %s",
                       dtype_name(mask->dtype));
  if (!shape_broadcast(&n, shape, mask->ndim, mask->shape) || n != nd ||
      memcmp(shape, want, sizeof(int64_t) * (size_t)nd))
    return infer_error(I, "a mask of shape %s does not broadcast to %s",
                       shape_text(mask->ndim, mask->shape, tm), shape_text(nd, want, tw));
  return 0;
}

/* Strides of the last output such that its dims lie in memory in the order of those of `like`. */
static void order_as(Meta *out, const Meta *like) {
  int order[MF_MAX_DIMS], nd = out->ndim;
  for (int d = 0; d < nd; d++) {
    int at = d;
    for (; at > 0 && like->stride[order[at - 1]] < like->stride[d]; at--) order[at] = order[at - 1];
    order[at] = d;
  }
  int64_t step = 1;
  for (int i = nd - 1; i >= 0; i--) {
    out->stride[order[i]] = step;
    step *= out->shape[order[i]] > 1 ? out->shape[order[i]] : 1;
  }
}

/* `rest`: numbers that are kept of a row; 0: the one lse. */
static int forward_infer(Infer *I, int rest) {
  const Meta *q = I->in[0], *v = I->in[2];
  int rc = check_operands(I, 0, 1, 2);
  if (!rc) rc = check_mask(I, 3);
  if (rc) return rc;
  int64_t shape[MF_MAX_DIMS];
  int nd = q->ndim;
  memcpy(shape, q->shape, sizeof shape);
  shape[nd - 1] = v->shape[nd - 1];
  rc = infer_shape(I, (DType)q->dtype, nd, shape);
  if (rc) return rc;
  if (q->stride[nd - 1] == 1) order_as(I->last, q);
  shape[nd - 1] = rest;
  return infer_shape(I, q->dtype == F64 ? F64 : F32, rest ? nd : nd - 1, shape);
}

static int attention_infer(Infer *I) {
  return forward_infer(I, 0);
}

static void forward_views(const OpCall *c, const View **given) {
  memcpy(
      given,
      (const View *[OPERANDS]){
          [Q] = &c->in[0], [K] = &c->in[1], [V] = &c->in[2], [Y] = &c->out[0], [LSE] = &c->out[1]},
      sizeof(View *) * OPERANDS);
}

static Manner manner(bool is_causal, double scale) {
  return (Manner){.scale = scale, .causal = is_causal};
}

static Manner plain_manner(bool is_causal, double scale, double fill) {
  return (Manner){.scale = scale, .causal = is_causal, .plain = true, .fill = fill};
}

/* Of attention with dropout: how it is without. */
static Manner drop_manner(Manner how, double p, RngKey key) {
  how.drops = true;
  how.keep = p < 1 ? 1 / (1 - p) : 0;
  how.threshold = (uint64_t)(p * 0x1p32);
  how.key = key;
  return how;
}

/* `products` of (Lq, D) by (Lk, D) a head; half of them where later keys are not seen. */
static double attention_products(const OpCall *c, double products, bool is_causal) {
  const View *q = &c->in[0], *k = &c->in[1];
  double one = 2.0 * (double)view_numel(q) * (double)k->shape[k->ndim - 2];
  return products * one * (is_causal ? 0.5 : 1);
}

static double attention_flops(const OpCall *c) {
  return attention_products(c, 2, ((const struct attention_args *)c->args)->is_causal);
}

static double attention_backward_flops(const OpCall *c) {
  return attention_products(c, 5, ((const struct attention_backward_args *)c->args)->is_causal);
}

static size_t attention_scratch(const OpCall *c) {
  const View *given[OPERANDS];
  Scheme s;
  forward_views(c, given);
  scheme_set(&s, given, &c->in[3]);
  return s.total;
}

static int forward(const OpCall *c, Manner how) {
  const View *given[OPERANDS];
  Scheme s;
  Attention t;
  forward_views(c, given);
  scheme_set(&s, given, &c->in[3]);
  attention_set(&t, &s, &c->in[3], how, c->scratch);
  if (how.drops) attention_draws(&t, &c->out[0]);
  int64_t heads = shape_numel(t.nb, t.batch);
  if (view_numel(&c->out[1]))
    mf_parallel(heads * ((t.n + ROWS - 1) / ROWS), 1,
                s.compute == F64 ? forward_range_f64 : forward_range_f32, &t);
  attention_store(&t, &s);
  return 0;
}

static int attention_cpu(const OpCall *c) {
  const struct attention_args *a = c->args;
  return forward(c, manner(a->is_causal, a->scale));
}

/* A causal mask depends on where a row stands in the whole. */
static int attention_sbp(SbpAsk *q) {
  const struct attention_args *a = q->args;
  return sbp_notation(q, a->is_causal ? "... L E, ... S E, ... S F, ... L S -> ... L F, ... L"
                                      : "... l E, ... S E, ... S F, ... l S -> ... l F, ... l");
}

/* softmax(scale q k' + mask) v, and per row the logarithm of the softmax's sum. is_causal: row i
 * sees keys up to i. */
OP(attention,
   .signature =
       "attention(Tensor q, Tensor k, Tensor v, Tensor? mask=None, *, bool "
       "is_causal=False, float scale) -> (Tensor y, Tensor lse)",
   .flags = OP_HIDDEN, .sbp_rule = attention_sbp, .infer = attention_infer, .cpu = attention_cpu,
   .scratch = attention_scratch, .flops = attention_flops)

/* -- Backward ---------------------------------------------------------------------------------- */

/* g, y and lse must be as attention's results for q, k and v. */
static int check_results(Infer *I, int rest) {
  const Meta *q = I->in[0], *v = I->in[2];
  int64_t shape[MF_MAX_DIMS];
  int nd = q->ndim, rc = 0;
  memcpy(shape, q->shape, sizeof shape);
  shape[nd - 1] = v->shape[nd - 1];
  for (int k = 3; k < 5 && !rc; k++) {
    rc = infer_want_same_dtype(I, 0, k);
    if (!rc) rc = infer_want_shape(I, k, nd, shape);
  }
  if (!rc) rc = infer_want_float(I, 5);
  shape[nd - 1] = rest;
  return rc ? rc : infer_want_shape(I, 5, rest ? nd : nd - 1, shape);
}

static int backward_infer(Infer *I, int rest) {
  int rc = check_operands(I, 0, 1, 2);
  if (!rc) rc = check_mask(I, 6);
  if (!rc) rc = check_results(I, rest);
  for (int k = 0; k < 3 && !rc; k++) {
    const Meta *x = I->in[k];
    rc = infer_shape(I, (DType)x->dtype, x->ndim, x->shape);
    if (!rc && x->stride[x->ndim - 1] == 1) order_as(I->last, x);
  }
  return rc;
}

static int attention_backward_infer(Infer *I) {
  return backward_infer(I, 0);
}

static void backward_views(const OpCall *c, const View **given) {
  memcpy(given,
         (const View *[OPERANDS]){[Q] = &c->in[0],
                                  [K] = &c->in[1],
                                  [V] = &c->in[2],
                                  [G] = &c->in[3],
                                  [Y] = &c->in[4],
                                  [LSE] = &c->in[5],
                                  [GQ] = &c->out[0],
                                  [GK] = &c->out[1],
                                  [GV] = &c->out[2]},
         sizeof(View *) * OPERANDS);
}

static size_t attention_backward_scratch(const OpCall *c) {
  const View *given[OPERANDS];
  Scheme s;
  backward_views(c, given);
  scheme_set(&s, given, &c->in[6]);
  return s.total;
}

static int backward(const OpCall *c, Manner how) {
  const View *given[OPERANDS];
  Scheme s;
  Attention t;
  backward_views(c, given);
  scheme_set(&s, given, &c->in[6]);
  attention_set(&t, &s, &c->in[6], how, c->scratch);
  if (how.drops) attention_draws(&t, &c->out[0]);
  mf_parallel(shape_numel(t.nb, t.batch), 1,
              s.compute == F64 ? backward_range_f64 : backward_range_f32, &t);
  attention_store(&t, &s);
  return 0;
}

static int attention_backward_cpu(const OpCall *c) {
  const struct attention_backward_args *a = c->args;
  return backward(c, manner(a->is_causal, a->scale));
}

static int attention_backward_sbp(SbpAsk *q) {
  const struct attention_backward_args *a = q->args;
  return sbp_notation(q, a->is_causal ? "... L E, ... S E, ... S F, ... L F, ... L F, ... L, ... L "
                                        "S -> ... L E, ... S E, ... S F"
                                      : "... l E, ... S E, ... S F, ... l F, ... l F, ... l, ... l "
                                        "S -> ... l E, ... S E, ... S F");
}

/* The gradients of attention from that of its result, g, and its results y and lse. */
OP(attention_backward,
   .signature =
       "attention_backward(Tensor q, Tensor k, Tensor v, Tensor g, Tensor y, Tensor lse, "
       "Tensor? mask=None, *, "
       "bool is_causal=False, float scale) -> (Tensor q, Tensor k, Tensor v)",
   .flags = OP_HIDDEN, .sbp_rule = attention_backward_sbp, .infer = attention_backward_infer,
   .cpu = attention_backward_cpu, .scratch = attention_backward_scratch,
   .flops = attention_backward_flops)

/* -- As programs write it out ------------------------------------------------------------------ */

enum { KEPT = 2 /* numbers of a row: the largest score, the logarithm of the sum of e^(s - it) */ };

static int plain_attention_infer(Infer *I) {
  return forward_infer(I, KEPT);
}

static int plain_attention_backward_infer(Infer *I) {
  return backward_infer(I, KEPT);
}

static int plain_attention_cpu(const OpCall *c) {
  const struct plain_attention_args *a = c->args;
  return forward(c, plain_manner(a->is_causal, a->scale, a->fill));
}

static double plain_attention_flops(const OpCall *c) {
  return attention_products(c, 2, ((const struct plain_attention_args *)c->args)->is_causal);
}

/* softmax(scale q k' + mask) v, where a score that a bool mask hides is `fill`, and what the
 * backward needs of each row. Made by compiled steps of the ops one after another, so that it has
 * no gradient itself. */
OP(plain_attention,
   .signature =
       "plain_attention(Tensor q, Tensor k, Tensor v, Tensor? mask=None, *, bool "
       "is_causal=False, float scale, float fill) -> (Tensor y, Tensor lse)",
   .flags = OP_HIDDEN | OP_NO_GRAD, .sbp = "... L E, ... S E, ... S F, ... L S -> ... L F, ... L T",
   .infer = plain_attention_infer, .cpu = plain_attention_cpu, .scratch = attention_scratch,
   .flops = plain_attention_flops)

static int plain_attention_backward_cpu(const OpCall *c) {
  const struct plain_attention_backward_args *a = c->args;
  return backward(c, plain_manner(a->is_causal, a->scale, a->fill));
}

static double plain_attention_backward_flops(const OpCall *c) {
  const struct plain_attention_backward_args *a = c->args;
  return attention_products(c, 5, a->is_causal);
}

/* The gradients of plain_attention; what is hidden has none. */
OP(plain_attention_backward,
   .signature =
       "plain_attention_backward(Tensor q, Tensor k, Tensor v, Tensor g, Tensor y, Tensor "
       "lse, Tensor? mask=None, *, bool is_causal=False, float scale, float fill) -> "
       "(Tensor q, Tensor k, Tensor v)",
   .flags = OP_HIDDEN | OP_NO_GRAD,
   .sbp =
       "... L E, ... S E, ... S F, ... L F, ... L F, ... L T, ... L S -> ... L E, ... S E, ... S "
       "F",
   .infer = plain_attention_backward_infer, .cpu = plain_attention_backward_cpu,
   .scratch = attention_backward_scratch, .flops = plain_attention_backward_flops)

static int check_dropped(Infer *I, double p) {
  return p >= 0 && p <= 1 ? 0 : infer_error(I, "p must lie between 0 and 1, is %g", p);
}

static int drop_attention_infer(Infer *I) {
  const struct drop_attention_args *a = I->args;
  int rc = check_dropped(I, a->p);
  return rc ? rc : forward_infer(I, a->has_fill ? KEPT : 0);
}

static int drop_attention_cpu(const OpCall *c) {
  const struct drop_attention_args *a = c->args;
  Manner how =
      a->has_fill ? plain_manner(a->is_causal, a->scale, a->fill) : manner(a->is_causal, a->scale);
  return forward(c, drop_manner(how, a->p, a->generator));
}

static double drop_attention_flops(const OpCall *c) {
  return attention_products(c, 2, ((const struct drop_attention_args *)c->args)->is_causal);
}

/* plain_attention, without `fill` attention, whose weights go through dropout(p). */
OP(drop_attention,
   .signature =
       "drop_attention(Tensor q, Tensor k, Tensor v, Tensor? mask=None, *, float p, bool "
       "is_causal=False, float scale, float? fill=None, Generator? generator=None) -> "
       "(Tensor y, Tensor lse)",
   .flags = OP_HIDDEN | OP_NO_GRAD | OP_RANDOM, .infer = drop_attention_infer,
   .cpu = drop_attention_cpu, .scratch = attention_scratch, .flops = drop_attention_flops)

static int drop_attention_backward_infer(Infer *I) {
  const struct drop_attention_backward_args *a = I->args;
  int rc = check_dropped(I, a->p);
  return rc ? rc : backward_infer(I, a->has_fill ? KEPT : 0);
}

static int drop_attention_backward_cpu(const OpCall *c) {
  const struct drop_attention_backward_args *a = c->args;
  Manner how =
      a->has_fill ? plain_manner(a->is_causal, a->scale, a->fill) : manner(a->is_causal, a->scale);
  return backward(c, drop_manner(how, a->p, a->generator));
}

static double drop_attention_backward_flops(const OpCall *c) {
  const struct drop_attention_backward_args *a = c->args;
  return attention_products(c, 5, a->is_causal);
}

/* The gradients of drop_attention, through the dropout of that key. */
OP(drop_attention_backward,
   .signature =
       "drop_attention_backward(Tensor q, Tensor k, Tensor v, Tensor g, Tensor y, Tensor "
       "lse, Tensor? mask=None, *, float p, bool is_causal=False, float scale, float? "
       "fill=None, Generator? generator=None) -> (Tensor q, Tensor k, Tensor v)",
   .flags = OP_HIDDEN | OP_NO_GRAD, .infer = drop_attention_backward_infer,
   .cpu = drop_attention_backward_cpu, .scratch = attention_backward_scratch,
   .flops = drop_attention_backward_flops)
