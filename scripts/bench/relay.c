/*
 * relay - the floor of scripts/bench/compare: what the kernel alone costs.
 *
 * It answers the SMQ handshake, and from then on passes on whatever a connection receives, without looking at it: one recv, one send
 * per destination. A publisher's destination is the topic of its last Create or Subscribe; a client without a topic is one half of
 * a ping pair, and its bytes go to the ETID in their first frame. No broker can do less and still deliver.
 *
 * Build: gcc -O2 -o relay relay.c        Use: relay PORT     (loopback only, single thread, for measuring)
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

enum { MAX_FD = 65536, MAX_TOPICS = 4096, BUFFER = 256 * 1024 };

typedef struct { char name[24]; int *fds; int count, capacity; } topic;
typedef struct { enum { CLOSED, HTTP, CONTROL, DATA } state; int topic; uint8_t *out; size_t out_len, out_cap; } conn;

static conn conns[MAX_FD];
static topic topics[MAX_TOPICS];
static int n_topics, ep;
static uint8_t buffer[BUFFER];

static uint32_t be32(const uint8_t *p) { return (uint32_t)p[0] << 24 | p[1] << 16 | p[2] << 8 | p[3]; }
static void put32(uint8_t *p, uint32_t v) { p[0] = v >> 24; p[1] = v >> 16; p[2] = v >> 8; p[3] = v; }

static void arm(int fd, int out) {
    struct epoll_event e = { .events = EPOLLIN | (out ? EPOLLOUT : 0), .data.fd = fd };
    epoll_ctl(ep, EPOLL_CTL_MOD, fd, &e);
}
static void pass(int fd, const uint8_t *p, size_t n) {
    conn *c = &conns[fd];
    if (c->state == CLOSED) return;
    if (!c->out_len) {
        ssize_t k = send(fd, p, n, MSG_NOSIGNAL);
        if (k > 0) { p += k; n -= (size_t)k; }
        if (!n) return;
        arm(fd, 1);
    }
    if (c->out_len + n > c->out_cap) c->out = realloc(c->out, c->out_cap = (c->out_len + n) * 2);
    memcpy(c->out + c->out_len, p, n);
    c->out_len += n;
}
static void drain(int fd) {
    conn *c = &conns[fd];
    ssize_t k = send(fd, c->out, c->out_len, MSG_NOSIGNAL);
    if (k <= 0) return;
    memmove(c->out, c->out + k, c->out_len -= (size_t)k);
    if (!c->out_len) arm(fd, 0);
}
static int topic_of(const uint8_t *name, size_t n) {
    for (int i = 0; i < n_topics; i++)
        if (strlen(topics[i].name) == n && !memcmp(topics[i].name, name, n)) return i;
    if (n_topics == MAX_TOPICS || n >= sizeof topics[0].name) { fputs("relay: too many topics\n", stderr); exit(1); }
    memcpy(topics[n_topics].name, name, n);
    return n_topics++;
}
static void subscribe(int t, int fd) {
    topic *p = &topics[t];
    if (p->count == p->capacity) p->fds = realloc(p->fds, sizeof(int) * (size_t)(p->capacity = p->capacity * 2 + 8));
    p->fds[p->count++] = fd;
}
static void control(int fd, const uint8_t *p, size_t n) { /* one frame of the handshake */
    uint8_t r[64] = { 0 };
    if (p[2] == 2) {
        r[1] = 8; r[2] = 3; put32(r + 4, (uint32_t)fd + 0x10000); send(fd, r, 8, MSG_NOSIGNAL);
    } else if (p[2] == 4 || p[2] == 6) {
        int t = topic_of(p + 3, n - 3);
        if (p[2] == 4) subscribe(t, fd);
        conns[fd].topic = t; r[1] = (uint8_t)(8 + n - 3); r[2] = p[2] + 1; put32(r + 4, (uint32_t)t + 0x1000000);
        memcpy(r + 8, p + 3, n - 3); send(fd, r, r[1], MSG_NOSIGNAL);
    }
}
static void close_conn(int fd) {
    conn *c = &conns[fd];
    for (int i = 0; c->topic >= 0 && i < topics[c->topic].count; i++)
        if (topics[c->topic].fds[i] == fd) { topics[c->topic].fds[i] = topics[c->topic].fds[--topics[c->topic].count]; break; }
    free(c->out); *c = (conn){ .topic = -1 }; close(fd);
}
static void readable(int fd) {
    conn *c = &conns[fd];
    ssize_t n = recv(fd, buffer, BUFFER, 0);
    if (n <= 0) { close_conn(fd); return; }
    if (c->state == HTTP) {
        static const char reply[] = "HTTP/1.1 200 OK\r\nSmqBroker: true\r\n\r\n\0\x11\1\1abcd127.0.0.1";
        send(fd, reply, sizeof reply - 1, MSG_NOSIGNAL); c->state = CONTROL; return;
    }
    if (c->state == CONTROL && n > 2 && buffer[2] != 8) { control(fd, buffer, (size_t)n); return; }
    c->state = DATA;
    if (c->topic < 0) { int to = (int)(be32(buffer + 3) - 0x10000); if (to > 0 && to < MAX_FD) pass(to, buffer, (size_t)n); return; }
    topic *t = &topics[c->topic];
    for (int i = 0; i < t->count; i++) pass(t->fds[i], buffer, (size_t)n);
}
static void accept_all(int ls) {
    for (int fd; (fd = accept4(ls, NULL, NULL, SOCK_NONBLOCK)) >= 0; ) {
        int one = 1; setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        conns[fd] = (conn){ .state = HTTP, .topic = -1 };
        struct epoll_event e = { .events = EPOLLIN, .data.fd = fd };
        epoll_ctl(ep, EPOLL_CTL_ADD, fd, &e);
    }
}
int main(int argc, char **argv) {
    struct sockaddr_in a = { .sin_family = AF_INET, .sin_port = htons((uint16_t)(argc > 1 ? atoi(argv[1]) : 0)) };
    inet_pton(AF_INET, "127.0.0.1", &a.sin_addr);
    int ls = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0), one = 1;
    setsockopt(ls, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    struct rlimit rl; getrlimit(RLIMIT_NOFILE, &rl); rl.rlim_cur = rl.rlim_max; setrlimit(RLIMIT_NOFILE, &rl);
    if (bind(ls, (void *)&a, sizeof a) || listen(ls, 4096)) { perror("relay"); return 1; }
    ep = epoll_create1(0);
    struct epoll_event e = { .events = EPOLLIN, .data.fd = ls }, ev[512];
    epoll_ctl(ep, EPOLL_CTL_ADD, ls, &e);
    for (;;) {
        int n = epoll_wait(ep, ev, 512, -1);
        for (int i = 0; i < n; i++) {
            int fd = ev[i].data.fd;
            if (fd == ls) { accept_all(ls); continue; }
            if (ev[i].events & EPOLLOUT) drain(fd);
            if (ev[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) readable(fd);
        }
    }
}
