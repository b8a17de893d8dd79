/* Once it has run twice a compiled step takes no memory from the C library or the device: malloc
 * and its kin are counted here. Lua's own heap does not come from them. */
#include <malloc.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "moonflow.h"

static atomic_int counted;

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__) || defined(MF_HARD) || \
    defined(MF_FAULT)
enum { COUNTED = 0 }; /* the sanitizers have a malloc of their own, builds for tests no pools */
#else
enum { COUNTED = 1 };

void *__libc_malloc(size_t n);
void *__libc_calloc(size_t n, size_t size);
void *__libc_realloc(void *p, size_t n);
void *__libc_memalign(size_t align, size_t n);

void *malloc(size_t n) {
  atomic_fetch_add(&counted, 1);
  return __libc_malloc(n);
}

void *calloc(size_t n, size_t size) {
  atomic_fetch_add(&counted, 1);
  return __libc_calloc(n, size);
}

void *realloc(void *p, size_t n) {
  atomic_fetch_add(&counted, 1);
  return __libc_realloc(p, n);
}

int posix_memalign(void **p, size_t align, size_t n) {
  atomic_fetch_add(&counted, 1);
  *p = __libc_memalign(align, n);
  return *p ? 0 : 12;
}

void *aligned_alloc(size_t align, size_t n) {
  atomic_fetch_add(&counted, 1);
  return __libc_memalign(align, n);
}

#endif

static const char script[] =
    "local mf = require 'moonflow'\n"
    "local nn = mf.nn\n"
    "mf.manual_seed(1)\n"
    "local model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), "
    "nn.Dropout(0.1),\n"
    "  nn.Flatten(), nn.Linear(4 * 36, 10))\n"
    "local opt = mf.optim.AdamW(model:parameters(), { lr = 0.01 })\n"
    "local step = mf.compile(function(x, y)\n"
    "  opt:zero_grad()\n"
    "  local loss = mf.cross_entropy(model(x), y)\n"
    "  loss:backward()\n"
    "  opt:step()\n"
    "  return loss\n"
    "end, { one_op_tasks = ONE })\n"
    "local x, y = mf.randn(8, 1, 8, 8), mf.randint(0, 10, { 8 })\n"
    "function once() local loss = step(x, y) loss = nil collectgarbage() return 0 end\n";

static void run(const char *one_op_tasks) {
  mf_context *c;
  mf_state *s;
  char text[2048];
  const char *at = strstr(script, "ONE");
  snprintf(text, sizeof text, "%.*s%s%s", (int)(at - script), script, one_op_tasks, at + 3);
  CHECK(!mf_context_create(NULL, &c) && !mf_state_create(c, NULL, &s), "%s", mf_last_error());
  CHECK(!mf_dostring(s, text, "script"), "%s", mf_last_error());
  mf_value out;
  int before = 0;
  for (int step = 1; step <= 20; step++) {
    if (step == 3) before = atomic_load(&counted);
    CHECK(!mf_call(s, "once", 0, NULL, 1, &out), "%s", mf_last_error());
  }
  int n = atomic_load(&counted) - before;
  CHECK(n == 0, "%d allocations in steps 3 to 20", n);
  mf_state_destroy(s);
  mf_context_destroy(c);
}

static void steps_allocate_nothing(void) {
  run("false");
}

static void nor_do_tasks_of_one_op(void) {
  run("true");
}

static void what_is_allocated_is_counted(void) {
  int before = atomic_load(&counted);
  void *volatile p = malloc(10);
  free(p);
  CHECK(!COUNTED || atomic_load(&counted) > before, "malloc is not counted");
}

int main(void) {
  RUN(what_is_allocated_is_counted);
  RUN(steps_allocate_nothing);
  RUN(nor_do_tasks_of_one_op);
  return check_end();
}
