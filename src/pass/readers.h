/* Who reads each value of a graph, for passes that look for patterns. */
#ifndef MF_READERS_H
#define MF_READERS_H
#include "graph.h"

enum { READERS = 4 };

/* The first READERS of n readers, in their order; one that reads it twice is there twice, and NULL
 * stands for the step's results. */
typedef struct Readers {
  int n;
  GraphNode *at[READERS];
} Readers;

/* Under the arena's protection. The marks of values are taken until graph_clear_marks. */
void readers_find(Graph *g);

static inline const Readers *readers_of(const GraphValue *v) {
  return v->mark;
}

#endif
