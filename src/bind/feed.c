/* Where compiled steps that run over a loader get their batches: lua/flow.lua's side.
 *
 *   local feed = mf._feed(workers)     from workers in turn; {}: from what is pushed here
 *   feed:push(kind, tensors)           a batch (kind ''), or the end ('.')
 *   feed:peek()                        the next batch's tensors, which stay; nil: there is none
 *   feed:skip()                        drops what peek showed
 *   feed:taken()                       how many messages came out of the workers, or what was
 * pushed
 *
 * A message is a batch, whose bytes are empty, or says by its first letter that there is no more
 * ('.') or why not ('E' and the text). A feed is counted: by its userdata, and by the flow that
 * reads it, on one of its threads. What is in `front` comes before all others. */
#include <stdatomic.h>
#include <string.h>

#include "feed.h"
#include "link.h"

struct Feed {
  atomic_int refs;
  Context *context;
  Link **links;
  int n_links;
  pthread_mutex_t lock; /* of pushed and front */
  pthread_cond_t changed;
  MessageQueue pushed, front;
  atomic_ullong taken;
  Message *shown; /* of peek; the reader's */
};

static const char feed_type[] = "moonflow.feed";

static void feed_release(void *ud) {
  Feed *f = ud;
  if (atomic_fetch_sub(&f->refs, 1) > 1) return;
  for (int k = 0; k < f->n_links; k++)
    if (f->links[k]) link_release(f->links[k]);
  mem_free(f->links);
  if (f->shown) link_message_free(f->shown);
  link_queue_free(&f->pushed);
  link_queue_free(&f->front);
  pthread_mutex_destroy(&f->lock);
  pthread_cond_destroy(&f->changed);
  context_release(f->context);
  mem_free(f);
}

/* -- As a source ------------------------------------------------------------------------------- */

/* The next message that was pushed or put back; NULL: there is none, when it is not to be waited
 * for. */
static Message *get_here(Feed *f, bool (*stopped)(void *), void *arg) {
  pthread_mutex_lock(&f->lock);
  Message *m = link_get(&f->front);
  bool back = m != NULL;
  while (!m && !f->n_links && !(m = link_get(&f->pushed)) && !stopped(arg))
    link_wait(&f->changed, &f->lock);
  pthread_mutex_unlock(&f->lock);
  if (m && !back) atomic_fetch_add(&f->taken, 1);
  return m;
}

static Message *get(Feed *f, bool (*stopped)(void *), void *arg, bool *closed) {
  *closed = false;
  Message *m = get_here(f, stopped, arg);
  if (m || !f->n_links) return m;
  Link *link = f->links[atomic_load(&f->taken) % (unsigned)f->n_links];
  *closed = !link;
  m = link ? link_receive(link, stopped, arg, closed) : NULL;
  if (m) atomic_fetch_add(&f->taken, 1);
  return m;
}

static int feed_peek(void *ud, bool (*stopped)(void *), void *arg, int *n,
                     const JobTensor **tensors) {
  Feed *f = ud;
  bool closed;
  if (!f->shown) f->shown = get(f, stopped, arg, &closed);
  if (!f->shown && closed) return err_set(MF_ELUA, "DataLoader: a worker ended without an answer");
  if (!f->shown) return err_set(MF_EINTR, "interrupted");
  const Message *m = f->shown;
  if (m->n && m->bytes[0] == 'E') return err_set(MF_ELUA, "%s", m->bytes + 1);
  if (m->n) return JOB_END;
  *n = m->n_tensors;
  *tensors = m->tensors;
  return 0;
}

static void *feed_take(void *ud) {
  Feed *f = ud;
  Message *m = f->shown;
  f->shown = NULL;
  return m;
}

static void put_front(Feed *f, Message *m) {
  pthread_mutex_lock(&f->lock);
  m->next = f->front.head;
  if (!m->next) f->front.tail = &m->next;
  f->front.head = m;
  pthread_mutex_unlock(&f->lock);
}

/* What was shown came behind it. */
static void feed_put_back(void *ud, void *batch) {
  Feed *f = ud;
  if (f->shown) put_front(f, f->shown);
  f->shown = NULL;
  put_front(f, batch);
}

static void feed_drop(void *ud, void *batch) {
  (void)ud;
  link_message_free(batch);
}

static void feed_wake(void *ud) {
  Feed *f = ud;
  pthread_mutex_lock(&f->lock);
  pthread_cond_broadcast(&f->changed);
  pthread_mutex_unlock(&f->lock);
}

JobSource feed_source(Feed *f) {
  atomic_fetch_add(&f->refs, 1);
  return (JobSource){.ud = f,
                     .peek = feed_peek,
                     .take = feed_take,
                     .put_back = feed_put_back,
                     .drop = feed_drop,
                     .wake = feed_wake,
                     .release = feed_release};
}

/* -- Lua --------------------------------------------------------------------------------------- */

Feed *feed_check(lua_State *L, int index) {
  Feed **f = luaL_checkudata(L, index, feed_type);
  return *f;
}

static int method_push(lua_State *L) {
  Feed *f = feed_check(L, 1);
  Message *m = link_read_message(bind_state(L), L, 2, 3);
  pthread_mutex_lock(&f->lock);
  link_put(&f->pushed, m);
  pthread_cond_broadcast(&f->changed);
  pthread_mutex_unlock(&f->lock);
  return 0;
}

static bool is_interrupted(void *context) {
  return atomic_load(&((Context *)context)->interrupted);
}

static int method_peek(lua_State *L) {
  State *S = bind_state(L);
  Feed *f = feed_check(L, 1);
  int n;
  const JobTensor *t;
  int rc = feed_peek(f, is_interrupted, f->context, &n, &t);
  if (rc == MF_EINTR) atomic_store(&f->context->interrupted, false);
  if (rc == JOB_END) return 0;
  if (rc) return bind_raise(L);
  link_push_tensors(S, L, f->shown);
  return 1;
}

static int method_skip(lua_State *L) {
  Feed *f = feed_check(L, 1);
  if (f->shown) link_message_free(f->shown);
  f->shown = NULL;
  return 0;
}

static int method_taken(lua_State *L) {
  lua_pushnumber(L, (double)atomic_load(&feed_check(L, 1)->taken));
  return 1;
}

static int method_gc(lua_State *L) {
  Feed **f = luaL_checkudata(L, 1, feed_type);
  if (*f) feed_release(*f);
  *f = NULL;
  return 0;
}

static int new_feed(lua_State *L) {
  State *S = bind_state(L);
  luaL_checktype(L, 1, LUA_TTABLE);
  lua_settop(L, 1);
  int n = (int)lua_objlen(L, 1);
  Feed **box = lua_newuserdata(L, sizeof *box);
  *box = NULL;
  luaL_getmetatable(L, feed_type);
  lua_setmetatable(L, -2);
  Feed *f = mem_zalloc(sizeof *f);
  if (!f) return bind_error(L, "feed: out of memory");
  *box = f;
  atomic_init(&f->refs, 1);
  f->context = S->context;
  context_retain(f->context);
  pthread_mutex_init(&f->lock, NULL);
  pthread_cond_init(&f->changed, NULL);
  f->pushed.tail = &f->pushed.head;
  f->front.tail = &f->front.head;
  f->links = mem_zalloc(sizeof *f->links * (size_t)(n + 1));
  if (!f->links) return bind_error(L, "feed: out of memory");
  lua_insert(L, 1); /* the feed; then the workers */
  lua_insert(L, 2);
  lua_pushnil(L);
  lua_insert(L, 1); /* what link_of overwrites */
  for (int k = 0; k < n; k++) {
    lua_rawgeti(L, 3, k + 1);
    f->links[k] = link_of(L, -1);
    f->n_links++;
    lua_pop(L, 1);
  }
  lua_settop(L, 2);
  return 1;
}

void bind_open_feed(State *S, lua_State *L) {
  static const luaL_Reg methods[] = {{"push", method_push},
                                     {"peek", method_peek},
                                     {"skip", method_skip},
                                     {"taken", method_taken},
                                     {NULL, NULL}};
  bind_function(S, L, "_feed", new_feed);
  luaL_newmetatable(L, feed_type);
  lua_pushcfunction(L, method_gc);
  lua_setfield(L, -2, "__gc");
  lua_newtable(L);
  for (const luaL_Reg *f = methods; f->name; f++) bind_function(S, L, f->name, f->func);
  lua_setfield(L, -2, "__index");
  lua_pop(L, 1);
}
