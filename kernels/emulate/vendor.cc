/* The emulator's part of vendor.h: loops of the host, in the stream's turn. */
#include "vendor.h"

#include <algorithm>
#include <utility>
#include <vector>

template <class S, class T>
static void gemm(const Gemm &g) {
  for (int64_t z = 0; z < g.batch; z++) {
    const S *a = (const S *)g.a + z * g.a_batch, *b = (const S *)g.b + z * g.b_batch;
    S *c = (S *)g.c + z * g.c_batch;
    for (int64_t i = 0; i < g.m; i++)
      for (int64_t j = 0; j < g.n; j++) {
        T sum = T(0);
        for (int64_t l = 0; l < g.k; l++)
          sum += element<T>(a[g.a_turned ? l * g.lda + i : i * g.lda + l]) *
                 element<T>(b[g.b_turned ? j * g.ldb + l : l * g.ldb + j]);
        sum *= (T)g.alpha;
        if (g.beta != 0) sum += (T)g.beta * element<T>(c[i * g.ldc + j]);
        if (g.bias) sum += element<T>(((const S *)g.bias)[j]);
        c[i * g.ldc + j] = Stored<S>::of(sum);
      }
  }
}

int vendor_gemm(const OpCall *c, const Gemm *g) {
  Gemm copy = *g;
  cudaError_t e = emulate_enqueue(stream_handle(c->stream), [copy] {
    switch (copy.dtype) {
      case F16: gemm<Half, float>(copy); break;
      case BF16: gemm<Bfloat, float>(copy); break;
      case F64: gemm<double, double>(copy); break;
      default: gemm<float, float>(copy); break;
    }
  });
  return launch_result(c, e);
}

/* -- Sorting and running sums ------------------------------------------------------------------ */

int vendor_sort(const OpCall *c, int64_t lines, int64_t n, uint64_t *keys, int64_t *places) {
  cudaError_t e = emulate_enqueue(stream_handle(c->stream), [=] {
    std::vector<std::pair<uint64_t, int64_t>> line((size_t)n);
    for (int64_t l = 0; l < lines; l++) {
      for (int64_t i = 0; i < n; i++) line[(size_t)i] = {keys[l * n + i], places[l * n + i]};
      std::stable_sort(line.begin(), line.end(),
                       [](const auto &a, const auto &b) { return a.first < b.first; });
      for (int64_t i = 0; i < n; i++)
        keys[l * n + i] = line[(size_t)i].first, places[l * n + i] = line[(size_t)i].second;
    }
  });
  return launch_result(c, e);
}

int vendor_running_sum(const OpCall *c, int64_t n, int64_t *v) {
  cudaError_t e = emulate_enqueue(stream_handle(c->stream), [=] {
    for (int64_t i = 1; i < n; i++) v[i] += v[i - 1];
  });
  return launch_result(c, e);
}
