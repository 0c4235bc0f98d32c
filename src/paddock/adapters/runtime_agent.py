"""The manager's agent for a runtime, with samples of the usage of sandboxes."""

import asyncio
import logging
import struct
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime

from paddock.cache import states
from paddock.cache.provider import Provider
from paddock.cache.states import SandboxState
from paddock.controllers.idle.plan import Load
from paddock.kit.clock import Clock
from paddock.kit.errors import PaddockError, UnsupportedError
from paddock.kit.logs import fields
from paddock.manager.sandboxes.requests import LogEntry, UsageSample
from paddock.resources.kinds.sandbox import Sandbox
from paddock.resources.kinds.template import NetworkPolicy, Resources, SandboxTemplateSpec
from paddock.resources.tokens import TokenSeed
from paddock.runtime import support
from paddock.runtime.blueprint import agent_config, egress
from paddock.runtime.port import Runtime, Usage

log = logging.getLogger(__name__)

SAMPLE_SECONDS = 5.0
KEPT_SAMPLES = 720
"""Per sandbox: one hour."""
ALL_SAMPLES = 400_000
"""In total, about 40 MB: with thousands of sandboxes, each keeps fewer."""
_MIN_SAMPLES = 12
_CONCURRENCY = 16
_PACKED = struct.Struct("<dddqqqqq")


class RuntimeAgent:
    """Calls the runtime for the manager."""

    def __init__(self, runtime: Runtime, seed: TokenSeed, provider: Provider, clock: Clock) -> None:
        self._runtime = runtime
        self._seed = seed
        self._provider = provider
        self._clock = clock
        self._samples: dict[str, deque[bytes]] = {}

    async def configure(self, sandbox: Sandbox, template: SandboxTemplateSpec) -> None:
        """Send envd the token, environment and identity of a claim."""
        config = agent_config(sandbox, template, self._seed)
        await self._runtime.configure(sandbox.metadata.uid, config)

    def can_resize(self, now: Resources, wanted: Resources) -> bool:
        """Return False: a new sandbox of the other size starts quickly on this machine."""
        return False

    async def resize(self, sandbox: Sandbox, template: SandboxTemplateSpec) -> None:
        """Raise: `can_resize` is False."""
        raise UnsupportedError(f"sandbox {sandbox.key} cannot be resized on this machine")

    def can_update_image(self) -> bool:
        """Return False: a new sandbox of the other image starts quickly on this machine."""
        return False

    def check_network(self, policy: NetworkPolicy) -> None:
        """Raise `InvalidError` for a policy that the runtime cannot enforce."""
        support.check_network(self._runtime.name, policy)

    async def set_network(self, sandbox: Sandbox, policy: NetworkPolicy) -> None:
        """Apply a changed egress policy."""
        await self._runtime.set_egress(sandbox.metadata.uid, egress(policy))

    async def samples(
        self, sandbox: Sandbox, *, start: datetime | None, end: datetime | None
    ) -> tuple[UsageSample, ...]:
        """Return the usage of a sandbox, oldest first."""
        kept = map(_unpacked, self._samples.get(sandbox.metadata.uid, ()))
        return tuple(
            sample
            for sample in kept
            if (start is None or sample.at >= start) and (end is None or sample.at <= end)
        )

    def loads(self, uid: str) -> tuple[Load, ...]:
        """Return the processor load of a sandbox, oldest first."""
        kept = map(_unpacked, self._samples.get(uid, ()))
        return tuple(Load(sample.at, sample.cpu_used_percent) for sample in kept)

    async def logs(
        self, sandbox: Sandbox, *, since: datetime | None, limit: int
    ) -> tuple[LogEntry, ...]:
        """Return the log lines of a sandbox, oldest first."""
        lines = await self._runtime.logs(sandbox.metadata.uid, since=since, limit=limit)
        return tuple(
            LogEntry(at=line.at, level=line.level, message=line.message, fields=line.fields)
            for line in lines
        )

    async def keep_sampling(self, *, only: Callable[[Sandbox], bool] = lambda _: True) -> None:
        """Sample running sandboxes that match `only` every `SAMPLE_SECONDS`, until cancelled."""
        while True:
            await self._sample_all(only)
            await asyncio.sleep(SAMPLE_SECONDS)

    async def _sample_all(self, only: Callable[[Sandbox], bool]) -> None:
        now = self._clock.now()
        running = [
            sandbox.metadata.uid
            for sandbox in self._provider.all(Sandbox)
            if only(sandbox) and states.state(sandbox, now) is SandboxState.RUNNING
        ]
        known = {sandbox.metadata.uid for sandbox in self._provider.all(Sandbox)}
        for uid in self._samples.keys() - known:
            del self._samples[uid]
        gate = asyncio.Semaphore(_CONCURRENCY)
        share = ALL_SAMPLES // max(len(known), 1)
        keep = max(_MIN_SAMPLES, min(KEPT_SAMPLES, share))
        await asyncio.gather(*(self._sample(uid, gate, keep) for uid in running))

    async def _sample(self, uid: str, gate: asyncio.Semaphore, keep: int) -> None:
        async with gate:
            try:
                usage = await self._runtime.usage(uid)
            except PaddockError as error:
                # It was paused or killed after the list was made.
                log.debug("sandbox was not sampled", extra=fields(uid=uid, error=error.message))
                return
        kept = self._samples.setdefault(uid, deque())
        kept.append(_packed(usage))
        while len(kept) > keep:
            kept.popleft()


def _packed(usage: Usage) -> bytes:
    """Encode a sample in 64 bytes: objects of ten thousand sandboxes would take gigabytes."""
    return _PACKED.pack(
        usage.at.timestamp(),
        usage.cpu_count,
        usage.cpu_used_percent,
        usage.memory_used_bytes,
        usage.memory_total_bytes,
        usage.memory_cache_bytes,
        usage.disk_used_bytes,
        usage.disk_total_bytes,
    )


def _unpacked(data: bytes) -> UsageSample:
    at, cpu_count, cpu_used, used, total, cache, disk_used, disk_total = _PACKED.unpack(data)
    return UsageSample(
        at=datetime.fromtimestamp(at, UTC),
        cpu_count=cpu_count,
        cpu_used_percent=cpu_used,
        memory_used_bytes=used,
        memory_total_bytes=total,
        memory_cache_bytes=cache,
        disk_used_bytes=disk_used,
        disk_total_bytes=disk_total,
    )
