/* Runs a plan: memory, bound ports, actors on threads. */
#ifndef MF_RUNTIME_H
#define MF_RUNTIME_H
#include "device.h"
#include "plan.h"

typedef struct Runtime Runtime;

/* What a call of the host does when its task acts: in and out are the memory of the registers that
 * it consumes and produces (NULL: an order edge), in the order of their ids. 0, RUNTIME_END: there
 * is no more, which ends the streams that follow from it, or a code with the error set. It runs on
 * its stream's thread. */
enum { RUNTIME_END = -1 };
typedef int RuntimeCall(void *ud, void *const *in, void *const *out);

typedef struct RuntimeOptions {
  int isa;           /* which op table */
  struct Comm *comm; /* of steps that communicate; NULL: there are none */
  int watch_ms;      /* how long nothing may move; 0: 10 seconds, < 0: for ever */
  /* Calls of the host may take their time. Where this is set, it is told when nothing has moved for
   * watch_ms because of one; once for each time. */
  void (*slow)(void *ud, const char *text);
  void *ud;
} RuntimeOptions;

/* Memory for p's block on `device`. NULL with the error set. The plan must outlive it. A plan of
 * one stream and no sources runs on the calling thread, on `stream`. */
Runtime *runtime_create(const Plan *p, Device *device, Stream *stream, const RuntimeOptions *o);
void runtime_destroy(Runtime *r);

/* The memory of a port; must be bound before a run, and again only when it changes. */
void runtime_bind(Runtime *r, PlanHome home, int port, void *data);
void runtime_bind_call(Runtime *r, int call, RuntimeCall *fn, void *ud);
/* The cells' values for the next run. */
void runtime_set_cell(Runtime *r, int cell, double value);

/* One round: every task acts once, sources as far ahead as their buffers reach. 0; RUNTIME_END: a
 * source had no more; or the first code of an actor, all of them being then as at the start.
 * `seed` and `stream` are what random ops begin from. */
int runtime_run(Runtime *r, uint64_t seed, uint64_t stream);
/* For rounds that are not waited for: starts the threads, and what sources do ahead. Such a runtime
 * has sources, and runs no other rounds. */
int runtime_start(Runtime *r);
/* One more round, which begins when what it needs is there, with the cells as they are now, after
 * those before it. At most RUNTIME_AHEAD may be under way. Interrupts are for the thread that
 * waits. 0 or a code. */
enum { RUNTIME_AHEAD = 64, RUNTIME_MAX_BUFFERS = 16 };
int runtime_queue(Runtime *r, uint64_t seed, uint64_t stream);
/* Waits until until(ud), which is asked under a lock, now and after each runtime_signal; NULL:
 * until all rounds are done. 0, RUNTIME_END as above, or the code of an actor: then nothing acts
 * any more until runtime_stop. */
int runtime_wait(Runtime *r, bool (*until)(void *ud), void *ud);
/* For calls: what `until` looks at has changed. */
void runtime_signal(Runtime *r);
/* For calls that wait themselves: some actor failed, so that they are to return. */
bool runtime_has_failed(Runtime *r);
/* Ends what sources did ahead, and the threads; the next run begins anew. */
void runtime_stop(Runtime *r);

#endif
