/* Sleeping and waking, between threads and between processes that share memory.
 *
 * A bell is a futex word that counts. A waiter reads the word, looks for what it waits for, and
 * sleeps only while the word is unchanged; a ringer counts first and looks for waiters afterwards.
 * Both in one order (seq_cst), so that either the ringer sees the waiter or the kernel sees the new
 * word. Nobody spins: a hand-over costs one system call on each side. A process that is killed
 * while it sleeps leaves itself among the waiters, which costs later ringers a system call each, no
 * more. */
#include "bell.h"

#include <linux/futex.h>
#include <stddef.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

void bell_ring(Bell *b) {
  atomic_fetch_add(&b->word, 1);
  if (atomic_load(&b->waiters)) syscall(SYS_futex, &b->word, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
}

void bell_wait(Bell *b, uint32_t seen, int milliseconds) {
  struct timespec most = {milliseconds / 1000, milliseconds % 1000 * 1000000L};
  atomic_fetch_add(&b->waiters, 1);
  syscall(SYS_futex, &b->word, FUTEX_WAIT, seen, &most, NULL, 0);
  atomic_fetch_sub(&b->waiters, 1);
}
