/* The binding's state in one Lua state, and the values it makes.
 *
 * Every C function of the binding is a closure whose first upvalue is the State. A function that
 * holds resources does not raise: it returns a code, cleans up, and only then calls bind_raise.
 * Tensors on Lua's side are userdata of type Handle; the count of a handle is released by its
 * collector, or at the end of the scope in which it was made. */
#ifndef MF_BIND_STATE_H
#define MF_BIND_STATE_H
#include <lauxlib.h>
#include <lua.h>

#include "str.h"
#include "tape.h"
#include "vec.h"

typedef struct State State;

/* The userdata of a tensor. `scope` is its place + 1 in State.scope, 0 when it is in none. */
typedef struct Handle {
  const State *tag; /* tells it from other userdata of the size */
  Tensor *t;        /* NULL: released with its scope */
  uint32_t scope;
  bool keep; /* at the end of its scope it is among the results */
} Handle;

enum { LINE_HANDLES = 32, FLIGHT = 8 };

/* A count that a push has taken and not yet given to a handle; see handle.c. */
typedef struct Flight {
  Tensor *t;
  const char *frame; /* of the push, in the C stack */
} Flight;

struct State {
  lua_State *L;     /* the coroutine that called in last; only for what that call runs */
  lua_State *aside; /* a thread on which nothing runs, for tables when no call is at hand */
  Eager *E;
  Context *context;
  VEC(Handle *) scope; /* handles made since scopes began; NULL: collected or released */
  int scope_depth;
  Flight flight[FLIGHT]; /* the first n_flight */
  int n_flight;
  int tensor_mt, dtype_mt, shape_mt, generator_mt; /* references in the registry */
  int methods, handles, core; /* tables: tensor methods; weak Tensor* -> userdata; the module */
  struct OpQuick *quick;      /* by op; see call.c */
  /* Gradient lines; see line.c. */
  struct Line *line;                                   /* the one that runs; NULL: none */
  int lines, line_run, line_o, line_shape, line_dtype; /* references */
  int line_handle[LINE_HANDLES];
  Handle *line_handles[LINE_HANDLES];
  int line_used;
  /* Hooks and functions; see anchor.c. */
  bool has_anchors;  /* there was one, ever */
  struct Pass *pass; /* the pass with anchors that runs; NULL: none */
  int anchor_pins, function_backward, hook_handle_mt; /* references */
  int error; /* reference: the error value with which a callback ended, if has_error */
  bool has_error;
  int traceback;       /* reference: the handler of bind_protected */
  int place_mt;        /* reference: of placements */
  struct Job *tracing; /* the step that is traced; NULL: none */
  int scalars;         /* reference: what the step that is traced uses, or LUA_NOREF */
  int scalar_mt;       /* reference */
  int text_mt, push_list, keep_results; /* references */
  Str form;   /* of the arguments of a compiled function: kept, so that calls allocate nothing */
  int wheres; /* reference: lines of the user's program, for anomaly mode */
};

/* Of the function that runs. Finalizers of the user's may run when the Lua state closes and the
 * State is gone; they get an error. */
static inline State *bind_state(lua_State *L) {
  State *S = lua_touserdata(L, lua_upvalueindex(1));
  if (__builtin_expect(!S->E, 0)) luaL_error(L, "moonflow: the Lua state is closing");
  S->L = L;
  return S;
}

/* Raises the current error text with the position of the Lua caller. */
int bind_raise(lua_State *L);
/* The same with a text. */
int bind_error(lua_State *L, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* "script.lua:12" of the innermost Lua function from `level` on that is not the library's own;
 * false when there is none. */
enum { BIND_WHERE_MAX = 120 };
bool bind_where(lua_State *L, int level, char *buf, size_t n);

/* -- Tensors ----------------------------------------------------------------------------------- */

/* Pushes a tensor, taking one count (also on failure, which raises). NULL pushes nil. */
void bind_push(State *S, lua_State *L, Tensor *t);
/* Pushes n tensors, or a table of them, each taking its count out of the list. When Lua runs out of
 * memory, its status and the error value instead; what the list still has is the caller's. */
int bind_push_list(State *S, lua_State *L, Tensor **list, int n, bool as_table);
/* Pushes the one userdata of a tensor that C and Lua both keep (a gradient, a base); adds a count
 * of its own. */
void bind_push_shared(State *S, lua_State *L, Tensor *t);
/* Pushes a userdata for one use, which bind_close ends; adds a count of its own. */
void bind_push_own(State *S, lua_State *L, Tensor *t);
void bind_close(State *S, lua_State *L, int index);
/* Makes the userdata at `index` the one that bind_push_shared finds. */
void bind_share(State *S, lua_State *L, int index);

/* A text that is freed with its userdata, which is on the top of the stack: whatever raises. */
Str *bind_new_text(State *S, lua_State *L);
/* Pushes the text and frees it; raises "FUNCTION: out of memory" when it could not grow. */
void bind_push_text(lua_State *L, Str *s, const char *function);

/* The handle at an index or NULL; never raises. */
static inline Handle *bind_to_handle(const State *S, lua_State *L, int index) {
  Handle *h = lua_touserdata(L, index);
  return h && lua_objlen(L, index) == sizeof *h && h->tag == S ? h : NULL;
}
/* The tensor at an index or NULL; never raises. Freed handles give NULL. */
static inline Tensor *bind_to_tensor(const State *S, lua_State *L, int index) {
  Handle *h = bind_to_handle(S, L, index);
  return h ? h->t : NULL;
}
/* The tensor at an index; raises "FUNCTION: ARG must be a tensor, is ...". */
Tensor *bind_check_tensor(State *S, lua_State *L, int index, const char *function, const char *arg);

/* Handles made from here on are released at the matching end, but for those in values that
 * bind_scope_keep was given in between; `seen` is the index of an empty table that these share. */
uint32_t bind_scope_begin(State *S);
void bind_scope_keep(State *S, lua_State *L, int index, int seen);
void bind_scope_end(State *S, uint32_t mark);

/* The value of the mf.scalar at an index, or NULL; never raises. */
const double *bind_to_scalar(const State *S, lua_State *L, int index);
/* The scalar at `index` is read by the step that is traced, if there is one. */
void bind_use_scalar(State *S, lua_State *L, int index);

/* Pays what storages cost to Lua's collector, when enough has gathered. */
void bind_pay(State *S, lua_State *L);

/* -- Readers: one per kind of argument; 0 or a code with the text set -------------------------- */

/* A whole number (a Lua number without fraction, |v| <= 2^53, or an int64 cdata). */
int bind_read_int(lua_State *L, int index, const char *function, const char *arg, int64_t *out);
int bind_read_dtype(State *S, lua_State *L, int index, const char *function, const char *arg,
                    int64_t *out);
int bind_read_device(State *S, lua_State *L, int index, const char *function, const char *arg,
                     int64_t *out);
/* A table of whole numbers (or a shape). */
int bind_read_ints(lua_State *L, int index, const char *function, const char *arg, IntList *out);
/* The text of a program; it lies in a value at the top of the stack. */
int bind_read_program(lua_State *L, int index, const char *function, const char *arg,
                      Program **out);
void bind_push_dtype(State *S, lua_State *L, int dtype);
void bind_push_shape(State *S, lua_State *L, int ndim, const int64_t *shape);
/* What a value is, for error texts: "nil", "a string", "a tensor (2, 3) of float32"; into buf. */
const char *bind_describe(State *S, lua_State *L, int index, char *buf, size_t n);
/* The tensor at an index, or a new one of the number, boolean or nested table there (dtype
 * DTYPE_NONE: as mf.tensor); counted. NULL with the error set. */
Tensor *bind_tensor_of(State *S, lua_State *L, int index, int64_t dtype);

/* -- Global tensors (global.c) ----------------------------------------------------------------- */

/* This rank's place in the job, which is joined first. NULL with the error set. */
struct Comm *bind_comm(State *S, const char *name);
/* The layout of the placement and the SBP at these indices. */
int bind_read_layout(State *S, lua_State *L, int placement, int sbp, const char *name,
                     const Layout **out);
/* Pushes x.is_global, x.placement or x.sbp; false: there is no such property. */
bool bind_push_global_property(State *S, lua_State *L, const Tensor *t, const char *key);
void bind_put_layout(Str *s, const Layout *l);

/* -- Calls ------------------------------------------------------------------------------------- */

/* The op with Lua's arguments from index `first` on; pushes the results and returns their number,
 * or a negative value on failure (text set). */
int bind_call(State *S, lua_State *L, const Op *op, int first, bool into);

/* The same with `use` in the place of the dispatcher: it leaves its outputs in the call, or returns
 * a code. */
int bind_with_call(State *S, lua_State *L, const Op *op, int first,
                   int (*use)(void *ud, EagerCall *c), void *ud);
/* Pushes the function of an op, or of its NAME_ form. */
void bind_push_op(State *S, lua_State *L, const Op *op, bool into);
/* The op whose function is at an index, and whether it is the NAME_ form; NULL for other values. */
const Op *bind_op_of(lua_State *L, int index, bool *into);

/* Runs a function of Lua's for C: it and its n_in arguments are at the top. On failure MF_ELUA, and
 * the error value, with a traceback if it is a string, waits for bind_raise_kept. */
int bind_protected(State *S, lua_State *L, int n_in, int n_out);
/* Calls body on L with `ud` as its argument, for C that holds something: what Lua raises there, out
 * of memory included, comes back as with bind_protected. */
int bind_guarded(State *S, lua_State *L, lua_CFunction body, void *ud);
/* Raises what a callback raised when the code is MF_ELUA, else the current error text. */
int bind_raise_kept(State *S, lua_State *L, int code);

/* -- Anchors: hooks and functions on the tape -------------------------------------------------- */

/* The value at `index` was made from those at the n indices from `first` (tensors, or tables of
 * them), some anchored: hooks on what it was made from live as long as it. */
void bind_anchor(State *S, lua_State *L, int index, int first, int n);
/* The tensor at `index` has hooks as long as it lives, for C keeps it without its userdata. */
void bind_pin(State *S, lua_State *L, int index);
/* Runs a pass whose roots are at the n indices from `first`, as bind_anchor takes them. */
int bind_backward(State *S, lua_State *L, const Backward *b, int first, int n);

/* -- Subscripts (index.c) ---------------------------------------------------------------------- */

/* Whether a string is a subscript by itself, '...' or mf.newaxis. */
bool bind_is_subscript(const char *key);
/* Stack (tensor, key); pushes the result. */
int bind_index(lua_State *L);
/* Stack (tensor, key, value). */
int bind_newindex(lua_State *L);

/* -- Parts of the module: each adds its functions to the module table at the top of the stack -- */

/* Adds `name` as a closure over the state to the table at the top. */
void bind_function(State *S, lua_State *L, const char *name, lua_CFunction f);
void bind_open_handles(State *S, lua_State *L);
void bind_open_tensor(State *S, lua_State *L);
void bind_open_compile(State *S, lua_State *L);
void bind_open_profile(State *S, lua_State *L);
void bind_open_fault(State *S, lua_State *L);
void bind_open_ops(State *S, lua_State *L);
void bind_open_lines(State *S, lua_State *L);
void bind_open_grad(State *S, lua_State *L);
void bind_open_anchors(State *S, lua_State *L);
void bind_open_functions(State *S, lua_State *L);
void bind_open_memory(State *S, lua_State *L);
void bind_open_worker(State *S, lua_State *L);
void bind_open_comm(State *S, lua_State *L);
void bind_open_ranks(State *S, lua_State *L);
void bind_open_buckets(State *S, lua_State *L);
void bind_open_global(State *S, lua_State *L);
void bind_open_feed(State *S, lua_State *L);
void bind_open_index(State *S, lua_State *L);
void bind_open_print(State *S, lua_State *L);
void bind_open_file(State *S, lua_State *L);
void bind_open_values(State *S, lua_State *L);
void bind_open_random(State *S, lua_State *L);
void bind_open_table(State *S, lua_State *L);
/* The group of the table of ranks at an index, or of all ranks for nil. NULL with the error set. */
struct CommGroup *bind_read_group(State *S, lua_State *L, int index, const char *name);
/* This rank has failed, if it belongs to a job of several: the others learn why. */
void bind_fail_job(Context *x, const char *text);
/* The State of L, or NULL before require. */
State *bind_find_state(lua_State *L);

#endif
