/* What lua/profile.lua stands on: watching the launches of a context. */
#include "profile.h"

#include "state.h"
#include "watch.h"

static const char watch_key;

static void *watch_create(void) {
  Watch *w = mem_zalloc(sizeof *w);
  if (w) pthread_mutex_init(&w->lock, NULL);
  return w;
}

/* With its context; a profile may run still. */
static void watch_destroy(void *ud) {
  Watch *w = ud;
  profile_destroy(atomic_load(&w->profile));
  pthread_mutex_destroy(&w->lock);
  mem_free(w);
}

static Watch *watch_get(State *S, lua_State *L) {
  Context *c = S->context;
  Watch *w = device_attach(c->devices[DEVICE_CPU], &watch_key, watch_create, watch_destroy);
  if (!w) luaL_error(L, "out of memory");
  atomic_store(&c->watch, w);
  return w;
}

/* Ends watching when nothing is watched any more. */
static void watch_put(State *S) {
  Watch *w = atomic_load(&S->context->watch);
  if (w && !atomic_load(&w->profile) && !atomic_load(&w->nan))
    atomic_store(&S->context->watch, NULL);
}

/* mf._profile_start(): notes every launch of the context from here on. */
static int profile_start(lua_State *L) {
  State *S = bind_state(L);
  Watch *w = watch_get(S, L);
  if (atomic_load(&w->profile)) return bind_error(L, "profile: one runs already");
  Profile *p = profile_create();
  if (!p) watch_put(S);
  if (!p) return bind_error(L, "profile: out of memory");
  atomic_store(&w->profile, p);
  return 0;
}

static void set_number(lua_State *L, const char *key, double value) {
  lua_pushnumber(L, value);
  lua_setfield(L, -2, key);
}

static void push_event(lua_State *L, const ProfileEvent *e, int64_t zero) {
  lua_createtable(L, 0, 9);
  lua_pushstring(L, e->name), lua_setfield(L, -2, "name");
  lua_pushstring(L, e->where), lua_setfield(L, -2, "where");
  set_number(L, "begin_us", (double)(e->begin - zero) / 1e3);
  set_number(L, "us", (double)(e->end - e->begin) / 1e3);
  lua_pushfstring(L, "%p", e->track), lua_setfield(L, -2, "track");
  if (e->kind == PROFILE_OP) {
    set_number(L, "flops", e->flops);
    set_number(L, "bytes", e->bytes);
    return;
  }
  set_number(L, "act", (double)e->act);
  lua_pushstring(L, e->kind == PROFILE_ACT ? "act" : e->kind == PROFILE_SEND ? "send" : "receive");
  lua_setfield(L, -2, "kind");
  if (e->kind == PROFILE_ACT) return;
  set_number(L, "reg", e->reg);
  lua_pushfstring(L, "%p r%d %d", e->owner, e->reg, (int)e->act), lua_setfield(L, -2, "id");
}

/* mf._profile_stop() -> the launches since profile_start, how many events were lost, and what
 * actors did. */
static int profile_stop(lua_State *L) {
  State *S = bind_state(L);
  Watch *w = atomic_load(&S->context->watch);
  if (!w || !atomic_load(&w->profile)) return bind_error(L, "profile: none runs");
  size_t n, lost, count[2] = {0};
  pthread_mutex_lock(&w->lock);
  Profile *p = atomic_exchange(&w->profile, NULL);
  pthread_mutex_unlock(&w->lock);
  watch_put(S);
  const ProfileEvent *e = profile_events(p, &n, &lost);
  int64_t zero = n ? e[0].begin : 0;
  for (size_t i = 0; i < n; i++)
    if (e[i].begin < zero) zero = e[i].begin;
  lua_createtable(L, (int)n, 0);
  lua_pushnumber(L, (double)lost);
  lua_newtable(L);
  for (size_t i = 0; i < n; i++) {
    bool acts = e[i].kind != PROFILE_OP;
    push_event(L, &e[i], zero);
    lua_rawseti(L, acts ? -2 : -4, (int)++count[acts]);
  }
  profile_destroy(p);
  return 3;
}

/* mf.check_nan(on): while it is on, a NaN in the result of an op is an error that names the op and
 * the line. Slow. */
static int check_nan(lua_State *L) {
  State *S = bind_state(L);
  if (lua_type(L, 1) != LUA_TBOOLEAN)
    return bind_error(L, "check_nan: the argument must be true or false, is a %s",
                      luaL_typename(L, 1));
  Watch *w = lua_toboolean(L, 1) ? watch_get(S, L) : atomic_load(&S->context->watch);
  if (w) atomic_store(&w->nan, lua_toboolean(L, 1));
  watch_put(S);
  return 0;
}

void bind_open_profile(State *S, lua_State *L) {
  bind_function(S, L, "_profile_start", profile_start);
  bind_function(S, L, "_profile_stop", profile_stop);
  bind_function(S, L, "check_nan", check_nan);
}
