/* The loops of attention for one element type T; included by attention.c once a type. NAME tells
 * the functions apart; PRODUCT(ta, tb, m, n, k, a, lda, b, ldb, add, c, ldc) is c (+)= op(a) op(b)
 * on the calling thread; LINE names the helpers of line_math.h. */

/* s = scale * s + mask, and -inf, or what is filled in, where a key must not be seen: rows [row,
 * row + rows), keys [key, key + keys). */
static void NAME(score)(const Attention *t, const Head *h, int64_t row, int64_t rows, int64_t key,
                        int64_t keys, T *s) {
  T scale = (T)t->how.scale, hidden = (T)(t->how.plain ? t->how.fill : -INFINITY);
  for (int64_t i = 0; i < rows; i++) {
    T *line = s + i * KEYS;
    for (int64_t j = 0; j < keys; j++) line[j] *= scale;
    if (h->mask) {
      const char *m =
          h->mask + ((row + i) * t->mask_step[0] + key * t->mask_step[1]) * (int64_t)t->mask_size;
      int64_t step = t->mask_step[1];
      if (t->mask_bool)
        for (int64_t j = 0; j < keys; j++) line[j] = m[j * step] ? line[j] : hidden;
      else
        for (int64_t j = 0; j < keys; j++) line[j] += ((const T *)(const void *)m)[j * step];
    }
    int64_t seen = t->how.causal ? row + i + 1 - key : keys;
    for (int64_t j = seen < 0 ? 0 : seen; j < keys; j++) line[j] = -INFINITY;
  }
}

/* Weights of row `row` after dropout, keys [key, key + keys). */
static void NAME(drop)(const Attention *t, const Head *h, int64_t row, int64_t key, int64_t keys,
                       T *line) {
  uint32_t words[KEYS];
  T keep = (T)t->how.keep;
  draw_words(t, h->draw + row * t->m + key, keys, words);
  for (int64_t j = 0; j < keys; j++) line[j] = words[j] >= t->how.threshold ? line[j] * keep : 0;
}

/* How many keys a block of rows sees at most. */
static int64_t NAME(visible)(const Attention *t, int64_t row, int64_t rows) {
  return t->how.causal && row + rows < t->m ? row + rows : t->m;
}

/* One block of rows: y and the logarithms of the sums. Key blocks are joined by rescaling what is
 * there. */
static void NAME(forward_block)(const Attention *t, const Head *h, int64_t row, int64_t rows) {
  T s[ROWS * KEYS], most[ROWS], sum[ROWS];
  const T *q = (const T *)h->q + row * t->q_step, *k = h->k, *v = h->v;
  T *y = (T *)h->y + row * t->y_step, *lse = (T *)h->lse + row * t->lse_step;
  int64_t all = NAME(visible)(t, row, rows);
  for (int64_t i = 0; i < rows; i++) most[i] = -INFINITY, sum[i] = 0;
  for (int64_t key = 0; key < all; key += KEYS) {
    int64_t keys = all - key < KEYS ? all - key : KEYS;
    PRODUCT(false, true, rows, keys, t->d, q, t->q_step, k + key * t->k_step, t->k_step, false, s,
            KEYS);
    NAME(score)(t, h, row, rows, key, keys, s);
    for (int64_t i = 0; i < rows; i++) {
      T *line = s + i * KEYS, top = LINE(line_max)(keys, line), before = most[i];
      if (top > before || top != top) most[i] = top;
      T base = most[i] == -INFINITY ? 0 : most[i];
      PW_IVDEP for (int64_t j = 0; j < keys; j++) line[j] = exp(line[j] - base);
      T shrink = key ? exp(before - base) : 0;
      sum[i] = sum[i] * shrink + (T)LINE(line_sum)(keys, line);
      for (int64_t c = 0; c < t->dv && key; c++) y[i * t->y_step + c] *= shrink;
      if (t->how.drops) NAME(drop)(t, h, row + i, key, keys, line);
    }
    PRODUCT(false, false, rows, t->dv, keys, s, KEYS, v + key * t->v_step, t->v_step, key > 0, y,
            t->y_step);
  }
  for (int64_t i = 0; i < rows; i++) {
    /* No key to be seen: zeros, and +inf makes the backward weights zero. */
    bool none = !all || (most[i] == -INFINITY && !t->how.plain);
    T scale = none ? 0 : 1 / sum[i];
    if (t->how.plain) lse[2 * i] = most[i], lse[2 * i + 1] = log(sum[i]);
    else lse[i] = none ? INFINITY : most[i] + log(sum[i]);
    for (int64_t c = 0; c < t->dv; c++)
      y[i * t->y_step + c] = none ? 0 : y[i * t->y_step + c] * scale;
  }
}

/* Jobs are blocks of rows of one head. */
static void NAME(forward_range)(int64_t begin, int64_t end, void *arg) {
  const Attention *t = arg;
  int64_t blocks = (t->n + ROWS - 1) / ROWS;
  for (int64_t k = begin; k < end; k++) {
    Head h;
    head_set(t, k / blocks, &h);
    int64_t row = k % blocks * ROWS;
    NAME(forward_block)(t, &h, row, t->n - row < ROWS ? t->n - row : ROWS);
  }
}

static void NAME(clear)(T *x, int64_t rows, int64_t cols, int64_t step) {
  for (int64_t i = 0; i < rows; i++) memset(x + i * step, 0, sizeof(T) * (size_t)cols);
}

/* The weights w of a row and the gradients d of its scores, which hold scores and gradients of
 * weights; then w are those that met the values. */
static void NAME(row_gradients)(const Attention *t, const Head *h, int64_t row, int64_t key,
                                int64_t keys, T minus, T *w, T *d) {
  const T *lse = (const T *)h->lse + row * t->lse_step;
  T scale = (T)t->how.scale, base = lse[0], sum = t->how.plain ? lse[1] : 0;
  if (t->how.drops) {
    uint32_t words[KEYS];
    T keep = (T)t->how.keep;
    draw_words(t, h->draw + row * t->m + key, keys, words);
    for (int64_t j = 0; j < keys; j++) {
      bool kept = words[j] >= t->how.threshold;
      T e = exp(w[j] - base - sum);
      d[j] = e * ((kept ? d[j] * keep : 0) - minus) * scale;
      w[j] = kept ? e * keep : 0;
    }
  } else {
    PW_IVDEP for (int64_t j = 0; j < keys; j++) {
      w[j] = exp(w[j] - base - sum);
      d[j] = w[j] * (d[j] - minus) * scale;
    }
  }
  if (!t->how.plain || !h->mask || !t->mask_bool) return;
  const char *m = h->mask + row * t->mask_step[0] + key * t->mask_step[1];
  for (int64_t j = 0; j < keys; j++) d[j] = m[j * t->mask_step[1]] ? d[j] : 0;
}

/* One block of rows against one block of keys: adds to the gradients. dot[i] is the row's g . y. */
static void NAME(backward_block)(const Attention *t, const Head *h, int64_t row, int64_t rows,
                                 int64_t key, int64_t keys, const T *dot) {
  T p[ROWS * KEYS], ds[ROWS * KEYS];
  const T *q = (const T *)h->q + row * t->q_step, *k = (const T *)h->k + key * t->k_step,
          *v = (const T *)h->v + key * t->v_step, *g = (const T *)h->g + row * t->g_step;
  T *gq = (T *)h->gq + row * t->gq_step, *gk = (T *)h->gk + key * t->gk_step,
    *gv = (T *)h->gv + key * t->gv_step;
  PRODUCT(false, true, rows, keys, t->d, q, t->q_step, k, t->k_step, false, p, KEYS);
  NAME(score)(t, h, row, rows, key, keys, p);
  PRODUCT(false, true, rows, keys, t->dv, g, t->g_step, v, t->v_step, false, ds, KEYS);
  for (int64_t i = 0; i < rows; i++)
    NAME(row_gradients)(t, h, row + i, key, keys, dot[i], p + i * KEYS, ds + i * KEYS);
  PRODUCT(true, false, keys, t->dv, rows, p, KEYS, g, t->g_step, true, gv, t->gv_step);
  PRODUCT(true, false, keys, t->d, rows, ds, KEYS, q, t->q_step, true, gk, t->gk_step);
  PRODUCT(false, false, rows, t->d, keys, ds, KEYS, k, t->k_step, true, gq, t->gq_step);
}

static void NAME(backward_head)(const Attention *t, const Head *h) {
  NAME(clear)(h->gq, t->n, t->d, t->gq_step);
  NAME(clear)(h->gk, t->m, t->d, t->gk_step);
  NAME(clear)(h->gv, t->m, t->dv, t->gv_step);
  for (int64_t row = 0; row < t->n; row += ROWS) {
    int64_t rows = t->n - row < ROWS ? t->n - row : ROWS, all = NAME(visible)(t, row, rows);
    T dot[ROWS];
    for (int64_t i = 0; i < rows; i++) {
      const T *g = (const T *)h->g + (row + i) * t->g_step,
              *y = (const T *)h->y + (row + i) * t->y_step;
      double sum = 0;
      for (int64_t c = 0; c < t->dv; c += BLOCK)
        sum += LINE(line_dot)(t->dv - c < BLOCK ? t->dv - c : BLOCK, g + c, y + c);
      dot[i] = (T)sum;
    }
    for (int64_t key = 0; key < all; key += KEYS)
      NAME(backward_block)(t, h, row, rows, key, all - key < KEYS ? all - key : KEYS, dot);
  }
}

/* Jobs are heads. */
static void NAME(backward_range)(int64_t begin, int64_t end, void *arg) {
  const Attention *t = arg;
  for (int64_t k = begin; k < end; k++) {
    Head h;
    head_set(t, k, &h);
    NAME(backward_head)(t, &h);
  }
}
