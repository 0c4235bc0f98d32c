"""Sending and receiving messages with descriptors over SOCK_SEQPACKET sockets.

Used between node, launcher and zygote. Neither function waits: the node's sockets are non-blocking.
"""

import array
import os
import socket
from collections.abc import Sequence

MAX_MESSAGE = 128 * 1024
MAX_FDS = 32


def pack(*fields: str) -> bytes:
    """Encode fields that each end with NUL, as the launcher and skeletons read them."""
    for field in fields:
        if "\0" in field:
            raise ValueError(f"{field!r} contains a NUL byte")
    return b"".join(os.fsencode(field) + b"\0" for field in fields)


def send(channel: socket.socket, data: bytes, fds: Sequence[int] = ()) -> None:
    """Send a message with copies of descriptors."""
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    channel.sendmsg([data], ancillary, socket.MSG_NOSIGNAL)


def receive(channel: socket.socket) -> tuple[bytes, list[int]]:
    """Return the bytes and descriptors of a message; no bytes mean that the peer has closed."""
    data, ancillary, _, _ = channel.recvmsg(
        MAX_MESSAGE, socket.CMSG_SPACE(4 * MAX_FDS), socket.MSG_CMSG_CLOEXEC
    )
    fds = array.array("i")
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
    return data, list(fds)


def close_all(fds: Sequence[int]) -> None:
    """Close descriptors."""
    for fd in fds:
        os.close(fd)
