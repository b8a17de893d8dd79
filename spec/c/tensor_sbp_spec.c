/* SBP values: text there and back, what is refused, balanced parts. */
#include <string.h>

#include "check.h"
#include "err.h"
#include "sbp.h"

static void text_goes_there_and_back(void) {
  static const char *const texts[] = {"S0", "S1", "S11", "B", "P", "Pmax", "Pmin"};
  for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
    Sbp s = {9, 9};
    char buf[SBP_TEXT_MAX];
    CHECK(sbp_parse(texts[i], &s) == 0, "%s is refused", texts[i]);
    CHECK(!strcmp(sbp_text(s, buf), texts[i]), "%s came back as %s", texts[i], buf);
  }
}

static void brackets_are_read(void) {
  Sbp s;
  CHECK(sbp_parse("S(3)", &s) == 0 && s.kind == SBP_S && s.dim == 3, "S(3)");
}

static void the_rest_is_refused(void) {
  static const char *const texts[] = {"",    "S",     "S-1", "S12",        "S(1", "S1)",
                                      "S()", "S(0) ", "s0",  "Psum",       "b",   "Pmx",
                                      "S0x", "S 0",   "S+1", "S4294967296"};
  for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
    Sbp s;
    CHECK(sbp_parse(texts[i], &s) == MF_EINVAL, "'%s' is read", texts[i]);
    CHECK(strstr(err_text(), texts[i]) && strstr(err_text(), "Pmax"), "the error is: %s",
          err_text());
  }
}

static void kinds_are_told_apart(void) {
  Sbp s0 = sbp_split(0), s1 = sbp_split(1), b = {SBP_B, 0}, p = {SBP_P, 0}, pmax = {SBP_PMAX, 0};
  CHECK(sbp_equal(s0, sbp_split(0)) && !sbp_equal(s0, s1) && !sbp_equal(p, pmax), "equality");
  CHECK(!sbp_is_partial(b) && !sbp_is_partial(s1) && sbp_is_partial(p) && sbp_is_partial(pmax),
        "partial");
}

static void parts_are_balanced(void) {
  for (int64_t size = 0; size < 20; size++)
    for (int parts = 1; parts < 8; parts++) {
      int64_t at = 0;
      for (int i = 0; i < parts; i++) {
        int64_t start, length;
        sbp_part(size, parts, i, &start, &length);
        CHECK(start == at, "%d of %d: begins at %d, not %d", i, parts, (int)start, (int)at);
        CHECK(length == size / parts + (i < size % parts), "%d of %d: length %d", i, parts,
              (int)length);
        at += length;
      }
      CHECK(at == size, "%d parts cover %d of %d", parts, (int)at, (int)size);
    }
}

int main(void) {
  RUN(text_goes_there_and_back);
  RUN(brackets_are_read);
  RUN(the_rest_is_refused);
  RUN(kinds_are_told_apart);
  RUN(parts_are_balanced);
  return check_end();
}
