/* What ranks on one host share: seats, bells, rings, and the job's failure; see segment.c. */
#ifndef MF_SEGMENT_H
#define MF_SEGMENT_H
#include "bell.h"
#include "ring.h"

enum { SEGMENT_SEATS = 256, SEGMENT_TEXT = 1024 };

typedef enum SeatState { SEAT_EMPTY, SEAT_TAKEN, SEAT_LEFT } SeatState;

typedef struct Seat {
  Bell bell;
  _Atomic uint32_t state;
} Seat;

typedef enum FailState { FAIL_NONE, FAIL_WRITING, FAIL_SET } FailState;

typedef struct Segment {
  uint32_t seats;
  _Atomic uint32_t failed;
  char text[SEGMENT_TEXT];
  Seat seat[SEGMENT_SEATS];
  Ring ring[]; /* from * seats + to */
} Segment;

size_t segment_bytes(int seats);
void segment_open(Segment *s, int seats);

/* The first failure stays. Wakes everybody. */
void segment_fail(Segment *s, const char *text);
/* As if nothing had failed. */
void segment_revive(Segment *s);
/* The text, or NULL. */
const char *segment_failure(Segment *s);

#endif
