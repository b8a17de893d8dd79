/* See fault.h. */
#include "fault.h"

#ifdef MF_FAULT
#include <stdatomic.h>

static atomic_uint armed;
static atomic_ullong calls, first, behind;
static atomic_llong blocks;

void fault_arm(unsigned kinds, uint64_t from, uint64_t n) {
  atomic_store(&armed, 0);
  atomic_store(&calls, 0);
  atomic_store(&first, from);
  atomic_store(&behind, from ? from + n : 0);
  atomic_store(&armed, kinds);
}

uint64_t fault_calls(void) {
  return atomic_load(&calls);
}

int64_t fault_blocks(void) {
  return atomic_load(&blocks);
}

bool fault_count(FaultKind kind) {
  if (!(atomic_load(&armed) & kind)) return false;
  uint64_t call = atomic_fetch_add(&calls, 1) + 1;
  return call >= atomic_load(&first) && call < atomic_load(&behind);
}

void fault_add_blocks(int n) {
  atomic_fetch_add(&blocks, n);
}

#else

void fault_arm(unsigned kinds, uint64_t from, uint64_t n) {
  (void)kinds, (void)from, (void)n;
}

uint64_t fault_calls(void) {
  return 0;
}

int64_t fault_blocks(void) {
  return 0;
}

bool fault_count(FaultKind kind) {
  (void)kind;
  return false;
}

void fault_add_blocks(int n) {
  (void)n;
}
#endif
