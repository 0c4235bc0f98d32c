"""The address, link name and MAC address of each slot. Pure arithmetic.

The fabric owns one private range. Its first usable address is the gateway of every sandbox; slot n
has the n-th address after it, as a /32: only the gateway is on-link. Everything follows from the
slot number, so the owner of a link found in the kernel is known from its name.
"""

from collections.abc import Collection
from ipaddress import IPv4Address, IPv4Network

from msgspec import Struct

from paddock.kit.errors import FieldProblem, InvalidError, QuotaExceededError

_RESERVED = 2
"""The network address and the gateway."""
_INDEX_BASE = 1 << 30
"""First interface index of the fabric, far above those that the kernel assigns."""


class AddressSlot(Struct, frozen=True):
    """One address of the fabric."""

    number: int
    ip: IPv4Address
    link: str
    """Name of the host end of the veth pair."""
    index: int
    """Interface index of the host end. It is chosen here, so that one batch can refer to it."""
    mac: bytes
    """MAC address of the inner end."""


class AddressPlan:
    """The slots of one address range."""

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
        """Number of the link group for links that are about to be deleted."""
        return int(self.gateway) & (_INDEX_BASE - 1)

    @property
    def capacity(self) -> int:
        """Number of sandboxes that fit; the broadcast address is not used."""
        return self.subnet.num_addresses - _RESERVED - 1

    def slot(self, number: int) -> AddressSlot:
        if not 0 <= number < self.capacity:
            raise InvalidError(f"slot {number} is outside 0..{self.capacity - 1} of {self.subnet}")
        ip = self.subnet[number + _RESERVED]
        return AddressSlot(
            number=number,
            ip=ip,
            link=f"{self.link_prefix}{number:x}",
            index=_INDEX_BASE | (int(ip) & (_INDEX_BASE - 1)),
            mac=b"\x02\x70" + ip.packed,
        )

    def slot_of_link(self, name: str) -> AddressSlot | None:
        """Return the slot of a link name, or `None` for a foreign link."""
        digits = name.removeprefix(self.link_prefix)
        if digits == name:
            return None
        try:
            slot = self.slot(int(digits, 16))
        except (ValueError, InvalidError):
            return None
        return slot if slot.link == name else None

    def free_slot(self, taken: Collection[int], after: int) -> AddressSlot:
        """Return the next free slot after `after`, round robin, so that reuse is delayed."""
        if len(taken) >= self.capacity:
            raise QuotaExceededError(
                f"all {self.capacity} addresses of {self.subnet} are in use",
                hint="configure a larger private range for sandboxes",
            )
        number = (after + 1) % self.capacity
        while number in taken:
            number = (number + 1) % self.capacity
        return self.slot(number)


def _invalid(field: str, message: str) -> InvalidError:
    return InvalidError(f"{field}: {message}", problems=[FieldProblem(field, message)])
