/* Indexing by tensors of whole numbers: subscripts, index_select and its relatives, embedding. See
 * rows.h for how rows are found and moved.
 *
 * Placement follows PyTorch: the index tensors broadcast to a common shape; it takes the place of
 * the indexed dims where these are neighbours, and stands in front where they are not. Subscripts
 * may be negative, the indices of the named functions may not. */
#include <stdio.h>

#include "op_args.h"
#include "rows.h"
#include "sbp_rule.h"

/* -- Where the result's dims are --------------------------------------------------------------- */

typedef struct Placed {
  int ndim, at, places; /* [at, at + places): the index tensors' common shape */
  int64_t shape[2 * MF_MAX_DIMS];
  uint32_t indexed; /* bits of x's dims */
} Placed;

static void place(int ndim, const int64_t *shape, int n, const int64_t *dims, int places,
                  const int64_t *common, Placed *p) {
  bool together = true;
  p->indexed = 0;
  for (int k = 0; k < n; k++) {
    p->indexed |= 1u << dims[k];
    together &= k == 0 || dims[k] == dims[k - 1] + 1;
  }
  p->at = together && n ? (int)dims[0] : 0;
  p->places = places;
  p->ndim = 0;
  for (int d = 0; d <= ndim; d++) {
    if (p->ndim == p->at)
      for (int k = 0; k < places; k++) p->shape[p->ndim++] = common[k];
    if (d < ndim && !(p->indexed >> d & 1)) p->shape[p->ndim++] = shape[d];
  }
}

/* The common shape of the index tensors, which are inputs from `first` on. */
static int common_shape(Infer *I, int x_ndim, int first, int n, const int64_t *dims, int *ndim,
                        int64_t *shape) {
  char name[64], have[SHAPE_TEXT_MAX], other[SHAPE_TEXT_MAX];
  *ndim = 0;
  for (int k = 0; k < n; k++) {
    const Meta *i = I->in[first + k];
    infer_name(I, first + k, name, sizeof name);
    if (dims[k] < 0 || dims[k] >= x_ndim || (k && dims[k] <= dims[k - 1]))
      return infer_error(I, "dims must ascend and be below %d", x_ndim);
    if (dtype_is_float((DType)i->dtype) || i->dtype == BOOL)
      return infer_error(I, "%s must hold whole numbers, is %s", name, dtype_name((DType)i->dtype));
    int64_t before[MF_MAX_DIMS];
    int before_ndim = *ndim;
    memcpy(before, shape, sizeof(int64_t) * (size_t)*ndim);
    if (!shape_broadcast(ndim, shape, i->ndim, i->shape))
      return infer_error(I, "index tensors do not broadcast: %s is %s, the others are %s", name,
                         shape_text(i->ndim, i->shape, have),
                         shape_text(before_ndim, before, other));
  }
  return 0;
}

/* Where the subscripts, inputs from `first` on, put the elements of a tensor of this shape. */
static int subscript_place(Infer *I, int x_ndim, const int64_t *shape, int first,
                           const IntList *dims, int64_t n, Placed *p) {
  int places;
  int64_t common[MF_MAX_DIMS] = {0};
  if (dims->n != n || n == 0 || n > x_ndim)
    return infer_error(I, "%lld indices for %lld dims", (long long)n, (long long)dims->n);
  int rc = common_shape(I, x_ndim, first, (int)n, dims->v, &places, common);
  if (rc) return rc;
  place(x_ndim, shape, (int)n, dims->v, places, common, p);
  if (p->ndim > MF_MAX_DIMS)
    return infer_error(I, "the result has %d dims, at most %d are possible", p->ndim, MF_MAX_DIMS);
  return 0;
}

/* Refuses a value that does not broadcast to the places it is written to. */
static int want_value(Infer *I, int k, const Placed *p) {
  const Meta *v = I->in[k];
  int ndim = p->ndim;
  int64_t shape[2 * MF_MAX_DIMS];
  char name[64], have[SHAPE_TEXT_MAX], want[SHAPE_TEXT_MAX];
  memcpy(shape, p->shape, sizeof shape);
  if (shape_broadcast(&ndim, shape, v->ndim, v->shape) && ndim == p->ndim &&
      !memcmp(shape, p->shape, sizeof(int64_t) * (size_t)ndim))
    return 0;
  return infer_error(I, "%s of shape %s does not broadcast to the indexed places, which are %s",
                     infer_name(I, k, name, sizeof name), shape_text(v->ndim, v->shape, have),
                     shape_text(p->ndim, p->shape, want));
}

/* -- How they split ---------------------------------------------------------------------------- */

/* The placement of the index tensors, which are inputs from `first` on, in a tensor like x. */
static void asked_place(const SbpAsk *q, const Meta *x, int first, const IntList *dims, Placed *p) {
  int64_t common[MF_MAX_DIMS];
  int places = 0;
  for (int k = first; k < q->n_in; k++)
    shape_broadcast(&places, common, q->in[k]->ndim, q->in[k]->shape);
  place(x->ndim, x->shape, (int)dims->n, dims->v, places, common, p);
}

/* The dim of the result at which dim d of x stands, which is not indexed. */
static int placed_dim(const Placed *p, int d) {
  int before = 0;
  for (int k = 0; k < d; k++) before += !(p->indexed >> k & 1);
  return before < p->at ? before : before + p->places;
}

/* `inner` and `outer` are the places in a signature of the tensor that is indexed and of what is
 * found there; `partial`: the former is made from the latter, and partial when only some places are
 * known. */
static int subscript_sbp(SbpAsk *q, const Meta *x, int inner, int outer, const IntList *dims,
                         bool partial) {
  Placed p;
  asked_place(q, x, 1, dims, &p);
  for (int d = 0; d < x->ndim; d++) {
    if (p.indexed >> d & 1) continue;
    Sbp *row = sbp_add(q);
    if (!row) return MF_ENOMEM;
    row[inner] = sbp_split(d);
    row[outer] = sbp_split(placed_dim(&p, d));
  }
  for (int e = 0; e < p.places; e++) {
    Sbp *row = sbp_add(q);
    if (!row) return MF_ENOMEM;
    row[outer] = sbp_split(p.at + e);
    if (partial) row[inner].kind = SBP_P;
    for (int k = 1; k < q->n_in; k++) {
      int d = e - (p.places - q->in[k]->ndim);
      if (d >= 0 && q->in[k]->shape[d] != 1) row[k] = sbp_split(d);
    }
  }
  return 0;
}

static int index_sbp(SbpAsk *q) {
  const struct index_args *a = q->args;
  return subscript_sbp(q, q->in[0], 0, q->n_in, &a->dims, false);
}

static int index_backward_sbp(SbpAsk *q) {
  const struct index_backward_args *a = q->args;
  return subscript_sbp(q, q->out[0], q->n_in, 0, &a->dims, true);
}

static int index_put_sbp(SbpAsk *q) {
  const struct index_put_args *a = q->args;
  const Meta *x = q->in[0], *value = q->in[1];
  Placed p;
  asked_place(q, x, 2, &a->dims, &p);
  for (int d = 0; d < x->ndim; d++) {
    if (p.indexed >> d & 1) continue;
    Sbp *row = sbp_add(q);
    if (!row) return MF_ENOMEM;
    row[0] = row[q->n_in] = sbp_split(d);
    int at = placed_dim(&p, d) - (p.ndim - value->ndim);
    if (at >= 0 && value->shape[at] != 1) row[1] = sbp_split(at);
  }
  return 0;
}

/* Of ops with `dim` and one index tensor: whatever has x's dims is split along the others. */
static int along_sbp(SbpAsk *q, int index) {
  const Meta *x = q->in[0];
  uint32_t named = sbp_named_dims(q, x->ndim);
  for (int d = 0; d < x->ndim; d++) {
    if (named >> d & 1) continue;
    Sbp *row = sbp_add(q);
    if (!row) return MF_ENOMEM;
    for (int k = 0; k < q->n_in; k++)
      if (k != index && q->in[k]->ndim == x->ndim) row[k] = sbp_split(d);
    row[q->n_in] = sbp_split(d);
  }
  return 0;
}

static int index_write_sbp(SbpAsk *q) {
  return along_sbp(q, 1);
}

static int index_select_sbp(SbpAsk *q) {
  const struct index_select_args *a = q->args;
  int rc = along_sbp(q, 1);
  return rc ? rc : sbp_add_split(q, 1, 0, 0, (int)a->dim);
}

static int index_select_backward_sbp(SbpAsk *q) {
  const struct index_select_backward_args *a = q->args;
  int rc = along_sbp(q, 1);
  Sbp *row = rc ? NULL : sbp_add(q);
  if (!row) return rc ? rc : MF_ENOMEM;
  row[0] = sbp_split((int)(a->dim < 0 ? a->dim + q->in[0]->ndim : a->dim));
  row[1] = sbp_split(0);
  row[2].kind = SBP_P;
  return 0;
}

/* -- Kernels in common ------------------------------------------------------------------------- */

static int64_t places_of(int n, const View *index, int *ndim, int64_t *shape) {
  *ndim = 0;
  for (int k = 0; k < n; k++) shape_broadcast(ndim, shape, index[k].ndim, index[k].shape);
  return shape_numel(*ndim, shape);
}

typedef struct Indexed {
  const char *op;
  int n;
  const View *index;
  const int64_t *dims;
  const char *name; /* of the index; NULL: "indices[k]" */
  bool negative;
} Indexed;

/* Fills r->offset (n places) and *p for x indexed so. */
static int find_rows(const Indexed *i, const View *x, int64_t *offset, Rows *r, Placed *p) {
  int64_t common[MF_MAX_DIMS] = {0};
  int places;
  r->n = places_of(i->n, i->index, &places, common);
  r->offset = offset;
  place(x->ndim, x->shape, i->n, i->dims, places, common, p);
  View shape = {.shape = common, .ndim = (int8_t)places};
  for (int k = 0; k < i->n; k++) {
    char name[32];
    snprintf(name, sizeof name, "indices[%d]", k + 1);
    int64_t d = i->dims[k];
    int rc = rows_add_index(i->op, i->name ? i->name : name, &shape, &i->index[k], x->shape[d],
                            x->stride[d], i->negative, k == 0, offset);
    if (rc) return rc;
  }
  return 0;
}

static int take_rows(const Indexed *i, const View *x, const View *y, void *scratch) {
  Rows r;
  Placed p;
  int rc = find_rows(i, x, scratch, &r, &p);
  if (rc) return rc;
  rows_layout(&r, x, p.indexed, y, p.at, p.places);
  rows_gather(&r);
  return 0;
}

static size_t offsets_bytes(int n, const View *index) {
  int ndim;
  int64_t shape[MF_MAX_DIMS];
  return scratch_aligned((size_t)places_of(n, index, &ndim, shape) * sizeof(int64_t));
}

static size_t put_bytes(const Indexed *i, const View *x) {
  int ndim;
  int64_t common[MF_MAX_DIMS], n = places_of(i->n, i->index, &ndim, common), row = view_numel(x);
  for (int k = 0; k < i->n; k++) row = x->shape[i->dims[k]] ? row / x->shape[i->dims[k]] : 0;
  return scratch_aligned((size_t)n * sizeof(int64_t)) +
         (size_t)(n * row) * dtype_size((DType)x->dtype);
}

/* A view of value with the shape p, dense in x's dtype: value itself where it lies so, else a copy
 * in `room`. A single element becomes one row, used for all (*once). */
static View dense_value(const View *value, const View *x, const Placed *p, void *room,
                        int64_t *stride, bool *once) {
  View dense = {.data = room,
                .shape = p->shape,
                .stride = stride,
                .ndim = (int8_t)p->ndim,
                .dtype = x->dtype};
  bool same = value->dtype == x->dtype && value->ndim == p->ndim &&
              !memcmp(value->shape, p->shape, sizeof(int64_t) * (size_t)p->ndim);
  *once = view_numel(value) == 1 && value->ndim <= p->ndim;
  shape_contiguous(p->ndim, p->shape, stride);
  if (*once) {
    int64_t step = 1;
    for (int d = p->ndim - 1; d >= 0; d--) {
      bool place = d >= p->at && d < p->at + p->places;
      stride[d] = place ? 0 : step;
      if (!place) step *= p->shape[d];
    }
    View row = {
        .data = room, .shape = &step, .stride = &(int64_t){1}, .ndim = 1, .dtype = x->dtype};
    copy_views(&(View){.data = value->data, .dtype = value->dtype}, &row);
  } else if (same && view_is_contiguous(value)) {
    dense.data = value->data;
  } else {
    copy_views(value, &dense);
  }
  return dense;
}

/* y is x but at the indexed places, where value is written or added. The indices are checked before
 * anything is written. */
static int put_rows(const Indexed *i, const View *x, const View *value, const View *y,
                    void *scratch, bool add) {
  Rows r;
  Placed p;
  bool once;
  int64_t stride[2 * MF_MAX_DIMS];
  int rc = find_rows(i, y, scratch, &r, &p);
  if (rc) return rc;
  if (x && x->data != y->data) copy_views(x, y);
  else if (!x) copy_zero(y);
  if (r.n == 0 || view_numel(y) == 0) return 0;
  View dense =
      dense_value(value, y, &p, (char *)scratch + scratch_aligned((size_t)r.n * sizeof(int64_t)),
                  stride, &once);
  rows_layout(&r, y, p.indexed, &dense, p.at, p.places);
  if (once) r.dense_n = 0;
  rows_write(&r, add);
  return 0;
}

/* -- Subscripts -------------------------------------------------------------------------------- */

static int index_infer(Infer *I) {
  const struct index_args *a = I->args;
  Placed p;
  const Meta *x = I->in[0];
  int rc = subscript_place(I, x->ndim, x->shape, 1, &a->dims, a->n_indices, &p);
  return rc ? rc : infer_shape(I, (DType)I->in[0]->dtype, p.ndim, p.shape);
}

static Indexed subscripts(const OpCall *c, int first, const IntList *dims) {
  return (Indexed){.op = c->op->name,
                   .n = (int)dims->n,
                   .index = c->in + first,
                   .dims = dims->v,
                   .negative = true};
}

static size_t index_scratch(const OpCall *c) {
  return offsets_bytes(c->n_in - 1, c->in + 1);
}

static int index_cpu(const OpCall *c) {
  Indexed i = subscripts(c, 1, &((const struct index_args *)c->args)->dims);
  return take_rows(&i, &c->in[0], &c->out[0], c->scratch);
}

/* x[k], x[{k, j}]: the elements at the places that the index tensors name in the dims given. */
OP(index, .signature = "index(Tensor x, Tensor[] indices, int[] dims) -> Tensor",
   .flags = OP_HIDDEN, .sbp_rule = index_sbp, .linear = "x", .infer = index_infer, .cpu = index_cpu,
   .scratch = index_scratch)

static int index_backward_infer(Infer *I) {
  const struct index_backward_args *a = I->args;
  Placed p;
  DType t = (DType)I->in[0]->dtype;
  int ndim = (int)a->size.n, rc = shape_check(I->op->name, ndim, a->size.v, t);
  if (!rc) rc = subscript_place(I, ndim, a->size.v, 1, &a->dims, a->n_indices, &p);
  if (!rc) rc = infer_want_shape(I, 0, p.ndim, p.shape);
  return rc ? rc : infer_shape(I, t, ndim, a->size.v);
}

static size_t index_backward_scratch(const OpCall *c) {
  Indexed i = subscripts(c, 1, &((const struct index_backward_args *)c->args)->dims);
  return put_bytes(&i, &c->out[0]);
}

static int index_backward_cpu(const OpCall *c) {
  Indexed i = subscripts(c, 1, &((const struct index_backward_args *)c->args)->dims);
  return put_rows(&i, NULL, &c->in[0], &c->out[0], c->scratch, true);
}

/* The gradient of index: zeros of shape `size` with g added at the places. */
OP(index_backward,
   .signature = "index_backward(Tensor g, Tensor[] indices, int[] size, int[] dims) -> Tensor",
   .flags = OP_HIDDEN, .sbp_rule = index_backward_sbp, .linear = "g", .infer = index_backward_infer,
   .cpu = index_backward_cpu, .scratch = index_backward_scratch)

static int index_put_infer(Infer *I) {
  const struct index_put_args *a = I->args;
  Placed p;
  const Meta *x = I->in[0];
  int rc = subscript_place(I, x->ndim, x->shape, 2, &a->dims, a->n_indices, &p);
  if (!rc) rc = want_value(I, 1, &p);
  return rc ? rc : infer_same(I);
}

static size_t index_put_scratch(const OpCall *c) {
  Indexed i = subscripts(c, 2, &((const struct index_put_args *)c->args)->dims);
  return put_bytes(&i, &c->out[0]);
}

static int index_put_cpu(const OpCall *c) {
  const struct index_put_args *a = c->args;
  Indexed i = subscripts(c, 2, &a->dims);
  return put_rows(&i, &c->in[0], &c->in[1], &c->out[0], c->scratch, a->accumulate);
}

/* x with value, broadcast, written (accumulate: added) at the places that the index tensors name.
 * The last of repeated places wins. */
OP(index_put,
   .signature =
       "index_put(Tensor x, Tensor|number value, Tensor[] indices, int[] dims, *, bool "
       "accumulate=False) -> Tensor",
   .flags = OP_HIDDEN | OP_INPLACE, .sbp_rule = index_put_sbp, .linear = "x+value",
   .infer = index_put_infer, .cpu = index_put_cpu, .scratch = index_put_scratch)

/* -- One dim ----------------------------------------------------------------------------------- */

/* Checks dim, of ndim, and a 1-d (or 0-d) index; *n is how many it names. */
static int want_index(Infer *I, int k, int ndim, int64_t *dim, int64_t *n) {
  char name[64], have[SHAPE_TEXT_MAX];
  const Meta *i = I->in[k];
  int rc = infer_dim(I, "dim", dim, ndim);
  if (rc) return rc;
  if (ndim == 0) return infer_error(I, "a 0-d tensor has no dim to index");
  infer_name(I, k, name, sizeof name);
  if (dtype_is_float((DType)i->dtype) || i->dtype == BOOL)
    return infer_error(I, "%s must hold whole numbers, is %s", name, dtype_name((DType)i->dtype));
  if (i->ndim > 1)
    return infer_error(I, "%s must have 1 dim, has shape %s", name,
                       shape_text(i->ndim, i->shape, have));
  *n = meta_numel(i);
  return 0;
}

/* The index as 1-d, and which dim. */
typedef struct OneDim {
  View index;
  int64_t dim, shape, stride;
} OneDim;

static Indexed one_dim(const OpCall *c, int k, int64_t dim, OneDim *o) {
  const View *v = &c->in[k];
  o->dim = dim;
  o->shape = v->ndim ? v->shape[0] : 1;
  o->stride = v->ndim ? v->stride[0] : 1;
  o->index = *v;
  o->index.ndim = 1;
  o->index.shape = &o->shape;
  o->index.stride = &o->stride;
  return (Indexed){.op = c->op->name, .n = 1, .index = &o->index, .dims = &o->dim, .name = "index"};
}

static int index_select_infer(Infer *I) {
  struct index_select_args *a = I->args;
  const Meta *x = I->in[0];
  int64_t n = 0, shape[MF_MAX_DIMS];
  int rc = want_index(I, 1, x->ndim, &a->dim, &n);
  if (rc) return rc;
  memcpy(shape, x->shape, sizeof shape);
  shape[a->dim] = n;
  return infer_shape(I, (DType)x->dtype, x->ndim, shape);
}

static size_t one_index_scratch(const OpCall *c) {
  return scratch_aligned((size_t)view_numel(&c->in[1]) * sizeof(int64_t));
}

static int index_select_cpu(const OpCall *c) {
  OneDim o;
  Indexed i = one_dim(c, 1, ((const struct index_select_args *)c->args)->dim, &o);
  return take_rows(&i, &c->in[0], &c->out[0], c->scratch);
}

/* The entries of dim that the 1-d tensor index names, in its order. */
OP(index_select, .signature = "index_select(Tensor x, dim dim, Tensor index) -> Tensor",
   .sbp_rule = index_select_sbp, .linear = "x", .infer = index_select_infer,
   .cpu = index_select_cpu, .scratch = one_index_scratch)

static int index_select_backward_infer(Infer *I) {
  struct index_select_backward_args *a = I->args;
  const Meta *g = I->in[0];
  int64_t n = 0, shape[MF_MAX_DIMS];
  int rc = infer_want_sizes(I, "size", &a->size, g->ndim, (DType)g->dtype);
  if (!rc) rc = want_index(I, 1, g->ndim, &a->dim, &n);
  if (rc) return rc;
  memcpy(shape, a->size.v, sizeof shape);
  shape[a->dim] = n;
  rc = infer_want_shape(I, 0, g->ndim, shape);
  return rc ? rc : infer_shape(I, (DType)g->dtype, g->ndim, a->size.v);
}

static size_t index_select_backward_scratch(const OpCall *c) {
  OneDim o;
  Indexed i = one_dim(c, 1, ((const struct index_select_backward_args *)c->args)->dim, &o);
  return put_bytes(&i, &c->out[0]);
}

static int index_select_backward_cpu(const OpCall *c) {
  OneDim o;
  Indexed i = one_dim(c, 1, ((const struct index_select_backward_args *)c->args)->dim, &o);
  return put_rows(&i, NULL, &c->in[0], &c->out[0], c->scratch, true);
}

/* The gradient of index_select: zeros of shape `size` with the entries of g added where they came
 * from. */
OP(index_select_backward,
   .signature = "index_select_backward(Tensor g, Tensor index, int[] size, int dim) -> Tensor",
   .flags = OP_HIDDEN, .sbp_rule = index_select_backward_sbp, .linear = "g",
   .infer = index_select_backward_infer, .cpu = index_select_backward_cpu,
   .scratch = index_select_backward_scratch)

/* Of ops that write `value` into the entries of dim: x, index, value. */
static int write_one_dim_infer(Infer *I, int64_t *dim, bool same_shape) {
  const Meta *x = I->in[0];
  int64_t n = 0;
  char have[SHAPE_TEXT_MAX], want[SHAPE_TEXT_MAX], name[64];
  int rc = want_index(I, 1, x->ndim, dim, &n);
  if (rc) return rc;
  int64_t shape[MF_MAX_DIMS];
  memcpy(shape, x->shape, sizeof shape);
  shape[*dim] = n;
  const Meta *v = I->in[2];
  bool fits =
      same_shape ? v->ndim == x->ndim && !memcmp(v->shape, shape, sizeof(int64_t) * (size_t)x->ndim)
                 : meta_numel(v) == 1 && v->ndim <= x->ndim;
  infer_name(I, 2, name, sizeof name);
  if (!fits && same_shape)
    return infer_error(I, "%s must have shape %s, has %s", name, shape_text(x->ndim, shape, want),
                       shape_text(v->ndim, v->shape, have));
  if (!fits)
    return infer_error(I, "%s must be one number, has shape %s", name,
                       shape_text(v->ndim, v->shape, have));
  if (same_shape && v->dtype != x->dtype)
    return infer_error(I, "%s is %s, x is %s; convert it first", name, dtype_name((DType)v->dtype),
                       dtype_name((DType)x->dtype));
  return infer_same(I);
}

static size_t write_one_dim_scratch(const OpCall *c, int64_t dim) {
  OneDim o;
  Indexed i = one_dim(c, 1, dim, &o);
  return put_bytes(&i, &c->out[0]);
}

static int write_one_dim(const OpCall *c, int64_t dim, bool add) {
  OneDim o;
  Indexed i = one_dim(c, 1, dim, &o);
  return put_rows(&i, &c->in[0], &c->in[2], &c->out[0], c->scratch, add);
}

static int index_add_infer(Infer *I) {
  return write_one_dim_infer(I, &((struct index_add_args *)I->args)->dim, true);
}
static size_t index_add_scratch(const OpCall *c) {
  return write_one_dim_scratch(c, ((const struct index_add_args *)c->args)->dim);
}
static int index_add_cpu(const OpCall *c) {
  return write_one_dim(c, ((const struct index_add_args *)c->args)->dim, true);
}

/* x with the entries of source added to the entries of dim that index names. For alpha, see
 * mf.index_add. */
OP(index_add, .signature = "index_add(Tensor x, dim dim, Tensor index, Tensor source) -> Tensor",
   .flags = OP_INPLACE, .sbp_rule = index_write_sbp, .linear = "x+source", .infer = index_add_infer,
   .cpu = index_add_cpu, .scratch = index_add_scratch)

static int index_copy_infer(Infer *I) {
  return write_one_dim_infer(I, &((struct index_copy_args *)I->args)->dim, true);
}
static size_t index_copy_scratch(const OpCall *c) {
  return write_one_dim_scratch(c, ((const struct index_copy_args *)c->args)->dim);
}
static int index_copy_cpu(const OpCall *c) {
  return write_one_dim(c, ((const struct index_copy_args *)c->args)->dim, false);
}

/* x with the entries of source in place of the entries of dim that index names. */
OP(index_copy, .signature = "index_copy(Tensor x, dim dim, Tensor index, Tensor source) -> Tensor",
   .flags = OP_INPLACE, .sbp_rule = index_write_sbp, .linear = "x+source",
   .infer = index_copy_infer, .cpu = index_copy_cpu, .scratch = index_copy_scratch)

static int index_fill_infer(Infer *I) {
  return write_one_dim_infer(I, &((struct index_fill_args *)I->args)->dim, false);
}
static size_t index_fill_scratch(const OpCall *c) {
  return write_one_dim_scratch(c, ((const struct index_fill_args *)c->args)->dim);
}
static int index_fill_cpu(const OpCall *c) {
  return write_one_dim(c, ((const struct index_fill_args *)c->args)->dim, false);
}

/* x with one number in the entries of dim that index names. */
OP(index_fill,
   .signature = "index_fill(Tensor x, dim dim, Tensor index, Tensor|number value) -> Tensor",
   .flags = OP_INPLACE | OP_PLACES, .sbp_rule = index_write_sbp, .linear = "x+value",
   .infer = index_fill_infer, .cpu = index_fill_cpu, .scratch = index_fill_scratch)

/* -- Embedding --------------------------------------------------------------------------------- */

static int want_ids(Infer *I, int k) {
  char name[64];
  const Meta *ids = I->in[k];
  if (!dtype_is_float((DType)ids->dtype) && ids->dtype != BOOL) return 0;
  return infer_error(I, "%s must hold whole numbers, is %s", infer_name(I, k, name, sizeof name),
                     dtype_name((DType)ids->dtype));
}

static int embedding_infer(Infer *I) {
  struct embedding_args *a = I->args;
  const Meta *ids = I->in[0], *w = I->in[1];
  int rc = want_ids(I, 0);
  if (!rc) rc = infer_want_ndim(I, 1, 2);
  if (rc) return rc;
  if (a->has_padding_idx) {
    int64_t n = w->shape[0];
    if (a->padding_idx < -n || a->padding_idx >= n)
      return infer_error(I, "padding_idx %lld is out of range; legal are %lld to %lld",
                         (long long)a->padding_idx, (long long)-n, (long long)(n - 1));
    if (a->padding_idx < 0) a->padding_idx += n;
  }
  if (ids->ndim == MF_MAX_DIMS)
    return infer_error(I, "ids has %d dims, at most %d are possible", ids->ndim, MF_MAX_DIMS - 1);
  int64_t shape[MF_MAX_DIMS];
  memcpy(shape, ids->shape, sizeof shape);
  shape[ids->ndim] = w->shape[1];
  rc = infer_shape(I, (DType)w->dtype, ids->ndim + 1, shape);
  return rc;
}

static Indexed ids_of(const OpCall *c, const View *ids) {
  static const int64_t rows[] = {0};
  return (Indexed){.op = c->op->name, .n = 1, .index = ids, .dims = rows, .name = "ids"};
}

/* -- Tables of which this is a part: rows that other ranks have are zero here -------------------
 */

static bool is_part(const View *table) {
  return table->whole && table->shape[0] != table->whole[0];
}

/* The ids within the table's part, side by side in `own`; those of others become -1, and what `own`
 * then points to is row 0. */
static int own_ids(const OpCall *c, const View *ids, const View *table, int64_t *own) {
  int64_t n = view_numel(ids), start = table->start[0], stride[MF_MAX_DIMS], at[MF_MAX_DIMS];
  char text[SHAPE_TEXT_MAX];
  View flat = {.data = own, .shape = ids->shape, .stride = stride, .ndim = ids->ndim, .dtype = I64};
  shape_contiguous(ids->ndim, ids->shape, stride);
  int rc = copy_views(ids, &flat);
  for (int64_t i = 0; i < n && !rc; i++) {
    int64_t rest = i, row = own[i] - start;
    if (own[i] < 0 || own[i] >= table->whole[0]) {
      for (int d = ids->ndim - 1; d >= 0; d--) at[d] = rest % ids->shape[d], rest /= ids->shape[d];
      return err_set(MF_EINVAL, "%s: ids holds %lld at position %s; legal are 0 to %lld",
                     c->op->name, (long long)own[i], shape_text(ids->ndim, at, text),
                     (long long)(table->whole[0] - 1));
    }
    own[i] = row >= 0 && row < table->shape[0] ? row : -1;
  }
  return rc;
}

/* Zeros in the rows of a dense y whose id is another rank's; the ids become 0 there. */
static void clear_others(int64_t n, int64_t *own, char *y, size_t row) {
  for (int64_t i = 0; i < n; i++) {
    if (own[i] >= 0) continue;
    if (y) memset(y + (size_t)i * row, 0, row);
    own[i] = 0;
  }
}

static View own_view(const View *ids, int64_t *own, int64_t *stride) {
  shape_contiguous(ids->ndim, ids->shape, stride);
  return (View){
      .data = own, .shape = ids->shape, .stride = stride, .ndim = ids->ndim, .dtype = I64};
}

static size_t embedding_scratch(const OpCall *c) {
  return offsets_bytes(1, &c->in[0]) * (is_part(&c->in[1]) ? 3 : 1);
}

static int embedding_part(const OpCall *c) {
  const View *ids = &c->in[0], *w = &c->in[1], *y = &c->out[0];
  size_t bytes = offsets_bytes(1, ids), row = (size_t)w->shape[1] * dtype_size((DType)w->dtype);
  int64_t *own = (void *)((char *)c->scratch + bytes), *marked = own + bytes / sizeof *own,
          stride[MF_MAX_DIMS], n = view_numel(ids);
  int rc = own_ids(c, ids, w, own);
  if (rc) return rc;
  memcpy(marked, own, (size_t)n * sizeof *own);
  clear_others(n, own, NULL, 0);
  View local = own_view(ids, own, stride);
  Indexed i = ids_of(c, &local);
  rc = take_rows(&i, w, y, c->scratch);
  if (!rc) clear_others(n, marked, y->data, row);
  return rc;
}

static int embedding_cpu(const OpCall *c) {
  if (is_part(&c->in[1])) return embedding_part(c);
  Indexed i = ids_of(c, &c->in[0]);
  return take_rows(&i, &c->in[1], &c->out[0], c->scratch);
}

/* Split by rows, what each rank finds is a part of the sum. */
static int embedding_sbp(SbpAsk *q) {
  const struct embedding_args *a = q->args;
  int rc = sbp_notation(q, "..., V e -> ... e");
  Sbp *row = rc || a->has_padding_idx ? NULL : sbp_add(q);
  if (!row) return rc || a->has_padding_idx ? rc : MF_ENOMEM;
  row[1] = sbp_split(0);
  row[2] = (Sbp){SBP_P, 0};
  return 0;
}

/* The rows of w (n, d) that ids names: shape of ids, then d. Row padding_idx gets no gradient; with
 * `sparse` the gradient of w holds only the rows used. */
OP(embedding,
   .signature =
       "embedding(Tensor ids, Tensor w, *, int? padding_idx=None, bool sparse=False) -> Tensor",
   .flags = OP_FUNCTION_ONLY | OP_INDEXED, .sbp_rule = embedding_sbp, .linear = "w",
   .infer = embedding_infer, .cpu = embedding_cpu, .scratch = embedding_scratch)

static int embedding_backward_infer(Infer *I) {
  const struct embedding_backward_args *a = I->args;
  const Meta *g = I->in[0], *ids = I->in[1];
  int rc = want_ids(I, 1);
  if (rc) return rc;
  if (g->ndim != ids->ndim + 1 || memcmp(g->shape, ids->shape, sizeof(int64_t) * (size_t)ids->ndim))
    return infer_error(I, "g has not the shape of ids and one dim more");
  if (a->num < 0) return infer_error(I, "num %lld is negative", (long long)a->num);
  if (a->has_padding_idx && (a->padding_idx < 0 || a->padding_idx >= a->num))
    return infer_error(I, "padding_idx %lld is out of range; legal are 0 to %lld",
                       (long long)a->padding_idx, (long long)a->num - 1);
  return infer_shape(I, (DType)g->dtype, 2, (const int64_t[]){a->num, g->shape[ids->ndim]});
}

static size_t embedding_backward_scratch(const OpCall *c) {
  Indexed i = ids_of(c, &c->in[1]);
  size_t bytes = put_bytes(&i, &c->out[0]);
  if (!is_part(&c->out[0])) return bytes;
  size_t g = (size_t)view_numel(&c->in[0]) * dtype_size((DType)c->in[0].dtype);
  return scratch_aligned(bytes) + offsets_bytes(1, &c->in[1]) + scratch_aligned(g);
}

/* Of a part: of a copy of g in which the rows of others are zero. */
static int embedding_backward_part(const OpCall *c) {
  const View *g = &c->in[0], *ids = &c->in[1], *y = &c->out[0];
  Indexed whole = ids_of(c, ids);
  size_t used = scratch_aligned(put_bytes(&whole, y));
  int64_t *own = (void *)((char *)c->scratch + used), stride[MF_MAX_DIMS], steps[MF_MAX_DIMS];
  View local = own_view(ids, own, stride), copy = *g;
  copy.data = (char *)own + offsets_bytes(1, ids);
  copy.stride = steps;
  shape_contiguous(g->ndim, g->shape, steps);
  int rc = own_ids(c, ids, y, own);
  if (!rc) rc = copy_views(g, &copy);
  if (rc) return rc;
  clear_others(view_numel(ids), own, copy.data,
               (size_t)g->shape[g->ndim - 1] * dtype_size((DType)g->dtype));
  Indexed i = ids_of(c, &local);
  return put_rows(&i, NULL, &copy, y, c->scratch, true);
}

static int embedding_backward_sbp(SbpAsk *q) {
  const struct embedding_backward_args *a = q->args;
  int rc = sbp_notation(q, "... e, ... -> V e");
  Sbp *row = rc || a->has_padding_idx ? NULL : sbp_add(q);
  if (row) row[q->n_in] = sbp_split(0);
  return rc || row || a->has_padding_idx ? rc : MF_ENOMEM;
}

static int embedding_backward_cpu(const OpCall *c) {
  const struct embedding_backward_args *a = c->args;
  Indexed i = ids_of(c, &c->in[1]);
  const View *y = &c->out[0];
  if (is_part(y)) return embedding_backward_part(c);
  int rc = put_rows(&i, NULL, &c->in[0], y, c->scratch, true);
  if (!rc && a->has_padding_idx) {
    size_t row = (size_t)y->shape[1] * dtype_size((DType)y->dtype);
    memset((char *)y->data + (size_t)a->padding_idx * row, 0, row);
  }
  return rc;
}

/* The gradient of embedding: (num, d), where row i is the sum of the rows of g whose id is i. */
OP(embedding_backward,
   .signature =
       "embedding_backward(Tensor g, Tensor ids, int num, *, int? padding_idx=None) -> Tensor",
   .flags = OP_HIDDEN | OP_INDEXED, .sbp_rule = embedding_backward_sbp, .linear = "g",
   .infer = embedding_backward_infer, .cpu = embedding_backward_cpu,
   .scratch = embedding_backward_scratch)
