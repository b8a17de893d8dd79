/* Memory that the ranks of one host share: as threads on the heap, as processes in a memfd.
 *
 * A seat for each rank, with its bell; between each two seats a ring per direction; and the failure
 * of the job: whoever comes first writes its text, and nobody changes it. */
#include "segment.h"

#include <string.h>
#include <time.h>

size_t segment_bytes(int seats) {
  return sizeof(Segment) + sizeof(Ring) * (size_t)seats * (size_t)seats;
}

void segment_open(Segment *s, int seats) {
  s->seats = (uint32_t)seats;
}

/* -- Failure ----------------------------------------------------------------------------------- */

/* Who began to write and is not done after a while was killed at it. */
static bool may_write(Segment *s) {
  for (int i = 0; i < 100; i++) {
    uint32_t state = FAIL_NONE;
    if (atomic_compare_exchange_strong(&s->failed, &state, FAIL_WRITING)) return true;
    if (state == FAIL_SET) return false;
    nanosleep(&(struct timespec){0, 1000000}, NULL);
  }
  return true;
}

void segment_fail(Segment *s, const char *text) {
  if (!may_write(s)) return;
  size_t n = strnlen(text, SEGMENT_TEXT - 1);
  memcpy(s->text, text, n);
  s->text[n] = 0;
  atomic_store(&s->failed, FAIL_SET);
  for (uint32_t i = 0; i < s->seats; i++) bell_ring(&s->seat[i].bell);
}

void segment_revive(Segment *s) {
  atomic_store(&s->failed, FAIL_NONE);
}

const char *segment_failure(Segment *s) {
  return atomic_load_explicit(&s->failed, memory_order_acquire) == FAIL_SET ? s->text : NULL;
}
