/* A job as the files of this folder know it. */
#ifndef MF_JOB_INT_H
#define MF_JOB_INT_H
#include "job.h"
#include "map.h"
#include "plan.h"
#include "runtime.h"

typedef struct Flow Flow;
typedef struct Trace Trace;

typedef struct Capture {
  Tensor *tensor; /* that led to it; counted */
  Storage *storage;
  bool written;
} Capture;

/* A leaf as it must be. */
typedef struct Leaf {
  Tensor *tensor, *grad; /* counted */
  bool used, requires_grad, reads_grad;
} Leaf;

struct Job {
  Eager *E;
  Trace *trace; /* until it is compiled */
  Graph *graph;
  Plan *plan;
  Runtime *runtime; /* NULL: not run, or not since a flow */
  Capture *captures;
  Leaf *leaves;
  size_t n_leaves;
  const double **cells;
  int *written; /* arguments that it writes; their contents are the last results */
  int n_written;
  int n_inputs;           /* of the trace */
  uint64_t repeated;      /* those that are whole in each micro-batch */
  double *own_cells;      /* of a step from text */
  Map captured;           /* their storages -> their numbers */
  Tensor **owners;        /* while results are made: who has the memory, by register */
  Tensor **results;       /* while it runs: all of them */
  const Layout **layouts; /* of results, by result; NULL: it is local */
  PlanOptions options;
  Flow *flow; /* NULL: none is open */
};

/* Memory for the block and actors of a plan of j's. NULL with the error set. */
Runtime *job_make_runtime(Job *j, const Plan *p);
/* Whether captured tensors are still those of the step, whose memory `r` then gets. */
int job_bind_captures(Job *j, Runtime *r);

/* Whether all ranks have this graph, `comm` being theirs: 0, or a code with the first line in which
 * one differs. All ranks of the job call it. */
int job_agree(void *comm, Graph *g);

#endif
