"""Attacks that take kernel memory: programs for Python inside a sandbox.

Each tries to take a multiple of what a sandbox may take beyond its limit. `WATCHED` must end the
sandbox with a reason that contains the given words, `REFUSED` must fail with the given error.
"""

PRELUDE = """
import ctypes, errno, fcntl, os, resource, signal, socket, struct, threading, time
libc = ctypes.CDLL(None, use_errno=True)
most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
threading.stack_size(65536)
kept = []
def check(result):
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
def in_processes(count, work):
    for number in range(count):
        if os.fork() == 0:
            try:
                work(number)
            except OSError as problem:
                print(number, problem, flush=True)
            time.sleep(300)
    time.sleep(300)
def in_threads(count, work):
    def guarded(number):
        try:
            work(number)
        except OSError as problem:
            print(number, problem, flush=True)
        time.sleep(300)
    for number in range(count):
        threading.Thread(target=guarded, args=(number,), daemon=True).start()
def install_filters():
    divide, allow = struct.pack("HBBI", 0x34, 0, 0, 7), struct.pack("HBBI", 0x06, 0, 0, 0x7FFF0000)
    libc.prctl(38, 1, 0, 0, 0)  # no new privileges
    program = ctypes.create_string_buffer(divide * 4089 + allow)
    head = ctypes.create_string_buffer(struct.pack("HxxxxxxP", 4090, ctypes.addressof(program)))
    while libc.prctl(22, 2, head, 0, 0) == 0:
        pass
"""

WATCHED = {
    "unread messages of netlink sockets": (
        "unread messages of netlink sockets",
        """
def work(number):
    request = struct.pack("IHHII", 32, 18, 0x301, 1, 0) + bytes(16)
    for _ in range(1500):
        one = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)
        one.send(request)
        one.recv(65536)  # the kernel allocates as much for the next message
        one.setblocking(False)
        try:
            while True:
                one.recv(65536)
        except BlockingIOError:
            pass
        one.send(request)
        kept.append(one)
in_processes(2, work)
""",
    ),
    "unsent data of UDP sockets": (
        "unsent data",
        """
def work(number):
    for _ in range(1000):
        one = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        one.connect(("127.0.0.1", 9))
        one.setsockopt(socket.IPPROTO_UDP, 1, 1)  # UDP_CORK
        one.send(bytes(60000))
        kept.append(one)
in_processes(2, work)
""",
    ),
    "error queues of UDP sockets": (
        "errors of UDP sockets",
        """
def work(number):
    for _ in range(1000):
        one = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        one.setsockopt(socket.IPPROTO_IP, 11, 1)  # IP_RECVERR
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        one.connect(("127.0.0.1", 9))
        for _ in range(700):
            try:
                one.send(bytes(1000))
            except ConnectionRefusedError:
                pass
        kept.append(one)
in_processes(2, work)
""",
    ),
    "file locks": (
        "file locks",
        """
def work(number):
    for name in range(70):
        fd = os.open(f"/tmp/locked-{os.getuid()}-{number}-{name}", os.O_RDWR | os.O_CREAT)
        for at in range(1000):
            fcntl.lockf(fd, fcntl.LOCK_EX, 1, 2 * at)
in_processes(2, work)
""",
    ),
    "file locks of open files": (
        "file locks",
        """
def work(number):
    for name in range(70):
        fd = os.open(f"/tmp/locked-{os.getuid()}-{number}-{name}", os.O_RDWR | os.O_CREAT)
        for at in range(1000):
            fcntl.fcntl(fd, 37, struct.pack("hhqqi4x", 1, 0, 2 * at, 1, 0))  # F_OFD_SETLK
in_processes(2, work)
""",
    ),
    "seccomp filters": (
        "seccomp filters",
        """in_processes(150, lambda number: install_filters())""",
    ),
    "open descriptors": (
        "open descriptors",
        """
def work(number):
    while libc.timerfd_create(1, 0) >= 0:
        pass
in_processes(6, work)
""",
    ),
    "descriptors of threads with tables of their own": (
        "open descriptors",
        """
def work(number):
    check(libc.unshare(0x400))  # CLONE_FILES
    while libc.timerfd_create(1, 0) >= 0:
        pass
in_threads(6, work)
time.sleep(300)
""",
    ),
    "descriptors of a process without a first thread": (
        "open descriptors",
        """
def work(number):
    def fill(_):
        time.sleep(0.5)
        while libc.timerfd_create(1, 0) >= 0:
            pass
    in_threads(1, fill)
    libc.syscall(60, 0)  # exits this thread alone
in_processes(6, work)
""",
    ),
    "multicast groups": (
        "multicast groups",
        """
def work(number):
    for index in range(300):
        one = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
        kept.append(one)
        try:
            for group in range(5000):
                address = struct.pack(">8H", 0xFF02, 0, 0, 0, 0, number + 1, index, group)
                one.setsockopt(41, 20, address + struct.pack("I", 1))  # IPV6_JOIN_GROUP
        except OSError:
            pass
in_processes(2, work)
""",
    ),
    "connections that nobody accepts": (
        "connections that nobody accepts",
        """
def work(number):
    for _ in range(30):
        listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
        kept.append(listener)
        for _ in range(4000):
            socket.create_connection(listener.getsockname()).close()
in_processes(2, work)
""",
    ),
    "pending signals": (
        "pending signals",
        """
def work(number):
    os.setuid(2000 + number)
    signal.pthread_sigmask(signal.SIG_BLOCK, {40})
    info = ctypes.create_string_buffer(struct.pack("iii", 40, 0, -1) + bytes(128))
    for _ in range(9000):
        libc.syscall(129, os.getpid(), 40, info)
in_processes(2, work)
""",
    ),
}

REFUSED = {
    "memory policies of shared memory": (
        "EPERM",
        """
number = 0
while True:
    number += 1
    fd = check(libc.memfd_create(b"x", 0))
    os.ftruncate(fd, 1 << 40)
    kept.append(fd)
    libc.mmap.restype = ctypes.c_void_p
    mask = ctypes.c_ulong(1)
    for window in range(8):
        size = 30000 * 4096
        at = libc.mmap(None, ctypes.c_size_t(size), 3, 1, fd, ctypes.c_long(window * size))
        for page in range(0, 30000, 2):
            check(libc.syscall(237, ctypes.c_void_p(at + page * 4096), ctypes.c_ulong(4096), 2,
                               ctypes.byref(mask), ctypes.c_ulong(2), 0))  # mbind
        libc.munmap(ctypes.c_void_p(at), ctypes.c_size_t(size))
""",
    ),
    "sticky options of IPv6 sockets": (
        "ENOPROTOOPT",
        """
cmsg = struct.pack("Qiii4x", 20, 41, 52, 3)  # IPV6_HOPLIMIT
blob = cmsg * 2600
for _ in range(6000):
    one = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
    kept.append(one)
    one.setsockopt(41, 6, blob)  # IPV6_2292PKTOPTIONS
""",
    ),
    "keys of TCP sockets": (
        "ENOPROTOOPT",
        """
for index in range(3000):
    one = socket.socket(socket.AF_INET6, socket.SOCK_STREAM)
    kept.append(one)
    for key in range(600):
        peer = struct.pack("H2xI", 10, 0) + struct.pack(">8H", 0xFD00, 0, 0, 0, 0, 0, 0, key + 1)
        wanted = (peer + bytes(4)).ljust(128, b"\\0") + struct.pack("BBHi", 0, 0, 80, 0) + b"k" * 80
        try:
            one.setsockopt(6, 14, wanted)  # TCP_MD5SIG
        except OSError as problem:
            if key == 0:
                raise
            break
""",
    ),
    "sent time stamps of TCP sockets": (
        "ENOPROTOOPT",
        """
for index in range(400):
    listener = socket.create_server(("127.0.0.1", 0))
    sender = socket.create_connection(listener.getsockname())
    receiver, _ = listener.accept()
    listener.close()
    sender.setsockopt(socket.SOL_SOCKET, 37, 2 | 16 | 512)  # SO_TIMESTAMPING, of acknowledgements
    sender.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
    sender.setsockopt(6, 1, 1)
    for _ in range(300):
        sender.send(bytes(1000))
        receiver.recv(100000)
    kept.extend((sender, receiver))
""",
    ),
    "copies of sent data by messages": (
        "EAGAIN",
        """
listener = socket.create_server(("127.0.0.1", 0))
sender = socket.create_connection(listener.getsockname())
receiver, _ = listener.accept()
for _ in range(10):
    # SCM_TIMESTAMPING: the time when the message is sent and acknowledged
    sender.sendmsg([bytes(1000)], [(socket.SOL_SOCKET, 37, struct.pack("I", 2 | 256 | 512))])
    receiver.recv(100000)
print(sender.recvmsg(1000, 1000, 0x2000 | socket.MSG_DONTWAIT))  # MSG_ERRQUEUE
""",
    ),
    "names of mappings": (
        "EINVAL",
        """
name = ctypes.create_string_buffer(b"x")
check(libc.prctl(0x53564D41, 0, ctypes.c_void_p(0), ctypes.c_ulong(4096), name))
""",
    ),
    "secret memory": (
        "ENOSYS",
        """
check(libc.syscall(447, 0))
""",
    ),
}
