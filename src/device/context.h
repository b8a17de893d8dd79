/* A context: everything that several Lua states and threads of one host share. No globals hang
 * beside it. */
#ifndef MF_CONTEXT_H
#define MF_CONTEXT_H
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "device.h"

enum { CONTEXT_DEVICE_TYPES = 3 };

typedef struct Watch Watch; /* of op/watch.h */
typedef struct Comm Comm;   /* of comm/comm.h */

struct Context {
  atomic_int refs;
  atomic_bool interrupted; /* set from a signal handler; tested by the dispatcher, cleared by who
                              reports it */
  _Atomic(Watch *) watch;  /* NULL: launches are not watched */
  Watch *watch_kept;       /* the memory of that; NULL: it never was */
  int isa;                 /* which of the op tables suits this CPU; see op.h */
  Device *devices[CONTEXT_DEVICE_TYPES]; /* by DeviceType, device 0; NULL where there is none */
  Comm *comm;                            /* this rank's place in its job; NULL: none yet */
  void (*comm_close)(Comm *);            /* at the end, when there is one */
};

/* NULL when out of memory. Counted: the last release destroys it with its devices; tensors must be
 * gone by then. */
Context *context_create(void);
void context_retain(Context *c);
void context_release(Context *c);

#endif
