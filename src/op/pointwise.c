/* The pointwise ops: one line each. See pointwise.h for what a line means; gradients are in
 * lua/grad.lua. Those whose gradient is worth one pass over memory have a NAME_backward op here. */
#include "pointwise.h"

enum { F = OP_FLOAT_OUT | OP_INPLACE };

#define POINTWISE3_ALL(name, sig, flags, linear_, expr, expr_int) \
  PW_ALL_OP(3, name, sig, flags, "..., ..., ...", linear_, #expr, T, expr, expr_int)

#define MF_TEXT_OF(...) #__VA_ARGS__
#define MF_TEXT(...) MF_TEXT_OF(__VA_ARGS__)

/* clang-format takes && and products in macros for references and pointers. */
/* clang-format off */

#define CLAMP_LOW (o->has_max && o->min > o->max ? K(o->max) : K(o->min))
#define CLAMP o->has_max && x > K(o->max) ? K(o->max) : o->has_min && x < K(o->min) ? CLAMP_LOW : x

/* -- Arithmetic -------------------------------------------------------------------------------- */

/* a + alpha * b, broadcast and promoted. */
POINTWISE2_SINGLE_ALL(add, "add(Tensor|number a, Tensor|number b, *, float alpha=1) -> Tensor",
                      OP_INPLACE, "a+b", a + K(o->alpha) * b,
                      (int64_t)((uint64_t)a + (uint64_t)o->alpha * (uint64_t)b),
                      o->alpha == 1, a + b)
/* a - alpha * b. */
POINTWISE2_SINGLE_ALL(sub, "sub(Tensor|number a, Tensor|number b, *, float alpha=1) -> Tensor",
                      OP_INPLACE, "a+b", a - K(o->alpha) * b,
                      (int64_t)((uint64_t)a - (uint64_t)(int64_t)o->alpha * (uint64_t)b),
                      o->alpha == 1, a - b)
/* a * b, element by element. */
POINTWISE2_SINGLE_ALL(mul, "mul(Tensor|number a, Tensor|number b) -> Tensor", OP_INPLACE, "a|b",
                      a * b, (int64_t)((uint64_t)a * (uint64_t)b), true, a * b)
/* a / b as a float; whole numbers give float32. */
POINTWISE2_SINGLE(div, "div(Tensor|number a, Tensor|number b) -> Tensor", F, "a", a / b, true, a / b)
/* The floor of the exact quotient, from the remainder: a / b itself may round up to the next whole
 * number. */
#define QUOTIENT (a - fmod(a, b)) / b - (fmod(a, b) != 0 && (fmod(a, b) < 0) != (b < 0))
#define FLOOR_DIVIDE                                                                       \
  b == K(0) ? a / b : (QUOTIENT) == K(0) ? a / b * K(0) : nearbyint(QUOTIENT)
PW_FLOATS(2, floor_divide, T, FLOOR_DIVIDE)
PW_INTS(2, floor_divide, T, b == 0 ? 0 : b == -1 ? (int64_t)(0 - (uint64_t)a)
        : a / b - (a % b != 0 && (a < 0) != (b < 0)))

/* The floor of a / b; whole numbers stay whole (division by zero gives 0). */
OP(floor_divide, .signature = "floor_divide(Tensor|number a, Tensor|number b) -> Tensor",
   .flags = OP_INPLACE | OP_NO_GRAD, .infer = pointwise_infer, .sbp = "..., ...",
   .cpu = pointwise_cpu, .expression = MF_TEXT(FLOOR_DIVIDE),
   .pointwise = {floor_divide_f32, floor_divide_f64, floor_divide_i64})
/* a - b * floor(a / b): the sign is that of b. */
POINTWISE2_ALL(remainder, "remainder(Tensor|number a, Tensor|number b) -> Tensor", OP_INPLACE, NULL,
               fmod(a, b) != 0 && (fmod(a, b) < 0) != (b < 0) ? fmod(a, b) + b : fmod(a, b),
               b == 0 || b == -1 ? 0 : a % b + (a % b != 0 && (a % b < 0) != (b < 0) ? b : 0))
/* The remainder of the division rounded toward zero: the sign is that of a. */
POINTWISE2_ALL(fmod, "fmod(Tensor|number a, Tensor|number b) -> Tensor", OP_INPLACE, NULL,
               fmod(a, b), b == 0 || b == -1 ? 0 : a % b)
static inline int64_t int_pow(int64_t base, int64_t e) {
  uint64_t r = 1, b = (uint64_t)base;
  if (e < 0) return base == 1 ? 1 : base == -1 ? (e & 1 ? -1 : 1) : 0;
  for (; e; e >>= 1, b *= b)
    if (e & 1) r *= b;
  return (int64_t)r;
}
PW_FLOATS(1, square, T, x * x)
PW_INTS(1, square, T, (int64_t)((uint64_t)x * (uint64_t)x))

/* Arithmetic with numbers, which these ops stand for, makes whole numbers of bool. */
static void whole_of_bool(Infer *I) {
  if (I->last->dtype == BOOL) I->last->dtype = I64;
}

static int square_infer(Infer *I) {
  int rc = pointwise_infer(I);
  if (!rc) whole_of_bool(I);
  return rc;
}

/* x squared. */
OP(square, .signature = "square(Tensor x) -> Tensor", .flags = OP_INPLACE, .infer = square_infer,
   .sbp = "...", .cpu = pointwise_cpu, .expression = "x * x",
   .pointwise = {square_f32, square_f64, square_i64})
PW_FLOATS(2, pow, T, pow(a, b))
PW_INTS(2, pow, T, int_pow(a, b))
PW_1(pow, f32_cube, float, T, x * x * x)
PW_1(pow, f64_cube, double, T, x * x * x)
PW_1(pow, f32_root, float, T, sqrt(x))
PW_1(pow, f64_root, double, T, sqrt(x))
PW_1(pow, f32_inverse, float, T, K(1) / x)
PW_1(pow, f64_inverse, double, T, K(1) / x)

/* The usual exponents, where they are one number, need no logarithm. */
static void pow_choose(const OpCall *c, PointwiseKernel *k) {
  static const struct { double exponent; PointwiseFn *fn[PW_CLASSES]; } usual[] = {
    {2, {square_f32, square_f64, square_i64}},
    {3, {pow_f32_cube, pow_f64_cube}},
    {0.5, {pow_f32_root, pow_f64_root}},
    {-1, {pow_f32_inverse, pow_f64_inverse}},
  };
  /* uint8 to the number -1 is not uint8 to the 255 */
  if (c->in[1].number && k->cls == PW_I64) k->whole = I64;
  if (c->in[1].ndim || dtype_kind((DType)c->in[1].dtype) == KIND_BOOL) return;
  double exponent = dtype_get_f64((DType)c->in[1].dtype, c->in[1].data);
  for (size_t i = 0; i < sizeof usual / sizeof usual[0]; i++)
    if (usual[i].exponent == exponent && usual[i].fn[k->cls]) {
      k->fn = usual[i].fn[k->cls];
      k->n_in = 1;
    }
}

/* a to the power of b. */
OP(pow, .signature = "pow(Tensor|number a, Tensor|number b) -> Tensor",
   .flags = OP_INPLACE | OP_BY_VALUE,
   .infer = pointwise_infer, .sbp = "..., ...",
   .cpu = pointwise_cpu, .expression = "pow(a, b)", .pointwise = {pow_f32, pow_f64, pow_i64},
   .choose = pow_choose)
/* The gradient of pow for a: x b a^(b - 1), 0 where b is 0. */
POINTWISE3_BACKWARD(pow_backward_a, "pow_backward_a(Tensor x, Tensor a, Tensor b) -> Tensor",
                    b == K(0) ? K(0) : x * b * (b == K(2) ? a : pow(a, b - K(1))))
/* The gradient of pow for b: x a^b log(a), 0 where a is 0 and b is not negative. */
POINTWISE3_BACKWARD(pow_backward_b, "pow_backward_b(Tensor x, Tensor a, Tensor b) -> Tensor",
                    a == K(0) && b >= K(0) ? K(0) : x * pow(a, b) * log(a))
/* The larger of a and b; NaN where either is. */
POINTWISE2_ALL(maximum, "maximum(Tensor a, Tensor|number b) -> Tensor", 0, NULL,
               a > b || a != a ? a : b, a > b ? a : b)
/* The smaller of a and b; NaN where either is. */
POINTWISE2_ALL(minimum, "minimum(Tensor a, Tensor|number b) -> Tensor", 0, NULL,
               a < b || a != a ? a : b, a < b ? a : b)
/* The gradient of maximum for a (of minimum: with a and b exchanged): x where a is larger, half of
 * it where they are equal. */
POINTWISE3_BACKWARD(maximum_backward, "maximum_backward(Tensor x, Tensor a, Tensor b) -> Tensor",
                    a > b ? x : a == b ? K(0.5) * x : K(0))
/* The angle of the point (b, a). */
POINTWISE2(atan2, "atan2(Tensor a, Tensor b) -> Tensor", F, atan2(a, b))
/* x + weight * (a - x), computed from the nearer end. */
POINTWISE2_LINEAR(lerp, "lerp(Tensor a, Tensor b, float weight) -> Tensor", F, "a+b",
                  o->weight < 0.5 ? a + K(o->weight) * (b - a)
                                  : b - (b - a) * (K(1) - K(o->weight)))
/* x + value * a * b. */
POINTWISE3_ALL(addcmul, "addcmul(Tensor x, Tensor a, Tensor b, *, float value=1) -> Tensor",
               OP_INPLACE, "x+a|x+b",
               x + K(o->value) * a * b, (int64_t)((uint64_t)x + (uint64_t)(int64_t)o->value
               * (uint64_t)a * (uint64_t)b))
/* x + value * a / b. */
POINTWISE3_LINEAR(addcdiv, "addcdiv(Tensor x, Tensor a, Tensor b, *, float value=1) -> Tensor",
                  OP_INPLACE, "x+a",
                  x + K(o->value) * a / b)

/* -- Comparison and logic ---------------------------------------------------------------------- */

/* a == b. */
POINTWISE2_BOOL(eq, "eq(Tensor a, Tensor|number b) -> Tensor", 0, a == b)
/* a != b. */
POINTWISE2_BOOL(ne, "ne(Tensor a, Tensor|number b) -> Tensor", 0, a != b)
/* a < b. */
POINTWISE2_BOOL(lt, "lt(Tensor a, Tensor|number b) -> Tensor", 0, a < b)
/* a <= b. */
POINTWISE2_BOOL(le, "le(Tensor a, Tensor|number b) -> Tensor", 0, a <= b)
/* a > b. */
POINTWISE2_BOOL(gt, "gt(Tensor a, Tensor|number b) -> Tensor", 0, a > b)
/* a >= b. */
POINTWISE2_BOOL(ge, "ge(Tensor a, Tensor|number b) -> Tensor", 0, a >= b)
/* Both are not zero. */
POINTWISE2_BOOL(logical_and, "logical_and(Tensor a, Tensor|number b) -> Tensor", 0,
                (a != 0) & (b != 0))
/* One is not zero. */
POINTWISE2_BOOL(logical_or, "logical_or(Tensor a, Tensor|number b) -> Tensor", 0,
                (a != 0) | (b != 0))
/* Exactly one is not zero. */
POINTWISE2_BOOL(logical_xor, "logical_xor(Tensor a, Tensor|number b) -> Tensor", 0,
                (a != 0) ^ (b != 0))
/* x is zero. */
POINTWISE1_BOOL(logical_not, "logical_not(Tensor x) -> Tensor", 0, x == 0)
/* x is NaN. */
POINTWISE1_BOOL(isnan, "isnan(Tensor x) -> Tensor", 0, x != x)
/* x is infinite. */
POINTWISE1_BOOL(isinf, "isinf(Tensor x) -> Tensor", 0, x == x && x - x != 0)
/* x is neither infinite nor NaN. */
POINTWISE1_BOOL(isfinite, "isfinite(Tensor x) -> Tensor", 0, x - x == 0)
/* The bits set in both. */
POINTWISE2_INT(bitwise_and, "bitwise_and(Tensor a, Tensor|number b) -> Tensor", OP_INPLACE, a & b)
/* The bits set in one. */
POINTWISE2_INT(bitwise_or, "bitwise_or(Tensor a, Tensor|number b) -> Tensor", OP_INPLACE, a | b)
/* The bits set in exactly one. */
POINTWISE2_INT(bitwise_xor, "bitwise_xor(Tensor a, Tensor|number b) -> Tensor", OP_INPLACE, a ^ b)

PW_1(bitwise_not, i64, int64_t, T, ~x)

static void bitwise_not_choose(const OpCall *c, PointwiseKernel *k) {
  if (c->out[0].dtype != BOOL) return;
  k->fn = logical_not_i64;
  k->bool_out = true;
}

/* Every bit the other way round; of bool: not x. */
OP(bitwise_not, .signature = "bitwise_not(Tensor x) -> Tensor",
   .flags = OP_INPLACE | OP_INT_ONLY | OP_NO_GRAD, .infer = pointwise_infer,
   .sbp = "...", .cpu = pointwise_cpu, .expression = "~x",
   .pointwise = {NULL, NULL, bitwise_not_i64}, .choose = bitwise_not_choose)

/* -- Unary ------------------------------------------------------------------------------------- */

/* The absolute value. */
POINTWISE1_ALL(abs, "abs(Tensor x) -> Tensor", OP_INPLACE, fabs(x),
               x < 0 ? (int64_t)(0 - (uint64_t)x) : x)
/* -x. */
POINTWISE1_LINEAR_ALL(neg, "neg(Tensor x) -> Tensor", OP_INPLACE, "x", -x,
                      (int64_t)(0 - (uint64_t)x))
/* -1, 0 or 1. */
POINTWISE1_ALL(sign, "sign(Tensor x) -> Tensor", OP_INPLACE, (x > 0) - (x < 0), (x > 0) - (x < 0))
/* The largest whole number not above x. */
POINTWISE1_ALL(floor, "floor(Tensor x) -> Tensor", OP_INPLACE, floor(x), x)
/* The smallest whole number not below x. */
POINTWISE1_ALL(ceil, "ceil(Tensor x) -> Tensor", OP_INPLACE, ceil(x), x)
/* The whole part of x. */
POINTWISE1_ALL(trunc, "trunc(Tensor x) -> Tensor", OP_INPLACE, trunc(x), x)
/* The nearest whole number, halves to the even one. */
POINTWISE1_ALL(round, "round(Tensor x) -> Tensor", OP_INPLACE, nearbyint(x), x)
/* e to the x. */
POINTWISE1(exp, "exp(Tensor x) -> Tensor", F, exp(x))
/* 2 to the x. */
POINTWISE1(exp2, "exp2(Tensor x) -> Tensor", F, exp2(x))
/* exp(x) - 1, exact for small x. */
POINTWISE1(expm1, "expm1(Tensor x) -> Tensor", F, expm1(x))
/* The natural logarithm. */
POINTWISE1(log, "log(Tensor x) -> Tensor", F, log(x))
/* The logarithm to base 2. */
POINTWISE1(log2, "log2(Tensor x) -> Tensor", F, log2(x))
/* The logarithm to base 10. */
POINTWISE1(log10, "log10(Tensor x) -> Tensor", F, log10(x))
/* log(1 + x), exact for small x. */
POINTWISE1(log1p, "log1p(Tensor x) -> Tensor", F, log1p(x))
/* The square root. */
POINTWISE1(sqrt, "sqrt(Tensor x) -> Tensor", F, sqrt(x))
/* 1 / sqrt(x). */
POINTWISE1(rsqrt, "rsqrt(Tensor x) -> Tensor", F, K(1) / sqrt(x))
/* 1 / x. */
POINTWISE1(reciprocal, "reciprocal(Tensor x) -> Tensor", F, K(1) / x)
/* The sine of x in radians. */
POINTWISE1(sin, "sin(Tensor x) -> Tensor", F, sin(x))
/* The cosine of x in radians. */
POINTWISE1(cos, "cos(Tensor x) -> Tensor", F, cos(x))
/* The tangent of x in radians. */
POINTWISE1(tan, "tan(Tensor x) -> Tensor", F, tan(x))
/* The inverse of sin, in radians. */
POINTWISE1(asin, "asin(Tensor x) -> Tensor", F, asin(x))
/* The inverse of cos, in radians. */
POINTWISE1(acos, "acos(Tensor x) -> Tensor", F, acos(x))
/* The inverse of tan, in radians. */
POINTWISE1(atan, "atan(Tensor x) -> Tensor", F, atan(x))
/* The hyperbolic sine. */
POINTWISE1(sinh, "sinh(Tensor x) -> Tensor", F, sinh(x))
/* The hyperbolic cosine. */
POINTWISE1(cosh, "cosh(Tensor x) -> Tensor", F, cosh(x))
/* The hyperbolic tangent. */
POINTWISE1(tanh, "tanh(Tensor x) -> Tensor", F, tanh(x))
/* The inverse of sinh. */
POINTWISE1(asinh, "asinh(Tensor x) -> Tensor", F, asinh(x))
/* The inverse of cosh. */
POINTWISE1(acosh, "acosh(Tensor x) -> Tensor", F, acosh(x))
/* The inverse of tanh. */
POINTWISE1(atanh, "atanh(Tensor x) -> Tensor", F, atanh(x))
/* The error function. */
POINTWISE1(erf, "erf(Tensor x) -> Tensor", F, erf(x))
/* 1 - erf(x), exact for large x. */
POINTWISE1(erfc, "erfc(Tensor x) -> Tensor", F, erfc(x))

/* -- Activations ------------------------------------------------------------------------------- */

/* max(x, 0); NaN stays NaN. */
POINTWISE1_ALL(relu, "relu(Tensor x) -> Tensor", OP_INPLACE, x < K(0) ? K(0) : x, x < 0 ? 0 : x)
/* The gradient of relu: g where y > 0. */
POINTWISE2_BACKWARD(relu_backward, "relu_backward(Tensor a, Tensor b) -> Tensor",
                    b > K(0) ? a : K(0))
/* 1 / (1 + exp(-x)). */
POINTWISE1(sigmoid, "sigmoid(Tensor x) -> Tensor", F, K(1) / (K(1) + exp(-x)))
/* The gradient of sigmoid: g y (1 - y). */
POINTWISE2_BACKWARD(sigmoid_backward, "sigmoid_backward(Tensor a, Tensor b) -> Tensor",
                    a * b * (K(1) - b))
/* The gradient of tanh: g (1 - y y). */
POINTWISE2_BACKWARD(tanh_backward, "tanh_backward(Tensor a, Tensor b) -> Tensor",
                    a * (K(1) - b * b))
/* x * sigmoid(x). */
POINTWISE1(silu, "silu(Tensor x) -> Tensor", F, x / (K(1) + exp(-x)))
/* The gradient of silu: g s (1 + x (1 - s)) with s = sigmoid(x). */
POINTWISE2_BACKWARD(silu_backward, "silu_backward(Tensor a, Tensor b) -> Tensor",
                    a * (K(1) / (K(1) + exp(-b))) * (K(1) + b * (K(1) - K(1) / (K(1) + exp(-b)))))
/* x * Phi(x), Phi the normal distribution function; 'tanh' approximates it by 0.5 x (1 +
 * tanh(sqrt(2 / pi) (x + 0.044715 x^3))). */
POINTWISE1_CHOICE(gelu, "gelu(Tensor x, *, str(none|tanh) approximate=none) -> Tensor", F,
                  approximate,
                  K(0.5) * x * (K(1) + tanh(K(0.79788456080286535588) *
                                            (x + K(0.044715) * x * x * x))),
                  x * normcdf(x))
/* The gradient of gelu: g (Phi(x) + x phi(x)), or that of the approximation. */
POINTWISE2_CHOICE_BACKWARD(gelu_backward,
                           "gelu_backward(Tensor a, Tensor b, *, str(none|tanh) "
                           "approximate=none) -> Tensor",
                           approximate,
                           a * K(0.5) *
                               (K(1) + tanh(K(0.79788456080286535588) *
                                            (b + K(0.044715) * b * b * b))) *
                               (K(1) + b * (K(1) - tanh(K(0.79788456080286535588) *
                                                        (b + K(0.044715) * b * b * b))) *
                                           K(0.79788456080286535588) *
                                           (K(1) + K(0.134145) * b * b)),
                           a * (normcdf(b) + b * K(0.39894228040143267794) * exp(K(-0.5) * b * b)))
/* log(1 + exp(beta x)) / beta, and x itself where beta x exceeds the threshold. */
POINTWISE1(softplus, "softplus(Tensor x, *, float beta=1, float threshold=20) -> Tensor", F,
           x * K(o->beta) > K(o->threshold) ? x : log1p(exp(x * K(o->beta))) / K(o->beta))
/* The gradient of softplus: g sigmoid(beta x). */
POINTWISE2_BACKWARD(softplus_backward,
                    "softplus_backward(Tensor a, Tensor b, *, float beta=1, float threshold=20) "
                    "-> Tensor",
                    b * K(o->beta) > K(o->threshold) ? a : a / (K(1) + exp(-b * K(o->beta))))
/* x where positive, else negative_slope * x. */
POINTWISE1(leaky_relu, "leaky_relu(Tensor x, float negative_slope=0.01) -> Tensor", F,
           x > K(0) ? x : x * K(o->negative_slope))
/* The gradient of leaky_relu. */
POINTWISE2_BACKWARD(leaky_relu_backward,
                    "leaky_relu_backward(Tensor a, Tensor b, float negative_slope) -> Tensor",
                    b > K(0) ? a : a * K(o->negative_slope))
/* x where positive, else w * x; see prelu. */
POINTWISE2(prelu_kernel, "prelu_kernel(Tensor a, Tensor b) -> Tensor", OP_HIDDEN,
           a > K(0) ? a : b * a)
/* The gradient of prelu for its input: x where a is positive, else b x. */
POINTWISE3_BACKWARD(prelu_backward, "prelu_backward(Tensor x, Tensor a, Tensor b) -> Tensor",
                    a > K(0) ? x : b * x)
/* The gradient of prelu for its weight, before summing: g min(b, 0). */
POINTWISE2_BACKWARD(prelu_weight_backward, "prelu_weight_backward(Tensor a, Tensor b) -> Tensor",
                    b > K(0) ? K(0) : a * b)
/* x where positive, else alpha * (exp(x) - 1). */
POINTWISE1(elu, "elu(Tensor x, float alpha=1) -> Tensor", F, x > K(0) ? x : K(o->alpha) * expm1(x))
/* x where positive, else alpha * (exp(x / alpha) - 1). */
POINTWISE1(celu, "celu(Tensor x, float alpha=1) -> Tensor", F,
           x > K(0) ? x : K(o->alpha) * expm1(x / K(o->alpha)))
/* elu with the constants that keep mean 0 and variance 1 (Klambauer and others, 2017). */
POINTWISE1(selu, "selu(Tensor x) -> Tensor", F,
           K(1.0507009873554804934193349852946)
           * (x > K(0) ? x : K(1.6732632423543772848170429916717) * expm1(x)))
/* The gradient of elu and its kin: scale g where b is positive, else scale alpha beta g exp(beta
 * b). */
POINTWISE2_BACKWARD(elu_backward,
                    "elu_backward(Tensor a, Tensor b, *, float alpha=1, float beta=1, "
                    "float scale=1) -> Tensor",
                    b > K(0) ? a * K(o->scale)
                             : a * K(o->scale * o->alpha * o->beta) * exp(b * K(o->beta)))
/* x * tanh(softplus(x)). */
POINTWISE1(mish, "mish(Tensor x) -> Tensor", F, x * tanh(x > K(20) ? x : log1p(exp(x))))
/* The gradient of mish: g (t + x (1 - t t) s) with t = tanh(softplus(x)) and s = sigmoid(x). */
POINTWISE2_BACKWARD(mish_backward, "mish_backward(Tensor a, Tensor b) -> Tensor",
                    a * (tanh(b > K(20) ? b : log1p(exp(b))) +
                         b * (K(1) - tanh(b > K(20) ? b : log1p(exp(b))) *
                                         tanh(b > K(20) ? b : log1p(exp(b)))) /
                             (K(1) + exp(-b))))
PW_FLOATS(1, clamp, T, CLAMP)
PW_INTS(1, clamp, T, CLAMP)

/* Whether a dtype of whole numbers can have this bound. */
static bool is_whole(double v) {
  return v == floor(v) && v >= -0x1p63 && v < 0x1p63;
}

/* Whether results, which are bounds, can be numbers of dtype t. */
static int clamp_reach(Infer *I, const struct clamp_args *a, DType t) {
  double span = ldexp(1, 8 * (int)dtype_size(t)), low = t == U8 ? 0 : -span / 2;
  if (a->has_min && a->min > low + span - 1)
    return infer_error(I, "min is %g, which %s cannot hold", a->min, dtype_name(t));
  if (a->has_max && a->max < low)
    return infer_error(I, "max is %g, which %s cannot hold", a->max, dtype_name(t));
  return 0;
}

static int clamp_infer(Infer *I) {
  const struct clamp_args *a = I->args;
  if (!a->has_min && !a->has_max)
    return infer_error(I, "neither min nor max is given; one of them must be");
  int rc = pointwise_infer(I);
  bool whole = (!a->has_min || is_whole(a->min)) && (!a->has_max || is_whole(a->max));
  if (rc || dtype_is_float((DType)I->last->dtype)) return rc;
  if (!whole) I->last->dtype = F32;
  else whole_of_bool(I);
  return whole ? clamp_reach(I, a, (DType)I->last->dtype) : 0;
}

/* x between min and max, either of which may be absent. */
OP(clamp, .signature = "clamp(Tensor x, float? min=None, float? max=None) -> Tensor",
   .flags = OP_INPLACE, .infer = clamp_infer, .sbp = "...", .cpu = pointwise_cpu,
   .expression = MF_TEXT(CLAMP),
   .pointwise = {clamp_f32, clamp_f64, clamp_i64})
/* The gradient of clamp: g where b lies between the bounds, which count as outside, as PyTorch has
 * it. */
POINTWISE2_BACKWARD(clamp_backward,
                    "clamp_backward(Tensor a, Tensor b, *, float? min=None, float? max=None) -> "
                    "Tensor",
                    (!o->has_min || b > K(o->min)) && (!o->has_max || b < K(o->max)) ? a : K(0))
/* x where x > threshold, else value. */
POINTWISE1_ALL(threshold, "threshold(Tensor x, float threshold, float value) -> Tensor", OP_INPLACE,
               x <= K(o->threshold) ? K(o->value) : x, x <= K(o->threshold) ? K(o->value) : x)
/* x between min_val and max_val. */
POINTWISE1_ALL(hardtanh, "hardtanh(Tensor x, float min_val=-1, float max_val=1) -> Tensor",
               OP_INPLACE,
               x < K(o->min_val) ? K(o->min_val) : x > K(o->max_val) ? K(o->max_val) : x,
               x < K(o->min_val) ? K(o->min_val) : x > K(o->max_val) ? K(o->max_val) : x)
/* x between 0 and 6. */
POINTWISE1_ALL(relu6, "relu6(Tensor x) -> Tensor", OP_INPLACE,
               x < K(0) ? K(0) : x > K(6) ? K(6) : x, x < 0 ? 0 : x > 6 ? 6 : x)
/* a where min < b < max, else 0: the gradient of functions that are flat outside. */
POINTWISE2_BACKWARD(inside_backward,
                    "inside_backward(Tensor a, Tensor b, *, float min=-inf, float max=inf) -> "
                    "Tensor",
                    b > K(o->min) && b < K(o->max) ? a : K(0))
/* x moved toward 0 by lambd, 0 within. */
POINTWISE1(softshrink, "softshrink(Tensor x, float lambd=0.5) -> Tensor", F,
           x > K(o->lambd) ? x - K(o->lambd) : x < -K(o->lambd) ? x + K(o->lambd) : x * K(0))
/* x where |x| > lambd, else 0. */
POINTWISE1(hardshrink, "hardshrink(Tensor x, float lambd=0.5) -> Tensor", F,
           x >= -K(o->lambd) && x <= K(o->lambd) ? K(0) : x)
/* The gradient of softshrink and hardshrink: g where |b| > lambd. */
POINTWISE2_BACKWARD(shrink_backward, "shrink_backward(Tensor a, Tensor b, float lambd) -> Tensor",
                    b >= -K(o->lambd) && b <= K(o->lambd) ? K(0) : a)
/* log(sigmoid(x)). */
POINTWISE1(logsigmoid, "logsigmoid(Tensor x) -> Tensor", F,
           (x < K(0) ? x : K(0)) - log1p(exp(-fabs(x))))
/* The gradient of logsigmoid: g sigmoid(-b). */
POINTWISE2_BACKWARD(logsigmoid_backward, "logsigmoid_backward(Tensor a, Tensor b) -> Tensor",
                    a / (K(1) + exp(b)))
/* clamp(x + 3, 0, 6) / 6. */
POINTWISE1(hardsigmoid, "hardsigmoid(Tensor x) -> Tensor", F,
           (x < K(-3) ? K(0) : x > K(3) ? K(6) : x + K(3)) / K(6))
/* x * hardsigmoid(x). */
POINTWISE1(hardswish, "hardswish(Tensor x) -> Tensor", F,
           x * (x < K(-3) ? K(0) : x > K(3) ? K(6) : x + K(3)) / K(6))
/* The gradient of hardswish: g (b / 3 + 1/2) between -3 and 3, and at these what holds outside. */
POINTWISE2_BACKWARD(hardswish_backward, "hardswish_backward(Tensor a, Tensor b) -> Tensor",
                    b <= K(-3) ? K(0) : b >= K(3) ? a : a * (b / K(3) + K(0.5)))
/* x / (1 + |x|). */
POINTWISE1(softsign, "softsign(Tensor x) -> Tensor", F, x / (K(1) + fabs(x)))
/* The gradient of softsign: g / (1 + |x|)^2. */
POINTWISE2_BACKWARD(softsign_backward, "softsign_backward(Tensor a, Tensor b) -> Tensor",
                    a / ((K(1) + fabs(b)) * (K(1) + fabs(b))))
/* x - tanh(x). */
POINTWISE1(tanhshrink, "tanhshrink(Tensor x) -> Tensor", F, x - tanh(x))

/* -- Choices ----------------------------------------------------------------------------------- */

PW_FLOATS(3, where, T, x != 0 ? a : b)
PW_INTS(3, where, T, x != 0 ? a : b)

/* The condition is bool, the lowest kind, and so has no part in the promotion of the others. */
static int where_infer(Infer *I) {
  int rc = infer_want_dtype(I, 0, BOOL);
  return rc ? rc : pointwise_infer(I);
}

/* a where c is true, else b. */
OP(where, .signature = "where(Tensor c, Tensor|number a, Tensor|number b) -> Tensor",
   .flags = OP_FUNCTION_ONLY | OP_PLACES, .infer = where_infer,
   .sbp = "..., ..., ...", .linear = "a+b", .cpu = pointwise_cpu, .expression = "x != 0 ? a : b",
   .pointwise = {where_f32, where_f64, where_i64})

PW_FLOATS(3, masked_fill, T, a != 0 ? b : x)
PW_INTS(3, masked_fill, T, a != 0 ? b : x)

static int masked_fill_infer(Infer *I) {
  DType x = (DType)I->in[0]->dtype, value = (DType)I->in[2]->dtype;
  int rc = infer_want_dtype(I, 1, BOOL);
  if (!rc) rc = infer_want_ndim(I, 2, 0);
  if (rc) return rc;
  if (dtype_kind(value) > dtype_kind(x) && !(x == BOOL && value == I64))
    return infer_error(I, "value is %s and cannot be written into a tensor of %s",
        dtype_name(value), dtype_name(x));
  if ((rc = pointwise_infer(I))) return rc;
  I->last->dtype = (uint8_t)x;
  return 0;
}

/* x with value where mask is true; mask is broadcast. */
OP(masked_fill, .signature = "masked_fill(Tensor x, Tensor mask, Tensor|number value) -> Tensor",
   .flags = OP_INPLACE | OP_PLACES,
   .infer = masked_fill_infer, .sbp = "..., ..., ...", .cpu = pointwise_cpu,
   .expression = "a != 0 ? b : x",
   .pointwise = {masked_fill_f32, masked_fill_f64, masked_fill_i64})
