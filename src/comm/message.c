/* Messages along edges: a flow of one message, which carries its number on the edge.
 *
 * The receiver checks number and length, so that a lost, repeated or wrong message is an error and
 * not other data. Sending waits only for room on the way: what the receiver does not take yet lies
 * in the ring, or in the window between hosts, and a receiver that waits for another edge puts it
 * aside. */
#include "comm_int.h"

struct CommTransfer {
  Flow flow;
  Exchange x;
};

/* False when there is no memory for a new edge. */
static bool begin(CommTransfer *t, Comm *c, int peer, uint64_t edge, const void *data, size_t bytes,
                  bool out) {
  Edge *e = comm_edge(&c->peers[peer], edge);
  if (!e) {
    err_set(MF_ENOMEM, "%s: out of memory", out ? "send" : "recv");
    return false;
  }
  t->flow = (Flow){.peer = peer, .out = out, .at = (char *)data, .total = bytes};
  t->x = (Exchange){
      .comm = c, .name = out ? "send" : "recv", .flows = &t->flow, .n = 1, .suspect = -1};
  t->x.head = (Fragment){
      .kind = FRAGMENT_MESSAGE, .context = edge, .number = out ? ++e->sent : ++e->received};
  return true;
}

int message_send(Comm *c, int to, uint64_t edge, const void *data, size_t bytes) {
  CommTransfer t;
  return begin(&t, c, to, edge, data, bytes, true) ? flow_run(&t.x) : MF_ENOMEM;
}

int message_recv(Comm *c, int from, uint64_t edge, void *data, size_t bytes) {
  CommTransfer t;
  return begin(&t, c, from, edge, data, bytes, false) ? flow_run(&t.x) : MF_ENOMEM;
}

CommTransfer *message_post(Comm *c, int peer, uint64_t edge, void *data, size_t bytes, bool out) {
  CommTransfer *t = mem_alloc(sizeof *t);
  if (!t) err_set(MF_ENOMEM, "%s: out of memory", out ? "send" : "recv");
  if (t && begin(t, c, peer, edge, data, bytes, out)) return t;
  mem_free(t);
  return NULL;
}

int message_test(CommTransfer *t, bool *done) {
  int code = flow_step(&t->x, done);
  if (code || *done) mem_free(t);
  return code;
}
