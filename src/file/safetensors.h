/* safetensors files: an 8-byte little-endian header size, a JSON header, then the tensors' bytes,
 * row-major and little-endian. */
#ifndef MF_SAFETENSORS_H
#define MF_SAFETENSORS_H
#include "disk.h"
#include "meta.h"

typedef struct SafetensorsEntry {
  char *name; /* UTF-8 without zero bytes */
  DType dtype;
  int ndim;
  int64_t shape[MF_MAX_DIMS];
  int64_t begin, end; /* where its bytes lie in the data part */
} SafetensorsEntry;

typedef struct SafetensorsPair {
  char *key, *value;
} SafetensorsPair;

/* An open file. Entries are in the order of their data; nothing here changes after open, so
 * threads may read at once. */
typedef struct Safetensors {
  SafetensorsEntry *entries;
  SafetensorsPair *metadata;
  size_t n, n_metadata;
  char *path;
  int64_t data_start;
  int fd;
} Safetensors;

/* Reads and checks the whole header. Every error of reading is "load: PATH: reason". After one
 * from open there is nothing to close. */
int safetensors_open(Safetensors *f, const char *path);

/* Copies the bytes of one entry to dst, which has room for them. */
int safetensors_read(const Safetensors *f, const SafetensorsEntry *e, void *dst);
/* The same of n of its bytes, from `first` on. */
int safetensors_read_part(const Safetensors *f, const SafetensorsEntry *e, int64_t first, int64_t n,
                          void *dst);
/* Also of one that is closed, or is only {.fd = -1}. */
void safetensors_close(Safetensors *f);

/* A file being written. Create places the entries (name, dtype and shape are the caller's, begin
 * and end are set), then each is written once, in any order; commit makes the file appear, whole.
 * Entries are stored by size of element, largest first, then by name, so that all are aligned and
 * the same tensors give the same bytes. Every error is "save: PATH: reason"; one from create or
 * write must be followed by abort. */
typedef struct SafetensorsOut {
  DiskReplace file;
  const char *path; /* the caller's, borrowed until commit or abort */
  int64_t data_start, missing;
} SafetensorsOut;

int safetensors_create(SafetensorsOut *o, const char *path, SafetensorsEntry *entries, size_t n,
                       const SafetensorsPair *metadata, size_t n_metadata);
int safetensors_write(SafetensorsOut *o, const SafetensorsEntry *e, const void *data);
int safetensors_commit(SafetensorsOut *o);
void safetensors_abort(SafetensorsOut *o);

#endif
