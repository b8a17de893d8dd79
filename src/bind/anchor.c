/* Anchors: how hooks and the state of mf.Functions live on the tape.
 *
 * They are Lua values, but the tape is in C and keeps none: were they in the registry, a hook that
 * mentions its tensor would never be collected. They lie in a table, the anchor, which is the
 * environment of the tensor's userdata. What is made from an anchored tensor must keep the hook
 * alive too, though not the tensor: so its userdata has the same anchor for environment, or one
 * with several parents. A pass starts at tensors whose userdata are at hand, walks their anchors,
 * and so finds all hooks of the graph below.
 *
 *   anchor[1..n]   parents
 *   anchor[-key]   a list of hooks, {n = how many were made, [i] = function}, or the context of a
 *                  function; key_of() names an output of a node, whose number is never given twice
 *   anchor.of      the tensor whose own it is, as light userdata
 *
 * Where the userdata is not at hand (a base that is written through a view), the anchor is pinned:
 * kept by the State until the tensor ends. */
#include <string.h>

#include "anchor.h"

enum {
  OUTPUTS = 1024,
  CONTEXT = OUTPUTS - 1
}; /* a function's context stands where output 1023 would */

static double key_of(uint64_t seq, int output) {
  return -((double)seq * OUTPUTS + output + 1);
}

/* -- Anchors of values ------------------------------------------------------------------------- */

/* A tensor may get a second userdata (C kept it), whose environment is what Lua gave it. */
static bool is_foreign(lua_State *L, int environment) {
  return lua_rawequal(L, environment, LUA_ENVIRONINDEX) ||
         lua_rawequal(L, environment, LUA_GLOBALSINDEX);
}

/* Pushes the anchor of the tensor at an index; false and nothing when it has none. */
static bool push_anchor(State *S, lua_State *L, int index) {
  Tensor *t = bind_to_tensor(S, L, index);
  if (!t || !t->anchored) return false;
  if (t->pinned) {
    lua_rawgeti(L, LUA_REGISTRYINDEX, S->anchor_pins);
    lua_pushlightuserdata(L, t);
    lua_rawget(L, -2);
    lua_remove(L, -2);
  } else {
    lua_getfenv(L, index);
    if (!is_foreign(L, -1)) return true;
    lua_pop(L, 1);
    return false;
  }
  return true;
}

/* Takes the anchor at the top to be that of t, whose userdata is at index (0: not at hand). */
static void set_anchor(State *S, lua_State *L, Tensor *t, int index) {
  if (index && !t->pinned) {
    lua_setfenv(L, index);
  } else {
    lua_rawgeti(L, LUA_REGISTRYINDEX, S->anchor_pins);
    lua_pushlightuserdata(L, t);
    lua_pushvalue(L, -3);
    lua_rawset(L, -3);
    lua_pop(L, 2);
    t->pinned = true;
  }
  t->anchored = true;
  S->has_anchors = true;
}

void bind_pin(State *S, lua_State *L, int index) {
  Tensor *t = bind_to_tensor(S, L, index);
  if (t->pinned) return;
  bool any = push_anchor(S, L, index);
  t->pinned = true;
  if (any) set_anchor(S, L, t, index);
}

static void unpin(void *ud, Tensor *t) {
  State *S = ud;
  lua_State *L = S->aside;
  lua_rawgeti(L, LUA_REGISTRYINDEX, S->anchor_pins);
  lua_pushlightuserdata(L, t);
  lua_rawget(L, -2);
  if (!lua_isnil(L, -1)) { /* else a new key would be made */
    lua_pushlightuserdata(L, t);
    lua_pushnil(L);
    lua_rawset(L, -4);
  }
  lua_pop(L, 2);
}

/* Adds the anchor at the top to the list at `list`, unless it is there. Pops it. */
static void add_parent(lua_State *L, int list) {
  int n = (int)lua_objlen(L, list);
  for (int i = 1; i <= n; i++) {
    lua_rawgeti(L, list, i);
    bool same = lua_rawequal(L, -1, -2);
    lua_pop(L, 1);
    if (same) {
      lua_pop(L, 1);
      return;
    }
  }
  lua_rawseti(L, list, n + 1);
}

/* Pushes a list of the anchors of the n values from `first`, tensors or tables of them. */
static int push_anchors(State *S, lua_State *L, int first, int n) {
  lua_newtable(L);
  int list = lua_gettop(L);
  for (int k = first; k < first + n; k++) {
    if (push_anchor(S, L, k)) add_parent(L, list);
    if (lua_type(L, k) != LUA_TTABLE) continue;
    int entries = (int)lua_objlen(L, k);
    for (int i = 1; i <= entries; i++) {
      lua_rawgeti(L, k, i);
      if (push_anchor(S, L, lua_gettop(L))) add_parent(L, list);
      lua_pop(L, 1);
    }
  }
  return list;
}

/* The list at the top becomes one anchor: its only entry, or itself. */
static void join(lua_State *L) {
  if (lua_objlen(L, -1) != 1) return;
  lua_rawgeti(L, -1, 1);
  lua_replace(L, -2);
}

static void anchor_tensor(State *S, lua_State *L, Tensor *t, int index, int list) {
  lua_newtable(L);
  int own = lua_gettop(L), n = (int)lua_objlen(L, list);
  if (index && push_anchor(S, L, index)) add_parent(L, own);
  for (int i = 1; i <= n; i++) {
    lua_rawgeti(L, list, i);
    add_parent(L, own);
  }
  join(L);
  set_anchor(S, L, t, index);
}

void bind_anchor(State *S, lua_State *L, int index, int first, int n) {
  int top = lua_gettop(L);
  luaL_checkstack(L, 12, "too many values");
  if (lua_type(L, index) == LUA_TTABLE) { /* Tensor[] */
    for (int i = 1, entries = (int)lua_objlen(L, index); i <= entries; i++) {
      lua_rawgeti(L, index, i);
      bind_anchor(S, L, lua_gettop(L), first, n);
      lua_pop(L, 1);
    }
    return;
  }
  Tensor *t = bind_to_tensor(S, L, index), *base = t ? tensor_base(t) : NULL;
  int list = push_anchors(S, L, first, n);
  if (t && lua_objlen(L, list)) {
    anchor_tensor(S, L, t, index, list);
    if (base != t) anchor_tensor(S, L, base, 0, list);
  }
  lua_settop(L, top);
}

/* -- Hooks ------------------------------------------------------------------------------------- */

/* Pushes the anchor that the tensor at index has for itself, made when missing. */
static void push_own_anchor(State *S, lua_State *L, Tensor *t, int index) {
  bool any = push_anchor(S, L, index);
  if (any) {
    lua_getfield(L, -1, "of");
    bool own = lua_touserdata(L, -1) == t;
    lua_pop(L, 1);
    if (own) return;
  }
  lua_newtable(L);
  lua_pushlightuserdata(L, t);
  lua_setfield(L, -2, "of");
  if (any) {
    lua_insert(L, -2);
    lua_rawseti(L, -2, 1);
  }
  lua_pushvalue(L, -1);
  set_anchor(S, L, t, index);
}

/* Names what the hooks of t see: an output of a node, or a leaf. */
static int name_gradient(Eager *E, Tensor *t, double *key) {
  Node *n;
  int output;
  int rc = tape_node(E, t, &n, &output);
  if (rc) return rc;
  if (!n && !t->ag->id) t->ag->id = E->next_seq++;
  *key = n ? key_of(n->seq, output) : key_of(t->ag->id, 0);
  return 0;
}

/* t:register_hook(f): f(gradient) runs when t's gradient is whole, and may return another for it.
 * Returns a handle with :remove(). */
static int register_hook(lua_State *L) {
  State *S = bind_state(L);
  Tensor *t = bind_check_tensor(S, L, 1, "register_hook", "the first argument");
  double key;
  if (lua_type(L, 2) != LUA_TFUNCTION)
    return bind_error(L, "register_hook: f must be a function, is a %s", luaL_typename(L, 2));
  if (!tensor_requires_grad(t))
    return bind_error(L, "register_hook: the tensor does not require a gradient");
  if (name_gradient(S->E, t, &key)) return bind_raise(L);
  lua_settop(L, 2);
  push_own_anchor(S, L, t, 1);
  lua_pushnumber(L, key);
  lua_rawget(L, 3);
  if (lua_isnil(L, 4)) {
    lua_newtable(L);
    lua_replace(L, 4);
    lua_pushnumber(L, key);
    lua_pushvalue(L, 4);
    lua_rawset(L, 3);
  }
  lua_getfield(L, 4, "n");
  int n = (int)lua_tointeger(L, -1) + 1;
  lua_pushinteger(L, n);
  lua_setfield(L, 4, "n");
  lua_pushvalue(L, 2);
  lua_rawseti(L, 4, n);
  lua_createtable(L, 0, 2);
  lua_pushvalue(L, 4);
  lua_setfield(L, -2, "hooks");
  lua_pushinteger(L, n);
  lua_setfield(L, -2, "place");
  lua_rawgeti(L, LUA_REGISTRYINDEX, S->hook_handle_mt);
  lua_setmetatable(L, -2);
  return 1;
}

/* handle:remove() */
static int remove_hook(lua_State *L) {
  luaL_checktype(L, 1, LUA_TTABLE);
  lua_getfield(L, 1, "hooks");
  lua_getfield(L, 1, "place");
  if (!lua_istable(L, -2))
    return bind_error(L, "remove: the argument must be what register_hook returned");
  lua_pushnil(L);
  lua_rawseti(L, -3, (int)lua_tointeger(L, -2));
  return 0;
}

/* -- A pass ------------------------------------------------------------------------------------ */

typedef struct Pass {
  int anchors;          /* reference: hooks and contexts by key */
  int root;             /* reference: the anchor of the tensors at which it began */
  VEC(Tensor *) leaves; /* that got a gradient of which there is a graph; counted */
  struct Pass *outer;
} Pass;

/* Copies what the anchors at the stack index `list` and their parents hold into the table at `all`.
 */
static void walk(lua_State *L, int list, int all) {
  lua_newtable(L); /* anchor -> true */
  lua_newtable(L); /* those still to be walked */
  int seen = lua_gettop(L) - 1, queue = seen + 1, n = 1;
  lua_pushvalue(L, list);
  lua_rawseti(L, queue, 1);
  while (n > 0) {
    lua_rawgeti(L, queue, n--);
    int at = lua_gettop(L);
    for (lua_pushnil(L); lua_next(L, at); lua_settop(L, at + 1)) {
      if (lua_type(L, at + 1) != LUA_TNUMBER) continue;
      bool parent = lua_tonumber(L, at + 1) > 0;
      lua_pushvalue(L, parent ? at + 2 : at + 1);
      lua_rawget(L, parent ? seen : all);
      if (!lua_isnil(L, -1)) continue;
      lua_pushvalue(L, parent ? at + 2 : at + 1);
      if (parent) lua_pushboolean(L, 1);
      else lua_pushvalue(L, at + 2);
      lua_rawset(L, parent ? seen : all);
      if (!parent) continue;
      lua_pushvalue(L, at + 2);
      lua_rawseti(L, queue, ++n);
    }
    lua_settop(L, at - 1);
  }
  lua_settop(L, seen - 1);
}

/* Pushes what the pass has under a key, or nil. */
static void push_entry(State *S, lua_State *L, double key) {
  lua_rawgeti(L, LUA_REGISTRYINDEX, S->pass->anchors);
  lua_pushnumber(L, key);
  lua_rawget(L, -2);
  lua_remove(L, -2);
}

static int replace_gradient(State *S, lua_State *L, Tensor **g) {
  char what[160];
  Tensor *t = bind_to_tensor(S, L, -1);
  if (lua_isnil(L, -1)) return 0;
  if (!t || !tensor_same_shape(t, *g) || t->m.dtype != (*g)->m.dtype)
    return err_set(MF_EINVAL,
                   "backward: a hook returned %s, which is no gradient like the one it got",
                   bind_describe(S, L, -1, what, sizeof what));
  tensor_retain(t);
  tensor_release(*g);
  *g = t;
  return 0;
}

/* Runs the list of hooks at the top of the stack on *g. */
static int run_hooks(State *S, lua_State *L, Tensor **g) {
  int list = lua_gettop(L), rc = 0;
  lua_getfield(L, list, "n");
  int n = (int)lua_tointeger(L, -1);
  for (int i = 1; i <= n && !rc; i++) {
    lua_rawgeti(L, list, i);
    if (lua_isnil(L, -1)) continue;
    bind_push(S, L, tensor_retain(*g));
    rc = bind_protected(S, L, 1, 1);
    if (!rc) rc = replace_gradient(S, L, g);
    lua_settop(L, list);
  }
  return rc;
}

static int keep_leaf(Pass *pass, Tensor *leaf) {
  if (!vec_push(&pass->leaves, leaf)) return err_set(MF_ENOMEM, "backward: out of memory");
  tensor_retain(leaf);
  return 0;
}

typedef struct Hooking {
  State *S;
  Node *n;
  Tensor **g;
  uint64_t seq;
  int rc;
} Hooking;

/* Guarded. Argument: the Hooking. */
static int run_all_hooks(lua_State *L) {
  Hooking *h = lua_touserdata(L, 1);
  for (int k = 0; k < h->n->n_out && !h->rc; k++) {
    if (!h->g[k]) continue;
    push_entry(h->S, L, key_of(h->seq, k));
    if (lua_istable(L, -1)) h->rc = run_hooks(h->S, L, &h->g[k]);
    lua_settop(L, 1);
  }
  return 0;
}

static int hook(void *ud, Node *n, Tensor **g) {
  State *S = ud;
  lua_State *L = S->L;
  bool leaf = n->kind == NODE_ACCUMULATE;
  Hooking h = {S, n, g, !leaf ? n->seq : n->leaf ? n->leaf->ag->id : 0, 0};
  if (!lua_checkstack(L, LUA_MINSTACK)) return err_set(MF_ENOMEM, "backward: Lua's stack is full");
  if (leaf && n->leaf && S->E->grad_enabled) h.rc = keep_leaf(S->pass, n->leaf);
  if (h.rc || !h.seq) return h.rc;
  int rc = bind_guarded(S, L, run_all_hooks, &h);
  return rc ? rc : h.rc;
}

/* The pass may have made a graph of gradients, which leads to the same hooks. */
static void anchor_gradients(State *S, lua_State *L, const Pass *pass) {
  for (size_t i = 0; i < pass->leaves.n; i++) {
    Tensor *leaf = pass->leaves.at[i], *g = leaf->ag ? leaf->ag->grad : NULL;
    if (!g || !g->ag || !g->ag->node || g->anchored) continue;
    lua_rawgeti(L, LUA_REGISTRYINDEX, pass->root);
    set_anchor(S, L, g, 0);
  }
}

typedef struct Ending {
  State *S;
  const Pass *pass;
  const Backward *b;
} Ending;

/* Guarded. Argument: the Ending. */
static int anchor_results(lua_State *L) {
  const Ending *e = lua_touserdata(L, 1);
  anchor_gradients(e->S, L, e->pass);
  for (int k = 0; k < e->b->n_in && e->b->create_graph; k++) {
    if (!e->b->grads[k] || e->b->grads[k]->anchored) continue;
    lua_rawgeti(L, LUA_REGISTRYINDEX, e->pass->root);
    set_anchor(e->S, L, e->b->grads[k], 0);
  }
  return 0;
}

static void end_pass(lua_State *L, Pass *pass) {
  for (size_t i = 0; i < pass->leaves.n; i++) tensor_release(pass->leaves.at[i]);
  vec_free(&pass->leaves);
  luaL_unref(L, LUA_REGISTRYINDEX, pass->anchors);
  luaL_unref(L, LUA_REGISTRYINDEX, pass->root);
}

/* Makes the references of a pass from the list of anchors at the top. Argument: the Pass, the list.
 */
static int begin_pass(lua_State *L) {
  Pass *pass = lua_touserdata(L, 1);
  lua_newtable(L);
  walk(L, 2, 3);
  pass->anchors = luaL_ref(L, LUA_REGISTRYINDEX);
  join(L);
  pass->root = luaL_ref(L, LUA_REGISTRYINDEX);
  return 0;
}

int bind_backward(State *S, lua_State *L, const Backward *b, int first, int n) {
  int top = lua_gettop(L);
  int list = S->has_anchors ? push_anchors(S, L, first, n) : 0;
  S->L = L;
  if (!list || !lua_objlen(L, list)) {
    int (*was)(void *, Node *, Tensor **) = S->E->owner.hook;
    S->E->owner.hook = NULL;
    int rc = tape_backward(S->E, b);
    S->E->owner.hook = was;
    lua_settop(L, top);
    return rc;
  }
  Pass pass = {.outer = S->pass, .anchors = LUA_NOREF, .root = LUA_NOREF};
  lua_pushcfunction(L, begin_pass);
  lua_pushlightuserdata(L, &pass);
  lua_pushvalue(L, list);
  int rc = bind_protected(S, L, 2, 0);
  if (rc) {
    end_pass(L, &pass);
    return rc;
  }
  S->pass = &pass;
  S->L = L;
  int (*was)(void *, Node *, Tensor **) = S->E->owner.hook;
  S->E->owner.hook = hook;
  rc = tape_backward(S->E, b);
  S->L = L;
  S->E->owner.hook = was;
  S->pass = pass.outer;
  int ended = bind_guarded(S, L, anchor_results, &(Ending){S, &pass, b});
  if (!rc) rc = ended;
  end_pass(L, &pass);
  lua_settop(L, top);
  return rc;
}

/* -- Contexts of functions --------------------------------------------------------------------- */

void bind_anchor_context(State *S, lua_State *L, uint64_t seq, int ctx, int inputs) {
  int list = push_anchors(S, L, inputs, 1);
  lua_newtable(L);
  lua_pushnumber(L, key_of(seq, CONTEXT));
  lua_pushvalue(L, ctx);
  lua_rawset(L, -3);
  lua_rawseti(L, list, (int)lua_objlen(L, list) + 1);
}

void bind_set_anchors(State *S, lua_State *L, int index, int list) {
  int top = lua_gettop(L);
  anchor_tensor(S, L, bind_to_tensor(S, L, index), index, list);
  lua_settop(L, top);
}

bool bind_push_context(State *S, lua_State *L, uint64_t seq) {
  if (!S->pass) return false;
  push_entry(S, L, key_of(seq, CONTEXT));
  return !lua_isnil(L, -1);
}

void bind_open_anchors(State *S, lua_State *L) {
  lua_newtable(L);
  S->anchor_pins = luaL_ref(L, LUA_REGISTRYINDEX);
  lua_newtable(L);
  lua_pushvalue(L, -1);
  lua_setfield(L, -2, "__index");
  bind_function(S, L, "remove", remove_hook);
  S->hook_handle_mt = luaL_ref(L, LUA_REGISTRYINDEX);
  S->E->owner.unpin = unpin;
  lua_rawgeti(L, LUA_REGISTRYINDEX, S->methods);
  bind_function(S, L, "register_hook", register_hook);
  lua_pop(L, 1);
}
