/* The JSON reader: a cursor, a stack of one bit a level, and what may come next.
 *
 * What holds between calls: `at` is between two tokens; `expect` says which tokens are legal
 * there, so that commas, colons and brackets are checked without looking back; `depth` counts the
 * open brackets, `in_object[depth - 1]` is the innermost. Refused beyond the grammar: nesting
 * deeper than JSON_DEPTH_MAX, numbers that overflow a double, invalid UTF-8 (overlong forms and
 * surrogates too), lone surrogate escapes, and zero bytes in strings, which C code would cut. */
#define _GNU_SOURCE
#include <ctype.h>
#include <errno.h>
#include <locale.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "err.h"
#include "json.h"

enum {
  EXPECT_VALUE,
  EXPECT_VALUE_OR_END,
  EXPECT_KEY,
  EXPECT_KEY_OR_END,
  EXPECT_AFTER_VALUE,
  EXPECT_NOTHING
};
enum { NUMBER_LENGTH_MAX = 400 };

static JsonKind fail(Json *j, const char *why) {
  err_set(MF_EIO, "byte %zu: %s", (size_t)(j->at - j->text), why);
  j->expect = EXPECT_NOTHING;
  return JSON_ERROR;
}

static void skip_space(Json *j) {
  while (j->at < j->end && strchr(" \t\r\n", *j->at) && *j->at) j->at++;
}

/* -- Strings ----------------------------------------------------------------------------------- */

/* The length of the UTF-8 sequence at s, 0 where it is malformed. */
static size_t utf8_length(const unsigned char *s, size_t n) {
  if (s[0] < 0x80) return 1;
  size_t len = s[0] >= 0xF0 ? 4 : s[0] >= 0xE0 ? 3 : 2;
  if (s[0] < 0xC2 || s[0] > 0xF4 || len > n) return 0;
  for (size_t i = 1; i < len; i++)
    if ((s[i] & 0xC0) != 0x80) return 0;
  bool overlong = (s[0] == 0xE0 && s[1] < 0xA0) || (s[0] == 0xF0 && s[1] < 0x90);
  bool surrogate = s[0] == 0xED && s[1] >= 0xA0;
  bool too_large = s[0] == 0xF4 && s[1] >= 0x90;
  return overlong || surrogate || too_large ? 0 : len;
}

static void add_utf8(Str *s, uint32_t c) {
  char b[4];
  size_t n = c < 0x80 ? 1 : c < 0x800 ? 2 : c < 0x10000 ? 3 : 4;
  static const unsigned char lead[5] = {0, 0, 0xC0, 0xE0, 0xF0};
  for (size_t i = n; i-- > 1; c >>= 6) b[i] = (char)(0x80 | (c & 0x3F));
  b[0] = (char)(lead[n] | c);
  str_add(s, b, n);
}

/* Reads four hexadecimal digits; -1 if they are not. */
static int32_t read_hex4(Json *j) {
  if (j->end - j->at < 4) return -1;
  int32_t v = 0;
  for (int i = 0; i < 4; i++, j->at++) {
    unsigned char c = (unsigned char)*j->at;
    if (!isxdigit(c)) return -1;
    v = v * 16 + (c <= '9' ? c - '0' : (c | 32) - 'a' + 10);
  }
  return v;
}

/* The part of an escape after "\u"; NULL, or what is wrong with it. */
static const char *read_unicode(Json *j) {
  int32_t c = read_hex4(j);
  if (c < 0) return "expected four hexadecimal digits after \\u";
  if (c == 0) return "a zero byte in a string";
  if (c >= 0xDC00 && c <= 0xDFFF) return "a lone surrogate";
  if (c >= 0xD800 && c <= 0xDBFF) {
    if (j->end - j->at < 2 || j->at[0] != '\\' || j->at[1] != 'u') return "a lone surrogate";
    j->at += 2;
    int32_t low = read_hex4(j);
    if (low < 0xDC00 || low > 0xDFFF) return "a lone surrogate";
    c = 0x10000 + ((c - 0xD800) << 10) + (low - 0xDC00);
  }
  add_utf8(&j->string, (uint32_t)c);
  return NULL;
}

static const char *read_escape(Json *j) {
  static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
  if (j->at == j->end) return "the text ends inside a string";
  char c = *j->at++;
  if (c == 'u') return read_unicode(j);
  const char *p = c ? strchr(from, c) : NULL;
  if (!p) return "unknown escape in a string";
  str_add(&j->string, &to[p - from], 1);
  return NULL;
}

/* At an opening quote. Runs of plain characters are appended in one piece. */
static JsonKind read_string(Json *j, JsonKind kind) {
  j->string.n = 0;
  str_add(&j->string, "", 0);
  j->at++;
  for (;;) {
    const char *run = j->at;
    while (j->at < j->end && *j->at != '"' && *j->at != '\\') {
      if ((unsigned char)*j->at < 0x20) return fail(j, "a control character in a string");
      size_t len = utf8_length((const unsigned char *)j->at, (size_t)(j->end - j->at));
      if (!len) return fail(j, "invalid UTF-8 in a string");
      j->at += len;
    }
    str_add(&j->string, run, (size_t)(j->at - run));
    if (j->at == j->end) return fail(j, "the text ends inside a string");
    if (*j->at++ == '"') break;
    const char *why = read_escape(j);
    if (why) return fail(j, why);
  }
  return j->string.failed ? fail(j, "out of memory") : kind;
}

/* -- Numbers and words ------------------------------------------------------------------------- */

static bool skip_digits(Json *j) {
  const char *start = j->at;
  while (j->at < j->end && *j->at >= '0' && *j->at <= '9') j->at++;
  return j->at > start;
}

static bool skip_char(Json *j, const char *set) {
  if (j->at == j->end || !*j->at || !strchr(set, *j->at)) return false;
  j->at++;
  return true;
}

/* As strtod in the C locale, whatever the host's locale says about decimal points. */
static double to_double(const char *text) {
  locale_t c = newlocale(LC_ALL_MASK, "C", (locale_t)0);
  if (!c) return NAN;
  double v = strtod_l(text, NULL, c);
  freelocale(c);
  return v;
}

static JsonKind read_number(Json *j) {
  const char *start = j->at;
  bool whole = true;
  skip_char(j, "-");
  if (j->at < j->end && *j->at == '0') j->at++;
  else if (!skip_digits(j)) return fail(j, "expected a value");
  if (skip_char(j, ".")) {
    whole = false;
    if (!skip_digits(j)) return fail(j, "expected a digit after the point");
  }
  if (skip_char(j, "eE")) {
    whole = false;
    skip_char(j, "+-");
    if (!skip_digits(j)) return fail(j, "expected a digit in the exponent");
  }
  size_t n = (size_t)(j->at - start);
  if (n > NUMBER_LENGTH_MAX) return fail(j, "the number is too long");
  char text[NUMBER_LENGTH_MAX + 1];
  memcpy(text, start, n);
  text[n] = 0;
  j->number = to_double(text);
  if (!isfinite(j->number)) return fail(j, "the number is out of range");
  errno = 0;
  if (whole) j->integer = strtoll(text, NULL, 10);
  return whole && errno == 0 ? JSON_INT : JSON_FLOAT;
}

static JsonKind read_word(Json *j) {
  static const struct {
    const char *word;
    JsonKind kind;
  } words[] = {{"true", JSON_TRUE}, {"false", JSON_FALSE}, {"null", JSON_NULL}};
  for (int i = 0; i < 3; i++) {
    size_t n = strlen(words[i].word);
    if ((size_t)(j->end - j->at) < n || memcmp(j->at, words[i].word, n)) continue;
    j->at += n;
    return words[i].kind;
  }
  return fail(j, "expected a value");
}

/* -- Structure --------------------------------------------------------------------------------- */

static JsonKind open_bracket(Json *j, bool object) {
  if (j->depth == JSON_DEPTH_MAX) return fail(j, "nested too deeply");
  j->at++;
  j->in_object[j->depth++] = object;
  j->expect = object ? EXPECT_KEY_OR_END : EXPECT_VALUE_OR_END;
  return object ? JSON_OBJECT : JSON_ARRAY;
}

static JsonKind close_bracket(Json *j) {
  bool object = j->in_object[--j->depth];
  j->at++;
  j->expect = EXPECT_AFTER_VALUE;
  return object ? JSON_OBJECT_END : JSON_ARRAY_END;
}

static JsonKind read_value(Json *j) {
  char c = *j->at;
  if (c == '{' || c == '[') return open_bracket(j, c == '{');
  JsonKind kind = c == '"'                             ? read_string(j, JSON_STRING)
                  : c == '-' || (c >= '0' && c <= '9') ? read_number(j)
                                                       : read_word(j);
  if (kind != JSON_ERROR) j->expect = EXPECT_AFTER_VALUE;
  return kind;
}

static JsonKind read_key(Json *j) {
  if (*j->at != '"') return fail(j, "expected a key in quotes");
  if (read_string(j, JSON_KEY) == JSON_ERROR) return JSON_ERROR;
  skip_space(j);
  if (!skip_char(j, ":")) return fail(j, "expected ':' after a key");
  j->expect = EXPECT_VALUE;
  return JSON_KEY;
}

/* After a complete value: the end of the text, a closing bracket, or a comma and what must follow
 * it. */
static JsonKind read_after_value(Json *j) {
  if (j->depth == 0) return j->at == j->end ? JSON_END : fail(j, "text after the end of the value");
  bool object = j->in_object[j->depth - 1];
  if (j->at == j->end) return fail(j, "the text ends too early");
  if (*j->at == (object ? '}' : ']')) return close_bracket(j);
  if (!skip_char(j, ",")) return fail(j, object ? "expected ',' or '}'" : "expected ',' or ']'");
  j->expect = object ? EXPECT_KEY : EXPECT_VALUE;
  return json_next(j); /* once: the new state is not this one */
}

/* -- Exported ---------------------------------------------------------------------------------- */

void json_open(Json *j, const char *text, size_t n) {
  memset(j, 0, sizeof *j);
  j->text = j->at = text;
  j->end = text + n;
  j->expect = EXPECT_VALUE;
}

JsonKind json_next(Json *j) {
  if (j->expect == EXPECT_NOTHING) return JSON_ERROR;
  skip_space(j);
  if (j->expect == EXPECT_AFTER_VALUE) return read_after_value(j);
  if (j->at == j->end) return fail(j, "the text ends too early");
  if (j->expect == EXPECT_VALUE_OR_END && *j->at == ']') return close_bracket(j);
  if (j->expect == EXPECT_KEY_OR_END && *j->at == '}') return close_bracket(j);
  return j->expect == EXPECT_KEY || j->expect == EXPECT_KEY_OR_END ? read_key(j) : read_value(j);
}

void json_close(Json *j) {
  str_free(&j->string);
}

void json_quote(Str *out, const char *text, size_t n) {
  str_add(out, "\"", 1);
  for (size_t i = 0; i < n; i++) {
    unsigned char c = (unsigned char)text[i];
    if (c == '"' || c == '\\') str_add(out, "\\", 1);
    if (c < 0x20 || c == 0x7F) str_printf(out, "\\u%04x", c);
    else str_add(out, &text[i], 1);
  }
  str_add(out, "\"", 1);
}

const char *json_utf8_error(const char *text, size_t n) {
  for (size_t i = 0; i < n;) {
    size_t len = utf8_length((const unsigned char *)text + i, n - i);
    if (!len) return text + i;
    i += len;
  }
  return NULL;
}
