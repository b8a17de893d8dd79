/* Gradients for the user: x:backward, mf.grad, mf.no_grad and their like; anomaly mode; and calling
 * the user's functions during a pass. */
#include <string.h>

#include "state.h"

/* -- Callbacks --------------------------------------------------------------------------------- */

/* The handler of bind_protected: a string gets a traceback while the stack still stands. */
static int add_traceback(lua_State *L) {
  const char *text = lua_type(L, 1) == LUA_TSTRING ? lua_tostring(L, 1) : NULL;
  if (text && !strstr(text, "\nstack traceback:")) luaL_traceback(L, L, text, 1);
  return 1;
}

/* Takes the error value off the stack. Its place is there already, so that Lua needs no memory. */
static int keep_error(State *S, lua_State *L) {
  const char *text =
      lua_type(L, -1) == LUA_TSTRING ? lua_tostring(L, -1) : "an error value that is no string";
  int rc = err_set(MF_ELUA, "%s", text);
  lua_rawseti(L, LUA_REGISTRYINDEX, S->error);
  S->has_error = true;
  return rc;
}

int bind_protected(State *S, lua_State *L, int n_in, int n_out) {
  int base = lua_gettop(L) - n_in;
  lua_rawgeti(L, LUA_REGISTRYINDEX, S->traceback);
  lua_insert(L, base);
  int status = lua_pcall(L, n_in, n_out, base);
  S->L = L; /* the function may have run coroutines */
  lua_remove(L, base);
  return status ? keep_error(S, L) : 0;
}

int bind_guarded(State *S, lua_State *L, lua_CFunction body, void *ud) {
  int status = lua_cpcall(L, body, ud);
  S->L = L;
  return status ? keep_error(S, L) : 0;
}

int bind_raise_kept(State *S, lua_State *L, int code) {
  if (code != MF_ELUA || !S->has_error) return bind_raise(L);
  lua_rawgeti(L, LUA_REGISTRYINDEX, S->error);
  lua_pushboolean(L, false);
  lua_rawseti(L, LUA_REGISTRYINDEX, S->error);
  S->has_error = false;
  return lua_error(L);
}

/* -- Modes ------------------------------------------------------------------------------------- */

/* Calls the function at 1 with the rest of the stack while *mode is `on`. */
static int with_mode(lua_State *L, bool *mode, bool on, const char *name) {
  if (lua_type(L, 1) != LUA_TFUNCTION)
    return bind_error(L, "%s: the first argument must be a function, is a %s", name,
                      luaL_typename(L, 1));
  bool was = *mode;
  *mode = on;
  int rc = lua_pcall(L, lua_gettop(L) - 1, LUA_MULTRET, 0);
  *mode = was;
  return rc ? lua_error(L) : lua_gettop(L);
}

static int set_mode(lua_State *L, bool *mode, const char *name) {
  if (!lua_isboolean(L, 1))
    return bind_error(L, "%s: the argument must be true or false, is a %s", name,
                      luaL_typename(L, 1));
  lua_pushboolean(L, *mode);
  *mode = lua_toboolean(L, 1);
  return 1;
}

/* mf.device(name, f, ...): f's results; tensors made inside of nothing are on that device. Without
 * f, the name in full, 'cuda:0' of 'cuda'. */
static int device(lua_State *L) {
  State *S = bind_state(L);
  int64_t type;
  if (bind_read_device(S, L, 1, "device", "the first argument", &type)) return bind_raise(L);
  if (lua_gettop(L) == 1) {
    lua_pushstring(L, S->context->devices[type]->name);
    return 1;
  }
  if (lua_type(L, 2) != LUA_TFUNCTION)
    return bind_error(L, "device: the second argument must be a function, is a %s",
                      luaL_typename(L, 2));
  lua_remove(L, 1);
  int was = S->E->device;
  S->E->device = (int)type;
  int rc = lua_pcall(L, lua_gettop(L) - 1, LUA_MULTRET, 0);
  S->E->device = was;
  return rc ? lua_error(L) : lua_gettop(L);
}

static int get_default_device(lua_State *L) {
  State *S = bind_state(L);
  lua_pushstring(L, S->context->devices[S->E->device]->name);
  return 1;
}

/* mf.set_default_device(name): returns what it was. */
static int set_default_device(lua_State *L) {
  State *S = bind_state(L);
  int64_t type;
  if (bind_read_device(S, L, 1, "set_default_device", "the argument", &type)) return bind_raise(L);
  lua_settop(L, 1);
  get_default_device(L);
  S->E->device = (int)type;
  return 1;
}

/* mf.no_grad(f, ...): f's results; nothing inside is recorded. */
static int no_grad(lua_State *L) {
  return with_mode(L, &bind_state(L)->E->grad_enabled, false, "no_grad");
}

static int enable_grad(lua_State *L) {
  return with_mode(L, &bind_state(L)->E->grad_enabled, true, "enable_grad");
}

/* mf.set_grad_enabled(on): returns what it was. */
static int set_grad_enabled(lua_State *L) {
  return set_mode(L, &bind_state(L)->E->grad_enabled, "set_grad_enabled");
}

static int is_grad_enabled(lua_State *L) {
  lua_pushboolean(L, bind_state(L)->E->grad_enabled);
  return 1;
}

/* mf.detect_anomaly(f, ...): f's results. Inside, a NaN in a gradient is an error that names the op
 * and the line of its forward call; so do errors about tensors that were written in place. */
static int detect_anomaly(lua_State *L) {
  return with_mode(L, &bind_state(L)->E->anomaly, true, "detect_anomaly");
}

static int set_detect_anomaly(lua_State *L) {
  return set_mode(L, &bind_state(L)->E->anomaly, "set_detect_anomaly");
}

/* -- Lines of the user's program --------------------------------------------------------------- */

/* S->wheres holds each line once, by number and by text. */
static uint64_t where(void *ud) {
  State *S = ud;
  lua_State *L = S->L;
  char text[BIND_WHERE_MAX];
  if (!lua_checkstack(L, 6) || !bind_where(L, 0, text, sizeof text)) return 0;
  lua_rawgeti(L, LUA_REGISTRYINDEX, S->wheres);
  lua_getfield(L, -1, text);
  int number = (int)lua_tointeger(L, -1);
  if (!number) {
    number = (int)lua_objlen(L, -2) + 1;
    lua_pushstring(L, text);
    lua_rawseti(L, -3, number);
    lua_pushinteger(L, number);
    lua_setfield(L, -3, text);
  }
  lua_pop(L, 2);
  return (uint64_t)number;
}

/* The table keeps the text. */
static const char *where_text(void *ud, uint64_t number) {
  State *S = ud;
  lua_State *L = S->L;
  if (!lua_checkstack(L, 4)) return NULL;
  lua_rawgeti(L, LUA_REGISTRYINDEX, S->wheres);
  lua_rawgeti(L, -1, (int)number);
  const char *text = lua_tostring(L, -1);
  lua_pop(L, 2);
  return text;
}

/* -- backward, grad ---------------------------------------------------------------------------- */

typedef struct Options {
  bool retain_graph, create_graph, allow_unused;
  bool retain_given;
} Options;

enum { TABLES = 2 };

/* Reads the table at `index`, where there is one. Of the keys in `tables` (up to two; NULL: not
 * known) the value is put at the stack index index + 1, index + 2. */
static Options read_options(lua_State *L, int index, const char *function,
                            const char *const *tables) {
  Options o = {0};
  for (int k = 0; k < TABLES; k++) lua_pushnil(L);
  if (lua_isnoneornil(L, index)) return o;
  if (!lua_istable(L, index))
    bind_error(L, "%s: the last argument must be a table of options", function);
  lua_pushnil(L);
  while (lua_next(L, index)) {
    const char *key = lua_type(L, -2) == LUA_TSTRING ? lua_tostring(L, -2) : "?";
    int table = 0;
    while (table < TABLES && !(tables[table] && !strcmp(tables[table], key))) table++;
    if (table < TABLES) {
      lua_replace(L, index + 1 + table);
      continue;
    }
    bool *at = !strcmp(key, "retain_graph")   ? &o.retain_graph
               : !strcmp(key, "create_graph") ? &o.create_graph
               : !strcmp(key, "allow_unused") ? &o.allow_unused
                                              : NULL;
    if (!at)
      bind_error(
          L, "%s: there is no option '%s'; there are retain_graph, create_graph, allow_unused, %s",
          function, key, tables[0]);
    if (!lua_isboolean(L, -1)) bind_error(L, "%s: %s must be true or false", function, key);
    *at = lua_toboolean(L, -1);
    o.retain_given |= at == &o.retain_graph;
    lua_pop(L, 1);
  }
  if (!o.retain_given) o.retain_graph = o.create_graph;
  return o;
}

/* Tensors of a table (or one tensor) into a new block on Lua's stack, so that errors lose nothing.
 */
static Tensor **read_tensors(State *S, lua_State *L, int index, const char *function,
                             const char *arg, int *n) {
  bool one = bind_to_tensor(S, L, index) != NULL;
  if (!one && !lua_istable(L, index))
    bind_error(L, "%s: %s must be a tensor or a table of tensors, is a %s", function, arg,
               luaL_typename(L, index));
  *n = one ? 1 : (int)lua_objlen(L, index);
  Tensor **list = lua_newuserdata(L, sizeof *list * (size_t)(*n + 1));
  lua_createtable(L, *n, 0); /* keeps them, since hooks may change the caller's */
  for (int k = 0; k < *n; k++) {
    if (one) lua_pushvalue(L, index);
    else lua_rawgeti(L, index, k + 1);
    list[k] = bind_check_tensor(S, L, -1, function, arg);
    lua_rawseti(L, -2, k + 1);
  }
  lua_setfenv(L, -2);
  return list;
}

static Tensor **read_inputs(State *S, lua_State *L, int index, const char *function, int *n) {
  Tensor **inputs = read_tensors(S, L, index, function, "inputs", n);
  if (!*n) bind_error(L, "%s: there are no inputs", function);
  for (int k = 0; k < *n; k++)
    if (!tensor_requires_grad(inputs[k]))
      bind_error(L, "%s: inputs[%d] does not require a gradient", function, k + 1);
  return inputs;
}

/* Room for the gradients of n inputs on Lua's stack. */
static Tensor **new_grads(lua_State *L, int n) {
  Tensor **grads = lua_newuserdata(L, sizeof *grads * (size_t)(n + 1));
  memset(grads, 0, sizeof *grads * (size_t)(n + 1));
  return grads;
}

/* x:backward(gradient, {retain_graph=, create_graph=, inputs=}) */
static int backward(lua_State *L) {
  static const char *const tables[TABLES] = {"inputs", NULL};
  State *S = bind_state(L);
  Tensor *t = bind_check_tensor(S, L, 1, "backward", "the first argument"), *g = NULL;
  if (lua_gettop(L) > 3)
    return bind_error(L,
                      "backward: two arguments are possible: the gradient, and a table of options");
  if (lua_istable(L, 2) && lua_isnoneornil(L, 3)) {
    lua_pushnil(L);
    lua_insert(L, 2);
  }
  lua_settop(L, 3);
  if (!lua_isnil(L, 2)) g = bind_check_tensor(S, L, 2, "backward", "gradient");
  Options o = read_options(L, 3, "backward", tables);
  Backward b = {.n_out = 1,
                .outputs = &t,
                .gout = &g,
                .retain_graph = o.retain_graph,
                .create_graph = o.create_graph};
  if (!lua_isnil(L, 4)) {
    b.inputs = read_inputs(S, L, 4, "backward", &b.n_in);
    b.grads = new_grads(L, b.n_in);
  }
  int rc = bind_backward(S, L, &b, 1, 2);
  for (int k = 0; k < b.n_in; k++) {
    if (!rc && b.grads[k]) rc = tape_accumulate(S->E, b.inputs[k], b.grads[k], b.create_graph);
    tensor_release(b.grads[k]);
  }
  if (rc) return bind_raise_kept(S, L, rc);
  bind_pay(S, L);
  return 0;
}

static int unused_input(int k) {
  return err_set(MF_EINVAL,
                 "grad: inputs[%d] was not used to make the outputs; pass {allow_unused = true} to "
                 "get nil for it",
                 k + 1);
}

/* mf.grad(outputs, inputs, {grad_outputs=, create_graph=, retain_graph=, allow_unused=}): a table
 * of gradients. */
static int grad(lua_State *L) {
  static const char *const tables[TABLES] = {"grad_outputs", NULL};
  State *S = bind_state(L);
  Backward b = {0};
  int n_given = 0;
  if (lua_gettop(L) > 3)
    return bind_error(
        L, "grad: three arguments are possible: outputs, inputs, and a table of options");
  lua_settop(L, 3);
  Options o = read_options(L, 3, "grad", tables);
  b.retain_graph = o.retain_graph;
  b.create_graph = o.create_graph;
  b.outputs = read_tensors(S, L, 1, "grad", "outputs", &b.n_out);
  b.inputs = read_inputs(S, L, 2, "grad", &b.n_in);
  if (!lua_isnil(L, 4)) b.gout = read_tensors(S, L, 4, "grad", "grad_outputs", &n_given);
  if (b.gout && n_given != b.n_out)
    return bind_error(L, "grad: %d outputs, but %d grad_outputs", b.n_out, n_given);
  if (!b.n_out) return bind_error(L, "grad: there are no outputs");
  b.grads = new_grads(L, b.n_in);
  int rc = bind_backward(S, L, &b, 1, 1);
  for (int k = 0; k < b.n_in && !rc && !o.allow_unused; k++)
    if (!b.grads[k]) rc = unused_input(k);
  if (rc) {
    for (int k = 0; k < b.n_in; k++) tensor_release(b.grads[k]);
    return bind_raise_kept(S, L, rc);
  }
  if (!bind_push_list(S, L, b.grads, b.n_in, true)) return 1;
  for (int k = 0; k < b.n_in; k++) tensor_release(b.grads[k]);
  return lua_error(L);
}

/* mf._with_gradients(params, f, ...): the results of f(gradients, ...). gradients[i] is that of
 * params[i] or false; these handles end with f, so that a gradient's memory is free as soon as it
 * is dropped, not when the collector finds what an optimiser has read. */
static int with_gradients(lua_State *L) {
  State *S = bind_state(L);
  luaL_checktype(L, 1, LUA_TTABLE);
  luaL_checktype(L, 2, LUA_TFUNCTION);
  int n = (int)lua_objlen(L, 1), rc;
  lua_createtable(L, n, 0);
  for (int k = 1; k <= n; k++) {
    lua_rawgeti(L, 1, k);
    Tensor *t = bind_check_tensor(S, L, -1, "gradients", "params");
    if (eager_uses_gradient(S->E, t, false)) return bind_raise(L);
    if (t->ag && t->ag->grad) bind_push_own(S, L, t->ag->grad);
    else lua_pushboolean(L, 0);
    lua_rawseti(L, -3, k);
    lua_pop(L, 1);
  }
  lua_pushvalue(L, -1);
  lua_replace(L, 1);
  lua_insert(L, 3);
  rc = lua_pcall(L, lua_gettop(L) - 2, LUA_MULTRET, 0);
  for (int k = 1; k <= n; k++) {
    lua_rawgeti(L, 1, k);
    bind_close(S, L, lua_gettop(L));
    lua_pop(L, 1);
  }
  return rc ? lua_error(L) : lua_gettop(L) - 1;
}

void bind_open_grad(State *S, lua_State *L) {
  static const luaL_Reg functions[] = {{"no_grad", no_grad},
                                       {"enable_grad", enable_grad},
                                       {"set_grad_enabled", set_grad_enabled},
                                       {"is_grad_enabled", is_grad_enabled},
                                       {"detect_anomaly", detect_anomaly},
                                       {"set_detect_anomaly", set_detect_anomaly},
                                       {"grad", grad},
                                       {"_with_gradients", with_gradients},
                                       {"device", device},
                                       {"get_default_device", get_default_device},
                                       {"set_default_device", set_default_device},
                                       {NULL, NULL}};
  for (const luaL_Reg *f = functions; f->name; f++) bind_function(S, L, f->name, f->func);
  lua_rawgeti(L, LUA_REGISTRYINDEX, S->methods);
  bind_function(S, L, "backward", backward);
  lua_pop(L, 1);
  lua_pushcfunction(L, add_traceback);
  S->traceback = luaL_ref(L, LUA_REGISTRYINDEX);
  lua_newtable(L);
  S->wheres = luaL_ref(L, LUA_REGISTRYINDEX);
  S->E->owner.where = where;
  S->E->owner.where_text = where_text;
}
