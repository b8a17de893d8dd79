/* The memory of tensors: counted, shared by views and by Lua states; count and version are atomic.
 *
 * A Storage is part of a larger block: of the tensor for which it was made (eager/tensor.c). The
 * block's memory goes back when both are gone, the tensor and the storage's last user, which may
 * be another tensor and in another thread. */
#ifndef MF_STORAGE_H
#define MF_STORAGE_H
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "device.h"

typedef struct Storage {
  atomic_int refs;
  atomic_uint version;     /* counts writes, for the tape */
  _Atomic uint16_t writer; /* who wrote last, as storage_written was told; 0: nobody */
  atomic_bool freed;       /* by the user; `data` is NULL then */
  _Atomic uint8_t absence; /* bits of StorageAbsence; 0: the contents are there */
  atomic_uchar living;     /* StorageLife: what of the block is in use */
  bool inside;             /* data lies in the block */
  Device *device;
  Stream *stream; /* on which it was made; NULL: memory of somebody else */
  void *data;
  size_t bytes;
  void (*foreign_release)(void *owner); /* for memory of somebody else */
  void *owner;
} Storage;

typedef enum StorageLife { STORAGE_NEIGHBOUR = 1, STORAGE_USERS = 2 } StorageLife;

/* The contents are those of a step that is being compiled, or was, or failed: there are none to
 * read. They are those of a step that runs: whose state it is waits before it touches them. */
typedef enum StorageAbsence { STORAGE_TRACED = 1, STORAGE_PENDING = 2 } StorageAbsence;

enum { STORAGE_ALIGN = 64 };

/* Makes the storage that lies at the start of a block of mem_aligned. Data that fit lie in `room`
 * of that block, aligned to STORAGE_ALIGN. False when there is no memory; storage_explain then
 * writes the error. The first count belongs to the caller. */
bool storage_open(Storage *s, Device *d, size_t bytes, void *room, size_t room_bytes,
                  Stream *stream);
/* Memory of somebody else; release(owner) is called once when the last user is gone. */
void storage_open_foreign(Storage *s, Device *d, void *data, size_t bytes, void (*release)(void *),
                          void *owner);
/* Memory that is not there: of a tensor in a step that is being compiled. */
void storage_open_traced(Storage *s, Device *d);
/* "out of memory: requested ..., in use ..., cached ..., limit ..." as err_set; returns MF_ENOMEM.
 */
int storage_explain(Device *d, size_t bytes);
void storage_release(Storage *s);
/* Gives the memory back now; later use of any view is an error. */
void storage_free_now(Storage *s);
/* The same, for the last user when it has the block for itself. */
void storage_close(Storage *s);

static inline void storage_retain(Storage *s) {
  atomic_fetch_add_explicit(&s->refs, 1, memory_order_relaxed);
}
/* Counts a write; `writer` is a number that the caller can name later. */
static inline void storage_written(Storage *s, unsigned writer) {
  atomic_fetch_add_explicit(&s->version, 1, memory_order_relaxed);
  atomic_store_explicit(&s->writer, (uint16_t)writer, memory_order_relaxed);
}
static inline void storage_touch(Storage *s) {
  storage_written(s, 0);
}
static inline unsigned storage_version(Storage *s) {
  return atomic_load_explicit(&s->version, memory_order_relaxed);
}
static inline bool storage_is_freed(Storage *s) {
  return atomic_load_explicit(&s->freed, memory_order_relaxed);
}

static inline int storage_absence(Storage *s) {
  return atomic_load_explicit(&s->absence, memory_order_relaxed);
}
static inline bool storage_is_traced(Storage *s) {
  return storage_absence(s) & STORAGE_TRACED;
}
static inline void storage_set_absent(Storage *s, StorageAbsence bit, bool on) {
  if (on) atomic_fetch_or(&s->absence, (uint8_t)bit);
  else atomic_fetch_and(&s->absence, (uint8_t)~bit);
}

#endif
