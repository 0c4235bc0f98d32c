"""Signed file URLs: which sandbox signed them, and whether they are valid.

A URL below the shared address does not name a sandbox; its sandbox is the one whose token made
the signature. The search costs one hash per sandbox, so it runs in slices, few searches at a
time, and results are cached.
"""

import asyncio
import hmac
from collections import OrderedDict

from paddock.gateway.routing.addressing import SignedFile
from paddock.gateway.routing.routes import Route, RouteTable
from paddock.kit.clock import Clock
from paddock.kit.errors import RateLimitedError
from paddock.resources.tokens import TokenSeed, file_signature

_SLICE = 200
_SEARCHES = 4
_CACHE_SIZE = 1024


class Signatures:
    """Verifies signed file URLs and finds their sandboxes."""

    def __init__(self, routes: RouteTable, seed: TokenSeed, clock: Clock) -> None:
        self._routes = routes
        self._seed = seed
        self._clock = clock
        self._found: OrderedDict[SignedFile, str] = OrderedDict()
        self._searching = 0

    def is_valid(self, route: Route, wanted: SignedFile) -> bool:
        """Whether a signature was made by this sandbox's token and has not expired."""
        if wanted.expiration is not None and wanted.expiration < self._clock.now().timestamp():
            return False
        return self._is_signed_by(route, wanted)

    def _is_signed_by(self, route: Route, wanted: SignedFile) -> bool:
        signature = file_signature(
            self._seed.access_token(route.id, route.access_token_hash),
            path=wanted.path,
            operation=wanted.operation,
            user=wanted.user,
            expiration=wanted.expiration,
        )
        return hmac.compare_digest(signature.encode(), wanted.signature.encode())

    def cached(self, wanted: SignedFile) -> Route | None:
        """Return the route for a signature found earlier, or None."""
        sandbox_id = self._found.get(wanted)
        return None if sandbox_id is None else self._routes.get(sandbox_id)

    async def search(self, wanted: SignedFile) -> Route | None:
        """Search for the sandbox whose token made a signature."""
        if self._searching >= _SEARCHES:
            raise RateLimitedError("too many signed URLs are being looked up")
        self._searching += 1
        try:
            for number, route in enumerate(self._routes.all(), start=1):
                if self._is_signed_by(route, wanted):
                    self._remember(wanted, route)
                    return self._routes.get(route.id)
                if number % _SLICE == 0:
                    await asyncio.sleep(0)
        finally:
            self._searching -= 1
        return None

    def _remember(self, wanted: SignedFile, route: Route) -> None:
        self._found[wanted] = route.id
        while len(self._found) > _CACHE_SIZE:
            self._found.popitem(last=False)
