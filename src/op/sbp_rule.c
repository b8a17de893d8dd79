/* SBP signatures; sbp_rule.h says what they are and how ops declare them.
 *
 * The reader of the notation gives every dim of every tensor a label (a letter, or a place counted
 * from the right in "..."). After that a signature is one loop over tensors: split where the label
 * is. All rules only add; sbp_signatures drops what is not legal. */
#include <ctype.h>
#include <stdio.h>
#include <string.h>

#include "sbp_rule.h"

enum { LABEL_NONE = -1, LABEL_CAPITAL = 26, LABEL_DOTS = 52, LABELS = LABEL_DOTS + MF_MAX_DIMS };

/* -- Signatures -------------------------------------------------------------------------------- */

void sbp_free(SbpAsk *q) {
  vec_free(&q->found);
}

Sbp *sbp_add(SbpAsk *q) {
  size_t width = (size_t)(q->n_in + q->n_out);
  if (!vec_room(&q->found, width)) {
    err_set(MF_ENOMEM, "%s: out of memory", q->op->name);
    return NULL;
  }
  Sbp *row = q->found.at + q->found.n;
  q->found.n += width;
  memset(row, 0, width * sizeof *row);
  return row;
}

int sbp_add_split(SbpAsk *q, int in, int in_dim, int out, int out_dim) {
  Sbp *row = sbp_add(q);
  if (!row) return MF_ENOMEM;
  row[in] = sbp_split(in_dim);
  row[q->n_in + out] = sbp_split(out_dim);
  return 0;
}

static const Meta *tensor_at(const SbpAsk *q, int k) {
  return k < q->n_in ? q->in[k] : q->out[k - q->n_in];
}

static bool is_mutated(const SbpAsk *q, int k) {
  if (!q->op->n_mutated) return false;
  int position = op_param_of_input(q->op, q->args, k);
  for (int i = 0; i < q->op->n_params; i++)
    if (q->op->params[i].kind == PARAM_TENSOR && position-- == 0) return q->op->params[i].mutated;
  return false;
}

/* Splits only where there is enough to split; a tensor that is written must not stay whole where
 * others are parts. */
static bool is_legal(const SbpAsk *q, const Sbp *row) {
  bool whole = true;
  for (int k = 0; k < q->n_in + q->n_out; k++) {
    const Meta *m = tensor_at(q, k);
    whole = whole && row[k].kind == SBP_B;
    if (row[k].kind == SBP_B) continue;
    if (!m || m->number) return false;
    if (row[k].kind == SBP_S && (row[k].dim >= m->ndim || m->shape[row[k].dim] < q->parts))
      return false;
    if (row[k].kind == SBP_S && m->shape[row[k].dim] < 2) return false;
  }
  for (int k = 0; k < q->n_in && !whole; k++)
    if (row[k].kind == SBP_B && q->in[k] && is_mutated(q, k)) return false;
  return true;
}

static void drop_illegal(SbpAsk *q) {
  size_t width = (size_t)(q->n_in + q->n_out), kept = 0;
  for (size_t i = 0; i < q->found.n; i += width) {
    Sbp *row = q->found.at + i;
    bool keep = is_legal(q, row);
    for (size_t j = 0; j < kept && keep; j += width)
      keep = memcmp(q->found.at + j, row, width * sizeof *row) != 0;
    if (!keep) continue;
    memmove(q->found.at + kept, row, width * sizeof *row);
    kept += width;
  }
  q->found.n = kept;
}

/* -- Index notation ---------------------------------------------------------------------------- */

/* One comma-separated list of letters. */
typedef struct Operand {
  int8_t label[MF_MAX_DIMS];
  int n, dots;       /* dots: how many letters stand before "...", or -1 */
  bool whole, added; /* whole: "...!" */
} Operand;

/* Reads one operand and moves *at behind it. */
static bool read_operand(const char **at, Operand *o) {
  const char *p = *at;
  *o = (Operand){.dots = -1};
  for (; *p && *p != ',' && strncmp(p, "->", 2); p++) {
    if (*p == ' ') continue;
    if (*p == '+' && !o->n && o->dots < 0) {
      o->added = true;
    } else if (!strncmp(p, "...", 3) && o->dots < 0) {
      o->dots = o->n;
      o->whole = p[3] == '!';
      p += 2 + o->whole;
    } else if (isalpha((unsigned char)*p) && o->n < MF_MAX_DIMS) {
      o->label[o->n++] = (int8_t)(islower((unsigned char)*p) ? *p - 'a' : LABEL_CAPITAL + *p - 'A');
    } else {
      return false;
    }
  }
  *at = p;
  return true;
}

/* Labels of one tensor's dims; false when the operand does not fit it. */
static bool label_tensor(const Operand *o, const Meta *m, int8_t *label) {
  if (m->number) return true; /* broadcast everywhere */
  int dots = m->ndim - o->n, missing = dots < 0 ? -dots : 0;
  if (dots > 0 && o->dots < 0) return false;
  if (dots < 0) dots = 0;
  int before = o->dots < 0 ? 0 : o->dots;
  for (int d = 0, i = missing; d < m->ndim; d++) {
    if (d >= before && d < before + dots)
      label[d] = (int8_t)(o->whole ? LABEL_NONE : LABEL_DOTS + before + dots - 1 - d);
    else label[d] = o->label[i++];
  }
  return true;
}

typedef struct Labels {
  int8_t (*of)[MF_MAX_DIMS]; /* by tensor, inputs and then outputs */
  bool *added;               /* by input */
} Labels;

static int does_not_fit(const SbpAsk *q, const char *text) {
  return err_set(MF_EINVAL, "%s: the SBP rule \"%s\" does not fit the tensors", q->op->name, text);
}

static int label_inputs(SbpAsk *q, const char *text, const char **at, Labels *l, Operand *first) {
  for (int k = 0, p = 0; p < q->op->n_tensors; p++) {
    int from, n;
    Operand o;
    if (p && *(*at)++ != ',') return does_not_fit(q, text);
    if (!read_operand(at, &o)) return does_not_fit(q, text);
    if (p == 0) *first = o;
    if (o.added) q->added |= 1u << p;
    op_inputs_of_param(q->op, q->args, p, &from, &n);
    for (k = from; k < from + n; k++) {
      l->added[k] = o.added;
      if (q->in[k] && !label_tensor(&o, q->in[k], l->of[k])) return does_not_fit(q, text);
    }
  }
  return 0;
}

static int label_outputs(SbpAsk *q, const char *text, const char *at, Labels *l,
                         const Operand *first) {
  Operand o = *first;
  bool arrow = !strncmp(at, "->", 2);
  if (!arrow && *at) return does_not_fit(q, text);
  if (arrow) at += 2;
  for (int k = 0; k < q->n_out; k++) {
    bool list = q->op->n_outputs < 0 && k;
    if (arrow && !list) {
      if (k && *at++ != ',') return does_not_fit(q, text);
      if (!read_operand(&at, &o)) return does_not_fit(q, text);
    }
    if (!label_tensor(&o, q->out[k], l->of[q->n_in + k])) return does_not_fit(q, text);
  }
  return *at ? does_not_fit(q, text) : 0;
}

static int dim_of_label(const Labels *l, const Meta *m, int k, int label) {
  for (int d = 0; m && d < m->ndim; d++)
    if (l->of[k][d] == label) return d;
  return -1;
}

/* The size that the label has in the inputs: 0 when none has it; -1 when two differ. */
static int64_t size_of_label(const SbpAsk *q, const Labels *l, int label) {
  int64_t size = 0;
  for (int k = 0; k < q->n_in; k++) {
    int d = dim_of_label(l, q->in[k], k, label);
    if (d < 0) continue;
    int64_t n = q->in[k]->shape[d];
    if (size > 1 && n != 1 && n != size) return -1;
    if (n != 1 || !size) size = n;
  }
  return size;
}

static int split_label(SbpAsk *q, const Labels *l, int label) {
  bool partial = false;
  Sbp *row = sbp_add(q);
  if (!row) return MF_ENOMEM;
  for (int k = 0; k < q->n_in + q->n_out; k++) {
    const Meta *m = tensor_at(q, k);
    int d = dim_of_label(l, m, k, label);
    if (d >= 0 && m->shape[d] != 1) row[k] = sbp_split(d);
    else if (k >= q->n_in) row[k].kind = SBP_P, partial = true;
  }
  for (int k = 0; k < q->n_in && partial; k++)
    if (l->added[k] && q->in[k] && row[k].kind == SBP_B) row[k].kind = SBP_P;
  return 0;
}

static int read_labels(SbpAsk *q, const char *text, Labels *l) {
  const char *at = text;
  Operand first;
  int rc = label_inputs(q, text, &at, l, &first);
  return rc ? rc : label_outputs(q, text, at, l, &first);
}

int sbp_notation(SbpAsk *q, const char *text) {
  size_t n = (size_t)(q->n_in + q->n_out);
  Labels l = {.of = mem_alloc(n * sizeof *l.of), .added = mem_zalloc(n)};
  int rc = l.of && l.added ? 0 : err_set(MF_ENOMEM, "%s: out of memory", q->op->name);
  if (!rc) memset(l.of, LABEL_NONE, n * sizeof *l.of);
  if (!rc) rc = read_labels(q, text, &l);
  for (int i = 0; i < LABELS && !rc; i++) { /* dims of "..." from the first on */
    int label = i < LABEL_DOTS ? i : LABELS - 1 - (i - LABEL_DOTS);
    int64_t size = size_of_label(q, &l, label);
    if (size < 0) rc = does_not_fit(q, text);
    else if (size > 1 && (label < LABEL_CAPITAL || label >= LABEL_DOTS))
      rc = split_label(q, &l, label);
  }
  mem_free(l.of);
  mem_free(l.added);
  return rc;
}

/* -- Partial sums ------------------------------------------------------------------------------ */

/* The position among the tensor params of the name that begins here. */
static int position_of(const Op *op, const char *name, size_t length) {
  for (int i = 0, position = 0; i < op->n_params; i++) {
    if (op->params[i].kind != PARAM_TENSOR) continue;
    if (strlen(op->params[i].name) == length && !memcmp(op->params[i].name, name, length))
      return position;
    position++;
  }
  return -1;
}

/* One alternative: the names up to `stop`, joined by +. */
static int linear_one(SbpAsk *q, const char *names, const char *stop) {
  Sbp *row = sbp_add(q);
  if (!row) return MF_ENOMEM;
  uint32_t partial = 0;
  for (const char *p = names; p < stop; p++) {
    size_t length = strcspn(p, "+|");
    int position = position_of(q->op, p, length);
    if (position < 0)
      return err_set(MF_EINVAL, "%s: linear names '%s', which is no tensor", q->op->name, names);
    partial |= 1u << position;
    p += length;
  }
  for (int k = 0; k < q->n_in; k++) {
    int position = op_param_of_input(q->op, q->args, k);
    bool added = q->in[k] && q->added >> position & 1;
    if (added || partial >> position & 1)
      row[k].kind = SBP_P; /* absent or a number: dropped as not legal */
  }
  for (int k = 0; k < q->n_out; k++) row[q->n_in + k].kind = SBP_P;
  return 0;
}

int sbp_linear(SbpAsk *q, const char *names) {
  int rc = 0;
  while (*names && !rc) {
    const char *stop = names + strcspn(names, "|");
    rc = linear_one(q, names, stop);
    names = *stop ? stop + 1 : stop;
  }
  return rc;
}

/* -- Rules that several ops share -------------------------------------------------------------- */

static const Param *param_named(const Op *op, const char *name) {
  for (int i = 0; i < op->n_params; i++)
    if (!strcmp(op->params[i].name, name)) return &op->params[i];
  return NULL;
}

static uint32_t bit_of_dim(int64_t dim, int ndim) {
  if (dim < 0) dim += ndim;
  return dim >= 0 && dim < 32 ? 1u << dim : 0;
}

/* Bits of the argument `name`; 0 without it. */
static uint32_t dims_of(const SbpAsk *q, const char *name, int ndim) {
  const Param *p = param_named(q->op, name);
  if (!p || p->kind == PARAM_TENSOR) return 0;
  const char *value = (const char *)q->args + p->offset;
  if (p->kind == PARAM_INT || p->kind == PARAM_DIM) {
    bool absent = p->has_offset && !*((const bool *)q->args + p->has_offset);
    return absent ? (1u << ndim) - 1 : bit_of_dim(*(const int64_t *)(const void *)value, ndim);
  }
  if (p->kind != PARAM_INTS || p->fixed) return 0;
  const IntList *list = (const void *)value;
  uint32_t bits = list->n ? 0 : (1u << ndim) - 1;
  for (int i = 0; i < list->n; i++) bits |= bit_of_dim(list->v[i], ndim);
  return bits;
}

uint32_t sbp_named_dims(const SbpAsk *q, int ndim) {
  return dims_of(q, "dim", ndim) | dims_of(q, "dims", ndim) | dims_of(q, "dim0", ndim) |
         dims_of(q, "dim1", ndim) | dims_of(q, "dim2", ndim);
}

int sbp_all_but_dim(SbpAsk *q) {
  const Meta *x = q->in[0];
  uint32_t named = sbp_named_dims(q, x->ndim);
  for (int d = 0; d < x->ndim; d++) {
    if (named >> d & 1) continue;
    Sbp *row = sbp_add(q);
    if (!row) return MF_ENOMEM;
    for (int k = 0; k < q->n_in + q->n_out; k++) {
      const Meta *m = tensor_at(q, k);
      bool fits = m && m->ndim == x->ndim && m->shape[d] == x->shape[d];
      if (m && !fits &&
          !(k < q->n_in && m->ndim == 0)) { /* elements of the others are not at the same place */
        q->found.n -= (size_t)(q->n_in + q->n_out);
        break;
      }
      if (fits) row[k] = sbp_split(d);
    }
  }
  return 0;
}

int sbp_fresh(SbpAsk *q) {
  for (int d = 0; d < q->out[0]->ndim; d++) {
    Sbp *row = sbp_add(q);
    if (!row) return MF_ENOMEM;
    row[q->n_in] = sbp_split(d);
  }
  return 0;
}

/* `partial`: what outputs are where the reduced dim is split; SBP_B: it cannot be. */
static int reduce(SbpAsk *q, SbpKind partial) {
  const Meta *x = q->in[0];
  uint32_t named = sbp_named_dims(q, x->ndim);
  bool keep = q->n_out && q->out[0]->ndim == x->ndim;
  for (int d = 0, kept = 0; d < x->ndim; d++) {
    bool reduced = named >> d & 1;
    int out_dim = keep ? d : kept;
    kept += !reduced;
    if (reduced && partial == SBP_B) continue;
    Sbp *row = sbp_add(q);
    if (!row) return MF_ENOMEM;
    row[0] = sbp_split(d);
    for (int k = 0; k < q->n_out; k++)
      row[q->n_in + k] = reduced ? (Sbp){(uint8_t)partial, 0} : sbp_split(out_dim);
  }
  return 0;
}

int sbp_reduce(SbpAsk *q) {
  return reduce(q, SBP_B);
}
int sbp_reduce_sum(SbpAsk *q) {
  return reduce(q, SBP_P);
}
int sbp_reduce_max(SbpAsk *q) {
  return reduce(q, SBP_PMAX);
}
int sbp_reduce_min(SbpAsk *q) {
  return reduce(q, SBP_PMIN);
}

/* -- Views ------------------------------------------------------------------------------------- */

/* The view again, of an input that is contiguous, so that strides tell dims apart. */
typedef struct Probe {
  Infer infer;
  Meta *out;
  int n, cap;
} Probe;

static Meta *probe_add(Infer *I) {
  Probe *p = (Probe *)I;
  if (p->n == p->cap) return NULL;
  p->infer.n_out = p->n + 1;
  return &p->out[p->n++];
}

static int probe_view(const SbpAsk *q, Meta *x, Meta *out) {
  union {
    char bytes[OP_MAX_ARGS];
    double align;
  } args;
  memcpy(args.bytes, q->args, q->op->args_size);
  *x = *q->in[0];
  x->offset = 0;
  shape_contiguous(x->ndim, x->shape, x->stride);
  const Meta *in[] = {x};
  Probe p = {.infer = {.op = q->op, .args = args.bytes, .in = in, .n_in = 1, .add = probe_add},
             .out = out,
             .cap = q->n_out};
  int rc = q->op->spec[0]->infer(&p.infer);
  return rc || p.n == q->n_out ? rc : err_set(MF_EINVAL, "%s: is no view by itself", q->op->name);
}

/* The dim of y that is cut where dim d of the contiguous x is cut, or -1: the same step and size,
 * or dims that begin a block of the same extent and that both divide. */
static int viewed_dim(const Meta *x, int d, const Meta *y, int parts) {
  int64_t extent = x->shape[d] * x->stride[d];
  for (int k = 0; k < y->ndim; k++) {
    if (y->shape[k] == x->shape[d] && y->stride[k] == x->stride[d]) return k;
    if (y->shape[k] > 1 && y->stride[k] > 0 && y->shape[k] * y->stride[k] == extent &&
        y->shape[k] % parts == 0 && x->shape[d] % parts == 0)
      return k;
  }
  return -1;
}

/* Whether some argument counts along dim d; a list of dims (squeeze) treats parts of size 1 in its
 * own way. */
static bool is_cut(const SbpAsk *q, int d) {
  const Param *p = param_named(q->op, "dim");
  if (!p || !(dims_of(q, "dim", q->in[0]->ndim) >> d & 1)) return false;
  return p->kind == PARAM_DIM || (p->kind == PARAM_INTS && q->in[0]->shape[d] < 2 * q->parts);
}

int sbp_view(SbpAsk *q) {
  Meta x, *out = mem_alloc(sizeof *out * (size_t)(q->n_out + 1));
  if (!out) return err_set(MF_ENOMEM, "%s: out of memory", q->op->name);
  int rc = probe_view(q, &x, out);
  for (int d = 0; d < x.ndim && !rc; d++) {
    if (x.shape[d] < 2 || is_cut(q, d)) continue;
    Sbp *row = sbp_add(q);
    if (!row) rc = MF_ENOMEM;
    if (row) row[0] = sbp_split(d);
    for (int k = 0; k < q->n_out && !rc; k++) {
      int to = viewed_dim(&x, d, &out[k], q->parts);
      if (to >= 0) {
        row[q->n_in + k] = sbp_split(to);
        continue;
      }
      q->found.n -= (size_t)(q->n_in + q->n_out);
      break;
    }
  }
  mem_free(out);
  return rc;
}

/* -- The answer -------------------------------------------------------------------------------- */

int sbp_signatures(SbpAsk *q) {
  const OpSpec *s = q->op->spec[0];
  bool view = s->flags & OP_VIEW && !s->sbp && !s->sbp_rule;
  q->found.n = 0;
  q->added = 0;
  int rc = sbp_add(q) ? 0 : MF_ENOMEM;
  if (!rc && s->sbp && strcmp(s->sbp, "B")) rc = sbp_notation(q, s->sbp);
  if (!rc && s->sbp_rule) rc = s->sbp_rule(q);
  if (!rc && view) rc = sbp_view(q);
  if (!rc && s->linear) rc = sbp_linear(q, s->linear);
  else if (!rc && view) rc = sbp_linear(q, q->op->params[0].name);
  if (!rc) drop_illegal(q);
  return rc;
}

void sbp_localize(const Op *op, void *args, const Meta *out) {
  const Param *p = param_named(op, "num");
  if (p && p->kind == PARAM_INT && out->ndim)
    *(int64_t *)(void *)((char *)args + p->offset) = out->shape[0];
  p = param_named(op, "size");
  if (!p || p->kind != PARAM_INTS || p->fixed) return;
  IntList *size = (void *)((char *)args + p->offset);
  if (!size->n) return;
  size->n = out->ndim;
  for (int d = 0; d < out->ndim; d++) size->v[d] = out->shape[d];
}
