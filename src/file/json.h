/* A strict JSON reader (RFC 8259) that yields one token a call and builds nothing, so that a
 * hostile text can cost no more memory than its longest string. What the tokens mean, and whether
 * keys repeat, is for the caller to say.
 *
 *   Json j;
 *   json_open(&j, text, n);
 *   while ((kind = json_next(&j)) > JSON_END) ...;
 *   json_close(&j);
 */
#ifndef MF_JSON_H
#define MF_JSON_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "str.h"

typedef enum JsonKind {
  JSON_ERROR, /* not JSON: err_text() says where and why; every later call returns it too */
  JSON_END,   /* after the one value of the text and nothing but white space */
  JSON_OBJECT,
  JSON_OBJECT_END,
  JSON_ARRAY,
  JSON_ARRAY_END,
  JSON_KEY,
  JSON_STRING, /* .string */
  JSON_INT,    /* no fraction, no exponent, fits int64: .integer, and .number rounded */
  JSON_FLOAT,  /* any other finite number: .number */
  JSON_TRUE,
  JSON_FALSE,
  JSON_NULL,
} JsonKind;

enum { JSON_DEPTH_MAX = 64 };

typedef struct Json {
  const char *text, *at, *end; /* the caller's, borrowed */
  Str string; /* decoded UTF-8 without zero bytes; .text is valid until the next call, not NULL */
  int64_t integer;
  double number;
  int depth, expect;
  bool in_object[JSON_DEPTH_MAX];
} Json;

void json_open(Json *j, const char *text, size_t n);
JsonKind json_next(Json *j);
void json_close(Json *j);

/* Appends text as a JSON string with its quotes; the text must be UTF-8. */
void json_quote(Str *out, const char *text, size_t n);

/* The first byte of text that is not part of valid UTF-8, or NULL. */
const char *json_utf8_error(const char *text, size_t n);

#endif
