/* Sorted ids without repeats: see src/op/merge.c. Bytes: the ids, and 24 an id a digit of sorting.
 */
#include "kernel.cuh"
#include "vendor.h"

enum { MERGE_BLOCK = 256 };

struct MergeParams {
  const int64_t *ids;
  uint64_t *keys;
  int64_t *places, *sum, *out, *out_place;
  int64_t step, n, n_out;
  int op;
  DeviceError *error;
};

static __global__ void __launch_bounds__(MERGE_BLOCK) merge_keys(MergeParams p) {
  int64_t i = (int64_t)blockIdx.x * MERGE_BLOCK + threadIdx.x;
  if (i >= p.n) return;
  int64_t id = p.ids[i * p.step];
  if (id < 0) report_range(p.error, p.op, 0, id, i, 0, INT64_MAX);
  p.keys[i] = (uint64_t)id;
  p.places[i] = i;
}

/* 1 where another id begins than before. */
static __global__ void __launch_bounds__(MERGE_BLOCK) merge_count(MergeParams p) {
  int64_t i = (int64_t)blockIdx.x * MERGE_BLOCK + threadIdx.x;
  if (i < p.n) p.sum[i] = !i || p.keys[i] != p.keys[i - 1];
}

static __global__ void __launch_bounds__(MERGE_BLOCK) merge_put(MergeParams p) {
  int64_t i = (int64_t)blockIdx.x * MERGE_BLOCK + threadIdx.x;
  if (i >= p.n) return;
  int64_t at = p.sum[i] - 1, all = p.sum[p.n - 1];
  if (!i || p.keys[i] != p.keys[i - 1]) p.out[at] = (int64_t)p.keys[i];
  p.out_place[p.places[i]] = at;
  if (all + i < p.n_out) p.out[all + i] = (int64_t)p.keys[p.n - 1];
}

static int merge_ids_cuda(const OpCall *c) {
  const View *x = &c->in[0];
  MergeParams p = {};
  p.ids = (const int64_t *)x->data;
  p.step = x->stride[0], p.n = x->shape[0], p.n_out = c->out[0].shape[0];
  p.out = (int64_t *)c->out[0].data, p.out_place = (int64_t *)c->out[1].data;
  p.op = c->op->id, p.error = stream_error(c->stream);
  if (!p.n) return 0;
  char *room = (char *)kernel_scratch(c, (size_t)p.n * 24);
  if (!room) return MF_ENOMEM;
  p.keys = (uint64_t *)room;
  p.places = (int64_t *)room + p.n, p.sum = (int64_t *)room + 2 * p.n;
  unsigned grid = grid_for(p.n, MERGE_BLOCK);
  int rc = LAUNCH(c, merge_keys, grid, MERGE_BLOCK, 0, p);
  if (!rc) rc = vendor_sort(c, 1, p.n, p.keys, p.places);
  if (!rc) rc = LAUNCH(c, merge_count, grid, MERGE_BLOCK, 0, p);
  if (!rc) rc = vendor_running_sum(c, p.n, p.sum);
  return rc ? rc : LAUNCH(c, merge_put, grid, MERGE_BLOCK, 0, p);
}
KERNEL(merge_ids, merge_ids_cuda)
KERNEL(merge_ids_padded, merge_ids_cuda)
