"""The facade: store the processes of a sandbox, bring them back, as often as asked.

Calls block for tens of milliseconds and are made from threads (`asyncio.to_thread`); as many
restores run at once as the machine has cores, the others wait.
"""

import contextlib
import logging
import os
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from paddock.kit.errors import PaddockError, UnavailableError
from paddock.kit.logs import fields
from paddock.runtime.local.checkpoint import criu, manifest
from paddock.runtime.local.checkpoint.idmap import IdNamespaces
from paddock.runtime.local.checkpoint.loopback import raise_loopback
from paddock.runtime.local.checkpoint.manifest import StoredMemory
from paddock.runtime.local.checkpoint.mounts import (
    External,
    Workplace,
    find_externals,
    parse_mountinfo,
)
from paddock.runtime.local.checkpoint.restore_dir import LOG, Ingredients, Place
from paddock.runtime.local.checkpoint.threads import Home
from paddock.runtime.local.kernel import syscalls
from paddock.runtime.local.launch import native_build

log = logging.getLogger(__name__)

_SECONDS = 120
_DUMP_LOG = "dump.log"
_OF_THE_SYSTEM = ("dev", "var", "bin", "sbin", "lib", "usr", "boot", "proc", "sys")
"""Top-level directories with many files that programs seldom watch, in the order to search them."""


class Dump(Struct, frozen=True, kw_only=True):
    """What to store."""

    pid: int
    """The sandbox's init."""
    images: Path
    """A directory of its own; what an earlier try left there is removed."""
    leave_running: bool
    group: str | None = None
    """Its v2 control group, by which everything is stopped at once; stays frozen if it was."""
    at_rest: Callable[[], None] | None = None
    """Called once while everything stands and memory is stored: the moment to copy files."""
    durable: bool = False
    """Wait until the images are on the disk, before anything is let go."""


class Ground(Struct, frozen=True, kw_only=True):
    """Detached mounts for a restored tree; closed by `restore`, whatever happens."""

    root: int
    """The root, mapped to the new range."""
    binds: Mapping[str, int] = {}
    """By their mount point inside, for every one there was."""


class Restore(Struct, frozen=True, kw_only=True):
    """What to bring back."""

    images: Path
    id_base: int
    """First id of the new range."""
    ground: Callable[[], Ground]
    """Called in the caller's thread, while CRIU starts: what the tree will stand on."""
    groups: Sequence[str] = ()
    """Directories of control groups to be born into."""
    keep_connections: bool = False
    """Whether established connections come back (the same sandbox) or are closed (clones)."""
    wire: Callable[[int], None] | None = None
    """Called with the new init's pid before anything runs: `/proc/<pid>/ns/net` has only `lo`.
    Called again with another pid where restoring with connections failed."""


class Restored(Struct, frozen=True, kw_only=True):
    """A tree that runs again."""

    pid: int
    pidfd: int
    """The caller's to close."""


class Checkpointer:
    """Dumps and restores with one CRIU."""

    def __init__(self, program: Path, *, parallel: int | None = None) -> None:
        launcher = native_build.ensure_launcher()
        self._criu = criu.Criu(program, launcher)
        self._workplace = Workplace(str(program), str(launcher))
        self._ids = IdNamespaces()
        self._slots = threading.BoundedSemaphore(parallel or os.cpu_count() or 1)

    def id_namespace(self, base: int, count: int = 65536) -> int:
        """Give a user namespace with that map, to mount a root with; do not close it."""
        return self._ids.get(base, count)

    def dump(self, request: Dump) -> StoredMemory:
        """Store memory and processes. Where it fails, everything goes on as before."""
        externals = _externals_of(request.pid)
        base, count = _id_range_of(request.pid)
        _make_empty(request.images)
        images = os.open(request.images, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            options = criu.Options(images=images, log=_DUMP_LOG, seconds=_SECONDS)
            options.work_directory(images)
            options.root_process(request.pid)
            options.external_mounts((one.point, one.key) for one in externals)
            options.look_for_watched(_places_of_watches(request.pid))
            if request.leave_running:
                options.leave_running()
            if request.group is not None:
                options.freeze_group(request.group)
            sealed: list[StoredMemory] = []

            def at_rest() -> None:
                if request.at_rest is not None:
                    request.at_rest()
                sealed.append(_seal(request, externals, base, count))

            def dump(home: Home) -> None:
                # Storing files and sealing need the host's mounts, which CRIU's place lacks.
                moments: dict[str, criu.Moment] = {criu.POST_DUMP: lambda _: home.run(at_rest)}
                self._criu.dump(options, moments, seconds=_SECONDS)

            self._workplace.run(dump, name="criu-dump")
            return sealed[0]
        except BaseException as error:
            # Sealed too early where CRIU failed after its last question.
            (request.images / manifest.FILE).unlink(missing_ok=True)
            if isinstance(error, PaddockError):
                raise _explained(error, request.images / _DUMP_LOG) from error
            raise
        finally:
            os.close(images)

    def restore(self, request: Restore) -> Restored:
        """Bring back what is stored; where it fails, nothing of it remains."""
        with contextlib.ExitStack() as given:
            memory = manifest.read(request.images)
            images = syscalls.open_tree(str(request.images))
            given.callback(os.close, images)
            syscalls.mount_setattr(images, attributes=syscalls.MOUNT_ATTR_RDONLY)
            given.enter_context(self._slots)
            return self._workplace.run(
                lambda home: self._restore_at(memory, images, request, home), name="criu-restore"
            )

    def close(self) -> None:
        """Let go of the namespaces kept for later runs."""
        self._workplace.close()
        self._ids.close()

    def _restore_at(
        self, memory: StoredMemory, images: int, request: Restore, home: Home
    ) -> Restored:
        with contextlib.ExitStack() as given:
            run = given.enter_context(self._criu.start(request.groups))
            ground = home.run(request.ground)
            for fd in (ground.root, *ground.binds.values()):
                given.callback(os.close, fd)
            missing = sorted(set(memory.externals) - set(ground.binds))
            if missing:
                raise UnavailableError(
                    f"the stored sandbox had mounts at {', '.join(missing)} that are missing now",
                    hint="give it the same mounts",
                )
            ingredients = Ingredients(images=images, root=ground.root, binds=ground.binds)
            place = given.enter_context(Place(ingredients, memory, request.id_base))
            if not request.keep_connections:
                return self._attempt(run, place, request, home, keep=False)
            try:
                return self._attempt(run, place, request, home, keep=True)
            except PaddockError as error:
                # Most likely the addresses of old connections are no longer ours.
                log.warning(
                    "restoring with connections failed, trying without",
                    extra=fields(images=str(request.images), error=error.message),
                )
            with self._criu.start(request.groups) as again:
                return self._attempt(again, place, request, home, keep=False)

    def _attempt(
        self, run: criu.Run, place: Place, request: Restore, home: Home, *, keep: bool
    ) -> Restored:
        options = criu.Options(images=place.images_fd, log=LOG, seconds=_SECONDS)
        options.work_directory(place.work_fd)
        options.new_root(place.root)
        options.keep_connections(keep=keep)
        options.external_mounts(place.externals)
        pidfds: list[int] = []
        wiring: list[Callable[[], None]] = []

        def wire(pid: int) -> None:
            # Taken while the process certainly is the one we mean.
            pidfds.append(os.pidfd_open(pid))
            raise_loopback(pid)
            if (connect := request.wire) is not None:
                wiring.append(home.begin(lambda: connect(pid)))

        def wait_until_wired(_: int) -> None:
            # CRIU has mounted meanwhile. Sockets come next, and need their addresses.
            while wiring:
                wiring.pop()()

        try:
            moments = {criu.SETUP_NAMESPACES: wire, criu.NAMESPACES_ARE_SET_UP: wait_until_wired}
            pid = run.restore(options, moments, seconds=_SECONDS)
            return Restored(pid=pid, pidfd=pidfds.pop())
        except PaddockError as error:
            raise _explained(error, place.log) from error
        finally:
            for fd in pidfds:
                os.close(fd)
            for wired in wiring:  # CRIU gave up before; nothing must be wired behind our back
                with contextlib.suppress(PaddockError, OSError):
                    wired()


def _seal(request: Dump, externals: Sequence[External], base: int, count: int) -> StoredMemory:
    memory = StoredMemory(
        id_base=base,
        id_count=count,
        devices={one.key: one.source for one in externals if one.source is not None},
        externals={one.point: one.key for one in externals if one.source is None},
    )
    sealed = manifest.write(request.images, memory)
    if request.durable:
        manifest.sync(request.images)
    return sealed


def _externals_of(pid: int) -> tuple[External, ...]:
    try:
        inside = Path(f"/proc/{pid}/mountinfo").read_text()
    except OSError as error:
        raise UnavailableError(f"the sandbox's init ({pid}) is gone") from error
    host = Path("/proc/self/mountinfo").read_text()
    return find_externals(parse_mountinfo(inside), parse_mountinfo(host))


def _id_range_of(pid: int) -> tuple[int, int]:
    lines = Path(f"/proc/{pid}/uid_map").read_text().splitlines()
    first, base, count = (int(word) for word in lines[0].split())
    if len(lines) != 1 or first != 0:
        raise UnavailableError(f"the ids of process {pid} are not mapped as one range from 0")
    return base, count


def _make_empty(directory: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(directory)
    directory.mkdir(parents=True, mode=0o700)


def _explained(error: PaddockError, log_file: Path) -> PaddockError:
    """Put the words of CRIU's log in place of the one line it answered with."""
    said = criu.explain(log_file)
    if not isinstance(error, criu.CriuError) or not said:
        return error
    return criu.CriuError(error.verb, said)


def _places_of_watches(pid: int) -> list[str]:
    """Give the directories of a sandbox's root in which files may be watched.

    They are searched in this order, and only as far as something watched was not found before.
    """
    with os.scandir(f"/proc/{pid}/root") as entries:
        names = sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
    order = {name: number for number, name in enumerate(_OF_THE_SYSTEM, 1)}
    return [f"/{name}" for name in sorted(names, key=lambda name: order.get(name, 0))]
