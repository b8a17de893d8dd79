/* Generators: mf.Generator, mf.manual_seed, and the state of the default one.
 *
 * A generator is a seed and the number of the next stream. Each call of a random op takes one
 * stream (see base/rng.h), so that what an op draws depends on the seed and on how many random ops
 * came before it, not on their sizes. */
#include <string.h>

#include "state.h"

/* The default generator for mf.NAME, the first argument for generator:NAME. */
static Generator *generator_of(State *S, lua_State *L, const char *function) {
  if (lua_toboolean(L, lua_upvalueindex(2))) return &S->E->generator;
  bool same = false;
  if (lua_type(L, 1) == LUA_TUSERDATA && lua_getmetatable(L, 1)) {
    lua_rawgeti(L, LUA_REGISTRYINDEX, S->generator_mt);
    same = lua_rawequal(L, -1, -2);
    lua_pop(L, 2);
  }
  if (!same)
    bind_error(L, "%s: the first argument must be a generator; write generator:%s(...)", function,
               function);
  return lua_touserdata(L, 1);
}

/* Where the arguments begin. */
static int first_argument(lua_State *L) {
  return lua_toboolean(L, lua_upvalueindex(2)) ? 1 : 2;
}

/* Starts again at stream 0 of this seed. Returns the generator. */
static int manual_seed(lua_State *L) {
  State *S = bind_state(L);
  Generator *g = generator_of(S, L, "manual_seed");
  int64_t seed;
  if (bind_read_int(L, first_argument(L), "manual_seed", "seed", &seed)) return bind_raise(L);
  *g = (Generator){.seed = (uint64_t)seed};
  lua_settop(L, 1);
  return first_argument(L) == 2;
}

static int initial_seed(lua_State *L) {
  Generator *g = generator_of(bind_state(L), L, "initial_seed");
  lua_pushnumber(L, (double)(int64_t)g->seed);
  return 1;
}

/* The state as an int64 tensor of two elements: seed and next stream. */
static int get_state(lua_State *L) {
  State *S = bind_state(L);
  Generator *g = generator_of(S, L, "get_state");
  Tensor *t = tensor_create(S->E, I64, 1, (const int64_t[]){2}, DEVICE_CPU);
  if (!t) return bind_raise(L);
  memcpy(t->storage->data, (const uint64_t[]){g->seed, g->next}, 16);
  bind_push(S, L, t);
  return 1;
}

static int set_state(lua_State *L) {
  State *S = bind_state(L);
  const char *name = lua_toboolean(L, lua_upvalueindex(2)) ? "set_rng_state" : "set_state";
  Generator *g = generator_of(S, L, name);
  Tensor *t = bind_check_tensor(S, L, first_argument(L), name, "state");
  if (tensor_settle(t)) return bind_raise(L);
  if (!t->storage || t->layout || !tensor_has_data(t) || !t->storage->data ||
      t->m.device != DEVICE_CPU || t->m.dtype != I64 || t->m.ndim != 1 || t->m.shape[0] != 2)
    return bind_error(L, "%s: state must be what get_state gave, an int64 tensor of 2 elements",
                      name);
  const int64_t *v = (const void *)tensor_data(t);
  *g = (Generator){.seed = (uint64_t)v[0], .next = (uint64_t)v[t->m.stride[0]]};
  lua_settop(L, 1);
  return first_argument(L) == 2;
}

/* mf.Generator(seed): a generator of its own. */
static int new_generator(lua_State *L) {
  State *S = bind_state(L);
  int64_t seed = 0;
  if (!lua_isnoneornil(L, 1) && bind_read_int(L, 1, "Generator", "seed", &seed))
    return bind_raise(L);
  Generator *g = lua_newuserdata(L, sizeof *g);
  *g = (Generator){.seed = (uint64_t)seed};
  lua_rawgeti(L, LUA_REGISTRYINDEX, S->generator_mt);
  lua_setmetatable(L, -2);
  return 1;
}

static void put_function(State *S, lua_State *L, const char *name, lua_CFunction f,
                         bool of_default) {
  lua_pushlightuserdata(L, S);
  lua_pushboolean(L, of_default);
  lua_pushcclosure(L, f, 2);
  lua_setfield(L, -2, name);
}

void bind_open_random(State *S, lua_State *L) {
  static const luaL_Reg of_default[] = {{"manual_seed", manual_seed},
                                        {"initial_seed", initial_seed},
                                        {"get_rng_state", get_state},
                                        {"set_rng_state", set_state},
                                        {NULL, NULL}};
  static const luaL_Reg methods[] = {{"manual_seed", manual_seed},
                                     {"initial_seed", initial_seed},
                                     {"get_state", get_state},
                                     {"set_state", set_state},
                                     {NULL, NULL}};
  for (const luaL_Reg *f = of_default; f->name; f++) put_function(S, L, f->name, f->func, true);
  bind_function(S, L, "Generator", new_generator);
  lua_newtable(L);
  for (const luaL_Reg *f = methods; f->name; f++) put_function(S, L, f->name, f->func, false);
  lua_pushvalue(L, -1);
  lua_setfield(L, -2, "__index");
  lua_pushliteral(L, "Generator");
  lua_setfield(L, -2, "__metatable");
  S->generator_mt = luaL_ref(L, LUA_REGISTRYINDEX);
}
