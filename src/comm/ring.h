/* Fragments of messages, and the rings through which they go on one host; see ring.c. */
#ifndef MF_RING_H
#define MF_RING_H
#include <stdbool.h>
#include <stddef.h>

#include "bell.h"

enum {
  FRAGMENT_MAX = 64 << 10, /* bytes of data; all fragments but the last of a message have it */
  RING_BYTES = 8 * (FRAGMENT_MAX + BELL_LINE), /* so many of them, and nothing is left over */
};

/* What lies before each fragment's data: in a ring, and between hosts. */
typedef struct Fragment {
  uint32_t bytes;            /* of data */
  uint8_t kind;              /* FragmentKind */
  uint8_t op, reduce, dtype; /* of the call */
  uint64_t context;          /* the group, or the edge */
  uint64_t number;           /* of the call in its group, of the message on its edge */
  uint64_t offset, total;    /* of the data in the message; bytes */
  uint32_t lane;             /* which of the call's messages between the two ranks */
  int32_t root;
  uint64_t count; /* of the call: elements */
  uint64_t hash;  /* of all calls so far */
} Fragment;
_Static_assert(sizeof(Fragment) == BELL_LINE, "data after a header is aligned as the header");

typedef enum FragmentKind {
  FRAGMENT_CALL = 1,
  FRAGMENT_PROBE, /* only says which call its sender waits in */
  FRAGMENT_MESSAGE,
  FRAGMENT_SKIP, /* the rest of the ring is empty */
} FragmentKind;

/* One direction between two seats. Positions count bytes since the beginning. */
typedef struct Ring {
  alignas(BELL_LINE) _Atomic uint64_t head; /* written by the sender */
  alignas(BELL_LINE) _Atomic uint64_t tail; /* by the receiver */
  alignas(BELL_LINE) char data[RING_BYTES];
} Ring;

/* For one sender at a time: room for a fragment with so much data, or NULL. */
Fragment *ring_reserve(Ring *r, size_t bytes);
/* Makes the reserved fragment visible; its `bytes` are what was reserved. */
void ring_commit(Ring *r, const Fragment *f);
/* For one receiver at a time: the first fragment, or NULL. *bad: what is there makes no sense. */
const Fragment *ring_first(Ring *r, bool *bad);
void ring_advance(Ring *r, const Fragment *f);
/* The receiver drops all there is. */
void ring_clear(Ring *r);

#endif
