/* The physical program of one rank: what runs in which order on which memory. Records with ids; no
 * pointers between them, so that it prints and reads back.
 *
 * A register is a piece of memory. Those at home in the block have an offset there, and share its
 * bytes where their lifetimes are apart; the others are ports, whose memory the job binds before a
 * run, or have no memory at all and only order tasks. A tensor is a register seen with strides; a
 * step is one launch of a kernel on tensors. A task is a run of steps on one stream, or a call of
 * the host; what one task makes for others are its `out` registers.
 *
 * With micro-batches tasks have a time: some act once a round, the others `times` times, in each on
 * one micro-batch, in the same memory. Where a register goes from one kind to the other, it is
 * filled once a round: before all acts of its consumer, or by all acts of its producer. */
#ifndef MF_PLAN_H
#define MF_PLAN_H
#include "arena.h"
#include "op.h"
#include "placement.h"

typedef struct Graph Graph;
typedef struct Str Str;

enum { PLAN_ALIGN = 64, PLAN_NO_CELL = -1, PLAN_NO_CALL = -1, PLAN_SHARED = -1 };
enum { PLAN_MICRO = -2 /* as a cell: the number of the micro-batch */ };

typedef enum PlanHome {
  PLAN_BLOCK,
  PLAN_INPUT,
  PLAN_CAPTURE,
  PLAN_RESULT, /* made by the job for each run */
  PLAN_NUMBER,
  PLAN_ORDER, /* no memory */
  PLAN_HOMES
} PlanHome;

typedef struct PlanRegister {
  uint8_t home;
  int port; /* which input, capture, result or number; else -1 */
  int64_t bytes;
  int64_t offset;       /* in the block; of its first buffer, others lie behind it, each aligned */
  int first, last;      /* steps that touch it, first and last; -1: none */
  int stream;           /* on which these are; PLAN_SHARED: on several, or calls touch it, or it has
                           several buffers: then its bytes are its own for the whole run */
  int n_buffers;        /* more than 1: only of what tasks hand over */
  int producer;         /* task; -1: it is not handed over */
  int n_consumers;      /* 0 where producer is -1 */
  const int *consumers; /* tasks, ascending */
} PlanRegister;

/* Param `param` of a step's op is the value of cell `cell`. */
typedef struct PlanPatch {
  int param, cell;
} PlanPatch;

/* meta.offset counts from the register's start, for the first micro-batch; it is `stride` elements
 * further on in each of the next. `cut`: it is a part of a tensor of these sizes, and begins there;
 * NULL: it is the whole. */
typedef struct PlanTensor {
  int reg;
  int64_t stride;
  const int64_t *cut;
  Meta meta;
} PlanTensor;

/* Ranks that communicate, in the order of their parts; and how a tensor lies on ranks. Steps name
 * them by number. */
typedef struct PlanGroup {
  int n;
  const int *rank;
} PlanGroup;

typedef struct PlanLayout {
  const Placement *placement;
  SbpList sbp;
} PlanLayout;

typedef struct PlanStep {
  const Op *op;
  void *args;
  int n_in, n_out;
  const int *in, *out; /* tensors; -1: absent */
  int n_patches;
  const PlanPatch *patches;
  int along; /* of a random op: the dim in which its output is a part of the whole batch; -1: none
              */
  const char *where;
} PlanStep;

typedef struct PlanNumber {
  double value;
  int cell; /* PLAN_NO_CELL: a constant */
  uint8_t dtype;
} PlanNumber;

/* An input or capture. */
typedef struct PlanPort {
  int tensor;
  const char *name;
  bool written; /* the step writes it */
} PlanPort;

typedef struct PlanStream {
  uint8_t device; /* a slot */
  const char *name;
} PlanStream;

/* Steps [first, first + n) of `stream`, in order; or call `call` of the host, which acts for it.
 * `ticked`: it acts once in each round; the others act whenever their registers allow it. */
typedef struct PlanTask {
  int stream, first, n, call, times;
  bool ticked;
  int n_in, n_out;
  const int *in, *out; /* registers, ascending: those that it consumes and produces */
} PlanTask;

typedef struct Plan {
  Arena arena;
  const char *name;
  LIST(PlanRegister) registers;
  LIST(PlanTensor) tensors;
  LIST(PlanStep) steps; /* in an order in which they can run one after the other */
  LIST(PlanNumber) numbers;
  LIST(PlanPort) inputs, captures;
  LIST(int) results; /* tensors; a result's register may be that of another result */
  LIST(PlanStream) streams;
  LIST(PlanTask) tasks;
  LIST(const char *) calls; /* names of what the host does */
  LIST(PlanGroup) groups;
  LIST(PlanLayout) layouts;
  int n_result_registers, n_cells, times; /* micro-batches of a round */
  int64_t n_draws;                        /* stream numbers that a round takes */
  int64_t block_bytes;
} Plan;

typedef struct PlanOptions {
  bool one_op_tasks; /* each step is a task, for tests */
  int device;        /* the slot of that of all steps */
  int overlap; /* whether what is communicated has a stream of its own: > 0 it has, < 0 it has not,
                  0: where it is worth it */
  int buffers; /* not 0: a flow. What goes in and out does so by calls of the host, on streams of
                  their own, through registers of so many buffers; inputs and results are then
                  not ports but lie in the block */
} PlanOptions;

/* The calls of a flow: `data` finds the next batch, `copy` fills the inputs from it, `results`
 * takes the results. */
enum { PLAN_CALL_DATA, PLAN_CALL_COPY, PLAN_CALL_RESULTS };
extern const char *const plan_flow_calls[];

/* The plan of a graph, whose marks are used; NULL with the error set. */
Plan *plan_create(Graph *g, const PlanOptions *o);
void plan_destroy(Plan *p);

/* For those who build plans by hand, under arena_protect(&p->arena). Ids are returned. */
Plan *plan_empty(void);
int plan_add_register(Plan *p, PlanHome home, int port, int64_t bytes);
int plan_add_tensor(Plan *p, int reg, const Meta *m);
/* One with its arguments; in and out are copied. */
PlanStep *plan_add_step(Plan *p, const Op *op, const void *args, int n_in, const int *in, int n_out,
                        const int *out);
int plan_add_stream(Plan *p, int device, const char *name);
/* The next n steps, not yet in a task; it acts once a round. */
int plan_add_task(Plan *p, int stream, int n);
/* A task that is a call of the host. */
int plan_add_call(Plan *p, int stream, const char *name);
/* A register that task `from` hands to others: an order edge, or (reg >= 0) that one. */
int plan_hand_over(Plan *p, int reg, int n_buffers, int from, int n_to, const int *to);

/* tasks.c: makes tasks of the steps, on one stream, and what they hand over. Steps [first, end) are
 * those of a micro-batch. */
void plan_make_tasks(Plan *p, const PlanOptions *o, int first, int end);
/* Fills in from registers and steps what tasks consume and produce, which are ticked, and the
 * registers' streams and how long they last. */
void plan_link(Plan *p);
/* Whether a register that is handed over is filled once a round, and not in each act of a task that
 * acts several times. */
bool plan_is_slow(const Plan *p, const PlanRegister *r);

/* The bytes of the block and of results that the plan of g would have; g's marks are used, and
 * left. 0 or a code. `options`: of PlanOptions. */
int plan_measure(void *options, Graph *g, int64_t *bytes);

/* memory.c: gives the registers at home in the block their offsets. Under arena_protect. */
void plan_memory(Plan *p);
/* What a register takes of the block: all buffers, each aligned. */
int64_t plan_size(const PlanRegister *r);
/* The steps during which its bytes are its own: those that touch it, or all of them where tasks
 * that are not in one order of steps do. */
void plan_lifetime(const Plan *p, const PlanRegister *r, int *first, int *last);
/* What lies in the block when most does, the lower bound and what is wasted, as text. */
void plan_report(const Plan *p, Str *out);

/* text.c: the whole plan as text; NULL with the error set, naming line and reason. */
void plan_print(const Plan *p, Str *out);
Plan *plan_parse(const char *text);

/* verify.c: whether ids are in range, tensors inside their registers, outputs what inference says,
 * everything read was written before, what lives at once apart in memory, and tasks complete: 0 or
 * MF_EINVAL with the first thing that does not hold. */
int plan_verify(const Plan *p);

#endif
