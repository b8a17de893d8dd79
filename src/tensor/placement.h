/* Placements and layouts: on which ranks the parts of a global tensor lie, and how.
 *
 * A placement is a grid of ranks of up to MF_MAX_AXES axes; a layout adds one SBP for each axis.
 * Axes are read from the left: (S0, S0) splits dim 0 over the first axis, and each part again over
 * the second. Partial values are combined from the right: (Pmax, P) is the maximum of sums. */
#ifndef MF_PLACEMENT_H
#define MF_PLACEMENT_H
#include "meta.h"
#include "sbp.h"
#include "str.h"

enum { MF_MAX_AXES = 4 };

typedef struct Placement {
  int device, n_axes, n; /* DeviceType; axes; ranks, the product of the sizes */
  int size[MF_MAX_AXES]; /* of each axis; 1 behind the last */
  int rank[];            /* n of them, the last axis runs fastest; each rank once */
} Placement;

/* One SBP for each axis; B behind the last. */
typedef struct SbpList {
  Sbp axis[MF_MAX_AXES];
} SbpList;

/* NULL with the error set: sizes and ranks are checked. The caller frees it with mem_free. */
Placement *placement_create(int device, int n_axes, const int *size, const int *rank);
bool placement_equal(const Placement *a, const Placement *b);
/* The place of a rank in `rank`, or -1. */
int placement_index(const Placement *p, int rank);
void placement_coordinates(const Placement *p, int index, int coordinate[MF_MAX_AXES]);
/* "cpu {{0, 1}, {2, 3}}" without the device's name. */
void placement_text(const Placement *p, Str *out);

bool sbp_list_equal(const SbpList *a, const SbpList *b);
/* "(S0, B)", or "S0" for one axis; appended. */
void sbp_list_text(const SbpList *s, int n_axes, Str *out);
bool sbp_list_is_partial(const SbpList *s, int n_axes);
/* What dim a tensor of ndim dims has not: MF_EINVAL with a text. */
int sbp_list_check(const char *what, const SbpList *s, int n_axes, int ndim);

/* The part of a tensor of this shape that the rank at `index` has: where it begins and how long it
 * is, in each dim. */
void placement_part(const Placement *p, const SbpList *s, int index, int ndim, const int64_t *shape,
                    int64_t *start, int64_t *length);

#endif
