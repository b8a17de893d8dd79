/* require 'moonflow': opens the binding in a Lua state.
 *
 * The State lies in the registry, so that a second require in the same Lua state (test runners
 * clear package.loaded) gives the same module and the same types. A host that has a context puts it
 * there before (bind_use_context); otherwise one is made. No global is set. */
#include <lualib.h>
#include <string.h>

#include "embed.h"
#include "moonflow_lua.h"
#include "state.h"

static const char state_key[] = "moonflow.state", context_key[] = "moonflow.context";

void bind_use_context(lua_State *L, Context *context) {
  lua_pushlightuserdata(L, context);
  lua_setfield(L, LUA_REGISTRYINDEX, context_key);
}

State *bind_find_state(lua_State *L) {
  lua_getfield(L, LUA_REGISTRYINDEX, state_key);
  State *S = lua_touserdata(L, -1);
  lua_pop(L, 1);
  return S;
}

/* The last finalizer of the Lua state, since it was made first: no tensor is left. */
static int state_gc(lua_State *L) {
  State *S = lua_touserdata(L, 1);
  while (S->n_flight) tensor_release(S->flight[--S->n_flight].t);
  vec_free(&S->scope);
  str_free(&S->form);
  eager_destroy(S->E);
  context_release(S->context);
  *S = (State){0};
  return 0;
}

static State *state_create(lua_State *L) {
  State *S = lua_newuserdata(L, sizeof *S);
  memset(S, 0, sizeof *S);
  lua_newtable(L);
  lua_pushcfunction(L, state_gc);
  lua_setfield(L, -2, "__gc");
  lua_setmetatable(L, -2);
  lua_getfield(L, LUA_REGISTRYINDEX, context_key);
  S->context = lua_touserdata(L, -1);
  lua_pop(L, 1);
  if (S->context) context_retain(S->context);
  else S->context = context_create();
  if (S->context) S->E = eager_create(S->context);
  S->L = L;
  if (!S->E) luaL_error(L, "moonflow: out of memory");
  S->aside = lua_newthread(L);
  luaL_ref(L, LUA_REGISTRYINDEX); /* lives as long as the state */
  lua_setfield(L, LUA_REGISTRYINDEX, state_key);
  return S;
}

/* Loads an embedded Lua module; upvalue 1 is its index. */
static int load_embedded(lua_State *L) {
  int i = (int)lua_tointeger(L, lua_upvalueindex(1));
  char chunk[80];
  lua_pushfstring(L, "=%s", embed_modules[i].name);
  strncpy(chunk, lua_tostring(L, -1), sizeof chunk - 1);
  chunk[sizeof chunk - 1] = 0;
  if (luaL_loadbuffer(L, embed_modules[i].text, embed_modules[i].size, chunk)) return lua_error(L);
  lua_pushstring(L, embed_modules[i].name);
  lua_call(L, 1, 1);
  return 1;
}

static void preload(lua_State *L) {
  lua_getfield(L, LUA_REGISTRYINDEX, "_LOADED");
  lua_getfield(L, -1, "package");
  lua_getfield(L, -1, "preload");
  for (int i = 0; embed_modules[i].name; i++) {
    lua_pushinteger(L, i);
    lua_pushcclosure(L, load_embedded, 1);
    lua_setfield(
        L, -2, strcmp(embed_modules[i].name, "moonflow") ? embed_modules[i].name : "moonflow.init");
  }
  lua_pop(L, 3);
}

static void open_core(State *S, lua_State *L) {
  lua_newtable(L);
  bind_open_handles(S, L);
  bind_open_tensor(S, L);
  bind_open_ops(S, L);
  bind_open_lines(S, L);
  bind_open_grad(S, L);
  bind_open_anchors(S, L);
  bind_open_functions(S, L);
  bind_open_memory(S, L);
  bind_open_worker(S, L);
  bind_open_comm(S, L);
  bind_open_ranks(S, L);
  bind_open_buckets(S, L);
  bind_open_global(S, L);
  bind_open_feed(S, L);
  bind_open_index(S, L);
  bind_open_print(S, L);
  bind_open_file(S, L);
  bind_open_values(S, L);
  bind_open_random(S, L);
  bind_open_table(S, L);
  bind_open_compile(S, L);
  bind_open_profile(S, L);
  bind_open_fault(S, L);
}

MF_LUA_API int luaopen_moonflow(lua_State *L) {
  State *S = bind_find_state(L);
  if (S && !S->E) return luaL_error(L, "moonflow: the Lua state is closing");
  lua_getfield(L, LUA_REGISTRYINDEX, "_LOADED");
  if (!S) {
    S = state_create(L);
    open_core(S, L);
    lua_pushvalue(L, -1);
    S->core = luaL_ref(L, LUA_REGISTRYINDEX);
    preload(L);
  } else {
    lua_rawgeti(L, LUA_REGISTRYINDEX, S->core);
    preload(L);
  }
  lua_pushvalue(L, -1);
  lua_setfield(L, -3, "moonflow.core");
  lua_getglobal(L, "require");
  lua_pushliteral(L, "moonflow.init");
  lua_call(L, 1, 1);
  return 1;
}

void bind_begin_thread(lua_State *L, Context *context, const char *name) {
  luaL_openlibs(L);
  bind_use_context(L, context);
  lua_pushcfunction(L, luaopen_moonflow);
  lua_pushliteral(L, "moonflow");
  lua_call(L, 1, 1);
  lua_getfield(L, LUA_REGISTRYINDEX, "_LOADED");
  lua_pushvalue(L, -2);
  lua_setfield(L, -2, "moonflow");
  lua_getglobal(L, "require");
  lua_pushstring(L, name);
  lua_call(L, 1, 1);
}
