/* Ranks that compile one step must have one graph, or they would wait for each other when it runs.
 * Hashes of its text go round; where one differs, the texts do, and all ranks tell the first line
 * that is not the same. */
#include <stdio.h>
#include <string.h>

#include "comm.h"
#include "err.h"
#include "graph.h"
#include "job_int.h"
#include "mem.h"

typedef struct Card {
  int64_t hash, length;
} Card;

enum { LINE = 160 };

static uint64_t hash_of(const char *p, size_t n) {
  uint64_t h = UINT64_C(0xcbf29ce484222325);
  for (size_t i = 0; i < n; i++) h = (h ^ (unsigned char)p[i]) * UINT64_C(0x100000001b3);
  return h;
}

static void copy_line(const char *from, char *to) {
  int n = (int)strcspn(from, "\n");
  snprintf(to, LINE, "%.*s", n, n ? from : "nothing");
  if (!n) snprintf(to, LINE, "nothing");
}

static int tell(int other, const char *a, const char *b) {
  char first[LINE], second[LINE];
  int line = 1;
  while (*a && *b) {
    size_t n = strcspn(a, "\n"), m = strcspn(b, "\n");
    if (n != m || memcmp(a, b, n)) break;
    a += n + (a[n] == '\n');
    b += m + (b[m] == '\n');
    line++;
  }
  copy_line(a, first);
  copy_line(b, second);
  return err_set(
      MF_EINVAL,
      "compile: ranks 0 and %d compiled different steps; they differ first in line %d of "
      "the graph:\n  rank 0: %s\n  rank %d: %s",
      other, line, first, other, second);
}

/* The text of rank `root`, which has `length` bytes; mem_free'd by the caller. */
static char *text_of(CommGroup *world, int root, size_t length, const Str *mine) {
  char *text = mem_zalloc(length + 1);
  if (!text) return NULL;
  CommCall call = {.op = COMM_BROADCAST, .dtype = U8, .root = root, .count = (int64_t)length};
  if (!comm_collective(world, &call, mine->text, text)) return text;
  mem_free(text);
  return NULL;
}

static int compare(CommGroup *world, const Card *cards, const Str *mine) {
  int other = 0, n = comm_group_size(world), rc = 0;
  while (other < n && cards[other].hash == cards[0].hash && cards[other].length == cards[0].length)
    other++;
  if (other == n) return 0;
  char *a = text_of(world, 0, (size_t)cards[0].length, mine);
  char *b = a ? text_of(world, other, (size_t)cards[other].length, mine) : NULL;
  if (b) /* all have both before the first one fails */
    comm_collective(world, &(CommCall){.op = COMM_BARRIER, .dtype = U8}, NULL, NULL);
  rc = b ? tell(other, a, b) : MF_ECOMM;
  mem_free(a);
  mem_free(b);
  return rc;
}

int job_agree(void *ud, Graph *g) {
  CommGroup *world = ud ? comm_world(ud) : NULL;
  Str text = {0};
  if (!world) return MF_ECOMM;
  int n = comm_group_size(world);
  graph_print(g, &text);
  Card *cards = mem_alloc(sizeof *cards * (size_t)n);
  int64_t *counts = mem_alloc(sizeof *counts * (size_t)n);
  int rc = cards && counts && !text.failed ? 0 : err_set(MF_ENOMEM, "compile: out of memory");
  if (!rc) {
    Card mine = {(int64_t)hash_of(text.text, text.n), (int64_t)text.n};
    for (int i = 0; i < n; i++) counts[i] = 2;
    CommCall call = {.op = COMM_ALL_GATHER, .dtype = I64, .counts = counts};
    comm_note(world, "compile of a step on several ranks");
    rc = comm_collective(world, &call, &mine, cards);
  }
  if (!rc) rc = compare(world, cards, &text);
  mem_free(cards);
  mem_free(counts);
  str_free(&text);
  return rc;
}
