/* Steps that communicate: what ops of OP_COMM do, over the ranks' comm. */
#ifndef MF_TALK_H
#define MF_TALK_H
#include "comm.h"
#include "plan.h"

/* What is known of a step before it runs, for this rank; the memory is the arena's, under its
 * protection; before[k]: that of step k before it, NULL for others. `args` for an OpCall whose
 * kernel is talk_run. */
void *talk_create(Arena *a, Comm *comm, const Plan *p, int step, void *const *before);
/* Bytes in which it packs what does not lie as it travels, and where they are. */
/* Whether it may run beside others that communicate. */
bool talk_is_apart(const void *args);
size_t talk_room(const void *args);
void talk_set_room(void *args, void *room);
int talk_run(const OpCall *c);

#endif
