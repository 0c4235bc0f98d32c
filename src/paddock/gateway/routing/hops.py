"""Requests between gateways of several clusters: signed, so that they are recognised.

The first gateway has applied the rules for web pages. The second one gets every request by path,
whatever address the client used, so it must not apply them again.
"""

from paddock.resources.tokens import TokenSeed

_PURPOSE = "gateway-hop"


class GatewayHops:
    """Signs requests to other gateways, and recognises theirs. All share one seed."""

    def __init__(self, seed: TokenSeed) -> None:
        self._seed = seed

    def sign(self, sandbox_id: str) -> str:
        """Return the signature of requests to a sandbox of another cluster."""
        return self._seed.sign(_PURPOSE, sandbox_id.encode())

    def is_signed(self, sandbox_id: str, signature: str | None) -> bool:
        """Whether another gateway has sent a request."""
        if signature is None:
            return False
        return self._seed.is_signed(_PURPOSE, sandbox_id.encode(), signature)
