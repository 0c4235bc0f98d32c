"""Wires a federation: signed HTTP to the control planes of other clusters."""

import asyncio

import aiohttp
import msgspec
from msgspec import Struct

from paddock.api.federation.app import Application, Elsewhere, create_app
from paddock.api.internal import Lookup, Problem
from paddock.kit import errors
from paddock.kit.clock import Clock
from paddock.kit.errors import PaddockError, RateLimitedError, UnavailableError
from paddock.manager.environments.queue import Router
from paddock.manager.federation.protocol import SIGNATURE, Peer, Signer, parse_peers
from paddock.manager.federation.service import Federation
from paddock.manager.keys import Keyring
from paddock.manager.service import Manager
from paddock.resources.tokens import TokenSeed
from paddock.settings import Settings


class SignedHttp:
    """Speaks to other control planes."""

    def __init__(self, signer: Signer) -> None:
        self._signer = signer
        self._session: aiohttp.ClientSession | None = None

    async def call(
        self, peer: Peer, method: str, path: str, body: bytes, *, timeout_seconds: float
    ) -> tuple[bytes, dict[str, str]]:
        """Ask a peer and give its answer; its errors are raised here."""
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
                status, told = response.status, response.headers
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise UnavailableError(
                f"cluster {peer.cluster} does not answer", retry_after_seconds=1
            ) from error
        if status >= 300:
            raise _error(peer, data)
        return data, {name.lower(): value for name, value in told.items()}

    async def close(self) -> None:
        """Hang up."""
        if self._session is not None:
            await self._session.close()
            self._session = None


def _error(peer: Peer, data: bytes) -> PaddockError:
    try:
        problem = msgspec.json.decode(data, type=Problem)
    except msgspec.DecodeError:
        return UnavailableError(f"cluster {peer.cluster} gave an answer that cannot be read")
    kind = getattr(errors, problem.kind, None)
    if isinstance(kind, type) and issubclass(kind, PaddockError):
        if issubclass(kind, RateLimitedError):
            return kind(problem.message, retry_after_seconds=problem.retry_after_seconds or 1.0)
        return kind(problem.message)
    return UnavailableError(problem.message)


class Entrances(Struct, frozen=True, kw_only=True):
    """What a control plane serves, whether or not it is part of a federation."""

    e2b: Application
    """E2B's API, for the sandboxes of all clusters."""
    federation: Application | None = None
    """What answers other control planes."""
    elsewhere: Lookup | None = None
    """Finds a sandbox of another cluster, and that cluster's gateway."""


class Federated:
    """A federation and what it speaks through; made only where settings name peers."""

    def __init__(self, settings: Settings, seed: TokenSeed, clock: Clock) -> None:
        self.signer = Signer(seed, settings.cluster_id, clock)
        self.transport = SignedHttp(self.signer)
        self.federation = Federation(
            cluster=settings.cluster_id,
            gateway=settings.federation_gateway or f"{settings.host}:{settings.port}",
            peers=parse_peers(settings.federation_peers, settings.cluster_id),
            transport=self.transport,
            clock=clock,
        )

    async def run(self) -> None:
        """Follow the other clusters until cancelled."""
        try:
            await self.federation.run()
        finally:
            await self.transport.close()


def federated(settings: Settings, seed: TokenSeed, clock: Clock) -> Federated | None:
    """Make the federation that settings ask for; `None` where they name no peers."""
    return Federated(settings, seed, clock) if settings.federation_peers else None


def entrances(
    found: Federated | None, manager: Manager, router: Router, e2b: Application, keyring: Keyring
) -> Entrances:
    """Give what is served; without a federation that is E2B's API alone."""
    if found is None:
        return Entrances(e2b=e2b)
    return Entrances(
        e2b=Elsewhere(e2b, found.federation, keyring),
        federation=create_app(found.federation, found.signer, manager, router, e2b),
        elsewhere=found.federation.find,
    )
