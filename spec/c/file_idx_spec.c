/* idx files: right ones of each type, plain and compressed; wrong ones are errors that name file
 * and reason; no change of single bytes makes the reader stray. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <zlib.h>

#include "check.h"
#include "err.h"
#include "idx.h"

static char folder[] = "/tmp/moonflow-spec-XXXXXX", path[64];

static void put(const void *bytes, size_t n) {
  FILE *f = fopen(path, "wb");
  fwrite(bytes, 1, n, f);
  fclose(f);
}

static void put_gzip(const void *bytes, size_t n) {
  gzFile f = gzopen(path, "wb");
  gzwrite(f, bytes, (unsigned)n);
  gzclose(f);
}

/* The bytes of path; at most `max`. */
static size_t get(char *bytes, size_t max) {
  FILE *f = fopen(path, "rb");
  size_t n = fread(bytes, 1, max, f);
  fclose(f);
  return n;
}

static size_t bytes_of(const IdxFile *f) {
  return (size_t)shape_numel(f->ndim, f->shape) * dtype_size(f->dtype);
}

/* Reads path whole, into memory of exactly its size, of which the first 64 bytes go to head. */
static int load(char head[64]) {
  IdxFile f;
  int code = idx_open(&f, path);
  if (code) return code;
  size_t n = bytes_of(&f);
  char *p = malloc(n ? n : 1);
  code = idx_read(&f, p);
  if (!code && head) memcpy(head, p, n < 64 ? n : 64);
  free(p);
  idx_close(&f);
  return code;
}

static void refuse(const char *what, const char *why) {
  int code = load(NULL);
  CHECK(code == MF_EIO, "%s: code %d", what, code);
  CHECK(strstr(err_text(), path), "%s: the error does not name the file: %s", what, err_text());
  CHECK(strstr(err_text(), why), "%s: the error lacks '%s': %s", what, why, err_text());
}

static void reads_each_type(void) {
  char head[64];
  int16_t i16[2] = {-2, 258};
  int32_t i32[1] = {-16909060};
  float f32[1] = {-1.5f};
  double f64[1] = {3.25};
  static const char b16[] = "\0\0\x0B\1\0\0\0\2\xFF\xFE\1\2",
                    b32[] = "\0\0\x0C\1\0\0\0\1\xFE\xFD\xFC\xFC";
  static const char bf[] = "\0\0\x0D\1\0\0\0\1\xBF\xC0\0\0",
                    bd[] = "\0\0\x0E\1\0\0\0\1\x40\x0A\0\0\0\0\0\0";
  static const char b8[] = "\0\0\x08\2\0\0\0\2\0\0\0\3abcdef", s8[] = "\0\0\x09\1\0\0\0\1\x80";
  const struct {
    const char *file;
    size_t n;
    const void *want;
    size_t size;
    DType dtype;
  } cases[] = {{b8, 18, "abcdef", 6, U8}, {s8, 9, "\x80", 1, I8}, {b16, 12, i16, 4, I16},
               {b32, 12, i32, 4, I32},    {bf, 12, f32, 4, F32},  {bd, 16, f64, 8, F64}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
    for (int zip = 0; zip < 2; zip++) {
      (zip ? put_gzip : put)(cases[i].file, cases[i].n);
      CHECK(!load(head), "%s", err_text());
      CHECK(!memcmp(head, cases[i].want, cases[i].size), "case %zu", i);
      IdxFile f;
      CHECK(!idx_open(&f, path) && f.dtype == cases[i].dtype && f.ndim == cases[i].file[3],
            "case %zu", i);
      CHECK(bytes_of(&f) == cases[i].size, "case %zu: %zu bytes", i, bytes_of(&f));
      idx_close(&f);
    }
  put("\0\0\x08\2\0\0\0\0\0\0\0\3", 12);
  CHECK(!load(head), "an empty one: %s", err_text());
}

static void refuses(void) {
  unlink(path);
  refuse("a missing file", "No such file");
  put("", 0);
  refuse("an empty file", "ends after 0 of 4");
  put("\0\0\x08", 3);
  refuse("a cut magic", "ends after 3 of 4");
  put("PNG.", 4);
  refuse("another format", "50 4e instead of 00 00");
  put("\0\0\x07\1\0\0\0\1a", 9);
  refuse("an unknown type", "type 0x07");
  put("\0\0\x08\0a", 5);
  refuse("no dims", "0 dims");
  put("\0\0\x08\xFF\0\0\0\1a", 9);
  refuse("255 dims", "255 dims");
  put("\0\0\x08\2\0\0\0\1\0\0", 10);
  refuse("cut sizes", "ends after 6 of 8");
  put("\0\0\x08\1\0\0\0\3ab", 10);
  refuse("cut data", "shape (3,) of uint8 takes 3 bytes, but 2 follow");
  put("\0\0\x08\1\0\0\0\1ab", 10);
  refuse("bytes after the data", "takes 1 bytes, but 2 follow");
  put("\0\0\x08\3\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF", 16);
  refuse("sizes that overflow", "overflow");
  put("\0\0\x08\1\xFF\xFF\xFF\xFFx", 9);
  refuse("a lying size", "takes 4294967295 bytes, but 1 follow");
}

static void refuses_compressed(void) {
  char zip[256], ten[18];
  memcpy(ten, "\0\0\x08\1\0\0\0\012", 8);
  memset(ten + 8, 'x', 10);
  put_gzip("\0\0\x08\1\xFF\xFF\xFF\xFFx", 9);
  refuse("a lying size", "more than");
  put_gzip("\0\0\x08\1\0\0\0\3ab", 10);
  refuse("cut data", "ends after 2 of 3");
  put_gzip("\0\0\x08\1\0\0\0\1ab", 10);
  refuse("bytes after the data", "more data follows");
  put_gzip(ten, sizeof ten);
  size_t n = get(zip, sizeof zip);
  CHECK(n > 18, "%zu bytes", n);
  if (n < 18) return;
  for (size_t i = 1; i < n; i++) {
    put(zip, i);
    CHECK(load(NULL) == MF_EIO, "a compressed file cut at %zu was accepted", i);
  }
  zip[n - 5] ^= 1;
  put(zip, n);
  refuse("a wrong checksum or length", "damaged");
  zip[n - 5] ^= 1;
  for (size_t i = 0; i < n; i++)
    for (int bit = 0; bit < 8; bit++) {
      zip[i] ^= (char)(1 << bit);
      put(zip, n);
      load(NULL);
      zip[i] ^= (char)(1 << bit);
    }
}

static void survives(void) {
  char file[] = "\0\0\x0B\2\0\0\0\2\0\0\0\1abcd";
  for (size_t i = 0; i < sizeof file - 1; i++) {
    put(file, i);
    CHECK(load(NULL) == MF_EIO, "a file cut at %zu was accepted", i);
    for (int bit = 0; bit < 8; bit++) {
      file[i] ^= (char)(1 << bit);
      put(file, sizeof file - 1);
      load(NULL);
      file[i] ^= (char)(1 << bit);
    }
  }
}

int main(void) {
  if (!mkdtemp(folder)) return 2;
  snprintf(path, sizeof path, "%s/x.idx", folder);
  RUN(reads_each_type);
  RUN(refuses);
  RUN(refuses_compressed);
  RUN(survives);
  unlink(path);
  rmdir(folder);
  return check_end();
}
