/* FAULT=1: a build in which the n-th request for memory, a launch or a thread fails, as a test
 * says, and what was taken and not given back is counted. FAULT is 0 otherwise, and all of it goes
 * away. Its state is the process's: a build for tests may have such. */
#ifndef MF_FAULT_H
#define MF_FAULT_H
#include <stdbool.h>
#include <stdint.h>

#include "err.h"

#ifdef MF_FAULT
enum { FAULT = 1 };
#else
enum { FAULT = 0 };
#endif

typedef enum FaultKind {
  FAULT_MEMORY = 1, /* base/mem, of which arenas, lists and pools are made */
  FAULT_DEVICE = 2, /* a device's memory: tensors, blocks, scratch */
  FAULT_LAUNCH = 4, /* of a kernel */
  FAULT_THREAD = 8, /* its start */
  FAULT_LUA = 16    /* Lua's heap */
} FaultKind;

/* From now on calls of these kinds are counted, and `n` of them fail, the first being call `from`
 * (from 1; 0: none). */
void fault_arm(unsigned kinds, uint64_t from, uint64_t n);
/* Calls counted since then. */
uint64_t fault_calls(void);
/* Blocks of base/mem that were taken and not given back. */
int64_t fault_blocks(void);

/* Counts a call; whether it is to fail. */
bool fault_count(FaultKind kind);
void fault_add_blocks(int n);

static inline bool fault_here(FaultKind kind) {
  return FAULT && fault_count(kind);
}

/* Asked before a kernel is launched: 0 or a code. */
static inline int fault_launch(const char *op) {
  if (!fault_here(FAULT_LAUNCH)) return 0;
  return err_set(MF_EIO, "%s: the kernel could not be launched", op);
}

/* A block that was taken, or NULL. */
static inline void *fault_took(void *block) {
  if (FAULT && block) fault_add_blocks(1);
  return block;
}

#endif
