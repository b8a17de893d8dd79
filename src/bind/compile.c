/* Compiled steps for lua/compile.lua: jobs as userdata, and mf.scalar. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "cpuid.h"
#include "feed.h"
#include "job.h"
#include "pass.h"
#include "plan.h"
#include "state.h"
#include "str.h"

/* -- Scalars ----------------------------------------------------------------------------------- */

typedef struct Scalar {
  const State *tag;
  double value;
  char unused[8]; /* tells it from a Handle by size */
} Scalar;

static const char scalar_tag[1];

static Scalar *to_scalar(lua_State *L, int index) {
  Scalar *s = lua_touserdata(L, index);
  bool is = s && lua_objlen(L, index) == sizeof *s && s->tag == (const void *)scalar_tag;
  return is ? s : NULL;
}

const double *bind_to_scalar(const State *S, lua_State *L, int index) {
  (void)S;
  Scalar *s = to_scalar(L, index);
  return s ? &s->value : NULL;
}

void bind_use_scalar(State *S, lua_State *L, int index) {
  if (S->scalars == LUA_NOREF) return;
  lua_pushvalue(L, index);
  lua_rawgeti(L, LUA_REGISTRYINDEX, S->scalars);
  lua_insert(L, -2);
  lua_pushboolean(L, true);
  lua_rawset(L, -3);
  lua_pop(L, 1);
}

/* mf._scalar(value): a number that compiled steps read before each call. */
static int scalar_new(lua_State *L) {
  State *S = bind_state(L);
  double value = luaL_checknumber(L, 1);
  Scalar *s = lua_newuserdata(L, sizeof *s);
  *s = (Scalar){.tag = (const void *)scalar_tag, .value = value};
  lua_rawgeti(L, LUA_REGISTRYINDEX, S->scalar_mt);
  lua_setmetatable(L, -2);
  return 1;
}

static Scalar *check_scalar(lua_State *L) {
  Scalar *s = to_scalar(L, 1);
  if (!s) bind_error(L, "scalar: the first argument must be an mf.scalar");
  return s;
}

static int scalar_get(lua_State *L) {
  lua_pushnumber(L, check_scalar(L)->value);
  return 1;
}

static int scalar_set(lua_State *L) {
  Scalar *s = check_scalar(L);
  if (lua_type(L, 2) == LUA_TBOOLEAN) s->value = lua_toboolean(L, 2);
  else if (lua_type(L, 2) == LUA_TNUMBER) s->value = lua_tonumber(L, 2);
  else return bind_error(L, "scalar: the value must be a number, is a %s", luaL_typename(L, 2));
  return 0;
}

static int is_scalar(lua_State *L) {
  lua_pushboolean(L, to_scalar(L, 1) != NULL);
  return 1;
}

/* -- Jobs -------------------------------------------------------------------------------------- */

static const char job_mt[] = "moonflow.job";

typedef struct JobBox {
  Job *job;
} JobBox;

static Job *check_job(lua_State *L) {
  JobBox *b = luaL_checkudata(L, 1, job_mt);
  if (!b->job) bind_error(L, "the compiled step was released");
  return b->job;
}

static int job_gc(lua_State *L) {
  JobBox *b = luaL_checkudata(L, 1, job_mt);
  job_destroy(b->job);
  b->job = NULL;
  return 0;
}

static bool is_in_list(lua_State *L, int list, int value) {
  bool found = false;
  for (int k = 1, n = lua_istable(L, list) ? (int)lua_objlen(L, list) : 0; k <= n; k++) {
    lua_rawgeti(L, list, k);
    found |= lua_tointeger(L, -1) == value;
    lua_pop(L, 1);
  }
  return found;
}

/* Stack: f, args. Calls f on traced tensors for the tensors in the table `args`; those whose places
 * the table `repeated` lists are whole in each micro-batch. */
static int call_traced(State *S, lua_State *L, Job *j, int args, int repeated) {
  int n = (int)lua_objlen(L, args);
  luaL_checkstack(L, n + 8, "too many arguments");
  for (int k = 1; k <= n; k++) {
    lua_rawgeti(L, args, k);
    Tensor *like = bind_to_tensor(S, L, -1);
    Tensor *x = like ? job_input(j, like, is_in_list(L, repeated, k)) : NULL;
    lua_pop(L, 1);
    if (!x) return like ? MF_EINVAL : err_set(MF_EINVAL, "compile: argument %d is no tensor", k);
    bind_push(S, L, x);
  }
  if (!lua_pcall(L, n, 1, 0)) return 0;
  return MF_ELUA; /* the error value is on top */
}

/* -- Passes ------------------------------------------------------------------------------------ */

/* Whether MF_DUMP, a list such as "graph,pass,plan", names this stage. */
static bool is_dumped(const char *stage) {
  const char *list = getenv("MF_DUMP");
  size_t n = strcspn(stage, " ");
  for (const char *p = list ? list : ""; *p; p += strcspn(p, ","), p += *p == ',')
    if (strcspn(p, ",") == n && !strncmp(p, stage, n)) return true;
  return false;
}

/* Onto Lua's io.stderr, since the library itself does not print. */
static void dump_text(lua_State *L, const char *stage, Str *text) {
  int top = lua_gettop(L);
  lua_getglobal(L, "io");
  if (lua_istable(L, -1)) lua_getfield(L, -1, "stderr");
  if (lua_isuserdata(L, -1)) {
    lua_getfield(L, -1, "write");
    lua_insert(L, -2);
    lua_pushfstring(L, "-- %s\n%s", stage, text->text ? text->text : "");
    lua_pcall(L, 2, 0, 0);
  }
  lua_settop(L, top);
  str_free(text);
}

static void dump_graph(void *ud, const char *stage, Graph *g) {
  Str s = {0};
  if (!is_dumped(stage)) return;
  graph_print(g, &s);
  dump_text(ud, stage, &s);
}

static void dump_plan(lua_State *L, Job *j) {
  Str s = {0};
  if (!is_dumped("plan")) return;
  job_print_plan(j, &s);
  job_print_memory(j, &s);
  dump_text(L, "plan", &s);
}

/* The table at `index` says pass = false for what is not to run; names were checked. Behind it, the
 * name of the dtype of products. */
static PassSettings settings_of(lua_State *L, int index) {
  PassSettings s = {.dump = getenv("MF_DUMP") ? dump_graph : NULL, .ud = L};
  if (lua_isstring(L, index + 1)) s.amp = dtype_parse(lua_tostring(L, index + 1));
  for (int k = 0; k < pass_count && lua_istable(L, index); k++) {
    lua_getfield(L, index, pass_table[k].name);
    if (lua_isboolean(L, -1) && !lua_toboolean(L, -1)) s.off |= UINT64_C(1) << k;
    lua_pop(L, 1);
  }
  return s;
}

/* mf._passes(): their names, in order, repeated where they run several times. */
static int passes(lua_State *L) {
  lua_createtable(L, pass_count, 0);
  for (int k = 0; k < pass_count; k++) {
    lua_pushstring(L, pass_table[k].name);
    lua_rawseti(L, -2, k + 1);
  }
  return 1;
}

static int find_pass(const char *name, size_t n) {
  for (int k = 0; k < pass_count; k++)
    if (strlen(pass_table[k].name) == n && !strncmp(pass_table[k].name, name, n)) return k;
  err_set(MF_EINVAL, "there is no pass %.*s", (int)n, name);
  return -1;
}

/* Runs the passes of a list such as "dce,cse"; *seconds is what they took. */
static int run_passes(Graph *g, const char *names, const PassSettings *s, double *seconds) {
  int rc = 0;
  clock_t start = clock();
  for (const char *p = names; *p && !rc; p += strcspn(p, ","), p += *p == ',') {
    int k = find_pass(p, strcspn(p, ","));
    rc = k < 0 ? MF_EINVAL : pass_run(g, k, s);
  }
  *seconds = (double)(clock() - start) / CLOCKS_PER_SEC;
  return rc;
}

/* mf._has_bf16(): whether the CPU multiplies bfloat16. */
static int has_bf16(lua_State *L) {
  lua_pushboolean(L, cpuid_has_bf16());
  return 1;
}

/* mf._graph_pass(text, names, amp, budget, times, repeated, rank, zero): the text of the graph
 * after these passes ("dce,cse", or "" for none), which make `times` micro-batches of it, the
 * inputs that the list names being whole in each; then the seconds that they took; then the graph
 * for Graphviz.
 */
static int graph_pass(lua_State *L) {
  State *S = bind_state(L);
  const char *names = luaL_checkstring(L, 2);
  PassSettings settings = settings_of(L, 2); /* a dtype stands third */
  settings.stream = S->E->streams[DEVICE_CPU], settings.isa = S->E->isa;
  PlanOptions options = {0};
  settings.budget = (int64_t)lua_tonumber(L, 4);
  settings.measure = plan_measure, settings.measure_ud = &options;
  settings.times = lua_isnumber(L, 5) ? (int)lua_tointeger(L, 5) : 1;
  settings.rank = (int)lua_tointeger(L, 7), settings.zero = (int)lua_tointeger(L, 8);
  for (int k = 0; k < 64; k++)
    if (is_in_list(L, 6, k + 1)) settings.repeated |= UINT64_C(1) << k;
  Str *text = bind_new_text(S, L), *dot = bind_new_text(S, L);
  Graph *g = graph_parse(luaL_checkstring(L, 1));
  double seconds;
  if (!g) return bind_raise(L);
  int rc = run_passes(g, names, &settings, &seconds);
  if (!rc) graph_print(g, text), graph_dot(g, dot);
  graph_destroy(g);
  if (rc) return bind_raise(L);
  bind_push_text(L, text, "_graph_pass");
  lua_pushnumber(L, seconds);
  bind_push_text(L, dot, "_graph_pass");
  return 3;
}

/* -- Making jobs ------------------------------------------------------------------------------- */

static int take_results(State *S, lua_State *L, Job *j, int table, PassSettings *s,
                        const PlanOptions *o) {
  int n = (int)lua_objlen(L, table), rc = 0;
  Tensor **results = mem_zalloc(sizeof *results * (size_t)(n + 1));
  if (!results) return err_set(MF_ENOMEM, "out of memory");
  for (int k = 0; k < n; k++) {
    lua_rawgeti(L, table, k + 1);
    results[k] = bind_to_tensor(S, L, -1);
    lua_pop(L, 1);
    if (!results[k]) rc = err_set(MF_EINVAL, "compile: result %d is no tensor", k + 1);
  }
  if (rc) job_abandon(j);
  else rc = job_finish(j, n, results, s, o);
  mem_free(results);
  return rc;
}

static JobBox *new_job(lua_State *L) {
  JobBox *b = lua_newuserdata(L, sizeof *b);
  b->job = NULL;
  luaL_getmetatable(L, job_mt);
  lua_setmetatable(L, -2);
  return b;
}

/* mf._compile(name, f, args, scalars, passes, amp, one_op_tasks, budget, times, repeated, zero,
 * zero_min, overlap): traces f
 * on the tensors of args; f returns the list of its results that are traced tensors. `scalars` is
 * filled with what the step reads; `passes` says which do not run, `amp` is the name of the dtype
 * of products, `budget` how many bytes it may take, `times` how many micro-batches there are, and
 * `repeated` which args are whole in each. Returns the job. */
static int compile(lua_State *L) {
  State *S = bind_state(L);
  const char *name = luaL_checkstring(L, 1);
  luaL_checktype(L, 3, LUA_TTABLE);
  luaL_checktype(L, 4, LUA_TTABLE);
  PassSettings settings = settings_of(L, 5);
  settings.budget = (int64_t)lua_tonumber(L, 8);
  settings.zero = (int)lua_tointeger(L, 11), settings.zero_min = (int)lua_tointeger(L, 12);
  PlanOptions options = {.one_op_tasks = lua_toboolean(L, 7), .overlap = (int)lua_tointeger(L, 13)};
  lua_settop(L, 10);
  JobBox *b = new_job(L);
  int box = lua_gettop(L);
  int times = lua_isnumber(L, 9) ? (int)lua_tointeger(L, 9) : 1;
  if (!(b->job = job_begin(S->E, name, times))) return bind_raise(L);
  lua_pushvalue(L, 4);
  S->scalars = luaL_ref(L, LUA_REGISTRYINDEX);
  lua_pushvalue(L, 2);
  S->tracing = b->job;
  int rc = call_traced(S, L, b->job, 3, 10);
  S->tracing = NULL;
  luaL_unref(L, LUA_REGISTRYINDEX, S->scalars);
  S->scalars = LUA_NOREF;
  if (rc) job_abandon(b->job);
  else if (lua_type(L, -1) != LUA_TTABLE)
    job_abandon(b->job), rc = err_set(MF_EINVAL, "compile: a list of results is needed");
  else rc = take_results(S, L, b->job, lua_gettop(L), &settings, &options);
  if (rc == MF_ELUA) return lua_error(L);
  if (rc) return bind_raise(L);
  dump_plan(L, b->job);
  lua_settop(L, box);
  return 1;
}

enum { MOST_TENSORS = 32 };

static int too_many(lua_State *L) {
  return bind_error(L, "a compiled step takes and returns at most %d tensors", MOST_TENSORS);
}

/* job:run(tensors...) -> tensors... */
static int job_call(lua_State *L) {
  State *S = bind_state(L);
  Job *j = check_job(L);
  int n_in = lua_gettop(L) - 1, n_out = job_n_results(j);
  if (n_in > MOST_TENSORS || n_out > MOST_TENSORS) return too_many(L);
  Tensor *in[MOST_TENSORS], *out[MOST_TENSORS];
  for (int k = 0; k < n_in; k++) in[k] = bind_check_tensor(S, L, k + 2, "run", "an argument");
  if (job_run(j, n_in, in, out)) return bind_raise(L);
  if (bind_push_list(S, L, out, n_out, false)) {
    for (int k = 0; k < n_out; k++) tensor_release(out[k]);
    return lua_error(L);
  }
  bind_pay(S, L);
  return n_out;
}

/* job:open(feed, buffers): the job runs over the feed's batches until job:close(). */
static int job_open(lua_State *L) {
  Job *j = check_job(L);
  JobSource source = feed_source(feed_check(L, 2));
  if (job_open_flow(j, &source, (int)lua_tointeger(L, 3))) return bind_raise(L);
  return 0;
}

/* job:next() -> true and the results of one more step; nothing when no batch is left for it. */
static int job_next(lua_State *L) {
  State *S = bind_state(L);
  Job *j = check_job(L);
  int n = job_n_results(j);
  Tensor *out[MOST_TENSORS];
  if (n > MOST_TENSORS) return too_many(L);
  int rc = job_flow_next(j, out);
  if (rc == JOB_END) return 0;
  if (rc) return bind_raise(L);
  luaL_checkstack(L, n + 4, "too many results");
  lua_pushboolean(L, true);
  for (int k = 0; k < n; k++) bind_push(S, L, out[k]);
  bind_pay(S, L);
  return n + 1;
}

static int job_close(lua_State *L) {
  return job_close_flow(check_job(L)) ? bind_raise(L) : 0;
}

/* job:counts() -> batches taken and copied in, steps whose results are there. */
static int job_counts(lua_State *L) {
  uint64_t counts[3];
  job_flow_counts(check_job(L), counts);
  for (int k = 0; k < 3; k++) lua_pushnumber(L, (double)counts[k]);
  return 3;
}

static int job_fits_now(lua_State *L) {
  lua_pushboolean(L, job_fits(check_job(L)));
  return 1;
}

static int push_text(lua_State *L, void (*print)(Job *, Str *), const char *what) {
  Job *j = check_job(L);
  Str *s = bind_new_text(bind_state(L), L);
  print(j, s);
  bind_push_text(L, s, what);
  return 1;
}

static int job_text(lua_State *L) {
  return push_text(L, job_print, "text");
}

static int job_graphviz(lua_State *L) {
  return push_text(L, job_dot, "dot");
}

static int job_plan(lua_State *L) {
  return push_text(L, job_print_plan, "plan");
}

static int job_memory(lua_State *L) {
  return push_text(L, job_print_memory, "memory");
}

/* job:captures() -> a list of {name, tensor, written}, in the order of ports. */
static int job_captures(lua_State *L) {
  State *S = bind_state(L);
  Job *j = check_job(L);
  const char *name;
  bool written;
  Tensor *t;
  lua_newtable(L);
  for (int k = 0; (t = job_capture(j, k, &name, &written)); k++) {
    lua_newtable(L);
    lua_pushstring(L, name);
    lua_setfield(L, -2, "name");
    bind_push(S, L, tensor_retain(t));
    lua_setfield(L, -2, "tensor");
    lua_pushboolean(L, written);
    lua_setfield(L, -2, "written");
    lua_rawseti(L, -2, k + 1);
  }
  return 1;
}

/* job:cells() -> a list of the numbers that a call would read now. */
static int job_cells(lua_State *L) {
  Job *j = check_job(L);
  double value;
  lua_newtable(L);
  for (int k = 0; job_cell(j, k, &value); k++) {
    lua_pushnumber(L, value);
    lua_rawseti(L, -2, k + 1);
  }
  return 1;
}

/* mf._plan(text, captures, cells): a job from what job:plan() returned; the lists are in the order
 * of job:captures() and job:cells(). */
static int plan(lua_State *L) {
  State *S = bind_state(L);
  const char *text = luaL_checkstring(L, 1);
  luaL_checktype(L, 2, LUA_TTABLE);
  luaL_checktype(L, 3, LUA_TTABLE);
  JobBox *b = new_job(L);
  int n = (int)lua_objlen(L, 2), n_cells = (int)lua_objlen(L, 3);
  Tensor **captures = lua_newuserdata(L, sizeof *captures * (size_t)(n + 1));
  double *cells = lua_newuserdata(L, sizeof *cells * (size_t)(n_cells + 1));
  for (int k = 0; k < n; k++, lua_pop(L, 1)) {
    lua_rawgeti(L, 2, k + 1);
    captures[k] = bind_check_tensor(S, L, -1, "plan", "a captured tensor");
  }
  for (int k = 0; k < n_cells; k++, lua_pop(L, 1)) {
    lua_rawgeti(L, 3, k + 1);
    cells[k] = lua_tonumber(L, -1);
  }
  b->job = job_from_plan(S->E, text, n, captures, n_cells, cells);
  if (!b->job) return bind_raise(L);
  lua_settop(L, 4);
  return 1;
}

static void add_form(Str *s, const Tensor *t) {
  str_printf(s, "%s:", dtype_name((DType)t->m.dtype));
  if (t->m.device != DEVICE_CPU) str_printf(s, "device %d:", t->m.device);
  for (int d = 0; d < t->m.ndim; d++)
    str_printf(s, "%s%lld", d ? "," : "", (long long)t->m.shape[d]);
  if (!meta_is_contiguous(&t->m))
    for (int d = 0; d < t->m.ndim; d++)
      str_printf(s, "%c%lld", d ? ',' : '/', (long long)t->m.stride[d]);
  if (t->layout) {
    str_puts(s, ":");
    bind_put_layout(s, t->layout);
  }
  str_puts(s, ";");
}

/* mf._form(...): a string that tells apart arguments that need steps of their own. */
static int form(lua_State *L) {
  State *S = bind_state(L);
  Str *s = &S->form;
  s->n = 0;
  s->failed = false;
  str_puts(s, S->E->grad_enabled ? "" : "no_grad;");
  for (int k = 1; k <= lua_gettop(L); k++) {
    Tensor *t = bind_to_tensor(S, L, k);
    int type = lua_type(L, k);
    if (t && S->E->grad_enabled && tensor_requires_grad(t)) {
      return bind_error(L,
                        "compile: argument %d requires a gradient, and none leaves a compiled step "
                        "but into what it captures; pass it detached",
                        k);
    }
    if (t && t->storage) add_form(s, t);
    else if (type == LUA_TNUMBER) str_printf(s, "%.17g;", lua_tonumber(L, k));
    else if (type == LUA_TBOOLEAN) str_puts(s, lua_toboolean(L, k) ? "true;" : "false;");
    else if (type == LUA_TNIL) str_puts(s, "nil;");
    else if (type == LUA_TSTRING) str_printf(s, "%zu'%s;", lua_objlen(L, k), lua_tostring(L, k));
    else {
      char what[160];
      return bind_error(L,
                        "compile: argument %d is %s; tensors, numbers, strings, booleans and nil "
                        "are possible",
                        k, bind_describe(S, L, k, what, sizeof what));
    }
  }
  if (s->failed) return luaL_error(L, "out of memory");
  lua_pushlstring(L, s->text ? s->text : "", s->n);
  return 1;
}

/* mf._is_traced(x): whether x is a tensor that has a value only when the compiled step runs. */
static int is_traced(lua_State *L) {
  Tensor *t = bind_to_tensor(bind_state(L), L, 1);
  lua_pushboolean(L, t && t->storage && storage_is_traced(t->storage) && !t->storage->data);
  return 1;
}

/* mf._tracing(): whether a step is being traced. */
static int tracing(lua_State *L) {
  lua_pushboolean(L, bind_state(L)->E->tracer != NULL);
  return 1;
}

static Job *traced_job(lua_State *L) {
  State *S = bind_state(L);
  return S->E->tracer ? S->tracing : NULL;
}

/* mf._segment(segment): what is traced from here on belongs to it (nil: to a new one); the one
 * before. */
static int segment(lua_State *L) {
  Job *j = traced_job(L);
  if (!j) return bind_error(L, "checkpoint: no step is being compiled");
  lua_pushinteger(L, job_segment(j, lua_isnoneornil(L, 1) ? -1 : (int)lua_tointeger(L, 1)));
  return 1;
}

/* mf._segment_keep(x): the traced tensor is needed behind its segment. */
static int segment_keep(lua_State *L) {
  Job *j = traced_job(L);
  Tensor *t = bind_check_tensor(bind_state(L), L, 1, "checkpoint", "a result");
  if (!j) return bind_error(L, "checkpoint: no step is being compiled");
  return job_keep(j, t) ? bind_raise(L) : 0;
}

/* mf._untraced(f, ...): f's results, computed now, also while a step is traced. */
static int untraced(lua_State *L) {
  Eager *E = bind_state(L)->E;
  EagerTracer *tracer = E->tracer;
  luaL_checktype(L, 1, LUA_TFUNCTION);
  E->tracer = NULL;
  int rc = lua_pcall(L, lua_gettop(L) - 1, LUA_MULTRET, 0);
  E->tracer = tracer;
  return rc ? lua_error(L) : lua_gettop(L);
}

void bind_open_compile(State *S, lua_State *L) {
  static const luaL_Reg functions[] = {{"_scalar", scalar_new},
                                       {"_scalar_get", scalar_get},
                                       {"_scalar_set", scalar_set},
                                       {"_is_scalar", is_scalar},
                                       {"_compile", compile},
                                       {"_is_traced", is_traced},
                                       {"_tracing", tracing},
                                       {"_untraced", untraced},
                                       {"_form", form},
                                       {"_segment", segment},
                                       {"_segment_keep", segment_keep},
                                       {"_passes", passes},
                                       {"_has_bf16", has_bf16},
                                       {"_graph_pass", graph_pass},
                                       {"_plan", plan},
                                       {NULL, NULL}};
  static const luaL_Reg methods[] = {
      {"run", job_call},    {"plan", job_plan}, {"memory", job_memory}, {"captures", job_captures},
      {"cells", job_cells}, {"text", job_text}, {"dot", job_graphviz},  {"fits", job_fits_now},
      {"open", job_open},   {"next", job_next}, {"close", job_close},   {"counts", job_counts},
      {NULL, NULL}};
  S->scalars = LUA_NOREF;
  lua_newtable(L);
  lua_pushvalue(L, -1);
  S->scalar_mt = luaL_ref(L, LUA_REGISTRYINDEX);
  lua_setfield(L, -2, "_scalar_mt");
  for (const luaL_Reg *f = functions; f->name; f++) bind_function(S, L, f->name, f->func);
  luaL_newmetatable(L, job_mt);
  lua_pushcfunction(L, job_gc);
  lua_setfield(L, -2, "__gc");
  lua_newtable(L);
  for (const luaL_Reg *f = methods; f->name; f++) bind_function(S, L, f->name, f->func);
  lua_setfield(L, -2, "__index");
  lua_pop(L, 1);
}
