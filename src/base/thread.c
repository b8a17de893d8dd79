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

/* OpenMP may give a region fewer threads than omp_get_max_threads() says, by OMP_DYNAMIC,
 * OMP_THREAD_LIMIT or OMP_MAX_ACTIVE_LEVELS, and oneDNN waits for ever for those that are missing.
 */
int thread_count(void) {
  if (omp_get_dynamic()) omp_set_dynamic(0);
  if (omp_get_max_active_levels() < 1) omp_set_max_active_levels(1);
  if (omp_get_active_level() >= omp_get_max_active_levels()) return 1;
  int n = omp_get_max_threads(), most = omp_get_thread_limit();
  if (n > most) omp_set_num_threads(n = most);
  return n;
}

void thread_set_count(int n) {
  omp_set_num_threads(n);
  thread_count();
}

void mf_parallel(int64_t n, int64_t grain, ThreadBody *body, void *arg) {
  if (n <= 0) return;
  int64_t parts = grain > 0 ? (n + grain - 1) / grain : n;
  int64_t threads = thread_count();
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
