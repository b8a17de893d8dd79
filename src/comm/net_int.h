/* What the files of the member `zmq` share: zmq.c (entry, leaving), meet.c (how ranks find each
 * other), net.c (the thread that owns the sockets). */
#ifndef MF_NET_INT_H
#define MF_NET_INT_H
#include <zmq.h>

#include "comm_int.h"
#include "wire.h"

enum { NET_WINDOW = 8 << 20 }; /* bytes on the way to one rank that it has not taken */

typedef enum NetState { NET_JOINING, NET_RUNNING, NET_CLOSING, NET_ENDED } NetState;

/* A message in a list. */
typedef struct NetMessage {
  struct NetMessage *next;
  int peer;
  zmq_msg_t m;
} NetMessage;

typedef struct NetList {
  NetMessage *first, **end;
} NetList;

/* A rank on another host; Peer.remote. */
typedef struct NetPeer {
  pthread_mutex_t lock; /* of `in` and `held` */
  NetList in;
  size_t held;             /* bytes in the list */
  size_t taken;            /* bytes taken and not yet reported; of who holds the peer's in_lock */
  NetMessage *next_out;    /* reserved; of who holds the peer's out_lock */
  _Atomic uint64_t flying; /* bytes sent and not reported as taken */
} NetPeer;

typedef struct Net {
  Comm *c;
  const CommJoin *join; /* while joining */
  char key[COMM_KEY_BYTES], public_key[COMM_KEY_BYTES];
  bool secure;
  void *ctx, *router, *zap, *monitor;
  void **dealers; /* by rank; NULL: none */
  int kick;       /* an eventfd: `out` has become non-empty, or the state changed */
  pthread_t thread;
  pthread_mutex_t lock;   /* of out, state, error */
  pthread_cond_t changed; /* the state, while joining */
  NetList out;
  NetState state;
  char error[400]; /* why joining failed */
  int silence_ms;
  /* Of the thread. */
  WireRules rules;
  uint64_t *numbers_out;
  WireSeat *seats; /* by rank */
  bool *present, *ready, *gone;
  int64_t *seen; /* when each was heard last */
  int *pidfds;   /* of ranks on this host; -1 */
  int n_present, n_ready, own_fd;
  bool go, told;     /* the failure was passed on */
  int64_t all_there; /* since when the job has its number; 0: not yet */
  char host_id[96];
} Net;

/* Queues a message of `bytes` after the envelope; *payload is to be filled, then net_post sends it.
 */
NetMessage *net_message(Net *n, int peer, WireKind kind, size_t bytes, void **payload);
void net_post(Net *n, NetMessage *m);
void net_send(Net *n, int peer, WireKind kind, const void *payload, size_t bytes);
void net_wake(Net *n);
void net_list_free(NetList *l);
/* The life of the thread; arg is the Net. */
void *net_main(void *arg);

/* meet.c: before the thread runs; 0 or a code. */
int meet_open(Net *n, const CommJoin *j);
/* In the thread. A message of the joining; *failed: its text is in n->error. */
void meet_begin(Net *n);
void meet_take(Net *n, const Envelope *e, const void *payload);
/* A dealer to a rank, as its seat says. */
bool meet_connect(Net *n, int rank, const char *endpoint);
void meet_fail(Net *n, const char *format, ...) __attribute__((format(printf, 2, 3)));

extern const CommRemote net_remote;

#endif
