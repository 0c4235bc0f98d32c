"""Wires the controller that pauses idle sandboxes.

It decides by traffic and by processor usage. Gateways report traffic or are polled for it
(`activity_reports.py` and `activity_poller.py` in `adapters/gateway`); the runtime agent samples
processor usage.
"""

from datetime import datetime
from typing import Protocol

from paddock.adapters.runtime_agent import RuntimeAgent
from paddock.cache.provider import Provider
from paddock.controllers.idle.controller import IdleController
from paddock.controllers.idle.plan import SandboxActivity
from paddock.engine.recorder import Recorder
from paddock.kit.clock import Clock
from paddock.resources.kinds.sandbox import Sandbox


class ActivitySource(Protocol):
    """When sandboxes last had traffic."""

    def since(self) -> datetime:
        """Return the time since which all traffic is known."""
        ...

    def last(self, uid: str) -> datetime | None:
        """Return when a sandbox last had traffic."""
        ...

    def forget(self, uid: str) -> None:
        """Drop a deleted sandbox."""
        ...

    async def refresh(self) -> None:
        """Fetch the newest state, if it is not pushed."""
        ...


class IdlePauses:
    """Pauses idle sandboxes while it runs."""

    def __init__(
        self,
        activity: ActivitySource,
        agent: RuntimeAgent,
        *,
        provider: Provider,
        clock: Clock,
        recorder: Recorder,
    ) -> None:
        self._traffic = activity
        self._agent = agent
        self._controller = IdleController(
            provider, self._activity, clock, recorder, refresh=activity.refresh
        )
        provider.informer(Sandbox).subscribe(self._forget)

    async def run(self) -> None:
        """Pause idle sandboxes until cancelled."""
        await self._controller.run()

    def _activity(self, sandbox: Sandbox) -> SandboxActivity:
        uid = sandbox.metadata.uid
        return SandboxActivity(
            watching_since=self._traffic.since(),
            last_request=self._traffic.last(uid),
            loads=self._agent.loads(uid),
        )

    def _forget(self, old: Sandbox | None, new: Sandbox | None) -> None:
        if new is None and old is not None:
            self._traffic.forget(old.metadata.uid)
