/* The pointwise ops: one line each. See pointwise.h for what a line means; gradients are in lua/grad.lua. Those whose gradient is worth one
 * pass over memory have a NAME_backward op here. */
#include "pointwise.h"

enum { F = OP_FLOAT_OUT | OP_INPLACE, B = OP_NO_GRAD, HIDE = OP_FUNCTION_ONLY };

/* -- Arithmetic -------------------------------------------------------------------------------------------------------------- */

/* a + alpha * b, broadcast and promoted. */
POINTWISE2_ALL(add, "add(Tensor|number a, Tensor|number b, *, float alpha=1) -> Tensor", OP_INPLACE, "a+b",
               a + K(o->alpha) * b, (int64_t)((uint64_t)a + (uint64_t)o->alpha * (uint64_t)b))
/* a - alpha * b. */
POINTWISE2_ALL(sub, "sub(Tensor|number a, Tensor|number b, *, float alpha=1) -> Tensor", OP_INPLACE, "a+b",
               a - K(o->alpha) * b, (int64_t)((uint64_t)a - (uint64_t)(int64_t)o->alpha * (uint64_t)b))
/* a * b, element by element. */
POINTWISE2_ALL(mul, "mul(Tensor|number a, Tensor|number b) -> Tensor", OP_INPLACE, "a|b", a * b, (int64_t)((uint64_t)a * (uint64_t)b))
/* a / b as a float; whole numbers give float32. */
POINTWISE2(div, "div(Tensor|number a, Tensor|number b) -> Tensor", F, a / b)
/* The floor of a / b; whole numbers stay whole (division by zero gives 0). */
POINTWISE2_ALL(floor_divide, "floor_divide(Tensor|number a, Tensor|number b) -> Tensor", OP_INPLACE | OP_NO_GRAD, NULL,
               floor(a / b), b == 0 ? 0 : b == -1 ? (int64_t)(0 - (uint64_t)a) : a / b - (a % b != 0 && (a < 0) != (b < 0)))
/* a - b * floor(a / b): the sign is that of b. */
POINTWISE2_ALL(remainder, "remainder(Tensor|number a, Tensor|number b) -> Tensor", OP_INPLACE, NULL,
               fmod(a, b) + (fmod(a, b) != 0 && (fmod(a, b) < 0) != (b < 0) ? b : K(0)),
               b == 0 || b == -1 ? 0 : a % b + (a % b != 0 && (a % b < 0) != (b < 0) ? b : 0))
/* The remainder of the division rounded toward zero: the sign is that of a. */
POINTWISE2_ALL(fmod, "fmod(Tensor|number a, Tensor|number b) -> Tensor", OP_INPLACE, NULL, fmod(a, b), b == 0 || b == -1 ? 0 : a % b)
static inline int64_t int_pow(int64_t base, int64_t e) {
  uint64_t r = 1, b = (uint64_t)base;
  if (e < 0) return base == 1 ? 1 : base == -1 ? (e & 1 ? -1 : 1) : 0;
  for (; e; e >>= 1, b *= b)
    if (e & 1) r *= b;
  return (int64_t)r;
}
/* a to the power of b. */
POINTWISE2_ALL(pow, "pow(Tensor|number a, Tensor|number b) -> Tensor", OP_INPLACE, NULL, pow(a, b), int_pow(a, b))
/* x squared. */
POINTWISE1_ALL(square, "square(Tensor x) -> Tensor", OP_INPLACE, x * x, (int64_t)((uint64_t)x * (uint64_t)x))
/* The larger of a and b; NaN where either is. */
POINTWISE2_ALL(maximum, "maximum(Tensor a, Tensor|number b) -> Tensor", 0, NULL, a > b || a != a ? a : b, a > b ? a : b)
/* The smaller of a and b; NaN where either is. */
POINTWISE2_ALL(minimum, "minimum(Tensor a, Tensor|number b) -> Tensor", 0, NULL, a < b || a != a ? a : b, a < b ? a : b)
/* The angle of the point (b, a). */
POINTWISE2(atan2, "atan2(Tensor a, Tensor b) -> Tensor", F, atan2(a, b))
/* x + weight * (a - x), computed from the nearer end. */
POINTWISE2(lerp, "lerp(Tensor a, Tensor b, float weight) -> Tensor", F,
           o->weight < 0.5 ? a + K(o->weight) * (b - a) : b - (b - a) * (K(1) - K(o->weight)))
/* x + value * a * b. */
POINTWISE3(addcmul, "addcmul(Tensor x, Tensor a, Tensor b, *, float value=1) -> Tensor", OP_INPLACE, x + K(o->value) * a * b)
/* x + value * a / b. */
POINTWISE3(addcdiv, "addcdiv(Tensor x, Tensor a, Tensor b, *, float value=1) -> Tensor", OP_INPLACE, x + K(o->value) * a / b)

/* -- Comparison and logic ------------------------------------------------------------------------------------------------------- */

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
POINTWISE2_BOOL(logical_and, "logical_and(Tensor a, Tensor|number b) -> Tensor", 0, (a != 0) & (b != 0))
/* One is not zero. */
POINTWISE2_BOOL(logical_or, "logical_or(Tensor a, Tensor|number b) -> Tensor", 0, (a != 0) | (b != 0))
/* Exactly one is not zero. */
POINTWISE2_BOOL(logical_xor, "logical_xor(Tensor a, Tensor|number b) -> Tensor", 0, (a != 0) ^ (b != 0))
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

/* -- Unary ---------------------------------------------------------------------------------------------------------------------- */

/* The absolute value. */
POINTWISE1_ALL(abs, "abs(Tensor x) -> Tensor", OP_INPLACE, fabs(x), x < 0 ? (int64_t)(0 - (uint64_t)x) : x)
/* -x. */
POINTWISE1_ALL(neg, "neg(Tensor x) -> Tensor", OP_INPLACE, -x, (int64_t)(0 - (uint64_t)x))
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

/* -- Activations ---------------------------------------------------------------------------------------------------------------- */

/* max(x, 0); NaN stays NaN. */
POINTWISE1_ALL(relu, "relu(Tensor x) -> Tensor", OP_INPLACE, x < K(0) ? K(0) : x, x < 0 ? 0 : x)
/* The gradient of relu: g where y > 0. */
POINTWISE2(relu_backward, "relu_backward(Tensor a, Tensor b) -> Tensor", HIDE, b > K(0) ? a : K(0))
/* 1 / (1 + exp(-x)). */
POINTWISE1(sigmoid, "sigmoid(Tensor x) -> Tensor", F, K(1) / (K(1) + exp(-x)))
/* The gradient of sigmoid: g y (1 - y). */
POINTWISE2(sigmoid_backward, "sigmoid_backward(Tensor a, Tensor b) -> Tensor", HIDE, a * b * (K(1) - b))
/* The gradient of tanh: g (1 - y y). */
POINTWISE2(tanh_backward, "tanh_backward(Tensor a, Tensor b) -> Tensor", HIDE, a * (K(1) - b * b))
/* x * sigmoid(x). */
POINTWISE1(silu, "silu(Tensor x) -> Tensor", F, x / (K(1) + exp(-x)))
/* The gradient of silu: g s (1 + x (1 - s)) with s = sigmoid(x). */
POINTWISE2(silu_backward, "silu_backward(Tensor a, Tensor b) -> Tensor", HIDE,
           a * (K(1) / (K(1) + exp(-b))) * (K(1) + b * (K(1) - K(1) / (K(1) + exp(-b)))))
/* x * Phi(x), Phi the normal distribution function; see gelu for the approximate form. */
POINTWISE1(gelu_erf, "gelu_erf(Tensor x) -> Tensor", F | HIDE, K(0.5) * x * (K(1) + erf(x * K(0.70710678118654752440))))
/* The gradient of gelu_erf: g (Phi(x) + x phi(x)). */
POINTWISE2(gelu_erf_backward, "gelu_erf_backward(Tensor a, Tensor b) -> Tensor", HIDE,
           a * (K(0.5) * (K(1) + erf(b * K(0.70710678118654752440))) + b * K(0.39894228040143267794) * exp(K(-0.5) * b * b)))
/* gelu by 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))). */
POINTWISE1(gelu_tanh, "gelu_tanh(Tensor x) -> Tensor", F | HIDE,
           K(0.5) * x * (K(1) + tanh(K(0.79788456080286535588) * (x + K(0.044715) * x * x * x))))
/* log(1 + exp(beta x)) / beta, and x itself where beta x exceeds the threshold. */
POINTWISE1(softplus, "softplus(Tensor x, *, float beta=1, float threshold=20) -> Tensor", F,
           x * K(o->beta) > K(o->threshold) ? x : log1p(exp(x * K(o->beta))) / K(o->beta))
/* x where positive, else negative_slope * x. */
POINTWISE1(leaky_relu, "leaky_relu(Tensor x, float negative_slope=0.01) -> Tensor", F, x > K(0) ? x : x * K(o->negative_slope))
/* x where positive, else alpha * (exp(x) - 1). */
POINTWISE1(elu, "elu(Tensor x, float alpha=1) -> Tensor", F, x > K(0) ? x : K(o->alpha) * expm1(x))
/* x where positive, else alpha * (exp(x / alpha) - 1). */
POINTWISE1(celu, "celu(Tensor x, float alpha=1) -> Tensor", F, x > K(0) ? x : K(o->alpha) * expm1(x / K(o->alpha)))
/* elu with the constants that keep mean 0 and variance 1 (Klambauer and others, 2017). */
POINTWISE1(selu, "selu(Tensor x) -> Tensor", F,
           K(1.0507009873554804934193349852946) * (x > K(0) ? x : K(1.6732632423543772848170429916717) * expm1(x)))
/* x * tanh(softplus(x)). */
POINTWISE1(mish, "mish(Tensor x) -> Tensor", F, x * tanh(x > K(20) ? x : log1p(exp(x))))
/* x between min and max, either of which may be absent. */
POINTWISE1_ALL(clamp, "clamp(Tensor x, float? min=None, float? max=None) -> Tensor", OP_INPLACE,
               o->has_max && x > K(o->max) ? K(o->max) : o->has_min && x < K(o->min) ? (o->has_max && o->min > o->max ? K(o->max) : K(o->min)) : x,
               o->has_max && x > K(o->max) ? K(o->max) : o->has_min && x < K(o->min) ? K(o->min) : x)
/* x where x > threshold, else value. */
POINTWISE1(threshold, "threshold(Tensor x, float threshold, float value) -> Tensor", F, x <= K(o->threshold) ? K(o->value) : x)
/* x between min_val and max_val. */
POINTWISE1(hardtanh, "hardtanh(Tensor x, float min_val=-1, float max_val=1) -> Tensor", F,
           x < K(o->min_val) ? K(o->min_val) : x > K(o->max_val) ? K(o->max_val) : x)
/* x moved toward 0 by lambd, 0 within. */
POINTWISE1(softshrink, "softshrink(Tensor x, float lambd=0.5) -> Tensor", F,
           x > K(o->lambd) ? x - K(o->lambd) : x < -K(o->lambd) ? x + K(o->lambd) : x * K(0))
/* x where |x| > lambd, else 0. */
POINTWISE1(hardshrink, "hardshrink(Tensor x, float lambd=0.5) -> Tensor", F, x >= -K(o->lambd) && x <= K(o->lambd) ? K(0) : x)
/* log(sigmoid(x)). */
POINTWISE1(logsigmoid, "logsigmoid(Tensor x) -> Tensor", F, (x < K(0) ? x : K(0)) - log1p(exp(-fabs(x))))
/* clamp(x + 3, 0, 6) / 6. */
POINTWISE1(hardsigmoid, "hardsigmoid(Tensor x) -> Tensor", F, (x < K(-3) ? K(0) : x > K(3) ? K(6) : x + K(3)) / K(6))
/* x * hardsigmoid(x). */
POINTWISE1(hardswish, "hardswish(Tensor x) -> Tensor", F, x * (x < K(-3) ? K(0) : x > K(3) ? K(6) : x + K(3)) / K(6))
