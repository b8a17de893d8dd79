/* Moving bytes between the ranks of a job: collectives over groups, and messages along edges.
 *
 * A Comm is one rank's place in a job. It is a table of functions: `local` has the ranks as threads
 * of one process, `zmq` as processes on one host or several. Calls block; several threads of a rank
 * may call at once if they use different groups or edges.
 *
 * Collectives count elements of a dtype. What is summed is summed in the order of the group's
 * ranks, halves in float32 with one rounding at the end, so that the bits depend on nothing but the
 * contributions: not on sizes, timing, or how the ranks are connected.
 *
 * All failures are for good: when a rank dies, falls silent, leaves while others wait for it, or
 * calls something else than the others, every call on every rank returns MF_ECOMM from then on,
 * with one text that names rank, host and what was waited for. */
#ifndef MF_COMM_H
#define MF_COMM_H
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct Comm Comm;
typedef struct CommGroup CommGroup;

/* X(enum, name) */
#define COMM_OPS(X)                        \
  X(COMM_ALL_REDUCE, "all_reduce")         \
  X(COMM_REDUCE, "reduce")                 \
  X(COMM_REDUCE_SCATTER, "reduce_scatter") \
  X(COMM_ALL_GATHER, "all_gather")         \
  X(COMM_ALL_TO_ALL, "all_to_all")         \
  X(COMM_BROADCAST, "broadcast")           \
  X(COMM_GATHER, "gather")                 \
  X(COMM_SCATTER, "scatter")               \
  X(COMM_BARRIER, "barrier")
#define COMM_REDUCES(X) \
  X(COMM_SUM, "sum")    \
  X(COMM_MAX, "max")    \
  X(COMM_MIN, "min")    \
  X(COMM_AVG, "avg") /* of floats: the sum by the number of ranks */

#define X(id, name) id,
typedef enum CommOp { COMM_OPS(X) COMM_OP_COUNT } CommOp;
typedef enum CommReduce { COMM_REDUCES(X) COMM_REDUCE_COUNT } CommReduce;
#undef X

/* A collective call. Positions in a group count from 0; `root` is one. Which of the others are
 * read:
 *
 * - all_reduce, broadcast: count, of in and of out; reduce: the same, out only at root
 * - reduce_scatter: counts[i], the part that position i gets; in holds all parts in order
 * - all_gather: counts[i], of position i's in; out holds all in order
 * - gather, scatter: as all_gather and its inverse; only root has all
 * - all_to_all: counts[i], what goes to i; out_counts[i], what comes from i
 *
 * With pieces, an all_reduce works where they lie: `count` elements, the pieces' one behind the
 * other; in and out are not read.
 *
 * in and out are the same or do not overlap; for broadcast `in` is read at root only;
 * reduce_scatter and all_gather in place: the part of this rank lies where it does in the whole. */
typedef struct CommPiece {
  void *data;
  int64_t count; /* elements */
} CommPiece;

typedef struct CommCall {
  CommOp op;
  CommReduce reduce;
  int dtype; /* DType */
  int root;
  int64_t count;
  const int64_t *counts, *out_counts;
  int n_pieces;
  const CommPiece *pieces;
} CommCall;

/* What a rank has seen; counters only grow. */
typedef struct CommStats {
  uint64_t sent, received; /* bytes of data */
  uint64_t refused_peers;  /* connections that could not prove to belong to the job */
  uint64_t refused;        /* messages that were malformed, oversized, replayed or out of order */
} CommStats;

/* -- One rank's place -------------------------------------------------------------------------- */

typedef struct CommOptions {
  double timeout; /* seconds that a call waits without anything moving; 0: 600 */
  double silence; /* zmq: seconds without a sign of life until a rank counts as dead; 0: 5 */
  bool no_check;  /* calls are not compared between ranks */
  atomic_bool *interrupt; /* ends waiting calls; tested and cleared. NULL: none */
} CommOptions;

/* n ranks of this process; comms[i] is for the thread that is rank i. 0 or a code. */
int comm_local(int n, const CommOptions *o, Comm **comms);

/* Joins a job of processes: blocks until all ranks have. */
typedef struct CommJoin {
  int rank, size;
  const char *master;  /* "host:port" of rank 0's meeting place */
  const char *key;     /* CURVE: 40 characters; NULL: none, which only loopback may */
  int listen_fd;       /* rank 0: a listening socket at `master`; -1: makes one */
  double join_timeout; /* seconds; 0: 120 */
  const char *host;    /* takes ranks of equal names to be on one host; NULL: finds out */
} CommJoin;
int comm_zmq(const CommJoin *join, const CommOptions *o, Comm **out);
/* A fresh key for CommJoin; 40 characters and a zero. */
enum { COMM_KEY_BYTES = 41 };
int comm_make_key(char out[COMM_KEY_BYTES]);

int comm_rank(const Comm *c);
int comm_size(const Comm *c);
const char *comm_host(const Comm *c, int rank);
CommStats comm_stats(const Comm *c);
const char *comm_op_name(CommOp op);
const char *comm_reduce_name(CommReduce r);
int comm_reduce_parse(const char *name); /* or -1 */

/* This rank has failed; all others learn `why`. Only the first failure of a job counts. */
void comm_fail(Comm *c, const char *why);
/* The same, of the rank to which g belongs: "rank 1 on host h WHAT". */
void comm_group_fail(CommGroup *g, const char *what);
/* The failure's code with its text as the error, or 0. A rank of zmq that does not call learns of a
 * failure by CommOptions.interrupt, and asks here. */
int comm_failed(Comm *c);
/* After a failure that the job survives, as one at a prompt: all ranks, which share a host, call it
 * while none is in a call, and none calls anything until all have. What was under way is dropped;
 * groups begin anew. 0, or a code when there are other hosts. */
int comm_renew(Comm *c);
/* Leaves the job. Rank 0 of zmq waits until all others have left or failed. NULL is ignored. */
void comm_close(Comm *c);

/* -- Collectives ------------------------------------------------------------------------------- */

/* The group of these ranks, ascending; this rank is one of them. Kept until comm_close; asking
 * again gives the same. NULL with the error set. */
CommGroup *comm_group(Comm *c, int n, const int *ranks);
CommGroup *comm_world(Comm *c);
/* The same ranks again, for a thread whose calls stand in no order to those of others: calls are
 * counted by group. One for each tag, which is not 0. */
CommGroup *comm_group_apart(CommGroup *g, uint64_t tag);
int comm_group_size(const CommGroup *g);
/* This rank's position. */
int comm_group_position(const CommGroup *g);
const int *comm_group_ranks(const CommGroup *g);

int comm_collective(CommGroup *g, const CommCall *call, const void *in, void *out);
/* Says that the group's ranks all do what `text` says, without communication: the next collective
 * fails on all of them when they do not. */
void comm_note(CommGroup *g, const char *text);

/* -- Messages ---------------------------------------------------------------------------------- */

/* Along the edge (from, to, edge) messages arrive in the order in which they were sent, and must
 * have the length that the receiver expects. A send returns when `data` may be written again. */
int comm_send(Comm *c, int to, uint64_t edge, const void *data, size_t bytes);
int comm_recv(Comm *c, int from, uint64_t edge, void *data, size_t bytes);

/* The same without waiting, for who has several messages under way. comm_test moves what it can and
 * says whether the message is done; then, and when it fails, the transfer is gone. Transfers along
 * one edge in one direction come one after the other. While nothing moves:
 *
 *   uint32_t mark = comm_mark(c);  test all; if none is done, comm_sleep(c, mark, milliseconds)
 *
 * returns when something may have changed since comm_mark, or the time is over. */
typedef struct CommTransfer CommTransfer;
int comm_post_send(Comm *c, int to, uint64_t edge, const void *data, size_t bytes,
                   CommTransfer **out);
int comm_post_recv(Comm *c, int from, uint64_t edge, void *data, size_t bytes, CommTransfer **out);
int comm_test(Comm *c, CommTransfer *t, bool *done);
uint32_t comm_mark(Comm *c);
void comm_sleep(Comm *c, uint32_t mark, int milliseconds);

#endif
