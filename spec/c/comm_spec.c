/* src/comm: every collective on 2 to 4 ranks, in sizes around each change of algorithm, in every
 * dtype, in subgroups and from several threads; messages; and each way to fail. The same for each
 * member: ranks that share memory as threads, as processes would, and that are taken to be on
 * different hosts. */
#include <arpa/inet.h>
#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "check.h"
#include "comm.h"
#include "dtype.h"
#include "err.h"

#ifdef __SANITIZE_THREAD__ /* ZeroMQ is not compiled for it */
typedef enum Way { LOCAL, WAYS, ZMQ, HOSTS } Way;
#else
typedef enum Way { LOCAL, ZMQ, HOSTS, WAYS } Way;
#endif
static const char *const way_names[] = {/* by Way */
                                        "local", "zmq", "zmq between hosts"};

enum { RANKS_MAX = 5 };

typedef struct Team {
  Way way;
  int n;
  CommOptions options;
  void (*body)(Comm *c, void *arg);
  void *arg;
  Comm *comms[RANKS_MAX];
  char master[40], key[COMM_KEY_BYTES];
  int listen_fd;
} Team;

typedef struct Member {
  Team *team;
  int rank;
} Member;

/* Each rank a host of its own, with the job's key. */
static void join(Team *t, int rank) {
  char host[8];
  snprintf(host, sizeof host, "h%d", rank);
  CommJoin j = {
      .rank = rank, .size = t->n, .master = t->master, .listen_fd = -1, .join_timeout = 30};
  if (rank == 0) j.listen_fd = t->listen_fd;
  if (t->way == HOSTS) j.host = host, j.key = t->key;
  CHECK(!comm_zmq(&j, &t->options, &t->comms[rank]), "%s", err_text());
}

static void *member_main(void *arg) {
  Member *m = arg;
  Team *t = m->team;
  if (t->way != LOCAL) join(t, m->rank);
  if (!t->comms[m->rank]) return NULL;
  t->body(t->comms[m->rank], t->arg);
  comm_close(t->comms[m->rank]);
  return NULL;
}

static void listen_here(Team *t) {
  struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  socklen_t size = sizeof a;
  t->listen_fd = socket(AF_INET, SOCK_STREAM, 0);
  bool ok = !bind(t->listen_fd, (void *)&a, sizeof a) && !listen(t->listen_fd, 64) &&
            !getsockname(t->listen_fd, (void *)&a, &size);
  CHECK(ok, "a socket");
  snprintf(t->master, sizeof t->master, "127.0.0.1:%d", ntohs(a.sin_port));
}

/* Runs body as n ranks. */
static void team_case(const char *name, Way way, int n, const CommOptions *o,
                      void (*body)(Comm *c, void *arg), void *arg) {
  check_bad = false;
  Team t = {.way = way, .n = n, .body = body, .arg = arg};
  if (o) t.options = *o;
  if (t.options.timeout == 0) t.options.timeout = 60;
  Member members[RANKS_MAX];
  pthread_t threads[RANKS_MAX];
  if (way == LOCAL) CHECK(!comm_local(n, &t.options, t.comms), "%s", err_text());
  else listen_here(&t);
  CHECK(!comm_make_key(t.key), "%s", err_text());
  for (int i = 0; i < n; i++) {
    members[i] = (Member){&t, i};
    pthread_create(&threads[i], NULL, member_main, &members[i]);
  }
  for (int i = 0; i < n; i++) pthread_join(threads[i], NULL);
  *(check_bad ? &check_failed : &check_passed) += 1;
  if (check_bad) printf("failed: %s, %s, %d ranks\n", name, way_names[way], n);
}
#define team_run(way, n, o, body, arg) team_case(#body, way, n, o, body, arg)

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* -- Values ------------------------------------------------------------------------------------ */

/* Whole numbers that every dtype holds, with sums too: contributions of 0 to 3. */
static int64_t value(DType t, int rank, int64_t i) {
  int64_t v = (i * 7 + rank * 3 + i / 1000) % 4;
  return t == BOOL ? v == 0 : v;
}

static char *make(DType t, int rank, int64_t n, int64_t from) {
  char *p = malloc((size_t)n * dtype_size(t) + 64);
  for (int64_t i = 0; i < n; i++)
    dtype_set_i64(t, p + (size_t)i * dtype_size(t), value(t, rank, from + i));
  return p;
}

static int64_t expected(CommReduce r, DType t, int n, int64_t i) {
  int64_t v = value(t, 0, i);
  for (int k = 1; k < n; k++) {
    int64_t w = value(t, k, i);
    v = r == COMM_SUM || r == COMM_AVG ? (t == BOOL ? v | w : v + w)
        : r == COMM_MAX                ? (v > w ? v : w)
        : v < w                        ? v
                                       : w;
  }
  return v;
}

/* The average of n whose sum is v, rounded once to float32, or to float64, and to t. */
static bool is_average(DType t, const void *at, int64_t v, int n) {
  double want[1];
  dtype_set_f64(t, want, t == F64 ? (double)v / n : (double)((float)v / (float)n));
  return !memcmp(at, want, dtype_size(t));
}

/* The first index where `got` is not what all ranks' sum is from `from` on, or -1. */
static int64_t wrong_sum(const char *got, CommReduce r, DType t, int n, int64_t from,
                         int64_t count) {
  for (int64_t i = 0; i < count; i++) {
    const char *at = got + (size_t)i * dtype_size(t);
    int64_t want = expected(r, t, n, from + i);
    if (r == COMM_AVG ? !is_average(t, at, want, n) : dtype_get_i64(t, at) != want) return i;
  }
  return -1;
}

static int64_t wrong_copy(const char *got, DType t, int rank, int64_t from, int64_t count) {
  for (int64_t i = 0; i < count; i++)
    if (dtype_get_i64(t, got + (size_t)i * dtype_size(t)) != value(t, rank, from + i)) return i;
  return -1;
}

/* -- Collectives ------------------------------------------------------------------------------- */

/* An all_reduce where the elements lie in uneven pieces, some empty. */
static void try_pieces(CommGroup *g, DType t, CommReduce r, int64_t count) {
  enum { PIECES = 9 };
  int n = comm_group_size(g);
  CommPiece piece[PIECES];
  int64_t at = 0;
  for (int i = 0; i < PIECES; i++) {
    int64_t some = i == 3 ? 0 : i == PIECES - 2 ? count - at : (count - at) / (i + 2);
    piece[i] = (CommPiece){make(t, comm_group_position(g), some, at), some};
    at += some;
  }
  CommCall call = {.op = COMM_ALL_REDUCE,
                   .reduce = r,
                   .dtype = t,
                   .count = count,
                   .n_pieces = PIECES,
                   .pieces = piece};
  CHECK(!comm_collective(g, &call, NULL, NULL), "%s", err_text());
  for (int i = 0, from = 0; i < PIECES; from += (int)piece[i++].count)
    CHECK(n == 1 || wrong_sum(piece[i].data, r, t, n, from, piece[i].count) < 0,
          "all_reduce %s %s of %lld, piece %d", dtype_name(t), comm_reduce_name(r),
          (long long)count, i);
  call.count++;
  CHECK(comm_collective(g, &call, NULL, NULL) == MF_EINVAL, "too few pieces");
  for (int i = 0; i < PIECES; i++) free(piece[i].data);
}

static void try_reduces(CommGroup *g, DType t, CommReduce r, int64_t count) {
  int n = comm_group_size(g), me = comm_group_position(g), root = n - 1;
  size_t bytes = (size_t)count * dtype_size(t);
  char *in = make(t, me, count, 0), *out = malloc(bytes + 64);
  CommCall call = {.op = COMM_ALL_REDUCE, .reduce = r, .dtype = t, .count = count};
  CHECK(!comm_collective(g, &call, in, out), "%s", err_text());
  CHECK(wrong_sum(out, r, t, n, 0, count) < 0, "all_reduce %s %s of %lld: wrong at %lld",
        dtype_name(t), comm_reduce_name(r), (long long)count,
        (long long)wrong_sum(out, r, t, n, 0, count));
  CHECK(wrong_copy(in, t, me, 0, count) < 0, "all_reduce writes its input");
  memset(out, 9, bytes);
  call.op = COMM_REDUCE, call.root = root;
  CHECK(!comm_collective(g, &call, in, me == root ? out : NULL), "%s", err_text());
  CHECK(me != root || wrong_sum(out, r, t, n, 0, count) < 0, "reduce %s of %lld", dtype_name(t),
        (long long)count);
  int64_t counts[RANKS_MAX], at = 0, mine_at = 0;
  for (int i = 0; i < n; i++) { /* uneven, the second part empty */
    counts[i] = i == 1 ? 0 : i == n - 1 ? count - at : count / (n + i);
    if (i == me) mine_at = at;
    at += counts[i];
  }
  call = (CommCall){.op = COMM_REDUCE_SCATTER, .reduce = r, .dtype = t, .counts = counts};
  CHECK(!comm_collective(g, &call, in, out), "%s", err_text());
  CHECK(wrong_sum(out, r, t, n, mine_at, counts[me]) < 0, "reduce_scatter %s of %lld",
        dtype_name(t), (long long)count);
  call = (CommCall){.op = COMM_ALL_REDUCE, .reduce = r, .dtype = t, .count = count};
  CHECK(!comm_collective(g, &call, in, in), "%s", err_text());
  CHECK(wrong_sum(in, r, t, n, 0, count) < 0, "all_reduce in place %s of %lld", dtype_name(t),
        (long long)count);
  try_pieces(g, t, r, count);
  free(in);
  free(out);
}

static void try_copies(CommGroup *g, DType t, int64_t count) {
  int n = comm_group_size(g), me = comm_group_position(g), root = n / 2;
  size_t size = dtype_size(t);
  int64_t counts[RANKS_MAX], total = 0, at[RANKS_MAX];
  for (int i = 0; i < n; i++) {
    counts[i] = n > 2 && i == 1 ? 0 : count + i;
    at[i] = total;
    total += counts[i];
  }
  char *in = make(t, me, count + n, 0), *out = malloc((size_t)total * size + 64);
  CommCall call = {.op = COMM_ALL_GATHER, .dtype = t, .counts = counts};
  memset(out, 9, (size_t)total * size);
  CHECK(!comm_collective(g, &call, in, out), "%s", err_text());
  for (int i = 0; i < n; i++)
    CHECK(wrong_copy(out + (size_t)at[i] * size, t, i, 0, counts[i]) < 0,
          "all_gather %s of %lld: part %d", dtype_name(t), (long long)count, i);
  call.op = COMM_GATHER, call.root = root;
  memset(out, 9, (size_t)total * size);
  CHECK(!comm_collective(g, &call, in, me == root ? out : NULL), "%s", err_text());
  for (int i = 0; i < n && me == root; i++)
    CHECK(wrong_copy(out + (size_t)at[i] * size, t, i, 0, counts[i]) < 0, "gather: part %d", i);
  call.op = COMM_SCATTER;
  memset(in, 9, (size_t)counts[me] * size);
  CHECK(!comm_collective(g, &call, me == root ? out : NULL, in), "%s", err_text());
  CHECK(wrong_copy(in, t, me, 0, counts[me]) < 0, "scatter of what was gathered");
  call = (CommCall){.op = COMM_BROADCAST, .dtype = t, .count = count, .root = root};
  if (me != root) memset(in, 9, (size_t)count * size);
  CHECK(!comm_collective(g, &call, in, in), "%s", err_text());
  int64_t sure = counts[root] < count ? 0 : count; /* an empty root has nothing known */
  CHECK(wrong_copy(in, t, root, 0, sure) < 0, "broadcast of %lld", (long long)count);
  free(in);
  free(out);
}

/* Position i sends i + 2 j elements to j. */
static void try_all_to_all(CommGroup *g, int64_t scale) {
  int n = comm_group_size(g), me = comm_group_position(g);
  int64_t to[RANKS_MAX], from[RANKS_MAX], out_n = 0, in_n = 0;
  for (int i = 0; i < n; i++) {
    in_n += to[i] = (me + 2 * i) * scale;
    out_n += from[i] = (i + 2 * me) * scale;
  }
  int32_t *in = malloc((size_t)in_n * 4 + 4), *out = malloc((size_t)out_n * 4 + 4);
  int64_t at = 0;
  for (int j = 0; j < n; j++)
    for (int64_t k = 0; k < to[j]; k++) in[at++] = (int32_t)(me * 1000003 + j * 10007 + k);
  CommCall call = {.op = COMM_ALL_TO_ALL, .dtype = I32, .counts = to, .out_counts = from};
  CHECK(!comm_collective(g, &call, in, out), "%s", err_text());
  at = 0;
  bool right = true;
  for (int j = 0; j < n; j++)
    for (int64_t k = 0; k < from[j]; k++)
      right &= out[at++] == (int32_t)(j * 1000003 + me * 10007 + k);
  CHECK(right, "all_to_all of %lld", (long long)scale);
  free(in);
  free(out);
}

static const int64_t sizes[] = {0, 1, 3, 1000, 16384, 40001, 262147};

static void collectives(Comm *c, void *arg) {
  (void)arg;
  CommGroup *g = comm_world(c);
  for (int t = 0; t < DTYPE_COUNT; t++)
    for (int r = 0; r < COMM_REDUCE_COUNT; r++)
      for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++)
        if ((sizes[s] < 20000 || t == F32 || t == BF16) &&
            (r != COMM_AVG || dtype_is_float((DType)t)))
          try_reduces(g, (DType)t, (CommReduce)r, sizes[s]);
  for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
    try_copies(g, U8, sizes[s]);
    try_copies(g, F64, sizes[s]);
    try_all_to_all(g, sizes[s]);
  }
  CHECK(!comm_collective(g, &(CommCall){.op = COMM_BARRIER}, NULL, NULL), "%s", err_text());
}

/* Contributions whose sum depends on the order: the bits are those of the sum in the order of
 * ranks, on all ranks and at all sizes. */
static void canonical(Comm *c, void *arg) {
  (void)arg;
  int n = comm_size(c), me = comm_rank(c);
  for (int64_t count = 7; count < 100000; count *= 17) {
    float *in = malloc((size_t)count * 4), *out = malloc((size_t)count * 4);
    uint16_t *half = malloc((size_t)count * 2), *half_out = malloc((size_t)count * 2);
    bool right = true, half_right = true;
    for (int64_t i = 0; i < count; i++) {
      in[i] = ldexpf(1.1f + (float)(i % 13), (me * 11 + (int)i % 7) % 23 - 11);
      half[i] = dtype_f32_to_bf16(in[i]);
    }
    CommCall call = {.op = COMM_ALL_REDUCE, .dtype = F32, .count = count};
    CHECK(!comm_collective(comm_world(c), &call, in, out), "%s", err_text());
    call.dtype = BF16;
    CHECK(!comm_collective(comm_world(c), &call, half, half_out), "%s", err_text());
    for (int64_t i = 0; i < count; i++) {
      float sum = 0, wide = 0;
      for (int k = 0; k < n; k++) {
        float v = ldexpf(1.1f + (float)(i % 13), (k * 11 + (int)i % 7) % 23 - 11);
        sum = k ? sum + v : v;
        wide += dtype_bf16_to_f32(dtype_f32_to_bf16(v));
      }
      right &= out[i] == sum;
      half_right &= half_out[i] == dtype_f32_to_bf16(wide);
    }
    CHECK(right, "float32 sums of %lld in the order of ranks", (long long)count);
    CHECK(half_right, "bfloat16 sums of %lld rounded once", (long long)count);
    free(in), free(out), free(half), free(half_out);
  }
  float nan[2] = {me == 1 ? NAN : 1, 2}, got[2];
  for (int r = COMM_MAX; r <= COMM_MIN; r++) {
    CommCall call = {.op = COMM_ALL_REDUCE, .reduce = (CommReduce)r, .dtype = F32, .count = 2};
    CHECK(!comm_collective(comm_world(c), &call, nan, got) && isnan(got[0]) && got[1] == 2,
          "%s with NaN", comm_reduce_name((CommReduce)r));
  }
}

/* -- Groups and threads ------------------------------------------------------------------------ */

typedef struct Half {
  CommGroup *g;
  int rounds;
} Half;

static void *half_main(void *arg) {
  Half *h = arg;
  for (int i = 0; i < h->rounds; i++) {
    int64_t n = i % 5 == 4 ? 50000 : 10;
    int32_t *v = malloc((size_t)n * 4), size = comm_group_size(h->g);
    for (int64_t k = 0; k < n; k++) v[k] = i + comm_group_position(h->g);
    CommCall call = {.op = COMM_ALL_REDUCE, .dtype = I32, .count = n};
    CHECK(!comm_collective(h->g, &call, v, v), "%s", err_text());
    bool right = true;
    for (int64_t k = 0; k < n; k++) right &= v[k] == size * i + size * (size - 1) / 2;
    CHECK(right, "round %d", i);
    free(v);
  }
  return NULL;
}

/* World and a subgroup at once, from two threads of each rank, each at its own pace. */
static void subgroups(Comm *c, void *arg) {
  (void)arg;
  int me = comm_rank(c), n = comm_size(c), ranks[RANKS_MAX], m = 0;
  for (int i = me % 2; i < n; i += 2) ranks[m++] = i;
  Half other = {comm_group(c, m, ranks), 60}, world = {comm_world(c), 60};
  CHECK(other.g && other.g == comm_group(c, m, ranks), "a group is the same when asked for again");
  pthread_t thread;
  pthread_create(&thread, NULL, half_main, &other);
  half_main(&world);
  pthread_join(thread, NULL);
  int wrong[2] = {1, 0}, absent[1] = {(me + 1) % n};
  CHECK(!comm_group(c, 2, wrong) && strstr(err_text(), "ascending"), "%s", err_text());
  CHECK(!comm_group(c, 1, absent) && strstr(err_text(), "is not in the group"), "%s", err_text());
}

/* -- Messages ---------------------------------------------------------------------------------- */

static void messages(Comm *c, void *arg) {
  (void)arg;
  int me = comm_rank(c), n = comm_size(c), next = (me + 1) % n, before = (me + n - 1) % n;
  size_t big = 3 << 20;
  char *out = malloc(big), *in = malloc(big);
  for (size_t i = 0; i < big; i++) out[i] = (char)((i * 131 + (size_t)me) >> 3);
  for (int k = 0; k < 20; k++) { /* two edges at once, taken in the other order */
    int a = me * 1000 + k, b = -a, got;
    CHECK(!comm_send(c, next, 1, &a, sizeof a) && !comm_send(c, next, 2, &b, sizeof b), "%s",
          err_text());
    CHECK(!comm_recv(c, before, 2, &got, sizeof got) && got == -(before * 1000 + k), "edge 2: %d",
          got);
    CHECK(!comm_recv(c, before, 1, &got, sizeof got) && got == before * 1000 + k, "edge 1: %d",
          got);
  }
  if (me == 0) CHECK(!comm_send(c, next, 3, out, big), "%s", err_text());
  CHECK(!comm_recv(c, before, 3, in, big), "%s", err_text());
  if (me != 0) CHECK(!comm_send(c, next, 3, out, big), "%s", err_text());
  bool right = true;
  for (size_t i = 0; i < big; i++) right &= in[i] == (char)((i * 131 + (size_t)before) >> 3);
  CHECK(right, "a large message");
  CHECK(!comm_send(c, next, 6, out, big) && !comm_recv(c, before, 6, in, big), "%s", err_text());
  CHECK(in[3] == (char)((3 * 131 + (size_t)before) >> 3), "all send first");
  CHECK(!comm_send(c, next, 4, NULL, 0) && !comm_recv(c, before, 4, NULL, 0), "an empty message");
  CHECK(comm_send(c, me, 1, out, 1) == MF_EINVAL && strstr(err_text(), "dst is this rank itself"),
        "%s", err_text());
  CHECK(comm_recv(c, n, 1, in, 1) == MF_EINVAL && strstr(err_text(), "src is"), "%s", err_text());
  free(out);
  free(in);
}

/* Four transfers at once, to and from both neighbours, larger than what a way holds. */
static void transfers(Comm *c, void *arg) {
  (void)arg;
  int me = comm_rank(c), n = comm_size(c), next = (me + 1) % n, before = (me + n - 1) % n;
  size_t big = 2 << 20;
  char *data[4];
  for (int k = 0; k < 4; k++) {
    data[k] = malloc(big);
    memset(data[k], k < 2 ? 10 * me + k : 0, big);
  }
  for (int round = 0; round < 3; round++) {
    CommTransfer *t[4];
    CHECK(!comm_post_recv(c, before, 20, data[2], big, &t[2]) &&
              !comm_post_recv(c, next, 21, data[3], big, &t[3]) &&
              !comm_post_send(c, next, 20, data[0], big, &t[0]) &&
              !comm_post_send(c, before, 21, data[1], big, &t[1]),
          "%s", err_text());
    for (int left = 4; left;) {
      uint32_t mark = comm_mark(c);
      int was = left;
      for (int k = 0; k < 4; k++) {
        bool done = false;
        if (!t[k]) continue;
        CHECK(!comm_test(c, t[k], &done), "%s", err_text());
        if (done) t[k] = NULL, left--;
      }
      if (left == was) comm_sleep(c, mark, 100);
    }
    CHECK(data[2][big - 1] == 10 * before && data[3][0] == 10 * next + 1, "what came");
  }
  CommTransfer *none;
  CHECK(comm_post_send(c, n, 1, data[0], 1, &none) == MF_EINVAL, "there is no rank n");
  for (int k = 0; k < 4; k++) free(data[k]);
}

/* -- Failures ---------------------------------------------------------------------------------- */

static int reduce_n(Comm *c, DType t, int64_t n) {
  static _Thread_local double v[64];
  CommCall call = {.op = COMM_ALL_REDUCE, .dtype = t, .count = n};
  return comm_collective(comm_world(c), &call, v, v);
}

static void differ_in_call(Comm *c, void *arg) {
  (void)arg;
  int code = comm_rank(c) == 1
                 ? comm_collective(comm_world(c), &(CommCall){.op = COMM_BARRIER}, NULL, NULL)
                 : reduce_n(c, F32, 5);
  CHECK(code == MF_ECOMM && strstr(err_text(), "calls all_reduce of float32 [5] (sum)") &&
            strstr(err_text(), "calls barrier") && strstr(err_text(), "rank 1 on host "),
        "%d %s", code, err_text());
  CHECK(reduce_n(c, F32, 5) == MF_ECOMM, "a failure is for good");
}

static void differ_in_dtype(Comm *c, void *arg) {
  (void)arg;
  int code = reduce_n(c, comm_rank(c) ? I32 : F32, 5);
  CHECK(code == MF_ECOMM && strstr(err_text(), "of float32") && strstr(err_text(), "of int32"),
        "%d %s", code, err_text());
}

/* Both wait for the other: only their probes tell. */
static void differ_in_root(Comm *c, void *arg) {
  (void)arg;
  char byte;
  CommCall call = {.op = COMM_BROADCAST, .dtype = U8, .count = 1, .root = 1 - comm_rank(c)};
  if (comm_rank(c) > 1) call.root = 0;
  int code = comm_collective(comm_world(c), &call, &byte, &byte);
  CHECK(code == MF_ECOMM && strstr(err_text(), "(root 1)") && strstr(err_text(), "(root 0)"),
        "%d %s", code, err_text());
}

static void differ_in_notes(Comm *c, void *arg) {
  bool checked = arg != NULL;
  CHECK(!reduce_n(c, F32, 5), "%s", err_text());
  comm_note(comm_world(c), "add (2, 3)");
  comm_note(comm_world(c), comm_rank(c) == 1 ? "mul (4)" : "matmul (4)");
  comm_note(comm_world(c), "relu");
  int code = reduce_n(c, F32, 5);
  if (!checked) CHECK(!code, "unchecked: %s", err_text());
  else
    CHECK(code == MF_ECOMM && strstr(err_text(), "calls mul (4)") &&
              strstr(err_text(), "calls matmul (4)"),
          "%d %s", code, err_text());
}

static void leave(Comm *c, void *arg) {
  (void)arg;
  CHECK(!reduce_n(c, F32, 5), "%s", err_text());
  if (comm_rank(c) == comm_size(c) - 1) return;
  double start = now();
  int code = reduce_n(c, F32, 5);
  char who[40];
  snprintf(who, sizeof who, "rank %d on host ", comm_size(c) - 1);
  CHECK(code == MF_ECOMM && strstr(err_text(), who) && strstr(err_text(), "has left the job") &&
            strstr(err_text(), "waited for rank") &&
            strstr(err_text(), "all_reduce of float32 [5]"),
        "%d %s", code, err_text());
  CHECK(now() - start < 5, "after %g s", now() - start);
}

static void raise_error(Comm *c, void *arg) {
  (void)arg;
  if (comm_rank(c) == 1) comm_fail(c, "rank 1 on host h: script.lua:3: boom");
  int code = reduce_n(c, F32, 5);
  CHECK(code == MF_ECOMM && strstr(err_text(), "rank 1 on host h: script.lua:3: boom"), "%d %s",
        code, err_text());
}

static void silent(Comm *c, void *arg) {
  (void)arg;
  double start = now();
  if (comm_rank(c) == 1) {
    while (!comm_failed(c) && now() - start < 10) usleep(10000);
    CHECK(strstr(err_text(), "nothing moved for") && strstr(err_text(), "for rank 1"), "%s",
          err_text());
    return;
  }
  int code = reduce_n(c, F32, 5);
  CHECK(code == MF_ECOMM && strstr(err_text(), "nothing moved for"), "%d %s", code, err_text());
  CHECK(now() - start > 0.2 && now() - start < 5, "after %g s", now() - start);
}

static void wrong_length(Comm *c, void *arg) {
  (void)arg;
  char v[8] = {0};
  if (comm_rank(c) == 0) {
    CHECK(!comm_send(c, 1, 7, v, 8), "%s", err_text());
    CHECK(comm_recv(c, 1, 8, v, 1) == MF_ECOMM && strstr(err_text(), "8 bytes and expected 4"),
          "%s", err_text());
  } else if (comm_rank(c) == 1) {
    CHECK(comm_recv(c, 0, 7, v, 4) == MF_ECOMM &&
              strstr(err_text(), "recv: rank 1 got from rank 0") &&
              strstr(err_text(), "8 bytes and expected 4"),
          "%s", err_text());
  }
}

static atomic_bool interrupt_flag;
static void *interrupt_soon(void *arg) {
  (void)arg;
  usleep(200000);
  atomic_store(&interrupt_flag, true);
  return NULL;
}

static void interrupted(Comm *c, void *arg) {
  (void)arg;
  if (comm_rank(c) == 1) {
    char byte;
    CHECK(comm_recv(c, 0, 5, &byte, 1), "the others end too");
    return;
  }
  pthread_t thread;
  pthread_create(&thread, NULL, interrupt_soon, NULL);
  int code = reduce_n(c, F32, 5);
  CHECK((code == MF_EINTR || code == MF_ECOMM) && strstr(err_text(), "interrupted"), "%d %s", code,
        err_text());
  pthread_join(thread, NULL);
}

static void wrong_arguments(Comm *c, void *arg) {
  (void)arg;
  int64_t counts[RANKS_MAX] = {1, -1};
  CommCall call = {.op = COMM_ALL_GATHER, .dtype = F32, .counts = counts};
  CHECK(comm_collective(comm_world(c), &call, NULL, NULL) == MF_EINVAL, "a negative count");
  call = (CommCall){.op = COMM_BROADCAST, .dtype = F32, .count = 1, .root = comm_size(c)};
  CHECK(
      comm_collective(comm_world(c), &call, NULL, NULL) == MF_EINVAL && strstr(err_text(), "root"),
      "%s", err_text());
}

int main(void) {
  static const CommOptions short_timeout = {.timeout = 0.3}, unchecked = {.no_check = true},
                           stoppable = {.interrupt = &interrupt_flag};
  int any = 1;
  for (int w = 0; w < WAYS; w++) {
    Way way = (Way)w;
    for (int n = 1; n <= (way == HOSTS ? 3 : 4); n++) team_run(way, n, NULL, collectives, NULL);
    for (int n = 2; n <= RANKS_MAX; n++) team_run(way, n, NULL, canonical, NULL);
    team_run(way, 4, NULL, subgroups, NULL);
    for (int n = 2; n <= 3; n++) {
      team_run(way, n, NULL, messages, NULL);
      team_run(way, n, NULL, transfers, NULL);
      team_run(way, n, NULL, differ_in_call, NULL);
      team_run(way, n, NULL, differ_in_root, NULL);
      team_run(way, n, NULL, leave, NULL);
      team_run(way, n, NULL, raise_error, NULL);
    }
    team_run(way, 2, NULL, differ_in_dtype, NULL);
    team_run(way, 2, NULL, differ_in_notes, &any);
    team_run(way, 2, &unchecked, differ_in_notes, NULL);
    team_run(way, 2, &short_timeout, silent, NULL);
    team_run(way, 3, NULL, wrong_length, NULL);
    team_run(way, 2, &stoppable, interrupted, NULL);
    team_run(way, 2, NULL, wrong_arguments, NULL);
  }
  return check_end();
}
