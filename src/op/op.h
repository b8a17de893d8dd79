/* What an op is: one constant record where its code is, and what the build makes of its signature.
 *
 *   OP(softmax,
 *      .signature = "softmax(Tensor x, *, dim dim=-1) -> Tensor",
 *      .infer = softmax_infer, .sbp_rule = sbp_all_but_dim, .cpu = softmax_cpu)
 *
 * `collect.lua` reads the lines that begin with OP( or POINTWISE, parses the signatures and writes
 * op_ids.h (enum OP_name), op_args.h (struct name_args) and op_table.c (the table `op_table` of
 * Op). A file with such lines is compiled once per instruction set; each compilation has records of
 * its own, and a context uses those that suit its CPU. */
#ifndef MF_OP_H
#define MF_OP_H
#include "err.h"
#include "meta.h"
#include "pointwise_fn.h"

typedef struct Stream Stream; /* of device.h */
typedef struct Op Op;
typedef struct OpSpec OpSpec;
typedef struct Infer Infer;
typedef struct SbpAsk SbpAsk;
typedef struct Program Program; /* of op_program.h */
typedef struct Folding Folding; /* of folding.h */

/* -- Inference --------------------------------------------------------------------------------- */

/* One question: what are the outputs of `op` on these inputs? The function adds its outputs in
 * order with infer_add and fills in their metas; `args` may be normalised in place (dims made
 * non-negative, defaults filled). */
struct Infer {
  const Op *op;
  void *args;            /* struct NAME_args */
  const Meta *const *in; /* n_in of them; NULL: an optional tensor that is absent */
  int n_in, n_out;
  int device;        /* of outputs without an input */
  const View *views; /* the inputs' data where the op is data dependent (OP_DATA); else NULL */
  Meta *(*add)(Infer *);
  Meta *last; /* the output added last */
};

/* Answer of a view op whose input must be copied first: the caller does so and asks again. */
enum { INFER_COPY = -1 };

/* The next output: contiguous float32 0-d on the device of the first input, or I->device, until
 * filled in. NULL when out of memory (text set). */
Meta *infer_add(Infer *I);

/* The next output with this dtype and shape, contiguous; the shape is checked. */
int infer_shape(Infer *I, DType dtype, int ndim, const int64_t *shape);
/* The next output is like input k, with its shape and, where dense, its strides; dtype as given. */
int infer_like(Infer *I, int k, DType dtype);
/* The last output gets the strides of the first input of its shape, if dense: channels_last stays.
 */
int infer_keep_strides(Infer *I);
/* Whole inferences for common kinds: output as input 0; the same, integers becoming float32. */
int infer_same(Infer *I);
int infer_same_float(Infer *I);
/* Of every pointwise op: promotion and broadcasting as PyTorch's, strides kept. */
int pointwise_infer(Infer *I);
int infer_none(Infer *I); /* adds no output: for ops that only write into their inputs */

/* Makes *dim non-negative in place: legal are -ndim .. ndim-1 (for 0-d: -1 and 0). `name` is the
 * argument's name for the error. */
int infer_dim(Infer *I, const char *name, int64_t *dim, int ndim);
/* The same for a list, refusing repeats. An empty list means all dims when `all_if_empty`. */
int infer_dims(Infer *I, const char *name, IntList *dims, int ndim, bool all_if_empty);

/* "softmax: x must be a float tensor, is int64". All return MF_EINVAL, or 0 if the check passes. */
int infer_error(Infer *I, const char *format, ...) __attribute__((format(printf, 2, 3)));
int infer_want_float(Infer *I, int k);
int infer_want_ndim(Infer *I, int k, int ndim);
int infer_want_dtype(Infer *I, int k, DType dtype);
int infer_want_same_dtype(Infer *I, int a, int b);
int infer_want_shape(Infer *I, int k, int ndim, const int64_t *shape);
/* Input a must have the shape of input b. */
int infer_want_same_shape(Infer *I, int a, int b);
int infer_want_held(Infer *I, const char *name, double v, DType t);
/* A list argument that is the shape of a tensor of ndim dims. */
int infer_want_sizes(Infer *I, const char *name, const IntList *size, int ndim, DType dtype);
/* Every place that (size, stride, offset) reach must be one of n elements; names for the error. */
int infer_want_inside(Infer *I, const char *what, int ndim, const int64_t *size,
                      const int64_t *stride, int64_t offset, int64_t n);
/* The name of input k as the signature has it ("xs[2]" in a list), for error texts; in buf. */
const char *infer_name(Infer *I, int k, char *buf, size_t n);

/* PyTorch's promotion over all inputs: dimensioned ones before 0-d ones before numbers, by kind. */
DType infer_promote(Infer *I);
/* The same over views. */
DType op_promote_views(int n, const View *v);

/* -- Kernels ----------------------------------------------------------------------------------- */

/* One launch. `in` and `out` are in the signature's order; lists are flattened, their lengths in
 * args (n_NAME). A tensor that the op mutates is among `in`. For an in-place call out[0] has the
 * data of in[0]; kernels of ops that allow it (OP_INPLACE) read an element before they write it. */
struct OpCall {
  const Op *op;
  const void *args;
  const View *in, *out;
  int n_in, n_out;
  Stream *stream;
  void *scratch; /* as many bytes as `scratch` of the record asked for, aligned to 64 */
};

enum { SCRATCH_ALIGN = 64 }; /* of the blocks in which kernels lay out their scratch */

static inline size_t scratch_aligned(size_t bytes) {
  return (bytes + SCRATCH_ALIGN - 1) & ~(size_t)(SCRATCH_ALIGN - 1);
}

/* Where in the scratch a block behind `used` bytes begins; `used` then counts it too. */
static inline size_t scratch_offset(size_t *used, size_t bytes) {
  size_t at = *used;
  *used += scratch_aligned(bytes);
  return at;
}

/* The block itself; NULL while bytes are only counted, without a base. */
static inline char *scratch_take(char *base, size_t *used, size_t bytes) {
  size_t at = scratch_offset(used, bytes);
  return base ? base + at : NULL;
}

enum { REDUCE_MEAN, REDUCE_SUM, REDUCE_NONE }; /* the choices "mean|sum|none" of losses */

typedef enum OpFlag {
  OP_VIEW = 1, /* output shares the storage of input 0; infer sets strides and offset; no kernel */
  OP_INPLACE = 2,    /* NAME_ exists: the result is written into the first input */
  OP_RANDOM = 4,     /* takes a generator; never merged with an equal op */
  OP_DATA = 8,       /* the output's shape depends on data */
  OP_NO_GRAD = 16,   /* has no gradient by nature (comparison, index); results never require one */
  OP_BOOL_OUT = 32,  /* pointwise: the result is bool */
  OP_FLOAT_OUT = 64, /* pointwise: integers are computed as float32 */
  OP_INT_ONLY = 128, /* pointwise: integers and bool only */
  OP_METHOD_ONLY = 256, /* bound as a tensor's method alone */
  OP_FUNCTION_ONLY = 512,
  OP_HIDDEN = 1024,     /* bound as mf._NAME: for the library's own Lua */
  OP_BLOCKWISE = 2048,  /* an output may have the data of any input with its places */
  OP_BY_VALUE = 4096,   /* pointwise: `choose` reads the value of a 0-d input */
  OP_STRIDED = 8192,    /* a view that goes by the strides of memory, not by its input's dims */
  OP_PLACES = 16384,    /* writes the number that an input may be, as it is */
  OP_SPREADS = 32768,   /* what there is once a step to each of its micro-batches */
  OP_TRANSFER = 131072, /* brings input 0 to the device of the output, as it is */
  OP_GATHERS = 65536,   /* the reverse, an output that lasts; `at` is the micro-batch's number */
  OP_INDEXED = 262144,  /* kernels read where a view begins in the whole, and its sizes */
  OP_FORM = 524288      /* reads only shapes and dtypes of its inputs */
} OpFlag;

/* What an op's file declares. */
struct OpSpec {
  const char *signature;
  const char *sbp;           /* index notation, see sbp_rule.h */
  int (*sbp_rule)(SbpAsk *); /* adds the signatures that notation cannot say */
  const char *linear;        /* how partial sums pass: "a+b" jointly, "a|b" one at a time */
  int flags;                 /* OpFlag */
  int (*infer)(Infer *);
  int (*cpu)(const OpCall *);
  size_t (*scratch)(const OpCall *); /* bytes of scratch; data pointers are not to be read */
  double (*flops)(const OpCall *);   /* for profiles; NULL: one per element of the result */
  PointwiseFn *pointwise[PW_CLASSES];
  PointwiseChoose *choose;                      /* NULL: always those */
  const char *expression;                       /* of a pointwise op, for fused kernels */
  void (*folding)(const void *args, Folding *); /* of a reduction: see folding.h */
};

/* Records of this compilation, op_NAME__v3 and so on, and its place in spec[] (with op_ids.h). */
#define MF_PASTE2(a, b) a##b
#define MF_PASTE(a, b) MF_PASTE2(a, b)
#define OP_SYMBOL(name) MF_PASTE(op_##name##__, MF_ISA)
#define OP_ISA MF_PASTE(OP_INDEX_, MF_ISA)
#define OP(name, ...)                  \
  extern const OpSpec OP_SYMBOL(name); \
  const OpSpec OP_SYMBOL(name) = {__VA_ARGS__};

/* -- What the build makes of it ---------------------------------------------------------------- */

typedef enum ParamKind {
  PARAM_TENSOR,
  PARAM_INT,
  PARAM_FLOAT,
  PARAM_BOOL,
  PARAM_DIM,
  PARAM_INTS,
  PARAM_CHOICE,
  PARAM_DTYPE,
  PARAM_DEVICE,
  PARAM_GENERATOR,
  PARAM_PROGRAM
} ParamKind;

typedef struct Param {
  const char *name;
  const char *choices;  /* "none|mean|sum" */
  const char *fallback; /* the default as the signature writes it, for help; NULL: required */
  uint8_t kind;         /* ParamKind */
  uint8_t fixed;        /* int[2]: 2, kept as int64_t[2]; a single number is repeated */
  bool optional;        /* may be nil: absent tensor, or has_NAME false */
  bool list;            /* Tensor[] */
  bool number;          /* Tensor|number */
  bool mutated;         /* Tensor! */
  bool keyword_only;
  uint16_t offset;     /* of the value in the args; of n_NAME for a list of tensors */
  uint16_t has_offset; /* of has_NAME for optional values */
} Param;

/* One line of lua/grad.lua: which tensor params it serves and what of the forward call it reads;
 * bits are positions among the tensor params, or among the outputs. */
typedef struct OpGrad {
  uint32_t serves, reads_in, reads_out, reads_shape;
} OpGrad;

/* Key of one random op: see rng.h. */
typedef struct RngKey {
  uint64_t seed, stream;
} RngKey;

enum { OP_ISAS = 3, OP_MAX_PARAMS = 24, OP_MAX_ARGS = 1024 };

struct Op {
  const char *name;
  int id;
  const OpSpec *spec[OP_ISAS]; /* by op_isa_index */
  const Param *params;
  uint8_t n_params, n_tensors; /* all; tensor params, which come first in `in` */
  uint8_t n_mutated, n_lists;  /* without Tensor[] params, input k is tensor param k */
  int8_t n_outputs;            /* -1: Tensor[] */
  const char *const *outputs;  /* names, or NULL when there is one without a name */
  uint16_t args_size;
  int16_t requires_grad; /* offset of a factory's requires_grad, or -1 */
  const void *defaults;
  const OpGrad *grads;
  uint8_t n_grads;
  const char *doc; /* the comment above the record */
};

extern const Op op_table[];
extern const int op_count;
/* A hash of all signatures: code built against another table is refused. */
extern const uint64_t op_table_hash;

/* Which of spec[] suits a CPU of this level (cpuid_isa). */
int op_isa_index(int level);
const Op *op_find(const char *name); /* NULL: there is none of that name */

/* The tensor param (0-based among tensor params) to which flattened input k belongs. */
int op_param_of_input(const Op *op, const void *args, int k);
/* The flattened range of inputs of tensor param p. */
void op_inputs_of_param(const Op *op, const void *args, int p, int *first, int *n);

#endif
