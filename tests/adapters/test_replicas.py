"""Writes are pushed to API replicas, also to one that has just closed a pooled connection."""

import asyncio

import pytest

from paddock.adapters import replicas as replicas_module
from paddock.adapters.replicas import Replicas
from paddock.resources.kinds.pool import SandboxPool
from paddock.resources.meta import ObjectMeta

POOL = SandboxPool(metadata=ObjectMeta(name="p", namespace="default"))


class Replica:
    """Closes the connection during the first `hangs_up` requests, then answers."""

    def __init__(self, hangs_up: int) -> None:
        self._hangs_up = hangs_up
        self.requests = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        await reader.readexactly(int(head.partition("content-length:")[2].split()[0]))
        self.requests += 1
        if self.requests > self._hangs_up:
            writer.write(b"HTTP/1.1 204 No Content\r\nConnection: close\r\n\r\n")
        writer.close()


@pytest.mark.parametrize(("hangs_up", "tries"), [(0, [1, 2]), (1, [2, 3]), (9, [2, 2])])
async def test_a_push_is_retried_once_and_a_silent_replica_is_skipped(
    hangs_up: int, tries: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicas_module, "PUSH_TIMEOUT_SECONDS", 60.0)
    monkeypatch.setattr(replicas_module, "SKIP_SECONDS", 600.0)
    replica = Replica(hangs_up)
    server = await asyncio.start_server(replica.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    replicas = Replicas(f"http://127.0.0.1:{port}", "token")
    counts: list[int] = []
    try:
        for _ in range(2):
            await replicas.notify(POOL, is_gone=False)
            counts.append(replica.requests)
    finally:
        await replicas.close()
        server.close()
        await server.wait_closed()
    assert counts == tries
