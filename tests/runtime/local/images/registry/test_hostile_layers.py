"""Hostile layers that a real registry serves are refused by name, and nothing of them is left."""

import os
import tarfile
from pathlib import Path

import pytest

from paddock.kit.errors import InvalidError
from paddock.runtime.local.images.store import ImageStore
from tests.runtime.local.images import builders
from tests.runtime.local.images.builders import directory, entry
from tests.runtime.local.images.registry.conftest import LAYERS, MakePuller
from tests.runtime.local.images.registry.servers import Registry, push

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="owners are set, which needs root")

SYMLINK, HARD_LINK = tarfile.SYMTYPE, tarfile.LNKTYPE
REFUSED = {
    "traversal": ([entry("../../../escaped", b"x")], "leads outside"),
    "traversal-by-link": (
        [entry("out", kind=SYMLINK, link="../../.."), entry("out/escaped", b"x")],
        "is a link or a file",
    ),
    "link-out": (
        [entry("etc", kind=SYMLINK, link="/etc"), entry("etc/escaped", b"x")],
        "is a link or a file",
    ),
    "hard-link-out": (
        [entry("passwd", kind=HARD_LINK, link="../../../../../../etc/passwd")],
        "leads outside",
    ),
    "hard-link-by-link": (
        [
            entry("etc", kind=SYMLINK, link="/etc"),
            entry("passwd", kind=HARD_LINK, link="etc/passwd"),
        ],
        "passwd",
    ),
    "device": ([directory("disk"), entry("disk/sda", kind=tarfile.BLKTYPE)], "device node"),
    "whiteout-by-link": (
        [entry("etc", kind=SYMLINK, link="/etc"), entry("etc/.wh.passwd")],
        "is a link or a file",
    ),
    "opaque-by-link": (
        [entry("etc", kind=SYMLINK, link="/etc"), entry("etc/.wh..wh..opq")],
        "is a link or a file",
    ),
    "whiteout-of-the-parent": ([entry("a/.wh..")], "wh"),
    "truncated": ([entry("file", b"x" * 4096)], "not a readable tar"),
}


def layout(target: Path, kind: str, entries: list[tuple[tarfile.TarInfo, bytes]]) -> Path:
    """Write an image whose second layer is hostile."""
    layer = builders.tar(*entries)
    return builders.oci_layout(target, (LAYERS[0], layer[:2048] if kind == "truncated" else layer))


def leftovers(store: ImageStore, tmp_path: Path) -> list[str]:
    """Return the layers, references and downloads that a pull has left.

    Layers that were unpacked before the hostile one are collected like those of deleted images.
    """
    store.collect()
    layers = (tmp_path / "images" / "layers").iterdir()
    refs = (tmp_path / "images" / "refs").glob("*127.0.0.1*")
    downloads = (tmp_path / "downloads").rglob("*")
    files = (path for path in downloads if path.is_file() and path.stat().st_size)
    return [str(path) for path in (*layers, *refs, *files)]


@pytest.mark.parametrize("kind", sorted(REFUSED))
async def test_a_hostile_layer_is_refused_and_nothing_is_left(
    server: Registry, store: ImageStore, make_puller: MakePuller, tmp_path: Path, kind: str
) -> None:
    entries, reason = REFUSED[kind]
    push(layout(tmp_path / "layout", kind, entries), server, f"hostile:{kind}")
    precious = Path("/etc/passwd").stat()
    name = f"{server.host}/hostile:{kind}"
    with pytest.raises(InvalidError, match=reason):
        await make_puller().pull(name, team="t")
    assert not store.has(name)
    assert leftovers(store, tmp_path) == []
    assert not list(tmp_path.rglob("escaped"))
    assert not Path("/etc/escaped").exists()
    after = Path("/etc/passwd").stat()
    assert (after.st_nlink, after.st_ino) == (precious.st_nlink, precious.st_ino)


async def test_a_bomb_is_refused_and_nothing_is_left(
    server: Registry, store: ImageStore, make_puller: MakePuller, tmp_path: Path
) -> None:
    """300 MiB of zeros in 0.3 MiB: more than an archive may be compressed by."""
    bomb = builders.tar(*(entry(f"zeros{number}", bytes(50 << 20)) for number in range(6)))
    push(builders.oci_layout(tmp_path / "layout", (LAYERS[0], bomb)), server, "hostile:bomb")
    name = f"{server.host}/hostile:bomb"
    with pytest.raises(InvalidError, match="bytes per byte of its archive"):
        await make_puller().pull(name, team="t")
    assert not store.has(name)
    assert leftovers(store, tmp_path) == []


async def test_what_is_harmless_by_itself_is_neutralized(
    server: Registry, make_puller: MakePuller, tmp_path: Path
) -> None:
    """Of an entry that is there twice the last one counts; `/dev` has no devices of an image."""
    layer = builders.tar(
        entry("file", b"first"),
        entry("dir", kind=SYMLINK, link="/etc"),
        entry("file", b"last"),
        directory("dir"),
        entry("dir/inside", b"kept"),
        directory("dev"),
        entry("dev/sda", kind=tarfile.BLKTYPE),
        entry("elsewhere", kind=SYMLINK, link="../../../etc/shadow"),
    )
    push(builders.oci_layout(tmp_path / "layout", (layer,)), server, "neutral:1")
    [root] = (await make_puller().pull(f"{server.host}/neutral:1", team="t")).image.layers
    assert (root / "file").read_bytes() == b"last"
    assert not (root / "dir").is_symlink()
    assert (root / "dir/inside").read_bytes() == b"kept"
    assert list((root / "dev").iterdir()) == []
    # A link is only text: inside a sandbox it leads to a file of the sandbox.
    assert (root / "elsewhere").readlink() == Path("../../../etc/shadow")
