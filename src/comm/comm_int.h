/* What the files of this folder share: a Comm inside, and the flows of which calls are made. */
#ifndef MF_COMM_INT_H
#define MF_COMM_INT_H
#include <pthread.h>

#include "comm.h"
#include "dtype.h"
#include "err.h"
#include "mem.h"
#include "segment.h"
#include "vec.h"

enum { COMM_NOTES = 1000 };

typedef struct Peer Peer;

/* A fragment taken from the way of others until its receiver comes. */
typedef struct Stash {
  struct Stash *next;
  Fragment f;
  char data[];
} Stash;

/* How far one edge has come, by (peer, edge). */
typedef struct Edge {
  uint64_t edge, sent, received;
  struct Edge *next;
} Edge;

/* A rank as another rank sees it. in_lock guards receiving from it and the stash, out_lock sending
 * to it. */
struct Peer {
  pthread_mutex_t in_lock, out_lock;
  Stash *stash, **stash_end;
  size_t stashed; /* bytes */
  Edge *edges;    /* under out_lock */
  int seat;       /* in this rank's segment, or -1 when on another host */
  char host[64];
  void *remote;         /* of the member, for ranks on other hosts */
  _Atomic int64_t left; /* on another host: when it said good-bye, in milliseconds; 0: not yet */
};

/* How to reach ranks on other hosts. Locks of the peer are held. */
typedef struct CommRemote {
  Fragment *(*reserve)(Comm *c, int peer, size_t bytes);
  void (*commit)(Comm *c, int peer, Fragment *f);
  const Fragment *(*first)(Comm *c, int peer);
  void (*advance)(Comm *c, int peer, const Fragment *f);
} CommRemote;

typedef struct CommApi {
  const char *name;
  int (*collective)(CommGroup *g, const CommCall *call, const void *in, void *out);
  int (*send)(Comm *c, int to, uint64_t edge, const void *data, size_t bytes);
  int (*recv)(Comm *c, int from, uint64_t edge, void *data, size_t bytes);
  CommTransfer *(*post)(Comm *c, int peer, uint64_t edge, void *data, size_t bytes, bool out);
  int (*test)(CommTransfer *t, bool *done);
  /* Tells the ranks that do not share the segment. Optional. */
  void (*fail)(Comm *c, const char *why);
  void (*close)(Comm *c);
  const CommRemote *remote; /* NULL: all ranks share the segment */
} CommApi;

struct CommGroup {
  Comm *comm;
  pthread_mutex_t lock; /* one call at a time */
  uint64_t tag, id, number, hash;
  int n, me;
  bool spans;         /* holds ranks of several hosts */
  struct Flow *flows; /* room for those of a call */
  char *scratch;      /* the reducer's, made when first needed */
  size_t n_notes;
  char notes[COMM_NOTES]; /* since the last call, a line each */
  int rank[];
};

struct Comm {
  const CommApi *api;
  int rank, size, seat;
  int timeout_ms;
  bool check;
  atomic_bool *interrupt;
  atomic_bool told;         /* of the failure, an error of a call */
  atomic_bool interrupting; /* it was this member that set the interrupt */
  Segment *segment;
  Peer *peers; /* by rank */
  pthread_mutex_t lock;
  VEC(CommGroup *) groups;
  CommGroup *world;
  _Atomic uint64_t sent, received, refused_peers, refused;
  void *member; /* of zmq */
};

/* A Comm with peers and without a segment; the member fills in the rest. NULL: no memory. */
Comm *comm_create(const CommApi *api, int rank, int size, const CommOptions *o);
void comm_destroy(Comm *c);
Edge *comm_edge(Peer *p, uint64_t edge);
/* The rank may be computing, and hears of the failure by an interrupt. */
void comm_interrupt(Comm *c);
void comm_hash(uint64_t *hash, const void *bytes, size_t n);
int64_t comm_milliseconds(void);

/* -- Flows: flow.c ----------------------------------------------------------------------------- */

/* One message between this rank and another, of which `done` bytes have gone. */
typedef struct Flow {
  int peer; /* rank */
  bool out;
  uint32_t lane;
  char *at;
  size_t total, done;
  const size_t *limit; /* out: so much may go by now; NULL: all */
  bool touched;        /* a fragment has gone, perhaps an empty one */
} Flow;

/* Gathers contributions to one range in the order of the group; see flow.c. */
typedef struct Reducer {
  bool on;
  CommReduce reduce;
  DType dtype;
  uint32_t lane;
  const char *in; /* this rank's contribution */
  char *out;
  size_t total, done;
  int next;         /* the position whose contribution to the block at `done` comes next */
  bool after_sends; /* out is what the flows of this lane send: they go first */
  char *scratch;    /* for one block, of wide dtypes as float */
} Reducer;

/* Memory in pieces, which flows and reducer address as if they lay one behind the other, from where
 * the first lies. */
typedef struct Pieces {
  int n; /* 0: memory is what it is */
  const CommPiece *piece;
  const char *base;
  size_t *start; /* bytes before each, and of all */
} Pieces;

typedef struct Exchange {
  Comm *comm;
  CommGroup *group; /* NULL: a message */
  const char *name; /* for errors */
  Fragment head;    /* what all its fragments have in common */
  Flow *flows;
  int n;
  Reducer reducer;
  Pieces pieces;
  bool probed;
  int suspect; /* rank whose earlier calls differ; -1: none */
  int64_t suspect_since;
  char waits[160]; /* for what, as text */
} Exchange;

/* Until all flows and the reducer are done. 0 or a code. */
int flow_run(Exchange *x);
/* What can move now. 0 or a code. */
int flow_step(Exchange *x, bool *done);
/* Removes what came for a call that is over. */
void flow_forget(Exchange *x);

int collective_run(CommGroup *g, const CommCall *call, const void *in, void *out);
int message_send(Comm *c, int to, uint64_t edge, const void *data, size_t bytes);
int message_recv(Comm *c, int from, uint64_t edge, void *data, size_t bytes);
CommTransfer *message_post(Comm *c, int peer, uint64_t edge, void *data, size_t bytes, bool out);
int message_test(CommTransfer *t, bool *done);

#endif
