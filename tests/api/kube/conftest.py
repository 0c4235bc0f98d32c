"""Fixtures: the API in this process without sockets (`client`), and on a socket (`server`)."""

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Iterator

import httpx
import pytest

from paddock.api.kube.app import create_app
from paddock.api.kube.settings import KubeApiSettings
from paddock.store.memory import MemoryStore
from paddock.store.port import Store
from tests.api.kube.server import Server, serving

TOKEN = "correct-horse"


@contextlib.asynccontextmanager
async def calling(store: Store) -> AsyncGenerator[httpx.AsyncClient]:
    """Yield a client of the API on this store."""
    app = create_app(store, KubeApiSettings(tokens=(TOKEN,)))
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app, raise_app_exceptions=False),
        base_url="http://paddock.test",
        headers={"Authorization": f"Bearer {TOKEN}"},
    ) as client:
        yield client


@pytest.fixture
async def store() -> AsyncIterator[MemoryStore]:
    store = MemoryStore(history=50)
    yield store
    await store.close()


@pytest.fixture
async def client(store: MemoryStore) -> AsyncIterator[httpx.AsyncClient]:
    async with calling(store) as client:
        yield client


@pytest.fixture
def server() -> Iterator[Server]:
    with serving(KubeApiSettings(tokens=(TOKEN,))) as server:
        yield server
