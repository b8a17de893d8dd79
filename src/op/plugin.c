/* Finding, opening and checking the plugin of CUDA devices.
 *
 * MF_CUDA in the environment says which: unset, libmoonflow_cuda.so; "emulate",
 * libmoonflow_emulate.so, whose devices are threads of this process; a word behind a comma is for
 * the library to read. It lies beside the program or library that this code is in, or in ../lib as
 * seen from there, or where the loader looks. A context opens it once, and it is never closed. */
#define _GNU_SOURCE
#include "plugin.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "context.h"
#include "mem.h"

static const PluginHost host = {.size = sizeof host,
                                .op_hash = &op_table_hash,
                                .ops = op_table,
                                .err_set = err_set,
                                .err_text = err_text,
                                .mem_zalloc = mem_zalloc,
                                .mem_free = mem_free,
                                .dtype_name = dtype_name,
                                .dtype_get_f64 = dtype_get_f64,
                                .dtype_get_i64 = dtype_get_i64,
                                .dtype_set_f64 = dtype_set_f64,
                                .promote_views = op_promote_views,
                                .is_contiguous = shape_is_contiguous,
                                .is_dense = shape_is_dense,
                                .broadcast_strides = shape_broadcast_strides,
                                .inputs_of_param = op_inputs_of_param};

/* The folder of the program or library that this code is in, with a slash; "" when not known. */
static void own_folder(char *path, size_t n) {
  Dl_info info = {0};
  path[0] = 0;
  if (dladdr(own_folder, &info) && info.dli_fname && strchr(info.dli_fname, '/')) {
    snprintf(path, n, "%s", info.dli_fname);
  } else {
    ssize_t length = readlink("/proc/self/exe", path, n - 1);
    path[length > 0 ? length : 0] = 0;
  }
  char *slash = strrchr(path, '/');
  path[slash ? slash + 1 - path : 0] = 0;
}

static void *open_library(const char *name) {
  static const char *const places[] = {"", "../lib/"};
  char folder[3072], path[4096];
  own_folder(folder, sizeof folder);
  for (int i = 0; i < 2 && folder[0]; i++) {
    snprintf(path, sizeof path, "%s%s%s", folder, places[i], name);
    if (!access(path, F_OK)) return dlopen(path, RTLD_NOW | RTLD_LOCAL);
  }
  return dlopen(name, RTLD_NOW | RTLD_LOCAL);
}

static int ask_library(Plugin *p) {
  const char *which = getenv("MF_CUDA");
  bool emulate = which && !strncmp(which, "emulate", 7);
  const char *name = emulate ? "libmoonflow_emulate.so" : "libmoonflow_cuda.so";
  const char *how = emulate ? "make emulate" : "make cuda";
  void *library = open_library(name);
  if (!library)
    return err_set(MF_EUNSUPPORTED, "%s could not be opened (%s); `%s` builds it", name, dlerror(),
                   how);
  PluginOpen *open = (PluginOpen *)(uintptr_t)dlsym(library, "moonflow_plugin");
  if (!open) return err_set(MF_EUNSUPPORTED, "%s is no library of kernels: %s", name, dlerror());
  return open(&host, p);
}

static int plug(Context *c, const Plugin *p) {
  c->kernels = mem_zalloc(sizeof *c->kernels * (size_t)op_count);
  if (!c->kernels) return err_set(MF_ENOMEM, "out of memory");
  for (size_t i = 0; i < p->n_kernels; i++) {
    const Op *op = op_find(p->kernels[i].op);
    if (!op) return err_set(MF_EUNSUPPORTED, "a kernel for %s, which is no op", p->kernels[i].op);
    c->kernels[op->id] = p->kernels[i].launch;
  }
  int n = 0;
  for (; n < p->n_devices && DEVICE_CUDA + n < CONTEXT_DEVICES; n++) {
    Device *d = p->device_create(c, n, DEVICE_CUDA + n, c->kernels);
    if (!d) break;
    c->devices[DEVICE_CUDA + n] = d;
  }
  if (!n) return err_set(MF_ENOMEM, "out of memory");
  atomic_store(&c->plugged, n);
  return 0;
}

static int open_plugin(Context *c) {
  if (atomic_load(&c->plugged)) return 0;
  Plugin p = {0};
  pthread_mutex_lock(&c->opening);
  int rc = atomic_load(&c->plugged) ? 0 : ask_library(&p);
  if (!rc && p.n_devices) rc = plug(c, &p);
  if (rc && c->kernels) {
    mem_free(c->kernels);
    c->kernels = NULL;
  }
  pthread_mutex_unlock(&c->opening);
  return rc;
}

/* Whether name is `kind` or "kind:0"; or, where more is set, "kind:N" with N there. */
static bool names_device(const char *name, const char *kind, int *more) {
  size_t n = strlen(kind);
  if (strncmp(name, kind, n)) return false;
  if (!name[n]) return true;
  char *end;
  if (name[n] != ':' || name[n + 1] < '0' || name[n + 1] > '9') return false;
  long number = strtol(name + n + 1, &end, 10);
  if (*end || number > 9999 || (number && !more)) return false;
  if (more) *more = (int)number;
  return true;
}

int plugin_find_device(Context *c, const char *op, const char *name, int *slot) {
  int index = 0;
  for (*slot = 0; *slot < DEVICE_CUDA; ++*slot)
    if (names_device(name, c->devices[*slot]->name, NULL)) return 0;
  if (!names_device(name, "cuda", &index))
    return err_set(MF_EINVAL, "%s: there is no device '%.40s'; there are 'cpu', 'meta' and 'cuda'",
                   op, name);
  char why[512];
  if (open_plugin(c)) {
    snprintf(why, sizeof why, "%s", err_text());
    return err_set(MF_EUNSUPPORTED, "%s: there is no device '%s': %s", op, name, why);
  }
  int n = atomic_load(&c->plugged);
  *slot = DEVICE_CUDA + index;
  if (index < n) return 0;
  return err_set(MF_EINVAL, "%s: there is no device '%.40s'; the last is 'cuda:%d'", op, name,
                 n - 1);
}
