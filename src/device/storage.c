/* Storages. Small ones (scalars, shapes, biases) lie in one block with their data, since a pair of calls to malloc would cost more
 * than the op that fills them. Each byte made is charged to the context, whose Lua states pay it to their collectors. */
#include <stdio.h>

#include "context.h"
#include "err.h"
#include "mem.h"
#include "storage.h"

enum { SMALL_BYTES = 512, ALIGN = 64 };

static void *aligned(void *p) {
  return (void *)(((uintptr_t)p + ALIGN - 1) & ~(uintptr_t)(ALIGN - 1));
}

static Storage *storage_init(Storage *s, Device *d, void *data, size_t bytes, Stream *stream) {
  atomic_init(&s->refs, 1);
  atomic_init(&s->version, 0);
  atomic_init(&s->freed, false);
  s->small = false;
  s->device = d;
  s->stream = stream;
  s->data = data;
  s->bytes = bytes;
  s->foreign_release = NULL;
  s->owner = NULL;
  return s;
}

Storage *storage_create(Device *d, size_t bytes, Stream *stream) {
  atomic_fetch_add_explicit(&d->context->charged, (int_fast64_t)bytes + 256, memory_order_relaxed);
  if (!d->api->has_data || bytes <= SMALL_BYTES) {
    size_t room = d->api->has_data ? bytes + ALIGN : 0;
    Storage *s = mem_alloc(sizeof *s + room);
    if (!s) return NULL;
    storage_init(s, d, room ? aligned(s + 1) : NULL, bytes, stream)->small = true;
    return s;
  }
  Storage *s = mem_alloc(sizeof *s);
  if (!s) return NULL;
  void *data = d->api->alloc(d, bytes, stream);
  if (!data) {
    mem_free(s);
    return NULL;
  }
  return storage_init(s, d, data, bytes, stream);
}

Storage *storage_wrap(Device *d, void *data, size_t bytes, void (*release)(void *), void *owner) {
  Storage *s = mem_alloc(sizeof *s);
  if (!s) return NULL;
  storage_init(s, d, data, bytes, NULL);
  s->foreign_release = release;
  s->owner = owner;
  return s;
}

int storage_explain(Device *d, size_t bytes) {
  DeviceStats m = device_stats(d);
  char limit[40] = "none";
  if (m.limit) snprintf(limit, sizeof limit, "%zu", m.limit);
  return err_set(MF_ENOMEM, "out of memory on %s: requested %zu bytes, in use %zu, cached %zu, limit %s", d->api->name, bytes,
                 m.in_use, m.cached, limit);
}

static void data_release(Storage *s) {
  if (s->foreign_release) s->foreign_release(s->owner);
  else if (!s->small && s->data) s->device->api->release(s->device, s->data, s->bytes, s->stream);
  s->data = NULL;
  s->foreign_release = NULL;
}

void storage_free_now(Storage *s) {
  if (!atomic_exchange(&s->freed, true)) data_release(s);
}

void storage_release(Storage *s) {
  if (!s || atomic_fetch_sub_explicit(&s->refs, 1, memory_order_acq_rel) != 1) return;
  if (!atomic_load(&s->freed)) data_release(s);
  mem_free(s);
}
