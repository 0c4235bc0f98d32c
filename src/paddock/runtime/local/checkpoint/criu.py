"""One run of CRIU, driven over its RPC socket (`criu swrk`).

Requests and answers are small protobuf messages. While CRIU works it stops at a few moments and
asks: at `post-dump` the processes still stand, at `setup-namespaces` a restored tree has its
namespaces and nothing in them, at `post-setup-namespaces` it has mounts but no files and sockets.
What is to be done then is handed in as functions by moment.
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
NAMESPACES_ARE_SET_UP = "post-setup-namespaces"

_DUMP, _RESTORE, _NOTIFY = 1, 2, 6
_IGNORE_CGROUPS = 0
_LOCK_SKIP = 3
_NEWNET = 0x40000000
_GHOST_LIMIT = 1 << 30
_LOG_WARNINGS = 2
_MAX_ANSWER = 64 * 1024
_MAX_REASON = 1000
_PATIENCE_MS = 5000
_HARMLESS = ("RLIMIT_NOFILE for self", "cgroupd: recv req error", "Restoring FAILED")
"""Where CRIU may not raise its own limits, or ends after something else failed."""
_NO_GROUP = 96

Moment = Callable[[int], None]
"""Called with the pid of the restored root, or 0 where CRIU does not say."""


class CriuError(UnavailableError):
    """CRIU gave up."""

    def __init__(self, verb: str, reason: str) -> None:
        super().__init__(f"CRIU could not {verb} the sandbox: {reason}")
        self.verb = verb


class Options:
    """The options of a request, by what they mean."""

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
        """Where the log goes."""
        self._fields.append((17, fd))

    def root_process(self, pid: int) -> None:
        """What to dump."""
        self._fields += [(2, pid), (5, 1), (18, 1), (46, 1)]

    def look_for_watched(self, directories: Iterable[str]) -> None:
        """Where to search for what is watched by inotify: an overlay does not tell its names."""
        self._fields += [(36, directory) for directory in directories]

    def leave_running(self) -> None:
        """Let the dumped processes live."""
        self._fields.append((3, 1))

    def freeze_group(self, path: str) -> None:
        """Stop processes by their group (and leave it as it was)."""
        self._fields.append((44, path))

    def new_root(self, path: str) -> None:
        """What a restored tree sees as `/`."""
        self._fields.append((13, path))

    def keep_connections(self, *, keep: bool) -> None:
        """Whether established TCP connections come back or are closed."""
        self._fields.append((5, 1) if keep else (52, 1))

    def external_mounts(self, pairs: Iterable[tuple[str, str]]) -> None:
        """On dump (mount point, key), on restore (key, path)."""
        self._fields += [(37, f"mnt[{one}]:{other}") for one, other in pairs]

    def encoded(self) -> bytes:
        """The `criu_opts` message."""
        return encode_message(self._fields)


class Criu:
    """A CRIU binary that works."""

    def __init__(self, path: Path, launcher: Path) -> None:
        """The launcher's program (see `launch/launcher.c`) also starts others in groups."""
        self.path = path
        self._launcher = launcher

    def dump(self, options: Options, moments: Mapping[str, Moment], *, seconds: float) -> None:
        """Dump; raises with CRIU's own words, and then everything runs as before."""
        with self.start() as run:
            run.talk(_DUMP, options, moments, seconds)

    def start(self, groups: Sequence[str] = ()) -> "Run":
        """Start CRIU in groups: what it restores is born where it is itself.

        The first group is the unified hierarchy's, into which it is born itself: moving there would
        wait for all processors, some ten milliseconds.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [str(self.path), "swrk", str(theirs.fileno())]
        if groups:
            # In a control group namespace rooted in the sandbox's own group: CRIU leaves groups
            # alone, so what it restores would otherwise see the host's.
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
        return Run(ours, process)


class Run:
    """A CRIU that was started, for one request; it ends with the block."""

    def __init__(self, channel: socket.socket, process: subprocess.Popen[bytes]) -> None:
        self._channel = channel
        self._process = process

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()
        _end(self._process)

    def restore(self, options: Options, moments: Mapping[str, Moment], *, seconds: float) -> int:
        """Restore; give the pid of the root of the tree."""
        answer = self.talk(_RESTORE, options, moments, seconds)
        return get_int(decode_message(get_bytes(answer, 4)), 1)

    def talk(
        self, kind: int, options: Options, moments: Mapping[str, Moment], seconds: float
    ) -> Message:
        """Make the request and do what is to be done at its moments; give the answer."""
        channel = self._channel
        channel.settimeout(seconds)
        try:
            channel.send(encode_message([(1, kind), (2, options.encoded())]))
            return self._until_done(channel, kind, moments)
        except (EOFError, ConnectionError) as error:
            channel.close()
            raise CriuError(_VERBS[kind], _why_it_ended(_end(self._process))) from error
        except TimeoutError as error:
            raise DeadlineExceededError(f"CRIU did not finish within {seconds} s") from error
        except OSError as error:
            raise UnavailableError(f"CRIU could not be talked to: {error}") from error
        except ProtobufError as error:
            raise CriuError(_VERBS[kind], f"its answer is malformed: {error}") from error

    def _until_done(
        self, channel: socket.socket, kind: int, moments: Mapping[str, Moment]
    ) -> Message:
        problem: Exception | None = None
        while True:
            data = channel.recv(_MAX_ANSWER)
            if not data:
                raise problem or EOFError
            answer = decode_message(data)
            if get_int(answer, 1) != _NOTIFY:
                break
            notice = decode_message(get_bytes(answer, 5))
            try:
                _at_moment(notice, moments)
            except Exception as error:  # noqa: BLE001 - CRIU must undo first, then it is raised
                problem = error
            channel.send(encode_message([(1, _NOTIFY), (3, int(problem is None))]))
        if problem is not None:
            raise problem
        if not get_int(answer, 2):
            said = get_bytes(answer, 9).decode(errors="replace").strip()
            code = get_int(answer, 7)
            reason = said or (os.strerror(code) if code else "it gave no reason")
            raise CriuError(_VERBS[kind], reason)
        return answer


_VERBS = {_DUMP: "store", _RESTORE: "restore"}


def _at_moment(notice: Message, moments: Mapping[str, Moment]) -> None:
    name = get_bytes(notice, 1).decode()
    if (act := moments.get(name)) is not None:
        act(get_int(notice, 2))


def _end(process: subprocess.Popen[bytes]) -> int:
    """Wait for its end, which comes by itself once nobody talks to it any more."""
    if (status := process.poll()) is not None:
        return status
    # Not `wait` with a timeout: that looks again after ever longer sleeps.
    pidfd = os.pidfd_open(process.pid)
    try:
        watch = select.poll()
        watch.register(pidfd, select.POLLIN)
        if not watch.poll(_PATIENCE_MS):
            process.kill()
    finally:
        os.close(pidfd)
    return process.wait()


def _why_it_ended(status: int) -> str:
    if status == _NO_GROUP:
        return "the control groups of the sandbox could not be joined"
    if status < 0:
        return f"it was ended by signal {-status}, perhaps for lack of memory"
    return f"it ended with status {status} and without an answer"


def explain(log: Path) -> str:
    """Pick the lines of a log that say what went wrong."""
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    errors = (line.strip() for line in lines if "Error" in line)
    return " | ".join(
        line for line in errors if not any(harmless in line for harmless in _HARMLESS)
    )[:_MAX_REASON]
