/* What the files of this folder share. */
#ifndef MF_PLAN_INT_H
#define MF_PLAN_INT_H
#include "op_text.h"
#include "plan.h"

/* What a register takes of the block: all buffers, each aligned. */
int64_t plan_size(const PlanRegister *r);
/* The steps during which its bytes are its own: those that touch it, or all of them where tasks
 * that are not in one order of steps do. */
void plan_lifetime(const Plan *p, const PlanRegister *r, int *first, int *last);

#endif
