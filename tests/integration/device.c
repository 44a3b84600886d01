/* Loaded before libc: the files of rows on SSD are as on a disk that a test takes away. A word of the
 * file in LOST_DEVICE says how: 0: it is there; 1: transfers fail; 2: they do not end. io_uring is
 * not offered, so that all transfers come by here. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

static volatile int *word;

/* At once, for programs of a template do not have its environment. */
__attribute__((constructor)) static void begin(void) {
  const char *path = getenv("LOST_DEVICE");
  int file = path == NULL ? -1 : open(path, O_RDONLY);
  if (file < 0) return;
  void *map = mmap(NULL, sizeof *word, PROT_READ, MAP_SHARED, file, 0);
  if (map == MAP_FAILED) abort();
  close(file);
  word = map;
}

/* Whether a transfer of this file fails. */
static int is_lost(int file) {
  char name[64], path[4096];
  if (word == NULL || *word == 0) return 0;
  snprintf(name, sizeof name, "/proc/self/fd/%d", file);
  ssize_t length = readlink(name, path, sizeof path - 1);
  if (length < 0) return 0;
  path[length] = 0;
  if (strstr(path, "/trireme-rows-") == NULL || strstr(path, ".rows") == NULL) return 0;
  while (*word == 2) usleep(1000);
  if (*word == 0) return 0;
  errno = EIO;
  return 1;
}

#define REPLACE(name, bytes)                                                       \
  ssize_t name(int file, bytes data, size_t size, off_t offset) {                  \
    static ssize_t (*next)(int, bytes, size_t, off_t);                             \
    if (next == NULL) *(void **)&next = dlsym(RTLD_NEXT, #name);                   \
    return is_lost(file) ? -1 : next(file, data, size, offset);                    \
  }
REPLACE(pread, void *)
REPLACE(pread64, void *)
REPLACE(pwrite, const void *)
REPLACE(pwrite64, const void *)

long syscall(long number, ...) {
  static long (*next)(long, ...);
  if (next == NULL) *(void **)&next = dlsym(RTLD_NEXT, "syscall");
  if (number == SYS_io_uring_setup) {
    errno = ENOSYS;
    return -1;
  }
  va_list list;
  va_start(list, number);
  long a[6];
  for (int i = 0; i < 6; ++i) a[i] = va_arg(list, long);
  va_end(list);
  return next(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}
