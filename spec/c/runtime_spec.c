/* The actor runtime: messages, credits, ends, errors, stops, on one thread and on several. Plans
 * are made of calls, which stand for what a task does. With an argument it is a benchmark of empty
 * actors. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "check.h"
#include "context.h"
#include "err.h"
#include "op_args.h"
#include "op_ids.h"
#include "plan.h"
#include "runtime.h"

static Context *context;

/* -- Plans of calls ---------------------------------------------------------------------------- */

enum { NODES = 8, LOG = 4096 };

/* What one task did and is to do. */
typedef struct Node {
  int acts, begun;
  int fail_at, end_at, sleep_us, block_at; /* acts, from 1; 0: never */
  int64_t read[LOG];                       /* what it took from its last input */
  pthread_mutex_t lock;
  pthread_cond_t change;
  bool blocked, open;
  int stream, n_in, n_out;
} Node;

typedef struct Net {
  Plan *p;
  Runtime *r;
  int n, n_streams;
  Node *nodes; /* by task */
  struct {
    int from, n_to, to[NODES], buffers;
  } edges[NODES * 2];
  int n_edges;
  bool root; /* task 0 is ticked, before all others */
  bool unverified;
} Net;

/* It fails no more. Sources act ahead, also now. */
static void let_act(Node *n) {
  pthread_mutex_lock(&n->lock);
  n->fail_at = 0;
  pthread_mutex_unlock(&n->lock);
}

static int act(void *ud, void *const *in, void *const *out) {
  Node *n = ud;
  pthread_mutex_lock(&n->lock);
  int act = ++n->begun;
  bool fails = act == n->fail_at;
  if (act == n->block_at) {
    n->blocked = true;
    pthread_cond_broadcast(&n->change);
    while (!n->open) pthread_cond_wait(&n->change, &n->lock);
  }
  pthread_mutex_unlock(&n->lock);
  if (n->sleep_us) nanosleep(&(struct timespec){0, n->sleep_us * 1000L}, NULL);
  if (fails) return err_set(MF_EIO, "node fails in act %d", act);
  if (act == n->end_at) return RUNTIME_END;
  int64_t got = act;
  for (int k = 0; k < n->n_in; k++)
    if (in[k]) got = *(int64_t *)in[k];
  for (int k = 0; k < n->n_out; k++)
    if (out[k]) *(int64_t *)out[k] = n->n_in ? got + 1000 : got;
  pthread_mutex_lock(&n->lock);
  n->read[n->acts % LOG] = got;
  n->acts++;
  pthread_mutex_unlock(&n->lock);
  return 0;
}

static void build(void *ud) {
  Net *net = ud;
  Plan *p = net->p;
  p->name = "spec";
  for (int s = 0; s < net->n_streams; s++) plan_add_stream(p, DEVICE_CPU, s ? "other" : "main");
  for (int i = 0; i < net->n; i++) {
    if (!i && net->root) plan_add_task(p, 0, 0);
    else plan_add_call(p, net->nodes[i].stream, "node");
  }
  for (int e = 0; e < net->n_edges; e++) {
    int from = net->edges[e].from;
    bool order = !from && net->root;
    int reg = order ? -1 : plan_add_register(p, PLAN_BLOCK, -1, 8);
    plan_hand_over(p, reg, net->edges[e].buffers, from, net->edges[e].n_to, net->edges[e].to);
  }
  plan_link(p);
  plan_memory(p);
}

static void add_edge(Net *net, int from, int buffers, int n_to, const int *to) {
  int e = net->n_edges++;
  net->edges[e].from = from;
  net->edges[e].buffers = buffers;
  net->edges[e].n_to = n_to;
  memcpy(net->edges[e].to, to, sizeof *to * (size_t)n_to);
}

static Net *net_new(int n, int n_streams, bool root) {
  Net *net = calloc(1, sizeof *net);
  *net = (Net){.n = n, .n_streams = n_streams, .root = root};
  net->nodes = calloc((size_t)n, sizeof *net->nodes);
  for (int i = 0; i < n; i++) {
    pthread_mutex_init(&net->nodes[i].lock, NULL);
    pthread_cond_init(&net->nodes[i].change, NULL);
  }
  return net;
}

static void net_open(Net *net, const RuntimeOptions *o) {
  static const RuntimeOptions usual = {.watch_ms = 2000};
  net->p = plan_empty();
  CHECK(!arena_protect(&net->p->arena, build, net), "%s", err_text());
  CHECK(net->unverified || !plan_verify(net->p), "%s", err_text());
  Device *d = context->devices[DEVICE_CPU];
  net->r = runtime_create(net->p, d, NULL, o ? o : &usual);
  CHECK(net->r, "%s", err_text());
  for (int i = net->root, call = 0; i < net->n; i++) {
    net->nodes[i].n_in = net->p->tasks.at[i].n_in;
    net->nodes[i].n_out = net->p->tasks.at[i].n_out;
    runtime_bind_call(net->r, call++, act, &net->nodes[i]);
  }
}

static int net_run(Net *net) {
  return runtime_run(net->r, 0, 0);
}

static void net_free(Net *net) {
  runtime_destroy(net->r);
  plan_destroy(net->p);
  for (int i = 0; i < net->n; i++) {
    pthread_mutex_destroy(&net->nodes[i].lock);
    pthread_cond_destroy(&net->nodes[i].change);
  }
  free(net->nodes);
  free(net);
}

static int acts(Node *n) {
  pthread_mutex_lock(&n->lock);
  int k = n->acts;
  pthread_mutex_unlock(&n->lock);
  return k;
}

static void wait_acts(Node *n, int at_least) {
  for (int k = 0; acts(n) < at_least && k < 5000; k++)
    nanosleep(&(struct timespec){0, 1000000}, NULL);
}

static void settle(void) {
  nanosleep(&(struct timespec){0, 30000000}, NULL);
}

/* A root, then a chain of n calls, on alternating streams. */
static Net *chain(int n, int n_streams, int buffers) {
  Net *net = net_new(n + 1, n_streams, true);
  for (int i = 1; i <= n; i++) net->nodes[i].stream = i % n_streams;
  for (int i = 0; i < n; i++) add_edge(net, i, i ? buffers : 1, 1, (int[]){i + 1});
  net_open(net, NULL);
  return net;
}

/* -- Cases ------------------------------------------------------------------------------------- */

static void rounds_come_one_after_the_other(void) {
  for (int streams = 1; streams <= 3; streams++)
    for (int buffers = 1; buffers <= 3; buffers++) {
      Net *net = chain(5, streams, buffers);
      for (int round = 1; round <= 50; round++) {
        int rc = net_run(net);
        CHECK(!rc, "%s", err_text());
        for (int i = 1; i < net->n; i++) {
          CHECK(net->nodes[i].acts == round, "node %d acted %d times in %d rounds", i,
                net->nodes[i].acts, round);
          CHECK(net->nodes[i].read[round - 1] == round + 1000 * (i - 1), "node %d read %lld", i,
                (long long)net->nodes[i].read[round - 1]);
        }
      }
      net_free(net);
    }
}

/* A fork to three, one of two buffers, and a join; all on the streams in turn. */
static void forks_join(void) {
  for (int streams = 1; streams <= 4; streams++) {
    Net *net = net_new(6, streams, true);
    for (int i = 1; i < 6; i++) net->nodes[i].stream = i % streams;
    add_edge(net, 0, 1, 1, (int[]){1});
    add_edge(net, 1, streams == 2 ? 2 : 1, 3, (int[]){2, 3, 4});
    for (int i = 2; i < 5; i++) add_edge(net, i, i - 1, 1, (int[]){5});
    net->nodes[3].sleep_us = 100;
    net_open(net, NULL);
    for (int round = 1; round <= 100; round++) {
      CHECK(!net_run(net), "%s", err_text());
      CHECK(net->nodes[5].acts == round, "the join acted %d times", net->nodes[5].acts);
    }
    net_free(net);
  }
}

/* Source -> sink: the source is ahead by as many as there are buffers, no more. */
static void sources_go_ahead_as_far_as_buffers_reach(void) {
  for (int buffers = 1; buffers <= 3; buffers++) {
    Net *net = net_new(3, 2, true);
    net->nodes[1].stream = 1;
    add_edge(net, 0, 1, 1, (int[]){2});
    add_edge(net, 1, buffers, 1, (int[]){2});
    net_open(net, NULL);
    for (int round = 1; round <= 20; round++) {
      CHECK(!net_run(net), "%s", err_text());
      CHECK(net->nodes[2].acts == round, "%d acts", net->nodes[2].acts);
      CHECK(net->nodes[2].read[round - 1] == round, "round %d read %lld", round,
            (long long)net->nodes[2].read[round - 1]);
      wait_acts(&net->nodes[1], round + buffers);
      if (round == 1) settle();
      CHECK(acts(&net->nodes[1]) == round + buffers, "%d buffers: %d acts ahead", buffers,
            acts(&net->nodes[1]) - round);
    }
    runtime_stop(net->r);
    net_free(net);
  }
}

/* What has come is worked off, then rounds say so; after a stop all begins anew. */
/* As a compiled step over a loader: data -> copy -> compute -> results, each on a stream. */
static Net *flow(int block_at, int fail_at) {
  Net *net = net_new(5, 5, true);
  for (int i = 0; i < 5; i++) net->nodes[i].stream = i;
  add_edge(net, 0, 2, 1, (int[]){3});
  for (int i = 1; i < 4; i++) add_edge(net, i, 2, 1, (int[]){i + 1});
  net->nodes[3].block_at = block_at;
  net->nodes[3].fail_at = fail_at;
  net_open(net, NULL);
  CHECK(!runtime_start(net->r), "%s", err_text());
  return net;
}

/* While the second step of three is at work, the results of the first are taken and the batches of
 * later ones are copied in, as far as there are buffers, and no further. */
static void rounds_are_queued_and_overlap(void) {
  Net *net = flow(2, 0);
  for (int k = 0; k < 3; k++) CHECK(!runtime_queue(net->r, 0, 0), "%s", err_text());
  wait_acts(&net->nodes[1], 5);
  wait_acts(&net->nodes[4], 1);
  settle();
  int want[] = {0, 5, 3, 1, 1};
  for (int i = 1; i < 5; i++)
    CHECK(acts(&net->nodes[i]) == want[i], "node %d acted %d times, not %d", i,
          acts(&net->nodes[i]), want[i]);
  pthread_mutex_lock(&net->nodes[3].lock);
  net->nodes[3].open = true;
  pthread_cond_broadcast(&net->nodes[3].change);
  pthread_mutex_unlock(&net->nodes[3].lock);
  CHECK(!runtime_wait(net->r, NULL, NULL), "%s", err_text());
  CHECK(acts(&net->nodes[4]) == 3 && net->nodes[4].read[2] == 2003, "results of %d rounds",
        acts(&net->nodes[4]));
  runtime_stop(net->r);
  net_free(net);
}

static void a_queued_round_may_fail(void) {
  Net *net = flow(0, 2);
  for (int k = 0; k < 3; k++) CHECK(!runtime_queue(net->r, 0, 0), "%s", err_text());
  CHECK(runtime_wait(net->r, NULL, NULL) == MF_EIO, "is no error");
  CHECK(!strcmp(err_text(), "node fails in act 2"), "%s", err_text());
  CHECK(runtime_has_failed(net->r), "has not failed");
  runtime_stop(net->r);
  let_act(&net->nodes[3]);
  CHECK(!runtime_start(net->r), "%s", err_text());
  CHECK(!runtime_queue(net->r, 0, 0) && !runtime_wait(net->r, NULL, NULL), "%s", err_text());
  net_free(net);
}

static void *open_when_failed(void *arg) {
  Net *net = arg;
  while (!runtime_has_failed(net->r)) nanosleep(&(struct timespec){0, 1000000}, NULL);
  pthread_mutex_lock(&net->nodes[3].lock);
  net->nodes[3].open = true;
  pthread_cond_broadcast(&net->nodes[3].change);
  pthread_mutex_unlock(&net->nodes[3].lock);
  return NULL;
}

/* Who waits is interrupted, though the step does not move. */
static void a_wait_is_interrupted(void) {
  Net *net = flow(1, 0);
  CHECK(!runtime_queue(net->r, 0, 0), "%s", err_text());
  wait_acts(&net->nodes[1], 2);
  pthread_t helper;
  pthread_create(&helper, NULL, open_when_failed, net);
  atomic_store(&context->interrupted, true);
  CHECK(runtime_wait(net->r, NULL, NULL) == MF_EINTR, "is no interrupt");
  pthread_join(helper, NULL);
  net_free(net);
}

static void the_end_of_a_stream_is_passed_on(void) {
  for (int buffers = 1; buffers <= 3; buffers++) {
    Net *net = net_new(5, 3, true);
    for (int i = 1; i < 5; i++) net->nodes[i].stream = i % 3;
    add_edge(net, 0, 1, 1, (int[]){3});
    add_edge(net, 1, buffers, 1, (int[]){2});
    add_edge(net, 2, buffers, 1, (int[]){3});
    add_edge(net, 3, buffers, 1, (int[]){4});
    net->nodes[1].end_at = 4;
    net_open(net, NULL);
    for (int again = 1; again <= 3; again++) {
      for (int round = 1; round <= 3; round++) {
        int rc = net_run(net);
        CHECK(!rc, "%d buffers, time %d, round %d: %d", buffers, again, round, rc);
      }
      CHECK(net_run(net) == RUNTIME_END, "there is a fourth");
      CHECK(net_run(net) == RUNTIME_END, "there is a fifth");
      CHECK(net->nodes[4].acts == 3 * again, "%d acts", net->nodes[4].acts);
      runtime_stop(net->r);
      net->nodes[1].begun = 0;
    }
    net_free(net);
  }
}

static void an_error_stops_all_and_leaves_it_usable(void) {
  for (int streams = 1; streams <= 3; streams++)
    for (int at = 1; at <= 5; at++) {
      Net *net = chain(5, streams, 2);
      net->nodes[at].fail_at = 3;
      for (int round = 1; round <= 8; round++) {
        int rc = net_run(net);
        bool fails = round == 3;
        CHECK(fails ? rc == MF_EIO : !rc, "node %d, round %d: %d", at, round, rc);
        if (fails) CHECK(strstr(err_text(), "node fails in act 3"), "%s", err_text());
      }
      CHECK(net->nodes[5].acts == 7, "%d acts", net->nodes[5].acts);
      net_free(net);
    }
}

/* Sources that fail between rounds are heard of in the next. */
static void a_source_may_fail_ahead(void) {
  Net *net = net_new(3, 2, true);
  net->nodes[1].stream = 1;
  add_edge(net, 0, 1, 1, (int[]){2});
  add_edge(net, 1, 3, 1, (int[]){2});
  net->nodes[1].fail_at = 4;
  net_open(net, NULL);
  int rc = 0, rounds = 0;
  while (!rc && rounds < 5) rc = net_run(net), rounds += !rc;
  CHECK(rc == MF_EIO && rounds <= 3, "%d after %d rounds", rc, rounds);
  CHECK(!net_run(net), "%s", err_text());
  net_free(net);
  net = net_new(3, 2, true); /* and while it is stopped */
  net->nodes[1].stream = 1;
  add_edge(net, 0, 1, 1, (int[]){2});
  add_edge(net, 1, 3, 1, (int[]){2});
  net->nodes[1].fail_at = 4;
  net_open(net, NULL);
  rc = net_run(net); /* it may fail in this round already */
  CHECK(!rc || rc == MF_EIO, "%s", err_text());
  wait_acts(&net->nodes[1], 3);
  runtime_stop(net->r);
  let_act(&net->nodes[1]);
  CHECK(!net_run(net), "%s", err_text());
  net_free(net);
}

/* Some wait for a slow one, some for their buffers. */
static void a_stop_ends_those_that_wait(void) {
  for (int k = 0; k < 30; k++) {
    Net *net = net_new(5, 4, true);
    for (int i = 1; i < 5; i++) net->nodes[i].stream = i % 4;
    add_edge(net, 0, 1, 1, (int[]){4});
    add_edge(net, 1, 1 + k % 3, 2, (int[]){3, 4});
    add_edge(net, 2, 1 + k % 2, 1, (int[]){3});
    add_edge(net, 3, 2, 1, (int[]){4});
    net->nodes[2].sleep_us = 10 * k;
    net_open(net, NULL);
    for (int round = 0; round < k % 4; round++) CHECK(!net_run(net), "%s", err_text());
    runtime_stop(net->r);
    runtime_stop(net->r);
    CHECK(net->nodes[4].acts == k % 4, "%d acts", net->nodes[4].acts);
    CHECK(!net_run(net), "%s", err_text());
    net_free(net);
  }
}

/* A source on a stream of its own, a fork to two, one of them ahead, and a join. */
static Net *diamond(int streams) {
  Net *net = net_new(6, streams, true);
  for (int i = 1; i < 6; i++) net->nodes[i].stream = i % streams;
  add_edge(net, 0, 1, 1, (int[]){2});
  add_edge(net, 1, 2, 1, (int[]){2});
  add_edge(net, 2, 2, 2, (int[]){3, 4});
  add_edge(net, 3, 1, 1, (int[]){5});
  add_edge(net, 4, 3, 1, (int[]){5});
  net_open(net, NULL);
  return net;
}

static void an_error_in_any_place_stops_all_with_its_text(void) {
  for (int streams = 1; streams <= 5; streams++)
    for (int at = 1; at <= 5; at++)
      for (int act = 1; act <= 3; act++) {
        Net *net = diamond(streams);
        net->nodes[at].fail_at = act;
        char want[40];
        snprintf(want, sizeof want, "node fails in act %d", act);
        int rc = 0, rounds = 0;
        while (!(rc = net_run(net)) && rounds < 5) rounds++;
        CHECK(rc == MF_EIO && !strcmp(err_text(), want), "node %d: %d, %s", at, rc, err_text());
        CHECK(at == 1 ? rounds < act : rounds == act - 1, "node %d: %d rounds before", at, rounds);
        let_act(&net->nodes[at]);
        int before = acts(&net->nodes[5]);
        for (int k = 1; k <= 3; k++) CHECK(!net_run(net), "node %d: %s", at, err_text());
        CHECK(acts(&net->nodes[5]) == before + 3, "%d acts", acts(&net->nodes[5]) - before);
        net_free(net);
      }
}

/* Whichever is heard of; the other is forgotten. */
static void of_several_errors_one_is_told(void) {
  for (int k = 0; k < 50; k++) {
    Net *net = diamond(5);
    for (int at = 1; at <= 5; at++) net->nodes[at].fail_at = 2;
    int rc = net_run(net); /* the source may be in its second act already */
    if (!rc) rc = net_run(net);
    CHECK(rc == MF_EIO && !strcmp(err_text(), "node fails in act 2"), "%d, %s", rc, err_text());
    for (int at = 1; at <= 5; at++) let_act(&net->nodes[at]);
    CHECK(!net_run(net), "%s", err_text());
    net_free(net);
  }
}

/* The threads park after the failure and are let go; some wake from that when they have been told
 * to stop. */
static void a_stop_may_come_while_threads_wake_from_a_reset(void) {
  for (int k = 0; k < 200; k++) {
    Net *net = diamond(5);
    net->nodes[1 + k % 5].fail_at = 1 + k % 2;
    int rc = 0;
    for (int round = 0; round < 3 && !rc; round++) rc = net_run(net);
    CHECK(rc == MF_EIO, "%d", rc);
    runtime_stop(net->r);
    CHECK(k % 3 || !net_run(net), "%s", err_text());
    net_free(net);
  }
}

static atomic_int told;

static void hear(void *ud, const char *text) {
  Net *net = ud;
  CHECK(strstr(text, "everything waits for node"), "%s", text);
  atomic_fetch_add(&told, 1);
  Node *n = &net->nodes[1];
  pthread_mutex_lock(&n->lock);
  n->open = true;
  pthread_cond_broadcast(&n->change);
  pthread_mutex_unlock(&n->lock);
}

static void calls_that_hang_are_told_of(void) {
  Net *net = net_new(3, 2, true);
  net->nodes[1].stream = 1;
  add_edge(net, 0, 1, 1, (int[]){2});
  add_edge(net, 1, 1, 1, (int[]){2});
  net->nodes[1].block_at = 3;
  atomic_store(&told, 0);
  net_open(net, &(RuntimeOptions){.watch_ms = 20, .slow = hear, .ud = net});
  for (int round = 0; round < 5; round++) CHECK(!net_run(net), "%s", err_text());
  CHECK(atomic_load(&told) >= 1, "told %d times", atomic_load(&told)); /* or a thread was late */
  net_free(net);
}

/* Two tasks that wait for each other, which plan_verify would refuse. */
static void what_cannot_go_on_says_what_it_waits_for(void) {
  for (int streams = 1; streams <= 2; streams++) {
    Net *net = net_new(3, streams, true);
    net->nodes[2].stream = streams - 1;
    add_edge(net, 0, 1, 1, (int[]){1});
    add_edge(net, 1, 1, 1, (int[]){2});
    add_edge(net, 2, 2, 1, (int[]){1});
    net->unverified = true;
    net_open(net, &(RuntimeOptions){.watch_ms = 20});
    for (int again = 0; again < 2; again++) {
      CHECK(net_run(net) == MF_EINVAL, "it goes on");
      CHECK(strstr(err_text(), "nothing can move\n"), "%s", err_text());
      CHECK(strstr(err_text(), "task 1 (node) acted 0 times, waits for r2 of task 2"), "%s",
            err_text());
      CHECK(strstr(err_text(), "task 2 (node) acted 0 times, waits for r1 of task 1"), "%s",
            err_text());
    }
    net_free(net);
  }
}

/* On the calling thread too. */
static void a_chain_may_end(void) {
  Net *net = chain(4, 1, 1);
  net->nodes[2].end_at = 3;
  for (int again = 1; again <= 2; again++) {
    CHECK(!net_run(net) && !net_run(net), "%s", err_text());
    CHECK(net_run(net) == RUNTIME_END && net_run(net) == RUNTIME_END, "it does not end");
    CHECK(net->nodes[4].acts == 2 * again, "%d acts", net->nodes[4].acts);
    runtime_stop(net->r);
    net->nodes[2].begun = 0;
  }
  net_free(net);
}

static void several_plans_share_a_context(void) {
  Net *a = chain(4, 2, 1), *b = chain(4, 3, 2), *c = chain(3, 1, 1);
  for (int round = 1; round <= 20; round++) {
    CHECK(!net_run(a) && !net_run(b) && !net_run(c), "%s", err_text());
    CHECK(a->nodes[4].acts == round && b->nodes[4].acts == round && c->nodes[3].acts == round,
          "round %d", round);
  }
  net_free(b);
  CHECK(!net_run(a) && !net_run(c), "%s", err_text());
  net_free(a);
  net_free(c);
}

static void calls_must_be_bound(void) {
  Net *net = chain(2, 1, 1);
  runtime_bind_call(net->r, 1, NULL, NULL);
  CHECK(net_run(net) == MF_EINVAL && strstr(err_text(), "nothing was bound"), "%s", err_text());
  net_free(net);
}

/* -- Kernels ----------------------------------------------------------------------------------- */

static const char kernels[] =
    "plan \"spec\", block 192, results 1, cells 1, draws 0\n"
    "r0 input 0, 24 bytes\n"
    "r1 block, 24 bytes +0, buffers 2, task 0 to 1\n"
    "r2 block, 24 bytes +128, task 1 to 2\n"
    "r3 result 0, 24 bytes\n"
    "r4 number 0, 8 bytes\n"
    "t0 r0 float32(2, 3)\n"
    "t1 r1 float32(2, 3)\n"
    "t2 r2 float32(2, 3)\n"
    "t3 r3 float32(2, 3)\n"
    "t4 r4 float64()!\n"
    "n0 float64 cell 0 0.5\n"
    "input \"x0\" t0\n"
    "result t3\n"
    "stream cpu \"main\"\n"
    "stream cpu \"other\"\n"
    "task stream 0, steps 1\n"
    "task stream 1, steps 1\n"
    "task stream 0, steps 1\n"
    "step t1 = mul(t0, t0)\n"
    "step t2 = add(t1, t4) \"a.lua:1\"\n"
    "step t3 = mul(t2, t0)\n";

static void kernels_run_on_streams(void) {
  Plan *p = plan_parse(kernels);
  CHECK(p, "%s", err_text());
  if (!p) return;
  Runtime *r = runtime_create(p, context->devices[DEVICE_CPU], NULL, &(RuntimeOptions){0});
  CHECK(r, "%s", err_text());
  float x[6], y[6];
  runtime_bind(r, PLAN_INPUT, 0, x);
  runtime_bind(r, PLAN_RESULT, 0, y);
  for (int round = 0; round < 100; round++) {
    for (int k = 0; k < 6; k++) x[k] = (float)(round + k);
    runtime_set_cell(r, 0, round);
    bool broken = round == 50;
    if (broken) atomic_store(&context->interrupted, true);
    int rc = runtime_run(r, 0, 0);
    CHECK(rc == (broken ? MF_EINTR : 0), "round %d: %s", round, err_text());
    for (int k = 0; k < 6 && !broken; k++)
      CHECK(y[k] == (x[k] * x[k] + (float)round) * x[k], "round %d: y[%d] is %g", round, k, y[k]);
  }
  runtime_destroy(r);
  plan_destroy(p);
}

/* -- Benchmark --------------------------------------------------------------------------------- */

static int nothing(void *ud, void *const *in, void *const *out) {
  (void)ud, (void)in, (void)out;
  return 0;
}

typedef struct Bench {
  Plan *p;
  int n;
  bool fork;
} Bench;

static void build_bench(void *ud) {
  Bench *b = ud;
  Plan *p = b->p;
  p->name = "bench";
  plan_add_stream(p, DEVICE_CPU, "main");
  plan_add_task(p, 0, 0);
  int *all = arena_array(&p->arena, int, b->n);
  for (int i = 0; i < b->n; i++) all[i] = plan_add_call(p, 0, "empty");
  if (b->fork) {
    int join = plan_add_call(p, 0, "empty");
    plan_hand_over(p, -1, 1, 0, b->n, all);
    for (int i = 0; i < b->n; i++) plan_hand_over(p, -1, 1, all[i], 1, &join);
  } else {
    for (int i = 0; i < b->n; i++) plan_hand_over(p, -1, 1, i, 1, &all[i]);
  }
  plan_link(p);
  plan_memory(p);
}

static void bench(bool fork) {
  enum { ROUNDS = 2000 };
  Bench b = {plan_empty(), 1000, fork};
  if (arena_protect(&b.p->arena, build_bench, &b)) return;
  Runtime *r = runtime_create(b.p, context->devices[DEVICE_CPU], NULL, &(RuntimeOptions){0});
  for (size_t k = 0; k < b.p->calls.n; k++) runtime_bind_call(r, (int)k, nothing, NULL);
  double best = 1e9;
  for (int k = 0; k < 10; k++) {
    clock_t start = clock();
    for (int round = 0; round < ROUNDS / 10; round++)
      if (runtime_run(r, 0, 0)) puts(err_text());
    double us = (double)(clock() - start) * 1e6 / CLOCKS_PER_SEC;
    us /= ROUNDS / 10 * (double)b.p->tasks.n;
    if (us < best) best = us;
  }
  printf("%s of 1000: %.3f us an actor step\n", fork ? "fork and join" : "chain", best);
  runtime_destroy(r);
  plan_destroy(b.p);
}

int main(int argc, char **argv) {
  (void)argv;
  context = context_create();
  if (!context) return 2;
  if (argc > 1) {
    bench(false);
    bench(true);
    context_release(context);
    return 0;
  }
  RUN(rounds_come_one_after_the_other);
  RUN(forks_join);
  RUN(sources_go_ahead_as_far_as_buffers_reach);
  RUN(rounds_are_queued_and_overlap);
  RUN(a_queued_round_may_fail);
  RUN(a_wait_is_interrupted);
  RUN(the_end_of_a_stream_is_passed_on);
  RUN(an_error_stops_all_and_leaves_it_usable);
  RUN(an_error_in_any_place_stops_all_with_its_text);
  RUN(of_several_errors_one_is_told);
  RUN(a_stop_may_come_while_threads_wake_from_a_reset);
  RUN(a_source_may_fail_ahead);
  RUN(a_stop_ends_those_that_wait);
  RUN(calls_that_hang_are_told_of);
  RUN(what_cannot_go_on_says_what_it_waits_for);
  RUN(a_chain_may_end);
  RUN(several_plans_share_a_context);
  RUN(calls_must_be_bound);
  RUN(kernels_run_on_streams);
  context_release(context);
  return check_end();
}
