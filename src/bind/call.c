/* Calling an op with Lua's arguments, by the op's table of parameters.
 *
 * Positional arguments fill the parameters in order; a last table with a string key holds options
 * by name. Sizes come as numbers or as one table: an int[] that is reached by a number takes all
 * numbers that follow. Tensor[] takes one table, or the tensors that follow. Reading has two steps:
 * `place` finds for each parameter the stack slot of its value, `read` turns slots into tensors and
 * arguments. */
#include <stdio.h>
#include <string.h>

#include "state.h"
#include "str.h"

enum { SMALL = 16, PATCHES = 12 };

/* How many tensors a call may have by position if all else is left at its defaults; `least` is
 * above `most` for ops that cannot be called so. */
typedef struct OpQuick {
  uint8_t least, most;
} OpQuick;

typedef struct Reading {
  State *S;
  lua_State *L;
  const Op *op;
  const char *name;        /* as the user wrote it, "add_" for in-place calls */
  int slot[OP_MAX_PARAMS]; /* stack index; 0: not given */
  int run[OP_MAX_PARAMS];  /* how many slots in a row, for sizes and tensors given one by one */
  Tensor *small[SMALL], **in;
  int n_in, cap_in;
  Tensor *temporary[SMALL]; /* numbers made into tensors, released after the call */
  int n_temporary;
  EagerPatch patches[PATCHES]; /* arguments that were an mf.scalar */
  int n_patches;
  const Layout *target; /* of a factory's placement and sbp */
  union {
    char bytes[OP_MAX_ARGS];
    double align;
  } args;
} Reading;

/* -- Step 1: where each value is --------------------------------------------------------------- */

static bool is_options(lua_State *L, int index) {
  if (lua_type(L, index) != LUA_TTABLE) return false;
  lua_pushnil(L);
  while (lua_next(L, index)) {
    bool named = lua_type(L, -2) == LUA_TSTRING;
    lua_pop(L, 1);
    if (named) {
      lua_pop(L, 1);
      return true;
    }
  }
  return false;
}

static bool is_empty_table(lua_State *L, int index) {
  if (lua_type(L, index) != LUA_TTABLE) return false;
  lua_pushnil(L);
  if (!lua_next(L, index)) return true;
  lua_pop(L, 2);
  return false;
}

static int unknown_option(Reading *r, const char *key) {
  const char *best = NULL;
  int distance = 4;
  for (int i = 0; i < r->op->n_params; i++) {
    int d = str_distance(key, r->op->params[i].name);
    if (d < distance) distance = d, best = r->op->params[i].name;
  }
  if (best)
    return err_set(MF_EINVAL, "%s: there is no option '%.40s'; did you mean '%s'?", r->name, key,
                   best);
  Str names = {0};
  for (int i = 0; i < r->op->n_params; i++)
    str_printf(&names, "%s%s", i ? ", " : "", r->op->params[i].name);
  err_set(MF_EINVAL, "%s: there is no option '%.40s'; there are %s", r->name, key,
          names.text ? names.text : "none");
  str_free(&names);
  return MF_EINVAL;
}

/* Ops that make a tensor by themselves take a placement and SBP beside their parameters. */
static bool takes_layout(const Op *op) {
  return op->n_outputs == 1 && (op->requires_grad >= 0 || !op->n_tensors);
}

static bool is_layout_option(const Op *op, const char *key) {
  return takes_layout(op) && (!strcmp(key, "placement") || !strcmp(key, "sbp"));
}

static int read_layout(Reading *r, int table) {
  lua_State *L = r->L;
  lua_getfield(L, table, "placement");
  lua_getfield(L, table, "sbp");
  bool given = !lua_isnil(L, -2) || !lua_isnil(L, -1);
  int at = lua_gettop(L);
  return given ? bind_read_layout(r->S, L, at - 1, at, r->name, &r->target) : 0;
}

static int place_options(Reading *r, int table) {
  lua_State *L = r->L;
  luaL_checkstack(L, r->op->n_params + 8, r->name);
  for (int i = 0; i < r->op->n_params; i++) { /* first the known ones, which stay on the stack */
    lua_getfield(L, table, r->op->params[i].name);
    if (lua_isnil(L, -1)) {
      lua_pop(L, 1);
      continue;
    }
    if (r->slot[i])
      return err_set(MF_EINVAL, "%s: %s is given twice, by position and by name", r->name,
                     r->op->params[i].name);
    r->slot[i] = lua_gettop(L);
    r->run[i] = 1;
  }
  lua_pushnil(L);
  while (lua_next(L, table)) {
    lua_pop(L, 1);
    if (lua_type(L, -1) != LUA_TSTRING)
      return err_set(MF_EINVAL, "%s: the table of options has an entry without a name", r->name);
    const char *key = lua_tostring(L, -1);
    bool known = false;
    for (int i = 0; i < r->op->n_params && !known; i++)
      known = strcmp(key, r->op->params[i].name) == 0;
    if (!known && !is_layout_option(r->op, key)) return unknown_option(r, key);
  }
  return takes_layout(r->op) ? read_layout(r, table) : 0;
}

static bool takes_number(const Param *p) {
  return !p->keyword_only && (p->kind == PARAM_INT || p->kind == PARAM_DIM ||
                              p->kind == PARAM_FLOAT || p->kind == PARAM_INTS);
}

/* How many slots from `at` the param takes. Those of later params that must be given are left to
 * them; sizes before a number that may be given are one number, or a table: x:split(2, 1),
 * x:roll({1, 2}, {0, 1}). */
static int run_length(Reading *r, const Param *p, int at, int last) {
  int n = 1;
  bool one = false;
  for (const Param *q = p + 1; q < r->op->params + r->op->n_params; q++) {
    last -= !q->keyword_only && !q->fallback;
    one |= takes_number(q) && q->fallback;
  }
  if (p->kind == PARAM_INTS && lua_type(r->L, at) == LUA_TNUMBER && !p->fixed && !one)
    while (at + n <= last && lua_type(r->L, at + n) == LUA_TNUMBER) n++;
  else if (p->kind == PARAM_TENSOR && p->list && lua_type(r->L, at) == LUA_TUSERDATA)
    while (at + n <= last && lua_type(r->L, at + n) == LUA_TUSERDATA) n++;
  return n;
}

static bool takes_no_table(const Param *p) {
  return (p->fallback || p->optional) && p->kind != PARAM_INTS && !p->list;
}

static int place(Reading *r, int first) {
  lua_State *L = r->L;
  int last = lua_gettop(L), options = 0, at = first;
  if (last >= first && is_options(L, last)) options = last--;
  for (int i = 0; i < r->op->n_params; i++) {
    const Param *p = &r->op->params[i];
    r->slot[i] = 0;
    if (p->keyword_only || at > last) continue;
    if (at == last && !options && takes_no_table(p) && is_empty_table(L, at)) {
      last--; /* options of which all are nil */
      continue;
    }
    r->run[i] = run_length(r, p, at, last);
    if (!lua_isnil(L, at)) r->slot[i] = at;
    at += r->run[i];
  }
  while (at <= last && lua_isnil(L, last)) last--;
  if (at == last && !options && is_empty_table(L, at)) return 0; /* options of which all are nil */
  if (at <= last) {
    char what[160];
    return err_set(MF_EINVAL,
                   "%s: argument %d is one too many (%s); options go by name in a last table",
                   r->name, at - first + 1, bind_describe(r->S, L, at, what, sizeof what));
  }
  return options ? place_options(r, options) : 0;
}

/* -- Step 2: values ---------------------------------------------------------------------------- */

static int wrong(Reading *r, const Param *p, int slot, const char *want) {
  char what[160];
  return err_set(MF_EINVAL, "%s: %s must be %s, is %s", r->name, p->name, want,
                 bind_describe(r->S, r->L, slot, what, sizeof what));
}

static int add_input(Reading *r, Tensor *t) {
  if (r->n_in == r->cap_in) {
    Tensor **grown = mem_alloc(sizeof *grown * (size_t)r->cap_in * 2);
    if (!grown) return err_set(MF_ENOMEM, "%s: out of memory", r->name);
    memcpy(grown, r->in, sizeof *grown * (size_t)r->n_in);
    if (r->in != r->small) mem_free(r->in);
    r->in = grown;
    r->cap_in *= 2;
  }
  r->in[r->n_in++] = t;
  return 0;
}

/* The number at a slot: a Lua number, or an mf.scalar, which is noted. False: neither. */
static bool read_number(Reading *r, const Param *p, int slot, double *value) {
  if (lua_type(r->L, slot) == LUA_TNUMBER) {
    *value = lua_tonumber(r->L, slot);
    return true;
  }
  const double *cell = bind_to_scalar(r->S, r->L, slot);
  if (!cell || r->n_patches == PATCHES) return false;
  bind_use_scalar(r->S, r->L, slot);
  r->patches[r->n_patches++] = (EagerPatch){(int)(p - r->op->params), cell};
  *value = *cell;
  return true;
}

static int read_tensor(Reading *r, const Param *p, int slot) {
  Tensor *t = bind_to_tensor(r->S, r->L, slot);
  double value;
  int known = r->n_patches;
  if (!t && p->number && read_number(r, p, slot, &value)) {
    t = tensor_number(r->S->E, value, r->n_patches > known); /* a scalar may become one */
    if (!t) return MF_ENOMEM;
    r->temporary[r->n_temporary++] = t;
  }
  if (!t) return wrong(r, p, slot, p->number ? "a tensor or a number" : "a tensor");
  return add_input(r, t);
}

static int read_tensor_list(Reading *r, const Param *p, int i) {
  lua_State *L = r->L;
  int64_t *count = (int64_t *)(void *)(r->args.bytes + p->offset);
  int before = r->n_in, rc = 0;
  if (lua_type(L, r->slot[i]) == LUA_TTABLE) {
    size_t n = lua_objlen(L, r->slot[i]);
    if (n > INT32_MAX) return wrong(r, p, r->slot[i], "a table of tensors");
    for (size_t k = 1; k <= n && !rc; k++) {
      lua_rawgeti(L, r->slot[i], (int)k); /* the table keeps it alive */
      Tensor *t = bind_to_tensor(r->S, L, -1);
      if (!t) {
        char what[160];
        rc = err_set(MF_EINVAL, "%s: %s[%zu] must be a tensor, is %s", r->name, p->name, k,
                     bind_describe(r->S, L, -1, what, sizeof what));
      } else {
        rc = add_input(r, t);
      }
      lua_pop(L, 1);
    }
  } else {
    for (int k = 0; k < r->run[i] && !rc; k++) {
      Tensor *t = bind_to_tensor(r->S, L, r->slot[i] + k);
      rc = t ? add_input(r, t) : wrong(r, p, r->slot[i] + k, "a table of tensors");
    }
  }
  *count = r->n_in - before;
  return rc;
}

static int read_ints(Reading *r, const Param *p, int i, char *value) {
  IntList list = {0};
  lua_State *L = r->L;
  int rc = 0;
  if (lua_type(L, r->slot[i]) == LUA_TTABLE) {
    rc = bind_read_ints(L, r->slot[i], r->name, p->name, &list);
  } else {
    enum { LIMIT = sizeof list.v / sizeof list.v[0] };
    if (r->run[i] > LIMIT)
      return err_set(MF_EINVAL, "%s: %s has %d entries, at most %d are possible", r->name, p->name,
                     r->run[i], (int)LIMIT);
    for (int k = 0; k < r->run[i] && !rc; k++)
      rc = bind_read_int(L, r->slot[i] + k, r->name, p->name, &list.v[list.n++]);
  }
  if (rc) return rc;
  if (!p->fixed) {
    memcpy(value, &list, sizeof list);
    return 0;
  }
  if (list.n != 1 && list.n != p->fixed)
    return err_set(MF_EINVAL, "%s: %s must be one whole number or %d of them, has %lld", r->name,
                   p->name, p->fixed, (long long)list.n);
  for (int k = 0; k < p->fixed; k++)
    memcpy(value + sizeof(int64_t) * (size_t)k, &list.v[list.n == 1 ? 0 : k], sizeof(int64_t));
  return 0;
}

static int read_choice(Reading *r, const Param *p, int slot, int64_t *value) {
  size_t n = 0;
  const char *text = lua_type(r->L, slot) == LUA_TSTRING ? lua_tolstring(r->L, slot, &n) : NULL;
  *value = 0;
  for (const char *c = p->choices; text && c; (*value)++) {
    const char *stop = strchr(c, '|');
    size_t length = stop ? (size_t)(stop - c) : strlen(c);
    if (length == n && memcmp(c, text, n) == 0) return 0;
    c = stop ? stop + 1 : NULL;
  }
  char want[160];
  snprintf(want, sizeof want, "one of %s", p->choices);
  return wrong(r, p, slot, want);
}

static int read_generator(Reading *r, const Param *p, int slot, RngKey *key) {
  Generator *g = &r->S->E->generator;
  if (slot && lua_type(r->L, slot) == LUA_TSTRING &&
      lua_objlen(r->L, slot) == sizeof *key) { /* a gradient line redoes a draw */
    memcpy(key, lua_tostring(r->L, slot), sizeof *key);
    return 0;
  }
  if (slot) {
    bool same = false;
    if (lua_type(r->L, slot) == LUA_TUSERDATA && lua_getmetatable(r->L, slot)) {
      lua_rawgeti(r->L, LUA_REGISTRYINDEX, r->S->generator_mt);
      same = lua_rawequal(r->L, -1, -2);
      lua_pop(r->L, 2);
    }
    if (!same) return wrong(r, p, slot, "a generator (mf.Generator())");
    g = lua_touserdata(r->L, slot);
  }
  *key = (RngKey){g->seed, g->next++};
  return 0;
}

static int read_value(Reading *r, const Param *p, int i) {
  lua_State *L = r->L;
  int slot = r->slot[i];
  char *value = r->args.bytes + p->offset;
  double number;
  if (p->has_offset) *(bool *)(r->args.bytes + p->has_offset) = true;
  switch ((ParamKind)p->kind) {
    case PARAM_INT:
      if (lua_type(L, slot) == LUA_TUSERDATA && read_number(r, p, slot, &number)) {
        *(int64_t *)(void *)value = (int64_t)number;
        return 0;
      }
      return bind_read_int(L, slot, r->name, p->name, (int64_t *)(void *)value);
    case PARAM_DIM: return bind_read_int(L, slot, r->name, p->name, (int64_t *)(void *)value);
    case PARAM_FLOAT:
      return read_number(r, p, slot, (double *)(void *)value) ? 0 : wrong(r, p, slot, "a number");
    case PARAM_BOOL:
      if (lua_type(L, slot) == LUA_TUSERDATA && read_number(r, p, slot, &number)) {
        *(bool *)value = number != 0;
        return 0;
      }
      if (lua_type(L, slot) != LUA_TBOOLEAN) return wrong(r, p, slot, "true or false");
      *(bool *)value = lua_toboolean(L, slot);
      return 0;
    case PARAM_INTS: return read_ints(r, p, i, value);
    case PARAM_CHOICE: return read_choice(r, p, slot, (int64_t *)(void *)value);
    case PARAM_DTYPE:
      return bind_read_dtype(r->S, L, slot, r->name, p->name, (int64_t *)(void *)value);
    case PARAM_DEVICE:
      return bind_read_device(r->S, L, slot, r->name, p->name, (int64_t *)(void *)value);
    case PARAM_GENERATOR: return read_generator(r, p, slot, (RngKey *)(void *)value);
    case PARAM_PROGRAM:
      return bind_read_program(L, slot, r->name, p->name, (Program **)(void *)value);
    case PARAM_TENSOR: break;
  }
  return 0;
}

static int read(Reading *r) {
  int rc = 0;
  for (int i = 0; i < r->op->n_params && !rc; i++) {
    const Param *p = &r->op->params[i];
    if (p->kind == PARAM_GENERATOR) {
      rc = read_generator(r, p, r->slot[i], (RngKey *)(void *)(r->args.bytes + p->offset));
    } else if (r->slot[i]) {
      if (p->kind != PARAM_TENSOR) rc = read_value(r, p, i);
      else rc = p->list ? read_tensor_list(r, p, i) : read_tensor(r, p, r->slot[i]);
    } else if (p->kind == PARAM_TENSOR && p->optional) {
      if (!p->list) rc = add_input(r, NULL);
    } else if (!p->fallback) {
      rc = err_set(MF_EINVAL, "%s: %s is missing", r->name, p->name);
    }
  }
  return rc;
}

/* -- The call ---------------------------------------------------------------------------------- */

/* Factories make leaves of their own. */
static bool wants_grad(Reading *r) {
  int16_t offset = r->op->requires_grad;
  return offset >= 0 && *(bool *)(r->args.bytes + offset);
}

enum { RAISED = -2 };

/* How many; RAISED: Lua ran out of memory, and the error value is on top. */
static int push_results(Reading *r, EagerCall *c, int first) {
  State *S = r->S;
  lua_State *L = r->L;
  int n_outputs = r->op->n_outputs, n = c->n_out;
  if (c->into || n_outputs == 0) { /* written in place: the tensor itself */
    if (!c->into && (!r->op->n_mutated || r->op->params[0].list)) return 0;
    lua_pushvalue(L, first);
    return 1;
  }
  bool grad = wants_grad(r);
  for (int k = 0; k < n && grad; k++) tensor_autograd(c->out[k])->requires_grad = true;
  if (n_outputs != 1) {
    if (bind_push_list(S, L, c->out, n, n_outputs < 0)) return RAISED;
    return n_outputs < 0 ? 1 : n;
  }
  Tensor *t = c->out[0];
  c->out[0] = NULL;
  bind_push(S, L, t);
  return 1;
}

static bool has_anchored(const EagerCall *c) {
  bool any = false;
  for (int k = 0; k < c->n_in; k++) any |= c->in[k] && c->in[k]->anchored;
  return any;
}

/* The results, n at the top, keep the hooks of what they were made from alive. */
static void anchor_results(Reading *r, int first, int last, int n) {
  int top = lua_gettop(r->L);
  for (int k = 0; k < n; k++) bind_anchor(r->S, r->L, top - n + 1 + k, first, last - first + 1);
}

/* Reads arguments that are all tensors or numbers for plain parameters, the rest being defaults:
 * most calls. False when they are not, with nothing left behind. */
static bool read_quick(Reading *r, int first) {
  lua_State *L = r->L;
  const OpQuick *q = &r->S->quick[r->op->id];
  int n = lua_gettop(L) - first + 1;
  if (n < q->least || n > q->most) return false;
  for (int k = 0; k < n; k++) {
    Tensor *t = bind_to_tensor(r->S, L, first + k);
    if (!t && r->op->params[k].number && lua_type(L, first + k) == LUA_TNUMBER &&
        (t = tensor_number(r->S->E, lua_tonumber(L, first + k), false)))
      r->temporary[r->n_temporary++] = t;
    if (!t) {
      while (r->n_temporary) tensor_release(r->temporary[--r->n_temporary]);
      return false;
    }
    r->small[k] = t;
  }
  for (int k = n; k < r->op->n_tensors; k++) r->small[k] = NULL;
  r->n_in = r->op->n_tensors;
  r->slot[0] = first;
  return true;
}

/* A whole number that the op writes as it is must be one of the dtype into which it does. */
static int check_numbers(const Reading *r) {
  const OpSpec *o = r->op->spec[0];
  int t = DTYPE_NONE;
  for (int k = 0; k < r->n_in; k++) {
    const Tensor *x = r->in[k];
    if (!x || x->m.number) continue;
    t = t == DTYPE_NONE ? x->m.dtype : (int)dtype_promote((DType)t, (DType)x->m.dtype);
    if (!o->expression) break; /* others are places */
  }
  for (int i = 0, k = 0; i < r->op->n_params && k < r->n_in && t != DTYPE_NONE; i++) {
    if (r->op->params[i].kind != PARAM_TENSOR) continue;
    const Tensor *x = r->in[k++];
    if (!x || !x->m.number || x->m.dtype != I64) continue;
    int64_t v = *(const int64_t *)x->storage->data;
    if (!dtype_holds((DType)t, (double)v))
      return err_set(MF_EINVAL, "%s: %s is %lld, which %s cannot hold", r->name,
                     r->op->params[i].name, (long long)v, dtype_name((DType)t));
  }
  return 0;
}

/* Reads the arguments from `first` on; the name that errors give is kept in in_place where needed.
 */
static int begin(Reading *r, State *S, lua_State *L, const Op *op, int first, bool into,
                 char in_place[64]) {
  r->S = S, r->L = L, r->op = op, r->name = op->name;
  r->in = r->small, r->n_in = 0, r->cap_in = SMALL, r->n_temporary = r->n_patches = 0;
  r->target = NULL;
  memcpy(r->args.bytes, op->defaults, op->args_size);
  int rc = 0;
  bool quick = read_quick(r, first), places = r->n_temporary && op->spec[0]->flags & OP_PLACES;
  if (into && (!quick || places)) {
    snprintf(in_place, 64, "%s_", op->name);
    r->name = in_place;
  }
  if (!quick) {
    rc = place(r, first);
    if (!rc) rc = read(r);
  }
  if (!rc && into && r->in[0]->m.number)
    rc = err_set(MF_EINVAL, "%s: the first argument must be a tensor, is a number", r->name);
  return rc || !r->n_temporary || !(op->spec[0]->flags & OP_PLACES) ? rc : check_numbers(r);
}

/* Pushes what the call made, and gives back what was read. `last`: of the arguments. */
static int end(Reading *r, EagerCall *c, int first, int last, int rc) {
  int n = -1;
  bool anchored = !rc && r->S->has_anchors && c->recorded && has_anchored(c);
  for (int k = 0; k < r->n_temporary; k++) tensor_release(r->temporary[k]);
  if (r->in != r->small) mem_free(r->in);
  if (rc) return n;
  n = push_results(r, c, r->slot[0] ? r->slot[0] : first);
  if (anchored && n >= 0) anchor_results(r, first, last, n);
  eager_call_clear(c);
  if (n == RAISED) lua_error(r->L);
  return n;
}

int bind_call(State *S, lua_State *L, const Op *op, int first, bool into) {
  Reading r;
  EagerCall c;
  char in_place[64];
  int rc = begin(&r, S, L, op, first, into, in_place), last = lua_gettop(L);
  c.op = op, c.in = r.in, c.n_in = r.n_in, c.args = r.args.bytes;
  c.patches = r.patches, c.n_patches = r.n_patches;
  c.into = into && !rc ? r.in[0] : NULL;
  if (!rc) rc = eager_call_as(S->E, &c, r.target, NULL);
  return end(&r, &c, first, last, rc);
}

int bind_with_call(State *S, lua_State *L, const Op *op, int first,
                   int (*use)(void *ud, EagerCall *c), void *ud) {
  Reading r;
  int rc = begin(&r, S, L, op, first, false, NULL), last = lua_gettop(L);
  EagerCall c = {.op = op,
                 .in = r.in,
                 .n_in = r.n_in,
                 .args = r.args.bytes,
                 .patches = r.patches,
                 .n_patches = r.n_patches};
  if (!rc) rc = use(ud, &c);
  return end(&r, &c, first, last, rc);
}

static int call_op(lua_State *L) {
  State *S = bind_state(L);
  const Op *op = lua_touserdata(L, lua_upvalueindex(2));
  int n = bind_call(S, L, op, 1, false);
  if (n < 0) return bind_raise(L);
  bind_pay(S, L);
  return n;
}

static int call_op_into(lua_State *L) {
  State *S = bind_state(L);
  const Op *op = lua_touserdata(L, lua_upvalueindex(2));
  int n = bind_call(S, L, op, 1, true);
  if (n < 0) return bind_raise(L);
  bind_pay(S, L);
  return n;
}

static OpQuick quick_of(const Op *op) {
  static const OpQuick never = {1, 0};
  OpQuick q = {0, op->n_tensors};
  if (op->n_lists || op->n_tensors > SMALL || !op->n_tensors) return never;
  for (int i = 0; i < op->n_params; i++) {
    const Param *p = &op->params[i];
    bool required = !p->fallback && !p->optional, tensor = p->kind == PARAM_TENSOR;
    if (p->kind == PARAM_GENERATOR || (required && !tensor) || (tensor && i >= op->n_tensors))
      return never;
    if (required) q.least = (uint8_t)(i + 1);
    if (tensor && p->keyword_only && i < q.most) q.most = (uint8_t)i;
  }
  return q;
}

void bind_push_op(State *S, lua_State *L, const Op *op, bool into) {
  lua_pushlightuserdata(L, S);
  lua_pushlightuserdata(L, (void *)(uintptr_t)op);
  lua_pushcclosure(L, into ? call_op_into : call_op, 2);
}

const Op *bind_op_of(lua_State *L, int index, bool *into) {
  lua_CFunction f = lua_tocfunction(L, index);
  *into = f == call_op_into;
  if (f != call_op && !*into) return NULL;
  lua_getupvalue(L, index, 2);
  const Op *op = lua_touserdata(L, -1);
  lua_pop(L, 1);
  return op;
}

/* Binds one op: mf.NAME and tensor:NAME, and NAME_ where it exists. Module table at the top,
 * methods below it. */
static void bind_op(State *S, lua_State *L, const Op *op) {
  int flags = op->spec[0]->flags;
  char name[80];
  bool hidden = flags & OP_HIDDEN,
       method = op->n_tensors && op->params[0].kind == PARAM_TENSOR && !op->params[0].list;
  snprintf(name, sizeof name, "%s%s", hidden ? "_" : "", op->name);
  if (!(flags & OP_METHOD_ONLY)) {
    bind_push_op(S, L, op, false);
    lua_setfield(L, -2, name);
  }
  if (!method || hidden) return;
  if (!(flags & OP_FUNCTION_ONLY)) {
    bind_push_op(S, L, op, false);
    lua_setfield(L, -3, name);
  }
  if (flags & OP_INPLACE) {
    snprintf(name, sizeof name, "%s_", op->name);
    bind_push_op(S, L, op, true);
    lua_setfield(L, -3, name);
  }
}

void bind_open_ops(State *S, lua_State *L) {
  static const struct {
    const char *event, *op;
  } operators[] = {{"__add", "add"}, {"__sub", "sub"}, {"__mul", "mul"},
                   {"__div", "div"}, {"__pow", "pow"}, {"__mod", "remainder"}};
  S->quick = lua_newuserdata(L, sizeof *S->quick * (size_t)op_count);
  luaL_ref(L, LUA_REGISTRYINDEX); /* lives as long as the state */
  for (int i = 0; i < op_count; i++) S->quick[i] = quick_of(&op_table[i]);
  lua_rawgeti(L, LUA_REGISTRYINDEX, S->methods);
  lua_pushvalue(L, -2);
  for (int i = 0; i < op_count; i++) bind_op(S, L, &op_table[i]);
  lua_pop(L, 2);
  lua_rawgeti(L, LUA_REGISTRYINDEX, S->tensor_mt);
  for (size_t i = 0; i < sizeof operators / sizeof operators[0]; i++) {
    const Op *op = op_find(operators[i].op);
    if (!op) continue;
    bind_push_op(S, L, op, false);
    lua_setfield(L, -2, operators[i].event);
  }
  lua_pop(L, 1);
}
