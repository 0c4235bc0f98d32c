"""A node that is killed before a checkpoint is recorded: a repetition stores the files of its own
moment, and without one nothing is left.
"""

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from paddock.kit.errors import UnavailableError
from paddock.runtime.port import Blueprint, Instance
from tests.runtime.local.inside import run
from tests.runtime.local.nodes import TestNode

pytestmark = [
    pytest.mark.sandbox,
    pytest.mark.faults,
    pytest.mark.timeout(180),
    pytest.mark.skipif(os.geteuid() != 0, reason="checkpoints need root"),
]

KILLED = """
import os, signal
from paddock.runtime.local.sandbox.checkpoint_records import CheckpointRecords

async def write(self, *args, **more):
    os.kill(os.getpid(), signal.SIGKILL)

CheckpointRecords.write = write
"""


@pytest.fixture
async def node() -> AsyncIterator[TestNode]:
    node = TestNode()
    node.prelude = KILLED
    await node.start()
    node.prelude = ""
    yield node
    await node.stop()


async def killed_while_storing(node: TestNode, *, memory: bool) -> Instance:
    """Return a sandbox whose first file is `before`, from the node that was started again."""
    box = await node.runtime.create(Blueprint(uid="box", image="host"))
    await run(box, "echo before > /root/file")
    with pytest.raises(UnavailableError):
        await node.runtime.snapshot("box", "cp", memory=memory, keep_running=True)
    await node.wait_until_it_ends()
    assert stored(node) == ["cp"]
    await node.start()
    found = await node.runtime.inspect("box")
    assert found is not None
    return found


def stored(node: TestNode) -> list[str]:
    """Return the checkpoints that have files or memory on the disk."""
    storage = Path(node.state) / "storage"
    places = [path for path in storage.rglob("checkpoints") if path.is_dir()]
    assert places, sorted(storage.iterdir())
    return sorted(
        {entry.name.removesuffix(".json") for place in places for entry in place.iterdir()}
    )


@pytest.mark.parametrize("memory", [False, True])
async def test_what_was_not_recorded_is_removed_when_the_node_starts(
    node: TestNode, memory: bool
) -> None:
    await killed_while_storing(node, memory=memory)
    assert await node.runtime.checkpoints() == ()
    assert stored(node) == []


@pytest.mark.parametrize("memory", [False, True])
async def test_a_repetition_stores_the_files_of_its_own_moment(
    node: TestNode, memory: bool
) -> None:
    box = await killed_while_storing(node, memory=memory)
    await run(box, "echo after > /root/file")
    await node.runtime.snapshot("box", "cp", memory=memory, keep_running=True)
    clone = await node.runtime.create(
        Blueprint(uid="clone", image="host", checkpoint_id="cp", restore_memory=memory)
    )
    assert (await run(clone, "cat /root/file")).out == "after\n"
    await node.runtime.delete_checkpoint("cp")
