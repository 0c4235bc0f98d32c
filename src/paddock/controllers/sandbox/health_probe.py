"""Probes the health of idle sandboxes, as their template defines.

A sandbox that fails `failureThreshold` probes in a row gets the condition `Healthy` False; its pool
deletes and replaces it. A sandbox whose template has a probe is not claimable before its first
successful probe. Claimed sandboxes are not probed.
"""

import asyncio
import contextlib
import logging
from typing import Protocol

from msgspec import Struct, structs

from paddock.cache.writes import Writer
from paddock.engine.recorder import Recorder
from paddock.kit.clock import Clock
from paddock.kit.errors import ConflictError, NotFoundError, PaddockError
from paddock.kit.logs import fields
from paddock.resources.kinds.sandbox import CONDITION_HEALTHY, Phase, Sandbox
from paddock.resources.kinds.template import Probe
from paddock.resources.meta import Condition, ConditionStatus, Key, condition, set_condition

log = logging.getLogger(__name__)

MIN_WAIT_SECONDS = 0.2
"""Minimum time between two rounds of probes."""
_CONCURRENCY = 8


class Prober(Protocol):
    """Probes sandboxes."""

    async def __call__(self, sandbox: Sandbox, probe: Probe) -> str | None:
        """Return the problem, or `None` if the sandbox is healthy."""
        ...


class _Watched(Struct):
    sandbox: Sandbox
    probe: Probe
    due: float
    failures: int = 0


def probe_of(sandbox: Sandbox) -> Probe | None:
    """Return a sandbox's probe, or `None` if it is not probed."""
    template = sandbox.spec.template
    idle = sandbox.spec.claim is None and sandbox.metadata.owner_references
    running = sandbox.status.phase is Phase.RUNNING and not sandbox.is_deleting
    return template.probe if template is not None and idle and running else None


class HealthProbes:
    """Probes idle sandboxes when they are due."""

    def __init__(self, prober: Prober, write: Writer, clock: Clock, recorder: Recorder) -> None:
        self._prober = prober
        self._write = write
        self._clock = clock
        self._recorder = recorder
        self._watched: dict[Key, _Watched] = {}
        self._added = asyncio.Event()

    def observe(self, old: Sandbox | None, new: Sandbox | None) -> None:
        """Add, update or remove one sandbox; subscribed to the Sandbox informer."""
        sandbox = new or old
        if sandbox is None:
            return
        probe = probe_of(new) if new is not None else None
        known = self._watched.get(sandbox.key)
        if new is None or probe is None:
            self._watched.pop(sandbox.key, None)
        elif known is not None and known.sandbox.metadata.uid == new.metadata.uid:
            known.sandbox, known.probe = new, probe
        else:
            self._watched[new.key] = _Watched(new, probe, self._clock.monotonic())
            self._added.set()

    async def run(self) -> None:
        """Probe until cancelled."""
        gate = asyncio.Semaphore(_CONCURRENCY)
        while True:
            self._added.clear()
            now = self._clock.monotonic()
            due = [item for item in self._watched.values() if item.due <= now]
            await asyncio.gather(*(self._probe(item, gate) for item in due))
            following = min((item.due for item in self._watched.values()), default=None)
            wait = None if following is None else following - self._clock.monotonic()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait if wait is None else max(wait, MIN_WAIT_SECONDS)):
                    await self._added.wait()

    async def _probe(self, item: _Watched, gate: asyncio.Semaphore) -> None:
        async with gate:
            try:
                async with asyncio.timeout(item.probe.timeout_seconds):
                    problem = await self._prober(item.sandbox, item.probe)
            except TimeoutError:
                problem = f"no answer within {item.probe.timeout_seconds} s"
        item.due = self._clock.monotonic() + item.probe.period_seconds
        item.failures = 0 if problem is None else item.failures + 1
        if problem is None:
            await self._mark(item, ConditionStatus.TRUE, "ProbeSucceeded", "")
        elif item.failures >= item.probe.failure_threshold:
            text = f"{item.failures} probes in a row failed: {problem}"
            await self._mark(item, ConditionStatus.FALSE, "ProbeFailed", text)

    async def _mark(self, item: _Watched, status: ConditionStatus, reason: str, text: str) -> None:
        sandbox = item.sandbox
        known = condition(sandbox.status.conditions, CONDITION_HEALTHY)
        if known is not None and known.status is status:
            return
        if status is ConditionStatus.FALSE:
            self._recorder.warning(sandbox, reason, text)
        new = Condition(
            type=CONDITION_HEALTHY,
            status=status,
            reason=reason,
            message=text,
            observed_generation=sandbox.metadata.generation,
        )
        conditions = set_condition(sandbox.status.conditions, new, now=self._clock.now())
        changed = structs.replace(sandbox.status, conditions=conditions)
        try:
            await self._write.update_status(structs.replace(sandbox, status=changed))
        except (ConflictError, NotFoundError):
            # It changed in the meantime, perhaps by a claim: probe again soon if it is still idle.
            item.due = self._clock.monotonic()
        except PaddockError as error:
            log.warning(
                "cannot write the health of a sandbox",
                extra=fields(sandbox=sandbox.key, error=error),
            )
