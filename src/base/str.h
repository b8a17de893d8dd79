/* A growing text. Failure to grow sets `failed` and later appends do nothing, so that only the end
 * needs a check. */
#ifndef MF_STR_H
#define MF_STR_H
#include <stdbool.h>
#include <stddef.h>

typedef struct Str {
  char *text; /* zero-terminated, NULL while empty */
  size_t n, cap;
  bool failed;
} Str;

void str_add(Str *s, const char *bytes, size_t n);
void str_puts(Str *s, const char *text);
void str_printf(Str *s, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* The shortest of 15 to 17 digits that reads back as v, with a point in any locale. */
void str_double(Str *s, double v);
/* The text in double quotes, on one line; scan_quoted reads it. */
void str_quote(Str *s, const char *text);
void str_free(Str *s);

/* The edit distance of two names, for "did you mean"; at most 64 characters of each count. */
int str_distance(const char *a, const char *b);

#endif
