"""The image store: import from archives, lookup by name, and deletion."""

import gzip
import hashlib
import os
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paddock.kit.errors import InvalidError, NotFoundError, PaddockError
from paddock.runtime.local.checkpoint.threads import run_in_thread
from paddock.runtime.local.images import ImageConfig, ImageStore, canonical_name
from paddock.runtime.local.images import store as store_module
from paddock.runtime.local.images.archive import DirectoryBlobs, read_bundle
from paddock.runtime.local.images.model import Manifest, PulledFrom, decode_manifest
from paddock.runtime.local.images.refs import ImageRefs
from paddock.runtime.local.kernel import syscalls
from paddock.runtime.local.storage import btrfs_ioctl
from tests.runtime.local.images.builders import (
    config_blob,
    directory,
    docker_save,
    entry,
    oci_layout,
    tar,
    tar_of,
)

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="owners are set, which needs root"),
    pytest.mark.timeout(120),
]

LOWER = tar(directory("etc"), entry("etc/one", b"1"), entry("etc/two", b"2"))
UPPER = tar(entry("etc/.wh.one"), entry("etc/three", b"3"))
UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    return ImageStore(tmp_path / "images", base_cache=tmp_path / "no-base")


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.parametrize("form", ["layout", "tar", "docker"])
def test_every_archive_format_is_imported(store: ImageStore, tmp_path: Path, form: str):
    layout = oci_layout(tmp_path / "layout", [LOWER, UPPER])
    source = {
        "layout": lambda: layout,
        "tar": lambda: tar_of(layout, tmp_path / "oci.tar"),
        "docker": lambda: docker_save(tmp_path / "d.tar", [LOWER, UPPER], tags=["my/app:1"]),
    }[form]()

    store.add_archive(source)
    image = store.resolve("app:1")

    assert [names_in(layer / "etc") for layer in image.layers] == [
        ["one", "two"],
        ["one", "three"],
    ]
    assert (image.layers[1] / "etc/one").is_char_device()
    assert image.lowerdirs == (image.accounts, *reversed(image.layers))
    assert image.config == ImageConfig(
        env={"PATH": "/usr/bin:/bin", "EMPTY": "", "TWO": "a=b"},
        user="1000",
        workdir="/srv",
        cmd=("run", "me"),
    )


def test_equal_layers_are_stored_once(store: ImageStore, tmp_path: Path):
    store.add_archive(docker_save(tmp_path / "a.tar", [LOWER, LOWER, UPPER], tags=[]), "a")
    store.add_archive(oci_layout(tmp_path / "b", [LOWER]), "b")
    first, second = store.resolve("a"), store.resolve("b")
    assert first.layers[0] == first.layers[1] == second.layers[0]
    assert first.accounts == second.accounts
    assert len(names_in(tmp_path / "images" / "layers")) == 3


def test_a_damaged_layer_is_rejected_and_leaves_nothing(store: ImageStore, tmp_path: Path):
    archive = docker_save(tmp_path / "a.tar", [LOWER], tags=[])
    archive.write_bytes(archive.read_bytes().replace(b"etc/two", b"etc/TWO"))
    with pytest.raises(PaddockError):
        store.add_archive(archive, "a")
    store.collect()
    assert names_in(tmp_path / "images" / "layers") == []
    with pytest.raises(NotFoundError):
        store.resolve("a")


def test_a_failed_import_waits_for_no_other_one(store: ImageStore, tmp_path: Path):
    """What it has unpacked is removed later, as other unused layers: a sandbox may have it."""
    archive = docker_save(tmp_path / "a.tar", [LOWER, UPPER], tags=[])
    archive.write_bytes(archive.read_bytes().replace(b"etc/three", b"etc/THREE"))
    with store.keeping_layers(), pytest.raises(PaddockError):
        store.add_archive(archive, "a")
    [layer] = (tmp_path / "images" / "layers").iterdir()
    assert store.collect(in_use=[layer]) == ()
    assert store.collect() == (layer.name,)


def pulled(store: ImageStore, layout: Path, teams: tuple[str, ...] | None, digest: str) -> str:
    """Store a version as if it was pulled with the tag `app:1`; return the name of the version."""
    blobs = DirectoryBlobs(layout)
    version = f"app@sha256:{digest * 64}"
    origin = PulledFrom(f"sha256:{digest * 64}", teams)
    store.add_bundle(blobs, read_bundle(blobs), (version, "app:1"), origin, known=frozenset())
    return version


def test_a_pull_of_one_team_takes_no_tag_away_from_all(store: ImageStore, tmp_path: Path):
    public = oci_layout(tmp_path / "public", [LOWER])
    private = oci_layout(tmp_path / "private", [LOWER, UPPER])
    pulled(store, public, None, "1")
    version = pulled(store, private, ("a",), "2")
    manifest = store.manifest("app:1")
    assert manifest is not None
    assert (manifest.teams, len(manifest.layers)) == (None, 1)
    assert len(store.resolve(version).layers) == 2
    again = store.add_version(version, "app:1", ("b",))
    assert again is not None
    assert len(again.layers) == 2
    assert store.manifest("app:1") == manifest
    # As soon as all may use the new version, the tag names it.
    store.add_version(version, "app:1", None)
    assert len(store.resolve("app:1").layers) == 2


def test_a_version_for_all_stays_for_all(store: ImageStore, tmp_path: Path):
    layout = oci_layout(tmp_path / "layout", [LOWER])
    for teams in (None, ("a",)):
        pulled(store, layout, teams, "1")
        manifest = store.manifest("app:1")
        assert manifest is not None
        assert manifest.teams is None


def test_teams_that_show_access_at_once_all_get_it(store: ImageStore, tmp_path: Path):
    version = pulled(store, oci_layout(tmp_path / "layout", [LOWER]), ("first",), "1")
    teams = [f"team-{number}" for number in range(40)]
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda team: store.add_version(version, "app:1", (team,)), teams))
    for name in (version, "app:1"):
        manifest = store.manifest(name)
        assert manifest is not None
        assert set(manifest.teams or ()) == {"first", *teams}


def test_a_manifest_is_written_after_its_layers_are_on_the_disk(
    store: ImageStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    done: list[str] = []
    put, sync = ImageRefs.put, btrfs_ioctl.sync_tree
    monkeypatch.setattr(ImageRefs, "put", lambda refs, one: (done.append("put"), put(refs, one)))
    monkeypatch.setattr(store_module, "sync_tree", lambda path: (done.append("sync"), sync(path)))
    store.add_archive(oci_layout(tmp_path / "layout", [LOWER]), "a")
    assert done == ["sync", "put"]


def test_a_damaged_manifest_is_skipped_and_can_be_replaced(store: ImageStore, tmp_path: Path):
    layout = oci_layout(tmp_path / "layout", [LOWER])
    store.add_archive(layout, "a")
    store.add_archive(layout, "b")
    [ref, _] = sorted((tmp_path / "images" / "refs").iterdir())
    ref.write_bytes(b"")
    assert [image.name for image in store.images()] == ["b:latest"]
    with pytest.raises(NotFoundError, match="there is no image a"):
        store.resolve("a")
    store.add_archive(layout, "a")
    assert store.resolve("a").layers


def test_a_version_that_has_lost_a_layer_is_not_stored(store: ImageStore, tmp_path: Path):
    layout = oci_layout(tmp_path / "layout", [LOWER])
    version = pulled(store, layout, None, "1")
    shutil.rmtree(store.resolve(version).layers[0])
    assert store.add_version(version, "app:1", None) is None
    pulled(store, layout, None, "1")
    assert store.add_version(version, "app:1", None) is not None


def test_a_directory_is_copied_or_used_in_place(store: ImageStore, tmp_path: Path):
    rootfs = tmp_path / "rootfs"
    (rootfs / "etc").mkdir(parents=True)
    (rootfs / "etc/name").write_text("mine")
    copied = store.add_directory(rootfs, "copied:v1", config=ImageConfig(user="user"))
    used = store.add_directory(rootfs, "used", in_place=True)
    (rootfs / "etc/name").write_text("changed")
    assert (copied.layers[0] / "etc/name").read_text() == "mine"
    assert used.layers == (rootfs,)
    assert store.resolve("copied:v1").config.user == "user"


def test_the_format_of_a_path_is_detected(store: ImageStore, tmp_path: Path):
    layout = oci_layout(tmp_path / "layout", [LOWER, UPPER])
    exported = tmp_path / "exported.tar.gz"
    exported.write_bytes(gzip.compress(tar(directory("./usr"), entry("./usr/one", b"1"))))
    root = tmp_path / "root"
    (root / "etc").mkdir(parents=True)
    nothing = tmp_path / "nothing.tar"
    nothing.write_bytes(tar(entry("notes", b"1")))

    assert store.add(layout).name == "app:1"
    assert store.add(tar_of(layout, tmp_path / "oci.tar"), "other").name == "other:latest"
    assert store.add(exported).name == "exported:latest"
    assert names_in(store.resolve("exported").layers[0] / "usr") == ["one"]
    assert store.add(root).name == "root:latest"
    with pytest.raises(InvalidError) as caught:
        store.add(nothing)
    assert "docker export" in (caught.value.hint or "")


def test_a_tar_of_a_root_file_system_becomes_one_layer(store: ImageStore, tmp_path: Path):
    (tmp_path / "root.tar").write_bytes(LOWER)
    image = store.add_rootfs_tar(tmp_path / "root.tar", "plain")
    assert [layer.name for layer in image.layers] == [f"sha256-{hashlib.sha256(LOWER).hexdigest()}"]


def test_unused_layers_of_deleted_images_are_collected(store: ImageStore, tmp_path: Path):
    store.add_archive(docker_save(tmp_path / "a.tar", [LOWER, UPPER], tags=[]), "a")
    store.add_archive(docker_save(tmp_path / "b.tar", [LOWER], tags=[]), "b")
    mounted = store.resolve("a").layers[1]
    store.delete("a")
    store.delete("never-there")
    assert store.collect(in_use=[mounted]) == ()
    assert store.collect() == (mounted.name,)
    assert store.resolve("b").layers[0].is_dir()
    (tmp_path / "images" / "layers" / ".new-left-by-a-crash").mkdir()
    assert store.collect() == (".new-left-by-a-crash",)


def test_images_are_listed_with_their_size(store: ImageStore, tmp_path: Path):
    (tmp_path / "root.tar").write_bytes(tar(entry("big", b"x" * 100_000)))
    store.add_rootfs_tar(tmp_path / "root.tar", "z:1")
    store.tag("z:1", "a")
    assert [(info.name, info.layers) for info in store.images()] == [("a:latest", 1), ("z:1", 1)]
    assert all(info.size_bytes >= 100_000 for info in store.images())


def test_an_unknown_image_has_a_hint(store: ImageStore):
    with pytest.raises(NotFoundError) as refused:
        store.resolve("base")
    assert refused.value.hint == "build it: paddock image build-base"
    with pytest.raises(NotFoundError, match="there is no image python:3"):
        store.resolve("python:3")


def test_an_archive_with_paths_outside_of_it_is_rejected(store: ImageStore, tmp_path: Path):
    (tmp_path / "secret").write_bytes(config_blob([LOWER]))
    evil = tmp_path / "evil.tar"
    manifest = b'[{"Config": "../secret", "RepoTags": null, "Layers": ["../secret"]}]'
    evil.write_bytes(tar(entry("manifest.json", manifest)))
    with pytest.raises(InvalidError, match="outside"):
        store.add_archive(evil, "evil")
    layout = tmp_path / "layout"
    layout.mkdir()
    (layout / "index.json").write_text('{"manifests": [{"digest": "sha256:../../secret"}]}')
    with pytest.raises(InvalidError, match="not a checksum"):
        store.add_archive(layout, "evil")


def test_other_archives_are_rejected(store: ImageStore, tmp_path: Path):
    (tmp_path / "x.tar").write_bytes(tar(entry("hello", b"x")))
    (tmp_path / "y.tar").write_bytes(b"not a tar at all")
    with pytest.raises(InvalidError, match="not an image"):
        store.add_archive(tmp_path / "x.tar", "x")
    with pytest.raises(InvalidError, match="not a readable tar"):
        store.add_archive(tmp_path / "y.tar", "y")


@pytest.mark.parametrize("name", ["base", "python:3.12", "team/app:v1_2", "a.b-c/d"])
def test_names_are_canonicalized(name: str):
    assert canonical_name(name) == (name if ":" in name else f"{name}:latest")


@UNHURRIED
@given(st.text(max_size=60))
def test_any_text_is_a_safe_name_or_rejected(text: str):
    try:
        name = canonical_name(text)
    except InvalidError:
        return
    assert re.fullmatch(r"[a-z0-9._/-]+:[A-Za-z0-9._-]+", name)
    assert ".." not in name.split("/")


@UNHURRIED
@given(st.binary(max_size=200))
def test_any_bytes_are_a_manifest_or_rejected(data: bytes):
    try:
        decode_manifest(data, origin="test")
    except InvalidError:
        return


@UNHURRIED
@given(st.lists(st.text(max_size=30), min_size=1, max_size=4))
def test_a_layer_name_cannot_change_mount_options(layers: list[str]):
    data = msgspec.json.encode(Manifest(name="x:1", layers=tuple(layers)))
    try:
        manifest = decode_manifest(data, origin="test")
    except InvalidError:
        return
    for layer in manifest.layers:
        assert not set(layer) & set(":,\\\n\0")
        assert ".." not in layer.split("/")


def test_whiteouts_hide_files_in_the_mounted_image(store: ImageStore, tmp_path: Path):
    store.add_archive(docker_save(tmp_path / "a.tar", [LOWER, UPPER], tags=[]), "a")
    lower = ":".join(map(str, store.resolve("a").lowerdirs))
    (tmp_path / "root").mkdir()

    def list_mounted() -> list[str]:
        syscalls.unshare(syscalls.CLONE_NEWNS)
        syscalls.mount("", "/", None, syscalls.MS_REC | syscalls.MS_PRIVATE)
        syscalls.mount("overlay", str(tmp_path / "root"), "overlay", 0, f"lowerdir={lower}")
        return names_in(tmp_path / "root" / "etc")

    assert run_in_thread(lambda _: list_mounted(), name="list-mounted") == [
        *("group", "passwd", "three", "two")
    ]
