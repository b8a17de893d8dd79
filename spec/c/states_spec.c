/* Several Lua states over one context, each in a thread of its own: they share devices, allocator
 * and limits, and nothing else. Meant for the thread sanitizer. */
#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "moonflow.h"

enum { THREADS = 4 };

static mf_context *context;

/* A little of everything: tape, hooks, views, in-place writes, rows, garbage. */
static const char script[] =
    "local mf = require 'moonflow'\n"
    "function work(seed)\n"
    "  mf.manual_seed(seed)\n"
    "  local w = mf.randn(20, 10):requires_grad_()\n"
    "  local hooked = 0\n"
    "  w:register_hook(function(g) hooked = hooked + 1 return g * 1 end)\n"
    "  for i = 1, 30 do\n"
    "    local x = mf.randn(8, 20)\n"
    "    local y = x:matmul(w)\n"
    "    y:narrow(0, 0, 4):mul_(2);\n"
    "    (y * y):mean():backward()\n"
    "    mf.no_grad(function() w:sub_(w.grad * 0.01) end)\n"
    "    w.grad = nil\n"
    "    local big = mf.zeros(1000, 100)\n"
    "    assert(big:sum():item() == 0)\n"
    "    assert(not pcall(function() return x + mf.ones(3) end))\n"
    "    if i % 10 == 0 then collectgarbage() end\n"
    "  end\n"
    "  assert(hooked == 30)\n"
    "  return w:abs():sum():item()\n"
    "end\n";

typedef struct Job {
  double seed, result;
  bool failed;
} Job;

static void *run(void *arg) {
  Job *job = arg;
  mf_state *s;
  mf_set_threads(1);
  job->failed = true;
  if (mf_state_create(context, NULL, &s)) return NULL;
  mf_value in = {.kind = MF_NUMBER, .as.number = job->seed}, out;
  if (mf_dostring(s, script, "work") || mf_call(s, "work", 1, &in, 1, &out)) {
    printf("work: %s\n", mf_last_error());
  } else {
    job->result = out.as.number;
    job->failed = false;
  }
  mf_state_destroy(s);
  return NULL;
}

static void states_in_threads_do_not_disturb_each_other(void) {
  Job alone = {.seed = 1}, jobs[THREADS];
  pthread_t threads[THREADS];
  run(&alone);
  CHECK(!alone.failed, "the work fails");
  for (int i = 0; i < THREADS; i++) {
    jobs[i] = (Job){.seed = 1};
    pthread_create(&threads[i], NULL, run, &jobs[i]);
  }
  for (int i = 0; i < THREADS; i++) pthread_join(threads[i], NULL);
  for (int i = 0; i < THREADS; i++)
    CHECK(!jobs[i].failed && jobs[i].result == alone.result, "thread %d: %g, alone %g", i,
          jobs[i].result, alone.result);
}

static void nothing_is_left_behind(void) {
  mf_memory m = {.struct_size = sizeof m};
  mf_memory_stats(context, "cpu", &m);
  CHECK(m.in_use == 0, "%zu bytes are in use", m.in_use);
}

/* A tensor lives on when its state is gone. */
static void tensors_outlive_their_state(void) {
  mf_state *s;
  mf_tensor *t = NULL;
  CHECK(!mf_state_create(context, NULL, &s), "%s", mf_last_error());
  CHECK(!mf_tensor_create(s, MF_FLOAT32, 1, (int64_t[]){1000}, NULL, &t), "%s", mf_last_error());
  mf_state_destroy(s);
  CHECK(mf_tensor_numel(t) == 1000 && ((float *)mf_tensor_data(t))[999] == 0, "it is not there");
  mf_tensor_release(t);
}

int main(void) {
  if (mf_context_create(NULL, &context)) return 2;
  RUN(states_in_threads_do_not_disturb_each_other);
  RUN(nothing_is_left_behind);
  RUN(tensors_outlive_their_state);
  RUN(nothing_is_left_behind);
  mf_context_destroy(context);
  return check_end();
}
