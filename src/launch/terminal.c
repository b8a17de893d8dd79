/* One prompt for all ranks of a job.
 *
 * Each rank runs the prompt, but asks the launcher for its lines, over a channel: a message that
 * says whether its communication has failed, and what to show. When all ask, the launcher shows the
 * prompt, reads a line, and gives it to all. So ranks are in step at each line, whatever happened
 * in the last: a rank in which it raised an error has failed the job's communication, which ends
 * the others' waiting; then all are told to begin that anew before the next line.
 *
 * Ctrl-C drops the input so far at the prompt, and else interrupts the line in all ranks; twice
 * within a second, it ends the job. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "launch_int.h"
#include "mem.h"

enum { TWICE_MS = 1000 };

/* -- In the launcher --------------------------------------------------------------------------- */

static void answer(Launcher *l, LaunchAnswer kind, const char *text, size_t n) {
  char message[INPUT_MAX_BYTES + 1] = {(char)kind};
  memcpy(message + 1, text, n);
  for (int i = 0; i < l->job->ranks; i++) {
    Child *c = &l->children[i];
    c->asks = c->failed = false;
    if (c->channel >= 0) send(c->channel, message, n + 1, MSG_NOSIGNAL);
  }
  l->terminal->shown = false;
}

void terminal_question(Launcher *l, Child *c) {
  char text[sizeof l->terminal->prompt + 1];
  ssize_t n = recv(c->channel, text, sizeof text - 1, MSG_DONTWAIT);
  if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
  if (n <= 0) {
    close(c->channel);
    c->channel = -1;
    return;
  }
  text[n] = 0;
  c->asks = true;
  c->failed = *text == '!';
  snprintf(l->terminal->prompt, sizeof l->terminal->prompt, "%s", text + 1);
}

/* Whether all that live wait; *failed: for one communication has. */
static bool all_ask(const Launcher *l, bool *failed) {
  int asking = 0;
  *failed = false;
  for (int i = 0; i < l->job->ranks; i++) {
    const Child *c = &l->children[i];
    if (!c->pid) continue;
    if (!c->asks) return false;
    asking++;
    *failed |= c->failed;
  }
  return asking > 0;
}

/* Gives the first whole line, or at the end of the input what there is. */
static void answer_line(Launcher *l) {
  Terminal *t = l->terminal;
  char *end = memchr(t->text, '\n', t->n);
  size_t n = end ? (size_t)(end - t->text) : t->n, used = end ? n + 1 : n;
  if (!end && !t->ended) return;
  if (!end && !n) launch_write(STDOUT_FILENO, "\n", 1);
  answer(l, end || n ? ANSWER_LINE : ANSWER_END, t->text, n);
  memmove(t->text, t->text + used, t->n - used);
  t->n -= used;
}

void terminal_serve(Launcher *l) {
  Terminal *t = l->terminal;
  bool failed;
  if (!t || l->ending || !all_ask(l, &failed)) return;
  if (failed) {
    answer(l, ANSWER_RENEW, "", 0);
    return;
  }
  if (!t->shown) {
    launch_drain(l);
    launch_write(STDOUT_FILENO, t->prompt, strlen(t->prompt));
    t->shown = true;
  }
  answer_line(l);
}

int terminal_input(const Launcher *l) {
  const Terminal *t = l->terminal;
  return t && t->shown && !t->ended ? STDIN_FILENO : -1;
}

void terminal_read(Launcher *l) {
  Terminal *t = l->terminal;
  ssize_t n = read(STDIN_FILENO, t->text + t->n, sizeof t->text - t->n);
  if (n > 0) t->n += (size_t)n;
  else if (n == 0 || (errno != EINTR && errno != EAGAIN)) t->ended = true;
  if (t->n < sizeof t->text || memchr(t->text, '\n', t->n)) return;
  launch_say("a line of the input is longer than %d bytes", INPUT_MAX_BYTES);
  t->n = 0;
}

bool terminal_interrupt(Launcher *l) {
  Terminal *t = l->terminal;
  int64_t last = t->interrupted;
  t->interrupted = launch_now();
  if (t->shown) {
    t->n = 0;
    t->interrupted = 0;
    launch_write(STDOUT_FILENO, "\n", 1);
    answer(l, ANSWER_DROP, "", 0);
    return true;
  }
  if (last && t->interrupted - last < TWICE_MS) return false;
  launch_signal(l, SIGINT);
  return true;
}

/* -- In a rank --------------------------------------------------------------------------------- */

int launch_channel(void) {
  const char *text = getenv("MOONFLOW_PROMPT_FD");
  int fd = text ? atoi(text) : -1;
  if (fd >= 0) fcntl(fd, F_SETFD, FD_CLOEXEC);
  unsetenv("MOONFLOW_PROMPT_FD");
  return fd;
}

char *launch_ask(int channel, const char *prompt, bool failed, void (*interrupted)(void *),
                 void *arg, LaunchAnswer *kind) {
  char question[16], *text = mem_alloc(INPUT_MAX_BYTES + 2);
  int n = snprintf(question, sizeof question, "%c%s", failed ? '!' : '.', prompt);
  *kind = ANSWER_END;
  if (!text) return NULL;
  if (n >= (int)sizeof question) n = (int)sizeof question - 1;
  send(channel, question, (size_t)n, MSG_NOSIGNAL);
  ssize_t got;
  while ((got = recv(channel, text, INPUT_MAX_BYTES + 1, 0)) < 0 && errno == EINTR)
    interrupted(arg); /* of a line that is over here */
  if (got > 0) *kind = (LaunchAnswer)text[0];
  text[got > 0 ? got : 1] = 0;
  memmove(text, text + 1, strlen(text + 1) + 1);
  return text;
}
