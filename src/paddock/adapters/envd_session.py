"""HTTP sessions to the envd address in a sandbox's status: a unix socket, or a URL."""

from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager

import aiohttp

READ_BUFFER_BYTES = 4 << 20
"""The longest line that a stream of envd may have."""


@asynccontextmanager
async def open_session(
    address: str,
    *,
    headers: Mapping[str, str] | None = None,
    timeout: aiohttp.ClientTimeout | None = None,
) -> AsyncGenerator[tuple[aiohttp.ClientSession, str]]:
    """Open a session; yields it with the URL below which envd is."""
    connector: aiohttp.BaseConnector | None = None
    base = address.rstrip("/")
    if address.startswith("unix:"):
        connector = aiohttp.UnixConnector(path=address.removeprefix("unix:"))
        base = "http://envd"
    async with aiohttp.ClientSession(
        connector=connector,
        timeout=timeout or aiohttp.ClientTimeout(total=300),
        headers=headers,
        read_bufsize=READ_BUFFER_BYTES,
    ) as session:
        yield session, base
