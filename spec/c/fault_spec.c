/* A host whose memory runs out: contexts, states, chunks and calls give a code, nothing exits, and
 * nothing is left. Requests fail in turn in a build for faults; in others all succeeds. */
#include <string.h>

#include "check.h"
#include "err.h"
#include "fault.h"
#include "moonflow.h"

static const char script[] =
    "local mf = require 'moonflow'\n"
    "jit.off()\n" /* machine code cannot unwind when an allocation fails */
    "function double(x) return x * 2, 'text', (x:sum():item()) end\n"
    "x = mf.ones(3)\n";

static bool is_expected(mf_status status) {
  const char *text = mf_last_error();
  return !status || strstr(text, "out of memory") || strstr(text, "not enough memory") ||
         strstr(text, "launched");
}

/* All that a host does; the first code. */
static mf_status host(void) {
  mf_context *c = NULL;
  mf_state *s = NULL;
  mf_value x = {0}, out[3];
  mf_status status = mf_context_create(NULL, &c);
  if (!status) status = mf_state_create(c, NULL, &s);
  if (!status) status = mf_dostring(s, script, "script");
  if (!status) status = mf_dostring(s, "return nothing.at.all", "wrong") ? 0 : MF_STATUS_INVALID;
  for (int k = 0; k < 3 && !status; k++) {
    status = mf_call(s, "tostring", 0, NULL, 0, NULL) ? 0 : MF_STATUS_INVALID;
    if (!status) status = mf_call(s, "moonflow_ones", 0, NULL, 1, &x) ? 0 : MF_STATUS_INVALID;
    if (!status) status = mf_dostring(s, "function get() return x end", "get");
    if (!status) status = mf_call(s, "get", 0, NULL, 1, &x);
    if (!status) status = mf_call(s, "double", 1, &x, 3, out);
    if (!status) mf_tensor_release(out[0].as.tensor);
    if (x.kind == MF_TENSOR) mf_tensor_release(x.as.tensor);
    x.kind = MF_NIL;
  }
  mf_state_destroy(s);
  mf_context_destroy(c);
  return status;
}

static void requests_fail_in_turn(unsigned kinds, uint64_t step) {
  CHECK(!host(), "%s", mf_last_error());
  fault_arm(kinds, 0, 0);
  CHECK(!host(), "%s", mf_last_error());
  uint64_t calls = fault_calls();
  int64_t before = fault_blocks();
  for (uint64_t n = 1; n <= calls; n += step)
    for (int all = 0; all < 2; all++) {
      fault_arm(kinds, n, all ? UINT64_MAX / 2 : 1);
      mf_status status = host();
      CHECK(is_expected(status), "request %d of %d: %s", (int)n, (int)calls, mf_last_error());
      fault_arm(0, 0, 0);
      CHECK(fault_blocks() == before, "request %d of %d leaves %d blocks", (int)n, (int)calls,
            (int)(fault_blocks() - before));
      before = fault_blocks();
    }
  CHECK(!host(), "%s", mf_last_error());
}

static void memory_runs_out(void) {
  requests_fail_in_turn(FAULT_MEMORY | FAULT_DEVICE | FAULT_LAUNCH, 1);
}

static void luas_heap_runs_out(void) {
  requests_fail_in_turn(FAULT_LUA, 53);
}

int main(void) {
  RUN(memory_runs_out);
  RUN(luas_heap_runs_out);
  return check_end();
}
