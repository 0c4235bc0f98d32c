"""Claiming a warm sandbox: every outcome of the write, with a scripted store."""

from datetime import UTC, datetime
from typing import Any

import pytest
from msgspec import structs

from paddock.claims import warm
from paddock.kit.errors import (
    ConflictError,
    InvalidError,
    NotFoundError,
    PaddockError,
    UnavailableError,
)
from paddock.resources.kinds.sandbox import ClaimIdentity, Sandbox, SandboxSpec
from paddock.resources.meta import Key, ObjectMeta

NOW = datetime(2026, 1, 1, tzinfo=UTC)
POOL = Key("default", "p")
AWAY = UnavailableError("the store is away")


class Script:
    """Pool members, cache and store in one, with scripted replies to writes."""

    def __init__(self, warm_ones: int, replies: list[Exception | None], found: Any) -> None:
        self._names = [f"s{number}" for number in range(warm_ones)]
        self._replies = replies
        self._found = found
        self.written: list[str] = []
        self.returned: list[str] = []
        self.write = self.live = self

    # pool members
    def reserve(self, _pool: Key, _revision: str | None) -> Sandbox | None:
        if not self._names:
            return None
        return Sandbox(metadata=ObjectMeta(name=self._names.pop(0), namespace="default"))

    def unreserve(self, key: Key) -> None:
        self.returned.append(key.name)

    # cache
    def informer(self, _kind: object) -> "Script":
        return self

    def observe(self, _sandbox: Sandbox) -> None:
        return None

    # cache and store: `get(key)` of the cache is synchronous, `get(kind, key)` reads the store
    def get(self, *names: object) -> Any:
        if len(names) == 1:
            return None
        return self._read()

    async def _read(self) -> Sandbox:
        if isinstance(self._found, Exception):
            raise self._found
        return self._found

    async def update(self, wanted: Sandbox) -> Sandbox:
        self.written.append(wanted.metadata.name)
        reply = self._replies.pop(0) if self._replies else None
        if reply is not None:
            raise reply
        return wanted


def claimed(sandbox: Sandbox, lock: str = "mine") -> Sandbox:
    identity = ClaimIdentity(sandbox_id="id", owner="team", lock=lock, claim_time=NOW)
    return structs.replace(sandbox, spec=SandboxSpec(claim=identity))


OURS = claimed(Sandbox(metadata=ObjectMeta(name="s0", namespace="default")))
THEIRS = claimed(OURS, "theirs")
GONE = NotFoundError("gone")
TAKEN = ConflictError("taken")


@pytest.mark.parametrize(
    ("warm_ones", "replies", "found", "taken", "written", "returned"),
    [
        (0, [], GONE, None, [], []),
        (2, [], GONE, "s0", ["s0"], []),
        (2, [TAKEN], GONE, "s1", ["s0", "s1"], []),
        (2, [GONE], GONE, "s1", ["s0", "s1"], []),
        (1, [TAKEN], GONE, None, ["s0"], []),
        (1, [AWAY], OURS, "s0", ["s0"], []),  # written, and only the reply was lost
        (2, [AWAY], THEIRS, "s1", ["s0", "s1"], ["s0"]),
        (2, [AWAY], GONE, "s1", ["s0", "s1"], ["s0"]),
        (1, [OSError("reset")], OURS, "s0", ["s0"], []),
    ],
)
async def test_the_first_write_that_succeeds_takes_the_sandbox(
    warm_ones: int,
    replies: list[Exception | None],
    found: Any,
    taken: str | None,
    written: list[str],
    returned: list[str],
) -> None:
    script: Any = Script(warm_ones, list(replies), found)
    unresolved: list[Sandbox] = []
    sandbox = await warm.take(script, script, POOL, claimed, unresolved=unresolved)
    assert (sandbox.metadata.name if sandbox else None) == taken
    assert (script.written, script.returned, unresolved) == (written, returned, [])


@pytest.mark.parametrize(
    ("replies", "found", "error", "written", "unresolved"),
    [
        # Rejected: not written, and available for the next claim.
        ([InvalidError("no")], GONE, InvalidError, ["s0"], []),
        # The store is unavailable: no more sandboxes are tried.
        ([AWAY] * 5, GONE, UnavailableError, ["s0", "s1", "s2"], []),
        # Neither the write nor the lookup has a reply: it may have been written.
        ([AWAY], AWAY, UnavailableError, ["s0"], ["s0"]),
    ],
)
async def test_after_an_error_possible_writes_stay_unresolved(
    replies: list[Exception | None],
    found: Any,
    error: type[PaddockError],
    written: list[str],
    unresolved: list[str],
) -> None:
    script: Any = Script(5, list(replies), found)
    left: list[Sandbox] = []
    with pytest.raises(error):
        await warm.take(script, script, POOL, claimed, unresolved=left)
    assert script.written == written
    assert [item.metadata.name for item in left] == unresolved
    # Sandboxes that are certainly not written are available again.
    assert script.returned == [name for name in written if name not in unresolved]
