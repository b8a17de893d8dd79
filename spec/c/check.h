/* For specs in C: RUN(f) runs a function as one case, which fails when a CHECK in it does;
 * check_end prints the closing line that spec/run counts and returns the exit code. */
#ifndef MF_CHECK_H
#define MF_CHECK_H
#include <stdbool.h>
#include <stdio.h>

static int check_passed, check_failed;
static bool check_bad;

#define CHECK(cond, ...)                                                  \
  do {                                                                    \
    if (cond) break;                                                      \
    check_bad = true;                                                     \
    printf("%s:%d: ", __FILE__, __LINE__), printf(__VA_ARGS__), puts(""); \
  } while (0)

#define RUN(f)                                         \
  do {                                                 \
    check_bad = false;                                 \
    f();                                               \
    *(check_bad ? &check_failed : &check_passed) += 1; \
    if (check_bad) puts("failed: " #f);                \
  } while (0)

static inline int check_end(void) {
  printf("%d passed, %d failed\n", check_passed, check_failed);
  return check_failed != 0;
}

#endif
