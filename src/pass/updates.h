/* What an optimiser's update is: an op whose inputs are lists of one length, parameters, gradients
 * and states, and behind them a factor of the gradients and what says whether it is done, each of
 * which may be absent. */
#ifndef MF_UPDATES_H
#define MF_UPDATES_H
#include "graph.h"

enum {
  UPDATES_GRADS = 1, /* the list of gradients among the op's */
  UPDATES_BEHIND = 2 /* tensors behind the lists; the first is the factor */
};

/* How many places n's lists have; 0: it is no update, or not one of which all lists have one
 * length. */
int updates_places(const GraphNode *n);
/* The update of `count` of n's places, before `at`; results of n that it makes get it as mark. */
GraphNode *updates_add_part(Graph *g, const GraphNode *n, int places, int count, const int *which,
                            GraphNode *at);

#endif
