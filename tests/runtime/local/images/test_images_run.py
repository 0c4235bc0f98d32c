"""Sandboxes run from images of other tools, even minimal ones."""

import shutil
import subprocess
from pathlib import Path

import pytest

from paddock.runtime.local.images import ImageStore
from paddock.runtime.port import Blueprint
from tests.runtime.local.inside import start

pytestmark = [pytest.mark.sandbox, pytest.mark.timeout(120)]

PROGRAM = """
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
int main(void) {
    char where[256];
    printf("%s from %s as %d\\n", getenv("GREETING"), getcwd(where, sizeof where), getuid());
    return 0;
}
"""


@pytest.fixture(scope="module")
def rootfs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with one program and two users: no shell, no C library, no Python."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no compiler here")
    directory = tmp_path_factory.mktemp("tiny")
    root = directory / "rootfs"
    for name in ("bin", "etc", "srv/work"):
        (root / name).mkdir(parents=True)
    (root / "etc/passwd").write_text("root:x:0:0::/:/bin/hello\nuser:x:1000:1000::/:/bin/hello\n")
    (directory / "hello.c").write_text(PROGRAM)
    command = [compiler, "-static", "-o", root / "bin/hello", directory / "hello.c"]
    subprocess.run(command, check=True)
    return root


@pytest.fixture(scope="module")
def podman(rootfs: Path):
    """podman with an image of that root, in a separate storage."""
    if shutil.which("podman") is None:
        pytest.skip("podman is not installed on this machine")
    place = rootfs.parent
    tar = place / "rootfs.tar"
    subprocess.run(["tar", "-C", rootfs, "-cf", tar, "."], check=True)
    own = ["--root", place / "storage", "--runroot", place / "run", "--storage-driver", "vfs"]

    def run(*arguments: object) -> None:
        done = subprocess.run(["podman", *own, *arguments], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    change = ["-c", "ENV GREETING=hello", "-c", "WORKDIR /srv/work"]
    run("import", *change, tar, "localhost/tiny:1")
    yield run
    run("rmi", "-f", "localhost/tiny:1")


@pytest.mark.parametrize("form", ["docker-archive", "oci-archive", "oci-dir"])
async def test_an_image_saved_by_podman_runs(node, podman, tmp_path: Path, form: str):
    saved = tmp_path / "saved"
    podman("save", "--format", form, "-o", saved, "localhost/tiny:1")
    name = f"from-{form}:1"
    ImageStore(node.state / "images").add(saved, name)
    instance = await node.runtime.create(Blueprint(uid=f"i-{form}", image=name))
    try:
        outcome = await start(instance, ["/bin/hello"], user="user")
    finally:
        await node.runtime.destroy(instance.uid)
    assert (outcome.status, outcome.out) == (0, "hello from /srv/work as 1000\n")


async def test_a_directory_runs_without_programs_of_paddock(node, rootfs: Path):
    ImageStore(node.state / "images").add(rootfs, "bare:1")
    blueprint = Blueprint(uid="i-bare", image="bare:1", env={"GREETING": "hi"}, workdir="/bin")
    instance = await node.runtime.create(blueprint)
    try:
        outcome = await start(instance, ["/bin/hello"], user="root")
    finally:
        await node.runtime.destroy("i-bare")
    assert (outcome.status, outcome.out) == (0, "hi from /bin as 0\n")
