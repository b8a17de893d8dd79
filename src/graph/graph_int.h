/* What the files of this folder share. */
#ifndef MF_GRAPH_INT_H
#define MF_GRAPH_INT_H
#include "graph.h"
#include "scan.h"

/* By DeviceType. */

/* The patch of param `param`, or NULL. */
const GraphPatch *graph_patch_of(const GraphNode *n, int param);

/* Parts of the text that say how values lie: the lines behind the head, what stands behind the type
 * of a value, and behind those of a node. */
void graph_put_ranks(Str *s, const Graph *g);
void graph_put_lies(Str *s, const Graph *g, const GraphValue *v);
void graph_put_wants(Str *s, const GraphNode *n);
/* The same read back, where they come next; else nothing is read. */
bool graph_scan_ranks(Scan *s, Graph *g);
void graph_scan_lies(Scan *s, Graph *g, GraphValue *v);
void graph_scan_wants(Scan *s, Graph *g, GraphNode *n);

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
