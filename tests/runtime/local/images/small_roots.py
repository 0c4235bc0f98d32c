"""Small root file systems like those of foreign images, made of programs of this machine."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

STATIC_PROGRAM = """
#include <stdio.h>
#include <unistd.h>
int main(void) {
    char where[256];
    printf("%d in %s\\n", getuid(), getcwd(where, sizeof where));
    return 0;
}
"""


def shell_root(root: Path, *programs: str) -> Path:
    """A root with `sh` (not bash), the programs and their libraries; no users at all."""
    _copy_program(root, "/bin/sh", "/bin/sh")
    for name in ("cat", "id", *programs):
        _copy_program(root, shutil.which(name) or name, f"/usr/bin/{name}")
    return root


def ubuntu_root(root: Path) -> Path:
    """A root with bash and a few programs, merged and described as in an image of Ubuntu 22.04."""
    for name in ("bin", "lib", "lib64", "sbin"):
        (root / "usr" / name).mkdir(parents=True)
        (root / name).symlink_to(f"usr/{name}")
    shell_root(
        root,
        "bash",
        "chmod",
        "env",
        "ln",
        "ls",
        "mkdir",
        "readlink",
        "rm",
        "sleep",
        "stat",
        "whoami",
    )
    (root / "etc").mkdir()
    (root / "etc/os-release").write_text('ID=ubuntu\nVERSION_ID="22.04"\n')
    (root / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/bash\n")
    (root / "etc/group").write_text("root:x:0:\n")
    for name in ("home", "root", "tmp"):
        (root / name).mkdir()
    (root / "tmp").chmod(0o1777)
    return root


def static_root(root: Path) -> Path:
    """A root with one static program: no shell, no libraries, no users."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no compiler here")
    (root / "app").mkdir(parents=True)
    source = root.with_suffix(".c")
    source.write_text(STATIC_PROGRAM)
    subprocess.run([compiler, "-static", "-o", root / "app/where", source], check=True)
    return root


def _copy_program(root: Path, source: str, target: str) -> None:
    listed = subprocess.run(["ldd", source], capture_output=True, text=True, check=False).stdout
    libraries = re.findall(r"(/\S+) \(0x", listed)
    for path, place in ((source, target), *((name, name) for name in libraries)):
        copy = root / place.lstrip("/")
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
        copy.chmod(0o755)
