"""Calls all admission plugins and finds the largest size that they admit.

A plugin that raises, times out or returns garbage fails the request, not the controller: nothing
grows without a result, everything else continues. A plugin that blocks in a thread is not called
again before that thread returns.
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

TIMEOUT_SECONDS = 5.0
SKIP_SECONDS = 15.0
"""A plugin that timed out is not called again for this long."""


class AdmissionOutcome(StrEnum):
    """Result of a request to grow; the values of `lastAttemptResult`."""

    ENOUGH = "Enough"
    JUST_RIGHT = "JustRight"
    """Partly admitted."""
    INSUFFICIENT = "Insufficient"
    """Refused."""
    FAILED = "Failed"
    """A plugin failed."""


class AdmissionVerdict(Struct, frozen=True, kw_only=True):
    """The merged result of all plugins."""

    outcome: AdmissionOutcome
    admitted: int
    retry_after_seconds: float | None = None
    reason: str = ""
    message: str = ""


class PluginFailedError(PaddockError):
    """A plugin raised, timed out, or returned an invalid result."""

    reason = "PluginFailed"


class AdmissionGate:
    """All plugins of this control plane."""

    def __init__(
        self,
        plugins: Sequence[AdmissionPlugin] = (),
        *,
        timeout_seconds: float = TIMEOUT_SECONDS,
        broken: Sequence[str] = (),
    ) -> None:
        self._plugins = tuple(plugins)
        self._timeout = timeout_seconds
        self.broken = tuple(broken)
        """Errors of plugins that could not be loaded."""
        self._blocked: dict[str, asyncio.Future[Any]] = {}
        self._skipped_until: dict[str, float] = {}

    async def size(self, request: PoolRequest) -> AdmissionVerdict:
        """Return the admitted size: all that is requested, or the largest admitted."""
        hook = "pre_create_pool" if request.current is None else "pre_update_pool"
        wanted = request.replicas
        try:
            full = await self._ask(hook, request)
            if full.allows(wanted):
                return AdmissionVerdict(outcome=AdmissionOutcome.ENOUGH, admitted=wanted)
            most = await self._largest(hook, request, full)
        except PluginFailedError as error:
            return AdmissionVerdict(
                outcome=AdmissionOutcome.FAILED,
                admitted=0,
                reason=error.reason,
                message=error.message,
            )
        return AdmissionVerdict(
            outcome=AdmissionOutcome.JUST_RIGHT if most else AdmissionOutcome.INSUFFICIENT,
            admitted=most,
            retry_after_seconds=full.retry_after_seconds,
            reason=full.reason or "Refused",
            message=full.message or f"{most} of {wanted} sandboxes were admitted",
        )

    async def deletion(self, request: PoolRequest) -> PoolAdmission:
        """Ask whether a pool may be deleted; a failing plugin keeps it."""
        try:
            return await self._ask("pre_delete_pool", request)
        except PluginFailedError as error:
            return PoolAdmission(admitted=-1, reason=error.reason, message=error.message)

    async def _largest(self, hook: str, request: PoolRequest, full: PoolAdmission) -> int:
        """Find the largest admitted size; the plugin's own limit is tried first."""
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
        result = await self._ask(hook, structs.replace(request, replicas=replicas))
        return result.allows(replicas)

    # ---- one call --------------------------------------------------------------------

    async def _ask(self, hook: str, request: PoolRequest) -> PoolAdmission:
        if self.broken:
            raise PluginFailedError("; ".join(self.broken))
        return merged([await self._ask_one(plugin, hook, request) for plugin in self._plugins])

    async def _ask_one(
        self, plugin: AdmissionPlugin, hook: str, request: PoolRequest
    ) -> PoolAdmission:
        name = _name(plugin)
        if name in self._blocked:
            raise PluginFailedError(f"admission plugin {name} is still blocked in an earlier call")
        loop = asyncio.get_running_loop()
        if self._skipped_until.get(name, 0.0) > loop.time():
            raise PluginFailedError(f"admission plugin {name} timed out recently")
        try:
            async with asyncio.timeout(self._timeout):
                result = await self._call(name, getattr(plugin, hook), request)
        except TimeoutError as error:
            # The next requests must not wait for it too.
            self._skipped_until[name] = loop.time() + SKIP_SECONDS
            raise PluginFailedError(
                f"admission plugin {name} did not answer within {self._timeout:g} s"
            ) from error
        except Exception as error:
            log.warning(
                "admission plugin failed",
                extra=fields(plugin=name, hook=hook, pool=request.key, error=repr(error)),
                exc_info=error,
            )
            raise PluginFailedError(f"admission plugin {name} failed: {error!r}") from error
        if not isinstance(result, PoolAdmission):
            raise PluginFailedError(
                f"admission plugin {name} returned {result!r}, not a PoolAdmission"
            )
        return result

    async def _call(
        self, name: str, hook: Callable[[PoolRequest], Any], request: PoolRequest
    ) -> object:
        if inspect.iscoroutinefunction(hook) or _is_ours(hook):
            result = hook(request)
            return await result if inspect.isawaitable(result) else result
        # A plain function of a third party may block: run it in a thread.
        running = _in_thread(name, hook, request)
        self._blocked[name] = running
        running.add_done_callback(lambda _: self._blocked.pop(name, None))
        result = await asyncio.shield(running)
        return await result if inspect.isawaitable(result) else result


def _in_thread(
    name: str, hook: Callable[[PoolRequest], Any], request: PoolRequest
) -> asyncio.Future[Any]:
    """Call a function in a daemon thread: it may block for ever."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def call() -> None:
        result, error = None, None
        try:
            result = hook(request)
        except Exception as raised:  # noqa: BLE001 - third-party code: every error is reported
            error = raised
        with contextlib.suppress(RuntimeError):  # The loop has ended.
            loop.call_soon_threadsafe(_settle, future, result, error)

    threading.Thread(target=call, name=f"admission plugin {name}", daemon=True).start()
    return future


def _settle(future: asyncio.Future[Any], result: object, error: Exception | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)


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
    """Create the gate with the built-in plugins and those of entry points."""
    found = metadata.entry_points(group=GROUP) if entry_points is None else entry_points
    plugins, broken = list(built_in), list[str]()
    for entry in found:
        try:
            plugins.append(entry.load()(context))
        except Exception as error:  # noqa: BLE001 - third-party code: every error is reported
            log.warning(
                "cannot load admission plugin", extra=fields(name=entry.name, error=repr(error))
            )
            broken.append(f"admission plugin {entry.name} cannot be loaded: {error!r}")
    return AdmissionGate(plugins, broken=broken)
