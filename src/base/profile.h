/* Events of a profile: what ran, when, on which track, and how much work it was; acts of actors,
 * and what they handed to each other. */
#ifndef MF_PROFILE_H
#define MF_PROFILE_H
#include <stddef.h>
#include <stdint.h>

typedef enum ProfileKind {
  PROFILE_OP,
  PROFILE_ACT,    /* name: of the plan or of a call; where: of its stream */
  PROFILE_SEND,   /* at the end of an act: a buffer is full; */
  PROFILE_RECEIVE /* it is read by an act that begins */
} ProfileKind;

typedef struct ProfileEvent {
  char name[32];
  char where[64];     /* the user's line; "": unknown */
  int64_t begin, end; /* ns of profile_now */
  double flops, bytes;
  const void *track; /* the stream */
  uint8_t kind;
  /* Which act, of which register of whose: the same of a send and what receives it. */
  const void *owner;
  int reg;
  uint64_t act;
} ProfileEvent;

typedef struct Profile Profile;

/* NULL when out of memory. */
Profile *profile_create(void);
/* From any thread. An event that memory does not suffice for is counted as lost. */
void profile_add(Profile *p, const ProfileEvent *event);
/* The events in the order of profile_add; valid until the next one. */
const ProfileEvent *profile_events(const Profile *p, size_t *n, size_t *lost);
void profile_destroy(Profile *p);

/* Nanoseconds of a clock that never goes back. */
int64_t profile_now(void);

#endif
