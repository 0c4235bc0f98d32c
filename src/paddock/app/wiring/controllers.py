"""Creates all controllers of a leader, on one cache and one runtime."""

from collections.abc import Callable, Coroutine
from typing import Any

from paddock.adapters.prober import default_prober
from paddock.app.wiring.batches import BatchControllers
from paddock.app.wiring.environments import Environments
from paddock.cache.pool_members import PoolMembers
from paddock.cache.provider import Provider
from paddock.claims.acquirer import Acquirer
from paddock.claims.network.ceilings import CeilingOf
from paddock.claims.overrides import ClaimOverrides
from paddock.claims.quota.stored import StoredLedger
from paddock.controllers.checkpoint import events as checkpoint_events
from paddock.controllers.checkpoint.controller import CheckpointController
from paddock.controllers.claim import events as claim_events
from paddock.controllers.claim.controller import ClaimController
from paddock.controllers.claim.take_or_create import ClaimAcquirer
from paddock.controllers.janitor import Janitor
from paddock.controllers.pool import events as pool_events
from paddock.controllers.pool.controller import PoolController
from paddock.controllers.sandbox import events as sandbox_events
from paddock.controllers.sandbox.controller import SandboxController
from paddock.controllers.sandbox.health_probe import HealthProbes, Prober
from paddock.controllers.sandbox.images.pulls import ImagePulls
from paddock.controllers.sandbox.images.versions import ImageVersions
from paddock.controllers.sandbox.templates import CachedTemplates
from paddock.controllers.sandbox.waiting_requests import WaitingRequests
from paddock.controllers.sandbox.wall_clock import watch_clock
from paddock.controllers.template.controller import TemplateController
from paddock.controllers.template_build import events as build_events
from paddock.controllers.template_build.controller import TemplateBuildController
from paddock.engine.controller import Controller, namespace_of, own_key
from paddock.engine.recorder import Recorder
from paddock.kit.clock import Clock
from paddock.resources.kinds.checkpoint import Checkpoint
from paddock.resources.kinds.pool import SandboxPool
from paddock.resources.kinds.sandbox import Sandbox
from paddock.resources.kinds.template import SandboxTemplate
from paddock.resources.meta import Key
from paddock.resources.network.effective import owner_of
from paddock.resources.tokens import TokenSeed
from paddock.runtime.port import Runtime

SANDBOX_WORKERS = 128
CHECKPOINT_WORKERS = 16
BUILD_WORKERS = 4
CLAIM_WORKERS = 16
"""A team alone uses half of the workers. The others are for teams that have fewer at work: a
reconcile may wait long for a restore or a dump."""


class Controllers:
    """All controllers. Their queues fill from the first event on; `work` starts the workers."""

    def __init__(
        self,
        *,
        provider: Provider,
        pool_members: PoolMembers,
        runtime: Runtime,
        seed: TokenSeed,
        clock: Clock,
        recorder: Recorder,
        batches: BatchControllers,
        environments: Environments,
        acquirer: Acquirer,
        builds: TemplateBuildController | None,
        overrides: ClaimOverrides,
        requests: WaitingRequests,
        ceiling_of: CeilingOf,
        on_team_change: Callable[[Callable[[str], None]], None],
        stored: StoredLedger,
        paused_retention_seconds: int | None = None,
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
            requests=requests,
            image_pulls=ImagePulls(
                runtime=runtime,
                live=provider.live,
                write=write,
                clock=clock,
                recorder=recorder,
            ),
            image_versions=ImageVersions(
                provider.informer(SandboxTemplate), provider.informer(SandboxPool), write
            ),
            ceiling_of=ceiling_of,
        )
        self.probes = HealthProbes(prober or default_prober(runtime), write, clock, recorder)
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
            users=provider.informer(SandboxTemplate),
            templates=templates,
            write=write,
            runtime=runtime,
            clock=clock,
            recorder=recorder,
            stored=stored,
        )
        claims = ClaimController(
            provider=provider,
            acquirer=ClaimAcquirer(
                acquirer, seed, paused_retention_seconds=paused_retention_seconds
            ),
            overrides=overrides,
            clock=clock,
            recorder=recorder,
            queue=environments.claim_queue,
        )
        sandbox = Controller(
            "sandbox", self._sandboxes.reconcile, workers=SANDBOX_WORKERS, group_of=self._team
        )
        sandbox_events.subscribe(
            sandbox,
            provider.informer(Sandbox),
            self._sandboxes.runtime_events,
            self.probes,
            self._sandboxes.while_paused,
        )
        pool = Controller("pool", pools.reconcile, workers=4)
        pool_events.subscribe(pool, provider, pool_members, pools, batches.allocator.on_demand)
        checkpoint = Controller(
            "checkpoint",
            checkpoints.reconcile,
            workers=CHECKPOINT_WORKERS,
            group_of=self._checkpoint_team,
        )
        checkpoint_events.subscribe(checkpoint, provider)
        claim = Controller("claim", claims.reconcile, workers=CLAIM_WORKERS, group_of=namespace_of)
        claim_events.subscribe(claim, provider, claims)
        self._builds = builds
        env = environments.controller(recorder, batches.allocator.supply)
        self._sandbox_queue = sandbox.queue
        on_team_change(self._enqueue_team)
        self.all: tuple[Controller[Key], ...] = (
            *(sandbox, pool, checkpoint, claim, env, self._template_controller()),
            *batches.controllers,
            *environments.adoption(recorder),
            *([] if builds is None else [self._build_controller(builds)]),
        )

    def _template_controller(self) -> Controller[Key]:
        templates = self._provider.informer(SandboxTemplate)
        reconcile = TemplateController(templates, self._provider.write).reconcile
        controller = Controller("template", reconcile, workers=2)
        controller.watches(templates, own_key)
        return controller

    def _build_controller(self, builds: TemplateBuildController) -> Controller[Key]:
        controller = Controller("template build", builds.reconcile, workers=BUILD_WORKERS)
        build_events.subscribe(controller, self._provider)
        return controller

    def _team(self, key: Key) -> str:
        """Return the team of a sandbox: one of a shared pool is not in the team's namespace."""
        sandbox = self._provider.informer(Sandbox).get(key)
        return key.namespace if sandbox is None else owner_of(sandbox)

    def _checkpoint_team(self, key: Key) -> str:
        checkpoint = self._provider.informer(Checkpoint).get(key)
        return (checkpoint.spec.owner if checkpoint else "") or key.namespace

    def _enqueue_team(self, team: str) -> None:
        """Reconcile the sandboxes of a team whose network policy has changed."""
        for sandbox in self._provider.informer(Sandbox).all():
            if owner_of(sandbox) == team:
                self._sandbox_queue.add(sandbox.key)

    def work(self) -> dict[str, Coroutine[Any, Any, None]]:
        """Return the coroutines to run, by name."""
        return {
            **{f"controller {item.name}": item.run() for item in self.all},
            "recorder": self._recorder.run(),
            "tasks of batches": self._batches.task_watcher.run(),
            "runtime events": self._sandboxes.runtime_events.run(self._sandbox_queue),
            "image pulls": self._sandboxes.image_pulls.run(self._sandbox_queue),
            "clock": watch_clock(
                self._clock, self._provider.informer(Sandbox), self._sandbox_queue
            ),
            "probing": self.probes.run(),
            **({} if self._builds is None else self._builds.work()),
            "janitor": Janitor(self._provider, self._runtime).run(),
        }
