/* Folding a run of elements in lanes: four vectors of LANES_BYTES at a time, then one, then single
 * elements; lanes are joined pairwise. The order depends on the number of elements alone. Vectors
 * are the compiler's own, which it makes of narrower ones where the instruction set has no such;
 * loops over arrays of lanes come out as well or not at all, as the compiler pleases.
 *
 * Static, since it belongs to one instruction set. */
#ifndef MF_LANES_H
#define MF_LANES_H
#include <stdint.h>

/* The width of vectors, and how many of each type's elements there are. */
#if defined __AVX512F__
enum { LANES_BYTES = 64 };
#define LANES_JOIN_f32 LANES_JOIN16
#define LANES_JOIN_f64 LANES_JOIN8
#elif defined __AVX__
enum { LANES_BYTES = 32 };
#define LANES_JOIN_f32 LANES_JOIN8
#define LANES_JOIN_f64 LANES_JOIN4
#else
enum { LANES_BYTES = 16 };
#define LANES_JOIN_f32 LANES_JOIN4
#define LANES_JOIN_f64 LANES_JOIN2
#endif
#define LANES_JOIN_i64 LANES_JOIN_f64

#define LANES_VECTOR(name, T, bytes) \
  typedef T name __attribute__((vector_size(bytes), aligned(__alignof__(T)), may_alias))
LANES_VECTOR(lanes_f32, float, LANES_BYTES);
LANES_VECTOR(lanes_f64, double, LANES_BYTES);
LANES_VECTOR(lanes_i64, int64_t, LANES_BYTES);

/* Element i of p, or the vector that begins there. */
#define LANES_AT(V, p, i) (*(const V *)(const void *)((p) + (i)))
#define LANES_PUT(V, p, i, value) (*(V *)(void *)((p) + (i)) = (value))

/* Joins of vectors (V) and of single elements. MAX and MIN give NaN where either is; TOP is the
 * larger where there is no NaN. */
#define LANES_ADD(a, b) ((a) + (b))
#define LANES_MAX(a, b) ((b) > (a) || (b) != (b) ? (b) : (a))
#define LANES_MIN(a, b) ((b) < (a) || (b) != (b) ? (b) : (a))
#define LANES_TOP(a, b) ((b) > (a) ? (b) : (a))
#define LANES_ADD_V(a, b) ((a) + (b))
#define LANES_MAX_V(a, b) LANES_CHOOSE(a, b, (b_ > a_) | (b_ != b_))
#define LANES_MIN_V(a, b) LANES_CHOOSE(a, b, (b_ < a_) | (b_ != b_))
#define LANES_TOP_V(a, b) LANES_CHOOSE(a, b, b_ > a_)
/* Whether elements may be joined twice: then a vector that overlaps the last serves the rest. */
enum { LANES_ADD_TWICE = 0, LANES_MAX_TWICE = 1, LANES_MIN_TWICE = 1, LANES_TOP_TWICE = 1 };
#define LANES_CHOOSE(a, b, take)                                                          \
  __extension__({                                                                         \
    __typeof__(a) a_ = (a), b_ = (b);                                                     \
    __typeof__(a_ > b_) take_ = take;                                                     \
    (__typeof__(a_))((take_ & (__typeof__(take_))b_) | (~take_ & (__typeof__(take_))a_)); \
  })

/* All of v's 16, 8, 4 or 2 elements in one. */
#define LANES_JOIN16(v, JOIN)                                                                 \
  __extension__({                                                                             \
    __auto_type v16_ = JOIN##_V(__builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7),        \
                                __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15)); \
    LANES_JOIN8(v16_, JOIN);                                                                  \
  })
#define LANES_JOIN8(v, JOIN)                                               \
  __extension__({                                                          \
    __auto_type v8_ = JOIN##_V(__builtin_shufflevector(v, v, 0, 1, 2, 3),  \
                               __builtin_shufflevector(v, v, 4, 5, 6, 7)); \
    LANES_JOIN4(v8_, JOIN);                                                \
  })
#define LANES_JOIN4(v, JOIN)                                                  \
  __extension__({                                                             \
    __auto_type v4_ = JOIN##_V(v, __builtin_shufflevector(v, v, 2, 3, 0, 1)); \
    v4_ = JOIN##_V(v4_, __builtin_shufflevector(v4_, v4_, 1, 0, 3, 2));       \
    v4_[0];                                                                   \
  })
#define LANES_JOIN2(v, JOIN) JOIN((v)[0], (v)[1])

/* `total` = JOIN over i < n of ELEMENT(V, i), which is a T or a vector of them; `zero` joins
 * without effect. */
#define LANES_FOLD(C, T, n, zero, ELEMENT, JOIN, total)                            \
  do {                                                                             \
    enum { V_ = sizeof(lanes_##C) / sizeof(T) };                                   \
    lanes_##C s0_ = (T)(zero) - (lanes_##C){0}, s1_ = s0_, s2_ = s0_, s3_ = s0_;   \
    int64_t at_ = 0;                                                               \
    for (; at_ + 4 * V_ <= n; at_ += 4 * V_) {                                     \
      s0_ = JOIN##_V(s0_, ELEMENT(lanes_##C, at_));                                \
      s1_ = JOIN##_V(s1_, ELEMENT(lanes_##C, at_ + V_));                           \
      s2_ = JOIN##_V(s2_, ELEMENT(lanes_##C, at_ + 2 * V_));                       \
      s3_ = JOIN##_V(s3_, ELEMENT(lanes_##C, at_ + 3 * V_));                       \
    }                                                                              \
    for (; at_ + V_ <= n; at_ += V_) s0_ = JOIN##_V(s0_, ELEMENT(lanes_##C, at_)); \
    if (JOIN##_TWICE && n >= V_ && at_ < n) {                                      \
      s0_ = JOIN##_V(s0_, ELEMENT(lanes_##C, n - V_));                             \
      at_ = n;                                                                     \
    }                                                                              \
    s0_ = JOIN##_V(s0_, s1_), s2_ = JOIN##_V(s2_, s3_);                            \
    s0_ = JOIN##_V(s0_, s2_);                                                      \
    T all_ = LANES_JOIN_##C(s0_, JOIN);                                            \
    for (; at_ < n; at_++) all_ = JOIN(all_, ELEMENT(T, at_));                     \
    total = all_;                                                                  \
  } while (0)

/* Adds up two things over i < n in one pass: BODY(V, i, u, v) adds to u and v. */
#define LANES_SUM2(C, T, n, BODY, total_u, total_v)                             \
  do {                                                                          \
    enum { V_ = sizeof(lanes_##C) / sizeof(T) };                                \
    lanes_##C u0_ = {0}, v0_ = {0}, u1_ = {0}, v1_ = {0};                       \
    int64_t at_ = 0;                                                            \
    for (; at_ + 2 * V_ <= n; at_ += 2 * V_) {                                  \
      BODY(lanes_##C, at_, u0_, v0_);                                           \
      BODY(lanes_##C, at_ + V_, u1_, v1_);                                      \
    }                                                                           \
    u0_ += u1_, v0_ += v1_;                                                     \
    for (; at_ + V_ <= n; at_ += V_) BODY(lanes_##C, at_, u0_, v0_);            \
    T u_ = LANES_JOIN_##C(u0_, LANES_ADD), v_ = LANES_JOIN_##C(v0_, LANES_ADD); \
    for (; at_ < n; at_++) BODY(T, at_, u_, v_);                                \
    total_u = u_, total_v = v_;                                                 \
  } while (0)

#endif
