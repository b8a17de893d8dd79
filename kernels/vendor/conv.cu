/* Convolutions by cuDNN's graph API. A convolution, and what follows it, is a graph of operations
 * on tensors that are known by number; the plan that the heuristics propose for it is kept for the
 * next one of its sizes. Where cuDNN has no plan for the whole, bias and relu are done behind it by
 * a kernel of ours. float32 uses the tensor cores' shorter factors only where MF_TF32=1 says so. */
#include <cudnn.h>

#include <map>
#include <mutex>
#include <new>
#include <string>
#include <vector>

#include "library.h"
#include "vendor.h"

static constexpr int64_t WORKSPACE = (int64_t)1 << 30;
enum { CONFIGS = 16 };

/* The numbers of tensors in a graph. */
enum { ID_X = 1, ID_W, ID_Y, ID_BIAS, ID_SUM, ID_PLAIN };

/* What is used of the library. */
struct Cudnn {
  decltype(cudnnCreate) *create;
  decltype(cudnnDestroy) *destroy;
  decltype(cudnnSetStream) *set_stream;
  decltype(cudnnGetErrorString) *error;
  decltype(cudnnBackendCreateDescriptor) *make;
  decltype(cudnnBackendDestroyDescriptor) *end;
  decltype(cudnnBackendSetAttribute) *set;
  decltype(cudnnBackendGetAttribute) *get;
  decltype(cudnnBackendFinalize) *finalize;
  decltype(cudnnBackendExecute) *execute;
};

typedef cudnnBackendDescriptor_t Desc;

struct ConvPlan {
  std::vector<Desc> parts; /* of which the plan is made, in the order of making */
  Desc plan;
  int64_t workspace;
  bool fused; /* with bias and relu */
};

struct ConvCache {
  Cudnn f;
  cudnnHandle_t handle;
  std::mutex lock;
  std::map<std::string, ConvPlan> plans;
};

/* All that a plan depends on; compared byte by byte. */
struct ConvKey {
  int64_t x[4], w[4], y[4], stride[2], padding[2], dilation[2];
  int32_t kind, dtype, last, act, biased, tf32;
};

static bool cudnn_open(Cudnn *f) {
  static const char *const names[] = {"libcudnn.so.9", "libcudnn.so", NULL};
  void *l = library_open(names);
  return library_find(l, "cudnnCreate", &f->create) &&
         library_find(l, "cudnnDestroy", &f->destroy) &&
         library_find(l, "cudnnSetStream", &f->set_stream) &&
         library_find(l, "cudnnGetErrorString", &f->error) &&
         library_find(l, "cudnnBackendCreateDescriptor", &f->make) &&
         library_find(l, "cudnnBackendDestroyDescriptor", &f->end) &&
         library_find(l, "cudnnBackendSetAttribute", &f->set) &&
         library_find(l, "cudnnBackendGetAttribute", &f->get) &&
         library_find(l, "cudnnBackendFinalize", &f->finalize) &&
         library_find(l, "cudnnBackendExecute", &f->execute);
}

/* -- Building ---------------------------------------------------------------------------------- */

/* A graph while it is built: after a failure nothing more is done. */
struct Build {
  const Cudnn *f;
  ConvPlan *plan;
  cudnnStatus_t status;

  Desc make(cudnnBackendDescriptorType_t type) {
    Desc d = NULL;
    if (!status) status = f->make(type, &d);
    if (d) plan->parts.push_back(d);
    return d;
  }
  template <class V>
  void set(Desc d, cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type,
           const V &value) {
    if (!status) status = f->set(d, name, type, 1, &value);
  }
  void set_all(Desc d, cudnnBackendAttributeName_t name, int n, const int64_t *values) {
    if (!status) status = f->set(d, name, CUDNN_TYPE_INT64, n, values);
  }
  void part(Desc d, cudnnBackendAttributeName_t name, Desc of) {
    set(d, name, CUDNN_TYPE_BACKEND_DESCRIPTOR, of);
  }
  void finish(Desc d) {
    if (!status) status = f->finalize(d);
  }
};

static cudnnDataType_t type_of(int dtype) {
  return dtype == F64    ? CUDNN_DATA_DOUBLE
         : dtype == F16  ? CUDNN_DATA_HALF
         : dtype == BF16 ? CUDNN_DATA_BFLOAT16
                         : CUDNN_DATA_FLOAT;
}

static Desc tensor(Build *b, int64_t id, cudnnDataType_t type, const int64_t *shape, bool last,
                   bool inside) {
  static const int plain[] = {3, 2, 1, 0}, channels_last[] = {1, 3, 2, 0};
  int64_t stride[4], step = 1;
  for (int k = 0; k < 4; k++) {
    int d = last ? channels_last[k] : plain[k];
    stride[d] = step;
    step *= shape[d];
  }
  Desc t = b->make(CUDNN_BACKEND_TENSOR_DESCRIPTOR);
  b->set(t, CUDNN_ATTR_TENSOR_DATA_TYPE, CUDNN_TYPE_DATA_TYPE, type);
  b->set_all(t, CUDNN_ATTR_TENSOR_DIMENSIONS, 4, shape);
  b->set_all(t, CUDNN_ATTR_TENSOR_STRIDES, 4, stride);
  b->set(t, CUDNN_ATTR_TENSOR_UNIQUE_ID, CUDNN_TYPE_INT64, id);
  b->set(t, CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, CUDNN_TYPE_INT64, (int64_t)16);
  if (inside) b->set(t, CUDNN_ATTR_TENSOR_IS_VIRTUAL, CUDNN_TYPE_BOOLEAN, true);
  b->finish(t);
  return t;
}

static Desc window(Build *b, const Conv *v) {
  Desc d = b->make(CUDNN_BACKEND_CONVOLUTION_DESCRIPTOR);
  cudnnDataType_t compute = v->dtype == F64 ? CUDNN_DATA_DOUBLE : CUDNN_DATA_FLOAT;
  b->set(d, CUDNN_ATTR_CONVOLUTION_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, compute);
  b->set(d, CUDNN_ATTR_CONVOLUTION_CONV_MODE, CUDNN_TYPE_CONVOLUTION_MODE, CUDNN_CROSS_CORRELATION);
  b->set(d, CUDNN_ATTR_CONVOLUTION_SPATIAL_DIMS, CUDNN_TYPE_INT64, (int64_t)2);
  b->set_all(d, CUDNN_ATTR_CONVOLUTION_PRE_PADDINGS, 2, v->padding);
  b->set_all(d, CUDNN_ATTR_CONVOLUTION_POST_PADDINGS, 2, v->padding);
  b->set_all(d, CUDNN_ATTR_CONVOLUTION_DILATIONS, 2, v->dilation);
  b->set_all(d, CUDNN_ATTR_CONVOLUTION_FILTER_STRIDES, 2, v->stride);
  b->finish(d);
  return d;
}

/* The names of the three kinds' attributes. */
struct ConvNames {
  cudnnBackendDescriptorType_t type;
  cudnnBackendAttributeName_t x, w, y, window, alpha, beta;
};
static const ConvNames conv_names[] = {
    {CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_DATA_DESCRIPTOR,
     CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DX, CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_W,
     CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DY,
     CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_CONV_DESC,
     CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_ALPHA,
     CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_BETA},
    {CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_FILTER_DESCRIPTOR,
     CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_X, CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DW,
     CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DY,
     CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_CONV_DESC,
     CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_ALPHA,
     CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_BETA},
    {CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR,
     CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_X, CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_W,
     CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_Y, CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_CONV_DESC,
     CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_ALPHA,
     CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_BETA}};

static Desc convolution(Build *b, const Conv *v, Desc x, Desc w, Desc y) {
  const ConvNames *n = &conv_names[v->kind];
  Desc how = window(b, v), d = b->make(n->type);
  b->part(d, n->x, x);
  b->part(d, n->w, w);
  b->part(d, n->y, y);
  b->part(d, n->window, how);
  if (v->dtype == F64) {
    b->set(d, n->alpha, CUDNN_TYPE_DOUBLE, 1.0);
    b->set(d, n->beta, CUDNN_TYPE_DOUBLE, 0.0);
  } else {
    b->set(d, n->alpha, CUDNN_TYPE_FLOAT, 1.0f);
    b->set(d, n->beta, CUDNN_TYPE_FLOAT, 0.0f);
  }
  b->finish(d);
  return d;
}

/* y = mode(x, with). */
static Desc pointwise(Build *b, cudnnPointwiseMode_t mode, Desc x, Desc with, Desc y) {
  Desc how = b->make(CUDNN_BACKEND_POINTWISE_DESCRIPTOR);
  b->set(how, CUDNN_ATTR_POINTWISE_MODE, CUDNN_TYPE_POINTWISE_MODE, mode);
  b->set(how, CUDNN_ATTR_POINTWISE_MATH_PREC, CUDNN_TYPE_DATA_TYPE, CUDNN_DATA_FLOAT);
  b->finish(how);
  Desc d = b->make(CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR);
  b->part(d, CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, how);
  b->part(d, CUDNN_ATTR_OPERATION_POINTWISE_XDESC, x);
  if (with) b->part(d, CUDNN_ATTR_OPERATION_POINTWISE_BDESC, with);
  b->part(d, CUDNN_ATTR_OPERATION_POINTWISE_YDESC, y);
  b->finish(d);
  return d;
}

static Desc graph(Build *b, const Conv *v, cudnnHandle_t handle) {
  cudnnDataType_t type = type_of(v->dtype);
  Desc ops[3];
  int n = 0;
  bool bias = b->plan->fused && v->bias, relu = b->plan->fused && v->act == VENDOR_ACT_RELU;
  Desc x = tensor(b, ID_X, type, v->x_shape, v->last, false);
  Desc w = tensor(b, ID_W, type, v->w_shape, v->last, false);
  Desc y = tensor(b, ID_Y, type, v->y_shape, v->last, false), to = y;
  if (bias || relu) to = tensor(b, ID_PLAIN, CUDNN_DATA_FLOAT, v->y_shape, v->last, true);
  ops[n++] = convolution(b, v, x, w, to);
  if (bias) {
    const int64_t shape[4] = {1, v->y_shape[1], 1, 1};
    Desc with = tensor(b, ID_BIAS, type, shape, v->last, false);
    Desc sum = relu ? tensor(b, ID_SUM, CUDNN_DATA_FLOAT, v->y_shape, v->last, true) : y;
    ops[n++] = pointwise(b, CUDNN_POINTWISE_ADD, to, with, sum);
    to = sum;
  }
  if (relu) ops[n++] = pointwise(b, CUDNN_POINTWISE_RELU_FWD, to, NULL, y);
  Desc g = b->make(CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR);
  b->set(g, CUDNN_ATTR_OPERATIONGRAPH_HANDLE, CUDNN_TYPE_HANDLE, handle);
  if (!b->status)
    b->status = b->f->set(g, CUDNN_ATTR_OPERATIONGRAPH_OPS, CUDNN_TYPE_BACKEND_DESCRIPTOR, n, ops);
  b->finish(g);
  return g;
}

/* -- Choosing ---------------------------------------------------------------------------------- */

/* Whether the engine of this configuration shortens float32. */
static bool shortens(Build *b, Desc config) {
  Desc engine = NULL;
  cudnnBackendNumericalNote_t notes[CUDNN_NUMERICAL_NOTE_TYPE_COUNT];
  int64_t n = 0;
  bool found = false;
  if (b->f->make(CUDNN_BACKEND_ENGINE_DESCRIPTOR, &engine)) return true;
  cudnnStatus_t s =
      b->f->get(config, CUDNN_ATTR_ENGINECFG_ENGINE, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &n, &engine);
  if (!s)
    s = b->f->get(engine, CUDNN_ATTR_ENGINE_NUMERICAL_NOTE, CUDNN_TYPE_NUMERICAL_NOTE,
                  CUDNN_NUMERICAL_NOTE_TYPE_COUNT, &n, notes);
  for (int64_t k = 0; k < n && !s; k++)
    found |= notes[k] == CUDNN_NUMERICAL_NOTE_TENSOR_CORE ||
             notes[k] == CUDNN_NUMERICAL_NOTE_DOWN_CONVERT_INPUTS;
  b->f->end(engine);
  return found;
}

/* A plan of this configuration, within the workspace. */
static bool try_config(Build *b, cudnnHandle_t handle, Desc config) {
  Desc d = NULL;
  int64_t n = 0, bytes = 0;
  if (b->f->make(CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR, &d)) return false;
  cudnnStatus_t s = b->f->set(d, CUDNN_ATTR_EXECUTION_PLAN_HANDLE, CUDNN_TYPE_HANDLE, 1, &handle);
  if (!s)
    s = b->f->set(d, CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1,
                  &config);
  if (!s) s = b->f->finalize(d);
  if (!s)
    s = b->f->get(d, CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE, CUDNN_TYPE_INT64, 1, &n, &bytes);
  if (s || bytes > WORKSPACE) {
    b->f->end(d);
    return false;
  }
  b->plan->parts.push_back(d);
  b->plan->plan = d;
  b->plan->workspace = bytes;
  return true;
}

static bool choose(Build *b, const Conv *v, cudnnHandle_t handle, Desc g,
                   cudnnBackendHeurMode_t mode) {
  Desc configs[CONFIGS], heuristics = b->make(CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR);
  int64_t n = 0;
  b->part(heuristics, CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, g);
  b->set(heuristics, CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_TYPE_HEUR_MODE, mode);
  b->finish(heuristics);
  for (int k = 0; k < CONFIGS; k++) configs[k] = b->make(CUDNN_BACKEND_ENGINECFG_DESCRIPTOR);
  if (!b->status)
    b->status = b->f->get(heuristics, CUDNN_ATTR_ENGINEHEUR_RESULTS, CUDNN_TYPE_BACKEND_DESCRIPTOR,
                          CONFIGS, &n, configs);
  for (int64_t k = 0; k < n && !b->status; k++) {
    if (v->dtype == F32 && !vendor_tf32() && shortens(b, configs[k])) continue;
    if (try_config(b, handle, configs[k])) return true;
  }
  return false;
}

static void plan_end(const Cudnn *f, ConvPlan *p) {
  for (size_t k = p->parts.size(); k > 0; k--) f->end(p->parts[k - 1]);
  p->parts.clear();
  p->plan = NULL;
}

/* With bias and relu where there is a plan for all, else without. */
static int plan_make(const OpCall *c, ConvCache *k, const Conv *v, ConvPlan *p) {
  static const cudnnBackendHeurMode_t modes[] = {CUDNN_HEUR_MODE_A, CUDNN_HEUR_MODE_FALLBACK};
  cudnnStatus_t status = CUDNN_STATUS_SUCCESS;
  bool follows = (v->bias || v->act != VENDOR_ACT_NONE) && v->dtype != F64;
  for (int fused = follows; fused >= 0; fused--)
    for (cudnnBackendHeurMode_t mode : modes) {
      Build b = {&k->f, p, CUDNN_STATUS_SUCCESS};
      p->fused = fused;
      Desc g = graph(&b, v, k->handle);
      if (choose(&b, v, k->handle, g, mode)) return 0;
      status = b.status;
      plan_end(&k->f, p);
    }
  return err_set(MF_EUNSUPPORTED, "%s: cuDNN has no plan for this convolution%s%s", c->op->name,
                 status ? ": " : "", status ? k->f.error(status) : "");
}

/* -- Running ----------------------------------------------------------------------------------- */

static int plan_run(const OpCall *c, ConvCache *k, const ConvPlan *p, const Conv *v) {
  Desc pack = NULL;
  int64_t ids[4] = {ID_X, ID_W, ID_Y, ID_BIAS};
  void *data[4] = {v->x, v->w, v->y, (void *)v->bias}, *room = NULL;
  int n = p->fused && v->bias ? 4 : 3;
  if (p->workspace && !(room = kernel_scratch(c, (size_t)p->workspace))) return MF_ENOMEM;
  cudnnStatus_t s = k->f.make(CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR, &pack);
  if (!s) s = k->f.set(pack, CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR, n, data);
  if (!s) s = k->f.set(pack, CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, CUDNN_TYPE_INT64, n, ids);
  if (!s) s = k->f.set(pack, CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR, 1, &room);
  if (!s) s = k->f.finalize(pack);
  if (!s) s = k->f.set_stream(k->handle, stream_handle(c->stream));
  if (!s) s = k->f.execute(k->handle, p->plan, pack);
  if (pack) k->f.end(pack);
  if (s) return err_set(MF_EUNSUPPORTED, "%s: cuDNN: %s", c->op->name, k->f.error(s));
  if (p->fused || (!v->bias && v->act == VENDOR_ACT_NONE)) return 0;
  return bias_launch(c, v);
}

static void *cache_make(void) {
  ConvCache *k = new (std::nothrow) ConvCache();
  if (k && cudnn_open(&k->f) && !k->f.create(&k->handle)) return k;
  delete k;
  return NULL;
}
static void cache_end(void *cache) {
  ConvCache *k = (ConvCache *)cache;
  for (auto &entry : k->plans) plan_end(&k->f, &entry.second);
  k->f.destroy(k->handle);
  delete k;
}

static ConvKey key_of(const Conv *v) {
  ConvKey k;
  memset(&k, 0, sizeof k);
  memcpy(k.x, v->x_shape, sizeof k.x);
  memcpy(k.w, v->w_shape, sizeof k.w);
  memcpy(k.y, v->y_shape, sizeof k.y);
  memcpy(k.stride, v->stride, sizeof k.stride);
  memcpy(k.padding, v->padding, sizeof k.padding);
  memcpy(k.dilation, v->dilation, sizeof k.dilation);
  k.kind = v->kind, k.dtype = v->dtype, k.last = v->last, k.act = v->act;
  k.biased = v->bias != NULL, k.tf32 = vendor_tf32();
  return k;
}

int vendor_conv(const OpCall *c, const Conv *v) {
  ConvCache *k = (ConvCache *)device_keep(c->stream, DEVICE_KEEPS_CONV, cache_make, cache_end);
  if (!k)
    return err_set(MF_EUNSUPPORTED,
                   "%s: cuDNN 9 cannot be used (libcudnn.so.9), which convolutions on %s need",
                   c->op->name, c->stream->device->name);
  ConvKey key = key_of(v);
  std::string name((const char *)&key, sizeof key);
  std::lock_guard<std::mutex> lock(k->lock);
  auto found = k->plans.find(name);
  if (found == k->plans.end()) {
    ConvPlan p = {};
    int rc = plan_make(c, k, v, &p);
    if (rc) return rc;
    found = k->plans.emplace(std::move(name), std::move(p)).first;
  }
  return plan_run(c, k, &found->second, v);
}
