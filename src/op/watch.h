/* Launches that are watched: timed for a profile, or their results searched for NaN. Who launches a
 * kernel asks the context whether somebody watches, and if so launches it here. */
#ifndef MF_WATCH_H
#define MF_WATCH_H
#include <pthread.h>

#include "context.h"
#include "op.h"
#include "profile.h"

/* Made once and kept with its context, since launches in other threads may look at it when it is
 * put away. */
struct Watch {
  pthread_mutex_t lock;       /* for adding to the profile, and for taking it away */
  _Atomic(Profile *) profile; /* NULL: none */
  atomic_bool nan;            /* a NaN in a result is an error */
};

/* NULL: nobody does. */
static inline Watch *watch_of(Context *c) {
  return atomic_load_explicit(&c->watch, memory_order_acquire);
}

/* Runs the kernel; `where` is the user's line, or NULL. */
int watch_launch(Watch *w, DeviceKernel *kernel, const OpSpec *spec, const OpCall *c,
                 const char *where);

/* Whether events are to be noted; who has some adds them. */
static inline bool watch_profiles(const Watch *w) {
  return w && atomic_load_explicit(&w->profile, memory_order_relaxed);
}
void watch_add(Watch *w, const ProfileEvent *e);

#endif
