"""What the node says to a running envd, over the door that only the node can reach."""

import asyncio
from pathlib import Path

import msgspec

from paddock.envd.config import EnvdSettings
from paddock.kit.errors import UnavailableError
from paddock.runtime.port import AgentConfig

_PATIENCE = 20.0


async def configure(path: Path, settings: EnvdSettings, *, names: AgentConfig) -> None:
    """Give envd new settings and the names of its sandbox (`POST /init`)."""
    body = msgspec.json.encode(
        {
            "envVars": settings.env_vars,
            "accessToken": settings.access_token or "",
            "defaultUser": settings.default_user,
            "defaultWorkdir": settings.default_workdir or "",
            "sandboxId": names.sandbox_id or "",
            "templateId": names.template_id or "",
        }
    )
    status = await _post(path, "/init", body)
    if status not in (200, 204):
        raise UnavailableError(f"envd refused its settings with status {status}")


async def _post(path: Path, target: str, body: bytes) -> int:
    try:
        async with asyncio.timeout(_PATIENCE):
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
            f"envd does not take its settings: {problem}", retry_after_seconds=0.2
        ) from problem
    parts = line.split()
    return int(parts[1]) if len(parts) > 1 and parts[1].isdigit() else 0
