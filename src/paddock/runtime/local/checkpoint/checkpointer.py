"""Facade of the package: dump the processes of a sandbox, and restore them any number of times.

Calls block for tens of milliseconds, or for as long as the processes inside make them; use a
thread. The caller bounds how many run at once (`node/heavy_work.py`).
"""

import contextlib
import logging
import os
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from paddock.kit.errors import PaddockError, UnavailableError
from paddock.kit.logs import fields
from paddock.runtime.local.checkpoint import criu, manifest, unstorable
from paddock.runtime.local.checkpoint.idmap import IdNamespaces
from paddock.runtime.local.checkpoint.loopback import bring_up_loopback
from paddock.runtime.local.checkpoint.manifest import StoredMemory
from paddock.runtime.local.checkpoint.mounts import (
    CriuMountNamespace,
    ExternalMount,
    find_externals,
    parse_mountinfo,
)
from paddock.runtime.local.checkpoint.restore_dir import LOG, RestoreDir, RestoreSources
from paddock.runtime.local.checkpoint.threads import CallerThread
from paddock.runtime.local.kernel import syscalls
from paddock.runtime.local.launch import native_build

log = logging.getLogger(__name__)

_SECONDS = 120
_SEIZE_SECONDS = 20
"""Within this time CRIU must have stopped every thread; most of a dump comes afterwards."""
_DUMP_LOG = "dump.log"
_SYSTEM_DIRS = ("dev", "var", "bin", "sbin", "lib", "usr", "boot", "proc", "sys")
"""Top-level directories with many files that are rarely watched, in search order."""


class Dump(Struct, frozen=True, kw_only=True):
    """Parameters of a dump."""

    pid: int
    """The sandbox's init."""
    images: Path
    """The target directory; existing content is removed."""
    leave_running: bool
    group: str | None = None
    """Its v2 control group, used to freeze it; a sandbox that was frozen stays frozen."""
    run_in: Sequence[str] = ()
    """Directories of the control groups in which CRIU runs; none means those of the caller."""
    while_frozen: Callable[[], None] | None = None
    """Called once while all processes are frozen and memory is stored, to copy files."""
    durable: bool = False
    """Sync the images to disk before the processes continue or are killed."""


class RestoreMounts(Struct, frozen=True, kw_only=True):
    """Detached mounts for a restored tree; always closed by `restore`."""

    root: int
    """The root mount, idmapped to the new range."""
    binds: Mapping[str, int] = {}
    """Bind mounts by mount point inside; all that the stored sandbox had."""


class Restore(Struct, frozen=True, kw_only=True):
    """Parameters of a restore."""

    images: Path
    id_base: int
    """First host id of the new range."""
    mount_root: Callable[[StoredMemory], RestoreMounts]
    """Called in the caller's thread while CRIU starts; returns the mounts of the tree."""
    groups: Sequence[str] = ()
    """Directories of the control groups in which the processes start."""
    cpus: Collection[int] = ()
    """CPUs that the processes may run on; empty means those of the caller."""
    keep_connections: bool = False
    """Whether established connections are restored (same sandbox) or closed (clones)."""
    connect_network: Callable[[int], None] | None = None
    """Called with the pid of the new init before it runs; its network namespace has only `lo`.
    Called again with another pid if the restore with connections failed."""


class Restored(Struct, frozen=True, kw_only=True):
    """A restored process tree."""

    pid: int
    pidfd: int
    """The caller must close it."""


class Checkpointer:
    """Dumps and restores with one CRIU binary."""

    def __init__(self, program: Path) -> None:
        launcher = native_build.ensure_launcher()
        self._criu = criu.Criu(program, launcher)
        self._mount_namespace = CriuMountNamespace(str(program), str(launcher))
        self._ids = IdNamespaces()

    def id_namespace(self, base: int, count: int = 65536) -> int:
        """Return a user namespace with this id map, for idmapped mounts; do not close it."""
        return self._ids.get(base, count)

    def dump(self, request: Dump) -> StoredMemory:
        """Store memory and processes. On failure the sandbox continues as before."""
        externals = _externals_of(request.pid)
        base, count = _id_range_of(request.pid)
        _recreate(request.images)
        images = os.open(request.images, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            options = criu.CriuOptions(images=images, log=_DUMP_LOG, seconds=_SEIZE_SECONDS)
            options.work_directory(images)
            options.root_process(request.pid)
            options.external_mounts((one.point, one.key) for one in externals)
            options.search_watched(_watch_search_dirs(request.pid))
            if request.leave_running:
                options.leave_running()
            if request.group is not None:
                options.freeze_group(request.group)
            stored: list[StoredMemory] = []

            def while_frozen() -> None:
                if request.while_frozen is not None:
                    request.while_frozen()
                stored.append(_write_manifest(request, externals, base, count))

            def dump(caller: CallerThread) -> None:
                # Copying files and writing the manifest need the host's mounts.
                handlers: dict[str, criu.NotifyHandler] = {
                    criu.POST_DUMP: lambda _: caller.run(while_frozen)
                }
                self._criu.dump(options, handlers, seconds=_SECONDS, groups=request.run_in)

            self._mount_namespace.run(dump, name="criu-dump")
            return stored[0]
        except BaseException as error:
            # CRIU may fail after its last notification, when the manifest is written already.
            (request.images / manifest.FILE).unlink(missing_ok=True)
            known = error
            if isinstance(error, PaddockError):
                known = _with_log_errors(error, request.images / _DUMP_LOG)
            shutil.rmtree(request.images, ignore_errors=True)
            if isinstance(known, criu.CriuRefusedError):
                raise unstorable.classified(known) from error
            if known is not error:
                raise known from error
            raise
        finally:
            os.close(images)

    def restore(self, request: Restore) -> Restored:
        """Restore stored processes. On failure nothing remains."""
        with contextlib.ExitStack() as given:
            memory = manifest.read(request.images)
            images = syscalls.open_tree(str(request.images))
            given.callback(os.close, images)
            syscalls.mount_setattr(images, attributes=syscalls.MOUNT_ATTR_RDONLY)
            return self._mount_namespace.run(
                lambda caller: self._restore_at(memory, images, request, caller),
                name="criu-restore",
            )

    def close(self) -> None:
        """Close the cached namespaces."""
        self._mount_namespace.close()
        self._ids.close()

    def _restore_at(
        self, memory: StoredMemory, images: int, request: Restore, caller: CallerThread
    ) -> Restored:
        if request.cpus:
            # Of this thread alone, which ends after the restore. CRIU and the processes inherit it.
            os.sched_setaffinity(0, request.cpus)
        with contextlib.ExitStack() as given:
            run = given.enter_context(self._criu.start(request.groups))
            mounts = caller.run(lambda: request.mount_root(memory))
            for fd in (mounts.root, *mounts.binds.values()):
                given.callback(os.close, fd)
            missing = sorted(set(memory.externals) - set(mounts.binds))
            if missing:
                raise UnavailableError(
                    f"the stored sandbox had mounts at {', '.join(missing)}, which are missing now",
                    hint="use the same mounts as when it was stored",
                )
            sources = RestoreSources(images=images, root=mounts.root, binds=mounts.binds)
            restore_dir = given.enter_context(RestoreDir(sources, memory, request.id_base))
            if not request.keep_connections:
                return self._attempt(run, restore_dir, request, caller, keep=False)
            try:
                return self._attempt(run, restore_dir, request, caller, keep=True)
            except PaddockError as error:
                # Most likely the addresses of old connections are no longer available.
                log.warning(
                    "restore with connections failed, retrying without them",
                    extra=fields(images=str(request.images), error=error.message),
                )
            with self._criu.start(request.groups) as again:
                return self._attempt(again, restore_dir, request, caller, keep=False)

    def _attempt(
        self,
        run: criu.CriuRun,
        restore_dir: RestoreDir,
        request: Restore,
        caller: CallerThread,
        *,
        keep: bool,
    ) -> Restored:
        options = criu.CriuOptions(images=restore_dir.images_fd, log=LOG, seconds=_SECONDS)
        options.work_directory(restore_dir.work_fd)
        options.new_root(restore_dir.root)
        options.keep_connections(keep=keep)
        options.external_mounts(restore_dir.externals)
        pidfds: list[int] = []
        wiring: list[Callable[[], None]] = []

        def connect_network(pid: int) -> None:
            # Opened while the pid cannot have been reused.
            pidfds.append(os.pidfd_open(pid))
            bring_up_loopback(pid)
            if (connect := request.connect_network) is not None:
                wiring.append(caller.submit(lambda: connect(pid)))

        def wait_until_wired(_: int) -> None:
            # CRIU has set up mounts. Sockets come next, and need their addresses.
            while wiring:
                wiring.pop()()

        try:
            handlers = {
                criu.SETUP_NAMESPACES: connect_network,
                criu.POST_SETUP_NAMESPACES: wait_until_wired,
            }
            pid = run.restore(options, handlers, seconds=_SECONDS)
            return Restored(pid=pid, pidfd=pidfds.pop())
        except PaddockError as error:
            raise _with_log_errors(error, restore_dir.log) from error
        finally:
            for fd in pidfds:
                os.close(fd)
            for wired in wiring:  # CRIU failed before: wait for calls in flight
                with contextlib.suppress(PaddockError, OSError):
                    wired()


def _write_manifest(
    request: Dump, externals: Sequence[ExternalMount], base: int, count: int
) -> StoredMemory:
    memory = StoredMemory(
        id_base=base,
        id_count=count,
        devices={one.key: one.source for one in externals if one.source is not None},
        externals={one.point: one.key for one in externals if one.source is None},
        sizes=_sizes_of(request.pid, externals),
    )
    stored = manifest.write(request.images, memory)
    if request.durable:
        manifest.sync(request.images)
    return stored


def _externals_of(pid: int) -> tuple[ExternalMount, ...]:
    try:
        inside = Path(f"/proc/{pid}/mountinfo").read_text()
    except OSError as error:
        raise UnavailableError(f"the init process {pid} of the sandbox is gone") from error
    host = Path("/proc/self/mountinfo").read_text()
    return find_externals(parse_mountinfo(inside), parse_mountinfo(host))


def _sizes_of(pid: int, externals: Sequence[ExternalMount]) -> dict[str, int]:
    """Return the sizes of external files below /proc and /sys, where no sandbox changes names."""
    points = (one.point for one in externals if one.source is None)
    return {
        point: os.stat(f"/proc/{pid}/root{point}").st_size
        for point in points
        if point.startswith(("/proc/", "/sys/"))
    }


def _id_range_of(pid: int) -> tuple[int, int]:
    lines = Path(f"/proc/{pid}/uid_map").read_text().splitlines()
    first, base, count = (int(word) for word in lines[0].split())
    if len(lines) != 1 or first != 0:
        raise UnavailableError(f"the id map of process {pid} is not one range from 0")
    return base, count


def _recreate(directory: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(directory)
    directory.mkdir(parents=True, mode=0o700)


def _with_log_errors(error: PaddockError, log_file: Path) -> PaddockError:
    """Replace the reason of a CRIU error by the errors in its log."""
    reason = criu.errors_in_log(log_file)
    if not isinstance(error, criu.CriuError) or not reason:
        return error
    return type(error)(error.verb, reason)


def _watch_search_dirs(pid: int) -> list[str]:
    """Return the directories of a sandbox's root in which inotify watches are searched.

    CRIU searches them in this order until it has found every watched file.
    """
    with os.scandir(f"/proc/{pid}/root") as entries:
        names = sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
    order = {name: number for number, name in enumerate(_SYSTEM_DIRS, 1)}
    return [f"/{name}" for name in sorted(names, key=lambda name: order.get(name, 0))]
