/* See op_program.h. */
#include "op_program.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "op_ids.h"
#include "op_text.h"

enum { ALIGN = 16 };

static size_t aligned(size_t bytes) {
  return (bytes + ALIGN - 1) & ~(size_t)(ALIGN - 1);
}

static bool is_pointwise(const Op *op) {
  for (int c = 0; c < PW_CLASSES; c++)
    if (op->spec[0]->pointwise[c]) return true;
  return false;
}

static bool is_reduction(const Op *op) {
  return op->spec[0]->folding;
}

/* The number of the first reduction, or of all steps. */
static int count_points(int n_steps, const ProgramStep *steps) {
  int n = 0;
  while (n < n_steps && !is_reduction(&op_table[steps[n].op])) n++;
  return n;
}

int op_program_points(const Program *p) {
  return count_points(p->n_steps, p->steps);
}

bool op_program_reduces(const Op *op, const void *args, int k) {
  for (int i = 0; i < op->n_params; i++) {
    if (op->params[i].kind != PARAM_PROGRAM) continue;
    const Program *p = *(Program *const *)(const void *)((const char *)args + op->params[i].offset);
    if (p && k < p->n_out && p->out[k] >= op_program_points(p)) return true;
  }
  return false;
}

/* A step behind `points` pointwise ones, of n_in tensors. */
static const char *check_reduction(const ProgramStep *step, int points) {
  if (!is_reduction(&op_table[step->op])) return "a step is behind a reduction, and is none";
  if (step->n_in != 1 || step->in[0] >= 0 || ~step->in[0] >= points)
    return "a reduction is not of what a pointwise step makes";
  return NULL;
}

const char *op_program_check(int n_in, int n_steps, const ProgramStep *steps, int n_out,
                             const int16_t *out) {
  if (n_steps < 1 || n_steps > PROGRAM_STEPS) return "too many steps, or none";
  if (n_in < 1 || n_out < 1 || n_in + n_out > PROGRAM_TENSORS)
    return "too many inputs and results, or none";
  for (int s = 0; s < n_steps; s++) {
    const ProgramStep *step = &steps[s];
    if (step->op < 0 || step->op >= OP_COUNT) return "a step is no op";
  }
  int points = count_points(n_steps, steps);
  for (int s = 0; s < n_steps; s++) {
    const ProgramStep *step = &steps[s];
    const char *wrong = s < points ? NULL : check_reduction(step, points);
    if (wrong) return wrong;
    if (s < points && !is_pointwise(&op_table[step->op]))
      return "a step is no pointwise op, nor a reduction";
    if (step->n_in > PROGRAM_INPUTS || step->n_in != op_table[step->op].n_tensors)
      return "a step has too many inputs, or too few";
    for (int k = 0; k < step->n_in; k++)
      if (step->in[k] >= n_in || step->in[k] < -s)
        return "a step reads what is not there, or not yet";
  }
  for (int k = 0; k < n_out; k++)
    if (out[k] < 0 || out[k] >= n_steps) return "a result is of no step";
  return NULL;
}

Program *op_program_make(Arena *a, int n_in, int n_steps, const ProgramStep *steps,
                         const void *const *args, int n_out, const int16_t *out) {
  const char *wrong = op_program_check(n_in, n_steps, steps, n_out, out);
  if (wrong) arena_throw(a, err_set(MF_EINVAL, "program: %s", wrong));
  size_t bytes = aligned(sizeof(Program) + sizeof *steps * (size_t)n_steps);
  for (int s = 0; s < n_steps; s++) bytes += aligned(op_table[steps[s].op].args_size);
  Program *p = arena_alloc(a, bytes);
  p->bytes = (int32_t)bytes;
  p->n_in = (int16_t)n_in;
  p->n_out = (int16_t)n_out;
  p->n_steps = (int16_t)n_steps;
  memcpy(p->out, out, sizeof *out * (size_t)n_out);
  memcpy(p->steps, steps, sizeof *steps * (size_t)n_steps);
  bytes = aligned(sizeof(Program) + sizeof *steps * (size_t)n_steps);
  for (int s = 0; s < n_steps; s++) {
    const Op *op = &op_table[steps[s].op];
    p->steps[s].args = (int32_t)bytes;
    memcpy((char *)p + bytes, args[s], op->args_size);
    bytes += aligned(op->args_size);
  }
  return p;
}

void op_set_args(Arena *a, const Op *op, const void *args, void *copy) {
  memcpy(copy, args, op->args_size);
  for (int i = 0; i < op->n_params; i++) {
    if (op->params[i].kind != PARAM_PROGRAM) continue;
    Program **p = (Program **)(void *)((char *)copy + op->params[i].offset);
    if (*p) *p = arena_copy(a, *p, (size_t)(*p)->bytes);
  }
}

void *op_copy_args(Arena *a, const Op *op, const void *args) {
  void *copy = arena_alloc(a, op->args_size);
  op_set_args(a, op, args, copy);
  return copy;
}

/* -- Text -------------------------------------------------------------------------------------- */

static void print_operand(int in, Str *out) {
  str_printf(out, "%c%d", in < 0 ? 't' : 'x', in < 0 ? ~in : in);
}

void op_program_print(const Program *p, Str *out) {
  str_puts(out, "{");
  for (int s = 0; s < p->n_steps; s++) {
    const ProgramStep *step = &p->steps[s];
    str_printf(out, "t%d = %s(", s, op_table[step->op].name);
    for (int k = 0; k < step->n_in; k++) {
      if (k) str_puts(out, ", ");
      print_operand(step->in[k], out);
    }
    Str args = {0};
    op_print_args(&op_table[step->op], op_program_args(p, s), &args);
    if (args.n) str_printf(out, ", %s", args.text);
    out->failed |= args.failed;
    str_free(&args);
    str_puts(out, ")");
    if (step->dtype != DTYPE_NONE) str_printf(out, ": %s", dtype_name((DType)step->dtype));
    str_puts(out, "; ");
  }
  for (int k = 0; k < p->n_out; k++) {
    if (k) str_puts(out, ", ");
    print_operand(~p->out[k], out);
  }
  str_puts(out, "}");
}

/* While a text is read. */
typedef struct Draft {
  int n_in, n_steps, n_out;
  ProgramStep steps[PROGRAM_STEPS];
  const void *args[PROGRAM_STEPS];
  int16_t out[PROGRAM_TENSORS];
} Draft;

static int scan_operand(Scan *s, Draft *d, const char *word) {
  char *end;
  long k = strtol(word + 1, &end, 10);
  bool input = *word == 'x';
  if ((!input && *word != 't') || !word[1] || *end || k < 0 ||
      k >= (input ? PROGRAM_TENSORS : d->n_steps))
    scan_fail(s, "'%s' is no input and no step before", word);
  if (input && k >= d->n_in) d->n_in = (int)k + 1;
  return input ? (int)k : ~(int)k;
}

/* "mul(x0, x1): float32;" */
static void scan_step(Scan *s, Draft *d) {
  if (d->n_steps == PROGRAM_STEPS) scan_fail(s, "more than %d steps", (int)PROGRAM_STEPS);
  const Op *op = op_scan_name(s);
  ProgramStep *step = &d->steps[d->n_steps];
  if (op->n_tensors > PROGRAM_INPUTS || op->n_lists) scan_fail(s, "%s cannot be a step", op->name);
  *step = (ProgramStep){.op = (int16_t)op->id, .n_in = op->n_tensors, .dtype = DTYPE_NONE};
  scan_want(s, "(");
  for (int k = 0; k < op->n_tensors; k++) {
    if (k) scan_want(s, ",");
    step->in[k] = (int16_t)scan_operand(s, d, scan_word(s));
  }
  void *args = arena_copy(s->arena, op->defaults, op->args_size);
  d->args[d->n_steps++] = args;
  if (scan_is(s, ",")) op_scan_args(s, op, args);
  scan_want(s, ")");
  if (scan_is(s, ":")) {
    const char *name = scan_word(s);
    step->dtype = (int8_t)dtype_parse(name);
    if (step->dtype < 0) scan_fail(s, "there is no dtype '%s'", name);
  }
  scan_want(s, ";");
}

Program *op_program_scan(Scan *s) {
  Draft *d = arena_new(s->arena, Draft);
  scan_want(s, "{");
  const char *word = scan_word(s);
  for (; scan_is(s, "="); word = scan_word(s)) {
    char want[16];
    snprintf(want, sizeof want, "t%d", d->n_steps);
    if (strcmp(word, want) != 0) scan_fail(s, "expected %s instead of '%s'", want, word);
    scan_step(s, d);
  }
  do {
    if (d->n_out == PROGRAM_TENSORS) scan_fail(s, "too many results");
    int from = scan_operand(s, d, word);
    if (from >= 0) scan_fail(s, "'%s' is no step", word);
    d->out[d->n_out++] = (int16_t)~from;
  } while (scan_is(s, ",") && (word = scan_word(s)));
  scan_want(s, "}");
  return op_program_make(s->arena, d->n_in, d->n_steps, d->steps, d->args, d->n_out, d->out);
}
