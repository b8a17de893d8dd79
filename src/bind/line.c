/* Gradient lines: running the functions of lua/grad.lua for the tape.
 *
 * A line is called with the gradient g, the output y and the options o. `o` is one userdata for all
 * lines, whose fields are looked up in the node that is at hand, so that only what a line reads is
 * pushed; it is meant for nothing but o.NAME, o.shape.NAME and o.dtype.NAME. Tensors made while a
 * line runs lie in handles of the State (bind_push), emptied when it returns. */
#include <stdio.h>
#include <string.h>

#include "state.h"

typedef struct Line {
  State *S;
  Node *n;
  int grad;
  Tensor *const *gout;
  const bool *need;
  Tensor **gin;
} Line;

/* Lines by op and place in its gradients; the same negative: in which order the line returns them.
 */
static int line_key(const Op *op, int grad) {
  return op->id * 32 + grad + 1;
}

/* -- o.NAME ------------------------------------------------------------------------------------ */

static void push_ints(State *S, lua_State *L, const Param *p, const void *value) {
  const IntList *list = value;
  if (p->fixed) bind_push_shape(S, L, p->fixed, value);
  else bind_push_shape(S, L, (int)list->n, list->v);
}

static void push_choice(lua_State *L, const Param *p, int64_t k) {
  const char *c = p->choices;
  while (k-- > 0) c = strchr(c, '|') + 1;
  lua_pushlstring(L, c, strcspn(c, "|"));
}

static int push_value(State *S, lua_State *L, const Node *n, const Param *p) {
  const void *value = (const char *)n->args + p->offset;
  if (p->has_offset && !*(const bool *)((const char *)n->args + p->has_offset))
    return lua_pushnil(L), 1;
  switch ((ParamKind)p->kind) {
    case PARAM_INT:
    case PARAM_DIM: lua_pushnumber(L, (double)*(const int64_t *)value); break;
    case PARAM_FLOAT: lua_pushnumber(L, *(const double *)value); break;
    case PARAM_BOOL: lua_pushboolean(L, *(const bool *)value); break;
    case PARAM_DTYPE: bind_push_dtype(S, L, (int)*(const int64_t *)value); break;
    case PARAM_INTS: push_ints(S, L, p, value); break;
    case PARAM_CHOICE: push_choice(L, p, *(const int64_t *)value); break;
    case PARAM_GENERATOR:
      lua_pushlstring(L, value, sizeof(RngKey));
      break; /* which ops that redo the draw take */
    case PARAM_DEVICE:
    case PARAM_PROGRAM:
    case PARAM_TENSOR: lua_pushnil(L); break;
  }
  return 1;
}

static void push_kept(State *S, lua_State *L, const Node *n, int k) {
  bind_push(S, L, tensor_retain(n->saved[k].t));
}

static void push_meta(State *S, lua_State *L, const GradMeta *m, int key) {
  if (key == S->line_shape) bind_push_shape(S, L, m->ndim, m->shape);
  else bind_push_dtype(S, L, m->dtype);
}

/* The tensor param at `position`: kept tensors, or of what shape or dtype they were (`key` is the
 * State's reference to which table was read). */
static int push_tensor_param(State *S, lua_State *L, const Node *n, const Param *p, int position,
                             int key) {
  int first = position, count = 1;
  if (n->op->n_lists) op_inputs_of_param(n->op, n->args, position, &first, &count);
  if (p->list) lua_createtable(L, count, 0);
  for (int k = first; k < first + count; k++) {
    if (key == S->line_o) push_kept(S, L, n, k);
    else push_meta(S, L, &n->in_meta[k], key);
    if (p->list) lua_rawseti(L, -2, k - first + 1);
  }
  return 1;
}

/* __index of o, o.shape and o.dtype. Upvalue 2: which of them. */
static int index_line(lua_State *L) {
  State *S = bind_state(L);
  int key = (int)lua_tointeger(L, lua_upvalueindex(2));
  const char *name = lua_tostring(L, 2);
  if (!S->line || !name)
    return bind_error(L, "the options of a gradient line are read as o.NAME, while it runs");
  const Node *n = S->line->n;
  for (int i = 0, position = 0; i < n->op->n_params; i++) {
    const Param *p = &n->op->params[i];
    bool tensor = p->kind == PARAM_TENSOR;
    if (strcmp(p->name, name) == 0 && (tensor || key == S->line_o))
      return tensor ? push_tensor_param(S, L, n, p, position, key) : push_value(S, L, n, p);
    position += tensor;
  }
  if (key == S->line_o && !strcmp(name, "shape"))
    return lua_rawgeti(L, LUA_REGISTRYINDEX, S->line_shape), 1;
  if (key == S->line_o && !strcmp(name, "dtype"))
    return lua_rawgeti(L, LUA_REGISTRYINDEX, S->line_dtype), 1;
  return bind_error(L, "the gradient of %s reads '%s', which it has not", n->op->name, name);
}

/* -- g and y ----------------------------------------------------------------------------------- */

/* Puts the value at the top into the table below it, under output k's name or place. */
static void set_output(lua_State *L, const Op *op, int k) {
  if (op->n_outputs < 0) lua_rawseti(L, -2, k + 1);
  else lua_setfield(L, -2, op->outputs[k]);
}

static bool has_one_output(const Op *op) {
  return op->n_outputs == 1 || op->n_outputs == 0;
}

static void push_gradients(State *S, lua_State *L, const Node *n, Tensor *const *g) {
  if (has_one_output(n->op)) {
    bind_push(S, L, tensor_retain(g[0]));
    return;
  }
  lua_newtable(L);
  for (int k = 0; k < n->n_out; k++) {
    bind_push(S, L, tensor_retain(g[k]));
    set_output(L, n->op, k);
  }
}

/* A kept output; when gradients of gradients are wanted, it is on the tape again. */
static void push_output(State *S, lua_State *L, Node *n, int k) {
  Tensor *t = n->saved[n->n_in + k].t;
  if (!t || !S->E->grad_enabled) {
    bind_push(S, L, tensor_retain(t));
    return;
  }
  Tensor *y = tensor_alias(t);
  if (!y) bind_raise(L);
  tape_attach(y, n, k);
  bind_push(S, L, y);
}

static void push_outputs(State *S, lua_State *L, Node *n) {
  if (has_one_output(n->op)) {
    push_output(S, L, n, 0);
    return;
  }
  lua_newtable(L);
  for (int k = 0; k < n->n_out; k++) {
    push_output(S, L, n, k);
    set_output(L, n->op, k);
  }
}

/* need.NAME: whether an input of that param wants its gradient. */
static void push_need(const Line *l, lua_State *L) {
  const Op *op = l->n->op;
  lua_newtable(L);
  for (int i = 0, position = 0; i < op->n_params; i++) {
    if (op->params[i].kind != PARAM_TENSOR) continue;
    int first, count;
    bool any = false;
    op_inputs_of_param(op, l->n->args, position++, &first, &count);
    for (int k = 0; k < count; k++) any |= l->need[first + k];
    lua_pushboolean(L, any);
    lua_setfield(L, -2, op->params[i].name);
  }
}

/* -- What a line returns ----------------------------------------------------------------------- */

static void take(Line *l, lua_State *L, int index, int k) {
  char what[160];
  Tensor *t = bind_to_tensor(l->S, L, index);
  if (!t && lua_isnil(L, index)) return;
  if (!t)
    bind_error(L, "the gradient of %s is %s and not a tensor", l->n->op->name,
               bind_describe(l->S, L, index, what, sizeof what));
  tensor_release(l->gin[k]);
  l->gin[k] = tensor_retain(t);
}

static const Param *tensor_param(const Op *op, int position) {
  const Param *p = op->params;
  while (p->kind != PARAM_TENSOR || position--) p++;
  return p;
}

/* The value at index is the gradient of the tensor param at `position`. */
static void take_param(Line *l, lua_State *L, int index, int position) {
  const Op *op = l->n->op;
  int first = position, count = 1;
  if (op->n_lists) op_inputs_of_param(op, l->n->args, position, &first, &count);
  if (!op->n_lists || !tensor_param(op, position)->list) {
    if (l->need[first]) take(l, L, index, first);
    return;
  }
  if (lua_isnil(L, index)) return;
  luaL_checktype(L, index, LUA_TTABLE);
  for (int k = 0; k < count; k++) {
    lua_rawgeti(L, index, k + 1);
    if (l->need[first + k]) take(l, L, lua_gettop(L), first + k);
    lua_pop(L, 1);
  }
}

/* The results from `first` on, in the order in which the line's key names the inputs. */
static void take_several(Line *l, lua_State *L, int first) {
  int n = lua_gettop(L) - first + 1;
  lua_rawgeti(L, LUA_REGISTRYINDEX, l->S->lines);
  lua_rawgeti(L, -1, -line_key(l->n->op, l->grad));
  int order = lua_gettop(L);
  for (int r = 0; r < n; r++) {
    lua_rawgeti(L, order, r + 1);
    if (lua_isnil(L, -1)) return;
    int position = (int)lua_tointeger(L, -1);
    lua_pop(L, 1);
    take_param(l, L, first + r, position);
  }
}

/* One line under lua_pcall, which catches whatever is raised here. Argument: the Line. */
static int run_line(lua_State *L) {
  Line *l = lua_touserdata(L, 1);
  State *S = l->S;
  const OpGrad *g = &l->n->op->grads[l->grad];
  bool several = g->serves & (g->serves - 1);
  lua_rawgeti(L, LUA_REGISTRYINDEX, S->lines);
  lua_rawgeti(L, 2, line_key(l->n->op, l->grad));
  push_gradients(S, L, l->n, l->gout);
  if (several) push_need(l, L);
  if (g->reads_out) push_outputs(S, L, l->n);
  else lua_pushnil(L);
  lua_rawgeti(L, LUA_REGISTRYINDEX, S->line_o);
  lua_call(L, several ? 4 : 3, several ? LUA_MULTRET : 1);
  if (several) take_several(l, L, 3);
  else take_param(l, L, 3, __builtin_ctz(g->serves));
  return 0;
}

static void empty_handles(State *S, int mark) {
  while (S->line_used > mark) {
    Handle *h = S->line_handles[--S->line_used];
    tensor_release(h->t);
    h->t = NULL;
  }
}

static int gradient(void *ud, Node *n, int grad, Tensor *const *gout, const bool *need,
                    Tensor **gin) {
  State *S = ud;
  lua_State *L = S->L;
  if (!lua_checkstack(L, LUA_MINSTACK)) return err_set(MF_ENOMEM, "backward: Lua's stack is full");
  Line line = {S, n, grad, gout, need, gin}, *outer = S->line;
  int top = lua_gettop(L), mark = S->line_used;
  uint32_t scope = bind_scope_begin(S);
  S->line = &line;
  lua_rawgeti(L, LUA_REGISTRYINDEX, S->line_run);
  lua_pushlightuserdata(L, &line);
  int rc = bind_protected(S, L, 1, 0);
  S->line = outer;
  empty_handles(S, mark);
  bind_scope_end(S, scope);
  lua_settop(L, top);
  return rc;
}

/* -- lua/grad.lua's table ---------------------------------------------------------------------- */

/* Pushes a table of the positions of the tensor params that a key such as 'x, w' names; returns
 * them as bits. */
static uint32_t push_order(lua_State *L, const Op *op, const char *key) {
  uint32_t serves = 0;
  int n = 0;
  lua_newtable(L);
  for (const char *p = key; *p; p += strspn(p, ", ")) {
    size_t length = strcspn(p, ", ");
    for (int i = 0, position = 0; i < op->n_params; i++) {
      if (op->params[i].kind != PARAM_TENSOR) continue;
      if (strlen(op->params[i].name) == length && !memcmp(op->params[i].name, p, length)) {
        serves |= 1u << position;
        lua_pushinteger(L, position);
        lua_rawseti(L, -2, ++n);
      }
      position++;
    }
    p += length;
  }
  return serves;
}

/* The lines of one op; stack: the table of all, the op's entry. */
static void set_lines(lua_State *L, const Op *op) {
  lua_pushnil(L);
  while (lua_next(L, -2)) {
    uint32_t serves = push_order(L, op, lua_tostring(L, -2));
    for (int k = 0; k < op->n_grads; k++) {
      if (op->grads[k].serves != serves) continue;
      lua_pushvalue(L, -1);
      lua_rawseti(L, -6, -line_key(op, k));
      lua_pushvalue(L, -2);
      lua_rawseti(L, -6, line_key(op, k));
    }
    lua_pop(L, 2);
  }
}

/* mf._set_gradients(table): lines by op name and key; a key may name several inputs. */
static int set_gradients(lua_State *L) {
  State *S = bind_state(L);
  luaL_checktype(L, 1, LUA_TTABLE);
  lua_newtable(L);
  for (int id = 0; id < op_count; id++) {
    const Op *op = &op_table[id];
    if (!op->n_grads) continue;
    lua_getfield(L, 1, op->name);
    if (!lua_istable(L, -1)) return luaL_error(L, "lua/grad.lua has no entry for %s", op->name);
    set_lines(L, op);
    lua_pop(L, 1);
  }
  luaL_unref(L, LUA_REGISTRYINDEX, S->lines);
  S->lines = luaL_ref(L, LUA_REGISTRYINDEX);
  S->E->owner.gradient = gradient;
  return 0;
}

/* A userdata whose fields index_line finds. */
static int open_options(State *S, lua_State *L) {
  lua_newuserdata(L, 0);
  lua_pushvalue(L, -1);
  int reference = luaL_ref(L, LUA_REGISTRYINDEX);
  lua_newtable(L);
  lua_pushlightuserdata(L, S);
  lua_pushinteger(L, reference);
  lua_pushcclosure(L, index_line, 2);
  lua_setfield(L, -2, "__index");
  lua_setmetatable(L, -2);
  lua_pop(L, 1);
  return reference;
}

void bind_open_lines(State *S, lua_State *L) {
  S->lines = LUA_NOREF;
  S->line_o = open_options(S, L);
  S->line_shape = open_options(S, L);
  S->line_dtype = open_options(S, L);
  lua_pushcfunction(L, run_line);
  S->line_run = luaL_ref(L, LUA_REGISTRYINDEX);
  bind_function(S, L, "_set_gradients", set_gradients);
}
