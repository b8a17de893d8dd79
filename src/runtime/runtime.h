/* Runs a plan: memory, bound ports, launches. */
#ifndef MF_RUNTIME_H
#define MF_RUNTIME_H
#include "device.h"
#include "plan.h"

typedef struct Runtime Runtime;

/* Memory for p's block on `device`; kernels are those of op table `isa`. NULL with the error set.
 * The plan must outlive it. */
Runtime *runtime_create(const Plan *p, Device *device, Stream *stream, int isa);
void runtime_destroy(Runtime *r);

/* The memory of a port; must be bound before a run, and again only when it changes. */
void runtime_bind(Runtime *r, PlanHome home, int port, void *data);
/* The cells' values for the next run, and the first stream number and seed of random ops. */
void runtime_set_cell(Runtime *r, int cell, double value);
/* One run of all steps: 0 or a code. `seed` and `stream` are what random ops begin from. */
int runtime_run(Runtime *r, uint64_t seed, uint64_t stream);

#endif
