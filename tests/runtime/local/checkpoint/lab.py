"""Sandboxes created by the real launcher and init, without a node."""

import asyncio
import os
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from paddock.envd.process.init_client import InitClient, take_channel
from paddock.envd.process.init_protocol import ProcessRecord, SpawnFlags, SpawnRequest
from paddock.runtime.local.checkpoint import (
    Checkpointer,
    Dump,
    Restore,
    Restored,
    RestoreMounts,
    StoredMemory,
    find_criu,
)
from paddock.runtime.local.images.base import minimal_rootfs
from paddock.runtime.local.kernel import cgroups
from paddock.runtime.local.launch import native_build
from paddock.runtime.local.launch.launcher import SandboxLauncher
from paddock.runtime.local.launch.protocol import Launch, MakeRoot
from paddock.runtime.local.storage import Storage, open_storage
from tests.leaks import note_group

ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root"}
PLAIN = SpawnFlags(0)
_FIRST_ID = 0x70000000
_RANGE = 65536


@dataclass
class Guest:
    """A running sandbox."""

    uid: str
    slot: int
    pid: int
    pidfd: int
    client: InitClient | None = None
    exits: list[ProcessRecord] = field(default_factory=list)
    runs: int = 0
    streams: list[int] = field(default_factory=list)
    """Streams of commands that tests do not read."""

    def is_alive(self) -> bool:
        try:
            signal.pidfd_send_signal(self.pidfd, 0)
        except ProcessLookupError:
            return False
        return True

    async def attach(self) -> list[ProcessRecord]:
        self.client = InitClient(take_channel(self.pidfd), on_exit=self.exits.append)
        records = await self.client.attach()
        self.streams += [fd for record in records for fd in record.fds]
        return records

    async def spawn(
        self, *argv: str, flags: SpawnFlags = PLAIN, uid: int = 0, number: int = 1
    ) -> ProcessRecord:
        if self.client is None:
            await self.attach()
        assert self.client is not None
        record = await self.client.spawn(
            SpawnRequest(id=number, argv=argv, env=ENVIRONMENT, flags=flags, uid=uid, gid=uid)
        )
        self.streams += record.fds
        return record

    async def run(self, *argv: str) -> str:
        """Run a command; return its output."""
        self.runs += 1
        number = 1000 + self.runs
        record = await self.spawn(*argv, flags=SpawnFlags.MERGE_STDERR, number=number)
        output = await asyncio.to_thread(_drain, self, record)
        assert self.client is not None
        await self.client.forget(number)
        return output

    async def write(self, path: str, text: str) -> None:
        """Write a file as the sandbox's root: host root is not mapped inside."""
        await self.run("sh", "-c", 'printf %s "$2" > "$1"', "sh", path, text)

    def detach(self) -> None:
        if self.client is not None:
            self.client.close()
            self.client = None

    def path(self, name: str) -> Path:
        return Path(f"/proc/{self.pid}/root") / name.lstrip("/")


class Lab:
    """Creates, dumps and restores sandboxes."""

    def __init__(self, directory: Path, init_layers: Path, *, backend: str = "btrfs") -> None:
        self.directory = directory
        self.stage = directory / "stage"
        self.stage.mkdir(mode=0o755)
        self.storage: Storage = open_storage(
            directory / "storage", backend=backend, image_bytes=2 << 30
        )
        self.layers = (
            str(native_build.ensure_layer(init_layers, init_layers / "cache")),
            str(minimal_rootfs()),
        )
        program, reason = find_criu()
        assert program is not None, reason
        self.checkpointer = Checkpointer(program)
        self.launcher = SandboxLauncher(str(self.stage), init_layers / "cache")
        name = f"test-{os.getpid()}-{directory.name}"
        note_group(f"paddock-{name}")
        self.groups = cgroups.Cgroups(name)
        self.groups.prepare()
        self.guests: list[Guest] = []
        self._slots = 0

    def slot(self) -> int:
        self._slots += 1
        return self._slots

    def base(self, slot: int) -> int:
        return _FIRST_ID + slot * _RANGE

    async def start(
        self, uid: str, *, binds: dict[str, str] | None = None, locked: bool = False
    ) -> Guest:
        """Create a sandbox with an empty disk."""
        slot = self.slot()
        self.groups.create(f"s{slot}")
        disk = self.storage.create(uid)
        skeleton = await self.launcher.prepare(
            slot,
            base=self.base(slot),
            cgroup=self.groups.unified(f"s{slot}"),
            joins=self.groups.joins(f"s{slot}"),
        )
        launch = Launch(hostname=uid, locked=locked, binds=tuple(binds or {}))
        await self.launcher.launch(skeleton, launch, self.root_of(slot, disk.path, binds))
        guest = Guest(uid, slot, skeleton.pid, skeleton.pidfd)
        self.guests.append(guest)
        return guest

    def root_of(self, slot: int, disk: Path, binds: dict[str, str] | None = None) -> MakeRoot:
        return MakeRoot(
            base=self.base(slot),
            layers=self.layers,
            disk=str(disk),
            host_directories=tuple((source, False) for source in (binds or {}).values()),
        )

    async def dump(
        self,
        guest: Guest,
        images: Path,
        *,
        leave_running: bool,
        while_frozen: Callable[[], None] | None = None,
        durable: bool = False,
    ) -> None:
        guest.detach()
        request = Dump(
            pid=guest.pid,
            images=images,
            leave_running=leave_running,
            group=self.groups.unified(f"s{guest.slot}"),
            while_frozen=while_frozen,
            durable=durable,
        )
        await asyncio.to_thread(self.checkpointer.dump, request)

    async def restore(
        self,
        uid: str,
        images: Path,
        *,
        slot: int | None = None,
        binds: dict[str, str] | None = None,
        keep_connections: bool = False,
        connect_network: Callable[[int], None] | None = None,
    ) -> Guest:
        """Restore a sandbox with the files of the disk `uid`."""
        slot = slot or self.slot()
        self.groups.create(f"s{slot}")
        disk = self.storage.find(uid)
        assert disk is not None
        userns = self.checkpointer.id_namespace(self.base(slot))
        wanted = self.root_of(slot, disk.path, binds)
        loop = asyncio.get_running_loop()

        def mount_root(_: StoredMemory) -> RestoreMounts:
            mounting = self.launcher.mount_root(userns, wanted)
            root, *mounts = asyncio.run_coroutine_threadsafe(mounting, loop).result(30)
            return RestoreMounts(root=root, binds=dict(zip(binds or {}, mounts, strict=True)))

        request = Restore(
            images=images,
            id_base=self.base(slot),
            mount_root=mount_root,
            groups=(self.groups.unified(f"s{slot}"), *self.groups.joins(f"s{slot}")),
            keep_connections=keep_connections,
            connect_network=connect_network,
        )
        restored: Restored = await asyncio.to_thread(self.checkpointer.restore, request)
        guest = Guest(uid, slot, restored.pid, restored.pidfd)
        self.guests.append(guest)
        return guest

    def mounts(self) -> list[str]:
        """Return the host's mounts that may belong to this lab."""
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
        marks = (str(self.directory), "/run/restore-", "/.criu", "overlay paddock")
        return [line for line in lines if any(mark in line for mark in marks)]

    def group_of(self, guest: Guest) -> str:
        return f"s{guest.slot}"

    async def close(self) -> None:
        for guest in self.guests:
            guest.detach()
            for fd in guest.streams:
                os.close(fd)
            self.groups.kill(f"s{guest.slot}")
        for guest in self.guests:
            await poll(lambda g=guest: not self.groups.is_populated(f"s{g.slot}"))
            os.close(guest.pidfd)
        for slot in range(1, self._slots + 1):
            await poll(lambda s=slot: self.groups.remove(f"s{s}"))
        self.launcher.stop()
        self.checkpointer.close()
        self.groups.close()
        self.storage.close(detach=True)
        shutil.rmtree(self.directory, ignore_errors=True)


async def poll(condition: Callable[[], object], *, seconds: float = 30.0) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        await asyncio.sleep(0.005)


def _drain(guest: Guest, record: ProcessRecord) -> str:
    """Read the output of a command until it has ended; init keeps the pipe open itself."""
    os.set_blocking(record.fds[0], False)
    output, deadline = b"", time.monotonic() + 60
    while True:
        assert time.monotonic() < deadline, "the command did not end in time"
        ended = any(one.id == record.id for one in guest.exits)
        try:
            data = os.read(record.fds[0], 65536)
        except BlockingIOError:
            data = b""
        output += data
        if ended and not data:
            break
        if not data:
            time.sleep(0.002)
    return output.decode()
