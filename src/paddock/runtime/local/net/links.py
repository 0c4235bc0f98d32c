"""Operations of the fabric on links, addresses and routes, in as few datagrams as possible.

A sandbox is attached by a veth pair without a bridge: the inner end has its address as a /32 and
the gateway as its only neighbour, the outer end has a host route back. Both neighbour entries are
permanent, so no ARP is needed. All requests create or replace, so they can be repeated.
"""

import errno
import socket
import struct
import time
from collections.abc import Collection
from ipaddress import IPv4Address, IPv4Network

from msgspec import Struct

from paddock.runtime.local.net import rtnetlink as nl
from paddock.runtime.local.net import shaping
from paddock.runtime.local.net.addresses import AddressSlot

INNER_NAME = "eth0"
INNER_INDEX = 213
"""Fixed, so that a checkpoint finds it again; some kernels use low indexes for their own links."""
GATEWAY_MAC = b"\x02\x70\x00\x00\x00\x01"
"""MAC address of every outer end: a restored sandbox sees the same gateway."""

_IFF_UP = 1
_IFLA_ADDRESS, _IFLA_IFNAME, _IFLA_MTU, _IFLA_LINK = 1, 3, 4, 5
_IFLA_LINKINFO, _IFLA_IFALIAS, _IFLA_AF_SPEC, _IFLA_NET_NS_FD = 18, 20, 26, 28
_IFLA_OPERSTATE, _OPERATIONAL = 16, b"\x06"
_IFLA_GROUP, _IFLA_EXT_MASK, _SKIP_STATS = 27, 29, 8
_IFA_ADDRESS, _IFA_LOCAL = 1, 2
_RTA_DST, _RTA_OIF, _RTA_GATEWAY, _RTA_PRIORITY, _RTA_PREFSRC = 1, 4, 5, 6, 7
_NDA_DST, _NDA_LLADDR, _NUD_PERMANENT = 1, 2, 0x80
_TABLE_MAIN, _ROUTE_PROTOCOL = 254, 213
_UNICAST, _UNREACHABLE = 1, 7
_SCOPE_GLOBAL, _SCOPE_LINK = 0, 253
_LOOPBACK = 1
_BATCH = 64
"""Requests per datagram; their acknowledgements must fit the socket's buffer."""
_MISSING = (errno.ENODEV, errno.ESRCH, errno.EADDRNOTAVAIL)


class Link(Struct, frozen=True):
    """A link as the kernel lists it."""

    index: int
    name: str
    alias: str
    mtu: int
    peer_index: int
    is_running: bool
    """Whether packets pass: the link is up and its operational state is "up"."""


class IpRoute(Struct, frozen=True):
    """An IPv4 route of the main table."""

    destination: IPv4Network
    index: int
    is_ours: bool


def list_links(channel: nl.Channel) -> list[Link]:
    """List every link of the channel's namespace."""
    body = _ifinfo(0) + nl.number(_IFLA_EXT_MASK, _SKIP_STATS)
    return [_parse_link(raw) for raw in channel.dump(nl.RTM_GETLINK, body, "list links")]


def list_routes(channel: nl.Channel) -> list[IpRoute]:
    """List the IPv4 routes of the main table."""
    body = struct.pack("=BBBBBBBBI", socket.AF_INET, 0, 0, 0, 0, 0, 0, 0, 0)
    found = (_parse_route(raw) for raw in channel.dump(nl.RTM_GETROUTE, body, "list routes"))
    return [route for route in found if route is not None]


def list_addresses(channel: nl.Channel) -> list[tuple[int, IPv4Network]]:
    """List IPv4 addresses as (link index, network of the address)."""
    body = struct.pack("=BBBBI", socket.AF_INET, 0, 0, 0, 0)
    found: list[tuple[int, IPv4Network]] = []
    for raw in channel.dump(nl.RTM_GETADDR, body, "list addresses"):
        _, prefix, _, _, index = struct.unpack_from("=BBBBI", raw)
        values = dict(nl.attributes(raw[8:]))
        address = values.get(_IFA_LOCAL, values.get(_IFA_ADDRESS))
        if address is not None:
            found.append((index, IPv4Network((address, prefix), strict=False)))
    return found


def create_pair(channel: nl.Channel, slot: AddressSlot, netns_fd: int, *, mtu: int) -> None:
    """Create the veth pair, with the inner end in the sandbox's namespace."""
    inner = b"".join(
        (
            _ifinfo(INNER_INDEX),
            nl.text(_IFLA_IFNAME, INNER_NAME),
            nl.attribute(_IFLA_ADDRESS, slot.mac),
            nl.number(_IFLA_MTU, mtu),
            nl.number(_IFLA_NET_NS_FD, netns_fd),
        )
    )
    kind = nl.nested(_IFLA_LINKINFO, nl.text(1, "veth"), nl.nested(2, nl.attribute(1, inner)))
    body = b"".join(
        (
            _ifinfo(slot.index),
            nl.text(_IFLA_IFNAME, slot.link),
            nl.attribute(_IFLA_ADDRESS, GATEWAY_MAC),
            nl.number(_IFLA_MTU, mtu),
            kind,
        )
    )
    channel.request(nl.NetlinkRequest(nl.RTM_NEWLINK, nl.CREATE, body, f"create link {slot.link}"))


def configure_outer(
    channel: nl.Channel,
    slot: AddressSlot,
    *,
    uid: str,
    gateway: IPv4Address,
    has_ipv6: bool,
    bits_per_second: int = 0,
) -> None:
    """Configure the outer end: rate, alias, forwarding, no IPv6, up, neighbour and route."""
    families = nl.nested(
        _IFLA_AF_SPEC, _forwarding(), *([_without_ipv6_address()] if has_ipv6 else [])
    )
    put = [
        *shaping.limit(slot.index, bits_per_second),
        (nl.RTM_SETLINK, 0, _ifinfo(slot.index) + nl.text(_IFLA_IFALIAS, uid) + families),
        (nl.RTM_SETLINK, 0, _ifinfo(slot.index, up=True)),
        (nl.RTM_NEWNEIGH, nl.PUT, _neighbour(slot.index, slot.ip, slot.mac)),
        (
            nl.RTM_NEWROUTE,
            nl.PUT,
            _route(
                IPv4Network(slot.ip),
                nl.number(_RTA_OIF, slot.index),
                nl.attribute(_RTA_PREFSRC, gateway.packed),
                scope=_SCOPE_LINK,
            ),
        ),
    ]
    channel.request(*(nl.NetlinkRequest(*one, f"configure link {slot.link}") for one in put))


def configure_inner(
    channel: nl.Channel,
    slot: AddressSlot,
    *,
    gateway: IPv4Address,
    has_ipv6: bool,
    bits_per_second: int = 0,
) -> None:
    """Configure loopback and the inner end; the channel must be in the sandbox's namespace."""
    put = [
        *shaping.limit(INNER_INDEX, bits_per_second),
        (nl.RTM_SETLINK, 0, _ifinfo(_LOOPBACK, up=True)),
        (nl.RTM_SETLINK, 0, _ifinfo(INNER_INDEX, up=True)),
        (nl.RTM_NEWADDR, nl.PUT, _address(INNER_INDEX, slot.ip)),
        (nl.RTM_NEWNEIGH, nl.PUT, _neighbour(INNER_INDEX, gateway, GATEWAY_MAC)),
        (
            nl.RTM_NEWROUTE,
            nl.PUT,
            _route(IPv4Network(gateway), nl.number(_RTA_OIF, INNER_INDEX), scope=_SCOPE_LINK),
        ),
        (
            nl.RTM_NEWROUTE,
            nl.PUT,
            _route(
                IPv4Network("0.0.0.0/0"),
                nl.attribute(_RTA_GATEWAY, gateway.packed),
                nl.number(_RTA_OIF, INNER_INDEX),
            ),
        ),
    ]
    if has_ipv6:
        quiet = _ifinfo(INNER_INDEX) + nl.nested(_IFLA_AF_SPEC, _without_ipv6_address())
        put.insert(0, (nl.RTM_SETLINK, 0, quiet))
    channel.request(*(nl.NetlinkRequest(*one, f"configure {slot.ip} in a sandbox") for one in put))


def wait_running(channel: nl.Channel, slot: AddressSlot, *, timeout_seconds: float = 1.0) -> None:
    """Wait until the outer end transmits packets.

    The end of a pair that came up first gets its carrier with the other end, but drops packets
    until the kernel's link watcher has run, which takes a machine-wide lock: the first packet to a
    new sandbox would be lost. Newer kernels (6.8) run it when the link is queried; for older ones
    the operational state is polled.
    """
    deadline = time.monotonic() + timeout_seconds
    body = _ifinfo(slot.index) + nl.number(_IFLA_EXT_MASK, _SKIP_STATS)
    while True:
        link = _parse_link(channel.get(nl.RTM_GETLINK, body, f"read link {slot.link}"))
        if link.is_running or time.monotonic() > deadline:
            return
        time.sleep(0.0005)


def delete_links(channel: nl.Channel, indexes: Collection[int], *, group: int) -> None:
    """Delete links with their peers, routes and neighbours; missing links are ignored.

    Links are moved into a group and deleted together: the kernel waits for all CPUs to release a
    link (about 20 ms), once per group but once per link for single deletions.
    """
    if not indexes:
        return
    regroup = [
        nl.NetlinkRequest(
            nl.RTM_SETLINK,
            0,
            _ifinfo(index) + nl.number(_IFLA_GROUP, group),
            f"move link {index} to the deletion group",
            _MISSING,
        )
        for index in indexes
    ]
    for at in range(0, len(regroup), _BATCH):
        channel.request(*regroup[at : at + _BATCH])
    body = _ifinfo(0) + nl.number(_IFLA_GROUP, group)
    channel.request(nl.NetlinkRequest(nl.RTM_DELLINK, 0, body, "delete links", _MISSING))


def put_gateway(channel: nl.Channel, gateway: IPv4Address, subnet: IPv4Network) -> None:
    """Add the gateway's address to loopback; make unused addresses unreachable."""
    unreachable = _route(subnet, nl.number(_RTA_PRIORITY, 0x70000000), kind=_UNREACHABLE)
    channel.request(
        nl.NetlinkRequest(nl.RTM_SETLINK, 0, _ifinfo(_LOOPBACK, up=True), "bring loopback up"),
        nl.NetlinkRequest(
            nl.RTM_NEWADDR, nl.PUT, _address(_LOOPBACK, gateway), f"add {gateway} to lo"
        ),
        nl.NetlinkRequest(nl.RTM_NEWROUTE, nl.PUT, unreachable, f"route {subnet}"),
    )


def remove_gateway(channel: nl.Channel, gateway: IPv4Address, subnet: IPv4Network) -> None:
    """Undo `put_gateway`; loopback stays up."""
    unreachable = _route(subnet, nl.number(_RTA_PRIORITY, 0x70000000), kind=_UNREACHABLE)
    address = _address(_LOOPBACK, gateway)
    channel.request(
        nl.NetlinkRequest(
            nl.RTM_DELROUTE, 0, unreachable, f"remove the route to {subnet}", _MISSING
        ),
        nl.NetlinkRequest(nl.RTM_DELADDR, 0, address, f"remove {gateway} from lo", _MISSING),
    )


def _ifinfo(index: int, *, up: bool = False) -> bytes:
    flags = _IFF_UP if up else 0
    return struct.pack("=BBHiII", socket.AF_UNSPEC, 0, 0, index, flags, flags)


def _forwarding() -> bytes:
    return nl.nested(socket.AF_INET, nl.nested(1, nl.number(1, 1)))


def _without_ipv6_address() -> bytes:
    return nl.nested(socket.AF_INET6, nl.attribute(8, b"\x01"))


def _address(index: int, ip: IPv4Address) -> bytes:
    head = struct.pack("=BBBBI", socket.AF_INET, 32, 0, _SCOPE_GLOBAL, index)
    return head + nl.attribute(_IFA_LOCAL, ip.packed) + nl.attribute(_IFA_ADDRESS, ip.packed)


def _neighbour(index: int, ip: IPv4Address, mac: bytes) -> bytes:
    head = struct.pack("=BBHiHBB", socket.AF_INET, 0, 0, index, _NUD_PERMANENT, 0, 0)
    return head + nl.attribute(_NDA_DST, ip.packed) + nl.attribute(_NDA_LLADDR, mac)


def _route(
    destination: IPv4Network, *parts: bytes, scope: int = _SCOPE_GLOBAL, kind: int = _UNICAST
) -> bytes:
    bits = destination.prefixlen
    fixed = (socket.AF_INET, bits, 0, 0, _TABLE_MAIN, _ROUTE_PROTOCOL, scope, kind, 0)
    target = nl.attribute(_RTA_DST, destination.network_address.packed) if bits else b""
    return struct.pack("=BBBBBBBBI", *fixed) + target + b"".join(parts)


def _parse_link(raw: bytes) -> Link:
    _, _, _, index, flags, _ = struct.unpack_from("=BBHiII", raw)
    values = dict(nl.attributes(raw[16:]))

    def number(kind: int) -> int:
        return struct.unpack("=I", values[kind])[0] if kind in values else 0

    return Link(
        index=index,
        name=values.get(_IFLA_IFNAME, b"").rstrip(b"\0").decode(errors="replace"),
        alias=values.get(_IFLA_IFALIAS, b"").rstrip(b"\0").decode(errors="replace"),
        mtu=number(_IFLA_MTU),
        peer_index=number(_IFLA_LINK),
        is_running=bool(flags & _IFF_UP) and values.get(_IFLA_OPERSTATE) == _OPERATIONAL,
    )


def _parse_route(raw: bytes) -> IpRoute | None:
    _, bits, _, _, table, protocol, _, _, _ = struct.unpack_from("=BBBBBBBBI", raw)
    if table != _TABLE_MAIN:
        return None
    values = dict(nl.attributes(raw[12:]))
    destination = IPv4Network((values.get(_RTA_DST, b"\0\0\0\0"), bits))
    index = struct.unpack("=I", values[_RTA_OIF])[0] if _RTA_OIF in values else 0
    return IpRoute(destination=destination, index=index, is_ours=protocol == _ROUTE_PROTOCOL)
