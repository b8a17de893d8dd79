/* Messages between Lua states of one context: what worker.c and feed.c share. */
#ifndef MF_BIND_LINK_H
#define MF_BIND_LINK_H
#include <pthread.h>

#include "job.h"
#include "state.h"

typedef struct Message {
  struct Message *next;
  char *bytes; /* and a zero */
  size_t n;
  int n_tensors;
  JobTensor tensors[]; /* counted */
} Message;

typedef struct MessageQueue {
  Message *head, **tail;
  bool closed;
} MessageQueue;

/* A worker thread and who started it. */
typedef struct Link {
  pthread_mutex_t lock;
  pthread_cond_t changed;
  pthread_t thread;
  Context *context;
  MessageQueue to_worker, to_owner;
  int refs;      /* the two ends, and feeds; under the lock */
  char why[200]; /* why the thread ended before it could serve; under the lock */
} Link;

void link_put(MessageQueue *q, Message *m);
Message *link_get(MessageQueue *q);
void link_queue_free(MessageQueue *q);
void link_message_free(Message *m);
/* The string and the table of tensors at these indices as a message; raises. */
Message *link_read_message(State *S, lua_State *L, int bytes, int table);
/* Pushes a table of its tensors. */
void link_push_tensors(State *S, lua_State *L, const Message *m);
/* Waits for a change, for a short while. */
void link_wait(pthread_cond_t *changed, pthread_mutex_t *lock);
/* The worker's next message; NULL: there is none any more (*closed) or stopped(arg), which is asked
 * often. From any thread. */
Message *link_receive(Link *link, bool (*stopped)(void *), void *arg, bool *closed);
/* The link of the worker at an index, counted; NULL: closed. Overwrites index 1. */
Link *link_of(lua_State *L, int index);
void link_release(Link *link);

#endif
