"""The base image: built once from packages, complete or absent."""

import os
import shutil
import time
from pathlib import Path

import msgspec
import pytest
from msgspec import structs

from paddock.app.up.output import prepare_image
from paddock.kit.errors import UnavailableError
from paddock.runtime.local.images import ImageStore, base_directory, build_base
from paddock.runtime.local.images.base import (
    MANIFEST,
    is_built,
    minimal_rootfs,
    read_manifest,
)
from paddock.runtime.local.images.debian.mirror import debian_mirror, debian_suite
from paddock.runtime.local.images.debian.recipe import built_in
from paddock.runtime.local.images.debian.work import remove_abandoned, work_directory
from paddock.runtime.local.images.model import Manifest
from paddock.runtime.local.kernel import syscalls
from paddock.settings import Settings

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="debootstrap needs root")


@pytest.fixture
def rootfs() -> Path:
    if not is_built():
        pytest.skip("the base image is not built on this machine; run `paddock image build-base`")
    return base_directory() / "rootfs"


def test_an_existing_build_is_reused(rootfs: Path):
    said: list[str] = []
    assert build_base(progress=said.append) == rootfs.parent
    assert said == [f"base image exists: {rootfs.parent}"]
    # Its layer is above that of `minimal`, which is an image too.
    assert read_manifest(rootfs.parent).layers == (str(minimal_rootfs()), str(rootfs))
    assert read_manifest(minimal_rootfs().parent).layers == (str(minimal_rootfs()),)


@pytest.mark.usefixtures("rootfs")
def test_minimal_has_the_user_and_programs_and_no_devices():
    rootfs = minimal_rootfs()
    accounts = (rootfs / "etc/passwd").read_text().splitlines()
    assert "user:x:1000:1000::/home/user:/bin/bash" in accounts
    assert (rootfs / "etc/sudoers.d/user").read_text().strip() == "user ALL=(ALL:ALL) NOPASSWD:ALL"
    assert (rootfs / "usr/bin/sudo").stat().st_mode & 0o4000
    assert (rootfs / "home/user").stat().st_uid == 1000
    assert (rootfs / "usr/bin/python").readlink() == Path("python3")
    for program in ("bash", "python3", "git", "curl", "tput", "ps", "sudo", "ip"):
        assert any((rootfs / place / program).exists() for place in ("usr/bin", "usr/sbin", "bin"))
    assert list((rootfs / "dev").iterdir()) == []
    assert list((rootfs / "var/lib/apt/lists").iterdir()) == []


def test_every_store_resolves_the_image(rootfs: Path, tmp_path: Path):
    image = ImageStore(tmp_path).resolve("base")
    assert image.layers == (minimal_rootfs(), rootfs)
    assert (image.config.user, image.config.workdir) == ("user", "/home/user")
    assert image == ImageStore(tmp_path).resolve("base:latest")


def test_another_recipe_is_another_image():
    recipe = built_in()
    assert recipe.fingerprint == built_in().fingerprint
    assert recipe.parent is not None
    other_parent = structs.replace(recipe.parent, suite="trixie")
    others = [
        structs.replace(recipe, packages=("bash",)),
        structs.replace(recipe, script="true"),
        structs.replace(recipe, node=None),
        structs.replace(recipe, parent=other_parent),
    ]
    assert len({one.fingerprint for one in (recipe, *others)}) == 5


@needs_root
@pytest.mark.timeout(120)
def test_a_failed_build_has_a_reason_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    if not shutil.which("debootstrap"):
        pytest.skip("debootstrap is not installed")
    monkeypatch.setenv("PADDOCK_DEBIAN_MIRROR", "http://127.0.0.1:1/debian")
    said: list[str] = []
    with pytest.raises(UnavailableError, match="debootstrap failed") as refused:
        build_base(tmp_path, progress=said.append)
    assert refused.value.hint == "check that the package mirror is reachable, then build again"
    assert list(tmp_path.iterdir()) == []
    assert len(said) > 1


@needs_root
def test_what_a_killed_build_has_left_is_removed_at_the_next_start(tmp_path: Path):
    cache = tmp_path / "images"
    old, recent = cache / ".building-old", cache / ".building-recent"
    for left in (old, recent):
        (left / "rootfs/proc").mkdir(parents=True)
    syscalls.mount("proc", str(old / "rootfs/proc"), "proc")
    long_ago = time.time() - 3600
    os.utime(old, (long_ago, long_ago))
    with work_directory(cache) as work:
        os.utime(work, (long_ago, long_ago))
        assert remove_abandoned(cache) == ()  # a build is running
        assert work.is_dir()
    settings = Settings(cache_dir=str(tmp_path), default_image="host")
    prepare_image(settings, is_silent=True)
    assert list(cache.iterdir()) == [recent]
    assert Path("/proc/self").exists()


@needs_root
def test_an_incomplete_build_is_not_an_image(tmp_path: Path):
    base_directory(tmp_path).mkdir(parents=True)
    assert not is_built(tmp_path)
    assert not ImageStore(tmp_path / "store", base_cache=tmp_path).has("base")
    (base_directory(tmp_path) / MANIFEST).write_text("{}")
    assert is_built(tmp_path)


def test_an_older_build_serves_until_the_new_one_is_built(tmp_path: Path):
    def build(directory: Path) -> Path:
        (directory / "rootfs").mkdir(parents=True)
        manifest = Manifest(name="base:latest", layers=(str(directory / "rootfs"),))
        (directory / MANIFEST).write_bytes(msgspec.json.encode(manifest))
        return directory / "rootfs"

    older = build(tmp_path / "base-0123456789ab")
    store = ImageStore(tmp_path / "store", base_cache=tmp_path)
    assert not is_built(tmp_path)
    assert store.resolve("base").layers == (older,)
    assert [image.name for image in store.images()] == ["base:latest"]
    newer = build(base_directory(tmp_path))
    assert store.resolve("base").layers == (newer,)
    assert older.is_dir()


@needs_root
@pytest.mark.timeout(60)
def test_up_keeps_the_older_image_if_it_cannot_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    if not shutil.which("debootstrap"):
        pytest.skip("debootstrap is not installed")
    monkeypatch.setenv("PADDOCK_DEBIAN_MIRROR", "http://127.0.0.1:1/debian")
    settings = Settings(cache_dir=str(tmp_path))
    with pytest.raises(UnavailableError, match="debootstrap failed"):
        prepare_image(settings, is_silent=True)
    older = tmp_path / "images/base-0123456789ab"
    older.mkdir()
    (older / MANIFEST).write_text("{}")
    prepare_image(settings, is_silent=True)
    shown = capsys.readouterr().err
    assert "the base image could not be rebuilt: debootstrap failed" in shown
    assert f"using the older {older}; hint: check that the package mirror" in shown


def test_mirror_and_suite_come_from_the_environment_or_the_machine(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PADDOCK_DEBIAN_MIRROR", "http://127.0.0.1/debian")
    monkeypatch.setenv("PADDOCK_DEBIAN_SUITE", "trixie")
    assert (debian_mirror(), debian_suite()) == ("http://127.0.0.1/debian", "trixie")
    monkeypatch.delenv("PADDOCK_DEBIAN_SUITE")
    assert debian_suite().isalpha()
