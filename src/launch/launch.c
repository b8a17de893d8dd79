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
#include "launch_int.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "err.h"
#include "mem.h"

/* After a failure, of which ranks know after 5.5 s at most, all have ended within 10 s; a user who
 * wants an end can want it again. */
enum { STOPPED_MS = 7000, GRACE_MS = 2000, TERM_MS = 2000, USER_GRACE_MS = 5000 };

int64_t launch_now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

void launch_write(int fd, const char *bytes, size_t n) {
  while (n) {
    ssize_t done = write(fd, bytes, n);
    if (done < 0 && errno != EINTR && errno != EAGAIN) return;
    if (done > 0) bytes += done, n -= (size_t)done;
  }
}

void launch_say(const char *format, ...) {
  char text[600] = "moonflow: ";
  va_list args;
  va_start(args, format);
  int n = 10 + vsnprintf(text + 10, sizeof text - 11, format, args);
  va_end(args);
  if (n > (int)sizeof text - 2) n = (int)sizeof text - 2;
  text[n] = '\n';
  launch_write(STDERR_FILENO, text, (size_t)n + 1);
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

/* All of stdin, or the channel to the prompt, or neither. */
static void open_input(const Launcher *l, int channel) {
  char path[40] = "/dev/null";
  if (l->input >= 0) snprintf(path, sizeof path, "/proc/self/fd/%d", l->input); /* own position */
  int fd = open(path, O_RDONLY);
  dup2(fd, STDIN_FILENO);
  if (channel < 0) return;
  fcntl(channel, F_SETFD, 0);
  set_number("MOONFLOW_PROMPT_FD", channel);
}

static void become_rank(const Launcher *l, const Child *c, int local, int restart, int out[3]) {
  setpgid(0, 0);
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  sigprocmask(SIG_SETMASK, &l->old_mask, NULL);
  open_input(l, out[2]);
  dup2(out[0], STDOUT_FILENO);
  dup2(out[1], STDERR_FILENO);
  take_share(l, local);
  set_environment(l, c->rank, local, restart);
  execv("/proc/self/exe", l->job->argv);
  launch_say("cannot start rank %d: %s", c->rank, strerror(errno));
  _exit(127);
}

/* A channel to the rank's prompt; its end in *theirs, -1: there is none to be. */
static bool open_channel(const Launcher *l, Child *c, int *theirs) {
  int ends[2] = {-1, -1};
  if (l->terminal && socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends)) return false;
  c->channel = ends[0];
  *theirs = ends[1];
  return true;
}

/* Where a rank's output goes: a pipe to the launcher, or a file for both streams. */
static int open_output(const Launcher *l, Child *c, int restart, int out[2]) {
  c->out[0].from = c->out[1].from = -1;
  if (l->job->log_dir) {
    char path[4096];
    snprintf(path, sizeof path, "%s/rank-%d.log", l->job->log_dir, c->rank);
    out[0] = open(path, O_WRONLY | O_CREAT | O_CLOEXEC | (restart ? O_APPEND : O_TRUNC), 0666);
    out[1] = out[0] < 0 ? -1 : fcntl(out[0], F_DUPFD_CLOEXEC, 0);
    if (out[1] < 0) launch_say("%s: %s", path, strerror(errno));
    return out[1] < 0 ? -1 : 0;
  }
  for (int k = 0; k < 2; k++) {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC)) {
      launch_say("no more pipes: %s", strerror(errno));
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
  int out[3]; /* ends of its streams and of its channel */
  c->rank = l->job->node * l->job->ranks + local;
  c->status = 0;
  if (open_output(l, c, restart, out) || !open_channel(l, c, &out[2])) return -1;
  c->pid = fork();
  if (c->pid == 0) become_rank(l, c, local, restart, out);
  close(out[0]);
  close(out[1]);
  if (out[2] >= 0) close(out[2]);
  if (c->pid < 0) {
    launch_say("cannot start rank %d: %s", c->rank, strerror(errno));
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
  launch_write(o->to, line, (size_t)prefix + n);
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

/* What has come, without waiting for more. */
void launch_drain(Launcher *l) {
  for (int i = 0; i < 2 * l->job->ranks; i++) {
    Child *c = &l->children[i / 2];
    Output *o = &c->out[i % 2];
    struct pollfd f = {o->from, POLLIN, 0};
    while (o->from >= 0 && poll(&f, 1, 0) > 0) pass_on(c, o);
    if (o->from < 0 || !o->n) continue;
    o->line[o->n++] = '\n';
    put_line(c, o, o->n);
  }
}

/* -- Ending ------------------------------------------------------------------------------------ */

void launch_signal(Launcher *l, int sig) {
  for (int i = 0; i < l->job->ranks; i++)
    if (l->children[i].pid) {
      kill(-l->children[i].pid, sig);
      if (sig == SIGTERM) kill(-l->children[i].pid, SIGCONT); /* a stopped one must hear it */
    }
}

static void begin_end(Launcher *l) {
  if (!l->ending) l->ending = launch_now();
}

static int status_of(const Child *c) {
  return WIFSIGNALED(c->status) ? 128 + WTERMSIG(c->status) : WEXITSTATUS(c->status);
}

static void report(const Launcher *l, const Child *c) {
  const char *others = l->running ? "; the others end" : "";
  if (c->stopped)
    launch_say("rank %d on host %s has been stopped for %.3g s%s", c->rank, l->here,
               (double)(launch_now() - c->stopped) / 1000, others);
  else if (WIFSIGNALED(c->status))
    launch_say("rank %d on host %s was killed by signal %d (%s)%s", c->rank, l->here,
               WTERMSIG(c->status), strsignal(WTERMSIG(c->status)), others);
  else
    launch_say("rank %d on host %s ended with exit status %d%s", c->rank, l->here,
               WEXITSTATUS(c->status), others);
}

/* Whether c is the one to blame: the first that failed; or one that failed in its own way where the
 * first ended by an error, which may be that it lost c. */
static bool is_cause(const Launcher *l, const Child *c) {
  if (!status_of(c)) return false;
  return !l->first || (status_of(l->first) == 1 && status_of(c) != 1 && !l->hurried && !l->stop);
}

static void note_change(Launcher *l, Child *c, int status) {
  if (WIFSTOPPED(status) || WIFCONTINUED(status)) {
    c->stopped = WIFSTOPPED(status) ? launch_now() : 0;
    return;
  }
  c->pid = 0;
  c->status = status;
  c->stopped = 0;
  l->running--;
  if (!is_cause(l, c)) return;
  l->first = c;
  begin_end(l);
  if (!l->stop) report(l, c);
}

static void collect(Launcher *l) {
  int status;
  for (pid_t pid; (pid = waitpid(-1, &status, WNOHANG | WUNTRACED | WCONTINUED)) > 0;)
    for (int i = 0; i < l->job->ranks; i++)
      if (l->children[i].pid == pid) note_change(l, &l->children[i], status);
}

/* A rank that was stopped will not end with the others, nor they when they do not talk to it. The
 * next time to look, in ms, or -1. */
static int watch_stopped(Launcher *l) {
  int next = -1;
  for (int i = 0; i < l->job->ranks && !l->ending; i++) {
    Child *c = &l->children[i];
    if (!c->stopped) continue;
    int64_t rest = c->stopped + l->patience - launch_now();
    if (rest > 0 && (next < 0 || rest < next)) next = (int)rest;
    if (rest > 0) continue;
    l->first = c;
    report(l, c);
    l->ending = launch_now() - GRACE_MS; /* the others have had their time */
  }
  return next;
}

/* The user's signals: the first goes to all ranks, the second ends them at once. */
static void take_signals(Launcher *l) {
  struct signalfd_siginfo s;
  while (read(l->signals, &s, sizeof s) == sizeof s) {
    if (s.ssi_signo == SIGCHLD) continue;
    if (s.ssi_signo == SIGINT && l->terminal && !l->ending && terminal_interrupt(l)) continue;
    launch_signal(l, l->stop ? SIGKILL : (int)s.ssi_signo);
    l->stop = (int)s.ssi_signo;
    begin_end(l);
  }
}

/* Milliseconds to the next thing to do, -1: none. */
static int hurry(Launcher *l) {
  int look = watch_stopped(l);
  if (!l->ending) return look;
  int64_t at = l->ending + (l->stop ? USER_GRACE_MS : GRACE_MS) + l->hurried * TERM_MS,
          rest = at - launch_now();
  if (rest > 0) return (int)rest;
  if (l->hurried < 2) launch_signal(l, l->hurried ? SIGKILL : SIGTERM);
  l->hurried++;
  return TERM_MS;
}

enum { ITEM_SIGNALS, ITEM_INPUT, ITEM_FIRST }; /* then a rank's two streams and its channel, each */

/* How many of them there are; *open_ends: of streams that may still bring something. */
static int fill_items(const Launcher *l, struct pollfd *items, int *open_ends) {
  int count = ITEM_FIRST;
  *open_ends = 0;
  items[ITEM_SIGNALS] = (struct pollfd){l->signals, POLLIN, 0};
  items[ITEM_INPUT] = (struct pollfd){terminal_input(l), POLLIN, 0};
  for (int i = 0; i < l->job->ranks; i++) {
    const Child *c = &l->children[i];
    int fds[3] = {c->out[0].from, c->out[1].from, c->channel};
    for (int k = 0; k < 3; k++) items[count++] = (struct pollfd){fds[k], POLLIN, 0};
    *open_ends += (fds[0] >= 0) + (fds[1] >= 0);
  }
  return count;
}

static void serve_items(Launcher *l, const struct pollfd *items) {
  for (int i = 0; i < 3 * l->job->ranks; i++) {
    const struct pollfd *f = &items[ITEM_FIRST + i];
    Child *c = &l->children[i / 3];
    if (f->fd < 0 || !f->revents) continue;
    if (i % 3 == 2) terminal_question(l, c);
    else pass_on(c, &c->out[i % 3]);
  }
  if (items[ITEM_INPUT].fd >= 0 && items[ITEM_INPUT].revents) terminal_read(l);
}

static void close_ends(Launcher *l) {
  for (int i = 0; i < l->job->ranks; i++) {
    Child *c = &l->children[i];
    for (int k = 0; k < 2; k++)
      if (c->out[k].from >= 0) close(c->out[k].from);
    if (c->channel >= 0) close(c->channel);
  }
}

static int watch(Launcher *l) {
  struct pollfd *items = mem_alloc(sizeof *items * (size_t)(3 * l->job->ranks + ITEM_FIRST));
  if (!items) return -1;
  for (;;) {
    int open_ends, count = fill_items(l, items, &open_ends);
    if (!l->running && !open_ends) break;
    int wait = l->running ? hurry(l) : 500; /* who inherited a pipe may hold it open for ever */
    if (poll(items, (nfds_t)count, wait) == 0 && !l->running) break;
    serve_items(l, items);
    take_signals(l);
    collect(l);
    terminal_serve(l);
  }
  close_ends(l);
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
      launch_say("--master must be HOST:PORT, is '%s'", l->job->master);
      return -1;
    }
    snprintf(l->host, sizeof l->host, "%.*s", (int)(colon - l->job->master), l->job->master);
    snprintf(l->port, sizeof l->port, "%s", colon + 1);
    return 0;
  }
  l->listen_fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (l->listen_fd < 0 || bind(l->listen_fd, (void *)&a, sizeof a) || listen(l->listen_fd, 128) ||
      getsockname(l->listen_fd, (void *)&a, &size)) {
    launch_say("no port to meet at: %s", strerror(errno));
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
  for (int i = 0; i < n; i++)
    l->children[i] = (Child){.out = {{.from = -1}, {.from = -1}}, .channel = -1};
  if (l->terminal) *l->terminal = (Terminal){.ended = false};
  bool ok = !open_meeting(l);
  for (int i = 0; ok && i < n; i++) ok = !start_rank(l, i, restart);
  if (l->listen_fd >= 0) close(l->listen_fd);
  if (!ok) launch_signal(l, SIGKILL);
  if (watch(l)) ok = false;
  if (l->stop) return 128 + l->stop;
  if (l->first) return status_of(l->first) ? status_of(l->first) : 1;
  return ok ? 0 : 1;
}

/* All of stdin, in memory from which each rank reads it by itself. */
static bool read_input(Launcher *l) {
  char piece[4096];
  l->input = memfd_create("stdin", MFD_CLOEXEC);
  for (ssize_t n; l->input >= 0 && (n = read(STDIN_FILENO, piece, sizeof piece)) != 0;) {
    if (n > 0) launch_write(l->input, piece, (size_t)n);
    else if (errno != EINTR) break;
  }
  if (l->input < 0) launch_say("no memory for the input");
  return l->input >= 0;
}

static bool open_terminal(Launcher *l) {
  if (l->job->nodes > 1) {
    launch_say("a prompt is for the ranks of one node");
    return false;
  }
  l->terminal = mem_zalloc(sizeof *l->terminal);
  return l->terminal;
}

static bool prepare(Launcher *l) {
  const LaunchJob *j = l->job;
  const char *silence = getenv("MOONFLOW_COMM_SILENCE"); /* more than its default, for debuggers */
  l->patience = STOPPED_MS + (silence && atof(silence) > 5 ? (int)(atof(silence) - 5) * 1000 : 0);
  gethostname(l->here, sizeof l->here - 1);
  if (j->prompts && !open_terminal(l)) return false;
  if (j->input && !read_input(l)) return false;
  if (sched_getaffinity(0, sizeof l->cpus, &l->cpus)) CPU_ZERO(&l->cpus);
  if (j->log_dir && mkdir(j->log_dir, 0777) && errno != EEXIST) {
    launch_say("%s: %s", j->log_dir, strerror(errno));
    return false;
  }
  bool own_key = j->nodes == 1 && !getenv("MOONFLOW_KEY_FILE") && !getenv("MOONFLOW_KEY");
  if (own_key && comm_make_key(l->key)) {
    launch_say("%s", err_text());
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
  Launcher l = {.job = job, .signals = -1, .input = -1};
  int status = 1;
  if (prepare(&l)) {
    for (int restart = 0;; restart++) {
      status = attempt(&l, restart);
      if (!status || l.stop || restart >= job->max_restarts) break;
      launch_say("restart %d of %d", restart + 1, job->max_restarts);
    }
    sigprocmask(SIG_SETMASK, &l.old_mask, NULL);
  }
  if (l.signals >= 0) close(l.signals);
  if (l.input >= 0) close(l.input);
  mem_free(l.terminal);
  mem_free(l.children);
  return status;
}
