/* What lua/profile.lua stands on: watching the launches of a context. */
#include "profile.h"

#include "state.h"
#include "watch.h"

static Watch *watch_get(State *S, lua_State *L) {
  Watch *w = atomic_load(&S->context->watch);
  if (w) return w;
  w = mem_zalloc(sizeof *w);
  if (!w) luaL_error(L, "out of memory");
  atomic_store(&S->context->watch, w);
  return w;
}

/* Ends watching when nothing is watched any more. Launches that run in other threads may still
 * look at the record, so that it stays with the context until this state's end. */
static void watch_put(State *S) {
  Watch *w = atomic_load(&S->context->watch);
  if (!w || w->profile || w->nan) return;
  atomic_store(&S->context->watch, NULL);
  mem_free(w);
}

/* mf._profile_start(): notes every launch of the context from here on. */
static int profile_start(lua_State *L) {
  State *S = bind_state(L);
  Watch *w = watch_get(S, L);
  if (w->profile) return bind_error(L, "profile: one runs already");
  w->profile = profile_create();
  if (w->profile) return 0;
  watch_put(S);
  return bind_error(L, "profile: out of memory");
}

static void push_event(lua_State *L, const ProfileEvent *e, int64_t zero) {
  lua_createtable(L, 0, 7);
  lua_pushstring(L, e->name), lua_setfield(L, -2, "name");
  lua_pushstring(L, e->where), lua_setfield(L, -2, "where");
  lua_pushnumber(L, (double)(e->begin - zero) / 1e3), lua_setfield(L, -2, "begin_us");
  lua_pushnumber(L, (double)(e->end - e->begin) / 1e3), lua_setfield(L, -2, "us");
  lua_pushnumber(L, e->flops), lua_setfield(L, -2, "flops");
  lua_pushnumber(L, e->bytes), lua_setfield(L, -2, "bytes");
  lua_pushnumber(L, e->track), lua_setfield(L, -2, "track");
}

/* mf._profile_stop() -> the events since profile_start, and how many were lost. */
static int profile_stop(lua_State *L) {
  State *S = bind_state(L);
  Watch *w = atomic_load(&S->context->watch);
  if (!w || !w->profile) return bind_error(L, "profile: none runs");
  size_t n, lost;
  Profile *p = w->profile;
  w->profile = NULL;
  watch_put(S);
  const ProfileEvent *e = profile_events(p, &n, &lost);
  lua_createtable(L, (int)n, 0);
  for (size_t i = 0; i < n; i++) {
    push_event(L, &e[i], e[0].begin);
    lua_rawseti(L, -2, (int)i + 1);
  }
  profile_destroy(p);
  lua_pushnumber(L, (double)lost);
  return 2;
}

/* mf.check_nan(on): while it is on, a NaN in the result of an op is an error that names the op and
 * the line. Slow. */
static int check_nan(lua_State *L) {
  State *S = bind_state(L);
  if (lua_type(L, 1) != LUA_TBOOLEAN)
    return bind_error(L, "check_nan: the argument must be true or false, is a %s",
                      luaL_typename(L, 1));
  Watch *w = lua_toboolean(L, 1) ? watch_get(S, L) : atomic_load(&S->context->watch);
  if (w) w->nan = lua_toboolean(L, 1);
  watch_put(S);
  return 0;
}

void bind_open_profile(State *S, lua_State *L) {
  bind_function(S, L, "_profile_start", profile_start);
  bind_function(S, L, "_profile_stop", profile_stop);
  bind_function(S, L, "check_nan", check_nan);
}
