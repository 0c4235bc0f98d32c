"""The steps that build a sandbox: limits, files, root and network concurrently, then init.

The same steps build claimed sandboxes (`lifecycle.py`) and warm ones (`warm_stock.py`); those
modules write the records.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec import Struct, structs

from paddock.kit.errors import (
    ConflictError,
    FieldProblem,
    InvalidError,
    PaddockError,
    UnavailableError,
    UnsupportedError,
)
from paddock.runtime import host_paths
from paddock.runtime.local.envd.envd_listener import ENVD_PARTS, PARTS_OF_RUNNING_INIT
from paddock.runtime.local.envd.zygote import WaitingEnvd
from paddock.runtime.local.identity.files import write_identity, write_new_identity
from paddock.runtime.local.images import host
from paddock.runtime.local.kernel import nproc_reserve, syscalls
from paddock.runtime.local.kernel.pidfds import wait_for_exit
from paddock.runtime.local.launch.protocol import Launch, MakeRoot
from paddock.runtime.local.launch.skeleton import Skeleton
from paddock.runtime.local.net.settings import Bandwidth
from paddock.runtime.local.node import records
from paddock.runtime.local.node.node_context import NodeContext
from paddock.runtime.local.node.rate_support import check_rates
from paddock.runtime.local.node.records import RecordPhase
from paddock.runtime.local.node.slots import cgroup_name
from paddock.runtime.local.sandbox.sandbox import NodeSandbox
from paddock.runtime.local.storage import SandboxDisk
from paddock.runtime.local.views.views import Bind
from paddock.runtime.port import Blueprint, Limits
from paddock.wire.seqpacket import close_all

_RESERVED_DIRECTORIES = frozenset({".paddock", "dev", "proc", "sys"})
"""The sandbox's confinement depends on these; nothing may be mounted there."""


_WRITABLE_DIRECTORIES = {
    "home": 0o755, "home/user": 0o755, "root": 0o700, "run": 0o755, "tmp": 0o1777,
    "var": 0o755, "var/lib": 0o755, "var/tmp": 0o1777,
}  # fmt: skip


_REMOVAL_DELAYS = (
    *(0.0, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0),
    *(2.0,) * 14,
)
"""Seconds, 30 s in all: a killed process exits only after it is scheduled once more."""


def validate(blueprint: Blueprint, allowed_paths: tuple[str, ...] = ()) -> None:
    """Raise `InvalidError` for a uid or a mount that no sandbox may have."""
    records.check_uid(blueprint.uid)
    for number, mount in enumerate(blueprint.mounts):
        if not mount.source.startswith("/"):
            raise InvalidError.at(
                f"mounts[{number}].source",
                f"{mount.source!r} is not a directory: one machine has no volume claims",
                hint="mount a directory of the machine with hostPath",
            )
        if (reason := host_paths.refusal(mount.source, allowed_paths)) is not None:
            raise InvalidError.at(f"mounts[{number}].source", reason)
        parts = [part for part in mount.path.split("/") if part not in ("", ".", "..")]
        if not parts or parts[0] in _RESERVED_DIRECTORIES:
            message = "must not be / or below /" + ", /".join(sorted(_RESERVED_DIRECTORIES))
            raise InvalidError(
                f"cannot mount at {mount.path!r} in a sandbox",
                problems=[FieldProblem(f"mounts[{number}].path", message)],
                hint=message,
            )


class NetworkReservation(Struct, frozen=True):
    """A sandbox's slot and address in the fabric; all `None` on a node without a network."""

    slot: int | None
    ip: str | None
    resolv_conf: str | None


class BuildResult(Struct, frozen=True):
    """Facts of a new sandbox that its record needs."""

    upper: Path
    ip: str | None
    waiting_envd: WaitingEnvd | None = None
    """An envd that has joined the sandbox and waits for its configuration."""


class SandboxBuilder:
    """Builds sandboxes of one node."""

    def __init__(self, context: NodeContext) -> None:
        self._context = context

    def validate(self, blueprint: Blueprint) -> None:
        """Raise for a blueprint that no sandbox may have, or whose rates cannot be enforced."""
        validate(blueprint, self._context.settings.host_paths)
        check_rates(self._context, blueprint.limits)

    async def clone_skeleton(self) -> Skeleton:
        """Clone a skeleton into a new slot."""
        context = self._context
        slot = context.slots.acquire()
        name = cgroup_name(slot)
        try:
            has_groups = context.cgroups.is_usable
            if has_groups:
                context.cgroups.create(name)
            return await context.launcher.prepare(
                slot,
                base=context.slots.first_id(slot),
                cgroup=context.cgroups.unified(name) if has_groups else None,
                joins=context.cgroups.joins(name) if has_groups else (),
                devices=context.devices.directory(name),
            )
        except BaseException:
            # Shielded: a second cancellation must neither leak the slot nor release it too early.
            await asyncio.shield(self._undo_clone(slot))
            raise

    async def _undo_clone(self, slot: int) -> None:
        """Remove what is left of a failed clone and release its slot."""
        context, name = self._context, cgroup_name(slot)
        try:
            # A killed launcher may have cloned it already; the process needs a moment to exit.
            if context.cgroups.is_usable:
                context.cgroups.kill(name)
                with contextlib.suppress(PaddockError):  # the next sweep tries again
                    await remove_cgroups(context, name)
        finally:
            context.slots.release(slot)

    async def discard_skeleton(self, skeleton: Skeleton) -> None:
        """Kill a skeleton, remove its cgroups and release its slot."""
        pidfd = os.dup(skeleton.pidfd)
        skeleton.kill()
        try:
            await kill_and_wait(pidfd)
        finally:
            os.close(pidfd)
        await remove_cgroups(self._context, cgroup_name(skeleton.slot))
        self._context.slots.release(skeleton.slot)

    async def prepare_files_and_network(
        self, sandbox: NodeSandbox
    ) -> tuple[SandboxDisk, NetworkReservation]:
        """Create or find a sandbox's files, reserve its address, and write its identity files."""
        disk, network = await asyncio.gather(
            self._create_disk(sandbox), self.reserve_network(sandbox), return_exceptions=True
        )
        if isinstance(disk, BaseException):
            raise disk
        if isinstance(network, BaseException):
            raise network
        hostname = host_name(sandbox.record.blueprint)
        write_identity(
            disk.upper, hostname=hostname, ip=network.ip, resolv_conf=network.resolv_conf
        )
        return disk, network

    async def _create_disk(self, sandbox: NodeSandbox) -> SandboxDisk:
        disk, generation = await self._context.run_in_thread(self._make_disk, sandbox)
        sandbox.generation = generation or sandbox.generation
        return disk

    def _make_disk(self, sandbox: NodeSandbox) -> tuple[SandboxDisk, str | None]:
        """Create or find a disk; write the identity of a new sandbox, and return its generation."""
        record, limit = sandbox.record, sandbox.limits.disk_bytes or 0
        disk = self._context.storage.create(sandbox.resource_name, limit_bytes=limit)
        if self._context.is_rootless and record.blueprint.image != "host":
            create_writable_dirs(disk.upper)
        if record.phase is not RecordPhase.CREATING:
            return disk, None
        return disk, write_new_identity(disk.upper, record.layers)

    async def assemble(
        self,
        sandbox: NodeSandbox,
        skeleton: Skeleton,
        disk: SandboxDisk,
        network: NetworkReservation,
        *,
        with_envd: bool = False,
        while_launching: Callable[[], None] | None = None,
    ) -> BuildResult:
        """Concurrently attach the network, set limits, mount the root and start init.

        `with_envd` also forks an envd that joins everything except the mounts, which do not exist
        yet. `while_launching` is called while the launcher works.
        """
        # In this order: the launcher works while the loop does the rest.
        launched, linked, waiting_envd, done = await asyncio.gather(
            self._launch(sandbox, skeleton, disk),
            self.attach_network(sandbox, skeleton.pid),
            self._fork_envd_if_wanted(sandbox, skeleton, is_wanted=with_envd),
            self._set_limits(sandbox, skeleton.pid, while_launching),
            return_exceptions=True,  # all steps end before anything is undone
        )
        problems = (launched, linked, waiting_envd, done)
        problem = next((one for one in problems if isinstance(one, BaseException)), None)
        if problem is not None:
            if isinstance(waiting_envd, WaitingEnvd):
                waiting_envd.close()
            raise problem
        return BuildResult(
            disk.upper, network.ip, waiting_envd if isinstance(waiting_envd, WaitingEnvd) else None
        )

    async def _fork_envd_if_wanted(
        self, sandbox: NodeSandbox, skeleton: Skeleton, *, is_wanted: bool
    ) -> WaitingEnvd | None:
        if not is_wanted:
            return None
        return await self.fork_waiting_envd(sandbox, skeleton, missing=PARTS_OF_RUNNING_INIT)

    async def fork_waiting_envd(
        self, sandbox: NodeSandbox, skeleton: Skeleton, *, missing: tuple[str, ...]
    ) -> WaitingEnvd | None:
        """Fork an envd that joins a sandbox, except the `missing` parts, and waits.

        Return `None` on failure: the first caller then starts an envd, with more latency.
        """
        parts = [part for part in ENVD_PARTS if part not in missing]
        fds = sandbox.open_parts(skeleton.pid, skeleton.pidfd, parts)
        try:
            with contextlib.suppress(PaddockError):
                return await self._context.zygote.fork_waiting(fds, missing)
            return None
        finally:
            close_all(list(fds.values()))

    async def _launch(self, sandbox: NodeSandbox, skeleton: Skeleton, disk: SandboxDisk) -> None:
        blueprint = sandbox.record.blueprint
        views = self._context.views.binds(sandbox.cgroup, sandbox.limits, sandbox.record.boot_id)
        request = self.root_request(sandbox, str(disk.path), views)
        launch = Launch(
            hostname=host_name(blueprint),
            locked=blueprint.privileges == "locked",
            binds=(
                *(mount.path for mount in blueprint.mounts),
                *(point for _, point in views),
            ),
        )
        if self._context.is_rootless:
            trees = host.host_trees() if blueprint.image == "host" else ()
            overlay = rootless_overlay(request)
            launch = structs.replace(launch, overlay=overlay, host_trees=trees)
            await self._context.launcher.launch(skeleton, launch)
        else:
            await self._context.launcher.launch(skeleton, launch, request)

    async def _set_limits(
        self, sandbox: NodeSandbox, pid: int, while_launching: Callable[[], None] | None
    ) -> None:
        if self._context.cgroups.is_usable:
            set_group_limits(self._context, sandbox, pid)
        if while_launching is not None:
            while_launching()

    async def reserve_network(self, sandbox: NodeSandbox) -> NetworkReservation:
        """Reserve a slot in the fabric, the previous one if it is free, and apply the policy."""
        # Again: a stored sandbox may have been created on another kernel.
        check_rates(self._context, sandbox.record.blueprint.limits)
        fabric = self._context.fabric
        if fabric is None:
            return NetworkReservation(None, None, None)
        name, policy, wanted = sandbox.resource_name, sandbox.record.egress, sandbox.record.place
        try:
            found = await fabric.reserve(name, wanted, policy=policy)
        except ConflictError:
            if wanted is None:
                raise
            found = await fabric.reserve(name, policy=policy)  # the slot is taken
        return NetworkReservation(found.slot, found.ip, found.resolv_conf)

    async def attach_network(self, sandbox: NodeSandbox, pid: int) -> None:
        """Attach a process's network namespace to the sandbox's slot in the fabric."""
        if self._context.fabric is None:
            return
        netns = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        try:
            await self._context.fabric.attach(
                sandbox.resource_name, netns, bandwidth=bandwidth_of(sandbox.limits)
            )
        finally:
            os.close(netns)

    async def change_bandwidth(self, sandbox: NodeSandbox, pid: int, before: Limits) -> None:
        """Change the rates of a link that was attached with other limits."""
        bandwidth = bandwidth_of(sandbox.limits)
        if bandwidth != bandwidth_of(before) and self._context.fabric is not None:
            await self._context.fabric.set_bandwidth(sandbox.resource_name, pid, bandwidth)

    def root_request(self, sandbox: NodeSandbox, disk: str, views: Sequence[Bind]) -> MakeRoot:
        """Return the request to mount a sandbox's root, its mounts and its views."""
        blueprint = sandbox.record.blueprint
        return MakeRoot(
            base=self._context.slots.first_id(sandbox.record.slot),
            layers=sandbox.record.layers,
            disk=disk,
            locked=blueprint.privileges == "locked",
            host_directories=tuple((mount.source, mount.read_only) for mount in blueprint.mounts),
            binds=tuple(path for path, _ in views),
        )


def set_group_limits(context: NodeContext, sandbox: NodeSandbox, pid: int) -> None:
    """Set the limits of a sandbox whose only process is `pid`."""
    name, limits = sandbox.cgroup, sandbox.limits
    context.cgroups.limit(name, limits)
    context.cgroups.limit_io(name, limits)
    nproc_reserve.apply(pid, limits.pids)
    os.sched_setaffinity(pid, context.views.cpus(name, limits))


def bandwidth_of(limits: Limits) -> Bandwidth:
    """Return the limits of a sandbox's link."""
    return Bandwidth(limits.ingress_bandwidth or 0, limits.egress_bandwidth or 0)


async def kill_and_wait(pidfd: int) -> None:
    """Kill an init, and with it its pid namespace, and wait for its exit."""
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    await wait_for_exit(pidfd)


async def remove_cgroups(context: NodeContext, name: str) -> None:
    """Remove the cgroups and views of a slot once the last killed process has left them."""
    context.views.remove(name)
    if not context.cgroups.is_usable:
        return
    for pause in _REMOVAL_DELAYS:
        await asyncio.sleep(pause)
        if context.cgroups.remove(name):
            return
        context.cgroups.kill(name)
    raise UnavailableError(f"cannot remove cgroup {name}: its processes do not exit")


def host_name(blueprint: Blueprint) -> str:
    """Return the requested host name, or one derived from the sandbox's id or name."""
    wanted = blueprint.hostname or blueprint.agent.sandbox_id or blueprint.name or blueprint.uid
    clean = "".join(c if c.isalnum() or c == "-" else "-" for c in wanted)
    return clean[:63].strip("-") or "sandbox"


def set_hostname(pid: int, hostname: str) -> None:
    """Set the host name in the UTS namespace of a process."""
    uts = os.open(f"/proc/{pid}/ns/uts", os.O_RDONLY | os.O_CLOEXEC)
    own = os.open("/proc/thread-self/ns/uts", os.O_RDONLY | os.O_CLOEXEC)
    try:
        syscalls.setns(uts, syscalls.CLONE_NEWUTS)
        try:
            syscalls.sethostname(hostname)
        finally:
            syscalls.setns(own, syscalls.CLONE_NEWUTS)
    finally:
        os.close(uts)
        os.close(own)


def create_writable_dirs(upper: Path) -> None:
    """Create the usual writable directories in a new disk of a rootless sandbox.

    The image's own directories belong to ids that a rootless sandbox does not have.
    """
    if any(upper.iterdir()):
        return  # the sandbox has run: a name may be a symlink to anywhere
    for path, mode in _WRITABLE_DIRECTORIES.items():
        (upper / path).mkdir()
        (upper / path).chmod(mode)
    # Overlayfs cannot merge a directory of the image that we may not read.
    os.setxattr(upper / "root", "user.overlay.opaque", b"y")


def rootless_overlay(request: MakeRoot) -> str:
    """Return the mount options of an overlay that an unprivileged user namespace can mount."""
    if request.host_directories:
        raise UnsupportedError(
            "cannot mount directories of the host: the node runs without root",
            hint="run `sudo paddock up`, or remove `volumes` from the template",
        )
    return (
        f"lowerdir={':'.join(request.layers)},upperdir={request.disk}/upper,"
        f"workdir={request.disk}/work,userxattr"
    )
