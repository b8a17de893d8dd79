/* The member `local`: ranks as threads of one process, which share a segment on the heap.
 *
 * The segment is counted by the ranks that have not closed; the last one frees it. Closing marks
 * the seat as left, so that who still waits for the rank learns it at once. */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "comm_int.h"

typedef struct Shared {
  atomic_int users;
  Segment *segment;
} Shared;

static void local_close(Comm *c) {
  Shared *shared = c->member;
  Segment *s = c->segment;
  atomic_store(&s->seat[c->seat].state, SEAT_LEFT);
  for (uint32_t i = 0; i < s->seats; i++) bell_ring(&s->seat[i].bell);
  comm_destroy(c);
  if (atomic_fetch_sub(&shared->users, 1) != 1) return;
  mem_free(shared->segment);
  mem_free(shared);
}

static const CommApi local_api = {.name = "local",
                                  .collective = collective_run,
                                  .send = message_send,
                                  .recv = message_recv,
                                  .post = message_post,
                                  .test = message_test,
                                  .close = local_close};

static Shared *shared_create(int n) {
  size_t bytes = (segment_bytes(n) + BELL_LINE - 1) / BELL_LINE * BELL_LINE;
  Shared *s = mem_zalloc(sizeof *s);
  if (s && (s->segment = mem_aligned(BELL_LINE, bytes))) {
    memset(s->segment, 0, sizeof *s->segment);
    for (int i = 0; i < n * n; i++) { /* the data stay untouched until used */
      atomic_init(&s->segment->ring[i].head, 0);
      atomic_init(&s->segment->ring[i].tail, 0);
    }
    segment_open(s->segment, n);
    return s;
  }
  mem_free(s);
  return NULL;
}

static Comm *make_rank(Shared *shared, int rank, int n, const CommOptions *o, const char *host) {
  Comm *c = comm_create(&local_api, rank, n, o);
  if (!c) return NULL;
  c->member = shared;
  c->segment = shared->segment;
  c->seat = rank;
  for (int i = 0; i < n; i++) {
    c->peers[i].seat = i;
    snprintf(c->peers[i].host, sizeof c->peers[i].host, "%s", host);
  }
  atomic_store(&c->segment->seat[rank].state, SEAT_TAKEN);
  if (comm_world(c)) return c;
  comm_destroy(c);
  return NULL;
}

int comm_local(int n, const CommOptions *o, Comm **comms) {
  if (n < 1 || n > SEGMENT_SEATS)
    return err_set(MF_EINVAL, "comm: a process can hold 1 to %d ranks, not %d", SEGMENT_SEATS, n);
  char host[64] = "";
  gethostname(host, sizeof host - 1);
  Shared *shared = shared_create(n);
  if (!shared) return err_set(MF_ENOMEM, "comm: out of memory");
  atomic_init(&shared->users, n);
  int made = 0;
  while (made < n && (comms[made] = make_rank(shared, made, n, o, host))) made++;
  if (made == n) return 0;
  for (int i = 0; i < made; i++) comm_destroy(comms[i]);
  mem_free(shared->segment);
  mem_free(shared);
  return err_set(MF_ENOMEM, "comm: out of memory");
}
