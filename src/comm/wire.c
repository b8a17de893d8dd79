/* What a message between processes looks like, and what is refused.
 *
 * One message is one part of ZeroMQ's: an envelope and as many bytes as it says, in the byte order
 * of x86 and arm. A message is taken when
 *
 *   W1  its magic, version and kind are known, and its length is what it says and what the kind
 * allows; W2  it is for this rank, and from the rank as which its connection introduced itself; W3
 * it belongs to this job, whose number rank 0 draws (a JOIN knows it not yet); W4  it is the one
 * after its sender's last: none is taken twice, late, or before its turn.
 *
 * All else is dropped and counted by the caller. Texts end with a zero inside their field. */
#include "wire.h"

#include <string.h>

static const uint32_t wire_magic = 0x31434d66;

#define X(id, least, most) {least, most},
static const struct { size_t least, most; } wire_sizes[] = {{1, 0}, WIRE_KINDS(X)};
#undef X

_Static_assert(sizeof(Envelope) % 8 == 0, "what follows is aligned as the envelope");

void wire_seal(Envelope *e, WireKind kind, uint64_t job, int from, int to, uint64_t number,
               size_t bytes) {
  *e = (Envelope){.magic = wire_magic,
                  .version = WIRE_VERSION,
                  .kind = (uint16_t)kind,
                  .job = job,
                  .from = (uint32_t)from,
                  .to = (uint32_t)to,
                  .number = number,
                  .bytes = bytes};
}

bool wire_check(const WireRules *r, uint32_t from, const void *message, size_t n) {
  Envelope e;
  if (n < sizeof e) return false;
  memcpy(&e, message, sizeof e);
  if (e.magic != wire_magic || e.version != WIRE_VERSION || e.unused) return false;
  if (e.kind == WIRE_NONE || e.kind >= WIRE_KIND_COUNT) return false;
  if (e.bytes != n - sizeof e) return false;
  if (e.bytes < wire_sizes[e.kind].least || e.bytes > wire_sizes[e.kind].most) return false;
  if (e.to != r->me || e.from != from || from >= r->size || from == r->me) return false;
  if (e.job != (e.kind == WIRE_JOIN ? 0 : r->job) && e.kind != WIRE_WELCOME) return false;
  if (e.kind == WIRE_WELCOME && (r->job || from != 0)) return false;
  if (e.number != r->numbers[from] + 1) return false;
  r->numbers[from] = e.number;
  return true;
}

bool wire_seat_check(const WireSeat *s, uint32_t size) {
  return s->rank < size && s->size == size && s->pid > 0 && s->fd >= 0 &&
         !s->host[sizeof s->host - 1] && !s->host_id[sizeof s->host_id - 1] &&
         !s->endpoint[sizeof s->endpoint - 1] && !strncmp(s->endpoint, "tcp://", 6);
}

bool wire_fragment_check(const void *payload, size_t n) {
  Fragment f;
  memcpy(&f, payload, sizeof f);
  bool kind = f.kind == FRAGMENT_CALL || f.kind == FRAGMENT_PROBE || f.kind == FRAGMENT_MESSAGE;
  bool within = f.kind == FRAGMENT_PROBE || (f.offset <= f.total && f.bytes <= f.total - f.offset);
  return kind && within && f.bytes == n - sizeof f;
}
