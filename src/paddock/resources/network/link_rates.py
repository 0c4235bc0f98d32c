"""The highest rates of a sandbox's network, of its parts and in effect. Pure."""

from msgspec import Struct

from paddock.resources import quantity
from paddock.resources.kinds.template import Resources


class LinkRates(Struct, frozen=True, kw_only=True):
    """Bits per second; 0 is no limit."""

    ingress: int = 0
    """To the sandbox."""
    egress: int = 0
    """From the sandbox."""

    def limited_by(self, other: "LinkRates") -> "LinkRates":
        """Return the lower rate of each direction."""
        return LinkRates(
            ingress=_lower(self.ingress, other.ingress), egress=_lower(self.egress, other.egress)
        )


def link_rates(resources: Resources | None) -> LinkRates:
    """Return the rates that resources request."""
    if resources is None:
        return LinkRates()
    return LinkRates(
        ingress=quantity.whole(resources.ingress_bandwidth or "0", "ingressBandwidth"),
        egress=quantity.whole(resources.egress_bandwidth or "0", "egressBandwidth"),
    )


def _lower(one: int, other: int) -> int:
    return min((rate for rate in (one, other) if rate), default=0)
