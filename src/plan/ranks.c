/* What plans say of other ranks: groups, layouts, and where parts begin; and their text:
 *
 *   group {0, 2}                                  numbered as they stand
 *   layout {{0, 1}, {2, 3}} (S0, B)
 *   t4 = r2 float32(4, 2) of 8 2 at 4 0           a part of a tensor (8, 2) that begins at (4, 0)
 */
#include <string.h>

#include "graph.h"
#include "op_args.h"
#include "op_comm.h"
#include "placement_scan.h"
#include "plan_int.h"
#include "str.h"

static const Placement *copy_placement(Plan *p, const Placement *from) {
  return arena_copy(&p->arena, from, sizeof *from + sizeof(int) * (size_t)from->n);
}

void plan_take_ranks(Plan *p, const Graph *g) {
  for (size_t i = 0; i < g->groups.n; i++) {
    const GraphGroup *group = &g->groups.at[i];
    const int *ranks = arena_copy(&p->arena, group->rank, sizeof *ranks * (size_t)group->n);
    *list_add(&p->arena, &p->groups) = (PlanGroup){group->n, ranks};
  }
  for (size_t i = 0; i < g->layouts.n && g->has[OP_exchange]; i++) {
    const GraphLayout *l = g->layouts.at[i];
    const Placement *placement = copy_placement(p, l->placement);
    *list_add(&p->arena, &p->layouts) = (PlanLayout){placement, l->sbp};
  }
}

/* -- Text -------------------------------------------------------------------------------------- */

void plan_print_ranks(const Plan *p, Str *out) {
  for (size_t i = 0; i < p->groups.n; i++) {
    str_puts(out, "group {");
    for (int k = 0; k < p->groups.at[i].n; k++)
      str_printf(out, "%s%d", k ? ", " : "", p->groups.at[i].rank[k]);
    str_puts(out, "}\n");
  }
  for (size_t i = 0; i < p->layouts.n; i++) {
    str_puts(out, "layout ");
    placement_text(p->layouts.at[i].placement, out);
    str_puts(out, " ");
    sbp_list_text(&p->layouts.at[i].sbp, p->layouts.at[i].placement->n_axes, out);
    str_puts(out, "\n");
  }
}

void plan_print_cut(const PlanTensor *t, Str *out) {
  int n = t->meta.ndim;
  for (int d = 0; t->cut && d < 2 * n; d++)
    str_printf(out, "%s %lld", d == 0 ? " of" : d == n ? " at" : "", (long long)t->cut[d]);
}

bool plan_scan_group(Plan *p, Scan *s) {
  if (!scan_is(s, "group")) return false;
  const Placement *group = placement_scan(s);
  if (group->n_axes != 1) scan_fail(s, "a group is a list of ranks");
  *list_add(&p->arena, &p->groups) = (PlanGroup){group->n, group->rank};
  return true;
}

bool plan_scan_layout(Plan *p, Scan *s) {
  if (!scan_is(s, "layout")) return false;
  const Placement *placement = placement_scan(s);
  SbpList sbp = sbp_list_scan(s, placement->n_axes);
  *list_add(&p->arena, &p->layouts) = (PlanLayout){placement, sbp};
  return true;
}

void plan_scan_cut(Plan *p, Scan *s, PlanTensor *t) {
  int n = t->meta.ndim;
  if (!n || !scan_is(s, "of")) return;
  int64_t *cut = arena_array(&p->arena, int64_t, 2 * n);
  for (int d = 0; d < n; d++) cut[d] = scan_range(s, "a size", t->meta.shape[d], SHAPE_MAX);
  scan_want(s, "at");
  for (int d = 0; d < n; d++) cut[n + d] = scan_range(s, "a place", 0, cut[d] - t->meta.shape[d]);
  t->cut = cut;
}

/* -- Checks ------------------------------------------------------------------------------------ */

static int64_t arg(const PlanStep *s, const char *name) {
  for (int i = 0; i < s->op->n_params; i++)
    if (!strcmp(s->op->params[i].name, name))
      return *(const int64_t *)(const void *)((const char *)s->args + s->op->params[i].offset);
  return -1;
}

static bool exchange_fits(const Plan *p, const PlanStep *s) {
  const struct exchange_args *a = s->args;
  int64_t n = (int64_t)p->layouts.n;
  if (a->from < 0 || a->from >= n || a->to < 0 || a->to >= n) return false;
  return !sbp_list_check("", &p->layouts.at[a->from].sbp, MF_MAX_AXES, (int)a->whole.n) &&
         !sbp_list_check("", &p->layouts.at[a->to].sbp, MF_MAX_AXES, (int)a->whole.n);
}

bool plan_ranks_fit(const Plan *p, const PlanStep *s) {
  if (!op_is_comm(s->op)) return true;
  if (s->op->id == OP_exchange) return exchange_fits(p, s);
  int64_t group = arg(s, "group");
  return group >= 0 && group < (int64_t)p->groups.n;
}
