/* Where kernels have their scratch. Each worker's steps run one after the other, so that they share
 * one piece, their stream's, as large as the largest. But the largest are as large as tensors
 * (convolutions), and while such a step runs the block often has room where nothing lives: then its
 * scratch lies there, and the stream's needs to be no larger than the rest want.
 *
 * How much a kernel needs depends on the number of threads, so this is found out when a plan runs,
 * and the plan itself does not say. */
#include <stdlib.h>
#include <string.h>

#include "actor.h"
#include "err.h"
#include "mem.h"
#include "thread.h"

enum { IN_BLOCK = 1 << 20 /* bytes that are worth a search */ };

/* Bytes of the block that are a register's. */
typedef struct Region {
  int64_t from, to;
  int first, last, stream; /* during these steps of that stream; of others always */
} Region;

static int by_place(const void *a, const void *b) {
  const Region *x = a, *y = b;
  return x->from < y->from ? -1 : x->from > y->from;
}

/* All of them, by place; NULL when there is no memory for that. */
static Region *list_regions(const Plan *p, size_t *n) {
  Region *list = mem_alloc(sizeof *list * (p->registers.n + 1));
  *n = 0;
  for (size_t i = 0; list && i < p->registers.n; i++) {
    const PlanRegister *r = &p->registers.at[i];
    if (r->home != PLAN_BLOCK || !r->bytes) continue;
    Region *at = &list[(*n)++];
    *at = (Region){.from = r->offset, .to = r->offset + plan_size(r), .stream = r->stream};
    plan_lifetime(p, r, &at->first, &at->last);
  }
  if (list) qsort(list, *n, sizeof *list, by_place);
  return list;
}

/* The lowest place in the block where so many bytes are free during a step; -1: there is none. */
static int64_t find_room(const Region *list, size_t n, int step, int stream, int64_t bytes,
                         int64_t block) {
  int64_t at = 0;
  for (size_t i = 0; i < n; i++) {
    const Region *r = &list[i];
    if (r->stream == stream && (step < r->first || step > r->last)) continue;
    if (r->from - at >= bytes) return at;
    if (r->to > at) at = r->to;
  }
  return block - at >= bytes ? at : -1;
}

/* Finds places for a worker's steps, and how much the others need. */
static void measure(Worker *w, const Region *list, size_t n) {
  Runtime *r = w->runtime;
  w->scratch_bytes = 0;
  w->scratch = NULL;
  for (int i = 0; i < w->n_actors; i++)
    for (int j = w->actors[i]->task->first, last = j + w->actors[i]->task->n; j < last; j++) {
      const OpSpec *spec = r->calls[j].op->spec[r->options.isa];
      size_t bytes = spec->scratch && !r->device->kernels ? spec->scratch(&r->calls[j]) : 0;
      bool large = list && bytes >= IN_BLOCK;
      r->scratch_at[j] =
          large ? find_room(list, n, j, w->stream, (int64_t)bytes, r->plan->block_bytes) : -1;
      if (r->scratch_at[j] < 0 && bytes > w->scratch_bytes) w->scratch_bytes = bytes;
    }
}

/* Kernels may want it for each thread. */
static void measure_all(Runtime *r) {
  size_t n;
  Region *list = list_regions(r->plan, &n);
  for (int k = 0; k < r->n_workers; k++) measure(&r->workers[k], list, n);
  mem_free(list);
}

int scratch_set(Runtime *r) {
  bool anew = r->thread_count != thread_count();
  r->thread_count = thread_count();
  if (anew) measure_all(r);
  for (int k = 0; k < r->n_workers; k++) {
    Worker *w = &r->workers[k];
    void *scratch = w->scratch_bytes ? stream_scratch(w->device_stream, w->scratch_bytes) : NULL;
    if (w->scratch_bytes && !scratch) {
      r->thread_count = 0;
      return err_set(MF_ENOMEM, "out of memory for %zu bytes of scratch", w->scratch_bytes);
    }
    if (!anew && scratch == w->scratch) continue;
    w->scratch = scratch;
    for (int i = 0; i < w->n_actors; i++)
      for (int j = w->actors[i]->task->first, n = j + w->actors[i]->task->n; j < n; j++)
        r->calls[j].scratch = r->scratch_at[j] < 0 ? scratch : r->block + r->scratch_at[j];
  }
  return 0;
}
