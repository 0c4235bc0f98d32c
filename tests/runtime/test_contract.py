"""Runs the contract suite on every driver of this machine."""

import os

import pytest

from paddock.runtime.simulated import SimulatedRuntime
from tests.runtime.contract import RuntimeContract, World
from tests.runtime.local.nodes import TestNode, eventually

pytestmark = pytest.mark.timeout(120)


class TestSimulatedDriver(RuntimeContract):
    @pytest.fixture
    def world(self):
        runtime = SimulatedRuntime()

        async def crash(uid: str) -> None:
            runtime.crash(uid)

        return World(runtime, image="base", crash=crash, never_ready=runtime.never_ready)


def world_of(node: TestNode) -> World:
    async def crash(uid: str) -> None:
        pid = (await node.facts())["inits"][uid]
        os.kill(pid, 9)

        async def is_over() -> bool:
            return (await node.runtime.inspect(uid)).state == "failed"

        await eventually(is_over)

    return World(node.runtime, image="host", crash=crash)


@pytest.mark.sandbox
class TestLocalDriver(RuntimeContract):
    @pytest.fixture
    def world(self, node):
        return world_of(node)


@pytest.mark.sandbox
class TestRootlessDriver(RuntimeContract):
    @pytest.fixture
    def world(self, rootless_node):
        return world_of(rootless_node)
