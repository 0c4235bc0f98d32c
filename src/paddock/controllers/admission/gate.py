"""Asking all plugins, and searching for the largest size that they admit.

A plugin that raises, hangs or answers nonsense fails the question, not the controller: nothing
grows without an answer, everything else goes on. One that hangs in a thread is not asked anew
before that thread is back.
"""

import asyncio
import contextlib
import inspect
import logging
import threading
from collections.abc import Callable, Sequence
from enum import StrEnum
from importlib import metadata
from typing import Any

from msgspec import Struct, structs

from paddock.controllers.admission.plugin import (
    GROUP,
    AdmissionContext,
    AdmissionPlugin,
    PoolAdmission,
    PoolRequest,
    merged,
)
from paddock.kit.errors import PaddockError
from paddock.kit.logs import fields

log = logging.getLogger(__name__)

PATIENCE_SECONDS = 5.0
REST_SECONDS = 15.0
"""A plugin that gave no answer is not asked again for so long."""


class Outcome(StrEnum):
    """What came of asking to grow; the words that `lastAttemptResult` has."""

    ENOUGH = "Enough"
    JUST_RIGHT = "JustRight"
    """Part of it."""
    INSUFFICIENT = "Insufficient"
    """None of it."""
    FAILED = "Failed"
    """A plugin did not answer."""


class Verdict(Struct, frozen=True, kw_only=True):
    """The plugins' common answer."""

    outcome: Outcome
    admitted: int
    retry_after_seconds: float | None = None
    reason: str = ""
    message: str = ""


class PluginFailedError(PaddockError):
    """A plugin raised, hung, or gave something that is no answer."""

    reason = "PluginFailed"


class AdmissionGate:
    """All plugins of this control plane."""

    def __init__(
        self,
        plugins: Sequence[AdmissionPlugin] = (),
        *,
        patience_seconds: float = PATIENCE_SECONDS,
        broken: Sequence[str] = (),
    ) -> None:
        self._plugins = tuple(plugins)
        self._patience = patience_seconds
        self.broken = tuple(broken)
        """Plugins that could not be loaded, each with why."""
        self._hanging: dict[str, asyncio.Future[Any]] = {}
        self._resting: dict[str, float] = {}

    async def size(self, request: PoolRequest) -> Verdict:
        """Say how large the pool may be: all that is asked, or the most that is admitted."""
        hook = "pre_create_pool" if request.current is None else "pre_update_pool"
        wanted = request.replicas
        try:
            full = await self._ask(hook, request)
            if full.allows(wanted):
                return Verdict(outcome=Outcome.ENOUGH, admitted=wanted)
            most = await self._largest(hook, request, full)
        except PluginFailedError as error:
            return Verdict(
                outcome=Outcome.FAILED, admitted=0, reason=error.reason, message=error.message
            )
        return Verdict(
            outcome=Outcome.JUST_RIGHT if most else Outcome.INSUFFICIENT,
            admitted=most,
            retry_after_seconds=full.retry_after_seconds,
            reason=full.reason or "Refused",
            message=full.message or f"of {wanted} sandboxes {most} were admitted",
        )

    async def deletion(self, request: PoolRequest) -> PoolAdmission:
        """Ask whether a pool may go; a plugin that fails keeps it."""
        try:
            return await self._ask("pre_delete_pool", request)
        except PluginFailedError as error:
            return PoolAdmission(admitted=-1, reason=error.reason, message=error.message)

    async def _largest(self, hook: str, request: PoolRequest, full: PoolAdmission) -> int:
        """Search between nothing and what was refused; a plugin's own word is tried first."""
        low, high = 0, request.replicas - 1
        hint = full.admitted or 0
        if 0 < hint <= high:
            if await self._allows(hook, request, hint):
                low = hint
                if not await self._allows(hook, request, hint + 1):
                    return low
            else:
                high = hint - 1
        while low < high:
            middle = (low + high + 1) // 2
            if await self._allows(hook, request, middle):
                low = middle
            else:
                high = middle - 1
        return low

    async def _allows(self, hook: str, request: PoolRequest, replicas: int) -> bool:
        if replicas >= request.replicas:
            return False
        answer = await self._ask(hook, structs.replace(request, replicas=replicas))
        return answer.allows(replicas)

    # ---- one question --------------------------------------------------------------------

    async def _ask(self, hook: str, request: PoolRequest) -> PoolAdmission:
        if self.broken:
            raise PluginFailedError("; ".join(self.broken))
        return merged([await self._ask_one(plugin, hook, request) for plugin in self._plugins])

    async def _ask_one(
        self, plugin: AdmissionPlugin, hook: str, request: PoolRequest
    ) -> PoolAdmission:
        name = _name(plugin)
        if name in self._hanging:
            raise PluginFailedError(f"the admission plugin {name} still hangs in an earlier call")
        loop = asyncio.get_running_loop()
        if self._resting.get(name, 0.0) > loop.time():
            raise PluginFailedError(f"the admission plugin {name} gave no answer a moment ago")
        try:
            async with asyncio.timeout(self._patience):
                answer = await self._call(name, getattr(plugin, hook), request)
        except TimeoutError as error:
            # Others are not made to wait for it, too.
            self._resting[name] = loop.time() + REST_SECONDS
            raise PluginFailedError(
                f"the admission plugin {name} gave no answer within {self._patience:g} s"
            ) from error
        except Exception as error:
            log.warning(
                "admission plugin failed",
                extra=fields(plugin=name, hook=hook, pool=request.key, error=repr(error)),
                exc_info=error,
            )
            raise PluginFailedError(f"the admission plugin {name} failed: {error!r}") from error
        if not isinstance(answer, PoolAdmission):
            raise PluginFailedError(f"the admission plugin {name} gave {answer!r} for an answer")
        return answer

    async def _call(
        self, name: str, hook: Callable[[PoolRequest], Any], request: PoolRequest
    ) -> object:
        if inspect.iscoroutinefunction(hook) or _is_ours(hook):
            answer = hook(request)
            return await answer if inspect.isawaitable(answer) else answer
        # A stranger's plain function may block: not this loop.
        running = _in_thread(name, hook, request)
        self._hanging[name] = running
        running.add_done_callback(lambda _: self._hanging.pop(name, None))
        answer = await asyncio.shield(running)
        return await answer if inspect.isawaitable(answer) else answer


def _in_thread(
    name: str, hook: Callable[[PoolRequest], Any], request: PoolRequest
) -> asyncio.Future[Any]:
    """Call a function in a thread that nobody waits for at the end: it may hang for ever."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def call() -> None:
        answer, error = None, None
        try:
            answer = hook(request)
        except Exception as raised:  # noqa: BLE001 - a stranger's code: whatever it raises is told
            error = raised
        with contextlib.suppress(RuntimeError):  # The loop has ended meanwhile: nobody asks.
            loop.call_soon_threadsafe(_settle, future, answer, error)

    threading.Thread(target=call, name=f"admission plugin {name}", daemon=True).start()
    return future


def _settle(future: asyncio.Future[Any], answer: object, error: Exception | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(answer)


def _is_ours(hook: Callable[..., Any]) -> bool:
    return getattr(hook, "__module__", "").startswith("paddock.controllers.admission")


def _name(plugin: AdmissionPlugin) -> str:
    return getattr(plugin, "name", "") or type(plugin).__name__


def load(
    context: AdmissionContext,
    built_in: Sequence[AdmissionPlugin],
    *,
    entry_points: Sequence[metadata.EntryPoint] | None = None,
) -> AdmissionGate:
    """Make the gate of the built-in plugins and those that entry points name."""
    found = metadata.entry_points(group=GROUP) if entry_points is None else entry_points
    plugins, broken = list(built_in), list[str]()
    for entry in found:
        try:
            plugins.append(entry.load()(context))
        except Exception as error:  # noqa: BLE001 - a stranger's code: whatever it raises is told
            log.warning("plugin not loaded", extra=fields(name=entry.name, error=repr(error)))
            broken.append(f"the admission plugin {entry.name} cannot be loaded: {error!r}")
    return AdmissionGate(plugins, broken=broken)
