/* Global tensors in eager execution: layouts, conversion, and calls of ops.
 *
 * A global tensor is a Tensor whose meta is that of the whole and whose `part` is a local tensor,
 * what this rank has of it; both show one storage. Its layout belongs to the Eager and is the one
 * of its kind, so that layouts are compared by address. A rank outside of the placement has a part
 * of shape (0) and knows the whole's meta. */
#ifndef MF_GLOBAL_H
#define MF_GLOBAL_H
#include "boxing.h"
#include "comm.h"
#include "eager.h"

/* A placement as this rank sees it. */
typedef struct Place {
  Placement *placement;
  int index, coordinate[MF_MAX_AXES]; /* of this rank; -1: it is outside */
  CommGroup *group[MF_MAX_AXES]; /* the ranks along each axis through this one; NULL: outside */
  int *order[MF_MAX_AXES];       /* the position in that group of each place along the axis */
} Place;

typedef struct Layout {
  const Place *place;
  SbpList sbp;
  char *text; /* "S0", "(S0, B)" */
} Layout;

static inline bool global_is(const Tensor *t) {
  return t->layout != NULL;
}
static inline const Placement *layout_placement(const Layout *l) {
  return l->place->placement;
}

/* -- Layouts ----------------------------------------------------------------------------------- */

/* The placement of that form; the job must have been joined. NULL with the error set. */
const Place *global_place(Eager *E, int device, int n_axes, const int *size, const int *rank);
const Layout *global_layout(Eager *E, const Place *place, const SbpList *sbp);
/* The same placement with B on all axes. */
const Layout *global_broadcast(Eager *E, const Layout *l);
/* As gradients of a tensor that lies so: partial values become B. */
const Layout *global_of_gradient(Eager *E, const Layout *l);
/* As the gradient of a local tensor that is taken for a part: B and P change places. */
const Layout *global_dual(Eager *E, const Layout *l);
/* Of eager_free: cached signatures, then layouts. */
void global_forget(Eager *E);
void global_end(Eager *E);

/* -- Tensors ----------------------------------------------------------------------------------- */

/* A new handle; takes the count of `part`, also on failure. */
Tensor *global_wrap(Eager *E, const Meta *whole, Tensor *part, const Layout *l);
/* x lies as `l` says, on l's placement; x itself, with one more count, when it does so already. The
 * gradient comes back as `grad`, or, for NULL, as global_of_gradient has it. Recorded. */
Tensor *global_convert(Eager *E, Tensor *x, const Layout *l, const Layout *grad);
/* The local tensors x of all ranks as parts of one. All ranks of the job call it. `check`: shapes
 * and, where they must agree, values are compared between the ranks; else parts are taken to be of
 * one size. Recorded. */
Tensor *global_from_local(Eager *E, Tensor *x, const Layout *l, bool check);
/* Of a whole that all ranks have, each keeps its part; not compared and not recorded. */
Tensor *global_distribute(Eager *E, Tensor *whole, const Layout *l);
/* This rank's part, in the same memory; recorded. */
Tensor *global_to_local(Eager *E, Tensor *x);
/* A local tensor with the whole; not recorded. */
Tensor *global_gather(Eager *E, Tensor *x);
/* This rank's part of x under `to`, counted; `own`: in memory that it does not share with x. */
Tensor *global_box(Eager *E, Tensor *x, const Layout *to, bool own);
/* The same where only the part is at hand. */
Tensor *global_box_part(Eager *E, Tensor *part, const Meta *whole, const Layout *from,
                        const Layout *to, bool own);
/* Copies what lies as `from` says into t, whose layout stays. */
int global_put_back(Eager *E, Tensor *t, Tensor *part, const Layout *from);
/* t, which nobody else sees, has its part in one piece. */
int global_pack(Eager *E, Tensor *t);
/* While a step is traced, y (taken) is what `op`, one of OP_BOX, makes of x: itself, recorded. */
Tensor *global_trace_box(Eager *E, int op, Tensor *x, const void *args, Tensor *y);
/* A handle of that form without a part, whose value is known when the step runs. */
Tensor *global_open(Eager *E, const Meta *whole, const Layout *l);
/* The shape of this rank's part. */
void global_part_shape(const Layout *l, int ndim, const int64_t *shape, int64_t *start,
                       int64_t *length);
/* Zeros where this rank has a part. */
Tensor *global_zeros(Eager *E, const Meta *whole, const Layout *l);

/* -- Calls ------------------------------------------------------------------------------------- */

/* Runs a call of which an input is global, or which is to make its output as c->target says; the
 * outputs have their logical metas. */
int global_run(Eager *E, EagerCall *c);
/* The same for ops whose output's shape depends on data; makes the outputs. */
int global_run_data(Eager *E, EagerCall *c);

#endif
