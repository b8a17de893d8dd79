/* The entry points of moonflow.h that need Lua: states, chunks, calls.
 *
 * Lua is entered through host_pcall alone, so that nothing here raises to the host. `require
 * 'moonflow'` is prepared but not done: a state that does not use the module does not pay for it.
 */
#include <lualib.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "host.h"
#include "mem.h"
#include "moonflow_lua.h"
#include "state.h"
#include "state_int.h"

static const char host_key[] = "moonflow.host", results_key[] = "moonflow.results";
/* Functions in the registry, under the addresses of these: there Lua needs no memory to push them,
 * so that nothing is raised outside of protected calls. */
static const char traceback_key, call_key;

static void push_function(lua_State *L, const char *key) {
  lua_pushlightuserdata(L, (void *)(uintptr_t)key);
  lua_rawget(L, LUA_REGISTRYINDEX);
}

static void set_function(lua_State *L, const char *key, lua_CFunction f) {
  lua_pushlightuserdata(L, (void *)(uintptr_t)key);
  lua_pushcfunction(L, f);
  lua_rawset(L, LUA_REGISTRYINDEX);
}

/* -- Protected calls --------------------------------------------------------------------------- */

static int add_traceback(lua_State *L) {
  if (lua_isnoneornil(L, 1)) return 1;
  if (!lua_isstring(L, 1)) {
    if (!luaL_callmeta(L, 1, "__tostring") || !lua_isstring(L, -1)) {
      lua_pushfstring(L, "(error object is a %s value)", luaL_typename(L, 1));
      return 1;
    }
    lua_replace(L, 1);
  }
  luaL_traceback(L, L, lua_tostring(L, 1), 1);
  return 1;
}

int host_pcall(lua_State *L, int n_in, int n_out) {
  int base = lua_gettop(L) - n_in;
  push_function(L, &traceback_key);
  lua_insert(L, base);
  int status = lua_pcall(L, n_in, n_out, base);
  lua_remove(L, base);
  if (status) lua_gc(L, LUA_GCCOLLECT, 0);
  return status;
}

bool host_is_interrupt(const char *text) {
  static const char word[] = "interrupted";
  size_t n = strcspn(text, "\n"), k = sizeof word - 1;
  return n >= k && !memcmp(text + n - k, word, k) && (n == k || text[n - k - 1] == ' ');
}

/* Makes the error on top of the stack the calling thread's, and removes it. */
static mf_status take_error(lua_State *L, int status) {
  if (!status) return MF_STATUS_OK;
  const char *text = lua_tostring(L, -1);
  if (!text) text = "(error object is a nil value)";
  int code = status == LUA_ERRMEM ? MF_ENOMEM : host_is_interrupt(text) ? MF_EINTR : MF_ELUA;
  err_set(code, "%s", text);
  lua_pop(L, 1);
  return (mf_status)code;
}

/* -- Interrupts -------------------------------------------------------------------------------- */

static mf_state *host_of(lua_State *L) {
  lua_getfield(L, LUA_REGISTRYINDEX, host_key);
  mf_state *s = lua_touserdata(L, -1);
  lua_pop(L, 1);
  return s;
}

/* The dispatcher may have noticed the interrupt first: then there is nothing to raise. */
static void interrupt_hook(lua_State *L, lua_Debug *unused) {
  (void)unused;
  lua_sethook(L, NULL, 0, 0);
  if (atomic_exchange(&host_of(L)->context->interrupted, false)) luaL_error(L, "interrupted");
}

void mf_state_interrupt(mf_state *s) {
  atomic_store(&s->context->interrupted, true);
  lua_sethook(s->L, interrupt_hook, LUA_MASKCALL | LUA_MASKRET | LUA_MASKCOUNT, 1);
}

void host_drop_interrupt(lua_State *L) {
  lua_sethook(L, NULL, 0, 0);
  atomic_store(&host_of(L)->context->interrupted, false);
}

/* -- Calls ------------------------------------------------------------------------------------- */

typedef struct Call {
  const char *function;
  int n_in, n_out;
  const mf_value *in;
  mf_value *out;
} Call;

/* Tensors cross as userdata of the module, which therefore must be there. */
static void open_module(lua_State *L) {
  if (bind_find_state(L)) return;
  lua_getglobal(L, "require");
  lua_pushliteral(L, "moonflow");
  lua_call(L, 1, 0);
}

/* Pushes what a dotted name stands for, from the globals on. */
static void push_named(lua_State *L, const char *name) {
  lua_pushvalue(L, LUA_GLOBALSINDEX);
  for (const char *part = name; *part;) {
    size_t n = strcspn(part, ".");
    lua_pushlstring(L, part, n);
    lua_gettable(L, -2);
    lua_remove(L, -2);
    if (lua_isnil(L, -1)) luaL_error(L, "there is no '%s'", name);
    part += n + (part[n] == '.');
  }
}

static void push_value(lua_State *L, const mf_value *v) {
  switch (v->kind) {
    case MF_NIL: lua_pushnil(L); break;
    case MF_BOOLEAN: lua_pushboolean(L, v->as.boolean); break;
    case MF_NUMBER: lua_pushnumber(L, v->as.number); break;
    case MF_STRING: lua_pushlstring(L, v->as.string.text, v->as.string.size); break;
    case MF_TENSOR: bind_push(bind_find_state(L), L, tensor_retain((Tensor *)v->as.tensor)); break;
  }
}

/* Takes the value at `index` as result i. */
static void take_value(lua_State *L, int index, mf_value *v, int i) {
  State *S = bind_find_state(L);
  Tensor *t = S ? bind_to_tensor(S, L, index) : NULL;
  if (t) {
    bind_pin(S, L, index);
    v->kind = MF_TENSOR;
    v->as.tensor = (mf_tensor *)tensor_retain(t);
    return;
  }
  switch (lua_type(L, index)) {
    case LUA_TNIL: v->kind = MF_NIL; break;
    case LUA_TBOOLEAN:
      v->kind = MF_BOOLEAN;
      v->as.boolean = lua_toboolean(L, index);
      break;
    case LUA_TNUMBER:
      v->kind = MF_NUMBER;
      v->as.number = lua_tonumber(L, index);
      break;
    case LUA_TSTRING:
      v->kind = MF_STRING;
      v->as.string.text = lua_tolstring(L, index, &v->as.string.size);
      break;
    default:
      luaL_error(L, "result %d is a %s, which has no form in C", i + 1, luaL_typename(L, index));
  }
}

/* Under host_pcall. Strings among the results stay alive in the registry until the next call. */
static int call(lua_State *L) {
  Call *c = lua_touserdata(L, 1);
  luaL_checkstack(L, c->n_in + c->n_out + LUA_MINSTACK, "too many values");
  open_module(L);
  push_named(L, c->function);
  for (int i = 0; i < c->n_in; i++) push_value(L, &c->in[i]);
  lua_call(L, c->n_in, c->n_out);
  lua_createtable(L, c->n_out, 0);
  for (int i = 0; i < c->n_out; i++) {
    take_value(L, 2 + i, &c->out[i], i);
    lua_pushvalue(L, 2 + i);
    lua_rawseti(L, -2, i + 1);
  }
  lua_setfield(L, LUA_REGISTRYINDEX, results_key);
  return 0;
}

/* -- States ------------------------------------------------------------------------------------ */

/* Room for the machine code of training loops, which is more than LuaJIT's defaults give. */
static void tune_jit(lua_State *L) {
  static const char *const options[] = {"maxtrace=2000", "maxrecord=8000", "maxmcode=16384",
                                        "sizemcode=128"};
  lua_getglobal(L, "jit");
  lua_getfield(L, -1, "opt");
  lua_getfield(L, -1, "start");
  for (int i = 0; i < 4; i++) lua_pushstring(L, options[i]);
  lua_call(L, 4, 0);
  lua_pop(L, 2);
}

typedef struct Opening {
  mf_state *s;
  bool ignore_environment;
} Opening;

static int open_state(lua_State *L) {
  const Opening *o = lua_touserdata(L, 1);
  lua_pushlightuserdata(L, o->s);
  lua_setfield(L, LUA_REGISTRYINDEX, host_key);
  set_function(L, &traceback_key, add_traceback);
  set_function(L, &call_key, call);
  lua_pushboolean(L, o->ignore_environment);
  lua_setfield(L, LUA_REGISTRYINDEX, "LUA_NOENV"); /* read by luaL_openlibs */
  luaL_openlibs(L);
  tune_jit(L);
  bind_use_context(L, o->s->context);
  lua_getglobal(L, "package");
  lua_getfield(L, -1, "preload");
  lua_pushcfunction(L, luaopen_moonflow);
  lua_setfield(L, -2, "moonflow");
  return 0;
}

mf_status mf_state_create(mf_context *context, const mf_state_config *config, mf_state **out) {
  if (!context || !out)
    return (mf_status)err_set(MF_EINVAL, "mf_state_create: context and out must not be NULL");
  *out = NULL;
  mf_state *s = mem_zalloc(sizeof *s);
  if (!s) return (mf_status)err_set(MF_ENOMEM, "mf_state_create: out of memory");
  s->context = (Context *)context;
  context_retain(s->context);
  s->E = eager_create(s->context);
  s->L = bind_new_lua();
  Opening o = {.s = s};
  if (config && config->struct_size >= sizeof *config)
    o.ignore_environment = config->ignore_environment;
  mf_status status = s->E && s->L ? take_error(s->L, lua_cpcall(s->L, open_state, &o))
                                  : (mf_status)err_set(MF_ENOMEM, "mf_state_create: out of memory");
  if (status) mf_state_destroy(s);
  else *out = s;
  return status;
}

void mf_state_destroy(mf_state *s) {
  if (!s) return;
  if (s->L) lua_close(s->L);
  eager_destroy(s->E);
  context_release(s->context);
  mem_free(s);
}

lua_State *mf_state_lua(mf_state *s) {
  return s->L;
}

/* -- Chunks ------------------------------------------------------------------------------------ */

mf_status mf_dostring(mf_state *s, const char *text, const char *name) {
  if (!s || !text)
    return (mf_status)err_set(MF_EINVAL, "mf_dostring: state and text must not be NULL");
  int top = lua_gettop(s->L);
  char chunk[256];
  snprintf(chunk, sizeof chunk, "=%s", name ? name : "?");
  int status = luaL_loadbuffer(s->L, text, strlen(text), chunk);
  if (!status) status = host_pcall(s->L, 0, 0);
  mf_status result = take_error(s->L, status);
  lua_settop(s->L, top);
  return result;
}

mf_status mf_dofile(mf_state *s, const char *path) {
  if (!s || !path)
    return (mf_status)err_set(MF_EINVAL, "mf_dofile: state and path must not be NULL");
  int status = luaL_loadfile(s->L, path);
  if (!status) status = host_pcall(s->L, 0, 0);
  return take_error(s->L, status);
}

/* -- Entry to calls ---------------------------------------------------------------------------- */

/* Whether argument i can be pushed. */
static int check_value(const mf_value *v, int i) {
  if ((int)v->kind < MF_NIL || v->kind > MF_TENSOR)
    return err_set(MF_EINVAL, "mf_call: in[%d] has the kind %d, which there is not", i,
                   (int)v->kind);
  if ((v->kind == MF_TENSOR && !v->as.tensor) ||
      (v->kind == MF_STRING && !v->as.string.text && v->as.string.size))
    return err_set(MF_EINVAL, "mf_call: in[%d] is a %s that is NULL", i,
                   v->kind == MF_TENSOR ? "tensor" : "string");
  return 0;
}

mf_status mf_call(mf_state *s, const char *function, int n_in, const mf_value *in, int n_out,
                  mf_value *out) {
  if (!s || !function || n_in < 0 || n_out < 0 || (n_in && !in) || (n_out && !out))
    return (mf_status)err_set(MF_EINVAL, "mf_call: a NULL or negative argument");
  for (int i = 0; i < n_out; i++) out[i] = (mf_value){.kind = MF_NIL};
  if (!*function)
    return (mf_status)err_set(MF_EINVAL, "mf_call: the name of the function is empty");
  for (int i = 0, code; i < n_in; i++)
    if ((code = check_value(&in[i], i))) return (mf_status)code;
  Call c = {function, n_in, n_out, in, out};
  if (!lua_checkstack(s->L, 3)) return (mf_status)err_set(MF_ENOMEM, "mf_call: out of memory");
  push_function(s->L, &call_key);
  lua_pushlightuserdata(s->L, &c);
  mf_status status = take_error(s->L, host_pcall(s->L, 1, 0));
  for (int i = 0; status && i < n_out; i++) {
    if (out[i].kind == MF_TENSOR) mf_tensor_release(out[i].as.tensor);
    out[i] = (mf_value){.kind = MF_NIL};
  }
  return status;
}
