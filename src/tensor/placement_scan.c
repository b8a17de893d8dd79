/* Reading placements and layouts; see placement_scan.h. */
#include "placement_scan.h"

#include "err.h"
#include "mem.h"

enum { MOST_RANKS = 1 << 16 };

typedef struct Grid {
  int n_axes, size[MF_MAX_AXES];
  LIST(int) ranks;
} Grid;

/* A list of ranks, or of such lists, that is at depth `axis`. */
static void scan_grid(Scan *s, Grid *grid, int axis) {
  int n = 0;
  if (axis == MF_MAX_AXES) scan_fail(s, "more than %d axes", MF_MAX_AXES);
  scan_want(s, "{");
  do {
    while (*s->at == ' ') s->at++;
    bool inner = *s->at == '{';
    if (grid->n_axes && inner != (axis + 1 < grid->n_axes)) scan_fail(s, "no grid of ranks");
    if (inner) {
      scan_grid(s, grid, axis + 1);
    } else {
      grid->n_axes = axis + 1;
      if (grid->ranks.n >= MOST_RANKS) scan_fail(s, "too many ranks");
      *list_add(s->arena, &grid->ranks) = (int)scan_range(s, "a rank", 0, MOST_RANKS);
    }
    n++;
  } while (scan_is(s, ","));
  scan_want(s, "}");
  if (grid->size[axis] && grid->size[axis] != n) scan_fail(s, "no grid of ranks");
  grid->size[axis] = n;
}

const Placement *placement_scan(Scan *s) {
  Grid grid = {0};
  scan_grid(s, &grid, 0);
  Placement *p = placement_create(DEVICE_CPU, grid.n_axes, grid.size, grid.ranks.at);
  if (!p) scan_fail(s, "%s", err_text());
  const Placement *own = arena_copy(s->arena, p, sizeof *p + sizeof(int) * (size_t)p->n);
  mem_free(p);
  return own;
}

static Sbp scan_axis(Scan *s) {
  Sbp sbp;
  if (sbp_parse(scan_word(s), &sbp)) scan_fail(s, "%s", err_text());
  return sbp;
}

SbpList sbp_list_scan(Scan *s, int n_axes) {
  SbpList list = {0};
  if (n_axes == 1) {
    list.axis[0] = scan_axis(s);
    return list;
  }
  scan_want(s, "(");
  for (int a = 0; a < n_axes; a++) {
    if (a) scan_want(s, ",");
    list.axis[a] = scan_axis(s);
  }
  scan_want(s, ")");
  return list;
}
