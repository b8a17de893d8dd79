/* Between devices. Each has a stream of its own per state; a copy runs on the stream of a device
 * that the host cannot reach, and work on the other stream waits for it by an event, or, where the
 * other is the host, the caller does. */
#include <string.h>

#include "eager.h"
#include "op_args.h"
#include "op_ids.h"

/* Work launched on `behind` from now on waits for what was launched on `ahead`. */
static int follow(Stream *behind, Stream *ahead) {
  const DeviceApi *api = ahead->device->api;
  Event *e = api->event_create(ahead->device);
  if (!e) return err_set(MF_ENOMEM, "out of memory for an event");
  int rc = api->event_record(e, ahead);
  if (!rc) rc = api->event_wait(e, behind);
  api->event_destroy(e);
  return rc;
}

int tensor_transfer(Tensor *dst, const Tensor *src) {
  Eager *E = dst->E;
  Device *to = E->context->devices[dst->m.device], *from = E->context->devices[src->m.device];
  Stream *there = eager_stream(E, dst->m.device), *here = eager_stream(E, src->m.device);
  size_t bytes = (size_t)meta_numel(&dst->m) * dtype_size((DType)dst->m.dtype);
  if (!there || !here) return MF_EUNSUPPORTED;
  if (!bytes) return 0;
  Tensor *dense = NULL;
  if (!shape_equal(dst->m.ndim, dst->m.stride, src->m.ndim, src->m.stride)) {
    dense = tensor_create(E, (DType)src->m.dtype, src->m.ndim, src->m.shape, src->m.device);
    if (!dense) return MF_ENOMEM;
    memcpy(dense->m.stride, dst->m.stride, sizeof dense->m.stride);
    int rc = eager_op_into(E, OP_copy_, 2, (Tensor *[]){dense, (Tensor *)(uintptr_t)src}, NULL);
    if (rc) return tensor_release(dense), rc;
    src = dense;
  }
  bool both = !to->api->on_host && !from->api->on_host;
  Stream *runs = to->api->on_host ? here : there;
  int rc = both ? follow(there, here) : 0;
  if (!rc)
    rc = runs->device->api->copy(runs->device, tensor_data(dst), tensor_data(src), bytes, runs);
  if (!rc && both) rc = follow(here, there);
  if (!rc && to->api->on_host) rc = from->api->stream_synchronize(here);
  tensor_release(dense);
  return rc;
}

Tensor *tensor_move(Tensor *t, int slot) {
  Eager *E = t->E;
  Meta m = t->m;
  if (slot == DEVICE_META) return tensor_create(E, (DType)m.dtype, m.ndim, m.shape, slot);
  bool was = E->grad_enabled;
  EagerTracer *tracer = E->tracer;
  E->grad_enabled = false;
  E->tracer = NULL; /* t has a value now */
  Tensor *moved = eager_op(E, OP_transfer, 1, &t, &(struct transfer_args){.device = slot});
  E->tracer = tracer;
  E->grad_enabled = was;
  return moved;
}

Tensor *tensor_to_host(Tensor *t) {
  if (t->E->context->devices[t->m.device]->api->on_host) return tensor_retain(t);
  return tensor_move(t, DEVICE_CPU);
}

int tensor_clear(Tensor *t) {
  if (!tensor_has_data(t)) return 0;
  if (t->storage->device->api->on_host) {
    memset(t->storage->data, 0, t->storage->bytes);
    return 0;
  }
  return eager_op_into(t->E, OP_fill_, 1, &t, &(struct fill__args){.value = 0});
}
