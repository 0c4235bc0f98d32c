"""Putting a sandbox together: limits, files, root and network side by side, then init.

What is made here may be somebody's already or may be parked for whoever comes; which of the two,
and what is written down about it, is the business of `sandboxes` and `parking`.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct, structs

from paddock.kit.errors import (
    ConflictError,
    FieldProblem,
    InvalidError,
    PaddockError,
    UnavailableError,
)
from paddock.runtime.local.envd.envd_listener import JOINED, UNMADE
from paddock.runtime.local.envd.zygote import Waiter
from paddock.runtime.local.images import host
from paddock.runtime.local.kernel import nproc_reserve, syscalls
from paddock.runtime.local.kernel.pidfds import wait_for_exit
from paddock.runtime.local.launch.launcher import Skeleton
from paddock.runtime.local.launch.protocol import MakeRoot
from paddock.runtime.local.launch.skeleton import Launch
from paddock.runtime.local.node import records
from paddock.runtime.local.node.node_context import Machine
from paddock.runtime.local.node.slots import group_name
from paddock.runtime.local.sandbox.identity import write_identity
from paddock.runtime.local.sandbox.sandbox import Sandbox
from paddock.runtime.local.storage import Box
from paddock.runtime.port import Blueprint
from paddock.wire.seqpacket import close_all

_OURS = frozenset({".paddock", "dev", "proc", "sys"})
"""What a sandbox is confined by lies there: nobody else's files may."""


_WRITABLE = {
    "home": 0o755, "home/user": 0o755, "root": 0o700, "run": 0o755, "tmp": 0o1777,
    "var": 0o755, "var/lib": 0o755, "var/tmp": 0o1777,
}  # fmt: skip


_LEAVING_PAUSES = (
    *(0.0, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0),
    *(2.0,) * 14,
)
"""Half a minute in all: a killed process is not gone before the machine lets it run once more."""


def check(blueprint: Blueprint) -> None:
    """Refuse what no sandbox may be made of."""
    records.check_uid(blueprint.uid)
    for number, mount in enumerate(blueprint.mounts):
        parts = [part for part in mount.path.split("/") if part not in ("", ".", "..")]
        if not parts or parts[0] in _OURS:
            message = "must not be / or below /" + ", /".join(sorted(_OURS))
            raise InvalidError(
                f"nothing can be mounted at {mount.path!r} in a sandbox",
                problems=[FieldProblem(f"mounts[{number}].path", message)],
                hint=message,
            )


class Place(Struct, frozen=True):
    """Where a sandbox is in the network; nowhere on a node without one."""

    slot: int | None
    ip: str | None
    resolv_conf: str | None


class Made(Struct, frozen=True):
    """Where a sandbox turned out to be."""

    upper: Path
    ip: str | None
    waiter: Waiter | None = None
    """An envd that waits for word whom it serves."""


class Making:
    """The steps every new sandbox takes."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    async def clone(self) -> Skeleton:
        """Make a skeleton in a slot of its own."""
        machine = self._machine
        slot = machine.slots.take()
        name = group_name(slot)
        try:
            has_groups = machine.cgroups.is_usable
            if has_groups:
                machine.cgroups.create(name)
            return await machine.launching.prepare(
                slot,
                base=machine.base(slot),
                cgroup=machine.cgroups.unified(name) if has_groups else None,
                joins=machine.cgroups.joins(name) if has_groups else (),
            )
        except BaseException:
            # As a whole: whoever is cancelled twice must not keep the slot, nor free it too early.
            await asyncio.shield(self._give_up(slot))
            raise

    async def _give_up(self, slot: int) -> None:
        """Remove what there is of a skeleton that was not made, and give its slot back."""
        machine, name = self._machine, group_name(slot)
        try:
            # A launcher that was killed may have cloned it, and it takes a moment to go.
            if machine.cgroups.is_usable:
                machine.cgroups.kill(name)
                with contextlib.suppress(PaddockError):  # the next sweep tries again
                    await remove_groups(machine, name)
        finally:
            machine.slots.free(slot)

    async def scrap(self, skeleton: Skeleton) -> None:
        """End a skeleton and give its place back."""
        pidfd = os.dup(skeleton.pidfd)
        skeleton.kill()
        try:
            await kill_and_wait(pidfd)
        finally:
            os.close(pidfd)
        await remove_groups(self._machine, group_name(skeleton.slot))
        self._machine.slots.free(skeleton.slot)

    async def ground(self, sandbox: Sandbox) -> tuple[Box, Place]:
        """Make (or find) a sandbox's own files, and in them write who it is in the network."""
        box, place = await asyncio.gather(
            self._files(sandbox), self.place(sandbox), return_exceptions=True
        )
        if isinstance(box, BaseException):
            raise box
        if isinstance(place, BaseException):
            raise place
        hostname = host_name(sandbox.record.blueprint)
        if self._machine.is_rootless and sandbox.record.blueprint.image != "host":
            make_writable(box.upper)
        write_identity(box.upper, hostname=hostname, ip=place.ip, resolv_conf=place.resolv_conf)
        return box, place

    async def _files(self, sandbox: Sandbox) -> Box:
        limit = sandbox.limits.disk_bytes or 0
        return await self._machine.work(
            self._machine.storage.create, sandbox.home, limit_bytes=limit
        )

    async def assemble(
        self,
        sandbox: Sandbox,
        skeleton: Skeleton,
        box: Box,
        place: Place,
        *,
        with_envd: bool = False,
        meanwhile: Callable[[], None] | None = None,
    ) -> Made:
        """Link it to the network, and beside that mount its root and let it become init.

        An envd is sent ahead where somebody is about to call: it joins all but the mounts, which
        are only just being made. `meanwhile` is called while others work.
        """
        # In this order: the launcher works while the loop does the rest.
        launched, linked, waiter, done = await asyncio.gather(
            self._launch(sandbox, skeleton, box),
            self.link(sandbox, skeleton.pid),
            self._send_ahead(sandbox, skeleton, is_wanted=with_envd),
            self._limit(sandbox, skeleton.pid, meanwhile),
            return_exceptions=True,  # all have ended before anything is undone
        )
        problems = (launched, linked, waiter, done)
        problem = next((one for one in problems if isinstance(one, BaseException)), None)
        if problem is not None:
            if isinstance(waiter, Waiter):
                waiter.close()
            raise problem
        return Made(box.upper, place.ip, waiter if isinstance(waiter, Waiter) else None)

    async def _send_ahead(
        self, sandbox: Sandbox, skeleton: Skeleton, *, is_wanted: bool
    ) -> Waiter | None:
        if not is_wanted:
            return None
        return await self.send_envd(sandbox, skeleton, lacks=UNMADE)

    async def send_envd(
        self, sandbox: Sandbox, skeleton: Skeleton, *, lacks: tuple[str, ...]
    ) -> Waiter | None:
        """Have an envd join a sandbox and wait there, but for what is still being made of it.

        Without one the first caller gets one, only later.
        """
        parts = [part for part in JOINED if part not in lacks]
        fds = sandbox.joined_by(skeleton.pid, skeleton.pidfd, parts)
        try:
            with contextlib.suppress(PaddockError):
                return await self._machine.zygote.send_ahead(fds, lacks)
            return None
        finally:
            close_all(list(fds.values()))

    async def _launch(self, sandbox: Sandbox, skeleton: Skeleton, box: Box) -> None:
        blueprint = sandbox.record.blueprint
        request = self._root_request(sandbox, str(box.path))
        launch = Launch(
            hostname=host_name(blueprint),
            locked=blueprint.privileges == "locked",
            binds=tuple(mount.path for mount in blueprint.mounts),
        )
        if self._machine.is_rootless:
            trees = host.host_trees() if blueprint.image == "host" else ()
            overlay = rootless_overlay(request)
            launch = structs.replace(launch, overlay=overlay, host_trees=trees)
            await self._machine.launching.launch(skeleton, launch)
        else:
            await self._machine.launching.launch(skeleton, launch, request)

    async def _limit(
        self, sandbox: Sandbox, pid: int, meanwhile: Callable[[], None] | None
    ) -> None:
        if self._machine.cgroups.is_usable:
            self._machine.cgroups.limit(sandbox.group, sandbox.limits)
            nproc_reserve.keep(pid, sandbox.limits.pids)
        if meanwhile is not None:
            meanwhile()

    async def place(self, sandbox: Sandbox) -> Place:
        """Choose a sandbox's place in the network and put its policy in force."""
        fabric = self._machine.fabric
        if fabric is None:
            return Place(None, None, None)
        home, policy, wanted = sandbox.home, sandbox.record.egress, sandbox.record.place
        try:
            found = await fabric.reserve(home, wanted, policy=policy)
        except ConflictError:
            if wanted is None:
                raise
            found = await fabric.reserve(home, policy=policy)  # it is another's by now
        return Place(found.slot, found.ip, found.resolv_conf)

    async def link(self, sandbox: Sandbox, pid: int) -> None:
        """Connect a process's network namespace to the place its sandbox has."""
        if self._machine.fabric is None:
            return
        netns = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        try:
            await self._machine.fabric.attach(sandbox.home, netns)
        finally:
            os.close(netns)

    def _root_request(self, sandbox: Sandbox, box: str) -> MakeRoot:
        blueprint = sandbox.record.blueprint
        return MakeRoot(
            base=self._machine.base(sandbox.record.slot),
            layers=sandbox.record.layers,
            box=box,
            locked=blueprint.privileges == "locked",
            binds=tuple((mount.source, mount.read_only) for mount in blueprint.mounts),
        )


async def kill_and_wait(pidfd: int) -> None:
    """Kill an init (and with it everything in its namespace) and wait until it is gone."""
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    await wait_for_exit(pidfd)


async def remove_groups(machine: Machine, name: str) -> None:
    """Remove groups, waiting for the last dead process to leave them."""
    if not machine.cgroups.is_usable:
        return
    for pause in _LEAVING_PAUSES:
        await asyncio.sleep(pause)
        if machine.cgroups.remove(name):
            return
        machine.cgroups.kill(name)
    raise UnavailableError(f"processes of group {name} do not end")


def host_name(blueprint: Blueprint) -> str:
    """Choose a host name: asked for, or what the sandbox is called."""
    wanted = blueprint.hostname or blueprint.agent.sandbox_id or blueprint.name or blueprint.uid
    clean = "".join(c if c.isalnum() or c == "-" else "-" for c in wanted)
    return clean[:63].strip("-") or "sandbox"


def set_hostname(pid: int, hostname: str) -> None:
    """Name the uts namespace of a process."""
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


def make_writable(upper: Path) -> None:
    """Lay out what people write to, in a new box of a sandbox that was made without root.

    An image's own directories belong to ids that such a sandbox does not have.
    """
    if any(upper.iterdir()):
        return  # it has run: what lies there may be a link to anywhere
    for path, mode in _WRITABLE.items():
        (upper / path).mkdir()
        (upper / path).chmod(mode)
    # What an image has in a directory that is closed to us cannot be listed beside our own.
    os.setxattr(upper / "root", "user.overlay.opaque", b"y")


def rootless_overlay(request: MakeRoot) -> str:
    """Write the mount options of an overlay that a user's own namespace can mount."""
    if request.binds:
        raise ConflictError("directories of the host cannot be mounted by a node without root")
    return (
        f"lowerdir={':'.join(request.layers)},upperdir={request.box}/upper,"
        f"workdir={request.box}/work,userxattr"
    )
