/* Memory that is given back all at once, and the one protected entry of code that builds in it.
 *
 * Inside arena_protect nothing needs to be checked: when memory runs out, or arena_throw is called,
 * it returns the code. Objects of an arena never move. */
#ifndef MF_ARENA_H
#define MF_ARENA_H
#include <stddef.h>

typedef struct ArenaBlock ArenaBlock;
typedef struct ArenaEntry ArenaEntry;

/* Zeroed: an empty arena. */
typedef struct Arena {
  ArenaBlock *blocks;
  ArenaEntry *entry; /* the innermost protected call that runs; NULL: none */
} Arena;

/* Runs fn(ud); 0, or the code with which it was left, the error being set. Calls nest. */
int arena_protect(Arena *a, void (*fn)(void *ud), void *ud);
/* Leaves the innermost protected call; the error is set. */
void arena_throw(Arena *a, int code) __attribute__((noreturn));

/* Zeroed, aligned for any object; never NULL. Only inside arena_protect, as the others that
 * allocate. */
void *arena_alloc(Arena *a, size_t bytes);
void *arena_copy(Arena *a, const void *from, size_t bytes);
char *arena_text(Arena *a, const char *text);
void arena_free(Arena *a);

#define arena_new(a, T) ((T *)arena_alloc((a), sizeof(T)))
#define arena_array(a, T, n) ((T *)arena_alloc((a), sizeof(T) * (size_t)(n)))

/* A growing array in an arena: `LIST(Thing *) l = {0}; *list_add(arena, &l) = thing;`. What it
 * outgrows stays in the arena. */
#define LIST(T)    \
  struct {         \
    T *at;         \
    size_t n, cap; \
  }
#define list_add(a, l)                                                                         \
  ((l)->n == (l)->cap ? (void)((l)->at = arena_grow((a), (l)->at, &(l)->cap, sizeof *(l)->at)) \
                      : (void)0,                                                               \
   &(l)->at[(l)->n++])
/* Room for n items in all, for a list whose length is known beforehand. */
#define list_reserve(a, l, count)                                                           \
  ((l)->cap < (count)                                                                       \
       ? (void)((l)->at = arena_reserve((a), (l)->at, &(l)->cap, (count), sizeof *(l)->at)) \
       : (void)0)
void *arena_reserve(Arena *a, const void *from, size_t *cap, size_t count, size_t item);
void *arena_grow(Arena *a, const void *from, size_t *cap, size_t item);

#endif
