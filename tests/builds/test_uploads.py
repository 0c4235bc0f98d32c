"""Uploads of builds: tokens, teams, sizes, removal."""

import asyncio
import os
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from paddock.builds.upload_offers import TOKEN_SECONDS, TOKENS_PER_TEAM
from paddock.builds.uploads import AT_ONCE_PER_TEAM, STALL_SECONDS, UPLOAD_SECONDS, Uploads
from paddock.kit.clock import ManualClock
from paddock.kit.errors import (
    ConflictError,
    DeadlineExceededError,
    DiskFullError,
    InvalidError,
    NotFoundError,
    TooLargeError,
)

DIGEST = "ab" * 32


async def chunks(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def uploads(tmp_path: Path, clock: ManualClock) -> Uploads:
    return Uploads(tmp_path, clock, max_bytes=10)


async def test_an_upload_is_there_for_its_team_alone(uploads: Uploads) -> None:
    size = await uploads.write(uploads.offer("red", DIGEST), chunks(b"abc", b"de"), length=5)
    path = uploads.path("red", DIGEST)
    assert size == 5
    assert path is not None
    assert path.read_bytes() == b"abcde"
    assert uploads.path("blue", DIGEST) is None


async def test_a_token_is_for_one_upload(uploads: Uploads) -> None:
    token = uploads.offer("red", DIGEST)
    await uploads.write(token, chunks(b"abc"))
    with pytest.raises(NotFoundError):
        await uploads.write(token, chunks(b"abc"))


async def test_a_token_expires(uploads: Uploads, clock: ManualClock) -> None:
    token = uploads.offer("red", DIGEST)
    clock.advance(TOKEN_SECONDS)
    with pytest.raises(NotFoundError, match="expired"):
        await uploads.write(token, chunks(b"abc"))


async def test_two_requests_cannot_use_a_token_at_once(uploads: Uploads) -> None:
    token = uploads.offer("red", DIGEST)

    async def meanwhile() -> AsyncIterator[bytes]:
        with pytest.raises(ConflictError):
            await uploads.write(token, chunks(b"other"))
        yield b"first"

    await uploads.write(token, meanwhile())


@pytest.mark.parametrize(
    ("parts", "length", "error"),
    [
        ((b"x" * 11,), None, TooLargeError),
        ((b"x",), 11, TooLargeError),
        ((b"abc",), 5, InvalidError),
        ((b"abcdef",), 5, InvalidError),
    ],
)
async def test_nothing_is_kept_of_a_refused_upload(
    uploads: Uploads,
    tmp_path: Path,
    parts: tuple[bytes, ...],
    length: int | None,
    error: type[Exception],
) -> None:
    token = uploads.offer("red", DIGEST)
    with pytest.raises(error):
        await uploads.write(token, chunks(*parts), length=length)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    await uploads.write(token, chunks(b"fits"), length=4)


async def test_a_partial_upload_of_an_earlier_process_is_removed(
    uploads: Uploads, tmp_path: Path
) -> None:
    await uploads.write(uploads.offer("red", DIGEST), chunks(b"abc"))
    (tmp_path / "red" / ".partial-1").write_bytes(b"x")
    uploads.remove_partial()
    assert [path.name for path in (tmp_path / "red").iterdir()] == [DIGEST]


async def test_an_upload_that_is_being_received_is_kept(uploads: Uploads) -> None:
    async def body() -> AsyncIterator[bytes]:
        yield b"a"
        uploads.remove_partial()
        yield b"bc"

    await uploads.write(uploads.offer("red", DIGEST), body())
    path = uploads.path("red", DIGEST)
    assert path is not None
    assert path.read_bytes() == b"abc"


async def test_old_and_least_recently_used_uploads_are_removed(
    uploads: Uploads, tmp_path: Path
) -> None:
    for number, age in enumerate((1000, 20, 10)):
        digest = f"{number}" * 64
        await uploads.write(uploads.offer("red", digest), chunks(b"abcd"))
        path = tmp_path / "red" / digest
        time = path.stat().st_mtime - age
        os.utime(path, (time, time))
    assert uploads.remove_unused(500) == 1
    assert uploads.remove_unused(500, max_bytes=4) == 1
    assert [path.name[0] for path in (tmp_path / "red").iterdir()] == ["2"]


@pytest.mark.parametrize(("team", "digest"), [("red", "../x"), ("../red", DIGEST), ("", DIGEST)])
def test_names_that_lead_elsewhere_are_refused(uploads: Uploads, team: str, digest: str) -> None:
    with pytest.raises(InvalidError):
        uploads.path(team, digest)


async def test_a_new_upload_replaces_the_least_recently_used_ones_of_its_team(
    tmp_path: Path, clock: ManualClock
) -> None:
    uploads = Uploads(tmp_path, clock, max_team_bytes=10)
    names = [letter * 64 for letter in "abcd"]
    for number, name in enumerate(names[:3]):
        await uploads.write(uploads.offer("red", name), chunks(b"xxxx"))
        os.utime(tmp_path / "red" / name, (number, number))
        if name == names[0]:
            await uploads.write(uploads.offer("blue", name), chunks(b"xxxx"))
    assert [uploads.path("red", name) is not None for name in names[:3]] == [False, True, True]
    await uploads.write(uploads.offer("red", names[3]), chunks(b"xxxxxxxx"))
    assert [uploads.path("red", name) is not None for name in names] == [False, False, False, True]
    assert uploads.path("blue", names[0]) is not None


async def test_an_upload_that_the_disk_has_no_room_for_is_refused_before_it_is_read(
    tmp_path: Path, clock: ManualClock
) -> None:
    def ensure_room(doing: str, needed_bytes: int) -> None:
        if needed_bytes > 5:
            raise DiskFullError(f"cannot {doing}")

    uploads = Uploads(tmp_path, clock, ensure_room=ensure_room)
    token = uploads.offer("red", DIGEST)
    with pytest.raises(DiskFullError, match="cannot store an upload"):
        await uploads.write(token, chunks(b"x" * 6), length=6)
    assert list(tmp_path.iterdir()) == []
    assert await uploads.write(token, chunks(b"x" * 5), length=5) == 5


async def test_an_upload_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, uploads: Uploads, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[tuple[str, int]] = []
    fsync, target = os.fsync, tmp_path / "red" / DIGEST

    def recorded(descriptor: int) -> None:
        facts = os.fstat(descriptor)
        is_directory = stat.S_ISDIR(facts.st_mode)
        done.append(("directory", target.exists()) if is_directory else ("file", facts.st_size))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", recorded)
    await uploads.write(uploads.offer("red", DIGEST), chunks(b"abc"))
    assert done == [("file", 3), ("directory", True)]


async def test_an_upload_completes_after_its_token_has_expired(
    uploads: Uploads, clock: ManualClock
) -> None:
    async def slow() -> AsyncIterator[bytes]:
        clock.advance(TOKEN_SECONDS)
        uploads.offer("red", "cd" * 32)
        yield b"abc"

    assert await uploads.write(uploads.offer("red", DIGEST), slow()) == 3
    assert uploads.path("red", DIGEST) is not None


async def test_what_is_being_received_is_not_removed_as_unused(uploads: Uploads) -> None:
    removed: list[int] = []

    async def parts() -> AsyncIterator[bytes]:
        yield b"abc"
        removed.append(uploads.remove_unused(0.0, max_bytes=0))
        yield b"de"

    await uploads.write(uploads.offer("red", DIGEST), parts())
    assert removed == [0]
    assert uploads.path("red", DIGEST) is not None


async def test_a_file_that_disappears_does_not_end_the_removal_of_others(
    tmp_path: Path, uploads: Uploads, monkeypatch: pytest.MonkeyPatch
) -> None:
    await uploads.write(uploads.offer("red", DIGEST), chunks(b"abc"))
    found = [tmp_path / "red" / ("cd" * 32), tmp_path / "red" / DIGEST]
    monkeypatch.setattr(Path, "glob", lambda *_: iter(found))
    assert uploads.remove_unused(1e9, max_bytes=0) == 1


async def test_a_team_displaces_only_its_own_tokens(uploads: Uploads) -> None:
    blue = uploads.offer("blue", DIGEST)
    red = [uploads.offer("red", DIGEST) for _ in range(TOKENS_PER_TEAM + 1)]
    assert uploads.offered(blue) is not None
    assert uploads.offered(red[0]) is None
    assert all(uploads.offered(token) is not None for token in red[1:])


async def test_files_of_a_team_that_uploads_little_stay_when_there_are_too_many(
    uploads: Uploads, tmp_path: Path
) -> None:
    for team, letter, age in [("blue", "a", 90), ("red", "b", 30), ("red", "c", 20)]:
        await uploads.write(uploads.offer(team, letter * 64), chunks(b"x" * 8))
        path = tmp_path / team / (letter * 64)
        time = path.stat().st_mtime - age
        os.utime(path, (time, time))
    assert uploads.remove_unused(1000, max_bytes=16) == 1
    assert uploads.path("blue", "a" * 64) is not None
    assert uploads.path("red", "b" * 64) is None
    assert uploads.path("red", "c" * 64) is not None


@pytest.mark.looptime
async def test_a_client_that_stops_sending_ends_its_upload(tmp_path: Path) -> None:
    uploads = Uploads(tmp_path, ManualClock())

    async def stalled() -> AsyncIterator[bytes]:
        yield b"abc"
        await asyncio.sleep(STALL_SECONDS + 1)
        yield b"def"

    with pytest.raises(DeadlineExceededError, match="no data arrived for 60 s"):
        await uploads.write(uploads.offer("red", DIGEST), stalled())
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.looptime
async def test_an_upload_that_takes_too_long_ends(tmp_path: Path) -> None:
    uploads = Uploads(tmp_path, ManualClock())

    async def slow() -> AsyncIterator[bytes]:
        while True:
            await asyncio.sleep(STALL_SECONDS / 2)
            yield b"x"

    token, loop = uploads.offer("red", DIGEST), asyncio.get_running_loop()
    began = loop.time()
    with pytest.raises(DeadlineExceededError, match="took longer than 3600 s"):
        await uploads.write(token, slow())
    assert loop.time() - began == pytest.approx(UPLOAD_SECONDS)
    assert await uploads.write(token, chunks(b"abc")) == 3


async def test_a_team_with_many_uploads_waits_for_itself_and_not_others_for_it(
    tmp_path: Path, clock: ManualClock
) -> None:
    uploads, released = Uploads(tmp_path, clock), asyncio.Event()
    begun: list[int] = []

    async def held(number: int) -> AsyncIterator[bytes]:
        begun.append(number)
        await released.wait()
        yield b"abc"

    async with asyncio.TaskGroup() as tasks:
        for number in range(2 * AT_ONCE_PER_TEAM):
            token = uploads.offer("red", f"{number:064x}")
            tasks.create_task(uploads.write(token, held(number)))
        await uploads.write(uploads.offer("blue", DIGEST), chunks(b"abc"))
        assert len(begun) == AT_ONCE_PER_TEAM
        released.set()
    assert len(begun) == 2 * AT_ONCE_PER_TEAM
