"""Wrong API keys and bearer tokens are slowed down, by client address.

Each address can send some wrong credentials at once and then one every few seconds; until then,
its credentials are refused without being checked, so that guessing has a bounded rate. Whoever
shares an address with the guesser is not locked out: a credential that was accepted from an
address before is always checked there, and a new one is checked in the next free moment.

Both APIs share one `LoginLimits`. State is in memory, and bounded.
"""

import hashlib
import ipaddress
import logging
from collections import OrderedDict
from collections.abc import Callable
from typing import TypeVar

from msgspec import Struct
from starlette.requests import HTTPConnection

from paddock.api.call_limits import CallLimits
from paddock.kit.addresses import client_network
from paddock.kit.clock import Clock
from paddock.kit.errors import RateLimitedError, UnauthenticatedError
from paddock.kit.logs import fields

log = logging.getLogger(__name__)

CLIENT_HEADER = "x-real-ip"
"""The address of the client, as a gateway reports it. Gateways drop what clients send."""
MAX_ADDRESSES = 10_000
MAX_ACCEPTED = 10_000
"""Accepted pairs of address and credential that are remembered."""
T = TypeVar("T")


class _Failures(Struct):
    left: float
    """How many wrong credentials are still checked; grows with time."""
    counted_at: float
    is_reported: bool = False


class LoginLimits:
    """Counts wrong credentials by client address."""

    def __init__(
        self,
        clock: Clock,
        *,
        burst: int = 20,
        interval_seconds: float = 3.0,
        calls: CallLimits | None = None,
    ) -> None:
        """`burst` wrong credentials are checked at once, then one per interval. 0: no limit.

        `calls` limits those with right ones.
        """
        self.calls = calls or CallLimits(clock)
        self._now = clock.monotonic
        self._burst = burst
        self._interval = interval_seconds
        self._failures: OrderedDict[str, _Failures] = OrderedDict()
        self._accepted: OrderedDict[tuple[str, bytes], None] = OrderedDict()

    def check(self, connection: HTTPConnection, credential: str, verify: Callable[[], T]) -> T:
        """Return what `verify` returns, and count if it raises `UnauthenticatedError`.

        Raises `RateLimitedError`, without verifying, if the address sent too many wrong ones.
        """
        address = limited_address(connection)
        if address is None or not self._burst:
            return verify()
        pair = (address, hashlib.sha256(credential.encode("utf-8", "surrogateescape")).digest())
        failures = self._current(address)
        if failures is not None and failures.left < 1 and pair not in self._accepted:
            raise RateLimitedError(
                "too many wrong API keys or tokens were sent from this address",
                retry_after_seconds=max((1 - failures.left) * self._interval, 1.0),
                hint="check the key, then try again",
            )
        try:
            result = verify()
        except UnauthenticatedError:
            self._count(address)
            raise
        self._remember(pair)
        return result

    def _current(self, address: str) -> _Failures | None:
        """Return the failures of an address as of now, or None if there are none."""
        failures = self._failures.get(address)
        if failures is None:
            return None
        now = self._now()
        failures.left += (now - failures.counted_at) / self._interval
        failures.counted_at = now
        if failures.left < self._burst:
            return failures
        del self._failures[address]
        return None

    def _count(self, address: str) -> None:
        failures = self._current(address)
        if failures is None:
            failures = self._failures[address] = _Failures(float(self._burst), self._now())
            if len(self._failures) > MAX_ADDRESSES:
                self._failures.popitem(last=False)
        failures.left -= 1
        self._failures.move_to_end(address)
        if failures.left < 1 and not failures.is_reported:
            failures.is_reported = True
            log.warning("wrong credentials are slowed down", extra=fields(address=address))

    def _remember(self, pair: tuple[str, bytes]) -> None:
        self._accepted[pair] = None
        self._accepted.move_to_end(pair)
        if len(self._accepted) > MAX_ACCEPTED:
            self._accepted.popitem(last=False)


def limited_address(connection: HTTPConnection) -> str | None:
    """Return what a client counts as. None: a process of this machine, such as a gateway, calls
    directly; gateways must not be slowed down by others."""
    reported = connection.headers.get(CLIENT_HEADER)
    if reported is not None:
        return client_network(reported)
    peer = connection.client.host if connection.client else ""
    try:
        is_local = ipaddress.ip_address(peer).is_loopback
    except ValueError:
        is_local = True
    return None if is_local else client_network(peer)
