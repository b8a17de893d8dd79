/* Runs of simple steps of a fused program, each of which takes what the one before has made: that
 * value stays in registers, some vectors of it at a time, instead of going through L1 at each step.
 *
 * The arithmetic of a few ops on float32 is written here a second time; elements are what the ops'
 * own kernels make them, bit for bit. No step multiplies and adds, so the compiler contracts
 * nothing.
 *
 * Static, since it belongs to one instruction set. */
#ifndef MF_FUSED_RUN_H
#define MF_FUSED_RUN_H
#include "lanes.h"
#include "op_ids.h"

/* What a step does to the value a, with b: an array at the code, one element repeated at the code
 * + 1. */
typedef enum RunCode {
  RUN_NONE,
  RUN_STORE, /* a is wanted later: goes where b is */
  RUN_RELU,
  RUN_ABS,
  RUN_NEG,
  RUN_SQUARE,
  RUN_ADD,
  RUN_SUB = RUN_ADD + 2,
  RUN_SUB_FROM = RUN_SUB + 2,
  RUN_MUL = RUN_SUB_FROM + 2,
  RUN_DIV = RUN_MUL + 2,
  RUN_DIV_INTO = RUN_DIV + 2,
  RUN_MAX = RUN_DIV_INTO + 2,
  RUN_MIN = RUN_MAX + 2,
  RUN_RELU_BACKWARD = RUN_MIN + 2
} RunCode;

/* By op: the code where the value is its first input, and where it is the second. */
static const struct {
  uint8_t first, second;
} run_codes[OP_COUNT] = {[OP_relu] = {RUN_RELU, 0},
                         [OP_abs] = {RUN_ABS, 0},
                         [OP_neg] = {RUN_NEG, 0},
                         [OP_square] = {RUN_SQUARE, 0},
                         [OP_add] = {RUN_ADD, RUN_ADD},
                         [OP_sub] = {RUN_SUB, RUN_SUB_FROM},
                         [OP_mul] = {RUN_MUL, RUN_MUL},
                         [OP_div] = {RUN_DIV, RUN_DIV_INTO},
                         [OP_maximum] = {RUN_MAX, 0},
                         [OP_minimum] = {RUN_MIN, 0},
                         [OP_relu_backward] = {RUN_RELU_BACKWARD, 0}};

typedef struct RunStep {
  int code;
  char *b;
} RunStep;

/* x where the mask is set, else y. */
#define RUN_WHERE(mask, x, y)                                                          \
  __extension__({                                                                      \
    __auto_type mask_ = (mask);                                                        \
    (lanes_f32)((mask_ & (__typeof__(mask_))(x)) | (~mask_ & (__typeof__(mask_))(y))); \
  })
#define RUN_AT(k) LANES_AT(lanes_f32, (const float *)(const void *)b_, i + (k)*RUN_WIDTH)

/* clang-format takes the cases in macros for statements. */
/* clang-format off */

/* DO(WHAT, expr) is WHAT for each vector of the value: 8 of them, or 1. */
#define RUN_8(WHAT, expr)                                                 \
  WHAT(0, expr) WHAT(1, expr) WHAT(2, expr) WHAT(3, expr) WHAT(4, expr)   \
  WHAT(5, expr) WHAT(6, expr) WHAT(7, expr)
#define RUN_1(WHAT, expr) WHAT(0, expr)

#define RUN_LOAD(k, from) \
  lanes_f32 v##k = LANES_AT(lanes_f32, (const float *)(from), i + (k) * RUN_WIDTH);
#define RUN_PUT(k, to) LANES_PUT(lanes_f32, (float *)(void *)(to), i + (k) * RUN_WIDTH, v##k);
#define RUN_ALONE(k, expr)  \
  {                         \
    lanes_f32 a = v##k;     \
    v##k = (expr);          \
  }
#define RUN_ARRAY(k, expr)               \
  {                                      \
    lanes_f32 a = v##k, b = RUN_AT(k);   \
    v##k = (expr);                       \
  }
#define RUN_CASE1(DO, code, expr) \
  case code: DO(RUN_ALONE, expr) break;
#define RUN_CASE2(DO, code, expr)                                             \
  case code: DO(RUN_ARRAY, expr) break;                                       \
  case code + 1: {                                                            \
    const lanes_f32 b = LANES_AT(lanes_f32, (const float *)(const void *)b_, 0); \
    DO(RUN_ALONE, expr)                                                       \
  } break;

/* All steps on the vectors at i. */
#define RUN_STEPS(DO)                                                                   \
  {                                                                                     \
    DO(RUN_LOAD, from)                                                                  \
    for (const RunStep *s = steps; s < end; s++) {                                      \
      char *b_ = s->b;                                                                  \
      switch (s->code) {                                                                \
        case RUN_STORE: DO(RUN_PUT, b_) break;                                          \
        RUN_CASE1(DO, RUN_RELU, RUN_WHERE(a < 0, zero, a))                              \
        RUN_CASE1(DO, RUN_ABS, (lanes_f32)((__typeof__(a < a))a & 0x7fffffff))          \
        RUN_CASE1(DO, RUN_NEG, -a)                                                      \
        RUN_CASE1(DO, RUN_SQUARE, a * a)                                                \
        RUN_CASE2(DO, RUN_ADD, a + b)                                                   \
        RUN_CASE2(DO, RUN_SUB, a - b)                                                   \
        RUN_CASE2(DO, RUN_SUB_FROM, b - a)                                              \
        RUN_CASE2(DO, RUN_MUL, a * b)                                                   \
        RUN_CASE2(DO, RUN_DIV, a / b)                                                   \
        RUN_CASE2(DO, RUN_DIV_INTO, b / a)                                              \
        RUN_CASE2(DO, RUN_MAX, RUN_WHERE((a > b) | (a != a), a, b))                     \
        RUN_CASE2(DO, RUN_MIN, RUN_WHERE((a < b) | (a != a), a, b))                     \
        RUN_CASE2(DO, RUN_RELU_BACKWARD, RUN_WHERE(b > 0, a, zero))                     \
        default: __builtin_unreachable();                                               \
      }                                                                                 \
    }                                                                                   \
  }

/* clang-format on */

/* The steps [steps, end) on n elements, a multiple of 16, from `from` on. The last one stores. */
static void fused_run(int64_t n, const void *from, const RunStep *steps, const RunStep *end) {
  enum { RUN_WIDTH = sizeof(lanes_f32) / sizeof(float) };
  const lanes_f32 zero = {0};
  int64_t i = 0;
  for (; i + 8 * RUN_WIDTH <= n; i += 8 * RUN_WIDTH) RUN_STEPS(RUN_8)
  for (; i < n; i += RUN_WIDTH) RUN_STEPS(RUN_1)
}

#endif
