/* Running boxing plans: what each rank does with its part in each step.
 *
 * A step along an axis concerns the tensor that the ranks along it make up, `whole` here; `part` is
 * what this rank has of it. Collectives move one block from each rank to each, in the order of the
 * group, so parts that do not lie so are packed first. All this runs beside the tape. */
#include <stdio.h>
#include <string.h>

#include "global.h"
#include "mem.h"
#include "op_args.h"
#include "op_ids.h"

typedef struct Step {
  Eager *E;
  const Place *place;
  SbpList now; /* before the step */
  Sbp from, to;
  int axis, n, me, ndim;
  int64_t whole[MF_MAX_DIMS]; /* what the ranks along the axis make up */
  CommGroup *group;
  const int *order;
  DType dtype;
} Step;

/* -- Local pieces ------------------------------------------------------------------------------ */

/* A view of x from `start` on along dim d, without the tape. */
static Tensor *cut(const Tensor *x, int d, int64_t start, int64_t length) {
  Tensor *y = tensor_alias(x);
  if (!y) return NULL;
  y->m.offset += start * y->m.stride[d];
  y->m.shape[d] = length;
  return y;
}

static Tensor *create(const Step *s, const int64_t *shape) {
  return tensor_create(s->E, s->dtype, s->ndim, shape, DEVICE_CPU);
}

static Tensor *zeros(Eager *E, DType dtype, int ndim, const int64_t *shape) {
  Tensor *z = tensor_create(E, dtype, ndim, shape, DEVICE_CPU);
  if (z) memset(z->storage->data, 0, z->storage->bytes);
  return z;
}

static Tensor *copy_of(Eager *E, Tensor *x) {
  return eager_op(E, OP_clone, 1, &x, &(struct clone_args){.memory_format = 1});
}

static Tensor *packed(Eager *E, Tensor *x) {
  return meta_is_contiguous(&x->m) ? tensor_retain(x) : copy_of(E, x);
}

/* to = from; takes neither count. */
static int copy_into(Eager *E, Tensor *to, Tensor *from) {
  if (!to || !from) return MF_ENOMEM;
  return meta_numel(&to->m) ? eager_op_into(E, OP_copy_, 2, (Tensor *[]){to, from}, NULL) : 0;
}

/* Copies x into y's piece along d, or that piece into x. */
static int copy_piece(Eager *E, Tensor *y, int d, int64_t start, int64_t length, Tensor *x,
                      bool out) {
  Tensor *piece = cut(y, d, start, length);
  int rc = out ? copy_into(E, x, piece) : copy_into(E, piece, x);
  tensor_release(piece);
  return rc;
}

/* The piece of a flat tensor from `at` on, in this shape. */
static Tensor *block(const Tensor *flat, int64_t at, int ndim, const int64_t *shape) {
  Tensor *y = tensor_alias(flat);
  if (!y) return NULL;
  y->m.offset += at;
  y->m.ndim = (int8_t)ndim;
  memcpy(y->m.shape, shape, sizeof(int64_t) * (size_t)ndim);
  shape_contiguous(ndim, shape, y->m.stride);
  return y;
}

static void part_of(const Step *s, int d, int i, int64_t *start, int64_t *length) {
  sbp_part(s->whole[d], s->n, i, start, length);
}

/* Whether pieces along d, in the order of the group, lie one behind the other. */
static bool in_order(const Step *s, int d) {
  for (int k = 0; k < d; k++)
    if (s->whole[k] != 1) return false;
  for (int i = 0; i < s->n; i++)
    if (s->order[i] != i) return false;
  return true;
}

/* -- Pieces for all ranks of the group --------------------------------------------------------- */

/* Shape and size of what goes from place i along the axis to place k: i's part of dim `d` (-1: all)
 * and k's of dim `e`. */
static int64_t piece_shape(const Step *s, int d, int i, int e, int k, int64_t *shape) {
  int64_t start;
  memcpy(shape, s->whole, sizeof(int64_t) * (size_t)s->ndim);
  if (d >= 0) part_of(s, d, i, &start, &shape[d]);
  if (e >= 0) part_of(s, e, k, &start, &shape[e]);
  return shape_numel(s->ndim, shape);
}

/* Elements for each position of the group: what place i sends here, or what this rank sends. */
static void count(const Step *s, int d, int e, bool sends, int64_t *counts) {
  int64_t shape[MF_MAX_DIMS];
  for (int i = 0; i < s->n; i++)
    counts[s->order[i]] = piece_shape(s, d, sends ? s->me : i, e, sends ? i : s->me, shape);
}

static int64_t offset_of(const int64_t *counts, int position) {
  int64_t at = 0;
  for (int i = 0; i < position; i++) at += counts[i];
  return at;
}

static Tensor *flat(const Step *s, const int64_t *counts) {
  int64_t n = offset_of(counts, s->n);
  return tensor_create(s->E, s->dtype, 1, &n, DEVICE_CPU);
}

/* Between y and the blocks of a flat tensor: block of place i is y's piece along dim `along`. */
static int repack(const Step *s, Tensor *y, int along, int d, int e, bool sends, Tensor *blocks,
                  const int64_t *counts) {
  int rc = 0;
  for (int i = 0; i < s->n && !rc; i++) {
    int64_t shape[MF_MAX_DIMS], start, length;
    piece_shape(s, d, sends ? s->me : i, e, sends ? i : s->me, shape);
    part_of(s, along, i, &start, &length);
    Tensor *b = block(blocks, offset_of(counts, s->order[i]), s->ndim, shape);
    rc = b ? copy_piece(s->E, y, along, start, length, b, sends) : MF_ENOMEM;
    tensor_release(b);
  }
  return rc;
}

static int collective(const Step *s, CommCall *call, Tensor *in, Tensor *out) {
  static const CommReduce reduces[] = {
      [SBP_P] = COMM_SUM, [SBP_PMAX] = COMM_MAX, [SBP_PMIN] = COMM_MIN};
  call->dtype = s->dtype;
  if (sbp_is_partial(s->from)) call->reduce = reduces[s->from.kind];
  return comm_collective(s->group, call, tensor_data(in), tensor_data(out));
}

/* What a step made, or nothing when it failed. */
static Tensor *result(int rc, Tensor *y) {
  if (!rc) return y;
  tensor_release(y);
  return NULL;
}

static int64_t *new_counts(const Step *s, int lists) {
  int64_t *counts = mem_alloc(sizeof *counts * (size_t)(s->n * lists));
  if (!counts) err_set(MF_ENOMEM, "boxing: out of memory");
  return counts;
}

/* -- Steps ------------------------------------------------------------------------------------- */

static Tensor *slice(const Step *s, Tensor *x) {
  int64_t start, length;
  part_of(s, s->to.dim, s->me, &start, &length);
  return cut(x, s->to.dim, start, length);
}

static Tensor *gather(const Step *s, Tensor *x) {
  int d = s->from.dim;
  int64_t *counts = new_counts(s, 1);
  if (!counts) return NULL;
  count(s, d, -1, false, counts);
  bool direct = in_order(s, d);
  Tensor *in = packed(s->E, x), *all = flat(s, counts), *y = NULL;
  CommCall call = {.op = COMM_ALL_GATHER, .counts = counts};
  int rc = in && all ? collective(s, &call, in, all) : MF_ENOMEM;
  if (!rc) y = direct ? block(all, 0, s->ndim, s->whole) : create(s, s->whole);
  if (!rc && !y) rc = MF_ENOMEM;
  if (!rc && !direct) rc = repack(s, y, d, d, -1, false, all, counts);
  tensor_release(in);
  tensor_release(all);
  mem_free(counts);
  return result(rc, y);
}

static Tensor *all_to_all(const Step *s, Tensor *x) {
  int d = s->from.dim, e = s->to.dim;
  int64_t *out_counts = new_counts(s, 2), *counts, shape[MF_MAX_DIMS], start;
  if (!out_counts) return NULL;
  counts = out_counts + s->n;
  count(s, d, e, true, counts);
  count(s, d, e, false, out_counts);
  memcpy(shape, s->whole, sizeof shape);
  part_of(s, e, s->me, &start, &shape[e]);
  Tensor *in = flat(s, counts), *all = flat(s, out_counts), *y = create(s, shape);
  int rc = in && all && y ? repack(s, x, e, d, e, true, in, counts) : MF_ENOMEM;
  CommCall call = {.op = COMM_ALL_TO_ALL, .counts = counts, .out_counts = out_counts};
  if (!rc) rc = collective(s, &call, in, all);
  if (!rc) rc = repack(s, y, d, d, e, false, all, out_counts);
  tensor_release(in);
  tensor_release(all);
  mem_free(out_counts);
  return result(rc, y);
}

static Tensor *reduce(const Step *s, Tensor *x) {
  Tensor *in = packed(s->E, x), *y = create(s, s->whole);
  CommCall call = {.op = COMM_ALL_REDUCE, .count = shape_numel(s->ndim, s->whole)};
  int rc = in && y ? collective(s, &call, in, y) : MF_ENOMEM;
  tensor_release(in);
  return result(rc, y);
}

static Tensor *reduce_scatter(const Step *s, Tensor *x) {
  int e = s->to.dim;
  int64_t *counts = new_counts(s, 1), shape[MF_MAX_DIMS];
  if (!counts) return NULL;
  count(s, -1, e, true, counts);
  piece_shape(s, -1, 0, e, s->me, shape);
  bool direct = in_order(s, e);
  Tensor *in = direct ? packed(s->E, x) : flat(s, counts), *y = create(s, shape);
  int rc = in && y ? 0 : MF_ENOMEM;
  if (!rc && !direct) rc = repack(s, x, e, -1, e, true, in, counts);
  CommCall call = {.op = COMM_REDUCE_SCATTER, .counts = counts};
  if (!rc) rc = collective(s, &call, in, y);
  tensor_release(in);
  mem_free(counts);
  return result(rc, y);
}

static Tensor *keep_first(const Step *s, Tensor *x) {
  return s->me ? zeros(s->E, s->dtype, s->ndim, s->whole) : tensor_retain(x);
}

static Tensor *pad(const Step *s, Tensor *x) {
  int64_t start, length;
  part_of(s, s->from.dim, s->me, &start, &length);
  Tensor *y = zeros(s->E, s->dtype, s->ndim, s->whole);
  int rc = y ? copy_piece(s->E, y, s->from.dim, start, length, x, false) : MF_ENOMEM;
  return result(rc, y);
}

static Tensor *run_step(Step *s, BoxKind kind, Tensor *x) {
  switch (kind) {
    case BOX_SLICE: return slice(s, x);
    case BOX_GATHER: return gather(s, x);
    case BOX_ALL_TO_ALL: return all_to_all(s, x);
    case BOX_REDUCE: return reduce(s, x);
    case BOX_REDUCE_SCATTER: return reduce_scatter(s, x);
    case BOX_FIRST: return keep_first(s, x);
    case BOX_PAD: return pad(s, x);
    default: return tensor_retain(x);
  }
}

/* -- Exchanges --------------------------------------------------------------------------------- */

enum { EXCHANGE_EDGE = 0x626f78 };
#define EDGE (UINT64_C(1) << 62 | EXCHANGE_EDGE)

typedef struct Transfers {
  Comm *comm;
  int n;
  CommTransfer **at;
  Tensor **held; /* what they read or write; counted */
} Transfers;

/* Waits for all, also when one has failed: their memory must not be in use afterwards. */
static int wait_for(Transfers *t) {
  int rc = 0, left = 0;
  for (int i = 0; i < t->n; i++) left += t->at[i] != NULL;
  while (left) {
    uint32_t mark = comm_mark(t->comm);
    int before = left;
    for (int i = 0; i < t->n; i++) {
      bool done = false;
      int one = t->at[i] ? comm_test(t->comm, t->at[i], &done) : 0;
      if (!one && !done) continue;
      if (one) rc = one;
      t->at[i] = NULL;
      left--;
    }
    if (left == before) comm_sleep(t->comm, mark, 100);
  }
  return rc;
}

typedef struct Trade {
  Eager *E;
  const Placement *from, *to;
  const SbpList *have, *want;
  int mine, yours; /* this rank's places in both, or -1 */
  const Meta *whole;
  DType dtype;
} Trade;

/* A view of `part`, which begins at `origin` of the whole, of a box of the whole. */
static Tensor *box_view(const Tensor *part, const int64_t *origin, const int64_t *start,
                        const int64_t *length) {
  Tensor *y = tensor_alias(part);
  for (int d = 0; y && d < part->m.ndim; d++) {
    y->m.offset += (start[d] - origin[d]) * y->m.stride[d];
    y->m.shape[d] = length[d];
  }
  return y;
}

static int post_one(Transfers *t, int peer, Tensor *box, bool out) {
  size_t bytes = (size_t)meta_numel(&box->m) * dtype_size((DType)box->m.dtype);
  t->held[t->n] = box;
  return out ? comm_post_send(t->comm, peer, EDGE, tensor_data(box), bytes, &t->at[t->n++])
             : comm_post_recv(t->comm, peer, EDGE, tensor_data(box), bytes, &t->at[t->n++]);
}

/* Sends what the others want of x; what this rank wants of its own goes into y. */
static int send_all(const Trade *w, Transfers *t, Tensor *x, Tensor *y) {
  int64_t origin[MF_MAX_DIMS], there[MF_MAX_DIMS], start[MF_MAX_DIMS], length[MF_MAX_DIMS];
  int rc = 0, ndim = w->whole->ndim;
  if (w->mine < 0) return 0;
  if (w->yours >= 0) placement_part(w->to, w->want, w->yours, ndim, w->whole->shape, there, length);
  placement_part(w->from, w->have, w->mine, ndim, w->whole->shape, origin, length);
  for (int i = 0; i < w->to->n && !rc; i++) {
    if (!boxing_share(w->from, w->have, w->mine, w->to, w->want, i, ndim, w->whole->shape, start,
                      length))
      continue;
    Tensor *box = box_view(x, origin, start, length);
    if (i == w->yours) {
      Tensor *into = box_view(y, there, start, length);
      rc = copy_into(w->E, into, box);
      tensor_release(into);
    } else {
      Tensor *block_of = box ? packed(w->E, box) : NULL;
      rc = block_of ? post_one(t, w->to->rank[i], block_of, true) : MF_ENOMEM;
    }
    tensor_release(box);
  }
  return rc;
}

/* Receives into blocks of their own: boxes[i] says where they go. */
static int receive_all(const Trade *w, Transfers *t, int64_t (*boxes)[2][MF_MAX_DIMS]) {
  int rc = 0, ndim = w->whole->ndim;
  for (int k = 0; w->yours >= 0 && k < w->from->n && !rc; k++) {
    int64_t(*box)[MF_MAX_DIMS] = boxes[t->n];
    if (k == w->mine || !boxing_share(w->from, w->have, k, w->to, w->want, w->yours, ndim,
                                      w->whole->shape, box[0], box[1]))
      continue;
    Tensor *b = tensor_create(w->E, w->dtype, ndim, box[1], DEVICE_CPU);
    rc = b ? post_one(t, w->from->rank[k], b, false) : MF_ENOMEM;
  }
  return rc;
}

static int trade(const Trade *w, Transfers *t, Tensor *x, Tensor *y,
                 int64_t (*boxes)[2][MF_MAX_DIMS]) {
  int64_t origin[MF_MAX_DIMS], length[MF_MAX_DIMS];
  int rc = receive_all(w, t, boxes), n = t->n, waited;
  if (!rc) rc = send_all(w, t, x, y);
  waited = wait_for(t);
  if (!rc) rc = waited;
  if (w->yours >= 0)
    placement_part(w->to, w->want, w->yours, w->whole->ndim, w->whole->shape, origin, length);
  for (int i = 0; i < n && !rc; i++) {
    Tensor *into = box_view(y, origin, boxes[i][0], boxes[i][1]);
    rc = copy_into(w->E, into, t->held[i]);
    tensor_release(into);
  }
  for (int i = 0; i < t->n; i++) tensor_release(t->held[i]);
  return rc;
}

/* All ranks of both placements meet first, so that one that calls something else is found out. */
static int meet(Eager *E, const Placement *from, const Placement *to) {
  Comm *c = E->context->comm;
  int *ranks = mem_alloc(sizeof *ranks * (size_t)(from->n + to->n)), n = 0, me = comm_rank(c);
  if (!ranks) return err_set(MF_ENOMEM, "boxing: out of memory");
  for (int r = 0; r < comm_size(c); r++)
    if (placement_index(from, r) >= 0 || placement_index(to, r) >= 0) ranks[n++] = r;
  bool in = placement_index(from, me) >= 0 || placement_index(to, me) >= 0;
  CommGroup *g = in ? comm_group(c, n, ranks) : NULL;
  mem_free(ranks);
  if (!in) return 0;
  return g ? comm_collective(g, &(CommCall){.op = COMM_BARRIER, .dtype = U8}, NULL, NULL)
           : MF_ECOMM;
}

static Tensor *exchange(Eager *E, Tensor *x, const Meta *whole, const Layout *from,
                        const SbpList *have, const Layout *to) {
  const Placement *a = layout_placement(from), *b = layout_placement(to);
  Trade w = {.E = E,
             .from = a,
             .to = b,
             .have = have,
             .want = &to->sbp,
             .mine = from->place->index,
             .yours = to->place->index,
             .whole = whole,
             .dtype = (DType)whole->dtype};
  int64_t start[MF_MAX_DIMS], shape[MF_MAX_DIMS] = {0};
  int ndim = 1, most = a->n + b->n;
  if (w.yours >= 0) {
    ndim = whole->ndim;
    global_part_shape(to, ndim, whole->shape, start, shape);
  }
  Tensor *y = zeros(E, w.dtype, ndim, shape);
  Transfers t = {.comm = E->context->comm,
                 .at = mem_alloc(sizeof *t.at * (size_t)most),
                 .held = mem_alloc(sizeof *t.held * (size_t)most)};
  int64_t(*boxes)[2][MF_MAX_DIMS] = mem_alloc(sizeof *boxes * (size_t)(a->n + 1));
  int rc =
      y && t.at && t.held && boxes ? meet(E, a, b) : err_set(MF_ENOMEM, "boxing: out of memory");
  if (!rc) rc = trade(&w, &t, x, y, boxes);
  mem_free(t.at);
  mem_free(t.held);
  mem_free(boxes);
  return result(rc, y);
}

/* -- Plans ------------------------------------------------------------------------------------- */

static Tensor *one_step(Eager *E, Tensor *x, const Meta *whole, const Layout *from, SbpList *now,
                        const BoxStep *step, const Layout *to) {
  Tensor *y;
  if (step->kind == BOX_EXCHANGE) {
    y = exchange(E, x, whole, from, now, to);
  } else if (from->place->index < 0) {
    y = tensor_retain(x);
  } else {
    int a = step->axis;
    Step s = {.E = E,
              .place = from->place,
              .now = *now,
              .from = now->axis[a],
              .to = step->to.axis[a],
              .axis = a,
              .n = layout_placement(from)->size[a],
              .me = from->place->coordinate[a],
              .ndim = whole->ndim,
              .group = from->place->group[a],
              .order = from->place->order[a],
              .dtype = (DType)whole->dtype};
    SbpList around = *now;
    int64_t start[MF_MAX_DIMS];
    around.axis[a] = (Sbp){SBP_B, 0};
    placement_part(layout_placement(from), &around, from->place->index, whole->ndim, whole->shape,
                   start, s.whole);
    y = run_step(&s, step->kind, x);
  }
  *now = step->to;
  return y;
}

static Tensor *run_plan(Eager *E, Tensor *part, const Meta *whole, const Layout *from,
                        const Layout *to) {
  BoxPlan plan;
  if (boxing_plan(layout_placement(from), &from->sbp, layout_placement(to), &to->sbp, whole->ndim,
                  whole->shape, dtype_size((DType)whole->dtype), &plan))
    return NULL;
  SbpList now = from->sbp;
  Tensor *x = tensor_retain(part);
  for (int i = 0; i < plan.n && x; i++) {
    Tensor *y = one_step(E, x, whole, from, &now, &plan.step[i], to);
    tensor_release(x);
    x = y;
  }
  return x;
}

Tensor *global_box_part(Eager *E, Tensor *part, const Meta *whole, const Layout *from,
                        const Layout *to, bool own) {
  bool enabled = E->grad_enabled;
  E->grad_enabled = false;
  Tensor *y = run_plan(E, part, whole, from, to);
  bool shared = y && y->storage == part->storage && from != to;
  if (y && ((own && y->storage == part->storage) || (shared && !meta_is_contiguous(&y->m)))) {
    Tensor *copy = copy_of(E, y);
    tensor_release(y);
    y = copy;
  }
  E->grad_enabled = enabled;
  return y;
}

Tensor *global_box(Eager *E, Tensor *x, const Layout *to, bool own) {
  if (!x->part) {
    err_set(MF_EINVAL, "to_global: the tensor belongs to a step that was compiled");
    return NULL;
  }
  return global_box_part(E, x->part, &x->m, x->layout, to, own);
}

int global_put_back(Eager *E, Tensor *t, Tensor *part, const Layout *from) {
  Tensor *y = global_box_part(E, part, &t->m, from, t->layout, false);
  bool enabled = E->grad_enabled;
  E->grad_enabled = false;
  int rc = y ? t->layout->place->index < 0 ? 0 : copy_into(E, t->part, y) : MF_ENOMEM;
  E->grad_enabled = enabled;
  tensor_release(y);
  return rc;
}

int global_pack(Eager *E, Tensor *t) {
  if (meta_is_contiguous(&t->part->m)) return 0;
  bool enabled = E->grad_enabled;
  E->grad_enabled = false;
  Tensor *part = copy_of(E, t->part);
  E->grad_enabled = enabled;
  if (!part) return MF_ENOMEM;
  part->uncounted = true;
  storage_retain(part->storage);
  storage_release(t->storage);
  tensor_release(t->part);
  t->part = part;
  t->storage = part->storage;
  return 0;
}

static Tensor *trace_zeros(Eager *E, const Meta *whole, const Layout *l) {
  struct zeros_args args;
  memcpy(&args, op_table[OP_zeros].defaults, sizeof args);
  args.dtype = whole->dtype;
  args.size.n = whole->ndim;
  memcpy(args.size.v, whole->shape, sizeof(int64_t) * (size_t)whole->ndim);
  EagerCall c = {.op = &op_table[OP_zeros], .args = &args};
  if (eager_call_as(E, &c, l, NULL)) return NULL;
  Tensor *y = tensor_retain(c.out[0]);
  eager_call_clear(&c);
  return y;
}

Tensor *global_zeros(Eager *E, const Meta *whole, const Layout *l) {
  if (E->tracer) return trace_zeros(E, whole, l);
  int64_t start[MF_MAX_DIMS], shape[MF_MAX_DIMS] = {0};
  bool in = l->place->index >= 0;
  if (in) global_part_shape(l, whole->ndim, whole->shape, start, shape);
  Tensor *z = zeros(E, (DType)whole->dtype, in ? whole->ndim : 1, shape);
  return z ? global_wrap(E, whole, z, l) : NULL;
}
