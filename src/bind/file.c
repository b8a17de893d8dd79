/* Files for Lua: the functions behind mf.save and mf.load.
 *
 *   mf._safetensors_save(path, names, tensors, metadata)   lists of one length; strings, or nil
 *   mf._safetensors_load(path, device) -> tensors by name, names in the file's order, metadata
 *   mf._safetensors_entries(path) -> a list of { name, dtype, shape }, metadata
 *   mf._safetensors_rows(path, rows) -> tensors by name; rows[name]: { shape, dtype, from, count }
 *   mf._json_read(text) -> value                           objects and arrays as tables
 *   mf._write_text(path, text), mf._make_folder(path)
 *   mf._idx_load(path) -> tensor
 *
 * Loaded tensors are copies, so that the file may change afterwards. An open file lives in a
 * userdata whose collector closes it, which makes it safe for Lua to raise anywhere here. Writing
 * calls no Lua between create and commit or abort. */
#include <stdlib.h>
#include <string.h>

#include "idx.h"
#include "json.h"
#include "op_args.h"
#include "op_ids.h"
#include "safetensors.h"
#include "state.h"

/* -- Saving ------------------------------------------------------------------------------------ */

/* Fills e from names[i] and tensors[i]; the tables keep the string and the tensor alive. */
static int read_entry(State *S, lua_State *L, int i, SafetensorsEntry *e, Tensor **t) {
  char what[160];
  lua_rawgeti(L, 2, i);
  lua_rawgeti(L, 3, i);
  size_t n;
  bool named = lua_type(L, -2) == LUA_TSTRING;
  e->name = named ? (char *)lua_tolstring(L, -2, &n) : NULL;
  *t = bind_to_tensor(S, L, -1);
  bind_describe(S, L, -1, what, sizeof what);
  lua_pop(L, 2);
  if (!named) return err_set(MF_EINVAL, "save: name %d must be a string", i);
  if (strlen(e->name) != n)
    return err_set(MF_EINVAL, "save: the name '%.80s' holds a zero byte", e->name);
  if (!*t) return err_set(MF_EINVAL, "save: '%.80s' must be a tensor, is %s", e->name, what);
  const Meta *m = &(*t)->m;
  int rc = tensor_settle(*t);
  if (rc) return rc;
  const char *why = !(*t)->storage                       ? "is row-sparse; save its to_dense()"
                    : (*t)->layout                       ? "is global; save its to_local()"
                    : storage_is_traced((*t)->storage)   ? "belongs to a step that is compiled"
                    : !tensor_has_data(*t)               ? "is on the meta device and has no data"
                    : atomic_load(&(*t)->storage->freed) ? "was freed"
                                                         : NULL;
  if (why) return err_set(MF_EINVAL, "save: '%.80s' %s", e->name, why);
  e->dtype = (DType)m->dtype;
  e->ndim = m->ndim;
  memcpy(e->shape, m->shape, sizeof *m->shape * (size_t)m->ndim);
  return 0;
}

static int by_key(const void *a, const void *b) {
  const SafetensorsPair *x = a, *y = b;
  return strcmp(x->key, y->key);
}

static int count_pairs(lua_State *L, int index) {
  int n = 0;
  for (lua_pushnil(L); lua_next(L, index); lua_pop(L, 1)) n++;
  return n;
}

/* Fills pairs, sorted, from the table at `index`, which keeps the strings alive. */
static int read_metadata(lua_State *L, int index, SafetensorsPair *pairs) {
  int n = 0;
  for (lua_pushnil(L); lua_next(L, index); lua_pop(L, 1)) {
    if (lua_type(L, -2) != LUA_TSTRING || lua_type(L, -1) != LUA_TSTRING)
      return err_set(MF_EINVAL, "save: metadata must be a table of strings by strings");
    size_t key, value;
    pairs[n].key = (char *)lua_tolstring(L, -2, &key);
    pairs[n].value = (char *)lua_tolstring(L, -1, &value);
    if (strlen(pairs[n].key) != key || strlen(pairs[n].value) != value)
      return err_set(MF_EINVAL, "save: metadata '%.80s' holds a zero byte", pairs[n].key);
    n++;
  }
  qsort(pairs, (size_t)n, sizeof *pairs, by_key);
  return 0;
}

/* Writes one tensor, which the host can read; in row-major order, whatever its strides are. */
static int write_host(State *S, SafetensorsOut *o, const SafetensorsEntry *e, Tensor *t) {
  if (meta_is_contiguous(&t->m)) return safetensors_write(o, e, tensor_data(t));
  Tensor *copy = eager_op(S->E, OP_clone, 1, &t, &(struct clone_args){.memory_format = 1});
  if (!copy) return err_prefix(MF_ENOMEM, "save");
  int code = safetensors_write(o, e, tensor_data(copy));
  tensor_release(copy);
  return code;
}

static int write_tensor(State *S, SafetensorsOut *o, const SafetensorsEntry *e, Tensor *t) {
  Tensor *host = tensor_to_host(t);
  int code = host ? write_host(S, o, e, host) : MF_EIO;
  tensor_release(host);
  return code;
}

static int write_file(State *S, const char *path, SafetensorsEntry *entries, Tensor **tensors,
                      size_t n, const SafetensorsPair *pairs, size_t n_pairs) {
  SafetensorsOut o;
  int code = safetensors_create(&o, path, entries, n, pairs, n_pairs);
  bool grad = S->E->grad_enabled;
  S->E->grad_enabled = false;
  for (size_t i = 0; i < n && !code; i++) code = write_tensor(S, &o, &entries[i], tensors[i]);
  S->E->grad_enabled = grad;
  if (!code) return safetensors_commit(&o);
  safetensors_abort(&o);
  return code;
}

static int safetensors_save(lua_State *L) {
  State *S = bind_state(L);
  const char *path = luaL_checkstring(L, 1);
  luaL_checktype(L, 2, LUA_TTABLE);
  luaL_checktype(L, 3, LUA_TTABLE);
  if (!lua_isnoneornil(L, 4)) luaL_checktype(L, 4, LUA_TTABLE);
  size_t n = lua_objlen(L, 2), n_pairs = lua_istable(L, 4) ? (size_t)count_pairs(L, 4) : 0;
  SafetensorsEntry *entries = lua_newuserdata(L, n * sizeof *entries + 1);
  Tensor **tensors = lua_newuserdata(L, n * sizeof *tensors + 1);
  SafetensorsPair *pairs = lua_newuserdata(L, n_pairs * sizeof *pairs + 1);
  int code = 0;
  for (size_t i = 0; i < n && !code; i++)
    code = read_entry(S, L, (int)i + 1, &entries[i], &tensors[i]);
  if (!code && n_pairs) code = read_metadata(L, 4, pairs);
  if (!code) code = write_file(S, path, entries, tensors, n, pairs, n_pairs);
  return code ? bind_raise(L) : 0;
}

/* -- Loading ----------------------------------------------------------------------------------- */

static int close_safetensors(lua_State *L) {
  safetensors_close(lua_touserdata(L, 1));
  return 0;
}

static int close_idx(lua_State *L) {
  idx_close(lua_touserdata(L, 1));
  return 0;
}

/* Gives the userdata on top a collector that calls `close`, which must bear being called on a
 * file that is not open. */
static void *close_when_collected(lua_State *L, lua_CFunction close) {
  lua_createtable(L, 0, 1);
  lua_pushcfunction(L, close);
  lua_setfield(L, -2, "__gc");
  lua_setmetatable(L, -2);
  return lua_touserdata(L, -1);
}

/* Reads an entry's contents into t, which is contiguous. */
static int read_into(State *S, const Safetensors *f, const SafetensorsEntry *e, Tensor *t) {
  if (!tensor_has_data(t)) return 0;
  if (t->storage->device->api->on_host) return safetensors_read(f, e, tensor_data(t));
  Tensor *host = tensor_create(S->E, e->dtype, e->ndim, e->shape, DEVICE_CPU);
  int code = host ? safetensors_read(f, e, tensor_data(host)) : MF_ENOMEM;
  if (!code) code = tensor_transfer(t, host);
  tensor_release(host);
  return code;
}

/* Pushes the tensor of an entry. */
static int load_entry(State *S, lua_State *L, const Safetensors *f, const SafetensorsEntry *e,
                      int device) {
  Tensor *t = tensor_create(S->E, e->dtype, e->ndim, e->shape, device);
  if (!t) return MF_ENOMEM;
  int code = read_into(S, f, e, t);
  if (code) tensor_release(t);
  else bind_push(S, L, t);
  return code;
}

/* Opens the file whose path is at index 1; pushes what closes it. NULL with the error set. */
static Safetensors *open_file(lua_State *L) {
  const char *path = luaL_checkstring(L, 1);
  Safetensors *f = lua_newuserdata(L, sizeof *f);
  *f = (Safetensors){.fd = -1};
  close_when_collected(L, close_safetensors);
  return safetensors_open(f, path) ? NULL : f;
}

static void push_metadata(lua_State *L, const Safetensors *f) {
  lua_createtable(L, 0, (int)f->n_metadata);
  for (size_t i = 0; i < f->n_metadata; i++) {
    lua_pushstring(L, f->metadata[i].value);
    lua_setfield(L, -2, f->metadata[i].key);
  }
}

static int safetensors_load(lua_State *L) {
  State *S = bind_state(L);
  int64_t device = DEVICE_CPU;
  if (!lua_isnoneornil(L, 2) && bind_read_device(S, L, 2, "load", "device", &device))
    return bind_raise(L);
  Safetensors *f = open_file(L);
  if (!f) return bind_raise(L);
  lua_createtable(L, 0, (int)f->n);
  lua_createtable(L, (int)f->n, 0);
  for (size_t i = 0; i < f->n; i++) {
    if (load_entry(S, L, f, &f->entries[i], (int)device)) return bind_raise(L);
    lua_setfield(L, -3, f->entries[i].name);
    lua_pushstring(L, f->entries[i].name);
    lua_rawseti(L, -2, (int)i + 1);
  }
  push_metadata(L, f);
  safetensors_close(f);
  return 3;
}

static int safetensors_entries(lua_State *L) {
  State *S = bind_state(L);
  Safetensors *f = open_file(L);
  if (!f) return bind_raise(L);
  lua_createtable(L, (int)f->n, 0);
  for (size_t i = 0; i < f->n; i++) {
    const SafetensorsEntry *e = &f->entries[i];
    lua_createtable(L, 0, 3);
    lua_pushstring(L, e->name);
    lua_setfield(L, -2, "name");
    lua_pushstring(L, dtype_name(e->dtype));
    lua_setfield(L, -2, "dtype");
    bind_push_shape(S, L, e->ndim, e->shape);
    lua_setfield(L, -2, "shape");
    lua_rawseti(L, -2, (int)i + 1);
  }
  push_metadata(L, f);
  safetensors_close(f);
  return 2;
}

/* Whether the request at the top, { shape, dtype, from, count }, is one for this entry; its rows.
 */
static bool read_rows(lua_State *L, const SafetensorsEntry *e, int64_t rows[2]) {
  for (int i = 1; i <= 4; i++) lua_rawgeti(L, -i, i);
  bool same = lua_istable(L, -4) && lua_objlen(L, -4) == (size_t)e->ndim && lua_isstring(L, -3) &&
              !strcmp(lua_tostring(L, -3), dtype_name(e->dtype));
  for (int d = 0; d < e->ndim && same; d++) {
    lua_rawgeti(L, -4, d + 1);
    same = lua_tonumber(L, -1) == (lua_Number)e->shape[d];
    lua_pop(L, 1);
  }
  rows[0] = (int64_t)lua_tonumber(L, -2);
  rows[1] = (int64_t)lua_tonumber(L, -1);
  lua_pop(L, 4);
  int64_t n = e->ndim ? e->shape[0] : 1;
  return same && rows[0] >= 0 && rows[1] >= 0 && rows[0] <= n && rows[1] <= n - rows[0];
}

/* Pushes rows of an entry as a tensor. */
static int load_rows(State *S, lua_State *L, const Safetensors *f, const SafetensorsEntry *e,
                     const int64_t rows[2]) {
  int64_t shape[MF_MAX_DIMS], all = e->ndim ? e->shape[0] : 1;
  int64_t row = all ? (e->end - e->begin) / all : 0;
  memcpy(shape, e->shape, sizeof shape);
  shape[0] = rows[1];
  Tensor *t = tensor_create(S->E, e->dtype, e->ndim, shape, DEVICE_CPU);
  if (!t) return MF_ENOMEM;
  int code = safetensors_read_part(f, e, rows[0] * row, rows[1] * row, tensor_data(t));
  if (code) tensor_release(t);
  else bind_push(S, L, t);
  return code;
}

static int safetensors_rows(lua_State *L) {
  State *S = bind_state(L);
  luaL_checktype(L, 2, LUA_TTABLE);
  Safetensors *f = open_file(L);
  if (!f) return bind_raise(L);
  int64_t rows[2];
  lua_newtable(L);
  for (size_t i = 0; i < f->n; i++) {
    const SafetensorsEntry *e = &f->entries[i];
    lua_getfield(L, 2, e->name);
    bool wanted = lua_istable(L, -1), good = wanted && read_rows(L, e, rows);
    lua_pop(L, 1);
    if (!wanted) continue;
    if (!good)
      return bind_error(L, "load: %s: '%.80s' is not the tensor that the index tells of", f->path,
                        e->name);
    if (load_rows(S, L, f, e, rows)) return bind_raise(L);
    lua_setfield(L, -2, e->name);
  }
  safetensors_close(f);
  for (lua_pushnil(L); lua_next(L, 2); lua_pop(L, 1)) {
    lua_pushvalue(L, -2);
    lua_rawget(L, -4);
    if (lua_isnil(L, -1))
      return bind_error(L, "load: %s: it has no tensor '%.80s'", lua_tostring(L, 1),
                        lua_tostring(L, -3));
    lua_pop(L, 1);
  }
  return 1;
}

/* -- Text and folders -------------------------------------------------------------------------- */

static int path_failed(lua_State *L, int code, const char *path) {
  err_prefix(code, path);
  err_prefix(code, "save");
  return bind_raise(L);
}

static int write_text(lua_State *L) {
  size_t n;
  const char *path = luaL_checkstring(L, 1), *text = luaL_checklstring(L, 2, &n);
  DiskReplace r;
  int code = disk_replace(&r, path);
  if (!code) {
    code = disk_write(&r, text, n, 0);
    if (code) disk_abort(&r);
    else code = disk_commit(&r);
  }
  return code ? path_failed(L, code, path) : 0;
}

static int make_folder(lua_State *L) {
  const char *path = luaL_checkstring(L, 1);
  int code = disk_make_folder(path);
  return code ? path_failed(L, code, path) : 0;
}

static int close_json(lua_State *L) {
  json_close(lua_touserdata(L, 1));
  return 0;
}

static int push_json(lua_State *L, Json *j, JsonKind kind);

/* Pushes the object or array that was just opened, as a table. */
static int push_json_table(lua_State *L, Json *j, bool is_object) {
  luaL_checkstack(L, 4, "json");
  lua_newtable(L);
  for (int i = 1;; i++) {
    JsonKind kind = json_next(j);
    if (kind == JSON_OBJECT_END || kind == JSON_ARRAY_END) return 0;
    if (kind == JSON_KEY) {
      lua_pushstring(L, j->string.text);
      kind = json_next(j);
    }
    if (push_json(L, j, kind)) return MF_EINVAL;
    if (is_object) lua_rawset(L, -3);
    else lua_rawseti(L, -2, i);
  }
}

/* Pushes the value that begins with this token; null as nil. */
static int push_json(lua_State *L, Json *j, JsonKind kind) {
  switch (kind) {
    case JSON_OBJECT:
    case JSON_ARRAY: return push_json_table(L, j, kind == JSON_OBJECT);
    case JSON_STRING: lua_pushstring(L, j->string.text); return 0;
    case JSON_INT:
    case JSON_FLOAT: lua_pushnumber(L, j->number); return 0;
    case JSON_TRUE:
    case JSON_FALSE: lua_pushboolean(L, kind == JSON_TRUE); return 0;
    case JSON_NULL: lua_pushnil(L); return 0;
    default: return MF_EINVAL;
  }
}

static int json_read(lua_State *L) {
  size_t n;
  const char *text = luaL_checklstring(L, 1, &n);
  Json *j = lua_newuserdata(L, sizeof *j);
  json_open(j, text, n);
  close_when_collected(L, close_json);
  if (push_json(L, j, json_next(j)) || json_next(j) != JSON_END) return bind_raise(L);
  json_close(j);
  return 1;
}

static int idx_load(lua_State *L) {
  State *S = bind_state(L);
  const char *path = luaL_checkstring(L, 1);
  IdxFile *f = lua_newuserdata(L, sizeof *f);
  *f = (IdxFile){0};
  close_when_collected(L, close_idx);
  if (idx_open(f, path)) return bind_raise(L);
  Tensor *t = tensor_create(S->E, f->dtype, f->ndim, f->shape, DEVICE_CPU);
  if (!t) return bind_raise(L);
  int code = idx_read(f, tensor_data(t));
  idx_close(f);
  if (code) {
    tensor_release(t);
    return bind_raise(L);
  }
  bind_push(S, L, t);
  return 1;
}

void bind_open_file(State *S, lua_State *L) {
  bind_function(S, L, "_safetensors_save", safetensors_save);
  bind_function(S, L, "_safetensors_load", safetensors_load);
  bind_function(S, L, "_safetensors_entries", safetensors_entries);
  bind_function(S, L, "_safetensors_rows", safetensors_rows);
  bind_function(S, L, "_write_text", write_text);
  bind_function(S, L, "_make_folder", make_folder);
  bind_function(S, L, "_json_read", json_read);
  bind_function(S, L, "_idx_load", idx_load);
}
