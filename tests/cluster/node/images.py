"""The images of a real node in one archive: Paddock, sandbox, Envoy and pause.

    python -m tests.cluster.node.images     build it if missing or outdated, and print its path

Paddock's image is built by `deploy/image/build-rootfs` on top of the base image, which is also the
image of sandboxes: both share their first layer, and no registry is needed.
`PADDOCK_TEST_NODE_IMAGES=<file>` uses an existing archive, even if it is outdated.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

from paddock.app.up import envoy
from tests.cluster.binaries import ROOT
from tests.cluster.kubelet import base_rootfs, build_hold

PADDOCK = "localhost/paddock:local"
SANDBOX = "localhost/base:local"
OTHER = "localhost/other:local"
"""The same files, and one with the image's name."""
SIGN = "etc/image"
PAUSE = "localhost/pause:local"
ENVOY = "localhost/envoy:local"
IMAGE = ROOT / "deploy" / "image"
OLD_SECONDS = 3600
PLACE = Path(os.environ.get("PADDOCK_CACHE", "/var/cache/paddock")) / "node"


class NoImagesError(Exception):
    """The images are missing and cannot be built; the message says why."""


def packer() -> ModuleType:
    """Load `deploy/image/pack`, a program without suffix, as a module."""
    loader = SourceFileLoader("pack", str(IMAGE / "pack"))
    spec = spec_from_loader("pack", loader)
    assert spec is not None
    module = module_from_spec(spec)
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        loader.exec_module(module)
    finally:
        sys.dont_write_bytecode = before
    return module


def _mark(base: Path) -> str:
    """Return a hash of the inputs of the archive."""
    seen = hashlib.sha256(str(base).encode())
    sources = [path for path in (ROOT / "src").rglob("*") if path.suffix not in ("", ".pyc")]
    sources = [path for path in sources if ".egg-info" not in str(path)]
    own = [ROOT / "pyproject.toml", ROOT / "requirements" / "run.txt", Path(__file__)]
    for path in sorted([*sources, *own, *IMAGE.iterdir()]):
        if path.is_file():
            seen.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return seen.hexdigest()[:16]


def archive() -> Path:
    """Return the archive; build it if needed."""
    if given := os.environ.get("PADDOCK_TEST_NODE_IMAGES"):
        return Path(given)
    base = base_rootfs()
    if base is None:
        raise NoImagesError("the base image is not built (`paddock image build-base`)")
    PLACE.mkdir(parents=True, exist_ok=True)
    with (PLACE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        made = PLACE / f"images-{_mark(base)}.tar"
        if not made.exists():
            for old in PLACE.glob("images-*"):
                # Another checkout may be using its own archive.
                if old.stat().st_mtime < time.time() - OLD_SECONDS:
                    old.unlink()
            _build(base, made)
        os.utime(made)
    return made


def _build(base: Path, target: Path) -> None:
    command = [str(IMAGE / "build-rootfs"), str(PLACE)]
    done = subprocess.run(
        command,
        env={**os.environ, "FROM": str(base)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise NoImagesError(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}")
    pause = PLACE / "pause"
    pause.mkdir(exist_ok=True)
    build_hold(pause)
    other = PLACE / "other"
    (other / SIGN).parent.mkdir(parents=True, exist_ok=True)
    (other / SIGN).write_text(OTHER)
    tls = PLACE / "envoy"
    (tls / "usr/local/bin").mkdir(parents=True, exist_ok=True)
    shutil.copy(envoy.binary(), tls / "usr/local/bin/envoy")
    pack = packer()
    pack.LEVEL = 0
    draft = target.with_suffix(".draft")
    shell = {"Cmd": ["/bin/bash"], "User": "user"}
    pack.pack(
        draft,
        [
            (PAUSE, [pause], {"Entrypoint": ["/hold"]}),
            (SANDBOX, [base], shell),
            (OTHER, [base, other], shell),
            (ENVOY, [base, tls], shell),
            (PADDOCK, [base, PLACE / "layer"], pack.CONFIG),
        ],
    )
    draft.rename(target)


if __name__ == "__main__":
    try:
        print(archive())
    except NoImagesError as error:
        sys.exit(f"error: {error}")
