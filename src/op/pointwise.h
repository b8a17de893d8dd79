/* Pointwise ops: one line each, a C expression over the elements.
 *
 *   POINTWISE1(silu, "silu(Tensor x) -> Tensor", OP_FLOAT_OUT | OP_INPLACE, x / (K(1) + exp(-x)))
 *
 * In the expression the inputs have their names of the macro (x; a, b; x, a, b), `o->NAME` are the
 * arguments, K(1.5) is a constant of the compute type, and the functions of math.h work for float
 * and double alike. The same text serves the CPU kernels here (float, double and, with the _ALL
 * forms, int64), the CUDA kernels and fused kernels. Results are computed in blocks; a remainder is
 * computed in a padded block by the same vector code, so that an element's value never depends on
 * where it stands. */
#ifndef MF_POINTWISE_H
#define MF_POINTWISE_H
#include <math.h>

#include "op_args.h"
#include "pointwise_kernel.h"
#include "pointwise_run.h"
#include "vec_math.h"

/* Prototypes with vector variants in glibc's libmvec; without them (clang, other machines) the
 * loops call the scalar functions. */
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define MF_SIMD __attribute__((simd("notinbranch")))
#define MF_SIMD_FUNCTION(fn)        \
  extern double fn(double) MF_SIMD; \
  extern float fn##f(float) MF_SIMD
MF_SIMD_FUNCTION(exp);
MF_SIMD_FUNCTION(expm1);
MF_SIMD_FUNCTION(log);
MF_SIMD_FUNCTION(log1p);
MF_SIMD_FUNCTION(log2);
MF_SIMD_FUNCTION(log10);
MF_SIMD_FUNCTION(sin);
MF_SIMD_FUNCTION(cos);
MF_SIMD_FUNCTION(tan);
MF_SIMD_FUNCTION(tanh);
MF_SIMD_FUNCTION(sinh);
MF_SIMD_FUNCTION(cosh);
MF_SIMD_FUNCTION(asin);
MF_SIMD_FUNCTION(acos);
MF_SIMD_FUNCTION(atan);
MF_SIMD_FUNCTION(asinh);
MF_SIMD_FUNCTION(acosh);
MF_SIMD_FUNCTION(atanh);
MF_SIMD_FUNCTION(erf);
MF_SIMD_FUNCTION(erfc);
MF_SIMD_FUNCTION(exp2);
extern double pow(double, double) MF_SIMD;
extern float powf(float, float) MF_SIMD;
#endif

static inline double vec_normcdf_f64(double x) {
  return 0.5 * (1 + erf(x * 0.70710678118654752440));
}

/* One name for both float types in expressions; libm's names (and CUDA's normcdf), so that the text
 * is plain C in CUDA as well. */
#define MF_GENERIC1(fn, v) _Generic((v), float : fn##f, default : fn)(v)
#define MF_GENERIC2(fn, v, w) _Generic((v) + (w), float : fn##f, default : fn)(v, w)
#define exp(v) _Generic((v), float : vec_exp, default : exp)(v)
#define normcdf(v) _Generic((v), float : vec_normcdf, default : vec_normcdf_f64)(v)
#define exp2(v) MF_GENERIC1(exp2, v)
#define expm1(v) MF_GENERIC1(expm1, v)
#define log(v) MF_GENERIC1(log, v)
#define log1p(v) _Generic((v), float : vec_log1p, default : log1p)(v)
#define log2(v) MF_GENERIC1(log2, v)
#define log10(v) MF_GENERIC1(log10, v)
#define sin(v) MF_GENERIC1(sin, v)
#define cos(v) MF_GENERIC1(cos, v)
#define tan(v) MF_GENERIC1(tan, v)
#define sinh(v) MF_GENERIC1(sinh, v)
#define cosh(v) MF_GENERIC1(cosh, v)
#define tanh(v) MF_GENERIC1(tanh, v)
#define asin(v) MF_GENERIC1(asin, v)
#define acos(v) MF_GENERIC1(acos, v)
#define atan(v) MF_GENERIC1(atan, v)
#define asinh(v) MF_GENERIC1(asinh, v)
#define acosh(v) MF_GENERIC1(acosh, v)
#define atanh(v) MF_GENERIC1(atanh, v)
#define erf(v) MF_GENERIC1(erf, v)
#define erfc(v) MF_GENERIC1(erfc, v)
#define sqrt(v) MF_GENERIC1(sqrt, v)
#define fabs(v) MF_GENERIC1(fabs, v)
#define floor(v) MF_GENERIC1(floor, v)
#define ceil(v) MF_GENERIC1(ceil, v)
#define trunc(v) MF_GENERIC1(trunc, v)
#define nearbyint(v) MF_GENERIC1(nearbyint, v)
#define pow(v, w) MF_GENERIC2(pow, v, w)
#define fmod(v, w) MF_GENERIC2(fmod, v, w)
#define atan2(v, w) MF_GENERIC2(atan2, v, w)

#ifdef __clang__
#define PW_IVDEP _Pragma("clang loop vectorize(assume_safety)")
#else
#define PW_IVDEP _Pragma("GCC ivdep")
#endif
/* A kernel of one compute type; n is a multiple of 16. The arguments are copied, so that reading
 * them in one branch alone does not keep a loop from being vectorised. `ivdep`: output and input
 * may be the same block, never shifted ones. */
#define PW_KERNEL(name, C, CT, OT, blocks, element, expr)                                    \
  static void name##_##C(int64_t n, const void *args_, const void *const *in_, void *out_) { \
    typedef CT T;                                                                            \
    const struct name##_args o_ = *(const struct name##_args *)args_, *o = &o_;              \
    (void)o;                                                                                 \
    blocks OT *out = out_;                                                                   \
    n &= ~(int64_t)15;                                                                       \
    PW_IVDEP for (int64_t i = 0; i < n; i++) {                                               \
      element out[i] = (OT)(expr);                                                           \
    }                                                                                        \
  }
/* The kernels where b is a single element, for fused ones; `when`: the arguments for which the
 * expression is the same. */
#define PW_IN_A_ONE \
  PW_IN1            \
  const T b = *(const T *)in_[1];
#define PW_A T a = p0[i];
#define PW_SINGLE(name, when, expr)                                         \
  PW_KERNEL(name, f32_single, float, T, PW_IN_A_ONE, PW_A, expr)            \
  PW_KERNEL(name, f64_single, double, T, PW_IN_A_ONE, PW_A, expr)           \
  static void name##_choose(const OpCall *c, PointwiseKernel *k) {          \
    const struct name##_args *o = c->args;                                  \
    (void)o;                                                                \
    if (k->cls != PW_I64 && (when))                                         \
      k->single = k->cls == PW_F32 ? name##_f32_single : name##_f64_single; \
  }

/* The launch of every pointwise record. */
__attribute__((unused)) static int pointwise_cpu(const OpCall *c) {
  PointwiseKernel k;
  View in[WALK_OPERANDS];
  pointwise_kernel(c, &k);
  if (!k.fn)
    return err_set(MF_EINVAL, "%s: no kernel for %s", c->op->name,
                   dtype_name((DType)c->out[0].dtype));
  for (int i = 0; i < k.n_in; i++) in[i] = block_input(&k, &c->in[i]);
  return pw_run(k.fn, k.cls, k.bool_out, c->args, k.n_in, in, &c->out[0]);
}

#define PW_RECORD_CHOOSE(name, sig, flag, rule, lin, text, choice, ...)                           \
  OP(name, .signature = sig, .flags = flag, .infer = pointwise_infer, .sbp = rule, .linear = lin, \
     .cpu = pointwise_cpu, .expression = text, .choose = choice, .pointwise = {__VA_ARGS__})

#include "pointwise_forms.h"

#endif
