"""Wait tasks: wait until a controller has changed an object.

    with cache.waits.pause(sandbox, holder="request 4f…") as task:     # the lock is held now
        written = await cache.write.update(...)                        # paused=true
        sandbox = await task.wait(60, written=written)

An action is bound to its check (`checks`), so a caller never gets another's condition. `pause`
and `resume` hold their lock (`action_locks`) from before the spec is written; `ready`,
`checkpoint` and `deleted` acquire it in `wait`. A task checks at once, at every event, at a slow
tick, and once more, live, before it fails. The caller decides what to write.
"""

import asyncio
import logging
from collections.abc import Callable
from types import TracebackType
from typing import Any, Generic, Self

from paddock.cache import checks
from paddock.cache.action_locks import ActionLock, ActionLocks, LockKey, WaitAction, lock_key
from paddock.cache.object_reader import DONE_WORDS, Check, ObjectReader
from paddock.engine.informer import Informer
from paddock.engine.reader import Reader
from paddock.kit import metrics
from paddock.kit.clock import Clock
from paddock.kit.errors import DeadlineExceededError
from paddock.resources.kinds.checkpoint import Checkpoint
from paddock.resources.kinds.sandbox import Sandbox
from paddock.resources.meta import R, Resource

log = logging.getLogger(__name__)

TICK_SECONDS = 10.0
_TIMER_SLACK_SECONDS = 0.001
"""Timers may fire slightly before their deadline."""

_SECONDS = metrics.histogram("paddock_wait_seconds", "Time in wait tasks.", ("action", "result"))


class WaitTask(Generic[R]):
    """One wait for one action on one object. Used once."""

    def __init__(
        self, waits: "Waits", subject: R, action: WaitAction, check: Check[R], holder: str
    ) -> None:
        self.subject = subject
        self.action = action
        self._waits = waits
        self._check = check
        self._locker = holder
        self._lock: ActionLock | None = None
        self._is_spent = False

    def acquire(self) -> Self:
        """Acquire the lock now rather than in `wait`."""
        if self._lock is None:
            self._lock = self._waits.locks.acquire(self.subject, self.action, self._locker)
        return self

    def release(self) -> None:
        """Release the lock; idempotent."""
        self._is_spent = True
        if self._lock is not None:
            self._waits.locks.release(self._lock)

    async def wait(
        self, timeout_seconds: float, *, written: R | None = None, is_live_at_end: bool = True
    ) -> R:
        """Wait until the action is complete and return the object; releases the lock in any case.

        `written` is the result of the caller's write: older versions are ignored.
        `DeadlineExceededError` names what was missing; errors of the check pass through.
        """
        if self._is_spent:
            raise RuntimeError("a wait task can be used once: create another")
        try:
            self.acquire()
            assert self._lock is not None  # noqa: S101 - acquire sets it or raises
            self._waits.locks.extend(self._lock, timeout_seconds)
            return await self._waits.until(
                self.subject,
                self.action,
                self._check,
                timeout_seconds=timeout_seconds,
                written=written,
                is_live_at_end=is_live_at_end,
            )
        finally:
            self.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


class Waits:
    """Creates wait tasks and notifies them of changes."""

    def __init__(
        self,
        informers: Callable[[type[Any]], Informer[Any]],
        live: Reader,
        clock: Clock,
        *,
        tick_seconds: float = TICK_SECONDS,
    ) -> None:
        self.locks = ActionLocks(clock)
        self._informers = informers
        self._live = live
        self._clock = clock
        self._tick_seconds = tick_seconds
        self._waiters: dict[LockKey, dict[asyncio.Event, None]] = {}
        """In the order of arrival: the first waiter is notified first."""
        self._subscribed: set[type[Resource]] = set()

    @property
    def is_idle(self) -> bool:
        """Whether there is neither a lock nor a waiter."""
        return not self._waiters and not len(self.locks)

    def pause(self, sandbox: Sandbox, *, holder: str = "another request") -> WaitTask[Sandbox]:
        """Lock for a pause; write `paused=true` after this."""
        return WaitTask(self, sandbox, WaitAction.PAUSE, checks.paused, holder).acquire()

    def resume(self, sandbox: Sandbox, *, holder: str = "another request") -> WaitTask[Sandbox]:
        """Lock for a resume; write `paused=false` after this."""
        return WaitTask(self, sandbox, WaitAction.RESUME, checks.resumed, holder).acquire()

    def ready(self, sandbox: Sandbox, *, holder: str = "another request") -> WaitTask[Sandbox]:
        """Wait for a sandbox to run and be ready."""
        return WaitTask(self, sandbox, WaitAction.READY, checks.ready, holder)

    def checkpoint(
        self, checkpoint: Checkpoint, *, holder: str = "another request"
    ) -> WaitTask[Checkpoint]:
        """Wait for a checkpoint to be stored."""
        return WaitTask(self, checkpoint, WaitAction.CHECKPOINT, checks.checkpointed, holder)

    def deleted(self, obj: R, *, holder: str = "another request") -> WaitTask[R]:
        """Wait for an object to be deleted; returns its last version."""
        return WaitTask(self, obj, WaitAction.DELETED, checks.deleted, holder)

    # ---- waiting -------------------------------------------------------------------------

    async def until(
        self,
        subject: R,
        action: WaitAction,
        check: Check[R],
        *,
        timeout_seconds: float,
        written: R | None,
        is_live_at_end: bool,
    ) -> R:
        """Read the subject until the check holds; used by `WaitTask.wait`."""
        started = self._clock.monotonic()
        outcome = "error"
        try:
            reader = ObjectReader(self._informers(type(subject)), self._live, self._clock, subject)
            found = await self._watch(reader, action, check, timeout_seconds, written)
            if found is None:
                outcome = "timeout"
                found = await reader.check_finally(action, check, is_live=is_live_at_end)
            if found is None:
                raise _timed_out(subject, action, timeout_seconds, reader.missing)
            outcome = "done"
            return found
        finally:
            _SECONDS.labels(action, outcome).observe(self._clock.monotonic() - started)

    async def _watch(
        self,
        reader: ObjectReader[R],
        action: WaitAction,
        check: Check[R],
        timeout_seconds: float,
        written: R | None,
    ) -> R | None:
        self._listen(reader.informer)
        key, event = lock_key(reader.subject), asyncio.Event()
        self._waiters.setdefault(key, {})[event] = None
        deadline = self._clock.monotonic() + timeout_seconds
        try:
            reader.begin(written)
            while True:
                event.clear()
                if (found := await reader.check_now(action, check)) is not None:
                    return found
                remaining = deadline - self._clock.monotonic()
                if remaining < _TIMER_SLACK_SECONDS:
                    return None
                if not await _is_set(event, min(self._tick_seconds, remaining)):
                    await reader.tick()
        finally:
            waiters = self._waiters[key]
            del waiters[event]
            if not waiters:
                del self._waiters[key]

    def _listen(self, informer: Informer[Any]) -> None:
        if informer.kind not in self._subscribed:
            self._subscribed.add(informer.kind)
            informer.subscribe(self._changed)

    def _changed(self, old: Resource | None, new: Resource | None) -> None:
        if not self._waiters:
            return
        obj = new if new is not None else old
        if obj is not None:
            for event in self._waiters.get(lock_key(obj), ()):
                event.set()


async def _is_set(event: asyncio.Event, seconds: float) -> bool:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True


def _timed_out(
    subject: Resource, action: WaitAction, seconds: float, missing: str
) -> DeadlineExceededError:
    return DeadlineExceededError(
        f"{subject.KIND} {subject.key} is not {DONE_WORDS[action]} after {seconds:g} s: {missing}",
        hint="it may still complete: check again, or wait longer",
    )
