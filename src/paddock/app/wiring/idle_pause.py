"""Idle pauses by a process that leads others: what happens in sandboxes is asked for, not told.

Traffic is asked of the gateways (`traffic`), the use of processors of those sandboxes' daemons that
want to be paused, and of no others.
"""

from collections.abc import Coroutine
from typing import Any

from paddock.adapters.activity_poller import Traffic
from paddock.adapters.membership import parse
from paddock.adapters.runtime_agent import RuntimeAgent
from paddock.cache.provider import Provider
from paddock.controllers.idle.controller import IdleController
from paddock.controllers.idle.plan import Seen
from paddock.engine.recorder import Recorder
from paddock.kit.clock import Clock
from paddock.resources.kinds.sandbox import Sandbox
from paddock.resources.tokens import TokenSeed
from paddock.runtime.port import Runtime
from paddock.settings import Settings
from paddock.store.kubernetes.backend import KubernetesStore
from paddock.store.port import Store


class Idling:
    """Pauses the idle for as long as it leads."""

    def __init__(
        self,
        settings: Settings,
        *,
        store: Store,
        runtime: Runtime,
        provider: Provider,
        seed: TokenSeed,
        clock: Clock,
        recorder: Recorder,
    ) -> None:
        cluster = store.client if isinstance(store, KubernetesStore) else None
        self._traffic = Traffic(parse(settings.peers), cluster, clock)
        self._agent = RuntimeAgent(runtime, seed, provider, clock)
        self._controller = IdleController(
            provider, self._doings, clock, recorder, refresh=self._traffic.refresh
        )
        provider.informer(Sandbox).subscribe(self._forget)

    def work(self) -> dict[str, Coroutine[Any, Any, None]]:
        """Give what is to run, by name."""
        return {
            "idle pauses": self._controller.run(),
            "sampling": self._agent.keep_sampling(only=_wants_pause),
        }

    async def close(self) -> None:
        """Hang up."""
        await self._traffic.close()

    def _doings(self, sandbox: Sandbox) -> Seen:
        uid = sandbox.metadata.uid
        return Seen(
            watching_since=self._traffic.since(),
            last_request=self._traffic.last(uid),
            loads=self._agent.loads(uid),
        )

    def _forget(self, old: Sandbox | None, new: Sandbox | None) -> None:
        if new is None and old is not None:
            self._traffic.forget(old.metadata.uid)


def _wants_pause(sandbox: Sandbox) -> bool:
    return sandbox.spec.idle_pause is not None
