/* SBP: how one logical tensor lies on the ranks along one axis of a placement.
 *
 *   S0, S1, ...   split along that dim in balanced parts: the first ranks get one more where it
 * does not divide B             broadcast: whole on each rank P             partial: the value is
 * the sum of the parts; Pmax, Pmin: their maximum, minimum */
#ifndef MF_SBP_H
#define MF_SBP_H
#include <stdbool.h>
#include <stdint.h>

typedef enum SbpKind { SBP_B, SBP_S, SBP_P, SBP_PMAX, SBP_PMIN } SbpKind;

typedef struct Sbp {
  uint8_t kind; /* SbpKind */
  int8_t dim;   /* of SBP_S, else 0 */
} Sbp;

static inline Sbp sbp_split(int dim) {
  return (Sbp){SBP_S, (int8_t)dim};
}
static inline bool sbp_is_partial(Sbp s) {
  return s.kind >= SBP_P;
}
static inline bool sbp_equal(Sbp a, Sbp b) {
  return a.kind == b.kind && a.dim == b.dim;
}

/* Reads 'S0', 'S(0)', 'B', 'P', 'Pmax' or 'Pmin'; anything else is MF_EINVAL with a text. */
int sbp_parse(const char *text, Sbp *out);

/* The form that sbp_parse reads, into buf, which is returned. */
enum { SBP_TEXT_MAX = 8 };
char *sbp_text(Sbp s, char *buf);

/* The part of a dim of `size` that rank `index` of `parts` has. */
void sbp_part(int64_t size, int parts, int index, int64_t *start, int64_t *length);

#endif
