/* Reading files, and replacing them whole.
 *
 * A reader copies with pread and never maps: a file that another program cuts short meanwhile is
 * then an error, not a SIGBUS.
 *
 * A new file is written beside the old one as PATH.tmp-PID-N, so that both are on one file
 * system, flushed, and renamed over it; rename is atomic. Then the folder is flushed, so that the
 * new name survives a power cut. A process killed in between leaves its temporary file; the name
 * says whose it was. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "disk.h"
#include "err.h"
#include "mem.h"
#include "str.h"

enum { NAME_TRIES = 1000 };

static int fail(const char *what) {
  return err_set(MF_EIO, "%s: %m", what);
}

/* -- Reading ----------------------------------------------------------------------------------- */

int disk_open(const char *path, int *fd, int64_t *size) {
  /* Without O_NONBLOCK, opening a pipe would wait for its writer. */
  *fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (*fd < 0) return fail("cannot open");
  struct stat st;
  int code = 0;
  if (fstat(*fd, &st)) code = fail("cannot open");
  else if (S_ISDIR(st.st_mode)) code = err_set(MF_EIO, "is a folder");
  else if (!S_ISREG(st.st_mode)) code = err_set(MF_EIO, "is not a regular file");
  *size = code ? 0 : st.st_size;
  if (code) {
    close(*fd);
    *fd = -1;
  }
  return code;
}

int disk_read(int fd, void *data, size_t n, int64_t offset) {
  for (size_t done = 0; done < n;) {
    ssize_t k = pread(fd, (char *)data + done, n - done, offset + (int64_t)done);
    if (k > 0) done += (size_t)k;
    else if (k == 0)
      return err_set(MF_EIO, "the file ends after %lld bytes", (long long)(offset + (int64_t)done));
    else if (errno != EINTR) return fail("cannot read");
  }
  return 0;
}

/* -- Replacing --------------------------------------------------------------------------------- */

static void forget(DiskReplace *r) {
  if (r->fd >= 0) close(r->fd);
  mem_free(r->path);
  mem_free(r->temporary);
  *r = (DiskReplace){.fd = -1};
}

/* The file that path means, links followed; path itself where there is none yet. */
static char *resolve(const char *path) {
  char *real = realpath(path, NULL);
  char *copy = mem_strdup(real ? real : path);
  free(real);
  return copy;
}

/* Opens a file that no one else has, with path's mode when path exists. */
static int open_temporary(DiskReplace *r, const struct stat *old) {
  for (int i = 0; i < NAME_TRIES; i++) {
    Str name = {0};
    str_printf(&name, "%s.tmp-%ld-%d", r->path, (long)getpid(), i);
    if (name.failed) {
      str_free(&name);
      return err_set(MF_ENOMEM, "out of memory");
    }
    r->fd = open(name.text, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (r->fd >= 0) {
      r->temporary = name.text;
      if (old && fchmod(r->fd, old->st_mode & 0777) && errno != EPERM)
        return fail("cannot set its permissions");
      return 0;
    }
    int why = errno;
    str_free(&name);
    errno = why;
    if (errno != EEXIST) return fail("cannot create a file there");
  }
  return err_set(MF_EIO, "too many temporary files of this name");
}

int disk_replace(DiskReplace *r, const char *path) {
  *r = (DiskReplace){.fd = -1};
  struct stat old;
  bool exists = stat(path, &old) == 0;
  if (exists && S_ISDIR(old.st_mode)) return err_set(MF_EIO, "is a folder");
  if (exists && !S_ISREG(old.st_mode)) return err_set(MF_EIO, "is not a regular file");
  r->path = resolve(path);
  if (!r->path) return err_set(MF_ENOMEM, "out of memory");
  int code = open_temporary(r, exists ? &old : NULL);
  if (code) disk_abort(r);
  return code;
}

int disk_write(DiskReplace *r, const void *data, size_t n, int64_t offset) {
  for (size_t done = 0; done < n;) {
    ssize_t k = pwrite(r->fd, (const char *)data + done, n - done, offset + (int64_t)done);
    if (k > 0) done += (size_t)k;
    else if (k == 0 || errno != EINTR) return fail("cannot write");
  }
  return 0;
}

/* Flushes the folder of path. Some file systems cannot; then the rename is as durable as they
 * make it. */
static void sync_folder(char *path) {
  char *slash = strrchr(path, '/');
  if (slash) slash[slash == path] = 0;
  int fd = open(slash ? path : ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) return;
  fsync(fd);
  close(fd);
}

int disk_commit(DiskReplace *r) {
  int code = 0, fd = r->fd;
  r->fd = -1;
  if (fsync(fd)) code = fail("cannot write");
  if (close(fd) && !code) code = fail("cannot write");
  if (!code && rename(r->temporary, r->path)) code = fail("cannot rename");
  if (code) {
    disk_abort(r);
    return code;
  }
  sync_folder(r->path);
  forget(r);
  return 0;
}

void disk_abort(DiskReplace *r) {
  if (r->temporary) unlink(r->temporary);
  forget(r);
}

int disk_make_folder(const char *path) {
  struct stat st;
  if ((mkdir(path, 0777) && errno != EEXIST) || stat(path, &st))
    return fail("cannot make the folder");
  return S_ISDIR(st.st_mode) ? 0 : err_set(MF_EIO, "is a file, not a folder");
}
