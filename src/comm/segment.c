/* Memory that the ranks of one host share: as threads on the heap, as processes in a memfd.
 *
 * Between each two seats lies a ring per direction, with one sender and one receiver. A fragment is
 * a header and at most FRAGMENT_MAX bytes, in one piece: when it does not fit before the ring's
 * end, a header of kind FRAGMENT_SKIP fills the rest. What holds:
 *
 *   S1  tail <= head <= tail + RING_BYTES; both are multiples of 64, so a header always fits.
 *   S2  Bytes in [tail, head) belong to the receiver, the others to the sender. The sender
 * publishes by storing head (release), the receiver gives back by storing tail (release). S3  After
 * each of these stores the other side's bell is rung.
 *
 * A bell is a futex word that counts. A waiter reads the word, looks for what it waits for, and
 * sleeps only while the word is unchanged; a ringer counts first and looks for waiters afterwards.
 * Both in one order (seq_cst), so that either the ringer sees the waiter or the kernel sees the new
 * word. Nobody spins: a hand-over costs one system call on each side.
 *
 * The failure of a job is a state in the segment: whoever comes first writes the text. */
#include "segment.h"

#include <linux/futex.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static const uint64_t segment_magic = 0x6d6f6f6e666c6f77;

size_t segment_bytes(int seats) {
  return sizeof(Segment) + sizeof(Ring) * (size_t)seats * (size_t)seats;
}

void segment_open(Segment *s, int seats) {
  s->magic = segment_magic;
  s->seats = (uint32_t)seats;
}

/* -- Bells ------------------------------------------------------------------------------------- */

void bell_ring(Bell *b) {
  atomic_fetch_add(&b->word, 1);
  if (atomic_load(&b->waiters)) syscall(SYS_futex, &b->word, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
}

void bell_wait(Bell *b, uint32_t seen, int milliseconds) {
  struct timespec most = {milliseconds / 1000, milliseconds % 1000 * 1000000L};
  atomic_fetch_add(&b->waiters, 1);
  syscall(SYS_futex, &b->word, FUTEX_WAIT, seen, &most, NULL, 0);
  atomic_fetch_sub(&b->waiters, 1);
}

/* -- Failure ----------------------------------------------------------------------------------- */

void segment_fail(Segment *s, const char *text) {
  uint32_t none = FAIL_NONE;
  if (!atomic_compare_exchange_strong(&s->failed, &none, FAIL_WRITING)) return;
  size_t n = strnlen(text, SEGMENT_TEXT - 1);
  memcpy(s->text, text, n);
  s->text[n] = 0;
  atomic_store(&s->failed, FAIL_SET);
  for (uint32_t i = 0; i < s->seats; i++) bell_ring(&s->seat[i].bell);
}

const char *segment_failure(Segment *s) {
  return atomic_load_explicit(&s->failed, memory_order_acquire) == FAIL_SET ? s->text : NULL;
}

/* -- Rings ------------------------------------------------------------------------------------- */

static size_t padded(size_t bytes) {
  return sizeof(Fragment) + ((bytes + SEGMENT_LINE - 1) & ~(size_t)(SEGMENT_LINE - 1));
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
    *bad = head - tail > RING_BYTES || (head | tail) % SEGMENT_LINE || f->bytes > FRAGMENT_MAX ||
           padded(f->bytes) > rest || padded(f->bytes) > head - tail;
    return *bad ? NULL : f;
  }
}

void ring_advance(Ring *r, const Fragment *f) {
  uint64_t tail = atomic_load_explicit(&r->tail, memory_order_relaxed);
  atomic_store_explicit(&r->tail, tail + padded(f->bytes), memory_order_release);
}
