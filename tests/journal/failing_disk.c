/* Loaded by LD_PRELOAD: the disk under $FAILING_DISK does what the file $FAILING_DISK_CONTROL says at this moment.
   Each line there is "write|sync ERRNO DELAY_MS [COUNT]": calls wait so long, then fail with that number unless it is 0;
   with a COUNT the first so many do, then the others are as always. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

static int counted[2];

static int concerns(int fd) {
    char link[64], path[PATH_MAX];
    const char *under = getenv("FAILING_DISK");
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t size = readlink(link, path, sizeof path - 1);
    return under && size > 0 && !strncmp(path, under, strlen(under));
}

/* Returns whether the call fails, with errno set. */
static int fails(int fd, const char *call) {
    char said[16];
    int number, delay_ms, count, found = 0, fields;
    const char *control = getenv("FAILING_DISK_CONTROL");
    FILE *file = control && concerns(fd) ? fopen(control, "re") : NULL;
    if (!file) return 0;
    char line[128];
    while (!found && fgets(line, sizeof line, file)) {
        count = -1;
        fields = sscanf(line, "%15s %d %d %d", said, &number, &delay_ms, &count);
        found = fields >= 3 && !strcmp(said, call);
    }
    fclose(file);
    if (!found) return 0;
    int *done = &counted[call[0] == 's'];
    if (count >= 0 && *done >= count) return 0;
    ++*done;
    struct timespec delay = {delay_ms / 1000, delay_ms % 1000 * 1000000L};
    nanosleep(&delay, NULL);
    errno = number;
    return number != 0;
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
