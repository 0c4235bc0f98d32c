"""Wait until caches have caught up with the API server.

Each cache lags behind by its own watch, so a change may be visible in one and not yet in another.
Scenarios written for one cache on virtual time read when all caches are up to date.
"""

import asyncio
import contextlib
from typing import Any

import httpx

from paddock.adapters.replicas import PATH
from paddock.engine.informer import Informer
from paddock.engine.versions import ordinal, version_of
from paddock.resources import codec
from paddock.resources.meta import Resource
from paddock.resources.selectors import LabelSelector

PATIENCE_SECONDS = 100.0


async def caught_up(
    store: Any, informer: Informer[Any], labels: LabelSelector | None = None
) -> tuple[Resource, ...]:
    """Wait until a cache equals the current state of the API server; return that state."""
    page = await store.list(informer.kind, labels=labels)
    there, moment = {item.key for item in page.items}, ordinal(page.version)

    def is_known(item: Resource) -> bool:
        mine = informer.get(item.key)
        seen = version_of(mine) if mine is not None else 0
        return max(seen, informer.seen) >= version_of(item)

    def is_level() -> bool:
        gone = [item for item in informer.all() if item.key not in there]
        return all(map(is_known, page.items)) and all(version_of(item) > moment for item in gone)

    async with asyncio.timeout(PATIENCE_SECONDS):
        while not is_level():
            await asyncio.sleep(0.01)
    return page.items


class Replicas:
    """The replicas of the API, notified of objects as they notify each other."""

    def __init__(self, ports: list[int]) -> None:
        self._urls = [f"http://127.0.0.1:{port}{PATH}" for port in ports]
        self._http = httpx.AsyncClient(
            headers={"Authorization": "Bearer token"}, timeout=PATIENCE_SECONDS
        )
        self._told: dict[str, int] = {}

    async def tell(self, items: tuple[Resource, ...]) -> None:
        """Send these objects to all replicas."""
        news = [item for item in items if self._told.get(item.metadata.uid, 0) < version_of(item)]
        await asyncio.gather(*(self._post(url, item) for url in self._urls for item in news))
        self._told |= {item.metadata.uid: version_of(item) for item in news}

    async def _post(self, url: str, item: Resource) -> None:
        headers = {"x-paddock-kind": item.KIND}
        answer = await self._http.post(url, content=codec.encode(item), headers=headers)
        assert answer.status_code == 204, answer.text

    async def close(self) -> None:
        await self._http.aclose()


async def received_events(ports: list[int], kind: str) -> dict[int, str]:
    """Return the number of events of a kind that each process has received, by port.

    A process that does not serve yet is left out: it will list the current state.
    """
    found: dict[int, str] = {}
    async with httpx.AsyncClient(timeout=PATIENCE_SECONDS) as http:
        for port in ports:
            with contextlib.suppress(httpx.TransportError):
                found[port] = await _received_events(http, port, kind)
    return found


async def _received_events(http: httpx.AsyncClient, port: int, kind: str) -> str:
    """A process that has just started reports nothing before its first list."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            answer = await http.get(f"http://127.0.0.1:{port}/metrics")
            lines = [
                line
                for line in answer.text.splitlines()
                if line.startswith("paddock_informer_events_total{") and f'"{kind}"' in line
            ]
            if lines:
                return "".join(lines)
            await asyncio.sleep(0.1)
