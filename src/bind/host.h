/* What the entry points for hosts and the program share: protected calls and interrupts. */
#ifndef MF_HOST_H
#define MF_HOST_H
#include <lua.h>
#include <stdbool.h>

/* Calls the function below its n_in arguments; on an error its text with a traceback is on top
 * instead of the results. Error values that are not strings speak through __tostring; nil stays
 * nil. */
int host_pcall(lua_State *L, int n_in, int n_out);

/* Is this text, as host_pcall leaves it, that of an interrupt? */
bool host_is_interrupt(const char *text);

/* Ends an interrupt that nobody has noticed yet. */
void host_drop_interrupt(lua_State *L);

#endif
