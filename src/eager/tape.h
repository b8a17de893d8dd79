/* The tape: what is recorded of calls for the backward pass, and the pass. */
#ifndef MF_TAPE_H
#define MF_TAPE_H
#include "eager.h"

/* What the tape knows of a tensor. A leaf has requires_grad and no node. */
struct Autograd {
  bool requires_grad, retain_grad;
  int output; /* which of the node's outputs */
  Node *node; /* made it; counted */
  Tensor *grad;
  Tensor *base;        /* of a view: whose memory it is; counted. Bases are never views */
  uint32_t history;    /* of a base: counts in-place writes recorded; of a view: the base's count
                        * when `node` was right */
  Node *accumulate;    /* of a leaf: the tape's end, not counted by it (the node points back) */
  uint64_t id;         /* of a leaf with hooks: names it as `seq` names a node; 0: none */
  Tensor *retain_next; /* the next one whose gradient node `node` keeps, see Node.retain */
  struct BucketSlot *bucket; /* of a leaf whose gradient is averaged over ranks; see buckets.h */
};

/* Autograd record, made when missing: it lies beside the tensor. */
Autograd *tensor_autograd(Tensor *t);
void tape_forget(Tensor *t); /* of tensor_release: gives back what the record holds */
/* A view whose base was written in place is what the base became. */
static inline bool tensor_is_stale(const Tensor *t) {
  const Autograd *ag = t->ag;
  return ag && ag->base && ag->base->ag && ag->base->ag->history != ag->history;
}
static inline bool tensor_requires_grad(const Tensor *t) {
  return t->ag && (t->ag->requires_grad || t->ag->node || tensor_is_stale(t));
}
static inline bool tensor_is_leaf(const Tensor *t) {
  return !t->ag || !(t->ag->node || tensor_is_stale(t));
}
/* Whose memory t shows: itself, or the base of a view. */
static inline Tensor *tensor_base(Tensor *t) {
  return t->ag && t->ag->base ? t->ag->base : t;
}

typedef struct Edge {
  Node *node; /* counted; NULL: no gradient wanted */
  int output;
} Edge;

/* A tensor kept for the backward pass: an alias of its own, so that later in-place writes to the
 * handle change nothing here. Outputs are kept without their node, which would be a circle. */
typedef struct Saved {
  Tensor *t; /* NULL: not kept */
  uint32_t version;
} Saved;

/* What a gradient must look like. */
typedef struct GradMeta {
  int8_t ndim;
  uint8_t dtype, device;
  const int64_t *shape;
  const Layout *layout; /* of a global one: how it lies when it comes out of nothing */
} GradMeta;

typedef enum NodeKind {
  NODE_OP,
  NODE_ACCUMULATE,
  NODE_COPY_SLICES,
  NODE_VIEW,
  NODE_FUNCTION,
  NODE_BOX
} NodeKind;

/* Where a view lies in its base: the base's strides, and the view's size, strides and offset in
 * elements from the base's first. */
typedef struct Geometry {
  IntList base_stride, size, stride;
  int64_t offset;
} Geometry;

struct Node {
  Eager *E;
  int refs;
  uint8_t kind;
  bool released;  /* what it kept was given back after a backward pass */
  uint32_t bytes; /* of this block */
  int place;      /* among the visits of `pass` */
  const Op *op;
  uint64_t seq;   /* consumers have higher numbers than their producers; leaves 0 */
  uint64_t where; /* the user's line where somebody wants it, see EagerOwner.where; else 0 */
  int n_in, n_out;
  Edge *next;         /* n_in */
  GradMeta *in_meta;  /* n_in */
  GradMeta *out_meta; /* n_out */
  Saved *saved;       /* n_in + n_out: inputs, then outputs; NULL: nothing is kept */
  void *args;
  Node *inner; /* NODE_COPY_SLICES: the in-place call on the view; input 0 is the base */
  union {
    Tensor *leaf;       /* NODE_ACCUMULATE: not counted; its record points here and clears this */
    Geometry *geometry; /* NODE_COPY_SLICES, NODE_VIEW */
  };
  Tensor *retain; /* outputs that keep their gradient, by Autograd.retain_next; not counted */
  uint64_t pass;  /* the backward pass that visits it now; see backward.c */
  union {
    int64_t *room;   /* while it is made: where the metas' shapes go, one behind the other */
    Node *free_next; /* while it ends */
  };
};

const char *tape_node_name(const Node *n);

/* Before an in-place call while gradients are recorded: refuses one that would lose a gradient.
 * `tracked`: an input requires one. */
int tape_check_inplace(EagerCall *call, Tensor *written, bool tracked);
/* Before an in-place call: keeps a copy of what will be overwritten in call->original, where a
 * gradient line will read it. */
int tape_keep_original(Eager *E, EagerCall *call);
/* Records `call` (already run) when an input requires a gradient. */
int tape_record(Eager *E, EagerCall *call);
/* Records that y was made of x by conversion: between layouts, or between a global tensor and this
 * rank's part. The gradient of x lies as `grad`; NULL: x is local. */
int tape_record_box(Eager *E, Tensor *x, Tensor *y, const Layout *grad);
/* The tape of outputs that `call`'s owner made by itself (an mf.Function): a node whose backward is
 * the owner's. *seq names it; 0: nothing is recorded. */
int tape_record_function(Eager *E, int n_in, Tensor *const *in, int n_out, Tensor *const *out,
                         uint64_t *seq);
/* The node that made t, after in-place writes to its base; NULL for leaves. Not counted. */
int tape_node(Eager *E, Tensor *t, Node **node, int *output);
void tape_node_release(Node *n);
/* t was made by n as its output `output`. */
void tape_attach(Tensor *t, Node *n, int output);
/* The same, or, with n NULL, by none; `history` as in Autograd. */
void tape_restore(Tensor *t, Node *n, int output, uint32_t history);
/* The edge to what made t, counted: a node, or a leaf's end of the tape; {NULL} when t needs no
 * gradient. */
int tape_edge(Eager *E, Tensor *t, Edge *edge);
/* From now on t.grad is kept though t is no leaf. */
int tape_retain_grad(Eager *E, Tensor *t);
/* Makes t a view of the memory of x. */
void tape_view_of(Eager *E, Tensor *t, Tensor *x);
/* Refuses what `name` (called at `where`) kept if it was freed or written since; names both ops. */
int tape_check_saved(Eager *E, const char *name, uint64_t where, Storage *s, uint32_t version);
/* Zeros of that form. */
Tensor *tape_zeros(Eager *E, const GradMeta *m);

typedef struct Backward {
  int n_out;
  Tensor *const *outputs, *const *gout; /* gout NULL, or with NULL entries: ones, for one element */
  int n_in;                             /* 0: accumulate into the leaves */
  Tensor *const *inputs;
  Tensor **grads; /* of the inputs; NULL where there is none */
  bool retain_graph, create_graph;
} Backward;

int tape_backward(Eager *E, const Backward *b);
/* t.grad += g */
int tape_accumulate(Eager *E, Tensor *t, Tensor *g, bool create_graph);
void tape_end(Eager *E); /* of eager_free */

#endif
