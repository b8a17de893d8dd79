/* Subscripts: x[1], x[{ {}, 2, {0, 4, 2}, {-3, -1} }], x[k], x[mask], x[{k, j}], and assignment to
 * them.
 *
 * A table lists one subscript a dim: a number selects an entry, {} takes all, {start, stop, step} a
 * half-open range (stop and step may be missing; ends are clipped), '...' stands for all dims that
 * are not named, mf.newaxis makes a new dim, a tensor of whole numbers or a bool mask picks places.
 * Everything but tensors gives views, so assignment is a write through a view; tensors go to the
 * ops index and index_put. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "global.h"
#include "op_args.h"
#include "op_ids.h"
#include "state.h"

static const char newaxis[] = "newaxis";

typedef enum ItemKind {
  ITEM_NUMBER,
  ITEM_RANGE,
  ITEM_NEWAXIS,
  ITEM_REST,
  ITEM_PLACES,
  ITEM_MASK
} ItemKind;

typedef struct Item {
  ItemKind kind;
  int64_t start, stop, step; /* a number: start */
  bool has_stop;
  Tensor *t; /* not counted: Lua's stack holds it */
} Item;

enum { ITEMS_MAX = 2 * MF_MAX_DIMS };

/* A subscript as it is worked off. */
typedef struct Subscript {
  State *S;
  lua_State *L;
  int n;
  Item item[ITEMS_MAX];
  Tensor *v;    /* the view so far; counted */
  int n_places; /* index tensors, counted, and the dims of v that they index */
  Tensor *places[MF_MAX_DIMS];
  IntList dims;
  Tensor *mask; /* the only tensor subscript is this mask; counted; its first dim is `mask_dim` */
  int mask_dim;
} Subscript;

/* -- Reading ----------------------------------------------------------------------------------- */

bool bind_is_subscript(const char *key) {
  return !strcmp(key, "...") || !strcmp(key, newaxis);
}

static int read_range(Subscript *s, int index, Item *it) {
  lua_State *L = s->L;
  int64_t *values[] = {&it->start, &it->stop, &it->step};
  static const char *const names[] = {"start", "stop", "step"};
  size_t n = lua_objlen(L, index);
  *it = (Item){.kind = ITEM_RANGE, .step = 1};
  if (n > 3)
    return err_set(MF_EINVAL,
                   "index: a range is {start, stop, step}, this has %zu entries; for a list of "
                   "places use a tensor",
                   n);
  for (size_t k = 0; k < n; k++) {
    lua_rawgeti(L, index, (int)k + 1);
    bool given = !lua_isnil(L, -1),
         open = k == 1 && lua_type(L, -1) == LUA_TNUMBER && lua_tonumber(L, -1) == HUGE_VAL;
    int rc = given && !open ? bind_read_int(L, -1, "index", names[k], values[k]) : 0;
    lua_pop(L, 1);
    if (rc) return rc;
    if (k == 1) it->has_stop = given && !open;
  }
  if (n == 0) {
    lua_pushnil(L);
    if (lua_next(L, index)) {
      lua_pop(L, 2);
      return err_set(MF_EINVAL, "index: a range is {start, stop, step} without names");
    }
  }
  return it->step > 0
             ? 0
             : err_set(MF_EINVAL, "index: step must be at least 1, is %lld; :flip() reverses",
                       (long long)it->step);
}

static int read_tensor(Tensor *t, Item *it) {
  DType dtype = (DType)t->m.dtype;
  if (!t->storage) return err_set(MF_EINVAL, "index: a row-sparse tensor cannot be a subscript");
  if (dtype_is_float(dtype))
    return err_set(MF_EINVAL, "index: a tensor subscript must hold whole numbers or be bool, is %s",
                   dtype_name(dtype));
  if (dtype == U8)
    return err_set(
        MF_EINVAL,
        "index: a uint8 subscript could be a mask or places; say which by :bool() or :long()");
  *it = (Item){.kind = dtype == BOOL ? ITEM_MASK : ITEM_PLACES, .t = t};
  return 0;
}

/* The subscript at a stack index, one entry of the table or the whole key. */
static int read_item(Subscript *s, int index, int place) {
  lua_State *L = s->L;
  char what[160];
  if (s->n == ITEMS_MAX) return err_set(MF_EINVAL, "index: more than %d subscripts", ITEMS_MAX);
  Item *it = &s->item[s->n++];
  *it = (Item){.kind = ITEM_NUMBER};
  int type = lua_type(L, index);
  if (type == LUA_TNUMBER || type == 10 /* cdata */)
    return bind_read_int(L, index, "index", "a subscript", &it->start);
  if (type == LUA_TTABLE) return read_range(s, index, it);
  if (type == LUA_TSTRING && !strcmp(lua_tostring(L, index), "...")) return it->kind = ITEM_REST, 0;
  if (type == LUA_TSTRING && !strcmp(lua_tostring(L, index), newaxis))
    return it->kind = ITEM_NEWAXIS, 0;
  Tensor *t = bind_to_tensor(s->S, L, index);
  if (t) return read_tensor(t, it);
  if (type == LUA_TNIL && place)
    return err_set(MF_EINVAL, "index: subscript %d is nil; {} takes all of a dim", place);
  return err_set(MF_EINVAL,
                 "index: a subscript is a number, a range {start, stop, step}, a tensor, '...' or "
                 "mf.newaxis, not %s",
                 bind_describe(s->S, L, index, what, sizeof what));
}

/* The key at a stack index. Entries stay in the key, which holds the tensors. */
static int read_key(Subscript *s, int key) {
  lua_State *L = s->L;
  if (lua_type(L, key) != LUA_TTABLE) return read_item(s, key, 0);
  size_t n = lua_objlen(L, key);
  int rc = 0;
  for (size_t k = 0; k < n && !rc; k++) {
    lua_rawgeti(L, key, (int)k + 1);
    rc = read_item(s, lua_gettop(L), (int)k + 1);
    lua_pop(L, 1);
  }
  if (n || rc) return rc;
  lua_pushnil(L);
  if (!lua_next(L, key)) return 0;
  lua_pop(L, 2);
  return err_set(MF_EINVAL, "index: the table of subscripts has names in it");
}

/* -- Views ------------------------------------------------------------------------------------- */

/* Replaces the view by what the op makes of it. */
static int step_to(Subscript *s, int op, const void *args) {
  Tensor *y = eager_op(s->S->E, op, 1, &s->v, args);
  if (!y) return MF_EINVAL;
  tensor_release(s->v);
  s->v = y;
  return 0;
}

static int select_number(Subscript *s, int64_t i, int64_t dim, int user_dim) {
  int64_t n = s->v->m.shape[dim];
  if (i < -n || i >= n) {
    if (n == 0)
      return err_set(MF_EINVAL, "index: %lld is out of range: dim %d has size 0", (long long)i,
                     user_dim);
    return err_set(MF_EINVAL,
                   "index: %lld is out of range for dim %d of size %lld; legal are %lld to %lld",
                   (long long)i, user_dim, (long long)n, (long long)-n, (long long)(n - 1));
  }
  return step_to(s, OP_select, &(struct select_args){.dim = dim, .index = i});
}

static int take_range(Subscript *s, const Item *it, int64_t dim) {
  if (it->start == 0 && !it->has_stop && it->step == 1) return 0;
  return step_to(s, OP_slice,
                 &(struct slice_args){.dim = dim,
                                      .start = it->start,
                                      .stop = it->stop,
                                      .has_stop = it->has_stop,
                                      .step = it->step});
}

static int dims_of(const Item *it) {
  if (it->kind == ITEM_NEWAXIS || it->kind == ITEM_REST) return 0;
  return it->kind == ITEM_MASK ? it->t->m.ndim : 1;
}

static int add_places(Subscript *s, Tensor *t, int64_t dim) {
  s->places[s->n_places++] = t;
  s->dims.v[s->dims.n++] = dim;
  return 0;
}

/* A mask over dims dim, dim + 1, ...: its true places, one index tensor a dim. */
static int add_mask(Subscript *s, Tensor *mask, int64_t dim) {
  Eager *E = s->S->E;
  char have[SHAPE_TEXT_MAX], want[SHAPE_TEXT_MAX];
  if (mask->m.ndim == 0) { /* a new dim of size 1 or 0 */
    int64_t on;
    int rc = tensor_item(mask, NULL, &on);
    if (!rc) rc = step_to(s, OP_unsqueeze, &(struct unsqueeze_args){.dim = dim});
    Tensor *t = rc ? NULL : tensor_create(E, I64, 1, (const int64_t[]){on != 0}, DEVICE_CPU);
    if (!t) return rc ? rc : MF_ENOMEM;
    if (on) *(int64_t *)t->storage->data = 0;
    return add_places(s, t, dim);
  }
  if (memcmp(mask->m.shape, s->v->m.shape + dim, sizeof(int64_t) * (size_t)mask->m.ndim))
    return err_set(MF_EINVAL, "index: the mask has shape %s, the dims it is for have %s",
                   shape_text(mask->m.ndim, mask->m.shape, have),
                   shape_text(mask->m.ndim, s->v->m.shape + dim, want));
  Tensor *found = eager_op(E, OP_nonzero, 1, &mask, NULL);
  for (int d = 0; found && d < mask->m.ndim; d++) {
    Tensor *column = eager_op(E, OP_select, 1, &found, &(struct select_args){.dim = 1, .index = d});
    if (!column) {
      tensor_release(found);
      return MF_ENOMEM;
    }
    add_places(s, column, dim + d);
  }
  tensor_release(found);
  return found ? 0 : MF_EINVAL;
}

static int apply_item(Subscript *s, const Item *it, int64_t *dim, int *user_dim, int rest,
                      bool only_tensor) {
  int rc = 0;
  switch (it->kind) {
    case ITEM_NUMBER: return select_number(s, it->start, *dim, (*user_dim)++);
    case ITEM_RANGE: rc = take_range(s, it, (*dim)++); break;
    case ITEM_NEWAXIS: return step_to(s, OP_unsqueeze, &(struct unsqueeze_args){.dim = (*dim)++});
    case ITEM_REST:
      *dim += rest;
      *user_dim += rest;
      return 0;
    case ITEM_PLACES: rc = add_places(s, tensor_retain(it->t), (*dim)++); break;
    case ITEM_MASK:
      if (only_tensor && it->t->m.ndim &&
          !memcmp(it->t->m.shape, s->v->m.shape + *dim, sizeof(int64_t) * (size_t)it->t->m.ndim)) {
        s->mask = tensor_retain(it->t);
        s->mask_dim = (int)*dim;
      } else {
        rc = add_mask(s, it->t, *dim);
      }
      *dim += it->t->m.ndim ? it->t->m.ndim : 1;
  }
  *user_dim += dims_of(it);
  return rc;
}

/* Works the items off from the left: views become s->v, tensors gather in s->places, or in s->mask
 * when a mask is the only one. */
static int apply(Subscript *s) {
  int used = 0, rests = 0, tensors = 0, rc = 0, user_dim = 0;
  char shape[SHAPE_TEXT_MAX];
  const Meta *m = &s->v->m;
  for (int k = 0; k < s->n; k++) {
    used += dims_of(&s->item[k]);
    rests += s->item[k].kind == ITEM_REST;
    tensors += s->item[k].t != NULL;
  }
  if (rests > 1) return err_set(MF_EINVAL, "index: '...' can stand once");
  if (used > m->ndim)
    return err_set(MF_EINVAL, "index: subscripts for %d dims, the tensor has %d: %s", used, m->ndim,
                   shape_text(m->ndim, m->shape, shape));
  int rest = m->ndim - used;
  int64_t dim = 0;
  for (int k = 0; k < s->n && !rc; k++)
    rc = apply_item(s, &s->item[k], &dim, &user_dim, rest, tensors == 1);
  return rc;
}

static void clear(Subscript *s) {
  for (int k = 0; k < s->n_places; k++) tensor_release(s->places[k]);
  tensor_release(s->mask);
  tensor_release(s->v);
}

/* Turns a mask that was set aside into places. */
static int spread_mask(Subscript *s) {
  if (!s->mask) return 0;
  Tensor *mask = s->mask;
  s->mask = NULL;
  int rc = add_mask(s, mask, s->mask_dim);
  tensor_release(mask);
  return rc;
}

/* -- x[key] ------------------------------------------------------------------------------------ */

static int result(Subscript *s) {
  Eager *E = s->S->E;
  if (s->mask && s->mask->m.ndim == s->v->m.ndim) { /* one pass */
    Tensor *y = eager_op(E, OP_masked_select, 2, (Tensor *[]){s->v, s->mask}, NULL);
    tensor_release(s->v);
    s->v = y;
    return y ? 0 : MF_EINVAL;
  }
  int rc = spread_mask(s);
  if (rc || !s->n_places) return rc;
  Tensor *in[MF_MAX_DIMS + 1] = {s->v};
  memcpy(in + 1, s->places, sizeof *in * (size_t)s->n_places);
  Tensor *y = eager_op(E, OP_index, 1 + s->n_places, in,
                       &(struct index_args){.n_indices = s->n_places, .dims = s->dims});
  tensor_release(s->v);
  s->v = y;
  return y ? 0 : MF_EINVAL;
}

/* A subscript of x that gave x itself becomes a view of its own. */
static int own_view(Subscript *s, const Tensor *x) {
  if (s->v != x) return 0;
  struct reshape_args a = {.size = {.n = x->m.ndim}};
  memcpy(a.size.v, x->m.shape, sizeof(int64_t) * (size_t)x->m.ndim);
  return step_to(s, OP_reshape, &a);
}

static Tensor *subscripted(State *S, lua_State *L) {
  Tensor *x = bind_check_tensor(S, L, 1, "index", "the tensor");
  if (!x->storage)
    bind_error(L, "index: a row-sparse tensor has no subscripts; :to_dense() makes it dense");
  return x;
}

int bind_index(lua_State *L) {
  State *S = bind_state(L);
  Tensor *x = subscripted(S, L);
  Subscript s = {.S = S, .L = L, .v = tensor_retain(x)};
  int rc = read_key(&s, 2);
  if (!rc) rc = apply(&s);
  if (!rc) rc = result(&s);
  if (!rc) rc = own_view(&s, x);
  Tensor *y = rc ? NULL : tensor_retain(s.v);
  clear(&s);
  if (rc) return bind_raise(L);
  bind_push(S, L, y);
  if (x->anchored && tensor_requires_grad(y)) bind_anchor(S, L, lua_gettop(L), 1, 1);
  return 1;
}

/* -- x[key] = value ---------------------------------------------------------------------------- */

/* Drops leading dims of size 1 that the target has not. */
static int fit_value(Eager *E, Tensor **value, int ndim) {
  struct reshape_args a = {.size = {0}};
  int drop = 0;
  const Meta *m = &(*value)->m;
  while (m->ndim - drop > ndim && m->shape[drop] == 1) drop++;
  if (!drop) return 0;
  a.size.n = m->ndim - drop;
  memcpy(a.size.v, m->shape + drop, sizeof(int64_t) * (size_t)a.size.n);
  Tensor *y = eager_op(E, OP_reshape, 1, value, &a);
  if (!y) return MF_EINVAL;
  tensor_release(*value);
  *value = y;
  return 0;
}

/* One value where a mask is true, in one pass. */
static int fill_masked(Subscript *s, Tensor *value) {
  Eager *E = s->S->E;
  struct reshape_args a = {.size = {.n = s->v->m.ndim - s->mask_dim}}, scalar = {.size = {0}};
  for (int d = 0; d < a.size.n; d++) a.size.v[d] = d < s->mask->m.ndim ? s->mask->m.shape[d] : 1;
  Tensor *mask = eager_op(E, OP_reshape, 1, &s->mask, &a),
         *one = mask ? eager_op(E, OP_reshape, 1, &value, &scalar) : NULL;
  Tensor *cast =
      one ? eager_op(E, OP_cast, 1, &one, &(struct cast_args){.dtype = s->v->m.dtype}) : NULL;
  int rc =
      cast ? eager_op_into(E, OP_masked_fill, 3, (Tensor *[]){s->v, mask, cast}, NULL) : MF_EINVAL;
  tensor_release(mask);
  tensor_release(one);
  tensor_release(cast);
  return rc;
}

static int put_places(Subscript *s, Tensor **value, bool accumulate) {
  Eager *E = s->S->E;
  Tensor *in[MF_MAX_DIMS + 2];
  int ndim = 0;
  for (int k = 0; k < s->n_places; k++)
    if (s->places[k]->m.ndim > ndim) ndim = s->places[k]->m.ndim;
  int rc = fit_value(E, value, s->v->m.ndim - s->n_places + ndim);
  if (rc) return rc;
  in[0] = s->v;
  in[1] = *value;
  memcpy(in + 2, s->places, sizeof *in * (size_t)s->n_places);
  return eager_op_into(E, OP_index_put, 2 + s->n_places, in,
                       &(struct index_put_args){
                           .n_indices = s->n_places, .dims = s->dims, .accumulate = accumulate});
}

static int assign(Subscript *s, Tensor **value, bool accumulate) {
  if (s->mask && meta_numel(&(*value)->m) == 1 && !accumulate) return fill_masked(s, *value);
  int rc = spread_mask(s);
  if (rc) return rc;
  if (s->n_places) return put_places(s, value, accumulate);
  if (accumulate) return eager_op_into(s->S->E, OP_add, 2, (Tensor *[]){s->v, *value}, NULL);
  rc = fit_value(s->S->E, value, s->v->m.ndim);
  return rc ? rc : eager_op_into(s->S->E, OP_copy_, 2, (Tensor *[]){s->v, *value}, NULL);
}

static int put(State *S, lua_State *L, Tensor *x, int key, int index, bool accumulate);

/* The subscript of a global x is no view of it: the whole is written, and x takes it. */
static int put_whole(State *S, lua_State *L, Tensor *x, int key, int index, bool accumulate) {
  const Layout *all = global_broadcast(S->E, x->layout);
  Tensor *whole = all ? global_convert(S->E, x, all, NULL) : NULL;
  int rc = whole ? put(S, L, whole, key, index, accumulate) : MF_EINVAL;
  if (!rc) rc = eager_op_into(S->E, OP_copy_, 2, (Tensor *[]){x, whole}, NULL);
  tensor_release(whole);
  return rc;
}

/* The value at an index for a place in x; numbers and tables are the same on all ranks. */
static Tensor *value_for(State *S, lua_State *L, const Tensor *x, int index) {
  Tensor *value = bind_tensor_of(S, L, index, x->m.dtype);
  if (!value) err_prefix(MF_EINVAL, "index");
  if (!value || !x->layout || bind_to_tensor(S, L, index)) return value;
  const Layout *all = global_broadcast(S->E, x->layout);
  Tensor *global = all ? global_distribute(S->E, value, all) : NULL;
  tensor_release(value);
  return global;
}

static int put(State *S, lua_State *L, Tensor *x, int key, int index, bool accumulate) {
  Subscript s = {.S = S, .L = L, .v = tensor_retain(x)};
  Tensor *value = NULL;
  int rc = read_key(&s, key);
  if (!rc) rc = apply(&s);
  if (!rc && s.v->severed && !x->severed) {
    clear(&s);
    return put_whole(S, L, x, key, index, accumulate);
  }
  if (!rc && !(value = value_for(S, L, x, index))) rc = MF_EINVAL;
  if (!rc) rc = assign(&s, &value, accumulate);
  tensor_release(value);
  clear(&s);
  Tensor *given = rc ? NULL : bind_to_tensor(S, L, index);
  if (given && given->anchored && tensor_requires_grad(x)) bind_anchor(S, L, 1, index, 1);
  return rc;
}

int bind_newindex(lua_State *L) {
  State *S = bind_state(L);
  if (put(S, L, subscripted(S, L), 2, 3, false)) return bind_raise(L);
  return 0;
}

/* x:index_put_({k, j}, value, {accumulate = true}): as x[{k, j}] = value; with accumulate as x[{k,
 * j}] += value, where repeated places add up. */
static int index_put_(lua_State *L) {
  State *S = bind_state(L);
  Tensor *x = bind_check_tensor(S, L, 1, "index_put_", "the first argument");
  bool accumulate = lua_toboolean(L, 4);
  if (lua_istable(L, 4)) {
    lua_pushnil(L);
    while (lua_next(L, 4)) {
      const char *name = lua_type(L, -2) == LUA_TSTRING ? lua_tostring(L, -2) : "?";
      if (strcmp(name, "accumulate") || !lua_isboolean(L, -1))
        return bind_error(
            L, "index_put_: the only option is accumulate, true or false; '%s' was given", name);
      accumulate = lua_toboolean(L, -1);
      lua_pop(L, 1);
    }
  }
  if (put(S, L, x, 2, 3, accumulate)) return bind_raise(L);
  lua_settop(L, 1);
  return 1;
}

void bind_open_index(State *S, lua_State *L) {
  lua_pushstring(L, newaxis);
  lua_setfield(L, -2, newaxis);
  lua_rawgeti(L, LUA_REGISTRYINDEX, S->methods);
  bind_function(S, L, "index_put_", index_put_);
  lua_pop(L, 1);
}
