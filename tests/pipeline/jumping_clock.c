/* Loaded by LD_PRELOAD: the machine's clock is ahead by as many seconds as the file $JUMPING_CLOCK says (8 bytes, little
   endian, signed); clocks that are never set are as always. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static int64_t ahead_s(void) {
    static volatile int64_t *shared;
    if (!shared) {
        const char *path = getenv("JUMPING_CLOCK");
        int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
        void *found = fd < 0 ? MAP_FAILED : mmap(NULL, sizeof *shared, PROT_READ, MAP_SHARED, fd, 0);
        if (fd >= 0) close(fd);
        if (found == MAP_FAILED) return 0;
        shared = found;
    }
    return *shared;
}

int clock_gettime(clockid_t which, struct timespec *now) {
    static int (*next)(clockid_t, struct timespec *);
    if (!next) next = (__typeof__(next))dlsym(RTLD_NEXT, "clock_gettime");
    int result = next(which, now);
    if (!result && which == CLOCK_REALTIME) now->tv_sec += ahead_s();
    return result;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    static int (*next)(struct timeval *, void *);
    if (!next) next = (__typeof__(next))dlsym(RTLD_NEXT, "gettimeofday");
    int result = next(now, zone);
    if (!result) now->tv_sec += ahead_s();
    return result;
}

time_t time(time_t *told) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (told) *told = now.tv_sec;
    return now.tv_sec;
}
