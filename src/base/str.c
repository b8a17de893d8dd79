/* See str.h. */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "hard.h"
#include "mem.h"
#include "str.h"

void str_add(Str *s, const char *bytes, size_t n) {
  if (s->failed) return;
  if (s->n + n + 1 > s->cap) {
    size_t cap = hard_room(s->cap, 64);
    if (cap < s->n + n + 1) cap = s->n + n + 1;
    char *text = mem_resize(s->text, cap);
    if (!text) {
      s->failed = true;
      return;
    }
    s->text = text;
    s->cap = cap;
  }
  memcpy(s->text + s->n, bytes, n);
  s->n += n;
  s->text[s->n] = 0;
}

void str_puts(Str *s, const char *text) {
  str_add(s, text, strlen(text));
}

void str_printf(Str *s, const char *format, ...) {
  char small[256];
  va_list args, again;
  va_start(args, format);
  va_copy(again, args);
  int n = vsnprintf(small, sizeof small, format, args);
  va_end(args);
  if (n < 0) {
    s->failed = true;
  } else if ((size_t)n < sizeof small) {
    str_add(s, small, (size_t)n);
  } else {
    char *big = mem_alloc((size_t)n + 1);
    if (big) {
      vsnprintf(big, (size_t)n + 1, format, again);
      str_add(s, big, (size_t)n);
      mem_free(big);
    } else {
      s->failed = true;
    }
  }
  va_end(again);
}

void str_free(Str *s) {
  mem_free(s->text);
  *s = (Str){0};
}

int str_distance(const char *a, const char *b) {
  enum { LIMIT = 64 };
  int row[LIMIT + 1];
  int m = (int)strnlen(a, LIMIT), n = (int)strnlen(b, LIMIT);
  for (int j = 0; j <= n; j++) row[j] = j;
  for (int i = 1; i <= m; i++) {
    int diagonal = row[0];
    row[0] = i;
    for (int j = 1; j <= n; j++) {
      int best = diagonal + (a[i - 1] != b[j - 1]);
      diagonal = row[j];
      if (row[j] + 1 < best) best = row[j] + 1;
      if (row[j - 1] + 1 < best) best = row[j - 1] + 1;
      row[j] = best;
    }
  }
  return row[n];
}
