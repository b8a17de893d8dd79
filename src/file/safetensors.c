/* Reading and writing safetensors.
 *
 * A file is believed in nothing. What open guarantees, whatever the bytes were: the header lies
 * inside the file and is at most HEADER_MAX; every name is unique; every dtype is one of ours and
 * every shape has at most MF_MAX_DIMS sizes whose product does not overflow; every range has
 * exactly the size of its tensor; the ranges, sorted, cover the data part without overlap, hole
 * or rest. Memory spent on a hostile header stays proportional to its length. Fields that the
 * format does not define are refused, since their meaning is unknown. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "err.h"
#include "json.h"
#include "safetensors.h"
#include "vec.h"

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
               "tensors are copied as they are in memory");

static const int64_t HEADER_MAX = 100 * 1000 * 1000;
enum { NAME_SHOWN = 80, ALIGNMENT = 8 };

/* The format's names of the dtypes are those of the enum. */
#define X(id, ctype, name, kind) #id,
static const char *const dtype_names[] = {DTYPES(X)};
#undef X

static int out_of_memory(void) {
  return err_set(MF_ENOMEM, "out of memory");
}

/* Sets "tensor 'NAME': " before the current error. A name from a file may hold anything, so it is
 * cut and control characters are hidden. */
static int name_error(int code, const char *name) {
  char shown[NAME_SHOWN + 4], prefix[NAME_SHOWN + 16];
  size_t n = strnlen(name, NAME_SHOWN);
  while (n == NAME_SHOWN && n > 0 && (name[n] & 0xC0) == 0x80) n--;
  for (size_t i = 0; i < n; i++)
    shown[i] = (unsigned char)name[i] < 0x20 || name[i] == 0x7F ? '?' : name[i];
  strcpy(shown + n, name[n] ? "..." : "");
  snprintf(prefix, sizeof prefix, "tensor '%s'", shown);
  return err_prefix(code, prefix);
}

/* Puts "OP: PATH: " before the current error. */
static int path_error(int code, const char *op, const char *path) {
  err_prefix(code, path);
  return err_prefix(code, op);
}

/* -- The header's JSON ------------------------------------------------------------------------- */

typedef struct Header {
  Json json;
  VEC(SafetensorsEntry) entries;
  VEC(SafetensorsPair) metadata;
  bool has_metadata;
} Header;

/* The next token must be of this kind; `what` names what was expected there. */
static int expect(Json *j, JsonKind kind, const char *what) {
  JsonKind k = json_next(j);
  if (k == kind) return 0;
  if (k == JSON_ERROR) return err_prefix(MF_EIO, "header is not JSON");
  return err_set(MF_EIO, "header: expected %s", what);
}

static int copy_string(Json *j, char **out) {
  *out = mem_strdup(j->string.text);
  return *out ? 0 : out_of_memory();
}

static int parse_metadata(Header *h) {
  if (h->has_metadata) return err_set(MF_EIO, "header: __metadata__ occurs twice");
  h->has_metadata = true;
  int code = expect(&h->json, JSON_OBJECT, "an object as __metadata__");
  while (!code) {
    JsonKind k = json_next(&h->json);
    if (k == JSON_OBJECT_END) return 0;
    if (k == JSON_ERROR) return err_prefix(MF_EIO, "header is not JSON");
    SafetensorsPair none = {0};
    if (!vec_push(&h->metadata, none)) return out_of_memory();
    SafetensorsPair *p = &h->metadata.at[h->metadata.n - 1];
    code = copy_string(&h->json, &p->key);
    if (!code) code = expect(&h->json, JSON_STRING, "only strings in __metadata__");
    if (!code) code = copy_string(&h->json, &p->value);
  }
  return code;
}

static int parse_dtype(Json *j, SafetensorsEntry *e) {
  int code = expect(j, JSON_STRING, "a name as dtype");
  if (code) return code;
  for (int t = 0; t < DTYPE_COUNT; t++) {
    if (strcmp(j->string.text, dtype_names[t])) continue;
    e->dtype = (DType)t;
    return 0;
  }
  return err_set(MF_EIO, "dtype '%.20s' is not supported", j->string.text);
}

/* Reads [n, n, ...] of whole numbers from 0 up, at most `max` of them. */
static int parse_sizes(Json *j, const char *what, int max, int64_t *out, int *n) {
  *n = 0;
  int code = expect(j, JSON_ARRAY, "a list as shape and as data_offsets");
  while (!code) {
    JsonKind k = json_next(j);
    if (k == JSON_ARRAY_END) return 0;
    if (k == JSON_ERROR) return err_prefix(MF_EIO, "header is not JSON");
    if (k != JSON_INT)
      return err_set(MF_EIO, "%s holds something that is no whole number below 2^63", what);
    if (j->integer < 0)
      return err_set(MF_EIO, "%s holds %lld, which is negative", what, (long long)j->integer);
    if (*n == max) return err_set(MF_EIO, "%s has more than %d numbers", what, max);
    out[(*n)++] = j->integer;
  }
  return code;
}

static int parse_offsets(Json *j, SafetensorsEntry *e) {
  int64_t offsets[2];
  int n, code = parse_sizes(j, "data_offsets", 2, offsets, &n);
  if (code) return code;
  if (n != 2) return err_set(MF_EIO, "data_offsets has %d numbers instead of 2", n);
  if (offsets[0] > offsets[1]) return err_set(MF_EIO, "data_offsets end before they begin");
  e->begin = offsets[0];
  e->end = offsets[1];
  return 0;
}

/* The shape's product must be the range's size. */
static int check_entry(const SafetensorsEntry *e) {
  if (shape_check("shape", e->ndim, e->shape, e->dtype))
    return err_set(MF_EIO, "the product of its shape overflows");
  int64_t bytes = shape_numel(e->ndim, e->shape) * (int64_t)dtype_size(e->dtype);
  if (e->end - e->begin == bytes) return 0;
  char text[SHAPE_TEXT_MAX];
  return err_set(MF_EIO, "data_offsets give it %lld bytes, but shape %s of %s has %lld",
                 (long long)(e->end - e->begin), shape_text(e->ndim, e->shape, text),
                 dtype_name(e->dtype), (long long)bytes);
}

/* After an entry's name: {"dtype": ..., "shape": [...], "data_offsets": [begin, end]} in any
 * order. */
static int parse_entry(Json *j, SafetensorsEntry *e) {
  static const char *const fields[] = {"dtype", "shape", "data_offsets"};
  bool seen[3] = {false};
  int code = expect(j, JSON_OBJECT, "an object for each tensor");
  while (!code) {
    JsonKind k = json_next(j);
    if (k == JSON_ERROR) return err_prefix(MF_EIO, "header is not JSON");
    if (k == JSON_OBJECT_END) break;
    int i = 0;
    while (i < 3 && strcmp(fields[i], j->string.text)) i++;
    if (i == 3) return err_set(MF_EIO, "unknown field '%.20s'", j->string.text);
    if (seen[i]) return err_set(MF_EIO, "%s occurs twice", fields[i]);
    seen[i] = true;
    if (i == 0) code = parse_dtype(j, e);
    if (i == 1) code = parse_sizes(j, "shape", MF_MAX_DIMS, e->shape, &e->ndim);
    if (i == 2) code = parse_offsets(j, e);
  }
  for (int i = 0; i < 3 && !code; i++)
    if (!seen[i]) code = err_set(MF_EIO, "%s is missing", fields[i]);
  return code ? code : check_entry(e);
}

static int parse_header(Header *h) {
  int code = expect(&h->json, JSON_OBJECT, "an object");
  while (!code) {
    JsonKind k = json_next(&h->json);
    if (k == JSON_ERROR) return err_prefix(MF_EIO, "header is not JSON");
    if (k == JSON_OBJECT_END) return expect(&h->json, JSON_END, "its end");
    if (!strcmp(h->json.string.text, "__metadata__")) {
      code = parse_metadata(h);
      continue;
    }
    SafetensorsEntry none = {0};
    if (!vec_push(&h->entries, none)) return out_of_memory();
    SafetensorsEntry *e = &h->entries.at[h->entries.n - 1];
    code = copy_string(&h->json, &e->name);
    if (!code && (code = parse_entry(&h->json, e))) name_error(code, e->name);
  }
  return code;
}

/* -- What holds between entries ---------------------------------------------------------------- */

static int by_range(const void *a, const void *b) {
  const SafetensorsEntry *x = a, *y = b;
  if (x->begin != y->begin) return x->begin < y->begin ? -1 : 1;
  if (x->end != y->end) return x->end < y->end ? -1 : 1;
  return strcmp(x->name, y->name);
}

static int by_string(const void *a, const void *b) {
  return strcmp(*(char *const *)a, *(char *const *)b);
}

/* Are the `n` strings, the first member of structs of `stride` bytes, all different? `*twice` is
 * one that is not. */
static int find_duplicate(const void *first, size_t n, size_t stride, const char **twice) {
  *twice = NULL;
  if (n < 2) return 0;
  const char **sorted = mem_alloc(n * sizeof *sorted);
  if (!sorted) return out_of_memory();
  for (size_t i = 0; i < n; i++) sorted[i] = *(char *const *)((const char *)first + i * stride);
  qsort(sorted, n, sizeof *sorted, by_string);
  for (size_t i = 1; i < n && !*twice; i++)
    if (!strcmp(sorted[i - 1], sorted[i])) *twice = sorted[i];
  mem_free(sorted);
  return 0;
}

static int check_names(const SafetensorsEntry *entries, size_t n, const SafetensorsPair *metadata,
                       size_t n_metadata) {
  const char *twice;
  int code = find_duplicate(entries, n, sizeof *entries, &twice);
  if (code) return code;
  if (twice) return name_error(err_set(MF_EIO, "the name occurs twice"), twice);
  code = find_duplicate(metadata, n_metadata, sizeof *metadata, &twice);
  if (code) return code;
  return twice ? err_set(MF_EIO, "metadata key '%.80s' occurs twice", twice) : 0;
}

/* Sorts the entries by place; together they must be the whole data part, of `size` bytes. */
static int check_ranges(SafetensorsEntry *entries, size_t n, int64_t size) {
  if (n) qsort(entries, n, sizeof *entries, by_range);
  int64_t end = 0;
  for (size_t i = 0; i < n; i++) {
    const SafetensorsEntry *e = &entries[i];
    const char *why = e->end > size    ? "reaches beyond the end of the file; is it truncated?"
                      : e->begin < end ? "overlaps another tensor"
                      : e->begin > end ? "begins after a hole in the data"
                                       : NULL;
    if (why) return name_error(err_set(MF_EIO, "%s", why), e->name);
    end = e->end;
  }
  if (end == size) return 0;
  return err_set(MF_EIO, "%lld bytes follow the last tensor", (long long)(size - end));
}

/* -- Reading ----------------------------------------------------------------------------------- */

static int read_header(Safetensors *f, const char *text, size_t n, int64_t data_size) {
  if (n == 0 || text[0] != '{')
    return err_set(MF_EIO, "header does not begin with '{'; is it a safetensors file?");
  Header h = {0};
  json_open(&h.json, text, n);
  int code = parse_header(&h);
  json_close(&h.json);
  f->entries = h.entries.at;
  f->n = h.entries.n;
  f->metadata = h.metadata.at;
  f->n_metadata = h.metadata.n;
  if (!code) code = check_names(f->entries, f->n, f->metadata, f->n_metadata);
  return code ? code : check_ranges(f->entries, f->n, data_size);
}

static int open_checked(Safetensors *f, int64_t size) {
  uint64_t n;
  if (size < (int64_t)sizeof n)
    return err_set(MF_EIO, "%lld bytes are too few for a safetensors file", (long long)size);
  int code = disk_read(f->fd, &n, sizeof n, 0);
  if (code) return code;
  if (n > (uint64_t)(size - 8))
    return err_set(MF_EIO,
                   "a header of %llu bytes in a file of %lld; is it a safetensors file, and whole?",
                   (unsigned long long)n, (long long)size);
  if (n > (uint64_t)HEADER_MAX)
    return err_set(MF_EIO, "a header of %llu bytes; at most %lld are read", (unsigned long long)n,
                   (long long)HEADER_MAX);
  char *text = mem_alloc(n + 1);
  if (!text) return out_of_memory();
  f->data_start = 8 + (int64_t)n;
  code = disk_read(f->fd, text, n, 8);
  if (!code) code = read_header(f, text, n, size - f->data_start);
  mem_free(text);
  return code;
}

int safetensors_open(Safetensors *f, const char *path) {
  *f = (Safetensors){.fd = -1};
  int64_t size;
  int code = disk_open(path, &f->fd, &size);
  if (code) return path_error(code, "load", path);
  f->path = mem_strdup(path);
  code = f->path ? open_checked(f, size) : out_of_memory();
  if (code) safetensors_close(f);
  return code ? path_error(code, "load", path) : 0;
}

/* A bool of any value but 0 and 1 would be undefined behaviour in every kernel that reads it. */
static int check_bools(const uint8_t *p, int64_t n) {
  for (int64_t i = 0; i < n; i++)
    if (p[i] > 1)
      return err_set(MF_EIO, "byte %lld is %d, but a bool is 0 or 1", (long long)i, p[i]);
  return 0;
}

int safetensors_read_part(const Safetensors *f, const SafetensorsEntry *e, int64_t first, int64_t n,
                          void *dst) {
  int code = disk_read(f->fd, dst, (size_t)n, f->data_start + e->begin + first);
  if (!code && e->dtype == BOOL) code = check_bools(dst, n);
  return code ? path_error(name_error(code, e->name), "load", f->path) : 0;
}

int safetensors_read(const Safetensors *f, const SafetensorsEntry *e, void *dst) {
  return safetensors_read_part(f, e, 0, e->end - e->begin, dst);
}

void safetensors_close(Safetensors *f) {
  for (size_t i = 0; i < f->n; i++) mem_free(f->entries[i].name);
  for (size_t i = 0; i < f->n_metadata; i++) {
    mem_free(f->metadata[i].key);
    mem_free(f->metadata[i].value);
  }
  mem_free(f->entries);
  mem_free(f->metadata);
  mem_free(f->path);
  if (f->fd >= 0) close(f->fd);
  *f = (Safetensors){.fd = -1};
}

/* -- Writing ----------------------------------------------------------------------------------- */

static int by_place(const void *a, const void *b) {
  const SafetensorsEntry *x = *(SafetensorsEntry *const *)a, *y = *(SafetensorsEntry *const *)b;
  size_t p = dtype_size(x->dtype), q = dtype_size(y->dtype);
  if (p != q) return p > q ? -1 : 1;
  return strcmp(x->name, y->name);
}

/* Names must come back as they went: UTF-8, unique, and not the one name the format keeps for
 * itself. */
static int check_writable(const SafetensorsEntry *entries, size_t n,
                          const SafetensorsPair *metadata, size_t n_metadata) {
  for (size_t i = 0; i < n; i++) {
    int code = shape_check("shape", entries[i].ndim, entries[i].shape, entries[i].dtype);
    if (code) return name_error(code, entries[i].name);
    if (json_utf8_error(entries[i].name, strlen(entries[i].name)))
      return name_error(err_set(MF_EINVAL, "the name is not UTF-8"), entries[i].name);
    if (!strcmp(entries[i].name, "__metadata__"))
      return err_set(MF_EINVAL, "'__metadata__' cannot be a tensor's name");
  }
  for (size_t i = 0; i < n_metadata; i++) {
    const SafetensorsPair *p = &metadata[i];
    if (json_utf8_error(p->key, strlen(p->key)) || json_utf8_error(p->value, strlen(p->value)))
      return err_set(MF_EINVAL, "metadata '%.80s' is not UTF-8", p->key);
  }
  return check_names(entries, n, metadata, n_metadata);
}

static void print_entry(Str *s, const SafetensorsEntry *e) {
  json_quote(s, e->name, strlen(e->name));
  str_printf(s, ":{\"dtype\":\"%s\",\"shape\":[", dtype_names[e->dtype]);
  for (int d = 0; d < e->ndim; d++) str_printf(s, d ? ",%lld" : "%lld", (long long)e->shape[d]);
  str_printf(s, "],\"data_offsets\":[%lld,%lld]}", (long long)e->begin, (long long)e->end);
}

static void print_metadata(Str *s, const SafetensorsPair *metadata, size_t n) {
  str_puts(s, "\"__metadata__\":{");
  for (size_t i = 0; i < n; i++) {
    if (i) str_puts(s, ",");
    json_quote(s, metadata[i].key, strlen(metadata[i].key));
    str_puts(s, ":");
    json_quote(s, metadata[i].value, strlen(metadata[i].value));
  }
  str_puts(s, "}");
}

/* Gives the entries their places in the order of `sorted`, and returns the size of the data. -1:
 * too large together. */
static int64_t place_entries(SafetensorsEntry **sorted, size_t n) {
  int64_t end = 0;
  for (size_t i = 0; i < n; i++) {
    SafetensorsEntry *e = sorted[i];
    e->begin = end;
    int64_t bytes = shape_numel(e->ndim, e->shape) * (int64_t)dtype_size(e->dtype);
    if (__builtin_add_overflow(end, bytes, &end)) return -1;
    e->end = end;
  }
  return end;
}

/* The header, padded with spaces so that the data begins aligned. Its first 8 bytes are the size
 * of the rest. */
static void print_header(Str *s, SafetensorsEntry **sorted, size_t n,
                         const SafetensorsPair *metadata, size_t n_metadata) {
  str_add(s, "\0\0\0\0\0\0\0\0", 8);
  str_puts(s, "{");
  if (n_metadata) print_metadata(s, metadata, n_metadata);
  for (size_t i = 0; i < n && !s->failed; i++) {
    if (i || n_metadata) str_puts(s, ",");
    print_entry(s, sorted[i]);
  }
  str_puts(s, "}");
  while (s->n % ALIGNMENT && !s->failed) str_puts(s, " ");
  uint64_t size = s->n - 8;
  if (!s->failed) memcpy(s->text, &size, sizeof size);
}

/* The header of the entries, which get their places; *size is that of the data. */
static int make_header(Str *header, int64_t *size, SafetensorsEntry *entries, size_t n,
                       const SafetensorsPair *metadata, size_t n_metadata) {
  int code = check_writable(entries, n, metadata, n_metadata);
  if (code) return code;
  SafetensorsEntry **sorted = mem_alloc((n + 1) * sizeof *sorted);
  if (!sorted) return out_of_memory();
  for (size_t i = 0; i < n; i++) sorted[i] = &entries[i];
  qsort(sorted, n, sizeof *sorted, by_place);
  *size = place_entries(sorted, n);
  print_header(header, sorted, n, metadata, n_metadata);
  mem_free(sorted);
  if (header->failed) return out_of_memory();
  if (*size < 0) return err_set(MF_EINVAL, "the tensors are too large for one file");
  if (header->n <= (size_t)HEADER_MAX) return 0;
  return err_set(MF_EINVAL, "too many tensors: the header would exceed 100 MB");
}

int safetensors_create(SafetensorsOut *o, const char *path, SafetensorsEntry *entries, size_t n,
                       const SafetensorsPair *metadata, size_t n_metadata) {
  *o = (SafetensorsOut){.file.fd = -1, .path = path};
  Str header = {0};
  int code = make_header(&header, &o->missing, entries, n, metadata, n_metadata);
  o->data_start = (int64_t)header.n;
  if (!code) code = disk_replace(&o->file, path);
  if (!code) code = disk_write(&o->file, header.text, header.n, 0);
  str_free(&header);
  return code ? path_error(code, "save", path) : 0;
}

int safetensors_write(SafetensorsOut *o, const SafetensorsEntry *e, const void *data) {
  size_t bytes = (size_t)(e->end - e->begin);
  o->missing -= e->end - e->begin;
  int code = disk_write(&o->file, data, bytes, o->data_start + e->begin);
  return code ? path_error(name_error(code, e->name), "save", o->path) : 0;
}

int safetensors_commit(SafetensorsOut *o) {
  MF_ASSERT(o->missing == 0, "safetensors_commit: %lld bytes were not written",
            (long long)o->missing);
  int code = disk_commit(&o->file);
  return code ? path_error(code, "save", o->path) : 0;
}

void safetensors_abort(SafetensorsOut *o) {
  disk_abort(&o->file);
}
