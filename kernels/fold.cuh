/* What reductions fold: start() of nothing, add() an element, join() two parts, finish(). */
#ifndef MF_FOLD_CUH
#define MF_FOLD_CUH
#include "kernel.cuh"

struct FoldParams {
  Walk<2> outer; /* y, and x at the first of its elements */
  Walk<1> inner; /* x, from there */
  int64_t count; /* elements a result */
  int64_t each;  /* of them in a part: a multiple of 16, so that rows that are aligned stay so */
  int parts;     /* blocks a result; more than 1: parts go to `partial` */
  bool flat, aligned;
  double p, divisor; /* of norm; of var and std */
  void *partial;
};

template <class T>
struct FoldSum {
  typedef T Acc, Value;
  static __device__ Acc start() {
    return T(0);
  }
  static __device__ void add(Acc &a, T x, const FoldParams &) {
    a += x;
  }
  static __device__ void join(Acc &a, Acc b) {
    a += b;
  }
  static __device__ T finish(Acc a, const FoldParams &) {
    return a;
  }
};
template <class T>
struct FoldMean : FoldSum<T> {
  static __device__ T finish(T a, const FoldParams &p) {
    return a / (T)p.count;
  }
};
template <class T>
struct FoldProd {
  typedef T Acc, Value;
  static __device__ Acc start() {
    return T(1);
  }
  static __device__ void add(Acc &a, T x, const FoldParams &) {
    a *= x;
  }
  static __device__ void join(Acc &a, Acc b) {
    a *= b;
  }
  static __device__ T finish(Acc a, const FoldParams &) {
    return a;
  }
};

template <class T>
static __device__ __forceinline__ T lowest() {
  return (T)-INFINITY;
}
template <>
__device__ __forceinline__ int64_t lowest<int64_t>() {
  return INT64_MIN;
}
template <class T>
static __device__ __forceinline__ T highest() {
  return (T)INFINITY;
}
template <>
__device__ __forceinline__ int64_t highest<int64_t>() {
  return INT64_MAX;
}
template <class T>
struct FoldMax {
  typedef T Acc, Value;
  static __device__ Acc start() {
    return lowest<T>();
  }
  static __device__ void add(Acc &a, T x, const FoldParams &) {
    a = x > a || x != x ? x : a;
  }
  static __device__ void join(Acc &a, Acc b) {
    a = b > a || b != b ? b : a;
  }
  static __device__ T finish(Acc a, const FoldParams &) {
    return a;
  }
};
template <class T>
struct FoldMin {
  typedef T Acc, Value;
  static __device__ Acc start() {
    return highest<T>();
  }
  static __device__ void add(Acc &a, T x, const FoldParams &) {
    a = x < a || x != x ? x : a;
  }
  static __device__ void join(Acc &a, Acc b) {
    a = b < a || b != b ? b : a;
  }
  static __device__ T finish(Acc a, const FoldParams &) {
    return a;
  }
};

/* How many are not zero; whether there is one; whether all are. */
template <class T>
struct FoldCount {
  typedef int64_t Acc;
  typedef T Value;
  static __device__ Acc start() {
    return 0;
  }
  static __device__ void add(Acc &a, T x, const FoldParams &) {
    a += x != 0;
  }
  static __device__ void join(Acc &a, Acc b) {
    a += b;
  }
  static __device__ int64_t finish(Acc a, const FoldParams &) {
    return a;
  }
};
template <class T>
struct FoldAny : FoldCount<T> {
  static __device__ int64_t finish(int64_t a, const FoldParams &) {
    return a != 0;
  }
};
template <class T>
struct FoldAll : FoldCount<T> {
  static __device__ int64_t finish(int64_t a, const FoldParams &p) {
    return a == p.count;
  }
};

template <class T>
struct FoldAbs : FoldSum<T> {
  static __device__ void add(T &a, T x, const FoldParams &) {
    a += fabs(x);
  }
};
template <class T>
struct FoldSquare : FoldSum<T> {
  static __device__ void add(T &a, T x, const FoldParams &) {
    a += x * x;
  }
  static __device__ T finish(T a, const FoldParams &) {
    return sqrt(a);
  }
};
template <class T>
struct FoldPower : FoldSum<T> {
  static __device__ void add(T &a, T x, const FoldParams &p) {
    a += pow(fabs(x), (T)p.p);
  }
  static __device__ T finish(T a, const FoldParams &p) {
    return pow(a, (T)(1 / p.p));
  }
};
template <class T>
struct FoldTrue : FoldSum<T> {
  static __device__ void add(T &a, T x, const FoldParams &) {
    a += (T)(x != 0);
  }
};
template <class T>
struct FoldMaxAbs : FoldMax<T> {
  static __device__ T start() {
    return T(0);
  }
  static __device__ void add(T &a, T x, const FoldParams &p) {
    FoldMax<T>::add(a, fabs(x), p);
  }
};
template <class T>
struct FoldMinAbs : FoldMin<T> {
  static __device__ void add(T &a, T x, const FoldParams &p) {
    FoldMin<T>::add(a, fabs(x), p);
  }
};

/* Mean and sum of squared deviations of n elements, as Welford; n is kept in T, exact to 2^24. */
template <class T>
struct Moments {
  T n, mean, m2;
};
template <class T>
struct FoldVar {
  typedef Moments<T> Acc;
  typedef T Value;
  static __device__ Acc start() {
    return Acc{T(0), T(0), T(0)};
  }
  static __device__ void add(Acc &a, T x, const FoldParams &) {
    T d = x - a.mean;
    a.n += 1;
    a.mean += d / a.n;
    a.m2 += d * (x - a.mean);
  }
  static __device__ void join(Acc &a, Acc b) {
    T n = a.n + b.n, d = b.mean - a.mean;
    if (b.n == 0) return;
    a.mean += d * (b.n / n);
    a.m2 += b.m2 + d * d * (a.n * (b.n / n));
    a.n = n;
  }
  static __device__ T finish(Acc a, const FoldParams &p) {
    return a.m2 / (T)p.divisor;
  }
};
template <class T>
struct FoldStd : FoldVar<T> {
  static __device__ T finish(Moments<T> a, const FoldParams &p) {
    return sqrt(a.m2 / (T)p.divisor);
  }
};

/* The largest element m, and the sum of exp(x - m); an infinite m counts as 0 there. */
template <class T>
struct Exponentials {
  T most, sum;
};
template <class T>
struct FoldLogsumexp {
  typedef Exponentials<T> Acc;
  typedef T Value;
  static __device__ Acc start() {
    return Acc{(T)-INFINITY, T(0)};
  }
  static __device__ void add(Acc &a, T x, const FoldParams &) {
    join(a, Acc{x, T(1)});
  }
  static __device__ void join(Acc &a, Acc b) {
    T most = OpMax::of(a.most, b.most), base = isinf(most) ? T(0) : most;
    if (most == (T)-INFINITY) return;
    T from_a = isinf(a.most) && a.most > 0 ? T(0) : a.most;
    T from_b = isinf(b.most) && b.most > 0 ? T(0) : b.most;
    a.sum = (a.sum == 0 ? T(0) : a.sum * exp(from_a - base)) +
            (b.sum == 0 ? T(0) : b.sum * exp(from_b - base));
    if (most == (T)INFINITY) a.sum = T(1);
    a.most = most;
  }
  static __device__ T finish(Acc a, const FoldParams &) {
    return a.most == (T)-INFINITY ? a.most : a.most + log(a.sum);
  }
};

#endif
