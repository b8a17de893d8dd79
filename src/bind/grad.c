/* Gradients on Lua's side: running the lines of lua/grad.lua for the tape, and mf.no_grad, mf.grad, x:backward and their like. */
#include <stdio.h>
#include <string.h>

#include "state.h"

/* -- Gradient lines --------------------------------------------------------------------------------------------------------------- */

/* What a line may read of one parameter: o.NAME. */
static void push_param(State *S, lua_State *L, const Node *n, const Param *p, int first, int count) {
  const char *value = (const char *)n->args + p->offset;
  if (p->has_offset && !*(const bool *)((const char *)n->args + p->has_offset)) {
    lua_pushnil(L);
    return;
  }
  switch ((ParamKind)p->kind) {
    case PARAM_INT:
    case PARAM_DIM: lua_pushnumber(L, (double)*(const int64_t *)(const void *)value); return;
    case PARAM_FLOAT: lua_pushnumber(L, *(const double *)(const void *)value); return;
    case PARAM_BOOL: lua_pushboolean(L, *(const bool *)value); return;
    case PARAM_DTYPE: bind_push_dtype(S, L, (int)*(const int64_t *)(const void *)value); return;
    case PARAM_INTS:
      if (p->fixed) {
        bind_push_shape(S, L, p->fixed, (const int64_t *)(const void *)value);
      } else {
        const IntList *list = (const void *)value;
        bind_push_shape(S, L, (int)list->n, list->v);
      }
      return;
    case PARAM_CHOICE: {
      int64_t k = *(const int64_t *)(const void *)value;
      const char *c = p->choices;
      while (k-- > 0) c = strchr(c, '|') + 1;
      lua_pushlstring(L, c, strcspn(c, "|"));
      return;
    }
    case PARAM_GENERATOR: /* the key as bytes, which ops that redo the draw take */
      lua_pushlstring(L, value, sizeof(RngKey));
      return;
    case PARAM_DEVICE: lua_pushnil(L); return;
    case PARAM_TENSOR: break;
  }
  if (!p->list) {
    bind_push(S, L, tensor_retain(n->saved[first].t));
    return;
  }
  lua_createtable(L, count, 0);
  for (int k = 0; k < count; k++) {
    bind_push(S, L, tensor_retain(n->saved[first + k].t));
    lua_rawseti(L, -2, k + 1);
  }
}

static void push_meta(State *S, lua_State *L, const Node *n, int first, int count, bool list, bool shape) {
  if (list) lua_createtable(L, count, 0);
  for (int k = 0; k < count; k++) {
    const GradMeta *m = &n->in_meta[first + k];
    if (shape) bind_push_shape(S, L, m->ndim, m->shape);
    else bind_push_dtype(S, L, m->dtype);
    if (list) lua_rawseti(L, -2, k + 1);
  }
}

/* The table o: arguments, kept inputs, and o.shape and o.dtype where the line reads them. */
static void push_options(State *S, lua_State *L, const Node *n, const OpGrad *g) {
  lua_createtable(L, 0, n->op->n_params + 1);
  if (g->reads_shape) {
    lua_createtable(L, 0, 2);
    lua_createtable(L, 0, 2);
  }
  int position = 0;
  for (int i = 0; i < n->op->n_params; i++) {
    const Param *p = &n->op->params[i];
    int first = 0, count = 1;
    if (p->kind == PARAM_TENSOR) {
      op_inputs_of_param(n->op, n->args, position, &first, &count);
      if (g->reads_shape >> position & 1) {
        push_meta(S, L, n, first, count, p->list, true);
        lua_setfield(L, -3, p->name);
        push_meta(S, L, n, first, count, p->list, false);
        lua_setfield(L, -2, p->name);
      }
      if (!(g->reads_in >> position++ & 1)) continue;
    }
    push_param(S, L, n, p, first, count);
    lua_setfield(L, g->reads_shape ? -4 : -2, p->name);
  }
  if (g->reads_shape) {
    lua_setfield(L, -3, "dtype");
    lua_setfield(L, -2, "shape");
  }
}

/* Gradients of the outputs: a tensor, or for several outputs a table by name; a table in order for Tensor[]. */
static void push_gradients(State *S, lua_State *L, const Node *n, Tensor *const *g) {
  const Op *op = n->op;
  if (op->n_outputs == 1 || op->n_outputs == 0) {
    bind_push(S, L, tensor_retain(g[0]));
    return;
  }
  lua_newtable(L);
  for (int k = 0; k < n->n_out; k++) {
    bind_push(S, L, tensor_retain(g[k]));
    if (op->n_outputs < 0) lua_rawseti(L, -2, k + 1);
    else lua_setfield(L, -2, op->outputs[k]);
  }
}

/* A kept output; when gradients of gradients are wanted, it is on the tape again. */
static void push_output(State *S, lua_State *L, Node *n, int k) {
  Tensor *t = n->saved[n->n_in + k].t;
  if (!t || !S->E->grad_enabled) {
    bind_push(S, L, tensor_retain(t));
    return;
  }
  Tensor *y = tensor_alias(t);
  Autograd *ag = y ? tensor_autograd(y) : NULL;
  if (ag) {
    n->refs++;
    ag->node = n;
    ag->output = k;
  }
  bind_push(S, L, y);
}

static void push_outputs(State *S, lua_State *L, Node *n) {
  const Op *op = n->op;
  if (op->n_outputs == 1 || op->n_outputs == 0) {
    push_output(S, L, n, 0);
    return;
  }
  lua_newtable(L);
  for (int k = 0; k < n->n_out; k++) {
    push_output(S, L, n, k);
    if (op->n_outputs < 0) lua_rawseti(L, -2, k + 1);
    else lua_setfield(L, -2, op->outputs[k]);
  }
}

/* A call of one line, as a C function so that whatever it raises is caught. Arguments: light userdata of a Line. */
typedef struct Line {
  State *S;
  Node *n;
  int grad;
  Tensor *const *gout;
  const bool *need;
  Tensor **gin;
} Line;

/* Takes the tensor of result handle `index`, leaving the handle empty when nobody else will see it. */
static int take(Line *l, lua_State *L, int index, int k) {
  char what[160];
  Handle *h = bind_to_tensor(l->S, L, index) ? lua_touserdata(L, index) : NULL;
  if (!h && lua_isnil(L, index)) return 0;
  if (!h) return bind_error(L, "the gradient of %s is %s and not a tensor", l->n->op->name, bind_describe(l->S, L, index, what, sizeof what));
  tensor_release(l->gin[k]);
  l->gin[k] = tensor_retain(h->t);
  return 0;
}

static void take_param(Line *l, lua_State *L, int index, int position) {
  const Op *op = l->n->op;
  int first, count, at = 0;
  op_inputs_of_param(op, l->n->args, position, &first, &count);
  for (int i = 0; i < op->n_params; i++) {
    if (op->params[i].kind != PARAM_TENSOR || at++ != position) continue;
    if (!op->params[i].list) {
      if (l->need[first]) take(l, L, index, first);
      return;
    }
    if (lua_isnil(L, index)) return;
    luaL_checktype(L, index, LUA_TTABLE);
    for (int k = 0; k < count; k++) {
      lua_rawgeti(L, index, k + 1);
      if (l->need[first + k]) take(l, L, lua_gettop(L), first + k);
      lua_pop(L, 1);
    }
  }
}

static void push_need(Line *l, lua_State *L) {
  const Op *op = l->n->op;
  lua_newtable(L);
  for (int i = 0, position = 0; i < op->n_params; i++) {
    if (op->params[i].kind != PARAM_TENSOR) continue;
    int first, count;
    bool any = false;
    op_inputs_of_param(op, l->n->args, position++, &first, &count);
    for (int k = 0; k < count; k++) any |= l->need[first + k];
    lua_pushboolean(L, any);
    lua_setfield(L, -2, op->params[i].name);
  }
}

static int run_line(lua_State *L) {
  Line *l = lua_touserdata(L, 1);
  State *S = l->S;
  const OpGrad *g = &l->n->op->grads[l->grad];
  lua_rawgeti(L, LUA_REGISTRYINDEX, S->gradients);
  lua_rawgeti(L, -1, l->n->op->id + 1);
  lua_rawgeti(L, -1, l->grad + 1);
  bool several = g->serves & (g->serves - 1);
  push_gradients(S, L, l->n, l->gout);
  if (several) push_need(l, L);
  if (g->reads_out) push_outputs(S, L, l->n);
  else lua_pushnil(L);
  push_options(S, L, l->n, g);
  int before = lua_gettop(L) - (several ? 5 : 4);
  /* Results come in the order in which the line's key names the inputs; the binding keeps that order beside the function. */
  lua_call(L, several ? 4 : 3, LUA_MULTRET);
  int results = lua_gettop(L) - before;
  if (!several) {
    if (results) take_param(l, L, before + 1, __builtin_ctz(g->serves));
    return 0;
  }
  lua_rawgeti(L, 3, -(l->grad + 1)); /* positions by result */
  int order = lua_gettop(L);
  for (int r = 0; r < results; r++) {
    lua_rawgeti(L, order, r + 1);
    if (lua_isnil(L, -1)) break;
    int position = (int)lua_tointeger(L, -1);
    lua_pop(L, 1);
    take_param(l, L, before + 1 + r, position);
  }
  return 0;
}

static int gradient(void *ud, Node *n, int grad, Tensor *const *gout, const bool *need, Tensor **gin) {
  State *S = ud;
  lua_State *L = S->L;
  if (!lua_checkstack(L, 40)) return err_set(MF_ENOMEM, "backward: Lua's stack is full");
  Line line = {S, n, grad, gout, need, gin};
  int top = lua_gettop(L);
  uint32_t mark = bind_scope_begin(S);
  lua_pushcfunction(L, run_line);
  lua_pushlightuserdata(L, &line);
  int rc = 0;
  if (lua_pcall(L, 1, 0, 0)) {
    const char *text = lua_tostring(L, -1);
    rc = err_set(MF_ELUA, "%s", text ? text : "an error that is no text");
  }
  bind_scope_end(S, L, mark, 0, 0);
  lua_settop(L, top);
  return rc;
}

/* mf._set_gradients(table): lua/grad.lua's table by op name; keys may name several inputs. */
static int set_gradients(lua_State *L) {
  State *S = bind_state(L);
  luaL_checktype(L, 1, LUA_TTABLE);
  lua_createtable(L, op_count, 0);
  for (int id = 0; id < op_count; id++) {
    const Op *op = &op_table[id];
    if (!op->n_grads) continue;
    lua_getfield(L, 1, op->name);
    if (!lua_istable(L, -1)) return luaL_error(L, "lua/grad.lua has no entry for %s", op->name);
    lua_newtable(L); /* [k] = line, [-k] = positions in the order of its results */
    lua_pushnil(L);
    while (lua_next(L, -3)) {
      const char *key = lua_tostring(L, -2);
      uint32_t serves = 0;
      lua_newtable(L);
      int n = 0;
      for (const char *p = key; *p;) {
        size_t length = strcspn(p, ", ");
        for (int i = 0, position = 0; i < op->n_params; i++) {
          if (op->params[i].kind != PARAM_TENSOR) continue;
          if (strlen(op->params[i].name) == length && !memcmp(op->params[i].name, p, length)) {
            serves |= 1u << position;
            lua_pushinteger(L, position);
            lua_rawseti(L, -2, ++n);
          }
          position++;
        }
        p += length;
        p += strspn(p, ", ");
      }
      for (int k = 0; k < op->n_grads; k++) {
        if (op->grads[k].serves != serves) continue;
        lua_pushvalue(L, -1);
        lua_rawseti(L, -5, -(k + 1));
        lua_pushvalue(L, -2);
        lua_rawseti(L, -5, k + 1);
      }
      lua_pop(L, 2);
    }
    lua_rawseti(L, -3, id + 1);
    lua_pop(L, 1);
  }
  if (S->gradients) luaL_unref(L, LUA_REGISTRYINDEX, S->gradients);
  S->gradients = luaL_ref(L, LUA_REGISTRYINDEX);
  S->E->gradient = gradient;
  S->E->gradient_ud = S;
  return 0;
}

/* -- Grad mode ----------------------------------------------------------------------------------------------------------------------- */

static int with_grad_mode(lua_State *L, bool on) {
  State *S = bind_state(L);
  luaL_checktype(L, 1, LUA_TFUNCTION);
  bool was = S->E->grad_enabled;
  S->E->grad_enabled = on;
  int rc = lua_pcall(L, lua_gettop(L) - 1, LUA_MULTRET, 0);
  S->E->grad_enabled = was;
  return rc ? lua_error(L) : lua_gettop(L);
}

/* mf.no_grad(f, ...): f's results; nothing inside is recorded. */
static int no_grad(lua_State *L) {
  return with_grad_mode(L, false);
}

static int enable_grad(lua_State *L) {
  return with_grad_mode(L, true);
}

static int set_grad_enabled(lua_State *L) {
  State *S = bind_state(L);
  luaL_checktype(L, 1, LUA_TBOOLEAN);
  lua_pushboolean(L, S->E->grad_enabled);
  S->E->grad_enabled = lua_toboolean(L, 1);
  return 1;
}

static int is_grad_enabled(lua_State *L) {
  lua_pushboolean(L, bind_state(L)->E->grad_enabled);
  return 1;
}

/* -- backward, grad -------------------------------------------------------------------------------------------------------------------- */

typedef struct BackwardOptions {
  bool retain_graph, create_graph, allow_unused;
} BackwardOptions;

static BackwardOptions read_options(lua_State *L, int index, const char *function, bool grad) {
  BackwardOptions o = {0};
  if (lua_isnoneornil(L, index)) return o;
  if (!lua_istable(L, index)) bind_error(L, "%s: the last argument must be a table of options", function);
  lua_pushnil(L);
  bool retain_given = false;
  while (lua_next(L, index)) {
    const char *key = lua_type(L, -2) == LUA_TSTRING ? lua_tostring(L, -2) : "?";
    if (!lua_isboolean(L, -1)) bind_error(L, "%s: %s must be true or false", function, key);
    bool v = lua_toboolean(L, -1);
    if (!strcmp(key, "retain_graph")) o.retain_graph = v, retain_given = true;
    else if (!strcmp(key, "create_graph")) o.create_graph = v;
    else if (grad && !strcmp(key, "allow_unused")) o.allow_unused = v;
    else bind_error(L, "%s: there is no option '%s'; there are retain_graph, create_graph%s", function, key, grad ? ", allow_unused" : "");
    lua_pop(L, 1);
  }
  if (!retain_given) o.retain_graph = o.create_graph;
  return o;
}

/* The pass, with gradient lines running on the thread (coroutine) that asked. */
static int bind_backward(State *S, lua_State *L, int n_out, Tensor *const *outputs, Tensor *const *given, int n_in, Tensor *const *inputs,
                         Tensor **grads, bool retain_graph, bool create_graph) {
  lua_State *was = S->L;
  S->L = L;
  int rc = tape_backward(S->E, n_out, outputs, given, n_in, inputs, grads, retain_graph, create_graph);
  S->L = was;
  return rc;
}

/* x:backward(gradient, {retain_graph=, create_graph=}) */
static int backward(lua_State *L) {
  State *S = bind_state(L);
  Tensor *t = bind_check_tensor(S, L, 1, "backward", "the first argument"), *g = NULL;
  int options = 2;
  if (!lua_isnoneornil(L, 2) && !lua_istable(L, 2)) g = bind_check_tensor(S, L, 2, "backward", "gradient");
  if (g || lua_isnil(L, 2)) options = 3;
  BackwardOptions o = read_options(L, options, "backward", false);
  Tensor *given[] = {g};
  int rc = bind_backward(S, L, 1, &t, g ? given : NULL, 0, NULL, NULL, o.retain_graph, o.create_graph);
  if (rc) return bind_raise(L);
  bind_pay(S, L);
  return 0;
}

/* Tensors of a table (or one tensor) into a new block on Lua's stack, so that errors lose nothing. */
static Tensor **read_tensors(State *S, lua_State *L, int index, const char *arg, int *n) {
  bool one = bind_to_tensor(S, L, index) != NULL;
  if (!one && !lua_istable(L, index)) bind_error(L, "grad: %s must be a tensor or a table of tensors", arg);
  *n = one ? 1 : (int)lua_objlen(L, index);
  Tensor **list = lua_newuserdata(L, sizeof *list * (size_t)(*n + 1));
  for (int k = 0; k < *n; k++) {
    if (!one) lua_rawgeti(L, index, k + 1);
    list[k] = one ? bind_to_tensor(S, L, index) : bind_check_tensor(S, L, -1, "grad", arg);
    if (!one) lua_pop(L, 1);
  }
  return list;
}

/* mf.grad(outputs, inputs, {grad_outputs=, create_graph=, retain_graph=, allow_unused=}): a table of gradients. */
static int grad(lua_State *L) {
  State *S = bind_state(L);
  lua_settop(L, 3);
  int n_out, n_in, n_given = 0;
  Tensor **outputs = read_tensors(S, L, 1, "outputs", &n_out), **inputs = read_tensors(S, L, 2, "inputs", &n_in), **given = NULL;
  if (lua_istable(L, 3)) {
    lua_newtable(L); /* the options without grad_outputs */
    lua_pushnil(L);
    while (lua_next(L, 3)) {
      lua_pushvalue(L, -2);
      lua_insert(L, -2);
      bool list = lua_type(L, -2) == LUA_TSTRING && !strcmp(lua_tostring(L, -2), "grad_outputs");
      if (list) lua_pop(L, 2);
      else lua_rawset(L, -4);
    }
    lua_getfield(L, 3, "grad_outputs");
    lua_insert(L, 3); /* now 3: grad_outputs, 4: old options */
    lua_replace(L, 4);
    if (!lua_isnil(L, 3)) given = read_tensors(S, L, 3, "grad_outputs", &n_given);
    if (given && n_given != n_out) return bind_error(L, "grad: %d outputs, but %d grad_outputs", n_out, n_given);
  } else {
    lua_pushnil(L);
    lua_replace(L, 4);
  }
  BackwardOptions o = {0};
  if (lua_istable(L, 4)) o = read_options(L, 4, "grad", true);
  for (int k = 0; k < n_in; k++)
    if (!tensor_requires_grad(inputs[k])) return bind_error(L, "grad: inputs[%d] does not require a gradient", k + 1);
  Tensor **grads = lua_newuserdata(L, sizeof *grads * (size_t)(n_in + 1));
  memset(grads, 0, sizeof *grads * (size_t)(n_in + 1));
  int rc = bind_backward(S, L, n_out, outputs, given, n_in, inputs, grads, o.retain_graph, o.create_graph);
  for (int k = 0; k < n_in && !rc && !o.allow_unused; k++)
    if (!grads[k]) rc = err_set(MF_EINVAL, "grad: inputs[%d] was not used to make the outputs; pass {allow_unused = true} to get nil for it", k + 1);
  if (rc) {
    for (int k = 0; k < n_in; k++) tensor_release(grads[k]);
    return bind_raise(L);
  }
  lua_createtable(L, n_in, 0);
  for (int k = 0; k < n_in; k++) {
    bind_push(S, L, grads[k]);
    lua_rawseti(L, -2, k + 1);
  }
  return 1;
}

void bind_open_grad(State *S, lua_State *L) {
  bind_function(S, L, "_set_gradients", set_gradients);
  bind_function(S, L, "no_grad", no_grad);
  bind_function(S, L, "enable_grad", enable_grad);
  bind_function(S, L, "set_grad_enabled", set_grad_enabled);
  bind_function(S, L, "is_grad_enabled", is_grad_enabled);
  bind_function(S, L, "grad", grad);
  lua_rawgeti(L, LUA_REGISTRYINDEX, S->methods);
  bind_function(S, L, "backward", backward);
  lua_pop(L, 1);
}
