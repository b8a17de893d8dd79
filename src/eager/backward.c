/* The backward pass: nodes are taken from a heap, highest number first, so that a node is taken
 * when all its consumers have given their part; its gradient lines run; what they return goes to
 * the nodes of its inputs. Leaves have number 0 and come last.
 *
 * With `inputs` (mf.grad) only nodes on a path to one of them are run, and their gradients are
 * handed out instead of accumulated.
 *
 * A pass may run inside a hook of another, over the same nodes. While it lasts, each node it visits
 * carries its number and the place of the visit; the visit keeps what the node carried before, and
 * the pass puts that back when it ends. */
#include <stdlib.h>
#include <string.h>

#include "buckets.h"
#include "global.h"
#include "op_args.h"
#include "op_ids.h"
#include "sparse.h"
#include "tape_int.h"
#include "vec.h"

typedef struct Visit {
  Node *node;    /* counted */
  uint64_t pass; /* what the node carried before */
  int place;
  bool needed, queued, done;
  Tensor *one,
      **g; /* gradients of its outputs so far, counted; NULL: none. `g` for several outputs */
} Visit;

typedef struct PassSpace {
  VEC(Visit) visits;
  VEC(int) heap; /* of visits, by seq */
} PassSpace;

typedef struct Pass {
  Eager *E;
  uint64_t id;
  PassSpace *space;
  const Backward *b;
  bool selective;
  Edge *targets; /* selective: the edges whose gradients are wanted */
} Pass;

enum { SPARE_VISITS = 1024, SMALL_EDGES = 8, SMALL_NODE = 16 };

static int no_memory(void) {
  return err_set(MF_ENOMEM, "backward: out of memory");
}

/* -- The heap ---------------------------------------------------------------------------------- */

static uint64_t seq_at(const PassSpace *s, size_t i) {
  return s->visits.at[s->heap.at[i]].node->seq;
}

static void heap_swap(PassSpace *s, size_t a, size_t b) {
  int t = s->heap.at[a];
  s->heap.at[a] = s->heap.at[b];
  s->heap.at[b] = t;
}

static bool heap_push(PassSpace *s, int visit) {
  if (!vec_push(&s->heap, visit)) return false;
  for (size_t i = s->heap.n - 1; i && seq_at(s, (i - 1) / 2) < seq_at(s, i); i = (i - 1) / 2)
    heap_swap(s, i, (i - 1) / 2);
  return true;
}

static int heap_pop(PassSpace *s) {
  int top = s->heap.at[0];
  s->heap.at[0] = s->heap.at[--s->heap.n];
  for (size_t i = 0, c; (c = 2 * i + 1) < s->heap.n; i = c) {
    if (c + 1 < s->heap.n && seq_at(s, c + 1) > seq_at(s, c)) c++;
    if (seq_at(s, i) >= seq_at(s, c)) break;
    heap_swap(s, i, c);
  }
  return top;
}

/* -- Visits ------------------------------------------------------------------------------------ */

static Visit *visit_at(const Pass *p, int i) {
  return &p->space->visits.at[i];
}

/* The visit of a node, made when missing; -1 when out of memory. */
static int visit_of(Pass *p, Node *n) {
  if (n->pass == p->id) return n->place;
  Visit v = {.node = n, .pass = n->pass, .place = n->place};
  if (n->n_out > 1 && !(v.g = mem_zalloc(sizeof *v.g * (size_t)n->n_out))) return -1;
  if (!vec_push(&p->space->visits, v)) {
    mem_free(v.g);
    return -1;
  }
  n->refs++;
  n->pass = p->id;
  return n->place = (int)p->space->visits.n - 1;
}

/* -- Handing gradients on ---------------------------------------------------------------------- */

/* Whether nobody else sees g, so that it may be written. */
static bool is_own(const Tensor *g) {
  int users = g->part ? 2 : 1;
  return g->refs == 1 && g->storage && !g->severed && (!g->part || g->part->refs == 1) &&
         atomic_load_explicit(&g->storage->refs, memory_order_acquire) == users;
}

/* *sum += g; takes g's count. */
static int add_gradient(Pass *p, Tensor **sum, Tensor *g) {
  if (!*sum) {
    *sum = g;
    return 0;
  }
  int rc = 0;
  bool into = is_own(*sum) && g->storage && !p->b->create_graph && (*sum)->layout == g->layout &&
              shape_is_dense((*sum)->m.ndim, (*sum)->m.shape, (*sum)->m.stride);
  if (into) {
    rc = eager_op_into(p->E, OP_add, 2, (Tensor *[]){*sum, g}, NULL);
  } else {
    Tensor *total = sparse_add(p->E, *sum, g);
    if (!total) rc = MF_EINVAL;
    tensor_release(*sum);
    *sum = total;
  }
  tensor_release(g);
  return rc;
}

/* Gives g (counted, taken) to an edge. */
static int route(Pass *p, const Edge *edge, Tensor *g) {
  int at = edge->node ? visit_of(p, edge->node) : -1;
  if (edge->node && at < 0) {
    tensor_release(g);
    return no_memory();
  }
  if (at < 0 || (p->selective && !visit_at(p, at)->needed)) {
    tensor_release(g);
    return 0;
  }
  Visit *v = visit_at(p, at);
  MF_ASSERT(!v->done, "backward: %s was run before its gradient was whole",
            tape_node_name(v->node));
  if (!v->queued && !(v->queued = heap_push(p->space, at))) {
    tensor_release(g);
    return no_memory();
  }
  return add_gradient(p, v->g ? &v->g[edge->output] : &v->one, g);
}

/* -- One node ---------------------------------------------------------------------------------- */

static bool edge_needed(const Pass *p, const Edge *e) {
  if (!e->node) return false;
  return !p->selective || (e->node->pass == p->id && visit_at(p, e->node->place)->needed);
}

static int graph_freed(const Node *n) {
  return err_set(MF_EINVAL,
                 "backward: the graph was freed by an earlier backward pass at %s; pass "
                 "{retain_graph = true} to the earlier one",
                 tape_node_name(n));
}

/* Runs n with room for its inputs, and hands the results on. */
static int run_inputs(Pass *p, Node *n, Tensor *const *gout, bool *need, Tensor **gin) {
  bool any = false;
  for (int k = 0; k < n->n_in; k++) {
    gin[k] = NULL;
    any |= need[k] = edge_needed(p, &n->next[k]);
  }
  if (!any) return 0;
  int rc = tape_run_node(p->E, n, gout, need, gin);
  for (int k = 0; k < n->n_in; k++) {
    if (!gin[k]) continue;
    if (!rc && need[k]) rc = route(p, &n->next[k], gin[k]);
    else tensor_release(gin[k]);
  }
  return rc;
}

static int run_node(Pass *p, Node *n, Tensor *const *gout) {
  if (n->released) return graph_freed(n);
  bool small_need[SMALL_NODE], *need = small_need;
  Tensor *small_gin[SMALL_NODE], **gin = small_gin;
  if (n->n_in > SMALL_NODE) {
    need = mem_alloc(sizeof *need * (size_t)n->n_in);
    gin = mem_alloc(sizeof *gin * (size_t)n->n_in);
  }
  int rc = need && gin ? run_inputs(p, n, gout, need, gin) : no_memory();
  if (!rc && !p->b->retain_graph) tape_give_back(n);
  if (n->n_in > SMALL_NODE) {
    mem_free(need);
    mem_free(gin);
  }
  return rc;
}

/* -- Leaves ------------------------------------------------------------------------------------ */

/* Whether g can become t's gradient without a copy: nobody else sees it, and it lies as t does. */
static bool can_steal(const Tensor *t, const Tensor *g) {
  return is_own(g) && shape_equal(t->m.ndim, t->m.stride, g->m.ndim, g->m.stride) &&
         (!g->ag || !g->ag->base);
}

/* g as the gradient of a global leaf lies: as the leaf, or B where that is partial. */
static Tensor *as_leaf(Eager *E, const Tensor *t, Tensor *g) {
  const Layout *l = t->layout ? global_of_gradient(E, t->layout) : NULL;
  if ((t->layout && !l) || l == g->layout) return l || !t->layout ? tensor_retain(g) : NULL;
  if (l && g->layout) return global_convert(E, g, l, NULL);
  err_set(MF_EINVAL, "backward: the gradient is %s, the tensor %s", g->layout ? "global" : "local",
          t->layout ? "global" : "local");
  return NULL;
}

static int accumulate(Eager *E, Tensor *t, Tensor *g, bool create_graph) {
  Autograd *ag = tensor_autograd(t);
  int rc = eager_uses_gradient(E, t, false);
  if (rc) return rc;
  if (!ag->grad) {
    bool steal = g->storage && can_steal(t, g);
    ag->grad = tensor_is_rows(g) ? sparse_own(E, g)
               : steal           ? tensor_retain(g)
                                 : eager_op(E, OP_clone, 1, &g, NULL);
    if (!ag->grad) return MF_ENOMEM;
    return steal && g->part ? global_pack(E, ag->grad) : 0;
  }
  if (!create_graph && ag->grad->storage && !tensor_requires_grad(ag->grad))
    return g->storage ? eager_op_into(E, OP_add, 2, (Tensor *[]){ag->grad, g}, NULL)
                      : sparse_add_into(E, ag->grad, g);
  Tensor *sum = sparse_add(E, ag->grad, g);
  if (!sum) return MF_EINVAL;
  tensor_release(ag->grad);
  ag->grad = sum;
  return 0;
}

int tape_accumulate(Eager *E, Tensor *t, Tensor *g, bool create_graph) {
  if (!t->layout && !g->layout) return accumulate(E, t, g, create_graph);
  Tensor *as = as_leaf(E, t, g);
  if (as == g) g->refs--; /* the caller's count stays, so that the leaf may take it */
  int rc = as ? accumulate(E, t, as, create_graph) : MF_EINVAL;
  if (as != g) tensor_release(as);
  return rc;
}

/* Of a step that is traced as one of several micro-batches, what leaf n gets is the mean of all of
 * them; tensors that the step made have one in each. Takes and gives a count; NULL on failure. */
static Tensor *mean_gradient(Eager *E, const Node *n, Tensor *g) {
  const Tensor *leaf = n->leaf;
  bool means = E->tracer && E->tracer->times > 1 && leaf && leaf->storage && leaf->storage->data;
  if (!means || !g) return g;
  Tensor *mean = tensor_is_rows(g) ? sparse_mean(E, g, E->tracer->times)
                                   : eager_op(E, OP_micro_mean, 1, &g,
                                              &(struct micro_mean_args){.n = E->tracer->times});
  tensor_release(g);
  return mean;
}

/* Takes g's count. */
static int finish_leaf(Pass *p, Node *n, Tensor *g) {
  int rc = 0;
  if (!p->selective && n->leaf && g) {
    Tensor *leaf = tensor_retain(n->leaf);
    g = mean_gradient(p->E, n, g);
    rc = g ? tape_accumulate(p->E, leaf, g, p->b->create_graph) : MF_ENOMEM;
    tensor_release(g); /* so that the leaf's is the only one */
    g = NULL;
    if (!rc && leaf->ag->bucket) rc = buckets_take(leaf);
    tensor_release(leaf);
  }
  tensor_release(g);
  return rc;
}

/* -- The pass ---------------------------------------------------------------------------------- */

static int compare_seq(const void *a, const void *b) {
  const Node *x = *(Node *const *)a, *y = *(Node *const *)b;
  return x->seq < y->seq ? -1 : x->seq > y->seq;
}

static bool is_target(const Pass *p, const Node *n) {
  for (int k = 0; k < p->b->n_in; k++)
    if (p->targets[k].node == n) return true;
  return false;
}

/* Visits all nodes below the roots. */
static int visit_all(Pass *p, const Edge *roots) {
  for (int k = 0; k < p->b->n_out; k++)
    if (roots[k].node && visit_of(p, roots[k].node) < 0) return no_memory();
  for (size_t i = 0; i < p->space->visits.n; i++) {
    Node *n = visit_at(p, (int)i)->node;
    for (int k = 0; k < n->n_in; k++)
      if (n->next[k].node && visit_of(p, n->next[k].node) < 0) return no_memory();
  }
  return 0;
}

/* Marks the visits from which a target can be reached. */
static int mark_needed(Pass *p, const Edge *roots) {
  int rc = visit_all(p, roots);
  size_t n = p->space->visits.n;
  Node **order = rc ? NULL : mem_alloc(sizeof *order * (n + 1));
  if (!order) return rc ? rc : no_memory();
  for (size_t i = 0; i < n; i++) order[i] = visit_at(p, (int)i)->node;
  qsort(order, n, sizeof *order, compare_seq);
  for (size_t i = 0; i < n; i++) {
    bool needed = is_target(p, order[i]);
    for (int k = 0; k < order[i]->n_in; k++) needed |= edge_needed(p, &order[i]->next[k]);
    visit_at(p, order[i]->place)->needed = needed;
  }
  mem_free(order);
  return 0;
}

/* Gradient lines work on dense ones; only leaves keep rows. */
static int make_dense(Eager *E, const Node *n, Tensor **g) {
  for (int k = 0; k < n->n_out && n->kind != NODE_ACCUMULATE; k++) {
    if (!g[k] || !tensor_is_rows(g[k])) continue;
    Tensor *dense = sparse_to_dense(E, g[k]);
    if (!dense) return MF_ENOMEM;
    tensor_release(g[k]);
    g[k] = dense;
  }
  return 0;
}

/* Before n runs: hooks may replace its gradients; tensors that keep theirs and callers get them. */
static int show(Pass *p, Node *n, Tensor **g) {
  Eager *E = p->E;
  int rc = make_dense(E, n, g);
  if (!rc && E->owner.hook) rc = E->owner.hook(E->owner.ud, n, g);
  for (Tensor *t = n->retain; t && !rc; t = t->ag->retain_next) {
    Tensor *own = tensor_retain(g[t->ag->output]); /* a second count, so that it is copied */
    if (own) rc = tape_accumulate(E, t, own, p->b->create_graph);
    tensor_release(own);
  }
  for (int k = 0; p->selective && k < p->b->n_in && !rc; k++) {
    if (p->targets[k].node != n || !g[p->targets[k].output]) continue;
    tensor_release(p->b->grads[k]);
    p->b->grads[k] = tensor_retain(g[p->targets[k].output]);
    if (n->kind != NODE_ACCUMULATE) continue;
    p->b->grads[k] = mean_gradient(E, n, p->b->grads[k]);
    if (!p->b->grads[k]) rc = MF_ENOMEM;
  }
  return rc;
}

static int run_visit(Pass *p, int at) {
  Visit *v = visit_at(p, at);
  Node *n = v->node;
  Tensor *one = v->one, **g = v->g ? v->g : &one; /* visits may move */
  v->one = NULL;
  v->g = NULL;
  v->done = true;
  int rc = show(p, n, g);
  if (!rc && n->kind == NODE_ACCUMULATE) {
    rc = finish_leaf(p, n, one); /* the only count, so that the leaf may take it */
    one = NULL;
  } else if (!rc) {
    rc = run_node(p, n, g);
  }
  for (int k = 0; k < n->n_out; k++) tensor_release(g[k]);
  if (g != &one) mem_free(g);
  return rc;
}

static int drain(Pass *p) {
  int rc = 0;
  while (p->space->heap.n && !rc) {
    if (eager_has_interrupt(p->E)) rc = eager_interrupted(p->E);
    if (!rc) rc = run_visit(p, heap_pop(p->space));
  }
  return rc;
}

/* -- Beginning and end ------------------------------------------------------------------------- */

static Tensor *ones_like(Eager *E, Tensor *t) {
  if (E->tracer || t->layout) return eager_op(E, OP_ones_like, 1, &t, NULL);
  Tensor *one = tensor_create(E, (DType)t->m.dtype, t->m.ndim, t->m.shape, t->m.device);
  if (!one || !tensor_has_data(one)) return one;
  if (!E->context->devices[t->m.device]->api->on_host) {
    tensor_release(one);
    return eager_op(E, OP_ones_like, 1, &t, NULL);
  }
  dtype_set_f64((DType)t->m.dtype, one->storage->data, 1);
  return one;
}

static int root(Pass *p, int k, Edge *edge) {
  char shape[SHAPE_TEXT_MAX];
  Tensor *output = p->b->outputs[k], *given = p->b->gout ? p->b->gout[k] : NULL;
  int rc = tape_edge(p->E, output, edge);
  if (rc) return rc;
  if (!edge->node)
    return err_set(
        MF_EINVAL,
        "backward: the tensor does not require a gradient and was not made from any that does");
  if (!given && meta_numel(&output->m) != 1)
    return err_set(
        MF_EINVAL,
        "backward: a tensor of shape %s needs a gradient of that shape; only one element has the "
        "gradient 1 by itself",
        shape_text(output->m.ndim, output->m.shape, shape));
  if (given && !tensor_same_shape(given, output))
    return err_set(MF_EINVAL, "backward: the gradient given has not the shape %s of the tensor",
                   shape_text(output->m.ndim, output->m.shape, shape));
  if (given && !given->layout != !output->layout)
    return err_set(MF_EINVAL, "backward: the gradient given is %s, the tensor %s",
                   given->layout ? "global" : "local", output->layout ? "global" : "local");
  return 0;
}

/* The gradient with which output k begins; NULL with the error set. */
static Tensor *first_gradient(Pass *p, int k) {
  Tensor *output = p->b->outputs[k], *given = p->b->gout ? p->b->gout[k] : NULL;
  if (!given) return ones_like(p->E, output);
  if (given->m.dtype == output->m.dtype) return tensor_retain(given);
  return eager_op(p->E, OP_cast, 1, &given, &(struct cast_args){.dtype = output->m.dtype});
}

static int run(Pass *p, Edge *roots) {
  const Backward *b = p->b;
  int rc = 0;
  for (int k = 0; k < b->n_out && !rc; k++) rc = root(p, k, &roots[k]);
  for (int k = 0; k < b->n_in && !rc; k++) rc = tape_edge(p->E, b->inputs[k], &p->targets[k]);
  if (!rc && p->selective) rc = mark_needed(p, roots);
  for (int k = 0; k < b->n_out && !rc; k++) {
    Tensor *g = first_gradient(p, k);
    rc = g ? route(p, &roots[k], g) : MF_ENOMEM;
  }
  return rc ? rc : drain(p);
}

/* A small space is kept for the next pass. */
static PassSpace *take_space(Eager *E) {
  PassSpace *s = E->spare_pass;
  E->spare_pass = NULL;
  return s ? s : mem_zalloc(sizeof *s);
}

static void space_free(PassSpace *s) {
  if (!s) return;
  vec_free(&s->visits);
  vec_free(&s->heap);
  mem_free(s);
}

static void end(Pass *p) {
  PassSpace *s = p->space;
  for (size_t i = s->visits.n; i-- > 0;) {
    Visit *v = &s->visits.at[i];
    v->node->pass = v->pass;
    v->node->place = v->place;
    tensor_release(v->one);
    for (int k = 0; v->g && k < v->node->n_out; k++) tensor_release(v->g[k]);
    mem_free(v->g);
    tape_node_release(v->node);
  }
  s->visits.n = s->heap.n = 0;
  if (p->E->spare_pass || s->visits.cap > SPARE_VISITS) space_free(s);
  else p->E->spare_pass = s;
}

void tape_end(Eager *E) {
  space_free(E->spare_pass);
}

int tape_backward(Eager *E, const Backward *b) {
  Edge small[SMALL_EDGES], *edges = small;
  int n = b->n_out + b->n_in;
  if (n > SMALL_EDGES && !(edges = mem_alloc(sizeof *edges * (size_t)n))) return no_memory();
  for (int k = 0; k < n; k++) edges[k].node = NULL;
  Pass p = {.E = E,
            .id = ++E->passes,
            .space = take_space(E),
            .b = b,
            .selective = b->n_in > 0,
            .targets = edges + b->n_out};
  bool enabled = E->grad_enabled, retaining = E->retaining;
  E->grad_enabled = b->create_graph;
  E->retaining = b->retain_graph;
  E->in_pass++;
  int rc = p.space ? run(&p, edges) : no_memory();
  if (--E->in_pass == 0 && E->buckets) rc = buckets_end_pass(E, rc);
  E->grad_enabled = enabled;
  E->retaining = retaining;
  for (int k = 0; k < n; k++) tape_node_release(edges[k].node);
  if (p.space) end(&p);
  if (edges != small) mem_free(edges);
  return rc;
}
