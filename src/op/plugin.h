/* Devices of another kind, with kernels of their own, from a library that is opened when the first
 * of them is asked for. It holds no copy of this one: what it needs comes in a PluginHost. */
#ifndef MF_PLUGIN_H
#define MF_PLUGIN_H
#include "device.h"
#include "op.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What this library lends; constant. */
typedef struct PluginHost {
  size_t size;             /* of this struct: the two were built from one source */
  const uint64_t *op_hash; /* likewise op_table_hash */
  const Op *ops;           /* op_table */
  int (*err_set)(int code, const char *format, ...);
  const char *(*err_text)(void);
  void *(*mem_zalloc)(size_t bytes);
  void (*mem_free)(void *p);
  const char *(*dtype_name)(DType t);
  double (*dtype_get_f64)(DType t, const void *p);
  int64_t (*dtype_get_i64)(DType t, const void *p);
  void (*dtype_set_f64)(DType t, void *p, double v);
  DType (*promote_views)(int n, const View *v);
  bool (*is_contiguous)(int ndim, const int64_t *shape, const int64_t *stride);
  bool (*is_dense)(int ndim, const int64_t *shape, const int64_t *stride);
  void (*broadcast_strides)(int out_ndim, const int64_t *out, int ndim, const int64_t *shape,
                            const int64_t *stride, int64_t *out_stride);
  void (*inputs_of_param)(const Op *op, const void *args, int p, int *first, int *n);
} PluginHost;

/* One kernel: of the op of that name. */
typedef struct PluginKernel {
  const char *op;
  DeviceKernel *launch;
} PluginKernel;

typedef struct Plugin {
  int n_devices;
  Device *(*device_create)(Context *c, int index, int slot, DeviceKernel *const *kernels);
  const PluginKernel *kernels;
  size_t n_kernels;
} Plugin;

/* What the library exports under the name "moonflow_plugin". 0, or a code with the error set. */
typedef int PluginOpen(const PluginHost *host, Plugin *out);

#ifdef __cplusplus
}
#else
/* The slot of the device of that name ("cpu", "cuda", "cuda:1"); `op` begins the error text. Opens
 * the plugin when it names a device of one. */
int plugin_find_device(Context *c, const char *op, const char *name, int *slot);
#endif

#endif
