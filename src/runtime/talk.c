/* What communicates, as kernels. All that can be known of it is worked out once: groups, how many
 * elements each rank gives, the boxes of an exchange.
 *
 * Tensors lie in one piece. Collectives move one block from each rank to each, in the order of the
 * group, which has its ranks ascending; the parts of a tensor are in the order of an axis, and lie
 * along some dim. Where parts are not such blocks as they lie, they are packed, in room that the
 * runtime gives. An exchange posts all that it receives and sends, then waits for all of it. */
#include "talk.h"

#include <string.h>

#include "boxing.h"
#include "err.h"
#include "op_args.h"
#include "op_ids.h"

/* A box of this rank's part that travels. */
typedef struct Parcel {
  int peer;
  bool out;
  uint64_t edge;
  int64_t start[MF_MAX_DIMS], length[MF_MAX_DIMS]; /* within the part */
  size_t at, bytes;                                /* in the room */
} Parcel;

typedef struct Talk {
  Comm *comm;
  CommGroup *group;
  int op, n, me;    /* ranks; this one's place among the parts */
  const int *order; /* the position in the group of each part */
  int dim, to;      /* along which parts lie, before or after; -1: none */
  CommCall call;
  bool *copied; /* of a bucket */
  bool direct;  /* parts lie as they travel */
  size_t size;  /* of an element */
  char *room;
  size_t room_bytes;
  LIST(Parcel) parcels; /* of an exchange, those that come first */
  CommTransfer **transfers;
  size_t kept_bytes;
  bool keeps; /* an exchange gives this rank something of its own, from one place to the other */
  int64_t from[MF_MAX_DIMS], into[MF_MAX_DIMS], length[MF_MAX_DIMS];
} Talk;

static Talk *of_args(const void *args) {
  return ((Talk *const *)args)[-1];
}

/* -- Groups ------------------------------------------------------------------------------------ */

static void join(Arena *a, Talk *c, const PlanGroup *g) {
  int *sorted = arena_array(a, int, g->n), *order = arena_array(a, int, g->n);
  c->n = g->n;
  c->me = -1;
  for (int i = 0; i < g->n; i++) {
    int before = 0;
    for (int j = 0; j < g->n; j++) before += g->rank[j] < g->rank[i];
    order[i] = before;
    sorted[before] = g->rank[i];
    if (g->rank[i] == comm_rank(c->comm)) c->me = i;
    if (g->rank[i] >= comm_size(c->comm))
      arena_throw(a, err_set(MF_EINVAL, "the plan is for more than %d ranks", comm_size(c->comm)));
  }
  c->order = order;
  if (c->me < 0) arena_throw(a, err_set(MF_EINVAL, "the plan is another rank's"));
  c->group = comm_group(c->comm, g->n, sorted);
  if (!c->group) arena_throw(a, MF_ECOMM);
}

static const Meta *meta_at(const Plan *p, int tensor) {
  return &p->tensors.at[tensor].meta;
}

/* Elements beyond dim d, and how often those come. */
static int64_t inner(const int64_t *shape, int ndim, int d) {
  return shape_numel(ndim - d - 1, shape + d + 1);
}

static int64_t outer(const int64_t *shape, int d) {
  return shape_numel(d, shape);
}

/* Elements of each part along d of a tensor of this shape, whose size along d is `whole`. */
static int64_t *count(Arena *a, const Talk *c, const int64_t *shape, int ndim, int d,
                      int64_t whole) {
  int64_t *counts = arena_array(a, int64_t, c->n), start, length;
  for (int i = 0; i < c->n; i++) {
    sbp_part(whole, c->n, i, &start, &length);
    counts[c->order[i]] = outer(shape, d) * length * inner(shape, ndim, d);
  }
  return counts;
}

static bool in_order(const Talk *c, const int64_t *shape, int d) {
  for (int i = 0; i < c->n; i++)
    if (c->order[i] != i) return false;
  return outer(shape, d) == 1;
}

static void plan_gather(Arena *a, Talk *c, const Meta *y) {
  c->call = (CommCall){.op = COMM_ALL_GATHER, .dtype = y->dtype};
  c->call.counts = count(a, c, y->shape, y->ndim, c->dim, y->shape[c->dim]);
  c->direct = in_order(c, y->shape, c->dim);
  if (!c->direct) c->room_bytes = (size_t)meta_numel(y) * c->size;
}

static void plan_scatter(Arena *a, Talk *c, const Meta *x, int reduce) {
  c->call = (CommCall){.op = COMM_REDUCE_SCATTER, .dtype = x->dtype, .reduce = (CommReduce)reduce};
  c->call.counts = count(a, c, x->shape, x->ndim, c->dim, x->shape[c->dim]);
  c->direct = in_order(c, x->shape, c->dim);
  if (!c->direct) c->room_bytes = (size_t)meta_numel(x) * c->size;
}

static void plan_all_to_all(Arena *a, Talk *c, const Meta *x, const Meta *y) {
  c->call = (CommCall){.op = COMM_ALL_TO_ALL, .dtype = x->dtype};
  c->call.counts = count(a, c, x->shape, x->ndim, c->to, x->shape[c->to]);
  c->call.out_counts = count(a, c, y->shape, y->ndim, c->dim, y->shape[c->dim]);
  c->room_bytes = (size_t)(meta_numel(x) + meta_numel(y)) * c->size;
}

/* -- Exchanges --------------------------------------------------------------------------------- */

#define EDGE (UINT64_C(1) << 62 | UINT64_C(0x706c616e) << 24)

/* Exchanges between two ranks in one direction are counted, in an order that is the same on both,
 * so that each has messages of its own. */
static void number_parcels(Talk *c, Talk *const *before, int n) {
  for (size_t i = 0; i < c->parcels.n; i++) {
    Parcel *p = &c->parcels.at[i];
    p->edge = EDGE;
    for (int k = 0; k < n; k++)
      for (size_t j = 0; before[k] && j < before[k]->parcels.n; j++)
        p->edge +=
            before[k]->parcels.at[j].peer == p->peer && before[k]->parcels.at[j].out == p->out;
  }
}

static void add_parcel(Arena *a, Talk *c, int peer, bool out, int ndim, const int64_t *origin,
                       const int64_t *start, const int64_t *length) {
  Parcel *p = list_add(a, &c->parcels);
  *p = (Parcel){.peer = peer, .out = out, .at = c->room_bytes};
  for (int d = 0; d < ndim; d++) {
    p->start[d] = start[d] - origin[d];
    p->length[d] = length[d];
  }
  p->bytes = (size_t)shape_numel(ndim, length) * c->size;
  c->room_bytes += (p->bytes + PLAN_ALIGN - 1) & ~(size_t)(PLAN_ALIGN - 1);
}

static void plan_exchange(Arena *a, Talk *c, const Plan *p, const struct exchange_args *args) {
  const PlanLayout *from = &p->layouts.at[args->from], *to = &p->layouts.at[args->to];
  const Placement *f = from->placement, *t = to->placement;
  int ndim = (int)args->whole.n, me = comm_rank(c->comm);
  int mine = placement_index(f, me), yours = placement_index(t, me);
  const int64_t *whole = args->whole.v;
  int64_t here[MF_MAX_DIMS], there[MF_MAX_DIMS], start[MF_MAX_DIMS], length[MF_MAX_DIMS];
  if (mine >= 0) placement_part(f, &from->sbp, mine, ndim, whole, here, length);
  if (yours >= 0) placement_part(t, &to->sbp, yours, ndim, whole, there, length);
  for (int i = 0; yours >= 0 && i < f->n; i++)
    if (i != mine && boxing_share(f, &from->sbp, i, t, &to->sbp, yours, ndim, whole, start, length))
      add_parcel(a, c, f->rank[i], false, ndim, there, start, length);
  for (int i = 0; mine >= 0 && i < t->n; i++) {
    if (!boxing_share(f, &from->sbp, mine, t, &to->sbp, i, ndim, whole, start, length)) continue;
    if (i != yours) {
      add_parcel(a, c, t->rank[i], true, ndim, here, start, length);
      continue;
    }
    c->keeps = true;
    c->kept_bytes = (size_t)shape_numel(ndim, length) * c->size;
    for (int d = 0; d < ndim; d++) {
      c->from[d] = start[d] - here[d];
      c->into[d] = start[d] - there[d];
      c->length[d] = length[d];
    }
  }
  c->transfers = arena_array(a, CommTransfer *, c->parcels.n + 1);
}

/* -- Making ------------------------------------------------------------------------------------ */

static void plan_by_op(Arena *a, Talk *c, const Plan *p, const PlanStep *s) {
  const Meta *x = s->in[0] < 0 ? NULL : meta_at(p, s->in[0]), *y = meta_at(p, s->out[0]);
  c->dim = c->to = -1;
  switch (s->op->id) {
    case OP_all_reduce: {
      const struct all_reduce_args *args = s->args;
      join(a, c, &p->groups.at[args->group]);
      c->call = (CommCall){.op = COMM_ALL_REDUCE,
                           .dtype = x->dtype,
                           .reduce = (CommReduce)args->reduce,
                           .count = meta_numel(x)};
      break;
    }
    case OP_reduce_bucket: {
      const struct reduce_bucket_args *args = s->args;
      join(a, c, &p->groups.at[args->group]);
      CommPiece *pieces = arena_array(a, CommPiece, s->n_out);
      c->copied = arena_array(a, bool, s->n_out);
      c->call = (CommCall){.op = COMM_ALL_REDUCE,
                           .dtype = y->dtype,
                           .reduce = (CommReduce)args->reduce,
                           .n_pieces = s->n_out,
                           .pieces = pieces};
      for (int k = 0; k < s->n_out; k++) {
        pieces[k].count = meta_numel(meta_at(p, s->out[k]));
        c->call.count += pieces[k].count;
      }
      break;
    }
    case OP_all_gather: {
      const struct all_gather_args *args = s->args;
      c->dim = (int)args->dim;
      join(a, c, &p->groups.at[args->group]);
      plan_gather(a, c, y);
      break;
    }
    case OP_reduce_scatter: {
      const struct reduce_scatter_args *args = s->args;
      c->dim = (int)args->dim;
      join(a, c, &p->groups.at[args->group]);
      plan_scatter(a, c, x, (int)args->reduce);
      break;
    }
    case OP_all_to_all: {
      const struct all_to_all_args *args = s->args;
      c->dim = (int)args->dim, c->to = (int)args->to;
      join(a, c, &p->groups.at[args->group]);
      plan_all_to_all(a, c, x, y);
      break;
    }
    default: plan_exchange(a, c, p, s->args);
  }
}

void *talk_create(Arena *a, Comm *comm, const Plan *p, int step, void *const *before) {
  const PlanStep *s = &p->steps.at[step];
  Talk *c = arena_new(a, Talk);
  if (!comm)
    arena_throw(a, err_set(MF_EINVAL, "the plan is for several ranks, and no job was joined"));
  c->comm = comm;
  c->op = s->op->id;
  c->size = dtype_size((DType)meta_at(p, s->out[0])->dtype);
  plan_by_op(a, c, p, s);
  Talk **known = arena_array(a, Talk *, step + 1);
  for (int k = 0; k < step && c->parcels.n; k++) known[k] = before[k] ? of_args(before[k]) : NULL;
  if (c->parcels.n) number_parcels(c, known, step);
  char *args = arena_alloc(a, 16 + s->op->args_size);
  *(Talk **)(void *)(args + 16 - sizeof c) = c;
  memcpy(args + 16, s->args, s->op->args_size);
  return args + 16;
}

bool talk_is_apart(const void *args) {
  return of_args(args)->op == OP_exchange;
}

size_t talk_room(const void *args) {
  return of_args(args)->room_bytes + of_args(args)->kept_bytes;
}

void talk_set_room(void *args, void *room) {
  of_args(args)->room = room;
}

/* -- Pieces ------------------------------------------------------------------------------------ */

/* Between the parts of v along d and blocks behind one another, in the order of the group. */
static void repack(const Talk *c, const View *v, int d, char *blocks, const int64_t *counts,
                   bool out) {
  int64_t n = outer(v->shape, d), row = inner(v->shape, v->ndim, d), at = 0;
  size_t step = (size_t)(v->shape[d] * row) * c->size;
  for (int position = 0; position < c->n; position++) {
    int64_t start, length;
    int i = 0;
    while (c->order[i] != position) i++;
    sbp_part(v->shape[d], c->n, i, &start, &length);
    size_t bytes = (size_t)(length * row) * c->size;
    char *block = blocks + (size_t)at * c->size,
         *x = (char *)v->data + (size_t)(start * row) * c->size;
    for (int64_t k = 0; k < n && bytes; k++, block += bytes, x += step) {
      if (out) memcpy(block, x, bytes);
      else memcpy(x, block, bytes);
    }
    at += counts[position];
  }
}

/* Between a box of a tensor in one piece and memory where it is alone. */
static void copy_box(const View *v, const int64_t *start, const int64_t *length, char *packed,
                     bool out) {
  size_t size = dtype_size((DType)v->dtype);
  int64_t index[MF_MAX_DIMS] = {0}, n = shape_numel(v->ndim, length);
  int last = v->ndim - 1;
  size_t run = (size_t)(v->ndim ? length[last] : 1) * size;
  for (int64_t done = 0; done < n; done += v->ndim ? length[last] : 1) {
    int64_t at = 0;
    for (int d = 0; d < v->ndim; d++) at = at * v->shape[d] + start[d] + index[d];
    char *x = (char *)v->data + (size_t)at * size;
    if (out) memcpy(packed, x, run);
    else memcpy(x, packed, run);
    packed += run;
    for (int d = last - 1; d >= 0 && ++index[d] == length[d]; d--) index[d] = 0;
  }
}

/* -- Running ----------------------------------------------------------------------------------- */

/* Whether the memory of out[k] is that of an input which is still to be copied. */
static bool is_taken(const Talk *c, const OpCall *call, int k) {
  for (int i = 0; i < call->n_out; i++)
    if (i != k && !c->copied[i] && call->in[i + 1].data == call->out[k].data) return true;
  return false;
}

/* Sums are formed where the outputs lie. The plan may have given an output the memory of another's
 * input, in order, so that some copy can always be made. */
static int run_bucket(const Talk *c, const OpCall *call) {
  int left = call->n_out;
  memset(c->copied, 0, sizeof *c->copied * (size_t)left);
  while (left) {
    int before = left;
    for (int k = 0; k < call->n_out; k++) {
      CommPiece *piece = (CommPiece *)(uintptr_t)&c->call.pieces[k];
      const View *x = &call->in[k + 1];
      if (c->copied[k] || (x->data != call->out[k].data && is_taken(c, call, k))) continue;
      piece->data = call->out[k].data;
      if (x->data != piece->data && piece->count)
        memcpy(piece->data, x->data, (size_t)piece->count * c->size);
      c->copied[k] = true;
      left--;
    }
    MF_ASSERT(left < before, "%d outputs lie in each other's inputs", left);
  }
  return comm_collective(c->group, &c->call, NULL, NULL);
}

static int run_gather(const Talk *c, const View *x, const View *y) {
  int rc = comm_collective(c->group, &c->call, x->data, c->direct ? y->data : c->room);
  if (!rc && !c->direct) repack(c, y, c->dim, c->room, c->call.counts, false);
  return rc;
}

static int run_scatter(const Talk *c, const View *x, const View *y) {
  if (!c->direct) repack(c, x, c->dim, c->room, c->call.counts, true);
  return comm_collective(c->group, &c->call, c->direct ? x->data : c->room, y->data);
}

static int run_all_to_all(const Talk *c, const View *x, const View *y) {
  char *in = c->room, *out = in + (size_t)view_numel(x) * c->size;
  repack(c, x, c->to, in, c->call.counts, true);
  int rc = comm_collective(c->group, &c->call, in, out);
  if (!rc) repack(c, y, c->dim, out, c->call.out_counts, false);
  return rc;
}

/* Waits for all, also when one has failed: their memory must not be in use afterwards. */
static int wait_for(const Talk *c) {
  int rc = 0, left = (int)c->parcels.n;
  for (size_t i = 0; i < c->parcels.n; i++) left -= !c->transfers[i];
  while (left) {
    uint32_t mark = comm_mark(c->comm);
    int before = left;
    for (size_t i = 0; i < c->parcels.n; i++) {
      bool done = false;
      int one = c->transfers[i] ? comm_test(c->comm, c->transfers[i], &done) : 0;
      if (!one && !done) continue;
      if (one) rc = one;
      c->transfers[i] = NULL;
      left--;
    }
    if (left == before) comm_sleep(c->comm, mark, 100);
  }
  return rc;
}

static int run_exchange(const Talk *c, const View *x, const View *y) {
  int rc = 0, waited;
  memset(c->transfers, 0, sizeof(CommTransfer *) * c->parcels.n);
  for (size_t i = 0; i < c->parcels.n && !rc; i++) {
    const Parcel *p = &c->parcels.at[i];
    char *at = c->room + p->at;
    if (p->out) copy_box(x, p->start, p->length, at, true);
    rc = p->out ? comm_post_send(c->comm, p->peer, p->edge, at, p->bytes, &c->transfers[i])
                : comm_post_recv(c->comm, p->peer, p->edge, at, p->bytes, &c->transfers[i]);
  }
  memset(y->data, 0, (size_t)view_numel(y) * c->size);
  waited = wait_for(c);
  if (!rc) rc = waited;
  for (size_t i = 0; i < c->parcels.n && !rc; i++) {
    const Parcel *p = &c->parcels.at[i];
    if (!p->out) copy_box(y, p->start, p->length, c->room + p->at, false);
  }
  if (rc || !c->keeps) return rc;
  char *own = c->room + c->room_bytes;
  copy_box(x, c->from, c->length, own, true);
  copy_box(y, c->into, c->length, own, false);
  return 0;
}

int talk_run(const OpCall *call) {
  const Talk *c = of_args(call->args);
  const View *x = &call->in[0], *y = &call->out[0];
  switch (c->op) {
    case OP_all_reduce: return comm_collective(c->group, &c->call, x->data, y->data);
    case OP_reduce_bucket: return run_bucket(c, call);
    case OP_all_gather: return run_gather(c, x, y);
    case OP_reduce_scatter: return run_scatter(c, x, y);
    case OP_all_to_all: return run_all_to_all(c, x, y);
    default: return run_exchange(c, x, y);
  }
}
