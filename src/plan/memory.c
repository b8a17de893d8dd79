/* Offsets in the block: registers by size, the largest first, each at the lowest place that no
 * register holds whose lifetime meets its own. */
#include <stdlib.h>

#include "plan.h"

static int by_size(const void *a, const void *b) {
  const PlanRegister *x = *(PlanRegister *const *)a, *y = *(PlanRegister *const *)b;
  if (x->bytes != y->bytes) return x->bytes > y->bytes ? -1 : 1;
  return x < y ? -1 : x > y;
}

static int by_offset(const void *a, const void *b) {
  const PlanRegister *x = *(PlanRegister *const *)a, *y = *(PlanRegister *const *)b;
  return x->offset < y->offset ? -1 : x->offset > y->offset;
}

static int64_t aligned(int64_t bytes) {
  return (bytes + PLAN_ALIGN - 1) & ~(int64_t)(PLAN_ALIGN - 1);
}

void plan_memory(Plan *p) {
  size_t n = 0;
  PlanRegister **order = arena_array(&p->arena, PlanRegister *, p->registers.n);
  PlanRegister **met = arena_array(&p->arena, PlanRegister *, p->registers.n);
  for (size_t i = 0; i < p->registers.n; i++)
    if (p->registers.at[i].home == PLAN_BLOCK) order[n++] = &p->registers.at[i];
  qsort(order, n, sizeof *order, by_size);
  for (size_t i = 0; i < n; i++) {
    PlanRegister *r = order[i];
    size_t n_met = 0;
    for (size_t j = 0; j < i; j++)
      if (order[j]->first <= r->last && order[j]->last >= r->first) met[n_met++] = order[j];
    qsort(met, n_met, sizeof *met, by_offset);
    r->offset = 0;
    for (size_t j = 0; j < n_met; j++) {
      if (met[j]->offset >= r->offset + aligned(r->bytes)) break;
      int64_t behind = met[j]->offset + aligned(met[j]->bytes);
      if (behind > r->offset) r->offset = behind;
    }
    if (r->offset + aligned(r->bytes) > p->block_bytes)
      p->block_bytes = r->offset + aligned(r->bytes);
  }
}
