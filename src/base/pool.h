/* Free lists for the small structures that one thread makes and drops again and again.
 *
 * Collectors drop thousands of them at once, more than the C library keeps at hand. Blocks are
 * aligned to 64 bytes, and each is memory of mem_aligned: who ends one elsewhere may mem_free it.
 * The address sanitizer and builds for tests see every block, since then there are no lists. */
#ifndef MF_POOL_H
#define MF_POOL_H
#include <stddef.h>

#include "mem.h"

enum { POOL_UNIT = 64, POOL_CLASSES = 16, POOL_LIMIT = 64 << 20 };

typedef struct Pool {
  void *blocks[POOL_CLASSES]; /* by size, in units; each begins with the address of the next */
  size_t kept;                /* bytes in the lists, at most POOL_LIMIT */
} Pool;

#if defined(__SANITIZE_ADDRESS__) || defined(MF_HARD) || defined(MF_FAULT)
enum { POOL_KEEPS = 0 };
#else
enum { POOL_KEEPS = 1 };
#endif

/* `bytes` uninitialised ones; NULL when out of memory. */
static inline void *pool_take(Pool *p, size_t bytes) {
  size_t units = (bytes + POOL_UNIT - 1) / POOL_UNIT;
  if (units > POOL_CLASSES || !p->blocks[units - 1])
    return mem_aligned(POOL_UNIT, units * POOL_UNIT);
  void *block = p->blocks[units - 1];
  void *next = p->blocks[units - 1] = *(void **)block;
  for (int line = 0; line < 8; line++) __builtin_prefetch((char *)next + line * POOL_UNIT, 1);
  p->kept -= units * POOL_UNIT;
  return block;
}

/* Takes back what pool_take gave for `bytes`. */
static inline void pool_give(Pool *p, void *block, size_t bytes) {
  size_t units = (bytes + POOL_UNIT - 1) / POOL_UNIT;
  if (!POOL_KEEPS || units > POOL_CLASSES || p->kept >= POOL_LIMIT) {
    mem_free(block);
    return;
  }
  *(void **)block = p->blocks[units - 1];
  p->blocks[units - 1] = block;
  p->kept += units * POOL_UNIT;
}

static inline void pool_clear(Pool *p) {
  for (int k = 0; k < POOL_CLASSES; k++)
    while (p->blocks[k]) {
      void *next = *(void **)p->blocks[k];
      mem_free(p->blocks[k]);
      p->blocks[k] = next;
    }
  p->kept = 0;
}

#endif
