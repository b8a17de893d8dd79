/* safetensors: what is written comes back, a hostile file is an error that names file and reason,
 * a killed save leaves the old file whole, and no change of single bytes makes the reader stray. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "err.h"
#include "safetensors.h"

static char folder[] = "/tmp/moonflow-spec-XXXXXX", path[64];

static void put(const void *bytes, size_t n) {
  FILE *f = fopen(path, "wb");
  fwrite(bytes, 1, n, f);
  fclose(f);
}

/* A file of that header, padded or not, and `data` bytes of zeros. */
static void put_file(const char *header, size_t data) {
  size_t n = strlen(header);
  char *bytes = calloc(1, 8 + n + data);
  uint64_t size = n;
  memcpy(bytes, &size, 8);
  memcpy(bytes + 8, header, n);
  put(bytes, 8 + n + data);
  free(bytes);
}

/* Opens path and reads every tensor into memory of its exact size. */
static int load(void) {
  Safetensors f;
  int code = safetensors_open(&f, path);
  if (code) return code;
  for (size_t i = 0; i < f.n && !code; i++) {
    void *p = malloc((size_t)(f.entries[i].end - f.entries[i].begin));
    code = safetensors_read(&f, &f.entries[i], p);
    free(p);
  }
  safetensors_close(&f);
  return code;
}

static void refuse(const char *what, const char *why) {
  int code = load();
  CHECK(code == MF_EIO, "%s: code %d", what, code);
  CHECK(strstr(err_text(), path), "%s: the error does not name the file: %s", what, err_text());
  CHECK(strstr(err_text(), why), "%s: the error lacks '%s': %s", what, why, err_text());
}

static void refuse_header(const char *header, size_t data, const char *why) {
  put_file(header, data);
  refuse(header, why);
}

/* -- Round trip -------------------------------------------------------------------------------- */

static int save(SafetensorsEntry *e, size_t n, const void *const *data,
                const SafetensorsPair *pairs, size_t n_pairs) {
  SafetensorsOut o;
  int code = safetensors_create(&o, path, e, n, pairs, n_pairs);
  for (size_t i = 0; i < n && !code; i++) code = safetensors_write(&o, &e[i], data[i]);
  if (!code) return safetensors_commit(&o);
  safetensors_abort(&o);
  return code;
}

static SafetensorsEntry entry(const char *name, DType t, int ndim, int64_t a, int64_t b) {
  return (SafetensorsEntry){.name = (char *)name, .dtype = t, .ndim = ndim, .shape = {a, b}};
}

static const SafetensorsEntry *find(const Safetensors *f, const char *name) {
  for (size_t i = 0; i < f->n; i++)
    if (!strcmp(f->entries[i].name, name)) return &f->entries[i];
  return NULL;
}

static void round_trip(void) {
  uint8_t bytes[DTYPE_COUNT][48];
  SafetensorsEntry e[DTYPE_COUNT + 2];
  const void *data[DTYPE_COUNT + 2];
  for (int t = 0; t < DTYPE_COUNT; t++) {
    for (int i = 0; i < 48; i++) bytes[t][i] = (uint8_t)(t == BOOL ? i & 1 : i * 7 + t);
    e[t] = entry(dtype_name((DType)t), (DType)t, 2, 2, 3);
    data[t] = bytes[t];
  }
  e[DTYPE_COUNT] = entry("scalar \"\\\n\xC3\xA9", F32, 0, 0, 0);
  e[DTYPE_COUNT + 1] = entry("", I64, 2, 0, 5);
  data[DTYPE_COUNT] = data[DTYPE_COUNT + 1] = bytes[3];
  SafetensorsPair pair = {"format", "x \"y\""};
  CHECK(!save(e, DTYPE_COUNT + 2, data, &pair, 1), "%s", err_text());
  Safetensors f;
  CHECK(!safetensors_open(&f, path), "%s", err_text());
  CHECK(f.n == DTYPE_COUNT + 2 && f.data_start % 8 == 0, "%zu entries, data at %lld", f.n,
        (long long)f.data_start);
  CHECK(f.n_metadata == 1 && !strcmp(f.metadata[0].value, "x \"y\""), "metadata");
  for (int t = 0; t < DTYPE_COUNT; t++) {
    const SafetensorsEntry *g = find(&f, dtype_name((DType)t));
    uint8_t back[48];
    CHECK(g && g->dtype == (DType)t && g->ndim == 2 && g->shape[0] == 2 && g->shape[1] == 3,
          "entry %d", t);
    CHECK((g->begin + f.data_start) % (int64_t)dtype_size((DType)t) == 0, "entry %d is not aligned",
          t);
    CHECK(!safetensors_read(&f, g, back) && !memcmp(back, bytes[t], 6 * dtype_size((DType)t)),
          "data %d", t);
  }
  const SafetensorsEntry *s = find(&f, "scalar \"\\\n\xC3\xA9"), *z = find(&f, "");
  CHECK(s && s->ndim == 0 && s->end - s->begin == 4, "the scalar");
  CHECK(z && z->ndim == 2 && z->shape[1] == 5 && z->end == z->begin, "the empty one");
  safetensors_close(&f);
}

static void writer_refuses(void) {
  const float x[2] = {0};
  const void *data[2] = {x, x};
  SafetensorsEntry twice[2] = {entry("a", F32, 1, 2, 0), entry("a", F32, 1, 2, 0)};
  CHECK(save(twice, 2, data, NULL, 0) && strstr(err_text(), "twice"), "%s", err_text());
  SafetensorsEntry reserved = entry("__metadata__", F32, 1, 2, 0);
  CHECK(save(&reserved, 1, data, NULL, 0) && strstr(err_text(), "__metadata__"), "%s", err_text());
  SafetensorsEntry latin = entry("\xE9", F32, 1, 2, 0);
  CHECK(save(&latin, 1, data, NULL, 0) && strstr(err_text(), "UTF-8"), "%s", err_text());
  SafetensorsPair pairs[2] = {{"k", "1"}, {"k", "2"}};
  SafetensorsEntry one = entry("a", F32, 1, 2, 0);
  CHECK(save(&one, 1, data, pairs, 2) && strstr(err_text(), "twice"), "%s", err_text());
  char good[sizeof path];
  strcpy(good, path);
  strcpy(path, folder);
  CHECK(save(&one, 1, data, NULL, 0) && strstr(err_text(), "folder"), "%s", err_text());
  snprintf(path, sizeof path, "%s/none/x", folder);
  CHECK(save(&one, 1, data, NULL, 0) && strstr(err_text(), "No such file"), "%s", err_text());
  snprintf(path, sizeof path, "/dev/null");
  CHECK(save(&one, 1, data, NULL, 0) && strstr(err_text(), "regular"), "%s", err_text());
  strcpy(path, good);
}

/* A save through a link changes the file it names, and keeps its permissions. */
static void keeps_links_and_modes(void) {
  const float x[2] = {1, 2};
  const void *data = x;
  SafetensorsEntry one = entry("a", F32, 1, 2, 0);
  put("old", 3);
  chmod(path, 0640);
  char target[sizeof path], link[sizeof path];
  strcpy(target, path);
  snprintf(link, sizeof link, "%s/link", folder);
  CHECK(!symlink(target, link), "symlink");
  strcpy(path, link);
  CHECK(!save(&one, 1, &data, NULL, 0), "%s", err_text());
  struct stat st;
  CHECK(!lstat(link, &st) && S_ISLNK(st.st_mode), "the link was replaced");
  CHECK(!stat(target, &st) && (st.st_mode & 0777) == 0640 && st.st_size > 3, "mode %o", st.st_mode);
  unlink(link);
  strcpy(path, target);
}

/* -- Hostile files ----------------------------------------------------------------------------- */

#define T(dtype, shape, offsets) \
  "{\"dtype\":\"" dtype "\",\"shape\":" shape ",\"data_offsets\":" offsets "}"
#define ONE(dtype, shape, offsets) "{\"a\":" T(dtype, shape, offsets) "}"

static void hostile_sizes(void) {
  put("", 0);
  refuse("an empty file", "too few");
  put("1234567", 7);
  refuse("seven bytes", "too few");
  put("\0\0\0\0\0\0\0\0", 8);
  refuse("an empty header", "'{'");
  put("\x10\0\0\0\0\0\0\0{}", 10);
  refuse("a header beyond the file", "header of 16 bytes");
  put("\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF{}", 10);
  refuse("the largest header", "header of 18446744073709551615 bytes");
  put("\x08\0\0\0\0\0\0\x80{}", 10);
  refuse("a negative header", "header of 9223372036854775816 bytes");
  put("\x01\xE1\xF5\x05\0\0\0\0{}", 10);
  CHECK(!truncate(path, 200000000), "truncate");
  refuse("a header of 100,000,001 bytes", "at most 100000000");
  unlink(path);
  refuse("a missing file", "No such file");
  mkdir(path, 0700);
  refuse("a folder", "folder");
  rmdir(path);
  CHECK(!mkfifo(path, 0600), "mkfifo");
  refuse("a pipe", "regular");
  unlink(path);
}

static void hostile_headers(void) {
  refuse_header("[]", 0, "'{'");
  refuse_header(" {}", 0, "'{'");
  refuse_header("{", 0, "not JSON");
  refuse_header("{}}", 0, "not JSON");
  refuse_header("{\"a\":1}", 0, "an object for each tensor");
  refuse_header("{\"a\":{}}", 0, "dtype is missing");
  refuse_header("{\"a\":{\"dtype\":\"F32\",\"shape\":[1]}}", 4, "data_offsets is missing");
  refuse_header("{\"a\":{\"dtype\":\"F32\",\"data_offsets\":[0,4]}}", 4, "shape is missing");
  refuse_header(
      "{\"a\":{\"dtype\":\"F32\",\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}", 4,
      "dtype occurs twice");
  refuse_header("{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4],\"x\":1}}", 4,
                "unknown field 'x'");
  refuse_header(ONE("F31", "[1]", "[0,4]"), 4, "dtype 'F31'");
  refuse_header(ONE("f32", "[1]", "[0,4]"), 4, "dtype 'f32'");
  refuse_header(ONE("F8_E4M3", "[1]", "[0,1]"), 1, "dtype 'F8_E4M3'");
  refuse_header("{\"a\":{\"dtype\":7,\"shape\":[1],\"data_offsets\":[0,4]}}", 4, "a name as dtype");
  refuse_header(ONE("F32", "1", "[0,4]"), 4, "a list");
  refuse_header(ONE("F32", "[-1]", "[0,4]"), 4, "-1, which is negative");
  refuse_header(ONE("F32", "[1.0]", "[0,4]"), 4, "no whole number");
  refuse_header(ONE("F32", "[\"1\"]", "[0,4]"), 4, "no whole number");
  refuse_header(ONE("F32", "[9223372036854775808]", "[0,4]"), 4, "no whole number");
  refuse_header(ONE("F32", "[1,1,1,1,1,1,1,1,1,1,1,1,1]", "[0,4]"), 4, "more than 12");
  refuse_header(ONE("F32", "[4611686018427387905]", "[0,4]"), 4, "overflows");
  refuse_header(ONE("F32", "[4294967296,4294967296]", "[0,0]"), 0, "overflows");
  refuse_header(ONE("F32", "[0,4294967296,4294967296]", "[0,0]"), 0, "overflows");
  refuse_header(ONE("F32", "[2]", "[0,4]"), 4, "give it 4 bytes, but shape (2,) of float32 has 8");
  refuse_header(ONE("F32", "[1]", "[0,8]"), 8, "8 bytes, but shape (1,) of float32 has 4");
  refuse_header(ONE("F32", "[1]", "[4,0]"), 4, "end before they begin");
  refuse_header(ONE("F32", "[1]", "[-4,0]"), 4, "-4, which is negative");
  refuse_header(ONE("F32", "[1]", "[0]"), 4, "1 numbers instead of 2");
  refuse_header(ONE("F32", "[1]", "[0,4,8]"), 4, "more than 2");
  refuse_header(ONE("F32", "[1]", "[9223372036854775803,9223372036854775807]"), 4,
                "beyond the end");
  refuse_header("{\"__metadata__\":{\"a\":1}}", 0, "only strings");
  refuse_header("{\"__metadata__\":[]}", 0, "an object as __metadata__");
  refuse_header("{\"__metadata__\":{},\"__metadata__\":{}}", 0, "occurs twice");
  refuse_header("{\"__metadata__\":{\"k\":\"1\",\"k\":\"2\"}}", 0, "'k' occurs twice");
}

static void hostile_ranges(void) {
  refuse_header(ONE("F32", "[2]", "[0,8]"), 4, "truncated");
  refuse_header(ONE("F32", "[1]", "[0,4]"), 5, "1 bytes follow the last tensor");
  refuse_header("{}", 1, "1 bytes follow");
  refuse_header("{\"a\":" T("F32", "[1]", "[0,4]") ",\"a\":" T("F32", "[1]", "[4,8]") "}", 8,
                "the name occurs twice");
  refuse_header("{\"a\":" T("F32", "[1]", "[0,4]") ",\"\\u0061\":" T("F32", "[1]", "[4,8]") "}", 8,
                "the name occurs twice");
  refuse_header("{\"a\":" T("F32", "[2]", "[0,8]") ",\"b\":" T("F32", "[2]", "[4,12]") "}", 12,
                "'b': overlaps");
  refuse_header("{\"a\":" T("F32", "[1]", "[0,4]") ",\"b\":" T("F32", "[1]", "[0,4]") "}", 4,
                "'b': overlaps");
  refuse_header("{\"a\":" T("F32", "[1]", "[0,4]") ",\"b\":" T("F32", "[1]", "[8,12]") "}", 12,
                "'b': begins after a hole");
  refuse_header(ONE("F32", "[1]", "[4,8]"), 8, "'a': begins after a hole");
  refuse_header("{\"a\":" T("F32", "[2]", "[0,8]") ",\"b\":" T("F32", "[0]", "[4,4]") "}", 8,
                "'b': overlaps");
  refuse_header("{\"a\\u001b[2J\":" T("F32", "[1]", "[0,5]") "}", 5, "'a?[2J'");
  put_file(ONE("BOOL", "[3]", "[0,3]"), 0);
  FILE *f = fopen(path, "ab");
  fwrite("\0\1\2", 1, 3, f);
  fclose(f);
  refuse("a bool of 2", "byte 2 is 2");
}

static void unusual_but_right(void) {
  static const struct {
    const char *header;
    size_t data;
  } cases[] = {
      {"{}", 0},
      {"{ }   ", 0},
      {"{\"__metadata__\":{}}", 0},
      {ONE("F64", "[]", "[0,8]") "     ", 8},
      {"{\"b\":" T("F32", "[1]", "[4,8]") ",\"a\":" T("F32", "[1]", "[0,4]") "}", 8},
      {"{\"e\":" T("F32", "[0]", "[4,4]") ",\"a\":" T("F32", "[1]", "[0,4]") ",\"d\":" T(
           "I8", "[0,3]", "[0,0]") "}",
       4},
      {ONE("F32", "[1,1,1,1,1,1,1,1,1,1,1,1]", "[0,4]"), 4},
  };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    put_file(cases[i].header, cases[i].data);
    CHECK(!load(), "%s: %s", cases[i].header, err_text());
  }
}

/* Every truncation is an error; changed bytes may give anything but a stray access. */
static void survives(void) {
  static const char header[] = "{\"__metadata__\":{\"k\":\"v\"},\"a\":" T(
      "F32", "[2,1]", "[0,8]") ",\"b\":" T("BOOL", "[2]", "[8,10]") "}";
  char file[8 + sizeof header - 1 + 10] = {0};
  uint64_t n = sizeof header - 1;
  memcpy(file, &n, 8);
  memcpy(file + 8, header, n);
  put(file, sizeof file);
  CHECK(!load(), "%s", err_text());
  for (size_t i = 0; i < sizeof file; i++) {
    put(file, i);
    CHECK(load() == MF_EIO, "a file cut at %zu was accepted", i);
  }
  for (size_t i = 0; i < sizeof file; i++)
    for (int bit = 0; bit < 8; bit++) {
      file[i] ^= (char)(1 << bit);
      put(file, sizeof file);
      load();
      file[i] ^= (char)(1 << bit);
    }
}

/* -- A killed save ----------------------------------------------------------------------------- */

enum { KILLS = 60, FLOATS = 1 << 18 };

/* Saves files whose numbers are all the same, another number each time, until killed. */
static void save_forever(void) {
  static float x[FLOATS];
  const void *data = x;
  for (float v = 1;; v++) {
    for (int i = 0; i < FLOATS; i++) x[i] = v;
    SafetensorsEntry e = entry("a", F32, 1, FLOATS, 0);
    if (save(&e, 1, &data, NULL, 0)) _exit(3);
  }
}

static bool is_whole(void) {
  static float x[FLOATS];
  Safetensors f;
  if (safetensors_open(&f, path)) return false;
  bool ok = f.n == 1 && f.entries[0].shape[0] == FLOATS && !safetensors_read(&f, f.entries, x);
  for (int i = 1; i < FLOATS && ok; i++) ok = x[i] == x[0];
  safetensors_close(&f);
  return ok;
}

static void remove_leftovers(pid_t pid) {
  char name[sizeof path + 32];
  snprintf(name, sizeof name, "%s.tmp-%ld-0", path, (long)pid);
  unlink(name);
}

static void killed(void) {
  unlink(path);
  float *x = calloc(FLOATS, sizeof *x);
  const void *data = x;
  SafetensorsEntry e = entry("a", F32, 1, FLOATS, 0);
  CHECK(!save(&e, 1, &data, NULL, 0), "%s", err_text());
  free(x);
  for (int k = 0; k < KILLS; k++) {
    pid_t pid = fork();
    if (pid == 0) save_forever();
    usleep((useconds_t)(1000 + k * 700));
    kill(pid, SIGKILL);
    int status;
    waitpid(pid, &status, 0);
    CHECK(WIFSIGNALED(status), "the child could not save");
    CHECK(is_whole(), "kill %d left a broken file: %s", k, err_text());
    remove_leftovers(pid);
  }
}

static void leaves_nothing(void) {
  unlink(path);
  CHECK(!rmdir(folder), "files were left in %s", folder);
}

int main(void) {
  if (!mkdtemp(folder)) return 2;
  snprintf(path, sizeof path, "%s/x.safetensors", folder);
  RUN(round_trip);
  RUN(writer_refuses);
  RUN(keeps_links_and_modes);
  RUN(hostile_sizes);
  RUN(hostile_headers);
  RUN(hostile_ranges);
  RUN(unusual_but_right);
  RUN(survives);
  RUN(killed);
  RUN(leaves_nothing);
  return check_end();
}
