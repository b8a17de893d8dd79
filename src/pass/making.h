/* Making a value again by less than its node does: what else that has made is there, or is made
 * again itself. */
#ifndef MF_MAKING_H
#define MF_MAKING_H
#include "graph.h"

/* An op whose first output is the value, bit for bit. */
typedef struct Making {
  const Op *op;
  const void *args;
  GraphValue **in;
  int n_in;
} Making;

/* Under the arena's protection. False: only its node makes v. */
bool making_find(Graph *g, const GraphValue *v, Making *m);
/* The node that does so, before `at`. */
GraphNode *making_add(Graph *g, GraphNode *at, const GraphValue *v, const Making *m);

#endif
