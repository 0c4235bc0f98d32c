"""Runs commands in a sandbox through envd, by the Connect protocol."""

import asyncio
import base64
import json
import struct

from msgspec import Struct

from paddock.runtime.port import Instance


class Outcome(Struct, frozen=True):
    """Exit status and output of a command."""

    status: int
    out: str
    error: str


async def health(instance: Instance) -> int:
    """Return the HTTP status of envd's /health."""
    reader, writer = await asyncio.open_unix_connection(_path(instance))
    try:
        writer.write(b"GET /health HTTP/1.1\r\nHost: sandbox\r\nConnection: close\r\n\r\n")
        return _status(await reader.readline())
    finally:
        writer.close()


async def run(
    instance: Instance, script: str, *, user: str = "root", token: str | None = None,
    timeout: float = 60,
) -> Outcome:  # fmt: skip
    """Run a shell script and wait for its exit."""
    async with asyncio.timeout(timeout):
        return await start(instance, ["/bin/bash", "-c", script], user=user, token=token)


async def succeeds(instance: Instance, script: str, **options) -> bool:
    """Whether a shell script exits with 0."""
    return (await run(instance, script, **options)).status == 0


async def begin(instance: Instance, script: str, *, user: str = "root") -> int:
    """Start a command that outlives the connection; return its pid inside."""
    command = ["/bin/bash", "-c", script]
    reader, writer = await _open(instance, command, user=user, token=None)
    try:
        async for event in _events(reader):
            if "start" in event:
                return int(event["start"]["pid"])
    finally:
        writer.close()
    raise AssertionError("the command did not start")


async def start(
    instance: Instance, command: list[str], *, user: str = "root", token: str | None = None
) -> Outcome:
    """Run a program and wait for its exit."""
    reader, writer = await _open(instance, command, user=user, token=token)
    out, error, status = b"", b"", None
    try:
        async for event in _events(reader):
            data = event.get("data", {})
            out += base64.b64decode(data.get("stdout", ""))
            error += base64.b64decode(data.get("stderr", ""))
            if "end" in event:
                end = event["end"]
                status = int(end.get("exitCode", 0))
                if end.get("status", "").startswith("signal"):
                    status = -1
    finally:
        writer.close()
    assert status is not None, (out, error)
    return Outcome(status, out.decode(errors="replace"), error.decode(errors="replace"))


async def _open(instance: Instance, command: list[str], *, user: str, token: str | None):
    request = {"process": {"cmd": command[0], "args": command[1:]}}
    body = json.dumps(request).encode()
    envelope = struct.pack(">BI", 0, len(body)) + body
    basic = base64.b64encode(f"{user}:".encode()).decode()
    head = [
        "POST /process.Process/Start HTTP/1.1", "Host: sandbox",
        "Content-Type: application/connect+json", "Connect-Protocol-Version: 1",
        f"Authorization: Basic {basic}", f"Content-Length: {len(envelope)}", "Connection: close",
    ]  # fmt: skip
    if token:
        head.append(f"X-Access-Token: {token}")
    reader, writer = await asyncio.open_unix_connection(_path(instance))
    writer.write("\r\n".join([*head, "", ""]).encode() + envelope)
    line = await reader.readline()
    if _status(line) != 200:
        rest = await reader.read(4096)
        writer.close()
        raise AssertionError((line, rest))
    while (await reader.readline()).strip():
        pass
    return reader, writer


def _status(line: bytes) -> int:
    if not line:
        raise ConnectionResetError("envd went away before it answered")
    return int(line.split()[1])


async def _events(reader: asyncio.StreamReader):
    """Yield the enveloped messages of a chunked body."""
    buffer = b""
    while True:
        size = (await reader.readline()).strip()
        if not size or int(size, 16) == 0:
            return
        buffer += await reader.readexactly(int(size, 16))
        await reader.readexactly(2)
        while len(buffer) >= 5:
            flags, length = struct.unpack_from(">BI", buffer)
            if len(buffer) < 5 + length:
                break
            message = json.loads(buffer[5 : 5 + length] or b"{}")
            buffer = buffer[5 + length :]
            if flags & 2:
                if "error" in message:
                    raise AssertionError(message["error"])
                return
            yield message.get("event", {})


def _path(instance: Instance) -> str:
    assert instance.address.envd is not None, instance
    return instance.address.envd.removeprefix("unix:")
