/* What the macros of a pointwise line are for CUDA. Whoever has records defines PW_RECORD_CHOOSE
 * and PW_SINGLE. */
#ifndef MF_LINE_CUH
#define MF_LINE_CUH
#include "pointwise.cuh"

#ifndef PW_LINKAGE
#define PW_LINKAGE static
#endif

/* NAME_C launches the kernels of F, whose at() is the line. A PointwiseFn here is one that gets a
 * PwCall in the place of its inputs. */
#define PW_KERNEL(name, C, CT, OT, blocks, element_, expr)                                        \
  struct pw_##name##_##C {                                                                        \
    typedef CT T;                                                                                 \
    typedef struct name##_args Args;                                                              \
    enum { N = PW_COUNT(blocks) };                                                                \
    static __device__ __forceinline__ OT at(const Args *o, const T *p0, const T *p1, const T *p2, \
                                            const T *p3) {                                        \
      const int i = 0;                                                                            \
      (void)o, (void)p0, (void)p1, (void)p2, (void)p3;                                            \
      element_ return (OT)(expr);                                                                 \
    }                                                                                             \
  };                                                                                              \
  PW_LINKAGE void name##_##C(int64_t, const void *, const void *const *c, void *) {               \
    pw_launch<pw_##name##_##C>((PwCall *)c);                                                      \
  }

#include "pointwise_forms.h"

/* The inputs are counted by the text that declares them on a CPU. */
#undef PW_IN1
#undef PW_IN2
#undef PW_IN3
#undef PW_IN4
#define PW_IN1 1
#define PW_IN2 2
#define PW_IN3 3
#define PW_IN4 4
#define PW_COUNT(n) n

#endif
