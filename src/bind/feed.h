/* Batches for compiled steps that run over a loader. */
#ifndef MF_BIND_FEED_H
#define MF_BIND_FEED_H
#include "job.h"
#include "state.h"

typedef struct Feed Feed;

/* The feed at an index; raises. */
Feed *feed_check(lua_State *L, int index);
/* It as a source of batches; counted. */
JobSource feed_source(Feed *f);

#endif
