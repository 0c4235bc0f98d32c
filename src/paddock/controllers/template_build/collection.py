"""Deletes layers, builds, logs and uploads that nothing needs any more, at intervals."""

import asyncio
import logging

from paddock.builds.files import BuildFiles
from paddock.cache.provider import Provider
from paddock.controllers.template_build.retention import (
    UNUSED_FOR,
    excess_logs,
    unneeded_builds,
    unneeded_layers,
)
from paddock.kit.clock import Clock
from paddock.kit.errors import NotFoundError, PaddockError
from paddock.kit.logs import fields
from paddock.resources.kinds.checkpoint import Checkpoint
from paddock.resources.kinds.template import SandboxTemplate
from paddock.resources.kinds.template_build import TemplateBuild
from paddock.resources.meta import Resource

log = logging.getLogger(__name__)

SWEEP_SECONDS = 60.0
MAX_UPLOAD_BYTES = 20 << 30
"""Of all teams; beyond, the least recently used uploads are deleted."""


class BuildCollector:
    """Deletes what builds have left."""

    def __init__(self, provider: Provider, files: BuildFiles, clock: Clock) -> None:
        self._provider = provider
        self._files = files
        self._clock = clock
        self._suspects: frozenset[str] = frozenset()

    async def run(self) -> None:
        """Sweep until cancelled."""
        await asyncio.to_thread(self._files.uploads.remove_partial)
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            try:
                await self.sweep()
            except (PaddockError, OSError) as error:
                log.warning("builds were not cleaned up", extra=fields(error=str(error)))

    async def sweep(self) -> None:
        """Delete once."""
        templates, builds = self._provider.all(SandboxTemplate), self._provider.all(TemplateBuild)
        # Not on the event loop: there may be many thousands.
        for build in await asyncio.to_thread(unneeded_builds, builds, templates):
            await self._delete(build)
        layers, now = self._provider.all(Checkpoint), self._clock.now()
        for layer in await asyncio.to_thread(unneeded_layers, layers, templates, builds, now=now):
            await self._delete(layer)
        await self._remove_logs({build.metadata.uid for build in builds})
        sizes = await self._files.logs.sizes()
        for uid in await asyncio.to_thread(excess_logs, builds, sizes):
            await self._files.logs.remove(uid)
        await asyncio.to_thread(
            self._files.uploads.remove_unused,
            UNUSED_FOR.total_seconds(),
            max_bytes=MAX_UPLOAD_BYTES,
        )

    async def _delete(self, obj: Resource) -> None:
        try:
            await self._provider.write.delete(obj, resource_version=obj.metadata.resource_version)
        except NotFoundError:
            return
        except PaddockError as error:
            # It is in use, or it is tried again in the next sweep. Others are still deleted.
            log.warning(
                "what no build needs was not deleted",
                extra=fields(kind=obj.KIND, key=str(obj.key), error=error.message),
            )
            return
        log.info("deleted what no build needs", extra=fields(kind=obj.KIND, key=str(obj.key)))

    async def _remove_logs(self, known: set[str]) -> None:
        """Delete logs without a build: after two sweeps, as the cache may lag behind."""
        orphans = await self._files.logs.uids() - known
        for uid in orphans & self._suspects:
            await self._files.logs.remove(uid)
        self._suspects = orphans
