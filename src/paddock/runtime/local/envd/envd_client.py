"""The node's requests to a running envd, over the control socket that only the node can reach."""

import asyncio
from pathlib import Path

from paddock.envd.config import EnvdSettings
from paddock.kit.errors import UnavailableError
from paddock.runtime import envd_api
from paddock.runtime.port import AgentConfig

_TIMEOUT_SECONDS = 20.0


async def configure(path: Path, settings: EnvdSettings, *, names: AgentConfig) -> None:
    """Send envd new settings and the names of its sandbox (`POST /init`)."""
    body = envd_api.init_body(
        settings, sandbox_id=names.sandbox_id or "", template_id=names.template_id
    )
    status = await _post(path, envd_api.INIT_PATH, body)
    if status not in (200, 204):
        raise envd_api.refusal(names.sandbox_id or str(path), envd_api.INIT_PATH, status)


async def _post(path: Path, target: str, body: bytes) -> int:
    """Return the status of a POST, or 0 for an answer that is not HTTP."""
    try:
        async with asyncio.timeout(_TIMEOUT_SECONDS):
            reader, writer = await asyncio.open_unix_connection(str(path))
            try:
                head = (
                    f"POST {target} HTTP/1.1\r\nHost: envd\r\nContent-Type: application/json\r\n"
                    f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
                )
                writer.write(head.encode() + body)
                await writer.drain()
                line = await reader.readline()
            finally:
                writer.close()
    except (OSError, TimeoutError) as problem:
        raise UnavailableError(
            f"envd at {path} did not answer {target}: {problem or type(problem).__name__}",
            retry_after_seconds=0.2,
        ) from problem
    parts = line.split()
    return int(parts[1]) if len(parts) > 1 and parts[1].isdigit() else 0
