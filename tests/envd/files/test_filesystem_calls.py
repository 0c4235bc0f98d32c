"""The RPC service `filesystem.Filesystem`: stat, list, create, move, remove, watch."""

import asyncio
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from paddock.envd.files import entries, watch
from tests.envd.rig import USER_UID, Rig, open_rig

pytestmark = pytest.mark.timeout(120)

RAW = {"content_type": "application/octet-stream"}


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    opened = await open_rig(tmp_path)
    yield opened
    opened.envd.close()


async def test_stat_describes_a_file(rig: Rig) -> None:
    path = rig.home / "a.txt"
    path.write_text("hello")
    os.utime(path, (1_700_000_000.25, 1_700_000_000.25))
    if os.geteuid() == 0:
        shutil.chown(path, USER_UID, 4321)

    entry = (await rig.files("Stat", {"path": "~/a.txt"})).json()["entry"]

    assert entry == {
        "name": "a.txt",
        "type": "FILE_TYPE_FILE",
        "path": str(path),
        "size": 5,
        "mode": 0o644,
        "permissions": "-rw-r--r--",
        "owner": "user",
        "group": "wheel" if os.geteuid() == 0 else "user",
        "modifiedTime": "2023-11-14T22:13:20.250000Z",
    }


async def test_an_empty_directory_has_a_size_on_every_file_system(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    (rig.home / "empty").mkdir()
    (rig.home / "empty.txt").touch()
    real = os.lstat

    def on_btrfs(path: str) -> os.stat_result:
        """Return what btrfs reports: the size of an empty directory is 0."""
        info = real(path)
        return os.stat_result((*info[:6], 0, *info[7:10]), {"st_mtime_ns": info.st_mtime_ns})

    monkeypatch.setattr(os, "lstat", on_btrfs)

    listed = (await rig.files("ListDir", {"path": "~"})).json()["entries"]

    sizes = {entry["name"]: int(entry.get("size", 0)) for entry in listed}
    assert sizes["empty"] == 4096
    assert sizes["empty.txt"] == 0


async def test_a_link_has_the_type_of_its_target_and_its_own_permissions(rig: Rig) -> None:
    (rig.home / "dir").mkdir()
    (rig.home / "link").symlink_to("dir")
    (rig.home / "broken").symlink_to("nothing")

    link = (await rig.files("Stat", {"path": "link"})).json()["entry"]
    broken = (await rig.files("Stat", {"path": "broken"})).json()["entry"]

    assert (link["type"], link["permissions"]) == ("FILE_TYPE_DIRECTORY", "Lrwxrwxrwx")
    assert (link["mode"], link["symlinkTarget"]) == (0o755, str(rig.home / "dir"))
    assert "type" not in broken  # unspecified


async def test_missing_paths_are_not_found(rig: Rig) -> None:
    (rig.home / "file").touch()

    for method, request in (
        ("Stat", {"path": "nothing"}),
        ("Stat", {"path": "file/below"}),
        ("ListDir", {"path": "nothing"}),
        ("Move", {"source": "nothing", "destination": "b"}),
        ("WatchDir", {"path": "nothing"}),
        ("CreateWatcher", {"path": "nothing"}),
        ("GetWatcherEvents", {"watcherId": "w"}),
        ("RemoveWatcher", {"watcherId": "w"}),
    ):
        if method == "WatchDir":
            stream = await rig.stream("filesystem.Filesystem/WatchDir", request)
            assert (await stream.event())["$end"]["error"]["code"] == "not_found"
            stream.close()
        else:
            answer = await rig.files(method, request)
            assert (answer.status, answer.json()["code"]) == (404, "not_found"), method


async def test_a_listing_has_the_requested_depth_in_lexical_order(rig: Rig) -> None:
    for name in ("b/c/d", "b/a", "a"):
        (rig.home / name).mkdir(parents=True)
    (rig.home / "b.txt").touch()
    (rig.home / "b" / "link").symlink_to("c")

    async def names(path: str, depth: int) -> list[str]:
        answer = await rig.files("ListDir", {"path": path, "depth": depth})
        return [str(Path(e["path"]).relative_to(rig.home)) for e in answer.json()["entries"]]

    assert await names("", 0) == ["a", "b", "b.txt"]
    assert await names("", 1) == ["a", "b", "b.txt"]
    assert await names("", 2) == ["a", "b", "b/a", "b/c", "b/link", "b.txt"]
    assert await names(".", 9) == ["a", "b", "b/a", "b/c", "b/c/d", "b/link", "b.txt"]
    assert await names("b/link", 1) == ["b/link/d"]


async def test_listing_a_file_is_an_invalid_argument(rig: Rig) -> None:
    (rig.home / "f").touch()

    assert (await rig.files("ListDir", {"path": "f"})).json()["code"] == "invalid_argument"
    assert (await rig.files("CreateWatcher", {"path": "f"})).json()["code"] == "invalid_argument"


async def test_a_listing_above_the_limit_is_refused(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(entries, "MAX_ENTRIES", 10)
    for number in range(20):
        (rig.home / str(number)).touch()

    assert (await rig.files("ListDir", {"path": ""})).json()["code"] == "resource_exhausted"


async def test_a_directory_is_created_with_parents_owned_by_the_user(rig: Rig) -> None:
    (rig.home / "f").touch()

    made = await rig.files("MakeDir", {"path": "x/y"})
    again = await rig.files("MakeDir", {"path": "x/y"})
    over = await rig.files("MakeDir", {"path": "f"})
    below = await rig.files("MakeDir", {"path": "f/sub"})

    assert made.json()["entry"]["type"] == "FILE_TYPE_DIRECTORY"
    assert made.json()["entry"]["owner"] == "user"
    assert (again.status, again.json()["code"]) == (409, "already_exists")
    assert over.json()["code"] == below.json()["code"] == "invalid_argument"
    if os.geteuid() == 0:
        assert (rig.home / "x").stat().st_uid == USER_UID


async def test_a_directory_cannot_be_created_below_a_file(rig: Rig) -> None:
    (rig.home / "file").write_text("kept")
    (rig.home / "other").write_text("kept")

    made = await rig.files("MakeDir", {"path": "file/deep/er"})
    moved = await rig.files("Move", {"source": "other", "destination": "file/other"})

    for answer in (made, moved):
        assert answer.status == 400
        assert "file' exists and is not a directory" in answer.json()["message"]
    assert (rig.home / "other").read_text() == "kept"


async def test_moving_creates_parents_and_replaces_the_destination(rig: Rig) -> None:
    (rig.home / "a").write_text("1")
    (rig.home / "n").mkdir()
    (rig.home / "n/b").write_text("2")

    one = await rig.files("Move", {"source": "a", "destination": "p/q/a"})
    two = await rig.files("Move", {"source": "p/q/a", "destination": "n/b"})

    assert one.json()["entry"]["path"] == str(rig.home / "p/q/a")
    assert two.status == 200
    assert (rig.home / "n/b").read_text() == "1"


async def test_a_tree_moves_across_filesystems(rig: Rig, tmp_path: Path) -> None:
    if Path("/dev/shm").stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is only one filesystem here")
    shelf = Path("/dev/shm") / f"envd-test-{os.getpid()}"
    tree = rig.home / "tree"
    (tree / "sub").mkdir(parents=True)
    (tree / "sub/f").write_text("x")
    (tree / "l").symlink_to("sub/f")
    (tree / "sub/f").chmod(0o640)
    try:
        moved = await rig.files("Move", {"source": "tree", "destination": str(shelf)})

        assert moved.status == 200
        assert not tree.exists()
        assert (shelf / "l").read_text() == "x"
        assert (shelf / "sub/f").stat().st_mode & 0o777 == 0o640
    finally:
        shutil.rmtree(shelf)


async def test_removing_is_recursive_and_ignores_missing_paths(rig: Rig) -> None:
    (rig.home / "d/e").mkdir(parents=True)
    (rig.home / "keep").mkdir()
    (rig.home / "keep/f").touch()
    (rig.home / "d/link").symlink_to(rig.home / "keep")

    for path in ("d", "d", "nothing/at/all"):
        assert (await rig.files("Remove", {"path": path})).json() == {}

    assert sorted(p.name for p in rig.home.iterdir()) == ["keep"]
    assert (rig.home / "keep/f").exists()
    assert (await rig.files("Remove", {"path": "/"})).json()["code"] == "invalid_argument"


async def test_undecodable_names_are_listed(rig: Rig) -> None:
    (rig.home / b"bad\xff".decode(errors="surrogateescape")).touch()

    answer = await rig.files("ListDir", {"path": ""})

    assert [e["name"] for e in answer.json()["entries"]] == ["bad\ufffd"]


async def test_times_outside_the_calendar_are_clamped(rig: Rig) -> None:
    (rig.home / "old").touch()
    try:
        os.utime(rig.home / "old", (2**40, 2**40))
    except OSError:
        pytest.skip("this filesystem knows no such time")

    assert (await rig.files("Stat", {"path": "old"})).status == 200


# -- watching


async def poll(rig: Rig, watcher: str) -> list[tuple[str, str]]:
    answer = await rig.files("GetWatcherEvents", {"watcherId": watcher})
    assert answer.status == 200, answer
    return [(e["name"], e["type"][11:].lower()) for e in answer.json().get("events", [])]


async def watcher(rig: Rig, **request: Any) -> str:
    return (await rig.files("CreateWatcher", {"path": "", **request})).json()["watcherId"]


async def test_a_new_file_causes_exactly_three_events_at_once(rig: Rig) -> None:
    ident = await watcher(rig)

    for name, size in (("a.txt", 10), ("b.bin", 200_000)):
        await rig.request("POST", f"/files?path={name}", b"x" * size, **RAW)
        assert await poll(rig, ident) == [(name, "create"), (name, "chmod"), (name, "write")]
    assert await poll(rig, ident) == []


async def test_metadata_causes_no_further_event(rig: Rig) -> None:
    ident = await watcher(rig)

    await rig.request("POST", "/files?path=a", b"x", x_metadata_k="v", **RAW)

    assert await poll(rig, ident) == [("a", "create"), ("a", "chmod"), ("a", "write")]


async def test_every_kind_of_change_has_its_event(rig: Rig) -> None:
    (rig.home / "a").touch()
    ident = await watcher(rig)

    (rig.home / "a").write_text("x")
    assert [kind for _, kind in await poll(rig, ident)] == ["write"]
    (rig.home / "a").chmod(0o600)
    assert await poll(rig, ident) == [("a", "chmod")]
    (rig.home / "a").rename(rig.home / "b")
    assert await poll(rig, ident) == [("a", "rename"), ("b", "create")]
    (rig.home / "b").unlink()
    assert await poll(rig, ident) == [("b", "remove")]
    assert (await rig.files("RemoveWatcher", {"watcher_id": ident})).json() == {}
    assert (await rig.files("GetWatcherEvents", {"watcherId": ident})).status == 404


async def test_a_recursive_watcher_watches_new_directories_at_once(rig: Rig) -> None:
    (rig.home / "old").mkdir()
    ident = await watcher(rig, recursive=True)
    flat = await watcher(rig)

    await rig.request("POST", "/files?path=old/f", b"x", **RAW)
    assert await poll(rig, ident) == [("old/f", k) for k in ("create", "chmod", "write")]
    assert await poll(rig, flat) == []
    await rig.files("MakeDir", {"path": "new/deep"})
    await rig.request("POST", "/files?path=new/deep/f", b"x", **RAW)

    events = await poll(rig, ident)
    created = [name for name, kind in events if kind == "create"]
    assert created == ["new", "new/deep", "new/deep/f"]
    assert ("new/deep/f", "write") in events


async def test_entries_created_before_a_directory_is_watched_are_reported_once(
    rig: Rig,
) -> None:
    ident = await watcher(rig, recursive=True)

    for round_ in range(3):
        base = rig.home / f"d{round_}"
        (base / "sub").mkdir(parents=True)  # no await: envd cannot run in between
        (base / "sub/f").touch()
        events = await poll(rig, ident)
        created = [name for name, kind in events if kind == "create"]
        assert sorted(created) == [f"d{round_}", f"d{round_}/sub", f"d{round_}/sub/f"]
        (base / "sub/f").unlink()
        (base / "sub/f").touch()
        assert [k for n, k in await poll(rig, ident) if n.endswith("/f")][:2] == [
            "remove",
            "create",
        ]


async def test_a_directory_that_moved_reports_under_its_new_name(rig: Rig) -> None:
    (rig.home / "a/b").mkdir(parents=True)
    ident = await watcher(rig, recursive=True)

    (rig.home / "a").rename(rig.home / "z")
    await poll(rig, ident)
    (rig.home / "z/b/f").touch()

    assert ("z/b/f", "create") in await poll(rig, ident)


async def test_events_contain_the_entry_if_requested(rig: Rig) -> None:
    ident = await watcher(rig, includeEntry=True)
    await rig.request("POST", "/files?path=f", b"xyz", **RAW)

    events = (await rig.files("GetWatcherEvents", {"watcherId": ident})).json()["events"]

    assert {e["entry"]["size"] for e in events} == {3}
    assert events[0]["entry"]["path"] == str(rig.home / "f")


async def test_an_event_stream_sends_start_events_and_keepalives(rig: Rig) -> None:
    stream = await rig.stream(
        "filesystem.Filesystem/WatchDir",
        {"path": "", "recursive": True},
        keepalive_ping_interval="1",
    )
    assert await stream.event() == {"start": {}}

    await rig.request("POST", "/files?path=s/f", b"x", **RAW)
    seen: list[tuple[str, str]] = []
    async with asyncio.timeout(20):
        while ("s/f", "EVENT_TYPE_WRITE") not in seen:
            # On a stalled machine there may be keepalives in between.
            if (event := (await stream.event()).get("filesystem")) is not None:
                seen.append((event["name"], event["type"]))
        assert seen[0] == ("s", "EVENT_TYPE_CREATE")
        while (await stream.event()) != {"keepalive": {}}:
            pass
    assert rig.envd.watchers.count == 1
    stream.close()
    async with asyncio.timeout(20):
        while rig.envd.watchers.count:
            await asyncio.sleep(0.01)


async def test_lost_events_are_reported(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "MAX_QUEUED", 4)
    ident = await watcher(rig, recursive=True)

    for number in range(3000):
        (rig.home / f"f{number}").touch()
    answer = await rig.files("GetWatcherEvents", {"watcherId": ident})

    assert (answer.status, answer.json()["code"]) == (429, "resource_exhausted")
    assert "lost" in answer.json()["message"]
    assert await poll(rig, ident)


async def test_the_number_of_watchers_is_limited(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "MAX_WATCHERS", 2)
    await watcher(rig)
    await watcher(rig)

    third = await rig.files("CreateWatcher", {"path": ""})

    assert third.json()["code"] == "resource_exhausted"
