/* mf_parallel over OpenMP, or serial when built without it (the thread sanitizer does not know
 * libgomp). */
#include "thread.h"

#include <errno.h>

#include "fault.h"
#include "thread_start.h"

int thread_start(pthread_t *thread, void *(*run)(void *arg), void *arg) {
  return fault_here(FAULT_THREAD) ? EAGAIN : pthread_create(thread, NULL, run, arg);
}

#ifdef _OPENMP
#include <omp.h>

int thread_count(void) {
  return omp_get_max_threads();
}

void thread_set_count(int n) {
  omp_set_num_threads(n);
}

void mf_parallel(int64_t n, int64_t grain, ThreadBody *body, void *arg) {
  if (n <= 0) return;
  int64_t parts = grain > 0 ? (n + grain - 1) / grain : n;
  int64_t threads = omp_get_max_threads();
  if (threads < parts) parts = threads;
  if (parts <= 1) {
    body(0, n, arg);
    return;
  }
  int64_t size = n / parts, extra = n % parts;
#pragma omp parallel for num_threads((int)parts) schedule(static, 1)
  for (int64_t p = 0; p < parts; p++) {
    int64_t begin = p * size + (p < extra ? p : extra);
    body(begin, begin + size + (p < extra), arg);
  }
}
#else

int thread_count(void) {
  return 1;
}

void thread_set_count(int n) {
  (void)n;
}

void mf_parallel(int64_t n, int64_t grain, ThreadBody *body, void *arg) {
  (void)grain;
  if (n > 0) body(0, n, arg);
}
#endif
