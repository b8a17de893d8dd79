/* Messages between processes: their form, and the check that each must pass; see wire.c. */
#ifndef MF_WIRE_H
#define MF_WIRE_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "segment.h"

/* X(enum, least and most bytes after the envelope) */
#define WIRE_KINDS(X)                                                                           \
  X(WIRE_JOIN, sizeof(WireSeat), sizeof(WireSeat)) /* rank to 0: who I am */                    \
  X(WIRE_WELCOME, sizeof(WireSeat), WIRE_MOST)     /* 0: all seats */                           \
  X(WIRE_READY, 0, 0)                              /* rank to 0: connected */                   \
  X(WIRE_GO, 0, 0)                                 /* 0: all are connected */                   \
  X(WIRE_BEAT, 0, 0)                               /* I live */                                 \
  X(WIRE_FAIL, 1, SEGMENT_TEXT)                    /* the job has failed */                     \
  X(WIRE_BYE, 4, 4)                                /* this rank has left; from it, or from 0 */ \
  X(WIRE_CREDIT, 8, 8)                             /* so many bytes taken */                    \
  X(WIRE_DATA, sizeof(Fragment), sizeof(Fragment) + FRAGMENT_MAX)

#define X(id, least, most) id,
typedef enum WireKind { WIRE_NONE, WIRE_KINDS(X) WIRE_KIND_COUNT } WireKind;
#undef X

enum { WIRE_VERSION = 1, WIRE_RANKS = 512, WIRE_MOST = 128 << 10 };

typedef struct Envelope {
  uint32_t magic;
  uint16_t version, kind;
  uint64_t job; /* 0 in JOIN */
  uint32_t from, to;
  uint64_t number; /* of the message from `from` to `to`; the first is 1 */
  uint64_t bytes;  /* that follow */
  uint64_t unused;
} Envelope;

/* A rank in the table of all. */
typedef struct WireSeat {
  uint32_t rank, size;
  int32_t pid, fd;   /* of the memory that it offers to others on its host */
  char host[64];     /* its name */
  char host_id[96];  /* equal on one host only */
  char endpoint[64]; /* where it listens */
} WireSeat;

typedef struct WireRules {
  uint64_t job; /* 0 before WELCOME */
  uint32_t me, size;
  uint64_t *numbers; /* by sender: the last one */
} WireRules;

/* Fills what is common; the kind's payload follows. */
void wire_seal(Envelope *e, WireKind kind, uint64_t job, int from, int to, uint64_t number,
               size_t bytes);
/* Whether a message of n bytes from the connection of rank `from` is well formed and the next one.
 * Counts its number if so. */
bool wire_check(const WireRules *r, uint32_t from, const void *message, size_t n);
/* A seat as it came from the wire. */
bool wire_seat_check(const WireSeat *s, uint32_t size);
/* A fragment in DATA. */
bool wire_fragment_check(const void *payload, size_t n);

#endif
