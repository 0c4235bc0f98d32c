"""A full disk: failed writes are noticed, and sandboxes can be destroyed."""

import os
import signal
from pathlib import Path

import pytest
from msgspec import structs

from paddock.runtime.local.net.records import NetworkRecord, NetworkRecords
from paddock.runtime.local.node.records import SandboxRecord, StateDirectory
from paddock.runtime.port import AgentConfig, Blueprint, EgressPolicy, InstanceState
from tests.disks import small_disk
from tests.runtime.local.inside import run
from tests.runtime.local.nodes import TestNode, eventually

pytestmark = [pytest.mark.sandbox, pytest.mark.timeout(120)]


def fill(directory: Path) -> None:
    """Fill the disk completely."""
    with (directory / "ballast").open("wb", buffering=0) as file:
        for size in (1 << 20, 4096, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue


async def test_sandboxes_can_be_destroyed_on_a_full_disk(tmp_path):
    with small_disk(tmp_path / "disk", "64m") as disk:
        node = TestNode("--storage", "plain", state=str(disk / "n"))
        await node.start()
        try:
            for uid in ("one", "two"):
                instance = await node.runtime.create(Blueprint(uid=uid, image="host"))
            assert (await run(instance, "echo there")).out == "there\n"
            fill(disk)
            for uid in ("one", "two"):
                await node.runtime.destroy(uid)
                assert await node.runtime.inspect(uid) is None
            (disk / "ballast").unlink()
            await node.runtime.create(Blueprint(uid="three", image="host"))
        finally:
            await node.stop()


async def test_state_changes_when_records_cannot_be_written(tmp_path):
    node = TestNode("--storage", "plain", state=str(tmp_path / "n"))
    await node.start()
    try:
        for uid in ("one", "two"):
            await node.runtime.create(Blueprint(uid=uid, image="host"))
        kept = dict(StateDirectory(tmp_path / "n").read_all())
        for uid in ("one", "two"):
            directory = tmp_path / "n" / "sandboxes" / uid
            for number in range(2):  # a directory cannot be written
                (directory / f"record.{number}").unlink(missing_ok=True)
                (directory / f"record.{number}").mkdir()

        os.kill(kept["two"].init.pid, signal.SIGKILL)

        async def has_failed() -> bool:
            return (await node.runtime.inspect("two")).state is InstanceState.FAILED

        await eventually(has_failed)
        for uid in ("one", "two"):
            await node.runtime.destroy(uid)
            assert await node.runtime.inspect(uid) is None
        assert list((tmp_path / "n" / "sandboxes").iterdir()) == []
    finally:
        await node.stop()


def test_a_record_that_does_not_fit_is_refused_and_the_previous_one_stays(tmp_path):
    with small_disk(tmp_path / "disk", "1m") as disk:
        directories = StateDirectory(disk / "n")
        directories.prepare()
        small = SandboxRecord(
            uid="one", blueprint=Blueprint(uid="one", image="host"), state=InstanceState.CREATING,
            slot=1, agent=AgentConfig(), egress=EgressPolicy(),
        )  # fmt: skip
        for state in (InstanceState.CREATING, InstanceState.RUNNING):
            directories.write(structs.replace(small, state=state))
        fill(disk)
        large = Blueprint(uid="one", image="host", env={"LONG": "x" * 6000})

        with pytest.raises(OSError, match="No space left"):
            directories.write(structs.replace(small, blueprint=large))

        ((_, kept),) = directories.read_all()
        assert kept is not None
        assert (kept.state, kept.blueprint.env) == (InstanceState.RUNNING, {})


def test_a_network_record_that_did_not_fit_leaves_no_file(tmp_path):
    with small_disk(tmp_path / "disk", "1m") as disk:
        records = NetworkRecords(str(disk / "net"))
        records.load()
        first = NetworkRecord(uid="one", slot=1, policy=EgressPolicy(), marks=(1,))
        records.save(first)
        fill(disk)

        with pytest.raises(OSError, match="No space left"):
            records.save(structs.replace(first, marks=(2,)))

        assert NetworkRecords(str(disk / "net")).load() == ({"one": first}, [])
        (disk / "ballast").unlink()
        records.save(structs.replace(first, marks=(3,)))
        assert len(list((disk / "net").iterdir())) == 1
        records.forget("one")
        assert list((disk / "net").iterdir()) == []


def test_an_incomplete_network_record_is_removed(tmp_path):
    first = NetworkRecord(uid="one", slot=1, policy=EgressPolicy(), marks=(1,))
    records = NetworkRecords(str(tmp_path))
    records.load()
    records.save(first)
    (tmp_path / "one@2.json.new").write_bytes(b'{"uid":')

    assert NetworkRecords(str(tmp_path)).load() == ({"one": first}, [])
    assert [path.name for path in tmp_path.iterdir()] == ["one@1.json"]
