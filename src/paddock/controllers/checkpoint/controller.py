"""Performs the step that `plan` decides for one checkpoint, through the runtime."""

from msgspec import structs

from paddock.cache.writes import Writer
from paddock.controllers.checkpoint import plan as steps
from paddock.controllers.retry_budget import RetryBudget
from paddock.controllers.sandbox.templates import TemplateSource
from paddock.engine.controller import Done, Gone, RequeueAfter, Result
from paddock.engine.informer import Informer
from paddock.engine.recorder import Recorder
from paddock.kit.clock import Clock
from paddock.kit.errors import ConflictError, PaddockError, UnavailableError, UnsupportedError
from paddock.resources.kinds.checkpoint import (
    FINALIZER_CHECKPOINT,
    REASON_UNSUPPORTED,
    Checkpoint,
    CheckpointPhase,
    Content,
)
from paddock.resources.kinds.sandbox import CONDITION_READY, Sandbox
from paddock.resources.meta import Condition, ConditionStatus, Key, set_condition, with_meta
from paddock.resources.network.effective import effective_network
from paddock.resources.transitions import deadlines
from paddock.runtime.port import Runtime


class CheckpointController:
    """Takes, expires and deletes checkpoints."""

    def __init__(
        self,
        *,
        checkpoints: Informer[Checkpoint],
        sandboxes: Informer[Sandbox],
        templates: TemplateSource,
        write: Writer,
        runtime: Runtime,
        clock: Clock,
        recorder: Recorder,
    ) -> None:
        self._checkpoints = checkpoints
        self._sandboxes = sandboxes
        self._templates = templates
        self._write = write
        self._runtime = runtime
        self._clock = clock
        self._recorder = recorder
        self._retry_budget = RetryBudget(clock)

    async def reconcile(self, key: Key) -> Result:
        """Perform the next step for one checkpoint."""
        checkpoint = self._checkpoints.get(key)
        if checkpoint is None:
            return Gone()
        sandbox = self._sandboxes.get(Key(key.namespace, checkpoint.spec.sandbox_name))
        match steps.plan(checkpoint, sandbox, now=self._clock.now()):
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
            case steps.Expire():
                await self._write.delete(checkpoint)
                return Done("TTL has expired")
            case _:
                return await self._delete_data(checkpoint)

    async def _take(self, checkpoint: Checkpoint, sandbox: Sandbox) -> Result:
        spec = checkpoint.spec
        try:
            stored = await self._runtime.snapshot(
                sandbox.metadata.uid,
                checkpoint.metadata.uid,
                memory=Content.MEMORY in spec.persistent_contents,
                keep_running=spec.keep_running,
            )
            template = self._templates.of(sandbox)
        except ConflictError:
            raise
        except UnavailableError as error:
            if not self._retry_budget.is_spent(checkpoint.metadata.uid):
                raise
            return await self._fail(checkpoint, error.message)
        except UnsupportedError as error:
            return await self._fail(checkpoint, error.message, REASON_UNSUPPORTED)
        except PaddockError as error:
            return await self._fail(checkpoint, error.message)
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
