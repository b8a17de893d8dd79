/* oneDNN as plain functions over pointers: matrix products and convolutions in float32 and
 * bfloat16.
 *
 * A call is described by a structure of sizes and layouts; the primitive that oneDNN makes for it
 * is kept in a cache that hangs off the device, keyed by the description and the number of threads.
 * Any thread may call at any time. Memory beyond the operands (scratchpads, operands in the layout
 * that a primitive prefers) is the caller's: ask for its size first. Sizes are positive; empty
 * products are the caller's business. */
#ifndef MF_DNN_H
#define MF_DNN_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "device.h"

typedef struct DnnCache DnnCache;

/* The cache of a device; NULL when out of memory (error text set). */
DnnCache *dnn_cache(Device *d);

typedef enum DnnType { DNN_F32, DNN_BF16 } DnnType;
typedef enum DnnAct { DNN_NONE, DNN_RELU, DNN_GELU, DNN_GELU_TANH } DnnAct;

enum { DNN_MAX_BATCH_DIMS = 8, DNN_ALIGN = 64 };

/* c = act(a b + bias), batched: a is (..., m, k), b (..., k, n), bias (n) float32, c (..., m, n).
 * Strides count elements; of the two last strides of each operand one is 1 (so transposes need no
 * copy), and c's last one is. A batch stride of 0 repeats. */
typedef struct DnnMatmul {
  DnnType type;
  DnnAct act;
  bool bias;
  int batch_ndim;
  int64_t batch[DNN_MAX_BATCH_DIMS];
  int64_t a_batch[DNN_MAX_BATCH_DIMS], b_batch[DNN_MAX_BATCH_DIMS], c_batch[DNN_MAX_BATCH_DIMS];
  int64_t m, k, n;
  int64_t a_m, a_k, b_k, b_n, c_m;
} DnnMatmul;

size_t dnn_matmul_scratch(DnnCache *cache, const DnnMatmul *d);
int dnn_matmul(DnnCache *cache, const DnnMatmul *d, const void *a, const void *b, const void *bias,
               void *c, void *scratch);

/* c = alpha op(a) op(b) + beta c of row-major float matrices, op being transposition where asked:
 * (m, k) by (k, n). Inside a parallel body it runs on the calling thread alone. Needs no cache and
 * no scratch. */
void dnn_sgemm(bool a_transposed, bool b_transposed, int64_t m, int64_t n, int64_t k, float alpha,
               const float *a, int64_t lda, const float *b, int64_t ldb, float beta, float *c,
               int64_t ldc);

typedef enum DnnConvKind {
  DNN_CONV,        /* y from x, w, bias */
  DNN_CONV_INPUT,  /* x's gradient from w and y's */
  DNN_CONV_WEIGHT, /* w's and the bias's gradients from x and y's */
} DnnConvKind;

/* A convolution of x (n, ic, ih, iw) with w (oc, ic / groups, kh, kw) to y (n, oc, oh, ow). Each
 * operand is dense, in the order given or, where its flag is set, with channels innermost: (n, h,
 * w, c), (oc, kh, kw, ic / groups). Bias float32. */
typedef struct DnnConv {
  DnnConvKind kind;
  DnnType type;
  bool bias, relu, x_last, w_last, y_last; /* relu: of y, where that is made */
  int64_t n, ic, ih, iw, oc, oh, ow, kh, kw, groups;
  int64_t stride[2], padding[2], dilation[2];
} DnnConv;

size_t dnn_conv_scratch(DnnCache *cache, const DnnConv *d);
/* Which of x, w, bias, y are read and which written follows from the kind. */
int dnn_conv(DnnCache *cache, const DnnConv *d, void *x, void *w, void *bias, void *y,
             void *scratch);

#endif
