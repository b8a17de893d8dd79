/* Tensors on Lua's side: userdata, properties, methods that are not ops.
 *
 * x.NAME looks first among the methods, then among the properties; other keys are subscripts
 * (index.c). A result of an op gets a new userdata. A tensor that C keeps as well (a gradient) has
 * one userdata, found again through a weak table. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "global.h"
#include "op_ids.h"
#include "sparse.h"
#include "state.h"

/* -- Values of other kinds --------------------------------------------------------------------- */

void bind_push_dtype(State *S, lua_State *L, int dtype) {
  lua_rawgeti(L, LUA_REGISTRYINDEX, S->dtype_mt);
  lua_rawgeti(L, -1, dtype + 1); /* the metatable's array part holds the ten values */
  lua_remove(L, -2);
}

static int dtype_tostring(lua_State *L) {
  lua_pushstring(L, dtype_name((DType) * (int *)lua_touserdata(L, 1)));
  return 1;
}

void bind_push_shape(State *S, lua_State *L, int ndim, const int64_t *shape) {
  lua_createtable(L, ndim, 0);
  for (int d = 0; d < ndim; d++) {
    lua_pushnumber(L, (double)shape[d]);
    lua_rawseti(L, -2, d + 1);
  }
  lua_rawgeti(L, LUA_REGISTRYINDEX, S->shape_mt);
  lua_setmetatable(L, -2);
}

static int shape_tostring(lua_State *L) {
  int n = (int)lua_objlen(L, 1);
  luaL_Buffer b;
  luaL_buffinit(L, &b);
  luaL_addchar(&b, '(');
  for (int i = 1; i <= n; i++) {
    if (i > 1) luaL_addstring(&b, ", ");
    lua_rawgeti(L, 1, i);
    char text[32];
    if (lua_type(L, -1) == LUA_TSTRING) snprintf(text, sizeof text, "%s", lua_tostring(L, -1));
    else snprintf(text, sizeof text, "%.0f", lua_tonumber(L, -1));
    lua_pop(L, 1);
    luaL_addstring(&b, text);
  }
  if (n == 1) lua_rawgeti(L, 1, 1);
  bool comma = n == 1 && lua_type(L, -1) == LUA_TNUMBER;
  if (n == 1) lua_pop(L, 1);
  luaL_addstring(&b, comma ? ",)" : ")");
  luaL_pushresult(&b);
  return 1;
}

static int shape_eq(lua_State *L) {
  size_t n = lua_objlen(L, 1);
  bool same = n == lua_objlen(L, 2);
  for (size_t i = 1; i <= n && same; i++) {
    lua_rawgeti(L, 1, (int)i);
    lua_rawgeti(L, 2, (int)i);
    same = lua_rawequal(L, -1, -2);
    lua_pop(L, 2);
  }
  lua_pushboolean(L, same);
  return 1;
}

/* -- Properties -------------------------------------------------------------------------------- */

/* x.data: the same memory without the tape, writes to which are not counted. */
static Tensor *data_of(Tensor *t) {
  Tensor *d = tensor_alias(t);
  if (d) d->uncounted = true; /* parts always are */
  return d;
}

static void push_device(State *S, lua_State *L, const Tensor *t) {
  lua_pushstring(L, S->context->devices[t->m.device]->name);
}

static int get_property(State *S, lua_State *L, Tensor *t, const char *key) {
  switch (key[0]) {
    case 's':
      if (!strcmp(key, "shape")) return bind_push_shape(S, L, t->m.ndim, t->m.shape), 1;
      break;
    case 'd':
      if (!strcmp(key, "dtype")) return bind_push_dtype(S, L, t->m.dtype), 1;
      if (!strcmp(key, "device")) return push_device(S, L, t), 1;
      if (!strcmp(key, "data")) {
        Tensor *d = data_of(t);
        if (!d) return bind_raise(L);
        return bind_push(S, L, d), 1;
      }
      break;
    case 'g':
      if (!strcmp(key, "grad")) {
        if (eager_uses_gradient(S->E, t, false)) return bind_raise(L);
        return bind_push_shared(S, L, t->ag ? t->ag->grad : NULL), 1;
      }
      if (!strcmp(key, "grad_fn")) {
        Node *n;
        int output;
        if (tape_node(S->E, t, &n, &output)) return bind_raise(L);
        if (n) lua_pushstring(L, tape_node_name(n));
        else lua_pushnil(L);
        return 1;
      }
      break;
    case 'r':
      if (!strcmp(key, "requires_grad")) return lua_pushboolean(L, tensor_requires_grad(t)), 1;
      break;
    case 'n':
      if (!strcmp(key, "ndim")) return lua_pushinteger(L, t->m.ndim), 1;
      break;
    case 'i':
      if (!strcmp(key, "is_leaf")) return lua_pushboolean(L, tensor_is_leaf(t)), 1;
      if (!strcmp(key, "is_rows")) return lua_pushboolean(L, t->row_ids != NULL), 1;
      break;
    case '_':
      if (!strcmp(key, "_version"))
        return lua_pushinteger(L, t->storage ? storage_version(t->storage) : 0), 1;
      break;
  }
  return bind_push_global_property(S, L, t, key);
}

static int tensor_index(lua_State *L) {
  State *S = bind_state(L);
  if (lua_type(L, 2) != LUA_TSTRING) return bind_index(L);
  lua_pushvalue(L, 2);
  lua_rawget(L, lua_upvalueindex(2));
  if (!lua_isnil(L, -1)) return 1;
  Tensor *t = ((Handle *)lua_touserdata(L, 1))->t;
  const char *key = lua_tostring(L, 2);
  if (!t)
    return bind_error(L, "the tensor was released at the end of its scope (reading .%s)", key);
  int n = get_property(S, L, t, key);
  if (n) return n;
  if (t->row_ids && !strcmp(key, "ids")) return bind_push(S, L, tensor_retain(t->row_ids)), 1;
  if (t->row_values && !strcmp(key, "values"))
    return bind_push(S, L, tensor_retain(t->row_values)), 1;
  if (bind_is_subscript(key)) return bind_index(L);
  lua_pushnil(L);
  return 1;
}

static int set_grad(State *S, lua_State *L, Tensor *t) {
  Tensor *g = NULL;
  if (!lua_isnil(L, 3)) {
    char want[SHAPE_TEXT_MAX], have[SHAPE_TEXT_MAX];
    g = bind_check_tensor(S, L, 3, "grad", "the gradient");
    if (g->m.ndim != t->m.ndim ||
        memcmp(g->m.shape, t->m.shape, sizeof(int64_t) * (size_t)t->m.ndim))
      return bind_error(L, "grad: the gradient has shape %s, the tensor %s",
                        shape_text(g->m.ndim, g->m.shape, have),
                        shape_text(t->m.ndim, t->m.shape, want));
    if (g->m.dtype != t->m.dtype)
      return bind_error(L, "grad: the gradient is %s, the tensor %s", dtype_name((DType)g->m.dtype),
                        dtype_name((DType)t->m.dtype));
    if (!g->layout != !t->layout || (g->layout && g->layout->place != t->layout->place))
      return bind_error(L,
                        "grad: the gradient must be local, or on the tensor's placement, as the "
                        "tensor is");
  }
  if (eager_uses_gradient(S->E, t, true)) return bind_raise(L);
  Autograd *ag = tensor_autograd(t);
  tensor_retain(g);
  tensor_release(ag->grad);
  ag->grad = g;
  if (g) bind_share(S, L, 3);
  return 0;
}

/* t is the tensor at index 1. */
static int set_requires_grad(State *S, lua_State *L, Tensor *t, bool on) {
  if (on && !dtype_is_float((DType)t->m.dtype))
    return bind_error(L, "requires_grad: only float tensors have gradients, this is %s",
                      dtype_name((DType)t->m.dtype));
  if (!on && !tensor_is_leaf(t))
    return bind_error(L, "requires_grad: only a leaf can be told to need none; use :detach()");
  if (!on && !t->ag) return 0;
  tensor_autograd(t)->requires_grad = on;
  if (on && !t->registered) bind_share(S, L, 1);
  return 0;
}

/* t.data = src: t takes src's memory and shape; its gradient and place in modules stay. */
static int set_data(State *S, lua_State *L, Tensor *t) {
  Tensor *src = bind_check_tensor(S, L, 3, "data", "the new data");
  if (!src->storage || !t->storage)
    return bind_error(L, "data: a row-sparse tensor neither has data nor can be that of another");
  if (S->E->tracer && !(storage_is_traced(t->storage) && !t->storage->data))
    return bind_error(L,
                      "data: a tensor from outside gets no other data by a step that is compiled; "
                      "write x:copy_(data)");
  if (t->ag && t->ag->base)
    return bind_error(L,
                      "data: a view cannot get other data; its base can, or write x:copy_(data)");
  if (t->ag && t->ag->requires_grad && !dtype_is_float((DType)src->m.dtype))
    return bind_error(L, "data: only float tensors have gradients, the new data is %s",
                      dtype_name((DType)src->m.dtype));
  tensor_take(t, src);
  if (t->ag && t->ag->accumulate) { /* a step may have seen the old shape: later ones get a new end
                                       of the tape */
    t->ag->accumulate->leaf = NULL;
    t->ag->accumulate = NULL;
  }
  return 0;
}

static int tensor_newindex(lua_State *L) {
  State *S = bind_state(L);
  if (lua_type(L, 2) != LUA_TSTRING) return bind_newindex(L);
  const char *key = lua_tostring(L, 2);
  if (bind_is_subscript(key)) return bind_newindex(L);
  Tensor *t = bind_check_tensor(S, L, 1, key, "the tensor");
  if (!strcmp(key, "grad")) return set_grad(S, L, t);
  if (!strcmp(key, "data")) return set_data(S, L, t);
  if (!strcmp(key, "requires_grad")) return set_requires_grad(S, L, t, lua_toboolean(L, 3));
  return bind_error(L, "a tensor has no field '%s' to set; data, grad and requires_grad can be set",
                    key);
}

/* -- Methods ----------------------------------------------------------------------------------- */

static Tensor *self(lua_State *L, const char *name) {
  return bind_check_tensor(bind_state(L), L, 1, name, "the first argument");
}

static int method_detach(lua_State *L) {
  Tensor *t = tensor_alias(self(L, "detach"));
  if (!t) return bind_raise(L);
  bind_push(bind_state(L), L, t);
  return 1;
}

static int method_requires_grad_(lua_State *L) {
  Tensor *t = self(L, "requires_grad_");
  set_requires_grad(bind_state(L), L, t, lua_isnoneornil(L, 2) || lua_toboolean(L, 2));
  lua_settop(L, 1);
  return 1;
}

static int method_retain_grad(lua_State *L) {
  Tensor *t = self(L, "retain_grad");
  if (!tensor_requires_grad(t))
    return bind_error(L, "retain_grad: the tensor does not require a gradient");
  if (tape_retain_grad(bind_state(L)->E, t)) return bind_raise(L);
  lua_settop(L, 1);
  return 1;
}

static int method_numel(lua_State *L) {
  lua_pushnumber(L, (double)meta_numel(&self(L, "numel")->m));
  return 1;
}

static int method_dim(lua_State *L) {
  lua_pushinteger(L, self(L, "dim")->m.ndim);
  return 1;
}

static int one_of(lua_State *L, const char *name, const int64_t *values) {
  State *S = bind_state(L);
  Tensor *t = self(L, name);
  if (lua_isnoneornil(L, 2)) {
    bind_push_shape(S, L, t->m.ndim, values);
    return 1;
  }
  int64_t d;
  if (bind_read_int(L, 2, name, "dim", &d)) return bind_raise(L);
  if (d < -t->m.ndim || d >= t->m.ndim)
    return bind_error(L, "%s: dim %d is out of range for %d dims", name, (int)d, t->m.ndim);
  lua_pushnumber(L, (double)values[d < 0 ? d + t->m.ndim : d]);
  return 1;
}

static int method_size(lua_State *L) {
  return one_of(L, "size", self(L, "size")->m.shape);
}

static int method_stride(lua_State *L) {
  return one_of(L, "stride", self(L, "stride")->m.stride);
}

static int method_storage_offset(lua_State *L) {
  lua_pushnumber(L, (double)self(L, "storage_offset")->m.offset);
  return 1;
}

static int method_is_contiguous(lua_State *L) {
  Tensor *t = self(L, "is_contiguous");
  const char *format = lua_type(L, 2) == LUA_TSTRING ? lua_tostring(L, 2) : "contiguous";
  lua_pushboolean(L, !strcmp(format, "channels_last")
                         ? shape_is_channels_last(t->m.ndim, t->m.shape, t->m.stride)
                         : meta_is_contiguous(&t->m));
  return 1;
}

static int method_is_floating_point(lua_State *L) {
  lua_pushboolean(L, dtype_is_float((DType)self(L, "is_floating_point")->m.dtype));
  return 1;
}

static int method_element_size(lua_State *L) {
  lua_pushinteger(L, (int)dtype_size((DType)self(L, "element_size")->m.dtype));
  return 1;
}

/* The address of the first element, for hosts and FFI: valid while the tensor lives and is not
 * freed. */
static int method_data_ptr(lua_State *L) {
  Tensor *t = self(L, "data_ptr");
  if (tensor_check_data(t, "data_ptr")) return bind_raise(L);
  lua_pushlightuserdata(L, tensor_data(t));
  return 1;
}

static int method_is_set_to(lua_State *L) {
  State *S = bind_state(L);
  Tensor *a = self(L, "is_set_to"), *b = bind_check_tensor(S, L, 2, "is_set_to", "the other");
  lua_pushboolean(L, a->storage && a->storage == b->storage);
  return 1;
}

/* mf.rows(ids, values, n): a row-sparse tensor of n rows, of which only those at ids are not zero.
 */
static int new_rows(lua_State *L) {
  State *S = bind_state(L);
  Tensor *ids = bind_check_tensor(S, L, 1, "rows", "ids"),
         *values = bind_check_tensor(S, L, 2, "rows", "values");
  int64_t n;
  if (bind_read_int(L, 3, "rows", "n", &n)) return bind_raise(L);
  Tensor *t = sparse_new(ids, values, n);
  if (!t) return bind_raise(L);
  bind_push(S, L, t);
  return 1;
}

static int method_to_dense(lua_State *L) {
  State *S = bind_state(L);
  Tensor *t = self(L, "to_dense");
  if (!tensor_is_rows(t)) return lua_settop(L, 1), 1;
  t = sparse_to_dense(S->E, t);
  if (!t) return bind_raise(L);
  bind_push(S, L, t);
  return 1;
}

/* Row-sparse: the same with sorted ids, each once. */
static int method_coalesce(lua_State *L) {
  State *S = bind_state(L);
  Tensor *t = self(L, "coalesce");
  if (!tensor_is_rows(t)) return bind_error(L, "coalesce: the tensor is not row-sparse");
  Tensor *merged = sparse_coalesce(S->E, t);
  if (!merged) return bind_raise(L);
  if (merged != t) return bind_push(S, L, merged), 1;
  tensor_release(merged);
  lua_settop(L, 1);
  return 1;
}

static int method_zero_(lua_State *L) {
  State *S = bind_state(L);
  Tensor *t = self(L, "zero_");
  lua_settop(L, 1);
  if (tensor_is_rows(t)) return sparse_zero(S->E, t) ? bind_raise(L) : 1;
  lua_pushnumber(L, 0);
  int n = bind_call(S, L, &op_table[OP_fill_], 1, false);
  return n < 0 ? bind_raise(L) : n;
}

/* Gives the memory back at once, for all views of it; later use is an error. */
static int method_free(lua_State *L) {
  Tensor *t = self(L, "free");
  if (tensor_settle(t)) return bind_raise(L);
  if (t->storage) storage_free_now(t->storage);
  return 0;
}

static int tensor_unm(lua_State *L) {
  State *S = bind_state(L);
  lua_settop(L, 1);
  int n = bind_call(S, L, op_find("neg"), 1, false);
  return n < 0 ? bind_raise(L) : n;
}

static int tensor_eq(lua_State *L) {
  State *S = bind_state(L);
  lua_pushboolean(L, bind_to_tensor(S, L, 1) == bind_to_tensor(S, L, 2));
  return 1;
}

/* Lua makes a boolean of what these return, so they cannot compare by element. */
static int tensor_less(lua_State *L) {
  return bind_error(L,
                    "<, <=: tensors are compared by methods: x:lt(y), x:le(y), x:gt(y), x:ge(y)");
}

static int tensor_len(lua_State *L) {
  Tensor *t = self(L, "#");
  if (t->m.ndim == 0) return bind_error(L, "#: a 0-d tensor has no length");
  lua_pushnumber(L, (double)t->m.shape[0]);
  return 1;
}

static int is_tensor(lua_State *L) {
  lua_pushboolean(L, bind_to_tensor(bind_state(L), L, 1) != NULL);
  return 1;
}

/* -- Opening ----------------------------------------------------------------------------------- */

void bind_function(State *S, lua_State *L, const char *name, lua_CFunction f) {
  lua_pushlightuserdata(L, S);
  lua_pushcclosure(L, f, 1);
  lua_setfield(L, -2, name);
}

static void open_dtypes(State *S, lua_State *L) {
  lua_newtable(L);
  for (int t = 0; t < DTYPE_COUNT; t++) {
    *(int *)lua_newuserdata(L, sizeof(int)) = t;
    lua_pushvalue(L, -2);
    lua_setmetatable(L, -2);
    lua_pushvalue(L, -1);
    lua_setfield(L, -4, dtype_name((DType)t)); /* mf.float32 */
    lua_rawseti(L, -2, t + 1);
  }
  bind_function(S, L, "__tostring", dtype_tostring);
  lua_pushliteral(L, "dtype");
  lua_setfield(L, -2, "__metatable");
  S->dtype_mt = luaL_ref(L, LUA_REGISTRYINDEX);
}

void bind_open_tensor(State *S, lua_State *L) {
  static const luaL_Reg methods[] = {{"detach", method_detach},
                                     {"requires_grad_", method_requires_grad_},
                                     {"retain_grad", method_retain_grad},
                                     {"numel", method_numel},
                                     {"dim", method_dim},
                                     {"size", method_size},
                                     {"stride", method_stride},
                                     {"storage_offset", method_storage_offset},
                                     {"is_contiguous", method_is_contiguous},
                                     {"is_floating_point", method_is_floating_point},
                                     {"element_size", method_element_size},
                                     {"to_dense", method_to_dense},
                                     {"coalesce", method_coalesce},
                                     {"zero_", method_zero_},
                                     {"data_ptr", method_data_ptr},
                                     {"is_set_to", method_is_set_to},
                                     {"free", method_free},
                                     {NULL, NULL}};
  open_dtypes(S, L);
  lua_newtable(L);
  bind_function(S, L, "__tostring", shape_tostring);
  bind_function(S, L, "__eq", shape_eq);
  S->shape_mt = luaL_ref(L, LUA_REGISTRYINDEX);
  lua_newtable(L); /* methods */
  for (const luaL_Reg *m = methods; m->name; m++) bind_function(S, L, m->name, m->func);
  lua_pushvalue(L, -1);
  S->methods = luaL_ref(L, LUA_REGISTRYINDEX);
  lua_pushvalue(L, -1);
  lua_setfield(L, -3,
               "Tensor"); /* mf.Tensor: the table of methods, to which composed ops are added */
  lua_rawgeti(L, LUA_REGISTRYINDEX, S->tensor_mt);
  lua_pushlightuserdata(L, S);
  lua_pushvalue(L, -3);
  lua_pushcclosure(L, tensor_index, 2);
  lua_setfield(L, -2, "__index");
  bind_function(S, L, "__newindex", tensor_newindex);
  bind_function(S, L, "__unm", tensor_unm);
  bind_function(S, L, "__eq", tensor_eq);
  bind_function(S, L, "__lt", tensor_less);
  bind_function(S, L, "__le", tensor_less);
  bind_function(S, L, "__len", tensor_len);
  lua_pop(L, 2);
  bind_function(S, L, "is_tensor", is_tensor);
  bind_function(S, L, "rows", new_rows);
}
