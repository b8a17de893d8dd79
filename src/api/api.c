/* The entry points of moonflow.h that need no Lua. An mf_context is a Context, an mf_tensor a
 * Tensor; both are only cast. */
#include <string.h>

#include "err.h"
#include "plugin.h"
#include "state_int.h"
#include "thread.h"

#define TEXT2(x) #x
#define TEXT(x) TEXT2(x)

_Static_assert(MF_STATUS_INVALID == (int)MF_EINVAL && MF_STATUS_NO_MEMORY == (int)MF_ENOMEM &&
                   MF_STATUS_IO == (int)MF_EIO && MF_STATUS_FREED == (int)MF_EFREED &&
                   MF_STATUS_MODIFIED == (int)MF_EVERSION &&
                   MF_STATUS_INTERRUPTED == (int)MF_EINTR && MF_STATUS_LUA == (int)MF_ELUA &&
                   MF_STATUS_UNSUPPORTED == (int)MF_EUNSUPPORTED && MF_STATUS_COMM == (int)MF_ECOMM,
               "an mf_status is an error code");
_Static_assert(MF_BOOL == (int)BOOL && MF_UINT8 == (int)U8 && MF_INT64 == (int)I64 &&
                   MF_FLOAT16 == (int)F16 && MF_FLOAT64 == (int)F64 &&
                   DTYPE_COUNT == MF_FLOAT64 + 1,
               "an mf_dtype is a DType");
_Static_assert((int)MF_DIMS_MAX == (int)MF_MAX_DIMS, "the header's limit is the real one");

const char *mf_version(void) {
  return TEXT(MF_VERSION_MAJOR) "." TEXT(MF_VERSION_MINOR) "." TEXT(MF_VERSION_PATCH);
}

const char *mf_last_error(void) {
  return err_text();
}

const char *mf_status_name(mf_status status) {
  return err_name((int)status);
}

static mf_status wrong_null(const char *function, const char *argument) {
  return (mf_status)err_set(MF_EINVAL, "%s: %s must not be NULL", function, argument);
}

/* -- Contexts ---------------------------------------------------------------------------------- */

/* Does a caller's struct of `size` bytes, perhaps of an older header, hold this member? */
#define HAS(type, member, size) ((size) >= offsetof(type, member) + sizeof(((type *)0)->member))

mf_status mf_context_create(const mf_context_config *config, mf_context **out) {
  if (!out) return wrong_null("mf_context_create", "out");
  *out = NULL;
  Context *c = context_create();
  if (!c) return (mf_status)err_set(MF_ENOMEM, "mf_context_create: out of memory");
  if (config && HAS(mf_context_config, memory_limit, config->struct_size))
    device_set_limit(c->devices[DEVICE_CPU], config->memory_limit);
  *out = (mf_context *)c;
  return MF_STATUS_OK;
}

void mf_context_destroy(mf_context *context) {
  context_release((Context *)context);
}

void mf_interrupt(mf_context *context) {
  atomic_store(&((Context *)context)->interrupted, true);
}

/* The device of that name; NULL with the error set. */
static Device *find_device(const char *function, mf_context *context, const char *name) {
  Context *c = (Context *)context;
  int slot;
  if (!c || !name) wrong_null(function, c ? "device" : "context");
  else if (!plugin_find_device(c, function, name, &slot)) return c->devices[slot];
  return NULL;
}

mf_status mf_memory_stats(mf_context *context, const char *device, mf_memory *out) {
  if (!out) return wrong_null("mf_memory_stats", "out");
  Device *d = find_device("mf_memory_stats", context, device);
  if (!d) return MF_STATUS_INVALID;
  DeviceStats s = device_stats(d);
  mf_memory m = {out->struct_size, s.in_use, s.peak, s.cached, s.limit, s.allocations};
  memcpy(out, &m, out->struct_size < sizeof m ? out->struct_size : sizeof m);
  return MF_STATUS_OK;
}

mf_status mf_set_memory_limit(mf_context *context, const char *device, size_t bytes) {
  Device *d = find_device("mf_set_memory_limit", context, device);
  if (!d) return MF_STATUS_INVALID;
  device_set_limit(d, bytes);
  return MF_STATUS_OK;
}

mf_status mf_empty_cache(mf_context *context, const char *device) {
  Device *d = find_device("mf_empty_cache", context, device);
  if (!d) return MF_STATUS_INVALID;
  d->api->empty_cache(d);
  return MF_STATUS_OK;
}

mf_status mf_set_threads(int n) {
  if (n < 1) return (mf_status)err_set(MF_EINVAL, "mf_set_threads: n must be at least 1, is %d", n);
  thread_set_count(n);
  return MF_STATUS_OK;
}

int mf_threads(void) {
  return thread_count();
}

/* -- Tensors ----------------------------------------------------------------------------------- */

static int check_tensor(const char *function, const mf_state *state, mf_dtype dtype, int ndim,
                        const int64_t *shape, mf_tensor **out) {
  if (!state || !out || (!shape && ndim > 0))
    return (int)wrong_null(function, !state ? "state" : !out ? "out" : "shape");
  if (dtype < 0 || (int)dtype >= DTYPE_COUNT)
    return err_set(MF_EINVAL, "%s: there is no dtype %d", function, (int)dtype);
  if (ndim < 0) return err_set(MF_EINVAL, "%s: ndim is %d", function, ndim);
  return shape_check(function, ndim, shape, (DType)dtype);
}

mf_status mf_tensor_create(mf_state *state, mf_dtype dtype, int ndim, const int64_t *shape,
                           const void *data, mf_tensor **out) {
  int code = check_tensor("mf_tensor_create", state, dtype, ndim, shape, out);
  if (code) return (mf_status)code;
  static const int64_t none[1];
  Tensor *t = tensor_create(state->E, (DType)dtype, ndim, ndim ? shape : none, DEVICE_CPU);
  *out = (mf_tensor *)t;
  if (!t) return MF_STATUS_NO_MEMORY;
  size_t bytes = (size_t)meta_numel(&t->m) * dtype_size((DType)dtype);
  if (!bytes) return MF_STATUS_OK;
  if (data) memcpy(tensor_data(t), data, bytes);
  else memset(tensor_data(t), 0, bytes);
  return MF_STATUS_OK;
}

static void release_nothing(void *owner) {
  (void)owner;
}

mf_status mf_tensor_wrap(mf_state *state, mf_dtype dtype, int ndim, const int64_t *shape,
                         void *data, void (*release)(void *owner), void *owner, mf_tensor **out) {
  static const int64_t none[1];
  if (!release) release = release_nothing;
  int code = check_tensor("mf_tensor_wrap", state, dtype, ndim, shape, out);
  if (!code && !data) code = (int)wrong_null("mf_tensor_wrap", "data");
  Tensor *t =
      code ? NULL
           : tensor_wrap(state->E, (DType)dtype, ndim, ndim ? shape : none, data, release, owner);
  if (out) *out = (mf_tensor *)t;
  if (t) return MF_STATUS_OK;
  release(owner);
  return code ? (mf_status)code : MF_STATUS_NO_MEMORY;
}

mf_tensor *mf_tensor_retain(mf_tensor *t) {
  return (mf_tensor *)tensor_retain((Tensor *)t);
}

void mf_tensor_release(mf_tensor *t) {
  tensor_release((Tensor *)t);
}

static const Meta *meta_of(const mf_tensor *t) {
  return &((const Tensor *)t)->m;
}

mf_dtype mf_tensor_dtype(const mf_tensor *t) {
  return (mf_dtype)meta_of(t)->dtype;
}

int mf_tensor_ndim(const mf_tensor *t) {
  return meta_of(t)->ndim;
}

const int64_t *mf_tensor_shape(const mf_tensor *t) {
  return meta_of(t)->shape;
}

const int64_t *mf_tensor_stride(const mf_tensor *t) {
  return meta_of(t)->stride;
}

int64_t mf_tensor_numel(const mf_tensor *t) {
  return meta_numel(meta_of(t));
}

bool mf_tensor_is_contiguous(const mf_tensor *t) {
  return meta_is_contiguous(meta_of(t));
}

void *mf_tensor_data(const mf_tensor *tensor) {
  const Tensor *t = (const Tensor *)tensor;
  return tensor_check_data(t, "mf_tensor_data") ? NULL : tensor_data(t);
}
