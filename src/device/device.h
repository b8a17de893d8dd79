/* A device: memory, streams and events behind a table of functions. Members: cpu, meta (shapes
 * only, no data), and those of a library that is opened when one is asked for (op/plugin.c).
 *
 * A Device belongs to one context and may be used from any thread. Work is launched on a Stream; on
 * the cpu it is done when the launch returns, elsewhere later. Memory freed on one stream is reused
 * by that stream's later work; use on another stream must be recorded (`storage_use`), which makes
 * the memory wait for an event there. */
#ifndef MF_DEVICE_H
#define MF_DEVICE_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct Context Context;
typedef struct Device Device;
typedef struct Stream Stream;
typedef struct Event Event;
typedef struct OpCall OpCall;             /* of op/op.h */
typedef int DeviceKernel(const OpCall *); /* launches; 0, or a code with the error set */

typedef struct DeviceStats {
  size_t in_use, peak, cached, limit; /* bytes; limit 0: none */
  uint64_t allocations;
} DeviceStats;

typedef struct DeviceApi {
  bool has_data; /* false: tensors have no memory and kernels are not run */
  bool on_host;  /* the host may read and write the memory */
  /* Memory aligned to 64 bytes, NULL when there is none (never for 0 bytes asked: then any non-NULL
   * value). */
  void *(*alloc)(Device *, size_t bytes, Stream *);
  void (*release)(Device *, void *p, size_t bytes, Stream *);
  void (*empty_cache)(Device *);
  /* Memory for kernels of one stream until they have run: see stream_scratch. */
  void *(*scratch)(Stream *, size_t bytes);
  DeviceStats (*stats)(Device *);
  void (*set_limit)(Device *, size_t bytes);
  void (*reset_peak)(Device *);
  /* One of the two may be the host's, or another device's of the same kind. Host memory that is
   * read may be reused on return; what is written there is there after stream_synchronize. */
  int (*copy)(Device *, void *dst, const void *src, size_t bytes, Stream *);
  Stream *(*stream_create)(Device *);
  void (*stream_destroy)(Stream *);
  int (*stream_synchronize)(Stream *);
  Event *(*event_create)(Device *);
  void (*event_destroy)(Event *);
  int (*event_record)(Event *, Stream *);
  int (*event_wait)(Event *, Stream *); /* later work of the stream waits for the event */
  bool (*event_done)(Event *);
  void (*destroy)(Device *);
} DeviceApi;

struct Device {
  const DeviceApi *api;
  Context *context;
  DeviceKernel *const *kernels; /* by op id, NULL where there is none; NULL: those of the cpu */
  int slot;                     /* in the context */
  bool waits;                   /* each launch is followed by stream_synchronize */
  char name[16];                /* "cpu", "meta", "cuda:1" */
};

struct Stream {
  Device *device;
  void *scratch; /* grown by stream_scratch, owned by the stream */
  size_t scratch_bytes;
};

struct Event {
  Device *device;
};

/* Memory that a kernel may use until it returns; contents undefined; aligned to 64. NULL when there
 * is none, or when it would lead above the limit with what is in use. One block a stream. */
void *stream_scratch(Stream *s, size_t bytes);

DeviceStats device_stats(Device *d);
void device_set_limit(Device *d, size_t bytes);
void device_reset_peak(Device *d);

/* A library's own state on a device (a cache of primitives, a handle), made on first use and
 * destroyed with the device. `key` is the address of a static object of the caller. Thread safe.
 * NULL when `create` returned NULL. */
void *device_attach(Device *d, const void *key, void *(*create)(void), void (*destroy)(void *));

/* The members. */
Device *cpu_device_create(Context *context);
Device *meta_device_create(Context *context);

#endif
