"""Performs what `plan` decides for one sandbox, through the runtime and the store.

Status is written once per transition. Deadlines are timers: the reconcile asks to be called
again at the next one, and after a downtime finds out by itself what has become due.
"""

import logging
from collections.abc import Awaitable, Callable
from typing import Any

from msgspec import structs

from paddock.cache.checks import REASON_PAUSE_FAILED, REASON_PAUSE_UNSUPPORTED
from paddock.cache.writes import Writer
from paddock.controllers.retry_budget import Patience
from paddock.controllers.sandbox import plan as steps
from paddock.controllers.sandbox.lifecycle import Trigger, move
from paddock.controllers.sandbox.live_config import Applying
from paddock.controllers.sandbox.runtime_events import News
from paddock.controllers.sandbox.status import moved, with_condition
from paddock.controllers.sandbox.templates import TemplateSource
from paddock.engine.controller import After, Done, Gone, Result
from paddock.engine.informer import Informer
from paddock.engine.recorder import Recorder
from paddock.kit.clock import Clock
from paddock.kit.errors import (
    ConflictError,
    NotFoundError,
    PaddockError,
    UnavailableError,
    UnsupportedError,
)
from paddock.resources.kinds.sandbox import (
    CONDITION_PAUSED,
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
from paddock.resources.tokens import TokenSeed
from paddock.resources.transitions import deadlines
from paddock.resources.transitions.pause_strategy import strategy_for
from paddock.runtime.blueprint import blueprint
from paddock.runtime.port import Instance, Runtime

log = logging.getLogger(__name__)

REASON_IMAGE = "ImageUpdating"
"""On the condition Ready (False): it is started anew from another image."""
REASON_IMAGE_KEPT = "ImageUpdateRefused"
_TRANSIENT = (UnavailableError, ConflictError)


class SandboxController:
    """Keeps each sandbox's world as its spec asks."""

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
    ) -> None:
        self._sandboxes = sandboxes
        self._templates = templates
        self._write = write
        self._runtime = runtime
        self._seed = seed
        self._clock = clock
        self._recorder = recorder
        self._patience = Patience(clock)
        self._applying = Applying(templates, runtime, seed, clock)
        self._emptied: set[str] = set()
        """Those that are being reset and whose used life is destroyed, by uid."""
        self.news = News(sandboxes, runtime, clock)
        """What the runtime says unasked; to be subscribed to the Sandbox informer and run."""
        self._perform: dict[
            type[steps.Step], Callable[[Any, Any, Instance | None], Awaitable[Result]]
        ]
        self._perform = {
            steps.Rest: self._rest,
            steps.Protect: self._protect,
            steps.Create: self._create,
            steps.Pause: self._pause,
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
        """Bring one sandbox a step nearer to what is wanted."""
        sandbox = self._sandboxes.get(key)
        if sandbox is None:
            return Gone()
        uid = sandbox.metadata.uid
        assumed = self.news.assumed(sandbox)
        if assumed is not None:
            step = steps.plan(sandbox, assumed, now=self._clock.now())
            if isinstance(step, steps.Rest):
                return await self._rest(sandbox, step, assumed)
        self.news.asked(uid)
        # What is to go goes, whatever it does now.
        instance = None if sandbox.is_deleting else await self._runtime.inspect(uid)
        step = steps.plan(sandbox, instance, now=self._clock.now())
        return await self._perform[type(step)](sandbox, step, instance)

    # ---- steps ---------------------------------------------------------------------------

    async def _rest(self, sandbox: Sandbox, step: steps.Rest, _instance: Instance | None) -> Result:
        await self._applying.apply(sandbox)
        if step.until is None:
            return Done()
        return After(max((step.until - self._clock.now()).total_seconds(), 0.001), step.because)

    async def _protect(self, sandbox: Sandbox, _step: steps.Step, _: Instance | None) -> Result:
        finalizers = (*sandbox.metadata.finalizers, FINALIZER_SANDBOX)
        await self._write.update(with_meta(sandbox, finalizers=finalizers))
        return Done()

    async def _create(self, sandbox: Sandbox, _step: steps.Step, _: Instance | None) -> Result:
        try:
            template = await self._templates.surely_of(sandbox)
            wanted = blueprint(
                sandbox, template, self._seed, checkpoint_id=self._templates.checkpoint_of(sandbox)
            )
            instance = await self._runtime.create(wanted)
            instance = await self._runtime.start(wanted.uid)
        except _TRANSIENT:
            raise
        except PaddockError as error:
            return await self._fail(sandbox, steps.Fail(error.message), None)
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
        status = self._moved(sandbox, trigger, instance)
        await self._write.update_status(structs.replace(sandbox, status=status))
        return Done("runs")

    async def _update_image(
        self, sandbox: Sandbox, step: steps.UpdateImage, instance: Instance | None
    ) -> Result:
        if not (await self._runtime.capabilities()).can_update_image:
            self._recorder.warning(
                sandbox, REASON_IMAGE_KEPT, f"it cannot be given image {step.image} as it runs here"
            )
            return await self._rest(sandbox, steps.Rest(None, "it keeps its image"), instance)
        current = await self._not_ready(sandbox, REASON_IMAGE, f"image {step.image} is started")
        try:
            instance = await self._runtime.update_image(sandbox.metadata.uid, step.image)
        except _TRANSIENT:
            raise
        except PaddockError as error:
            return await self._fail(current, steps.Fail(error.message), None)
        status = self._moved(current, None, instance)
        await self._write.update_status(structs.replace(current, status=status))
        return After(0.001, "runs its new image")

    async def _not_ready(self, sandbox: Sandbox, reason: str, text: str) -> Sandbox:
        """Show that it answers nobody for a while."""
        if not is_true(sandbox.status.conditions, CONDITION_READY):
            return sandbox
        conditions = self._with_condition(
            sandbox, CONDITION_READY, holds=False, reason=reason, text=text
        )
        status = structs.replace(sandbox.status, conditions=conditions)
        return await self._write.update_status(structs.replace(sandbox, status=status))

    async def _pause(self, sandbox: Sandbox, step: steps.Pause, _: Instance | None) -> Result:
        strategy = step.strategy
        uid = sandbox.metadata.uid
        current = sandbox
        try:
            if strategy is PauseStrategy.FREEZE:
                instance = await self._runtime.freeze(uid)
            else:
                current = await self._announce(sandbox, Phase.RUNNING, Trigger.PAUSE_BEGAN)
                stop = strategy is PauseStrategy.STOP
                pausing = self._runtime.stop if stop else self._runtime.hibernate
                instance = await pausing(uid)
        except UnsupportedError as error:
            return await self._refuse_pause(current, error)
        except (ConflictError, NotFoundError):
            raise
        except PaddockError as error:
            if not self._patience.is_over(uid):
                raise
            return await self._refuse_pause(current, error)
        self._patience.forget(uid)
        status = self._moved(current, Trigger.PAUSED, instance)
        status = structs.replace(status, pause_strategy=strategy, paused_at=self._clock.now())
        await self._write.update_status(structs.replace(current, status=status))
        return After(0.001, f"paused: {strategy}")

    async def _refuse_pause(self, sandbox: Sandbox, error: PaddockError) -> Result:
        """Run on where this machine cannot pause so: the flag goes back, a condition says why."""
        is_hopeless = isinstance(error, UnsupportedError)
        reason = REASON_PAUSE_UNSUPPORTED if is_hopeless else REASON_PAUSE_FAILED
        self._recorder.warning(sandbox, reason, error.message)
        conditions = self._with_condition(
            sandbox, CONDITION_PAUSED, holds=False, reason=reason, text=error.message
        )
        # The condition goes first: whoever waits for the pause learns why it failed.
        status = structs.replace(
            sandbox.status,
            phase=move(sandbox.status.phase, Trigger.PAUSE_FAILED),
            message=error.message,
            conditions=conditions,
        )
        written = await self._write.update_status(structs.replace(sandbox, status=status))
        self._patience.forget(sandbox.metadata.uid)
        spec = written.spec
        running = structs.replace(spec, paused=False)
        if spec.claim is not None and spec.claim.timeout_seconds is not None:
            # The pause took its deadline away; it gets another, so that it does end one day.
            seconds = max(spec.claim.timeout_seconds, deadlines.MIN_WAKE_SECONDS)
            running = deadlines.resumed(spec, now=self._clock.now(), seconds=seconds)
        await self._write.update(structs.replace(written, spec=running))
        return Done("cannot be paused that way")

    async def _announce(self, sandbox: Sandbox, phase: Phase, trigger: Trigger) -> Sandbox:
        """Show that a slow transition has begun."""
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
        except NotFoundError as error:
            return await self._fail(current, steps.Fail(error.message), None)
        current = await self._in_time(current)
        paused = current.status.phase in (Phase.PAUSED, Phase.RESUMING)
        status = self._moved(current, Trigger.RESUMED if paused else None, instance)
        await self._write.update_status(structs.replace(current, status=status))
        return After(0.001, "resumed")

    async def _in_time(self, sandbox: Sandbox) -> Sandbox:
        """Give one whose resuming took longer than its timeout another: that is for running."""
        spec, now = sandbox.spec, self._clock.now()
        if not deadlines.is_over(spec, now=now):
            return sandbox
        claimed = spec.claim.timeout_seconds if spec.claim else None
        seconds = claimed or deadlines.MIN_WAKE_SECONDS
        later = deadlines.with_timeout(spec, now=now, seconds=seconds)
        return await self._write.update(structs.replace(sandbox, spec=later))

    async def _fail(self, sandbox: Sandbox, step: steps.Fail, _: Instance | None) -> Result:
        self._recorder.warning(sandbox, "SandboxFailed", step.message)
        status = structs.replace(
            sandbox.status,
            observed_generation=sandbox.metadata.generation,
            phase=move(sandbox.status.phase, Trigger.FAILED),
            message=step.message,
            conditions=self._with_condition(
                sandbox, CONDITION_READY, holds=False, reason="Failed", text=step.message
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
        return Done("pause time has come")

    async def _expire(self, sandbox: Sandbox, _step: steps.Step, _: Instance | None) -> Result:
        # The version makes this safe against an extension that was written meanwhile.
        version = sandbox.metadata.resource_version
        await self._write.delete(sandbox, resource_version=version)
        return Done("shutdown time has come")

    async def _recycle(self, sandbox: Sandbox, _step: steps.Step, _: Instance | None) -> Result:
        # Only a fresh life is a proven reset: what was used is destroyed and made anew in place.
        uid = sandbox.metadata.uid
        current = await self._announce(sandbox, Phase.RUNNING, Trigger.RECYCLE_BEGAN)
        if uid not in self._emptied:
            # Once: what is made anew may take longer than one attempt, and must not go with it.
            self._applying.forget(uid)
            await self._runtime.destroy(uid)
            self._emptied.add(uid)
        template = self._templates.of(current)
        wanted = blueprint(current, template, self._seed, checkpoint_id=None)
        try:
            await self._runtime.create(wanted)
            instance = await self._runtime.start(uid)
        except (*_TRANSIENT, NotFoundError):
            # The former life went while it was looked at: the next attempt finds its place free.
            raise
        except PaddockError as error:
            self._emptied.discard(uid)
            return await self._fail(current, steps.Fail(error.message), None)
        self._emptied.discard(uid)
        status = self._moved(current, Trigger.RECYCLED, instance)
        status = structs.replace(status, recycled_count=status.recycled_count + 1)
        written = await self._write.update_status(structs.replace(current, status=status))
        spec = structs.replace(written.spec, recycle=False)
        await self._write.update(structs.replace(written, spec=spec))
        return Done("recycled")

    async def _destroy(self, sandbox: Sandbox, _step: steps.Step, _: Instance | None) -> Result:
        self._applying.forget(sandbox.metadata.uid)
        self._emptied.discard(sandbox.metadata.uid)
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
