/* SBP as values: text and balanced parts. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "err.h"
#include "meta.h"
#include "sbp.h"

static const struct {
  const char *name;
  SbpKind kind;
} words[] = {{"B", SBP_B}, {"P", SBP_P}, {"Pmax", SBP_PMAX}, {"Pmin", SBP_PMIN}};

enum { WORDS = sizeof words / sizeof words[0] };

int sbp_parse(const char *text, Sbp *out) {
  for (int i = 0; i < WORDS; i++) {
    if (strcmp(text, words[i].name)) continue;
    *out = (Sbp){(uint8_t)words[i].kind, 0};
    return 0;
  }
  if (text[0] == 'S') {
    bool bracket = text[1] == '(';
    const char *digits = text + 1 + bracket;
    size_t n = strspn(digits, "0123456789");
    long dim = n >= 1 && n <= 2 ? strtol(digits, NULL, 10) : MF_MAX_DIMS;
    if (dim < MF_MAX_DIMS && !strcmp(digits + n, bracket ? ")" : "")) {
      *out = sbp_split((int)dim);
      return 0;
    }
  }
  return err_set(MF_EINVAL, "sbp: '%.40s' is none; there are S0 to S%d, B, P, Pmax, Pmin", text,
                 MF_MAX_DIMS - 1);
}

char *sbp_text(Sbp s, char *buf) {
  if (s.kind == SBP_S) {
    snprintf(buf, SBP_TEXT_MAX, "S%d", s.dim);
    return buf;
  }
  for (int i = 0; i < WORDS; i++)
    if (words[i].kind == s.kind) snprintf(buf, SBP_TEXT_MAX, "%s", words[i].name);
  return buf;
}

void sbp_part(int64_t size, int parts, int index, int64_t *start, int64_t *length) {
  int64_t each = size / parts, more = size % parts;
  *start = index * each + (index < more ? index : more);
  *length = each + (index < more);
}
