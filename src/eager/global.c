/* Global tensors: making them, converting them, and how conversions are recorded.
 *
 * A conversion is a node BOX. The gradient of a conversion between layouts is converted back (to B
 * where the input was partial: each summand has the gradient of the sum). The local tensor that was
 * taken for a part gets the gradient's part under the dual layout, and the other way round: copies
 * (B) on the ranks have gradients that add up (P). */
#include <stdio.h>
#include <string.h>

#include "global.h"
#include "mem.h"
#include "op_args.h"
#include "op_ids.h"
#include "tape_int.h"

Tensor *global_wrap(Eager *E, const Meta *whole, Tensor *part, const Layout *l) {
  Tensor *t = part ? tensor_new(E) : NULL;
  if (!t) {
    tensor_release(part);
    return NULL;
  }
  t->m = *whole;
  t->m.number = false;
  t->storage = part->storage;
  storage_retain(t->storage);
  t->part = part;
  t->layout = l;
  part->uncounted = true;
  return t;
}

/* x itself where it lies in one piece, else a copy; counted. Recorded. */
static Tensor *in_one_piece(Eager *E, Tensor *x) {
  if (meta_is_contiguous(&x->m)) return tensor_retain(x);
  return eager_op(E, OP_clone, 1, &x, &(struct clone_args){.memory_format = 1});
}

/* -- In a step that is traced ------------------------------------------------------------------ */

Tensor *global_open(Eager *E, const Meta *whole, const Layout *l) {
  Tensor *t = tensor_new(E);
  if (!t) return NULL;
  t->m = *whole;
  t->m.number = false;
  t->layout = l;
  tensor_open_traced(t);
  return t;
}

Tensor *global_trace_box(Eager *E, int op, Tensor *x, const void *args, Tensor *y) {
  union {
    char bytes[OP_MAX_ARGS];
    double align;
  } copy;
  if (!y) return NULL;
  memcpy(copy.bytes, args ? args : op_table[op].defaults, op_table[op].args_size);
  EagerCall c = {.op = &op_table[op],
                 .in = &x,
                 .n_in = 1,
                 .args = copy.bytes,
                 .target = y->layout,
                 .n_out = 1,
                 .small = {y}};
  c.out = c.small;
  if (!E->tracer->record(E->tracer, &c)) return y;
  tensor_release(y);
  return NULL;
}

static void set_size(IntList *size, const Meta *m) {
  size->n = m->ndim;
  memcpy(size->v, m->shape, sizeof(int64_t) * (size_t)m->ndim);
}

/* The local x as a part of a tensor of that form. */
static Tensor *trace_parts(Eager *E, Tensor *x, const Meta *whole, const Layout *l) {
  struct box_parts_args args = {.size = {0}};
  set_size(&args.size, whole);
  return global_trace_box(E, OP_box_parts, x, &args, global_open(E, whole, l));
}

static Tensor *trace_part(Eager *E, Tensor *x) {
  struct box_part_args args = {.size = {0}};
  Meta m = x->m;
  int64_t start[MF_MAX_DIMS];
  m.ndim = 1, m.shape[0] = 0, m.offset = 0;
  if (x->layout->place->index >= 0) {
    m.ndim = x->m.ndim;
    global_part_shape(x->layout, x->m.ndim, x->m.shape, start, m.shape);
  }
  shape_contiguous(m.ndim, m.shape, m.stride);
  set_size(&args.size, &m);
  Tensor *lies = global_trace_box(E, OP_box, x, NULL, global_open(E, &x->m, x->layout));
  Tensor *y = lies ? global_trace_box(E, OP_box_part, lies, &args, global_open(E, &m, NULL)) : NULL;
  tensor_release(lies);
  return y;
}

/* What this rank has of x; NULL with the error set. */
static Tensor *part_of(Tensor *x) {
  if (x->part) return x->part;
  err_set(MF_EINVAL,
          x->E->tracer ? "the tensor belongs to a step that is being compiled: its value is known "
                         "only when the compiled step runs; return it, and read the result"
                       : "the tensor belongs to a step that was compiled; outside of it there is "
                         "no value");
  return NULL;
}

/* -- Between layouts --------------------------------------------------------------------------- */

static void note(Eager *E, const Tensor *x, const Layout *to) {
  char text[SHAPE_TEXT_MAX + 100], shape[SHAPE_TEXT_MAX];
  snprintf(text, sizeof text, "to_global %s from %s to %s",
           shape_text(x->m.ndim, x->m.shape, shape), x->layout->text, to->text);
  for (int a = 0; a < MF_MAX_AXES; a++) {
    if (x->layout->place->group[a]) comm_note(x->layout->place->group[a], text);
    if (to->place->group[a] && to->place != x->layout->place) comm_note(to->place->group[a], text);
  }
  (void)E;
}

/* The strides of the whole as if it were not cut: as the part lies, which is contiguous. */
static Meta settled(const Meta *m) {
  Meta whole = *m;
  whole.offset = 0;
  whole.number = false;
  shape_contiguous(whole.ndim, whole.shape, whole.stride);
  return whole;
}

Tensor *global_convert(Eager *E, Tensor *x, const Layout *l, const Layout *grad) {
  if (x->layout == l && !grad) return tensor_retain(x);
  if (sbp_list_check("to_global", &l->sbp, MF_MAX_AXES, x->m.ndim)) return NULL;
  if (!grad) grad = global_of_gradient(E, x->layout);
  if (!grad) return NULL;
  Meta whole = settled(&x->m);
  Tensor *part = NULL, *y;
  if (E->tracer) {
    y = global_trace_box(E, OP_box, x, NULL, global_open(E, &whole, l));
  } else {
    note(E, x, l);
    part = global_box(E, x, l, true);
    y = part ? global_wrap(E, &whole, part, l) : NULL;
  }
  if (!y || !tape_record_box(E, x, y, grad)) return y;
  tensor_release(y);
  return NULL;
}

Tensor *global_gather(Eager *E, Tensor *x) {
  const Layout *b = global_broadcast(E, x->layout);
  if (!b) return NULL;
  if (!part_of(x)) return NULL;
  if (b->place->index < 0) {
    err_set(MF_EINVAL, "the tensor's value is not on this rank: its placement has others");
    return NULL;
  }
  if (x->layout != b) note(E, x, b);
  return global_box(E, x, b, false);
}

/* -- From local tensors ------------------------------------------------------------------------ */

enum { CARD = MF_MAX_DIMS + 4 }; /* in the job?, dtype, ndim, hash, sizes */

static uint64_t hash_of(const void *bytes, size_t n) {
  const unsigned char *p = bytes;
  uint64_t h = UINT64_C(0x9e3779b97f4a7c15) ^ n, w;
  for (; n >= 8; n -= 8, p += 8) {
    memcpy(&w, p, 8);
    h = (h ^ w) * UINT64_C(0xff51afd7ed558ccd);
    h ^= h >> 32;
  }
  for (; n; n--) h = (h ^ *p++) * UINT64_C(0xc4ceb9fe1a85ec53);
  return h ^ h >> 29;
}

static bool has_copies(const Layout *l) {
  for (int a = 0; a < layout_placement(l)->n_axes; a++)
    if (l->sbp.axis[a].kind == SBP_B && layout_placement(l)->size[a] > 1) return true;
  return false;
}

/* What all ranks say of their parts: a card each. */
static int exchange_cards(Eager *E, const Tensor *x, const Layout *l, int64_t *cards) {
  Comm *comm = E->context->comm;
  CommGroup *world = comm_world(comm);
  int n = comm_size(comm);
  int64_t card[CARD] = {l->place->index >= 0, x->m.dtype, x->m.ndim}, *counts;
  if (!world || !(counts = mem_alloc(sizeof *counts * (size_t)n)))
    return world ? err_set(MF_ENOMEM, "to_global: out of memory") : MF_ECOMM;
  for (int i = 0; i < n; i++) counts[i] = CARD;
  memcpy(card + 4, x->m.shape, sizeof(int64_t) * (size_t)x->m.ndim);
  if (card[0] && has_copies(l) && !E->tracer)
    card[3] =
        (int64_t)hash_of(tensor_data(x), (size_t)meta_numel(&x->m) * dtype_size((DType)x->m.dtype));
  comm_note(world, "to_global of local tensors");
  int rc = comm_collective(
      world, &(CommCall){.op = COMM_ALL_GATHER, .dtype = I64, .counts = counts}, card, cards);
  mem_free(counts);
  return rc;
}

static const int64_t *card_at(const Layout *l, const int64_t *cards, int index) {
  return cards + (int64_t)CARD * layout_placement(l)->rank[index];
}

/* The whole's sizes: along a split dim the sum over the ranks that share all else with the first.
 */
static int add_up(const Layout *l, const int64_t *cards, Meta *whole) {
  const Placement *p = layout_placement(l);
  const int64_t *first = card_at(l, cards, 0);
  if (first[2] > MF_MAX_DIMS) return err_set(MF_EINVAL, "to_global: too many dims");
  whole->dtype = (uint8_t)first[1];
  whole->ndim = (int8_t)first[2];
  int rc = sbp_list_check("to_global", &l->sbp, p->n_axes, whole->ndim);
  for (int d = 0; d < whole->ndim; d++) whole->shape[d] = 0;
  for (int i = 0; i < p->n && !rc; i++) {
    int at[MF_MAX_AXES];
    const int64_t *card = card_at(l, cards, i);
    placement_coordinates(p, i, at);
    if (card[1] != first[1] || card[2] != first[2])
      return err_set(MF_EINVAL,
                     "to_global: the parts of ranks %d and %d are of different dtypes or "
                     "numbers of dims",
                     p->rank[0], p->rank[i]);
    for (int d = 0; d < whole->ndim; d++) {
      bool counts = true;
      for (int a = 0; a < p->n_axes; a++)
        counts &= !at[a] || (l->sbp.axis[a].kind == SBP_S && l->sbp.axis[a].dim == d);
      if (counts) whole->shape[d] += card[4 + d];
    }
  }
  return rc;
}

/* Each part must be what a balanced split of the whole gives. */
static int check_shapes(const Layout *l, const int64_t *cards, const Meta *whole) {
  const Placement *p = layout_placement(l);
  int64_t start[MF_MAX_DIMS], length[MF_MAX_DIMS];
  char a[SHAPE_TEXT_MAX], b[SHAPE_TEXT_MAX], c[SHAPE_TEXT_MAX];
  for (int i = 0; i < p->n; i++) {
    placement_part(p, &l->sbp, i, whole->ndim, whole->shape, start, length);
    const int64_t *shape = card_at(l, cards, i) + 4;
    if (shape_equal(whole->ndim, shape, whole->ndim, length)) continue;
    return err_set(
        MF_EINVAL,
        "to_global: rank %d has a part of shape %s, but of a tensor of shape %s under %s "
        "its part has %s; mf.distribute cuts a whole tensor",
        p->rank[i], shape_text(whole->ndim, shape, a), shape_text(whole->ndim, whole->shape, b),
        l->text, shape_text(whole->ndim, length, c));
  }
  return 0;
}

/* Copies are the ranks that differ only along axes of B. */
static int check_copies(const Layout *l, const int64_t *cards) {
  const Placement *p = layout_placement(l);
  for (int i = 0; i < p->n && has_copies(l); i++) {
    int at[MF_MAX_AXES], first = 0;
    placement_coordinates(p, i, at);
    for (int a = 0; a < p->n_axes; a++)
      first = first * p->size[a] + (l->sbp.axis[a].kind == SBP_B ? 0 : at[a]);
    if (card_at(l, cards, i)[3] == card_at(l, cards, first)[3]) continue;
    return err_set(MF_EINVAL,
                   "to_global: under %s ranks %d and %d must have equal values, and have not",
                   l->text, p->rank[first], p->rank[i]);
  }
  return 0;
}

static int find_whole(Eager *E, const Tensor *x, const Layout *l, Meta *whole) {
  int n = comm_size(E->context->comm);
  int64_t *cards = mem_alloc(sizeof *cards * CARD * (size_t)n);
  int rc = cards ? exchange_cards(E, x, l, cards) : err_set(MF_ENOMEM, "to_global: out of memory");
  if (!rc) rc = add_up(l, cards, whole);
  if (!rc) rc = check_shapes(l, cards, whole);
  if (!rc) rc = check_copies(l, cards);
  mem_free(cards);
  return rc;
}

/* Where nothing is compared, each rank has as much as this one. */
static int assume_whole(const Tensor *x, const Layout *l, Meta *whole) {
  const Placement *p = layout_placement(l);
  *whole = x->m;
  int rc = sbp_list_check("to_global", &l->sbp, p->n_axes, whole->ndim);
  for (int a = 0; a < p->n_axes && !rc; a++)
    if (l->sbp.axis[a].kind == SBP_S) whole->shape[l->sbp.axis[a].dim] *= p->size[a];
  return rc;
}

static Tensor *no_part(Eager *E, const Meta *whole) {
  return tensor_create(E, (DType)whole->dtype, 1, (const int64_t[]){0}, DEVICE_CPU);
}

Tensor *global_from_local(Eager *E, Tensor *x, const Layout *l, bool check) {
  Meta whole = {.device = DEVICE_CPU};
  if (!E->tracer && tensor_check_data(x, "to_global")) return NULL;
  Tensor *own = in_one_piece(E, x);
  if (!own) return NULL;
  int rc = check ? find_whole(E, own, l, &whole) : assume_whole(own, l, &whole);
  if (!rc) rc = shape_check("to_global", whole.ndim, whole.shape, (DType)whole.dtype);
  shape_contiguous(whole.ndim, whole.shape, whole.stride);
  whole.offset = 0;
  Tensor *y = NULL, *part = NULL;
  if (!rc && E->tracer) y = trace_parts(E, own, &whole, l);
  else if (!rc) part = l->place->index >= 0 ? tensor_alias(own) : no_part(E, &whole);
  if (part) y = global_wrap(E, &whole, part, l);
  if (y && tape_record_box(E, own, y, NULL)) {
    tensor_release(y);
    y = NULL;
  }
  tensor_release(own);
  return y;
}

Tensor *global_distribute(Eager *E, Tensor *x, const Layout *l) {
  const Layout *all = global_broadcast(E, l);
  if (!all || sbp_list_check("distribute", &l->sbp, MF_MAX_AXES, x->m.ndim)) return NULL;
  Meta whole = settled(&x->m);
  if (E->tracer) return global_trace_box(E, OP_box, x, NULL, global_open(E, &whole, l));
  if (tensor_check_data(x, "distribute")) return NULL;
  Tensor *part =
      l->place->index >= 0 ? global_box_part(E, x, &whole, all, l, true) : no_part(E, &whole);
  return part ? global_wrap(E, &whole, part, l) : NULL;
}

Tensor *global_to_local(Eager *E, Tensor *x) {
  const Layout *dual = global_dual(E, x->layout);
  if (!dual || (!E->tracer && !part_of(x))) return NULL;
  Tensor *y = E->tracer ? trace_part(E, x) : tensor_alias(x->part);
  if (!y) return NULL;
  y->uncounted = x->uncounted;
  if (!tape_record_box(E, x, y, dual)) return y;
  tensor_release(y);
  return NULL;
}

/* -- The way back ------------------------------------------------------------------------------ */

/* The local gradient g as this rank's part of one under l, for a tensor of that form. */
static Tensor *from_part(Eager *E, Tensor *g, const GradMeta *m, const Layout *l) {
  Meta whole = {.ndim = m->ndim, .dtype = m->dtype, .device = m->device};
  memcpy(whole.shape, m->shape, sizeof(int64_t) * (size_t)m->ndim);
  shape_contiguous(whole.ndim, whole.shape, whole.stride);
  Tensor *own = in_one_piece(E, g), *y = NULL;
  if (own)
    y = E->tracer ? trace_parts(E, own, &whole, l) : global_wrap(E, &whole, tensor_alias(own), l);
  if (y && tape_record_box(E, own, y, NULL)) {
    tensor_release(y);
    y = NULL;
  }
  tensor_release(own);
  return y;
}

int tape_run_box(Eager *E, Node *n, Tensor *const *gout, Tensor **gin) {
  const Layout *in = n->in_meta[0].layout, *out = n->out_meta[0].layout;
  Tensor *g = gout[0];
  if (in && !out) {
    gin[0] = from_part(E, g, &n->in_meta[0], in);
  } else if (in) {
    gin[0] = global_convert(E, g, in, NULL);
  } else if (out->place->index < 0) { /* what this rank gave was not used */
    gin[0] = tape_zeros(E, &n->in_meta[0]);
  } else {
    const Layout *dual = global_dual(E, out);
    Tensor *under = dual ? global_convert(E, g, dual, NULL) : NULL;
    gin[0] = under ? global_to_local(E, under) : NULL;
    tensor_release(under);
  }
  return gin[0] ? 0 : MF_EINVAL;
}
