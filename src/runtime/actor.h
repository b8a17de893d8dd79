/* Actors and the workers that run them: what the files of this folder share. */
#ifndef MF_ACTOR_H
#define MF_ACTOR_H
#include <pthread.h>
#include <stdatomic.h>

#include "runtime.h"

typedef struct Actor Actor;
typedef struct Worker Worker;

typedef enum MessageKind {
  MESSAGE_FULL, /* the producer filled the consumer's input `slot` */
  MESSAGE_FREE, /* a consumer returns the buffer of act `count` of the producer's output `slot` */
  MESSAGE_END,  /* no more than `count` ever come in input `slot` */
  MESSAGE_GONE  /* consumer `from` of output `slot` ended after returning `count` */
} MessageKind;

typedef struct Message {
  Actor *to, *from;
  uint64_t count;
  int slot;
  uint8_t kind;
} Message;

/* Where an actor's message goes. */
typedef struct Link {
  Actor *to;
  int slot;  /* which input, or output, that is for `to` */
  bool back; /* a return: `to` is the producer */
} Link;

/* hold: how many acts read one buffer. */
typedef struct Input {
  Actor *from;
  int slot; /* which output of `from` */
  int reg, hold;
  int full; /* buffers that came and were not read yet */
} Input;

/* hold: how many acts fill one buffer. */
typedef struct Output {
  int reg, hold, n_buffers, n_readers;
  Link *readers;
  int free;
  int *reading; /* for each buffer, how many have not returned it */
} Output;

/* A view whose register has several buffers: data = base + buffer * size. */
typedef struct Turn {
  View *view;
  char *base;
  int64_t size;
  int n_buffers, hold;
} Turn;

/* Of an actor that acts once for each micro-batch: a view of a part, data = *base + offset +
 * micro-batch * stride, or, without a base, so much behind where its turn has put it. */
typedef struct Move {
  View *view;
  char **base;
  int64_t offset, stride;
} Move;

/* Where its draws begin in the whole batch: *start = first + micro-batch * size. */
typedef struct Shift {
  int64_t *start, size, first;
} Shift;

typedef struct Links {
  int n_near, n; /* links to fast actors of the same worker, then the others */
  Link *at;
} Links;

struct Actor {
  int pending; /* how many things it waits for; see actor.c */
  bool fast, ticked, paced, ended;
  int times;            /* acts of a round */
  int micro;            /* acts since it began the last one */
  Links links[2];       /* fast: of every act; of the last in a round */
  uint64_t acts, limit; /* how often it acted; how often it may at all */
  uint64_t ticks;       /* how often it may by now, if ticked */
  Worker *worker;
  Actor *next_ending; /* in the worker's list */
  const PlanTask *task;
  int n_in, n_out, n_readers; /* all readers of all outputs */
  Input *in;
  Output *out;
  int n_turns;
  Turn *turns;
  void **data; /* of a call: in, then out */
  LIST(Move) moves;
  LIST(Shift) shifts;
  LIST(int64_t *) numbers; /* arguments that are the number of the micro-batch */
};

/* A stream's actors and, where there is more than one, its thread. */
struct Worker {
  Runtime *runtime;
  int stream; /* of the plan */
  Stream *device_stream;
  size_t scratch_bytes; /* of its stream: the most that a step needs there, and where that is */
  void *scratch;
  Actor **ready; /* a ring of `ring` places, a power of two that holds all actors */
  unsigned head, tail, ring;
  Actor **actors;
  int n_actors, n_alive;
  int n_paced;  /* acts in a round of those alive that are paced by rounds */
  int64_t left; /* acts until the rounds that it knows of are done */
  uint64_t rounds;
  Actor *ending;   /* those that ended and have not said so */
  uint64_t least;  /* rounds of paced ones that ended: less than `rounds` if any lacks one */
  uint64_t said;   /* rounds that were said to be done */
  bool stopping;   /* it has been told */
  bool completing; /* it knows of a failure in a later round */
  pthread_t thread;
  bool has_thread;
  pthread_mutex_t lock; /* of what follows; held while it goes to sleep */
  pthread_cond_t wake;
  bool asleep, parked, stop;
  uint64_t rounds_wanted;
  Message *inbox, *reading; /* two arrays that take turns */
  int n_inbox, most;
  atomic_bool mail;    /* something above is new */
  atomic_ullong beats; /* acts, for the watchdog */
  atomic_int busy;     /* the task that runs; -1: none */
  uint32_t luck;       /* of a hard build */
};

/* A call of the host. */
typedef struct Call {
  RuntimeCall *fn;
  void *ud;
} Call;

/* Actors as the plan's tasks say, in the arena, under its protection. */
void actor_create_all(Runtime *r);
/* As before the first round. */
void actor_reset_all(Runtime *r);

/* Everything that a message does to its actor. */
void actor_receive(const Message *m);
/* One act: the task's work, then the messages. 0 or a code. */
int actor_act(Actor *a);
/* `n` more ticks. */
void actor_tick(Actor *a, uint64_t n);
/* It acts no more than `limit` times; when it has, it is put among those that end. */
void actor_limit(Actor *a, uint64_t limit);
/* Those tell their neighbours, some of whom end thereby, until all is said. */
void actor_end_all(Worker *w);
/* What it waits for, a line; nothing when it has ended. */
void actor_print_waits(const Actor *a, Str *out);

/* Puts an actor of which nothing is pending in its worker's queue. */
static inline void worker_push(Worker *w, Actor *a) {
  w->ready[w->tail++ & (w->ring - 1)] = a;
}
/* A message to an actor of another worker. */
void worker_send(Worker *w, const Message *m);
/* One round on the calling thread, which is the only one: 0, RUNTIME_END or a code. */
int worker_run_here(Worker *w);
/* Threads, all or none: 0 or a code. */
int worker_start_all(Runtime *r);
/* Ends the actors by a cascade and joins the threads. */
void worker_stop_all(Runtime *r);
/* One more round for the threads. */
void worker_post(Runtime *r);
/* As runtime_wait; when no rounds are queued, all actors are after a failure as at the start. */
int worker_wait(Runtime *r, bool (*until)(void *ud), void *ud);

/* scratch.c: gives the steps their scratch, which may have moved when others use the stream, or
 * when the number of threads has changed. 0 or a code. */
int scratch_set(Runtime *r);

enum { RUNTIME_TEXT = 2048 };

/* What a round that was queued begins with. */
typedef struct Round {
  uint64_t seed, stream;
} Round;

typedef enum Failed {
  FAILED_NOT,
  FAILED_AFTER, /* when the rounds before are complete */
  FAILED_NOW
} Failed;

struct Runtime {
  Arena arena;
  const Plan *plan;
  Device *device;
  RuntimeOptions options;
  char *block;
  OpCall *calls;       /* one per step */
  int64_t *scratch_at; /* by step: where in the block its scratch lies; -1: in its stream's */
  int *dead,
      *dead_at; /* of a hard build: step i is the last for dead[dead_at[i] .. dead_at[i + 1]) */
  int (**kernels)(const OpCall *);
  struct Port *ports[PLAN_HOMES];
  struct Patch *patches; /* what is set before a run */
  struct Draw *draws;
  size_t n_patches, n_draws;
  double *cells; /* the next run's; behind them those of rounds[k], where rounds are queued */
  Round *rounds; /* RUNTIME_AHEAD places that take turns; NULL: none was queued */
  uint64_t n_queued;
  int first_write;        /* the first step that changes a capture */
  const PlanTask *opener; /* the first task of steps, which begins a round */
  char *numbers;          /* 8 bytes each */
  Call *host;             /* by number of call */
  Actor *actors;          /* by task */
  Worker *workers;
  int n_workers;
  bool threads, started;
  bool talks;           /* some step communicates */
  void **talk;          /* by step, of those: what talk_create made */
  int thread_count;     /* of each worker's kernels */
  pthread_mutex_t lock; /* of what follows */
  pthread_cond_t changed;
  int64_t running; /* rounds that workers have to do, of all workers */
  int n_parked;    /* workers that wait for `resets` to change */
  uint64_t resets;
  bool ended, stopping; /* some worker missed acts; no reset comes any more */
  int code;
  char text[RUNTIME_TEXT];
  uint64_t complete; /* FAILED_AFTER: how many */
  atomic_int failed; /* Failed */
};

/* What changes from one micro-batch to the next in an actor's steps. */
void runtime_list_moves(Runtime *r, Actor *a);
/* The work of steps [first, first + n): 0 or a code. */
int runtime_launch(Runtime *r, int first, int n);
/* Arguments, numbers and keys of round `count`, which was queued. */
void runtime_open(Runtime *r, uint64_t count);

#endif
