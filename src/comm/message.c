/* Messages along edges: a flow of one message, which carries its number on the edge.
 *
 * The receiver checks number and length, so that a lost, repeated or wrong message is an error and
 * not other data. Sending waits only for room on the way: what the receiver does not take yet lies
 * in the ring, or in the window between hosts, and a receiver that waits for another edge puts it
 * aside. */
#include "comm_int.h"

static int message(Comm *c, int peer, uint64_t edge, const void *data, size_t bytes, bool out) {
  Peer *p = &c->peers[peer];
  Edge *e = comm_edge(p, edge);
  const char *name = out ? "send" : "recv";
  if (!e) return err_set(MF_ENOMEM, "%s: out of memory", name);
  Flow flow = {.peer = peer, .out = out, .at = (char *)data, .total = bytes};
  Exchange x = {.comm = c, .name = name, .flows = &flow, .n = 1};
  x.head = (Fragment){
      .kind = FRAGMENT_MESSAGE, .context = edge, .number = out ? ++e->sent : ++e->received};
  return flow_run(&x);
}

int message_send(Comm *c, int to, uint64_t edge, const void *data, size_t bytes) {
  return message(c, to, edge, data, bytes, true);
}

int message_recv(Comm *c, int from, uint64_t edge, void *data, size_t bytes) {
  return message(c, from, edge, data, bytes, false);
}
