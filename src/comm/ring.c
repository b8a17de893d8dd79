/* One direction between two ranks on one host: a ring of bytes with one sender and one receiver.
 *
 * A fragment is a header and at most FRAGMENT_MAX bytes, in one piece: when it does not fit before
 * the ring's end, a header of kind FRAGMENT_SKIP fills the rest. What holds:
 *
 *   S1  tail <= head <= tail + RING_BYTES; both are multiples of 64, so a header always fits.
 *   S2  Bytes in [tail, head) belong to the receiver, the others to the sender. The sender
 * publishes by storing head (release), the receiver gives back by storing tail (release). S3  After
 * each of these stores the caller rings the other side's bell. */
#include "ring.h"

static size_t padded(size_t bytes) {
  return sizeof(Fragment) + ((bytes + BELL_LINE - 1) & ~(size_t)(BELL_LINE - 1));
}

Fragment *ring_reserve(Ring *r, size_t bytes) {
  uint64_t head = atomic_load_explicit(&r->head, memory_order_relaxed);
  uint64_t tail = atomic_load_explicit(&r->tail, memory_order_acquire);
  size_t at = head % RING_BYTES, need = padded(bytes), rest = RING_BYTES - at;
  size_t skip = need > rest ? rest : 0;
  if (skip + need > RING_BYTES - (head - tail)) return NULL;
  if (skip) {
    ((Fragment *)(r->data + at))->kind = FRAGMENT_SKIP;
    atomic_store_explicit(&r->head, head + skip, memory_order_release);
    at = 0;
  }
  return (Fragment *)(r->data + at);
}

void ring_commit(Ring *r, const Fragment *f) {
  uint64_t head = atomic_load_explicit(&r->head, memory_order_relaxed);
  atomic_store_explicit(&r->head, head + padded(f->bytes), memory_order_release);
}

const Fragment *ring_first(Ring *r, bool *bad) {
  for (;;) {
    uint64_t tail = atomic_load_explicit(&r->tail, memory_order_relaxed);
    uint64_t head = atomic_load_explicit(&r->head, memory_order_acquire);
    if (head == tail) return NULL;
    size_t at = tail % RING_BYTES, rest = RING_BYTES - at;
    const Fragment *f = (const Fragment *)(r->data + at);
    if (f->kind == FRAGMENT_SKIP) {
      atomic_store_explicit(&r->tail, tail + rest, memory_order_release);
      continue;
    }
    *bad = head - tail > RING_BYTES || (head | tail) % BELL_LINE || f->bytes > FRAGMENT_MAX ||
           padded(f->bytes) > rest || padded(f->bytes) > head - tail;
    return *bad ? NULL : f;
  }
}

void ring_advance(Ring *r, const Fragment *f) {
  uint64_t tail = atomic_load_explicit(&r->tail, memory_order_relaxed);
  atomic_store_explicit(&r->tail, tail + padded(f->bytes), memory_order_release);
}

void ring_clear(Ring *r) {
  uint64_t head = atomic_load_explicit(&r->head, memory_order_acquire);
  atomic_store_explicit(&r->tail, head, memory_order_release);
}
