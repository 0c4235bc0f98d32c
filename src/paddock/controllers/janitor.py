"""Deletes instances and checkpoints of the runtime that have no object in the store.

An object is written before the runtime creates anything. What only the runtime has was therefore
left behind by a crash, a lost reply, or a replaced store. It is deleted only after two sweeps, some
time apart, and a live read of the store agree.
"""

import asyncio
import logging

from paddock.cache.provider import Provider
from paddock.kit import metrics
from paddock.kit.errors import PaddockError
from paddock.kit.logs import fields
from paddock.resources.kinds.batch import BatchSandbox
from paddock.resources.kinds.checkpoint import Checkpoint
from paddock.resources.kinds.pool import SandboxPool
from paddock.resources.kinds.sandbox import Sandbox
from paddock.resources.kinds.template import SandboxTemplate, SandboxTemplateSpec
from paddock.resources.kinds.template_build import TemplateBuild
from paddock.resources.meta import Resource
from paddock.resources.transitions.image_pin import pinned
from paddock.runtime.port import Runtime

log = logging.getLogger(__name__)

SWEEP_SECONDS = 30.0
_SWEPT = metrics.counter("paddock_swept_total", "Leftovers removed.", ("kind",))


class Janitor:
    """Deletes orphans of the runtime."""

    def __init__(self, provider: Provider, runtime: Runtime) -> None:
        self._provider = provider
        self._runtime = runtime
        self._suspects: set[str] = set()

    async def run(self) -> None:
        """Sweep periodically until cancelled."""
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            try:
                await self.sweep()
                await self._runtime.need_images(needed_images(self._provider))
            except PaddockError as error:
                log.warning("sweep failed", extra=fields(error=error.message))

    async def sweep(self) -> tuple[str, ...]:
        """Sweep once; return the ids that were deleted."""
        instances = {instance.uid for instance in await self._runtime.instances()}
        stored = {checkpoint.id for checkpoint in await self._runtime.checkpoints()}
        orphans = dict.fromkeys(instances - self._uids(Sandbox), Sandbox)
        orphans |= dict.fromkeys(stored - self._uids(Checkpoint), Checkpoint)
        confirmed = self._suspects & orphans.keys()
        self._suspects = set(orphans) - confirmed
        if confirmed:
            confirmed -= await self._live_uids()
        for uid in sorted(confirmed):
            await self._delete(uid, orphans[uid])
        return tuple(sorted(confirmed))

    async def _delete(self, uid: str, kind: type[Resource]) -> None:
        if kind is Sandbox:
            await self._runtime.destroy(uid)
        else:
            await self._runtime.delete_checkpoint(uid)
        _SWEPT.labels(kind.KIND).inc()
        log.warning("orphan deleted", extra=fields(kind=kind.KIND, uid=uid))

    def _uids(self, kind: type[Resource]) -> set[str]:
        return {obj.metadata.uid for obj in self._provider.all(kind)}

    async def _live_uids(self) -> set[str]:
        found: set[str] = set()
        for kind in (Sandbox, Checkpoint):
            token = ""
            while True:
                page = await self._provider.live.list(kind, limit=1000, continue_token=token)
                found |= {obj.metadata.uid for obj in page.items}
                token = page.continue_token
                if not token:
                    break
        return found


def needed_images(provider: Provider) -> frozenset[str]:
    """Return the images that templates, pools, batches, sandboxes, snapshots and builds name.

    A template with a checkpoint starts from the checkpoint: its image is not needed.
    """
    found: set[str] = set()
    for template in provider.all(SandboxTemplate):
        found |= _images(pinned(template.spec, template.status))
    for pool in provider.all(SandboxPool):
        if pool.spec.template is not None:
            found |= _images(pinned(pool.spec.template, pool.status))
    for batch in provider.all(BatchSandbox):
        found |= _images(batch.spec.template)
    for sandbox in provider.all(Sandbox):
        found |= {*_images(sandbox.spec.template), *filter(None, [sandbox.spec.image])}
    for checkpoint in provider.all(Checkpoint):
        found |= _images(checkpoint.status.template)
    for build in provider.all(TemplateBuild):
        # A tag or an id of a build starts sandboxes, whatever its template names.
        found |= _images(build.status.template)
        if not build.has_ended and build.spec.from_image:
            found.add(build.spec.from_image)
    return frozenset(found)


def _images(template: SandboxTemplateSpec | None) -> set[str]:
    """Return the image of a template, and the version to which it is pinned."""
    if template is None or template.restore_from is not None:
        return set()
    digest = template.image_digest
    return {template.image, *([f"{template.image}@{digest}"] if digest else [])}
