/* Handles: the userdata of tensors; scopes; and how errors are raised.
 *
 * A result of an op gets a new userdata. A tensor that C keeps as well (a leaf, which the tape
 * holds, or a gradient) has one userdata, found again through a weak table, so that hooks and
 * identity survive. While a gradient line runs, results go into handles made beforehand, which are
 * emptied when the line returns: a backward pass makes no garbage of its own. */
#include <stdio.h>
#include <string.h>

#include "state.h"

/* -- Errors ------------------------------------------------------------------------------------ */

bool bind_where(lua_State *L, int level, char *buf, size_t n) {
  lua_Debug frame;
  for (; lua_getstack(L, level, &frame); level++) {
    lua_getinfo(L, "Sl", &frame);
    if (frame.currentline <= 0 || !strncmp(frame.source, "=moonflow", 9)) continue;
    snprintf(buf, n, "%s:%d", frame.short_src, frame.currentline);
    return true;
  }
  return false;
}

static void push_where(lua_State *L) {
  char text[BIND_WHERE_MAX];
  if (bind_where(L, 1, text, sizeof text)) lua_pushfstring(L, "%s: ", text);
  else lua_pushliteral(L, "");
}

int bind_raise(lua_State *L) {
  push_where(L);
  lua_pushstring(L, err_text());
  lua_concat(L, 2);
  return lua_error(L);
}

int bind_error(lua_State *L, const char *format, ...) {
  va_list args;
  push_where(L);
  va_start(args, format);
  lua_pushvfstring(L, format, args);
  va_end(args);
  lua_concat(L, 2);
  return lua_error(L);
}

/* -- Pushing ----------------------------------------------------------------------------------- */

void bind_share(State *S, lua_State *L, int index) {
  Handle *h = lua_touserdata(L, index);
  lua_pushvalue(L, index);
  lua_rawgeti(L, LUA_REGISTRYINDEX, S->handles);
  lua_pushlightuserdata(L, h->t);
  lua_pushvalue(L, -3);
  lua_rawset(L, -3);
  lua_pop(L, 2);
  h->t->registered = true;
}

/* Pushes the shared userdata of t; false when there is none. */
static bool push_registered(State *S, lua_State *L, Tensor *t) {
  if (!t->registered) return false;
  lua_rawgeti(L, LUA_REGISTRYINDEX, S->handles);
  lua_pushlightuserdata(L, t);
  lua_rawget(L, -2);
  Handle *h = lua_touserdata(L, -1);
  if (h && h->t == t) {
    lua_remove(L, -2);
    return true;
  }
  lua_pop(L, 2);
  return false;
}

/* Lua may run out of memory, and raise, while t is nobody's. So it is noted in `flight`, and
 * released by a later push that finds it there. Lua's finalizers may push meanwhile, but their
 * frames lie deeper in the C stack than that of the push that waits for them: what was noted at a
 * frame that is not further out is left over. */
static Handle *push_new(State *S, lua_State *L, Tensor *t) {
  const char *frame = __builtin_frame_address(0);
  while (S->n_flight && S->flight[S->n_flight - 1].frame <= frame)
    tensor_release(S->flight[--S->n_flight].t);
  int n = S->n_flight;
  if (n < FLIGHT) S->flight[S->n_flight++] = (Flight){t, frame};
  Handle *h = lua_newuserdata(L, sizeof *h);
  S->n_flight = n;
  h->tag = S;
  h->t = t;
  h->scope = 0;
  h->keep = false;
  lua_rawgeti(L, LUA_REGISTRYINDEX, S->tensor_mt);
  lua_setmetatable(L, -2);
  return h;
}

/* The handle ends with the scope in which it was made. */
static void enter_scope(State *S, Handle *h) {
  if (S->scope_depth && vec_push(&S->scope, h)) h->scope = (uint32_t)S->scope.n;
}

/* A tensor that has one userdata: a leaf, since the tape holds it and Lua may put hooks on it, or
 * one that C keeps. */
static Handle *push_one(State *S, lua_State *L, Tensor *t) {
  if (push_registered(S, L, t)) {
    tensor_release(t);
    return NULL;
  }
  Handle *h = push_new(S, L, t);
  bind_share(S, L, lua_gettop(L));
  return h;
}

void bind_push(State *S, lua_State *L, Tensor *t) {
  if (!t) {
    lua_pushnil(L);
  } else if (t->ag && t->ag->requires_grad) {
    Handle *h = push_one(S, L, t);
    if (h && !S->line) enter_scope(S, h);
  } else if (S->line && S->line_used < LINE_HANDLES) {
    int k = S->line_used++;
    S->line_handles[k]->t = t;
    lua_rawgeti(L, LUA_REGISTRYINDEX, S->line_handle[k]);
  } else {
    enter_scope(S, push_new(S, L, t));
  }
}

typedef struct Pushing {
  State *S;
  Tensor **list;
  int n;
  bool as_table;
} Pushing;

/* Under lua_pcall. Argument: the Pushing. */
static int push_list(lua_State *L) {
  Pushing *p = lua_touserdata(L, 1);
  luaL_checkstack(L, p->as_table ? 4 : p->n + 4, "too many results");
  if (p->as_table) lua_createtable(L, p->n, 0);
  for (int k = 0; k < p->n; k++) {
    Tensor *t = p->list[k];
    p->list[k] = NULL;
    bind_push(p->S, L, t);
    if (p->as_table) lua_rawseti(L, -2, k + 1);
  }
  return p->as_table ? 1 : p->n;
}

int bind_push_list(State *S, lua_State *L, Tensor **list, int n, bool as_table) {
  Pushing p = {S, list, n, as_table};
  lua_rawgeti(L, LUA_REGISTRYINDEX, S->push_list);
  lua_pushlightuserdata(L, &p);
  return lua_pcall(L, 1, as_table ? 1 : n, 0);
}

void bind_push_shared(State *S, lua_State *L, Tensor *t) {
  if (!t) lua_pushnil(L);
  else push_one(S, L, tensor_retain(t));
}

void bind_push_own(State *S, lua_State *L, Tensor *t) {
  push_new(S, L, tensor_retain(t));
}

void bind_close(State *S, lua_State *L, int index) {
  Handle *h = bind_to_handle(S, L, index);
  Tensor *t = h ? h->t : NULL;
  if (t) h->t = NULL;
  tensor_release(t);
}

Tensor *bind_check_tensor(State *S, lua_State *L, int index, const char *function,
                          const char *arg) {
  char what[160];
  Tensor *t = bind_to_tensor(S, L, index);
  if (!t)
    bind_error(L, "%s: %s must be a tensor, is %s", function, arg,
               bind_describe(S, L, index, what, sizeof what));
  return t;
}

static int handle_gc(lua_State *L) {
  State *S = lua_touserdata(L, lua_upvalueindex(1));
  Handle *h = lua_touserdata(L, 1);
  if (h->scope && h->scope <= S->scope.n) S->scope.at[h->scope - 1] = NULL;
  Tensor *t = h->t;
  h->t = NULL;
  tensor_release(t);
  return 0;
}

/* -- Scopes ------------------------------------------------------------------------------------ */

uint32_t bind_scope_begin(State *S) {
  S->scope_depth++;
  return (uint32_t)S->scope.n;
}

void bind_scope_keep(State *S, lua_State *L, int index, int seen) {
  Handle *h = bind_to_handle(S, L, index);
  if (h) h->keep = true;
  if (lua_type(L, index) != LUA_TTABLE || !lua_checkstack(L, 6)) return;
  lua_pushvalue(L, index);
  lua_rawget(L, seen);
  bool known = !lua_isnil(L, -1);
  lua_pop(L, 1);
  if (known) return;
  lua_pushvalue(L, index);
  lua_pushboolean(L, 1);
  lua_rawset(L, seen);
  for (lua_pushnil(L); lua_next(L, index); lua_pop(L, 1))
    bind_scope_keep(S, L, lua_gettop(L), seen);
}

void bind_scope_end(State *S, uint32_t mark) {
  S->scope_depth--;
  size_t kept = mark;
  for (size_t i = mark; i < S->scope.n; i++) {
    Handle *h = S->scope.at[i];
    if (!h) continue;
    h->scope = 0;
    if (h->keep && S->scope_depth) { /* now of the scope around */
      S->scope.at[kept++] = h;
      h->scope = (uint32_t)kept;
    }
    Tensor *t = h->keep ? NULL : h->t;
    if (t) h->t = NULL;
    h->keep = false;
    tensor_release(t);
  }
  S->scope.n = kept;
}

/* -- The collector ----------------------------------------------------------------------------- */

/* LuaJIT's collector steps by KiB. It sees a few dozen bytes where a tensor holds megabytes, so
 * each batch of them is a debt of as much garbage. A batch is no smaller than Lua's own heap, since
 * a cycle costs as much as that is large. */
void bind_pay(State *S, lua_State *L) {
  enum { BATCH = 64 << 20, MOST = 1 << 21 };
  int64_t charged = S->E->charged;
  if (charged < BATCH || charged >> 10 < lua_gc(L, LUA_GCCOUNT, 0)) return;
  if (charged < (int64_t)device_stats(S->context->devices[DEVICE_CPU]).limit / 16) return;
  S->E->charged = 0;
  lua_gc(L, LUA_GCSTEP, (int)(charged >> 10 < MOST ? charged >> 10 : MOST));
}

static int collect(lua_State *L) {
  lua_gc(L, LUA_GCCOLLECT, 0);
  return 0;
}

/* Memory ran out: what garbage holds is freed. A finalizer of the user's may raise, which must not
 * reach the op that asked. */
static void reclaim(void *ud) {
  State *S = ud;
  S->E->charged = 0;
  lua_State *L = S->L;
  if (!lua_checkstack(L, LUA_MINSTACK)) return;
  int top = lua_gettop(L);
  lua_cpcall(L, collect, NULL);
  lua_settop(L, top);
  S->L = L;
}

/* -- Opening ----------------------------------------------------------------------------------- */

void bind_open_handles(State *S, lua_State *L) {
  lua_newtable(L); /* metatable */
  bind_function(S, L, "__gc", handle_gc);
  lua_pushliteral(L, "Tensor");
  lua_setfield(L, -2, "__metatable");
  S->tensor_mt = luaL_ref(L, LUA_REGISTRYINDEX);
  lua_newtable(L); /* Tensor* -> userdata, weak values */
  lua_newtable(L);
  lua_pushliteral(L, "v");
  lua_setfield(L, -2, "__mode");
  lua_setmetatable(L, -2);
  S->handles = luaL_ref(L, LUA_REGISTRYINDEX);
  for (int k = 0; k < LINE_HANDLES; k++) {
    S->line_handles[k] = push_new(S, L, NULL);
    S->line_handle[k] = luaL_ref(L, LUA_REGISTRYINDEX);
  }
  lua_pushcfunction(L, push_list);
  S->push_list = luaL_ref(L, LUA_REGISTRYINDEX);
  lua_pushboolean(L, false);
  S->error = luaL_ref(L, LUA_REGISTRYINDEX);
  S->E->owner.ud = S;
  S->E->owner.reclaim = reclaim;
}
