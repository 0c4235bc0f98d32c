"""Sandboxes for attacks, in each state of the battery."""

from paddock.runtime.port import Blueprint, Instance, Limits
from tests.runtime.local.nodes import TestNode


async def prepare(
    node: TestNode, uid: str, privileges: str, state: str, limits: Limits | None = None
) -> Instance:
    """Create a sandbox and bring it into a state (`attacks.STATES`)."""
    blueprint = Blueprint(uid=uid, image="host", privileges=privileges, limits=limits or Limits())
    if state in ("new", "woken"):
        made = await node.runtime.create(blueprint)
        if state == "woken":
            await node.runtime.hibernate(uid)
            made = await node.runtime.restore(uid)
        return made
    parent = await node.runtime.create(
        Blueprint(uid=f"{uid}-parent", image="host", privileges=privileges)
    )
    try:
        return await _clone(node, parent.uid, blueprint, state)
    finally:
        await node.runtime.destroy(parent.uid)


async def _clone(node: TestNode, parent: str, blueprint: Blueprint, state: str) -> Instance:
    if state == "forked":
        (made,) = await node.runtime.fork(parent, (blueprint,))
        assert isinstance(made, Instance), made
        return made
    snapshot = f"{parent}-snapshot"
    await node.runtime.snapshot(parent, snapshot, memory=True, keep_running=True)
    try:
        return await node.runtime.create(
            Blueprint(
                uid=blueprint.uid,
                image=blueprint.image,
                privileges=blueprint.privileges,
                limits=blueprint.limits,
                checkpoint_id=snapshot,
            )
        )
    finally:
        await node.runtime.delete_checkpoint(snapshot)
