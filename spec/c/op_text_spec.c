/* Arguments and metas as text: for every op, what was printed reads back as it was. */
#include <math.h>
#include <string.h>

#include "check.h"
#include "err.h"
#include "op_text.h"

static Arena arena;

/* Another value of each param; `round` makes them differ. */
static void change(const Param *p, char *args, int round) {
  int64_t *ints = (void *)(args + p->offset);
  static const double floats[] = {0.1, -INFINITY, 1e-300, 12345678901234567.0};
  if (p->has_offset) *(bool *)(args + p->has_offset) = round != 1;
  switch ((ParamKind)p->kind) {
    case PARAM_TENSOR:
      if (p->list) *ints = round + 1;
      break;
    case PARAM_FLOAT: *(double *)(void *)ints = floats[round]; break;
    case PARAM_BOOL: *(bool *)(args + p->offset) = round & 1; break;
    case PARAM_CHOICE: *ints = strchr(p->choices, '|') ? round & 1 : 0; break;
    case PARAM_DTYPE: *ints = round % DTYPE_COUNT; break;
    case PARAM_DEVICE: *ints = round & 1; break;
    case PARAM_GENERATOR: *(RngKey *)(void *)ints = (RngKey){UINT64_MAX, (uint64_t)round}; break;
    case PARAM_INTS:
      if (p->fixed) {
        for (int k = 0; k < p->fixed; k++) ints[k] = round - k;
      } else {
        IntList *list = (void *)ints;
        list->n = round;
        for (int k = 0; k < round; k++) list->v[k] = INT64_MIN + k;
      }
      break;
    case PARAM_PROGRAM: break; /* see the graph's text */
    case PARAM_INT:
    case PARAM_DIM: *ints = round * -1000000007LL; break;
  }
}

typedef struct Reading {
  const char *text;
  const Op *op;
  void *args;
  Meta *meta;
} Reading;

static void read(void *ud) {
  Reading *r = ud;
  Scan s = scan_begin(&arena, "spec", r->text);
  if (r->meta) op_scan_meta(&s, r->meta);
  else op_scan_args(&s, r->op, r->args);
  scan_end_line(&s);
  if (!scan_at_end(&s)) scan_fail(&s, "more lines");
}

static void read_args(const char *text, const Op *op, void *args, int *rc) {
  Reading r = {text, op, args, NULL};
  *rc = arena_protect(&arena, read, &r);
}

static void arguments_read_back(void) {
  for (int i = 0; i < op_count; i++) {
    const Op *op = &op_table[i];
    for (int round = -1; round < 4; round++) {
      _Alignas(16) char args[OP_MAX_ARGS] = {0}, back[OP_MAX_ARGS] = {0};
      memcpy(args, op->defaults, op->args_size);
      for (int k = 0; k < op->n_params && round >= 0; k++) change(&op->params[k], args, round);
      Str a = {0}, b = {0};
      int rc;
      op_print_args(op, args, &a);
      CHECK(round >= 0 || a.n == 0, "%s: defaults are printed: %s", op->name, a.text);
      read_args(a.text ? a.text : "", op, back, &rc);
      CHECK(!rc, "%s", err_text());
      op_print_args(op, back, &b);
      CHECK(a.n == b.n && (!a.n || !strcmp(a.text, b.text)), "%s: %s, then %s", op->name, a.text,
            b.text);
      str_free(&a);
      str_free(&b);
    }
  }
}

static void only_what_differs_is_printed(void) {
  const Op *op = op_find("sum");
  _Alignas(16) char args[OP_MAX_ARGS] = {0};
  int rc;
  read_args("keepdim=true, dim=[1, -2]", op, args, &rc);
  Str s = {0};
  op_print_args(op, args, &s);
  CHECK(!rc && !strcmp(s.text, "dim=[1, -2], keepdim=true"), "%s", s.text);
  str_free(&s);
}

static void metas_read_back(void) {
  static const char *const texts[] = {"float32()",    "int64(2, 3)",
                                      "bool(0, 4)!",  "float32(2, 3)/(1, 2)",
                                      "float16(5)+7", "float64(2, 2)/(0, -1)+3@meta"};
  for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
    Meta m;
    Reading r = {.text = texts[i], .meta = &m};
    CHECK(!arena_protect(&arena, read, &r), "%s", err_text());
    Str s = {0};
    op_print_meta(&m, &s);
    CHECK(!strcmp(s.text, texts[i]), "%s instead of %s", s.text, texts[i]);
    str_free(&s);
  }
}

static void what_is_wrong_is_refused(void) {
  static const struct {
    const char *text, *want;
  } cases[] = {
      {"dim=[1", "expected ','"},  {"dims=[1]", "sum has no argument 'dims'"},
      {"keepdim=1", "'false'"},    {"dim=[1] dim", "the end of the line"},
      {"dtype=float", "no dtype"}, {"dim=[99999999999999999999]", "whole number"},
      {"dim=[]\nkeepdim", "more"},
  };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    _Alignas(16) char args[OP_MAX_ARGS] = {0};
    int rc;
    read_args(cases[i].text, op_find("sum"), args, &rc);
    CHECK(rc == MF_EINVAL && strstr(err_text(), cases[i].want), "%s: %s", cases[i].text,
          rc ? err_text() : "is taken");
  }
  static const char *const metas[] = {"float(2)",
                                      "none(2)",
                                      "float32(-1)",
                                      "float32(2)/(1, 1)",
                                      "float32(1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1)",
                                      "float32(2)@none",
                                      "float32(99999999999, 99999999999)"};
  for (size_t i = 0; i < sizeof metas / sizeof *metas; i++) {
    Meta m;
    Reading r = {.text = metas[i], .meta = &m};
    CHECK(arena_protect(&arena, read, &r), "%s is taken", metas[i]);
  }
}

int main(void) {
  RUN(arguments_read_back);
  RUN(only_what_differs_is_printed);
  RUN(metas_read_back);
  RUN(what_is_wrong_is_refused);
  arena_free(&arena);
  return check_end();
}
