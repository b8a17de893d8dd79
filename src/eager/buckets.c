/* Gradients that are averaged over ranks while a backward pass goes on.
 *
 * Leaves are cut into buckets. When a leaf's gradient is whole, the tape gives it here
 * (buckets_take). When a bucket is full, and all before it, a thread averages its gradients over
 * the ranks in one call, where they lie, while the pass fills the next. What holds:
 *
 *   B1  Buckets go in their order, on every rank the same, whatever order gradients come in. The
 *       thread's calls have a group of their own (comm_group_apart).
 *   B2  [0, done) are averaged, [done, posted) are the thread's, the rest is the pass's. All of a
 *       bucket but `posted` and `done` is touched by one side only.
 *   B3  The elements of a bucket stand in one order on all ranks: that of their slots, in a slot
 * that of the leaf's memory. A gradient that lies otherwise is copied, and the average back. B4 The
 * pass that brings the last gradient ends when all buckets are averaged.
 *
 * Row-sparse ones are alone in their buckets: all ranks' rows are gathered.
 *
 * With find_unused, leaves that the outputs do not reach count as given with the first gradient,
 * with zeros, or with what they have from earlier passes. Which were used by any rank is one more
 * message; those that none used keep the gradient that they had. */
#include "buckets.h"

#include <stdio.h>
#include <string.h>
#include <time.h>

#include "op_args.h"
#include "op_ids.h"
#include "sparse.h"
#include "tape_int.h"
#include "thread_start.h"
#include "vec.h"
#include "watch.h"

typedef struct BucketSlot {
  struct Buckets *of;
  Tensor *leaf; /* counted */
  char *name;
  DType dtype; /* it and the next when it was made */
  int64_t count;
  bool sparse, used, taken;
  int bucket;
  Tensor *part; /* what this pass averages: the gradient, or a copy of it; counted */
} BucketSlot;

typedef struct Bucket {
  DType dtype;
  bool sparse;
  int first, n, missing; /* slots: order[first ... first + n - 1] */
  int64_t count;         /* elements; sparse: in a row */
  CommPiece *pieces;     /* those of this pass */
  int n_pieces;
  Tensor *mine;                /* sparse: this rank's rows. Counted; NULL: none */
  int64_t rows, *ids, *counts; /* sparse: those of all ranks */
  void *values;
} Bucket;

enum { END_SECONDS = 5 };

typedef enum BucketsState {
  BUCKETS_IDLE,  /* no pass is expected */
  BUCKETS_ARMED, /* the next one averages */
  BUCKETS_LOCAL, /* the next one does not */
  BUCKETS_BROKEN /* one failed */
} BucketsState;

struct Buckets {
  Buckets *next;
  Eager *E;
  CommGroup *group;
  bool find_unused;
  BucketsState state;
  int n, n_taken, n_buckets;
  BucketSlot *slots;
  Bucket *buckets;
  int *order;       /* slots in the order of their buckets */
  int *arrived;     /* slots in the order of their gradients */
  bool has_arrived; /* all of them */
  uint8_t *used;    /* find_unused: by slot, by any rank */
  pthread_t thread;
  bool has_thread;
  pthread_mutex_t lock; /* of what follows */
  pthread_cond_t changed;
  int posted, done; /* n_buckets + 1 with the used ones */
  bool closing;
  int code;
  char text[1000];
};

static int no_memory(void) {
  return err_set(MF_ENOMEM, "DistributedDataParallel: out of memory");
}

/* -- The thread -------------------------------------------------------------------------------- */

static int gather(Buckets *b, DType dtype, const int64_t *counts, const void *in, void *out) {
  CommCall call = {.op = COMM_ALL_GATHER, .dtype = dtype, .counts = counts};
  return comm_collective(b->group, &call, in, out);
}

/* Everybody's rows, in the order of the ranks. */
static int gather_rows(Buckets *b, Bucket *k) {
  int n = comm_group_size(b->group);
  const BucketSlot *s = &b->slots[b->order[k->first]];
  int64_t mine = k->mine ? k->mine->row_ids->m.shape[0] : 0, width = k->count;
  size_t size = dtype_size(k->dtype);
  for (int i = 0; i < n; i++) k->counts[i] = 1;
  int code = gather(b, I64, k->counts, &mine, k->counts + n);
  if (code) return code;
  k->rows = 0;
  for (int i = 0; i < n; i++) k->rows += k->counts[i] = k->counts[n + i];
  k->ids = mem_alloc(sizeof *k->ids * (size_t)k->rows + 1);
  k->values = mem_alloc(size * (size_t)(k->rows * width) + 1);
  if (!k->ids || !k->values)
    return err_set(MF_ENOMEM, "DistributedDataParallel: out of memory for the gradient of %s",
                   s->name);
  code = gather(b, I64, k->counts, k->mine ? tensor_data(k->mine->row_ids) : NULL, k->ids);
  for (int i = 0; i < n; i++) k->counts[i] *= width;
  if (code) return code;
  return gather(b, k->dtype, k->counts, k->mine ? tensor_data(k->mine->row_values) : NULL,
                k->values);
}

static int average(Buckets *b, int i) {
  CommCall call = {.op = COMM_ALL_REDUCE, .reduce = COMM_MAX, .dtype = U8, .count = b->n};
  if (i == b->n_buckets) return comm_collective(b->group, &call, b->used, b->used);
  Bucket *k = &b->buckets[i];
  if (k->sparse) return gather_rows(b, k);
  call = (CommCall){.op = COMM_ALL_REDUCE,
                    .reduce = COMM_AVG,
                    .dtype = k->dtype,
                    .count = k->count,
                    .n_pieces = k->n_pieces,
                    .pieces = k->pieces};
  return comm_collective(b->group, &call, NULL, NULL);
}

/* Notes what the thread did for who looks at the context. */
static void note(Buckets *b, int i, int64_t begin) {
  Watch *w = watch_of(b->E->context);
  if (!watch_profiles(w)) return;
  bool sparse = i < b->n_buckets && b->buckets[i].sparse;
  ProfileEvent e = {.where = "communication",
                    .kind = PROFILE_ACT,
                    .begin = begin,
                    .end = profile_now(),
                    .track = b,
                    .act = (uint64_t)i};
  snprintf(e.name, sizeof e.name, "%s of bucket %d", sparse ? "all_gather" : "all_reduce", i);
  watch_add(w, &e);
}

static void *run_thread(void *arg) {
  Buckets *b = arg;
  pthread_mutex_lock(&b->lock);
  for (;;) {
    while (b->done == b->posted && !b->closing) pthread_cond_wait(&b->changed, &b->lock);
    if (b->done == b->posted) break;
    int i = b->done, code = b->code;
    pthread_mutex_unlock(&b->lock);
    int64_t begin = profile_now();
    if (!code && (code = average(b, i))) code = code == MF_EINTR ? code : MF_ECOMM;
    else if (!code) note(b, i, begin);
    pthread_mutex_lock(&b->lock);
    if (code && !b->code) {
      b->code = code;
      snprintf(b->text, sizeof b->text, "%s", err_text());
    }
    b->done++;
    pthread_cond_broadcast(&b->changed);
  }
  pthread_mutex_unlock(&b->lock);
  return NULL;
}

/* The thread's failure as an error of the caller's. */
static int explain(Buckets *b) {
  return b->code ? err_set(b->code, "%s", b->text) : 0;
}

static int failure(Buckets *b) {
  pthread_mutex_lock(&b->lock);
  int code = explain(b);
  pthread_mutex_unlock(&b->lock);
  return code;
}

/* Until the thread has done all it was given. */
static int drain(Buckets *b) {
  pthread_mutex_lock(&b->lock);
  while (b->done < b->posted) pthread_cond_wait(&b->changed, &b->lock);
  int code = explain(b);
  pthread_mutex_unlock(&b->lock);
  return code;
}

/* Where the bucket's elements are. */
static void open_pieces(Buckets *b, Bucket *k) {
  k->n_pieces = 0;
  for (int i = k->first; i < k->first + k->n && !k->sparse; i++) {
    const Tensor *part = b->slots[b->order[i]].part;
    int64_t count = meta_numel(&part->m);
    if (count) k->pieces[k->n_pieces++] = (CommPiece){tensor_data(part), count};
  }
}

/* Gives the thread what is full and next. `posted` is written by this side only. */
static void post(Buckets *b) {
  int full = b->posted;
  while (full < b->n_buckets && !b->buckets[full].missing) open_pieces(b, &b->buckets[full++]);
  if (full == b->n_buckets && b->find_unused) full++;
  if (full == b->posted) return;
  pthread_mutex_lock(&b->lock);
  b->posted = full;
  pthread_cond_broadcast(&b->changed);
  pthread_mutex_unlock(&b->lock);
}

/* -- Filling ----------------------------------------------------------------------------------- */

/* The gradient must be what the bucket has room for. */
static int check(const BucketSlot *s, const Tensor *g) {
  bool same = meta_numel(&g->m) == s->count && tensor_same_shape(s->leaf, g);
  if (s->leaf->m.dtype != s->dtype || g->m.dtype != s->dtype)
    return err_set(MF_EINVAL,
                   "DistributedDataParallel: %s is of %s now and was of %s when the module was "
                   "made; convert a model before",
                   s->name, dtype_name((DType)s->leaf->m.dtype), dtype_name(s->dtype));
  if (!same)
    return err_set(MF_EINVAL,
                   "DistributedDataParallel: %s has another size than when the module was made",
                   s->name);
  if (tensor_is_rows(g) && !s->sparse)
    return err_set(MF_EINVAL,
                   "DistributedDataParallel: the gradient of %s is row-sparse, which only those of "
                   "layers with sparse = true may be",
                   s->name);
  if (!tensor_is_rows(g) && s->sparse)
    return err_set(MF_EINVAL,
                   "DistributedDataParallel: the gradient of %s is dense, since it is used in "
                   "another way too; make its layer without sparse = true",
                   s->name);
  return 0;
}

static int copy(Eager *E, Tensor *to, Tensor *from) {
  EagerCall c = {.op = &op_table[OP_copy_], .in = (Tensor *[]){to, from}, .n_in = 2};
  char none[1] = {0};
  c.args = none; /* it has none */
  int code = eager_call(E, &c);
  if (!code) eager_call_clear(&c);
  return code;
}

/* The strides in which the leaf's elements lie, if it is without gaps. */
static void layout_of(const Tensor *leaf, int64_t *stride) {
  const Meta *m = &leaf->m;
  if (shape_is_dense(m->ndim, m->shape, m->stride))
    memcpy(stride, m->stride, sizeof *stride * (size_t)m->ndim);
  else shape_contiguous(m->ndim, m->shape, stride);
}

static bool lies_as(const Tensor *g, const int64_t *stride) {
  bool same = true;
  for (int d = 0; d < g->m.ndim; d++) same &= g->m.shape[d] == 1 || g->m.stride[d] == stride[d];
  return same;
}

/* Memory of the slot's own. */
static Tensor *make_part(Buckets *b, const BucketSlot *s, const int64_t *stride) {
  const Meta *m = &s->leaf->m;
  Tensor *t = tensor_create(b->E, s->dtype, m->ndim, m->shape, m->device);
  if (t) memcpy(t->m.stride, stride, sizeof *stride * (size_t)m->ndim);
  return t;
}

static int fill(Buckets *b, BucketSlot *s) {
  Tensor *g = s->leaf->ag->grad;
  int64_t stride[MF_MAX_DIMS];
  int code = g ? check(s, g) : 0;
  if (code) return code;
  layout_of(s->leaf, stride);
  if (g && s->used && lies_as(g, stride)) {
    s->part = tensor_retain(g);
    return 0;
  }
  s->part = make_part(b, s, stride);
  if (!s->part) return MF_ENOMEM;
  if (g) return copy(b->E, s->part, g);
  memset(tensor_data(s->part), 0, (size_t)s->count * dtype_size(s->dtype));
  return 0;
}

/* Ids and values in one piece each, no id twice. */
static int fill_rows(Buckets *b, Bucket *k, BucketSlot *s) {
  Eager *E = b->E;
  Tensor *g = s->leaf->ag->grad;
  int code = g ? check(s, g) : 0;
  if (code || !g) return code;
  Tensor *merged = sparse_coalesce(E, g), *ids = NULL, *values = NULL;
  struct clone_args plain = {.memory_format = 1};
  if (merged) ids = eager_op(E, OP_clone, 1, &merged->row_ids, &plain);
  if (ids) values = eager_op(E, OP_clone, 1, &merged->row_values, &plain);
  if (values) k->mine = sparse_new(ids, values, merged->m.shape[0]);
  tensor_release(merged);
  tensor_release(ids);
  tensor_release(values);
  return k->mine ? 0 : MF_ENOMEM;
}

/* The slot's part of this pass is there. */
static int take(Buckets *b, BucketSlot *s) {
  Bucket *k = &b->buckets[s->bucket];
  int code = k->sparse ? fill_rows(b, k, s) : fill(b, s);
  if (code) return code;
  s->taken = true;
  b->arrived[b->n_taken++] = (int)(s - b->slots);
  if (!--k->missing) post(b);
  return 0;
}

static int take_unused(Buckets *b) {
  int code = 0;
  for (int i = 0; i < b->n && !code; i++)
    if (!b->slots[i].used) code = take(b, &b->slots[i]);
  return code;
}

static int refuse_unasked(const BucketSlot *s) {
  return err_set(MF_EINVAL,
                 "DistributedDataParallel: %s got a gradient, but the module was not called since "
                 "the last backward; call the DistributedDataParallel module, not what is in it, "
                 "and backward once for each call",
                 s->name);
}

int buckets_take(Tensor *leaf) {
  BucketSlot *s = leaf->ag->bucket;
  Buckets *b = s->of;
  if (b->E->tracer)
    return err_set(MF_EUNSUPPORTED,
                   "DistributedDataParallel: it averages gradients of eager calls "
                   "only, not those of a compiled step");
  if (b->state == BUCKETS_LOCAL) return 0;
  if (b->state != BUCKETS_ARMED) return refuse_unasked(s);
  if (!s->used)
    return err_set(MF_EINVAL,
                   "DistributedDataParallel: %s got a gradient, but none of the module's results "
                   "was made from it; results must be tensors, or tables of them",
                   s->name);
  if (s->taken)
    return err_set(MF_EINVAL,
                   "DistributedDataParallel: %s got a second gradient since the module was called; "
                   "one backward pass must give all of it",
                   s->name);
  int code = failure(b);
  if (!code && !b->n_taken) code = take_unused(b);
  return code ? code : take(b, s);
}

/* -- The end of a pass ------------------------------------------------------------------------- */

/* The rows of all ranks as the leaf's gradient. */
static int finish_rows(Buckets *b, Bucket *k, BucketSlot *s) {
  int64_t shape[MF_MAX_DIMS];
  const Meta *m = &s->leaf->m;
  memcpy(shape, m->shape, sizeof *shape * (size_t)m->ndim);
  shape[0] = k->rows;
  Tensor *ids = tensor_wrap(b->E, I64, 1, &k->rows, k->ids, mem_free, k->ids);
  if (!ids) return MF_ENOMEM;
  k->ids = NULL;
  Tensor *values = tensor_wrap(b->E, k->dtype, m->ndim, shape, k->values, mem_free, k->values),
         *by = values ? tensor_number(b->E, comm_group_size(b->group), false) : NULL, *rows = NULL;
  if (values) k->values = NULL;
  if (by && !eager_op_into(b->E, OP_div, 2, (Tensor *[]){values, by}, NULL))
    rows = sparse_new(ids, values, m->shape[0]);
  tensor_release(ids);
  tensor_release(values);
  tensor_release(by);
  if (!rows) return MF_ENOMEM;
  tensor_release(s->leaf->ag->grad);
  s->leaf->ag->grad = rows;
  return 0;
}

static int finish_slot(Buckets *b, BucketSlot *s) {
  Autograd *ag = s->leaf->ag;
  Bucket *k = &b->buckets[s->bucket];
  if (b->find_unused && !b->used[s - b->slots]) return 0;
  if (k->sparse) return finish_rows(b, k, s);
  storage_touch(s->part->storage);
  if (ag->grad == s->part) return 0;
  if (ag->grad && ag->grad->refs > 1) return copy(b->E, ag->grad, s->part); /* others see it too */
  tensor_release(ag->grad);
  ag->grad = tensor_retain(s->part);
  return 0;
}

/* What the pass had is given back. The thread is done. */
static void clear(Buckets *b) {
  for (int i = 0; i < b->n; i++) {
    BucketSlot *s = &b->slots[i];
    tensor_release(s->part);
    s->part = NULL;
    s->used = s->taken = false;
  }
  for (int i = 0; i < b->n_buckets; i++) {
    Bucket *k = &b->buckets[i];
    tensor_release(k->mine);
    mem_free(k->ids);
    mem_free(k->values);
    k->mine = NULL;
    k->ids = NULL;
    k->values = NULL;
    k->missing = k->n;
  }
  b->n_taken = 0;
  pthread_mutex_lock(&b->lock);
  b->posted = b->done = 0;
  pthread_mutex_unlock(&b->lock);
}

static int finish(Buckets *b) {
  int code = drain(b);
  for (int i = 0; i < b->n && !code; i++) code = finish_slot(b, &b->slots[i]);
  clear(b);
  b->has_arrived = !code;
  b->state = code ? BUCKETS_BROKEN : BUCKETS_IDLE;
  return code;
}

int buckets_end_pass(Eager *E, int code) {
  for (Buckets *b = E->buckets; b; b = b->next) {
    if (b->state != BUCKETS_ARMED || !b->n_taken) continue;
    if (code) b->state = BUCKETS_BROKEN;
    else if (b->n_taken == b->n) code = finish(b);
  }
  return code;
}

/* -- Before a pass ----------------------------------------------------------------------------- */

/* The names of leaves without a gradient, some of them. */
static int refuse_unfinished(Buckets *b) {
  char list[400];
  size_t at = 0;
  int missing = b->n - b->n_taken, told = 0;
  for (int i = 0; i < b->n && at + 100 < sizeof list; i++) {
    if (b->slots[i].taken) continue;
    at += (size_t)snprintf(list + at, sizeof list - at, "%s%.80s", told++ ? ", " : "",
                           b->slots[i].name);
  }
  b->state = BUCKETS_BROKEN;
  return err_set(
      MF_EINVAL,
      "DistributedDataParallel: in the last backward %d of %d parameters got no gradient "
      "on rank %d: %s%s; find_unused_parameters = true lets some be unused",
      missing, b->n, comm_group_ranks(b->group)[comm_group_position(b->group)], list,
      told < missing ? ", ..." : "");
}

typedef struct Seen {
  Node *node;
  uint64_t pass; /* what it carried */
} Seen;

typedef VEC(Seen) SeenList;

static bool see(SeenList *list, Node *n, uint64_t pass) {
  if (!n || n->pass == pass) return true;
  Seen s = {n, n->pass};
  if (!vec_push(list, s)) return false;
  n->pass = pass;
  return true;
}

/* Marks the slots of leaves below the nodes of the list. */
static bool reach(Buckets *b, SeenList *list, uint64_t pass) {
  for (size_t i = 0; i < list->n; i++) {
    Node *n = list->at[i].node;
    Tensor *leaf = n->kind == NODE_ACCUMULATE ? n->leaf : NULL;
    if (leaf && leaf->ag->bucket && leaf->ag->bucket->of == b) leaf->ag->bucket->used = true;
    for (int k = 0; k < n->n_in; k++)
      if (!see(list, n->next[k].node, pass)) return false;
  }
  return true;
}

static int find_used(Buckets *b, int n, Tensor *const *outputs) {
  SeenList list = {0};
  uint64_t pass = ++b->E->passes;
  Edge *edges = mem_zalloc(sizeof *edges * (size_t)n + 1);
  int code = edges ? 0 : no_memory();
  for (int i = 0; i < n && !code; i++) {
    code = tape_edge(b->E, outputs[i], &edges[i]);
    if (!code && !see(&list, edges[i].node, pass)) code = no_memory();
  }
  if (!code && !reach(b, &list, pass)) code = no_memory();
  for (size_t i = list.n; i-- > 0;) list.at[i].node->pass = list.at[i].pass;
  for (int i = 0; i < n && edges; i++) tape_node_release(edges[i].node);
  vec_free(&list);
  mem_free(edges);
  return code;
}

int buckets_begin(Buckets *b, int n_outputs, Tensor *const *outputs) {
  if (b->state == BUCKETS_BROKEN)
    return err_set(MF_EINVAL,
                   "DistributedDataParallel: a backward failed before its gradients "
                   "were averaged, so that the ranks are out of step");
  if (b->state == BUCKETS_ARMED && b->n_taken) return refuse_unfinished(b);
  int code = failure(b);
  for (int i = 0; i < b->n; i++) b->slots[i].used = !b->find_unused;
  if (!code && b->find_unused) code = find_used(b, n_outputs, outputs);
  for (int i = 0; i < b->n; i++) b->used[i] = b->slots[i].used;
  if (!code) b->state = BUCKETS_ARMED;
  return code;
}

void buckets_begin_local(Buckets *b) {
  if (b->state == BUCKETS_IDLE || (b->state == BUCKETS_ARMED && !b->n_taken))
    b->state = BUCKETS_LOCAL;
}

const int *buckets_order(const Buckets *b) {
  return b->has_arrived ? b->arrived : NULL;
}

int buckets_count(const Buckets *b) {
  return b->n;
}

/* -- Making and ending ------------------------------------------------------------------------- */

static int64_t width_of(const Tensor *leaf) {
  int64_t n = 1;
  for (int d = 1; d < leaf->m.ndim; d++) n *= leaf->m.shape[d];
  return n;
}

static void free_buckets(Buckets *b) {
  for (int i = 0; i < b->n_buckets; i++) {
    mem_free(b->buckets[i].counts);
    mem_free(b->buckets[i].pieces);
  }
  mem_free(b->buckets);
  b->buckets = NULL;
  b->n_buckets = 0;
}

static int open_bucket(Buckets *b, Bucket *k, int index, int first, int n) {
  *k = (Bucket){.first = first, .n = n, .missing = n};
  for (int i = first; i < first + n; i++) {
    BucketSlot *s = &b->slots[b->order[i]];
    MF_ASSERT(i == first || (k->dtype == s->dtype && !k->sparse && !s->sparse),
              "bucket %d: leaves of different kinds", index);
    k->dtype = s->dtype;
    k->sparse = s->sparse;
    s->bucket = index;
    k->count += s->sparse ? width_of(s->leaf) : s->count;
  }
  k->counts = mem_alloc(2 * sizeof *k->counts * (size_t)comm_group_size(b->group));
  k->pieces = mem_alloc(sizeof *k->pieces * (size_t)n);
  return k->counts && k->pieces ? 0 : no_memory();
}

int buckets_arrange(Buckets *b, int n_buckets, const int *sizes, const int *order) {
  free_buckets(b);
  memcpy(b->order, order, sizeof *order * (size_t)b->n);
  b->buckets = mem_zalloc(sizeof *b->buckets * (size_t)n_buckets + 1);
  int code = b->buckets ? 0 : no_memory();
  for (int i = 0, first = 0; i < n_buckets && !code; first += sizes[i++]) {
    code = open_bucket(b, &b->buckets[i], i, first, sizes[i]);
    b->n_buckets = i + 1;
  }
  return code;
}

static int open_slot(Buckets *b, int i, Tensor *leaf, const char *name, bool sparse) {
  BucketSlot *s = &b->slots[i];
  Autograd *ag = tensor_autograd(leaf);
  if (ag->bucket)
    return err_set(MF_EINVAL,
                   "DistributedDataParallel: %s belongs to another DistributedDataParallel module",
                   name);
  size_t n = strlen(name) + 1;
  char *copied = mem_alloc(n);
  if (!copied) return no_memory();
  *s = (BucketSlot){.of = b,
                    .leaf = tensor_retain(leaf),
                    .name = memcpy(copied, name, n),
                    .dtype = (DType)leaf->m.dtype,
                    .count = meta_numel(&leaf->m),
                    .sparse = sparse};
  ag->bucket = s;
  return 0;
}

static int open_slots(Buckets *b, int n, Tensor *const *leaves, const char *const *names,
                      const bool *sparse) {
  size_t size = (size_t)n;
  b->slots = mem_zalloc(sizeof *b->slots * size);
  b->order = mem_zalloc(sizeof *b->order * size);
  b->arrived = mem_zalloc(sizeof *b->arrived * size);
  b->used = mem_zalloc(size);
  if (!b->slots || !b->order || !b->arrived || !b->used) return no_memory();
  int code = 0;
  for (b->n = 0; b->n < n && !code; b->n++)
    code = open_slot(b, b->n, leaves[b->n], names[b->n], sparse[b->n]);
  return code;
}

Buckets *buckets_create(Eager *E, CommGroup *g, int n, Tensor *const *leaves,
                        const char *const *names, const bool *sparse, bool find_unused) {
  Buckets *b = mem_zalloc(sizeof *b);
  if (!b) {
    no_memory();
    return NULL;
  }
  *b = (Buckets){.E = E, .group = g, .find_unused = find_unused, .next = E->buckets};
  E->buckets = b;
  pthread_mutex_init(&b->lock, NULL);
  pthread_cond_init(&b->changed, NULL);
  int code = open_slots(b, n, leaves, names, sparse);
  if (!code && !(b->has_thread = !thread_start(&b->thread, run_thread, b)))
    code = err_set(MF_ENOMEM, "DistributedDataParallel: the system gives no more threads");
  if (!code) return b;
  buckets_destroy(b);
  return NULL;
}

/* After a pass that failed here, the others may wait for what will not come, and the thread for
 * them. */
static void end_thread(Buckets *b) {
  if (!b->has_thread) return;
  struct timespec until;
  clock_gettime(CLOCK_REALTIME, &until);
  until.tv_sec += END_SECONDS;
  pthread_mutex_lock(&b->lock);
  b->closing = true;
  pthread_cond_broadcast(&b->changed);
  while (b->done < b->posted && !pthread_cond_timedwait(&b->changed, &b->lock, &until)) continue;
  if (b->done < b->posted)
    comm_group_fail(b->group, "left a DistributedDataParallel module in the middle of a step");
  pthread_mutex_unlock(&b->lock);
  pthread_join(b->thread, NULL);
}

void buckets_destroy(Buckets *b) {
  if (!b) return;
  end_thread(b);
  if (b->slots) clear(b);
  free_buckets(b);
  for (int i = 0; i < b->n; i++) {
    BucketSlot *s = &b->slots[i];
    if (!s->leaf) continue;
    s->leaf->ag->bucket = NULL;
    tensor_release(s->leaf);
    mem_free(s->name);
  }
  Buckets **at = &b->E->buckets;
  while (*at != b) at = &(*at)->next;
  *at = b->next;
  mem_free(b->slots);
  mem_free(b->order);
  mem_free(b->arrived);
  mem_free(b->used);
  pthread_mutex_destroy(&b->lock);
  pthread_cond_destroy(&b->changed);
  mem_free(b);
}
