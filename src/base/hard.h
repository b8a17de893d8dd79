/* HARD=1: a build in which what is rare happens all the time, so that specs meet it. Memory is
 * filled before use and after it, arenas and growing arrays have little room and always move,
 * actors are taken in any order and waited for. HARD is 0 otherwise, and all of it goes away. */
#ifndef MF_HARD_H
#define MF_HARD_H
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifdef MF_HARD
enum { HARD = 1 };
#else
enum { HARD = 0 };
#endif

enum {
  HARD_STRUCTURE = 0xA5, /* an address, a count that cannot be */
  HARD_DATA = 0xFF       /* a NaN in every dtype of floats, -1 in those of signed numbers */
};

static inline void hard_fill(void *p, size_t bytes, int with) {
  if (HARD && p) memset(p, with, bytes);
}

/* The room of a growing array that had `cap` and is full: usually twice that, from `first` on. */
static inline size_t hard_room(size_t cap, size_t first) {
  if (HARD) return cap + cap / 4 + 1;
  return cap ? cap * 2 : first;
}

/* Where a row of random numbers begins: MF_HARD_SEED=n of the environment gives other ones. */
static inline uint32_t hard_seed(uint32_t n) {
  const char *seed = HARD ? getenv("MF_HARD_SEED") : NULL;
  return ((seed ? (uint32_t)atoi(seed) : 1) * UINT32_C(2654435761) + n * 2) | 1;
}
/* The next of a row of random numbers; *state is not 0. */
static inline uint32_t hard_random(uint32_t *state) {
  *state ^= *state << 13;
  *state ^= *state >> 17;
  *state ^= *state << 5;
  return *state;
}

#endif
