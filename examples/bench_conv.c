/* The convolutions of a network alone: what a step costs at least where oneDNN computes them.
 *
 *   bench_conv THREADS [nhwc] < shapes
 *
 * Each line of the input describes one: batch, input channels, height, width, output channels,
 * kernel height and width, stride, padding, whether the input's gradient is needed, how often it
 * occurs. Forward, input's and weights' gradients are timed in the layouts that oneDNN likes best,
 * blocked ones (with `nhwc`: images with channels innermost), without any reorder: the least of
 * several runs. Prints the sum over all lines in seconds. */
#include <dnnl.h>
#include <omp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef struct Conv {
  long n, ic, ih, iw, oc, kh, kw, stride, padding, need_input, times;
} Conv;

typedef enum Kind { FORWARD, INPUT, WEIGHT } Kind;

static dnnl_engine_t engine;
static dnnl_stream_t stream;

static void want(dnnl_status_t s, const char *what) {
  if (s == dnnl_success) return;
  fprintf(stderr, "bench_conv: %s failed with status %d\n", what, (int)s);
  exit(1);
}

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

#if DNNL_VERSION_MAJOR >= 3
typedef dnnl_memory_desc_t Layout;
typedef const_dnnl_memory_desc_t LayoutRef;
static void layout(Layout *l, const dnnl_dims_t dims, dnnl_format_tag_t tag) {
  want(dnnl_memory_desc_create_with_tag(l, 4, dims, dnnl_f32, tag), "layout");
}
static LayoutRef ref(const Layout *l) {
  return *l;
}
static dnnl_primitive_desc_t describe(Kind kind, const Layout l[3], const dnnl_dims_t strides,
                                      const dnnl_dims_t padding, dnnl_primitive_desc_t hint) {
  static const dnnl_dims_t none;
  const dnnl_alg_kind_t alg = dnnl_convolution_direct;
  dnnl_primitive_desc_t pd = NULL;
  if (kind == FORWARD)
    want(dnnl_convolution_forward_primitive_desc_create(&pd, engine, dnnl_forward_training, alg,
                                                        l[0], l[1], NULL, l[2], strides, none,
                                                        padding, padding, NULL),
         "forward");
  else if (kind == INPUT)
    want(dnnl_convolution_backward_data_primitive_desc_create(
             &pd, engine, alg, l[0], l[1], l[2], strides, none, padding, padding, hint, NULL),
         "input's gradient");
  else
    want(dnnl_convolution_backward_weights_primitive_desc_create(
             &pd, engine, alg, l[0], l[1], NULL, l[2], strides, none, padding, padding, hint, NULL),
         "weights' gradient");
  return pd;
}
#else
typedef dnnl_memory_desc_t Layout;
typedef const dnnl_memory_desc_t *LayoutRef;
static void layout(Layout *l, const dnnl_dims_t dims, dnnl_format_tag_t tag) {
  want(dnnl_memory_desc_init_by_tag(l, 4, dims, dnnl_f32, tag), "layout");
}
static LayoutRef ref(const Layout *l) {
  return l;
}
static dnnl_primitive_desc_t describe(Kind kind, const Layout l[3], const dnnl_dims_t strides,
                                      const dnnl_dims_t padding, dnnl_primitive_desc_t hint) {
  const dnnl_alg_kind_t alg = dnnl_convolution_direct;
  dnnl_convolution_desc_t d;
  dnnl_primitive_desc_t pd = NULL;
  if (kind == FORWARD)
    want(dnnl_convolution_forward_desc_init(&d, dnnl_forward_training, alg, ref(&l[0]), ref(&l[1]),
                                            NULL, ref(&l[2]), strides, padding, padding),
         "forward");
  else if (kind == INPUT)
    want(dnnl_convolution_backward_data_desc_init(&d, alg, ref(&l[0]), ref(&l[1]), ref(&l[2]),
                                                  strides, padding, padding),
         "input's gradient");
  else
    want(dnnl_convolution_backward_weights_desc_init(&d, alg, ref(&l[0]), ref(&l[1]), NULL,
                                                     ref(&l[2]), strides, padding, padding),
         "weights' gradient");
  want(dnnl_primitive_desc_create(&pd, &d, NULL, engine, hint), "primitive");
  return pd;
}
#endif

/* Memory of a layout, filled: what is not zero takes as long as data does. */
static dnnl_memory_t fill(LayoutRef l) {
  dnnl_memory_t m;
  void *data;
  want(dnnl_memory_create(&m, l, engine, DNNL_MEMORY_ALLOCATE), "memory");
  want(dnnl_memory_get_data_handle(m, &data), "memory");
  size_t n = dnnl_memory_desc_get_size(l) / sizeof(float);
  for (size_t i = 0; i < n; i++) ((float *)data)[i] = (float)(i % 61) / 61.0f - 0.5f;
  return m;
}

/* The least of several runs, in seconds. */
static double measure(Kind kind, dnnl_primitive_desc_t pd) {
  enum { RUNS = 5 };
  static const int args[3][3] = {{DNNL_ARG_SRC, DNNL_ARG_WEIGHTS, DNNL_ARG_DST},
                                 {DNNL_ARG_DIFF_SRC, DNNL_ARG_WEIGHTS, DNNL_ARG_DIFF_DST},
                                 {DNNL_ARG_SRC, DNNL_ARG_DIFF_WEIGHTS, DNNL_ARG_DIFF_DST}};
  static const dnnl_query_t queries[3][3] = {
      {dnnl_query_src_md, dnnl_query_weights_md, dnnl_query_dst_md},
      {dnnl_query_diff_src_md, dnnl_query_weights_md, dnnl_query_diff_dst_md},
      {dnnl_query_src_md, dnnl_query_diff_weights_md, dnnl_query_diff_dst_md}};
  dnnl_exec_arg_t a[3];
  dnnl_primitive_t p;
  double least = 1e30;
  want(dnnl_primitive_create(&p, pd), "primitive");
  for (int k = 0; k < 3; k++)
    a[k] = (dnnl_exec_arg_t){args[kind][k],
                             fill(dnnl_primitive_desc_query_md(pd, queries[kind][k], 0))};
  for (int i = 0; i < RUNS; i++) {
    double t = now();
    want(dnnl_primitive_execute(p, stream, 3, a), "execution");
    want(dnnl_stream_wait(stream), "execution");
    t = now() - t;
    if (t < least) least = t;
  }
  for (int k = 0; k < 3; k++) dnnl_memory_destroy(a[k].memory);
  dnnl_primitive_destroy(p);
  return least;
}

static void time_conv(const Conv *c, dnnl_format_tag_t images, double *seconds) {
  long oh = (c->ih + 2 * c->padding - c->kh) / c->stride + 1;
  long ow = (c->iw + 2 * c->padding - c->kw) / c->stride + 1;
  const dnnl_dims_t strides = {c->stride, c->stride}, padding = {c->padding, c->padding};
  Layout l[3];
  if (c->ic < 4) images = dnnl_format_tag_any; /* the first layer has kernels of its own */
  layout(&l[0], (dnnl_dims_t){c->n, c->ic, c->ih, c->iw}, images);
  layout(&l[1], (dnnl_dims_t){c->oc, c->ic, c->kh, c->kw}, dnnl_format_tag_any);
  layout(&l[2], (dnnl_dims_t){c->n, c->oc, oh, ow}, images);
  dnnl_primitive_desc_t hint = describe(FORWARD, l, strides, padding, NULL);
  seconds[FORWARD] += (double)c->times * measure(FORWARD, hint);
  for (int kind = INPUT; kind <= WEIGHT; kind++) {
    if (kind == INPUT && !c->need_input) continue;
    dnnl_primitive_desc_t pd = describe((Kind)kind, l, strides, padding, hint);
    seconds[kind] += (double)c->times * measure((Kind)kind, pd);
    dnnl_primitive_desc_destroy(pd);
  }
  dnnl_primitive_desc_destroy(hint);
}

int main(int argc, char **argv) {
  dnnl_format_tag_t images = argc > 2 && !strcmp(argv[2], "nhwc") ? dnnl_nhwc : dnnl_format_tag_any;
  double seconds[3] = {0};
  Conv c;
  if (argc < 2 || atoi(argv[1]) < 1) {
    fprintf(stderr, "usage: bench_conv THREADS [nhwc] < shapes\n");
    return 2;
  }
  omp_set_num_threads(atoi(argv[1]));
  want(dnnl_engine_create(&engine, dnnl_cpu, 0), "engine");
  want(dnnl_stream_create(&stream, engine, dnnl_stream_default_flags), "stream");
  while (scanf("%ld %ld %ld %ld %ld %ld %ld %ld %ld %ld %ld", &c.n, &c.ic, &c.ih, &c.iw, &c.oc,
               &c.kh, &c.kw, &c.stride, &c.padding, &c.need_input, &c.times) == 11)
    time_conv(&c, images, seconds);
  printf("{\"forward_s\": %.5f, \"input_s\": %.5f, \"weight_s\": %.5f, \"step_s\": %.5f}\n",
         seconds[FORWARD], seconds[INPUT], seconds[WEIGHT],
         seconds[FORWARD] + seconds[INPUT] + seconds[WEIGHT]);
  dnnl_stream_destroy(stream);
  dnnl_engine_destroy(engine);
  return 0;
}
