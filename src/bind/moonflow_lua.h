/* The library's entry for Lua. */
#ifndef MF_MOONFLOW_LUA_H
#define MF_MOONFLOW_LUA_H
#include <lua.h>

typedef struct Context Context;

#define MF_LUA_API __attribute__((visibility("default")))

/* require 'moonflow' in any LuaJIT; idempotent. */
MF_LUA_API int luaopen_moonflow(lua_State *L);

/* The context that the first luaopen_moonflow of L will use; not counted here, and counted by the
 * state that is made. */
void bind_use_context(lua_State *L, Context *context);
/* A new state of a thread of the library's own: opens Lua's libraries and moonflow with that
 * context, and pushes the module `name` of it. Raises Lua errors. */
void bind_begin_thread(lua_State *L, Context *context, const char *name);
/* luaL_newstate; in a build for faults its heap may run out. */
lua_State *bind_new_lua(void);

#endif
