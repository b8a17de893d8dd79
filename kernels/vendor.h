/* What vendors' libraries do, behind thin functions: the CUDA library has them in vendor/, the
 * emulator in emulate/vendor.cc. */
#ifndef MF_VENDOR_H
#define MF_VENDOR_H
#include "kernel.cuh"

/* What may follow a product or a convolution: gelu by the error function, or by its usual
 * approximation. */
enum VendorAct { VENDOR_ACT_NONE, VENDOR_ACT_RELU, VENDOR_ACT_GELU, VENDOR_ACT_GELU_TANH };

/* y = act(y), element by element. Of act.cu. */
int act_launch(const OpCall *c, const View *y, VendorAct act);

/* c = act(alpha a b + beta c + bias) for matrices in rows: a is (m, k), or lies as (k, m) where it
 * is turned; b (k, n), c (m, n), bias (n). Lines are lda ... elements apart, matrices of a batch
 * a_batch ... */
struct Gemm {
  int64_t m, n, k, batch;
  const void *a, *b, *bias; /* bias NULL: none */
  void *c;
  int64_t lda, ldb, ldc, a_batch, b_batch, c_batch;
  bool a_turned, b_turned;
  int dtype, c_dtype; /* of a, b and bias; of c: the same, or float32 of halves */
  VendorAct act;      /* of those that vendor_gemm_acts names */
  double alpha, beta;
};
int vendor_gemm(const OpCall *c, const Gemm *g);
bool vendor_gemm_acts(int dtype, VendorAct act);

/* Which of x, w and y is made of the other two. */
enum ConvKind { CONV_INPUT, CONV_WEIGHT, CONV_FORWARD };

/* x (n, c, h, w), w (o, c / groups, kh, kw), y; all dense, with channels innermost where `last`. */
struct Conv {
  ConvKind kind;
  int64_t x_shape[4], w_shape[4], y_shape[4];
  int64_t stride[2], padding[2], dilation[2], groups;
  void *x, *w, *y;
  const void *bias; /* forward alone; NULL: none */
  int dtype;
  bool last;
  VendorAct act; /* forward alone: none or relu */
};
int vendor_conv(const OpCall *c, const Conv *v);
/* The bias and the relu of v's y, which has neither yet. Of act.cu. */
int bias_launch(const OpCall *c, const Conv *v);

/* Whether products of float32 may use shorter factors: MF_TF32=1. Of act.cu. */
bool vendor_tf32(void);

/* Sorts each of `lines` runs of n keys, places with them; equal keys stay in their order. */
int vendor_sort(const OpCall *c, int64_t lines, int64_t n, uint64_t *keys, int64_t *places);
/* v[i] = v[0] + ... + v[i]. */
int vendor_running_sum(const OpCall *c, int64_t n, int64_t *v);

#endif
