/* What an mf_state is: shared by the entry points here and those that need Lua, in bind/embed.c. */
#ifndef MF_STATE_INT_H
#define MF_STATE_INT_H
#include "eager.h"
#include "moonflow.h"

struct mf_state {
  Context *context;
  Eager *E; /* of the Lua state: belongs to it */
  struct lua_State *L;
};

#endif
