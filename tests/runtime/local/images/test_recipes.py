"""Recipes: what people write, and what is built from it."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from paddock.kit.errors import InvalidError, NotFoundError, UnavailableError
from paddock.runtime.local.images import ImageStore, base_directory
from paddock.runtime.local.images.base import MANIFEST
from paddock.runtime.local.images.debian import commands
from paddock.runtime.local.images.debian.recipe import built_in, read_recipe
from paddock.runtime.local.images.merged_tree import MergedTree
from paddock.runtime.local.images.model import Image, Manifest
from tests.disks import unmount
from tests.runtime.local.images.small_roots import shell_root

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="a build needs root")


def stand_in(cache: Path, name: str) -> Path:
    """Store a small tree as the build of a built-in image; return its layer."""
    build = base_directory(cache, name=name)
    tree = shell_root(build / "rootfs", "rm", "ls", "find")
    (tree / "etc").mkdir()
    (tree / "etc/passwd").write_text("root:x:0:0::/root:/bin/sh\nuser:x:1000:1000::/:/bin/sh\n")
    manifest = Manifest(name=f"{name}:latest", layers=(str(tree),))
    (build / MANIFEST).write_bytes(msgspec.json.encode(manifest))
    return tree


def built(store: ImageStore, directory: Path, text: str) -> Image:
    file = directory / "recipe.toml"
    file.write_text(text)
    return store.build_base(recipe=read_recipe(file))


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def store(tmp_path: Path, cache: Path) -> ImageStore:
    return ImageStore(tmp_path / "store", base_cache=cache)


def test_base_is_minimal_and_more():
    base, minimal = built_in(), built_in("minimal")
    assert base.parent == minimal
    assert minimal.parent is None
    assert not set(base.packages) & set(minimal.packages)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('name = "a"\nfrom = "debian"', "builds on 'debian'"),
        ('name = "A"', "has the name 'A'"),
        ('name = "../a"', "has the name '../a'"),
        ('name = "a:1"', "has the name 'a:1'"),
        ('name = "a"\npackages = ["--force-yes"]', "lists '--force-yes'"),
        ('name = "a"\nrun = "true"', "unknown field `run`"),
        ("name = ", "Invalid value"),
        ('from = "base"', "required field `name`"),
    ],
)
def test_an_invalid_recipe_is_refused_with_the_reason(tmp_path: Path, text: str, problem: str):
    file = tmp_path / "recipe.toml"
    file.write_text(text)
    with pytest.raises(InvalidError, match="recipe") as refused:
        read_recipe(file)
    assert problem in refused.value.message
    assert str(file) in refused.value.message


def test_a_missing_recipe_is_refused(tmp_path: Path):
    with pytest.raises(InvalidError, match="No such file"):
        read_recipe(tmp_path / "recipe.toml")


@needs_root
def test_a_recipe_adds_a_layer_to_the_image_below(store: ImageStore, cache: Path, tmp_path: Path):
    below = stand_in(cache, "minimal")
    (below / "etc/unwanted").touch()
    text = """
        name = "data"
        from = "minimal"
        script = "echo hello > /etc/greeting; rm /etc/unwanted"
    """
    image = built(store, tmp_path, text)
    assert image.name == "data:latest"
    assert image.layers[0] == below
    assert len(image.layers) == 2
    tree = MergedTree(image.layers)
    greeting = tree.find("/etc/greeting")
    assert greeting is not None
    assert greeting.sources[0].read_text() == "hello\n"
    assert tree.find("/etc/unwanted") is None
    assert (below / "etc/unwanted").exists()
    assert store.resolve("data") == image
    assert built(store, tmp_path, text) == image  # not built again


@needs_root
def test_a_recipe_named_base_replaces_base(store: ImageStore, cache: Path, tmp_path: Path):
    stand_in(cache, "minimal")
    stand_in(cache, "base")
    original = store.resolve("base")
    own = built(store, tmp_path, 'name = "base"\nfrom = "base"\nscript = "echo 1 > /etc/own"')
    assert own.layers[:1] == original.layers
    assert store.resolve("base") == own
    assert store.resolve("e2bdev/base").layers == own.layers
    store.delete("base")
    assert store.resolve("base") == original


@needs_root
@pytest.mark.sandbox
def test_on_an_overlay_the_image_is_one_complete_tree(tmp_path: Path, overlay: Path):
    below = stand_in(overlay, "minimal")
    store = ImageStore(tmp_path / "store", base_cache=overlay)
    image = built(store, tmp_path, 'name = "data"\nfrom = "minimal"\nscript = "echo 1 > /etc/own"')
    (layer,) = image.layers
    assert (layer / "etc/own").read_text() == "1\n"
    assert (layer / "bin/sh").exists()
    assert below not in image.layers


@pytest.fixture
def overlay(tmp_path: Path) -> Iterator[Path]:
    """A directory on a file system that cannot hold layers."""
    lower, upper, work, root = (tmp_path / name for name in ("lower", "upper", "work", "root"))
    for directory in (lower, upper, work, root):
        directory.mkdir()
    options = f"lowerdir={lower},upperdir={upper},workdir={work}"
    subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, root], check=True)
    yield root
    unmount(root)


@needs_root
def test_a_script_sees_its_own_devices_and_cannot_empty_those_of_the_machine(
    store: ImageStore, cache: Path, tmp_path: Path
):
    stand_in(cache, "minimal")
    before = Path("/etc/resolv.conf").read_text()
    image = built(
        store,
        tmp_path,
        """
        name = "data"
        from = "minimal"
        script = '''
        ls -A /dev /run /tmp > /etc/seen
        cat /etc/resolv.conf > /etc/resolver
        find /dev /run /tmp -mindepth 1 -delete
        : > /etc/resolv.conf
        '''
        """,
    )
    layer = image.layers[-1]
    assert set((layer / "etc/seen").read_text().split()) >= {"null", "urandom"}
    assert "console" not in (layer / "etc/seen").read_text()
    assert (layer / "etc/resolver").read_text() == before
    assert (layer / "etc/resolv.conf").read_text() == ""
    assert [*(layer / "dev").iterdir(), *(layer / "tmp").iterdir()] == []
    assert Path("/etc/resolv.conf").read_text() == before
    assert Path("/dev/null").is_char_device()


@needs_root
def test_a_failing_script_has_a_reason_and_leaves_nothing(
    store: ImageStore, cache: Path, tmp_path: Path
):
    stand_in(cache, "minimal")
    before = sorted(cache.iterdir())
    with pytest.raises(UnavailableError, match=r"status 7: .*no such luck"):
        built(
            store,
            tmp_path,
            'name = "data"\nfrom = "minimal"\nscript = "echo no such luck; exit 7"',
        )
    assert sorted(cache.iterdir()) == before
    assert not store.has("data")


@needs_root
def test_what_a_script_started_ends_with_the_build(store: ImageStore, cache: Path, tmp_path: Path):
    stand_in(cache, "minimal")
    script = "(while :; do :; done) & echo started"
    built(store, tmp_path, f'name = "data"\nfrom = "minimal"\nscript = "{script}"')
    assert str(cache) not in Path("/proc/self/mounts").read_text()


def test_builds_use_the_proxies_of_the_environment_or_else_of_apt(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    for name in ("http_proxy", "https_proxy"):
        monkeypatch.delenv(name, raising=False)
    config = tmp_path / "apt.conf"
    config.write_text('Acquire::http::Proxy "http://proxy:3128"; Acquire::http::Proxy::x "DIRECT";')
    monkeypatch.setenv("APT_CONFIG", str(config))
    assert commands.build_environment()["http_proxy"] == "http://proxy:3128"
    assert "https_proxy" not in commands.build_environment()
    monkeypatch.setenv("http_proxy", "http://other:1")
    assert commands.build_environment()["http_proxy"] == "http://other:1"


@pytest.mark.parametrize("name", ["e2bdev/base", "e2bdev/base:latest"])
def test_the_base_of_e2b_is_an_alias_unless_an_image_of_that_name_is_stored(
    store: ImageStore, cache: Path, tmp_path: Path, name: str
):
    assert not store.has(name)
    stand_in(cache, "base")
    assert store.has(name)
    assert store.resolve(name) == store.resolve("base")
    assert not store.has("e2bdev/base:2")
    assert [image.name for image in store.images()] == ["base:latest"]
    own = store.add_directory(shell_root(tmp_path / "own"), "e2bdev/base")
    assert store.resolve(name).layers == own.layers
    assert store.resolve("base").layers != own.layers


@pytest.mark.parametrize(("name", "argument"), [("e2bdev/base", ""), ("minimal", " minimal")])
def test_a_missing_built_in_image_has_a_hint(store: ImageStore, name: str, argument: str):
    with pytest.raises(NotFoundError) as missing:
        store.resolve(name)
    assert missing.value.hint == f"build it: paddock image build-base{argument}"
