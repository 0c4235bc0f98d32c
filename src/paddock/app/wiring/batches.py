"""The controllers of batches and what they need, wired together."""

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from paddock.adapters.task_client import EnvdTasks
from paddock.app.wiring.environments import Environments
from paddock.cache.pool_members import PoolMembers
from paddock.cache.provider import Provider
from paddock.controllers.batch.allocation.allocator import Allocator
from paddock.controllers.batch.allocation.pool_finalizer import Parting
from paddock.controllers.batch.allocation.pool_scoring import DEFAULT_PROFILES, Profile
from paddock.controllers.batch.allocation.pool_selector import ANY, Assignment
from paddock.controllers.batch.controller import BatchController
from paddock.controllers.batch.tasks.runner import TaskRunner
from paddock.controllers.batch.tasks.simulated import SimulatedTasks
from paddock.controllers.batch.tasks.watcher import Follower
from paddock.engine.controller import Controller, own_key
from paddock.engine.recorder import Recorder
from paddock.kit.clock import Clock
from paddock.kit.errors import InvalidError
from paddock.resources.kinds.batch import BatchSandbox
from paddock.resources.kinds.pool import SandboxPool
from paddock.resources.kinds.sandbox import LABEL_BATCH, Sandbox
from paddock.resources.meta import Key
from paddock.resources.tokens import TokenSeed
from paddock.runtime.port import Runtime
from paddock.settings import Settings

log = logging.getLogger(__name__)

GATHER_SECONDS = 0.05
"""Events about many sandboxes of one batch or pool are looked at together."""
PROFILES_FILE = "assign-profiles.json"


def default_tasks(runtime: Runtime, seed: TokenSeed, clock: Clock) -> TaskRunner:
    """Give the runner that goes with a runtime."""
    return SimulatedTasks(clock) if runtime.name == "simulated" else EnvdTasks(seed)


def load_profiles(settings: Settings) -> Mapping[str, Profile]:
    """Read how pools are chosen for batches that take any: a list of profiles, as JSON."""
    path = Path(settings.state_dir) / PROFILES_FILE
    try:
        data = path.read_bytes()
    except OSError:
        return DEFAULT_PROFILES
    try:
        found = msgspec.json.decode(data, type=tuple[Profile, ...])
    except msgspec.DecodeError as error:
        raise InvalidError(
            f"{path} cannot be read: {error}", hint="mend it, or remove it for the defaults"
        ) from error
    return {**DEFAULT_PROFILES, **{profile.name: profile for profile in found}}


class Batches:
    """Allocator and batch controller with their queues."""

    def __init__(
        self,
        *,
        provider: Provider,
        pool_members: PoolMembers,
        seed: TokenSeed,
        clock: Clock,
        recorder: Recorder,
        environments: Environments,
        tasks: TaskRunner,
        profiles: Mapping[str, Profile],
        is_alone: bool,
    ) -> None:
        """Make the controllers and tell them what wakes them."""
        self._provider = provider
        self._pool_members = pool_members
        self.allocator = Allocator(
            provider=provider,
            pool_members=pool_members,
            clock=clock,
            recorder=recorder,
            growth=environments.growth,
            parting=Parting(provider, pool_members, seed, clock) if is_alone else None,
        )
        self.follower = Follower(tasks, self._gather)
        self.controller = BatchController(
            provider=provider,
            pool_members=pool_members,
            assignment=Assignment(
                provider, pool_members, clock, profiles, of_environment=environments.router.pool_for
            ),
            follower=self.follower,
            seed=seed,
            clock=clock,
            recorder=recorder,
            is_alone=is_alone,
            on_gone=self.allocator.forget,
            most=self.allocator.most,
        )
        self._batch = Controller("batch", self.controller.reconcile, workers=8)
        allocator = Controller("allocator", self.allocator.reconcile, workers=4)
        self._batch.watches(provider.informer(BatchSandbox), own_key)
        provider.informer(Sandbox).subscribe(self._sandbox_changed)
        self._batch.watches(provider.informer(SandboxPool), self._batches_of)
        allocator.watches(provider.informer(BatchSandbox), _pools_of)
        allocator.watches(provider.informer(SandboxPool), own_key)
        pool_members.on_change(lambda pool: allocator.queue.add_after(pool, GATHER_SECONDS))
        self.controllers = (self._batch, allocator)

    def _gather(self, batch: Key) -> None:
        self._batch.queue.add_after(batch, GATHER_SECONDS)

    def _sandbox_changed(self, old: Sandbox | None, new: Sandbox | None) -> None:
        sandbox = new or old
        if sandbox is None:
            return
        if (holder := self._pool_members.holder(sandbox.key)) is not None:
            self._gather(holder)
        elif name := sandbox.metadata.labels.get(LABEL_BATCH):
            self._gather(Key(sandbox.metadata.namespace, name))

    def _batches_of(self, old: SandboxPool | None, new: SandboxPool | None) -> Iterable[Key]:
        """Give the batches that a new or gone pool concerns."""
        pool = new or old
        is_news = old is None or new is None or old.metadata.generation != new.metadata.generation
        if pool is None or not is_news or not self._provider.is_synced:
            return ()
        places = (pool.key, Key(pool.metadata.namespace, ANY))
        found = (batch for place in places for batch in self._provider.batches_of_pool(place))
        return [batch.key for batch in found]


def _pools_of(old: BatchSandbox | None, new: BatchSandbox | None) -> Iterable[Key]:
    found: set[Key] = set()
    for batch in (old, new):
        if batch is None:
            continue
        name = batch.status.pool or batch.spec.pool_ref
        if name and name != ANY:
            namespace, _, last = name.rpartition("/")
            found.add(Key(namespace or batch.metadata.namespace, last))
    return found
