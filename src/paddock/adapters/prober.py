"""Looking into real sandboxes: envd's health, or a command that it runs."""

import struct

import aiohttp
import msgspec
from msgspec import Struct

from paddock.controllers.sandbox.health_probe import Prober
from paddock.resources.kinds.sandbox import Sandbox
from paddock.resources.kinds.template import Probe
from paddock.runtime.port import Runtime

_FRAME = struct.Struct(">BI")


class _End(Struct, frozen=True, rename="camel"):
    exit_code: int = 0


class _Event(Struct, frozen=True):
    end: _End | None = None


class _Error(Struct, frozen=True):
    message: str = "the command could not be run"


class _Message(Struct, frozen=True):
    """As much as is read of what envd streams."""

    event: _Event = _Event()
    error: _Error | None = None


def default_prober(runtime: Runtime) -> Prober:
    """Give what goes with a runtime."""
    return _always_well if runtime.name == "simulated" else probe_envd


async def _always_well(sandbox: Sandbox, probe: Probe) -> str | None:
    return None


async def probe_envd(sandbox: Sandbox, probe: Probe) -> str | None:
    """Ask a sandbox's envd; nobody has claimed it, so it asks for no token."""
    address = sandbox.status.address.envd or ""
    connector: aiohttp.BaseConnector | None = None
    base = address.rstrip("/")
    if address.startswith("unix:"):
        connector, base = aiohttp.UnixConnector(path=address.removeprefix("unix:")), "http://envd"
    elif not address:
        return "it has no address"
    try:
        async with aiohttp.ClientSession(connector=connector) as session:
            if probe.command is None:
                return await _health(session, base)
            return await _command(session, base, probe.command)
    except (aiohttp.ClientError, OSError) as error:
        return f"envd does not answer: {error}"
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return f"envd gave an answer that cannot be read: {error}"


async def _health(session: aiohttp.ClientSession, base: str) -> str | None:
    async with session.get(f"{base}/health") as response:
        return None if response.status == 204 else f"envd answers {response.status}"


async def _command(session: aiohttp.ClientSession, base: str, command: str) -> str | None:
    process = {"cmd": "/bin/bash", "args": ["-l", "-c", command]}
    message = msgspec.json.encode({"process": process, "stdin": False})
    headers = {"Content-Type": "application/connect+json", "Connect-Protocol-Version": "1"}
    async with session.post(
        f"{base}/process.Process/Start",
        data=_FRAME.pack(0, len(message)) + message,
        headers=headers,
    ) as response:
        data = await response.read()
        if response.status != 200:
            return f"envd answers {response.status}"
    return _verdict(data)


def _verdict(data: bytes) -> str | None:
    """Read how the command ended from the stream of what it did."""
    position = 0
    while position + _FRAME.size <= len(data):
        _, size = _FRAME.unpack_from(data, position)
        start = position + _FRAME.size
        message = msgspec.json.decode(data[start : start + size], type=_Message)
        position = start + size
        if message.error is not None:
            return message.error.message
        if message.event.end is not None:
            code = message.event.end.exit_code
            return None if code == 0 else f"the command ended with {code}"
    return "the command's end was not told"
