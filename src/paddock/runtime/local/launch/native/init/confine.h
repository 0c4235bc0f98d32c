/*
 * The upper bound of privileges in a sandbox: a seccomp allow-list and a capability bounding set.
 *
 * Called by init while it still holds all capabilities of the sandbox's user namespace, so that the
 * filter needs no no_new_privs (set-uid programs such as sudo keep working) unless `locked` requests it.
 * Calls that are not listed fail with EPERM. These fail with ENOSYS instead: new calls, so that programs fall back
 * as on an older kernel; clone3, so that the C library uses clone, whose flags the filter can check; and calls of
 * another architecture.
 */
#include <errno.h>
#include <linux/audit.h>
#include <linux/capability.h>
#include <linux/filter.h>
#include <linux/netlink.h>
#include <linux/seccomp.h>
#include <netinet/in.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#if defined(__x86_64__)
#define OUR_ARCH AUDIT_ARCH_X86_64
#elif defined(__aarch64__)
#define OUR_ARCH AUDIT_ARCH_AARCH64
#else
#error "no seccomp architecture known for this machine"
#endif

static const short allowed_calls[] = {
#define A(name) __NR_##name,
    /* files */
    A(read) A(write) A(close) A(fstat) A(lseek) A(pread64) A(pwrite64) A(readv) A(writev) A(preadv) A(pwritev) A(preadv2)
    A(pwritev2) A(openat) A(openat2) A(newfstatat) A(statx) A(faccessat) A(faccessat2) A(readlinkat) A(linkat) A(symlinkat)
    A(unlinkat) A(renameat2) A(mkdirat) A(mknodat) A(fchmod) A(fchmodat) A(fchown) A(fchownat) A(utimensat) A(truncate)
    A(ftruncate) A(fallocate) A(fsync) A(fdatasync) A(sync) A(syncfs) A(sync_file_range) A(fadvise64) A(readahead) A(dup)
    A(dup3) A(fcntl) A(flock) A(ioctl) A(getdents64) A(getcwd) A(chdir) A(fchdir) A(chroot) A(umask) A(statfs) A(fstatfs)
    A(setxattr) A(lsetxattr) A(fsetxattr) A(getxattr) A(lgetxattr) A(fgetxattr) A(listxattr) A(llistxattr) A(flistxattr)
    A(removexattr) A(lremovexattr) A(fremovexattr) A(sendfile) A(splice) A(tee) A(vmsplice) A(copy_file_range) A(close_range)
    A(inotify_init1) A(inotify_add_watch) A(inotify_rm_watch) A(memfd_create) A(name_to_handle_at)
    /* memory */
    A(mmap) A(munmap) A(mprotect) A(mremap) A(brk) A(madvise) A(mincore) A(msync) A(mlock) A(mlock2) A(munlock) A(mlockall)
    A(munlockall) A(get_mempolicy) A(membarrier) A(pkey_alloc) A(pkey_free) A(pkey_mprotect)
    A(process_madvise) A(remap_file_pages)
    /* processes */
    A(clone) A(execve) A(execveat) A(exit) A(exit_group) A(wait4) A(waitid) A(getpid) A(getppid) A(gettid) A(getpgid) A(setpgid)
    A(getsid) A(setsid) A(getuid) A(geteuid) A(getgid) A(getegid) A(getresuid) A(getresgid) A(getgroups) A(setuid) A(setgid)
    A(setreuid) A(setregid) A(setresuid) A(setresgid) A(setgroups) A(setfsuid) A(setfsgid) A(capget) A(capset) A(prctl)
    A(getrlimit) A(setrlimit) A(prlimit64) A(getrusage) A(getpriority) A(setpriority) A(sched_yield) A(sched_getaffinity)
    A(sched_setaffinity) A(sched_getparam) A(sched_setparam) A(sched_getscheduler) A(sched_setscheduler) A(sched_getattr)
    A(sched_setattr) A(sched_get_priority_max) A(sched_get_priority_min) A(sched_rr_get_interval) A(ioprio_get) A(ioprio_set)
    A(kill) A(tkill) A(tgkill) A(pidfd_open) A(pidfd_send_signal) A(pidfd_getfd) A(ptrace) A(process_vm_readv)
    A(process_vm_writev) A(kcmp) A(personality) A(set_tid_address) A(set_robust_list) A(get_robust_list) A(rseq) A(unshare)
    A(seccomp) A(landlock_create_ruleset) A(landlock_add_rule) A(landlock_restrict_self) A(getcpu) A(times) A(vhangup)
    /* signals, time, waiting */
    A(rt_sigaction) A(rt_sigprocmask) A(rt_sigreturn) A(rt_sigpending) A(rt_sigtimedwait) A(rt_sigqueueinfo) A(rt_tgsigqueueinfo)
    A(rt_sigsuspend) A(sigaltstack) A(signalfd4) A(restart_syscall) A(nanosleep) A(clock_nanosleep) A(clock_gettime)
    A(clock_getres) A(gettimeofday) A(getitimer) A(setitimer) A(timer_create) A(timer_settime) A(timer_gettime)
    A(timer_getoverrun) A(timer_delete) A(timerfd_create) A(timerfd_settime) A(timerfd_gettime) A(eventfd2) A(epoll_create1)
    A(epoll_ctl) A(epoll_pwait) A(ppoll) A(pselect6) A(pipe2) A(futex)
    /* sockets and local messages */
    A(socket) A(socketpair) A(bind) A(listen) A(accept) A(accept4) A(connect) A(getsockname) A(getpeername) A(setsockopt)
    A(getsockopt) A(sendto) A(recvfrom) A(sendmsg) A(recvmsg) A(sendmmsg) A(recvmmsg) A(shutdown) A(shmget) A(shmat) A(shmdt)
    A(shmctl) A(semget) A(semop) A(semctl) A(semtimedop) A(msgget) A(msgsnd) A(msgrcv) A(msgctl)
    /* facts of the machine */
    A(uname) A(sysinfo) A(getrandom)
    /* Newer than the headers of many machines, but used by C libraries of images; the same numbers everywhere: */
    441 /* epoll_pwait2 */, 448 /* process_mrelease */, 449 /* futex_waitv */, 451 /* cachestat */, 452 /* fchmodat2 */, 453 /* map_shadow_stack */,
    454 /* futex_wake */, 455 /* futex_wait */, 456 /* futex_requeue */, 462 /* mseal */, 463 /* setxattrat */,
    464 /* getxattrat */, 465 /* listxattrat */, 466 /* removexattrat */,
#ifdef __NR_renameat
    A(renameat)
#endif
#ifdef __x86_64__
    A(open) A(creat) A(stat) A(lstat) A(access) A(readlink) A(link) A(symlink) A(unlink) A(rename) A(mkdir) A(rmdir) A(mknod)
    A(chmod) A(chown) A(lchown) A(utime) A(utimes) A(futimesat) A(getdents) A(dup2) A(pipe) A(select) A(poll) A(epoll_create)
    A(epoll_wait) A(eventfd) A(signalfd) A(inotify_init) A(fork) A(vfork) A(getpgrp) A(time) A(alarm) A(pause) A(arch_prctl)
    A(epoll_ctl_old) A(epoll_wait_old)
#endif
#undef A
};

/*
 * Calls that fail as on a kernel without them. Pending requests of asynchronous I/O are charged to no cgroup, and
 * all sandboxes of a machine share one count of them. The same holds for the bytes of POSIX message queues. CRIU cannot
 * store secret memory. Memory policies (mbind, set_mempolicy) are charged to no cgroup and outlive their mapping in a file
 * of memory; they are not in the list of allowed calls, so they fail with EPERM, as in other containers.
 */
static const short absent_calls[] = {
    __NR_io_setup, __NR_io_destroy, __NR_io_submit, __NR_io_cancel, __NR_io_getevents, __NR_io_pgetevents,
    __NR_mq_open, __NR_mq_unlink, __NR_mq_timedsend, __NR_mq_timedreceive, __NR_mq_notify, __NR_mq_getsetattr,
    447 /* memfd_secret */,
};

/*
 * Options of sockets that fail as on a kernel without them.
 * - A TCP socket stays a TCP socket (TCP_ULP makes SMC, ESP or TLS of it, in the kernel), a UDP socket no end of a tunnel.
 * - Packet filters are compiled, and all of a machine share one amount of memory for that; when it is used up, no
 *   sandbox can start. All of a machine share the number of flow labels, too.
 * - The others are memory that is charged to no cgroup: up to 128 KiB of keys or extension headers per socket, and copies
 *   of sent data that wait for the reader of their time stamps or notifications.
 */
static const struct { unsigned short level, name; } refused_options[] = {
    { IPPROTO_TCP, 31 /* TCP_ULP */ }, { IPPROTO_TCP, 14 /* TCP_MD5SIG */ }, { IPPROTO_TCP, 32 /* TCP_MD5SIG_EXT */ },
    { IPPROTO_TCP, 38 /* TCP_AO_ADD_KEY */ }, { IPPROTO_UDP, 100 /* UDP_ENCAP */ },
    { SOL_SOCKET, SO_ATTACH_FILTER }, { SOL_SOCKET, SO_ATTACH_BPF }, { SOL_SOCKET, SO_ATTACH_REUSEPORT_CBPF },
    { SOL_SOCKET, SO_ATTACH_REUSEPORT_EBPF }, { SOL_SOCKET, 37 /* SO_TIMESTAMPING_OLD */ },
    { SOL_SOCKET, 65 /* SO_TIMESTAMPING_NEW */ }, { SOL_SOCKET, 60 /* SO_ZEROCOPY */ },
    { IPPROTO_IPV6, 3 /* IPV6_2292HOPOPTS */ }, { IPPROTO_IPV6, 4 /* IPV6_2292DSTOPTS */ },
    { IPPROTO_IPV6, 5 /* IPV6_2292RTHDR */ }, { IPPROTO_IPV6, 6 /* IPV6_2292PKTOPTIONS */ },
    { IPPROTO_IPV6, 32 /* IPV6_FLOWLABEL_MGR */ }, { IPPROTO_IPV6, 54 /* IPV6_HOPOPTS */ },
    { IPPROTO_IPV6, 55 /* IPV6_RTHDRDSTOPTS */ }, { IPPROTO_IPV6, 57 /* IPV6_RTHDR */ },
    { IPPROTO_IPV6, 59 /* IPV6_DSTOPTS */ },
};
enum { REFUSED_OPTIONS = sizeof refused_options / sizeof *refused_options };

/* Capabilities that root inside keeps: none for mounts, devices, networks or tracing others. */
static const unsigned char kept_capabilities[] = {
    CAP_CHOWN, CAP_DAC_OVERRIDE, CAP_FOWNER, CAP_FSETID, CAP_KILL, CAP_SETGID, CAP_SETUID, CAP_SETPCAP,
    CAP_NET_BIND_SERVICE, CAP_SYS_CHROOT, CAP_SETFCAP, CAP_AUDIT_WRITE,
};

/*
 * Init keeps one more capability, only to protect itself: a process may not trace another one that has a capability
 * it lacks, and no other process in a sandbox can have this one, because it is not in the bounding set. Being not
 * dumpable would protect it, too, but a restored process that is not dumpable cannot be dumped again (its memory then
 * belongs to the host's user namespace, where CRIU's code inside the sandbox has no permission).
 */
enum { GUARD = CAP_WAKE_ALARM };

enum { NR_ROOM = 600, LAST_OLD = 450 };
/* CLONE_NEWNS|NEWCGROUP|NEWUTS|NEWIPC|NEWUSER|NEWPID|NEWNET and, for unshare, NEWTIME */
#define NEW_NAMESPACES (0x00020000u | 0x02000000u | 0x04000000u | 0x08000000u | 0x10000000u | 0x20000000u | 0x40000000u)
#define NEW_TIME 0x00000080u

static int install_filter(void) {
    static unsigned char ok[NR_ROOM];
    static struct sock_filter f[1024];
    unsigned short n = 0;
    const uint32_t low = offsetof(struct seccomp_data, args[0]), second = offsetof(struct seccomp_data, args[1]);
    const uint32_t third = offsetof(struct seccomp_data, args[2]);
    for (size_t i = 0; i < sizeof allowed_calls / sizeof *allowed_calls; i++)
        if (allowed_calls[i] >= 0 && allowed_calls[i] < NR_ROOM) ok[allowed_calls[i]] = 1;
    ok[__NR_clone] = ok[__NR_unshare] = 0;
#define S(code, k) f[n++] = (struct sock_filter)BPF_STMT(code, k)
#define J(code, k, t, e) f[n++] = (struct sock_filter)BPF_JUMP(code, k, t, e)
#define RET(action) S(BPF_RET | BPF_K, action)
    S(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, arch));
    J(BPF_JMP | BPF_JEQ | BPF_K, OUR_ARCH, 1, 0);
    RET(SECCOMP_RET_ERRNO | ENOSYS);
    S(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr));
    /* namespaces: neither by clone nor by unshare */
    J(BPF_JMP | BPF_JEQ | BPF_K, __NR_clone, 0, 4);
    S(BPF_LD | BPF_W | BPF_ABS, low);
    J(BPF_JMP | BPF_JSET | BPF_K, NEW_NAMESPACES, 0, 1);
    RET(SECCOMP_RET_ERRNO | EPERM);
    RET(SECCOMP_RET_ALLOW);
    J(BPF_JMP | BPF_JEQ | BPF_K, __NR_unshare, 0, 4);
    S(BPF_LD | BPF_W | BPF_ABS, low);
    J(BPF_JMP | BPF_JSET | BPF_K, NEW_NAMESPACES | NEW_TIME, 0, 1);
    RET(SECCOMP_RET_ERRNO | EPERM);
    RET(SECCOMP_RET_ALLOW);
    J(BPF_JMP | BPF_JEQ | BPF_K, __NR_clone3, 0, 1);
    RET(SECCOMP_RET_ERRNO | ENOSYS);
    for (size_t i = 0; i < sizeof absent_calls / sizeof *absent_calls; i++) {
        J(BPF_JMP | BPF_JEQ | BPF_K, absent_calls[i], 0, 1);
        RET(SECCOMP_RET_ERRNO | ENOSYS);
    }
    /* socket and socketpair: only unix, inet, inet6 and netlink, not AF_VSOCK, AF_TIPC, AF_ALG, AF_PACKET, AF_KEY and
       others; of inet only TCP, UDP and ping, not MPTCP, UDP-Lite, SCTP, SMC and others, which CRIU cannot store (a
       type implies a protocol); of netlink only the protocols that list links, sockets and devices, not those that
       configure packet filters, IPsec and audit */
    J(BPF_JMP | BPF_JEQ | BPF_K, __NR_socket, 1, 0);
    J(BPF_JMP | BPF_JEQ | BPF_K, __NR_socketpair, 0, 23);
    S(BPF_LD | BPF_W | BPF_ABS, low);
    J(BPF_JMP | BPF_JEQ | BPF_K, AF_UNIX, 20, 0);
    J(BPF_JMP | BPF_JEQ | BPF_K, AF_INET, 8, 0);
    J(BPF_JMP | BPF_JEQ | BPF_K, AF_INET6, 7, 0);
    J(BPF_JMP | BPF_JEQ | BPF_K, AF_NETLINK, 1, 0);
    RET(SECCOMP_RET_ERRNO | EAFNOSUPPORT);
    S(BPF_LD | BPF_W | BPF_ABS, third);
    J(BPF_JMP | BPF_JEQ | BPF_K, NETLINK_ROUTE, 14, 0);
    J(BPF_JMP | BPF_JEQ | BPF_K, NETLINK_SOCK_DIAG, 13, 0);
    J(BPF_JMP | BPF_JEQ | BPF_K, NETLINK_KOBJECT_UEVENT, 12, 0);
    RET(SECCOMP_RET_ERRNO | EPROTONOSUPPORT);
    S(BPF_LD | BPF_W | BPF_ABS, second);
    S(BPF_ALU | BPF_AND | BPF_K, 0xf);       /* without SOCK_NONBLOCK and SOCK_CLOEXEC */
    J(BPF_JMP | BPF_JGT | BPF_K, SOCK_RAW, 7, 0);
    S(BPF_LD | BPF_W | BPF_ABS, third);
    J(BPF_JMP | BPF_JEQ | BPF_K, IPPROTO_IP, 6, 0);
    J(BPF_JMP | BPF_JEQ | BPF_K, IPPROTO_ICMP, 5, 0);
    J(BPF_JMP | BPF_JEQ | BPF_K, IPPROTO_TCP, 4, 0);
    J(BPF_JMP | BPF_JEQ | BPF_K, IPPROTO_UDP, 3, 0);
    J(BPF_JMP | BPF_JEQ | BPF_K, IPPROTO_ICMPV6, 2, 0);
    RET(SECCOMP_RET_ERRNO | EPROTONOSUPPORT);
    RET(SECCOMP_RET_ERRNO | ESOCKTNOSUPPORT);
    RET(SECCOMP_RET_ALLOW);
    J(BPF_JMP | BPF_JEQ | BPF_K, __NR_setsockopt, 0, 5 * REFUSED_OPTIONS + 1);
    for (size_t i = 0; i < REFUSED_OPTIONS; i++) {
        S(BPF_LD | BPF_W | BPF_ABS, second);
        J(BPF_JMP | BPF_JEQ | BPF_K, refused_options[i].level, 0, 3);
        S(BPF_LD | BPF_W | BPF_ABS, third);
        J(BPF_JMP | BPF_JEQ | BPF_K, refused_options[i].name, 0, 1);
        RET(SECCOMP_RET_ERRNO | ENOPROTOOPT);
    }
    RET(SECCOMP_RET_ALLOW);
    /* Names of mappings are charged to no cgroup. A kernel without them fails in the same way. */
    J(BPF_JMP | BPF_JEQ | BPF_K, __NR_prctl, 0, 4);
    S(BPF_LD | BPF_W | BPF_ABS, low);
    J(BPF_JMP | BPF_JEQ | BPF_K, 0x53564d41 /* PR_SET_VMA */, 0, 1);
    RET(SECCOMP_RET_ERRNO | EINVAL);
    RET(SECCOMP_RET_ALLOW);
    ok[__NR_prctl] = 0;
    /* Init has the same user as root inside, who could therefore end or stall it by a limit of its CPU time, by its
       priority or by its CPUs. PRIO_USER and IOPRIO_WHO_USER of the own user (0) include init if that is root. */
    static const short by_pid[] = {
        __NR_prlimit64, __NR_sched_setaffinity, __NR_sched_setparam, __NR_sched_setscheduler, __NR_sched_setattr,
    };
    static const struct { short number; unsigned user; } by_kind[] = { { __NR_setpriority, 2 }, { __NR_ioprio_set, 3 } };
    for (size_t i = 0; i < sizeof by_pid / sizeof *by_pid; i++) {
        J(BPF_JMP | BPF_JEQ | BPF_K, by_pid[i], 0, 4);
        S(BPF_LD | BPF_W | BPF_ABS, low);
        J(BPF_JMP | BPF_JEQ | BPF_K, 1, 0, 1);
        RET(SECCOMP_RET_ERRNO | EPERM);
        RET(SECCOMP_RET_ALLOW);
        ok[by_pid[i]] = 0;
    }
    for (size_t i = 0; i < sizeof by_kind / sizeof *by_kind; i++) {
        J(BPF_JMP | BPF_JEQ | BPF_K, by_kind[i].number, 0, 7);
        S(BPF_LD | BPF_W | BPF_ABS, second);
        J(BPF_JMP | BPF_JEQ | BPF_K, 1, 3, 0);
        J(BPF_JMP | BPF_JEQ | BPF_K, 0, 0, 3);
        S(BPF_LD | BPF_W | BPF_ABS, low);
        J(BPF_JMP | BPF_JEQ | BPF_K, by_kind[i].user, 0, 1);
        RET(SECCOMP_RET_ERRNO | EPERM);
        RET(SECCOMP_RET_ALLOW);
        ok[by_kind[i].number] = 0;
    }
    /* ioctl: TIOCSTI and TIOCLINUX can inject input into another process's terminal */
    J(BPF_JMP | BPF_JEQ | BPF_K, __NR_ioctl, 0, 5);
    S(BPF_LD | BPF_W | BPF_ABS, second);
    J(BPF_JMP | BPF_JEQ | BPF_K, 0x5412, 1, 0);
    J(BPF_JMP | BPF_JEQ | BPF_K, 0x541C, 0, 1);
    RET(SECCOMP_RET_ERRNO | EPERM);
    RET(SECCOMP_RET_ALLOW);
    ok[__NR_socket] = ok[__NR_socketpair] = ok[__NR_setsockopt] = ok[__NR_ioctl] = 0;
    /* all others as ascending ranges: above a range, try the next; inside it, allow; below it, refuse */
    for (int a = 0; a < NR_ROOM;) {
        if (!ok[a]) { a++; continue; }
        int b = a;
        while (b + 1 < NR_ROOM && ok[b + 1]) b++;
        J(BPF_JMP | BPF_JGT | BPF_K, b, 3, 0);
        J(BPF_JMP | BPF_JGE | BPF_K, a, 0, 1);
        RET(SECCOMP_RET_ALLOW);
        RET(SECCOMP_RET_ERRNO | (a > LAST_OLD ? ENOSYS : EPERM));
        a = b + 1;
    }
    RET(SECCOMP_RET_ERRNO | ENOSYS);
#undef S
#undef J
#undef RET
    struct sock_fprog program = { n, f };
    return prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program, 0, 0);
}

static int drop_capabilities(void) {
    uint64_t kept = 0;
    for (size_t i = 0; i < sizeof kept_capabilities; i++) kept |= 1ull << kept_capabilities[i];
    for (int cap = 0; cap < 64; cap++)
        if (!(kept >> cap & 1) && prctl(PR_CAPBSET_DROP, cap, 0, 0, 0) < 0 && errno != EINVAL) return -1;
    struct __user_cap_header_struct head = { _LINUX_CAPABILITY_VERSION_3, 0 };
    uint64_t permitted = kept | 1ull << GUARD;
    struct __user_cap_data_struct data[2] = {
        { (uint32_t)kept, (uint32_t)permitted, 0 }, { kept >> 32, permitted >> 32, 0 },
    };
    prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0);
    return syscall(SYS_capset, &head, data);
}

static int confine(int locked) {
    if (locked && prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)) return -1;
    if (install_filter()) return -1;
    return drop_capabilities();
}
