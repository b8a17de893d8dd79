/* The tape: recording calls.
 *
 * A node stands for one recorded call; its edges lead to the nodes that made its inputs, or to the
 * accumulate node of a leaf. Numbers (`seq`) grow in program order, so that every consumer has a
 * higher number than what it consumes; the backward pass relies on nothing else.
 *
 * What is kept. From the gradient lines the build knows which inputs and outputs each op's gradient
 * reads; only those are kept, as aliases with the storage's version at the time. An alias of an
 * output has no node (it would be a circle); an alias of an input has the input's node of that
 * moment, so that a later in-place write to the handle cannot close one either. */
#include <string.h>

#include "mem.h"
#include "op_ids.h"
#include "tape_int.h"
#include "watch.h"

/* -- Nodes ------------------------------------------------------------------------------------- */

Node *tape_node_new(Eager *E, NodeKind kind, const Op *op, int n_in, int n_out, int n_saved,
                    int n_dims, const void *args) {
  size_t args_size = args ? op->args_size : 0;
  size_t bytes = sizeof(Node) + sizeof(Edge) * (size_t)n_in +
                 sizeof(GradMeta) * (size_t)(n_in + n_out) + sizeof(Saved) * (size_t)n_saved +
                 sizeof(int64_t) * (size_t)n_dims + args_size;
  Node *n = pool_take(&E->pool, bytes);
  if (!n) {
    err_set(MF_ENOMEM, "out of memory for the tape");
    return NULL;
  }
  *n = (Node){.E = E,
              .refs = 1,
              .kind = (uint8_t)kind,
              .bytes = (uint32_t)bytes,
              .op = op,
              .n_in = n_in,
              .n_out = n_out};
  n->seq = kind == NODE_ACCUMULATE ? 0 : E->next_seq++;
  bool wanted = E->anomaly || E->tracer || watch_of(E->context);
  if (wanted && E->owner.where) n->where = E->owner.where(E->owner.ud);
  n->next = (Edge *)(n + 1);
  n->in_meta = (GradMeta *)(n->next + n_in);
  n->out_meta = n->in_meta + n_in;
  Saved *saved = (Saved *)(n->out_meta + n_out);
  n->room = (int64_t *)(saved + n_saved);
  if (n_saved) n->saved = saved;
  for (int k = 0; k < n_in; k++) n->next[k].node = NULL;
  for (int k = 0; k < n_saved; k++) saved[k].t = NULL;
  if (args) n->args = memcpy(n->room + n_dims, args, args_size);
  return n;
}

static int n_saved(const Node *n) {
  return n->saved ? n->n_in + n->n_out : 0;
}

/* A node that kept nothing can be run again, as long as those below it can. */
void tape_give_back(Node *n) {
  if (n->inner) tape_give_back(n->inner);
  n->released |= n->inner && n->inner->released;
  for (int k = 0; k < n_saved(n); k++) {
    if (!n->saved[k].t) continue;
    n->released = true;
    tensor_release(n->saved[k].t);
    n->saved[k].t = NULL;
  }
  for (int k = 0; k < n->n_in && n->released; k++) {
    tape_node_release(n->next[k].node);
    n->next[k].node = NULL;
  }
}

static void node_free(Node *n) {
  for (int k = 0; k < n->n_in; k++) tape_node_release(n->next[k].node);
  for (int k = 0; k < n_saved(n); k++) tensor_release(n->saved[k].t);
  if (n->kind != NODE_ACCUMULATE) mem_free(n->geometry);
  else if (n->leaf) n->leaf->ag->accumulate = NULL;
  tape_node_release(n->inner);
  pool_give(&n->E->pool, n, n->bytes);
}

/* Freeing a node releases others; a list in place of recursion, since a chain may be millions long.
 */
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

void tape_meta(Node *n, GradMeta *g, const Tensor *t) {
  const Meta *m = &t->m;
  *g = (GradMeta){m->ndim, m->dtype, m->device, n->room, t->layout};
  for (int d = 0; d < m->ndim; d++) *n->room++ = m->shape[d];
}

const char *tape_node_name(const Node *n) {
  if (n->kind == NODE_COPY_SLICES) return tape_node_name(n->inner);
  if (n->kind == NODE_VIEW) return "view";
  if (n->kind == NODE_FUNCTION) return "a function";
  if (n->kind == NODE_BOX)
    return n->in_meta[0].layout && !n->out_meta[0].layout ? "to_local" : "to_global";
  return n->op ? n->op->name : "leaf";
}

/* -- Records of tensors ------------------------------------------------------------------------ */

/* Takes t off the list of those whose gradient its node keeps. */
static void forget_retained(Tensor *t) {
  if (!t->ag->retain_grad || !t->ag->node) return;
  for (Tensor **at = &t->ag->node->retain; *at; at = &(*at)->ag->retain_next)
    if (*at == t) {
      *at = t->ag->retain_next;
      return;
    }
}

static void keep_retained(Tensor *t) {
  if (!t->ag->retain_grad || !t->ag->node) return;
  t->ag->retain_next = t->ag->node->retain;
  t->ag->node->retain = t;
}

void tape_forget(Tensor *t) {
  Autograd *ag = t->ag;
  forget_retained(t);
  t->ag = NULL;
  if (ag->accumulate) ag->accumulate->leaf = NULL;
  tensor_release(ag->grad);
  tensor_release(ag->base);
  tape_node_release(ag->node);
}

void tape_attach(Tensor *t, Node *n, int output) {
  Autograd *ag = tensor_autograd(t);
  forget_retained(t);
  n->refs++;
  tape_node_release(ag->node);
  ag->node = n;
  ag->output = output;
  keep_retained(t);
}

void tape_restore(Tensor *t, Node *n, int output, uint32_t history) {
  Autograd *ag = tensor_autograd(t);
  ag->history = history;
  if (n) {
    tape_attach(t, n, output);
    return;
  }
  forget_retained(t);
  tape_node_release(ag->node);
  ag->node = NULL;
}

int tape_retain_grad(Eager *E, Tensor *t) {
  int rc = tape_refresh(E, t);
  if (rc || t->ag->retain_grad || !t->ag->node) return rc;
  t->ag->retain_grad = true;
  keep_retained(t);
  return 0;
}

/* -- Where a tensor comes from ----------------------------------------------------------------- */

static Node *accumulate_node(Eager *E, Tensor *leaf) {
  if (leaf->ag->accumulate) return tape_node_retain(leaf->ag->accumulate);
  Node *n = tape_node_new(E, NODE_ACCUMULATE, NULL, 0, 1, 0, leaf->m.ndim, NULL);
  if (!n) return NULL;
  tape_meta(n, &n->out_meta[0], leaf);
  n->leaf = leaf;
  leaf->ag->accumulate = n;
  return n;
}

int tape_node(Eager *E, Tensor *t, Node **node, int *output) {
  int rc = tape_refresh(E, t);
  *node = t->ag ? t->ag->node : NULL;
  *output = t->ag ? t->ag->output : 0;
  return rc;
}

int tape_edge(Eager *E, Tensor *t, Edge *edge) {
  edge->node = NULL;
  edge->output = 0;
  if (!tensor_requires_grad(t)) return 0;
  int rc = tape_node(E, t, &edge->node, &edge->output);
  if (rc) return rc;
  if (edge->node) edge->node->refs++;
  else edge->node = accumulate_node(E, t);
  return edge->node ? 0 : MF_ENOMEM;
}

/* -- What is kept ------------------------------------------------------------------------------ */

static int param_of(const EagerCall *c, int k) {
  return c->op->n_lists ? op_param_of_input(c->op, c->args, k) : k;
}

static int save(Saved *s, Tensor *t, bool is_input) {
  Autograd *ag = t->ag;
  s->version = t->storage ? storage_version(t->storage) : 0;
  if (is_input && ag && ag->requires_grad &&
      !ag->node) { /* a leaf that may not be written: kept as it is */
    s->t = tensor_retain(t);
    return 0;
  }
  s->t = tensor_alias(t);
  if (!s->t) return MF_ENOMEM;
  if (is_input && ag && ag->node) tape_attach(s->t, ag->node, ag->output);
  return 0;
}

/* Keeps what input t was before the call wrote into it: the contents of `original`, and the node
 * that t had, which need not be that of the written tensor (t may be detached from it). */
static int save_original(Saved *s, Tensor *original, Tensor *t) {
  s->version = storage_version(original->storage);
  s->t = tensor_alias(original);
  if (!s->t) return MF_ENOMEM;
  if (t->ag && t->ag->node) tape_attach(s->t, t->ag->node, t->ag->output);
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
    if (c->in[k] && tensor_requires_grad(c->in[k])) needed |= 1u << param_of(c, k);
  reads_of(c->op, needed, &ins, &outs);
  for (int k = 0; k < c->n_in && written; k++) {
    if (!c->in[k] || c->in[k]->storage != written->storage || !(ins >> param_of(c, k) & 1))
      continue;
    bool enabled = E->grad_enabled;
    E->grad_enabled = false;
    c->original = eager_op(E, OP_clone, 1, &written, NULL);
    E->grad_enabled = enabled;
    return c->original ? 0 : MF_ENOMEM;
  }
  return 0;
}

/* Keeps the inputs and outputs of these bits. */
static int save_for_backward(EagerCall *c, Node *n, uint32_t ins, uint32_t outs) {
  Tensor *written = written_tensor(c);
  int rc = 0;
  for (int k = 0; k < c->n_in && ins && !rc; k++) {
    if (!c->in[k] || !(ins >> param_of(c, k) & 1)) continue;
    if (written && c->in[k]->storage == written->storage)
      rc = save_original(&n->saved[k], c->original, c->in[k]);
    else rc = save(&n->saved[k], c->in[k], true);
  }
  for (int k = 0; k < c->n_out && outs && !rc; k++)
    if (outs >> (c->op->n_outputs < 0 ? 0 : k) & 1)
      rc = save(&n->saved[n->n_in + k], c->out[k], false);
  return rc;
}

/* -- Recording --------------------------------------------------------------------------------- */

static int record_outputs(Eager *E, EagerCall *c, Node *n) {
  int rc = 0;
  for (int k = 0; k < c->n_out && !rc; k++) {
    tape_meta(n, &n->out_meta[k], c->out[k]);
    if (c->out[k] == c->into) rc = tape_rebase(E, c->into, n, k);
    else if (dtype_is_float((DType)c->out[k]->m.dtype)) tape_attach(c->out[k], n, k);
  }
  if (c->n_out == 0 &&
      c->op->n_mutated) { /* NAME_(Tensor! x, ...) -> (): the first mutated input is the output */
    tape_meta(n, &n->out_meta[0], c->in[0]);
    rc = tape_rebase(E, c->in[0], n, 0);
  }
  return rc;
}

/* Sizes that the metas of the call's tensors need. */
static int count_dims(const EagerCall *c) {
  int n = c->n_out == 0 ? c->in[0]->m.ndim : 0;
  for (int k = 0; k < c->n_in; k++) n += c->in[k] ? c->in[k]->m.ndim : 0;
  for (int k = 0; k < c->n_out; k++) n += c->out[k]->m.ndim;
  return n;
}

static bool is_tracked(const Tensor *t) {
  return t && t->ag && tensor_requires_grad(t) && dtype_is_float((DType)t->m.dtype);
}

/* The params that need a gradient, as bits. Nodes of views come before the call's, since their
 * numbers must be lower. */
static int prepare_inputs(Eager *E, EagerCall *c, uint32_t *needed) {
  int rc = 0;
  *needed = 0;
  for (int k = 0; k < c->n_in && !rc; k++) {
    if (!is_tracked(c->in[k])) continue;
    *needed |= 1u << param_of(c, k);
    rc = tape_refresh(E, c->in[k]);
  }
  return rc;
}

int tape_record(Eager *E, EagerCall *c) {
  uint32_t needed, ins, outs;
  int rc = prepare_inputs(E, c, &needed);
  if (rc || !needed) return rc;
  reads_of(c->op, needed, &ins, &outs);
  int n_out = c->n_out == 0 && c->op->n_mutated ? 1 : c->n_out;
  int n_saved = ins | outs ? c->n_in + n_out : 0;
  Node *n = tape_node_new(E, NODE_OP, c->op, c->n_in, n_out, n_saved, count_dims(c), c->args);
  if (!n) return MF_ENOMEM;
  for (int k = 0; k < c->n_in && !rc; k++) {
    Tensor *t = c->in[k];
    if (!t) continue;
    tape_meta(n, &n->in_meta[k], t);
    if (is_tracked(t)) rc = tape_edge(E, t, &n->next[k]);
  }
  if (!rc && n_saved) rc = save_for_backward(c, n, ins, outs);
  if (!rc) rc = record_outputs(E, c, n);
  c->recorded = !rc;
  tape_node_release(n);
  return rc;
}

int tape_record_box(Eager *E, Tensor *x, Tensor *y, const Layout *grad) {
  if (!E->grad_enabled || !is_tracked(x)) return 0;
  int rc = tape_refresh(E, x);
  Node *n = rc ? NULL : tape_node_new(E, NODE_BOX, NULL, 1, 1, 0, x->m.ndim + y->m.ndim, NULL);
  if (!n) return rc ? rc : MF_ENOMEM;
  tape_meta(n, &n->in_meta[0], x);
  tape_meta(n, &n->out_meta[0], y);
  n->in_meta[0].layout = grad;
  rc = tape_edge(E, x, &n->next[0]);
  if (!rc) tape_attach(y, n, 0);
  tape_node_release(n);
  return rc;
}

int tape_record_function(Eager *E, int n_in, Tensor *const *in, int n_out, Tensor *const *out,
                         uint64_t *seq) {
  int rc = 0, n_dims = 0;
  bool any = false;
  *seq = 0;
  for (int k = 0; k < n_in && !rc; k++) {
    if (!in[k]) continue;
    any |= tensor_requires_grad(in[k]);
    n_dims += in[k]->m.ndim;
    rc = tape_refresh(E, in[k]);
  }
  if (rc || !any || !E->grad_enabled) return rc;
  for (int k = 0; k < n_out; k++) n_dims += out[k] ? out[k]->m.ndim : 0;
  Node *n = tape_node_new(E, NODE_FUNCTION, NULL, n_in, n_out, 0, n_dims, NULL);
  if (!n) return MF_ENOMEM;
  for (int k = 0; k < n_in && !rc; k++) {
    if (!in[k]) continue;
    tape_meta(n, &n->in_meta[k], in[k]);
    if (dtype_is_float((DType)in[k]->m.dtype)) rc = tape_edge(E, in[k], &n->next[k]);
  }
  for (int k = 0; k < n_out && !rc; k++) {
    n->out_meta[k] = (GradMeta){0};
    if (!out[k]) continue;
    tape_meta(n, &n->out_meta[k], out[k]);
    tape_attach(out[k], n, k);
  }
  *seq = n->seq;
  tape_node_release(n);
  return rc;
}
