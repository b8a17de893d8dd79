/* See staging.cuh. */
#include "staging.cuh"

#include <string.h>

static constexpr size_t STAGING_CHUNK = (size_t)4 << 20, STAGING_LEAST = (size_t)256 << 10;

static bool is_pageable(const void *p) {
  cudaPointerAttributes a;
  if (cudaPointerGetAttributes(&a, p) != cudaSuccess) {
    cudaGetLastError();
    return true;
  }
  return a.type == cudaMemoryTypeUnregistered;
}

static cudaError_t staging_make(Staging *s) {
  cudaError_t e = cudaSuccess;
  for (int k = 0; k < 2 && e == cudaSuccess; k++) {
    if (!s->room[k]) e = cudaHostAlloc(&s->room[k], STAGING_CHUNK, cudaHostAllocMapped);
    if (e == cudaSuccess && !s->done[k])
      e = cudaEventCreateWithFlags(&s->done[k], cudaEventDisableTiming);
  }
  return e;
}

void staging_end(Staging *s) {
  for (int k = 0; k < 2; k++) {
    if (s->room[k]) cudaFreeHost(s->room[k]);
    if (s->done[k]) cudaEventDestroy(s->done[k]);
  }
}

static size_t chunk_at(size_t at, size_t bytes) {
  return bytes - at < STAGING_CHUNK ? bytes - at : STAGING_CHUNK;
}

static cudaError_t to_device(Staging *s, char *to, const char *from, size_t bytes, cudaStream_t t) {
  cudaError_t e = cudaSuccess;
  for (size_t at = 0; at < bytes && e == cudaSuccess; at += STAGING_CHUNK) {
    size_t n = chunk_at(at, bytes);
    int k = s->next ^= 1;
    e = cudaEventSynchronize(s->done[k]);
    if (e != cudaSuccess) break;
    memcpy(s->room[k], from + at, n);
    e = cudaMemcpyAsync(to + at, s->room[k], n, cudaMemcpyDefault, t);
    if (e == cudaSuccess) e = cudaEventRecord(s->done[k], t);
  }
  return e;
}

static cudaError_t to_host(Staging *s, char *to, const char *from, size_t bytes, cudaStream_t t) {
  cudaError_t e = cudaEventSynchronize(s->done[0]);
  if (e == cudaSuccess) e = cudaEventSynchronize(s->done[1]);
  for (size_t at = 0; at < bytes + STAGING_CHUNK && e == cudaSuccess; at += STAGING_CHUNK) {
    int k = s->next ^= 1;
    if (at < bytes) {
      e = cudaMemcpyAsync(s->room[k], from + at, chunk_at(at, bytes), cudaMemcpyDefault, t);
      if (e == cudaSuccess) e = cudaEventRecord(s->done[k], t);
    }
    if (e != cudaSuccess || !at) continue;
    size_t before = at - STAGING_CHUNK;
    e = cudaEventSynchronize(s->done[k ^ 1]);
    if (e == cudaSuccess) memcpy(to + before, s->room[k ^ 1], chunk_at(before, bytes));
  }
  return e;
}

cudaError_t staging_copy(Staging *s, void *to, const void *from, size_t bytes, cudaStream_t t) {
  bool from_host = bytes >= STAGING_LEAST && is_pageable(from);
  bool into_host = bytes >= STAGING_LEAST && !from_host && is_pageable(to);
  if ((!from_host && !into_host) || staging_make(s) != cudaSuccess) {
    cudaGetLastError();
    return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, t);
  }
  return from_host ? to_device(s, (char *)to, (const char *)from, bytes, t)
                   : to_host(s, (char *)to, (const char *)from, bytes, t);
}
