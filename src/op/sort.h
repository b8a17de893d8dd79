/* Stable sorting of keys that are unsigned numbers, each with a place.
 *
 * Static, since it belongs to one instruction set. */
#ifndef MF_SORT_H
#define MF_SORT_H
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

typedef struct SortPair {
  uint64_t key;
  int64_t place;
} SortPair;

enum { SORT_FEW = 32, SORT_MANY = 4096, SORT_DIGITS = 1 << 11 };

static void sort_insert(int64_t n, SortPair *a) {
  for (int64_t i = 1; i < n; i++) {
    SortPair p = a[i];
    int64_t at = i;
    for (; at > 0 && a[at - 1].key > p.key; at--) a[at] = a[at - 1];
    a[at] = p;
  }
}

/* By one digit, from a to b; false where all have the same, and nothing is moved. */
static bool sort_by_digit(int64_t n, int shift, uint64_t digits, const SortPair *a, SortPair *b) {
  int64_t start[SORT_DIGITS + 1];
  memset(start, 0, sizeof *start * (size_t)(digits + 1));
  for (int64_t i = 0; i < n; i++) start[(a[i].key >> shift & (digits - 1)) + 1]++;
  if (start[(a[0].key >> shift & (digits - 1)) + 1] == n) return false;
  for (uint64_t d = 1; d < digits; d++) start[d] += start[d - 1];
  for (int64_t i = 0; i < n; i++) b[start[a[i].key >> shift & (digits - 1)]++] = a[i];
  return true;
}

/* Sorts n pairs whose keys have so many bits, moving between a and b; the one that holds the result
 * is returned. Digit by digit from the last, few pairs by insertion. */
static SortPair *sort_pairs(int64_t n, int bits, SortPair *a, SortPair *b) {
  int width = n < SORT_MANY ? 8 : 11;
  if (n <= SORT_FEW) {
    sort_insert(n, a);
    return a;
  }
  for (int shift = 0; shift < bits; shift += width) {
    if (!sort_by_digit(n, shift, UINT64_C(1) << width, a, b)) continue;
    SortPair *other = a;
    a = b;
    b = other;
  }
  return a;
}

#endif
