/* Matrix products by cuBLASLt. It counts in columns, where a matrix in rows is its transpose: c' =
 * b' a', so that the operands change places and nothing is copied. float16, bfloat16 and float32
 * are added up in float32. */
#include <cublasLt.h>

#include "vendor.h"

static constexpr size_t WORKSPACE = (size_t)32 << 20;

static int check(const OpCall *c, cublasStatus_t s, const char *what) {
  if (s == CUBLAS_STATUS_SUCCESS) return 0;
  return err_set(MF_EUNSUPPORTED, "%s: cuBLASLt: %s: %s", c->op->name, what,
                 cublasLtGetStatusString(s));
}

static cudaDataType_t type_of(int dtype) {
  return dtype == F64    ? CUDA_R_64F
         : dtype == F16  ? CUDA_R_16F
         : dtype == BF16 ? CUDA_R_16BF
                         : CUDA_R_32F;
}

static unsigned alignment(const void *p) {
  unsigned a = 256;
  while ((uintptr_t)p % a) a /= 2;
  return a;
}

/* Rows and columns as cuBLASLt counts them. */
static cublasStatus_t layout(cublasLtMatrixLayout_t *l, int dtype, int64_t rows, int64_t columns,
                             int64_t ld, int64_t batch, int64_t step) {
  cublasStatus_t s =
      cublasLtMatrixLayoutCreate(l, type_of(dtype), (uint64_t)rows, (uint64_t)columns, ld);
  int32_t n = (int32_t)batch;
  if (s == CUBLAS_STATUS_SUCCESS)
    s = cublasLtMatrixLayoutSetAttribute(*l, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &n, sizeof n);
  if (s == CUBLAS_STATUS_SUCCESS)
    s = cublasLtMatrixLayoutSetAttribute(*l, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &step,
                                         sizeof step);
  return s;
}

struct Plan {
  cublasLtMatmulDesc_t how;
  cublasLtMatrixLayout_t a, b, c;
  cublasLtMatmulPreference_t wish;
};

static cublasStatus_t plan_make(Plan *p, const Gemm *g) {
  bool is_double = g->dtype == F64;
  cublasOperation_t turned = CUBLAS_OP_T, plain = CUBLAS_OP_N;
  cublasLtEpilogue_t end = g->bias ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT;
  cublasStatus_t s =
      cublasLtMatmulDescCreate(&p->how, is_double ? CUBLAS_COMPUTE_64F : CUBLAS_COMPUTE_32F,
                               is_double ? CUDA_R_64F : CUDA_R_32F);
#define SET(what, value)                                                              \
  if (s == CUBLAS_STATUS_SUCCESS)                                                     \
    s = cublasLtMatmulDescSetAttribute(p->how, CUBLASLT_MATMUL_DESC_##what, &(value), \
                                       sizeof(value));
  SET(TRANSA, g->b_turned ? turned : plain)
  SET(TRANSB, g->a_turned ? turned : plain)
  SET(EPILOGUE, end)
  if (g->bias) SET(BIAS_POINTER, g->bias)
#undef SET
  if (s == CUBLAS_STATUS_SUCCESS)
    s = layout(&p->a, g->dtype, g->b_turned ? g->k : g->n, g->b_turned ? g->n : g->k, g->ldb,
               g->batch, g->b_batch);
  if (s == CUBLAS_STATUS_SUCCESS)
    s = layout(&p->b, g->dtype, g->a_turned ? g->m : g->k, g->a_turned ? g->k : g->m, g->lda,
               g->batch, g->a_batch);
  if (s == CUBLAS_STATUS_SUCCESS)
    s = layout(&p->c, g->dtype, g->n, g->m, g->ldc, g->batch, g->c_batch);
  return s == CUBLAS_STATUS_SUCCESS ? cublasLtMatmulPreferenceCreate(&p->wish) : s;
}

static cublasStatus_t plan_wish(Plan *p, const Gemm *g, size_t room) {
  unsigned a = alignment(g->b), b = alignment(g->a), c = alignment(g->c);
  cublasStatus_t s = cublasLtMatmulPreferenceSetAttribute(
      p->wish, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &room, sizeof room);
#define WISH(what, value)                                                                        \
  if (s == CUBLAS_STATUS_SUCCESS)                                                                \
    s = cublasLtMatmulPreferenceSetAttribute(p->wish, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_##what, \
                                             &value, sizeof value);
  WISH(A_BYTES, a)
  WISH(B_BYTES, b)
  WISH(C_BYTES, c)
  WISH(D_BYTES, c)
#undef WISH
  return s;
}

static int plan_run(const OpCall *c, cublasLtHandle_t handle, Plan *p, const Gemm *g) {
  cublasLtMatmulHeuristicResult_t found;
  int n = 0;
  float alpha = (float)g->alpha, beta = (float)g->beta;
  bool is_double = g->dtype == F64;
  int rc = check(c, plan_wish(p, g, WORKSPACE), "a preference");
  if (!rc)
    rc = check(c,
               cublasLtMatmulAlgoGetHeuristic(handle, p->how, p->a, p->b, p->c, p->c, p->wish, 1,
                                              &found, &n),
               "the choice of an algorithm");
  if (!rc && !n)
    rc = err_set(MF_EUNSUPPORTED, "%s: cuBLASLt knows no algorithm for this product", c->op->name);
  void *room = NULL;
  if (!rc && found.workspaceSize && !(room = kernel_scratch(c, found.workspaceSize)))
    rc = MF_ENOMEM;
  if (rc) return rc;
  return check(
      c,
      cublasLtMatmul(handle, p->how, is_double ? (void *)&g->alpha : (void *)&alpha, g->b, p->a,
                     g->a, p->b, is_double ? (void *)&g->beta : (void *)&beta, g->c, p->c, g->c,
                     p->c, &found.algo, room, found.workspaceSize, stream_handle(c->stream)),
      "the product");
}

static void *handle_make(void) {
  cublasLtHandle_t h;
  return cublasLtCreate(&h) == CUBLAS_STATUS_SUCCESS ? (void *)h : NULL;
}
static void handle_end(void *h) {
  cublasLtDestroy((cublasLtHandle_t)h);
}

int vendor_gemm(const OpCall *c, const Gemm *g) {
  Plan p = {};
  cublasLtHandle_t handle =
      (cublasLtHandle_t)device_keep(c->stream, DEVICE_KEEPS_GEMM, handle_make, handle_end);
  if (!handle) return err_set(MF_EUNSUPPORTED, "%s: cuBLASLt cannot be used", c->op->name);
  int rc = check(c, plan_make(&p, g), "the description of the product");
  if (!rc) rc = plan_run(c, handle, &p, g);
  if (p.wish) cublasLtMatmulPreferenceDestroy(p.wish);
  if (p.c) cublasLtMatrixLayoutDestroy(p.c);
  if (p.b) cublasLtMatrixLayoutDestroy(p.b);
  if (p.a) cublasLtMatrixLayoutDestroy(p.a);
  if (p.how) cublasLtMatmulDescDestroy(p.how);
  return rc;
}
