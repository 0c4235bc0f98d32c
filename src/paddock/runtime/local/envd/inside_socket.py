"""The socket on which code inside a sandbox reaches its envd: `localhost:49983`.

E2B's envd listens there, and its code interpreter reads the variables of the sandbox from it. The
node holds the socket while no envd runs, so that the first connection starts one. It is opened once
a sandbox runs, hence after a restore: CRIU binds the sockets of the sandbox's own programs first.
"""

import os
import socket
from collections.abc import Callable

from paddock.runtime.local.net import netns

PORT = 49983
_BACKLOG = 32
_IP_FREEBIND = 15
"""Bind although the loopback interface may not be up yet (`<linux/in.h>`)."""


def listen(netns_fd: int) -> socket.socket | None:
    """Return a listening socket in the namespace of a sandbox.

    `None` if a program of the sandbox has the port, or the namespace cannot be entered (without
    root), or is that of this process, whose port is not the sandbox's.
    """
    if _is_own(netns_fd):
        return None
    try:
        made = netns.socket_in(netns_fd, socket.AF_INET)
    except OSError:
        return None
    try:
        made.setblocking(False)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.setsockopt(socket.IPPROTO_IP, _IP_FREEBIND, 1)
        made.bind(("127.0.0.1", PORT))
        made.listen(_BACKLOG)
    except OSError:
        made.close()
        return None
    return made


def _is_own(netns_fd: int) -> bool:
    own = netns.current()
    try:
        return netns.identity(own) == netns.identity(netns_fd)
    finally:
        os.close(own)


class InsideSocket:
    """The socket of one sandbox, opened when it is needed and possible."""

    def __init__(self, open_socket: Callable[[], socket.socket | None]) -> None:
        self._open = open_socket
        self._socket: socket.socket | None = None

    def get(self) -> socket.socket | None:
        """Return the socket; `None` if it cannot be opened now."""
        if self._socket is None:
            self._socket = self._open()
        return self._socket

    def close(self) -> None:
        """Close the socket. An envd that serves it keeps its copy."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
