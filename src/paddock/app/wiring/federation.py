"""Wires a federation: the service, and signed HTTP to the control planes of other clusters."""

from paddock.adapters.federation_transport import SignedTransport
from paddock.kit.clock import Clock
from paddock.manager.federation.protocol import Signer, parse_peers
from paddock.manager.federation.service import Federation
from paddock.resources.tokens import TokenSeed
from paddock.settings import Settings


class FederationParts:
    """A federation with its signer and its transport."""

    def __init__(self, settings: Settings, seed: TokenSeed, clock: Clock) -> None:
        self.signer = Signer(seed, settings.cluster_id, clock)
        self.transport = SignedTransport(self.signer)
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


def connect(settings: Settings, seed: TokenSeed, clock: Clock) -> FederationParts | None:
    """Wire the federation, or return None if settings name no peers."""
    return FederationParts(settings, seed, clock) if settings.federation_peers else None
