"""Raw rtnetlink: message encoding, one socket, descriptive errors.

Only the messages that the fabric needs. A `Channel` sends any number of requests in one datagram
and waits for the acknowledgement of each; the kernel processes them in order and continues after a
failure. `links` builds the requests.
"""

import errno
import os
import socket
import struct
from collections.abc import Iterator

from msgspec import Struct

from paddock.runtime.local.net.netns import socket_in

RTM_NEWLINK, RTM_DELLINK, RTM_GETLINK, RTM_SETLINK = 16, 17, 18, 19
RTM_NEWADDR, RTM_DELADDR, RTM_GETADDR = 20, 21, 22
RTM_NEWROUTE, RTM_DELROUTE, RTM_GETROUTE = 24, 25, 26
RTM_NEWNEIGH = 28
RTM_NEWQDISC, RTM_DELQDISC = 36, 37

NLM_F_REQUEST, NLM_F_ACK, NLM_F_DUMP_INTR, NLM_F_DUMP = 0x1, 0x4, 0x10, 0x300
NLM_F_REPLACE, NLM_F_EXCL, NLM_F_CREATE = 0x100, 0x200, 0x400
CREATE = NLM_F_CREATE | NLM_F_EXCL
PUT = NLM_F_CREATE | NLM_F_REPLACE

_NLMSG_ERROR, _NLMSG_DONE = 2, 3
_ACK_TLVS = 0x200
_SOL_NETLINK, _NETLINK_CAP_ACK, _NETLINK_EXT_ACK = 270, 10, 11
_HEADER = struct.Struct("=IHHII")
_ATTRIBUTE = struct.Struct("=HH")
_TYPE_MASK = 0x3FFF


class NetlinkRequest(Struct, frozen=True):
    """One message, with a description for errors."""

    kind: int
    flags: int
    body: bytes
    what: str
    """What the request does, as it follows `cannot` in an error message."""
    tolerate: tuple[int, ...] = ()
    """Error numbers that are ignored."""


class NetlinkError(OSError):
    """The kernel rejected a request."""

    def __init__(self, code: int, what: str, detail: str = "") -> None:
        explained = f": {detail}" if detail else ""
        super().__init__(code, f"cannot {what}: {os.strerror(code)}{explained}")


def attribute(kind: int, value: bytes) -> bytes:
    """Pack one attribute, padded to four bytes."""
    size = _ATTRIBUTE.size + len(value)
    return _ATTRIBUTE.pack(size, kind) + value + bytes(-size % 4)


def nested(kind: int, *parts: bytes) -> bytes:
    """Pack attributes inside an attribute."""
    return attribute(kind | 0x8000, b"".join(parts))


def text(kind: int, value: str) -> bytes:
    """Pack a zero-terminated string."""
    return attribute(kind, value.encode() + b"\0")


def number(kind: int, value: int) -> bytes:
    """Pack a 32-bit number."""
    return attribute(kind, struct.pack("=I", value))


def attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Unpack attributes; stops at the first that does not fit."""
    at = 0
    while at + _ATTRIBUTE.size <= len(data):
        size, kind = _ATTRIBUTE.unpack_from(data, at)
        if size < _ATTRIBUTE.size or at + size > len(data):
            return
        yield kind & _TYPE_MASK, data[at + _ATTRIBUTE.size : at + size]
        at += (size + 3) & ~3


class Channel:
    """A netlink socket in one namespace; not thread-safe."""

    def __init__(self, netns_fd: int | None = None) -> None:
        self._socket = socket_in(
            netns_fd, socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.NETLINK_ROUTE
        )
        self._sequence = 0
        self._socket.setsockopt(_SOL_NETLINK, _NETLINK_EXT_ACK, 1)
        self._socket.setsockopt(_SOL_NETLINK, _NETLINK_CAP_ACK, 1)

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> "Channel":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def request(self, *requests: NetlinkRequest) -> None:
        """Send requests in one datagram; raise the first error that is not tolerated."""
        pending: dict[int, NetlinkRequest] = {}
        datagram: list[bytes] = []
        for request in requests:
            self._sequence += 1
            pending[self._sequence] = request
            flags = request.flags | NLM_F_REQUEST | NLM_F_ACK
            datagram.append(_message(request.kind, flags, self._sequence, request.body))
        self._socket.send(b"".join(datagram))
        failure: NetlinkError | None = None
        while pending:
            for kind, flags, sequence, body in self._receive():
                request = pending.get(sequence)
                if kind != _NLMSG_ERROR or request is None:
                    continue
                del pending[sequence]
                code = -struct.unpack_from("=i", body)[0]
                if code and code not in request.tolerate and failure is None:
                    failure = NetlinkError(code, request.what, _explanation(flags, body))
        if failure is not None:
            raise failure

    def get(self, kind: int, body: bytes, what: str) -> bytes:
        """Return the body of the single object requested."""
        self._sequence += 1
        wanted = self._sequence
        self._socket.send(_message(kind, NLM_F_REQUEST, wanted, body))
        while True:
            for reply_kind, flags, sequence, content in self._receive():
                if sequence == wanted and reply_kind == _NLMSG_ERROR:
                    code = -struct.unpack_from("=i", content)[0]
                    raise NetlinkError(code, what, _explanation(flags, content))
                if sequence == wanted:
                    return content

    def dump(self, kind: int, body: bytes, what: str) -> list[bytes]:
        """Return the bodies of all objects; repeat if the list changed in between."""
        for _ in range(20):
            bodies, is_complete = self._dump_once(kind, body, what)
            if is_complete:
                return bodies
        raise NetlinkError(errno.EINTR, what, "the list changed each time it was read")

    def _dump_once(self, kind: int, body: bytes, what: str) -> tuple[list[bytes], bool]:
        self._sequence += 1
        wanted = self._sequence
        self._socket.send(_message(kind, NLM_F_REQUEST | NLM_F_DUMP, wanted, body))
        bodies: list[bytes] = []
        is_complete = True
        while True:
            for reply_kind, flags, sequence, content in self._receive():
                if sequence != wanted:
                    continue
                is_complete = is_complete and not flags & NLM_F_DUMP_INTR
                if reply_kind == _NLMSG_DONE:
                    return bodies, is_complete
                if reply_kind == _NLMSG_ERROR:
                    code = -struct.unpack_from("=i", content)[0]
                    raise NetlinkError(code, what, _explanation(flags, content))
                bodies.append(content)

    def _receive(self) -> Iterator[tuple[int, int, int, bytes]]:
        data = self._socket.recv(1 << 17)
        at = 0
        while at + _HEADER.size <= len(data):
            size, kind, flags, sequence, _ = _HEADER.unpack_from(data, at)
            if size < _HEADER.size:
                return
            yield kind, flags, sequence, data[at + _HEADER.size : at + size]
            at += (size + 3) & ~3


def _message(kind: int, flags: int, sequence: int, body: bytes) -> bytes:
    size = _HEADER.size + len(body)
    return _HEADER.pack(size, kind, flags, sequence, 0) + body + bytes(-size % 4)


def _explanation(flags: int, body: bytes) -> str:
    """Return the kernel's extended error message, or an empty string."""
    if not flags & _ACK_TLVS:
        return ""
    # The error number is followed by the header of the refused message, then by attributes.
    for kind, value in attributes(body[4 + _HEADER.size :]):
        if kind == 1:
            return value.rstrip(b"\0").decode(errors="replace")
    return ""
