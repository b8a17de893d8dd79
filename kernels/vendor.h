/* What vendors' libraries do, behind thin functions: the CUDA library has them in vendor/, the
 * emulator in emulate/vendor.cc. */
#ifndef MF_VENDOR_H
#define MF_VENDOR_H
#include "kernel.cuh"

/* c = alpha a b + beta c + bias for matrices in rows: a is (m, k), or lies as (k, m) where it is
 * turned; b (k, n), c (m, n), bias (n). Lines are lda ... elements apart, matrices of a batch
 * a_batch ... */
struct Gemm {
  int64_t m, n, k, batch;
  const void *a, *b, *bias; /* bias NULL: none */
  void *c;
  int64_t lda, ldb, ldc, a_batch, b_batch, c_batch;
  bool a_turned, b_turned;
  int dtype; /* of all */
  double alpha, beta;
};
int vendor_gemm(const OpCall *c, const Gemm *g);

/* Sorts each of `lines` runs of n keys, places with them; equal keys stay in their order. */
int vendor_sort(const OpCall *c, int64_t lines, int64_t n, uint64_t *keys, int64_t *places);
/* v[i] = v[0] + ... + v[i]. */
int vendor_running_sum(const OpCall *c, int64_t n, int64_t *v);

#endif
