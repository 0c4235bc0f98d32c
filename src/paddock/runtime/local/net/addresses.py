"""Which address, link name and hardware address a slot has. Pure arithmetic.

The fabric owns one private range. Its first usable address is the gateway, known to every
sandbox; slot n has the n-th address after it, as a /32: nothing is on-link but the gateway.
Everything follows from the slot, so a link found in the kernel tells who it belongs to.
"""

from collections.abc import Collection
from ipaddress import IPv4Address, IPv4Network

from msgspec import Struct

from paddock.kit.errors import FieldProblem, InvalidError, QuotaExceededError

_RESERVED = 2
"""The network's own address and the gateway."""
_INDEX_BASE = 1 << 30
"""Interface indexes of ours start here, far above what the kernel hands out by itself."""


class Slot(Struct, frozen=True):
    """One place in the fabric."""

    number: int
    ip: IPv4Address
    link: str
    """Name of the end on the host."""
    index: int
    """Interface index of the end on the host: chosen by us, so that one batch can name it."""
    mac: bytes
    """Hardware address of the end inside."""


class AddressPlan:
    """Slots of one range."""

    def __init__(self, subnet: str, link_prefix: str) -> None:
        try:
            self.subnet = IPv4Network(subnet)
        except ValueError as error:
            raise _invalid("subnet", f"{subnet!r} is not an IPv4 network ({error})") from error
        if not self.subnet.is_private or not 8 <= self.subnet.prefixlen <= 24:
            raise _invalid("subnet", f"{subnet!r} is not a private range between /8 and /24")
        if not 1 <= len(link_prefix) <= 8 or not link_prefix.isascii() or "/" in link_prefix:
            raise _invalid("link_prefix", f"{link_prefix!r} is not 1 to 8 plain characters")
        self.link_prefix = link_prefix
        self.gateway = self.subnet[1]

    @property
    def group(self) -> int:
        """Number of the link group in which links wait for their removal."""
        return int(self.gateway) & (_INDEX_BASE - 1)

    @property
    def capacity(self) -> int:
        """How many sandboxes fit; the broadcast address is left alone."""
        return self.subnet.num_addresses - _RESERVED - 1

    def slot(self, number: int) -> Slot:
        """Give a slot by number."""
        if not 0 <= number < self.capacity:
            raise InvalidError(f"slot {number} is outside 0..{self.capacity - 1} of {self.subnet}")
        ip = self.subnet[number + _RESERVED]
        return Slot(
            number=number,
            ip=ip,
            link=f"{self.link_prefix}{number:x}",
            index=_INDEX_BASE | (int(ip) & (_INDEX_BASE - 1)),
            mac=b"\x02\x70" + ip.packed,
        )

    def slot_of_link(self, name: str) -> Slot | None:
        """Recognise a link of ours by its name."""
        digits = name.removeprefix(self.link_prefix)
        if digits == name:
            return None
        try:
            slot = self.slot(int(digits, 16))
        except (ValueError, InvalidError):
            return None
        return slot if slot.link == name else None

    def free_slot(self, taken: Collection[int], after: int) -> Slot:
        """Give the next free slot round the circle, so that an address rests before its reuse."""
        if len(taken) >= self.capacity:
            raise QuotaExceededError(
                f"all {self.capacity} addresses of {self.subnet} are taken",
                hint="configure a larger private range for sandboxes",
            )
        number = (after + 1) % self.capacity
        while number in taken:
            number = (number + 1) % self.capacity
        return self.slot(number)


def _invalid(field: str, message: str) -> InvalidError:
    return InvalidError(f"{field}: {message}", problems=[FieldProblem(field, message)])
