"""Rates of links, by the queueing discipline `tbf` (token bucket filter) of the kernel.

Each end of a veth pair limits what it sends: the outer end the traffic to the sandbox, the inner
end the traffic of the sandbox. Root in a sandbox has no CAP_NET_ADMIN, so it cannot remove that.
A discipline is set before its link is up: on a link that is up the kernel waits for all CPUs.
"""

import errno
import os
import socket
import struct

from paddock.runtime.local.net import netns
from paddock.runtime.local.net import rtnetlink as nl

_TCA_KIND, _TCA_OPTIONS = 1, 2
_TBF_PARMS, _TBF_RATE64, _TBF_BURST = 1, 4, 6
_ROOT, _HANDLE = 0xFFFFFFFF, 0x10000
_ETHERNET = 1
_LOOPBACK = 1
_LEAST_BURST = 128 << 10
"""Bytes: twice the largest packet of segmentation offload, which would be split otherwise."""
_BURST_SECONDS, _QUEUE_SECONDS = 0.01, 0.05
_MAX_U32 = 0xFFFFFFFF
_ABSENT = (errno.ENOENT, errno.EINVAL)

Message = tuple[int, int, bytes]


def limit(index: int, bits_per_second: int) -> tuple[Message, ...]:
    """Return the request that sets the rate of a link; none for 0."""
    if not bits_per_second:
        return ()
    rate = max(1, bits_per_second // 8)
    burst = min(_MAX_U32 // 4, max(_LEAST_BURST, int(rate * _BURST_SECONDS)))
    queue = min(_MAX_U32, burst + int(rate * _QUEUE_SECONDS))
    spec = struct.pack("=BBHhHI", 0, _ETHERNET, 0, 0, 0, min(rate, _MAX_U32))
    parms = spec + bytes(len(spec)) + struct.pack("=III", queue, 0, 0)
    options = nl.nested(
        _TCA_OPTIONS,
        nl.attribute(_TBF_PARMS, parms),
        nl.attribute(_TBF_RATE64, struct.pack("=Q", rate)),
        nl.number(_TBF_BURST, burst),
    )
    body = _head(index, _HANDLE) + nl.text(_TCA_KIND, "tbf") + options
    return ((nl.RTM_NEWQDISC, nl.PUT, body),)


def set_rate(channel: nl.Channel, index: int, bits_per_second: int) -> None:
    """Change the rate of a link that is up; 0 removes the limit."""
    what = f"limit the rate of link {index}"
    for message in limit(index, bits_per_second):
        channel.request(nl.NetlinkRequest(*message, what))
        return
    channel.request(nl.NetlinkRequest(nl.RTM_DELQDISC, 0, _head(index, 0), what, _ABSENT))


def unavailable_reason() -> str:
    """Return why this kernel cannot limit rates, or an empty string; tried in a new namespace."""
    there = netns.create()
    try:
        with nl.Channel(there) as channel:
            set_rate(channel, _LOOPBACK, 8_000_000)
    except nl.NetlinkError as error:
        if error.errno == errno.ENOENT:
            return "the kernel lacks the queueing discipline tbf (`modprobe sch_tbf`)"
        return f"the kernel refuses the queueing discipline tbf: {error}"
    finally:
        os.close(there)
    return ""


def _head(index: int, handle: int) -> bytes:
    return struct.pack("=BBHiIII", socket.AF_UNSPEC, 0, 0, index, handle, _ROOT, 0)
