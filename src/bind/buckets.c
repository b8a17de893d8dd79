/* Averaging gradients over ranks, for lua/nn_parallel.lua; see eager/buckets.h.
 *
 *   mf._buckets(group, tag, leaves, names, sparse, find_unused)
 *   b:arrange(list)     list of tables of leaves' numbers, from 1
 *   b:begin(outputs)    the next backward averages; outputs: a table of tensors
 *   b:begin_local()     the next one does not
 *   b:order()           the leaves' numbers in the order of their gradients, or nil */
#include "buckets.h"

#include <string.h>

#include "state.h"

static const char buckets_type[] = "moonflow.buckets";

static Buckets *check_buckets(lua_State *L) {
  return *(Buckets **)luaL_checkudata(L, 1, buckets_type);
}

/* Room for n things on Lua's stack, so that errors lose nothing. */
static void *room(lua_State *L, int n, size_t size) {
  return lua_newuserdata(L, (size_t)n * size + 1);
}

/* The tensors of the table at an index, which keeps them. */
static Tensor **read_tensors(State *S, lua_State *L, int index, int n) {
  Tensor **list = room(L, n, sizeof *list);
  for (int i = 0; i < n; i++) {
    lua_rawgeti(L, index, i + 1);
    list[i] = bind_check_tensor(S, L, -1, "DistributedDataParallel", "an entry");
    lua_pop(L, 1);
  }
  return list;
}

static int read_number(lua_State *L, int index, int i) {
  lua_rawgeti(L, index, i);
  int v = (int)lua_tointeger(L, -1);
  lua_pop(L, 1);
  return v;
}

static int method_arrange(lua_State *L) {
  Buckets *b = check_buckets(L);
  luaL_checktype(L, 2, LUA_TTABLE);
  int n = buckets_count(b), n_buckets = (int)lua_objlen(L, 2), at = 0;
  int *order = room(L, n, sizeof *order), *sizes = room(L, n_buckets, sizeof *sizes);
  for (int k = 0; k < n_buckets; k++) {
    lua_rawgeti(L, 2, k + 1);
    sizes[k] = (int)lua_objlen(L, -1);
    for (int i = 1; i <= sizes[k] && at < n; i++)
      order[at++] = read_number(L, lua_gettop(L), i) - 1;
    lua_pop(L, 1);
  }
  luaL_argcheck(L, at == n, 2, "each leaf must be there once");
  return buckets_arrange(b, n_buckets, sizes, order) ? bind_raise(L) : 0;
}

static int method_begin(lua_State *L) {
  State *S = bind_state(L);
  Buckets *b = check_buckets(L);
  luaL_checktype(L, 2, LUA_TTABLE);
  int n = (int)lua_objlen(L, 2);
  Tensor **outputs = read_tensors(S, L, 2, n);
  return buckets_begin(b, n, outputs) ? bind_raise(L) : 0;
}

static int method_begin_local(lua_State *L) {
  buckets_begin_local(check_buckets(L));
  return 0;
}

static int method_order(lua_State *L) {
  Buckets *b = check_buckets(L);
  const int *order = buckets_order(b);
  if (!order) return 0;
  lua_createtable(L, buckets_count(b), 0);
  for (int i = 0; i < buckets_count(b); i++) {
    lua_pushinteger(L, order[i] + 1);
    lua_rawseti(L, -2, i + 1);
  }
  return 1;
}

static int buckets_gc(lua_State *L) {
  Buckets **b = lua_touserdata(L, 1);
  buckets_destroy(*b);
  *b = NULL;
  return 0;
}

static Buckets **push_buckets(State *S, lua_State *L) {
  Buckets **b = lua_newuserdata(L, sizeof *b);
  *b = NULL;
  if (luaL_newmetatable(L, buckets_type)) {
    lua_newtable(L);
    bind_function(S, L, "arrange", method_arrange);
    bind_function(S, L, "begin", method_begin);
    bind_function(S, L, "begin_local", method_begin_local);
    bind_function(S, L, "order", method_order);
    lua_setfield(L, -2, "__index");
    lua_pushcfunction(L, buckets_gc);
    lua_setfield(L, -2, "__gc");
  }
  lua_setmetatable(L, -2);
  return b;
}

static int make_buckets(lua_State *L) {
  State *S = bind_state(L);
  lua_settop(L, 6);
  for (int i = 3; i <= 5; i++) luaL_checktype(L, i, LUA_TTABLE);
  CommGroup *g = bind_read_group(S, L, 1, "DistributedDataParallel");
  if (g) g = comm_group_apart(g, (uint64_t)luaL_checkinteger(L, 2));
  if (!g) return bind_raise(L);
  int n = (int)lua_objlen(L, 3);
  Tensor **leaves = read_tensors(S, L, 3, n);
  const char **names = room(L, n, sizeof *names);
  bool *sparse = room(L, n, sizeof *sparse);
  for (int i = 0; i < n; i++) {
    lua_rawgeti(L, 4, i + 1);
    names[i] = luaL_checkstring(L, -1); /* the table keeps it */
    lua_rawgeti(L, 5, i + 1);
    sparse[i] = lua_toboolean(L, -1);
    lua_pop(L, 2);
  }
  Buckets **b = push_buckets(S, L);
  *b = buckets_create(S->E, g, n, leaves, names, sparse, lua_toboolean(L, 6));
  return *b ? 1 : bind_raise(L);
}

void bind_open_buckets(State *S, lua_State *L) {
  bind_function(S, L, "_buckets", make_buckets);
}
