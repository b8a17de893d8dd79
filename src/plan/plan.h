/* The physical program of one rank: what runs in which order on which memory. Records with ids; no
 * pointers between them, so that it prints and reads back.
 *
 * A register is a piece of memory. Those at home in the block have an offset there, and share its
 * bytes where their lifetimes are apart; the others are ports, whose memory the job binds before a
 * run. A tensor is a register seen with strides; a step is one launch of a kernel on tensors. */
#ifndef MF_PLAN_H
#define MF_PLAN_H
#include "arena.h"
#include "op.h"

typedef struct Graph Graph;

enum { PLAN_ALIGN = 64, PLAN_NO_CELL = -1 };

typedef enum PlanHome {
  PLAN_BLOCK,
  PLAN_INPUT,
  PLAN_CAPTURE,
  PLAN_RESULT, /* made by the job for each run */
  PLAN_NUMBER
} PlanHome;

typedef struct PlanRegister {
  uint8_t home;
  int port; /* which input, capture, result or number; else -1 */
  int64_t bytes;
  int64_t offset;  /* in the block */
  int first, last; /* steps that touch it, first and last */
} PlanRegister;

/* Param `param` of a step's op is the value of cell `cell`. */
typedef struct PlanPatch {
  int param, cell;
} PlanPatch;

/* meta.offset counts from the register's start. */
typedef struct PlanTensor {
  int reg;
  Meta meta;
} PlanTensor;

typedef struct PlanStep {
  const Op *op;
  void *args;
  int n_in, n_out;
  const int *in, *out; /* tensors; -1: absent */
  int n_patches;
  const PlanPatch *patches;
  const char *where;
} PlanStep;

typedef struct PlanNumber {
  double value;
  int cell; /* PLAN_NO_CELL: a constant */
  uint8_t dtype;
} PlanNumber;

typedef struct Plan {
  Arena arena;
  const char *name;
  LIST(PlanRegister) registers;
  LIST(PlanTensor) tensors;
  LIST(PlanStep) steps;
  LIST(PlanNumber) numbers;
  LIST(int)
  inputs, captures, results; /* tensors of the ports; a result's register may be that of
                                another result */
  int n_result_registers, n_cells;
  int64_t block_bytes;
} Plan;

/* The plan of a graph, whose marks are used; NULL with the error set. */
Plan *plan_create(Graph *g);
void plan_destroy(Plan *p);

/* memory.c: gives the registers at home in the block their offsets. Under arena_protect. */
void plan_memory(Plan *p);

#endif
