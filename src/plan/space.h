/* Which bytes of a block are taken when: a set of rectangles of offsets and steps. */
#ifndef MF_SPACE_H
#define MF_SPACE_H
#include "arena.h"
#include <stdint.h>

typedef struct Space Space;

/* Empty, for steps [0, n_steps) and `most` bytes, counted in units of at least `align`. In the
 * arena, under its protection. */
Space *space_create(Arena *a, int n_steps, int64_t most, int64_t align);
/* The lowest offset at which `bytes` are free from step first to step last; less than `most` must
 * be taken. */
int64_t space_lowest(Space *s, int first, int last, int64_t bytes);
/* Takes [offset, offset + bytes) from first to last. */
void space_add(Space *s, int first, int last, int64_t offset, int64_t bytes);

#endif
