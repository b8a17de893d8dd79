/* The Lua side of the program `moonflow`: chunks, modules, scripts and the prompt, as luajit runs
 * them.
 *
 * Everything runs under lua_pcall with a handler that turns the error value into text with a
 * traceback while the stack still stands. An interrupted run is told from a failed one by that
 * text. */
#include <errno.h>
#include <lauxlib.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "comm.h"
#include "host.h"
#include "launch.h"
#include "program.h"
#include "state.h"

enum { LINE_STEP = 256 };

/* -- Running ----------------------------------------------------------------------------------- */

/* Shows the error on top of the stack and removes it. The value nil is shown as nothing: it is how
 * test runners leave. */
static ProgramResult report(lua_State *L, int status) {
  if (status == 0) return PROGRAM_OK;
  const char *text = lua_tostring(L, -1);
  State *S = bind_find_state(L);
  bool interrupted = text && host_is_interrupt(text);
  bool lost = interrupted && S && S->context->comm && comm_failed(S->context->comm);
  fflush(stdout);
  if (lost) fprintf(stderr, "moonflow: %s, while this rank was at %s\n", err_text(), text);
  else if (text) fprintf(stderr, "moonflow: %s\n", text);
  fflush(stderr);
  interrupted = interrupted && !lost;
  if (S && text) bind_fail_job(S->context, text); /* other ranks wait for this one no longer */
  lua_pop(L, 1);
  return interrupted ? PROGRAM_INTERRUPTED : PROGRAM_FAILED;
}

/* Calls the function below its `n` arguments, without results. */
static ProgramResult run(lua_State *L, int n) {
  return report(L, host_pcall(L, n, 0));
}

static ProgramResult run_text(lua_State *L, const char *text, const char *name) {
  int status = luaL_loadbuffer(L, text, strlen(text), name);
  return status ? report(L, status) : run(L, 0);
}

/* -- Options ----------------------------------------------------------------------------------- */

void program_set_arg(mf_state *s, int argc, char **argv, int script) {
  lua_State *L = mf_state_lua(s);
  lua_createtable(L, argc - script, script + 1);
  for (int i = 0; i < argc; i++) {
    lua_pushstring(L, argv[i]);
    lua_rawseti(L, -2, i - script);
  }
  lua_setglobal(L, "arg");
}

ProgramResult program_init(mf_state *s) {
  lua_State *L = mf_state_lua(s);
  const char *init = getenv("LUA_INIT");
  if (!init) return PROGRAM_OK;
  if (init[0] != '@') return run_text(L, init, "=LUA_INIT");
  int status = luaL_loadfile(L, init + 1);
  return status ? report(L, status) : run(L, 0);
}

ProgramResult program_chunk(mf_state *s, const char *text) {
  return run_text(mf_state_lua(s), text, "=(command line)");
}

ProgramResult program_require(mf_state *s, const char *module) {
  lua_State *L = mf_state_lua(s);
  lua_getglobal(L, "require");
  lua_pushstring(L, module);
  return run(L, 1);
}

/* Pushes the words of a comma-separated list; returns how many. */
static int push_words(lua_State *L, const char *list) {
  int n = 0;
  while (*list) {
    size_t len = strcspn(list, ",");
    luaL_checkstack(L, 1, "too many options");
    lua_pushlstring(L, list, len);
    n++;
    list += len + (list[len] == ',');
  }
  return n;
}

/* Its argument is what follows -j: a function of the table jit, or a module jit.* with a function
 * start, and after '=' the arguments of either. */
static int jit_command(lua_State *L) {
  const char *command = lua_tostring(L, 1), *options = strchr(command, '=');
  size_t n = options ? (size_t)(options - command) : strlen(command);
  lua_getglobal(L, "jit");
  lua_pushlstring(L, command, n);
  lua_gettable(L, -2);
  if (!lua_isfunction(L, -1)) {
    lua_getglobal(L, "require");
    lua_pushliteral(L, "jit.");
    lua_pushlstring(L, command, n);
    lua_concat(L, 2);
    if (lua_pcall(L, 1, 1, 0) || !lua_istable(L, -1))
      return luaL_error(L, "-j%s: no such command, and no such module of jit", command);
    lua_getfield(L, -1, "start");
  }
  lua_call(L, push_words(L, options ? options + 1 : ""), 0);
  return 0;
}

ProgramResult program_jit(mf_state *s, const char *command) {
  lua_State *L = mf_state_lua(s);
  lua_pushcfunction(L, jit_command);
  lua_pushstring(L, command);
  return run(L, 1);
}

ProgramResult program_optimise(mf_state *s, const char *flags) {
  lua_State *L = mf_state_lua(s);
  lua_getglobal(L, "jit");
  lua_getfield(L, -1, "opt");
  lua_getfield(L, -1, "start");
  lua_replace(L, -3);
  lua_pop(L, 1);
  return run(L, push_words(L, flags));
}

/* -- The module as `mf` ------------------------------------------------------------------------ */

static const char offered_key[] = "moonflow.offered"; /* what find_module made global */

/* __index(globals, key): on the first use of mf, makes it a global and goes away. */
static int find_module(lua_State *L) {
  if (lua_type(L, 2) != LUA_TSTRING || strcmp(lua_tostring(L, 2), "mf")) return 0;
  lua_pushnil(L);
  lua_setmetatable(L, 1);
  lua_getglobal(L, "require");
  lua_pushliteral(L, "moonflow");
  lua_call(L, 1, 1);
  lua_pushvalue(L, -1);
  lua_setfield(L, LUA_REGISTRYINDEX, offered_key);
  lua_pushvalue(L, -1);
  lua_setfield(L, 1, "mf");
  return 1;
}

/* Leaves a metatable of the user's as it is. */
void program_offer_module(mf_state *s) {
  lua_State *L = mf_state_lua(s);
  if (lua_getmetatable(L, LUA_GLOBALSINDEX)) {
    lua_pop(L, 1);
    return;
  }
  lua_createtable(L, 0, 1);
  lua_pushcfunction(L, find_module);
  lua_setfield(L, -2, "__index");
  lua_setmetatable(L, LUA_GLOBALSINDEX);
}

/* Scripts require what they use: takes back the metatable or the global, if they are ours. */
static void withdraw_module(lua_State *L) {
  int top = lua_gettop(L);
  if (lua_getmetatable(L, LUA_GLOBALSINDEX)) {
    lua_getfield(L, -1, "__index");
    if (lua_tocfunction(L, -1) == find_module) {
      lua_pushnil(L);
      lua_setmetatable(L, LUA_GLOBALSINDEX);
    }
  }
  lua_getfield(L, LUA_REGISTRYINDEX, offered_key);
  lua_pushliteral(L, "mf");
  lua_rawget(L, LUA_GLOBALSINDEX);
  if (!lua_isnil(L, -1) && lua_rawequal(L, -1, -2)) {
    lua_pushnil(L);
    lua_setglobal(L, "mf");
  }
  lua_settop(L, top);
}

/* -- Scripts ----------------------------------------------------------------------------------- */

/* Pushes arg[1], arg[2], ...; returns how many. */
static int push_script_arguments(lua_State *L) {
  lua_getglobal(L, "arg");
  int n = lua_istable(L, -1) ? (int)lua_objlen(L, -1) : 0, table = lua_gettop(L);
  luaL_checkstack(L, n + 3, "too many arguments to the script");
  for (int i = 1; i <= n; i++) lua_rawgeti(L, table, i);
  lua_remove(L, table);
  return n;
}

ProgramResult program_script(mf_state *s, const char *path) {
  lua_State *L = mf_state_lua(s);
  withdraw_module(L);
  int status = luaL_loadfile(L, path);
  return status ? report(L, status) : run(L, push_script_arguments(L));
}

/* -- The prompt -------------------------------------------------------------------------------- */

/* Appends the rest of a line to the buffer; false at the end of stdin or an interrupt before it. */
static bool read_rest(luaL_Buffer *b) {
  char piece[LINE_STEP];
  while (fgets(piece, sizeof piece, stdin)) {
    size_t n = strlen(piece);
    bool end = n && piece[n - 1] == '\n';
    luaL_addlstring(b, piece, end ? n - 1 : n);
    if (end) return true;
  }
  return false;
}

/* read(prompt) -> line; nil at the end of stdin, false when interrupted, which ends the
 * interrupt. */
static int read_line(lua_State *L) {
  fputs(luaL_checkstring(L, 1), stdout);
  fflush(stdout);
  luaL_Buffer b;
  luaL_buffinit(L, &b);
  errno = 0;
  bool whole = read_rest(&b);
  bool interrupted = !whole && ferror(stdin) && errno == EINTR;
  luaL_pushresult(&b);
  clearerr(stdin);
  if (interrupted) {
    host_drop_interrupt(L);
    lua_pushboolean(L, false);
  } else if (!whole && lua_objlen(L, -1) == 0) {
    lua_pushnil(L);
  } else {
    return 1;
  }
  fputc('\n', stdout);
  return 1;
}

static void drop_interrupt(void *L) {
  host_drop_interrupt(L);
}

/* The same for a rank, whose launcher reads. */
static int ask_line(lua_State *L) {
  const char *shown = luaL_checkstring(L, 1);
  int channel = (int)lua_tointeger(L, lua_upvalueindex(1));
  for (;;) {
    Comm *c = bind_find_state(L)->context->comm;
    LaunchAnswer kind;
    fflush(NULL);
    char *text = launch_ask(channel, shown, c && comm_failed(c), drop_interrupt, L, &kind);
    if (kind == ANSWER_LINE && text) lua_pushstring(L, text);
    else if (kind == ANSWER_DROP) lua_pushboolean(L, false);
    else lua_pushnil(L);
    mem_free(text);
    if (kind != ANSWER_RENEW) return 1;
    host_drop_interrupt(L);
    if (c && comm_renew(c)) return luaL_error(L, "%s", err_text());
    lua_settop(L, 1);
  }
}

/* Argument: the channel. Ranks join before the first line, so that none waits in vain for one whose
 * line raised an error. */
static int prompt_loop(lua_State *L) {
  int channel = (int)lua_tointeger(L, 1);
  lua_getglobal(L, "mf"); /* loads it: what is printed may be tensors */
  if (channel >= 0) {
    lua_getfield(L, -1, "_comm_host");
    lua_pushinteger(L, 0);
    lua_call(L, 1, 0);
  }
  lua_getglobal(L, "require");
  lua_pushliteral(L, "moonflow.prompt");
  lua_call(L, 1, 1);
  lua_getfield(L, -1, "run");
  lua_pushinteger(L, channel);
  lua_pushcclosure(L, channel < 0 ? read_line : ask_line, 1);
  lua_call(L, 1, 0);
  return 0;
}

ProgramResult program_prompt(mf_state *s, int channel) {
  lua_State *L = mf_state_lua(s);
  ProgramResult result;
  do { /* an interrupt between two inputs ends the loop in Lua: begin it again */
    lua_pushcfunction(L, prompt_loop);
    lua_pushinteger(L, channel);
    result = run(L, 1);
  } while (result == PROGRAM_INTERRUPTED);
  return result;
}

void program_leave(mf_context *context, int status) {
  Context *x = (Context *)context;
  char text[64];
  snprintf(text, sizeof text, "it ended with status %d", status);
  if (status) bind_fail_job(x, text);
  Comm *c = x->comm;
  x->comm = NULL;
  if (c) x->comm_close(c);
}
