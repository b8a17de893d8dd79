/* Many pointwise ops in one pass over memory: a program (op_program.h) run block by block.
 *
 * Each step calls the kernel that its op would use alone, on blocks that stay in L1, and what a
 * step makes is rounded to its dtype before the next reads it; so the results are those of the ops
 * one after another, bit for bit. What is saved is a write and a read of memory for each value that
 * nothing else wants, and the launch of each step.
 *
 * Before the blocks are run, the program is resolved: which kernels on which places. A place is a
 * tensor's own memory, where it lies in walking order (it moves on with the blocks), or a slot: a
 * block of scratch. A value may be seen in several forms: as its dtype has it, and converted to
 * the compute types that its readers want. Slots are given back after the last reader, and one
 * that dies where a result of its size is made becomes that result. Single elements (numbers, 0-d
 * tensors) fill a slot once, or a cell, where the kernel takes one element.
 *
 * Steps that each take what the one before has made, and are simple enough, are done together, in
 * registers (fused_run.h).
 *
 * An output may have the memory of an input (OP_BLOCKWISE). A block of it is then written after the
 * last reader of that input, at once or at the end of the program.
 *
 * What reductions read is an output too, but one of which only a row of FOLD_ROW elements is there
 * at a time: it is made, and folded into the accumulators as the reduction alone would do it (see
 * fold_plan.h), with the work cut at the same places. So where that one would have read a tensor
 * without gaps along its rows, results are the same bit for bit. */
#define WALK_OPERANDS 24
#include "op_program.h"

#include "fold.h"
#include "fused_run.h"
#include "op_args.h"
#include "pointwise_kernel.h"
#include "pointwise_run.h"

enum {
  FUSED_L1 = 24 << 10, /* bytes of places in use at a time */
  FUSED_MOST = 2048,   /* elements of a block at most, and at least */
  FUSED_LEAST = 128,
  FUSED_CELL = 64, /* bytes of a cell: a vector of the widest kind */
  FUSED_SKEW = 64, /* bytes between slots, so that they do not all begin in one set of L1 */
  FUSED_VALUES = PROGRAM_TENSORS + PROGRAM_STEPS,
  FUSED_CELLS = WALK_OPERANDS + PROGRAM_STEPS * (PROGRAM_INPUTS + 2) + PROGRAM_TENSORS,
  FUSED_PLACES = FUSED_CELLS + PROGRAM_STEPS,
  FUSED_FOLDS = 8,      /* reductions at most */
  FUSED_GRAIN = 1 << 16 /* elements times steps that are worth a thread */
};

/* -- Inference --------------------------------------------------------------------------------- */

typedef struct StepInfer {
  Infer infer;
  Meta *meta;
} StepInfer;

static Meta *add_step_meta(Infer *I) {
  I->n_out++;
  return ((StepInfer *)I)->meta;
}

/* Reductions get their arguments as inference has made them. */
static int infer_step(Infer *I, Program *p, int s, Meta *metas) {
  const ProgramStep *step = &p->steps[s];
  const Op *op = &op_table[step->op];
  const Meta *in[PROGRAM_INPUTS];
  union {
    char bytes[OP_MAX_ARGS];
    double align;
  } args;
  memcpy(args.bytes, op_program_args(p, s), op->args_size);
  for (int k = 0; k < step->n_in; k++)
    in[k] = step->in[k] >= 0 ? I->in[step->in[k]] : &metas[~step->in[k]];
  StepInfer ask = {.infer = {.op = op,
                             .args = args.bytes,
                             .in = in,
                             .n_in = step->n_in,
                             .device = I->device,
                             .add = add_step_meta},
                   .meta = &metas[s]};
  int rc = op->spec[0]->infer(&ask.infer);
  if (op->spec[0]->folding) memcpy((char *)p + step->args, args.bytes, op->args_size);
  return rc;
}

static bool same_dims(const IntList *a, const IntList *b) {
  return a->n == b->n && !memcmp(a->v, b->v, sizeof *a->v * (size_t)a->n);
}

/* Whether the reductions of a program, behind `points` steps, are few and over the same dims. */
static int check_folds(Infer *I, const Program *p, int points) {
  Folding first, f;
  int n = 0;
  for (int k = 0; k < p->n_out; k++) n += p->out[k] >= points;
  if (n != p->n_steps - points || n > FUSED_FOLDS)
    return infer_error(I, "there are %d reductions and %d results of them, %d are possible",
                       p->n_steps - points, n, (int)FUSED_FOLDS);
  for (int s = points; s < p->n_steps; s++) {
    op_table[p->steps[s].op].spec[0]->folding(op_program_args(p, s), s > points ? &f : &first);
    if (s > points && !same_dims(f.dims, first.dims))
      return infer_error(I, "step %d reduces other dims than the one before", s);
  }
  return 0;
}

static int fused_infer(Infer *I) {
  const struct fused_args *a = I->args;
  Program *p = a->body;
  Meta metas[PROGRAM_STEPS];
  int points = p ? op_program_points(p) : 0;
  if (!p) return infer_error(I, "there is no program");
  if (a->n_xs != p->n_in)
    return infer_error(I, "%lld tensors are given, the program takes %d", (long long)a->n_xs,
                       p->n_in);
  int arrays = p->n_out;
  for (int k = 0; k < p->n_in; k++) arrays += meta_numel(I->in[k]) != 1;
  if (arrays > WALK_OPERANDS)
    return infer_error(I, "%d tensors are too many, %d are possible", arrays, (int)WALK_OPERANDS);
  for (int s = 0; s < p->n_steps; s++) {
    int rc = infer_step(I, p, s, metas);
    if (rc) return rc;
    bool same = shape_equal(metas[s].ndim, metas[s].shape, metas[0].ndim, metas[0].shape);
    if (s < points && !same)
      return infer_error(I, "step %d makes another shape than those before", s);
    int8_t *dtype = &p->steps[s].dtype;
    if (*dtype != DTYPE_NONE && *dtype != metas[s].dtype)
      return infer_error(I, "step %d makes %s, the program says %s", s,
                         dtype_name((DType)metas[s].dtype), dtype_name((DType)*dtype));
    *dtype = (int8_t)metas[s].dtype;
  }
  int rc = check_folds(I, p, points);
  if (rc) return rc;
  for (int k = 0; k < p->n_out; k++) {
    Meta *out = infer_add(I);
    if (!out) return MF_ENOMEM;
    *out = metas[p->out[k]];
  }
  return 0;
}

/* -- What is run for each block ---------------------------------------------------------------- */

typedef enum FusedKind {
  FUSED_KERNEL,
  FUSED_RUN, /* this kernel and those that are chained to it */
  FUSED_CONVERT,
  FUSED_GATHER,
  FUSED_SCATTER
} FusedKind;

typedef struct FusedOp {
  uint8_t kind, n_in, size; /* size: bytes an element of the block, of gather and scatter */
  int16_t operand;          /* of the walk, of those two */
  int16_t in[PROGRAM_INPUTS], out;
  uint8_t code;   /* of a kernel: RunCode; RUN_NONE: it cannot be part of a run */
  int8_t value;   /* which input the run's value is */
  bool chained;   /* it takes what the op before has made, */
  bool keeps;     /* which is wanted later too: of the op before */
  int16_t length; /* of a run, in ops */
  PointwiseFn *fn;
  BlockConvert *convert;
  const void *args;
} FusedOp;

/* A slot, or a cell, that is filled once. */
typedef struct FusedConstant {
  int16_t place;
  bool cell;
  uint8_t cls, dtype;
  const void *from;
} FusedConstant;

/* One reduction: of the operand of the walk whose elements it folds. */
typedef struct FusedFold {
  FoldJob job;
  int operand;
} FusedFold;

typedef struct FusedJob {
  Walk walk; /* outputs, of which the first n_rows are what is folded; then inputs of more than one
                element */
  FusedOp ops[PROGRAM_STEPS * (PROGRAM_INPUTS + 2) + 2 * WALK_OPERANDS];
  FusedConstant constants[PROGRAM_TENSORS * PW_CLASSES + PROGRAM_STEPS * PROGRAM_INPUTS];
  int16_t direct[WALK_OPERANDS]; /* operands that are places themselves */
  bool written[WALK_OPERANDS];   /* outputs that are made in place */
  FusedFold folds[FUSED_FOLDS];
  int n_ops, n_constants, n_direct, n_slots, n_cells, n_out, n_rows, n_folds;
  size_t most; /* bytes an element in a slot */
  int64_t block, parts;
  size_t slot_bytes, rows_at, part_bytes; /* rows_at: where in a part what is folded lies */
  char *scratch;
} FusedJob;

/* -- Resolving --------------------------------------------------------------------------------- */

enum { OWN = PW_CLASSES, FORMS };

/* While a program is resolved. Values are the inputs, then the results of the steps. */
typedef struct Resolving {
  FusedJob *j;
  const OpCall *call; /* with the outputs of the walk, */
  const int16_t *out; /* and the steps that make them */
  const Program *p;
  int points;
  int16_t place[FUSED_VALUES][FORMS]; /* -1: not there */
  int16_t last[FUSED_VALUES];         /* the step that reads it last */
  int16_t operand[FUSED_VALUES];      /* of the walk; -1: single elements, values of steps */
  bool flat[WALK_OPERANDS];
  uint8_t size[FUSED_PLACES]; /* bytes an element of a slot */
  int16_t free[FUSED_PLACES];
  int n_free;
} Resolving;

static int value_of(const Resolving *r, int in) {
  return in >= 0 ? in : r->p->n_in + ~in;
}

static DType dtype_of(const Resolving *r, int value) {
  const Program *p = r->p;
  return (DType)(value < p->n_in ? r->call->in[value].dtype : p->steps[value - p->n_in].dtype);
}

static int new_slot(Resolving *r, size_t size) {
  int place = r->n_free ? r->free[--r->n_free] : r->j->walk.n + r->j->n_slots++;
  r->size[place] = (uint8_t)size;
  if (size > r->j->most) r->j->most = size;
  return place;
}

static FusedOp *add_op(Resolving *r, FusedKind kind) {
  FusedOp *op = &r->j->ops[r->j->n_ops++];
  *op = (FusedOp){.kind = (uint8_t)kind};
  return op;
}

static int add_convert(Resolving *r, BlockConvert *convert, int from, int to) {
  FusedOp *op = add_op(r, FUSED_CONVERT);
  op->convert = convert;
  op->in[0] = (int16_t)from;
  op->out = (int16_t)to;
  return to;
}

static void add_constant(Resolving *r, const View *v, PointwiseClass cls, int place, bool cell) {
  r->j->constants[r->j->n_constants++] =
      (FusedConstant){(int16_t)place, cell, (uint8_t)cls, v->dtype, v->data};
}

/* A slot filled with v. It is never given back, so it must be one that nothing had. */
static int constant_slot(Resolving *r, const View *v, PointwiseClass cls) {
  int given = r->n_free, place;
  r->n_free = 0;
  place = new_slot(r, pw_class_size(cls));
  r->n_free = given;
  add_constant(r, v, cls, place, false);
  return place;
}

/* Where input k of the program is as compute type cls. */
static int load_input(Resolving *r, int k, PointwiseClass cls) {
  const View *v = &r->call->in[k];
  int operand = r->operand[k];
  if (operand >= 0 && r->flat[operand] && block_is_native((DType)v->dtype, cls)) return operand;
  if (operand < 0) return constant_slot(r, v, cls);
  FusedOp *op = add_op(r, FUSED_GATHER);
  op->convert = block_loads[cls][v->dtype];
  op->operand = (int16_t)operand;
  op->size = (uint8_t)pw_class_size(cls);
  op->out = (int16_t)new_slot(r, op->size);
  return op->out;
}

/* Where the value is as compute type cls. */
static int form_of(Resolving *r, int value, PointwiseClass cls) {
  int16_t *forms = r->place[value];
  if (value >= r->p->n_in && block_is_native(dtype_of(r, value), cls)) return forms[OWN];
  if (forms[cls] >= 0) return forms[cls];
  int place = value < r->p->n_in ? load_input(r, value, cls)
                                 : add_convert(r, block_loads[cls][dtype_of(r, value)], forms[OWN],
                                               new_slot(r, pw_class_size(cls)));
  return forms[cls] = (int16_t)place;
}

static bool is_slot(const Resolving *r, int place) {
  return place >= r->j->walk.n && place < FUSED_CELLS;
}

static void give_back(Resolving *r, int value) {
  if (value < r->p->n_in && r->operand[value] < 0) return;
  for (int f = 0; f < FORMS; f++) {
    int place = r->place[value][f];
    if (place >= 0 && is_slot(r, place)) r->free[r->n_free++] = (int16_t)place;
    r->place[value][f] = -1;
  }
}

/* A slot for a result of step s: that of an input which dies here and has elements of its size, so
 * that a kernel that goes forward reads them before it writes. */
static int result_slot(Resolving *r, int s, const FusedOp *kernel, size_t size) {
  const ProgramStep *step = &r->p->steps[s];
  for (int k = 0; k < kernel->n_in; k++) {
    int value = value_of(r, step->in[k]), place = kernel->in[k];
    if (r->last[value] != s || !is_slot(r, place) || r->size[place] != size) continue;
    if (value < r->p->n_in && r->operand[value] < 0) continue;
    for (int f = 0; f < FORMS; f++)
      if (r->place[value][f] == place) r->place[value][f] = -1;
    return place;
  }
  return new_slot(r, size);
}

/* The output that is made where it lies, while nothing later reads an input there; -1: none. */
static int direct_output(const Resolving *r, int s) {
  for (int o = 0; o < r->call->n_out; o++) {
    bool direct = r->out[o] == s && r->flat[o];
    for (int k = 0; k < r->p->n_in && direct; k++)
      direct = r->call->in[k].data != r->call->out[o].data || r->last[k] <= s;
    if (direct) return o;
  }
  return -1;
}

static int kernel_of(const Resolving *r, int s, PointwiseKernel *k) {
  const ProgramStep *step = &r->p->steps[s];
  const View *like = &r->call->out[0];
  View in[PROGRAM_INPUTS], out = *like;
  for (int i = 0; i < step->n_in; i++) {
    in[i] = step->in[i] >= 0 ? r->call->in[step->in[i]] : *like;
    if (step->in[i] >= 0) continue;
    in[i].data = NULL;
    in[i].dtype = (uint8_t)r->p->steps[~step->in[i]].dtype;
  }
  out.dtype = (uint8_t)step->dtype;
  OpCall c = {.op = &op_table[step->op],
              .args = op_program_args(r->p, s),
              .in = in,
              .out = &out,
              .n_in = step->n_in,
              .n_out = 1};
  pointwise_kernel(&c, k);
  if (k->fn) return 0;
  return err_set(MF_EINVAL, "%s: no kernel for %s", c.op->name, dtype_name((DType)out.dtype));
}

/* Whether it is an input of one element. */
static bool is_single(const Resolving *r, int in) {
  return in >= 0 && r->operand[in] < 0;
}

/* Whether the kernel of step s can be part of a run, and whether it takes what the op before made.
 */
static void link_to_run(Resolving *r, int s, const PointwiseKernel *k, FusedOp *op) {
  const ProgramStep *step = &r->p->steps[s];
  FusedOp *before = op > r->j->ops ? op - 1 : NULL;
  bool usual = !op_table[step->op].spec[OP_ISA]->choose || k->single;
  if (k->cls != PW_F32 || k->bool_out || step->dtype != F32 || !usual) return;
  op->code = run_codes[step->op].first;
  if (s == 0 || !before || before->kind != FUSED_KERNEL || !before->code) return;
  bool first = step->in[0] == ~(s - 1), second = op->n_in > 1 && step->in[1] == ~(s - 1);
  if (first == second || !(first ? op->code : run_codes[step->op].second)) return;
  op->chained = true;
  op->value = (int8_t)second;
  before->keeps = r->last[r->p->n_in + s - 1] != s;
  if (second) op->code = run_codes[step->op].second;
}

/* Marks the first of each run of chained kernels. */
static void find_runs(FusedJob *j) {
  for (int i = 0, n; i < j->n_ops; i += n) {
    for (n = 1; i + n < j->n_ops && j->ops[i + n].chained;) n++;
    if (n == 1) continue;
    j->ops[i].kind = FUSED_RUN;
    j->ops[i].length = (int16_t)n;
  }
}

/* Where the input of a step is as its kernel reads it. */
static int input_of(Resolving *r, const PointwiseKernel *k, int in) {
  if (is_single(r, in)) {
    View v = block_input(k, &r->call->in[in]);
    if (v.dtype != r->call->in[in].dtype) return constant_slot(r, &v, k->cls);
  }
  return form_of(r, value_of(r, in), k->cls);
}

static int resolve_step(Resolving *r, int s) {
  const ProgramStep *step = &r->p->steps[s];
  int me = r->p->n_in + s, at = direct_output(r, s);
  DType t = (DType)step->dtype;
  PointwiseKernel k;
  int rc = kernel_of(r, s, &k), in[PROGRAM_INPUTS];
  if (rc) return rc;
  bool single = k.single && is_single(r, step->in[k.n_in - 1]);
  for (int i = 0; i < k.n_in - single; i++) in[i] = input_of(r, &k, step->in[i]);
  if (single) {
    k.fn = k.single;
    in[k.n_in - 1] = FUSED_CELLS + r->j->n_cells++;
    add_constant(r, &r->call->in[step->in[k.n_in - 1]], k.cls, in[k.n_in - 1], true);
  }
  FusedOp *op = add_op(r, FUSED_KERNEL);
  op->fn = k.fn;
  op->args = op_program_args(r->p, s);
  op->n_in = (uint8_t)k.n_in;
  for (int i = 0; i < k.n_in; i++) op->in[i] = (int16_t)in[i];
  link_to_run(r, s, &k, op);
  bool as_is = k.bool_out || block_is_native(t, k.cls);
  size_t size = k.bool_out ? 1 : pw_class_size(k.cls);
  op->out = (int16_t)(as_is && at >= 0 ? at : result_slot(r, s, op, size));
  r->place[me][OWN] = op->out;
  if (at >= 0) r->j->written[at] = true;
  if (!as_is) {
    int own = at >= 0 ? at : new_slot(r, dtype_size(t));
    r->place[me][OWN] = (int16_t)add_convert(r, block_stores[k.cls][t], op->out, own);
    r->free[r->n_free++] = op->out;
  }
  for (int i = 0; i < step->n_in; i++)
    if (r->last[value_of(r, step->in[i])] == s) give_back(r, value_of(r, step->in[i]));
  if (r->last[me] == s) give_back(r, me);
  return 0;
}

/* Outputs that were not made where they lie. */
static void store_outputs(Resolving *r) {
  for (int o = 0; o < r->call->n_out; o++) {
    int value = r->p->n_in + r->out[o];
    DType t = dtype_of(r, value);
    PointwiseClass cls = block_class(t);
    if (r->j->written[o]) continue;
    int from = form_of(r, value, cls);
    FusedOp *op = add_op(r, FUSED_SCATTER);
    op->convert = block_stores[cls][t];
    op->operand = (int16_t)o;
    op->size = (uint8_t)pw_class_size(cls);
    op->in[0] = (int16_t)from;
  }
}

/* Whether all of it is one element, by itself or expanded. */
static bool is_one_element(const View *v) {
  for (int d = 0; d < v->ndim; d++)
    if (v->shape[d] != 1 && v->stride[d]) return false;
  return true;
}

/* The operands of the walk: outputs, then inputs that are more than one element. */
static void walk_operands(Resolving *r) {
  FusedJob *j = r->j;
  const OpCall *c = r->call;
  View others[WALK_OPERANDS];
  int n = 0;
  for (int k = 1; k < c->n_out; k++) others[n++] = c->out[k];
  for (int k = 0; k < c->n_in; k++) {
    r->operand[k] = -1;
    if (is_one_element(&c->in[k])) continue;
    r->operand[k] = (int16_t)(n + 1);
    others[n++] = c->in[k];
  }
  walk_init(&j->walk, &c->out[0], n, others);
  for (int k = 0; k < j->walk.n; k++) {
    r->flat[k] = walk_is_flat(&j->walk, k);
    if (r->flat[k]) j->direct[j->n_direct++] = (int16_t)k;
  }
}

static void last_readers(Resolving *r) {
  const Program *p = r->p;
  for (int k = 0; k < p->n_in; k++) r->last[k] = -1;
  for (int s = 0; s < r->points; s++) {
    for (int k = 0; k < p->steps[s].n_in; k++) r->last[value_of(r, p->steps[s].in[k])] = (int16_t)s;
    r->last[p->n_in + s] = (int16_t)s;
  }
  for (int o = 0; o < r->call->n_out; o++) r->last[p->n_in + r->out[o]] = (int16_t)p->n_steps;
}

/* c: with the outputs of the walk, which the steps `out` make. */
static int resolve(FusedJob *j, const OpCall *c, const int16_t *out) {
  Resolving r;
  r.j = j;
  r.call = c;
  r.out = out;
  r.p = ((const struct fused_args *)c->args)->body;
  r.points = op_program_points(r.p);
  r.n_free = 0;
  j->n_ops = j->n_constants = j->n_direct = j->n_slots = j->n_cells = 0;
  j->most = 1;
  j->n_out = c->n_out;
  memset(j->written, 0, sizeof j->written);
  walk_operands(&r);
  last_readers(&r);
  memset(r.place, -1, sizeof r.place[0] * (size_t)(r.p->n_in + r.p->n_steps));
  for (int s = 0; s < r.points; s++) {
    int rc = resolve_step(&r, s);
    if (rc) return rc;
  }
  store_outputs(&r);
  find_runs(j);
  return 0;
}

/* -- Running ----------------------------------------------------------------------------------- */

static void run_chain(const FusedOp *op, int64_t n, char **at) {
  RunStep steps[2 * PROGRAM_STEPS], *end = steps;
  for (int i = 0; i < op->length; i++) {
    const FusedOp *o = &op[i];
    int b = o->in[o->n_in > 1 ? !o->value : 0];
    *end++ = (RunStep){o->code + (o->n_in > 1 && b >= FUSED_CELLS), at[b]};
    if (o->keeps || i + 1 == op->length) *end++ = (RunStep){RUN_STORE, at[o->out]};
  }
  fused_run(n, at[op->in[0]], steps, end);
}

/* n elements from `first`, computed as `padded` of them. */
static void run_block(const FusedJob *j, int64_t first, int64_t n, int64_t padded, char **at) {
  for (int i = 0; i < j->n_ops; i++) {
    const FusedOp *op = &j->ops[i];
    const void *in[PROGRAM_INPUTS];
    switch ((FusedKind)op->kind) {
      case FUSED_KERNEL:
        for (int k = 0; k < op->n_in; k++) in[k] = at[op->in[k]];
        op->fn(padded, op->args, in, at[op->out]);
        break;
      case FUSED_RUN:
        run_chain(op, padded, at);
        i += op->length - 1;
        break;
      case FUSED_CONVERT: op->convert(padded, at[op->in[0]], 1, at[op->out]); break;
      case FUSED_GATHER:
        walk_rows(&j->walk, op->operand, first, n, op->convert, at[op->out], op->size, false);
        if (n < padded) memset(at[op->out] + n * op->size, 0, (size_t)(padded - n) * op->size);
        break;
      case FUSED_SCATTER:
        walk_rows(&j->walk, op->operand, first, n, op->convert, at[op->in[0]], op->size, true);
        break;
    }
  }
}

/* What is there of what is folded: the row from element `first` on. */
typedef struct FusedRows {
  char *data[FUSED_FOLDS];
  int64_t first;
} FusedRows;

/* Element i of operand k. */
static char *element_at(const FusedJob *j, const FusedRows *rows, int k, int64_t i) {
  int64_t size = (int64_t)j->walk.size[k];
  return k < j->n_rows ? rows->data[k] + (i - rows->first) * size : j->walk.data[k] + i * size;
}

/* The rest, n < PW_PAD elements: tensors are places by copies of their ends. */
static void run_rest(const FusedJob *j, const FusedRows *rows, int64_t first, int64_t n,
                     char **at) {
  char ends[WALK_OPERANDS][PW_PAD * sizeof(double)] __attribute__((aligned(64)));
  const Walk *w = &j->walk;
  for (int i = 0; i < j->n_direct; i++) {
    int k = j->direct[i];
    at[k] = ends[k];
    memset(ends[k], 0, sizeof ends[k]);
    if (k >= j->n_out) memcpy(ends[k], element_at(j, rows, k, first), (size_t)n * w->size[k]);
  }
  run_block(j, first, n, PW_PAD, at);
  for (int i = 0; i < j->n_direct; i++) {
    int k = j->direct[i];
    if (k < j->n_out && j->written[k])
      memcpy(element_at(j, rows, k, first), ends[k], (size_t)n * w->size[k]);
  }
}

/* Elements [first, last). */
static void run_range(const FusedJob *j, const FusedRows *rows, int64_t first, int64_t last,
                      char **at) {
  int64_t i = first;
  for (int64_t n; last - i >= PW_PAD; i += n) {
    n = last - i < j->block ? (last - i) & ~(int64_t)(PW_PAD - 1) : j->block;
    for (int k = 0; k < j->n_direct; k++) at[j->direct[k]] = element_at(j, rows, j->direct[k], i);
    run_block(j, i, n, n, at);
  }
  if (i < last) run_rest(j, rows, i, last - i, at);
}

/* One of the threads' parts: its places, with slots and cells of its own. */
typedef struct FusedPart {
  char *at[FUSED_PLACES];
  FusedRows rows;
  char cells[PROGRAM_STEPS][FUSED_CELL] __attribute__((aligned(64)));
} FusedPart;

static void open_part(const FusedJob *j, int64_t part, FusedPart *p) {
  char *base = j->scratch + (size_t)part * j->part_bytes;
  for (int k = 0; k < j->n_slots; k++) p->at[j->walk.n + k] = base + (size_t)k * j->slot_bytes;
  for (int k = 0; k < j->n_rows; k++)
    p->rows.data[k] = base + j->rows_at + (size_t)k * (FOLD_ROW * sizeof(double) + FUSED_SKEW);
  for (int k = 0; k < j->n_cells; k++) p->at[FUSED_CELLS + k] = p->cells[k];
  for (int k = 0; k < j->n_constants; k++) {
    const FusedConstant *c = &j->constants[k];
    BlockConvert *load = block_loads[c->cls][c->dtype];
    int64_t most = c->cell ? LANES_BYTES / (int64_t)pw_class_size(c->cls) : j->block;
    pw_fill(load, (PointwiseClass)c->cls, c->from, most, (void *)p->at[c->place]);
  }
}

/* Parts [begin, end) of all elements. */
static void run_parts(int64_t begin, int64_t end, void *arg) {
  const FusedJob *j = arg;
  int64_t numel = j->walk.numel;
  FusedPart p;
  for (int64_t part = begin; part < end; part++) {
    int64_t first = numel / PW_PAD * part / j->parts * PW_PAD;
    open_part(j, part, &p);
    run_range(j, &p.rows, first,
              part + 1 < j->parts ? numel / PW_PAD * (part + 1) / j->parts * PW_PAD : numel, p.at);
  }
}

/* -- Reductions -------------------------------------------------------------------------------- */

/* Makes the row of n elements from `first` on of what is folded. */
static void make_row(const FusedJob *j, FusedPart *p, int64_t first, int64_t n) {
  p->rows.first = first;
  run_range(j, &p->rows, first, first + n, p->at);
}

/* A piece of one output's elements, of which `chunks` are made: into partial[piece][2]. */
static void fold_piece(const FusedJob *j, FusedPart *p, int64_t piece) {
  const FoldJob *like = &j->folds[0].job;
  int64_t c = piece % like->chunks, first = c * like->chunk, last = fold_chunk_end(like, c);
  int64_t before = piece / like->chunks * like->count;
  for (int f = 0; f < j->n_folds; f++)
    fold_start(&j->folds[f].job, 1, j->folds[f].job.partial + piece * 2, 1);
  for (int64_t i = first, n; i < last; i += n) {
    n = last - i < FOLD_ROW ? last - i : FOLD_ROW;
    make_row(j, p, before + i, n);
    for (int f = 0; f < j->n_folds; f++) {
      const FusedFold *fold = &j->folds[f];
      fold_run(&fold->job, p->rows.data[fold->operand], n, 1, i - first,
               fold->job.partial + piece * 2);
    }
  }
}

static void finish_fold(const FoldJob *job, int64_t output, Word *acc) {
  int64_t x, y;
  fold_place(job, job->n_kept, output, &x, &y);
  fold_finish(job, 1, acc, 1, job->y + y * (int64_t)job->y_size, 1);
}

/* Outputs that have at most FOLD_ROW elements together. */
static void fold_short(const FusedJob *j, FusedPart *p, int64_t first, int64_t n) {
  int64_t count = j->folds[0].job.count;
  if (count) make_row(j, p, first * count, n * count);
  for (int f = 0; f < j->n_folds; f++) {
    const FusedFold *fold = &j->folds[f];
    const char *row = p->rows.data[fold->operand];
    for (int64_t i = 0; i < n; i++) {
      Word acc[2];
      fold_start(&fold->job, 1, acc, 1);
      if (count)
        fold_run(&fold->job, row + i * count * (int64_t)fold->job.x_size, count, 1, 0, acc);
      finish_fold(&fold->job, first + i, acc);
    }
  }
}

/* An output of more elements. */
static void fold_long(const FusedJob *j, FusedPart *p, int64_t output) {
  int64_t count = j->folds[0].job.count;
  Word acc[FUSED_FOLDS][2];
  for (int f = 0; f < j->n_folds; f++) fold_start(&j->folds[f].job, 1, acc[f], 1);
  for (int64_t i = 0, n; i < count; i += n) {
    n = count - i < FOLD_ROW ? count - i : FOLD_ROW;
    make_row(j, p, output * count + i, n);
    for (int f = 0; f < j->n_folds; f++)
      fold_run(&j->folds[f].job, p->rows.data[j->folds[f].operand], n, 1, i, acc[f]);
  }
  for (int f = 0; f < j->n_folds; f++) finish_fold(&j->folds[f].job, output, acc[f]);
}

/* Parts [begin, end) of all outputs, or of the pieces of their elements. */
static void fold_parts_of(int64_t begin, int64_t end, void *arg) {
  const FusedJob *j = arg;
  const FoldJob *like = &j->folds[0].job;
  int64_t together = like->count ? FOLD_ROW / like->count : FOLD_ROW,
          units = like->outputs * like->chunks;
  FusedPart p;
  for (int64_t part = begin; part < end; part++) {
    int64_t i = units * part / j->parts, last = units * (part + 1) / j->parts;
    open_part(j, part, &p);
    for (int64_t n; i < last; i += n) {
      n = like->chunks > 1 || together < 1 ? 1 : last - i < together ? last - i : together;
      if (like->chunks > 1) fold_piece(j, &p, i);
      else if (together < 1) fold_long(j, &p, i);
      else fold_short(j, &p, i, n);
    }
  }
}

static void run_folds(FusedJob *j) {
  const FoldJob *like = &j->folds[0].job;
  mf_parallel(j->parts, 1, fold_parts_of, j);
  for (int f = 0; f < j->n_folds && like->chunks > 1; f++) {
    const FoldJob *job = &j->folds[f].job;
    for (int64_t o = 0; o < job->outputs; o++) {
      Word *acc = job->partial + o * job->chunks * 2;
      for (int64_t c = 1; c < job->chunks; c++)
        job->fold->join[job->cls](1, acc, c * job->chunk, acc + c * 2,
                                  fold_chunk_end(job, c) - c * job->chunk, 1);
      finish_fold(job, o, acc);
    }
  }
}

/* -- The op ------------------------------------------------------------------------------------ */

/* Words for the pieces of few outputs. */
enum { FUSED_PARTIAL = FOLD_FEW * FOLD_CHUNKS * 2 };

/* Bytes of slots that one part may need, whatever the data; with the rows that are folded, which
 * begin at *rows. */
static size_t part_bytes(const Program *p, int folds, size_t *rows) {
  size_t slots = (size_t)p->n_out + (size_t)folds;
  for (int s = 0; s < p->n_steps; s++) slots += (size_t)p->steps[s].n_in + 2;
  *rows = scratch_aligned(FUSED_L1 + slots * (FUSED_LEAST * sizeof(double) + FUSED_SKEW));
  return scratch_aligned(*rows + (size_t)folds * (FOLD_ROW * sizeof(double) + FUSED_SKEW));
}

static size_t fused_scratch(const OpCall *c) {
  const Program *p = ((const struct fused_args *)c->args)->body;
  int folds = p->n_steps - op_program_points(p);
  size_t rows, bytes = part_bytes(p, folds, &rows) * (size_t)thread_count();
  return bytes + (size_t)folds * FUSED_PARTIAL * sizeof(Word);
}

/* The shape over which the pointwise steps go, that of the inputs together; and the input that has
 * it, if there is one without gaps. */
static const View *whole_shape(const OpCall *c, View *to, int64_t *shape) {
  const View *like = NULL;
  to->ndim = 0;
  for (int k = 0; k < c->n_in; k++)
    if (c->in[k].ndim > to->ndim) to->ndim = c->in[k].ndim;
  for (int d = 0; d < to->ndim; d++) shape[d] = 1;
  for (int k = 0; k < c->n_in; k++)
    for (int d = 0, shift = to->ndim - c->in[k].ndim; d < c->in[k].ndim; d++)
      if (c->in[k].shape[d] != 1) shape[d + shift] = c->in[k].shape[d];
  for (int k = 0; k < c->n_in && !like; k++) {
    const View *v = &c->in[k];
    if (shape_equal(v->ndim, v->shape, to->ndim, shape) &&
        shape_is_dense(v->ndim, v->shape, v->stride))
      like = v;
  }
  to->shape = shape;
  return like;
}

/* What a job has beside it while it is set up. */
typedef struct FusedOutputs {
  OpCall call; /* whose outputs are those of the walk */
  View views[WALK_OPERANDS];
  int16_t steps[WALK_OPERANDS];
  int64_t shape[MF_MAX_DIMS], stride[MF_MAX_DIMS];
} FusedOutputs;

/* The operand that step s makes for reductions; a new one if there is none. */
static int row_of(FusedJob *j, FusedOutputs *o, int s, const View *like) {
  for (int k = 0; k < j->n_rows; k++)
    if (o->steps[k] == s) return k;
  const Program *p = ((const struct fused_args *)o->call.args)->body;
  o->views[j->n_rows] = *like;
  o->views[j->n_rows].dtype = (uint8_t)p->steps[s].dtype;
  o->steps[j->n_rows] = (int16_t)s;
  return j->n_rows++;
}

/* The reductions, whose order of elements is that of rows, or when they take all elements that of
 * the first input. */
static void find_folds(FusedJob *j, const OpCall *c, FusedOutputs *o) {
  const Program *p = ((const struct fused_args *)c->args)->body;
  int points = op_program_points(p);
  View whole = {.data = NULL};
  const View *like = whole_shape(c, &whole, o->shape);
  shape_contiguous(whole.ndim, whole.shape, o->stride);
  whole.stride = o->stride;
  if (like) whole.whole = like->whole;
  for (int k = 0; k < p->n_out; k++) {
    if (p->out[k] < points) continue;
    const ProgramStep *step = &p->steps[p->out[k]];
    const void *args = op_program_args(p, p->out[k]);
    FusedFold *fold = &j->folds[j->n_folds++];
    Folding f;
    op_table[step->op].spec[OP_ISA]->folding(args, &f);
    if (like && f.dims->n == whole.ndim)
      memcpy(o->stride, like->stride, sizeof *o->stride * (size_t)whole.ndim);
    fold->operand = row_of(j, o, ~step->in[0], &whole);
    fold_init_views(&fold->job, &f, &o->views[fold->operand], &c->out[k]);
    fold_bind(&fold->job, args, &o->views[fold->operand], &c->out[k]);
  }
}

/* The outputs of the walk: what is folded, and what is written. */
static void find_outputs(FusedJob *j, const OpCall *c, FusedOutputs *o) {
  const Program *p = ((const struct fused_args *)c->args)->body;
  int points = op_program_points(p);
  o->call = *c;
  j->n_rows = j->n_folds = 0;
  if (points < p->n_steps) find_folds(j, c, o);
  o->call.n_out = j->n_rows;
  for (int k = 0; k < p->n_out; k++) {
    if (p->out[k] >= points) continue;
    o->views[o->call.n_out] = c->out[k];
    o->steps[o->call.n_out++] = p->out[k];
  }
  o->call.out = o->views;
}

/* How much is done at a time, and in how many parts. */
static void cut(FusedJob *j, const OpCall *c, const Program *p) {
  int64_t threads = thread_count(), places = j->n_slots + j->n_direct;
  int64_t block = FUSED_L1 / (places * (int64_t)j->most);
  if (block > FUSED_MOST) block = FUSED_MOST;
  if (block < FUSED_LEAST) block = FUSED_LEAST;
  if (block > j->walk.numel + PW_PAD) block = j->walk.numel + PW_PAD; /* constants fill all of it */
  j->block = block & ~(int64_t)(PW_PAD - 1);
  j->slot_bytes = scratch_aligned((size_t)j->block * j->most) + FUSED_SKEW;
  j->part_bytes = part_bytes(p, p->n_steps - op_program_points(p), &j->rows_at);
  j->scratch = c->scratch;
  char *partial = j->scratch + j->part_bytes * (size_t)threads;
  for (int f = 0; f < j->n_folds; f++)
    j->folds[f].job.partial = (Word *)(void *)partial + f * FUSED_PARTIAL;
  j->parts = j->walk.numel * p->n_steps / FUSED_GRAIN;
  if (j->parts > threads) j->parts = threads;
  if (j->parts < 1) j->parts = 1;
}

static int fused_cpu(const OpCall *c) {
  const struct fused_args *a = c->args;
  FusedJob j;
  FusedOutputs o;
  find_outputs(&j, c, &o);
  if (view_numel(&o.views[0]) == 0 && (!j.n_folds || !j.folds[0].job.outputs)) return 0;
  int rc = resolve(&j, &o.call, o.steps);
  if (rc) return rc;
  cut(&j, c, a->body);
  if (j.n_folds) run_folds(&j);
  else mf_parallel(j.parts, 1, run_parts, &j);
  return 0;
}

/* One per step and element. */
static double fused_flops(const OpCall *c) {
  const struct fused_args *a = c->args;
  double most = 0;
  for (int k = 0; k < c->n_in + c->n_out; k++) {
    const View *v = k < c->n_in ? &c->in[k] : &c->out[k - c->n_in];
    double n = view_absent(v) ? 0 : (double)view_numel(v);
    if (n > most) most = n;
  }
  return most * a->body->n_steps;
}

/* The results of a program of pointwise ops on xs, and of reductions of what they make; see
 * op_program.h. Made by the compiler. */
OP(fused, .signature = "fused(Tensor[] xs, program body) -> Tensor[]",
   .flags = OP_HIDDEN | OP_NO_GRAD | OP_BLOCKWISE, .infer = fused_infer, .cpu = fused_cpu,
   .scratch = fused_scratch, .flops = fused_flops)
