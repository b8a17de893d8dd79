/* A small program of pointwise ops, and of reductions of what they make, as the argument of an op:
 * what `fused` runs.
 *
 * One piece of memory without pointers, so that a copy is a copy of its bytes. As text:
 *
 *   {t0 = mul(x0, x1): float32; t1 = add(t0, x2, alpha=2): float32; t0, t1}
 *
 * xK are the inputs, tK what the steps made, rounded to its dtype; at the end stand the results.
 * Behind the pointwise ops may stand reductions, over the same dims, each of what a pointwise op
 * has made; nothing in the program reads what they make. */
#ifndef MF_OP_PROGRAM_H
#define MF_OP_PROGRAM_H
#include "arena.h"
#include "op.h"
#include "scan.h"
#include "str.h"

enum {
  PROGRAM_INPUTS = 4,   /* of a step */
  PROGRAM_STEPS = 128,  /* at most */
  PROGRAM_TENSORS = 96, /* inputs and results at most */
};

typedef struct ProgramStep {
  int16_t op;
  uint8_t n_in;
  int8_t dtype;               /* of the result; DTYPE_NONE until inferred */
  int16_t in[PROGRAM_INPUTS]; /* input k of the program is k, the result of step s is ~s */
  int32_t args;               /* where its arguments begin, in bytes from the program */
} ProgramStep;

struct Program {
  int32_t bytes; /* of all, with what lies behind */
  int16_t n_in, n_out, n_steps;
  int16_t out[PROGRAM_TENSORS]; /* the steps whose results are ours */
  ProgramStep steps[];
};

/* A program of steps whose arguments are args[s]; checked by op_program_check. Under arena_protect.
 */
Program *op_program_make(Arena *a, int n_in, int n_steps, const ProgramStep *steps,
                         const void *const *args, int n_out, const int16_t *out);
/* Whether it is one: every number in its range, all ops possible. NULL, or what is wrong. */
const char *op_program_check(int n_in, int n_steps, const ProgramStep *steps, int n_out,
                             const int16_t *out);

/* How many steps are pointwise. */
int op_program_points(const Program *p);
/* Whether output k of this op is what a program reduces something to. */
bool op_program_reduces(const Op *op, const void *args, int k);

static inline const void *op_program_args(const Program *p, int step) {
  return (const char *)p + p->steps[step].args;
}

void op_program_print(const Program *p, Str *out);
Program *op_program_scan(Scan *s);

/* A copy of the arguments of an op, which keep nothing of the original. Under arena_protect. */
void *op_copy_args(Arena *a, const Op *op, const void *args);
/* The same into memory for op->args_size bytes. */
void op_set_args(Arena *a, const Op *op, const void *args, void *copy);

#endif
