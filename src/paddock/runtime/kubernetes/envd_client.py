"""Client of the envds in pods: configuration, readiness, usage, logs.

Each request carries a token derived from the seed; pods have only its hash. Requests are
idempotent; an envd that does not answer raises `UnavailableError`.
"""

import asyncio
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any
from urllib.parse import urlencode

import aiohttp
import msgspec
from msgspec import Struct

from paddock.envd.config import EnvdSettings
from paddock.kit import bearer
from paddock.kit.errors import InvalidError, UnavailableError
from paddock.runtime import envd_api, outbound
from paddock.runtime.kubernetes import names
from paddock.runtime.port import AgentConfig, LogLine, OutboundConfig, Usage

_SECONDS = 5.0
_NO_OUTBOUND = OutboundConfig()
_FIRST_DELAY, _MAX_DELAY = 0.02, 0.5
_MAX_REASON = 500
"""Characters: a reason becomes part of the status of the sandbox."""


class _Problem(Struct, frozen=True):
    """The body of an error response of the sidecar."""

    message: str


# Made at import, not by the first use: see docs/decisions/0080.
_problem_decoder = msgspec.json.Decoder(_Problem)


class PodEnvdClient:
    """Calls the sidecars of all pods."""

    def __init__(
        self,
        control_tokens: Callable[[str], tuple[str, ...]],
        *,
        control_port: int = names.CONTROL_PORT,
        installation: OutboundConfig = _NO_OUTBOUND,
    ) -> None:
        """`control_tokens` returns the tokens that the sidecar of a sandbox may accept, the likely
        one first. `installation` holds the proxies, CA certificates and mirrors of all sandboxes.
        """
        self._tokens = control_tokens
        self._port = control_port
        self._installation = installation
        self._opened: aiohttp.ClientSession | None = None

    async def configure(self, uid: str, ip: str, agent: AgentConfig) -> None:
        """Send the token and environment to a sandbox's envd."""
        own = {"E2B_SANDBOX_ID": agent.sandbox_id, "E2B_TEMPLATE_ID": agent.template_id}
        merged = outbound.merge(self._installation, agent.outbound)
        settings = EnvdSettings(
            access_token=agent.access_token,
            env_vars={
                **{k: v for k, v in own.items() if v},
                **outbound.variables(merged),
                **agent.env,
            },
            default_user=agent.default_user,
            default_workdir=agent.default_workdir,
            outbound=outbound.files(merged),
        )
        body = envd_api.init_body(settings)
        await self._call("POST", uid, ip, envd_api.INIT_PATH, body)

    async def main_container_id(self, ip: str) -> str:
        """Return the id of the main container that a sandbox's envd has entered."""
        return await self._ready(ip, "")

    async def wait_ready(
        self, uid: str, ip: str, *, seconds: float, former: str = ""
    ) -> str | None:
        """Wait until a sandbox is ready; on timeout return what it is waiting for.

        Raises `InvalidError` if it can never become ready.
        Responses from within the `former` main container are ignored.
        """
        pause = _FIRST_DELAY
        reason = "its envd does not answer yet"
        try:
            async with asyncio.timeout(seconds):
                while True:
                    try:
                        await self._ready(ip, former)
                    except UnavailableError as error:
                        reason = error.message
                    else:
                        return None
                    await asyncio.sleep(pause)
                    pause = min(pause * 1.5, _MAX_DELAY)
        except TimeoutError:
            return f"sandbox {uid}: {reason}"

    async def _ready(self, ip: str, former: str) -> str:
        status, body, main = await self._exchange("GET", ip, "/ready", None, None)
        if former and main == former:
            raise UnavailableError("its envd is still in the container that is being replaced")
        if status == names.STATUS_NEVER_READY:
            raise InvalidError(_reason(body) or "it can never become ready")
        if status != 204:
            raise UnavailableError(body.decode(errors="replace")[:200] or f"envd returned {status}")
        return main

    async def metrics(self, uid: str, ip: str) -> Mapping[str, Any]:
        """Return the usage of a sandbox as reported by envd."""
        return msgspec.json.decode(await self._call("GET", uid, ip, "/metrics", None))

    async def logs(
        self, uid: str, ip: str, *, since: datetime | None, limit: int
    ) -> tuple[LogLine, ...]:
        """Return the log of a sandbox's start command, oldest first."""
        query = {"limit": str(limit)} | ({"since": since.isoformat()} if since else {})
        path = f"/logs?{urlencode(query)}"
        return msgspec.json.decode(
            await self._call("GET", uid, ip, path, None), type=tuple[LogLine, ...]
        )

    async def _call(self, method: str, uid: str, ip: str, path: str, body: bytes | None) -> bytes:
        status, response = 401, b""
        for token in self._tokens(uid):
            status, response, _ = await self._exchange(method, ip, path, body, token)
            if status != 401:
                break
        if status >= 300:
            raise envd_api.refusal(uid, path, status, response, retry_after_seconds=1.0)
        return response

    async def _exchange(
        self, method: str, ip: str, path: str, body: bytes | None, token: str | None
    ) -> tuple[int, bytes, str]:
        """Return status, body, and the id of the main container that envd has entered."""
        host = f"[{ip}]" if ":" in ip else ip
        headers = {} if token is None else bearer.header(token)
        try:
            async with self._session().request(
                method, f"http://{host}:{self._port}{path}", data=body, headers=headers
            ) as response:
                main = response.headers.get(names.MAIN_HEADER, "")
                return response.status, await response.read(), main
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise UnavailableError(
                f"its envd at {host} does not answer: {error!r}", retry_after_seconds=1.0
            ) from error

    def _session(self) -> aiohttp.ClientSession:
        if self._opened is None:
            self._opened = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=_SECONDS),
                # Pods are short-lived: do not keep connections to deleted ones.
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=15.0),
            )
        return self._opened

    async def close(self) -> None:
        if self._opened is not None:
            await self._opened.close()


def _reason(body: bytes) -> str:
    """Return the message of an error response. A pod may send anything."""
    try:
        return _problem_decoder.decode(body).message[:_MAX_REASON]
    except ValueError:
        return body.decode(errors="replace")[:_MAX_REASON]


def read_usage(found: Any, now: datetime) -> Usage:
    """Convert envd's metrics to a `Usage`."""
    return Usage(
        at=now,
        cpu_count=found["cpu_count"],
        cpu_used_percent=found["cpu_used_pct"],
        cpu_seconds=0.0,
        memory_used_bytes=found["mem_used"],
        memory_total_bytes=found["mem_total"],
        memory_cache_bytes=found["mem_cache"],
        disk_used_bytes=found.get("disk_used", 0),
        disk_total_bytes=found["disk_total"],
    )
