"""Following the first pool while it warms, so that `paddock up` can show how far it is.

Nothing depends on it: a pool that takes too long, or fails, warms or fails in the background.
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
LOOK_SECONDS = 0.05
_PATH = f"/apis/paddock.dev/v1alpha1/namespaces/{DEFAULT_TEAM}/sandboxpools/{BASE}"


class Warmth(Struct, frozen=True):
    """How far the pool is."""

    available: int = 0
    desired: int = 0
    problem: str = ""

    @property
    def is_enough(self) -> bool:
        """Whether everything wanted is there."""
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


async def follow(settings: Settings, token: str, show: Callable[[Warmth], None]) -> Warmth:
    """Show how the pool warms until it is warm, fails, or has had time enough."""
    warmth = Warmth()
    url = f"http://{_host(settings.api_host)}:{settings.api_port}{_PATH}"
    async with aiohttp.ClientSession(headers=bearer.header(token)) as session:
        try:
            async with asyncio.timeout(WARM_SECONDS):
                while True:
                    found = await _look(session, url)
                    if found is not None and found != warmth:
                        warmth = found
                        show(warmth)
                    if found is not None and (found.is_enough or found.problem):
                        return warmth
                    await asyncio.sleep(LOOK_SECONDS)
        except TimeoutError:
            return warmth


async def _look(session: aiohttp.ClientSession, url: str) -> Warmth | None:
    try:
        async with session.get(url) as response:
            if response.status == 404:
                # Somebody has deleted it: there is nothing to wait for.
                return Warmth()
            if response.status != 200:
                return None
            status = msgspec.json.decode(await response.read(), type=_Pool).status
    except (aiohttp.ClientError, OSError, msgspec.DecodeError):
        return None
    if not status.observed_generation:
        return None
    problem = ""
    if status.failures:
        told = [item.message for item in status.conditions if item.type == "Degraded"]
        problem = (told or [""])[0] or f"{status.failures} sandboxes could not be made"
    # Those that are in use are wanted, too, but need no warming.
    return Warmth(status.available, max(status.desired - status.allocated, 0), problem)


def _host(host: str) -> str:
    target = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - compared
    return f"[{target}]" if ":" in target else target
