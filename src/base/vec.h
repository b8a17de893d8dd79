/* A growing array: `VEC(int) v = {0}; if (!vec_push(&v, 3)) ...; for (size_t i = 0; i < v.n; i++)
 * use(v.at[i]); vec_free(&v);` */
#ifndef MF_VEC_H
#define MF_VEC_H
#include <stdbool.h>
#include <stddef.h>

#include "hard.h"
#include "mem.h"

#define VEC(T)     \
  struct {         \
    T *at;         \
    size_t n, cap; \
  }

/* False when memory ran out; the vector is then unchanged. */
#define vec_push(v, x) (vec_room((v), 1) ? ((v)->at[(v)->n++] = (x), true) : false)
#define vec_room(v, more) vec_grow((void **)&(v)->at, &(v)->cap, (v)->n + (more), sizeof *(v)->at)
#define vec_free(v) (mem_free((v)->at), (v)->at = NULL, (v)->n = (v)->cap = 0)

static inline bool vec_grow(void **at, size_t *cap, size_t need, size_t item) {
  if (need <= *cap) return true;
  size_t next = hard_room(*cap, 8);
  if (next < need) next = need;
  void *p = mem_resize(*at, next * item);
  if (!p) return false;
  *at = p;
  *cap = next;
  return true;
}

#endif
