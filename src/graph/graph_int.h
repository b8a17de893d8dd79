/* What the files of this folder share. */
#ifndef MF_GRAPH_INT_H
#define MF_GRAPH_INT_H
#include "graph.h"

/* By DeviceType. */
extern const char *const graph_devices[DEVICE_TYPES];

/* The patch of param `param`, or NULL. */
const GraphPatch *graph_patch_of(const GraphNode *n, int param);

/* Space that checks of many nodes share. */
typedef struct Checker {
  Meta *metas; /* of inputs, then outputs */
  const Meta **in;
  int cap;
  const GraphValue **made; /* by id, those of the nodes that were walked */
  bool *late;              /* the same: whether it follows from what micro-batches left */
  int64_t n_made, cap_made;
  bool settle; /* arguments become what inference makes of them, as those of traces are */
} Checker;

/* Whether a node is right by itself: its arguments, and its outputs given its inputs. 0 or a code
 * with a text that does not name the node. */
int graph_check_node(Checker *c, const Graph *g, GraphNode *n);
void graph_check_free(Checker *c);

#endif
