/* The loops of pooling for one element type T; included by pool.c once a type, with NAME to tell
 * them apart.
 *
 * Two ways through memory. Where channels lie side by side, a job is a block of up to LANES
 * channels of one image, and every step is a vector over them. Otherwise a job is one plane, and
 * steps are single elements. Both visit a window's elements in row-major order, and a maximum is
 * the first of equals; NaN counts as larger than all, the last one as largest, as in PyTorch. */

/* -- Channels side by side ---------- */

/* The maximum over a window and the position of it, counted in the order of the visit. */
static void NAME(lanes_max)(const Pool *p, const Span *s, const T *x, int64_t lanes, T *best,
                            int32_t *where) {
  int32_t k = 0;
  for (int64_t h = s->h0; h < s->h1; h += p->h.dilation) {
    for (int64_t w = s->w0; w < s->w1; w += p->w.dilation, k++) {
      const T *at = x + h * p->xs[2] + w * p->xs[3];
      if (k == 0) {
        for (int64_t i = 0; i < lanes; i++) best[i] = at[i], where[i] = 0;
      } else {
        for (int64_t i = 0; i < lanes; i++) {
          T v = at[i];
          bool more = (v > best[i]) | (v != v);
          best[i] = more ? v : best[i];
          where[i] = more ? k : where[i];
        }
      }
    }
  }
}

/* Moves between a window's elements and the pooled element: y = picked v, or v += g where picked.
 */
static void NAME(lanes_picked)(const Pool *p, const Span *s, T *v, int64_t lanes,
                               const int32_t *where, T *y, bool back) {
  int32_t k = 0;
  for (int64_t h = s->h0; h < s->h1; h += p->h.dilation) {
    for (int64_t w = s->w0; w < s->w1; w += p->w.dilation, k++) {
      T *at = v + h * p->vs[2] + w * p->vs[3];
      if (back)
        for (int64_t i = 0; i < lanes; i++) at[i] += where[i] == k ? y[i] : 0;
      else
        for (int64_t i = 0; i < lanes; i++) y[i] = where[i] == k ? at[i] : y[i];
    }
  }
}

static void NAME(lanes_mean)(const Pool *p, const Span *s, T *v, int64_t lanes, T *y, bool back) {
  T scale = (T)(1 / s->divisor), part[LANES];
  for (int64_t i = 0; i < lanes; i++) part[i] = back ? y[i] * scale : 0;
  for (int64_t h = s->h0; h < s->h1; h++) {
    for (int64_t w = s->w0; w < s->w1; w++) {
      T *at = v + h * p->vs[2] + w * p->vs[3];
      if (back)
        for (int64_t i = 0; i < lanes; i++) at[i] += part[i];
      else
        for (int64_t i = 0; i < lanes; i++) part[i] += at[i];
    }
  }
  for (int64_t i = 0; i < lanes && !back; i++) y[i] = part[i] * scale;
}

/* Zeroes rows [from, to) of the lanes of v. */
static void NAME(lanes_clear)(const Pool *p, T *v, int64_t lanes, int64_t from, int64_t to) {
  for (int64_t h = from; h < to; h++)
    for (int64_t w = 0; w < p->w.in; w++)
      memset(v + h * p->vs[2] + w * p->vs[3], 0, sizeof(T) * (size_t)lanes);
}

static void NAME(lanes_job)(const Pool *p, const T *x, T *v, T *y, int64_t lanes) {
  T best[LANES];
  int32_t where[LANES];
  int64_t clear = 0;
  for (int64_t oh = 0; oh < p->h.out; oh++) {
    Span s;
    span_rows(p, oh, &s);
    if (p->back && s.h1 > clear) {
      NAME(lanes_clear)(p, v, lanes, clear, s.h1);
      clear = s.h1;
    }
    for (int64_t ow = 0; ow < p->w.out; ow++) {
      T *to = y + oh * p->ys[2] + ow * p->ys[3];
      span_cols(p, ow, &s);
      if (p->mode == POOL_MEAN) {
        NAME(lanes_mean)(p, &s, v, lanes, to, p->back);
      } else if (!v) {
        NAME(lanes_max)(p, &s, x, lanes, to, where);
      } else {
        NAME(lanes_max)(p, &s, x, lanes, best, where);
        NAME(lanes_picked)(p, &s, v, lanes, where, to, p->back);
      }
    }
  }
  if (p->back) NAME(lanes_clear)(p, v, lanes, clear, p->h.in);
}

/* -- Planes ---------- */

/* Where in x the maximum of a window is. */
static int64_t NAME(plane_max)(const Pool *p, const Span *s, const T *x, int64_t *h_best,
                               int64_t *w_best) {
  int64_t h_at = s->h0, w_at = s->w0;
  T best = x[h_at * p->xs[2] + w_at * p->xs[3]];
  for (int64_t h = s->h0; h < s->h1; h += p->h.dilation) {
    const T *row = x + h * p->xs[2];
    for (int64_t w = s->w0; w < s->w1; w += p->w.dilation) {
      T value = row[w * p->xs[3]];
      if (value > best || value != value) best = value, h_at = h, w_at = w;
    }
  }
  *h_best = h_at, *w_best = w_at;
  return h_at * p->xs[2] + w_at * p->xs[3];
}

static void NAME(plane_mean)(const Pool *p, const Span *s, T *v, T *y) {
  T scale = (T)(1 / s->divisor), part = p->back ? *y * scale : 0;
  for (int64_t h = s->h0; h < s->h1; h++) {
    for (int64_t w = s->w0; w < s->w1; w++) {
      T *at = v + h * p->vs[2] + w * p->vs[3];
      if (p->back)
        *at += part;
      else
        part += *at;
    }
  }
  if (!p->back) *y = part * scale;
}

static void NAME(plane_job)(const Pool *p, const T *x, T *v, T *y) {
  if (p->back)
    for (int64_t h = 0; h < p->h.in; h++)
      for (int64_t w = 0; w < p->w.in; w++) v[h * p->vs[2] + w * p->vs[3]] = 0;
  for (int64_t oh = 0; oh < p->h.out; oh++) {
    Span s;
    span_rows(p, oh, &s);
    for (int64_t ow = 0; ow < p->w.out; ow++) {
      T *to = y + oh * p->ys[2] + ow * p->ys[3];
      int64_t h, w;
      span_cols(p, ow, &s);
      if (p->mode == POOL_MEAN) {
        NAME(plane_mean)(p, &s, v, to);
        continue;
      }
      int64_t at = NAME(plane_max)(p, &s, x, &h, &w);
      if (!v)
        *to = x[at];
      else if (p->back)
        v[h * p->vs[2] + w * p->vs[3]] += *to;
      else
        *to = v[h * p->vs[2] + w * p->vs[3]];
    }
  }
}

/* Jobs [begin, end): images by blocks of channels, or planes. */
static void NAME(pool_range)(int64_t begin, int64_t end, void *arg) {
  const Pool *p = arg;
  int64_t width = p->lanes ? LANES : 1, blocks = (p->c + width - 1) / width;
  for (int64_t k = begin; k < end; k++) {
    int64_t n = k / blocks, c = k % blocks * width;
    const T *x = p->x ? (const T *)p->x + n * p->xs[0] + c * p->xs[1] : NULL;
    T *v = p->v ? (T *)p->v + n * p->vs[0] + c * p->vs[1] : NULL,
      *y = (T *)p->y + n * p->ys[0] + c * p->ys[1];
    if (p->lanes)
      NAME(lanes_job)(p, x, v, y, p->c - c < LANES ? p->c - c : LANES);
    else
      NAME(plane_job)(p, x, v, y);
  }
}
