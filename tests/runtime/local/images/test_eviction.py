"""Images that nobody needs make room when the disk is full; needed ones and their layers stay."""

import asyncio
import os
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import IO

import msgspec
import pytest
from msgspec import structs

from paddock.kit.clock import SystemClock
from paddock.runtime.local.images.archive import DirectoryBlobs, read_bundle
from paddock.runtime.local.images.eviction import ImageEviction
from paddock.runtime.local.images.model import PulledFrom
from paddock.runtime.local.images.provider import known_names
from paddock.runtime.local.images.store import ImageStore
from paddock.runtime.local.node.process import Node
from paddock.runtime.local.sandbox.checkpoint_records import CheckpointRecord, CheckpointRecords
from paddock.runtime.port import Blueprint, StoredCheckpoint
from tests.runtime.local.images import builders

HOUR = 3600.0


class Later(SystemClock):
    """A clock that is ahead, so that nothing was used a moment ago."""

    def now(self) -> datetime:
        return datetime.fromtimestamp(super().now().timestamp() + HOUR, UTC)


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    return ImageStore(tmp_path / "images")


@pytest.fixture
def pull(store: ImageStore, tmp_path: Path) -> Callable[[str, float], Path]:
    """Return a function that stores an image as if it was pulled; it returns its layer."""

    def make(name: str, used: float) -> Path:
        tree = tmp_path / name.partition(":")[0]
        tree.mkdir()
        (tree / "file").write_bytes(name.encode() * 10_000)
        image = store.add_directory(tree, name)
        manifest = store.manifest(name)
        assert manifest is not None
        origin = PulledFrom(f"sha256:{len(name):064x}", None)
        store.refs.put(structs.replace(manifest, digest=origin.digest))
        file = tmp_path / "images" / "refs" / f"{name.replace(':', '%3A')}.json"
        moment = SystemClock().now().timestamp() + used
        os.utime(file, (moment, moment))
        return image.layers[0]

    return make


def eviction(store: ImageStore, tmp_path: Path, percent: int = 100) -> ImageEviction:
    return ImageEviction(store, tmp_path, Later(), percent=percent, names_of=known_names)


def test_the_least_recently_used_image_goes_first(
    store: ImageStore, pull: Callable[[str, float], Path], tmp_path: Path
) -> None:
    for name, used in (("old:1", -300.0), ("older:1", -600.0), ("new:1", 0.0)):
        pull(name, used)
    sweeper = eviction(store, tmp_path)
    sweeper.need(())
    assert sweeper.evict(1) == ("older:1",)
    assert sweeper.evict(1) == ("old:1",)


def test_images_that_are_named_or_cannot_be_pulled_again_stay(
    store: ImageStore, pull: Callable[[str, float], Path], tmp_path: Path
) -> None:
    pull("named:1", -600.0)
    imported = tmp_path / "imported"
    imported.mkdir()
    store.add_directory(imported, "mine:1")
    sweeper = eviction(store, tmp_path)
    assert sweeper.evict(1 << 40) == ()  # what is needed is not known yet
    sweeper.need(("docker.io/library/named:1",))
    assert sweeper.evict(1 << 40) == ()
    sweeper.need(())
    assert sweeper.evict(1 << 40) == ("named:1",)
    assert store.has("mine:1")


def test_an_image_that_was_used_a_moment_ago_stays(
    store: ImageStore, pull: Callable[[str, float], Path], tmp_path: Path
) -> None:
    pull("busy:1", 0.0)
    sweeper = ImageEviction(store, tmp_path, SystemClock(), percent=100, names_of=known_names)
    sweeper.need(())
    assert sweeper.evict(1 << 40) == ()


def test_a_full_disk_evicts_and_an_empty_one_does_not(
    store: ImageStore, pull: Callable[[str, float], Path], tmp_path: Path
) -> None:
    pull("a:1", -600.0)
    spare = eviction(store, tmp_path, percent=100)
    spare.need(())
    assert spare.sweep(()) == ()
    full = eviction(store, tmp_path, percent=0)
    full.need(())
    assert full.sweep(()) == ("a:1",)


def test_no_more_is_evicted_while_the_layers_of_evicted_images_are_not_removed_yet(
    store: ImageStore,
    pull: Callable[[str, float], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layers = [pull(f"{name}:1", -600.0 + number) for number, name in enumerate("abc")]
    size = store.size_of([layers[0].name])
    taken = 100 * size

    def usage(_: Path) -> object:
        held = sum(size for layer in layers if layer.exists())
        return SimpleNamespace(total=2 * taken, used=taken - 2 * size + held, free=taken)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    monkeypatch.setattr("paddock.runtime.local.images.eviction._LOW_SHARE", 0.0)
    sweeper = eviction(store, tmp_path, percent=50)
    sweeper.need(())
    assert [sweeper.sweep(()) for _ in range(3)] == [("a:1",), (), ()]
    assert [layer.exists() for layer in layers] == [False, True, True]


def test_a_running_import_stops_no_collection_and_keeps_its_layers(
    store: ImageStore, pull: Callable[[str, float], Path], tmp_path: Path
) -> None:
    """The import waits for its second layer, as a pull does for hours from a slow registry."""
    unused = pull("unused:1", -600.0)
    store.delete("unused:1")
    layers = [builders.tar(builders.entry(name, b"x")) for name in ("first", "second")]
    layout = builders.oci_layout(tmp_path / "layout", layers)
    bundle = read_bundle(DirectoryBlobs(layout))
    is_waiting, go_on = threading.Event(), threading.Event()

    class Slow(DirectoryBlobs):
        def open(self, name: str) -> IO[bytes]:
            if name == bundle.layers[1]:
                is_waiting.set()
                assert go_on.wait(60)
            return super().open(name)

    origin = PulledFrom("sha256:" + "0" * 64, None)
    with ThreadPoolExecutor(1) as threads:
        importing = threads.submit(
            store.add_bundle, Slow(layout), bundle, ("slow:1",), origin, known=frozenset()
        )
        assert is_waiting.wait(60)
        sweeper = eviction(store, tmp_path)
        for _ in range(3):
            sweeper.sweep(())
        assert not unused.exists()
        go_on.set()
        image = importing.result(60)
    assert all(layer.is_dir() for layer in image.layers)
    assert list((tmp_path / "images" / "imports").iterdir()) == []


def test_what_a_killed_process_was_importing_is_not_kept(store: ImageStore, tmp_path: Path) -> None:
    left = tmp_path / "images" / "imports" / "left"
    left.write_text("sha256-1")
    (tmp_path / "images" / "layers" / "sha256-1").mkdir()
    assert store.collect() == ("sha256-1",)
    assert not left.exists()


def test_layers_of_deleted_images_are_removed_unless_a_sandbox_has_them(
    store: ImageStore, pull: Callable[[str, float], Path], tmp_path: Path
) -> None:
    used, unused = pull("a:1", -600.0), pull("b:1", -600.0)
    sweeper = eviction(store, tmp_path)
    store.delete("a:1")
    store.delete("b:1")
    sweeper.sweep((used,))
    assert unused.exists()  # a sandbox of it may be about to be recorded
    sweeper.sweep((used,))
    assert (used.exists(), unused.exists()) == (True, False)
    sweeper.sweep(())
    sweeper.sweep(())
    assert not used.exists()


async def test_a_snapshot_a_sandbox_and_warm_stock_keep_their_layers(
    store: ImageStore, pull: Callable[[str, float], Path], tmp_path: Path
) -> None:
    """No image names the layers any more, and the sandbox of the snapshot is gone."""
    names = ("snapshot:1", "sandbox:1", "warm:1", "nobody:1")
    snapshot, sandbox, warm, nobody = (pull(name, -600.0) for name in names)
    context = SimpleNamespace(
        settings=SimpleNamespace(state=tmp_path),
        storage=SimpleNamespace(checkpoints=lambda: ("cp",), has_checkpoint=lambda _: True),
        run_in_thread=asyncio.to_thread,
    )
    (tmp_path / "checkpoints").mkdir()
    stored = StoredCheckpoint(
        id="cp",
        source_uid="gone",
        has_memory=False,
        size_bytes=0,
        created_at=SystemClock().now(),
        image="snapshot:1",
    )
    record = CheckpointRecord(
        stored=stored,
        layers=(str(snapshot),),
        blueprint=Blueprint(uid="gone", image="snapshot:1"),
        is_started=True,
    )
    (tmp_path / "checkpoints" / "cp.json").write_bytes(msgspec.json.encode(record))
    living = SimpleNamespace(record=SimpleNamespace(layers=(str(sandbox),)))
    node = SimpleNamespace(
        hibernation=SimpleNamespace(records=CheckpointRecords(context)),  # type: ignore[arg-type]
        lifecycle=SimpleNamespace(
            by_uid={"box": living}, warm_stock=SimpleNamespace(layers={str(warm)})
        ),
    )
    in_use = await Node._layers_in_use(node)  # type: ignore[arg-type]
    sweeper = eviction(store, tmp_path)
    for name in names:
        store.delete(name)
    for _ in range(2):
        sweeper.sweep(in_use)
    kept = (snapshot.exists(), sandbox.exists(), warm.exists(), nobody.exists())
    assert kept == (True, True, True, False)


def test_what_a_killed_import_has_left_is_removed(store: ImageStore, tmp_path: Path) -> None:
    left = tmp_path / "images" / "layers" / ".new-left"
    left.mkdir()
    sweeper = eviction(store, tmp_path)
    sweeper.sweep(())
    sweeper.sweep(())
    assert not left.exists()
