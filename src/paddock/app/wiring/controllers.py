"""Every controller, wired to one cache and one runtime: what a leader runs."""

from collections.abc import Coroutine
from typing import Any

from paddock.adapters.prober import default_prober
from paddock.app.wiring.batches import Batches
from paddock.app.wiring.environments import Environments
from paddock.cache.pool_members import PoolMembers
from paddock.cache.provider import Provider
from paddock.controllers.checkpoint.controller import CheckpointController
from paddock.controllers.claim.acquire import Taker
from paddock.controllers.claim.controller import ClaimController
from paddock.controllers.claim.ports import Fitting, Gate
from paddock.controllers.janitor import Janitor
from paddock.controllers.pool.controller import PoolController
from paddock.controllers.sandbox.controller import SandboxController
from paddock.controllers.sandbox.health_probe import Prober, Probing
from paddock.controllers.sandbox.templates import CachedTemplates
from paddock.controllers.sandbox.wall_clock import follow_clock
from paddock.engine.controller import Controller, own_key
from paddock.engine.recorder import Recorder
from paddock.kit.clock import Clock
from paddock.resources.kinds.checkpoint import Checkpoint
from paddock.resources.kinds.claim import SandboxClaim
from paddock.resources.kinds.pool import SandboxPool
from paddock.resources.kinds.sandbox import Sandbox
from paddock.resources.kinds.template import SandboxTemplate
from paddock.resources.meta import Key
from paddock.resources.tokens import TokenSeed
from paddock.runtime.port import Runtime

SANDBOX_WORKERS = 64
BREATH_SECONDS = 0.05
"""How long changes of a claim's sandboxes are gathered before it is looked at."""


class Controllers:
    """All controllers; their queues fill from the first event on, their work begins with `work`."""

    def __init__(
        self,
        *,
        provider: Provider,
        pool_members: PoolMembers,
        runtime: Runtime,
        seed: TokenSeed,
        clock: Clock,
        recorder: Recorder,
        batches: Batches,
        environments: Environments,
        gate: Gate,
        fitting: Fitting,
        prober: Prober | None = None,
    ) -> None:
        self._provider = provider
        self._batches = batches
        self._runtime = runtime
        self._recorder = recorder
        self._clock = clock
        write = provider.write
        templates = CachedTemplates(
            provider.informer(SandboxTemplate), provider.informer(Checkpoint), write
        )
        self._sandboxes = SandboxController(
            sandboxes=provider.informer(Sandbox),
            templates=templates,
            write=write,
            runtime=runtime,
            seed=seed,
            clock=clock,
            recorder=recorder,
        )
        provider.informer(Sandbox).subscribe(self._sandboxes.news.observe)
        self.probing = Probing(prober or default_prober(runtime), write, clock, recorder)
        provider.informer(Sandbox).subscribe(self.probing.observe)
        pools = PoolController(
            pools=provider.informer(SandboxPool),
            templates=provider.informer(SandboxTemplate),
            pool_members=pool_members,
            write=write,
            clock=clock,
            recorder=recorder,
            supply=batches.allocator.supply,
        )
        checkpoints = CheckpointController(
            checkpoints=provider.informer(Checkpoint),
            sandboxes=provider.informer(Sandbox),
            templates=templates,
            write=write,
            runtime=runtime,
            clock=clock,
            recorder=recorder,
        )
        claims = ClaimController(
            provider=provider,
            taker=Taker(
                provider=provider, pool_members=pool_members, seed=seed, clock=clock, gate=gate
            ),
            fitting=fitting,
            clock=clock,
            recorder=recorder,
            line=environments.router,
        )
        sandbox = Controller("sandbox", self._sandboxes.reconcile, workers=SANDBOX_WORKERS)
        sandbox.watches(provider.informer(Sandbox), own_key)
        pool = Controller("pool", pools.reconcile, workers=4)
        pool.watches(provider.informer(SandboxPool), own_key)
        pool.watches(provider.informer(SandboxTemplate), self._pools_of)
        pool_members.on_change(lambda key: pool.queue.add_after(key, pools.breath(key)))
        batches.allocator.on_demand(pool.queue.add)
        checkpoint = Controller("checkpoint", checkpoints.reconcile, workers=8)
        checkpoint.watches(provider.informer(Checkpoint), own_key)
        checkpoint.watches(provider.informer(Sandbox), self._checkpoints_of)
        claim = Controller("claim", claims.reconcile, workers=8)
        claim.watches(provider.informer(SandboxClaim), own_key)
        claims.wake = claim.queue.add

        def follow(old: Sandbox | None, new: Sandbox | None) -> None:
            for key in claims.concerned(old, new):
                claim.queue.add_after(key, BREATH_SECONDS)

        provider.informer(Sandbox).subscribe(follow)
        env = environments.controller(recorder, batches.allocator.supply)
        self._sandbox_queue = sandbox.queue
        self.all: tuple[Controller[Key], ...] = (
            *(sandbox, pool, checkpoint, claim, env),
            *batches.controllers,
            *environments.adoption(recorder),
        )

    def work(self) -> dict[str, Coroutine[Any, Any, None]]:
        """Give what is to run, by name."""
        return {
            **{f"controller {item.name}": item.run() for item in self.all},
            "recorder": self._recorder.run(),
            "tasks of batches": self._batches.follower.run(),
            "runtime events": self._sandboxes.news.follow(self._sandbox_queue),
            "clock": follow_clock(
                self._clock, self._provider.informer(Sandbox), self._sandbox_queue
            ),
            "probing": self.probing.run(),
            "janitor": Janitor(self._provider, self._runtime).run(),
        }

    def _pools_of(self, old: SandboxTemplate | None, new: SandboxTemplate | None) -> list[Key]:
        template = new or old
        if template is None or not self._provider.is_synced:
            return []
        return [pool.key for pool in self._provider.pools_of_template(template.metadata.name)]

    def _checkpoints_of(self, old: Sandbox | None, new: Sandbox | None) -> list[Key]:
        sandbox = new or old
        if sandbox is None or not self._provider.is_synced:
            return []
        return [item.key for item in self._provider.checkpoints_of_sandbox(sandbox.key)]
