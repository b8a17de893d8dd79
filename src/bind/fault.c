/* What a build for faults offers to tests: requests that fail, Lua's own included. */
#include <lualib.h>
#include <stdlib.h>

#include "fault.h"
#include "moonflow_lua.h"
#include "state.h"

/* Lua's heap. To make a block smaller never fails, as Lua demands. */
static void *lua_heap(void *ud, void *p, size_t held, size_t bytes) {
  (void)ud;
  if (!bytes) {
    free(p);
    return NULL;
  }
  if ((!p || bytes > held) && fault_here(FAULT_LUA)) return NULL;
  return realloc(p, bytes);
}

lua_State *bind_new_lua(void) {
  return FAULT ? lua_newstate(lua_heap, NULL) : luaL_newstate();
}

/* mf._fault(kinds, from, n): from now on calls of these kinds are counted, and n of them fail, the
 * first being call `from`; see base/fault.h. */
static int arm(lua_State *L) {
  fault_arm((unsigned)luaL_checkinteger(L, 1), (uint64_t)luaL_checknumber(L, 2),
            (uint64_t)luaL_checknumber(L, 3));
  return 0;
}

/* mf._fault_counts(): the calls counted, and the library's blocks that live. */
static int counts(lua_State *L) {
  lua_pushnumber(L, (double)fault_calls());
  lua_pushnumber(L, (double)fault_blocks());
  return 2;
}

void bind_open_fault(State *S, lua_State *L) {
  if (!FAULT) return;
  bind_function(S, L, "_fault", arm);
  bind_function(S, L, "_fault_counts", counts);
}
