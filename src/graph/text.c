/* A graph as text: one line a node, the same for equal graphs.
 *
 *   graph step cells 1
 *   %0 = input x0: float32[6, 9]
 *   %1 = capture c0: float32[4, 9] strides [1, 4]
 *   %2 = number 2: int64
 *   %3 = number @0(0.1): float64
 *   %4 = linear(%0, %1): float32[6, 4]  # train.lua:12
 *   %5 = sum(%4, dim=[1]): float32[6]  # train.lua:13
 *   %6 = fill_(%1, value=@0(0.1)): float32[4, 9]
 *   write %1 = %6
 *   return %5
 *
 * Inputs of an op come first, in the order of its signature: a list in brackets, `none` where one
 * is absent and a later one is not. Then its arguments by name, only those that differ from the
 * defaults, required ones always. Cell 0 is written @0, with the value that it had when the graph
 * was made in parentheses. A value's type is its dtype and shape, and @device where that is not
 * the cpu; a plain number has no shape. Ports that are not contiguous have their strides. Behind
 * # is the user's line, before it in braces the segment between checkpoints, `{remat 1}`, and
 * whether the value is needed behind that, `{remat 1, kept}`. Names that are no plain words, and
 * lines with control characters, are quoted.
 *
 * With micro-batches the head says how many, and so does the type of what each of them has:
 *
 *   graph step times 4
 *   %0 = input x0: float32[8, 9]
 *   %1 = micro_unpack(%0, n=4): 4 x float32[2, 9]
 *   %2 = dropout(%1, generator=0 along 0): 4 x float32[2, 9]
 *   %3 = micro_pack(%2, n=4): float32[8, 9]
 *   return %3
 *
 * Of how values lie on several ranks ranks.c tells. */
#include <math.h>
#include <string.h>

#include "graph_int.h"
#include "op_program.h"
#include "slots.h"

const GraphPatch *graph_patch_of(const GraphNode *n, int param) {
  for (int k = 0; k < n->n_patches; k++)
    if (n->patches[k].param == param) return &n->patches[k];
  return NULL;
}

/* -- Words and numbers ------------------------------------------------------------------------- */

static bool is_word(const char *text) {
  static const char plain[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-/";
  return *text && !text[strspn(text, plain)];
}

static void put_name(Str *s, const char *text) {
  if (is_word(text)) str_puts(s, text);
  else str_quote(s, text);
}

static void put_where(Str *s, const char *where) {
  if (!where || !*where) return;
  bool plain = *where != '"' && *where != ' ';
  for (const char *p = where; *p && plain; p++) plain = (unsigned char)*p >= 32 && *p != 127;
  str_puts(s, "  # ");
  if (plain) str_puts(s, where);
  else str_quote(s, where);
}

static void put_double(Str *s, double v) {
  if (isnan(v) && signbit(v)) str_puts(s, "-");
  str_double(s, v);
}

static void put_ints(Str *s, int64_t n, const int64_t *v) {
  str_puts(s, "[");
  for (int64_t k = 0; k < n; k++) str_printf(s, "%s%lld", k ? ", " : "", (long long)v[k]);
  str_puts(s, "]");
}

/* -- Arguments --------------------------------------------------------------------------------- */

static bool has(const Param *p, const void *args) {
  return !p->has_offset || *(const bool *)((const char *)args + p->has_offset);
}

static bool same_value(const Param *p, const void *a, const void *b) {
  const void *x = (const char *)a + p->offset, *y = (const char *)b + p->offset;
  if (has(p, a) != has(p, b)) return false;
  if (!has(p, a)) return true;
  switch ((ParamKind)p->kind) {
    case PARAM_TENSOR: return true;
    case PARAM_BOOL: return *(const bool *)x == *(const bool *)y;
    case PARAM_GENERATOR: return false; /* the defaults have none */
    case PARAM_INTS: {
      const IntList *l = x, *m = y;
      if (p->fixed) return !memcmp(x, y, sizeof(int64_t) * p->fixed);
      return l->n == m->n && !memcmp(l->v, m->v, sizeof(int64_t) * (size_t)l->n);
    }
    default: return !memcmp(x, y, 8);
  }
}

/* The k-th of "none|mean|sum". */
static void put_choice(Str *s, const char *choices, int64_t k) {
  while (k-- > 0 && strchr(choices, '|')) choices = strchr(choices, '|') + 1;
  str_add(s, choices, strcspn(choices, "|"));
}

static void put_value(Str *s, const GraphNode *n, const Param *p) {
  const void *at = (const char *)n->args + p->offset;
  if (!has(p, n->args)) {
    str_puts(s, "none");
    return;
  }
  switch ((ParamKind)p->kind) {
    case PARAM_TENSOR: break;
    case PARAM_FLOAT: put_double(s, *(const double *)at); break;
    case PARAM_BOOL: str_puts(s, *(const bool *)at ? "true" : "false"); break;
    case PARAM_INTS:
      if (p->fixed) put_ints(s, p->fixed, at);
      else put_ints(s, ((const IntList *)at)->n, ((const IntList *)at)->v);
      break;
    case PARAM_CHOICE: put_choice(s, p->choices, *(const int64_t *)at); break;
    case PARAM_DTYPE: {
      int64_t t = *(const int64_t *)at;
      str_puts(s, t < 0 ? "none" : dtype_name((DType)t));
      break;
    }
    case PARAM_DEVICE: {
      int64_t d = *(const int64_t *)at;
      str_puts(s, d < 0 ? "none" : device_slot_names[d]);
      break;
    }
    case PARAM_GENERATOR: {
      const RngKey *key = at;
      if (n->generator) str_printf(s, "%d:", n->generator);
      str_printf(s, "%llu", (unsigned long long)key->stream);
      if (n->along >= 0) str_printf(s, " along %d", n->along);
      break;
    }
    case PARAM_PROGRAM: op_program_print(*(Program *const *)at, s); break;
    case PARAM_INT:
    case PARAM_DIM: str_printf(s, "%lld", (long long)*(const int64_t *)at); break;
  }
}

static void put_ref(Str *s, const GraphValue *v) {
  if (v) str_printf(s, "%%%lld", (long long)v->id);
  else str_puts(s, "none");
}

/* The tensor params, without absent ones at the end; whether there was one. */
static bool put_inputs(Str *s, const GraphNode *n) {
  int last = -1, first, count, position = 0;
  for (int i = 0; i < n->op->n_params; i++) {
    if (n->op->params[i].kind != PARAM_TENSOR) continue;
    op_inputs_of_param(n->op, n->args, position, &first, &count);
    if (n->op->params[i].list || n->in[first]) last = position;
    position++;
  }
  position = 0;
  for (int i = 0; i < n->op->n_params && position <= last; i++) {
    if (n->op->params[i].kind != PARAM_TENSOR) continue;
    op_inputs_of_param(n->op, n->args, position, &first, &count);
    str_puts(s, position++ ? ", " : "");
    if (n->op->params[i].list) str_puts(s, "[");
    for (int k = first; k < first + count; k++) {
      if (k > first) str_puts(s, ", ");
      put_ref(s, n->in[k]);
    }
    if (n->op->params[i].list) str_puts(s, "]");
  }
  return last >= 0;
}

static void put_op(Str *s, const GraphNode *n) {
  str_printf(s, "%s(", n->op->name);
  bool any = put_inputs(s, n);
  for (int i = 0; i < n->op->n_params; i++) {
    const Param *p = &n->op->params[i];
    const GraphPatch *patch = graph_patch_of(n, i);
    if (p->kind == PARAM_TENSOR) continue;
    if (p->fallback && !patch && same_value(p, n->args, n->op->defaults)) continue;
    str_printf(s, "%s%s=", any ? ", " : "", p->name);
    any = true;
    if (patch) str_printf(s, "@%d(", patch->cell);
    put_value(s, n, p);
    if (patch) str_puts(s, ")");
  }
  str_puts(s, ")");
}

/* -- Lines ------------------------------------------------------------------------------------- */

static void put_type(Str *s, const GraphValue *v) {
  if (v->node->times != 1) str_printf(s, "%d x ", v->node->times);
  str_puts(s, dtype_name((DType)v->dtype));
  if (!v->number) put_ints(s, v->ndim, v->shape);
  if (v->device != DEVICE_CPU) str_printf(s, "@%s", device_slot_names[v->device]);
}

static void put_strides(Str *s, const Meta *m) {
  int64_t usual[MF_MAX_DIMS];
  shape_contiguous(m->ndim, m->shape, usual);
  if (!memcmp(usual, m->stride, sizeof(int64_t) * (size_t)m->ndim)) return;
  str_puts(s, " strides ");
  put_ints(s, m->ndim, m->stride);
}

/* What makes the node's values, without their names and types. */
static void put_maker(Str *s, const GraphNode *n) {
  switch ((GraphKind)n->kind) {
    case GRAPH_OP: put_op(s, n); break;
    case GRAPH_INPUT:
    case GRAPH_CAPTURE:
      str_puts(s, n->kind == GRAPH_INPUT ? "input " : "capture ");
      put_name(s, n->name);
      break;
    case GRAPH_NUMBER:
      str_puts(s, "number ");
      if (n->cell != NO_CELL) str_printf(s, "@%d(", n->cell);
      put_double(s, n->value);
      if (n->cell != NO_CELL) str_puts(s, ")");
      break;
    case GRAPH_WRITE:
      str_puts(s, "write ");
      put_ref(s, &n->target->out[0]);
      str_puts(s, " = ");
      put_ref(s, n->in[0]);
      break;
  }
}

static void put_node(Str *s, const Graph *g, const GraphNode *n) {
  for (int k = 0; k < n->n_out; k++) {
    if (k) str_puts(s, ", ");
    put_ref(s, &n->out[k]);
  }
  if (n->n_out) str_puts(s, " = ");
  put_maker(s, n);
  for (int k = 0; k < n->n_out; k++) {
    str_puts(s, k ? ", " : ": ");
    put_type(s, &n->out[k]);
    graph_put_lies(s, g, &n->out[k]);
  }
  graph_put_wants(s, n);
  if (n->meta) put_strides(s, n->meta);
  if (n->segment) str_printf(s, " {remat %d%s}", n->segment, n->kept ? ", kept" : "");
  put_where(s, n->where);
  str_puts(s, "\n");
}

void graph_print(Graph *g, Str *out) {
  graph_renumber(g);
  str_puts(out, "graph ");
  put_name(out, g->name);
  if (g->n_cells) str_printf(out, " cells %d", g->n_cells);
  if (g->n_generators != 1) str_printf(out, " generators %d", g->n_generators);
  if (g->times != 1) str_printf(out, " times %d", g->times);
  str_puts(out, "\n");
  graph_put_ranks(out, g);
  for (const GraphNode *n = g->first; n; n = n->next) put_node(out, g, n);
  str_puts(out, "return");
  for (size_t i = 0; i < g->results.n; i++) {
    str_puts(out, i ? ", " : " ");
    put_ref(out, g->results.at[i]);
  }
  str_puts(out, "\n");
}

/* -- Graphviz ---------------------------------------------------------------------------------- */

static void put_label(Str *s, const GraphNode *n) {
  Str text = {0};
  if (n->kind == GRAPH_OP) str_puts(&text, n->op->name);
  else put_maker(&text, n);
  str_quote(s, text.text ? text.text : "");
  s->failed |= text.failed;
  str_free(&text);
}

void graph_dot(Graph *g, Str *out) {
  static const char *const looks[] = {
      [GRAPH_OP] = "box",        [GRAPH_INPUT] = "ellipse",  [GRAPH_CAPTURE] = "cylinder",
      [GRAPH_NUMBER] = "circle", [GRAPH_WRITE] = "cylinder",
  };
  graph_renumber(g);
  str_puts(out, "digraph ");
  str_quote(out, g->name);
  str_puts(out, " {\n");
  for (const GraphNode *n = g->first; n; n = n->next) {
    str_printf(out, "  n%lld [shape=%s, label=", (long long)n->id, looks[n->kind]);
    put_label(out, n);
    str_puts(out, "];\n");
    for (int k = 0; k < n->n_in; k++) {
      const GraphValue *v = n->in[k];
      if (!v) continue;
      str_printf(out, "  n%lld -> n%lld [label=\"", (long long)v->node->id, (long long)n->id);
      put_type(out, v);
      str_puts(out, "\"];\n");
    }
  }
  for (size_t i = 0; i < g->results.n; i++)
    str_printf(out, "  n%lld -> \"result %d\";\n", (long long)g->results.at[i]->node->id,
               (int)i + 1);
  str_puts(out, "}\n");
}
