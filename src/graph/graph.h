/* The logical program of one step: nodes and the values they make, in one arena.
 *
 * A Graph is functional: a value is made once and never changes. A tensor that the step writes is a
 * sequence of values; what is left in a captured tensor at the end is said by a `write` node, and
 * writes and results are the roots of what is needed. Values have a shape and a dtype and no
 * strides: order in memory is the plan's matter, but for ports, which name memory that exists.
 *
 * Nodes are in an order that computes before it uses; passes keep it so, and graph_verify says
 * whether they did. Everything that allocates runs under arena_protect(&g->arena). */
#ifndef MF_GRAPH_H
#define MF_GRAPH_H
#include <stdbool.h>
#include <stdint.h>

#include "arena.h"
#include "op.h"
#include "op_ids.h"
#include "placement.h"
#include "str.h"

typedef struct Graph Graph;
typedef struct GraphNode GraphNode;
typedef struct GraphValue GraphValue;

/* How values lie on ranks; one for all that lie so, made by graph_layout. */
typedef struct GraphLayout {
  const Placement *placement;
  SbpList sbp;
} GraphLayout;

/* Ranks that communicate, in the order of their parts. */
typedef struct GraphGroup {
  int n;
  const int *rank;
} GraphGroup;

/* A tensor of the step. `number`: a 0-d one that stands for a plain number of the program, which
 * takes part in promotion only by its kind. */
struct GraphValue {
  GraphNode *node; /* which makes it */
  int output;      /* as its output of this place */
  int8_t ndim;
  uint8_t dtype, device;
  bool number;
  const int64_t *shape;
  int64_t id;                /* as graph_renumber left it: dense, in the order of nodes */
  void *mark;                /* for the pass that runs */
  const GraphLayout *layout; /* NULL: each rank has its own, or it is not chosen yet */
  const int64_t
      *cut; /* of a rank's part: the whole's sizes, and where it begins; NULL: it is all */
};

typedef enum GraphKind {
  GRAPH_OP,
  GRAPH_INPUT,   /* an argument of the step; one output */
  GRAPH_CAPTURE, /* memory that outlives the step, as it is at the start; one output */
  GRAPH_NUMBER,  /* a plain number: `value`, or the cell's; one output */
  GRAPH_WRITE    /* at the end, input 0 is what the capture `target` holds */
} GraphKind;

enum { NO_CELL = -1 };

/* One scalar argument of an op that is not the same in each call: param `param` of the op is the
 * value of cell `cell`. */
typedef struct GraphPatch {
  int param, cell;
} GraphPatch;

/* What nearly every walk reads stands first, in one line of the cache. */
struct GraphNode {
  GraphNode *next;
  const Op *op;
  GraphValue **in, *out; /* inputs as in OpCall, flattened; NULL: absent. Outputs are the op's, then
                            the new values of inputs that it writes, in the order of `written` */
  void *mark;            /* as a value's */
  int64_t id;
  int n_in, n_out;
  int times;     /* how often it is computed in a step: once, or for each micro-batch. Of an op that
                    gathers, its output's: once */
  uint8_t kind;  /* GraphKind */
  int8_t along;  /* of a random op computed several times: the dim of its output along which
                    micro-batches lie, for its elements' numbers; -1: none */
  bool converts; /* its output is cast to the dtype of input 0, as in-place ops do; graph_verify
                    finds out */
  bool kept;     /* in its segment, but what it makes is needed behind it */
  GraphNode *prev;
  void *args; /* struct NAME_args, normalised */
  int n_written, n_patches;
  const int *written; /* inputs that the op writes */
  const GraphPatch *patches;
  const char *where; /* the user's line, "train.lua:12"; NULL: unknown */
  int segment;   /* of an op: the stretch between checkpoints that it belongs to, from 1; 0: none */
  int generator; /* of a random op: its key's stream counts from that generator's first */
  const Meta *meta;        /* of an input or capture: its memory */
  const GraphLayout *anew; /* of a capture: it lay otherwise, and is to lie so from now on */
  const int64_t **cuts;    /* of a rank's op that looks at where parts begin: those of inputs, then
                              outputs,    whatever makes the inputs now; NULL: all are wholes */
  const SbpList *want;     /* of an op whose signature is chosen: how its inputs are to lie */
  union {
    const char *name;  /* of an input or capture */
    GraphNode *target; /* of a write */
    struct {           /* of a number */
      double value;
      int cell; /* NO_CELL: it is a constant */
    };
  };
};

struct Graph {
  Arena arena;
  char *room; /* of nodes and what belongs to them, which so lie side by side; `left` bytes */
  size_t left;
  const char *name;
  GraphNode *first, *last;
  LIST(GraphValue *) results;
  int n_cells;                        /* scalars that are read before each call */
  int n_generators;                   /* number 0 is the state's default one */
  int times;                          /* micro-batches of a step; 1: the step is one */
  bool segments;                      /* some node is of one, or was */
  bool has[OP_COUNT];                 /* ops of which there is a node, or was one */
  LIST(const Placement *) placements; /* those of layouts */
  LIST(const GraphLayout *) layouts;
  LIST(GraphGroup) groups; /* of ops that communicate */
  LIST(Meta) wholes;       /* of one rank's graph: the tensors of which its results are parts */
};

/* An empty graph; NULL when out of memory (error set). */
Graph *graph_create(const char *name);
void graph_destroy(Graph *g);

/* A node at the end of the list; kind and counts are set, its inputs are NULL and its outputs
 * undescribed. */
GraphNode *graph_add(Graph *g, GraphKind kind, int n_in, int n_out);
/* The same before `at` (NULL: at the end). */
GraphNode *graph_insert(Graph *g, GraphNode *at, GraphKind kind, int n_in, int n_out);
/* A node of an op whose arguments are copied; it belongs to the segment of `at`, and is computed as
 * often as its inputs say. */
GraphNode *graph_add_op(Graph *g, GraphNode *at, const Op *op, const void *args, int n_in,
                        GraphValue *const *in, int n_out);
void graph_describe(Graph *g, GraphValue *v, DType dtype, int device, int ndim,
                    const int64_t *shape);
/* The same computation once more, as often, on the same inputs, before `at`; in no segment. */
GraphNode *graph_copy_op(Graph *g, GraphNode *at, const GraphNode *n);
/* Uses of a value of `from` become such of one of `to`: where that one is in a segment to which
 * they do not belong, it is kept. */
void graph_keep(const GraphNode *from, GraphNode *to);
void graph_remove(Graph *g, GraphNode *n);
/* Puts n before `at` (NULL: at the end). */
void graph_move(Graph *g, GraphNode *n, GraphNode *at);
/* Every use of `from`, in nodes and results, becomes one of `to`. Linear: passes that replace many
 * values set from->mark and call graph_replace_marked once. */
void graph_replace(Graph *g, GraphValue *from, GraphValue *to);
/* Every use of a value whose mark is not NULL becomes one of (GraphValue *)mark, repeatedly. */
void graph_replace_marked(Graph *g);
/* The same of results alone, for passes that have looked at all nodes' inputs. */
void graph_replace_results(Graph *g);
/* Puts what micro-batches need of the step before them, and what they do not behind them; see
 * order.c. Uses marks, and leaves none. */
void graph_order(Graph *g);
/* Numbers nodes and values in order. */
void graph_renumber(Graph *g);
/* Sets the marks of all nodes and values to NULL. */
void graph_clear_marks(Graph *g);

static inline bool graph_is_op(const GraphNode *n, int op_id) {
  return n->kind == GRAPH_OP && n->op->id == op_id;
}
/* Whether it works for each micro-batch: its outputs are of each, or it gathers them. */
static inline bool graph_is_micro(const GraphNode *n) {
  return n->times > 1 || (n->kind == GRAPH_OP && n->op->spec[0]->flags & OP_GATHERS);
}
/* How many values there are, if they are numbered. */
static inline int64_t graph_values(const Graph *g) {
  const GraphNode *n = g->last;
  while (n && !n->n_out) n = n->prev;
  return n ? n->out[n->n_out - 1].id + 1 : 0;
}
static inline int64_t graph_numel(const GraphValue *v) {
  return shape_numel(v->ndim, v->shape);
}

/* -- ranks.c ----------------------------------------------------------------------------------- */

/* The layout of that form. */
const GraphLayout *graph_layout(Graph *g, const Placement *p, const SbpList *sbp);
/* Their places in the lists. */
int graph_layout_id(const Graph *g, const GraphLayout *l);
int graph_group(Graph *g, int n, const int *ranks);
/* Says that v is the part of a tensor of these sizes that begins there. */
void graph_cut(Graph *g, GraphValue *v, const int64_t *whole, const int64_t *start);
/* n, if its op looks at where parts begin, keeps where those of its operands do. */
void graph_keep_cuts(Graph *g, GraphNode *n);
static inline bool graph_is_cut(const GraphNode *n) {
  return n->cuts != NULL;
}
/* The placement of an op on whole tensors: that of what it makes. NULL: it is of each rank. */
const Placement *graph_placement(const GraphNode *n);

/* -- text.c, parse.c, verify.c ----------------------------------------------------------------- */

/* The whole graph as stable text, ids renumbered. text.c says what it looks like. */
void graph_print(Graph *g, Str *out);
/* The same for Graphviz. */
void graph_dot(Graph *g, Str *out);
/* Reads what graph_print wrote; NULL with the error set, naming line and reason. Any text is safe
 * to give; what is returned has passed graph_verify. */
Graph *graph_parse(const char *text);
/* Checks that values are made before they are used, that outputs are what inference says, that
 * writes go to captures, once each. `after` names the pass for the error text; 0 or a code. Leaves
 * nodes and values numbered, and no marks. */
int graph_verify(Graph *g, const char *after);

#endif
