/* The backward pass: nodes are taken from a heap, highest number first, so that a node is taken when all its consumers have given
 * their part; its gradient lines run; what they return goes to the nodes of its inputs. Leaves have number 0 and come last.
 *
 * With `inputs` (mf.grad) only nodes on a path to one of them are run, and their gradients are handed out instead of accumulated. Everything of one
 * pass lies in a Pass, so that a pass may run inside a hook of another. */
#include <stdlib.h>
#include <string.h>

#include "eager.h"
#include "map.h"
#include "op_args.h"
#include "op_ids.h"
#include "vec.h"

typedef struct Visit {
  Node *node;      /* counted */
  Tensor **g;      /* gradients of its outputs so far, counted; NULL: none */
  bool needed;
} Visit;

typedef struct Pass {
  Eager *E;
  VEC(Visit) visits;
  VEC(int) heap;            /* of visits, by seq */
  Map index;                /* node to visit */
  bool selective, retain_graph, create_graph;
  int n_in;                 /* selective: the edges whose gradients are wanted */
  Edge *targets;
  Tensor **grads;
} Pass;

/* -- The heap --------------------------------------------------------------------------------------------------------------------- */

static uint64_t seq_at(const Pass *p, size_t i) {
  return p->visits.at[p->heap.at[i]].node->seq;
}

static void heap_swap(Pass *p, size_t a, size_t b) {
  int t = p->heap.at[a];
  p->heap.at[a] = p->heap.at[b];
  p->heap.at[b] = t;
}

static bool heap_push(Pass *p, int visit) {
  if (!vec_push(&p->heap, visit)) return false;
  for (size_t i = p->heap.n - 1; i && seq_at(p, (i - 1) / 2) < seq_at(p, i); i = (i - 1) / 2) heap_swap(p, i, (i - 1) / 2);
  return true;
}

static int heap_pop(Pass *p) {
  int top = p->heap.at[0];
  p->heap.at[0] = p->heap.at[--p->heap.n];
  for (size_t i = 0, c; (c = 2 * i + 1) < p->heap.n; i = c) {
    if (c + 1 < p->heap.n && seq_at(p, c + 1) > seq_at(p, c)) c++;
    if (seq_at(p, i) >= seq_at(p, c)) break;
    heap_swap(p, i, c);
  }
  return top;
}

/* -- Visits ------------------------------------------------------------------------------------------------------------------------ */

static int no_memory(void) {
  return err_set(MF_ENOMEM, "backward: out of memory");
}

/* The visit of a node, made when missing; -1 when out of memory. */
static int visit_of(Pass *p, Node *n) {
  int64_t at = map_get(&p->index, n);
  if (at >= 0) return (int)at;
  Visit v = {.node = n, .g = mem_zalloc(sizeof *v.g * (size_t)n->n_out)};
  if (!v.g || !vec_push(&p->visits, v)) {
    mem_free(v.g);
    return -1;
  }
  n->refs++;
  at = (int64_t)p->visits.n - 1;
  return map_put(&p->index, n, at) ? (int)at : -1;
}

static bool fits(const Tensor *g, const GradMeta *m) {
  return g->m.ndim == m->ndim && g->m.dtype == m->dtype && !memcmp(g->m.shape, m->shape, sizeof(int64_t) * (size_t)m->ndim);
}

/* Brings a gradient to its input's shape (sums over what was broadcast) and dtype. Takes and gives a count. */
static int fit(Pass *p, Node *n, int k, Tensor **g) {
  const GradMeta *m = &n->in_meta[k];
  char have[SHAPE_TEXT_MAX], want[SHAPE_TEXT_MAX];
  if (!(*g)->storage || fits(*g, m)) return 0;
  if ((*g)->m.ndim != m->ndim || memcmp((*g)->m.shape, m->shape, sizeof(int64_t) * (size_t)m->ndim)) {
    int ndim = (*g)->m.ndim;
    int64_t shape[MF_MAX_DIMS];
    memcpy(shape, (*g)->m.shape, sizeof shape);
    if (!shape_broadcast(&ndim, shape, m->ndim, m->shape) || ndim != (*g)->m.ndim || memcmp(shape, (*g)->m.shape, sizeof(int64_t) * (size_t)ndim))
      return err_set(MF_EINVAL, "backward: the gradient of input %d of %s has shape %s, the input has %s", k + 1,
                     n->op ? n->op->name : "a function", shape_text((*g)->m.ndim, (*g)->m.shape, have), shape_text(m->ndim, m->shape, want));
    struct sum_to_args args = {.size = {.n = m->ndim}};
    memcpy(args.size.v, m->shape, sizeof(int64_t) * (size_t)m->ndim);
    Tensor *summed = eager_op(p->E, OP_sum_to, 1, g, &args);
    if (!summed) return MF_EINVAL;
    tensor_release(*g);
    *g = summed;
  }
  if ((*g)->m.dtype == m->dtype) return 0;
  Tensor *cast = eager_op(p->E, OP_cast, 1, g, &(struct cast_args){.dtype = m->dtype});
  if (!cast) return MF_EINVAL;
  tensor_release(*g);
  *g = cast;
  return 0;
}

/* *sum += g; takes g's count. */
static int add_gradient(Pass *p, Tensor **sum, Tensor *g) {
  if (!*sum) {
    *sum = g;
    return 0;
  }
  int rc = 0;
  bool mine = (*sum)->refs == 1 && (*sum)->storage && atomic_load(&(*sum)->storage->refs) == 1 && g->storage && !p->create_graph &&
              shape_is_dense((*sum)->m.ndim, (*sum)->m.shape, (*sum)->m.stride);
  if (mine) {
    rc = eager_op_into(p->E, OP_add, 2, (Tensor *[]){*sum, g}, NULL);
  } else {
    Tensor *total = eager_add(p->E, *sum, g);
    if (!total) rc = MF_EINVAL;
    tensor_release(*sum);
    *sum = total;
  }
  tensor_release(g);
  return rc;
}

/* Gives g (counted, taken) to an edge. */
static int route(Pass *p, const Edge *edge, Tensor *g) {
  size_t known = p->visits.n;
  int v = edge->node ? visit_of(p, edge->node) : -1;
  if (!edge->node || (v >= 0 && p->selective && !p->visits.at[v].needed)) {
    tensor_release(g);
    return 0;
  }
  if (v < 0) return no_memory();
  bool first = true; /* a node enters the heap with its first gradient */
  for (int k = 0; k < edge->node->n_out; k++) first &= !p->visits.at[v].g[k];
  (void)known;
  if (first && !heap_push(p, v)) return no_memory();
  return add_gradient(p, &p->visits.at[v].g[edge->output], g);
}

/* -- One node --------------------------------------------------------------------------------------------------------------------- */

static const char *node_name(const Node *n) {
  return n->kind == NODE_OP ? n->op->name : n->inner && n->inner->op ? n->inner->op->name : "view";
}

static int check_saved(const Node *n) {
  for (int k = 0; k < n->n_in + n->n_out; k++) {
    const Saved *s = &n->saved[k];
    if (!s->t || !s->t->storage) continue;
    if (atomic_load_explicit(&s->t->storage->freed, memory_order_relaxed))
      return err_set(MF_EFREED, "backward: a tensor that %s needs for its gradient was freed", n->op->name);
    if (storage_version(s->t->storage) != s->version)
      return err_set(MF_EVERSION, "backward: a tensor that %s needs for its gradient was changed in place since (version %u, was %u); "
                     "clone it before the change", n->op->name, storage_version(s->t->storage), s->version);
  }
  return 0;
}

/* Runs the gradient lines of an op; gin has n->n_in places. */
static int run_op(Pass *p, Node *n, Tensor *const *gout, const bool *need, Tensor **gin) {
  Eager *E = p->E;
  int rc = check_saved(n);
  if (rc) return rc;
  uint32_t wanted = 0, served = 0;
  for (int k = 0; k < n->n_in; k++)
    if (need[k]) wanted |= 1u << op_param_of_input(n->op, n->args, k);
  for (int i = 0; i < n->op->n_grads && !rc; i++) {
    if (!(n->op->grads[i].serves & wanted)) continue;
    if (!E->gradient) return err_set(MF_EUNSUPPORTED, "backward: gradients need a Lua state");
    served |= n->op->grads[i].serves;
    rc = E->gradient(E->gradient_ud, n, i, gout, need, gin);
  }
  if (!rc && (wanted & ~served)) {
    int position = __builtin_ctz(wanted & ~served), at = 0;
    for (int i = 0; i < n->op->n_params; i++)
      if (n->op->params[i].kind == PARAM_TENSOR && at++ == position)
        return err_set(MF_EUNSUPPORTED, "backward: %s has no gradient for %s", n->op->name, n->op->params[i].name);
  }
  return rc;
}

static Tensor *zeros_like(Eager *E, const GradMeta *m) {
  Tensor *z = tensor_create(E, (DType)m->dtype, m->ndim, m->shape, m->device);
  if (z && E->context->devices[m->device]->api->has_data) memset(z->storage->data, 0, z->storage->bytes);
  return z;
}

static Tensor *slice_of(Eager *E, Tensor *g, const Geometry *at) {
  struct slice_base_args args = {.base_stride = at->base_stride, .size = at->size, .stride = at->stride, .offset = at->offset};
  return eager_op(E, OP_slice_base, 1, &g, &args);
}

static Tensor *scatter_into(Eager *E, Tensor *g, Tensor *src, const Geometry *at) {
  struct scatter_base_args args = {.base_stride = at->base_stride, .size = at->size, .stride = at->stride, .offset = at->offset};
  return eager_op(E, OP_scatter_base, 2, (Tensor *[]){g, src}, &args);
}

/* A view of a base that was written: its gradient is zero but for the view's place. */
static int run_view(Pass *p, Node *n, Tensor *const *gout, Tensor **gin) {
  Tensor *zero = zeros_like(p->E, &n->in_meta[0]);
  gin[0] = zero ? scatter_into(p->E, zero, gout[0], n->geometry) : NULL;
  tensor_release(zero);
  return gin[0] ? 0 : MF_ENOMEM;
}

/* An in-place write through a view: the op's gradient sees the view's place of the base's; there the base's becomes that of the view before the write. */
static int run_copy_slices(Pass *p, Node *n, Tensor *const *gout, const bool *need, Tensor **gin) {
  Tensor *g = slice_of(p->E, gout[0], n->geometry);
  if (!g) return MF_ENOMEM;
  int rc = n->inner->kind == NODE_OP ? run_op(p, n->inner, &g, need, gin) : MF_EUNSUPPORTED;
  if (!rc && need[0]) {
    GradMeta m = {.ndim = g->m.ndim, .dtype = g->m.dtype, .device = g->m.device};
    memcpy(m.shape, g->m.shape, sizeof m.shape);
    if (!gin[0]) gin[0] = zeros_like(p->E, &m);
    if (gin[0]) rc = fit(p, n->inner, 0, &gin[0]);
    Tensor *whole = gin[0] && !rc ? scatter_into(p->E, gout[0], gin[0], n->geometry) : NULL;
    tensor_release(gin[0]);
    gin[0] = whole;
    if (!whole) rc = rc ? rc : MF_ENOMEM;
  }
  tensor_release(g);
  return rc;
}

static void give_back(Node *n) {
  n->released = true;
  for (int k = 0; k < n->n_in + n->n_out; k++) {
    tensor_release(n->saved[k].t);
    n->saved[k].t = NULL;
  }
  if (n->inner) give_back(n->inner);
}

static bool edge_needed(const Pass *p, const Edge *e) {
  if (!e->node) return false;
  if (!p->selective) return true;
  int64_t v = map_get(&p->index, e->node);
  return v >= 0 && p->visits.at[v].needed;
}

static int run_node(Pass *p, Node *n, Tensor **gout) {
  if (n->released)
    return err_set(MF_EINVAL, "backward: the graph was freed by an earlier backward pass at %s; pass {retain_graph = true} to the earlier one",
                   node_name(n));
  bool small_need[16], *need = small_need;
  Tensor *small_gin[16], **gin = small_gin;
  if (n->n_in > 16) {
    need = mem_alloc(sizeof *need * (size_t)n->n_in);
    gin = mem_alloc(sizeof *gin * (size_t)n->n_in);
  }
  int rc = need && gin ? 0 : no_memory();
  bool any = false;
  for (int k = 0; k < n->n_in && !rc; k++) {
    gin[k] = NULL;
    any |= need[k] = edge_needed(p, &n->next[k]);
  }
  if (!rc && any) {
    if (n->kind == NODE_VIEW) rc = run_view(p, n, gout, gin);
    else if (n->kind == NODE_COPY_SLICES) rc = run_copy_slices(p, n, gout, need, gin);
    else rc = run_op(p, n, gout, need, gin);
  }
  for (int k = 0; k < n->n_in && gin && any; k++) {
    if (!gin[k]) continue;
    if (!rc && need[k]) rc = fit(p, n, k, &gin[k]);
    if (!rc && need[k]) rc = route(p, &n->next[k], gin[k]);
    else tensor_release(gin[k]);
  }
  if (!rc && !p->retain_graph) give_back(n);
  if (n->n_in > 16) {
    mem_free(need);
    mem_free(gin);
  }
  return rc;
}

/* -- Leaves ----------------------------------------------------------------------------------------------------------------------- */

/* Whether g can become a leaf's gradient without a copy: nobody else sees it, and it lies as the leaf does. */
static bool can_steal(const Tensor *t, const Tensor *g) {
  if (!g->storage) return true;
  return g->refs == 1 && atomic_load(&g->storage->refs) == 1 && g->m.ndim == t->m.ndim &&
         !memcmp(g->m.stride, t->m.stride, sizeof(int64_t) * (size_t)t->m.ndim) && (!g->ag || !g->ag->base);
}

int tape_accumulate(Eager *E, Tensor *t, Tensor *g, bool create_graph) {
  Autograd *ag = tensor_autograd(t);
  if (!ag) return MF_ENOMEM;
  if (!ag->grad) {
    ag->grad = create_graph || can_steal(t, g) ? tensor_retain(g) : eager_op(E, OP_clone, 1, &g, NULL);
    return ag->grad ? 0 : MF_ENOMEM;
  }
  if (!create_graph && ag->grad->storage && g->storage && !tensor_requires_grad(ag->grad))
    return eager_op_into(E, OP_add, 2, (Tensor *[]){ag->grad, g}, NULL);
  Tensor *sum = eager_add(E, ag->grad, g);
  if (!sum) return MF_EINVAL;
  tensor_release(ag->grad);
  ag->grad = sum;
  return 0;
}

/* -- The pass --------------------------------------------------------------------------------------------------------------------- */

static int compare_seq(const void *a, const void *b) {
  const Node *x = *(Node *const *)a, *y = *(Node *const *)b;
  return x->seq < y->seq ? -1 : x->seq > y->seq;
}

static bool is_target(const Pass *p, const Node *n) {
  for (int k = 0; k < p->n_in; k++)
    if (p->targets[k].node == n) return true;
  return false;
}

/* Marks the visits from which a target can be reached. All nodes below the roots get a visit. */
static int mark_needed(Pass *p, int n_roots, const Edge *roots) {
  for (int k = 0; k < n_roots; k++)
    if (roots[k].node && visit_of(p, roots[k].node) < 0) return no_memory();
  for (size_t i = 0; i < p->visits.n; i++) {
    Node *n = p->visits.at[i].node;
    for (int k = 0; k < n->n_in; k++)
      if (n->next[k].node && visit_of(p, n->next[k].node) < 0) return no_memory();
  }
  Node **order = mem_alloc(sizeof *order * (p->visits.n + 1));
  if (!order) return no_memory();
  for (size_t i = 0; i < p->visits.n; i++) order[i] = p->visits.at[i].node;
  qsort(order, p->visits.n, sizeof *order, compare_seq);
  for (size_t i = 0; i < p->visits.n; i++) {
    bool needed = is_target(p, order[i]);
    for (int k = 0; k < order[i]->n_in; k++) needed |= edge_needed(p, &order[i]->next[k]);
    p->visits.at[map_get(&p->index, order[i])].needed = needed;
  }
  mem_free(order);
  return 0;
}

static int finish_leaf(Pass *p, Node *n, Tensor *g) {
  if (p->selective || !n->leaf || !g) return 0;
  Tensor *leaf = tensor_retain(n->leaf);
  int rc = tape_accumulate(p->E, leaf, g, p->create_graph);
  tensor_release(leaf);
  return rc;
}

static int drain(Pass *p) {
  int rc = 0;
  while (p->heap.n && !rc) {
    if (atomic_load_explicit(&p->E->context->interrupted, memory_order_relaxed)) {
      atomic_store(&p->E->context->interrupted, false);
      return err_set(MF_EINTR, "interrupted");
    }
    int at = heap_pop(p);
    Node *n = p->visits.at[at].node;
    Tensor **g = p->visits.at[at].g;
    if (p->E->hook) rc = p->E->hook(p->E->gradient_ud, n, g);
    for (int k = 0; k < p->n_in && !rc; k++) {
      if (p->targets[k].node != n || !g[p->targets[k].output]) continue;
      tensor_release(p->grads[k]);
      p->grads[k] = tensor_retain(g[p->targets[k].output]);
    }
    if (!rc) {
      if (n->kind != NODE_ACCUMULATE) rc = run_node(p, n, g);
      else {
        Tensor *own = g[0]; /* the only count, so that the leaf may take it */
        g[0] = NULL;
        rc = finish_leaf(p, n, own);
        tensor_release(own);
      }
    }
    for (int k = 0; k < n->n_out; k++) {
      tensor_release(g[k]);
      g[k] = NULL;
    }
  }
  return rc;
}

static Tensor *ones_like(Eager *E, const Tensor *t) {
  Tensor *one = tensor_create(E, (DType)t->m.dtype, t->m.ndim, t->m.shape, t->m.device);
  if (one && tensor_has_data(one)) dtype_set_f64((DType)t->m.dtype, one->storage->data, 1);
  return one;
}

static int root(Pass *p, Tensor *output, Tensor *given, Edge *edge, Tensor **g) {
  char shape[SHAPE_TEXT_MAX];
  int rc = tape_edge(p->E, output, edge);
  if (rc) return rc;
  if (!edge->node) return err_set(MF_EINVAL, "backward: the tensor does not require a gradient and was not made from any that does");
  if (!given && meta_numel(&output->m) != 1)
    return err_set(MF_EINVAL, "backward: a tensor of shape %s needs a gradient of that shape; only one element has the gradient 1 by itself",
                   shape_text(output->m.ndim, output->m.shape, shape));
  if (given && (given->m.ndim != output->m.ndim || memcmp(given->m.shape, output->m.shape, sizeof(int64_t) * (size_t)given->m.ndim)))
    return err_set(MF_EINVAL, "backward: the gradient given has not the shape %s of the tensor",
                   shape_text(output->m.ndim, output->m.shape, shape));
  *g = given ? tensor_retain(given) : ones_like(p->E, output);
  return *g ? 0 : MF_ENOMEM;
}

static void pass_free(Pass *p) {
  for (size_t i = 0; i < p->visits.n; i++) {
    Visit *v = &p->visits.at[i];
    for (int k = 0; k < v->node->n_out; k++) tensor_release(v->g[k]);
    mem_free(v->g);
    tape_node_release(v->node);
  }
  vec_free(&p->visits);
  vec_free(&p->heap);
  map_free(&p->index);
}

int tape_backward(Eager *E, int n_out, Tensor *const *outputs, Tensor *const *gout, int n_in, Tensor *const *inputs, Tensor **grads,
                  bool retain_graph, bool create_graph) {
  Pass p = {.E = E, .selective = n_in > 0, .retain_graph = retain_graph, .create_graph = create_graph, .n_in = n_in, .grads = grads};
  Edge *roots = mem_zalloc(sizeof *roots * (size_t)(n_out + n_in + 1));
  Tensor **g = mem_zalloc(sizeof *g * (size_t)(n_out + 1));
  int rc = roots && g ? 0 : no_memory();
  bool was = E->grad_enabled;
  E->grad_enabled = create_graph;
  if (roots) p.targets = roots + n_out;
  for (int k = 0; k < n_out && !rc; k++) rc = root(&p, outputs[k], gout ? gout[k] : NULL, &roots[k], &g[k]);
  for (int k = 0; k < n_in && !rc; k++) rc = tape_edge(E, inputs[k], &p.targets[k]);
  if (!rc && p.selective) rc = mark_needed(&p, n_out, roots);
  for (int k = 0; k < n_out && !rc; k++) {
    rc = route(&p, &roots[k], g[k]);
    g[k] = NULL;
  }
  if (!rc) rc = drain(&p);
  E->grad_enabled = was;
  for (int k = 0; k < n_out && g; k++) tensor_release(g[k]);
  for (int k = 0; k < n_out + n_in && roots; k++) tape_node_release(roots[k].node);
  pass_free(&p);
  mem_free(roots);
  mem_free(g);
  return rc;
}
