/* Boxing: how a global tensor comes from one layout into another, as a sequence of steps. Values
 * only: the same plan is run at once, put into a graph, or priced. */
#ifndef MF_BOXING_H
#define MF_BOXING_H
#include "placement.h"

/* What every group of ranks along one axis does with the tensor that its parts make up; n of them.
 * An exchange is between all ranks of two placements. */
typedef enum BoxKind {
  BOX_SLICE,          /* B to S: each keeps its part */
  BOX_GATHER,         /* S to B */
  BOX_ALL_TO_ALL,     /* S to S of another dim */
  BOX_REDUCE,         /* partial to B */
  BOX_REDUCE_SCATTER, /* partial to S */
  BOX_FIRST,          /* B to P: the first keeps it, the others have zeros */
  BOX_PAD,            /* S to P: each has its part among zeros */
  BOX_KEEP,           /* B to Pmax or Pmin: every part is the whole */
  BOX_EXCHANGE        /* from a layout without partial values to any, along intersecting parts */
} BoxKind;

/* `to`: how the tensor lies afterwards. */
typedef struct BoxStep {
  BoxKind kind;
  int axis;
  SbpList to;
} BoxStep;

enum { BOX_MAX_STEPS = 12 };

typedef struct BoxPlan {
  int n;
  double price; /* in bytes, see boxing_price */
  BoxStep step[BOX_MAX_STEPS];
} BoxPlan;

/* The price of a step along an axis of n ranks for T bytes in each group, all groups together:
 * B to S 1, S to S T (n - 1) / n, P to S and S to B T (n - 1), P to B 2 T (n - 1); whatever becomes
 * partial costs BOX_PENALTY more. An exchange costs the bytes that travel. */
#define BOX_PENALTY 1e15

/* The cheapest sequence; of equal ones the shorter, with steps along later axes first. */
int boxing_plan(const Placement *from, const SbpList *have, const Placement *to,
                const SbpList *want, int ndim, const int64_t *shape, size_t element, BoxPlan *out);
/* Its price alone; 0 for equal layouts. */
int boxing_price(const Placement *p, const SbpList *have, const SbpList *want, int ndim,
                 const int64_t *shape, size_t element, double *out);

/* What the rank at `index` of `to` gets in an exchange from the rank at `source` of `from`: false
 * when nothing, else the box's start and length in the whole tensor. Of equal copies each rank
 * takes one: its own if it has one. */
bool boxing_share(const Placement *from, const SbpList *have, int source, const Placement *to,
                  const SbpList *want, int index, int ndim, const int64_t *shape, int64_t *start,
                  int64_t *length);
/* Whether the rank at `index` holds zeros under `want`, being not the first along an axis of P. */
bool boxing_is_zero(const Placement *p, const SbpList *want, int index);

#endif
