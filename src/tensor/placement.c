/* Placements, layouts, and which part of a tensor they give to a rank. */
#include <string.h>

#include "err.h"
#include "mem.h"
#include "placement.h"

static int check(int n_axes, const int *size, const int *rank) {
  int64_t n = 1;
  if (n_axes < 1 || n_axes > MF_MAX_AXES)
    return err_set(MF_EINVAL, "placement: %d axes, there can be 1 to %d", n_axes, MF_MAX_AXES);
  for (int a = 0; a < n_axes; a++) {
    n *= size[a];
    if (size[a] < 1 || n > 1 << 20)
      return err_set(MF_EINVAL, "placement: axis %d has %d ranks", a, size[a]);
  }
  for (int i = 0; i < n; i++) {
    if (rank[i] < 0) return err_set(MF_EINVAL, "placement: %d is no rank", rank[i]);
    for (int j = 0; j < i; j++)
      if (rank[i] == rank[j])
        return err_set(MF_EINVAL, "placement: rank %d is there twice", rank[i]);
  }
  return 0;
}

Placement *placement_create(int device, int n_axes, const int *size, const int *rank) {
  if (check(n_axes, size, rank)) return NULL;
  int n = 1;
  for (int a = 0; a < n_axes; a++) n *= size[a];
  Placement *p = mem_alloc(sizeof *p + sizeof *rank * (size_t)n);
  if (!p) {
    err_set(MF_ENOMEM, "placement: out of memory");
    return NULL;
  }
  *p = (Placement){.device = device, .n_axes = n_axes, .n = n};
  for (int a = 0; a < MF_MAX_AXES; a++) p->size[a] = a < n_axes ? size[a] : 1;
  memcpy(p->rank, rank, sizeof *rank * (size_t)n);
  return p;
}

bool placement_equal(const Placement *a, const Placement *b) {
  return a->device == b->device && a->n_axes == b->n_axes && a->n == b->n &&
         !memcmp(a->size, b->size, sizeof a->size) &&
         !memcmp(a->rank, b->rank, sizeof *a->rank * (size_t)a->n);
}

int placement_index(const Placement *p, int rank) {
  for (int i = 0; i < p->n; i++)
    if (p->rank[i] == rank) return i;
  return -1;
}

void placement_coordinates(const Placement *p, int index, int coordinate[MF_MAX_AXES]) {
  for (int a = MF_MAX_AXES - 1; a >= 0; a--) {
    coordinate[a] = index % p->size[a];
    index /= p->size[a];
  }
}

static int put_axis(const Placement *p, int axis, int at, Str *out) {
  str_puts(out, "{");
  for (int i = 0; i < p->size[axis]; i++) {
    if (i) str_puts(out, ", ");
    if (axis < p->n_axes - 1) at = put_axis(p, axis + 1, at, out);
    else str_printf(out, "%d", p->rank[at++]);
  }
  str_puts(out, "}");
  return at;
}

void placement_text(const Placement *p, Str *out) {
  put_axis(p, 0, 0, out);
}

bool sbp_list_equal(const SbpList *a, const SbpList *b) {
  return !memcmp(a, b, sizeof *a);
}

void sbp_list_text(const SbpList *s, int n_axes, Str *out) {
  char text[SBP_TEXT_MAX];
  if (n_axes > 1) str_puts(out, "(");
  for (int a = 0; a < n_axes; a++) {
    if (a) str_puts(out, ", ");
    str_puts(out, sbp_text(s->axis[a], text));
  }
  if (n_axes > 1) str_puts(out, ")");
}

bool sbp_list_is_partial(const SbpList *s, int n_axes) {
  for (int a = 0; a < n_axes; a++)
    if (sbp_is_partial(s->axis[a])) return true;
  return false;
}

int sbp_list_check(const char *what, const SbpList *s, int n_axes, int ndim) {
  for (int a = 0; a < n_axes; a++)
    if (s->axis[a].kind == SBP_S && s->axis[a].dim >= ndim)
      return err_set(MF_EINVAL, "%s: S%d splits a dim that a tensor of %d dims has not", what,
                     s->axis[a].dim, ndim);
  return 0;
}

void placement_part(const Placement *p, const SbpList *s, int index, int ndim, const int64_t *shape,
                    int64_t *start, int64_t *length) {
  int at[MF_MAX_AXES];
  placement_coordinates(p, index, at);
  for (int d = 0; d < ndim; d++) start[d] = 0, length[d] = shape[d];
  for (int a = 0; a < p->n_axes; a++) {
    if (s->axis[a].kind != SBP_S) continue;
    int d = s->axis[a].dim;
    int64_t within;
    sbp_part(length[d], p->size[a], at[a], &within, &length[d]);
    start[d] += within;
  }
}
