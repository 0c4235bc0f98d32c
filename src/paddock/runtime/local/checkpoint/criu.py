"""One run of CRIU, driven over its RPC socket (`criu swrk`).

Requests and responses are small protobuf messages. CRIU sends notifications and waits for a reply:
at `post-dump` the processes are still frozen, at `setup-namespaces` a restored tree has empty
namespaces, at `post-setup-namespaces` it has mounts but neither files nor sockets. The caller
passes handlers by notification name.
"""

import os
import select
import socket
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from paddock.kit.errors import DeadlineExceededError, UnavailableError
from paddock.wire.protobuf import (
    Message,
    ProtobufError,
    decode_message,
    encode_message,
    get_bytes,
    get_int,
)

POST_DUMP = "post-dump"
SETUP_NAMESPACES = "setup-namespaces"
POST_SETUP_NAMESPACES = "post-setup-namespaces"

_DUMP, _RESTORE, _NOTIFY = 1, 2, 6
_IGNORE_CGROUPS = 0
_LOCK_SKIP = 3
_NEWNET = 0x40000000
_GHOST_LIMIT = 1 << 30
_LOG_WARNINGS = 2
_MAX_ANSWER = 64 * 1024
_MAX_REASON = 1000
_EXIT_TIMEOUT_MS = 5000
_HARMLESS = ("RLIMIT_NOFILE for self", "cgroupd: recv req error", "Restoring FAILED")
"""Log lines that are not the cause: CRIU may not raise its own limits, or fails afterwards."""
_NO_GROUP = 96

NotifyHandler = Callable[[int], None]
"""Called with the pid of the restored root, or 0 if CRIU does not report it."""


class CriuError(UnavailableError):
    """CRIU failed."""

    def __init__(self, verb: str, reason: str) -> None:
        super().__init__(f"CRIU could not {verb} the sandbox: {reason}")
        self.verb = verb


class CriuRefusedError(CriuError):
    """CRIU replied that it cannot do it."""


class CriuOptions:
    """The `criu_opts` message of a request."""

    def __init__(self, *, images: int, log: str, seconds: int) -> None:
        self._fields: list[tuple[int, int | bytes | str]] = [
            (1, images),
            (9, _LOG_WARNINGS),
            (10, log),
            (12, 1),  # notify_scripts
            (34, _IGNORE_CGROUPS),
            (35, _GHOST_LIMIT),
            (38, _NEWNET),
            (45, seconds),
            (64, _LOCK_SKIP),
            (8, 1),  # file_locks
        ]

    def work_directory(self, fd: int) -> None:
        """Set the directory of the log."""
        self._fields.append((17, fd))

    def root_process(self, pid: int) -> None:
        """Set the root of the process tree to dump."""
        self._fields += [(2, pid), (5, 1), (18, 1), (46, 1)]

    def search_watched(self, directories: Iterable[str]) -> None:
        """Set the directories to search for inotify watches: overlayfs reports no paths."""
        self._fields += [(36, directory) for directory in directories]

    def leave_running(self) -> None:
        """Keep the dumped processes running."""
        self._fields.append((3, 1))

    def freeze_group(self, path: str) -> None:
        """Freeze the processes by their control group, and restore its state afterwards."""
        self._fields.append((44, path))

    def new_root(self, path: str) -> None:
        """Set the root directory of a restored tree."""
        self._fields.append((13, path))

    def keep_connections(self, *, keep: bool) -> None:
        """Restore established TCP connections, or close them."""
        self._fields.append((5, 1) if keep else (52, 1))

    def external_mounts(self, pairs: Iterable[tuple[str, str]]) -> None:
        """Add external mounts: on dump (mount point, key), on restore (key, path)."""
        self._fields += [(37, f"mnt[{one}]:{other}") for one, other in pairs]

    def encoded(self) -> bytes:
        return encode_message(self._fields)


class Criu:
    """A CRIU binary."""

    def __init__(self, path: Path, launcher: Path) -> None:
        """`launcher` starts programs in control groups (see `launch/native`)."""
        self.path = path
        self._launcher = launcher

    def dump(
        self,
        options: CriuOptions,
        handlers: Mapping[str, NotifyHandler],
        *,
        seconds: float,
        groups: Sequence[str] = (),
    ) -> None:
        """Dump a process tree. Raises `CriuError`; then the processes continue as before."""
        with self.start(groups) as run:
            run.request(_DUMP, options, handlers, seconds)

    def start(self, groups: Sequence[str] = ()) -> "CriuRun":
        """Start CRIU in control groups; restored processes start in the same groups.

        The first group is that of the unified hierarchy, in which CRIU is started directly: moving
        a process there waits for all CPUs, some ten milliseconds. `-` instead of it is that of the
        caller.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [str(self.path), "swrk", str(theirs.fileno())]
        if groups:
            # In a cgroup namespace rooted in the sandbox's group: CRIU does not manage cgroups
            # here, so restored processes would otherwise see the host's.
            command = [str(self._launcher), "run", *groups, "--", *command]
        with theirs:
            try:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                    cwd="/",
                    env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
                )
            except OSError as error:
                ours.close()
                raise UnavailableError(f"CRIU could not be started: {error}") from error
        return CriuRun(ours, process)


class CriuRun:
    """A CRIU process for one request; a context manager that ends it."""

    def __init__(self, channel: socket.socket, process: subprocess.Popen[bytes]) -> None:
        self._channel = channel
        self._process = process

    def __enter__(self) -> "CriuRun":
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()
        _end(self._process)

    def restore(
        self, options: CriuOptions, handlers: Mapping[str, NotifyHandler], *, seconds: float
    ) -> int:
        """Restore; return the pid of the root of the tree."""
        reply = self.request(_RESTORE, options, handlers, seconds)
        return get_int(decode_message(get_bytes(reply, 4)), 1)

    def request(
        self, kind: int, options: CriuOptions, handlers: Mapping[str, NotifyHandler], seconds: float
    ) -> Message:
        """Send the request, call the handlers on notifications, return the response."""
        channel = self._channel
        channel.settimeout(seconds)
        try:
            channel.send(encode_message([(1, kind), (2, options.encoded())]))
            return self._until_done(channel, kind, handlers)
        except (EOFError, ConnectionError) as error:
            channel.close()
            raise CriuError(_VERBS[kind], _exit_reason(_end(self._process))) from error
        except TimeoutError as error:
            raise DeadlineExceededError(f"CRIU did not finish within {seconds} s") from error
        except OSError as error:
            raise UnavailableError(f"communication with CRIU failed: {error}") from error
        except ProtobufError as error:
            raise CriuError(_VERBS[kind], f"its reply is malformed: {error}") from error

    def _until_done(
        self, channel: socket.socket, kind: int, handlers: Mapping[str, NotifyHandler]
    ) -> Message:
        problem: Exception | None = None
        while True:
            data = channel.recv(_MAX_ANSWER)
            if not data:
                raise problem or EOFError
            reply = decode_message(data)
            if get_int(reply, 1) != _NOTIFY:
                break
            notice = decode_message(get_bytes(reply, 5))
            try:
                _handle_notify(notice, handlers)
            except Exception as error:  # noqa: BLE001 - raised after CRIU has rolled back
                problem = error
            channel.send(encode_message([(1, _NOTIFY), (3, int(problem is None))]))
        if problem is not None:
            raise problem
        if not get_int(reply, 2):
            message = get_bytes(reply, 9).decode(errors="replace").strip()
            code = get_int(reply, 7)
            reason = message or (os.strerror(code) if code else "it gave no reason")
            raise CriuRefusedError(_VERBS[kind], reason)
        return reply


_VERBS = {_DUMP: "store", _RESTORE: "restore"}


def _handle_notify(notice: Message, handlers: Mapping[str, NotifyHandler]) -> None:
    name = get_bytes(notice, 1).decode()
    if (act := handlers.get(name)) is not None:
        act(get_int(notice, 2))


def _end(process: subprocess.Popen[bytes]) -> int:
    """Wait for the process, which ends when its socket is closed; kill it on timeout."""
    if (status := process.poll()) is not None:
        return status
    # `wait` with a timeout would poll with growing sleeps.
    pidfd = os.pidfd_open(process.pid)
    try:
        watch = select.poll()
        watch.register(pidfd, select.POLLIN)
        if not watch.poll(_EXIT_TIMEOUT_MS):
            process.kill()
    finally:
        os.close(pidfd)
    return process.wait()


def _exit_reason(status: int) -> str:
    if status == _NO_GROUP:
        return "the control groups of the sandbox could not be joined"
    if status < 0:
        return f"it was ended by signal {-status}, perhaps for lack of memory"
    return f"it ended with status {status} and without a reply"


def errors_in_log(log: Path) -> str:
    """Return the relevant error lines of a CRIU log."""
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    errors = (line.strip() for line in lines if "Error" in line)
    return " | ".join(
        line for line in errors if not any(harmless in line for harmless in _HARMLESS)
    )[:_MAX_REASON]
