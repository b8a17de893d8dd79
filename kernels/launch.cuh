/* The language, how an op gets its kernels, and how they are launched. The same text is compiled by
 * nvcc and, with the headers in emulate/, by a host compiler. */
#ifndef MF_LAUNCH_CUH
#define MF_LAUNCH_CUH
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <math.h>
#include <stdint.h>

extern "C" {
#include "op_args.h"
#include "op_ids.h"
#include "plugin.h"
#include "pointwise_class.h"
}

/* -- Kernels of ops ---------------------------------------------------------------------------- */

/* KERNEL(add, add_cuda): the launch of op add. The records lie one behind the other in a section of
 * the library, so that there is no list of them. */
#define KERNEL(name, function)                        \
  static int launch_##name(const OpCall *c) {         \
    size_t held = kernel_scratch_begin(c);            \
    int rc = function(c);                             \
    kernel_scratch_end(c, held);                      \
    return rc;                                        \
  }                                                   \
  static __attribute__((used, section("mf_kernels"))) \
  const PluginKernel kernel_##name = {#name, launch_##name};

/* The first error that a kernel has found in its data since the stream was waited for; in memory
 * that the host reads too. */
enum DeviceErrorKind {
  ERROR_RANGE,      /* value at position is not from low to high */
  ERROR_FEW,        /* a mask selects `value` elements of `high` */
  ERROR_WEIGHT,     /* the weight at position is not finite, or negative; value: its bits */
  ERROR_NO_WEIGHT,  /* all weights of row `position` are 0 */
  ERROR_FEW_WEIGHTS /* `high` weights of row `position` are above 0 for `value` draws */
};
struct DeviceError {
  int set, kind, op, input;
  int64_t value, position, low, high;
};

/* Of a stream: where work is launched, with its device made current. */
cudaStream_t stream_handle(Stream *s);
/* 0, or the code of what the last launch says. */
int launch_result(const OpCall *c, cudaError_t e);
/* Where the kernels of this launch put errors. */
DeviceError *stream_error(Stream *s);
/* Memory until the kernels of this call have run. NULL with the error set. */
void *kernel_scratch(const OpCall *c, size_t bytes);
/* Around a call, which may be part of another: it has launched all, and what it took may go. */
size_t kernel_scratch_begin(const OpCall *c);
void kernel_scratch_end(const OpCall *c, size_t held);
const Op *op_of(int id);

/* What a vendor's library keeps for a device: made on first use, ended with the device. */
enum DeviceKeeps { DEVICE_KEEPS_GEMM, DEVICE_KEEPS_CONV, DEVICE_KEEPS_PROGRAMS, DEVICE_KEEPS };
void *device_keep(Stream *s, DeviceKeeps what, void *(*make)(void), void (*end)(void *));

/* y = x, broadcast and converted; x may be one element of the host. Of copy.cu. */
int copy_launch(const OpCall *c, const View *x, const View *y);
/* The sum or mean of all of x, to the 0-d y. Of reduce.cu. */
int reduce_all(const OpCall *c, const View *x, const View *y, bool mean);
/* y (C) = the sums of x (N, C, ...) over all but its channels. Of batch_norm.cu. */
int channel_sums(const OpCall *c, const View *x, const View *y);
/* n whole numbers from the words of that key, as randint draws them. Of random.cu. */
int draw_whole(const OpCall *c, RngKey key, int64_t n, int64_t *to);
/* y = value everywhere. */
int copy_fill(const OpCall *c, const View *y, double value);

#ifdef MF_EMULATE
template <class... P, class... A>
static cudaError_t emulate_start(const char *name, dim3 grid, dim3 block, size_t shared,
                                 cudaStream_t s, void (*kernel)(P...), A... a) {
  return emulate_launch(name, grid, block, shared, s, [=] { kernel(a...); });
}
#define LAUNCH(call, kernel, grid, block, shared, ...)                     \
  launch_result(call, emulate_start((call)->op->name, grid, block, shared, \
                                    stream_handle((call)->stream), kernel, __VA_ARGS__))
#define SHARED_DYNAMIC(T, name) T *name = (T *)emulate_shared()
#define DEVICE_CHECK(holds, text) emulate_check(holds, text)
#else
/* clang-format takes the brackets for comparisons. */
/* clang-format off */
#define LAUNCH(call, kernel, grid, block, shared, ...)                                      \
  ((kernel)<<<(grid), (block), (shared), stream_handle((call)->stream)>>>(__VA_ARGS__),     \
   launch_result(call, cudaGetLastError()))
/* clang-format on */
#define SHARED_DYNAMIC(T, name)                              \
  extern __shared__ __align__(16) unsigned char mf_shared[]; \
  T *name = (T *)mf_shared
#define DEVICE_CHECK(holds, text) ((void)0)
#endif

static constexpr int WARP = 32;
static const unsigned ALL_LANES = 0xffffffffu;

/* How many blocks of `each` elements; 0 elements have none, for which nothing is launched. */
static inline unsigned grid_for(int64_t n, int64_t each) {
  int64_t blocks = (n + each - 1) / each;
  return (unsigned)(blocks < 0x7fffffff ? blocks : 0x7fffffff);
}

#endif
