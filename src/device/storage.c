/* Storages: where the data of a tensor lies, and who gives it back.
 *
 * Small data (scalars, shapes, biases) lie in the block of the storage itself, since a pair of
 * calls to an allocator would cost more than the op that fills them. */
#include <stdio.h>

#include "context.h"
#include "err.h"
#include "mem.h"
#include "storage.h"

static void storage_init(Storage *s, Device *d, void *data, size_t bytes, Stream *stream) {
  atomic_init(&s->refs, 1);
  atomic_init(&s->version, 0);
  atomic_init(&s->writer, 0);
  atomic_init(&s->freed, false);
  atomic_init(&s->absence, 0);
  atomic_store_explicit(&s->living, STORAGE_NEIGHBOUR | STORAGE_USERS, memory_order_relaxed);
  s->inside = false;
  s->device = d;
  s->stream = stream;
  s->data = data;
  s->bytes = bytes;
  s->foreign_release = NULL;
  s->owner = NULL;
}

bool storage_open(Storage *s, Device *d, size_t bytes, void *room, size_t room_bytes,
                  Stream *stream) {
  void *data = d->api->has_data ? room : NULL;
  bool inside = (bytes <= room_bytes && d->api->on_host) || !data;
  if (!inside && !(data = d->api->alloc(d, bytes, stream))) return false;
  storage_init(s, d, data, bytes, stream);
  s->inside = inside;
  return true;
}

void storage_open_foreign(Storage *s, Device *d, void *data, size_t bytes, void (*release)(void *),
                          void *owner) {
  storage_init(s, d, data, bytes, NULL);
  s->foreign_release = release;
  s->owner = owner;
}

void storage_open_traced(Storage *s, Device *d) {
  storage_init(s, d, NULL, 0, NULL);
  s->inside = true;
  atomic_init(&s->absence, STORAGE_TRACED);
}

int storage_explain(Device *d, size_t bytes) {
  DeviceStats m = device_stats(d);
  char limit[40] = "none";
  if (m.limit) snprintf(limit, sizeof limit, "%zu", m.limit);
  return err_set(MF_ENOMEM,
                 "out of memory on %s: requested %zu bytes, in use %zu, cached %zu, limit %s",
                 d->name, bytes, m.in_use, m.cached, limit);
}

static void data_release(Storage *s) {
  if (s->foreign_release) s->foreign_release(s->owner);
  else if (!s->inside) s->device->api->release(s->device, s->data, s->bytes, s->stream);
  s->data = NULL;
  s->foreign_release = NULL;
}

void storage_free_now(Storage *s) {
  if (!atomic_exchange(&s->freed, true)) data_release(s);
}

void storage_close(Storage *s) {
  if (!storage_is_freed(s)) data_release(s);
}

void storage_release(Storage *s) {
  bool only = atomic_load_explicit(&s->refs, memory_order_acquire) == 1;
  if (!only && atomic_fetch_sub_explicit(&s->refs, 1, memory_order_acq_rel) != 1) return;
  storage_close(s);
  unsigned char living = (unsigned char)~STORAGE_USERS;
  if (atomic_fetch_and_explicit(&s->living, living, memory_order_acq_rel) == STORAGE_USERS)
    mem_free(s);
}
