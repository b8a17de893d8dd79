/* Worker threads with Lua states of their own, over the same context; what lua/worker.lua is built
 * on.
 *
 *   local w = mf._worker_start()        starts a thread that runs
 * require('moonflow.worker').serve(its end) w:send(bytes, tensors)              a message: a string
 * and a table of tensors, which cross by shared storage local bytes, tensors = w:receive()  the
 * next message; nil when the other side has closed w:close()                           no more
 * messages either way; waits for the thread
 *
 * The two ends share a Link with one queue each way. A queue is a list under a mutex; it is not
 * bounded here, since the loader never has more than a few batches under way. The thread ends when
 * it finds its queue closed. Waiting on Lua's side ends on the context's interrupt. */
#include <lualib.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "host.h"
#include "link.h"
#include "moonflow_lua.h"
#include "thread_start.h"

/* The userdata of an end. */
typedef struct End {
  Link *link;  /* NULL after close */
  bool inside; /* in the worker */
} End;

static const char end_type[] = "moonflow.worker";

/* -- Messages ---------------------------------------------------------------------------------- */

void link_message_free(Message *m) {
  for (int i = 0; i < m->n_tensors; i++) storage_release(m->tensors[i].storage);
  mem_free(m->bytes);
  mem_free(m);
}

void link_queue_free(MessageQueue *q) {
  while (q->head) {
    Message *next = q->head->next;
    link_message_free(q->head);
    q->head = next;
  }
  q->tail = &q->head;
}

void link_release(Link *link) {
  pthread_mutex_lock(&link->lock);
  bool last = --link->refs == 0;
  pthread_mutex_unlock(&link->lock);
  if (!last) return;
  link_queue_free(&link->to_worker);
  link_queue_free(&link->to_owner);
  pthread_mutex_destroy(&link->lock);
  pthread_cond_destroy(&link->changed);
  context_release(link->context);
  mem_free(link);
}

/* Closes both queues and lets go of the link; the owner's end waits for the thread, which finds no
 * more work than what it is at. */
static void end_close(End *end) {
  Link *link = end->link;
  if (!link) return;
  end->link = NULL;
  pthread_mutex_lock(&link->lock);
  link->to_worker.closed = true;
  if (!end->inside) link->to_owner.closed = true; /* the thread does, when it knows why it ended */
  if (!end->inside) link_queue_free(&link->to_worker);
  pthread_cond_broadcast(&link->changed);
  pthread_mutex_unlock(&link->lock);
  if (!end->inside) pthread_join(link->thread, NULL);
  link_release(link);
}

static End *check_end(lua_State *L) {
  End *end = lua_touserdata(L, 1);
  if (end && lua_getmetatable(L, 1)) {
    luaL_getmetatable(L, end_type);
    bool same = lua_rawequal(L, -1, -2);
    lua_pop(L, 2);
    if (same) return end;
  }
  luaL_error(L, "worker: the first argument must be a worker");
  return NULL;
}

/* -- send, receive ----------------------------------------------------------------------------- */

Message *link_read_message(State *S, lua_State *L, int bytes_index, int table) {
  size_t n;
  const char *bytes = luaL_checklstring(L, bytes_index, &n);
  luaL_checktype(L, table, LUA_TTABLE);
  int count = (int)lua_objlen(L, table);
  for (int i = 1; i <= count; i++) { /* everything that may raise comes before anything is held */
    lua_rawgeti(L, table, i);
    Tensor *t = bind_check_tensor(S, L, -1, "worker", "a tensor of the message");
    if (!t->storage) bind_error(L, "worker: a row-sparse tensor cannot cross");
    if (t->layout) bind_error(L, "worker: a global tensor cannot cross");
    if (tensor_settle(t)) bind_raise(L);
    lua_pop(L, 1);
  }
  Message *m = mem_alloc(sizeof *m + sizeof(JobTensor) * (size_t)count);
  char *copy = mem_alloc(n + 1);
  if (!m || !copy) {
    mem_free(m);
    mem_free(copy);
    bind_error(L, "worker: out of memory");
    return NULL;
  }
  memcpy(copy, bytes, n);
  copy[n] = 0;
  *m = (Message){.bytes = copy, .n = n, .n_tensors = count};
  for (int i = 0; i < count; i++) {
    lua_rawgeti(L, table, i + 1);
    Tensor *t = bind_to_tensor(S, L, -1);
    m->tensors[i] = (JobTensor){t->m, t->storage};
    storage_retain(t->storage);
    lua_pop(L, 1);
  }
  return m;
}

void link_push_tensors(State *S, lua_State *L, const Message *m) {
  lua_createtable(L, m->n_tensors, 0);
  for (int i = 0; i < m->n_tensors; i++) {
    Tensor *t = tensor_adopt(S->E, m->tensors[i].storage, &m->tensors[i].m);
    if (!t) bind_raise(L);
    bind_push(S, L, t);
    lua_rawseti(L, -2, i + 1);
  }
}

void link_put(MessageQueue *q, Message *m) {
  m->next = NULL;
  *q->tail = m;
  q->tail = &m->next;
}

Message *link_get(MessageQueue *q) {
  Message *m = q->head;
  if (m && !(q->head = m->next)) q->tail = &q->head;
  return m;
}

static int end_send(lua_State *L) {
  State *S = bind_state(L);
  End *end = check_end(L);
  Message *m = link_read_message(S, L, 2, 3);
  bool sent = false;
  if (end->link) {
    MessageQueue *q = end->inside ? &end->link->to_owner : &end->link->to_worker;
    pthread_mutex_lock(&end->link->lock);
    if (!q->closed) {
      link_put(q, m);
      sent = true;
      pthread_cond_broadcast(&end->link->changed);
    }
    pthread_mutex_unlock(&end->link->lock);
  }
  if (!sent) link_message_free(m);
  lua_pushboolean(L, sent);
  return 1;
}

void link_wait(pthread_cond_t *changed, pthread_mutex_t *lock) {
  struct timespec until;
  clock_gettime(CLOCK_REALTIME, &until);
  until.tv_nsec += 50000000;
  if (until.tv_nsec >= 1000000000) until.tv_nsec -= 1000000000, until.tv_sec++;
  pthread_cond_timedwait(changed, lock, &until);
}

Message *link_receive(Link *link, bool (*stopped)(void *), void *arg, bool *closed) {
  Message *m;
  pthread_mutex_lock(&link->lock);
  while (!(m = link_get(&link->to_owner)) && !link->to_owner.closed && !stopped(arg))
    link_wait(&link->changed, &link->lock);
  *closed = link->to_owner.closed;
  pthread_mutex_unlock(&link->lock);
  return m;
}

Link *link_of(lua_State *L, int index) {
  lua_pushvalue(L, index);
  lua_replace(L, 1);
  End *end = check_end(L);
  if (!end->link) return NULL;
  pthread_mutex_lock(&end->link->lock);
  end->link->refs++;
  pthread_mutex_unlock(&end->link->lock);
  return end->link;
}

/* The next message; NULL when closed, or with *interrupted set. */
static Message *take(End *end, bool *interrupted) {
  Link *link = end->link;
  if (!link) return NULL;
  MessageQueue *q = end->inside ? &link->to_worker : &link->to_owner;
  Message *m = NULL;
  pthread_mutex_lock(&link->lock);
  while (!(m = link_get(q)) && !q->closed && !*interrupted) {
    link_wait(&link->changed, &link->lock);
    if (!end->inside) *interrupted = atomic_exchange(&link->context->interrupted, false);
  }
  pthread_mutex_unlock(&link->lock);
  return m;
}

static int message_gc(lua_State *L) {
  Message **m = lua_touserdata(L, 1);
  if (*m) link_message_free(*m);
  *m = NULL;
  return 0;
}

/* nil twice and the reason, when the other side ended before it could say one itself. */
static int push_why(lua_State *L, Link *link) {
  char why[sizeof link->why] = "";
  if (link) {
    pthread_mutex_lock(&link->lock);
    memcpy(why, link->why, sizeof why);
    pthread_mutex_unlock(&link->lock);
  }
  lua_pushnil(L);
  lua_pushnil(L);
  lua_pushstring(L, why);
  return *why ? 3 : 0;
}

static int end_receive(lua_State *L) {
  State *S = bind_state(L);
  End *end = check_end(L);
  Message **held =
      lua_newuserdata(L, sizeof *held); /* so that an error while pushing loses nothing */
  *held = NULL;
  lua_createtable(L, 0, 1);
  lua_pushcfunction(L, message_gc);
  lua_setfield(L, -2, "__gc");
  lua_setmetatable(L, -2);
  bool interrupted = false;
  *held = take(end, &interrupted);
  if (interrupted) {
    err_set(MF_EINTR, "interrupted");
    return bind_raise(L);
  }
  if (!*held) return push_why(L, end->link);
  Message *m = *held;
  lua_pushlstring(L, m->bytes, m->n);
  link_push_tensors(S, L, m);
  link_message_free(m);
  *held = NULL;
  return 2;
}

static int end_close_method(lua_State *L) {
  end_close(check_end(L));
  return 0;
}

static int end_gc(lua_State *L) {
  end_close(lua_touserdata(L, 1));
  return 0;
}

/* -- The thread -------------------------------------------------------------------------------- */

static void push_end(State *S, lua_State *L, Link *link, bool inside) {
  End *end = lua_newuserdata(L, sizeof *end);
  *end = (End){link, inside};
  if (luaL_newmetatable(L, end_type)) {
    lua_newtable(L);
    bind_function(S, L, "send", end_send);
    bind_function(S, L, "receive", end_receive);
    bind_function(S, L, "close", end_close_method);
    lua_setfield(L, -2, "__index");
    lua_pushcfunction(L, end_gc);
    lua_setfield(L, -2, "__gc");
  }
  lua_setmetatable(L, -2);
}

/* The whole life of the worker's state, protected. Argument: the Link. */
static int worker_main(lua_State *L) {
  Link *link = lua_touserdata(L, 1);
  bind_begin_thread(L, link->context, "moonflow.worker");
  lua_getfield(L, -1, "serve");
  State *S = bind_find_state(L);
  S->E->background = true;
  push_end(S, L, NULL, true);
  pthread_mutex_lock(&link->lock);
  link->refs++;
  pthread_mutex_unlock(&link->lock);
  ((End *)lua_touserdata(L, -1))->link = link;
  lua_call(L, 1, 0);
  return 0;
}

static void *worker_thread(void *arg) {
  Link *link = arg;
  lua_State *L = bind_new_lua();
  char why[sizeof link->why] = "out of memory";
  if (L) { /* serve reports its errors as messages */
    if (!lua_cpcall(L, worker_main, link)) *why = 0;
    else if (lua_tostring(L, -1)) snprintf(why, sizeof why, "%s", lua_tostring(L, -1));
    lua_close(L);
  }
  pthread_mutex_lock(&link->lock);
  memcpy(link->why, why, sizeof why);
  link->to_owner.closed = true;
  pthread_cond_broadcast(&link->changed);
  pthread_mutex_unlock(&link->lock);
  link_release(link);
  return NULL;
}

static int worker_start(lua_State *L) {
  State *S = bind_state(L);
  push_end(S, L, NULL, false);
  End *end = lua_touserdata(L, -1);
  Link *link = mem_zalloc(sizeof *link);
  if (!link) return bind_error(L, "worker: out of memory");
  pthread_mutex_init(&link->lock, NULL);
  pthread_cond_init(&link->changed, NULL);
  link->to_worker.tail = &link->to_worker.head;
  link->to_owner.tail = &link->to_owner.head;
  link->context = S->context;
  context_retain(S->context);
  link->refs = 2; /* this end and the thread; the worker's end counts itself */
  if (thread_start(&link->thread, worker_thread, link)) {
    link->refs = 1;
    link_release(link);
    return bind_error(L, "worker: the system gives no more threads");
  }
  end->link = link;
  return 1;
}

void bind_open_worker(State *S, lua_State *L) {
  bind_function(S, L, "_worker_start", worker_start);
}
