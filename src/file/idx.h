/* idx files (MNIST and its like), plain or compressed with gzip: two zero bytes, a type, the
 * number of dims, big-endian sizes, then the elements, row-major and big-endian. */
#ifndef MF_IDX_H
#define MF_IDX_H
#include "meta.h"

typedef struct IdxFile {
  DType dtype;
  int ndim;
  int64_t shape[MF_MAX_DIMS];
  char *path;
  void *stream; /* private */
} IdxFile;

/* Reads and checks what comes before the elements. Every error is "load: PATH: reason"; after one
 * from open there is nothing to close. */
int idx_open(IdxFile *f, const char *path);

/* Reads all elements into dst (row-major), converted to the machine's byte order; once. */
int idx_read(IdxFile *f, void *dst);
void idx_close(IdxFile *f);

#endif
