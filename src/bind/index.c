/* Subscripts. */
#include "state.h"

int bind_index(lua_State *L) {
  return bind_error(L, "index: not yet");
}

int bind_newindex(lua_State *L) {
  return bind_error(L, "index: not yet");
}

void bind_open_index(State *S, lua_State *L) {
  (void)S, (void)L;
}
