"""A real envd on a unix socket, and a client that speaks raw HTTP and Connect to it."""

import asyncio
import json
import os
import pwd
import socket
import struct
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from paddock.envd.config import Config, EnvdSettings
from paddock.envd.process.direct_spawner import DirectSpawner
from paddock.envd.process.spawner import Spawner
from paddock.envd.server import Envd

USER_UID = 12345


def write_users(directory: Path) -> dict[str, str]:
    """Write the sandbox's passwd and group with `user` and `root`; return their paths."""
    home = directory / "home"
    home.mkdir(exist_ok=True)
    uid = USER_UID if os.geteuid() == 0 else os.geteuid()
    gid = USER_UID if os.geteuid() == 0 else os.getegid()
    if os.geteuid() == 0:
        os.chown(home, uid, gid)
    passwd, group = directory / "passwd", directory / "group"
    passwd.write_text(
        f"root:x:0:0:root:/root:/bin/bash\nuser:x:{uid}:{gid}::{home}:/bin/bash\nbroken line\n"
    )
    group.write_text(f"root:x:0:\nuser:x:{gid}:\nwheel:x:4321:root,user\n")
    return {"passwd_path": str(passwd), "group_path": str(group)}


@dataclass
class Response:
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Frame:
    flags: int
    payload: bytes

    @property
    def message(self) -> Any:
        return json.loads(self.payload)


def frame(message: Any, flags: int = 0) -> bytes:
    payload = message if isinstance(message, bytes) else json.dumps(message).encode()
    return struct.pack(">BI", flags, len(payload)) + payload


class Wire:
    """A raw HTTP connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(
        self, method: str, target: str, headers: dict[str, str], body: bytes | None = None
    ) -> None:
        lines = [f"{method} {target} HTTP/1.1", "Host: envd"]
        lines += [f"{k}: {v}" for k, v in headers.items()]
        if body is not None:
            lines.append(f"Content-Length: {len(body)}")
        self.writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + (body or b""))
        await self.writer.drain()

    async def head(self) -> tuple[int, dict[str, str]]:
        raw = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *lines = raw.strip().split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines)
        return int(first.split()[1]), {k.lower(): v for k, v in headers.items()}

    async def chunk(self) -> bytes:
        size = int(await self.reader.readuntil(b"\r\n"), 16)
        data = await self.reader.readexactly(size)
        await self.reader.readexactly(2)
        return data

    async def response(self, method: str = "GET") -> Response:
        status, headers = await self.head()
        while status == 100:
            status, headers = await self.head()
        body = b""
        if method == "HEAD" or status in (204, 304):
            pass
        elif headers.get("transfer-encoding") == "chunked":
            while piece := await self.chunk():
                body += piece
        else:
            body = await self.reader.readexactly(int(headers["content-length"]))
        return Response(status, headers, body)

    def close(self) -> None:
        self.writer.close()


class Stream:
    """The reading side of a server stream."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self._buffer = b""
        self.seen: list[Any] = []

    async def frame(self) -> Frame | None:
        while True:
            if len(self._buffer) >= 5:
                flags, length = struct.unpack_from(">BI", self._buffer)
                if len(self._buffer) >= 5 + length:
                    payload = self._buffer[5 : 5 + length]
                    self._buffer = self._buffer[5 + length :]
                    return Frame(flags, payload)
            piece = await self.wire.chunk()
            if not piece:
                return None
            self._buffer += piece

    async def event(self) -> Any:
        """Return the next message without its `event` wrapper; the end frame as `{"$end": …}`."""
        got = await self.frame()
        assert got is not None, "the stream ended without an end frame"
        if got.flags & 2:
            return {"$end": got.message}
        message = got.message
        self.seen.append(message)
        return message.get("event", message)

    async def events(self) -> AsyncIterator[Any]:
        while True:
            event = await self.event()
            yield event
            if "$end" in event:
                return

    async def rest(self) -> list[Any]:
        return [event async for event in self.events()]

    def close(self) -> None:
        self.wire.close()


@dataclass
class Rig:
    """An envd and its client."""

    directory: Path
    envd: Envd
    socket_path: str
    control_path: str
    home: Path = field(init=False)

    def __post_init__(self) -> None:
        self.home = self.directory / "home"

    async def wire(self, *, control: bool = False) -> Wire:
        path = self.control_path if control else self.socket_path
        return Wire(*await asyncio.open_unix_connection(path, limit=1 << 17))

    async def request(
        self,
        method: str,
        target: str,
        body: bytes | None = None,
        *,
        control: bool = False,
        **headers: str,
    ) -> Response:
        wire = await self.wire(control=control)
        try:
            named = {k.replace("_", "-"): v for k, v in headers.items()}
            await wire.send(method, target, named, body)
            return await wire.response(method)
        finally:
            wire.close()

    async def call(self, rpc: str, message: Any = None, **headers: str) -> Response:
        body = json.dumps(message or {}).encode()
        return await self.request(
            "POST", f"/{rpc}", body, **{"content_type": "application/json"} | headers
        )

    async def files(self, rpc: str, message: Any = None, **headers: str) -> Response:
        return await self.call(f"filesystem.Filesystem/{rpc}", message, **headers)

    async def process(self, rpc: str, message: Any = None, **headers: str) -> Response:
        return await self.call(f"process.Process/{rpc}", message, **headers)

    async def stream(self, rpc: str, message: Any, **headers: str) -> Stream:
        wire = await self.wire()
        named = {"content-type": "application/connect+json"}
        named |= {k.replace("_", "-"): v for k, v in headers.items()}
        await wire.send("POST", f"/{rpc}", named, frame(message))
        status, got = await wire.head()
        assert (status, got["content-type"]) == (200, "application/connect+json")
        return Stream(wire)

    async def start(self, script: str, **more: Any) -> Stream:
        headers = more.pop("headers", {})
        process = {"cmd": "/bin/bash", "args": ["-c", script], **more.pop("process", {})}
        return await self.stream("process.Process/Start", {"process": process, **more}, **headers)

    async def run(self, script: str, **more: Any) -> list[Any]:
        stream = await self.start(script, **more)
        try:
            return await stream.rest()
        finally:
            stream.close()


def output(events: list[Any], name: str = "stdout") -> bytes:
    """Return all data of one stream."""
    import base64

    return b"".join(base64.b64decode(e["data"].get(name, "")) for e in events if "data" in e)


def end(events: list[Any]) -> Any:
    """Return the end event, which must be the last before the end frame."""
    assert "end" in events[-2], events
    assert events[-1] == {"$end": {}}
    return events[-2]["end"]


async def open_rig(directory: Path, *, spawner: Spawner | None = None, **config: Any) -> Rig:
    paths = [str(directory / name) for name in ("envd.sock", "control.sock")]
    doors: list[socket.socket] = []
    for path in paths:
        door = socket.socket(socket.AF_UNIX)
        door.bind(path)
        door.listen(128)
        doors.append(door)
    settings = config.pop("settings", EnvdSettings())
    made = Config(
        sandbox_id="isbx",
        template_id="base",
        settings=settings,
        identity_dir=str(directory / "run"),
        **write_users(directory),
        **config,
    )
    # As a node sends it: encoded and decoded once.
    made = msgspec.json.decode(msgspec.json.encode(made), type=Config)
    envd = Envd(made, spawner or DirectSpawner())
    await envd.start(*doors)
    return Rig(directory, envd, *paths)


async def close_rig(rig: Rig) -> None:
    """Close an envd and wait for the commands that it forked itself."""
    async with asyncio.timeout(60):
        while any(rig.envd.registry.running()):
            await asyncio.sleep(0.01)
    rig.envd.close()
    await asyncio.sleep(0)


def host_shell_user() -> str:
    return pwd.getpwuid(os.geteuid()).pw_name
