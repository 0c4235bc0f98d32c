"""Sandboxes under attack: of both privileges, new, woken from hibernation, and forked."""

import pytest

from paddock.runtime.port import Blueprint, Instance
from tests.runtime.conftest import _node, box, node
from tests.runtime.local.nodes import TestNode

__all__ = ["_node", "box", "node"]


@pytest.fixture(params=["new", "woken", "forked"])
def age(request) -> str:
    """What happened to the sandbox before the attack."""
    return request.param


@pytest.fixture(params=["sudo", "locked"])
async def attacker(node, age, request) -> Instance:
    """A sandbox for attacks that fail; one per privilege and age, replaced if a test broke it."""
    name = f"attacker-{request.param}-{age}"
    found = await node.runtime.inspect(name)
    if found is not None and found.state == "running":
        return found
    await node.runtime.destroy(name)
    return await _make(node, name, request.param, age)


async def _make(node: TestNode, name: str, privileges: str, age: str) -> Instance:
    blueprint = Blueprint(uid=name, image="host", privileges=privileges)
    if age == "forked":
        parent = await node.runtime.create(
            Blueprint(uid=f"{name}-parent", image="host", privileges=privileges)
        )
        (made,) = await node.runtime.fork(parent.uid, (blueprint,))
        await node.runtime.destroy(parent.uid)
        assert isinstance(made, Instance), made
        return made
    made = await node.runtime.create(blueprint)
    if age == "woken":
        await node.runtime.hibernate(name)
        made = await node.runtime.restore(name)
    return made
