/* The placements and layouts of a state, each once. They live as long as the state, since tensors,
 * nodes and cached signatures point to them. */
#include <string.h>

#include "global.h"
#include "vec.h"

typedef struct Layouts {
  VEC(Place *) places;
  VEC(Layout *) layouts;
} Layouts;

static Layouts *layouts_of(Eager *E) {
  if (!E->layouts) E->layouts = mem_zalloc(sizeof(Layouts));
  if (!E->layouts) err_set(MF_ENOMEM, "global: out of memory");
  return E->layouts;
}

/* -- Placements -------------------------------------------------------------------------------- */

static void place_free(Place *p) {
  for (int a = 0; a < MF_MAX_AXES; a++) mem_free(p->order[a]);
  mem_free(p->placement);
  mem_free(p);
}

/* The ranks along `axis` through this one, in the order of the axis. */
static void ranks_along(const Place *p, int axis, int *ranks) {
  const Placement *q = p->placement;
  int step = 1;
  for (int a = axis + 1; a < q->n_axes; a++) step *= q->size[a];
  int first = p->index - p->coordinate[axis] * step;
  for (int i = 0; i < q->size[axis]; i++) ranks[i] = q->rank[first + i * step];
}

static int join_axis(Comm *comm, Place *p, int axis) {
  int n = p->placement->size[axis];
  int *ranks = mem_alloc(sizeof *ranks * (size_t)n * 2), *sorted;
  p->order[axis] = mem_alloc(sizeof *p->order[axis] * (size_t)n);
  if (!ranks || !p->order[axis]) {
    mem_free(ranks);
    return err_set(MF_ENOMEM, "placement: out of memory");
  }
  sorted = ranks + n;
  ranks_along(p, axis, ranks);
  for (int i = 0; i < n; i++) {
    int before = 0;
    for (int j = 0; j < n; j++) before += ranks[j] < ranks[i];
    p->order[axis][i] = before;
    sorted[before] = ranks[i];
  }
  p->group[axis] = comm_group(comm, n, sorted);
  mem_free(ranks);
  return p->group[axis] ? 0 : MF_ECOMM;
}

static int join(Comm *comm, Place *p) {
  int rc = 0;
  for (int i = 0; i < p->placement->n; i++)
    if (p->placement->rank[i] >= comm_size(comm))
      return err_set(MF_EINVAL, "placement: there is no rank %d; ranks are 0 to %d",
                     p->placement->rank[i], comm_size(comm) - 1);
  p->index = placement_index(p->placement, comm_rank(comm));
  if (p->index < 0) return 0;
  placement_coordinates(p->placement, p->index, p->coordinate);
  for (int a = 0; a < p->placement->n_axes && !rc; a++) rc = join_axis(comm, p, a);
  return rc;
}

const Place *global_place(Eager *E, int device, int n_axes, const int *size, const int *rank) {
  Layouts *all = layouts_of(E);
  Placement *form = all ? placement_create(device, n_axes, size, rank) : NULL;
  if (!form) return NULL;
  for (size_t i = 0; i < all->places.n; i++)
    if (placement_equal(all->places.at[i]->placement, form)) {
      mem_free(form);
      return all->places.at[i];
    }
  Place *p = mem_zalloc(sizeof *p);
  if (!p) {
    mem_free(form);
    err_set(MF_ENOMEM, "placement: out of memory");
    return NULL;
  }
  p->placement = form;
  if (!join(E->context->comm, p)) {
    if (vec_push(&all->places, p)) return p;
    err_set(MF_ENOMEM, "placement: out of memory");
  }
  place_free(p);
  return NULL;
}

/* -- Layouts ----------------------------------------------------------------------------------- */

static void layout_free(Layout *l) {
  mem_free(l->text);
  mem_free(l);
}

const Layout *global_layout(Eager *E, const Place *place, const SbpList *sbp) {
  Layouts *all = layouts_of(E);
  if (!all) return NULL;
  for (size_t i = 0; i < all->layouts.n; i++) {
    const Layout *l = all->layouts.at[i];
    if (l->place == place && sbp_list_equal(&l->sbp, sbp)) return l;
  }
  Layout *l = mem_zalloc(sizeof *l);
  Str text = {0};
  sbp_list_text(sbp, place->placement->n_axes, &text);
  if (l) *l = (Layout){.place = place, .sbp = *sbp, .text = text.text};
  if (l && text.text && !text.failed && vec_push(&all->layouts, l)) return l;
  str_free(&text);
  mem_free(l);
  err_set(MF_ENOMEM, "global: out of memory");
  return NULL;
}

const Layout *global_broadcast(Eager *E, const Layout *l) {
  return global_layout(E, l->place, &(SbpList){0});
}

const Layout *global_of_gradient(Eager *E, const Layout *l) {
  SbpList list = l->sbp;
  if (!sbp_list_is_partial(&list, layout_placement(l)->n_axes)) return l;
  for (int a = 0; a < MF_MAX_AXES; a++)
    if (sbp_is_partial(list.axis[a])) list.axis[a] = (Sbp){SBP_B, 0};
  return global_layout(E, l->place, &list);
}

const Layout *global_dual(Eager *E, const Layout *l) {
  SbpList list = l->sbp;
  for (int a = 0; a < layout_placement(l)->n_axes; a++) {
    if (list.axis[a].kind == SBP_B) list.axis[a].kind = SBP_P;
    else if (sbp_is_partial(list.axis[a])) list.axis[a].kind = SBP_B;
  }
  return global_layout(E, l->place, &list);
}

void global_part_shape(const Layout *l, int ndim, const int64_t *shape, int64_t *start,
                       int64_t *length) {
  placement_part(l->place->placement, &l->sbp, l->place->index, ndim, shape, start, length);
}

void global_end(Eager *E) {
  Layouts *all = E->layouts;
  if (!all) return;
  for (size_t i = 0; i < all->places.n; i++) place_free(all->places.at[i]);
  for (size_t i = 0; i < all->layouts.n; i++) layout_free(all->layouts.at[i]);
  vec_free(&all->places);
  vec_free(&all->layouts);
  mem_free(all);
}
