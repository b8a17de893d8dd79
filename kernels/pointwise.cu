/* The pointwise ops: kernels made of the same lines as the CPU's (src/op/pointwise.c).
 *
 * Two kernels an op and compute type. Where every operand lies in the output's order without gaps,
 * or is a single element, a thread computes 8 elements: vectors of 16 bytes, two of 4 floats, or
 * one of 8 halves where all are 16-bit. Others, broadcast along some dims, strided, or of a dtype
 * that is converted, are read element by element, 4 a thread. Either way an input of n elements is
 * read once: the bytes of a call are those of its operands. */
#include "pointwise.cuh"

/* The kernels themselves are compiled in parts (parts/pointwise.cu). */
#define PW_KERNEL(name, C, ...) void name##_##C(int64_t, const void *, const void *const *, void *);
#define PW_RECORDS 1
#define PW_WANTED(line) 1
#include "pointwise_forms.h"

#define PW_RECORD_CHOOSE(name, sig, flag, rule, lin, text, choice, ...) \
  static int name##_cuda(const OpCall *c) {                             \
    static PointwiseFn *const fns[PW_CLASSES] = {__VA_ARGS__};          \
    return pw_call(c, fns, choice);                                     \
  }                                                                     \
  KERNEL(name, name##_cuda)
#define PW_SINGLE(name, when, expr) static PointwiseChoose *const name##_choose = NULL;

#include "pointwise_lines.h"
