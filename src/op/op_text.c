/* See op_text.h. */
#include "op_text.h"

#include <string.h>

#include "op_program.h"
#include "slots.h"

/* -- Lists ------------------------------------------------------------------------------------- */

static void print_list(const char *brackets, int64_t n, const int64_t *v, Str *out) {
  str_add(out, brackets, 1);
  for (int64_t k = 0; k < n; k++) str_printf(out, "%s%lld", k ? ", " : "", (long long)v[k]);
  str_add(out, brackets + 1, 1);
}

static int scan_list(Scan *s, const char *open, const char *close, int most, int64_t *v) {
  int n = 0;
  scan_want(s, open);
  while (!scan_is(s, close)) {
    if (n) scan_want(s, ",");
    if (n == most) scan_fail(s, "more than %d entries in a list", most);
    v[n++] = scan_int(s);
  }
  return n;
}

/* -- Arguments --------------------------------------------------------------------------------- */

static void print_choice(const char *choices, int64_t value, Str *out) {
  for (; value > 0; value--) choices = strchr(choices, '|') + 1;
  str_add(out, choices, strcspn(choices, "|"));
}

static int64_t scan_choice(Scan *s, const Param *p) {
  const char *word = scan_word(s);
  size_t n = strlen(word);
  int64_t value = 0;
  for (const char *c = p->choices; c; value++) {
    if (strcspn(c, "|") == n && memcmp(c, word, n) == 0) return value;
    c = strchr(c, '|');
    if (c) c++;
  }
  scan_fail(s, "%s must be one of %s", p->name, p->choices);
}

static size_t value_size(const Param *p) {
  switch ((ParamKind)p->kind) {
    case PARAM_BOOL: return sizeof(bool);
    case PARAM_GENERATOR: return sizeof(RngKey);
    case PARAM_INTS: return p->fixed ? sizeof(int64_t) * p->fixed : sizeof(IntList);
    case PARAM_TENSOR: return p->list ? sizeof(int64_t) : 0;
    default: return sizeof(int64_t);
  }
}

static bool same_value(const Param *p, const char *a, const char *b) {
  if (p->has_offset && *(const bool *)(a + p->has_offset) != *(const bool *)(b + p->has_offset))
    return false;
  if (p->has_offset && !*(const bool *)(a + p->has_offset)) return true;
  if (p->kind != PARAM_INTS || p->fixed)
    return memcmp(a + p->offset, b + p->offset, value_size(p)) == 0;
  const IntList *x = (const void *)(a + p->offset), *y = (const void *)(b + p->offset);
  return x->n == y->n && memcmp(x->v, y->v, sizeof *x->v * (size_t)x->n) == 0;
}

static void print_value(const Param *p, const char *value, Str *out) {
  const int64_t *ints = (const void *)value;
  const IntList *list = (const void *)value;
  const RngKey *key = (const void *)value;
  switch ((ParamKind)p->kind) {
    case PARAM_FLOAT: str_double(out, *(const double *)(const void *)value); break;
    case PARAM_BOOL: str_puts(out, *(const bool *)value ? "true" : "false"); break;
    case PARAM_CHOICE: print_choice(p->choices, *ints, out); break;
    case PARAM_DTYPE: str_puts(out, *ints < 0 ? "none" : dtype_name((DType)*ints)); break;
    case PARAM_DEVICE: str_puts(out, *ints < 0 ? "none" : device_slot_names[*ints]); break;
    case PARAM_INTS:
      if (p->fixed) print_list("[]", p->fixed, ints, out);
      else print_list("[]", list->n, list->v, out);
      break;
    case PARAM_GENERATOR:
      str_printf(out, "%llu:%llu", (unsigned long long)key->seed, (unsigned long long)key->stream);
      break;
    case PARAM_PROGRAM: op_program_print(*(Program *const *)(const void *)value, out); break;
    case PARAM_INT:
    case PARAM_DIM:
    case PARAM_TENSOR: str_printf(out, "%lld", (long long)*ints); break;
  }
}

void op_print_args(const Op *op, const void *args, Str *out) {
  const char *separator = "";
  for (int i = 0; i < op->n_params; i++) {
    const Param *p = &op->params[i];
    if (!value_size(p) || same_value(p, args, op->defaults)) continue;
    str_printf(out, "%s%s=", separator, p->name);
    separator = ", ";
    if (p->has_offset && !*((const bool *)args + p->has_offset)) str_puts(out, "nil");
    else print_value(p, (const char *)args + p->offset, out);
  }
}

static int64_t scan_dtype(Scan *s) {
  const char *word = scan_word(s);
  int t = dtype_parse(word);
  if (t < 0 && strcmp(word, "none") != 0) scan_fail(s, "there is no dtype '%s'", word);
  return t;
}

static int64_t scan_device(Scan *s) {
  const char *word = scan_word(s);
  for (int k = 0; k < DEVICE_SLOTS; k++)
    if (strcmp(device_slot_names[k], word) == 0) return k;
  if (strcmp(word, "none") != 0) scan_fail(s, "there is no device '%s'", word);
  return -1;
}

static void scan_ints(Scan *s, const Param *p, char *value) {
  IntList list = {0};
  list.n = scan_list(s, "[", "]", (int)(sizeof list.v / sizeof *list.v), list.v);
  if (p->fixed && list.n != p->fixed) scan_fail(s, "%s has %d entries", p->name, p->fixed);
  if (p->fixed) memcpy(value, list.v, sizeof *list.v * p->fixed);
  else memcpy(value, &list, sizeof list);
}

static void scan_value(Scan *s, const Param *p, char *args) {
  int64_t *ints = (void *)(args + p->offset);
  RngKey *key = (void *)(args + p->offset);
  if (p->has_offset) *(bool *)(args + p->has_offset) = !scan_is(s, "nil");
  if (p->has_offset && !*(bool *)(args + p->has_offset)) return;
  switch ((ParamKind)p->kind) {
    case PARAM_FLOAT: *(double *)(void *)ints = scan_double(s); break;
    case PARAM_BOOL:
      *(bool *)(args + p->offset) = scan_is(s, "true");
      if (!*(bool *)(args + p->offset)) scan_want(s, "false");
      break;
    case PARAM_CHOICE: *ints = scan_choice(s, p); break;
    case PARAM_DTYPE: *ints = scan_dtype(s); break;
    case PARAM_DEVICE: *ints = scan_device(s); break;
    case PARAM_INTS: scan_ints(s, p, args + p->offset); break;
    case PARAM_GENERATOR:
      key->seed = scan_unsigned(s);
      scan_want(s, ":");
      key->stream = scan_unsigned(s);
      break;
    case PARAM_PROGRAM: *(Program **)(void *)ints = op_program_scan(s); break;
    case PARAM_INT:
    case PARAM_DIM: *ints = scan_int(s); break;
    case PARAM_TENSOR: *ints = scan_range(s, p->name, 0, INT16_MAX); break;
  }
}

static const Param *find_param(const Op *op, const char *name) {
  for (int i = 0; i < op->n_params; i++)
    if (value_size(&op->params[i]) && strcmp(op->params[i].name, name) == 0) return &op->params[i];
  return NULL;
}

/* Whether "name=" is next. */
static bool at_argument(const Scan *s) {
  const char *c = s->at;
  while (*c == ' ') c++;
  size_t n = strspn(c, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_");
  return n && c[n] == '=';
}

void op_scan_args(Scan *s, const Op *op, void *args) {
  memcpy(args, op->defaults, op->args_size);
  while (at_argument(s)) {
    const char *name = scan_word(s);
    const Param *p = find_param(op, name);
    if (!p) scan_fail(s, "%s has no argument '%s'", op->name, name);
    scan_want(s, "=");
    scan_value(s, p, args);
    if (!scan_is(s, ",")) return;
  }
}

/* -- Metas and names --------------------------------------------------------------------------- */

void op_print_meta(const Meta *m, Str *out) {
  str_puts(out, dtype_name((DType)m->dtype));
  print_list("()", m->ndim, m->shape, out);
  if (!meta_is_contiguous(m)) {
    str_puts(out, "/");
    print_list("()", m->ndim, m->stride, out);
  }
  if (m->offset) str_printf(out, "+%lld", (long long)m->offset);
  if (m->device) str_printf(out, "@%s", device_slot_names[m->device]);
  if (m->number) str_puts(out, "!");
}

void op_scan_meta(Scan *s, Meta *m) {
  *m = (Meta){0};
  m->dtype = (uint8_t)scan_dtype(s);
  if (m->dtype >= DTYPE_COUNT) scan_fail(s, "expected a dtype");
  m->ndim = (int8_t)scan_list(s, "(", ")", MF_MAX_DIMS, m->shape);
  int rc = shape_check(s->what, m->ndim, m->shape, (DType)m->dtype);
  if (rc) arena_throw(s->arena, rc);
  shape_contiguous(m->ndim, m->shape, m->stride);
  if (scan_is(s, "/") && scan_list(s, "(", ")", MF_MAX_DIMS, m->stride) != m->ndim)
    scan_fail(s, "expected %d strides", m->ndim);
  if (scan_is(s, "+")) m->offset = scan_range(s, "the offset", 0, SHAPE_MAX);
  if (scan_is(s, "@")) m->device = (uint8_t)scan_device(s);
  if (m->device >= DEVICE_SLOTS) scan_fail(s, "expected a device");
  m->number = scan_is(s, "!");
}

const Op *op_scan_name(Scan *s) {
  const char *name = scan_word(s);
  const Op *op = op_find(name), *near = NULL;
  for (int i = 0, best = 3; !op && i < op_count; i++) {
    int d = str_distance(op_table[i].name, name);
    if (d < best) best = d, near = &op_table[i];
  }
  if (op) return op;
  if (near) scan_fail(s, "there is no op '%s'; did you mean '%s'?", name, near->name);
  scan_fail(s, "there is no op '%s'", name);
}
