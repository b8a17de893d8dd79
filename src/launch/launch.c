/* Starts the ranks of one host, passes their output on, and ends them together.
 *
 * Each rank is this program again, in a process group of its own, so that a Ctrl-C at the terminal
 * reaches the launcher alone, which hands it on once. Ranks end with the launcher whatever ends it
 * (PR_SET_PDEATHSIG). One loop waits for everything: output, ended processes, signals (a signalfd),
 * and the next deadline.
 *
 *   running    until all ranks have ended
 *   ending     a rank failed, or the user wants an end: the others learn it from their
 * communication or the signal. Who is left after a grace gets SIGTERM, then SIGKILL.
 *
 * Output goes on line by line, so that lines of several ranks do not mix. */
#define _GNU_SOURCE
#include "launch.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "comm.h"
#include "err.h"
#include "mem.h"

enum { LINE_MAX_BYTES = 16 << 10, GRACE_MS = 5000, TERM_MS = 3000, STATUS_USAGE = 2 };

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
} Child;

typedef struct Launcher {
  const LaunchJob *job;
  Child *children;
  int signals, listen_fd, running;
  sigset_t old_mask;
  cpu_set_t cpus;
  char key[COMM_KEY_BYTES], host[256], port[8];
  Child *first;   /* that failed */
  int stop;       /* the signal that ends the job; 0: none */
  int64_t ending; /* since when, in ms; 0: not */
  int hurried;    /* 1: SIGTERM was sent, 2: SIGKILL */
} Launcher;

static int64_t now_ms(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

static void write_all(int fd, const char *bytes, size_t n) {
  while (n) {
    ssize_t done = write(fd, bytes, n);
    if (done < 0 && errno != EINTR && errno != EAGAIN) return;
    if (done > 0) bytes += done, n -= (size_t)done;
  }
}

static void say(const char *format, ...) __attribute__((format(printf, 1, 2)));
static void say(const char *format, ...) {
  char text[600] = "moonflow: ";
  va_list args;
  va_start(args, format);
  int n = 10 + vsnprintf(text + 10, sizeof text - 11, format, args);
  va_end(args);
  if (n > (int)sizeof text - 2) n = (int)sizeof text - 2;
  text[n] = '\n';
  write_all(STDERR_FILENO, text, (size_t)n + 1);
}

/* -- A rank's process -------------------------------------------------------------------------- */

static void set_number(const char *name, int value) {
  char text[16];
  snprintf(text, sizeof text, "%d", value);
  setenv(name, text, 1);
}

/* This rank's share of the processors that the launcher may use. */
static void take_share(const Launcher *l, int local) {
  int total = CPU_COUNT(&l->cpus), n = l->job->ranks;
  int first = local * total / n, last = (local + 1) * total / n, seen = 0;
  cpu_set_t mine;
  CPU_ZERO(&mine);
  for (int i = 0; i < CPU_SETSIZE; i++) {
    if (!CPU_ISSET(i, &l->cpus)) continue;
    if (seen >= first && seen < last) CPU_SET(i, &mine);
    seen++;
  }
  if (n > 1 && total >= n) sched_setaffinity(0, sizeof mine, &mine);
  int threads = last - first;
  char text[16];
  snprintf(text, sizeof text, "%d", threads > 0 ? threads : 1);
  if (n > 1) setenv("OMP_NUM_THREADS", text, 0);
}

static void set_environment(const Launcher *l, int rank, int local, int restart) {
  const LaunchJob *j = l->job;
  set_number("RANK", rank);
  set_number("LOCAL_RANK", local);
  set_number("WORLD_SIZE", j->ranks * j->nodes);
  set_number("LOCAL_WORLD_SIZE", j->ranks);
  set_number("MOONFLOW_RESTARTS", restart);
  setenv("MASTER_ADDR", l->host, 1);
  setenv("MASTER_PORT", l->port, 1);
  setenv("MOONFLOW_LAUNCHED", "1", 1);
  unsetenv("TORCHELASTIC_USE_AGENT_STORE");
  if (*l->key) setenv("MOONFLOW_KEY", l->key, 1);
  unsetenv("MOONFLOW_LISTEN_FD");
  if (rank == 0 && l->listen_fd >= 0) {
    fcntl(l->listen_fd, F_SETFD, 0);
    set_number("MOONFLOW_LISTEN_FD", l->listen_fd);
  }
}

static void become_rank(const Launcher *l, const Child *c, int local, int restart, int out[2]) {
  setpgid(0, 0);
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  sigprocmask(SIG_SETMASK, &l->old_mask, NULL);
  int nothing = open("/dev/null", O_RDONLY);
  dup2(nothing, STDIN_FILENO);
  dup2(out[0], STDOUT_FILENO);
  dup2(out[1], STDERR_FILENO);
  take_share(l, local);
  set_environment(l, c->rank, local, restart);
  execv("/proc/self/exe", l->job->argv);
  say("cannot start rank %d: %s", c->rank, strerror(errno));
  _exit(127);
}

/* Where a rank's output goes: a pipe to the launcher, or a file for both streams. */
static int open_output(const Launcher *l, Child *c, int restart, int out[2]) {
  c->out[0].from = c->out[1].from = -1;
  if (l->job->log_dir) {
    char path[4096];
    snprintf(path, sizeof path, "%s/rank-%d.log", l->job->log_dir, c->rank);
    out[0] = open(path, O_WRONLY | O_CREAT | O_CLOEXEC | (restart ? O_APPEND : O_TRUNC), 0666);
    out[1] = out[0] < 0 ? -1 : fcntl(out[0], F_DUPFD_CLOEXEC, 0);
    if (out[1] < 0) say("%s: %s", path, strerror(errno));
    return out[1] < 0 ? -1 : 0;
  }
  for (int k = 0; k < 2; k++) {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC)) {
      say("no more pipes: %s", strerror(errno));
      return -1;
    }
    c->out[k].from = ends[0];
    c->out[k].to = k ? STDERR_FILENO : STDOUT_FILENO;
    c->out[k].n = 0;
    out[k] = ends[1];
  }
  return 0;
}

static int start_rank(Launcher *l, int local, int restart) {
  Child *c = &l->children[local];
  int out[2];
  c->rank = l->job->node * l->job->ranks + local;
  c->status = 0;
  if (open_output(l, c, restart, out)) return -1;
  c->pid = fork();
  if (c->pid == 0) become_rank(l, c, local, restart, out);
  close(out[0]);
  close(out[1]);
  if (c->pid < 0) {
    say("cannot start rank %d: %s", c->rank, strerror(errno));
    c->pid = 0;
    return -1;
  }
  l->running++;
  return 0;
}

/* -- Output ------------------------------------------------------------------------------------ */

static void put_line(const Child *c, Output *o, size_t n) {
  char line[LINE_MAX_BYTES + 32];
  int prefix = snprintf(line, 32, "[rank %d] ", c->rank);
  memcpy(line + prefix, o->line, n);
  write_all(o->to, line, (size_t)prefix + n);
  memmove(o->line, o->line + n, o->n - n);
  o->n -= n;
}

/* Passes on what has come; at the end of the stream closes it. */
static void pass_on(const Child *c, Output *o) {
  ssize_t got = read(o->from, o->line + o->n, sizeof o->line - 1 - o->n);
  if (got < 0 && (errno == EINTR || errno == EAGAIN)) return;
  if (got > 0) o->n += (size_t)got;
  for (char *end; (end = memchr(o->line, '\n', o->n));) put_line(c, o, (size_t)(end - o->line) + 1);
  bool full = o->n == sizeof o->line - 1;
  if (o->n && (full || got <= 0)) {
    o->line[o->n++] = '\n';
    put_line(c, o, o->n);
  }
  if (got > 0) return;
  close(o->from);
  o->from = -1;
}

/* -- Ending ------------------------------------------------------------------------------------ */

static void signal_all(Launcher *l, int sig) {
  for (int i = 0; i < l->job->ranks; i++)
    if (l->children[i].pid) {
      kill(-l->children[i].pid, sig);
      if (sig == SIGTERM) kill(-l->children[i].pid, SIGCONT); /* a stopped one must hear it */
    }
}

static void begin_end(Launcher *l) {
  if (!l->ending) l->ending = now_ms();
}

static int status_of(const Child *c) {
  return WIFSIGNALED(c->status) ? 128 + WTERMSIG(c->status) : WEXITSTATUS(c->status);
}

static void report(const Launcher *l, const Child *c) {
  if (WIFSIGNALED(c->status))
    say("rank %d was killed by signal %d (%s)%s", c->rank, WTERMSIG(c->status),
        strsignal(WTERMSIG(c->status)), l->running ? "; the others end" : "");
  else
    say("rank %d ended with exit status %d%s", c->rank, WEXITSTATUS(c->status),
        l->running ? "; the others end" : "");
}

/* Whether c is the one to blame: the first that failed; or one that failed in its own way where the
 * first ended by an error, which may be that it lost c. */
static bool is_cause(const Launcher *l, const Child *c) {
  if (!status_of(c)) return false;
  return !l->first || (status_of(l->first) == 1 && status_of(c) != 1 && !l->hurried && !l->stop);
}

static void collect(Launcher *l) {
  int status;
  for (pid_t pid; (pid = waitpid(-1, &status, WNOHANG)) > 0;)
    for (int i = 0; i < l->job->ranks; i++) {
      Child *c = &l->children[i];
      if (c->pid != pid) continue;
      c->pid = 0;
      c->status = status;
      l->running--;
      if (!is_cause(l, c)) continue;
      l->first = c;
      begin_end(l);
      if (!l->stop) report(l, c);
    }
}

/* The user's signals: the first goes to all ranks, the second ends them at once. */
static void take_signals(Launcher *l) {
  struct signalfd_siginfo s;
  while (read(l->signals, &s, sizeof s) == sizeof s) {
    if (s.ssi_signo == SIGCHLD) continue;
    signal_all(l, l->stop ? SIGKILL : (int)s.ssi_signo);
    l->stop = (int)s.ssi_signo;
    begin_end(l);
  }
}

/* Milliseconds to the next thing to do, -1: none. */
static int hurry(Launcher *l) {
  if (!l->ending) return -1;
  int64_t at = l->ending + GRACE_MS + l->hurried * TERM_MS, rest = at - now_ms();
  if (rest > 0) return (int)rest;
  if (l->hurried < 2) signal_all(l, l->hurried ? SIGKILL : SIGTERM);
  l->hurried++;
  return TERM_MS;
}

static int watch(Launcher *l) {
  int n = l->job->ranks;
  struct pollfd *items = mem_alloc(sizeof *items * (size_t)(2 * n + 1));
  if (!items) return -1;
  for (;;) {
    int count = 1, open_ends = 0;
    items[0] = (struct pollfd){l->signals, POLLIN, 0};
    for (int i = 0; i < n; i++)
      for (int k = 0; k < 2; k++) {
        int fd = l->children[i].out[k].from;
        open_ends += fd >= 0;
        items[count++] = (struct pollfd){fd, POLLIN, 0};
      }
    if (!l->running && !open_ends) break;
    int wait = l->running ? hurry(l) : 500; /* who inherited a pipe may hold it open for ever */
    if (poll(items, (nfds_t)count, wait) == 0 && !l->running) break;
    for (int i = 0; i < 2 * n; i++)
      if (items[i + 1].fd >= 0 && items[i + 1].revents)
        pass_on(&l->children[i / 2], &l->children[i / 2].out[i % 2]);
    take_signals(l);
    collect(l);
  }
  for (int i = 0; i < 2 * n; i++) {
    Output *o = &l->children[i / 2].out[i % 2];
    if (o->from >= 0) close(o->from);
  }
  mem_free(items);
  return 0;
}

/* -- A job ------------------------------------------------------------------------------------- */

/* A free port of loopback, held open for rank 0 so that nobody else gets it. */
static int open_meeting(Launcher *l) {
  struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  socklen_t size = sizeof a;
  if (l->job->master) {
    const char *colon = strrchr(l->job->master, ':');
    if (!colon || strlen(colon) > sizeof l->port) {
      say("--master must be HOST:PORT, is '%s'", l->job->master);
      return -1;
    }
    snprintf(l->host, sizeof l->host, "%.*s", (int)(colon - l->job->master), l->job->master);
    snprintf(l->port, sizeof l->port, "%s", colon + 1);
    return 0;
  }
  l->listen_fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (l->listen_fd < 0 || bind(l->listen_fd, (void *)&a, sizeof a) || listen(l->listen_fd, 128) ||
      getsockname(l->listen_fd, (void *)&a, &size)) {
    say("no port to meet at: %s", strerror(errno));
    return -1;
  }
  strcpy(l->host, "127.0.0.1");
  snprintf(l->port, sizeof l->port, "%d", ntohs(a.sin_port));
  return 0;
}

/* One attempt; the exit status. */
static int attempt(Launcher *l, int restart) {
  int n = l->job->ranks;
  l->first = NULL;
  l->ending = l->hurried = l->running = 0;
  l->listen_fd = -1;
  for (int i = 0; i < n; i++) l->children[i] = (Child){.out = {{.from = -1}, {.from = -1}}};
  bool ok = !open_meeting(l);
  for (int i = 0; ok && i < n; i++) ok = !start_rank(l, i, restart);
  if (l->listen_fd >= 0) close(l->listen_fd);
  if (!ok) signal_all(l, SIGKILL);
  if (watch(l)) ok = false;
  if (l->stop) return 128 + l->stop;
  return l->first ? status_of(l->first) : ok ? 0 : 1;
}

static bool prepare(Launcher *l) {
  const LaunchJob *j = l->job;
  if (sched_getaffinity(0, sizeof l->cpus, &l->cpus)) CPU_ZERO(&l->cpus);
  if (j->log_dir && mkdir(j->log_dir, 0777) && errno != EEXIST) {
    say("%s: %s", j->log_dir, strerror(errno));
    return false;
  }
  bool own_key = j->nodes == 1 && !getenv("MOONFLOW_KEY_FILE") && !getenv("MOONFLOW_KEY");
  if (own_key && comm_make_key(l->key)) {
    say("%s", err_text());
    return false;
  }
  sigset_t mask;
  sigemptyset(&mask);
  sigaddset(&mask, SIGCHLD);
  sigaddset(&mask, SIGINT);
  sigaddset(&mask, SIGTERM);
  sigaddset(&mask, SIGHUP);
  sigprocmask(SIG_BLOCK, &mask, &l->old_mask);
  l->signals = signalfd(-1, &mask, SFD_CLOEXEC | SFD_NONBLOCK);
  l->children = mem_zalloc(sizeof *l->children * (size_t)j->ranks);
  return l->signals >= 0 && l->children;
}

int launch_run(const LaunchJob *job) {
  Launcher l = {.job = job, .signals = -1};
  int status = 1;
  if (prepare(&l)) {
    for (int restart = 0;; restart++) {
      status = attempt(&l, restart);
      if (!status || l.stop || restart >= job->max_restarts) break;
      say("restart %d of %d", restart + 1, job->max_restarts);
    }
    sigprocmask(SIG_SETMASK, &l.old_mask, NULL);
  }
  if (l.signals >= 0) close(l.signals);
  mem_free(l.children);
  return status;
}
