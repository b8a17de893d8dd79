/* Ranks for Lua: what lua/comm.lua is built on.
 *
 *   mf.rank(), mf.world_size()
 *   mf._comm_call(op, group, reduce, root, in, out, counts, out_counts)
 *        one collective on contiguous CPU tensors; group: a table of ranks, or nil for all; root: a
 *        rank; in and out may be nil where the op does not use them on this rank
 *   mf._comm_send(tensor, rank, tag), mf._comm_recv(tensor, rank, tag)
 *   mf._comm_note(group, text), mf._comm_stats(), mf._comm_host(rank), mf._comm_fail(text)
 *
 * Options of the environment: MOONFLOW_COMM_CHECK=0 compares no calls; MOONFLOW_COMM_TIMEOUT
 * seconds without progress end a call (600); MOONFLOW_COMM_SILENCE seconds without a sign of life
 * make a rank dead (5).
 *
 * The job is joined at the first use of anything but rank and world_size, which the environment
 * tells (launch/place.c); the Comm then belongs to the context. */
#include <stdlib.h>
#include <string.h>

#include "place.h"
#include "state.h"

static void close_comm(Comm *c) {
  comm_close(c);
}

Comm *bind_comm(State *S, const char *name) {
  Context *x = S->context;
  if (x->comm) return x->comm;
  if (S->E->background) {
    err_set(MF_EINVAL, "%s: a DataLoader's worker takes no part in the job", name);
    return NULL;
  }
  LaunchPlace p;
  const char *check = getenv("MOONFLOW_COMM_CHECK"), *timeout = getenv("MOONFLOW_COMM_TIMEOUT"),
             *silence = getenv("MOONFLOW_COMM_SILENCE");
  CommOptions o = {.interrupt = &x->interrupted,
                   .no_check = check && !strcmp(check, "0"),
                   .timeout = timeout ? strtod(timeout, NULL) : 0,
                   .silence = silence ? strtod(silence, NULL) : 0};
  int code = launch_place(&p);
  if (!code && p.join.size == 1) code = comm_local(1, &o, &x->comm);
  else if (!code) code = comm_zmq(&p.join, &o, &x->comm);
  x->comm_close = close_comm;
  explicit_bzero(p.key, sizeof p.key);
  return code ? NULL : x->comm;
}

/* -- Arguments --------------------------------------------------------------------------------- */

CommGroup *bind_read_group(State *S, lua_State *L, int index, const char *name) {
  Comm *c = bind_comm(S, name);
  if (!c) return NULL;
  if (lua_isnoneornil(L, index)) return comm_world(c);
  if (!lua_istable(L, index)) {
    err_set(MF_EINVAL, "%s: group must be a table of ranks, is a %s", name,
            luaL_typename(L, index));
    return NULL;
  }
  int n = (int)lua_objlen(L, index), *ranks = lua_newuserdata(L, sizeof *ranks * (size_t)n + 1);
  for (int i = 0; i < n; i++) {
    int64_t v;
    lua_rawgeti(L, index, i + 1);
    int code = bind_read_int(L, -1, name, "an entry of group", &v);
    lua_pop(L, 1);
    if (code) return NULL;
    ranks[i] = v >= 0 && v < comm_size(c) ? (int)v : -1;
  }
  CommGroup *g = comm_group(c, n, ranks);
  if (!g) err_prefix(MF_EINVAL, name);
  return g;
}

/* A tensor whose memory a collective can use; NULL in *out for nil. */
static int read_tensor(State *S, lua_State *L, int index, const char *name, const char *arg,
                       Tensor **out) {
  char what[160];
  *out = NULL;
  if (lua_isnoneornil(L, index)) return 0;
  Tensor *t = *out = bind_to_tensor(S, L, index);
  if (!t)
    return err_set(MF_EINVAL, "%s: %s must be a tensor, is %s", name, arg,
                   bind_describe(S, L, index, what, sizeof what));
  if (tensor_is_rows(t))
    return err_set(MF_EINVAL, "%s: %s is row-sparse; use its to_dense()", name, arg);
  int code = tensor_check_data(t, name);
  if (code) return code;
  if (!meta_is_contiguous(&t->m)) return err_set(MF_EINVAL, "%s: %s must be contiguous", name, arg);
  return 0;
}

/* Counts of elements by position; in a userdata that stays on the stack. NULL in *out for nil. */
static int read_counts(lua_State *L, int index, const char *name, int n, const int64_t **out) {
  *out = NULL;
  if (lua_isnoneornil(L, index)) return 0;
  if (!lua_istable(L, index) || (int)lua_objlen(L, index) != n)
    return err_set(MF_EINVAL, "%s: there must be %d counts, one for each rank of the group", name,
                   n);
  int64_t *counts = lua_newuserdata(L, sizeof *counts * (size_t)n);
  *out = counts;
  for (int i = 0; i < n; i++) {
    lua_rawgeti(L, index, i + 1);
    int code = bind_read_int(L, -1, name, "a count", &counts[i]);
    lua_pop(L, 1);
    if (code) return code;
  }
  return 0;
}

static int64_t sum(const int64_t *counts, int n) {
  int64_t s = 0;
  for (int i = 0; counts && i < n; i++) s += counts[i];
  return s;
}

/* How many elements in and out must have; -1: none are looked at. */
static void sizes_of(const CommCall *c, int n, int me, int64_t *in, int64_t *out) {
  bool root = me == c->root;
  int64_t all = sum(c->counts, n), part = c->counts ? c->counts[me] : 0;
  switch (c->op) {
    case COMM_ALL_REDUCE: *in = *out = c->count; return;
    case COMM_REDUCE: *in = c->count, *out = root ? c->count : -1; return;
    case COMM_BROADCAST: *in = root ? c->count : -1, *out = c->count; return;
    case COMM_REDUCE_SCATTER: *in = all, *out = part; return;
    case COMM_ALL_GATHER: *in = part, *out = all; return;
    case COMM_GATHER: *in = part, *out = root ? all : -1; return;
    case COMM_SCATTER: *in = root ? all : -1, *out = part; return;
    case COMM_ALL_TO_ALL: *in = all, *out = sum(c->out_counts, n); return;
    default: *in = *out = -1; return;
  }
}

static int check_size(const char *name, const char *arg, const Tensor *t, int64_t n, DType dtype) {
  if (n < 0) return 0;
  if (!t) return err_set(MF_EINVAL, "%s: %s must be a tensor, is nil", name, arg);
  if (t->m.dtype != dtype)
    return err_set(MF_EINVAL, "%s: %s is of %s and the others of %s", name, arg,
                   dtype_name((DType)t->m.dtype), dtype_name(dtype));
  if (meta_numel(&t->m) != n)
    return err_set(MF_EINVAL, "%s: %s has %lld elements, but there are %lld to hold", name, arg,
                   (long long)meta_numel(&t->m), (long long)n);
  return 0;
}

static int root_position(const CommGroup *g, const char *name, int64_t rank, int *out) {
  for (int i = 0; i < comm_group_size(g); i++)
    if (comm_group_ranks(g)[i] == rank) {
      *out = i;
      return 0;
    }
  return err_set(MF_EINVAL, "%s: rank %lld is not in the group", name, (long long)rank);
}

static int find_op(const char *name) {
  for (int op = 0; op < COMM_OP_COUNT; op++)
    if (!strcmp(name, comm_op_name((CommOp)op))) return op;
  return -1;
}

/* -- Calls ------------------------------------------------------------------------------------- */

static int run_call(State *S, lua_State *L, const char *name, CommCall *call) {
  lua_settop(L, 8);
  Tensor *in, *out;
  int64_t root = 0, n_in, n_out;
  CommGroup *g = bind_read_group(S, L, 2, name);
  if (!g) return MF_EINVAL;
  int n = comm_group_size(g), reduce = COMM_SUM;
  if (!lua_isnil(L, 3) && (reduce = comm_reduce_parse(lua_tostring(L, 3))) < 0)
    return err_set(MF_EINVAL, "%s: op must be sum, max, min or avg, is '%.40s'", name,
                   lua_tostring(L, 3));
  call->reduce = (CommReduce)reduce;
  int code = read_tensor(S, L, 5, name, "the input", &in);
  if (!code) code = read_tensor(S, L, 6, name, "the output", &out);
  if (!code) code = read_counts(L, 7, name, n, &call->counts);
  if (!code) code = read_counts(L, 8, name, n, &call->out_counts);
  if (!code && !lua_isnil(L, 4)) {
    code = bind_read_int(L, 4, name, "the root", &root);
    if (!code) code = root_position(g, name, root, &call->root);
  }
  if (code) return code;
  const Tensor *some = out ? out : in;
  call->dtype = some ? some->m.dtype : U8;
  call->count = some ? meta_numel(&some->m) : 0;
  sizes_of(call, n, comm_group_position(g), &n_in, &n_out);
  code = check_size(name, "the input", in, n_in, (DType)call->dtype);
  if (!code) code = check_size(name, "the output", out, n_out, (DType)call->dtype);
  if (code) return code;
  code = comm_collective(g, call, in ? tensor_data(in) : NULL, out ? tensor_data(out) : NULL);
  if (out) storage_touch(out->storage);
  return code;
}

static int comm_call(lua_State *L) {
  State *S = bind_state(L);
  const char *name = luaL_checkstring(L, 1);
  int op = find_op(name);
  if (op < 0) return bind_error(L, "comm: there is no collective '%s'", name);
  CommCall call = {.op = (CommOp)op};
  return run_call(S, L, name, &call) ? bind_raise(L) : 0;
}

static int message(lua_State *L, bool out) {
  State *S = bind_state(L);
  const char *name = out ? "send" : "recv";
  Tensor *t;
  int64_t rank, tag = 0;
  Comm *c = bind_comm(S, name);
  int code = c ? read_tensor(S, L, 1, name, "the tensor", &t) : MF_ECOMM;
  if (!code && !t) code = err_set(MF_EINVAL, "%s: the tensor is nil", name);
  if (!code) code = bind_read_int(L, 2, name, out ? "dst" : "src", &rank);
  if (!code) code = bind_read_int(L, 3, name, "tag", &tag);
  if (!code && (rank < 0 || rank >= comm_size(c))) rank = comm_size(c); /* comm names the range */
  if (code) return bind_raise(L);
  size_t bytes = (size_t)meta_numel(&t->m) * dtype_size((DType)t->m.dtype);
  if (out) code = comm_send(c, (int)rank, (uint64_t)tag, tensor_data(t), bytes);
  else code = comm_recv(c, (int)rank, (uint64_t)tag, tensor_data(t), bytes);
  if (!out) storage_touch(t->storage);
  return code ? bind_raise(L) : 0;
}

static int comm_send_tensor(lua_State *L) {
  return message(L, true);
}

static int comm_recv_tensor(lua_State *L) {
  return message(L, false);
}

/* -- The rest ---------------------------------------------------------------------------------- */

static int push_place(lua_State *L, bool size) {
  State *S = bind_state(L);
  Comm *c = S->context->comm;
  LaunchPlace p;
  if (!c && launch_place(&p)) return bind_raise(L);
  if (c) lua_pushinteger(L, size ? comm_size(c) : comm_rank(c));
  else lua_pushinteger(L, size ? p.join.size : p.join.rank);
  return 1;
}

static int comm_rank_of(lua_State *L) {
  return push_place(L, false);
}

static int comm_size_of(lua_State *L) {
  return push_place(L, true);
}

static int comm_note_text(lua_State *L) {
  State *S = bind_state(L);
  const char *text = luaL_checkstring(L, 2);
  CommGroup *g = bind_read_group(S, L, 1, "comm");
  if (!g) return bind_raise(L);
  comm_note(g, text);
  return 0;
}

static int comm_stats_table(lua_State *L) {
  Comm *c = bind_comm(bind_state(L), "stats");
  if (!c) return bind_raise(L);
  CommStats s = comm_stats(c);
  lua_createtable(L, 0, 4);
  lua_pushnumber(L, (double)s.sent);
  lua_setfield(L, -2, "sent");
  lua_pushnumber(L, (double)s.received);
  lua_setfield(L, -2, "received");
  lua_pushnumber(L, (double)s.refused_peers);
  lua_setfield(L, -2, "refused_peers");
  lua_pushnumber(L, (double)s.refused);
  lua_setfield(L, -2, "refused");
  return 1;
}

static int comm_host_name(lua_State *L) {
  Comm *c = bind_comm(bind_state(L), "host");
  int64_t rank;
  if (!c || bind_read_int(L, 1, "host", "rank", &rank)) return bind_raise(L);
  if (rank < 0 || rank >= comm_size(c))
    return bind_error(L, "host: ranks are 0 to %d", comm_size(c) - 1);
  lua_pushstring(L, comm_host(c, (int)rank));
  return 1;
}

/* Ends a job that this context has joined; does not join one. */
static int comm_fail_text(lua_State *L) {
  bind_fail_job(bind_state(L)->context, luaL_checkstring(L, 1));
  return 0;
}

void bind_fail_job(Context *x, const char *text) {
  Comm *c = x->comm;
  char whole[1000];
  if (!c || comm_failed(c) || comm_size(c) == 1) return;
  snprintf(whole, sizeof whole, "rank %d on host %s raised an error: %.*s", comm_rank(c),
           comm_host(c, comm_rank(c)), (int)strcspn(text, "\n"), text);
  comm_fail(c, whole);
}

void bind_open_comm(State *S, lua_State *L) {
  bind_function(S, L, "rank", comm_rank_of);
  bind_function(S, L, "world_size", comm_size_of);
  bind_function(S, L, "_comm_call", comm_call);
  bind_function(S, L, "_comm_send", comm_send_tensor);
  bind_function(S, L, "_comm_recv", comm_recv_tensor);
  bind_function(S, L, "_comm_note", comm_note_text);
  bind_function(S, L, "_comm_stats", comm_stats_table);
  bind_function(S, L, "_comm_host", comm_host_name);
  bind_function(S, L, "_comm_fail", comm_fail_text);
}
