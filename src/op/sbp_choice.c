/* Choosing signatures; see sbp_choice.h. One level of the recursion settles one axis. */
#include <string.h>

#include "boxing.h"
#include "sbp_choice.h"
#include "sbp_rule.h"

enum { MATCH = 10 };

typedef struct Choosing {
  SbpChoice *c;
  SbpList *now; /* the signature that is being made up */
  double best;
  bool any;
} Choosing;

/* What one axis is asked about: parts of all tensors, and arguments that fit them. */
typedef struct Level {
  Meta *metas;
  const Meta **pointers; /* NULL where absent */
  union {
    char bytes[OP_MAX_ARGS];
    double align;
  } args;
} Level;

static int no_memory(const SbpChoice *c) {
  return err_set(MF_ENOMEM, "%s: out of memory", c->op->name);
}

static int price_of(const SbpChoice *c, const SbpList *now, double *out) {
  double sum = 0, one;
  int rc = 0;
  for (int k = 0; k < c->n_in && !rc; k++) {
    const Meta *m = c->in[k];
    if (!m || m->number) continue;
    size_t size = dtype_size((DType)m->dtype);
    if (sbp_list_equal(&c->have[k], &now[k])) {
      sum -= MATCH;
      continue;
    }
    rc = boxing_price(c->placement, &c->have[k], &now[k], m->ndim, m->shape, size, &one);
    sum += one;
  }
  if (!rc && c->into) {
    const Meta *m = c->out[0];
    rc = boxing_price(c->placement, &now[c->n_in], &c->have[0], m->ndim, m->shape,
                      dtype_size((DType)m->dtype), &one);
    sum += one;
  }
  *out = sum;
  return rc;
}

static int settle(Choosing *s, int axis, const Level *level);

/* The last rank's parts of all tensors under this row. */
static int next_level(Choosing *s, int axis, const Level *level, const Sbp *row) {
  const SbpChoice *c = s->c;
  int n = c->n_in + c->n_out, parts = c->placement->size[axis];
  Level next = {.metas = mem_alloc(sizeof(Meta) * (size_t)(n + 1)),
                .pointers = mem_alloc(sizeof(Meta *) * (size_t)(n + 1))};
  int rc = next.metas && next.pointers ? 0 : no_memory(c);
  memcpy(next.args.bytes, level->args.bytes, c->op->args_size);
  for (int k = 0; k < n && !rc; k++) {
    next.pointers[k] = level->pointers[k] ? &next.metas[k] : NULL;
    if (!level->pointers[k]) continue;
    Meta *m = &next.metas[k];
    *m = *level->pointers[k];
    if (row[k].kind != SBP_S) continue;
    m->shape[row[k].dim] /= parts;
    shape_contiguous(m->ndim, m->shape, m->stride);
    m->offset = 0;
  }
  if (!rc && c->n_out) sbp_localize(c->op, next.args.bytes, &next.metas[c->n_in]);
  if (!rc) rc = settle(s, axis + 1, &next);
  mem_free(next.metas);
  mem_free(next.pointers);
  return rc;
}

static int finish(Choosing *s) {
  double price;
  int rc = price_of(s->c, s->now, &price);
  if (rc || (s->any && price >= s->best)) return rc;
  s->any = true;
  s->best = price;
  memcpy(s->c->want, s->now, sizeof *s->now * (size_t)(s->c->n_in + s->c->n_out));
  return 0;
}

static int settle(Choosing *s, int axis, const Level *level) {
  SbpChoice *c = s->c;
  if (axis == c->placement->n_axes) return finish(s);
  SbpAsk q = {.op = c->op,
              .args = level->args.bytes,
              .in = level->pointers,
              .out = level->pointers + c->n_in,
              .n_in = c->n_in,
              .n_out = c->n_out,
              .parts = c->placement->size[axis]};
  int rc = sbp_signatures(&q);
  bool last = axis == c->placement->n_axes - 1;
  for (int i = 0; i < sbp_count(&q) && !rc; i++) {
    const Sbp *row = sbp_row(&q, i);
    for (int k = 0; k < c->n_in + c->n_out; k++) s->now[k].axis[axis] = row[k];
    rc = last ? finish(s) : next_level(s, axis, level, row);
  }
  sbp_free(&q);
  return rc;
}

int sbp_choose(SbpChoice *c) {
  int n = c->n_in + c->n_out;
  Level level = {.pointers = mem_alloc(sizeof(Meta *) * (size_t)(n + 1))};
  SbpList *now = mem_zalloc(sizeof *now * (size_t)(n + 1));
  Choosing s = {.c = c, .now = now};
  int rc = level.pointers && now ? 0 : no_memory(c);
  if (!rc) {
    memcpy(level.args.bytes, c->args, c->op->args_size);
    for (int k = 0; k < n; k++) level.pointers[k] = k < c->n_in ? c->in[k] : c->out[k - c->n_in];
    rc = settle(&s, 0, &level);
  }
  mem_free(level.pointers);
  mem_free(now);
  c->price = s.best;
  return rc;
}
