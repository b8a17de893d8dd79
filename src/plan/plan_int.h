/* What the files of this folder share. */
#ifndef MF_PLAN_INT_H
#define MF_PLAN_INT_H
#include "op_text.h"
#include "plan.h"

/* ranks.c: groups and layouts as the graph has them, and as text. */
void plan_take_ranks(Plan *p, const Graph *g);
void plan_print_ranks(const Plan *p, Str *out);
void plan_print_cut(const PlanTensor *t, Str *out);
/* Each reads one if it comes next. */
bool plan_scan_group(Plan *p, Scan *s);
bool plan_scan_layout(Plan *p, Scan *s);
void plan_scan_cut(Plan *p, Scan *s, PlanTensor *t);
/* Whether the step's group and layouts are there, and fit. */
bool plan_ranks_fit(const Plan *p, const PlanStep *s);

#endif
