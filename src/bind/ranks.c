/* mf._ranks(texts, options): ranks as threads of this process, for specs and sanitizers.
 *
 * Each of the n ranks has a context, a Lua state and a Comm of its own; texts[i] is what
 * lua/comm.lua packed for rank i - 1, and the answer is a table of what each rank's comm.serve
 * returned, a text, or false with the error in a second table. Nothing but texts crosses, so that
 * no tensor outlives the context that owns its memory. Waiting ends on an interrupt, which goes to
 * all ranks. */
#include <arpa/inet.h>
#include <lualib.h>
#include <pthread.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "comm.h"
#include "moonflow_lua.h"
#include "state.h"

typedef struct Rank {
  struct Ranks *all;
  int index;
  Context *context;
  pthread_t thread;
  char *text; /* what it is to do, then what it answered */
  size_t n;
  bool ok, started;
} Rank;

typedef struct Ranks {
  int n, listen_fd;
  bool zmq;   /* else the ranks share memory as threads do */
  bool hosts; /* each is taken to be on a host of its own */
  char master[40], key[COMM_KEY_BYTES];
  CommOptions options;
  pthread_mutex_t lock;
  pthread_cond_t ended;
  int running;
  Rank rank[];
} Ranks;

static const char ranks_type[] = "moonflow.ranks";

static void close_comm(Comm *c) {
  comm_close(c);
}

/* -- In the rank's thread ---------------------------------------------------------------------- */

static int rank_main(lua_State *L) {
  Rank *r = lua_touserdata(L, 1);
  bind_begin_thread(L, r->context, "moonflow.comm");
  lua_getfield(L, -1, "_serve");
  lua_pushlstring(L, r->text, r->n);
  lua_call(L, 1, 2); /* whether it went well, and the packed results or the error's text */
  r->ok = lua_toboolean(L, -2);
  return 1;
}

static void take_text(Rank *r, lua_State *L) {
  size_t n;
  const char *text = lua_tolstring(L, -1, &n);
  if (!text) text = "an error without a text", n = strlen(text);
  mem_free(r->text);
  r->text = mem_alloc(n + 1);
  r->n = r->text ? n : 0;
  if (!r->text) return;
  memcpy(r->text, text, n);
  r->text[n] = 0;
}

static int join(Rank *r) {
  Ranks *all = r->all;
  char host[16];
  snprintf(host, sizeof host, "host%d", r->index);
  CommJoin j = {.rank = r->index, .size = all->n, .master = all->master, .listen_fd = -1};
  if (r->index == 0) j.listen_fd = all->listen_fd;
  if (all->hosts) j.host = host, j.key = all->key;
  CommOptions o = all->options;
  o.interrupt = &r->context->interrupted;
  return comm_zmq(&j, &o, &r->context->comm);
}

static void *rank_thread(void *arg) {
  Rank *r = arg;
  r->context->comm_close = close_comm;
  lua_State *L = luaL_newstate();
  if (L && r->all->zmq && join(r)) {
    lua_pushstring(L, err_text());
    take_text(r, L);
  } else if (L) {
    lua_pushcfunction(L, rank_main);
    lua_pushlightuserdata(L, r);
    if (lua_pcall(L, 1, 1, 0)) r->ok = false;
    take_text(r, L);
  }
  if (!r->ok) bind_fail_job(r->context, r->text ? r->text : "out of memory");
  if (L) lua_close(L);
  Context *context = r->context;
  pthread_mutex_lock(&r->all->lock);
  r->context = NULL;
  pthread_mutex_unlock(&r->all->lock);
  context_release(context);
  pthread_mutex_lock(&r->all->lock);
  r->all->running--;
  pthread_cond_broadcast(&r->all->ended);
  pthread_mutex_unlock(&r->all->lock);
  return NULL;
}

/* -- In the caller's --------------------------------------------------------------------------- */

static int listen_here(Ranks *all) {
  struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  socklen_t size = sizeof a;
  all->listen_fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (all->listen_fd < 0 || bind(all->listen_fd, (void *)&a, sizeof a) ||
      listen(all->listen_fd, 64) || getsockname(all->listen_fd, (void *)&a, &size))
    return err_set(MF_EIO, "ranks: no socket");
  snprintf(all->master, sizeof all->master, "127.0.0.1:%d", ntohs(a.sin_port));
  return comm_make_key(all->key);
}

static int make_contexts(Ranks *all) {
  Comm *comms[64];
  for (int i = 0; i < all->n; i++)
    if (!(all->rank[i].context = context_create()))
      return err_set(MF_ENOMEM, "ranks: out of memory");
  if (all->zmq) return listen_here(all);
  int code = comm_local(all->n, &all->options, comms);
  for (int i = 0; !code && i < all->n; i++) {
    all->rank[i].context->comm = comms[i];
    all->rank[i].context->comm_close = close_comm;
  }
  return code;
}

/* Waits for all; an interrupt of the caller's goes to each. */
static void wait_for_all(Ranks *all, Context *caller) {
  pthread_mutex_lock(&all->lock);
  while (all->running) {
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    t.tv_nsec += 50000000;
    if (t.tv_nsec >= 1000000000) t.tv_nsec -= 1000000000, t.tv_sec++;
    pthread_cond_timedwait(&all->ended, &all->lock, &t);
    if (!atomic_exchange(&caller->interrupted, false)) continue;
    for (int i = 0; i < all->n; i++)
      if (all->rank[i].context) atomic_store(&all->rank[i].context->interrupted, true);
  }
  pthread_mutex_unlock(&all->lock);
  for (int i = 0; i < all->n; i++)
    if (all->rank[i].started) pthread_join(all->rank[i].thread, NULL);
}

static int ranks_gc(lua_State *L) {
  Ranks *all = lua_touserdata(L, 1);
  for (int i = 0; i < all->n; i++) {
    mem_free(all->rank[i].text);
    if (!all->rank[i].started && all->rank[i].context) context_release(all->rank[i].context);
  }
  if (all->listen_fd >= 0 && !all->rank[0].started) close(all->listen_fd);
  return 0;
}

/* Reads the texts into a userdata on the stack. */
static Ranks *push_ranks(lua_State *L, int n) {
  Ranks *all = lua_newuserdata(L, sizeof *all + sizeof(Rank) * (size_t)n);
  memset(all, 0, sizeof *all + sizeof(Rank) * (size_t)n);
  all->n = n;
  all->listen_fd = -1;
  if (luaL_newmetatable(L, ranks_type)) {
    lua_pushcfunction(L, ranks_gc);
    lua_setfield(L, -2, "__gc");
  }
  lua_setmetatable(L, -2);
  for (int i = 0; i < n; i++) {
    Rank *r = &all->rank[i];
    size_t length;
    lua_rawgeti(L, 1, i + 1);
    const char *text = luaL_checklstring(L, -1, &length);
    r->all = all;
    r->index = i;
    r->text = mem_alloc(length + 1);
    r->n = length;
    if (!r->text) bind_error(L, "ranks: out of memory");
    memcpy(r->text, text, length + 1);
    lua_pop(L, 1);
  }
  return all;
}

static void read_options(lua_State *L, Ranks *all) {
  lua_getfield(L, 2, "member");
  const char *member = luaL_optstring(L, -1, "local");
  all->hosts = !strcmp(member, "hosts");
  all->zmq = all->hosts || !strcmp(member, "zmq");
  lua_getfield(L, 2, "timeout");
  all->options.timeout = luaL_optnumber(L, -1, 60);
  lua_getfield(L, 2, "check");
  all->options.no_check = lua_isboolean(L, -1) && !lua_toboolean(L, -1);
  lua_pop(L, 3);
}

static int run_ranks(lua_State *L) {
  State *S = bind_state(L);
  luaL_checktype(L, 1, LUA_TTABLE);
  luaL_checktype(L, 2, LUA_TTABLE);
  int n = (int)lua_objlen(L, 1);
  if (n < 1 || n > 64) return bind_error(L, "ranks: n must be 1 to 64, is %d", n);
  Ranks *all = push_ranks(L, n);
  read_options(L, all);
  if (make_contexts(all)) return bind_raise(L);
  pthread_mutex_init(&all->lock, NULL);
  pthread_cond_init(&all->ended, NULL);
  for (int i = 0; i < n; i++) {
    Rank *r = &all->rank[i];
    pthread_mutex_lock(&all->lock);
    r->started = !pthread_create(&r->thread, NULL, rank_thread, r);
    all->running += r->started;
    pthread_mutex_unlock(&all->lock);
    if (r->started) continue;
    context_release(r->context); /* the others find that it has left */
    r->context = NULL;
  }
  wait_for_all(all, S->context);
  pthread_mutex_destroy(&all->lock);
  pthread_cond_destroy(&all->ended);
  lua_createtable(L, n, 0);
  lua_createtable(L, n, 0);
  for (int i = 0; i < n; i++) {
    Rank *r = &all->rank[i];
    lua_pushlstring(L, r->text ? r->text : "", r->n);
    lua_rawseti(L, r->ok ? -3 : -2, i + 1);
  }
  return 2;
}

void bind_open_ranks(State *S, lua_State *L) {
  bind_function(S, L, "_ranks", run_ranks);
}
