/* The reader of SBP index notation, on a made-up op with inputs a, b, c (c optional): what each
 * text allows for given shapes, worked out by hand. */
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "sbp_rule.h"
#include "str.h"

typedef struct Args {
  int64_t dim;
  IntList size;
} Args;

enum { MAX_OUT = 2 };

typedef struct Case {
  OpSpec spec;
  Op op;
  Param params[5];
  Args args;
  Meta metas[6];
  const Meta *in[3], *out[MAX_OUT];
  int n_in, n_out, parts;
} Case;

static Meta meta_of(const char *shape) { /* "2,3" */
  Meta m = {.dtype = F32, .device = DEVICE_CPU};
  for (const char *p = shape; *p; p += *p == ',') {
    m.shape[m.ndim++] = strtol(p, (char **)&p, 10);
  }
  shape_contiguous(m.ndim, m.shape, m.stride);
  return m;
}

/* An op over tensors of these shapes, "n" for a number, NULL for an absent one; outputs behind
 * them. */
static Case *make(const char *sbp, const char *linear, const char *const *in, int n_in,
                  const char *const *out, int n_out) {
  static const char *const names[] = {"a", "b", "c"};
  Case *c = calloc(1, sizeof *c);
  c->spec.sbp = sbp;
  c->spec.linear = linear;
  c->n_in = n_in, c->n_out = n_out, c->parts = 2;
  for (int k = 0; k < n_in; k++) {
    c->params[k] = (Param){.name = names[k], .kind = PARAM_TENSOR};
    if (!in[k]) continue;
    c->metas[k] = meta_of(in[k][0] == 'n' ? "" : in[k]);
    c->metas[k].number = in[k][0] == 'n';
    c->in[k] = &c->metas[k];
  }
  for (int k = 0; k < n_out; k++) {
    c->metas[n_in + k] = meta_of(out[k]);
    c->out[k] = &c->metas[n_in + k];
  }
  c->params[n_in] = (Param){.name = "dim", .kind = PARAM_DIM, .offset = offsetof(Args, dim)};
  c->params[n_in + 1] = (Param){.name = "size", .kind = PARAM_INTS, .offset = offsetof(Args, size)};
  c->op = (Op){.name = "made_up",
               .spec = {&c->spec, &c->spec, &c->spec},
               .params = c->params,
               .n_params = (uint8_t)(n_in + 2),
               .n_tensors = (uint8_t)n_in,
               .n_outputs = (int8_t)n_out,
               .args_size = sizeof(Args)};
  return c;
}

/* All signatures as "S0 B>P; ...", or the error; frees the case. */
static Str answer(Case *c) {
  Str s = {0};
  char buf[SBP_TEXT_MAX];
  SbpAsk q = {.op = &c->op,
              .args = &c->args,
              .in = c->in,
              .out = c->out,
              .n_in = c->n_in,
              .n_out = c->n_out,
              .parts = c->parts};
  if (sbp_signatures(&q)) str_puts(&s, err_text());
  else
    for (int i = 0; i < sbp_count(&q); i++) {
      const Sbp *row = sbp_row(&q, i);
      if (i) str_puts(&s, "; ");
      for (int k = 0; k < c->n_in + c->n_out; k++)
        str_printf(&s, "%s%s", k == c->n_in ? ">" : k ? " " : "", sbp_text(row[k], buf));
    }
  sbp_free(&q);
  free(c);
  return s;
}

static void expect(const char *sbp, const char *linear, const char *const *in, int n_in,
                   const char *const *out, int n_out, const char *want) {
  Str s = answer(make(sbp, linear, in, n_in, out, n_out));
  CHECK(!strcmp(s.text, want), "\"%s\" %s: %s\n  want %s", sbp, linear ? linear : "", s.text, want);
  str_free(&s);
}

#define TENSORS(...)                  \
  (const char *const[]){__VA_ARGS__}, \
      (int)(sizeof(const char *const[]){__VA_ARGS__} / sizeof(char *))

static void elementwise(void) {
  expect("...", NULL, TENSORS("4,6"), TENSORS("4,6"), "B>B; S0>S0; S1>S1");
  expect("..., ...", NULL, TENSORS("4,6", "4,6"), TENSORS("4,6"), "B B>B; S0 S0>S0; S1 S1>S1");
  expect("...", NULL, TENSORS(""), TENSORS(""), "B>B");
}

static void broadcasting(void) {
  expect("..., ...", NULL, TENSORS("4,1", "6"), TENSORS("4,6"), "B B>B; S0 B>S0; B S0>S1");
  expect("..., ...", NULL, TENSORS("4,6", "n"), TENSORS("4,6"), "B B>B; S0 B>S0; S1 B>S1");
  expect("..., ...", NULL, TENSORS("2,1,6", "4,1"), TENSORS("2,4,6"),
         "B B>B; S0 B>S0; B S0>S1; S2 B>S2");
}

static void contraction_gives_partial_sums(void) {
  expect("... m k, ... k n -> ... m n", NULL, TENSORS("4,6", "6,8"), TENSORS("4,8"),
         "B B>B; S1 S0>P; S0 B>S0; B S1>S1");
  expect("... m k, ... k n -> ... m n", NULL, TENSORS("2,4,6", "6,8"), TENSORS("2,4,8"),
         "B B>B; S2 S0>P; S1 B>S1; B S1>S2; S0 B>S0");
  expect("k, k ->", NULL, TENSORS("6", "6"), TENSORS(""), "B B>B; S0 S0>P");
}

static void an_added_input_is_partial_where_the_output_is(void) {
  expect("... k, n k, + n -> ... n", NULL, TENSORS("4,6", "8,6", "8"), TENSORS("4,8"),
         "B B B>B; S1 S1 P>P; B S0 S0>S1; S0 B B>S0");
  expect("... k, n k, + n -> ... n", "a|b", TENSORS("6", "8,6", "8"), TENSORS("8"),
         "B B B>B; S0 S1 P>P; B S0 S0>S0; P B P>P; B P P>P");
  expect("... k, n k, + n -> ... n", "a|b", TENSORS("6", "8,6", NULL), TENSORS("8"),
         "B B B>B; S0 S1 B>P; B S0 B>S0; P B B>P; B P B>P");
}

static void capitals_stay_whole(void) {
  expect("... N", NULL, TENSORS("4,6"), TENSORS("4,6"), "B>B; S0>S0");
  expect("n C h, o C h -> n o", NULL, TENSORS("4,3,2", "5,3,2"), TENSORS("4,5"),
         "B B>B; S2 S2>P; S0 B>S0; B S0>S1");
}

static void dots_with_a_mark_stay_whole(void) {
  expect("n c ...!", NULL, TENSORS("4,3,2,2"), TENSORS("4,3,2,2"), "B>B; S1>S1; S0>S0");
  expect("N c ...!, c -> N c ...!, c", NULL, TENSORS("4,3,2", "3"),
         (const char *const[]){"4,3,2", "3"}, 2, "B B>B B; S1 S0>S1 S0");
}

static void several_outputs(void) {
  expect("n k -> n k, n, k", NULL, TENSORS("4,6"), (const char *const[]){"4,6", "4"}, 2,
         "made_up: the SBP rule \"n k -> n k, n, k\" does not fit the tensors");
  expect("n k -> n k, n", NULL, TENSORS("4,6"), (const char *const[]){"4,6", "4"}, 2,
         "B>B B; S1>S1 P; S0>S0 S0");
  expect("n k", NULL, TENSORS("4,6"), (const char *const[]){"4,6", "4,6"}, 2,
         "B>B B; S1>S1 S1; S0>S0 S0");
}

static void linearity(void) {
  expect("..., ...", "a+b", TENSORS("1", "1"), TENSORS("1"), "B B>B; P P>P");
  expect("..., ...", "a|b", TENSORS("1", "1"), TENSORS("1"), "B B>B; P B>P; B P>P");
  expect("..., ...", "a", TENSORS("1", "1"), TENSORS("1"), "B B>B; P B>P");
  expect("..., ...", "a+b", TENSORS("1", "n"), TENSORS("1"),
         "B B>B"); /* a number is on every rank: it would count twice */
  expect("..., ...", "a|b", TENSORS("1", "n"), TENSORS("1"), "B B>B; P B>P");
}

static void small_sizes_are_not_split(void) {
  const char *const in[] = {"3,5,1,0"};
  Case *c = make("...", NULL, in, 1, in, 1);
  c->parts = 4;
  Str s = answer(c);
  CHECK(!strcmp(s.text, "B>B; S1>S1"), "%s", s.text);
  str_free(&s);
}

static void what_is_written_cannot_stay_whole(void) {
  const char *const in[] = {"4", "6"}, *const out[] = {"4,6"};
  Case *c = make("m, n -> m n", NULL, in, 2, out, 1);
  c->params[0].mutated = true;
  c->op.n_mutated = 1;
  Str s = answer(c);
  CHECK(!strcmp(s.text, "B B>B; S0 B>S0"), "%s", s.text);
  str_free(&s);
}

static void texts_that_do_not_fit_are_errors(void) {
  static const char *const texts[] = {
      "m",     "m n k", "m n, k", "m n -> m n, k", "m n -> m ... n ...",
      "m n, ", "m + n", "m n ->", "m ? n"};
  for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
    const char *const in[] = {"4,6"};
    Str s = answer(make(texts[i], NULL, in, 1, in, 1));
    bool fewer = !strcmp(texts[i], "m n k"); /* a tensor with fewer dims lacks the first */
    CHECK(!!strstr(s.text, "does not fit") == !fewer, "\"%s\": %s", texts[i], s.text);
    str_free(&s);
  }
  const char *const in[] = {"4,6", "5,6"}, *const out[] = {"4,6"};
  Str s = answer(make("m n, m n", NULL, in, 2, out, 1));
  CHECK(strstr(s.text, "does not fit"), "sizes that differ: %s", s.text);
  str_free(&s);
}

static void nothing_declared_is_all_whole(void) {
  expect(NULL, NULL, TENSORS("4,6"), TENSORS("4,6"), "B>B");
  expect("B", NULL, TENSORS("4,6"), TENSORS("4,6"), "B>B");
}

static Str with_rule(int (*rule)(SbpAsk *), const char *in, const char *out, int64_t dim) {
  Case *c = make(NULL, NULL, &in, 1, &out, 1);
  c->spec.sbp_rule = rule;
  c->args.dim = dim;
  return answer(c);
}

static void rules_by_dim(void) {
  static const struct {
    int (*rule)(SbpAsk *);
    const char *in, *out;
    int64_t dim;
    const char *want;
  } rows[] = {
      {sbp_all_but_dim, "4,6,8", "4,6,8", -1, "B>B; S0>S0; S1>S1"},
      {sbp_all_but_dim, "4,6,8", "4,6,8", 0, "B>B; S1>S1; S2>S2"},
      {sbp_all_but_dim, "4,6,8", "4,3,8", 1, "B>B; S0>S0; S2>S2"},
      {sbp_reduce_sum, "4,6,8", "4,8", 1, "B>B; S0>S0; S1>P; S2>S1"},
      {sbp_reduce_sum, "4,6,8", "4,1,8", 1, "B>B; S0>S0; S1>P; S2>S2"},
      {sbp_reduce_max, "4,6", "6", 0, "B>B; S0>Pmax; S1>S0"},
      {sbp_reduce_min, "4,6", "6", 0, "B>B; S0>Pmin; S1>S0"},
      {sbp_reduce, "4,6", "4", -1, "B>B; S0>S0"},
  };
  for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
    Str s = with_rule(rows[i].rule, rows[i].in, rows[i].out, rows[i].dim);
    CHECK(!strcmp(s.text, rows[i].want), "row %d: %s\n  want %s", (int)i, s.text, rows[i].want);
    str_free(&s);
  }
}

static void localizing_sets_the_size(void) {
  const char *const shape[] = {"4,6"};
  Case *c = make("...", NULL, shape, 1, shape, 1);
  c->args.size = (IntList){1, {-1}};
  Meta part = meta_of("2,6");
  sbp_localize(&c->op, &c->args, &part);
  CHECK(c->args.size.n == 2 && c->args.size.v[0] == 2 && c->args.size.v[1] == 6,
        "size has %d entries", (int)c->args.size.n);
  free(c);
}

int main(void) {
  RUN(elementwise);
  RUN(broadcasting);
  RUN(contraction_gives_partial_sums);
  RUN(an_added_input_is_partial_where_the_output_is);
  RUN(capitals_stay_whole);
  RUN(dots_with_a_mark_stay_whole);
  RUN(several_outputs);
  RUN(linearity);
  RUN(small_sizes_are_not_split);
  RUN(what_is_written_cannot_stay_whole);
  RUN(texts_that_do_not_fit_are_errors);
  RUN(nothing_declared_is_all_whole);
  RUN(rules_by_dim);
  RUN(localizing_sets_the_size);
  return check_end();
}
