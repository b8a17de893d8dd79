/* Plans of conversion: the cheapest path through the layouts between two.
 *
 * A state is an SbpList over the source's placement. Moves change one axis. A move along the last
 * axis concerns the parts that the axes before it have made, and is always possible; along an
 * earlier axis it is, if what the later axes do commutes with it: they must neither split the dim
 * that this axis splits, before or after, nor hold partial values of another kind. From any state
 * without partial values one exchange leads to the end, so a path always exists: sums and maxima
 * are formed from the last axis on. */
#include <string.h>

#include "boxing.h"
#include "err.h"
#include "mem.h"

enum { CHOICES_MAX = MF_MAX_DIMS + 4 };

typedef struct Search {
  const Placement *from, *to;
  SbpList have, want;
  int ndim;
  const int64_t *shape;
  double element;
  bool same; /* one placement: the end is one of the states */
  int n_choices[MF_MAX_AXES];
  Sbp choice[MF_MAX_AXES][CHOICES_MAX];
  int n_states, target; /* target: n_states where the placements differ */
} Search;

typedef struct Visit {
  double price;
  int before, steps; /* before: -1 for the start */
  uint8_t kind;
  int8_t axis;
  bool known, done;
} Visit;

/* -- States ------------------------------------------------------------------------------------ */

static void add_choice(Search *s, int axis, Sbp sbp) {
  for (int i = 0; i < s->n_choices[axis]; i++)
    if (sbp_equal(s->choice[axis][i], sbp)) return;
  if (s->n_choices[axis] < CHOICES_MAX) s->choice[axis][s->n_choices[axis]++] = sbp;
}

/* An axis may be B, split along any dim that either end splits, or what it is at an end. */
static void find_choices(Search *s) {
  s->n_states = 1;
  for (int a = 0; a < s->from->n_axes; a++) {
    s->n_choices[a] = 0;
    add_choice(s, a, (Sbp){SBP_B, 0});
    add_choice(s, a, s->have.axis[a]);
    if (s->same) add_choice(s, a, s->want.axis[a]);
    for (int b = 0; b < MF_MAX_AXES; b++) {
      if (s->have.axis[b].kind == SBP_S) add_choice(s, a, s->have.axis[b]);
      if (s->want.axis[b].kind == SBP_S) add_choice(s, a, s->want.axis[b]);
    }
    s->n_states *= s->n_choices[a];
  }
}

static SbpList list_of(const Search *s, int state) {
  SbpList list = {0};
  for (int a = 0; a < s->from->n_axes; a++) {
    list.axis[a] = s->choice[a][state % s->n_choices[a]];
    state /= s->n_choices[a];
  }
  return list;
}

static int state_of(const Search *s, const SbpList *list) {
  int state = 0;
  for (int a = s->from->n_axes - 1; a >= 0; a--) {
    int i = 0;
    while (!sbp_equal(s->choice[a][i], list->axis[a])) i++;
    state = state * s->n_choices[a] + i;
  }
  return state;
}

/* -- Moves ------------------------------------------------------------------------------------- */

static bool commutes(Sbp a, Sbp b) {
  if (a.kind == SBP_S && b.kind == SBP_S) return a.dim != b.dim;
  return !(sbp_is_partial(a) && sbp_is_partial(b)) || a.kind == b.kind;
}

/* The step from a to b on one axis of n ranks, and its price for T bytes; false: there is none. */
static bool one_axis(Sbp a, Sbp b, int n, double T, BoxKind *kind, double *price) {
  double others = n - 1;
  if (a.kind == SBP_B) {
    *kind = b.kind == SBP_S ? BOX_SLICE : b.kind == SBP_P ? BOX_FIRST : BOX_KEEP;
    *price = sbp_is_partial(b) ? 1 + BOX_PENALTY : 1;
    return b.kind != SBP_B;
  }
  if (a.kind == SBP_S) {
    *kind = b.kind == SBP_S ? BOX_ALL_TO_ALL : b.kind == SBP_B ? BOX_GATHER : BOX_PAD;
    *price = b.kind == SBP_S ? T * others / n : b.kind == SBP_B ? T * others : 1 + BOX_PENALTY;
    return b.kind == SBP_S || b.kind == SBP_B || b.kind == SBP_P;
  }
  *kind = b.kind == SBP_S ? BOX_REDUCE_SCATTER : BOX_REDUCE;
  *price = b.kind == SBP_S ? T * others : 2 * T * others;
  return b.kind == SBP_S || b.kind == SBP_B;
}

/* The bytes of what each group along `axis` makes up, times the groups. */
static double bytes_along(const Search *s, const SbpList *list, int axis) {
  double bytes = s->element, groups = 1;
  for (int d = 0; d < s->ndim; d++) bytes *= (double)s->shape[d];
  for (int a = 0; a < s->from->n_axes; a++)
    if (a != axis && list->axis[a].kind != SBP_S) groups *= s->from->size[a];
  return bytes * groups;
}

static bool can_move(const Search *s, const SbpList *list, int axis, Sbp to) {
  for (int a = axis + 1; a < s->from->n_axes; a++)
    if (s->from->size[a] > 1 &&
        !(commutes(list->axis[axis], list->axis[a]) && commutes(to, list->axis[a])))
      return false;
  return true;
}

static double exchange_price(const Search *s, const SbpList *have) {
  double bytes = 0;
  int64_t start[MF_MAX_DIMS], length[MF_MAX_DIMS];
  for (int i = 0; i < s->to->n; i++) {
    for (int k = 0; k < s->from->n; k++) {
      if (s->from->rank[k] == s->to->rank[i]) continue;
      if (boxing_share(s->from, have, k, s->to, &s->want, i, s->ndim, s->shape, start, length))
        bytes += (double)shape_numel(s->ndim, length) * s->element;
    }
  }
  if (sbp_list_is_partial(&s->want, s->to->n_axes)) bytes += BOX_PENALTY;
  return bytes + 1;
}

/* -- The search -------------------------------------------------------------------------------- */

static void offer(Visit *v, const Visit *from, int before, double price, BoxKind kind, int axis) {
  double total = from->price + price;
  if (v->done || from->steps == BOX_MAX_STEPS) return;
  if (v->known && (v->price < total || (v->price == total && v->steps <= from->steps + 1))) return;
  *v = (Visit){.price = total,
               .before = before,
               .steps = from->steps + 1,
               .kind = (uint8_t)kind,
               .axis = (int8_t)axis,
               .known = true};
}

static void moves_from(const Search *s, Visit *visits, int state) {
  SbpList list = list_of(s, state);
  const Visit *v = &visits[state];
  for (int a = s->from->n_axes - 1; a >= 0; a--) {
    double T = bytes_along(s, &list, a);
    for (int i = 0; i < s->n_choices[a]; i++) {
      Sbp to = s->choice[a][i];
      BoxKind kind;
      double price;
      if (sbp_equal(to, list.axis[a]) || !can_move(s, &list, a, to)) continue;
      if (!one_axis(list.axis[a], to, s->from->size[a], T, &kind, &price)) continue;
      SbpList next = list;
      next.axis[a] = to;
      offer(&visits[state_of(s, &next)], v, state, price, kind, a);
    }
  }
  if (sbp_list_is_partial(&list, s->from->n_axes) || state == s->target) return;
  if (s->same && s->from->n_axes == 1) return; /* each pair has a step of its own */
  offer(&visits[s->target], v, state, exchange_price(s, &list), BOX_EXCHANGE, -1);
}

static int cheapest(const Visit *visits, int n) {
  int best = -1;
  for (int i = 0; i < n; i++)
    if (visits[i].known && !visits[i].done && (best < 0 || visits[i].price < visits[best].price))
      best = i;
  return best;
}

static int search(const Search *s, Visit *visits, BoxPlan *out) {
  visits[state_of(s, &s->have)] = (Visit){.before = -1, .known = true};
  int at;
  while ((at = cheapest(visits, s->n_states + 1)) >= 0 && at != s->target) {
    visits[at].done = true;
    moves_from(s, visits, at);
  }
  if (at < 0) return err_set(MF_EUNSUPPORTED, "boxing: there is no way between the layouts");
  out->price = visits[at].price;
  out->n = visits[at].steps;
  for (int k = out->n - 1; k >= 0; k--, at = visits[at].before) {
    out->step[k] = (BoxStep){.kind = (BoxKind)visits[at].kind, .axis = visits[at].axis};
    out->step[k].to =
        at == s->n_states || visits[at].kind == BOX_EXCHANGE ? s->want : list_of(s, at);
  }
  return 0;
}

int boxing_plan(const Placement *from, const SbpList *have, const Placement *to,
                const SbpList *want, int ndim, const int64_t *shape, size_t element, BoxPlan *out) {
  enum { SMALL = 64 };
  Visit small[SMALL], *visits = small;
  Search s = {.from = from,
              .to = to,
              .have = *have,
              .want = *want,
              .ndim = ndim,
              .shape = shape,
              .element = (double)element,
              .same = from == to || placement_equal(from, to)};
  out->n = 0;
  out->price = 0;
  if (s.same && sbp_list_equal(have, want)) return 0;
  find_choices(&s);
  s.target = s.same ? state_of(&s, want) : s.n_states;
  size_t bytes = sizeof *visits * (size_t)(s.n_states + 1);
  if (s.n_states >= SMALL && !(visits = mem_alloc(bytes)))
    return err_set(MF_ENOMEM, "boxing: out of memory");
  memset(visits, 0, bytes);
  int rc = search(&s, visits, out);
  if (visits != small) mem_free(visits);
  return rc;
}

int boxing_price(const Placement *p, const SbpList *have, const SbpList *want, int ndim,
                 const int64_t *shape, size_t element, double *out) {
  *out = 0;
  if (sbp_list_equal(have, want)) return 0;
  if (p->n_axes == 1) {
    BoxKind kind;
    double T = (double)element;
    for (int d = 0; d < ndim; d++) T *= (double)shape[d];
    if (one_axis(have->axis[0], want->axis[0], p->size[0], T, &kind, out)) return 0;
  }
  BoxPlan plan;
  int rc = boxing_plan(p, have, p, want, ndim, shape, element, &plan);
  *out = plan.price;
  return rc;
}

/* -- Exchanges --------------------------------------------------------------------------------- */

bool boxing_is_zero(const Placement *p, const SbpList *want, int index) {
  int at[MF_MAX_AXES];
  placement_coordinates(p, index, at);
  for (int a = 0; a < p->n_axes; a++)
    if (want->axis[a].kind == SBP_P && at[a]) return true;
  return false;
}

/* Which of the equal copies a rank has: their number, and this one's place among them. */
static void copies(const Placement *p, const SbpList *s, int index, int *n, int *which) {
  int at[MF_MAX_AXES];
  placement_coordinates(p, index, at);
  *n = 1, *which = 0;
  for (int a = 0; a < p->n_axes; a++) {
    if (s->axis[a].kind == SBP_S) continue;
    *which = *which * p->size[a] + at[a];
    *n *= p->size[a];
  }
}

/* Whether the two ranks of the placement hold the same part. */
static bool same_part(const Placement *p, const SbpList *s, int a, int b) {
  int x[MF_MAX_AXES], y[MF_MAX_AXES];
  placement_coordinates(p, a, x);
  placement_coordinates(p, b, y);
  for (int k = 0; k < p->n_axes; k++)
    if (s->axis[k].kind == SBP_S && x[k] != y[k]) return false;
  return true;
}

bool boxing_share(const Placement *from, const SbpList *have, int source, const Placement *to,
                  const SbpList *want, int index, int ndim, const int64_t *shape, int64_t *start,
                  int64_t *length) {
  int n, which, own = placement_index(from, to->rank[index]);
  int64_t their_start[MF_MAX_DIMS], their_length[MF_MAX_DIMS];
  if (boxing_is_zero(to, want, index)) return false;
  copies(from, have, source, &n, &which);
  if (own >= 0 && same_part(from, have, own, source)) {
    if (own != source) return false;
  } else if (which != index % n) {
    return false;
  }
  placement_part(from, have, source, ndim, shape, their_start, their_length);
  placement_part(to, want, index, ndim, shape, start, length);
  for (int d = 0; d < ndim; d++) {
    int64_t end = start[d] + length[d], their_end = their_start[d] + their_length[d];
    if (their_start[d] > start[d]) start[d] = their_start[d];
    length[d] = (end < their_end ? end : their_end) - start[d];
    if (length[d] <= 0) return false;
  }
  return true;
}
