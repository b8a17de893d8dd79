/* Reading and replacing files. Errors do not name the path: the caller, who knows what the file
 * is for, prefixes it. */
#ifndef MF_DISK_H
#define MF_DISK_H
#include <stddef.h>
#include <stdint.h>

/* Opens a regular file for reading; anything else (a folder, a pipe) is MF_EIO, and
 * *fd -1. */
int disk_open(const char *path, int *fd, int64_t *size);

/* Reads exactly n bytes at offset; a shorter file is MF_EIO. */
int disk_read(int fd, void *data, size_t n, int64_t offset);

/* A new file that takes path's place when complete: other programs, and a kill at any moment, see
 * either the old file or the whole new one. */
typedef struct DiskReplace {
  int fd;
  char *path, *temporary; /* owned; the file to replace, and the new one beside it until commit */
} DiskReplace;

/* The new file gets path's permissions if path exists. A symbolic link is followed; anything but
 * a regular file is refused. On error nothing is left behind. */
int disk_replace(DiskReplace *r, const char *path);
int disk_write(DiskReplace *r, const void *data, size_t n, int64_t offset);

/* Flushes to the disk, then renames. Commit and abort both end the job, whatever they return;
 * abort may follow either. */
int disk_commit(DiskReplace *r);
void disk_abort(DiskReplace *r);

/* Makes a folder unless it is there. */
int disk_make_folder(const char *path);

#endif
