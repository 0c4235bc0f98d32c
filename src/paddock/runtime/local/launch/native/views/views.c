/*
 * The view server: keeps files such as /proc/meminfo of sandboxes up to date while they are read.
 *
 *     views <directory> <first id> <unified cgroup> <memory cgroup> <CPU cgroup>
 *
 * The directory is a tmpfs with one directory `s<slot>` per sandbox, whose files are mounted read-only into that
 * sandbox. The cgroups are the parents of the sandboxes' cgroups, which have the same names. The server asks the kernel
 * to hold every read on that tmpfs (fanotify permission events), rewrites the file from the sandbox's cgroups, and
 * lets the read continue: about 15 us. Nobody reads: no work, except a sample of the load every five seconds. A sandbox that
 * reads very often waits, because its reads cost CPU time outside its quota.
 *
 * It has no state that matters: when it exits, the kernel lets all reads continue with the last contents. It exits
 * when its standard input is closed, as by a node that is killed, and first writes all files once more: one that nobody
 * has read would stay empty until the next server. The Python side is `paddock/runtime/local/views`.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <poll.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/fanotify.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { RANGE = 65536, SLOTS = 3072 };        /* also in `protocol.py` and `slots.py` */
enum { TEXT = 1 << 20, TICKS = 100, SAMPLE_MS = 5000, FRESH_MS = 100, MOST_THREADS = 512 };
enum { WINDOW_MS = 100, WINDOW_READS = 200, MOST_DELAYED = 512 };

enum kind { MEMINFO, STAT, LOADAVG, CPUINFO, ONLINE, POSSIBLE, PRESENT, KINDS };
static const char *const names[KINDS] = { "meminfo", "stat", "loadavg", "cpuinfo", "online", "possible", "present" };

static struct box {
    ino_t id;                                /* of its directory: another sandbox in this slot has another one */
    double load[3], cpu_seconds;
    int64_t fresh_ms[KINDS];                 /* when each file was written */
    int64_t window;
    int reads;                               /* in that window */
} boxes[SLOTS];

struct sandbox { int slot; struct box *box; pid_t reader; uint64_t memory; int cpus; };

static struct { int fd; pid_t reader; } delayed[MOST_DELAYED];
static int ndelayed, root, has_complained;
static unsigned first_id;
static const char *unified, *memory_group, *cpu_group;
static char text[TEXT], source[TEXT];
static size_t length;

static double clock_of(clockid_t id) {
    struct timespec now;
    clock_gettime(id, &now);
    return now.tv_sec + now.tv_nsec / 1e9;
}

static int64_t now_ms(void) { return (int64_t)(clock_of(CLOCK_MONOTONIC) * 1000); }

static void put(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    int n = vsnprintf(text + length, TEXT - length, format, arguments);
    va_end(arguments);
    if (n > 0) length += (size_t)n < TEXT - length ? (size_t)n : TEXT - length - 1;
}

/* ---- reading ---- */

/* Read a file into `source`; whether it could be read. */
static int load(const char *format, ...) {
    char path[4096];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(path, sizeof path, format, arguments);
    va_end(arguments);
    size_t at = 0;
    ssize_t n = -1;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd >= 0) {
        while (at < TEXT - 1 && (n = read(fd, source + at, TEXT - 1 - at)) > 0) at += n;
        close(fd);
    }
    source[at] = 0;
    return at > 0 || n == 0;
}

/* Return the number behind a name at the start of a line of `source`. */
static uint64_t field(const char *name) {
    size_t n = strlen(name);
    for (const char *line = source; line && *line; line = strchr(line, '\n'), line = line ? line + 1 : NULL)
        if (!strncmp(line, name, n) && (line[n] == ' ' || line[n] == ':' || line[n] == '\t'))
            return strtoull(line + n + 1 + strspn(line + n + 1, " \t"), NULL, 10);
    return 0;
}

static double cpu_seconds(int slot) {
    if (load("%s/s%d/cpuacct.usage", cpu_group, slot)) return strtoull(source, NULL, 10) / 1e9;
    return load("%s/s%d/cpu.stat", unified, slot) ? field("usage_usec") / 1e6 : 0;
}

/* Count threads, and those that run or wait for a disk; only the first ones of very many. */
static void count_threads(int slot, int *all, int *running, int *blocked) {
    static char threads[TEXT];
    *all = *running = *blocked = 0;
    if (!load("%s/s%d/cgroup.threads", unified, slot)) return;
    memcpy(threads, source, strlen(source) + 1);
    for (char *at = threads; *at; at += strcspn(at, "\n") + 1) {
        if (++*all > MOST_THREADS) continue;
        if (!load("/proc/%d/stat", atoi(at))) continue;
        const char *state = strrchr(source, ')');
        if (!state || !state[1]) continue;
        *running += state[2] == 'R';
        *blocked += state[2] == 'D';
    }
}

/* Seconds since the boot of the sandbox, as its time namespace shows them to the reader. */
static double uptime_of(pid_t reader) {
    double offset = 0;
    if (load("/proc/%d/timens_offsets", reader)) {
        const char *line = strstr(source, "boottime");
        long long seconds = 0, nanoseconds = 0;
        if (line && sscanf(line, "boottime %lld %lld", &seconds, &nanoseconds) == 2) offset = seconds + nanoseconds / 1e9;
    }
    return clock_of(CLOCK_BOOTTIME) + offset;
}

/* ---- contents ---- */

static void kilobytes(const char *name, uint64_t bytes) { put("%s:%*llu kB\n", name, 23 - (int)strlen(name), (unsigned long long)bytes / 1024); }

static int write_meminfo(const struct sandbox *one) {
    if (!load("/proc/meminfo")) return 0;
    uint64_t host = field("MemTotal") * 1024, host_available = field("MemAvailable") * 1024;
    uint64_t total = one->memory && one->memory < host ? one->memory : host;
    int is_v2 = load("%s/s%d/memory.current", memory_group, one->slot);
    if (!is_v2 && !load("%s/s%d/memory.usage_in_bytes", memory_group, one->slot)) return 0;
    uint64_t used = strtoull(source, NULL, 10);
    if (!load("%s/s%d/memory.stat", memory_group, one->slot)) return 0;
    uint64_t file = field(is_v2 ? "file" : "cache"), shmem = field("shmem"), anonymous = field(is_v2 ? "anon" : "rss");
    uint64_t inactive_file = field("inactive_file"), active_file = field("active_file");
    uint64_t inactive_anon = field("inactive_anon"), active_anon = field("active_anon");
    uint64_t reclaimable = field("slab_reclaimable"), unreclaimable = field("slab_unreclaimable");
    uint64_t free = used < total ? total - used : 0, available = free + inactive_file + active_file + reclaimable;
    if (available > total) available = total;
    if (available > host_available) available = host_available;
    kilobytes("MemTotal", total);
    kilobytes("MemFree", free);
    kilobytes("MemAvailable", available);
    kilobytes("Buffers", 0);
    kilobytes("Cached", file);
    kilobytes("SwapCached", 0);
    kilobytes("Active", active_anon + active_file);
    kilobytes("Inactive", inactive_anon + inactive_file);
    kilobytes("Active(anon)", active_anon);
    kilobytes("Inactive(anon)", inactive_anon);
    kilobytes("Active(file)", active_file);
    kilobytes("Inactive(file)", inactive_file);
    kilobytes("Unevictable", field("unevictable"));
    kilobytes("Mlocked", 0);
    kilobytes("SwapTotal", 0);
    kilobytes("SwapFree", 0);
    kilobytes("Dirty", field(is_v2 ? "file_dirty" : "dirty"));
    kilobytes("Writeback", field(is_v2 ? "file_writeback" : "writeback"));
    kilobytes("AnonPages", anonymous);
    kilobytes("Mapped", field(is_v2 ? "file_mapped" : "mapped_file"));
    kilobytes("Shmem", shmem);
    kilobytes("KReclaimable", reclaimable);
    kilobytes("Slab", reclaimable + unreclaimable);
    kilobytes("SReclaimable", reclaimable);
    kilobytes("SUnreclaim", unreclaimable);
    kilobytes("KernelStack", field("kernel_stack"));
    kilobytes("PageTables", field("pagetables"));
    kilobytes("CommitLimit", total);
    kilobytes("Committed_AS", anonymous + shmem);
    return 1;
}

static void write_cpu(const char *name, double user, double system, double idle) {
    put("%s %.0f 0 %.0f %.0f 0 0 0 0 0 0\n", name, user * TICKS, system * TICKS, idle * TICKS);
}

static int write_stat(const struct sandbox *one) {
    double user, system, uptime = uptime_of(one->reader);
    if (load("%s/s%d/cpuacct.stat", cpu_group, one->slot)) {
        user = field("user") / (double)TICKS;
        system = field("system") / (double)TICKS;
    } else if (load("%s/s%d/cpu.stat", unified, one->slot)) {
        user = field("user_usec") / 1e6;
        system = field("system_usec") / 1e6;
    } else return 0;
    double idle = one->cpus * uptime - user - system;
    if (idle < 0) idle = 0;
    write_cpu("cpu ", user, system, idle);
    for (int i = 0; i < one->cpus; i++) {
        char name[16];
        snprintf(name, sizeof name, "cpu%d", i);
        write_cpu(name, user / one->cpus, system / one->cpus, idle / one->cpus);
    }
    int all, running, blocked;
    count_threads(one->slot, &all, &running, &blocked);
    put("intr 0\nctxt 0\nbtime %.0f\nprocesses %d\nprocs_running %d\nprocs_blocked %d\nsoftirq 0 0 0 0 0 0 0 0 0 0 0\n",
        floor(clock_of(CLOCK_REALTIME) - uptime), all, running ? running : 1, blocked);
    return 1;
}

static int write_loadavg(const struct sandbox *one) {
    int all, running, blocked, last = 0;
    count_threads(one->slot, &all, &running, &blocked);
    /* The kernel shows the last pid of the namespace; the reader is usually that. */
    if (load("/proc/%d/status", one->reader)) {
        char *line = strstr(source, "\nNSpid:");
        if (line) {
            line[1 + strcspn(line + 1, "\n")] = 0;
            char *tab = strrchr(line, '\t');
            last = tab ? atoi(tab + 1) : 0;
        }
    }
    const double *loads = one->box->load;
    put("%.2f %.2f %.2f %d/%d %d\n", loads[0], loads[1], loads[2], running ? running : 1, all, last);
    return 1;
}

static int write_cpuinfo(const struct sandbox *one) {
    if (!load("/proc/cpuinfo")) return 0;
    int count = 0;
    for (char *line = source; *line && count <= one->cpus; ) {
        size_t n = strcspn(line, "\n");
        if (!strncmp(line, "processor", 9)) {
            if (count < one->cpus) put("processor\t: %d\n", count);
            count++;
        } else put("%.*s\n", (int)n, line);
        line += n + (line[n] == '\n');
    }
    return 1;
}

static int write_range(const struct sandbox *one) {
    put(one->cpus > 1 ? "0-%d\n" : "%d\n", one->cpus - 1);
    return 1;
}

static int (*const writers[KINDS])(const struct sandbox *) = {
    write_meminfo, write_stat, write_loadavg, write_cpuinfo, write_range, write_range, write_range,
};

/* ---- sandboxes ---- */

/* Find what is known of a slot; a slot with another sandbox starts anew. The limits are the target of a symbolic link,
 * because the server must not read a file on this tmpfs: it would wait for itself. */
static int find(int slot, struct sandbox *one) {
    char path[32], limits[64];
    struct stat facts;
    snprintf(path, sizeof path, "s%d", slot);
    if (fstatat(root, path, &facts, 0)) return 0;
    snprintf(path, sizeof path, "s%d/limits", slot);
    ssize_t n = readlinkat(root, path, limits, sizeof limits - 1);
    if (n <= 0) return 0;
    limits[n] = 0;
    unsigned long long memory;
    if (sscanf(limits, "%llu:%d", &memory, &one->cpus) != 2 || one->cpus < 1) return 0;
    one->memory = memory;
    one->slot = slot;
    one->box = &boxes[slot];
    if (one->box->id != facts.st_ino) *one->box = (struct box){ .id = facts.st_ino };
    return 1;
}

/* Return which file of a sandbox an inode is, or KINDS. */
static enum kind kind_of(int slot, ino_t inode) {
    for (enum kind kind = 0; kind < KINDS; kind++) {
        char path[32];
        struct stat facts;
        snprintf(path, sizeof path, "s%d/%s", slot, names[kind]);
        if (!fstatat(root, path, &facts, AT_SYMLINK_NOFOLLOW) && facts.st_ino == inode) return kind;
    }
    return KINDS;
}

static int store(const struct sandbox *one, enum kind kind) {
    char path[32];
    snprintf(path, sizeof path, "s%d/%s", one->slot, names[kind]);
    int fd = openat(root, path, O_WRONLY | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0) return 0;
    int is_stored = pwrite(fd, text, length, 0) == (ssize_t)length && !ftruncate(fd, length);
    close(fd);
    return is_stored;
}

/* Return the slot of the sandbox that reads, or -1. The mount maps root's files to the first id of the sandbox. */
static int slot_of(int opened, struct stat *facts) {
    if (fstat(opened, facts) || facts->st_uid < first_id || (facts->st_uid - first_id) / RANGE >= SLOTS) return -1;
    return (facts->st_uid - first_id) / RANGE;
}

static void write_view(const struct sandbox *one, enum kind kind) {
    int64_t now = now_ms();
    if (one->box->fresh_ms[kind] && now - one->box->fresh_ms[kind] < FRESH_MS) return;
    length = 0;
    if (writers[kind](one) && store(one, kind)) one->box->fresh_ms[kind] = now;
    else if (!has_complained) {
        has_complained = 1;
        fprintf(stderr, "paddock-views: cannot write %s of slot %d: %s\n", names[kind], one->slot, strerror(errno));
    }
}

/* Rewrite the file that is about to be read. The reader sees the old contents if that fails. */
static void refresh(int opened, pid_t reader) {
    struct stat facts;
    struct sandbox one = { .reader = reader };
    int slot = slot_of(opened, &facts);
    if (slot < 0) return;
    enum kind kind = find(slot, &one) ? kind_of(slot, facts.st_ino) : KINDS;
    if (kind != KINDS) write_view(&one, kind);
}

/* Call a function for every sandbox. */
static void for_each(void (*act)(struct sandbox *, double), double argument) {
    int again = dup(root);
    DIR *directory = again < 0 ? NULL : fdopendir(again);
    if (!directory) return;
    rewinddir(directory);
    for (struct dirent *entry; (entry = readdir(directory)); ) {
        struct sandbox one = { 0 };
        int slot = atoi(entry->d_name + 1);
        if (entry->d_name[0] == 's' && slot >= 0 && slot < SLOTS && find(slot, &one)) act(&one, argument);
    }
    closedir(directory);
}

/* Sample the load of a sandbox, if it used a CPU since the last sample. */
static void sample(struct sandbox *one, double seconds) {
    static const double spans[3] = { 60, 300, 900 };
    int all, running = 0, blocked = 0;
    double used = cpu_seconds(one->slot);
    if (used != one->box->cpu_seconds) count_threads(one->slot, &all, &running, &blocked);
    one->box->cpu_seconds = used;
    for (int i = 0; i < 3; i++) {
        double kept = exp(-seconds / spans[i]);
        one->box->load[i] = one->box->load[i] * kept + (running + blocked) * (1 - kept);
    }
}

/* Write all files of a sandbox; any process of it shows its uptime. */
static void write_all(struct sandbox *one, double unused) {
    (void)unused;
    if (load("%s/s%d/cgroup.procs", unified, one->slot)) one->reader = atoi(source);
    for (enum kind kind = 0; kind < KINDS; kind++) write_view(one, kind);
}

/* ---- the server ---- */

/* Whether a read waits for the next window, because its sandbox has read too often in this one. */
static int is_delayed(int opened) {
    struct stat facts;
    int slot = slot_of(opened, &facts);
    if (slot < 0 || ndelayed == MOST_DELAYED) return 0;
    int64_t window = now_ms() / WINDOW_MS;
    if (boxes[slot].window != window) boxes[slot].reads = 0;
    boxes[slot].window = window;
    return ++boxes[slot].reads > WINDOW_READS;
}

static int allow(int events, int opened, pid_t reader) {
    struct fanotify_response response = { opened, FAN_ALLOW };
    refresh(opened, reader);
    int is_sent = write(events, &response, sizeof response) >= 0;
    close(opened);
    return is_sent;
}

static int allow_delayed(int events) {
    int is_sent = 1;
    for (int i = 0; i < ndelayed; i++) is_sent &= allow(events, delayed[i].fd, delayed[i].reader);
    ndelayed = 0;
    return is_sent;
}

static int answer(int events) {
    static char room[8 << 10] __attribute__((aligned(8)));    /* with the delayed ones below 1,024 descriptors */
    ssize_t n = read(events, room, sizeof room);
    if (n <= 0) return n < 0 && (errno == EINTR || errno == EAGAIN);
    for (struct fanotify_event_metadata *event = (void *)room; FAN_EVENT_OK(event, n); event = FAN_EVENT_NEXT(event, n)) {
        if (event->fd < 0) continue;
        if (is_delayed(event->fd)) {
            delayed[ndelayed].fd = event->fd;
            delayed[ndelayed++].reader = event->pid;
        } else if (!allow(events, event->fd, event->pid)) return 0;
    }
    return 1;
}

int main(int argc, char **argv) {
    if (argc != 6) return 64;
    first_id = strtoul(argv[2], NULL, 10);
    unified = argv[3];
    memory_group = argv[4];
    cpu_group = argv[5];
    prctl(PR_SET_NAME, "paddock-views");
    root = open(argv[1], O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    int events = fanotify_init(FAN_CLASS_CONTENT | FAN_CLOEXEC | FAN_NONBLOCK | FAN_UNLIMITED_QUEUE, O_RDONLY | O_CLOEXEC | O_LARGEFILE);
    if (root < 0 || events < 0 || fanotify_mark(events, FAN_MARK_ADD | FAN_MARK_FILESYSTEM, FAN_ACCESS_PERM, root, NULL)) {
        printf("%s\n", strerror(errno));
        return 71;
    }
    printf("ready\n");
    fflush(stdout);
    struct pollfd watched[2] = { { .fd = events, .events = POLLIN }, { .fd = 0, .events = POLLIN } };
    int64_t last = now_ms(), window = 0;
    for (;;) {
        int64_t now = now_ms(), left = last + SAMPLE_MS - now;
        if (now / WINDOW_MS != window && !allow_delayed(events)) return 71;
        window = now / WINDOW_MS;
        if (ndelayed && left > WINDOW_MS - now % WINDOW_MS) left = WINDOW_MS - now % WINDOW_MS;
        if (left > 0 && poll(watched, 2, (int)left) < 0 && errno != EINTR) return 71;
        if (left > 0 && watched[1].revents) {
            close(events);                   /* first: no read waits for the rest */
            for_each(write_all, 0);
            return 0;
        }
        if (left > 0 && watched[0].revents && !answer(events)) return 71;
        if (left <= 0) {
            for_each(sample, (now - last) / 1000.0);
            last = now;
        }
    }
}
