"""The sockets of one Jupyter kernel, and the connection file that names them."""

import json
import os
import secrets
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio

from code_interpreter.kernels.wire import Session

_RETRY_MILLISECONDS = 20
"""The kernel creates its sockets some time after its start."""
_RECEIVED_MESSAGES = 200
"""Messages that wait in the server's memory. The Python kernel sends up to 64 KiB in one."""
_CHANNELS = ("shell", "iopub", "control", "stdin", "hb")


class Connection:
    """Sockets to a kernel: requests, control, and what it publishes."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        directory: Path,
        name: str,
        *,
        by_tcp: bool,
        loses_output: bool,
    ) -> None:
        self.file = directory / f"{name}.json"
        self._base = directory / name
        self._by_tcp = by_tcp
        key = secrets.token_hex(16)
        self._session = Session(key)
        self._ports = _free_ports() if by_tcp else {c: n for n, c in enumerate(_CHANNELS, 1)}
        self.file.write_text(json.dumps(self._information(key)))
        self.file.chmod(0o600)
        self.shell = self._connect(context, "shell", zmq.DEALER)
        self._control = self._connect(context, "control", zmq.DEALER)
        # A kernel that cannot wait drops what it cannot send.
        limit = 0 if loses_output else _RECEIVED_MESSAGES
        self.iopub = self._connect(context, "iopub", zmq.SUB, limit)

    def _information(self, key: str) -> Mapping[str, Any]:
        return {
            "transport": "tcp" if self._by_tcp else "ipc",
            "ip": "127.0.0.1" if self._by_tcp else str(self._base),
            "key": key,
            "signature_scheme": "hmac-sha256",
            "kernel_name": "",
            **{f"{channel}_port": port for channel, port in self._ports.items()},
        }

    def _connect(
        self, context: zmq.asyncio.Context, channel: str, kind: int, limit: int = 0
    ) -> zmq.asyncio.Socket:
        port = self._ports[channel]
        made = context.socket(kind)
        made.setsockopt(zmq.LINGER, 0)
        made.setsockopt(zmq.RECONNECT_IVL, _RETRY_MILLISECONDS)
        made.setsockopt(zmq.RCVHWM, limit)
        if kind == zmq.SUB:
            made.setsockopt(zmq.SUBSCRIBE, b"")
        made.connect(f"tcp://127.0.0.1:{port}" if self._by_tcp else f"ipc://{self._base}-{port}")
        return made

    async def send(self, kind: str, content: Mapping[str, Any]) -> str:
        """Send a request; return its id."""
        message_id, frames = self._session.encode(kind, content)
        await _send(self.shell, frames)
        return message_id

    async def send_control(self, kind: str) -> None:
        """Send a request that the kernel handles while it runs code."""
        await _send(self._control, self._session.encode(kind, {})[1])

    async def receive(self, channel: zmq.asyncio.Socket) -> list[bytes]:
        """Return the frames of the next message of a channel."""
        return await channel.recv_multipart()

    def close(self) -> None:
        """Close the sockets and remove the files."""
        for open_socket in (self.shell, self._control, self.iopub):
            open_socket.close()
        self.file.unlink(missing_ok=True)
        for port in self._ports.values():
            if not self._by_tcp:
                Path(f"{self._base}-{port}").unlink(missing_ok=True)


async def _send(channel: zmq.asyncio.Socket, frames: list[bytes]) -> None:
    await channel.send_multipart(frames)  # pyright: ignore[reportUnknownMemberType]


def _free_ports() -> dict[str, int]:
    """Return a free port for each channel."""
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in _CHANNELS]
    ports = [listener.getsockname()[1] for listener in listeners]
    for listener in listeners:
        listener.close()
    return dict(zip(_CHANNELS, ports, strict=True))


def prepare(directory: Path) -> None:
    """Create the directory of the sockets, for this user only."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    if directory.is_symlink() or directory.stat().st_uid != os.getuid():
        raise PermissionError(f"{directory} does not belong to this user: remove it")
    directory.chmod(0o700)
