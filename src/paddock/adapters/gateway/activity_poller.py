"""Traffic of sandboxes, polled from all gateways by the process that pauses idle sandboxes.

Gateways count their requests. The leader reads the counts right before it decides, so the API
server carries none of this, whatever the number of gateways. If a gateway's counts are lost,
because it is gone or was restarted, all sandboxes count as active now: a sandbox is rather paused
late than while it is in use.
"""

import asyncio
import logging
import math
from datetime import datetime, timedelta

import aiohttp
import msgspec

from paddock.adapters.gateway.admin_server import ActivityCounts
from paddock.adapters.membership import PeerSetting, look_up
from paddock.kit.clock import Clock
from paddock.kit.errors import PaddockError
from paddock.kit.logs import fields
from paddock.store.kubernetes.client import KubernetesClient

log = logging.getLogger(__name__)

POLL_TIMEOUT_SECONDS = 3.0
OVERLAP_SECONDS = 2.0
"""Added to the polled period: the clocks of two processes are read one after the other."""


class ActivityPoller:
    """When each sandbox last had traffic, according to all gateways."""

    def __init__(
        self, setting: PeerSetting, cluster: KubernetesClient | None, clock: Clock
    ) -> None:
        self._setting = setting
        self._cluster = cluster
        self._clock = clock
        self._opened: aiohttp.ClientSession | None = None
        self._polled: dict[str, float] = {}
        """When each gateway last answered."""
        self._last: dict[str, datetime] = {}
        self._since: datetime | None = None

    def since(self) -> datetime:
        """Return the time since which all traffic is known: now, if counts were lost."""
        return self._since or self._clock.now()

    def last(self, uid: str) -> datetime | None:
        """Return when a sandbox last had traffic."""
        return self._last.get(uid)

    def forget(self, uid: str) -> None:
        """Drop a deleted sandbox."""
        self._last.pop(uid, None)

    async def refresh(self) -> None:
        """Read from every gateway the traffic since it was last polled."""
        try:
            urls = await look_up(self._setting, self._cluster)
        except (OSError, PaddockError, msgspec.DecodeError) as error:
            self._lose("gateways cannot be looked up", repr(error))
            return
        known = set(self._polled)
        complete = await asyncio.gather(*(self._poll(url) for url in sorted(urls)))
        if not urls:
            self._lose("no gateway is known", "set `peers` to the gateways")
        elif known - urls or not all(complete):
            missing = [
                url for url, is_there in zip(sorted(urls), complete, strict=True) if not is_there
            ]
            self._lose("a gateway does not answer", ", ".join([*missing, *(known - urls)]))
        elif self._since is None:
            self._since = self._clock.now()
        self._polled = {url: at for url, at in self._polled.items() if url in urls}

    async def _poll(self, url: str) -> bool:
        """Read one gateway's counts; return whether they are complete since the last poll."""
        now = self._clock.monotonic()
        before = self._polled.pop(url, -math.inf)
        within = now - before + OVERLAP_SECONDS
        params = {} if math.isinf(within) else {"within": f"{within:.3f}"}
        try:
            async with (
                asyncio.timeout(POLL_TIMEOUT_SECONDS),
                self._session().get(f"{url}/activity", params=params) as response,
            ):
                response.raise_for_status()
                counts = msgspec.json.decode(await response.read(), type=ActivityCounts)
        except (aiohttp.ClientError, OSError, TimeoutError, msgspec.DecodeError) as error:
            log.info("gateway was not polled", extra=fields(url=url, error=repr(error)))
            return False
        here = self._clock.now()
        for uid, seconds in counts.seen.items():
            at = here - timedelta(seconds=seconds)
            self._last[uid] = max(at, self._last.get(uid, at))
        self._polled[url] = now
        # A gateway that started after the last poll lost the counts of its predecessor.
        return math.isinf(before) or counts.up_seconds >= now - before

    def _lose(self, reason: str, detail: str) -> None:
        if self._since is not None or not self._polled:
            log.warning("idle pauses are suspended", extra=fields(reason=reason, detail=detail))
        self._since = None

    def _session(self) -> aiohttp.ClientSession:
        if self._opened is None:
            self._opened = aiohttp.ClientSession()
        return self._opened

    async def close(self) -> None:
        """Close the connections."""
        if self._opened is not None:
            await self._opened.close()
