"""`paddock image prune` asks the node, which knows what templates and sandboxes need."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncGenerator, Collection
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from paddock.kit.clock import SystemClock
from paddock.runtime.local.driver import LocalRuntime
from paddock.runtime.local.images.eviction import ImageEviction
from paddock.runtime.local.images.provider import known_names
from paddock.runtime.local.images.store import ImageStore
from paddock.runtime.local.node.rpc_server import Handler, RpcServer
from tests.cli.conftest import PADDOCK


class Later(SystemClock):
    """A clock that is an hour ahead, so that nothing was used a moment ago."""

    def now(self) -> datetime:
        return datetime.fromtimestamp(super().now().timestamp() + 3600, UTC)


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    """Return a store with two images that were pulled and one that was imported."""
    store = ImageStore(tmp_path / "state" / "node" / "images")
    tree = tmp_path / "tree"
    tree.mkdir()
    for name in ("needed:1", "unneeded:1", "imported:1"):
        store.add_directory(tree, name)
        manifest = store.manifest(name)
        assert manifest is not None
        if name != "imported:1":
            store.refs.put(structs.replace(manifest, digest=f"sha256:{'0' * 64}"))
    return store


@pytest.fixture
async def runtime(tmp_path: Path, store: ImageStore) -> AsyncGenerator[LocalRuntime]:
    """Serve the eviction of the store as a node does; return a client of it."""
    eviction = ImageEviction(store, tmp_path, Later(), percent=100, names_of=known_names)
    tasks: set[asyncio.Task[Any]] = set()

    async def need(references: Collection[str]) -> None:
        eviction.need(references)

    async def prune() -> tuple[str, ...]:
        return eviction.evict(sys.maxsize)

    handlers: dict[str, Handler] = {
        "need_images": lambda uid, body: need(body),
        "prune_images": lambda uid, body: prune(),
    }
    server = RpcServer(
        handlers,
        lambda name, work: tasks.add(asyncio.create_task(work, name=name)),
        lambda task: task.cancel(),
    )
    (tmp_path / "run").mkdir()
    server.open(str(tmp_path / "run" / "node.sock"))
    client = LocalRuntime(tmp_path / "run" / "node.sock")
    try:
        yield client
    finally:
        client.close()
        server.close()
        await asyncio.gather(*tasks)


async def _paddock(directory: Path, *arguments: str) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        str(PADDOCK),
        *arguments,
        env=os.environ
        | {
            "PADDOCK_STATE_DIR": str(directory / "state"),
            "PADDOCK_RUN_DIR": str(directory / "run"),
        },
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(60):
        output, errors = await process.communicate()
    assert process.returncode is not None
    return process.returncode, output.decode(), errors.decode()


async def test_images_that_templates_need_stay_and_others_are_deleted(
    runtime: LocalRuntime, store: ImageStore, tmp_path: Path
) -> None:
    await runtime.need_images(frozenset({"docker.io/library/needed:1"}))
    status, output, errors = await _paddock(tmp_path, "image", "prune", "-o", "json")
    assert (status, errors) == (0, "")
    assert json.loads(output) == ["unneeded:1"]
    assert [one.name for one in store.images() if ":1" in one.name] == ["imported:1", "needed:1"]


async def test_nothing_is_deleted_before_the_node_knows_what_is_needed(
    runtime: LocalRuntime, store: ImageStore, tmp_path: Path
) -> None:
    assert await runtime.prune_images() == ()
    status, _, _ = await _paddock(tmp_path, "image", "prune")
    assert status == 0
    assert store.has("unneeded:1")


async def test_without_a_node_the_command_fails_and_deletes_nothing(
    store: ImageStore, tmp_path: Path
) -> None:
    status, _, errors = await _paddock(tmp_path, "image", "prune")
    assert status == 1
    assert "node" in errors
    assert store.has("unneeded:1")
