/*
 * The launcher: a small single-threaded process from which all sandboxes of a node are cloned.
 *
 *     launcher <control fd> <stage directory>
 *     launcher run <cgroup> <v1 cgroup>… -- <program> <argument>…        (see `run`)
 *
 * It is not written in Python because the cost of clone and exec grows with the memory of the process. It
 * handles requests on its control socket, one after the other:
 *
 *     P base devices cgroup join…            clone a skeleton; the descriptor with it is the skeleton's control
 *                                            socket; its device files are created in the directory `devices`, or
 *                                            are those of the machine; the reply has its pid and a pidfd
 *     R base flags box layers layer… binds (mode source)…
 *                                            mount a root mapped to the ids of the user namespace passed with it
 *                                            (or of a temporary one with the same map, if none is passed);
 *                                            the reply has the detached mount, then one per bind; modes are
 *                                            host-rw and host-ro (a directory of the host, with ids of their
 *                                            own there), file (read-only) and dev
 *     R … L …                                the same, but pass the mounts to a skeleton with the `L …` message
 *                                            below; the node's end of its control socket is passed, too
 *
 * Messages are fields that each end with NUL, one message per datagram; a reply is `pid errno text`.
 * The launcher has no state: when it is killed, only the request in progress is lost.
 *
 * A skeleton has namespaces, cgroups and detached file systems, sends `ready`, and waits for
 *
 *     L hostname mode overlay (count item…)×5    with the root's mount and one mount per bind; the items are
 *                                            mount points of binds, directories of /sys to show, files and
 *                                            directories to hide, trees of the host
 *
 * Then it mounts everything, pivots into the root and becomes init, which closes the socket when it serves. An
 * error before that is sent on the socket as text. The skeleton exits when the other end is closed. No foreign
 * code runs in it. The Python side is `paddock/runtime/local/launch/{launcher,protocol,skeleton}.py`.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <linux/mount.h>
#include <linux/openat2.h>
#include <linux/sched.h>
#include <net/if.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/fsuid.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

/* From <sys/mount.h>, which conflicts with the kernel's header. */
extern int mount(const char *, const char *, const char *, unsigned long, const void *);
extern int umount2(const char *, int);
extern int unshare(int);                     /* and from <sched.h>, likewise */
enum { DETACH = 2 };

enum { MESSAGE = 128 << 10, MAX_FIELDS = 1024, MAX_FDS = 64, RANGE = 65536, NOFILE = 65536 };
enum { SHARED_IDS = 0x3FFF0000 };            /* ids on the machine of what sandboxes create in its directories */
enum { FIRST_CHANNEL = 100, CHANNELS = 2, READY_FD = 104 };
enum { NO_SETUID_FIXUP = 1 << 2, NEW_TIME = 0x80 };
enum { NO_GROUP = 96 };                      /* exit status, also in `checkpoint/criu.py` */

static const struct { const char *name; unsigned char major, minor; } devices[] = {
    { "null", 1, 3 }, { "zero", 1, 5 }, { "full", 1, 7 }, { "random", 1, 8 }, { "urandom", 1, 9 }, { "tty", 5, 0 },
};
enum { DEVICES = sizeof devices / sizeof *devices };

static int control, is_rootless, is_staged;
static char data[MESSAGE + 1], *fields[MAX_FIELDS], error_text[2048];
static int nfields, fds[MAX_FDS], nfds;
static struct timespec cloned_at;            /* since the machine's boot: before the start of this skeleton */

/* ---- errors: a text in `error_text`, and a negative errno as result ---- */

static int failed(const char *format, ...) {
    int number = errno ? errno : EINVAL;
    va_list arguments;
    va_start(arguments, format);
    int n = vsnprintf(error_text, sizeof error_text, format, arguments);
    va_end(arguments);
    if (n >= 0 && n < (int)sizeof error_text) snprintf(error_text + n, sizeof error_text - n, ": %s", strerror(number));
    return -number;
}

/* ---- messages ---- */

static int receive(int channel) {
    struct iovec iov = { data, MESSAGE };
    union { char buf[CMSG_SPACE(MAX_FDS * sizeof(int))]; struct cmsghdr align; } room;
    struct msghdr msg = { .msg_iov = &iov, .msg_iovlen = 1, .msg_control = room.buf, .msg_controllen = sizeof room.buf };
    ssize_t n;
    do n = recvmsg(channel, &msg, MSG_CMSG_CLOEXEC); while (n < 0 && errno == EINTR);
    nfields = nfds = 0;
    if (n <= 0) return 0;
    for (struct cmsghdr *c = CMSG_FIRSTHDR(&msg); c; c = CMSG_NXTHDR(&msg, c))
        if (c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS) {
            nfds = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
            memcpy(fds, CMSG_DATA(c), nfds * sizeof(int));
        }
    data[n] = 0;
    for (char *at = data; at < data + n && nfields < MAX_FIELDS; at += strlen(at) + 1) fields[nfields++] = at;
    return 1;
}

static int send_with(int channel, const char *text, size_t size, const int *given, int count) {
    struct iovec iov = { (void *)text, size };
    union { char buf[CMSG_SPACE(MAX_FDS * sizeof(int))]; struct cmsghdr align; } room;
    struct msghdr msg = { .msg_iov = &iov, .msg_iovlen = 1 };
    if (count) {
        memset(&room, 0, sizeof room);
        msg.msg_control = room.buf;
        msg.msg_controllen = CMSG_SPACE(count * sizeof(int));
        struct cmsghdr *c = CMSG_FIRSTHDR(&msg);
        c->cmsg_level = SOL_SOCKET; c->cmsg_type = SCM_RIGHTS; c->cmsg_len = CMSG_LEN(count * sizeof(int));
        memcpy(CMSG_DATA(c), given, count * sizeof(int));
    }
    ssize_t n;
    do n = sendmsg(channel, &msg, MSG_NOSIGNAL); while (n < 0 && errno == EINTR);
    return n < 0 ? -1 : 0;
}

static int send_text(int channel, const char *text) { return send_with(channel, text, strlen(text), NULL, 0); }

static void close_all(const int *those, int count) { for (int i = 0; i < count; i++) close(those[i]); }

/* ---- system calls that the C library lacks ---- */

static int open_tree_of(const char *path) {
    return syscall(SYS_open_tree, AT_FDCWD, path, OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC);
}

/* Attach a mount to a path; an empty path is the working directory, even if it is not searchable. */
static int move_to(int mounted, const char *path) {
    unsigned flags = MOVE_MOUNT_F_EMPTY_PATH | (*path ? 0 : MOVE_MOUNT_T_EMPTY_PATH);
    return syscall(SYS_move_mount, mounted, "", AT_FDCWD, path, flags);
}

static int set_attributes(int mounted, uint64_t attributes, int userns) {
    struct mount_attr attr = { .attr_set = attributes | (userns >= 0 ? MOUNT_ATTR_IDMAP : 0), .userns_fd = userns >= 0 ? userns : 0 };
    return syscall(SYS_mount_setattr, mounted, "", AT_EMPTY_PATH, &attr, sizeof attr);
}

static int set_option(int fs, const char *key, const char *value) {
    return syscall(SYS_fsconfig, fs, value ? FSCONFIG_SET_STRING : FSCONFIG_SET_FLAG, key, value, 0);
}

static int create(int fs) { return syscall(SYS_fsconfig, fs, FSCONFIG_CMD_CREATE, NULL, NULL, 0); }

static int write_file(const char *path, const char *text) {
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    if (fd < 0) return failed("%s", path);
    int result = write(fd, text, strlen(text)) < 0 ? failed("%s", path) : 0;
    close(fd);
    return result;
}

static int map_ids(pid_t pid, unsigned long first, unsigned long base) {
    const char *const kinds[] = { "uid_map", "gid_map" };
    char path[64], text[64];
    int result = 0;
    if (is_rootless) {
        snprintf(path, sizeof path, "/proc/%d/setgroups", pid);
        if ((result = write_file(path, "deny"))) return result;
    }
    for (int i = 0; i < 2 && !result; i++) {
        snprintf(path, sizeof path, "/proc/%d/%s", pid, kinds[i]);
        if (is_rootless) snprintf(text, sizeof text, "0 %u 1", i ? getegid() : geteuid());
        else snprintf(text, sizeof text, "%lu %lu %d", first, base, RANGE);
        result = write_file(path, text);
    }
    return result;
}

/* ---- in the skeleton ---- */

struct mounts { int proc, sys, pts, shm; };
static int device_mounts[DEVICES];

static int filesystem(const char *kind, unsigned attributes, const char *const *options) {
    int fs = syscall(SYS_fsopen, kind, FSOPEN_CLOEXEC), mounted = -1;
    if (fs < 0) return failed("fsopen %s", kind);
    for (; options && *options; options += 2)
        if (set_option(fs, options[0], options[1]) < 0) { mounted = failed("%s of %s", options[0], kind); goto out; }
    if (create(fs) < 0) mounted = failed("creating %s", kind);
    else if ((mounted = syscall(SYS_fsmount, fs, FSMOUNT_CLOEXEC, attributes)) < 0) mounted = failed("mounting %s", kind);
out:
    close(fs);
    return mounted;
}

static int bring_up_loopback(void) {
    struct ifreq request = { .ifr_name = "lo" };
    int probe = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (probe < 0) return failed("socket");
    int result = ioctl(probe, SIOCGIFFLAGS, &request);
    request.ifr_flags |= IFF_UP;
    if (!result) result = ioctl(probe, SIOCSIFFLAGS, &request);
    result = result ? failed("bringing up loopback") : 0;
    close(probe);
    return result;
}

/* Both ends of envd's and of the node's channel (see init.c). Inherited descriptors there are replaced. */
static int make_channels(void) {
    for (int at = FIRST_CHANNEL; at < FIRST_CHANNEL + 2 * CHANNELS; at += 2) {
        int pair[2];
        if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair)) return failed("socketpair");
        if (dup2(pair[0], at) < 0 || dup2(pair[1], at + 1) < 0) return failed("dup2");
        close_all(pair, 2);
    }
    return 0;
}

static void set_limits(void) {
    struct rlimit limit;
    if (!getrlimit(RLIMIT_NOFILE, &limit)) {
        if (limit.rlim_max > NOFILE) limit.rlim_max = NOFILE;
        limit.rlim_cur = limit.rlim_max;
        setrlimit(RLIMIT_NOFILE, &limit);
    }
    if (!getrlimit(RLIMIT_CORE, &limit)) {
        limit.rlim_cur = 0;
        setrlimit(RLIMIT_CORE, &limit);
    }
}

static int prepare(const int *joins, int njoins, struct mounts *m) {
    const unsigned quiet = MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOEXEC;
    /* All sandboxes together share the kernel's limit of about three thousand ptys. */
    const char *const pts[] = {
        "newinstance", NULL, "ptmxmode", "666", "mode", "620", "max", "128", is_rootless ? NULL : "gid", "5", NULL,
    };
    const char *const shm[] = { "mode", "1777", "size", "64m", NULL };
    setsid();
    if (!is_rootless && setgroups(0, NULL)) return failed("setgroups");
    if (setresgid(0, 0, 0) || setresuid(0, 0, 0)) return failed("becoming root inside");
    for (int i = 0; i < njoins; i++)
        if (write(joins[i], "0", 1) < 0) return failed("joining a cgroup");
    close_all(joins, njoins);
    if (unshare(CLONE_NEWCGROUP)) return failed("unsharing the cgroup namespace");
    if (mount("", "/", NULL, MS_REC | MS_PRIVATE, NULL)) return failed("making mounts private");
    int result;
    if ((result = bring_up_loopback()) || (result = make_channels())) return result;
    set_limits();
    if ((m->proc = filesystem("proc", quiet, NULL)) < 0) return m->proc;
    if ((m->sys = filesystem("sysfs", quiet | MOUNT_ATTR_RDONLY, NULL)) < 0) return m->sys;
    if ((m->pts = filesystem("devpts", quiet & ~MOUNT_ATTR_NODEV, pts)) < 0) return m->pts;
    if ((m->shm = filesystem("tmpfs", quiet, shm)) < 0) return m->shm;
    return 0;
}

/* Find or create a mount point below the root; symbolic links are refused. */
static int mount_point(const char *path, char *found, size_t size) {
    size_t at = snprintf(found, size, ".");
    while (*path) {
        size_t n = strcspn(path, "/");
        int is_step = n && !(n == 1 && path[0] == '.') && !(n == 2 && !memcmp(path, "..", 2));
        if (is_step) {
            struct stat facts;
            int wrote = snprintf(found + at, size - at, "/%.*s", (int)n, path);
            if (wrote < 0 || (size_t)wrote >= size - at) { errno = ENAMETOOLONG; return failed("%s", path); }
            at += wrote;
            if (lstat(found, &facts)) {
                if (mkdir(found, 0755)) return failed("creating %s", found);
            } else if (S_ISLNK(facts.st_mode)) {
                errno = ELOOP;
                return failed("%s leads through a symbolic link in the image", found);
            }
        }
        path += n + (path[n] == '/');
    }
    return 0;
}

struct list { int count; char **item; };

/* Read the next counted list of fields. */
static int read_list(int *at, struct list *list) {
    list->count = *at < nfields ? atoi(fields[*at]) : -1;
    list->item = fields + *at + 1;
    *at += 1 + list->count;
    errno = EINVAL;
    return list->count < 0 || *at > nfields ? failed("invalid launch message") : 0;
}

/* Make init's directory read-only for the sandbox's root: a stopped sandbox restarts from the init there, and its
 * confinement depends on it. */
static int protect_init(void) {
    int directory = open_tree_of(".paddock"), result = 0;
    if (directory < 0 || set_attributes(directory, MOUNT_ATTR_RDONLY, -1) || move_to(directory, ".paddock")) result = failed("making init's directory read-only");
    if (directory >= 0) close(directory);
    return result;
}

/* Make /proc/1 read-only: root inside may write to the files of init there, such as oom_score_adj. */
static int protect_proc_of_init(void) {
    struct mount_attr closed = { .attr_set = MOUNT_ATTR_RDONLY };
    int directory = open_tree_of("proc/1"), result = 0;
    if (directory < 0 || syscall(SYS_mount_setattr, directory, "", AT_EMPTY_PATH, &closed, sizeof closed) || move_to(directory, "proc/1"))
        result = failed("making /proc/1 read-only");
    if (directory >= 0) close(directory);
    return result;
}

/* Replace /sys by a directory of init's layer, and mount there what is shown; not every kernel has all of it. That takes
 * fewer mounts than to hide the rest, and what other kernels have is hidden, too. The whole file system stays below,
 * where nobody inside reaches it: CRIU needs it to mount parts of it. */
static int restrict_sys(const struct list *shown) {
    int parts[MAX_FDS], count, result = 0;
    if (shown->count > MAX_FDS) { errno = EINVAL; return failed("%d directories of /sys", shown->count); }
    for (count = 0; count < shown->count && !result; count++)
        if ((parts[count] = open_tree_of(shown->item[count])) < 0 && errno != ENOENT) result = failed("%s", shown->item[count]);
    if (!result && mount(".paddock/sys", "sys", NULL, MS_BIND, NULL)) result = failed("replacing /sys");
    for (int i = 0; i < count; i++) {
        if (parts[i] < 0) continue;
        if (!result && move_to(parts[i], shown->item[i])) result = failed("attaching %s", shown->item[i]);
        close(parts[i]);
    }
    return result;
}

/* Mount `cover` over paths; not every kernel has all of them. */
static int hide(const struct list *paths, const char *cover) {
    struct stat facts;
    if (stat(cover, &facts)) return failed("%s", cover);
    for (int i = 0; i < paths->count; i++)
        if (mount(cover, paths->item[i], NULL, MS_BIND, NULL) && errno != ENOENT) return failed("hiding %s", paths->item[i]);
    return 0;
}

/* Everything here is relative to the root, which is mounted on the working directory that the launcher chose: an
 * absolute path may lead through directories that our current ids cannot search. */
static int assemble(const struct mounts *m) {
    char path[4096];
    const char *hostname = fields[1], *overlay = fields[3];
    const unsigned long quiet = MS_NOSUID | MS_NODEV | MS_NOEXEC, nosuid = strcmp(fields[2], "locked") ? 0 : MS_NOSUID;
    struct list binds, shown, files, directories, trees;
    int result, at = 4, *bind_fds = fds + !is_rootless;
    if (read_list(&at, &binds) || read_list(&at, &shown) || read_list(&at, &files) || read_list(&at, &directories) ||
        read_list(&at, &trees)) return -EINVAL;
    if (nfds != binds.count + !is_rootless) { errno = EINVAL; return failed("%d descriptors received", nfds); }
    if (sethostname(hostname, strlen(hostname))) return failed("sethostname");
    if (is_rootless) {
        if (mount("overlay", ".", "overlay", MS_NODEV | nosuid, overlay)) return failed("mounting the root");
        if (!getcwd(path, sizeof path) || chdir(path)) return failed("entering the root");
    } else if (move_to(fds[0], "") || fchdir(fds[0])) return failed("attaching the root");
    for (int i = 0; i < trees.count; i++) {
        if ((result = mount_point(trees.item[i], path, sizeof path))) return result;
        if (mount(trees.item[i], path, NULL, MS_BIND | MS_REC, NULL)) return failed("binding %s", trees.item[i]);
        /* Some files may belong to the user who created the sandbox, who is root inside. */
        struct mount_attr closed = { .attr_set = MOUNT_ATTR_RDONLY };
        if (syscall(SYS_mount_setattr, AT_FDCWD, path, AT_RECURSIVE, &closed, sizeof closed))
            return failed("making %s read-only", trees.item[i]);
    }
    for (int i = 0; i < DEVICES; i++) {
        snprintf(path, sizeof path, "dev/%s", devices[i].name);
        if (move_to(device_mounts[i], path)) return failed("attaching %s", path);
    }
    if (move_to(m->proc, "proc") || move_to(m->sys, "sys") || move_to(m->pts, "dev/pts") || move_to(m->shm, "dev/shm"))
        return failed("attaching file systems");
    /* A message can request time stamps of sent data, and copies of it then wait for a reader, charged to no cgroup;
     * a filter of system calls cannot see that. Older kernels have this setting only for the whole machine. */
    int copies = open("proc/sys/net/core/tstamp_allow_data", O_WRONLY | O_CLOEXEC);
    if (copies >= 0) {
        ssize_t written = write(copies, "0", 1);
        close(copies);
        if (written != 1) return failed("refusing copies of sent data");
    } else if (errno != ENOENT) return failed("refusing copies of sent data");
    if (mount("proc/sys", "proc/sys", NULL, MS_BIND, NULL) ||
        mount("", "proc/sys", NULL, MS_BIND | MS_REMOUNT | MS_RDONLY | quiet, NULL)) return failed("making /proc/sys read-only");
    if ((result = protect_init()) || (result = restrict_sys(&shown))) return result;
    for (int i = 0; i < binds.count; i++) {
        if ((result = mount_point(binds.item[i], path, sizeof path))) return result;
        if (move_to(bind_fds[i], path)) return failed("attaching %s", binds.item[i]);
    }
    /* All covers are of init's layer, which a checkpoint has anyway. */
    const struct list zeroed = { 1, (char *[]){ "proc/vmstat" } };
    if ((result = hide(&files, ".paddock/empty")) || (result = hide(&zeroed, ".paddock/vmstat")) ||
        (result = hide(&directories, "sys/fs/cgroup"))) return result;
    if (syscall(SYS_pivot_root, ".", ".") || umount2(".", DETACH) || chdir("/")) return failed("changing the root");
    return 0;
}

/* A time namespace in which time since boot starts with init: /proc/uptime, sysinfo(2), the boot time in
 * /proc/stat and start times of processes agree, and CRIU lets the clock continue after a restore. It takes effect
 * for children, and for init itself at exec (Linux 6.3). Monotonic time stays that of the machine. */
static int start_uptime(void) {
    char text[64];
    if (unshare(NEW_TIME)) return errno == EINVAL ? 0 : failed("unsharing the time namespace");
    snprintf(text, sizeof text, "boottime %lld 0\n", -(long long)cloned_at.tv_sec);
    prctl(PR_SET_DUMPABLE, 1);               /* or the file belongs to the host's root, who is nobody here */
    return write_file("/proc/self/timens_offsets", text);
}

static void become_init(int channel) {
    char *mode = fields[2], *const argv[] = { "/.paddock/init", mode, NULL }, *const none[] = { NULL };
    if (dup2(channel, READY_FD) >= 0) execve(argv[0], argv, none);
    failed("becoming init");
}

static int open_devices(const char *directory) {
    for (int i = 0; i < DEVICES; i++) {
        char path[4096];
        snprintf(path, sizeof path, "%s/%s", directory, devices[i].name);
        if ((device_mounts[i] = open_tree_of(path)) < 0) {
            int result = failed("%s", path);
            close_all(device_mounts, i);
            return result;
        }
    }
    return 0;
}

static void run_skeleton(int channel, int go, const int *joins, int njoins) {
    struct mounts mounts = { 0 };
    char one;
    if (read(go, &one, 1) != 1) _exit(0);
    close(go);
    if (!(is_rootless && open_devices("/dev")) && !prepare(joins, njoins, &mounts)) {
        if (send_text(channel, "ready") || !receive(channel)) _exit(0);
        if (!assemble(&mounts) && !start_uptime() && !protect_proc_of_init()) become_init(channel);
    }
    send_text(channel, error_text);
    _exit(70);
}

/* ---- in the launcher ---- */

static pid_t clone_into(uint64_t namespaces, int cgroup, int *pidfd) {
    struct clone_args arguments = {
        .flags = namespaces | CLONE_PIDFD | (cgroup >= 0 ? CLONE_INTO_CGROUP : 0),
        .pidfd = (uint64_t)(uintptr_t)pidfd, .exit_signal = SIGCHLD, .cgroup = cgroup >= 0 ? cgroup : 0,
    };
    return syscall(SYS_clone3, &arguments, sizeof arguments);
}

/* Device files of one sandbox: other inodes than those of the machine and of the slot's last sandbox. */
static int create_devices(const char *directory) {
    if (mkdir(directory, 0700) && errno != EEXIST) return failed("creating %s", directory);
    for (int i = 0; i < DEVICES; i++) {
        char path[4096];
        snprintf(path, sizeof path, "%s/%s", directory, devices[i].name);
        if (unlink(path) && errno != ENOENT) return failed("removing %s", path);
        if (mknod(path, S_IFCHR | 0666, makedev(devices[i].major, devices[i].minor)) || chmod(path, 0666))
            return failed("creating %s", path);
    }
    return 0;
}

static int make_skeleton(int *given, pid_t *pid) {
    int held[MAX_FDS], nheld = 0, njoins = 0, go[2], result = 0, cgroup = -1;
    if (nfields < 4 || nfds != 1 || nfields - 4 > MAX_FDS - 2) { errno = EINVAL; return failed("a request with %d fields", nfields); }
    if (*fields[3]) {
        if ((cgroup = open(fields[3], O_RDONLY | O_DIRECTORY | O_CLOEXEC)) < 0) return failed("%s", fields[3]);
        held[nheld++] = cgroup;
    }
    int *joins = held + nheld;
    for (; njoins < nfields - 4; njoins++) {
        /* `tasks`, not `cgroup.procs`: a thread that moves itself needs no lock over all forks of the machine,
         * which costs about 7 ms; a skeleton has one thread. */
        char path[4096];
        snprintf(path, sizeof path, "%s/tasks", fields[4 + njoins]);
        if ((held[nheld] = open(path, O_WRONLY | O_CLOEXEC)) < 0) { result = failed("%s", path); goto out; }
        nheld++;
    }
    if (*fields[2] && (result = create_devices(fields[2]))) goto out;
    if (!is_rootless && (result = open_devices(*fields[2] ? fields[2] : "/dev"))) goto out;
    if (pipe2(go, O_CLOEXEC)) { result = failed("pipe"); goto close_devices; }
    /* The cgroup namespace is unshared later, after all cgroups are joined. */
    clock_gettime(CLOCK_BOOTTIME, &cloned_at);
    *pid = clone_into(CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS, cgroup, given);
    if (*pid == 0) {
        close(go[1]);
        close(control);
        signal(SIGCHLD, SIG_DFL);
        signal(SIGINT, SIG_DFL);
        run_skeleton(fds[0], go[0], joins, njoins);
    }
    if (*pid < 0) result = failed("clone3");
    else if ((result = map_ids(*pid, 0, strtoul(fields[1], NULL, 10))) || write(go[1], "1", 1) != 1) {
        if (!result) result = failed("starting the skeleton");
        close(*given);                       /* the child exits when `go` is closed */
        *pid = 0;
    }
    close_all(go, 2);
close_devices:
    if (!is_rootless) close_all(device_mounts, DEVICES);
out:
    close_all(held, nheld);
    return result;
}

/* A user namespace that only carries an id map from `first`; cached, because id ranges are reused. */
static int mapped_userns(unsigned long first, unsigned long base) {
    static struct { unsigned long first, base; int fd; } *kept;
    static int count, room;
    for (int i = 0; i < count; i++) if (kept[i].first == first && kept[i].base == base) return kept[i].fd;
    if (count == room) {
        void *more = realloc(kept, (room + 64) * sizeof *kept);
        if (!more) return failed("memory");
        kept = more;
        room += 64;
    }
    int hold[2], pidfd, fd = -1;
    char path[64], one;
    if (pipe2(hold, O_CLOEXEC)) return failed("pipe");
    pid_t pid = clone_into(CLONE_NEWUSER, -1, &pidfd);
    if (pid == 0) {
        close(hold[1]);
        _exit(read(hold[0], &one, 1) < 0);
    }
    if (pid < 0) fd = failed("clone3");
    else if (!(fd = map_ids(pid, first, base))) {
        snprintf(path, sizeof path, "/proc/%d/ns/user", pid);
        if ((fd = open(path, O_RDONLY | O_CLOEXEC)) < 0) fd = failed("%s", path);
    }
    close_all(hold, 2);
    if (pid > 0) close(pidfd);
    if (fd >= 0) { kept[count].first = first; kept[count].base = base; kept[count++].fd = fd; }
    return fd;
}

static int attach_mapped(const char *source, int userns, const char *target) {
    int tree = open_tree_of(source), result = 0;
    if (tree < 0) return failed("%s", source);
    if (set_attributes(tree, 0, userns)) result = failed("mapping the ids of %s", source);
    else if ((mkdir(target, 0700) && errno != EEXIST) || move_to(tree, target)) result = failed("attaching %s", source);
    close(tree);
    return result;
}

/* Overlayfs needs paths, so the mapped mounts are attached below a mount on the stage (the working directory) until
 * `clear_stage`. The paths are relative because sandboxes see them in /proc/mounts. */
static int mount_stage(void) {
    if (mkdir("staged", 0700) && errno != EEXIST) return failed("creating the stage");
    int tree = open_tree_of("staged");
    if (tree < 0 || move_to(tree, "staged")) {
        int result = failed("mounting the stage");
        if (tree >= 0) close(tree);
        return result;
    }
    close(tree);
    is_staged = 1;
    return chdir("staged") ? failed("entering the stage") : 0;
}

/* One unmount for all, after the reply: each unmount takes a while. */
static void clear_stage(void) {
    if (is_staged) umount2("staged", DETACH);
    is_staged = 0;
}

static int create_overlay(int overlay, unsigned long base, const char *layers, int is_volatile) {
    if (set_option(overlay, "source", "paddock") || set_option(overlay, "lowerdir", layers) ||
        set_option(overlay, "upperdir", "0/upper") || set_option(overlay, "workdir", "0/work") ||
        /* Without it stat(2) reports another device than inotify's fdinfo: watched files would not be found by name. */
        set_option(overlay, "xino", "on") ||
        (is_volatile && set_option(overlay, "volatile", NULL))) return -1;
    /* Overlayfs acts with its mounter's ids, and host root has no id in a mapped upper directory. */
    setfsgid(base);
    setfsuid(base);
    int result = create(overlay);
    setfsuid(0);
    setfsgid(0);
    return result;
}

static int mount_overlay(unsigned long base, const char *flags, int nlayers) {
    char layers[8 * MAX_FIELDS] = "";
    size_t at = 0;
    for (int i = 1; i <= nlayers; i++) at += snprintf(layers + at, sizeof layers - at, "%s%d", i > 1 ? ":" : "", i);
    int overlay = syscall(SYS_fsopen, "overlay", FSOPEN_CLOEXEC);
    if (overlay < 0) return failed("fsopen overlay");
    unsigned attributes = MOUNT_ATTR_NODEV | (strchr(flags, 'l') ? MOUNT_ATTR_NOSUID : 0);
    int mounted = create_overlay(overlay, base, layers, !!strchr(flags, 'v'));
    if (mounted >= 0) mounted = syscall(SYS_fsmount, overlay, FSMOUNT_CLOEXEC, attributes);
    if (mounted < 0) {
        char why[512];
        int number = errno;
        ssize_t n = read(overlay, why, sizeof why - 1);      /* the kernel's message */
        why[n > 0 ? n : 0] = 0;
        errno = number;
        mounted = failed("mounting the root (%s)", why);
    }
    close(overlay);
    return mounted;
}

/* Clone the mount of a directory of the host. Sandboxes can write to such directories and leave links there: no part
 * of the path may be one. */
static int open_host_directory(const char *path) {
    struct open_how how = { .flags = O_PATH | O_DIRECTORY | O_CLOEXEC, .resolve = RESOLVE_NO_SYMLINKS };
    int directory = syscall(SYS_openat2, AT_FDCWD, path, &how, sizeof how);
    if (directory < 0) return -1;
    int tree = syscall(SYS_open_tree, directory, "", AT_EMPTY_PATH | OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC);
    close(directory);
    return tree;
}

static int bind_tree(const char *source, unsigned long base, int userns, const char *mode) {
    int is_host = !strncmp(mode, "host", 4), tree = is_host ? open_host_directory(source) : open_tree_of(source);
    if (tree < 0) return failed("%s", source);
    if (!strcmp(mode, "dev")) return tree;   /* its owner has no id inside, as on the machine */
    uint64_t attributes = MOUNT_ATTR_NODEV | MOUNT_ATTR_NOSUID | (strcmp(mode, "host-rw") ? MOUNT_ATTR_RDONLY : 0);
    if (is_host && (userns = mapped_userns(SHARED_IDS, base)) < 0) {
        close(tree);
        return userns;
    }
    if (set_attributes(tree, attributes, userns)) {
        int result = failed("mapping the ids of %s", source);
        close(tree);
        return result;
    }
    return tree;
}

/* Return the index behind the fields of the request, or a negative errno. */
static int make_root(int *given, int *ngiven) {
    int nlayers = nfields > 4 ? atoi(fields[4]) : 0, at = 5 + nlayers, nbinds, result;
    nbinds = nlayers > 0 && at < nfields ? atoi(fields[at]) : -1;
    at++;
    if (nbinds < 0 || nbinds > MAX_FDS - 1 || at + 2 * nbinds > nfields) { errno = EINVAL; return failed("a request with %d fields", nfields); }
    unsigned long base = strtoul(fields[1], NULL, 10);
    int userns = nfds ? fds[0] : mapped_userns(0, base);
    if (userns < 0) return userns;
    int back = open(".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (back < 0) return failed("the stage");
    if (!(result = mount_stage())) {
        result = attach_mapped(fields[3], userns, "0");
        for (int i = 0; i < nlayers && !result; i++) {
            char name[16];
            snprintf(name, sizeof name, "%d", i + 1);
            result = attach_mapped(fields[5 + i], userns, name);
        }
        if (!result && (result = mount_overlay(base, fields[2], nlayers)) >= 0) { given[(*ngiven)++] = result; result = 0; }
    }
    if (fchdir(back)) _exit(71);             /* later requests would use the wrong directory */
    close(back);
    for (int i = 0; i < nbinds && !result; i++, at += 2)
        if ((result = bind_tree(fields[at + 1], base, userns, fields[at])) >= 0) { given[(*ngiven)++] = result; result = 0; }
    return result ? result : at;
}

/* Mount a root, and pass it to a skeleton if the request has a launch message. */
static int start(int *given, int *ngiven) {
    int at = make_root(given, ngiven);
    if (at < 0 || at == nfields) return at < 0 ? at : 0;
    if (nfds != 2) { errno = EINVAL; return failed("%d descriptors received", nfds); }
    char *end = fields[nfields - 1] + strlen(fields[nfields - 1]) + 1;
    int result = send_with(fds[1], fields[at], end - fields[at], given, *ngiven) ? failed("sending to the skeleton") : 0;
    close_all(given, *ngiven);
    *ngiven = 0;
    return result;
}

static int serve(void) {
    while (receive(control)) {
        int given[MAX_FDS], ngiven = 0, result;
        pid_t pid = 0;
        char reply[sizeof error_text + 64];
        if (nfields && !strcmp(fields[0], "P")) {
            result = make_skeleton(given, &pid);
            ngiven = result ? 0 : 1;
        } else if (nfields && !strcmp(fields[0], "R")) result = start(given, &ngiven);
        else { errno = EINVAL; result = failed("unknown request"); }
        close_all(fds, nfds);
        if (result) { close_all(given, ngiven); ngiven = 0; }
        snprintf(reply, sizeof reply, "%d %d %s", pid, -result, result ? error_text : "");
        int sent = send_with(control, reply, strlen(reply), given, ngiven);
        close_all(given, ngiven);
        if (sent) return 0;                  /* the node has exited */
        clear_stage();
    }
    return 0;
}

/* Run a program in cgroups and wait for its exit. It is cloned into the first, because moving there would wait for
 * all processors; its cgroup namespace is rooted there. With "-" instead it stays in the caller's, and sees those of
 * the machine. */
static int run(char **argv) {
    int pidfd, status, njoins = 1, stays = !strcmp(argv[0], "-");
    while (argv[njoins] && strcmp(argv[njoins], "--")) njoins++;
    int group = argv[njoins] && !stays ? open(argv[0], O_RDONLY | O_DIRECTORY | O_CLOEXEC) : -1;
    pid_t pid = group < 0 && !stays ? -1 : clone_into(0, group, &pidfd);
    if (pid == 0) {
        /* A signal that kills this process must also kill the program. */
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        for (int i = 1; i < njoins; i++) {
            char path[4096];
            snprintf(path, sizeof path, "%s/tasks", argv[i]);
            if (write_file(path, "0")) _exit(NO_GROUP);
        }
        if (!stays && unshare(CLONE_NEWCGROUP)) _exit(NO_GROUP);
        execv(argv[njoins + 1], argv + njoins + 1);
        _exit(127);
    }
    if (pid < 0) return NO_GROUP;
    syscall(SYS_close_range, 3u, ~0u, 0);    /* or peers would not see the program close them */
    while (waitpid(pid, &status, 0) < 0 && errno == EINTR) {}
    if (WIFSIGNALED(status)) {
        signal(WTERMSIG(status), SIG_DFL);
        raise(WTERMSIG(status));
    }
    return WEXITSTATUS(status);
}

int main(int argc, char **argv) {
    if (argc > 4 && !strcmp(argv[1], "run")) return run(argv + 2);
    if (argc != 3) return 64;
    control = atoi(argv[1]);
    fcntl(control, F_SETFD, FD_CLOEXEC);
    is_rootless = geteuid() != 0;
    prctl(PR_SET_NAME, "paddock-launch");
    signal(SIGINT, SIG_IGN);
    /* The node watches skeletons and sandboxes by pidfd; this only avoids zombies. */
    signal(SIGCHLD, SIG_IGN);
    if (!is_rootless) {
        const char *stage = argv[2];
        /* Slave: later mounts of the host propagate to us, ours do not propagate to the host. The stage is a private
         * mount, so that nothing below it propagates anywhere. */
        if (prctl(PR_SET_SECUREBITS, NO_SETUID_FIXUP) || unshare(CLONE_NEWNS) ||
            mount("", "/", NULL, MS_REC | MS_SLAVE, NULL) || mount(stage, stage, NULL, MS_BIND, NULL) ||
            mount("", stage, NULL, MS_PRIVATE, NULL)) { perror("launcher"); return 71; }
    }
    /* Skeletons inherit this working directory and mount their root on it. */
    if (chdir(argv[2])) { perror(argv[2]); return 72; }
    return serve();
}
