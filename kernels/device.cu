/* The device member of CUDA devices, and the entry of this library.
 *
 * Memory. Requests are rounded up to a size class, four an octave, and blocks that are given back
 * wait in a list per class of the stream that used them: later work of that stream may have them at
 * once, since it runs behind the work that still uses them. Only when the device has no more are
 * all streams waited for and what waits is given back. MF_CUDA_CACHE=0 does without: every block is
 * the device's own, of the exact size, and goes back when its stream has run; that is slow, and
 * finds what reads or writes behind an end.
 *
 * A stream that is no longer used waits to be used again, since storages name the stream that they
 * were made on. MF_CUDA_SYNC=1 waits after each launch, so that an error names the op and the line
 * that caused it.
 *
 * Errors in data, such as an index out of range, are noted by the kernel in a DeviceError and
 * raised when the stream is waited for next. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include <mutex>
#include <new>
#include <vector>

#include "kernel.cuh"
#include "staging.cuh"

enum { CLASSES = 256, MINIMUM = 512 };

static const PluginHost *host; /* constant, and the same for all contexts */

struct ScratchBlock {
  void *p;
  size_t bytes;
};

struct CudaStream {
  Stream stream;
  cudaStream_t handle;
  DeviceError *error;
  Staging staging; /* of one thread at a time: that which copies on the stream */
  bool used;
  std::vector<void *> waiting[CLASSES];
  std::vector<ScratchBlock> held; /* of the call that is launching */
};

struct CudaDevice {
  Device device;
  int ordinal;
  bool caches;
  std::mutex lock;
  DeviceStats stats;
  std::vector<CudaStream *> streams;
  void *kept[DEVICE_KEEPS];
  void (*kept_end[DEVICE_KEEPS])(void *);
};

struct CudaEvent {
  Event event;
  cudaEvent_t handle;
};

/* -- What the host lends, under the names of its headers --------------------------------------- */

extern "C" {
int err_set(int code, const char *format, ...) {
  char text[2048];
  va_list args;
  va_start(args, format);
  vsnprintf(text, sizeof text, format, args);
  va_end(args);
  return host->err_set(code, "%s", text);
}
const char *dtype_name(DType t) {
  return host->dtype_name(t);
}
DTypeKind dtype_kind(DType t) {
  return t == BOOL ? KIND_BOOL : dtype_is_float(t) ? KIND_FLOAT : KIND_INT;
}
double dtype_get_f64(DType t, const void *p) {
  return host->dtype_get_f64(t, p);
}
int64_t dtype_get_i64(DType t, const void *p) {
  return host->dtype_get_i64(t, p);
}
void dtype_set_f64(DType t, void *p, double v) {
  host->dtype_set_f64(t, p, v);
}
DType op_promote_views(int n, const View *v) {
  return host->promote_views(n, v);
}
bool shape_is_contiguous(int ndim, const int64_t *shape, const int64_t *stride) {
  return host->is_contiguous(ndim, shape, stride);
}
bool shape_is_dense(int ndim, const int64_t *shape, const int64_t *stride) {
  return host->is_dense(ndim, shape, stride);
}
void shape_broadcast_strides(int out_ndim, const int64_t *out, int ndim, const int64_t *shape,
                             const int64_t *stride, int64_t *out_stride) {
  host->broadcast_strides(out_ndim, out, ndim, shape, stride, out_stride);
}
void op_inputs_of_param(const Op *op, const void *args, int p, int *first, int *n) {
  host->inputs_of_param(op, args, p, first, n);
}
}

/* -- Errors ------------------------------------------------------------------------------------ */

static int check(Device *d, cudaError_t e, const char *what) {
  if (e == cudaSuccess) return 0;
  int code = e == cudaErrorMemoryAllocation ? MF_ENOMEM : MF_EUNSUPPORTED;
  return err_set(code, "%s: %s: %s", d->name, what, cudaGetErrorString(e));
}

int launch_result(const OpCall *c, cudaError_t e) {
  if (e == cudaSuccess) return 0;
  return err_set(MF_EUNSUPPORTED, "%s: the launch on %s failed: %s", c->op->name,
                 c->stream->device->name, cudaGetErrorString(e));
}

DeviceError *stream_error(Stream *s) {
  return ((CudaStream *)s)->error;
}

cudaStream_t stream_handle(Stream *s) {
  cudaSetDevice(((CudaDevice *)s->device)->ordinal);
  return ((CudaStream *)s)->handle;
}

/* Given back as soon as the call has launched its kernels: later work of the stream may use it,
 * which runs behind them. */
void *kernel_scratch(const OpCall *c, size_t bytes) {
  CudaStream *s = (CudaStream *)c->stream;
  void *p = s->stream.device->api->alloc(s->stream.device, bytes, &s->stream);
  if (p) s->held.push_back(ScratchBlock{p, bytes});
  else err_set(MF_ENOMEM, "%s: out of memory for %zu bytes of scratch", c->op->name, bytes);
  return p;
}

size_t kernel_scratch_begin(const OpCall *c) {
  return ((CudaStream *)c->stream)->held.size();
}

void kernel_scratch_end(const OpCall *c, size_t held) {
  CudaStream *s = (CudaStream *)c->stream;
  for (; s->held.size() > held; s->held.pop_back())
    s->stream.device->api->release(s->stream.device, s->held.back().p, s->held.back().bytes,
                                   &s->stream);
}

const Op *op_of(int id) {
  return &host->ops[id];
}

void *device_keep(Stream *s, DeviceKeeps what, void *(*make)(void), void (*end)(void *)) {
  CudaDevice *d = (CudaDevice *)s->device;
  stream_handle(s);
  std::lock_guard<std::mutex> lock(d->lock);
  if (!d->kept[what] && (d->kept[what] = make())) d->kept_end[what] = end;
  return d->kept[what];
}

static const char *input_name(const Op *op, int input) {
  for (int i = 0; i < op->n_params; i++)
    if (op->params[i].kind == PARAM_TENSOR && input-- == 0) return op->params[i].name;
  return "?";
}

static int raise_error(CudaStream *s) {
  DeviceError e = *s->error;
  s->error->set = 0;
  const Op *op = &host->ops[e.op];
  double weight;
  memcpy(&weight, &e.value, sizeof weight);
  switch (e.kind) {
    case ERROR_FEW:
      return err_set(MF_EINVAL, "%s: the mask selects %lld elements, source has %lld", op->name,
                     (long long)e.value, (long long)e.high);
    case ERROR_WEIGHT:
      return err_set(MF_EINVAL, "%s: %s holds %g; weights are finite and not negative", op->name,
                     input_name(op, e.input), weight);
    case ERROR_NO_WEIGHT:
      return err_set(MF_EINVAL, "%s: all weights in row %lld of %s are 0", op->name,
                     (long long)e.position, input_name(op, e.input));
    case ERROR_FEW_WEIGHTS:
      return err_set(MF_EINVAL,
                     "%s: %lld samples without replacement, but only %lld weights of row %lld are "
                     "above 0",
                     op->name, (long long)e.value, (long long)e.high, (long long)e.position);
    default: break;
  }
  return err_set(MF_EINVAL, "%s: %s at position %lld is %lld; legal are %lld to %lld", op->name,
                 input_name(op, e.input), (long long)e.position, (long long)e.value,
                 (long long)e.low, (long long)e.high);
}

/* -- Streams and events ------------------------------------------------------------------------ */

static CudaStream *stream_make(CudaDevice *d) {
  CudaStream *s = new (std::nothrow) CudaStream();
  void *error;
  if (!s) return NULL;
  s->stream.device = &d->device;
  cudaSetDevice(d->ordinal);
  cudaError_t e = cudaStreamCreateWithFlags(&s->handle, cudaStreamNonBlocking);
  if (e == cudaSuccess) e = cudaHostAlloc(&error, sizeof *s->error, cudaHostAllocMapped);
  if (check(&d->device, e, "a stream cannot be made")) {
    delete s;
    return NULL;
  }
  s->error = (DeviceError *)error;
  s->error->set = 0;
  return s;
}

static Stream *cuda_stream_create(Device *device) {
  CudaDevice *d = (CudaDevice *)device;
  std::lock_guard<std::mutex> lock(d->lock);
  for (CudaStream *s : d->streams)
    if (!s->used) return s->used = true, &s->stream;
  CudaStream *s = stream_make(d);
  if (!s) return NULL;
  s->used = true;
  d->streams.push_back(s);
  return &s->stream;
}

static int cuda_stream_synchronize(Stream *stream) {
  CudaStream *s = (CudaStream *)stream;
  cudaError_t e = cudaStreamSynchronize(stream_handle(stream));
  if (e != cudaSuccess) return check(stream->device, e, "an earlier launch failed");
  return s->error->set ? raise_error(s) : 0;
}

static void cuda_stream_destroy(Stream *stream) {
  CudaDevice *d = (CudaDevice *)stream->device;
  cudaStreamSynchronize(stream_handle(stream));
  std::lock_guard<std::mutex> lock(d->lock);
  ((CudaStream *)stream)->used = false;
}

static Event *cuda_event_create(Device *d) {
  CudaEvent *e = new (std::nothrow) CudaEvent();
  if (!e) return NULL;
  e->event.device = d;
  cudaSetDevice(((CudaDevice *)d)->ordinal);
  if (cudaEventCreateWithFlags(&e->handle, cudaEventDisableTiming) == cudaSuccess) return &e->event;
  delete e;
  return NULL;
}

static void cuda_event_destroy(Event *e) {
  cudaEventDestroy(((CudaEvent *)e)->handle);
  delete (CudaEvent *)e;
}

static int cuda_event_record(Event *e, Stream *s) {
  return check(s->device, cudaEventRecord(((CudaEvent *)e)->handle, stream_handle(s)), "event");
}

static int cuda_event_wait(Event *e, Stream *s) {
  cudaError_t r = cudaStreamWaitEvent(stream_handle(s), ((CudaEvent *)e)->handle, 0);
  return check(s->device, r, "event");
}

static bool cuda_event_done(Event *e) {
  return cudaEventQuery(((CudaEvent *)e)->handle) != cudaErrorNotReady;
}

/* -- Memory ------------------------------------------------------------------------------------ */

/* The class of a size and the size of that class: 2^k * (4..7) / 4. */
static int class_of(size_t bytes, size_t *class_bytes) {
  size_t size = bytes < MINIMUM ? (size_t)MINIMUM : bytes;
  int octave = 63 - __builtin_clzll(size);
  size_t quarter = (size_t)1 << (octave - 2), steps = (size + quarter - 1) / quarter;
  *class_bytes = steps * quarter;
  return (octave - 9) * 4 + (int)steps - 4;
}

/* With the lock held. */
static void empty_locked(CudaDevice *d) {
  for (CudaStream *s : d->streams) cudaStreamSynchronize(stream_handle(&s->stream));
  for (CudaStream *s : d->streams)
    for (int k = 0; k < CLASSES; k++) {
      for (void *p : s->waiting[k]) cudaFree(p);
      s->waiting[k].clear();
    }
  d->stats.cached = 0;
}

static void cuda_empty_cache(Device *device) {
  CudaDevice *d = (CudaDevice *)device;
  std::lock_guard<std::mutex> lock(d->lock);
  cudaSetDevice(d->ordinal);
  empty_locked(d);
}

static void *take_locked(CudaDevice *d, size_t size) {
  void *p = NULL;
  cudaSetDevice(d->ordinal);
  if (d->stats.limit && d->stats.in_use + d->stats.cached + size > d->stats.limit) empty_locked(d);
  if (cudaMalloc(&p, size) == cudaSuccess) return p;
  cudaGetLastError();
  empty_locked(d);
  if (cudaMalloc(&p, size) == cudaSuccess) return p;
  cudaGetLastError();
  return NULL;
}

static void *cuda_alloc(Device *device, size_t bytes, Stream *stream) {
  CudaDevice *d = (CudaDevice *)device;
  CudaStream *s = (CudaStream *)stream;
  size_t size;
  if (bytes > SIZE_MAX / 4) return NULL;
  int k = class_of(bytes, &size);
  if (!d->caches) size = bytes ? bytes : 1;
  std::lock_guard<std::mutex> lock(d->lock);
  if (d->stats.limit && d->stats.in_use + size > d->stats.limit) return NULL;
  void *p = NULL;
  if (s && d->caches && !s->waiting[k].empty()) {
    p = s->waiting[k].back();
    s->waiting[k].pop_back();
    d->stats.cached -= size;
  } else {
    p = take_locked(d, size);
  }
  if (!p) return NULL;
  d->stats.in_use += size;
  d->stats.allocations++;
  if (d->stats.in_use > d->stats.peak) d->stats.peak = d->stats.in_use;
  return p;
}

static void cuda_release(Device *device, void *p, size_t bytes, Stream *stream) {
  CudaDevice *d = (CudaDevice *)device;
  CudaStream *s = (CudaStream *)stream;
  size_t size;
  int k = class_of(bytes, &size);
  if (!d->caches) size = bytes ? bytes : 1;
  if (!s) { /* of no stream: whichever uses it must have ended */
    cudaSetDevice(d->ordinal);
    cudaDeviceSynchronize();
  }
  std::lock_guard<std::mutex> lock(d->lock);
  d->stats.in_use -= size;
  if (!s) {
    cudaFree(p);
    return;
  }
  if (d->caches) {
    s->waiting[k].push_back(p);
    d->stats.cached += size;
    return;
  }
  cudaStreamSynchronize(stream_handle(stream));
  cudaFree(p);
}

static void *cuda_scratch(Stream *s, size_t bytes) {
  Device *d = s->device;
  if (bytes <= s->scratch_bytes) return s->scratch;
  if (s->scratch) cuda_release(d, s->scratch, s->scratch_bytes, s);
  s->scratch_bytes = 0;
  s->scratch = cuda_alloc(d, bytes, s);
  if (s->scratch) s->scratch_bytes = bytes;
  return s->scratch;
}

static int cuda_copy(Device *d, void *to, const void *from, size_t bytes, Stream *s) {
  if (!bytes) return 0;
  cudaError_t e = staging_copy(&((CudaStream *)s)->staging, to, from, bytes, stream_handle(s));
  return check(d, e, "a copy failed");
}

static DeviceStats cuda_stats(Device *device) {
  CudaDevice *d = (CudaDevice *)device;
  std::lock_guard<std::mutex> lock(d->lock);
  return d->stats;
}

static void cuda_set_limit(Device *device, size_t bytes) {
  CudaDevice *d = (CudaDevice *)device;
  std::lock_guard<std::mutex> lock(d->lock);
  d->stats.limit = bytes;
}

static void cuda_reset_peak(Device *device) {
  CudaDevice *d = (CudaDevice *)device;
  std::lock_guard<std::mutex> lock(d->lock);
  d->stats.peak = d->stats.in_use;
}

/* -- The device -------------------------------------------------------------------------------- */

static void cuda_destroy(Device *device) {
  CudaDevice *d = (CudaDevice *)device;
  for (int k = 0; k < DEVICE_KEEPS; k++)
    if (d->kept[k]) d->kept_end[k](d->kept[k]);
  for (CudaStream *s : d->streams)
    if (s->stream.scratch)
      cuda_release(device, s->stream.scratch, s->stream.scratch_bytes, &s->stream);
  cuda_empty_cache(device);
  for (CudaStream *s : d->streams) {
    staging_end(&s->staging);
    cudaStreamDestroy(s->handle);
    cudaFreeHost(s->error);
    delete s;
  }
  delete d;
}

static const DeviceApi cuda_api = {true,
                                   false,
                                   cuda_alloc,
                                   cuda_release,
                                   cuda_empty_cache,
                                   cuda_scratch,
                                   cuda_stats,
                                   cuda_set_limit,
                                   cuda_reset_peak,
                                   cuda_copy,
                                   cuda_stream_create,
                                   cuda_stream_destroy,
                                   cuda_stream_synchronize,
                                   cuda_event_create,
                                   cuda_event_destroy,
                                   cuda_event_record,
                                   cuda_event_wait,
                                   cuda_event_done,
                                   cuda_destroy};

static bool is_set(const char *name, char value) {
  const char *text = getenv(name);
  return text && text[0] == value && !text[1];
}

static Device *cuda_device_create(Context *c, int index, int slot, DeviceKernel *const *kernels) {
  CudaDevice *d = new (std::nothrow) CudaDevice();
  if (!d) return NULL;
  d->device.api = &cuda_api;
  d->device.context = c;
  d->device.kernels = kernels;
  d->device.slot = slot;
  d->device.waits = is_set("MF_CUDA_SYNC", '1');
  snprintf(d->device.name, sizeof d->device.name, "cuda:%d", index);
  d->ordinal = index;
  d->caches = !is_set("MF_CUDA_CACHE", '0');
  return &d->device;
}

/* Whether there are kernels for the device: of its generation, and not for a later one of that. */
static bool has_kernels(int device) {
  static const int made_for[] = {__CUDA_ARCH_LIST__};
  int major = 0, minor = 0;
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  for (int arch : made_for)
    if (arch / 100 == major && arch / 10 % 10 <= minor) return true;
  err_set(MF_EUNSUPPORTED,
          "cuda:%d is of compute capability %d.%d, for which the library has no kernels; build it "
          "with `make cuda CUDA_ARCH=%d%d`",
          device, major, minor, major, minor);
  return false;
}

extern "C" const PluginKernel __start_mf_kernels[], __stop_mf_kernels[];

extern "C" __attribute__((visibility("default"))) int moonflow_plugin(const PluginHost *h,
                                                                      Plugin *out) {
  if (h->size != sizeof *h || *h->op_hash != MF_OP_HASH)
    return h->err_set(MF_EUNSUPPORTED,
                      "the library of kernels was built from another moonflow; build it again");
  host = h;
  int n = 0;
  cudaError_t e = cudaGetDeviceCount(&n);
  if (e != cudaSuccess || !n)
    return err_set(MF_EUNSUPPORTED, "no CUDA device can be used: %s",
                   e == cudaSuccess ? "there is none" : cudaGetErrorString(e));
  for (int k = 0; k < n; k++)
    if (!has_kernels(k)) return MF_EUNSUPPORTED;
  *out = Plugin{n, cuda_device_create, __start_mf_kernels,
                (size_t)(__stop_mf_kernels - __start_mf_kernels)};
  return 0;
}
