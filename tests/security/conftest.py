"""Sandboxes under attack: of both privileges, in every state of the battery."""

import pytest

from paddock.runtime.port import Instance
from tests.runtime.conftest import _node, box, node
from tests.security.battery.attacks import PRIVILEGES, STATES
from tests.security.battery.states import prepare

__all__ = ["_node", "box", "node"]


@pytest.fixture(params=STATES)
def age(request) -> str:
    """What happened to the sandbox before the attack."""
    return request.param


@pytest.fixture(params=PRIVILEGES)
def privileges(request) -> str:
    """The privileges of the sandbox under attack."""
    return request.param


@pytest.fixture
async def attacker(node, age, privileges) -> Instance:
    """A sandbox for attacks that fail; one per privilege and age, replaced if a test broke it."""
    name = f"attacker-{privileges}-{age}"
    found = await node.runtime.inspect(name)
    if found is not None and found.state == "running":
        return found
    await node.runtime.destroy(name)
    return await prepare(node, name, privileges, age)
