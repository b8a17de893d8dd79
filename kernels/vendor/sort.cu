/* Sorting and running sums by CUB. */
#include <cub/device/device_radix_sort.cuh>
#include <cub/device/device_scan.cuh>
#include <cub/device/device_segmented_sort.cuh>

#include <thrust/iterator/counting_iterator.h>
#include <thrust/iterator/transform_iterator.h>

#include "vendor.h"

/* Where segment `line` of n begins. */
struct Begins {
  int64_t n;
  __host__ __device__ int64_t operator()(int64_t line) const {
    return line * n;
  }
};

static int sort_lines(const OpCall *c, int64_t lines, int64_t n, cub::DoubleBuffer<uint64_t> *keys,
                      cub::DoubleBuffer<int64_t> *places, void *room, size_t *bytes) {
  cudaStream_t s = stream_handle(c->stream);
  if (lines == 1)
    return launch_result(
        c, cub::DeviceRadixSort::SortPairs(room, *bytes, *keys, *places, n, 0, 64, s));
  auto count = thrust::make_counting_iterator<int64_t>(0);
  auto begins = thrust::make_transform_iterator(count, Begins{n});
  return launch_result(
      c, cub::DeviceSegmentedSort::StableSortPairs(room, *bytes, *keys, *places, lines * n, lines,
                                                   begins, begins + 1, s));
}

int vendor_sort(const OpCall *c, int64_t lines, int64_t n, uint64_t *keys, int64_t *places) {
  size_t bytes = 0, each = scratch_aligned((size_t)(lines * n) * 8);
  if (!lines || n < 2) return 0;
  char *other = (char *)kernel_scratch(c, 2 * each);
  if (!other) return MF_ENOMEM;
  cub::DoubleBuffer<uint64_t> k(keys, (uint64_t *)other);
  cub::DoubleBuffer<int64_t> p(places, (int64_t *)(other + each));
  int rc = sort_lines(c, lines, n, &k, &p, NULL, &bytes);
  void *room = rc ? NULL : kernel_scratch(c, bytes ? bytes : 1);
  if (rc || !room) return rc ? rc : MF_ENOMEM;
  rc = sort_lines(c, lines, n, &k, &p, room, &bytes);
  cudaStream_t s = stream_handle(c->stream);
  size_t all = (size_t)(lines * n) * 8;
  if (!rc && k.Current() != keys)
    rc = launch_result(c, cudaMemcpyAsync(keys, k.Current(), all, cudaMemcpyDefault, s));
  if (!rc && p.Current() != places)
    rc = launch_result(c, cudaMemcpyAsync(places, p.Current(), all, cudaMemcpyDefault, s));
  return rc;
}

int vendor_running_sum(const OpCall *c, int64_t n, int64_t *v) {
  size_t bytes = 0;
  cudaStream_t s = stream_handle(c->stream);
  int rc = launch_result(c, cub::DeviceScan::InclusiveSum(NULL, bytes, v, v, n, s));
  void *room = rc ? NULL : kernel_scratch(c, bytes ? bytes : 1);
  if (rc || !room) return rc ? rc : MF_ENOMEM;
  return launch_result(c, cub::DeviceScan::InclusiveSum(room, bytes, v, v, n, s));
}
