/* Printing tensors as PyTorch prints them.
 *
 * Formatting has two passes over the shown elements: the first finds one format and width for all
 * of them (Format), the second writes. Above `threshold` elements only `edgeitems` at both ends of
 * each dim are shown, and only those are read. Floats switch to scientific notation when the
 * largest is above 1e8, the smallest below 1e-4, or their ratio above 1000; whole floats are
 * written as "1.". What differs from the defaults follows as suffixes: device, size, dtype,
 * requires_grad or grad_fn. */
#include <ctype.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "sparse.h"
#include "state.h"
#include "str.h"

enum { SCI_AUTO = -1, NUMBER_MAX = 512 };

typedef struct PrintOptions {
  int64_t precision, threshold, edgeitems, linewidth;
  int sci_mode; /* SCI_AUTO, false, true */
} PrintOptions;

static const PrintOptions print_defaults = {4, 1000, 3, 80, SCI_AUTO};

typedef struct Format {
  const PrintOptions *o;
  const Tensor *t;
  bool is_float, is_bool, whole, sci, summarize;
  int width;
  double min, max; /* of the nonzero finite magnitudes; max 0 when there are none */
} Format;

/* -- Elements ---------------------------------------------------------------------------------- */

/* The text of the element at p, not padded. Returns its length. */
static int element_text(const Format *f, const char *p, char *buf) {
  DType dtype = (DType)f->t->m.dtype;
  if (f->is_bool) return snprintf(buf, NUMBER_MAX, "%s", *(const uint8_t *)p ? "True" : "False");
  if (!f->is_float) return snprintf(buf, NUMBER_MAX, "%lld", (long long)dtype_get_i64(dtype, p));
  double v = dtype_get_f64(dtype, p);
  if (isnan(v)) return snprintf(buf, NUMBER_MAX, "nan");
  if (isinf(v)) return snprintf(buf, NUMBER_MAX, v < 0 ? "-inf" : "inf");
  if (f->sci) return snprintf(buf, NUMBER_MAX, "%.*e", (int)f->o->precision, v);
  if (f->whole) return snprintf(buf, NUMBER_MAX, "%.0f.", v);
  return snprintf(buf, NUMBER_MAX, "%.*f", (int)f->o->precision, v);
}

typedef void Visit(Format *f, const char *p);

/* Calls visit on every shown element from dim d on. */
static void each_shown(Format *f, int d, const char *p, Visit *visit) {
  const Meta *m = &f->t->m;
  if (d == m->ndim) {
    visit(f, p);
    return;
  }
  int64_t step = m->stride[d] * (int64_t)dtype_size((DType)m->dtype), edge = f->o->edgeitems;
  bool cut = f->summarize && m->shape[d] > 2 * edge;
  for (int64_t i = 0; i < m->shape[d]; i++) {
    if (cut && i == edge) i = m->shape[d] - edge;
    if (i < m->shape[d]) each_shown(f, d + 1, p + i * step, visit);
  }
}

static void visit_range(Format *f, const char *p) {
  double v = fabs(dtype_get_f64((DType)f->t->m.dtype, p));
  if (v == 0 || !isfinite(v)) return;
  if (v != ceil(v)) f->whole = false;
  if (f->max == 0 || v < f->min) f->min = v;
  if (v > f->max) f->max = v;
}

static void visit_width(Format *f, const char *p) {
  char buf[NUMBER_MAX];
  if (f->is_float) { /* zeros and non-finite values do not count */
    double v = dtype_get_f64((DType)f->t->m.dtype, p);
    if (v == 0 || !isfinite(v)) return;
  }
  int n = element_text(f, p, buf);
  if (n > f->width) f->width = n;
}

static Format find_format(const PrintOptions *o, const Tensor *t) {
  Format f = {.o = o,
              .t = t,
              .is_float = dtype_is_float((DType)t->m.dtype),
              .is_bool = t->m.dtype == BOOL,
              .whole = true,
              .width = 1};
  f.summarize = meta_numel(&t->m) > o->threshold;
  if (f.is_float) {
    each_shown(&f, 0, tensor_data(t), visit_range);
    if (f.max == 0) return f;
    f.sci =
        o->sci_mode == SCI_AUTO ? f.max / f.min > 1000 || f.max > 1e8 || f.min < 1e-4 : o->sci_mode;
  }
  each_shown(&f, 0, tensor_data(t), visit_width);
  return f;
}

/* -- Brackets ---------------------------------------------------------------------------------- */

static void put_element(Str *s, const Format *f, const char *p) {
  char buf[NUMBER_MAX];
  int n = element_text(f, p, buf);
  for (int i = n; i < f->width; i++) str_add(s, " ", 1);
  str_add(s, buf, (size_t)n);
}

static void put_spaces(Str *s, int64_t n) {
  for (int64_t i = 0; i < n; i++) str_add(s, " ", 1);
}

/* The last dim: as many elements a line as fit. */
static void put_row(Str *s, const Format *f, const char *p, int64_t indent) {
  const Meta *m = &f->t->m;
  int d = m->ndim - 1;
  int64_t step = m->stride[d] * (int64_t)dtype_size((DType)m->dtype), edge = f->o->edgeitems,
          n = m->shape[d], k = 0;
  int64_t a_line = (f->o->linewidth - indent) / (f->width + 2);
  bool cut = f->summarize && n > 2 * edge;
  if (a_line < 1) a_line = 1;
  str_puts(s, "[");
  for (int64_t i = 0; i < n; i++, k++) {
    if (k) str_puts(s, k % a_line ? ", " : ",\n");
    if (k && k % a_line == 0) put_spaces(s, indent + 1);
    if (cut && i == edge) {
      str_puts(s, edge ? " ..." : "...");
      i = n - edge - 1;
    } else {
      put_element(s, f, p + i * step);
    }
  }
  str_puts(s, "]");
}

static void put_dims(Str *s, const Format *f, int d, const char *p, int64_t indent) {
  const Meta *m = &f->t->m;
  if (m->ndim == 0) {
    put_element(s, f, p);
    return;
  }
  if (d == m->ndim - 1) {
    put_row(s, f, p, indent);
    return;
  }
  int64_t step = m->stride[d] * (int64_t)dtype_size((DType)m->dtype), edge = f->o->edgeitems,
          n = m->shape[d];
  bool cut = f->summarize && n > 2 * edge;
  str_puts(s, "[");
  for (int64_t i = 0; i < n; i++) {
    if (i) {
      str_puts(s, ",");
      for (int k = d + 1; k < m->ndim; k++) str_puts(s, "\n");
      put_spaces(s, indent + 1);
    }
    if (cut && i == edge) {
      str_puts(s, "...");
      i = n - edge - 1;
    } else {
      put_dims(s, f, d + 1, p + i * step, indent + 1);
    }
  }
  str_puts(s, "]");
}

static void put_contents(Str *s, const PrintOptions *o, Tensor *t, int64_t indent) {
  if (meta_numel(&t->m) == 0) {
    str_puts(s, "[]");
    return;
  }
  Tensor *host = tensor_to_host(t);
  if (!host) {
    str_printf(s, "[%s]", err_text());
    return;
  }
  Format f = find_format(o, host);
  put_dims(s, &f, 0, tensor_data(host), indent);
  tensor_release(host);
}

/* -- Suffixes ---------------------------------------------------------------------------------- */

typedef struct Suffixes {
  Str *s;
  const PrintOptions *o;
  size_t line;    /* length of the last line so far */
  int64_t indent; /* of a suffix on a line of its own */
} Suffixes;

static void put_suffix(Suffixes *x, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void put_suffix(Suffixes *x, const char *format, ...) {
  char text[SHAPE_TEXT_MAX + 200];
  va_list args;
  va_start(args, format);
  vsnprintf(text, sizeof text, format, args);
  va_end(args);
  size_t n = strlen(text);
  if (x->line + n + 2 > (size_t)x->o->linewidth) {
    str_puts(x->s, ",\n");
    put_spaces(x->s, x->indent);
    x->line = (size_t)x->indent + n;
  } else {
    str_puts(x->s, ", ");
    x->line += n + 2;
  }
  str_add(x->s, text, n);
}

/* "relu_backward" as "ReluBackward0" stands in PyTorch. */
static void put_grad_fn(Suffixes *x, State *S, Tensor *t) {
  Node *node = NULL;
  int output;
  char name[80];
  if (tape_node(S->E, t, &node, &output)) {
    put_suffix(x, "grad_fn=<Invalid>");
    return;
  }
  if (!node) {
    if (tensor_requires_grad(t)) put_suffix(x, "requires_grad=True");
    return;
  }
  const Op *op = node->op ? node->op : node->inner ? node->inner->op : NULL;
  const char *from = op ? op->name : node->inner ? "copy_slices" : "as_strided";
  size_t n = 0;
  for (bool up = true; *from && n + 1 < sizeof name; from++) {
    if (*from == '_') up = true;
    else name[n++] = (char)(up ? toupper((unsigned char)*from) : *from), up = false;
  }
  name[n] = 0;
  put_suffix(x, node->inner ? "grad_fn=<CopySlices>" : "grad_fn=<%sBackward0>", name);
}

static void put_suffixes(Suffixes *x, State *S, Tensor *t, bool meta) {
  char shape[SHAPE_TEXT_MAX];
  DType dtype = (DType)t->m.dtype;
  bool empty = meta_numel(&t->m) == 0;
  const char *last = strrchr(x->s->text, '\n');
  x->line = x->s->n - (last ? (size_t)(last - x->s->text) : (size_t)-1) + 1;
  if (t->m.device != DEVICE_CPU)
    put_suffix(x, "device='%s'", S->context->devices[t->m.device]->name);
  if (t->layout) {
    Str text = {0};
    bind_put_layout(&text, t->layout);
    put_suffix(x, "%s", text.text ? text.text : "");
    str_free(&text);
  }
  if (meta || t->layout || (empty && t->m.ndim != 1) || (!empty && !x->o->edgeitems))
    put_suffix(x, "size=%s", shape_text(t->m.ndim, t->m.shape, shape));
  if (dtype != F32 && (meta || empty || (dtype != I64 && dtype != BOOL)))
    put_suffix(x, "dtype=%s", dtype_name(dtype));
  put_grad_fn(x, S, t);
}

/* A row-sparse gradient: its two parts. */
static void put_rows(Str *s, const PrintOptions *o, const Tensor *t) {
  char shape[SHAPE_TEXT_MAX];
  str_puts(s, "tensor(ids=tensor(");
  put_contents(s, o, t->row_ids, 18);
  str_puts(s, "),\n       values=tensor(");
  put_contents(s, o, t->row_values, 21);
  str_printf(s, "),\n       size=%s, rows=%lld)", shape_text(t->m.ndim, t->m.shape, shape),
             (long long)t->row_ids->m.shape[0]);
}

static void put_tensor(Str *s, State *S, const PrintOptions *o, Tensor *t) {
  if (!t->storage) {
    put_rows(s, o, t);
    return;
  }
  str_puts(s, "tensor(");
  bool meta = !tensor_has_data(t);
  if (meta) str_puts(s, "...");
  else put_contents(s, o, t->part ? t->part : t, 7); /* of a global one what this rank has */
  Suffixes x = {.s = s, .o = o, .indent = 7};
  if (!s->failed) put_suffixes(&x, S, t, meta);
  str_puts(s, ")");
}

/* -- Lua --------------------------------------------------------------------------------------- */

static const PrintOptions *options_of(lua_State *L) {
  return lua_touserdata(L, lua_upvalueindex(2));
}

/* -- Texts ------------------------------------------------------------------------------------- */

static int text_gc(lua_State *L) {
  str_free(lua_touserdata(L, 1));
  return 0;
}

Str *bind_new_text(State *S, lua_State *L) {
  Str *s = lua_newuserdata(L, sizeof *s);
  *s = (Str){0};
  lua_rawgeti(L, LUA_REGISTRYINDEX, S->text_mt);
  lua_setmetatable(L, -2);
  return s;
}

void bind_push_text(lua_State *L, Str *s, const char *function) {
  if (s->failed) bind_error(L, "%s: out of memory", function);
  lua_pushlstring(L, s->text ? s->text : "", s->n);
  str_free(s);
}

static int tensor_tostring(lua_State *L) {
  State *S = bind_state(L);
  Tensor *t = ((Handle *)lua_touserdata(L, 1))->t;
  if (!t || (t->storage ? storage_is_freed(t->storage) : sparse_is_freed(t))) {
    lua_pushstring(L, t ? "tensor(freed)" : "tensor(released at the end of its scope)");
    return 1;
  }
  if (t->storage && storage_absence(t->storage) && tensor_check_data(t, "tostring"))
    return bind_raise(L);
  Str *s = bind_new_text(S, L);
  put_tensor(s, S, options_of(L), t);
  bind_push_text(L, s, "tostring");
  return 1;
}

static int set_profile(lua_State *L, PrintOptions *o, int index) {
  const char *name = lua_tostring(L, index);
  *o = print_defaults;
  if (name && !strcmp(name, "default")) return 0;
  if (name && !strcmp(name, "short")) return o->precision = 2, o->edgeitems = 2, 0;
  if (name && !strcmp(name, "full")) return o->threshold = INT64_MAX, 0;
  return err_set(MF_EINVAL, "set_printoptions: profile must be 'default', 'short' or 'full'");
}

static int set_option(lua_State *L, PrintOptions *o, const char *key) {
  const struct {
    const char *name;
    int64_t *value, most;
  } options[] = {{"precision", &o->precision, 100},
                 {"threshold", &o->threshold, INT64_MAX},
                 {"edgeitems", &o->edgeitems, 1 << 20},
                 {"linewidth", &o->linewidth, 1 << 20}};
  if (!strcmp(key, "profile")) return 0;
  if (!strcmp(key, "sci_mode")) {
    if (!lua_isboolean(L, -1))
      return err_set(MF_EINVAL, "set_printoptions: sci_mode must be true or false");
    o->sci_mode = lua_toboolean(L, -1);
    return 0;
  }
  for (size_t i = 0; i < sizeof options / sizeof options[0]; i++) {
    if (strcmp(key, options[i].name)) continue;
    if (lua_tonumber(L, -1) == HUGE_VAL && i == 1) return *options[i].value = INT64_MAX, 0;
    int rc = bind_read_int(L, -1, "set_printoptions", key, options[i].value);
    if (!rc && (*options[i].value < 0 || *options[i].value > options[i].most))
      rc = err_set(MF_EINVAL, "set_printoptions: %s must be from 0 to %lld, is %lld", key,
                   (long long)options[i].most, (long long)*options[i].value);
    return rc;
  }
  return err_set(MF_EINVAL,
                 "set_printoptions: there is no option '%.40s'; there are precision, threshold, "
                 "edgeitems, linewidth, sci_mode, profile",
                 key);
}

/* mf.set_printoptions {precision=4, threshold=1000, edgeitems=3, linewidth=80, sci_mode=,
 * profile=}; sci_mode not given is automatic. */
static int set_printoptions(lua_State *L) {
  PrintOptions *kept = lua_touserdata(L, lua_upvalueindex(2)), o = *kept;
  luaL_checktype(L, 1, LUA_TTABLE);
  lua_getfield(L, 1, "profile");
  int rc = lua_isnil(L, -1) ? 0 : set_profile(L, &o, -1);
  lua_settop(L, 1);
  o.sci_mode = SCI_AUTO;
  lua_pushnil(L);
  while (!rc && lua_next(L, 1)) {
    rc = lua_type(L, -2) == LUA_TSTRING
             ? set_option(L, &o, lua_tostring(L, -2))
             : err_set(MF_EINVAL, "set_printoptions: options have names, such as {precision = 4}");
    lua_pop(L, 1);
  }
  if (rc) return bind_raise(L);
  *kept = o;
  return 0;
}

/* mf.get_printoptions(): the options as a table for set_printoptions. */
static int get_printoptions(lua_State *L) {
  const PrintOptions *o = options_of(L);
  lua_createtable(L, 0, 5);
  lua_pushnumber(L, (double)o->precision);
  lua_setfield(L, -2, "precision");
  lua_pushnumber(L, o->threshold == INT64_MAX ? HUGE_VAL : (double)o->threshold);
  lua_setfield(L, -2, "threshold");
  lua_pushnumber(L, (double)o->edgeitems);
  lua_setfield(L, -2, "edgeitems");
  lua_pushnumber(L, (double)o->linewidth);
  lua_setfield(L, -2, "linewidth");
  if (o->sci_mode != SCI_AUTO) {
    lua_pushboolean(L, o->sci_mode);
    lua_setfield(L, -2, "sci_mode");
  }
  return 1;
}

/* Adds `name` as a closure over the state and the options, which are at `options`, to the table
 * below the top. */
static void put_function(State *S, lua_State *L, int table, int options, const char *name,
                         lua_CFunction f) {
  lua_pushlightuserdata(L, S);
  lua_pushvalue(L, options);
  lua_pushcclosure(L, f, 2);
  lua_setfield(L, table, name);
}

void bind_open_print(State *S, lua_State *L) {
  int module = lua_gettop(L), options = module + 1;
  *(PrintOptions *)lua_newuserdata(L, sizeof(PrintOptions)) = print_defaults;
  put_function(S, L, module, options, "set_printoptions", set_printoptions);
  put_function(S, L, module, options, "get_printoptions", get_printoptions);
  lua_rawgeti(L, LUA_REGISTRYINDEX, S->tensor_mt);
  put_function(S, L, options + 1, options, "__tostring", tensor_tostring);
  lua_createtable(L, 0, 1);
  lua_pushcfunction(L, text_gc);
  lua_setfield(L, -2, "__gc");
  S->text_mt = luaL_ref(L, LUA_REGISTRYINDEX);
  lua_pop(L, 2);
}
