/* The forms of a pointwise line, over three primitives that whoever includes this has defined:
 *
 *   PW_KERNEL(name, C, CT, OT, blocks, element, expr)   NAME_C computes in CT and writes OT
 *   PW_RECORD_CHOOSE(name, sig, flag, rule, lin, text, choice, kernels...)   the op itself
 *   PW_SINGLE(name, when, expr)   NAME_choose, and what it chooses
 *
 * The CPU's are in pointwise.h; the CUDA kernels have others for the same lines. */
#ifndef MF_POINTWISE_FORMS_H
#define MF_POINTWISE_FORMS_H

#define K(v) ((T)(v))

#define PW_IN1 const T *p0 = in_[0];
#define PW_IN2 PW_IN1 const T *p1 = in_[1];
#define PW_IN3 PW_IN2 const T *p2 = in_[2];
#define PW_IN4 PW_IN3 const T *p3 = in_[3];
#define PW_X   \
  T x = p0[i]; \
  (void)x;
#define PW_AB             \
  T a = p0[i], b = p1[i]; \
  (void)a, (void)b;
#define PW_XAB                       \
  T x = p0[i], a = p1[i], b = p2[i]; \
  (void)x, (void)a, (void)b;
#define PW_XABC                                 \
  T x = p0[i], a = p1[i], b = p2[i], c = p3[i]; \
  (void)x, (void)a, (void)b, (void)c;
#define PW_1(name, C, CT, OT, expr) PW_KERNEL(name, C, CT, OT, PW_IN1, PW_X, expr)
#define PW_2(name, C, CT, OT, expr) PW_KERNEL(name, C, CT, OT, PW_IN2, PW_AB, expr)
#define PW_3(name, C, CT, OT, expr) PW_KERNEL(name, C, CT, OT, PW_IN3, PW_XAB, expr)
#define PW_4(name, C, CT, OT, expr) PW_KERNEL(name, C, CT, OT, PW_IN4, PW_XABC, expr)
/* The kernels NAME_f32 and NAME_f64, or NAME_i64, of `inputs` (1 to 4) inputs, with elements of OT
 * as output. */
#define PW_FLOATS(inputs, name, OT, expr) \
  PW_##inputs(name, f32, float, OT, expr) PW_##inputs(name, f64, double, OT, expr)
#define PW_INTS(inputs, name, OT, expr) PW_##inputs(name, i64, int64_t, OT, expr)

#define PW_RECORD(name, sig, flag, rule, lin, text, ...) \
  PW_RECORD_CHOOSE(name, sig, flag, rule, lin, text, NULL, __VA_ARGS__)
#define PW_FLOAT_OP(inputs, name, sig, flags, rule, linear_, text, expr) \
  PW_FLOATS(inputs, name, T, expr)                                       \
  PW_RECORD(name, sig, flags, rule, linear_, text, name##_f32, name##_f64, NULL)
#define PW_ALL_OP(inputs, name, sig, flags, rule, linear_, text, OT, expr, expr_int) \
  PW_FLOATS(inputs, name, OT, expr)                                                  \
  PW_INTS(inputs, name, OT, expr_int)                                                \
  PW_RECORD(name, sig, flags, rule, linear_, text, name##_f32, name##_f64, name##_i64)
#define PW_INT_OP(inputs, name, sig, flags, rule, text, expr) \
  PW_INTS(inputs, name, T, expr)                              \
  PW_RECORD(name, sig, (flags) | OP_INT_ONLY | OP_NO_GRAD, rule, NULL, text, NULL, NULL, name##_i64)

/* Floats only (whole numbers are computed as float32 under OP_FLOAT_OUT, refused otherwise). The
 * LINEAR forms say how partial sums pass; a gradient (BACKWARD) is linear in the incoming one. */
#define POINTWISE1(name, sig, flags, expr) \
  PW_FLOAT_OP(1, name, sig, flags, "...", NULL, #expr, expr)
#define POINTWISE2(name, sig, flags, expr) \
  PW_FLOAT_OP(2, name, sig, flags, "..., ...", NULL, #expr, expr)
#define POINTWISE2_LINEAR(name, sig, flags, linear_, expr) \
  PW_FLOAT_OP(2, name, sig, flags, "..., ...", linear_, #expr, expr)
#define POINTWISE2_BACKWARD(name, sig, expr) \
  PW_FLOAT_OP(2, name, sig, OP_HIDDEN, "..., ...", "a", #expr, expr)
#define POINTWISE3_LINEAR(name, sig, flags, linear_, expr) \
  PW_FLOAT_OP(3, name, sig, flags, "..., ..., ...", linear_, #expr, expr)
#define POINTWISE3_BACKWARD(name, sig, expr) \
  PW_FLOAT_OP(3, name, sig, OP_HIDDEN, "..., ..., ...", "x", #expr, expr)
#define POINTWISE4(name, sig, flags, expr) \
  PW_FLOAT_OP(4, name, sig, flags, "..., ..., ..., ...", NULL, #expr, expr)

/* With a kernel for fused programs where b is a single element, see PW_SINGLE. */
#define POINTWISE2_SINGLE(name, sig, flags, linear_, expr, when, single)                    \
  PW_SINGLE(name, when, single)                                                             \
  PW_FLOATS(2, name, T, expr)                                                               \
  PW_RECORD_CHOOSE(name, sig, flags, "..., ...", linear_, #expr, name##_choose, name##_f32, \
                   name##_f64, NULL)
#define POINTWISE2_SINGLE_ALL(name, sig, flags, linear_, expr, expr_int, when, single)      \
  PW_SINGLE(name, when, single)                                                             \
  PW_FLOATS(2, name, T, expr)                                                               \
  PW_INTS(2, name, T, expr_int)                                                             \
  PW_RECORD_CHOOSE(name, sig, flags, "..., ...", linear_, #expr, name##_choose, name##_f32, \
                   name##_f64, name##_i64)

/* Floats only; the argument `choice` says which of two expressions it is, each with a loop of its
 * own. */
#define PW_CHOICE_OP(inputs, name, sig, flag, rule, linear_, choice, expr_1, expr_0)          \
  PW_FLOATS(inputs, name, T, expr_0)                                                          \
  PW_##inputs(name, f32_chosen, float, T, expr_1)                                             \
      PW_##inputs(name, f64_chosen, double, T, expr_1) static void name##_choose(             \
          const OpCall *c, PointwiseKernel *k) {                                              \
    const struct name##_args *o = (const struct name##_args *)c->args;                        \
    if (o->choice) k->fn = k->cls == PW_F32 ? name##_f32_chosen : name##_f64_chosen;          \
  }                                                                                           \
  PW_RECORD_CHOOSE(name, sig, flag, rule, linear_, "o->" #choice " ? " #expr_1 " : " #expr_0, \
                   name##_choose, name##_f32, name##_f64, NULL)
#define POINTWISE1_CHOICE(name, sig, flags, choice, expr_1, expr_0) \
  PW_CHOICE_OP(1, name, sig, flags, "...", NULL, choice, expr_1, expr_0)
#define POINTWISE2_CHOICE_BACKWARD(name, sig, choice, expr_1, expr_0) \
  PW_CHOICE_OP(2, name, sig, OP_HIDDEN, "..., ...", "a", choice, expr_1, expr_0)

/* Floats and whole numbers. */
#define POINTWISE1_ALL(name, sig, flags, expr, expr_int) \
  PW_ALL_OP(1, name, sig, flags, "...", NULL, #expr, T, expr, expr_int)
#define POINTWISE1_LINEAR_ALL(name, sig, flags, linear_, expr, expr_int) \
  PW_ALL_OP(1, name, sig, flags, "...", linear_, #expr, T, expr, expr_int)
#define POINTWISE2_ALL(name, sig, flags, linear_, expr, expr_int) \
  PW_ALL_OP(2, name, sig, flags, "..., ...", linear_, #expr, T, expr, expr_int)

/* Comparisons and tests: bool results from all dtypes. */
#define PW_BOOL (OP_BOOL_OUT | OP_NO_GRAD)
#define POINTWISE1_BOOL(name, sig, flags, expr) \
  PW_ALL_OP(1, name, sig, (flags) | PW_BOOL, "...", NULL, #expr, uint8_t, expr, expr)
#define POINTWISE2_BOOL(name, sig, flags, expr) \
  PW_ALL_OP(2, name, sig, (flags) | PW_BOOL, "..., ...", NULL, #expr, uint8_t, expr, expr)

/* Whole numbers and bool only. */
#define POINTWISE1_INT(name, sig, flags, expr) PW_INT_OP(1, name, sig, flags, "...", #expr, expr)
#define POINTWISE2_INT(name, sig, flags, expr) \
  PW_INT_OP(2, name, sig, flags, "..., ...", #expr, expr)

#endif
