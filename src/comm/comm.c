/* What is common to all members: checking of arguments, groups, notes, failure.
 *
 * A group is known by its ranks; its id is their hash, so that all ranks that are in it agree
 * without talking. Groups live until comm_close. A call holds its group's lock, so that two
 * threads' calls on one group come one after the other (their order is the user's to fix, as on the
 * other ranks).
 *
 * A group's `hash` is that of all its calls and notes so far; every fragment carries it, and flow.c
 * compares. */
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "comm_int.h"

#define X(id, name) name,
static const char *const op_names[] = {COMM_OPS(X)};
static const char *const reduce_names[] = {COMM_REDUCES(X)};
#undef X

const char *comm_op_name(CommOp op) {
  return op_names[op];
}

const char *comm_reduce_name(CommReduce r) {
  return reduce_names[r];
}

int comm_reduce_parse(const char *name) {
  for (int r = 0; r < COMM_REDUCE_COUNT; r++)
    if (!strcmp(name, reduce_names[r])) return r;
  return -1;
}

int64_t comm_milliseconds(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

/* FNV-1a over 8 bytes at a time with a final mix; equal on all machines of one byte order. */
void comm_hash(uint64_t *hash, const void *bytes, size_t n) {
  const unsigned char *b = bytes;
  uint64_t h = *hash ^ UINT64_C(0xcbf29ce484222325);
  for (size_t i = 0; i < n; i++) h = (h ^ b[i]) * UINT64_C(0x100000001b3);
  h ^= h >> 29;
  *hash = h * UINT64_C(0xbf58476d1ce4e5b9);
}

/* -- Creation ---------------------------------------------------------------------------------- */

static bool peer_open(Peer *p) {
  p->stash_end = &p->stash;
  p->seat = -1;
  return !pthread_mutex_init(&p->in_lock, NULL) && !pthread_mutex_init(&p->out_lock, NULL);
}

Comm *comm_create(const CommApi *api, int rank, int size, const CommOptions *o) {
  Comm *c = mem_zalloc(sizeof *c);
  if (!c) return NULL;
  c->api = api;
  c->rank = rank;
  c->size = size;
  double timeout = o && o->timeout > 0 ? o->timeout : 600;
  c->timeout_ms = timeout > 2e6 ? 2000000000 : (int)(timeout * 1000);
  c->check = !(o && o->no_check);
  c->interrupt = o ? o->interrupt : NULL;
  pthread_mutex_init(&c->lock, NULL);
  c->peers = mem_zalloc(sizeof *c->peers * (size_t)size);
  for (int i = 0; c->peers && i < size; i++) peer_open(&c->peers[i]);
  if (c->peers) return c;
  comm_destroy(c);
  return NULL;
}

static void forget(Peer *p) {
  for (Stash *s = p->stash, *next; s; s = next) next = s->next, mem_free(s);
  for (Edge *e = p->edges, *next; e; e = next) next = e->next, mem_free(e);
  p->stash = NULL;
  p->stash_end = &p->stash;
  p->stashed = 0;
  p->edges = NULL;
}

void comm_destroy(Comm *c) {
  for (size_t i = 0; i < c->groups.n; i++) {
    CommGroup *g = c->groups.at[i];
    pthread_mutex_destroy(&g->lock);
    mem_free(g->flows);
    mem_free(g->scratch);
    mem_free(g);
  }
  vec_free(&c->groups);
  for (int i = 0; c->peers && i < c->size; i++) {
    Peer *p = &c->peers[i];
    forget(p);
    pthread_mutex_destroy(&p->in_lock);
    pthread_mutex_destroy(&p->out_lock);
  }
  pthread_mutex_destroy(&c->lock);
  mem_free(c->peers);
  mem_free(c);
}

void comm_group_fail(CommGroup *g, const char *what) {
  Comm *c = g->comm;
  char text[SEGMENT_TEXT];
  snprintf(text, sizeof text, "rank %d on host %s %s", c->rank, comm_host(c, c->rank), what);
  comm_fail(c, text);
}

int comm_renew(Comm *c) {
  Segment *s = c->segment;
  if (c->api->remote && (int)s->seats < c->size)
    return err_set(MF_EUNSUPPORTED, "comm: a job on several hosts does not survive a failure");
  for (int i = 0; i < c->size; i++) {
    forget(&c->peers[i]);
    if (i != c->rank)
      ring_clear(&s->ring[(unsigned)c->peers[i].seat * s->seats + (unsigned)c->seat]);
  }
  for (size_t i = 0; i < c->groups.n; i++) {
    CommGroup *g = c->groups.at[i];
    g->number = 0;
    g->hash = g->id;
    g->n_notes = 0;
    g->notes[0] = 0;
  }
  segment_revive(s);
  atomic_store(&c->told, false);
  return 0;
}

/* A program may end while another thread of its is in a call, which must end first. */
static void end_calls(Comm *c) {
  for (size_t i = 0; i < c->groups.n; i++) {
    CommGroup *g = c->groups.at[i];
    if (pthread_mutex_trylock(&g->lock)) {
      comm_group_fail(g, "left in the middle of a call");
      pthread_mutex_lock(&g->lock);
    }
    pthread_mutex_unlock(&g->lock);
  }
}

void comm_close(Comm *c) {
  if (!c) return;
  end_calls(c);
  c->api->close(c);
}

int comm_rank(const Comm *c) {
  return c->rank;
}

int comm_size(const Comm *c) {
  return c->size;
}

const char *comm_host(const Comm *c, int rank) {
  return c->peers[rank].host;
}

CommStats comm_stats(const Comm *c) {
  return (CommStats){atomic_load(&c->sent), atomic_load(&c->received),
                     atomic_load(&c->refused_peers), atomic_load(&c->refused)};
}

/* -- Failure ----------------------------------------------------------------------------------- */

void comm_fail(Comm *c, const char *why) {
  atomic_store(&c->told, true); /* who calls this knows */
  segment_fail(c->segment, why);
  if (c->api->fail) c->api->fail(c, why);
}

static void take_back_interrupt(Comm *c) {
  if (atomic_exchange(&c->interrupting, false)) atomic_store(c->interrupt, false);
}

void comm_interrupt(Comm *c) {
  if (!c->interrupt || atomic_load(&c->told)) return;
  atomic_store(c->interrupt, true);
  atomic_store(&c->interrupting, true);
  if (atomic_load(&c->told)) take_back_interrupt(c);
}

int comm_failed(Comm *c) {
  const char *text = segment_failure(c->segment);
  if (!text) return 0;
  atomic_store(&c->told, true);
  take_back_interrupt(c);
  return err_set(MF_ECOMM, "%s", text);
}

/* -- Groups ------------------------------------------------------------------------------------ */

static CommGroup *find_group(Comm *c, int n, const int *ranks, uint64_t tag) {
  for (size_t i = 0; i < c->groups.n; i++) {
    CommGroup *g = c->groups.at[i];
    if (g->n == n && g->tag == tag && !memcmp(g->rank, ranks, sizeof *ranks * (size_t)n)) return g;
  }
  return NULL;
}

static CommGroup *make_group(Comm *c, int n, const int *ranks, uint64_t tag) {
  CommGroup *g = mem_zalloc(sizeof *g + sizeof *ranks * (size_t)n);
  Flow *flows = mem_alloc(sizeof *flows * 3 * (size_t)n);
  if (!g || !flows || !vec_push(&c->groups, g)) {
    mem_free(g);
    mem_free(flows);
    err_set(MF_ENOMEM, "comm: out of memory");
    return NULL;
  }
  g->comm = c;
  g->flows = flows;
  g->n = n;
  g->tag = tag;
  pthread_mutex_init(&g->lock, NULL);
  memcpy(g->rank, ranks, sizeof *ranks * (size_t)n);
  for (int i = 0; i < n; i++) {
    if (ranks[i] == c->rank) g->me = i;
    g->spans |= c->peers[ranks[i]].seat < 0;
  }
  comm_hash(&g->id, ranks, sizeof *ranks * (size_t)n);
  if (tag) comm_hash(&g->id, &tag, sizeof tag);
  g->hash = g->id;
  return g;
}

static CommGroup *get_group(Comm *c, int n, const int *ranks, uint64_t tag) {
  pthread_mutex_lock(&c->lock);
  CommGroup *g = find_group(c, n, ranks, tag);
  if (!g) g = make_group(c, n, ranks, tag);
  pthread_mutex_unlock(&c->lock);
  return g;
}

CommGroup *comm_group(Comm *c, int n, const int *ranks) {
  bool in = false;
  for (int i = 0; i < n; i++) {
    bool fits = ranks[i] >= 0 && ranks[i] < c->size && (i == 0 || ranks[i] > ranks[i - 1]);
    if (!fits) {
      err_set(MF_EINVAL,
              "comm: the ranks of a group must be ascending and from 0 to %d; entry %d is %d",
              c->size - 1, i, ranks[i]);
      return NULL;
    }
    in |= ranks[i] == c->rank;
  }
  if (!in) {
    err_set(MF_EINVAL, "comm: rank %d is not in the group", c->rank);
    return NULL;
  }
  return get_group(c, n, ranks, 0);
}

CommGroup *comm_group_apart(CommGroup *g, uint64_t tag) {
  return get_group(g->comm, g->n, g->rank, tag);
}

CommGroup *comm_world(Comm *c) {
  if (c->world) return c->world;
  int *ranks = mem_alloc(sizeof *ranks * (size_t)c->size);
  if (!ranks) {
    err_set(MF_ENOMEM, "comm: out of memory");
    return NULL;
  }
  for (int i = 0; i < c->size; i++) ranks[i] = i;
  CommGroup *g = comm_group(c, c->size, ranks);
  mem_free(ranks);
  c->world = g;
  return g;
}

int comm_group_size(const CommGroup *g) {
  return g->n;
}

int comm_group_position(const CommGroup *g) {
  return g->me;
}

const int *comm_group_ranks(const CommGroup *g) {
  return g->rank;
}

void comm_note(CommGroup *g, const char *text) {
  if (!g->comm->check) return;
  size_t n = strlen(text);
  pthread_mutex_lock(&g->lock);
  comm_hash(&g->hash, text, n);
  if (g->n_notes + 2 < COMM_NOTES) {
    size_t room = COMM_NOTES - 2 - g->n_notes;
    if (n > room) n = room;
    memcpy(g->notes + g->n_notes, text, n);
    g->n_notes += n;
    g->notes[g->n_notes++] = '\n';
    g->notes[g->n_notes] = 0;
  }
  pthread_mutex_unlock(&g->lock);
}

/* -- Calls ------------------------------------------------------------------------------------- */

static int check_counts(const char *name, int n, const int64_t *counts) {
  for (int i = 0; counts && i < n; i++)
    if (counts[i] < 0 || counts[i] > INT64_MAX / 16 / n)
      return err_set(MF_EINVAL, "%s: the count for position %d is %lld", name, i,
                     (long long)counts[i]);
  return 0;
}

static int check_call(const CommGroup *g, const CommCall *call) {
  const char *name = comm_op_name(call->op);
  bool counts = call->op == COMM_REDUCE_SCATTER || call->op == COMM_ALL_GATHER ||
                call->op == COMM_GATHER || call->op == COMM_SCATTER || call->op == COMM_ALL_TO_ALL;
  if (counts && !call->counts) return err_set(MF_EINVAL, "%s: no counts", name);
  if (call->op == COMM_ALL_TO_ALL && !call->out_counts)
    return err_set(MF_EINVAL, "%s: no counts of the result", name);
  if (call->root < 0 || call->root >= g->n)
    return err_set(MF_EINVAL, "%s: root %d is not a position of a group of %d", name, call->root,
                   g->n);
  if (!counts && (call->count < 0 || call->count > INT64_MAX / 16))
    return err_set(MF_EINVAL, "%s: the count is %lld", name, (long long)call->count);
  int64_t in_pieces = 0;
  for (int i = 0; i < call->n_pieces; i++) in_pieces += call->pieces[i].count;
  if (call->n_pieces && (call->op != COMM_ALL_REDUCE || in_pieces != call->count))
    return err_set(MF_EINVAL, "%s: the pieces have %lld elements of %lld", name,
                   (long long)in_pieces, (long long)call->count);
  if (call->reduce == COMM_AVG && !dtype_is_float((DType)call->dtype))
    return err_set(MF_EINVAL, "%s: op 'avg' needs floats, the tensor is of %s", name,
                   dtype_name((DType)call->dtype));
  int code = check_counts(name, g->n, call->counts);
  return code ? code : check_counts(name, g->n, call->out_counts);
}

int comm_collective(CommGroup *g, const CommCall *call, const void *in, void *out) {
  int code = check_call(g, call);
  if (code) return code;
  pthread_mutex_lock(&g->lock);
  code = comm_failed(g->comm);
  if (code) err_prefix(code, comm_op_name(call->op));
  else code = g->comm->api->collective(g, call, in, out);
  pthread_mutex_unlock(&g->lock);
  return code;
}

Edge *comm_edge(Peer *p, uint64_t edge) {
  pthread_mutex_lock(&p->out_lock);
  Edge *e = p->edges;
  while (e && e->edge != edge) e = e->next;
  if (!e && (e = mem_zalloc(sizeof *e))) {
    e->edge = edge;
    e->next = p->edges;
    p->edges = e;
  }
  pthread_mutex_unlock(&p->out_lock);
  return e;
}

static int check_peer(const Comm *c, const char *name, const char *arg, int rank) {
  if (rank < 0 || rank >= c->size)
    return err_set(MF_EINVAL, "%s: %s is %d; ranks are 0 to %d", name, arg, rank, c->size - 1);
  if (rank == c->rank)
    return err_set(MF_EINVAL, "%s: %s is this rank itself (%d)", name, arg, rank);
  return 0;
}

int comm_send(Comm *c, int to, uint64_t edge, const void *data, size_t bytes) {
  int code = check_peer(c, "send", "dst", to);
  return code ? code : c->api->send(c, to, edge, data, bytes);
}

int comm_recv(Comm *c, int from, uint64_t edge, void *data, size_t bytes) {
  int code = check_peer(c, "recv", "src", from);
  return code ? code : c->api->recv(c, from, edge, data, bytes);
}

int comm_post_send(Comm *c, int to, uint64_t edge, const void *data, size_t bytes,
                   CommTransfer **out) {
  int code = check_peer(c, "send", "dst", to);
  if (!code && !(*out = c->api->post(c, to, edge, (void *)data, bytes, true))) code = MF_ENOMEM;
  return code;
}

int comm_post_recv(Comm *c, int from, uint64_t edge, void *data, size_t bytes, CommTransfer **out) {
  int code = check_peer(c, "recv", "src", from);
  if (!code && !(*out = c->api->post(c, from, edge, data, bytes, false))) code = MF_ENOMEM;
  return code;
}

int comm_test(Comm *c, CommTransfer *t, bool *done) {
  return c->api->test(t, done);
}

uint32_t comm_mark(Comm *c) {
  return bell_now(&c->segment->seat[c->seat].bell);
}

void comm_sleep(Comm *c, uint32_t mark, int milliseconds) {
  bell_wait(&c->segment->seat[c->seat].bell, mark, milliseconds);
}
