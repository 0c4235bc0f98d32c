"""Performs the step that `plan` decides for one checkpoint, through the runtime."""

from msgspec import structs

from paddock.cache import indexes
from paddock.cache.writes import Writer
from paddock.claims.quota.stored import HoldingKey, StoredLedger, checkpoint_holders
from paddock.controllers.checkpoint import plan as steps
from paddock.controllers.retry_budget import RetryBudget
from paddock.controllers.sandbox.templates import TemplateSource
from paddock.engine.controller import Done, Gone, RequeueAfter, Result
from paddock.engine.informer import Informer
from paddock.engine.recorder import Recorder
from paddock.kit.clock import Clock
from paddock.kit.errors import (
    ConflictError,
    DiskFullError,
    PaddockError,
    QuotaExceededError,
    UnavailableError,
    UnstorableError,
    UnsupportedError,
)
from paddock.resources.kinds.checkpoint import (
    FINALIZER_CHECKPOINT,
    REASON_NO_SPACE,
    REASON_QUOTA,
    REASON_UNSTORABLE,
    REASON_UNSUPPORTED,
    Checkpoint,
    CheckpointPhase,
    Content,
)
from paddock.resources.kinds.sandbox import CONDITION_READY, Sandbox
from paddock.resources.kinds.template import SandboxTemplate
from paddock.resources.meta import Condition, ConditionStatus, Key, set_condition, with_meta
from paddock.resources.network.effective import effective_network
from paddock.resources.transitions import deadlines
from paddock.runtime.port import Runtime, StoredCheckpoint

_REASONS: tuple[tuple[type[PaddockError], str], ...] = (
    (QuotaExceededError, REASON_QUOTA),
    (DiskFullError, REASON_NO_SPACE),
    (UnstorableError, REASON_UNSTORABLE),
    (UnsupportedError, REASON_UNSUPPORTED),
)


def template_using(templates: Informer[SandboxTemplate], checkpoint: Checkpoint) -> str:
    """Return the name of a template that starts sandboxes from a checkpoint, or an empty string.

    A template of another namespace does not count: it could keep what its team may not.
    """
    home = checkpoint.metadata.namespace
    public_id = checkpoint.status.checkpoint_id or checkpoint.spec.checkpoint_id
    users = templates.view(indexes.RESTORE_FROM, public_id)
    found = (one.metadata.name for one in users if one.metadata.namespace == home)
    return next(found, "")


def _completed(checkpoint: Checkpoint) -> float:
    end = checkpoint.status.completion_time
    return end.timestamp() if end is not None else 0.0


class CheckpointController:
    """Takes, expires and deletes checkpoints."""

    def __init__(
        self,
        *,
        checkpoints: Informer[Checkpoint],
        sandboxes: Informer[Sandbox],
        users: Informer[SandboxTemplate],
        templates: TemplateSource,
        write: Writer,
        runtime: Runtime,
        clock: Clock,
        recorder: Recorder,
        stored: StoredLedger,
    ) -> None:
        self._checkpoints = checkpoints
        self._sandboxes = sandboxes
        self._users = users
        self._templates = templates
        self._write = write
        self._runtime = runtime
        self._clock = clock
        self._recorder = recorder
        self._stored = stored
        self._retry_budget = RetryBudget(clock)

    async def reconcile(self, key: Key) -> Result:
        """Perform the next step for one checkpoint."""
        checkpoint = self._checkpoints.get(key)
        if checkpoint is None:
            return Gone()
        sandbox = self._sandboxes.get(Key(key.namespace, checkpoint.spec.sandbox_name))
        user = template_using(self._users, checkpoint)
        match steps.plan(checkpoint, sandbox, now=self._clock.now(), used_by=user):
            case steps.Wait(until):
                if until is None:
                    return Done()
                return RequeueAfter((until - self._clock.now()).total_seconds(), "waits")
            case steps.AddFinalizer():
                finalizers = (*checkpoint.metadata.finalizers, FINALIZER_CHECKPOINT)
                await self._write.update(with_meta(checkpoint, finalizers=finalizers))
                return Done()
            case steps.TakeSnapshot() if sandbox is not None:
                return await self._take(checkpoint, sandbox)
            case steps.Fail(message):
                return await self._fail(checkpoint, message)
            case steps.KeepInUse(template):
                message = f"it is kept until SandboxTemplate {template} no longer starts from it"
                self._recorder.warning(checkpoint, "CheckpointInUse", message)
                return Done(message)
            case steps.Expire():
                await self._write.delete(checkpoint)
                return Done("TTL has expired")
            case _:
                return await self._delete_data(checkpoint)

    async def _take(self, checkpoint: Checkpoint, sandbox: Sandbox) -> Result:
        try:
            return await self._take_within_quota(checkpoint, sandbox)
        finally:
            # The status, once written, was observed: it counts instead of the reservation.
            self._stored.release((Checkpoint.KIND, checkpoint.metadata.uid))

    async def _store(self, checkpoint: Checkpoint, sandbox: Sandbox) -> StoredCheckpoint:
        """Store the state within the quota; `QuotaExceededError` leaves nothing stored."""
        holding, spec = (Checkpoint.KIND, checkpoint.metadata.uid), checkpoint.spec
        who = checkpoint_holders(checkpoint)
        size = await self._estimate(checkpoint, sandbox) if self._stored.is_limited(who) else 0
        try:
            self._stored.reserve(holding, who, size, *self._base(sandbox))
            stored = await self._runtime.snapshot(
                sandbox.metadata.uid,
                checkpoint.metadata.uid,
                memory=Content.MEMORY in spec.persistent_contents,
                keep_running=spec.keep_running,
            )
            base = (Checkpoint.KIND, stored.base_id)
            self._stored.settle(holding, stored.size_bytes, base, stored.shared_bytes)
        except QuotaExceededError:
            # An earlier attempt, whose result was not written, may have stored it as well.
            await self._runtime.delete_checkpoint(checkpoint.metadata.uid)
            raise
        return stored

    async def _estimate(self, checkpoint: Checkpoint, sandbox: Sandbox) -> int:
        """Return what the checkpoint will need, as far as it can be known: memory and files."""
        usage = await self._runtime.usage(sandbox.metadata.uid)
        if Content.MEMORY not in checkpoint.spec.persistent_contents:
            return usage.disk_used_bytes
        memory = sandbox.status.stored_bytes or usage.memory_used_bytes
        return usage.disk_used_bytes + memory

    def _base(self, sandbox: Sandbox) -> tuple[HoldingKey | None, int]:
        """Return the checkpoint that a new one may share files with, and at most how many bytes.

        That which was taken of the sandbox before, or that which it started from. The size of one
        with memory does not say how large its files are.
        """
        own = [
            item
            for item in self._checkpoints.view(indexes.SANDBOX_NAME, sandbox.key)
            if item.spec.sandbox_uid == sandbox.metadata.uid
        ]
        source = sandbox.spec.restore_from or ""
        started = [
            item
            for item in self._checkpoints.view(indexes.CHECKPOINT_ID, source)
            if indexes.has_checkpoint_id(item, source)
        ]
        known = [
            item
            for item in (*started, *sorted(own, key=_completed))
            if item.status.phase is CheckpointPhase.SUCCEEDED and not item.status.has_memory
        ]
        if not known:
            return None, 0
        return (Checkpoint.KIND, known[-1].metadata.uid), known[-1].status.size_bytes

    async def _take_within_quota(self, checkpoint: Checkpoint, sandbox: Sandbox) -> Result:
        spec = checkpoint.spec
        try:
            stored = await self._store(checkpoint, sandbox)
            template = self._templates.of(sandbox)
        except ConflictError:
            raise
        except PaddockError as error:
            is_final = isinstance(error, DiskFullError) or not isinstance(error, UnavailableError)
            if not is_final and not self._retry_budget.is_spent(checkpoint.metadata.uid):
                raise
            reason = next((name for kind, name in _REASONS if isinstance(error, kind)), "Failed")
            return await self._fail(checkpoint, error.message, reason)
        self._retry_budget.reset(checkpoint.metadata.uid)
        if not spec.keep_running and not sandbox.spec.paused:
            paused = deadlines.paused(sandbox.spec, now=self._clock.now())
            await self._write.update(structs.replace(sandbox, spec=paused))
        status = structs.replace(
            checkpoint.status,
            observed_generation=checkpoint.metadata.generation,
            phase=CheckpointPhase.SUCCEEDED,
            message="",
            checkpoint_id=spec.checkpoint_id or f"snap{checkpoint.metadata.uid.replace('-', '')}",
            has_memory=stored.has_memory,
            size_bytes=stored.size_bytes,
            base_uid=stored.base_id,
            shared_bytes=stored.shared_bytes,
            completion_time=self._clock.now(),
            template=template,
            network=effective_network(sandbox, template.network, None),
            node_name=sandbox.status.node_name,
        )
        await self._write.update_status(structs.replace(checkpoint, status=status))
        return RequeueAfter(0.001, "stored")

    async def _fail(self, checkpoint: Checkpoint, message: str, reason: str = "Failed") -> Result:
        self._retry_budget.reset(checkpoint.metadata.uid)
        self._recorder.warning(checkpoint, "CheckpointFailed", message)
        status = structs.replace(
            checkpoint.status,
            observed_generation=checkpoint.metadata.generation,
            phase=CheckpointPhase.FAILED,
            message=message,
            completion_time=self._clock.now(),
            conditions=set_condition(
                checkpoint.status.conditions,
                Condition(
                    type=CONDITION_READY,
                    status=ConditionStatus.FALSE,
                    reason=reason,
                    message=message,
                    observed_generation=checkpoint.metadata.generation,
                ),
                now=self._clock.now(),
            ),
        )
        await self._write.update_status(structs.replace(checkpoint, status=status))
        return RequeueAfter(0.001, f"failed: {message}")

    async def _delete_data(self, checkpoint: Checkpoint) -> Result:
        await self._runtime.delete_checkpoint(checkpoint.metadata.uid)
        left = tuple(
            name for name in checkpoint.metadata.finalizers if name != FINALIZER_CHECKPOINT
        )
        await self._write.update(with_meta(checkpoint, finalizers=left))
        return Done("data deleted")
