/* Rewrites of the logical program.
 *
 * A pass is one file with one function, and one line of the table in pipeline.c, which is also the
 * order in which they run. It gets a graph that graph_verify accepts, numbered and without marks,
 * and leaves one that does the same: writes and results are equal bit for bit, but for amp, which
 * is asked for, and passes that say what they may change. It runs under arena_protect(&g->arena).
 */
#ifndef MF_PASS_H
#define MF_PASS_H
#include "device.h"
#include "graph.h"

typedef struct PassSettings {
  uint64_t off;       /* bit k: pass k of the table does not run */
  Stream *stream;     /* of kernels that run now, on the cpu */
  int isa;            /* which of their op tables */
  int amp;            /* the dtype of products: F16, BF16; 0: as they are */
  int times;          /* micro-batches of a step, if more than 1; then time cannot be off */
  uint64_t repeated;  /* bit k: argument k is whole in each of them */
  int rank;           /* of whose parts the plan will be, if values are on several ranks */
  int zero, zero_min; /* its stage; elements of the smallest tensor that is sharded */
  /* Sees the graph of all ranks before it becomes one's: 0 or a code; NULL: nobody looks. */
  int (*agree)(void *ud, Graph *g);
  void *agree_ud;
  int64_t budget; /* bytes that the step may take; 0: any. What it would take, measure says: 0 or
                     a code */
  int (*measure)(void *ud, Graph *g, int64_t *bytes);
  void *measure_ud;
  /* Sees the graph as traced ("graph") and after each pass ("pass NAME"), and does not change it;
   * NULL: nobody looks. */
  void (*dump)(void *ud, const char *stage, Graph *g);
  void *ud;
} PassSettings;

typedef struct Pass {
  const char *name;
  void (*run)(Graph *g, const PassSettings *s);
  const char *why; /* it stands here */
} Pass;

extern const Pass pass_table[];
extern const int pass_count;

/* The bits of the lines of that name, 0: there is none. */
uint64_t pass_bits(const char *name);
/* Line k of the table on g, which is verified, and is so again afterwards: 0 or a code. */
int pass_run(Graph *g, int k, const PassSettings *s);
/* All that are not off, in order. */
int pass_run_all(Graph *g, const PassSettings *s);

/* -- The passes -------------------------------------------------------------------------------- */

void pass_dce(Graph *g, const PassSettings *s);
void pass_fuse_attention(Graph *g, const PassSettings *s);
void pass_amp(Graph *g, const PassSettings *s);
void pass_time(Graph *g, const PassSettings *s);
void pass_cse(Graph *g, const PassSettings *s);
void pass_fold(Graph *g, const PassSettings *s);
void pass_algebra(Graph *g, const PassSettings *s);
void pass_remat(Graph *g, const PassSettings *s);
void pass_zero(Graph *g, const PassSettings *s);
void pass_sbp(Graph *g, const PassSettings *s);
void pass_boxing(Graph *g, const PassSettings *s);
void pass_part(Graph *g, const PassSettings *s);
void pass_buckets(Graph *g, const PassSettings *s);
void pass_remat_budget(Graph *g, const PassSettings *s);
void pass_layout(Graph *g, const PassSettings *s);
void pass_fuse_loss(Graph *g, const PassSettings *s);
void pass_fuse_norm(Graph *g, const PassSettings *s);
void pass_fuse_act(Graph *g, const PassSettings *s);
void pass_fuse_sum_norm(Graph *g, const PassSettings *s);
void pass_recompute(Graph *g, const PassSettings *s);
void pass_fuse_pointwise(Graph *g, const PassSettings *s);
void pass_fuse_clip(Graph *g, const PassSettings *s);
void pass_updates(Graph *g, const PassSettings *s);

#endif
