"""Records in the status why a sandbox has not started yet, while its start is retried.

Without it, a client whose create times out would learn nothing. A status that changes enqueues its
sandbox, so at most one write per `WRITE_SECONDS` keeps the backoff of retries.
"""

import logging

from msgspec import structs

from paddock.cache.writes import Writer
from paddock.kit.clock import Clock
from paddock.kit.errors import PaddockError
from paddock.kit.logs import fields
from paddock.resources.kinds.sandbox import Sandbox

log = logging.getLogger(__name__)

WRITE_SECONDS = 5.0


class StartErrors:
    """The last start error of each sandbox that is being started."""

    def __init__(self, write: Writer, clock: Clock) -> None:
        self._write = write
        self._clock = clock
        self._written_at: dict[str, float] = {}

    async def record(self, sandbox: Sandbox, error: PaddockError) -> None:
        """Write the error as the message of the status, unless it is there already."""
        uid, now = sandbox.metadata.uid, self._clock.monotonic()
        last = self._written_at.get(uid)
        if sandbox.status.message == error.advice:
            return
        if last is not None and now - last < WRITE_SECONDS:
            return
        self._written_at[uid] = now
        status = structs.replace(sandbox.status, message=error.advice)
        try:
            await self._write.update_status(structs.replace(sandbox, status=status))
        except PaddockError as problem:
            # The start is retried anyway, and its next error is recorded.
            log.debug("start error not recorded", extra=fields(error=problem.message))

    def forget(self, uid: str) -> None:
        """Drop what is known of a sandbox that has started or is gone."""
        self._written_at.pop(uid, None)
