/* How values lie on the ranks: layouts and groups of a graph, and their text.
 *
 * A graph goes through three states. As traced, it computes on whole tensors: ports have layouts,
 * and so have the outputs of ops that the user told how they lie. Then signatures are chosen: each
 * value has a layout, each op says how its inputs are to lie, and conversions are ops. At last it
 * is that of one rank: values are parts, without layouts, and ops that communicate name groups of
 * ranks. In the text, lines behind the head name what the others use:
 *
 *   placement 0 {{0, 1}, {2, 3}}
 *   layout 0 on 0 (S0, B)                             for ops that go from one to another
 *   group 0 {0, 2}
 *   %4 = matmul(%0, %1): float64[8, 4] on 0 (S0, P) from (S0, S1), (B, S0)
 *   %5 = dropout(%4, generator=0): float64[4, 2] of [8, 4] at [4, 0] */
#include <string.h>

#include "err.h"
#include "graph_int.h"
#include "op_comm.h"
#include "placement_scan.h"

static const Placement *keep_placement(Graph *g, const Placement *p) {
  for (size_t i = 0; i < g->placements.n; i++)
    if (placement_equal(g->placements.at[i], p)) return g->placements.at[i];
  Placement *own = arena_copy(&g->arena, p, sizeof *p + sizeof(int) * (size_t)p->n);
  return *list_add(&g->arena, &g->placements) = own;
}

const GraphLayout *graph_layout(Graph *g, const Placement *p, const SbpList *sbp) {
  p = keep_placement(g, p);
  for (size_t i = 0; i < g->layouts.n; i++) {
    const GraphLayout *l = g->layouts.at[i];
    if (l->placement == p && sbp_list_equal(&l->sbp, sbp)) return l;
  }
  GraphLayout *l = arena_new(&g->arena, GraphLayout);
  *l = (GraphLayout){p, *sbp};
  return *list_add(&g->arena, &g->layouts) = l;
}

int graph_layout_id(const Graph *g, const GraphLayout *l) {
  size_t i = 0;
  while (g->layouts.at[i] != l) i++;
  return (int)i;
}

int graph_group(Graph *g, int n, const int *ranks) {
  size_t bytes = sizeof *ranks * (size_t)n;
  for (size_t i = 0; i < g->groups.n; i++)
    if (g->groups.at[i].n == n && !memcmp(g->groups.at[i].rank, ranks, bytes)) return (int)i;
  const int *own = arena_copy(&g->arena, ranks, bytes);
  *list_add(&g->arena, &g->groups) = (GraphGroup){n, own};
  return (int)g->groups.n - 1;
}

void graph_cut(Graph *g, GraphValue *v, const int64_t *whole, const int64_t *start) {
  int64_t *cut = arena_array(&g->arena, int64_t, 2 * v->ndim + 1);
  for (int d = 0; d < v->ndim; d++) cut[d] = whole[d], cut[v->ndim + d] = start[d];
  v->cut = cut;
}

void graph_keep_cuts(Graph *g, GraphNode *n) {
  if (n->kind != GRAPH_OP || !(n->op->spec[0]->flags & OP_INDEXED)) return;
  bool any = false;
  for (int k = 0; k < n->n_in + n->n_out; k++) {
    const GraphValue *v = k < n->n_in ? n->in[k] : &n->out[k - n->n_in];
    any |= v && v->cut;
  }
  if (!any) return;
  n->cuts = arena_array(&g->arena, const int64_t *, n->n_in + n->n_out);
  for (int k = 0; k < n->n_in + n->n_out; k++) {
    const GraphValue *v = k < n->n_in ? n->in[k] : &n->out[k - n->n_in];
    n->cuts[k] = v ? v->cut : NULL;
  }
}

const Placement *graph_placement(const GraphNode *n) {
  const GraphLayout *l = n->n_out ? n->out[0].layout : NULL;
  if (!l && n->kind == GRAPH_OP && op_is_box(n->op)) l = n->in[0]->layout;
  if (!l && n->kind == GRAPH_WRITE) l = n->target->out[0].layout;
  return l ? l->placement : NULL;
}

/* -- Printing ---------------------------------------------------------------------------------- */

static void put_list(Str *s, const GraphGroup *group) {
  str_puts(s, "{");
  for (int i = 0; i < group->n; i++) str_printf(s, "%s%d", i ? ", " : "", group->rank[i]);
  str_puts(s, "}\n");
}

static void put_layout(Str *s, const Graph *g, const GraphLayout *l) {
  int k = 0;
  while (g->placements.at[k] != l->placement) k++;
  str_printf(s, " on %d ", k);
  sbp_list_text(&l->sbp, l->placement->n_axes, s);
}

void graph_put_ranks(Str *s, const Graph *g) {
  for (size_t i = 0; i < g->placements.n; i++) {
    str_printf(s, "placement %zu ", i);
    placement_text(g->placements.at[i], s);
    str_puts(s, "\n");
  }
  for (size_t i = 0; i < g->layouts.n && g->has[OP_exchange]; i++) {
    str_printf(s, "layout %zu", i);
    put_layout(s, g, g->layouts.at[i]);
    str_puts(s, "\n");
  }
  for (size_t i = 0; i < g->groups.n; i++) {
    str_printf(s, "group %zu ", i);
    put_list(s, &g->groups.at[i]);
  }
}

static void put_sizes(Str *s, const char *name, int n, const int64_t *v) {
  str_printf(s, " %s [", name);
  for (int d = 0; d < n; d++) str_printf(s, "%s%lld", d ? ", " : "", (long long)v[d]);
  str_puts(s, "]");
}

void graph_put_lies(Str *s, const Graph *g, const GraphValue *v) {
  if (v->layout) put_layout(s, g, v->layout);
  if (!v->cut) return;
  put_sizes(s, "of", v->ndim, v->cut);
  put_sizes(s, "at", v->ndim, v->cut + v->ndim);
}

void graph_put_wants(Str *s, const GraphNode *n) {
  for (int k = 0; n->want && k < n->n_in; k++) {
    str_puts(s, k ? ", " : " from ");
    if (n->in[k] && n->in[k]->layout)
      sbp_list_text(&n->want[k], n->in[k]->layout->placement->n_axes, s);
    else str_puts(s, "-");
  }
}

/* -- Reading ----------------------------------------------------------------------------------- */

static const GraphLayout *scan_layout(Scan *s, Graph *g) {
  int k = (int)scan_range(s, "the placement", 0, (int64_t)g->placements.n - 1);
  const Placement *p = g->placements.at[k];
  SbpList list = sbp_list_scan(s, p->n_axes);
  return graph_layout(g, p, &list);
}

bool graph_scan_ranks(Scan *s, Graph *g) {
  if (scan_is(s, "placement")) {
    scan_range(s, "its number", (int64_t)g->placements.n, (int64_t)g->placements.n);
    size_t before = g->placements.n;
    keep_placement(g, placement_scan(s));
    if (g->placements.n == before) scan_fail(s, "the placement stands above");
  } else if (scan_is(s, "layout")) {
    size_t before = g->layouts.n;
    scan_range(s, "its number", (int64_t)before, (int64_t)before);
    scan_want(s, "on");
    scan_layout(s, g);
    if (g->layouts.n == before) scan_fail(s, "the layout stands above");
  } else if (scan_is(s, "group")) {
    size_t before = g->groups.n;
    scan_range(s, "its number", (int64_t)before, (int64_t)before);
    const Placement *p = placement_scan(s);
    if (p->n_axes != 1) scan_fail(s, "a group is a list of ranks");
    graph_group(g, p->n, p->rank);
    if (g->groups.n == before) scan_fail(s, "the group stands above");
  } else {
    return false;
  }
  return true;
}

static void scan_sizes(Scan *s, int n, int64_t *v) {
  scan_want(s, "[");
  for (int d = 0; d < n; d++) {
    if (d) scan_want(s, ",");
    v[d] = scan_range(s, "a size", 0, SHAPE_MAX);
  }
  scan_want(s, "]");
}

void graph_scan_lies(Scan *s, Graph *g, GraphValue *v) {
  int64_t whole[MF_MAX_DIMS], start[MF_MAX_DIMS];
  if (scan_is(s, "on")) {
    v->layout = scan_layout(s, g);
    if (sbp_list_check("type", &v->layout->sbp, MF_MAX_AXES, v->ndim))
      scan_fail(s, "%s", err_text());
  }
  if (!scan_is(s, "of")) return;
  scan_sizes(s, v->ndim, whole);
  scan_want(s, "at");
  scan_sizes(s, v->ndim, start);
  graph_cut(g, v, whole, start);
}

void graph_scan_wants(Scan *s, Graph *g, GraphNode *n) {
  if (!scan_is(s, "from")) return;
  SbpList *want = arena_array(&g->arena, SbpList, n->n_in + 1);
  for (int k = 0; k < n->n_in; k++) {
    if (k) scan_want(s, ",");
    bool none = scan_is(s, "-");
    if (none != !(n->in[k] && n->in[k]->layout)) scan_fail(s, "input %d is not global", k);
    if (none) continue;
    want[k] = sbp_list_scan(s, n->in[k]->layout->placement->n_axes);
    if (sbp_list_check("input", &want[k], MF_MAX_AXES, n->in[k]->ndim))
      scan_fail(s, "%s", err_text());
  }
  n->want = want;
}
