"""Keeps the reserve of the disk: every second, and by ending a sandbox if nothing else helps."""

import asyncio
import logging
from collections.abc import Callable, Iterable

from paddock.kit.errors import PaddockError
from paddock.kit.logs import fields
from paddock.runtime.local.node.node_context import NodeContext
from paddock.runtime.local.sandbox.lifecycle import UP
from paddock.runtime.local.sandbox.sandbox import NodeSandbox

log = logging.getLogger(__name__)

_PERIOD_SECONDS = 1.0
REASON = (
    "it wrote to a disk on which only half of the reserve is left, and this storage cannot limit "
    "what it writes; delete sandboxes, checkpoints or images, or enlarge the disk"
)


class DiskWatch:
    """Watches the disk of a node's storage."""

    def __init__(
        self, context: NodeContext, sandboxes: Callable[[], Iterable[NodeSandbox]]
    ) -> None:
        self._context = context
        self._sandboxes = sandboxes

    async def run(self) -> None:
        """Check until cancelled."""
        while True:
            await asyncio.sleep(_PERIOD_SECONDS)
            try:
                await self.check()
            except PaddockError as error:
                log.warning("disk could not be checked", extra=fields(reason=error.message))
            except Exception:
                log.exception("disk could not be checked")

    async def check(self) -> None:
        """Keep the reserve once."""
        context = self._context
        name = await context.run_in_thread(context.storage.keep_reserve)
        if name is None or not context.cgroups.is_usable:
            return
        for sandbox in self._sandboxes():
            if sandbox.resource_name == name and sandbox.record.state in UP:
                log.warning("sandbox killed for disk space", extra=fields(sandbox=sandbox.uid))
                sandbox.kill_reason = REASON
                context.cgroups.kill(sandbox.cgroup)
