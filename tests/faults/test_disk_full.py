"""A full disk under the store: writes are refused with a reason, nothing acknowledged is lost, and
work continues when there is room again.
"""

import asyncio
import tempfile
from pathlib import Path

import pytest
from msgspec import structs

from paddock.claims.requests import NewSandbox
from paddock.kit.clock import SystemClock
from paddock.kit.errors import DeadlineExceededError, PaddockError, UnavailableError
from paddock.resources.kinds.sandbox import Sandbox
from paddock.runtime.simulated import SimulatedRuntime
from paddock.store.sqlite import SqliteStore
from tests import disks
from tests.runtime.local.nodes import eventually
from tests.scenario.paddock import CALLER, paddock

pytestmark = [pytest.mark.faults, pytest.mark.sandbox, pytest.mark.timeout(240)]


@pytest.fixture
def small_disk():
    with (
        tempfile.TemporaryDirectory(prefix="pdfull") as directory,
        disks.small_disk(Path(directory), "4m") as disk,
    ):
        yield disk


def fill(path: Path) -> None:
    """Fill the disk."""
    with path.open("wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError:
            return


async def test_a_full_disk_refuses_writes_loses_nothing_and_recovers(small_disk: Path) -> None:
    clock = SystemClock()
    runtime = SimulatedRuntime(clock=clock, latencies={})
    wanted = NewSandbox(template="base", timeout_seconds=None)
    hurried = structs.replace(wanted, claim_timeout_seconds=5, ready_timeout_seconds=5)
    async with (
        await SqliteStore.open(small_disk / "store.db", clock=clock) as store,
        paddock(pool_size=2, store=store, runtime=runtime, clock=clock) as world,
    ):
        given = [await world.manager.claims.create(CALLER, wanted) for _ in range(3)]
        fill(small_disk / "ballast")
        is_refused = False
        for _ in range(100):
            try:
                given.append(await world.manager.claims.create(CALLER, hurried))
            except UnavailableError:
                is_refused = True
                break
            except DeadlineExceededError:
                # There was room for the claim, but not for the status that its sandbox runs.
                continue
        assert is_refused, "the disk was never full"
        # Reads are not affected.
        for sandbox in given:
            claim = sandbox.spec.claim
            assert claim is not None
            await world.manager.queries.get(CALLER, claim.sandbox_id)

        (small_disk / "ballast").unlink()

        async def works_again() -> bool:
            try:
                given.append(await world.manager.claims.create(CALLER, hurried))
            except PaddockError:
                return False
            return True

        await eventually(works_again, seconds=60, pause=0.5)
        uids = {sandbox.metadata.uid for sandbox in given}

        async def only_acknowledged_sandboxes_are_left() -> bool:
            names = [task.get_name() for task in asyncio.all_tasks()]
            is_disowning = any(name.startswith("disown ") for name in names)
            return not is_disowning and await claimed(store) == uids

        # What was refused is cleaned up in the background.
        await eventually(only_acknowledged_sandboxes_are_left, seconds=60, pause=0.1)
    # As after a crash: from the file alone.
    async with await SqliteStore.open(small_disk / "store.db", clock=clock) as again:
        assert await claimed(again) == uids


async def claimed(store: SqliteStore) -> set[str]:
    page = await store.list(Sandbox)
    return {item.metadata.uid for item in page.items if item.spec.claim and not item.is_deleting}
