/* Memory and the state as a whole: mf.scope, mf.memory_stats, mf.empty_cache, seeds, threads. */
#include <string.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#include "state.h"
#include "thread.h"

/* Under lua_pcall. Arguments: the State, and values that outlive the scope; returns these. */
static int keep_results(lua_State *L) {
  State *S = lua_touserdata(L, 1);
  int n = lua_gettop(L);
  luaL_checkstack(L, 2, "too many results");
  lua_newtable(L);
  for (int k = 2; k <= n; k++) bind_scope_keep(S, L, k, n + 1);
  lua_pop(L, 1);
  return n - 1;
}

/* mf.scope(f, ...): f's results; every other tensor that f made is released, but for what the tape
 * keeps. Results may be tables of tensors. */
static int scope(lua_State *L) {
  State *S = bind_state(L);
  if (lua_type(L, 1) != LUA_TFUNCTION)
    return bind_error(L, "scope: the first argument must be a function, is a %s",
                      luaL_typename(L, 1));
  uint32_t mark = bind_scope_begin(S);
  int rc = lua_pcall(L, lua_gettop(L) - 1, LUA_MULTRET, 0), n = rc ? 0 : lua_gettop(L);
  if (!rc) {
    lua_rawgeti(L, LUA_REGISTRYINDEX, S->keep_results);
    lua_insert(L, 1);
    lua_pushlightuserdata(L, S);
    lua_insert(L, 2);
    rc = lua_pcall(L, n + 1, n, 0);
  }
  bind_scope_end(S, mark);
  return rc ? lua_error(L) : n;
}

/* mf._keep(tensor): it outlives the scopes around, as what an optimiser or a layer keeps must. */
static int keep(lua_State *L) {
  State *S = bind_state(L);
  bind_check_tensor(S, L, 1, "_keep", "the argument");
  Handle *h = bind_to_handle(S, L, 1);
  if (h->scope) S->scope.at[h->scope - 1] = NULL;
  h->scope = 0;
  lua_settop(L, 1);
  return 1;
}

static Device *device_at(State *S, lua_State *L, int index, const char *function) {
  int64_t type = DEVICE_CPU;
  if (!lua_isnoneornil(L, index) && bind_read_device(S, L, index, function, "device", &type))
    bind_raise(L);
  return S->context->devices[type];
}

/* mf.memory_stats(device): bytes in use, at the peak, cached; the limit; how many allocations there
 * were; and how many tensors this Lua state has. */
static int memory_stats(lua_State *L) {
  DeviceStats m = device_stats(device_at(bind_state(L), L, 1, "memory_stats"));
  lua_createtable(L, 0, 6);
  lua_pushnumber(L, (double)bind_state(L)->E->tensors), lua_setfield(L, -2, "tensors");
  lua_pushnumber(L, (double)m.in_use), lua_setfield(L, -2, "in_use");
  lua_pushnumber(L, (double)m.peak), lua_setfield(L, -2, "peak");
  lua_pushnumber(L, (double)m.cached), lua_setfield(L, -2, "cached");
  lua_pushnumber(L, (double)m.limit), lua_setfield(L, -2, "limit");
  lua_pushnumber(L, (double)m.allocations), lua_setfield(L, -2, "allocations");
  return 1;
}

static int empty_cache(lua_State *L) {
  Device *d = device_at(bind_state(L), L, 1, "empty_cache");
  d->api->empty_cache(d);
  return 0;
}

static int reset_peak_memory(lua_State *L) {
  device_reset_peak(device_at(bind_state(L), L, 1, "reset_peak_memory"));
  return 0;
}

/* mf.set_memory_limit(bytes, device): allocations beyond it fail; 0 for none. */
static int set_memory_limit(lua_State *L) {
  int64_t bytes;
  if (bind_read_int(L, 1, "set_memory_limit", "bytes", &bytes)) return bind_raise(L);
  if (bytes < 0) return bind_error(L, "set_memory_limit: bytes must not be negative");
  device_set_limit(device_at(bind_state(L), L, 2, "set_memory_limit"), (size_t)bytes);
  return 0;
}

static int get_num_threads(lua_State *L) {
  lua_pushinteger(L, thread_count());
  return 1;
}

static int set_num_threads(lua_State *L) {
  int64_t n;
  if (bind_read_int(L, 1, "set_num_threads", "n", &n)) return bind_raise(L);
  if (n < 1 || n > 4096)
    return bind_error(L, "set_num_threads: n must be between 1 and 4096, is %d", (int)n);
  thread_set_count((int)n);
  return 0;
}

/* mf.time(): seconds on a clock that only goes forward. */
static int time_now(lua_State *L) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  lua_pushnumber(L, (double)t.tv_sec + (double)t.tv_nsec * 1e-9);
  return 1;
}

/* mf._is_terminal(fd) */
static int is_terminal(lua_State *L) {
  lua_pushboolean(L, isatty((int)luaL_checkinteger(L, 1)));
  return 1;
}

/* mf._memory_usage(): peak resident memory of the process in MiB. */
static int memory_usage(lua_State *L) {
  struct rusage usage;
  getrusage(RUSAGE_SELF, &usage);
  lua_pushnumber(L, (double)(usage.ru_maxrss / 1024));
  return 1;
}

void bind_open_memory(State *S, lua_State *L) {
  lua_pushcfunction(L, keep_results);
  S->keep_results = luaL_ref(L, LUA_REGISTRYINDEX);
  bind_function(S, L, "scope", scope);
  bind_function(S, L, "_keep", keep);
  bind_function(S, L, "memory_stats", memory_stats);
  bind_function(S, L, "empty_cache", empty_cache);
  bind_function(S, L, "reset_peak_memory", reset_peak_memory);
  bind_function(S, L, "set_memory_limit", set_memory_limit);
  bind_function(S, L, "get_num_threads", get_num_threads);
  bind_function(S, L, "set_num_threads", set_num_threads);
  bind_function(S, L, "time", time_now);
  bind_function(S, L, "_is_terminal", is_terminal);
  bind_function(S, L, "_memory_usage", memory_usage);
}
