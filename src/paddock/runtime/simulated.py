"""A driver that simulates sandboxes in memory, on the loop's (virtual) time.

For tests of scale (100 000 instances on one loop) and of faults: latencies and failures are
scripted or random, replies can be lost, and sandboxes or the node can fail.
"""

import asyncio
import contextlib
import random
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from datetime import datetime

from msgspec import structs

from paddock.kit.clock import Clock, LoopClock
from paddock.kit.errors import (
    ConflictError,
    DeadlineExceededError,
    NotFoundError,
    UnavailableError,
    UnstorableError,
    UnsupportedError,
)
from paddock.resources import default_limits as default
from paddock.resources.kinds.template import ImagePullPolicy
from paddock.runtime.port import (
    Address,
    AgentConfig,
    Blueprint,
    Capabilities,
    EgressPolicy,
    ImagePull,
    Instance,
    InstanceState,
    LogLine,
    ReadyImage,
    RegistryCredentials,
    Runtime,
    RuntimeEvent,
    StoredCheckpoint,
    Usage,
)
from paddock.runtime.simulated_images import SimulatedImages
from paddock.runtime.simulated_operations import (
    LATENCIES,
    Operation,
    ScriptedFailure,
    SimulatedSandbox,
)

ALL_CAPABILITIES = Capabilities(
    can_freeze=True,
    can_checkpoint=True,
    can_snapshot_files=True,
    can_stop=True,
    can_limit_cpu=True,
    can_limit_memory=True,
    can_limit_pids=True,
    can_limit_disk=True,
    can_limit_bandwidth=True,
    can_limit_io=True,
    can_limit_cached_writes=True,
    can_filter_egress=True,
    can_update_image=True,
    can_pull_images=True,
)

STORED_MEMORY_BYTES = 30 << 20  # of every sandbox
_LIVE = (InstanceState.RUNNING, InstanceState.FROZEN)
_KEPT = (*_LIVE, InstanceState.HIBERNATED, InstanceState.STOPPED)


class SimulatedRuntime:
    """A `Runtime` in memory. `calls` counts calls by operation."""

    def __init__(
        self,
        *,
        clock: Clock | None = None,
        latencies: Mapping[Operation, float] = LATENCIES,
        jitter: float = 0.0,
        failure_rate: float = 0.0,
        capabilities: Capabilities = ALL_CAPABILITIES,
        seed: int = 0,
        node_name: str = "simulated",
    ) -> None:
        self.calls: Counter[Operation] = Counter()
        self.images = SimulatedImages()
        self._clock = clock or LoopClock()
        self._latencies: dict[Operation, float] = {**LATENCIES, **latencies}
        self._jitter = jitter
        self._failure_rate = failure_rate
        self._capabilities = capabilities
        self._random = random.Random(seed)  # noqa: S311 - repeatable on purpose
        self._node_name = node_name
        self._sandboxes: dict[str, SimulatedSandbox] = {}
        self._checkpoints: dict[str, tuple[StoredCheckpoint, dict[str, str]]] = {}
        self._failures: list[ScriptedFailure] = []
        self._locks: dict[str, asyncio.Lock] = {}
        self._lock_users: Counter[str] = Counter()
        self._watchers: dict[asyncio.Queue[RuntimeEvent], None] = {}
        self._logs: defaultdict[str, list[LogLine]] = defaultdict(list)
        self._never_ready: set[str] = set()
        self._unstorable: dict[str, str] = {}
        self._is_down = False
        self._free = asyncio.Event()
        """Whether hibernations need not wait for other work."""
        self._free.set()

    # Controls for tests and simulations

    def set_latency(self, operation: Operation, seconds: float) -> None:
        """Set the latency of an operation."""
        self._latencies[operation] = seconds

    def fail_next(
        self, operation: Operation, error: Exception | None = None, *, uid: str | None = None
    ) -> None:
        """Fail the next such call (for this sandbox) before it has any effect."""
        text = "scripted failure of the simulated node"
        error = error or UnavailableError(text, retry_after_seconds=1.0)
        self._failures.append(ScriptedFailure(operation=operation, error=error, uid=uid))

    def lose_reply_next(self, operation: Operation, *, uid: str | None = None) -> None:
        """Fail the next such call after it took effect; the caller cannot tell."""
        error = UnavailableError("the reply of the simulated node was lost")
        self._failures.append(
            ScriptedFailure(operation=operation, error=error, uid=uid, after_effect=True)
        )

    def crash(self, uid: str, reason: str = "killed") -> None:
        """Fail a sandbox as if it had exited unexpectedly."""
        sandbox = self._get(uid)
        sandbox.instance = structs.replace(
            sandbox.instance, state=InstanceState.FAILED, reason=reason, address=Address()
        )
        self._publish(sandbox.instance)

    def kill_for_memory(self, uid: str, reason: str) -> None:
        """Report that processes of a sandbox were killed for lack of memory; it keeps running."""
        self._publish(structs.replace(self._get(uid).instance, reason=reason), memory_kills=1)

    def never_ready(self, uid: str) -> None:
        """Make `start` of this sandbox time out on its ready command."""
        self._never_ready.add(uid)

    def set_unstorable(self, uid: str, reason: str | None = "process 7 (sleep) is traced") -> None:
        """Make hibernation, forks and memory snapshots of a sandbox fail; `None` undoes that."""
        if reason is None:
            self._unstorable.pop(uid, None)
        else:
            self._unstorable[uid] = reason

    def set_busy(self, *, is_busy: bool) -> None:
        """Let hibernations wait for other work, or not any more."""
        if is_busy:
            self._free.clear()
        else:
            self._free.set()

    def fail_node(self, *, is_down: bool) -> None:
        """Fail every call with `UnavailableError` while the node is down; sandboxes run on."""
        self._is_down = is_down
        if not is_down:
            for sandbox in self._sandboxes.values():
                self._publish(sandbox.instance)

    def files(self, uid: str) -> dict[str, str]:
        """Return the mutable files of a sandbox; they are kept by pauses, forks and snapshots."""
        sandbox = self._get(uid)
        if sandbox.files is None:
            sandbox.files = {}
        return sandbox.files

    def agent(self, uid: str) -> AgentConfig:
        """Return the configuration of envd."""
        return self._get(uid).agent

    def blueprint(self, uid: str) -> Blueprint:
        """Return what a sandbox was created from."""
        return self._get(uid).blueprint

    def egress(self, uid: str) -> EgressPolicy:
        """Return the current egress policy."""
        return self._get(uid).egress

    def log(self, uid: str, message: str, *, level: str = "info") -> None:
        """Append a line to the log of a sandbox."""
        self._logs[uid].append(LogLine(at=self._clock.now(), level=level, message=message))

    # Runtime port

    @property
    def name(self) -> str:
        return "simulated"

    async def capabilities(self) -> Capabilities:
        return self._capabilities

    async def ensure_image(
        self,
        reference: str,
        *,
        team: str,
        policy: ImagePullPolicy = ImagePullPolicy.IF_NOT_PRESENT,
        credentials: tuple[RegistryCredentials, ...] = (),
    ) -> ReadyImage:
        await self._delay_or_fail(Operation.ENSURE_IMAGE, reference)
        return self.images.ensure(reference, policy)

    async def image_pulls(self) -> tuple[ImagePull, ...]:
        return ()

    async def need_images(self, references: frozenset[str]) -> None: ...
    async def create(self, blueprint: Blueprint) -> Instance:
        async with self._operation(Operation.CREATE, blueprint.uid):
            return self._create(blueprint).instance

    async def start(self, uid: str) -> Instance:
        async with self._operation(Operation.START, uid):
            sandbox = self._expect(uid, *_LIVE, doing="started")
            if uid in self._never_ready:
                await asyncio.sleep(limit := sandbox.blueprint.ready_timeout_seconds)
                reason = f"not ready within {limit:g} s: its ready command never succeeded"
                raise DeadlineExceededError(f"sandbox {uid} was {reason}")
            sandbox.is_started = True
            return sandbox.instance

    async def configure(self, uid: str, agent: AgentConfig) -> None:
        async with self._operation(Operation.CONFIGURE, uid):
            self._get(uid).agent = agent

    async def update_image(self, uid: str, image: str) -> Instance:
        self._require("can_update_image", self._capabilities.can_update_image)
        async with self._operation(Operation.UPDATE_IMAGE, uid):
            sandbox = self._expect(uid, InstanceState.RUNNING, doing="given another image")
            if sandbox.instance.image != image:
                sandbox.blueprint = structs.replace(sandbox.blueprint, image=image)
                sandbox.files = None
                sandbox.instance = structs.replace(
                    sandbox.instance,
                    image=image,
                    incarnation=sandbox.instance.incarnation + 1,
                    started_at=self._clock.now(),
                )
            return sandbox.instance

    async def freeze(self, uid: str) -> Instance:
        self._require("can_freeze", self._capabilities.can_freeze)
        async with self._operation(Operation.FREEZE, uid):
            sandbox = self._expect(uid, *_LIVE, doing="frozen")
            return self._set_state(sandbox, InstanceState.FROZEN)

    async def thaw(self, uid: str) -> Instance:
        async with self._operation(Operation.THAW, uid):
            sandbox = self._expect(uid, *_LIVE, doing="thawed")
            return self._set_state(sandbox, InstanceState.RUNNING)

    async def hibernate(self, uid: str) -> Instance:
        self._require("can_checkpoint", self._capabilities.can_checkpoint)
        if not self._free.is_set() and self._get(uid).instance.state is InstanceState.RUNNING:
            return await self.freeze(uid)
        await self._free.wait()
        async with self._operation(Operation.HIBERNATE, uid):
            sandbox = self._expect(uid, *_LIVE, InstanceState.HIBERNATED, doing="hibernated")
            self._require_storable(sandbox)
            return self._set_state(sandbox, InstanceState.HIBERNATED)

    async def restore(self, uid: str) -> Instance:
        async with self._operation(Operation.RESTORE, uid):
            sandbox = self._expect(uid, *_KEPT, doing="restored")
            if sandbox.instance.state is InstanceState.FROZEN:
                raise ConflictError(f"sandbox {uid} is frozen: thaw it instead of restoring it")
            if sandbox.instance.state is InstanceState.RUNNING:
                return sandbox.instance
            sandbox.instance = structs.replace(
                sandbox.instance,
                incarnation=sandbox.instance.incarnation + 1,
                started_at=self._clock.now(),
            )
            return self._set_state(sandbox, InstanceState.RUNNING)

    async def stop(self, uid: str) -> Instance:
        self._require("can_stop", self._capabilities.can_stop)
        async with self._operation(Operation.STOP, uid):
            sandbox = self._expect(uid, *_KEPT, InstanceState.FAILED, doing="stopped")
            sandbox.is_started = False
            return self._set_state(sandbox, InstanceState.STOPPED)

    async def snapshot(
        self, uid: str, checkpoint_id: str, *, memory: bool, keep_running: bool
    ) -> StoredCheckpoint:
        if memory:
            self._require("can_checkpoint", self._capabilities.can_checkpoint)
        self._require("can_snapshot_files", self._capabilities.can_snapshot_files)
        async with self._operation(Operation.SNAPSHOT, uid):
            if (known := self._checkpoints.get(checkpoint_id)) is not None:
                return known[0]
            wanted = _KEPT[:3] if memory else _KEPT
            sandbox = self._expect(uid, *wanted, doing="stored")
            if memory:
                self._require_storable(sandbox)
            stored = sandbox.stored(
                checkpoint_id, memory_bytes=memory * STORED_MEMORY_BYTES, now=self._clock.now()
            )
            self._checkpoints[checkpoint_id] = (stored, dict(sandbox.files or {}))
            if not keep_running and sandbox.instance.state in _LIVE:
                paused = InstanceState.HIBERNATED if memory else InstanceState.STOPPED
                self._set_state(sandbox, paused)
            return stored

    async def fork(self, uid: str, children: tuple[Blueprint, ...]) -> tuple[Instance | str, ...]:
        self._require("can_checkpoint", self._capabilities.can_checkpoint)
        async with self._operation(Operation.FORK, uid):
            parent = self._expect(uid, *_LIVE, doing="forked")
            self._require_storable(parent)
            made: list[Instance | str] = []
            for child in children:
                try:
                    self._fail_if_due(Operation.CREATE, child.uid)
                except UnavailableError as problem:
                    made.append(problem.message)
                    continue
                sandbox = self._create(child)
                sandbox.files = dict(parent.files or {})
                made.append(sandbox.instance)
            return tuple(made)

    async def delete_checkpoint(self, checkpoint_id: str) -> None:
        self._checkpoints.pop(checkpoint_id, None)

    async def checkpoints(self) -> tuple[StoredCheckpoint, ...]:
        return tuple(stored for stored, _ in self._checkpoints.values())

    async def destroy(self, uid: str) -> None:
        async with self._operation(Operation.DESTROY, uid):
            self._sandboxes.pop(uid, None)
            self._logs.pop(uid, None)
            self._never_ready.discard(uid)
            self._unstorable.pop(uid, None)

    async def inspect(self, uid: str) -> Instance | None:
        await self._delay_or_fail(Operation.INSPECT, uid)
        sandbox = self._sandboxes.get(uid)
        return sandbox.instance if sandbox else None

    async def instances(self) -> tuple[Instance, ...]:
        await self._delay_or_fail(Operation.INSPECT, None)
        return tuple(sandbox.instance for sandbox in self._sandboxes.values())

    async def set_egress(self, uid: str, policy: EgressPolicy) -> None:
        self._require("can_filter_egress", self._capabilities.can_filter_egress)
        async with self._operation(Operation.SET_EGRESS, uid):
            self._get(uid).egress = policy

    async def usage(self, uid: str) -> Usage:
        await self._delay_or_fail(Operation.USAGE, uid)
        sandbox = self._get(uid)
        limits = sandbox.blueprint.limits
        used = sandbox.file_bytes
        return Usage(
            at=self._clock.now(),
            cpu_count=(limits.cpu_millis or default.DEFAULT_CPU_MILLIS) / 1000,
            cpu_used_percent=0.0,
            cpu_seconds=0.0,
            memory_used_bytes=4 << 20 if sandbox.instance.state is InstanceState.RUNNING else 0,
            memory_total_bytes=limits.memory_bytes or default.DEFAULT_MEMORY_BYTES,
            memory_cache_bytes=0,
            disk_used_bytes=used,
            disk_total_bytes=limits.disk_bytes or default.DEFAULT_DISK_BYTES,
        )

    async def logs(
        self, uid: str, *, since: datetime | None = None, limit: int = 1000
    ) -> tuple[LogLine, ...]:
        self._get(uid)
        lines = [line for line in self._logs.get(uid, ()) if since is None or line.at >= since]
        return tuple(lines[-limit:]) if limit > 0 else ()

    async def watch(self) -> AsyncIterator[RuntimeEvent]:
        events: asyncio.Queue[RuntimeEvent] = asyncio.Queue()
        self._watchers[events] = None
        try:
            while True:
                yield await events.get()
        finally:
            del self._watchers[events]

    # Internals

    @contextlib.asynccontextmanager
    async def _operation(self, operation: Operation, uid: str) -> AsyncGenerator[None]:
        """Hold the sandbox's lock, apply the latency, and fail if scripted, before or after."""
        self._lock_users[uid] += 1
        try:
            async with self._locks.setdefault(uid, asyncio.Lock()):
                after = await self._delay_or_fail(operation, uid)
                yield
                if after:
                    raise after[0].error
        finally:
            # Unused locks are dropped: 100 000 sandboxes must not keep 100 000 locks.
            self._lock_users[uid] -= 1
            if not self._lock_users[uid]:
                del self._lock_users[uid]
                del self._locks[uid]

    async def _delay_or_fail(self, operation: Operation, uid: str | None) -> list[ScriptedFailure]:
        """Sleep for the latency and raise a due failure; return failures due after the effect."""
        self.calls[operation] += 1
        seconds = self._latencies[operation]
        if seconds and self._jitter:
            seconds *= 1 + self._jitter * (2 * self._random.random() - 1)
        if seconds > 0:
            await asyncio.sleep(seconds)
        return self._fail_if_due(operation, uid)

    def _fail_if_due(self, operation: Operation, uid: str | None) -> list[ScriptedFailure]:
        if self._is_down:
            raise UnavailableError("the simulated node is down", retry_after_seconds=1.0)
        if self._failure_rate and self._random.random() < self._failure_rate:
            raise UnavailableError("random failure of the simulated node", retry_after_seconds=0.1)
        for script in self._failures:
            if script.operation is operation and script.uid in (None, uid):
                self._failures.remove(script)
                if script.after_effect:
                    return [script]
                raise script.error
        return []

    def _create(self, blueprint: Blueprint) -> SimulatedSandbox:
        if (sandbox := self._sandboxes.get(blueprint.uid)) is not None:
            return sandbox
        files: dict[str, str] | None = None
        if blueprint.checkpoint_id is not None:
            if blueprint.checkpoint_id not in self._checkpoints:
                raise NotFoundError(f"checkpoint {blueprint.checkpoint_id} is not on this node")
            files = dict(self._checkpoints[blueprint.checkpoint_id][1])
        number = len(self._sandboxes) + 1
        instance = Instance(
            uid=blueprint.uid,
            state=InstanceState.RUNNING,
            address=self._address(blueprint.uid, number),
            started_at=self._clock.now(),
            image=blueprint.image,
            image_digest=self.images.require(blueprint),
            node_name=self._node_name,
            incarnation=blueprint.incarnation,
        )
        sandbox = SimulatedSandbox(blueprint, instance)
        sandbox.files = files
        sandbox.share_with(blueprint.checkpoint_id)
        self._sandboxes[blueprint.uid] = sandbox
        return sandbox

    def _address(self, uid: str, number: int) -> Address:
        ip = f"10.{number >> 16 & 255}.{number >> 8 & 255}.{number & 255}"
        return Address(ip=ip, envd=f"unix:/simulated/{uid}/envd.sock", node="unix:/simulated/node")

    def _set_state(self, sandbox: SimulatedSandbox, state: InstanceState) -> Instance:
        changes = {"stored_bytes": STORED_MEMORY_BYTES * (state is InstanceState.HIBERNATED)}
        sandbox.instance = structs.replace(sandbox.instance, state=state, reason=None, **changes)
        return sandbox.instance

    def _get(self, uid: str) -> SimulatedSandbox:
        sandbox = self._sandboxes.get(uid)
        if sandbox is None:
            raise NotFoundError(f"sandbox {uid} does not exist on this node")
        return sandbox

    def _expect(self, uid: str, *states: InstanceState, doing: str) -> SimulatedSandbox:
        sandbox = self._get(uid)
        if sandbox.instance.state not in states:
            raise ConflictError(f"sandbox {uid} is {sandbox.instance.state} and cannot be {doing}")
        return sandbox

    def _require_storable(self, sandbox: SimulatedSandbox) -> None:
        reason = self._unstorable.get(sandbox.instance.uid)
        if reason is not None and sandbox.instance.state in _LIVE:
            raise UnstorableError(f"cannot store sandbox {sandbox.instance.uid}: {reason}")

    def _require(self, name: str, is_there: bool) -> None:
        if not is_there:
            reason = self._capabilities.reasons.get(name, "it is configured without it")
            raise UnsupportedError(f"the simulated driver lacks {name}: {reason}")

    def _publish(self, instance: Instance, memory_kills: int = 0) -> None:
        uid, state, reason = instance.uid, instance.state, instance.reason
        event = RuntimeEvent(uid=uid, state=state, reason=reason, memory_kills=memory_kills)
        for watcher in self._watchers:
            watcher.put_nowait(event)


_: type[Runtime] = SimulatedRuntime
