/* Readers: one per kind of argument, so that every op says the same about a wrong one. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "op_program.h"
#include "plugin.h"
#include "state.h"

static const double whole_limit =
    9007199254740992.0; /* 2^53: above, a double no longer tells whole numbers apart */

const char *bind_describe(State *S, lua_State *L, int index, char *buf, size_t n) {
  char shape[SHAPE_TEXT_MAX];
  Tensor *t = bind_to_tensor(S, L, index);
  int type = lua_type(L, index);
  if (t)
    snprintf(buf, n, "a tensor %s of %s", shape_text(t->m.ndim, t->m.shape, shape),
             dtype_name((DType)t->m.dtype));
  else if (type == LUA_TNIL || type == LUA_TNONE) snprintf(buf, n, "nil");
  else if (type == LUA_TNUMBER) snprintf(buf, n, "the number %.14g", lua_tonumber(L, index));
  else if (type == LUA_TSTRING) snprintf(buf, n, "the string '%.40s'", lua_tostring(L, index));
  else if (bind_to_handle(S, L, index))
    snprintf(buf, n, "a tensor that was released at the end of its scope");
  else if (type == LUA_TUSERDATA) snprintf(buf, n, "a userdata");
  else snprintf(buf, n, "a %s", lua_typename(L, type));
  return buf;
}

int bind_read_int(lua_State *L, int index, const char *function, const char *arg, int64_t *out) {
  int type = lua_type(L, index);
  if (type == LUA_TNUMBER) {
    double v = lua_tonumber(L, index);
    if (v == floor(v) && v >= -whole_limit && v <= whole_limit) {
      *out = (int64_t)v;
      return 0;
    }
    return err_set(MF_EINVAL, "%s: %s must be a whole number up to 2^53, is %.17g", function, arg,
                   v);
  }
  if (type == 10 /* cdata */) {
    const int64_t *v = lua_topointer(L, index); /* int64 and uint64 cdata hold their 8 bytes */
    lua_getglobal(L, "tostring");
    lua_pushvalue(L, index < 0 ? index - 1 : index);
    const char *text = !lua_pcall(L, 1, 1, 0) && lua_isstring(L, -1) ? lua_tostring(L, -1) : "";
    bool whole = strstr(text, "LL") != NULL, above = strstr(text, "ULL") && *v < 0;
    lua_pop(L, 1);
    if (above) return err_set(MF_EINVAL, "%s: %s is above 2^63 - 1", function, arg);
    if (whole) {
      *out = *v;
      return 0;
    }
  }
  return err_set(MF_EINVAL, "%s: %s must be a whole number, is a %s", function, arg,
                 type == 10 ? "cdata" : lua_typename(L, type));
}

int bind_read_dtype(State *S, lua_State *L, int index, const char *function, const char *arg,
                    int64_t *out) {
  char what[160];
  if (lua_type(L, index) == LUA_TSTRING) {
    int t = dtype_parse(lua_tostring(L, index));
    if (t != DTYPE_NONE) {
      *out = t;
      return 0;
    }
  } else if (lua_type(L, index) == LUA_TUSERDATA && lua_getmetatable(L, index)) {
    lua_rawgeti(L, LUA_REGISTRYINDEX, S->dtype_mt);
    bool same = lua_rawequal(L, -1, -2);
    lua_pop(L, 2);
    if (same) {
      *out = *(int *)lua_touserdata(L, index);
      return 0;
    }
  }
  return err_set(MF_EINVAL, "%s: %s must be a dtype such as mf.float32, is %s", function, arg,
                 bind_describe(S, L, index, what, sizeof what));
}

int bind_read_device(State *S, lua_State *L, int index, const char *function, const char *arg,
                     int64_t *out) {
  char what[160];
  if (lua_type(L, index) == LUA_TSTRING) {
    int slot, rc = plugin_find_device(S->context, function, lua_tostring(L, index), &slot);
    *out = slot;
    return rc;
  }
  return err_set(MF_EINVAL, "%s: %s must be a device such as 'cpu', is %s", function, arg,
                 bind_describe(S, L, index, what, sizeof what));
}

/* Entry i of a list, at the top of the stack. */
static int read_entry(lua_State *L, const char *function, const char *arg, int i, int64_t *out) {
  char name[80];
  snprintf(name, sizeof name, "%.60s[%d]", arg, i);
  return bind_read_int(L, -1, function, name, out);
}

int bind_read_ints(lua_State *L, int index, const char *function, const char *arg, IntList *out) {
  enum { LIMIT = sizeof out->v / sizeof out->v[0] };
  if (lua_type(L, index) != LUA_TTABLE)
    return err_set(MF_EINVAL, "%s: %s must be a table of whole numbers, is a %s", function, arg,
                   luaL_typename(L, index));
  size_t n = lua_objlen(L, index);
  if (n > LIMIT)
    return err_set(MF_EINVAL, "%s: %s has %zu entries, at most %d are possible", function, arg, n,
                   (int)LIMIT);
  out->n = (int64_t)n;
  for (size_t i = 0; i < n; i++) {
    lua_rawgeti(L, index, (int)i + 1);
    double v = lua_tonumber(L, -1);
    int rc = 0;
    if (lua_type(L, -1) == LUA_TNUMBER && v >= INT32_MIN && v <= INT32_MAX && v == (int32_t)v)
      out->v[i] = (int32_t)v;
    else rc = read_entry(L, function, arg, (int)i + 1, &out->v[i]);
    lua_pop(L, 1);
    if (rc) return rc;
  }
  return 0;
}

/* -- Programs ---------------------------------------------------------------------------------- */

typedef struct ReadProgram {
  Arena arena;
  const char *text;
  char what[96]; /* for error texts */
  Program *program;
} ReadProgram;

static void read_program(void *ud) {
  ReadProgram *r = ud;
  Scan s = scan_begin(&r->arena, r->what, r->text);
  r->program = op_program_scan(&s);
  if (*s.at) scan_fail(&s, "expected the end");
}

int bind_read_program(lua_State *L, int index, const char *function, const char *arg,
                      Program **out) {
  if (lua_type(L, index) != LUA_TSTRING)
    return err_set(MF_EINVAL, "%s: %s must be the text of a program, is a %s", function, arg,
                   luaL_typename(L, index));
  ReadProgram r = {.text = lua_tostring(L, index)};
  snprintf(r.what, sizeof r.what, "%.40s: %.40s", function, arg);
  int rc = arena_protect(&r.arena, read_program, &r);
  if (!rc) {
    *out = lua_newuserdata(L, (size_t)r.program->bytes);
    memcpy(*out, r.program, (size_t)r.program->bytes);
  }
  arena_free(&r.arena);
  return rc;
}
