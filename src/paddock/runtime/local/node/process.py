"""The node process: runs the sandboxes of this machine, separate from the control plane.

    python -m paddock.runtime.local.node.process --state DIR --socket PATH

It may be killed at any point: sandboxes and their envds keep running, and the next node process
adopts them. The same holds after SIGTERM and SIGINT. `--purge-on-exit` destroys all sandboxes at
the end and removes what is kept between runs; `--purge` (uninstall) does so at once.
"""

import argparse
import asyncio
import logging
import os
import resource
import signal
import sys
from collections.abc import Coroutine
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any, Literal

import msgspec
import uvloop

from paddock.kit import clock, logs
from paddock.kit.errors import PaddockError
from paddock.kit.logs import fields
from paddock.runtime import rates
from paddock.runtime.local.images.base import DEFAULT_CACHE
from paddock.runtime.local.images.provider import ImageRequest
from paddock.runtime.local.images.settings import ImageSettings
from paddock.runtime.local.kernel import syscalls
from paddock.runtime.local.kernel.uncharged import KernelMemoryBounds
from paddock.runtime.local.node import recovery
from paddock.runtime.local.node.capabilities import NodeCapabilities
from paddock.runtime.local.node.disk_watch import DiskWatch
from paddock.runtime.local.node.heavy_work import HeavyLimits, WorkReport
from paddock.runtime.local.node.node_context import DEFAULT_LIMITS, NodeContext, NodeSettings
from paddock.runtime.local.node.rpc_server import FdResult, Handler, LogArguments, RpcServer
from paddock.runtime.local.sandbox.freeze import SandboxFreezer
from paddock.runtime.local.sandbox.hibernation import Hibernation
from paddock.runtime.local.sandbox.kernel_memory import KernelMemoryWatch
from paddock.runtime.local.sandbox.lifecycle import UP, SandboxLifecycle
from paddock.runtime.local.sandbox.sandbox import NodeSandbox
from paddock.runtime.outbound import InstallationOutbound
from paddock.runtime.port import ImagePull, Instance, InstanceState, Limits, LogLine, ReadyImage

log = logging.getLogger(__name__)

_SWITCH_INTERVAL_SECONDS = 0.0002
_MONITOR_SECONDS = 2.0
_SWEEP_SECONDS = 60.0
_IMAGE_POLL_SECONDS = 15.0
"""A call waits this long for an image; pulls take longer than calls may."""
_outbound_decoder = msgspec.json.Decoder(InstallationOutbound)
_images_decoder = msgspec.json.Decoder(ImageSettings)
_limits_decoder = msgspec.json.Decoder(Limits)
_bounds_decoder = msgspec.json.Decoder(KernelMemoryBounds)


class Node:
    """The parts of a node process, wired together."""

    def __init__(self, settings: NodeSettings, tasks: asyncio.TaskGroup) -> None:
        self._settings = settings
        self._tasks = tasks
        self.context = NodeContext(settings)
        self.lifecycle = SandboxLifecycle(
            self.context, clock.system(), self.spawn, lambda event: self._rpc_server.publish(event)
        )
        self.kernel_memory = KernelMemoryWatch(self.context.cgroups, self.context.run_in_thread)
        self.freezer = SandboxFreezer(self.lifecycle)
        self.capabilities = NodeCapabilities(self.context)
        self.hibernation = Hibernation(self.lifecycle, self.freezer, self.capabilities)
        self._rpc_server = RpcServer(
            self._handlers(), self.spawn, abandon=self.context.heavy_work.withdraw
        )
        self._is_closing = False
        self._monitors: list[asyncio.Task[None]] = []

    def spawn(self, name: str, work: Coroutine[Any, Any, Any]) -> None:
        """Run a background task; its errors are logged and not raised."""
        if self._is_closing:
            work.close()
            return
        self._tasks.create_task(self._log_errors(name, work), name=name)

    async def open(self) -> None:
        """Recover existing sandboxes, then serve requests."""
        await self.context.open()
        await recovery.recover(self.lifecycle)
        self._rpc_server.open(str(self._settings.socket_path))
        self.lifecycle.warm_stock.fill()
        self._start_monitors()
        log.info("node is serving", extra=fields(socket=self._settings.socket_path))

    def _start_monitors(self) -> None:
        disk = DiskWatch(self.context, lambda: tuple(self.lifecycle.by_uid.values()))
        monitors = {"monitor sandboxes": self._monitor(), "keep the reserve": disk.run()}
        if self.context.cgroups.is_usable:
            monitors["watch kernel memory"] = self.kernel_memory.run(self._sandboxes_up)
        for name, monitor in monitors.items():
            self._monitors.append(self._tasks.create_task(monitor, name=name))

    async def close(self, *, purge: bool) -> None:
        """Close everything; with `purge`, destroy all sandboxes and checkpoints first."""
        self._rpc_server.close()
        for monitor in self._monitors:  # they use what is closed below
            monitor.cancel()
        if self._monitors:
            await asyncio.wait(self._monitors)
        await self.lifecycle.warm_stock.close()
        if purge:
            # Sandboxes being created during the first pass are destroyed in the next one.
            while self.lifecycle.by_uid:
                for uid in list(self.lifecycle.by_uid):
                    await self.lifecycle.destroy(uid)
            await self.hibernation.delete_all_checkpoints()
        for sandbox in self.lifecycle.by_uid.values():
            sandbox.detach_init(kill=False)
        self._is_closing = True
        self.capabilities.close()
        await self.context.close(purge=purge)

    def _handlers(self) -> dict[str, Handler]:
        lifecycle, freezer, hibernation = self.lifecycle, self.freezer, self.hibernation
        return {
            "capabilities": lambda uid, body: self.capabilities.report(),
            "ensure_image": lambda uid, body: self._ensure_image(body),
            "image_pulls": lambda uid, body: self._image_pulls(),
            "need_images": lambda uid, body: self._need_images(body),
            "prune_images": lambda uid, body: self._prune_images(),
            "create": lambda uid, body: hibernation.create(body),
            "start": lambda uid, body: lifecycle.start(uid),
            "configure": lambda uid, body: lifecycle.configure(uid, body),
            "freeze": lambda uid, body: freezer.freeze(uid),
            "thaw": lambda uid, body: freezer.thaw(uid),
            "hibernate": lambda uid, body: hibernation.hibernate(uid),
            "restore": lambda uid, body: hibernation.restore(uid),
            "stop": lambda uid, body: hibernation.stop(uid),
            "snapshot": lambda uid, body: hibernation.snapshot(
                uid, body.checkpoint_id, memory=body.memory, keep_running=body.keep_running
            ),
            "fork": lambda uid, body: hibernation.fork(uid, body),
            "delete_checkpoint": lambda uid, body: hibernation.delete_checkpoint(uid),
            "checkpoints": lambda uid, body: hibernation.checkpoints(),
            "destroy": lambda uid, body: lifecycle.destroy(uid),
            "set_egress": lambda uid, body: lifecycle.set_egress(uid, body),
            "usage": lambda uid, body: lifecycle.usage(uid),
            "inspect": self._inspect,
            "instances": self._instances,
            "logs": self._logs,
            "netns": self._netns,
            "facts": self._facts,
            "heavy_work": self._heavy_work,
        }

    async def _ensure_image(self, request: ImageRequest) -> ReadyImage | None:
        """Return an image that is ready; `None`: it is still being pulled, ask again."""
        limit = asyncio.timeout(_IMAGE_POLL_SECONDS)
        try:
            async with limit:
                return await self.context.images.ensure(request)
        except TimeoutError:
            if not limit.expired():
                raise
            return None

    async def _image_pulls(self) -> tuple[ImagePull, ...]:
        return self.context.images.pulls()

    async def _inspect(self, uid: str, body: object) -> Instance | None:
        sandbox = self.lifecycle.by_uid.get(uid)
        return sandbox.instance() if sandbox else None

    async def _instances(self, uid: str, body: object) -> tuple[Instance, ...]:
        return tuple(sandbox.instance() for sandbox in self.lifecycle.by_uid.values())

    async def _logs(self, uid: str, body: LogArguments) -> tuple[LogLine, ...]:
        log_file = self.lifecycle.get(uid).log_file
        return await self.context.run_in_thread(log_file.read, since=body.since, limit=body.limit)

    async def _netns(self, uid: str, body: object) -> FdResult:
        return FdResult(self.lifecycle.netns(uid))

    async def _heavy_work(self, uid: str, body: object) -> tuple[WorkReport, ...]:
        return self.context.heavy_work.report()

    async def _facts(self, uid: str, body: object) -> dict[str, object]:
        """Return internals of the node for people and tests."""
        most_requested, ready = self.lifecycle.warm_stock.most_requested
        return {
            "pid": os.getpid(),
            "launcher": self.context.launcher.pid,
            "zygote": self.context.zygote.pid,
            "views": self.context.views.server_pid,
            "warm": self.lifecycle.warm_stock.count,
            "warm_sandboxes": self.lifecycle.warm_stock.sandbox_count,
            "warm_image": most_requested.image if most_requested else None,
            "warm_privileges": most_requested.privileges if most_requested else None,
            "warm_of_that_kind": ready,
            "node_id": self.context.node_id,
            "storage": self.context.storage.backend_name,
            "inits": {
                uid: sandbox.record.init.pid
                for uid, sandbox in self.lifecycle.by_uid.items()
                if sandbox.record.init is not None and sandbox.record.state in UP
            },
            "envds": {
                uid: sandbox.record.envd.pid
                for uid, sandbox in self.lifecycle.by_uid.items()
                if sandbox.record.envd is not None
            },
        }

    async def _monitor(self) -> None:
        """Report OOM kills, balance CPUs, sweep leftovers."""
        last_sweep = clock.system().monotonic()
        while True:
            await asyncio.sleep(_MONITOR_SECONDS)
            await self._log_errors("check oom kills", self._check_oom_kills())
            await self._log_errors("balance CPUs", self._balance_cpus())
            await self._log_errors(
                "check views", self.context.run_in_thread(self.context.views.check)
            )
            if clock.system().monotonic() - last_sweep > _SWEEP_SECONDS:
                last_sweep = clock.system().monotonic()
                await self._log_errors("sweep", recovery.sweep(self.lifecycle))
                await self._log_errors("sweep images", self._sweep_images())

    async def _sweep_images(self) -> None:
        in_use = await self._layers_in_use()
        await self.context.run_in_thread(self.context.eviction.sweep, in_use)

    async def _need_images(self, references: tuple[str, ...]) -> None:
        self.context.eviction.need(references)

    async def _prune_images(self) -> tuple[str, ...]:
        """Remove all images that are not needed, whatever the disk has free."""
        in_use = await self._layers_in_use()
        return await self.context.run_in_thread(self.context.eviction.evict, sys.maxsize, in_use)

    async def _layers_in_use(self) -> frozenset[Path]:
        """Return the layers of all sandboxes, paused ones and warm ones included, and snapshots."""
        records = [sandbox.record for sandbox in self.lifecycle.by_uid.values()]
        stored = await self.hibernation.records.all()
        layers = {layer for record in (*records, *stored) for layer in record.layers}
        layers |= self.lifecycle.warm_stock.layers
        return frozenset(map(Path, layers))

    async def _check_oom_kills(self) -> None:
        for sandbox in list(self.lifecycle.by_uid.values()):
            if sandbox.record.state is InstanceState.RUNNING:
                self.lifecycle.oom_monitor.check(sandbox)
                await asyncio.sleep(0)  # do not block the loop: there may be hundreds

    def _sandboxes_up(self) -> list[NodeSandbox]:
        sandboxes = self.lifecycle.by_uid.values()
        return [sandbox for sandbox in sandboxes if sandbox.record.state in UP]

    async def _balance_cpus(self) -> None:
        views, now = self.context.views, clock.system().monotonic()
        for sandbox in list(self.lifecycle.by_uid.values()):
            if sandbox.record.state is InstanceState.RUNNING:
                views.sample(sandbox.cgroup, now)
                await asyncio.sleep(0)  # do not block the loop: there may be hundreds
        views.rebalance()

    async def _log_errors(self, name: str, work: Coroutine[Any, Any, Any]) -> None:
        try:
            await work
        except PaddockError as problem:
            log.warning("task failed", extra=fields(task=name, reason=problem.message))
        except Exception:
            log.exception("task failed", extra=fields(task=name))


async def serve(settings: NodeSettings, *, purge: bool, exit_immediately: bool = False) -> None:
    """Run a node until SIGTERM or SIGINT; with `exit_immediately`, only recover and close."""
    stop = asyncio.Event()
    if exit_immediately:
        stop.set()
    loop = asyncio.get_running_loop()
    for signo in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signo, stop.set)
    async with asyncio.TaskGroup() as tasks:
        node = Node(settings, tasks)
        await node.open()
        await stop.wait()
        await node.close(purge=purge)
        current = asyncio.current_task()
        for task in asyncio.all_tasks():
            if task is not current:
                task.cancel()


def _network(given: str) -> int | Literal["auto"] | None:
    if given == "auto":
        return "auto"
    return None if given == "none" else int(given)


def _outbound(file: Path | None) -> InstallationOutbound:
    if file is None:
        return InstallationOutbound()
    return _outbound_decoder.decode(file.read_bytes())


def _images(file: Path | None) -> ImageSettings:
    return ImageSettings() if file is None else _images_decoder.decode(file.read_bytes())


def _limits(given: str | None) -> Limits:
    if given is None:
        return DEFAULT_LIMITS
    return rates.with_rates(DEFAULT_LIMITS, _limits_decoder.decode(given))


def _set_limits() -> None:
    # Each sandbox needs several descriptors: the usual soft limit allows about two hundred.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    # The kernel counts signals of all sandboxes for root, which created their user namespaces, and
    # bounds them by the limit of their creator: the other half is for programs of the machine.
    _, most = resource.getrlimit(resource.RLIMIT_SIGPENDING)
    if most != resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_SIGPENDING, (most // 2, most))


def main(argv: list[str]) -> int:
    """Parse arguments, serve, and return the exit status."""
    parser = argparse.ArgumentParser(prog="paddock-node", description=__doc__)
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--socket", type=Path, required=True)
    parser.add_argument(
        "--warm-count",
        type=int,
        default=NodeSettings.__struct_defaults__[0],
        help="warm sandboxes and skeletons to keep",
    )
    parser.add_argument(
        "--network", default="auto", help="fabric number on this machine, `auto`, or `none`"
    )
    parser.add_argument("--storage", default="auto", choices=("auto", "btrfs", "plain"))
    parser.add_argument(
        "--image-cache", type=Path, default=DEFAULT_CACHE, help="where the base image is built"
    )
    parser.add_argument(
        "--disk-reserve-bytes", type=int, help="space to keep free on the disk of the state"
    )
    parser.add_argument(
        "--outbound", type=Path, help="JSON file with proxies, CA certificates and open ports"
    )
    parser.add_argument("--images", type=Path, help="JSON file with the settings of images")
    parser.add_argument(
        "--host-path", action="append", default=[], help="a directory that sandboxes may mount"
    )
    parser.add_argument(
        "--heavy-work", type=int, default=0, help="dumps, restores and forks at once; 0: default"
    )
    parser.add_argument(
        "--heavy-work-per-team", type=int, default=0, help="of one team at once; 0: default"
    )
    parser.add_argument("--envd-idle-seconds", type=float, default=60.0)
    parser.add_argument(
        "--clone-hook-seconds", type=float, default=10.0, help="time of the hooks of a new clone"
    )
    parser.add_argument("--rates", help="JSON with the highest rates of network and disk")
    parser.add_argument(
        "--kernel-memory", default="{}", help="JSON with bounds of uncharged kernel memory"
    )
    parser.add_argument("--purge-on-exit", action="store_true")
    parser.add_argument("--purge", action="store_true")
    parser.add_argument("--log-level", default="info")
    parser.add_argument("--log-json", action="store_true")
    given = parser.parse_args(argv)
    logs.configure(level=given.log_level, json=given.log_json)
    os.umask(0o077)
    _set_limits()
    syscalls.prctl(syscalls.PR_SET_NAME, b"paddock-node\0")
    # Threads compete with the loop for the GIL: it must not wait the default 5 ms for it.
    sys.setswitchinterval(_SWITCH_INTERVAL_SECONDS)
    shared = _outbound(given.outbound)
    settings = NodeSettings(
        state=given.state.absolute(),
        socket_path=given.socket.absolute(),
        warm_count=0 if given.purge else given.warm_count,
        network=_network(given.network),
        storage=given.storage,
        image_cache=given.image_cache,
        disk_reserve_bytes=given.disk_reserve_bytes,
        kernel_memory=_bounds_decoder.decode(given.kernel_memory),
        envd_idle_seconds=given.envd_idle_seconds,
        clone_hook_seconds=given.clone_hook_seconds,
        default_limits=_limits(given.rates),
        outbound=shared.outbound,
        images=_images(given.images),
        host_paths=tuple(os.path.realpath(path) for path in given.host_path),
        host_ports=shared.host_ports,
        private_networks=tuple(map(IPv4Network, shared.private_networks)),
        heavy_limits=HeavyLimits.of_settings(given.heavy_work, given.heavy_work_per_team),
    )
    status = 0
    try:
        purge = given.purge or given.purge_on_exit
        uvloop.run(serve(settings, purge=purge, exit_immediately=given.purge))
    except* PaddockError as group:
        status = 1
        for problem in group.exceptions:
            hint = getattr(problem, "hint", None)
            # A deliberate refusal needs no traceback.
            log.error("node cannot run", extra=fields(reason=problem, hint=hint))  # noqa: TRY400
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
