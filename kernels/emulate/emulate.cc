/* The emulator: CUDA's runtime on threads and fibers of the host.
 *
 * A stream is a thread with a queue, so that what is launched runs later, as on a device; a wait
 * that is forgotten is noticed. A block's threads run on the stream's thread, one at a time, each
 * on a fiber: a stack of its own that is left at a barrier or a warp's exchange and taken up again
 * when all have come. A fiber whose thread has ended takes the next thread that has not begun, so a
 * kernel without barriers costs one switch a block.
 *
 * MF_CUDA=emulate,permute=N runs the threads of a block, and the blocks of a grid, in an order made
 * from N: a race in a block, or between blocks, gives other results then.
 *
 * What a kernel does wrong ends it, and is the stream's error from then on. Memory has a page
 * behind it that cannot be touched, and what lies between its end and that page must be as it was.
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "cuda_runtime.h"

#if defined(__SANITIZE_ADDRESS__)
#define EMULATE_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define EMULATE_ASAN 1
#endif
#endif
#ifdef EMULATE_ASAN
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

/* -- Switching --------------------------------------------------------------------------------- */

extern "C" void emulate_switch(void **save, void *load);
#if defined(__x86_64__)
__asm__(R"(
.text
.globl emulate_switch
.hidden emulate_switch
.type emulate_switch,@function
emulate_switch:
  push %rbp
  push %rbx
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp,(%rdi)
  mov %rsi,%rsp
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbx
  pop %rbp
  ret
.size emulate_switch,.-emulate_switch
)");
enum { FRAME_WORDS = 6, FRAME_RETURN = 6 };
#elif defined(__aarch64__)
__asm__(R"(
.text
.globl emulate_switch
.hidden emulate_switch
.type emulate_switch,%function
emulate_switch:
  sub sp,sp,#160
  stp x19,x20,[sp,#0]
  stp x21,x22,[sp,#16]
  stp x23,x24,[sp,#32]
  stp x25,x26,[sp,#48]
  stp x27,x28,[sp,#64]
  stp x29,x30,[sp,#80]
  stp d8,d9,[sp,#96]
  stp d10,d11,[sp,#112]
  stp d12,d13,[sp,#128]
  stp d14,d15,[sp,#144]
  mov x9,sp
  str x9,[x0]
  mov sp,x1
  ldp x19,x20,[sp,#0]
  ldp x21,x22,[sp,#16]
  ldp x23,x24,[sp,#32]
  ldp x25,x26,[sp,#48]
  ldp x27,x28,[sp,#64]
  ldp x29,x30,[sp,#80]
  ldp d8,d9,[sp,#96]
  ldp d10,d11,[sp,#112]
  ldp d12,d13,[sp,#128]
  ldp d14,d15,[sp,#144]
  add sp,sp,#160
  ret
.size emulate_switch,.-emulate_switch
)");
enum { FRAME_WORDS = 20, FRAME_RETURN = 11 };
#else
#error "the emulator has no switch for this processor"
#endif

enum { STACK = 256 << 10, THREADS = 1024, WARPS = 32, SHARED = 48 << 10, GUARD = 4096 };
enum State { NEW, READY, AT_BARRIER, AT_WARP, DONE };

struct Warp {
  uint64_t values[2][32];
  unsigned arrived, mask, alive;
  int generation;
};

/* What runs the blocks of one stream; lives in its thread. */
struct Runner {
  std::vector<char *> stacks;
  std::vector<int> idle;
  EmulateThread threads[THREADS];
  Warp warps[WARPS];
  int order[THREADS];
  int n, live, at_barrier, next; /* next: in order, of this pass */
  void *home;                    /* where the scheduler waits */
  const std::function<void()> *body;
  std::string failure;
  bool failed, swap;
  char *shared;
  size_t shared_bytes;
  uint32_t random;
#ifdef EMULATE_ASAN
  void *home_fake;
  const void *home_bottom;
  size_t home_size;
#endif
};

thread_local EmulateThread *emulate_thread;
thread_local EmulateBlock emulate_block;
static thread_local Runner *runner;

/* Leaves the running fiber for the scheduler; `ends`: for good. */
static void leave(void **save, bool ends) {
#ifdef EMULATE_ASAN
  void *fake = nullptr;
  __sanitizer_start_switch_fiber(ends ? nullptr : &fake, runner->home_bottom, runner->home_size);
  emulate_switch(save, runner->home);
  __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#else
  (void)ends;
  emulate_switch(save, runner->home);
#endif
}

static void enter(void *sp, char *stack) {
#ifdef EMULATE_ASAN
  void *fake = nullptr;
  __sanitizer_start_switch_fiber(&fake, stack, STACK);
  emulate_switch(&runner->home, sp);
  __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#else
  (void)stack;
  emulate_switch(&runner->home, sp);
#endif
}

static void fail(const char *text) {
  if (!runner->failed) runner->failure = text;
  runner->failed = true;
}

/* A fiber's loop: the thread it was given, then those that have not begun. */
static void run_threads() {
  Runner *r = runner;
#ifdef EMULATE_ASAN
  __sanitizer_finish_switch_fiber(nullptr, &r->home_bottom, &r->home_size);
#endif
  for (;;) {
    EmulateThread *t = emulate_thread;
    (*r->body)();
    int fiber = t->fiber;
    t->state = DONE;
    r->live--;
    r->warps[t->warp].alive &= ~(1u << t->lane);
    bool more = r->next < r->n && r->threads[r->order[r->next]].state == NEW && !r->failed;
    if (!more) {
      r->idle.push_back(fiber);
      leave(&t->sp, true);
    }
    emulate_thread = t = &r->threads[r->order[r->next++]];
    t->fiber = fiber;
  }
}

static int take_fiber(Runner *r) {
  if (r->idle.empty()) {
    void *p = mmap(nullptr, STACK + GUARD, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) return -1;
    mprotect(p, GUARD, PROT_NONE);
    r->stacks.push_back((char *)p + GUARD);
    r->idle.push_back((int)r->stacks.size() - 1);
  }
  int fiber = r->idle.back();
  r->idle.pop_back();
  return fiber;
}

static void begin_thread(Runner *r, EmulateThread *t) {
  t->fiber = take_fiber(r);
  if (t->fiber < 0) return fail("out of memory for the threads of a block");
  char *stack = r->stacks[(size_t)t->fiber];
  void **top = (void **)(stack + STACK) - FRAME_WORDS - 4;
  memset(top, 0, (FRAME_WORDS + 4) * sizeof *top);
  top[FRAME_RETURN] = (void *)run_threads;
  emulate_thread = t;
  enter(top, stack);
}

/* All that wait and need wait no longer are ready. */
static void release_waiting(Runner *r) {
  int waiting = 0;
  for (int i = 0; i < r->n; i++) waiting += r->threads[i].state == AT_BARRIER;
  if (waiting && waiting == r->live)
    for (int i = 0; i < r->n; i++)
      if (r->threads[i].state == AT_BARRIER) r->threads[i].state = READY;
}

static bool warp_complete(const Warp *w) {
  return w->arrived && (w->arrived & w->mask) == w->mask;
}

static uint32_t next_random(Runner *r) {
  r->random ^= r->random << 13;
  r->random ^= r->random >> 17;
  r->random ^= r->random << 5;
  return r->random;
}

static void shuffle(Runner *r, int *list, int n) {
  for (int i = n - 1; i > 0; i--) {
    int j = (int)(next_random(r) % (uint32_t)(i + 1)), t = list[i];
    list[i] = list[j], list[j] = t;
  }
}

static void prepare_block(Runner *r) {
  dim3 size = emulate_block.size;
  r->n = r->live = (int)(size.x * size.y * size.z);
  for (int i = 0; i < r->n; i++) {
    unsigned k = (unsigned)i;
    r->threads[i] = EmulateThread{{k % size.x, k / size.x % size.y, k / size.x / size.y},
                                  k % 32,
                                  k / 32,
                                  NEW,
                                  nullptr,
                                  -1,
                                  0};
    r->order[i] = i;
  }
  for (int w = 0; w * 32 < r->n; w++) {
    int lanes = r->n - w * 32 < 32 ? r->n - w * 32 : 32;
    r->warps[w].arrived = 0;
    r->warps[w].alive = lanes == 32 ? 0xffffffffu : (1u << lanes) - 1;
  }
  if (r->swap) shuffle(r, r->order, r->n);
}

static void run_block(Runner *r) {
  prepare_block(r);
  while (r->live && !r->failed) {
    bool moved = false;
    for (r->next = 0; r->next < r->n && !r->failed;) {
      EmulateThread *t = &r->threads[r->order[r->next++]];
      if (t->state == NEW) {
        begin_thread(r, t);
        moved = true;
      } else if (t->state == READY) {
        emulate_thread = t;
        enter(t->sp, r->stacks[(size_t)t->fiber]);
        moved = true;
      }
    }
    release_waiting(r);
    bool ready = false;
    for (int i = 0; i < r->n; i++) ready |= r->threads[i].state == READY;
    if (!moved && !ready && r->live) fail("its threads wait for each other for ever");
    if (r->swap) shuffle(r, r->order, r->n);
  }
  if (!r->failed) return;
  r->idle.clear(); /* what fibers hold is given up with them */
  for (int i = 0; i < (int)r->stacks.size(); i++) r->idle.push_back(i);
}

void emulate_barrier() {
  Runner *r = runner;
  EmulateThread *t = emulate_thread;
  t->state = AT_BARRIER;
  leave(&t->sp, false);
  (void)r;
}

const uint64_t *emulate_warp(unsigned mask, uint64_t value) {
  Runner *r = runner;
  EmulateThread *t = emulate_thread;
  Warp *w = &r->warps[t->warp];
  emulate_check(mask >> t->lane & 1, "a thread takes part in an exchange whose mask lacks it");
  emulate_check((mask & ~w->alive) == 0 || mask == 0xffffffffu,
                "an exchange's mask names threads that have ended");
  emulate_check(!w->arrived || w->mask == (mask & w->alive),
                "threads of one warp exchange under different masks");
  if (!w->arrived) w->mask = mask & w->alive;
  w->values[w->generation & 1][t->lane] = value;
  w->arrived |= 1u << t->lane;
  int generation = w->generation;
  if (!warp_complete(w)) {
    t->state = AT_WARP;
    t->waits_for = generation;
    leave(&t->sp, false);
  } else {
    w->generation++;
    w->arrived = 0;
    int last = (int)(t->warp + 1) * 32 < r->n ? (int)(t->warp + 1) * 32 : r->n;
    for (int i = (int)t->warp * 32; i < last; i++)
      if (r->threads[i].state == AT_WARP) r->threads[i].state = READY;
  }
  return w->values[generation & 1];
}

void emulate_check(bool holds, const char *text) {
  if (holds) return;
  fail(text);
  leave(&emulate_thread->sp, true);
}

void *emulate_shared() {
  return runner->shared + SHARED - ((runner->shared_bytes + 15) & ~(size_t)15);
}

/* -- Streams ----------------------------------------------------------------------------------- */

struct EmulateStream {
  std::mutex lock;
  std::condition_variable wake, done;
  std::deque<std::function<void()>> queue;
  bool busy, ends, failed;
  std::string failure;
  std::thread thread;
};

struct EmulateEvent {
  std::mutex lock;
  std::condition_variable done;
  uint64_t asked, reached;
  int users; /* the handle, and what is queued */
};

static thread_local std::string last_failure;

static void runner_open(Runner *r) {
  void *p =
      mmap(nullptr, SHARED + GUARD, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  r->shared = (char *)p;
  mprotect(r->shared + SHARED, GUARD, PROT_NONE);
  const char *which = getenv("MF_CUDA"), *seed = which ? strstr(which, "permute=") : nullptr;
  r->swap = seed != nullptr;
  r->random = seed ? (uint32_t)atoi(seed + 8) * 2654435761u | 1 : 1;
}

static void runner_close(Runner *r) {
  for (char *stack : r->stacks) munmap(stack - GUARD, STACK + GUARD);
  munmap(r->shared, SHARED + GUARD);
}

static void stream_work(EmulateStream *s) {
  Runner *r = new Runner();
  runner_open(r);
  runner = r;
  std::unique_lock<std::mutex> lock(s->lock);
  for (;;) {
    s->wake.wait(lock, [s] { return s->ends || !s->queue.empty(); });
    if (s->queue.empty()) break;
    std::function<void()> work = std::move(s->queue.front());
    s->queue.pop_front();
    s->busy = true;
    lock.unlock();
    work();
    work = nullptr;
    lock.lock();
    if (r->failed && !s->failed) {
      s->failed = true;
      s->failure = r->failure;
    }
    s->busy = false;
    s->done.notify_all();
  }
  lock.unlock();
  runner_close(r);
  delete r;
}

cudaError_t emulate_enqueue(cudaStream_t s, std::function<void()> work) {
  std::lock_guard<std::mutex> lock(s->lock);
  s->queue.push_back(std::move(work));
  s->wake.notify_one();
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *out, unsigned) {
  EmulateStream *s = new EmulateStream();
  s->thread = std::thread(stream_work, s);
  *out = s;
  return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t s) {
  {
    std::lock_guard<std::mutex> lock(s->lock);
    s->ends = true;
    s->wake.notify_one();
  }
  s->thread.join();
  delete s;
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t s) {
  std::unique_lock<std::mutex> lock(s->lock);
  s->done.wait(lock, [s] { return s->queue.empty() && !s->busy; });
  if (!s->failed) return cudaSuccess;
  last_failure = s->failure;
  return cudaErrorLaunchFailure;
}

static void run_grid(const char *name, dim3 grid, dim3 block, size_t shared,
                     const std::function<void()> &body) {
  Runner *r = runner;
  if (r->failed) return; /* as after a fault on a device */
  uint64_t n = (uint64_t)grid.x * grid.y * grid.z;
  uint64_t step = 1;
  if (r->swap && n > 2) { /* a step without a common factor visits all */
    step = next_random(r) % n | 1;
    for (uint64_t a = step, b = n;; a = step = step + 1 < n ? step + 1 : 1, b = n) {
      while (b) {
        uint64_t t = a % b;
        a = b, b = t;
      }
      if (a == 1) break;
    }
  }
  emulate_block.size = block;
  emulate_block.grid = grid;
  r->body = &body;
  r->shared_bytes = shared;
  for (uint64_t i = 0, k = 0; i < n && !r->failed; i++, k = (k + step) % n) {
    emulate_block.index = {(unsigned)(k % grid.x), (unsigned)(k / grid.x % grid.y),
                           (unsigned)(k / grid.x / grid.y)};
    run_block(r);
  }
  if (r->failed) r->failure = std::string(name) + ": " + r->failure;
}

cudaError_t emulate_launch(const char *name, dim3 grid, dim3 block, size_t shared, cudaStream_t s,
                           std::function<void()> body) {
  uint64_t threads = (uint64_t)block.x * block.y * block.z;
  bool legal = grid.x >= 1 && grid.y >= 1 && grid.z >= 1 && threads >= 1 && threads <= THREADS &&
               block.z <= 64 && grid.x <= 0x7fffffffu && grid.y <= 65535 && grid.z <= 65535 &&
               shared <= SHARED;
  if (!legal) return cudaErrorInvalidConfiguration;
  return emulate_enqueue(
      s, [=, body = std::move(body)] { run_grid(name, grid, block, shared, body); });
}

/* -- Events ------------------------------------------------------------------------------------ */

static void event_release(EmulateEvent *e) {
  e->lock.lock();
  bool last = --e->users == 0;
  e->lock.unlock();
  if (last) delete e;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned) {
  *e = new EmulateEvent();
  (*e)->users = 1;
  return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t e) {
  event_release(e);
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) {
  e->lock.lock();
  uint64_t mark = ++e->asked;
  e->users++;
  e->lock.unlock();
  return emulate_enqueue(s, [e, mark] {
    e->lock.lock();
    if (mark > e->reached) e->reached = mark;
    e->done.notify_all();
    e->lock.unlock();
    event_release(e);
  });
}

cudaError_t cudaEventQuery(cudaEvent_t e) {
  std::lock_guard<std::mutex> lock(e->lock);
  return e->reached >= e->asked ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaEventSynchronize(cudaEvent_t e) {
  std::unique_lock<std::mutex> lock(e->lock);
  e->done.wait(lock, [e] { return e->reached >= e->asked; });
  return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned) {
  e->lock.lock();
  uint64_t mark = e->asked;
  e->users++;
  e->lock.unlock();
  return emulate_enqueue(s, [e, mark] {
    {
      std::unique_lock<std::mutex> lock(e->lock);
      e->done.wait(lock, [e, mark] { return e->reached >= mark; });
    }
    event_release(e);
  });
}

/* -- Memory ------------------------------------------------------------------------------------ */

enum { DEVICES = 2, ALIGN = 256, CANARY = 0xA5 };
static const size_t device_bytes = (size_t)2 << 30;

struct Allocation {
  size_t bytes, mapped;
  char *map;
  int device;
};
/* All of the process, as those of a device are. */
struct Registry {
  std::mutex lock;
  std::map<const char *, Allocation> all;
  std::map<const char *, size_t> pinned; /* of the host */
  size_t in_use[DEVICES];
};
static Registry &registry() {
  static Registry *r = new Registry();
  return *r;
}
static thread_local int current_device;

cudaError_t cudaGetDeviceCount(int *n) {
  *n = DEVICES;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int i) {
  if (i < 0 || i >= DEVICES) return cudaErrorInvalidDevice;
  current_device = i;
  return cudaSuccess;
}

cudaError_t cudaMalloc(void **p, size_t bytes) {
  Registry &r = registry();
  size_t page = (size_t)sysconf(_SC_PAGESIZE), kept = (bytes + ALIGN - 1) & ~(size_t)(ALIGN - 1);
  size_t body = (kept + page - 1) & ~(page - 1);
  std::lock_guard<std::mutex> lock(r.lock);
  if (bytes > device_bytes || r.in_use[current_device] + bytes > device_bytes)
    return cudaErrorMemoryAllocation;
  char *map = (char *)mmap(nullptr, body + page, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (map == MAP_FAILED) return cudaErrorMemoryAllocation;
  mprotect(map + body, page, PROT_NONE);
  char *at = map + body - kept;
  memset(at + bytes, CANARY, kept - bytes);
#ifdef EMULATE_ASAN
  __asan_poison_memory_region(at + bytes, kept - bytes);
#endif
  r.all[at] = Allocation{bytes, body + page, map, current_device};
  r.in_use[current_device] += bytes;
  *p = at;
  return cudaSuccess;
}

static bool is_whole(const char *at, const Allocation &a) {
  size_t kept = (a.bytes + ALIGN - 1) & ~(size_t)(ALIGN - 1);
#ifdef EMULATE_ASAN
  __asan_unpoison_memory_region(at + a.bytes, kept - a.bytes);
#endif
  for (size_t i = a.bytes; i < kept; i++)
    if ((unsigned char)at[i] != CANARY) return false;
  return true;
}

cudaError_t cudaFree(void *p) {
  Registry &r = registry();
  if (!p) return cudaSuccess;
  std::lock_guard<std::mutex> lock(r.lock);
  auto found = r.all.find((char *)p);
  if (found == r.all.end()) return cudaErrorInvalidValue;
  Allocation a = found->second;
  bool whole = is_whole((char *)p, a);
  r.all.erase(found);
  r.in_use[a.device] -= a.bytes;
  munmap(a.map, a.mapped);
  if (!whole) last_failure = "something was written behind the end of a block of memory";
  return whole ? cudaSuccess : cudaErrorLaunchFailure;
}

cudaError_t cudaHostAlloc(void **p, size_t bytes, unsigned) {
  Registry &r = registry();
  std::lock_guard<std::mutex> lock(r.lock);
  *p = aligned_alloc(64, (bytes + 63) & ~(size_t)63);
  if (*p) r.pinned[(const char *)*p] = bytes;
  return *p ? cudaSuccess : cudaErrorMemoryAllocation;
}

cudaError_t cudaFreeHost(void *p) {
  Registry &r = registry();
  std::lock_guard<std::mutex> lock(r.lock);
  r.pinned.erase((const char *)p);
  free(p);
  return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total) {
  Registry &r = registry();
  std::lock_guard<std::mutex> lock(r.lock);
  *total = device_bytes;
  *free_bytes = device_bytes - r.in_use[current_device];
  return cudaSuccess;
}

static bool is_on_device(const void *p) {
  Registry &r = registry();
  std::lock_guard<std::mutex> lock(r.lock);
  auto next = r.all.upper_bound((const char *)p);
  if (next == r.all.begin()) return false;
  --next;
  return (const char *)p < next->first + next->second.bytes + 1;
}

static bool is_pinned(const void *p) {
  Registry &r = registry();
  std::lock_guard<std::mutex> lock(r.lock);
  auto next = r.pinned.upper_bound((const char *)p);
  if (next == r.pinned.begin()) return false;
  --next;
  return (const char *)p < next->first + next->second;
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *a, const void *p) {
  a->type = is_on_device(p) ? cudaMemoryTypeDevice
            : is_pinned(p)  ? cudaMemoryTypeHost
                            : cudaMemoryTypeUnregistered;
  return cudaSuccess;
}

/* MF_CUDA=emulate,foreign: devices of an architecture that there are no kernels for. */
cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr what, int) {
  const char *which = getenv("MF_CUDA");
  bool foreign = which && strstr(which, "foreign");
  *value = what == cudaDevAttrComputeCapabilityMinor ? 0 : foreign ? 6 : 9;
  return cudaSuccess;
}

/* From ordinary memory of the host it is taken at once; what is written there is waited for. */
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind,
                            cudaStream_t s) {
  if (!is_on_device(from) && !is_pinned(from)) {
    std::string staged((const char *)from, bytes);
    return emulate_enqueue(s,
                           [=, staged = std::move(staged)] { memcpy(to, staged.data(), bytes); });
  }
  cudaError_t e = emulate_enqueue(s, [=] { memmove(to, from, bytes); });
  return e || is_on_device(to) || is_pinned(to) ? e : cudaStreamSynchronize(s);
}

cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t s) {
  return emulate_enqueue(s, [=] { memset(to, value, bytes); });
}

cudaError_t cudaDeviceSynchronize() {
  return cudaSuccess;
}

/* -- Errors ------------------------------------------------------------------------------------ */

cudaError_t cudaGetLastError() {
  return cudaSuccess;
}

const char *emulate_error_text() {
  return last_failure.c_str();
}

const char *cudaGetErrorString(cudaError_t e) {
  switch (e) {
    case cudaSuccess: return "no error";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorInvalidConfiguration: return "invalid configuration argument";
    case cudaErrorInvalidDevice: return "invalid device ordinal";
    case cudaErrorNotReady: return "device not ready";
    case cudaErrorLaunchFailure: return last_failure.c_str();
    default: return "invalid argument";
  }
}
