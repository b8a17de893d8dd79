/* Reads the text of a graph back: see text.c for what it looks like.
 *
 * The text may come from anywhere. Each line is checked by itself and as a node (see verify.c)
 * before the next is read, so that errors name their line; nothing is trusted to be small, to end,
 * or to be what a name promises. Names of values are numbers in order, %0 first, so a value that is
 * used stands above. Empty lines, and lines of a comment alone, are skipped. */
#define _GNU_SOURCE /* strtod_l */
#include <ctype.h>
#include <errno.h>
#include <locale.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "graph_int.h"
#include "op_program.h"
#include "slots.h"

enum { WORD_MAX = 64, COUNT_MAX = 1 << 20 };

typedef struct Reader {
  Graph *g;
  const char *at; /* what is left of the text */
  int line;
  locale_t plain; /* in which numbers are read */
  Checker checker;
  LIST(GraphValue *) values; /* by id */
  LIST(GraphValue *) in;     /* of the op that is read */
} Reader;

static void fail(Reader *r, const char *format, ...)
    __attribute__((noreturn, format(printf, 2, 3)));
static void fail(Reader *r, const char *format, ...) {
  char text[512];
  va_list args;
  va_start(args, format);
  vsnprintf(text, sizeof text, format, args);
  va_end(args);
  arena_throw(&r->g->arena, err_set(MF_EINVAL, "graph text, line %d: %s", r->line, text));
}

/* -- Words and numbers ------------------------------------------------------------------------- */

static void skip_blanks(Reader *r) {
  while (*r->at == ' ' || *r->at == '\t') r->at++;
}

static bool accept(Reader *r, const char *text) {
  skip_blanks(r);
  size_t n = strlen(text);
  if (strncmp(r->at, text, n)) return false;
  r->at += n;
  return true;
}

/* The next few characters, for an error. */
static const char *ahead(Reader *r, char *buf) {
  skip_blanks(r);
  int n = (int)strcspn(r->at, "\n");
  snprintf(buf, WORD_MAX, n ? "'%.*s'" : "the end of the line", n > 20 ? 20 : n, r->at);
  return buf;
}

static void expect(Reader *r, const char *text) {
  char buf[WORD_MAX];
  if (!accept(r, text)) fail(r, "'%s' is expected, not %s", text, ahead(r, buf));
}

static bool is_letter(char c) {
  return isalnum((unsigned char)c) || c == '_' || c == '.' || c == '-' || c == '/';
}

static bool accept_word(Reader *r, char *word) {
  skip_blanks(r);
  int n = 0;
  while (is_letter(r->at[n])) n++;
  if (n == 0) return false;
  if (n >= WORD_MAX) fail(r, "a word of %d letters", n);
  memcpy(word, r->at, (size_t)n);
  word[n] = 0;
  r->at += n;
  return true;
}

static void read_word(Reader *r, char *word, const char *what) {
  char buf[WORD_MAX];
  if (!accept_word(r, word)) fail(r, "%s is expected, not %s", what, ahead(r, buf));
}

/* Whether the word `text` comes next, and not just one that begins so. */
static bool accept_keyword(Reader *r, const char *text) {
  const char *before = r->at;
  if (accept(r, text) && !is_letter(*r->at)) return true;
  r->at = before;
  return false;
}

/* What str_quote printed, behind the opening quote. */
static const char *read_quoted(Reader *r) {
  size_t n = strcspn(r->at, "\n"), k = 0;
  char *text = arena_alloc(&r->g->arena, n + 1);
  while (*r->at != '"') {
    char c = *r->at++;
    if (c == '\\') {
      c = *r->at++;
      if (c == 'n') c = '\n';
      else if (c != '"' && c != '\\') fail(r, "an escape that there is not");
    } else if (!c || c == '\n') {
      r->at--;
      fail(r, "a quoted text does not end");
    }
    text[k++] = c;
  }
  r->at++;
  return text;
}

static const char *read_name(Reader *r) {
  char buf[WORD_MAX];
  skip_blanks(r);
  if (accept(r, "\"")) return read_quoted(r);
  size_t n = 0;
  while (is_letter(r->at[n])) n++;
  if (!n) fail(r, "a name is expected, not %s", ahead(r, buf));
  char *text = arena_alloc(&r->g->arena, n + 1);
  memcpy(text, r->at, n);
  r->at += n;
  return text;
}

static int64_t read_int(Reader *r) {
  char buf[WORD_MAX], *end;
  skip_blanks(r);
  bool digits = isdigit((unsigned char)r->at[*r->at == '-']);
  errno = 0;
  long long v = digits ? strtoll(r->at, &end, 10) : 0;
  if (!digits) fail(r, "a whole number is expected, not %s", ahead(r, buf));
  if (errno) fail(r, "a whole number is too large");
  r->at = end;
  return v;
}

static int read_count(Reader *r, const char *what, int64_t limit) {
  int64_t n = read_int(r);
  if (n < 0 || n >= limit)
    fail(r, "%s %lld; legal are 0 to %lld", what, (long long)n, (long long)limit - 1);
  return (int)n;
}

static double read_double(Reader *r) {
  char buf[WORD_MAX], *end;
  skip_blanks(r);
  const char *p = r->at + (*r->at == '-');
  bool number = isdigit((unsigned char)*p) || !strncmp(p, "inf", 3) || !strncmp(p, "nan", 3);
  if (!number) fail(r, "a number is expected, not %s", ahead(r, buf));
  double v = strtod_l(r->at, &end, r->plain);
  r->at = end;
  return v;
}

static int64_t read_ints(Reader *r, int64_t *v, int limit) {
  int n = 0;
  expect(r, "[");
  if (accept(r, "]")) return 0;
  do {
    if (n == limit) fail(r, "a list of more than %d numbers", limit);
    v[n++] = read_int(r);
  } while (accept(r, ","));
  expect(r, "]");
  return n;
}

/* -- Values ------------------------------------------------------------------------------------ */

static GraphValue *read_value(Reader *r) {
  expect(r, "%");
  int64_t k = read_int(r);
  if (k < 0 || k >= (int64_t)r->values.n) fail(r, "%%%lld is not made above", (long long)k);
  return r->values.at[k];
}

static GraphValue *read_value_or_none(Reader *r) {
  return accept_keyword(r, "none") ? NULL : read_value(r);
}

static DType read_dtype(Reader *r) {
  char word[WORD_MAX];
  read_word(r, word, "a dtype");
  int t = dtype_parse(word);
  if (t == DTYPE_NONE) fail(r, "%s is no dtype", word);
  return (DType)t;
}

static int read_device(Reader *r) {
  char word[WORD_MAX];
  read_word(r, word, "a device");
  for (int d = 0; d < DEVICE_SLOTS; d++)
    if (!strcmp(word, device_slot_names[d])) return d;
  fail(r, "%s is no device", word);
}

/* "4 x": that many times in a step. */
static int read_times(Reader *r) {
  skip_blanks(r);
  if (!isdigit((unsigned char)*r->at)) return 1;
  int times = read_count(r, "times", COUNT_MAX);
  expect(r, "x ");
  return times;
}

static void read_type(Reader *r, GraphValue *v) {
  int64_t shape[MF_MAX_DIMS];
  int ndim = 0, times = read_times(r);
  if (v->output && times != v->node->times) fail(r, "outputs of one op that do not go together");
  v->node->times = times;
  DType t = read_dtype(r);
  v->number = *r->at != '[';
  if (!v->number) ndim = (int)read_ints(r, shape, MF_MAX_DIMS);
  int device = accept(r, "@") ? read_device(r) : DEVICE_CPU;
  if (shape_check("shape", ndim, shape, t)) fail(r, "%s", err_text());
  graph_describe(r->g, v, t, device, ndim, shape);
}

/* -- Ops --------------------------------------------------------------------------------------- */

static void read_list(Reader *r, int64_t *count) {
  size_t before = r->in.n;
  expect(r, "[");
  if (!accept(r, "]")) {
    do {
      if (r->in.n >= COUNT_MAX) fail(r, "too many inputs");
      GraphValue *v = read_value_or_none(r);
      *list_add(&r->g->arena, &r->in) = v;
    } while (accept(r, ","));
    expect(r, "]");
  }
  *count = (int64_t)(r->in.n - before);
}

/* Whether an input comes next, and no argument by name. */
static bool is_input(Reader *r) {
  skip_blanks(r);
  if (*r->at == '%' || *r->at == '[') return true;
  const char *before = r->at;
  bool none = accept_keyword(r, "none");
  r->at = before;
  return none;
}

/* The inputs, as far as they are written; absent ones behind them are NULL, or empty lists. Whether
 * arguments follow; if not, the closing parenthesis is read. */
static bool read_inputs(Reader *r, const Op *op, char *args) {
  int i = 0;
  r->in.n = 0;
  bool empty = accept(r, ")"), more = !empty && !is_input(r);
  if (!empty && !more) {
    do {
      if ((more = !is_input(r))) break;
      while (i < op->n_params && op->params[i].kind != PARAM_TENSOR) i++;
      if (i == op->n_params) fail(r, "%s has not so many inputs", op->name);
      const Param *p = &op->params[i++];
      if (p->list) {
        read_list(r, (int64_t *)(void *)(args + p->offset));
      } else {
        GraphValue *v = read_value_or_none(r);
        *list_add(&r->g->arena, &r->in) = v;
      }
    } while (accept(r, ","));
    if (!more) expect(r, ")");
  }
  for (; i < op->n_params; i++) {
    const Param *p = &op->params[i];
    if (p->kind != PARAM_TENSOR) continue;
    if (p->list) *(int64_t *)(void *)(args + p->offset) = 0;
    else *list_add(&r->g->arena, &r->in) = NULL;
  }
  return more;
}

static int64_t read_choice(Reader *r, const char *choices) {
  char word[WORD_MAX];
  read_word(r, word, "a choice");
  size_t n = strlen(word);
  int64_t k = 0;
  for (const char *p = choices; *p; k++) {
    size_t length = strcspn(p, "|");
    if (length == n && !memcmp(p, word, n)) return k;
    p += length + (p[length] == '|');
  }
  fail(r, "'%s' is none of %s", word, choices);
}

static bool read_bool(Reader *r) {
  if (accept_keyword(r, "true")) return true;
  if (accept_keyword(r, "false")) return false;
  fail(r, "true or false is expected");
}

static void read_list_argument(Reader *r, const Param *p, char *at) {
  if (!p->fixed) {
    IntList *list = (IntList *)(void *)at;
    list->n = read_ints(r, list->v, (int)(sizeof list->v / sizeof *list->v));
  } else if (read_ints(r, (int64_t *)(void *)at, p->fixed) != p->fixed) {
    fail(r, "%s has %d entries", p->name, p->fixed);
  }
}

static void read_generator(Reader *r, GraphNode *n, char *at) {
  RngKey *key = (RngKey *)(void *)at;
  int64_t v = read_int(r);
  if (accept(r, ":")) {
    if (v < 0 || v >= r->g->n_generators) fail(r, "there is no generator %lld", (long long)v);
    n->generator = (int)v;
    v = read_int(r);
  }
  if (v < 0) fail(r, "stream numbers are not negative");
  if (accept_keyword(r, "along")) n->along = (int8_t)read_count(r, "dim", MF_MAX_DIMS);
  *key = (RngKey){0, (uint64_t)v};
}

static Program *read_program(Reader *r) {
  Scan s = scan_begin(&r->g->arena, "graph text", r->at);
  s.line = r->line;
  Program *p = op_program_scan(&s);
  r->at = s.at;
  return p;
}

static void read_argument(Reader *r, GraphNode *n, const Param *p) {
  char *at = (char *)n->args + p->offset;
  bool none = accept_keyword(r, "none");
  if (none && !p->optional) fail(r, "%s cannot be none", p->name);
  if (p->has_offset) *((bool *)n->args + p->has_offset) = !none;
  if (none) {
    if (p->kind == PARAM_DTYPE || p->kind == PARAM_DEVICE) *(int64_t *)(void *)at = -1;
    return;
  }
  switch ((ParamKind)p->kind) {
    case PARAM_TENSOR: fail(r, "%s stands among the inputs, without a name", p->name);
    case PARAM_INT:
    case PARAM_DIM: *(int64_t *)(void *)at = read_int(r); break;
    case PARAM_FLOAT: *(double *)(void *)at = read_double(r); break;
    case PARAM_BOOL: *(bool *)at = read_bool(r); break;
    case PARAM_INTS: read_list_argument(r, p, at); break;
    case PARAM_CHOICE: *(int64_t *)(void *)at = read_choice(r, p->choices); break;
    case PARAM_DTYPE: *(int64_t *)(void *)at = read_dtype(r); break;
    case PARAM_DEVICE: *(int64_t *)(void *)at = read_device(r); break;
    case PARAM_GENERATOR: read_generator(r, n, at); break;
    case PARAM_PROGRAM: *(Program **)(void *)at = read_program(r); break;
  }
}

/* "@0(": the argument is cell 0; its value follows. */
static bool accept_cell(Reader *r, int *cell) {
  if (!accept(r, "@")) return false;
  *cell = read_count(r, "cell", r->g->n_cells);
  expect(r, "(");
  return true;
}

static void read_arguments(Reader *r, GraphNode *n, bool more) {
  const Op *op = n->op;
  bool given[OP_MAX_PARAMS] = {false};
  GraphPatch patches[OP_MAX_PARAMS];
  while (more) {
    char name[WORD_MAX];
    int i = 0, cell = NO_CELL;
    read_word(r, name, "an argument");
    while (i < op->n_params && strcmp(op->params[i].name, name)) i++;
    if (i == op->n_params) fail(r, "%s has no argument %s", op->name, name);
    if (given[i]) fail(r, "%s is given twice", name);
    given[i] = true;
    expect(r, "=");
    bool is_cell = accept_cell(r, &cell);
    read_argument(r, n, &op->params[i]);
    if (is_cell) {
      expect(r, ")");
      patches[n->n_patches++] = (GraphPatch){i, cell};
    }
    more = accept(r, ",");
    if (!more) expect(r, ")");
  }
  n->patches = arena_copy(&r->g->arena, patches, sizeof *patches * (size_t)n->n_patches);
  for (int i = 0; i < op->n_params; i++) {
    const Param *p = &op->params[i];
    bool needed = p->kind != PARAM_TENSOR && !p->fallback && !p->optional && !given[i];
    if (needed) fail(r, "%s needs %s", op->name, p->name);
  }
}

/* Which inputs the signature says are written. */
static void find_written(Reader *r, GraphNode *n) {
  if (!n->op->n_mutated) return;
  int *written = arena_array(&r->g->arena, int, n->n_in), position = 0;
  n->written = written;
  for (int i = 0; i < n->op->n_params; i++) {
    int first, count;
    if (n->op->params[i].kind != PARAM_TENSOR) continue;
    op_inputs_of_param(n->op, n->args, position++, &first, &count);
    for (int k = first; n->op->params[i].mutated && k < first + count; k++)
      if (n->in[k]) written[n->n_written++] = k;
  }
}

static GraphNode *read_op(Reader *r, const char *name, int n_out) {
  const Op *op = op_find(name);
  union {
    char bytes[OP_MAX_ARGS];
    double align;
  } args;
  if (!op) fail(r, "there is no op %s", name);
  expect(r, "(");
  memcpy(args.bytes, op->defaults, op->args_size);
  bool more = read_inputs(r, op, args.bytes);
  GraphNode *n = graph_add_op(r->g, NULL, op, args.bytes, (int)r->in.n, r->in.at, n_out);
  read_arguments(r, n, more);
  find_written(r, n);
  return n;
}

/* -- Ranks ------------------------------------------------------------------------------------- */

static Scan begin_scan(Reader *r) {
  Scan s = scan_begin(&r->g->arena, "graph text", r->at);
  s.line = r->line;
  return s;
}

/* The lines behind the head. */
static void read_ranks(Reader *r) {
  Scan s = begin_scan(r);
  while (graph_scan_ranks(&s, r->g)) scan_end_line(&s);
  r->at = s.at;
  r->line = s.line;
}

static void read_lies(Reader *r, GraphValue *v) {
  Scan s = begin_scan(r);
  graph_scan_lies(&s, r->g, v);
  r->at = s.at;
}

static void read_wants(Reader *r, GraphNode *n) {
  Scan s = begin_scan(r);
  graph_scan_wants(&s, r->g, n);
  r->at = s.at;
}

/* -- Lines ------------------------------------------------------------------------------------- */

static void read_where(Reader *r, GraphNode *n) {
  if (!accept(r, "#")) return;
  if (*r->at == ' ') r->at++;
  if (*r->at == '"') {
    r->at++;
    const char *text = read_quoted(r);
    if (n) n->where = text;
    return;
  }
  size_t length = strcspn(r->at, "\n");
  char *text = arena_alloc(&r->g->arena, length + 1);
  memcpy(text, r->at, length);
  r->at += length;
  if (n && length) n->where = text;
}

/* "{remat 1, kept}" */
static void read_segment(Reader *r, GraphNode *n) {
  if (!n || n->kind != GRAPH_OP || !accept(r, "{")) return;
  expect(r, "remat");
  n->segment = read_count(r, "segment", COUNT_MAX);
  if (!n->segment) fail(r, "segments count from 1");
  r->g->segments = true;
  n->kept = accept(r, ",");
  if (n->kept) expect(r, "kept");
  expect(r, "}");
}

static void end_line(Reader *r, GraphNode *n) {
  char buf[WORD_MAX];
  read_segment(r, n);
  read_where(r, n);
  skip_blanks(r);
  if (*r->at && *r->at != '\n') fail(r, "the line should end before %s", ahead(r, buf));
  if (n && graph_check_node(&r->checker, r->g, n)) fail(r, "%s", err_text());
  if (!*r->at) return;
  r->at++;
  r->line++;
}

static GraphNode *read_number(Reader *r) {
  GraphNode *n = graph_add(r->g, GRAPH_NUMBER, 0, 1);
  bool is_cell = accept_cell(r, &n->cell);
  n->value = read_double(r);
  if (is_cell) expect(r, ")");
  return n;
}

static void read_strides(Reader *r, GraphNode *n) {
  const GraphValue *v = &n->out[0];
  Meta *m = arena_new(&r->g->arena, Meta);
  n->meta = m;
  *m = (Meta){.ndim = v->ndim, .dtype = v->dtype, .device = v->device, .number = v->number};
  memcpy(m->shape, v->shape, sizeof *m->shape * (size_t)v->ndim);
  shape_contiguous(m->ndim, m->shape, m->stride);
  if (accept_keyword(r, "strides") && read_ints(r, m->stride, MF_MAX_DIMS) != m->ndim)
    fail(r, "there are %d dims, and not as many strides", m->ndim);
}

/* %3, %4 = maker: types. */
static void read_definition(Reader *r) {
  char word[WORD_MAX];
  int64_t first = (int64_t)r->values.n, n_out = 0;
  while (accept(r, "%")) {
    int64_t k = read_int(r);
    if (k != first + n_out)
      fail(r, "%%%lld is made where %%%lld should be", (long long)k, (long long)(first + n_out));
    if (++n_out >= COUNT_MAX) fail(r, "too many outputs");
    if (!accept(r, ",")) break;
  }
  if (n_out) expect(r, "=");
  read_word(r, word, "an op");
  bool capture = !strcmp(word, "capture"), port = capture || !strcmp(word, "input");
  bool number = !strcmp(word, "number");
  GraphNode *n = NULL;
  if ((port || number) && n_out != 1) fail(r, "%s makes one value", word);
  if (port) {
    n = graph_add(r->g, capture ? GRAPH_CAPTURE : GRAPH_INPUT, 0, 1);
    n->name = read_name(r);
  } else {
    n = number ? read_number(r) : read_op(r, word, (int)n_out);
  }
  for (int k = 0; k < n_out; k++) {
    expect(r, k ? "," : ":");
    read_type(r, &n->out[k]);
    read_lies(r, &n->out[k]);
    *list_add(&r->g->arena, &r->values) = &n->out[k];
  }
  if (!port && !number) read_wants(r, n);
  if (!port && !number) graph_keep_cuts(r->g, n);
  if (port) read_strides(r, n);
  end_line(r, n);
}

static void read_write(Reader *r) {
  GraphNode *n = graph_add(r->g, GRAPH_WRITE, 1, 0);
  n->target = read_value(r)->node;
  n->times = n->target->times;
  expect(r, "=");
  n->in[0] = read_value(r);
  end_line(r, n);
}

static void read_return(Reader *r) {
  skip_blanks(r);
  if (*r->at == '%') {
    do *list_add(&r->g->arena, &r->g->results) = read_value(r);
    while (accept(r, ","));
  }
  end_line(r, NULL);
}

static void skip_empty(Reader *r) {
  for (;;) {
    skip_blanks(r);
    if (*r->at != '\n' && *r->at != '#') return;
    end_line(r, NULL);
  }
}

static void read_graph(void *ud) {
  Reader *r = ud;
  char buf[WORD_MAX];
  skip_empty(r);
  if (!accept_keyword(r, "graph")) fail(r, "'graph' is expected, not %s", ahead(r, buf));
  r->g->name = read_name(r);
  if (accept_keyword(r, "cells")) r->g->n_cells = read_count(r, "cells", COUNT_MAX);
  if (accept_keyword(r, "generators")) r->g->n_generators = read_count(r, "generators", COUNT_MAX);
  if (accept_keyword(r, "times")) r->g->times = read_count(r, "times", COUNT_MAX);
  end_line(r, NULL);
  read_ranks(r);
  for (;;) {
    skip_empty(r);
    if (!*r->at) fail(r, "'return' is missing");
    if (accept_keyword(r, "return")) break;
    if (accept_keyword(r, "write")) read_write(r);
    else read_definition(r);
  }
  read_return(r);
  skip_empty(r);
  if (*r->at) fail(r, "'return' ends a graph, but there is %s", ahead(r, buf));
}

Graph *graph_parse(const char *text) {
  Graph *g = graph_create("");
  if (!g) return NULL;
  Reader r = {.g = g, .at = text, .line = 1, .checker.settle = true};
  r.plain = newlocale(LC_ALL_MASK, "C", (locale_t)0);
  int rc = r.plain ? arena_protect(&g->arena, read_graph, &r) : MF_ENOMEM;
  if (!r.plain) err_set(MF_ENOMEM, "out of memory");
  else freelocale(r.plain);
  graph_check_free(&r.checker);
  if (!rc) rc = graph_verify(g, "reading");
  if (!rc) return g;
  graph_destroy(g);
  return NULL;
}
