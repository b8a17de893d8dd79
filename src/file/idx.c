/* Reading idx files through zlib, which passes plain files through.
 *
 * The sizes in a file are checked before anything is allocated for them: a plain file must have
 * exactly the bytes they promise, and a compressed one cannot hold more than DEFLATE_RATIO times
 * its own length. Whether a compressed file keeps its promise, and its checksum, is known only at
 * its end, which idx_read therefore always reads. */
#include <fcntl.h>
#include <string.h>
#include <unistd.h>
#include <zlib.h>

#include "disk.h"
#include "err.h"
#include "idx.h"
#include "mem.h"

enum { DEFLATE_RATIO = 1040, CHUNK = 1 << 20 }; /* deflate reaches at most 1032 to 1 */

static const struct {
  uint8_t code, dtype;
} types[] = {{0x08, U8}, {0x09, I8}, {0x0B, I16}, {0x0C, I32}, {0x0D, F32}, {0x0E, F64}};

static uint32_t big_endian32(const uint8_t *p) {
  return (uint32_t)p[0] << 24 | (uint32_t)p[1] << 16 | (uint32_t)p[2] << 8 | p[3];
}

/* Reads exactly n bytes; fewer is an error that says after how many the data ended. */
static int read_exactly(gzFile stream, void *dst, int64_t n, const char *what) {
  for (int64_t done = 0; done < n;) {
    unsigned want = n - done < CHUNK ? (unsigned)(n - done) : CHUNK;
    int k = gzread(stream, (char *)dst + done, want);
    if (k > 0) done += k;
    if (k > 0 && (unsigned)k == want) continue;
    int why;
    const char *text = gzerror(stream, &why);
    if (why == Z_BUF_ERROR || (why == Z_OK && k >= 0))
      return err_set(MF_EIO, "%s ends after %lld of %lld bytes", what, (long long)done,
                     (long long)n);
    if (why == Z_ERRNO) return err_set(MF_EIO, "cannot read: %m");
    return err_set(MF_EIO, "the compressed data is damaged: %s", text);
  }
  return 0;
}

/* The element type and the number of dims. */
static int read_magic(IdxFile *f) {
  uint8_t magic[4];
  int code = read_exactly(f->stream, magic, sizeof magic, "the header");
  if (code) return code;
  if (magic[0] || magic[1])
    return err_set(MF_EIO, "begins with bytes %02x %02x instead of 00 00; is it an idx file?",
                   magic[0], magic[1]);
  size_t i = 0, n = sizeof types / sizeof *types;
  while (i < n && types[i].code != magic[2]) i++;
  if (i == n) return err_set(MF_EIO, "unknown element type 0x%02x", magic[2]);
  if (magic[3] < 1 || magic[3] > MF_MAX_DIMS)
    return err_set(MF_EIO, "%d dims; from 1 to %d are possible", magic[3], MF_MAX_DIMS);
  f->dtype = (DType)types[i].dtype;
  f->ndim = magic[3];
  return 0;
}

static int64_t data_bytes(const IdxFile *f) {
  return shape_numel(f->ndim, f->shape) * (int64_t)dtype_size(f->dtype);
}

static int read_shape(IdxFile *f) {
  uint8_t sizes[4 * MF_MAX_DIMS];
  int code = read_exactly(f->stream, sizes, 4 * f->ndim, "the header");
  if (code) return code;
  for (int d = 0; d < f->ndim; d++) f->shape[d] = big_endian32(sizes + 4 * d);
  if (shape_check("header", f->ndim, f->shape, f->dtype))
    return err_set(MF_EIO, "its sizes overflow");
  return 0;
}

/* Could a file of `size` bytes hold what the header promises? */
static int check_promise(const IdxFile *f, int64_t size) {
  int64_t data = data_bytes(f), header = 4 + 4 * f->ndim;
  char text[SHAPE_TEXT_MAX];
  shape_text(f->ndim, f->shape, text);
  if (gzdirect(f->stream)) {
    if (size == header + data) return 0;
    return err_set(MF_EIO, "shape %s of %s takes %lld bytes, but %lld follow the header", text,
                   dtype_name(f->dtype), (long long)data, (long long)(size - header));
  }
  if (data / DEFLATE_RATIO <= size) return 0;
  return err_set(MF_EIO,
                 "shape %s of %s takes %lld bytes, more than %lld compressed bytes can hold", text,
                 dtype_name(f->dtype), (long long)data, (long long)size);
}

/* Takes over fd, also on error. */
static int open_checked(IdxFile *f, int fd, const char *path, int64_t size) {
  f->path = mem_strdup(path);
  f->stream = gzdopen(fd, "rb");
  if (!f->stream) close(fd);
  if (!f->stream || !f->path) return err_set(MF_ENOMEM, "out of memory");
  gzbuffer(f->stream, 1 << 17);
  int code = read_magic(f);
  if (!code) code = read_shape(f);
  return code ? code : check_promise(f, size);
}

/* Puts "load: PATH: " before the current error. */
static int path_error(int code, const char *path) {
  err_prefix(code, path);
  return err_prefix(code, "load");
}

static void swap_bytes(uint8_t *p, int64_t n, size_t size) {
  for (int64_t i = 0; i < n; i++, p += size)
    for (size_t a = 0, b = size - 1; a < b; a++, b--) {
      uint8_t t = p[a];
      p[a] = p[b];
      p[b] = t;
    }
}

/* Nothing may follow the data. Looking there also reaches the checksum of a compressed file. */
static int check_end(IdxFile *f) {
  uint8_t more;
  int why, k = gzread(f->stream, &more, 1);
  if (k == 1) return err_set(MF_EIO, "more data follows than its header promises");
  const char *text = gzerror(f->stream, &why);
  if (k == 0 && why == Z_OK) return 0;
  return err_set(MF_EIO, "the compressed data is damaged: %s", text);
}

/* -- Exported ---------------------------------------------------------------------------------- */

int idx_open(IdxFile *f, const char *path) {
  *f = (IdxFile){0};
  int fd;
  int64_t size;
  int code = disk_open(path, &fd, &size);
  if (code) return path_error(code, path);
  code = open_checked(f, fd, path, size);
  if (code) idx_close(f);
  return code ? path_error(code, path) : 0;
}

int idx_read(IdxFile *f, void *dst) {
  int64_t bytes = data_bytes(f);
  size_t size = dtype_size(f->dtype);
  int code = read_exactly(f->stream, dst, bytes, "the data");
  if (!code) code = check_end(f);
  if (code) return path_error(code, f->path);
  if (size > 1) swap_bytes(dst, bytes / (int64_t)size, size);
  return 0;
}

void idx_close(IdxFile *f) {
  if (f->stream) gzclose_r(f->stream);
  mem_free(f->path);
  *f = (IdxFile){0};
}
