"""Warm sandboxes of the most requested kind, and skeletons for all other kinds.

A warm sandbox is complete but unclaimed: files, root, network, limits, a running init, and an envd
that has joined it and waits for its configuration. It has no record on disk, so what a killed node
leaves of one is swept. The record of the claimed sandbox names it (`SandboxRecord.resource_name`).
"""

import asyncio
import collections
import contextlib
import logging
import os
from collections.abc import Generator, Iterable

from msgspec import Struct, structs

from paddock.kit import ids
from paddock.kit.clock import Clock
from paddock.kit.errors import PaddockError, UnavailableError
from paddock.kit.logs import fields
from paddock.runtime.local.envd.zygote import WaitingEnvd
from paddock.runtime.local.kernel.pidfds import has_ended
from paddock.runtime.local.launch.skeleton import Skeleton
from paddock.runtime.local.node import records
from paddock.runtime.local.node.node_context import NodeContext
from paddock.runtime.local.node.records import RecordPhase, SandboxRecord
from paddock.runtime.local.node.slots import cgroup_name
from paddock.runtime.local.sandbox.builder import (
    BuildResult,
    SandboxBuilder,
    kill_and_wait,
    remove_cgroups,
)
from paddock.runtime.local.sandbox.sandbox import NodeSandbox, Spawn
from paddock.runtime.local.views.views import new_boot_id
from paddock.runtime.port import Blueprint, InstanceState

log = logging.getLogger(__name__)

_REFILL_DELAY_SECONDS = 0.02
"""Seconds before a refill, so that the first call to a new sandbox is not delayed."""
_HOST_NAME = "p"
"""Host name of a warm sandbox. No name is shorter, so its files are never truncated later."""
_RECENT_CREATIONS = 64
"""Number of recent creations that decide which kind is kept warm."""


class WarmKind(Struct, frozen=True):
    """What cannot be changed about a warm sandbox."""

    image: str
    layers: tuple[str, ...]
    privileges: str


class WarmSandbox(Struct, eq=False):
    """A complete, unclaimed sandbox."""

    kind: WarmKind
    sandbox: NodeSandbox
    """Its uid is also its resource name; its record is never written."""
    init: records.RecordedProcess
    pidfd: int
    build: BuildResult
    waiting_envd: WaitingEnvd | None


class WarmStock:
    """A small stock of warm sandboxes and skeletons, refilled in the background."""

    def __init__(
        self, context: NodeContext, builder: SandboxBuilder, clock: Clock, spawn: Spawn
    ) -> None:
        self._context = context
        self._builder = builder
        self._clock = clock
        self._spawn = spawn
        self._skeletons: collections.deque[Skeleton] = collections.deque()
        self._sandboxes: collections.deque[WarmSandbox] = collections.deque()
        self._recent_kinds: collections.deque[WarmKind] = collections.deque(
            maxlen=_RECENT_CREATIONS
        )
        self._last_blueprint: dict[WarmKind, Blueprint] = {}
        self.resource_names: set[str] = set()
        """Names of files and network reservations of warm sandboxes, also of those in progress."""
        self._active_creations = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._add_lock = asyncio.Lock()
        self._is_filling = False
        self._is_open = True

    @property
    def count(self) -> int:
        """The number of warm sandboxes and skeletons."""
        return len(self._skeletons) + len(self._sandboxes)

    @property
    def sandbox_count(self) -> int:
        """The number of warm sandboxes."""
        return len(self._sandboxes)

    @property
    def layers(self) -> frozenset[str]:
        """The layers of warm sandboxes, also of those that are being built."""
        kinds = {*(warm.kind for warm in self._sandboxes), *self._recent_kinds}
        return frozenset(layer for kind in kinds for layer in kind.layers)

    @property
    def most_requested(self) -> tuple[WarmKind | None, int]:
        """The kind that is kept warm, and the number of warm sandboxes of that kind."""
        kind, _, _ = self._targets()
        return kind, sum(warm.kind == kind for warm in self._sandboxes)

    def record_demand(self, kind: WarmKind, blueprint: Blueprint) -> None:
        """Record a creation; new warm sandboxes get the limits and policy of the last one."""
        self._recent_kinds.append(kind)
        self._last_blueprint[kind] = blueprint
        if len(self._last_blueprint) > 2 * _RECENT_CREATIONS:
            self._last_blueprint = {one: self._last_blueprint[one] for one in self._recent_kinds}

    async def take_sandbox(self, kind: WarmKind) -> WarmSandbox | None:
        """Take a warm sandbox of a kind, or return `None`; its name stays in `resource_names`."""
        while (warm := next((p for p in self._sandboxes if p.kind == kind), None)) is not None:
            self._sandboxes.remove(warm)
            if not has_ended(warm.pidfd):
                return warm
            await self.discard(warm)  # its init was killed
        return None

    async def take_skeleton(self) -> Skeleton:
        """Take a skeleton from the stock, or clone one."""
        while self._skeletons:
            skeleton = self._skeletons.popleft()
            if not has_ended(skeleton.pidfd):
                return skeleton
            await self._builder.discard_skeleton(skeleton)  # it was killed
        return await self._builder.clone_skeleton()

    def mark_claimed(self, warm: WarmSandbox) -> None:
        """Drop the resource name of a sandbox that is claimed and recorded."""
        self.resource_names.discard(warm.sandbox.resource_name)

    @contextlib.contextmanager
    def refill_paused(self) -> Generator[None]:
        """Pause the refill while a sandbox is created for a caller; refill afterwards."""
        self._active_creations += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._active_creations -= 1
            if not self._active_creations:
                self._idle.set()
                self.fill()

    def fill(self) -> None:
        """Start the refill in the background."""
        if self._is_open and not self._is_filling and self._context.settings.warm_count:
            self._is_filling = True
            self._spawn("refill warm stock", self._fill())

    async def close(self) -> None:
        """Remove everything in the stock."""
        self._is_open = False
        async with self._add_lock:  # an addition in progress ends first
            while self._skeletons:
                await self._builder.discard_skeleton(self._skeletons.popleft())
            await asyncio.gather(*(self.discard(warm) for warm in self._drain()))

    async def discard(self, warm: WarmSandbox) -> None:
        """Remove a warm sandbox with everything it has."""
        if warm.waiting_envd is not None:
            warm.waiting_envd.close()
        try:
            await kill_and_wait(warm.pidfd)
        finally:
            os.close(warm.pidfd)
        await self._release_resources(warm.sandbox)

    async def _release_resources(self, sandbox: NodeSandbox) -> None:
        context, name, slot = self._context, sandbox.resource_name, sandbox.record.slot
        if context.fabric is not None:
            await context.fabric.detach(name)
        await context.run_in_thread(context.storage.delete, name)
        await remove_cgroups(context, cgroup_name(slot))
        context.slots.release(slot)
        self.resource_names.discard(name)

    def _drain(self) -> Iterable[WarmSandbox]:
        while self._sandboxes:
            yield self._sandboxes.popleft()

    def _targets(self) -> tuple[WarmKind | None, int, int]:
        """Return the kind to keep warm, the number of warm sandboxes, and of skeletons."""
        most = self._context.settings.warm_count
        if not self._recent_kinds or self._context.is_rootless:
            return None, 0, most
        kind, _ = collections.Counter(self._recent_kinds).most_common(1)[0]
        skeletons = most // 4
        return kind, most - skeletons, skeletons

    async def _fill(self) -> None:
        try:
            more = True
            while more and self._is_open:
                await asyncio.sleep(_REFILL_DELAY_SECONDS)
                await self._idle.wait()
                async with self._add_lock:
                    more = self._is_open and await self._add_one()
        except (PaddockError, OSError) as problem:
            log.warning("warm stock not refilled", extra=fields(reason=str(problem)))
        finally:
            self._is_filling = False

    async def _add_one(self) -> bool:
        kind, sandbox_target, skeleton_target = self._targets()
        stale = next((p for p in self._sandboxes if p.kind != kind), None)
        if kind is not None and sum(p.kind == kind for p in self._sandboxes) < sandbox_target:
            if stale is not None:
                self._sandboxes.remove(stale)
                await self.discard(stale)
            try:
                self._sandboxes.append(await self._build(kind))
            except (PaddockError, OSError):
                # Its image may be gone; the next creation of this kind reports the error.
                self._recent_kinds = collections.deque(
                    (one for one in self._recent_kinds if one != kind), maxlen=_RECENT_CREATIONS
                )
                raise
            return True
        if len(self._skeletons) < skeleton_target:
            skeleton = await self._builder.clone_skeleton()
            try:
                await self._context.launcher.ready(skeleton)
            except BaseException:
                await self._builder.discard_skeleton(skeleton)
                raise
            self._skeletons.append(skeleton)
            return True
        return False

    async def _build(self, kind: WarmKind) -> WarmSandbox:
        name = f"warm-{ids.name_suffix(16)}"
        self.resource_names.add(name)
        skeleton: Skeleton | None = None
        sandbox: NodeSandbox | None = None
        try:
            skeleton = await self.take_skeleton()
            sandbox = NodeSandbox(
                self._context, self._record(name, kind, skeleton), self._clock, self._spawn
            )
            init = _identify(skeleton)
            disk, network = await self._builder.prepare_files_and_network(sandbox)
            sandbox.record = structs.replace(sandbox.record, place=network.slot)
            made = await self._builder.assemble(sandbox, skeleton, disk, network)
            waiting_envd = await self._builder.fork_waiting_envd(sandbox, skeleton, missing=())
        except BaseException:
            if skeleton is not None:
                skeleton.kill()
            if sandbox is not None:
                await asyncio.shield(self._release_resources(sandbox))
            self.resource_names.discard(name)
            raise
        return WarmSandbox(kind, sandbox, init, skeleton.pidfd, made, waiting_envd)

    def _record(self, name: str, kind: WarmKind, skeleton: Skeleton) -> SandboxRecord:
        like = self._last_blueprint[kind]
        blueprint = Blueprint(
            uid=name,
            image=kind.image,
            privileges=kind.privileges,
            limits=like.limits,
            hostname=_HOST_NAME,
        )
        return SandboxRecord(
            uid=name,
            blueprint=blueprint,
            state=InstanceState.CREATING,
            phase=RecordPhase.CREATING,
            slot=skeleton.slot,
            agent=blueprint.agent,
            egress=like.egress,
            layers=kind.layers,
            resource_name=name,
            boot_id=new_boot_id(),
        )


def _identify(skeleton: Skeleton) -> records.RecordedProcess:
    process = records.identify(skeleton.pid)
    if process is None:
        raise UnavailableError("the init of a warm sandbox exited while it was built")
    return process
