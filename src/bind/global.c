/* Global tensors for Lua: what lua/global.lua is built on.
 *
 *   mf._placement(device, ranks)     a placement; ranks: a table, nested for a grid
 *   mf._to_global(x, placement, sbp, grad_sbp, check)
 *                                    x under another layout, or, of a local x, parts made one
 *   mf._is_placement(value)
 *   mf._global_part(x, rank) -> start, size
 *                                    lists: which part of a global x a rank has; nil if none
 *   x:to_local(), x.is_global, x.placement, x.sbp
 *
 * A placement is a userdata with the fields device, ranks and hierarchy. SBP are strings: 'S0',
 * 'B', 'P', 'Pmax', 'Pmin'; for a grid a table of them, one for each axis. */
#include <stdio.h>
#include <string.h>

#include "comm.h"
#include "global.h"
#include "state.h"

/* -- Placements -------------------------------------------------------------------------------- */

typedef struct Grid {
  int n_axes, size[MF_MAX_AXES], n;
  VEC(int) ranks;
} Grid;

static int not_a_grid(State *S, lua_State *L, int index) {
  char what[160];
  return err_set(MF_EINVAL,
                 "placement: ranks must be a table of ranks, or tables of such that are of one "
                 "length, holds %s",
                 bind_describe(S, L, index, what, sizeof what));
}

/* The table at the top, at depth `axis`. */
static int read_grid(State *S, lua_State *L, Grid *g, int axis) {
  if (!lua_istable(L, -1)) return not_a_grid(S, L, -1);
  int n = (int)lua_objlen(L, -1), rc = 0;
  if (axis == MF_MAX_AXES || n == 0) return not_a_grid(S, L, -1);
  if (g->size[axis] && g->size[axis] != n) return not_a_grid(S, L, -1);
  g->size[axis] = n;
  for (int i = 1; i <= n && !rc; i++) {
    lua_rawgeti(L, -1, i);
    if (lua_istable(L, -1) && g->n_axes != axis + 1) {
      rc = read_grid(S, L, g, axis + 1);
    } else {
      int64_t v = -1;
      bool ends = !g->n_axes || g->n_axes == axis + 1;
      rc = ends ? bind_read_int(L, -1, "placement", "a rank", &v) : not_a_grid(S, L, -1);
      g->n_axes = axis + 1;
      if (!rc && (v < 0 || v > INT32_MAX)) v = -1;
      if (!rc && !vec_push(&g->ranks, (int)v)) rc = err_set(MF_ENOMEM, "placement: out of memory");
    }
    lua_pop(L, 1);
  }
  return rc;
}

static const Place *to_place(State *S, lua_State *L, int index) {
  const Place **p = lua_touserdata(L, index);
  if (!p || lua_objlen(L, index) != sizeof *p || !lua_getmetatable(L, index)) return NULL;
  lua_rawgeti(L, LUA_REGISTRYINDEX, S->place_mt);
  bool same = lua_rawequal(L, -1, -2);
  lua_pop(L, 2);
  return same ? *p : NULL;
}

static void push_place(State *S, lua_State *L, const Place *p) {
  *(const Place **)lua_newuserdata(L, sizeof p) = p;
  lua_rawgeti(L, LUA_REGISTRYINDEX, S->place_mt);
  lua_setmetatable(L, -2);
}

static int new_placement(lua_State *L) {
  State *S = bind_state(L);
  int64_t device = -1;
  Grid g = {0};
  const Place *p = NULL;
  lua_settop(L, 2);
  int rc = bind_read_device(S, L, 1, "placement", "device", &device);
  if (!rc && device != DEVICE_CPU)
    rc = err_set(MF_EUNSUPPORTED, "placement: the device must be 'cpu'");
  if (!rc && !bind_comm(S, "placement")) rc = MF_ECOMM;
  if (!rc) rc = read_grid(S, L, &g, 0);
  if (!rc && !(p = global_place(S->E, (int)device, g.n_axes, g.size, g.ranks.at))) rc = MF_EINVAL;
  vec_free(&g.ranks);
  if (rc) return bind_raise(L);
  push_place(S, L, p);
  return 1;
}

static int push_ranks(lua_State *L, const Placement *p, int axis, int at) {
  lua_createtable(L, p->size[axis], 0);
  for (int i = 1; i <= p->size[axis]; i++) {
    if (axis < p->n_axes - 1) at = push_ranks(L, p, axis + 1, at);
    else lua_pushinteger(L, p->rank[at++]);
    lua_rawseti(L, -2, i);
  }
  return at;
}

static const Place *self(lua_State *L) {
  State *S = bind_state(L);
  const Place *p = to_place(S, L, 1);
  if (!p) bind_error(L, "placement: the first argument must be a placement");
  return p;
}

static int placement_index_field(lua_State *L) {
  State *S = bind_state(L);
  const Placement *p = self(L)->placement;
  const char *key = luaL_checkstring(L, 2);
  if (!strcmp(key, "device") || !strcmp(key, "type")) {
    lua_pushstring(L, S->context->devices[p->device]->name);
  } else if (!strcmp(key, "ranks")) {
    push_ranks(L, p, 0, 0);
  } else if (!strcmp(key, "hierarchy")) {
    int64_t size[MF_MAX_AXES];
    for (int a = 0; a < p->n_axes; a++) size[a] = p->size[a];
    bind_push_shape(S, L, p->n_axes, size);
  } else {
    lua_pushnil(L);
  }
  return 1;
}

static void put_place(Str *s, const Place *p) {
  str_puts(s, "placement('cpu', ");
  placement_text(p->placement, s);
  str_puts(s, ")");
}

static int placement_tostring(lua_State *L) {
  const Place *p = self(L);
  Str *s = bind_new_text(bind_state(L), L);
  put_place(s, p);
  bind_push_text(L, s, "tostring");
  return 1;
}

static int placement_eq(lua_State *L) {
  State *S = bind_state(L);
  lua_pushboolean(L, to_place(S, L, 1) == to_place(S, L, 2));
  return 1;
}

static int is_placement(lua_State *L) {
  lua_pushboolean(L, to_place(bind_state(L), L, 1) != NULL);
  return 1;
}

/* -- SBP --------------------------------------------------------------------------------------- */

static int read_axis(State *S, lua_State *L, int index, const char *name, Sbp *out) {
  char what[160];
  if (lua_type(L, index) != LUA_TSTRING)
    return err_set(MF_EINVAL,
                   "%s: sbp must be 'S0', 'B', 'P' and the like, or a table with one for each axis "
                   "of the placement, is %s",
                   name, bind_describe(S, L, index, what, sizeof what));
  int rc = sbp_parse(lua_tostring(L, index), out);
  return rc ? err_prefix(rc, name) : 0;
}

/* A text is for a placement of one axis. */
static int read_sbp(State *S, lua_State *L, int index, const char *name, const Placement *p,
                    SbpList *out) {
  *out = (SbpList){0};
  if (index < 0) index = lua_gettop(L) + index + 1;
  int n = lua_istable(L, index) ? (int)lua_objlen(L, index) : 1, rc = 0;
  if (n != p->n_axes)
    return err_set(MF_EINVAL, "%s: there are %d SBP for a placement of %d %s", name, n, p->n_axes,
                   p->n_axes == 1 ? "axis" : "axes");
  if (!lua_istable(L, index)) return read_axis(S, L, index, name, &out->axis[0]);
  for (int a = 0; a < n && !rc; a++) {
    lua_rawgeti(L, index, a + 1);
    rc = read_axis(S, L, lua_gettop(L), name, &out->axis[a]);
    lua_pop(L, 1);
  }
  return rc;
}

int bind_read_layout(State *S, lua_State *L, int placement, int sbp, const char *name,
                     const Layout **out) {
  char what[160];
  SbpList list;
  const Place *p = to_place(S, L, placement);
  if (!p)
    return err_set(MF_EINVAL, "%s: placement must be a placement (mf.placement), is %s", name,
                   bind_describe(S, L, placement, what, sizeof what));
  int rc = read_sbp(S, L, sbp, name, p->placement, &list);
  if (!rc && !(*out = global_layout(S->E, p, &list))) rc = MF_ENOMEM;
  return rc;
}

static void push_sbp(State *S, lua_State *L, const Layout *l) {
  char text[SBP_TEXT_MAX];
  int n = layout_placement(l)->n_axes;
  lua_createtable(L, n, 0);
  for (int a = 0; a < n; a++) {
    lua_pushstring(L, sbp_text(l->sbp.axis[a], text));
    lua_rawseti(L, -2, a + 1);
  }
  lua_rawgeti(L, LUA_REGISTRYINDEX, S->shape_mt); /* "(S0, B)", compared by value */
  lua_setmetatable(L, -2);
}

/* -- Tensors ----------------------------------------------------------------------------------- */

bool bind_push_global_property(State *S, lua_State *L, const Tensor *t, const char *key) {
  if (!strcmp(key, "is_global")) return lua_pushboolean(L, t->layout != NULL), true;
  if (!t->layout) return false;
  if (!strcmp(key, "placement")) return push_place(S, L, t->layout->place), true;
  if (!strcmp(key, "sbp")) return push_sbp(S, L, t->layout), true;
  return false;
}

void bind_put_layout(Str *s, const Layout *l) {
  str_puts(s, "placement=");
  put_place(s, l->place);
  str_printf(s, ", sbp=%s", l->text);
}

/* Pushes a result that was made from the tensor at index 1. */
static int push_from(State *S, lua_State *L, Tensor *x, Tensor *y) {
  if (!y) return bind_raise(L);
  if (y == x) {
    tensor_release(y);
    lua_settop(L, 1);
    return 1;
  }
  bind_push(S, L, y);
  if (x->anchored && tensor_requires_grad(y)) bind_anchor(S, L, lua_gettop(L), 1, 1);
  return 1;
}

/* nil for the placement, the SBP: those of x. */
static int read_target(State *S, lua_State *L, Tensor *x, const Layout **out) {
  char what[160];
  const Place *p = to_place(S, L, 2);
  SbpList list;
  if (lua_isnil(L, 2) && x->layout) p = x->layout->place;
  if (!p)
    return err_set(MF_EINVAL, "to_global: placement must be a placement (mf.placement), is %s",
                   bind_describe(S, L, 2, what, sizeof what));
  if (lua_isnil(L, 3) && x->layout && p->placement->n_axes == layout_placement(x->layout)->n_axes)
    list = x->layout->sbp;
  else if (read_sbp(S, L, 3, "to_global", p->placement, &list)) return MF_EINVAL;
  *out = global_layout(S->E, p, &list);
  return *out ? 0 : MF_ENOMEM;
}

static int to_global(lua_State *L) {
  State *S = bind_state(L);
  Tensor *x = bind_check_tensor(S, L, 1, "to_global", "the first argument");
  const Layout *l = NULL, *grad = NULL;
  lua_settop(L, 5);
  int rc = read_target(S, L, x, &l);
  if (!rc && !lua_isnil(L, 4)) {
    const Place *p = x->layout ? x->layout->place : l->place;
    SbpList list;
    rc = read_sbp(S, L, 4, "to_global", p->placement, &list);
    if (!rc && !(grad = global_layout(S->E, p, &list))) rc = MF_ENOMEM;
  }
  if (!rc && !x->storage) rc = err_set(MF_EINVAL, "to_global: the tensor is row-sparse");
  if (rc) return bind_raise(L);
  return push_from(S, L, x,
                   x->layout ? global_convert(S->E, x, l, grad)
                             : global_from_local(S->E, x, l, lua_toboolean(L, 5)));
}

static int to_local(lua_State *L) {
  State *S = bind_state(L);
  Tensor *x = bind_check_tensor(S, L, 1, "to_local", "the first argument");
  if (!x->layout) return bind_error(L, "to_local: the tensor is local already");
  return push_from(S, L, x, global_to_local(S->E, x));
}

static int global_part(lua_State *L) {
  State *S = bind_state(L);
  Tensor *x = bind_check_tensor(S, L, 1, "_global_part", "the first argument");
  const Placement *p = x->layout ? layout_placement(x->layout) : NULL;
  int at = p ? placement_index(p, (int)luaL_checkinteger(L, 2)) : -1;
  if (at < 0) return 0;
  int64_t start[MF_MAX_DIMS], size[MF_MAX_DIMS];
  placement_part(p, &x->layout->sbp, at, x->m.ndim, x->m.shape, start, size);
  bind_push_shape(S, L, x->m.ndim, start);
  bind_push_shape(S, L, x->m.ndim, size);
  return 2;
}

/* mf._local_is_whole(on): whether local tensors that meet global ones are taken to be equal on all
 * ranks; what it was. */
static int local_is_whole(lua_State *L) {
  State *S = bind_state(L);
  bool before = S->E->local_is_whole;
  S->E->local_is_whole = lua_toboolean(L, 1);
  lua_pushboolean(L, before);
  return 1;
}

void bind_open_global(State *S, lua_State *L) {
  lua_newtable(L);
  bind_function(S, L, "__index", placement_index_field);
  bind_function(S, L, "__tostring", placement_tostring);
  bind_function(S, L, "__eq", placement_eq);
  lua_pushliteral(L, "placement");
  lua_setfield(L, -2, "__metatable");
  S->place_mt = luaL_ref(L, LUA_REGISTRYINDEX);
  bind_function(S, L, "_placement", new_placement);
  bind_function(S, L, "_is_placement", is_placement);
  bind_function(S, L, "_local_is_whole", local_is_whole);
  bind_function(S, L, "_to_global", to_global);
  bind_function(S, L, "_global_part", global_part);
  lua_rawgeti(L, LUA_REGISTRYINDEX, S->methods);
  bind_function(S, L, "to_local", to_local);
  lua_pop(L, 1);
}
