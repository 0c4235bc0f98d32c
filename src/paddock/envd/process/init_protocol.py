"""The wire protocol between a sandbox's init and its clients. The client is in `init_client.py`.

Init (pid 1 of a sandbox, `runtime/local/launch/native/init/init.c`) is the parent of every
command. It keeps two SOCK_SEQPACKET socketpairs open, both ends of each, at fixed descriptors:

    fd 100 (init's end)   fd 101 (client end)    channel of envd
    fd 102 (init's end)   fd 103 (client end)    channel of the node

A client outside of the sandbox copies a client end with `pidfd_getfd`
(`init_client.take_channel`). There is no listener, nothing is reachable from inside, and a
checkpoint sees a closed tree. A channel must have ONE reader at a time. A new reader starts with
ATTACH, which returns every process of that channel with its descriptors, so that a new envd
continues after one that was killed, or after its sandbox was restored. Data from init come from
inside a sandbox and are validated here.

Datagrams, little endian. Header of 12 bytes: u8 op, u8 flags, u16 zero, u32 seq, i32 status.
A reply repeats the request's op with bit 0x80, and its seq; status is 0 or -errno. Flag MORE (1)
in a request: the body continues in the next datagram (same op and seq). In an ATTACH reply: more
records follow.

    PING    1  -                                   -> u32 version, u32 processes
    ATTACH  2  u64 session                         -> MORE * (record, fds), then u64 session
    SPAWN   3  see `encode_spawn`                  -> record, fds; or -errno and u32 stage (`Stage`)
    SIGNAL  4  u32 id, i32 signo, u32 scope        -> u32 how many processes were signalled
    CLOSE_STDIN 5  u32 id                          -> (close your own copy of the write end too)
    FORGET  6  u32 id                              -> EBUSY while it runs
    EXIT 0x40 (event, seq 0)                       record without descriptors and memo

Record: u32 id, u32 pid (as inside), u32 flags (`PTY` 1, `STDIN_OPEN` 2, `EXITED` 4), u32 fdmask,
i32 wait status, u32 memo length, u64 user us, u64 system us, u64 peak rss KiB, memo. Descriptors
come by SCM_RIGHTS in the order of fdmask's bits: 1 stdin (write end), 2 stdout, 4 stderr, 8 pty
master.
Init keeps its own copies until FORGET, so that no pipe breaks when a client dies. For the same
reason end-of-file on stdin needs CLOSE_STDIN in addition to closing the client's copy.

The memo is opaque to init: envd stores in it what the next envd needs to serve a process.
"""

import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, IntFlag

VERSION = 1
ENVD_CHANNEL_FD = 101
NODE_CHANNEL_FD = 103

PING, ATTACH, SPAWN, SIGNAL, CLOSE_STDIN, FORGET = 1, 2, 3, 4, 5, 6
REPLY, EXIT = 0x80, 0x40
MORE = 1

_HEADER = struct.Struct("<BBHIi")
_RECORD = struct.Struct("<IIIIiIQQQ")
_SPAWN = struct.Struct("<IIIHHHHhhII")
CHUNK = 60_000
_MAX_REQUEST = 4 << 20
MAX_MEMO = 48_000
"""A record must fit in one datagram; init refuses a longer memo."""


class SpawnFlags(IntFlag):
    """How standard streams are created; without PTY and STDIN_PIPE, stdin is /dev/null."""

    PTY = 1
    STDIN_PIPE = 2
    MERGE_STDERR = 4
    """Standard error goes into the pipe of standard output, which keeps their order."""


_NO_FLAGS = SpawnFlags(0)


class RecordFlags(IntFlag):
    """The state of a process in a record."""

    PTY = 1
    STDIN_OPEN = 2
    EXITED = 4


class SignalScope(IntEnum):
    """The processes that receive a signal."""

    PROCESS = 0
    TREE = 2
    """The command, its session and all their descendants as of now, also when the command ended."""


class Stage(IntEnum):
    """The step at which a spawn failed."""

    NONE = 0
    STREAMS = 1
    FORK = 2
    IDENTITY = 3
    DIRECTORY = 4
    EXEC = 5
    REQUEST = 6


class InitError(OSError):
    """Init returned an error: `errno`, and for spawns the `stage`."""

    def __init__(self, number: int, stage: Stage = Stage.NONE) -> None:
        super().__init__(number, os.strerror(number))
        self.stage = stage


class ProtocolError(Exception):
    """A malformed message from init, whose sandbox may be hostile: drop the channel."""


class DescriptorsLostError(ProtocolError):
    """Fewer descriptors arrived than init sent: this process has reached its limit."""


class ChannelClosedError(Exception):
    """The channel is closed: the sandbox has ended."""


@dataclass(frozen=True, slots=True)
class ProcessRecord:
    """A process in init's table. The receiver must close `fds`."""

    id: int
    pid: int
    flags: RecordFlags
    wait_status: int
    user_us: int
    system_us: int
    peak_rss_kib: int
    memo: bytes = b""
    stdin: int | None = None
    stdout: int | None = None
    stderr: int | None = None
    pty: int | None = None

    @property
    def fds(self) -> tuple[int, ...]:
        """The descriptors of this record."""
        return tuple(f for f in (self.stdin, self.stdout, self.stderr, self.pty) if f is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpawnRequest:
    """A command to run. `env` is the complete environment; `argv[0]` is looked up in its PATH."""

    id: int
    argv: Sequence[str | bytes]
    env: Mapping[str, str]
    cwd: str = "/"
    uid: int = 0
    gid: int = 0
    groups: Sequence[int] = ()
    flags: SpawnFlags = _NO_FLAGS
    rows: int = 24
    cols: int = 80
    oom_score_adj: int = 100
    nice: int = 0
    memo: bytes = b""


@dataclass(frozen=True, slots=True)
class InitMessage:
    """One datagram, decoded as far as its header."""

    op: int
    flags: int
    seq: int
    status: int
    body: bytes
    fds: list[int] = field(default_factory=list[int])


def encode(op: int, seq: int, body: bytes = b"") -> list[bytes]:
    """Encode a request as one or more datagrams."""
    if len(body) > _MAX_REQUEST:
        raise InitError(7, Stage.REQUEST)  # E2BIG, as execve returns
    chunks = [body[i : i + CHUNK] for i in range(0, len(body), CHUNK)] or [b""]
    last = len(chunks) - 1
    return [
        _HEADER.pack(op, 0 if i == last else MORE, 0, seq, 0) + chunk
        for i, chunk in enumerate(chunks)
    ]


def encode_spawn(request: SpawnRequest) -> bytes:
    """Encode the body of SPAWN: numbers, groups; cwd, argv, env, memo as u32 length + bytes."""
    env = [f"{key}={value}" for key, value in request.env.items()]
    strings = [request.cwd, *request.argv, *env]
    encoded = [os.fsencode(s) for s in strings] + [request.memo]
    if any(b"\0" in s for s in encoded[:-1]):
        raise InitError(22, Stage.REQUEST)
    parts = [
        _SPAWN.pack(
            request.id,
            request.uid,
            request.gid,
            len(request.groups),
            request.rows,
            request.cols,
            int(request.flags),
            request.oom_score_adj,
            request.nice,
            len(request.argv),
            len(env),
        ),
        struct.pack(f"<{len(request.groups)}I", *request.groups),
    ]
    for item in encoded:
        parts += (struct.pack("<I", len(item)), item)
    return b"".join(parts)


def decode(data: bytes, fds: list[int]) -> InitMessage:
    """Decode the header of a datagram."""
    if len(data) < _HEADER.size:
        raise ProtocolError("datagram shorter than its header")
    op, flags, _, seq, status = _HEADER.unpack_from(data)
    return InitMessage(op, flags, seq, status, data[_HEADER.size :], fds)


def encode_record(ident: int, pid: int, flags: RecordFlags, fdmask: int = 0) -> bytes:
    """Encode a record as init does, without memo and usage."""
    return _RECORD.pack(ident, pid, int(flags), fdmask, 0, 0, 0, 0, 0)


def decode_record(message: InitMessage) -> ProcessRecord:
    """Decode a record; it takes over the descriptors of the message."""
    if len(message.body) < _RECORD.size:
        raise ProtocolError("record too short")
    ident, pid, flags, mask, status, memo_size, user, system, rss = _RECORD.unpack_from(
        message.body
    )
    memo = message.body[_RECORD.size : _RECORD.size + memo_size]
    named = (mask & 15).bit_count()
    if named > len(message.fds) and len(memo) == memo_size and mask <= 15:
        raise DescriptorsLostError(f"{len(message.fds)} of {named} descriptors were received")
    if len(memo) != memo_size or named != len(message.fds) or mask > 15:
        raise ProtocolError("record does not match its size or descriptors")
    fds = iter(message.fds)
    ends = [next(fds) if mask & bit else None for bit in (1, 2, 4, 8)]
    known = RecordFlags(flags & 7)
    return ProcessRecord(ident, pid, known, status, user, system, rss, memo, *ends)
