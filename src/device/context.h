/* A context: everything that several Lua states and threads of one host share. No globals hang
 * beside it. */
#ifndef MF_CONTEXT_H
#define MF_CONTEXT_H
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "device.h"

enum { CONTEXT_DEVICES = 16 };

typedef struct Watch Watch; /* of op/watch.h */
typedef struct Comm Comm;   /* of comm/comm.h */

struct Context {
  atomic_int refs;
  atomic_bool interrupted; /* set from a signal handler; tested by the dispatcher, cleared by who
                              reports it */
  _Atomic(Watch *) watch;  /* NULL: launches are not watched */
  int isa;                 /* which of the op tables suits this CPU; see op.h */
  /* By slot, which is a DeviceType of tensor/meta.h, the last of them followed by the further
   * devices of its kind; NULL where there is none. Those of a plugin come when it is opened. */
  Device *devices[CONTEXT_DEVICES];
  pthread_mutex_t opening;    /* of the plugin */
  atomic_int plugged;         /* how many devices it has; 0: not opened */
  DeviceKernel **kernels;     /* of those devices */
  Comm *comm;                 /* this rank's place in its job; NULL: none yet */
  void (*comm_close)(Comm *); /* at the end, when there is one */
};

/* NULL when out of memory. Counted: the last release destroys it with its devices; tensors must be
 * gone by then. */
Context *context_create(void);
void context_retain(Context *c);
void context_release(Context *c);

#endif
