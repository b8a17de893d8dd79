/* The loops of pooling for one element type T; included by pool.c once a type, with NAME to tell
 * them apart.
 *
 * The same window of many outputs is walked at once, its lanes being channels that lie side by
 * side, or, in planes, the columns of a row whose windows lie inside the image. What is left in
 * planes goes element by element. A window's elements are visited in row-major order, and a maximum
 * is the first of equals; NaN counts as larger than all, the last one as largest, as in PyTorch.
 * Loops over lanes run to the next multiple of GROUP, so that they vectorise without a rest. */

/* One element of each lane: where it lies, or gathered in `buffer`. */
static inline const T *NAME(lanes_load)(int64_t n, int64_t step, const T *at, T *buffer) {
  if (step == 1 && n % GROUP == 0) return at;
  if (step == 1) memcpy(buffer, at, sizeof(T) * (size_t)n);
  else if (step == 2)
    for (int64_t i = 0; i < n; i++) buffer[i] = at[2 * i];
  else
    for (int64_t i = 0; i < n; i++) buffer[i] = at[i * step];
  return buffer;
}

static inline void NAME(lanes_store)(int64_t n, int64_t step, T *at, const T *v) {
  for (int64_t i = 0; i < n; i++) at[i * step] = v[i];
}

static inline void NAME(lanes_add)(int64_t n, int64_t step, T *at, const T *restrict v) {
  if (step == 1)
    for (int64_t i = 0; i < n; i++) at[i] += v[i];
  else if (step == 2)
    for (int64_t i = 0; i < n; i++) at[2 * i] += v[i];
  else
    for (int64_t i = 0; i < n; i++) at[i * step] += v[i];
}

/* The maximum over a window. */
static void NAME(lanes_max)(const Pool *p, const Span *s, const Lanes *l, const T *x,
                            T *restrict best) {
  T buffer[LANES] = {0};
  bool first = true;
  for (int64_t h = s->h0; h < s->h1; h += p->h.dilation) {
    for (int64_t w = s->w0; w < s->w1; w += p->w.dilation) {
      const T *v = NAME(lanes_load)(l->n, l->x, x + h * p->xs[2] + w * p->xs[3], buffer);
      if (first) memcpy(best, v, sizeof(T) * (size_t)l->wide);
      else
        for (int64_t i = 0; i < (l->wide & -GROUP); i++)
          best[i] = ((v[i] > best[i]) | (v[i] != v[i])) ? v[i] : best[i];
      first = false;
    }
  }
}

/* The place of the maximum, counted in the order of the visit. */
static void NAME(lanes_where)(const Pool *p, const Span *s, const Lanes *l, const T *x,
                              int32_t *where) {
  T buffer[LANES] = {0}, best[LANES];
  int32_t k = 0;
  for (int64_t h = s->h0; h < s->h1; h += p->h.dilation) {
    for (int64_t w = s->w0; w < s->w1; w += p->w.dilation, k++) {
      const T *v = NAME(lanes_load)(l->n, l->x, x + h * p->xs[2] + w * p->xs[3], buffer);
      for (int64_t i = 0; i < l->n; i++) {
        if (k && !(v[i] > best[i]) && v[i] == v[i]) continue;
        best[i] = v[i];
        where[i] = k;
      }
    }
  }
}

/* y = v where x has its maximum. */
static void NAME(lanes_pick)(const Pool *p, const Span *s, const Lanes *l, const T *x, const T *v,
                             T *y) {
  int32_t where[LANES], k = 0;
  NAME(lanes_where)(p, s, l, x, where);
  for (int64_t h = s->h0; h < s->h1; h += p->h.dilation) {
    for (int64_t w = s->w0; w < s->w1; w += p->w.dilation, k++) {
      const T *at = v + h * p->vs[2] + w * p->vs[3];
      for (int64_t i = 0; i < l->n; i++) y[i] = where[i] == k ? at[i * l->v] : y[i];
    }
  }
}

/* v += y where x has its maximum: the first element that equals it. With a NaN among them, which
 * equals nothing, false, and nothing is done. */
static bool NAME(lanes_deal)(const Pool *p, const Span *s, const Lanes *l, const T *x, T *v,
                             const T *y) {
  T buffer[LANES] = {0}, best[LANES], left[LANES] = {0}, part[LANES];
  int nan = 0;
  NAME(lanes_max)(p, s, l, x, best);
  for (int64_t i = 0; i < l->n; i++) nan |= best[i] != best[i];
  if (nan) return false;
  memcpy(left, y, sizeof(T) * (size_t)l->n);
  for (int64_t h = s->h0; h < s->h1; h += p->h.dilation) {
    for (int64_t w = s->w0; w < s->w1; w += p->w.dilation) {
      const T *from = NAME(lanes_load)(l->n, l->x, x + h * p->xs[2] + w * p->xs[3], buffer);
      for (int64_t i = 0; i < (l->wide & -GROUP); i++) {
        bool hit = from[i] == best[i];
        part[i] = hit ? left[i] : 0;
        left[i] = hit ? 0 : left[i];
      }
      NAME(lanes_add)(l->n, l->v, v + h * p->vs[2] + w * p->vs[3], part);
    }
  }
  return true;
}

/* The same by counting. */
static void NAME(lanes_deal_where)(const Pool *p, const Span *s, const Lanes *l, const T *x, T *v,
                                   const T *y) {
  int32_t where[LANES], k = 0;
  NAME(lanes_where)(p, s, l, x, where);
  for (int64_t h = s->h0; h < s->h1; h += p->h.dilation) {
    for (int64_t w = s->w0; w < s->w1; w += p->w.dilation, k++) {
      T *at = v + h * p->vs[2] + w * p->vs[3];
      for (int64_t i = 0; i < l->n; i++) at[i * l->v] += where[i] == k ? y[i] : 0;
    }
  }
}

static void NAME(lanes_mean)(const Pool *p, const Span *s, const Lanes *l, T *v, T *y) {
  T scale = (T)(1 / s->divisor), part[LANES] = {0}, buffer[LANES] = {0};
  for (int64_t i = 0; i < l->n && p->back; i++) part[i] = y[i] * scale;
  for (int64_t h = s->h0; h < s->h1; h++) {
    for (int64_t w = s->w0; w < s->w1; w++) {
      T *at = v + h * p->vs[2] + w * p->vs[3];
      if (p->back) {
        NAME(lanes_add)(l->n, l->v, at, part);
      } else {
        const T *from = NAME(lanes_load)(l->n, l->v, at, buffer);
        for (int64_t i = 0; i < (l->wide & -GROUP); i++) part[i] += from[i];
      }
    }
  }
  for (int64_t i = 0; i < l->n && !p->back; i++) y[i] = part[i] * scale;
}

/* A window that lies in the padding, between whose elements the image is: nothing is picked. */
static bool NAME(empty_window)(const Pool *p, const Span *s, const Lanes *l, bool pick, T *y) {
  if (s->h0 < s->h1 && s->w0 < s->w1) return false;
  for (int64_t i = 0; i < l->n && !p->back; i++) y[i * l->y] = pick ? 0 : -INFINITY;
  return true;
}

/* One window in every lane. The pooled elements lie where whole blocks can be written, or go
 * through a buffer. */
static void NAME(lanes_window)(const Pool *p, const Span *s, const Lanes *l, const T *x, T *v,
                               T *y) {
  T pooled[LANES], *to = l->y == 1 && l->n == l->wide ? y : pooled;
  if (p->mode == POOL_MAX && NAME(empty_window)(p, s, l, v != NULL, y)) return;
  if (to != y && p->back)
    for (int64_t i = 0; i < l->n; i++) to[i] = y[i * l->y];
  if (p->mode == POOL_MEAN) NAME(lanes_mean)(p, s, l, v, to);
  else if (!v) NAME(lanes_max)(p, s, l, x, to);
  else if (!p->back) NAME(lanes_pick)(p, s, l, x, v, to);
  else if (!NAME(lanes_deal)(p, s, l, x, v, to)) NAME(lanes_deal_where)(p, s, l, x, v, to);
  if (to != y && !p->back) NAME(lanes_store)(l->n, l->y, y, to);
}

/* -- Channels side by side --------------------------------------------------------------------- */

/* Zeroes rows [from, to) of a block of channels. */
static void NAME(channels_clear)(const Pool *p, T *v, int64_t channels, int64_t from, int64_t to) {
  for (int64_t h = from; h < to; h++)
    for (int64_t w = 0; w < p->w.in; w++)
      memset(v + h * p->vs[2] + w * p->vs[3], 0, sizeof(T) * (size_t)channels);
}

static void NAME(channels_job)(const Pool *p, int64_t channels, const T *x, T *v, T *y) {
  Lanes lanes = {channels, WIDE(channels), .x = 1, .v = 1, .y = 1};
  int64_t clear = 0; /* rows before it are */
  for (int64_t oh = 0; oh < p->h.out; oh++) {
    Span s;
    span_rows(p, oh, &s);
    if (p->back && s.h1 > clear) {
      NAME(channels_clear)(p, v, channels, clear, s.h1);
      clear = s.h1;
    }
    for (int64_t ow = 0; ow < p->w.out; ow++) {
      span_cols(p, ow, &s);
      NAME(lanes_window)(p, &s, &lanes, x, v, y + oh * p->ys[2] + ow * p->ys[3]);
    }
  }
  if (p->back) NAME(channels_clear)(p, v, channels, clear, p->h.in);
}

/* -- Planes ------------------------------------------------------------------------------------ */

static void NAME(single_max)(const Pool *p, const Span *s, const T *x, T *v, T *y) {
  int64_t h_best = s->h0, w_best = s->w0;
  if (NAME(empty_window)(p, s, &(Lanes){.n = 1}, v != NULL, y)) return;
  T best = x[h_best * p->xs[2] + w_best * p->xs[3]];
  for (int64_t h = s->h0; h < s->h1; h += p->h.dilation) {
    for (int64_t w = s->w0; w < s->w1; w += p->w.dilation) {
      T value = x[h * p->xs[2] + w * p->xs[3]];
      if (value > best || value != value) best = value, h_best = h, w_best = w;
    }
  }
  T *at = v ? v + h_best * p->vs[2] + w_best * p->vs[3] : &best;
  if (p->back) *at += *y;
  else *y = *at;
}

static void NAME(single_mean)(const Pool *p, const Span *s, T *v, T *y) {
  T scale = (T)(1 / s->divisor), part = p->back ? *y * scale : 0;
  for (int64_t h = s->h0; h < s->h1; h++) {
    for (int64_t w = s->w0; w < s->w1; w++) {
      T *at = v + h * p->vs[2] + w * p->vs[3];
      if (p->back) *at += part;
      else part += *at;
    }
  }
  if (!p->back) *y = part * scale;
}

static void NAME(plane_clear)(const Pool *p, T *v) {
  for (int64_t h = 0; h < p->h.in; h++)
    for (int64_t w = 0; w < p->w.in; w++) v[h * p->vs[2] + w * p->vs[3]] = 0;
}

static void NAME(plane_job)(const Pool *p, const T *x, T *v, T *y) {
  int64_t step = p->w.stride, from, to;
  axis_inside(&p->w, &from, &to);
  if (p->back) NAME(plane_clear)(p, v);
  for (int64_t oh = 0; oh < p->h.out; oh++) {
    Span s;
    span_rows(p, oh, &s);
    for (int64_t ow = 0, n; ow < p->w.out; ow += n) {
      bool inside = ow >= from && ow < to;
      n = !inside ? 1 : to - ow < LANES ? to - ow : LANES;
      span_cols(p, ow, &s);
      T *at = y + oh * p->ys[2] + ow * p->ys[3];
      Lanes lanes = {n, WIDE(n), .x = step * p->xs[3], .v = step * p->vs[3], .y = p->ys[3]};
      if (inside) NAME(lanes_window)(p, &s, &lanes, x, v, at);
      else if (p->mode == POOL_MEAN) NAME(single_mean)(p, &s, v, at);
      else NAME(single_max)(p, &s, x, v, at);
    }
  }
}

/* Jobs [begin, end): images by blocks of channels, or planes. */
static void NAME(pool_range)(int64_t begin, int64_t end, void *arg) {
  const Pool *p = arg;
  int64_t width = p->channels ? LANES : 1, blocks = (p->c + width - 1) / width;
  for (int64_t k = begin; k < end; k++) {
    int64_t n = k / blocks, c = k % blocks * width;
    const T *x = p->x ? (const T *)p->x + n * p->xs[0] + c * p->xs[1] : NULL;
    T *v = p->v ? (T *)p->v + n * p->vs[0] + c * p->vs[1] : NULL,
      *y = (T *)p->y + n * p->ys[0] + c * p->ys[1];
    if (p->channels) NAME(channels_job)(p, p->c - c < LANES ? p->c - c : LANES, x, v, y);
    else NAME(plane_job)(p, x, v, y);
  }
}
