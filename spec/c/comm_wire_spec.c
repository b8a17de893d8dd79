/* What ranks refuse: each rule of wire.c alone, random and damaged messages, and strangers who
 * connect to a working job, with and without a key. Nothing of it may stop the ranks, and all of it
 * is counted. */
#include <arpa/inet.h>
#include <pthread.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <zmq.h>

#include "check.h"
#include "comm.h"
#include "dtype.h"
#include "err.h"
#include "wire.h"

/* -- The rules --------------------------------------------------------------------------------- */

typedef struct Message {
  Envelope e;
  char payload[256];
} Message;

static uint64_t numbers[4];
static const WireRules rules = {77, 1, 4, numbers};

static Message good(WireKind kind, size_t bytes) {
  Message m = {0};
  wire_seal(&m.e, kind, kind == WIRE_JOIN ? 0 : 77, 2, 1, numbers[2] + 1, bytes);
  return m;
}

static bool passes(const Message *m, size_t n) {
  return wire_check(&rules, 2, m, n);
}

static void each_rule(void) {
  size_t n = sizeof(Envelope);
  Message m = good(WIRE_BEAT, 0);
  CHECK(passes(&m, n), "a good one");
  CHECK(!passes(&m, n), "replayed");
  m = good(WIRE_BEAT, 0), m.e.number++;
  CHECK(!passes(&m, n), "before its turn");
  m = good(WIRE_BEAT, 0), m.e.number = 0;
  CHECK(!passes(&m, n), "late");
  m = good(WIRE_BEAT, 0), m.e.magic++;
  CHECK(!passes(&m, n), "the magic");
  m = good(WIRE_BEAT, 0), m.e.version++;
  CHECK(!passes(&m, n), "another version");
  m = good(WIRE_BEAT, 0), m.e.kind = WIRE_KIND_COUNT;
  CHECK(!passes(&m, n), "an unknown kind");
  m = good(WIRE_BEAT, 0), m.e.kind = WIRE_NONE;
  CHECK(!passes(&m, n), "no kind");
  m = good(WIRE_BEAT, 0), m.e.job++;
  CHECK(!passes(&m, n), "another job");
  m = good(WIRE_BEAT, 0), m.e.to = 0;
  CHECK(!passes(&m, n), "for another rank");
  m = good(WIRE_BEAT, 0), m.e.from = 3;
  CHECK(!passes(&m, n), "in another's name");
  m = good(WIRE_BEAT, 0);
  CHECK(!wire_check(&rules, 3, &m, n), "on another's connection");
  CHECK(!wire_check(&rules, 4, &m, n), "of a rank that is not there");
  m = good(WIRE_BEAT, 0), m.e.from = 1;
  CHECK(!wire_check(&rules, 1, &m, n), "from this rank itself");
  m = good(WIRE_BEAT, 0), m.e.unused = 1;
  CHECK(!passes(&m, n), "what must be zero");
  m = good(WIRE_BEAT, 0);
  CHECK(!passes(&m, n - 1) && !passes(&m, 0) && !passes(&m, n + 1), "cut short, or longer");
  m = good(WIRE_BEAT, 8);
  CHECK(!passes(&m, n + 8), "a kind without a payload");
  m = good(WIRE_CREDIT, 4);
  CHECK(!passes(&m, n + 4), "too little for the kind");
  m = good(WIRE_DATA, (size_t)1 << 40);
  CHECK(!passes(&m, n + 64), "a length that is not there");
  m = good(WIRE_WELCOME, sizeof(WireSeat));
  CHECK(!passes(&m, n + sizeof(WireSeat)), "a welcome from another than rank 0, or twice");
  m = good(WIRE_CREDIT, 8);
  CHECK(passes(&m, n + 8), "the next good one");
}

static void seats_and_fragments(void) {
  WireSeat s = {.rank = 1, .size = 4, .pid = 5, .fd = 3, .endpoint = "tcp://127.0.0.1:5"};
  CHECK(wire_seat_check(&s, 4), "a good seat");
  CHECK(!wire_seat_check(&s, 5), "of another size");
  WireSeat bad = s;
  memset(bad.host, 'x', sizeof bad.host);
  CHECK(!wire_seat_check(&bad, 4), "a host without an end");
  bad = s, strcpy(bad.endpoint, "ipc:///tmp/x");
  CHECK(!wire_seat_check(&bad, 4), "an endpoint that is not tcp");
  bad = s, bad.pid = -1;
  CHECK(!wire_seat_check(&bad, 4), "all processes");
  bad = s, bad.rank = 4;
  CHECK(!wire_seat_check(&bad, 4), "rank 4 of 4");
  Fragment f = {.bytes = 8, .kind = FRAGMENT_CALL, .total = 100, .offset = 92};
  CHECK(wire_fragment_check(&f, sizeof f + 8), "a good fragment");
  f.offset = 93;
  CHECK(!wire_fragment_check(&f, sizeof f + 8), "beyond its message");
  f.offset = UINT64_MAX;
  CHECK(!wire_fragment_check(&f, sizeof f + 8), "an offset that wraps");
  f.offset = 0;
  CHECK(!wire_fragment_check(&f, sizeof f + 16), "another length");
  f.kind = FRAGMENT_SKIP;
  CHECK(!wire_fragment_check(&f, sizeof f + 8), "a kind of rings");
}

/* Messages cut short, noise, and damage of one to four bytes of good messages (but for the kind,
 * which may become another good one): never read outside, never taken. */
static void damage(void) {
  unsigned seed = 12345;
  int taken = 0;
  for (int k = 0; k < 200000; k++) {
    size_t bytes = (size_t)rand_r(&seed) % 200;
    Message m = good((WireKind)(rand_r(&seed) % WIRE_KIND_COUNT), bytes), was = m;
    size_t n = sizeof m.e + bytes, changes = 1 + (size_t)rand_r(&seed) % 4;
    for (size_t i = 0; i < n && k % 2; i++) ((char *)&m)[i] = (char)rand_r(&seed);
    for (size_t i = 0; i < changes; i++) {
      size_t at = (size_t)rand_r(&seed) % sizeof m.e;
      if (at < offsetof(Envelope, kind) || at > offsetof(Envelope, kind) + 1)
        ((char *)&m)[at] ^= (char)(1 + rand_r(&seed) % 255);
    }
    if (k % 7 == 0) n = (size_t)rand_r(&seed) % n;
    else if (!memcmp(&m, &was, n)) continue;
    char *exact = malloc(n + 1); /* so that a sanitizer sees a read beyond */
    memcpy(exact, &m, n);
    taken += wire_check(&rules, 2, exact, n);
    free(exact);
  }
  CHECK(taken == 0, "%d damaged messages were taken", taken);
}

/* -- Strangers --------------------------------------------------------------------------------- */

typedef struct Job {
  char master[40], endpoint[60], key[COMM_KEY_BYTES];
  int listen_fd;
  bool secure;
  atomic_bool stop;
  uint64_t refused, refused_peers;
} Job;

static void *rank_main(void *arg) {
  Job *job = ((void **)arg)[0];
  int rank = (int)(intptr_t)((void **)arg)[1];
  CommJoin j = {
      .rank = rank, .size = 2, .master = job->master, .listen_fd = -1, .join_timeout = 20};
  if (rank == 0) j.listen_fd = job->listen_fd;
  if (job->secure) j.key = job->key;
  Comm *c = NULL;
  CHECK(!comm_zmq(&j, NULL, &c), "%s", err_text());
  if (!c) return NULL;
  int32_t going = 1;
  while (going) {
    int32_t v[2] = {1, rank == 0 && atomic_load(&job->stop)};
    CommCall call = {.op = COMM_ALL_REDUCE, .dtype = I32, .count = 2};
    int code = comm_collective(comm_world(c), &call, v, v);
    CHECK(!code && v[0] == 2, "%s", err_text());
    going = !code && !v[1];
    usleep(1000);
  }
  CommStats s = comm_stats(c);
  if (rank == 0) job->refused = s.refused, job->refused_peers = s.refused_peers;
  comm_close(c);
  return NULL;
}

static void *stranger(void *ctx, const Job *job, const char *name, size_t n) {
  void *s = zmq_socket(ctx, ZMQ_DEALER);
  int none = 0;
  zmq_setsockopt(s, ZMQ_LINGER, &none, sizeof none);
  zmq_setsockopt(s, ZMQ_ROUTING_ID, name, n);
  CHECK(!zmq_connect(s, job->endpoint), "connect");
  return s;
}

/* Sends junk under several names, in one part and in several, and one message that is far too long.
 */
static void send_junk(void *ctx, const Job *job) {
  static const char names[][7] = {"mf\1\0\0\0", "mf\0\0\0\0", "mf\2\0\0\0", "someon"};
  unsigned seed = 99;
  char *big = calloc(1, 4 << 20);
  for (int k = 0; k < 4; k++) {
    void *s = stranger(ctx, job, names[k], 6);
    for (int i = 0; i < 200; i++) {
      Message m = good((WireKind)(1 + i % (WIRE_KIND_COUNT - 1)), (size_t)rand_r(&seed) % 200);
      m.e.from = 1, m.e.to = 0, m.e.number = (uint64_t)i % 3;
      size_t n = sizeof m.e + m.e.bytes;
      if (i % 2) m.e.magic = (uint32_t)rand_r(&seed);
      zmq_send(s, &m, i % 5 ? n : n / 2, i % 7 == 0 ? ZMQ_SNDMORE | ZMQ_DONTWAIT : ZMQ_DONTWAIT);
    }
    zmq_send(s, big, 4 << 20, ZMQ_DONTWAIT);
    usleep(50000);
    zmq_close(s);
  }
  free(big);
}

/* A client that has a key, but not the job's. */
static void knock_with_key(void *ctx, const Job *job) {
  char public_key[COMM_KEY_BYTES], secret_key[COMM_KEY_BYTES], server[COMM_KEY_BYTES];
  CHECK(!zmq_curve_keypair(public_key, secret_key) && !zmq_curve_public(server, job->key), "keys");
  void *s = zmq_socket(ctx, ZMQ_DEALER);
  int none = 0;
  zmq_setsockopt(s, ZMQ_LINGER, &none, sizeof none);
  zmq_setsockopt(s, ZMQ_CURVE_SERVERKEY, server, COMM_KEY_BYTES);
  zmq_setsockopt(s, ZMQ_CURVE_PUBLICKEY, public_key, COMM_KEY_BYTES);
  zmq_setsockopt(s, ZMQ_CURVE_SECRETKEY, secret_key, COMM_KEY_BYTES);
  CHECK(!zmq_connect(s, job->endpoint), "connect");
  zmq_send(s, "hello", 5, ZMQ_DONTWAIT);
  usleep(200000);
  zmq_close(s);
}

static void disturb(bool secure) {
  Job job = {.secure = secure};
  struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  socklen_t size = sizeof a;
  job.listen_fd = socket(AF_INET, SOCK_STREAM, 0);
  CHECK(!bind(job.listen_fd, (void *)&a, sizeof a) && !listen(job.listen_fd, 64) &&
            !getsockname(job.listen_fd, (void *)&a, &size) && !comm_make_key(job.key),
        "a socket and a key");
  snprintf(job.master, sizeof job.master, "127.0.0.1:%d", ntohs(a.sin_port));
  snprintf(job.endpoint, sizeof job.endpoint, "tcp://%s", job.master);
  pthread_t threads[2];
  void *args[2][2] = {{&job, (void *)0}, {&job, (void *)1}};
  for (int i = 0; i < 2; i++) pthread_create(&threads[i], NULL, rank_main, args[i]);
  usleep(200000);
  void *ctx = zmq_ctx_new();
  send_junk(ctx, &job);
  if (secure) knock_with_key(ctx, &job);
  usleep(100000);
  zmq_ctx_term(ctx);
  atomic_store(&job.stop, true);
  for (int i = 0; i < 2; i++) pthread_join(threads[i], NULL);
  if (secure)
    CHECK(job.refused == 0 && job.refused_peers >= 5, "%llu, %llu peers refused",
          (unsigned long long)job.refused, (unsigned long long)job.refused_peers);
  else CHECK(job.refused >= 300, "%llu refused", (unsigned long long)job.refused);
}

static void strangers_without_key(void) {
  disturb(false);
}

static void strangers_with_key(void) {
  disturb(true);
}

/* -- Joining ----------------------------------------------------------------------------------- */

static void wrong_joins(void) {
  Comm *c;
  CommJoin j = {.rank = 0, .size = 2, .master = "nowhere", .listen_fd = -1, .join_timeout = 0.2};
  CHECK(comm_zmq(&j, NULL, &c) == MF_EINVAL && strstr(err_text(), "HOST:PORT"), "%s", err_text());
  j.master = "8.8.8.8:4000";
  CHECK(comm_zmq(&j, NULL, &c) == MF_EINVAL && strstr(err_text(), "need a key"), "%s", err_text());
  char here[40]; /* a port that no other run of specs takes */
  snprintf(here, sizeof here, "127.0.0.1:%d", 20000 + (int)getpid() % 10000);
  j.master = here;
  CHECK(comm_zmq(&j, NULL, &c) == MF_ECOMM && strstr(err_text(), "not there: rank 1 of 2"), "%s",
        err_text());
  j.rank = 1;
  CHECK(comm_zmq(&j, NULL, &c) == MF_ECOMM && strstr(err_text(), "rank 1 waited"), "%s",
        err_text());
  j.key = "short";
  CHECK(comm_zmq(&j, NULL, &c) == MF_EINVAL && strstr(err_text(), "is not one made by"), "%s",
        err_text());
  j.rank = 2;
  CHECK(comm_zmq(&j, NULL, &c) == MF_EINVAL && strstr(err_text(), "rank 2 of 2"), "%s", err_text());
}

int main(void) {
  RUN(each_rule);
  RUN(seats_and_fragments);
  RUN(damage);
#ifndef __SANITIZE_THREAD__ /* ZeroMQ is not compiled for it */
  RUN(strangers_without_key);
  RUN(strangers_with_key);
  RUN(wrong_joins);
#endif
  return check_end();
}
