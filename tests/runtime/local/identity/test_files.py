"""Identity files are written below the root of a disk, whatever a sandbox left there."""

import os
from pathlib import Path

import pytest

from paddock.runtime.local.identity.files import write_identity, write_new_identity

SENTINEL = "of the machine\n"


@pytest.fixture
def upper(tmp_path: Path) -> Path:
    made = tmp_path / "upper"
    made.mkdir()
    return made


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A directory of the machine with files of the same names."""
    made = tmp_path / "outside"
    made.mkdir()
    for name in ("machine-id", "generation", "hostname", "hosts", "resolv.conf"):
        (made / name).write_text(SENTINEL)
    return made


def write(upper: Path, *layers: Path) -> str:
    write_identity(upper, hostname="h", ip=None, resolv_conf=None)
    return write_new_identity(upper, [str(layer) for layer in layers])


def test_a_new_disk_gets_a_machine_id_and_a_generation(upper: Path) -> None:
    generation = write(upper)
    machine_id = (upper / "etc/machine-id").read_text()
    assert len(machine_id) == 33
    assert int(machine_id, 16)
    assert (upper / "run/paddock/generation").read_text() == f"{generation}\n"
    for path in ("etc/machine-id", "run/paddock/generation"):
        assert (upper / path).stat().st_mode & 0o777 == 0o444
    for path in ("etc", "run", "run/paddock"):
        assert (upper / path).stat().st_mode & 0o777 == 0o755


def test_every_call_writes_other_values_and_keeps_modes(upper: Path) -> None:
    write(upper)
    files = [upper / "etc/machine-id", upper / "run/paddock/generation"]
    files[0].chmod(0o640)
    before = [path.read_text() for path in files]
    inodes = [path.stat().st_ino for path in files]
    write(upper)
    after = [path.read_text() for path in files]
    assert all(new != old and len(new) == len(old) for new, old in zip(after, before, strict=True))
    assert [path.stat().st_ino for path in files] == inodes
    assert [path.stat().st_mode & 0o777 for path in files] == [0o640, 0o444]


def test_the_copy_of_dbus_follows_only_where_there_is_one(upper: Path) -> None:
    write(upper)
    assert not (upper / "var").exists()
    copy = upper / "var/lib/dbus/machine-id"
    copy.parent.mkdir(parents=True)
    copy.write_text("0" * 32 + "\n")
    write(upper)
    assert copy.read_text() == (upper / "etc/machine-id").read_text()


@pytest.mark.parametrize(
    "link",
    ["etc", "etc/machine-id", "run", "run/paddock", "run/paddock/generation", "var/lib/dbus",
     "var/lib/dbus/machine-id", "var"],
)  # fmt: skip
def test_links_out_of_the_root_are_not_followed(upper: Path, outside: Path, link: str) -> None:
    path = upper / link
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(
        outside / path.name if "." in link or path.name in ("machine-id", "generation") else outside
    )
    write(upper)
    assert all(file.read_text() == SENTINEL for file in outside.iterdir())
    assert sorted(file.name for file in outside.iterdir()) == [
        "generation", "hostname", "hosts", "machine-id", "resolv.conf",
    ]  # fmt: skip


def test_links_in_place_of_our_files_are_replaced(upper: Path, outside: Path) -> None:
    (upper / "etc").mkdir()
    (upper / "etc/machine-id").symlink_to(outside / "machine-id")
    (upper / "run").mkdir()
    (upper / "run/paddock").symlink_to(outside)
    generation = write(upper)
    assert not (upper / "etc/machine-id").is_symlink()
    assert (upper / "run/paddock/generation").read_text() == f"{generation}\n"
    assert not (upper / "run/paddock").is_symlink()


def test_pipes_devices_and_directories_in_place_of_our_files_block_nothing(upper: Path) -> None:
    (upper / "etc/machine-id").mkdir(parents=True)
    (upper / "run/paddock").mkdir(parents=True)
    os.mkfifo(upper / "run/paddock/generation")
    generation = write(upper)
    assert (upper / "etc/machine-id").is_dir()
    assert (upper / "run/paddock/generation").read_text() == f"{generation}\n"


def test_a_directory_that_an_image_replaced_by_a_link_is_not_hidden(
    upper: Path, tmp_path: Path
) -> None:
    top, low = tmp_path / "top", tmp_path / "low"
    top.mkdir()
    low.mkdir()
    (low / "run").symlink_to("var/run")
    write(upper, top, low)
    assert not (upper / "run").exists()
    (top / "run").mkdir()
    write(upper, top, low)
    assert (upper / "run/paddock/generation").exists()
