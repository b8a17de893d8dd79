/* Launches that are watched: timed for a profile, or their results searched for NaN. Who launches a
 * kernel asks the context whether somebody watches, and if so launches it here. */
#ifndef MF_WATCH_H
#define MF_WATCH_H
#include "context.h"
#include "op.h"

typedef struct Profile Profile;

struct Watch {
  Profile *profile; /* NULL: none */
  bool nan;         /* a NaN in a result is an error */
};

static inline Watch *watch_of(Context *c) {
  return atomic_load_explicit(&c->watch, memory_order_acquire);
}

/* Runs the kernel; `where` is the user's line, or NULL. */
int watch_launch(const Watch *w, const OpSpec *spec, const OpCall *c, const char *where);

#endif
