/* Errors as a code and a text.
 *
 * A function that can fail on what the user gave returns 0 or one of these codes, and has written
 * one line of text for the calling thread. The text lives until the next err_set of the same
 * thread. Programmer errors are asserts, never codes. */
#ifndef MF_ERR_H
#define MF_ERR_H

#define MF_ERRORS(X)                                                         \
  X(MF_OK, 0, "ok")                                                          \
  X(MF_EINVAL, 1, "invalid argument") /* wrong type, shape, dtype, value */  \
  X(MF_ENOMEM, 2, "out of memory")                                           \
  X(MF_EIO, 3, "input or output") /* files: missing, truncated, malformed */ \
  X(MF_EFREED, 4, "freed")        /* a tensor whose storage was freed */     \
  X(MF_EVERSION, 5, "modified")   /* a saved tensor that changed since */    \
  X(MF_EINTR, 6, "interrupted")                                              \
  X(MF_ELUA, 7, "lua") /* raised by a callback; the text is Lua's */         \
  X(MF_EUNSUPPORTED, 8, "unsupported")                                       \
  X(MF_ECOMM, 9, "communication") /* a rank died, left, fell silent, differs */

#define X(name, value, text) name = value,
typedef enum ErrCode { MF_ERRORS(X) } ErrCode;
#undef X

/* Formats the text (cut at 2,047 bytes) and returns `code`. */
int err_set(int code, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Puts "prefix: " before the current text; returns `code`. */
int err_prefix(int code, const char *prefix);

/* The text of the last error of this thread, "" before the first. */
const char *err_text(void);

/* The name of a code as users see it. */
const char *err_name(int code);

/* A condition that only a bug in this library can break: prints the text to stderr and aborts. */
void err_panic(const char *file, int line, const char *format, ...)
    __attribute__((noreturn, format(printf, 3, 4)));
#define MF_ASSERT(cond, ...) ((cond) ? (void)0 : err_panic(__FILE__, __LINE__, __VA_ARGS__))

#endif
