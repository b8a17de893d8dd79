/* Indexing by tensors of whole numbers: subscripts, index_select and its relatives, embedding.
 * Bytes: those of the dense side twice, and of the indices.
 *
 * A thread takes one element of the dense side (what is found, or what is written); it adds up
 * where the element lies in the other tensor from the dims that both have, and from the indices. An
 * index out of range is reported, and its element left alone. Sums are atomic, so that they may
 * differ in the last bits from run to run; of elements written to one place, any one stays. */
#include "kernel.cuh"

enum { INDEX_BLOCK = 256, INDEX_MAX = 8, INDEX_OPERANDS = INDEX_MAX + 2 };
enum IndexMode { INDEX_TAKE, INDEX_SET, INDEX_ADD };

struct IndexParams {
  Walk<INDEX_OPERANDS> walk; /* the dense side, the other without its indexed dims, the indices */
  int n, mode, size, op, input;
  bool wraps, number; /* negative indices count from the end; the dense side is one value */
  int64_t skip;       /* an index that is left out; -1: none */
  int64_t limit[INDEX_MAX], step[INDEX_MAX];
  uint64_t bits; /* that value, in the other's dtype */
  DeviceError *error;
};

/* Where in the other tensor the element lies that is at at[] of the operands; negative: nowhere. */
static __device__ int64_t index_place(const IndexParams &p, const int64_t *at) {
  int64_t place = at[1];
  for (int k = 0; k < p.n; k++) {
    const int64_t i = load_as<int64_t>(p.walk.dtype[2 + k], p.walk.data[2 + k], at[2 + k]);
    int64_t v = p.wraps && i < 0 ? i + p.limit[k] : i;
    if (v < 0 || v >= p.limit[k]) {
      report_range(p.error, p.op, p.input, i, at[2 + k], p.wraps ? -p.limit[k] : 0, p.limit[k] - 1);
      return -1;
    }
    if (v == p.skip) return -1;
    place += v * p.step[k];
  }
  return place;
}

static __global__ void __launch_bounds__(INDEX_BLOCK)
    index_kernel(const __grid_constant__ IndexParams p) {
  int64_t at[INDEX_OPERANDS], i = (int64_t)blockIdx.x * INDEX_BLOCK + threadIdx.x;
  if (i >= p.walk.numel) return;
  walk_at(p.walk, p.n + 2, i, at);
  int64_t place = index_place(p, at);
  if (place < 0) return;
  void *dense = p.number ? (void *)&p.bits : p.walk.data[0], *other = p.walk.data[1];
  if (p.number) at[0] = 0;
  if (p.mode == INDEX_TAKE) move_element(p.size, dense, at[0], other, place);
  else if (p.mode == INDEX_SET) move_element(p.size, other, place, dense, at[0]);
  else add_element(p.walk.dtype[1], other, place, dense, at[0]);
}

/* The dims of the dense side: those of `other` but for the indexed ones, and the indices' common
 * shape in the place of these where they are neighbours, else in front. */
struct Dense {
  View whole, other, index[INDEX_MAX];
  int64_t shape[2 * MF_MAX_DIMS], other_step[2 * MF_MAX_DIMS];
  int64_t index_step[INDEX_MAX][2 * MF_MAX_DIMS];
};

static int64_t common_size(int n, const View *const *index, int places, int d) {
  int64_t size = 1;
  for (int k = 0; k < n; k++) {
    int at = d - (places - index[k]->ndim);
    if (at >= 0 && index[k]->shape[at] != 1) size = index[k]->shape[at];
  }
  return size;
}

static void dense_init(Dense *p, const View *dense, const View *other, int n,
                       const View *const *index, const int64_t *dims) {
  uint32_t indexed = 0;
  bool together = true;
  int places = 0, ndim = 0;
  for (int k = 0; k < n; k++) {
    indexed |= 1u << dims[k];
    together &= k == 0 || dims[k] == dims[k - 1] + 1;
    if (index[k]->ndim > places) places = index[k]->ndim;
  }
  int first = together && n ? (int)dims[0] : 0;
  for (int d = 0; d <= other->ndim; d++) {
    for (int j = 0; ndim == first && j < places; j++) {
      int64_t size = common_size(n, index, places, j);
      for (int k = 0; k < n; k++) {
        int at = j - (places - index[k]->ndim);
        bool has = at >= 0 && index[k]->shape[at] != 1;
        p->index_step[k][first + j] = has ? index[k]->stride[at] : 0;
      }
      p->shape[first + j] = size;
      p->other_step[first + j] = 0;
    }
    if (ndim == first) ndim += places, first = -1;
    if (d == other->ndim || indexed >> d & 1) continue;
    for (int k = 0; k < n; k++) p->index_step[k][ndim] = 0;
    p->shape[ndim] = other->shape[d];
    p->other_step[ndim++] = other->stride[d];
  }
  p->whole = *dense;
  p->other = *other;
  p->other.ndim = (int8_t)ndim, p->other.shape = p->shape, p->other.stride = p->other_step;
  for (int k = 0; k < n; k++) {
    p->index[k] = *index[k];
    p->index[k].ndim = (int8_t)ndim, p->index[k].shape = p->shape;
    p->index[k].stride = p->index_step[k];
  }
}

/* input: where in the signature the indices stand. */
static int index_launch(const OpCall *c, IndexParams *p, const View *dense, const View *other,
                        int n, const View *const *index, const int64_t *dims) {
  Dense d;
  View in[INDEX_OPERANDS];
  int64_t step[2 * MF_MAX_DIMS];
  if (n > INDEX_MAX)
    return err_set(MF_EUNSUPPORTED, "%s: %d index tensors, at most %d are possible on %s",
                   c->op->name, n, INDEX_MAX, c->stream->device->name);
  dense_init(&d, dense, other, n, index, dims);
  View out = d.other; /* the shape of the dense side, to which a value is broadcast */
  shape_broadcast_strides(out.ndim, out.shape, dense->ndim, dense->shape, dense->stride, step);
  out.data = dense->data, out.stride = step, out.dtype = dense->dtype;
  in[0] = d.other;
  for (int k = 0; k < n; k++) in[1 + k] = d.index[k];
  walk_plain(&p->walk, &out, n + 1, in);
  if (!p->walk.numel) return 0;
  p->n = n;
  p->size = (int)dtype_size((DType)other->dtype);
  p->op = c->op->id;
  p->error = stream_error(c->stream);
  for (int k = 0; k < n; k++)
    p->limit[k] = other->shape[dims[k]], p->step[k] = other->stride[dims[k]];
  p->number = dense->device == DEVICE_CPU;
  if (p->number) {
    DType to = (DType)other->dtype, from = (DType)dense->dtype;
    if (dtype_is_float(to) || dtype_is_float(from))
      dtype_set_f64(to, &p->bits, dtype_get_f64(from, dense->data));
    else if (to == BOOL) p->bits = dtype_get_i64(from, dense->data) != 0;
    else p->bits = (uint64_t)dtype_get_i64(from, dense->data);
  }
  return LAUNCH(c, index_kernel, grid_for(p->walk.numel, INDEX_BLOCK), INDEX_BLOCK, 0, *p);
}

static IndexParams index_params(IndexMode mode, int input, bool wraps) {
  IndexParams p = {};
  p.mode = mode;
  p.input = input;
  p.wraps = wraps;
  p.skip = -1;
  return p;
}

/* A value whose dtype is not the other's is converted first. */
static int as_other(const OpCall *c, View *v, const View *other, int64_t *stride) {
  if (v->dtype == other->dtype || v->device == DEVICE_CPU) return 0;
  View made = *v;
  int64_t step = 1;
  for (int d = v->ndim - 1; d >= 0; d--) stride[d] = step, step *= v->shape[d];
  made.dtype = other->dtype;
  made.stride = stride;
  made.data = kernel_scratch(c, (size_t)step * dtype_size((DType)other->dtype));
  int rc = made.data ? copy_launch(c, v, &made) : MF_ENOMEM;
  *v = made;
  return rc;
}

/* out = x, or zeros, with `value` written or added. */
static int index_write(const OpCall *c, IndexParams p, const View *x, View value, int n,
                       const View *const *index, const int64_t *dims) {
  const View *y = &c->out[0];
  int64_t stride[MF_MAX_DIMS];
  int rc = !x ? copy_fill(c, y, 0) : x->data != y->data ? copy_launch(c, x, y) : 0;
  if (!rc) rc = as_other(c, &value, y, stride);
  return rc ? rc : index_launch(c, &p, &value, y, n, index, dims);
}

/* -- Subscripts -------------------------------------------------------------------------------- */

struct IndexList {
  const View *at[2 * MF_MAX_DIMS];
};

static IndexList index_list(const OpCall *c, int first, int n) {
  IndexList l = {};
  for (int k = 0; k < n && k < 2 * MF_MAX_DIMS; k++) l.at[k] = &c->in[first + k];
  return l;
}

static int index_cuda(const OpCall *c) {
  const struct index_args *a = (const struct index_args *)c->args;
  IndexList l = index_list(c, 1, (int)a->n_indices);
  IndexParams p = index_params(INDEX_TAKE, 1, true);
  return index_launch(c, &p, &c->out[0], &c->in[0], (int)a->n_indices, l.at, a->dims.v);
}
KERNEL(index, index_cuda)

static int index_backward_cuda(const OpCall *c) {
  const struct index_backward_args *a = (const struct index_backward_args *)c->args;
  IndexList l = index_list(c, 1, (int)a->n_indices);
  return index_write(c, index_params(INDEX_ADD, 1, true), NULL, c->in[0], (int)a->n_indices, l.at,
                     a->dims.v);
}
KERNEL(index_backward, index_backward_cuda)

static int index_put_cuda(const OpCall *c) {
  const struct index_put_args *a = (const struct index_put_args *)c->args;
  IndexList l = index_list(c, 2, (int)a->n_indices);
  return index_write(c, index_params(a->accumulate ? INDEX_ADD : INDEX_SET, 2, true), &c->in[0],
                     c->in[1], (int)a->n_indices, l.at, a->dims.v);
}
KERNEL(index_put, index_put_cuda)

/* -- One dim ----------------------------------------------------------------------------------- */

/* The index as 1-d, where it may be 0-d. */
struct OneIndex {
  View view;
  const View *at;
  int64_t shape, stride;
};
static void one_index(OneIndex *o, const View *v) {
  o->view = *v;
  o->shape = v->ndim ? v->shape[0] : 1;
  o->stride = v->ndim ? v->stride[0] : 1;
  o->view.ndim = 1, o->view.shape = &o->shape, o->view.stride = &o->stride;
  o->at = &o->view;
}

static int index_select_cuda(const OpCall *c) {
  int64_t dim = ((const struct index_select_args *)c->args)->dim;
  OneIndex o;
  one_index(&o, &c->in[1]);
  IndexParams p = index_params(INDEX_TAKE, 1, false);
  return index_launch(c, &p, &c->out[0], &c->in[0], 1, &o.at, &dim);
}
KERNEL(index_select, index_select_cuda)

static int index_select_backward_cuda(const OpCall *c) {
  int64_t dim = ((const struct index_select_backward_args *)c->args)->dim;
  OneIndex o;
  one_index(&o, &c->in[1]);
  return index_write(c, index_params(INDEX_ADD, 1, false), NULL, c->in[0], 1, &o.at, &dim);
}
KERNEL(index_select_backward, index_select_backward_cuda)

static int write_one_dim(const OpCall *c, int64_t dim, IndexMode mode) {
  OneIndex o;
  one_index(&o, &c->in[1]);
  return index_write(c, index_params(mode, 1, false), &c->in[0], c->in[2], 1, &o.at, &dim);
}
static int index_add_cuda(const OpCall *c) {
  return write_one_dim(c, ((const struct index_add_args *)c->args)->dim, INDEX_ADD);
}
KERNEL(index_add, index_add_cuda)
static int index_copy_cuda(const OpCall *c) {
  return write_one_dim(c, ((const struct index_copy_args *)c->args)->dim, INDEX_SET);
}
KERNEL(index_copy, index_copy_cuda)
static int index_fill_cuda(const OpCall *c) {
  return write_one_dim(c, ((const struct index_fill_args *)c->args)->dim, INDEX_SET);
}
KERNEL(index_fill, index_fill_cuda)

/* -- Embedding --------------------------------------------------------------------------------- */

static int embedding_cuda(const OpCall *c) {
  const int64_t rows = 0;
  const View *ids = &c->in[0];
  IndexParams p = index_params(INDEX_TAKE, 0, false);
  return index_launch(c, &p, &c->out[0], &c->in[1], 1, &ids, &rows);
}
KERNEL(embedding, embedding_cuda)

static int embedding_backward_cuda(const OpCall *c) {
  const struct embedding_backward_args *a = (const struct embedding_backward_args *)c->args;
  const int64_t rows = 0;
  const View *ids = &c->in[1];
  IndexParams p = index_params(INDEX_ADD, 1, false);
  if (a->has_padding_idx) p.skip = a->padding_idx;
  return index_write(c, p, NULL, c->in[0], 1, &ids, &rows);
}
KERNEL(embedding_backward, embedding_backward_cuda)
