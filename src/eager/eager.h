/* Eager execution: tensor handles, the dispatcher, the autograd tape.
 *
 * An Eager is what belongs to one Lua state (or one thread of a C host): grad mode, interpreter, generator, streams. It is used by
 * one thread at a time, and so are its tensors; storages may be shared between several. */
#ifndef MF_EAGER_H
#define MF_EAGER_H
#include "context.h"
#include "op.h"
#include "storage.h"

typedef struct Eager Eager;
typedef struct Tensor Tensor;
typedef struct Node Node;
typedef struct Autograd Autograd;

/* -- Tensors ------------------------------------------------------------------------------------------------------------------ */

/* A handle on a storage. Counted; not atomic. `rows`: a row-sparse tensor; see eager/rows.h. */
struct Tensor {
  Meta m;
  int refs;
  bool anchored;       /* its Lua value keeps others alive (hooks up the tape); see bind/tensor.c */
  bool registered;     /* its Lua value is in the state's weak table */
  Storage *storage;
  Autograd *ag;        /* NULL: no gradient, no view tracking */
  Tensor *row_ids, *row_values; /* row-sparse: ids int64 [n], values [n, ...]; storage is NULL then */
};

/* What the tape knows of a tensor. A leaf has requires_grad and no node. */
struct Autograd {
  bool requires_grad, retain_grad;
  Tensor *grad;
  Node *node;          /* made it; counted */
  int output;          /* which of the node's outputs */
  Node *accumulate;    /* of a leaf: the tape's end, not counted by it (the node holds the tensor) */
  Tensor *base;        /* of a view: whose memory it is; counted. Bases are never views */
  uint32_t history;    /* of a base: counts in-place writes recorded; of a view: the base's count when `node` was right */
  int hooks;           /* how many hooks Lua has on it */
};

Tensor *tensor_new(void); /* one reference, meta undefined, no storage; NULL when out of memory */
/* A contiguous tensor without contents. NULL with the error set. */
Tensor *tensor_create(Eager *E, DType dtype, int ndim, const int64_t *shape, int device);
/* Another handle on the same memory (strides, offset as given by the source), without autograd. */
Tensor *tensor_alias(const Tensor *t);
/* A 0-d number as Lua gave it. */
Tensor *tensor_number(Eager *E, double value);
Tensor *tensor_retain(Tensor *t);
void tensor_release(Tensor *t);

static inline char *tensor_data(const Tensor *t) {
  return (char *)t->storage->data + t->m.offset * (int64_t)dtype_size((DType)t->m.dtype);
}
static inline bool tensor_has_data(const Tensor *t) {
  return t->m.device != DEVICE_META;
}
/* Views count what in-place writes to their base have made of them. */
bool tensor_requires_grad(const Tensor *t);
bool tensor_is_leaf(const Tensor *t);
/* Autograd record, made when missing; NULL when out of memory. */
Autograd *tensor_autograd(Tensor *t);
View tensor_view(const Tensor *t);
/* One element as a double or int64 (exact for whole numbers); the tensor must have one element. Refuses meta and freed ones. */
int tensor_item(const Tensor *t, double *f, int64_t *i);

/* -- The state ------------------------------------------------------------------------------------------------------------------ */

/* A call as the dispatcher takes it. Outputs belong to the caller afterwards. */
typedef struct EagerCall {
  const Op *op;
  Tensor *const *in;  /* flattened; NULL: absent */
  int n_in;
  void *args;         /* struct NAME_args, may be normalised in place */
  Tensor *into;       /* NAME_: the first input, which takes the result; else NULL */
  Tensor *original;   /* what the written tensor was, where the gradient needs it; the dispatcher's own */
  Tensor *small[4], **out;
  int n_out, cap_out;
} EagerCall;

/* Executes checked calls: eager_run, or a tracer's. */
typedef int Interpreter(Eager *E, EagerCall *call);

/* Runs the gradient line `grad` of the node's op: gout are the gradients of its outputs (NULL: none), bit k of need says that the gradient of input k is
 * wanted, gin takes them (NULL: none). Registered by bind. */
typedef int GradientFn(void *ud, Node *n, int grad, Tensor *const *gout, const bool *need, Tensor **gin);
/* Called with the gradients of a node's outputs before it runs: runs the user's hooks, which may replace them. Registered by bind while there are hooks. */
typedef int HookFn(void *ud, Node *n, Tensor **g);

typedef struct Generator {
  uint64_t seed, next;  /* the stream number of the next random op */
} Generator;

struct Eager {
  Context *context;
  Stream *streams[CONTEXT_DEVICE_TYPES];
  Interpreter *interpreter;
  void *interpreter_ud;
  bool grad_enabled, anomaly, in_backward;
  int isa;                /* index into Op.spec */
  uint64_t next_seq;
  Node *free_list;        /* nodes to be freed by the loop that runs; see tape_node_release */
  bool freeing;
  Generator generator;
  GradientFn *gradient;
  HookFn *hook;
  void *gradient_ud;
  uint64_t (*where)(void *ud); /* the current Lua line as a number for anomaly mode, or NULL */
  void *where_ud;
};

Eager *eager_create(Context *context); /* NULL when out of memory */
void eager_destroy(Eager *E);

/* Calls an op through the current interpreter. On failure nothing is left in the call. */
int eager_call(Eager *E, EagerCall *call);
void eager_call_clear(EagerCall *call); /* releases the outputs */
/* The default interpreter: infer, allocate, launch, record. */
int eager_run(Eager *E, EagerCall *call);

/* One call from C: op by name id, tensors, args (NULL: the defaults); one output. NULL with the error set. */
Tensor *eager_op(Eager *E, int op, int n_in, Tensor *const *in, const void *args);
/* a + b, where either may be row-sparse: rows and rows are put one behind the other, rows and dense give dense. */
Tensor *eager_add(Eager *E, Tensor *a, Tensor *b);
/* The same, written into in[0]. */
int eager_op_into(Eager *E, int op, int n_in, Tensor *const *in, const void *args);

/* -- The tape ---------------------------------------------------------------------------------------------------------------------- */

typedef struct Edge {
  Node *node;    /* counted; NULL: no gradient wanted */
  int output;
} Edge;

/* A tensor kept for the backward pass. Outputs are kept without their node, which would be a circle. */
typedef struct Saved {
  Tensor *t;           /* an alias of its own, so that later in-place writes to the handle change nothing here; NULL: not kept */
  uint32_t version;
} Saved;

/* What a gradient must look like. */
typedef struct GradMeta {
  int8_t ndim;
  uint8_t dtype, device;
  int64_t shape[MF_MAX_DIMS];
} GradMeta;

typedef enum NodeKind { NODE_OP, NODE_ACCUMULATE, NODE_COPY_SLICES, NODE_VIEW, NODE_FUNCTION } NodeKind;

/* Where a view lies in its base: strides of the base, and size, strides and offset of the view in elements from the base's first. */
typedef struct Geometry {
  IntList base_stride, size, stride;
  int64_t offset;
} Geometry;

struct Node {
  Eager *E;
  int refs;
  uint8_t kind;
  bool released;        /* what it kept was given back after a backward pass */
  const Op *op;
  uint64_t seq;         /* consumers have higher numbers than their producers; leaves 0 */
  uint64_t where;       /* Lua line, see Eager.where */
  int n_in, n_out;
  Edge *next;           /* n_in */
  GradMeta *in_meta;    /* n_in */
  GradMeta *out_meta;   /* n_out */
  Saved *saved;         /* n_in + n_out: inputs, then outputs */
  void *args;
  Tensor *leaf;         /* NODE_ACCUMULATE: not counted; its record points here and clears this */
  Node *inner;          /* NODE_COPY_SLICES: the in-place op on the view; input 0 is the base, the others are the op's */
  Geometry *geometry;   /* NODE_COPY_SLICES, NODE_VIEW */
  Node *free_next;
  void *lua;            /* bind's: key of hooks, or of an mf.Function */
};

/* Before an in-place call: keeps a copy of what will be overwritten in call->original, where a gradient line will read it. */
int tape_keep_original(Eager *E, EagerCall *call);
/* Records `call` (already run) when grad mode is on and an input requires a gradient. */
int tape_record(Eager *E, EagerCall *call);
/* The node that made t, after in-place writes to its base; NULL for leaves. Not counted. */
int tape_node(Eager *E, Tensor *t, Node **node, int *output);
void tape_node_release(Node *n);
/* The edge to what made t, counted: a node, or a leaf's end of the tape; {NULL} when t needs no gradient. */
int tape_edge(Eager *E, Tensor *t, Edge *edge);
/* Refuses an in-place write that would lose a gradient. */
int tape_check_inplace(Eager *E, Tensor *t, const char *op);

/* Backward from outputs with gradients (NULL: ones, for one element). With inputs, returns their gradients in grads (NULL entries where there
 * is none); without, accumulates into the leaves. */
int tape_backward(Eager *E, int n_out, Tensor *const *outputs, Tensor *const *gout, int n_in, Tensor *const *inputs, Tensor **grads,
                  bool retain_graph, bool create_graph);
/* t.grad += g */
int tape_accumulate(Eager *E, Tensor *t, Tensor *g, bool create_graph);

#endif
