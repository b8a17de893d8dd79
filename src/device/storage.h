/* The memory of tensors: counted, shared by views and by Lua states; count and version are atomic. */
#ifndef MF_STORAGE_H
#define MF_STORAGE_H
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "device.h"

typedef struct Storage {
  atomic_int refs;
  atomic_uint version;  /* counts writes, for the tape */
  atomic_bool freed;    /* by the user; `data` is NULL then */
  bool small;           /* data lies behind this structure */
  Device *device;
  Stream *stream;       /* on which it was made; NULL: memory of somebody else */
  void *data;
  size_t bytes;
  void (*foreign_release)(void *owner); /* for memory of somebody else */
  void *owner;
} Storage;

/* NULL when there is no memory; storage_explain then writes the error. The first count belongs to the caller. */
Storage *storage_create(Device *d, size_t bytes, Stream *s);
/* Memory of somebody else; release(owner) is called once when the last user is gone. */
Storage *storage_wrap(Device *d, void *data, size_t bytes, void (*release)(void *), void *owner);
/* "out of memory: requested ..., in use ..., cached ..., limit ..." as err_set; returns MF_ENOMEM. */
int storage_explain(Device *d, size_t bytes);
void storage_release(Storage *s);
/* Gives the memory back now; later use of any view is an error. */
void storage_free_now(Storage *s);

static inline void storage_retain(Storage *s) {
  atomic_fetch_add_explicit(&s->refs, 1, memory_order_relaxed);
}
static inline void storage_touch(Storage *s) {
  atomic_fetch_add_explicit(&s->version, 1, memory_order_relaxed);
}
static inline unsigned storage_version(Storage *s) {
  return atomic_load_explicit(&s->version, memory_order_relaxed);
}

#endif
