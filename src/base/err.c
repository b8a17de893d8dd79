/* The thread-local error frame: one line of text per thread. It is the only mutable variable
 * outside contexts. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "err.h"

enum { ERR_TEXT_MAX = 2048 };
static _Thread_local char text[ERR_TEXT_MAX];

int err_set(int code, const char *format, ...) {
  char next[ERR_TEXT_MAX]; /* arguments may point into the old text */
  va_list args;
  va_start(args, format);
  vsnprintf(next, sizeof next, format, args);
  va_end(args);
  memcpy(text, next, strlen(next) + 1);
  return code;
}

int err_prefix(int code, const char *prefix) {
  return err_set(code, "%s: %s", prefix, text);
}

const char *err_text(void) {
  return text;
}

const char *err_name(int code) {
  switch (code) {
#define X(name, value, words) \
  case value: return words;
    MF_ERRORS(X)
#undef X
  }
  return "unknown";
}

void err_panic(const char *file, int line, const char *format, ...) {
  va_list args;
  va_start(args, format);
  fprintf(stderr, "moonflow: internal error at %s:%d: ", file, line);
  vfprintf(stderr, format, args);
  fputc('\n', stderr);
  va_end(args);
  abort();
}
