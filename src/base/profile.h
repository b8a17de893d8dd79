/* Events of a profile: what ran, when, on which track, and how much work it was. */
#ifndef MF_PROFILE_H
#define MF_PROFILE_H
#include <stddef.h>
#include <stdint.h>

typedef struct ProfileEvent {
  const char *name;   /* lives as long as the program */
  char where[64];     /* the user's line; "": unknown */
  int64_t begin, end; /* ns of profile_now */
  double flops, bytes;
  int track; /* the stream or thread */
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
