/*
 * Pid 1 of a sandbox, the parent of every command.
 *
 * It drops privileges (seccomp allow-list, capability bounding set), then serves two socketpairs of which
 * it holds both ends: fds 100/101 for envd, 102/103 for the node. A client outside duplicates its
 * end (101 or 103) with pidfd_getfd. The datagrams are described in paddock/envd/process/init_protocol.py.
 *
 * Invariants:
 *  - It never blocks: a reply that does not fit stays with its channel (at most one; no request is read
 *    meanwhile), exits stay in the process table until they are sent.
 *  - It keeps copies of the outer ends of pipes and ptys until FORGET, so that the exit of a client does not
 *    break a pipe and a checkpoint includes both ends.
 *  - It has no descriptor of a mount outside, its own session, and no parent-death signal.
 *  - No process inside may trace it or read its descriptors (GUARD in confine.h).
 *
 * The parent may pass a socket at fd 104: init closes it when it is confined and serves.
 *
 * Usage: init sudo|locked      (locked: no_new_privs for everything below)
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <poll.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <termios.h>
#include <unistd.h>
#include <dirent.h>

#include "confine.h"

#ifndef TIOCGPTPEER
#define TIOCGPTPEER _IO('T', 0x41)
#endif

enum { CHANNELS = 2, FIRST_FD = 100, READY_FD = FIRST_FD + 2 * CHANNELS, DATAGRAM = 65536, MAX_REQUEST = 4 << 20, MAX_PROCS = 8192, MAX_MEMO = 48000, MAX_PASSES = 100 };
enum { PING = 1, ATTACH, SPAWN, SIGNAL, CLOSE_STDIN, FORGET, REPLY = 0x80, EXIT = 0x40, MORE = 1 };
enum { F_PTY = 1, F_STDIN = 2, F_MERGE = 4 };          /* of a spawn */
enum { R_PTY = 1, R_STDIN = 2, R_EXITED = 4 };         /* of a record */
enum { ST_STREAMS = 1, ST_FORK, ST_IDENTITY, ST_DIRECTORY, ST_EXEC, ST_REQUEST };
enum { VERSION = 1 };

struct header { uint8_t op, flags; uint16_t zero; uint32_t seq; int32_t status; } __attribute__((packed));
struct record {
    uint32_t id, pid, flags, fdmask; int32_t wait_status; uint32_t memo_size;
    uint64_t user_us, system_us, peak_rss_kib;
} __attribute__((packed));
struct spawn {
    uint32_t id, uid, gid; uint16_t ngroups, rows, cols, flags; int16_t oom, nice; uint32_t argc, envc;
} __attribute__((packed));

struct proc {
    struct proc *next;
    uint32_t id;
    pid_t pid;
    int channel, exited, sent, pty;
    int fd[4];                 /* stdin (write end), stdout, stderr, pty master; -1 for none */
    int wait_status;
    struct rusage usage;
    uint32_t memo_size;
    char *memo;
};

struct channel {
    int fd;
    uint8_t *request;          /* a request in several datagrams */
    size_t request_size;
    struct header request_head;
    int pending;               /* a reply waits for buffer space */
    size_t out_size;
    int out_fds[4], out_nfds;
    int attaching;             /* the list continues from `cursor` when there is buffer space */
    uint32_t attach_seq, cursor;
    uint64_t session;
    uint8_t out[sizeof(struct header) + sizeof(struct record) + MAX_MEMO];
};

static struct channel channels[CHANNELS];
static struct proc *procs;     /* newest first */
static int nprocs;
static int locked;
static volatile sig_atomic_t child_ended;
static uint8_t datagram[DATAGRAM];

static void on_child(int signo) { (void)signo; child_ended = 1; }

static void shut(int *fd) { if (*fd >= 0) close(*fd); *fd = -1; }

static struct proc *find(int channel, uint32_t id) {
    for (struct proc *p = procs; p; p = p->next)
        if (p->id == id && p->channel == channel) return p;
    return NULL;
}

/* ---- sending ---- */

static int transmit(int fd, const void *data, size_t size, const int *fds, int nfds) {
    struct iovec iov = { (void *)data, size };
    union { char buf[CMSG_SPACE(4 * sizeof(int))]; struct cmsghdr align; } control;
    struct msghdr msg = { .msg_iov = &iov, .msg_iovlen = 1 };
    if (nfds) {
        memset(&control, 0, sizeof control);
        msg.msg_control = control.buf;
        msg.msg_controllen = CMSG_SPACE(nfds * sizeof(int));
        struct cmsghdr *c = CMSG_FIRSTHDR(&msg);
        c->cmsg_level = SOL_SOCKET; c->cmsg_type = SCM_RIGHTS; c->cmsg_len = CMSG_LEN(nfds * sizeof(int));
        memcpy(CMSG_DATA(c), fds, nfds * sizeof(int));
    }
    ssize_t n;
    do n = sendmsg(fd, &msg, MSG_DONTWAIT | MSG_NOSIGNAL); while (n < 0 && errno == EINTR);
    return n < 0 ? -errno : 0;
}

static void flush(struct channel *c) {
    int r = transmit(c->fd, c->out, c->out_size, c->out_fds, c->out_nfds);
    /* Too many descriptors in flight: a client does not read; wait as for buffer space. */
    c->pending = r == -EAGAIN || r == -ENOBUFS || r == -ETOOMANYREFS || r == -ENOMEM;
}

static void respond(struct channel *c, const struct header *q, int status, const void *body, size_t size) {
    struct header h = { q->op | REPLY, 0, 0, q->seq, status };
    memcpy(c->out, &h, sizeof h);
    if (size) memcpy(c->out + sizeof h, body, size);
    c->out_size = sizeof h + size;
    c->out_nfds = 0;
    flush(c);
}

static size_t put_record(uint8_t *at, struct proc *p, int with_fds, int *fds, int *nfds) {
    struct record r = { .id = p->id, .pid = p->pid, .wait_status = p->wait_status };
    r.flags = (p->pty ? R_PTY : 0) | (p->fd[0] >= 0 ? R_STDIN : 0) | (p->exited ? R_EXITED : 0);
    r.user_us = p->usage.ru_utime.tv_sec * 1000000ull + p->usage.ru_utime.tv_usec;
    r.system_us = p->usage.ru_stime.tv_sec * 1000000ull + p->usage.ru_stime.tv_usec;
    r.peak_rss_kib = p->usage.ru_maxrss;
    *nfds = 0;
    if (with_fds) {
        for (int i = 0; i < 4; i++)
            if (p->fd[i] >= 0) { r.fdmask |= 1u << i; fds[(*nfds)++] = p->fd[i]; }
        r.memo_size = p->memo_size;
        if (p->memo_size) memcpy(at + sizeof r, p->memo, p->memo_size);
    }
    memcpy(at, &r, sizeof r);
    return sizeof r + r.memo_size;
}

static void respond_record(struct channel *c, const struct header *q, struct proc *p, int flags) {
    struct header h = { q->op | REPLY, flags, 0, q->seq, 0 };
    memcpy(c->out, &h, sizeof h);
    c->out_size = sizeof h + put_record(c->out + sizeof h, p, 1, c->out_fds, &c->out_nfds);
    flush(c);
}

/* Send as much of the list as fits. Spawns cannot interleave: no request is read meanwhile. */
static void continue_attach(int index) {
    struct channel *c = &channels[index];
    struct header q = { ATTACH, 0, 0, c->attach_seq, 0 };
    while (c->attaching && !c->pending) {
        struct proc *p = procs;
        uint32_t i = 0;
        for (; p; p = p->next)
            if (p->channel == index && i++ == c->cursor) break;
        if (!p) {
            c->attaching = 0;
            respond(c, &q, 0, &c->session, sizeof c->session);
            return;
        }
        c->cursor++;
        p->sent = p->exited;
        respond_record(c, &q, p, MORE);
    }
}

static void send_exits(int index) {
    struct channel *c = &channels[index];
    if (c->pending || c->attaching) return;
    for (struct proc *p = procs; p; p = p->next) {
        if (p->channel != index || !p->exited || p->sent) continue;
        uint8_t buf[sizeof(struct header) + sizeof(struct record)];
        int fds[4], nfds;
        struct header h = { EXIT, 0, 0, 0, 0 };
        memcpy(buf, &h, sizeof h);
        size_t size = sizeof h + put_record(buf + sizeof h, p, 0, fds, &nfds);
        if (transmit(c->fd, buf, size, NULL, 0) < 0) return;
        p->sent = 1;
    }
}

static int has_unsent_exits(int index) {
    for (struct proc *p = procs; p; p = p->next)
        if (p->channel == index && p->exited && !p->sent) return 1;
    return 0;
}

/* ---- spawning ---- */

struct fail { int32_t stage, error; };

static void fail(int fd, int stage) {
    struct fail f = { stage, errno ? errno : EINVAL };
    if (write(fd, &f, sizeof f) < 0) _exit(126);
    _exit(127);
}

/* The node reserves the last processes of a sandbox's limit (soft RLIMIT_NPROC, `kernel/nproc_reserve.py`) for
 * commands from outside; otherwise a fork bomb could not be killed. */
static void open_reserve(struct rlimit *usual) {
    if (getrlimit(RLIMIT_NPROC, usual)) return;
    struct rlimit all = { usual->rlim_max, usual->rlim_max };
    setrlimit(RLIMIT_NPROC, &all);
}

static pid_t fork_from_reserve(void) {
    struct rlimit usual;
    open_reserve(&usual);
    pid_t pid = fork();
    int problem = errno;
    if (pid) setrlimit(RLIMIT_NPROC, &usual);
    errno = problem;
    return pid;
}

static void execute(char **argv, char **envp) {
    if (strchr(argv[0], '/')) { execve(argv[0], argv, envp); return; }
    const char *path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
    for (char **e = envp; *e; e++) if (!strncmp(*e, "PATH=", 5)) path = *e + 5;
    int denied = 0;
    char full[4096];
    while (*path) {
        size_t n = strcspn(path, ":");
        int len = snprintf(full, sizeof full, "%.*s%s%s", (int)n, path, n ? "/" : "./", argv[0]);
        if (len > 0 && (size_t)len < sizeof full) {
            execve(full, argv, envp);
            if (errno == EACCES) denied = 1;
            else if (errno != ENOENT && errno != ENOTDIR) return;
        }
        path += n + (path[n] == ':');
    }
    errno = denied ? EACCES : ENOENT;
}

static void become_command(const struct spawn *s, const uint32_t *groups, const char *cwd, char **argv, char **envp,
                           int in, int out, int err, int report) {
    sigset_t none;
    struct sigaction dfl = { .sa_handler = SIG_DFL };
    for (int i = 1; i < 65; i++) sigaction(i, &dfl, NULL);
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    setsid();
    if (s->flags & F_PTY) ioctl(in, TIOCSCTTY, 0);
    /* The three ends may be 0..2 themselves if init has none open: duplicate them above first. */
    in = fcntl(in, F_DUPFD, 3); out = fcntl(out, F_DUPFD, 3); err = fcntl(err, F_DUPFD, 3);
    report = fcntl(report, F_DUPFD_CLOEXEC, 3);
    errno = EMFILE;
    if (in < 0 || out < 0 || err < 0 || report < 0) _exit(127);
    if (dup2(in, 0) < 0 || dup2(out, 1) < 0 || dup2(err, 2) < 0) fail(report, ST_STREAMS);
    if (report != 3) { if (dup3(report, 3, O_CLOEXEC) < 0) fail(report, ST_STREAMS); }
    report = 3;
    syscall(SYS_close_range, 4u, ~0u, 0);

    int fd = open("/proc/self/oom_score_adj", O_WRONLY | O_CLOEXEC);
    if (fd >= 0) { dprintf(fd, "%d", s->oom); close(fd); }
    if (s->nice) setpriority(PRIO_PROCESS, 0, s->nice);
    umask(022);
    gid_t gids[64];
    int n = s->ngroups > 64 ? 64 : s->ngroups;
    for (int i = 0; i < n; i++) gids[i] = groups[i];
    /* In a namespace of an unprivileged user, setgroups is forbidden and there are no groups to drop. */
    int groups_set = setgroups(n, gids) == 0 || (n == 0 && errno == EPERM);
    if (!groups_set || setresgid(s->gid, s->gid, s->gid) || setresuid(s->uid, s->uid, s->uid))
        fail(report, ST_IDENTITY);
    if (chdir(cwd)) fail(report, ST_DIRECTORY);
    execute(argv, envp);
    if (errno == EAGAIN) {                   /* over the limit of its user; the fork was root's */
        struct rlimit usual;
        open_reserve(&usual);
        execute(argv, envp);
    }
    fail(report, ST_EXEC);
}

/* Create the streams: init keeps `outer`, the command gets `inner`. */
static int make_streams(const struct spawn *s, int outer[4], int inner[3]) {
    int p[2];
    if (s->flags & F_PTY) {
        int master = open("/dev/ptmx", O_RDWR | O_NOCTTY | O_CLOEXEC);
        if (master < 0) return -errno;
        outer[3] = master;
        int zero = 0;
        struct winsize size = { .ws_row = s->rows, .ws_col = s->cols };
        if (ioctl(master, TIOCSPTLCK, &zero) < 0) return -errno;
        ioctl(master, TIOCSWINSZ, &size);
        int slave = ioctl(master, TIOCGPTPEER, O_RDWR | O_NOCTTY | O_CLOEXEC);
        if (slave < 0) return -errno;
        inner[0] = slave;
        if (fchown(slave, s->uid, 5) < 0 && fchown(slave, s->uid, -1) < 0) return -errno;
        fchmod(slave, 0620);
        if ((inner[1] = fcntl(slave, F_DUPFD_CLOEXEC, 3)) < 0 || (inner[2] = fcntl(slave, F_DUPFD_CLOEXEC, 3)) < 0)
            return -errno;
        return 0;
    }
    if (s->flags & F_STDIN) {
        if (pipe2(p, O_CLOEXEC) < 0) return -errno;
        inner[0] = p[0]; outer[0] = p[1];
    } else if ((inner[0] = open("/dev/null", O_RDONLY | O_CLOEXEC)) < 0) return -errno;
    if (pipe2(p, O_CLOEXEC) < 0) return -errno;
    outer[1] = p[0]; inner[1] = p[1];
    if (s->flags & F_MERGE) {
        if ((inner[2] = fcntl(inner[1], F_DUPFD_CLOEXEC, 3)) < 0) return -errno;
    } else {
        if (pipe2(p, O_CLOEXEC) < 0) return -errno;
        outer[2] = p[0]; inner[2] = p[1];
    }
    /* A command of another user may reopen /proc/self/fd/1 (/dev/stdout). */
    for (int i = 0; i < 3; i++) if (i || (s->flags & F_STDIN)) if (fchown(inner[i], s->uid, s->gid) < 0) return -errno;
    return 0;
}

/* Start the command; return 0, or a negative errno with *stage set. */
static int launch(const struct spawn *s, const uint32_t *groups, const char *cwd, char **argv, char **envp,
                  struct proc *p, int *stage) {
    int inner[3] = { -1, -1, -1 }, report[2] = { -1, -1 }, result = 0;
    *stage = ST_STREAMS;
    if ((result = make_streams(s, p->fd, inner)) < 0) goto out;
    if (pipe2(report, O_CLOEXEC) < 0) { result = -errno; goto out; }
    *stage = ST_FORK;
    pid_t pid = fork();
    if (pid < 0 && errno == EAGAIN) pid = fork_from_reserve();
    if (pid < 0) { result = -errno; goto out; }
    if (!pid) become_command(s, groups, cwd, argv, envp, inner[0], inner[1], inner[2], report[1]);
    shut(&report[1]);
    struct fail f;
    ssize_t n;
    /* A process inside may stop the command before its exec: do not wait forever. */
    struct pollfd wait = { .fd = report[0], .events = POLLIN };
    int ready;
    do ready = poll(&wait, 1, 10000); while (ready < 0 && errno == EINTR);
    if (ready == 0) kill(pid, SIGKILL);
    do n = read(report[0], &f, sizeof f); while (n < 0 && errno == EINTR);
    if (n == sizeof f) {
        *stage = f.stage;
        result = -f.error;
        while (waitpid(pid, NULL, 0) < 0 && errno == EINTR) {}
        goto out;
    }
    p->pid = pid;
    p->pty = !!(s->flags & F_PTY);
out:
    shut(&report[0]); shut(&report[1]);
    for (int i = 0; i < 3; i++) shut(&inner[i]);
    return result;
}

/* Read the next u32-length-prefixed string and make it a C string in place. */
static char *take(uint8_t **at, uint8_t *end, uint32_t *size) {
    if (end - *at < 4) return NULL;
    memcpy(size, *at, 4);
    if ((size_t)(end - *at) - 4 < *size) return NULL;
    char *s = (char *)*at;                   /* the text moves over its prefix, which leaves a byte for NUL */
    memmove(s, *at + 4, *size);
    s[*size] = 0;
    *at += 4 + *size;
    return s;
}

static void drop(struct proc *p) {
    for (int i = 0; i < 4; i++) shut(&p->fd[i]);
    free(p->memo);
    free(p);
}

static int parse_and_launch(struct channel *c, uint8_t *body, size_t size, struct proc *p, int *stage) {
    struct spawn s;
    *stage = ST_REQUEST;
    if (size < sizeof s) return -EINVAL;
    memcpy(&s, body, sizeof s);
    uint8_t *at = body + sizeof s, *end = body + size;
    if ((size_t)(end - at) < s.ngroups * 4u || !s.argc || s.argc > size || s.envc > size) return -EINVAL;
    if (!s.id || find(c - channels, s.id)) return -EEXIST;
    if (nprocs >= MAX_PROCS) return -EAGAIN;
    uint32_t *groups = calloc(s.ngroups + 1, 4);
    char **argv = calloc(s.argc + 1, sizeof *argv), **envp = calloc(s.envc + 1, sizeof *envp);
    int result = -ENOMEM;
    if (!groups || !argv || !envp) goto out;
    memcpy(groups, at, s.ngroups * 4u);
    at += s.ngroups * 4u;
    uint32_t len;
    result = -EINVAL;
    char *cwd = take(&at, end, &len);
    if (!cwd) goto out;
    for (uint32_t i = 0; i < s.argc; i++) if (!(argv[i] = take(&at, end, &len))) goto out;
    for (uint32_t i = 0; i < s.envc; i++) if (!(envp[i] = take(&at, end, &len))) goto out;
    char *memo = take(&at, end, &len);
    if (!memo || len > MAX_MEMO) goto out;
    result = -ENOMEM;
    if (len && !(p->memo = malloc(len))) goto out;
    if (len) memcpy(p->memo, memo, len);
    p->memo_size = len;
    p->id = s.id;
    p->channel = c - channels;
    result = launch(&s, groups, cwd, argv, envp, p, stage);
out:
    free(groups); free(argv); free(envp);
    return result;
}

static void do_spawn(struct channel *c, const struct header *q, uint8_t *body, size_t size) {
    int stage = ST_REQUEST, result = -ENOMEM;
    struct proc *p = calloc(1, sizeof *p);
    if (p) {
        for (int i = 0; i < 4; i++) p->fd[i] = -1;
        result = parse_and_launch(c, body, size, p, &stage);
    }
    if (result < 0) {
        uint32_t s = stage;
        if (p) drop(p);
        respond(c, q, result, &s, sizeof s);
        return;
    }
    p->next = procs;
    procs = p;
    nprocs++;
    respond_record(c, q, p, 0);
}

/* ---- signals ---- */

enum { STOPPED = 1, SENT };                            /* the last signal to a process of a tree */

/* A process that was part of the tree stays marked, whatever its session and parent are later; one that has
 * exited (`gone`) still identifies its session. */
struct entry { pid_t pid, ppid, sid; unsigned long long start; uint8_t marked, sent, gone; };
struct scan { struct entry *all; int count, room; };   /* ordered by pid, as /proc is */

/* Return 1, 0 if the process has exited, or a negative errno if that is unknown. */
static int read_stat(const char *name, struct entry *s) {
    char path[64], buf[512];
    snprintf(path, sizeof path, "/proc/%s/stat", name);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return errno == ENOENT || errno == ESRCH ? 0 : -errno;
    ssize_t n = read(fd, buf, sizeof buf - 1);
    close(fd);
    if (n <= 0) return 0;
    buf[n] = 0;
    char *after = strrchr(buf, ')');         /* the name may contain anything, also parentheses */
    memset(s, 0, sizeof *s);
    s->pid = atoi(name);
    return after && sscanf(after + 1, " %*c %d %*d %d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %llu",
                           &s->ppid, &s->sid, &s->start) == 3;
}

static int by_pid(const void *a, const void *b) {
    return ((const struct entry *)a)->pid - ((const struct entry *)b)->pid;
}

static struct entry *entry_of(const struct scan *s, pid_t pid) {
    struct entry key = { .pid = pid };
    return s->count ? bsearch(&key, s->all, s->count, sizeof key, by_pid) : NULL;
}

static int make_room(struct scan *s, int wanted) {
    if (wanted <= s->room) return 1;
    struct entry *more = realloc(s->all, 2 * wanted * sizeof *more);
    if (!more) return 0;
    s->all = more;
    s->room = 2 * wanted;
    return 1;
}

/* Every session in a tree was created by a process of the tree, so a process whose leader is marked belongs to it. */
static int is_of_tree(const struct scan *s, const struct entry *it, pid_t root, int root_alive) {
    if (it->pid == 1) return 0;
    if (it->sid == root || (it->pid == root && root_alive)) return 1;
    const struct entry *parent = entry_of(s, it->ppid), *leader = entry_of(s, it->sid);
    return (parent && parent->marked && !parent->gone) || (leader && leader->marked);
}

/* Copy the marked processes of an earlier scan whose pids are below `pid`. */
static void carry_over(struct scan *now, const struct scan *before, int *at, pid_t pid, int gone) {
    for (; *at < before->count && before->all[*at].pid < pid; ++*at) {
        if (!before->all[*at].marked) continue;
        now->all[now->count] = before->all[*at];
        now->all[now->count++].gone |= gone;
    }
}

/* Scan all processes and mark those that belong to a tree now or did before. With `stop`, processes of the session are
 * stopped as soon as they are seen, which also catches those that fork and exit all the time. A scan that fails half
 * way returns an error and keeps all marks. */
static int scan_tree(pid_t root, int root_alive, int stop, struct scan *scan) {
    DIR *dir = opendir("/proc");
    if (!dir) return -errno;
    struct scan now = { 0 }, before = *scan;
    int result = 0, at = 0;
    for (struct dirent *e; (e = readdir(dir));) {
        struct entry it;
        if (e->d_name[0] < '1' || e->d_name[0] > '9') continue;
        if (!make_room(&now, now.count + 1 + before.count - at)) { result = -ENOMEM; break; }
        if ((result = read_stat(e->d_name, &it)) < 0) break;
        if (!result) continue;
        result = 0;
        if (stop && it.sid == root && it.pid != 1) kill(it.pid, SIGSTOP);
        carry_over(&now, &before, &at, it.pid, 1);
        if (at < before.count && before.all[at].pid == it.pid) {
            struct entry *old = &before.all[at++];    /* a pid is reused only when no session has it as id */
            if (old->start == it.start) { it.marked = old->marked; it.sent = old->sent; }
        }
        now.all[now.count++] = it;
    }
    closedir(dir);
    if (!now.room) return result;
    carry_over(&now, &before, &at, INT32_MAX, !result);
    for (int changed = 1; changed;) {
        changed = 0;
        for (int i = 0; i < now.count; i++)
            if (!now.all[i].marked && is_of_tree(&now, &now.all[i], root, root_alive)) now.all[i].marked = changed = 1;
    }
    free(before.all);
    *scan = now;
    return result;
}

/* Send a signal to the marked processes that did not get it before; return their number. */
static int signal_marked(struct scan *scan, int what, int signo, int *delivered) {
    int sent = 0;
    for (int i = 0; i < scan->count; i++) {
        struct entry *it = &scan->all[i];
        if (!it->marked || it->gone || it->sent >= what) continue;
        it->sent = what;
        sent++;
        if (kill(it->pid, signo) == 0) ++*delivered;
    }
    return sent;
}

/* A process that forks all the time would outrun a kill, so processes are stopped first. A fork in progress completes
 * in spite of SIGSTOP, and only SIGKILL prevents it: a killed process may have left a child just before. So the loop
 * ends with a scan after the kill that finds no new process. If a scan fails, the known processes are killed. */
static int signal_tree(pid_t root, int root_alive, int signo) {
    struct scan scan = { 0 };
    int hits = 0, stopped = 0, error = 0, kills = signo == SIGKILL;
    for (int pass = 0; ; pass++) {
        error = scan_tree(root, root_alive, kills, &scan);
        int last = error || !kills || pass == MAX_PASSES;
        if (!last && signal_marked(&scan, STOPPED, SIGSTOP, &stopped)) continue;
        if (!signal_marked(&scan, SENT, signo, &hits) || last) break;
    }
    if (error && !hits && kill(-root, signo) == 0) hits = 1;    /* its process group needs no scan */
    free(scan.all);
    return hits ? hits : error ? error : -ESRCH;
}

static void do_signal(struct channel *c, const struct header *q, const uint8_t *body, size_t size) {
    struct { uint32_t id; int32_t signo; uint32_t scope; } s;
    if (size < sizeof s) { respond(c, q, -EINVAL, NULL, 0); return; }
    memcpy(&s, body, sizeof s);
    struct proc *p = find(c - channels, s.id);
    int result = -ESRCH;
    if (s.signo < 0 || s.signo > 64 || (s.scope != 0 && s.scope != 2)) result = -EINVAL;
    else if (p && s.scope == 2) result = signal_tree(p->pid, !p->exited, s.signo);
    else if (p && !p->exited) result = kill(p->pid, s.signo) ? -errno : 1;
    uint32_t hits = result > 0 ? result : 0;
    respond(c, q, result < 0 ? result : 0, &hits, result < 0 ? 0 : sizeof hits);
}

/* ---- requests ---- */

static void do_forget(struct channel *c, const struct header *q, uint32_t id) {
    for (struct proc **at = &procs; *at; at = &(*at)->next) {
        struct proc *p = *at;
        if (p->id != id || p->channel != c - channels) continue;
        if (!p->exited) { respond(c, q, -EBUSY, NULL, 0); return; }
        *at = p->next;
        nprocs--;
        drop(p);
        respond(c, q, 0, NULL, 0);
        return;
    }
    respond(c, q, -ESRCH, NULL, 0);
}

static void do_close_stdin(struct channel *c, const struct header *q, uint32_t id) {
    struct proc *p = find(c - channels, id);
    if (p) shut(&p->fd[0]);
    respond(c, q, p ? 0 : -ESRCH, NULL, 0);
}

static void serve(struct channel *c, const struct header *q, uint8_t *body, size_t size) {
    uint32_t id = 0;
    if (size >= 4) memcpy(&id, body, 4);
    switch (q->op) {
    case PING: {
        uint32_t reply[2] = { VERSION, nprocs };
        respond(c, q, 0, reply, sizeof reply);
        return;
    }
    case ATTACH:
        c->session = 0;
        memcpy(&c->session, body, size < 8 ? size : 8);
        c->attach_seq = q->seq;
        c->cursor = 0;
        c->attaching = 1;
        continue_attach(c - channels);
        return;
    case SPAWN: do_spawn(c, q, body, size); return;
    case SIGNAL: do_signal(c, q, body, size); return;
    case CLOSE_STDIN: do_close_stdin(c, q, id); return;
    case FORGET: do_forget(c, q, id); return;
    default: respond(c, q, -ENOSYS, NULL, 0);
    }
}

static void forget_request(struct channel *c) {
    free(c->request);
    c->request = NULL;
    c->request_size = 0;
}

static void read_request(struct channel *c) {
    struct header h;
    ssize_t n = recv(c->fd, datagram, sizeof datagram, MSG_DONTWAIT);
    if (n < (ssize_t)sizeof h) return;
    memcpy(&h, datagram, sizeof h);
    uint8_t *body = datagram + sizeof h;
    size_t size = n - sizeof h;
    /* An incomplete request of a client that exited is dropped when another request arrives. */
    if (c->request && (h.op != c->request_head.op || h.seq != c->request_head.seq)) forget_request(c);
    if (!c->request && !(h.flags & MORE)) { serve(c, &h, body, size); return; }
    if (c->request_size + size > MAX_REQUEST) { forget_request(c); respond(c, &h, -E2BIG, NULL, 0); return; }
    uint8_t *more = realloc(c->request, c->request_size + size + 1);
    if (!more) { forget_request(c); respond(c, &h, -ENOMEM, NULL, 0); return; }
    memcpy(more + c->request_size, body, size);
    c->request = more;
    c->request_size += size;
    c->request_head = h;
    if (h.flags & MORE) return;
    serve(c, &h, c->request, c->request_size);
    forget_request(c);
}

static void reap(void) {
    child_ended = 0;
    for (;;) {
        int status;
        struct rusage usage;
        pid_t pid = wait4(-1, &status, WNOHANG, &usage);
        if (pid <= 0) return;
        for (struct proc *p = procs; p; p = p->next)
            if (p->pid == pid && !p->exited) { p->exited = 1; p->wait_status = status; p->usage = usage; break; }
    }
}

/* ---- start ---- */

static void set_up_descriptors(void) {
    for (int i = 0; i < CHANNELS; i++) {
        int ours = FIRST_FD + 2 * i, pair[2];
        if (fcntl(ours, F_GETFD) < 0 || fcntl(ours + 1, F_GETFD) < 0) {
            if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair)) _exit(70);
            if (dup3(pair[0], ours, O_CLOEXEC) < 0 || dup3(pair[1], ours + 1, O_CLOEXEC) < 0) _exit(70);
        }
        fcntl(ours, F_SETFD, FD_CLOEXEC);
        fcntl(ours + 1, F_SETFD, FD_CLOEXEC);
        int size = 1 << 20;
        setsockopt(ours, SOL_SOCKET, SO_SNDBUF, &size, sizeof size);
        setsockopt(ours + 1, SOL_SOCKET, SO_SNDBUF, &size, sizeof size);
        channels[i].fd = ours;
    }
    int null = open("/dev/null", O_RDWR);
    if (null < 0) _exit(71);
    for (int i = 0; i < 3; i++) if (null != i) dup2(null, i);
    syscall(SYS_close_range, 3u, FIRST_FD - 1u, 0);
    syscall(SYS_close_range, READY_FD + 1u, ~0u, 0);
}

int main(int argc, char **argv) {
    locked = argc > 1 && !strcmp(argv[1], "locked");
    setsid();
    set_up_descriptors();
    prctl(PR_SET_PDEATHSIG, 0);
    prctl(PR_SET_NAME, "init");
    umask(022);
    if (chdir("/")) _exit(72);
    if (confine(locked)) _exit(73);
    close(READY_FD);

    sigset_t blocked, open_mask;
    sigemptyset(&blocked);
    sigaddset(&blocked, SIGCHLD);
    sigprocmask(SIG_SETMASK, &blocked, NULL);
    sigemptyset(&open_mask);
    struct sigaction ending = { .sa_handler = on_child, .sa_flags = 0 };
    sigaction(SIGCHLD, &ending, NULL);
    struct sigaction ignore = { .sa_handler = SIG_IGN };
    sigaction(SIGPIPE, &ignore, NULL);
    reap();

    for (;;) {
        struct pollfd fds[CHANNELS];
        for (int i = 0; i < CHANNELS; i++) {
            struct channel *c = &channels[i];
            if (!c->pending && c->attaching) continue_attach(i);
            send_exits(i);
            fds[i].fd = c->fd;
            fds[i].events = (c->pending ? POLLOUT : POLLIN) | (has_unsent_exits(i) ? POLLOUT : 0);
            fds[i].revents = 0;
        }
        if (ppoll(fds, CHANNELS, NULL, &open_mask) < 0 && errno != EINTR && errno != EAGAIN && errno != ENOMEM) return 74;
        if (child_ended) reap();
        for (int i = 0; i < CHANNELS; i++) {
            if (channels[i].pending && fds[i].revents & POLLOUT) flush(&channels[i]);
            if (!channels[i].pending && fds[i].revents & POLLIN) read_request(&channels[i]);
        }
    }
}
