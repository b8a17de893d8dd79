/* What the files of the launcher share. */
#ifndef MF_LAUNCH_INT_H
#define MF_LAUNCH_INT_H
#include <sched.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "comm.h"
#include "launch.h"

enum { LINE_MAX_BYTES = 16 << 10, INPUT_MAX_BYTES = 64 << 10 };

/* One of a rank's two streams. */
typedef struct Output {
  int from, to;
  size_t n;
  char line[LINE_MAX_BYTES];
} Output;

typedef struct Child {
  pid_t pid; /* 0: ended */
  int rank, status;
  Output out[2];
  int channel;       /* to its prompt; -1: none, or closed */
  int64_t stopped;   /* since when, in ms; 0: it runs */
  bool asks, failed; /* for a line; what it said of its communication then */
} Child;

/* The prompt of a job; see terminal.c. */
typedef struct Terminal {
  bool shown;          /* a line is awaited */
  bool ended;          /* there is no more input */
  char prompt[16];     /* what the ranks want to be shown */
  int64_t interrupted; /* when last, in ms */
  size_t n;            /* of what was read and not yet used */
  char text[INPUT_MAX_BYTES];
} Terminal;

typedef struct Launcher {
  const LaunchJob *job;
  Child *children;
  int signals, listen_fd, running;
  int input; /* what ranks read as stdin, or -1: nothing */
  sigset_t old_mask;
  cpu_set_t cpus;
  char key[COMM_KEY_BYTES], host[256], port[8], here[64];
  int patience;       /* ms that a rank may be stopped */
  Child *first;       /* that failed */
  int stop;           /* the signal that ends the job; 0: none */
  int64_t ending;     /* since when, in ms; 0: not */
  int hurried;        /* 1: SIGTERM was sent, 2: SIGKILL */
  Terminal *terminal; /* NULL: none */
} Launcher;

int64_t launch_now(void); /* ms */
void launch_write(int fd, const char *bytes, size_t n);
/* On stderr, after "moonflow: ". */
void launch_say(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* Passes on what ranks have written, unfinished lines too. */
void launch_drain(Launcher *l);
void launch_signal(Launcher *l, int sig);

/* Of the launcher's loop: -1, or the file that brings the next line. */
int terminal_input(const Launcher *l);
void terminal_read(Launcher *l);
void terminal_question(Launcher *l, Child *c);
/* Shows the prompt, or answers, when all ranks wait. */
void terminal_serve(Launcher *l);
/* Ctrl-C. False: the user wants to leave. */
bool terminal_interrupt(Launcher *l);

#endif
