/* Computing values a second time, for those who use them late: what both remat passes stand on. */
#ifndef MF_AGAIN_H
#define MF_AGAIN_H
#include "graph.h"
#include "making.h"

/* What is made anew together: one value, or NULL: all that the node makes. */
typedef struct AgainPart {
  const GraphNode *node;
  const GraphValue *value;
} AgainPart;

/* For one pass over a numbered graph, under the arena's protection. */
typedef struct Again {
  Graph *g;
  GraphNode **copies; /* by node id; NULL: not computed anew so far */
  GraphNode **made;   /* by value id: of values that are not made by a copy of their node */
  /* Whether `user`, a node or where a copy for it will stand, gets v from a copy of its node. Never
   * true of what is no op. */
  bool (*is_anew)(void *ud, const GraphValue *v, const GraphNode *user);
  /* How v is made anew; NULL, as the whole function may be: by a copy of its node. */
  const Making *(*how)(void *ud, const GraphValue *v);
  void *ud;
  LIST(AgainPart) work; /* kept between calls */
} Again;

Again again_begin(Graph *g, bool (*is_anew)(void *, const GraphValue *, const GraphNode *),
                  void *ud);
/* Gives `user` the inputs that it gets anew; the copies that are not there yet stand before it,
 * with id -1, in the order of what they copy. Users must come in their order. */
void again_inputs(Again *r, GraphNode *user);

/* Whether a copy of node n for `user` would be computed as often as that, so that it belongs to the
 * same part of the step: not where what is of the step is read by each micro-batch, nor what they
 * leave. */
bool again_is_beside(const GraphNode *n, const GraphNode *user);

#endif
