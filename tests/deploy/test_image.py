"""Paddock's image: both recipes agree, its modules import, and its archive is a valid image."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from paddock.runtime.kubernetes import names
from paddock.runtime.local.images import ImageStore
from tests.cluster.node import images

ROOT = Path(__file__).parents[2]
IMAGE = ROOT / "deploy" / "image"
PACKAGES = "/usr/lib/paddock/packages"


@pytest.fixture(scope="module")
def packer() -> ModuleType:
    """The program that packs archives."""
    return images.packer()


def last_stage() -> dict[str, str]:
    """The instructions of the Dockerfile's last stage, joined by kind."""
    text = (IMAGE / "Dockerfile").read_text().replace("\\\n", " ")
    found: dict[str, str] = {}
    for line in text[text.rindex("\nFROM ") :].splitlines():
        word, _, rest = line.strip().partition(" ")
        if word:
            found[word] = f"{found.get(word, '')} {rest.strip()}".strip()
    return found


def test_both_recipes_have_the_same_entrypoint_user_and_environment(packer: ModuleType):
    stage = last_stage()
    assert json.loads(stage["ENTRYPOINT"]) == packer.CONFIG["Entrypoint"]
    assert stage["USER"] == packer.CONFIG["User"]
    assert sorted(stage["ENV"].split()) == sorted(packer.CONFIG["Env"])
    script = (IMAGE / "build-rootfs").read_text()
    for recipe in (stage["COPY"], script):
        assert PACKAGES in recipe
        assert names.HOLD_IN_IMAGE in recipe


@pytest.mark.timeout(120)
def test_the_recipes_copy_all_that_roles_and_sidecars_import(tmp_path: Path):
    copied = re.findall(r"^COPY (.+) /src/\S*$", (IMAGE / "Dockerfile").read_text(), re.MULTILINE)
    paths = " ".join(copied).split()
    script = (IMAGE / "build-rootfs").read_text()
    for path in paths:
        assert f'"$here/{path.partition("/")[0]}"' in script, f"build-rootfs does not copy {path}"
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    modules = "import paddock.app.roles.registry, paddock.runtime.kubernetes.sidecar as s"
    done = subprocess.run(
        [sys.executable, "-c", f"{modules}; print(s.__file__)"],
        env={"PYTHONPATH": str(tmp_path / "src"), "PATH": os.environ["PATH"]},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(tmp_path))


@pytest.mark.skipif(os.geteuid() != 0, reason="owners are set, which needs root")
def test_the_archive_is_an_image_that_others_read(packer: ModuleType, tmp_path: Path):
    rootfs = tmp_path / "rootfs"
    (rootfs / "usr" / "bin").mkdir(parents=True)
    (rootfs / "usr" / "bin" / "tool").write_bytes(b"#!/bin/sh\n")
    (rootfs / "usr" / "bin" / "tool").chmod(0o755)
    (rootfs / "bin").symlink_to("usr/bin")
    os.chown(rootfs / "usr", 12, 34)
    archives = [tmp_path / "one.tar", tmp_path / "two.tar"]
    for archive in archives:
        packer.pack(archive, [(packer.NAME, [rootfs], packer.CONFIG)])
    assert archives[0].read_bytes() == archives[1].read_bytes(), (
        "the same files give the same image"
    )

    store = ImageStore(tmp_path / "images", base_cache=tmp_path / "no-base")
    image = store.add_archive(archives[0], "paddock")
    assert image.config.entrypoint == tuple(packer.CONFIG["Entrypoint"])
    assert image.config.user == packer.CONFIG["User"]
    layer = image.layers[0]
    assert (layer / "usr" / "bin" / "tool").stat().st_mode & 0o777 == 0o755
    assert (layer / "bin").readlink() == Path("usr/bin")


def test_the_script_reports_a_missing_program(tmp_path: Path):
    """On a machine without debootstrap, before anything is written."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("bash", "cat", "awk", "dirname", "env"):
        found = shutil.which(name)
        assert found is not None
        (programs / name).symlink_to(found)
    done = subprocess.run(
        [str(IMAGE / "build-rootfs"), str(tmp_path / "out")],
        env={"PATH": str(programs)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 3
    assert "debootstrap is missing" in done.stderr
    assert not (tmp_path / "out").exists()
