/* What belongs to one Lua state: making and ending. */
#include "global.h"
#include "mem.h"
#include "tape.h"

int eager_settle(Eager *E, Storage *s) {
  int rc = 0;
  for (EagerPending *p = E->pending, *next; p && !rc; p = next) {
    next = p->next; /* it may go when all is settled */
    rc = p->settle(p, s);
  }
  return rc;
}

Eager *eager_create(Context *context) {
  Eager *E = mem_zalloc(sizeof *E);
  if (!E) return NULL;
  context_retain(context);
  E->context = context;
  E->grad_enabled = true;
  E->isa = op_isa_index(context->isa);
  E->next_seq = 1;
  for (int t = 0; t < CONTEXT_DEVICES; t++) {
    Device *d = context->devices[t];
    if (d && d->api->on_host && !(E->streams[t] = d->api->stream_create(d))) {
      eager_destroy(E);
      return NULL;
    }
  }
  return E;
}

Stream *eager_open_stream(Eager *E, int slot) {
  Device *d = E->context->devices[slot];
  Stream *s = d->api->stream_create(d);
  if (!s) err_prefix(MF_ENOMEM, d->name);
  return E->streams[slot] = s;
}

/* Tensors that outlive it (a C host's, another thread's) still find their pool and streams. */
void eager_free(Eager *E) {
  for (int t = 0; t < CONTEXT_DEVICES; t++)
    if (E->streams[t]) E->streams[t]->device->api->stream_destroy(E->streams[t]);
  tape_end(E);
  global_forget(E);
  global_end(E);
  pool_clear(&E->pool);
  context_release(E->context);
  mem_free(E);
}

void eager_destroy(Eager *E) {
  if (!E) return;
  E->closed = true;
  E->owner = (EagerOwner){0};
  if (!E->tensors) eager_free(E);
}
