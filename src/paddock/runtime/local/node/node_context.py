"""What the sandboxes of one node share: directories, storage, network, groups, parents, images.

`Machine.open` finds out what this machine can do, once, and keeps the reason for everything it
cannot. Sandboxes themselves are `sandboxes`' business.
"""

import asyncio
import contextlib
import hashlib
import logging
import os
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, ParamSpec, TypeVar

from msgspec import Struct

from paddock.kit.errors import NotFoundError, PaddockError, UnavailableError
from paddock.kit.logs import fields
from paddock.runtime.local.envd.zygote import Zygote
from paddock.runtime.local.images import Image, host
from paddock.runtime.local.images.store import ImageStore
from paddock.runtime.local.kernel import syscalls, sysctls
from paddock.runtime.local.kernel.cgroups import Cgroups, Layout
from paddock.runtime.local.launch import native_build
from paddock.runtime.local.launch.launcher import Launching
from paddock.runtime.local.net import fabric_number
from paddock.runtime.local.net.fabric import Fabric, FabricSettings
from paddock.runtime.local.node.records import StateDirectory
from paddock.runtime.local.node.slots import Slots
from paddock.runtime.local.storage import Storage, open_storage
from paddock.runtime.port import Limits

log = logging.getLogger(__name__)

_SPARE_ENVDS = 4
_P = ParamSpec("_P")
_T = TypeVar("_T")


class Settings(Struct, frozen=True, kw_only=True):
    """Choices of one node."""

    state: Path
    socket_path: Path
    parked: int = 8
    """Skeletons kept ready, so that a sandbox is there in a few milliseconds."""
    network: int | Literal["auto"] | None = "auto"
    """Number of the fabric on this machine; `auto` takes the one it had last, or a free one;
    `None` gives sandboxes loopback only."""
    storage: str = "auto"
    envd_idle_seconds: float = 60.0
    node_name: str = socket.gethostname()
    default_limits: Limits = Limits(
        cpu_millis=2000, memory_bytes=2 << 30, disk_bytes=10 << 30, pids=4096
    )


class Machine:
    """Everything shared, opened once."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.is_rootless = os.geteuid() != 0
        self.directories = StateDirectory(settings.state)
        node = hashlib.sha256(str(settings.state.absolute()).encode()).hexdigest()
        self.node_id = node[:8]
        self.slots = Slots(int(node[8:16], 16))
        layout = Layout(None, frozenset(), {}) if self.is_rootless else None
        self.cgroups = Cgroups(self.node_id, layout)
        self.zygote = Zygote(spares=_SPARE_ENVDS)
        self.fabric: Fabric | None = None
        self.no_network_because = ""
        self._storage: Storage | None = None
        self._images: ImageStore | None = None
        self._init_layer: Path | None = None
        self._threads = ThreadPoolExecutor(max_workers=4, thread_name_prefix="node")
        self._cache = settings.state / "cache" if self.is_rootless else native_build.CACHE
        self.launching = Launching(str(self.directories.stage), self._cache)
        self._host_image = asyncio.Lock()
        self._host_layers: tuple[str, ...] = ()

    async def open(self) -> None:
        """Set up or take over; refuses a state directory that another node uses."""
        self.directories.prepare()
        self._hold_exclusively()
        self.directories.use_scratch()
        self.directories.use_shortcut(self.settings.socket_path.with_name(self.node_id))
        await self.work(self.directories.premises.open)
        self._mount_layers()
        self._init_layer = await self.work(
            native_build.ensure_layer, self.directories.layers, self._cache
        )
        await self.work(native_build.ensure_launcher, self._cache)
        if self.cgroups.is_usable:
            self.cgroups.prepare()
        if not self.is_rootless:
            await self.work(sysctls.widen)
        self._storage = await self.work(
            lambda: open_storage(self.settings.state / "storage", backend=self.settings.storage)
        )
        self._images = ImageStore(self.settings.state / "images")
        await self._open_network()
        self.launching.start()
        self.zygote.start()

    async def close(self, *, purge: bool) -> None:
        """Let go. With `purge`, which needs all sandboxes gone, also of what stays between runs."""
        self.directories.premises.close()
        self.launching.stop()
        self.zygote.stop()
        if self.fabric is not None:
            if purge:
                await self.fabric.purge()
            await self.fabric.close()
        if self._storage is not None:
            await self.work(lambda: self.storage.close(detach=purge))
        self._threads.shutdown(wait=True)
        if purge:
            self.directories.remove_shortcut()
            self.cgroups.close()
            if os.path.ismount(self.directories.layers):
                syscalls.umount(str(self.directories.layers), syscalls.MNT_DETACH)

    @property
    def storage(self) -> Storage:
        """Where files of sandboxes are."""
        if self._storage is None:
            raise UnavailableError("the node has not finished starting")
        return self._storage

    async def work(self, call: Callable[_P, _T], *arguments: _P.args, **named: _P.kwargs) -> _T:
        """Run what may wait for a disk in a thread."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, lambda: call(*arguments, **named))

    async def image(self, name: str) -> tuple[Image | None, tuple[str, ...]]:
        """Find an image: itself (unless it is the host) and its layers, highest first."""
        if self._init_layer is None or self._images is None:
            raise UnavailableError("the node has not finished starting")
        first = str(self._init_layer)
        if name == "host":
            if self._host_layers:
                return None, self._host_layers
            async with self._host_image:
                if self.is_rootless:
                    made = await self.work(host.ensure_rootless_layer, self.directories.layers)
                    self._host_layers = (first, str(made))
                    return None, self._host_layers
                hidden = (
                    self.settings.state.absolute(),
                    self.settings.socket_path.absolute().parent,
                )
                mask = await self.work(host.ensure_layer, self.directories.layers, hidden=hidden)
            self._host_layers = (first, str(mask), "/")
            return None, self._host_layers
        try:
            image = await self.work(self._images.resolve, name)
        except NotFoundError as problem:
            raise NotFoundError(
                problem.message,
                hint=problem.hint or "`paddock image` builds and imports; `host` is always there",
            ) from problem
        return image, (first, *map(str, image.lowerdirs))

    async def ensure_layers(self, layers: tuple[str, ...]) -> None:
        """See to it that the layers of an older sandbox are there: a reboot empties ours."""
        for layer in map(Path, layers):
            if layer.exists():
                continue
            if layer.name.startswith(native_build.PREFIX):
                await self.work(
                    native_build.bring_layer, self.directories.layers, self._cache, layer.name
                )
            elif layer.parent == self.directories.layers:
                await self.image("host")
            else:
                raise UnavailableError(
                    f"a layer of the sandbox's image is gone: {layer}",
                    hint="import the image again",
                )

    def base(self, slot: int) -> int:
        """Give the first id of a slot."""
        return self.slots.base(slot)

    def _hold_exclusively(self) -> None:
        self._lock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            # An abstract name goes with its process, whatever kills that.
            self._lock.bind(f"\0paddock node {self.node_id}")
        except OSError as problem:
            raise UnavailableError(
                f"another node uses {self.settings.state}",
                hint="stop it, or choose another --state",
            ) from problem

    def _mount_layers(self) -> None:
        # Overlayfs refuses a layer that lies below another, as everything does below the host's
        # root: the layers of ours are on a filesystem of their own.
        layers = self.directories.layers
        if self.is_rootless or os.path.ismount(layers):
            return
        syscalls.mount("paddock-layers", str(layers), "tmpfs", 0, "mode=755,size=256m")

    async def _open_network(self) -> None:
        if self.settings.network is None or self.is_rootless:
            self.no_network_because = (
                "a node without root cannot make links" if self.is_rootless else "switched off"
            )
            return
        directory = self.settings.state / "net"
        number = self.settings.network
        try:
            if number == "auto":
                self.fabric = await fabric_number.open_own(directory)
            else:
                chosen = FabricSettings.numbered(number, str(directory))
                self.fabric = await Fabric.open(chosen)
        except PaddockError as problem:
            self.no_network_because = problem.message
            log.warning(
                "sandboxes have no network",
                extra=fields(reason=problem.message, hint=problem.hint),
            )


def open_workdir(machine: Machine, home: str) -> None:
    """Make overlayfs' own directory, which it closes to everybody, one we can copy and remove."""
    box = machine.storage.find(home) if machine.is_rootless else None
    if box is not None:
        with contextlib.suppress(OSError):
            os.chmod(box.work / "work", 0o700)
