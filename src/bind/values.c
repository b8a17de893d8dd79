/* Lua values into tensors and back: mf.tensor, x:item(), x:tolist().
 *
 * mf.tensor reads nested tables in two walks: the first finds shape and dtype and refuses what is
 * ragged or of mixed kinds, naming the path (data[2][3]); the second fills memory. Depth is
 * limited, which also ends at a table that contains itself. Whole numbers above 2^53 do not fit a
 * Lua number: reading one is an error unless cdata is asked for. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "global.h"
#include "op_args.h"
#include "op_ids.h"
#include "state.h"

static const int64_t exact = INT64_C(1) << 53;
enum { CDATA = 10 }; /* lua_type of LuaJIT's cdata */

/* -- Reading tables ---------------------------------------------------------------------------- */

typedef struct Nest {
  State *S;
  lua_State *L;
  int ndim; /* -1 until the first element is met */
  int64_t shape[MF_MAX_DIMS], at[MF_MAX_DIMS];
  bool any_number, any_bool, any_cdata;
  DType dtype;
  char *out;
  size_t size;
} Nest;

/* "data[1][3]" for the place at depth d. */
static const char *path_text(const Nest *n, int d, char *buf, size_t size) {
  size_t used = (size_t)snprintf(buf, size, "data");
  for (int k = 0; k < d && used < size; k++)
    used += (size_t)snprintf(buf + used, size - used, "[%lld]", (long long)n->at[k] + 1);
  return buf;
}

static bool is_element(Nest *n, int index) {
  int type = lua_type(n->L, index);
  if (type == LUA_TNUMBER) n->any_number = true;
  else if (type == LUA_TBOOLEAN) n->any_bool = true;
  else if (type == CDATA) n->any_cdata = true;
  else {
    Tensor *t = type == LUA_TUSERDATA ? bind_to_tensor(n->S, n->L, index) : NULL;
    if (!t || !t->storage || meta_numel(&t->m) != 1) return false;
    *(t->m.dtype == BOOL ? &n->any_bool : &n->any_number) = true;
  }
  return true;
}

static int not_a_value(Nest *n, int d) {
  char path[160], what[160];
  return err_set(MF_EINVAL, "tensor: %s is %s; numbers, booleans and tables of them are possible",
                 path_text(n, d, path, sizeof path),
                 bind_describe(n->S, n->L, -1, what, sizeof what));
}

/* Has the table on top keys besides 1 ... size? For a long one that was filled in order, the key
 * after the last tells. */
static bool has_other_keys(lua_State *L, int64_t size) {
  enum { SHORT = 64 };
  int64_t found = size > SHORT ? size - 1 : 0;
  if (size > SHORT) lua_pushinteger(L, (lua_Integer)size);
  else lua_pushnil(L);
  while (lua_next(L, -2)) {
    lua_pop(L, 1);
    double key = lua_type(L, -1) == LUA_TNUMBER ? lua_tonumber(L, -1) : 0;
    if (!(key >= 1 && key <= (double)size) || key != floor(key)) {
      lua_pop(L, 1);
      return true;
    }
    found++;
  }
  return size <= SHORT && found != size;
}

/* The value on top is at depth d. The first way down settles the shape. */
static int measure(Nest *n, int d) {
  lua_State *L = n->L;
  char path[160];
  if (lua_type(L, -1) != LUA_TTABLE) {
    if (!is_element(n, -1)) return not_a_value(n, d);
    if (n->ndim < 0) n->ndim = d;
    if (n->ndim != d)
      return err_set(MF_EINVAL,
                     "tensor: %s is a number where others are tables; all rows must have one shape",
                     path_text(n, d, path, sizeof path));
    return 0;
  }
  if (d == MF_MAX_DIMS)
    return err_set(MF_EINVAL,
                   "tensor: data is nested deeper than %d tables; does a table contain itself?",
                   MF_MAX_DIMS);
  if (n->ndim >= 0 && d >= n->ndim)
    return err_set(MF_EINVAL,
                   "tensor: %s is a table where others are numbers; all rows must have one shape",
                   path_text(n, d, path, sizeof path));
  int64_t size = (int64_t)lua_objlen(L, -1);
  if (n->shape[d] < 0) n->shape[d] = size;
  if (n->shape[d] != size)
    return err_set(
        MF_EINVAL,
        "tensor: %s has %lld entries, others in its place have %lld; all rows must have one shape",
        path_text(n, d, path, sizeof path), (long long)size, (long long)n->shape[d]);
  if (has_other_keys(L, size))
    return err_set(MF_EINVAL, "tensor: %s has keys other than 1, 2, ..., or holes",
                   path_text(n, d, path, sizeof path));
  if (size == 0 && n->ndim < 0) n->ndim = d + 1;
  if (!lua_checkstack(L, 4)) return err_set(MF_ENOMEM, "tensor: Lua's stack is full");
  int rc = 0;
  for (n->at[d] = 0; n->at[d] < size && !rc; n->at[d]++) {
    lua_rawgeti(L, -1, (int)n->at[d] + 1);
    rc = measure(n, d + 1);
    lua_pop(L, 1);
  }
  return rc;
}

/* Does a dtype of whole numbers hold the whole part of v? */
static bool holds(DType t, double v) {
  int bits = (int)dtype_size(t) * 8;
  if (t == U8) return v > -1 && v < 256;
  double limit = ldexp(1, bits - 1);
  return (bits == 64 ? v >= -limit : v > -limit - 1) && v < limit;
}

static int does_not_hold(Nest *n, int d, double v) {
  char path[160];
  return err_set(MF_EINVAL, "tensor: %s is %.17g, which %s cannot hold",
                 path_text(n, d, path, sizeof path), v, dtype_name(n->dtype));
}

static int put_element(Nest *n, int d) {
  lua_State *L = n->L;
  int type = lua_type(L, -1);
  char path[160];
  int64_t i = 0;
  if (type == LUA_TNUMBER) {
    double v = lua_tonumber(L, -1);
    if (dtype_kind(n->dtype) == KIND_INT && !holds(n->dtype, v)) return does_not_hold(n, d, v);
    dtype_set_f64(n->dtype, n->out, v);
  } else if (type == LUA_TBOOLEAN) {
    dtype_set_i64(n->dtype, n->out, lua_toboolean(L, -1));
  } else if (type == CDATA) {
    int rc = bind_read_int(L, -1, "tensor", path_text(n, d, path, sizeof path), &i);
    if (rc) return rc;
    if (dtype_kind(n->dtype) == KIND_INT && n->dtype != I64 && !holds(n->dtype, (double)i))
      return does_not_hold(n, d, (double)i);
    dtype_set_i64(n->dtype, n->out, i);
  } else {
    double f;
    if (!is_element(n, -1)) return not_a_value(n, d);
    int rc = tensor_item(bind_to_tensor(n->S, L, -1), &f, &i);
    if (rc) return rc;
    if (dtype_is_float(n->dtype)) dtype_set_f64(n->dtype, n->out, f);
    else dtype_set_i64(n->dtype, n->out, i);
  }
  n->out += n->size;
  return 0;
}

static int fill(Nest *n, int d) {
  if (d == n->ndim) return put_element(n, d);
  if (lua_type(n->L, -1) != LUA_TTABLE) return not_a_value(n, d);
  int rc = 0;
  for (n->at[d] = 0; n->at[d] < n->shape[d] && !rc; n->at[d]++) {
    lua_rawgeti(n->L, -1, (int)n->at[d] + 1);
    rc = fill(n, d + 1);
    lua_pop(n->L, 1);
  }
  return rc;
}

/* A tensor of the table or number on top of the stack; dtype DTYPE_NONE: float32, bool for
 * booleans, int64 for cdata. */
static int tensor_of_value(State *S, lua_State *L, int64_t dtype, Tensor **out) {
  Nest n = {.S = S, .L = L, .ndim = -1};
  for (int d = 0; d < MF_MAX_DIMS; d++) n.shape[d] = -1;
  int rc = measure(&n, 0);
  if (rc) return rc;
  if (dtype == DTYPE_NONE)
    dtype = n.any_number || (!n.any_bool && !n.any_cdata) ? F32 : n.any_cdata ? I64 : BOOL;
  n.dtype = (DType)dtype;
  n.size = dtype_size(n.dtype);
  Tensor *t = tensor_create(S->E, n.dtype, n.ndim, n.shape, DEVICE_CPU);
  if (!t) return MF_ENOMEM;
  n.out = t->storage->data;
  rc = fill(&n, 0);
  if (!rc) *out = t;
  else tensor_release(t);
  return rc;
}

/* -- mf.tensor --------------------------------------------------------------------------------- */

typedef struct TensorOptions {
  int64_t dtype, device;
  bool requires_grad;
  const Layout *layout; /* NULL: local */
} TensorOptions;

static int read_options(State *S, lua_State *L, int index, TensorOptions *o) {
  *o = (TensorOptions){DTYPE_NONE, S->E->device, false, NULL};
  if (lua_isnoneornil(L, index)) return 0;
  if (!lua_istable(L, index))
    return err_set(
        MF_EINVAL,
        "tensor: the second argument must be a table of options such as {dtype = mf.int64}");
  bool placed = false;
  lua_pushnil(L);
  while (lua_next(L, index)) {
    const char *key = lua_type(L, -2) == LUA_TSTRING ? lua_tostring(L, -2) : "?";
    int rc = 0;
    if (!strcmp(key, "dtype")) rc = bind_read_dtype(S, L, lua_gettop(L), "tensor", key, &o->dtype);
    else if (!strcmp(key, "device"))
      rc = bind_read_device(S, L, lua_gettop(L), "tensor", key, &o->device);
    else if (!strcmp(key, "placement") || !strcmp(key, "sbp")) placed = true;
    else if (strcmp(key, "requires_grad"))
      rc = err_set(MF_EINVAL,
                   "tensor: there is no option '%.40s'; there are dtype, device, requires_grad, "
                   "placement, sbp",
                   key);
    else if (lua_isboolean(L, -1)) o->requires_grad = lua_toboolean(L, -1);
    else rc = err_set(MF_EINVAL, "tensor: requires_grad must be true or false");
    if (rc) return rc;
    lua_pop(L, 1);
  }
  if (!placed) return 0;
  lua_getfield(L, index, "placement");
  lua_getfield(L, index, "sbp");
  return bind_read_layout(S, L, lua_gettop(L) - 1, lua_gettop(L), "tensor", &o->layout);
}

/* A copy of another tensor, without its history. */
static int tensor_of_tensor(State *S, Tensor *source, int64_t dtype, Tensor **out) {
  bool was = S->E->grad_enabled;
  S->E->grad_enabled = false;
  if (dtype == DTYPE_NONE) dtype = source->m.dtype;
  *out = eager_op(S->E, OP_cast, 1, &source, &(struct cast_args){.dtype = dtype});
  S->E->grad_enabled = was;
  return *out ? 0 : MF_EINVAL;
}

static int on_device(Tensor **t, int64_t device) {
  if ((*t)->m.device == device) return 0;
  Tensor *moved = tensor_move(*t, (int)device);
  tensor_release(*t);
  *t = moved;
  return moved ? 0 : MF_ENOMEM;
}

static int lay_out(State *S, Tensor **t, const Layout *l) {
  Tensor *global =
      (*t)->layout ? global_convert(S->E, *t, l, NULL) : global_distribute(S->E, *t, l);
  tensor_release(*t);
  *t = global;
  return global ? 0 : MF_EINVAL;
}

/* mf.tensor(data, {dtype=, device=, requires_grad=, placement=, sbp=}): a tensor of a number, a
 * boolean, nested tables of them, or a copy of a tensor. */
static int new_tensor(lua_State *L) {
  State *S = bind_state(L);
  TensorOptions o;
  Tensor *t = NULL;
  if (lua_gettop(L) > 2)
    return bind_error(L, "tensor: two arguments are possible: data, and a table of options");
  lua_settop(L, 2);
  int rc = read_options(S, L, 2, &o);
  lua_settop(L, 2);
  lua_pushvalue(L, 1);
  Tensor *source = bind_to_tensor(S, L, 1);
  if (!rc && o.requires_grad && o.dtype != DTYPE_NONE && !dtype_is_float((DType)o.dtype))
    rc = err_set(MF_EINVAL, "tensor: only float tensors have gradients, this is %s",
                 dtype_name((DType)o.dtype));
  if (!rc)
    rc = source ? tensor_of_tensor(S, source, o.dtype, &t) : tensor_of_value(S, L, o.dtype, &t);
  if (!rc) rc = on_device(&t, o.device);
  if (!rc && o.layout) rc = lay_out(S, &t, o.layout);
  if (!rc && o.requires_grad) {
    if (dtype_is_float((DType)t->m.dtype)) tensor_autograd(t)->requires_grad = true;
    else
      rc = err_set(MF_EINVAL, "tensor: only float tensors have gradients, this is %s",
                   dtype_name((DType)t->m.dtype));
  }
  if (rc) {
    tensor_release(t);
    return bind_raise(L);
  }
  bind_push(S, L, t);
  return 1;
}

/* The tensor at an index, or a new one of a number, boolean or table there; counted. NULL with the
 * error set. */
Tensor *bind_tensor_of(State *S, lua_State *L, int index, int64_t dtype) {
  Tensor *t = bind_to_tensor(S, L, index);
  if (t) return tensor_retain(t);
  lua_pushvalue(L, index);
  int rc = tensor_of_value(S, L, dtype, &t);
  lua_pop(L, 1);
  return rc ? NULL : t;
}

/* -- Back to Lua ------------------------------------------------------------------------------- */

/* Pushes an element as a number or boolean; a whole number that a double cannot hold is an error.
 */
static int push_element(lua_State *L, DType dtype, const char *p, const char *function) {
  if (dtype == BOOL) {
    lua_pushboolean(L, *(const uint8_t *)p);
  } else if (dtype_is_float(dtype)) {
    lua_pushnumber(L, dtype_get_f64(dtype, p));
  } else {
    int64_t v = dtype_get_i64(dtype, p);
    if (v > exact || v < -exact)
      return err_set(
          MF_EINVAL,
          "%s: %lld is above 2^53 and no exact Lua number; x:item('int64') gives it as cdata",
          function, (long long)v);
    lua_pushnumber(L, (double)v);
  }
  return 0;
}

/* Pushes v as int64_t cdata. */
static int push_cdata(lua_State *L, int64_t v) {
  lua_getglobal(L, "require");
  lua_pushliteral(L, "ffi");
  if (lua_pcall(L, 1, 1, 0))
    return err_set(MF_EUNSUPPORTED, "item: cdata needs LuaJIT's ffi, which is not there");
  lua_getfield(L, -1, "new");
  lua_pushliteral(L, "int64_t");
  if (lua_pcall(L, 1, 1, 0)) return err_set(MF_EUNSUPPORTED, "item: %s", lua_tostring(L, -1));
  *(int64_t *)(uintptr_t)lua_topointer(L, -1) = v;
  return 0;
}

/* x:item(): the one element as a number or boolean; x:item('int64') as int64 cdata. */
static int item(lua_State *L) {
  State *S = bind_state(L);
  Tensor *t = bind_check_tensor(S, L, 1, "item", "the first argument");
  int64_t i;
  double f;
  if (tensor_item(t, &f, &i)) return bind_raise(L);
  if (lua_isnoneornil(L, 2)) {
    int64_t element;
    if (dtype_is_float((DType)t->m.dtype)) dtype_set_f64((DType)t->m.dtype, &element, f);
    else dtype_set_i64((DType)t->m.dtype, &element, i);
    if (push_element(L, (DType)t->m.dtype, (char *)&element, "item")) return bind_raise(L);
    return 1;
  }
  if (lua_type(L, 2) != LUA_TSTRING || strcmp(lua_tostring(L, 2), "int64"))
    return bind_error(L, "item: the only option is 'int64', for cdata");
  if (push_cdata(L, i)) return bind_raise(L);
  return 1;
}

static int push_nested(lua_State *L, const Tensor *t, int d, const char *p) {
  if (d == t->m.ndim) return push_element(L, (DType)t->m.dtype, p, "tolist");
  int64_t n = t->m.shape[d], step = t->m.stride[d] * (int64_t)dtype_size((DType)t->m.dtype);
  if (n > INT32_MAX / 2 || !lua_checkstack(L, 4))
    return err_set(MF_EINVAL, "tolist: the tensor is too large");
  lua_createtable(L, (int)n, 0);
  for (int64_t i = 0; i < n; i++) {
    int rc = push_nested(L, t, d + 1, p + i * step);
    if (rc) return rc;
    lua_rawseti(L, -2, (int)i + 1);
  }
  return 0;
}

/* x:tolist(): nested tables of numbers or booleans; a number for a 0-d tensor. */
static int tolist(lua_State *L) {
  Tensor *t = bind_check_tensor(bind_state(L), L, 1, "tolist", "the first argument");
  if (!t->storage)
    return bind_error(L, "tolist: the tensor is row-sparse; :to_dense() makes it dense");
  if (t->layout) { /* the whole, in a handle that keeps it while tables are made */
    Tensor *whole = global_gather(t->E, t);
    if (!whole) return bind_raise(L);
    bind_push(bind_state(L), L, whole);
    t = whole;
  }
  if (tensor_check_data(t, "tolist")) return bind_raise(L);
  Tensor *host = tensor_to_host(t);
  int rc = host ? push_nested(L, host, 0, tensor_data(host)) : MF_EINVAL;
  tensor_release(host);
  return rc ? bind_raise(L) : 1;
}

void bind_open_values(State *S, lua_State *L) {
  bind_function(S, L, "tensor", new_tensor);
  lua_rawgeti(L, LUA_REGISTRYINDEX, S->methods);
  bind_function(S, L, "item", item);
  bind_function(S, L, "tolist", tolist);
  lua_pop(L, 1);
}
