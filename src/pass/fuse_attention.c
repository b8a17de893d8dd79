/* Attention that was written out becomes one op: products, scale, mask, softmax and dropout, and
 * their backward.
 *
 * Why: the matrix of scores, rows by keys, is written and read a dozen times in a step, and the
 * backward keeps two or three of its kind. The op (attention.c) works on blocks of scores that stay
 * in the cache and keeps one number a row.
 *
 *   scores  matmul(q, k'), k' any value whose last dims are those of k the other way round
 *   steps   in any number: mul or div by a number; add of a mask; masked_fill, or where with a
 *           number; the scale comes first, and there is one mask at most
 *   softmax along the keys; behind it perhaps masked_fill by 0 of rows that see nothing, as
 *           scaled_dot_product_attention has them; perhaps dropout
 *   matmul  with v
 *
 * The backward is found from the softmax's on: its two products for the weights and the values, the
 * steps in reverse, the two for q and k.
 *
 * It gets any graph. A pattern is taken where no other node reads what is inside, so that a mask
 * that wants a gradient, or weights that are returned, leave it as it is; where leading dims are
 * equal; and, with a backward, where all of it is there that other nodes read. A bool mask made of
 * ones by tril or triu in the step itself becomes is_causal, where -inf is filled in.
 *
 * What it may change: sums have another order, and 16-bit floats are not rounded between the ops.
 * Rows of which nothing is seen, and dropout's choices, are the same. It stands before amp and
 * algebra, which then see the op and clean the views up. Each softmax is looked at once, and what
 * is taken leaves the graph by dce: it ends. */
#include <math.h>
#include <string.h>

#include "op_args.h"
#include "op_ids.h"
#include "pass.h"
#include "readers.h"

enum { STEPS = 4, HOPS = 6 };

typedef struct Match {
  Graph *g;
  GraphNode *scores, *softmax, *dead, *drop, *product;
  GraphNode *steps[STEPS]; /* from the softmax up */
  int n_steps;
  double scale;
  GraphValue *mask; /* or NULL */
  bool hides;       /* of a bool mask: true is hidden */
  bool causal, has_fill;
  double fill;
  GraphNode *back;                            /* softmax_backward, or NULL */
  GraphNode *weights, *values, *query, *keys; /* products of the backward, or NULL */
  GraphValue *gradient;                       /* of the result */
  GraphNode *inner[32];                       /* all that is taken */
  int n_inner;
} Match;

/* -- What is asked ----------------------------------------------------------------------------- */

static bool is_plain(const GraphNode *n, int op) {
  return graph_is_op(n, op) && !n->n_patches && !n->n_written;
}

static bool same_form(const GraphValue *a, const GraphValue *b) {
  return a->dtype == b->dtype && a->device == b->device &&
         shape_equal(a->ndim, a->shape, b->ndim, b->shape);
}

/* Whether v is one number that no call changes. */
static bool is_number(const GraphValue *v, double *value) {
  const GraphNode *n = v->node;
  if (n->kind == GRAPH_NUMBER && n->cell == NO_CELL) *value = n->value;
  else if (is_plain(n, OP_full) && v->ndim == 0)
    *value = ((const struct full_args *)n->args)->fill_value;
  else return false;
  return true;
}

static bool is_zero(const GraphValue *v) {
  double value;
  return is_number(v, &value) && value == 0;
}

/* The value that v orders the dims of, and of which of its dims v's are. */
static GraphValue *ordered_from(GraphValue *v, int *dims) {
  for (int d = 0; d < v->ndim; d++) dims[d] = d;
  for (GraphNode *n = v->node;; v = n->in[0], n = v->node) {
    if (is_plain(n, OP_transpose)) {
      const struct transpose_args *a = n->args;
      for (int d = 0; d < v->ndim; d++)
        dims[d] = dims[d] == a->dim0 ? (int)a->dim1 : dims[d] == a->dim1 ? (int)a->dim0 : dims[d];
    } else if (is_plain(n, OP_permute)) {
      const struct permute_args *a = n->args;
      for (int d = 0; d < v->ndim; d++) dims[d] = (int)a->dims.v[dims[d]];
    } else {
      return v;
    }
  }
}

static void swap_last(int *dims, int ndim) {
  int last = dims[ndim - 1];
  dims[ndim - 1] = dims[ndim - 2];
  dims[ndim - 2] = last;
}

/* Whether t is v with its last two dims the other way round. */
static bool is_turned(GraphValue *t, GraphValue *v) {
  int a[MF_MAX_DIMS], b[MF_MAX_DIMS];
  if (t->ndim != v->ndim || t->ndim < 2 || ordered_from(t, a) != ordered_from(v, b)) return false;
  swap_last(b, v->ndim);
  return !memcmp(a, b, sizeof *a * (size_t)t->ndim);
}

/* Whether a product is one of matrices, head by head, without broadcasting. */
static bool is_by_heads(const GraphNode *n) {
  const GraphValue *a = n->in[0], *b = n->in[1], *y = &n->out[0];
  size_t batch = sizeof(int64_t) * (size_t)(a->ndim < 2 ? 0 : a->ndim - 2);
  return is_plain(n, OP_matmul) && a->ndim >= 3 && b->ndim == a->ndim && y->ndim == a->ndim &&
         a->dtype == b->dtype && !memcmp(a->shape, b->shape, batch) &&
         !memcmp(a->shape, y->shape, batch);
}

/* -- Masks ------------------------------------------------------------------------------------- */

/* Whether v is true, or not 0, where column <= row and else false; *turned: the other way round. */
static bool is_lower(const GraphValue *v, bool *turned) {
  double value;
  *turned = false;
  for (int i = 0; i < HOPS; i++) {
    const GraphNode *n = v->node;
    if (n->kind != GRAPH_OP || n->n_patches) return false;
    if (is_plain(n, OP_logical_not) || (is_plain(n, OP_eq) && is_zero(n->in[1])))
      *turned = !*turned;
    else if (is_plain(n, OP_tril)) {
      const GraphNode *all = n->in[0]->node;
      return ((const struct tril_args *)n->args)->diagonal == 0 && is_plain(all, OP_ones);
    } else if (is_plain(n, OP_triu)) {
      const GraphNode *all = n->in[0]->node;
      *turned = !*turned;
      return ((const struct triu_args *)n->args)->diagonal == 1 && is_plain(all, OP_ones);
    } else if (!is_plain(n, OP_cast) && !((is_plain(n, OP_ne) || is_plain(n, OP_gt)) &&
                                          is_number(n->in[1], &value) && value == 0))
      return false;
    v = n->in[0];
  }
  return false;
}

/* Takes the mask of a step that fills in `fill` where v is `hides`. */
static bool take_bool(Match *m, GraphValue *v, bool hides, double fill) {
  const GraphValue *y = &m->softmax->out[0];
  bool turned, whole = v->ndim >= 2 && y->shape[y->ndim - 2] == v->shape[v->ndim - 2] &&
                       y->shape[y->ndim - 1] == v->shape[v->ndim - 1];
  if (m->mask || m->has_fill || v->dtype != BOOL || v->number) return false;
  m->has_fill = true;
  m->fill = fill;
  m->causal = whole && fill == -INFINITY && is_lower(v, &turned) && turned == hides;
  if (m->causal) return true;
  m->mask = v;
  m->hides = hides;
  return true;
}

/* Whether v may be scores, perhaps scaled. */
static bool comes_from_product(const GraphValue *v) {
  for (int i = 0; i < STEPS; i++) {
    if (is_plain(v->node, OP_matmul)) return true;
    if (!is_plain(v->node, OP_mul) && !is_plain(v->node, OP_div)) return false;
    v = v->node->in[v->node->in[0]->number];
  }
  return false;
}

/* Whether n is a step on the way down from the value that it then returns; takes what it says. */
static GraphValue *take_step(Match *m, GraphNode *n) {
  double number;
  const GraphValue *y = &n->out[0];
  GraphValue *x = n->in[0];
  if (is_plain(n, OP_mul) || is_plain(n, OP_div)) {
    bool div = is_plain(n, OP_div);
    if (!div && is_number(x, &number)) x = n->in[1];
    else if (!is_number(n->in[1], &number)) return NULL;
    if (div && number == 0) return NULL;
    m->scale = div ? m->scale / number : m->scale * number;
  } else if (m->scale != 1) {
    return NULL; /* the scale would be the mask's too */
  } else if (is_plain(n, OP_add)) {
    if (((const struct add_args *)n->args)->alpha != 1 || m->mask) return NULL;
    GraphValue *mask = n->in[1];
    if (m->has_fill && !m->causal) return NULL;
    if (comes_from_product(mask) && !comes_from_product(x)) {
      mask = x;
      x = n->in[1];
    }
    if (mask->number || mask->dtype != y->dtype) return NULL;
    m->mask = mask;
  } else if (is_plain(n, OP_masked_fill)) {
    if (!is_number(n->in[2], &number) || !take_bool(m, n->in[1], true, number)) return NULL;
  } else if (is_plain(n, OP_where)) {
    bool hides = is_number(n->in[1], &number);
    if (!hides && !is_number(n->in[2], &number)) return NULL;
    if (!take_bool(m, n->in[0], hides, number)) return NULL;
    x = n->in[hides ? 2 : 1];
  } else {
    return NULL;
  }
  return same_form(x, y) ? x : NULL;
}

/* -- Forward ----------------------------------------------------------------------------------- */

static void take(Match *m, GraphNode *n) {
  m->inner[m->n_inner++] = n;
}

/* From the softmax up to the product of q and k. */
static bool find_scores(Match *m) {
  GraphValue *v = m->softmax->in[0];
  m->scale = 1;
  while (!graph_is_op(v->node, OP_matmul)) {
    if (v->node->kind != GRAPH_OP || m->n_steps == STEPS) return false;
    m->steps[m->n_steps++] = v->node;
    take(m, v->node);
    if (!(v = take_step(m, v->node))) return false;
  }
  m->scores = v->node;
  take(m, m->scores);
  return is_by_heads(m->scores);
}

static GraphNode *reader_of(const GraphValue *v, int op) {
  const Readers *r = readers_of(v);
  for (int i = 0; i < r->n && i < READERS; i++)
    if (r->at[i] && is_plain(r->at[i], op)) return r->at[i];
  return NULL;
}

/* Whether `dead` says which rows of the scores s are -inf alone, and takes the nodes that do. */
static bool is_dead_rows(Match *m, const GraphValue *dead, const GraphValue *s) {
  double number;
  GraphNode *all = dead->node;
  if (!is_plain(all, OP_all)) return false;
  const struct all_args *a = all->args;
  GraphNode *eq = all->in[0]->node;
  if (!is_plain(eq, OP_eq) || eq->in[0] != s || !is_number(eq->in[1], &number)) return false;
  take(m, all);
  take(m, eq);
  return number == -INFINITY && a->keepdim && a->dim.n == 1 && a->dim.v[0] == s->ndim - 1;
}

/* From the softmax down to the product with v. */
static bool find_product(Match *m) {
  const GraphValue *p = &m->softmax->out[0];
  m->dead = reader_of(p, OP_masked_fill);
  if (m->dead) {
    if (!is_zero(m->dead->in[2]) || !is_dead_rows(m, m->dead->in[1], m->softmax->in[0]))
      return false;
    if (m->has_fill && m->fill != -INFINITY) return false;
    take(m, m->dead);
    p = &m->dead->out[0];
  }
  m->drop = reader_of(p, OP_dropout);
  if (m->drop) {
    take(m, m->drop);
    p = &m->drop->out[0];
  }
  m->product = reader_of(p, OP_matmul);
  return m->product && m->product->in[0] == p && is_by_heads(m->product);
}

/* -- Backward ---------------------------------------------------------------------------------- */

static const GraphValue *dropped(const Match *m) {
  return m->product->in[0];
}

/* The product whose first factor is v turned, behind the view that turns it, which is taken. */
static GraphNode *product_of_turned(Match *m, const GraphValue *v) {
  const Readers *r = readers_of(v);
  for (int i = 0; i < r->n && i < READERS; i++) {
    GraphNode *n = r->at[i];
    if (!n || n->n_out != 1 || !is_turned(&n->out[0], (GraphValue *)(uintptr_t)v)) continue;
    GraphNode *product = reader_of(&n->out[0], OP_matmul);
    if (!product || product->in[0] != &n->out[0]) return NULL;
    take(m, n);
    return product;
  }
  return NULL;
}

static bool same_drop(const GraphNode *drop, const GraphNode *back) {
  const struct dropout_args *a = drop->args;
  const struct dropout_backward_args *b = back->args;
  return a->p == b->p && drop->generator == back->generator &&
         a->generator.seed == b->generator.seed && a->generator.stream == b->generator.stream;
}

/* From the softmax's backward up to the gradient of the result. */
static bool find_weights(Match *m) {
  const GraphValue *v = m->back->in[0];
  if (m->dead) {
    GraphNode *n = v->node;
    if (!is_plain(n, OP_masked_fill) || n->in[1] != m->dead->in[1] || !is_zero(n->in[2]))
      return false;
    take(m, n);
    v = n->in[0];
  }
  if (m->drop) {
    GraphNode *n = v->node;
    if (!is_plain(n, OP_dropout_backward) || !same_drop(m->drop, n)) return false;
    take(m, n);
    v = n->in[0];
  }
  m->weights = v->node;
  if (!is_by_heads(m->weights) || !is_turned(m->weights->in[1], m->product->in[1])) return false;
  take(m, m->weights);
  m->gradient = m->weights->in[0];
  m->values = product_of_turned(m, dropped(m));
  if (m->values && m->values->in[1] != m->gradient) return false;
  if (m->values) take(m, m->values);
  return true;
}

/* Whether n is the backward of step, from the gradient v of its result. */
static bool is_back_of(const GraphNode *n, const GraphNode *step, const GraphValue *v) {
  double a, b;
  if (is_plain(step, OP_masked_fill))
    return is_plain(n, OP_masked_fill) && n->in[0] == v && n->in[1] == step->in[1] &&
           is_zero(n->in[2]);
  if (is_plain(step, OP_where)) {
    int x = is_number(step->in[1], &a) ? 2 : 1;
    return is_plain(n, OP_where) && n->in[0] == step->in[0] && n->in[x] == v &&
           is_zero(n->in[3 - x]);
  }
  if (n->op != step->op || !is_plain(n, step->op->id) || n->in[0] != v) return false;
  if (!is_number(step->in[1], &a) && !is_number(step->in[0], &a)) return false;
  return is_number(n->in[1], &b) && a == b;
}

/* From the softmax's backward down to the gradients of q and k. */
static bool find_inputs(Match *m) {
  const GraphValue *v = &m->back->out[0];
  for (int i = 0; i < m->n_steps; i++) {
    GraphNode *step = m->steps[i], *n = readers_of(v)->at[0];
    if (is_plain(step, OP_add)) continue;
    if (readers_of(v)->n != 1 || !n || n->kind != GRAPH_OP || !is_back_of(n, step, v)) return false;
    take(m, n);
    v = &n->out[0];
  }
  const Readers *r = readers_of(v);
  for (int i = 0; i < r->n && i < READERS; i++) {
    GraphNode *n = r->at[i];
    if (!n || !is_by_heads(n)) return false;
    if (n->in[0] == v && is_turned(n->in[1], m->scores->in[1])) m->query = n;
    else if (n->in[1] == v && is_turned(n->in[0], m->scores->in[0])) m->keys = n;
    else return false;
    take(m, n);
  }
  return true;
}

static bool is_among(const GraphNode *n, GraphNode *const *nodes, int count) {
  for (int i = 0; i < count; i++)
    if (nodes[i] == n) return true;
  return false;
}

/* Whether only what is taken reads what is taken, but for the results. */
static bool is_closed(const Match *m) {
  GraphNode *ends[] = {m->product, m->values, m->query, m->keys};
  for (int i = 0; i < m->n_inner; i++) {
    const GraphNode *n = m->inner[i];
    if (is_among(n, ends, 4)) continue;
    const Readers *r = readers_of(&n->out[0]);
    for (int k = 0; k < r->n; k++)
      if (k == READERS || !r->at[k] || !is_among(r->at[k], m->inner, m->n_inner)) return false;
  }
  return true;
}

static bool find(Match *m, Graph *g, GraphNode *n) {
  *m = (Match){.g = g, .softmax = n};
  const GraphValue *y = &n->out[0];
  if (!is_plain(n, OP_softmax) || ((const struct softmax_args *)n->args)->dim != y->ndim - 1)
    return false;
  if (y->ndim < 3) return false;
  take(m, n);
  if (!find_scores(m) || !find_product(m)) return false;
  take(m, m->product);
  m->back = reader_of(y, OP_softmax_backward);
  if (m->back) {
    if (m->back->in[1] != y) return false;
    take(m, m->back);
    if (!find_weights(m) || !find_inputs(m)) return false;
  }
  for (int i = 0; i < m->n_steps; i++)
    if (m->steps[i]->segment != m->product->segment) return false;
  return m->scores->segment == m->product->segment && n->segment == m->product->segment &&
         is_closed(m);
}

/* -- Replacing --------------------------------------------------------------------------------- */

static GraphValue *add_view(Match *m, GraphNode *at, int op, const void *args, GraphValue *x,
                            const int64_t *shape) {
  GraphNode *n = graph_add_op(m->g, at, &op_table[op], args, 1, &x, 1);
  n->where = m->product->where;
  graph_describe(m->g, &n->out[0], (DType)x->dtype, x->device, x->ndim, shape);
  return &n->out[0];
}

/* v with its last two dims the other way round: what it is a view of where that is possible. */
static GraphValue *turn(Match *m, GraphNode *at, GraphValue *v) {
  int dims[MF_MAX_DIMS], nd = v->ndim;
  int64_t shape[MF_MAX_DIMS];
  struct permute_args order = {.dims.n = nd};
  if (is_plain(v->node, OP_transpose) && is_turned(v, v->node->in[0])) return v->node->in[0];
  GraphValue *from = ordered_from(v, dims);
  bool as_is = true;
  swap_last(dims, nd);
  for (int d = 0; d < nd; d++) {
    order.dims.v[d] = dims[d], shape[d] = from->shape[dims[d]];
    as_is &= dims[d] == d;
  }
  if (as_is) return from;
  if (from == v)
    return add_view(m, at, OP_transpose, &(struct transpose_args){.dim0 = nd - 2, .dim1 = nd - 1},
                    v, shape);
  return add_view(m, at, OP_permute, &order, from, shape);
}

static GraphValue *mask_of(Match *m) {
  GraphValue *v = m->mask;
  if (!v || !m->hides) return v;
  GraphNode *n = graph_add_op(m->g, m->product, &op_table[OP_logical_not],
                              op_table[OP_logical_not].defaults, 1, &v, 1);
  n->where = m->product->where;
  graph_describe(m->g, &n->out[0], BOOL, v->device, v->ndim, v->shape);
  return &n->out[0];
}

/* Whether a row of which nothing is seen is what softmax makes of it; else it is zeros. */
static bool fills(const Match *m) {
  return !m->dead;
}

static GraphNode *add_forward(Match *m, GraphValue **in) {
  double fill = m->has_fill ? m->fill : -INFINITY;
  GraphNode *n;
  if (m->drop) {
    const struct dropout_args *d = m->drop->args;
    struct drop_attention_args a = {.p = d->p,
                                    .is_causal = m->causal,
                                    .scale = m->scale,
                                    .fill = fill,
                                    .has_fill = fills(m),
                                    .generator = d->generator};
    n = graph_add_op(m->g, m->product, &op_table[OP_drop_attention], &a, 4, in, 2);
    n->generator = m->drop->generator;
  } else if (fills(m)) {
    struct plain_attention_args a = {.is_causal = m->causal, .scale = m->scale, .fill = fill};
    n = graph_add_op(m->g, m->product, &op_table[OP_plain_attention], &a, 4, in, 2);
  } else {
    struct attention_args a = {.is_causal = m->causal, .scale = m->scale};
    n = graph_add_op(m->g, m->product, &op_table[OP_attention], &a, 4, in, 2);
  }
  const GraphValue *y = &m->product->out[0];
  n->where = m->product->where;
  graph_describe(m->g, &n->out[0], (DType)y->dtype, y->device, y->ndim, y->shape);
  int64_t kept[MF_MAX_DIMS]; /* of each row: two numbers, or one without a dim of its own */
  memcpy(kept, y->shape, sizeof *kept * (size_t)y->ndim);
  kept[y->ndim - 1] = 2;
  graph_describe(m->g, &n->out[1], y->dtype == F64 ? F64 : F32, y->device,
                 fills(m) ? y->ndim : y->ndim - 1, kept);
  return n;
}

/* The first of the backward. */
static GraphNode *first_of_back(const Match *m) {
  GraphNode *first = m->weights;
  if (m->values && m->values->id < first->id) first = m->values;
  return first;
}

static GraphNode *add_backward(Match *m, GraphValue *const *q, GraphNode *y) {
  double fill = m->has_fill ? m->fill : -INFINITY;
  GraphValue *in[7] = {q[0], q[1], q[2], m->gradient, &y->out[0], &y->out[1], q[3]};
  GraphNode *at = first_of_back(m), *n;
  if (m->drop) {
    const struct dropout_args *d = m->drop->args;
    struct drop_attention_backward_args a = {.p = d->p,
                                             .is_causal = m->causal,
                                             .scale = m->scale,
                                             .fill = fill,
                                             .has_fill = fills(m),
                                             .generator = d->generator};
    n = graph_add_op(m->g, at, &op_table[OP_drop_attention_backward], &a, 7, in, 3);
    n->generator = m->drop->generator;
  } else if (fills(m)) {
    struct plain_attention_backward_args a = {
        .is_causal = m->causal, .scale = m->scale, .fill = fill};
    n = graph_add_op(m->g, at, &op_table[OP_plain_attention_backward], &a, 7, in, 3);
  } else {
    struct attention_backward_args a = {.is_causal = m->causal, .scale = m->scale};
    n = graph_add_op(m->g, at, &op_table[OP_attention_backward], &a, 7, in, 3);
  }
  n->where = m->weights->where;
  for (int k = 0; k < 3; k++)
    graph_describe(m->g, &n->out[k], (DType)q[k]->dtype, q[k]->device, q[k]->ndim, q[k]->shape);
  return n;
}

static void replace(Match *m) {
  GraphNode *at = m->product;
  GraphValue *q[4] = {m->scores->in[0], turn(m, at, m->scores->in[1]), m->product->in[1],
                      mask_of(m)};
  GraphNode *y = add_forward(m, q);
  m->product->out[0].mark = &y->out[0];
  if (!m->back) return;
  GraphNode *back = add_backward(m, q, y);
  if (m->query) m->query->out[0].mark = &back->out[0];
  if (m->values) m->values->out[0].mark = &back->out[2];
  if (!m->keys) return;
  int nd = q[1]->ndim;
  m->keys->out[0].mark = add_view(m, back->next, OP_transpose,
                                  &(struct transpose_args){.dim0 = nd - 2, .dim1 = nd - 1},
                                  &back->out[1], m->keys->out[0].shape);
}

void pass_fuse_attention(Graph *g, const PassSettings *settings) {
  LIST(Match *) found = {0};
  (void)settings;
  if (!g->has[OP_softmax]) return;
  readers_find(g);
  for (GraphNode *n = g->first; n; n = n->next) {
    Match m;
    if (!graph_is_op(n, OP_softmax) || !find(&m, g, n)) continue;
    Match *kept = arena_new(&g->arena, Match);
    *kept = m;
    *list_add(&g->arena, &found) = kept;
  }
  graph_clear_marks(g);
  for (size_t i = 0; i < found.n; i++) replace(found.at[i]);
  graph_replace_marked(g);
}
