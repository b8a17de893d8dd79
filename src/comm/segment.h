/* What ranks on one host share: seats, bells, rings, and the job's failure; see segment.c. */
#ifndef MF_SEGMENT_H
#define MF_SEGMENT_H
#include <stdalign.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
  SEGMENT_LINE = 64,
  SEGMENT_SEATS = 256,
  SEGMENT_TEXT = 1024,
  FRAGMENT_MAX =
      128 << 10, /* bytes of data in one fragment; all but the last of a message have it */
  RING_BYTES = 512 << 10,
};

/* A word on which one rank's threads sleep until something changed for them. */
typedef struct Bell {
  alignas(SEGMENT_LINE) _Atomic uint32_t word;
  _Atomic uint32_t waiters;
} Bell;

typedef enum SeatState { SEAT_EMPTY, SEAT_TAKEN, SEAT_LEFT } SeatState;

typedef struct Seat {
  Bell bell;
  _Atomic uint32_t state;
} Seat;

/* One direction between two seats. Positions count bytes since the beginning. */
typedef struct Ring {
  alignas(SEGMENT_LINE) _Atomic uint64_t head; /* written by the sender */
  alignas(SEGMENT_LINE) _Atomic uint64_t tail; /* by the receiver */
  alignas(SEGMENT_LINE) char data[RING_BYTES];
} Ring;

typedef enum FailState { FAIL_NONE, FAIL_WRITING, FAIL_SET } FailState;

typedef struct Segment {
  uint64_t magic;
  uint32_t seats;
  _Atomic uint32_t failed;
  char text[SEGMENT_TEXT];
  Seat seat[SEGMENT_SEATS];
  Ring ring[]; /* from * seats + to */
} Segment;

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
_Static_assert(sizeof(Fragment) == SEGMENT_LINE, "data after a header is aligned as the header");

typedef enum FragmentKind {
  FRAGMENT_CALL = 1,
  FRAGMENT_PROBE, /* only says which call its sender waits in */
  FRAGMENT_MESSAGE,
  FRAGMENT_SKIP, /* the rest of the ring is empty */
} FragmentKind;

size_t segment_bytes(int seats);
void segment_open(Segment *s, int seats);

void bell_ring(Bell *b);
static inline uint32_t bell_now(Bell *b) {
  return atomic_load_explicit(&b->word, memory_order_acquire);
}
/* Sleeps until the word is no longer `seen`, at most so long. */
void bell_wait(Bell *b, uint32_t seen, int milliseconds);

/* The first failure stays. Wakes everybody. */
void segment_fail(Segment *s, const char *text);
/* The text, or NULL. */
const char *segment_failure(Segment *s);

/* For one sender at a time: room for a fragment with so much data, or NULL. */
Fragment *ring_reserve(Ring *r, size_t bytes);
/* Makes the reserved fragment visible; its `bytes` are what was reserved. */
void ring_commit(Ring *r, const Fragment *f);
/* For one receiver at a time: the first fragment, or NULL. *bad: what is there makes no sense. */
const Fragment *ring_first(Ring *r, bool *bad);
void ring_advance(Ring *r, const Fragment *f);

#endif
