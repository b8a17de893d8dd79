/* A program of pointwise ops (src/op/op_program.h), one step after the other by the kernels of the
 * ops themselves: what is used where no kernel can be compiled for the whole. A step's result is in
 * scratch unless it is an output, and that has not the memory of an input. What is reduced is in
 * scratch as well, or an output. Bytes: those of all steps. */
#include "kernel.cuh"

extern "C" {
#include "op_program.h"
}

struct Steps {
  View value[PROGRAM_STEPS], like; /* like: of the shape of what is pointwise */
  int64_t shape[MF_MAX_DIMS], stride[MF_MAX_DIMS];
  int output[PROGRAM_STEPS]; /* which output a step makes; -1: none */
};

static bool overlaps_input(const OpCall *c, const View *y) {
  for (int k = 0; k < c->n_in; k++)
    if (c->in[k].data == y->data) return true;
  return false;
}

/* What the inputs are together. */
static void find_shape(const OpCall *c, Steps *t) {
  View *like = &t->like;
  *like = c->out[0];
  like->ndim = 0;
  for (int k = 0; k < c->n_in; k++)
    if (c->in[k].ndim > like->ndim) like->ndim = c->in[k].ndim;
  for (int d = 0; d < like->ndim; d++) t->shape[d] = 1;
  for (int k = 0; k < c->n_in; k++)
    for (int d = 0, shift = like->ndim - c->in[k].ndim; d < c->in[k].ndim; d++)
      if (c->in[k].shape[d] != 1) t->shape[d + shift] = c->in[k].shape[d];
  int64_t step = 1;
  for (int d = like->ndim - 1; d >= 0; d--) t->stride[d] = step, step *= t->shape[d];
  like->shape = t->shape, like->stride = t->stride;
  for (int k = 0; k < c->n_out; k++) {
    const View *y = &c->out[k];
    if (!shape_equal(y->ndim, y->shape, like->ndim, like->shape)) continue;
    if (shape_is_dense(y->ndim, y->shape, y->stride)) like->stride = y->stride;
    return;
  }
}

static int step_run(const OpCall *c, const Program *p, const Steps *t, int s) {
  const ProgramStep *step = &p->steps[s];
  View in[PROGRAM_INPUTS];
  OpCall call = *c;
  for (int k = 0; k < step->n_in; k++)
    in[k] = step->in[k] >= 0 ? c->in[step->in[k]] : t->value[~step->in[k]];
  call.op = op_of(step->op);
  call.args = op_program_args(p, s);
  call.in = in, call.n_in = step->n_in;
  call.out = &t->value[s], call.n_out = 1;
  return c->stream->device->kernels[step->op](&call);
}

static int fused_cuda(const OpCall *c) {
  const struct fused_args *a = (const struct fused_args *)c->args;
  const Program *p = a->body;
  Steps t;
  find_shape(c, &t);
  int64_t n = view_numel(&t.like);
  for (int s = 0; s < p->n_steps; s++) t.output[s] = -1;
  for (int k = 0; k < p->n_out; k++)
    if (!overlaps_input(c, &c->out[k])) t.output[p->out[k]] = k;
  int rc = 0;
  for (int s = 0; s < p->n_steps && !rc; s++) {
    View *v = &t.value[s];
    *v = t.output[s] >= 0 ? c->out[t.output[s]] : t.like;
    if (t.output[s] < 0) {
      v->dtype = (uint8_t)p->steps[s].dtype;
      v->data = kernel_scratch(c, (size_t)(n ? n : 1) * dtype_size((DType)v->dtype));
    }
    rc = v->data || !view_numel(v) ? step_run(c, p, &t, s) : MF_ENOMEM;
  }
  for (int k = 0; k < p->n_out && !rc; k++)
    if (t.output[p->out[k]] != k) rc = copy_launch(c, &t.value[p->out[k]], &c->out[k]);
  return rc;
}
KERNEL(fused, fused_cuda)
