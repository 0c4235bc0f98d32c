"""Unpacking an untrusted layer changes nothing outside its directory."""

import contextlib
import io
import os
import stat
import tarfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paddock.kit.errors import InvalidError, PaddockError
from paddock.runtime.local.images.limits import ImageLimits, ImportBudget
from paddock.runtime.local.images.unpack import split_path, unpack_layer
from tests.runtime.local.images.builders import directory, entry, tar

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="owners are set, which needs root"),
    pytest.mark.timeout(120),
]


def _budget() -> ImportBudget:
    return ImportBudget(ImageLimits(), packed_bytes=1 << 20, name="it")


def unpack(data: bytes, target: Path) -> Path:
    target.mkdir()
    unpack_layer(io.BytesIO(data), target, _budget())
    return target


def test_files_keep_owner_mode_time_links_and_attributes(tmp_path: Path):
    layer = tar(
        directory("home/user", mode=0o750, uid=1000),
        entry("home/user/file", b"text", mode=0o640, uid=1000, xattrs={"user.note": "kept"}),
        entry("usr/bin/sudo", b"x", mode=0o4755),
        entry("usr/bin/again", kind=tarfile.LNKTYPE, link="usr/bin/sudo"),
        entry("bin", kind=tarfile.SYMTYPE, link="usr/bin"),
        entry("fifo", kind=tarfile.FIFOTYPE),
    )
    root = unpack(layer, tmp_path / "root")
    file = root / "home/user/file"
    assert (file.read_text(), file.stat().st_uid, file.stat().st_mtime) == (
        "text",
        1000,
        1_700_000_000,
    )
    assert stat.S_IMODE((root / "home/user").stat().st_mode) == 0o750
    assert os.getxattr(file, "user.note") == b"kept"
    assert stat.S_IMODE((root / "usr/bin/sudo").stat().st_mode) == 0o4755
    assert (root / "usr/bin/again").samefile(root / "usr/bin/sudo")
    assert (root / "bin").readlink() == Path("usr/bin")
    assert (root / "fifo").is_fifo()


def test_whiteouts_become_those_of_overlayfs(tmp_path: Path):
    layer = tar(
        entry("etc/.wh.gone"), directory("opt"), entry("opt/.wh..wh..opq"), entry("opt/new", b"n")
    )
    root = unpack(layer, tmp_path / "root")
    gone = (root / "etc/gone").stat()
    assert stat.S_ISCHR(gone.st_mode)
    assert gone.st_rdev == 0
    assert os.getxattr(root / "opt", "trusted.overlay.opaque") == b"y"
    assert (root / "opt/new").read_text() == "n"
    assert not (root / "opt/.wh..wh..opq").exists()


def test_attributes_that_overlayfs_interprets_are_dropped(tmp_path: Path):
    layer = tar(entry("file", b"x", xattrs={"trusted.overlay.redirect": "/etc/shadow"}))
    root = unpack(layer, tmp_path / "root")
    assert os.listxattr(root / "file") == []


def test_a_later_member_replaces_an_earlier_one(tmp_path: Path):
    layer = tar(
        directory("a"),
        entry("a/file", b"1"),
        entry("a", kind=tarfile.SYMTYPE, link="/etc"),
        directory("a"),
        entry("a/file", b"2"),
    )
    root = unpack(layer, tmp_path / "root")
    assert not (root / "a").is_symlink()
    assert (root / "a/file").read_text() == "2"


@pytest.mark.parametrize("name", ["../out", "a/../../out", "./../out"])
def test_paths_that_lead_outside_are_rejected(tmp_path: Path, name: str):
    with pytest.raises(InvalidError, match="leads outside"):
        unpack(tar(entry(name, b"x")), tmp_path / "root")
    assert not (tmp_path / "out").exists()


def test_absolute_paths_are_unpacked_below_the_root(tmp_path: Path):
    root = unpack(tar(entry("/etc/motd", b"x")), tmp_path / "root")
    assert (root / "etc/motd").read_text() == "x"


def test_writing_through_a_link_is_rejected(tmp_path: Path):
    outside = tmp_path / "outside"
    outside.mkdir()
    layer = tar(entry("dir", kind=tarfile.SYMTYPE, link=str(outside)), entry("dir/file", b"x"))
    with pytest.raises(InvalidError, match="is a link or a file"):
        unpack(layer, tmp_path / "root")
    assert list(outside.iterdir()) == []


def test_a_hard_link_to_the_outside_is_rejected(tmp_path: Path):
    (tmp_path / "secret").write_text("secret")
    for target in ("../secret", str(tmp_path / "secret")):
        with pytest.raises(InvalidError):
            unpack(
                tar(entry("link", kind=tarfile.LNKTYPE, link=target)), tmp_path / f"r{len(target)}"
            )
    assert (tmp_path / "secret").stat().st_nlink == 1


def test_device_nodes_are_rejected_and_skipped_below_dev(tmp_path: Path):
    with pytest.raises(InvalidError, match="device node"):
        unpack(tar(entry("disk", kind=tarfile.BLKTYPE)), tmp_path / "one")
    root = unpack(tar(entry("dev/null", kind=tarfile.CHRTYPE)), tmp_path / "two")
    assert list((root / "dev").iterdir()) == []


def test_an_invalid_tar_is_rejected(tmp_path: Path):
    with pytest.raises(InvalidError, match="not a readable tar"):
        unpack(b"x" * 2000, tmp_path / "root")


parts = st.sampled_from(["a", "b", "..", ".", "", "link", "dev", ".wh.a", ".wh..", ".wh..wh..opq"])
names = st.lists(parts, min_size=1, max_size=4).map("/".join)
kinds = st.sampled_from(
    [
        tarfile.REGTYPE,
        tarfile.DIRTYPE,
        tarfile.SYMTYPE,
        tarfile.LNKTYPE,
        tarfile.FIFOTYPE,
        tarfile.CHRTYPE,
    ]
)
links = st.sampled_from(["../outside", "/outside", "a", "b", "..", "../outside/precious", "/", "."])


@settings(max_examples=150)
@given(st.lists(st.tuples(names, kinds, links), max_size=8))
def test_no_sequence_of_members_escapes(
    tmp_path_factory: pytest.TempPathFactory, members: list[tuple[str, bytes, str]]
):
    place = tmp_path_factory.mktemp("escape")
    (place / "outside").mkdir()
    (place / "outside" / "precious").write_text("precious")
    target = place / "root"
    target.mkdir()
    layer = tar(
        *(
            entry(name, b"evil" if kind == tarfile.REGTYPE else b"", kind=kind, link=link)
            for name, kind, link in members
        )
    )
    with contextlib.suppress(PaddockError):
        unpack_layer(io.BytesIO(layer), target, _budget())
    assert sorted(path.name for path in place.iterdir()) == ["outside", "root"]
    assert [path.name for path in (place / "outside").iterdir()] == ["precious"]
    assert (place / "outside" / "precious").read_text() == "precious"
    assert (place / "outside" / "precious").stat().st_nlink == 1


@given(st.text(max_size=40))
def test_a_path_is_split_into_plain_names_or_rejected(name: str):
    try:
        found = split_path(name)
    except InvalidError:
        return
    assert not {"", ".", ".."} & set(found)
    assert not any("/" in part or "\0" in part for part in found)
