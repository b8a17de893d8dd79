/* moonflow.h as a host uses it: values in and out, errors, memory, interrupts, and two contexts in
 * two threads. Nothing but the public header is included. */
#include <math.h>
#include <pthread.h>
#include <string.h>
#include <unistd.h>

#include "check.h"
#include "moonflow.h"

static mf_context *context;
static mf_state *state;

static void versions_and_names(void) {
  int major, minor, patch;
  CHECK(sscanf(mf_version(), "%d.%d.%d", &major, &minor, &patch) == 3 &&
            major == MF_VERSION_MAJOR && minor == MF_VERSION_MINOR && patch == MF_VERSION_PATCH,
        "version %s", mf_version());
  CHECK(!strcmp(mf_status_name(MF_STATUS_OK), "ok") && *mf_status_name(MF_STATUS_UNSUPPORTED),
        "names");
}

static void errors_are_values(void) {
  CHECK(mf_dostring(state, "x = =", "chunk") == MF_STATUS_LUA, "a syntax error");
  CHECK(strstr(mf_last_error(), "chunk:1:"), "%s", mf_last_error());
  CHECK(mf_dostring(state, "local function f() error 'bad' end f()", "c") == MF_STATUS_LUA,
        "an error");
  CHECK(strstr(mf_last_error(), "c:1: bad") && strstr(mf_last_error(), "traceback"), "%s",
        mf_last_error());
  CHECK(mf_dostring(state, "error(setmetatable({}, {__tostring = function() return 'I am' end}))",
                    "c") == MF_STATUS_LUA &&
            !strncmp(mf_last_error(), "I am", 4),
        "%s", mf_last_error());
  CHECK(mf_dostring(state, "error {}", "c") && strstr(mf_last_error(), "a table value"), "%s",
        mf_last_error());
  CHECK(mf_dostring(state, "error()", "c") && strstr(mf_last_error(), "nil"), "%s",
        mf_last_error());
  CHECK(mf_dofile(state, "/nowhere/x.lua") && strstr(mf_last_error(), "/nowhere/x.lua"), "%s",
        mf_last_error());
  CHECK(mf_call(state, "no.such", 0, NULL, 0, NULL) && strstr(mf_last_error(), "no.such"), "%s",
        mf_last_error());
  CHECK(mf_call(state, "print", -1, NULL, 0, NULL) == MF_STATUS_INVALID, "a negative count");
  CHECK(mf_call(state, "", 0, NULL, 0, NULL) == MF_STATUS_INVALID &&
            strstr(mf_last_error(), "the name of the function is empty"),
        "%s", mf_last_error());
  CHECK(mf_dostring(state, NULL, "c") == MF_STATUS_INVALID, "no text");
  CHECK(mf_dofile(state, NULL) == MF_STATUS_INVALID, "no path");
  mf_context *none = NULL;
  mf_state *nothing;
  CHECK(mf_state_create(none, NULL, &nothing) == MF_STATUS_INVALID, "no context");
  CHECK(mf_set_threads(0) == MF_STATUS_INVALID, "no threads");
  CHECK(!mf_dostring(state, "x = 1", "c"), "%s", mf_last_error());
}

static void values_cross(void) {
  CHECK(!mf_dostring(state,
                     "m = { echo = function(...) return ... end, n = function(...) return "
                     "select('#', ...) end }",
                     "c"),
        "%s", mf_last_error());
  mf_value in[4] = {{.kind = MF_NUMBER, .as.number = 1.5},
                    {.kind = MF_STRING, .as.string = {"a\0b", 3}},
                    {.kind = MF_BOOLEAN, .as.boolean = true},
                    {.kind = MF_NIL}};
  mf_value out[5];
  CHECK(!mf_call(state, "m.echo", 4, in, 5, out), "%s", mf_last_error());
  CHECK(out[0].kind == MF_NUMBER && out[0].as.number == 1.5, "the number");
  CHECK(out[1].kind == MF_STRING && out[1].as.string.size == 3 &&
            !memcmp(out[1].as.string.text, "a\0b", 3),
        "the string");
  CHECK(out[2].kind == MF_BOOLEAN && out[2].as.boolean, "the boolean");
  CHECK(out[3].kind == MF_NIL && out[4].kind == MF_NIL, "nil, and one that is missing");
  CHECK(!mf_call(state, "m.n", 4, in, 1, out) && out[0].as.number == 4, "a last nil counts");
  CHECK(mf_dostring(state, "function t() return {} end", "c") == 0 &&
            mf_call(state, "t", 0, NULL, 1, out) == MF_STATUS_LUA &&
            strstr(mf_last_error(), "table"),
        "%s", mf_last_error());
}

static void values_are_checked(void) {
  mf_value in[8] = {{.kind = MF_NIL}}, out = {.kind = MF_STRING};
  CHECK(!mf_dostring(state, "function n(...) return select('#', ...) end", "c"), "%s",
        mf_last_error());
  for (int n = 1; n <= 8; n += 7) {
    for (int i = 0; i < n; i++) in[i] = (mf_value){.kind = (mf_kind)77};
    CHECK(mf_call(state, "n", n, in, 1, &out) == MF_STATUS_INVALID && out.kind == MF_NIL &&
              strstr(mf_last_error(), "in[0] has the kind 77"),
          "%s", mf_last_error());
  }
  in[0] = (mf_value){.kind = MF_NIL};
  in[1] = (mf_value){.kind = MF_TENSOR};
  CHECK(mf_call(state, "n", 2, in, 1, &out) == MF_STATUS_INVALID &&
            strstr(mf_last_error(), "in[1] is a tensor that is NULL"),
        "%s", mf_last_error());
  in[1] = (mf_value){.kind = MF_STRING, .as.string = {NULL, 1}};
  CHECK(mf_call(state, "n", 2, in, 1, &out) == MF_STATUS_INVALID, "a string that is NULL");
  in[1] = (mf_value){.kind = MF_STRING};
  CHECK(!mf_call(state, "n", 2, in, 1, &out) && out.as.number == 2, "%s", mf_last_error());
}

static void tensors_cross(void) {
  const float data[6] = {1, 2, 3, 4, 5, 6};
  const int64_t shape[2] = {2, 3};
  mf_value in = {.kind = MF_TENSOR}, out[2];
  CHECK(!mf_tensor_create(state, MF_FLOAT32, 2, shape, data, &in.as.tensor), "%s", mf_last_error());
  CHECK(!mf_dostring(state, "function f(x) return x + x, x:t() end", "c"), "%s", mf_last_error());
  CHECK(!mf_call(state, "f", 1, &in, 2, out), "%s", mf_last_error());
  CHECK(out[0].kind == MF_TENSOR && out[1].kind == MF_TENSOR, "kinds");
  mf_tensor *y = out[0].as.tensor, *t = out[1].as.tensor;
  CHECK(mf_tensor_dtype(y) == MF_FLOAT32 && mf_tensor_ndim(y) == 2 && mf_tensor_numel(y) == 6, "y");
  for (int i = 0; i < 6; i++)
    CHECK(((float *)mf_tensor_data(y))[i] == 2 * data[i], "element %d", i);
  CHECK(mf_tensor_shape(t)[0] == 3 && mf_tensor_stride(t)[0] == 1 && mf_tensor_stride(t)[1] == 3,
        "the transposed");
  CHECK(!mf_tensor_is_contiguous(t) && mf_tensor_is_contiguous(y), "contiguous");
  CHECK(mf_tensor_data(t) == mf_tensor_data(in.as.tensor), "a view shares memory");
  CHECK(mf_tensor_retain(t) == t, "retain");
  mf_tensor_release(t);
  mf_tensor_release(t);
  mf_tensor_release(y);
  mf_tensor_release(in.as.tensor);
}

static void tensors_are_checked(void) {
  const int64_t negative[1] = {-1}, huge[2] = {INT64_MAX, 2}, two[1] = {2};
  mf_tensor *t;
  CHECK(mf_tensor_create(state, MF_FLOAT32, 1, negative, NULL, &t) == MF_STATUS_INVALID,
        "negative");
  CHECK(mf_tensor_create(state, MF_FLOAT32, 2, huge, NULL, &t) == MF_STATUS_INVALID, "huge");
  CHECK(mf_tensor_create(state, (mf_dtype)99, 1, two, NULL, &t) == MF_STATUS_INVALID, "dtype");
  CHECK(mf_tensor_create(state, MF_FLOAT32, 99, two, NULL, &t) == MF_STATUS_INVALID, "dims");
  CHECK(mf_tensor_create(state, MF_FLOAT32, 1, NULL, NULL, &t) == MF_STATUS_INVALID, "shape");
  CHECK(!mf_tensor_create(state, MF_INT32, 1, two, NULL, &t) && ((int *)mf_tensor_data(t))[1] == 0,
        "zeros");
  mf_value in = {.kind = MF_TENSOR, .as.tensor = t};
  CHECK(!mf_dostring(state, "function free(x) x:free() end", "c") &&
            !mf_call(state, "free", 1, &in, 0, NULL),
        "%s", mf_last_error());
  CHECK(!mf_tensor_data(t) && strstr(mf_last_error(), "freed"), "%s", mf_last_error());
  mf_tensor_release(t);
  CHECK(!mf_tensor_create(state, MF_FLOAT64, 0, NULL, NULL, &t) && mf_tensor_numel(t) == 1, "0-d");
  mf_tensor_release(t);
}

static void count(void *owner) {
  ++*(int *)owner;
}

static void memory_is_lent(void) {
  float data[2] = {1, 2};
  const int64_t two[1] = {2}, negative[1] = {-2};
  int released = 0;
  mf_value in = {.kind = MF_TENSOR};
  CHECK(!mf_tensor_wrap(state, MF_FLOAT32, 1, two, data, count, &released, &in.as.tensor), "%s",
        mf_last_error());
  CHECK(!mf_dostring(state, "function keep(x) kept = x; x:add_(1) end", "c"), "%s",
        mf_last_error());
  CHECK(!mf_call(state, "keep", 1, &in, 0, NULL) && data[0] == 2 && data[1] == 3, "%s",
        mf_last_error());
  mf_tensor_release(in.as.tensor);
  CHECK(released == 0, "released while Lua has it");
  CHECK(!mf_dostring(state, "kept = nil collectgarbage() collectgarbage()", "c") && released == 1,
        "%d", released);
  CHECK(mf_tensor_wrap(state, MF_FLOAT32, 1, negative, data, count, &released, &in.as.tensor) &&
            released == 2,
        "a failed wrap releases");
  CHECK(!mf_tensor_wrap(state, MF_FLOAT32, 1, two, data, NULL, NULL, &in.as.tensor), "%s",
        mf_last_error());
  mf_tensor_release(in.as.tensor);
}

static void memory_is_limited(void) {
  mf_memory m = {.struct_size = sizeof m};
  const int64_t million[1] = {1000000};
  mf_tensor *t;
  CHECK(!mf_memory_stats(context, "cpu", &m), "%s", mf_last_error());
  size_t before = m.in_use;
  CHECK(!mf_tensor_create(state, MF_FLOAT32, 1, million, NULL, &t) &&
            !mf_memory_stats(context, "cpu", &m) && m.in_use >= before + 4000000 &&
            m.peak >= m.in_use,
        "%zu", m.in_use);
  mf_tensor_release(t);
  CHECK(!mf_memory_stats(context, "cpu", &m) && m.in_use == before, "%zu", m.in_use);
  CHECK(!mf_empty_cache(context, "cpu") && !mf_memory_stats(context, "cpu", &m) && m.cached == 0,
        "%zu", m.cached);
  CHECK(!mf_set_memory_limit(context, "cpu", before + 1000000), "%s", mf_last_error());
  CHECK(mf_tensor_create(state, MF_FLOAT32, 1, million, NULL, &t) == MF_STATUS_NO_MEMORY && !t,
        "the limit");
  CHECK(strstr(mf_last_error(), "limit"), "%s", mf_last_error());
  CHECK(!mf_set_memory_limit(context, "cpu", 0), "%s", mf_last_error());
  CHECK(mf_memory_stats(context, "toaster", &m) == MF_STATUS_INVALID &&
            strstr(mf_last_error(), "toaster"),
        "%s", mf_last_error());
  mf_memory old = {.struct_size = 2 * sizeof(size_t), .peak = 77};
  CHECK(!mf_memory_stats(context, "cpu", &old) && old.peak == 77,
        "a smaller struct is not overrun");
}

/* -- Interrupts and threads -------------------------------------------------------------------- */

static void *interrupt_soon(void *unused) {
  usleep(100000);
  mf_interrupt(context);
  return unused;
}

static void interrupts(void) {
  pthread_t thread;
  pthread_create(&thread, NULL, interrupt_soon, NULL);
  mf_status status = mf_dostring(
      state, "local x = require 'moonflow'.tensor { 1 } while true do x = x + 0 end", "c");
  pthread_join(thread, NULL);
  CHECK(status == MF_STATUS_INTERRUPTED, "status %d: %s", (int)status, mf_last_error());
  mf_state_interrupt(state);
  status = mf_dostring(state, "while true do collectgarbage 'step' end", "c");
  CHECK(status == MF_STATUS_INTERRUPTED, "status %d: %s", (int)status, mf_last_error());
  CHECK(!mf_dostring(state, "for i = 1, 1000 do collectgarbage 'step' end", "c"), "%s",
        mf_last_error());
}

/* Minimises (w - target)^2 in a context of its own, by gradients; returns w in *arg. */
static void *train(void *arg) {
  double *target = arg;
  mf_context *c;
  mf_state *s;
  mf_set_threads(1);
  if (mf_context_create(NULL, &c)) return NULL;
  if (!mf_state_create(c, NULL, &s)) {
    mf_value in = {.kind = MF_NUMBER, .as.number = *target}, out;
    mf_status status = mf_dostring(s,
                                   "local mf = require 'moonflow'\n"
                                   "function fit(target)\n"
                                   "  local w = mf.tensor({ 0, 0 }, { requires_grad = true })\n"
                                   "  for _ = 1, 200 do\n"
                                   "    local d = w - target\n"
                                   "    local g = mf.grad({ (d * d):sum() }, { w })[1]\n"
                                   "    w = (w:detach() - g * 0.1):requires_grad_()\n"
                                   "  end\n"
                                   "  return w:sum():item()\n"
                                   "end",
                                   "fit");
    if (!status) status = mf_call(s, "fit", 1, &in, 1, &out);
    if (status) printf("train: %s\n", mf_last_error());
    else *target = out.as.number;
    mf_state_destroy(s);
  }
  mf_context_destroy(c);
  return arg;
}

static void two_contexts_in_two_threads(void) {
  pthread_t threads[2];
  double targets[2] = {3, -5};
  for (int i = 0; i < 2; i++) pthread_create(&threads[i], NULL, train, &targets[i]);
  for (int i = 0; i < 2; i++) pthread_join(threads[i], NULL);
  CHECK(fabs(targets[0] - 6) < 1e-3 && fabs(targets[1] + 10) < 1e-3, "%g %g", targets[0],
        targets[1]);
}

static void two_states_share_a_context(void) {
  mf_state *other;
  CHECK(!mf_state_create(context, NULL, &other), "%s", mf_last_error());
  CHECK(!mf_dostring(other, "mine = 1; assert(require 'moonflow')", "c"), "%s", mf_last_error());
  CHECK(!mf_dostring(state, "assert(mine == nil)", "c"), "%s", mf_last_error());
  mf_state_destroy(other);
  CHECK(!mf_dostring(state, "assert(require 'moonflow'.tensor { 1 })", "c"), "%s", mf_last_error());
}

/* A loss that C holds between two calls has the hooks of what it was made from. */
static void hooks_live_with_tensors_that_c_holds(void) {
  mf_value loss, ran;
  CHECK(!mf_dostring(state,
                     "local mf = require 'moonflow' ran = 0\n"
                     "function forward()\n"
                     "  local x = mf.ones(2):requires_grad_()\n"
                     "  local y = x * 2\n"
                     "  y:register_hook(function() ran = ran + 1 end)\n"
                     "  return y:sum()\n"
                     "end\n"
                     "function backward(loss) collectgarbage() loss:backward() return ran end",
                     "c"),
        "%s", mf_last_error());
  CHECK(!mf_call(state, "forward", 0, NULL, 1, &loss), "%s", mf_last_error());
  CHECK(!mf_dostring(state, "collectgarbage() collectgarbage()", "c"), "%s", mf_last_error());
  CHECK(!mf_call(state, "backward", 1, &loss, 1, &ran), "%s", mf_last_error());
  CHECK(ran.as.number == 1, "%g", ran.as.number);
  mf_tensor_release(loss.as.tensor);
}

int main(void) {
  mf_state_config config = {.struct_size = sizeof config, .ignore_environment = true};
  if (mf_context_create(NULL, &context) || mf_state_create(context, &config, &state)) {
    puts(mf_last_error());
    return 2;
  }
  RUN(versions_and_names);
  RUN(errors_are_values);
  RUN(values_cross);
  RUN(values_are_checked);
  RUN(tensors_cross);
  RUN(tensors_are_checked);
  RUN(memory_is_lent);
  RUN(memory_is_limited);
  RUN(interrupts);
  RUN(two_contexts_in_two_threads);
  RUN(two_states_share_a_context);
  RUN(hooks_live_with_tensors_that_c_holds);
  mf_state_destroy(state);
  mf_context_destroy(context);
  return check_end();
}
