"""Which sandbox a call is for, and what happens to it at the end of a session."""

import asyncio

import pytest

from paddock.api.mcp.session import SESSION_KEY, McpSession, SessionMemories, SessionMemory
from paddock.kit.errors import ConflictError, InvalidError, NotFoundError
from tests.api.mcp.fakes import FakeSandboxes

pytestmark = pytest.mark.looptime


def session(
    boxes: FakeSandboxes, name: str = "one", memory: SessionMemory | None = None
) -> McpSession:
    return McpSession(boxes, name, memory or SessionMemory(), template="base", idle_seconds=60)


async def test_the_first_call_creates_the_default_sandbox_and_later_ones_use_it() -> None:
    boxes = FakeSandboxes()
    mine = session(boxes)
    first = await mine.open()
    assert (await mine.open()).sandbox_id == first.sandbox_id
    assert boxes.boxes[first.sandbox_id].metadata == {SESSION_KEY: "one"}
    assert len(boxes.boxes) == 1


async def test_sessions_have_sandboxes_of_their_own() -> None:
    boxes = FakeSandboxes()
    one, two = await session(boxes, "one").open(), await session(boxes, "two").open()
    assert one.sandbox_id != two.sandbox_id


async def test_first_calls_at_once_create_one_sandbox() -> None:
    boxes = FakeSandboxes()
    boxes.latency = 0.1
    mine, elsewhere = session(boxes), session(boxes)
    opened = await asyncio.gather(mine.open(), mine.open(), elsewhere.open())
    assert len({box.sandbox_id for box in opened}) == len(boxes.boxes) == 1


async def test_another_process_finds_the_sandbox_of_a_session() -> None:
    boxes = FakeSandboxes()
    first = await session(boxes).open()
    assert (await session(boxes).open()).sandbox_id == first.sandbox_id
    assert await session(boxes).resolve(None) == first.sandbox_id


async def test_a_clone_does_not_take_the_place_of_the_default_sandbox() -> None:
    boxes = FakeSandboxes()
    first = await session(boxes).open()
    await boxes.fork(first.sandbox_id, count=2, seconds=60)
    assert (await session(boxes).open()).sandbox_id == first.sandbox_id


@pytest.mark.parametrize("is_restarted", [False, True])
@pytest.mark.parametrize("template", ["base", f"snap{1:032x}"], ids=["template", "snapshot"])
async def test_a_clone_does_not_become_the_default_sandbox_when_that_is_killed(
    template: str, is_restarted: bool
) -> None:
    boxes = FakeSandboxes()
    mine = session(boxes)
    first, _ = await mine.create(template, seconds=None, env={}, metadata={})
    [clone], _ = await boxes.fork(first.sandbox_id, count=1, seconds=60)
    assert (await session(boxes).open()).sandbox_id == first.sandbox_id
    mine = session(boxes) if is_restarted else mine
    await mine.kill(first.sandbox_id)
    with pytest.raises(ConflictError, match="no sandbox yet"):
        await mine.resolve(None)
    assert (await mine.open()).sandbox_id not in (first.sandbox_id, clone)


async def test_a_call_extends_the_timeout_by_its_own_length() -> None:
    boxes = FakeSandboxes()
    box = await session(boxes).open(seconds=120.5)
    assert boxes.timeouts[box.sandbox_id] == 60 + 121


async def test_a_default_sandbox_that_has_ended_is_replaced() -> None:
    boxes = FakeSandboxes()
    mine = session(boxes)
    first = await mine.open()
    boxes.boxes.clear()
    second = await mine.open()
    assert second.sandbox_id in boxes.boxes
    assert first.sandbox_id == "box1"


async def test_a_killed_default_sandbox_is_replaced() -> None:
    boxes = FakeSandboxes()
    mine = session(boxes)
    await mine.kill((await mine.open()).sandbox_id)
    assert boxes.boxes == {}
    await mine.open()
    assert len(boxes.boxes) == 1


async def test_the_first_sandbox_that_is_created_is_the_default() -> None:
    boxes = FakeSandboxes()
    mine = session(boxes)
    first, is_default = await mine.create("tools", seconds=None, env={}, metadata={"a": "b"})
    other, is_other = await mine.create(None, seconds=30, env={}, metadata={})
    assert (is_default, is_other) == (True, False)
    assert (await mine.open()).sandbox_id == first.sandbox_id
    assert (boxes.boxes["box1"].template, boxes.boxes["box2"].template) == ("tools", "base")
    assert boxes.boxes[other.sandbox_id].metadata == {}


async def test_clients_cannot_claim_the_metadata_of_a_session() -> None:
    with pytest.raises(InvalidError, match="reserved"):
        await session(FakeSandboxes()).create(
            None, seconds=None, env={}, metadata={SESSION_KEY: "two"}
        )


async def test_the_end_of_a_session_pauses_its_default_sandbox() -> None:
    boxes = FakeSandboxes()
    mine = session(boxes)
    await mine.end()
    box = await mine.open()
    await mine.end()
    assert boxes.state[box.sandbox_id] == "paused"
    await mine.open()
    assert boxes.state[box.sandbox_id] == "running"


async def test_the_end_of_a_session_whose_sandbox_is_gone_is_no_error() -> None:
    boxes = FakeSandboxes()
    mine = session(boxes)
    await mine.open()
    boxes.boxes.clear()
    await mine.end()


async def test_without_a_session_calls_name_their_sandbox() -> None:
    boxes = FakeSandboxes()
    none = session(boxes, "")
    with pytest.raises(InvalidError, match="sandbox_id: is required"):
        await none.open()
    box, is_default = await none.create(None, seconds=None, env={}, metadata={})
    assert not is_default
    assert (await none.open(box.sandbox_id)).sandbox_id == box.sandbox_id
    await none.end()
    assert boxes.state[box.sandbox_id] == "running"


async def test_a_session_without_sandbox_says_how_to_get_one() -> None:
    with pytest.raises(ConflictError, match="no sandbox yet") as caught:
        await session(FakeSandboxes()).resolve(None)
    assert "create_sandbox" in str(caught.value.hint)


async def test_an_unknown_sandbox_is_not_found() -> None:
    with pytest.raises(NotFoundError):
        await session(FakeSandboxes()).open("nothere")


def test_other_keys_do_not_share_the_memory_of_a_session() -> None:
    memories = SessionMemories(limit=2)
    one = memories.of("key1", "session")
    assert memories.of("key1", "session") is one
    assert memories.of("key2", "session") is not one
    memories.of("key3", "session")
    assert memories.of("key1", "session") is not one, "the oldest is forgotten"
