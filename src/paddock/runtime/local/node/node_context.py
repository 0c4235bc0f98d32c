"""What the sandboxes of one node share: directories, storage, network, cgroups, zygote, images.

`NodeContext.open` sets all of it up once. The sandboxes themselves are in `sandbox/lifecycle.py`.
"""

import asyncio
import contextlib
import hashlib
import logging
import os
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from ipaddress import IPv4Network
from pathlib import Path
from typing import Literal, ParamSpec, TypeVar

from msgspec import Struct

from paddock.kit import clock
from paddock.kit.errors import PaddockError, UnavailableError
from paddock.kit.logs import fields
from paddock.resources.default_limits import (
    DEFAULT_BANDWIDTH,
    DEFAULT_CPU_MILLIS,
    DEFAULT_DISK_BYTES,
    DEFAULT_IO_BANDWIDTH,
    DEFAULT_IO_IOPS,
    DEFAULT_MEMORY_BYTES,
    DEFAULT_PIDS,
)
from paddock.runtime.local.envd.zygote import ZygoteProcess
from paddock.runtime.local.images import Image, host
from paddock.runtime.local.images.base import DEFAULT_CACHE
from paddock.runtime.local.images.eviction import ImageEviction
from paddock.runtime.local.images.provider import ImageProvider, known_names
from paddock.runtime.local.images.registry.puller import Puller
from paddock.runtime.local.images.registry.team_share import PullShares
from paddock.runtime.local.images.settings import DOWNLOADS, ImageSettings
from paddock.runtime.local.images.store import ImageStore
from paddock.runtime.local.kernel import block_devices, syscalls, sysctls
from paddock.runtime.local.kernel.cgroups import CgroupLayout, Cgroups
from paddock.runtime.local.kernel.uncharged import KernelMemoryBounds
from paddock.runtime.local.launch import native_build
from paddock.runtime.local.launch.devices import DeviceFiles
from paddock.runtime.local.launch.launcher import SandboxLauncher
from paddock.runtime.local.net import fabric_number
from paddock.runtime.local.net.fabric import Fabric, FabricSettings
from paddock.runtime.local.node.heavy_work import HeavyLimits, HeavyWork
from paddock.runtime.local.node.records import StateDirectory
from paddock.runtime.local.node.slots import SandboxSlots
from paddock.runtime.local.storage import DiskReserve, Storage, open_storage
from paddock.runtime.local.views import ResourceViews
from paddock.runtime.port import Limits, OutboundConfig

log = logging.getLogger(__name__)

_SPARE_ENVDS = 4
_P = ParamSpec("_P")
_T = TypeVar("_T")


DEFAULT_LIMITS = Limits(
    cpu_millis=DEFAULT_CPU_MILLIS,
    memory_bytes=DEFAULT_MEMORY_BYTES,
    disk_bytes=DEFAULT_DISK_BYTES,
    pids=DEFAULT_PIDS,
    ingress_bandwidth=DEFAULT_BANDWIDTH,
    egress_bandwidth=DEFAULT_BANDWIDTH,
    io_read_bandwidth=DEFAULT_IO_BANDWIDTH,
    io_write_bandwidth=DEFAULT_IO_BANDWIDTH,
    io_read_iops=DEFAULT_IO_IOPS,
    io_write_iops=DEFAULT_IO_IOPS,
)


class NodeSettings(Struct, frozen=True, kw_only=True):
    """Settings of one node process."""

    state: Path
    socket_path: Path
    warm_count: int = 8
    """Warm sandboxes and skeletons to keep, so that a create takes a few milliseconds."""
    network: int | Literal["auto"] | None = "auto"
    """Number of the fabric on this machine. `auto`: the last one used, or a free one. `None`:
    sandboxes have loopback only."""
    storage: str = "auto"
    image_cache: Path = DEFAULT_CACHE
    """Where `base` and `minimal` are built."""
    disk_reserve_bytes: int | None = None
    """Space to keep free on the disk of the state directory; `None`: see `storage/reserve.py`."""
    kernel_memory: KernelMemoryBounds = KernelMemoryBounds()
    """What a sandbox may have beyond its memory limit."""
    envd_idle_seconds: float = 60.0
    clone_hook_seconds: float = 10.0
    """How long the hooks of a new clone may run together."""
    outbound: OutboundConfig = OutboundConfig()
    """Proxies, CA certificates and mirrors of all sandboxes."""
    host_paths: tuple[str, ...] = ()
    """Directories that sandboxes may mount, with those below them; no part is a symbolic link."""
    host_ports: tuple[int, ...] = ()
    """TCP ports of this machine that sandboxes may reach."""
    private_networks: tuple[IPv4Network, ...] = ()
    """Private networks that sandboxes may reach."""
    node_name: str = socket.gethostname()
    heavy_limits: HeavyLimits = HeavyLimits.of_settings()
    """How many dumps, restores and forks run at once."""
    images: ImageSettings = ImageSettings()
    """How registries are reached, and what an image may have."""
    default_limits: Limits = DEFAULT_LIMITS
    """Limits where a blueprint has none. The rates are also a ceiling."""


class NodeContext:
    """Shared resources of a node process."""

    def __init__(self, settings: NodeSettings) -> None:
        self.settings = settings
        self.is_rootless = os.geteuid() != 0
        self.directories = StateDirectory(settings.state)
        node = hashlib.sha256(str(settings.state.absolute()).encode()).hexdigest()
        self.node_id = node[:8]
        self.slots = SandboxSlots(int(node[8:16], 16))
        layout = CgroupLayout(None, frozenset(), {}) if self.is_rootless else None
        self.cgroups = Cgroups(self.node_id, layout, settings.kernel_memory)
        self.zygote = ZygoteProcess(spares=_SPARE_ENVDS)
        self.fabric: Fabric | None = None
        self.network_unavailable_reason = ""
        self._storage: Storage | None = None
        self._images: ImageProvider | None = None
        self._eviction: ImageEviction | None = None
        self._init_layer: Path | None = None
        self.heavy_work = HeavyWork(settings.heavy_limits, clock.system())
        self._threads = ThreadPoolExecutor(max_workers=4, thread_name_prefix="node")
        self._cache = settings.state / "cache" if self.is_rootless else native_build.CACHE
        self.launcher = SandboxLauncher(str(self.directories.stage), self._cache)
        self.devices = DeviceFiles(self.directories.devices)
        self.views = ResourceViews(
            self.directories.views, self._cache, self.cgroups, self.slots.first_id(0)
        )
        self._host_image = asyncio.Lock()
        self._host_layers: tuple[str, ...] = ()

    async def open(self) -> None:
        """Set up everything; raise `UnavailableError` if another node uses the state directory."""
        self.directories.prepare()
        self._lock_state_directory()
        self.directories.use_scratch()
        self.directories.use_short_path(self.settings.socket_path.with_name(self.node_id))
        await self.run_in_thread(self.directories.socket_dirs.open)
        self._mount_layers()
        self._init_layer = await self.run_in_thread(
            native_build.ensure_layer, self.directories.layers, self._cache
        )
        await self.run_in_thread(native_build.ensure_launcher, self._cache)
        if self.cgroups.is_usable:
            self.cgroups.prepare()
        await self.run_in_thread(self.views.open)
        await self.run_in_thread(self.devices.open)
        if not self.is_rootless:
            await self.run_in_thread(sysctls.raise_limits)
        self._storage = await self.run_in_thread(
            lambda: open_storage(
                self.settings.state / "storage",
                backend=self.settings.storage,
                reserve=DiskReserve(self.settings.state, self.settings.disk_reserve_bytes),
            )
        )
        await self.run_in_thread(self._open_io)
        self._images = self._open_images()
        await self._open_network()
        self.launcher.start()
        self.zygote.start()

    async def close(self, *, purge: bool) -> None:
        """Close everything. With `purge`, which requires that no sandbox is left, also remove
        what is kept between runs."""
        if self._images is not None:
            await self._images.close()
        self.directories.socket_dirs.close()
        self.launcher.stop()
        self.zygote.stop()
        self.views.close(purge=purge)
        if self.fabric is not None:
            if purge:
                await self.fabric.purge()
            await self.fabric.close()
        if self._storage is not None:
            await self.run_in_thread(lambda: self.storage.close(detach=purge))
        self._threads.shutdown(wait=True)
        self.heavy_work.close()
        if purge:
            self.devices.unmount()
            self.directories.remove_short_path()
            self.cgroups.close()
            if os.path.ismount(self.directories.layers):
                syscalls.umount(str(self.directories.layers), syscalls.MNT_DETACH)

    @property
    def storage(self) -> Storage:
        """The storage of sandboxes' files."""
        if self._storage is None:
            raise UnavailableError("the node has not finished starting")
        return self._storage

    async def run_in_thread(
        self, call: Callable[_P, _T], *arguments: _P.args, **named: _P.kwargs
    ) -> _T:
        """Run a call that may block on a disk in a thread."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, lambda: call(*arguments, **named))

    @property
    def images(self) -> ImageProvider:
        """The images of this node."""
        if self._images is None:
            raise UnavailableError("the node has not finished starting")
        return self._images

    @property
    def eviction(self) -> ImageEviction:
        """What removes images that are not needed."""
        if self._eviction is None:
            raise UnavailableError("the node has not finished starting")
        return self._eviction

    async def image(
        self, name: str, *, digest: str = "", team: str = ""
    ) -> tuple[Image | None, tuple[str, ...]]:
        """Return an image (`None` for `host`) that a team may use, and its layers, highest first.

        Raises `ImageMissingError` if a pull may help.
        """
        if self._init_layer is None:
            raise UnavailableError("the node has not finished starting")
        first = str(self._init_layer)
        if name == "host":
            if self._host_layers:
                return None, self._host_layers
            async with self._host_image:
                if self.is_rootless:
                    made = await self.run_in_thread(
                        host.ensure_rootless_layer, self.directories.layers
                    )
                    self._host_layers = (first, str(made))
                    return None, self._host_layers
                hidden = (
                    self.settings.state.absolute(),
                    self.settings.socket_path.absolute().parent,
                )
                mask = await self.run_in_thread(
                    host.ensure_layer, self.directories.layers, hidden=hidden
                )
            self._host_layers = (first, str(mask), "/")
            return None, self._host_layers
        image = await self.run_in_thread(self.images.find, name, digest=digest, team=team)
        return image, (first, *map(str, image.lowerdirs))

    async def ensure_layers(self, layers: tuple[str, ...]) -> None:
        """Restore missing layers of an older sandbox: a reboot empties the layer directory."""
        for layer in map(Path, layers):
            if layer.exists():
                continue
            if layer.name.startswith(native_build.PREFIX):
                await self.run_in_thread(
                    native_build.restore_layer, self.directories.layers, self._cache, layer.name
                )
            elif layer.parent == self.directories.layers:
                await self.image("host")
            else:
                raise UnavailableError(
                    f"a layer of the sandbox's image is missing: {layer}",
                    hint="import the image again",
                )

    def _open_images(self) -> ImageProvider:
        settings, root = self.settings.images, self.settings.state / "images"
        reserve = DiskReserve(self.settings.state, self.settings.disk_reserve_bytes)
        store = ImageStore(
            root,
            base_cache=self.settings.image_cache,
            limits=settings.limits,
            reserve=reserve,
        )
        eviction = self._eviction = ImageEviction(
            store,
            root,
            clock.system(),
            percent=settings.evict_percent,
            names_of=known_names,
        )
        puller = Puller(
            store,
            root / DOWNLOADS,
            settings.registries,
            reserve=reserve,
            shares=PullShares(
                store,
                settings.max_team_bytes,
                lambda team, size: eviction.evict(size, team=team),
            ),
        )
        return ImageProvider(
            store, puller, self.heavy_work, clock.system(), node_name=self.settings.node_name
        )

    def _lock_state_directory(self) -> None:
        self._lock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            # The kernel frees an abstract name when the process ends, however it ends.
            self._lock.bind(f"\0paddock node {self.node_id}")
        except OSError as problem:
            raise UnavailableError(
                f"another node uses {self.settings.state}",
                hint="stop it, or choose another --state",
            ) from problem

    def _mount_layers(self) -> None:
        # Overlayfs refuses a layer below another layer, and the host's root is one: so our layers
        # are on a file system of their own.
        layers = self.directories.layers
        if self.is_rootless or os.path.ismount(layers):
            return
        syscalls.mount("paddock-layers", str(layers), "tmpfs", 0, "mode=700,size=256m")

    async def _open_network(self) -> None:
        if self.settings.network is None or self.is_rootless:
            self.network_unavailable_reason = (
                "a node without root cannot create network links"
                if self.is_rootless
                else "it is switched off"
            )
            return
        directory = self.settings.state / "net"
        number = self.settings.network
        try:
            if number == "auto":
                self.fabric = await fabric_number.open_node_fabric(directory, self._fabric_settings)
            else:
                self.fabric = await Fabric.open(self._fabric_settings(number, directory))
        except PaddockError as problem:
            self.network_unavailable_reason = problem.message
            log.warning(
                "sandboxes have no network",
                extra=fields(reason=problem.message, hint=problem.hint),
            )

    def _open_io(self) -> None:
        self.cgroups.open_io(block_devices.disks_of(self.storage.trees, self.settings.state))
        if reason := self.cgroups.io_unavailable_reason:
            log.warning("disk I/O of sandboxes is not limited", extra=fields(reason=reason))

    def _fabric_settings(self, number: int, directory: Path) -> FabricSettings:
        return FabricSettings.numbered(
            number,
            str(directory),
            host_ports=self.settings.host_ports,
            private_networks=self.settings.private_networks,
        )


def unlock_workdir(context: NodeContext, name: str) -> None:
    """Make overlayfs's work directory (mode 0) of a rootless disk copyable and removable."""
    disk = context.storage.find(name) if context.is_rootless else None
    if disk is not None:
        with contextlib.suppress(OSError):
            os.chmod(disk.work / "work", 0o700)
