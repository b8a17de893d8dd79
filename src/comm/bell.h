/* A word on which one rank's threads sleep until something changed for them; see bell.c. */
#ifndef MF_BELL_H
#define MF_BELL_H
#include <stdalign.h>
#include <stdatomic.h>
#include <stdint.h>

enum { BELL_LINE = 64 }; /* bytes of a cache line */

typedef struct Bell {
  alignas(BELL_LINE) _Atomic uint32_t word;
  _Atomic uint32_t waiters;
} Bell;

void bell_ring(Bell *b);
static inline uint32_t bell_now(Bell *b) {
  return atomic_load_explicit(&b->word, memory_order_acquire);
}
/* Sleeps until the word is no longer `seen`, at most so long. */
void bell_wait(Bell *b, uint32_t seen, int milliseconds);

#endif
