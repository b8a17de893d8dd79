/* Threads inside one kernel: the one place that knows OpenMP. */
#ifndef MF_THREAD_H
#define MF_THREAD_H
#include <stdint.h>

typedef void ThreadBody(int64_t begin, int64_t end, void *arg);

/* Runs body over [0, n) cut into one contiguous range a thread, each at least `grain` long (the
 * last may be shorter); on the caller alone when n <= grain. Returns when all ranges are done.
 * Ranges depend only on n, grain and thread_count(), so that reductions over them are repeatable.
 * Bodies must not raise Lua errors, touch a Lua state or call mf_parallel. */
void mf_parallel(int64_t n, int64_t grain, ThreadBody *body, void *arg);

/* How many threads mf_parallel of the calling thread uses; set for the calling thread only (n >=
 * 1). OpenMP's limit of threads lowers it. */
int thread_count(void);
void thread_set_count(int n);

#endif
