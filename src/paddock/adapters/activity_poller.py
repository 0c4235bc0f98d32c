"""What a leader knows of sandboxes' traffic: it asks every gateway, and nobody else is told.

Gateways count their own requests anyway; the one process that pauses the idle reads that from them
right before it decides. So nothing of it goes through the API server, however many there are. What
a gateway cannot say any more, because it is gone or was started anew, counts as traffic now: a
sandbox is paused late rather than in the middle of something.
"""

import asyncio
import logging
import math
from datetime import datetime, timedelta

import aiohttp
import msgspec

from paddock.adapters.gateway_admin import Counted
from paddock.adapters.membership import Named, look_up
from paddock.kit.clock import Clock
from paddock.kit.errors import PaddockError
from paddock.kit.logs import fields
from paddock.store.kubernetes.client import KubernetesClient

log = logging.getLogger(__name__)

ASK_SECONDS = 3.0
MARGIN_SECONDS = 2.0
"""Asked for twice rather than missed: clocks of two processes are read one after the other."""


class Traffic:
    """When each sandbox last had traffic, by what all gateways counted."""

    def __init__(self, named: Named, cluster: KubernetesClient | None, clock: Clock) -> None:
        self._named = named
        self._cluster = cluster
        self._clock = clock
        self._opened: aiohttp.ClientSession | None = None
        self._asked: dict[str, float] = {}
        """When each gateway answered last."""
        self._last: dict[str, datetime] = {}
        self._since: datetime | None = None

    def since(self) -> datetime:
        """Say since when every request is known of; now, where not even that is sure."""
        return self._since or self._clock.now()

    def last(self, uid: str) -> datetime | None:
        """Say when a sandbox last had traffic."""
        return self._last.get(uid)

    def forget(self, uid: str) -> None:
        """Drop a sandbox that is gone."""
        self._last.pop(uid, None)

    async def refresh(self) -> None:
        """Ask every gateway what happened since it was last asked."""
        try:
            urls = await look_up(self._named, self._cluster)
        except (OSError, PaddockError, msgspec.DecodeError) as error:
            self._lose("gateways cannot be looked up", repr(error))
            return
        known = set(self._asked)
        answers = await asyncio.gather(*(self._ask(url) for url in sorted(urls)))
        if not urls:
            self._lose("no gateway is known", "the setting `peers` names them")
        elif known - urls or not all(answers):
            silent = [
                url for url, is_there in zip(sorted(urls), answers, strict=True) if not is_there
            ]
            self._lose("a gateway does not answer", ", ".join([*silent, *(known - urls)]))
        elif self._since is None:
            self._since = self._clock.now()
        self._asked = {url: at for url, at in self._asked.items() if url in urls}

    async def _ask(self, url: str) -> bool:
        """Take one gateway's answer in; says whether it knows all since it was last asked."""
        now = self._clock.monotonic()
        before = self._asked.pop(url, -math.inf)
        within = now - before + MARGIN_SECONDS
        asked = {} if math.isinf(within) else {"within": f"{within:.3f}"}
        try:
            async with (
                asyncio.timeout(ASK_SECONDS),
                self._session().get(f"{url}/activity", params=asked) as response,
            ):
                response.raise_for_status()
                counted = msgspec.json.decode(await response.read(), type=Counted)
        except (aiohttp.ClientError, OSError, TimeoutError, msgspec.DecodeError) as error:
            log.info("gateway not asked", extra=fields(url=url, error=repr(error)))
            return False
        here = self._clock.now()
        for uid, seconds in counted.seen.items():
            at = here - timedelta(seconds=seconds)
            self._last[uid] = max(at, self._last.get(uid, at))
        self._asked[url] = now
        # One that began after it was last asked has forgotten what its forerunner saw.
        return math.isinf(before) or counted.up_seconds >= now - before

    def _lose(self, what: str, detail: str) -> None:
        if self._since is not None or not self._asked:
            log.warning("idle pauses wait", extra=fields(because=what, detail=detail))
        self._since = None

    def _session(self) -> aiohttp.ClientSession:
        if self._opened is None:
            self._opened = aiohttp.ClientSession()
        return self._opened

    async def close(self) -> None:
        """Hang up."""
        if self._opened is not None:
            await self._opened.close()
