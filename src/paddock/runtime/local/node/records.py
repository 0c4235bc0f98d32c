"""Records of sandboxes on disk, for the next node process; one directory per sandbox.

    <state>/sandboxes/<uid>/record.0, .1   written before and after every irreversible step
                            envd.sock      the socket of envd
                            log.jsonl      recent log lines

Writes alternate between the two record files. Each starts with a counter and its size; the complete
one with the higher counter is the record. (Some file systems flush a file that is renamed over
another, which takes milliseconds.) A record holds the intention (`phase`) as well as the state, so
that the next node process can finish or undo an interrupted step.
"""

import contextlib
import errno
import functools
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from datetime import datetime
from enum import StrEnum
from pathlib import Path

import msgspec
from msgspec import Struct

from paddock.kit.errors import FieldProblem, InvalidError
from paddock.runtime.local.sandbox.socket_dirs import EnvdSockets, SocketDirs
from paddock.runtime.port import AgentConfig, Blueprint, EgressPolicy, InstanceState

_UID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")


class RecordPhase(StrEnum):
    """The step in progress when the record was written."""

    SETTLED = "settled"
    CREATING = "creating"
    HIBERNATING = "hibernating"
    RESTORING = "restoring"
    STOPPING = "stopping"
    DESTROYING = "destroying"


class RecordedProcess(Struct, frozen=True, kw_only=True):
    """Identifies one process even after its pid was reused."""

    pid: int
    started: int
    """Start time in clock ticks since boot, from /proc/<pid>/stat."""
    boot: str
    """The machine's boot id: a reboot invalidates pid and start time."""


class SandboxRecord(Struct, frozen=True, kw_only=True):
    """One sandbox as stored on disk."""

    uid: str
    blueprint: Blueprint
    state: InstanceState
    phase: RecordPhase = RecordPhase.SETTLED
    slot: int
    """Determines its id range and cgroups while it runs; -1 without processes."""
    agent: AgentConfig
    egress: EgressPolicy
    layers: tuple[str, ...] = ()
    init: RecordedProcess | None = None
    envd: RecordedProcess | None = None
    ip: str | None = None
    resource_name: str = msgspec.field(default="", name="home")
    """The name of its files and network reservation if it was a warm sandbox; otherwise empty, and
    its uid is the name."""
    place: int | None = None
    """Its slot in the fabric; requested again on restore, so that its address stays."""
    incarnation: int = 1
    started_at: datetime | None = None
    reason: str | None = None
    is_started: bool = False
    """Whether the start command was run."""
    oom_kills: int = 0
    boot_id: str = ""
    """Its /proc/sys/kernel/random/boot_id: stays as long as its memory does."""


# Created at import, not at first use: see docs/decisions/0080.
_decoder = msgspec.json.Decoder(SandboxRecord)
_MAX_SCRATCH_BYTES = 70
"""Bytes. A socket path may have 107, and about forty are appended."""
_MAX_ROOT_BYTES = 39
"""Bytes, as above: "/sandboxes/", a uid of 36, "/control.sock" and a pid are appended."""


class StateDirectory:
    """The state directory of one node, with the directories of its sandboxes."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.sandboxes = root / "sandboxes"
        self._sandboxes = str(self.sandboxes)
        self.trash = root / "trash"
        self.stage = root / "stage"
        self.layers = root / "layers"
        self.views = root / "views"
        self.devices = root / "devices"
        self._scratch = root / "scratch"
        self._socket_root = self.sandboxes.absolute()
        self.socket_dirs = SocketDirs(root / "premises")
        self._sockets: dict[str, EnvdSockets] = {}
        self._turns: dict[str, int] = {}

    def prepare(self) -> None:
        """Create missing directories, accessible to the node's user only."""
        self.root.mkdir(parents=True, exist_ok=True)
        self.root.chmod(0o700)
        for path in (self.sandboxes, self.trash, self.stage, self.layers):
            path.mkdir(mode=0o700, exist_ok=True)

    def use_scratch(self) -> None:
        """Put temporary files of this process here, and remove those of a killed one.

        Only for the process that holds the lock of the directory. The machine's default stays in
        use if socket paths would get too long.
        """
        shutil.rmtree(self._scratch, ignore_errors=True)
        # It may still exist: children of a killed node may still write files.
        self._scratch.mkdir(mode=0o700, exist_ok=True)
        if len(os.fsencode(self._scratch)) <= _MAX_SCRATCH_BYTES:
            tempfile.tempdir = str(self._scratch)

    def use_short_path(self, path: Path) -> None:
        """Make `path` a link to the sandboxes if socket paths would get too long otherwise."""
        if len(os.fsencode(self.root.absolute())) <= _MAX_ROOT_BYTES:
            return
        # A correct link of a previous node stays: callers may be using it.
        if not path.is_symlink() or path.readlink() != self._socket_root:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
            path.symlink_to(self._socket_root)
        self._socket_root = path

    def remove_short_path(self) -> None:
        """Remove the link if there is one."""
        if self._socket_root.is_symlink():
            self._socket_root.unlink()

    def path_of(self, uid: str) -> Path:
        """Return a sandbox's directory."""
        return self.sandboxes / uid

    def socket_dir_of(self, uid: str) -> Path:
        """Return a sandbox's directory by a path short enough for its sockets."""
        return self._socket_root / uid

    def write(self, record: SandboxRecord) -> None:
        """Write a record atomically; the first write creates the directory."""
        turn = self._turns.get(record.uid, -1) + 1
        path = f"{self._sandboxes}/{record.uid}"
        data = msgspec.json.encode(record)
        data = b"%d %d\n%b" % (turn, len(data), data)
        try:
            _write(f"{path}/record.{turn % 2}", data)
        except FileNotFoundError:
            if (sockets := self.socket_dirs.take(path)) is not None:
                self._sockets[record.uid] = sockets
            else:
                os.mkdir(path, mode=0o700)
            _write(f"{path}/record.{turn % 2}", data)
        self._turns[record.uid] = turn

    def take_sockets(self, uid: str) -> EnvdSockets | None:
        """Return the prepared sockets of a sandbox's directory, at most once."""
        return self._sockets.pop(uid, None)

    def read_all(self) -> Iterator[tuple[str, SandboxRecord | None]]:
        """Yield every directory name with its record; `None` if no record is readable."""
        for path in sorted(self.sandboxes.iterdir()):
            found = (_read(path / f"record.{number}") for number in range(2))
            whole = [one for one in found if one is not None]
            if not whole:
                yield path.name, None
                continue
            turn, record = max(whole, key=lambda one: one[0])
            self._turns[path.name] = turn
            yield path.name, record

    def discard(self, path: Path) -> Path | None:
        """Move a directory to the trash; `empty_trash` removes it later."""
        self._turns.pop(path.name, None)
        for unused in self._sockets.pop(path.name, ()):
            unused.close()
        target = self.trash / f"{path.name}.{os.urandom(4).hex()}"
        try:
            path.rename(target)
        except FileNotFoundError:
            return None
        return target

    def empty_trash(self) -> None:
        """Remove what was discarded. Slow on some file systems: call it in a thread."""
        for path in self.trash.iterdir():
            shutil.rmtree(path, ignore_errors=True)


def _read(path: Path) -> tuple[int, SandboxRecord] | None:
    try:
        head, _, rest = path.read_bytes().partition(b"\n")
        turn, size = map(int, head.split())
        return turn, _decoder.decode(rest[:size])
    except (OSError, ValueError):  # missing or incomplete; a decoding error is a ValueError
        return None


def _write(path: str, data: bytes) -> None:
    # The rest of a longer, older record may follow: the size tells where this one ends.
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        # When the disk becomes full, write(2) is partial and reports no error.
        if os.write(fd, data) < len(data):
            raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {path}")
    finally:
        os.close(fd)


def check_uid(uid: str) -> None:
    """Raise `InvalidError` for a uid that is not usable as a directory name."""
    if not _UID.fullmatch(uid):
        message = "must be 1 to 63 letters, digits, dots, dashes or underscores"
        raise InvalidError(
            f"{uid!r} is not a valid uid", problems=[FieldProblem("uid", message)], hint=message
        )


@functools.cache
def boot_id() -> str:
    """Return the id of the machine's current boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def start_ticks(pid: int) -> int | None:
    """Return the start time of a process, or `None` if it has exited (reaped or not)."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            text = file.read()
        fields = text[text.rindex(")") + 2 :].split()
        return None if fields[0] in "ZX" else int(fields[19])
    return None


def identify(pid: int) -> RecordedProcess | None:
    """Return the identity of a process, or `None` if it has exited."""
    started = start_ticks(pid)
    return None if started is None else RecordedProcess(pid=pid, started=started, boot=boot_id())


def open_process(process: RecordedProcess | None) -> int | None:
    """Return a pidfd of exactly this process, or `None` if it has exited."""
    if process is None or process.boot != boot_id():
        return None
    try:
        pidfd = os.pidfd_open(process.pid)
    except OSError:
        return None
    # Checked after opening: if the pid was reused, the start time differs.
    if start_ticks(process.pid) != process.started:
        os.close(pidfd)
        return None
    return pidfd
