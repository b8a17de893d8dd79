/* Eager execution: tensor handles and the dispatcher. The tape is in tape.h.
 *
 * An Eager is what belongs to one Lua state (or one thread of a C host): grad mode, tracer,
 * generator, streams. It is used by one thread at a time, and so are its tensors; storages may be
 * shared between several. */
#ifndef MF_EAGER_H
#define MF_EAGER_H
#include "context.h"
#include "op.h"
#include "pool.h"
#include "storage.h"

typedef struct Eager Eager;
typedef struct Tensor Tensor;
typedef struct Node Node;
typedef struct Autograd Autograd;
typedef struct Layout Layout; /* of global.h */

/* -- Tensors ----------------------------------------------------------------------------------- */

/* A handle on a storage. Counted; not atomic. A row-sparse tensor has no storage, but ids and
 * values; see sparse.h. */
struct Tensor {
  int refs;
  bool anchored : 1;   /* its Lua value keeps hooks of the tape alive; see bind/anchor.c */
  bool pinned : 1;     /* the same, through the owner, which hears of its end */
  bool registered : 1; /* its Lua value is in the state's weak table */
  bool uncounted : 1;  /* made by .data: writes through it are not counted */
  bool blind : 1;      /* a view made while nothing was recorded, or by an mf.Function */
  bool severed : 1;    /* global: a view that had to be converted, whose memory is its own */
  Eager *E;            /* whose it is */
  Storage *storage;
  Autograd *ag;                 /* NULL: no gradient, no view; see tape.h */
  Tensor *row_ids, *row_values; /* int64 [n], [n, ...] */
  const Layout *layout;         /* NULL: a local tensor; see global.h */
  Tensor *part;                 /* global: what this rank has of it */
  Meta m;
};

/* One reference, meta undefined, no storage. NULL with the error set, as for all below. */
Tensor *tensor_new(Eager *E);
/* A contiguous tensor without contents. */
Tensor *tensor_create(Eager *E, DType dtype, int ndim, const int64_t *shape, int device);
/* On memory of somebody else; release(owner) is called once, not on failure. */
Tensor *tensor_wrap(Eager *E, DType dtype, int ndim, const int64_t *shape, void *data,
                    void (*release)(void *), void *owner);
/* Another handle on the same memory (strides, offset as given by the source), without autograd. */
Tensor *tensor_alias(const Tensor *t);
/* t becomes another handle on what x is, keeping its autograd record; it is not a view. */
void tensor_take(Tensor *t, const Tensor *x);
/* A handle on a storage that came from another Eager of the same context. */
Tensor *tensor_adopt(Eager *E, Storage *storage, const Meta *m);
/* A 0-d number as Lua gave it: int64 when it is whole; `fraction`: never. */
Tensor *tensor_number(Eager *E, double value, bool fraction);
void tensor_release(Tensor *t);
/* Memory for t->m; the op's outputs. A code with the error set. */
int tensor_allocate(Tensor *t);
/* No memory: what t holds is known only when the step that is compiled runs. */
void tensor_open_traced(Tensor *t);

static inline Tensor *tensor_retain(Tensor *t) {
  if (t) t->refs++;
  return t;
}
static inline bool tensor_is_rows(const Tensor *t) {
  return t->storage == NULL;
}
static inline char *tensor_data(const Tensor *t) {
  return (char *)t->storage->data + t->m.offset * (int64_t)dtype_size((DType)t->m.dtype);
}
static inline bool tensor_has_data(const Tensor *t) {
  return t->m.device != DEVICE_META && !(t->storage && storage_is_traced(t->storage));
}
static inline bool tensor_same_shape(const Tensor *a, const Tensor *b) {
  return shape_equal(a->m.ndim, a->m.shape, b->m.ndim, b->m.shape);
}
View tensor_view(const Tensor *t);
/* Refuses to read t where there is nothing to read: freed, meta, or of a step that is compiled;
 * `what` begins the error text. */
int tensor_check_data(const Tensor *t, const char *what);
/* Before t is read or written: waits for work that is at it. 0, or the code with which that failed.
 */
static inline int tensor_settle(const Tensor *t);
/* t as one that the host may read, counted: itself, or a copy without history of one that lies
 * elsewhere, made when all launched before has run; t passes tensor_check_data. */
Tensor *tensor_to_host(Tensor *t);
/* The same on the device of a slot, its own included; with strides of its own if those are dense.
 */
Tensor *tensor_move(Tensor *t, int slot);
/* Writes the bytes of src into dst, which has its dtype, shape and strides, dense ones, and is on
 * another device. */
int tensor_transfer(Tensor *dst, const Tensor *src);
/* Zeros in the whole storage. */
int tensor_clear(Tensor *t);
/* One element as a double or int64 (exact for whole numbers); the tensor must have one element
 * that tensor_check_data lets pass. */
int tensor_item(Tensor *t, double *f, int64_t *i);

/* -- The state --------------------------------------------------------------------------------- */

/* A scalar argument, or a number in the place of a tensor, that is not the same each time a
 * compiled step runs: the op's param `param` is *cell. */
typedef struct EagerPatch {
  int param;
  const double *cell;
} EagerPatch;

/* Where a tensor of a call begins in the whole of which it is a part. */
typedef struct CallPlace {
  int64_t whole[MF_MAX_DIMS], start[MF_MAX_DIMS];
} CallPlace;

/* A call as the dispatcher takes it. Outputs belong to the caller afterwards. */
typedef struct EagerCall {
  const Op *op;
  Tensor *const *in; /* flattened; NULL: absent */
  int n_in, n_patches;
  const EagerPatch *patches;
  void *args;              /* struct NAME_args, may be normalised in place */
  Tensor *into;            /* NAME_: the first input, which takes the result; else NULL */
  bool recorded;           /* the dispatcher's answer: the tape has a node for it */
  bool global;             /* an input is global, or `target` is given */
  const Layout *target;    /* of a factory: how the output is to lie; see eager_call_as */
  const CallPlace *places; /* of inputs and outputs, for ops that look at them; NULL: wholes */
  int n_out, cap_out;
  Tensor *original; /* what the written tensor was, where the gradient needs it; internal */
  Tensor **out, *small[4];
} EagerCall;

/* While a state has one, calls are checked, inferred and taped as ever, but the outputs get no
 * memory, and `record` is called where the kernel would run. */
typedef struct EagerTracer {
  int (*record)(struct EagerTracer *, EagerCall *c);
  /* t.grad is about to be read or added to, or (`written`) set. */
  int (*gradient)(struct EagerTracer *, Tensor *t, bool written);
  /* What is traced is one of so many micro-batches of a step; more than 1: gradients of tensors
   * that are older than the step are averaged where they end. */
  int times;
} EagerTracer;

/* Work that goes on behind the state's back, of a step that runs ahead: the storages that it uses
 * are marked STORAGE_PENDING until settle(s) has waited for what s holds. */
typedef struct EagerPending {
  struct EagerPending *next;
  /* NULL: for all that it works at. 0, or the code with which the work failed. */
  int (*settle)(struct EagerPending *, Storage *s);
} EagerPending;

typedef struct Generator {
  uint64_t seed, next; /* the stream number of the next random op */
} Generator;

/* What an owner above adds, bind for one; every function gets `ud`, and none may be called while
 * the tensors it touches are in use elsewhere. */
typedef struct EagerOwner {
  void *ud;
  /* Runs gradient line `grad` of node n's op. gout: the gradients of its outputs (NULL: none); bit
   * k of need: input k's is wanted; gin takes them, counted (NULL: none). */
  int (*gradient)(void *ud, Node *n, int grad, Tensor *const *gout, const bool *need, Tensor **gin);
  /* Runs an mf.Function's backward; the same for all its inputs. */
  int (*function)(void *ud, Node *n, Tensor *const *gout, const bool *need, Tensor **gin);
  /* Before a node runs: the user's hooks, which may replace gradients of its outputs. NULL while
   * there are none. */
  int (*hook)(void *ud, Node *n, Tensor **g);
  /* A pinned tensor is about to end. */
  void (*unpin)(void *ud, Tensor *t);
  /* Frees what garbage holds, since memory ran out. */
  void (*reclaim)(void *ud);
  /* The line of the user's program that runs now, as a number, and back as text. */
  uint64_t (*where)(void *ud);
  const char *(*where_text)(void *ud, uint64_t where);
} EagerOwner;

struct Eager {
  Context *context;
  Stream *streams[CONTEXT_DEVICES]; /* those of plugins when first used; see eager_stream */
  EagerTracer *tracer;              /* NULL: calls are executed */
  EagerPending *pending;            /* a list; NULL: nothing goes on */
  bool grad_enabled, anomaly;
  uint64_t where;      /* while a gradient runs: the line of its forward call; 0: not known */
  int device;          /* where tensors without inputs are made */
  bool retaining;      /* the backward pass that runs leaves the graph for another */
  bool background;     /* a worker's: interrupts are for the state that waits for it */
  bool closed;         /* destroyed, but tensors are left */
  bool freeing;        /* tape_node_release is at work */
  bool local_is_whole; /* local tensors that meet global ones are equal on all ranks */
  int isa;             /* index into Op.spec */
  int64_t tensors;     /* how many there are */
  int64_t charged;     /* bytes of storages made and not yet paid to the owner's collector */
  uint64_t next_seq;   /* of the next node */
  uint64_t passes;     /* how many backward passes there were */
  void *spare_pass;    /* of backward.c: space for the next one */
  int in_pass;         /* how many run, one inside another */
  Node *free_list;     /* nodes to be freed by the loop that runs; see tape_node_release */
  Pool pool;           /* tensors, autograd records, nodes */
  Generator generator;
  struct Layouts *layouts;        /* of layouts.c */
  struct GlobalCache *signatures; /* of global_call.c */
  EagerOwner owner;
  struct Buckets *buckets; /* a list: who averages gradients over ranks; see buckets.h */
};

void eager_free(Eager *E);             /* of eager_destroy and the last tensor */
Eager *eager_create(Context *context); /* NULL when out of memory */
/* Its memory goes back when its last tensor is gone. */
void eager_destroy(Eager *E);

/* The stream of a slot, made when it is wanted first; NULL with the error set. */
Stream *eager_open_stream(Eager *E, int slot);
static inline Stream *eager_stream(Eager *E, int slot) {
  Stream *s = E->streams[slot];
  return s ? s : eager_open_stream(E, slot);
}

/* Waits for the work behind the state's back that is at this storage; NULL: for all of it. */
int eager_settle(Eager *E, Storage *s);

static inline int tensor_settle(const Tensor *t) {
  bool waits = t->storage && storage_absence(t->storage) & STORAGE_PENDING && t->E->pending;
  return waits ? eager_settle(t->E, t->storage) : 0;
}

/* The user's line that runs now, or whose gradient runs: its text, or NULL when it is not known. */
const char *eager_where(Eager *E);

/* Whether somebody wants this thread to stop; then a code with the error set, once. */
static inline bool eager_has_interrupt(const Eager *E) {
  return atomic_load_explicit(&E->context->interrupted, memory_order_relaxed);
}
int eager_interrupted(Eager *E);

/* Calls an op: infer, allocate, launch, record; for a tracer, but for memory and launch. On failure
 * nothing is left in the call. */
int eager_call(Eager *E, EagerCall *c);
/* The same of a factory whose output is global, or of parts whose places count. */
int eager_call_as(Eager *E, EagerCall *c, const Layout *target, const CallPlace *places);
static inline int eager_uses_gradient(Eager *E, Tensor *t, bool written) {
  return E->tracer ? E->tracer->gradient(E->tracer, t, written) : 0;
}
void eager_call_clear(EagerCall *call); /* releases the outputs */

/* One call from C: op by name id, tensors, args (NULL: the defaults); one output. NULL with the
 * error set. */
Tensor *eager_op(Eager *E, int op, int n_in, Tensor *const *in, const void *args);
/* The same, written into in[0]. */
int eager_op_into(Eager *E, int op, int n_in, Tensor *const *in, const void *args);

#endif
