"""Controllers: run a reconcile function for every key that changed.

A reconcile gets a key only: it reads the current state, must be idempotent, and returns
`Done("paused: idle 300 s")`, or `RequeueAfter(30, "waiting for the image")` to be called again. An
error requeues the key with backoff; `TerminalError` does not, as only a change of the object can
help. A key is never reconciled twice at once. A reconcile that hangs does not block others: after
`EXTRA_WORKER_SECONDS` another worker is started, and after the timeout it is cancelled. With
`group_of`, slow keys of one group (a team) never occupy all workers in the meantime.

`watches` connects a controller to informers; leader election is in `election`.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Generic, TypeAlias

from msgspec import Struct

from paddock.engine.informer import Informer
from paddock.engine.queue import K, QueueClosed, WorkQueue
from paddock.kit import ids, metrics
from paddock.kit.errors import ConflictError, DeadlineExceededError, PaddockError
from paddock.kit.logs import bound, fields
from paddock.resources.meta import Key, R, Resource, controller_of

log = logging.getLogger(__name__)

_SECONDS = metrics.histogram(
    "paddock_reconcile_seconds", "Duration of one reconcile.", ("controller", "result")
)
_ACTIVE = metrics.gauge("paddock_reconcile_active", "Reconciles under way.", ("controller",))
_ERRORS = metrics.counter(
    "paddock_reconcile_errors_total", "Reconciles that failed.", ("controller", "error")
)


RECONCILE_SECONDS = 900.0
"""The timeout of a reconcile. Longer means that what it waits for was lost; it is retried."""
EXTRA_WORKER_SECONDS = 10.0
EXTRA_WORKER_LIMIT = 1024
"""The most workers that are added for hanging ones."""


class Done(Struct, frozen=True):
    """Nothing to do until something changes. The message is logged; omit it for no-ops."""

    message: str = ""


class Gone(Done, frozen=True):
    """The object is deleted: delayed calls for its key are cancelled too."""


class RequeueAfter(Struct, frozen=True):
    """Requeue after so many seconds, or earlier if something changes."""

    seconds: float
    message: str = ""


Result: TypeAlias = Done | RequeueAfter
Reconcile: TypeAlias = Callable[[K], Awaitable[Result]]


class TerminalError(PaddockError):
    """Retrying does not help: only a change of the object does."""

    reason = "Terminal"


class Controller(Generic[K]):
    """Workers that reconcile the keys of one queue."""

    def __init__(
        self,
        name: str,
        reconcile: Reconcile[K],
        *,
        queue: WorkQueue[K] | None = None,
        workers: int = 8,
        timeout_seconds: float | None = RECONCILE_SECONDS,
        group_of: Callable[[K], str] | None = None,
    ) -> None:
        if workers < 1:
            raise ValueError("a controller needs at least one worker")
        self.name = name
        slots = workers if group_of is not None else None
        self.queue: WorkQueue[K] = (
            queue if queue is not None else WorkQueue(name, group_of=group_of, slots=slots)
        )
        self._reconcile = reconcile
        self._workers = workers
        self._timeout_seconds = timeout_seconds
        self._extra_workers = 0
        self._active = _ACTIVE.labels(name)

    def watches(
        self,
        informer: Informer[R],
        keys: Callable[[R | None, R | None], Iterable[K]],
    ) -> Callable[[], None]:
        """Enqueue the keys that a change concerns; returns the unsubscribe function."""

        def changed(old: R | None, new: R | None) -> None:
            for key in keys(old, new):
                self.queue.add(key)

        return informer.subscribe(changed)

    async def run(self) -> None:
        """Run the workers until cancelled."""
        log.info("controller started", extra=fields(controller=self.name, workers=self._workers))
        try:
            async with asyncio.TaskGroup() as tasks:
                for number in range(self._workers):
                    tasks.create_task(self._work(tasks), name=f"{self.name} worker {number}")
        finally:
            self._extra_workers = 0
            log.info("controller stopped", extra=fields(controller=self.name))

    async def _work(self, tasks: asyncio.TaskGroup) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                key = await self.queue.get()
            except QueueClosed:
                return
            started: list[str] = []
            timer = loop.call_later(
                EXTRA_WORKER_SECONDS, self._start_extra_worker, tasks, key, started
            )
            try:
                await self._process(key)
            finally:
                timer.cancel()
                self.queue.done(key)
            if started:
                # Another worker was started in its place.
                self._extra_workers -= 1
                return

    def _start_extra_worker(self, tasks: asyncio.TaskGroup, key: K, started: list[str]) -> None:
        """Start another worker where one has been busy with the same key for long."""
        if self._extra_workers >= EXTRA_WORKER_LIMIT:
            return
        self._extra_workers += 1
        name = f"{self.name} extra worker {self._extra_workers}"
        started.append(name)
        log.info("reconcile is slow", extra=fields(controller=self.name, key=key))
        tasks.create_task(self._work(tasks), name=name)
        self.queue.release_slot(key)

    async def _process(self, key: K) -> None:
        started = asyncio.get_running_loop().time()
        outcome = "cancelled"
        self._active.inc()
        with bound(controller=self.name, key=key, reconcile=ids.request_id()):
            try:
                outcome = self._settle(key, await self._call(key))
            except asyncio.CancelledError as error:
                if _is_being_stopped():
                    # Half done: the next leader must reconcile it again.
                    self.queue.add(key)
                    raise
                # Not this worker was cancelled but something that the reconcile awaited. Passing
                # that on would end the worker silently.
                outcome = self._fail(key, error)
            except Exception as error:  # noqa: BLE001 - a task's root: all become retries
                outcome = self._fail(key, error)
            finally:
                self._active.dec()
                took = asyncio.get_running_loop().time() - started
                _SECONDS.labels(self.name, outcome).observe(took)

    async def _call(self, key: K) -> Result:
        limit = asyncio.timeout(self._timeout_seconds)
        try:
            async with limit:
                return await self._reconcile(key)
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise DeadlineExceededError(
                f"the reconcile took longer than {self._timeout_seconds} s and was cancelled"
            ) from error

    def _settle(self, key: K, result: Any) -> str:
        if isinstance(result, RequeueAfter):
            self.queue.forget(key)
            self.queue.add_after(key, result.seconds)
            log.debug("reconciled", extra=fields(did=result.message, again_in=result.seconds))
            return "after"
        if isinstance(result, Done):
            self.queue.forget(key)
            if isinstance(result, Gone):
                self.queue.cancel(key)
            level = logging.INFO if result.message else logging.DEBUG
            log.log(level, "reconciled", extra=fields(did=result.message))
            return "done"
        raise TypeError(f"a reconcile returns Done or RequeueAfter, not {result!r}")

    def _fail(self, key: K, error: BaseException) -> str:
        _ERRORS.labels(self.name, type(error).__name__).inc()
        if isinstance(error, TerminalError):
            self.queue.forget(key)
            log.error("reconcile failed terminally", extra=fields(error=error.message))
            return "terminal"
        seconds = self.queue.retry(key)
        facts = fields(error=repr(error), again_in=seconds, failures=self.queue.failures(key))
        if isinstance(error, ConflictError):
            # Another writer came first: usual under load.
            log.debug("reconcile met a conflict", extra=facts)
        else:
            # Paddock's own errors explain themselves; others need their traceback.
            known = isinstance(error, PaddockError)
            log.warning("reconcile failed", extra=facts, exc_info=None if known else error)
        return "error"


def _is_being_stopped() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def own_key(old: Resource | None, new: Resource | None) -> Iterable[Key]:
    """Map a change of an object to its own key."""
    obj = new if new is not None else old
    return () if obj is None else (obj.key,)


def namespace_of(key: Key) -> str:
    """Return the namespace of a key, as its group."""
    return key.namespace


def controlled_by(kind: type[Resource]) -> Callable[[R | None, R | None], Iterable[Key]]:
    """Map a change of a child to the key of its controller, before and after the change."""

    def keys(old: R | None, new: R | None) -> Iterable[Key]:
        found: set[Key] = set()
        for obj in (old, new):
            owner = None if obj is None else controller_of(obj)
            if obj is not None and owner is not None and owner.kind == kind.KIND:
                found.add(Key(obj.metadata.namespace, owner.name))
        return found

    return keys
