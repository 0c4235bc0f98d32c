"""What the node must know of a sandbox after its own death, one directory each.

    <state>/sandboxes/<uid>/record.0, .1   written before and after every irreversible step
                            envd.sock      where envd answers
                            log.jsonl      recent log lines

Two files take turns, each with its turn and its size in the first line: the newest whole one is
the record. (A file renamed over another is written out at once by some file systems, which takes
milliseconds.) It says what was intended (`phase`) as well as what is, so that whoever comes next
can finish or undo.
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
from paddock.runtime.local.sandbox.socket_dirs import Premises, Sockets
from paddock.runtime.port import AgentConfig, Blueprint, EgressPolicy, InstanceState

_UID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")


class Phase(StrEnum):
    """What the node was doing with a sandbox when it wrote the record."""

    SETTLED = "settled"
    CREATING = "creating"
    HIBERNATING = "hibernating"
    RESTORING = "restoring"
    STOPPING = "stopping"
    DESTROYING = "destroying"


class Process(Struct, frozen=True, kw_only=True):
    """A process that may have died and whose number may have been given to another since."""

    pid: int
    started: int
    """Clock ticks since boot, from /proc/<pid>/stat: with the pid it names one process for ever."""
    boot: str
    """The machine's boot id: after a reboot nothing of this is true."""


class Record(Struct, frozen=True, kw_only=True):
    """One sandbox, as the node keeps it."""

    uid: str
    blueprint: Blueprint
    state: InstanceState
    phase: Phase = Phase.SETTLED
    slot: int
    """Names its range of ids and its groups while it runs."""
    agent: AgentConfig
    egress: EgressPolicy
    layers: tuple[str, ...] = ()
    init: Process | None = None
    envd: Process | None = None
    ip: str | None = None
    home: str = ""
    """Names its files and its place in the network where it was born parked; else its uid does."""
    place: int | None = None
    """Its slot in the fabric, asked for again when it comes back, so that its address stays."""
    incarnation: int = 1
    started_at: datetime | None = None
    reason: str | None = None
    is_started: bool = False
    """The start command was given."""
    oom_kills: int = 0


# Made at import, not by the first use: see docs/decisions/0080.
_decoder = msgspec.json.Decoder(Record)
_LONGEST_SCRATCH = 70
"""Bytes: a socket's path has 107, and some forty of them follow."""
_LONGEST_ROOT = 39
"""Bytes, as above: "/sandboxes/", a uid of 36, "/control.sock" and a process's number follow."""


class StateDirectory:
    """The directories of all sandboxes of one node."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.sandboxes = root / "sandboxes"
        self._sandboxes = str(self.sandboxes)
        self.trash = root / "trash"
        self.stage = root / "stage"
        self.layers = root / "layers"
        self._scratch = root / "scratch"
        self._doors = self.sandboxes.absolute()
        self.premises = Premises(root / "premises")
        self._sockets: dict[str, Sockets] = {}
        self._turns: dict[str, int] = {}

    def prepare(self) -> None:
        """Make what is missing; nobody else may look."""
        self.root.mkdir(parents=True, exist_ok=True)
        self.root.chmod(0o700)
        for path in (self.sandboxes, self.trash, self.stage, self.layers):
            path.mkdir(mode=0o700, exist_ok=True)

    def use_scratch(self) -> None:
        """Have this process's temporary files here, and remove those that a killed one left.

        For who holds the directory alone. The machine's own place stays in use where sockets would
        have too long a path.
        """
        shutil.rmtree(self._scratch, ignore_errors=True)
        # It may still be there: what a killed one had started may be writing its last files.
        self._scratch.mkdir(mode=0o700, exist_ok=True)
        if len(os.fsencode(self._scratch)) <= _LONGEST_SCRATCH:
            tempfile.tempdir = str(self._scratch)

    def use_shortcut(self, path: Path) -> None:
        """Have this link lead to the sandboxes, where sockets there would have too long a path."""
        if len(os.fsencode(self.root.absolute())) <= _LONGEST_ROOT:
            return
        # One that an earlier node made stays: callers are on their way.
        if not path.is_symlink() or path.readlink() != self._doors:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
            path.symlink_to(self._doors)
        self._doors = path

    def remove_shortcut(self) -> None:
        """Take away the link, if there is one."""
        if self._doors.is_symlink():
            self._doors.unlink()

    def of(self, uid: str) -> Path:
        """Give a sandbox's directory."""
        return self.sandboxes / uid

    def doors_of(self, uid: str) -> Path:
        """Give a sandbox's directory by the way that callers of its sockets take."""
        return self._doors / uid

    def write(self, record: Record) -> None:
        """Replace a record in one step; the first one makes the directory."""
        turn = self._turns.get(record.uid, -1) + 1
        path = f"{self._sandboxes}/{record.uid}"
        data = msgspec.json.encode(record)
        data = b"%d %d\n%b" % (turn, len(data), data)
        try:
            _write(f"{path}/record.{turn % 2}", data)
        except FileNotFoundError:
            if (sockets := self.premises.take(path)) is not None:
                self._sockets[record.uid] = sockets
            else:
                os.mkdir(path, mode=0o700)
            _write(f"{path}/record.{turn % 2}", data)
        self._turns[record.uid] = turn

    def sockets_of(self, uid: str) -> Sockets | None:
        """Give the sockets that came with a sandbox's directory, once."""
        return self._sockets.pop(uid, None)

    def read_all(self) -> Iterator[tuple[str, Record | None]]:
        """Give every directory with its record; `None` where there is none that can be read."""
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
        """Move a directory out of sight at once; the trash is emptied later (`empty_trash`)."""
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
        """Remove what was discarded. Slow on some filesystems: call it in a thread."""
        for path in self.trash.iterdir():
            shutil.rmtree(path, ignore_errors=True)


def _read(path: Path) -> tuple[int, Record] | None:
    try:
        head, _, rest = path.read_bytes().partition(b"\n")
        turn, size = map(int, head.split())
        return turn, _decoder.decode(rest[:size])
    except (OSError, ValueError):  # not there, or cut off; a decoding error is a ValueError
        return None


def _write(path: str, data: bytes) -> None:
    # What is left of a longer record behind it does no harm: the size says where this one ends.
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        # What fits is written when a disk runs full in the middle, and nobody is told.
        if os.write(fd, data) < len(data):
            raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {path}")
    finally:
        os.close(fd)


def check_uid(uid: str) -> None:
    """Refuse a uid that could not be a directory's name."""
    if not _UID.fullmatch(uid):
        message = "must be 1 to 63 letters, digits, dots, dashes or underscores"
        raise InvalidError(
            f"{uid!r} is no sandbox uid", problems=[FieldProblem("uid", message)], hint=message
        )


def boot_id() -> str:
    """Name this boot of the machine."""
    return _boot_id()


@functools.cache
def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def start_ticks(pid: int) -> int | None:
    """Say when a process started, or `None` if it is gone (or dead and not yet reaped)."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            text = file.read()
        fields = text[text.rindex(")") + 2 :].split()
        return None if fields[0] in "ZX" else int(fields[19])
    return None


def identify(pid: int) -> Process | None:
    """Write down which process this is."""
    started = start_ticks(pid)
    return None if started is None else Process(pid=pid, started=started, boot=boot_id())


def open_process(process: Process | None) -> int | None:
    """Give a pidfd of that very process, or `None` if it is gone."""
    if process is None or process.boot != boot_id():
        return None
    try:
        pidfd = os.pidfd_open(process.pid)
    except OSError:
        return None
    # Looked at after opening: were the number another's by now, the start time would differ.
    if start_ticks(process.pid) != process.started:
        os.close(pidfd)
        return None
    return pidfd
