/* Collectives, as flows (flow.c).
 *
 * What is reduced is cut into a part for each rank. Every rank sends each part straight to its
 * owner, who adds the contributions in the order of the group and sends the sums on: for an
 * all-reduce to all, block by block, while the next blocks come in. Each rank so sends (n - 1)/n of
 * the data twice, as in a ring, but in two steps instead of 2 (n - 1), and the order of the sum
 * does not depend on who holds a part: a ring starts each part's sum at another rank, a tree adds
 * in pairs, and both round halves at each hop. Small data go to everybody at once, who all add the
 * same numbers in the same order.
 *
 * What is only copied goes along a ring or a chain when it is large, so that each link between two
 * hosts carries it once (a part is passed on as it comes in), and else straight, or along a tree.
 */
#include <string.h>

#include "comm_int.h"

enum { SMALL = 64 << 10 };                /* bytes that a rank sends at once rather than in parts */
enum { LANE_PART = 1, LANE_RESULT = 16 }; /* results: + position of the owner */

/* Bytes of a call's parts: of position i, and before it. */
typedef struct Parts {
  const CommCall *call;
  const int64_t *counts; /* NULL: count cut evenly */
  int n;
  size_t size;
} Parts;

static size_t part_bytes(const Parts *p, int i) {
  if (p->counts) return (size_t)p->counts[i] * p->size;
  return (size_t)(p->call->count / p->n + (i < p->call->count % p->n)) * p->size;
}

static size_t part_at(const Parts *p, int i) {
  size_t at = 0;
  if (!p->counts) {
    int64_t more = p->call->count % p->n;
    return (size_t)(p->call->count / p->n * i + (i < more ? i : more)) * p->size;
  }
  for (int k = 0; k < i; k++) at += (size_t)p->counts[k] * p->size;
  return at;
}

/* NULL when there is nothing to move. */
static Flow *add(Exchange *x, int position, bool out, uint32_t lane, const void *at, size_t bytes) {
  if (!bytes) return NULL;
  Flow *f = &x->flows[x->n++];
  *f = (Flow){x->group->rank[position], out, lane, (char *)at, bytes, 0, NULL, false};
  return f;
}

static void copy(void *out, const void *in, size_t n) {
  if (n && out != in) memmove(out, in, n);
}

/* -- Parts of a call --------------------------------------------------------------------------- */

static void reduce_range(Exchange *x, const CommCall *call, const char *in, char *out, size_t n) {
  x->reducer = (Reducer){.on = n > 0,
                         .reduce = call->op == COMM_BARRIER ? COMM_MAX : call->reduce,
                         .dtype = call->op == COMM_BARRIER ? U8 : (DType)call->dtype,
                         .lane = LANE_PART,
                         .in = in,
                         .out = out,
                         .total = n,
                         .scratch = x->group->scratch};
}

/* Everybody sends everything to everybody. */
static void reduce_at_once(Exchange *x, const CommCall *call, const char *in, char *out, size_t n) {
  for (int i = 0; i < x->group->n; i++)
    if (i != x->group->me) add(x, i, true, LANE_PART, in, n);
  reduce_range(x, call, in, out, n);
  x->reducer.after_sends = true;
}

/* Each part goes to its owner, who has its sum in out. */
static void reduce_parts(Exchange *x, const CommCall *call, const Parts *p, const char *in,
                         char *out) {
  int me = x->group->me;
  for (int i = 1; i < p->n; i++) { /* not all to the same rank first */
    int to = (me + i) % p->n;
    add(x, to, true, LANE_PART, in + part_at(p, to), part_bytes(p, to));
  }
  reduce_range(x, call, in + part_at(p, me), out, part_bytes(p, me));
}

/* Along the ring: this rank's part, of which *limit is there, and those that it gets. */
static void spread_ring(Exchange *x, const Parts *p, char *out, const size_t *limit) {
  int n = p->n, me = x->group->me, next = (me + 1) % n, before = (me + n - 1) % n;
  for (int s = 0; s < n - 1; s++) {
    int mine = (me - s + n) % n, theirs = (me - s - 1 + n) % n;
    Flow *f = add(x, next, true, LANE_RESULT + (uint32_t)mine, out + part_at(p, mine),
                  part_bytes(p, mine));
    if (f) f->limit = limit;
    f = add(x, before, false, LANE_RESULT + (uint32_t)theirs, out + part_at(p, theirs),
            part_bytes(p, theirs));
    limit = f ? &f->done : NULL;
  }
}

static void spread(Exchange *x, const Parts *p, char *out, const size_t *limit) {
  int me = x->group->me;
  if (x->group->spans) {
    spread_ring(x, p, out, limit);
    return;
  }
  for (int k = 1; k < p->n; k++) {
    int i = (me + k) % p->n;
    Flow *f = add(x, i, true, LANE_RESULT + (uint32_t)me, out + part_at(p, me), part_bytes(p, me));
    if (f) f->limit = limit;
    add(x, i, false, LANE_RESULT + (uint32_t)i, out + part_at(p, i), part_bytes(p, i));
  }
}

/* -- Calls ------------------------------------------------------------------------------------- */

static void all_reduce(Exchange *x, const CommCall *call, const Parts *p, const char *in,
                       char *out) {
  size_t n = (size_t)call->count * p->size;
  if (n * (size_t)(p->n - 1) <= SMALL) {
    reduce_at_once(x, call, in, out, n);
    return;
  }
  reduce_parts(x, call, p, in, out + part_at(p, x->group->me));
  spread(x, p, out, &x->reducer.done);
}

/* Small: straight to the root. Else in parts, whose owners send the sums to the root; `part` has
 * room for this rank's. */
static void reduce(Exchange *x, const CommCall *call, const Parts *p, const char *in, char *out,
                   char *part) {
  int me = x->group->me;
  size_t n = (size_t)call->count * p->size;
  if (n <= SMALL) {
    if (me == call->root) reduce_range(x, call, in, out, n);
    else add(x, call->root, true, LANE_PART, in, n);
    return;
  }
  reduce_parts(x, call, p, in, me == call->root ? out + part_at(p, me) : part);
  if (me != call->root) {
    Flow *f = add(x, call->root, true, LANE_RESULT + (uint32_t)me, part, part_bytes(p, me));
    if (f) f->limit = &x->reducer.done;
    return;
  }
  for (int i = 0; i < p->n; i++)
    if (i != me) add(x, i, false, LANE_RESULT + (uint32_t)i, out + part_at(p, i), part_bytes(p, i));
}

/* Positions count from the root. Small: a binomial tree, where the parent of i is i without its
 * last bit. Large: a chain. */
static void broadcast(Exchange *x, const CommCall *call, char *out, size_t bytes) {
  int n = x->group->n, me = (x->group->me - call->root + n) % n;
  bool tree = bytes <= SMALL;
  const size_t *limit = NULL;
  if (me) {
    int parent = tree ? me & (me - 1) : me - 1;
    Flow *f = add(x, (parent + call->root) % n, false, LANE_RESULT, out, bytes);
    if (f) limit = &f->done;
  }
  int last = !tree ? 1 : me ? me & -me : n;
  for (int step = 1; (tree ? step < last : step <= 1) && me + step < n; step *= 2) {
    Flow *f = add(x, (me + step + call->root) % n, true, LANE_RESULT, out, bytes);
    if (f) f->limit = limit;
  }
}

static void gather(Exchange *x, const CommCall *call, const Parts *p, const char *in, char *out) {
  int me = x->group->me;
  if (me != call->root) {
    add(x, call->root, true, LANE_RESULT + (uint32_t)me, in, part_bytes(p, me));
    return;
  }
  for (int i = 0; i < p->n; i++)
    if (i != me) add(x, i, false, LANE_RESULT + (uint32_t)i, out + part_at(p, i), part_bytes(p, i));
  copy(out + part_at(p, me), in, part_bytes(p, me));
}

static void scatter(Exchange *x, const CommCall *call, const Parts *p, const char *in, char *out) {
  int me = x->group->me;
  if (me != call->root) {
    add(x, call->root, false, LANE_RESULT + (uint32_t)me, out, part_bytes(p, me));
    return;
  }
  for (int i = 0; i < p->n; i++)
    if (i != me) add(x, i, true, LANE_RESULT + (uint32_t)i, in + part_at(p, i), part_bytes(p, i));
  copy(out, in + part_at(p, me), part_bytes(p, me));
}

static void all_to_all(Exchange *x, const CommCall *call, const Parts *p, const char *in,
                       char *out) {
  Parts from = {call, call->out_counts, p->n, p->size};
  int me = x->group->me;
  for (int k = 1; k < p->n; k++) {
    int i = (me + k) % p->n;
    add(x, i, true, LANE_RESULT + (uint32_t)me, in + part_at(p, i), part_bytes(p, i));
    add(x, i, false, LANE_RESULT + (uint32_t)i, out + part_at(&from, i), part_bytes(&from, i));
  }
  copy(out + part_at(&from, me), in + part_at(p, me), part_bytes(p, me));
}

/* A group of one rank. */
static void alone(const CommCall *call, const Parts *p, const void *in, void *out) {
  bool counted =
      call->op == COMM_ALL_REDUCE || call->op == COMM_REDUCE || call->op == COMM_BROADCAST;
  if (call->op == COMM_BARRIER) return;
  copy(out, in, counted ? (size_t)call->count * p->size : part_bytes(p, 0));
}

static void build(Exchange *x, const CommCall *call, const Parts *p, const void *in, void *out,
                  char *part) {
  static const char nothing[1] = {0};
  size_t bytes = (size_t)call->count * p->size;
  switch (call->op) {
    case COMM_ALL_REDUCE: all_reduce(x, call, p, in, out); break;
    case COMM_REDUCE: reduce(x, call, p, in, out, part); break;
    case COMM_REDUCE_SCATTER: reduce_parts(x, call, p, in, out); break;
    case COMM_ALL_GATHER:
      copy((char *)out + part_at(p, x->group->me), in, part_bytes(p, x->group->me));
      spread(x, p, out, NULL);
      break;
    case COMM_ALL_TO_ALL: all_to_all(x, call, p, in, out); break;
    case COMM_BROADCAST:
      if (x->group->me == call->root) copy(out, in, bytes);
      broadcast(x, call, out, bytes);
      break;
    case COMM_GATHER: gather(x, call, p, in, out); break;
    case COMM_SCATTER: scatter(x, call, p, in, out); break;
    case COMM_BARRIER: reduce_at_once(x, call, nothing, part, 1); break;
    case COMM_OP_COUNT: break;
  }
}

/* -- Running ----------------------------------------------------------------------------------- */

static uint64_t count_of(const CommCall *call, int n) {
  if (call->op == COMM_ALL_TO_ALL || call->op == COMM_BARRIER) return 0;
  if (!call->counts) return (uint64_t)call->count;
  uint64_t sum = 0;
  for (int i = 0; i < n; i++) sum += (uint64_t)call->counts[i];
  return sum;
}

/* The call as its fragments tell it; takes the next number. */
static Fragment begin(CommGroup *g, const CommCall *call) {
  Fragment f = {.kind = FRAGMENT_CALL,
                .op = (uint8_t)call->op,
                .reduce = (uint8_t)call->reduce,
                .dtype = (uint8_t)call->dtype,
                .context = g->id,
                .number = ++g->number,
                .root = call->root,
                .count = count_of(call, g->n)};
  comm_hash(&g->hash, &f, sizeof f);
  if (call->counts && call->op != COMM_ALL_TO_ALL)
    comm_hash(&g->hash, call->counts, sizeof *call->counts * (size_t)g->n);
  f.hash = g->hash;
  return f;
}

/* False when there is no memory. */
static bool open_pieces(Pieces *p, const CommCall *call, size_t size) {
  *p = (Pieces){.n = call->n_pieces, .piece = call->pieces};
  if (!p->n) return true;
  p->base = p->piece[0].data;
  p->start = mem_alloc(sizeof *p->start * (size_t)(p->n + 1));
  if (!p->start) return false;
  p->start[0] = 0;
  for (int i = 0; i < p->n; i++) p->start[i + 1] = p->start[i] + (size_t)p->piece[i].count * size;
  return true;
}

int collective_run(CommGroup *g, const CommCall *call, const void *in, void *out) {
  bool even = !call->counts;
  Parts p = {call, call->counts, g->n,
             call->op == COMM_BARRIER ? 1 : dtype_size((DType)call->dtype)};
  if (even && call->op == COMM_BARRIER) p.size = 1;
  if (g->n == 1) {
    if (!call->n_pieces) alone(call, &p, in, out);
    return 0;
  }
  if (!g->scratch) g->scratch = mem_alloc(2 * FRAGMENT_MAX);
  char *held = call->op == COMM_REDUCE ? mem_alloc(part_bytes(&p, g->me) + 1) : NULL, byte;
  Exchange x = {.comm = g->comm, .group = g, .name = comm_op_name(call->op), .flows = g->flows};
  if (!g->scratch || (call->op == COMM_REDUCE && !held) || !open_pieces(&x.pieces, call, p.size)) {
    mem_free(held);
    return err_set(MF_ENOMEM, "%s: out of memory", comm_op_name(call->op));
  }
  x.head = begin(g, call);
  if (x.pieces.n) in = out = call->pieces[0].data;
  build(&x, call, &p, in, out, held ? held : &byte);
  int code = flow_run(&x);
  if (!code) {
    flow_forget(&x);
    g->n_notes = 0;
    g->notes[0] = 0;
  }
  mem_free(held);
  mem_free(x.pieces.start);
  return code;
}
