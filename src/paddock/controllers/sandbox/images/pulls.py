"""Gets the images of sandboxes pulled before they are created.

A pull takes seconds to minutes. It runs beside the workers of the controller: the sandbox is
enqueued again when it has ended. A failed pull is retried with a backoff, and does not fail the
sandbox, unless a client waits for it and the registry has refused the image.
"""

import asyncio

from msgspec import Struct, structs

from paddock.cache.writes import Writer
from paddock.controllers.sandbox.images.secrets import credentials_in
from paddock.controllers.sandbox.plan import Fail
from paddock.controllers.sandbox.status import with_condition
from paddock.engine.controller import RequeueAfter
from paddock.engine.queue import WorkQueue
from paddock.engine.reader import Reader
from paddock.engine.recorder import Recorder
from paddock.kit.backoff import Backoff
from paddock.kit.clock import Clock
from paddock.kit.errors import (
    DiskFullError,
    ImageMissingError,
    PaddockError,
    RateLimitedError,
    UnavailableError,
)
from paddock.resources.kinds.checkpoint import REASON_NO_SPACE
from paddock.resources.kinds.sandbox import CONDITION_IMAGE, REASON_PULL_FAILED, Sandbox
from paddock.resources.kinds.template import ImagePullPolicy, SandboxTemplateSpec
from paddock.resources.meta import Key
from paddock.resources.quantity import shown_bytes
from paddock.runtime.blueprint import has_own_image
from paddock.runtime.port import Blueprint, ImagePull, Instance, ReadyImage, Runtime

REASON_PULLING = "Pulling"
REASON_PULLED = "Pulled"
SHOW_SECONDS = 5.0
"""How often the progress of a pull is written."""
_BACKOFF = Backoff(base_seconds=5.0, cap_seconds=300.0, jitter=0.1)


class _Attempt(Struct):
    """The pulls of one sandbox."""

    image: str
    task: asyncio.Task[ReadyImage] | None = None
    failures: int = 0
    retry_at: float = 0.0
    problem: str = ""
    shown_at: float = 0.0


class ImagePulls:
    """The pulls that sandboxes wait for."""

    def __init__(
        self,
        *,
        runtime: Runtime,
        live: Reader,
        write: Writer,
        clock: Clock,
        recorder: Recorder,
    ) -> None:
        self._runtime = runtime
        self._live = live
        self._write = write
        self._clock = clock
        self._recorder = recorder
        self._attempts: dict[str, _Attempt] = {}
        self._queue: WorkQueue[Key] | None = None

    async def run(self, queue: WorkQueue[Key]) -> None:
        """Enqueue sandboxes whose pull has ended, until cancelled."""
        self._queue = queue
        try:
            await asyncio.Event().wait()
        finally:
            self._queue = None
            for uid in tuple(self._attempts):
                self.forget(uid)

    async def create(
        self, sandbox: Sandbox, template: SandboxTemplateSpec, wanted: Blueprint
    ) -> Instance | RequeueAfter | Fail:
        """Create the instance once its image is there.

        Return what to do instead: to wait, or to fail the sandbox.
        """
        attempt = self._attempts.get(wanted.uid)
        if attempt is None and not await self._must_ask(template, wanted):
            return await self._created(sandbox, template, wanted)
        if attempt is None or (attempt.task is None and attempt.retry_at <= self._now()):
            return await self._begin(sandbox, template, wanted)
        if attempt.task is None or not attempt.task.done():
            return await self._wait(sandbox, attempt)
        if attempt.task.cancelled() or (error := attempt.task.exception()) is None:
            return await self._created(sandbox, template, _pulled(wanted, attempt))
        attempt.task = None
        if not isinstance(error, PaddockError):
            raise error
        return await self._failed(sandbox, attempt, error)

    async def _must_ask(self, template: SandboxTemplateSpec, wanted: Blueprint) -> bool:
        """Whether the registry is asked for a newer image before the sandbox is created."""
        if template.image_pull_policy is not ImagePullPolicy.ALWAYS or wanted.checkpoint_id:
            return False
        # A kubelet follows the policy of its pod: pull secrets are not read here.
        return (await self._runtime.capabilities()).can_pull_images

    def forget(self, uid: str) -> None:
        """Drop what is known of a sandbox that has started or is gone."""
        attempt = self._attempts.pop(uid, None)
        if attempt is not None and attempt.task is not None:
            attempt.task.cancel()

    async def _created(
        self, sandbox: Sandbox, template: SandboxTemplateSpec, wanted: Blueprint
    ) -> Instance | RequeueAfter | Fail:
        try:
            return await self._runtime.create(wanted)
        except ImageMissingError as error:
            attempt = self._attempts.get(wanted.uid)
            if attempt is None:
                return await self._begin(sandbox, template, wanted)
            attempt.task = None
            lost = UnavailableError(f"it was removed after it was pulled: {error.message}")
            return await self._failed(sandbox, attempt, lost)

    async def _begin(
        self, sandbox: Sandbox, template: SandboxTemplateSpec, wanted: Blueprint
    ) -> RequeueAfter:
        attempt = self._attempts.setdefault(wanted.uid, _Attempt(wanted.image))
        pull = self._pull(sandbox, template, wanted)
        attempt.task = asyncio.create_task(pull, name=f"pull {wanted.image} for {sandbox.key}")
        attempt.task.add_done_callback(lambda _: self._enqueue(sandbox.key))
        attempt.shown_at = 0.0
        if not attempt.failures:
            self._recorder.normal(sandbox, REASON_PULLING, f"pulling image {wanted.image!r}")
        return await self._wait(sandbox, attempt)

    async def _pull(
        self, sandbox: Sandbox, template: SandboxTemplateSpec, wanted: Blueprint
    ) -> ReadyImage:
        # The credentials are for the image of the template, not for one that a client names.
        names = () if has_own_image(sandbox, template) else template.image_pull_secrets
        credentials = await credentials_in(self._live, sandbox.metadata.namespace, names)
        reference = wanted.image
        if wanted.image_digest and "@" not in reference:
            reference = f"{reference}@{wanted.image_digest}"
        ready = await self._runtime.ensure_image(
            reference,
            team=wanted.image_team,
            policy=template.image_pull_policy,
            credentials=credentials,
        )
        if ready.seconds:
            text = (
                f"pulled image {wanted.image!r} ({ready.digest}) in {ready.seconds:.1f} s: "
                f"{shown_bytes(ready.pulled_bytes)} downloaded"
            )
            self._recorder.normal(sandbox, REASON_PULLED, text)
        return ready

    async def _wait(self, sandbox: Sandbox, attempt: _Attempt) -> RequeueAfter:
        """Show how far the pull is, or why it waits for its next attempt."""
        now = self._now()
        if attempt.task is None:
            return RequeueAfter(max(attempt.retry_at - now, 0.001), attempt.problem)
        if not attempt.shown_at or now - attempt.shown_at >= SHOW_SECONDS:
            attempt.shown_at = now
            pulls = await self._runtime.image_pulls()
            text = f"pulling image {attempt.image!r}{_progress(attempt.image, pulls)}"
            if attempt.problem:  # the reason stays until an attempt succeeds
                return RequeueAfter(SHOW_SECONDS, text)
            await self._show(sandbox, REASON_PULLING, text)
        return RequeueAfter(SHOW_SECONDS, "its image is being pulled")

    async def _failed(
        self, sandbox: Sandbox, attempt: _Attempt, error: PaddockError
    ) -> RequeueAfter | Fail:
        text = f"cannot pull image {attempt.image!r}: {error.message}"
        if sandbox.spec.claim is not None and not _may_pass(error):
            self.forget(sandbox.metadata.uid)
            is_full = isinstance(error, DiskFullError)
            return Fail(text, REASON_NO_SPACE if is_full else REASON_PULL_FAILED)
        attempt.failures += 1
        attempt.retry_at = self._now() + _BACKOFF.delay(attempt.failures)
        if attempt.problem != error.message:
            attempt.problem = error.message
            self._recorder.warning(sandbox, REASON_PULL_FAILED, text)
            await self._show(sandbox, REASON_PULL_FAILED, text)
        return RequeueAfter(max(attempt.retry_at - self._now(), 0.001), text)

    async def _show(self, sandbox: Sandbox, reason: str, text: str) -> None:
        conditions = with_condition(
            sandbox, CONDITION_IMAGE, holds=False, reason=reason, text=text, now=self._clock.now()
        )
        status = structs.replace(sandbox.status, conditions=conditions, message=text)
        if status != sandbox.status:
            await self._write.update_status(structs.replace(sandbox, status=status))

    def _enqueue(self, key: Key) -> None:
        if self._queue is not None:
            self._queue.add(key)

    def _now(self) -> float:
        return self._clock.monotonic()


def _pulled(wanted: Blueprint, attempt: _Attempt) -> Blueprint:
    """Return the blueprint with the version that was pulled."""
    if attempt.task is None or attempt.task.cancelled():
        return wanted
    digest = attempt.task.result().digest
    return structs.replace(wanted, image_digest=digest) if digest else wanted


def _may_pass(error: PaddockError) -> bool:
    """Whether the next attempt may succeed by itself."""
    return isinstance(error, (UnavailableError, RateLimitedError)) and not isinstance(
        error, DiskFullError
    )


def _progress(image: str, pulls: tuple[ImagePull, ...]) -> str:
    for pull in pulls:
        if pull.reference.partition("@")[0] != image.partition("@")[0]:
            continue
        if pull.is_waiting:
            return ": it waits for other pulls of its team"
        if pull.total_bytes:
            return f": {shown_bytes(pull.done_bytes)} of {shown_bytes(pull.total_bytes)}"
    return ""
