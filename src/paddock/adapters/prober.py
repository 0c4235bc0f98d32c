"""Probes real sandboxes: the health of envd, or a command that envd runs."""

import aiohttp
import msgspec
from msgspec import Struct

from paddock.adapters.envd_session import open_session
from paddock.controllers.sandbox.health_probe import Prober
from paddock.resources.kinds.sandbox import Sandbox
from paddock.resources.kinds.template import Probe
from paddock.runtime import envd_api
from paddock.runtime.port import Runtime


class _End(Struct, frozen=True, rename="camel"):
    exit_code: int = 0


class _Event(Struct, frozen=True):
    end: _End | None = None


class _Error(Struct, frozen=True):
    message: str = "the command could not be run"


class _Message(Struct, frozen=True):
    """The fields that are read of envd's stream."""

    event: _Event = _Event()
    error: _Error | None = None


def default_prober(runtime: Runtime) -> Prober:
    """Return the prober for a runtime."""
    return _always_healthy if runtime.name == "simulated" else probe_envd


async def _always_healthy(sandbox: Sandbox, probe: Probe) -> str | None:
    return None


async def probe_envd(sandbox: Sandbox, probe: Probe) -> str | None:
    """Return why a sandbox is unhealthy, or None. It is unclaimed, so envd needs no token."""
    if not (address := sandbox.status.address.envd):
        return "it has no address"
    try:
        async with open_session(address) as (session, base):
            if probe.command is None:
                return await _health(session, base)
            return await _command(session, base, probe.command)
    except (aiohttp.ClientError, OSError) as error:
        return f"envd does not answer: {error}"
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return f"envd sent a response that cannot be decoded: {error}"


async def _health(session: aiohttp.ClientSession, base: str) -> str | None:
    async with session.get(f"{base}/health") as response:
        return None if response.status == 204 else f"envd responded with {response.status}"


async def _command(session: aiohttp.ClientSession, base: str, command: str) -> str | None:
    async with session.post(
        f"{base}{envd_api.START_PATH}",
        data=envd_api.frame(envd_api.shell_command(command)),
        headers=envd_api.STREAM_HEADERS,
    ) as response:
        data = await response.read()
        if response.status != 200:
            return f"envd responded with {response.status}"
    return _verdict(data)


def _verdict(data: bytes) -> str | None:
    """Return the failure of the command from its event stream, or None."""
    for _, payload in envd_api.read_frames(data):
        message = msgspec.json.decode(payload, type=_Message)
        if message.error is not None:
            return message.error.message
        if message.event.end is not None:
            code = message.event.end.exit_code
            return None if code == 0 else f"the command exited with {code}"
    return "the stream ended before the command"
