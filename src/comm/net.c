/* The thread that owns a rank's sockets, and what it moves.
 *
 * A rank listens on one ROUTER, from which it only receives, and sends on one DEALER per rank that
 * it talks to: rank 0 to all, all to rank 0, and each to the ranks on other hosts. Sockets belong
 * to this thread alone; others put messages on a list and kick it.
 *
 * Control: every half second each rank sends a beat to rank 0, and rank 0 to each. Who is silent
 * for longer than allowed is dead, and so is who shares this host and whose process has ended (a
 * pidfd tells at once). The first to know fails the job; rank 0 passes the text on to all.
 *
 * Data between hosts: at most NET_WINDOW bytes are under way to a rank, which reports what it has
 * taken by CREDIT; so memory is bounded on both sides though the sockets' own queues are not. */
#include "net_int.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { BEAT_MS = 500, CLOSE_MS = 2000 };

/* -- Lists and messages ------------------------------------------------------------------------ */

static void list_put(NetList *l, NetMessage *m) {
  m->next = NULL;
  *l->end = m;
  l->end = &m->next;
}

static NetMessage *list_take(NetList *l) {
  NetMessage *m = l->first;
  if (m && !(l->first = m->next)) l->end = &l->first;
  return m;
}

static void message_free(NetMessage *m) {
  zmq_msg_close(&m->m);
  mem_free(m);
}

void net_list_free(NetList *l) {
  for (NetMessage *m; (m = list_take(l));) message_free(m);
}

void net_wake(Net *n) {
  uint64_t one = 1;
  while (write(n->kick, &one, sizeof one) < 0 && errno == EINTR) continue;
}

/* The envelope gets its number when it is sent, since numbers follow the order on the socket. */
NetMessage *net_message(Net *n, int peer, WireKind kind, size_t bytes, void **payload) {
  NetMessage *m = mem_alloc(sizeof *m);
  if (!m || zmq_msg_init_size(&m->m, sizeof(Envelope) + bytes)) {
    mem_free(m);
    return NULL;
  }
  m->peer = peer;
  Envelope *e = zmq_msg_data(&m->m);
  wire_seal(e, kind, 0, n->c->rank, peer, 0, bytes);
  if (payload) *payload = e + 1;
  return m;
}

void net_post(Net *n, NetMessage *m) {
  pthread_mutex_lock(&n->lock);
  bool first = !n->out.first;
  list_put(&n->out, m);
  pthread_mutex_unlock(&n->lock);
  if (first) net_wake(n);
}

void net_send(Net *n, int peer, WireKind kind, const void *payload, size_t bytes) {
  void *to;
  NetMessage *m = net_message(n, peer, kind, bytes, &to);
  if (!m) return; /* no memory: silence, which the others notice */
  if (bytes) memcpy(to, payload, bytes);
  net_post(n, m);
}

/* -- Fragments between hosts ------------------------------------------------------------------- */

static Fragment *remote_reserve(Comm *c, int peer, size_t bytes) {
  Net *n = c->member;
  NetPeer *p = c->peers[peer].remote;
  if (atomic_load(&p->flying) + sizeof(Fragment) + bytes > NET_WINDOW) return NULL;
  void *payload;
  p->next_out = net_message(n, peer, WIRE_DATA, sizeof(Fragment) + bytes, &payload);
  return p->next_out ? payload : NULL;
}

static void remote_commit(Comm *c, int peer, Fragment *f) {
  NetPeer *p = c->peers[peer].remote;
  atomic_fetch_add(&p->flying, sizeof *f + f->bytes);
  net_post(c->member, p->next_out);
}

static const Fragment *remote_first(Comm *c, int peer) {
  NetPeer *p = c->peers[peer].remote;
  pthread_mutex_lock(&p->lock);
  NetMessage *m = p->in.first;
  pthread_mutex_unlock(&p->lock);
  return m ? (const Fragment *)((Envelope *)zmq_msg_data(&m->m) + 1) : NULL;
}

static void remote_advance(Comm *c, int peer, const Fragment *f) {
  NetPeer *p = c->peers[peer].remote;
  uint64_t bytes = sizeof *f + f->bytes;
  pthread_mutex_lock(&p->lock);
  NetMessage *m = list_take(&p->in);
  p->held -= bytes;
  pthread_mutex_unlock(&p->lock);
  message_free(m);
  p->taken += bytes;
  if (p->taken < NET_WINDOW / 4) return;
  uint64_t taken = p->taken;
  p->taken = 0;
  net_send(c->member, peer, WIRE_CREDIT, &taken, sizeof taken);
}

const CommRemote net_remote = {remote_reserve, remote_commit, remote_first, remote_advance};

/* -- Receiving --------------------------------------------------------------------------------- */

static void refuse(Net *n) {
  atomic_fetch_add(&n->c->refused, 1);
}

/* Takes the message if the peer may have sent so much. */
static bool take_data(Net *n, int from, zmq_msg_t *message) {
  NetPeer *p = n->c->peers[from].remote;
  size_t bytes = zmq_msg_size(message) - sizeof(Envelope);
  const Envelope *e = zmq_msg_data(message);
  if (!p || !wire_fragment_check(e + 1, bytes)) return false;
  NetMessage *m = mem_alloc(sizeof *m);
  if (!m) return false;
  zmq_msg_init(&m->m);
  pthread_mutex_lock(&p->lock);
  bool fits = p->held + bytes <= NET_WINDOW;
  if (fits) {
    zmq_msg_move(&m->m, message);
    list_put(&p->in, m);
    p->held += bytes;
  }
  pthread_mutex_unlock(&p->lock);
  if (fits) bell_ring(&n->c->segment->seat[n->c->seat].bell);
  else message_free(m);
  return fits;
}

static bool take_credit(Net *n, int from, const void *payload) {
  NetPeer *p = n->c->peers[from].remote;
  uint64_t bytes;
  memcpy(&bytes, payload, sizeof bytes);
  if (!p || bytes > atomic_load(&p->flying)) return false;
  atomic_fetch_sub(&p->flying, bytes);
  bell_ring(&n->c->segment->seat[n->c->seat].bell);
  return true;
}

static void fail_here(Net *n, const char *text) {
  if (n->c->segment) segment_fail(n->c->segment, text);
  else meet_fail(n, "%s", text);
}

static void take_failure(Net *n, const Envelope *e, const void *payload) {
  char text[SEGMENT_TEXT];
  size_t bytes = e->bytes < sizeof text ? e->bytes : sizeof text - 1;
  memcpy(text, payload, bytes);
  text[bytes] = 0;
  fail_here(n, text);
}

/* Rank 0 tells the ranks of other hosts, which cannot see the seat. */
static bool take_bye(Net *n, const Envelope *e) {
  uint32_t who;
  memcpy(&who, e + 1, sizeof who);
  if (who >= (uint32_t)n->c->size || (e->from && who != e->from)) return false;
  n->gone[who] = true;
  atomic_store(&n->c->peers[who].left, comm_milliseconds());
  for (int i = 1; n->c->rank == 0 && i < n->c->size; i++)
    if (!n->gone[i] && strcmp(n->seats[i].host_id, n->seats[who].host_id))
      net_send(n, i, WIRE_BYE, &who, sizeof who);
  return true;
}

static bool take_message(Net *n, const Envelope *e, zmq_msg_t *message) {
  const void *payload = e + 1;
  int from = (int)e->from;
  n->seen[from] = comm_milliseconds();
  switch ((WireKind)e->kind) {
    case WIRE_DATA: return take_data(n, from, message);
    case WIRE_CREDIT: return take_credit(n, from, payload);
    case WIRE_FAIL: take_failure(n, e, payload); return true;
    case WIRE_BEAT: return true;
    case WIRE_BYE: return take_bye(n, e);
    default: meet_take(n, e, payload); return true;
  }
}

/* The rank as which a connection introduced itself: 'm', 'f', and 4 bytes. */
static bool read_name(zmq_msg_t *name, uint32_t *rank) {
  const char *text = zmq_msg_data(name);
  if (zmq_msg_size(name) != 6 || text[0] != 'm' || text[1] != 'f') return false;
  memcpy(rank, text + 2, 4);
  return true;
}

/* ZeroMQ hands out messages where they lie in what it read; a header needs 8 bytes' alignment,
 * which messages of its own have from 34 bytes on. */
static bool align(zmq_msg_t *m) {
  size_t bytes = zmq_msg_size(m);
  zmq_msg_t copy;
  if ((uintptr_t)zmq_msg_data(m) % 8 == 0 || bytes < sizeof(Envelope)) return true;
  if (zmq_msg_init_size(&copy, bytes)) return false;
  memcpy(zmq_msg_data(&copy), zmq_msg_data(m), bytes);
  zmq_msg_move(m, &copy);
  zmq_msg_close(&copy);
  return true;
}

/* One message with all its parts. False when there is none. */
static bool receive(Net *n) {
  zmq_msg_t name, message, more;
  zmq_msg_init(&name);
  zmq_msg_init(&message);
  bool got = zmq_msg_recv(&name, n->router, ZMQ_DONTWAIT) >= 0;
  if (got) {
    uint32_t from;
    bool well = zmq_msg_more(&name) && zmq_msg_recv(&message, n->router, ZMQ_DONTWAIT) >= 0;
    for (bool rest = well && zmq_msg_more(&message); rest;) {
      well = false; /* one part and no more */
      zmq_msg_init(&more);
      rest = zmq_msg_recv(&more, n->router, ZMQ_DONTWAIT) >= 0 && zmq_msg_more(&more);
      zmq_msg_close(&more);
    }
    well = well && align(&message);
    const void *data = zmq_msg_data(&message);
    well = well && read_name(&name, &from) &&
           wire_check(&n->rules, from, data, zmq_msg_size(&message)) &&
           take_message(n, data, &message);
    if (!well) refuse(n);
  }
  zmq_msg_close(&name);
  zmq_msg_close(&message);
  return got;
}

/* -- Who may connect --------------------------------------------------------------------------- */

/* ZeroMQ asks about each client's public key (RFC 27): the job's only. */
static void answer_zap(Net *n) {
  char part[8][64];
  size_t size[8] = {0};
  int parts = 0, more = 1;
  size_t more_size = sizeof more;
  while (more) {
    int k = parts < 8 ? parts : 7, got = zmq_recv(n->zap, part[k], sizeof part[k], ZMQ_DONTWAIT);
    if (got < 0) return;
    size[k] = (size_t)got < sizeof part[k] ? (size_t)got : sizeof part[k];
    parts++;
    zmq_getsockopt(n->zap, ZMQ_RCVMORE, &more, &more_size);
  }
  char text[COMM_KEY_BYTES] = "";
  bool curve = parts == 7 && size[5] == 5 && !memcmp(part[5], "CURVE", 5) && size[6] == 32;
  bool good = curve && zmq_z85_encode(text, (uint8_t *)part[6], 32) && !strcmp(text, n->public_key);
  if (!good) atomic_fetch_add(&n->c->refused_peers, 1);
  zmq_send(n->zap, "1.0", 3, ZMQ_SNDMORE);
  zmq_send(n->zap, part[1], size[1], ZMQ_SNDMORE);
  zmq_send(n->zap, good ? "200" : "400", 3, ZMQ_SNDMORE);
  zmq_send(n->zap, "", 0, ZMQ_SNDMORE);
  zmq_send(n->zap, "", 0, ZMQ_SNDMORE);
  zmq_send(n->zap, "", 0, 0);
}

/* Handshakes that failed. */
static bool count_event(Net *n) {
  zmq_msg_t m;
  zmq_msg_init(&m);
  bool got = zmq_msg_recv(&m, n->monitor, ZMQ_DONTWAIT) >= 0;
  if (got && zmq_msg_more(&m)) {
    atomic_fetch_add(&n->c->refused_peers, 1);
    zmq_msg_recv(&m, n->monitor, ZMQ_DONTWAIT);
  }
  zmq_msg_close(&m);
  return got;
}

/* -- Sending ----------------------------------------------------------------------------------- */

static void send_all(Net *n) {
  for (;;) {
    pthread_mutex_lock(&n->lock);
    NetMessage *m = list_take(&n->out);
    pthread_mutex_unlock(&n->lock);
    if (!m) return;
    void *dealer = n->dealers[m->peer];
    Envelope *e = zmq_msg_data(&m->m);
    e->job = e->kind == WIRE_JOIN ? 0 : n->rules.job;
    e->number = n->numbers_out[m->peer] + 1;
    if (dealer && zmq_msg_send(&m->m, dealer, ZMQ_DONTWAIT) >= 0) n->numbers_out[m->peer]++;
    message_free(m);
  }
}

/* -- Watching ---------------------------------------------------------------------------------- */

static bool has_left(const Net *n, int rank) {
  const Peer *p = &n->c->peers[rank];
  return n->gone[rank] ||
         (p->seat >= 0 && atomic_load(&n->c->segment->seat[p->seat].state) == SEAT_LEFT);
}

static void declare_dead(Net *n, int rank, const char *what) {
  char text[SEGMENT_TEXT];
  snprintf(text, sizeof text, "rank %d on host %s %s", rank, comm_host(n->c, rank), what);
  n->gone[rank] = true;
  segment_fail(n->c->segment, text);
}

/* Passes a failure that happened here on: to rank 0, and from there to all. Who is on this host
 * sees it in the segment. */
static void tell_failure(Net *n) {
  const char *text = segment_failure(n->c->segment);
  bool told = n->told;
  n->told = text != NULL;
  if (!text || told) return;
  comm_interrupt(n->c);
  for (int i = 0; i < n->c->size; i++)
    if (n->c->peers[i].seat < 0 && n->dealers[i]) net_send(n, i, WIRE_FAIL, text, strlen(text));
}

static void beat(Net *n, int64_t now, int64_t pause) {
  Comm *c = n->c;
  for (int i = 0; i < c->size; i++) {
    bool partner = i != c->rank && (c->rank == 0 || i == 0);
    if (!partner) continue;
    net_send(n, i, WIRE_BEAT, NULL, 0);
    if (pause > n->silence_ms / 2) n->seen[i] = now; /* it was this rank that slept */
    char what[80];
    snprintf(what, sizeof what, "has given no sign of life for %.3g s",
             (double)(now - n->seen[i]) / 1000);
    if (now - n->seen[i] > n->silence_ms && !has_left(n, i)) declare_dead(n, i, what);
  }
}

/* Ranks of this host whose process has ended. */
static void watch_processes(Net *n) {
  for (int i = 0; i < n->c->size; i++) {
    struct pollfd f = {n->pidfds[i], POLLIN, 0};
    if (f.fd < 0 || poll(&f, 1, 0) < 1) continue;
    if (!has_left(n, i)) declare_dead(n, i, "has died: its process is gone");
    close(n->pidfds[i]);
    n->pidfds[i] = -1;
  }
}

/* Rank 0 stays until all have left, so that it can tell them of each other; not for ever when the
 * job has failed. */
static bool may_end(Net *n, int64_t closing_since, int64_t now) {
  Comm *c = n->c;
  if (c->rank) return true;
  if (segment_failure(c->segment)) {
    if (now - closing_since > CLOSE_MS) return true;
  } else if (c->interrupt && atomic_load(c->interrupt)) {
    return true;
  }
  for (int i = 1; i < c->size; i++)
    if (!has_left(n, i)) return false;
  return true;
}

/* All were there, so that the rest of the meeting takes no time. */
static void check_meeting(Net *n, int64_t now) {
  if (!n->all_there) n->all_there = now;
  if (now - n->all_there < n->silence_ms) return;
  int absent = 0;
  while (n->c->rank == 0 && absent < n->c->size - 1 && n->ready[absent]) absent++;
  meet_fail(n,
            "rank %d on host %s has given no sign of life for %.3g s; rank %d on host %s waited "
            "for it to join",
            absent, n->seats[absent].host, n->silence_ms / 1e3, n->c->rank,
            n->seats[n->c->rank].host);
}

/* -- The loop ---------------------------------------------------------------------------------- */

enum { ITEM_ROUTER, ITEM_KICK, ITEM_ZAP, ITEM_MONITOR, ITEMS };

static void serve(Net *n, zmq_pollitem_t *items) {
  uint64_t kicks;
  if (items[ITEM_KICK].revents && read(n->kick, &kicks, sizeof kicks) < 0) errno = 0;
  while (n->zap && items[ITEM_ZAP].revents & ZMQ_POLLIN) {
    answer_zap(n);
    zmq_poll(&items[ITEM_ZAP], 1, 0);
  }
  for (int k = 0; k < 1000 && receive(n); k++) continue;
  while (count_event(n)) continue;
}

/* Waits for anything; the processes of this host among it. */
static void wait_for_any(Net *n, zmq_pollitem_t *items, int64_t milliseconds) {
  int count = ITEMS - 1;
  if (!n->zap) items[ITEM_ZAP] = items[ITEM_MONITOR];
  else count = ITEMS;
  for (int i = 0; i < n->c->size; i++)
    if (n->pidfds[i] >= 0) items[count++] = (zmq_pollitem_t){NULL, n->pidfds[i], ZMQ_POLLIN, 0};
  zmq_poll(items, count, (long)milliseconds);
}

static NetState state_of(Net *n) {
  pthread_mutex_lock(&n->lock);
  NetState s = n->state;
  pthread_mutex_unlock(&n->lock);
  return s;
}

void *net_main(void *arg) {
  Net *n = arg;
  zmq_pollitem_t items[ITEMS + SEGMENT_SEATS];
  int64_t last_beat = comm_milliseconds(), last = last_beat, closing_since = 0;
  meet_begin(n);
  for (;;) {
    items[ITEM_ROUTER] = (zmq_pollitem_t){n->router, 0, ZMQ_POLLIN, 0};
    items[ITEM_KICK] = (zmq_pollitem_t){NULL, n->kick, ZMQ_POLLIN, 0};
    items[ITEM_ZAP] = (zmq_pollitem_t){n->zap, 0, ZMQ_POLLIN, 0};
    items[ITEM_MONITOR] = (zmq_pollitem_t){n->monitor, 0, ZMQ_POLLIN, 0};
    send_all(n);
    NetState state = state_of(n);
    bool closing = state == NET_CLOSING;
    wait_for_any(n, items, closing ? 20 : BEAT_MS / 2);
    serve(n, items);
    int64_t now = comm_milliseconds();
    if (n->go) {
      watch_processes(n);
      if (now - last_beat >= BEAT_MS) {
        beat(n, now, now - last);
        last_beat = now;
      }
      tell_failure(n);
    }
    last = now;
    if (!n->go && n->rules.job) check_meeting(n, now);
    if (!closing) continue;
    if (!closing_since) closing_since = now;
    if (n->go && !may_end(n, closing_since, now)) continue;
    send_all(n);
    return NULL;
  }
}
