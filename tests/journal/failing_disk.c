/* Loaded by LD_PRELOAD: the disk under $FAILING_DISK does what the file $FAILING_DISK_CONTROL says at this moment.
   Each line there is "write|sync|change ERRNO DELAY_MS [COUNT [PART]]": calls wait so long, then fail with that number
   unless it is 0; with a COUNT of 0 or more the first so many do, then the others are as always; with a PART only those
   of files with it in their path. A "change" makes, renames, removes or shortens a file, or opens it for writing. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

static int counted[3];

static int is_under(const char *path) {
    const char *under = getenv("FAILING_DISK");
    return under && !strncmp(path, under, strlen(under));
}

/* Returns whether the call on this path fails, with errno set. */
static int fails_at(const char *path, const char *call) {
    char said[16], part[128];
    int number, delay_ms, count, found = 0;
    const char *control = getenv("FAILING_DISK_CONTROL");
    FILE *file = control && is_under(path) ? fopen(control, "re") : NULL;
    if (!file) return 0;
    char line[256];
    while (!found && fgets(line, sizeof line, file)) {
        count = -1;
        part[0] = 0;
        int fields = sscanf(line, "%15s %d %d %d %127s", said, &number, &delay_ms, &count, part);
        found = fields >= 3 && !strcmp(said, call) && strstr(path, part);
    }
    fclose(file);
    if (!found) return 0;
    int *done = &counted[call[0] == 's' ? 0 : call[0] == 'w' ? 1 : 2];
    if (count >= 0 && *done >= count) return 0;
    ++*done;
    struct timespec delay = {delay_ms / 1000, delay_ms % 1000 * 1000000L};
    nanosleep(&delay, NULL);
    errno = number;
    return number != 0;
}

static int fails(int fd, const char *call) {
    char place[64], path[PATH_MAX];
    snprintf(place, sizeof place, "/proc/self/fd/%d", fd);
    ssize_t size = readlink(place, path, sizeof path - 1);
    if (size <= 0) return 0;
    path[size] = 0;
    return fails_at(path, call);
}

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

int fsync(int fd) { return fails(fd, "sync") ? -1 : NEXT(fsync)(fd); }
int fdatasync(int fd) { return fails(fd, "sync") ? -1 : NEXT(fdatasync)(fd); }
ssize_t write(int fd, const void *data, size_t size) { return fails(fd, "write") ? -1 : NEXT(write)(fd, data, size); }
ssize_t writev(int fd, const struct iovec *data, int count) {
    return fails(fd, "write") ? -1 : NEXT(writev)(fd, data, count);
}
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) {
    return fails(fd, "write") ? -1 : NEXT(pwrite64)(fd, data, size, at);
}
ssize_t pwritev64(int fd, const struct iovec *data, int count, off64_t at) {
    return fails(fd, "write") ? -1 : NEXT(pwritev64)(fd, data, count, at);
}
ssize_t pwritev64v2(int fd, const struct iovec *data, int count, off64_t at, int flags) {
    return fails(fd, "write") ? -1 : NEXT(pwritev64v2)(fd, data, count, at, flags);
}

static int opened(const char *name, const char *path, int flags, mode_t mode) {
    int (*next)(const char *, int, ...) = (int (*)(const char *, int, ...))dlsym(RTLD_NEXT, name);
    if ((flags & (O_CREAT | O_WRONLY | O_RDWR)) && fails_at(path, "change")) return -1;
    return next(path, flags, mode);
}

#define OPEN(name)                                         \
    int name(const char *path, int flags, ...) {           \
        va_list more;                                      \
        va_start(more, flags);                             \
        mode_t mode = flags & O_CREAT ? va_arg(more, int) : 0; \
        va_end(more);                                      \
        return opened(#name, path, flags, mode);           \
    }
OPEN(open)
OPEN(open64)

int rename(const char *path, const char *to) { return fails_at(to, "change") ? -1 : NEXT(rename)(path, to); }
int link(const char *path, const char *to) { return fails_at(to, "change") ? -1 : NEXT(link)(path, to); }
int unlink(const char *path) { return fails_at(path, "change") ? -1 : NEXT(unlink)(path); }
int mkdir(const char *path, mode_t mode) { return fails_at(path, "change") ? -1 : NEXT(mkdir)(path, mode); }
int ftruncate64(int fd, off64_t size) { return fails(fd, "change") ? -1 : NEXT(ftruncate64)(fd, size); }
