"""Performs the step that `plan` decides for one sandbox, through the runtime and the store.

The status is written once per transition. Deadlines are timers: the reconcile is requeued for the
next one. After a downtime the next reconcile finds all deadlines that have passed.
"""

import logging
from collections.abc import Awaitable, Callable
from typing import Any

from msgspec import structs

from paddock.cache.writes import Writer
from paddock.claims.network.ceilings import CeilingOf, no_ceiling
from paddock.controllers.sandbox import plan as steps
from paddock.controllers.sandbox.images.pulls import ImagePulls
from paddock.controllers.sandbox.images.versions import ImageVersions
from paddock.controllers.sandbox.lifecycle import Trigger, move
from paddock.controllers.sandbox.live_config import LiveConfig
from paddock.controllers.sandbox.pauses import Pauses
from paddock.controllers.sandbox.runtime_events import RuntimeEvents
from paddock.controllers.sandbox.start_errors import StartErrors
from paddock.controllers.sandbox.status import moved, with_condition
from paddock.controllers.sandbox.templates import TemplateSource
from paddock.controllers.sandbox.waiting_requests import WaitingRequests
from paddock.controllers.sandbox.while_paused import WhilePaused
from paddock.engine.controller import Done, Gone, RequeueAfter, Result
from paddock.engine.informer import Informer
from paddock.engine.recorder import Recorder
from paddock.kit.clock import Clock
from paddock.kit.errors import (
    ConflictError,
    DiskFullError,
    NotFoundError,
    PaddockError,
    UnavailableError,
)
from paddock.resources.kinds.checkpoint import REASON_NO_SPACE
from paddock.resources.kinds.sandbox import (
    CONDITION_READY,
    FINALIZER_SANDBOX,
    Phase,
    Sandbox,
    SandboxStatus,
)
from paddock.resources.kinds.template import PauseStrategy
from paddock.resources.meta import (
    Condition,
    Key,
    is_true,
    with_meta,
)
from paddock.resources.network.effective import owner_of
from paddock.resources.tokens import TokenSeed
from paddock.resources.transitions import deadlines
from paddock.resources.transitions.pause_strategy import strategy_for
from paddock.runtime.blueprint import blueprint
from paddock.runtime.port import Instance, Runtime

log = logging.getLogger(__name__)

REASON_IMAGE = "ImageUpdating"
"""Reason of the condition Ready (False) while the sandbox restarts with another image."""
REASON_IMAGE_KEPT = "ImageUpdateRefused"
REASON_START_FAILED = "StartCommandFailed"
"""Reason of the event of a restarted sandbox whose start or ready command failed."""
_TRANSIENT = (UnavailableError, ConflictError)


class SandboxController:
    """Brings each sandbox to the state of its spec."""

    def __init__(
        self,
        *,
        sandboxes: Informer[Sandbox],
        templates: TemplateSource,
        write: Writer,
        runtime: Runtime,
        seed: TokenSeed,
        clock: Clock,
        recorder: Recorder,
        requests: WaitingRequests,
        image_pulls: ImagePulls,
        image_versions: ImageVersions,
        ceiling_of: CeilingOf = no_ceiling,
    ) -> None:
        self._sandboxes = sandboxes
        self._templates = templates
        self._write = write
        self._runtime = runtime
        self._seed = seed
        self._clock = clock
        self._recorder = recorder
        self.while_paused = WhilePaused(sandboxes.get)
        """Must be subscribed to the Sandbox informer."""
        self._pauses = Pauses(
            write=write,
            runtime=runtime,
            clock=clock,
            recorder=recorder,
            requests=requests,
            announce=self._announce,
            while_paused=self.while_paused,
        )
        self._start_errors = StartErrors(write, clock)
        self.image_pulls = image_pulls
        """Must be run."""
        self._image_versions = image_versions
        self._ceiling_of = ceiling_of
        """The network policy of a team, within which its sandboxes stay."""
        self._live_config = LiveConfig(templates, runtime, seed, clock, ceiling_of)
        self._destroyed: set[str] = set()
        """Uids of sandboxes in a reset whose used instance is already destroyed."""
        self.runtime_events = RuntimeEvents(sandboxes, runtime, clock, recorder)
        """Must be subscribed to the Sandbox informer and run."""
        self._perform: dict[
            type[steps.Step], Callable[[Any, Any, Instance | None], Awaitable[Result]]
        ]
        self._perform = {
            steps.Wait: self._wait,
            steps.AddFinalizer: self._add_finalizer,
            steps.Create: self._create,
            steps.Pause: self._pauses.pause,
            steps.HibernateFrozen: self._pauses.hibernate_frozen,
            steps.Resume: self._resume,
            steps.UpdateImage: self._update_image,
            steps.RecordRunning: self._record_running,
            steps.Fail: self._fail,
            steps.AutoPause: self._auto_pause,
            steps.Expire: self._expire,
            steps.Recycle: self._recycle,
            steps.Destroy: self._destroy,
        }

    async def reconcile(self, key: Key) -> Result:
        """Perform the next step for one sandbox."""
        sandbox = self._sandboxes.get(key)
        if sandbox is None:
            return Gone()
        uid = sandbox.metadata.uid
        assumed = self.runtime_events.assumed_instance(sandbox)
        if assumed is not None:
            step = steps.plan(sandbox, assumed, now=self._clock.now())
            if isinstance(step, steps.Wait):
                return await self._wait(sandbox, step, assumed)
        self.runtime_events.mark_inspected(uid)
        # A deleted sandbox is destroyed whatever its state, so it is not inspected.
        instance = None if sandbox.is_deleting else await self._runtime.inspect(uid)
        step = steps.plan(sandbox, instance, now=self._clock.now())
        return await self._perform[type(step)](sandbox, step, instance)

    # ---- steps ---------------------------------------------------------------------------

    async def _wait(self, sandbox: Sandbox, step: steps.Wait, _instance: Instance | None) -> Result:
        await self._live_config.apply(sandbox)
        if step.until is None:
            return Done()
        return RequeueAfter(
            max((step.until - self._clock.now()).total_seconds(), 0.001), step.reason
        )

    async def _add_finalizer(
        self, sandbox: Sandbox, _step: steps.Step, _: Instance | None
    ) -> Result:
        finalizers = (*sandbox.metadata.finalizers, FINALIZER_SANDBOX)
        await self._write.update(with_meta(sandbox, finalizers=finalizers))
        return Done()

    async def _create(self, sandbox: Sandbox, _step: steps.Step, _: Instance | None) -> Result:
        try:
            template = await self._templates.latest_of(sandbox)
            wanted = blueprint(
                sandbox,
                template,
                self._seed,
                checkpoint_id=self._templates.checkpoint_of(sandbox, template),
                ceiling=self._ceiling_of(owner_of(sandbox)),
            )
            instance = await self.image_pulls.create(sandbox, template, wanted)
            if isinstance(instance, steps.Fail):
                return await self._fail(sandbox, instance, None)
            if isinstance(instance, RequeueAfter):
                return instance
            instance = await self._runtime.start(wanted.uid)
        except _TRANSIENT as error:
            if isinstance(error, DiskFullError) and sandbox.spec.claim is not None:
                # Somebody waits for it, and space does not come back by itself.
                failed = steps.Fail(error.advice, REASON_NO_SPACE)
                return await self._fail(sandbox, failed, None)
            await self._start_errors.record(sandbox, error)
            raise
        except PaddockError as error:
            return await self._fail(sandbox, steps.Fail(error.advice), None)
        self._start_errors.forget(sandbox.metadata.uid)
        self.image_pulls.forget(sandbox.metadata.uid)
        await self._image_versions.record(sandbox, template, instance)
        resources = sandbox.spec.resources or template.resources
        strategy = sandbox.spec.pause_strategy or template.pause_strategy
        running = self._moved(sandbox, Trigger.STARTED, instance)
        running = structs.replace(running, resources=resources, pause_strategy=strategy)
        await self._write.update_status(structs.replace(sandbox, status=running))
        return Done("started")

    async def _record_running(
        self, sandbox: Sandbox, _step: steps.Step, instance: Instance | None
    ) -> Result:
        phase = sandbox.status.phase
        trigger = {Phase.PENDING: Trigger.STARTED, Phase.RUNNING: None}.get(phase, Trigger.RESUMED)
        if phase is Phase.RESUMING and sandbox.status.pause_strategy is PauseStrategy.STOP:
            # Restarted before a crash, perhaps without its start command.
            instance = await self._start_again(sandbox) or instance
        status = self._moved(sandbox, trigger, instance)
        await self._write.update_status(structs.replace(sandbox, status=status))
        return Done("runs")

    async def _update_image(
        self, sandbox: Sandbox, step: steps.UpdateImage, instance: Instance | None
    ) -> Result:
        if not (await self._runtime.capabilities()).can_update_image:
            self._recorder.warning(
                sandbox,
                REASON_IMAGE_KEPT,
                f"image {step.image} cannot be applied: this runtime cannot update images in place",
            )
            return await self._wait(
                sandbox, steps.Wait(None, "the image cannot be updated"), instance
            )
        current = await self._not_ready(sandbox, REASON_IMAGE, f"starting image {step.image}")
        try:
            instance = await self._runtime.update_image(sandbox.metadata.uid, step.image)
        except _TRANSIENT:
            raise
        except PaddockError as error:
            return await self._fail(current, steps.Fail(error.advice), None)
        status = self._moved(current, None, instance)
        await self._write.update_status(structs.replace(current, status=status))
        return RequeueAfter(0.001, "started the new image")

    async def _not_ready(self, sandbox: Sandbox, reason: str, text: str) -> Sandbox:
        """Set the condition Ready to False for the duration of a restart."""
        if not is_true(sandbox.status.conditions, CONDITION_READY):
            return sandbox
        conditions = self._with_condition(
            sandbox, CONDITION_READY, holds=False, reason=reason, text=text
        )
        status = structs.replace(sandbox.status, conditions=conditions)
        return await self._write.update_status(structs.replace(sandbox, status=status))

    async def _announce(self, sandbox: Sandbox, phase: Phase, trigger: Trigger) -> Sandbox:
        """Write the phase of a slow transition when it begins."""
        if sandbox.status.phase is not phase:
            return sandbox
        status = structs.replace(sandbox.status, phase=move(phase, trigger))
        return await self._write.update_status(structs.replace(sandbox, status=status))

    async def _resume(self, sandbox: Sandbox, step: steps.Resume, _: Instance | None) -> Result:
        uid = sandbox.metadata.uid
        current = sandbox
        try:
            if step.strategy is PauseStrategy.FREEZE:
                instance = await self._runtime.thaw(uid)
            else:
                current = await self._announce(sandbox, Phase.PAUSED, Trigger.RESUME_BEGAN)
                instance = await self._runtime.restore(uid)
                if step.strategy is PauseStrategy.STOP:
                    instance = await self._start_again(current) or instance
        except NotFoundError as error:
            return await self._fail(current, steps.Fail(error.advice), None)
        current = await self._with_time_left(current)
        paused = current.status.phase in (Phase.PAUSED, Phase.RESUMING)
        status = self._moved(current, Trigger.RESUMED if paused else None, instance)
        await self._write.update_status(structs.replace(current, status=status))
        return RequeueAfter(0.001, "resumed")

    async def _start_again(self, sandbox: Sandbox) -> Instance | None:
        """Run the start and ready commands after a restart; None if they failed.

        The sandbox keeps running then: its files are needed.
        """
        try:
            return await self._runtime.start(sandbox.metadata.uid)
        except (*_TRANSIENT, NotFoundError):
            raise
        except PaddockError as error:
            self._recorder.warning(sandbox, REASON_START_FAILED, error.message)
            return None

    async def _with_time_left(self, sandbox: Sandbox) -> Sandbox:
        """Extend the deadline of a sandbox whose resume took longer than its timeout."""
        spec = deadlines.with_time_left(sandbox.spec, now=self._clock.now())
        if spec is sandbox.spec:
            return sandbox
        return await self._write.update(structs.replace(sandbox, spec=spec))

    async def _fail(self, sandbox: Sandbox, step: steps.Fail, _: Instance | None) -> Result:
        self._recorder.warning(sandbox, "SandboxFailed", step.message)
        status = structs.replace(
            sandbox.status,
            observed_generation=sandbox.metadata.generation,
            phase=move(sandbox.status.phase, Trigger.FAILED),
            message=step.message,
            conditions=self._with_condition(
                sandbox, CONDITION_READY, holds=False, reason=step.reason, text=step.message
            ),
        )
        await self._write.update_status(structs.replace(sandbox, status=status))
        return Done(f"failed: {step.message}")

    async def _auto_pause(self, sandbox: Sandbox, _step: steps.Step, _: Instance | None) -> Result:
        claim = sandbox.spec.claim
        spec = deadlines.paused(sandbox.spec, now=self._clock.now())
        memory = claim is None or claim.auto_pause_memory
        spec = structs.replace(spec, pause_strategy=strategy_for(spec, memory=memory))
        await self._write.update(structs.replace(sandbox, spec=spec))
        return Done("pauseTime has passed")

    async def _expire(self, sandbox: Sandbox, _step: steps.Step, _: Instance | None) -> Result:
        # With the version, an extension written in the meantime wins over this delete.
        version = sandbox.metadata.resource_version
        await self._write.delete(sandbox, resource_version=version)
        if not deadlines.is_retained(sandbox.spec):
            return Done("shutdownTime has passed")
        seconds = sandbox.spec.paused_retention_seconds
        self._recorder.normal(
            sandbox, "RetentionEnded", f"deleted: it was paused for its retention of {seconds} s"
        )
        return Done("its retention has expired")

    async def _recycle(self, sandbox: Sandbox, _step: steps.Step, _: Instance | None) -> Result:
        # Only a new instance is a proven reset: the used one is destroyed and created again.
        uid = sandbox.metadata.uid
        current = await self._announce(sandbox, Phase.RUNNING, Trigger.RECYCLE_BEGAN)
        if uid not in self._destroyed:
            # Only once: creating may take several attempts, none of which may undo another.
            self._live_config.forget(uid)
            await self._runtime.destroy(uid)
            self._destroyed.add(uid)
        template = self._templates.of(current)
        ceiling = self._ceiling_of(owner_of(current))
        try:
            checkpoint_id = self._templates.checkpoint_of(current, template)
            wanted = blueprint(
                current, template, self._seed, checkpoint_id=checkpoint_id, ceiling=ceiling
            )
            instance = await self.image_pulls.create(current, template, wanted)
            if isinstance(instance, steps.Fail):
                return await self._fail(current, instance, None)
            if isinstance(instance, RequeueAfter):
                return instance
            instance = await self._runtime.start(uid)
        except (*_TRANSIENT, NotFoundError):
            # The old instance disappeared during the attempt; the next attempt creates the new one.
            raise
        except PaddockError as error:
            self._destroyed.discard(uid)
            return await self._fail(current, steps.Fail(error.advice), None)
        self._destroyed.discard(uid)
        status = self._moved(current, Trigger.RECYCLED, instance)
        status = structs.replace(status, recycled_count=status.recycled_count + 1)
        written = await self._write.update_status(structs.replace(current, status=status))
        spec = structs.replace(written.spec, recycle=False)
        await self._write.update(structs.replace(written, spec=spec))
        return Done("recycled")

    async def _destroy(self, sandbox: Sandbox, _step: steps.Step, _: Instance | None) -> Result:
        self._live_config.forget(sandbox.metadata.uid)
        self._start_errors.forget(sandbox.metadata.uid)
        self.image_pulls.forget(sandbox.metadata.uid)
        self._pauses.forget(sandbox.metadata.uid)
        self._destroyed.discard(sandbox.metadata.uid)
        await self._runtime.destroy(sandbox.metadata.uid)
        left = tuple(name for name in sandbox.metadata.finalizers if name != FINALIZER_SANDBOX)
        await self._write.update(with_meta(sandbox, finalizers=left))
        return Done("destroyed")

    # ---- status --------------------------------------------------------------------------

    def _moved(
        self, sandbox: Sandbox, trigger: Trigger | None, instance: Instance | None
    ) -> SandboxStatus:
        runtime = self._runtime.name
        return moved(sandbox, trigger, instance, runtime=runtime, now=self._clock.now())

    def _with_condition(
        self, sandbox: Sandbox, kind: str, *, holds: bool, reason: str, text: str = ""
    ) -> tuple[Condition, ...]:
        now = self._clock.now()
        return with_condition(sandbox, kind, holds=holds, reason=reason, text=text, now=now)
