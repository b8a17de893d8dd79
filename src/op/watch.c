#include "watch.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

static double bytes_of(const View *v) {
  if (view_absent(v)) return 0;
  double n = (double)dtype_size((DType)v->dtype);
  for (int d = 0; d < v->ndim; d++) /* an expanded tensor is read once */
    if (v->stride[d] || v->shape[d] == 0) n *= (double)v->shape[d];
  return n;
}

void watch_add(Watch *w, const ProfileEvent *e) {
  pthread_mutex_lock(&w->lock);
  Profile *p = atomic_load(&w->profile);
  if (p) profile_add(p, e);
  pthread_mutex_unlock(&w->lock);
}

static void add_event(Watch *w, const OpSpec *spec, const OpCall *c, int64_t begin,
                      const char *where) {
  ProfileEvent e = {.begin = begin, .end = profile_now(), .track = c->stream};
  snprintf(e.name, sizeof e.name, "%s", c->op->name);
  snprintf(e.where, sizeof e.where, "%s", where ? where : "");
  for (int k = 0; k < c->n_in; k++) e.bytes += bytes_of(&c->in[k]);
  for (int k = 0; k < c->n_out; k++) e.bytes += bytes_of(&c->out[k]);
  e.flops = spec->flops ? spec->flops(c) : c->n_out ? (double)view_numel(&c->out[0]) : 0;
  watch_add(w, &e);
}

/* Walks v in any order. */
static bool has_nan(const View *v, int d, const char *at) {
  if (d == v->ndim) return isnan(dtype_get_f64((DType)v->dtype, at));
  int64_t step = v->stride[d] * (int64_t)dtype_size((DType)v->dtype);
  for (int64_t i = 0; i < v->shape[d]; i++)
    if (has_nan(v, d + 1, at + i * step)) return true;
  return false;
}

static int check(const OpCall *c, const View *v, const char *what, int k, const char *where) {
  char line[80] = "";
  if (view_absent(v) || !dtype_is_float((DType)v->dtype) || !has_nan(v, 0, v->data)) return 0;
  if (where && *where) snprintf(line, sizeof line, " (%.64s)", where);
  return err_set(MF_EINVAL, "%s: %s %d has a NaN%s", c->op->name, what, k, line);
}

/* Results, and inputs that the op writes. */
static int check_nan(const OpCall *c, const char *where) {
  int rc = 0;
  for (int k = 0; k < c->n_out && !rc; k++) rc = check(c, &c->out[k], "result", k, where);
  for (int k = 0; k < c->n_in && !rc && c->op->n_mutated; k++) {
    int position = op_param_of_input(c->op, c->args, k), i = 0;
    while (c->op->params[i].kind != PARAM_TENSOR || position-- > 0) i++;
    if (c->op->params[i].mutated) rc = check(c, &c->in[k], "written input", k, where);
  }
  return rc;
}

int watch_launch(Watch *w, DeviceKernel *kernel, const OpSpec *spec, const OpCall *c,
                 const char *where) {
  int64_t begin = watch_profiles(w) ? profile_now() : 0;
  int rc = kernel(c);
  if (!rc && begin) add_event(w, spec, c, begin, where);
  bool readable = c->stream->device->api->on_host;
  return rc || !readable || !atomic_load(&w->nan) ? rc : check_nan(c, where);
}
