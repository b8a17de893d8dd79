/* Starting a thread. */
#ifndef MF_THREAD_START_H
#define MF_THREAD_START_H
#include <pthread.h>

/* pthread_create with the usual attributes: 0 or not. A wrapper, so that tests can make it fail. */
int thread_start(pthread_t *thread, void *(*run)(void *arg), void *arg);

#endif
