/* Tracing: the calls of one run of the user's function become a Graph.
 *
 * While a Trace is at work its state executes nothing. A tensor's memory is named by its storage:
 * for each there is the value that it holds now, seen through `root`, and views are values derived
 * from it. A write through a view makes a new value of the whole; after it views are made again, by
 * the ops that made them, when they are asked for.
 * A storage that existed before is a capture, known by the first tensor that led to it. */
#ifndef MF_TRACE_H
#define MF_TRACE_H
#include "eager.h"
#include "graph.h"
#include "map.h"

typedef struct TraceView {
  Meta meta;
  unsigned writes; /* of the storage when it was right */
  GraphValue *value;
  const GraphNode
      *made; /* the view op that gives it, as output `output`; NULL: older than the step */
  int output;
  Meta from; /* what `made` is a view of */
} TraceView;

typedef struct TraceStorage {
  Storage *storage;     /* counted */
  Meta root;            /* dense, offset 0: all of the storage; of a global tensor the whole */
  const Layout *layout; /* of a global tensor */
  GraphValue *current;
  GraphNode *capture; /* NULL: made by the step, an argument or a number */
  Tensor *first;      /* of a capture: the tensor that led to it, counted */
  int input;          /* of an argument: its place, from 1; else 0 */
  unsigned writes;
  LIST(TraceView) views;
} TraceStorage;

/* A tensor from before that the step uses, or whose gradient it uses, and how it was: a call where
 * it is not so needs another step. */
typedef struct TraceLeaf {
  Tensor *tensor; /* counted; not a view */
  Tensor *grad;   /* what its gradient was before the step used it; counted */
  Node *node;     /* the same of what the tape has of it; counted */
  int output;
  uint32_t history;
  bool used, requires_grad;
  bool uses_grad, reads_grad; /* the step used .grad; first to read it or to add to it */
} TraceLeaf;

enum { TRACE_LINES = 256 };

typedef struct Trace {
  EagerTracer tracer;
  Eager *E;
  Graph *graph;
  Map place; /* Storage * -> index in storages */
  LIST(TraceStorage *) storages;
  Map leaf_place; /* Tensor * -> index in leaves */
  LIST(TraceLeaf) leaves;
  LIST(const double *) cells; /* by cell number */
  LIST(int)
  written; /* arguments that the step writes: what is left in them are results
              behind the function's own */
  int n_captures;
  GraphNode *last_port;                /* ports come first in the graph; NULL: there is none yet */
  uint64_t stream;                     /* the default generator's next stream at the start */
  const char *lines[TRACE_LINES];      /* texts that were made of the user's lines */
  EagerCall *call;                     /* which is recorded now */
  LIST(const Layout *) result_layouts; /* by result; NULL: it is local */
  int segment, n_segments;             /* what is recorded now belongs to; see GraphNode */
} Trace;

/* Begins: E records into a new graph one of `times` micro-batches. NULL with the error set. */
Trace *trace_begin(Eager *E, const char *name, int times);
/* A tensor like `like` that stands for an argument of the step; `part`: like a micro-batch of it,
 * dim 0 being shared out. */
Tensor *trace_input(Trace *t, const Tensor *like, bool part);
/* What is recorded from here on is computed anew in the backward: the segment that this begins, or
 * (segment >= 0) belongs to. The one before. */
int trace_segment(Trace *t, int segment);
/* The tensor is needed behind its segment. A code with the error set. */
int trace_keep(Trace *t, Tensor *x);
/* Ends recording; E executes again. What the step left in captures becomes writes, `results` the
 * graph's results, and gradients that it first made are dropped. On failure, and after an error in
 * the user's function (n < 0), gradients are what they were. */
int trace_end(Trace *t, int n, Tensor *const *results);
/* The graph, which holds the trace's records, is the caller's to destroy afterwards. */
void trace_destroy(Trace *t);

#endif
