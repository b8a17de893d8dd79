/* Matrix products by cuBLASLt. It counts in columns, where a matrix in rows is its transpose: c' =
 * b' a', so that the operands change places and nothing is copied. float16, bfloat16 and float32
 * are added up in float32, float32 with the tensor cores' shorter factors where MF_TF32=1 says so.
 * What was found for a product is kept for the next one of its sizes. */
#include <cublasLt.h>

#include <map>
#include <mutex>
#include <new>
#include <string>

#include "vendor.h"

static constexpr size_t WORKSPACE = (size_t)32 << 20;

/* All that the choice of an algorithm depends on; compared byte by byte. */
struct GemmKey {
  int64_t m, n, k, batch, lda, ldb, ldc, a_batch, b_batch, c_batch;
  int32_t dtype, c_dtype, act, turned, biased, a_aligned, b_aligned, c_aligned;
};

struct GemmPlan {
  cublasLtMatmulDesc_t how;
  cublasLtMatrixLayout_t a, b, c;
  cublasLtMatmulAlgo_t algorithm;
  size_t workspace;
};

struct GemmCache {
  cublasLtHandle_t handle;
  std::mutex lock;
  std::map<std::string, GemmPlan> plans;
};

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

static cublasComputeType_t compute_of(int dtype) {
  if (dtype == F64) return CUBLAS_COMPUTE_64F;
  return dtype == F32 && vendor_tf32() ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F;
}

static int32_t alignment(const void *p) {
  int32_t a = 256;
  while ((uintptr_t)p % (uintptr_t)a) a /= 2;
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

static cublasLtEpilogue_t epilogue_of(const Gemm *g) {
  switch (g->act) {
    case VENDOR_ACT_RELU: return g->bias ? CUBLASLT_EPILOGUE_RELU_BIAS : CUBLASLT_EPILOGUE_RELU;
    case VENDOR_ACT_GELU_TANH:
      return g->bias ? CUBLASLT_EPILOGUE_GELU_BIAS : CUBLASLT_EPILOGUE_GELU;
    default: return g->bias ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT;
  }
}

template <class V>
static cublasStatus_t describe(const GemmPlan *p, cublasLtMatmulDescAttributes_t what,
                               const V &value) {
  return cublasLtMatmulDescSetAttribute(p->how, what, &value, sizeof value);
}

static cublasStatus_t plan_make(GemmPlan *p, const Gemm *g) {
  bool is_double = g->dtype == F64;
  cublasOperation_t turned = CUBLAS_OP_T, plain = CUBLAS_OP_N;
  cublasStatus_t s =
      cublasLtMatmulDescCreate(&p->how, compute_of(g->dtype), is_double ? CUDA_R_64F : CUDA_R_32F);
  if (!s) s = describe(p, CUBLASLT_MATMUL_DESC_TRANSA, g->b_turned ? turned : plain);
  if (!s) s = describe(p, CUBLASLT_MATMUL_DESC_TRANSB, g->a_turned ? turned : plain);
  if (!s) s = describe(p, CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue_of(g));
  if (!s && g->bias) s = describe(p, CUBLASLT_MATMUL_DESC_BIAS_POINTER, g->bias);
  if (!s && g->bias) s = describe(p, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, type_of(g->dtype));
  if (!s)
    s = layout(&p->a, g->dtype, g->b_turned ? g->k : g->n, g->b_turned ? g->n : g->k, g->ldb,
               g->batch, g->b_batch);
  if (!s)
    s = layout(&p->b, g->dtype, g->a_turned ? g->m : g->k, g->a_turned ? g->k : g->m, g->lda,
               g->batch, g->a_batch);
  return s ? s : layout(&p->c, g->c_dtype, g->n, g->m, g->ldc, g->batch, g->c_batch);
}

template <class V>
static cublasStatus_t wish(cublasLtMatmulPreference_t w, cublasLtMatmulPreferenceAttributes_t what,
                           const V &value) {
  return cublasLtMatmulPreferenceSetAttribute(w, what, &value, sizeof value);
}

static cublasStatus_t plan_wish(cublasLtMatmulPreference_t w, const GemmKey &key) {
  uint32_t a = (uint32_t)key.b_aligned, b = (uint32_t)key.a_aligned, c = (uint32_t)key.c_aligned;
  cublasStatus_t s = wish(w, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, WORKSPACE);
  if (!s) s = wish(w, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, a);
  if (!s) s = wish(w, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, b);
  if (!s) s = wish(w, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, c);
  return s ? s : wish(w, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, c);
}

static int plan_choose(const OpCall *c, cublasLtHandle_t handle, GemmPlan *p, const GemmKey &key) {
  cublasLtMatmulHeuristicResult_t found;
  cublasLtMatmulPreference_t w = NULL;
  int n = 0;
  int rc = check(c, cublasLtMatmulPreferenceCreate(&w), "a preference");
  if (!rc) rc = check(c, plan_wish(w, key), "a preference");
  if (!rc)
    rc = check(
        c, cublasLtMatmulAlgoGetHeuristic(handle, p->how, p->a, p->b, p->c, p->c, w, 1, &found, &n),
        "the choice of an algorithm");
  if (!rc && !n)
    rc = err_set(MF_EUNSUPPORTED, "%s: cuBLASLt knows no algorithm for this product", c->op->name);
  if (!rc) p->algorithm = found.algo, p->workspace = found.workspaceSize;
  if (w) cublasLtMatmulPreferenceDestroy(w);
  return rc;
}

static void plan_end(GemmPlan *p) {
  if (p->c) cublasLtMatrixLayoutDestroy(p->c);
  if (p->b) cublasLtMatrixLayoutDestroy(p->b);
  if (p->a) cublasLtMatrixLayoutDestroy(p->a);
  if (p->how) cublasLtMatmulDescDestroy(p->how);
}

static int plan_run(const OpCall *c, cublasLtHandle_t handle, const GemmPlan *p, const Gemm *g) {
  float alpha = (float)g->alpha, beta = (float)g->beta;
  bool is_double = g->dtype == F64;
  void *room = NULL;
  if (p->workspace && !(room = kernel_scratch(c, p->workspace))) return MF_ENOMEM;
  if (g->bias) {
    int rc = check(c, describe(p, CUBLASLT_MATMUL_DESC_BIAS_POINTER, g->bias), "the bias");
    if (rc) return rc;
  }
  return check(
      c,
      cublasLtMatmul(handle, p->how, is_double ? (void *)&g->alpha : (void *)&alpha, g->b, p->a,
                     g->a, p->b, is_double ? (void *)&g->beta : (void *)&beta, g->c, p->c, g->c,
                     p->c, &p->algorithm, room, p->workspace, stream_handle(c->stream)),
      "the product");
}

static void *cache_make(void) {
  GemmCache *k = new (std::nothrow) GemmCache();
  if (k && cublasLtCreate(&k->handle) == CUBLAS_STATUS_SUCCESS) return k;
  delete k;
  return NULL;
}
static void cache_end(void *cache) {
  GemmCache *k = (GemmCache *)cache;
  for (auto &entry : k->plans) plan_end(&entry.second);
  cublasLtDestroy(k->handle);
  delete k;
}

static GemmKey key_of(const Gemm *g) {
  GemmKey k;
  memset(&k, 0, sizeof k);
  k.m = g->m, k.n = g->n, k.k = g->k, k.batch = g->batch;
  k.lda = g->lda, k.ldb = g->ldb, k.ldc = g->ldc;
  k.a_batch = g->a_batch, k.b_batch = g->b_batch, k.c_batch = g->c_batch;
  k.dtype = g->dtype, k.c_dtype = g->c_dtype, k.act = g->act;
  k.turned = g->a_turned + 2 * g->b_turned, k.biased = g->bias != NULL;
  k.a_aligned = alignment(g->a), k.b_aligned = alignment(g->b), k.c_aligned = alignment(g->c);
  return k;
}

bool vendor_gemm_acts(int dtype, VendorAct act) {
  return dtype != F64 && (act == VENDOR_ACT_RELU || act == VENDOR_ACT_GELU_TANH);
}

int vendor_gemm(const OpCall *c, const Gemm *g) {
  GemmCache *k = (GemmCache *)device_keep(c->stream, DEVICE_KEEPS_GEMM, cache_make, cache_end);
  if (!k) return err_set(MF_EUNSUPPORTED, "%s: cuBLASLt cannot be used", c->op->name);
  GemmKey key = key_of(g);
  std::string name((const char *)&key, sizeof key);
  std::lock_guard<std::mutex> lock(k->lock);
  auto found = k->plans.find(name);
  if (found != k->plans.end()) return plan_run(c, k->handle, &found->second, g);
  GemmPlan p = {};
  int rc = check(c, plan_make(&p, g), "the description of the product");
  if (!rc) rc = plan_choose(c, k->handle, &p, key);
  if (!rc) rc = plan_run(c, k->handle, &p, g);
  if (rc) plan_end(&p);
  else k->plans.emplace(std::move(name), p);
  return rc;
}
