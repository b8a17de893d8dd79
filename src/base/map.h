/* A map from pointers to numbers: open addressing, grows, never shrinks. */
#ifndef MF_MAP_H
#define MF_MAP_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct Map {
  const void **keys; /* NULL: free place */
  int64_t *values;
  size_t n, cap; /* cap is 0 or a power of two */
} Map;

/* The value, or -1. */
int64_t map_get(const Map *m, const void *key);
/* False when out of memory. Values are >= 0. */
bool map_put(Map *m, const void *key, int64_t value);
void map_free(Map *m);

#endif
