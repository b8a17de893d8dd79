/* moonflow: a deep-learning framework in C with LuaJIT as its front end. This is its one public
 * header.
 *
 *   mf_context *context;
 *   mf_state *state;
 *   mf_context_create(NULL, &context);
 *   mf_state_create(context, NULL, &state);
 *   mf_dostring(state, "local mf = require 'moonflow'; print(mf.randn(2, 3))", "example");
 *   mf_state_destroy(state);
 *   mf_context_destroy(context);
 *
 * Errors. A function that can fail returns an mf_status, 0 for success; mf_last_error() is then
 * one line that says what was wrong and, where possible, what to do. The library never prints,
 * exits, aborts on user errors, installs a signal handler or changes the locale.
 *
 * Threads. A context may be used from any thread. A state, and every tensor made in it, may be
 * used by one thread at a time; it may move between threads. Two states, of one context or of
 * two, run at the same time without locks. mf_last_error, mf_set_threads and mf_threads speak for
 * the calling thread. mf_interrupt may be called from any thread and from signal handlers.
 *
 * Ownership. What a function returns through `**out` belongs to the caller, who gives it back by
 * the function named in its comment. Tensors must be released before the state they were made in
 * is destroyed, states destroyed before their context. */
#ifndef MOONFLOW_H
#define MOONFLOW_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define MF_API __attribute__((visibility("default")))

#define MF_VERSION_MAJOR 0
#define MF_VERSION_MINOR 1
#define MF_VERSION_PATCH 0

/* The version of the library that runs, "0.1.0". */
MF_API const char *mf_version(void);

/* -- Errors ------------------------------------------------------------------------------------ */

typedef enum mf_status {
  MF_STATUS_OK = 0,
  MF_STATUS_INVALID = 1, /* a wrong argument: type, shape, dtype, value */
  MF_STATUS_NO_MEMORY = 2,
  MF_STATUS_IO = 3,       /* a file is missing, cut short or malformed */
  MF_STATUS_FREED = 4,    /* a tensor whose memory was freed */
  MF_STATUS_MODIFIED = 5, /* a saved tensor was changed before the backward pass needed it */
  MF_STATUS_INTERRUPTED = 6,
  MF_STATUS_LUA = 7, /* an error that Lua code raised */
  MF_STATUS_UNSUPPORTED = 8,
  MF_STATUS_COMM = 9 /* another rank died, left, fell silent or called something else */
} mf_status;

/* The text of the calling thread's last failed call; valid until its next one. "" before the
 * first. */
MF_API const char *mf_last_error(void);
MF_API const char *mf_status_name(mf_status status);

/* -- Contexts: devices and memory, shared by states -------------------------------------------- */

typedef struct mf_context mf_context;

typedef struct mf_context_config {
  size_t struct_size;  /* sizeof(mf_context_config) */
  size_t memory_limit; /* bytes of tensors on the cpu; 0: none */
} mf_context_config;

/* `config` NULL: the defaults. Give back by mf_context_destroy. */
MF_API mf_status mf_context_create(const mf_context_config *config, mf_context **out);
MF_API void mf_context_destroy(mf_context *context);

/* Makes the running or next operation on tensors of the context fail with "interrupted": one, in
 * whichever state comes first. Async-signal-safe. Lua code that calls no such operation is not
 * reached; see mf_state_interrupt. */
MF_API void mf_interrupt(mf_context *context);

typedef struct mf_memory {
  size_t struct_size; /* sizeof(mf_memory), set by the caller */
  size_t in_use;      /* bytes of tensors now */
  size_t peak;        /* the most there were */
  size_t cached;      /* bytes kept for reuse */
  size_t limit;       /* 0: none */
  uint64_t allocations;
} mf_memory;

/* `device` is a name as Lua's: "cpu". */
MF_API mf_status mf_memory_stats(mf_context *context, const char *device, mf_memory *out);
MF_API mf_status mf_set_memory_limit(mf_context *context, const char *device, size_t bytes);
MF_API mf_status mf_empty_cache(mf_context *context, const char *device);

/* How many threads one operation of the calling thread may use; at least 1. */
MF_API mf_status mf_set_threads(int n);
MF_API int mf_threads(void);

/* -- States: one Lua virtual machine each ------------------------------------------------------ */

typedef struct mf_state mf_state;
struct lua_State;

typedef struct mf_state_config {
  size_t struct_size;      /* sizeof(mf_state_config) */
  bool ignore_environment; /* do not read LUA_PATH and LUA_CPATH */
} mf_state_config;

/* A state with Lua's standard libraries, in which `require 'moonflow'` gives this library on
 * `context`. Give back by mf_state_destroy. */
MF_API mf_status mf_state_create(mf_context *context, const mf_state_config *config,
                                 mf_state **out);
MF_API void mf_state_destroy(mf_state *state);

/* The state's virtual machine, for hosts that speak Lua's own C API. Calls that may raise belong
 * under lua_pcall. */
MF_API struct lua_State *mf_state_lua(mf_state *state);

/* In a LuaJIT of the host's own, `require 'moonflow'` finds this entry point; the module then
 * makes a context of its own. */
MF_API int luaopen_moonflow(struct lua_State *L);

/* Compile and run. Errors carry a traceback. `name` is what errors call the text. */
MF_API mf_status mf_dostring(mf_state *state, const char *text, const char *name);
MF_API mf_status mf_dofile(mf_state *state, const char *path);

/* mf_interrupt, and Lua code that calls no tensor function is reached as well, unless compiled to
 * a loop that calls nothing. Only from the thread that runs the state, or from a signal handler
 * on that thread. */
MF_API void mf_state_interrupt(mf_state *state);

/* -- Tensors ----------------------------------------------------------------------------------- */

typedef struct mf_tensor mf_tensor;

typedef enum mf_dtype {
  MF_BOOL,
  MF_UINT8,
  MF_INT8,
  MF_INT16,
  MF_INT32,
  MF_INT64,
  MF_FLOAT16,
  MF_BFLOAT16,
  MF_FLOAT32,
  MF_FLOAT64
} mf_dtype;

enum { MF_DIMS_MAX = 12 };

/* A contiguous tensor on the cpu with a copy of `data`, row-major; `data` NULL: zeros. Counted;
 * give back by mf_tensor_release. */
MF_API mf_status mf_tensor_create(mf_state *state, mf_dtype dtype, int ndim, const int64_t *shape,
                                  const void *data, mf_tensor **out);

/* The same on the caller's memory, without a copy. release(owner) is called once, from any
 * thread, when no tensor uses the memory any more, also if this fails; NULL: never. */
MF_API mf_status mf_tensor_wrap(mf_state *state, mf_dtype dtype, int ndim, const int64_t *shape,
                                void *data, void (*release)(void *owner), void *owner,
                                mf_tensor **out);

MF_API mf_tensor *mf_tensor_retain(mf_tensor *t);
MF_API void mf_tensor_release(mf_tensor *t);

MF_API mf_dtype mf_tensor_dtype(const mf_tensor *t);
MF_API int mf_tensor_ndim(const mf_tensor *t);
MF_API const int64_t *mf_tensor_shape(const mf_tensor *t);  /* ndim sizes */
MF_API const int64_t *mf_tensor_stride(const mf_tensor *t); /* ndim strides, in elements */
MF_API int64_t mf_tensor_numel(const mf_tensor *t);
MF_API bool mf_tensor_is_contiguous(const mf_tensor *t);

/* Its first element in memory that the cpu reads and may write; valid as long as the tensor. NULL
 * with an error set when it has none (meta, freed). */
MF_API void *mf_tensor_data(const mf_tensor *t);

/* -- Values in and out of Lua ------------------------------------------------------------------ */

typedef enum mf_kind { MF_NIL, MF_BOOLEAN, MF_NUMBER, MF_STRING, MF_TENSOR } mf_kind;

/* A string is not copied: one that was passed must last for the call, one that was returned lasts
 * until the state's next mf_call. A returned tensor is the caller's to release. */
typedef struct mf_value {
  mf_kind kind;
  union {
    bool boolean;
    double number;
    struct {
      const char *text;
      size_t size;
    } string;
    mf_tensor *tensor;
  } as;
} mf_value;

/* Calls a function by its name, dotted from the globals ("model.predict"), and takes up to n_out
 * results; missing ones are nil, a result of any other type is an error. */
MF_API mf_status mf_call(mf_state *state, const char *function, int n_in, const mf_value *in,
                         int n_out, mf_value *out);

#ifdef __cplusplus
}
#endif
#endif
