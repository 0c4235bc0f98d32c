"""Small archives that would fill the disk or the memory of the machine when they are imported."""

import gzip
import io
import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from paddock.kit.errors import InvalidError
from paddock.runtime.local.images import ImageStore, limits
from paddock.runtime.local.images.limits import ImageLimits
from tests.runtime.local.images.builders import directory, entry, oci_layout, tar

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="owners are set, which needs root"),
    pytest.mark.timeout(60),
]

_MB = 1 << 20
_LIMITS = ImageLimits(max_bytes=8 * _MB, max_entries=300, max_file_bytes=4 * _MB, max_ratio=50)
_NOISE = os.urandom(_MB)


def _write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def _root(*entries: tuple[tarfile.TarInfo, bytes]) -> bytes:
    return tar(directory("bin"), directory("usr"), *entries)


def _sparse() -> bytes:
    """Return a tar with a sparse file of 1 TiB that has no data."""
    member = tarfile.TarInfo("usr/sparse")
    member.pax_headers = {
        "GNU.sparse.major": "0", "GNU.sparse.minor": "1", "GNU.sparse.name": "usr/sparse",
        "GNU.sparse.size": str(1 << 40), "GNU.sparse.numblocks": "1", "GNU.sparse.map": "0,0",
    }  # fmt: skip
    return _root((member, b""))


def _long_header() -> bytes:
    """Return a tar whose first member has a header of 64 MiB, which a reader would keep."""
    header = tarfile.TarInfo("long")
    header.type, header.size = tarfile.XHDTYPE, 64 * _MB
    return header.tobuf() + bytes(64 * _MB)


def _behind_the_end() -> bytes:
    return _root(entry("bin/sh", b"x")) + bytes(16 * _MB)


BOMBS: dict[str, tuple[str, Callable[[Path], Path]]] = {
    "a large image": (
        "image_max_bytes",
        lambda to: _write(to / "a.tar", _root(*(entry(f"bin/{n}", _NOISE) for n in range(9)))),
    ),
    "a large file": (
        "image_max_file_bytes",
        lambda to: _write(to / "a.tar", _root(entry("bin/sh", _NOISE * 5))),
    ),
    "many entries": (
        "image_max_entries",
        lambda to: _write(to / "a.tar", _root(*(entry(f"bin/{n}") for n in range(400)))),
    ),
    "zeros": (
        "image_max_ratio",
        lambda to: _write(
            to / "a.tar.gz",
            gzip.compress(_root(*(entry(f"bin/{n}", bytes(_MB)) for n in range(6)))),
        ),
    ),
    "a sparse file": ("image_max_", lambda to: _write(to / "a.tar", _sparse())),
    "bytes behind the end": (
        "image_max_",
        lambda to: _write(to / "a.tar.gz", gzip.compress(_behind_the_end())),
    ),
    "layers that are large together": (
        "image_max_bytes",
        lambda to: oci_layout(
            to / "oci", [tar(entry(f"bin/{n}", _NOISE + bytes([n]) * 9)) for n in range(9)]
        ),
    ),
    "a compressed layer": (
        "image_max_ratio",
        lambda to: oci_layout(to / "oci", [tar(*(entry(f"{n}", bytes(_MB)) for n in range(6)))]),
    ),
}


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ImageStore:
    monkeypatch.setattr(limits, "_RATIO_FROM_BYTES", _MB)
    return ImageStore(tmp_path / "images", limits=_LIMITS)


@pytest.mark.parametrize("bomb", BOMBS)
def test_an_image_beyond_a_limit_is_refused_and_leaves_nothing(
    store: ImageStore, tmp_path: Path, bomb: str
) -> None:
    setting, make = BOMBS[bomb]
    source = make(tmp_path)
    with pytest.raises(InvalidError, match=str(source)) as caught:
        store.add(source, "bomb")
    assert setting in str(caught.value.hint)
    store.collect()
    assert not list((tmp_path / "images").glob("*/*"))


def test_a_header_of_a_tar_is_not_read_into_memory(store: ImageStore, tmp_path: Path) -> None:
    with pytest.raises(InvalidError, match="header"):
        store.add(_write(tmp_path / "a.tar", _long_header()), "bomb")


def test_a_large_directory_is_refused(store: ImageStore, tmp_path: Path) -> None:
    (tmp_path / "root" / "bin").mkdir(parents=True)
    for number in range(301):
        (tmp_path / "root" / "bin" / str(number)).touch()
    with pytest.raises(InvalidError, match="files and directories"):
        store.add(tmp_path / "root", "bomb")
    assert not list((tmp_path / "images").glob("*/*"))


def test_an_image_within_the_limits_is_imported(store: ImageStore, tmp_path: Path) -> None:
    data = _root(entry("bin/sh", _NOISE), *(entry(f"bin/{n}", b"x") for n in range(200)))
    for name in ("plain", "compressed"):
        stored = gzip.compress(data) if name == "compressed" else data
        assert store.add(_write(tmp_path / f"{name}.tar", stored), name).name == f"{name}:latest"
    layout = oci_layout(tmp_path / "oci", [data, tar(entry("bin/more", b"y"))])
    assert len(store.add(layout, "two").layers) == 2


def test_layers_of_a_failed_import_that_another_image_has_are_kept(
    store: ImageStore, tmp_path: Path
) -> None:
    shared = tar(entry("bin/shared", b"x"))
    store.add(oci_layout(tmp_path / "good", [shared]), "good")
    bad = oci_layout(tmp_path / "bad", [shared, tar(entry("bin/large", _NOISE * 5))])
    with pytest.raises(InvalidError):
        store.add(bad, "bad")
    assert store.resolve("good").layers[0].is_dir()


def test_a_hard_link_and_long_names_still_work(store: ImageStore, tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for member, content in (directory("bin"), entry("bin/" + "n" * 200, b"x")):
            archive.addfile(member, io.BytesIO(content))
        member, _ = entry("bin/link", kind=tarfile.LNKTYPE, link="bin/" + "n" * 200)
        archive.addfile(member)
    image = store.add(_write(tmp_path / "a.tar", buffer.getvalue()), "names")
    assert (image.layers[0] / "bin" / "link").read_bytes() == b"x"
