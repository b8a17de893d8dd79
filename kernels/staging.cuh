/* Copies between the device and ordinary memory of the host, through two pinned buffers by turns:
 * the device copies one while the host fills or empties the other. */
#ifndef MF_STAGING_CUH
#define MF_STAGING_CUH
#include <cuda_runtime.h>

struct Staging {
  void *room[2];
  cudaEvent_t done[2]; /* the device is through with the buffer */
  int next;
};

/* As cudaMemcpyAsync. `s` is of the stream and gets its buffers when it needs them first; what goes
 * to the host's memory is there on return. */
cudaError_t staging_copy(Staging *s, void *to, const void *from, size_t bytes, cudaStream_t stream);
void staging_end(Staging *s);

#endif
