/* mf.Function in C: putting what a user's forward made on the tape, and calling the user's
 * backward. The class is in lua/function.lua; its context lives in the anchors of the outputs. */
#include <string.h>

#include "anchor.h"

enum { CONTEXT = 1, INPUTS, OUTPUTS, CONSTANTS }; /* arguments of _function_record */

/* -- Forward ----------------------------------------------------------------------------------- */

/* The tensors of the table at an index, kept by it, in a block on Lua's stack. */
static Tensor **read_tensors(State *S, lua_State *L, int index, const char *arg, int *n) {
  luaL_checktype(L, index, LUA_TTABLE);
  *n = (int)lua_objlen(L, index);
  Tensor **list = lua_newuserdata(L, sizeof *list * (size_t)(*n + 1));
  for (int k = 0; k < *n; k++) {
    lua_rawgeti(L, index, k + 1);
    list[k] = bind_check_tensor(S, L, lua_gettop(L), "function", arg);
    lua_pop(L, 1);
  }
  return list;
}

static bool is_among(const Tensor *t, Tensor *const *list, int n) {
  for (int k = 0; k < n; k++)
    if (list[k] == t) return true;
  return false;
}

/* The user said that output k has no gradient, or it cannot have one. */
static bool is_constant(lua_State *L, const Tensor *t, int k) {
  lua_rawgeti(L, OUTPUTS, k + 1);
  lua_rawget(L, CONSTANTS);
  bool constant = lua_toboolean(L, -1) || !dtype_is_float((DType)t->m.dtype);
  lua_pop(L, 1);
  return constant;
}

/* Output k gets a handle of its own when it is an input, a view or a leaf. */
static Tensor *own_output(State *S, lua_State *L, Tensor *t, int k, Tensor *const *in, int n_in) {
  if (!t->ag && !is_among(t, in, n_in)) return t;
  t = tensor_alias(t);
  if (!t) {
    bind_raise(L);
    return NULL;
  }
  t->blind = true; /* a write into it would change the other behind the tape's back */
  bind_push(S, L, t);
  lua_rawseti(L, OUTPUTS, k + 1);
  return t;
}

/* mf._function_record(ctx, inputs, outputs, constants): the table of outputs, on the tape but for
 * those that are keys of `constants`. Some may be replaced in it. */
static int function_record(lua_State *L) {
  State *S = bind_state(L);
  int n_in, n_out;
  uint64_t seq = 0;
  lua_settop(L, 4);
  luaL_checktype(L, CONTEXT, LUA_TTABLE);
  luaL_checktype(L, CONSTANTS, LUA_TTABLE);
  Tensor **in = read_tensors(S, L, INPUTS, "an input", &n_in);
  Tensor **out = read_tensors(S, L, OUTPUTS, "a result of forward", &n_out);
  if (n_out > 1000) return bind_error(L, "function: at most 1000 results are possible");
  for (int k = 0; k < n_out; k++)
    out[k] = is_constant(L, out[k], k) ? NULL : own_output(S, L, out[k], k, in, n_in);
  if (tape_record_function(S->E, n_in, in, n_out, out, &seq)) return bind_raise(L);
  if (seq) bind_anchor_context(S, L, seq, CONTEXT, INPUTS);
  int list = lua_gettop(L);
  for (int k = 0; k < n_out && seq; k++) {
    if (!out[k]) continue;
    lua_rawgeti(L, OUTPUTS, k + 1);
    bind_set_anchors(S, L, lua_gettop(L), list);
    lua_pop(L, 1);
  }
  lua_pushvalue(L, OUTPUTS);
  return 1;
}

/* -- Backward ---------------------------------------------------------------------------------- */

/* Pushes a table of the gradients of the outputs and their number n; zeros where there is none. */
static int push_gradients(State *S, lua_State *L, const Node *n, Tensor *const *g) {
  lua_createtable(L, n->n_out, 1);
  lua_pushinteger(L, n->n_out);
  lua_setfield(L, -2, "n");
  for (int k = 0; k < n->n_out; k++) {
    if (!n->out_meta[k].shape) continue; /* a constant */
    Tensor *t = g[k] ? tensor_retain(g[k]) : tape_zeros(S->E, &n->out_meta[k]);
    if (!t) return MF_ENOMEM;
    bind_push(S, L, t);
    lua_rawseti(L, -2, k + 1);
  }
  return 0;
}

static int take_gradients(State *S, lua_State *L, const Node *n, const bool *need, Tensor **gin) {
  char what[160];
  for (int k = 0; k < n->n_in; k++) {
    lua_rawgeti(L, -1, k + 1);
    Tensor *t = bind_to_tensor(S, L, -1);
    if (!t && !lua_isnil(L, -1))
      return err_set(MF_EINVAL,
                     "backward: a function's gradient of input %d is %s and not a tensor", k + 1,
                     bind_describe(S, L, -1, what, sizeof what));
    if (need[k]) gin[k] = tensor_retain(t);
    lua_pop(L, 1);
  }
  return 0;
}

typedef struct Call {
  State *S;
  Node *n;
  Tensor *const *gout;
  const bool *need;
  Tensor **gin;
  int rc;
} Call;

/* Guarded. Argument: the Call. */
static int call_backward(lua_State *L) {
  Call *c = lua_touserdata(L, 1);
  State *S = c->S;
  Node *n = c->n;
  lua_rawgeti(L, LUA_REGISTRYINDEX, S->function_backward);
  int rc = 0;
  if (!bind_push_context(S, L, n->seq))
    rc = err_set(MF_EUNSUPPORTED, "backward: a function's context is gone");
  if (!rc) rc = push_gradients(S, L, n, c->gout);
  lua_createtable(L, n->n_in, 0);
  for (int k = 0; k < n->n_in; k++) {
    lua_pushboolean(L, c->need[k]);
    lua_rawseti(L, -2, k + 1);
  }
  lua_pushboolean(L, S->E->retaining);
  if (!rc) rc = bind_protected(S, L, 4, 1);
  c->rc = rc ? rc : take_gradients(S, L, n, c->need, c->gin);
  return 0;
}

static int function(void *ud, Node *n, Tensor *const *gout, const bool *need, Tensor **gin) {
  State *S = ud;
  lua_State *L = S->L;
  if (!lua_checkstack(L, LUA_MINSTACK)) return err_set(MF_ENOMEM, "backward: Lua's stack is full");
  Call c = {S, n, gout, need, gin, 0};
  int rc = bind_guarded(S, L, call_backward, &c);
  return rc ? rc : c.rc;
}

/* mf._set_function(f): f(ctx, gradients, need, retain) returns a table of the inputs' gradients. */
static int set_function(lua_State *L) {
  State *S = bind_state(L);
  luaL_checktype(L, 1, LUA_TFUNCTION);
  lua_settop(L, 1);
  luaL_unref(L, LUA_REGISTRYINDEX, S->function_backward);
  S->function_backward = luaL_ref(L, LUA_REGISTRYINDEX);
  S->E->owner.function = function;
  return 0;
}

/* mf._check_saved(tensor, version, name): raises when the tensor was freed or written since. */
static int check_saved(lua_State *L) {
  State *S = bind_state(L);
  Tensor *t = bind_check_tensor(S, L, 1, "saved_tensors", "a saved tensor");
  uint32_t version = (uint32_t)luaL_checknumber(L, 2);
  if (t->storage && tape_check_saved(S->E, luaL_checkstring(L, 3), 0, t->storage, version))
    return bind_raise(L);
  return 0;
}

void bind_open_functions(State *S, lua_State *L) {
  S->function_backward = LUA_NOREF;
  bind_function(S, L, "_function_record", function_record);
  bind_function(S, L, "_set_function", set_function);
  bind_function(S, L, "_check_saved", check_saved);
}
