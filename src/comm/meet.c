/* How the ranks of a job find each other.
 *
 *   1  rank 0 listens at the master address; the others connect and send JOIN: who and where they
 * are, on which host, and a piece of shared memory (a memfd) that they offer. 2  When all are
 * there, rank 0 draws the job's number and sends WELCOME: the seats of all. 3  Ranks of one host
 * map the memory of the lowest among them, through /proc/PID/fd, so that there is no name that
 * could stay behind; ranks of other hosts are connected by ZeroMQ. READY to rank 0. 4  When all are
 * READY: GO. Only now may anything else be sent.
 *
 * Two ranks are on one host when they see the same boot, the same processes and the same network.
 *
 * Addresses: what is not loopback needs the job's key. With it every connection is CURVE: the key
 * is the secret key of all ranks, both as servers and as clients, and the public key, which only
 * who has the secret one can make, is what each end asks of the other. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <fcntl.h>
#include <netdb.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "net_int.h"

void meet_fail(Net *n, const char *format, ...) {
  va_list args;
  va_start(args, format);
  pthread_mutex_lock(&n->lock);
  if (!n->error[0]) vsnprintf(n->error, sizeof n->error, format, args);
  pthread_cond_broadcast(&n->changed);
  pthread_mutex_unlock(&n->lock);
  va_end(args);
}

/* -- Addresses --------------------------------------------------------------------------------- */

typedef struct Address {
  struct sockaddr_in in;
  char ip[INET_ADDRSTRLEN];
  int port;
  bool loopback;
} Address;

static int read_address(const char *master, Address *a) {
  char host[256];
  const char *colon = strrchr(master, ':');
  char *end;
  long port = colon ? strtol(colon + 1, &end, 10) : 0;
  if (!colon || end == colon + 1 || *end || port < 1 || port > 65535 ||
      (size_t)(colon - master) >= sizeof host)
    return err_set(MF_EINVAL, "comm: the master must be HOST:PORT, is '%.100s'", master);
  snprintf(host, sizeof host, "%.*s", (int)(colon - master), master);
  struct addrinfo hints = {.ai_family = AF_INET, .ai_socktype = SOCK_STREAM}, *found = NULL;
  /* RFC 6761, 6.3: localhost is loopback, also where no file of hosts says so */
  int why = getaddrinfo(strcmp(host, "localhost") ? host : "127.0.0.1", NULL, &hints, &found);
  if (why)
    return err_set(MF_EIO, "comm: the master's host '%.100s' is not known: %s", host,
                   gai_strerror(why));
  memcpy(&a->in, found->ai_addr, sizeof a->in);
  freeaddrinfo(found);
  a->in.sin_port = htons((uint16_t)port);
  a->port = (int)port;
  a->loopback = ntohl(a->in.sin_addr.s_addr) >> 24 == 127;
  inet_ntop(AF_INET, &a->in.sin_addr, a->ip, sizeof a->ip);
  return 0;
}

/* The address of this host that the master can reach. */
static void own_address(const Address *master, char ip[INET_ADDRSTRLEN]) {
  struct sockaddr_in own;
  socklen_t size = sizeof own;
  int s = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  bool found = s >= 0 && !connect(s, (const void *)&master->in, sizeof master->in) &&
               !getsockname(s, (void *)&own, &size);
  if (s >= 0) close(s);
  if (!found || !inet_ntop(AF_INET, &own.sin_addr, ip, INET_ADDRSTRLEN)) strcpy(ip, "127.0.0.1");
}

/* What two ranks on one host have in common. */
static void own_host(char *id, size_t n) {
  char boot[40] = "", pids[40] = "", net[40] = "";
  int f = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
  ssize_t got = f >= 0 ? read(f, boot, sizeof boot - 1) : 0;
  if (f >= 0) close(f);
  boot[got > 0 ? strcspn(boot, "\n") : 0] = 0;
  struct stat pid_space, net_space;
  if (!stat("/proc/self/ns/pid", &pid_space))
    snprintf(pids, sizeof pids, "%llx", (unsigned long long)pid_space.st_ino);
  if (!stat("/proc/self/ns/net", &net_space))
    snprintf(net, sizeof net, "%llx", (unsigned long long)net_space.st_ino);
  snprintf(id, n, "%s-%s-%s", boot, pids, net);
}

/* -- Sockets ----------------------------------------------------------------------------------- */

static void set_int(void *socket, int option, int value) {
  zmq_setsockopt(socket, option, &value, sizeof value);
}

static void secure(const Net *n, void *socket, bool server) {
  if (!n->secure) return;
  if (server) set_int(socket, ZMQ_CURVE_SERVER, 1);
  else {
    zmq_setsockopt(socket, ZMQ_CURVE_SERVERKEY, n->public_key, COMM_KEY_BYTES);
    zmq_setsockopt(socket, ZMQ_CURVE_PUBLICKEY, n->public_key, COMM_KEY_BYTES);
  }
  zmq_setsockopt(socket, ZMQ_CURVE_SECRETKEY, n->key, COMM_KEY_BYTES);
}

bool meet_connect(Net *n, int rank, const char *endpoint) {
  void *d = zmq_socket(n->ctx, ZMQ_DEALER);
  if (!d) return false;
  char name[6] = {'m', 'f'};
  uint32_t me = (uint32_t)n->c->rank;
  memcpy(name + 2, &me, 4);
  zmq_setsockopt(d, ZMQ_ROUTING_ID, name, sizeof name);
  set_int(d, ZMQ_SNDHWM, 0);
  set_int(d, ZMQ_RECONNECT_IVL, 50);
  set_int(d, ZMQ_LINGER, 2000);
  secure(n, d, false);
  if (zmq_connect(d, endpoint)) {
    zmq_close(d);
    return false;
  }
  n->dealers[rank] = d;
  return true;
}

static int bind_router(Net *n, const CommJoin *j, const Address *master) {
  char endpoint[64], ip[INET_ADDRSTRLEN];
  const int64_t most = 2 * (sizeof(Envelope) + sizeof(Fragment) + WIRE_MOST);
  n->router = zmq_socket(n->ctx, ZMQ_ROUTER);
  if (!n->router) return err_set(MF_ENOMEM, "comm: %s", zmq_strerror(zmq_errno()));
  set_int(n->router, ZMQ_RCVHWM, 0);
  set_int(n->router, ZMQ_LINGER, 0);
  zmq_setsockopt(n->router, ZMQ_MAXMSGSIZE, &most, sizeof most);
  if (n->secure) zmq_setsockopt(n->router, ZMQ_ZAP_DOMAIN, "moonflow", 8);
  secure(n, n->router, true);
  zmq_socket_monitor(n->router, "inproc://monitor",
                     ZMQ_EVENT_HANDSHAKE_FAILED_NO_DETAIL | ZMQ_EVENT_HANDSHAKE_FAILED_PROTOCOL |
                         ZMQ_EVENT_HANDSHAKE_FAILED_AUTH);
  n->monitor = zmq_socket(n->ctx, ZMQ_PAIR);
  set_int(n->monitor, ZMQ_LINGER, 0);
  zmq_connect(n->monitor, "inproc://monitor");
  own_address(master, ip);
  if (j->rank) snprintf(endpoint, sizeof endpoint, "tcp://%s:*", ip);
  else snprintf(endpoint, sizeof endpoint, "tcp://%s:%d", master->ip, master->port);
  if (j->rank == 0 && j->listen_fd >= 0) {
    fcntl(j->listen_fd, F_SETFD, FD_CLOEXEC); /* not for programs that the rank starts */
    set_int(n->router, ZMQ_USE_FD, j->listen_fd);
  }
  if (zmq_bind(n->router, endpoint))
    return err_set(MF_EIO, "comm: rank %d cannot listen at %s: %s", j->rank, endpoint,
                   zmq_strerror(zmq_errno()));
  WireSeat *own = &n->seats[j->rank];
  size_t size = sizeof own->endpoint;
  zmq_getsockopt(n->router, ZMQ_LAST_ENDPOINT, own->endpoint, &size);
  return 0;
}

static int open_key(Net *n, const CommJoin *j, const Address *master) {
  if (!j->key || !*j->key) {
    if (master->loopback) return 0;
    return err_set(MF_EINVAL,
                   "comm: the master %s is not loopback, so the ranks need a key: put one made by "
                   "`moonflow --make-key FILE` on each host and set MOONFLOW_KEY_FILE=FILE",
                   j->master);
  }
  if (strlen(j->key) != COMM_KEY_BYTES - 1 || zmq_curve_public(n->public_key, j->key))
    return err_set(MF_EINVAL, "comm: the key is not one made by `moonflow --make-key`");
  memcpy(n->key, j->key, COMM_KEY_BYTES);
  n->secure = true;
  n->zap = zmq_socket(n->ctx, ZMQ_REP);
  set_int(n->zap, ZMQ_LINGER, 0);
  if (!n->zap || zmq_bind(n->zap, "inproc://zeromq.zap.01"))
    return err_set(MF_ENOMEM, "comm: %s", zmq_strerror(zmq_errno()));
  return 0;
}

int meet_open(Net *n, const CommJoin *j) {
  Address master;
  int code = read_address(j->master, &master);
  if (!code) code = open_key(n, j, &master);
  if (!code) code = bind_router(n, j, &master);
  if (code) return code;
  WireSeat *own = &n->seats[j->rank];
  own->rank = (uint32_t)j->rank;
  own->size = (uint32_t)j->size;
  own->pid = (int32_t)getpid();
  own->fd = n->own_fd = memfd_create("moonflow", MFD_CLOEXEC);
  if (own->fd < 0) return err_set(MF_ENOMEM, "comm: the system gives no shared memory");
  gethostname(own->host, sizeof own->host - 1);
  own_host(n->host_id, sizeof n->host_id);
  if (j->host) {
    snprintf(own->host, sizeof own->host, "%s", j->host);
    snprintf(n->host_id, sizeof n->host_id, "named %.60s", j->host);
  }
  snprintf(own->host_id, sizeof own->host_id, "%s", n->host_id);
  return 0;
}

/* -- Step 3 ------------------------------------------------------------------------------------ */

static bool is_here(const Net *n, int rank) {
  return !strcmp(n->seats[rank].host_id, n->host_id);
}

/* Maps the memory of this host's first rank. */
static bool map_segment(Net *n, int leader, int seats) {
  const WireSeat *l = &n->seats[leader];
  char path[64];
  snprintf(path, sizeof path, "/proc/%d/fd/%d", l->pid, l->fd);
  int fd = leader == n->c->rank ? dup(n->own_fd) : open(path, O_RDWR | O_CLOEXEC);
  size_t bytes = segment_bytes(seats);
  void *p = fd >= 0 && !ftruncate(fd, (off_t)bytes)
                ? mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0)
                : MAP_FAILED;
  if (fd >= 0) close(fd);
  if (p == MAP_FAILED) {
    meet_fail(n,
              "rank %d cannot map the memory of rank %d on the same host (%s); MOONFLOW_HOST=NAME, "
              "different for each, connects them as if on different hosts",
              n->c->rank, leader, path);
    return false;
  }
  n->c->segment = p;
  segment_open(p, seats);
  return true;
}

static bool open_remote(Net *n, int rank) {
  NetPeer *p = mem_zalloc(sizeof *p);
  if (!p) return false;
  pthread_mutex_init(&p->lock, NULL);
  p->in.end = &p->in.first;
  n->c->peers[rank].remote = p;
  return n->dealers[rank] || meet_connect(n, rank, n->seats[rank].endpoint);
}

static bool attach(Net *n) {
  Comm *c = n->c;
  int seats = 0, leader = -1;
  for (int i = 0; i < c->size; i++) {
    Peer *p = &c->peers[i];
    memcpy(p->host, n->seats[i].host, sizeof p->host);
    n->seen[i] = comm_milliseconds();
    if (is_here(n, i)) {
      if (leader < 0) leader = i;
      p->seat = seats++;
    } else if (!open_remote(n, i)) {
      meet_fail(n, "rank %d cannot connect to rank %d at %s", c->rank, i, n->seats[i].endpoint);
      return false;
    }
    if (p->seat >= 0 && n->seats[i].pid != getpid())
      n->pidfds[i] = (int)syscall(SYS_pidfd_open, n->seats[i].pid, 0);
  }
  if (seats > SEGMENT_SEATS) {
    meet_fail(n, "at most %d ranks can share a host, not %d", SEGMENT_SEATS, seats);
    return false;
  }
  c->seat = c->peers[c->rank].seat;
  if (!map_segment(n, leader, seats)) return false;
  atomic_store(&c->segment->seat[c->seat].state, SEAT_TAKEN);
  return true;
}

/* -- Steps 1, 2 and 4 -------------------------------------------------------------------------- */

static void start(Net *n) {
  close(n->own_fd);
  n->own_fd = -1;
  n->go = true;
  for (int i = 0; i < n->c->size; i++) n->seen[i] = comm_milliseconds();
  pthread_mutex_lock(&n->lock);
  if (n->state == NET_JOINING) n->state = NET_RUNNING;
  pthread_cond_broadcast(&n->changed);
  pthread_mutex_unlock(&n->lock);
}

static void count_ready(Net *n, int rank) {
  if (n->ready[rank]) return;
  n->ready[rank] = true;
  if (++n->n_ready < n->c->size) return;
  for (int i = 1; i < n->c->size; i++) net_send(n, i, WIRE_GO, NULL, 0);
  start(n);
}

static void welcome_all(Net *n) {
  while (!n->rules.job)
    if (getrandom(&n->rules.job, sizeof n->rules.job, 0) < 0) return;
  for (int i = 1; i < n->c->size; i++)
    net_send(n, i, WIRE_WELCOME, n->seats, sizeof *n->seats * (size_t)n->c->size);
  if (attach(n)) count_ready(n, 0);
}

static void take_join(Net *n, const Envelope *e, const WireSeat *seat) {
  int rank = (int)e->from;
  bool fits = n->c->rank == 0 && wire_seat_check(seat, (uint32_t)n->c->size) &&
              seat->rank == e->from && !n->present[rank];
  if (!fits || !meet_connect(n, rank, seat->endpoint)) {
    atomic_fetch_add(&n->c->refused, 1);
    n->rules.numbers[rank] = 0; /* the real one may still come */
    return;
  }
  n->seats[rank] = *seat;
  n->present[rank] = true;
  if (++n->n_present == n->c->size) welcome_all(n);
}

static void take_welcome(Net *n, const Envelope *e, const WireSeat *seats) {
  Comm *c = n->c;
  bool fits = e->bytes == sizeof *seats * (size_t)c->size && e->job;
  for (int i = 0; fits && i < c->size; i++)
    fits = wire_seat_check(&seats[i], (uint32_t)c->size) && seats[i].rank == (uint32_t)i;
  if (!fits) {
    atomic_fetch_add(&c->refused, 1);
    return;
  }
  n->rules.job = e->job;
  memcpy(n->seats, seats, e->bytes);
  if (attach(n)) net_send(n, 0, WIRE_READY, NULL, 0);
}

void meet_take(Net *n, const Envelope *e, const void *payload) {
  if (e->kind == WIRE_JOIN) take_join(n, e, payload);
  else if (e->kind == WIRE_WELCOME) take_welcome(n, e, payload);
  else if (e->kind == WIRE_READY && n->c->rank == 0 && n->rules.job) count_ready(n, (int)e->from);
  else if (e->kind == WIRE_GO && e->from == 0 && n->c->segment) start(n);
}

void meet_begin(Net *n) {
  int me = n->c->rank;
  if (me == 0) {
    n->present[0] = true;
    if (++n->n_present == n->c->size) welcome_all(n);
    return;
  }
  Address master;
  char endpoint[64];
  if (read_address(n->join->master, &master)) {
    meet_fail(n, "%s", err_text());
    return;
  }
  snprintf(endpoint, sizeof endpoint, "tcp://%s:%d", master.ip, master.port);
  if (!meet_connect(n, 0, endpoint)) meet_fail(n, "rank %d cannot connect to %s", me, endpoint);
  else net_send(n, 0, WIRE_JOIN, &n->seats[me], sizeof n->seats[me]);
}
