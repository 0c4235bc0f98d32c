"""Follows the first pool while it warms, so that `paddock up` can show the progress.

Nothing depends on it: a pool that takes too long or fails does so in the background.
"""

import asyncio
from collections.abc import Callable

import aiohttp
import msgspec
from msgspec import Struct

from paddock.app.wiring.default_resources import BASE
from paddock.claims.caller import DEFAULT_TEAM
from paddock.kit import bearer
from paddock.settings import Settings

WARM_SECONDS = 30.0
POLL_SECONDS = 0.05
_PATH = f"/apis/paddock.dev/v1alpha1/namespaces/{DEFAULT_TEAM}/sandboxpools/{BASE}"


class PoolProgress(Struct, frozen=True):
    """How many sandboxes of the pool are warm."""

    available: int = 0
    desired: int = 0
    problem: str = ""

    @property
    def is_complete(self) -> bool:
        """Whether all desired sandboxes are warm."""
        return self.available >= self.desired


class _Condition(Struct, frozen=True):
    type: str
    status: str
    message: str = ""


class _Status(Struct, frozen=True, rename="camel"):
    observed_generation: int = 0
    available: int = 0
    allocated: int = 0
    desired: int = 0
    failures: int = 0
    conditions: tuple[_Condition, ...] = ()


class _Pool(Struct, frozen=True):
    status: _Status = _Status()


async def follow(
    settings: Settings, token: str, show: Callable[[PoolProgress], None]
) -> PoolProgress:
    """Show the progress until the pool is warm, fails, or `WARM_SECONDS` have passed."""
    progress = PoolProgress()
    url = f"http://{_host(settings.api_host)}:{settings.api_port}{_PATH}"
    async with aiohttp.ClientSession(headers=bearer.header(token)) as session:
        try:
            async with asyncio.timeout(WARM_SECONDS):
                while True:
                    found = await _read(session, url)
                    if found is not None and found != progress:
                        progress = found
                        show(progress)
                    if found is not None and (found.is_complete or found.problem):
                        return progress
                    await asyncio.sleep(POLL_SECONDS)
        except TimeoutError:
            return progress


async def _read(session: aiohttp.ClientSession, url: str) -> PoolProgress | None:
    try:
        async with session.get(url) as response:
            if response.status == 404:
                # The pool was deleted: there is nothing to wait for.
                return PoolProgress()
            if response.status != 200:
                return None
            status = msgspec.json.decode(await response.read(), type=_Pool).status
    except (aiohttp.ClientError, OSError, msgspec.DecodeError):
        return None
    if not status.observed_generation:
        return None
    problem = ""
    if status.failures:
        messages = [item.message for item in status.conditions if item.type == "Degraded"]
        problem = (messages or [""])[0] or f"{status.failures} sandboxes could not be created"
    # Allocated sandboxes count as desired, too, but need no warming.
    return PoolProgress(status.available, max(status.desired - status.allocated, 0), problem)


def _host(host: str) -> str:
    target = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - compared
    return f"[{target}]" if ":" in target else target
