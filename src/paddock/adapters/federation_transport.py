"""Signed HTTP between the control planes of a federation."""

import asyncio

import aiohttp

from paddock.adapters.remote_errors import error_from
from paddock.kit.errors import UnavailableError
from paddock.manager.federation.protocol import SIGNATURE, PeerCluster, Signer


class SignedTransport:
    """Calls other control planes with signed requests."""

    def __init__(self, signer: Signer) -> None:
        self._signer = signer
        self._session: aiohttp.ClientSession | None = None

    async def call(
        self, peer: PeerCluster, method: str, path: str, body: bytes, *, timeout_seconds: float
    ) -> tuple[bytes, dict[str, str]]:
        """Return a peer's response body and headers; raise the error that it reports."""
        if self._session is None:
            self._session = aiohttp.ClientSession()
        headers = {SIGNATURE: self._signer.sign(peer.cluster, method, path, body)}
        try:
            async with (
                asyncio.timeout(timeout_seconds),
                self._session.request(
                    method, peer.url + path, data=body, headers=headers
                ) as response,
            ):
                data = await response.read()
                status, received = response.status, response.headers
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise UnavailableError(
                f"cluster {peer.cluster} does not answer", retry_after_seconds=1
            ) from error
        if status >= 300:
            raise error_from(data, f"cluster {peer.cluster}")
        return data, {name.lower(): value for name, value in received.items()}

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None
