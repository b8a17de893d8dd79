/* Calls of ops on global tensors: choose a signature, convert the inputs, run the op on the parts.
 *
 * What a call needs to know depends on the op, its arguments, and the forms and layouts of its
 * inputs; it is worked out once and kept under these as a key. A call that needs no conversion then
 * costs a look-up, a local call and a second handle for each output.
 *
 * Inputs that are written keep their layout: what was written under another one is brought back. A
 * view whose input had to be converted is `severed`: it is not in its base's memory, and may be
 * read only. */
#include <stdio.h>
#include <string.h>

#include "call_int.h"
#include "global.h"
#include "op_ids.h"
#include "op_text.h"
#include "sbp_choice.h"
#include "sbp_rule.h"
#include "tape.h"
#include "vec.h"

typedef struct Entry {
  struct Entry *next;
  uint64_t hash;
  size_t n_key;
  char *key;           /* n_key bytes, behind the layouts */
  char *text;          /* what the ranks compare: as the key, readable */
  const Layout *all[]; /* inputs (NULL: absent, a number), then outputs */
} Entry;

enum { SLOTS = 1024, ENTRIES_MAX = 8192, PARTS_SMALL = 24 };

typedef struct GlobalCache {
  size_t n;
  Entry *slot[SLOTS];
  VEC(char) key; /* of the call at hand */
} GlobalCache;

/* -- Keys -------------------------------------------------------------------------------------- */

static bool put(GlobalCache *g, const void *bytes, size_t n) {
  if (!vec_room(&g->key, n)) return false;
  memcpy(g->key.at + g->key.n, bytes, n);
  g->key.n += n;
  return true;
}

static size_t size_of_param(const Param *p) {
  switch ((ParamKind)p->kind) {
    case PARAM_BOOL: return sizeof(bool);
    case PARAM_PROGRAM: return sizeof(void *);
    default: return sizeof(int64_t);
  }
}

static bool put_args(GlobalCache *g, const Op *op, const char *args) {
  bool ok = true;
  for (int i = 0; i < op->n_params && ok; i++) {
    const Param *p = &op->params[i];
    const char *value = args + p->offset;
    if (p->kind == PARAM_GENERATOR || (p->kind == PARAM_TENSOR && !p->list)) continue;
    size_t n = size_of_param(p);
    if (p->kind == PARAM_INTS && p->fixed) n *= p->fixed;
    else if (p->kind == PARAM_INTS)
      n += sizeof(int64_t) * (size_t)((const IntList *)(const void *)value)->n;
    if (p->has_offset) ok = put(g, args + p->has_offset, sizeof(bool));
    ok = ok && put(g, value, n);
  }
  return ok;
}

static bool put_tensor(GlobalCache *g, const Tensor *t) {
  struct {
    const Layout *layout;
    int8_t ndim;
    uint8_t dtype, number, absent, pad[4];
  } head = {.absent = !t};
  if (!t) return put(g, &head, sizeof head);
  head.layout = t->layout;
  head.ndim = t->m.ndim;
  head.dtype = t->m.dtype;
  head.number = t->m.number;
  return put(g, &head, sizeof head) && put(g, t->m.shape, sizeof(int64_t) * (size_t)t->m.ndim);
}

static uint64_t hash_of(const char *p, size_t n) {
  uint64_t h = UINT64_C(0x9e3779b97f4a7c15), w;
  for (; n >= 8; n -= 8, p += 8) {
    memcpy(&w, p, 8);
    h = (h ^ w) * UINT64_C(0xff51afd7ed558ccd);
    h ^= h >> 32;
  }
  w = 0;
  memcpy(&w, p, n);
  h = (h ^ w) * UINT64_C(0xc4ceb9fe1a85ec53);
  return h ^ h >> 29;
}

static bool make_key(GlobalCache *g, const EagerCall *c, const Place *place) {
  struct {
    const Place *place;
    const Layout *target;
    int32_t op, n_in, into, pad;
  } head = {place, c->target, c->op->id, c->n_in, c->into != NULL, 0};
  g->key.n = 0;
  bool ok = put(g, &head, sizeof head) && put_args(g, c->op, c->args);
  for (int k = 0; k < c->n_in && ok; k++) ok = put_tensor(g, c->in[k]);
  return ok;
}

/* -- What is called ---------------------------------------------------------------------------- */

static void put_form(Str *text, const Tensor *t) {
  char shape[SHAPE_TEXT_MAX];
  if (!t) {
    str_puts(text, " -");
    return;
  }
  str_printf(text, " %s %s %s", dtype_name((DType)t->m.dtype),
             shape_text(t->m.ndim, t->m.shape, shape),
             t->layout     ? t->layout->text
             : t->m.number ? "number"
                           : "local");
}

static char *text_of(const EagerCall *c) {
  Str text = {0};
  str_puts(&text, c->op->name);
  if (c->into) str_puts(&text, "_");
  if (c->target) str_printf(&text, " as %s", c->target->text);
  for (int k = 0; k < c->n_in; k++) put_form(&text, c->in[k]);
  if (c->op->n_params) str_puts(&text, " ");
  op_print_args(c->op, c->args, &text);
  if (text.failed) str_free(&text);
  return text.text;
}

static void tell(const Place *p, const char *text) {
  for (int a = 0; a < p->placement->n_axes; a++)
    if (p->group[a] && p->placement->size[a] > 1) comm_note(p->group[a], text);
}

/* Of a call that draws, with the key, which must be the same on all ranks. */
static void tell_anew(const EagerCall *c, const Place *p) {
  char *text = text_of(c);
  if (text) tell(p, text);
  mem_free(text);
}

static bool draws(const Op *op) {
  for (int i = 0; i < op->n_params; i++)
    if (op->params[i].kind == PARAM_GENERATOR) return true;
  return false;
}

/* -- The placement ----------------------------------------------------------------------------- */

static int refuse_local(const EagerCall *c, int k) {
  char name[64];
  return err_set(MF_EINVAL,
                 "%s: %s is local and others are global; x:to_global(placement, sbp) or "
                 "mf.distribute makes it global",
                 c->op->name, call_input_name(c, k, name, sizeof name));
}

static int refuse_places(const EagerCall *c, int a, int b) {
  char name[64], other[64];
  Str x = {0}, y = {0};
  placement_text(layout_placement(c->in[a]->layout), &x);
  placement_text(layout_placement(c->in[b]->layout), &y);
  err_set(MF_EINVAL, "%s: %s is on ranks %s, %s on %s; convert one by :to_global(placement, sbp)",
          c->op->name, call_input_name(c, a, name, sizeof name), x.text ? x.text : "?",
          call_input_name(c, b, other, sizeof other), y.text ? y.text : "?");
  str_free(&x);
  str_free(&y);
  return MF_EINVAL;
}

static bool is_written(const EagerCall *c, int k) {
  if (!c->op->n_mutated) return false;
  int position = op_param_of_input(c->op, c->args, k);
  for (int i = 0; i < c->op->n_params; i++)
    if (c->op->params[i].kind == PARAM_TENSOR && position-- == 0) return c->op->params[i].mutated;
  return false;
}

static int find_place(const EagerCall *c, const Place **out) {
  int first = -1;
  *out = c->target ? c->target->place : NULL;
  for (int k = 0; k < c->n_in; k++) {
    const Tensor *t = c->in[k];
    if (!t || t->m.number) continue;
    if (!t->layout && (!t->E->local_is_whole || is_written(c, k) || t == c->into))
      return refuse_local(c, k);
    if (!t->layout) continue;
    if (*out && t->layout->place != *out) return refuse_places(c, first, k);
    if (!*out) *out = t->layout->place, first = k;
  }
  return 0;
}

/* -- Signatures -------------------------------------------------------------------------------- */

static int set_layouts(Eager *E, const EagerCall *c, const Place *place, const SbpList *want,
                       Entry *e) {
  for (int k = 0; k < c->n_in + c->n_out; k++) {
    bool absent = k < c->n_in && (!c->in[k] || c->in[k]->m.number);
    e->all[k] = absent ? NULL : global_layout(E, place, &want[k]);
    if (!absent && !e->all[k]) return MF_ENOMEM;
  }
  return 0;
}

/* Ops that read only the form of their inputs take partial values for whole ones. */
static SbpList have_of(const EagerCall *c, int k) {
  SbpList list = {0};
  const Tensor *t = c->in[k];
  if (!t || !t->layout) return list;
  list = t->layout->sbp;
  for (int a = 0; a < MF_MAX_AXES && c->op->spec[0]->flags & OP_FORM; a++)
    if (sbp_is_partial(list.axis[a])) list.axis[a] = (Sbp){SBP_B, 0};
  return list;
}

static int choose(Eager *E, const EagerCall *c, const Place *place, Entry *e) {
  int n = c->n_in + c->n_out;
  const Meta **metas = mem_alloc(sizeof *metas * (size_t)n + 1);
  SbpList *lists = mem_zalloc(sizeof *lists * (size_t)(n + c->n_in) + 1);
  int rc = metas && lists ? 0 : err_set(MF_ENOMEM, "%s: out of memory", c->op->name);
  for (int k = 0; k < n && !rc; k++) {
    const Tensor *t = k < c->n_in ? c->in[k] : c->out[k - c->n_in];
    metas[k] = t ? &t->m : NULL;
    if (k < c->n_in) lists[n + k] = have_of(c, k);
  }
  SbpChoice choice = {.op = c->op,
                      .args = c->args,
                      .in = metas,
                      .out = metas + c->n_in,
                      .n_in = c->n_in,
                      .n_out = c->n_out,
                      .into = c->into != NULL,
                      .placement = place->placement,
                      .have = lists + n,
                      .want = lists};
  if (!rc) rc = sbp_choose(&choice);
  if (!rc) rc = set_layouts(E, c, place, lists, e);
  mem_free(metas);
  mem_free(lists);
  return rc;
}

static void entry_free(Entry *e) {
  if (e) mem_free(e->text);
  mem_free(e);
}

static void forget_all(GlobalCache *g) {
  for (int i = 0; i < SLOTS; i++)
    for (Entry *e = g->slot[i], *next; e; e = next) next = e->next, entry_free(e);
  memset(g->slot, 0, sizeof g->slot);
  g->n = 0;
}

static GlobalCache *cache_of(Eager *E) {
  if (!E->signatures) E->signatures = mem_zalloc(sizeof(GlobalCache));
  if (!E->signatures) err_set(MF_ENOMEM, "global: out of memory");
  return E->signatures;
}

static Entry *new_entry(Eager *E, GlobalCache *g, const EagerCall *c, const Place *place,
                        uint64_t hash) {
  size_t layouts = sizeof(Layout *) * (size_t)(c->n_in + c->n_out);
  Entry *e = mem_zalloc(sizeof *e + layouts + g->key.n);
  if (e) e->text = text_of(c);
  if (!e || !e->text) {
    entry_free(e);
    err_set(MF_ENOMEM, "%s: out of memory", c->op->name);
    return NULL;
  }
  e->hash = hash;
  e->n_key = g->key.n;
  e->key = (char *)e + sizeof *e + layouts;
  memcpy(e->key, g->key.at, g->key.n);
  if (choose(E, c, place, e)) {
    entry_free(e);
    return NULL;
  }
  if (g->n++ == ENTRIES_MAX) forget_all(g), g->n = 1;
  e->next = g->slot[hash % SLOTS];
  return g->slot[hash % SLOTS] = e;
}

static const Entry *find_entry(Eager *E, const EagerCall *c, const Place *place) {
  GlobalCache *g = cache_of(E);
  if (!g) return NULL;
  if (!make_key(g, c, place)) {
    err_set(MF_ENOMEM, "%s: out of memory", c->op->name);
    return NULL;
  }
  uint64_t hash = hash_of(g->key.at, g->key.n);
  for (Entry *e = g->slot[hash % SLOTS]; e; e = e->next)
    if (e->hash == hash && e->n_key == g->key.n && !memcmp(e->key, g->key.at, e->n_key)) return e;
  return new_entry(E, g, c, place, hash);
}

void global_forget(Eager *E) {
  GlobalCache *g = E->signatures;
  if (!g) return;
  forget_all(g);
  vec_free(&g->key);
  mem_free(g);
  E->signatures = NULL;
}

/* -- Parts ------------------------------------------------------------------------------------- */

/* A call on parts, in the making. */
typedef struct Parts {
  Eager *E;
  EagerCall *c; /* the call on wholes */
  const Entry *e;
  Tensor *small[PARTS_SMALL], **in; /* counted */
  EagerCall call;
  CallPlace *places;
  union {
    char bytes[OP_MAX_ARGS];
    double align;
  } args;
} Parts;

/* A local tensor that all ranks have. */
static Tensor *part_of_whole(Eager *E, Tensor *t, const Layout *want) {
  const Layout *all = global_broadcast(E, want);
  if (!all || want->place->index < 0) return all ? tensor_retain(t) : NULL;
  return global_box_part(E, t, &t->m, all, want, false);
}

static Tensor *part_for(const Parts *p, int k) {
  Tensor *t = p->c->in[k];
  const Layout *want = p->e->all[k];
  if (want && t->layout && !t->part) {
    err_set(MF_EINVAL, "%s: an input belongs to a step that was compiled", p->c->op->name);
    return NULL;
  }
  if (!want || t->layout == want) return tensor_retain(want ? t->part : t);
  if (!t->layout) return part_of_whole(p->E, t, want);
  if (p->c->op->spec[0]->flags & OP_FORM && sbp_list_is_partial(&t->layout->sbp, MF_MAX_AXES)) {
    const Layout *taken = global_of_gradient(p->E, t->layout);
    return taken ? global_box_part(p->E, t->part, &t->m, taken, want, false) : NULL;
  }
  return global_box(p->E, t, want, is_written(p->c, k));
}

static int take_parts(Parts *p) {
  EagerCall *c = p->c;
  p->in = p->small;
  if (c->n_in > PARTS_SMALL && !(p->in = mem_alloc(sizeof *p->in * (size_t)c->n_in)))
    return err_set(MF_ENOMEM, "%s: out of memory", c->op->name);
  for (int k = 0; k < c->n_in; k++) p->in[k] = NULL;
  for (int k = 0; k < c->n_in; k++)
    if (c->in[k] && !(p->in[k] = part_for(p, k))) return MF_EINVAL;
  return 0;
}

static void give_back(Parts *p) {
  for (int k = 0; p->in && k < p->c->n_in; k++) tensor_release(p->in[k]);
  if (p->in != p->small) mem_free(p->in);
  mem_free(p->places);
}

static void place_of(CallPlace *to, const Layout *l, const Meta *m) {
  int64_t length[MF_MAX_DIMS];
  memcpy(to->whole, m->shape, sizeof(int64_t) * (size_t)m->ndim);
  if (l) global_part_shape(l, m->ndim, m->shape, to->start, length);
  else memset(to->start, 0, sizeof to->start);
}

static int find_places(Parts *p) {
  const EagerCall *c = p->c;
  int n = c->n_in + c->n_out;
  if (!(c->op->spec[0]->flags & OP_INDEXED)) return 0;
  p->places = mem_alloc(sizeof *p->places * (size_t)(n + 1));
  if (!p->places) return err_set(MF_ENOMEM, "%s: out of memory", c->op->name);
  for (int k = 0; k < n; k++) {
    const Tensor *t = k < c->n_in ? c->in[k] : c->out[k - c->n_in];
    if (t) place_of(&p->places[k], p->e->all[k], &t->m);
  }
  return 0;
}

/* The arguments as a part's call has them. */
static void localize(Parts *p) {
  const EagerCall *c = p->c;
  Meta m;
  memcpy(p->args.bytes, c->args, c->op->args_size);
  if (!c->n_out) return;
  int64_t start[MF_MAX_DIMS];
  m.ndim = c->out[0]->m.ndim;
  global_part_shape(p->e->all[c->n_in], m.ndim, c->out[0]->m.shape, start, m.shape);
  sbp_localize(c->op, p->args.bytes, &m);
}

/* Whether the op may write into the part of c->into itself. */
static bool writes_directly(const Parts *p) {
  const EagerCall *c = p->c;
  return c->into && p->e->all[0] == c->into->layout && p->e->all[c->n_in] == c->into->layout;
}

static int run_parts(Parts *p) {
  Eager *E = p->E;
  EagerCall *c = p->c;
  localize(p);
  p->call = (EagerCall){.op = c->op, .in = p->in, .n_in = c->n_in, .args = p->args.bytes};
  p->call.into = writes_directly(p) ? p->in[0] : NULL;
  int rc = find_places(p);
  if (rc) return rc;
  bool enabled = E->grad_enabled;
  E->grad_enabled = false;
  rc = eager_call_as(E, &p->call, NULL, p->places);
  E->grad_enabled = enabled;
  return rc;
}

/* -- Results ----------------------------------------------------------------------------------- */

static int wrong_part(const EagerCall *c, const Layout *l, const Tensor *part,
                      const int64_t *length) {
  char a[SHAPE_TEXT_MAX], b[SHAPE_TEXT_MAX];
  return err_set(MF_EINVAL, "%s: the part of an output under %s has shape %s in place of %s",
                 c->op->name, l->text, shape_text(part->m.ndim, part->m.shape, a),
                 shape_text(c->out[0]->m.ndim, length, b));
}

/* `part` (taken) becomes what this rank has of output k. */
static int set_part(Parts *p, int k, Tensor *part, const Layout *l) {
  EagerCall *c = p->c;
  Tensor *y = c->out[k];
  bool view = c->op->spec[0]->flags & OP_VIEW;
  if (!part) return MF_ENOMEM;
  part->uncounted = true;
  if (view && part->storage == c->in[0]->storage) {
    tape_view_of(p->E, y, c->in[0]);
  } else {
    y->storage = part->storage;
    storage_retain(y->storage);
    y->severed = view;
  }
  y->part = part;
  y->layout = l;
  y->m.number = false;
  return 0;
}

static int take_outputs(Parts *p) {
  EagerCall *c = p->c;
  int rc = 0;
  for (int k = 0; k < c->n_out && !rc; k++) {
    const Layout *l = p->e->all[c->n_in + k];
    Tensor *part = p->call.out[k];
    int64_t start[MF_MAX_DIMS], length[MF_MAX_DIMS];
    global_part_shape(l, c->out[k]->m.ndim, c->out[k]->m.shape, start, length);
    if (!shape_equal(part->m.ndim, part->m.shape, c->out[k]->m.ndim, length))
      rc = wrong_part(c, l, part, length);
    else if (c->out[k] != c->into) rc = set_part(p, k, tensor_retain(part), l);
    else if (part != p->in[0]) rc = global_put_back(p->E, c->into, part, l);
  }
  return rc;
}

/* What was written under another layout than its own. */
static int put_back(Parts *p) {
  int rc = 0;
  for (int k = 0; k < p->c->n_in && p->c->op->n_mutated && !rc; k++)
    if (p->c->in[k] && is_written(p->c, k) && p->e->all[k] != p->c->in[k]->layout)
      rc = global_put_back(p->E, p->c->in[k], p->in[k], p->e->all[k]);
  return rc;
}

static Tensor *no_part(Eager *E, const Meta *m) {
  return tensor_create(E, (DType)m->dtype, 1, (const int64_t[]){0}, DEVICE_CPU);
}

/* Of a rank outside of the placement. */
static int run_outside(Parts *p) {
  EagerCall *c = p->c;
  int rc = 0;
  for (int k = 0; k < c->n_out && !rc; k++)
    if (c->out[k] != c->into)
      rc = set_part(p, k, no_part(p->E, &c->out[k]->m), p->e->all[c->n_in + k]);
  return rc;
}

/* -- Factories --------------------------------------------------------------------------------- */

/* The op makes only this rank's part of c->target: its kernel knows where it begins. */
static int make_part(Parts *p) {
  EagerCall *c = p->c;
  Eager *E = p->E;
  int64_t start[MF_MAX_DIMS], length[MF_MAX_DIMS];
  const Meta *m = &c->out[0]->m;
  const OpSpec *spec = c->op->spec[E->isa];
  global_part_shape(c->target, m->ndim, m->shape, start, length);
  Tensor *part = tensor_create(E, (DType)m->dtype, m->ndim, length, DEVICE_CPU);
  if (!part) return MF_ENOMEM;
  View y = tensor_view(part);
  y.whole = m->shape;
  y.start = start;
  OpCall call = {
      .op = c->op, .args = c->args, .out = &y, .n_out = 1, .stream = E->streams[DEVICE_CPU]};
  int rc = spec->cpu(&call);
  if (!rc) return set_part(p, 0, part, c->target);
  tensor_release(part);
  return rc;
}

/* Without a kernel that makes parts: the whole, of which each rank keeps its own. */
static int make_whole(Parts *p) {
  EagerCall *c = p->c;
  EagerCall call = {.op = c->op, .in = c->in, .n_in = c->n_in, .args = c->args};
  bool enabled = p->E->grad_enabled;
  p->E->grad_enabled = false;
  int rc = eager_call_as(p->E, &call, NULL, NULL);
  p->E->grad_enabled = enabled;
  if (rc) return rc;
  Tensor *made = call.out[0]->layout ? global_convert(p->E, call.out[0], c->target, NULL)
                                     : global_distribute(p->E, call.out[0], c->target);
  eager_call_clear(&call);
  if (!made) return MF_EINVAL;
  Tensor *part = tensor_retain(made->part);
  tensor_release(made);
  return set_part(p, 0, part, c->target);
}

/* Whether the op's arguments can ask for a part: others are made whole, and cut. */
static bool has_size(const Op *op) {
  for (int i = 0; i < op->n_params; i++)
    if (!strcmp(op->params[i].name, "size")) return true;
  return false;
}

/* The same while a step is traced. */
static int trace_factory(Eager *E, EagerCall *c, bool parts) {
  Tensor *y = c->out[0];
  y->layout = c->target;
  y->m.number = false;
  tensor_open_traced(y);
  if (parts) return E->tracer->record(E->tracer, c);
  EagerCall call = {.op = c->op, .in = c->in, .n_in = c->n_in, .args = c->args};
  bool enabled = E->grad_enabled;
  E->grad_enabled = false;
  int rc = eager_call_as(E, &call, NULL, NULL);
  E->grad_enabled = enabled;
  if (rc) return rc;
  Tensor *made = global_trace_box(E, OP_box, call.out[0], NULL, tensor_retain(y));
  eager_call_clear(&call);
  tensor_release(made);
  return made ? 0 : MF_EINVAL;
}

static int run_factory(Eager *E, EagerCall *c) {
  Parts p = {.E = E, .c = c};
  const Layout *l = c->target;
  int rc = sbp_list_check(c->op->name, &l->sbp, MF_MAX_AXES, c->out[0]->m.ndim);
  if (rc) return rc;
  bool parts = c->op->spec[0]->flags & OP_INDEXED && !c->op->spec[0]->scratch &&
               !sbp_list_is_partial(&l->sbp, MF_MAX_AXES) && !c->n_in;
  if (E->tracer) return trace_factory(E, c, parts && has_size(c->op));
  tell_anew(c, l->place);
  if (l->place->index < 0 && !c->n_in) return set_part(&p, 0, no_part(E, &c->out[0]->m), l);
  return parts ? make_part(&p) : make_whole(&p);
}

/* -- The call ---------------------------------------------------------------------------------- */

/* While a step is traced: outputs lie as they would if it ran, and have no parts. */
static int trace_call(Eager *E, EagerCall *c, const Entry *e) {
  for (int k = 0; k < c->n_out; k++) {
    Tensor *y = c->out[k];
    if (y == c->into) continue;
    if (c->op->spec[0]->flags & OP_VIEW) tape_view_of(E, y, c->in[0]);
    else tensor_open_traced(y);
    y->layout = e->all[c->n_in + k];
    y->m.number = false;
  }
  return E->tracer->record(E->tracer, c);
}

int global_run(Eager *E, EagerCall *c) {
  Parts p;
  const Place *place;
  if (c->target) return run_factory(E, c);
  int rc = find_place(c, &place);
  if (rc) return rc;
  p.E = E, p.c = c, p.places = NULL, p.in = NULL;
  if (!(p.e = find_entry(E, c, place))) return MF_EINVAL;
  if (E->tracer) return trace_call(E, c, p.e);
  if (draws(c->op)) tell_anew(c, place);
  else tell(place, p.e->text);
  rc = take_parts(&p);
  if (!rc && place->index < 0) {
    rc = run_outside(&p);
  } else if (!rc && !(rc = run_parts(&p))) {
    rc = take_outputs(&p);
    eager_call_clear(&p.call);
  }
  if (!rc) rc = put_back(&p);
  give_back(&p);
  return rc;
}

int global_run_data(Eager *E, EagerCall *c) {
  const Place *place;
  int rc = find_place(c, &place);
  if (rc) return rc;
  if (E->tracer)
    return err_set(MF_EUNSUPPORTED,
                   "%s: the result's shape depends on data, which is known only when a compiled "
                   "step runs; masked_fill, where or topk keep shapes",
                   c->op->name);
  const Layout *all = global_layout(E, place, &(SbpList){0});
  tell_anew(c, place);
  if (!all || place->index < 0)
    return all ? err_set(MF_EUNSUPPORTED,
                         "%s: the result's shape depends on data, which this rank, outside of the "
                         "placement, has not",
                         c->op->name)
               : MF_ENOMEM;
  Tensor *in[CALL_SMALL] = {0};
  for (int k = 0; k < c->n_in && !rc; k++) {
    if (!c->in[k]) continue;
    in[k] = c->in[k]->layout ? global_box(E, c->in[k], all, false) : tensor_retain(c->in[k]);
    if (!in[k]) rc = MF_EINVAL;
  }
  EagerCall call = {.op = c->op, .in = in, .n_in = c->n_in, .args = c->args};
  bool enabled = E->grad_enabled;
  E->grad_enabled = false;
  if (!rc) rc = eager_call_as(E, &call, NULL, NULL);
  E->grad_enabled = enabled;
  for (int k = 0; k < call.n_out && !rc; k++) {
    c->out[k] = global_wrap(E, &call.out[k]->m, tensor_retain(call.out[k]), all);
    if (c->out[k]) c->n_out++;
    else rc = MF_ENOMEM;
  }
  eager_call_clear(&call);
  for (int k = 0; k < c->n_in; k++) tensor_release(in[k]);
  return rc;
}
