/* Reading texts that the library printed: a place in a text that moves over words and numbers.
 * What does not fit leaves the innermost arena_protect with an error that names the line. Blanks
 * before a token are skipped, ends of lines are not. */
#ifndef MF_SCAN_H
#define MF_SCAN_H
#include <stdbool.h>
#include <stdint.h>

#include "arena.h"

typedef struct Scan {
  Arena *arena;
  const char *at;
  const char *what; /* for error texts: "plan" */
  int line;
} Scan;

static inline Scan scan_begin(Arena *a, const char *what, const char *text) {
  return (Scan){a, text, what, 1};
}

/* Whether the token is next; then it is passed. A token that is a word matches whole words only. */
bool scan_is(Scan *s, const char *token);
/* The token must be next. */
void scan_want(Scan *s, const char *token);
/* Letters, digits and '_', as a copy in the arena; an error when there are none. */
const char *scan_word(Scan *s);
int64_t scan_int(Scan *s);
/* A whole number in [low, high]; `name` is for the error. */
int64_t scan_range(Scan *s, const char *name, int64_t low, int64_t high);
uint64_t scan_unsigned(Scan *s);
/* What str_double printed. */
double scan_double(Scan *s);
/* What str_quote printed. */
const char *scan_quoted(Scan *s);
/* The line must end here; goes to the next one that is not empty. */
void scan_end_line(Scan *s);
bool scan_at_end(const Scan *s);
void scan_fail(Scan *s, const char *format, ...) __attribute__((noreturn, format(printf, 2, 3)));

#endif
