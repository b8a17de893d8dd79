/* See scan.h. Numbers are read and printed as in the C locale, whatever the host's is. */
#include "scan.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "err.h"
#include "str.h"

static bool is_word(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_';
}

static void skip(Scan *s) {
  while (*s->at == ' ') s->at++;
}

void scan_fail(Scan *s, const char *format, ...) {
  char text[512], near[24];
  va_list args;
  va_start(args, format);
  vsnprintf(text, sizeof text, format, args);
  va_end(args);
  size_t n = strcspn(s->at, "\n");
  if (n >= sizeof near) n = sizeof near - 1;
  memcpy(near, s->at, n);
  near[n] = 0;
  arena_throw(s->arena,
              err_set(MF_EINVAL, "%s: line %d: %s, at '%s'", s->what, s->line, text, near));
}

bool scan_is(Scan *s, const char *token) {
  skip(s);
  size_t n = strlen(token);
  if (strncmp(s->at, token, n) != 0) return false;
  if (is_word(token[n - 1]) && is_word(s->at[n])) return false;
  s->at += n;
  return true;
}

void scan_want(Scan *s, const char *token) {
  if (!scan_is(s, token)) scan_fail(s, "expected '%s'", token);
}

const char *scan_word(Scan *s) {
  skip(s);
  size_t n = 0;
  while (is_word(s->at[n])) n++;
  if (!n) scan_fail(s, "expected a word");
  char *word = arena_alloc(s->arena, n + 1);
  memcpy(word, s->at, n);
  s->at += n;
  return word;
}

int64_t scan_int(Scan *s) {
  skip(s);
  char *end;
  errno = 0;
  long long v = strtoll(s->at, &end, 10);
  if (end == s->at || errno || *s->at == '\n') scan_fail(s, "expected a whole number");
  s->at = end;
  return v;
}

int64_t scan_range(Scan *s, const char *name, int64_t low, int64_t high) {
  const char *at = s->at;
  int64_t v = scan_int(s);
  if (v >= low && v <= high) return v;
  s->at = at;
  scan_fail(s, "%s is %lld, must be from %lld to %lld", name, (long long)v, (long long)low,
            (long long)high);
}

uint64_t scan_unsigned(Scan *s) {
  skip(s);
  char *end;
  errno = 0;
  unsigned long long v = strtoull(s->at, &end, 10);
  if (end == s->at || errno || *s->at < '0' || *s->at > '9') scan_fail(s, "expected a count");
  s->at = end;
  return v;
}

/* The host locale's decimal point. */
static const char *decimal_point(char buf[8]) {
  snprintf(buf, 8, "%.1f", 0.5);
  buf[strlen(buf) - 1] = 0;
  return buf + 1;
}

double scan_double(Scan *s) {
  skip(s);
  char text[64], point[8], *end;
  const char *radix = decimal_point(point);
  size_t n = strspn(s->at, "+-0123456789.einfa"), to = 0;
  for (size_t i = 0; i < n && to + sizeof point < sizeof text; i++) {
    if (s->at[i] != '.') {
      text[to++] = s->at[i];
    } else {
      memcpy(text + to, radix, strlen(radix));
      to += strlen(radix);
    }
  }
  text[to] = 0;
  double v = strtod(text, &end);
  if (!n || *end || end == text) scan_fail(s, "expected a number");
  s->at += n;
  return v;
}

void str_double(Str *s, double v) {
  char text[48], point[8];
  int digits = 15;
  do snprintf(text, sizeof text, "%.*g", digits, v);
  while (strtod(text, NULL) != v && ++digits <= 17);
  const char *radix = decimal_point(point);
  char *at = strcmp(radix, ".") == 0 ? NULL : strstr(text, radix);
  if (at) {
    str_add(s, text, (size_t)(at - text));
    str_puts(s, ".");
    str_puts(s, at + strlen(radix));
  } else {
    str_puts(s, v != v ? "nan" : text);
  }
}

void str_quote(Str *s, const char *text) {
  str_puts(s, "\"");
  for (const char *c = text; *c; c++) {
    if (*c == '"' || *c == '\\') str_printf(s, "\\%c", *c);
    else if (*c == '\n') str_puts(s, "\\n");
    else str_add(s, c, 1);
  }
  str_puts(s, "\"");
}

const char *scan_quoted(Scan *s) {
  scan_want(s, "\"");
  char *text = arena_alloc(s->arena, strcspn(s->at, "\n") + 1), *to = text;
  for (; *s->at != '"'; s->at++) {
    if (!*s->at || *s->at == '\n') scan_fail(s, "a text in quotes has no end");
    if (*s->at == '\\' && s->at[1]) {
      s->at++;
      *to++ = *s->at == 'n' ? '\n' : *s->at;
    } else {
      *to++ = *s->at;
    }
  }
  s->at++;
  return text;
}

void scan_end_line(Scan *s) {
  skip(s);
  if (*s->at && *s->at != '\n') scan_fail(s, "expected the end of the line");
  for (skip(s); *s->at == '\n'; skip(s)) {
    s->at++;
    s->line++;
  }
}

bool scan_at_end(const Scan *s) {
  return !*s->at;
}
