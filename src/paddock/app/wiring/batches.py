"""Creates the controllers of batches and their dependencies."""

import logging
from collections.abc import Mapping
from pathlib import Path

import msgspec

from paddock.adapters.task_client import EnvdTasks
from paddock.app.wiring.environments import Environments
from paddock.cache.pool_members import PoolMembers
from paddock.cache.provider import Provider
from paddock.controllers.batch import events as batch_events
from paddock.controllers.batch.allocation.allocator import Allocator
from paddock.controllers.batch.allocation.pool_finalizer import PoolFinalizer
from paddock.controllers.batch.allocation.pool_scoring import DEFAULT_PROFILES, Profile
from paddock.controllers.batch.allocation.pool_selector import PoolSelector
from paddock.controllers.batch.controller import BatchController
from paddock.controllers.batch.tasks.runner import TaskRunner
from paddock.controllers.batch.tasks.simulated import SimulatedTasks
from paddock.controllers.batch.tasks.watcher import TaskWatcher
from paddock.engine.controller import Controller
from paddock.engine.recorder import Recorder
from paddock.kit.clock import Clock
from paddock.kit.errors import InvalidError
from paddock.resources.tokens import TokenSeed
from paddock.runtime.port import Runtime
from paddock.settings import Settings

log = logging.getLogger(__name__)

PROFILES_FILE = "assign-profiles.json"


def default_tasks(runtime: Runtime, seed: TokenSeed, clock: Clock) -> TaskRunner:
    """Return the task runner for a runtime."""
    return SimulatedTasks(clock) if runtime.name == "simulated" else EnvdTasks(seed)


def load_profiles(settings: Settings) -> Mapping[str, Profile]:
    """Read the pool selection profiles: a JSON list in the state directory."""
    path = Path(settings.state_dir) / PROFILES_FILE
    try:
        data = path.read_bytes()
    except OSError:
        return DEFAULT_PROFILES
    try:
        found = msgspec.json.decode(data, type=tuple[Profile, ...])
    except msgspec.DecodeError as error:
        raise InvalidError(
            f"{path} cannot be read: {error}", hint="correct it, or delete it to use the defaults"
        ) from error
    return {**DEFAULT_PROFILES, **{profile.name: profile for profile in found}}


class BatchControllers:
    """The allocator and the batch controller, with their queues."""

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
        is_sole_writer: bool,
    ) -> None:
        """Create the controllers and subscribe them to their events."""
        self.allocator = Allocator(
            provider=provider,
            pool_members=pool_members,
            clock=clock,
            recorder=recorder,
            growth=environments.growth,
            pool_finalizer=PoolFinalizer(provider, pool_members, seed, clock)
            if is_sole_writer
            else None,
        )
        self.task_watcher = TaskWatcher(tasks)
        self.controller = BatchController(
            provider=provider,
            pool_members=pool_members,
            pool_selector=PoolSelector(
                provider,
                pool_members,
                clock,
                profiles,
                of_environment=environments.claim_queue.pool_for,
                waiting=self.allocator.waiting,
            ),
            task_watcher=self.task_watcher,
            seed=seed,
            clock=clock,
            recorder=recorder,
            is_sole_writer=is_sole_writer,
            on_gone=self.allocator.forget,
            max_size=self.allocator.max_size,
        )
        batch = Controller("batch", self.controller.reconcile, workers=8)
        allocator = Controller("allocator", self.allocator.reconcile, workers=4)
        batch_events.subscribe(batch, allocator, provider, pool_members)
        self.task_watcher.on_change(batch_events.enqueue_gathered(batch))
        self.controllers = (batch, allocator)
