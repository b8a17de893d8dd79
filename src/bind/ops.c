/* The op table as Lua sees it: for help(), for the specs that walk it, and how calls split over
 * ranks.
 *
 *   mf._ops()                        a list of records; see push_op_record
 *   mf._op_of(f)                     the op whose function f is; whether it is the in-place form
 *   mf._source(module)               the text of an embedded Lua module; the names of all without
 *   mf._signatures(op, parts, ...)   runs the call and lists how it may be split over ranks
 *   mf._call_part(op, shape, ...)    the call of the rank whose first output has that shape */
#include <string.h>

#include "embed.h"
#include "sbp_rule.h"
#include "state.h"

/* -- Records ----------------------------------------------------------------------------------- */

static void set_string(lua_State *L, const char *key, const char *text) {
  if (!text) return;
  lua_pushstring(L, text);
  lua_setfield(L, -2, key);
}

static void set_bool(lua_State *L, const char *key, bool value) {
  lua_pushboolean(L, value);
  lua_setfield(L, -2, key);
}

static void push_param(lua_State *L, const Param *p) {
  static const char *const kinds[] = {"tensor", "int",   "float",  "bool",      "dim",    "ints",
                                      "choice", "dtype", "device", "generator", "program"};
  lua_createtable(L, 0, 10);
  set_string(L, "name", p->name);
  set_string(L, "kind", kinds[p->kind]);
  set_string(L, "choices", p->choices);
  set_string(L, "default", p->fallback);
  set_bool(L, "optional", p->optional);
  set_bool(L, "list", p->list);
  set_bool(L, "number", p->number);
  set_bool(L, "mutated", p->mutated);
  set_bool(L, "keyword_only", p->keyword_only);
  lua_pushinteger(L, p->fixed);
  lua_setfield(L, -2, "fixed");
}

static void push_flags(lua_State *L, int flags) {
  static const char *const names[] = {
      "view",     "inplace",     "random",        "data",     "no_grad",   "bool_out", "float_out",
      "int_only", "method_only", "function_only", "hidden",   "blockwise", "by_value", "strided",
      "places",   "spreads",     "gathers",       "transfer", "indexed",   "form"};
  lua_createtable(L, 0, 4);
  for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
    if (flags >> i & 1) set_bool(L, names[i], true);
}

/* Names of the tensor params that some gradient line serves. */
static void push_differentiable(lua_State *L, const Op *op) {
  uint32_t serves = 0;
  for (int i = 0; i < op->n_grads; i++) serves |= op->grads[i].serves;
  lua_newtable(L);
  for (int i = 0, position = 0; i < op->n_params; i++) {
    if (op->params[i].kind != PARAM_TENSOR) continue;
    if (serves >> position++ & 1) set_bool(L, op->params[i].name, true);
  }
}

/* { name, signature, doc, sbp, linear, sbp_rule, pointwise, flags = {view = true, ...}, n_outputs
 * (-1: a list), outputs = names, params, gradient = {x = true, ...}, call = f, call_ = f or nil }
 */
static void push_op_record(State *S, lua_State *L, const Op *op) {
  const OpSpec *s = op->spec[0];
  lua_createtable(L, 0, 14);
  set_string(L, "name", op->name);
  set_string(L, "signature", s->signature);
  set_string(L, "doc", op->doc);
  set_string(L, "sbp", s->sbp);
  set_string(L, "linear", s->linear);
  set_bool(L, "sbp_rule", s->sbp_rule != NULL);
  set_bool(L, "pointwise",
           s->infer == pointwise_infer || s->pointwise[PW_F32] || s->pointwise[PW_I64]);
  push_flags(L, s->flags);
  lua_setfield(L, -2, "flags");
  lua_pushinteger(L, op->n_outputs);
  lua_setfield(L, -2, "n_outputs");
  lua_newtable(L);
  for (int k = 0; op->outputs && k < op->n_outputs; k++) {
    lua_pushstring(L, op->outputs[k]);
    lua_rawseti(L, -2, k + 1);
  }
  lua_setfield(L, -2, "outputs");
  lua_createtable(L, op->n_params, 0);
  for (int i = 0; i < op->n_params; i++) {
    push_param(L, &op->params[i]);
    lua_rawseti(L, -2, i + 1);
  }
  lua_setfield(L, -2, "params");
  push_differentiable(L, op);
  lua_setfield(L, -2, "gradient");
  bind_push_op(S, L, op, false);
  lua_setfield(L, -2, "call");
  if (!(s->flags & OP_INPLACE)) return;
  bind_push_op(S, L, op, true);
  lua_setfield(L, -2, "call_");
}

static int ops(lua_State *L) {
  State *S = bind_state(L);
  lua_createtable(L, op_count, 0);
  for (int i = 0; i < op_count; i++) {
    push_op_record(S, L, &op_table[i]);
    lua_rawseti(L, -2, i + 1);
  }
  return 1;
}

static int op_of(lua_State *L) {
  bool into;
  const Op *op = bind_op_of(L, 1, &into);
  if (!op) return 0;
  lua_pushstring(L, op->name);
  lua_pushboolean(L, into);
  return 2;
}

static int source(lua_State *L) {
  if (lua_isnoneornil(L, 1)) {
    lua_newtable(L);
    for (int i = 0; embed_modules[i].name; i++) {
      lua_pushstring(L, embed_modules[i].name);
      lua_rawseti(L, -2, i + 1);
    }
    return 1;
  }
  const char *name = luaL_checkstring(L, 1);
  for (const EmbedModule *m = embed_modules; m->name; m++) {
    if (strcmp(m->name, name)) continue;
    lua_pushlstring(L, m->text, m->size);
    return 1;
  }
  return 0;
}

/* -- Splitting --------------------------------------------------------------------------------- */

static const Op *check_op(lua_State *L, int index) {
  const char *name = luaL_checkstring(L, index);
  const Op *op = op_find(name);
  if (!op) bind_error(L, "there is no op '%s'", name);
  return op;
}

typedef struct Question {
  SbpAsk ask;
  State *S;
  lua_State *L;
} Question;

static void push_sbp(lua_State *L, Sbp s) {
  char buf[SBP_TEXT_MAX];
  lua_pushstring(L, sbp_text(s, buf));
}

/* { inputs = {x = 'S0', xs = {'B', 'B'}}, outputs = {'P'} } */
static void push_signature(lua_State *L, const SbpAsk *q, const Sbp *row) {
  lua_createtable(L, 0, 2);
  lua_newtable(L);
  for (int i = 0, position = 0; i < q->op->n_params; i++) {
    const Param *p = &q->op->params[i];
    int first, n;
    if (p->kind != PARAM_TENSOR) continue;
    op_inputs_of_param(q->op, q->args, position++, &first, &n);
    if (p->list) lua_createtable(L, n, 0);
    for (int k = first; k < first + n; k++) {
      push_sbp(L, row[k]);
      if (p->list) lua_rawseti(L, -2, k - first + 1);
    }
    lua_setfield(L, -2, p->name);
  }
  lua_setfield(L, -2, "inputs");
  lua_createtable(L, q->n_out, 0);
  for (int k = 0; k < q->n_out; k++) {
    push_sbp(L, row[q->n_in + k]);
    lua_rawseti(L, -2, k + 1);
  }
  lua_setfield(L, -2, "outputs");
}

/* Runs the call, asks, and leaves the list on Lua's stack below the results. */
static int run_and_ask(void *ud, EagerCall *c) {
  Question *w = ud;
  SbpAsk *q = &w->ask;
  int rc = eager_call(w->S->E, c);
  if (rc) return rc;
  const Meta **metas = lua_newuserdata(w->L, sizeof *metas * (size_t)(c->n_in + c->n_out + 1));
  for (int k = 0; k < c->n_in; k++) metas[k] = c->in[k] ? &c->in[k]->m : NULL;
  for (int k = 0; k < c->n_out; k++) metas[c->n_in + k] = &c->out[k]->m;
  q->op = c->op, q->args = c->args;
  q->in = metas, q->out = metas + c->n_in;
  q->n_in = c->n_in, q->n_out = c->n_out;
  rc = sbp_signatures(q);
  if (!rc) {
    lua_createtable(w->L, sbp_count(q), 0);
    for (int i = 0; i < sbp_count(q); i++) {
      push_signature(w->L, q, sbp_row(q, i));
      lua_rawseti(w->L, -2, i + 1);
    }
  } else {
    eager_call_clear(c);
  }
  sbp_free(q);
  return rc;
}

static int signatures(lua_State *L) {
  State *S = bind_state(L);
  const Op *op = check_op(L, 1);
  Question w = {.ask = {.parts = (int)luaL_checkinteger(L, 2)}, .S = S, .L = L};
  int n = bind_with_call(S, L, op, 3, run_and_ask, &w);
  if (n < 0) return bind_raise(L);
  lua_pop(L, n);
  return 1;
}

typedef struct Part {
  State *S;
  Meta out;
} Part;

static int run_part(void *ud, EagerCall *c) {
  Part *p = ud;
  sbp_localize(c->op, c->args, &p->out);
  return eager_call(p->S->E, c);
}

static int call_part(lua_State *L) {
  State *S = bind_state(L);
  const Op *op = check_op(L, 1);
  IntList shape;
  if (bind_read_ints(L, 2, "_call_part", "shape", &shape)) return bind_raise(L);
  Part part = {.S = S, .out = {.ndim = (int8_t)shape.n}};
  if (shape.n > MF_MAX_DIMS) return bind_error(L, "_call_part: too many dims");
  memcpy(part.out.shape, shape.v, sizeof(int64_t) * (size_t)shape.n);
  int n = bind_with_call(S, L, op, 3, run_part, &part);
  return n < 0 ? bind_raise(L) : n;
}

void bind_open_table(State *S, lua_State *L) {
  bind_function(S, L, "_ops", ops);
  bind_function(S, L, "_op_of", op_of);
  bind_function(S, L, "_source", source);
  bind_function(S, L, "_signatures", signatures);
  bind_function(S, L, "_call_part", call_part);
}
