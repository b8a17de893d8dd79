/* Making and ending a context. */
#include "context.h"
#include "cpuid.h"
#include "mem.h"

Context *context_create(void) {
  Context *c = mem_zalloc(sizeof *c);
  if (!c) return NULL;
  atomic_init(&c->refs, 1);
  c->isa = cpuid_isa();
  pthread_mutex_init(&c->opening, NULL);
  c->devices[0] = cpu_device_create(c);
  c->devices[1] = meta_device_create(c);
  if (c->devices[0] && c->devices[1]) return c;
  context_release(c);
  return NULL;
}

void context_retain(Context *c) {
  atomic_fetch_add(&c->refs, 1);
}

void context_release(Context *c) {
  if (!c || atomic_fetch_sub(&c->refs, 1) != 1) return;
  if (c->comm) c->comm_close(c->comm);
  for (int t = 0; t < CONTEXT_DEVICES; t++)
    if (c->devices[t]) c->devices[t]->api->destroy(c->devices[t]);
  pthread_mutex_destroy(&c->opening);
  mem_free(c->kernels);
  mem_free(c);
}
