"""Nodes shared by the tests of one process: starting one takes a second."""

import asyncio
import os

import pytest

from paddock.runtime.port import Blueprint, Instance
from tests.runtime.local.nodes import TestNode, resource_name_of, wait_for_warm


def _shared(*arguments: str, rootless: bool = False):
    if os.geteuid() != 0:
        pytest.skip("needs root to make sandboxes")
    node = TestNode(*arguments, rootless=rootless)
    asyncio.run(_start(node))
    return node


async def _start(node: TestNode) -> None:
    await node.start()
    node.runtime.close()


async def _stop(node: TestNode) -> None:
    await node.stop()


@pytest.fixture(scope="session")
def _node():
    node = _shared()
    yield node
    asyncio.run(_stop(node))


@pytest.fixture(scope="session")
def _rootless_node():
    node = _shared(rootless=True)
    yield node
    asyncio.run(_stop(node))


@pytest.fixture
async def node(_node):
    """A node that runs as root, with all capabilities of this machine."""
    yield _node
    _node.runtime.close()


@pytest.fixture
async def rootless_node(_rootless_node):
    """A node that runs as an unprivileged user."""
    yield _rootless_node
    _rootless_node.runtime.close()


@pytest.fixture(params=["cold", "warm"])
async def shared_box(node, request):
    """A sandbox for tests that do not change it; replaced if a test broke it.

    Each test runs on a cold and on a claimed warm sandbox.
    """
    kept = node.shared.get(request.param)
    if kept is not None:
        found = await node.runtime.inspect(kept)
        if found is not None and found.state == "running":
            return found
        await node.runtime.destroy(kept)
    make = make_warm if request.param == "warm" else make_cold
    made = await make(node)
    node.shared[request.param] = made.uid
    return made


@pytest.fixture
async def box(node):
    """Create sandboxes for one test."""
    made = []

    async def make(**changes) -> Instance:
        uid = f"e{os.urandom(4).hex()}"
        made.append(uid)
        return await node.runtime.create(Blueprint(uid=uid, image="host", **changes))

    yield make
    for uid in made:
        await node.runtime.destroy(uid)


async def make_warm(node: TestNode) -> Instance:
    """Create a sandbox from the warm stock."""
    await wait_for_warm(node)
    made = await node.runtime.create(Blueprint(uid="shared-warm", image="host"))
    assert resource_name_of(node, made.uid).startswith("warm-")
    return made


async def make_cold(node: TestNode) -> Instance:
    """Create a sandbox that is not from the warm stock, by creating more than the stock holds."""
    for _ in range(10):
        made = await asyncio.gather(
            *(
                node.runtime.create(Blueprint(uid=f"shared-cold-{number}", image="host"))
                for number in range(11)
            )
        )
        # Which one is cold depends on the stock meanwhile: on a slow machine it may be refilled
        # in between.
        cold = [one for one in made if resource_name_of(node, one.uid) == ""]
        for one in made:
            if one not in cold[:1]:
                await node.runtime.destroy(one.uid)
        if cold:
            return cold[0]
    pytest.fail("every sandbox came from the warm stock")
