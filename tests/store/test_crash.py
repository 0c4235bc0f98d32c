"""SIGKILL during a thousand concurrent writers: no acknowledged write is lost or torn.

`--faults-seed` replays the writes and the moment of the kill, as far as real time allows.
"""

import os
import random
import selectors
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest
from msgspec import Struct

from paddock.resources.kinds.template import SandboxTemplate
from paddock.store.sqlite import SqliteStore
from tests.faults.clients import replayed_by, seed_of

WRITERS = 1000
ROUNDS = 4
LEAST = WRITERS // ROUNDS
"""Minimum number of acknowledged writes per round, also on a slow disk."""


class Acknowledged(Struct):
    """The last line that a writer printed about its object."""

    said: str
    version: int
    counter: int


def write_until_killed(path: Path, *, seed: int, seconds: float) -> list[str]:
    """Run the writer, kill it some time after its first acknowledgements, return its output."""
    command = [sys.executable, "-m", "tests.store.crash_writer", str(path), str(seed)]
    process = subprocess.Popen([*command, str(WRITERS)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    said = bytearray()
    kill_at: float | None = None
    with process.stdout as pipe, selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        while True:
            patience = 60.0 if kill_at is None else max(0.0, kill_at - time.monotonic())
            if not selector.select(patience):
                break
            said += os.read(pipe.fileno(), 1 << 16)
            if kill_at is None and said.count(b"put ") > LEAST:
                kill_at = time.monotonic() + seconds
            elif kill_at is not None and time.monotonic() >= kill_at:
                break
        assert process.poll() is None, "the writer ended by itself"
        process.send_signal(signal.SIGKILL)
        process.wait()
        # Output from before the kill is still in the pipe.
        while chunk := os.read(pipe.fileno(), 1 << 16):
            said += chunk
    complete, _, _ = said.rpartition(b"\n")
    return complete.decode().splitlines()


def note(lines: list[str], known: dict[str, Acknowledged]) -> int:
    """Record acknowledged writes and return the highest version."""
    highest = 0
    for line in lines:
        if line == "ready":
            continue
        operation, name, version, counter = line.split()
        known[name] = Acknowledged(operation, int(version), int(counter))
        highest = max(highest, int(version))
    return highest


@pytest.mark.faults
@pytest.mark.timeout(300)
async def test_every_acknowledged_write_survives_sigkill(
    tmp_path: Path, request: pytest.FixtureRequest
):
    seed = seed_of(request)
    with replayed_by(f"--faults-seed {seed}"):
        await write_and_kill(tmp_path / "store.db", seed)


async def write_and_kill(path: Path, seed: int) -> None:
    rng = random.Random(seed)
    known: dict[str, Acknowledged] = {}
    highest = writes = 0
    for number in range(ROUNDS):
        lines = write_until_killed(path, seed=seed * ROUNDS + number, seconds=rng.uniform(0.0, 0.7))
        writes += len(lines)
        newest = note(lines, known)
        assert newest > highest, "versions went back after a restart"

        async with await SqliteStore.open(path) as store:
            listed = await store.list(SandboxTemplate)
            assert int(listed.version) >= newest
            highest = int(listed.version)
            stored = {item.metadata.name: item for item in listed.items}
        for name, obj in stored.items():
            counter = obj.metadata.labels["n"]
            assert obj.spec.image.startswith("i"), name
            assert obj.metadata.annotations["fill"].startswith(f"{counter}-"), name
            assert int(obj.metadata.resource_version) <= highest
        for name, last in known.items():
            check_kept(name, last, stored.get(name))
        # Unacknowledged writes may have succeeded: continue from the stored state.
        known = {
            name: Acknowledged(
                "put", int(obj.metadata.resource_version), int(obj.metadata.labels["n"])
            )
            for name, obj in stored.items()
        }
        with closing(sqlite3.connect(path)) as connection:
            assert connection.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
    assert writes > WRITERS


def check_kept(name: str, last: Acknowledged, obj: SandboxTemplate | None) -> None:
    """A writer has at most one write in flight: the store may be one write ahead."""
    if obj is None:
        assert last.said in ("deleting", "deleted"), f"{name}: an acknowledged write is lost"
        return
    counter, version = int(obj.metadata.labels["n"]), int(obj.metadata.resource_version)
    if version == last.version:
        assert last.said != "deleted", f"{name} exists after its acknowledged deletion"
        assert counter == last.counter
    else:
        assert version > last.version, f"{name}: an acknowledged write is lost"
        assert counter == last.counter + 1, f"{name}: {counter} after {last.counter}"
