"""The port through which the controller learns of requests that a hibernation would lose.

A connection to a sandbox does not outlive hibernation. Requests that are carried over a pause wake
the sandbox at once, so a sandbox with such requests is only frozen.
"""

from typing import Protocol

from paddock.resources.kinds.sandbox import Sandbox


class WaitingRequests(Protocol):
    """Knows the requests that wait until a sandbox runs again."""

    async def has_requests(self, sandbox: Sandbox) -> bool:
        """Announce the pause to all gateways; return whether requests wait for its end.

        After `False`, no request is sent to the sandbox until it has been resumed.
        """
        ...


class NoWaitingRequests:
    """For roles whose runtime never hibernates, or that no gateway reports to."""

    async def has_requests(self, sandbox: Sandbox) -> bool:
        return False


_: type[WaitingRequests] = NoWaitingRequests
