/* Flows: what a call is made of, and the loop that moves them.
 *
 * A collective is a set of flows, one message each to or from one rank, and perhaps a reducer,
 * which consumes the same range of all ranks' contributions. The loop pushes what has room, pulls
 * what has come, and sleeps on the rank's bell when nothing moved. What holds:
 *
 *   F1  A message is cut into fragments of FRAGMENT_MAX bytes, the last one shorter; they arrive in
 *       their order, since there is one way between two ranks.
 *   F2  The reducer takes block after block, in each the contributions in the order of the group,
 *       straight from where the fragments lie. A contribution whose turn has not come waits at the
 *       head of its way, and what comes behind it with it.
 *   F3  A fragment of another call, at the head of a way, is copied aside (the stash), so that
 * calls of several threads, and a rank that is ahead, stop nobody. Stashed fragments of a way are
 * older than those on it.
 *
 * Why it does not lock up: pushes never wait for pulls, and a contribution waits (F2) only for
 * those of ranks before it in the group; the first of these waits for nothing but its sender, and
 * what stands before it on its own way is a result, which is always taken, or is of another call
 * (F3).
 *
 * Who calls what is compared at each fragment: its header tells its sender's call, and a hash of
 * all before. A rank that waits half a second says in which call (a probe), so that two ranks that
 * wait for each other in different calls find out. If only the hashes differ, both send what they
 * have noted since the last call, to name the first difference. */
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "combine.h"
#include "comm_int.h"

enum { TICK_MS = 100, PROBE_MS = 500, SUSPECT_MS = 1000, LEFT_MS = 1000 };
enum { STASH_MAX = 1 << 30, PULLS = 4 };

static bool flow_is_done(const Flow *f) {
  return f->done == f->total && (f->total || f->touched);
}

/* -- Texts ------------------------------------------------------------------------------------- */

static void describe_group(const CommGroup *g, char *text, size_t n) {
  size_t at = 0;
  for (int i = 0; i < g->n && at + 16 < n; i++)
    at += (size_t)snprintf(text + at, n - at, i ? ", %d" : "%d", g->rank[i]);
}

static void describe_call(const Fragment *f, char *text, size_t n) {
  const char *reduce = f->reduce < COMM_REDUCE_COUNT ? comm_reduce_name(f->reduce) : "?";
  bool sums = f->op == COMM_ALL_REDUCE || f->op == COMM_REDUCE || f->op == COMM_REDUCE_SCATTER;
  bool rooted = f->op == COMM_REDUCE || f->op == COMM_BROADCAST || f->op == COMM_GATHER ||
                f->op == COMM_SCATTER;
  int at = snprintf(text, n, "%s", f->op < COMM_OP_COUNT ? comm_op_name(f->op) : "?");
  if (f->op == COMM_BARRIER || f->dtype >= DTYPE_COUNT) return;
  at += snprintf(text + at, n - (size_t)at, " of %s", dtype_name((DType)f->dtype));
  if (f->op != COMM_ALL_TO_ALL)
    at += snprintf(text + at, n - (size_t)at, " [%llu]", (unsigned long long)f->count);
  if (sums) at += snprintf(text + at, n - (size_t)at, " (%s)", reduce);
  if (rooted) snprintf(text + at, n - (size_t)at, " (root %d)", f->root);
}

static void describe_exchange(const Exchange *x, char *text, size_t n) {
  char call[120], group[80];
  if (!x->group) {
    snprintf(text, n, "%s", x->name);
    return;
  }
  describe_call(&x->head, call, sizeof call);
  describe_group(x->group, group, sizeof group);
  snprintf(text, n, "%s, call %llu of ranks {%s}", call, (unsigned long long)x->head.number, group);
}

/* Fails the job; returns the code with that text, unless another failure came first. */
static int fail(Exchange *x, const char *text) {
  comm_fail(x->comm, text);
  return comm_failed(x->comm);
}

/* -- Comparing calls --------------------------------------------------------------------------- */

/* The first line in which two lists of notes differ; cut. */
static void first_difference(const char *a, const char *b, char *line_a, char *line_b, size_t n) {
  for (;;) {
    size_t la = strcspn(a, "\n"), lb = strcspn(b, "\n");
    if (la != lb || memcmp(a, b, la) || !la) {
      snprintf(line_a, n, "%.*s", (int)la, la ? a : "nothing");
      snprintf(line_b, n, "%.*s", (int)lb, lb ? b : "nothing");
      if (!la) snprintf(line_a, n, "nothing");
      if (!lb) snprintf(line_b, n, "nothing");
      return;
    }
    a += la + (a[la] != 0), b += lb + (b[lb] != 0);
  }
}

static int fail_calls(Exchange *x, int peer, const char *mine, const char *theirs) {
  Comm *c = x->comm;
  char group[80], text[SEGMENT_TEXT];
  describe_group(x->group, group, sizeof group);
  bool first = c->rank < peer;
  int low = first ? c->rank : peer, high = first ? peer : c->rank;
  snprintf(text, sizeof text,
           "the ranks {%s} call different things (call %llu): rank %d on host %s calls %s; rank %d "
           "on host %s calls %s",
           group, (unsigned long long)x->head.number, low, comm_host(c, low), first ? mine : theirs,
           high, comm_host(c, high), first ? theirs : mine);
  return fail(x, text);
}

static int fail_notes(Exchange *x, int peer, const char *theirs) {
  char a[160], b[160];
  first_difference(x->group->notes, theirs, a, b, sizeof a);
  return fail_calls(x, peer, a, b);
}

/* Says to a peer in which call this rank is, with its notes; without waiting for room. */
static void send_probe(Exchange *x, int peer) {
  Comm *c = x->comm;
  Peer *p = &c->peers[peer];
  size_t n = x->group->n_notes + 1;
  pthread_mutex_lock(&p->out_lock);
  Ring *ring = p->seat < 0
                   ? NULL
                   : &c->segment->ring[(unsigned)c->seat * c->segment->seats + (unsigned)p->seat];
  Fragment *f = ring ? ring_reserve(ring, n) : c->api->remote->reserve(c, peer, n);
  if (f) {
    *f = x->head;
    f->kind = FRAGMENT_PROBE;
    f->bytes = (uint32_t)n;
    f->offset = f->total = f->lane = 0;
    memcpy(f + 1, x->group->notes, n - 1);
    ((char *)(f + 1))[n - 1] = 0;
    if (ring) {
      ring_commit(ring, f);
      bell_ring(&c->segment->seat[p->seat].bell);
    } else {
      c->api->remote->commit(c, peer, f);
    }
  }
  pthread_mutex_unlock(&p->out_lock);
}

/* 0, or the code of the failure that the fragment's sender calls something else. */
static int compare(Exchange *x, int peer, const Fragment *f, const char *data) {
  const Fragment *h = &x->head;
  char mine[120], theirs[120];
  if (f->op != h->op || f->reduce != h->reduce || f->dtype != h->dtype || f->root != h->root ||
      f->count != h->count) {
    describe_call(h, mine, sizeof mine);
    describe_call(f, theirs, sizeof theirs);
    return fail_calls(x, peer, mine, theirs);
  }
  if (f->hash == h->hash) return 0;
  if (f->kind == FRAGMENT_PROBE && f->bytes && !data[f->bytes - 1])
    return fail_notes(x, peer, data);
  if (x->suspect < 0) {
    x->suspect = peer;
    x->suspect_since = comm_milliseconds();
    send_probe(x, peer);
  }
  return 0;
}

/* -- Memory ------------------------------------------------------------------------------------ */

/* Where `at` is; *n: so many bytes, if there are, lie in one piece from there on. */
static char *locate(const Pieces *p, const char *at, size_t *n) {
  if (!p->n) return (char *)(uintptr_t)at;
  size_t place = (size_t)(at - p->base);
  int low = 0, high = p->n; /* start[low] <= place < start[high] */
  while (high - low > 1) {
    int middle = (low + high) / 2;
    if (p->start[middle] <= place) low = middle;
    else high = middle;
  }
  size_t rest = p->start[low + 1] - place;
  if (*n > rest) *n = rest;
  return (char *)p->piece[low].data + (place - p->start[low]);
}

static void copy_from(const Pieces *p, const char *at, char *to, size_t n) {
  for (size_t run; n; at += run, to += run, n -= run) {
    run = n;
    const char *from = locate(p, at, &run);
    memcpy(to, from, run);
  }
}

static void copy_to(const Pieces *p, const char *at, const char *from, size_t n) {
  for (size_t run; n; at += run, from += run, n -= run) {
    run = n;
    char *to = locate(p, at, &run);
    memcpy(to, from, run);
  }
}

/* -- The reducer ------------------------------------------------------------------------------- */

static size_t reducer_block(const Reducer *r) {
  size_t rest = r->total - r->done;
  return rest < FRAGMENT_MAX ? rest : FRAGMENT_MAX;
}

/* A part of the block that lies in one piece. */
typedef struct Run {
  size_t at, bytes, n; /* in the block; elements */
  const char *own;
  char *out;
  float *wide; /* its sums, of wide dtypes */
} Run;

/* The next run of a block; false at its end. Begins with zeros. */
static bool next_run(const Exchange *x, Run *u) {
  const Reducer *r = &x->reducer;
  size_t size = dtype_size(r->dtype);
  u->at += u->bytes;
  u->bytes = reducer_block(r) - u->at;
  if (!u->bytes) return false;
  u->own = locate(&x->pieces, r->in + r->done + u->at, &u->bytes);
  u->out = locate(&x->pieces, r->out + r->done + u->at, &u->bytes);
  u->n = u->bytes / size;
  u->wide = (float *)r->scratch + u->at / size;
  return true;
}

static void reducer_begin_block(Exchange *x) {
  Reducer *r = &x->reducer;
  r->next = 0;
  if (x->group->me != 0 || r->done == r->total) return;
  r->next = 1;
  for (Run u = {0}; combine_is_wide(r->dtype) && next_run(x, &u);)
    combine_widen(r->dtype, u.wide, u.own, u.n);
}

/* One contribution into the float32 sums. */
static void take_wide(const Reducer *r, int me, const Run *u, const char *data) {
  if (r->next == 0) combine_widen(r->dtype, u->wide, data, u->n);
  else combine_wide(r->reduce, r->dtype, u->wide, data, u->n);
  if (r->next + 1 == me) combine_wide(r->reduce, r->dtype, u->wide, u->own, u->n);
}

/* Before its own turn a rank's sum lies in scratch, afterwards in out. */
static void take_plain(const Reducer *r, int me, const Run *u, const char *data) {
  char *sum = r->scratch + u->at;
  bool first = r->next == 0;
  if (r->next > me) {
    combine_pair(r->reduce, r->dtype, u->out, r->next == 1 ? u->own : u->out, data, u->n);
    return;
  }
  if (first && r->next + 1 < me) memcpy(sum, data, u->bytes);
  else if (!first) combine_pair(r->reduce, r->dtype, sum, sum, data, u->n);
  if (r->next + 1 == me)
    combine_pair(r->reduce, r->dtype, u->out, first ? data : sum, u->own, u->n);
}

/* The sums of a block are whole. */
static void finish_block(Exchange *x) {
  Reducer *r = &x->reducer;
  bool wide = combine_is_wide(r->dtype);
  for (Run u = {0}; next_run(x, &u);) {
    void *sum = wide ? (void *)u.wide : (void *)u.out;
    if (r->reduce == COMM_AVG) combine_divide(r->dtype, sum, x->group->n, u.n);
    if (wide) combine_narrow(r->dtype, u.out, u.wide, u.n);
  }
  r->done += reducer_block(r);
  reducer_begin_block(x);
}

static void reducer_take(Exchange *x, const char *data) {
  Reducer *r = &x->reducer;
  int me = x->group->me;
  bool wide = combine_is_wide(r->dtype);
  for (Run u = {0}; next_run(x, &u);) {
    if (wide) take_wide(r, me, &u, data + u.at);
    else take_plain(r, me, &u, data + u.at);
  }
  r->next += r->next + 1 == me ? 2 : 1;
  if (r->next >= x->group->n) finish_block(x);
}

static bool reducer_is_done(const Reducer *r) {
  return !r->on || r->done == r->total;
}

/* -- Receiving --------------------------------------------------------------------------------- */

static bool is_ours(const Exchange *x, const Fragment *f) {
  if (f->context != x->head.context) return false;
  if (!x->group) return f->kind == FRAGMENT_MESSAGE;
  return f->kind != FRAGMENT_MESSAGE && f->number == x->head.number;
}

static int fail_malformed(Exchange *x, int peer, const char *what) {
  char text[SEGMENT_TEXT];
  atomic_fetch_add(&x->comm->refused, 1);
  snprintf(text, sizeof text, "%s: rank %d got from rank %d on host %s %s", x->name, x->comm->rank,
           peer, comm_host(x->comm, peer), what);
  return fail(x, text);
}

typedef enum Delivery { DELIVERY_TAKEN, DELIVERY_LATER } Delivery;

/* A contribution: taken when it is its turn. */
static int deliver_reducer(Exchange *x, int peer, const Fragment *f, const char *data,
                           Delivery *d) {
  Reducer *r = &x->reducer;
  CommGroup *g = x->group;
  if (r->done == r->total) return fail_malformed(x, peer, "a contribution that was there already");
  bool turn = r->next < g->n && g->rank[r->next] == peer;
  for (int i = 0; turn && r->after_sends && i < x->n; i++)
    turn = !x->flows[i].out || x->flows[i].lane != r->lane || flow_is_done(&x->flows[i]);
  if (!turn) {
    *d = DELIVERY_LATER;
    return 0;
  }
  if (f->total != r->total || f->offset != r->done || f->bytes != reducer_block(r))
    return fail_malformed(x, peer, "a contribution of another length");
  reducer_take(x, data);
  return 0;
}

static int deliver_flow(Exchange *x, int peer, const Fragment *f, const char *data) {
  for (int i = 0; i < x->n; i++) {
    Flow *w = &x->flows[i];
    if (w->out || w->peer != peer || w->lane != f->lane) continue;
    char text[160];
    if (f->total != w->total) {
      snprintf(text, sizeof text, "%llu bytes and expected %zu", (unsigned long long)f->total,
               w->total);
      return fail_malformed(x, peer, text);
    }
    if (!x->group && f->number != x->head.number) {
      snprintf(text, sizeof text, "message %llu of the edge and expected message %llu",
               (unsigned long long)f->number, (unsigned long long)x->head.number);
      return fail_malformed(x, peer, text);
    }
    if (f->offset != w->done || f->bytes > w->total - w->done)
      return fail_malformed(x, peer, "a fragment out of order");
    copy_to(&x->pieces, w->at + w->done, data, f->bytes);
    w->done += f->bytes;
    w->touched = true;
    return 0;
  }
  return fail_malformed(x, peer, "data that no part of the call waits for");
}

static int deliver(Exchange *x, int peer, const Fragment *f, Delivery *d) {
  const char *data = (const char *)(f + 1);
  *d = DELIVERY_TAKEN;
  if (x->group && x->comm->check) {
    int code = compare(x, peer, f, data);
    if (code) return code;
    if (x->suspect >= 0) return 0; /* the call is lost; only notes are of use */
  }
  if (f->kind == FRAGMENT_PROBE) return 0;
  int code = x->reducer.on && f->lane == x->reducer.lane ? deliver_reducer(x, peer, f, data, d)
                                                         : deliver_flow(x, peer, f, data);
  if (!code && *d == DELIVERY_TAKEN) atomic_fetch_add(&x->comm->received, f->bytes);
  return code;
}

/* The way from a peer on this host. */
static Ring *ring_from(Comm *c, const Peer *p) {
  return &c->segment->ring[(unsigned)p->seat * c->segment->seats + (unsigned)c->seat];
}

static const Fragment *way_first(Exchange *x, int peer, int *code) {
  Comm *c = x->comm;
  Peer *p = &c->peers[peer];
  if (p->seat < 0) return c->api->remote->first(c, peer);
  bool bad = false;
  const Fragment *f = ring_first(ring_from(c, p), &bad);
  if (bad) *code = fail_malformed(x, peer, "a header that makes no sense");
  return f;
}

static void way_advance(Comm *c, int peer, const Fragment *f) {
  Peer *p = &c->peers[peer];
  if (p->seat < 0) {
    c->api->remote->advance(c, peer, f);
    return;
  }
  ring_advance(ring_from(c, p), f);
  bell_ring(&c->segment->seat[p->seat].bell);
}

/* Copies the first fragment aside. False when it must wait where it is. */
static bool put_aside(Exchange *x, int peer, const Fragment *f) {
  Peer *p = &x->comm->peers[peer];
  bool stale = f->kind == FRAGMENT_PROBE && x->group && f->context == x->head.context &&
               f->number < x->head.number;
  if (stale) return true;
  Stash *s = p->stashed < STASH_MAX ? mem_alloc(sizeof *s + f->bytes) : NULL;
  if (!s) return false;
  s->next = NULL;
  s->f = *f;
  memcpy(s->data, f + 1, f->bytes);
  *p->stash_end = s;
  p->stash_end = &s->next;
  p->stashed += f->bytes;
  bell_ring(&x->comm->segment->seat[x->comm->seat].bell); /* another thread may wait for it */
  return true;
}

static Stash **find_stash(Exchange *x, Peer *p) {
  Stash **s = &p->stash;
  while (*s && !is_ours(x, &(*s)->f)) s = &(*s)->next;
  return s;
}

static void drop_stash(Peer *p, Stash **s) {
  Stash *gone = *s;
  *s = gone->next;
  if (p->stash_end == &gone->next) p->stash_end = s;
  p->stashed -= gone->f.bytes;
  mem_free(gone);
}

/* Takes a few fragments of a peer. The in_lock is held. */
static int pull_locked(Exchange *x, int peer, bool *moved) {
  Peer *p = &x->comm->peers[peer];
  for (int taken = 0; taken < PULLS;) {
    int code = 0;
    if (!x->group && flow_is_done(x->flows)) return 0; /* what follows is the next message */
    Stash **s = find_stash(x, p);
    const Fragment *f = *s ? &(*s)->f : way_first(x, peer, &code);
    if (code || !f) return code;
    if (!*s && !is_ours(x, f)) {
      if (!put_aside(x, peer, f)) return 0;
      way_advance(x->comm, peer, f);
      continue;
    }
    Delivery d;
    code = deliver(x, peer, f, &d);
    if (code || d == DELIVERY_LATER) return code;
    if (*s) drop_stash(p, s);
    else way_advance(x->comm, peer, f);
    *moved = true;
    taken++;
  }
  return 0;
}

static int pull(Exchange *x, int peer, bool *moved) {
  Peer *p = &x->comm->peers[peer];
  pthread_mutex_lock(&p->in_lock);
  int code = pull_locked(x, peer, moved);
  pthread_mutex_unlock(&p->in_lock);
  return code;
}

void flow_forget(Exchange *x) {
  for (int i = 0; i < x->group->n; i++) {
    if (i == x->group->me) continue;
    Peer *p = &x->comm->peers[x->group->rank[i]];
    pthread_mutex_lock(&p->in_lock);
    for (Stash **s; *(s = find_stash(x, p));) drop_stash(p, s);
    pthread_mutex_unlock(&p->in_lock);
  }
}

/* While this rank waits for room, what others send must not fill their ways: two ranks that first
 * send and then receive would wait for each other. */
static int clear_ways(Exchange *x) {
  Comm *c = x->comm;
  int code = 0;
  for (int i = 0; i < c->size && !code; i++) {
    Peer *p = &c->peers[i];
    if (i == c->rank) continue;
    pthread_mutex_lock(&p->in_lock);
    for (const Fragment *f; (f = way_first(x, i, &code)) && put_aside(x, i, f);)
      way_advance(c, i, f);
    pthread_mutex_unlock(&p->in_lock);
  }
  return code;
}

/* -- Sending ----------------------------------------------------------------------------------- */

/* Sends one fragment if there is something to send and room for it. */
static bool push(Exchange *x, Flow *w) {
  Comm *c = x->comm;
  Peer *p = &c->peers[w->peer];
  size_t rest = w->total - w->done, n = rest < FRAGMENT_MAX ? rest : FRAGMENT_MAX;
  if (w->limit && *w->limit < w->done + n) return false;
  Ring *ring = p->seat < 0
                   ? NULL
                   : &c->segment->ring[(unsigned)c->seat * c->segment->seats + (unsigned)p->seat];
  pthread_mutex_lock(&p->out_lock);
  Fragment *f = ring ? ring_reserve(ring, n) : c->api->remote->reserve(c, w->peer, n);
  if (f) {
    *f = x->head;
    f->bytes = (uint32_t)n;
    f->lane = w->lane;
    f->offset = w->done;
    f->total = w->total;
    copy_from(&x->pieces, w->at + w->done, (char *)(f + 1), n);
    if (ring) ring_commit(ring, f);
    else c->api->remote->commit(c, w->peer, f);
  }
  pthread_mutex_unlock(&p->out_lock);
  if (!f) return false;
  if (ring) bell_ring(&c->segment->seat[p->seat].bell);
  w->done += n;
  w->touched = true;
  atomic_fetch_add_explicit(&c->sent, n, memory_order_relaxed);
  return true;
}

/* -- The loop ---------------------------------------------------------------------------------- */

/* One round over everything. */
static int move(Exchange *x, bool *moved, bool *done) {
  *done = true;
  for (int i = 0; i < x->n; i++) {
    Flow *w = &x->flows[i];
    if (!w->out || flow_is_done(w)) continue;
    if (push(x, w)) *moved = true;
  }
  int code = 0, n = x->group ? x->group->n : 1;
  for (int i = 0; i < n && !code; i++) {
    if (x->group && i == x->group->me) continue;
    int peer = x->group ? x->group->rank[i] : x->flows->peer;
    if (x->group || !x->flows->out) code = pull(x, peer, moved);
  }
  for (int i = 0; i < x->n; i++) *done = *done && flow_is_done(&x->flows[i]);
  *done = *done && reducer_is_done(&x->reducer) && x->suspect < 0;
  return code;
}

/* The rank for which the exchange waits, and whether for its data. */
static int awaited(const Exchange *x, bool *data) {
  *data = true;
  if (x->suspect >= 0) return x->suspect;
  for (int i = 0; i < x->n; i++)
    if (!x->flows[i].out && !flow_is_done(&x->flows[i])) {
      if (!reducer_is_done(&x->reducer)) break;
      return x->flows[i].peer;
    }
  if (!reducer_is_done(&x->reducer) && x->reducer.next < x->group->n)
    return x->group->rank[x->reducer.next];
  *data = false;
  for (int i = 0; i < x->n; i++)
    if (!flow_is_done(&x->flows[i])) return x->flows[i].peer;
  return -1;
}

static void describe_wait(const Exchange *x, char *text, size_t n) {
  char what[240];
  bool data;
  int peer = awaited(x, &data);
  describe_exchange(x, what, sizeof what);
  if (peer < 0) snprintf(text, n, "in %s", what);
  else
    snprintf(text, n, "for rank %d on host %s to %s, in %s", peer, comm_host(x->comm, peer),
             data ? "send its part" : "take its part", what);
}

/* Has the rank that is waited for gone? */
static bool awaited_has_left(Exchange *x, int *peer) {
  bool data;
  *peer = awaited(x, &data);
  if (*peer < 0) return false;
  Peer *p = &x->comm->peers[*peer];
  if (p->seat >= 0)
    return atomic_load_explicit(&x->comm->segment->seat[p->seat].state, memory_order_acquire) ==
           SEAT_LEFT;
  int64_t since = atomic_load(&p->left);
  return since && comm_milliseconds() - since > LEFT_MS;
}

static int fail_waiting(Exchange *x, const char *what) {
  char wait[400], text[SEGMENT_TEXT];
  describe_wait(x, wait, sizeof wait);
  snprintf(text, sizeof text, "%s; rank %d on host %s waited %s", what, x->comm->rank,
           comm_host(x->comm, x->comm->rank), wait);
  return fail(x, text);
}

/* Another rank's or thread's failure, as an error of this call. */
static int explain_failure(Exchange *x, int code) {
  char wait[400];
  const char *text = err_text();
  if (strstr(text, " waited ") || strstr(text, "call different")) return err_prefix(code, x->name);
  describe_wait(x, wait, sizeof wait);
  char whole[SEGMENT_TEXT];
  snprintf(whole, sizeof whole, "%s", text);
  return err_set(code, "%s: %s; rank %d waited %s", x->name, whole, x->comm->rank, wait);
}

/* What may be wrong when nothing moved for `idle` milliseconds. */
static int look_around(Exchange *x, int64_t idle) {
  Comm *c = x->comm;
  int peer;
  char what[160];
  bool moved = false, done;
  if (c->interrupt && atomic_load(c->interrupt)) {
    int code = comm_failed(c); /* which may be why */
    if (code) return code;
    atomic_store(c->interrupt, false);
    fail_waiting(x, "interrupted");
    return err_set(MF_EINTR, "%s: interrupted", x->name);
  }
  if (awaited_has_left(x, &peer)) { /* what it sent before is there by now */
    int code = move(x, &moved, &done);
    if (code || moved || done) return code;
    snprintf(what, sizeof what, "rank %d on host %s has left the job", peer, comm_host(c, peer));
    return fail_waiting(x, what);
  }
  if (x->suspect >= 0 && comm_milliseconds() - x->suspect_since > SUSPECT_MS)
    return fail_notes(x, x->suspect, "something that it could not say");
  if (idle >= PROBE_MS && x->group && c->check && !x->probed) {
    x->probed = true;
    for (int i = 0; i < x->group->n; i++)
      if (i != x->group->me) send_probe(x, x->group->rank[i]);
  }
  if (idle <= c->timeout_ms) return 0;
  snprintf(what, sizeof what, "nothing moved for %.3g s", (double)idle / 1000);
  return fail_waiting(x, what);
}

int flow_step(Exchange *x, bool *done) {
  bool moved = false;
  int code = comm_failed(x->comm);
  if (!code) code = move(x, &moved, done);
  if (!code && !moved && !*done && x->flows->out) code = clear_ways(x);
  return code ? explain_failure(x, code) : 0;
}

int flow_run(Exchange *x) {
  Comm *c = x->comm;
  Bell *bell = &c->segment->seat[c->seat].bell;
  int64_t since = 0;
  x->suspect = -1;
  if (x->reducer.on) reducer_begin_block(x);
  for (;;) {
    uint32_t seen = bell_now(bell);
    bool moved = false, done;
    int code = comm_failed(c);
    if (!code) code = move(x, &moved, &done);
    if (code) return explain_failure(x, code);
    if (done) return 0;
    if (moved) {
      since = 0;
      continue;
    }
    if (!x->group && x->flows->out && (code = clear_ways(x))) return explain_failure(x, code);
    int64_t now = comm_milliseconds();
    if (!since) since = now;
    code = look_around(x, now - since);
    if (code) return code == MF_EINTR ? code : explain_failure(x, code);
    int most = c->timeout_ms < TICK_MS ? c->timeout_ms + 1 : TICK_MS;
    bell_wait(bell, seen, most);
  }
}
