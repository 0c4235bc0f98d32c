"""Unpacking an untrusted layer changes nothing outside its directory."""

import contextlib
import gzip
import io
import os
import random
import stat
import subprocess
import tarfile
from pathlib import Path
from typing import IO, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paddock.kit.errors import DiskFullError, InvalidError, PaddockError
from paddock.runtime.local.images import unpack as unpack_module
from paddock.runtime.local.images.limits import ImageLimits, ImportBudget
from paddock.runtime.local.images.unpack import split_path, unpack_layer
from paddock.runtime.local.storage.reserve import DiskReserve
from paddock.wire.bounded_tar import BoundedTarInfo
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


def odd(name: str = "file", data: bytes = b"", **facts: object) -> bytes:
    """Return a tar with a member that has odd metadata."""
    member, content = entry(name, data)
    for key, value in facts.items():
        setattr(member, key, value)
    return tar((member, content))


@pytest.mark.parametrize(
    "layer",
    [
        odd(mtime=1e300),
        odd(mtime=1, pax_headers={"mtime": "nan"}),
        odd(uid=1 << 40),
        odd(name="x" * 300),
        odd(type=tarfile.SYMTYPE, linkname=""),
        odd(type=tarfile.SYMTYPE, linkname="x" * 5000),
    ],
    ids=["time", "no time", "owner", "name", "empty link", "long link"],
)
def test_impossible_metadata_is_rejected(tmp_path: Path, layer: bytes):
    with pytest.raises(InvalidError):
        unpack(layer, tmp_path / "root")


@pytest.mark.parametrize("position", [0.4, 0.9, 0.999])
@pytest.mark.parametrize("damage", ["cut off", "changed"])
def test_a_damaged_compressed_layer_is_rejected(tmp_path: Path, position: float, damage: str):
    """Wherever the damage is: also behind the end of the tar, which only the checksum covers."""
    whole = gzip.compress(tar(entry("file", random.Random(1).randbytes(300_000))) + bytes(200_000))
    place = int(len(whole) * position)
    end = whole[place + 1 :] if damage == "changed" else b""
    damaged = whole[:place] + (b"\xff" if whole[place] != 0xFF else b"\0") + end
    (tmp_path / "root").mkdir()
    with gzip.GzipFile(fileobj=io.BytesIO(damaged)) as stream, pytest.raises(InvalidError):
        unpack_layer(cast("IO[bytes]", stream), tmp_path / "root", _budget())


FORMATS = (["--format=gnu"], ["--format=pax"], ["--format=pax", "--sparse-version=0.1"])


def sparse_tar(directory_: Path, form: list[str], size: int) -> bytes:
    """Return a tar with a sparse file: holes around a few bytes."""
    with (directory_ / "file").open("wb") as file:
        file.seek(1 << 20)
        file.write(b"in the middle")
        file.truncate(size)
    made = subprocess.run(
        ["tar", "--sparse", *form, "-cf", "-", "-C", directory_, "file"],
        check=True,
        capture_output=True,
    )
    return made.stdout


@pytest.mark.parametrize("form", FORMATS)
def test_the_holes_of_a_sparse_file_take_no_space(tmp_path: Path, form: list[str]):
    size = 200 << 20
    layer = sparse_tar(tmp_path, form, size)
    assert len(layer) < 1 << 20
    unpacked = unpack(layer, tmp_path / "root") / "file"
    assert unpacked.stat().st_size == size
    assert unpacked.stat().st_blocks * 512 < 1 << 20
    with unpacked.open("rb") as file:
        file.seek((1 << 20) - 1)
        assert file.read(15) == b"\0in the middle\0"


@pytest.mark.parametrize("form", FORMATS)
def test_the_holes_of_a_sparse_file_count_as_if_they_were_written(tmp_path: Path, form: list[str]):
    counted: list[int] = []
    reserve = DiskReserve(tmp_path, 0)
    budget = ImportBudget(
        ImageLimits(), packed_bytes=1 << 30, name="it", reserve=reserve, on_bytes=counted.append
    )
    (tmp_path / "root").mkdir()
    unpack_layer(io.BytesIO(sparse_tar(tmp_path, form, 200 << 20)), tmp_path / "root", budget)
    assert sum(counted) > 199 << 20
    free = reserve.status().free_bytes
    full = ImportBudget(
        ImageLimits(),
        packed_bytes=1 << 30,
        name="it",
        reserve=DiskReserve(tmp_path, max(free - (100 << 20), 0)),
    )
    (tmp_path / "full").mkdir()
    with pytest.raises(DiskFullError, match="cannot import it"):
        unpack_layer(io.BytesIO(sparse_tar(tmp_path, form, 200 << 20)), tmp_path / "full", full)


def test_a_long_list_of_parts_of_a_sparse_file_is_refused_before_it_is_in_memory(tmp_path: Path):
    numbers = b"2000000\n" + b"0\n" * 4_000_000
    member, data = entry("file", numbers + bytes(-len(numbers) % 512))
    member.pax_headers = {
        "GNU.sparse.major": "1",
        "GNU.sparse.minor": "0",
        "GNU.sparse.name": "file",
        "GNU.sparse.realsize": "10",
    }
    with pytest.raises(InvalidError, match="a sparse file has a list of over"):
        unpack(tar((member, data)), tmp_path / "root")


@pytest.mark.parametrize(
    "sparse", [[(0, 20)], [(5, 5), (0, 5)], [(0, 5), (3, 5)], [(-1, 2)], [(2, -1)]]
)
def test_a_malformed_map_of_a_sparse_file_is_rejected(
    tmp_path: Path, sparse: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
):
    class Hostile(BoundedTarInfo):
        def _proc_member(self, archive: tarfile.TarFile) -> tarfile.TarInfo:
            found = super()._proc_member(archive)
            found.sparse = sparse  # type: ignore[attr-defined]
            return found

    monkeypatch.setattr(unpack_module, "BoundedTarInfo", Hostile)
    with pytest.raises(InvalidError, match="malformed sparse file"):
        unpack(tar(entry("file", b"x" * 10)), tmp_path / "root")


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
