/* Random numbers: Philox4x32-10 by counter, and what is made of its words.
 *
 * A draw is keyed by a seed and a 64-bit stream number and indexed by the element's global index,
 * so that its value does not depend on threads, devices or how a tensor is split. The counter is
 * (block, stream), the key the seed. Elements take words in groups, so that vectors need no
 * shuffles: for 32-bit draws, element 64 g + 16 w + l is word w of block 16 g + l; for 64-bit
 * draws, element 32 g + 16 h + l is words 2 h and 2 h + 1 of block 16 g + l. Normal numbers come in
 * pairs from one block by Box and Muller's method: w = 0, 1 and 2, 3; for 64 bits h = 0, 1.
 *
 * Everything here gives the same bits on every machine: integers, conversions, sqrt, division, and
 * products and sums that either stand alone or are an explicit fma. A product is never followed by
 * a plain sum, which a compiler might contract. Functions are inline, so that each instruction set
 * compiles them into vectors of its own. */
#ifndef MF_RNG_H
#define MF_RNG_H
#include "rng_value.h"
#ifdef __SSE2__
#include <immintrin.h>
#endif

/* Several 64-bit lanes that hold one 32-bit word each; what the upper halves hold is ignored. */
#if defined(__AVX512F__)
enum { RNG_WIDTH = 8, RNG_AT_ONCE = 2 };
typedef uint64_t RngLanes __attribute__((vector_size(64)));
#define RNG_MUL(v, m) ((RngLanes)_mm512_mul_epu32((__m512i)(v), (__m512i)(m)))
#elif defined(__AVX2__)
enum { RNG_WIDTH = 4, RNG_AT_ONCE = 2 };
typedef uint64_t RngLanes __attribute__((vector_size(32)));
#define RNG_MUL(v, m) ((RngLanes)_mm256_mul_epu32((__m256i)(v), (__m256i)(m)))
#elif defined(__SSE2__)
enum { RNG_WIDTH = 2, RNG_AT_ONCE = 2 };
typedef uint64_t RngLanes __attribute__((vector_size(16)));
#define RNG_MUL(v, m) ((RngLanes)_mm_mul_epu32((__m128i)(v), (__m128i)(m)))
#else
enum { RNG_WIDTH = 2, RNG_AT_ONCE = 2 };
typedef uint64_t RngLanes __attribute__((vector_size(16)));
#define RNG_MUL(v, m) (((v)&UINT32_C(0xffffffff)) * (m))
#endif

/* The words of blocks 16 group ... 16 group + 15. */
RNG_INLINE void rng_group(uint64_t seed, uint64_t stream, uint64_t group,
                          uint32_t out[4][RNG_LANES]) {
  const RngLanes zero = {0}, m0 = zero + UINT32_C(0xD2511F53), m1 = zero + UINT32_C(0xCD9E8D57);
  static const uint64_t lane[RNG_LANES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  uint64_t first = group * RNG_LANES; /* 16 divides 2^32: no carry within a group */
  for (int from = 0; from < RNG_LANES; from += RNG_WIDTH * RNG_AT_ONCE) {
    RngLanes c[RNG_AT_ONCE][4];
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    for (int u = 0; u < RNG_AT_ONCE; u++) {
      memcpy(&c[u][0], lane + from + u * RNG_WIDTH, sizeof c[u][0]);
      c[u][0] += (uint32_t)first;
      c[u][1] = zero + (first >> 32);
      c[u][2] = zero + (uint32_t)stream;
      c[u][3] = zero + (stream >> 32);
    }
    for (int round = 0; round < 10; round++) {
      for (int u = 0; u < RNG_AT_ONCE; u++) {
        RngLanes p0 = RNG_MUL(c[u][0], m0), p1 = RNG_MUL(c[u][2], m1);
        c[u][0] = (p1 >> 32) ^ c[u][1] ^ k0;
        c[u][2] = (p0 >> 32) ^ c[u][3] ^ k1;
        c[u][1] = p1;
        c[u][3] = p0;
      }
      k0 += UINT32_C(0x9E3779B9), k1 += UINT32_C(0xBB67AE85);
    }
    for (int w = 0; w < 4; w++)
      for (int u = 0; u < RNG_AT_ONCE; u++)
        for (int l = 0; l < RNG_WIDTH; l++) out[w][from + u * RNG_WIDTH + l] = (uint32_t)c[u][w][l];
  }
}

#endif
