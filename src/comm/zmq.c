/* The member `zmq`: ranks as processes, on one host or several.
 *
 * Ranks of one host share a segment, as threads do, in memory that they all map; the flows neither
 * know nor care. Between hosts the same fragments travel in messages of ZeroMQ (net.c). A thread of
 * each rank owns the sockets, meets the others (meet.c), and watches them afterwards. */
#define _GNU_SOURCE
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "net_int.h"
#include "thread_start.h"

int comm_make_key(char out[COMM_KEY_BYTES]) {
  char public_key[COMM_KEY_BYTES];
  if (!zmq_curve_keypair(public_key, out)) return 0;
  return err_set(MF_EUNSUPPORTED, "comm: this ZeroMQ was built without CURVE");
}

/* -- Ending ------------------------------------------------------------------------------------ */

static void close_sockets(Net *n, int linger) {
  for (int i = 0; n->dealers && i < n->c->size; i++) {
    if (!n->dealers[i]) continue;
    int wait = n->gone[i] ? 0 : linger; /* nobody would take what is left */
    zmq_setsockopt(n->dealers[i], ZMQ_LINGER, &wait, sizeof wait);
    zmq_close(n->dealers[i]);
  }
  if (n->monitor) zmq_close(n->monitor);
  if (n->router) zmq_close(n->router);
  if (n->zap) zmq_close(n->zap);
  if (n->ctx)
    while (zmq_ctx_term(n->ctx) && zmq_errno() == EINTR) continue;
}

static void remote_free(NetPeer *p) {
  if (!p) return;
  net_list_free(&p->in);
  pthread_mutex_destroy(&p->lock);
  mem_free(p);
}

/* The thread has ended or was never there. */
static void net_free(Net *n, int linger) {
  Comm *c = n->c;
  close_sockets(n, linger);
  net_list_free(&n->out);
  for (int i = 0; i < c->size; i++) {
    remote_free(c->peers[i].remote);
    if (n->pidfds && n->pidfds[i] >= 0) close(n->pidfds[i]);
  }
  if (c->segment) munmap(c->segment, segment_bytes((int)c->segment->seats));
  if (n->own_fd >= 0) close(n->own_fd);
  if (n->kick >= 0) close(n->kick);
  explicit_bzero(n->key, sizeof n->key);
  pthread_mutex_destroy(&n->lock);
  pthread_cond_destroy(&n->changed);
  mem_free(n->dealers);
  mem_free(n->rules.numbers);
  mem_free(n->numbers_out);
  mem_free(n->seats);
  mem_free(n->present);
  mem_free(n->ready);
  mem_free(n->gone);
  mem_free(n->seen);
  mem_free(n->pidfds);
  mem_free(n);
  comm_destroy(c);
}

static void end_thread(Net *n) {
  pthread_mutex_lock(&n->lock);
  n->state = NET_CLOSING;
  pthread_mutex_unlock(&n->lock);
  net_wake(n);
  pthread_join(n->thread, NULL);
}

static bool has_seat_left(const Comm *c, int rank) {
  return atomic_load(&c->segment->seat[c->peers[rank].seat].state) == SEAT_LEFT;
}

static void zmq_member_close(Comm *c) {
  Net *n = c->member;
  Segment *s = c->segment;
  atomic_store(&s->seat[c->seat].state, SEAT_LEFT);
  for (uint32_t i = 0; i < s->seats; i++) bell_ring(&s->seat[i].bell);
  uint32_t me = (uint32_t)c->rank;
  for (int i = 0; i < c->size; i++)
    if (i != c->rank && (c->rank == 0 || i == 0)) net_send(n, i, WIRE_BYE, &me, sizeof me);
  end_thread(n);
  for (int i = 0; i < c->size; i++) n->gone[i] |= c->peers[i].seat >= 0 && i && has_seat_left(c, i);
  net_free(n, segment_failure(s) ? 500 : 2000);
}

static void zmq_member_fail(Comm *c, const char *why) {
  (void)why; /* the thread finds it in the segment */
  net_wake(c->member);
}

static const CommApi zmq_api = {.name = "zmq",
                                .collective = collective_run,
                                .send = message_send,
                                .recv = message_recv,
                                .post = message_post,
                                .test = message_test,
                                .fail = zmq_member_fail,
                                .close = zmq_member_close,
                                .remote = &net_remote};

/* -- Joining ----------------------------------------------------------------------------------- */

static Net *net_create(const CommJoin *j, const CommOptions *o) {
  Comm *c = comm_create(&zmq_api, j->rank, j->size, o);
  if (!c) return NULL;
  Net *n = mem_zalloc(sizeof *n);
  if (!n) {
    comm_destroy(c);
    return NULL;
  }
  size_t size = (size_t)j->size;
  n->c = c;
  c->member = n;
  n->join = j;
  n->own_fd = -1;
  n->out.end = &n->out.first;
  n->silence_ms = o && o->silence > 0 ? (int)(o->silence * 1000) : 5000;
  pthread_mutex_init(&n->lock, NULL);
  pthread_cond_init(&n->changed, NULL);
  n->kick = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  n->ctx = zmq_ctx_new();
  n->dealers = mem_zalloc(sizeof *n->dealers * size);
  n->rules = (WireRules){0, (uint32_t)j->rank, (uint32_t)j->size, mem_zalloc(8 * size)};
  n->numbers_out = mem_zalloc(8 * size);
  n->seats = mem_zalloc(sizeof *n->seats * size);
  n->present = mem_zalloc(size);
  n->ready = mem_zalloc(size);
  n->gone = mem_zalloc(size);
  n->seen = mem_zalloc(sizeof *n->seen * size);
  n->pidfds = mem_alloc(sizeof *n->pidfds * size);
  for (size_t i = 0; n->pidfds && i < size; i++) n->pidfds[i] = -1;
  if (n->kick >= 0 && n->ctx && n->dealers && n->rules.numbers && n->numbers_out && n->seats &&
      n->present && n->ready && n->gone && n->seen && n->pidfds)
    return n;
  net_free(n, 0);
  return NULL;
}

static int explain_absence(Net *n, double seconds, bool interrupted) {
  const char *end = interrupted ? "; interrupted" : "";
  if (n->c->rank)
    return err_set(MF_ECOMM, "comm: rank %d waited %.3g s for rank 0 at %s and all others%s",
                   n->c->rank, seconds, n->join->master, end);
  char list[200] = "";
  size_t at = 0;
  for (int i = 1; i < n->c->size && at + 16 < sizeof list; i++)
    if (!n->ready[i]) at += (size_t)snprintf(list + at, sizeof list - at, at ? ", %d" : "%d", i);
  return err_set(MF_ECOMM, "comm: rank 0 waited %.3g s at %s; not there: rank %s of %d%s", seconds,
                 n->join->master, list, n->c->size, end);
}

static int wait_for_all(Net *n) {
  double seconds = n->join->join_timeout > 0 ? n->join->join_timeout : 120;
  int64_t begin = comm_milliseconds(), until = begin + (int64_t)(seconds * 1000);
  atomic_bool *interrupt = n->c->interrupt;
  bool interrupted = false;
  pthread_mutex_lock(&n->lock);
  while (n->state == NET_JOINING && !n->error[0] && !interrupted && comm_milliseconds() < until) {
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    t.tv_nsec += 100000000;
    if (t.tv_nsec >= 1000000000) t.tv_nsec -= 1000000000, t.tv_sec++;
    pthread_cond_timedwait(&n->changed, &n->lock, &t);
    interrupted = interrupt && atomic_exchange(interrupt, false);
  }
  bool joined = n->state == NET_RUNNING;
  pthread_mutex_unlock(&n->lock);
  if (joined) return 0;
  end_thread(n);
  if (n->error[0]) return err_set(MF_ECOMM, "comm: %s", n->error);
  return explain_absence(n, (double)(comm_milliseconds() - begin) / 1000, interrupted);
}

int comm_zmq(const CommJoin *j, const CommOptions *o, Comm **out) {
  *out = NULL;
  if (j->size < 1 || j->size > WIRE_RANKS || j->rank < 0 || j->rank >= j->size)
    return err_set(MF_EINVAL, "comm: rank %d of %d; there can be 1 to %d ranks", j->rank, j->size,
                   WIRE_RANKS);
  Net *n = net_create(j, o);
  if (!n) return err_set(MF_ENOMEM, "comm: out of memory");
  int code = meet_open(n, j);
  if (!code && thread_start(&n->thread, net_main, n))
    code = err_set(MF_ENOMEM, "comm: the system gives no more threads");
  else if (!code) code = wait_for_all(n);
  if (!code && !comm_world(n->c)) {
    end_thread(n);
    code = MF_ENOMEM;
  }
  if (code) {
    net_free(n, 0);
    return code;
  }
  n->join = NULL;
  *out = n->c;
  return 0;
}
