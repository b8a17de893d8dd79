/* softmax and log_softmax along a dim, and their gradients. Bytes: those of the operands. */
#include "lines.cuh"

struct SoftmaxArgs {
  int unused;
};

/* The largest element, and the sum of exp(x - that): operand 1 of the line. */
template <class L, class T>
static __device__ __forceinline__ void softmax_sums(const L &l, T *most, T *sum) {
  T m = (T)-INFINITY, s = T(0);
  for (int64_t i = l.t; i < l.n; i += l.width) m = OpMax::of(l.get(1, i), m);
  m = l.template all<OpMax>(m);
  for (int64_t i = l.t; i < l.n; i += l.width) s += exp(l.get(1, i) - m);
  *most = m;
  *sum = l.sum(s);
}

template <class U>
struct Softmax {
  typedef U T;
  typedef SoftmaxArgs Args;
  template <class L>
  static __device__ void run(const L &l, const Args &) {
    T most, sum;
    softmax_sums(l, &most, &sum);
    for (int64_t i = l.t; i < l.n; i += l.width) l.put(0, i, exp(l.get(1, i) - most) / sum);
  }
};
template <class U>
struct LogSoftmax {
  typedef U T;
  typedef SoftmaxArgs Args;
  template <class L>
  static __device__ void run(const L &l, const Args &) {
    T most, sum;
    softmax_sums(l, &most, &sum);
    sum = log(sum);
    for (int64_t i = l.t; i < l.n; i += l.width) l.put(0, i, l.get(1, i) - most - sum);
  }
};
/* Operands gx, g, y. */
template <class U>
struct SoftmaxBackward {
  typedef U T;
  typedef SoftmaxArgs Args;
  template <class L>
  static __device__ void run(const L &l, const Args &) {
    T s = T(0);
    for (int64_t i = l.t; i < l.n; i += l.width) s += l.get(1, i) * l.get(2, i);
    s = l.sum(s);
    for (int64_t i = l.t; i < l.n; i += l.width) l.put(0, i, (l.get(1, i) - s) * l.get(2, i));
  }
};
template <class U>
struct LogSoftmaxBackward {
  typedef U T;
  typedef SoftmaxArgs Args;
  template <class L>
  static __device__ void run(const L &l, const Args &) {
    T s = T(0);
    for (int64_t i = l.t; i < l.n; i += l.width) s += l.get(1, i);
    s = l.sum(s);
    for (int64_t i = l.t; i < l.n; i += l.width) l.put(0, i, l.get(1, i) - exp(l.get(2, i)) * s);
  }
};

#define SOFTMAX_OP(name, B)                                                                \
  static int name##_cuda(const OpCall *c) {                                                \
    const View *views[] = {&c->out[0], &c->in[0], &c->in[c->n_in - 1]};                    \
    LineParams p;                                                                          \
    uint32_t mask = c->out[0].ndim ? 1u << ((const struct name##_args *)c->args)->dim : 0; \
    lines_init(&p, mask, c->n_in + 1, views);                                              \
    if (c->out[0].dtype == F64) return lines_launch<B<double>>(c, &p, SoftmaxArgs{0});     \
    return lines_launch<B<float>>(c, &p, SoftmaxArgs{0});                                  \
  }                                                                                        \
  KERNEL(name, name##_cuda)
SOFTMAX_OP(softmax, Softmax)
SOFTMAX_OP(log_softmax, LogSoftmax)
SOFTMAX_OP(softmax_backward, SoftmaxBackward)
SOFTMAX_OP(log_softmax_backward, LogSoftmaxBackward)
