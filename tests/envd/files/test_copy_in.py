"""COPY of template builds: how files of an archive are merged, and what is refused."""

import gzip
import io
import os
import random
import stat
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from paddock.envd.files.archive import ArchiveError, ArchiveLimits
from paddock.envd.files.copy_in import CopyOrder, copy_in, source_prefix

Entry = tarfile.TarInfo
Copy = Callable[..., int]


def entry(name: str, data: bytes | None = None, **facts: object) -> tuple[Entry, bytes]:
    member = Entry(name)
    member.mode = 0o640
    for key, value in facts.items():
        setattr(member, key, value)
    if data is None and "type" not in facts:
        member.type, member.mode = tarfile.DIRTYPE, 0o750
    member.size = len(data or b"")
    return member, data or b""


def link(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> tuple[Entry, bytes]:
    return entry(name, type=kind, linkname=target)


def packed(*entries: tuple[Entry, bytes], zipped: bool = False) -> io.BytesIO:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for member, data in entries:
            tar.addfile(member, io.BytesIO(data))
    return io.BytesIO(gzip.compress(out.getvalue()) if zipped else out.getvalue())


@pytest.fixture
def copy(tmp_path: Path) -> Copy:
    def perform(
        *entries: tuple[Entry, bytes],
        source: str,
        to: str,
        mode: int | None = None,
        limits: ArchiveLimits | None = None,
        zipped: bool = False,
    ) -> int:
        order = CopyOrder(
            source=source,
            destination=f"{tmp_path}/{to}",
            uid=os.getuid(),
            gid=os.getgid(),
            mode=mode,
        )
        file = packed(*entries, zipped=zipped)
        return copy_in(file, order, limits or ArchiveLimits())

    return perform


TREE = (
    entry("folder"),
    entry("folder/a.txt", b"a"),
    entry("folder/sub"),
    entry("folder/sub/b.txt", b"b"),
    entry("other.txt", b"o"),
)


@pytest.mark.parametrize("zipped", [False, True])
def test_the_content_of_a_directory_is_merged(copy: Copy, tmp_path: Path, zipped: bool) -> None:
    (tmp_path / "dest").mkdir()
    (tmp_path / "dest" / "kept.txt").write_text("kept")
    assert copy(*TREE, source="folder", to="dest", zipped=zipped) == 4
    found = sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*"))
    assert found == ["dest", "dest/a.txt", "dest/kept.txt", "dest/sub", "dest/sub/b.txt"]


def test_a_pattern_copies_the_directory_before_it(copy: Copy, tmp_path: Path) -> None:
    copy(*TREE, source="folder/*", to="dest")
    assert (tmp_path / "dest" / "sub" / "b.txt").read_bytes() == b"b"
    assert source_prefix("./a/*.txt/c") == ("a",)


@pytest.mark.parametrize(
    ("to", "path"),
    [("new.txt", "new.txt"), ("dir/", "dir/other.txt"), ("there", "there/other.txt")],
)
def test_a_file_goes_to_the_path_or_into_the_directory(
    copy: Copy, tmp_path: Path, to: str, path: str
) -> None:
    (tmp_path / "there").mkdir()
    copy(*TREE, source="other.txt", to=to)
    assert (tmp_path / path).read_bytes() == b"o"


def test_modes_of_the_archive_are_kept_unless_one_is_given(copy: Copy, tmp_path: Path) -> None:
    copy(*TREE, source="folder", to="one")
    copy(*TREE, source="folder", to="two", mode=0o700)
    modes = [
        stat.S_IMODE((tmp_path / path).stat().st_mode)
        for path in ("one/a.txt", "one/sub", "two/a.txt", "two/sub")
    ]
    assert modes == [0o640, 0o750, 0o700, 0o700]


def test_links_are_kept_even_if_they_are_broken(copy: Copy, tmp_path: Path) -> None:
    copy(
        entry("d"),
        entry("d/file", b"x"),
        link("d/good", "file"),
        link("d/absolute", "/etc/hostname"),
        link("d/broken", "missing"),
        source="d",
        to="dest",
    )
    targets = {
        name: str((tmp_path / "dest" / name).readlink()) for name in ("good", "absolute", "broken")
    }
    assert targets == {"good": "file", "absolute": "/etc/hostname", "broken": "missing"}


def test_a_link_at_the_place_of_a_file_is_replaced(copy: Copy, tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("unchanged")
    (tmp_path / "dest").mkdir()
    (tmp_path / "dest" / "a.txt").symlink_to(tmp_path / "victim")
    copy(*TREE, source="folder", to="dest")
    assert (tmp_path / "dest" / "a.txt").read_bytes() == b"a"
    assert (tmp_path / "victim").read_text() == "unchanged"


def test_a_link_to_a_directory_is_followed(copy: Copy, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "dest").mkdir()
    (tmp_path / "dest" / "sub").symlink_to(tmp_path / "real")
    copy(*TREE, source="folder", to="dest")
    assert (tmp_path / "real" / "b.txt").read_bytes() == b"b"


def test_a_directory_that_exists_keeps_its_mode(copy: Copy, tmp_path: Path) -> None:
    (tmp_path / "dest" / "sub").mkdir(parents=True)
    (tmp_path / "dest" / "sub").chmod(0o711)
    copy(*TREE, source="folder", to="dest", mode=0o700)
    assert stat.S_IMODE((tmp_path / "dest" / "sub").stat().st_mode) == 0o711


def test_hard_links_within_the_archive_are_kept(copy: Copy, tmp_path: Path) -> None:
    files = (entry("d/a", b"x"), link("d/b", "d/a", tarfile.LNKTYPE))
    copy(*files, source="d", to="dest")
    assert (tmp_path / "dest" / "a").samefile(tmp_path / "dest" / "b")


@pytest.mark.parametrize(
    ("hostile", "words"),
    [
        (entry("d/../../x", b"x"), "'d/../../x', which leads out of the archive"),
        (link("d/b", "../../etc/passwd", tarfile.LNKTYPE), "'d/b', which leads out"),
        (link("d/b", "e/a", tarfile.LNKTYPE), "'d/b', a hard link to 'e/a', which is not copied"),
        (entry("d/null", type=tarfile.CHRTYPE), "'d/null', which is neither a file"),
        (entry("d/disk", type=tarfile.BLKTYPE), "'d/disk', which is neither a file"),
        (entry("d/pipe", type=tarfile.FIFOTYPE), "'d/pipe', which is neither a file"),
    ],
)
def test_hostile_members_are_refused_by_name(
    copy: Copy, hostile: tuple[Entry, bytes], words: str
) -> None:
    with pytest.raises(ArchiveError, match=words):
        copy(hostile, source="d", to="dest")


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        (ArchiveLimits(max_entries=4), "more than 4 entries"),
        (ArchiveLimits(max_bytes=2), "more than 2 bytes"),
    ],
)
def test_archives_are_bounded(copy: Copy, limits: ArchiveLimits, words: str) -> None:
    with pytest.raises(ArchiveError, match=words):
        copy(*TREE, source="folder", to="dest", limits=limits)


def test_a_huge_header_is_refused_before_it_is_read(copy: Copy) -> None:
    with pytest.raises(ArchiveError, match="a header has"):
        copy(entry("d/" + "x" * (2 << 20), b"x"), source="d", to="dest")


@pytest.mark.parametrize(
    "data",
    [b"no archive at all", b"\x1f\x8bbroken", gzip.compress(b"x" * 999, mtime=0)],
    ids=["text", "broken gzip", "gzip of text"],
)
def test_a_file_that_is_no_archive_is_refused(tmp_path: Path, data: bytes) -> None:
    order = CopyOrder(source="d", destination=str(tmp_path / "dest"), uid=0, gid=0)
    with pytest.raises(ArchiveError, match="cannot be read"):
        copy_in(io.BytesIO(data), order, ArchiveLimits())


@pytest.mark.parametrize("position", [0.4, 0.9])
def test_a_damaged_file_of_an_archive_is_refused(tmp_path: Path, position: float) -> None:
    data = bytearray(packed(entry("f", random.Random(1).randbytes(3 << 20)), zipped=True).read())
    place = int(len(data) * position)
    data[place] ^= 0xFF
    order = CopyOrder(source="f", destination=str(tmp_path / "f"), uid=os.getuid(), gid=os.getgid())
    for damaged in (data, data[:place]):
        with pytest.raises(ArchiveError):
            copy_in(io.BytesIO(damaged), order, ArchiveLimits())


@pytest.mark.parametrize("when", ["1e300", "nan"])
def test_an_impossible_time_is_refused(copy: Copy, when: str) -> None:
    with pytest.raises(ArchiveError, match="cannot be copied"):
        copy(entry("f", b"x", pax_headers={"mtime": when}), source="f", to="f")


def test_a_source_that_matches_nothing_is_an_error(copy: Copy) -> None:
    with pytest.raises(ArchiveError, match="no file of the archive matches 'missing'"):
        copy(*TREE, source="missing", to="dest")
