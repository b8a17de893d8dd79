/* The wrapper of oneDNN, against versions 2.6 and 3.
 *
 * A Plan is one primitive with its operands. An operand is declared in the caller's layout; where
 * the primitive prefers another one, the plan holds a reorder and a place for it in the scratch
 * memory. Running a plan reorders the inputs, executes, and reorders the outputs. A call needs
 * memory objects that carry its pointers; a plan keeps one set for the next call, and concurrent
 * calls of the same plan make sets of their own.
 *
 * Invariants. A plan is unchanged once made, but for `spare`, `refs` and `used`, which belong to
 * the cache's lock. A plan with refs > 0 is never destroyed. Primitives hold no state between
 * calls: their scratchpads are the caller's. The number of threads is part of the key, since
 * primitives cut their work when they are made. */
#include <dnnl.h>
#include <pthread.h>
#include <string.h>

#include "cpuid.h"
#include "dnn.h"
#include "err.h"
#include "mem.h"
#include "thread.h"

enum { BUCKETS = 512, CAPACITY = 1024, OPERANDS = 4, KEY_MAX = 56 };

/* -- What differs between the versions: layouts are values in 2 and objects in 3, and 2 describes
 * an operation before the primitive ---------- */

#if DNNL_VERSION_MAJOR >= 3
typedef dnnl_memory_desc_t Layout;
typedef const_dnnl_memory_desc_t LayoutRef;
#define REF(layout) (layout)

static bool layout_strided(Layout *l, int ndim, const int64_t *dims, dnnl_data_type_t t,
                           const int64_t *strides) {
  return dnnl_memory_desc_create_with_strides(l, ndim, dims, t, strides) == dnnl_success;
}
static bool layout_any(Layout *l, int ndim, const int64_t *dims, dnnl_data_type_t t) {
  return dnnl_memory_desc_create_with_tag(l, ndim, dims, t, dnnl_format_tag_any) == dnnl_success;
}
static void layout_drop(Layout *l) {
  if (*l) dnnl_memory_desc_destroy(*l);
}
static void post_act(dnnl_post_ops_t ops, dnnl_alg_kind_t alg) {
  dnnl_post_ops_append_eltwise(ops, alg, 0, 0);
}
static dnnl_status_t matmul_create(dnnl_primitive_desc_t *pd, dnnl_engine_t e, LayoutRef a,
                                   LayoutRef b, LayoutRef bias, LayoutRef c,
                                   dnnl_primitive_attr_t attr) {
  return dnnl_matmul_primitive_desc_create(pd, e, a, b, bias, c, attr);
}
static dnnl_status_t conv_create(dnnl_primitive_desc_t *pd, dnnl_engine_t e, DnnConvKind kind,
                                 LayoutRef x, LayoutRef w, LayoutRef bias, LayoutRef y,
                                 const int64_t *stride, const int64_t *dilation,
                                 const int64_t *padding, dnnl_primitive_desc_t hint,
                                 dnnl_primitive_attr_t attr) {
  const dnnl_alg_kind_t alg = dnnl_convolution_direct;
  if (kind == DNN_CONV)
    return dnnl_convolution_forward_primitive_desc_create(
        pd, e, dnnl_forward_training, alg, x, w, bias, y, stride, dilation, padding, padding, attr);
  if (kind == DNN_CONV_INPUT)
    return dnnl_convolution_backward_data_primitive_desc_create(
        pd, e, alg, x, w, y, stride, dilation, padding, padding, hint, attr);
  return dnnl_convolution_backward_weights_primitive_desc_create(
      pd, e, alg, x, w, bias, y, stride, dilation, padding, padding, hint, attr);
}
#else
typedef dnnl_memory_desc_t Layout;
typedef const dnnl_memory_desc_t *LayoutRef;
#define REF(layout) (&(layout))

static bool layout_strided(Layout *l, int ndim, const int64_t *dims, dnnl_data_type_t t,
                           const int64_t *strides) {
  return dnnl_memory_desc_init_by_strides(l, ndim, dims, t, strides) == dnnl_success;
}
static bool layout_any(Layout *l, int ndim, const int64_t *dims, dnnl_data_type_t t) {
  return dnnl_memory_desc_init_by_tag(l, ndim, dims, t, dnnl_format_tag_any) == dnnl_success;
}
static void layout_drop(Layout *l) {
  (void)l;
}
static void post_act(dnnl_post_ops_t ops, dnnl_alg_kind_t alg) {
  dnnl_post_ops_append_eltwise(ops, 1, alg, 0, 0);
}
static dnnl_status_t matmul_create(dnnl_primitive_desc_t *pd, dnnl_engine_t e, LayoutRef a,
                                   LayoutRef b, LayoutRef bias, LayoutRef c,
                                   dnnl_primitive_attr_t attr) {
  dnnl_matmul_desc_t op;
  dnnl_status_t s = dnnl_matmul_desc_init(&op, a, b, bias, c);
  return s == dnnl_success ? dnnl_primitive_desc_create(pd, &op, attr, e, NULL) : s;
}
static dnnl_status_t conv_create(dnnl_primitive_desc_t *pd, dnnl_engine_t e, DnnConvKind kind,
                                 LayoutRef x, LayoutRef w, LayoutRef bias, LayoutRef y,
                                 const int64_t *stride, const int64_t *dilation,
                                 const int64_t *padding, dnnl_primitive_desc_t hint,
                                 dnnl_primitive_attr_t attr) {
  const dnnl_alg_kind_t alg = dnnl_convolution_direct;
  dnnl_convolution_desc_t op;
  dnnl_status_t s;
  if (kind == DNN_CONV)
    s = dnnl_dilated_convolution_forward_desc_init(&op, dnnl_forward_training, alg, x, w, bias, y,
                                                   stride, dilation, padding, padding);
  else if (kind == DNN_CONV_INPUT)
    s = dnnl_dilated_convolution_backward_data_desc_init(&op, alg, x, w, y, stride, dilation,
                                                         padding, padding);
  else
    s = dnnl_dilated_convolution_backward_weights_desc_init(&op, alg, x, w, bias, y, stride,
                                                            dilation, padding, padding);
  return s == dnnl_success ? dnnl_primitive_desc_create(pd, &op, attr, e, hint) : s;
}
#endif

/* -- Plans ------------------------------------------------------------------------------------- */

typedef struct Key {
  int64_t n, v[KEY_MAX];
} Key;

typedef struct Operand {
  int arg; /* DNNL_ARG_... of the primitive */
  bool written;
  Layout user;  /* the caller's */
  Layout inner; /* the primitive's, where `reorder` is set */
  dnnl_primitive_t
      reorder; /* from user to inner, or back when written; NULL: the layouts are equal */
  size_t at;   /* of the inner copy in the scratch memory */
} Operand;

/* The memory objects of one call. */
typedef struct Set {
  dnnl_stream_t stream;
  dnnl_memory_t user[OPERANDS], inner[OPERANDS], pad;
} Set;

typedef struct Plan {
  struct Plan *next;
  Key key;
  uint64_t used;
  int refs, n;
  Operand operand[OPERANDS];
  dnnl_primitive_desc_t pd;
  dnnl_primitive_t primitive;
  size_t scratch, pad_bytes;
  Set *spare;
} Plan;

struct DnnCache {
  pthread_mutex_t lock;
  dnnl_engine_t engine;
  dnnl_primitive_attr_t attr; /* the caller's scratchpad, nothing else */
  Plan *bucket[BUCKETS];
  int n;
  uint64_t clock;
};

static void set_destroy(Set *s) {
  if (!s) return;
  for (int k = 0; k < OPERANDS; k++) {
    if (s->user[k]) dnnl_memory_destroy(s->user[k]);
    if (s->inner[k]) dnnl_memory_destroy(s->inner[k]);
  }
  if (s->pad) dnnl_memory_destroy(s->pad);
  if (s->stream) dnnl_stream_destroy(s->stream);
  mem_free(s);
}

static Set *set_create(DnnCache *c, const Plan *p) {
  Set *s = mem_zalloc(sizeof *s);
  if (!s) return NULL;
  bool ok = dnnl_stream_create(&s->stream, c->engine, dnnl_stream_default_flags) == dnnl_success;
  for (int k = 0; k < p->n && ok; k++) {
    ok = dnnl_memory_create(&s->user[k], REF(p->operand[k].user), c->engine, DNNL_MEMORY_NONE) ==
         dnnl_success;
    if (ok && p->operand[k].reorder)
      ok = dnnl_memory_create(&s->inner[k], REF(p->operand[k].inner), c->engine,
                              DNNL_MEMORY_NONE) == dnnl_success;
  }
  if (ok && p->pad_bytes)
    ok = dnnl_memory_create(&s->pad,
                            dnnl_primitive_desc_query_md(p->pd, dnnl_query_scratchpad_md, 0),
                            c->engine, DNNL_MEMORY_NONE) == dnnl_success;
  if (ok) return s;
  set_destroy(s);
  return NULL;
}

static void plan_destroy(Plan *p) {
  set_destroy(p->spare);
  for (int k = 0; k < p->n; k++) {
    if (p->operand[k].reorder) {
      dnnl_primitive_destroy(p->operand[k].reorder);
      layout_drop(&p->operand[k].inner);
    }
    layout_drop(&p->operand[k].user);
  }
  if (p->primitive) dnnl_primitive_destroy(p->primitive);
  if (p->pd) dnnl_primitive_desc_destroy(p->pd);
  mem_free(p);
}

/* Adds bytes of scratch and returns where they begin. */
static size_t plan_room(Plan *p, size_t bytes) {
  size_t at = p->scratch;
  p->scratch += (bytes + DNN_ALIGN - 1) & ~(size_t)(DNN_ALIGN - 1);
  return at;
}

/* The next operand in the caller's layout. */
static bool plan_operand(Plan *p, int arg, bool written, int ndim, const int64_t *dims,
                         dnnl_data_type_t t, const int64_t *strides) {
  Operand *o = &p->operand[p->n];
  if (!layout_strided(&o->user, ndim, dims, t, strides)) return false;
  o->arg = arg;
  o->written = written;
  p->n++;
  return true;
}

#if DNNL_VERSION_MAJOR >= 3
static bool layout_copy(Layout *to, LayoutRef from) {
  return dnnl_memory_desc_clone(to, from) == dnnl_success;
}
#else
static bool layout_copy(Layout *to, LayoutRef from) {
  *to = *from;
  return true;
}
#endif

/* A reorder between the caller's layout of operand o and `inner`, where they differ. */
static bool plan_reorder(DnnCache *c, Plan *p, Operand *o, LayoutRef inner) {
  if (dnnl_memory_desc_equal(REF(o->user), inner)) return true;
  LayoutRef from = o->written ? inner : REF(o->user), to = o->written ? REF(o->user) : inner;
  dnnl_primitive_desc_t pd;
  if (dnnl_reorder_primitive_desc_create(&pd, from, c->engine, to, c->engine, NULL) != dnnl_success)
    return false;
  dnnl_status_t s = dnnl_primitive_create(&o->reorder, pd);
  dnnl_primitive_desc_destroy(pd);
  if (s != dnnl_success) return false;
  if (!layout_copy(&o->inner, inner)) {
    dnnl_primitive_destroy(o->reorder);
    o->reorder = NULL;
    return false;
  }
  o->at = plan_room(p, dnnl_memory_desc_get_size(inner));
  return true;
}

/* Makes the primitive of p->pd and its scratchpad's place. */
static bool plan_finish(Plan *p) {
  if (dnnl_primitive_create(&p->primitive, p->pd) != dnnl_success) return false;
  p->pad_bytes =
      dnnl_memory_desc_get_size(dnnl_primitive_desc_query_md(p->pd, dnnl_query_scratchpad_md, 0));
  plan_room(p, p->pad_bytes); /* at the end: behind the copies */
  return true;
}

static int plan_execute(const Plan *p, const Set *s, void *const *data, char *scratch) {
  dnnl_exec_arg_t args[OPERANDS + 1], move[2];
  dnnl_status_t status = dnnl_success;
  for (int k = 0; k < p->n; k++) {
    const Operand *o = &p->operand[k];
    dnnl_memory_set_data_handle(s->user[k], data[k]);
    args[k] = (dnnl_exec_arg_t){o->arg, o->reorder ? s->inner[k] : s->user[k]};
    if (!o->reorder) continue;
    dnnl_memory_set_data_handle(s->inner[k], scratch + o->at);
    move[0] = (dnnl_exec_arg_t){DNNL_ARG_FROM, s->user[k]};
    move[1] = (dnnl_exec_arg_t){DNNL_ARG_TO, s->inner[k]};
    if (!o->written && status == dnnl_success)
      status = dnnl_primitive_execute(o->reorder, s->stream, 2, move);
  }
  int n = p->n;
  if (p->pad_bytes) {
    dnnl_memory_set_data_handle(
        s->pad, scratch + p->scratch - ((p->pad_bytes + DNN_ALIGN - 1) & ~(size_t)(DNN_ALIGN - 1)));
    args[n++] = (dnnl_exec_arg_t){DNNL_ARG_SCRATCHPAD, s->pad};
  }
  if (status == dnnl_success) status = dnnl_primitive_execute(p->primitive, s->stream, n, args);
  for (int k = 0; k < p->n && status == dnnl_success; k++) {
    const Operand *o = &p->operand[k];
    if (!o->reorder || !o->written) continue;
    move[0] = (dnnl_exec_arg_t){DNNL_ARG_FROM, s->inner[k]};
    move[1] = (dnnl_exec_arg_t){DNNL_ARG_TO, s->user[k]};
    status = dnnl_primitive_execute(o->reorder, s->stream, 2, move);
  }
  return status == dnnl_success
             ? 0
             : err_set(MF_EUNSUPPORTED, "oneDNN: execution failed with status %d", (int)status);
}

/* -- The cache --------------------------------------------------------------------------------- */

static const char cache_key;

static void cache_destroy(void *state) {
  DnnCache *c = state;
  for (int b = 0; b < BUCKETS; b++) {
    for (Plan *p = c->bucket[b], *next; p; p = next) {
      next = p->next;
      plan_destroy(p);
    }
  }
  if (c->attr) dnnl_primitive_attr_destroy(c->attr);
  if (c->engine) dnnl_engine_destroy(c->engine);
  pthread_mutex_destroy(&c->lock);
  mem_free(c);
}

static void *cache_create(void) {
  DnnCache *c = mem_zalloc(sizeof *c);
  if (!c) return NULL;
  pthread_mutex_init(&c->lock, NULL);
  int isa = cpuid_isa(); /* MF_ISA lowers oneDNN as well; too late, and so refused, where the host
                            used oneDNN before */
  if (isa == 2) dnnl_set_max_cpu_isa(dnnl_cpu_isa_sse41);
  if (isa == 3) dnnl_set_max_cpu_isa(dnnl_cpu_isa_avx2);
  if (dnnl_engine_create(&c->engine, dnnl_cpu, 0) == dnnl_success &&
      dnnl_primitive_attr_create(&c->attr) == dnnl_success &&
      dnnl_primitive_attr_set_scratchpad_mode(c->attr, dnnl_scratchpad_mode_user) == dnnl_success)
    return c;
  cache_destroy(c);
  return NULL;
}

DnnCache *dnn_cache(Device *d) {
  DnnCache *c = device_attach(d, &cache_key, cache_create, cache_destroy);
  if (!c) err_set(MF_ENOMEM, "oneDNN: cannot be set up on this device");
  return c;
}

static void key_add(Key *k, int64_t v) {
  k->v[k->n++] = v;
}

static void key_add_list(Key *k, int n, const int64_t *v) {
  for (int i = 0; i < n; i++) key_add(k, v[i]);
}

static uint64_t key_hash(const Key *k) {
  uint64_t h = (uint64_t)k->n;
  for (int64_t i = 0; i < k->n; i++)
    h = (h ^ (uint64_t)k->v[i]) * 0x9e3779b97f4a7c15u, h ^= h >> 29;
  return h;
}

/* Drops the plan unused for longest. */
static void cache_evict(DnnCache *c) {
  Plan **oldest = NULL;
  for (int b = 0; b < BUCKETS; b++)
    for (Plan **at = &c->bucket[b]; *at; at = &(*at)->next)
      if (!(*at)->refs && (!oldest || (*at)->used < (*oldest)->used)) oldest = at;
  if (!oldest) return;
  Plan *p = *oldest;
  *oldest = p->next;
  plan_destroy(p);
  c->n--;
}

typedef bool PlanBuild(DnnCache *c, Plan *p, const void *description);

/* The plan of a key, made by `build` when new; the caller holds a count on it until plan_release.
 * NULL with the error set. */
static Plan *plan_get(DnnCache *c, const Key *key, PlanBuild *build, const void *description) {
  Plan **bucket = &c->bucket[key_hash(key) % BUCKETS], *p;
  size_t bytes = sizeof(int64_t) * (size_t)(key->n + 1);
  pthread_mutex_lock(&c->lock);
  for (p = *bucket; p && memcmp(&p->key, key, bytes); p = p->next) continue;
  if (!p && (p = mem_zalloc(sizeof *p))) {
    memcpy(&p->key, key, bytes);
    if (c->n >= CAPACITY) cache_evict(c);
    if (build(c, p, description)) {
      p->next = *bucket;
      *bucket = p;
      c->n++;
    } else {
      plan_destroy(p);
      p = NULL;
    }
  }
  if (p) p->refs++, p->used = ++c->clock;
  pthread_mutex_unlock(&c->lock);
  if (!p) err_set(MF_EUNSUPPORTED, "oneDNN: has no kernel for these sizes and layouts");
  return p;
}

static void plan_release(DnnCache *c, Plan *p) {
  pthread_mutex_lock(&c->lock);
  p->refs--;
  pthread_mutex_unlock(&c->lock);
}

static size_t plan_scratch(DnnCache *c, const Key *key, PlanBuild *build, const void *description) {
  Plan *p = plan_get(c, key, build, description);
  if (!p) return 0; /* the run will report it */
  size_t bytes = p->scratch;
  plan_release(c, p);
  return bytes;
}

static int plan_run(DnnCache *c, const Key *key, PlanBuild *build, const void *description,
                    void *const *data, void *scratch) {
  Plan *p = plan_get(c, key, build, description);
  if (!p) return MF_EUNSUPPORTED;
  pthread_mutex_lock(&c->lock);
  Set *s = p->spare;
  p->spare = NULL;
  pthread_mutex_unlock(&c->lock);
  if (!s) s = set_create(c, p);
  int rc = s ? plan_execute(p, s, data, scratch) : err_set(MF_ENOMEM, "oneDNN: out of memory");
  pthread_mutex_lock(&c->lock);
  if (!p->spare) p->spare = s, s = NULL;
  p->refs--;
  pthread_mutex_unlock(&c->lock);
  set_destroy(s);
  return rc;
}

static dnnl_data_type_t data_type(DnnType t) {
  return t == DNN_BF16 ? dnnl_bf16 : dnnl_f32;
}

/* -- Matrix products --------------------------------------------------------------------------- */

static void matmul_key(Key *k, const DnnMatmul *d) {
  k->n = 0;
  key_add(k, 1 | (int64_t)d->type << 8 | (int64_t)d->act << 16 | (int64_t)d->bias << 24 |
                 (int64_t)thread_count() << 32);
  key_add_list(k, 8, (int64_t[]){d->m, d->k, d->n, d->a_m, d->a_k, d->b_k, d->b_n, d->c_m});
  key_add_list(k, d->batch_ndim, d->batch);
  key_add_list(k, d->batch_ndim, d->a_batch);
  key_add_list(k, d->batch_ndim, d->b_batch);
  key_add_list(k, d->batch_ndim, d->c_batch);
}

/* An operand (..., rows, cols): batch dims of stride 0 become size 1, which repeats. */
static bool matmul_operand(Plan *p, int arg, dnnl_data_type_t t, const DnnMatmul *d,
                           const int64_t *batch_stride, int64_t rows, int64_t cols,
                           int64_t row_stride, int64_t col_stride) {
  dnnl_dims_t dims, strides;
  int64_t n = d->batch_ndim;
  for (int i = 0; i < n; i++) {
    bool repeat = batch_stride[i] == 0;
    dims[i] = repeat ? 1 : d->batch[i];
    strides[i] = repeat ? rows * cols : batch_stride[i];
  }
  dims[n] = rows, dims[n + 1] = cols;
  strides[n] = row_stride, strides[n + 1] = col_stride;
  return plan_operand(p, arg, arg == DNNL_ARG_DST, (int)n + 2, dims, t, strides);
}

static dnnl_alg_kind_t act_alg(DnnAct a) {
  return a == DNN_RELU   ? dnnl_eltwise_relu
         : a == DNN_GELU ? dnnl_eltwise_gelu_erf
                         : dnnl_eltwise_gelu_tanh;
}

/* The cache's attributes, with what follows a product; NULL: there is no memory. The caller
 * destroys them where they are others. */
static dnnl_primitive_attr_t attr_with(DnnCache *c, DnnAct act) {
  dnnl_primitive_attr_t attr;
  dnnl_post_ops_t ops;
  if (act == DNN_NONE) return c->attr;
  if (dnnl_primitive_attr_clone(&attr, c->attr) != dnnl_success) return NULL;
  if (dnnl_post_ops_create(&ops) == dnnl_success) {
    post_act(ops, act_alg(act));
    bool set = dnnl_primitive_attr_set_post_ops(attr, ops) == dnnl_success;
    dnnl_post_ops_destroy(ops);
    if (set) return attr;
  }
  dnnl_primitive_attr_destroy(attr);
  return NULL;
}

static bool matmul_build(DnnCache *c, Plan *p, const void *description) {
  const DnnMatmul *d = description;
  static const int64_t none[DNN_MAX_BATCH_DIMS];
  dnnl_data_type_t t = data_type(d->type);
  if (!matmul_operand(p, DNNL_ARG_SRC, t, d, d->a_batch, d->m, d->k, d->a_m, d->a_k) ||
      !matmul_operand(p, DNNL_ARG_WEIGHTS, t, d, d->b_batch, d->k, d->n, d->b_k, d->b_n) ||
      !matmul_operand(p, DNNL_ARG_DST, t, d, d->c_batch, d->m, d->n, d->c_m, 1) ||
      (d->bias && !matmul_operand(p, DNNL_ARG_BIAS, dnnl_f32, d, none, 1, d->n, d->n, 1)))
    return false;
  dnnl_primitive_attr_t attr = attr_with(c, d->act);
  if (!attr) return false;
  dnnl_status_t s =
      matmul_create(&p->pd, c->engine, REF(p->operand[0].user), REF(p->operand[1].user),
                    d->bias ? REF(p->operand[3].user) : NULL, REF(p->operand[2].user), attr);
  if (attr != c->attr) dnnl_primitive_attr_destroy(attr);
  return s == dnnl_success && plan_finish(p);
}

/* Measured on AVX-512: the plain GEMM is ahead where b's rows lie as they are used, unless the sum
 * is long and the result small, and for products with vectors; below AVX-512 the primitive calls it
 * anyhow. Its leading dimensions must not be shorter than the rows. */
static bool suits_gemm(const DnnMatmul *d) {
  if (d->type != DNN_F32 || d->batch_ndim || d->bias || d->act != DNN_NONE) return false;
  if ((d->a_k == 1 ? d->a_m < d->k : d->a_k < d->m) ||
      (d->b_n == 1 ? d->b_k < d->n : d->b_n < d->k) || d->c_m < d->n)
    return false;
  if (d->m == 1 || d->n == 1) return true;
  return d->b_n == 1 && (d->k < 2048 || d->m * d->n >= 1 << 20);
}

size_t dnn_matmul_scratch(DnnCache *cache, const DnnMatmul *d) {
  if (suits_gemm(d)) return 0;
  Key key;
  matmul_key(&key, d);
  return plan_scratch(cache, &key, matmul_build, d);
}

int dnn_matmul(DnnCache *cache, const DnnMatmul *d, const void *a, const void *b, const void *bias,
               void *c, void *scratch) {
  if (suits_gemm(d)) {
    dnn_sgemm(d->a_k != 1, d->b_n != 1, d->m, d->n, d->k, 1, a, d->a_k == 1 ? d->a_m : d->a_k, b,
              d->b_n == 1 ? d->b_k : d->b_n, 0, c, d->c_m);
    return 0;
  }
  Key key;
  matmul_key(&key, d);
  return plan_run(cache, &key, matmul_build, d,
                  (void *const[]){(void *)a, (void *)b, c, (void *)bias}, scratch);
}

void dnn_sgemm(bool a_transposed, bool b_transposed, int64_t m, int64_t n, int64_t k, float alpha,
               const float *a, int64_t lda, const float *b, int64_t ldb, float beta, float *c,
               int64_t ldc) {
  dnnl_sgemm(a_transposed ? 'T' : 'N', b_transposed ? 'T' : 'N', m, n, k, alpha, a, lda, b, ldb,
             beta, c, ldc);
}

/* -- Convolutions ------------------------------------------------------------------------------ */

static void conv_key(Key *k, const DnnConv *d) {
  k->n = 0;
  key_add(k, 2 | (int64_t)d->type << 8 | (int64_t)d->kind << 16 | (int64_t)d->bias << 24 |
                 (int64_t)d->x_last << 25 | (int64_t)d->w_last << 26 | (int64_t)d->y_last << 27 |
                 (int64_t)d->relu << 28 | (int64_t)thread_count() << 32);
  key_add_list(
      k, 10, (int64_t[]){d->n, d->ic, d->ih, d->iw, d->oc, d->oh, d->ow, d->kh, d->kw, d->groups});
  key_add_list(k, 2, d->stride);
  key_add_list(k, 2, d->padding);
  key_add_list(k, 2, d->dilation);
}

/* Dims and strides of (n, c, h, w), channels innermost where `last`. */
static void image_layout(int64_t n, int64_t c, int64_t h, int64_t w, bool last, int64_t *dims,
                         int64_t *strides) {
  int64_t size[4] = {n, c, h, w}, plain[4] = {c * h * w, h * w, w, 1},
          inner[4] = {c * h * w, 1, w * c, c};
  memcpy(dims, size, sizeof size);
  memcpy(strides, last ? inner : plain, sizeof plain);
}

/* The same of weights; with groups they have five dims. Returns how many. */
static int weight_layout(const DnnConv *d, int64_t *dims, int64_t *strides) {
  int64_t ic = d->ic / d->groups, oc = d->oc / d->groups;
  if (d->groups == 1) {
    image_layout(oc, ic, d->kh, d->kw, d->w_last, dims, strides);
    return 4;
  }
  dims[0] = d->groups;
  strides[0] = oc * ic * d->kh * d->kw;
  image_layout(oc, ic, d->kh, d->kw, d->w_last, dims + 1, strides + 1);
  return 5;
}

/* The layouts in which the primitive is asked for: weights as it likes best; images with channels
 * innermost where `last` is set, else as it likes best. Plain NCHW has no fast kernels but for the
 * few channels of a first layer, which have no others; a mixture has none at all. */
typedef struct ConvLayouts {
  Layout x, w, y, bias;
  bool have_x, have_w, have_y, have_bias;
} ConvLayouts;

static bool conv_layouts(const DnnConv *d, dnnl_data_type_t t, bool last, ConvLayouts *l) {
  dnnl_dims_t dims, strides;
  image_layout(d->n, d->ic, d->ih, d->iw, true, dims, strides);
  l->have_x = last ? layout_strided(&l->x, 4, dims, t, strides) : layout_any(&l->x, 4, dims, t);
  image_layout(d->n, d->oc, d->oh, d->ow, true, dims, strides);
  l->have_y = last ? layout_strided(&l->y, 4, dims, t, strides) : layout_any(&l->y, 4, dims, t);
  l->have_w = layout_any(&l->w, weight_layout(d, dims, strides), dims, t);
  l->have_bias = layout_strided(&l->bias, 1, (dnnl_dims_t){d->oc}, dnnl_f32, (dnnl_dims_t){1});
  return l->have_x && l->have_w && l->have_y && l->have_bias;
}

static void conv_layouts_drop(ConvLayouts *l) {
  if (l->have_x) layout_drop(&l->x);
  if (l->have_w) layout_drop(&l->w);
  if (l->have_y) layout_drop(&l->y);
  if (l->have_bias) layout_drop(&l->bias);
}

static dnnl_status_t conv_describe(DnnCache *c, Plan *p, const DnnConv *d, ConvLayouts *l) {
  dnnl_dims_t stride = {d->stride[0], d->stride[1]}, padding = {d->padding[0], d->padding[1]},
              dilation = {d->dilation[0] - 1, d->dilation[1] - 1};
  dnnl_primitive_desc_t hint = NULL;
  LayoutRef bias = d->bias ? REF(l->bias) : NULL;
  dnnl_status_t s = dnnl_success;
  if (d->kind != DNN_CONV)
    s = conv_create(&hint, c->engine, DNN_CONV, REF(l->x), REF(l->w), bias, REF(l->y), stride,
                    dilation, padding, NULL, c->attr);
  dnnl_primitive_attr_t attr = attr_with(c, d->relu ? DNN_RELU : DNN_NONE);
  if (!attr) s = dnnl_out_of_memory;
  if (s == dnnl_success)
    s = conv_create(&p->pd, c->engine, d->kind, REF(l->x), REF(l->w), bias, REF(l->y), stride,
                    dilation, padding, hint, attr);
  if (attr && attr != c->attr) dnnl_primitive_attr_destroy(attr);
  if (hint) dnnl_primitive_desc_destroy(hint);
  return s;
}

/* Describes p->pd by the layouts of conv_layouts; false where oneDNN has no kernel for them, or,
 * unless `slow` will do, only the loops of its reference. */
static bool conv_choose(DnnCache *c, Plan *p, const DnnConv *d, bool last, bool slow) {
  ConvLayouts l = {0};
  const char *kernel = "";
  bool ok =
      conv_layouts(d, data_type(d->type), last, &l) && conv_describe(c, p, d, &l) == dnnl_success;
  conv_layouts_drop(&l);
  if (!ok || slow) return ok;
  dnnl_primitive_desc_query(p->pd, dnnl_query_impl_info_str, 0, &kernel);
  if (strncmp(kernel, "ref", 3)) return true;
  dnnl_primitive_desc_destroy(p->pd);
  p->pd = NULL;
  return false;
}

/* Operands in the order x, w, y, bias. */
static bool conv_build(DnnCache *c, Plan *p, const void *description) {
  const DnnConv *d = description;
  dnnl_data_type_t t = data_type(d->type);
  bool input = d->kind == DNN_CONV_INPUT, weight = d->kind == DNN_CONV_WEIGHT,
       forward = d->kind == DNN_CONV;
  dnnl_dims_t dims, strides;
  image_layout(d->n, d->ic, d->ih, d->iw, d->x_last, dims, strides);
  if (!plan_operand(p, input ? DNNL_ARG_DIFF_SRC : DNNL_ARG_SRC, input, 4, dims, t, strides))
    return false;
  int w_ndim = weight_layout(d, dims, strides);
  if (!plan_operand(p, weight ? DNNL_ARG_DIFF_WEIGHTS : DNNL_ARG_WEIGHTS, weight, w_ndim, dims, t,
                    strides))
    return false;
  image_layout(d->n, d->oc, d->oh, d->ow, d->y_last, dims, strides);
  if (!plan_operand(p, forward ? DNNL_ARG_DST : DNNL_ARG_DIFF_DST, forward, 4, dims, t, strides))
    return false;
  if (d->bias && !plan_operand(p, weight ? DNNL_ARG_DIFF_BIAS : DNNL_ARG_BIAS, weight, 1,
                               (dnnl_dims_t){d->oc}, dnnl_f32, (dnnl_dims_t){1}))
    return false;

  enum { FEW = 4 };
  bool last =
      (d->x_last || d->y_last) && !(forward && d->ic < FEW) && conv_choose(c, p, d, true, false);
  if (!last && !conv_choose(c, p, d, false, true)) return false;
  dnnl_query_t x = input ? dnnl_query_diff_src_md : dnnl_query_src_md,
               w = weight ? dnnl_query_diff_weights_md : dnnl_query_weights_md,
               y = forward ? dnnl_query_dst_md : dnnl_query_diff_dst_md;
  return plan_reorder(c, p, &p->operand[0], dnnl_primitive_desc_query_md(p->pd, x, 0)) &&
         plan_reorder(c, p, &p->operand[1], dnnl_primitive_desc_query_md(p->pd, w, 0)) &&
         plan_reorder(c, p, &p->operand[2], dnnl_primitive_desc_query_md(p->pd, y, 0)) &&
         plan_finish(p);
}

size_t dnn_conv_scratch(DnnCache *cache, const DnnConv *d) {
  Key key;
  conv_key(&key, d);
  return plan_scratch(cache, &key, conv_build, d);
}

int dnn_conv(DnnCache *cache, const DnnConv *d, void *x, void *w, void *bias, void *y,
             void *scratch) {
  Key key;
  conv_key(&key, d);
  return plan_run(cache, &key, conv_build, d, (void *const[]){x, w, y, bias}, scratch);
}
