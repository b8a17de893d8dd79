/* Views on the tape, and in-place writes through them.
 *
 * A view remembers its base (never itself a view). A recorded write into view v of base b makes a
 * node COPY_SLICES for b, whose first input is what b was and whose `inner` is the op on the view.
 * Every view of b then finds b's count of such writes (`history`) different from its own, and gets
 * a fresh VIEW node over b when it is used next. */
#include <string.h>

#include "call_int.h"
#include "mem.h"
#include "op_args.h"
#include "op_ids.h"
#include "tape_int.h"

/* -- Recording --------------------------------------------------------------------------------- */

void tape_view_of(Eager *E, Tensor *y, Tensor *x) {
  y->storage = x->storage;
  storage_retain(y->storage);
  y->uncounted = x->uncounted;
  y->severed = x->severed;
  y->blind = x->blind || !E->grad_enabled;
  Autograd *ag = tensor_autograd(y);
  Tensor *base = tensor_base(x);
  ag->base = tensor_retain(base);
  ag->history = base->ag ? base->ag->history : 0; /* the tape reaches y through x as it is now */
}

static void list_set(IntList *list, int n, const int64_t *v) {
  list->n = n;
  memcpy(list->v, v, sizeof(int64_t) * (size_t)n);
}

static Geometry *geometry(const Tensor *view, const Tensor *base) {
  if (view->storage != base->storage) {
    err_set(MF_EINVAL, "a view is used whose base got other memory by .data since; make it anew");
    return NULL;
  }
  if (!shape_is_dense(base->m.ndim, base->m.shape, base->m.stride)) {
    err_set(MF_EUNSUPPORTED,
            "in-place write with a gradient through a view of memory with gaps; clone it first");
    return NULL;
  }
  Geometry *g = mem_alloc(sizeof *g);
  if (!g) {
    err_set(MF_ENOMEM, "out of memory for the tape");
    return NULL;
  }
  list_set(&g->base_stride, base->m.ndim, base->m.stride);
  list_set(&g->size, view->m.ndim, view->m.shape);
  list_set(&g->stride, view->m.ndim, view->m.stride);
  g->offset = view->m.offset - base->m.offset;
  return g;
}

int tape_refresh(Eager *E, Tensor *t) {
  if (!tensor_is_stale(t)) return 0;
  Tensor *base = t->ag->base;
  Node *n = tape_node_new(E, NODE_VIEW, NULL, 1, 1, 0, t->m.ndim + base->m.ndim, NULL);
  if (!n) return MF_ENOMEM;
  tape_meta(n, &n->in_meta[0], base);
  tape_meta(n, &n->out_meta[0], t);
  n->geometry = geometry(t, base);
  int rc = n->geometry ? tape_edge(E, base, &n->next[0]) : MF_EUNSUPPORTED;
  if (!rc) {
    tape_attach(t, n, 0);
    t->ag->history = base->ag->history;
  }
  tape_node_release(n);
  return rc;
}

static const char *form(const EagerCall *c) {
  return c->into ? "_" : "";
}

static int refuse_leaf(const EagerCall *c, const Tensor *t, const char *what) {
  char name[64];
  return err_set(MF_EINVAL,
                 "%s%s: %s is %s that requires a gradient and would be written in place; do it "
                 "inside mf.no_grad, or on a clone",
                 c->op->name, form(c), call_name_of(c, t, name, sizeof name), what);
}

static bool is_tracked_leaf(const Tensor *t) {
  return t->ag && t->ag->requires_grad && !t->ag->node;
}

int tape_check_inplace(EagerCall *c, Tensor *t, bool tracked) {
  Tensor *base = tensor_base(t);
  char name[64];
  if (is_tracked_leaf(t)) return refuse_leaf(c, t, "a leaf");
  if (is_tracked_leaf(base)) return refuse_leaf(c, t, "a view of a leaf");
  if (t->blind && (base == t ? t->ag && t->ag->node : tracked || tensor_requires_grad(base)))
    return err_set(
        MF_EINVAL,
        "%s%s: %s is a view made inside mf.no_grad and would be written in place outside of it: "
        "the gradient would be lost; make the view outside",
        c->op->name, form(c), call_name_of(c, t, name, sizeof name));
  return 0;
}

/* The base's node: as the op on the view, but that the first input is the base. */
static Node *copy_slices(Eager *E, Tensor *base, Tensor *view, Node *inner) {
  Node *n = tape_node_new(E, NODE_COPY_SLICES, NULL, inner->n_in, 1, 0, 2 * base->m.ndim, NULL);
  if (!n) return NULL;
  n->inner = tape_node_retain(inner);
  tape_meta(n, &n->in_meta[0], base);
  tape_meta(n, &n->out_meta[0], base);
  for (int k = 1; k < inner->n_in; k++) {
    n->next[k].node = tape_node_retain(inner->next[k].node);
    n->next[k].output = inner->next[k].output;
    n->in_meta[k] = inner->in_meta[k];
  }
  n->geometry = geometry(view, base);
  if (n->geometry && !tape_edge(E, base, &n->next[0])) return n;
  tape_node_release(n);
  return NULL;
}

int tape_rebase(Eager *E, Tensor *written, Node *n, int output) {
  Tensor *base = written->ag ? written->ag->base : NULL;
  if (!base) {
    tape_attach(written, n, output);
    written->ag->history++;
    return 0;
  }
  Node *copy = copy_slices(E, base, written, n);
  if (!copy) return MF_ENOMEM;
  tape_attach(base, copy, 0);
  base->ag->history++;
  tape_node_release(copy);
  return 0;
}

/* -- The way back ------------------------------------------------------------------------------ */

static Tensor *slice_of(Eager *E, Tensor *g, const Geometry *at) {
  struct slice_base_args args = {at->base_stride, at->size, at->stride, at->offset};
  return eager_op(E, OP_slice_base, 1, &g, &args);
}

/* g with src at the view's place. */
static Tensor *scatter_into(Eager *E, Tensor *g, Tensor *src, const Geometry *at) {
  struct scatter_base_args args = {at->base_stride, at->size, at->stride, at->offset};
  return eager_op(E, OP_scatter_base, 2, (Tensor *[]){g, src}, &args);
}

/* Whether two elements of the view may be one place in the base: a dim steps less far than those
 * that step no farther reach together. */
static bool may_overlap(const Geometry *at) {
  for (int d = 0; d < at->size.n; d++) {
    int64_t reach = 0;
    for (int k = 0; k < at->size.n; k++)
      if (k != d && at->stride.v[k] <= at->stride.v[d])
        reach += (at->size.v[k] - 1) * at->stride.v[k];
    if (at->size.v[d] > 1 && at->stride.v[d] <= reach) return true;
  }
  return false;
}

/* Each place of the base gets what all elements of the view there give together. */
static Tensor *add_up(Eager *E, const Node *n, Tensor *g) {
  const Geometry *at = n->geometry;
  struct strided_add_args args = {.size = {.n = n->in_meta[0].ndim},
                                  .stride = at->base_stride,
                                  .g_stride = at->stride,
                                  .g_offset = at->offset,
                                  .copies = 1};
  memcpy(args.size.v, n->in_meta[0].shape, sizeof(int64_t) * (size_t)args.size.n);
  return eager_op(E, OP_strided_add, 1, &g, &args);
}

/* A view of a base that was written: the base's gradient is zero but for the view's place. */
int tape_run_view(Eager *E, Node *n, Tensor *const *gout, Tensor **gin) {
  if (may_overlap(n->geometry)) {
    gin[0] = add_up(E, n, gout[0]);
    return gin[0] ? 0 : MF_ENOMEM;
  }
  Tensor *zero = tape_zeros(E, &n->in_meta[0]);
  gin[0] = zero ? scatter_into(E, zero, gout[0], n->geometry) : NULL;
  tensor_release(zero);
  return gin[0] ? 0 : MF_ENOMEM;
}

/* *g, the gradient of the view before the write (NULL: zero), becomes that of the base. */
static int widen(Eager *E, Node *n, Tensor *whole, Tensor **g) {
  GradMeta m = n->inner->in_meta[0];
  if (!*g) *g = tape_zeros(E, &m);
  int rc = *g ? tape_fit(E, n->inner, 0, g) : MF_ENOMEM;
  Tensor *wide = rc ? NULL : scatter_into(E, whole, *g, n->geometry);
  tensor_release(*g);
  *g = wide;
  return wide ? 0 : rc ? rc : MF_ENOMEM;
}

/* The op's gradient sees the view's place of the base's; there the base's becomes that of the view
 * before the write. */
int tape_run_copy_slices(Eager *E, Node *n, Tensor *const *gout, const bool *need, Tensor **gin) {
  Tensor *g = slice_of(E, gout[0], n->geometry);
  if (!g) return MF_ENOMEM;
  int rc = tape_run_op(E, n->inner, &g, need, gin);
  if (!rc && need[0]) rc = widen(E, n, gout[0], &gin[0]);
  tensor_release(g);
  return rc;
}
