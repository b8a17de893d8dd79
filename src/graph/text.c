#include "graph.h"

void graph_print(Graph *g, Str *out) {
  graph_renumber(g);
  str_printf(out, "graph %s\n", g->name);
}
