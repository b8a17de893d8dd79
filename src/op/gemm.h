/* Matrix products of element types that oneDNN has no kernels for: double and whole numbers.
 * Blocked, packed, vectorised; any strides. Static, since it belongs to one instruction set.
 *
 * c is cut into tiles of ROWS x COLS that stay in registers. Per block of DEPTH along the sum, b is
 * packed into panels of COLS columns and a into panels of ROWS rows, so that the inner loop reads
 * both in order. Threads cut the rows. */
#ifndef MF_GEMM_H
#define MF_GEMM_H
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "mem.h"
#include "thread.h"

enum { GEMM_ROWS = 4, GEMM_COLS = 16, GEMM_DEPTH = 128, GEMM_WIDTH = 256 };

/* c (m, n) = a (m, k) b (k, n); strides in elements. */
#define GEMM(name, T)                                                                              \
  typedef T name##_vec __attribute__((vector_size(8 * sizeof(T)), aligned(sizeof(T))));            \
  typedef struct name##_job {                                                                      \
    const T *a, *b;                                                                                \
    T *c;                                                                                          \
    int64_t k, n, am, ak, bk, bn, cm, cn;                                                          \
    bool add; /* to what c holds */                                                                \
  } name##_job;                                                                                    \
                                                                                                   \
  /* tile += pa pb over `depth` steps */                                                           \
  static void name##_tile(int64_t depth, const T *pa, const T *pb, T *tile) {                      \
    name##_vec acc[GEMM_ROWS][2] = {0};                                                            \
    for (int64_t p = 0; p < depth; p++) {                                                          \
      name##_vec b0 = *(const name##_vec *)pb, b1 = *(const name##_vec *)(pb + 8);                 \
      _Pragma("GCC unroll 4") for (int r = 0; r < GEMM_ROWS; r++) {                                \
        acc[r][0] += pa[r] * b0;                                                                   \
        acc[r][1] += pa[r] * b1;                                                                   \
      }                                                                                            \
      pa += GEMM_ROWS;                                                                             \
      pb += GEMM_COLS;                                                                             \
    }                                                                                              \
    _Pragma("GCC unroll 4") for (int r = 0; r < GEMM_ROWS; r++) {                                  \
      *(name##_vec *)(tile + r * GEMM_COLS) = acc[r][0];                                           \
      *(name##_vec *)(tile + r * GEMM_COLS + 8) = acc[r][1];                                       \
    }                                                                                              \
  }                                                                                                \
                                                                                                   \
  /* `lanes` wide panel of n lines of length depth: out[p * width + i] = x[i * line + p * step],   \
   * zero behind n */                                                                              \
  static void name##_pack(int64_t n, int64_t width, int64_t depth, const T *x, int64_t line,       \
                          int64_t step, T *out) {                                                  \
    for (int64_t p = 0; p < depth; p++)                                                            \
      for (int64_t i = 0; i < width; i++) out[p * width + i] = i < n ? x[i * line + p * step] : 0; \
  }                                                                                                \
                                                                                                   \
  static void name##_block(const name##_job *j, int64_t row, int64_t rows, int64_t col,            \
                           int64_t cols, int64_t p0, int64_t depth, const T *pb) {                 \
    T pa[GEMM_ROWS * GEMM_DEPTH], tile[GEMM_ROWS * GEMM_COLS];                                     \
    for (int64_t i = row; i < row + rows; i += GEMM_ROWS) {                                        \
      int64_t h = row + rows - i < GEMM_ROWS ? row + rows - i : GEMM_ROWS;                         \
      name##_pack(h, GEMM_ROWS, depth, j->a + i * j->am + p0 * j->ak, j->am, j->ak, pa);           \
      for (int64_t q = 0; q < cols; q += GEMM_COLS) {                                              \
        int64_t w = cols - q < GEMM_COLS ? cols - q : GEMM_COLS;                                   \
        name##_tile(depth, pa, pb + q * depth, tile);                                              \
        for (int64_t r = 0; r < h; r++) {                                                          \
          T *c = j->c + (i + r) * j->cm + (col + q) * j->cn;                                       \
          for (int64_t s = 0; s < w; s++)                                                          \
            c[s * j->cn] = (p0 || j->add ? c[s * j->cn] : 0) + tile[r * GEMM_COLS + s];            \
        }                                                                                          \
      }                                                                                            \
    }                                                                                              \
  }                                                                                                \
                                                                                                   \
  static void name##_rows(int64_t begin, int64_t end, void *arg) {                                 \
    const name##_job *j = arg;                                                                     \
    T pb[GEMM_WIDTH * GEMM_DEPTH];                                                                 \
    for (int64_t col = 0; col < j->n; col += GEMM_WIDTH) {                                         \
      int64_t cols = j->n - col < GEMM_WIDTH ? j->n - col : GEMM_WIDTH;                            \
      for (int64_t p = 0; p < j->k; p += GEMM_DEPTH) {                                             \
        int64_t depth = j->k - p < GEMM_DEPTH ? j->k - p : GEMM_DEPTH;                             \
        for (int64_t q = 0; q < cols; q += GEMM_COLS)                                              \
          name##_pack(cols - q < GEMM_COLS ? cols - q : GEMM_COLS, GEMM_COLS, depth,               \
                      j->b + p * j->bk + (col + q) * j->bn, j->bn, j->bk, pb + q * depth);         \
        name##_block(j, begin, end - begin, col, cols, p, depth, pb);                              \
      }                                                                                            \
    }                                                                                              \
  }                                                                                                \
                                                                                                   \
  static void name(int64_t m, int64_t k, int64_t n, const void *a, int64_t am, int64_t ak,         \
                   const void *b, int64_t bk, int64_t bn, void *c, int64_t cm, int64_t cn)         \
      __attribute__((unused));                                                                     \
  static void name(int64_t m, int64_t k, int64_t n, const void *a, int64_t am, int64_t ak,         \
                   const void *b, int64_t bk, int64_t bn, void *c, int64_t cm, int64_t cn) {       \
    name##_job j = {a, b, c, k, n, am, ak, bk, bn, cm, cn, false};                                 \
    int64_t work = k * n > 0 ? k * n : 1;                                                          \
    mf_parallel(m, (1 << 18) / work + 1, name##_rows, &j);                                         \
  }                                                                                                \
                                                                                                   \
  /* On the calling thread; adds to c where asked. */                                              \
  static void name##_serial(int64_t m, int64_t k, int64_t n, const T *a, int64_t am, int64_t ak,   \
                            const T *b, int64_t bk, int64_t bn, bool add, T *c, int64_t cm,        \
                            int64_t cn) __attribute__((unused));                                   \
  static void name##_serial(int64_t m, int64_t k, int64_t n, const T *a, int64_t am, int64_t ak,   \
                            const T *b, int64_t bk, int64_t bn, bool add, T *c, int64_t cm,        \
                            int64_t cn) {                                                          \
    name##_job j = {a, b, c, k, n, am, ak, bk, bn, cm, cn, add};                                   \
    name##_rows(0, m, &j);                                                                         \
  }

GEMM(gemm_f64, double)
GEMM(gemm_i64, uint64_t)

#endif
