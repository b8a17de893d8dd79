/* The cpu device: a caching allocator over the C library, streams on which work is done when the
 * launch returns, and the meta device, which has shapes and no data.
 *
 * The allocator. Requests are rounded up to a size class (four classes an octave from 1 KiB on) and
 * freed blocks wait in a list per class: a training step asks for the same sizes again and again,
 * and giving large blocks back to the kernel costs a page fault for every 4 KiB on the next use.
 * What waits is bounded: when a request would go over the limit, or the C library has no more, the
 * cache is emptied first. One lock a device; a block is found or kept in a few dozen nanoseconds.
 */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "context.h"
#include "fault.h"
#include "hard.h"
#include "mem.h"

enum { ALIGN = 64, CLASSES = 256, HUGE_PAGE = 2 << 20, ATTACHED = 16 };

typedef struct FreeBlock {
  struct FreeBlock *next;
} FreeBlock;

typedef struct Attached {
  const void *key;
  void *state;
  void (*destroy)(void *);
} Attached;

typedef struct CpuDevice {
  Device device;
  pthread_mutex_t lock;
  DeviceStats stats;
  FreeBlock *free_blocks[CLASSES];
  Attached attached[ATTACHED];
  int n_attached;
} CpuDevice;

/* The class of a size and the size of that class: 2^k * (4..7) / 4. */
static int class_of(size_t bytes, size_t *class_bytes) {
  size_t size = bytes < 1024 ? 1024 : bytes;
  int octave = 63 - __builtin_clzll(size);
  size_t quarter = (size_t)1 << (octave - 2), steps = (size + quarter - 1) / quarter;
  *class_bytes = steps * quarter;
  return (octave - 10) * 4 + (int)steps - 4;
}

static void cache_empty_locked(CpuDevice *c) {
  for (int k = 0; k < CLASSES; k++) {
    for (FreeBlock *b = c->free_blocks[k], *next; b; b = next) {
      next = b->next;
      free(b);
    }
    c->free_blocks[k] = NULL;
  }
  c->stats.cached = 0;
}

static void *system_alloc(size_t bytes) {
  void *p = NULL;
  if (fault_here(FAULT_DEVICE)) return NULL;
  size_t align = bytes >= HUGE_PAGE ? HUGE_PAGE : ALIGN;
  if (posix_memalign(&p, align, bytes)) return NULL;
  if (bytes >= HUGE_PAGE)
    madvise(p, bytes & ~(size_t)(HUGE_PAGE - 1), MADV_HUGEPAGE); /* a hint; refusal does no harm */
  return p;
}

static void *cpu_alloc(Device *d, size_t bytes, Stream *s) {
  (void)s;
  CpuDevice *c = (CpuDevice *)d;
  if (bytes > SIZE_MAX / 4 || fault_here(FAULT_DEVICE)) return NULL;
  size_t size;
  int k = class_of(bytes, &size);
  pthread_mutex_lock(&c->lock);
  FreeBlock *b = c->free_blocks[k];
  if (c->stats.limit && c->stats.in_use + size > c->stats.limit) {
    pthread_mutex_unlock(&c->lock);
    return NULL;
  }
  if (b) {
    c->free_blocks[k] = b->next;
    c->stats.cached -= size;
  } else {
    if (c->stats.limit && c->stats.in_use + c->stats.cached + size > c->stats.limit)
      cache_empty_locked(c);
    b = system_alloc(size);
    if (!b) {
      cache_empty_locked(c);
      b = system_alloc(size);
    }
  }
  if (b) {
    c->stats.in_use += size;
    c->stats.allocations++;
    if (c->stats.in_use > c->stats.peak) c->stats.peak = c->stats.in_use;
  }
  pthread_mutex_unlock(&c->lock);
  if (b) hard_fill(b, size, HARD_DATA);
  return b;
}

static void cpu_release(Device *d, void *p, size_t bytes, Stream *s) {
  (void)s;
  CpuDevice *c = (CpuDevice *)d;
  size_t size;
  int k = class_of(bytes, &size);
  hard_fill(p, size, HARD_DATA);
  FreeBlock *b = p;
  pthread_mutex_lock(&c->lock);
  b->next = c->free_blocks[k];
  c->free_blocks[k] = b;
  c->stats.in_use -= size;
  c->stats.cached += size;
  pthread_mutex_unlock(&c->lock);
}

static void cpu_empty_cache(Device *d) {
  CpuDevice *c = (CpuDevice *)d;
  pthread_mutex_lock(&c->lock);
  cache_empty_locked(c);
  pthread_mutex_unlock(&c->lock);
}

static int cpu_copy(Device *d, void *dst, const void *src, size_t bytes, Stream *s) {
  (void)d, (void)s;
  if (bytes) memmove(dst, src, bytes);
  return 0;
}

static Stream *host_stream_create(Device *d) {
  Stream *s = mem_zalloc(sizeof *s);
  if (s) s->device = d;
  return s;
}

static void host_stream_destroy(Stream *s) {
  if (s) free(s->scratch);
  mem_free(s);
}

static int host_stream_synchronize(Stream *s) {
  (void)s;
  return 0;
}

static Event *host_event_create(Device *d) {
  Event *e = mem_zalloc(sizeof *e);
  if (e) e->device = d;
  return e;
}

static void host_event_destroy(Event *e) {
  mem_free(e);
}

static int host_event_order(Event *e, Stream *s) {
  (void)e, (void)s;
  return 0;
}

static bool host_event_done(Event *e) {
  (void)e;
  return true;
}

static void host_destroy(Device *d) {
  CpuDevice *c = (CpuDevice *)d;
  for (int i = 0; i < c->n_attached; i++) c->attached[i].destroy(c->attached[i].state);
  cache_empty_locked(c);
  pthread_mutex_destroy(&c->lock);
  mem_free(c);
}

static void *meta_alloc(Device *d, size_t bytes, Stream *s) {
  (void)d, (void)bytes, (void)s;
  return NULL;
}

static DeviceStats host_stats(Device *d) {
  CpuDevice *c = (CpuDevice *)d;
  pthread_mutex_lock(&c->lock);
  DeviceStats stats = c->stats;
  pthread_mutex_unlock(&c->lock);
  return stats;
}

static void host_set_limit(Device *d, size_t bytes) {
  CpuDevice *c = (CpuDevice *)d;
  pthread_mutex_lock(&c->lock);
  c->stats.limit = bytes;
  pthread_mutex_unlock(&c->lock);
}

static void host_reset_peak(Device *d) {
  CpuDevice *c = (CpuDevice *)d;
  pthread_mutex_lock(&c->lock);
  c->stats.peak = c->stats.in_use;
  pthread_mutex_unlock(&c->lock);
}

static void *host_scratch(Stream *s, size_t bytes) {
  if (bytes > s->scratch_bytes) {
    DeviceStats m = host_stats(s->device);
    if (bytes > SIZE_MAX / 4 || (m.limit && m.in_use + bytes > m.limit)) return NULL;
    free(s->scratch);
    s->scratch_bytes = 0;
    s->scratch = system_alloc((bytes + 4095) & ~(size_t)4095);
    if (s->scratch) s->scratch_bytes = (bytes + 4095) & ~(size_t)4095;
  }
  return s->scratch;
}

#define HOST_MEMBERS                                                                               \
  .on_host = true, .release = cpu_release, .empty_cache = cpu_empty_cache, .copy = cpu_copy,       \
  .scratch = host_scratch, .stats = host_stats, .set_limit = host_set_limit,                       \
  .reset_peak = host_reset_peak, .stream_create = host_stream_create,                              \
  .stream_destroy = host_stream_destroy, .stream_synchronize = host_stream_synchronize,            \
  .event_create = host_event_create, .event_destroy = host_event_destroy,                          \
  .event_record = host_event_order, .event_wait = host_event_order, .event_done = host_event_done, \
  .destroy = host_destroy

static const DeviceApi cpu_api = {.has_data = true, .alloc = cpu_alloc, HOST_MEMBERS};
static const DeviceApi meta_api = {.has_data = false, .alloc = meta_alloc, HOST_MEMBERS};

static Device *host_create(Context *context, const DeviceApi *api, const char *name, int slot) {
  CpuDevice *c = mem_zalloc(sizeof *c);
  if (!c) return NULL;
  c->device = (Device){.api = api, .context = context, .slot = slot};
  strcpy(c->device.name, name);
  pthread_mutex_init(&c->lock, NULL);
  return &c->device;
}

Device *cpu_device_create(Context *context) {
  return host_create(context, &cpu_api, "cpu", 0);
}

Device *meta_device_create(Context *context) {
  return host_create(context, &meta_api, "meta", 1);
}

DeviceStats device_stats(Device *d) {
  return d->api->stats(d);
}

void device_set_limit(Device *d, size_t bytes) {
  d->api->set_limit(d, bytes);
}

void device_reset_peak(Device *d) {
  d->api->reset_peak(d);
}

void *stream_scratch(Stream *s, size_t bytes) {
  return s->device->api->scratch(s, bytes);
}

void *device_attach(Device *d, const void *key, void *(*create)(void), void (*destroy)(void *)) {
  CpuDevice *c = (CpuDevice *)d;
  void *state = NULL;
  pthread_mutex_lock(&c->lock);
  for (int i = 0; i < c->n_attached; i++)
    if (c->attached[i].key == key) state = c->attached[i].state;
  if (!state && c->n_attached < ATTACHED && (state = create()))
    c->attached[c->n_attached++] = (Attached){key, state, destroy};
  pthread_mutex_unlock(&c->lock);
  return state;
}
