/* The tape: recording calls, leaves, views and in-place writes.
 *
 * A node stands for one recorded call; its edges lead to the nodes that made its inputs, or to the accumulate node of a leaf. Numbers (`seq`)
 * grow in program order, so that every consumer has a higher number than what it consumes; the backward pass relies on nothing else.
 *
 * In-place writes through views. A view remembers its base (never itself a view). A recorded write into view v of base b makes a node
 * COPY_SLICES for b whose first input is what b was and whose `inner` is the op on the view. Every view of b then finds b's count of such
 * writes (`history`) different from its own, and gets a fresh VIEW node over b when it is used next.
 *
 * What is kept. From the gradient lines the build knows which inputs and outputs each op's gradient reads; only those are kept, as aliases with the
 * storage's version at the time. An alias of an output has no node (it would be a circle); an alias of an input has the input's node of
 * that moment, so that a later in-place write to the handle cannot close one either. */
#include <string.h>

#include "eager.h"
#include "mem.h"
#include "op_ids.h"

/* -- Nodes ------------------------------------------------------------------------------------------------------------------- */

static Node *node_new(Eager *E, NodeKind kind, const Op *op, int n_in, int n_out, const void *args) {
  size_t args_size = args ? op->args_size : 0;
  size_t bytes = sizeof(Node) + sizeof(Edge) * (size_t)n_in + sizeof(GradMeta) * (size_t)(n_in + n_out) +
                 sizeof(Saved) * (size_t)(n_in + n_out) + args_size;
  Node *n = mem_alloc(bytes);
  if (!n) {
    err_set(MF_ENOMEM, "out of memory for the tape");
    return NULL;
  }
  *n = (Node){.E = E, .refs = 1, .kind = (uint8_t)kind, .op = op, .n_in = n_in, .n_out = n_out};
  n->seq = kind == NODE_ACCUMULATE ? 0 : E->next_seq++;
  if (E->anomaly && E->where) n->where = E->where(E->where_ud);
  n->next = (Edge *)(n + 1);
  n->in_meta = (GradMeta *)(n->next + n_in);
  n->out_meta = n->in_meta + n_in;
  n->saved = (Saved *)(n->out_meta + n_out);
  memset(n->next, 0, sizeof(Edge) * (size_t)n_in);
  memset(n->saved, 0, sizeof(Saved) * (size_t)(n_in + n_out));
  if (args) n->args = memcpy(n->saved + n_in + n_out, args, args_size);
  return n;
}

static void node_free(Node *n) {
  for (int k = 0; k < n->n_in; k++) tape_node_release(n->next[k].node);
  for (int k = 0; k < n->n_in + n->n_out; k++) tensor_release(n->saved[k].t);
  if (n->leaf) n->leaf->ag->accumulate = NULL;
  tape_node_release(n->inner);
  mem_free(n->geometry);
  mem_free(n);
}

/* Freeing a node releases others; a list in place of recursion, since a chain may be millions long. */
void tape_node_release(Node *n) {
  if (!n || --n->refs > 0) return;
  Eager *E = n->E;
  n->free_next = E->free_list;
  E->free_list = n;
  if (E->freeing) return;
  E->freeing = true;
  while (E->free_list) {
    Node *next = E->free_list;
    E->free_list = next->free_next;
    node_free(next);
  }
  E->freeing = false;
}

static void grad_meta(GradMeta *g, const Meta *m) {
  g->ndim = m->ndim;
  g->dtype = m->dtype;
  g->device = m->device;
  memcpy(g->shape, m->shape, sizeof(int64_t) * (size_t)m->ndim);
}

static Node *node_retain(Node *n) {
  if (n) n->refs++;
  return n;
}

/* -- Where a tensor comes from ------------------------------------------------------------------------------------------------ */

static Node *accumulate_node(Eager *E, Tensor *leaf) {
  if (leaf->ag->accumulate) return node_retain(leaf->ag->accumulate);
  Node *n = node_new(E, NODE_ACCUMULATE, NULL, 0, 1, NULL);
  if (!n) return NULL;
  grad_meta(&n->out_meta[0], &leaf->m);
  n->leaf = leaf;
  leaf->ag->accumulate = n;
  return n;
}

int tape_edge(Eager *E, Tensor *t, Edge *edge) {
  edge->node = NULL;
  if (!tensor_requires_grad(t)) return 0;
  int rc = tape_node(E, t, &edge->node, &edge->output);
  if (rc) return rc;
  if (edge->node) {
    edge->node->refs++;
    return 0;
  }
  edge->output = 0;
  edge->node = accumulate_node(E, t);
  return edge->node ? 0 : MF_ENOMEM;
}

static void list_set(IntList *list, int n, const int64_t *v) {
  list->n = n;
  memcpy(list->v, v, sizeof(int64_t) * (size_t)n);
}

static Geometry *view_geometry(const Tensor *view, const Tensor *base) {
  if (!shape_is_dense(base->m.ndim, base->m.shape, base->m.stride)) {
    err_set(MF_EUNSUPPORTED, "in-place write with a gradient through a view of memory with gaps; clone it first");
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

int tape_node(Eager *E, Tensor *t, Node **node, int *output) {
  Autograd *ag = t->ag;
  *node = NULL;
  if (!ag) return 0;
  if (ag->base && ag->base->ag && ag->base->ag->history != ag->history) { /* the base was written to: a view of what it is now */
    Node *n = node_new(E, NODE_VIEW, NULL, 1, 1, NULL);
    if (!n) return MF_ENOMEM;
    grad_meta(&n->in_meta[0], &ag->base->m);
    grad_meta(&n->out_meta[0], &t->m);
    n->geometry = view_geometry(t, ag->base);
    int rc = n->geometry ? tape_edge(E, ag->base, &n->next[0]) : MF_EUNSUPPORTED;
    if (rc) {
      tape_node_release(n);
      return rc;
    }
    tape_node_release(ag->node);
    ag->node = n;
    ag->output = 0;
    ag->history = ag->base->ag->history;
  }
  *node = ag->node;
  *output = ag->output;
  return 0;
}

int tape_check_inplace(Eager *E, Tensor *t, const char *op) {
  (void)E;
  Tensor *base = t->ag && t->ag->base ? t->ag->base : t;
  if (base->ag && base->ag->requires_grad && !base->ag->node)
    return err_set(MF_EINVAL, "%s: %s that requires a gradient is written in place; do it inside mf.no_grad, or on a clone", op,
                   base == t ? "a leaf" : "a view of a leaf");
  return 0;
}

/* -- Recording ------------------------------------------------------------------------------------------------------------------ */

static int save(Saved *s, Tensor *t, bool is_input) {
  s->version = t->storage ? storage_version(t->storage) : 0;
  if (is_input && t->ag && t->ag->requires_grad && !t->ag->node) { /* a leaf that may not be written: kept as it is */
    s->t = tensor_retain(t);
    return 0;
  }
  s->t = tensor_alias(t);
  if (!s->t) return MF_ENOMEM;
  if (is_input && t->ag && t->ag->node) {
    if (!tensor_autograd(s->t)) return MF_ENOMEM;
    s->t->ag->node = node_retain(t->ag->node);
    s->t->ag->output = t->ag->output;
  }
  return 0;
}

/* What the gradient lines of these params (bits) read. */
static void reads_of(const Op *op, uint32_t needed, uint32_t *ins, uint32_t *outs) {
  *ins = *outs = 0;
  for (int i = 0; i < op->n_grads; i++) {
    if (!(op->grads[i].serves & needed)) continue;
    *ins |= op->grads[i].reads_in;
    *outs |= op->grads[i].reads_out;
  }
}

static Tensor *written_tensor(const EagerCall *c) {
  return c->into ? c->into : c->op->n_mutated && c->n_out == 0 ? c->in[0] : NULL;
}

int tape_keep_original(Eager *E, EagerCall *c) {
  uint32_t needed = 0, ins, outs;
  Tensor *written = written_tensor(c);
  for (int k = 0; k < c->n_in; k++)
    if (c->in[k] && tensor_requires_grad(c->in[k])) needed |= 1u << op_param_of_input(c->op, c->args, k);
  reads_of(c->op, needed, &ins, &outs);
  for (int k = 0; k < c->n_in && written; k++) {
    if (!c->in[k] || c->in[k]->storage != written->storage || !(ins >> op_param_of_input(c->op, c->args, k) & 1)) continue;
    c->original = eager_op(E, OP_clone, 1, &written, NULL);
    return c->original ? 0 : MF_ENOMEM;
  }
  return 0;
}

/* Keeps what the gradient lines of inputs that need one read. */
static int save_for_backward(EagerCall *c, Node *n) {
  uint32_t needed = 0, ins, outs;
  Tensor *written = written_tensor(c);
  for (int k = 0; k < n->n_in; k++)
    if (n->next[k].node) needed |= 1u << op_param_of_input(c->op, c->args, k);
  reads_of(c->op, needed, &ins, &outs);
  int rc = 0;
  if (ins)
    for (int k = 0; k < c->n_in && !rc; k++) {
      if (!c->in[k] || !(ins >> op_param_of_input(c->op, c->args, k) & 1)) continue;
      bool overwritten = written && c->in[k]->storage == written->storage;
      rc = save(&n->saved[k], overwritten ? c->original : c->in[k], true);
    }
  if (outs)
    for (int k = 0; k < c->n_out && !rc; k++)
      if (outs >> (c->op->n_outputs < 0 ? 0 : k) & 1) rc = save(&n->saved[n->n_in + k], c->out[k], false);
  return rc;
}

static int attach(Tensor *t, Node *n, int output) {
  Autograd *ag = tensor_autograd(t);
  if (!ag) return MF_ENOMEM;
  n->refs++;
  tape_node_release(ag->node);
  ag->node = n;
  ag->output = output;
  return 0;
}

/* `written` was changed in place by node n (as its output `output`). */
static int rebase(Eager *E, Tensor *written, Node *n, int output) {
  Tensor *base = written->ag ? written->ag->base : NULL;
  int rc;
  if (!base) {
    if ((rc = attach(written, n, output))) return rc;
    written->ag->history++;
    return 0;
  }
  Node *copy = node_new(E, NODE_COPY_SLICES, NULL, n->n_in, 1, NULL);
  if (!copy) return MF_ENOMEM;
  copy->inner = node_retain(n);
  copy->geometry = view_geometry(written, base);
  rc = copy->geometry ? tape_edge(E, base, &copy->next[0]) : MF_EUNSUPPORTED;
  grad_meta(&copy->in_meta[0], &base->m);
  grad_meta(&copy->out_meta[0], &base->m);
  for (int k = 1; k < n->n_in; k++) {
    copy->next[k].node = node_retain(n->next[k].node);
    copy->next[k].output = n->next[k].output;
    copy->in_meta[k] = n->in_meta[k];
  }
  if (!rc) rc = attach(base, copy, 0);
  if (!rc) base->ag->history++;
  tape_node_release(copy);
  return rc;
}

static int record_outputs(Eager *E, EagerCall *c, Node *n) {
  int rc = 0;
  for (int k = 0; k < c->n_out && !rc; k++) {
    grad_meta(&n->out_meta[k], &c->out[k]->m);
    if (c->out[k] == c->into) rc = rebase(E, c->into, n, k);
    else if (dtype_is_float((DType)c->out[k]->m.dtype)) rc = attach(c->out[k], n, k);
  }
  if (c->n_out == 0 && c->op->n_mutated) { /* NAME_(Tensor! x, ...) -> (): the first mutated input is the output */
    grad_meta(&n->out_meta[0], &c->in[0]->m);
    rc = rebase(E, c->in[0], n, 0);
  }
  return rc;
}

int tape_record(Eager *E, EagerCall *c) {
  bool any = false;
  for (int k = 0; k < c->n_in && !any; k++) any = c->in[k] && c->in[k]->ag && tensor_requires_grad(c->in[k]);
  if (!any || (c->op->spec[0]->flags & OP_NO_GRAD)) return 0;
  int n_out = c->n_out == 0 && c->op->n_mutated ? 1 : c->n_out;
  Node *n = node_new(E, NODE_OP, c->op, c->n_in, n_out, c->args);
  if (!n) return MF_ENOMEM;
  int rc = 0;
  for (int k = 0; k < c->n_in && !rc; k++) {
    if (!c->in[k]) continue;
    grad_meta(&n->in_meta[k], &c->in[k]->m);
    if (dtype_is_float((DType)c->in[k]->m.dtype)) rc = tape_edge(E, c->in[k], &n->next[k]);
  }
  if (!rc) rc = save_for_backward(c, n);
  if (!rc) rc = record_outputs(E, c, n);
  tape_node_release(n);
  return rc;
}
