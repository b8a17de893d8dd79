/* The JSON reader: what it accepts, what it refuses, and that no cut or changed text makes it
 * read astray. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "err.h"
#include "json.h"

/* The tokens of a text as letters, with the decoded strings and numbers; "!" where it is refused.
 * A copy of exact size lets the address sanitizer see reads beyond the end. */
static Str tokens(const char *text, size_t n) {
  static const char letters[] = "!.{}[]ksifTFN";
  char *copy = malloc(n ? n : 1);
  memcpy(copy, text, n);
  Json j;
  Str out = {0};
  bool failed = false;
  json_open(&j, copy, n);
  for (;;) {
    JsonKind k = json_next(&j);
    if (k == JSON_END) break;
    str_add(&out, &letters[k], 1);
    failed = k == JSON_ERROR;
    if (failed) break;
    if (k == JSON_KEY || k == JSON_STRING) str_printf(&out, "'%s'", j.string.text);
    if (k == JSON_INT) str_printf(&out, "%lld", (long long)j.integer);
    if (k == JSON_FLOAT) str_printf(&out, "%.17g", j.number);
  }
  if (failed) CHECK(json_next(&j) == JSON_ERROR, "an error must last: %s", text);
  json_close(&j);
  free(copy);
  return out;
}

static void expect_tokens(const char *text, const char *want) {
  Str got = tokens(text, strlen(text));
  CHECK(!strcmp(got.text, want), "%s\n  gives    %s\n  expected %s", text, got.text, want);
  str_free(&got);
}

static void refuse(const char *text, const char *why) {
  Str got = tokens(text, strlen(text));
  CHECK(got.n && got.text[got.n - 1] == '!', "accepted: %s as %s", text, got.text);
  CHECK(strstr(err_text(), why), "%s: the error '%s' lacks '%s'", text, err_text(), why);
  str_free(&got);
}

static void accepts(void) {
  expect_tokens("{}", "{}");
  expect_tokens(" [ ] \n", "[]");
  expect_tokens("{\"a\":[1,-2,{\"b\":null}],\"c\":\"d\"}", "{k'a'[i1i-2{k'b'N}]k'c's'd'}");
  expect_tokens("[true,false,null]", "[TFN]");
  expect_tokens("9223372036854775807", "i9223372036854775807");
  expect_tokens("-9223372036854775808", "i-9223372036854775808");
  expect_tokens("9223372036854775808", "f9.2233720368547758e+18");
  expect_tokens("[0,-0,0.5,1e3,-1.25E-2]", "[i0i0f0.5f1000f-0.012500000000000001]");
  expect_tokens("\"\\u00e9\\u20AC\\ud83d\\ude00\\n\\/\"",
                "s'\xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80\n/'");
  expect_tokens("\"\xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80\"",
                "s'\xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80'");
  expect_tokens("\"\"", "s''");
}

static void refuses(void) {
  static const char *const cases[][2] = {
      {"", "ends too early"},
      {"  ", "ends too early"},
      {"{", "ends too early"},
      {"[1", "ends too early"},
      {"{\"a\"", "':'"},
      {"{\"a\":", "ends too early"},
      {"{\"a\":1", "ends too early"},
      {"[1,", "ends too early"},
      {"[1,]", "expected a value"},
      {"{\"a\":1,}", "a key"},
      {"{,}", "a key"},
      {"{1:2}", "a key"},
      {"[1 2]", "','"},
      {"{\"a\" 1}", "':'"},
      {"[1}", "','"},
      {"{\"a\":1]", "','"},
      {"]", "expected a value"},
      {"}", "expected a value"},
      {"{} {}", "after the end"},
      {"1 2", "after the end"},
      {"tru", "expected a value"},
      {"nul", "expected a value"},
      {"NaN", "expected a value"},
      {"Infinity", "expected a value"},
      {"+1", "expected a value"},
      {"-", "expected a value"},
      {"01", "after the end"},
      {"[01]", "','"},
      {".5", "expected a value"},
      {"1.", "a digit"},
      {"1e", "exponent"},
      {"1e+", "exponent"},
      {"1e999", "out of range"},
      {"-1e999", "out of range"},
      {"'a'", "expected a value"},
      {"\"a", "inside a string"},
      {"\"\\", "inside a string"},
      {"\"\\x\"", "escape"},
      {"\"\\u12\"", "hexadecimal"},
      {"\"\\u12g4\"", "hexadecimal"},
      {"\"\\u0000\"", "zero byte"},
      {"\"\\ud800\"", "surrogate"},
      {"\"\\udc00\"", "surrogate"},
      {"\"\\ud800\\u0041\"", "surrogate"},
      {"\"\\ud800\\n\"", "surrogate"},
      {"\"\n\"", "control"},
      {"\"\x80\"", "UTF-8"},
      {"\"\xC0\x80\"", "UTF-8"},
      {"\"\xC1\xBF\"", "UTF-8"},
      {"\"\xE0\x9F\xBF\"", "UTF-8"},
      {"\"\xED\xA0\x80\"", "UTF-8"},
      {"\"\xF0\x8F\xBF\xBF\"", "UTF-8"},
      {"\"\xF4\x90\x80\x80\"", "UTF-8"},
      {"\"\xF5\x80\x80\x80\"", "UTF-8"},
      {"\"\xE2\x82\"", "UTF-8"},
      {"\"\xC3", "UTF-8"},
      {"// x\n1", "expected a value"},
      {"\xEF\xBB\xBF{}", "expected a value"},
  };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) refuse(cases[i][0], cases[i][1]);
  Str got = tokens("[\0]", 3);
  CHECK(!strcmp(got.text, "[!"), "a zero byte between tokens gave %s", got.text);
  str_free(&got);
}

static void limits(void) {
  Str s = {0};
  for (int i = 0; i < JSON_DEPTH_MAX; i++) str_puts(&s, "[");
  for (int i = 0; i < JSON_DEPTH_MAX; i++) str_puts(&s, "]");
  Str got = tokens(s.text, s.n);
  CHECK(!strcmp(got.text, s.text), "%d levels must be possible", JSON_DEPTH_MAX);
  str_free(&got);
  str_free(&s);
  for (int i = 0; i < 1000000; i++) str_puts(&s, "[");
  refuse(s.text, "too deeply");
  str_free(&s);
  for (int i = 0; i < 1000; i++) str_puts(&s, "1");
  refuse(s.text, "too long");
  str_free(&s);
}

/* Every text is read back from its quoted form. */
static void quotes(void) {
  static const char text[] = "\x01 \"a\\b\" \n\x7F \xC3\xA9";
  Str s = {0};
  json_quote(&s, text, strlen(text));
  Json j;
  json_open(&j, s.text, s.n);
  CHECK(json_next(&j) == JSON_STRING && !strcmp(j.string.text, text), "quoted: %s", s.text);
  json_close(&j);
  str_free(&s);
}

/* Cuts and random changes: any answer is right, as long as no memory is read that is not the
 * text. */
static void survives(void) {
  static const char seed[] =
      "{\"a\":{\"dtype\":\"F32\",\"shape\":[2,3],\"o\":[0,24]},"
      "\"\\u00e9\\ud83d\\ude00\xE2\x82\xAC\":[true,null,-1.5e+3]}";
  size_t n = sizeof seed - 1;
  for (size_t i = 0; i < n; i++) {
    Str got = tokens(seed, i);
    CHECK(got.n == 0 || got.text[got.n - 1] == '!', "a cut text was accepted at %zu", i);
    str_free(&got);
  }
  uint32_t random = 1;
  for (int round = 0; round < 20000; round++) {
    char text[sizeof seed];
    memcpy(text, seed, sizeof seed);
    for (int k = 0; k < 1 + round % 3; k++) {
      random = random * 1664525 + 1013904223;
      text[(random >> 8) % n] = (char)(random >> 24);
    }
    Str got = tokens(text, n);
    str_free(&got);
  }
}

int main(void) {
  RUN(accepts);
  RUN(refuses);
  RUN(limits);
  RUN(quotes);
  RUN(survives);
  return check_end();
}
